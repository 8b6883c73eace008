"""Metrics against ir_measures, scipy, loops and worked numbers."""

import itertools
import math
import tracemalloc

import ir_measures
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mvr_ray.core.judging.metrics import (
    cluster_interval,
    first_ranks,
    gold_answer_view_share,
    hit_within,
    holm,
    interval_over_seeds,
    lv,
    ndcg,
    paired_test,
    ppl,
    ppl_of_mean_entropy,
    question_lv,
    recall,
    reciprocal_ranks,
    relative_scores,
    share_interval,
    top_k_accuracy,
    view_pair_cosine,
    winning_views,
)


def test_lists_of_different_lengths_are_counted_by_question_and_not_by_the_first_list():
    ranks = first_ranks([[False, True], [], [True], [False] * 9, [False, False, False, True]])
    assert ranks.tolist() == [1, -1, 0, -1, 3]
    assert top_k_accuracy(ranks, [1, 2, 3, 4, 100]) == {1: 0.2, 2: 0.4, 3: 0.4, 4: 0.6, 100: 0.6}
    assert hit_within(ranks, 2).tolist() == [1, 0, 1, 0, 0]


@pytest.mark.parametrize("shape", [(40, 3), (5, 1), (3, 0), (0, 4)])
def test_an_array_has_the_first_ranks_of_its_lists(shape: tuple[int, int]):
    relevant_QK = np.random.default_rng(1).random(shape) < 0.3
    ranks_Q = first_ranks(relevant_QK)
    assert ranks_Q.dtype == np.int64 and ranks_Q.tolist() == first_ranks(relevant_QK.tolist()).tolist()


@settings(max_examples=60)
@given(st.data())
def test_reciprocal_ranks_ndcg_and_recall_equal_ir_measures(data: st.DataObject):
    names = [f"d{n}" for n in range(9)]
    cutoff = data.draw(st.integers(1, 10))
    rankings, grades = [], []
    for _ in range(data.draw(st.integers(1, 4))):
        rankings.append(data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1)))
        grades.append(data.draw(st.dictionaries(st.sampled_from(names), st.integers(0, 3), min_size=1)))
    qrels = [ir_measures.Qrel(str(q), d, g) for q, judgments in enumerate(grades) for d, g in judgments.items()]
    run = [ir_measures.ScoredDoc(str(q), d, float(-i)) for q, ids in enumerate(rankings) for i, d in enumerate(ids)]
    gain, rank, share = ir_measures.nDCG @ cutoff, ir_measures.RR @ cutoff, ir_measures.R @ cutoff
    expected = {(m.query_id, m.measure): m.value for m in ir_measures.iter_calc([gain, rank, share], qrels, run)}
    shares = recall(rankings, grades, cutoff)
    ours = ndcg(rankings, grades, cutoff)
    ranks = first_ranks([[judgments.get(d, 0) > 0 for d in ids] for ids, judgments in zip(rankings, grades)])
    for question in range(len(rankings)):
        assert shares[question] == pytest.approx(expected[str(question), share], abs=1e-9)
        assert ours[question] == pytest.approx(expected[str(question), gain], abs=1e-9)
        assert reciprocal_ranks(ranks, cutoff)[question] == pytest.approx(expected[str(question), rank], abs=1e-9)


def test_ndcg_equals_the_worked_example_and_counts_a_repeated_id_once():
    grades = {"a": 3, "b": 1, "c": -2}
    ideal = 3 + 1 / math.log2(3)
    assert ndcg([["c", "a", "b"]], [grades], 10)[0] == pytest.approx((3 / math.log2(3) + 1 / 2) / ideal)
    assert ndcg([["a", "a", "b"]], [grades], 10)[0] == pytest.approx(1.0)
    assert ndcg([["a"], []], [{}, grades], 10).tolist() == [0.0, 0.0]


