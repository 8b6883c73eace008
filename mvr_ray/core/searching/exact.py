"""Define the exact score, and rank a few candidates by it.

    s(q, p_v) = fl32( sum_d q_d p_vd )        products and sum in float64, one rounding to float32
    s(q, p)   = max_v s(q, p_v)               a passage scores as its best view (MVR, eq. 4)

A product of two float32 numbers is exact in float64, and the sum is a fixed tree of additions over the last axis alone.
So a score depends only on its two vectors: not on batch shape, threads or library versions.

Shapes: Q queries, C candidates per query, M (query, passage) pairs, N vectors, P passages, D dimension.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mvr_ray.core.searching import native
from mvr_ray.errors import ShardIndexError
from mvr_ray.types import EmbeddingBlock, FloatArray, IntArray, PassageScores, ShardHits

VECTORS_AT_ONCE = 4096
LARGEST = 1e38  # |q| |v| beyond this could overflow float32 in some order of summation


class Pairs(NamedTuple):
    """Candidates: passage `row_M` of the shard for query `query_M`."""

    query_M: IntArray
    row_M: IntArray


class ScoredPairs(NamedTuple):
    """Pairs with their exact score and the winning view's number (lowest on ties)."""

    query_M: IntArray
    row_M: IntArray
    score_M: FloatArray
    view_M: IntArray

    def take(self, index: IntArray) -> "ScoredPairs":
        return ScoredPairs._make(column[index] for column in self)


def join_pairs(parts: Sequence[ScoredPairs]) -> ScoredPairs:
    """Concatenate parts, at least one."""
    return parts[0] if len(parts) == 1 else ScoredPairs(*map(np.concatenate, zip(*parts)))


def exact_scores(queries: FloatArray, vectors: FloatArray) -> NDArray[np.float32]:
    """Multiply over the last axis; the leading axes broadcast, as in `exact_scores(q_QD[:, None], v_QCD)`.

    The sum adds the upper half of the products to the lower half until one is left. Elementwise additions of float64
    are exactly rounded, so the result is the same on every machine.
    """
    if queries.shape[-1] != vectors.shape[-1]:
        raise ShardIndexError(
            f"cannot score: queries have dimension {queries.shape[-1]}, vectors have {vectors.shape[-1]}"
        )
    terms = queries.astype(np.float64) * vectors.astype(np.float64)
    width = terms.shape[-1]
    if not width:
        return np.zeros(terms.shape[:-1], np.float32)
    while width > 1:
        half = (width + 1) // 2
        terms[..., : width - half] += terms[..., half:width]
        width = half
    return terms[..., 0].astype(np.float32) + np.float32(0)  # makes every zero the positive one


def score_views(
    queries_QD: FloatArray, passage_id: str, view_numbers_N: IntArray, vectors_ND: FloatArray
) -> PassageScores:
    """Score all views of one passage, at least one, with all queries; the view numbers ascend."""
    scores_QN = exact_scores(queries_QD[:, None], vectors_ND[None])
    return PassageScores(passage_id, view_numbers_N, scores_QN, view_numbers_N[scores_QN.argmax(axis=1)])


def check_queries(queries_QD: FloatArray, dimension: int) -> NDArray[np.float32]:
    """Return queries as contiguous float32. Raises ShardIndexError for other shapes and numbers that are not finite."""
    queries = np.asarray(queries_QD)
    if queries.ndim != 2 or queries.shape[1] != dimension:
        raise ShardIndexError(
            f"queries have shape {queries.shape}, the index has dimension {dimension}; "
            f"give an array [queries, {dimension}]"
        )
    with np.errstate(over="ignore"):
        queries = np.ascontiguousarray(queries, dtype=np.float32)
    if not np.isfinite(queries).all():
        row = int(np.flatnonzero(~np.isfinite(queries).all(axis=1))[0])
        raise ShardIndexError(f"query {row} holds NaN or infinity (as float32); it cannot be scored")
    return queries


def check_k(k: int) -> int:
    if k < 1:
        raise ShardIndexError(f"k is {k}; ask for at least one passage")
    return int(k)


