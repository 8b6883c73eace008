"""Search one shard for the best sums of two scores, exactly: words and views.

    f(q, p) = fl32( b(q, p) + w d(q, p) )      b BM25, d the dense score, w >= 0 the weight; sum and product in float64

The lexical index gives b of every passage of the shard, the dense search its best passages and its frontier d*: no
passage left out has a greater d. f grows with both parts, so a passage left out scores at most f* = fl32(b + w d*). The
candidates are the best of both sides; every passage whose f* reaches the k-th of them is a candidate, too. Where these
are many, a deeper dense search first lowers d*. Passages left out then score below the k-th, so the hits are those of
exhaustive search over both scores, ties included. Passages without a word of the query have b = 0 and are candidates
like any other.

An approximate dense index has no frontier: the best of both sides are scored exactly, and others may be missing.

Shapes: Q queries, P passages, M (query, passage) pairs, C candidates of one query, K hits.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mvr_ray.core.searching.exact import Pairs, ScoredPairs, no_hits
from mvr_ray.types import CountedHits, FloatArray, IntArray, ShardHits

DEPTH_FACTOR = 4
"""Factor between the depths of consecutive dense searches, and from a depth to the most passages scored beyond its
hits."""
MIN_DEPTH = 100
"""Minimum depth of the first dense search: a scan of this depth takes hardly longer, and its frontier is lower."""

DenseSearch = Callable[[IntArray, int], CountedHits]
"""Searches for queries, given by position, to a depth."""
Rescore = Callable[[Pairs], ScoredPairs]
"""Scores pairs by all views of their passages; the result is in order of row."""


def hybrid_scores(lexical: FloatArray, dense: FloatArray | float, weight: float) -> NDArray[np.float32]:
    """Sum both scores of the same passages. Monotonic in both, after rounding as well."""
    return (np.asarray(lexical, np.float64) + weight * np.asarray(dense, np.float64)).astype(np.float32)


def hybrid_search(
    search: DenseSearch,
    rescore: Rescore,
    lexical_scores: Callable[[int], FloatArray],
    rows_P: IntArray,
    num_queries: int,
    weight: float,
    k: int,
    *,
    exact: bool = True,
    min_depth: int = MIN_DEPTH,
) -> CountedHits:
    """Find the best k rows of every query by the sum of both scores.

    `lexical_scores` returns b of all rows for one query; `rows_P` are the rows that may be hits, ascending. Hits have
    the winning view; the frontier bounds the score of every row left out, +inf where `exact` is false and there are
    any.
    """
    hits = no_hits(num_queries, k)
    rescored_Q = np.zeros(num_queries, np.int64)
    queries = np.arange(num_queries)
    depth = min(max(k, min_depth), len(rows_P))
    while len(queries) and len(rows_P):
        dense, dense_rescored_Q = search(queries, depth)
        rescored_Q[queries] += dense_rescored_Q
        deeper_queries = []
        for at, query in enumerate(queries.tolist()):
            candidates = _Candidates(query, rows_P, lexical_scores(query)[rows_P], weight, rescore)
            candidates.add_hits(dense.rows_QK[at], dense.scores_QK[at], dense.views_QK[at])
            candidates.add_rows(best_positive(candidates.lexical_P, k))
            if exact:
                frontier = candidates.add_within_bound(dense.frontier_Q[at], k, DEPTH_FACTOR * depth)
            else:
                frontier = -np.inf if candidates.is_candidate_P.all() else np.inf
            rescored_Q[query] += candidates.num_rescored
            if frontier is None:
                deeper_queries.append(query)
            else:
                candidates.write_best(hits, frontier)
        queries, depth = np.array(deeper_queries, np.int64), min(DEPTH_FACTOR * depth, len(rows_P))
    return CountedHits(hits, rescored_Q)


def lexical_search(
    rescore: Rescore, lexical_scores: Callable[[int], FloatArray], rows_P: IntArray, num_queries: int, k: int
) -> CountedHits:
    """Find the best k rows of every query by BM25 alone, among those with a word of it; exact with any dense index.

    Hits have the view of the best dense score, which does not affect the ranking.
    """
    hits, rescored_Q = no_hits(num_queries, k), np.zeros(num_queries, np.int64)
    for query in range(num_queries):
        score_P = lexical_scores(query)[rows_P]
        places = best_positive(score_P, k + 1)
        best, rescored_Q[query] = places[:k], min(k, len(places))
        hits.rows_QK[query, : len(best)], hits.scores_QK[query, : len(best)] = rows_P[best], score_P[best]
        if len(places) > k:
            hits.frontier_Q[query] = score_P[places[k]]
        if len(best):
            pairs = rescore(Pairs(np.full(len(best), query), np.sort(rows_P[best])))
            hits.views_QK[query, : len(best)] = pairs.view_M[np.searchsorted(pairs.row_M, rows_P[best])]
    return CountedHits(hits, rescored_Q)


class _Candidates:
    """The passages of one query with both scores known. Places are positions in `rows_P`."""

    def __init__(self, query: int, rows_P: IntArray, lexical_P: FloatArray, weight: float, rescore: Rescore) -> None:
        self.query, self.rows_P, self.lexical_P, self.weight, self.rescore = query, rows_P, lexical_P, weight, rescore
        self.is_candidate_P = np.zeros(len(rows_P), bool)
        self.score_P = np.full(len(rows_P), -np.inf, np.float32)
        self.view_P = np.full(len(rows_P), -1, np.int16)
        self.num_rescored = 0

    def add_hits(self, rows_K: IntArray, dense_K: FloatArray, view_K: IntArray) -> None:
        """Add hits of the dense search; a row of -1 is padding."""
        is_hit = rows_K >= 0
        self._add(np.searchsorted(self.rows_P, rows_K[is_hit]), dense_K[is_hit], view_K[is_hit])

    def add_rows(self, places: IntArray) -> None:
        """Add rows, computing the dense scores of new candidates."""
        new = np.sort(places[~self.is_candidate_P[places]])
        if len(new):
            pairs = self.rescore(Pairs(np.full(len(new), self.query), self.rows_P[new]))
            self._add(np.searchsorted(self.rows_P, pairs.row_M), pairs.score_M, pairs.view_M)
            self.num_rescored += len(new)

    def add_within_bound(self, dense_frontier: float, k: int, max_rows: int) -> float | None:
        """Add every row whose bound f* reaches the k-th best score, and return the largest bound of the others; None,
        without adding any, where they are more than `max_rows`."""
        if dense_frontier == -np.inf:  # the dense search returned every row
            return -np.inf
        bound_P = hybrid_scores(self.lexical_P, dense_frontier, self.weight)
        bound_P[self.is_candidate_P] = -np.inf
        open_places = np.flatnonzero((bound_P >= self.kth_score(k)) & (bound_P > -np.inf))
        if len(open_places) > max_rows:
            return None
        self.add_rows(open_places)
        bound_P[self.is_candidate_P] = -np.inf
        return float(bound_P.max(initial=-np.inf))

    def kth_score(self, k: int) -> float:
        """Return the k-th best score so far, -inf where there are fewer."""
        scores = self.score_P[self.is_candidate_P]
        return float(np.partition(scores, len(scores) - k)[len(scores) - k]) if len(scores) >= k else -np.inf

    def write_best(self, hits: ShardHits, frontier: float) -> None:
        """Write the best k, score descending, then row ascending; the next score may raise the frontier."""
        places, k = np.flatnonzero(self.is_candidate_P), hits.rows_QK.shape[1]
        order = places[np.argsort(-self.score_P[places], kind="stable")]
        own = self.query, slice(len(order[:k]))
        for column, values_P in zip(hits, (self.rows_P, self.score_P, self.view_P)):
            column[own] = values_P[order[:k]]
        hits.frontier_Q[self.query] = max(frontier, float(self.score_P[order[k]]) if len(order) > k else -np.inf)

    def _add(self, places: IntArray, dense_C: FloatArray, view_C: IntArray) -> None:
        self.is_candidate_P[places] = True
        self.score_P[places] = hybrid_scores(self.lexical_P[places], dense_C, self.weight)
        self.view_P[places] = view_C


def best_positive(scores_P: FloatArray, k: int) -> IntArray:
    """Find the places of the k highest scores above 0, best first, equal scores by place."""
    places = np.flatnonzero(scores_P > 0)
    if len(places) > k:  # sort only these and the ties of the last
        places = places[scores_P[places] >= np.partition(scores_P[places], -k)[-k]]
    return places[np.argsort(-scores_P[places], kind="stable")][:k]


def system_name(weight: float | str) -> str:
    """Return the name of a hybrid ranking in reports: "bm25 + 30 x dense"."""
    return "bm25 and dense, reciprocal ranks" if isinstance(weight, str) else f"bm25 + {weight:g} x dense"
