"""Run the rounds of one refinement: execute the actions of `refine_policy`, and write the journal.

With several weights of feedback views, each is tried on the labels of the first round before that round; the journal
records the results, so a resumed run chooses the same weight.

Shapes: T questions in the table, L labelled ones (the first of the table), K hits, D dimension.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, Literal, NamedTuple

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
from mvr_ray.distributed.cluster.job_metrics import record_round
from mvr_ray.distributed.refinement.journal import Journal, RoundRecord, WeightRecord
from mvr_ray.distributed.refinement.measure import Evaluator, Ranks
from mvr_ray.distributed.refinement.questions import RefineQuestions
from mvr_ray.distributed.refinement.refiner_pool import QUERY_BLOCK, RefinerPool
from mvr_ray.distributed.refinement.report import REPORT_DEPTHS, Accuracy, RoundReport, WeightReport
from mvr_ray.distributed.refinement.shard_refiner import ShardStep, require_finite
from mvr_ray.distributed.refinement.state import PUBLISHED, StateId
from mvr_ray.store import manifest as manifests
from mvr_ray.types import FloatArray, IntArray, Progress, ShardHits

logger = logging.getLogger(__name__)


class RefinementLoop:
    """Run rounds until the policy ends them, and measure before and after."""

    def __init__(
        self,
        questions: RefineQuestions,
        queries_TD: FloatArray,
        refiners: RefinerPool,
        journal: Journal,
        progress: Progress,
    ) -> None:
        self.refine, self.questions, self.queries_TD = refiners.task.refine, questions, queries_TD
        self.refiners, self.journal, self.progress = refiners, journal, progress
        self.evaluator = Evaluator(self.refine, questions, refiners)
        self.gates = self.evaluator.gate_sets()
        self.depth = max(self.refine.depth, *REPORT_DEPTHS)
        self.search_depth = self.depth + max(map(len, self.evaluator.own_of.values()), default=0)
        self.labelled_rows = np.arange(questions.num_labelled)
        self.weights = weights_to_try(self.refine)

    def run(self) -> Stop | Reject:
        """Run all remaining rounds: retrieve, label, step, measure, decide."""
        number = len(self.journal.rounds)
        queries_LD = self.queries_at(number)
        hits = self.retrieve(number, queries_LD)
        if self.journal.before is None:
            ranks = self.rank(PUBLISHED, hits, ["gate", "report"])
            self.journal.begin(ranks, self.labelled_points(ranks), self.heldout(ranks))
        while isinstance(action := next_action(self.state()), Continue):
            labels = self.evaluator.label(self.state_id(number), queries_LD, hits)
            if number == 0 and len(self.weights) > 1:
                self.try_weights(labels, queries_LD)
            queries_LD, step = self.step(number, labels, queries_LD)
            number += 1
            hits = self.retrieve(number, queries_LD)
            self.measure_round(number, step, hits)
            self.progress("refine rounds", number, self.state().max_rounds)
        return action

    def retrieve(self, number: int, queries_LD: FloatArray, what: str = "retrieve") -> ShardHits:
        """Search for the labelled questions after a round."""
        return self.search(self.state_id(number), self.labelled_rows, queries_LD, f"refine round {number}: {what}")

    def state(self) -> RefineState:
        journal, rounds = self.journal, self.journal.rounds
        return RefineState(
            heldout_RG=(journal.heldout_before, *(record.heldout for record in rounds)),
            labelled_R=(journal.labelled_before, *(record.labelled_top1 for record in rounds)),
            max_rounds=1 if self.refine.method in ONE_SHOT else self.refine.rounds,
            patience=self.refine.patience,
            max_heldout_loss=self.refine.max_heldout_loss,
            last_moved=rounds[-1].num_moved if rounds else None,
        )

    def try_weights(self, labels: Labels, queries_LD: FloatArray) -> None:
        """Make, search and measure the state of a first round with each weight that the journal does not have yet."""
        by_shard = self.refiners.split(labels)
        for number in range(len(self.journal.weights), len(self.weights)):
            at, weight = StateId("weight", number), self.weights[number]
            self.refiners.step(PUBLISHED, at, by_shard, queries_LD, weight)
            hits = self.search(at, self.labelled_rows, queries_LD, f"refine weight {weight:g}: retrieve")
            ranks = self.rank(at, hits, ["gate"])
            heldout = self.heldout(ranks)
            lost_points = worst_loss(self.journal.heldout_before, heldout)
            report = WeightReport(weight=weight, **self.top1s(ranks), lost_points=lost_points)
            self.journal.commit_weight(WeightRecord(report, self.labelled_points(ranks), heldout))
            logger.info("refine weight %s", " ".join(f"{name}={value}" for name, value in report._asdict().items()))

    def weight(self) -> float:
        """Return the weight of feedback views in use: the only one, or the choice after trying all; 0 for other
        methods."""
        if len(self.weights) <= 1:
            return self.weights[0] if self.weights else 0.0
        weights = [TriedWeight(row.report.weight, row.labelled_top1, row.heldout) for row in self.journal.weights]
        assert len(weights) == len(self.weights), "a weight has not been tried yet"
        return choose_weight(self.journal.heldout_before, weights, self.refine.max_heldout_loss)

    def settings(self) -> dict[str, float]:
        """Return the settings of this refinement's feedback views for the manifest, if it makes any."""
        if not self.weights:
            return {}
        return {"feedback_weight": self.weight(), "feedback_clusters": self.refine.feedback_clusters}

    def queries_at(self, number: int) -> FloatArray:
        """Return the labelled queries after a round."""
        if number and self.refine.method in MOVES_QUERIES:
            return self.journal.load_queries(number)
        return self.queries_TD[: self.questions.num_labelled]

    def state_id(self, number: int) -> StateId:
        """Return the state of the passages after a round: the published one where only queries move."""
        return PUBLISHED if self.refine.method in KEEPS_PASSAGES else StateId("round", number)

    def search(self, at: StateId, rows_Q: IntArray, queries_QD: FloatArray, what: str) -> ShardHits:
        """Search a state for the questions of some table rows. Raises PublishConflictError if another version was
        published meanwhile: the result of this refinement could not be."""
        base = self.refiners.task.manifest
        manifests.require_live(self.journal.store, base.index, base.version)
        hits = self.refiners.search(at, queries_QD, self.search_depth, what, self.progress)
        return self.evaluator.without_own(rows_Q, hits, self.depth)

    def rank(self, at: StateId, hits: ShardHits, others: Sequence[Literal["gate", "report"]]) -> Ranks:
        """Return the ranks at a state: of the labelled questions by their hits, of gate and reported ones by a search.

        Where no passage moved, unmoved questions keep the ranks that they had before.
        """
        ranks = self.evaluator.rank(None, self.labelled_rows, hits)
        name = f"{at.kind} {self.weights[at.number] if at.kind == 'weight' else at.number:g}"
        for what in others:
            rows = self.questions.gate_rows() if what == "gate" else self.questions.other_rows()
            if at == PUBLISHED and self.journal.before is not None:
                ranks[:, rows] = self.journal.before[:, rows]
            elif rows:
                where = np.array(rows, np.int64)
                other_hits = self.search(at, where, self.queries_TD[where], f"refine {name}: {what}")
                ranks = self.evaluator.rank(ranks, where, other_hits)
        return ranks

    def heldout(self, ranks: Ranks) -> tuple[float, ...]:
        return tuple(100 * self.evaluator.top1([group], kind, ranks) for group, kind in self.gates)

    def labelled_points(self, ranks: Ranks) -> float:
        """Return top-1 of the labelled questions in points, 0 where they have neither answers nor gold passages."""
        group = self.questions.groups[0]
        kind = self.evaluator.deciding_kind(group)
        return 100 * self.evaluator.top1([group], kind, ranks) if kind else 0.0

    def top1s(self, ranks: Ranks) -> dict[str, Any]:
        """Return the fields of a RoundReport or WeightReport: labelled and gate questions, by answers and by gold
        passages."""
        top1, labelled_groups, gates = self.evaluator.top1, self.questions.groups[:1], self.questions.gates
        return {
            "labelled_top1": top1(labelled_groups, "answer", ranks),
            "labelled_gold_top1": top1(labelled_groups, "gold", ranks),
            "gate_top1": top1(gates, "answer", ranks),
            "gate_gold_top1": top1(gates, "gold", ranks),
        }

    def step(self, number: int, labels: Labels, queries_LD: FloatArray) -> tuple[FloatArray, "RoundStep"]:
        """Step from the state after round `number` to the next: queries first where both move (AOpt, hybrid)."""
        method, by_shard = self.refine.method, self.refiners.split(labels)
        at, to = self.state_id(number), self.state_id(number + 1)
        queries_step, steps = None, []
        if method in MOVES_QUERIES:
            queries_LD, queries_step = self._move_queries(at, by_shard, queries_LD)
            self.journal.save_queries(number + 1, queries_LD)
        if method not in KEEPS_PASSAGES:
            steps = self.refiners.step(at, to, by_shard, queries_LD, self.weight())
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
                factors = {"alpha": refine.alpha, "beta": refine.beta, "gamma": refine.gamma}
                step = aopt.linear_combination(block_QD, total, **factors)
            else:
                step = aopt.ratio_step(block_QD, total, step_size=refine.step_size, guard=refine.domain_guard)
            step = step.keep_length(block_QD) if self.refiners.task.keep_length else step
            require_finite(step, "fp32", refine)
            moved_LD[low + step.moved_M] = step.vectors_MD
            steps.append(step)
        original_LD = self.queries_TD[: len(queries_LD)].astype(np.float64)
        drift_L = np.linalg.norm(moved_LD - original_LD, axis=1)
        return moved_LD, ShardStep.of(steps, drift_L, int((drift_L > 0).sum()))

    def measure_round(self, number: int, step: "RoundStep", hits: ShardHits) -> None:
        """Measure the state after a round, and commit the round to the journal."""
        ranks = self.rank(self.state_id(number), hits, ["gate"])
        figures = step.summary(self.refiners.num_passages, len(self.labelled_rows))
        report = RoundReport(number=number, **figures, **self.top1s(ranks))
        self.journal.commit(RoundRecord(report, self.labelled_points(ranks), self.heldout(ranks), step.num_moved))
        self.journal.keep_only({number, self.best_so_far()})
        record_round(self.refiners.index, report._asdict())
        logger.info("refine %s", " ".join(f"{name}={value}" for name, value in report._asdict().items()))

    def best_so_far(self) -> int:
        """Return the round to restore if rounds ended now; where none is acceptable, the least harmful one."""
        state = self.state()
        action = next_action(replace(state, max_rounds=len(self.journal.rounds), last_moved=None))
        return action.best_round if isinstance(action, Stop) else state.least_harmful()

    def accuracies(self, number: int) -> list[Accuracy]:
        """Return the accuracy of every group before refinement and at the state of a round."""
        before = after = self.journal.before
        assert before is not None and after is not None, "nothing was measured before"
        if number:
            hits = self.retrieve(number, self.queries_at(number), "final")
            after = self.rank(self.state_id(number), hits, ["gate", "report"])
        return self.evaluator.accuracies(before, after)


def weights_to_try(refine: RefineConfig) -> tuple[float, ...]:
    """Return the weights of feedback views to try, ascending, each once."""
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
        """Return the fields of a RoundReport. The moved share is of passages, or of questions if only questions
        move."""
        num_drifted = sum(part.num_drifted for part in self.parts)
        share = sum(part.moved_passages for part in self.shards) / num_passages
        if not self.shards and self.queries is not None:
            share = self.queries.num_moved / num_questions
        skip_counts = ("skipped_domain", "skipped_no_positive", "skipped_no_negative")
        return {
            "loss": math.fsum(part.loss_sum for part in self.parts) / max(self.num_moved, 1),
            "num_positives": self.num_positive,
            "num_negatives": self.num_negative,
            "moved_share": share,
            "drift_mean": math.fsum(part.drift_sum for part in self.parts) / max(num_drifted, 1),
            "drift_max": max((part.drift_max for part in self.parts), default=0.0),
            **{name: sum(getattr(part, name) for part in self.parts) for name in skip_counts},
        }
