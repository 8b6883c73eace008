"""Measure how the attention of a passage's views differs, in the last layer.

A view is the mean over its tokens' states, so its attention alpha is the mean over the same tokens and over the heads.
For a viewer, which is one token, this is the row that CAMVR compares. Attention covers all tokens of the passage.

    D(i, j) = sum_l alpha_jl log(alpha_jl / alpha_il) = KL(alpha_j || alpha_i)        (CAMVR, eq. 14)

Shapes: P passages, V views per passage, T tokens, H heads.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mvr_ray.core.encoding.encoder import DualEncoder
from mvr_ray.core.encoding.padded import pad
from mvr_ray.core.encoding.views import TokenizedPassage
from mvr_ray.errors import EncoderError
from mvr_ray.types import FloatArray

_FLOOR = 1e-12
_AT_ONCE = 8


class ViewAttention(NamedTuple):
    """Attention of one passage: each row of attention_VT is a distribution over its tokens; mask_V marks views."""

    attention_VT: FloatArray
    mask_V: np.ndarray


def view_attention(encoder: DualEncoder, batch: Sequence[TokenizedPassage]) -> list[ViewAttention]:
    """Compute the last layer's attention of every view of each passage, float64.

    Raises EncoderError for a passage of several sequences: such views attend to different tokens.
    """
    if any(len(encoder.rows(passage)) > 1 for passage in batch):
        raise EncoderError(
            f"strategy {encoder.spec.strategy!r} reads a passage in several sequences, so its views attend to "
            f"different texts; attention is compared where one sequence has the whole passage"
        )
    tower = encoder.passage_tower
    backbone: Any = tower.backbone
    implementation = backbone.config._attn_implementation
    backbone.set_attn_implementation("eager")  # the fast kernels do not return attention weights
    try:
        results: list[ViewAttention] = []
        for start in range(0, len(batch), _AT_ONCE):
            part = batch[start : start + _AT_ONCE]
            tokens = pad(tower, part)
            with encoder.inference():
                output = tower.run(tokens.ids_PT, tokens.positions_PT, tokens.real_PT, output_attentions=True)
            mean_PTT = output.attentions[-1].double().mean(1).cpu().numpy()
            for mean_TT, passage in zip(mean_PTT, part):
                member_VT = passage.view_T == np.arange(encoder.num_views)[:, None]
                if encoder.spec.whole_view:
                    member_VT[0] = passage.view_T >= 0
                count_V, size = member_VT.sum(1), passage.num_tokens
                attention_VT = member_VT @ mean_TT[:size, :size] / np.maximum(count_V, 1)[:, None]
                results.append(ViewAttention(attention_VT, count_V > 0))
        return results
    finally:
        backbone.set_attn_implementation(implementation)


def attention_kl(passage: ViewAttention) -> FloatArray:
    """Compute D(i, j) of CAMVR eq. 14 for one passage. float64 [V, V], row i, column j, NaN without both views.

    D(i, j) is KL(view j || view i), in nats: the column's view comes first. A share below 1e-12 counts as 1e-12.
    """
    attention_VT, mask_V = passage
    total_V = np.where(mask_V, attention_VT.sum(1), 1.0)
    share_VT = np.maximum(attention_VT / total_V[:, None], _FLOOR)
    log_VT = np.log(share_VT)
    divergence_VV = (share_VT * log_VT).sum(1) - log_VT @ share_VT.T
    return np.where(mask_V[:, None] & mask_V, divergence_VV, np.nan)


def attention_kl_table(tables_PVV: Sequence[FloatArray]) -> FloatArray:
    """Average the `attention_kl` of passages, each pair of views over the passages that have both. float64 [V, V].

    NaN where no passage has both. All zero: all views have the same attention.
    """
    stacked_PVV = np.asarray(tables_PVV)
    count_VV = np.isfinite(stacked_PVV).sum(axis=0)
    return np.where(count_VV > 0, np.nansum(stacked_PVV, axis=0) / np.maximum(count_VV, 1), np.nan)


def mean_attention_kl(table_VV: FloatArray) -> float | None:
    """Average D(i, j) over the pairs i < j, the triangle that CAMVR's table 3 prints; None without a measured pair.

    The other triangle holds the same pairs of views with the arguments of KL exchanged, and is not in the mean.
    """
    pairs = table_VV[np.triu_indices(len(table_VV), 1)]
    return float(np.nanmean(pairs)) if np.isfinite(pairs).any() else None
