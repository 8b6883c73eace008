"""Train a model of any task, in this process or on the workers of Ray Train, and store it as the newest of its name.

The task's loop defines the loss of a step and the metrics of an epoch. Ray Train places the workers, joins them in one
process group and restarts them when one dies. Each run gets a new name, so Ray Train never resumes silently by name:
mvr_ray writes its own checkpoints, in the store, under a digest of everything that determines the result: the same
command resumes, a changed one starts from the beginning.
"""

import logging
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.fs
import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, get_device

from mvr_ray.config import RunConfig
from mvr_ray.core.learning.training import rank
from mvr_ray.core.threads import torch_threads
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.progress import forward_progress
from mvr_ray.distributed.cluster.stage_pool import enter_folder, plain_run
from mvr_ray.distributed.models import save_model
from mvr_ray.distributed.training.checkpoints import TrainState
from mvr_ray.distributed.training.cross_encoder import CrossEncoderLoop
from mvr_ray.distributed.training.reader import ReaderLoop
from mvr_ray.distributed.training.retriever import RetrieverLoop
from mvr_ray.distributed.training.steps import OwnLoss, StepLoop, TrainingJob
from mvr_ray.errors import (
    ConfigError,
    FormatError,
    MissingInputError,
    MvrRayError,
    NoAnswerError,
    ResourceError,
    StorageError,
    first_line,
)
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus, question_sets
from mvr_ray.store.files import Store
from mvr_ray.store.model_records import latest_fingerprint, record_latest
from mvr_ray.store.scratch import scratch_folder
from mvr_ray.types import Progress, no_progress

log = logging.getLogger(__name__)

SNAPSHOT = "-step-"
"""Separates a model's name from the step of a weights snapshot."""
MAX_RESTARTS = 3
"""Maximum restarts of the workers after one died."""
LOOPS: dict[str, type[StepLoop]] = {loop.kind.task: loop for loop in (RetrieverLoop, ReaderLoop, CrossEncoderLoop)}
"""By `train.task`."""


class TrainedModel(NamedTuple):
    """A trained model in the store: `folder` is its path there; `metrics` are of its best epoch. It learned from
    `num_examples` of the set `questions`, or of the corpus's passages where that is None. `metrics_file` has the
    metrics of the steps; it is empty where an older program trained. Weights of an unfinished training (`save_best`)
    are those of `saved_step` of `total_steps`."""

    name: str
    fingerprint: str
    folder: str
    metrics: dict[str, float]
    epochs: list[Any]
    questions: str | None
    num_examples: int
    metrics_file: str
    saved_step: int | None = None
    total_steps: int | None = None


def train(
    run: RunConfig,
    progress: Progress = no_progress,
    loss: Callable[..., Any] | None = None,
    corpus_digest: str | None = None,
) -> TrainedModel:
    """Train by the `train` section and record the model as the newest of its name. `loss` replaces that of a retriever
    (`train.loss`): a function of the signature of `losses.camvr_loss`, which returns the same or one tensor. The corpus
    is the last one, or that of a digest.

    Raises ConfigError, DataError, MissingInputError or the model's own error before any worker starts, ResourceError
    when the workers cannot be placed or keep dying.
    """
    loop, store, workers = LOOPS[run.train.task], Store(run.store.path), run.resources.train_workers
    with torch_threads(run.resources.threads):
        corpus = Corpus.open(store, run.prepare.corpus, corpus_digest)
        if run.train.questions is None and (names := question_sets(corpus)):
            log.warning(
                "training learns from sentences of the passages alone, since train.questions is not set; question sets "
                "of the corpus: %s",
                ", ".join(names),
            )
        if loss and loop is not RetrieverLoop:
            raise ConfigError(f"train: a loss of your own is for a retriever, and train.task is {run.train.task}")
        own: dict[str, Any] = {"loss": OwnLoss.of(loss)} if loss else {}
        job = loop.open_job(run, corpus.digest, **own)
        try:
            latest_fingerprint(store, loop.kind, job.name)
        except StorageError as error:  # a damaged record is replaced, one of a newer program is not
            if isinstance(error, FormatError):
                raise
        if record := _finished_record(loop, store, job):
            job.checkpoints.clear()  # as a command does not that is killed when it has written the record
            return _make_latest(loop, store, job, record)
        metrics_file = store.where(job.checkpoints.metrics_file)
        what = loop.kind.what, len(job.examples), workers, metrics_file
        log.info("training: %s examples=%d workers=%d metrics=%s", *what)
        session.announce(f"loss and dev figures, also while it runs: {metrics_file}")
        if workers:
            state = _train_on_workers(run, corpus.digest, job.checkpoints.folder, progress, own)
        else:
            state = loop(job, progress, _own_device(run)).run()
        record = _finished_record(loop, store, job)
        if not record:  # no other process has finished the same training meanwhile
            record = _save(loop, store, job, state)
            _save_snapshots(loop, store, job)
        snapshot = _make_latest(loop, store, job, record)
        job.checkpoints.finish(record)
        return snapshot


