"""Simulate refinements in memory, with the labels and steps of a refinement, over the views of one small index.

`refine` works over shards and writes its rounds to a store; the simulator works in one process and publishes nothing,
so a hundred settings take a minute. It shares views, moved views, feedback views and searches with the distributed
refinement (`refinement.state`). It adds variants that `refine` does not offer: moving every view instead of the winner,
negatives that push feedback views away, decay, clicks.

    feedback view   w |p| m / |m|,   m = sum_pos a^age q / sum_pos a^age  -  push x mean_neg q
    clicks          P(click) = 0.9^rank x (0.9 if the passage answers, else 0.1); skipped passages are negatives

Shapes: P passages, N their views, Q questions, K hits, F feedback views, L labels, D dimension.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import TypeAdapter, ValidationError
from scipy.sparse import csr_array

from mvr_ray.config.base import describe_problems
from mvr_ray.core.judging.answers import AnswerMatcher, Match
from mvr_ray.core.judging.metrics import first_ranks, top_k_accuracy
from mvr_ray.core.refining import aopt, feedback
from mvr_ray.core.refining.pseudo_labels import (
    LabelMatrices,
    Labels,
    gold_relevance,
    label_matrices,
    labels_from_hits,
    winning_view_numbers,
)
from mvr_ray.core.refining.refine_policy import KEEPS_PASSAGES, MOVES_QUERIES, ONE_SHOT
from mvr_ray.core.searching.exact import ranks
from mvr_ray.distributed.refinement.state import ShardChanges, StoredViews
from mvr_ray.errors import ConfigError
from mvr_ray.index.base import IndexParams, ShardIndex
from mvr_ray.index.kinds import open_index
from mvr_ray.types import EmbeddingBlock, FloatArray, IntArray

HUB_DEPTH = 10
CLICK_RELEVANT, CLICK_OTHER, CLICK_RANK = 0.9, 0.1, 0.9
NUM_WAVES = 4
"""Number of waves in which labelled questions arrive, assigned in turn, so that adjacent questions of a passage are in
different waves. The last wave is the newest, of age 0."""

Method = Literal["linear", "rocchio", "passage", "query", "hybrid", "softmax", "feedback_views"]


class Setting(NamedTuple):
    """One refinement to simulate; `softmax` moves passages by the form without a domain, at `temperature`. A method
    ignores the fields that it does not use. `keep_length` restores the length of every moved vector; without it a step
    is the paper's."""

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


_SETTING = TypeAdapter(Setting)


class LabelledQuestions(NamedTuple):
    """A question set. `gold_Q` holds passage numbers."""

    name: str
    queries_QD: FloatArray
    answers_Q: Sequence[Sequence[str]]
    gold_Q: Sequence[set[int]]


class Hubs(NamedTuple):
    """Passages in the top 10 of questions that they do not answer: the largest number of lists, and the skewness."""

    most: int
    skewness: float


class SetAccuracy(NamedTuple):
    """Top-k accuracies (shares) of one set after one round, and the ranks of each question's first answer-bearing and
    first gold passage, from 0; -1: not among the hits; None: the question has no answers, or no gold passages, and is
    in no accuracy."""

    questions: str
    answer: dict[int, float]
    gold: dict[int, float]
    hubs: Hubs
    answer_ranks: list[int | None]
    gold_ranks: list[int | None]


class Round(NamedTuple):
    """The state after `number` steps. `norm_mean` is that of moved views over their initial norms; `newest` is top-1 by
    answers of the labelled questions' newest wave, the target of decay."""

    number: int
    loss: float
    num_moved: int
    skipped_domain: int
    skipped_no_positive: int
    norm_mean: float
    norm_max: float
    newest: float
    sets: list[SetAccuracy]


class SimulatedState(NamedTuple):
    """The views and the labelled queries after some rounds; the mean loss before the last step, and the numbers of
    vectors that it moved and skipped."""

    changes: ShardChanges
    labelled_QD: FloatArray
    loss: float = float("nan")
    num_moved: int = 0
    skipped_domain: int = 0
    skipped_no_positive: int = 0


