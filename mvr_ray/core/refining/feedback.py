"""Build feedback views: extra views of a passage from the questions that it answered, beside its own views.

    view of a cluster C of the passage's positive questions     w |p| m / |m|,     m = sum_C q

with w below 1, |p| the mean norm of the passage's own views, and at most `clusters` clusters a passage, by spherical
k-means: each question joins the centre of largest cosine, each centre becomes the direction of its questions' sum.

The same vectors give the same bytes, for any order of the questions and any other content of the shard: nothing is
random, questions are sorted by their bytes before summation, sums are in float64, and ties go to the first. Centres
start by farthest-first traversal (Gonzalez, Theoretical Computer Science 38, 1985): the question farthest from the
direction of all, then the one farthest from the centres so far.

Shapes: P passages, N vectors, Q questions, A distinct questions of the labels, F feedback views, X pairs of a passage
and a question, C centres, D dimension.
"""

from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array

from mvr_ray.core.refining.pseudo_labels import Labels
from mvr_ray.core.searching.exact import distinct
from mvr_ray.types import FloatArray, IntArray

SAME_COSINE = 1 - 1e-6
"""Questions above this cosine, within a thousandth of their length, count as equal; float32 rounding is far smaller."""
MAX_ROUNDS = 20
_CANCEL_SHARE = 1e-6
_ROWS_AT_ONCE = 16_384


class FeedbackViews(NamedTuple):
    """Extra views of the passages that have positive questions.

    passage_F      passage numbers, ascending; a passage with several views is repeated, the view of the most questions
                   first
    vectors_FD     float32, weight x the passage's norm x the unit mean of the cluster's questions
    num_cancelled  clusters whose questions cancel out, so that they have no direction and no view
    """

    passage_F: IntArray
    vectors_FD: FloatArray
    num_cancelled: int


def feedback_views(
    queries_QD: FloatArray,
    labels: Labels,
    norms_P: FloatArray,
    *,
    weight: float = 0.8,
    clusters: int = 1,
    share_Q: FloatArray | None = None,
    offset_PD: FloatArray | None = None,
) -> FeedbackViews:
    """Build at most `clusters` extra views for every passage with a positive label; its own views do not change.

    `norms_P` is the norm of each passage's own views (see `own_norms`); a weight below 1 keeps new views shorter than
    them. Each question counts once a passage, with weight `share_Q` in the mean. `offset_PD` is subtracted from the
    mean of each of the passage's clusters.
    """
    positive = labels.take(labels.positive_L)
    pair_X = distinct(positive.passage_L * max(len(queries_QD), 1) + positive.question_L)
    passage_X, question_X = np.divmod(pair_X, max(len(queries_QD), 1))
    questions_A, column_X = np.unique(question_X, return_inverse=True)
    order_A = _by_bytes(queries_QD[questions_A])
    vectors_AD = queries_QD[questions_A[order_A]].astype(np.float64)
    column_X = np.argsort(order_A)[column_X]

    length_A = np.linalg.norm(vectors_AD, axis=1)
    cluster_X = np.zeros(len(pair_X), np.int64)
    if clusters > 1 and len(pair_X):
        unit_AD = vectors_AD / np.maximum(length_A, np.finfo(np.float64).tiny)[:, None]
        starts = np.flatnonzero(np.diff(passage_X, prepend=-1))
        for own_X in np.split(np.arange(len(pair_X)), starts[1:]):
            cluster_X[own_X] = spherical_clusters(unit_AD[column_X[own_X]], clusters)

    view_F, row_X = np.unique(passage_X * clusters + cluster_X, return_inverse=True)
    passage_F = view_F // clusters
    share_X = np.ones(len(pair_X)) if share_Q is None else share_Q[question_X].astype(np.float64)
    shares_FA = csr_array((share_X, (row_X, column_X)), shape=(len(view_F), len(questions_A)))
    shares_FA.sum_duplicates()  # sorts each row's questions
    total_F = np.bincount(row_X, share_X, len(view_F))
    mean_FD = (shares_FA @ vectors_AD) / total_F[:, None]
    if offset_PD is not None:
        mean_FD -= offset_PD[passage_F]
    length_F = np.linalg.norm(mean_FD, axis=1)
    has_direction_F = length_F > _CANCEL_SHARE * (shares_FA @ length_A) / total_F
    scale_F = weight * norms_P[passage_F[has_direction_F]] / length_F[has_direction_F]
    vectors_FD = (mean_FD[has_direction_F] * scale_F[:, None]).astype(np.float32)
    return FeedbackViews(passage_F[has_direction_F], vectors_FD, int((~has_direction_F).sum()))


