"""Attention in training: values and gradients equal torch's, for every kind of backbone, within its block alone."""

import math

import pytest
import torch
import torch.nn.functional as F

from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.core.encoding.padded import padded_views
from mvr_ray.core.encoding.training_attention import ATTENTION, MatrixAttention, training_attention
from mvr_ray.core.encoding.training_pass import supports_training_pass, training_views
from mvr_ray.core.learning.losses import dpr_loss
from mvr_ray.core.learning.training import PassSettings, RankInputs, loss_and_gradients
from mvr_ray.types import Passage

TEXTS = ["The river rises in the hills. It runs to the sea!", "Salt made the town rich.", "Boats came every day."]
QUESTIONS = ["where does the river rise", "what made the town rich", "when did boats come"]
KINDS = ("bert", "distilbert", "roberta", "mpnet", "modernbert", "qwen3")


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize(
    ("texts", "heads", "tokens", "width"), [(1, 1, 1, 4), (3, 2, 7, 8), (2, 12, 161, 32), (1, 2, 270, 8)]
)
def test_values_and_gradients_equal_torchs_own_in_float64(has_mask, texts, heads, tokens, width):
    rng = torch.Generator().manual_seed(tokens)
    q, k, v, grad = (torch.randn(texts, heads, tokens, width, generator=rng, dtype=torch.float64) for _ in range(4))
    mask = None
    if has_mask:
        hidden_BT = torch.rand(texts, tokens, generator=rng) < 0.3
        hidden_BT[:, 0] = False
        mask = torch.zeros(texts, 1, 1, tokens, dtype=torch.float64).masked_fill(hidden_BT[:, None, None], -math.inf)
    inputs = [one.requires_grad_() for one in (q, k, v)]
    ours = MatrixAttention.apply(*inputs, mask, 0.3)
    torchs = F.scaled_dot_product_attention(*inputs, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(ours, torchs, rtol=0, atol=1e-12)
    for own, other in zip(torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(torchs, inputs, grad)):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_bfloat16_has_the_gradient_of_float32_up_to_its_rounding(tiny, kind):
    spec = EncoderSpec(strategy="mean", max_query_tokens=24, max_passage_tokens=64)
    encoder = DualEncoder.from_backbone(tiny(kind), spec).train()
    encoder.set_dropout(0.0)
    exact_TN, plain_TN = _gradients(encoder, torch.float32), _gradients(encoder, torch.bfloat16)
    before = [model.config._attn_implementation for model in encoder.transformers]
    with training_attention(encoder.transformers):
        implementations = {model.config._attn_implementation for model in encoder.transformers}
        assert implementations == {ATTENTION if name == "sdpa" else name for name in before}
        assert torch.equal(_gradients(encoder, torch.float32), exact_TN), "float32 is left to torch"
        ours_TN = _gradients(encoder, torch.bfloat16)
    assert [model.config._attn_implementation for model in encoder.transformers] == before
    far, plain_far = (
        float(((one_TN - exact_TN).norm(dim=1) / exact_TN.norm(dim=1)).mean()) for one_TN in (ours_TN, plain_TN)
    )
    assert 0 < far < 2 * plain_far


@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta"])
@pytest.mark.parametrize("strategy", ["mean", "snippet_means", "viewers", "first_k"])
def test_the_training_pass_has_the_views_and_the_gradient_of_the_padded_pass(tiny, kind, strategy):
    """In float32, of texts of many lengths in one group and in many."""
    encoder = DualEncoder.from_backbone(tiny(kind), EncoderSpec(strategy=strategy, num_views=3, max_passage_tokens=64))
    texts = [" ".join(TEXTS)[: 9 + 7 * at] for at in range(20)]
    passages = encoder.tokenize_passages([Passage(str(at), "", text) for at, text in enumerate(texts)])
    tower, results = encoder.passage_tower, []
    for views in (padded_views(tower, passages, 3), training_views(tower, passages, 3, torch.float32)):
        encoder.zero_grad()
        weights = torch.randn(views.views_PVD.shape, generator=torch.Generator().manual_seed(1))
        (views.views_PVD * weights).sum().backward()
        gradients = {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}
        results.append((views, gradients))
    (expected, gradients), (ours, own_gradients) = results
    assert torch.equal(ours.count_PV, expected.count_PV)
    torch.testing.assert_close(ours.views_PVD, expected.views_PVD, atol=5e-6, rtol=0)
    assert set(own_gradients) == set(gradients)
    whole = math.hypot(*(float(gradient.norm()) for gradient in gradients.values()))
    for name, gradient in gradients.items():
        assert float((own_gradients[name] - gradient).norm()) < 2e-6 * whole, name


def test_batches_of_any_lengths_have_products_of_few_shapes(tiny, monkeypatch):
    encoder = DualEncoder.from_backbone(tiny("bert"), EncoderSpec(strategy="mean", max_passage_tokens=64))
    shapes, linear = set(), F.linear
    monkeypatch.setattr(F, "linear", lambda x, *own: shapes.add(x.shape) or linear(x, *own))
    for length in range(1, 25):
        text = " ".join(TEXTS)[: 3 * length]
        passages = encoder.tokenize_passages([Passage(str(at), "", text) for at in range(length)])
        training_views(encoder.passage_tower, passages, 1, torch.float32)
    assert len({rows for rows, _ in shapes}) < 10


def test_the_training_pass_is_taken_for_berts_layers_in_bfloat16_without_dropout(tiny):
    support = {}
    for kind in ("bert", "mpnet", "distilbert"):
        encoder = DualEncoder.from_backbone(tiny(kind), EncoderSpec(strategy="mean")).train()
        encoder.set_dropout(0.0)
        with torch.autocast("cpu", torch.bfloat16):
            support[kind] = supports_training_pass(encoder.passage_tower)
            encoder.set_dropout(0.1)
            assert not supports_training_pass(encoder.passage_tower)
        assert not supports_training_pass(encoder.eval().passage_tower), "float32"
    assert support == {"bert": True, "mpnet": False, "distilbert": False}


def test_attention_is_put_back_after_an_error(tiny):
    encoder = DualEncoder.from_backbone(tiny("bert"), EncoderSpec(strategy="mean"))
    with pytest.raises(KeyError), training_attention(encoder.transformers):
        raise KeyError
    assert {model.config._attn_implementation for model in encoder.transformers} == {"sdpa"}


def _gradients(encoder: DualEncoder, precision: torch.dtype) -> torch.Tensor:
    """Of a DPR step over three questions and their passages, float64 [T, N]; in each the texts begin with another word,
    since the rounding error of one step varies as much as twofold."""
    words = " ".join(TEXTS).lower().split()
    return torch.stack([_gradient(encoder, precision, word) for word in words[:8]])


def _gradient(encoder: DualEncoder, precision: torch.dtype, word: str) -> torch.Tensor:
    """float64 [N]."""
    encoder.zero_grad()
    passages = encoder.tokenize_passages([Passage(str(at), "", f"{word} {text}") for at, text in enumerate(TEXTS)])
    share = RankInputs(QUESTIONS, passages, torch.ones(3, dtype=torch.bool), 3)

    def loss(queries_QD, views_PVD, mask_PV):
        return dpr_loss(queries_QD, views_PVD, mask_PV, torch.arange(3), scale=20.0)

    loss_and_gradients(encoder, share, loss, PassSettings(0, precision))
    return torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None]).double()
