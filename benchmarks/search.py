"""Compare exact search on a CPU: our flat index and faiss-cpu's IndexFlatIP over the same memory.

    python benchmarks/search.py [passages]

A passage scores as its best view, and a search returns 100 distinct passages. Faiss ranks vectors, so it fetches more
of them, in three ways: four times as many, the most that these views need (the kindest case); twice as many, doubled
for questions that still lack passages (adaptive); and eight times, the most that similar views can need. Faiss is
measured as installed, and with BLAS: since its default threshold (`distance_compute_blas_threshold`) was raised from 20
questions to 128,000, it processes even the questions of a batch one by one, which costs most of its speed; the cases
with BLAS set it to 20 again. One by one, its time is that of one question times their number, so that a batch of 256 is
extrapolated from the batch of 32. One question also runs over an array aligned to a cache line of 64 bytes. Faiss
searches one question on one thread and loses time if it may use more, so bars of several threads compare with the
faster of its runs on one thread and on all.

Every answer is compared with every other: the same passages, except ties in float32, and the same scores.

Shapes: Q questions, N vectors, D dimension, F vectors fetched, K passages wanted.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import faiss
import numpy as np
import synthetic
import torch
from floors import has_bfloat16, matrix_rate, read_bandwidth
from measure import Bar, Part, interleave, speedup, write
from numpy.typing import NDArray

from mvr_ray.core.searching.codes import encode
from mvr_ray.core.searching.kernels import TorchKernel
from mvr_ray.core.searching.native import NativeKernel, library
from mvr_ray.index.flat import FlatIndex
from mvr_ray.types import FloatArray, IntArray

VIEWS, DIMENSION, K = 8, 384, 100
PASSAGES = 200_000
BATCHES = (1, 32, 256)
THREADS = (1, 2)
KIND, ADAPTIVE, ALIKE = 4, 2, 8
BLAS_FROM, LONGEST_ONE_BY_ONE = 20, 32
ONE_BY_ONE = (f"Faiss, {KIND}x", f"Faiss, from {ADAPTIVE}x", f"Faiss, {ALIKE}x")
ROUNDS, LONG_ROUNDS = 7, 5
SLACK = 2e-6


class Neighbours(NamedTuple):
    rows_QK: IntArray
    scores_QK: FloatArray


class FaissPeer:
    """Faiss, its vectors, and a search for k distinct passages."""

    def __init__(self, shape: synthetic.Shape) -> None:
        self.index = faiss.IndexFlatIP(shape.dimension)
        for part in synthetic.vectors(shape, synthetic.SEEN):
            self.index.add(part)

    @property
    def vectors_ND(self) -> NDArray[np.float32]:
        """Return its own memory, not a copy."""
        count, dimension = self.index.ntotal, self.index.d
        return faiss.rev_swig_ptr(self.index.get_xb(), count * dimension).reshape(count, dimension)

    def refill(self, shape: synthetic.Shape, view_cosine: float) -> None:
        at = 0
        for part in synthetic.vectors(shape, view_cosine):
            self.vectors_ND[at : at + len(part)] = part
            at += len(part)

    def nearest(self, queries_QD: FloatArray, fetch: int) -> Any:
        """Return scores and numbers of the best vectors."""
        return self.index.search(queries_QD, fetch)

    def search(self, queries_QD: FloatArray, over: int) -> Neighbours:
        """Fetch `over` times as many vectors as passages, doubled for questions with too few passages."""
        rows_QK = np.full((len(queries_QD), K), -1)
        scores_QK = np.full((len(queries_QD), K), -np.inf, np.float32)
        pending, fetch = np.arange(len(queries_QD)), over * K
        while len(pending):
            scores_QF, vectors_QF = self.nearest(queries_QD[pending], fetch)
            lacking = []
            for query, scores_F, rows_F in zip(pending, scores_QF, vectors_QF // VIEWS):
                _, first = np.unique(rows_F, return_index=True)
                if len(first) < K:
                    lacking.append(query)
                    continue
                best = np.sort(first)[:K]
                rows_QK[query], scores_QK[query] = rows_F[best], scores_F[best]
            pending, fetch = np.array(lacking, np.int64), 2 * fetch
        return Neighbours(rows_QK, scores_QK)


class OnLine(FaissPeer):
    """The same numbers in an array aligned to 64 bytes, as no large one from `malloc` is; Faiss's brute force over
    arrays reads it as its index reads its own."""

    def __init__(self, of: FaissPeer) -> None:
        room = np.empty(of.vectors_ND.size + 16, np.float32)
        start = -room.ctypes.data % 64 // 4
        self.own_ND = room[start:][: of.vectors_ND.size].reshape(of.vectors_ND.shape)
        self.own_ND[:] = of.vectors_ND

    @property
    def vectors_ND(self) -> NDArray[np.float32]:
        return self.own_ND

    def nearest(self, queries_QD: FloatArray, fetch: int) -> Any:
        return faiss.knn(queries_QD, self.own_ND, fetch, metric=faiss.METRIC_INNER_PRODUCT)


def check(name: str, answer: Neighbours, truth: Neighbours) -> None:
    """Check for the same passages and scores; a passage in one list alone must tie with the last, in float32."""
    if not np.allclose(answer.scores_QK, truth.scores_QK, rtol=0, atol=SLACK):
        raise SystemExit(f"{name}: scores differ by {np.abs(answer.scores_QK - truth.scores_QK).max():g}")
    for query, (ours, theirs) in enumerate(zip(answer.rows_QK, truth.rows_QK)):
        for rows, scores, others in ((ours, answer.scores_QK, theirs), (theirs, truth.scores_QK, ours)):
            alone = ~np.isin(rows, others)
            if (scores[query][alone] > scores[query, -1] + SLACK).any():
                raise SystemExit(f"{name}: query {query} has other passages than exhaustive search")


def ours(index: FlatIndex, queries_QD: FloatArray) -> Callable[[], Neighbours]:
    return lambda: Neighbours(*index.search(queries_QD, K)[:2])


def theirs(peer: FaissPeer, queries_QD: FloatArray, over: int, blas: bool) -> Callable[[], Neighbours]:
    default = faiss.cvar.distance_compute_blas_threshold

    def search() -> Neighbours:
        faiss.cvar.distance_compute_blas_threshold = BLAS_FROM if blas else default
        try:
            return peer.search(queries_QD, over)
        finally:
            faiss.cvar.distance_compute_blas_threshold = default

    return search


def peers(peer: FaissPeer, queries_QD: FloatArray, overs: Sequence[int]) -> dict[str, Callable[[], Neighbours]]:
    """Return Faiss as installed, and with BLAS if there are enough questions for it."""
    labels = {KIND: f"{KIND}x", ADAPTIVE: f"from {ADAPTIVE}x", ALIKE: f"{ALIKE}x"}
    cases = {}
    if len(queries_QD) <= LONGEST_ONE_BY_ONE:
        kindest = overs if len(queries_QD) == 1 else [over for over in overs if over != ADAPTIVE]
        cases |= {f"Faiss, {labels[over]}": theirs(peer, queries_QD, over, False) for over in kindest}
    if len(queries_QD) >= BLAS_FROM:
        cases |= {f"Faiss with BLAS, {labels[over]}": theirs(peer, queries_QD, over, True) for over in overs}
    return cases


def measure(part: Part, name: str, cases: dict[str, Callable[[], Neighbours]], batch: int, threads: int) -> None:
    """Check the cases' answers, then time them in turn. Faiss one by one is checked only at batch 1."""
    torch.set_num_threads(threads)
    faiss.omp_set_num_threads(threads)
    first, *others = [label for label in cases if batch == 1 or label not in ONE_BY_ONE]
    truth = cases[first]()
    for label in others:
        check(f"{name}, {label}", cases[label](), truth)
    samples = interleave(cases, ROUNDS if batch == 1 else LONG_ROUNDS, warm=batch == 1)
    part.add({f"{name}, {label}": seconds for label, seconds in samples.items()}, batch)
    for label, seconds in samples.items():
        print(f"{name}, {label}: {np.median(seconds) * 1e3:.1f} ms", flush=True)


