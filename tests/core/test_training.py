"""A step on W ranks is a step on the joined batch; the gradient cache changes memory only."""

import math
import multiprocessing
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mvr_ray.core.encoding.encoder import DualEncoder, PassageViews
from mvr_ray.core.encoding.views import EncoderSpec
from mvr_ray.core.learning import training
from mvr_ray.core.learning.batches import rank_share
from mvr_ray.core.learning.losses import (
    LossTerms,
    camvr_loss,
    distillation_loss,
    dpr_loss,
    mvr_loss,
    pairwise_scores,
)
from mvr_ray.core.learning.training import (
    PassSettings,
    RankInputs,
    average_gradients,
    distil_gradients,
    loss_and_gradients,
    lr_factor,
    winning_views,
)
from mvr_ray.types import Passage

TEXT = [
    "The river rises in the hills. It runs to the sea! Where does the river end?",
    "Dr. Smith of the city wrote of the old bridge. The bridge was built in 1801.",
    "Salt and trade made the town rich. Boats came every day; later they did not.",
]

QUESTIONS, PASSAGES, VIEWS, DIM = 8, 11, 3, 4
PAIRS = [(one, two) for one in TEXT for two in TEXT] + [(TEXT[0], ""), ("", TEXT[1])]
WORLDS = (1, 2, 4)
LOSSES = ("dpr", "mvr", "camvr", "half by the best view", "own", "taught", "distil")


class ToyViews(NamedTuple):
    views_PVD: Tensor
    mask_PV: Tensor


class ToyEncoder(nn.Module):
    """Two linear towers in float64; texts are numbers, passages are vectors with a mask."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.question = nn.Linear(5, DIM, dtype=torch.float64)
        self.passage = nn.Linear(6, VIEWS * DIM, dtype=torch.float64)
        self.spare = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.dropout = nn.Dropout(dropout)

    def encode_queries(self, texts) -> Tensor:
        rows = [np.random.default_rng(int(text)).normal(size=5) for text in texts]
        return self.dropout(torch.tanh(self.question(torch.tensor(np.array(rows)))))

    def encode_passages(self, batch) -> ToyViews:
        rows = torch.tensor(np.array([np.random.default_rng(100 + n).normal(size=6) for n in batch]))
        mask = torch.tensor([[True, n % 2 == 0, n % 3 != 0] for n in batch])
        return ToyViews(self.dropout(torch.tanh(self.passage(rows))).unflatten(1, (VIEWS, DIM)), mask)


def own_loss(queries_QD, views_PVD, mask_PV, positive_Q, **settings) -> LossTerms:
    """A loss of a user, which knows nothing of padding: the mean distance of all scores from their positives'."""
    scores_QP = pairwise_scores(queries_QD, views_PVD, mask_PV).amax(-1)
    total = (scores_QP - scores_QP.gather(1, positive_Q[:, None])).abs().mean()
    return LossTerms(total, total.detach(), torch.zeros_like(total))


def joined_loss(name: str):
    rng = np.random.default_rng(7)
    positive_Q = torch.tensor(rng.integers(0, PASSAGES, QUESTIONS))
    answer_QV = torch.tensor(rng.random((QUESTIONS, VIEWS)) < 0.4)
    known_QP = torch.tensor(rng.random((QUESTIONS, PASSAGES)) < 0.15)
    teacher_QP = torch.tensor(
        np.where(rng.random((QUESTIONS, PASSAGES)) < 0.5, rng.normal(size=(QUESTIONS, PASSAGES)), np.nan)
    )
    loss = {
        "dpr": dpr_loss,
        "mvr": mvr_loss,
        "camvr": camvr_loss,
        "half by the best view": partial(camvr_loss, answer_share=0.5),
        "own": own_loss,
        "taught": mvr_loss,
    }[name]

    def of(queries_QD, views_PVD, mask_PV):
        terms = loss(
            queries_QD,
            views_PVD,
            mask_PV,
            positive_Q,
            tau=0.5,
            scale=2.0,
            local_weight=0.3,
            answer_QV=answer_QV,
            known_QP=known_QP,
        )
        if name != "taught":
            return terms
        return terms._replace(
            total=terms.total + distillation_loss(queries_QD, views_PVD, mask_PV, teacher_QP, scale=2.0)
        )

    return of


def share_of(rank: int, world: int) -> RankInputs:
    part = rank_share(QUESTIONS, PASSAGES, rank, world)
    return RankInputs([str(q) for q in part.questions], part.passages, torch.tensor(part.real_P), PASSAGES)


