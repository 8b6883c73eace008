"""Search of one shard's blocks, merging of ranked lists, and when a merged list is certainly exact.

A passage scores as its best view (MVR, eq. 4):  f(q, p) = max_v <q, p_v>. Ranked lists go by score descending, then
passage id ascending; within a shard rows are in id order, so there row ascending says the same.

Merging: each shard gives its best rows and its frontier, the most that a passage left out can score. What a shard left
out ranks after its last row. So the merged best k are exact unless some shard's last row is itself among them *and* its
frontier reaches the merged k-th score; a shard that gave k rows, or all it has, can never be in that case.

How many rows to ask for first: where passages lie in shards at random, the best k of all N hold X_s ~ Hypergeometric(N,
N_s, k) of a shard's N_s. Ties apart, a shard that gives d rows is asked again only where X_s > d, so that for Q queries
this happens with a chance of Q sum_s P(X_s > d) at most. The least d that brings this under 1 % is asked for.

Shapes: Q queries, S shards, K hits kept, D dimension.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from mvr_ray.core.searching.engines import make_kernel
from mvr_ray.core.searching.exact import check_k, check_queries, exact_scores
from mvr_ray.core.searching.scan import Scan
from mvr_ray.errors import ShardIndexError
from mvr_ray.types import EmbeddingBlock, FloatArray, Hit, IntArray, ShardHits

__all__ = ["exact_scores", "first_depth", "is_exact", "merge_hits", "needs_second_round", "score_blocks"]

ASKED_AGAIN = 0.01
"""The most likely that a call leaves a doubt, where passages lie in shards at random."""

RowIds: TypeAlias = Sequence[str] | Mapping[int, str]
"""Passage id by row: of the whole shard, or of the rows that were hit."""

ShardAnswer: TypeAlias = tuple[int, RowIds, ShardHits]


def score_blocks(
    queries_QD: FloatArray,
    blocks: Sequence[EmbeddingBlock],
    k: int,
    threads: int | None = None,
    *,
    device: str = "cpu",
    engine: str = "auto",
) -> ShardHits:
    """Exact top k of one shard in one pass. To search the same blocks often, open a flat index: it keeps norms."""
    check_k(k)
    scan = Scan(blocks, make_kernel(engine, device, threads))
    return scan.search(check_queries(queries_QD, scan.table.dimension), k)


def merge_hits(per_shard: Sequence[ShardAnswer], k: int) -> list[list[Hit]]:
    """The best k of all shards for each query: score descending, passage id ascending."""
    check_k(k)
    numbers = {len(hits.rows_QK) for _, _, hits in per_shard}
    if len(numbers) > 1:
        raise ShardIndexError(f"shards answered different numbers of queries, {sorted(numbers)}; ask all the same ones")
    if not numbers:
        return []
    score_QM = np.concatenate([hits.scores_QK for _, _, hits in per_shard], axis=1)
    row_QM = np.concatenate([hits.rows_QK for _, _, hits in per_shard], axis=1)
    view_QM = np.concatenate([hits.views_QK for _, _, hits in per_shard], axis=1)
    from_M = np.repeat(np.arange(len(per_shard)), [hits.rows_QK.shape[1] for _, _, hits in per_shard])
    order_QM = np.argsort(-score_QM, axis=1, kind="stable")  # a shard's list is a sorted run: little is left to do
    last_Q = np.minimum((row_QM >= 0).sum(axis=1), k) - 1
    found = []
    for query, (order_M, last) in enumerate(zip(order_QM, last_Q.tolist())):
        if last < 0:
            found.append([])
            continue
        kth = score_QM[query, order_M[last]]
        best_M = order_M[: last + 1] if len(per_shard) == 1 else order_M[: int((score_QM[query] >= kth).sum())]
        score_C, row_C = score_QM[query, best_M], row_QM[query, best_M]
        hits = [
            Hit(per_shard[at][1][row], score, view, per_shard[at][0], row)
            for at, row, score, view in zip(
                from_M[best_M].tolist(), row_C.tolist(), score_C.tolist(), view_QM[query, best_M].tolist()
            )
        ]
        if len(per_shard) > 1 and (score_C[1:] == score_C[:-1]).any():  # only what ties needs its ids compared
            hits.sort(key=lambda hit: (-hit.score, hit.passage_id))
        found.append(hits[:k])
    return found


def is_exact(frontier_SQ: FloatArray, kth_Q: FloatArray) -> NDArray[np.bool_]:
    """Whether no passage left out can reach the merged k-th score (-inf where fewer than k were found) [Q].

    Sufficient, and blind to ties: a frontier equal to the k-th score counts as doubt. `needs_second_round` sees ids.
    """
    frontier_Q = np.asarray(frontier_SQ).max(axis=0, initial=-np.inf)
    return (frontier_Q < kth_Q) | (frontier_Q == -np.inf)


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


def _chance_of_more(size: int, total: int, drawn: int) -> FloatArray:
    """Of `drawn` passages among `total`, the chance that more than d lie in a shard of `size`, for d = 0 .. drawn."""
    low, high = max(0, drawn - (total - size)), min(drawn, size)
    x = np.arange(low, high, dtype=np.float64)
    steps = np.log(size - x) + np.log(drawn - x) - np.log(x + 1) - np.log(total - size - drawn + x + 1)
    log_chance = np.concatenate([[0.0], np.cumsum(steps)])
    chance = np.exp(log_chance - log_chance.max())
    more_D = np.zeros(drawn + 1)
    more_D[:low] = 1.0
    more_D[low:high] = np.cumsum(chance[:0:-1])[::-1] / chance.sum()
    return more_D


def needs_second_round(
    per_shard: Sequence[ShardAnswer], merged: Sequence[Sequence[Hit]], k: int
) -> dict[int, IntArray]:
    """Which shards to ask again for k rows, and for which queries (ascending positions). Empty: the merge is exact.

    Exact shards only. A shard is asked again where it may hold a passage, left out of its own list, that belongs in the
    merged k: it left something out, its own list is used up, and its frontier reaches the merged k-th score.
    """
    again: dict[int, IntArray] = {}
    kth_Q = np.array([best[k - 1].score if len(best) >= k else -np.inf for best in merged])
    for shard, ids, hits in per_shard:
        in_doubt = np.flatnonzero((hits.frontier_Q > -np.inf) & (hits.frontier_Q >= kth_Q)).tolist()
        asked = [query for query in in_doubt if _may_miss(ids, hits, query, merged[query], k)]
        if asked:
            again[shard] = np.asarray(asked, np.int64)
    return again


def _may_miss(ids: RowIds, hits: ShardHits, query: int, merged: Sequence[Hit], k: int) -> bool:
    frontier, rows_K = hits.frontier_Q[query], hits.rows_QK[query]
    given = np.flatnonzero(rows_K >= 0)
    if frontier == -np.inf or len(given) >= k:
        return False
    if len(merged) < k or not len(given):
        return True
    kth, last = merged[k - 1], int(given[-1])
    used_up = (-float(hits.scores_QK[query, last]), ids[int(rows_K[last])]) <= (-kth.score, kth.passage_id)
    return used_up and bool(frontier >= kth.score)
