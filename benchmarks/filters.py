"""Measure the cost of a filter, by the share of passages that pass it.

    python benchmarks/filters.py [passages]

Random masks over synthetic views pass 1 to 100 % of the passages: exact search of vectors and codes, one question and
batches, one thread; every answer is compared with that of an index of the passing passages alone. Approximate kinds,
with recall against exact search under the same mask. Then SQuAD's development paragraphs, prepared and indexed, are
searched through a router with filters over their fields: the first search under a filter, which evaluates it, and
later ones.

Shapes: Q questions, P passages, V views, D dimension.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import synthetic
import torch
from measure import Bar, Part, interleave, speedup, write
from numpy.typing import NDArray
from squad_files import DEV

from mvr_ray.config import RunConfig, SourceConfig
from mvr_ray.core.searching.codes import encode
from mvr_ray.distributed.indexing import build_index
from mvr_ray.distributed.router import open_router
from mvr_ray.index.base import IndexParams, ShardIndex, default_factory
from mvr_ray.index.flat import FlatIndex
from mvr_ray.index.kinds import build_index as build_shard_index
from mvr_ray.index.kinds import open_index
from mvr_ray.store.files import Store
from mvr_ray.store.formats.records import PassageRecord, QuestionRecord
from mvr_ray.store.formats.sources import read_source
from mvr_ray.store.prepare import prepare
from mvr_ray.types import EmbeddingBlock

VIEWS, DIMENSION, K = 8, 384, 100
PASSAGES, APPROXIMATE_PASSAGES, APPROXIMATE_K = 25_000, 5_000, 10
SHARES = (0.01, 0.1, 0.5, 1.0)
BATCHES = (1, 32)
ROUNDS = 21
FEW = (
    f"{K + 1} of the 250 passages that pass are scored exactly for each query, half of the time; memory is so "
    "fast that scanning all passages takes little more than four times as long"
)
Mask = NDArray[np.bool_]


def block_of(passages: int, dtype: type[np.floating]) -> EmbeddingBlock:
    shape = synthetic.Shape(passages, VIEWS, DIMENSION)
    vectors_ND = np.concatenate([part.astype(dtype) for part in synthetic.vectors(shape, synthetic.SNIPPET_MEANS)])
    return synthetic.block(vectors_ND, VIEWS)


def passing_alone(block: EmbeddingBlock, mask_P: Mask) -> EmbeddingBlock:
    ids = [name for name, passes in zip(block.ids, mask_P) if passes]
    return synthetic.block(block.vectors_ND[np.repeat(mask_P, VIEWS)], VIEWS, ids)


def masks_of(passages: int) -> dict[float, Mask]:
    chances_P = np.random.default_rng(7).random(passages)
    return {share: chances_P < share for share in SHARES}


def measure_exact(part: Part, passages: int) -> None:
    masks = masks_of(passages)
    for name, dtype, with_codes in (
        ("fp32", np.float32, False),
        ("fp16", np.float16, False),
        ("int8", np.float16, True),
    ):
        block = block_of(passages, dtype)
        index = FlatIndex([block], codes=[encode(block.vectors_ND)] if with_codes else None, threads=1)
        queries_QD = synthetic.questions(block.vectors_ND, max(BATCHES))
        for mask_P in masks.values():
            hits, rows = index.search(queries_QD, K, mask_P), np.flatnonzero(mask_P)
            alone = FlatIndex([passing_alone(block, mask_P)], threads=1).search(queries_QD, K)
            assert (hits.rows_QK == np.where(alone.rows_QK >= 0, rows[alone.rows_QK], -1)).all()
            assert (hits.scores_QK == alone.scores_QK).all() and (hits.frontier_Q == alone.frontier_Q).all()
        for batch in BATCHES:
            asked_QD = queries_QD[:batch]
            cases: dict[str, Callable[[], object]] = {
                f"{name}, batch {batch}, no filter": lambda index=index, asked_QD=asked_QD: index.search(asked_QD, K)
            }
            for share, mask_P in masks.items():
                cases[f"{name}, batch {batch}, {share:.0%} pass"] = (
                    lambda index=index, asked_QD=asked_QD, mask_P=mask_P: index.search(asked_QD, K, mask_P)
                )
            samples = interleave(cases, ROUNDS)
            part.add(samples, batch)
            whole = f"{name}, batch {batch}, no filter"
            for share in SHARES:
                own = f"{name}, batch {batch}, {share:.0%} pass"
                bar = 4.0 if share == 0.01 else 0.9  # a tenth is the noise of a machine that others use, too
                ratio = speedup(samples, own, whole)
                note = "" if ratio >= bar else FEW
                part.bars.append(Bar(f"{own}: times as fast as without a filter", ratio, bar, note=note))


def measure_approximate(part: Part, scratch: Path) -> None:
    block, masks = block_of(APPROXIMATE_PASSAGES, np.float16), masks_of(APPROXIMATE_PASSAGES)
    queries_QD = synthetic.questions(block.vectors_ND, 64)
    flat = FlatIndex([block], threads=1)
    for params in (IndexParams("hnsw"), IndexParams("faiss", default_factory(DIMENSION))):
        folder = scratch / params.kind
        folder.mkdir()
        build_shard_index(params, [block], folder)
        index = open_index(params, [block], folder, threads=1)
        cases: dict[str, Callable[[], object]] = {
            f"{params.kind}, no filter": lambda index=index: index.search(queries_QD, APPROXIMATE_K)
        }
        for share, mask_P in masks.items():
            name = f"{params.kind}, {share:.0%} pass"
            cases[name] = lambda index=index, mask_P=mask_P: index.search(queries_QD, APPROXIMATE_K, mask_P)
            part.facts[f"recall of {name}"] = round(recall(index, flat, queries_QD, mask_P), 4)
        part.add(interleave(cases, 5), len(queries_QD))


def recall(index: ShardIndex, flat: FlatIndex, queries_QD: NDArray[np.float32], mask_P: Mask) -> float:
    hits, truth = index.search(queries_QD, APPROXIMATE_K, mask_P), flat.search(queries_QD, APPROXIMATE_K, mask_P)
    pairs = zip(hits.rows_QK.tolist(), truth.rows_QK.tolist())
    both = [len({*some} & {*best} - {-1}) / max(len({*best} - {-1}), 1) for some, best in pairs]
    return float(np.mean(both))


def squad_rows() -> Iterator[dict]:
    """Return development paragraphs, with a number from 0 to 99 and the length of the text as fields."""
    for record in read_source(SourceConfig(path=str(DEV), format="squad")):
        if isinstance(record, PassageRecord):
            passage = record.passage
            number = int.from_bytes(passage.id.encode()[-4:], "big") * 37 % 100
            yield {
                "id": passage.id,
                "title": passage.title,
                "text": passage.text,
                "n": number,
                "chars": len(passage.text),
            }


def measure_squad(part: Part, scratch: Path) -> None:
    source = scratch / "squad.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in squad_rows()))
    run = RunConfig.model_validate(
        {
            "store": {"path": str(scratch / "store")},
            "prepare": {"sources": [{"path": str(source)}], "fields": {"n": "int", "chars": "int"}},
            "index": {"encoder": "untrained"},
        }
    )
    prepare(run.prepare, Store(run.store.path))
    build_index.index(run)
    rows = {row["id"]: row for row in squad_rows()}
    questions = [
        record.question.text
        for record in read_source(SourceConfig(path=str(DEV), passages=False, questions="q"))
        if isinstance(record, QuestionRecord)
    ][::240][:32]
    with open_router(run, local=True) as router:
        queries_QD = router.embed(questions)
        every = router.search(queries_QD, len(rows))
        cases: dict[str, Callable[[], object]] = {"SQuAD, no filter": lambda: router.search(queries_QD, 10)}
        for share in SHARES:
            condition = {"n": {"lt": round(100 * share)}, "chars": {"gt": 0}}
            name = f"SQuAD, {share:.0%} pass"
            began = time.perf_counter()
            answer = router.search(queries_QD, 10, filter=condition)
            part.facts[f"first search, {name}, ms"] = round(1000 * (time.perf_counter() - began), 1)
            for all_hits, hits in zip(every.hits, answer.hits):
                assert hits == [hit for hit in all_hits if rows[hit.passage_id]["n"] < round(100 * share)][:10]
            assert answer.exact.certified
            cases[name] = lambda condition=condition: router.search(queries_QD, 10, filter=condition)
        part.facts["SQuAD passages"] = len(rows)
        part.add(interleave(cases, ROUNDS), len(questions))


def main(passages: int) -> None:
    torch.set_num_threads(1)
    part = Part("filters", "Filtered search", "queries")
    part.facts |= {"passages": passages, "views": VIEWS, "dimension": DIMENSION, "k": K, "threads": 1}
    part.facts |= {"approximate passages": APPROXIMATE_PASSAGES, "approximate k": APPROXIMATE_K}
    with tempfile.TemporaryDirectory() as folder:
        measure_exact(part, passages)
        measure_approximate(part, Path(folder))
        measure_squad(part, Path(folder))
    write(part)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else PASSAGES)
