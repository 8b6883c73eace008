"""Refinements tried out in memory: the same labels and steps as a refinement's, over the views of one small index.

What `refine` does over shards and rounds at rest, this does in one process and publishes nothing, so a hundred settings
cost a minute. It also knows variants that `refine` does not offer: every view moved instead of the winner, negatives
that push feedback views away, decay, clicks.

    feedback view   w |p| m / |m|,   m = sum_pos a^age q / sum_pos a^age  -  push x mean_neg q
    clicks          P(click) = 0.9^rank x (0.9 if the passage answers, else 0.1); what was passed over is a negative

Shapes: P passages, N their views, Q questions, K hits, F feedback views, L labels, D dimension.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from scipy.sparse import csr_array

from mvr_ray.core.judging.answers import AnswerMatcher
from mvr_ray.core.judging.metrics import first_ranks, top_k_accuracy
from mvr_ray.core.refining import aopt, feedback
from mvr_ray.core.refining.pseudo_labels import Labels, gold_relevance, label_matrices, labels_from_hits, winning_slots
from mvr_ray.core.refining.refine_policy import ONE_SHOT
from mvr_ray.types import FloatArray, IntArray

_QUERIES_AT_ONCE = 256
HUB_DEPTH = 10
CLICK_RELEVANT, CLICK_OTHER, CLICK_RANK = 0.9, 0.1, 0.9
AGES = 4
"""Labelled questions are taken to have come in so many waves, dealt in turn: those of a passage stand side by side in a
set, and in several waves. The last one is the newest, of age 0."""

Method = Literal["linear", "rocchio", "passage", "query", "hybrid", "softmax", "feedback_views"]


class Setting(NamedTuple):
    """One refinement to try; `softmax` moves passages by the form without a domain, at `temperature`. What the method
    does not use means nothing to it. `keep_length` brings every moved vector back to the length that it had; without
    it a step is the paper's."""

    method: Method = "feedback_views"
    labels: Literal["answers", "gold", "clicks"] = "answers"
    positives: Literal["first", "all"] = "first"
    move: Literal["winner", "every"] = "winner"
    depth: int = 100
    rounds: int = 1
    step_size: float = 0.01
    guard: float = 1e-3
    keep_length: bool = True
    temperature: float = 0.05
    beta: float = 0.6
    gamma: float = -0.1
    weight: float = 0.8
    clusters: int = 1
    push: float = 0.0
    decay: float = 1.0
    seed: int = 0


class Hits(NamedTuple):
    """Best passages of each question: numbers, -1 on padding, and exact scores' order."""

    passage_QK: IntArray


class LabelledQuestions(NamedTuple):
    """A question set. `gold_Q` holds passage numbers."""

    name: str
    queries_QD: FloatArray
    answers_Q: Sequence[Sequence[str]]
    gold_Q: Sequence[set[int]]


class Hubs(NamedTuple):
    """How passages crowd into the top 10 of questions that they do not answer: the most lists, and the skewness."""

    most: int
    skewness: float


class SetAccuracy(NamedTuple):
    """Top-k accuracies (shares) of one set after one round, and the ranks of each question's first answer-bearing and
    first gold passage, from 0; -1: not among the hits."""

    questions: str
    answer: dict[int, float]
    gold: dict[int, float]
    hubs: Hubs
    answer_ranks: list[int]
    gold_ranks: list[int]


class Round(NamedTuple):
    """After `number` steps. `norm_mean` is that of the views that moved, over what they began with; `newest` is top-1
    by answers of the labelled questions' newest wave, which is what decay is for."""

    number: int
    loss: float
    num_moved: int
    skipped_domain: int
    skipped_no_positive: int
    norm_mean: float
    norm_max: float
    newest: float
    sets: list[SetAccuracy]


@dataclass
class _State:
    """Views as moved, labelled queries as moved, feedback views beside them."""

    vectors_ND: FloatArray
    labelled_QD: FloatArray
    feedback_P: IntArray
    feedback_FD: FloatArray
    loss: float = float("nan")
    moved: int = 0
    skipped_domain: int = 0
    skipped_no_positive: int = 0
    touched: set[int] = field(default_factory=set)


