"""Time exact search over synthetic views at Wikipedia's size, generated on the device, against the time to read them.

A component of a view is a whole number, the sum of one that its passage's views share and one of its own, each nearly
normal; it is exact in half precision, and any row can be generated again. So `Scan` scans the index on the device like
a real one, and candidates are scored with the true vectors, of which no copy is stored.

Shapes: Q queries, P passages, V views, N vectors, D dimension, K hits.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from measure import Bar, Part, interleave, speedup
from numpy.typing import NDArray

from mvr_ray.core.searching.codes import Codes
from mvr_ray.core.searching.cuda_scan import DeviceRows, FusedKernel, Tuning
from mvr_ray.core.searching.exact import BlockTable
from mvr_ray.core.searching.kernels import GPU_STEP, TorchKernel
from mvr_ray.core.searching.scan import Scan, cut_steps, score_error
from mvr_ray.types import EmbeddingBlock, FloatArray, IntArray

PASSAGES, V, D, K = 21_015_324, 8, 384, 100
SPARE_BYTES = 8_000_000_000
MASK = (1 << 32) - 1
BAR = 1.4
TUNINGS = (
    Tuning(),
    Tuning(rows=128, row_bytes=64, warps=4, stages=4),
    Tuning(rows=128, row_bytes=128, warps=8, stages=4),
    Tuning(rows=128, row_bytes=256, warps=4, stages=3),
    Tuning(rows=64, row_bytes=128, warps=4, stages=4),
    Tuning(rows=256, row_bytes=64, warps=8, stages=3),
)


class Machine(NamedTuple):
    """Measured rates of the device: bytes read a second, operations a second in half precision."""

    device: str
    read_bytes: float
    matrix_flops: float
    sync: Callable[[], None]


def numbers(rows_N: torch.Tensor, salt: int, dimension: int) -> torch.Tensor:
    """int64 [N, D], near normal around 0, up to 510: four bytes of a mixed row and column, added."""
    column_D = torch.arange(dimension, device=rows_N.device)
    hash_ND = (rows_N[:, None] * 0x61C88647 + column_D * 0x3C6EF373 + salt * 0x2545F491) & MASK
    for _ in range(2):
        hash_ND ^= hash_ND >> 15
        hash_ND = (hash_ND * 0x5BD1E995) & MASK
        hash_ND ^= hash_ND >> 13
    return (hash_ND & 255) + (hash_ND >> 8 & 255) + (hash_ND >> 16 & 255) + (hash_ND >> 24) - 510


def make_views(rows_N: torch.Tensor, dimension: int) -> torch.Tensor:
    """float16 [N, D]: the views of these rows, exact."""
    return (numbers(rows_N, 1, dimension) + numbers(rows_N // V, 2, dimension)).half()


class MadeViews:
    """Stands for an array of all views: has its shape, and generates the requested rows. It has no memory to share."""

    dtype = np.dtype(np.float16)
    flags = np.empty((2, 2))[:, :1].flags
    """Those of an array that is not contiguous: compiled loops leave such arrays to numpy."""

    def __init__(self, count: int, dimension: int, device: str) -> None:
        self.shape, self.device = (count, dimension), device

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: slice | IntArray) -> Any:
        if isinstance(key, slice):
            return MadeViews(len(range(*key.indices(len(self)))), self.shape[1], self.device)
        return make_views(torch.from_numpy(np.asarray(key, np.int64)).to(self.device), self.shape[1]).cpu().numpy()


class ViewNumbers:
    """Stands for the array of every row's view number."""

    def __getitem__(self, rows_N: IntArray) -> NDArray[np.int16]:
        return (rows_N % V).astype(np.int16)