def test_the_interval_of_independent_questions_is_near_the_normal_one_and_repeats_with_its_seed():
    values = np.array([1.0] * 700 + [0.0] * 300)
    alone = np.arange(1000)
    interval = cluster_interval(values, alone, seed=1, num=4000)
    half = 1.96 * math.sqrt(0.7 * 0.3 / 1000)
    assert interval.low == pytest.approx(0.7 - half, abs=0.004)
    assert interval.high == pytest.approx(0.7 + half, abs=0.004)
    assert cluster_interval(values, alone, seed=1, num=4000) == interval
    assert cluster_interval(values, alone, seed=2, num=4000) != interval


def test_the_memory_of_an_interval_does_not_grow_with_the_longest_title():
    values, titles = np.arange(500) % 2, ["x" * 100_000, *(f"title {number}" for number in range(499))]
    short_titles = ["x", *titles[1:]]
    tracemalloc.start()
    interval = cluster_interval(values, titles)
    assert tracemalloc.get_traced_memory()[1] < 50_000_000
    tracemalloc.stop()
    assert interval == cluster_interval(values, short_titles)


@pytest.mark.parametrize("num_articles", [12, 36])
def test_the_interval_covers_the_mean_where_questions_of_an_article_are_alike(num_articles: int):
    """The same questions taken as independent ones cover it far less often than they say."""
    rng = np.random.default_rng(num_articles)
    inside = {"articles": 0, "questions": 0}
    for seed in range(200):
        ease_G = rng.beta(4, 4, num_articles)
        articles = np.repeat(np.arange(num_articles), 30)
        values = (rng.random(len(articles)) < ease_G[articles]).astype(float)
        for name, groups in (("articles", articles), ("questions", np.arange(len(articles)))):
            if name == "articles" or seed < 60:
                interval = cluster_interval(values, groups, seed=seed, num=400)
                inside[name] += interval.low <= 0.5 <= interval.high
    assert 180 <= inside["articles"] <= 199
    assert inside["questions"] < 45


@pytest.mark.parametrize("num_articles", [2, 3, 4, 8])
def test_the_interval_of_few_articles_covers_the_mean_as_often_as_it_says(num_articles: int):
    rng = np.random.default_rng(num_articles)
    inside = 0
    for _ in range(600):
        ease_G, count_G = rng.beta(4, 4, num_articles), rng.integers(20, 40, num_articles)
        articles = np.repeat(np.arange(num_articles), count_G)
        low, high = cluster_interval((rng.random(len(articles)) < ease_G[articles]).astype(float), articles)
        inside += low <= 0.5 <= high
    assert 550 <= inside <= 588


def test_an_article_counts_with_all_its_questions_in_every_resample():
    """A resample of nine articles has the one of three questions, all answered, some number of times."""
    values, articles = np.array([1.0] * 3 + [0.0] * 8), np.array([0, 0, 0, *range(1, 9)])
    order = np.random.default_rng(0).permutation(11)
    interval = cluster_interval(values, articles)
    assert interval == cluster_interval(values[order], articles[order])
    assert set(interval) <= {3 * times / (9 + 2 * times) for times in range(10)}


def test_shares_of_few_articles_end_at_0_and_1():
    values, articles = np.array([1.0, 1.0, 1.0, 0.0, 0.0]), ["a", "a", "a", "b", "b"]
    low, high = cluster_interval(values, articles)
    assert low < 0 and high > 1
    assert share_interval(values, articles) == (0.0, 1.0)


@pytest.mark.parametrize("num_articles", [6, 9])
def test_the_interval_of_few_articles_is_as_wide_as_students(num_articles: int):
    values = stats.norm.ppf((np.arange(num_articles) + 0.5) / num_articles)
    interval = cluster_interval(values, np.arange(num_articles), num=20_000)
    half = stats.t.ppf(0.975, num_articles - 1) * values.std(ddof=1) / math.sqrt(num_articles)
    assert (interval.high - interval.low) / 2 == pytest.approx(half, rel=0.06)


