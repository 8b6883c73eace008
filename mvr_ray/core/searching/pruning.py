"""Drop views that their siblings can replace, before an index is built.

A view p_v that is within d of the convex hull of the passage's kept views can win by |q| d at most: for weights l >= 0
that sum to 1 and r = p_v - sum_i l_i p_i, |r| <= d,

    <q, p_v> = sum_i l_i <q, p_i> + <q, r> <= max_i <q, p_i> + |q| d

So a passage's score without its dropped views is at most |q| d below the score with all of them. The distance that is
found is that of weights at hand, an upper bound of the true one whatever the solver's precision. `tolerance` is d over
the view's own norm; with 0, only copies of a kept view are dropped, and no score changes.

Shapes: N vectors, V views of one passage, D dimension.
"""

from typing import NamedTuple

import numpy as np

from mvr_ray.types import EmbeddingBlock, FloatArray

_SUM_WEIGHT = 1e3
"""How much the solver cares for weights that sum to 1, in norms of the siblings; they are scaled to it afterwards."""


class PrunedBlock(NamedTuple):
    """A block without its dropped views: how many those are, and the largest distance over norm among them."""

    block: EmbeddingBlock
    num_dropped: int
    worst: float


def prune_block(block: EmbeddingBlock, tolerance: float) -> PrunedBlock:
    """Drop what `tolerance` allows from every passage; each keeps at least one view."""
    ptr = np.asarray(block.row_ptr)
    kept_N = np.ones(len(block.vectors_ND), bool)
    worst = 0.0
    for start, stop in zip(ptr[:-1].tolist(), ptr[1:].tolist()):
        if stop - start > 1:
            kept_V, own_worst = prune_views(block.vectors_ND[start:stop].astype(np.float64), tolerance)
            kept_N[start:stop] = kept_V
            worst = max(worst, own_worst)
    counts_P = np.add.reduceat(np.r_[kept_N, False].astype(np.int64), ptr[:-1]) * (np.diff(ptr) > 0)
    row_ptr = np.r_[0, np.cumsum(counts_P)].astype(np.int64)
    rest = EmbeddingBlock(block.ids, row_ptr, block.view_numbers_N[kept_N], block.vectors_ND[kept_N])
    return PrunedBlock(rest, int((~kept_N).sum()), worst)


def prune_views(views_VD: FloatArray, tolerance: float) -> tuple[np.ndarray, float]:
    """Choose kept_V of one passage, and return the largest distance over norm of a dropped view. Views are float64.

    Those nearest to a sibling go first, of equals the one with the higher number.
    """
    limit_V = tolerance * np.linalg.norm(views_VD, axis=1)
    apart_VV = np.linalg.norm(views_VD[:, None] - views_VD[None], axis=2)
    np.fill_diagonal(apart_VV, np.inf)
    nearest_V = apart_VV.min(axis=1)
    kept_V = np.ones(len(views_VD), bool)
    if not (_span_distances(views_VD, nearest_V) <= limit_V).any():
        return kept_V, 0.0
    found_V = np.zeros(len(views_VD))
    for view in sorted(range(len(views_VD)), key=lambda view: (nearest_V[view], -view)):
        trial_V = kept_V.copy()
        trial_V[view] = False
        if not trial_V.any():
            break
        away_V = np.zeros(len(views_VD))
        for other in np.flatnonzero(~trial_V):
            away_V[other] = hull_distance(views_VD[other], views_VD[trial_V], exact=tolerance == 0)
        if (away_V <= limit_V).all():
            kept_V, found_V = trial_V, away_V
    norms_V = np.linalg.norm(views_VD, axis=1)
    return kept_V, float((found_V / np.where(norms_V > 0, norms_V, 1.0)).max())


def hull_distance(view_D: FloatArray, others_VD: FloatArray, *, exact: bool = False) -> float:
    """Bound the distance of a view from the convex hull of the others; `exact`: from the nearest of them."""
    from scipy.optimize import nnls  # half a second of imports that no other process needs

    nearest = float(np.linalg.norm(others_VD - view_D, axis=1).min())
    if exact or nearest == 0 or len(others_VD) == 1:
        return nearest
    weight = _SUM_WEIGHT * float(np.linalg.norm(others_VD, axis=1).max())
    rows = np.vstack([others_VD.T, np.full(len(others_VD), weight)])
    weights_V, _ = nnls(rows, np.r_[view_D, weight])
    total = float(weights_V.sum())
    if total <= 0:
        return nearest
    return min(nearest, float(np.linalg.norm(view_D - (weights_V / total) @ others_VD)))


def _span_distances(views_VD: FloatArray, nearest_V: FloatArray) -> FloatArray:
    """Bound the distances from below: no view is nearer to the hull of its siblings than to the space that they span,
    1 / sqrt((G^-1)_vv), G the Gram matrix. 0 where G is singular; never more than the nearest sibling's distance."""
    gram_VV = views_VD @ views_VD.T
    scale = float(np.trace(gram_VV)) / len(views_VD)
    if scale <= 0 or np.linalg.cond(gram_VV) > 1e10:
        return np.zeros(len(views_VD))
    inverse_V = np.diag(np.linalg.inv(gram_VV))
    return np.minimum(nearest_V, 0.99 / np.sqrt(np.maximum(inverse_V, np.finfo(np.float64).tiny)))
