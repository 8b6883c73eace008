"""Compute approximate scores of one step of a scan in torch, on a CPU or a GPU; `native` has the compiled loops.

A kernel multiplies, takes the best view of each passage, and returns the passages that may still be among the best k.
Its error has a known bound, and `exact` scores its candidates exactly, so all kernels give the same hits.

Shapes: Q queries, P passages of the step, N vectors of the step, D dimension, K best kept.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mvr_ray.core.searching.codes import Codes
from mvr_ray.core.threads import torch_threads
from mvr_ray.errors import ShardIndexError
from mvr_ray.types import FloatArray, IntArray

if TYPE_CHECKING:
    import torch

CPU_STEP = 4096  # vectors whose float32 form fits a cache: converting them costs no memory traffic
GPU_STEP = 131072
MANY_SCORES = 65536  # without lower bounds these take longer to sort than to scan in two halves


class Candidates(NamedTuple):
    """Passages that may be among the best k, by position in the step, with an upper bound of their score."""

    query_M: IntArray
    passage_M: IntArray
    upper_M: FloatArray


def round_up(value: float) -> float:
    """Round up to six bits, so that most steps of a shard share a bound and an error."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(math.ceil(mantissa * 64) / 64, exponent)


@dataclass(eq=False)
class Step:
    """Passages multiplied at once, without those that have no view, and cached bounds of their vectors.

    row_P            row in the shard
    counts_P         number of views
    uniform          the common number of views, 0 where they differ
    vectors          of the block, N of them
    visible_P        the passages that no change hides, None: all
    codes            of these vectors, scanned in their place
    norm             of a vector, -1 until measured
    coarse_residual  the rounding of a vector in coarse products, -1 until measured
    resident         the vectors, or the codes and their scales, on the kernel's device; None: copied for every scan
    """

    row_P: IntArray
    counts_P: IntArray
    uniform: int
    vectors_ND: FloatArray
    visible_P: NDArray[np.bool_] | None = None
    codes: Codes | None = None
    norm: float = -1.0
    coarse_residual: float = -1.0
    resident: tuple[Any, Any] | None = None

    @cached_property
    def residual(self) -> float:
        """Bound the distances of the codes from their vectors."""
        return 0.0 if self.codes is None else round_up(float(self.codes.residual_N.max()))


class StepPart(NamedTuple):
    """The part of a step that is scanned under a filter.

    row_P      the passages to scan
    counts_P   their numbers of views, all at least 1
    mask_P     those of them that pass, contiguous; None where all pass
    vectors_M  the vectors to copy for the scan, None where all are scanned
    """

    step: Step
    row_P: IntArray
    counts_P: IntArray
    mask_P: NDArray[np.bool_] | None = None
    vectors_M: IntArray | None = None

    @property
    def num_passages(self) -> int:
        return len(self.row_P) if self.mask_P is None else int(np.count_nonzero(self.mask_P))


class Coarse(NamedTuple):
    """Rounding of the factors of coarse products, which are faster than fine ones: norms, as for codes."""

    rounding_Q: FloatArray
    """Of each query, float64."""
    max_residual: Callable[[Any], float]
    """Returns the largest residual of a prepared step in float32; infinite where a vector is too large."""


@dataclass
class PreparedQueries:
    """Queries on a kernel's device, and the precision of its products with them."""

    queries_QD: Any
    low_QK: Any
    """The K best lower bounds of each query so far, best first."""
    rounding_Q: FloatArray
    """The norm of each query's rounding error, float64."""
    input_rounding: float = 0.0
    """Relative error of a factor that is multiplied in less than float32 (TF32, bfloat16), else 0."""
    products: int = 1
    """Products summed for each dimension, or more where their magnitudes exceed the term's."""
    coarse: Coarse | None = None
    """Set by the caller: multiply the next steps coarsely, one product a dimension; None: by fine products."""