def save_best(run: RunConfig) -> TrainedModel:
    """Store the best weights so far of a training that has not finished as the newest model of its name, and return it;
    without a dev accuracy yet, those of the newest checkpoint. The training itself can continue.

    Raises MissingInputError where it has no checkpoint, and as `train`.
    """
    loop, store = LOOPS[run.train.task], Store(run.store.path)
    with torch_threads(run.resources.threads):
        job = loop.open_job(run)
        if record := _finished_record(loop, store, job):
            return _make_latest(loop, store, job, record)
        step, total = job.checkpoints.latest_step(), loop(job, no_progress, torch.device("cpu")).schedule.total
        if step < 0:
            raise MissingInputError(
                f"{store.where(job.checkpoints.folder)} has no checkpoint: with these settings, question sets and "
                f"corpus no training has taken train.checkpoint_steps ({run.train.checkpoint_steps}) steps; repeat "
                f"the words of the command that was interrupted"
            )
        state = job.checkpoints.state(step)
        if state.best_accuracy < 0:
            job.checkpoints.load_model(job.model, step)
            state.best_step = -1
        model = _make_latest(loop, store, job, _save(loop, store, job, state))
        return model._replace(saved_step=state.best_step if state.best_step >= 0 else step, total_steps=total)


def _finished_record(loop: type[StepLoop], store: Store, job: TrainingJob) -> dict[str, Any]:
    """Return the record of this training if it has finished and the store has its model, else empty."""
    record = job.checkpoints.result()
    has_model = record and store.exists(paths.model_dir(loop.kind.store_dir, job.name, record["fingerprint"]))
    return record if has_model else {}


def _save(loop: type[StepLoop], store: Store, job: TrainingJob, state: TrainState) -> dict[str, Any]:
    """Save the best weights; returns their record. Raises the model's own error for weights that are not finite."""
    model = job.model.to("cpu").eval()
    if state.best_step >= 0:
        job.checkpoints.load_model(model, state.best_step, "best")
    if name := next((name for name, weights in model.named_parameters() if not weights.isfinite().all()), ""):
        raise model.error_type(
            f"{model.what} {job.name} is not stored: after training, {name} holds NaN or infinite weights; the "
            f"newest model stays. Lower train.lr (it is {job.run.train.lr:g}), or see whether the backbone holds such "
            f"weights"
        )
    fingerprint = save_model(store, loop.kind, job.name, model)
    best = next((epoch for epoch in state.epochs if epoch["step"] == state.best_step), {})
    names = (*loop.figures, *loop.dev_metrics)
    metrics = {"steps": float(state.step)} | {name: float(best[name]) for name in names if best.get(name) is not None}
    log.info("trained: %s fingerprint=%s best_step=%d", loop.kind.what, fingerprint, state.best_step)
    if state.before is not None:
        metrics[f"{loop.dev_metrics[-1]}_before"] = state.before
        if state.best_step >= 0 and state.best_accuracy <= state.before:
            advice = "more questions, or a lower train.lr, may"
            figures = (state.before, state.best_accuracy)
            log.warning("training did not raise dev accuracy: before=%.3f best=%.3f; " + advice, *figures)
    return {"fingerprint": fingerprint, "metrics": metrics, "epochs": state.epochs, **_backbone_of(job.run)}


