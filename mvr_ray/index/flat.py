"""Exact search over all vectors of a shard, on a CPU or a GPU. Needs numpy, and uses torch where it is installed.

Shapes: Q queries, D dimension.
"""

from collections.abc import Sequence

from mvr_ray.core.exact import checked_k, checked_queries
from mvr_ray.core.kernels import TorchKernel, make_kernel
from mvr_ray.core.scan import Scan
from mvr_ray.types import EmbeddingBlock, FloatArray, ShardHits

RESIDENT_SHARE = 0.8


class FlatIndex:
    """The vectors themselves. On a GPU they are copied there once, as they are, if they fit; else they stream."""

    kind = "flat"
    exact = True

    def __init__(
        self,
        blocks: Sequence[EmbeddingBlock],
        *,
        device: str = "cpu",
        threads: int | None = None,
        engine: str = "auto",
    ) -> None:
        kernel = make_kernel(engine, device, threads)
        num_bytes = sum(block.vectors_ND.nbytes for block in blocks)
        self.scan = Scan(blocks, kernel, resident=isinstance(kernel, TorchKernel) and _fits(kernel, num_bytes))
        self.num_passages = self.scan.table.num_passages
        self.num_vectors = self.scan.table.num_vectors
        self.dimension = self.scan.table.dimension

    def search(self, queries_QD: FloatArray, k: int) -> ShardHits:
        """Exact and certified; `frontier_Q` is the exact score of the best passage left out."""
        return self.scan.search(checked_queries(queries_QD, self.dimension), checked_k(k))


def _fits(kernel: TorchKernel, num_bytes: int) -> bool:
    import torch

    return kernel.device.type == "cuda" and num_bytes < RESIDENT_SHARE * torch.cuda.mem_get_info(kernel.device)[0]
