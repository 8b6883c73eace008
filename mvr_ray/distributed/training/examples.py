"""Read training examples: stored questions with their passages, or inverse cloze questions of the corpus.

Examples are numbered; a batch reads its passages from the mapped corpus, never all at once. An example's content is
a function of (seed, epoch, number).
"""

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from mvr_ray.config import TrainConfig
from mvr_ray.config.train import check_train
from mvr_ray.core.encoding.snippets import Splitter
from mvr_ray.core.learning.batches import Example
from mvr_ray.core.learning.cloze import cloze_example
from mvr_ray.errors import ConfigError, DataError
from mvr_ray.store.corpus import Corpus, question_digest
from mvr_ray.store.questions import read_questions
from mvr_ray.store.sampling import draw, hash_rank
from mvr_ray.types import IntArray, Passage, Question

log = logging.getLogger(__name__)

_NEGATIVES, _CLOZE = 3, 4
DEV_PASSAGES = 512
"""Maximum passages among which dev accuracy is measured: positives of dev questions."""
DEV_READINGS = 512
"""Maximum dev questions for a reader."""


class Examples(Protocol):
    """Numbered examples, each with the numbers of its passage and article."""

    passage_E: IntArray
    article_E: IntArray | None
    num_answered: int
    """Examples with an answer at a known place, or, if `train.answer_views` is all, with any answer."""

    def __len__(self) -> int: ...
    def get(self, numbers: Sequence[int], epoch: int) -> list[Example]: ...


class QuestionExamples:
    """Questions whose first positive is in the corpus; hard negatives come from the questions or a mined set."""

    def __init__(
        self, corpus: Corpus, questions: Sequence[Question], negatives: Sequence[Question], cfg: TrainConfig
    ) -> None:
        self._corpus = corpus
        self._cfg = cfg
        negatives_of = {question[:2]: question for question in negatives}  # by id and text: a set is stored again
        pairs = _with_passages(corpus, questions)
        sample_ids = {own.id for own in limit_per_passage([own for own, _ in pairs], cfg.max_passage_questions)}
        own_pairs = [pair for pair in pairs if pair[0].id in sample_ids]
        self._questions = [_with_negatives(question, negatives_of.get(question[:2])) for question, _ in own_pairs]
        if not self._questions:
            raise DataError(
                f"none of the {len(questions)} questions of {cfg.questions!r} has a positive passage in corpus "
                f"{corpus.name!r}; name passages of it in positive_ids, or prepare questions whose source has passages"
            )
        if num_missing := len(questions) - len(pairs):
            log.warning("questions omitted without a positive in the corpus: %d of %d", num_missing, len(questions))
        if cfg.hard_negatives and not any(question[:2] in negatives_of for question in self._questions):
            raise ConfigError(
                f"train.hard_negatives is {cfg.hard_negatives!r}, but it has none of the {len(self._questions)} usable "
                f"questions of {cfg.questions!r}, by id and text; mine that set (mvr-ray mine CONFIG "
                f"mine.questions={cfg.questions}), or leave train.hard_negatives out"
            )
        if cfg.distil_weight and not any(len(question.teacher_scores) > 1 for question in self._questions):
            raise ConfigError(
                f"train.distil_weight is {cfg.distil_weight:g}, but no question of "
                f"{cfg.hard_negatives or cfg.questions!r} has a teacher's scores; mine with a cross-encoder first "
                f"(mvr-ray mine CONFIG mine.cross_encoder=NAME) and name its output in train.hard_negatives"
            )
        self.passage_E: IntArray = _numbers(passage.id for _, passage in own_pairs)
        self.article_E = _numbers(passage.title for _, passage in own_pairs) if cfg.siblings else None
        if cfg.answer_views == "all":
            self.num_answered = sum(any(map(str.strip, own.answers)) for own in self._questions)
        else:
            self.num_answered = sum(max(own.answer_starts, default=-1) >= 0 for own in self._questions)

    def __len__(self) -> int:
        return len(self._questions)

    def get(self, numbers: Sequence[int], epoch: int) -> list[Example]:
        questions = [self._questions[number] for number in numbers]
        passages = self._corpus.get(question.positive_ids[0] for question in questions)
        examples = []
        for number, question in zip(numbers, questions):
            answers = zip(question.answers, question.answer_starts)
            spans = ((start, start + len(answer)) for answer, start in answers if start >= 0)
            start, stop = next(spans, (-1, -1))
            negatives = self._negatives(question, int(number), epoch)
            positive, *known_ids = question.positive_ids
            score_of = dict(zip((positive, *question.hard_negative_ids), question.teacher_scores))
            teacher = tuple(score_of[i] for i in (positive, *(one.id for one in negatives))) if score_of else ()
            places = start, negatives, tuple(known_ids), stop
            examples.append(Example(question.text, passages[positive], *places, teacher, question.answers))
        return examples

    def _negatives(self, question: Question, number: int, epoch: int) -> tuple[Passage, ...]:
        count = self._cfg.num_hard_negatives
        ids = [i for i in question.hard_negative_ids if i not in question.positive_ids]
        if not count or not ids:
            return ()
        order = np.random.default_rng([self._cfg.seed, epoch, number, _NEGATIVES]).permutation(len(ids))
        negatives: list[Passage] = []
        for at in order:
            negatives += self._corpus.get([ids[at]]).values()
            if len(negatives) == count:
                break
        return tuple(negatives)


