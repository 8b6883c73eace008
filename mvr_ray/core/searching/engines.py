"""Choose the kernel of a scan: compiled loops, a GPU's, torch's or numpy's."""

import importlib.util
from typing import Any

from mvr_ray.core.searching.kernels import Kernel, NumpyKernel, TorchKernel
from mvr_ray.errors import ShardIndexError

FEW_QUERIES = 8
"""As many queries are multiplied faster by the loops for AVX2, on one thread, than by torch's product of matrices."""
ENGINES = ("auto", "native", "torch", "numpy")


def make_kernel_for_few(engine: str, device: str, threads: int | None) -> Kernel[Any, Any] | None:
    """Make the kernel that is faster for up to FEW_QUERIES queries than `make_kernel`'s of the same arguments; None
    where there is none: that of AVX2 is, where `auto` comes to torch or numpy on a CPU."""
    from mvr_ray.core.searching.native import Avx2Kernel, library, library_avx2

    if engine == "auto" and device == "cpu" and library() is None and library_avx2() is not None:
        return Avx2Kernel(threads)
    return None


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
