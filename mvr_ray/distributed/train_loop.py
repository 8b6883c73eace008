"""The training loop as every rank runs it, with or without Ray.

A step is a function of the weights, the optimiser and its number: the plan, the dropout and the rates are drawn from
(seed, step), so a run that was killed goes on from its last checkpoint to the same weights.

Shapes: S steps of an epoch, B questions a batch, Q questions, P passages, V views, D dimension; W ranks.
"""

import copy
import logging
import math
import time
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mvr_ray.config import RunConfig
from mvr_ray.core.batches import JoinedBatch, join_batch, plan_epoch, rank_share
from mvr_ray.core.encoder import DualEncoder, PassageViews, collapse_report
from mvr_ray.core.losses import LossTerms, camvr_loss, dpr_loss, mvr_loss, temperature
from mvr_ray.core.snippets import find_snippet
from mvr_ray.core.training import (
    Encoded,
    Share,
    StepSettings,
    average_gradients,
    distil_gradients,
    loss_and_gradients,
    lr_factor,
    rank,
    winning_views,
    world_size,
)
from mvr_ray.distributed.train_checkpoints import Checkpoints, EpochSums, TrainState
from mvr_ray.distributed.train_examples import DevSet, Examples
from mvr_ray.errors import ConfigError
from mvr_ray.types import IntArray, Passage, Progress

log = logging.getLogger(__name__)

_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LOSSES = {"dpr": dpr_loss, "mvr": mvr_loss, "camvr": camvr_loss}
COLLAPSE_PASSAGES = 64
LOG_INTERVAL_S = 10.0


class EpochReport(NamedTuple):
    """One epoch's metrics. `view_shares` says how often each view was a question's best of its passage."""

    epoch: int
    step: int
    temperature: float
    loss: float
    loss_global: float
    loss_local: float
    view_shares: list[float]
    view_pair_cosine: float | None
    lv: float | None
    collapsed: bool
    dev_top1: float | None


class Schedule(NamedTuple):
    """Steps of the whole training: the warm start's, then `steps` of which an epoch has `epoch_steps`."""

    warm: int
    steps: int
    epoch_steps: int

    @property
    def total(self) -> int:
        return self.warm + self.steps

    def epoch_of(self, step: int) -> int:
        return max(0, step - self.warm) // self.epoch_steps


class TrainingJob(NamedTuple):
    """Everything a rank needs; `model` is as training starts from it."""

    run: RunConfig
    model: DualEncoder
    examples: Examples
    dev: DevSet | None
    checkpoints: Checkpoints


def make_schedule(run: RunConfig, num_examples: int) -> Schedule:
    cfg = run.train
    epoch_steps = math.ceil(num_examples / cfg.batch_questions)
    steps = epoch_steps * cfg.epochs
    return Schedule(cfg.warm_start_steps, min(steps, cfg.max_steps) if cfg.max_steps else steps, epoch_steps)


def loss_name(run: RunConfig, model: DualEncoder) -> str:
    """Which loss `train.loss` means for this encoder. Raises ConfigError where it does not fit."""
    if run.train.loss == "auto":
        if model.spec.strategy == "snippets":
            return "camvr"
        return "mvr" if model.num_views > 1 else "dpr"
    if run.train.loss == "camvr" and not model.spec.has_snippets:
        raise ConfigError(
            f"train.loss is camvr, which needs snippets, but encoder.strategy is {model.spec.strategy!r}; "
            f"use snippets or snippet_means, or the loss mvr"
        )
    return run.train.loss


