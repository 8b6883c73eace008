"""Checks that merging ranks as one list would, that its certificate never errs, and the first depth."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mvr_ray.core.searching.merging import first_depth, merge, replace_hits, uncertain_queries
from mvr_ray.errors import ShardIndexError
from mvr_ray.types import IntArray, ShardHits

SEEDS = st.integers(0, 2**20)
LEVELS = st.sampled_from([1, 2, 5, 1000])
"""Distinct scores: with few of them most passages tie."""


class Corpus:
    """Up to 40 passages in 4 shards whose ids interleave, with random scores and views for some queries."""

    def __init__(self, seed: int, levels: int, num_queries: int = 3) -> None:
        rng = np.random.default_rng(seed)
        names = [f"p{number:02d}" for number in rng.permutation(rng.integers(0, 41))]
        shard_of = rng.integers(0, 4, len(names))
        self.shards = [sorted(name for name, at in zip(names, shard_of) if at == shard) for shard in range(4)]
        self.ids = [name for ids in self.shards for name in ids]
        self.starts = np.cumsum([0, *map(len, self.shards)])[:4].tolist()
        self.score_QN = rng.integers(0, levels, (num_queries, len(names))).astype(np.float32)
        self.view_QN = rng.integers(0, 8, (num_queries, len(names))).astype(np.int16)

    def ids_of(self, passages: IntArray) -> list[str]:
        return [self.ids[passage] for passage in passages]

    def shard(self, number: int, depth: int, queries: slice | IntArray = slice(None)) -> tuple[int, ShardHits]:
        """What a shard answers to some queries when it is asked for `depth` rows."""
        start, size = self.starts[number], len(self.shards[number])
        scores_QR = self.score_QN[queries, start : start + size]
        views_QR = self.view_QN[queries, start : start + size]
        order_QR = np.argsort(-scores_QR, axis=1, kind="stable")
        ranked_QR = (order_QR, *(np.take_along_axis(values, order_QR, 1) for values in (scores_QR, views_QR)))
        columns = []
        for values, fill, dtype in zip(ranked_QR, (-1, -np.inf, -1), (np.int64, np.float32, np.int16)):
            columns.append(np.full((len(scores_QR), depth), fill, dtype))
            columns[-1][:, : min(size, depth)] = values[:, :depth]
        rest_QR = ranked_QR[1][:, depth:]
        return start, ShardHits(*columns, rest_QR.max(axis=1, initial=-np.inf).astype(np.float32))

    def best(self, query: int, k: int) -> list[tuple[str, float, int]]:
        """By brute force: id, score and view of the best k of all passages."""
        passages = zip(self.ids, self.score_QN[query].tolist(), self.view_QN[query].tolist())
        return sorted(passages, key=lambda passage: (-passage[1], passage[0]))[:k]

    def best_left_out(self, k: int) -> np.ndarray:
        """By brute force, the best score after the best k of each query, -inf where there is none."""
        return np.sort(np.pad(self.score_QN, ((0, 0), (k + 1, 0)), constant_values=-np.inf), axis=1)[:, -k - 1]

    def lists(self, hits: ShardHits, query: int) -> list[tuple[str, float, int]]:
        """Merged hits in the same form; every place after them is padding."""
        count = int((hits.rows_QK[query] >= 0).sum())
        passage_K, score_K, view_K = (column[query] for column in hits[:3])
        assert (passage_K[count:] == -1).all() and (view_K[count:] == -1).all() and (score_K[count:] == -np.inf).all()
        return list(zip(self.ids_of(passage_K[:count]), score_K[:count].tolist(), view_K[:count].tolist()))


@given(SEEDS, st.integers(1, 25), LEVELS, st.integers(0, 4))
@settings(max_examples=150)
def test_merging_whole_lists_equals_brute_force(seed, k, levels, num_queries):
    corpus = Corpus(seed, levels, num_queries)
    result = merge([corpus.shard(number, k) for number in range(4)], k, corpus.ids_of)
    assert [column.shape for column in result[:3]] == [(num_queries, k)] * 3
    assert np.array_equal(result.frontier_Q, corpus.best_left_out(k))
    assert [corpus.lists(result, query) for query in range(num_queries)] == [
        corpus.best(query, k) for query in range(num_queries)
    ]


@given(SEEDS, st.integers(1, 25), st.integers(1, 25), LEVELS)
@settings(max_examples=300)
def test_a_query_without_doubt_is_exact_and_asking_again_settles_every_doubt(seed, k, depth, levels):
    corpus = Corpus(seed, levels)
    lists = [corpus.shard(number, depth) for number in range(4)]
    result = merge(lists, k, corpus.ids_of)
    again = uncertain_queries(lists, result, corpus.ids_of)
    certain = set(range(3)).difference(*(queries.tolist() for queries in again))
    assert all(corpus.lists(result, query) == corpus.best(query, k) for query in certain)
    if depth >= k:
        assert len(certain) == 3
    for number, queries in enumerate(again):
        start, hits = lists[number]
        lists[number] = start, replace_hits(hits, corpus.shard(number, k, queries)[1], queries)
    final_result = merge(lists, k, corpus.ids_of)
    assert [corpus.lists(final_result, query) for query in range(3)] == [corpus.best(query, k) for query in range(3)]
    assert not any(len(queries) for queries in uncertain_queries(lists, final_result, corpus.ids_of))


def one_query(*scores: float, frontier: float = 0.0) -> ShardHits:
    rows_QK, views_QK = np.arange(len(scores))[None], np.zeros((1, len(scores)), np.int16)
    return ShardHits(rows_QK, np.array([scores], np.float32), views_QK, np.array([frontier], np.float32))


def test_ids_are_looked_up_only_where_scores_tie_across_shards():
    looked_up: list[list[int]] = []

    def ids_of(passages: IntArray) -> list[str]:
        looked_up.append(passages.tolist())
        return [{0: "d", 10: "c", 11: "b"}[number] for number in passages]

    assert merge([(0, one_query(3, 1)), (10, one_query(2, 0))], 3, ids_of).rows_QK.tolist() == [[0, 10, 1]]
    assert looked_up == []
    assert merge([(0, one_query(3, 1)), (10, one_query(3, 3))], 2, ids_of).rows_QK.tolist() == [[11, 10]]
    assert looked_up == [[0, 10, 11]]


def test_replaced_hits_leave_nothing_of_the_old_ones_of_their_queries():
    two = ShardHits(*(np.concatenate([own, own]) for own in one_query(3, 2, 1, frontier=1)))
    result = replace_hits(two, one_query(9, frontier=-np.inf), np.array([1]))
    assert result.scores_QK.tolist() == [[3, 2, 1], [9, -np.inf, -np.inf]]
    assert result.rows_QK.tolist() == [[0, 1, 2], [0, -1, -1]]
    assert result.frontier_Q.tolist() == [1, -np.inf]


@pytest.mark.parametrize(("ids", "again"), [({0: "b", 10: "x", 11: "a"}, []), ({0: "a", 10: "x", 11: "b"}, [0])])
def test_where_the_frontier_ties_the_id_of_the_last_row_decides(ids, again):
    """Only a passage that ranks after the shard's last row was left out."""
    lists = [(0, one_query(3, frontier=3)), (10, one_query(4, 3, frontier=-np.inf))]
    result = merge(lists, 2, lambda passages: [ids[number] for number in passages])
    queries_S = uncertain_queries(lists, result, lambda passages: [ids[number] for number in passages])
    assert [queries.tolist() for queries in queries_S] == [again, []]


