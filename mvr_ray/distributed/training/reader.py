"""Teach a backbone to read: span cross entropy on the gold passages of questions whose answers have a known place.

Every window of the passage is an input; where the answer is not wholly in it, both ends are the null token ([CLS]).
Each question also meets `train.num_hard_negatives` passages that do not answer it: without them a reader finds a good
answer in every passage, and cannot choose among those of a ranking.

Rank r of W takes the windows r, r + W, .. of a batch, and the loss is the mean over all of them, so W ranks have the
loss and gradient of one process. Placing, checkpoints and resuming are those of the retriever's training.

Shapes: F windows, T tokens.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from mvr_ray.config import RunConfig, resolve_path
from mvr_ray.core.answers import exact_match_score, f1_score
from mvr_ray.core.batches import Example, strangers
from mvr_ray.core.reading.reader import Reader, ToRead
from mvr_ray.core.reading.spans import span_losses, tokens_of
from mvr_ray.core.reading.windows import Window
from mvr_ray.core.training import chunks, rank, seeded, world_size
from mvr_ray.distributed.models import READERS, reader_spec
from mvr_ray.distributed.training.checkpoints import EpochSums
from mvr_ray.distributed.training.examples import DevReading, open_answer_dev, open_answer_examples
from mvr_ray.distributed.training.headed import HeadedJob, HeadedSnapshot, HeadedTask, checkpoints_of, train_headed
from mvr_ray.distributed.training.steps import StepLoop, plan_steps
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.types import Progress, no_progress

log = logging.getLogger(__name__)

_WINDOWS = 2


class ReaderEpoch(NamedTuple):
    """One epoch's metrics; those of dev questions are on their gold passages."""

    epoch: int
    step: int
    loss: float
    dev_exact_match: float | None
    dev_f1: float | None


class Target(NamedTuple):
    """A window and where the answer's ends stand in it."""

    window: Window
    start: int
    end: int


class DevScores(NamedTuple):
    exact_match: float
    f1: float


def open_job(run: RunConfig) -> HeadedJob:
    """What a rank trains with."""
    store = Store(run.store.path)
    corpus = Corpus.open(store, run.prepare.corpus)
    model = Reader.from_backbone(str(resolve_path(run.encoder.backbone)), reader_spec(run), run.train.seed)
    examples, dev = open_answer_examples(store, corpus, run.train), open_answer_dev(store, corpus, run.train)
    return HeadedJob(run, model, examples, dev, checkpoints_of(run, run.train.reader, model, corpus))


class ReaderLoop(StepLoop):
    def __init__(self, job: HeadedJob, progress: Progress, device: torch.device) -> None:
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


def dev_scores(reader: Reader, dev: list[DevReading], tokens_per_batch: int) -> DevScores:
    found = reader.read([ToRead(item.question, [item.text]) for item in dev], tokens_per_batch)
    texts = [item.text[span.start : span.stop] if span else "" for item, [span] in zip(dev, found)]
    return DevScores(
        float(np.mean([exact_match_score(text, item.answers) for text, item in zip(texts, dev)])),
        float(np.mean([f1_score(text, item.answers) for text, item in zip(texts, dev)])),
    )


TASK = HeadedTask(READERS, open_job, ReaderLoop, ReaderEpoch, ("loss", "dev_exact_match", "dev_f1"))


def train(run: RunConfig, progress: Progress = no_progress) -> HeadedSnapshot:
    """Train `encoder.backbone` to read; the snapshot is then the newest of `train.reader`. Raises as `train_headed`."""
    return train_headed(TASK, run, progress)
