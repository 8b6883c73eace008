"""Train a model with a task head, a reader or a cross-encoder, by the mean loss over the units of a batch.

The loss is a mean over units: windows of a reader, questions of a cross-encoder. Rank r of W takes the units
r, r + W, .. of a batch, so W ranks have the loss and gradient of one process.
"""

import hashlib
import json
import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from mvr_ray.config import RunConfig
from mvr_ray.core.learning.batches import Example
from mvr_ray.core.learning.training import chunks, rank, world_size
from mvr_ray.core.reading.task_model import TaskModel
from mvr_ray.distributed.training.checkpoints import Checkpoints, EpochSums
from mvr_ray.distributed.training.examples import input_digests
from mvr_ray.distributed.training.steps import StepLoop, plan_steps
from mvr_ray.distributed.training.train_model import TrainingJob
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.types import Progress

log = logging.getLogger(__name__)


class TaskModelLoop(StepLoop):
    epoch: ClassVar[type[Any]]
    """The report of an epoch: `epoch`, `step`, `loss` and the dev metrics."""
    dev_metrics: ClassVar[tuple[str, ...]]
    """Names of the dev metrics; the last one selects the best epoch."""

    def __init__(self, job: TrainingJob, progress: Progress, device: torch.device) -> None:
        schedule = plan_steps(job.run.train, len(job.examples))
        super().__init__(job.run.train, job.model, schedule, job.checkpoints, progress, device)
        self.job = job

    @abstractmethod
    def units(self, examples: Sequence[Example]) -> Sequence[Any]:
        """The units of a batch's examples."""

    @abstractmethod
    def losses(self, units: Sequence[Any], number: int) -> Tensor:
        """The loss of each unit of chunk `number`."""

    @abstractmethod
    def measure(self) -> tuple[float, ...]:
        """The dev metrics, on rank 0."""

    def begin(self, step: int) -> None:
        self.state.before = self._measure_dev()[-1] if step < 0 else None

    def groups(self) -> list[dict[str, Any]]:
        return self.model.parameter_groups(self.cfg.lr, self.cfg.head_lr_factor, self.cfg.weight_decay)

    def learn(self) -> float:
        numbers, epoch = self.batch_numbers(self.job.examples.passage_E, self.job.examples.article_E)
        units = self.units(self.job.examples.get(numbers, epoch))
        total = torch.zeros((), device=self.device)
        for number, chunk in enumerate(chunks(units[rank() :: world_size()], self.cfg.cache_chunk)):
            loss = self.losses(chunk, number).sum() * world_size() / len(units)
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
        dev = dict(zip(self.dev_metrics, self._measure_dev()))
        if rank():
            return
        number, loss = self.schedule.epoch_of(state.step - 1), sums.loss / max(1, sums.steps)
        report = self.epoch(epoch=number, step=state.step, loss=loss, **dev)
        state.epochs.append(report._asdict())
        log.info("epoch: %s", " ".join(f"{name}={value}" for name, value in report._asdict().items()))
        self.keep_best(dev[self.dev_metrics[-1]])

    def _measure_dev(self) -> tuple[float | None, ...]:
        """Measure on rank 0; None without dev questions and on other ranks."""
        return self.measure() if self.job.dev and not rank() else (None,) * len(self.dev_metrics)


def checkpoints_of(run: RunConfig, name: str, model: TaskModel, corpus: Corpus) -> Checkpoints:
    """Checkpoints under a digest of everything that determines the weights."""
    store = Store(run.store.path)
    sets = input_digests(corpus, run.train)
    parts = [model.task, run.digest("train"), asdict(model.spec), model.fingerprint, corpus.digest, *sets]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    return Checkpoints(store, paths.training_dir(name, key))
