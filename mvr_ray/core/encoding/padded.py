"""Run a tower over padded texts: any backbone, with a gradient, on any device. The tests compare other passes with it.

Shapes: P texts, T tokens of the longest, V views of each, D dimension.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mvr_ray.core.encoding.tower import Tower
from mvr_ray.core.encoding.unpadded_cpu import Means
from mvr_ray.core.encoding.views import TokenizedPassage


class PaddedTokens(NamedTuple):
    """Token ids, position ids, the view that averages each token (-1: none), and which tokens are real."""

    ids_PT: Tensor
    positions_PT: Tensor
    views_PT: Tensor
    real_PT: Tensor


def pad(tower: Tower, batch: Sequence[TokenizedPassage]) -> PaddedTokens:
    """Pad texts to the longest, on the tower's device."""
    shape = (len(batch), max(passage.num_tokens for passage in batch))
    ids = np.full(shape, tower.pad_id, np.int64)
    positions = np.full(shape, max(0, tower.first_position - 1), np.int64)
    views = np.full(shape, -1, np.int64)
    real = np.zeros(shape, bool)
    for row, passage in enumerate(batch):
        end = passage.num_tokens
        ids[row, :end], positions[row, :end], views[row, :end] = passage
        real[row, :end] = True
    device = next(tower.parameters()).device
    return PaddedTokens(*(torch.from_numpy(array).to(device) for array in (ids, positions, views, real)))


def padded_views(tower: Tower, batch: Sequence[TokenizedPassage], num_views: int) -> Means:
    """Average the states of each view's tokens, differentiable."""
    tokens = pad(tower, batch)
    return mean_states(tokens, tower(tokens.ids_PT, tokens.positions_PT, tokens.real_PT), num_views)


def mean_states(tokens: PaddedTokens, states_PTD: Tensor, num_views: int) -> Means:
    """Average the states of each view's tokens."""
    member_PVT = tokens.views_PT[:, None, :] == torch.arange(num_views, device=states_PTD.device)[:, None]
    count_PV = member_PVT.sum(-1)
    with torch.autocast(states_PTD.device.type, enabled=False):
        weights_PVT = member_PVT / count_PV.clamp(min=1)[..., None]
        return Means(torch.bmm(weights_PVT, states_PTD.float()), count_PV)


def join_rows(parts: Sequence[Tensor], groups: Sequence[Sequence[int]]) -> Tensor:
    """Concatenate the results of groups of rows, in order of row."""
    rows = torch.cat(list(parts))
    return rows[torch.from_numpy(np.argsort(np.concatenate(groups))).to(rows.device)]
