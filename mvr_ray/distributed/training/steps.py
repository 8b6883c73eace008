"""Run the training steps of one rank, with or without Ray: rates, checkpoints and resuming.

A step is a function of the weights, the optimiser and its number: batches, dropout and learning rates follow from
(seed, step), so a killed run resumes from its last checkpoint and reaches the same weights. Subclasses define the loss
of a step and the metrics of an epoch: `retriever`, or `TaskModelLoop` for a model with a task head.
"""

import hashlib
import inspect
import json
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from numbers import Number
from types import CodeType, FunctionType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from mvr_ray.config import RunConfig, TrainConfig, resolve_model
from mvr_ray.core.encoding.precision import multiplies_bf16
from mvr_ray.core.encoding.training_attention import training_attention
from mvr_ray.core.judging.answers import AnswerMatcher
from mvr_ray.core.learning.batches import Example, plan_epoch
from mvr_ray.core.learning.losses import LossTerms
from mvr_ray.core.learning.training import PassSettings, average_gradients, chunks, lr_factor, rank, world_size
from mvr_ray.distributed.models import MODEL_CLASSES, translate_out_of_memory
from mvr_ray.distributed.training.checkpoints import Checkpoints, EpochSums, TrainState
from mvr_ray.distributed.training.examples import input_digests
from mvr_ray.errors import ConfigError, StorageError
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.model_records import ModelKind
from mvr_ray.types import IntArray, Progress

log = logging.getLogger(__name__)

_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FP32_TYPES = ("deberta",)
"""Model types that transformers trains in fp32 alone: it fills DeBERTa's scores with a number that bf16 lacks."""
LOG_INTERVAL_S = 10.0
NUM_ROWS = 1000
"""Of a long training the metrics have about this many rows."""


class TrainingJob(NamedTuple):
    """Everything a rank needs; `model` has the initial weights, `dev` is the loop's dev set."""

    run: RunConfig
    name: str
    model: Any
    examples: Any
    dev: Any
    checkpoints: Checkpoints
    loss: "OwnLoss | None" = None


class OwnLoss(NamedTuple):
    """A user's function of the signature of `losses.camvr_loss`, and its source with the plain values that it reads,
    which distinguish its training."""

    function: Callable[..., LossTerms | Tensor]
    source: str

    @classmethod
    def of(cls, function: Callable[..., LossTerms | Tensor]) -> "OwnLoss":
        """Read the source of a function. Raises ConfigError where it has none, and for a method, whose object may have
        values of any kind."""
        functions = function, inspect.unwrap(function)  # of a decorated one, the source is the second's
        if all(map(inspect.isfunction, functions)):
            with suppress(OSError):
                return cls(function, "".join((inspect.getsource(function), *map(_plain_values, functions))))
        raise ConfigError(
            f"train: {function!r:.60} is not a function whose source can be read, and a training is found again by the "
            f"source of its loss; define the loss by def, in a file or a cell of a notebook"
        )


def _plain_values(function: FunctionType) -> str:
    """Return the numbers and texts among the defaults, closed-over and global variables that a function reads; an empty
    text for none."""
    names = _names(function.__code__)
    values = {name: value for name, value in function.__globals__.items() if name in names}
    values |= inspect.getclosurevars(function).nonlocals
    values |= {str(at): value for at, value in enumerate(function.__defaults__ or ())} | (function.__kwdefaults__ or {})
    plain = {name: value for name, value in sorted(values.items()) if _is_plain(value)}
    return repr(plain) if plain else ""


