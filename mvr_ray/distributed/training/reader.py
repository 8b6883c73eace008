"""Teach a backbone to read: span cross entropy on the gold passages of questions whose answers have a known place.

Every window of the passage is an input; where the answer is not wholly in it, both ends are the null token ([CLS]).
Each question also meets `train.num_hard_negatives` passages that do not answer it: without them a reader finds a good
answer in every passage, and cannot choose among those of a ranking.

Rank r of W takes the windows r, r + W, .. of a batch, and the loss is the mean over all of them, so W ranks have the
loss and gradient of one process. Placing, checkpoints and resuming are those of the retriever's training.

    <store>/readers/<name>/<fingerprint>/      a Hugging Face folder and reader.json
    <store>/readers/<name>/latest.json         which one was trained last, and its metrics

Shapes: F windows, T tokens.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from mvr_ray.config import RunConfig, resolve_path
from mvr_ray.core.answers import exact_match_score, f1_score
from mvr_ray.core.batches import Example
from mvr_ray.core.reader import Reader, ToRead
from mvr_ray.core.spans import span_losses, tokens_of
from mvr_ray.core.training import chunks, rank, seeded, world_size
from mvr_ray.core.windows import Window
from mvr_ray.distributed.readers import reader_spec, save_reader
from mvr_ray.distributed.training.checkpoints import Checkpoints, EpochSums, TrainState
from mvr_ray.distributed.training.examples import (
    DevReading,
    QuestionExamples,
    input_digests,
    open_answer_dev,
    open_answer_examples,
)
from mvr_ray.distributed.training.steps import StepLoop, plan_steps
from mvr_ray.distributed.training.workers import on_workers, own_device, threads
from mvr_ray.store import layout
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.types import Passage, Progress, no_progress

log = logging.getLogger(__name__)

_WINDOWS = 2


class ReaderEpoch(NamedTuple):
    """One epoch's metrics; those of dev questions are on their gold passages."""

    epoch: int
    step: int
    loss: float
    dev_exact_match: float | None
    dev_f1: float | None


class ReaderSnapshot(NamedTuple):
    """A trained reader in the store: `folder` is its path there. `metrics` are those of its best epoch."""

    name: str
    fingerprint: str
    folder: str
    metrics: dict[str, float]
    epochs: list[ReaderEpoch]


class ReaderJob(NamedTuple):
    """Everything a rank needs; `model` is as training starts from it."""

    run: RunConfig
    model: Reader
    examples: QuestionExamples
    dev: list[DevReading]
    checkpoints: Checkpoints


class Target(NamedTuple):
    """A window and where the answer's ends stand in it."""

    window: Window
    start: int
    end: int


class DevScores(NamedTuple):
    exact_match: float
    f1: float


def train(run: RunConfig, progress: Progress = no_progress) -> ReaderSnapshot:
    """Train `encoder.backbone` to read, as the `train` section says; it is then the newest of `train.reader`.

    Raises ConfigError, DataError, MissingInputError or ReaderError before any worker starts, ResourceError when the
    workers cannot be placed or keep dying.
    """
    store, workers = Store(run.store.path), run.resources.train_workers
    with threads(run.resources.torch_threads):
        job = open_job(run)
        finished = job.checkpoints.finished()
        if finished and store.exists(layout.reader_dir(run.train.reader, json.loads(finished)["fingerprint"])):
            return _announce(run, store, finished)
        log.info("training a reader: questions=%d workers=%d", len(job.examples), workers)
        state = on_workers(run, learn, progress) if workers else ReaderLoop(job, progress, own_device(run)).run()
        record = _save(run, store, job, state)
        snapshot = _announce(run, store, record)
        job.checkpoints.finish(record)
        return snapshot


def learn(run: RunConfig, progress: Progress, device: torch.device) -> TrainState:
    """One rank's training."""
    return ReaderLoop(open_job(run), progress, device).run()


def open_job(run: RunConfig) -> ReaderJob:
    """What a rank trains with. Its checkpoints lie under a digest of all that decides the weights."""
    store = Store(run.store.path)
    corpus = Corpus.open(store, run.prepare.corpus)
    spec = reader_spec(run)
    model = Reader.from_backbone(str(resolve_path(run.encoder.backbone)), spec, run.train.seed)
    examples, dev = open_answer_examples(store, corpus, run.train), open_answer_dev(store, corpus, run.train)
    sets = input_digests(store, run.train)
    parts = ["reader", run.digest("train"), asdict(spec), model.fingerprint, corpus.digest, *sets]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    checkpoints = Checkpoints(store, layout.training_dir(run.train.reader, key))
    return ReaderJob(run, model, examples, dev, checkpoints)


