"""Exact search over all vectors of a shard, on a CPU or a GPU. Needs numpy, and uses torch where it is installed.

Shapes: Q queries, D dimension.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mvr_ray.core.searching.codes import Codes, encode
from mvr_ray.core.searching.engines import make_kernel
from mvr_ray.core.searching.exact import checked_k, checked_queries
from mvr_ray.core.searching.kernels import TorchKernel
from mvr_ray.core.searching.scan import Scan
from mvr_ray.errors import ShardIndexError
from mvr_ray.types import EmbeddingBlock, FloatArray, Searched, ShardHits

RESIDENT_SHARE = 0.8
_ROWS = 4096


CODES_FILE, SCALES_FILE = "codes.npy", "scales.npy"


def build_codes(blocks: Sequence[EmbeddingBlock], folder: Path) -> list[str]:
    """Write the eight-bit codes of all vectors in order, and beside them scales and residuals (`searching.codes`)."""
    rows = [block.vectors_ND[int(block.row_ptr[0]) : int(block.row_ptr[-1])] for block in blocks if len(block.ids)]
    count, dimension = sum(map(len, rows)), blocks[0].vectors_ND.shape[1]
    codes_ND = np.lib.format.open_memmap(folder / CODES_FILE, "w+", np.int8, (count, dimension))
    scales_N2 = np.lib.format.open_memmap(folder / SCALES_FILE, "w+", np.float32, (count, 2))
    first = 0
    for vectors_ND in rows:
        for at in range(0, len(vectors_ND), _ROWS):
            made = encode(vectors_ND[at : at + _ROWS])
            last = first + len(made.codes_ND)
            codes_ND[first:last] = made.codes_ND
            scales_N2[first:last, 0], scales_N2[first:last, 1] = made.scale_N, made.residual_N
            first = last
    codes_ND.flush()
    scales_N2.flush()
    return [CODES_FILE, SCALES_FILE]


def open_codes(folder: Path) -> Codes:
    """Codes mapped from their file, scales and residuals read. Raises ShardIndexError."""
    try:
        codes_ND = np.load(folder / CODES_FILE, mmap_mode="r")
        scales_N2 = np.load(folder / SCALES_FILE)
    except (OSError, ValueError) as error:
        raise ShardIndexError(f"no eight-bit codes can be read in {folder} ({error}); build the index again") from error
    return Codes(codes_ND, np.ascontiguousarray(scales_N2[:, 0]), np.ascontiguousarray(scales_N2[:, 1]))


class FlatIndex:
    """The vectors themselves, or their codes, which are scanned in their place. On a GPU what is scanned is copied
    there once, as it is, if it fits; else it streams."""

    kind = "flat"
    exact = True

    def __init__(
        self,
        blocks: Sequence[EmbeddingBlock],
        *,
        codes: Codes | None = None,
        device: str = "cpu",
        threads: int | None = None,
        engine: str = "auto",
    ) -> None:
        kernel = make_kernel(engine, device, threads)
        num_bytes = sum(block.vectors_ND.nbytes for block in blocks) if codes is None else codes.codes_ND.nbytes
        resident = isinstance(kernel, TorchKernel) and _fits(kernel, num_bytes)
        self.scan = Scan(blocks, kernel, codes=codes, resident=resident)
        self.num_passages = self.scan.table.num_passages
        self.num_vectors = self.scan.table.num_vectors
        self.dimension = self.scan.table.dimension

    def search(self, queries_QD: FloatArray, k: int) -> ShardHits:
        """Exact and certified; `frontier_Q` is the exact score of the best passage left out."""
        return self.searched(queries_QD, k).hits

    def searched(self, queries_QD: FloatArray, k: int) -> Searched:
        """`search`, and how many passages the scan, with its bound, left to be scored exactly."""
        return self.scan.searched(checked_queries(queries_QD, self.dimension), checked_k(k))


def _fits(kernel: TorchKernel, num_bytes: int) -> bool:
    import torch

    return kernel.device.type == "cuda" and num_bytes < RESIDENT_SHARE * torch.cuda.mem_get_info(kernel.device)[0]
