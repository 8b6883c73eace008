"""Teach a backbone to score pairs: a question's passage among passages that do not answer it.

The negatives are `train.num_hard_negatives` of the question's mined ones, else passages of its batch. Rank r of W
takes the questions r, r + W, .. of a batch, and the loss is the mean over all of them, so W ranks have the loss and
gradient of one process. Placing, checkpoints and resuming are those of the retriever's training.

Shapes: Q questions, C candidates of a question, B pairs.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from mvr_ray.config import RunConfig, resolve_path
from mvr_ray.core.batches import Example, strangers
from mvr_ray.core.reading.cross_encoder import CrossEncoder, Pair, listwise_loss
from mvr_ray.core.training import chunks, rank, seeded, world_size
from mvr_ray.distributed.models import CROSS_ENCODERS, pair_spec
from mvr_ray.distributed.training.checkpoints import EpochSums
from mvr_ray.distributed.training.examples import DevSet, open_dev, open_question_examples
from mvr_ray.distributed.training.headed import HeadedJob, HeadedSnapshot, HeadedTask, checkpoints_of, train_headed
from mvr_ray.distributed.training.steps import StepLoop, plan_steps
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.types import Progress, no_progress

log = logging.getLogger(__name__)

_PAIRS = 3
DEV_QUESTIONS = 128
DEV_CANDIDATES = 8
"""A dev question's own passage and the next ones of the dev set, which are mostly of the same article."""


class CrossEncoderEpoch(NamedTuple):
    """One epoch's metrics. `dev_top1`: how often a dev question's passage scores best of `DEV_CANDIDATES`."""

    epoch: int
    step: int
    loss: float
    dev_top1: float | None


def open_job(run: RunConfig) -> HeadedJob:
    """What a rank trains with."""
    store = Store(run.store.path)
    corpus = Corpus.open(store, run.prepare.corpus)
    model = CrossEncoder.from_backbone(str(resolve_path(run.encoder.backbone)), pair_spec(run), run.train.seed)
    examples, dev = open_question_examples(store, corpus, run.train), open_dev(store, corpus, run.train)
    return HeadedJob(run, model, examples, dev, checkpoints_of(run, run.train.cross_encoder, model, corpus))


class CrossEncoderLoop(StepLoop):
    def __init__(self, job: HeadedJob, progress: Progress, device: torch.device) -> None:
        schedule = plan_steps(job.run.train, len(job.examples))
        super().__init__(job.run.train, job.model, schedule, job.checkpoints, progress, device)
        self.job = job

    def begin(self, step: int) -> None:
        self.state.before = self._dev_accuracy() if step < 0 else None

    def groups(self) -> list[dict[str, Any]]:
        return self.model.parameter_groups(self.cfg.lr, self.cfg.head_lr_factor, self.cfg.weight_decay)

    def learn(self) -> float:
        numbers, epoch = self.batch_numbers(self.job.examples.passage_E, self.job.examples.article_E)
        groups = candidates_of(self.job.examples.get(numbers, epoch), self.cfg.num_hard_negatives)
        total = torch.zeros((), device=self.device)
        for number, some in enumerate(chunks(groups[rank() :: world_size()], self.cfg.cache_chunk)):
            forward = partial(self.model, self.model.tokenize([pair for group in some for pair in group]))
            scores_B = seeded(self.settings, (_PAIRS, number), self.device, forward)
            loss = listwise_loss(scores_B, [len(group) for group in some]).sum() * world_size() / len(groups)
            (loss * self.loss_scale).backward()
            total += loss.detach()
        if world_size() > 1:
            dist.all_reduce(total)
        loss = float(total) / world_size()
        self.state.sums.steps += 1
        self.state.sums.loss += loss
        return loss

    def end_epoch(self) -> None:
        state, sums = self.state, self.state.sums
        state.sums = EpochSums()
        accuracy = self._dev_accuracy()
        if rank():
            return
        report = CrossEncoderEpoch(
            epoch=self.schedule.epoch_of(state.step - 1),
            step=state.step,
            loss=sums.loss / max(1, sums.steps),
            dev_top1=accuracy,
        )
        state.epochs.append(report._asdict())
        log.info("epoch: %s", " ".join(f"{name}={value}" for name, value in report._asdict().items()))
        self.keep_best(accuracy)

    def _dev_accuracy(self) -> float | None:
        """None without dev questions, and beside rank 0."""
        if self.job.dev is None or rank():
            return None
        return dev_accuracy(self.model, self.job.dev, self.job.run.read.tokens_per_batch)


def candidates_of(examples: Sequence[Example], num_negatives: int) -> list[list[Pair]]:
    """The pairs of each example's question: with its passage first, then with passages that do not answer it."""
    return [
        [Pair(example.text, passage) for passage in (example.passage, *strangers(at, examples, num_negatives))]
        for at, example in enumerate(examples)
    ]


def dev_accuracy(model: CrossEncoder, dev: DevSet, tokens_per_batch: int) -> float:
    """Share of dev questions whose own passage scores above the others; equal is not enough."""
    texts, num = dev.texts[:DEV_QUESTIONS], len(dev.passages)
    most = min(DEV_CANDIDATES, num)
    pairs = [
        Pair(text, dev.passages[(int(own) + step) % num])
        for text, own in zip(texts, dev.positive_Q)
        for step in range(most)
    ]
    scores_QC = model.score(pairs, tokens_per_batch).reshape(len(texts), most)
    return float(np.mean((scores_QC[:, :1] > scores_QC[:, 1:]).all(1)))


TASK = HeadedTask(CROSS_ENCODERS, open_job, CrossEncoderLoop, CrossEncoderEpoch, ("loss", "dev_top1"))


def train(run: RunConfig, progress: Progress = no_progress) -> HeadedSnapshot:
    """Train `encoder.backbone` to score pairs; the snapshot is then the newest of `train.cross_encoder`.

    Raises as `train_headed`.
    """
    return train_headed(TASK, run, progress)
