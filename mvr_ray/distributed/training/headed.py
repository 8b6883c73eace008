"""Training a model with a head, a reader or a cross-encoder: from the run to a stored model that is the newest of its
name. What a step learns and what an epoch measures is the task's own loop.
"""

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from mvr_ray.config import RunConfig
from mvr_ray.core.reading.headed import HeadedModel
from mvr_ray.distributed.models import Kind, save_model
from mvr_ray.distributed.training.checkpoints import Checkpoints, TrainState
from mvr_ray.distributed.training.examples import QuestionExamples, input_digests
from mvr_ray.distributed.training.steps import StepLoop
from mvr_ray.distributed.training.workers import on_workers, own_device, threads
from mvr_ray.store import layout
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.types import Progress

log = logging.getLogger(__name__)


class HeadedJob(NamedTuple):
    """Everything a rank needs; `model` is as training starts from it, `dev` what its loop measures on."""

    run: RunConfig
    model: Any
    examples: QuestionExamples
    dev: Any
    checkpoints: Checkpoints


class HeadedSnapshot(NamedTuple):
    """A trained model in the store: `folder` is its path there. `metrics` are those of its best epoch."""

    name: str
    fingerprint: str
    folder: str
    metrics: dict[str, float]
    epochs: list[Any]


@dataclass(frozen=True)
class HeadedTask:
    """One task. `measured` are the fields of `epoch` that the snapshot's metrics name, the last the one to be best."""

    kind: Kind[Any]
    open_job: Callable[[RunConfig], HeadedJob]
    loop: Callable[[HeadedJob, Progress, torch.device], StepLoop]
    epoch: type[Any]
    measured: tuple[str, ...]

    def name(self, run: RunConfig) -> str:
        return getattr(run.train, self.kind.model.task)

    def learn(self, run: RunConfig, progress: Progress, device: torch.device) -> TrainState:
        """One rank's training."""
        return self.loop(self.open_job(run), progress, device).run()


def train_headed(task: HeadedTask, run: RunConfig, progress: Progress) -> HeadedSnapshot:
    """Train `encoder.backbone` as the `train` section says; it is then the newest of its name.

    Raises ConfigError, DataError, MissingInputError or the model's own error before any worker starts, ResourceError
    when the workers cannot be placed or keep dying.
    """
    store, workers, room = Store(run.store.path), run.resources.train_workers, task.kind.room
    with threads(run.resources.torch_threads):
        job = task.open_job(run)
        finished = job.checkpoints.finished()
        if finished and store.exists(layout.model_dir(room, task.name(run), json.loads(finished)["fingerprint"])):
            return _announce(task, run, store, finished)
        log.info("training a %s: questions=%d workers=%d", task.kind.model.what, len(job.examples), workers)
        if workers:
            state = on_workers(run, task.learn, progress)
        else:
            state = task.loop(job, progress, own_device(run)).run()
        record = _save(task, run, store, job, state)
        snapshot = _announce(task, run, store, record)
        job.checkpoints.finish(record)
        return snapshot


def checkpoints_of(run: RunConfig, name: str, model: HeadedModel, corpus: Corpus) -> Checkpoints:
    """Checkpoints lie under a digest of all that decides the weights."""
    store = Store(run.store.path)
    sets = input_digests(store, run.train)
    parts = [model.task, run.digest("train"), asdict(model.spec), model.fingerprint, corpus.digest, *sets]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    return Checkpoints(store, layout.training_dir(name, key))


def _save(task: HeadedTask, run: RunConfig, store: Store, job: HeadedJob, state: TrainState) -> bytes:
    """Save the best weights; returns what is recorded of them, as JSON."""
    model = job.model.to("cpu").eval()
    if state.best_step >= 0:
        job.checkpoints.load_model(model, state.best_step, best=True)
    fingerprint = save_model(store, task.kind, task.name(run), model)
    best = next((epoch for epoch in state.epochs if epoch["step"] == state.best_step), {})
    metrics = {"steps": float(state.step)}
    metrics |= {name: best[name] for name in task.measured if best.get(name) is not None}
    if state.before is not None:
        metrics[f"{task.measured[-1]}_before"] = state.before
    log.info("trained %s: fingerprint=%s best_step=%d", task.kind.model.what, fingerprint, state.best_step)
    record = {"fingerprint": fingerprint, "metrics": metrics, "epochs": state.epochs}
    return (json.dumps(record, indent=1) + "\n").encode()


def _announce(task: HeadedTask, run: RunConfig, store: Store, record: bytes) -> HeadedSnapshot:
    """Name a model the newest one."""
    name, room, held = task.name(run), task.kind.room, json.loads(record)
    store.write_bytes(layout.latest_model(room, name), record)
    epochs = [task.epoch(**epoch) for epoch in held["epochs"]]
    folder = layout.model_dir(room, name, held["fingerprint"])
    return HeadedSnapshot(name, held["fingerprint"], folder, held["metrics"], epochs)