def _names(code: CodeType) -> set[str]:
    """Return the names that a function reads, also in the functions and comprehensions in it."""
    return {*code.co_names}.union(*(_names(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, Number | str)


def training_job(
    run: RunConfig,
    name: str,
    corpus: Corpus,
    model: Any,
    data: tuple[Any, Any],
    settings: Sequence[Any],
    loss: OwnLoss | None = None,
) -> TrainingJob:
    """Make the job of a rank. `data` are the examples and the dev set; checkpoints are under a digest of everything
    that determines the weights: these settings, the source of an own loss, the initial weights, and the content of the
    data."""
    settings = [*settings, loss.source] if loss else settings
    parts = [*settings, model.fingerprint, corpus.digest, *input_digests(corpus, run.train)]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    return TrainingJob(run, name, model, *data, Checkpoints(corpus.store, paths.training_dir(name, key)), loss)


class Schedule(NamedTuple):
    """Steps of a training: `warm` of the warm start, then `steps`, `epoch_steps` an epoch."""

    warm: int
    steps: int
    epoch_steps: int

    @property
    def total(self) -> int:
        return self.warm + self.steps

    def epoch_of(self, step: int) -> int:
        return max(0, step - self.warm) // self.epoch_steps


class StepLoop(ABC):
    """Run `learn` until the schedule ends. A model is a `StoredModel`."""

    kind: ClassVar[ModelKind]
    epoch: ClassVar[type[Any]]
    """The report of an epoch: `epoch`, `step`, `figures` and the dev metrics, among others."""
    figures: ClassVar[tuple[str, ...]] = ("loss",)
    """Fields of an epoch that are metrics of the model."""
    dev_metrics: ClassVar[tuple[str, ...]]
    """Names of the dev metrics, also fields of an epoch; the last one selects the best epoch."""

    def __init__(self, job: TrainingJob, progress: Progress, device: torch.device, warm: int = 0) -> None:
        """`warm` is the number of steps of the warm start."""
        cfg = job.run.train
        epoch_steps = math.ceil(len(job.examples) / cfg.batch_questions)
        steps = epoch_steps * cfg.epochs
        self.schedule = Schedule(warm, min(steps, cfg.max_steps) if cfg.max_steps else steps, epoch_steps)
        if cfg.snapshot_steps and max(cfg.snapshot_steps) > self.schedule.steps:
            raise ConfigError(
                f"train.snapshot_steps has {max(cfg.snapshot_steps)}, but training ends after {self.schedule.steps} "
                f"steps; leave it out, or train longer (train.epochs, train.max_steps)"
            )
        _require_support(job.model, cfg)
        self.job, self.cfg, self.checkpoints, self.progress = job, cfg, job.checkpoints, progress
        self.matcher = AnswerMatcher(job.run.evaluate.match)
        self.device = device
        self.model = job.model.to(device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=cfg.precision == "fp16")
        self.scaler.scale(torch.zeros((), device=device))  # creates the lazily initialised scale
        self.parameters: list[nn.Parameter] = [p for p in self.model.parameters() if p.requires_grad]
        self.state = TrainState(sums=self.new_sums())
        self._plan: tuple[int, IntArray] | None = None
        self._last_log_s = 0.0
        self._new_figures: list[Mapping[str, float]] = []  # of the steps since the newest row of the metrics
        max_steps = max(1, self.schedule.total // NUM_ROWS)
        self.row_steps = max(n for n in range(1, max_steps + 1) if cfg.checkpoint_steps % n == 0)

    @classmethod
    @abstractmethod
    def open_job(cls, run: RunConfig, corpus_digest: str | None = None) -> TrainingJob:
        """Open the model and data of a rank, from the last corpus or that of a digest. This is cheap: passages stay in
        their mapped files."""

    @abstractmethod
    def groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups for AdamW."""

    @abstractmethod
    def learn(self) -> dict[str, float]:
        """Add this rank's gradients of step `state.step`, times `loss_scale`; returns `loss` and what the metrics have
        beside it."""

    @abstractmethod
    def measure(self) -> tuple[float, ...]:
        """Return the dev metrics, on rank 0."""

    def new_sums(self) -> EpochSums:
        return EpochSums()

    def report(self, sums: EpochSums, **fields: Any) -> Any:
        """Return the epoch's report, from the fields that every loop has."""
        return self.epoch(**fields)

    def run(self) -> TrainState:
        """Train from the last checkpoint, or the start, to the end; every rank returns the final state."""
        cuda = self.device.type == "cuda"
        batch = f"{self.cfg.batch_questions} questions"
        with (
            translate_out_of_memory(batch, "train.batch_questions, or set train.cache_chunk"),
            torch.random.fork_rng(devices=[self.device] if cuda else []),
            training_attention(self.model.transformers),
        ):
            return self._run()

    def _run(self) -> TrainState:
        try:
            self.model.set_dropout(self.cfg.dropout)
            if self.cfg.gradient_checkpointing:
                self.model.set_gradient_checkpointing(True)
            optimiser = self._resume()
            if not rank():
                self.checkpoints.write_metrics(self.state.metrics)
            while self.state.step < self.schedule.total and not self._out_of_patience():
                if self.state.step == self.schedule.warm:
                    optimiser = self._optimiser()
                self._step(optimiser)
                num_steps = self.state.step - self.schedule.warm
                if num_steps in self.cfg.snapshot_steps and not rank():
                    self.checkpoints.save_weights(self.model, num_steps, "snapshot")
                if self._epoch_ended():
                    self.end_epoch()
                if self._epoch_ended() or self.state.step % self.cfg.checkpoint_steps == 0:
                    self._save(optimiser)
            return self.state
        finally:
            if self.state.metrics and not rank():
                with suppress(StorageError):  # of what was interrupted or diverged, up to its last step
                    self.checkpoints.write_metrics(self.state.metrics)
            if self.cfg.gradient_checkpointing:
                self.model.set_gradient_checkpointing(False)
            self.model.eval()

    @property
    def warm(self) -> bool:
        """Whether the step `state.step` belongs to the warm start."""
        return self.state.step < self.schedule.warm

    @property
    def settings(self) -> PassSettings:
        cfg = self.cfg
        return PassSettings(cfg.cache_chunk, _PRECISIONS[self.precision], cfg.seed, self.state.step)

    @property
    def precision(self) -> str:
        return self.state.precision or self.cfg.precision

    @property
    def loss_scale(self) -> float:
        return float(self.scaler.get_scale()) if self.scaler.is_enabled() else 1.0

    def batch(self) -> list[Example]:
        """Return this step's examples of all ranks."""
        cfg, examples = self.cfg, self.job.examples
        step = self.state.step if self.warm else self.state.step - self.schedule.warm
        epoch, row = divmod(step, self.schedule.epoch_steps)
        if self._plan is None or self._plan[0] != epoch:
            sizes = {"batch": cfg.batch_questions, "per_passage": cfg.questions_per_passage}
            plan_SB = plan_epoch(examples.passage_E, examples.article_E, **sizes, seed=cfg.seed, epoch=epoch)
            self._plan = (epoch, plan_SB)
        return examples.get(self._plan[1][row].tolist(), epoch)

    def end_epoch(self) -> None:
        """Measure the epoch, save the best weights, and reset the epoch's sums."""
        state, sums = self.state, self.state.sums
        state.sums = self.new_sums()
        dev = self._measure_dev()
        if rank():
            return
        number, loss = self.schedule.epoch_of(state.step - 1), sums.loss / max(1, sums.steps)
        report = self.report(sums, epoch=number, step=state.step, loss=loss, **dict(zip(self.dev_metrics, dev)))
        state.epochs.append(report._asdict())
        row = state.metrics[-1]
        figures = report._asdict().items()
        row |= {name: value for name, value in figures if name not in row and isinstance(value, float | bool)}
        log.info("epoch: %s", " ".join(f"{name}={value}" for name, value in report._asdict().items()))
        self._keep_best(dev[-1])

    def _measure_dev(self) -> tuple[float | None, ...]:
        """Measure on rank 0; None without dev questions and on other ranks."""
        return self.measure() if self.job.dev and not rank() else (None,) * len(self.dev_metrics)

    def _keep_best(self, accuracy: float | None) -> None:
        """Save these weights if they are the best so far, or if there is no accuracy."""
        if accuracy is None or accuracy > self.state.best_accuracy:
            self.state.best_accuracy = -1.0 if accuracy is None else accuracy
            self.state.best_step = self.state.step
            self.checkpoints.save_weights(self.model, self.state.step, "best")

    def _out_of_patience(self) -> bool:
        """Return whether, at the end of an epoch, the newest `train.patience` dev accuracies on rank 0 are none
        better."""
        if not self.cfg.patience or not self._epoch_ended():
            return False
        num_since = sum(epoch["step"] > self.state.best_step for epoch in self.state.epochs)
        is_over = self._from_rank_0(num_since) >= self.cfg.patience
        if is_over:
            log.info("training stops: step=%d patience=%d", self.state.step, self.cfg.patience)
        return is_over

    def _from_rank_0(self, number: int) -> int:
        """Return the number that rank 0 passes, on every rank."""
        common = torch.tensor([number], device=self.device)
        if world_size() > 1:
            dist.broadcast(common, 0)
        return int(common.item())

    def _resume(self) -> torch.optim.Optimizer:
        """Load state, weights and optimiser of the newest checkpoint on rank 0, or initialise them."""
        step = self._from_rank_0(self.checkpoints.latest_step())
        if step < 0:
            dev = self._measure_dev()
            self.state.before = dev[-1]
            if dev[-1] is not None:
                self.state.metrics = [{"step": 0, **dict(zip(self.dev_metrics, dev))}]
            if self.cfg.precision == "auto":
                self.state.precision = "bf16" if self._multiplies_bf16() else "fp32"
                log.info("train.precision=auto chose=%s", self.state.precision)
            return self._optimiser()
        log.info("training resumes: step=%d of %d", step, self.schedule.total)
        self.state = self.checkpoints.state(step)
        self.checkpoints.load_model(self.model, step)
        optimiser = self._optimiser()
        self.checkpoints.load_optimiser(optimiser, step)
        if self.state.loss_scale:
            self.scaler.load_state_dict(self.state.loss_scale)
        return optimiser

    def _multiplies_bf16(self) -> bool:
        """Return whether the device of every rank multiplies in bf16, and the model can be trained in it."""
        multiplies = multiplies_bf16(self.device) and not _fp32_types(self.model)
        all_multiply = torch.tensor([int(multiplies)], device=self.device)
        if world_size() > 1:
            dist.all_reduce(all_multiply, dist.ReduceOp.MIN)
        return bool(all_multiply.item())

    def _optimiser(self) -> torch.optim.Optimizer:
        groups = self.groups()
        for group in groups:
            group["base_lr"] = group["lr"]
        return torch.optim.AdamW(groups, eps=self.cfg.adam_eps, fused=True)

    def _step(self, optimiser: torch.optim.Optimizer) -> None:
        """Take a step. Raises ConfigError, on all ranks, where the averaged gradient is not finite."""
        self.model.train()
        step, schedule = self.state.step, self.schedule
        at, total = (step, schedule.warm) if self.warm else (step - schedule.warm, schedule.steps)
        factor = lr_factor(at, total, self.cfg.warmup_share)
        for group in optimiser.param_groups:
            group["lr"] = group["base_lr"] * factor
        optimiser.zero_grad(set_to_none=True)
        figures = self.learn()
        loss = figures["loss"]
        average_gradients(self.parameters)
        self.scaler.unscale_(optimiser)
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.cfg.clip_norm))
        # The scaler skips a step whose scaled gradient overflows, and scales less after it.
        overflows = self.scaler.is_enabled() and math.isfinite(loss)
        if not math.isfinite(norm) and not overflows:
            raise ConfigError(
                f"training diverged in step {step + 1} of {schedule.total}: the loss is {loss:.4g}, the norm of the "
                f"gradient {norm}; nothing of it was stored. Lower train.lr (it is {self.cfg.lr:g}), or see whether "
                f"the backbone holds weights that are no finite numbers"
            )
        self.scaler.step(optimiser)
        self.scaler.update()
        increment_version(self.parameters)  # the fused step omits it; caches for inference rely on it
        warm = self.warm
        self.state.step += 1
        self._add_figures({**figures, "lr": self.cfg.lr * factor, "grad_norm": norm})
        self._report(loss, warm)

    def _add_figures(self, figures: Mapping[str, float]) -> None:
        """Add a step's figures to the metrics: a row has the means of `row_steps` steps, or of fewer where the warm
        start or an epoch ends. Every checkpoint is at the end of a row, so a resumed training has the same rows."""
        self._new_figures.append(figures)
        step, warm = self.state.step, self.schedule.warm
        if step % self.row_steps and step != warm and not self._epoch_ended():
            return
        num_steps = len(self._new_figures)
        means = {name: _six_digits(sum(one[name] for one in self._new_figures) / num_steps) for name in figures}
        self._new_figures.clear()
        phase, epoch = ("warm start", 0.0) if step <= warm else ("train", (step - warm) / self.schedule.epoch_steps)
        self.state.metrics.append({"step": step, "phase": phase, "epoch": _six_digits(epoch), **means})

    def _report(self, loss: float, warm: bool) -> None:
        if rank():
            return
        step, total = self.state.step, self.schedule.total
        dev = self.state.epochs[-1][self.dev_metrics[-1]] if self.state.epochs else self.state.before
        accuracy = "" if dev is None else f", dev {dev:.3f}"
        self.progress(f"train (loss {loss:.3f}{accuracy})", step, total)
        now = time.monotonic()
        if now - self._last_log_s >= LOG_INTERVAL_S or step == total:
            self._last_log_s = now
            log.info("step=%d of=%d phase=%s loss=%.4f", step, total, "warm start" if warm else "train", loss)

    def _epoch_ended(self) -> bool:
        """Return whether the dev questions are scored here: `train.dev_steps` replaces the epoch of a report."""
        num_steps, epoch_steps = self.state.step - self.schedule.warm, self.cfg.dev_steps or self.schedule.epoch_steps
        return self.state.step == self.schedule.total or (num_steps > 0 and num_steps % epoch_steps == 0)

    def _save(self, optimiser: torch.optim.Optimizer) -> None:
        if rank():
            return
        self.state.loss_scale = self.scaler.state_dict()
        self.checkpoints.save(self.model, optimiser, self.state)


class TaskModelLoop(StepLoop):
    """Train a reader or a cross-encoder by the mean loss over the units of a batch: windows, or questions.

    Rank r of W takes the units r, r + W, .. of a batch, so W ranks have the loss and gradient of one process.
    """

    @staticmethod
    @abstractmethod
    def spec(run: RunConfig) -> Any:
        """Return the model's spec."""

    @staticmethod
    @abstractmethod
    def open_data(corpus: Corpus, run: RunConfig) -> tuple[Any, Any]:
        """Return the examples and the dev set."""

    @abstractmethod
    def units(self, examples: Sequence[Example]) -> Sequence[Any]:
        """Return the units of a batch's examples."""

    @abstractmethod
    def losses(self, units: Sequence[Any], number: int) -> Tensor:
        """Return the loss of each unit of chunk `number`."""

    @classmethod
    def open_job(cls, run: RunConfig, corpus_digest: str | None = None) -> TrainingJob:
        task, corpus = cls.kind.task, Corpus.open(Store(run.store.path), run.prepare.corpus, corpus_digest)
        data = cls.open_data(corpus, run)
        backbone = resolve_model(run.encoder.backbone)
        model = MODEL_CLASSES[cls.kind].from_backbone(backbone, cls.spec(run), run.train.seed)
        settings = [task, run.digest("train"), asdict(model.spec)]
        return training_job(run, getattr(run.train, task), corpus, model, data, settings)

    def groups(self) -> list[dict[str, Any]]:
        return self.model.parameter_groups(self.cfg.lr, self.cfg.head_lr_factor, self.cfg.weight_decay)

    def learn(self) -> dict[str, float]:
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
        return {"loss": loss}


def _require_support(model: Any, cfg: TrainConfig) -> None:
    """Raise ConfigError for a setting that transformers does not support for a model of this type."""
    if cfg.precision in ("bf16", "fp16") and (types := _fp32_types(model)):
        raise ConfigError(
            f"train.precision is {cfg.precision}, but models of type {types[0]} are trained in fp32 alone; set "
            f"train.precision=fp32"
        )
    types = [one.config.model_type for one in model.transformers if not one.supports_gradient_checkpointing]
    if cfg.gradient_checkpointing and types:
        raise ConfigError(
            f"train.gradient_checkpointing is true, but transformers has none for models of type {types[0]}; set it to "
            f"false, and train.cache_chunk where memory is short"
        )


def _fp32_types(model: Any) -> list[str]:
    return [own for one in model.transformers if (own := one.config.model_type) in FP32_TYPES]


def _six_digits(value: float) -> float:
    return float(f"{value:.6g}")
