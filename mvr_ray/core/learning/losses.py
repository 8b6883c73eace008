"""Compute the training losses of DPR, MVR and CAMVR on a joined batch.

With f_v = scale x <q, p_v> for each view that the passage has, and f = max_v f_v (MVR eq. 4):

    DPR    (MVR eq. 2)   -log( exp(f(q,p+) / t) / sum over passages exp(f(q,p) / t) ), passages of one view
    MVR    (MVR eq. 5)   global + lambda x local
           (MVR eq. 6)   global: the same softmax over the passages, each by its best view
           (MVR eq. 7)   local:  -log( exp(f / t) / sum_v exp(f_v / t) ) over the positive's own views
           (MVR eq. 8)   t = max(floor, exp(-decay x epoch)), in both
    CAMVR  (CAMVR 13)    global alone, and f(q,p+) = f_a, a the view of the snippet that holds the answer

Every term is a mean over the questions. All passages of the batch except the question's positives, known ones included,
are negatives. A passage without a view (a row of `mask_PV`) is ignored.

Shapes: Q questions, P passages, V views per passage, D dimension.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class LossTerms(NamedTuple):
    """`total` = `global_` + lambda x `local`, each a scalar; the last two are detached."""

    total: Tensor
    global_: Tensor
    local: Tensor


def temperature(epoch: float, decay: float, floor: float) -> float:
    """Compute MVR eq. 8: 1 at the start, then decaying to `floor`."""
    return max(floor, math.exp(-decay * epoch))


def pairwise_scores(queries_QD: Tensor, views_PVD: Tensor, mask_PV: Tensor) -> Tensor:
    """Compute scores_QPV, every question with every view; -inf where a view is missing."""
    scores_QPV = torch.einsum("qd,pvd->qpv", queries_QD, views_PVD)
    return scores_QPV.masked_fill(~mask_PV, -torch.inf)


def dpr_loss(queries_QD: Tensor, views_PVD: Tensor, mask_PV: Tensor, positive_Q: Tensor, **settings: Any) -> LossTerms:
    """Compute MVR eq. 2: the global term alone. `settings` are those of `camvr_loss`."""
    settings |= {"local_weight": 0.0}
    terms = mvr_loss(queries_QD, views_PVD, mask_PV, positive_Q, **settings)
    return terms._replace(local=torch.zeros_like(terms.local))


def mvr_loss(queries_QD: Tensor, views_PVD: Tensor, mask_PV: Tensor, positive_Q: Tensor, **settings: Any) -> LossTerms:
    """Compute MVR eqs. 5-7: CAMVR's loss without the answer's view. `settings` are those of `camvr_loss`."""
    settings |= {"answer_QV": None}
    return camvr_loss(queries_QD, views_PVD, mask_PV, positive_Q, **settings)


def camvr_loss(
    queries_QD: Tensor,
    views_PVD: Tensor,
    mask_PV: Tensor,
    positive_Q: Tensor,
    *,
    tau: float = 1.0,
    scale: float = 1.0,
    local_weight: float = 0.01,
    answer_QV: Tensor | None = None,
    answer_share: float = 1.0,
    known_QP: Tensor | None = None,
) -> LossTerms:
    """Compute CAMVR eq. 13 as the global term, and MVR eq. 7 with the answer's view in place of the best as the local
    one (ours; the paper's loss is eq. 13 alone, a local weight of 0).

    positive_Q holds the row of each question's positive; known_QP is true where a passage is another positive of the
    question, which is then excluded from the negatives.

    answer_QV marks the views whose snippets hold the answer: the paper has one; of several the best counts (ours).
    Without one, or where truncation removed them all, the best view replaces it. With `answer_share` below 1 the rest
    of the loss is MVR's, the positive by its best view (ours).
    """
    scores_QPV = scale / tau * pairwise_scores(queries_QD, views_PVD, mask_PV)
    best_QP = scores_QPV.amax(-1)
    own_QV = scores_QPV[torch.arange(len(positive_Q), device=scores_QPV.device), positive_Q]
    best = best_QP.gather(1, positive_Q[:, None])[:, 0]
    parts = [(1.0, best)]
    if answer_QV is not None:
        answer = own_QV.masked_fill(~answer_QV, -torch.inf).amax(-1)
        by_answer = torch.where(answer.isfinite(), answer, best)
        parts = [(share, by) for share, by in ((answer_share, by_answer), (1 - answer_share, best)) if share]
    global_ = sum((share * _softmax_loss(best_QP, by, positive_Q, known_QP) for share, by in parts), best.new_zeros(()))
    local = sum((share * (own_QV.logsumexp(-1) - by).mean() for share, by in parts), best.new_zeros(()))
    return LossTerms(global_ + local_weight * local, global_.detach(), local.detach())


def distillation_loss(
    queries_QD: Tensor, views_PVD: Tensor, mask_PV: Tensor, teacher_QP: Tensor, *, scale: float = 1.0
) -> Tensor:
    """Compare the scores of a question's passages with a teacher's: the mean over questions of
    KL( softmax over p of teacher || softmax over p of f ), a list at a time as in RocketQAv2 (Ren et al. 2021), which
    trains both models together; here the teacher is fixed.

    teacher_QP is NaN where the teacher has no score. Questions with fewer than two scored passages are not counted.
    """
    student_QP = scale * pairwise_scores(queries_QD, views_PVD, mask_PV).amax(-1)
    scored_QP = ~teacher_QP.isnan()
    several_Q = scored_QP.sum(-1) > 1
    if not several_Q.any():
        return queries_QD.new_zeros(())
    teacher_log_QP = teacher_QP.masked_fill(~scored_QP, -torch.inf)[several_Q].log_softmax(-1)
    student_log_QP = student_QP.masked_fill(~scored_QP, -torch.inf)[several_Q].log_softmax(-1)
    scored_QP = scored_QP[several_Q]
    log_ratio_QP = (teacher_log_QP - student_log_QP).masked_fill(~scored_QP, 0.0)
    return (teacher_log_QP.exp() * log_ratio_QP).sum(-1).mean()


def _softmax_loss(best_QP: Tensor, positive: Tensor, positive_Q: Tensor, known_QP: Tensor | None) -> Tensor:
    """Compute the mean of -log softmax of the positive's score among it and the negatives' best scores."""
    others_QP = torch.zeros_like(best_QP, dtype=torch.bool) if known_QP is None else known_QP.clone()
    others_QP.scatter_(1, positive_Q[:, None], True)
    negatives_QP = best_QP.masked_fill(others_QP, -torch.inf)
    everything = torch.cat([positive[:, None], negatives_QP], dim=1).logsumexp(-1)
    return (everything - positive).mean()
