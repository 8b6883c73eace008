"""Train the encoder, in this process or on the workers of Ray Train, and save the best snapshot.

The checkpoints are ours, in the store, under a key that is a digest of everything that decides the result: the same
command goes on where it stopped, a changed one starts anew. Ray Train places the workers, joins them in one process
group and starts them again when one dies; its own silent resume by name is avoided by a fresh name each time.
"""

import hashlib
import json
import logging
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray
import ray.train
import torch
from ray.train.torch import TorchConfig, TorchTrainer, get_device

from mvr_ray.config import RunConfig, StoreConfig
from mvr_ray.core.encoder import DualEncoder
from mvr_ray.core.training import rank
from mvr_ray.distributed import session
from mvr_ray.distributed.encoders import encoder_spec, local_encoder, make_encoder, save_encoder
from mvr_ray.distributed.relay import relayed, telling
from mvr_ray.distributed.train_checkpoints import Checkpoints, TrainState
from mvr_ray.distributed.train_examples import input_digests, open_dev, open_examples
from mvr_ray.distributed.train_loop import EpochReport, TrainingJob, loss_name, make_schedule, run_loop
from mvr_ray.errors import ConfigError, EncoderError, MvrRayError, ResourceError
from mvr_ray.store import layout
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.types import Progress, no_progress

log = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""How often the workers are started again after one died."""

Learn = Callable[[RunConfig, Progress, torch.device], TrainState]
"""What a worker does: train as the run says, on its device."""


class EncoderSnapshot(NamedTuple):
    """A trained encoder in the store: `folder` is its path there. `metrics` are those of its best epoch."""

    name: str
    fingerprint: str
    folder: str
    metrics: dict[str, float]
    epochs: list[EpochReport]


def train(run: RunConfig, progress: Progress = no_progress) -> EncoderSnapshot:
    """Train as the `train` section says; the snapshot is then the newest of `encoder.name`.

    Raises ConfigError, DataError, MissingInputError or EncoderError before any worker starts, ResourceError when the
    workers cannot be placed or keep dying.
    """
    if run.train.task != "retriever":
        raise ConfigError(
            f"train.task is {run.train.task}; that one is trained by mvr_ray.distributed.train_reader.train"
        )
    store, workers = Store(run.store.path), run.resources.train_workers
    if run.train.batch_questions % max(1, workers):
        raise ConfigError(
            f"train.batch_questions is {run.train.batch_questions}, which {workers} workers (resources.train_workers) "
            f"cannot share evenly; make it a multiple of {workers}"
        )
    with threads(run.resources.torch_threads):
        job = open_job(run)
        finished = job.checkpoints.finished()
        if finished and store.exists(layout.encoder_dir(run.encoder.name, json.loads(finished)["fingerprint"])):
            return _announce(run, store, finished)
        total = make_schedule(run, len(job.examples)).total
        loss = loss_name(run, job.model)
        log.info("training: examples=%d steps=%d workers=%d loss=%s", len(job.examples), total, workers, loss)
        state = on_workers(run, _learn, progress) if workers else run_loop(job, progress, own_device(run))
        record = _save(run, store, job, state)
        snapshot = _announce(run, store, record)
        job.checkpoints.finish(record)
        return snapshot


def own_device(run: RunConfig) -> torch.device:
    """Where training in this process happens."""
    if not run.resources.gpus_per_trainer:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ResourceError(
            f"resources.gpus_per_trainer is {run.resources.gpus_per_trainer:g}, but torch sees no GPU on this machine; "
            f"set it to 0, or train on the workers of a cluster with resources.train_workers"
        )
    return torch.device("cuda")


def open_job(run: RunConfig) -> TrainingJob:
    """What a rank trains with. Reading it is cheap: passages stay in their mapped files."""
    store = Store(run.store.path)
    corpus = Corpus.open(store, run.prepare.corpus)
    model = _starting_encoder(run, store, corpus)
    key = training_key(run, store, model.fingerprint)
    loss_name(run, model)
    examples = open_examples(store, corpus, model.splitter, run.train)
    dev = open_dev(store, corpus, run.train)
    checkpoints = Checkpoints(store, layout.training_dir(run.encoder.name, key))
    return TrainingJob(run, model, examples, dev, checkpoints)


def training_key(run: RunConfig, store: Store, start: str) -> str:
    """Digest of what decides the weights: settings, starting weights, passages and questions."""
    corpus = Corpus.open(store, run.prepare.corpus)
    parts = [run.digest("encoder", "train"), start, corpus.digest, *input_digests(store, run.train)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _starting_encoder(run: RunConfig, store: Store, corpus: Corpus) -> DualEncoder:
    name, wanted = run.encoder.name, run.train.init_from
    if wanted is None:
        return make_encoder(run, store, corpus)
    encoder = DualEncoder.load(local_encoder(store, name, wanted).folder)
    asked, has = encoder_spec(run).settings(), encoder.spec.settings()
    if asked != has:
        differing = sorted(set(asked.items()) ^ set(has.items()))
        raise EncoderError(
            f"train.init_from {wanted} was made with other settings than the encoder section asks for: "
            f"{', '.join(dict(differing))}; make them equal, or start from the backbone"
        )
    return encoder


def _save(run: RunConfig, store: Store, job: TrainingJob, state: TrainState) -> bytes:
    """Save the best weights as a snapshot; returns what is recorded of it, as JSON."""
    model = job.model.to("cpu").eval()
    if state.best_step >= 0:
        job.checkpoints.load_model(model, state.best_step, best=True)
    held = save_encoder(store, run.encoder.name, model)
    metrics: dict[str, float] = {"steps": float(state.step)}
    if state.before is not None:
        metrics["dev_top1_before"] = state.before
    best = next((epoch for epoch in state.epochs if epoch["step"] == state.best_step), {})
    named = ("loss", "loss_global", "loss_local", "view_pair_cosine", "lv", "dev_top1")
    metrics |= {name: float(best[name]) for name in named if best.get(name) is not None}
    log.info("trained encoder: fingerprint=%s best_step=%d", held.fingerprint, state.best_step)
    if state.before is not None and state.best_step >= 0 and state.best_accuracy <= state.before:
        told = "training did not raise dev accuracy: before=%.3f best=%.3f; more questions, or a lower train.lr, may"
        log.warning(told, state.before, state.best_accuracy)
    record = {"fingerprint": held.fingerprint, "metrics": metrics, "epochs": state.epochs}
    return (json.dumps(record, indent=1) + "\n").encode()


def _announce(run: RunConfig, store: Store, record: bytes) -> EncoderSnapshot:
    """Name a snapshot the newest one."""
    name, held = run.encoder.name, json.loads(record)
    store.write_bytes(layout.latest_encoder(name), record)
    epochs = [EpochReport(**epoch) for epoch in held["epochs"]]
    fingerprint = held["fingerprint"]
    return EncoderSnapshot(name, fingerprint, layout.encoder_dir(name, fingerprint), held["metrics"], epochs)


def _learn(run: RunConfig, progress: Progress, device: torch.device) -> TrainState:
    return run_loop(open_job(run), progress, device)


def on_workers(run: RunConfig, learn: Learn, progress: Progress) -> TrainState:
    """`learn` on every worker of Ray Train, which are joined in one process group; returns rank 0's state.

    Workers that die are started again. Raises ResourceError when they cannot be placed or keep dying.
    """
    resources = run.resources
    placed = run.model_copy(update={"store": StoreConfig(path=Store(run.store.path).address)})
    count, cpus, gpus = resources.train_workers, resources.cpus_per_trainer, resources.gpus_per_trainer
    with ExitStack() as stack:
        info = stack.enter_context(session.connect(resources, dashboard=True))
        session.require(info, [session.Need("trainers", count, cpus, gpus)])
        storage = stack.enter_context(_storage(run, info))
        board = stack.enter_context(relayed(progress))
        api: Any = ray.train
        make_trainer: Any = TorchTrainer
        trainer = make_trainer(
            _worker,
            train_loop_config={"run": placed.model_dump(mode="json"), "board": board, "learn": learn},
            scaling_config=api.ScalingConfig(
                num_workers=count,
                use_gpu=gpus > 0,
                resources_per_worker={"CPU": cpus} | ({"GPU": gpus} if gpus else {}),
            ),
            torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
            run_config=api.RunConfig(
                name=f"train-{uuid.uuid4().hex}",
                storage_path=storage,
                failure_config=api.FailureConfig(max_failures=MAX_RESTARTS),
            ),
        )
        try:
            with _interruptible():
                result = trainer.fit()
        except ray.train.TrainingFailedError as error:
            raise _own_error(error) from error
    return TrainState.from_json(result.return_value.encode())


def _worker(config: dict[str, Any]) -> str:
    """One rank. Returns the final state as JSON; the driver gets rank 0's."""
    run = RunConfig.model_validate(config["run"])
    torch.set_num_threads(run.resources.torch_threads)
    device = get_device()
    assert isinstance(device, torch.device)
    state = config["learn"](run, telling(config["board"]), device)
    return state.to_json().decode() if rank() == 0 else ""


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ray Train's own handler of Ctrl-C aborts the run, ends the process with status 0, and stays for ever after.

    Here the aborted run is a KeyboardInterrupt, as everywhere, and the handler that was there comes back.
    """
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as ended:
        raise KeyboardInterrupt from ended
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


@contextmanager
def _storage(run: RunConfig, info: session.ClusterInfo) -> Iterator[str]:
    """Where Ray Train keeps its own small files: this machine, or the store when there are several."""
    if len(info.nodes) == 1 and not info.can_grow:
        with tempfile.TemporaryDirectory(prefix="mvr-train-", ignore_cleanup_errors=True) as folder:
            yield folder
        return
    store = Store(run.store.path)
    path = layout.training_dir(run.encoder.name, f"ray-{uuid.uuid4().hex[:8]}")
    try:
        yield str(Path(store.where(path)).expanduser().resolve()) if store.is_local else store.where(path)
    finally:
        store.delete_dir(path)


def _own_error(error: Exception) -> Exception:
    failures = getattr(error, "worker_failures", {})
    for failure in failures.values():
        cause = getattr(failure, "cause", failure)
        if isinstance(cause, MvrRayError):
            return cause
    first = next(iter(failures.values()), error)
    told = str(first).strip().splitlines()
    return ResourceError(
        f"training stopped after {MAX_RESTARTS} restarts: {told[-1] if told else type(first).__name__}; see whether a "
        f"machine ran out of memory or left the cluster, then run the same command again, it continues"
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use so many threads, and as many as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
