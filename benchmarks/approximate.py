"""Measure the cost of recall in time, bytes and build, for HNSW (hnswlib and Faiss) and IVF.

    python benchmarks/approximate.py [passages]

Every index is one of ours, over the same views: its candidates are scored again with all their views, so recall is of
passages, against exhaustive search. One thread; questions in batches of 32. Three options are varied: the beam that
counts passages instead of vectors, the number of vectors fetched for a passage, and the insertion of vectors by
descending norm, over passages whose norms differ.

Shapes: Q questions, P passages, N vectors, D dimension.
"""

import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import faiss
import hnswlib  # pyrefly: ignore[missing-import]
import matplotlib
import numpy as np
import synthetic
import torch
from measure import FOLDER, Bar, Part, interleave, write

from mvr_ray.index.base import IndexParams, ShardIndex, default_factory, measured_recall
from mvr_ray.index.candidates import ApproximateIndex
from mvr_ray.index.hnsw_index import HNSW_FILE, LEVEL_SEED
from mvr_ray.index.kinds import build_index, open_index
from mvr_ray.types import EmbeddingBlock, FloatArray

matplotlib.use("Agg")
import matplotlib.pyplot as plt

VIEWS, DIMENSION, K = 8, 384, 100
PASSAGES, UNEVEN_PASSAGES, UNEVEN = 10_000, 2_000, 0.2
BATCH, QUESTIONS = 32, 256
TIMED = 64
NOISE = 0.05
DEFAULT = IndexParams()
HNSW, IVF = IndexParams("hnsw"), IndexParams("faiss", default_factory(DIMENSION))


class Setting(NamedTuple):
    """Search settings of a built index. `fetch`: vectors fetched at first for each requested passage."""

    name: str
    params: IndexParams
    fetch: int = ApproximateIndex.first_fetch
    beam: int = 0


class BuiltIndex(NamedTuple):
    """An index and its settings. `family` is the colour in the plot."""

    family: str
    params: IndexParams
    settings: list[Setting]


class Point(NamedTuple):
    """Measurements of one setting of one index. Bytes are the index's files and the stored vectors, per passage."""

    name: str
    family: str
    recall: float
    queries_per_s: float
    bytes: float
    build_s: float

    def beats(self, other: "Point") -> bool:
        """Whether this is no worse in recall, speed and bytes, and clearly better in one."""
        better = self.recall > other.recall + 0.002 or self.bytes < other.bytes * (1 - NOISE)
        return (
            self.recall >= other.recall
            and self.bytes <= other.bytes
            and self.queries_per_s >= other.queries_per_s * (1 - NOISE)
            and (better or self.queries_per_s > other.queries_per_s * (1 + NOISE))
        )


def hnsw(family: str, params: IndexParams, breadths: Sequence[int]) -> BuiltIndex:
    """`breadths`: of the beam, in vectors; at least the number of fetched vectors."""
    name = f"{family} M={params.hnsw_m}"
    settings = [Setting(f"{name} ef={ef}", dataclasses.replace(params, hnsw_ef_search=ef)) for ef in breadths]
    return BuiltIndex(family, params, settings)


def ivf(
    params: IndexParams, probes: Sequence[int], fetches: Sequence[int] = (ApproximateIndex.first_fetch,)
) -> BuiltIndex:
    settings = [
        Setting(f"{params.factory} nprobe={n} fetch={f}x", dataclasses.replace(params, nprobe=n), fetch=f)
        for n in probes
        for f in fetches
    ]
    return BuiltIndex(f"Faiss {params.factory}", params, settings)


