"""Closed-form steps against automatic and numerical differentiation; the domain; worked examples."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mvr_ray.core.refining import aopt, native_step
from mvr_ray.core.refining.aopt import (
    LabelSums,
    label_sums,
    linear_combination,
    linear_step,
    passage_step,
    ratio_step,
    softmax_step,
)
from mvr_ray.core.refining.pseudo_labels import LabelMatrices, label_matrices
from mvr_ray.core.searching import native


def matrices(signs_NQ: np.ndarray) -> LabelMatrices:
    """Labels from a table of +1, -1 and 0."""
    slot, question = np.nonzero(signs_NQ)
    return label_matrices(slot, question, signs_NQ[slot, question] > 0, *signs_NQ.shape)


def ratio_loss(x_D: torch.Tensor, others_QD: torch.Tensor, signs_Q: np.ndarray) -> torch.Tensor:
    scores_Q = others_QD @ x_D
    return -torch.log(scores_Q[signs_Q > 0].sum() / scores_Q[signs_Q != 0].sum())


def softmax_loss(x_D: torch.Tensor, others_QD: torch.Tensor, signs_Q: np.ndarray) -> torch.Tensor:
    scores_Q = (others_QD @ x_D) / 0.7
    return torch.logsumexp(scores_Q[signs_Q != 0], 0) - torch.logsumexp(scores_Q[signs_Q > 0], 0)


def by_autograd(loss, vectors_ND: np.ndarray, others_QD: np.ndarray, signs_NQ: np.ndarray, step_size: float):
    """Moved vectors and mean loss by torch, one vector at a time, of those labelled both ways."""
    new_vectors, losses = {}, []
    others = torch.tensor(others_QD, dtype=torch.float64)
    for row, signs_Q in enumerate(signs_NQ):
        if not (signs_Q > 0).any() or not (signs_Q < 0).any():
            continue
        x = torch.tensor(vectors_ND[row], dtype=torch.float64, requires_grad=True)
        value = loss(x, others, signs_Q)
        (gradient,) = torch.autograd.grad(value, x)
        new_vectors[row] = (x - step_size * gradient).detach().numpy()
        losses.append(value.item())
    return new_vectors, float(np.mean(losses)) if losses else math.nan


def near(rng: np.random.Generator, count: int, dimension: int) -> np.ndarray:
    """Unit vectors in one half-space, so that scores are positive as those of retrieved passages are."""
    vectors = rng.normal(size=(count, dimension)) + 2.0
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def assert_moved(result, expected: dict[int, np.ndarray], tolerance: float = 1e-10) -> None:
    assert result.moved_M.tolist() == sorted(expected)
    for row, vector in zip(result.moved_M, result.vectors_MD):
        np.testing.assert_allclose(vector, expected[row], rtol=0, atol=tolerance)


CASES = [(1, 1, 5), (1, 4, 5), (3, 8, 12), (8, 5, 9)]  # views a passage, passages, questions


@pytest.mark.parametrize(("views", "passages", "questions"), CASES)
def test_the_passage_step_equals_autograd_in_float64(views: int, passages: int, questions: int):
    rng = np.random.default_rng(views * 100 + questions)
    vectors, queries = near(rng, views * passages, 16), near(rng, questions, 16)
    signs = rng.choice([-1, 0, 1], (len(vectors), questions))
    new_vectors, loss = by_autograd(ratio_loss, vectors, queries, signs, 0.05)
    result = passage_step(vectors, queries, matrices(signs), step_size=0.05)
    assert_moved(result, new_vectors)
    if new_vectors:
        assert result.loss == pytest.approx(loss, abs=1e-10)
    assert result.vectors_MD.dtype == np.float64


@pytest.mark.parametrize(("views", "passages", "questions"), CASES)
def test_the_query_step_equals_autograd_in_float64(views: int, passages: int, questions: int):
    rng = np.random.default_rng(views * 100 + questions)
    vectors, queries = near(rng, views * passages, 16), near(rng, questions, 16)
    signs = rng.choice([-1, 0, 1], (len(vectors), questions))
    new_vectors, loss = by_autograd(ratio_loss, queries, vectors, signs.T, 0.05)
    result = passage_step(queries, vectors, matrices(signs).transpose(), step_size=0.05)
    assert_moved(result, new_vectors)
    if new_vectors:
        assert result.loss == pytest.approx(loss, abs=1e-10)


@pytest.mark.parametrize(("views", "passages", "questions"), CASES)
def test_the_softmax_step_equals_autograd_in_float64_whatever_the_signs_of_scores(views, passages, questions):
    rng = np.random.default_rng(views * 100 + questions)
    vectors, queries = rng.normal(size=(views * passages, 16)), rng.normal(size=(questions, 16))
    signs = rng.choice([-1, 0, 1], (len(vectors), questions))
    new_vectors, loss = by_autograd(softmax_loss, vectors, queries, signs, 0.05)
    result = softmax_step(vectors, queries, matrices(signs), step_size=0.05, temperature=0.7)
    assert_moved(result, new_vectors)
    if new_vectors:
        assert result.loss == pytest.approx(loss, abs=1e-10)


def test_softmax_scores_far_beyond_the_range_of_exp_do_not_overflow():
    vectors, queries = np.array([[900.0, 0.0]]), np.array([[2.0, 0.0], [3.0, 0.0], [-3.0, 0.0]])
    signs = np.array([[1, -1, 1]])
    result = softmax_step(vectors, queries, matrices(signs), step_size=1.0)
    assert result.loss == pytest.approx(900.0)
    np.testing.assert_allclose(result.vectors_MD, [[899.0, 0.0]])


@pytest.mark.parametrize("step", [passage_step, softmax_step])
def test_the_closed_gradient_equals_central_differences(step):
    rng = np.random.default_rng(11)
    vectors, queries = near(rng, 1, 6), near(rng, 5, 6)
    labels = matrices(np.array([[1, -1, 1, -1, 0]]))
    gradient_D = vectors[0] - step(vectors, queries, labels, step_size=1.0).vectors_MD[0]
    width = 1e-6
    for axis in range(6):
        nudge = np.eye(6)[axis] * width
        above, below = (step(vectors + side * nudge, queries, labels, step_size=1.0).loss for side in (1, -1))
        assert gradient_D[axis] == pytest.approx((above - below) / (2 * width), abs=1e-8)


class LossOfStep(torch.autograd.Function):
    """The loss of a step as a function of the vectors that it moves, with the step's own gradient."""

    @staticmethod
    def forward(ctx, vectors_ND, step):
        result = step(vectors_ND.detach().numpy(), step_size=1.0)
        ctx.gradient_ND = torch.zeros_like(vectors_ND)
        moved_MD = torch.from_numpy(result.vectors_MD)
        ctx.gradient_ND[result.moved_M] = (vectors_ND.detach()[result.moved_M] - moved_MD) / result.num_moved
        return torch.tensor(result.loss, dtype=torch.float64)

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] * ctx.gradient_ND, None


