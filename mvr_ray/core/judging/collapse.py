"""Raise the collapse alarm when the views of a passage have become one vector.

Viewers that share a position can converge to equal vectors from any start; the index then stores V copies of one view.
docs/math.md explains the numbers.

Shapes: P passages, V views per passage, D dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mvr_ray.core.judging import metrics
from mvr_ray.types import FloatArray

MAX_COSINE = 0.999
MIN_LV = 0.001
MAX_WIN_SHARE, MIN_WINS = 0.98, 1000


@dataclass(frozen=True)
class Collapse:
    """`mean_pair_cosine` and `lv` are None where no passage has two views; `lv` also for a single passage."""

    mean_pair_cosine: float | None
    lv: float | None
    is_collapsed: bool
    reason: str


def collapse_report(views_PVD: FloatArray, mask_PV: np.ndarray) -> Collapse:
    """Compare the views of each passage: mean pair cosine above 0.999, or local variation below 0.001, is collapse.

    The query of each passage in `metrics.lv` is the mean view of the next one.
    """
    cosine = metrics.view_pair_cosine(views_PVD, mask_PV)
    means_PD = (views_PVD * mask_PV[..., None]).sum(1) / np.maximum(mask_PV.sum(1, keepdims=True), 1)
    # A single passage's query would be its own mean, to which two views are always equally near.
    lv = metrics.lv(np.roll(means_PD, -1, axis=0), views_PVD, mask_PV) if len(views_PVD) > 1 else None
    if cosine is None:
        return Collapse(None, None, False, f"none of {len(views_PVD)} passages has two views to compare")
    several = int((mask_PV.sum(1) > 1).sum())
    variation = "" if lv is None else f" and local variation is {lv:.4f}"
    what = f"over {several} passages, two views of one have mean cosine {cosine:.4f}{variation}"
    if cosine > MAX_COSINE or (lv is not None and lv < MIN_LV):
        return Collapse(cosine, lv, True, f"{what}: the views are one vector; see docs/math.md, Collapse")
    return Collapse(cosine, lv, False, what)


def dominant_view(wins_V: Sequence[int]) -> int | None:
    """Return the view that is the best of its passage for more than 98 % of the questions, so that passages are read by
    one vector; None for a single view, and below a thousand questions."""
    num_wins = sum(wins_V)
    if len(wins_V) < 2 or num_wins < MIN_WINS or max(wins_V) <= MAX_WIN_SHARE * num_wins:
        return None
    return int(np.argmax(wins_V))
