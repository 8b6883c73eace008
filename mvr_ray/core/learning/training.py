"""Run one training step on one rank of several: gather, loss, gradients, schedule. No files, no Ray.

Every rank encodes its share, gathers the vectors of all, and computes the same loss on the joined batch. The gradient
of the mean of the ranks' losses flows back through the gather, and the parameters' gradients are averaged once a step:
W ranks compute exactly what one process computes on the joined batch. (DistributedDataParallel does not fit: its hooks
fire at every backward pass, and the gradient cache has many.)

The gradient cache (Gao et al. 2021) encodes twice: without a graph for the vectors, then chunk by chunk with one, so
that memory does not grow with the batch. Before each chunk (seed, step, rank, side, chunk) seeds the dropout, which is
hence the same both times, and the same after a restart.

Shapes: Q questions, P passages, V views per passage, D dimension; W ranks.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mvr_ray.core.learning.losses import LossTerms

if TYPE_CHECKING:
    from mvr_ray.core.encoding.encoder import DualEncoder

LossFunction = Callable[[Tensor, Tensor, Tensor], LossTerms]
"""(queries_QD, views_PVD, mask_PV) of the joined batch -> LossTerms."""

_DROPOUT = 2
_QUESTIONS, _PASSAGES = 0, 1
"""The sides, in the seeds of dropout."""


class RankInputs(NamedTuple):
    """The inputs of this rank in a step. All ranks have equally many passages, of which `real_P` is false for padding;
    `num_passages` counts those of the joined batch."""

    texts: Sequence[str]
    passages: Sequence[Any]
    real_P: Tensor
    num_passages: int


class PassSettings(NamedTuple):
    """Settings of a step: `chunk` texts or passages a pass (0: all in one), the precision, and the seeds of dropout."""

    chunk: int = 0
    precision: torch.dtype = torch.float32
    seed: int = 0
    step: int = 0


class StepOutput(NamedTuple):
    """The joined batch's vectors, detached from the graph."""

    terms: LossTerms
    queries_QD: Tensor
    views_PVD: Tensor
    mask_PV: Tensor


def world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class _Gather(torch.autograd.Function):
    """Concatenates the ranks' rows; backward returns each rank's rows of the ranks' summed gradients."""

    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        parts = [torch.empty_like(local) for _ in range(world_size())]
        dist.all_gather(parts, local.contiguous())
        ctx.rows = len(local)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total)
        return total[rank() * ctx.rows : (rank() + 1) * ctx.rows]


def gather(local: Tensor) -> Tensor:
    """Concatenate the rows of all ranks in rank order, differentiable; every rank must hold equally many."""
    if world_size() == 1:
        return local
    if local.dtype == torch.bool:
        return gather(local.to(torch.uint8)).bool()
    rows = _Gather.apply(local)
    assert isinstance(rows, Tensor)
    return rows


