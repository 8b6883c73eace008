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
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from mvr_ray.core.encoding.tower import KINDS, Tower
from mvr_ray.core.encoding.unpadded_cpu import Means, view_members
from mvr_ray.core.encoding.views import TokenizedPassage
from mvr_ray.types import IntArray

ATTENTION = "mvr_ray_unpadded"
"""Name of this attention in transformers."""

HALVES = (torch.bfloat16, torch.float16)


def supports_unpadded_gpu(backbone: Any) -> bool:
    """Return whether its attention accepts the bounds of texts and covers a whole text: not causal or local
    attention."""
    is_known = backbone.config.model_type in KINDS and not getattr(backbone.config, "is_decoder", False)
    return is_known and getattr(backbone, "_supports_attention_backend", False)


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
        order_M, count_PV = map(self._to_device, view_members(batch, num_views))
        ids_T, positions_T = (
            self._to_device(np.concatenate(part).astype(np.int64))
            for part in zip(*((text.input_ids, text.position_ids) for text in batch))
        )
        ends = [0, *accumulate(text.num_tokens for text in batch)]
        states_TD = self.tower(
            ids_T[None],
            positions_T[None],
            torch.ones_like(ids_T[None], dtype=torch.bool),
            bounds=self._to_device(np.array(ends, np.int32)),
            ends=ends,
            longest=max(text.num_tokens for text in batch),
        )[0]
        members_MD = states_TD.index_select(0, order_M).float()
        count = count_PV.flatten()
        sums = torch.segment_reduce(members_MD, "sum", lengths=count, axis=0, unsafe=True, initial=0)
        return Means((sums / count.clamp(min=1)[:, None]).view(*count_PV.shape, -1), count_PV)

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
    parts = query_1HTE, key_1HTE, value_1HTE
    if query_1HTE.device.type == "cuda" and query_1HTE.dtype in HALVES:
        from torch.nn.attention.varlen import varlen_attn

        flat = [part[0].transpose(0, 1).contiguous() for part in parts]
        return varlen_attn(*flat, bounds, bounds, longest, longest, scale=scaling)[None], None  # pyrefly: ignore
    texts = ([part[:, :, low:high] for part in parts] for low, high in pairwise(ends))
    outputs = [F.scaled_dot_product_attention(q, k, v, scale=scaling) for q, k, v in texts]
    return torch.cat(outputs, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, varlen_attention)
