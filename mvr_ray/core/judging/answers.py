"""Decide whether a passage holds an answer, by exactly the rules of DPR, CuratedTREC, KILT and SQuAD.

`string` mode: text and answer are put into Unicode NFD, cut into tokens (a run of letters, numbers or marks, else one
character that is neither separator nor control), each token lower-cased; a hit is an answer whose tokens stand in a
row in the passage. The title is not searched. Consequences of the rules, which mvr_ray keeps:

- an answer without tokens (empty, blanks, zero-width) matches every passage; `refuse_empty_answers` refuses it
- `1000` is not in `1,000`, `Beyonce` not in `Beyoncé`, `fi` not in `ﬁ`; `U.S` is in `the U.S. army`
- `don't` is three tokens; case is folded a token at a time by `str.lower`, so a final sigma ends its token
- a run of letters is one token, so an answer in a script without spaces, or a Korean one before a particle, is found
  only where it stands alone: 北京 is not in `北京大学` (`warn_of_runs`)

`regex` mode (CuratedTREC): the answer is a pattern searched in the NFD text; one that does not compile never matches.
`kilt` mode: both are normalised as for exact match, then the answer is searched as a substring.

A reader's answer is scored by SQuAD's rules: exact match and F1, each the best over all answers.
"""

import logging
import re
import string
import unicodedata
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from functools import lru_cache, partial
from typing import Literal

import numpy as np
import regex

from mvr_ray.core.scripts import KOREAN, SPACELESS
from mvr_ray.errors import DataError
from mvr_ray.types import IntArray, Question

log = logging.getLogger(__name__)
Match = Literal["string", "regex", "kilt"]

_FLAGS = regex.IGNORECASE | regex.UNICODE | regex.MULTILINE
_TOKEN = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]", _FLAGS)
_WITHIN_RUNS = regex.compile(rf"[[{SPACELESS}{KOREAN}]&&\p{{L}}]", regex.VERSION1)
_MIN_SHARE = 0.1
"""Share of questions with answers in such scripts from which on `warn_of_runs` warns."""
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_MAX_QUESTIONS_CACHED = 4096


def tokenize(text: str) -> list[str]:
    """Return the lower-cased tokens of the text's NFD form."""
    return [token.lower() for token in _TOKEN.findall(unicodedata.normalize("NFD", text))]


def has_answer(text: str, answers: Sequence[str], match: Match = "string") -> bool:
    """Return whether `text` holds one of `answers`. For many passages or questions use `AnswerMatcher`."""
    haystack = _haystack(text, match)
    return any(_contains(haystack, needle) for needle in _needles(answers, match))


def normalize_answer(text: str) -> str:
    """Normalise as exact match does: lower case, no ASCII punctuation, no article, single blanks (in this order)."""
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match_score(prediction: str, answers: Sequence[str]) -> bool:
    """Return whether a reader's prediction equals one of the answers after `normalize_answer`. See `f1_score`."""
    return normalize_answer(prediction) in _targets(answers)


def f1_score(prediction: str, answers: Sequence[str]) -> float:
    """Compute SQuAD's F1: the overlap of multisets of normalised words, with the answer that overlaps best.

    As in SQuAD 2, an answer that normalises to nothing (the grade "A") counts only where no other is left, and F1 is
    then 1 for a prediction that normalises to nothing, too (SQuAD 1.1's script says 0).
    """
    words = Counter(normalize_answer(prediction).split())
    return max((_overlap(words, Counter(answer.split())) for answer in _targets(answers)), default=0.0)


def empty_answers(answers: Sequence[str], match: Match = "string") -> list[str]:
    """Return the answers that match a text of nothing, and so every passage: by the string rule those without a token,
    by that of KILT those that normalise to nothing, such as `The`, and patterns that need no character."""
    return [answer for answer in answers if has_answer("", [answer], match)]


def refuse_empty_answers(questions: Iterable[Question], match: Match = "string") -> None:
    """Raise DataError for the first question with one of `empty_answers`."""
    for question in questions:
        if empty := empty_answers(question.answers, match):
            raise DataError(
                f"question {question.id!r}: answer {empty[0]!r} of {question.text!r:.80} holds nothing to find and "
                f"would match every passage; remove it, or set retrieve.strict_answers=false to count it as the "
                f"field's scripts do"
            )


def warn_of_runs(name: str, answers_Q: Iterable[Sequence[str]], match: Match) -> None:
    """Warn of a question set many of whose answers the string rule cannot find within runs of letters."""
    all_answers = [answers for answers in answers_Q if answers]
    runs = [one for answers in all_answers if (one := next(filter(_WITHIN_RUNS.search, answers), None))]
    if match == "string" and runs and len(runs) >= _MIN_SHARE * len(all_answers):
        log.warning(
            "%d of %d questions of set %s have answers in scripts without spaces or in Korean, such as %s; "
            "evaluate.match: string finds them only between spaces or punctuation; set evaluate.match: regex to find "
            "them anywhere",
            len(runs),
            len(all_answers),
            name,
            runs[0],
        )