@pytest.mark.parametrize("step", ["passage", "query", "softmax"])
@pytest.mark.parametrize("seed", range(3))
def test_gradcheck_finds_the_closed_gradients_of_all_vectors_at_once(step, seed):
    """Eqs. 11 and 13, whose step is eq. 14; labels of several questions a vector, and vectors that stay."""
    rng = np.random.default_rng(seed)
    views, queries = near(rng, 5, 4), near(rng, 6, 4)
    signs = rng.integers(-1, 2, (5, 6))
    signs[0], signs[:, 0] = [1, -1, 0, 0, 1, 0], [1, -1, 0, 1, 0]
    labels = matrices(signs)
    inputs, take = {
        "passage": (views, lambda x, step_size: passage_step(x, queries, labels, step_size=step_size)),
        "query": (queries, lambda x, step_size: passage_step(x, views, labels.transpose(), step_size=step_size)),
        "softmax": (
            views,
            lambda x, step_size: softmax_step(x, queries, labels, step_size=step_size, temperature=0.7),
        ),
    }[step]
    x = torch.from_numpy(inputs).requires_grad_()
    assert torch.autograd.gradcheck(lambda vectors: LossOfStep.apply(vectors, take), (x,))


def test_a_small_step_lowers_the_loss_and_its_gradient_is_orthogonal_so_norms_grow():
    rng = np.random.default_rng(2)
    vectors, queries = near(rng, 20, 8), near(rng, 30, 8)
    labels = matrices(rng.choice([-1, 1], (20, 30)))
    before = passage_step(vectors, queries, labels, step_size=0.01)
    after = passage_step(before.vectors_MD, queries, labels, step_size=0.01)
    assert after.loss < before.loss
    np.testing.assert_allclose(np.einsum("nd,nd->n", before.vectors_MD - vectors, vectors), 0, atol=1e-12)
    assert (np.linalg.norm(before.vectors_MD, axis=1) >= np.linalg.norm(vectors, axis=1)).all()


