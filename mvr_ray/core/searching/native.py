"""Scan with loops compiled from `scan.c`, for processors with AVX-512 and VNNI, or with AVX2.

The loops exist where the package was built with a C compiler; without them, or on other processors, the kernels of
`kernels` give the same hits. Vectors are read as stored; half precision is widened in registers. Those for AVX2
(`Avx2Kernel`) return the best view of each passage; those for AVX-512 also compare it in registers, so scores never
reach memory.

Products with int8 codes are integers, from queries rounded to sixteen bits,

    q' = t n,  n = rint(q / t) = 256 h + l,  t = max_d |q_d| / 32512,  |h|, |l| <= 128

and the bound of `scan` grows by |q - q'| max|w|. The integers are exact; further operations round at most six times,
within the 16 terms that `score_error` adds. Beyond 4,096 dimensions t is larger for AVX2, whose sums have 32 bits.

**Coarse products.** Where the processor multiplies bfloat16, batches are filtered by v' and q', the vectors and queries
rounded to it: half the bytes, twice the rate of float32 in vector registers, twenty times with AMX. The bound is that
of codes (`scan`), with the measured |q - q'| and largest |v - v'| of a step:

    |q| max|v - v'| + |q - q'| max|v'|  + the error of summing D exact products in float32;

the relative error of a value is at most 2^-8, of a vector's norm about 2^-10. `scan` switches to fine products when
too many passages are within it. Values of 2^120 and more are multiplied in float32.

**Fine products** with AMX, where Linux grants it to the process, use sums of two bfloat16, x = x_1 + x_2 + x', with
|x_2| <= 2^-8 |x|, |x'| <= 2^-17 |x|. They compute q_1 v_1 + q_1 v_2 + q_2 v_1, which omits q_2 v_2 + q' v +
(q_1 + q_2) v', less than 2^-15 |q_d v_d| a term; three products a term are summed in float32, with magnitudes that sum
to at most (1 + 2^-6) |q_d v_d|. A relative rounding r of 2^-16 and, for the 2^-6, 4 D terms in the bound of `scan`
cover that for any D. Without AMX, fine products are of float32.

The scan's threads (`threads`) call the loops, which release Python's lock.

Shapes: Q queries, P passages of a step, N vectors, D dimension, K best lower bounds kept, M candidates.
"""

import ctypes
import functools
import importlib.util
import logging
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mvr_ray.core.container import cpu_limit
from mvr_ray.core.searching.kernels import Candidates, Coarse, Kernel, PreparedQueries, StepPart, select_candidates
from mvr_ray.types import EmbeddingBlock, FloatArray, IntArray

log = logging.getLogger(__name__)

LIBRARY, INTERFACE = "mvr_ray.core.searching._scan", 10
KINDS = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(np.int8): 2}
STEP = 32768
AHEAD_BYTES = 16384  # prefetch distance, into the second-level cache
LANES, PANEL, BLOCK, SLICE, TILE_ROWS = 16, 48, 32, 192, 6  # as in scan.c; the slice in dimensions
LARGE = 2.0**100
LARGEST_HALF = 127 * 256
LARGEST_SUM = 2**31 - 1


class _SearchArgs(ctypes.Structure):
    _fields_ = (
        ("queries", ctypes.c_int32),
        ("limit", ctypes.c_int32),
        ("mask_P", ctypes.c_void_p),
        ("error_Q", ctypes.c_void_p),
        ("low_QK", ctypes.c_void_p),
        ("cut_Q", ctypes.c_void_p),
        ("capacity", ctypes.c_int64),
        ("num_candidates", ctypes.c_int64),
        ("query_M", ctypes.c_void_p),
        ("passage_M", ctypes.c_void_p),
        ("upper_M", ctypes.c_void_p),
    )


