"""Train a model of any task, in this process or on workers, and store it as the newest of its name.

The task says what is trained and how: its own loop defines what a step learns and what an epoch measures.
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
from mvr_ray.distributed.training.workers import on_workers, own_device, threads
from mvr_ray.errors import FormatError, StorageError
from mvr_ray.store import paths
from mvr_ray.store.files import Store
from mvr_ray.types import Progress

log = logging.getLogger(__name__)

SNAPSHOT = "-step-"
"""Between a model's name and the steps after which its weights were kept."""


class TrainingJob(NamedTuple):
    """Everything a rank needs; `model` is as training starts from it, `dev` what its loop measures on."""

    run: RunConfig
    model: Any
    examples: Any
    dev: Any
    checkpoints: Checkpoints


class TrainedModel(NamedTuple):
    """A trained model in the store: `folder` is its path there. `metrics` are those of its best epoch."""

    name: str
    fingerprint: str
    folder: str
    metrics: dict[str, float]
    epochs: list[Any]


@dataclass(frozen=True)
class TrainingTask:
    """One task. `metrics` are the fields of `epoch` that the model's metrics name; the last decides which is best."""

    kind: ModelKind[Any]
    name: Callable[[RunConfig], str]
    open_job: Callable[[RunConfig], TrainingJob]
    loop: Callable[[TrainingJob, Progress, torch.device], StepLoop]
    epoch: type[Any]
    metrics: tuple[str, ...]

    def learn(self, run: RunConfig, progress: Progress, device: torch.device) -> TrainState:
        """One rank's training."""
        return self.loop(self.open_job(run), progress, device).run()


def train_model(task: TrainingTask, run: RunConfig, progress: Progress) -> TrainedModel:
    """Train as the `train` section says; the model is then the newest of its name.

    Raises ConfigError, DataError, MissingInputError or the model's own error before any worker starts, ResourceError
    when the workers cannot be placed or keep dying.
    """
    store, workers, name = Store(run.store.path), run.resources.train_workers, task.name(run)
    _require_readable(task, store, name)
    with threads(run.resources.torch_threads):
        job = task.open_job(run)
        finished = job.checkpoints.result()
        if finished and store.exists(paths.model_dir(task.kind.room, name, finished["fingerprint"])):
            return _announce(task, store, name, finished)
        log.info("training: %s examples=%d workers=%d", task.kind.model.what, len(job.examples), workers)
        if workers:
            state = on_workers(run, task.learn, progress)
        else:
            state = task.loop(job, progress, own_device(run)).run()
        record = _save(task, store, name, job, state)
        _save_snapshots(task, store, name, job)
        snapshot = _announce(task, store, name, record)
        job.checkpoints.finish(record)
        return snapshot


def _require_readable(task: TrainingTask, store: Store, name: str) -> None:
    """Raise FormatError where a newer program named the newest model. A damaged record is made again."""
    try:
        latest_fingerprint(store, task.kind, name)
    except FormatError:
        raise
    except StorageError:
        return


def _save(task: TrainingTask, store: Store, name: str, job: TrainingJob, state: TrainState) -> dict[str, Any]:
    """Save the best weights; returns what is recorded of them."""
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
    """Save the weights of `train.snapshot_steps`, each as the newest model of a name of its own."""
    for step in job.run.train.snapshot_steps:
        job.checkpoints.load_model(job.model, step, "snapshot")
        own = f"{name}{SNAPSHOT}{step}"
        record = {"fingerprint": save_model(store, task.kind, own, job.model), "metrics": {"steps": float(step)}}
        record_latest(store, task.kind, own, {**record, "epochs": []})


def _announce(task: TrainingTask, store: Store, name: str, record: Mapping[str, Any]) -> TrainedModel:
    """Name a model the newest one."""
    record_latest(store, task.kind, name, record)
    epochs = [task.epoch(**epoch) for epoch in record["epochs"]]
    folder = paths.model_dir(task.kind.room, name, record["fingerprint"])
    return TrainedModel(name, record["fingerprint"], folder, record["metrics"], epochs)