def _backbone_of(run: RunConfig) -> dict[str, str]:
    """Return what the record of a model says of its backbone: nothing where training started from another encoder."""
    return {} if run.train.init_from else {"backbone": run.encoder.backbone}


def _save_snapshots(loop: type[StepLoop], store: Store, job: TrainingJob) -> None:
    """Save the weights of `train.snapshot_steps`, each as the newest model of its own name."""
    for step in job.run.train.snapshot_steps:
        job.checkpoints.load_model(job.model, step, "snapshot")
        own = f"{job.name}{SNAPSHOT}{step}"
        record = {"fingerprint": save_model(store, loop.kind, own, job.model), "metrics": {"steps": float(step)}}
        record_latest(store, loop.kind, own, {**record, "epochs": [], **_backbone_of(job.run)})


def _make_latest(loop: type[StepLoop], store: Store, job: TrainingJob, record: Mapping[str, Any]) -> TrainedModel:
    """Record a model as the newest of its name."""
    record_latest(store, loop.kind, job.name, record)
    return TrainedModel(
        name=job.name,
        fingerprint=record["fingerprint"],
        folder=paths.model_dir(loop.kind.store_dir, job.name, record["fingerprint"]),
        metrics=record["metrics"],
        epochs=[loop.epoch(**epoch) for epoch in record["epochs"]],
        questions=job.run.train.questions,
        num_examples=len(job.examples),
        metrics_file=job.checkpoints.metrics_file if store.exists(job.checkpoints.metrics_file) else "",
    )


def _own_device(run: RunConfig) -> torch.device:
    """Return the device for training in this process. Raises ResourceError where torch sees no GPU."""
    if not run.resources.gpus_per_trainer:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ResourceError(
            f"resources.gpus_per_trainer is {run.resources.gpus_per_trainer:g}, but torch sees no GPU on this machine; "
            f"set it to 0, or train on the workers of a cluster with resources.train_workers"
        )
    return torch.device("cuda")


def _train_on_workers(
    run: RunConfig, corpus_digest: str, folder: str, progress: Progress, own: dict[str, Any]
) -> TrainState:
    """Train on Ray Train workers in one process group, with the corpus of this digest, checkpoints in this folder and
    `own` arguments of the job; returns rank 0's state.

    Workers start again, at the newest checkpoint, where one died. Raises ResourceError when they cannot be placed or
    keep dying, and at once an error that they would only repeat.
    """
    resources = run.resources
    count, cpus, gpus = resources.train_workers, resources.cpus_per_trainer, resources.gpus_per_trainer
    with ExitStack() as stack:
        needs = [session.Need("trainers", count, cpus, gpus)]
        info = stack.enter_context(session.connect(resources, needs=needs, dashboard=True))
        storage = stack.enter_context(_storage(run, info))
        actor = stack.enter_context(forward_progress(progress))
        api: Any = ray.train
        make_trainer: Any = TorchTrainer
        config = {"run": plain_run(run), "working_folder": str(Path.cwd())}
        config |= {"corpus_digest": corpus_digest, "checkpoints": folder, "own": own}
        restarts_left = MAX_RESTARTS
        while True:
            trainer = make_trainer(
                _worker,
                train_loop_config={**config, "actor": actor},
                scaling_config=api.ScalingConfig(
                    num_workers=count,
                    use_gpu=gpus > 0,
                    resources_per_worker={"CPU": cpus} | ({"GPU": gpus} if gpus else {}),
                ),
                torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
                run_config=api.RunConfig(name=f"train-{uuid.uuid4().hex}", **storage),
            )
            try:
                with _interruptible():
                    return TrainState.from_json(trainer.fit().return_value.encode())
            except ray.train.TrainingFailedError as error:
                failures = [*getattr(error, "worker_failures", {}).values()]
                if not restarts_left or not _may_help(failures):
                    raise _translate_failure(error) from error
                log.warning("training starts again at its newest checkpoint: %s", first_line(failures[0]))
                restarts_left -= 1