def load_library(name: str, interface: int) -> ctypes.CDLL | None:
    """Load the compiled module of this name; None where it was not built, or with another interface."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.origin:
        return None
    loops = ctypes.CDLL(spec.origin)
    if (version := getattr(loops, "mvr_interface", None)) is not None and version() == interface:
        return loops
    log.warning("%s was built from other sources and is not used; install the package again to build it anew", name)
    return None


@functools.cache
def library_avx2() -> ctypes.CDLL | None:
    """Load the loops that need AVX2; None where they were not built or this processor cannot run them."""
    loops = load_library(LIBRARY, INTERFACE)
    if loops is None or not loops.mvr_supported_avx2():
        return None
    whole, long, at = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    loops.mvr_best_views.argtypes = [whole, at, at, at, at, long, whole, at, at, whole, long, at, at]
    loops.mvr_best_views.restype = None
    loops.mvr_max_norm.argtypes = [whole, whole, at, at, long, whole]
    loops.mvr_max_norm.restype = ctypes.c_float
    loops.mvr_rescore.argtypes = [whole, at, at, at, whole, at, at, long, at, at, at, at, at]
    loops.mvr_rescore.restype = None
    return loops


@functools.cache
def library() -> ctypes.CDLL | None:
    """Load all loops, for AVX-512 too; None where they were not built or this processor cannot run them."""
    loops = library_avx2()
    if loops is None or not loops.mvr_supported():
        return None
    whole, long, at = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    loops.mvr_scan.argtypes = [whole, at, at, at, long, long, whole, at, whole, at, at]
    loops.mvr_scan.restype = long
    return loops


class _QueryArgs(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("packed", "tiles", "coarse", "bias", "unit_Q"))


class NativeRows(NamedTuple):
    """A step's vectors as stored, or its codes and their scales."""

    rows_ND: NDArray[Any]
    scale_N: NDArray[np.float32] | None


@dataclass(kw_only=True)
class NativeQueries(PreparedQueries):
    """Queries in the order of the loops, the K best lower bounds of each as a heap, buffers, and the addresses of all
    these for the loops."""

    tiles: NDArray[Any] | None
    short: NDArray[np.uint16] | None
    bias: NDArray[np.int32]
    unit_Q: NDArray[np.float32]
    cut_Q: NDArray[np.float32]
    buffers: Candidates
    space: NDArray[np.float32]

    def __post_init__(self) -> None:
        self.search_args = _SearchArgs(
            *self.low_QK.shape, None, None, None, _address(self.cut_Q), len(self.buffers.query_M), 0,
            *map(_address, self.buffers),
        )  # fmt: skip
        self.query_args = _QueryArgs(*map(_address, (self.queries_QD, self.tiles, None, self.bias, self.unit_Q)))
        self.space_at = _address(self.space)


class CompiledKernel(Kernel):
    """The base of the kernels of compiled loops, which read vectors as stored."""

    vectors_per_step = STEP

    def __init__(self, loops: ctypes.CDLL | None, needs: str, threads: int | None) -> None:
        if loops is None:
            raise RuntimeError(f"{LIBRARY} was not built, or this processor lacks {needs}")
        self.loops = loops
        self.threads = threads or num_threads()

    def prepare_rows(self, rows_ND: NDArray[Any], scale_N1: NDArray[Any] | None = None) -> NativeRows:
        rows_ND = np.ascontiguousarray(rows_ND)
        if rows_ND.dtype not in KINDS:
            rows_ND = rows_ND.astype(np.float32)
        return NativeRows(rows_ND, None if scale_N1 is None else np.ascontiguousarray(scale_N1[:, 0]))

    def max_norm(self, step_rows: NativeRows, *, errors: bool = False) -> float:
        """Compute the largest norm, or with `errors` that of the bfloat16 rounding errors, in float32."""
        rows_ND, scale_N = step_rows
        addresses = _address(rows_ND), _address(scale_N)
        return self.loops.mvr_max_norm(KINDS[rows_ND.dtype], errors, *addresses, *rows_ND.shape)