class RefinementSimulator:
    """One index version in memory. `text_of` returns the text of a row of the block. Views are searched in the block's
    type, and moved in float32."""

    def __init__(
        self, block: EmbeddingBlock, num_views: int, text_of: Callable[[int], str], match: Match = "string"
    ) -> None:
        self.block, self.views, self.num_views = block, StoredViews([block]), num_views
        self.norms_P = feedback.own_norms(block.vectors_ND, block.row_ptr, block.view_numbers_N, num_views)
        self._text_of, self._matcher = text_of, AnswerMatcher(match)
        self._answer_flags: dict[str, np.ndarray] = {}

    def start(self, queries_QD: FloatArray) -> SimulatedState:
        """Return the version's initial state, with the labelled queries as encoded."""
        no_changes = ShardChanges.none(self.block.vectors_ND.shape[1])
        return SimulatedState(no_changes, queries_QD.astype(np.float32))

    def simulate(
        self,
        setting: Setting,
        questions: LabelledQuestions,
        others: Sequence[LabelledQuestions],
        ks: Sequence[int] = (1, 5, 20, 100),
    ) -> list[Round]:
        """Refine from the labelled questions; measure every set before the first round and after each."""
        state, rounds = self.start(questions.queries_QD), []
        passage_QK = np.empty((0, 0), np.int64)
        newest_Q = wave_ages(len(questions.queries_QD)) == 0
        for number in range(setting.rounds + 1):
            if number:
                state = self.step(setting, state, self.label(setting, questions, state, passage_QK))
            index = self.open_index(state)
            passage_QK = self.search(index, state.labelled_QD, max(setting.depth, *ks))
            newest = self.bears_answer(questions, passage_QK[:, :1])[newest_Q]
            sets = [self._measure(questions, passage_QK, ks)]
            sets += [self._measure(other, self.search(index, other.queries_QD, max(ks)), ks) for other in others]
            stored_MD = self.block.vectors_ND[state.changes.moved_M].astype(np.float32)
            growth_M = np.linalg.norm(state.changes.moved_MD, axis=1) / np.linalg.norm(stored_MD, axis=1)
            growth = float(growth_M.mean()) if len(growth_M) else 1.0, float(growth_M.max(initial=1.0))
            newest_top1 = float(newest.mean()) if len(newest) else float("nan")
            rounds.append(Round(number, *state[2:], *growth, newest_top1, sets))
        return rounds

    def open_index(self, state: SimulatedState) -> ShardIndex:
        """Open an exact index of the views of a state. New feedback views replace those of the version."""
        return open_index(IndexParams(kind="flat"), self.views.current(state.changes, self.num_views), Path())

    def search(self, index: ShardIndex, queries_QD: FloatArray, k: int) -> IntArray:
        """Find the rows of the best k passages of each question, ties by row."""
        return index.search(queries_QD, min(k, len(self.block.ids))).rows_QK

    def bears_answer(self, questions: LabelledQuestions, passage_QK: IntArray) -> np.ndarray:
        """Return whether each hit's text holds an answer; matches every (question, passage) pair once."""
        shape = (len(questions.answers_Q), len(self.block.ids))
        flags_QP = self._answer_flags.setdefault(questions.name, np.full(shape, -1, np.int8))
        flags_QK = np.take_along_axis(flags_QP, passage_QK, 1)
        for question, rank in zip(*np.nonzero(flags_QK < 0)):
            passage = int(passage_QK[question, rank])
            flag = self._matcher.has_answer(self._text_of(passage), questions.answers_Q[question])
            flags_QP[question, passage] = flags_QK[question, rank] = flag
        return flags_QK > 0

    def label(
        self, setting: Setting, questions: LabelledQuestions, state: SimulatedState, passage_QK: IntArray
    ) -> Labels:
        """Label the hits (AOpt eq. 8, first hits only, gold, or clicks) at the currently winning views.

        Gold labels add every gold passage that is not among the hits. Questions without answers, or gold passages, get
        no label: nothing is known of their hits.
        """
        passage_QK, positives = passage_QK[:, : setting.depth], "all"
        if setting.labels == "gold":
            missing_Q = [sorted(gold.difference(row.tolist())) for gold, row in zip(questions.gold_Q, passage_QK)]
            columns = itertools.zip_longest(*missing_Q, fillvalue=-1)
            passage_QK = np.column_stack([passage_QK, *columns])
            relevant_QK = gold_relevance(passage_QK, questions.gold_Q)
        else:
            relevant_QK, positives = self.bears_answer(questions, passage_QK), setting.positives
        if setting.labels == "clicks":
            relevant_QK, seen_QK = simulate_clicks(relevant_QK, setting.seed)
            passage_QK, positives = np.where(seen_QK, passage_QK, -1), "all"
        judgements_Q = questions.gold_Q if setting.labels == "gold" else questions.answers_Q
        passage_QK = np.where([[bool(own)] for own in judgements_Q], passage_QK, -1)
        labels = labels_from_hits(passage_QK, np.zeros(passage_QK.shape, np.int16), relevant_QK, positives)
        block = self.block._replace(vectors_ND=self._vectors(state))
        view_L = winning_view_numbers(state.labelled_QD, block, labels.question_L, labels.passage_L)
        return labels._replace(view_L=view_L)

    def step(self, setting: Setting, state: SimulatedState, labels: Labels) -> SimulatedState:
        """Return the state after one round of a setting."""
        if setting.method == "feedback_views":
            new = make_feedback(setting, state.labelled_QD, labels, self.norms_P)
            changes = state.changes.with_feedback(new.passage_F, new.vectors_FD)
            return SimulatedState(changes, state.labelled_QD, num_moved=len(np.unique(new.passage_F)))
        slots_L = self.views.slots(labels.passage_L, labels.view_L)
        if setting.move == "every":
            copies_L = np.repeat(np.arange(len(slots_L)), np.diff(self.block.row_ptr)[labels.passage_L])
            labels = labels.take(copies_L)
            slots_L = self.block.row_ptr[labels.passage_L] + ranks(copies_L)
        vectors_ND, labelled_QD, changes = self._vectors(state), state.labelled_QD, state.changes
        sizes = len(vectors_ND), len(labelled_QD)
        matrices = label_matrices(slots_L, labels.question_L, labels.positive_L, *sizes)
        steps = []
        if setting.method in MOVES_QUERIES:
            steps.append(_move(setting, labelled_QD, vectors_ND, matrices.transpose()))
            labelled_QD = labelled_QD.copy()
            labelled_QD[steps[-1].moved_M] = steps[-1].vectors_MD
        if setting.method not in KEEPS_PASSAGES:
            steps.append(_move(setting, vectors_ND, labelled_QD, matrices, single=True))
            changes = changes.with_moved(steps[-1].moved_M, steps[-1].vectors_MD)
        return SimulatedState(
            changes,
            labelled_QD,
            float("nan") if setting.method in ONE_SHOT else float(np.nanmean([step.loss for step in steps])),
            sum(step.num_moved for step in steps),
            sum(step.num_outside_domain for step in steps),
            sum(step.num_no_positive for step in steps),
        )

    def _vectors(self, state: SimulatedState) -> FloatArray:
        """Return the current vectors of the version's views, float32 [N, D], without new feedback views."""
        return self.views.vectors(np.arange(len(self.block.vectors_ND)), state.changes)

    def _measure(self, questions: LabelledQuestions, passage_QK: IntArray, ks: Sequence[int]) -> SetAccuracy:
        bears_QK = self.bears_answer(questions, passage_QK)
        gold_QK = gold_relevance(passage_QK, questions.gold_Q)
        answer_Q, gold_Q = first_ranks(bears_QK), first_ranks(gold_QK)
        return SetAccuracy(
            questions.name,
            _accuracy(answer_Q, questions.answers_Q, ks),
            _accuracy(gold_Q, questions.gold_Q, ks),
            count_hubs(passage_QK, bears_QK | gold_QK, len(self.block.ids)),
            [rank if answers else None for rank, answers in zip(answer_Q.tolist(), questions.answers_Q)],
            [rank if gold else None for rank, gold in zip(gold_Q.tolist(), questions.gold_Q)],
        )