def candidates() -> list[BuiltIndex]:
    """List the compared indexes, with the defaults at their default settings."""
    first = hnsw("hnswlib", HNSW, (HNSW.hnsw_ef_search, 1200))
    first.settings.insert(0, Setting("hnswlib M=32 ef=128 fetch=3x", HNSW, fetch=3))
    for beam in (128, 200):
        first.settings.append(Setting(f"hnswlib M=32, beam of {beam} passages", HNSW, fetch=1, beam=beam))
    return [
        BuiltIndex("flat", DEFAULT, [Setting("flat", DEFAULT)]),
        BuiltIndex("flat", IndexParams(scan="int8"), [Setting("flat, scan int8", IndexParams(scan="int8"))]),
        first,
        hnsw("hnswlib", dataclasses.replace(HNSW, hnsw_m=16, hnsw_ef_construction=100), (128, 1200)),
        hnsw("Faiss HNSW", IndexParams("faiss", "HNSW32,Flat", hnsw_ef_construction=100), (128, 1200)),
        ivf(dataclasses.replace(IVF, factory="IVF256,SQfp16"), (16, 32, 64)),
        ivf(dataclasses.replace(IVF, factory="IVF256,SQ8"), (16, 32, 64)),
        ivf(dataclasses.replace(IVF, factory="IVF256,PQ96x4fs"), (32, 64), (3, 6, 12)),
        ivf(dataclasses.replace(IVF, factory="IVF256,PQ192x4fs"), (32, 64), (3, 6, 12)),
    ]


def open_setting(setting: Setting, blocks: list[EmbeddingBlock], folder: Path) -> ShardIndex:
    index = open_index(setting.params, blocks, folder, threads=1)
    if isinstance(index, ApproximateIndex):
        index.first_fetch, index.beam_passages = setting.fetch, setting.beam
    return index


def asking(index: ShardIndex, queries_QD: FloatArray) -> Callable[[], None]:
    def ask() -> None:
        for at in range(0, len(queries_QD), BATCH):
            index.search(queries_QD[at : at + BATCH], K)

    return ask


def measure(part: Part, blocks: list[EmbeddingBlock], queries_QD: FloatArray, scratch: Path) -> list[Point]:
    flat = open_index(DEFAULT, blocks, scratch, threads=1)
    figures: dict[str, tuple[str, float, float, float]] = {}
    cases: dict[str, Callable[[], None]] = {}
    at_rest = sum(block.vectors_ND.nbytes for block in blocks)
    for number, candidate in enumerate(candidates()):
        folder = scratch / str(number)
        folder.mkdir()
        start_s = time.perf_counter()
        build_index(candidate.params, blocks, folder)
        build_s = time.perf_counter() - start_s
        size = (at_rest + sum(path.stat().st_size for path in folder.iterdir())) / flat.num_passages
        for setting in candidate.settings:
            index = open_setting(setting, blocks, folder)
            recall = measured_recall(index, flat, queries_QD, K)
            figures[setting.name] = (candidate.family, recall, size, build_s)
            cases[setting.name] = asking(index, queries_QD[:TIMED])
            print(f"{setting.name}: recall {recall:.4f}, {size:.0f} bytes, built in {build_s:.1f} s", flush=True)
    samples = interleave(cases)
    part.add(samples, TIMED)
    points = []
    for name, seconds in samples.items():
        family, recall, size, build_s = figures[name]
        points.append(Point(name, family, recall, TIMED / float(np.median(seconds)), size, build_s))
    return points


def by_norm(blocks: list[EmbeddingBlock], folder: Path) -> None:
    """The default hnswlib graph, vectors inserted by descending norm."""
    [block] = blocks
    vectors_ND = block.vectors_ND.astype(np.float32)
    order = np.argsort(-np.linalg.norm(vectors_ND, axis=1), kind="stable")
    graph = hnswlib.Index(space="ip", dim=vectors_ND.shape[1])
    graph.init_index(len(vectors_ND), M=HNSW.hnsw_m, ef_construction=HNSW.hnsw_ef_construction, random_seed=LEVEL_SEED)
    graph.add_items(vectors_ND[order], order, num_threads=1)
    graph.save_index(str(folder / HNSW_FILE))