def gradients(encoder: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


def reference(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Plain autograd on everything at once."""
    encoder = ToyEncoder()
    if name == "distil":
        return _distil_reference(encoder), gradients(encoder)
    views = encoder.encode_passages(list(range(PASSAGES)))
    queries = encoder.encode_queries([str(q) for q in range(QUESTIONS)])
    terms = joined_loss(name)(queries, views.views_PVD, views.mask_PV)
    terms.total.backward()
    return terms.total.detach(), gradients(encoder)


def assert_same(result: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    for name, gradient in expected.items():
        assert torch.allclose(result[name], gradient, rtol=0, atol=tolerance), name


def _on_rank(rank: int, world: int, meeting: Path, out: Path) -> None:
    """Every loss in one pass and in chunks, as loss and gradients in a file `out`."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    share, actual = share_of(rank, world), {}
    for name in LOSSES:
        for chunk in (0, 2):
            encoder = ToyEncoder()
            if name == "distil":
                loss = _distil(encoder, share, rank, world, chunk)
                dist.all_reduce(loss)
                loss /= world
            else:
                loss = loss_and_gradients(encoder, share, joined_loss(name), PassSettings(chunk=chunk)).terms.total
            average_gradients(encoder.parameters())
            actual[f"{name} {chunk} loss"] = loss.numpy()
            actual |= {f"{name} {chunk} {key}": gradient.numpy() for key, gradient in gradients(encoder).items()}
    np.savez(out, **actual)
    dist.barrier()
    dist.destroy_process_group()


def _distil(encoder, share: RankInputs, rank: int, world: int, chunk: int) -> Tensor:
    rng = np.random.default_rng(9)
    questions_QD = torch.tensor(rng.normal(size=(QUESTIONS, DIM)))
    passages_PD = torch.tensor(rng.normal(size=(PASSAGES, DIM)))
    part = rank_share(QUESTIONS, PASSAGES, rank, world)
    settings = PassSettings(chunk=chunk)
    return distil_gradients(encoder, share, questions_QD[list(part.questions)], passages_PD[part.passages], settings)


def _distil_reference(encoder: ToyEncoder) -> Tensor:
    rng = np.random.default_rng(9)
    views = encoder.encode_passages(list(range(PASSAGES)))
    pairs = [
        (encoder.encode_queries([str(q) for q in range(QUESTIONS)]), torch.tensor(rng.normal(size=(QUESTIONS, DIM)))),
        ((views.views_PVD * views.mask_PV[..., None]).sum(1), torch.tensor(rng.normal(size=(PASSAGES, DIM)))),
    ]
    loss = sum((1 - (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))).mean() for a, b in pairs)
    loss.backward()
    return loss.detach()


@pytest.fixture(scope="module")
def results(tiny, tmp_path_factory) -> Path:
    """The folder of what all ranks wrote; they are forks of one process, which imports for all of them. A rank that
    failed has no file."""
    folder = tmp_path_factory.mktemp("ranks")
    subprocess.run([sys.executable, __file__, folder, tiny("bert")], check=True, timeout=240)
    return folder


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_together_have_the_loss_and_gradient_of_one_process_on_the_joined_batch(world, results):
    for rank in range(world):
        actual = np.load(results / f"toy-{rank}-of-{world}.npz", allow_pickle=False)
        for name in LOSSES:
            loss, expected = reference(name)
            for chunk in (0, 2):
                assert math.isclose(actual[f"{name} {chunk} loss"], loss.item(), rel_tol=1e-12)
                assert_same({key: torch.tensor(actual[f"{name} {chunk} {key}"]) for key in expected}, expected)


class WithTokens:
    """A dual encoder over a list of passages, which are given by their numbers."""

    def __init__(self, backbone: str) -> None:
        spec = EncoderSpec(strategy="snippets", num_views=3, max_passage_tokens=48, max_query_tokens=24)
        self.encoder = DualEncoder.from_backbone(backbone, spec)
        texts = [f"{one} {two} Nobody knew number {number}." for number, (one, two) in enumerate(PAIRS)]
        self.passages = self.encoder.tokenize_passages([Passage(str(n), "", text) for n, text in enumerate(texts)])
        self.encode_queries = self.encoder.encode_queries

    def encode_passages(self, numbers) -> PassageViews:
        return self.encoder.encode_passages([self.passages[number] for number in numbers])


def _encoder_on_rank(rank: int, world: int, meeting: Path, out: Path, both: WithTokens) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    output = loss_and_gradients(both, share_of(rank, world), joined_loss("camvr"), PassSettings(chunk=3))
    average_gradients(both.encoder.parameters())
    np.savez(out, loss=output.terms.total, **{key: g.numpy() for key, g in gradients(both.encoder).items()})
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_train_a_real_encoder_as_one_process_does(results, tiny):
    """Viewers before snippets, gradients in chunks, float32: every parameter's gradient, to rounding."""
    both = WithTokens(tiny("bert"))
    views = both.encode_passages(range(PASSAGES))
    queries = both.encode_queries([str(q) for q in range(QUESTIONS)])
    terms = joined_loss("camvr")(queries, views.views_PVD, views.mask_PV)
    terms.total.backward()
    expected = gradients(both.encoder)
    assert any("viewer" in name for name in expected)
    for rank in range(2):
        actual = np.load(results / f"encoder-{rank}-of-2.npz", allow_pickle=False)
        assert math.isclose(actual["loss"], terms.total.item(), rel_tol=1e-5)
        for name, gradient in expected.items():
            most = float(gradient.abs().max())
            np.testing.assert_allclose(actual[name], gradient.numpy(), rtol=0, atol=1e-4 * most + 1e-7, err_msg=name)


@pytest.mark.parametrize("name", LOSSES[:-1])
@pytest.mark.parametrize("chunk", [0, 1, 3, 100])
def test_one_process_in_any_chunks_is_plain_autograd(name, chunk):
    loss, expected = reference(name)
    encoder = ToyEncoder()
    output = loss_and_gradients(encoder, share_of(0, 1), joined_loss(name), PassSettings(chunk=chunk), scale=4.0)
    assert math.isclose(output.terms.total.item(), loss.item(), rel_tol=1e-12)
    assert_same(gradients(encoder), {key: 4 * gradient for key, gradient in expected.items()})


@pytest.mark.parametrize("still_side", ["question", "passage"])
def test_a_loss_that_holds_one_side_still_moves_only_the_other_in_chunks(still_side):
    def loss(queries_QD, views_PVD, mask_PV):
        if still_side == "question":
            queries_QD = queries_QD.detach()
        else:
            views_PVD = views_PVD.detach()
        return joined_loss("own")(queries_QD, views_PVD, mask_PV)

    results = []
    for chunk in (0, 3):
        encoder = ToyEncoder()
        loss_and_gradients(encoder, share_of(0, 1), loss, PassSettings(chunk=chunk))
        results.append(gradients(encoder))
        assert results[-1] and not any(name.startswith(still_side) for name in results[-1])
    assert_same(*results)


def test_cached_passes_draw_the_same_dropout_twice():
    """Dropout drawn by chunk: the cached gradient is that of one graph over the same chunks."""
    encoder = ToyEncoder(dropout=0.4)
    share, settings = share_of(0, 1), PassSettings(chunk=3, seed=5, step=11)
    loss_and_gradients(encoder, share, joined_loss("mvr"), settings)
    cached_gradients = {name: gradient.clone() for name, gradient in gradients(encoder).items()}
    encoder.zero_grad()

    from mvr_ray.core.learning.training import _PASSAGES, _QUESTIONS, _passes

    queries_QD = torch.cat([encode() for encode in _passes(encoder, _QUESTIONS, share, settings)])
    passes = [encode() for encode in _passes(encoder, _PASSAGES, share, settings)]
    terms = joined_loss("mvr")(
        queries_QD, torch.cat([v.views_PVD for v in passes]), torch.cat([v.mask_PV for v in passes])
    )
    terms.total.backward()
    assert_same(cached_gradients, gradients(encoder))


def test_dropout_is_a_function_of_seed_step_and_rank(monkeypatch):
    def gradient(**settings):
        encoder = ToyEncoder(dropout=0.4)
        torch.rand(3)
        loss_and_gradients(encoder, share_of(0, 1), joined_loss("mvr"), PassSettings(**settings))
        return gradients(encoder)["question.weight"]

    assert torch.equal(gradient(seed=1, step=2), gradient(seed=1, step=2))
    assert not torch.equal(gradient(seed=1, step=2), gradient(seed=1, step=3))
    assert not torch.equal(gradient(seed=1, step=2), gradient(seed=2, step=2))
    first = gradient(seed=1, step=2)
    monkeypatch.setattr(training, "rank", lambda: 1)
    assert not torch.equal(gradient(seed=1, step=2), first)


def test_the_winning_view_is_the_best_that_is_there():
    encoder = ToyEncoder()
    output = loss_and_gradients(encoder, share_of(0, 1), joined_loss("mvr"), PassSettings())
    positive_Q = torch.arange(QUESTIONS)
    for question, view in enumerate(winning_views(output, positive_Q).tolist()):
        scores = {
            v: float(output.queries_QD[question] @ output.views_PVD[question, v])
            for v in range(VIEWS)
            if output.mask_PV[question, v]
        }
        assert view == max(scores, key=scores.__getitem__)


@pytest.mark.parametrize(
    ("total", "share", "factors"),
    [
        (4, 0.0, [1.0, 0.75, 0.5, 0.25]),
        (4, 0.5, [0.5, 1.0, 1.0, 0.5]),
        (1, 0.1, [1.0]),
        (2, 1.0, [0.5, 1.0]),
    ],
)
def test_the_rate_climbs_to_one_and_falls_in_straight_lines(total, share, factors):
    assert [lr_factor(step, total, share) for step in range(total)] == factors


def main(folder: Path, backbone: str) -> None:
    """Run the ranks of each number of processes, and of an encoder; each is a fork that writes a file."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    encoder_on_rank = partial(_encoder_on_rank, both=WithTokens(backbone))
    for name, world, work in (*(("toy", world, _on_rank) for world in WORLDS), ("encoder", 2, encoder_on_rank)):
        arguments = (
            (n, world, folder / f"{name}-{world}", folder / f"{name}-{n}-of-{world}.npz") for n in range(world)
        )
        ranks = [context.Process(target=work, args=own) for own in arguments]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
