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
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mvr_ray.config import RunConfig, resolve_model
from mvr_ray.core.learning.batches import Example
from mvr_ray.core.learning.training import chunks, rank, world_size
from mvr_ray.distributed.training.checkpoints import Checkpoints
from mvr_ray.distributed.training.examples import input_digests
from mvr_ray.distributed.training.steps import StepLoop, TrainingJob
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store

log = logging.getLogger(__name__)


class TaskModelLoop(StepLoop):
    @staticmethod
    @abstractmethod
    def spec(run: RunConfig) -> Any:
        """The model's spec."""

    @staticmethod
    @abstractmethod
    def open_data(corpus: Corpus, run: RunConfig) -> tuple[Any, Any]:
        """The examples and the dev set."""

    @abstractmethod
    def units(self, examples: Sequence[Example]) -> Sequence[Any]:
        """The units of a batch's examples."""

    @abstractmethod
    def losses(self, units: Sequence[Any], number: int) -> Tensor:
        """The loss of each unit of chunk `number`."""

    @classmethod
    def open_job(cls, run: RunConfig) -> TrainingJob:
        """Open the model and data of a rank; checkpoints are under a digest of everything that determines the
        weights."""
        store, task = Store(run.store.path), cls.kind.model.task
        corpus, name = Corpus.open(store, run.prepare.corpus), getattr(run.train, task)
        model = cls.kind.model.from_backbone(resolve_model(run.encoder.backbone), cls.spec(run), run.train.seed)
        examples, dev = cls.open_data(corpus, run)
        sets = input_digests(corpus, run.train)
        parts = [task, run.digest("train"), asdict(model.spec), model.fingerprint, corpus.digest, *sets]
        key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
        return TrainingJob(run, name, model, examples, dev, Checkpoints(store, paths.training_dir(name, key)))

    def groups(self) -> list[dict[str, Any]]:
        return self.model.parameter_groups(self.cfg.lr, self.cfg.head_lr_factor, self.cfg.weight_decay)

    def learn(self) -> float:
        units = self.units(self.batch())
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