@given(
    st.integers(0, 2**32 - 1),
    st.floats(0.05, 20),
    st.floats(0.05, 20),
    st.floats(1e-4, 0.1),
    st.integers(1, 6),
)
def test_what_counts_is_step_size_times_rounds_over_the_squared_norm(seed, scale, other_scale, step_size, rounds):
    """Longer vectors move alike, relative to their length, at a step size longer by its square, whatever the length of
    what they are moved by; so vectors that are not of unit length need one of their own."""
    rng = np.random.default_rng(seed)
    others_QD, start_ND = near(rng, 6, 5), near(rng, 4, 5)
    labels = matrices(rng.choice([-1, 1], (4, 6)))
    plain_ND, scaled_ND = start_ND.copy(), scale * start_ND
    for _ in range(rounds):
        plain = passage_step(plain_ND, others_QD, labels, step_size=step_size, guard=0)
        scaled_step = passage_step(scaled_ND, other_scale * others_QD, labels, step_size=scale**2 * step_size, guard=0)
        np.testing.assert_array_equal(plain.moved_M, scaled_step.moved_M)
        plain_ND[plain.moved_M], scaled_ND[scaled_step.moved_M] = plain.vectors_MD, scaled_step.vectors_MD
    assert len(plain.moved_M) == 0 or not np.array_equal(plain_ND, start_ND)
    np.testing.assert_allclose(scaled_ND / scale, plain_ND, rtol=1e-6)


def test_vectors_labelled_one_way_or_not_at_all_stay_and_are_counted():
    rng = np.random.default_rng(4)
    vectors, queries = near(rng, 5, 4), near(rng, 2, 4)
    signs = np.array([[1, 1], [-1, -1], [0, 0], [1, -1], [-1, 0]])
    for result in (
        passage_step(vectors, queries, matrices(signs), step_size=0.1),
        softmax_step(vectors, queries, matrices(signs), step_size=0.1),
    ):
        assert result.moved_M.tolist() == [3]
        assert (result.num_no_positive, result.num_no_negative, result.num_outside_domain) == (2, 1, 0)


def test_a_vector_outside_the_domain_of_the_loss_stays_and_is_counted():
    queries = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.001, 0.0]])
    vectors = np.tile([[1.0, 0.5]], (5, 1))
    signs = np.array(
        [
            [-1, 1, 0, 0],  # <p, A> = -1
            [1, -1, 0, 0],  # <p, B> = 0
            [-1, 0, 0, 1],  # <p, A> = 0.001, the guard itself
            [1, -1, -1, 0],  # <p, A> = 1 > <p, B> = 0.5: inside, loss below zero
            [1, 0, -1, 0],  # ordinary
        ]
    )
    result = passage_step(vectors, queries, matrices(signs), step_size=0.1, guard=1e-3)
    assert result.moved_M.tolist() == [3, 4]
    assert result.num_outside_domain == 3
    assert result.loss == pytest.approx((math.log(0.5) + math.log(1.5)) / 2)
    assert np.isfinite(result.vectors_MD).all()
    assert passage_step(vectors, queries, matrices(signs), step_size=0.1, guard=9e-4).num_outside_domain == 2
    everything = passage_step(vectors, -queries, matrices(np.abs(signs) * [1, 1, -1, -1]), step_size=0.1)
    assert everything.num_moved == 0
    assert math.isnan(everything.loss)