def insertion(scratch: Path) -> Iterator[tuple[str, float, float]]:
    """Recall and questions a second of both orders of insertion, at two breadths, over norms that differ."""
    shape = synthetic.Shape(UNEVEN_PASSAGES, VIEWS, DIMENSION)
    views_ND = np.concatenate(list(synthetic.vectors(shape, synthetic.SNIPPET_MEANS, seed=2, falling=True)))
    spread_P = np.exp(UNEVEN * np.random.default_rng(2).standard_normal(shape.passages)).astype(np.float32)
    queries_QD = synthetic.questions(views_ND, QUESTIONS, 3, falling=True)
    blocks = [synthetic.block((views_ND * np.repeat(spread_P, VIEWS)[:, None]).astype(np.float16), VIEWS)]
    flat = open_index(DEFAULT, blocks, scratch, threads=1)
    folders = {"in order": scratch / "in-order", "by descending norm": scratch / "by-norm"}
    for name, folder in folders.items():
        folder.mkdir()
        build_index(HNSW, blocks, folder) if name == "in order" else by_norm(blocks, folder)
    cases, recalls = {}, {}
    for ef in (HNSW.hnsw_ef_search, 600):
        for name, folder in folders.items():
            index = open_index(dataclasses.replace(HNSW, hnsw_ef_search=ef), blocks, folder, threads=1)
            recalls[f"{name}, ef={ef}"] = measured_recall(index, flat, queries_QD, K)
            cases[f"{name}, ef={ef}"] = asking(index, queries_QD[:TIMED])
    for name, seconds in interleave(cases).items():
        yield name, recalls[name], TIMED / float(np.median(seconds))


def plot(points: Sequence[Point], target: Path) -> None:
    """Plot recall against speed, a colour per family; a dot's area is its bytes per passage; the front is a line."""
    figure, axes = plt.subplots(figsize=(9, 6))
    for number, family in enumerate(dict.fromkeys(point.family for point in points)):
        mine = [point for point in points if point.family == family]
        axes.scatter(
            [point.recall for point in mine],
            [point.queries_per_s for point in mine],
            [point.bytes / 100 for point in mine],
            label=family,
            alpha=0.7,
            color=f"C{number}",
        )
    front = sorted(point for point in points if not any(other.beats(point) for other in points))
    front.sort(key=lambda point: point.recall)
    axes.plot([point.recall for point in front], [point.queries_per_s for point in front], "k:", linewidth=1)
    for point in front:
        axes.annotate(
            point.name, (point.recall, point.queries_per_s), fontsize=7, xytext=(4, 4), textcoords="offset points"
        )
    axes.set_yscale("log")
    axes.set_xlabel("recall@100 of passages")
    axes.set_ylabel("questions a second, one thread, batches of 32")
    axes.legend(fontsize=8, loc="lower left")
    axes.grid(alpha=0.3)
    figure.tight_layout()
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=130)


def rivals(points: Sequence[Point], name: str) -> list[str]:
    """Return the approximate settings that beat this one."""
    [default] = [point for point in points if point.name == name]
    return [other.name for other in points if other.family != "flat" and other.beats(default)]


def main(passages: int) -> None:
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    shape = synthetic.Shape(passages, VIEWS, DIMENSION)
    views_ND = np.concatenate(
        [part.astype(np.float16) for part in synthetic.vectors(shape, synthetic.SNIPPET_MEANS, falling=True)]
    )
    queries_QD = synthetic.questions(views_ND, QUESTIONS, falling=True)
    part = Part("approximate", "Approximate search", "queries")
    with tempfile.TemporaryDirectory() as scratch:
        points = measure(part, [synthetic.block(views_ND, VIEWS)], queries_QD, Path(scratch))
        orders = list(insertion(Path(scratch)))
    plot(points, FOLDER / "approximate.png")
    defaults = (
        f"hnswlib M={HNSW.hnsw_m} ef={HNSW.hnsw_ef_search}",
        f"{IVF.factory} nprobe={IVF.nprobe} fetch={ApproximateIndex.first_fetch}x",
    )
    for name in defaults:
        better = rivals(points, name)
        note = f"beaten by {', '.join(better)}" if better else ""
        part.bars.append(Bar(f"settings that beat our default, {name}", len(better), 0, False, "settings", note))
    part.facts = {
        "passages": passages,
        "views": VIEWS,
        "k": K,
        "view-pair cosine": synthetic.SNIPPET_MEANS,
        "faiss-cpu": faiss.__version__,
        "plot": "approximate.png",
        **{
            point.name: f"recall {point.recall:.4f}, {point.queries_per_s:.0f} questions/s, {point.bytes:.0f} bytes a "
            f"passage, built in {point.build_s:.1f} s"
            for point in points
        },
        **{
            f"norms spread by {UNEVEN:g}, hnswlib, inserted {name}": f"recall {recall:.4f}, {speed:.0f} questions/s"
            for name, recall, speed in orders
        },
    }
    write(part)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else PASSAGES)
