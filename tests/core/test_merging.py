"""Merging as arrays says what merging hit by hit says, and asks for ids only where scores tie."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mvr_ray.core.searching.merging import in_doubt, merge_numbered
from mvr_ray.core.searching.scoring import merge_hits
from mvr_ray.errors import ShardIndexError
from mvr_ray.types import ShardHits


def random_shards(seed: int, num_queries: int, k: int, levels: int) -> list[tuple[list[str], ShardHits]]:
    """Shards of 0 to 12 passages, whose ids interleave; best k of each, by few distinct scores."""
    rng = np.random.default_rng(seed)
    names = [f"p{number:03d}" for number in rng.permutation(60)]
    shards, first = [], 0
    for size in rng.integers(0, 13, rng.integers(1, 5)):
        ids = sorted(names[first : first + size])
        first += size
        hits = [np.full((num_queries, k), fill, dtype) for fill, dtype in ((-1, np.int64), (-np.inf, np.float32))]
        views_QK = np.full((num_queries, k), -1, np.int16)
        for query in range(num_queries):
            scores = rng.integers(0, levels, size).astype(np.float32)
            order = np.lexsort((np.arange(size), -scores))[:k]
            hits[0][query, : len(order)], hits[1][query, : len(order)] = order, scores[order]
            views_QK[query, : len(order)] = rng.integers(0, 8, len(order))
        shards.append((ids, ShardHits(hits[0], hits[1], views_QK, np.zeros(num_queries, np.float32))))
    return shards


@given(st.integers(0, 10_000), st.integers(0, 4), st.integers(1, 9), st.sampled_from([1, 3, 1000]))
@settings(max_examples=150)
def test_merging_as_arrays_equals_merging_hit_by_hit(seed, num_queries, k, levels):
    shards = random_shards(seed, num_queries, k, levels)
    starts = np.cumsum([0, *(len(ids) for ids, _ in shards)])
    every = [name for ids, _ in shards for name in ids]
    truth = merge_hits([(number, ids, hits) for number, (ids, hits) in enumerate(shards)], k)
    given_hits = [(int(start), hits) for start, (_, hits) in zip(starts, shards)]
    merged = merge_numbered(given_hits, k, lambda passages: [every[number] for number in passages])
    assert merged.passage_QK.shape == merged.view_QK.shape == (num_queries, k)
    for query, hits in enumerate(truth):
        count = len(hits)
        assert [every[number] for number in merged.passage_QK[query, :count]] == [hit.passage_id for hit in hits]
        assert merged.view_QK[query, :count].tolist() == [hit.view for hit in hits]
        assert (merged.passage_QK[query, count:] == -1).all() and (merged.view_QK[query, count:] == -1).all()
        assert merged.kth_Q[query] == (hits[-1].score if count == k else -np.inf)


@given(st.integers(0, 10_000), st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 3, 1000]))
@settings(max_examples=150)
def test_what_is_not_in_doubt_is_what_whole_lists_merge_to(seed, k, depth, levels):
    """The same shards asked for `depth` rows and for k; the frontier is the first score left out."""
    whole = random_shards(seed, 4, 12, levels)
    starts = np.cumsum([0, *(len(ids) for ids, _ in whole)]).tolist()
    every = [name for ids, _ in whole for name in ids]

    def asked_for(rows: int) -> list[tuple[int, ShardHits]]:
        cut = [(h.rows_QK[:, :rows], h.scores_QK[:, :rows], h.views_QK[:, :rows]) for _, h in whole]
        left = [h.scores_QK[:, rows] if rows < 12 else np.full(4, -np.inf, np.float32) for _, h in whole]
        return [(start, ShardHits(*columns, frontier_Q)) for start, columns, frontier_Q in zip(starts, cut, left)]

    def ids_of(passages: np.ndarray) -> list[str]:
        return [every[number] for number in passages]

    truth, found = merge_numbered(asked_for(k), k, ids_of), merge_numbered(asked_for(depth), k, ids_of)
    doubt = in_doubt([hits for _, hits in asked_for(depth)], found.kth_Q)
    sure = np.setdiff1d(np.arange(4), doubt)
    assert np.array_equal(found.passage_QK[sure], truth.passage_QK[sure])
    assert np.array_equal(found.view_QK[sure], truth.view_QK[sure])
    if depth >= 12:
        assert not len(doubt)


def test_ids_are_asked_for_only_where_scores_tie_across_shards():
    def hits(*scores: float) -> ShardHits:
        rows_QK, views_QK = np.arange(len(scores))[None], np.zeros((1, len(scores)), np.int16)
        return ShardHits(rows_QK, np.array([scores], np.float32), views_QK, np.zeros(1, np.float32))

    asked: list[list[int]] = []

    def ids_of(passages: np.ndarray) -> list[str]:
        asked.append(passages.tolist())
        return [{0: "d", 10: "c", 11: "b"}[number] for number in passages]

    assert merge_numbered([(0, hits(3, 1)), (10, hits(2, 0))], 3, ids_of).passage_QK.tolist() == [[0, 10, 1]]
    assert asked == []
    assert merge_numbered([(0, hits(3, 1)), (10, hits(3, 3))], 2, ids_of).passage_QK.tolist() == [[11, 10]]
    assert asked == [[0, 10, 11]]


def test_shards_that_answered_different_queries_are_refused():
    one, two = random_shards(1, 1, 2, 3)[0][1], random_shards(1, 2, 2, 3)[0][1]
    with pytest.raises(ShardIndexError, match=r"different numbers of queries, \[1, 2\]"):
        merge_numbered([(0, one), (9, two)], 2, lambda passages: [""] * len(passages))
