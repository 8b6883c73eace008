"""Read training examples: stored questions with their passages, or inverse cloze questions of the corpus.

Examples are numbered; passages are read from the mapped corpus when a batch needs them, never all at once. What an
example holds is drawn from (seed, epoch, number) alone.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import numpy as np

from mvr_ray.config import TrainConfig
from mvr_ray.core.encoding.snippets import Splitter
from mvr_ray.core.learning.batches import Example
from mvr_ray.core.learning.cloze import cloze_example
from mvr_ray.errors import ConfigError, DataError
from mvr_ray.store.corpus import Corpus, question_digest
from mvr_ray.store.questions import read_questions
from mvr_ray.store.sampling import hash_rank
from mvr_ray.types import IntArray, Passage, Question

log = logging.getLogger(__name__)

_NEGATIVES, _CLOZE = 3, 4
DEV_PASSAGES = 512
"""Dev accuracy is measured among the passages of at most so many dev questions' positives."""
DEV_READINGS = 512
"""A reader is measured on at most so many dev questions."""


class Examples(Protocol):
    """Numbered examples with the passage and the article that each belongs to."""

    passage_E: IntArray
    article_E: IntArray | None

    def __len__(self) -> int: ...
    def get(self, numbers: Sequence[int], epoch: int) -> list[Example]: ...


_E = TypeVar("_E", bound=Examples)


class QuestionExamples:
    """Questions whose first positive is in the corpus; hard negatives come from the questions or a mined set."""

    def __init__(
        self, corpus: Corpus, questions: Sequence[Question], negatives: Sequence[Question], cfg: TrainConfig
    ) -> None:
        self._corpus = corpus
        self._cfg = cfg
        negatives_of = {question.id: question for question in negatives}
        row_of: dict[str, int] = {}
        articles: dict[str, int] = {}
        passages, titles = [], []
        self._kept: list[Question] = []
        found = _with_passages(corpus, questions)
        for question, passage in _few_a_passage(found, cfg.max_passage_questions):
            self._kept.append(_with_negatives(question, negatives_of.get(question.id)))
            passages.append(row_of.setdefault(passage.id, len(row_of)))
            titles.append(articles.setdefault(passage.title, len(articles)))
        lost = len(questions) - len(found)
        if not self._kept:
            raise DataError(
                f"none of the {len(questions)} questions of {cfg.questions!r} has a positive passage in corpus "
                f"{corpus.name!r}; prepare them from sources with passages"
            )
        if lost:
            log.warning("questions without a positive in the corpus are left out: %d of %d", lost, len(questions))
        if cfg.distil_weight and not any(len(question.teacher_scores) > 1 for question in self._kept):
            raise ConfigError(
                f"train.distil_weight is {cfg.distil_weight:g}, but no question of "
                f"{cfg.hard_negatives or cfg.questions!r} has a teacher's scores; mine with a cross-encoder first "
                f"(mvr-ray mine CONFIG mine.cross_encoder=NAME) and name its output in train.hard_negatives"
            )
        self.passage_E: IntArray = np.array(passages, np.int64)
        self.article_E: IntArray | None = np.array(titles, np.int64) if cfg.siblings else None

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, numbers: Sequence[int], epoch: int) -> list[Example]:
        chosen = [self._kept[number] for number in numbers]
        found = self._corpus.get(question.positive_ids[0] for question in chosen)
        made = []
        for number, question in zip(numbers, chosen):
            placed = (
                (start, start + len(a)) for a, start in zip(question.answers, question.answer_starts) if start >= 0
            )
            start, stop = next(placed, (-1, -1))
            negatives = self._negatives(question, int(number), epoch)
            positive, *known = question.positive_ids
            scored = dict(zip((positive, *question.hard_negative_ids), question.teacher_scores))
            teacher = tuple(scored[i] for i in (positive, *(one.id for one in negatives))) if scored else ()
            example = Example(question.text, found[positive], start, negatives, tuple(known), stop, teacher)
            made.append(example._replace(answers=question.answers))
        return made

    def _negatives(self, question: Question, number: int, epoch: int) -> tuple[Passage, ...]:
        wanted = self._cfg.num_hard_negatives
        ids = [i for i in question.hard_negative_ids if i not in question.positive_ids]
        if not wanted or not ids:
            return ()
        order = np.random.default_rng([self._cfg.seed, epoch, number, _NEGATIVES]).permutation(len(ids))
        found: list[Passage] = []
        for at in order:
            found += self._corpus.get([ids[at]]).values()
            if len(found) == wanted:
                break
        return tuple(found)


