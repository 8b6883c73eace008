"""Plan which questions train together in an epoch, and join the passages of a batch.

The plan depends on (seed, epoch) alone, so it is the same for any number of workers and after any restart. A batch is B
questions and their distinct passages, all scored with every question; a rank encodes a slice of the questions and a
slice of the passages, which need not belong together.

Shapes: E examples (questions with a passage), S steps, B questions a batch, Q = B, P distinct passages, W ranks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mvr_ray.core.judging.answers import AnswerMatcher
from mvr_ray.types import IntArray, Passage

_PLAN = 1
"""Separates this module's random streams from those of others with the same seed."""


class Example(NamedTuple):
    """A question, its answers, its passage, hard negatives, and the ids of further passages that also answer it.

    `answer_start` is a character offset in the passage's text, -1 where unknown; the answer ends before `answer_stop`.
    `teacher`: a cross-encoder's scores of the passage and of each hard negative, or empty.
    """

    text: str
    passage: Passage
    answer_start: int = -1
    negatives: tuple[Passage, ...] = ()
    known_ids: tuple[str, ...] = ()
    answer_stop: int = -1
    teacher: tuple[float, ...] = ()
    answers: tuple[str, ...] = ()


class JoinedBatch(NamedTuple):
    """Questions and their distinct passages: each positive once, then each hard negative once.

    positive_Q      int64, row of the question's passage
    known_QP        true where a passage is another positive of the question
    answer_start_Q  int64, -1 where unknown
    teacher_QP      float32, a cross-encoder's score of the pair, NaN without one
    """

    texts: list[str]
    passages: list[Passage]
    positive_Q: IntArray
    known_QP: np.ndarray
    answer_start_Q: IntArray
    teacher_QP: np.ndarray
    answers: list[tuple[str, ...]]


class RankShare(NamedTuple):
    """The part of one rank: rows of the joined questions and passages; `real_P` is false for padding."""

    questions: range
    passages: list[int]
    real_P: np.ndarray


def plan_epoch(
    passage_E: IntArray, article_E: IntArray | None, *, batch: int, per_passage: int, seed: int, epoch: int
) -> IntArray:
    """Plan examples_SB: every example once, in random order, the last batch filled up from the beginning.

    Questions of one passage are adjacent, at most `per_passage` of them (only the end of a batch can separate them).
    With articles, passages of one article are adjacent too, half a batch or one group at most, so that each batch mixes
    several.
    """
    rng = np.random.default_rng([seed, epoch, _PLAN])
    order_E = rng.permutation(len(passage_E))
    if per_passage > 1 or article_E is not None:
        order_E = order_E[np.argsort(passage_E[order_E], kind="stable")]
        group_E = _runs(passage_E[order_E], np.arange(len(order_E)), per_passage)
        shuffled_E = _shuffle_groups(group_E, rng)
        order_E, group_E = order_E[shuffled_E], group_E[shuffled_E]
        if article_E is not None:
            by_article_E = np.argsort(article_E[order_E], kind="stable")
            order_E, group_E = order_E[by_article_E], group_E[by_article_E]
            order_E = order_E[_shuffle_groups(_runs(article_E[order_E], group_E, batch // 2), rng)]
    return np.resize(order_E, (-(-len(order_E) // batch), batch))


def _runs(key_E: IntArray, group_E: IntArray, longest: int) -> IntArray:
    """Number the runs of equal keys, cutting each before the group with which it would exceed `longest`."""
    starts_G = np.flatnonzero(np.diff(group_E, prepend=-1))
    sizes_G = np.diff(starts_G, append=len(group_E))
    run_G, run_size, run_key = [], 0, None
    number = -1
    for key, size in zip(key_E[starts_G].tolist(), sizes_G.tolist()):
        if key != run_key or run_size + size > longest:
            number, run_size, run_key = number + 1, 0, key
        run_size += size
        run_G.append(number)
    return np.repeat(np.array(run_G, np.int64), sizes_G)


def _shuffle_groups(group_E: IntArray, rng: np.random.Generator) -> IntArray:
    """Shuffle the groups; the members of each stay together and in order."""
    if not len(group_E):
        return group_E
    place_G = rng.permutation(int(group_E.max()) + 1)
    return np.argsort(place_G[group_E], kind="stable")


def join_batch(examples: Sequence[Example]) -> JoinedBatch:
    """Join a batch with each passage once, so that no positive of a question is also its negative."""
    row_of: dict[str, int] = {}
    passages: list[Passage] = []
    for passage in [e.passage for e in examples] + [n for e in examples for n in e.negatives]:
        if passage.id not in row_of:
            row_of[passage.id] = len(passages)
            passages.append(passage)
    known_QP = np.zeros((len(examples), len(passages)), bool)
    teacher_QP = np.full(known_QP.shape, np.nan, np.float32)
    for question, example in enumerate(examples):
        known_ids = {*example.known_ids} - {example.passage.id}
        known_QP[question, [row_of[known_id] for known_id in known_ids if known_id in row_of]] = True
        for passage, score in zip((example.passage, *example.negatives), example.teacher):
            teacher_QP[question, row_of[passage.id]] = score
    return JoinedBatch(
        texts=[example.text for example in examples],
        passages=passages,
        positive_Q=np.array([row_of[example.passage.id] for example in examples], np.int64),
        known_QP=known_QP,
        answer_start_Q=np.array([example.answer_start for example in examples], np.int64),
        teacher_QP=teacher_QP,
        answers=[example.answers for example in examples],
    )


def negatives_for(at: int, examples: Sequence[Example], limit: int, matcher: AnswerMatcher) -> list[Passage]:
    """Choose passages that do not answer example `at`: its hard negatives, else those of the next examples, without
    other positives and passages that hold one of its answers."""
    own = examples[at]
    if own.negatives:
        return list(own.negatives[:limit])
    positive_ids = {own.passage.id, *own.known_ids}
    negatives: dict[str, Passage] = {}
    for other in (*examples[at + 1 :], *examples[:at]):
        if len(negatives) == limit:
            break
        if other.passage.id not in positive_ids and not matcher.has_answer(other.passage.text, own.answers):
            negatives[other.passage.id] = other.passage
    return list(negatives.values())


def rank_share(num_questions: int, num_passages: int, rank: int, world: int) -> RankShare:
    """Divide a batch into equal slices: questions divide evenly, passages are padded with row 0 at the end."""
    assert num_questions % world == 0, f"{num_questions} questions do not divide by {world} ranks"
    mine = num_questions // world
    each = -(-num_passages // world)
    rows = range(rank * each, (rank + 1) * each)
    return RankShare(
        questions=range(rank * mine, (rank + 1) * mine),
        passages=[row if row < num_passages else 0 for row in rows],
        real_P=np.array([row < num_passages for row in rows], bool),
    )
