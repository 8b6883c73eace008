"""Train a model of any task, in this process or on workers, and store it as the newest of its name.

The task's loop defines the loss of a step and the metrics of an epoch.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from mvr_ray.config import RunConfig
from mvr_ray.distributed.models import latest_fingerprint, record_latest, save_model
from mvr_ray.distributed.training.checkpoints import TrainState
from mvr_ray.distributed.training.steps import StepLoop, TrainingJob
from mvr_ray.distributed.training.workers import own_device, threads, train_on_workers
from mvr_ray.errors import FormatError, StorageError
from mvr_ray.store import paths
from mvr_ray.store.files import Store
from mvr_ray.types import Progress

log = logging.getLogger(__name__)

SNAPSHOT = "-step-"
"""Separates a model's name from the step of a weights snapshot."""
OpenJob = Callable[[RunConfig], TrainingJob]


class TrainedModel(NamedTuple):
    """A trained model in the store: `folder` is its path there; `metrics` are of its best epoch."""

    name: str
    fingerprint: str
    folder: str
    metrics: dict[str, float]
    epochs: list[Any]


def train_model(loop: type[StepLoop], open_job: OpenJob, run: RunConfig, progress: Progress) -> TrainedModel:
    """Train by the `train` section and record the model as the newest of its name.

    Raises ConfigError, DataError, MissingInputError or the model's own error before any worker starts, ResourceError
    when the workers cannot be placed or keep dying.
    """
    store, workers = Store(run.store.path), run.resources.train_workers
    with threads(run.resources.torch_threads):
        job = open_job(run)
        _require_readable(loop, store, job.name)
        record_before = job.checkpoints.result()
        if record_before and store.exists(paths.model_dir(loop.kind.store_dir, job.name, record_before["fingerprint"])):
            return _make_latest(loop, store, job.name, record_before)
        log.info("training: %s examples=%d workers=%d", loop.kind.model.what, len(job.examples), workers)
        if workers:
            state = train_on_workers(run, partial(_train_rank, loop, open_job), progress)
        else:
            state = loop(job, progress, own_device(run)).run()
        record = _save(loop, store, job, state)
        _save_snapshots(loop, store, job)
        snapshot = _make_latest(loop, store, job.name, record)
        job.checkpoints.finish(record)
        return snapshot


def _train_rank(
    loop: type[StepLoop], open_job: OpenJob, run: RunConfig, progress: Progress, device: torch.device
) -> TrainState:
    return loop(open_job(run), progress, device).run()


def _require_readable(loop: type[StepLoop], store: Store, name: str) -> None:
    """Raise FormatError where a newer program wrote the record of the newest model. A damaged one is replaced."""
    try:
        latest_fingerprint(store, loop.kind, name)
    except FormatError:
        raise
    except StorageError:
        return


def _save(loop: type[StepLoop], store: Store, job: TrainingJob, state: TrainState) -> dict[str, Any]:
    """Save the best weights; returns their record."""
    model = job.model.to("cpu").eval()
    if state.best_step >= 0:
        job.checkpoints.load_model(model, state.best_step, "best")
    fingerprint = save_model(store, loop.kind, job.name, model)
    best = next((epoch for epoch in state.epochs if epoch["step"] == state.best_step), {})
    names = (*loop.figures, *loop.dev_metrics)
    metrics = {"steps": float(state.step)} | {name: float(best[name]) for name in names if best.get(name) is not None}
    log.info("trained: %s fingerprint=%s best_step=%d", loop.kind.model.what, fingerprint, state.best_step)
    if state.before is not None:
        metrics[f"{loop.dev_metrics[-1]}_before"] = state.before
        if state.best_step >= 0 and state.best_accuracy <= state.before:
            advice = "more questions, or a lower train.lr, may"
            figures = (state.before, state.best_accuracy)
            log.warning("training did not raise dev accuracy: before=%.3f best=%.3f; " + advice, *figures)
    return {"fingerprint": fingerprint, "metrics": metrics, "epochs": state.epochs}


def _save_snapshots(loop: type[StepLoop], store: Store, job: TrainingJob) -> None:
    """Save the weights of `train.snapshot_steps`, each as the newest model of its own name."""
    for step in job.run.train.snapshot_steps:
        job.checkpoints.load_model(job.model, step, "snapshot")
        own = f"{job.name}{SNAPSHOT}{step}"
        record = {"fingerprint": save_model(store, loop.kind, own, job.model), "metrics": {"steps": float(step)}}
        record_latest(store, loop.kind, own, {**record, "epochs": []})


def _make_latest(loop: type[StepLoop], store: Store, name: str, record: Mapping[str, Any]) -> TrainedModel:
    """Record a model as the newest of its name."""
    record_latest(store, loop.kind, name, record)
    epochs = [loop.epoch(**epoch) for epoch in record["epochs"]]
    folder = paths.model_dir(loop.kind.store_dir, name, record["fingerprint"])
    return TrainedModel(name, record["fingerprint"], folder, record["metrics"], epochs)
