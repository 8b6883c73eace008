"""Ranked lists of several shards into one, as arrays: `scoring.merge_hits` for many questions at once.

A passage has a number through all shards: its shard's start and its row. Rows are in id order within a shard, so ids
are asked for only where passages of the same score compete, which real scores seldom do.

Shapes: Q queries, S shards, K hits kept, M = the sum of the shards' list lengths.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mvr_ray.core.searching.exact import check_k
from mvr_ray.errors import ShardIndexError
from mvr_ray.types import FloatArray, IntArray, ShardHits

IdsOf = Callable[[IntArray], Sequence[str]]
"""Passage ids of some numbers."""


class NumberedHits(NamedTuple):
    """Merged hits, best first: passage_QK int64 and view_QK int16, both -1 on padding; kth_Q float32, the score of the
    last one, -inf where there are fewer than K."""

    passage_QK: IntArray
    view_QK: IntArray
    kth_Q: FloatArray


def merge_numbered(
    per_shard: Sequence[tuple[int, ShardHits]], k: int, ids_of: IdsOf, *, in_id_order: bool = True
) -> NumberedHits:
    """The best k of all shards for each query: score descending, passage id ascending.

    `per_shard` holds the number of each shard's first passage, and its hits; not `in_id_order` where it holds several
    shards' hits as one list, whose rows of equal score then stand in any order.
    """
    check_k(k)
    sizes = {len(hits.rows_QK) for _, hits in per_shard}
    if len(sizes) > 1:
        raise ShardIndexError(f"shards answered different numbers of queries, {sorted(sizes)}; ask all the same ones")
    if not per_shard:
        return NumberedHits(np.empty((0, k), np.int64), np.empty((0, k), np.int16), np.empty(0, np.float32))
    score_QM = np.concatenate([hits.scores_QK for _, hits in per_shard], axis=1)
    passage_QM = np.concatenate([np.where(h.rows_QK >= 0, h.rows_QK + start, -1) for start, h in per_shard], axis=1)
    view_QM = np.concatenate([hits.views_QK for _, hits in per_shard], axis=1)
    if score_QM.shape[1] < k:
        wider = ((0, 0), (0, k - score_QM.shape[1]))
        score_QM = np.pad(score_QM, wider, constant_values=-np.inf)
        passage_QM, view_QM = (np.pad(column_QM, wider, constant_values=-1) for column_QM in (passage_QM, view_QM))
    order_QM = np.argsort(-score_QM, axis=1, kind="stable")  # each shard's list is a sorted run: little is left to do
    if len(per_shard) > 1 or not in_id_order:
        sorted_QM = np.take_along_axis(score_QM, order_QM[:, : k + 1], axis=1)
        tied_Q = ((sorted_QM[:, 1:] == sorted_QM[:, :-1]) & (sorted_QM[:, 1:] > -np.inf)).any(axis=1)
        for query in np.flatnonzero(tied_Q):
            order_QM[query] = _with_ids(score_QM[query], passage_QM[query], order_QM[query], k, ids_of)
    best_QK = order_QM[:, :k]
    return NumberedHits(
        np.take_along_axis(passage_QM, best_QK, axis=1).astype(np.int64),
        np.take_along_axis(view_QM, best_QK, axis=1).astype(np.int16),
        np.take_along_axis(score_QM, best_QK[:, -1:], axis=1)[:, 0],
    )


def in_doubt(per_shard: Sequence[ShardHits], kth_Q: FloatArray) -> IntArray:
    """Queries whose merged list may lack a passage that an exact shard left out of its own: its frontier reaches the
    k-th score. Blind to ids: a tie counts as doubt."""
    frontier_Q = np.max([hits.frontier_Q for hits in per_shard], axis=0, initial=-np.inf)
    return np.flatnonzero((frontier_Q > -np.inf) & (frontier_Q >= kth_Q))


def _with_ids(score_M: np.ndarray, passage_M: IntArray, order_M: IntArray, k: int, ids_of: IdsOf) -> IntArray:
    """An order by score with what is tied down to the k-th score put in order of id."""
    kth = score_M[order_M[k - 1]]
    reach = int(((score_M >= kth) & (passage_M >= 0)).sum())
    ranked = order_M[:reach]
    ids = ids_of(passage_M[ranked])
    places = sorted(range(reach), key=lambda at: (-float(score_M[ranked[at]]), ids[at]))
    return np.concatenate([ranked[places], order_M[reach:]])
