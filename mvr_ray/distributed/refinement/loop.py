"""Run the rounds of one refinement: execute the actions of `refine_policy`, and write the journal.

With several weights of feedback views, each is tried on the labels of the first round before that round; the journal
records the results, so a resumed run chooses the same weight.

Shapes: T questions in the table, L labelled ones (the first of the table), K hits, D dimension.
"""

import logging
import math
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from mvr_ray.config import RefineConfig
from mvr_ray.core.refining import aopt
from mvr_ray.core.refining.pseudo_labels import Labels
from mvr_ray.core.refining.refine_policy import (
    KEEPS_PASSAGES,
    MOVES_QUERIES,
    ONE_SHOT,
    Continue,
    RefineState,
    Reject,
    Stop,
    TriedWeight,
    choose_weight,
    next_action,
    worst_loss,
)
from mvr_ray.core.searching.merging import merge
from mvr_ray.distributed.job_metrics import record_round
from mvr_ray.distributed.refinement.journal import Journal, RoundRecord, WeightRecord
from mvr_ray.distributed.refinement.labels import label_round
from mvr_ray.distributed.refinement.measure import Evaluator, Ranks, deciding_kind, gate_sets
from mvr_ray.distributed.refinement.questions import RefineQuestions
from mvr_ray.distributed.refinement.refiner_pool import QUERY_BLOCK, RefinerPool
from mvr_ray.distributed.refinement.report import REPORT_DEPTHS, Accuracy, RoundReport, WeightReport
from mvr_ray.distributed.refinement.shard_refiner import (
    FeedbackSettings,
    GradientSettings,
    LinearSettings,
    ShardStep,
)
from mvr_ray.distributed.refinement.state import PUBLISHED, StateId
from mvr_ray.types import FloatArray, IntArray, Progress, ShardHits

logger = logging.getLogger(__name__)