def _with_negatives(question: Question, negatives: Question | None) -> Question:
    """Copy the mined question's negatives, and its teacher scores if both have the same positive."""
    if negatives is None:
        return question
    scores = negatives.teacher_scores if negatives.positive_ids[:1] == question.positive_ids[:1] else ()
    return question._replace(hard_negative_ids=negatives.hard_negative_ids, teacher_scores=scores)


class ClozeExamples:
    """Inverse cloze examples: one sentence of each passage as its question, another one each epoch."""

    def __init__(self, corpus: Corpus, splitter: Splitter, cfg: TrainConfig) -> None:
        self._corpus = corpus
        self._splitter = splitter
        self._cfg = cfg
        self._starts = np.cumsum([0, *(part.num_passages for part in corpus.info.parts)])
        self.passage_E: IntArray = np.arange(int(self._starts[-1]), dtype=np.int64)
        self.article_E = _numbers(passage.title for passage in corpus) if cfg.siblings else None
        self.num_answered = len(self.passage_E)  # the place of the sentence

    def __len__(self) -> int:
        return len(self.passage_E)

    def get(self, numbers: Sequence[int], epoch: int) -> list[Example]:
        examples = []
        for number in numbers:
            shard = int(np.searchsorted(self._starts, number, side="right")) - 1
            row = int(number) - int(self._starts[shard])
            passage = self._corpus.part(shard).passages(row, row + 1)[0]
            rng = np.random.default_rng([self._cfg.seed, epoch, int(number), _CLOZE])
            examples.append(cloze_example(passage, self._splitter, self._cfg.cloze_keep_share, rng))
        return examples


def open_examples(corpus: Corpus, splitter: Splitter, cfg: TrainConfig) -> Examples:
    """Open training examples. Raises MissingInputError, DataError, ConfigError (fewer than a batch takes)."""
    if cfg.questions is not None:
        return open_question_examples(corpus, cfg)
    check_train(cfg)
    return _require_batch(ClozeExamples(corpus, splitter, cfg), cfg, f"passages of corpus {corpus.name!r}")


def open_question_examples(corpus: Corpus, cfg: TrainConfig) -> Examples:
    """Open stored questions with a positive passage. Raises as `open_examples`."""
    check_train(cfg)
    assert cfg.questions is not None
    questions = read_questions(corpus, cfg.questions)
    return _with_mined(corpus, questions, cfg, f"usable questions of {cfg.questions!r}")


def _require_batch(examples: Examples, cfg: TrainConfig, what: str) -> Examples:
    if len(examples) < cfg.batch_questions:
        advice = "lower it" if len(examples) > 1 else "a batch takes 2 at least: give more"
        raise ConfigError(
            f"train.batch_questions is {cfg.batch_questions}, but there are only {len(examples)} {what}; {advice}"
        )
    return examples


def _with_mined(corpus: Corpus, questions: Sequence[Question], cfg: TrainConfig, what: str) -> Examples:
    negatives = read_questions(corpus, cfg.hard_negatives) if cfg.hard_negatives else []
    return _require_batch(QuestionExamples(corpus, questions, negatives, cfg), cfg, what)


def open_answer_examples(corpus: Corpus, cfg: TrainConfig) -> Examples:
    """Open questions with an answer at a known offset in their first positive, for a reader.

    Raises ConfigError, MissingInputError, or DataError where no question has one.
    """
    check_train(cfg)
    assert cfg.questions is not None
    stored_questions = read_questions(corpus, cfg.questions)
    questions = [own for pair in _with_passages(corpus, stored_questions) if (own := _with_exact_answers(*pair))]
    if not questions:
        raise DataError(
            f"none of the {len(stored_questions)} questions of {cfg.questions!r} has an answer at a known place in a "
            f"passage of corpus {corpus.name!r}; a reader learns from answer offsets, as SQuAD's files have them"
        )
    if num_unusable := len(stored_questions) - len(questions):
        log.warning(
            "questions omitted without an answer offset in the corpus: %d of %d", num_unusable, len(stored_questions)
        )
    return _with_mined(corpus, questions, cfg, f"questions of {cfg.questions!r} with an answer at a known place")


