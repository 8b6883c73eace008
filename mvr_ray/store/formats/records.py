"""Define the records that a source file yields, each with its place in the file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unicodedata import category
from uuid import UUID

import numpy as np

from mvr_ray.errors import count_noun
from mvr_ray.store.fields import Fields
from mvr_ray.types import Passage, Question

_INVISIBLE = frozenset(("Cc", "Cf", "Mn", "Zl", "Zp", "Zs"))
"""Unicode's categories of control and format characters, of marks that combine, and of space."""
UNDECODED = "\ufffd"
"""What decoders put for bytes that they cannot read; models drop it."""
NO_EXTRAS: Mapping[str, Any] = MappingProxyType({})
PassageId = str | int | UUID
"""What names a passage in Python. Its text is the id."""
NUMBERED_ROWS = "`id: null` there numbers the rows, as Index.build does with rows that are no file"


class PassageRecord(NamedTuple):
    """`repeats` marks sources in which one passage occurs many times, as in DPR's training files. `extras` are
    the other values of the passage, as in the source: `fields` are read from them."""

    passage: Passage
    where: str
    repeats: bool = False
    extras: Mapping[str, Any] = NO_EXTRAS


class DeletionRecord(NamedTuple):
    """A passage to delete, by its id."""

    id: str
    where: str


class FieldsRecord(NamedTuple):
    """New values of some fields of a passage; None removes one. Its title, text and other fields stay as they are."""

    id: str
    values: Mapping[str, Any]
    where: str

    def over(self, passage: Passage, names: Iterable[str]) -> Passage:
        """Return a passage with these values; `names` are those of the corpus's fields, in order."""
        fields = {**dict(passage.fields), **self.values}
        return passage._replace(fields=tuple((name, fields[name]) for name in names if fields.get(name) is not None))


class FilteredDeletion(NamedTuple):
    """The deletion of all passages that pass a filter. `where`: its place in a file of changes."""

    filter: Mapping[str, Any]
    where: str = ""


class QuestionRecord(NamedTuple):
    question: Question
    where: str