def run_loop(job: TrainingJob, progress: Progress, device: torch.device) -> TrainState:
    """Train from the last checkpoint, or the start, to the end; every rank returns the final state."""
    loop = Loop(job, progress, device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        return loop.run()


class Loop:
    def __init__(self, job: TrainingJob, progress: Progress, device: torch.device) -> None:
        self.job, self.cfg, self.progress, self.device = job, job.run.train, progress, device
        self.model = job.model.to(device)
        self.teacher: DualEncoder | None = None
        self.schedule = make_schedule(job.run, len(job.examples))
        self.loss = loss_name(job.run, self.model)
        self.full_spec = self.model.spec
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.cfg.precision == "fp16")
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.state = TrainState()
        self._plan: tuple[int, IntArray] | None = None
        self._said = 0.0

    def run(self) -> TrainState:
        if self.cfg.max_passage_tokens:
            self.model.spec = replace(self.full_spec, max_passage_tokens=self.cfg.max_passage_tokens)
        try:
            self.model.set_dropout(self.cfg.dropout)
            if self.cfg.gradient_checkpointing:
                self.model.set_gradient_checkpointing(True)
            optimiser = self._resume()
            while self.state.step < self.schedule.total:
                if self.state.step == self.schedule.warm:
                    self.teacher, optimiser = None, self._optimiser()
                self._step(optimiser)
                if self._epoch_ended():
                    self._end_epoch()
                if self._epoch_ended() or self.state.step % self.cfg.checkpoint_steps == 0:
                    self._save(optimiser)
            return self.state
        finally:
            if self.cfg.gradient_checkpointing:
                self.model.set_gradient_checkpointing(False)
            self.model.spec = self.full_spec
            self.model.eval()

    def _resume(self) -> torch.optim.Optimizer:
        """The state, weights and optimiser of the newest checkpoint that rank 0 sees, or of the start."""
        step = self.job.checkpoints.latest_step()
        if world_size() > 1:
            agreed = torch.tensor([step], device=self.device)
            dist.broadcast(agreed, 0)
            step = int(agreed.item())
        if max(step, 0) < self.schedule.warm:
            self.teacher = copy.deepcopy(self.model).eval()
        if step < 0:
            self.state.sums.wins_V = [0] * self.model.num_views
            self.state.before = self._dev_accuracy()
            return self._optimiser()
        log.info("training continues: step=%d of %d", step, self.schedule.total)
        self.state = self.job.checkpoints.state(step)
        self.job.checkpoints.load_model(self.model, step)
        optimiser = self._optimiser()
        self.job.checkpoints.load_optimiser(optimiser, step)
        if self.state.loss_scale:
            self.scaler.load_state_dict(self.state.loss_scale)
        return optimiser

    def _optimiser(self) -> torch.optim.Optimizer:
        groups = self.model.parameter_groups(self.cfg.lr, self.cfg.viewer_lr_factor, self.cfg.weight_decay)
        for group in groups:
            group["base_lr"] = group["lr"]
        return torch.optim.AdamW(groups, eps=self.cfg.adam_eps)

    def _step(self, optimiser: torch.optim.Optimizer) -> None:
        step, schedule = self.state.step, self.schedule
        warm = step < schedule.warm
        self.model.train()
        batch = self._batch(step if warm else step - schedule.warm)
        self._set_rate(optimiser, warm)
        optimiser.zero_grad(set_to_none=True)
        loss = self._distil(batch) if warm else self._learn(batch)
        average_gradients(self.parameters)
        self.scaler.unscale_(optimiser)
        torch.nn.utils.clip_grad_norm_(self.parameters, self.cfg.clip_norm)
        self.scaler.step(optimiser)
        self.scaler.update()
        self.state.step = step + 1
        self._tell(loss, warm)

    def _set_rate(self, optimiser: torch.optim.Optimizer, warm: bool) -> None:
        step, schedule = self.state.step, self.schedule
        at, total = (step, schedule.warm) if warm else (step - schedule.warm, schedule.steps)
        factor = lr_factor(at, total, self.cfg.warmup_share)
        for group in optimiser.param_groups:
            group["lr"] = group["base_lr"] * factor

    def _batch(self, number: int) -> JoinedBatch:
        epoch, row = divmod(number, self.schedule.epoch_steps)
        if self._plan is None or self._plan[0] != epoch:
            examples, cfg = self.job.examples, self.cfg
            plan_SB = plan_epoch(
                examples.passage_E,
                examples.article_E,
                batch=cfg.batch_questions,
                per_passage=cfg.questions_per_passage,
                seed=cfg.seed,
                epoch=epoch,
            )
            self._plan = (epoch, plan_SB)
        return join_batch(self.job.examples.get(self._plan[1][row].tolist(), epoch))

    def _share(self, batch: JoinedBatch) -> Share:
        part = rank_share(len(batch.texts), len(batch.passages), rank(), world_size())
        tokenized = self.model.tokenize_passages([batch.passages[row] for row in part.passages])
        real_P = torch.from_numpy(part.real_P).to(self.device)
        return Share([batch.texts[row] for row in part.questions], tokenized, real_P)

    def _settings(self) -> StepSettings:
        cfg = self.cfg
        return StepSettings(cfg.cache_chunk, _PRECISIONS[cfg.precision], cfg.seed, self.state.step)

    def _learn(self, batch: JoinedBatch) -> float:
        positive_Q = torch.from_numpy(batch.positive_Q).to(self.device)
        answer_view_Q = None
        if self.loss == "camvr":
            answer_view_Q = torch.from_numpy(self._answer_views(batch)).to(self.device)
        tau = self._temperature(self.state.step)

        def loss(queries_QD: Tensor, views_PVD: Tensor, mask_PV: Tensor) -> LossTerms:
            known_QP = torch.zeros(len(queries_QD), len(views_PVD), dtype=torch.bool, device=self.device)
            known_QP[:, : batch.known_QP.shape[1]] = torch.from_numpy(batch.known_QP).to(self.device)
            return _LOSSES[self.loss](
                queries_QD,
                views_PVD,
                mask_PV,
                positive_Q,
                tau=tau,
                scale=self.full_spec.score_scale,
                local_weight=self.cfg.local_weight,
                answer_view_Q=answer_view_Q,
                answer_share=self.cfg.answer_share,
                known_QP=known_QP,
            )

        encoded = loss_and_gradients(self.model, self._share(batch), loss, self._settings(), self._scale())
        self._count(encoded, positive_Q)
        return float(encoded.terms.total)

    def _temperature(self, step: int) -> float:
        """Of the step with this number: MVR eq. 8, or the fixed one."""
        cfg = self.cfg
        if cfg.temperature is not None:
            return cfg.temperature
        after_warm = max(0, step - self.schedule.warm)
        epoch = after_warm // (cfg.temperature_steps or self.schedule.epoch_steps)
        return temperature(epoch, cfg.temperature_decay, cfg.temperature_floor)

    def _distil(self, batch: JoinedBatch) -> float:
        assert self.teacher is not None
        share = self._share(batch)
        targets_QD = self.teacher.mean_pool_queries(share.texts)
        targets_PD = self.teacher.mean_pool_passages(share.tokenized)
        settings, num = self._settings(), len(batch.passages)
        loss = distil_gradients(self.model, share, targets_QD, targets_PD, num, settings, self._scale())
        if world_size() > 1:
            dist.all_reduce(loss)
        return float(loss) / world_size()

    def _scale(self) -> float:
        return float(self.scaler.get_scale()) if self.scaler.is_enabled() else 1.0

    def _answer_views(self, batch: JoinedBatch) -> IntArray:
        spans = {int(row): self.model.snippets(batch.passages[row]) for row in np.unique(batch.positive_Q)}
        pairs = zip(batch.positive_Q, batch.answer_start_Q)
        found = (find_snippet(spans[int(row)], int(start)) if start >= 0 else -1 for row, start in pairs)
        return np.fromiter(found, np.int64, len(batch.texts))

    def _count(self, encoded: Encoded, positive_Q: Tensor) -> None:
        sums, terms = self.state.sums, encoded.terms
        sums.steps += 1
        sums.loss += float(terms.total)
        sums.loss_global += float(terms.global_)
        sums.loss_local += float(terms.local)
        wins_V = torch.bincount(winning_views(encoded, positive_Q), minlength=self.model.num_views)
        sums.wins_V = [old + new for old, new in zip(sums.wins_V, wins_V.tolist())]

    def _tell(self, loss: float, warm: bool) -> None:
        if rank():
            return
        step, total = self.state.step, self.schedule.total
        self.progress(f"train (loss {loss:.3f})", step, total)
        now = time.monotonic()
        if now - self._said >= LOG_INTERVAL_S or step == total:
            self._said = now
            log.info("step=%d of=%d phase=%s loss=%.4f", step, total, "warm start" if warm else "train", loss)

    def _epoch_ended(self) -> bool:
        done = self.state.step - self.schedule.warm
        return self.state.step == self.schedule.total or (done > 0 and done % self.schedule.epoch_steps == 0)

    def _end_epoch(self) -> None:
        """Measure, keep the best weights, and begin the next epoch's sums."""
        state, sums = self.state, self.state.sums
        epoch = max(0, self.schedule.epoch_of(state.step - 1))
        state.sums = EpochSums(wins_V=[0] * self.model.num_views)
        accuracy = self._dev_accuracy()
        if rank():
            return
        views = self._embed(self._sample())
        collapse = collapse_report(views.views_PVD, views.mask_PV)
        steps, wins = max(1, sums.steps), max(1, sum(sums.wins_V))
        report = EpochReport(
            epoch=epoch,
            step=state.step,
            temperature=self._temperature(state.step - 1),
            loss=sums.loss / steps,
            loss_global=sums.loss_global / steps,
            loss_local=sums.loss_local / steps,
            view_shares=[count / wins for count in sums.wins_V],
            view_pair_cosine=collapse.mean_pair_cosine,
            lv=collapse.lv,
            collapsed=collapse.collapsed,
            dev_top1=accuracy,
        )
        state.epochs.append(report._asdict())
        log.info("epoch: %s", " ".join(f"{name}={value}" for name, value in report._asdict().items()))
        if collapse.collapsed:
            log.warning("views have collapsed: %s", collapse.reason)
        if accuracy is None or accuracy > state.best_accuracy:
            state.best_accuracy = -1.0 if accuracy is None else accuracy
            state.best_step = state.step
            self.job.checkpoints.save_best(self.model, state.step)

    def _save(self, optimiser: torch.optim.Optimizer) -> None:
        if rank():
            return
        self.state.loss_scale = self.scaler.state_dict()
        self.job.checkpoints.save(self.model, optimiser, self.state)

    def _dev_accuracy(self) -> float | None:
        """Share of dev questions whose own passage scores best, on rank 0; None elsewhere or without dev questions."""
        dev = self.job.dev
        if dev is None or rank():
            return None
        views = self._embed(dev.passages)
        queries_QD = torch.from_numpy(self.model.embed_queries(dev.texts))
        scores_QPV = torch.einsum("qd,pvd->qpv", queries_QD, views.views_PVD).masked_fill(~views.mask_PV, -torch.inf)
        best_Q = scores_QPV.amax(-1).argmax(-1).numpy()
        return float(np.mean(best_Q == dev.positive_Q))

    def _sample(self) -> list[Passage]:
        if self.job.dev is not None:
            return self.job.dev.passages[:COLLAPSE_PASSAGES]
        numbers = np.linspace(0, len(self.job.examples) - 1, COLLAPSE_PASSAGES).astype(int)
        return join_batch(self.job.examples.get(sorted(set(numbers.tolist())), 0)).passages

    def _embed(self, passages: list[Passage]) -> PassageViews:
        """Views as search will see them: evaluation mode and the encoder's own lengths."""
        short, self.model.spec = self.model.spec, self.full_spec
        tokenized = self.model.tokenize_passages(passages)
        parts = [self.model.embed_passages(tokenized[at : at + 16]) for at in range(0, len(tokenized), 16)]
        self.model.spec = short
        views = (torch.from_numpy(np.concatenate([part[i] for part in parts])) for i in (0, 1))
        return PassageViews(*views)
