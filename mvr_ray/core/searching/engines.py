"""Choose the kernel of a scan: compiled loops, a GPU kernel, torch or numpy."""

import importlib.util
from typing import TYPE_CHECKING

from mvr_ray.core.searching.kernels import Kernel, NumpyKernel, TorchKernel
from mvr_ray.errors import ShardIndexError

if TYPE_CHECKING:
    from mvr_ray.core.searching.native import Avx2Kernel

ENGINES = ("auto", "native", "torch", "numpy")


def make_small_batch_kernel(
    engine: str, device: str, threads: int | None, *, with_codes: bool, is_half: bool
) -> "Avx2Kernel | None":
    """Create the kernel that is faster than that of `make_kernel` of the same arguments for few queries; None where
    there is none. `is_half`: the vectors are float16.

    The loops for AVX2 read only vectors (or codes) that pass a filter, while those for AVX-512 copy these together or
    read all, and without AMX widen halves and codes for every batch. The shares are measured (`benchmarks/notes.md`).
    """
    from mvr_ray.core.searching.native import Avx2Kernel, library

    loops = library()
    if engine != "auto" or device != "cpu" or loops is None:
        return None
    kernel = Avx2Kernel(threads)
    kernel.max_shares = (0.4 if with_codes else 0.6,) * 4
    if loops.mvr_short() and not loops.mvr_tiles() and (with_codes or is_half):
        kernel.max_shares = (0.4 if with_codes else 0.9, *(1.0,) * 3, *(0.5,) * 4)
    return kernel


def make_kernel(engine: str = "auto", device: str = "cpu", threads: int | None = None) -> Kernel:
    """Create the kernel of an engine: native, torch, numpy, or auto. auto selects native on a CPU that supports it if
    it was built, else torch if installed."""
    if engine not in ENGINES:
        raise ShardIndexError(f"engine is {engine!r}; it must be one of {', '.join(ENGINES)}")
    if engine == "native" or (engine == "auto" and device == "cpu"):
        from mvr_ray.core.searching.native import Avx2Kernel, NativeKernel, library, library_avx2

        if library_avx2() is not None and device == "cpu":
            return NativeKernel(threads) if library() else Avx2Kernel(threads)
        if engine == "native":
            raise ShardIndexError(
                f"engine 'native' cannot search on {device!r} here; it needs a CPU with AVX2 and mvr_ray installed "
                f"with a C compiler; use engine 'auto'"
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
