"""Two systems on the same questions: the difference, its interval and whether it could be chance.

    value of a question    1 where an answer-bearing (or gold) passage stands among the first k hits, else 0
    difference             mean over seeds and questions of value(better) - value(than), in points
    interval               articles and seeds are resampled together (`core.metrics.interval_over_seeds`)
    paired test            signs of whole articles are flipped, values being means over seeds
    t-tests                over seeds alone, unpaired as in CAMVR table 6, and paired

Shapes: S seeds, Q questions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from mvr_ray.core.metrics import Groups, found_within, interval_over_seeds, paired_test
from mvr_ray.types import FloatArray


class Difference(NamedTuple):
    """In points. `p` is that of the paired test over articles; those over seeds are nan where there is one seed."""

    points: float
    low: float
    high: float
    p: float
    unpaired_t: float
    paired_t: float
    seeds: int
    questions: int


def hits_within(ranks: Sequence[int], k: int) -> FloatArray:
    """1.0 for a rank (from 0, -1: not found) among the first k. float64 [Q]."""
    return found_within(np.asarray(ranks, np.int64), k)


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
        float(stats.ttest_ind(a_S, b_S).pvalue) if several else float("nan"),
        float(stats.ttest_rel(a_S, b_S).pvalue) if several else float("nan"),
        seeds,
        len(articles_Q),
    )
