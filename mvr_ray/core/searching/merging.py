"""Merge the ranked lists of shards, and certify that the merged list is exact.

A passage scores as its best view (MVR, eq. 4):  f(q, p) = max_v <q, p_v>. Ranked lists go by score descending, then
passage id ascending. Every shard gives its best rows in that order, and its frontier: the most that a passage which it
left out can score. What a shard left out ranks after its last row. So the merged best k are exact unless some shard's
last row is itself among them *and* its frontier reaches the merged k-th score (`uncertain_queries`); a shard that gave
k rows, or all it has, can never be in that case.

How many rows to ask for first: where passages lie in shards at random, the best k of all N hold X_s ~ Hypergeometric(N,
N_s, k) of a shard's N_s. Ties apart, a shard that gives d rows is asked again only where X_s > d, so that for Q queries
this happens with a chance of Q sum_s P(X_s > d) at most. `first_depth` is the least d that brings this under 1 %.

A passage has a number through all shards: its shard's start and its row. Ids are looked up only where passages of the
same score compete, which real scores seldom do.

Shapes: Q queries, S shards, K hits kept, M the sum of the shards' list lengths.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mvr_ray.core.searching.exact import check_k
from mvr_ray.errors import ShardIndexError
from mvr_ray.types import FloatArray, IntArray, ShardHits

ASKED_AGAIN = 0.01
"""The most likely that a call leaves a doubt, where passages lie in shards at random."""

IdsOf = Callable[[IntArray], Sequence[str]]
"""Looks up the passage ids of some numbers."""


def merge(per_shard: Sequence[tuple[int, ShardHits]], k: int, ids_of: IdsOf) -> ShardHits:
    """Merge the lists of shards into those of one: score descending, passage id ascending; rows are passage numbers.

    `per_shard` holds the number of each shard's first passage, and its hits. Of a query with fewer than k hits the last
    score is -inf. Raises ShardIndexError for k below 1 and for shards that answered different queries.
    """
    check_k(k)
    sizes = {len(hits.rows_QK) for _, hits in per_shard}
    if len(sizes) > 1:
        raise ShardIndexError(f"shards answered different numbers of queries, {sorted(sizes)}; ask all the same ones")
    wanting = max(k + 1 - sum(hits.rows_QK.shape[1] for _, hits in per_shard), 0)
    none_QK = np.full((max(sizes, default=0), wanting), -1, np.int16)
    scores = (hits.scores_QK for _, hits in per_shard)
    score_QM = np.concatenate([*scores, np.full(none_QK.shape, -np.inf, np.float32)], axis=1)
    passages = (np.where(hits.rows_QK >= 0, hits.rows_QK + start, -1) for start, hits in per_shard)
    passage_QM = np.concatenate([*passages, none_QK.astype(np.int64)], axis=1)
    view_QM = np.concatenate([*(hits.views_QK for _, hits in per_shard), none_QK], axis=1)
    order_QM = np.argsort(-score_QM, axis=1, kind="stable")  # each shard's list is a sorted run: little is left to do
    if len(per_shard) > 1:  # within a shard ties stand in order of id already
        sorted_QM = np.take_along_axis(score_QM, order_QM[:, : k + 1], axis=1)
        tied_Q = ((sorted_QM[:, 1:] == sorted_QM[:, :-1]) & (sorted_QM[:, 1:] > -np.inf)).any(axis=1)
        for query in np.flatnonzero(tied_Q):
            order_QM[query] = _by_id(score_QM[query], passage_QM[query], order_QM[query], k, ids_of)
    best_QK = order_QM[:, :k]
    next_Q = np.take_along_axis(score_QM, order_QM[:, k : k + 1], axis=1)[:, 0]
    return ShardHits(
        np.take_along_axis(passage_QM, best_QK, axis=1).astype(np.int64),
        np.take_along_axis(score_QM, best_QK, axis=1).astype(np.float32),
        np.take_along_axis(view_QM, best_QK, axis=1).astype(np.int16),
        np.max([next_Q, *(hits.frontier_Q for _, hits in per_shard)], axis=0).astype(np.float32),
    )


def uncertain_queries(per_shard: Sequence[tuple[int, ShardHits]], best: ShardHits, ids_of: IdsOf) -> list[IntArray]:
    """By shard, the queries (ascending positions) for which to ask it for k rows. All empty: the merge is exact.

    Exact shards only. A shard may hold a passage, left out of its own list, that belongs in the merged k where it left
    something out, its own list is used up by the merged one, and its frontier reaches the merged k-th score.
    """
    k = best.rows_QK.shape[1]
    kth_Q, last_Q = best.scores_QK[:, -1], best.rows_QK[:, -1]

    def is_used_up(start: int, hits: ShardHits, query: int, num_rows: int) -> bool:
        if not num_rows or last_Q[query] < 0:
            return True
        score, passage = hits.scores_QK[query, num_rows - 1], hits.rows_QK[query, num_rows - 1] + start
        if score != kth_Q[query] or passage == last_Q[query]:
            return bool(score >= kth_Q[query])
        own, last = ids_of(np.array([passage, last_Q[query]]))
        return own < last

    queries_S: list[IntArray] = []
    for start, hits in per_shard:
        num_Q = (hits.rows_QK >= 0).sum(axis=1)
        near_Q = (hits.frontier_Q > -np.inf) & (hits.frontier_Q >= kth_Q) & (num_Q < k)
        near = zip(np.flatnonzero(near_Q).tolist(), num_Q[near_Q].tolist())
        queries = [query for query, num_rows in near if is_used_up(start, hits, query, num_rows)]
        queries_S.append(np.array(queries, np.int64))
    return queries_S


def overlay_hits(first: ShardHits, second: ShardHits, queries: IntArray) -> ShardHits:
    """A shard's first hits, with the second ones for the queries (positions) that were asked again."""
    width = max(first.rows_QK.shape[1], second.rows_QK.shape[1])

    def overlay(old_QK: Any, new_RK: Any, padding: float) -> Any:
        wide_QK = np.full((len(old_QK), width), padding, old_QK.dtype)
        wide_QK[:, : old_QK.shape[1]] = old_QK
        wide_QK[queries] = padding
        wide_QK[queries, : new_RK.shape[1]] = new_RK
        return wide_QK

    frontier_Q = np.array(first.frontier_Q)
    frontier_Q[queries] = second.frontier_Q
    return ShardHits(
        overlay(first.rows_QK, second.rows_QK, -1),
        overlay(first.scores_QK, second.scores_QK, -np.inf),
        overlay(first.views_QK, second.views_QK, -1),
        frontier_Q,
    )


