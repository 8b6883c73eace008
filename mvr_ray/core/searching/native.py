"""Scan with loops compiled from `scan.c`, for processors with AVX-512 and VNNI, or with AVX2.

The loops exist where the package was built with a C compiler; without them, or on other processors, the kernels of
`kernels` give the same answers. Vectors are read as they are stored, half precision being widened in registers. With
AVX2 alone (`Avx2Kernel`) the loops are for a few queries: torch's product of matrices is faster for many. Those for
AVX-512 take and compare the best view of each passage in registers too, so that scores never reach memory.

Of eight-bit codes the products are integers. To that end a query is rounded to sixteen bits,

    q' = t n,  n = rint(q / t) = 256 h + l,  t = max_d |q_d| / 32512,  |h|, |l| <= 128

and the bound of `scan` grows by |q - q'| max|w|. The integers are exact; what is made of them is rounded at most six
times, within the 16 terms that `score_error` adds.

**Coarse products.** Where the processor multiplies bfloat16, batches are filtered by v' and q', the vectors and queries
rounded to it: half the bytes, twice the rate of float32 in vector registers, twenty times with AMX. This is the case of
codes (`scan`): with |q - q'| and the largest |v - v'| of a step as they are, not as they might be, the bound is

    |q| max|v - v'| + |q - q'| max|v'|  and what summing D exact products in float32 adds;

the relative error of a value is at most 2^-8, of a vector's norm about 2^-10. `scan` asks for fine products when too
many passages are within it. Values of 2^120 and more are multiplied in float32.

**Fine products** with AMX, where Linux lets the process use it, are of sums of two bfloat16, x = x_1 + x_2 + x', with
|x_2| <= 2^-8 |x|, |x'| <= 2^-17 |x|. Of them q_1 v_1 + q_1 v_2 + q_2 v_1 are made, which leaves out q_2 v_2 + q' v +
(q_1 + q_2) v', less than 2^-15 |q_d v_d| a term; three products a term are summed in float32, whose magnitudes add up
to at most (1 + 2^-6) |q_d v_d|. A relative rounding r of 2^-16 and, for the 2^-6, 4 D terms in the bound of `scan`
cover that for any D. Without AMX, fine products are of float32.

Threads are the scan's: each takes steps (`threads`), and Python's lock is not held meanwhile.

Shapes: Q queries, P passages of a step, N vectors, D dimension, K best lower bounds kept, M candidates.
"""

import ctypes
import functools
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mvr_ray.core.searching.kernels import GATHER_SHARE, Candidates, Coarse, HostKernel, PlainQueries
from mvr_ray.types import EmbeddingBlock, FloatArray, IntArray

log = logging.getLogger(__name__)

LIBRARY, INTERFACE = "mvr_ray.core.searching._scan", 6
KINDS = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, np.dtype(np.int8): 2}
STEP = 32768
AHEAD_BYTES = 16384  # how far before its use memory is asked for, into the second cache
LANES, PANEL, BLOCK, SLICE = 16, 48, 32, 192  # as in scan.c; the slice in dimensions
LARGE = 2.0**100
LARGEST_HALF = 127 * 256


class _SearchArgs(ctypes.Structure):
    _fields_ = (
        ("queries", ctypes.c_int32),
        ("kept", ctypes.c_int32),
        ("mask_P", ctypes.c_void_p),
        ("error_Q", ctypes.c_void_p),
        ("low_QK", ctypes.c_void_p),
        ("cut_Q", ctypes.c_void_p),
        ("room", ctypes.c_int64),
        ("num_found", ctypes.c_int64),
        ("query_M", ctypes.c_void_p),
        ("passage_M", ctypes.c_void_p),
        ("upper_M", ctypes.c_void_p),
    )