def test_questions_of_a_single_article_count_as_independent():
    values = np.random.default_rng(2).random(30)
    assert cluster_interval(values, ["a"] * 30, seed=1) == cluster_interval(values, np.arange(30), seed=1)
    assert paired_test(values, values[::-1], ["a"] * 30) == paired_test(values, values[::-1])


@pytest.mark.parametrize("num_articles", [8, 9, 100])
@pytest.mark.parametrize("num_questions", [1, 2, 7, 3000])
def test_articles_that_agree_have_no_interval(num_questions: int, num_articles: int):
    values, articles = np.full(num_questions, 100 / 3), np.minimum(np.arange(num_questions), num_articles - 1)
    assert np.isnan([*cluster_interval(values, articles), *share_interval(values / 100, articles)]).all()
    assert np.isnan(interval_over_seeds(np.stack([values, values + 1]), articles)).all()


def test_all_right_or_all_wrong_over_any_number_of_articles_has_the_interval_of_clopper_and_pearson():
    for num_articles in (1, 2, 8, 9, 20):
        articles = np.repeat(np.arange(num_articles), 3) if num_articles > 1 else np.arange(1)
        exact = stats.binomtest(num_articles, num_articles).proportion_ci(0.95, method="exact")
        low, high = share_interval(np.ones(len(articles)), articles)
        assert (low, high) == pytest.approx((exact.low, 1.0))
        assert share_interval(np.zeros(len(articles)), articles) == pytest.approx((0.0, 1 - low))
    with pytest.raises(AssertionError):
        cluster_interval(np.empty(0), [])


def test_adjusted_ps_are_holms():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_seeds_widen_the_interval_of_articles_and_one_seed_is_that_of_articles():
    rng = np.random.default_rng(3)
    articles = np.repeat(np.arange(20), 10)
    values_Q = rng.random(200)
    alone = cluster_interval(values_Q, articles, seed=4)
    assert interval_over_seeds(values_Q[None], articles, seed=4) == alone
    assert interval_over_seeds(np.stack([values_Q] * 3), articles, seed=4) == pytest.approx(alone)
    shifted_SQ = values_Q + np.array([[-0.1], [0.0], [0.1]])
    both = interval_over_seeds(shifted_SQ, articles, seed=4)
    student = stats.t.ppf(0.975, 2) * 0.1 / math.sqrt(3)
    mean = values_Q.mean()
    assert mean - both.low == pytest.approx(math.hypot(mean - alone.low, student))
    assert both.high - mean == pytest.approx(math.hypot(alone.high - mean, student))


@pytest.mark.parametrize("num_articles", [5, 11])
def test_the_paired_test_of_articles_equals_enumeration_over_their_signs(num_articles: int):
    rng = np.random.default_rng(num_articles)
    articles = rng.integers(0, num_articles, 60)
    a, b = rng.random(60), rng.random(60)
    sums = np.array([(a - b)[articles == article].sum() for article in np.unique(articles)])
    signs = itertools.product([1, -1], repeat=len(sums))
    expected = np.mean([abs((np.array(sign) * sums).sum()) >= abs(sums.sum()) - 1e-12 for sign in signs])
    assert paired_test(a, b, articles) == pytest.approx(expected)


def test_the_paired_test_rejects_no_more_often_than_it_says_where_articles_differ_at_random():
    """Systems that are equal on average, each better on some articles: questions alone reject far too often."""
    rng = np.random.default_rng(8)
    rejections = {"articles": 0, "questions": 0}
    articles = np.repeat(np.arange(20), 30)
    for seed in range(200):
        ease_G = rng.normal(0, 0.2, 20)[articles]
        a, b = (rng.random(600) < 0.5 + ease_G / 2), (rng.random(600) < 0.5 - ease_G / 2)
        rejections["articles"] += paired_test(a, b, articles, seed, num=400) < 0.05
        rejections["questions"] += paired_test(a, b, None, seed, num=400) < 0.05
    assert rejections["articles"] <= 20
    assert rejections["questions"] > 40