def expand_settings(settings: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each entry for every combination of its lists' values. Raises ConfigError for an unknown field or a wrong
    value."""
    for entry in settings:
        unknown_fields = sorted(set(entry) - set(Setting._fields))
        if unknown_fields:
            raise ConfigError(
                f"refinement_grid: unknown field {unknown_fields[0]!r}; a setting has {', '.join(Setting._fields)}"
            )
        lists = {name: value if isinstance(value, list) else [value] for name, value in entry.items()}
        for values in itertools.product(*lists.values()):
            fields = dict(zip(lists, values))
            try:
                _SETTING.validate_python(fields, strict=True)
            except ValidationError as error:
                raise ConfigError(f"refinement_grid: a setting is {fields}; {describe_problems(error)}") from None
            yield fields


def _accuracy(ranks_Q: IntArray, labels_Q: Sequence[Collection[Any]], ks: Sequence[int]) -> dict[int, float]:
    """Compute the accuracy of the questions that have labels, as `refine` and `evaluate` do; 0 without one."""
    rows = [row for row, labels in enumerate(labels_Q) if labels]
    return top_k_accuracy(ranks_Q[rows], ks) if rows else dict.fromkeys(ks, 0.0)


def _move(
    setting: Setting, vectors_ND: FloatArray, partners_QD: FloatArray, labels: LabelMatrices, single: bool = False
) -> aopt.StepResult:
    """Move passages by the form of a setting, or, with transposed labels, queries."""
    if setting.method in ONE_SHOT:
        step = aopt.linear_step(vectors_ND, partners_QD, labels, beta=setting.beta, gamma=setting.gamma)
    elif setting.method == "softmax":
        step = aopt.softmax_step(
            vectors_ND, partners_QD, labels, step_size=setting.step_size, temperature=setting.temperature
        )
    else:
        step = aopt.passage_step(
            vectors_ND, partners_QD, labels, step_size=setting.step_size, guard=setting.guard, single=single
        )
    return step.keep_length(vectors_ND) if setting.keep_length else step


def count_hubs(passage_QK: IntArray, relevant_QK: np.ndarray, num_passages: int, depth: int = HUB_DEPTH) -> Hubs:
    """Count hubs among the first `depth` hits, without hits that answer the question."""
    passages = passage_QK[:, :depth][~relevant_QK[:, :depth]]
    count_P = np.bincount(passages[passages >= 0], minlength=num_passages).astype(np.float64)
    spread = count_P.std()
    skewness = float(((count_P - count_P.mean()) ** 3).mean() / spread**3) if spread else 0.0
    return Hubs(int(count_P.max(initial=0)), skewness)


def simulate_clicks(relevant_QK: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw the clicks of a user model that reads from the top, with errors. Returns two flags of each hit, bool [Q, K]:
    a click, and that the user saw it: all down to the last click."""
    rng = np.random.default_rng(seed)
    rank_K = np.arange(relevant_QK.shape[1])
    chance_QK = CLICK_RANK**rank_K * np.where(relevant_QK, CLICK_RELEVANT, CLICK_OTHER)
    clicked_QK = rng.random(relevant_QK.shape) < chance_QK
    last_Q = np.where(clicked_QK, rank_K, -1).max(axis=1, initial=-1)
    return clicked_QK, rank_K <= last_Q[:, None]


def wave_ages(num_questions: int) -> IntArray:
    """Return the number of waves after each labelled question's own wave."""
    return NUM_WAVES - 1 - np.arange(num_questions) % NUM_WAVES


def make_feedback(
    setting: Setting, queries_QD: FloatArray, labels: Labels, norms_P: FloatArray
) -> feedback.FeedbackViews:
    """Build feedback views like `refine`, from positive questions weighted by age, less `push` x the negatives."""
    offset_PD = None
    if setting.push:
        negative = labels.take(~labels.positive_L)
        where, shape = (negative.passage_L, negative.question_L), (len(norms_P), len(queries_QD))
        counts_PQ = csr_array((np.ones(len(negative.passage_L)), where), shape=shape)
        sums_PD = counts_PQ @ queries_QD.astype(np.float64)
        offset_PD = setting.push * (sums_PD / np.maximum(counts_PQ.sum(axis=1), 1)[:, None])
    return feedback.feedback_views(
        queries_QD,
        labels,
        norms_P,
        weight=setting.weight,
        clusters=setting.clusters,
        share_Q=setting.decay ** wave_ages(len(queries_QD)),
        offset_PD=offset_PD,
    )
