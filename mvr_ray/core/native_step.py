"""The loop compiled from `step.c`: AOpt's step in float32. It is there where the package was built with a C compiler;
without it `aopt` does the same in torch, in many passes over memory.

Sums are added one by one in the order of the labels. Products are summed in 16 lanes, each in order, then in pairs. A
vector's result depends on that vector alone, so shares of them may go to any number of threads; Python's lock is not
held meanwhile.

Shapes: N vectors, Q partners, M vectors that move, D dimension.
"""

import ctypes
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from mvr_ray.core import native
from mvr_ray.core.pseudo_labels import LabelMatrices
from mvr_ray.types import FloatArray, IntArray

LIBRARY, INTERFACE = "mvr_ray.core._step", 1
LANES = 16  # as in step.c
KINDS = {"float32": 0, "float16": 1}
ROWS_AT_ONCE = 1024  # a thread takes the next so many when it is done with its own


class Stepped(NamedTuple):
    """Where a step of size `step_size` takes M vectors, and <x, A> and <x, B> before it, all float32."""

    moved_MD: NDArray[np.float32]
    scores_M2: NDArray[np.float32]


class _Labels(ctypes.Structure):
    _fields_ = (("start", ctypes.c_void_p), ("index", ctypes.c_void_p), ("wide", ctypes.c_int32))


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled loop, or None where it was not built."""
    loop = native.opened(LIBRARY, INTERFACE)
    if loop is None:
        return None
    whole, long, at = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    loop.mvr_step.argtypes = [whole, at, at, whole, at, at, long, long, ctypes.c_float, at, at, at]
    loop.mvr_step.restype = None
    return loop


def step(
    vectors_ND: FloatArray,
    partners_QD: FloatArray,
    labels: LabelMatrices,
    rows_M: IntArray,
    step_size: float,
    threads: int | None = None,
) -> Stepped:
    """All steps of vectors `rows_M`, of which some may lie outside the loss's domain. Ask `library` first.

    `threads`: as many as torch uses where it is loaded, else as OpenMP is told to, unless said otherwise.
    """
    loop = library()
    assert loop is not None, "ask `library` first"
    dimension = vectors_ND.shape[1]
    shape = (len(vectors_ND), len(partners_QD))
    if partners_QD.shape[1] != dimension or any(matrix.shape != shape for matrix in labels):
        raise ValueError(
            f"vectors have shape {vectors_ND.shape}, partners {partners_QD.shape}, labels "
            f"{[matrix.shape for matrix in labels]}; give one dimension, and labels of shape {shape}"
        )
    vectors_ND = np.ascontiguousarray(vectors_ND, None if vectors_ND.dtype.name in KINDS else np.float32)
    partners_QD = np.ascontiguousarray(partners_QD, np.float32)
    rows_M = np.ascontiguousarray(rows_M, np.int64)
    kept = [_numbers(matrix) for matrix in labels]
    both = (_Labels * 2)(*(_Labels(ptr.ctypes.data, index.ctypes.data, ptr.itemsize == 8) for ptr, index in kept))
    made = Stepped(np.empty((len(rows_M), dimension), np.float32), np.empty((len(rows_M), 2), np.float32))

    def share(low: int, high: int) -> None:
        space = np.zeros(3 * -(-dimension // LANES) * LANES, np.float32)
        loop.mvr_step(
            KINDS[vectors_ND.dtype.name], vectors_ND.ctypes.data, partners_QD.ctypes.data, dimension,
            ctypes.addressof(both), rows_M.ctypes.data, low, high, step_size,
            made.moved_MD.ctypes.data, made.scores_M2.ctypes.data, space.ctypes.data,
        )  # fmt: skip

    starts = range(0, len(rows_M), ROWS_AT_ONCE)
    with ThreadPoolExecutor(threads or native.num_threads()) as pool:
        list(pool.map(lambda low: share(low, min(low + ROWS_AT_ONCE, len(rows_M))), starts))
    return made


def _numbers(matrix: csr_array) -> tuple[IntArray, IntArray]:
    """Where each row starts, and its columns, both in 4 bytes a number or both in 8."""
    width = np.int32 if matrix.indptr.itemsize == matrix.indices.itemsize == 4 else np.int64
    return np.ascontiguousarray(matrix.indptr, width), np.ascontiguousarray(matrix.indices, width)