class RefinementLoop:
    """Run rounds until the policy ends them, and measure before and after."""

    def __init__(
        self,
        refine: RefineConfig,
        questions: RefineQuestions,
        queries_TD: FloatArray,
        refiners: RefinerPool,
        journal: Journal,
        progress: Progress,
        keep_length: bool = True,
    ) -> None:
        """`keep_length`: rescale moved vectors to their original length."""
        self.refine, self.questions, self.queries_TD = refine, questions, queries_TD
        self.keep_length = keep_length
        self.refiners, self.journal, self.progress = refiners, journal, progress
        self.evaluator = Evaluator(questions, refiners)
        self.gates = gate_sets(self.evaluator, refine)
        self.depth = max(refine.depth, *REPORT_DEPTHS)
        self.labelled = np.arange(questions.num_labelled)
        self.weights = weights_to_try(refine)

    def run(self) -> Stop | Reject:
        """Run all remaining rounds: retrieve, label, step, measure, decide."""
        number = len(self.journal.rounds)
        queries_LD = self.queries_at(number)
        hits = self.retrieve(number, queries_LD)
        if self.journal.before is None:
            self.measure_before(hits)
        while isinstance(action := next_action(self.state()), Continue):
            labels = self.label(number, queries_LD, hits)
            if number == 0 and len(self.weights) > 1:
                self.try_weights(labels, queries_LD)
            queries_LD, step = self.step(number, labels, queries_LD)
            number += 1
            hits = self.retrieve(number, queries_LD)
            self.measure_round(number, step, hits)
            self.progress("refine rounds", number, self.state().max_rounds)
        return action

    def retrieve(self, number: int, queries_LD: FloatArray) -> ShardHits:
        """Search for the labelled questions after a round."""
        return self.search(self.state_id(number), self.labelled, queries_LD, f"refine round {number}: retrieve")

    def label(self, number: int, queries_LD: FloatArray, hits: ShardHits) -> Labels:
        return label_round(self.refine, self.evaluator, self.refiners, self.state_id(number), queries_LD, hits)

    def measure_before(self, hits: ShardHits) -> None:
        """Rank every question in the published version, and start the journal with these ranks."""
        ranks = self.evaluator.rank(self.evaluator.no_ranks(), self.labelled, hits)
        ranks = self.rank_others(PUBLISHED, ranks, self.questions.gate_rows(), "gate")
        ranks = self.rank_others(PUBLISHED, ranks, self.questions.other_rows(), "report")
        self.journal.begin(ranks, self.labelled_points(ranks), self.heldout(ranks))

    def state(self) -> RefineState:
        rounds = self.journal.rounds
        return RefineState(
            heldout_RG=self.journal.heldout_RG,
            labelled_R=self.journal.labelled_R,
            max_rounds=1 if self.refine.method in ONE_SHOT else self.refine.rounds,
            patience=self.refine.patience,
            max_heldout_loss=self.refine.max_heldout_loss,
            last_moved=rounds[-1].num_moved if rounds else None,
        )

    def try_weights(self, labels: Labels, queries_LD: FloatArray) -> None:
        """Make, search and measure the state of a first round with each weight that the journal does not have yet."""
        by_shard = self.refiners.split(labels)
        for number in range(len(self.journal.weights), len(self.weights)):
            at = StateId("weight", number)
            settings = FeedbackSettings(self.weights[number], self.refine.feedback_clusters)
            self.refiners.add_feedback(PUBLISHED, at, by_shard, queries_LD, settings)
            hits = self.search(at, self.labelled, queries_LD, f"refine weight {settings.weight:g}: retrieve")
            ranks = self.evaluator.rank(self.evaluator.no_ranks(), self.labelled, hits)
            ranks = self.rank_others(at, ranks, self.questions.gate_rows(), "gate")
            heldout_points = tuple(self.heldout(ranks))
            report = WeightReport(
                weight=settings.weight,
                **self.top1s(ranks),
                lost_points=worst_loss(self.journal.heldout_before, heldout_points),
            )
            self.journal.commit_weight(WeightRecord(report, self.labelled_points(ranks), heldout_points))
            logger.info("refine weight %s", " ".join(f"{name}={value}" for name, value in report._asdict().items()))

    def weight(self) -> float:
        """The weight of feedback views in use: the only one, or the choice after trying all."""
        if len(self.weights) == 1:
            return self.weights[0]
        weights = [TriedWeight(row.report.weight, row.labelled, row.heldout) for row in self.journal.weights]
        assert len(weights) == len(self.weights), "a weight has not been tried yet"
        return choose_weight(self.journal.heldout_before, weights, self.refine.max_heldout_loss)

    def settings(self) -> dict[str, float]:
        """Settings of this refinement's feedback views for the manifest, if it makes any."""
        if not self.weights:
            return {}
        return {"feedback_weight": self.weight(), "feedback_clusters": self.refine.feedback_clusters}

    def queries_at(self, number: int) -> FloatArray:
        """Labelled queries after a round."""
        if number and self.refine.method in MOVES_QUERIES:
            return self.journal.load_queries(number)
        return self.queries_TD[: self.questions.num_labelled]

    def state_id(self, number: int) -> StateId:
        """The state of the passages after a round: the published one where only queries move."""
        return PUBLISHED if self.refine.method in KEEPS_PASSAGES else StateId("round", number)

    def search(self, at: StateId, rows: IntArray, queries_QD: FloatArray, what: str) -> ShardHits:
        if not len(rows):
            return merge([], self.depth, lambda _: [])
        return self.refiners.search(at, queries_QD, self.depth, what, self.progress)

    def rank_others(self, at: StateId, ranks: Ranks, rows: list[int], what: str) -> Ranks:
        """Fill in `ranks` of questions that are not labelled, at a state."""
        where = np.array(rows, np.int64)
        name = f"{at.kind} {self.weights[at.number] if at.kind == 'weight' else at.number:g}"
        hits = self.search(at, where, self.queries_TD[where], f"refine {name}: {what}")
        return self.evaluator.rank(ranks, where, hits) if len(where) else ranks

    def heldout(self, ranks: Ranks) -> list[float]:
        return [100 * self.evaluator.top1([gate.group], gate.kind, ranks) for gate in self.gates]

    def labelled_points(self, ranks: Ranks) -> float:
        """Top-1 of the labelled questions in points, 0 where they have neither answers nor gold passages."""
        group = self.questions.groups[0]
        kind = deciding_kind(self.evaluator, self.refine, group)
        return 100 * self.evaluator.top1([group], kind, ranks) if kind else 0.0

    def top1s(self, ranks: Ranks) -> dict[str, Any]:
        """Fields of a RoundReport or WeightReport: labelled and gate questions, by answers and by gold passages."""
        labelled_groups, gate = self.questions.groups[:1], self.questions.gates
        return {
            "labelled_top1": self.evaluator.top1(labelled_groups, "answer", ranks),
            "labelled_gold_top1": self.evaluator.top1(labelled_groups, "gold", ranks),
            "gate_top1": self.evaluator.top1(gate, "answer", ranks),
            "gate_gold_top1": self.evaluator.top1(gate, "gold", ranks),
        }

    def step(self, number: int, labels: Labels, queries_LD: FloatArray) -> tuple[FloatArray, "RoundStep"]:
        """Step from the state after round `number` to the next: queries first where both move (AOpt, hybrid)."""
        refine, by_shard = self.refine, self.refiners.split(labels)
        at, to = self.state_id(number), self.state_id(number + 1)
        queries_step: ShardStep | None = None
        if refine.method in MOVES_QUERIES:
            queries_LD, queries_step = self._move_queries(at, by_shard, queries_LD)
            self.journal.save_queries(number + 1, queries_LD)
        match refine.method:
            case "query" | "rocchio":
                steps = []
            case "feedback_views":
                feedback = FeedbackSettings(self.weight(), refine.feedback_clusters)
                steps = self.refiners.add_feedback(at, to, by_shard, queries_LD, feedback)
            case "linear":
                linear = LinearSettings(refine.alpha, refine.beta, refine.gamma, self.keep_length)
                steps = self.refiners.move(at, to, by_shard, queries_LD, linear)
            case "passage" | "hybrid":
                gradient = GradientSettings(refine.step_size, refine.domain_guard, self.keep_length)
                steps = self.refiners.move(at, to, by_shard, queries_LD, gradient)
        return queries_LD, RoundStep(labels.num_positive, labels.num_negative, steps, queries_step)

    def _move_queries(
        self, at: StateId, by_shard: dict[int, Labels], queries_LD: FloatArray
    ) -> tuple[FloatArray, ShardStep]:
        """Move the queries (eq. 7, or a descent step of eq. 11) by every shard's sums, added in shard order, a block
        of queries at a time."""
        refine = self.refine
        moved_LD, steps = queries_LD.copy(), []
        for low in range(0, len(queries_LD), QUERY_BLOCK):
            block_QD = queries_LD[low : low + QUERY_BLOCK]
            parts = {}
            for shard, labels in by_shard.items():
                part = labels.take(np.arange(*np.searchsorted(labels.question_L, [low, low + QUERY_BLOCK])))
                if len(part.question_L):
                    parts[shard] = part._replace(question_L=part.question_L - low)
            sums = self.refiners.query_sums(at, parts, len(block_QD))
            if not sums:
                continue
            total = reduce(aopt.LabelSums.plus, sums)
            if refine.method == "rocchio":
                step = aopt.linear_combination(
                    block_QD, total, alpha=refine.alpha, beta=refine.beta, gamma=refine.gamma
                )
            else:
                step = aopt.ratio_step(block_QD, total, step_size=refine.step_size, guard=refine.domain_guard)
            step = step.keep_length(block_QD) if self.keep_length else step
            moved_LD[low + step.moved_M] = step.vectors_MD
            steps.append(step)
        original_LD = self.queries_TD[: len(queries_LD)].astype(np.float64)
        drift_L = np.linalg.norm(moved_LD - original_LD, axis=1)
        return moved_LD, ShardStep(
            num_moved=sum(step.num_moved for step in steps),
            moved_passages=0,
            loss_sum=math.fsum(step.loss * step.num_moved for step in steps if step.num_moved),
            skipped_domain=sum(step.num_outside_domain for step in steps),
            skipped_no_positive=sum(step.num_no_positive for step in steps),
            skipped_no_negative=sum(step.num_no_negative for step in steps),
            drift_sum=float(drift_L.sum()),
            drift_max=float(drift_L.max(initial=0.0)),
            num_drifted=int((drift_L > 0).sum()),
        )

    def measure_round(self, number: int, step: "RoundStep", hits: ShardHits) -> None:
        """Measure the state after a round, and commit the round to the journal."""
        ranks = self.evaluator.rank(self.evaluator.no_ranks(), self.labelled, hits)
        if self.refine.method in KEEPS_PASSAGES:
            ranks = self._same_as_before(ranks, self.questions.gate_rows())
        else:
            ranks = self.rank_others(self.state_id(number), ranks, self.questions.gate_rows(), "gate")
        report = RoundReport(
            number=number,
            **step.summary(self.refiners.num_passages, len(self.labelled)),
            **self.top1s(ranks),
        )
        points, heldout_points = self.labelled_points(ranks), tuple(self.heldout(ranks))
        self.journal.commit(RoundRecord(report, points, heldout_points, step.num_moved))
        self.journal.keep_only({number, self.best_so_far()})
        record_round(self.refiners.index, report._asdict())
        logger.info("refine %s", " ".join(f"{name}={value}" for name, value in report._asdict().items()))

    def best_so_far(self) -> int:
        """The round to restore if rounds ended now; where none is acceptable, the least harmful one."""
        state = self.state()
        match next_action(replace(state, max_rounds=len(self.journal.rounds), last_moved=None)):
            case Stop(best_round=best):
                return best
            case _:
                return state.least_harmful()

    def accuracies(self, number: int) -> list[Accuracy]:
        """Accuracy of every group before refinement and at the state of a round."""
        assert self.journal.before is not None, "nothing was measured before"
        if number == 0:
            return self.evaluator.accuracies(self.journal.before, self.journal.before)
        what = f"refine round {number}: final"
        hits = self.search(self.state_id(number), self.labelled, self.queries_at(number), what)
        after = self.evaluator.rank(self.evaluator.no_ranks(), self.labelled, hits)
        others = [*self.questions.gate_rows(), *self.questions.other_rows()]
        if self.refine.method in KEEPS_PASSAGES:
            after = self._same_as_before(after, others)
        else:
            after = self.rank_others(self.state_id(number), after, others, "report")
        return self.evaluator.accuracies(self.journal.before, after)

    def _same_as_before(self, ranks: Ranks, rows: list[int]) -> Ranks:
        """Copy the ranks before: if no passage moves, unmoved questions keep their ranks."""
        assert self.journal.before is not None, "nothing was measured before"
        for now_T, before_T in zip(ranks, self.journal.before):
            now_T[rows] = before_T[rows]
        return ranks


