"""Train the retriever: the loss of a step over questions and passages, and the metrics of an epoch.

`steps` has the loop: batches, dropout and learning rates are functions of (seed, step).

Shapes: Q questions, P passages, V views, D dimension; W ranks.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mvr_ray.config import RunConfig, TrainConfig
from mvr_ray.core.encoding.encoder import DualEncoder, EmbeddedViews
from mvr_ray.core.encoding.snippets import TITLE, Span, find_snippet
from mvr_ray.core.encoding.views import MODEL_SETTINGS, TokenizedPassage
from mvr_ray.core.judging.collapse import collapse_report, dominant_view
from mvr_ray.core.learning import losses
from mvr_ray.core.learning.batches import JoinedBatch, join_batch, rank_share
from mvr_ray.core.learning.training import (
    RankInputs,
    StepOutput,
    distil_gradients,
    loss_and_gradients,
    rank,
    winning_views,
    world_size,
)
from mvr_ray.distributed.encoders import encoder_spec, make_encoder, open_encoder, starting_snapshot
from mvr_ray.distributed.training.checkpoints import EpochSums
from mvr_ray.distributed.training.examples import Examples, open_dev, open_examples
from mvr_ray.distributed.training.steps import OwnLoss, StepLoop, TrainingJob, training_job
from mvr_ray.errors import ConfigError, EncoderError
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.model_records import ENCODERS
from mvr_ray.types import Passage, Progress

log = logging.getLogger(__name__)

_LOSSES = {"dpr": losses.dpr_loss, "mvr": losses.mvr_loss, "camvr": losses.camvr_loss}
COLLAPSE_PASSAGES = 64
MAX_CACHED = 1 << 15
"""Passages whose tokens, and whose sentences, a process of a training keeps: 2 kB each."""
WARM_START_STEPS = 30
"""Warm start of untrained viewers; measured by the study ingredients."""


class EpochReport(NamedTuple):
    """Metrics of an epoch, or of `train.dev_steps` steps. `view_shares`: share of questions for which each view was the
    best of their passage."""

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


def warm_start_steps(run: RunConfig, model: DualEncoder) -> int:
    """Return the number of steps of the warm start: as configured, else those of viewers that no training has seen."""
    if run.train.warm_start_steps is not None:
        return run.train.warm_start_steps
    return WARM_START_STEPS if model.spec.reads_viewers and run.train.init_from is None else 0


def loss_name(run: RunConfig, model: DualEncoder) -> str:
    """Resolve `train.loss` for this encoder. Raises ConfigError where the loss does not fit it."""
    if run.train.loss == "auto":
        if model.spec.strategy == "snippet_means":
            return "dpr"
        if model.spec.has_snippets:
            return "camvr"
        return "mvr" if model.num_views > 1 else "dpr"
    if run.train.loss == "camvr" and not model.spec.has_snippets:
        raise ConfigError(
            f"train.loss is camvr, which needs snippets, but encoder.strategy is {model.spec.strategy!r}; "
            f"use snippets or snippet_means, or the loss mvr"
        )
    return run.train.loss


def require_answers(cfg: TrainConfig, examples: Examples) -> None:
    """Raise ConfigError if `train.loss` is camvr and no example has an answer for it; warn if auto chose it."""
    if examples.num_answered or not cfg.answer_share:
        return
    by_text = cfg.answer_views == "all"
    message = (
        f"train.loss is {cfg.loss}{'' if cfg.loss == 'camvr' else ', which is camvr here'}, and scores a positive by "
        f"the view of its answer, but none of the {len(examples)} usable questions of {cfg.questions!r} has an answer"
        f"{'' if by_text else ' at a known place in its first positive'}, so that the loss is mvr; give answers that "
        f"stand there{'' if by_text else ', or for patterns train.answer_views=all'}, or set train.loss=mvr"
    )
    if cfg.loss == "camvr":
        raise ConfigError(message)
    log.warning(message)


def starting_encoder(run: RunConfig, corpus: Corpus) -> DualEncoder:
    """Return the encoder before training: that of `train.init_from`, or one made from the backbone. Raises EncoderError
    where settings differ, ConfigError for the newest of `encoder.name`, which this training replaces."""
    start = run.train.init_from
    if start is None:
        return make_encoder(run, corpus.store, corpus)
    snapshot = starting_snapshot(run, start)
    encoder = open_encoder(corpus.store, snapshot.name, snapshot.fingerprint, only_embeds=False)
    spec = encoder_spec(run).fill({name: getattr(encoder.spec, name) for name in MODEL_SETTINGS})
    unset = {"tied", "sentences", "score_scale"} - run.encoder.model_fields_set
    spec = replace(spec, **{name: getattr(encoder.spec, name) for name in unset})
    expected, actual = ({**own.stored_settings(), "score_scale": own.score_scale} for own in (spec, encoder.spec))
    differing = {*expected.items()} ^ {*actual.items()}
    if names := sorted({name for name, _ in differing if getattr(spec, name) != getattr(encoder.spec, name)}):
        old, new = (", ".join(f"{name} {getattr(own, name)!r}" for name in names) for own in (encoder.spec, spec))
        raise EncoderError(
            f"train.init_from {start} has {old}, but the encoder section has {new}; make them equal, or start from the "
            f"backbone"
        )
    if start == run.encoder.name:
        raise ConfigError(
            f"train.init_from is {start}, as encoder.name, whose newest snapshot changes once this training stores a "
            f"model: the same command would not find it again; set train.init_from={snapshot.fingerprint}, the newest "
            f"now, or give another encoder.name"
        )
    return encoder.to_precision("fp32")


class RetrieverLoop(StepLoop):
    kind, epoch, dev_metrics = ENCODERS, EpochReport, ("dev_top1",)
    figures = ("loss", "loss_global", "loss_local", "view_pair_cosine", "lv")

    @classmethod
    def open_job(cls, run: RunConfig, corpus_digest: str | None = None, loss: OwnLoss | None = None) -> TrainingJob:
        workers = run.resources.train_workers
        if run.train.batch_questions % max(1, workers):
            raise ConfigError(
                f"train.batch_questions is {run.train.batch_questions}, which {workers} workers "
                f"(resources.train_workers) cannot share evenly; make it a multiple of {workers}"
            )
        corpus = Corpus.open(Store(run.store.path), run.prepare.corpus, corpus_digest)
        model = starting_encoder(run, corpus)
        name = loss_name(run, model)
        data = open_examples(corpus, model.splitter, run.train), open_dev(corpus, run.train)
        if name == "camvr" and not loss:
            require_answers(run.train, data[0])
        return training_job(run, run.encoder.name, corpus, model, data, [run.digest("encoder", "train")], loss)

    def __init__(self, job: TrainingJob, progress: Progress, device: torch.device) -> None:
        self.model: DualEncoder
        super().__init__(job, progress, device, warm_start_steps(job.run, job.model))
        self.teacher: DualEncoder | None = None
        self.loss = loss_name(job.run, self.model)
        self._tokens: dict[Passage, TokenizedPassage] = {}

    def _resume(self) -> torch.optim.Optimizer:
        if self.schedule.warm:
            self.teacher = copy.deepcopy(self.model).eval()
        return super()._resume()

    def groups(self) -> list[dict[str, Any]]:
        return self.model.parameter_groups(self.cfg.lr, self.cfg.viewer_lr_factor, self.cfg.weight_decay)

    def new_sums(self) -> EpochSums:
        return EpochSums(wins_V=[0] * self.model.num_views)

    def learn(self) -> dict[str, float]:
        batch = join_batch(self.batch())
        if self.warm:
            return self._distil(batch)
        self.teacher = None
        return self._learn(batch)

    def _share(self, batch: JoinedBatch) -> RankInputs:
        part = rank_share(len(batch.texts), len(batch.passages), rank(), world_size())
        passages = [batch.passages[row] for row in part.passages]
        if len(self._tokens) > MAX_CACHED:
            self._tokens.clear()
        new = [passage for passage in dict.fromkeys(passages) if passage not in self._tokens]
        self._tokens.update(zip(new, self.model.tokenize_passages(new, self.cfg.max_passage_tokens)))
        tokens = [self._tokens[passage] for passage in passages]
        real_P = torch.from_numpy(part.real_P).to(self.device)
        return RankInputs([batch.texts[row] for row in part.questions], tokens, real_P, len(batch.passages))

    def _learn(self, batch: JoinedBatch) -> dict[str, float]:
        positive_Q = torch.from_numpy(batch.positive_Q).to(self.device)
        answer_QV = None
        own = self.job.loss
        if self.loss == "camvr" or (own and self.model.spec.has_snippets):
            answer_QV = torch.from_numpy(self._answer_views(batch)).to(self.device)
        tau = self._temperature(self.state.step)

        def loss(queries_QD: Tensor, views_PVD: Tensor, mask_PV: Tensor) -> losses.LossTerms:
            terms = (own.function if own else _LOSSES[self.loss])(
                queries_QD,
                views_PVD,
                mask_PV,
                positive_Q,
                tau=tau,
                scale=self.model.spec.score_scale,
                local_weight=self.cfg.local_weight,
                answer_QV=answer_QV,
                answer_share=self.cfg.answer_share,
                known_QP=torch.from_numpy(batch.known_QP).to(self.device),
            )
            if isinstance(terms, Tensor) and terms.numel() == 1:
                terms = losses.LossTerms(terms, terms.detach(), torch.zeros_like(terms))
            if not isinstance(terms, losses.LossTerms) or not all(
                isinstance(term, Tensor) and term.numel() == 1 for term in terms
            ):
                what = f"a tensor of shape {tuple(terms.shape)}" if isinstance(terms, Tensor) else f"{terms!r:.60}"
                raise ConfigError(f"train: the function of loss returned {what}; return one tensor of one number")
            if not terms.total.requires_grad:
                raise ConfigError(
                    "train: the function of loss returned a tensor without a gradient; compute it by torch from "
                    "queries_QD or views_PVD"
                )
            if not self.cfg.distil_weight:
                return terms
            teacher_QP = torch.from_numpy(batch.teacher_QP).to(self.device)
            scale = self.model.spec.score_scale
            distillation = losses.distillation_loss(queries_QD, views_PVD, mask_PV, teacher_QP, scale=scale)
            return terms._replace(total=terms.total + self.cfg.distil_weight * distillation)

        output = loss_and_gradients(self.model, self._share(batch), loss, self.settings, self.loss_scale)
        self._count(output, positive_Q)
        names = ("loss", "loss_global", "loss_local")
        return {**dict(zip(names, map(float, output.terms))), "temperature": tau}

    def _temperature(self, step: int) -> float:
        """Return the temperature of a step: MVR eq. 8, or the fixed one."""
        cfg = self.cfg
        if cfg.temperature is not None:
            return cfg.temperature
        after_warm = max(0, step - self.schedule.warm)
        epoch = after_warm // (cfg.temperature_steps or self.schedule.epoch_steps)
        return losses.temperature(epoch, cfg.temperature_decay, cfg.temperature_floor)

    def _distil(self, batch: JoinedBatch) -> dict[str, float]:
        assert self.teacher is not None
        share = self._share(batch)
        targets_QD = self.teacher.mean_pool_queries(share.texts)
        targets_PD = self.teacher.mean_pool_passages(share.passages)
        loss = distil_gradients(self.model, share, targets_QD, targets_PD, self.settings, self.loss_scale)
        if world_size() > 1:
            dist.all_reduce(loss)
        return {"loss": float(loss) / world_size()}

    @cached_property
    def _spans(self) -> Callable[[Passage], Sequence[Span | None]]:
        """`DualEncoder.view_spans` of a passage as training reads it, cached."""
        model, max_tokens = self.model, self.cfg.max_passage_tokens
        return lru_cache(MAX_CACHED)(lambda passage: model.view_spans(passage, max_tokens))

    def _answer_views(self, batch: JoinedBatch) -> np.ndarray:
        """Return answers_QV: whether a view of the positive read an answer, by its offset, or also by its text."""
        answers_QV = np.zeros((len(batch.texts), self.model.num_views), bool)
        for row in np.unique(batch.positive_Q):
            passage = batch.passages[row]
            spans = [span or TITLE for span in self._spans(passage)]
            for question in np.flatnonzero(batch.positive_Q == row):
                start = int(batch.answer_start_Q[question])
                if start >= 0 and (view := find_snippet(spans, start)) >= 0:
                    answers_QV[question, view] = True
                if self.cfg.answer_views == "all" and (answers := batch.answers[question]):
                    answers_QV[question] |= [self.matcher.has_answer(passage.text[a:b], answers) for a, b in spans]
        if self.model.spec.whole_view:  # the whole view covers every snippet
            answers_QV[:, 0] = answers_QV.any(1)
        return answers_QV

    def _count(self, output: StepOutput, positive_Q: Tensor) -> None:
        sums, terms = self.state.sums, output.terms
        sums.steps += 1
        sums.loss += float(terms.total)
        sums.loss_global += float(terms.global_)
        sums.loss_local += float(terms.local)
        wins_V = torch.bincount(winning_views(output, positive_Q), minlength=self.model.num_views)
        sums.wins_V = [old + new for old, new in zip(sums.wins_V, wins_V.tolist())]

    def measure(self) -> tuple[float]:
        """Return the share of dev questions for which one of their own passages scores best."""
        dev = self.job.dev
        views = self._embed(dev.passages)
        scores_QPV = losses.pairwise_scores(*map(torch.from_numpy, (self.model.embed_queries(dev.texts), *views)))
        best_Q = scores_QPV.amax(-1).argmax(-1).numpy()
        return (float(np.mean(dev.gold_QP[np.arange(len(best_Q)), best_Q])),)

    def report(self, sums: EpochSums, **fields: Any) -> EpochReport:
        collapse = collapse_report(*self._embed(self._sample()))
        if collapse.is_collapsed:
            log.warning("views have collapsed: %s", collapse.reason)
        elif not self.model.spec.has_snippets and (view := dominant_view(sums.wins_V)) is not None:
            message = (
                "view %d alone is the best of its passage for %.1f %% of the questions; see docs/math.md, Collapse"
            )
            log.warning(message, view, 100 * sums.wins_V[view] / sum(sums.wins_V))
        steps, wins = max(1, sums.steps), max(1, sum(sums.wins_V))
        return EpochReport(
            **fields,
            temperature=self._temperature(self.state.step - 1),
            loss_global=sums.loss_global / steps,
            loss_local=sums.loss_local / steps,
            view_shares=[count / wins for count in sums.wins_V],
            view_pair_cosine=collapse.mean_pair_cosine,
            lv=collapse.lv,
            collapsed=collapse.is_collapsed,
        )

    def _sample(self) -> list[Passage]:
        if self.job.dev is not None:
            return self.job.dev.passages[:COLLAPSE_PASSAGES]
        numbers = np.linspace(0, len(self.job.examples) - 1, COLLAPSE_PASSAGES).astype(int)
        return join_batch(self.job.examples.get(sorted(set(numbers.tolist())), 0)).passages

    def _embed(self, passages: list[Passage]) -> EmbeddedViews:
        """Embed passages as for search: in evaluation mode, with the encoder's own lengths."""
        tokens = self.model.tokenize_passages(passages)
        parts = [self.model.embed_passages(tokens[at : at + 16]) for at in range(0, len(tokens), 16)]
        return EmbeddedViews(*map(np.concatenate, zip(*parts)))