def make_codes(views_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return eight-bit codes and scales of some views as `core.searching.codes`, and the largest residual."""
    wide_ND = views_ND.float()
    scale_N1 = wide_ND.abs().amax(1, keepdim=True) / 127
    codes_ND = (wide_ND / torch.where(scale_N1 > 0, scale_N1, 1)).round_().clamp_(-127, 127)
    away_N = (wide_ND - codes_ND * scale_N1).double().square().sum(1).sqrt() * (1 + 2.0**-40)
    return codes_ND.to(torch.int8), scale_N1, float(away_N.max()) * (1 + 2.0**-22)


def make_scan(passages: int, dimension: int, kind: str, kernel: FusedKernel) -> Scan:
    """Return a scan of `passages` x V synthetic views on the kernel's device, as halves or as codes."""
    device, count = str(kernel.device), passages * V
    block: Any = EmbeddingBlock(
        range(passages), np.arange(passages + 1) * V, ViewNumbers(), MadeViews(count, dimension, device)
    )
    nothing_ND = np.broadcast_to(np.int8(0), (count, dimension))  # the codes are on the device alone
    coding, farthest = kind == "int8", 0.0
    resident = []
    for step in cut_steps(BlockTable([block]), kernel.vectors_per_step, [None]):
        first, size = int(step.row_P[0]) * V, len(step.vectors_ND)
        rows_ND = torch.empty(size, dimension, device=device, dtype=torch.int8 if coding else torch.float16)
        scale_N1 = torch.empty(size, 1, device=device) if coding else None
        for low in range(0, size, GPU_STEP):
            high = min(low + GPU_STEP, size)
            views_ND = make_views(torch.arange(first + low, first + high, device=device), dimension)
            if scale_N1 is None:
                rows_ND[low:high] = views_ND
            else:
                rows_ND[low:high], scale_N1[low:high], away = make_codes(views_ND)
                farthest = max(farthest, away)
        resident.append((rows_ND, scale_N1))
    residual_N = np.broadcast_to(np.float32(farthest), (count,))
    scan = Scan([block], kernel, codes=[Codes(nothing_ND, residual_N, residual_N)] if coding else None)
    for step, rows in zip(scan.steps, resident):
        step.resident = rows
    return scan


def fitting(passages: int, dimension: int, bytes_a_component: int, device: str) -> int:
    """Return how many passages fit on the device, at most `passages`."""
    if not device.startswith("cuda"):
        return passages
    free = torch.cuda.mem_get_info()[0] - SPARE_BYTES
    return min(passages, free // (V * (dimension * bytes_a_component + 4)))


def draw_queries(count: int, dimension: int) -> FloatArray:
    made_QD = np.random.default_rng(1).standard_normal((count, dimension), dtype=np.float32)
    return made_QD / np.linalg.norm(made_QD, axis=1, keepdims=True)


def disagreements(scan: Scan, queries_QD: FloatArray, slabs: int) -> tuple[int, int]:
    """Count the sampled passages on which the answer and a plain float32 product differ, and the sampled passages.

    A sampled passage that scores above the k-th hit must be a hit, and one that scores below must not, within 1e-5.
    """
    hits = scan.search_with_counts(queries_QD, K).hits
    device, dimension = str(scan.kernel.device), scan.table.dimension
    asked_QD = torch.from_numpy(queries_QD).to(device)
    kth_Q = hits.scores_QK[:, -1]
    wrong = num_sampled = 0
    each = min(GPU_STEP // V, scan.table.num_passages // slabs)
    for slab in range(slabs):
        first = slab * (scan.table.num_passages // slabs)
        rows_N = torch.arange(first * V, (first + each) * V, device=device)
        best_PQ = (make_views(rows_N, dimension).float() @ asked_QD.T).view(-1, V, len(queries_QD)).amax(1)
        best_QP = best_PQ.T.cpu().numpy()
        slack_Q = 1e-5 * np.abs(kth_Q)
        for query, best_P in enumerate(best_QP):
            own = hits.rows_QK[query] - first
            slab_hits = set(own[(own >= 0) & (own < each)].tolist())
            surely = set(np.flatnonzero(best_P > kth_Q[query] + slack_Q[query]).tolist())
            perhaps = set(np.flatnonzero(best_P >= kth_Q[query] - slack_Q[query]).tolist())
            wrong += len(surely - slab_hits) + len(slab_hits - perhaps)
        num_sampled += each
    return wrong, num_sampled


def farthest_of_plain(scan: Scan, queries_QD: FloatArray) -> float:
    """Return the largest difference between the kernel's scores and torch's in float32, over its bound."""
    kernel, plain = scan.kernel, TorchKernel(str(scan.kernel.device))
    count = min(GPU_STEP // V, len(scan.steps[0].row_P))
    rows_ND, scale_N1 = scan.steps[0].resident
    some = DeviceRows(rows_ND[: count * V], None if scale_N1 is None else scale_N1[: count * V])
    asked_QD, counts_P = plain.put(queries_QD), np.full(count, V)
    truth_QP = plain.best_views(asked_QD, plain.prepare_rows(*some), counts_P, V)
    found_QP = kernel.best_views(asked_QD, some, counts_P, V)[:, :count]
    norm_Q = np.linalg.norm(queries_QD.astype(np.float64), axis=1)
    bound_Q = score_error(norm_Q, scan.steps[0].norm, scan.table.dimension, kernel.input_rounding)
    away_Q = (truth_QP - found_QP).abs().amax(1).double().cpu().numpy()
    return float((away_Q / bound_Q).max())


def fastest_tuning(scan: Scan, queries: int, machine: Machine) -> Tuning:
    """Return the fastest of TUNINGS on the first step; skip one that the device cannot run."""
    step, rows = scan.steps[0], DeviceRows(*scan.steps[0].resident)
    asked_QD = scan.kernel.put(draw_queries(queries, scan.table.dimension))
    seconds = {}
    if not scan.kernel.is_fused or not machine.device.startswith("cuda"):
        return Tuning()
    from triton.errors import TritonError

    for tuning in TUNINGS:
        scan.kernel.tuning = tuning
        try:
            samples = []
            for _ in range(4):
                began = time.perf_counter()
                scan.kernel.best_views(asked_QD, rows, step.counts_P, step.uniform)
                machine.sync()
                samples.append(time.perf_counter() - began)
            seconds[tuning] = min(samples)
        except TritonError as error:  # it wants more shared memory than there is
            print(f"{tuning}: {error}", flush=True)
    return min(seconds, key=seconds.__getitem__)


def measure_search(part: Part, machine: Machine, passages: int, dimension: int, kind: str, rounds: int) -> None:
    """Measure one kind of storage: exactness first, then times and their floors."""
    width = 1 if kind == "int8" else 2
    count = fitting(passages, dimension, width, machine.device)
    kernel = FusedKernel(machine.device)
    began = time.perf_counter()
    scan = make_scan(count, dimension, kind, kernel)
    machine.sync()
    made_s = time.perf_counter() - began
    what = f"{count * V:,} views, {kind}"
    wrong, num_sampled = disagreements(scan, draw_queries(4, dimension), 8)
    away = farthest_of_plain(scan, draw_queries(20, dimension))
    part.bars.append(
        Bar(f"{what}: hits that a plain float32 check of {num_sampled:,} passages denies", wrong, 0, False, "hits")
    )
    part.bars.append(Bar(f"{what}: kernel off plain float32, of its bound", away, 1, at_least=False))
    num_bytes = count * V * (dimension * width + (4 if kind == "int8" else 0))
    tunings = {}
    for batch in (1, 64):
        kernel.tuning = tunings[batch] = fastest_tuning(scan, batch, machine)
        queries_QD = draw_queries(batch, dimension)
        asked_QD = kernel.put(queries_QD)

        def whole(queries_QD: FloatArray = queries_QD) -> None:
            scan.search_with_counts(queries_QD, K)
            machine.sync()

        def scan_batch(asked_QD: torch.Tensor = asked_QD) -> None:
            for step in scan.steps:
                kernel.best_views(asked_QD, DeviceRows(*step.resident), step.counts_P, step.uniform)
            machine.sync()

        name = f"{what}, batch {batch}"
        samples = interleave({f"{name}, search": whole, f"{name}, kernel alone": scan_batch}, rounds=rounds, warm=2)
        part.add(samples, batch)
        floor_s = max(num_bytes / machine.read_bytes, 2.0 * count * V * dimension * batch / machine.matrix_flops)
        for case in samples:
            part.floors[case] = floor_s
        over = float(np.median(samples[f"{name}, search"])) / floor_s
        part.facts[f"{name}, ms a query"] = 1e3 * float(np.median(samples[f"{name}, search"])) / batch
        if batch == 1:
            part.bars.append(Bar(f"{name}: time over bytes by bandwidth", over, BAR, at_least=False))
    part.facts[f"{what}, made in s"] = made_s
    part.facts[f"{what}, tuning"] = {f"batch {batch}": str(tuple(tuning)) for batch, tuning in tunings.items()}
    part.facts[f"{what}, fused"] = "Triton" if kernel.is_fused else "no: Triton is not there, or cannot compile"
    against_plain(part, machine, scan, what, rounds)


def against_plain(part: Part, machine: Machine, scan: Scan, what: str, rounds: int) -> None:
    """Time the same vectors by torch's product, maximum and top k, in float32: the work that the fused kernel
    avoids."""
    plain = TorchKernel(machine.device)
    count = min(GPU_STEP // V, len(scan.steps[0].row_P))
    rows_ND, scale_N1 = scan.steps[0].resident
    some = DeviceRows(rows_ND[: count * V], None if scale_N1 is None else scale_N1[: count * V])
    counts_P, asked_QD = np.full(count, V), plain.put(draw_queries(1, scan.table.dimension))

    def ours() -> None:
        scan.kernel.best_views(asked_QD, some, counts_P, V)
        machine.sync()

    def torchs() -> None:
        plain.best_views(asked_QD, plain.prepare_rows(*some), counts_P, V)
        machine.sync()

    cases = {f"{what}, {count * V:,} of them, fused": ours, f"{what}, {count * V:,} of them, plain torch": torchs}
    samples = interleave(cases, rounds=rounds, warm=2)
    part.add(samples, 1)
    part.facts[f"{what}: fused over plain torch"] = speedup(samples, *cases)
