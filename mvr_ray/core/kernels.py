"""The fast half of a scan: approximate scores of one step in float32, on numpy, or on torch (CPU or GPU).

A kernel multiplies, takes the best view of each passage, and tells which passages may still be among the best k. It may
err by a known bound; what it lets through is scored exactly elsewhere (`exact`), so two kernels give the same answers.

Shapes: Q queries, P passages of the step, N vectors of the step, D dimension, K best kept.
"""

import importlib.util
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from mvr_ray.errors import ShardIndexError
from mvr_ray.types import FloatArray, IntArray

if TYPE_CHECKING:
    import torch

Array = TypeVar("Array")

CPU_STEP = 4096  # vectors whose float32 form stays in a cache: converting them then costs no memory traffic
GPU_STEP = 131072


class Survivors(NamedTuple):
    """Passages that may be among the best k, by position in the step, with an upper bound of their score."""

    query_M: IntArray
    passage_M: IntArray
    upper_M: FloatArray


class Kernel(Protocol[Array]):
    """Arrays of type `Array` live on the kernel's device."""

    vectors_per_step: int

    @property
    def input_rounding(self) -> float:
        """Relative error of a factor when the hardware multiplies in less than float32 (TF32, bfloat16), else 0."""
        ...

    def put(self, rows: NDArray[Any]) -> Array:
        """Host rows on the device, in their own dtype."""
        ...

    def float32(self, rows_ND: Array, scale_N1: Array | None = None) -> Array:
        """Vectors as float32; codes times their scales, where these are given."""
        ...

    def max_norm(self, vectors_ND: Array) -> float:
        """The largest Euclidean norm, computed in float32."""
        ...

    def best_views(self, queries_QD: Array, vectors_ND: Array, counts_P: IntArray, uniform: int) -> Array:
        """best_QP: each passage's best inner product. `uniform` is the common number of views, 0 where they differ."""
        ...

    def select(self, best_QP: Array, error_Q: FloatArray, low_QK: Array) -> tuple[Array, Survivors]:
        """The K best lower bounds so far, best first, and who may still be among the best K."""
        ...

    def kth(self, low_QK: Array) -> FloatArray:
        """The last column, on the host."""
        ...


class NumpyKernel:
    """The kernel of a machine without torch."""

    vectors_per_step = CPU_STEP
    input_rounding = 0.0

    def put(self, rows: NDArray[Any]) -> NDArray[Any]:
        return rows

    def float32(self, rows_ND: FloatArray, scale_N1: FloatArray | None = None) -> FloatArray:
        vectors_ND = rows_ND.astype(np.float32, copy=False)
        return vectors_ND if scale_N1 is None else vectors_ND * scale_N1

    def max_norm(self, vectors_ND: FloatArray) -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            return float(np.sqrt(np.einsum("nd,nd->n", vectors_ND, vectors_ND).max()))

    def best_views(
        self, queries_QD: FloatArray, vectors_ND: FloatArray, counts_P: IntArray, uniform: int
    ) -> FloatArray:
        scores_QN = queries_QD @ vectors_ND.T
        if uniform:
            return scores_QN.reshape(len(queries_QD), -1, uniform).max(axis=2)
        return np.maximum.reduceat(scores_QN, np.cumsum(counts_P) - counts_P, axis=1)

    def select(self, best_QP: FloatArray, error_Q: FloatArray, low_QK: FloatArray) -> tuple[FloatArray, Survivors]:
        error_Q1 = error_Q[:, None].astype(np.float32)
        upper_QP = best_QP + error_Q1
        if (upper_QP >= low_QK[:, -1:]).any():
            k = low_QK.shape[1]
            both = np.concatenate([low_QK, best_QP - error_Q1], axis=1)
            low_QK = -np.sort(np.partition(-both, k - 1, axis=1)[:, :k], axis=1)
        query_M, passage_M = np.nonzero(upper_QP >= low_QK[:, -1:])
        return low_QK, Survivors(query_M, passage_M, upper_QP[query_M, passage_M])

    def kth(self, low_QK: FloatArray) -> FloatArray:
        return low_QK[:, -1]


