"""Checks that a score is the true inner product, and the error bounds of fast products."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mvr_ray.core.searching.exact import ScoredPairs, best_first, distinct, exact_scores, score_views
from mvr_ray.core.searching.scan import score_error
from mvr_ray.errors import ShardIndexError

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
    bound_Q = score_error(norms, largest, dimension, 2.0**-mantissa if mantissa else 0.0)
    for product in (fast[0] @ fast[1].T, (torch.from_numpy(fast[0]) @ torch.from_numpy(fast[1]).T).numpy()):
        assert (np.abs(product - exact) <= bound_Q[:, None]).all()


@given(seed=SEEDS, k=st.integers(1, 12))
def test_best_first_is_a_stable_sort(seed, k):
    rng = np.random.default_rng(seed)
    pairs = [(q, row) for q in range(3) for row in range(rng.integers(0, 10))]
    rng.shuffle(pairs)
    columns = np.array(pairs, np.int64).reshape(-1, 2)
    scores = rng.integers(0, 3, len(pairs)).astype(np.float32)
    best = best_first(ScoredPairs(columns[:, 0], columns[:, 1], scores, np.zeros(len(pairs), np.int16)), k)
    ranking = sorted((q, -s, row) for (q, row), s in zip(columns.tolist(), scores.tolist()))
    expected = [one for query in range(3) for one in [r for r in ranking if r[0] == query][:k]]
    assert list(zip(best.query_M.tolist(), (-best.score_M).tolist(), best.row_M.tolist())) == expected


@given(st.lists(st.integers(-5, 5), max_size=30))
def test_distinct_is_the_sorted_set(values: list[int]):
    assert distinct(np.array(values, np.int64)).tolist() == sorted(set(values))
    assert distinct(np.array(values * 2, np.int64).reshape(2, -1)).tolist() == sorted(set(values))


def test_the_scores_of_a_passage_name_its_best_view_by_number_the_lowest_on_ties():
    vectors_ND = np.array([[1, 0], [0, 1], [0, 1]], np.float16)
    scores = score_views(np.array([[0, 2], [3, 1]], np.float32), "p", np.array([2, 5, 7], np.int16), vectors_ND)
    assert scores.scores_QN.tolist() == [[0, 2, 2], [3, 1, 1]]
    assert scores.winner_Q.tolist() == [5, 2]
