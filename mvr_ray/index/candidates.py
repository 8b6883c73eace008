"""Turn nearest vectors into the best passages, for all approximate indexes.

A vector index returns vectors; k vectors may belong to one passage. So more are fetched, six times k at first (or
all that a graph's search holds, if that is more) and twice as many each further time, until a query has k distinct
passages, or as many as its beam shall hold. What an index cannot find (an unlucky graph, too few probed lists) is found
by scanning the shard. Every candidate is then scored exactly with all its views.

Under a filter the vectors of passages that fail it are dropped as they come, and as many more are fetched at first as
the share that passes says. Where few pass, or scanning their vectors costs no more than fetching so many, those that
pass are scanned: that is exact.

Shapes: Q queries, F vectors fetched per query, M candidates, N vectors, D dimension.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from mvr_ray.core.searching.engines import make_kernel
from mvr_ray.core.searching.exact import BlockTable, Pairs, best_first, check_k, check_queries, distinct
from mvr_ray.core.searching.scan import Scan, pack_hits
from mvr_ray.errors import ShardIndexError
from mvr_ray.types import CountedHits, EmbeddingBlock, FloatArray, IntArray, ShardHits

VECTORS_AT_ONCE = 16384
SCAN_SHARE = 0.05
"""Where fewer of the passages pass a filter, they are scanned."""
SCAN_VECTORS = 100
"""Vectors that are scanned in the time in which one is fetched and scored: some 250 to 1,000 for hnswlib, 100 for
Faiss's lists (`benchmarks/approximate.py`). Where a filter passes fewer for each one to fetch, they are scanned."""