def test_shards_that_answered_different_queries_are_refused():
    one = one_query(1)
    two = ShardHits(*(np.concatenate([column, column]) for column in one))
    with pytest.raises(ShardIndexError, match=r"different numbers of queries, \[1, 2\]"):
        merge([(0, one), (9, two)], 2, lambda passages: [""] * len(passages))


def doubt(depth: int, sizes: list[int], k: int) -> float:
    """The sum over shards of the chance that more than `depth` of the best k lie there, in whole numbers."""
    total, draws = sum(sizes), min(k, sum(sizes))
    ways = sum(math.comb(n, x) * math.comb(total - n, draws - x) for n in sizes for x in range(depth + 1, draws + 1))
    return ways / math.comb(total, draws)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=8), st.integers(1, 120), st.sampled_from([1, 16, 256]))
@settings(max_examples=200)
def test_the_first_depth_is_the_least_that_leaves_one_doubt_in_a_hundred_calls(sizes, k, num_queries):
    depth = first_depth(k, sizes, num_queries)
    assert 1 <= depth <= k
    assert num_queries * doubt(depth, sizes, k) <= 0.01 * (1 + 1e-9)
    assert depth == 1 or num_queries * doubt(depth - 1, sizes, k) > 0.01 * (1 - 1e-9)


@pytest.mark.parametrize(
    ("k", "sizes"),
    [(10, [60] * 4), (100, [2_600_000] * 8), (1000, [330_000] * 64), (100, [5000, 200, 200, 1]), (40, [12, 3, 9, 30])],
)
def test_passages_placed_at_random_seldom_leave_a_doubt(k, sizes):
    """Alike and lopsided shards, few passages and a whole Wikipedia: 20,000 placements each."""
    rng = np.random.default_rng(k)
    held_RS = rng.multivariate_hypergeometric(sizes, min(k, sum(sizes)), 20_000, method="marginals")
    depth = first_depth(k, sizes)
    assert (held_RS.max(axis=1) > depth).mean() <= 0.01
    assert depth < k