def weights_to_try(refine: RefineConfig) -> tuple[float, ...]:
    """The weights of feedback views to try, ascending, each once."""
    if refine.method != "feedback_views":
        return ()
    weights = refine.feedback_weight
    return tuple(sorted(set(weights))) if isinstance(weights, list) else (weights,)


class RoundStep(NamedTuple):
    """Result of one step and the counts of its labels."""

    num_positive: int
    num_negative: int
    shards: list[ShardStep]
    queries: ShardStep | None

    @property
    def parts(self) -> list[ShardStep]:
        return self.shards if self.queries is None else [*self.shards, self.queries]

    @property
    def num_moved(self) -> int:
        return sum(part.num_moved for part in self.parts)

    def summary(self, num_passages: int, num_questions: int) -> dict[str, Any]:
        """Fields of a RoundReport. The moved share is of passages, or of questions if only questions move."""
        num_drifted = sum(part.num_drifted for part in self.parts)
        share = sum(part.moved_passages for part in self.shards) / num_passages
        if not self.shards and self.queries is not None:
            share = self.queries.num_moved / num_questions
        return {
            "loss": math.fsum(part.loss_sum for part in self.parts) / max(self.num_moved, 1),
            "num_positives": self.num_positive,
            "num_negatives": self.num_negative,
            "moved_share": share,
            "drift_mean": math.fsum(part.drift_sum for part in self.parts) / max(num_drifted, 1),
            "drift_max": max((part.drift_max for part in self.parts), default=0.0),
            "skipped_domain": sum(part.skipped_domain for part in self.parts),
            "skipped_no_positive": sum(part.skipped_no_positive for part in self.parts),
            "skipped_no_negative": sum(part.skipped_no_negative for part in self.parts),
        }
