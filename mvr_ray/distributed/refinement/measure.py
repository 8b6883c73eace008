"""Compare hits with answers and gold passages: labels, first ranks, accuracy of each group, and the gate sets.

Answers label retrieved passages (AOpt, eq. 8). Gold passages and external judgements are certain, so they are labelled
whether retrieved or not, at the best-scoring view; other hits are negatives of gold labels only.

Shapes: T questions in the table, Q searched questions, L labelled ones or their labels, K hits, D dimension.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mvr_ray.config import RefineConfig
from mvr_ray.core.judging.answers import empty_answers
from mvr_ray.core.judging.metrics import first_ranks, top_k_accuracy
from mvr_ray.core.refining.pseudo_labels import Labels, gold_relevance, labels_from_hits
from mvr_ray.core.refining.refine_policy import KEEPS_PASSAGES
from mvr_ray.distributed.refinement.questions import Judgement, QuestionGroup, RefineQuestions
from mvr_ray.distributed.refinement.refiner_pool import RefinerPool
from mvr_ray.distributed.refinement.report import REPORT_DEPTHS, Accuracy, Kind
from mvr_ray.distributed.refinement.state import StateId
from mvr_ray.errors import ConfigError
from mvr_ray.types import FloatArray, IntArray, ShardHits

KINDS: tuple[Kind, ...] = ("answer", "gold")
UNSEARCHED = -2

Ranks = IntArray
"""Rank of the first answer-bearing and of the first gold hit, a row for each of KINDS, int64 [2, T]; -1 not found, -2
not searched."""


class Evaluator:
    """Holds the answers and gold passages of every question; the refiners match answers to passages.

    Answers that match a text of nothing (`empty_answers`) are omitted: they would match every passage.
    """

    def __init__(self, refine: RefineConfig, questions: RefineQuestions, refiners: RefinerPool) -> None:
        self.refine, self.questions, self.refiners = refine, questions, refiners
        match = refiners.task.match
        self.answers_T = [
            tuple(answer for answer in question.answers if not empty_answers([answer], match))
            for question in questions.table
        ]
        number_of = refiners.locate(passage_id for question in questions.table for passage_id in question.positive_ids)
        self.gold_T = [
            {number_of[passage_id] for passage_id in question.positive_ids if passage_id in number_of}
            for question in questions.table
        ]
        own_ids = questions.own_ids
        own_number_of = refiners.locate(passage_id for ids in own_ids.values() for passage_id in ids)
        self.own_of = {row: [own_number_of[one] for one in ids if one in own_number_of] for row, ids in own_ids.items()}
        """By table row, the passages that are the question itself."""
        self.feedback = self._feedback()
        self._labelled_marks: tuple[ShardHits, np.ndarray] | None = None
        self.judged_T = {
            "answer": np.array([bool(answers) for answers in self.answers_T]),
            "gold": np.array([bool(question.positive_ids) for question in questions.table]),
        }

    def _feedback(self) -> list[Judgement[int]]:
        """Return external judgements by passage number, each pair once."""
        judgements = self.questions.feedback or ()
        number_of = self.refiners.locate(one.passage for one in judgements)
        return sorted({Judgement(one.question, number_of[one.passage], one.positive) for one in judgements})

    def without_own(self, rows_Q: IntArray, hits: ShardHits, depth: int) -> ShardHits:
        """Return the first `depth` hits of each question without the passages that are the question itself."""
        if not self.own_of:
            return hits
        own_QK = gold_relevance(hits.rows_QK, [self.own_of.get(row, ()) for row in rows_Q.tolist()])
        in_order = np.arange(len(rows_Q))[:, None], np.argsort(own_QK, axis=1, kind="stable")[:, :depth]
        rows_QK = np.where(own_QK, -1, hits.rows_QK)[in_order]
        return hits._replace(rows_QK=rows_QK, scores_QK=hits.scores_QK[in_order], views_QK=hits.views_QK[in_order])

    def label(self, at: StateId, queries_LD: FloatArray, hits: ShardHits) -> Labels:
        """Label the hits of the labelled questions at a state; passages are numbered through all shards."""
        if self.feedback:
            return self._winning_labels(at, queries_LD, self.feedback)
        rows_L, view_LK = np.arange(len(hits.rows_QK)), hits.views_QK[:, : self.refine.depth]
        judged_L = self.judged_T["answer" if self.refine.labels == "answers" else "gold"][rows_L]
        passage_LK = np.where(judged_L[:, None], hits.rows_QK[:, : self.refine.depth], -1)  # of others nothing is known
        if self.refine.labels == "answers":
            relevant_LK = self._bears_answer(rows_L, hits)[:, : self.refine.depth]
            return labels_from_hits(passage_LK, view_LK, relevant_LK, self.refine.positives)
        labels = labels_from_hits(passage_LK, view_LK, self.is_gold(rows_L, passage_LK), "all")
        unretrieved_pairs = (
            Judgement(row, passage, True)
            for row, hit_K in enumerate(passage_LK)
            for passage in sorted(self.gold_T[row].difference(hit_K.tolist()))
        )
        more = self._winning_labels(at, queries_LD, unretrieved_pairs)
        columns: Iterable[Any] = (np.concatenate(pair) for pair in zip(labels, more))
        both = Labels(*columns)
        return both.take(np.lexsort((both.passage_L, both.question_L)))

    def _winning_labels(self, at: StateId, queries_LD: FloatArray, judgements: Iterable[Judgement[int]]) -> Labels:
        """Label judged pairs at their best-scoring view, in order of question, then passage."""
        table_L3 = np.array(sorted(judgements), np.int64).reshape(-1, 3)
        no_views_L = np.zeros(len(table_L3), np.int16)
        labels = Labels(table_L3[:, 0], table_L3[:, 1], no_views_L, table_L3[:, 2].astype(bool))
        return labels._replace(view_L=self.refiners.winners(at, labels, queries_LD))

    def _bears_answer(self, rows_Q: IntArray, hits: ShardHits) -> np.ndarray:
        """Return whether each hit holds an answer of its question, bool [Q, K]. Those of the labelled questions, which
        are ranked and then labelled by the same hits, are marked once."""
        if len(rows_Q) and rows_Q[0] >= self.questions.num_labelled:
            return self.refiners.mark(rows_Q, self.answers_T, hits.rows_QK)
        if self._labelled_marks is None or self._labelled_marks[0] is not hits:
            self._labelled_marks = hits, self.refiners.mark(rows_Q, self.answers_T, hits.rows_QK)
        return self._labelled_marks[1]

    def is_gold(self, rows_Q: IntArray, passage_QK: IntArray) -> np.ndarray:
        return gold_relevance(passage_QK, [self.gold_T[row] for row in rows_Q])

    def rank(self, ranks: Ranks | None, rows_Q: IntArray, hits: ShardHits) -> Ranks:
        """Fill in the ranks of the searched questions; `ranks` None: no question was searched before."""
        shape = len(KINDS), len(self.questions.table)
        ranks = np.full(shape, UNSEARCHED, np.int64) if ranks is None else ranks.copy()
        relevant = self._bears_answer(rows_Q, hits), self.is_gold(rows_Q, hits.rows_QK)
        ranks[:, rows_Q] = [first_ranks(relevant_QK) for relevant_QK in relevant]
        return ranks

    def members(self, group: QuestionGroup, kind: Kind) -> IntArray:
        """Return the questions of a group that have answers, or gold passages (`kind`)."""
        rows = np.array(group.members, np.int64)
        return rows[self.judged_T[kind][rows]]

    def top1(self, groups: Sequence[QuestionGroup], kind: Kind, ranks: Ranks) -> float:
        """Return the top-1 accuracy over some groups as a share, nan if they have no `members` of this kind."""
        rows = np.concatenate([self.members(group, kind) for group in groups])
        return top_k_accuracy(ranks[KINDS.index(kind), rows], [1])[1] if len(rows) else float("nan")

    def accuracies(self, before: Ranks, after: Ranks) -> list[Accuracy]:
        """Return the accuracy of every group, by answers and by gold passages."""
        rows = []
        for group in self.questions.groups:
            for kind in KINDS:
                if not len(members := self.members(group, kind)):
                    continue
                was, now = (
                    top_k_accuracy(ranks[KINDS.index(kind), members], REPORT_DEPTHS) for ranks in (before, after)
                )
                pairs = [share for k in REPORT_DEPTHS for share in (was[k], now[k])]
                rows.append(Accuracy(group.name, group.protocol, kind, len(members), *pairs))
        return rows

    def deciding_kind(self, group: QuestionGroup) -> Kind | None:
        """Return the kind of accuracy that decides for a group: the kind of the labels, else the other; None without
        either."""
        kinds: Sequence[Kind] = ("answer", "gold") if self.refine.labels == "answers" else ("gold", "answer")
        return next((kind for kind in kinds if len(self.members(group, kind))), None)

    def gate_sets(self) -> list[tuple[QuestionGroup, Kind]]:
        """Return the held-out gate sets, which limit the loss of accuracy, each with the kind of accuracy that decides.

        Raises ConfigError for a set without answers and gold passages: a gate, and on the query side also the labelled
        questions, since only these change there from round to round.
        """
        labelled_groups = self.questions.groups[:1] if self.refine.method in KEEPS_PASSAGES else ()
        label_setting = "feedback" if self.refine.feedback else "questions"
        for group in (*labelled_groups, *self.questions.gates):
            if not self.deciding_kind(group):
                raise ConfigError(
                    f"question set {group.name!r} decides about refinement, but its questions have neither answers nor "
                    f"gold passages; name another in "
                    f"refine.{label_setting if group.protocol == 'transductive' else 'gate'}"
                )
        return [(group, kind) for group in self.questions.gates if (kind := self.deciding_kind(group))]