def load_library(name: str, interface: int) -> ctypes.CDLL | None:
    """Load the compiled module of this name; None where it was not built, or from sources of another interface."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.origin:
        return None
    loops = ctypes.CDLL(spec.origin)
    if (version := getattr(loops, "mvr_interface", None)) is not None and version() == interface:
        return loops
    log.warning("%s was built from other sources and is not used; install the package again to build it anew", name)
    return None


_C_TYPES = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p


@functools.cache
def library() -> ctypes.CDLL | None:
    """Load the compiled loops; None where they were not built or this processor cannot run them."""
    loops = load_library(LIBRARY, INTERFACE)
    if loops is None or not loops.mvr_supported():
        return None
    whole, long, at = _C_TYPES
    loops.mvr_scan.argtypes = [whole, at, at, at, long, long, whole, at, whole, at, at]
    loops.mvr_scan.restype = long
    loops.mvr_max_norm.argtypes = [whole, at, at, long, whole]
    loops.mvr_max_norm.restype = ctypes.c_float
    loops.mvr_max_residual.argtypes = [whole, at, long, whole]
    loops.mvr_max_residual.restype = ctypes.c_float
    return _with_rescore(loops)


@functools.cache
def library_avx2() -> ctypes.CDLL | None:
    """Load the loops for AVX2; None where they were not built or this processor cannot run them."""
    loops = load_library(LIBRARY, INTERFACE)
    if loops is None or not loops.mvr_supported_avx2():
        return None
    whole, long, at = _C_TYPES
    loops.mvr_best_views.argtypes = [whole, at, at, at, at, long, whole, at, at, whole, at]
    loops.mvr_best_views.restype = None
    loops.mvr_max_norm_avx2.argtypes = [whole, at, at, long, whole]
    loops.mvr_max_norm_avx2.restype = ctypes.c_float
    return _with_rescore(loops)


def _with_rescore(loops: ctypes.CDLL) -> ctypes.CDLL:
    whole, long, at = _C_TYPES
    loops.mvr_rescore.argtypes = [whole, at, at, at, whole, at, long, at, at, at, at, at]
    loops.mvr_rescore.restype = None
    return loops


class _QueryArgs(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("packed", "tiles", "coarse", "bias", "unit_Q"))


class NativeRows(NamedTuple):
    """A step's vectors as they are stored, or its codes and their scales."""

    rows_ND: NDArray[Any]
    scale_N: NDArray[np.float32] | None


def _as_stored(rows_ND: NDArray[Any], scale_N1: NDArray[Any] | None) -> NativeRows:
    rows_ND = np.ascontiguousarray(rows_ND)
    if rows_ND.dtype not in KINDS:
        rows_ND = rows_ND.astype(np.float32)
    return NativeRows(rows_ND, None if scale_N1 is None else np.ascontiguousarray(scale_N1[:, 0]))


@dataclass
class NativeQueries:
    """Queries in the order in which the loops read them, the K best lower bounds of each as a heap, buffers, and the
    addresses of all these for the loops."""

    panels: NDArray[Any]
    tiles: NDArray[Any] | None
    short: NDArray[np.uint16] | None
    bias: NDArray[np.int32]
    unit_Q: NDArray[np.float32]
    rounding_Q: FloatArray
    input_rounding: float
    products: int
    coarse: Coarse | None
    low_QK: NDArray[np.float32]
    cut_Q: NDArray[np.float32]
    query_M: IntArray
    passage_M: IntArray
    upper_M: NDArray[np.float32]
    space: NDArray[np.float32]

    def __post_init__(self) -> None:
        columns = self.query_M, self.passage_M, self.upper_M
        room = len(self.query_M)
        self.search = _SearchArgs(
            *self.low_QK.shape, None, None, None, _address(self.cut_Q), room, 0, *map(_address, columns)
        )
        whole = self.panels, self.tiles, None, self.bias, self.unit_Q
        self.question = _QueryArgs(*(_address(part) for part in whole))
        self.space_at = _address(self.space)