class ReaderLoop(StepLoop):
    def __init__(self, job: ReaderJob, progress: Progress, device: torch.device) -> None:
        schedule = plan_steps(job.run.train, len(job.examples))
        super().__init__(job.run.train, job.model, schedule, job.checkpoints, progress, device)
        self.job = job

    def begin(self, step: int) -> None:
        scores = self._dev_scores() if step < 0 else None
        self.state.before = scores.f1 if scores else None

    def groups(self) -> list[dict[str, Any]]:
        return self.model.parameter_groups(self.cfg.lr, self.cfg.head_lr_factor, self.cfg.weight_decay)

    def learn(self) -> float:
        numbers, epoch = self.batch_numbers(self.job.examples.passage_E, self.job.examples.article_E)
        targets = targets_of(self.model, self.job.examples.get(numbers, epoch), self.cfg.num_hard_negatives)
        total = torch.zeros((), device=self.device)
        for number, some in enumerate(chunks(targets[rank() :: world_size()], self.cfg.cache_chunk)):
            forward = partial(self.model, [target.window for target in some])
            start_FT, end_FT, candidate_FT = seeded(self.settings, (_WINDOWS, number), self.device, forward)
            start_F, end_F = torch.tensor([target[1:] for target in some], device=self.device).T
            losses_F = span_losses(start_FT, end_FT, candidate_FT, start_F, end_F)
            loss = losses_F.sum() * world_size() / len(targets)
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
        scores = self._dev_scores()
        if rank():
            return
        report = ReaderEpoch(
            epoch=self.schedule.epoch_of(state.step - 1),
            step=state.step,
            loss=sums.loss / max(1, sums.steps),
            dev_exact_match=scores.exact_match if scores else None,
            dev_f1=scores.f1 if scores else None,
        )
        state.epochs.append(report._asdict())
        log.info("epoch: %s", " ".join(f"{name}={value}" for name, value in report._asdict().items()))
        self.keep_best(report.dev_f1)

    def _dev_scores(self) -> DevScores | None:
        """Means over the dev questions, each read in its gold passage; None without any, and beside rank 0."""
        if not self.job.dev or rank():
            return None
        return dev_scores(self.model, self.job.dev, self.job.run.read.tokens_per_batch)


def targets_of(reader: Reader, examples: Sequence[Example], num_negatives: int = 0) -> list[Target]:
    """Windows of each example's passage with the answer's ends in it, then of passages that do not answer it."""
    windower, made = reader.windower, []
    asked = [(example, strangers(at, examples, num_negatives)) for at, example in enumerate(examples)]
    tokens = windower.tokenize(passage.text for own, others in asked for passage in (own.passage, *others))
    for example, others in asked:
        frame, passage = windower.frame(example.text), tokens[example.passage.text]
        first, last = tokens_of(passage.starts, passage.stops, example.answer_start, example.answer_stop)
        for window in windower.windows(frame, passage):
            inside = first >= 0 and window.holds(first, last)
            ends = (window.place(first), window.place(last)) if inside else (window.null, window.null)
            made.append(Target(window, *ends))
        for other in others:
            made += [Target(window, window.null, window.null) for window in windower.windows(frame, tokens[other.text])]
    return made


def strangers(at: int, examples: Sequence[Example], most: int) -> list[Passage]:
    """Passages that do not answer example `at`: its hard negatives, else those of the examples after it in the batch.

    A passage in which the answer's words stand, or that is another positive, is none.
    """
    own = examples[at]
    if own.negatives:
        return list(own.negatives[:most])
    answer = own.passage.text[own.answer_start : own.answer_stop].lower()
    barred = {own.passage.id, *own.known_ids}
    found: dict[str, Passage] = {}
    for other in (*examples[at + 1 :], *examples[:at]):
        if len(found) == most:
            break
        if other.passage.id not in barred and answer not in other.passage.text.lower():
            found[other.passage.id] = other.passage
    return list(found.values())


def dev_scores(reader: Reader, dev: list[DevReading], tokens_per_batch: int) -> DevScores:
    found = reader.read([ToRead(item.question, [item.text]) for item in dev], tokens_per_batch)
    texts = [item.text[span.start : span.stop] if span else "" for item, [span] in zip(dev, found)]
    return DevScores(
        float(np.mean([exact_match_score(text, item.answers) for text, item in zip(texts, dev)])),
        float(np.mean([f1_score(text, item.answers) for text, item in zip(texts, dev)])),
    )


def _save(run: RunConfig, store: Store, job: ReaderJob, state: TrainState) -> bytes:
    """Save the best weights as a reader; returns what is recorded of it, as JSON."""
    model = job.model.to("cpu").eval()
    if state.best_step >= 0:
        job.checkpoints.load_model(model, state.best_step, best=True)
    fingerprint = save_reader(store, run.train.reader, model)
    best = next((epoch for epoch in state.epochs if epoch["step"] == state.best_step), {})
    named = ("loss", "dev_exact_match", "dev_f1")
    metrics = {"steps": float(state.step)} | {name: best[name] for name in named if best.get(name) is not None}
    if state.before is not None:
        metrics["dev_f1_before"] = state.before
    log.info("trained reader: fingerprint=%s best_step=%d", fingerprint, state.best_step)
    record = {"fingerprint": fingerprint, "metrics": metrics, "epochs": state.epochs}
    return (json.dumps(record, indent=1) + "\n").encode()


def _announce(run: RunConfig, store: Store, record: bytes) -> ReaderSnapshot:
    """Name a reader the newest one."""
    name, held = run.train.reader, json.loads(record)
    store.write_bytes(layout.latest_reader(name), record)
    epochs = [ReaderEpoch(**epoch) for epoch in held["epochs"]]
    folder = layout.reader_dir(name, held["fingerprint"])
    return ReaderSnapshot(name, held["fingerprint"], folder, held["metrics"], epochs)
