"""Move stored vectors by labels (AOpt, Future Internet 2023), in closed forms without autograd.

A vector x (a view, or a query) has partners y (queries, or views), some positive. The ratio loss, eqs. 11 and 13, is

    loss(x) = -log( sum_pos <x, y> / sum_all <x, y> ) = -log( <x, A> / <x, B> ),   A = sum_pos y,  B = sum_all y

so its gradient is -A / <x, A> + B / <x, B>, and a step (eq. 14) is x - eta * gradient. It is orthogonal to x: a norm
only grows. A and B of all vectors are two sparse matrix products, additive over shards (`LabelSums`).

The linear forms move a vector once, by the means of its positive and of its negative partners:

    rocchio    eq. 7    q' = alpha q + beta mean_pos(p) + gamma mean_neg(p)    (the paper writes -gamma with gamma > 0)
    linear     eq. 9    p' = alpha p + beta mean_pos(q) + gamma mean_neg(q)

They lengthen the moved vectors, and a longer vector scores higher with every question. `keep_length` restores the
lengths.

Each form is one function for both sides, passages and queries; hybrid runs one side after the other.

Sums and results are float64. `single` keeps both in float32, and reads partners as 16-bit integers, in a small part of
the time by the compiled loop (`native_step`): terms are then added one by one in the order of the labels, on any number
of threads, so sums are the same bytes everywhere. Their error is at most sum max|y| / 65534 + (n + 1) 2^-24 sum |y| for
n partners, times eta in a step of size eta: rounding the gradient does not change the size of small steps. Without the
loop, where the package was built without a C compiler, `single` is float64.

Shapes: N vectors to move, Q partners, D dimension, M vectors that moved.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from mvr_ray.core.refining import native_step
from mvr_ray.core.refining.pseudo_labels import LabelMatrices
from mvr_ray.types import FloatArray, IntArray

_ROWS_AT_ONCE = 16_384
_PAIRS_AT_ONCE = 65_536


class LabelSums(NamedTuple):
    """The sums over a vector's partners in the ratio loss; additive over disjoint sets of partners (float64).

    positive_ND, total_ND    sums of positive, and of all, partner vectors
    num_positive_N, num_negative_N    their numbers
    """

    positive_ND: FloatArray
    total_ND: FloatArray
    num_positive_N: IntArray
    num_negative_N: IntArray

    def plus(self, other: "LabelSums") -> "LabelSums":
        return LabelSums._make(own + more for own, more in zip(self, other))


class StepResult(NamedTuple):
    """The result of one step. `vectors_MD` replace vectors `moved_M` (ascending); float32, or float64 as the input.

    loss                 mean loss of the moved vectors before the step, nan where none moved or the form has no loss
    num_outside_domain   labelled both ways, but a sum of scores was at or below the guard: not moved
    num_no_positive      labelled, never positively: not moved
    num_no_negative      labelled, never negatively: not moved (except by the linear form)
    """

    moved_M: IntArray
    vectors_MD: FloatArray
    loss: float
    num_outside_domain: int
    num_no_positive: int
    num_no_negative: int

    @property
    def num_moved(self) -> int:
        return len(self.moved_M)

    def keep_length(self, vectors_ND: FloatArray) -> "StepResult":
        """Scale every moved vector to its length in `vectors_ND`; restore one moved to zero, which has no direction."""
        before_MD = vectors_ND[self.moved_M].astype(np.float64)
        after_MD = self.vectors_MD.astype(np.float64)
        length_M = np.sqrt(np.einsum("md,md->m", after_MD, after_MD))
        scale_M = np.sqrt(np.einsum("md,md->m", before_MD, before_MD)) / np.where(length_M > 0, length_M, 1.0)
        scaled_MD = np.where(length_M[:, None] > 0, after_MD * scale_M[:, None], before_MD)
        return self._replace(vectors_MD=scaled_MD.astype(self.vectors_MD.dtype))


def passage_step(
    views_ND: FloatArray,
    queries_QD: FloatArray,
    labels: LabelMatrices,
    *,
    step_size: float,
    guard: float = 1e-3,
    single: bool = False,
) -> StepResult:
    """Run the passage-centric step, eqs. 13 and 14, on all views at once.

    For the query-centric step, down eq. 11, pass queries, views and `labels.transpose()`. `single`: in float32, where
    the package was built with a compiler.
    """
    run_step = native_step.step if single and native_step.library() else _double_step
    counts = _row_counts(labels.positive_NQ), _row_counts(labels.negative_NQ)
    rows_M = _labelled_both_ways(*counts)
    return _ratio_result(rows_M, run_step(views_ND, queries_QD, labels, rows_M, step_size), guard, *counts)


def label_sums(partners_QD: FloatArray, labels: LabelMatrices) -> LabelSums:
    """Compute A and B of every row of the label matrices. Sum them over all shards before a step."""
    partners_QD = partners_QD.astype(np.float64, copy=False)
    positive_ND = labels.positive_NQ @ partners_QD
    total_ND = positive_ND + labels.negative_NQ @ partners_QD
    return LabelSums(positive_ND, total_ND, _row_counts(labels.positive_NQ), _row_counts(labels.negative_NQ))


def ratio_step(vectors_ND: FloatArray, sums: LabelSums, *, step_size: float, guard: float = 1e-3) -> StepResult:
    """Run one step down the ratio loss from its sums."""
    rows_M = _labelled_both_ways(sums.num_positive_N, sums.num_negative_N)
    step = _descend(vectors_ND[rows_M], sums.positive_ND[rows_M], sums.total_ND[rows_M], step_size)
    return _ratio_result(rows_M, step, guard, sums.num_positive_N, sums.num_negative_N)


def softmax_step(
    vectors_ND: FloatArray,
    partners_QD: FloatArray,
    labels: LabelMatrices,
    *,
    step_size: float,
    temperature: float = 1.0,
) -> StepResult:
    """Run one step down multi-positive InfoNCE, -log( sum_pos exp(s/t) / sum_all exp(s/t) ), which has no domain.

    Its gradient is (sum_all a y - sum_pos b y) / t with a the softmax over all partners and b over the positive ones.
    For the query side pass `labels.transpose()`.
    """
    counts = _row_counts(labels.positive_NQ), _row_counts(labels.negative_NQ)
    rows_M = _labelled_both_ways(*counts)
    positive_MQ, negative_MQ = labels.rows(rows_M)
    x_MD = vectors_ND[rows_M].astype(np.float64)
    y_QD = partners_QD.astype(np.float64)
    positive = _log_terms(x_MD, y_QD, positive_MQ, temperature)
    negative = _log_terms(x_MD, y_QD, negative_MQ, temperature)
    log_positive_M = _logsumexp_rows(positive, positive_MQ.indptr)
    log_total_M = np.logaddexp(log_positive_M, _logsumexp_rows(negative, negative_MQ.indptr))
    to_positive_MQ = _shares(positive_MQ, positive, log_positive_M)
    to_total_MQ = _shares(positive_MQ, positive, log_total_M) + _shares(negative_MQ, negative, log_total_M)
    x_MD += step_size / temperature * ((to_positive_MQ - to_total_MQ) @ y_QD)
    return _result(rows_M, x_MD.astype(_result_type(vectors_ND)), log_total_M - log_positive_M, *counts)


def linear_step(
    vectors_ND: FloatArray,
    partners_QD: FloatArray,
    labels: LabelMatrices,
    *,
    alpha: float = 1.0,
    beta: float = 0.6,
    gamma: float = -0.1,
) -> StepResult:
    """Move passages by the linear form, eq. 9: alpha x + beta mean(positives) + gamma mean(negatives).

    For Rocchio's form, eq. 7, pass queries, views and `labels.transpose()`. The mean of no vectors is zero. A vector
    without a positive does not move: nearly every retrieved passage is a negative of some question, so moving those
    would dirty the whole index.
    """
    rows_M = np.flatnonzero(_row_counts(labels.positive_NQ) + _row_counts(labels.negative_NQ))
    sums = label_sums(partners_QD, labels.rows(rows_M))
    step = linear_combination(vectors_ND[rows_M], sums, alpha=alpha, beta=beta, gamma=gamma)
    return step._replace(moved_M=rows_M[step.moved_M])


def linear_combination(
    vectors_ND: FloatArray, sums: LabelSums, *, alpha: float, beta: float, gamma: float
) -> StepResult:
    """Move vectors by the linear form (eqs. 7 and 9) from sums, such as those of queries over several shards."""
    num_positive_N, num_negative_N = sums.num_positive_N, sums.num_negative_N
    rows_M = np.flatnonzero(num_positive_N)
    positive_MD, negative_MD = sums.positive_ND[rows_M], sums.total_ND[rows_M] - sums.positive_ND[rows_M]
    x_MD = alpha * vectors_ND[rows_M].astype(np.float64)
    x_MD += beta * positive_MD / num_positive_N[rows_M, None]
    x_MD += gamma * negative_MD / np.maximum(num_negative_N[rows_M, None], 1)
    return _result(rows_M, x_MD.astype(_result_type(vectors_ND)), np.zeros(0), num_positive_N, num_negative_N)


def _descend(
    vectors_MD: FloatArray, positive_MD: FloatArray, total_MD: FloatArray, step_size: float
) -> native_step.StepVectors:
    """Compute eq. 14 in float64 from the sums A and B: x + eta (A / <x, A> - B / <x, B>)."""
    x_MD = vectors_MD.astype(np.float64)
    positive_M1, total_M1 = (np.einsum("md,md->m", x_MD, sum_MD)[:, None] for sum_MD in (positive_MD, total_MD))
    with np.errstate(all="ignore"):  # outside the loss's domain
        x_MD += step_size * (positive_MD / positive_M1 - total_MD / total_M1)
    return native_step.StepVectors(x_MD.astype(_result_type(vectors_MD)), np.hstack([positive_M1, total_M1]))


def _double_step(
    vectors_ND: FloatArray, partners_QD: FloatArray, labels: LabelMatrices, rows_M: IntArray, step_size: float
) -> native_step.StepVectors:
    """Run `native_step.step` in float64, in batches of vectors, which bounds memory."""
    partners_QD = partners_QD.astype(np.float64)
    parts = []
    for start in range(0, max(len(rows_M), 1), _ROWS_AT_ONCE):
        rows = rows_M[start : start + _ROWS_AT_ONCE]
        sums = label_sums(partners_QD, labels.rows(rows))
        parts.append(_descend(vectors_ND[rows], sums.positive_ND, sums.total_ND, step_size))
    return native_step.StepVectors(*map(np.concatenate, zip(*parts)))


def _ratio_result(
    rows_M: IntArray, step: native_step.StepVectors, guard: float, num_positive_N: IntArray, num_negative_N: IntArray
) -> StepResult:
    """Drop the vectors outside the ratio loss's domain."""
    inside_M = ((step.scores_M2 > guard) & (step.scores_M2 < np.inf)).all(axis=1)
    losses_M = np.diff(np.log(step.scores_M2[inside_M].astype(np.float64)), axis=1)
    moved_MD = step.moved_MD if inside_M.all() else step.moved_MD[inside_M]
    result = _result(rows_M[inside_M], moved_MD, losses_M, num_positive_N, num_negative_N)
    return result._replace(num_outside_domain=int((~inside_M).sum()))