def _with_negatives(question: Question, negatives: Question | None) -> Question:
    """The question with the mined one's negatives, and with its teacher's scores where both have the same positive."""
    if negatives is None:
        return question
    taught = negatives.teacher_scores if negatives.positive_ids[:1] == question.positive_ids[:1] else ()
    return question._replace(hard_negative_ids=negatives.hard_negative_ids, teacher_scores=taught)


class ClozeExamples:
    """Every passage asks with one of its sentences, another one each epoch."""

    def __init__(self, corpus: Corpus, splitter: Splitter, cfg: TrainConfig) -> None:
        self._corpus = corpus
        self._splitter = splitter
        self._cfg = cfg
        sizes = [part.num_passages for part in corpus.info.parts]
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self.passage_E: IntArray = np.arange(int(self._starts[-1]), dtype=np.int64)
        self.article_E: IntArray | None = None
        if cfg.siblings:
            articles: dict[str, int] = {}
            titles = (articles.setdefault(passage.title, len(articles)) for passage in corpus)
            self.article_E = np.fromiter(titles, np.int64, len(self.passage_E))

    def __len__(self) -> int:
        return len(self.passage_E)

    def get(self, numbers: Sequence[int], epoch: int) -> list[Example]:
        made = []
        for number in numbers:
            shard = int(np.searchsorted(self._starts, number, side="right")) - 1
            row = int(number) - int(self._starts[shard])
            passage = self._corpus.part(shard).passages(row, row + 1)[0]
            rng = np.random.default_rng([self._cfg.seed, epoch, int(number), _CLOZE])
            made.append(cloze_example(passage, self._splitter, self._cfg.cloze_keep_share, rng))
        return made


def open_examples(corpus: Corpus, splitter: Splitter, cfg: TrainConfig) -> Examples:
    """Raises MissingInputError, DataError, or ConfigError when there are fewer examples than a batch takes."""
    if cfg.questions is None:
        examples: Examples = ClozeExamples(corpus, splitter, cfg)
        what = f"passages of corpus {corpus.name!r}"
    else:
        examples = QuestionExamples(corpus, read_questions(corpus, cfg.questions), _read_mined(corpus, cfg), cfg)
        what = f"usable questions of {cfg.questions!r}"
    return _enough(examples, cfg, what)


def open_question_examples(corpus: Corpus, cfg: TrainConfig) -> QuestionExamples:
    """Stored questions with a positive passage: what a cross-encoder learns from. Raises as `open_examples`."""
    if cfg.questions is None:
        raise ConfigError(f"train.task is {cfg.task}, which learns from questions; name a set in train.questions")
    examples = QuestionExamples(corpus, read_questions(corpus, cfg.questions), _read_mined(corpus, cfg), cfg)
    return _enough(examples, cfg, f"usable questions of {cfg.questions!r}")


def _enough(examples: _E, cfg: TrainConfig, what: str) -> _E:
    if len(examples) < cfg.batch_questions:
        raise ConfigError(
            f"train.batch_questions is {cfg.batch_questions}, but there are only {len(examples)} {what}; lower it"
        )
    return examples


def _read_mined(corpus: Corpus, cfg: TrainConfig) -> list[Question]:
    return read_questions(corpus, cfg.hard_negatives) if cfg.hard_negatives else []


def open_answer_examples(corpus: Corpus, cfg: TrainConfig) -> QuestionExamples:
    """Questions of which an answer stands at a known place in their first positive: what a reader learns from.

    Raises ConfigError, MissingInputError, or DataError where no question has one.
    """
    if cfg.questions is None:
        raise ConfigError("train.task is reader, which learns from answers; name a stored set in train.questions")
    asked = read_questions(corpus, cfg.questions)
    placed = [kept for question, passage in _with_passages(corpus, asked) if (kept := _place(question, passage))]
    if not placed:
        raise DataError(
            f"none of the {len(asked)} questions of {cfg.questions!r} has an answer at a known place in a passage of "
            f"corpus {corpus.name!r}; a reader learns from answer offsets, as SQuAD's files have them"
        )
    if lost := len(asked) - len(placed):
        log.warning("questions without a placed answer in the corpus are left out: %d of %d", lost, len(asked))
    examples = QuestionExamples(corpus, placed, _read_mined(corpus, cfg), cfg)
    return _enough(examples, cfg, f"questions of {cfg.questions!r} with an answer at a known place")