def _worker(config: dict[str, Any]) -> str:
    """Train one rank. Returns the final state as JSON on rank 0, an empty text elsewhere."""
    enter_folder(config["working_folder"])
    run = RunConfig.model_validate(config["run"])
    torch.set_num_threads(run.resources.threads)
    device = get_device()
    assert isinstance(device, torch.device)
    loop = LOOPS[run.train.task]
    job = loop.open_job(run, config["corpus_digest"], **config["own"])
    if job.checkpoints.folder != config["checkpoints"]:
        raise ConfigError(
            "the workers would train from other data than this command opened: a question set of the train section, or "
            "the encoder of train.init_from, was replaced meanwhile; run the same command again"
        )
    state = loop(job, config["actor"].report.remote, device).run()
    return state.to_json().decode() if rank() == 0 else ""


def _may_help(failures: Sequence[Exception]) -> bool:
    """Return whether a restart may help: a worker died, or all errors may be absent after it. A worker that only lost
    another, whose own error comes again, is no reason."""
    return any(map(_is_from_ray, failures)) or (len(failures) > 0 and all(map(_may_pass, failures)))


def _is_from_ray(error: Exception) -> bool:
    return type(error).__module__.startswith("ray.")


def _may_pass(error: Exception) -> bool:
    """Return whether a worker's error may be absent after a restart: it died (an error of Ray), or it lost another
    worker (torch has no class for what gloo raises), its GPU, or a file system. Others, as of memory, come again."""
    if isinstance(error, MvrRayError):
        return isinstance(error, NoAnswerError)
    is_lost = isinstance(error, (torch.distributed.DistError, torch.AcceleratorError, OSError))
    return _is_from_ray(error) or is_lost or "/gloo/" in str(error)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl-C during Ray Train, and restore the previous handler.

    Ray Train's own handler aborts the run, exits the process with status 0, and stays installed.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as error:
        raise KeyboardInterrupt from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


@contextmanager
def _storage(run: RunConfig, info: session.ClusterInfo) -> Iterator[dict[str, Any]]:
    """Return the options of Ray Train for its own small files: on this machine, or in the store if there are several
    machines."""
    if len(info.nodes) == 1 and not info.can_grow:
        with scratch_folder(Path(tempfile.gettempdir()), "mvr-train-") as folder:
            yield {"storage_path": str(folder)}
        return
    store = Store(run.store.path)
    local = pyarrow.fs.LocalFileSystem(), store.address
    # By the keys and options of the address, which Ray Train itself would discard.
    file_system, root = local if store.is_local else pyarrow.fs.FileSystem.from_uri(store.root)
    path = f"{root}/{paths.training_dir(run.encoder.name, f'ray-{uuid.uuid4().hex[:8]}')}"
    try:
        yield {"storage_filesystem": file_system, "storage_path": path}
    finally:
        with suppress(FileNotFoundError):
            file_system.delete_dir(path)


def _translate_failure(error: Exception) -> Exception:
    failures = getattr(error, "worker_failures", {}).values()
    for failure in failures:
        if isinstance(failure, MvrRayError) or not _may_pass(failure):
            return failure
    first = next(iter(failures), error)
    last_line = (str(first).strip() or type(first).__name__).splitlines()[-1]
    return ResourceError(
        f"training stopped after {MAX_RESTARTS} restarts: {last_line}; see whether a machine ran out of memory or left "
        f"the cluster, then run the same command again, it continues"
    )