def describe_case(threads: int, batch: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)}, batch {batch}"


def extrapolate(part: Part, prefix: str, threads: int, label: str) -> None:
    """Extrapolate Faiss's time for the largest batch, one question after the other."""
    few, many = LONGEST_ONE_BY_ONE, max(BATCHES)
    seconds = part.samples[f"{prefix}{describe_case(threads, few)}, {label}"]
    part.add(
        {f"{prefix}{describe_case(threads, many)}, {label}, extrapolated": [many / few * one for one in seconds]}, many
    )


def main(passages: int) -> None:
    shape = synthetic.Shape(passages, VIEWS, DIMENSION)
    part = Part.of_kind("search", "Exact search on a CPU", "queries", "" if library() else "avx2")
    bandwidth = {threads: read_bandwidth(threads) for threads in THREADS}
    rate = {threads: matrix_rate(threads) for threads in THREADS}
    short = {threads: matrix_rate(threads, kind="bfloat16") if has_bfloat16() else 0.0 for threads in THREADS}
    peer = FaissPeer(shape)
    queries_QD = synthetic.questions(peer.vectors_ND, max(BATCHES))
    whole = synthetic.block(peer.vectors_ND, VIEWS)
    half = whole._replace(vectors_ND=peer.vectors_ND.astype(np.float16))
    codes = encode_all(peer.vectors_ND)
    values = shape.passages * VIEWS * DIMENSION
    print("vectors ready", flush=True)
    for threads in THREADS:
        torch.set_num_threads(threads)
        kinds = {
            "fp32": (4, FlatIndex([whole], threads=threads)),
            "fp16": (2, FlatIndex([half], threads=threads)),
            "int8 + re-scoring": (1, FlatIndex([whole], codes=[codes], threads=threads)),
            "fp32, not compiled": (4, FlatIndex([whole], kernel=TorchKernel(), threads=threads)),
        }
        if library():
            without = FlatIndex([whole], threads=threads)
            without.scan.kernel.tiles = without.scan.kernel.coarse = False
            kinds["fp32, float32 products"] = (4, without)
        for batch in BATCHES:
            name, batch_QD = describe_case(threads, batch), queries_QD[:batch]
            cases = peers(peer, batch_QD, (KIND, ADAPTIVE))
            left_out = ("fp32, float32 products",) if batch == 1 else ("fp32, not compiled",) if threads > 1 else ()
            useful = {kind: one for kind, one in kinds.items() if kind not in left_out}
            cases |= {kind: ours(index, batch_QD) for kind, (_, index) in useful.items()}
            measure(part, name, cases, batch, threads)
            for kind, (size, _) in useful.items():
                fastest = max(rate[threads], short[threads] if kind in ("fp32", "fp16") else 0.0)
                compute_s = 2.0 * values * batch / fastest if batch > 1 and size > 1 else 0.0
                part.floors[f"{name}, {kind}"] = max(size * values / bandwidth[threads], compute_s)
        extrapolate(part, "", threads, f"Faiss, {KIND}x")
    del half, codes, kinds, useful
    aligned_peer = OnLine(peer)
    for threads in THREADS:
        index = FlatIndex([whole._replace(vectors_ND=aligned_peer.vectors_ND)], threads=threads)
        cases = {**peers(aligned_peer, queries_QD[:1], (KIND,)), "fp32": ours(index, queries_QD[:1])}
        measure(part, f"on a line, {describe_case(threads, 1)}", cases, 1, threads)
    del aligned_peer, index
    peer.refill(shape, synthetic.ALIKE)
    print("similar views", flush=True)
    for threads in THREADS:
        index = FlatIndex([whole], threads=threads)
        for batch in BATCHES:
            batch_QD = queries_QD[:batch]
            cases = {**peers(peer, batch_QD, (ALIKE,)), "fp32": ours(index, batch_QD)}
            if threads > 1 and batch > 1:
                cases.pop(f"Faiss, {ALIKE}x", None)
            measure(part, f"alike, {describe_case(threads, batch)}", cases, batch, threads)
        if threads == 1:
            extrapolate(part, "alike, ", threads, f"Faiss, {ALIKE}x")
    part.facts = {
        "passages": shape.passages,
        "vectors": shape.passages * VIEWS,
        "dimension": DIMENSION,
        "k": K,
        "view-pair cosine": f"{synthetic.SEEN}, and {synthetic.ALIKE} where alike",
        "faiss-cpu": f"{faiss.__version__} ({faiss.get_compile_options().strip()})",
        "compiled loops": ("with AMX" if NativeKernel().tiles else "without AMX") if library() else "for AVX2",
        **{f"memory, {threads} thread(s), GB/s": value / 1e9 for threads, value in bandwidth.items()},
        **{f"matrix rate, {threads} thread(s), GFLOP/s": value / 1e9 for threads, value in rate.items()},
        **{
            f"matrix rate of bfloat16, {threads} thread(s), GFLOP/s": value / 1e9 if value else NO_BFLOAT16
            for threads, value in short.items()
        },
    }
    part.bars = bars(part)
    write(part)


