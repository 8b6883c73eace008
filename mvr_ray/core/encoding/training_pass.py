"""Run a tower in training in bfloat16 on a CPU: the layers of `unpadded_cpu`, with a gradient.

Attention runs over groups of texts of similar length; everything else runs over the tokens of all groups at once, so
a layer is four products for any lengths, and its weights are rounded to bfloat16 once. States between the products stay
in float32, as under autocast, so the gradient equals that of the padded pass up to rounding.

Shapes: N tokens of all groups, P texts of a group, T tokens of its longest, H heads, D dimension, E = D / H.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mvr_ray.core.encoding.length_batches import token_batches
from mvr_ray.core.encoding.padded import PaddedTokens, join_rows, mean_states, pad
from mvr_ray.core.encoding.tower import Tower
from mvr_ray.core.encoding.training_attention import MatrixAttention
from mvr_ray.core.encoding.unpadded_cpu import Means, layer_norm, supports_unpadded_cpu
from mvr_ray.core.encoding.views import TokenizedPassage

GROUP_TOKENS = 512
ROW_MULTIPLE = 128
"""Products have a multiple of this many rows: torch compiles one for each new number of rows, which took 8 % of a step
over 48 questions and their passages (torch 2.13, one core with AMX)."""


def supports_training_pass(tower: Tower) -> bool:
    """Return whether this pass replaces the padded one: under autocast to bfloat16, for the layers of BERT, without
    dropout and without gradient checkpointing."""
    backbone: Any = tower.backbone
    return (
        torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and supports_unpadded_cpu(backbone)
        and not backbone.is_gradient_checkpointing
        and not (tower.training and any(one.p for one in backbone.modules() if isinstance(one, torch.nn.Dropout)))
    )


def training_views(
    tower: Tower, batch: Sequence[TokenizedPassage], num_views: int, dtype: torch.dtype = torch.bfloat16
) -> Means:
    """Average the states of each view's tokens, differentiable. Products are computed in `dtype`."""
    groups = token_batches([text.num_tokens for text in batch], GROUP_TOKENS)
    tokens = [pad(tower, [batch[row] for row in rows]) for rows in groups]
    with torch.autocast("cpu", enabled=False):
        states_ND = _states(tower, tokens, dtype)
        own = states_ND.split([group.ids_PT.numel() for group in tokens])
        parts = [mean_states(group, part.view(*group.ids_PT.shape, -1), num_views) for group, part in zip(tokens, own)]
    return Means(*(join_rows(part, groups) for part in zip(*parts)))


def _states(tower: Tower, tokens: Sequence[PaddedTokens], dtype: torch.dtype) -> Tensor:
    backbone: Any = tower.backbone
    table, eps, heads = backbone.embeddings, backbone.config.layer_norm_eps, backbone.config.num_attention_heads
    ids_N, positions_N = (torch.cat([own.flatten() for own in part]) for part in list(zip(*tokens))[:2])
    num_tokens = len(ids_N)
    num_added = -num_tokens % ROW_MULTIPLE
    ids_N, positions_N = F.pad(ids_N, (0, num_added)), F.pad(positions_N, (0, num_added))
    norm = partial(layer_norm, eps=eps)
    masks = [_mask(group, dtype) for group in tokens]

    def product(x_ND: Tensor, *modules: Any) -> Tensor:
        weight = torch.cat([module.weight.to(dtype) for module in modules])
        return F.linear(x_ND.to(dtype), weight, torch.cat([module.bias.to(dtype) for module in modules]))

    position_D = table.position_embeddings.weight + table.token_type_embeddings.weight[0]
    x_ND = norm(tower.embed_ids(ids_N) + position_D[positions_N], table.LayerNorm)
    for layer in backbone.encoder.layer:
        own = layer.attention.self
        qkv_NE = product(x_ND, own.query, own.key, own.value)
        parts = qkv_NE.split([*(group.ids_PT.numel() for group in tokens), num_added])
        outputs = (_attend(part, len(own.ids_PT), heads, mask) for part, own, mask in zip(parts, tokens, masks))
        output_ND = torch.cat([*outputs, x_ND.new_zeros(num_added, x_ND.shape[1], dtype=dtype)])
        x_ND = norm(x_ND + product(output_ND, layer.attention.output.dense), layer.attention.output.LayerNorm)
        up_ND = F.gelu(product(x_ND, layer.intermediate.dense))
        x_ND = norm(x_ND + product(up_ND, layer.output.dense), layer.output.LayerNorm)
    return x_ND[:num_tokens]


def _mask(tokens: PaddedTokens, dtype: torch.dtype) -> Tensor | None:
    """Build the additive mask of a group's keys; None where nothing is padded."""
    if bool(tokens.real_PT.all()):
        return None
    return torch.zeros(tokens.real_PT.shape, dtype=dtype).masked_fill(~tokens.real_PT, -torch.inf)[:, None, None]


def _attend(qkv_NE: Tensor, num_texts: int, heads: int, mask: Tensor | None) -> Tensor:
    q, k, v = qkv_NE.view(num_texts, -1, 3, heads, qkv_NE.shape[1] // (3 * heads)).permute(2, 0, 3, 1, 4)
    output = MatrixAttention.apply(q, k, v, mask, q.shape[-1] ** -0.5)
    assert isinstance(output, Tensor)
    return output.transpose(1, 2).reshape(len(qkv_NE), -1)
