"""Measure hits against answers and gold passages: first ranks, accuracy of each group, and the gate sets.

Shapes: T questions in the table, Q searched questions, K hits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mvr_ray.config import RefineConfig
from mvr_ray.core.judging.answers import empty_answers
from mvr_ray.core.judging.metrics import first_ranks, top_k_accuracy
from mvr_ray.core.refining.pseudo_labels import gold_relevance
from mvr_ray.core.refining.refine_policy import KEEPS_PASSAGES
from mvr_ray.distributed.refinement.questions import QuestionGroup, RefineQuestions
from mvr_ray.distributed.refinement.refiner_pool import RefinerPool
from mvr_ray.distributed.refinement.report import REPORT_DEPTHS, Accuracy, Kind
from mvr_ray.errors import ConfigError, DataError
from mvr_ray.types import IntArray, ShardHits

KINDS: tuple[Kind, ...] = ("answer", "gold")
UNSEARCHED = -2


class Ranks(NamedTuple):
    """Rank of the first answer-bearing and of the first gold hit, int64 [T]; -1 not found, -2 not searched."""

    answer_T: IntArray
    gold_T: IntArray

    def of(self, kind: Kind) -> IntArray:
        return self.answer_T if kind == "answer" else self.gold_T


class JudgedPair(NamedTuple):
    """An external judgement of a labelled question and a passage, both by number."""

    question: int
    passage: int
    positive: bool


class Evaluator:
    """Holds the answers and gold passages of every question; the refiners match answers to passages.

    Answers without a letter, number or sign are omitted: they would match every passage.
    """

    def __init__(self, questions: RefineQuestions, refiners: RefinerPool) -> None:
        self.questions, self.refiners = questions, refiners
        self.answers_T = [
            tuple(answer for answer in question.answers if not empty_answers([answer])) for question in questions.table
        ]
        number_of = refiners.locate(passage_id for question in questions.table for passage_id in question.positive_ids)
        self.gold_T = [
            {number_of[passage_id] for passage_id in question.positive_ids if passage_id in number_of}
            for question in questions.table
        ]
        self.feedback = self._feedback()
        self.judged_T = {
            "answer": np.array([bool(answers) for answers in self.answers_T]),
            "gold": np.array([bool(question.positive_ids) for question in questions.table]),
        }

    def _feedback(self) -> list[JudgedPair]:
        """External judgements by passage number, each pair once."""
        labels = self.questions.feedback or ()
        number_of = self.refiners.locate(label.passage_id for label in labels)
        unknown_ids = sorted({label.passage_id for label in labels if label.passage_id not in number_of})
        if unknown_ids:
            raise DataError(
                f"refine.feedback judges {len(unknown_ids)} passages that the index does not hold (first: "
                f"{unknown_ids[0]!r}); use passage ids of its corpus"
            )
        return sorted({JudgedPair(label.question, number_of[label.passage_id], label.positive) for label in labels})

    def bears_answer(self, rows_Q: IntArray, passage_QK: IntArray) -> np.ndarray:
        return self.refiners.mark(rows_Q, self.answers_T, passage_QK)

    def is_gold(self, rows_Q: IntArray, passage_QK: IntArray) -> np.ndarray:
        return gold_relevance(passage_QK, [self.gold_T[row] for row in rows_Q])

    def no_ranks(self) -> Ranks:
        size = len(self.questions.table)
        return Ranks(np.full(size, UNSEARCHED, np.int64), np.full(size, UNSEARCHED, np.int64))

    def rank(self, ranks: Ranks, rows_Q: IntArray, hits: ShardHits) -> Ranks:
        """Fill in `ranks` of the searched questions."""
        answer_T, gold_T = ranks.answer_T.copy(), ranks.gold_T.copy()
        answer_T[rows_Q] = first_ranks(self.bears_answer(rows_Q, hits.rows_QK))
        gold_T[rows_Q] = first_ranks(self.is_gold(rows_Q, hits.rows_QK))
        return Ranks(answer_T, gold_T)

    def members(self, group: QuestionGroup, kind: Kind) -> IntArray:
        """The questions of a group that have answers, or gold passages (`kind`)."""
        rows = np.array(group.members, np.int64)
        return rows[self.judged_T[kind][rows]]

    def top1(self, groups: Sequence[QuestionGroup], kind: Kind, ranks: Ranks) -> float:
        """Top-1 accuracy over some groups as a share, nan if they have no `members` of this kind."""
        rows = np.concatenate([self.members(group, kind) for group in groups])
        return top_k_accuracy(ranks.of(kind)[rows], [1])[1] if len(rows) else float("nan")

    def accuracies(self, before: Ranks, after: Ranks) -> list[Accuracy]:
        """Accuracy of every group, by answers and by gold passages."""
        rows = []
        for group in self.questions.groups:
            for kind in KINDS:
                if not len(members := self.members(group, kind)):
                    continue
                was, now = (top_k_accuracy(ranks.of(kind)[members], REPORT_DEPTHS) for ranks in (before, after))
                pairs = [share for k in REPORT_DEPTHS for share in (was[k], now[k])]
                rows.append(Accuracy(group.name, group.protocol, kind, len(members), *pairs))
        return rows


class GateSet(NamedTuple):
    """A gate group and the kind of accuracy that decides."""

    group: QuestionGroup
    kind: Kind


def deciding_kind(evaluator: Evaluator, refine: RefineConfig, group: QuestionGroup) -> Kind | None:
    """The kind of accuracy that decides for a group: the kind of the labels, else the other; None without either."""
    kinds: Sequence[Kind] = ("answer", "gold") if refine.labels == "answers" else ("gold", "answer")
    return next((kind for kind in kinds if len(evaluator.members(group, kind))), None)


def gate_sets(evaluator: Evaluator, refine: RefineConfig) -> list[GateSet]:
    """Select the held-out gate sets, which limit the loss of accuracy.

    Raises ConfigError for a set without answers and gold passages: a gate, and on the query side also the labelled
    questions, since only these change there from round to round.
    """

    def gate_set(group: QuestionGroup) -> GateSet:
        if kind := deciding_kind(evaluator, refine, group):
            return GateSet(group, kind)
        raise ConfigError(
            f"question set {group.name!r} decides about refinement, but its questions have neither answers nor gold "
            f"passages; name another in refine.{'questions' if group.protocol == 'transductive' else 'gate'}"
        )

    if refine.method in KEEPS_PASSAGES:
        gate_set(evaluator.questions.groups[0])
    return [gate_set(group) for group in evaluator.questions.gates]
