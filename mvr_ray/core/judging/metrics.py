"""Compute metrics of rankings with intervals and tests, and measures of how views differ.

Ranking metrics return one value a question, so that intervals and tests use the same numbers. Ranks count from 0;
-1 means not among the hits. View metrics are None where they are undefined.

Shapes: Q questions, K hits, V views, P passages, D dimension.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mvr_ray.types import FloatArray, IntArray

BoolArray = NDArray[np.bool_]
Groups = Sequence[str] | Sequence[int] | NDArray[np.int64] | NDArray[np.str_]
"""The group (article) of each question."""

NDCG_CUTOFF = 10
_CONFIDENCE = 0.95
_FEW_GROUPS = 8
_NUMBERS_AT_ONCE = 1 << 20
_NEAR = 1e-12
_TIE = 1e-3
"""Difference of cosines up to which two views tie: noise decides which is larger."""


class Interval(NamedTuple):
    low: float
    high: float


IntervalFunction = Callable[[FloatArray, Groups, int, int], Interval]


def first_ranks(relevant: Sequence[Sequence[bool]] | BoolArray) -> IntArray:
    """Return the rank of each question's first relevant hit, -1 without one. Lists may differ in length. int64 [Q]."""
    if isinstance(relevant, np.ndarray) and relevant.size:
        return np.where(relevant.any(axis=1), relevant.argmax(axis=1), -1)
    ranks = (next((rank for rank, hit in enumerate(row) if hit), -1) for row in relevant)
    return np.fromiter(ranks, np.int64, len(relevant))


def hit_within(ranks_Q: IntArray, k: int) -> FloatArray:
    """Return 1.0 where a relevant hit is among the first k, else 0.0."""
    return ((ranks_Q >= 0) & (ranks_Q < k)).astype(np.float64)


def top_k_accuracy(ranks_Q: IntArray, ks: Sequence[int]) -> dict[int, float]:
    """Return the share (0..1) of questions with a relevant hit among the first k, for each k."""
    return {k: float(hit_within(ranks_Q, k).mean()) for k in ks}


def reciprocal_ranks(ranks_Q: IntArray, cutoff: int | None = None) -> FloatArray:
    """Compute 1 / (rank + 1) of the first relevant hit; 0 without one among the first `cutoff` (MS MARCO: 10)."""
    hit_Q = (ranks_Q >= 0) & (ranks_Q < (cutoff or np.iinfo(np.int64).max))
    return np.where(hit_Q, 1.0 / (np.maximum(ranks_Q, 0) + 1), 0.0)


def recall(rankings: Sequence[Sequence[str]], relevance: Sequence[Mapping[str, int]], k: int) -> FloatArray:
    """Compute the share of each question's relevant passages that are among the first k; see `ndcg`."""
    values = []
    for ids, grades in zip(rankings, relevance, strict=True):
        relevant_ids = {passage for passage, grade in grades.items() if grade > 0}
        values.append(len(relevant_ids.intersection(ids[:k])) / len(relevant_ids) if relevant_ids else 0.0)
    return np.array(values, np.float64)


def ndcg(rankings: Sequence[Sequence[str]], relevance: Sequence[Mapping[str, int]], cutoff: int) -> FloatArray:
    """Compute normalised discounted cumulative gain of each question, as trec_eval does: the gain is the grade.

    `rankings` holds passage ids, best first; `relevance` the grade of each judged one (grades below 1 gain nothing). A
    question without a relevant passage scores 0. A repeated id counts once, at its first rank.
    """
    values = []
    for ids, grades in zip(rankings, relevance, strict=True):
        gains = [max(grades.get(passage, 0), 0) for passage in dict.fromkeys(ids)]
        ideal = _discounted_gain(sorted((max(grade, 0) for grade in grades.values()), reverse=True)[:cutoff])
        values.append(_discounted_gain(gains[:cutoff]) / ideal if ideal else 0.0)
    return np.array(values, np.float64)


