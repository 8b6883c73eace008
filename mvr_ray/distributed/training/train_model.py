"""Train a model of any task, in this process or on workers, and store it as the newest of its name.

The task's loop defines the loss of a step and the metrics of an epoch.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from mvr_ray.config import RunConfig
from mvr_ray.distributed.models import ModelKind, latest_fingerprint, record_latest, save_model
from mvr_ray.distributed.training.checkpoints import Checkpoints, TrainState
from mvr_ray.distributed.training.steps import StepLoop
from mvr_ray.distributed.training.workers import own_device, threads, train_on_workers
from mvr_ray.errors import FormatError, StorageError
from mvr_ray.store import paths
from mvr_ray.store.files import Store
from mvr_ray.types import Progress

log = logging.getLogger(__name__)

SNAPSHOT = "-step-"
"""Separates a model's name from the step of a weights snapshot."""


class TrainingJob(NamedTuple):
    """Everything a rank needs; `model` has the initial weights, `dev` is the loop's dev set."""

    run: RunConfig
    model: Any
    examples: Any
    dev: Any
    checkpoints: Checkpoints


class TrainedModel(NamedTuple):
    """A trained model in the store: `folder` is its path there; `metrics` are of its best epoch."""

    name: str
    fingerprint: str
    folder: str
    metrics: dict[str, float]
    epochs: list[Any]


@dataclass(frozen=True)
class TrainingTask:
    """One training task. `metrics` are the fields of `epoch` to report; the last one selects the best epoch."""

    kind: ModelKind[Any]
    name: Callable[[RunConfig], str]
    open_job: Callable[[RunConfig], TrainingJob]
    loop: Callable[[TrainingJob, Progress, torch.device], StepLoop]
    epoch: type[Any]
    metrics: tuple[str, ...]

    def learn(self, run: RunConfig, progress: Progress, device: torch.device) -> TrainState:
        """Train on one rank."""
        return self.loop(self.open_job(run), progress, device).run()


def train_model(task: TrainingTask, run: RunConfig, progress: Progress) -> TrainedModel:
    """Train by the `train` section and record the model as the newest of its name.

    Raises ConfigError, DataError, MissingInputError or the model's own error before any worker starts, ResourceError
    when the workers cannot be placed or keep dying.
    """
    store, workers, name = Store(run.store.path), run.resources.train_workers, task.name(run)
    _require_readable(task, store, name)
    with threads(run.resources.torch_threads):
        job = task.open_job(run)
        record_before = job.checkpoints.result()
        if record_before and store.exists(paths.model_dir(task.kind.store_dir, name, record_before["fingerprint"])):
            return _make_latest(task, store, name, record_before)
        log.info("training: %s examples=%d workers=%d", task.kind.model.what, len(job.examples), workers)
        if workers:
            state = train_on_workers(run, task.learn, progress)
        else:
            state = task.loop(job, progress, own_device(run)).run()
        record = _save(task, store, name, job, state)
        _save_snapshots(task, store, name, job)
        snapshot = _make_latest(task, store, name, record)
        job.checkpoints.finish(record)
        return snapshot


def _require_readable(task: TrainingTask, store: Store, name: str) -> None:
    """Raise FormatError where a newer program wrote the record of the newest model. A damaged one is replaced."""
    try:
        latest_fingerprint(store, task.kind, name)
    except FormatError:
        raise
    except StorageError:
        return


def _save(task: TrainingTask, store: Store, name: str, job: TrainingJob, state: TrainState) -> dict[str, Any]:
    """Save the best weights; returns their record."""
    model = job.model.to("cpu").eval()
    if state.best_step >= 0:
        job.checkpoints.load_model(model, state.best_step, "best")
    fingerprint = save_model(store, task.kind, name, model)
    best = next((epoch for epoch in state.epochs if epoch["step"] == state.best_step), {})
    metrics = {"steps": float(state.step)}
    metrics |= {metric: float(best[metric]) for metric in task.metrics if best.get(metric) is not None}
    log.info("trained: %s fingerprint=%s best_step=%d", task.kind.model.what, fingerprint, state.best_step)
    if state.before is not None:
        metrics[f"{task.metrics[-1]}_before"] = state.before
        if state.best_step >= 0 and state.best_accuracy <= state.before:
            advice = "more questions, or a lower train.lr, may"
            figures = (state.before, state.best_accuracy)
            log.warning("training did not raise dev accuracy: before=%.3f best=%.3f; " + advice, *figures)
    return {"fingerprint": fingerprint, "metrics": metrics, "epochs": state.epochs}


def _save_snapshots(task: TrainingTask, store: Store, name: str, job: TrainingJob) -> None:
    """Save the weights of `train.snapshot_steps`, each as the newest model of its own name."""
    for step in job.run.train.snapshot_steps:
        job.checkpoints.load_model(job.model, step, "snapshot")
        own = f"{name}{SNAPSHOT}{step}"
        record = {"fingerprint": save_model(store, task.kind, own, job.model), "metrics": {"steps": float(step)}}
        record_latest(store, task.kind, own, {**record, "epochs": []})


def _make_latest(task: TrainingTask, store: Store, name: str, record: Mapping[str, Any]) -> TrainedModel:
    """Record a model as the newest of its name."""
    record_latest(store, task.kind, name, record)
    epochs = [task.epoch(**epoch) for epoch in record["epochs"]]
    folder = paths.model_dir(task.kind.store_dir, name, record["fingerprint"])
    return TrainedModel(name, record["fingerprint"], folder, record["metrics"], epochs)