def spherical_clusters(unit_ND: FloatArray, max_clusters: int) -> IntArray:
    """Cluster unit vectors: cluster 0 is the largest, ties in order of bytes. int64 [N], at most `max_clusters`
    clusters.

    There are fewer where there are fewer distinct vectors (SAME_COSINE), or where a centre loses all its vectors.
    """
    order_N = _by_bytes(unit_ND)
    sorted_ND = unit_ND[order_N].astype(np.float64)
    centres_CD = _farthest_vectors(sorted_ND, max_clusters)
    group_N = np.zeros(len(sorted_ND), np.int64)
    for _ in range(MAX_ROUNDS if len(centres_CD) > 1 else 0):
        previous_N, group_N = group_N, _cosines(sorted_ND, centres_CD).argmax(axis=1)
        if np.array_equal(previous_N, group_N):
            break
        for cluster in distinct(group_N):
            sum_D = sorted_ND[group_N == cluster].sum(axis=0)
            length = float(np.linalg.norm(sum_D))
            if length > _CANCEL_SHARE:
                centres_CD[cluster] = sum_D / length
    _, first_C, inverse_N, count_C = np.unique(group_N, return_index=True, return_inverse=True, return_counts=True)
    number_C = np.empty(len(first_C), np.int64)
    number_C[np.lexsort((first_C, -count_C))] = np.arange(len(first_C))
    cluster_N = np.empty(len(unit_ND), np.int64)
    cluster_N[order_N] = number_C[inverse_N]
    return cluster_N


def own_norms(vectors_ND: FloatArray, row_ptr: IntArray, view_numbers_N: IntArray, num_views: int) -> FloatArray:
    """Average the norms of each passage's own views, whose numbers are below `num_views`. float64 [P]."""
    own_N = view_numbers_N < num_views
    passage_N = np.repeat(np.arange(len(row_ptr) - 1), np.diff(row_ptr))[own_N]
    parts = (vectors_ND[start : start + _ROWS_AT_ONCE] for start in range(0, len(vectors_ND), _ROWS_AT_ONCE))
    norms = (np.linalg.norm(part_ND.astype(np.float64), axis=1) for part_ND in parts)
    norm_N = np.concatenate([np.empty(0), *norms])[own_N]
    count_P = np.bincount(passage_N, minlength=len(row_ptr) - 1)
    return np.bincount(passage_N, norm_N, len(row_ptr) - 1) / np.maximum(count_P, 1)


def _farthest_vectors(sorted_ND: FloatArray, max_vectors: int) -> FloatArray:
    """Copy at most `max_vectors` distinct vectors, each farthest from those before it."""
    nearest_N = _cosines(sorted_ND, sorted_ND.sum(axis=0)[None])[:, 0]
    rows: list[int] = []
    while len(rows) < max_vectors:
        farthest = int(nearest_N.argmin())
        if rows and nearest_N[farthest] > SAME_COSINE:
            break
        cosine_N = _cosines(sorted_ND, sorted_ND[[farthest]])[:, 0]
        nearest_N = np.maximum(nearest_N, cosine_N) if rows else cosine_N
        rows.append(farthest)
    return sorted_ND[rows]


def _cosines(unit_ND: FloatArray, centres_CD: FloatArray) -> FloatArray:
    """Multiply every vector with every centre separately: a matrix product rounds by its shape and threads."""
    return np.einsum("nd,cd->nc", unit_ND, centres_CD)


def _by_bytes(vectors_ND: FloatArray) -> IntArray:
    """Sort the rows by their bytes, independently of their input order."""
    rows = [row.tobytes() for row in np.ascontiguousarray(vectors_ND)]
    return np.array(sorted(range(len(rows)), key=rows.__getitem__), np.int64)