class BadRow(NamedTuple):
    """A row that cannot be used: malformed, empty, or with a reference to a missing row."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class DroppedRow(NamedTuple):
    """A sound row that the format's own convention leaves out, such as a query without judgements, or a redirect.

    `reason` is the same for all rows that are left out for it, so that they can be counted by it. `is_passage`: the row
    would have been a passage, not a question.
    """

    where: str
    reason: str
    is_passage: bool = False


Record = PassageRecord | QuestionRecord | BadRow | DroppedRow


def is_id(value: Any) -> bool:
    """Return whether a value names a passage."""
    return isinstance(value, PassageId | np.integer) and not isinstance(value, bool)


def with_prefix(record: Record, prefix: str) -> Record:
    """Put the prefix of a source before the ids of its passages."""
    match record:
        case PassageRecord(passage):
            return record._replace(passage=passage._replace(id=prefix + passage.id))
        case QuestionRecord(question):
            positives, negatives = question.positive_ids, question.hard_negative_ids
            positives, negatives = (tuple(prefix + name for name in names) for names in (positives, negatives))
            return record._replace(question=question._replace(positive_ids=positives, hard_negative_ids=negatives))
        case _:
            return record


def with_fields(record: PassageRecord, read: Callable[[Mapping[str, Any]], Fields]) -> PassageRecord | BadRow:
    """Read the fields of a passage from its extras; a bad row where `read` raises ValueError."""
    try:
        return record._replace(passage=record.passage._replace(fields=read(record.extras)))
    except ValueError as error:
        return BadRow(record.where, str(error))


def passage_record(
    id_: Any, title: Any, text: Any, where: str, repeats: bool = False, extras: Mapping[str, Any] = NO_EXTRAS
) -> PassageRecord | BadRow:
    """Make a passage from raw values, or a bad row with the reason. The text stays as it is, for its offsets."""
    try:
        name = _id(id_)
        body = _text(text, "text")
        heading = _text("" if title is None else title, "title", may_be_empty=True)
    except ValueError as error:
        return BadRow(where, str(error))
    return PassageRecord(Passage(name, heading, body), where, repeats, extras)


def deletion_record(id_: Any, where: str) -> DeletionRecord | BadRow:
    """Make the record of a passage to delete, or a bad row with the reason."""
    try:
        return DeletionRecord(_id(id_), where)
    except ValueError as error:
        return BadRow(where, str(error))


def fields_record(id_: Any, values: Mapping[str, Any], where: str) -> FieldsRecord | BadRow:
    """Make the record of new values of fields, or a bad row with the reason."""
    try:
        return FieldsRecord(_id(id_), values, where)
    except ValueError as error:
        return BadRow(where, str(error))


def question_record(
    id_: Any,
    text: Any,
    where: str,
    answers: Any = (),
    positive_ids: Any = (),
    hard_negative_ids: Any = (),
    answer_starts: Any = (),
    positive_grades: tuple[int, ...] = (),
) -> QuestionRecord | BadRow:
    """Make a question from raw values, or a bad row with the reason."""
    try:
        starts = tuple(_list(answer_starts, "answer_starts"))
        texts = tuple(_text(answer, "answer", may_be_empty=True) for answer in _list(answers, "answers"))
        if any(isinstance(start, bool) or not isinstance(start, int) for start in starts):
            raise ValueError(f"answer_starts holds something other than whole numbers: {starts!r}")
        if starts and len(starts) != len(texts):
            raise ValueError(f"{count_noun(len(texts), 'answer')} and {count_noun(len(starts), 'answer start')}")
        question = Question(
            id=_id(id_),
            text=_text(text, "question").strip(),
            answers=texts,
            positive_ids=_ids(positive_ids, "positive_ids"),
            hard_negative_ids=_ids(hard_negative_ids, "hard_negative_ids"),
            answer_starts=starts,
            positive_grades=() if set(positive_grades) == {1} else positive_grades,
        )
    except ValueError as error:
        return BadRow(where, str(error))
    return QuestionRecord(question, where)


def answers_of(row: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the answers of a row, and their starts if they are an object with both, as in the data sets of SQuAD on
    the Hugging Face hub."""
    answers = row.get("answers") if row.get("answers") is not None else row.get("answer")
    if isinstance(answers, Mapping) and "text" in answers:
        return answers["text"], answers.get("answer_start")
    return answers, None


def plain_apostrophes(text: Any) -> Any:
    """Replace typographic apostrophes by plain ones, as DPR does in questions."""
    return text.replace("\u2019", "'") if isinstance(text, str) else text


def slug(text: str) -> str:
    """Replace white space in a name, which ids of TREC files must not have."""
    return "_".join(text.split())


def question_id(path: Path, number: int) -> str:
    """Make the id of a question without one: the file's name up to the first dot, and the row from 0."""
    return f"{slug(path.name.partition('.')[0])}-{number}"


def _id(value: Any) -> str:
    if value is None or value == "":
        raise ValueError("id is missing")
    if not is_id(value):
        is_column = isinstance(value, float) and value % 1 == 0
        hint = "; a missing id elsewhere in a column makes pandas read whole numbers as such" if is_column else ""
        raise ValueError(f"id is {value!r:.60}, not a text or a whole number{hint}")
    return _unicode(str(value), "id")


def _text(value: Any, name: str, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} is missing" if value is None else f"{name} is {value!r:.60}, not a text")
    if not may_be_empty and not value.strip():
        raise ValueError(f"{name} is empty")
    if not may_be_empty and all(category(letter) in _INVISIBLE or letter == UNDECODED for letter in value):
        raise ValueError(f"{name} has no visible character: {value!r:.60}")
    return _unicode(value, name)


def _unicode(value: str, name: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name} is not valid UTF-8: {value!r:.60}") from None
    return value


def _list(value: Any, name: str) -> Sequence[Any]:
    """Check a list. A lone text or number is a list of one, an empty text or None one of none."""
    if value is None:
        return ()
    if isinstance(value, str | int):
        return () if value == "" else (value,)
    if not isinstance(value, list | tuple):
        raise ValueError(f"{name} is {value!r:.60}, not a list")
    return value


def _ids(values: Any, name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_id(value) for value in _list(values, name)))
