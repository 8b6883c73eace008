"""Find the best span of tokens in a window of text, and compute the loss that trains a model to find it.

    score(s, e)  = start_s + end_e                                          s <= e < s + L, both tokens of the text
    log p(s, e)  = log softmax(start)_s + log softmax(end)_e                over the text's tokens and the null token
    loss         = -log p(s*, e*) / 2                                       (null, null) where the window has no answer

The null token is [CLS] (Devlin et al. 2019, section 4.3). The softmax excludes all other tokens: the question,
separators, padding.

Shapes: F windows, T tokens; L the most tokens of an answer.
"""

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from mvr_ray.types import FloatArray, IntArray

NOWHERE = -1


class BestSpans(NamedTuple):
    """The best span of each window, both ends included; (-1, -1) with score -inf where a window has no text."""

    start_F: IntArray
    end_F: IntArray
    score_F: FloatArray


def best_spans(start_FT: FloatArray, end_FT: FloatArray, text_FT: NDArray[np.bool_], max_tokens: int) -> BestSpans:
    """Find the span of largest score among those with at most `max_tokens` tokens of the text, which is contiguous.

    Equal scores: the earlier start, then the shorter span.
    """
    start_FT = np.where(text_FT, np.asarray(start_FT, np.float64), -np.inf)
    end_FT = np.where(text_FT, np.asarray(end_FT, np.float64), -np.inf)
    best_FT = start_FT + end_FT
    more_FT = np.zeros(best_FT.shape, np.int64)
    for more in range(1, min(max_tokens, best_FT.shape[1])):
        longer_FT = start_FT[:, :-more] + end_FT[:, more:]
        better_FT = longer_FT > best_FT[:, :-more]
        best_FT[:, :-more] = np.where(better_FT, longer_FT, best_FT[:, :-more])
        more_FT[:, :-more] = np.where(better_FT, more, more_FT[:, :-more])
    rows_F = np.arange(len(best_FT))
    start_F = best_FT.argmax(axis=1)
    score_F, end_F = best_FT[rows_F, start_F], start_F + more_FT[rows_F, start_F]
    has_text_F = score_F > -np.inf
    return BestSpans(np.where(has_text_F, start_F, NOWHERE), np.where(has_text_F, end_F, NOWHERE), score_F)


def span_losses(start_FT: Tensor, end_FT: Tensor, candidate_FT: Tensor, start_F: Tensor, end_F: Tensor) -> Tensor:
    """Compute loss_F of windows whose true span has these ends; both must be candidates: text or null tokens."""
    excluded_FT = ~candidate_FT
    losses = (
        F.cross_entropy(logits_FT.masked_fill(excluded_FT, -torch.inf), target_F, reduction="none")
        for logits_FT, target_F in ((start_FT, start_F), (end_FT, end_F))
    )
    return sum(losses, start=torch.zeros((), dtype=start_FT.dtype, device=start_FT.device)) / 2


def log_shares(logits_FT: FloatArray, candidate_FT: NDArray[np.bool_]) -> FloatArray:
    """Compute log softmax over the candidates, in float64; -inf elsewhere. Every window needs a candidate."""
    logits_FT = np.where(candidate_FT, np.asarray(logits_FT, np.float64), -np.inf)
    logits_FT -= logits_FT.max(axis=1, keepdims=True)
    with np.errstate(divide="ignore"):
        return logits_FT - np.log(np.exp(logits_FT).sum(axis=1, keepdims=True))


def tokens_of(starts: IntArray, stops: IntArray, start: int, stop: int) -> tuple[int, int]:
    """Find the first and last token that share a character with `start` up to `stop`; (-1, -1) where none does.

    `starts` and `stops` are the tokens' characters, in order.
    """
    first = int(np.searchsorted(stops, start, side="right"))
    last = int(np.searchsorted(starts, stop, side="left")) - 1
    return (first, last) if first <= last else (NOWHERE, NOWHERE)