def _result(
    moved_M: IntArray, vectors_MD: FloatArray, losses_M: FloatArray, num_positive_N: IntArray, num_negative_N: IntArray
) -> StepResult:
    """Average the losses of the vectors that moved, none where the form has no loss, and count the others by label."""
    positive_N, negative_N = num_positive_N > 0, num_negative_N > 0
    return StepResult(
        moved_M,
        vectors_MD,
        loss=float(losses_M.mean()) if len(losses_M) else float("nan"),
        num_outside_domain=0,
        num_no_positive=int((negative_N & ~positive_N).sum()),
        num_no_negative=int((positive_N & ~negative_N).sum()),
    )


def _labelled_both_ways(num_positive_N: IntArray, num_negative_N: IntArray) -> IntArray:
    return np.flatnonzero((num_positive_N > 0) & (num_negative_N > 0))


def _row_counts(matrix: csr_array) -> IntArray:
    return np.diff(matrix.indptr).astype(np.int64)


def _result_type(vectors_ND: FloatArray) -> type[np.floating]:
    return np.float64 if vectors_ND.dtype == np.float64 else np.float32


def _log_terms(x_MD: FloatArray, y_QD: FloatArray, labels_MQ: csr_array, temperature: float) -> NDArray[np.float64]:
    """Compute log(weight) + <x, y> / temperature of every label, in matrix order."""
    row_L = np.repeat(np.arange(len(x_MD)), np.diff(labels_MQ.indptr))
    terms_L = np.log(labels_MQ.data)
    for start in range(0, len(row_L), _PAIRS_AT_ONCE):
        part = slice(start, start + _PAIRS_AT_ONCE)
        scores = np.einsum("ld,ld->l", x_MD[row_L[part]], y_QD[labels_MQ.indices[part]])
        terms_L[part] += scores / temperature
    return terms_L


def _logsumexp_rows(terms_L: FloatArray, indptr: IntArray) -> FloatArray:
    """Compute log(sum(exp)) of each matrix row; no row is empty."""
    if len(indptr) == 1:
        return np.empty(0)
    top_M = np.maximum.reduceat(terms_L, indptr[:-1])
    shifted_L = np.exp(terms_L - np.repeat(top_M, np.diff(indptr)))
    return top_M + np.log(np.add.reduceat(shifted_L, indptr[:-1]))


def _shares(labels_MQ: csr_array, terms_L: FloatArray, log_total_M: FloatArray) -> csr_array:
    """Compute exp(term) / total of every label, in the places of the labels."""
    shares_L = np.exp(terms_L - np.repeat(log_total_M, np.diff(labels_MQ.indptr)))
    return csr_array((shares_L, labels_MQ.indices, labels_MQ.indptr), shape=labels_MQ.shape)