class ApproximateIndex(ABC):
    """An index over vector numbers 0 .. N - 1 in block order. A kind of index says how to find the nearest."""

    kind = ""
    exact = False
    first_fetch = 6
    """How many vectors are fetched at first for each passage wanted."""
    breadth = 0
    """How many vectors a search holds anyway: at least so many are fetched."""
    beam_passages = 0
    """Distinct passages to find and score for a query, where these are more than k."""

    def __init__(self, blocks: Sequence[EmbeddingBlock], *, threads: int | None = None) -> None:
        self.scan = Scan(blocks, make_kernel(threads=threads))
        table = self.scan.table
        self.num_passages, self.num_vectors, self.dimension = table.num_passages, table.num_vectors, table.dimension
        counts = [np.diff(block.row_ptr) for block in table.blocks]
        self.ends = np.cumsum(np.concatenate(counts)) if counts else np.zeros(0, np.int64)

    @abstractmethod
    def nearest(self, queries_QD: FloatArray, fetch: int) -> IntArray:
        """Find the numbers of about the nearest vectors [Q, fetch], -1 where the index finds no more."""

    def max_fetch(self) -> int:
        """The most vectors that `nearest` can return."""
        return self.num_vectors

    def search(self, queries_QD: FloatArray, k: int, mask_P: NDArray[np.bool_] | None = None) -> ShardHits:
        """Find k distinct passages, or all there are, by exact score. `frontier_Q` is +inf: a miss is unknown."""
        return self.search_with_counts(queries_QD, k, mask_P).hits

    def search_with_counts(
        self, queries_QD: FloatArray, k: int, mask_P: NDArray[np.bool_] | None = None
    ) -> CountedHits:
        """Search, and count the candidates that were scored exactly."""
        queries_QD = check_queries(queries_QD, self.dimension)
        num_scorable = self.scan.table.num_scorable
        num_passing = num_scorable if mask_P is None else sum(one.num_passages for one in self.scan.parts_of(mask_P))
        if check_k(k) >= num_passing or (mask_P is not None and self._is_scanned(k, num_passing / num_scorable)):
            return self.scan.search_with_counts(queries_QD, k, mask_P)
        candidates, unlucky_Q = self._candidates(queries_QD, k, mask_P, num_passing / num_scorable)
        best = best_first(self.scan.table.rescore(queries_QD, candidates), k)
        hits = pack_hits([best], [len(queries_QD)], len(queries_QD), k)
        rescored_Q = np.bincount(candidates.query_M, minlength=len(queries_QD))
        if len(unlucky_Q):
            results = self.scan.search_with_counts(queries_QD[unlucky_Q], k, mask_P)
            for column, own in zip([*hits, rescored_Q], [*results.hits, results.rescored_Q]):
                column[unlucky_Q] = own
        hits.frontier_Q[:] = np.inf
        return CountedHits(hits, rescored_Q)

    def _is_scanned(self, k: int, passing_share: float) -> bool:
        """Whether scanning what passes a filter is the better way."""
        fetch = max(self.first_fetch * k, self.breadth) / passing_share
        return passing_share < SCAN_SHARE or passing_share * self.num_vectors <= SCAN_VECTORS * fetch

    def _candidates(
        self, queries_QD: FloatArray, k: int, mask_P: NDArray[np.bool_] | None = None, passing_share: float = 1.0
    ) -> tuple[Pairs, IntArray]:
        """Find at least k distinct passages for each query, and the queries for which the index has fewer."""
        asked_Q = np.arange(len(queries_QD))
        fetch = min(math.ceil(max(self.first_fetch * k, self.breadth) / passing_share), self.max_fetch())
        query_parts, row_parts, unlucky = [], [], []
        while len(asked_Q):
            number_QF = self.nearest(queries_QD[asked_Q], fetch)
            real_QF = number_QF >= 0
            row_M = np.searchsorted(self.ends, number_QF[real_QF], side="right")
            query_M = np.repeat(asked_Q, real_QF.sum(axis=1))
            if mask_P is not None:
                query_M, row_M = query_M[mask_P[row_M]], row_M[mask_P[row_M]]
            query_M, row_M = np.divmod(distinct(query_M * self.num_passages + row_M), self.num_passages)
            found_Q = np.bincount(query_M, minlength=len(queries_QD))[asked_Q]
            dry_Q = ~real_QF.all(axis=1) | (fetch >= self.max_fetch())
            complete = np.zeros(len(queries_QD), bool)
            complete[asked_Q] = (found_Q >= k) & (dry_Q | (found_Q >= self.beam_passages))
            query_parts.append(query_M[complete[query_M]])
            row_parts.append(row_M[complete[query_M]])
            unlucky.append(asked_Q[dry_Q & (found_Q < k)])
            asked_Q = asked_Q[~dry_Q & ~complete[asked_Q]]
            fetch = min(2 * fetch, self.max_fetch())
        none = [np.zeros(0, np.int64)]
        pairs = Pairs(np.concatenate(query_parts or none), np.concatenate(row_parts or none))
        return pairs, np.concatenate(unlucky or none)


def float32_vectors(blocks: Sequence[EmbeddingBlock]) -> Iterator[NDArray[np.float32]]:
    """Yield all vectors in order, some thousands at a time. Raises ShardIndexError for one that is not finite."""
    first_row = 0
    for block in blocks:
        start, stop = int(block.row_ptr[0]), int(block.row_ptr[-1])
        for low in range(start, stop, VECTORS_AT_ONCE):
            vectors_ND = block.vectors_ND[low : min(low + VECTORS_AT_ONCE, stop)].astype(np.float32)
            finite_N = np.isfinite(vectors_ND).all(axis=1)
            if not finite_N.all():
                vector = low + int(np.flatnonzero(~finite_N)[0])
                row = int(np.searchsorted(block.row_ptr, vector, side="right")) - 1
                raise ShardIndexError(
                    f"passage {block.ids[row]!r} (row {first_row + row}) has a vector with NaN or infinity; "
                    f"encode it again"
                )
            yield vectors_ND
        first_row += len(block.ids)


def count_vectors(blocks: Sequence[EmbeddingBlock]) -> int:
    return BlockTable(blocks).num_vectors