class RefinementSimulator:
    """One index version in memory. `text_of` gives the text of a passage number; views are searched as the version
    stores them, in `dtype` fp16 or fp32, and moved in float32."""

    def __init__(
        self,
        vectors_ND: FloatArray,
        row_ptr: IntArray,
        view_numbers_N: IntArray,
        num_views: int,
        text_of: Callable[[int], str],
        dtype: str = "fp32",
    ) -> None:
        self.vectors_ND = np.ascontiguousarray(vectors_ND, np.float32)
        self.row_ptr, self.view_numbers_N, self.num_views = row_ptr, view_numbers_N, num_views
        self.num_passages = len(row_ptr) - 1
        self.passage_N = np.repeat(np.arange(self.num_passages), np.diff(row_ptr))
        self.norms_P = feedback.own_norms(self.vectors_ND, row_ptr, view_numbers_N, num_views)
        self._text_of, self._matcher = text_of, AnswerMatcher()
        self._stored = np.float16 if dtype == "fp16" else np.float32
        self._bears: dict[str, np.ndarray] = {}

    def simulate(
        self,
        setting: Setting,
        labelled: LabelledQuestions,
        others: Sequence[LabelledQuestions],
        ks: Sequence[int] = (1, 5, 20, 100),
    ) -> list[Round]:
        """Refine from the labelled questions; every set measured before the first round and after each."""
        dimension = self.vectors_ND.shape[1]
        none = np.empty(0, np.int64), np.empty((0, dimension), np.float32)
        state = _State(self.vectors_ND, labelled.queries_QD.astype(np.float32), *none)
        depth = max(setting.depth, *ks)
        hits = self.search(state, state.labelled_QD, depth)
        rounds = [self._round(0, state, labelled, others, hits, ks)]
        for number in range(1, setting.rounds + 1):
            labels = self.label(setting, labelled, state, hits)
            state = self._step(setting, state, labels)
            hits = self.search(state, state.labelled_QD, depth)
            rounds.append(self._round(number, state, labelled, others, hits, ks))
        return rounds

    def search(self, state: _State, queries_QD: FloatArray, k: int) -> Hits:
        """The best k passages of each question by their best view; ties by number. New feedback views replace those
        that the passage has in the index. Scores are those of `exact`, sums in float64 rounded to float32: passages
        that learned one question alone have equal views, and tie here as they do anywhere."""
        k = min(k, self.num_passages)
        found_QK = np.full((len(queries_QD), k), -1, np.int64)
        order = np.argsort(state.feedback_P, kind="stable")
        owners, first = np.unique(state.feedback_P[order], return_index=True)
        replaced_N = (self.view_numbers_N >= self.num_views) & np.isin(self.passage_N, owners)
        vectors_DN = state.vectors_ND.T.astype(self._stored).astype(np.float64)
        added_DF = state.feedback_FD[order].T.astype(self._stored).astype(np.float64)
        for low in range(0, len(queries_QD), _QUERIES_AT_ONCE):
            block_QD = queries_QD[low : low + _QUERIES_AT_ONCE].astype(np.float64)
            scores_QN = (block_QD @ vectors_DN).astype(np.float32)
            scores_QN[:, replaced_N] = -np.inf
            best_QP = np.maximum.reduceat(scores_QN, self.row_ptr[:-1], axis=1)
            if len(owners):
                added_QF = np.maximum.reduceat((block_QD @ added_DF).astype(np.float32), first, axis=1)
                best_QP[:, owners] = np.maximum(best_QP[:, owners], added_QF)
            top_QK = np.sort(np.argpartition(-best_QP, k - 1, axis=1)[:, :k], axis=1)
            ranked = np.argsort(-np.take_along_axis(best_QP, top_QK, 1), axis=1, kind="stable")
            found_QK[low : low + len(block_QD)] = np.take_along_axis(top_QK, ranked, 1)
        return Hits(found_QK)

    def bears_answer(self, questions: LabelledQuestions, hits: Hits) -> np.ndarray:
        """Whether each hit's text holds an answer; every (question, passage) pair is looked at once."""
        shape = (len(questions.answers_Q), self.num_passages)
        known_QP = self._bears.setdefault(questions.name, np.full(shape, -1, np.int8))
        flags_QK = np.take_along_axis(known_QP, hits.passage_QK, 1)
        for question, rank in zip(*np.nonzero(flags_QK < 0)):
            passage = int(hits.passage_QK[question, rank])
            flag = self._matcher.has_answer(self._text_of(passage), questions.answers_Q[question])
            known_QP[question, passage] = flags_QK[question, rank] = flag
        return flags_QK > 0

    def label(self, setting: Setting, questions: LabelledQuestions, state: _State, hits: Hits) -> Labels:
        """Labels of the hits (AOpt eq. 8, first hits only, gold, or clicks), at the views that win now."""
        passage_QK = hits.passage_QK[:, : setting.depth]
        part = Hits(passage_QK)
        no_view_QK = np.zeros(passage_QK.shape, np.int16)
        if setting.labels == "gold":
            passage_QK = self._with_gold(passage_QK, questions)
            no_view_QK = np.zeros(passage_QK.shape, np.int16)
            return self._at_winners(
                labels_from_hits(passage_QK, no_view_QK, gold_relevance(passage_QK, questions.gold_Q)), state
            )
        relevant_QK = self.bears_answer(questions, part)
        if setting.labels == "clicks":
            clicked_QK, seen_QK = clicks(relevant_QK, setting.seed)
            kept_QK = np.where(seen_QK, passage_QK, -1)
            return self._at_winners(labels_from_hits(kept_QK, no_view_QK, clicked_QK), state)
        return self._at_winners(labels_from_hits(passage_QK, no_view_QK, relevant_QK, setting.positives), state)

    def _with_gold(self, passage_QK: IntArray, questions: LabelledQuestions) -> IntArray:
        """A column more with the first gold passage that was not retrieved."""
        missed = [
            next(iter(sorted(gold.difference(row.tolist()))), -1) for gold, row in zip(questions.gold_Q, passage_QK)
        ]
        return np.concatenate([passage_QK, np.array(missed, np.int64)[:, None]], axis=1)

    def _at_winners(self, labels: Labels, state: _State) -> Labels:
        slots = winning_slots(state.labelled_QD, state.vectors_ND, self.row_ptr, labels.question_L, labels.passage_L)
        return labels._replace(view_L=self.view_numbers_N[slots].astype(np.int16))

    def _slots(self, labels: Labels) -> IntArray:
        keys_N = self.passage_N * (1 << 16) + self.view_numbers_N
        return np.searchsorted(keys_N, labels.passage_L * (1 << 16) + labels.view_L)

    def _everywhere(self, labels: Labels) -> Labels:
        """Each label at every view of its passage instead of the winner."""
        counts_L = np.diff(self.row_ptr)[labels.passage_L]
        at = np.repeat(np.arange(len(counts_L)), counts_L)
        offset = np.arange(len(at)) - np.repeat(np.cumsum(counts_L) - counts_L, counts_L)
        slots = self.row_ptr[labels.passage_L[at]] + offset
        return labels.take(at)._replace(view_L=self.view_numbers_N[slots].astype(np.int16))

    def _step(self, setting: Setting, state: _State, labels: Labels) -> _State:
        if setting.method == "feedback_views":
            return self._feedback(setting, state, labels)
        if setting.move == "every":
            labels = self._everywhere(labels)
        slots = self._slots(labels)
        num_queries = len(state.labelled_QD)
        matrices = label_matrices(slots, labels.question_L, labels.positive_L, len(state.vectors_ND), num_queries)
        vectors_ND, labelled_QD = state.vectors_ND, state.labelled_QD
        steps: list[aopt.StepResult] = []
        if setting.method in ("query", "hybrid", "rocchio"):
            if setting.method == "rocchio":
                step = aopt.rocchio_step(labelled_QD, vectors_ND, matrices, beta=setting.beta, gamma=setting.gamma)
            else:
                step = aopt.query_step(
                    labelled_QD, vectors_ND, matrices, step_size=setting.step_size, guard=setting.guard
                )
            step = step.keep_length(labelled_QD) if setting.keep_length else step
            labelled_QD = labelled_QD.copy()
            labelled_QD[step.moved_M] = step.vectors_MD
            steps.append(step)
        if setting.method in ("passage", "hybrid", "linear", "softmax"):
            if setting.method == "linear":
                step = aopt.linear_step(vectors_ND, labelled_QD, matrices, beta=setting.beta, gamma=setting.gamma)
            elif setting.method == "softmax":
                step = aopt.softmax_step(
                    vectors_ND, labelled_QD, matrices, step_size=setting.step_size, temperature=setting.temperature
                )
            else:
                step = aopt.passage_step(
                    vectors_ND, labelled_QD, matrices, step_size=setting.step_size, guard=setting.guard, single=True
                )
            step = step.keep_length(vectors_ND) if setting.keep_length else step
            vectors_ND = vectors_ND.copy()
            vectors_ND[step.moved_M] = step.vectors_MD
            state.touched.update(step.moved_M.tolist())
            steps.append(step)
        return _State(
            vectors_ND,
            labelled_QD,
            state.feedback_P,
            state.feedback_FD,
            float("nan") if setting.method in ONE_SHOT else float(np.nanmean([step.loss for step in steps])),
            sum(step.num_moved for step in steps),
            sum(step.num_outside_domain for step in steps),
            sum(step.num_no_positive for step in steps),
            state.touched,
        )

    def _feedback(self, setting: Setting, state: _State, labels: Labels) -> _State:
        made = feedback_of(setting, state.labelled_QD, labels, self.norms_P)
        num_moved = len(np.unique(made.passage_F))
        return _State(state.vectors_ND, state.labelled_QD, made.passage_F, made.vectors_FD, moved=num_moved)

    def _round(
        self,
        number: int,
        state: _State,
        labelled: LabelledQuestions,
        others: Sequence[LabelledQuestions],
        hits: Hits,
        ks: Sequence[int],
    ) -> Round:
        sets = [self._measure(labelled, hits, ks)]
        newest_Q = ages(len(labelled.queries_QD)) == 0
        newest = float(self.bears_answer(labelled, hits)[newest_Q, 0].mean()) if newest_Q.any() else float("nan")
        for questions in others:
            sets.append(self._measure(questions, self.search(state, questions.queries_QD, max(ks)), ks))
        touched = sorted(state.touched)
        grown = np.linalg.norm(state.vectors_ND[touched], axis=1) / np.linalg.norm(self.vectors_ND[touched], axis=1)
        return Round(
            number,
            state.loss,
            state.moved,
            state.skipped_domain,
            state.skipped_no_positive,
            float(grown.mean()) if len(grown) else 1.0,
            float(grown.max(initial=1.0)),
            newest,
            sets,
        )

    def _measure(self, questions: LabelledQuestions, hits: Hits, ks: Sequence[int]) -> SetAccuracy:
        bears_QK = self.bears_answer(questions, hits)
        gold_QK = gold_relevance(hits.passage_QK, questions.gold_Q)
        answer_Q, gold_Q = first_ranks(bears_QK), first_ranks(gold_QK)
        return SetAccuracy(
            questions.name,
            top_k_accuracy(answer_Q, ks),
            top_k_accuracy(gold_Q, ks),
            hubs(hits.passage_QK, bears_QK | gold_QK, self.num_passages),
            answer_Q.tolist(),
            gold_Q.tolist(),
        )


