"""Drop views that a passage's other views can replace, before an index is built.

A view p_v that is within d of the convex hull of the passage's kept views can win by |q| d at most: for weights l >= 0
that sum to 1 and r = p_v - sum_i l_i p_i, |r| <= d,

    <q, p_v> = sum_i l_i <q, p_i> + <q, r> <= max_i <q, p_i> + |q| d

So a passage's score without its dropped views is at most |q| d below the score with all of them. The
computed distance is that of explicit weights, an upper bound of the true one at any solver precision. `tolerance` is d
over the view's norm; with 0, only copies of a kept view are dropped, and no score changes.

Shapes: N vectors, V views of one passage, D dimension.
"""

from typing import NamedTuple

import numpy as np

from mvr_ray.types import EmbeddingBlock, FloatArray

_SUM_WEIGHT = 1e3
"""The solver's penalty on weights that do not sum to 1, in norms of the other views; scaled afterwards."""


class PrunedBlock(NamedTuple):
    """A block without its dropped views, their number, and the largest distance over norm among them."""

    block: EmbeddingBlock
    num_dropped: int
    worst: float


def prune_block(block: EmbeddingBlock, tolerance: float) -> PrunedBlock:
    """Drop views within `tolerance` from every passage; each keeps at least one view."""
    ptr = np.asarray(block.row_ptr)
    keep_N = np.ones(len(block.vectors_ND), bool)
    max_distance = 0.0
    for start, stop in zip(ptr[:-1].tolist(), ptr[1:].tolist()):
        if stop - start > 1:
            keep_V, view_distance = prune_views(block.vectors_ND[start:stop].astype(np.float64), tolerance)
            keep_N[start:stop] = keep_V
            max_distance = max(max_distance, view_distance)
    counts_P = np.add.reduceat(np.r_[keep_N, False].astype(np.int64), ptr[:-1]) * (np.diff(ptr) > 0)
    row_ptr = np.r_[0, np.cumsum(counts_P)].astype(np.int64)
    new_block = EmbeddingBlock(block.ids, row_ptr, block.view_numbers_N[keep_N], block.vectors_ND[keep_N])
    return PrunedBlock(new_block, int((~keep_N).sum()), max_distance)


def prune_views(views_VD: FloatArray, tolerance: float) -> tuple[np.ndarray, float]:
    """Choose the views to keep of one passage, with the largest distance over norm of a dropped view. Views are
    float64.

    Views nearest to another view are dropped first, on ties the higher number.
    """
    norm_V = np.linalg.norm(views_VD, axis=1)
    limit_V = tolerance * norm_V
    distance_VV = np.linalg.norm(views_VD[:, None] - views_VD[None], axis=2)
    np.fill_diagonal(distance_VV, np.inf)
    nearest_V = distance_VV.min(axis=1)
    keep_V = np.ones(len(views_VD), bool)
    if not (_span_distances(views_VD, nearest_V) <= limit_V).any():
        return keep_V, 0.0
    distance_V = np.zeros(len(views_VD))
    for view in sorted(range(len(views_VD)), key=lambda view: (nearest_V[view], -view)):
        trial_keep_V = keep_V.copy()
        trial_keep_V[view] = False
        if not trial_keep_V.any():
            break
        trial_distance_V = np.zeros(len(views_VD))
        for other in np.flatnonzero(~trial_keep_V):
            trial_distance_V[other] = hull_distance(views_VD[other], views_VD[trial_keep_V], exact=tolerance == 0)
        if (trial_distance_V <= limit_V).all():
            keep_V, distance_V = trial_keep_V, trial_distance_V
    return keep_V, float((distance_V / np.where(norm_V > 0, norm_V, 1.0)).max())


def hull_distance(view_D: FloatArray, others_VD: FloatArray, *, exact: bool = False) -> float:
    """Bound the distance of a view from the convex hull of the others; `exact`: from the nearest of them."""
    from scipy.optimize import nnls  # takes half a second; only pruning needs it

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
    """Bound the distances from below: no view is nearer to the hull of the other views than to their span,
    1 / sqrt((G^-1)_vv), G the Gram matrix. 0 where G is singular; never more than the nearest view's distance."""
    gram_VV = views_VD @ views_VD.T
    scale = float(np.trace(gram_VV)) / len(views_VD)
    if scale <= 0 or np.linalg.cond(gram_VV) > 1e10:
        return np.zeros(len(views_VD))
    inverse_V = np.diag(np.linalg.inv(gram_VV))
    return np.minimum(nearest_V, 0.99 / np.sqrt(np.maximum(inverse_V, np.finfo(np.float64).tiny)))