class AnswerMatcher:
    """`has_answer` for many questions over the same passages: tokenises each passage once.

    Caches prepared passages up to `max_cached_bytes` and the answers of `max_questions` questions, the least recently
    used first out. Not thread-safe.
    """

    def __init__(
        self,
        match: Match = "string",
        *,
        max_cached_bytes: int = 256 << 20,
        max_questions: int = _MAX_QUESTIONS_CACHED,
    ) -> None:
        self.match: Match = match
        self.max_cached_bytes = max_cached_bytes
        self.cached_bytes = 0
        self._haystacks: OrderedDict[str, str] = OrderedDict()
        self._needles = lru_cache(max_questions)(partial(_needles, match=match))

    def has_answer(self, text: str, answers: Sequence[str]) -> bool:
        needles = self._needles_of(answers)
        if not needles:
            return False
        haystack = self._haystack_of(text)
        return any(_contains(haystack, needle) for needle in needles)

    def index(self, answers: Sequence[Sequence[str]]) -> "AnswerIndex":
        """Prepare the answers of many questions for matching passage by passage."""
        return AnswerIndex(self.match, [self._needles_of(one) for one in answers])

    def _needles_of(self, answers: Sequence[str]) -> "list[Needle]":
        assert not isinstance(answers, str), "answers is a sequence of strings, not one string"
        return self._needles(tuple(answers))

    def _haystack_of(self, text: str) -> str:
        haystack = self._haystacks.get(text)
        if haystack is not None:
            self._haystacks.move_to_end(text)
            return haystack
        haystack = _haystack(text, self.match)
        self._haystacks[text] = haystack
        self.cached_bytes += _bytes(text, haystack)
        while self.cached_bytes > self.max_cached_bytes and self._haystacks:
            self.cached_bytes -= _bytes(*self._haystacks.popitem(last=False))
        return haystack


class AnswerIndex:
    """Finds which of many questions have an answer in a passage. Created by `AnswerMatcher.index`.

    Prepares the passage once, and searches for an answer only where the passage has the answer's longest token.

    Shapes: Q questions, A answers of all of them, P questions about one passage.
    """

    def __init__(self, match: Match, needles_Q: "Sequence[Sequence[Needle]]") -> None:
        self.match: Match = match
        self._needles_A = [needle for needles in needles_Q for needle in needles]
        self._start_Q = np.concatenate([[0], np.cumsum([len(needles) for needles in needles_Q], dtype=np.int64)])
        self._number: dict[str, int] = {}
        tokens = (self._token(needle) for needle in self._needles_A)
        self._token_A = np.fromiter(tokens, np.int64, len(self._needles_A))

    def marks(self, text: str, question_P: IntArray) -> np.ndarray:
        """Return whether `text` holds an answer of each question, bool [P]."""
        haystack = _haystack(text, self.match)
        has = np.zeros(len(self._number) + 1, bool)
        has[[0, *(number for word in set(haystack.split(" ")) if (number := self._number.get(word)))]] = True
        first_P = self._start_Q[question_P]
        count_P = self._start_Q[question_P + 1] - first_P
        position = np.repeat(np.arange(len(question_P)), count_P)
        answer = np.arange(len(position)) + np.repeat(first_P - np.cumsum(count_P) + count_P, count_P)
        marks_P = np.zeros(len(question_P), bool)
        likely = np.flatnonzero(has[self._token_A[answer]])
        for at, number in zip(position[likely].tolist(), answer[likely].tolist()):
            marks_P[at] = marks_P[at] or _contains(haystack, self._needles_A[number])
        return marks_P

    def _token(self, needle: "Needle") -> int:
        """Return the number of the longest token; 0 for substrings and patterns, which need not begin at a word."""
        longest = max(needle.split(" "), key=len) if self.match == "string" and isinstance(needle, str) else ""
        return self._number.setdefault(longest, len(self._number) + 1) if longest else 0


Needle = str | regex.Pattern[str]


def _haystack(text: str, match: Match) -> str:
    """Prepare a text for search. Tokens hold no blank, so a run of tokens joined by blanks is a substring."""
    match match:
        case "string":
            return f" {' '.join(tokenize(text))} "
        case "regex":
            return unicodedata.normalize("NFD", text)
        case "kilt":
            return normalize_answer(text)


def _needles(answers: Sequence[str], match: Match) -> list[Needle]:
    assert not isinstance(answers, str), "answers is a sequence of strings, not one string"
    match match:
        case "string":
            return [f" {' '.join(tokens)} " if (tokens := tokenize(answer)) else "" for answer in answers]
        case "regex":
            patterns = (_compile(unicodedata.normalize("NFD", answer)) for answer in answers)
            return [pattern for pattern in patterns if pattern is not None]
        case "kilt":
            return [normalize_answer(answer) for answer in answers]


def _targets(answers: Sequence[str]) -> list[str]:
    """Normalise answers, without those of which nothing is left unless all are such."""
    assert not isinstance(answers, str), "answers is a sequence of strings, not one string"
    texts = [normalize_answer(answer) for answer in answers]
    return [text for text in texts if text] or texts


def _overlap(words: Counter[str], reference: Counter[str]) -> float:
    """Compute the harmonic mean of precision and recall of one multiset of words against another."""
    if not words or not reference:
        return float(words == reference)
    return 2 * (words & reference).total() / (words.total() + reference.total())


def _compile(pattern: str) -> regex.Pattern[str] | None:
    try:
        return regex.compile(pattern, _FLAGS)
    except (regex.error, ValueError, OverflowError, IndexError, KeyError, RecursionError):
        return None


def _contains(haystack: str, needle: Needle) -> bool:
    return needle in haystack if isinstance(needle, str) else needle.search(haystack) is not None


def _bytes(text: str, haystack: str) -> int:
    return text.__sizeof__() + haystack.__sizeof__() + 200
