"""Merges the results of a version's shards into lists of hits, and names the shards that need a second round.

Shapes: Q queries, K hits, R distinct rows among the hits.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

import numpy as np
import pyarrow as pa

from mvr_ray.core.searching.merging import merge, replace_hits, uncertain_queries
from mvr_ray.distributed.searching.messages import ShardResult
from mvr_ray.store.embeddings import arrow_rows
from mvr_ray.store.manifest import ShardEntry
from mvr_ray.types import Hit, IntArray


def shard_starts(entries: Sequence[ShardEntry]) -> dict[int, int]:
    """Return the number of each shard's first passage when the passages of all shards are numbered consecutively."""
    ends = accumulate(entry.num_passages for entry in entries)
    return {entry.shard: end - entry.num_passages for entry, end in zip(entries, ends)}


class MergedResults:
    """The best k passages over some shards of one version."""

    def __init__(self, results: Iterable[ShardResult], start_of: Mapping[int, int], k: int) -> None:
        """`start_of` comes from `shard_starts`. Raises ShardIndexError for k below 1."""
        self._results = sorted(results, key=lambda result: (start_of[result.shard], result.shard))
        self._starts = [start_of[result.shard] for result in self._results]
        numbers = (result.rows_R + start for result, start in zip(self._results, self._starts))
        self._numbers_R = np.concatenate([np.empty(0, np.int64), *numbers])
        self._ids_R = pa.concat_arrays([pa.nulls(0, pa.string()), *(result.ids_R for result in self._results)])
        self._lists = [(start, result.hits) for start, result in zip(self._starts, self._results)]
        self._ranking = merge(self._lists, k, self._ids_of)

    def uncertain_queries(self) -> dict[int, IntArray]:
        """Return, by shard, the queries (ascending positions) for which an exact shard must return k rows; empty: the
        hits are exact."""
        queries_S = uncertain_queries(self._lists, self._ranking, self._ids_of)
        return {result.shard: queries for result, queries in zip(self._results, queries_S) if len(queries)}

    def hits(self) -> list[list[Hit]]:
        """Return the hits of every query, best first."""
        passage_QK, score_QK, view_QK, _ = self._ranking
        passages = passage_QK[passage_QK >= 0]
        numbers = np.searchsorted(self._starts, passages, side="right") - 1
        shards = np.array([result.shard for result in self._results], np.int64)[numbers]
        rows = passages - np.array(self._starts, np.int64)[numbers]
        columns = score_QK[passage_QK >= 0], view_QK[passage_QK >= 0], shards, rows
        hits = map(Hit._make, zip(self._ids_of(passages), *(column.tolist() for column in columns)))
        return [[next(hits) for _ in range(count)] for count in (passage_QK >= 0).sum(axis=1).tolist()]

    def _ids_of(self, passages: IntArray) -> list[str]:
        return self._ids_R.take(arrow_rows(np.searchsorted(self._numbers_R, passages))).to_pylist()


def overlay_results(first: ShardResult, second: ShardResult, queries: IntArray) -> ShardResult:
    """Return a shard's first result, with the second one's lists for the queries (positions) of the second round."""
    rescored_Q = np.array(first.rescored_Q)
    rescored_Q[queries] += second.rescored_Q
    rows_R, first_R = np.unique(np.concatenate([first.rows_R, second.rows_R]), return_index=True)
    ids_R = pa.concat_arrays([first.ids_R, second.ids_R]).take(arrow_rows(first_R))
    return ShardResult(first.shard, replace_hits(first.hits, second.hits, queries), rescored_Q, rows_R, ids_R)