def encode_all(vectors_ND: FloatArray, at_once: int = 65536) -> Any:
    parts = [encode(vectors_ND[at : at + at_once]) for at in range(0, len(vectors_ND), at_once)]
    return type(parts[0])(*map(np.concatenate, zip(*parts)))


NO_BFLOAT16 = "no such products"
NOTE_ONE = (
    "Both only read. Faiss's own memory begins between two lines of 64 bytes, and its loads cross them, ours do not; "
    "`on a line` both read an array that begins on one (notes.md)."
)
NOTE_FASTER = "Faiss searches one question on one thread, as its wiki says, and is slower when it is allowed two"
NOTES_BLAS = {
    32: "a batch of 32 is bound by memory: its floor is the time of reading the vectors once; what is above it is "
    "rounding rows to bfloat16, candidates and exact scores",
    256: "vectors and questions rounded to bfloat16 are multiplied once; what is above the floor is rounding rows, "
    "candidates and exact scores, which are read from all over memory",
}
"""Against Faiss with BLAS, which is given as much over-fetch as is enough, on a processor with bfloat16."""
NOTE_FP32_BLAS = (
    "without bfloat16 both multiply in float32; the table says how much of our time these products alone take at the "
    "machine's rate, which leaves no room for three times Faiss's speed"
)