def cluster_interval(values_Q: FloatArray, groups_Q: Groups, seed: int = 0, num: int = 1000) -> Interval:
    """Compute the 95 % interval of the mean over questions that come in groups, such as all those of one article.

    Questions of one article share its passages and its style, so their values are not independent: groups vary, with
    all their values. Up to 8 groups: Student's interval of sum over number of values, by its linearised error. More:
    whole groups are resampled, and the quantiles are those of Hesterberg's expanded percentile interval (The American
    Statistician 69(4), 2015). The values of a single group count as independent. Same values, groups and seed, same
    interval. NaN where all groups agree: their spread says nothing about other groups.
    """
    sum_G, count_G = _group_sums(values_Q, groups_Q)
    if np.allclose(sum_G, sum_G.sum() / count_G.sum() * count_G, 1e-9, 1e-9):
        return Interval(math.nan, math.nan)
    if len(sum_G) <= _FEW_GROUPS:
        return _students_interval(sum_G, count_G)
    rng = np.random.default_rng(seed)
    means = np.empty(num)
    part = max(1, _NUMBERS_AT_ONCE // len(sum_G))
    for start in range(0, num, part):
        size = min(part, num - start)
        draws_G = rng.multinomial(len(sum_G), np.full(len(sum_G), 1 / len(sum_G)), size).astype(np.float64)
        means[start : start + size] = (draws_G @ sum_G) / (draws_G @ count_G)
    tail = _expanded_tail(len(sum_G))
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(low), float(high))


def share_interval(values_Q: FloatArray, groups_Q: Groups, seed: int = 0, num: int = 1000) -> Interval:
    """Compute `cluster_interval` of values from 0 to 1, which ends there, too, whatever Student's half width is.

    All 0 or all 1 over n groups: Clopper and Pearson's interval of n trials, whose free end is 0.025^(1/n) away.
    """
    if (share := float(np.mean(values_Q))) in (0.0, 1.0):
        num_groups = len(_group_sums(values_Q, groups_Q)[0])
        limit = ((1 - _CONFIDENCE) / 2) ** (1 / num_groups)
        return Interval(limit, 1.0) if share else Interval(0.0, 1 - limit)
    low, high = cluster_interval(values_Q, groups_Q, seed, num)
    return Interval(max(low, 0.0), min(high, 1.0))


def interval_over_seeds(
    values_SQ: FloatArray, groups_Q: Groups, seed: int = 0, num: int = 1000, of: IntervalFunction = cluster_interval
) -> Interval:
    """Compute the 95 % interval of the mean over seeds and questions; a seed is a training, measured on all questions.

    Seeds and articles are two sources of error: the distance of each end of the interval `of` the seeds' mean, and the
    half width of Student's interval over the seeds, are added as squares. One seed: the interval over articles.
    """
    values_SQ = np.atleast_2d(np.asarray(values_SQ, np.float64))
    mean_Q = values_SQ.mean(axis=0)
    interval, num_seeds = of(mean_Q, groups_Q, seed, num), len(values_SQ)
    if num_seeds == 1:
        return interval
    half = _deviate(num_seeds) * float(values_SQ.mean(axis=1).std(ddof=1)) / math.sqrt(num_seeds)
    mean = float(mean_Q.mean())
    return Interval(mean - math.hypot(mean - interval.low, half), mean + math.hypot(interval.high - mean, half))


