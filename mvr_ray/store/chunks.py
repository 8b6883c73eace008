"""Cut passages into chunks, and carry questions over to the chunks that answer them.

TextChunk n of passage `id` is `id#n`: `chunk_words` words with the white space between them, verbatim. A word stands
between white space; in scripts without spaces it is two characters, with the marks and other characters after them.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import regex

from mvr_ray.core.judging.answers import Match, empty_answers, has_answer
from mvr_ray.core.scripts import SPACELESS
from mvr_ray.types import Passage, Question

_RUN = re.compile(r"\S+")
_LETTER = rf"[[{SPACELESS}]&&[\p{{L}}\p{{N}}]]"
_SPACELESS = regex.compile(_LETTER, regex.VERSION1)
_WORD = regex.compile(rf"(?:{_LETTER}\p{{M}}*){{1,2}}[^{_LETTER}]*|[^{_LETTER}]+", regex.VERSION1)

_INSIDE_WORD = regex.compile(r"[\p{L}\p{N}\p{M}]{2}")
"""Two characters of one token of the string rule (`core.judging.answers`)."""


class TextChunk(NamedTuple):
    """A piece of a passage; `start` is its first character's offset there."""

    passage: Passage
    start: int


class AnswerPlace(NamedTuple):
    """The chunks of one passage that answer a question, and the answers' offsets in the first of them."""

    title: str
    chunk_ids: tuple[str, ...]
    answer_starts: tuple[int, ...]


def word_spans(text: str) -> list[tuple[int, int]]:
    """Find the words that a chunk counts, in characters."""
    runs = [match.span() for match in _RUN.finditer(text)]
    if text.isascii() or not _SPACELESS.search(text):
        return runs
    return [match.span() for run in runs for match in _WORD.finditer(text, *run)]


def chunk(passage: Passage, chunk_words: int) -> list[TextChunk]:
    """Cut a passage into chunks, in order; 0 words: the passage itself."""
    if not chunk_words:
        return [TextChunk(passage, 0)]
    spans = word_spans(passage.text)
    chunks = []
    for number, first in enumerate(range(0, len(spans), chunk_words)):
        start, stop = spans[first][0], spans[min(first + chunk_words, len(spans)) - 1][1]
        piece = passage._replace(id=f"{passage.id}#{number}", text=passage.text[start:stop])
        chunks.append(TextChunk(piece, start))
    return chunks


def source_id(chunk_id: str) -> str:
    """Return the id of the passage that a chunk was cut from."""
    return chunk_id.rpartition("#")[0]


def locate(
    text: str, chunks: Sequence[TextChunk], answers: Sequence[str], starts: Sequence[int], match: Match = "string"
) -> AnswerPlace:
    """Carry answers at `starts` of `text` (-1: not known) over to the chunks, `match` as in `evaluate.match`. An answer
    without a start, or that is not there, is where its text first stands as whole words, or else in the first chunk
    that holds it by `match`, or else where its text first is part of a word; with `match` regex it is a pattern in the
    first chunk that has it.

    The chunks are those that hold an answer whole, in the answers' order; failing that the one in which the first
    known answer begins; failing that the first. Offsets are -1 for answers that the first of them does not hold whole.
    """
    absolute: list[int] = []
    whole: list[int] = []
    for answer, start in zip(answers, starts or [-1] * len(answers)):
        holders: list[int] = []
        if start < 0 or not text.startswith(answer, start):
            start = _first_offset(text, answer)
            if (match == "regex" or start < 0) and not empty_answers([answer], match):
                by_rule = (at for at, piece in enumerate(chunks) if has_answer(piece.passage.text, [answer], match))
                holders = list(itertools.islice(by_rule, 1))
            if start < 0 and not holders and answer.strip():
                start = text.find(answer)
        if start >= 0 and not holders and start + len(answer) <= _end(chunks[number := _chunk_at(chunks, start)]):
            holders = [number]
        absolute.append(start)
        whole += holders
    beginnings = [_chunk_at(chunks, start) for start in absolute if start >= 0]
    numbers = list(dict.fromkeys(whole)) or beginnings[:1] or [0]
    first = chunks[numbers[0]]
    starts_in_first = tuple(
        start - first.start if first.start <= start and start + len(answer) <= _end(first) else -1
        for answer, start in zip(answers, absolute)
    )
    return AnswerPlace(first.passage.title, tuple(chunks[number].passage.id for number in numbers), starts_in_first)


def carry_over(question: Question, place_of: Mapping[str, AnswerPlace], hard_negative_ids: tuple[str, ...]) -> Question:
    """Carry a question over to chunks; `place_of` has its positive ids that stay, in their order."""
    grade_of = question.grade_of
    positives = {chunk_id: grade_of[name] for name, place in place_of.items() for chunk_id in place.chunk_ids}
    return question._replace(
        positive_ids=tuple(positives),
        hard_negative_ids=tuple(name for name in hard_negative_ids if name not in positives),
        answer_starts=next((place.answer_starts for place in place_of.values()), (-1,) * len(question.answers)),
        positive_grades=tuple(positives.values()) if question.positive_grades else (),
    )


def _first_offset(text: str, answer: str) -> int:
    """Return where the answer first stands without being part of a longer word; -1 where it does not."""
    start = text.find(answer) if answer.strip() else -1
    while start >= 0 and any(_INSIDE_WORD.match(text, at - 1) for at in (start, start + len(answer)) if at):
        start = text.find(answer, start + 1)
    return start


def _chunk_at(chunks: Sequence[TextChunk], start: int) -> int:
    return max((number for number, piece in enumerate(chunks) if piece.start <= start), default=0)


def _end(piece: TextChunk) -> int:
    return piece.start + len(piece.passage.text)