def input_digests(corpus: Corpus, cfg: TrainConfig) -> list[str]:
    """Digests of the question sets that training reads. Raises MissingInputError where one is not there."""
    names = (cfg.questions, cfg.hard_negatives, cfg.dev_questions)
    return [question_digest(corpus, name) if name else "" for name in names]


class DevReading(NamedTuple):
    """A dev question, the text of its gold passage, and its answers."""

    question: str
    text: str
    answers: tuple[str, ...]


def open_answer_dev(corpus: Corpus, cfg: TrainConfig) -> list[DevReading]:
    """At most `DEV_READINGS` dev questions with answers, drawn by a stable hash; none when no set is configured."""
    if cfg.dev_questions is None:
        return []
    found = _with_passages(corpus, read_questions(corpus, cfg.dev_questions))
    found = sorted(
        (pair for pair in found if pair[0].answers), key=lambda pair: (hash_rank(pair[0].id, "dev"), pair[0].id)
    )
    if not found:
        raise DataError(
            f"no question of train.dev_questions {cfg.dev_questions!r} has an answer and a positive passage in corpus "
            f"{corpus.name!r}"
        )
    return [DevReading(question.text, passage.text, question.answers) for question, passage in found[:DEV_READINGS]]


class DevSet(NamedTuple):
    """Dev questions and the passages among which each must find its own."""

    texts: list[str]
    passages: list[Passage]
    positive_Q: IntArray


def open_dev(corpus: Corpus, cfg: TrainConfig) -> DevSet | None:
    """Questions in stored order until their positives are `DEV_PASSAGES` passages; None when none are configured."""
    if cfg.dev_questions is None:
        return None
    row_of: dict[str, int] = {}
    texts: list[str] = []
    passages: list[Passage] = []
    positives: list[int] = []
    for question, passage in _with_passages(corpus, read_questions(corpus, cfg.dev_questions)):
        if passage.id not in row_of:
            if len(passages) == DEV_PASSAGES:
                continue
            row_of[passage.id] = len(passages)
            passages.append(passage)
        texts.append(question.text)
        positives.append(row_of[passage.id])
    if not texts:
        raise DataError(
            f"no question of train.dev_questions {cfg.dev_questions!r} has a positive passage in the corpus"
        )
    return DevSet(texts, passages, np.array(positives, np.int64))


def _few_a_passage(pairs: list[tuple[Question, Passage]], most: int) -> list[tuple[Question, Passage]]:
    """At most so many questions of a passage, the same ones in any order of the set; all where `most` is 0."""
    if not most:
        return pairs
    lots: dict[str, list[tuple[int, str]]] = {}
    for question, passage in pairs:
        lots.setdefault(passage.id, []).append((hash_rank(question.id, "train"), question.id))
    drawn = {question for own in lots.values() for _, question in sorted(own)[:most]}
    return [(question, passage) for question, passage in pairs if question.id in drawn]


def _place(question: Question, passage: Passage) -> Question | None:
    """The question with those of its answers that stand at their offsets in the passage; None where none does."""
    pairs = zip(question.answers, question.answer_starts)
    there = [(a, start) for a, start in pairs if a.strip() and start >= 0 and passage.text.startswith(a, start)]
    if not there:
        return None
    answers, starts = zip(*there)
    return question._replace(answers=answers, answer_starts=starts)


def _with_passages(corpus: Corpus, questions: Sequence[Question]) -> list[tuple[Question, Passage]]:
    """Questions with their first positive that the corpus holds, put first; others are left out.

    Answer offsets are those of the first positive: where that one is missing they are dropped.
    """
    kept: list[tuple[Question, Passage]] = []
    seen: dict[str, Passage] = {}
    for question in questions:
        for positive in question.positive_ids:
            if positive not in seen:
                seen |= corpus.get([positive])
            if positive in seen:
                starts = question.answer_starts if positive == question.positive_ids[0] else ()
                ids = (positive, *(other for other in question.positive_ids if other != positive))
                kept.append((question._replace(positive_ids=ids, answer_starts=starts), seen[positive]))
                break
    return kept