class Kernel(ABC):
    """Computes approximate scores. Arrays of type `Any` are on the kernel's device, by default the host."""

    vectors_per_step: int
    threads = 1
    """Number of the kernel's calls that may run concurrently, each on different steps."""
    gather_share = 0.15
    """Share of a step's passages that pass a filter below which copying their vectors costs less than masking."""
    halves_are_faster = False
    """Whether batches of queries scan fp16 vectors faster than their codes."""

    def put(self, rows: NDArray[Any]) -> Any:
        """Copy host rows to the device, in their own dtype."""
        return rows

    def running(self) -> AbstractContextManager[None]:
        """Return the context of the kernel's calls in a thread."""
        return nullcontext()

    @abstractmethod
    def prepare_rows(self, rows_ND: Any, scale_N1: Any = None) -> Any:
        """Prepare a step for `max_norm` and `candidates`, such as vectors in float32; codes come with their scales."""

    @abstractmethod
    def max_norm(self, step_rows: Any) -> float:
        """Compute the largest Euclidean norm in float32."""

    def prepare(self, queries_QD: NDArray[np.float32], limit: int, with_codes: bool) -> PreparedQueries:
        """Prepare queries for their `limit` best passages. `with_codes`: steps are codes."""
        low_QK = np.full((len(queries_QD), limit), -np.inf, np.float32)
        return PreparedQueries(self.put(queries_QD), low_QK, np.zeros(len(queries_QD)))

    @abstractmethod
    def candidates(self, queries: Any, step_rows: Any, part: StepPart, error_Q: FloatArray) -> Candidates:
        """Find the passages of a step that may be among the best K, and raise the lower bounds. `error_Q` bounds a
        product's error."""

    def lower_bounds(self, queries: Any) -> FloatArray:
        """Return the K best lower bounds of each query, in any order, on the host."""
        return queries.low_QK

    def set_lower_bounds(self, queries: Any, low_QK: FloatArray) -> None:
        """Replace the lower bounds, given in any order."""
        queries.low_QK = -np.sort(-low_QK, axis=1)


def select_candidates(
    queries: PreparedQueries, best_PQ: FloatArray, error_Q: FloatArray, mask_P: NDArray[np.bool_] | None = None
) -> Candidates:
    """Raise the lower bounds by these scores, and find the passages that may be among the best K."""
    k, low_Q = queries.low_QK.shape[1], queries.low_QK[:, -1]
    half = len(best_PQ) // 2
    # The bounds of the first half spare most of the second.
    if half > k and best_PQ.size > MANY_SCORES and np.isinf(low_Q).any():
        first = select_candidates(queries, best_PQ[:half], error_Q, None if mask_P is None else mask_P[:half])
        second = select_candidates(queries, best_PQ[half:], error_Q, None if mask_P is None else mask_P[half:])
        return Candidates(
            np.concatenate([first.query_M, second.query_M]),
            np.concatenate([first.passage_M, second.passage_M + half]),
            np.concatenate([first.upper_M, second.upper_M]),
        )
    error_Q = error_Q.astype(np.float32)
    cut_Q = low_Q - error_Q - (np.abs(low_Q) + error_Q) * np.float32(2.0**-21)  # below all that roundings may raise
    passage_M, query_M = np.divmod(np.flatnonzero(best_PQ >= cut_Q), len(low_Q))
    best_M = best_PQ[passage_M, query_M]
    is_inside_M = best_M + error_Q[query_M] >= low_Q[query_M]
    if mask_P is not None:
        is_inside_M &= mask_P[passage_M]
    inside_M = np.flatnonzero(is_inside_M)
    inside_M = inside_M[np.argsort(query_M[inside_M], kind="stable")]
    query_M, passage_M, best_M = query_M[inside_M], passage_M[inside_M], best_M[inside_M]
    if not len(query_M):
        return Candidates(query_M, passage_M, best_M)
    rank_M = np.arange(len(query_M)) - np.searchsorted(query_M, query_M)
    new_QM = np.full((len(low_Q), int(rank_M.max()) + 1), -np.inf, np.float32)
    new_QM[query_M, rank_M] = best_M - error_Q[query_M]
    both = np.concatenate([queries.low_QK, new_QM], axis=1)
    queries.low_QK = -np.sort(np.partition(-both, k - 1, axis=1)[:, :k], axis=1)
    upper_M = best_M + error_Q[query_M]
    is_candidate_M = upper_M >= queries.low_QK[query_M, -1]
    return Candidates(query_M[is_candidate_M], passage_M[is_candidate_M], upper_M[is_candidate_M])