def test_labels_go_to_the_view_that_won_and_other_views_of_the_passage_stay():
    rng = np.random.default_rng(8)
    views, queries = near(rng, 3, 4), near(rng, 4, 4)
    signs = np.zeros((3, 4), int)
    signs[1] = [1, -1, 1, -1]
    alone = passage_step(views[1:2], queries, matrices(signs[1:2]), step_size=0.1)
    together = passage_step(views, queries, matrices(signs), step_size=0.1)
    assert together.moved_M.tolist() == [1]
    assert np.array_equal(together.vectors_MD, alone.vectors_MD)


@settings(max_examples=30)
@given(st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_taking_vectors_in_parts_changes_nothing(part: int, seed: int):
    rng = np.random.default_rng(seed)
    vectors, queries = rng.normal(size=(20, 6)), rng.normal(size=(7, 6))
    labels = matrices(rng.choice([-1, 0, 0, 1], (20, 7)))
    whole = ratio_step(vectors, label_sums(queries, labels), step_size=0.1)
    size = aopt._ROWS_AT_ONCE
    try:
        aopt._ROWS_AT_ONCE = part
        parts = passage_step(vectors, queries, labels, step_size=0.1)
    finally:
        aopt._ROWS_AT_ONCE = size
    assert np.array_equal(parts.moved_M, whole.moved_M)
    assert np.array_equal(parts.vectors_MD, whole.vectors_MD)
    assert parts[3:] == whole[3:]
    assert parts.loss == pytest.approx(whole.loss, nan_ok=True)


def test_sums_over_shards_add_up_to_the_query_step_over_the_whole_index():
    rng = np.random.default_rng(6)
    views, queries = near(rng, 12, 5), near(rng, 4, 5)
    signs = rng.choice([-1, 0, 1], (12, 4))
    sums = None
    for rows in (slice(0, 5), slice(5, 6), slice(6, 12)):
        part: LabelSums = label_sums(views[rows], matrices(signs[rows]).transpose())
        sums = part if sums is None else sums.plus(part)
    assert sums is not None
    result = ratio_step(queries, sums, step_size=0.2)
    whole = passage_step(queries, views, matrices(signs).transpose(), step_size=0.2)
    assert np.array_equal(result.moved_M, whole.moved_M)
    np.testing.assert_allclose(result.vectors_MD, whole.vectors_MD, rtol=0, atol=1e-13)


def test_stored_half_precision_views_move_in_double_and_come_back_as_float32():
    rng = np.random.default_rng(9)
    views, queries = near(rng, 6, 8).astype(np.float16), near(rng, 5, 8).astype(np.float32)
    labels = matrices(rng.choice([-1, 1], (6, 5)))
    result = passage_step(views, queries, labels, step_size=0.01)
    exact = passage_step(views.astype(np.float64), queries.astype(np.float64), labels, step_size=0.01)
    assert result.vectors_MD.dtype == np.float32
    assert np.array_equal(result.vectors_MD, exact.vectors_MD.astype(np.float32))


built = pytest.mark.skipif(native_step.library() is None, reason="not compiled")
SINGLE = ["float64", *(["compiled"] if native_step.library() else [])]


@contextmanager
def stepped_by(name: str, part: int = 512, threads: int = 2) -> Iterator[None]:
    """The step in single precision by the compiled loop, so many vectors at a time, or without it in float64."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "float64":
            patch.setattr(native_step, "library", lambda: None)
        patch.setattr(native_step, "ROWS_AT_ONCE", part)
        patch.setattr(native, "num_threads", lambda: threads)
        yield


def values_of(vectors: native_step.Int16Vectors) -> np.ndarray:
    return vectors.whole_QD * vectors.unit_Q[:, None]


def step_by_equations(vectors_ND, queries_QD, signs_NQ, step_size: float) -> dict[int, np.ndarray]:
    """Eqs. 13 and 14 as they are written, in double, a vector at a time."""
    new_vectors = {}
    for row, signs_Q in enumerate(signs_NQ):
        x, positive, every = vectors_ND[row].astype(float), queries_QD[signs_Q > 0], queries_QD[signs_Q != 0]
        if len(positive) and len(every) > len(positive):
            a, b = positive.astype(float).sum(axis=0), every.astype(float).sum(axis=0)
            new_vectors[row] = x + step_size * (a / (x @ a) - b / (x @ b))
    return new_vectors


@built
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.sampled_from([1, 7, 16, 40, 131]))
def test_the_step_in_single_precision_errs_no_more_than_its_bound(dtype, seed: int, part: int, dimension: int):
    """Against the equations in double, of partners as rounded: who moves, the counts, and the vectors within what the
    sums may err; of partners as they are, within what rounding takes off <x, A> and off each component besides."""
    rng = np.random.default_rng(seed)
    views, queries = near(rng, 20, dimension), near(rng, 30, dimension).astype(np.float32)
    views, queries = np.abs(views).astype(dtype), np.abs(queries)
    signs = rng.choice([-1, 0, 1], (20, 30), p=[0.5, 0.3, 0.2])
    double = passage_step(views, queries, matrices(signs), step_size=0.05)
    with stepped_by("compiled", part):
        single = passage_step(views, queries, matrices(signs), step_size=0.05, single=True)
    error = 0.05 * 60 * 2.0**-24 + 2.0**-23
    assert_moved(single, step_by_equations(views, values_of(native_step.to_int16(queries)), signs, 0.05), error)
    unit, least = queries.max() / 65534, (views.astype(float) @ queries.T.astype(float)).min()
    away = 2 * unit / least * (1 + np.abs(views.astype(float)).sum(axis=1).max() * queries.max() / least)
    assert_moved(single, step_by_equations(views, queries, signs, 0.05), 1.01 * 0.05 * away + error)
    assert single.vectors_MD.dtype == np.float32
    if dimension > 1:  # in one dimension nothing can move, and losses are those of counts
        assert single[3:] == double[3:]
    assert single.loss == pytest.approx(double.loss, abs=1e-4, nan_ok=True)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_step_in_single_precision_is_float64_without_the_compiled_loop(dtype):
    rng = np.random.default_rng(2)
    views, queries = near(rng, 20, 16).astype(dtype), near(rng, 30, 16).astype(np.float32)
    labels = matrices(rng.choice([-1, 0, 1], (20, 30)))
    with stepped_by("float64"):
        single = passage_step(views, queries, labels, step_size=0.05, single=True)
    double = passage_step(views, queries, labels, step_size=0.05)
    assert single.vectors_MD.tobytes() == double.vectors_MD.tobytes() and single.loss == double.loss


@built
@settings(max_examples=50)
@given(
    st.integers(0, 2**32 - 1), st.sampled_from([1, 5, 16, 40, 384]), st.integers(1, 9),
    st.sampled_from([2.0**-112, 2.0**-110, 2.0**-30, 1.0, 2.0**125]),
)  # fmt: skip
def test_partners_are_rounded_to_the_nearest_whole_number_of_a_unit_of_their_own(seed, dimension, part, size):
    """By the definition, in double; in parts as in one."""
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((20, dimension)).clip(-4, 4)
    vectors[3] = 0
    vectors = (vectors * 2.0 ** rng.integers(-3, 1, (20, 1)) * size).astype(np.float32)
    most_Q = np.abs(vectors).max(axis=1)
    exact = vectors.astype(np.float64)
    whole = native_step.to_int16(vectors)
    with stepped_by("compiled", part):
        actual = native_step.to_int16(vectors)
    assert [column.tobytes() for column in actual] == [column.tobytes() for column in whole]
    zero_Q = most_Q < 2.0**-110
    np.testing.assert_array_equal(actual.unit_Q, np.where(zero_Q, 0, most_Q / np.float32(32767)))
    assert (np.abs(actual.whole_QD).max(axis=1) == np.where(zero_Q, 0, 32767)).all()
    away_Q = np.abs(values_of(actual).astype(np.float64) - exact).max(axis=1)
    assert (away_Q <= np.where(zero_Q, 2.0**-110, most_Q * (1 / 65534 + 2.0**-22))).all()


@pytest.mark.parametrize("name", SINGLE)
def test_a_partner_that_is_no_number_shows_in_what_it_moves_and_nowhere_else(name):
    queries = np.ones((4, 20), np.float32)
    queries[1, 17], queries[3, 2] = np.nan, np.inf
    signs = np.array([[1, 0, -1, 0], [1, -1, 0, 0], [1, 0, 0, -1]])
    with stepped_by(name):
        result = passage_step(np.ones((3, 20), np.float32), queries, matrices(signs), step_size=0.1, single=True)
    assert result.moved_M.tolist() == [0]
    assert result.num_outside_domain == 2
    if name == "compiled":
        assert np.isnan(native_step.to_int16(queries).unit_Q).tolist() == [False, True, False, True]


@pytest.mark.parametrize("name", SINGLE)
def test_the_step_in_single_precision_leaves_what_is_outside_the_domain(name):
    queries = np.array([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.001, 0.0]])
    vectors = np.tile([[1.0, 0.5]], (4, 1))
    signs = np.array([[-1, 1, 0, 0], [1, -1, 0, 0], [1, -1, -1, 0], [1, 0, -1, 0]])
    double = passage_step(vectors, queries, matrices(signs), step_size=0.1)
    with stepped_by(name):
        single = passage_step(vectors, queries, matrices(signs), step_size=0.1, single=True)
    assert single.moved_M.tolist() == double.moved_M.tolist() == [2, 3]
    assert single.num_outside_domain == 2
    np.testing.assert_allclose(single.vectors_MD, double.vectors_MD, rtol=1e-6)


@built
@pytest.mark.parametrize("numbers", [np.int32, np.int64])
def test_the_compiled_step_has_the_same_bytes_for_any_number_of_threads_and_any_share(numbers):
    rng = np.random.default_rng(3)
    views, queries = near(rng, 300, 40).astype(np.float16), near(rng, 50, 40).astype(np.float32)
    labels = matrices(rng.choice([-1, 0, 1], (300, 50)))
    for matrix in labels:
        matrix.indices, matrix.indptr = matrix.indices.astype(numbers), matrix.indptr.astype(numbers)
    rows = np.arange(0, 300, 2)
    every = []
    for threads, part in ((1, 1000), (2, 7), (3, 1), (5, 64)):
        with stepped_by("compiled", part, threads):
            result = native_step.step(views, queries, labels, rows, 0.1)
        every.append(result.moved_MD.tobytes() + result.scores_M2.tobytes())
    assert len(set(every)) == 1
    alone = native_step.step(views, queries, labels, rows[77:78], 0.1)
    assert alone.moved_MD.tobytes() == result.moved_MD[77:78].tobytes()


@built
def test_the_compiled_step_adds_partners_one_by_one_in_the_order_of_the_labels():
    """In float32 the order shows: with x = e_1, <x, A> and <x, B> are the sums' first components."""
    rng = np.random.default_rng(5)
    queries = (rng.random((400, 20), np.float32) * 10.0 ** rng.integers(-3, 4, (400, 1))).astype(np.float32)
    whole, unit = native_step.to_int16(queries)
    signs = rng.choice([-1, 1], (1, 400))
    result = native_step.step(np.eye(1, 20, dtype=np.float32), queries, matrices(signs), np.arange(1), 0.1)
    sums = []
    for sign in (1, -1):
        sums.append(np.float32(0))
        for number, of in zip(whole[signs[0] == sign, 0], unit[signs[0] == sign]):
            sums[-1] = np.float32(sums[-1] + np.float32(number * of))
    assert result.scores_M2.tolist() == [[sums[0], np.float32(sums[0] + sums[1])]]


@built
def test_every_half_is_widened_exactly_and_flushing_threads_change_no_byte():
    every = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    every = every[np.isfinite(every)].reshape(-1, 32)
    labels = matrices(np.tile([[1, -1]], (len(every), 1)))
    queries = np.stack([np.full(32, 2.0**-109, np.float32)] * 2)
    rows, torch_flushes = np.arange(len(every)), torch.set_flush_denormal(True)
    try:
        assert torch_flushes
        result = native_step.step(every, queries, labels, rows, 0.0)
    finally:
        torch.set_flush_denormal(False)
    again = native_step.step(every, queries, labels, rows, 0.0)
    assert result.scores_M2.tobytes() == again.scores_M2.tobytes()
    finite = np.isfinite(result.moved_MD).all(axis=1)
    assert finite.sum() > 0.9 * len(every)
    assert np.array_equal(result.moved_MD[finite], every.astype(np.float32)[finite])


@built
def test_labels_of_other_shapes_than_the_vectors_are_refused():
    labels = matrices(np.ones((3, 4), int))
    for vectors, queries in ((2, (4, 5)), (3, (3, 5)), (3, (4, 6))):
        with pytest.raises(ValueError, match="give one dimension, and labels of shape"):
            native_step.step(np.ones((vectors, 5)), np.ones(queries), labels, np.arange(2), 0.1)


@pytest.mark.parametrize(
    ("signs", "alpha", "beta", "gamma", "expected"),
    [
        ([1, 1, -1, 0], 1.0, 0.6, -0.1, [[1.0 + 0.6 * 1.0 - 0.1 * 4.0, 2.0 + 0.6 * 2.0 - 0.1 * 0.0]]),
        ([1, 0, -1, -1], 1.0, 0.2, -0.1, [[1.0 + 0.2 * 2.0 - 0.1 * 3.0, 2.0 + 0.2 * 0.0 - 0.1 * 3.0]]),
        ([0, 1, 0, 0], 0.5, 1.0, -9.0, [[0.5 + 0.0, 1.0 + 4.0]]),
        ([0, 0, -1, 0], 1.0, 0.6, -0.1, []),
        ([0, 0, 0, 0], 1.0, 0.6, -0.1, []),
    ],
)
def test_the_linear_form_equals_the_worked_example(signs, alpha, beta, gamma, expected):
    queries = np.array([[2.0, 0.0], [0.0, 4.0], [4.0, 0.0], [2.0, 6.0]])
    result = linear_step(
        np.array([[1.0, 2.0]]), queries, matrices(np.array([signs])), alpha=alpha, beta=beta, gamma=gamma
    )
    np.testing.assert_allclose(result.vectors_MD, np.array(expected).reshape(-1, 2))
    assert result.num_moved == len(expected)
    assert result.num_no_positive == (signs == [0, 0, -1, 0])
    assert result.num_no_negative == (signs == [0, 1, 0, 0])
    assert math.isnan(result.loss)


def test_rocchio_equals_equation_7_written_out():
    """alpha q + beta mean(positives) - gamma mean(negatives), which is no gradient step of the ratio loss."""
    views = np.array([[2.0, 0.0], [0.0, 4.0], [4.0, 0.0], [2.0, 6.0]])
    queries = np.array([[1.0, 2.0], [3.0, 1.0], [5.0, 5.0]])
    labels = matrices(np.array([[1, 1, 0], [1, 0, 0], [-1, 0, -1], [0, -1, 0]]))
    result = linear_step(queries, views, labels.transpose(), alpha=0.5, beta=0.6, gamma=-0.1)
    expected = [
        0.5 * queries[0] + 0.6 * (views[0] + views[1]) / 2 - 0.1 * views[2],
        0.5 * queries[1] + 0.6 * views[0] - 0.1 * views[3],
    ]
    assert result.moved_M.tolist() == [0, 1], "a question without a positive stays"
    np.testing.assert_allclose(result.vectors_MD, expected)
    gradient = passage_step(queries, views, labels.transpose(), step_size=0.6)
    assert gradient.moved_M.tolist() == [0, 1] and not np.allclose(gradient.vectors_MD, result.vectors_MD)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_the_linear_forms_add_up_over_shards(seed: int, shards: int):
    rng = np.random.default_rng(seed)
    queries, views = rng.normal(size=(5, 4)), rng.normal(size=(9, 4))
    signs = rng.choice([-1, 0, 1], (9, 5))
    whole = linear_step(queries, views, matrices(signs).transpose(), beta=0.3, gamma=-0.2)
    shard_N = rng.integers(0, shards, 9)
    parts = [label_sums(views[shard_N == s], matrices(signs[shard_N == s]).transpose()) for s in range(shards)]
    total = parts[0]
    for part in parts[1:]:
        total = total.plus(part)
    apart = linear_combination(queries, total, alpha=1.0, beta=0.3, gamma=-0.2)
    assert apart.moved_M.tolist() == whole.moved_M.tolist()
    np.testing.assert_allclose(apart.vectors_MD, whole.vectors_MD, atol=1e-12)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1))