class TorchKernel:
    """Torch on a CPU or a GPU."""

    def __init__(self, device: str = "cpu") -> None:
        import torch

        try:
            self.device = torch.device(device)
            torch.empty(0, device=self.device)
        except (RuntimeError, AssertionError) as error:
            raise ShardIndexError(f"cannot search on device {device!r}: {error}; use 'cpu' or a present GPU") from error
        self.vectors_per_step = CPU_STEP if self.device.type == "cpu" else GPU_STEP

    @property
    def input_rounding(self) -> float:
        return _torch_input_rounding()

    def put(self, rows: NDArray[Any]) -> "torch.Tensor":
        import torch

        return torch.from_numpy(_as_writeable(rows)).to(self.device)

    def float32(self, rows_ND: "torch.Tensor", scale_N1: "torch.Tensor | None" = None) -> "torch.Tensor":
        return rows_ND.float() if scale_N1 is None else rows_ND.float().mul_(scale_N1)

    def max_norm(self, vectors_ND: "torch.Tensor") -> float:
        return float(vectors_ND.square().sum(1).max().sqrt())

    def best_views(
        self, queries_QD: "torch.Tensor", vectors_ND: "torch.Tensor", counts_P: IntArray, uniform: int
    ) -> "torch.Tensor":
        import torch

        scores_NQ = vectors_ND @ queries_QD.T  # views of a passage are then whole rows: the maximum vectorises over Q
        if uniform:
            best_PQ = scores_NQ.view(-1, uniform, len(queries_QD)).amax(1)
        else:
            lengths_P = torch.from_numpy(np.array(counts_P, np.int64)).to(self.device)
            best_PQ = torch.segment_reduce(scores_NQ, "max", lengths=lengths_P, axis=0)
        return best_PQ.T.contiguous()

    def select(
        self, best_QP: "torch.Tensor", error_Q: FloatArray, low_QK: "torch.Tensor"
    ) -> tuple["torch.Tensor", Survivors]:
        import torch

        error_Q1 = self.put(error_Q[:, None].astype(np.float32))
        upper_QP = best_QP + error_Q1
        if bool((upper_QP >= low_QK[:, -1:]).any()):
            low_QK = torch.cat([low_QK, best_QP - error_Q1], dim=1).topk(low_QK.shape[1], dim=1).values
        query_M, passage_M = torch.nonzero(upper_QP >= low_QK[:, -1:], as_tuple=True)
        upper_M = upper_QP[query_M, passage_M]
        return low_QK, Survivors(query_M.cpu().numpy(), passage_M.cpu().numpy(), upper_M.cpu().numpy())

    def kth(self, low_QK: "torch.Tensor") -> FloatArray:
        return low_QK[:, -1].cpu().numpy()


def make_kernel(engine: str = "auto", device: str = "cpu", threads: int | None = None) -> Kernel:
    """`engine`: torch, numpy, or auto (torch where it is installed)."""
    if engine not in ("auto", "torch", "numpy"):
        raise ShardIndexError(f"engine is {engine!r}; it must be auto, torch or numpy")
    has_torch = importlib.util.find_spec("torch") is not None
    if engine == "numpy" or (engine == "auto" and not has_torch):
        if device != "cpu":
            raise ShardIndexError(f"cannot search on device {device!r} without torch; install torch or use 'cpu'")
        return NumpyKernel()
    if not has_torch:
        raise ShardIndexError("engine is 'torch', and torch is not installed; install it or use engine 'numpy'")
    import torch

    if threads is not None and threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    kernel = TorchKernel(device)
    if kernel.device.type == "cuda":
        from mvr_ray.core.cuda_scan import FusedKernel

        return FusedKernel(device)
    return kernel


def _torch_input_rounding() -> float:
    """How coarsely torch may round factors now, in any of its backends: 0 unless someone asked for TF32 or bfloat16."""
    import torch

    cuda, onednn = torch.backends.cuda.matmul, torch.backends.mkldnn
    asked = {
        torch.get_float32_matmul_precision(),
        getattr(torch.backends, "fp32_precision", "none"),
        getattr(cuda, "fp32_precision", "none"),
        getattr(onednn, "fp32_precision", "none"),
        getattr(getattr(onednn, "matmul", None), "fp32_precision", "none"),
    }
    if asked <= {"highest", "ieee", "none"}:
        return 0.0
    return 2.0**-10 if asked <= {"highest", "ieee", "none", "high", "tf32"} else 2.0**-8


class _Alias:
    """An array's memory under the claim that it may be written, and the array itself, kept alive."""

    def __init__(self, array: FloatArray) -> None:
        pointer = array.__array_interface__["data"][0]
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (pointer, False)}


def _as_writeable(array: FloatArray) -> NDArray[np.floating]:
    """Torch warns of read-only memory, such as a mapped file; we hand it over unwarned, and never write to it."""
    return array if array.flags.writeable or not array.size else np.asarray(_Alias(array))