class TorchKernel(Kernel):
    """Computes scores in torch on a CPU or a GPU. `num_threads` of torch on a CPU; None: those that it has."""

    def __init__(self, device: str = "cpu", num_threads: int | None = None) -> None:
        import torch

        try:
            self.device = torch.device(device)
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise ShardIndexError(f"cannot search on device {device!r}: {error}; use 'cpu' or a present GPU") from error
        self.vectors_per_step = CPU_STEP if self.device.type == "cpu" else GPU_STEP
        self.num_threads = num_threads if self.device.type == "cpu" else None

    def running(self) -> AbstractContextManager[None]:
        return nullcontext() if self.num_threads is None else torch_threads(self.num_threads)

    @property
    def input_rounding(self) -> float:
        """The largest current rounding of factors in torch's backends: 0 unless TF32 or bfloat16 is enabled."""
        import torch

        cuda, onednn = torch.backends.cuda.matmul, torch.backends.mkldnn
        precisions = {
            torch.get_float32_matmul_precision(),
            getattr(torch.backends, "fp32_precision", "none"),
            getattr(cuda, "fp32_precision", "none"),
            getattr(onednn, "fp32_precision", "none"),
            getattr(getattr(onednn, "matmul", None), "fp32_precision", "none"),
        }
        if precisions <= {"highest", "ieee", "none"}:
            return 0.0
        return 2.0**-10 if precisions <= {"highest", "ieee", "none", "high", "tf32"} else 2.0**-8

    def put(self, rows: NDArray[Any]) -> "torch.Tensor":
        import torch

        return torch.from_numpy(_as_writeable(rows)).to(self.device)

    def get(self, array: Any) -> NDArray[Any]:
        """Copy a device array to the host."""
        return array.cpu().numpy()

    def prepare_rows(self, rows_ND: Any, scale_N1: Any = None) -> Any:
        return rows_ND.float() if scale_N1 is None else rows_ND.float().mul_(scale_N1)

    def max_norm(self, step_rows: Any) -> float:
        import torch

        return float(torch.linalg.vector_norm(step_rows, dim=1).max())

    def prepare(self, queries_QD: NDArray[np.float32], limit: int, with_codes: bool) -> PreparedQueries:
        queries = super().prepare(queries_QD, limit, with_codes)
        queries.input_rounding = self.input_rounding
        return queries

    def candidates(self, queries: PreparedQueries, step_rows: Any, part: StepPart, error_Q: FloatArray) -> Candidates:
        best_QP = self.best_views(queries.queries_QD, step_rows, part.counts_P, part.step.uniform)
        return select_candidates(queries, self.get(best_QP).T, error_Q, part.mask_P)

    def best_views(self, queries_QD: Any, step_rows: Any, counts_P: IntArray, uniform: int) -> Any:
        """Compute best_QP, each passage's best inner product."""
        import torch

        scores_NQ = step_rows @ queries_QD.T  # a passage's views are whole rows: the maximum vectorises over Q
        if uniform:
            best_PQ = scores_NQ.view(-1, uniform, len(queries_QD)).amax(1)
        else:
            lengths_P = torch.from_numpy(np.array(counts_P, np.int64)).to(self.device)
            best_PQ = torch.segment_reduce(scores_NQ, "max", lengths=lengths_P, axis=0)
        return best_PQ.T


class _Alias:
    """Presents an array's memory as writable, and keeps the array alive."""

    def __init__(self, array: FloatArray) -> None:
        pointer = array.__array_interface__["data"][0]
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (pointer, False)}


def _as_writeable(array: FloatArray) -> NDArray[np.floating]:
    """Present read-only memory, such as a mapped file, as writable: torch warns otherwise. Nothing writes to it."""
    return array if array.flags.writeable or not array.size else np.asarray(_Alias(array))
