"""Compare three embedded engines over the same multi-view passages: mvr_ray, Qdrant Edge and LanceDB.

    python benchmarks/engines.py [passages]     # 20,000 by default; 200,000 takes 10 GB of disk

Each has a process of its own; peers also have an environment of their own (`.peers/`). One question at a time, exact
search; engines take turns, so that other load on the machine affects them alike. Over more than 20,000 passages only
those of one precision and number of threads take turns, as all together would not fit in memory. All answers are
compared with those of a matrix product. Real passages come first: all SQuAD paragraphs of eight sentences or more, with
the snippet means of MiniLM as views; the others are synthetic with the same statistics (`synthetic`). Values are exact
in half precision, so an engine of float16 has the same ones.

Shapes: Q questions, P passages, V views per passage, D dimension.
"""

import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import synthetic
import torch
from machine import ROOT
from measure import Bar, Part, speedup, write
from numpy.typing import NDArray
from peers import PEERS, Peer, environment
from squad_files import DEV, TRAIN

from mvr_ray.config import RunConfig, SourceConfig
from mvr_ray.core.encoding.snippets import Splitter
from mvr_ray.core.searching.native import library
from mvr_ray.distributed.encoders import make_encoder
from mvr_ray.distributed.indexing.encode import embed_chunk
from mvr_ray.store.files import Store
from mvr_ray.store.formats.records import PassageRecord
from mvr_ray.store.formats.sources import read_source

VIEWS, DIMENSION = 8, 384
PASSAGES = 20_000
QUESTIONS, AT_ONCE, ROUNDS = 240, 12, 7
LONG_QUESTIONS, LONG_ROUNDS = 2, 3
"""For what takes seconds."""
BATCH, BATCH_TITLE = 32, "batch of 32, k 10"
SHARES = (1, 10, 50)
EVERY = 100
PINS = {
    "qdrant": ("qdrant-edge-py==0.9.0", "numpy==2.4.6"),
    "lancedb": ("lancedb==0.40.0", "numpy==2.4.6"),
}
FOLDERS = {"qdrant": "qdrant-edge", "lancedb": "lancedb"}
TITLES = {"mvr_ray": "mvr_ray", "qdrant": "Qdrant Edge", "lancedb": "LanceDB"}
TIE, LANCE_TIE = {"fp32": 2e-5, "fp16": 2e-3}, 1e-3
"""By how much a score may be off. Candidates of codes are scored by the vectors, half precision may sum in itself, and
LanceDB's cosine divides by the length of a vector that was rounded."""


CODES = " with codes"
"""Eight-bit codes are scanned, and the candidates scored by the vectors beside them: the answers are the same."""


class Contender(NamedTuple):
    engine: str
    precision: str
    threads: int

    @property
    def tie(self) -> float:
        return LANCE_TIE if self.engine == "lancedb" else TIE[self.precision.removesuffix(CODES)]

    @property
    def title(self) -> str:
        return f"{TITLES[self.engine]}, {self.precision}, {self.threads} thread{'s' * (self.threads > 1)}"


CONTENDERS = [
    Contender(engine, precision + codes, threads)
    for threads in (1, 2)
    for precision in ("fp32", "fp16")
    for engine, codes in (("mvr_ray", ""), ("mvr_ray", CODES), ("qdrant", ""))
] + [Contender("lancedb", "fp32", 2)]


class Case(NamedTuple):
    """A search for every engine: the best k of the passages whose field is below `share`."""

    k: int
    share: int = EVERY

    @property
    def title(self) -> str:
        return f"k {self.k}" + (f", {self.share} % pass" if self.share < EVERY else "")


CASES = [Case(10), Case(100), *(Case(10, share) for share in SHARES)]