def hubs(passage_QK: IntArray, relevant_QK: np.ndarray, num_passages: int, depth: int = HUB_DEPTH) -> Hubs:
    """Of the lists' first `depth` places, those of passages that answer the question are left out."""
    crowd = passage_QK[:, :depth][~relevant_QK[:, :depth]]
    count_P = np.bincount(crowd[crowd >= 0], minlength=num_passages).astype(np.float64)
    spread = count_P.std()
    skewness = float(((count_P - count_P.mean()) ** 3).mean() / spread**3) if spread else 0.0
    return Hubs(int(count_P.max(initial=0)), skewness)


class Clicks(NamedTuple):
    """Which hits were clicked, and which were seen: all down to the last click."""

    clicked_QK: np.ndarray
    seen_QK: np.ndarray


def clicks(relevant_QK: np.ndarray, seed: int) -> Clicks:
    """Made-up clicks of a person who reads from the top and sometimes errs."""
    rng = np.random.default_rng(seed)
    rank_K = np.arange(relevant_QK.shape[1])
    chance_QK = CLICK_RANK**rank_K * np.where(relevant_QK, CLICK_RELEVANT, CLICK_OTHER)
    clicked_QK = rng.random(relevant_QK.shape) < chance_QK
    last_Q = np.where(clicked_QK.any(1), clicked_QK.shape[1] - 1 - clicked_QK[:, ::-1].argmax(1), -1)
    return Clicks(clicked_QK, rank_K <= last_Q[:, None])


def ages(num_questions: int) -> IntArray:
    """How many waves have come since each labelled question's."""
    return AGES - 1 - np.arange(num_questions) % AGES


def feedback_of(
    setting: Setting, queries_QD: FloatArray, labels: Labels, norms_P: FloatArray
) -> feedback.FeedbackViews:
    """Feedback views as `refine` makes them, from positive questions that fade with age less `push` x the negatives."""
    negative = labels.take(~labels.positive_L)
    return feedback.feedback_views(
        queries_QD,
        labels,
        norms_P,
        weight=setting.weight,
        clusters=setting.clusters,
        share_Q=setting.decay ** ages(len(queries_QD)),
        away_PD=setting.push * _means(negative, queries_QD, len(norms_P)) if setting.push else None,
    )


def _means(labels: Labels, queries_QD: FloatArray, num_passages: int) -> FloatArray:
    shape = (num_passages, len(queries_QD))
    counts = csr_array((np.ones(len(labels.passage_L)), (labels.passage_L, labels.question_L)), shape=shape)
    return (counts @ queries_QD.astype(np.float64)) / np.maximum(counts.sum(axis=1), 1)[:, None]
