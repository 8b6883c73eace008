"""Choose the kernel of a scan: compiled loops, a GPU kernel or torch."""

from mvr_ray.core.searching.kernels import Kernel, TorchKernel
from mvr_ray.core.searching.native import Avx2Kernel, NativeKernel, library, library_avx2


def make_small_batch_kernel(device: str, threads: int | None, *, with_codes: bool, is_half: bool) -> Avx2Kernel | None:
    """Create the kernel that is faster than that of `make_kernel` of the same arguments for few queries; None where
    there is none. `is_half`: the vectors are float16.

    The loops for AVX2 read only vectors (or codes) that pass a filter, while those for AVX-512 copy these together or
    read all, and without AMX widen halves and codes for every batch. The shares are measured (`benchmarks/notes.md`).
    """
    loops = library()
    if device != "cpu" or loops is None:
        return None
    kernel = Avx2Kernel(threads)
    kernel.max_shares = (0.4 if with_codes else 0.6,) * 4
    if loops.mvr_short() and not loops.mvr_tiles() and (with_codes or is_half):
        kernel.max_shares = (0.4 if with_codes else 0.9, *(1.0,) * 3, *(0.5,) * 4)
    return kernel


def make_kernel(device: str = "cpu", threads: int | None = None) -> Kernel:
    """Create the fastest kernel of a device: compiled loops on a CPU that supports them if they were built, else torch.
    Raises ShardIndexError for a device that is not there."""
    if device == "cpu" and library_avx2() is not None:
        return NativeKernel(threads) if library() else Avx2Kernel(threads)
    kernel = TorchKernel(device, threads)
    if kernel.device.type == "cuda":
        from mvr_ray.core.searching.cuda_scan import FusedKernel

        return FusedKernel(device)
    return kernel
