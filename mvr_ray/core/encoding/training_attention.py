"""Compute attention in bfloat16 on a CPU with a backward pass of whole matrices.

    P = softmax(q k' / sqrt(d) + mask)                              o = P v
    dv = P' do,   dS = P * (do v' - rowsum(P * do v')),             dq = dS k / sqrt(d),   dk = dS' q / sqrt(d)

torch's own backward pass for bfloat16 took 570 ms of a step over 48 questions and 11 passages of up to 192 tokens, this
one 160 (torch 2.13, one core with AMX). Memory holds P of every layer for texts of at most `STORED_TOKENS` tokens, of
which a step took 0.88 of the time; of longer ones the backward pass computes it again.

Shapes: B texts, H heads, T tokens, E the width of a head.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION, REPLACED = "mvr_ray_training", "sdpa"
STORED_TOKENS = 256
"""P of 256 tokens takes under half the memory that the rest of a layer of MiniLM stores for the backward pass."""


@contextmanager
def training_attention(transformers: Sequence[Any]) -> Iterator[None]:
    """Replace torch's `scaled_dot_product_attention` by this attention in the transformers, within the block."""
    sdpa_models = [model for model in transformers if model.config._attn_implementation == REPLACED]
    for model in sdpa_models:
        model.set_attn_implementation(ATTENTION)
    try:
        yield
    finally:
        for model in sdpa_models:
            model.set_attn_implementation(REPLACED)


class MatrixAttention(torch.autograd.Function):
    """o_BHTE from q_BHTE, k_BHTE, v_BHTE and an additive mask or None."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        weights_BHTT = _weights(q, k, mask, scale)
        ctx.save_for_backward(q, k, v, mask, weights_BHTT if q.shape[2] <= STORED_TOKENS else None)
        ctx.scale = scale
        return weights_BHTT @ v

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mask, weights_BHTT = ctx.saved_tensors
        gradient_BHTE = gradients[0].contiguous()
        if weights_BHTT is None:
            weights_BHTT = _weights(q, k, mask, ctx.scale)
        scores_BHTT = torch._softmax_backward_data(gradient_BHTE @ v.mT, weights_BHTT, -1, q.dtype).mul_(ctx.scale)
        return scores_BHTT @ k, scores_BHTT.mT @ q, weights_BHTT.mT @ gradient_BHTE, None, None


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores_BHTT = (q * scale) @ k.mT
    return torch.softmax(scores_BHTT if mask is None else scores_BHTT.add_(mask), -1)


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature of transformers. torch handles other types than bfloat16, causal attention
    without a mask, keys shared among heads, and dropout."""
    is_causal = attention_mask is None and options.get("is_causal", getattr(module, "is_causal", True))
    if query.dtype != torch.bfloat16 or query.is_cuda or dropout or is_causal or key.shape != query.shape:
        settings = {"dropout": dropout, "scaling": scaling, **options}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)  # pyrefly: ignore
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = query.new_zeros(()).masked_fill(~attention_mask, torch.finfo(query.dtype).min)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = MatrixAttention.apply(query, key, value, attention_mask, scale)
    assert isinstance(output, Tensor)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