def paired_test(
    a_Q: FloatArray, b_Q: FloatArray, groups_Q: Groups | None = None, seed: int = 0, num: int = 10_000
) -> float:
    """Compute the two-sided p of "a and b are exchangeable": permutation of paired values by sign flips.

    With `groups_Q` the values of a group (an article) are flipped together, as they are not independent; without, each
    question is flipped alone. Exact (every flip is tried) where a and b differ on few groups; else `num` random flips,
    with the observed one counted as one of them, so that p is never 0.
    """
    difference_Q = np.asarray(a_Q, np.float64) - np.asarray(b_Q, np.float64)
    difference_G = difference_Q if groups_Q is None else _group_sums(difference_Q, groups_Q)[0]
    difference_M = difference_G[np.abs(difference_G) > _NEAR]
    size = len(difference_M)
    distance = abs(difference_M.sum()) - _NEAR * np.abs(difference_M).sum()
    if size and 2**size <= num:
        flips = (np.arange(2**size)[:, None] >> np.arange(size)) & 1
        return float((np.abs((1 - 2 * flips) @ difference_M) >= distance).mean())
    if not size:
        return 1.0
    rng = np.random.default_rng(seed)
    part = max(1, _NUMBERS_AT_ONCE // size)
    num_as_far = 1
    for start in range(0, num, part):
        flips = rng.integers(0, 2, (min(part, num - start), size), dtype=np.int8)
        sums = difference_M.sum() - 2 * (flips @ difference_M)
        num_as_far += int((np.abs(sums) >= distance).sum())
    return num_as_far / (num + 1)


def holm(ps: Sequence[float]) -> list[float]:
    """Adjust the p-values of a family of tests by Holm's method (1979): with each below 0.05, the probability that any
    true hypothesis is among those rejected is below 0.05, however the tests depend on each other."""
    order = np.argsort(ps, kind="stable")
    products = np.asarray(ps, np.float64)[order] * np.arange(len(ps), 0, -1)
    results = np.empty(len(ps))
    results[order] = np.minimum(np.maximum.accumulate(products), 1.0)
    return results.tolist()


def _group_sums(values_Q: FloatArray, groups_Q: Groups) -> tuple[FloatArray, FloatArray]:
    """Return sum and number of each group's values; the values of a single group count as groups of their own."""
    values_Q = np.asarray(values_Q, np.float64)
    assert len(values_Q) == len(groups_Q), "every value has a group"
    assert len(values_Q), "an interval over no questions"
    number_of = {name: number for number, name in enumerate(sorted({*groups_Q}))}
    group_Q = np.array([number_of[name] for name in groups_Q])  # numpy would give each name the longest one's bytes
    if not group_Q.any():
        return values_Q, np.ones(len(values_Q))
    return np.bincount(group_Q, values_Q).astype(np.float64), np.bincount(group_Q).astype(np.float64)


def _deviate(size: int) -> float:
    """Return the deviate of Student's t, in standard errors, that bounds the mean of `size` values."""
    from scipy import stats

    return float(stats.t.ppf((1 + _CONFIDENCE) / 2, size - 1))


def _students_interval(sum_G: FloatArray, count_G: FloatArray) -> Interval:
    """Return the interval of sum over count by Student's t."""
    size, mean = len(sum_G), float(sum_G.sum() / count_G.sum())
    residual_G = sum_G - mean * count_G
    error = math.sqrt(size / (size - 1) * float(residual_G @ residual_G)) / float(count_G.sum())
    half = _deviate(size) * error
    return Interval(mean - half, mean + half)


def _expanded_tail(num_groups: int) -> float:
    """Return the quantile whose normal deviate is that of Student's t for `num_groups`, with a variance over n - 1."""
    from scipy import stats

    return float(stats.norm.cdf(-_deviate(num_groups) * math.sqrt(num_groups / (num_groups - 1))))


def lv(queries_QD: FloatArray, views_QVD: FloatArray, mask_QV: BoolArray | None = None) -> float | None:
    """Compute local variation (MVR, eq. 9): the mean of `question_lv` over the questions whose passage has at least two
    views; None without one."""
    lv_Q = question_lv(queries_QD, views_QVD, mask_QV)
    return None if np.isnan(lv_Q).all() else float(np.nanmean(lv_Q))


def question_lv(queries_QD: FloatArray, views_QVD: FloatArray, mask_QV: BoolArray | None = None) -> FloatArray:
    """Compute each question's local variation (MVR, eq. 9): the best view's score less the mean of the passage's other
    views. float64 [Q], NaN where the passage has fewer than two views.

    Question i is scored with the views of passage i, by `relative_scores`. Near 0: collapsed.
    """
    mask_QV = np.ones(views_QVD.shape[:2], bool) if mask_QV is None else mask_QV
    scores_QV = relative_scores(queries_QD, views_QVD, mask_QV)
    count_Q = mask_QV.sum(axis=1)
    best_Q = np.where(mask_QV, scores_QV, -np.inf).max(axis=1)
    others_Q = np.where(mask_QV, scores_QV, 0.0).sum(axis=1) - best_Q
    return np.where(count_Q > 1, best_Q - others_Q / np.maximum(count_Q - 1, 1), np.nan)


def relative_scores(queries_QD: FloatArray, views_QVD: FloatArray, mask_QV: BoolArray) -> FloatArray:
    """Divide each question's inner products with a passage's views by the question's length and that of the longest
    view: cosines for views of one length, and in the order of the search for others. `mask_QV` marks the views that
    exist. float64 [Q, V].

    MVR leaves the normalisation of eq. 9 open; this one makes models comparable.
    """
    queries_QD, views_QVD = np.asarray(queries_QD, np.float64), np.asarray(views_QVD, np.float64)
    longest_Q = np.where(mask_QV, np.linalg.norm(views_QVD, axis=-1), 0.0).max(axis=-1)
    longest_Q *= np.linalg.norm(queries_QD, axis=-1)
    return np.einsum("qd,qvd->qv", queries_QD, views_QVD) / np.where(longest_Q > 0, longest_Q, 1.0)[:, None]


def winning_views(scores_QV: FloatArray, mask_QV: BoolArray | None = None) -> IntArray:
    """Return the lowest view that ties with the best one, by `relative_scores`. int64 [Q]."""
    scores_QV = np.asarray(scores_QV, np.float64)
    if mask_QV is not None:
        scores_QV = np.where(mask_QV, scores_QV, -np.inf)
    return np.argmax(scores_QV >= scores_QV.max(axis=1, keepdims=True) - _TIE, axis=1)


def ppl(view_Q: IntArray, passage_Q: IntArray) -> float | None:
    """Compute the perplexity of view usage (MVR, eq. 10) as the mean of exponents: exp of the entropy of the winning
    views of one passage's questions, averaged over passages. 1: always one view.

    At most the number of questions a passage. Not conclusive alone: noise picks among tied, collapsed views; so take
    `view_Q` from `winning_views`, and compare `lv`.
    """
    return float(np.exp(_view_entropies(view_Q, passage_Q)).mean()) if len(view_Q) else None


def ppl_of_mean_entropy(view_Q: IntArray, passage_Q: IntArray) -> float | None:
    """Compute the perplexity of view usage (MVR, eq. 10) as the exponent of the mean: exp of the mean entropy.

    Never above `ppl` (Jensen's inequality), and equal to it where every passage has the same entropy.
    """
    return float(np.exp(_view_entropies(view_Q, passage_Q).mean())) if len(view_Q) else None


def _view_entropies(view_Q: IntArray, passage_Q: IntArray) -> FloatArray:
    """Compute the entropy in nats of the winning views of each passage's questions. float64 [P]"""
    pairs, count_X = np.unique(np.stack([passage_Q, view_Q]), axis=1, return_counts=True)
    _, row_X, count_P = np.unique(pairs[0], return_inverse=True, return_counts=True)
    total_P = np.bincount(row_X, count_X, len(count_P))
    share_X = count_X / total_P[row_X]
    return np.bincount(row_X, -share_X * np.log(share_X), len(count_P)).astype(np.float64)


def view_pair_cosine(views_PVD: FloatArray, mask_PV: BoolArray | None = None) -> float | None:
    """Average the cosine of two views of a passage over passages with at least two. Above 0.999: collapsed."""
    unit_PVD = _unit(views_PVD)
    if mask_PV is None:
        mask_PV = np.ones(unit_PVD.shape[:2], bool)
    unit_PVD = np.where(mask_PV[..., None], unit_PVD, 0.0)
    count_P = mask_PV.sum(axis=1)
    several_P = count_P > 1
    if not several_P.any():
        return None
    sum_PD = unit_PVD[several_P].sum(axis=1)
    pairs_P = np.einsum("pd,pd->p", sum_PD, sum_PD) - np.einsum("pvd,pvd->p", unit_PVD[several_P], unit_PVD[several_P])
    count_P = count_P[several_P]
    return float((pairs_P / (count_P * (count_P - 1))).mean())


def gold_answer_view_share(view_Q: IntArray, answer_view_Q: IntArray) -> float | None:
    """Return the share of questions whose answer's snippet wins among the gold passage's views; -1: view unknown.

    Ours. CAMVR's answer-view accuracy (eq. 15) is over the retrieved passages: `answer_view/top-k` of `analyze`.
    """
    known_Q = answer_view_Q >= 0
    return float((view_Q[known_Q] == answer_view_Q[known_Q]).mean()) if known_Q.any() else None


def _discounted_gain(gains: Sequence[int]) -> float:
    return sum(gain / math.log2(rank + 2) for rank, gain in enumerate(gains))


def _unit(vectors: FloatArray) -> NDArray[np.float64]:
    vectors = np.asarray(vectors, np.float64)
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(norms > 0, norms, 1.0)
