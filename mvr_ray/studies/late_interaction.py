"""Score by late interaction (ColBERT) and by centroids (DRPQ), for comparison with multi-view scoring.

    late interaction   f(q, p) = sum_i max_j <q_i, p_j>       over all tokens of question and passage
    centroids          views = k-means centroids of the passage's token states; f as for any views
                       (DRPQ: Tang et al. 2021, improving document representations by pseudo query embeddings)

Neither is an index here: studies compare their costs with those of views (MVR, table 4).

Shapes: Q queries, P passages, T tokens, I query tokens, V centroids, D dimension.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mvr_ray.core.encoding.encoder import DualEncoder
from mvr_ray.core.encoding.views import TokenizedPassage


class TokenStates(NamedTuple):
    """Unit states_PTD of each text's tokens, zero on padding, and which tokens are real."""

    states_PTD: Tensor
    real_PT: Tensor


def token_states(encoder: DualEncoder, texts: Sequence[TokenizedPassage]) -> TokenStates:
    """Compute the last layer's states of every token of the texts, by the passage tower."""
    with torch.no_grad():
        states_PTD, real_PT = encoder.states(texts)
    return TokenStates(F.normalize(states_PTD.float(), dim=-1) * real_PT[..., None], real_PT)


def late_interaction(queries_QID: Tensor, real_QI: Tensor, passages: TokenStates) -> Tensor:
    """Compute scores_QP: the sum over query tokens of the best passage token's score (Khattab and Zaharia 2020, eq.
    3)."""
    scores_QPIT = torch.einsum("qid,ptd->qpit", queries_QID, passages.states_PTD)
    best_QPI = scores_QPIT.masked_fill(~passages.real_PT[None, :, None], -torch.inf).amax(-1)
    return (best_QPI * real_QI[:, None]).sum(-1)


def centroids(passages: TokenStates, num: int, rounds: int = 5) -> Tensor:
    """Compute views_PVD: k-means of each passage's token states from evenly spaced tokens; a centroid may repeat."""
    views = []
    for states_TD, real_T in zip(*passages):
        own_TD = states_TD[real_T]
        start = torch.linspace(0, len(own_TD) - 1, num).long()
        centre_VD = own_TD[start].clone()
        for _ in range(rounds):
            nearest_T = (own_TD @ centre_VD.T - centre_VD.square().sum(-1) / 2).argmax(-1)
            sums_VD = torch.zeros_like(centre_VD).index_add_(0, nearest_T, own_TD)
            count_V = torch.bincount(nearest_T, minlength=num)
            used_V = count_V > 0
            centre_VD[used_V] = sums_VD[used_V] / count_V[used_V, None]
        views.append(centre_VD)
    return torch.stack(views)