class NativeKernel:
    """Runs the loops of `scan.c`. Raises RuntimeError where `library` is None."""

    vectors_per_step = STEP
    gather_share = GATHER_SHARE

    def __init__(self, threads: int | None = None, *, tiles: bool = True, coarse: bool = True) -> None:
        """`tiles`: use AMX, `coarse`: filter by products of bfloat16, where the processor has them."""
        loops = library()
        if loops is None:
            raise RuntimeError(f"{LIBRARY} was not built, or this processor lacks AVX-512 with VNNI")
        self.loops = loops
        self.threads = threads or num_threads()
        self.tiles = tiles and bool(loops.mvr_tiles())
        self.coarse = coarse and bool(loops.mvr_short())

    @property
    def halves_are_faster(self) -> bool:
        """Whether batches of queries scan vectors of half precision faster than their codes: both are widened to
        bfloat16, and codes leave more candidates. With AMX codes are faster (benchmarks/README.md, kernels)."""
        return self.coarse and not self.tiles

    def put(self, rows: NDArray[Any]) -> NDArray[Any]:
        return rows

    def ready(self, rows_ND: NDArray[Any], scale_N1: NDArray[Any] | None = None) -> NativeRows:
        return _as_stored(rows_ND, scale_N1)

    def max_norm(self, ready: NativeRows) -> float:
        kind, (count, dimension) = KINDS[ready.rows_ND.dtype], ready.rows_ND.shape
        return self.loops.mvr_max_norm(kind, ready.rows_ND.ctypes.data, _address(ready.scale_N), count, dimension)

    def max_residual(self, ready: NativeRows) -> float:
        """The largest norm of what bfloat16 takes off a vector, in float32; infinite if a value is 2^120 or more."""
        kind, (count, dimension) = KINDS[ready.rows_ND.dtype], ready.rows_ND.shape
        return self.loops.mvr_max_residual(kind, ready.rows_ND.ctypes.data, count, dimension)

    def prepare(self, queries_QD: FloatArray, limit: int, with_codes: bool) -> NativeQueries:
        num_queries, dimension = queries_QD.shape
        num_padded = -(-num_queries // LANES) * LANES
        tiles, bias, unit_Q, rounding_Q = None, np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(num_queries)
        short, coarse = None, None
        if with_codes:
            panels, bias, unit_Q, rounding_Q = _pack_codes(queries_QD, num_padded)
            tiles = panels if self.tiles and num_queries > 1 else None
            if self.coarse and not self.tiles and num_queries > 1 and np.abs(queries_QD).max(initial=0) < LARGE:
                high, _, rounding_CQ = _split_queries(queries_QD, num_padded)
                short, coarse = _pack_short(high), Coarse(rounding_CQ, self.max_residual)
        else:
            panels = _pack_floats(queries_QD, num_padded)
            if num_queries > 1 and (self.tiles or self.coarse) and np.abs(queries_QD).max(initial=0) < LARGE:
                high, low, rounding_CQ = _split_queries(queries_QD, num_padded)
                tiles = _pack_tiles([high, low]) if self.tiles else None
                if self.coarse:
                    short = _pack_tiles([high]) if self.tiles else _pack_short(high)
                    coarse = Coarse(rounding_CQ, self.max_residual)
        split = tiles is not None and not with_codes
        room, width = 2 * BLOCK * num_queries + 4096, -(-dimension // 64) * 64
        return NativeQueries(
            panels,
            tiles,
            short,
            bias,
            unit_Q,
            rounding_Q,
            input_rounding=2.0**-16 if split else 0.0,
            products=4 if split else 1,
            coarse=coarse,
            low_QK=np.full((num_queries, limit), -np.inf, np.float32),
            cut_Q=np.full(num_padded, np.inf, np.float32),
            query_M=np.empty(room, np.int64),
            passage_M=np.empty(room, np.int64),
            upper_M=np.empty(room, np.float32),
            space=np.zeros(16 + num_padded * (1 + BLOCK) + 2 * BLOCK * width + BLOCK * SLICE, np.float32),
        )

    def candidates(
        self,
        queries: NativeQueries,
        ready: NativeRows,
        counts_P: IntArray,
        uniform: int,
        error_Q: FloatArray,
        mask_P: NDArray[np.bool_] | None = None,
    ) -> Candidates:
        error_Q = np.ascontiguousarray(error_Q, np.float32)
        counts_P = np.ascontiguousarray(counts_P, np.int64)
        search, question = queries.search, queries.question
        search.error_Q, search.low_QK, search.mask_P = map(_address, (error_Q, queries.low_QK, mask_P))
        question.coarse = _address(queries.short if queries.coarse else None)
        kind, rows, scales = KINDS[ready.rows_ND.dtype], _address(ready.rows_ND), _address(ready.scale_N)
        counts, dimension = _address(counts_P), ready.rows_ND.shape[1]
        passage, parts = 0, []
        while passage < len(counts_P):
            search.num_found = 0
            passage = self.loops.mvr_scan(
                kind, rows, scales, counts, passage, len(counts_P), dimension, ctypes.addressof(question), AHEAD_BYTES,
                ctypes.addressof(search), queries.space_at,
            )  # fmt: skip
            parts.append(
                [column[: search.num_found].copy() for column in (queries.query_M, queries.passage_M, queries.upper_M)]
            )
        return Candidates(*parts[0]) if len(parts) == 1 else Candidates(*map(np.concatenate, zip(*parts)))

    def lows(self, queries: NativeQueries) -> FloatArray:
        return queries.low_QK

    def kth(self, queries: NativeQueries) -> FloatArray:
        return queries.low_QK[:, 0]

    def restart(self, queries: NativeQueries, low_QK: FloatArray) -> None:
        queries.low_QK = np.ascontiguousarray(low_QK[:, ::-1], np.float32)  # ascending numbers are a heap


@dataclass
class RoundedQueries(PlainQueries[NDArray[Any]]):
    """Queries in float32, or for codes in sixteen bits, each in its unit."""

    unit_Q: NDArray[np.float32] | None = None


class Avx2Kernel(HostKernel):
    """Multiplies a few queries by the loops of `scan.c` for AVX2. Raises RuntimeError where `library_avx2` is None."""

    vectors_per_step = STEP
    gather_share = 0.0

    def __init__(self, threads: int | None = None) -> None:
        loops = library_avx2()
        if loops is None:
            raise RuntimeError(f"{LIBRARY} was not built, or this processor lacks AVX2")
        self.loops = loops
        self.threads = threads or num_threads()

    def ready(self, rows_ND: NDArray[Any], scale_N1: NDArray[Any] | None = None) -> NativeRows:
        return _as_stored(rows_ND, scale_N1)

    def max_norm(self, ready: NativeRows) -> float:
        kind, (count, dimension) = KINDS[ready.rows_ND.dtype], ready.rows_ND.shape
        return self.loops.mvr_max_norm_avx2(kind, _address(ready.rows_ND), _address(ready.scale_N), count, dimension)

    def prepare(self, queries_QD: NDArray[np.float32], limit: int, with_codes: bool) -> RoundedQueries:
        plain = super().prepare(np.ascontiguousarray(queries_QD, np.float32), limit, with_codes)
        if not with_codes:
            return RoundedQueries(plain.queries_QD, plain.low_QK, plain.rounding_Q)
        whole_QD, unit_Q, rounding_Q = _round_queries(queries_QD)
        return RoundedQueries(whole_QD.astype(np.int16, order="C"), plain.low_QK, rounding_Q, unit_Q=unit_Q)

    def candidates(
        self,
        queries: RoundedQueries,
        ready: NativeRows,
        counts_P: IntArray,
        uniform: int,
        error_Q: FloatArray,
        mask_P: NDArray[np.bool_] | None = None,
    ) -> Candidates:
        """As of other kernels; vectors outside the mask are not read."""
        counts_P = np.ascontiguousarray(counts_P, np.int64)
        first_P = np.cumsum(counts_P) - counts_P
        if mask_P is None:
            return self.select(queries, self.best_views(queries, ready, first_P, counts_P), error_Q)
        passing_M = np.flatnonzero(mask_P)
        best_QM = self.best_views(queries, ready, first_P[passing_M], counts_P[passing_M])
        candidates = self.select(queries, best_QM, error_Q)
        return candidates._replace(passage_M=passing_M[candidates.passage_M])

    def best_views(
        self, queries: RoundedQueries, ready: NativeRows, first_P: IntArray, counts_P: IntArray
    ) -> NDArray[np.float32]:
        """Compute best_QP, the best inner product of the `counts_P` vectors from `first_P` on."""
        best_QP = np.empty((len(queries.queries_QD), len(counts_P)), np.float32)
        self.loops.mvr_best_views(
            KINDS[ready.rows_ND.dtype], _address(ready.rows_ND), _address(ready.scale_N), _address(first_P),
            _address(counts_P), len(counts_P), ready.rows_ND.shape[1], _address(queries.queries_QD),
            _address(queries.unit_Q), len(best_QP), _address(best_QP),
        )  # fmt: skip
        return best_QP


class BlockRows:
    """Where a block lies, for the compiled loop of exact scores."""

    def __init__(self, block: EmbeddingBlock) -> None:
        row_ptr = np.ascontiguousarray(block.row_ptr, np.int64)
        number_N = np.ascontiguousarray(block.view_numbers_N, np.int16)
        self.kept = block.vectors_ND, row_ptr, number_N
        self.arguments = KINDS[block.vectors_ND.dtype], *map(_address, self.kept), block.vectors_ND.shape[1]


def rows_of(block: EmbeddingBlock) -> BlockRows | None:
    """Where a block lies; None where the compiled loop cannot score its passages."""
    vectors_ND = block.vectors_ND
    if vectors_ND.dtype not in (np.float32, np.float16) or not vectors_ND.flags.c_contiguous:
        return None
    return BlockRows(block) if library() or library_avx2() else None


def rescore(
    spans: Sequence[tuple[BlockRows, int, int]],
    queries_QD: FloatArray,
    query_M: IntArray,
    row_M: IntArray,
    score_M: NDArray[np.float32],
    view_M: NDArray[np.int16],
) -> None:
    """Fill `score_M` and `view_M` with the scores of `exact`, to the last bit: for each span of the pairs, its block.
    `row_M` are rows in the block. Indices are int64 and contiguous."""
    loops = library() or library_avx2()
    assert loops is not None, "ask `rows_of` first"
    wide, terms = np.zeros(queries_QD.size + 8), np.empty(queries_QD.shape[1] + 8)
    wide[: queries_QD.size] = queries_QD.ravel()
    query, row, score, view = query_M.ctypes.data, row_M.ctypes.data, score_M.ctypes.data, view_M.ctypes.data
    queries_at, terms_at = wide.ctypes.data, terms.ctypes.data
    for block, low, high in spans:
        loops.mvr_rescore(
            *block.arguments, queries_at, high - low, query + 8 * low, row + 8 * low, score + 4 * low, view + 2 * low,
            terms_at,
        )  # fmt: skip


def _pack_floats(queries_QD: FloatArray, num_padded: int) -> NDArray[np.float32]:
    """Panels of 48 queries, the last of 16, 32 or 48, each [D, queries]; one query between zeros, [16 + D + 16]."""
    if len(queries_QD) == 1:
        return np.pad(queries_QD[0].astype(np.float32, copy=False), LANES)
    every = np.zeros((num_padded, queries_QD.shape[1]), np.float32)
    every[: len(queries_QD)] = queries_QD
    return np.concatenate([every[at : at + PANEL].T.ravel() for at in range(0, num_padded, PANEL)])


class _SplitQueries(NamedTuple):
    """Both bfloat16 parts of padded queries, and the norms of what the first leaves of them."""

    high_QD: NDArray[np.uint16]
    low_QD: NDArray[np.uint16]
    rounding_Q: FloatArray


def _split_queries(queries_QD: FloatArray, num_padded: int) -> _SplitQueries:
    num_queries, dimension = queries_QD.shape
    every = np.zeros((num_padded, -(-dimension // 32) * 32), np.float32)
    every[:num_queries, :dimension] = queries_QD
    high = _bfloat16(every)
    rest = every - (high.astype(np.uint32) << 16).view(np.float32)
    rounding_Q = np.linalg.norm(rest[:num_queries].astype(np.float64), axis=1) * (1 + 2.0**-40)
    return _SplitQueries(high, _bfloat16(rest), rounding_Q)


def _pack_tiles(parts: Sequence[NDArray[np.uint16]]) -> NDArray[np.uint16]:
    """bfloat16 parts of queries, [16 queries][D / 32][part][16 pairs of D][query][2]."""
    num_padded, width = parts[0].shape
    pairs = np.stack(parts).reshape(len(parts), num_padded // LANES, LANES, width // 32, 16, 2)
    return np.ascontiguousarray(pairs.transpose(1, 3, 0, 4, 2, 5)).ravel()


def _pack_short(high_QD: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Panels of 48 queries, the last of 16, 32 or 48, each [D / 2][queries][2]."""
    num_padded, width = high_QD.shape
    pairs = high_QD.reshape(num_padded, width // 2, 2)
    return np.concatenate([pairs[at : at + PANEL].transpose(1, 0, 2).ravel() for at in range(0, num_padded, PANEL)])


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper half of float32's bits, rounded to the nearest, to even on ties."""
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


def _round_queries(queries_QD: FloatArray) -> _WholeQueries:
    wide_QD = queries_QD.astype(np.float64)
    unit_Q = (np.abs(wide_QD).max(axis=1, initial=0.0) / LARGEST_HALF).astype(np.float32)
    divisor_Q1 = np.where(unit_Q > 0, unit_Q, np.inf).astype(np.float64)[:, None]
    whole_QD = np.clip(np.rint(wide_QD / divisor_Q1), -LARGEST_HALF, LARGEST_HALF)
    away_QD = wide_QD - whole_QD * unit_Q[:, None].astype(np.float64)
    return _WholeQueries(whole_QD, unit_Q, np.linalg.norm(away_QD, axis=1) * (1 + 2.0**-40))


def _pack_codes(queries_QD: FloatArray, num_padded: int) -> _CodeQueries:
    """The halves h and l, the constants that take off what making codes unsigned put on, t, and |q - q'|."""
    num_queries, dimension = queries_QD.shape
    alone = num_queries == 1 and dimension <= 8192
    whole_QD, unit_Q, rounding_Q = _round_queries(queries_QD)
    width = -(-dimension // 64) * 64
    halves_2QD = np.zeros((2, num_padded, width), np.int32)
    halves_2QD[0, :num_queries, :dimension] = (whole_QD.astype(np.int32) + 128) >> 8
    halves_2QD[1, :num_queries, :dimension] = whole_QD.astype(np.int32)
    halves_2QD[1] -= 256 * halves_2QD[0]
    units = np.zeros(num_padded, np.float32)
    units[:num_queries] = unit_Q
    if alone:
        panels = halves_2QD[:, 0]
        bias = -128 * panels.reshape(2, -1, LANES, 4).sum(axis=(1, 3))
    else:
        by_panel = halves_2QD.reshape(2, num_padded // LANES, LANES, width // 4, 4)
        panels = by_panel.transpose(1, 3, 0, 2, 4)  # panel, four of D, half, query, one of four
        bias = -128 * by_panel.sum(axis=(3, 4)).transpose(1, 0, 2)
    return _CodeQueries(
        np.ascontiguousarray(panels, np.int8).ravel(), np.ascontiguousarray(bias, np.int32).ravel(), units, rounding_Q
    )


def _address(array: NDArray[Any] | None) -> int | None:
    return None if array is None else array.__array_interface__["data"][0]


def num_threads() -> int:
    """Number of threads: torch's where it is loaded, else OMP_NUM_THREADS, else one a processor."""
    torch = sys.modules.get("torch")
    if torch is not None:
        return torch.get_num_threads()
    setting = os.environ.get("OMP_NUM_THREADS", "")
    return int(setting) if setting.isdigit() and int(setting) else os.cpu_count() or 1