def first_depth(k: int, sizes: Sequence[int], num_queries: int = 1) -> int:
    """Rows to ask every shard for at first, 1 to k: with 99 % no shard need be asked again for any of the queries.

    `sizes` are the shards' numbers of passages. Takes time in proportion to k and to the distinct sizes: keep it.
    """
    total = sum(sizes)
    drawn = min(k, total)
    more_D = np.zeros(drawn + 1)
    for size, times in Counter(sizes).items():
        more_D += times * _chance_of_more(size, total, drawn)
    return max(int(np.argmax(num_queries * more_D <= ASKED_AGAIN)), 1)


def _chance_of_more(size: int, total: int, num_drawn: int) -> FloatArray:
    """Of `num_drawn` passages among `total`, the chance that more than d lie in a shard of `size`, for every d."""
    low, high = max(0, num_drawn - (total - size)), min(num_drawn, size)
    x = np.arange(low, high, dtype=np.float64)
    steps = np.log(size - x) + np.log(num_drawn - x) - np.log(x + 1) - np.log(total - size - num_drawn + x + 1)
    log_chance = np.concatenate([[0.0], np.cumsum(steps)])
    chance = np.exp(log_chance - log_chance.max())
    more_D = np.zeros(num_drawn + 1)
    more_D[:low] = 1.0
    more_D[low:high] = np.cumsum(chance[:0:-1])[::-1] / chance.sum()
    return more_D


def _by_id(score_M: np.ndarray, passage_M: IntArray, order_M: IntArray, k: int, ids_of: IdsOf) -> IntArray:
    """An order by score, with what is tied down to the k-th score in order of id."""
    kth = score_M[order_M[k - 1]]
    reach = int(((score_M >= kth) & (passage_M >= 0)).sum())
    ranked = order_M[:reach]
    ids = ids_of(passage_M[ranked])
    places = sorted(range(reach), key=lambda at: (-float(score_M[ranked[at]]), ids[at]))
    return np.concatenate([ranked[places], order_M[reach:]])