def input_digests(corpus: Corpus, cfg: TrainConfig) -> list[str]:
    """Return the digests of the question sets of a training. Raises MissingInputError where one is missing."""
    names = (cfg.questions, cfg.hard_negatives, cfg.dev_questions)
    return [question_digest(corpus, name) if name else "" for name in names]


def open_answer_dev(corpus: Corpus, cfg: TrainConfig) -> list[tuple[Question, Passage]]:
    """Sample at most `DEV_READINGS` dev questions with answers, each with its gold passage, by a stable hash; none
    without a configured set."""
    if cfg.dev_questions is None:
        return []
    pairs = [pair for pair in _with_passages(corpus, read_questions(corpus, cfg.dev_questions)) if pair[0].answers]
    if not pairs:
        raise DataError(
            f"no question of train.dev_questions {cfg.dev_questions!r} has an answer and a positive passage in corpus "
            f"{corpus.name!r}"
        )
    return sorted(pairs, key=lambda pair: (hash_rank(pair[0].id, "dev"), pair[0].id))[:DEV_READINGS]


class DevSet(NamedTuple):
    """Dev questions, and the passages to search for them. `gold_QP`: all known passages of each question."""

    texts: list[str]
    passages: list[Passage]
    positive_Q: IntArray
    gold_QP: np.ndarray


def open_dev(corpus: Corpus, cfg: TrainConfig) -> DevSet | None:
    """Read the dev questions of at most `DEV_PASSAGES` positives, drawn by a stable hash, as the first ones would be of
    few articles; in stored order. None without a configured set."""
    if cfg.dev_questions is None:
        return None
    pairs = _with_passages(corpus, read_questions(corpus, cfg.dev_questions))
    if not pairs:
        raise DataError(
            f"no question of train.dev_questions {cfg.dev_questions!r} has a positive passage in the corpus"
        )
    positives_of = {passage.id: passage for _, passage in pairs}
    names = draw(positives_of, DEV_PASSAGES, "dev")
    passages = [passage for name, passage in positives_of.items() if name in names]
    row_of = {passage.id: row for row, passage in enumerate(passages)}
    own_questions = [question for question, passage in pairs if passage.id in row_of]
    gold_QP = np.zeros((len(own_questions), len(passages)), bool)
    for number, question in enumerate(own_questions):
        gold_QP[number, [row_of[name] for name in question.positive_ids if name in row_of]] = True
    positives = [row_of[question.positive_ids[0]] for question in own_questions]
    return DevSet([question.text for question in own_questions], passages, np.array(positives, np.int64), gold_QP)


def limit_per_passage(questions: Sequence[Question], most: int) -> list[Question]:
    """Keep at most `most` questions (0: all) of a passage, the same ones whatever the order of the set; a question's
    passage is its first positive. Questions without a positive stay."""
    if not most:
        return list(questions)
    ranks: dict[str, list[tuple[int, str]]] = {}
    for question in questions:
        for passage_id in question.positive_ids[:1]:
            ranks.setdefault(passage_id, []).append((hash_rank(question.id, "train"), question.id))
    sample_ids = {question_id for own in ranks.values() for _, question_id in sorted(own)[:most]}
    return [question for question in questions if not question.positive_ids or question.id in sample_ids]


def _numbers(names: Iterable[str]) -> IntArray:
    """Number the distinct names in order of appearance."""
    number_of: dict[str, int] = {}
    return np.array([number_of.setdefault(name, len(number_of)) for name in names], np.int64)


def _with_exact_answers(question: Question, passage: Passage) -> Question | None:
    """Keep the offsets at which the passage has the answers, -1 for others; None where it has none. All answers stay
    but blank ones, which every passage holds: a passage with one of them is no negative."""
    pairs = [(answer, start) for answer, start in zip(question.answers, question.answer_starts) if answer.strip()]
    starts = tuple(start if start >= 0 and passage.text.startswith(answer, start) else -1 for answer, start in pairs)
    if max(starts, default=-1) < 0:
        return None
    return question._replace(answers=tuple(answer for answer, _ in pairs), answer_starts=starts)


def _with_passages(corpus: Corpus, questions: Sequence[Question]) -> list[tuple[Question, Passage]]:
    """Pair questions with their first positive in the corpus, which becomes `positive_ids[0]`; omit others.

    Answer offsets and a teacher's scores refer to the first positive, so they are dropped where that one is missing.
    """
    pairs: list[tuple[Question, Passage]] = []
    passages = corpus.get({question.positive_ids[0] for question in questions if question.positive_ids})
    for question in questions:
        for positive in question.positive_ids:
            if positive not in passages:
                passages |= corpus.get([positive])
            if positive in passages:
                if positive != question.positive_ids[0]:
                    question = question._replace(answer_starts=(), teacher_scores=())
                ids = (positive, *(other for other in question.positive_ids if other != positive))
                pairs.append((question._replace(positive_ids=ids, positive_grades=()), passages[positive]))
                break
    return pairs
