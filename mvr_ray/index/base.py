"""Define the parameters of a shard's index, and the base of every kind of index."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from mvr_ray.core.searching.scan import Scan
from mvr_ray.types import CountedHits, EmbeddingBlock, FloatArray, ShardHits

MIN_TRAIN_VECTORS = 65536
TRAIN_VECTORS_PER_LIST = 64


_PARAMS_OF_FILES = {
    "flat": ("scan",),
    "faiss": ("factory", "hnsw_ef_construction"),
    "hnsw": ("hnsw_m", "hnsw_ef_construction"),
}


@dataclass(frozen=True)
class IndexParams:
    """Parameters of a shard's index, as plain values: `dataclasses.asdict` gives JSON."""

    kind: str = "flat"
    factory: str = "IVF256,SQ8"
    nprobe: int = 64
    hnsw_m: int = 32
    hnsw_ef_construction: int = 200
    hnsw_ef_search: int = 128
    scan: str = "vectors"

    def of_files(self) -> dict[str, str | int]:
        """Return the parameters on which the bytes of the index files depend; others count when a shard is opened."""
        return {name: getattr(self, name) for name in ("kind", *_PARAMS_OF_FILES[self.kind])}


class ShardIndex(ABC):
    """An open index of one shard."""

    exact: ClassVar[bool]

    def __init__(self, scan: Scan) -> None:
        self.scan, table = scan, scan.table
        self.num_passages, self.num_vectors, self.dimension = table.num_passages, table.num_vectors, table.dimension

    def search(self, queries_QD: FloatArray, k: int, mask_P: NDArray[np.bool_] | None = None) -> ShardHits:
        """Find the best k distinct passages, for queries of any float type. Raises ShardIndexError for invalid ones.

        A mask over the rows of the shard restricts the passages.
        """
        return self.search_with_counts(queries_QD, k, mask_P).hits

    @abstractmethod
    def search_with_counts(
        self, queries_QD: FloatArray, k: int, mask_P: NDArray[np.bool_] | None = None
    ) -> CountedHits:
        """Search, and count the passages that were scored exactly."""


def count_vectors(blocks: Sequence[EmbeddingBlock]) -> int:
    return sum(len(block.vectors_ND) for block in blocks)


def default_factory(dimension: int, on_gpu: bool = False) -> str:
    """Choose the factory string: 256 lists of 4-bit codes for pairs of components, which Faiss scans in registers; one
    byte a component for an odd dimension, and on a GPU, which has no such scan. Measured in
    `benchmarks/approximate.py`."""
    return f"IVF256,PQ{dimension // 2}x4fs" if dimension % 2 == 0 and not on_gpu else "IVF256,SQ8"


def num_trained_on(vectors: int, num_lists: int) -> int:
    """Return how many of a shard's vectors train a Faiss index with this number of lists."""
    return min(vectors, max(MIN_TRAIN_VECTORS, TRAIN_VECTORS_PER_LIST * num_lists))


def measured_recall(index: ShardIndex, exact: ShardIndex, queries_QD: FloatArray, k: int) -> float:
    """Measure the share of the exact top-k passages that `index` finds, over all queries (1 where there are none).

    Scores are exact on both sides, so a passage tied with the k-th counts as found.
    """
    results, truth = index.search(queries_QD, k), exact.search(queries_QD, k)
    num_true = int((truth.rows_QK >= 0).sum())
    kth_Q1 = np.where(truth.rows_QK >= 0, truth.scores_QK, np.inf).min(axis=1, keepdims=True, initial=np.inf)
    num_found = int((results.scores_QK >= kth_Q1).sum())
    return num_found / num_true if num_true else 1.0
