"""The views of one shard, searchable: how a shard is indexed, and what every kind of index is."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mvr_ray.types import FloatArray, Searched, ShardHits


@dataclass(frozen=True)
class IndexParams:
    """How a shard is indexed: plain values, so that `dataclasses.asdict` of it is JSON."""

    kind: str = "flat"
    factory: str = "IVF256,SQ8"
    nprobe: int = 64
    hnsw_m: int = 32
    hnsw_ef_construction: int = 200
    hnsw_ef_search: int = 128
    scan: str = "vectors"


class ShardIndex(Protocol):
    """An open index of one shard."""

    kind: str
    exact: bool
    num_passages: int
    num_vectors: int
    dimension: int

    def search(self, queries_QD: FloatArray, k: int) -> ShardHits:
        """The best k distinct passages. Queries of any float type; ShardIndexError where they or k make no sense."""
        ...

    def searched(self, queries_QD: FloatArray, k: int) -> Searched:
        """`search`, and how many passages it scored exactly."""
        ...


def default_factory(dimension: int, on_gpu: bool = False) -> str:
    """256 lists of codes with four bits for each pair of components, which Faiss scans from registers; one byte a
    component where components do not pair, and on a GPU, which has no such scan. Measured in
    `benchmarks/approximate.py`."""
    return f"IVF256,PQ{dimension // 2}x4fs" if dimension % 2 == 0 and not on_gpu else "IVF256,SQ8"


def measured_recall(index: ShardIndex, exact: ShardIndex, queries_QD: FloatArray, k: int) -> float:
    """The share of the exact top-k passages that `index` found, over all queries (1 where there is nothing to find).

    Scores are exact on both sides, so a passage tied with the k-th counts as well as the one that took its place.
    """
    found, truth = index.search(queries_QD, k), exact.search(queries_QD, k)
    num_true = int((truth.rows_QK >= 0).sum())
    kth_Q1 = np.where(truth.rows_QK >= 0, truth.scores_QK, np.inf).min(axis=1, keepdims=True, initial=np.inf)
    num_found = int(((found.rows_QK >= 0) & (found.scores_QK >= kth_Q1)).sum())
    return num_found / num_true if num_true else 1.0