class BlockTable:
    """The blocks of one shard by row. Copies no vector."""

    def __init__(self, blocks: Sequence[EmbeddingBlock], rows: Sequence[IntArray] | None = None) -> None:
        """`rows` is that of `StoredBlocks`."""
        self.block_rows = None if rows is None else [own for own, block in zip(rows, blocks) if len(block.ids)]
        self.blocks = [block for block in blocks if len(block.ids)]
        self.compiled_rows = [native.rows_of(block) for block in self.blocks]
        dimensions = sorted({block.vectors_ND.shape[1] for block in blocks})
        if len(dimensions) != 1:
            raise ShardIndexError(
                f"the {len(blocks)} blocks of a shard have dimensions {dimensions}; exactly one is needed"
            )
        self.dimension: int = dimensions[0]
        sizes = [len(block.ids) for block in self.blocks]
        self._starts = np.cumsum([0, *sizes]).astype(np.int64)
        self._place_P = None if self.block_rows is None else _places(self.block_rows)
        counts_P = self.view_counts()
        self.num_passages, self.num_vectors = len(counts_P), int(counts_P.sum())
        self.num_scorable = int(np.count_nonzero(counts_P))

    def view_counts(self) -> IntArray:
        """Count the views of each passage [P], in order of rows."""
        counts = np.concatenate([np.zeros(0, np.int64), *(np.diff(block.row_ptr) for block in self.blocks)])
        return counts if self._place_P is None else counts[self._place_P]

    @cached_property
    def scorable_rows(self) -> IntArray:
        """Rows of passages with a view, ascending."""
        return np.flatnonzero(self.view_counts())

    def rows_of_block(self, at: int) -> IntArray:
        """Return the row of each passage of a block, -1 for a hidden one."""
        return np.arange(self._starts[at], self._starts[at + 1]) if self.block_rows is None else self.block_rows[at]

    def rows_of(self, mask_P: NDArray[np.bool_]) -> IntArray:
        """Return the rows of a mask's passages with a view, ascending. Raises ShardIndexError for a wrong length."""
        if mask_P.shape != (self.num_passages,):
            raise ShardIndexError(f"a mask of {len(mask_P)} rows does not fit {self.num_passages} passages")
        if self.num_scorable == self.num_passages:
            return np.flatnonzero(mask_P)
        return self.scorable_rows[mask_P[self.scorable_rows]]

    def passage_id(self, row: int) -> str:
        place = row if self._place_P is None else int(self._place_P[row])
        at = int(np.searchsorted(self._starts, place, side="right")) - 1
        return self.blocks[at].ids[place - int(self._starts[at])]

    def rescore(self, queries_QD: FloatArray, pairs: Pairs) -> ScoredPairs:
        """Score pairs exactly with all views of each passage, sorted by row. Each row must have a view. A passage with
        a view whose score is not finite scores NaN."""
        place_M = pairs.row_M if self._place_P is None else self._place_P[pairs.row_M]
        order_M = np.argsort(place_M, kind="stable")
        query_M, place_M = pairs.query_M[order_M].astype(np.int64, copy=False), place_M[order_M]
        score_M, view_M = np.empty(len(place_M), np.float32), np.empty(len(place_M), np.int16)
        bounds = np.searchsorted(place_M, self._starts)
        local_M = place_M - np.repeat(self._starts[:-1], np.diff(bounds))
        spans = [(at, low, high) for at, (low, high) in enumerate(pairwise(bounds.tolist())) if low < high]
        native_spans = [(rows, low, high) for at, low, high in spans if (rows := self.compiled_rows[at])]
        if native_spans:
            native.rescore(native_spans, queries_QD, query_M, local_M, score_M, view_M)
        for at, low, high in spans:
            if self.compiled_rows[at] is None:
                own = slice(low, high)
                _rescore_block(self.blocks[at], queries_QD, query_M[own], local_M[own], score_M[own], view_M[own])
        scores = ScoredPairs(query_M, pairs.row_M[order_M], score_M, view_M)
        return scores if self._place_P is None else scores.take(np.argsort(scores.row_M, kind="stable"))


def _places(rows: Sequence[IntArray]) -> IntArray:
    """Return the position of each row [P] among the passages of all blocks."""
    row_N = np.concatenate([np.zeros(0, np.int64), *rows])
    place_P = np.full(int(np.count_nonzero(row_N >= 0)), -1, np.int64)
    place_P[row_N[row_N >= 0]] = np.flatnonzero(row_N >= 0)
    return place_P


def _rescore_block(
    block: EmbeddingBlock,
    queries_QD: FloatArray,
    query_M: IntArray,
    row_M: IntArray,
    score_M: FloatArray,
    view_M: IntArray,
) -> None:
    """Fill `score_M` and `view_M`, in batches of a bounded number of vectors."""
    count_M = block.row_ptr[row_M + 1] - block.row_ptr[row_M]
    chunk_M = (np.cumsum(count_M) - count_M) // VECTORS_AT_ONCE
    edges = [*np.flatnonzero(np.diff(chunk_M, prepend=-1)).tolist(), len(row_M)]
    for low, high in pairwise(edges):
        counts = count_M[low:high]
        first = np.cumsum(counts) - counts
        vectors = np.repeat(block.row_ptr[row_M[low:high]] - first, counts) + np.arange(int(counts.sum()))
        scores = exact_scores(queries_QD[np.repeat(query_M[low:high], counts)], block.vectors_ND[vectors])
        best = np.maximum.reduceat(np.where(np.isfinite(scores), scores, np.float32(np.nan)), first)
        numbers = block.view_numbers_N[vectors]
        losing = scores != np.repeat(best, counts)
        score_M[low:high] = best
        view_M[low:high] = np.minimum.reduceat(np.where(losing, np.iinfo(np.int16).max, numbers), first)


def best_first(scores: ScoredPairs, k: int) -> ScoredPairs:
    """Select the best k of each query, sorted by query, then score descending, then row ascending."""
    pairs = scores.take(np.lexsort((scores.row_M, -scores.score_M, scores.query_M)))
    return pairs.take(np.flatnonzero(ranks(pairs.query_M) < k))


def no_hits(num_queries: int, k: int) -> ShardHits:
    """Return hits that are all padding, to be filled."""
    return ShardHits(
        np.full((num_queries, k), -1, np.int64),
        np.full((num_queries, k), -np.inf, np.float32),
        np.full((num_queries, k), -1, np.int16),
        np.full(num_queries, -np.inf, np.float32),
    )


def distinct(values: IntArray) -> IntArray:
    """Return the values in ascending order, each once [N]. np.unique of numpy 2.4 hashes: twenty times slower."""
    ascending = np.sort(values, axis=None)
    return ascending[np.concatenate([np.ones(min(len(ascending), 1), bool), ascending[1:] != ascending[:-1]])]


def ranks(group_M: IntArray) -> IntArray:
    """Number the members of each group (the pairs of a query, the views of a passage); groups ascend."""
    return np.arange(len(group_M)) - np.searchsorted(group_M, group_M)