def bars(part: Part) -> list[Bar]:
    """Set the targets: against Faiss as installed, then the same against Faiss with BLAS."""
    has_short = part.facts["matrix rate of bfloat16, 1 thread(s), GFLOP/s"] != NO_BFLOAT16
    notes_blas = NOTES_BLAS if has_short else dict.fromkeys(NOTES_BLAS, NOTE_FP32_BLAS)
    targets = []
    for threads in THREADS:
        for batch in BATCHES:
            for prefix, over in (
                ("", f"{KIND}x"),
                ("", f"from {ADAPTIVE}x"),
                ("on a line, ", f"{KIND}x"),
                ("alike, ", f"{ALIKE}x"),
            ):
                for label in (f"Faiss, {over}", f"Faiss, {over}, extrapolated", f"Faiss with BLAS, {over}"):
                    if f"{prefix}{describe_case(threads, batch)}, {label}" in part.samples:
                        note = notes_blas.get(batch, "") if "BLAS" in label else NOTE_ONE if batch == 1 else ""
                        least = 1.0 if batch == 1 else 3.0
                        targets.append(against_faiss(part, prefix, threads, batch, label, least, note))
        name = describe_case(threads, 1)
        for kind, least in (("fp16", 1.6), ("int8 + re-scoring", 2.5)):
            targets.append(
                Bar(
                    f"{name}: {kind} against our fp32", speedup(part.samples, f"{name}, {kind}", f"{name}, fp32"), least
                )
            )
        rate_name = f"the measured {'bfloat16' if has_short else 'fp32'} matrix rate"
        shares = [(1, "fp32", "the measured memory bandwidth"), (256, "fp32", rate_name)]
        if f"{describe_case(threads, 256)}, fp32, float32 products" in part.samples:
            shares.append((256, "fp32, float32 products", "the measured fp32 matrix rate"))
        for batch, kind, what in shares:
            case = f"{describe_case(threads, batch)}, {kind}"
            share = part.floors[case] / float(np.median(part.samples[case]))
            note = (
                "above 100 %: the machine was slower while its rates were measured; run it again" if share > 1 else ""
            )
            targets.append(Bar(f"{case}: share of {what}", 100 * share, 70, True, "%", note))
    return targets


def against_faiss(part: Part, prefix: str, threads: int, batch: int, label: str, least: float, note: str) -> Bar:
    """Compare our fp32 with the faster of Faiss's runs on one thread and on `threads`; runs on different threads do not
    take turns, so their ratio is that of medians."""
    name, alone = (f"{prefix}{describe_case(count, batch)}" for count in (threads, 1))
    ours_s, own_s = part.samples[f"{name}, fp32"], part.samples[f"{name}, {label}"]
    alone_s = part.samples.get(f"{alone}, {label}", own_s)
    if np.median(alone_s) < np.median(own_s):
        ratio = float(np.median(alone_s) / np.median(ours_s))
        return Bar(f"{name}: fp32 against {label}, on one thread", ratio, least, note=f"{NOTE_FASTER}. {note}")
    return Bar(
        f"{name}: fp32 against {label}", speedup(part.samples, f"{name}, fp32", f"{name}, {label}"), least, note=note
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else PASSAGES)