def test_a_moved_vector_keeps_its_length_and_its_new_direction(seed: int):
    rng = np.random.default_rng(seed)
    vectors = near(rng, 8, 6) * rng.uniform(0.5, 3, (8, 1))
    queries, labels = near(rng, 7, 6), matrices(rng.choice([-1, 0, 1], (8, 7)))
    for step in (
        linear_step(vectors, queries, labels),
        passage_step(vectors, queries, labels, step_size=0.1),
        softmax_step(vectors, queries, labels, step_size=0.1),
    ):
        result = step.keep_length(vectors)
        assert result._replace(vectors_MD=0) == step._replace(vectors_MD=0)
        lengths = np.linalg.norm(vectors[step.moved_M], axis=1)
        np.testing.assert_allclose(np.linalg.norm(result.vectors_MD, axis=1), lengths, rtol=1e-12)
        cosines = np.einsum("md,md->m", result.vectors_MD, step.vectors_MD)
        np.testing.assert_allclose(cosines, lengths * np.linalg.norm(step.vectors_MD, axis=1), rtol=1e-12)


def test_a_vector_that_is_moved_to_nothing_stays():
    vectors, queries = np.array([[2.0, 0.0]]), np.array([[2.0, 0.0]])
    step = linear_step(vectors, queries, matrices(np.array([[1]])), alpha=1.0, beta=-1.0)
    assert step.vectors_MD.tolist() == [[0.0, 0.0]]
    assert step.keep_length(vectors).vectors_MD.tolist() == [[2.0, 0.0]]


