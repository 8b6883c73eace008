"""Train the encoder, in this process or on the workers of Ray Train, and save the best snapshot.

The checkpoints are ours, in the store, under a key that is a digest of everything that decides the result: the same
command goes on where it stopped, a changed one starts anew.
"""

import hashlib
import json
import logging
from typing import NamedTuple

import torch

from mvr_ray.config import RunConfig
from mvr_ray.core.encoder import DualEncoder
from mvr_ray.distributed.encoders import (
    encoder_spec,
    latest_fingerprint,
    local_encoder,
    make_encoder,
    save_encoder,
)
from mvr_ray.distributed.training.checkpoints import Checkpoints, TrainState
from mvr_ray.distributed.training.examples import input_digests, open_dev, open_examples
from mvr_ray.distributed.training.retriever import EpochReport, TrainingJob, loss_name, make_schedule, run_loop
from mvr_ray.distributed.training.workers import on_workers, own_device, threads
from mvr_ray.errors import ConfigError, EncoderError
from mvr_ray.store import layout
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.types import Progress, no_progress

log = logging.getLogger(__name__)


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
            f"train.task is {run.train.task}; that one is trained by "
            f"mvr_ray.distributed.training.{run.train.task}.train"
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
        total = make_schedule(run, job.model, len(job.examples)).total
        loss = loss_name(run, job.model)
        log.info("training: examples=%d steps=%d workers=%d loss=%s", len(job.examples), total, workers, loss)
        state = on_workers(run, _learn, progress) if workers else run_loop(job, progress, own_device(run))
        record = _save(run, store, job, state)
        snapshot = _announce(run, store, record)
        job.checkpoints.finish(record)
        return snapshot


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
    newest = latest_fingerprint(store, wanted)
    held = local_encoder(store, wanted, newest) if newest else local_encoder(store, name, wanted)
    encoder = DualEncoder.load(held.folder)
    asked, has = encoder_spec(run).settings(), encoder.spec.settings()
    if asked != has:
        differing = sorted(set(asked.items()) ^ set(has.items()))
        raise EncoderError(
            f"train.init_from {wanted} was made with other settings than the encoder section asks for: "
            f"{', '.join(dict(differing))}; make them equal, or start from the backbone"
        )
    return encoder.lower("fp32")


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