@pytest.mark.parametrize(("only_a", "only_b"), [(0, 0), (1, 0), (5, 1), (3, 3), (6, 7), (30, 12), (200, 201), (9, 60)])
def test_the_paired_test_of_hits_and_misses_equals_the_exact_sign_test(only_a: int, only_b: int):
    a = np.array([1.0] * only_a + [0.0] * only_b + [1.0, 0.0] * 20)
    b = np.array([0.0] * only_a + [1.0] * only_b + [1.0, 0.0] * 20)
    expected = stats.binomtest(only_a, only_a + only_b).pvalue if only_a + only_b else 1.0
    exact = 2 ** (only_a + only_b) <= 10_000
    assert paired_test(a, b, seed=3) == pytest.approx(expected, abs=1e-12 if exact else 0.015)
    assert paired_test(a, b, seed=3) == paired_test(b, a, seed=3)


def test_the_paired_test_of_real_values_equals_enumeration_and_is_never_zero():
    rng = np.random.default_rng(7)
    a, b = rng.random(9), rng.random(9)
    statistic = abs((a - b).sum())
    signs = itertools.product([1, -1], repeat=9)
    expected = np.mean([abs((np.array(sign) * (a - b)).sum()) >= statistic - 1e-12 for sign in signs])
    assert paired_test(a, b) == pytest.approx(expected)
    assert paired_test(np.ones(500), np.zeros(500), num=99) == pytest.approx(0.01)


def slow_question_lv(queries, views, mask) -> list[float]:
    values = []
    for query, own, mask_V in zip(queries, views, mask):
        present = [v for v, keep in zip(own, mask_V) if keep]
        longest = max(np.linalg.norm(v) for v in present)
        scores = sorted(query @ v / np.linalg.norm(query) / longest for v in present)
        values.append(scores[-1] - np.mean(scores[:-1]) if len(scores) > 1 else math.nan)
    return values


def slow_pair_cosine(views, mask) -> float:
    values = []
    for own, mask_V in zip(views, mask):
        units = [v / np.linalg.norm(v) for v, keep in zip(own, mask_V) if keep]
        if len(units) > 1:
            values.append(np.mean([x @ y for x, y in itertools.combinations(units, 2)]))
    return float(np.mean(values))


@pytest.mark.parametrize("seed", range(5))
def test_local_variation_and_pair_cosine_equal_loops_over_views_that_exist(seed: int):
    rng = np.random.default_rng(seed)
    queries, views = rng.normal(size=(9, 5)), rng.normal(size=(9, 4, 5))
    mask = rng.random((9, 4)) < 0.7
    mask[:, 0] = True
    mask[0] = True
    expected_Q = slow_question_lv(queries, views, mask)
    np.testing.assert_allclose(question_lv(queries, views, mask), expected_Q, atol=1e-12)
    assert lv(queries, views, mask) == pytest.approx(np.nanmean(expected_Q))
    assert view_pair_cosine(views, mask) == pytest.approx(slow_pair_cosine(views, mask))
    assert lv(queries * 7, views * 3, mask) == pytest.approx(lv(queries, views, mask))


def test_the_best_view_of_local_variation_is_the_one_that_search_finds_whatever_the_length_of_views():
    """A cosine prefers a short view of the right direction; a search by inner products does not."""
    short, long = [1.0, 0.0], [3.0, 3.0]
    assert lv(np.array([[1.0, 0.0]]), np.array([[short, long]])) == pytest.approx((3 - 1) / np.hypot(3, 3))
    rng = np.random.default_rng(4)
    queries, views = rng.normal(size=(50, 6)), rng.normal(size=(50, 4, 6)) * rng.uniform(0.1, 9, (50, 4, 1))
    raw = np.einsum("qd,qvd->qv", queries, views)
    every = np.ones(views.shape[:2], bool)
    scores = relative_scores(queries, views, every)
    assert (scores.argmax(axis=1) == raw.argmax(axis=1)).all() and np.abs(scores).max() <= 1
    unit = views / np.linalg.norm(views, axis=-1, keepdims=True)
    cosines = np.einsum("qd,qvd->qv", queries / np.linalg.norm(queries, axis=-1, keepdims=True), unit)
    np.testing.assert_allclose(relative_scores(queries, unit, every), cosines)
    assert (cosines.argmax(axis=1) != raw.argmax(axis=1)).any()


