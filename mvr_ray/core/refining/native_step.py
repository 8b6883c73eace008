"""Run AOpt's step in float32 by the loop compiled from `step.c`.

The loop exists where the package was built with a C compiler; without it `aopt` computes the step in float64.

Partners are 16-bit integers (`to_int16`), since the time is that of reading them.

Terms are added one by one in the order of the labels. Products are summed in 16 lanes, each in order, then in pairs. A
vector's result depends on that vector alone, so any number of threads may share the vectors; the loop releases Python's
lock.

Shapes: N vectors, Q partners, M vectors that move, D dimension.
"""

import ctypes
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from mvr_ray.core.refining.pseudo_labels import LabelMatrices
from mvr_ray.core.searching import native
from mvr_ray.types import FloatArray, IntArray

LIBRARY, INTERFACE = "mvr_ray.core._step", 2
LANES = 16  # as in step.c
KINDS = {"float32": 0, "float16": 1}
ROWS_AT_ONCE = 1024  # a thread's batch


class StepVectors(NamedTuple):
    """M vectors after a step of size `step_size`, and <x, A> and <x, B> before it; float32 from `step`."""

    moved_MD: FloatArray
    scores_M2: FloatArray


class Int16Vectors(NamedTuple):
    """Vector q is unit_Q[q] whole_QD[q]; a component errs by at most max|q| / 65534 and roundings, or by 2^-110."""

    whole_QD: NDArray[np.int16]
    unit_Q: NDArray[np.float32]


class _Labels(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("index", ctypes.c_void_p), ("wide", ctypes.c_int32))


@functools.cache
def library() -> ctypes.CDLL | None:
    """Load the compiled loop; None where it was not built."""
    loop = native.load_library(LIBRARY, INTERFACE)
    if loop is None:
        return None
    whole, long, at = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    loop.mvr_round.argtypes = [at, long, long, whole, at, at]
    loop.mvr_round.restype = None
    loop.mvr_step.argtypes = [whole, at, at, at, whole, at, at, long, long, ctypes.c_float, at, at, at]
    loop.mvr_step.restype = None
    return loop


def to_int16(vectors_QD: FloatArray) -> Int16Vectors:
    """Convert each vector to 16-bit integers with a unit of its own, the largest 32,767. A vector of numbers below
    2^-110 is zero; the unit of one with an infinity or NaN is NaN. `library` must not be None."""
    vectors_QD = np.ascontiguousarray(vectors_QD, np.float32)
    loop, (count, dimension) = library(), vectors_QD.shape
    assert loop is not None, "check `library` first"
    result = Int16Vectors(native.line_zeros((count, dimension), np.int16), np.empty(count, np.float32))

    def run_rows(low: int, high: int) -> None:
        addresses = result.whole_QD.ctypes.data, result.unit_Q.ctypes.data
        loop.mvr_round(vectors_QD.ctypes.data, low, high, dimension, *addresses)

    _run_in_threads(run_rows, count)
    return result


def _run_in_threads(run_rows: Callable[[int, int], None], count: int) -> None:
    """Run batches of `ROWS_AT_ONCE` of `count` rows in threads: torch's number of them where it is loaded, else
    OMP_NUM_THREADS or one a processor."""
    with ThreadPoolExecutor(native.num_threads()) as pool:
        list(pool.map(lambda low: run_rows(low, min(low + ROWS_AT_ONCE, count)), range(0, count, ROWS_AT_ONCE)))


def step(
    vectors_ND: FloatArray,
    partners_QD: FloatArray,
    labels: LabelMatrices,
    rows_M: IntArray,
    step_size: float,
) -> StepVectors:
    """Step vectors `rows_M`, some of which may lie outside the loss's domain. `library` must not be None."""
    loop = library()
    assert loop is not None, "check `library` first"
    dimension = vectors_ND.shape[1]
    shape = (len(vectors_ND), len(partners_QD))
    if partners_QD.shape[1] != dimension or any(matrix.shape != shape for matrix in labels):
        raise ValueError(
            f"vectors have shape {vectors_ND.shape}, partners {partners_QD.shape}, labels "
            f"{[matrix.shape for matrix in labels]}; give one dimension, and labels of shape {shape}"
        )
    vectors_ND = np.ascontiguousarray(vectors_ND, None if vectors_ND.dtype.name in KINDS else np.float32)
    partners = to_int16(partners_QD)
    rows_M = np.ascontiguousarray(rows_M, np.int64)
    numbers = [_numbers(matrix) for matrix in labels]
    both = (_Labels * 2)(*(_Labels(ptr.ctypes.data, index.ctypes.data, ptr.itemsize == 8) for ptr, index in numbers))
    result = StepVectors(np.empty((len(rows_M), dimension), np.float32), np.empty((len(rows_M), 2), np.float32))

    def run_rows(low: int, high: int) -> None:
        space = np.zeros(3 * -(-dimension // LANES) * LANES, np.float32)
        loop.mvr_step(
            KINDS[vectors_ND.dtype.name], vectors_ND.ctypes.data, partners.whole_QD.ctypes.data,
            partners.unit_Q.ctypes.data, dimension, ctypes.addressof(both), rows_M.ctypes.data, low, high, step_size,
            result.moved_MD.ctypes.data, result.scores_M2.ctypes.data, space.ctypes.data,
        )  # fmt: skip

    _run_in_threads(run_rows, len(rows_M))
    return result


def _numbers(matrix: csr_array) -> tuple[IntArray, IntArray]:
    """Return each row's start and all columns, both in 4 or both in 8 bytes a number."""
    width = np.int32 if matrix.indptr.itemsize == matrix.indices.itemsize == 4 else np.int64
    return np.ascontiguousarray(matrix.indptr, width), np.ascontiguousarray(matrix.indices, width)