class NativeKernel(CompiledKernel):
    """Runs the AVX-512 loops of `scan.c`. Raises RuntimeError where `library` is None."""

    def __init__(self, threads: int | None = None, *, tiles: bool = True, coarse: bool = True) -> None:
        """`tiles` uses AMX, `coarse` filters by products of bfloat16, where the processor has them."""
        super().__init__(library(), "AVX-512 with VNNI", threads)
        self.tiles = tiles and bool(self.loops.mvr_tiles())
        self.coarse = coarse and bool(self.loops.mvr_short())
        # Both are widened to bfloat16, and codes leave more candidates; with AMX codes are faster (`benchmarks`)
        self.halves_are_faster = self.coarse and not self.tiles

    def max_residual(self, step_rows: NativeRows) -> float:
        """Compute the largest norm of a bfloat16 rounding error, in float32; infinite if a value is 2^120 or more."""
        return self.max_norm(step_rows, errors=True)

    def prepare(self, queries_QD: FloatArray, limit: int, with_codes: bool) -> NativeQueries:
        num_queries, dimension = queries_QD.shape
        num_padded = -(-num_queries // LANES) * LANES
        tiles, bias, unit_Q, rounding_Q = None, np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(num_queries)
        short, coarse = None, None
        is_split = num_queries > 1 and np.abs(queries_QD).max(initial=0) < LARGE
        if with_codes:
            panels, bias, unit_Q, rounding_Q = _pack_codes(queries_QD, num_padded)
            tiles = panels if self.tiles and num_queries > 1 else None
            is_split = is_split and self.coarse and not self.tiles
        else:
            panels = _pack_floats(queries_QD, num_padded)
            is_split = is_split and (self.coarse or self.tiles)
        if is_split:
            high, low, rounding_CQ = _split_queries(queries_QD, num_padded)
            if self.tiles:
                tiles = _pack_tiles([high, low])
            if self.coarse:
                short = _pack_tiles([high]) if self.tiles else _pack_short(high)
                coarse = Coarse(rounding_CQ, self.max_residual)
        has_parts = tiles is not None and not with_codes
        capacity, width = 2 * BLOCK * num_queries + 4096, -(-dimension // 64) * 64
        return NativeQueries(
            panels,
            low_QK=np.full((num_queries, limit), -np.inf, np.float32),
            rounding_Q=rounding_Q,
            input_rounding=2.0**-16 if has_parts else 0.0,
            products=4 if has_parts else 1,
            coarse=coarse,
            tiles=tiles,
            short=short,
            bias=bias,
            unit_Q=unit_Q,
            cut_Q=np.full(num_padded, np.inf, np.float32),
            buffers=Candidates(*(np.empty(capacity, dtype) for dtype in (np.int64, np.int64, np.float32))),
            space=np.zeros(16 + num_padded * (1 + BLOCK) + 2 * BLOCK * width + BLOCK * SLICE, np.float32),
        )

    def candidates(
        self, queries: NativeQueries, step_rows: NativeRows, part: StepPart, error_Q: FloatArray
    ) -> Candidates:
        error_Q = np.ascontiguousarray(error_Q, np.float32)
        counts_P = np.ascontiguousarray(part.counts_P, np.int64)
        search_args, query_args = queries.search_args, queries.query_args
        arrays = error_Q, queries.low_QK, part.mask_P
        search_args.error_Q, search_args.low_QK, search_args.mask_P = map(_address, arrays)
        query_args.coarse = _address(queries.short if queries.coarse else None)
        kind, rows, scales = KINDS[step_rows.rows_ND.dtype], _address(step_rows.rows_ND), _address(step_rows.scale_N)
        counts, dimension = _address(counts_P), step_rows.rows_ND.shape[1]
        passage, parts = 0, []
        while passage < len(counts_P):
            search_args.num_candidates = 0
            passage = self.loops.mvr_scan(
                kind, rows, scales, counts, passage, len(counts_P), dimension, ctypes.addressof(query_args),
                AHEAD_BYTES, ctypes.addressof(search_args), queries.space_at,
            )  # fmt: skip
            count = search_args.num_candidates
            parts.append([column[:count].copy() for column in queries.buffers])
        return Candidates(*parts[0]) if len(parts) == 1 else Candidates(*map(np.concatenate, zip(*parts)))

    def set_lower_bounds(self, queries: NativeQueries, low_QK: FloatArray) -> None:
        queries.low_QK = np.sort(low_QK.astype(np.float32, copy=False), axis=1)  # an ascending array is a heap


@dataclass
class PaddedQueries(PreparedQueries):
    """Queries for the loops for AVX2, in float32, or for codes in 16-bit integers with their units. Several are padded
    with zeros to whole groups of four queries and 32 bytes."""

    unit_Q: NDArray[np.float32] | None = None


class Avx2Kernel(CompiledKernel):
    """Runs the loops of `scan.c` for AVX2. Raises RuntimeError where `library_avx2` is None."""

    gather_share = 0.0
    max_shares: Sequence[float] = ()
    """Beside a kernel for AVX-512: for one, two, ... queries, the share of the passages that pass a filter up to which
    this one is faster; 1: also without a filter."""

    def __init__(self, threads: int | None = None) -> None:
        super().__init__(library_avx2(), "AVX2", threads)

    def is_fastest(self, num_queries: int, share: float) -> bool:
        return 0 < num_queries <= len(self.max_shares) and share <= self.max_shares[num_queries - 1]

    def prepare(self, queries_QD: NDArray[np.float32], limit: int, with_codes: bool) -> PaddedQueries:
        num_queries, dimension = queries_QD.shape
        plain, dtype, values_QD, unit_Q = super().prepare(queries_QD, limit, with_codes), np.float32, queries_QD, None
        if with_codes:
            largest = min(LARGEST_HALF, LARGEST_SUM // (2 * 127 * -(-dimension // LANES)))
            dtype, (values_QD, unit_Q, plain.rounding_Q) = np.int16, _round_queries(queries_QD, largest)
            unit_Q = np.pad(unit_Q, (0, -num_queries % 4))
        is_single = num_queries == 1 and not (with_codes and dimension % LANES)
        rows, width = (1, 1) if is_single else (4, 32 // np.dtype(dtype).itemsize)
        rows_QD = line_zeros((num_queries + -num_queries % rows, dimension + -dimension % width), dtype)
        rows_QD[:num_queries, :dimension] = values_QD
        return PaddedQueries(rows_QD, plain.low_QK, plain.rounding_Q, unit_Q=unit_Q)

    def candidates(
        self, queries: PaddedQueries, step_rows: NativeRows, part: StepPart, error_Q: FloatArray
    ) -> Candidates:
        """Find candidates as other kernels do, without reading vectors outside the mask."""
        counts_P = np.ascontiguousarray(part.counts_P, np.int64)
        first_P = np.cumsum(counts_P) - counts_P
        if part.mask_P is None:
            return select_candidates(queries, self.best_views(queries, step_rows, first_P, counts_P), error_Q)
        passing_M = np.flatnonzero(part.mask_P)
        best_MQ = self.best_views(queries, step_rows, first_P[passing_M], counts_P[passing_M])
        candidates = select_candidates(queries, best_MQ, error_Q)
        return candidates._replace(passage_M=passing_M[candidates.passage_M])

    def best_views(
        self, queries: PaddedQueries, step_rows: NativeRows, first_P: IntArray, counts_P: IntArray
    ) -> NDArray[np.float32]:
        """Compute best_PQ, the best inner product over `counts_P` vectors from `first_P` on."""
        rows_QD = queries.queries_QD
        num_rows, row_bytes = len(rows_QD), rows_QD.strides[0]
        space = line_zeros((TILE_ROWS, row_bytes), np.uint8)
        best_PQ = np.full((len(counts_P), num_rows), -np.inf, np.float32)
        self.loops.mvr_best_views(
            KINDS[step_rows.rows_ND.dtype], _address(step_rows.rows_ND), _address(step_rows.scale_N), _address(first_P),
            _address(counts_P), len(counts_P), step_rows.rows_ND.shape[1], _address(rows_QD), _address(queries.unit_Q),
            num_rows, row_bytes, _address(space), _address(best_PQ),
        )  # fmt: skip
        return best_PQ[:, : len(queries.low_QK)]


class BlockRows:
    """A block's addresses for the compiled loop of exact scores."""

    def __init__(self, block: EmbeddingBlock) -> None:
        row_ptr = np.ascontiguousarray(block.row_ptr, np.int64)
        number_N = np.ascontiguousarray(block.view_numbers_N, np.int16)
        self.arrays = block.vectors_ND, row_ptr, number_N
        self.arguments = KINDS[block.vectors_ND.dtype], *map(_address, self.arrays), block.vectors_ND.shape[1]


def rows_of(block: EmbeddingBlock) -> BlockRows | None:
    """Return a block's addresses; None where the compiled loop cannot score its passages."""
    vectors_ND = block.vectors_ND
    if vectors_ND.dtype not in (np.float32, np.float16) or not vectors_ND.flags.c_contiguous:
        return None
    return BlockRows(block) if library_avx2() else None


def rescore(
    spans: Sequence[tuple[BlockRows, int, int]],
    queries_QD: FloatArray,
    query_M: IntArray,
    row_M: IntArray,
    score_M: NDArray[np.float32],
    view_M: NDArray[np.int16],
) -> None:
    """Fill `score_M` and `view_M` with the scores of `exact`, bit for bit. Each span is a block with its range of
    pairs; `row_M` are rows in the block. Indices are int64 and contiguous."""
    loops = library_avx2()
    assert loops is not None, "check `rows_of` first"
    queries_QD, space_2D = np.ascontiguousarray(queries_QD, np.float32), np.empty((2, queries_QD.shape[1]))
    wide_QD = queries_QD.astype(np.float64)
    query, row, score, view = query_M.ctypes.data, row_M.ctypes.data, score_M.ctypes.data, view_M.ctypes.data
    queries_at, wide_at, space_at = queries_QD.ctypes.data, wide_QD.ctypes.data, space_2D.ctypes.data
    for block, low, high in spans:
        loops.mvr_rescore(
            *block.arguments, queries_at, wide_at, high - low, query + 8 * low, row + 8 * low, score + 4 * low,
            view + 2 * low, space_at,
        )  # fmt: skip


def _pack_floats(queries_QD: FloatArray, num_padded: int) -> NDArray[np.float32]:
    """Pack panels of 48 queries, the last of 16, 32 or 48, each [D, queries]; one query: [16 + D + 16] with zeros."""
    if len(queries_QD) == 1:
        return np.pad(queries_QD[0].astype(np.float32, copy=False), LANES)
    padded_QD = np.zeros((num_padded, queries_QD.shape[1]), np.float32)
    padded_QD[: len(queries_QD)] = queries_QD
    return np.concatenate([padded_QD[at : at + PANEL].T.ravel() for at in range(0, num_padded, PANEL)])


class _SplitQueries(NamedTuple):
    """Both bfloat16 parts of padded queries, and the norms of the rounding errors of the first."""

    high_QD: NDArray[np.uint16]
    low_QD: NDArray[np.uint16]
    rounding_Q: FloatArray


def _split_queries(queries_QD: FloatArray, num_padded: int) -> _SplitQueries:
    num_queries, dimension = queries_QD.shape
    padded_QD = np.zeros((num_padded, -(-dimension // 32) * 32), np.float32)
    padded_QD[:num_queries, :dimension] = queries_QD
    high = _bfloat16(padded_QD)
    remainder_QD = padded_QD - (high.astype(np.uint32) << 16).view(np.float32)
    rounding_Q = np.linalg.norm(remainder_QD[:num_queries].astype(np.float64), axis=1) * (1 + 2.0**-40)
    return _SplitQueries(high, _bfloat16(remainder_QD), rounding_Q)


def _pack_tiles(parts: Sequence[NDArray[np.uint16]]) -> NDArray[np.uint16]:
    """Pack bfloat16 parts of queries, [16 queries][D / 32][part][16 pairs of D][query][2]."""
    num_padded, width = parts[0].shape
    pairs = np.stack(parts).reshape(len(parts), num_padded // LANES, LANES, width // 32, 16, 2)
    return np.ascontiguousarray(pairs.transpose(1, 3, 0, 4, 2, 5)).ravel()


def _pack_short(high_QD: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Pack panels of 48 queries, the last of 16, 32 or 48, each [D / 2][queries][2]."""
    num_padded, width = high_QD.shape
    pairs = high_QD.reshape(num_padded, width // 2, 2)
    return np.concatenate([pairs[at : at + PANEL].transpose(1, 0, 2).ravel() for at in range(0, num_padded, PANEL)])


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the upper half of float32's bits, to even on ties."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


class _CodeQueries(NamedTuple):
    panels: NDArray[np.int8]
    bias: NDArray[np.int32]
    unit_Q: NDArray[np.float32]
    rounding_Q: FloatArray


class _WholeQueries(NamedTuple):
    """n, t and |q - q'| of the module's docstring."""

    whole_QD: FloatArray
    unit_Q: NDArray[np.float32]
    rounding_Q: FloatArray


def _round_queries(queries_QD: FloatArray, largest: int = LARGEST_HALF) -> _WholeQueries:
    wide_QD = queries_QD.astype(np.float64)
    unit_Q = (np.abs(wide_QD).max(axis=1, initial=0.0) / largest).astype(np.float32)
    divisor_Q1 = np.where(unit_Q > 0, unit_Q, np.inf).astype(np.float64)[:, None]
    whole_QD = np.clip(np.rint(wide_QD / divisor_Q1), -largest, largest)
    error_QD = wide_QD - whole_QD * unit_Q[:, None].astype(np.float64)
    return _WholeQueries(whole_QD, unit_Q, np.linalg.norm(error_QD, axis=1) * (1 + 2.0**-40))


def _pack_codes(queries_QD: FloatArray, num_padded: int) -> _CodeQueries:
    """Pack the halves h and l, the constants that correct for unsigned codes, t, and |q - q'|."""
    num_queries, dimension = queries_QD.shape
    is_single = num_queries == 1 and dimension <= 8192
    whole_QD, unit_Q, rounding_Q = _round_queries(queries_QD)
    width = -(-dimension // 64) * 64
    halves_2QD = np.zeros((2, num_padded, width), np.int32)
    halves_2QD[0, :num_queries, :dimension] = (whole_QD.astype(np.int32) + 128) >> 8
    halves_2QD[1, :num_queries, :dimension] = whole_QD.astype(np.int32)
    halves_2QD[1] -= 256 * halves_2QD[0]
    units = np.zeros(num_padded, np.float32)
    units[:num_queries] = unit_Q
    if is_single:
        panels = halves_2QD[:, 0]
        bias = -128 * panels.reshape(2, -1, LANES, 4).sum(axis=(1, 3))
    else:
        by_panel = halves_2QD.reshape(2, num_padded // LANES, LANES, width // 4, 4)
        panels = by_panel.transpose(1, 3, 0, 2, 4)  # panel, four of D, half, query, one of four
        bias = -128 * by_panel.sum(axis=(3, 4)).transpose(1, 0, 2)
    return _CodeQueries(
        np.ascontiguousarray(panels, np.int8).ravel(), np.ascontiguousarray(bias, np.int32).ravel(), units, rounding_Q
    )


def line_zeros(shape: tuple[int, int], dtype: type[np.generic]) -> NDArray[Any]:
    """Allocate zeros from the start of a cache line on: loads that cross lines halve the speed of products."""
    num_bytes = shape[0] * shape[1] * np.dtype(dtype).itemsize
    memory = np.zeros(num_bytes + 64, np.uint8)
    return memory[(first := -memory.ctypes.data % 64) : first + num_bytes].view(dtype).reshape(shape)


def _address(array: NDArray[Any] | None) -> int | None:
    return None if array is None else array.__array_interface__["data"][0]


def num_cores() -> int:
    """Return the number of processors that this process may use: a job of SLURM has a part of its machine's, and a
    container may have a limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, max(math.ceil(cpu_limit() or cores), 1))


def num_threads() -> int:
    """Return the number of threads: torch's where it is loaded, else OMP_NUM_THREADS, else one a processor."""
    get_num_threads = getattr(sys.modules.get("torch"), "get_num_threads", None)  # None while torch is being imported
    if get_num_threads:
        return get_num_threads()
    setting = os.environ.get("OMP_NUM_THREADS", "")
    return int(setting) if setting.isdigit() and int(setting) else num_cores()
