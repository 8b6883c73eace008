"""Two systems on the same questions: the difference, its interval and whether it could be chance.

    value of a question    1 where an answer-bearing (or gold) passage stands among the first k hits, else 0
    difference             mean over seeds and questions of value(better) - value(than), in points
    interval               articles resampled, the spread over seeds added (`core.judging.metrics.interval_over_seeds`)
    paired test            signs of whole articles are flipped, values being means over seeds
    t-tests                over seeds alone, unpaired as in CAMVR table 6, and paired

Shapes: S seeds, Q questions.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from mvr_ray.core.judging.metrics import Groups, hit_within, interval_over_seeds, paired_test
from mvr_ray.store.formats.question_ranks import QuestionRanks
from mvr_ray.types import FloatArray

_SAME = 1e-9
"""Seeds that differ by less have no spread for a t-test."""


class Difference(NamedTuple):
    """In points. `p` is that of the paired test over articles; those of the t-tests are nan where there is one seed, or
    where seeds do not differ."""

    points: float
    low: float
    high: float
    p: float
    unpaired_t: float
    paired_t: float
    seeds: int
    questions: int


class Values(NamedTuple):
    """values_SQ of the questions that a metric can be asked of, their ids and articles."""

    values_SQ: FloatArray
    ids_Q: list[str]
    articles_Q: list[str]


def values_of(parts: Sequence[QuestionRanks], metric: str) -> Values | None:
    """Every question's value of `answer/top-K` or `gold/top-K`, a row for each part (seed); None for other metrics.

    The parts rank the same questions.
    """
    kind, _, cutoff = metric.partition("/top-")
    if kind not in ("answer", "gold") or not cutoff.isdigit():
        return None
    first = parts[0]
    ranks_SQ = [part.answer_ranks if kind == "answer" else part.gold_ranks for part in parts]
    judged = [at for at, rank in enumerate(ranks_SQ[0]) if rank is not None]
    values_SQ = np.array([hits_within([ranks_Q[at] for at in judged], int(cutoff)) for ranks_Q in ranks_SQ])
    return Values(values_SQ, [first.question_ids[at] for at in judged], [first.articles[at] for at in judged])


def hits_within(ranks: Sequence[int | None], k: int) -> FloatArray:
    """1.0 for a rank (from 0, -1: not found) among the first k. float64 [Q]."""
    return hit_within(np.asarray(ranks, np.int64), k)


def difference(better_SQ: Sequence[FloatArray], than_SQ: Sequence[FloatArray], articles_Q: Groups) -> Difference:
    """`better` minus `than`, seed by seed. A system of one seed stands beside every seed of the other."""
    seeds = max(len(better_SQ), len(than_SQ))
    better, than = (np.broadcast_to(np.asarray(one), (seeds, len(articles_Q))) for one in (better_SQ, than_SQ))
    apart_SQ = 100 * (better - than)
    interval = interval_over_seeds(apart_SQ, articles_Q)
    a_S, b_S = better.mean(axis=1), than.mean(axis=1)
    several = len(better_SQ) > 1 and len(than_SQ) > 1
    return Difference(
        float(apart_SQ.mean()),
        interval.low,
        interval.high,
        paired_test(better.mean(axis=0), than.mean(axis=0), articles_Q),
        float(stats.ttest_ind(a_S, b_S).pvalue) if several and max(np.ptp(a_S), np.ptp(b_S)) > _SAME else math.nan,
        float(stats.ttest_rel(a_S, b_S).pvalue) if several and np.ptp(a_S - b_S) > _SAME else math.nan,
        seeds,
        len(articles_Q),
    )


def change(found: Difference) -> str:
    """Points with their interval, and the p of the paired test."""
    return f"{found.points:+.1f} ({found.low:+.1f} to {found.high:+.1f}), {found.p:.2g}"
