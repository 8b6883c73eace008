"""The losses against slow transcriptions of the papers' equations, and their gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mvr_ray.core.learning.losses import camvr_loss, distillation_loss, dpr_loss, mvr_loss, pairwise_scores, temperature

LOSSES = [dpr_loss, mvr_loss, camvr_loss]


class Batch:
    """Random float64 inputs: passages of unequal views, several questions on one passage, known other positives."""

    def __init__(
        self, seed: int, num_questions: int = 5, num_passages: int = 7, num_views: int = 4, dimension: int = 6
    ):
        generator = torch.Generator().manual_seed(seed)
        self.queries = torch.randn(num_questions, dimension, generator=generator, dtype=torch.float64)
        self.views = torch.randn(num_passages, num_views, dimension, generator=generator, dtype=torch.float64)
        self.mask = torch.rand(num_passages, num_views, generator=generator) < 0.6
        self.mask[torch.arange(num_passages), torch.randint(num_views, (num_passages,), generator=generator)] = True
        self.positive = torch.randint(num_passages, (num_questions,), generator=generator)
        self.answer = torch.rand(num_questions, num_views, generator=generator) < 1.3 / num_views
        self.known_QP = torch.rand(num_questions, num_passages, generator=generator) < 0.2


def slow(name: str, batch: Batch, tau: float, scale: float, weight: float) -> tuple[float, float, float]:
    """The equations, one question, passage and view at a time."""
    global_terms, local_terms = [], []
    for q, query in enumerate(batch.queries.tolist()):
        scores = []
        for p, views in enumerate(batch.views.tolist()):
            scores.append(
                {
                    v: scale * sum(a * b for a, b in zip(query, view))
                    for v, view in enumerate(views)
                    if bool(batch.mask[p, v])
                }
            )
        positive = int(batch.positive[q])
        own = scores[positive]
        best = max(own.values())
        if name == "camvr_loss":
            best = max((own[v] for v in own if bool(batch.answer[q, v])), default=best)
        below = math.exp(best / tau)
        for p, other in enumerate(scores):
            if p != positive and not bool(batch.known_QP[q, p]) and other:
                below += math.exp(max(other.values()) / tau)
        global_terms.append(-math.log(math.exp(best / tau) / below))
        local_terms.append(-math.log(math.exp(best / tau) / sum(math.exp(f / tau) for f in own.values())))
    global_, local = (sum(terms) / len(terms) for terms in (global_terms, local_terms))
    if name == "dpr_loss":
        return global_, global_, 0.0
    return global_ + weight * local, global_, local


def run(loss, batch: Batch, **kwargs):
    return loss(
        batch.queries,
        batch.views,
        batch.mask,
        batch.positive,
        answer_QV=batch.answer,
        known_QP=batch.known_QP,
        **kwargs,
    )


@pytest.mark.parametrize("loss", LOSSES)
@given(
    seed=st.integers(0, 10_000),
    tau=st.floats(0.3, 1.0),
    scale=st.sampled_from([1.0, 5.0]),
    weight=st.sampled_from([0.0, 0.01, 1.0]),
)
@settings(max_examples=25)
def test_the_loss_is_the_papers_equation(loss, seed, tau, scale, weight):
    batch = Batch(seed)
    terms = run(loss, batch, tau=tau, scale=scale, local_weight=weight)
    assert [term.item() for term in terms] == pytest.approx(
        slow(loss.__name__, batch, tau, scale, weight), rel=1e-9, abs=1e-9
    )


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_that_of_the_loss(loss, seed):
    batch = Batch(seed, num_questions=3, num_passages=4, num_views=3, dimension=3)
    batch.queries.requires_grad_()
    batch.views.requires_grad_()

    def total(queries, views):
        batch.queries, batch.views = queries, views
        return run(loss, batch, tau=0.7, scale=2.0, local_weight=0.3).total

    assert torch.autograd.gradcheck(total, (batch.queries, batch.views))


@pytest.mark.parametrize("loss", LOSSES)
def test_missing_views_and_padding_passages_take_no_part_in_loss_or_gradient(loss):
    batch = Batch(3)
    batch.known_QP[:] = False
    plain = run(loss, batch, tau=0.5)
    padded_batch = Batch(3)
    noise = torch.full((2, *batch.views.shape[1:]), 1e3, dtype=torch.float64)
    padded_batch.views = torch.cat([torch.where(batch.mask[..., None], batch.views, 1e3), noise]).requires_grad_()
    padded_batch.mask = torch.cat([batch.mask, torch.zeros(2, batch.mask.shape[1], dtype=torch.bool)])
    padded_batch.known_QP = torch.zeros(len(batch.queries), len(padded_batch.views), dtype=torch.bool)
    terms = run(loss, padded_batch, tau=0.5)
    assert [term.item() for term in terms] == pytest.approx([term.item() for term in plain], rel=1e-12)
    (gradient,) = torch.autograd.grad(terms.total, padded_batch.views)
    assert torch.isfinite(gradient).all()
    assert (gradient[~padded_batch.mask] == 0).all()


@pytest.mark.parametrize("loss", LOSSES)
def test_the_order_of_passages_does_not_matter(loss):
    batch = Batch(5)
    before = run(loss, batch).total
    order = torch.randperm(len(batch.views), generator=torch.Generator().manual_seed(0))
    batch.views, batch.mask, batch.known_QP = batch.views[order], batch.mask[order], batch.known_QP[:, order]
    batch.positive = torch.argsort(order)[batch.positive]
    assert float(run(loss, batch).total) == pytest.approx(float(before), rel=1e-12)


def test_equal_views_make_the_local_loss_ln_v():
    batch = Batch(1, num_views=8)
    batch.views = batch.views[:, :1].expand(-1, 8, -1)
    batch.mask[:] = True
    assert float(run(mvr_loss, batch).local) == pytest.approx(math.log(8), rel=1e-12)


def test_with_one_view_every_loss_is_dpr():
    batch = Batch(2, num_views=1)
    totals = [float(run(loss, batch, tau=0.4, scale=3.0).total) for loss in LOSSES]
    assert totals == pytest.approx([totals[0]] * 3, rel=1e-12)


def test_camvr_without_answer_views_is_mvr():
    batch = Batch(4)
    batch.answer[:] = False
    assert float(run(camvr_loss, batch).total) == pytest.approx(float(run(mvr_loss, batch).total), rel=1e-12)


def test_scores_of_missing_views_are_minus_infinity():
    batch = Batch(6)
    scores = pairwise_scores(batch.queries, batch.views, batch.mask)
    assert (scores.isneginf() == ~batch.mask.expand_as(scores)).all()


@pytest.mark.parametrize(
    ("epoch", "expected"), [(0, 1.0), (1, math.exp(-0.1)), (5, math.exp(-0.5)), (13, 0.3), (99, 0.3)]
)
def test_temperature_falls_from_one_to_its_floor(epoch, expected):
    assert temperature(epoch, 0.1, 0.3) == pytest.approx(expected)


@given(seed=st.integers(0, 50), share=st.floats(0, 1))
@settings(max_examples=30)
def test_a_share_of_answer_supervision_mixes_the_two_losses(seed, share):
    batch = Batch(seed)
    given_to_all = (batch.queries, batch.views, batch.mask, batch.positive)
    more = {"tau": 0.5, "scale": 0.7, "local_weight": 0.3, "known_QP": batch.known_QP}
    answer, best = camvr_loss(*given_to_all, answer_QV=batch.answer, **more), mvr_loss(*given_to_all, **more)
    mixture = camvr_loss(*given_to_all, answer_QV=batch.answer, answer_share=share, **more)
    for now, one, other in zip(mixture, answer, best):
        torch.testing.assert_close(now, share * one + (1 - share) * other)


@settings(max_examples=10)
@given(st.integers(0, 10_000))
def test_distillation_is_the_divergence_over_the_passages_that_the_teacher_scored(seed):
    """Transcribed one question at a time; questions with fewer than two scores take no part."""
    batch = Batch(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    teacher = 3 * torch.randn(5, 7, generator=generator, dtype=torch.float64)
    teacher[torch.rand(5, 7, generator=generator) < 0.5] = math.nan
    teacher[0, 1:] = math.nan
    actual = []
    for q, query in enumerate(batch.queries.tolist()):
        rows = [p for p in range(7) if not math.isnan(float(teacher[q, p]))]
        if len(rows) < 2:
            continue
        best = {
            p: 2.5 * max(sum(a * b for a, b in zip(query, view)) for view in batch.views[p][batch.mask[p]].tolist())
            for p in rows
        }
        expected = {p: math.exp(float(teacher[q, p])) / sum(math.exp(float(teacher[q, r])) for r in rows) for p in rows}
        student = {p: math.exp(best[p]) / sum(math.exp(best[r]) for r in rows) for p in rows}
        actual.append(sum(expected[p] * math.log(expected[p] / student[p]) for p in rows))

    def loss(queries, views):
        return distillation_loss(queries, views, batch.mask, teacher, scale=2.5)

    assert float(loss(batch.queries, batch.views)) == pytest.approx(sum(actual) / max(1, len(actual)), abs=1e-9)
    assert torch.autograd.gradcheck(loss, (batch.queries.requires_grad_(), batch.views.requires_grad_()))


def test_without_teacher_scores_distillation_is_zero_beside_padding_passages_too():
    """A passage without a view scores -inf, and -inf times 0 is not 0."""
    batch = Batch(3)
    batch.mask[2] = False
    views = batch.views.requires_grad_()
    loss = distillation_loss(batch.queries, views, batch.mask, torch.full((5, 7), math.nan, dtype=torch.float64))
    terms = mvr_loss(batch.queries, views, batch.mask, torch.zeros(5, dtype=torch.long))
    (terms.total + loss).backward()
    assert loss.item() == 0
    assert views.grad is not None
    assert views.grad.isfinite().all()


def test_a_student_that_scores_as_its_teacher_has_nothing_to_learn():
    batch = Batch(3)
    teacher = pairwise_scores(batch.queries, batch.views, batch.mask).amax(-1) + 5.0
    views = batch.views.requires_grad_()
    loss = distillation_loss(batch.queries, views, batch.mask, teacher)
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-12)
    assert views.grad is not None
    assert float(views.grad.abs().max()) < 1e-12