def average_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Replace each gradient by its mean over the ranks, in one message; a missing gradient counts as zero."""
    if world_size() == 1:
        return
    trainable = [p for p in parameters if p.requires_grad]
    flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in trainable])
    dist.all_reduce(flat)
    flat /= world_size()
    for parameter, piece in zip(trainable, flat.split([p.numel() for p in trainable])):
        parameter.grad = piece.view_as(parameter)


def loss_and_gradients(
    encoder: "DualEncoder", share: RankInputs, loss: LossFunction, settings: PassSettings, scale: float = 1.0
) -> StepOutput:
    """Add this rank's gradients of `scale` x the joined batch's loss; call `average_gradients` next.

    A chunk gives the same result, up to rounding, in two passes with less memory; with dropout, that of other draws.
    """
    with_cache = 0 < settings.chunk < max(len(share.texts), len(share.passages))
    with torch.no_grad() if with_cache else nullcontext():
        queries_QD = torch.cat([encode() for encode in _passes(encoder, _QUESTIONS, share, settings)])
        passes = [encode() for encode in _passes(encoder, _PASSAGES, share, settings)]
        views_PVD = torch.cat([views.views_PVD for views in passes])
        mask_PV = torch.cat([views.mask_PV for views in passes])
    if with_cache:
        queries_QD, views_PVD = queries_QD.requires_grad_(), views_PVD.requires_grad_()
    num = share.num_passages  # padding is at the end: no loss sees it
    all_QD, all_PVD, all_PV = gather(queries_QD), gather(views_PVD)[:num], gather(mask_PV)[:num]
    terms = loss(all_QD, all_PVD, all_PV)
    (terms.total * scale).backward()
    if with_cache:
        second_queries = (encode() for encode in _passes(encoder, _QUESTIONS, share, settings))
        second_views = (encode().views_PVD for encode in _passes(encoder, _PASSAGES, share, settings))
        for second, vectors in ((second_queries, queries_QD), (second_views, views_PVD)):
            pieces = () if vectors.grad is None else vectors.grad.split(settings.chunk)  # a loss may hold a side still
            for gradient, part in zip(pieces, second):
                (part * gradient).sum().backward()
    return StepOutput(LossTerms(*(term.detach() for term in terms)), all_QD.detach(), all_PVD.detach(), all_PV)


def distil_gradients(
    encoder: "DualEncoder",
    share: RankInputs,
    targets_QD: Tensor,
    targets_PD: Tensor,
    settings: PassSettings,
    scale: float = 1.0,
) -> Tensor:
    """Add the gradients of a warm start: 1 - cosine between the readout and the targets, questions plus passages.

    A passage's readout is the mean of its views: one target for each view would make them equal. Returns this rank's
    part of the loss; the ranks' mean is the loss.
    """
    chunk = settings.chunk or max(len(share.texts), len(share.passages))
    total = targets_QD.new_zeros(())
    for encode, target in zip(_passes(encoder, _QUESTIONS, share, settings), targets_QD.split(chunk)):
        loss = (1 - F.cosine_similarity(encode(), target)).sum() / len(share.texts)
        (loss * scale).backward()
        total += loss.detach()
    targets = zip(targets_PD.split(chunk), share.real_P.split(chunk))
    for encode, (target, real) in zip(_passes(encoder, _PASSAGES, share, settings), targets):
        views = encode()
        mean_PD = (views.views_PVD * views.mask_PV[..., None]).sum(1)
        distance_P = (1 - F.cosine_similarity(mean_PD, target)) * real
        loss = distance_P.sum() * world_size() / share.num_passages
        (loss * scale).backward()
        total += loss.detach()
    return total


def _passes(
    encoder: "DualEncoder", side: int, share: RankInputs, settings: PassSettings
) -> Iterator[Callable[[], Any]]:
    """Yield the passes over the questions or the passages, chunk by chunk."""
    encode = encoder.encode_queries if side == _QUESTIONS else encoder.encode_passages
    items: Sequence[Any] = share.texts if side == _QUESTIONS else share.passages
    for number, part in enumerate(chunks(items, settings.chunk)):
        yield partial(run_seeded, settings, (side, number), share.real_P.device, partial(encode, part))


def run_seeded(settings: PassSettings, which: tuple[int, int], device: torch.device, encode: Callable[[], Any]) -> Any:
    """Run one pass in the step's precision, with the dropout of (seed, step, rank, which)."""
    state = np.random.SeedSequence([settings.seed, _DROPOUT, settings.step, rank(), *which])
    torch.manual_seed(int(state.generate_state(1, np.uint64)[0]) >> 1)
    is_plain = settings.precision == torch.float32
    with nullcontext() if is_plain else torch.autocast(device.type, settings.precision):
        return encode()


def chunks(items: Sequence[Any], chunk: int) -> Iterator[Sequence[Any]]:
    """Divide items into pieces of at most `chunk`; one piece where it is 0."""
    size = chunk or max(1, len(items))
    return (items[at : at + size] for at in range(0, len(items), size))


def lr_factor(step: int, total: int, warmup_share: float) -> float:
    """Return the factor of linear warm-up to 1, then linear decay that would reach 0 one step after the last."""
    warmup = math.ceil(warmup_share * total)
    if step < warmup:
        return (step + 1) / warmup
    return (total - step) / (total - warmup)


def winning_views(output: StepOutput, positive_Q: Tensor) -> Tensor:
    """Find views_Q: the view of its passage that scores best with each question."""
    own_QVD, mask_QV = output.views_PVD[positive_Q], output.mask_PV[positive_Q]
    scores_QV = torch.einsum("qd,qvd->qv", output.queries_QD, own_QVD).masked_fill(~mask_QV, -torch.inf)
    return scores_QV.argmax(-1)
