"""Merge the ranked lists of shards, and certify that the merged list is exact.

A passage scores as its best view (MVR, eq. 4):  f(q, p) = max_v <q, p_v>. Rankings order by score descending, then
passage id ascending. Every shard returns its best rows in that order, and its frontier: an upper bound of the scores of
passages that it left out, which rank after its last row. So the merged best k are exact unless some shard's last row is
among them *and* its frontier reaches the merged k-th score (`uncertain_queries`), which is impossible for a shard that
returned k rows or all its rows.

The depth of the first request: where passages are distributed over shards at random, the best k of all N hold
X_s ~ Hypergeometric(N, N_s, k) of a shard's N_s. Without ties, a shard that returned d rows gets a second request only
where X_s > d, so for Q queries with a probability of Q sum_s P(X_s > d) at most. `first_depth` is the least d with a
probability under 1 %.

A passage's number over all shards is its shard's start plus its row. Ids are looked up only to order passages of equal
score, which are rare in real scores.

Shapes: Q queries, S shards, K hits kept, M the sum of the shards' list lengths.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mvr_ray.core.searching.exact import check_k
from mvr_ray.errors import ShardIndexError
from mvr_ray.types import FloatArray, IntArray, ShardHits

MAX_SECOND_ROUND_CHANCE = 0.01
"""Largest probability that a merge is uncertain, where passages are distributed over shards at random."""

IdsOf = Callable[[IntArray], Sequence[str]]
"""Looks up passage ids by number."""


def merge(per_shard: Sequence[tuple[int, ShardHits]], k: int, ids_of: IdsOf) -> ShardHits:
    """Merge the lists of shards into one: score descending, passage id ascending; rows are passage numbers.

    `per_shard` holds the number of each shard's first passage, and its hits. A query with fewer than k hits is padded
    with -inf. Raises ShardIndexError for k below 1 and for shards that answered different queries.
    """
    check_k(k)
    sizes = {len(hits.rows_QK) for _, hits in per_shard}
    if len(sizes) > 1:
        raise ShardIndexError(f"shards answered different numbers of queries, {sorted(sizes)}; ask all the same ones")
    num_padding = max(k + 1 - sum(hits.rows_QK.shape[1] for _, hits in per_shard), 0)
    padding_QK = np.full((max(sizes, default=0), num_padding), -1, np.int16)
    scores = (hits.scores_QK for _, hits in per_shard)
    score_QM = np.concatenate([*scores, np.full(padding_QK.shape, -np.inf, np.float32)], axis=1)
    passages = (np.where(hits.rows_QK >= 0, hits.rows_QK + start, -1) for start, hits in per_shard)
    passage_QM = np.concatenate([*passages, padding_QK.astype(np.int64)], axis=1)
    view_QM = np.concatenate([*(hits.views_QK for _, hits in per_shard), padding_QK], axis=1)
    order_QM = np.argsort(-score_QM, axis=1, kind="stable")  # fast: each shard's list is a sorted run
    if len(per_shard) > 1:  # within a shard ties are already in order of id
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
    """Return, by shard, the queries (ascending positions) to search again for k rows. All empty: the merge is exact.

    Exact shards only. A passage that a shard left out may belong in the merged k where the merged list includes the
    shard's whole list, and the shard's frontier reaches the merged k-th score.
    """
    k = best.rows_QK.shape[1]
    kth_Q, last_Q = best.scores_QK[:, -1], best.rows_QK[:, -1]

    def is_exhausted(start: int, hits: ShardHits, query: int, num_rows: int) -> bool:
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
        candidate_Q = (hits.frontier_Q > -np.inf) & (hits.frontier_Q >= kth_Q) & (num_Q < k)
        candidates = zip(np.flatnonzero(candidate_Q).tolist(), num_Q[candidate_Q].tolist())
        queries = [query for query, num_rows in candidates if is_exhausted(start, hits, query, num_rows)]
        queries_S.append(np.array(queries, np.int64))
    return queries_S


def replace_hits(old_hits: ShardHits, new_hits: ShardHits, queries: IntArray) -> ShardHits:
    """Replace a shard's hits by the new ones for the queries (positions) of a second request."""
    width = max(old_hits.rows_QK.shape[1], new_hits.rows_QK.shape[1])

    def replace_rows(old_QK: Any, new_RK: Any, padding: float) -> Any:
        wide_QK = np.full((len(old_QK), width), padding, old_QK.dtype)
        wide_QK[:, : old_QK.shape[1]] = old_QK
        wide_QK[queries] = padding
        wide_QK[queries, : new_RK.shape[1]] = new_RK
        return wide_QK

    frontier_Q = np.array(old_hits.frontier_Q)
    frontier_Q[queries] = new_hits.frontier_Q
    return ShardHits(
        replace_rows(old_hits.rows_QK, new_hits.rows_QK, -1),
        replace_rows(old_hits.scores_QK, new_hits.scores_QK, -np.inf),
        replace_rows(old_hits.views_QK, new_hits.views_QK, -1),
        frontier_Q,
    )


def first_depth(k: int, sizes: Sequence[int], num_queries: int = 1) -> int:
    """Return the rows to request from every shard first, 1 to k: with 99 % probability no query needs a second request.

    `sizes` are the shards' numbers of passages. Time is proportional to k and to the number of distinct sizes: cache
    it.
    """
    total = sum(sizes)
    num_drawn = min(k, total)
    more_D = np.zeros(num_drawn + 1)
    for size, times in Counter(sizes).items():
        more_D += times * _chance_of_more(size, total, num_drawn)
    return max(int(np.argmax(num_queries * more_D <= MAX_SECOND_ROUND_CHANCE)), 1)


def _chance_of_more(size: int, total: int, num_drawn: int) -> FloatArray:
    """Compute P(more than d of `num_drawn` passages are in a shard of `size`, out of `total` passages), for every d."""
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
    """Sort by score, and by id among ties down to the k-th score."""
    kth = score_M[order_M[k - 1]]
    num_ranked = int(((score_M >= kth) & (passage_M >= 0)).sum())
    ranking = order_M[:num_ranked]
    ids = ids_of(passage_M[ranking])
    order = sorted(range(num_ranked), key=lambda at: (-float(score_M[ranking[at]]), ids[at]))
    return np.concatenate([ranking[order], order_M[num_ranked:]])