def real_views() -> NDArray[np.float16]:
    """Return MiniLM's views of all paragraphs that have eight, cached under .peers/; empty without the data."""
    cache_file = PEERS / "engines-views.npy"
    if not cache_file.exists():
        splitter, passages = Splitter(), []
        for path in (TRAIN, DEV):
            if path.exists():
                records = read_source(SourceConfig(path=str(path), format="squad"))
                own = [record.passage for record in records if isinstance(record, PassageRecord)]
                passages += [passage for passage in own if len(splitter.spans(passage.text)) >= VIEWS]
        encoder = make_encoder(RunConfig.model_validate({"encoder": {"use_title": False}}), Store(str(PEERS)))
        block = embed_chunk(encoder, [one.id for one in passages], encoder.tokenize_passages(passages), 8192, "fp16")
        whole_P = np.diff(block.row_ptr) == VIEWS
        np.save(cache_file, block.vectors_ND[np.repeat(whole_P, np.diff(block.row_ptr))].reshape(-1, VIEWS, DIMENSION))
    return np.load(cache_file)


def make_data(folder: Path, passages: int) -> int:
    """Write vectors, fields, questions and the changes of one passage in a hundred; return how many are real."""
    real_PVD = real_views()[:passages]
    target = np.lib.format.open_memmap(folder / "vectors.npy", "w+", np.float16, (passages, VIEWS, DIMENSION))
    target[: len(real_PVD)] = real_PVD
    at = len(real_PVD)
    shape = synthetic.Shape(passages - at, VIEWS, DIMENSION)
    for made_ND in synthetic.vectors(shape, synthetic.SNIPPET_MEANS, falling=True):
        made_PVD = made_ND.reshape(-1, VIEWS, DIMENSION)
        target[at : at + len(made_PVD)] = made_PVD
        at += len(made_PVD)
    target.flush()
    draw = np.random.default_rng(7)
    fields = np.arange(passages) % EVERY
    draw.shuffle(fields)
    np.save(folder / "fields.npy", fields)
    change_shape = synthetic.Shape(-(-passages // EVERY), VIEWS, DIMENSION)
    changed_ND = np.concatenate(list(synthetic.vectors(change_shape, synthetic.SNIPPET_MEANS, seed=3, falling=True)))
    np.save(folder / "changed.npy", changed_ND.reshape(-1, VIEWS, DIMENSION).astype(np.float16))
    np.save(folder / "queries.npy", synthetic.questions(target.reshape(-1, DIMENSION), QUESTIONS, falling=True))
    task = {"passages": passages, "views": VIEWS, "dimension": DIMENSION}
    (folder / "task.json").write_text(json.dumps(task))
    return len(real_PVD)


class Oracle:
    """Score by a matrix product in float32, a part of the passages at a time."""

    def __init__(self, folder: Path, questions: int) -> None:
        self.queries_QD = np.load(folder / "queries.npy")[:questions]
        self.fields = np.load(folder / "fields.npy")
        vectors_PVD = np.load(folder / "vectors.npy", mmap_mode="r")
        self.scores_QP = np.concatenate(
            [self._score(vectors_PVD[at : at + 5000]) for at in range(0, len(vectors_PVD), 5000)], axis=1
        )

    def _score(self, vectors_PVD: NDArray) -> NDArray[np.float32]:
        flat_ND = np.asarray(vectors_PVD, np.float32).reshape(-1, DIMENSION)
        return (self.queries_QD @ flat_ND.T).reshape(len(self.queries_QD), -1, VIEWS).max(axis=2)

    def change(self, folder: Path) -> None:
        """Apply the update to the scores."""
        self.scores_QP[:, ::EVERY] = self._score(np.load(folder / "changed.npy"))

    def check(self, question: int, case: Case, answer: Sequence[tuple[int, float]], tie: float) -> None:
        """Raise AssertionError unless the answer is the true best k: no passage is repeated, each score is the
        passage's own, and no omitted passage scores higher, all within `tie`."""
        scores_P = np.where(self.fields < case.share, self.scores_QP[question], -np.inf)
        rows = np.array([row for row, _ in answer])
        scores_K = np.array([score for _, score in answer])
        assert len(set(rows.tolist())) == len(rows) == min(case.k, int(np.isfinite(scores_P).sum())), (case, len(rows))
        assert np.abs(scores_P[rows] - scores_K).max() <= tie, (question, case, np.abs(scores_P[rows] - scores_K).max())
        kth = np.partition(scores_P, -len(rows))[-len(rows)]
        assert scores_P[rows].min() >= kth - 2 * tie, (question, case)


class Took(NamedTuple):
    """Seconds per question: by the clock, and of all processors, which other load does not lengthen."""

    seconds: list[float]
    cpu_s: list[float]


def ask(peer: Peer, what: str, oracle: Oracle, case: Case, tie: float, first: int = 0) -> Took:
    """Search, and check the answers."""
    reply = peer.ask(what)
    for number, answer in enumerate(reply["answers"]):
        oracle.check(first + number, case, answer, tie)
    return Took(reply["seconds"], reply["cpu_s"])


def in_turn(part: Part, peers: dict[Contender, Peer], oracle: Oracle, case: Case) -> None:
    """Measure engines in turn: a sample is the median of one round's questions, the same for all engines in a round."""
    for one, took in rounds_of(peers, oracle, case, f"search {case.k} {case.share}", AT_ONCE).items():
        keep(part, case.title, one, [Took(*map(statistics.median, round_)) for round_ in took], 1)


def in_batches(part: Part, peers: dict[Contender, Peer], oracle: Oracle) -> None:
    several = {one: peer for one, peer in peers.items() if one.engine != "lancedb"}  # it has no call for a batch
    for one, took in rounds_of(several, oracle, Case(10), "batch 10", BATCH).items():
        keep(part, BATCH_TITLE, one, [Took(round_.seconds[0], round_.cpu_s[0]) for round_ in took], BATCH)


def rounds_of(
    peers: dict[Contender, Peer], oracle: Oracle, case: Case, what: str, count: int
) -> dict[Contender, list[Took]]:
    """Measure each engine in each round, without a first one. A slow engine has fewer questions and rounds."""
    samples: dict[Contender, list[Took]] = {one: [] for one in peers}
    for number in range(1 + ROUNDS):
        first = number * count % (QUESTIONS - count)
        for one, peer in peers.items():
            slow = one.engine == "lancedb"
            if slow and number > LONG_ROUNDS:
                continue
            took = ask(peer, f"{what} {first} {LONG_QUESTIONS if slow else count}", oracle, case, one.tie, first)
            if number:
                samples[one].append(took)
    return samples


def keep(part: Part, title: str, one: Contender, took: Sequence[Any], work: int) -> None:
    part.add({f"{title}: {one.title}": [round_.seconds for round_ in took]}, work)
    part.add({f"{title}, processor time: {one.title}": [round_.cpu_s for round_ in took]}, work)


def bars(part: Part, contenders: Sequence[Contender]) -> None:
    """Require twice Qdrant's speed at equal precision and threads, by the clock and in processor time."""
    for one in contenders:
        peer = one._replace(engine="qdrant", precision=one.precision.removesuffix(CODES))
        if one.engine != "mvr_ray" or peer not in contenders:
            continue
        for title in (*(case.title for case in CASES), BATCH_TITLE):
            for kind in ("", ", processor time"):
                ratio = speedup(part.samples, f"{title}{kind}: {one.title}", f"{title}{kind}: {peer.title}")
                what = f"{title}{kind}: {one.title}, against {peer.title}"
                part.bars.append(Bar(what, ratio, 2.0, note="" if ratio >= 2 else NOTES.get(title, "")))


WHOLE = (
    "both read every vector once, at the speed of memory: twice as fast can only be what reads fewer bytes, as codes "
    "do, whose candidates are scored by the vectors"
)
FEW = (
    "the scan of what passes is short; what is left is the router's own work, 0.2 to 0.3 ms of Python (filter, mask, "
    "merging, certificate, hits), which Qdrant does in one call"
)
HALF = "both read what passes, at little less than the speed of memory; only codes read fewer bytes"
NOTES = {"k 10": WHOLE, "k 100": WHOLE, "k 10, 1 % pass": FEW, "k 10, 10 % pass": FEW, "k 10, 50 % pass": HALF}


def groups(passages: int) -> list[list[Contender]]:
    """Group the contenders that are open together and take turns: all of them, or those of one precision and number of
    threads, so that their mapped files fit in memory."""
    if passages <= PASSAGES:
        return [CONTENDERS]
    kinds = dict.fromkeys((one.precision.removesuffix(CODES), one.threads) for one in CONTENDERS)
    return [[one for one in CONTENDERS if (one.precision.removesuffix(CODES), one.threads) == kind] for kind in kinds]


def main(passages: int) -> None:
    torch.set_num_threads(2)
    PEERS.mkdir(exist_ok=True)
    name = "engines" if passages == PASSAGES else f"engines-{passages}"
    title = f"Engines inside a program, {passages:,} passages, on a CPU"
    part = Part.of_kind(name, title, "questions", "" if library() else "avx2")
    with tempfile.TemporaryDirectory(dir=PEERS) as scratch:
        real = make_data(Path(scratch), passages)
        for contenders in groups(passages):
            measure(part, contenders, Path(scratch))
    bars(part, CONTENDERS)
    part.facts |= {
        "passages": f"{passages:,}, of which {real:,} are real, {VIEWS} views of {DIMENSION} dimensions each",
        "answers": "all checked against a matrix product",
        "Qdrant Edge, LanceDB": f"{PINS['qdrant'][0]}, {PINS['lancedb'][0]}",
        "load average at the end": Path("/proc/loadavg").read_text().split()[0],
    }
    write(part)


def measure(part: Part, contenders: Sequence[Contender], folder: Path) -> None:
    """Build, open and search the engines, change 1 % of their passages, and remove them."""
    oracle = Oracle(folder, QUESTIONS)
    peers: dict[Contender, Peer] = {}
    with ExitStack() as stack:
        for one in contenders:
            ours = one.engine == "mvr_ray"
            python = Path(sys.executable) if ours else environment(PEERS, FOLDERS[one.engine], PINS[one.engine])
            words = (str(folder), one.engine, one.precision, str(one.threads))
            modules = ROOT if ours else None
            peer = Peer(python, "engine_peer.py", *words, threads=one.threads, modules=modules)
            peers[one] = stack.enter_context(peer)
            build_report = peer.ask("build")
            part.facts[f"{one.title}: built in s"] = round(build_report["seconds"], 1)
            print(one.title, build_report, flush=True)
            peer.ask("close")
            part.facts[f"{one.title}: opened and first answer in s"] = round(peer.ask("open")["seconds"], 3)
        for case in CASES:
            in_turn(part, peers, oracle, case)
        in_batches(part, peers, oracle)
        for one, peer in peers.items():
            part.facts[f"{one.title}: MB on disk, own and mapped memory"] = _megabytes(peer.ask("size"))
        oracle.change(folder)
        for one, peer in peers.items():
            reply = peer.ask(f"update {EVERY}")
            part.facts[f"{one.title}: update of 1 %"] = (
                f"{reply['seconds']:.2f} s to the first answer, of which upsert {reply['upsert_s']:.2f} s; "
                f"{reply['written_bytes'] / 1e6:.1f} MB written, store grown by {reply['grown_bytes'] / 1e6:.1f} MB; "
                f"then {_megabytes(peer.ask('size'))}"
            )
            slow = one.engine == "lancedb"
            count = LONG_QUESTIONS if slow else AT_ONCE
            took = ask(peer, f"search 10 {EVERY} 0 {count}", oracle, Case(10), one.tie)
            keep(part, "k 10, after the update", one, [Took(*pair) for pair in zip(*took)], 1)
    for one in contenders:
        shutil.rmtree(folder / f"{one.engine}-{one.precision}-{one.threads}", ignore_errors=True)


def _megabytes(size: dict[str, Any]) -> str:
    return ", ".join(f"{what} {size[what] / 1e6:.0f}" for what in ("disk", "own", "mapped"))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else PASSAGES)
