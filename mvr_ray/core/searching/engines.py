"""Choose the kernel of a scan: compiled loops, a GPU's, torch's or numpy's."""

import importlib.util
from typing import Any, NamedTuple

from mvr_ray.core.searching.kernels import Kernel, NumpyKernel, TorchKernel
from mvr_ray.errors import ShardIndexError

ENGINES = ("auto", "native", "torch", "numpy")


class KernelForFew(NamedTuple):
    """A kernel that is faster than `make_kernel`'s for up to so many queries, where up to this share of the passages
    passes the filter; 1 where it is without a filter, too."""

    kernel: Kernel[Any, Any]
    most_queries: int
    most_share: float


def make_kernel_for_few(engine: str, device: str, threads: int | None) -> KernelForFew | None:
    """Make it for the same arguments as `make_kernel`; None where there is none.

    The loops for AVX2 read no vector that does not pass a filter, where those for AVX-512 copy the others together or
    read all; torch's product of matrices is slower for few queries in any case.
    """
    from mvr_ray.core.searching.native import Avx2Kernel, library, library_avx2

    if engine != "auto" or device != "cpu" or library_avx2() is None:
        return None
    kernel = Avx2Kernel(threads)
    return KernelForFew(kernel, 8, 1.0) if library() is None else KernelForFew(kernel, 4, 0.4)


def make_kernel(engine: str = "auto", device: str = "cpu", threads: int | None = None) -> Kernel[Any, Any]:
    """`engine`: native, torch, numpy, or auto: on a CPU native where it was built and this processor can run it; then
    torch where it is installed."""
    if engine not in ENGINES:
        raise ShardIndexError(f"engine is {engine!r}; it must be one of {', '.join(ENGINES)}")
    if engine == "native" or (engine == "auto" and device == "cpu"):
        from mvr_ray.core.searching.native import NativeKernel, library

        if library() is not None and device == "cpu":
            return NativeKernel(threads)
        if engine == "native":
            raise ShardIndexError(
                f"engine 'native' cannot search on {device!r} here; it needs a CPU with AVX-512 and VNNI and mvr_ray "
                f"installed with a C compiler; use engine 'auto'"
            )
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
        from mvr_ray.core.searching.cuda_scan import FusedKernel

        return FusedKernel(device)
    return kernel
