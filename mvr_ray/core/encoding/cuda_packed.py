"""Passages without padding on a GPU: a batch in one row of tokens, and attention inside each text alone.

    ids       t_1 .. t_a | u_1 .. u_b | ...      texts one after the other, bounds_B+1 where each begins
    attention softmax(q k / sqrt(d)) v           of each text by itself: flash attention with those bounds on a GPU,
                                                 elsewhere, or in float32, text by text as torch has it
    view      mean over its tokens' states       tokens sorted by view on the host, then one segmented sum in float32

Nothing is multiplied that is not a token, so the cost follows the tokens and texts need no sorting by length. The
result is `DualEncoder.embed_passages` up to rounding: 1e-5 in float32, and what half the bits cost in bfloat16.

Shapes: T tokens of a batch, B texts, P passages, V views per passage, D dimension, H heads.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from mvr_ray.core.encoder import DualEncoder, EmbeddedViews
from mvr_ray.core.encoding.backbones import Tower
from mvr_ray.core.views import TokenizedPassage
from mvr_ray.errors import EncoderError
from mvr_ray.types import FloatArray, IntArray

ATTENTION = "mvr_ray_packed"
"""The name by which transformers knows this attention."""

HALVES = (torch.bfloat16, torch.float16)


class Packed(NamedTuple):
    """A batch on the host: plain arrays, so that any process can make one.

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


def pack(encoder: DualEncoder, tokenized: Sequence[TokenizedPassage]) -> Packed:
    """One batch, at least one passage, of an encoder's `tokenize_passages`."""
    texts: Sequence[TokenizedPassage] = tokenized
    if encoder.spec.has_pieces:
        texts = [row for passage in tokenized for row in encoder.layout.rows(passage)]
    view_T = np.concatenate([passage.view_T for passage in tokenized]).astype(np.int64)
    passage_T = np.repeat(np.arange(len(tokenized)), [passage.num_tokens for passage in tokenized])
    slot_T = np.where(view_T < 0, -1, passage_T * encoder.num_views + view_T)
    order_M = np.argsort(slot_T, kind="stable")[int((slot_T < 0).sum()) :]
    count = np.bincount(slot_T[order_M], minlength=len(tokenized) * encoder.num_views)
    return Packed(
        np.concatenate([passage.input_ids for passage in tokenized]).astype(np.int64),
        np.concatenate([passage.position_ids for passage in tokenized]).astype(np.int64),
        np.cumsum([0, *(text.num_tokens for text in texts)]).astype(np.int32),
        order_M,
        count.reshape(len(tokenized), encoder.num_views),
    )


class UnpaddedEncoder:
    """The passage side of an encoder, for indexing. A copy of its weights in `precision` on `device`."""

    def __init__(self, encoder: DualEncoder, precision: torch.dtype = torch.bfloat16, device: str = "cuda") -> None:
        """Raises EncoderError for a backbone whose attention cannot be told where texts end."""
        tower = encoder.passage_tower
        backbone: Any = tower.backbone
        if not getattr(backbone, "_supports_attention_backend", False):
            raise EncoderError(
                f"backbone type {backbone.config.model_type!r} cannot be read without padding: its attention is its "
                f"own; embed with DualEncoder.embed_passages"
            )
        self.encoder, self.normalize = encoder, encoder.spec.normalize
        self.num_views, self.dimension = encoder.num_views, encoder.dimension
        self.device, self.precision = torch.device(device), precision
        self.tower: Tower = copy.deepcopy(tower).to(device=self.device, dtype=precision).eval()
        own: Any = self.tower.backbone
        own.set_attn_implementation(ATTENTION)

    def embed_passages(self, tokenized: Sequence[TokenizedPassage]) -> EmbeddedViews:
        """Views of one batch, as `DualEncoder.embed_passages` gives them."""
        [embedded] = self.embed([pack(self.encoder, tokenized)])
        return embedded

    @torch.inference_mode()
    def encode(self, packed: Packed) -> tuple[Tensor, Tensor]:
        """views_PVD float32 on the device, zero where missing, and mask_PV. Returns before a GPU is done."""
        ids_T, positions_T, bounds, order_M, count_PV = map(self._put, packed)
        states_TD = self.tower(
            ids_T[None],
            positions_T[None],
            torch.ones_like(ids_T[None], dtype=torch.bool),
            bounds=bounds,
            ends=packed.bounds.tolist(),
            longest=int(np.diff(packed.bounds).max()),
        )[0]
        members_MD = states_TD.index_select(0, order_M).float()
        flat_count = count_PV.flatten()
        sums = torch.segment_reduce(members_MD, "sum", lengths=flat_count, axis=0, unsafe=True, initial=0)
        views_PVD = (sums / flat_count.clamp(min=1)[:, None]).view(*count_PV.shape, -1)
        if self.normalize:
            views_PVD = F.normalize(views_PVD, dim=-1)
        return views_PVD, count_PV > 0

    def _put(self, array: IntArray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

    def embed(self, batches: Iterable[Packed]) -> Iterator[EmbeddedViews]:
        """The views of each batch on the host. A batch is fetched when the next one has been handed to the device."""
        before: tuple[Tensor, Tensor] | None = None
        for packed in batches:
            current = self.encode(packed)
            if before is not None:
                yield _fetched(before)
            before = current
        if before is not None:
            yield _fetched(before)


def filled_batches(lengths: Sequence[int], budget: int) -> list[range]:
    """Texts in their order, in batches of at most `budget` tokens; a longer text has a batch of its own."""
    batches: list[range] = []
    start = taken = 0
    for row, length in enumerate(lengths):
        if row > start and taken + length > budget:
            batches.append(range(start, row))
            start, taken = row, 0
        taken += length
    if lengths:
        batches.append(range(start, len(lengths)))
    return batches


def packed_attention(
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
    """Attention of each text by itself, as transformers calls it. [1, T, H, E], E the width of a head."""
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


def _fetched(views: tuple[Tensor, Tensor]) -> EmbeddedViews:
    views_PVD, mask_PV = views
    as_numpy: FloatArray = views_PVD.cpu().numpy()
    return EmbeddedViews(as_numpy, mask_PV.cpu().numpy())


AttentionInterface.register(ATTENTION, packed_attention)