def test_collapsed_views_show_no_variation_and_pair_cosine_one():
    rng = np.random.default_rng(1)
    views = np.repeat(rng.normal(size=(6, 1, 4)), 3, axis=1)
    assert lv(rng.normal(size=(6, 4)), views) == pytest.approx(0.0, abs=1e-12)
    assert view_pair_cosine(views) == pytest.approx(1.0)


def test_with_one_view_there_is_nothing_to_measure():
    assert lv(np.ones((2, 3)), np.ones((2, 1, 3))) is None
    assert np.isnan(question_lv(np.ones((2, 3)), np.ones((2, 1, 3)))).all()
    assert view_pair_cosine(np.ones((2, 1, 3))) is None
    assert ppl(np.empty(0, int), np.empty(0, int)) is None
    assert ppl_of_mean_entropy(np.empty(0, int), np.empty(0, int)) is None
    assert gold_answer_view_share(np.array([1]), np.array([-1])) is None


def test_views_within_the_margin_go_to_the_lowest_and_missing_views_never_win():
    scores = np.array([[0.5, 0.5009, 0.1], [0.5, 0.502, 0.1], [0.9, 0.2, 0.3], [0.1, 0.1, 0.1]])
    assert winning_views(scores).tolist() == [0, 1, 0, 0]
    mask = np.array([[False, True, True]] * 4)
    assert winning_views(scores, mask).tolist() == [1, 1, 2, 1]


def test_perplexity_counts_the_views_in_use_for_each_passage_and_averages():
    view, passage = np.array([0, 1, 2, 3, 5, 5, 7, 7]), np.array([9, 9, 9, 9, 4, 4, 6, 6])
    assert ppl(view, passage) == pytest.approx((4 + 1 + 1) / 3)
    assert ppl(np.array([0, 0, 1]), np.array([2, 2, 2])) == pytest.approx(math.exp(stats.entropy([2, 1])))
    assert ppl(np.array([0, 1]), np.array([0, 1])) == pytest.approx(1.0)


def test_the_two_readings_of_perplexity_differ_where_passages_differ_and_the_mean_of_exponents_is_larger():
    view, passage = np.array([0, 1, 2, 3, 5, 5, 7, 7]), np.array([9, 9, 9, 9, 4, 4, 6, 6])
    assert ppl_of_mean_entropy(view, passage) == pytest.approx(4 ** (1 / 3))
    assert ppl(view, passage) == pytest.approx(2.0)
    alike = np.array([0, 1, 0, 0, 1, 1]), np.array([0, 0, 0, 1, 1, 1])
    entropy = math.log(3) - 2 / 3 * math.log(2)
    assert ppl_of_mean_entropy(*alike) == pytest.approx(math.exp(entropy)) == ppl(*alike)
    assert ppl_of_mean_entropy(np.array([3, 3]), np.array([0, 0])) == pytest.approx(1.0)


def test_noise_over_collapsed_views_has_high_perplexity_and_sending_ties_to_the_lowest_view_shows_it():
    rng = np.random.default_rng(2)
    passage = np.repeat(np.arange(200), 5)
    scores = 0.7 + rng.normal(0, 1e-5, (1000, 8))
    assert ppl(scores.argmax(axis=1), passage) > 3
    assert ppl(winning_views(scores), passage) == pytest.approx(1.0)


def test_the_share_won_by_the_answers_view_leaves_questions_with_unknown_answer_view_out():
    assert gold_answer_view_share(np.array([0, 1, 2, 3]), np.array([0, 2, -1, 3])) == pytest.approx(2 / 3)
