"""Checks scores, the error bounds of fast products, and that merging ranks as one list would."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mvr_ray.core.searching.exact import ScoredPairs, best_first, distinct
from mvr_ray.core.searching.scan import score_error
from mvr_ray.core.searching.scoring import exact_scores, first_depth, is_exact, merge_hits, needs_second_round
from mvr_ray.errors import ShardIndexError
from mvr_ray.types import ShardHits

SEEDS = st.integers(0, 2**20)


def vectors(seed: int, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(np.float32)


@given(seed=SEEDS, dimension=st.integers(1, 70))
def test_a_score_is_the_true_inner_product_rounded_once(seed, dimension):
    query, vector = vectors(seed, 2, dimension)
    terms = [a * b for a, b in zip(query.tolist(), vector.tolist())]
    true, slack = math.fsum(terms), 2.0**-50 * math.fsum(map(abs, terms))
    low, high = np.float32(true - slack), np.float32(true + slack)
    assert low <= exact_scores(query[None], vector[None])[0] <= high


@given(seed=SEEDS, dimension=st.integers(1, 70), num=st.integers(1, 9))
def test_a_score_depends_on_its_two_vectors_alone(seed, dimension, num):
    queries, passages = vectors(seed, 3, dimension), vectors(seed + 1, num, dimension)
    together = exact_scores(queries[:, None], passages[None])
    backwards = exact_scores(np.asfortranarray(queries)[::-1][:, None], passages[::-1][None])[::-1, ::-1]
    alone = [[exact_scores(query, passage).item() for passage in passages] for query in queries]
    assert together.tolist() == alone == backwards.tolist()
    assert together.dtype == np.float32


def test_every_zero_is_the_positive_one():
    assert not np.signbit(exact_scores(np.array([[-1.0, -1.0]], np.float32), np.zeros((1, 2), np.float16))).any()


def test_scoring_across_dimensions_is_refused():
    with pytest.raises(ShardIndexError, match="queries have dimension 3, vectors have 4"):
        exact_scores(np.zeros((1, 3), np.float32), np.zeros((1, 4), np.float32))


@given(seed=SEEDS, dimension=st.sampled_from([1, 5, 64, 768]), mantissa=st.sampled_from([None, 10, 7]))
@settings(max_examples=60)
def test_fast_products_err_within_their_bound(seed, dimension, mantissa):
    """With full float32 factors, and with factors cut to the mantissa of TF32 and of bfloat16."""
    queries, passages = vectors(seed, 4, dimension), vectors(seed + 1, 50, dimension)
    fast = [a.copy() for a in (queries, passages)]
    if mantissa:
        for array in fast:
            array.view(np.uint32)[...] &= np.uint32(0xFFFFFFFF << (23 - mantissa) & 0xFFFFFFFF)
    exact = exact_scores(queries[:, None], passages[None]).astype(np.float64)
    largest = float(np.linalg.norm(passages.astype(np.float64), axis=1).max())
    norms = np.linalg.norm(queries.astype(np.float64), axis=1)
    bound = score_error(norms, largest, dimension, 2.0**-mantissa if mantissa else 0.0)
    for product in (fast[0] @ fast[1].T, (torch.from_numpy(fast[0]) @ torch.from_numpy(fast[1]).T).numpy()):
        assert (np.abs(product - exact) <= bound[:, None]).all()


@given(seed=SEEDS, k=st.integers(1, 12))
def test_best_first_is_a_stable_sort(seed, k):
    rng = np.random.default_rng(seed)
    pairs = [(q, row) for q in range(3) for row in range(rng.integers(0, 10))]
    rng.shuffle(pairs)
    columns = np.array(pairs, np.int64).reshape(-1, 2)
    scores = rng.integers(0, 3, len(pairs)).astype(np.float32)
    best = best_first(ScoredPairs(columns[:, 0], columns[:, 1], scores, np.zeros(len(pairs), np.int16)), k)
    ranked = sorted((q, -s, row) for (q, row), s in zip(columns.tolist(), scores.tolist()))
    wanted = [one for query in range(3) for one in [r for r in ranked if r[0] == query][:k]]
    assert list(zip(best.query_M.tolist(), (-best.score_M).tolist(), best.row_M.tolist())) == wanted


def one_shard(ids: list[str], scores: dict[str, float], depth: int) -> ShardHits:
    """What a shard that holds `ids` answers to one query when asked for `depth` rows."""
    ranked = sorted((-scores[i], i, row) for row, i in enumerate(ids))
    top, pad = ranked[:depth], max(0, depth - len(ranked))
    return ShardHits(
        np.array([[row for _, _, row in top] + [-1] * pad], np.int64),
        np.array([[-s for s, _, _ in top] + [-np.inf] * pad], np.float32),
        np.array([[0] * len(top) + [-1] * pad], np.int16),
        np.array([-ranked[depth][0] if len(ranked) > depth else -np.inf], np.float32),
    )


@given(seed=SEEDS, k=st.integers(1, 25), depth=st.integers(1, 25), levels=st.sampled_from([1, 2, 5, 1000]))
@settings(max_examples=200)
def test_a_merge_without_second_round_is_exact_and_doubt_is_never_lost(seed, k, depth, levels):
    rng = np.random.default_rng(seed)
    names = [f"p{n:02d}" for n in range(20)]
    scores = {name: float(rng.integers(0, levels)) for name in names}
    shard_of = rng.integers(0, 4, len(names))
    held = [[name for name, s in zip(names, shard_of) if s == shard] for shard in range(4)]
    answers = [(shard, ids, one_shard(ids, scores, min(depth, k))) for shard, ids in enumerate(held)]
    merged = merge_hits(answers, k)
    again = needs_second_round(answers, merged, k)
    asked = [(s, ids, one_shard(ids, scores, k) if s in again else hits) for s, ids, hits in answers]
    truth = sorted(names, key=lambda name: (-scores[name], name))[:k]
    if not again:
        assert [hit.passage_id for hit in merged[0]] == truth
    wider = max(hits.rows_QK.shape[1] for _, _, hits in asked)
    assert wider <= max(k, depth)
    assert [hit.passage_id for hit in merge_hits(asked, k)[0]] == truth
    if depth >= k:
        assert not again
    frontier_SQ = np.array([hits.frontier_Q for _, _, hits in answers])
    kth_Q = np.array([merged[0][k - 1].score if len(merged[0]) == k else -np.inf])
    if is_exact(frontier_SQ, kth_Q)[0]:
        assert not again


def doubt(depth: int, sizes: list[int], k: int) -> float:
    """The sum over shards of the chance that more than `depth` of the best k lie there, in whole numbers."""
    total, drawn = sum(sizes), min(k, sum(sizes))
    ways = sum(math.comb(n, x) * math.comb(total - n, drawn - x) for n in sizes for x in range(depth + 1, drawn + 1))
    return ways / math.comb(total, drawn)


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


def test_ids_of_the_hit_rows_are_enough():
    hits = one_shard(["a", "b", "c"], {"a": 1.0, "b": 3.0, "c": 2.0}, 2)
    [[first, second]] = merge_hits([(5, {1: "b", 2: "c"}, hits)], 10)
    assert (first.passage_id, first.score, first.shard, first.row) == ("b", 3.0, 5, 1)
    assert (second.passage_id, second.view) == ("c", 0)


def test_shards_that_answered_different_questions_are_refused():
    one = one_shard(["a"], {"a": 1.0}, 2)
    two = ShardHits(*(np.concatenate([column, column]) for column in one))
    with pytest.raises(ShardIndexError, match=r"different numbers of queries, \[1, 2\]"):
        merge_hits([(0, ["a"], one), (1, ["a"], two)], 3)


@given(st.lists(st.integers(-5, 5), max_size=30))
def test_distinct_is_the_sorted_set(values: list[int]):
    assert distinct(np.array(values, np.int64)).tolist() == sorted(set(values))
    assert distinct(np.array(values * 2, np.int64).reshape(2, -1)).tolist() == sorted(set(values))
