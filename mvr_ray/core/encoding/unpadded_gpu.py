"""Encode passages without padding on a GPU: a batch is one row of tokens, and attention stays within each text.

    ids       t_1 .. t_a | u_1 .. u_b | ...      texts one after the other, starts in bounds_B+1
    attention softmax(q k / sqrt(d)) v           within each text: flash attention with those bounds on a GPU,
                                                 elsewhere, or in float32, torch's attention text by text
    view      mean over its tokens' states       tokens sorted by view on the host, then one segmented sum in float32

Only tokens are multiplied, so the cost is proportional to tokens and texts need no sorting by length. The views equal
those of the padded pass up to rounding: 1e-5 in float32, and the precision of half the bits in bfloat16.

Shapes: T tokens of a batch, B = P texts, V views of each, D dimension, H heads.
"""

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AttentionInterface

from mvr_ray.core.encoding.tower import KINDS, Tower
from mvr_ray.core.encoding.unpadded_cpu import Means
from mvr_ray.core.encoding.views import TokenizedPassage
from mvr_ray.types import IntArray

ATTENTION = "mvr_ray_packed"
"""Name of this attention in transformers."""

HALVES = (torch.bfloat16, torch.float16)


class FlatTokens(NamedTuple):
    """A batch on the host, as plain arrays that any process can build.

    ids_T, positions_T  int64
    bounds              int32 [B + 1], where each text begins
    order_M             int64, tokens that enter a view, sorted by passage and view
    count_PV            int64, how many tokens each view has, 0 where it is missing
    """

    ids_T: IntArray
    positions_T: IntArray
    bounds: IntArray
    order_M: IntArray
    count_PV: IntArray


def flatten_tokens(batch: Sequence[TokenizedPassage], num_views: int) -> FlatTokens:
    """Flatten a batch of at least one text."""
    view_T = np.concatenate([text.view_T for text in batch]).astype(np.int64)
    text_T = np.repeat(np.arange(len(batch)), [text.num_tokens for text in batch])
    slot_T = np.where(view_T < 0, -1, text_T * num_views + view_T)
    order_M = np.argsort(slot_T, kind="stable")[int((slot_T < 0).sum()) :]
    count = np.bincount(slot_T[order_M], minlength=len(batch) * num_views)
    return FlatTokens(
        np.concatenate([text.input_ids for text in batch]).astype(np.int64),
        np.concatenate([text.position_ids for text in batch]).astype(np.int64),
        np.cumsum([0, *(text.num_tokens for text in batch)]).astype(np.int32),
        order_M,
        count.reshape(len(batch), num_views),
    )


def supports_unpadded_gpu(backbone: Any) -> bool:
    """Whether its attention accepts the bounds of texts and covers a whole text: not causal or local attention."""
    return backbone.config.model_type in KINDS and getattr(backbone, "_supports_attention_backend", False)


class UnpaddedGpuTower:
    """A copy of a tower's current weights in `precision`, on the tower's device."""

    def __init__(self, tower: Tower, precision: torch.dtype = torch.bfloat16) -> None:
        self.tower: Tower = copy.deepcopy(tower).to(dtype=precision).eval()
        self.device = next(self.tower.parameters()).device
        backbone: Any = self.tower.backbone
        assert supports_unpadded_gpu(backbone), f"{backbone.config.model_type} has an attention of its own"
        backbone.set_attn_implementation(ATTENTION)

    @torch.no_grad()
    def views(self, batch: Sequence[TokenizedPassage], num_views: int) -> Means:
        """Average the states of each view's tokens, on the device, in float32. Returns before a GPU has finished."""
        flat = flatten_tokens(batch, num_views)
        order_M, count_PV = self._to_device(flat.order_M), self._to_device(flat.count_PV)
        states_TD = self._states(flat)
        members_MD = states_TD.index_select(0, order_M).float()
        flat_count = count_PV.flatten()
        sums = torch.segment_reduce(members_MD, "sum", lengths=flat_count, axis=0, unsafe=True, initial=0)
        return Means((sums / flat_count.clamp(min=1)[:, None]).view(*count_PV.shape, -1), count_PV)

    @torch.no_grad()
    def padded_states(self, batch: Sequence[TokenizedPassage]) -> Tensor:
        """Compute states_PTD in float32, zero on padding."""
        states_TD = self._states(flatten_tokens(batch, 1)).float()
        return pad_sequence(list(states_TD.split([text.num_tokens for text in batch])), batch_first=True)

    def _states(self, flat: FlatTokens) -> Tensor:
        ids_T, positions_T, bounds = map(self._to_device, flat[:3])
        return self.tower(
            ids_T[None],
            positions_T[None],
            torch.ones_like(ids_T[None], dtype=torch.bool),
            bounds=bounds,
            ends=flat.bounds.tolist(),
            longest=int(np.diff(flat.bounds).max()),
        )[0]

    def _to_device(self, array: IntArray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor


def varlen_attention(
    module: torch.nn.Module,
    query_1HTE: Tensor,
    key_1HTE: Tensor,
    value_1HTE: Tensor,
    attention_mask: Tensor | None,
    *,
    bounds: Tensor,
    ends: Sequence[int],
    longest: int,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute attention within each text, with the signature of transformers. [1, T, H, E], E the width of a head."""
    heads = [one[0].transpose(0, 1) for one in (query_1HTE, key_1HTE, value_1HTE)]
    if query_1HTE.device.type == "cuda" and query_1HTE.dtype in HALVES:
        from torch.nn.attention.varlen import varlen_attn

        flat = [one.contiguous() for one in heads]
        return varlen_attn(*flat, bounds, bounds, longest, longest, scale=scaling)[None], None  # pyrefly: ignore
    query, key, value = query_1HTE, key_1HTE, value_1HTE
    parts = []
    for low, high in pairwise(ends):
        of = slice(low, high)
        parts.append(F.scaled_dot_product_attention(query[:, :, of], key[:, :, of], value[:, :, of], scale=scaling))
    return torch.cat(parts, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, varlen_attention)