def test_the_linear_form_pushes_away_from_negatives_only_vectors_with_a_positive():
    vectors, queries = np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]), np.array([[2.0, 0.0], [0.0, 4.0]])
    labels = matrices(np.array([[-1, -1], [0, 0], [1, 0]]))
    assert linear_step(vectors, queries, labels).moved_M.tolist() == [2]
    step = linear_step(vectors, queries, matrices(np.array([[-1, -1], [0, 0], [1, -1]])), gamma=-0.5)
    assert step.moved_M.tolist() == [2]
    np.testing.assert_allclose(step.vectors_MD, [[3 + 0.6 * 2, 3 - 0.5 * 4]])
    assert (step.num_no_positive, step.num_no_negative) == (1, 0)


def test_nothing_labelled_moves_nothing():
    vectors, queries = np.ones((3, 2)), np.ones((4, 2))
    labels = matrices(np.zeros((3, 4), int))
    for result in (
        passage_step(vectors, queries, labels, step_size=0.1),
        passage_step(vectors, queries, labels, step_size=0.1, single=True),
        passage_step(queries, vectors, labels.transpose(), step_size=0.1),
        softmax_step(vectors, queries, labels, step_size=0.1),
        linear_step(vectors, queries, labels),
    ):
        assert result.num_moved == 0
        assert result.vectors_MD.shape == (0, 2)
        assert math.isnan(result.loss)
        assert tuple(result[3:]) == (0, 0, 0)
