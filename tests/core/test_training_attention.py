"""Attention in training: values and gradients equal torch's, for every kind of backbone, within its block alone."""

import math

import pytest
import torch
import torch.nn.functional as F

from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.core.learning.attention import ATTENTION, MatrixAttention, training_attention
from mvr_ray.core.learning.losses import dpr_loss
from mvr_ray.core.learning.training import PassSettings, RankInputs, loss_and_gradients
from mvr_ray.types import Passage

TEXTS = ["The river rises in the hills. It runs to the sea!", "Salt made the town rich.", "Boats came every day."]
QUESTIONS = ["where does the river rise", "what made the town rich", "when did boats come"]
KINDS = ("bert", "distilbert", "roberta", "mpnet", "modernbert", "qwen3")


@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize(("texts", "heads", "tokens", "width"), [(1, 1, 1, 4), (3, 2, 7, 8), (2, 12, 161, 32)])
def test_values_and_gradients_equal_torchs_own_in_float64(has_mask, texts, heads, tokens, width):
    rng = torch.Generator().manual_seed(tokens)
    q, k, v, given = (torch.randn(texts, heads, tokens, width, generator=rng, dtype=torch.float64) for _ in range(4))
    mask = None
    if has_mask:
        hidden_BT = torch.rand(texts, tokens, generator=rng) < 0.3
        hidden_BT[:, 0] = False
        mask = torch.zeros(texts, 1, 1, tokens, dtype=torch.float64).masked_fill(hidden_BT[:, None, None], -math.inf)
    inputs = [one.requires_grad_() for one in (q, k, v)]
    ours = MatrixAttention.apply(*inputs, mask, 0.3)
    torchs = F.scaled_dot_product_attention(*inputs, attn_mask=mask, scale=0.3)
    torch.testing.assert_close(ours, torchs, rtol=0, atol=1e-12)
    for own, other in zip(torch.autograd.grad(ours, inputs, given), torch.autograd.grad(torchs, inputs, given)):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_bfloat16_has_the_gradient_of_float32_up_to_its_rounding(tiny, kind):
    spec = EncoderSpec(strategy="mean", max_query_tokens=24, max_passage_tokens=64)
    encoder = DualEncoder.from_backbone(tiny(kind), spec).train()
    encoder.set_dropout(0.0)
    exact_N, plain_N = _gradient(encoder, torch.float32), _gradient(encoder, torch.bfloat16)
    before = [model.config._attn_implementation for model in encoder.transformers]
    with training_attention(encoder.transformers):
        used = {model.config._attn_implementation for model in encoder.transformers}
        assert used == {ATTENTION if name == "sdpa" else name for name in before}
        assert torch.equal(_gradient(encoder, torch.float32), exact_N), "float32 is left to torch"
        ours_N = _gradient(encoder, torch.bfloat16)
    assert [model.config._attn_implementation for model in encoder.transformers] == before
    far, plain_far = (float((one_N - exact_N).norm() / exact_N.norm()) for one_N in (ours_N, plain_N))
    assert 0 < far < 2 * plain_far


def test_attention_is_put_back_after_an_error(tiny):
    encoder = DualEncoder.from_backbone(tiny("bert"), EncoderSpec(strategy="mean"))
    with pytest.raises(KeyError), training_attention(encoder.transformers):
        raise KeyError
    assert {model.config._attn_implementation for model in encoder.transformers} == {"sdpa"}


def _gradient(encoder: DualEncoder, precision: torch.dtype) -> torch.Tensor:
    """Of a DPR step over three questions and their passages, float64 [N]."""
    encoder.zero_grad()
    tokenized = encoder.tokenize_passages([Passage(str(at), "", text) for at, text in enumerate(TEXTS)])
    share = RankInputs(QUESTIONS, tokenized, torch.ones(3, dtype=torch.bool))

    def loss(queries_QD, views_PVD, mask_PV):
        return dpr_loss(queries_QD, views_PVD, mask_PV, torch.arange(3), scale=20.0)

    loss_and_gradients(encoder, share, loss, PassSettings(0, precision))
    return torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None]).double()
