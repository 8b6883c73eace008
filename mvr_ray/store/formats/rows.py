"""Read rows of passages and questions: JSON lines, Parquet, CSV, data sets; also NQ-open lines and summaries.

A row with a `question` is a question: question, id, answers (or answer), positive_ids, hard_negative_ids,
answer_starts. One with the texts of its passages, too, is a training row (`training_rows`). Any other row is a passage:
id (or _id), title, text (or contents); its other values are its extras.
`names` gives other names of these (`SourceConfig.fields`): the part of a passage or question by the field's name.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mvr_ray.errors import DataError, MissingInputError
from mvr_ray.store.fields import TextCell, to_json
from mvr_ray.store.formats.json_stream import JsonReader
from mvr_ray.store.formats.records import (
    NUMBERED_ROWS,
    BadRow,
    FieldsRecord,
    Record,
    answers_of,
    fields_record,
    passage_record,
    plain_apostrophes,
    question_id,
    question_record,
    slug,
)
from mvr_ray.store.formats.text_files import csv_header, csv_rows, json_lines, open_text
from mvr_ray.store.formats.training_rows import is_training_row, training_records
from mvr_ray.store.local_files import finished_file
from mvr_ray.types import Passage, Progress, no_progress

PARQUET_ROWS = 1024
REPORT_EVERY = 5000
_OF_OTHERS = ("question", "delete")
"""Keys of questions and of deletions, which a passage may have without a meaning."""
_OWN_KEYS = {"id", "_id", "title", "text", "contents", *_OF_OTHERS}
_PRINTED_LIST = re.compile(r"""\s*[\[({]\s*['"].*['"].*[\])}]\s*""", re.DOTALL)
Names = Mapping[str, str | None]
NO_NAMES: Names = {}


def read_jsonl(path: Path, names: Names = NO_NAMES) -> Iterator[Record]:
    for number, row in enumerate(json_lines(path)):
        yield from [row] if isinstance(row, BadRow) else _records(row.values, number, path, row.where, names)


def read_parquet(path: Path, names: Names = NO_NAMES) -> Iterator[Record]:
    """Read Parquet rows; messages name a row by its number from 0."""
    if not path.is_file():
        raise MissingInputError(f"{path} does not exist or is not a file; check the path in prepare.sources")
    try:
        yield from read_rows(parquet_rows(path), str(path), names)
    except (pa.ArrowException, OSError) as error:  # OSError: a page that cannot be uncompressed
        raise DataError(f"{path} is not a whole Parquet file: {error}") from error


def parquet_rows(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of a Parquet file; None for a row whose text is not UTF-8."""
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(PARQUET_ROWS):
            yield from batch_rows(batch)


def batch_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of a batch; None for one whose text is not UTF-8."""
    try:
        yield from batch.to_pylist()
    except (ValueError, OverflowError):
        yield from (_batch_row(batch, at) for at in range(len(batch)))


def _batch_row(batch: pa.RecordBatch, at: int) -> dict[str, Any] | None:
    try:
        return {name: _python_value(column[at]) for name, column in zip(batch.schema.names, batch.columns)}
    except UnicodeDecodeError:
        return None


def _python_value(scalar: pa.Scalar) -> Any:
    """Convert a value to Python; a date or time beyond Python's range, or in a zone that it does not know, becomes
    bytes that say so, which no field accepts."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        raise
    except (ValueError, OverflowError):
        return f"unreadable {scalar.type}".encode()


def read_csv(path: Path, names: Names = NO_NAMES, delimiter: str = ",") -> Iterator[Record]:
    """Read passages under a header with id, text and title, which may be missing; other columns are extras. `question`
    beside `text` is left out, since no field has that name, unless `names` reads questions. A header with `question`
    and without `text` is that of questions, and one with the names of a training row that of training rows."""
    header = csv_header(path, delimiter)
    if not names and is_training_row(dict.fromkeys(header).keys()):
        for number, row in enumerate(csv_rows(path, (), delimiter)):
            yield from [row] if isinstance(row, BadRow) else training_records(row.values, number, path, row.where)
        return
    has_only_questions = "question" in {*header, *names} and "text" not in {*header, *names}
    is_question = has_only_questions or "question" in {*names, *names.values()}
    has_passages = not has_only_questions and "question" not in names
    required_names = [name for name in ("id", "text") if name not in names] if has_passages else []
    for number, row in enumerate(csv_rows(path, [*required_names, *filter(None, names.values())], delimiter)):
        if isinstance(row, BadRow):
            yield row
        else:
            own = {*_OWN_KEYS, *names.values()}
            values = {name: cell if name in own else TextCell(cell) for name, cell in row.values.items()}
            if not is_question:
                values.pop("question", None)
            yield _record(values, number, path, row.where, names)


def read_rows(rows: Iterable[Mapping[str, Any] | None], source: str, names: Names) -> Iterator[Record]:
    """Read rows that a library yields; None is a row whose text is not UTF-8. Messages name a row by its number from
    0."""
    path = Path(source)
    for number, row in enumerate(rows):
        where = f"{source}:row {number}"
        if row is None:
            yield BadRow(where, "text is not UTF-8")
        else:
            yield from _records(dict(row), number, path, where, names)


def read_nq_open(path: Path) -> Iterator[Record]:
    """Read `{"question": ..., "answer": [...]}` lines; there are no passages."""
    for number, row in enumerate(json_lines(path)):
        if isinstance(row, BadRow):
            yield row
        else:
            text = plain_apostrophes(row.values.get("question"))
            yield question_record(question_id(path, number), text, row.where, row.values.get("answer"))


def read_summaries(path: Path) -> Iterator[Record]:
    """Read a JSON object of {title, extract, description}: the extract is a passage, the description its question.

    The passage's id is its key with white space as `_`, the question's is `about:` and that. Several summaries may
    share a description ("American actor"): each keeps its own question, whose one positive is its own passage.
    """
    with open_text(path) as file:
        reader = JsonReader(file, str(path))
        for key in reader.members():
            where = f"{path}:{reader.line} ({key})"
            summary = reader.value()
            if not isinstance(summary, dict):
                yield BadRow(where, "a summary is not an object; write passages one object a line, as .jsonl")
                continue
            name = slug(key)
            yield passage_record(name, summary.get("title") or key, summary.get("extract"), where)
            description = summary.get("description")
            if isinstance(description, str) and description.strip():
                yield question_record(f"about:{name}", description, where, positive_ids=[name])
        reader.finish()


def _records(row: dict[str, Any], number: int, path: Path, where: str, names: Names) -> Iterator[Record]:
    """Yield the record of a row, or those of a training row if the source names no fields."""
    if not names and is_training_row(row.keys()):
        yield from training_records(row, number, path, where)
    else:
        yield _record(row, number, path, where, names)


def _record(row: dict[str, Any], number: int, path: Path, where: str, names: Names) -> Record:
    if names:
        own_id = {"id": question_id(path, number)} if names.get("id", "") is None else {}
        record = _record({**rename(row, names), **own_id}, number, path, where, NO_NAMES)
        if isinstance(record, BadRow):
            mapping = ", ".join(f"{part} from {name!r}" for part, name in names.items() if name)
            return BadRow(where, f"{record.reason} (fields: {mapping})" if mapping else record.reason)
        return record
    if row.get("question") is not None:
        return question_of(row, where, question_id(path, number))
    if not {"id", "_id"} & row.keys():
        return BadRow(where, f"id is missing; name its column in the source's fields: {{id: NAME}}; {NUMBERED_ROWS}")
    return passage_of(row, where)


def rename(row: dict[str, Any], names: Names) -> dict[str, Any]:
    """Rename the parts of a passage or question to their own names; parts named None are left out."""
    source_names = {part for name in names.values() if name for part in (name, name.partition(".")[0])}
    result = {key: value for key, value in row.items() if key not in source_names}
    return result | {part: lookup(row, name) for part, name in names.items() if name}


def lookup(row: Any, name: str) -> Any:
    """Return the value of a field; a name with dots reaches into objects."""
    if name in row:
        return row[name]
    first, dot, rest = name.partition(".")
    return lookup(row[first], rest) if dot and isinstance(row.get(first), dict) else None


def question_of(row: Mapping[str, Any], where: str, own_id: str) -> Record:
    """Read a row as a question, or return a bad row. `own_id` is the id of a row that has none."""
    answers, own_starts = answers_of(row)
    if isinstance(answers, str) and _PRINTED_LIST.fullmatch(answers):
        cure = "a text is one answer; write several as a list, in JSON lines or Parquet"
        return BadRow(where, f"answers is {answers!r:.60}, a list that was printed as one text; {cure}")
    starts = row.get("answer_starts")
    if starts is None and row.get("positive_ids"):
        starts = own_starts
    return question_record(
        row.get("id") if row.get("id") not in (None, "") else own_id,
        row.get("question"),
        where,
        answers=_plain(answers),
        positive_ids=row.get("positive_ids"),
        hard_negative_ids=row.get("hard_negative_ids") or row.get("negative_ids"),
        answer_starts=_plain(starts),
    )


def _plain(values: Any) -> Any:
    return values.tolist() if isinstance(values, np.ndarray) else values


def passage_of(row: dict[str, Any], where: str) -> Record:
    """Read a row as a passage, or return a bad row. `where` names the row."""
    text = row["text"] if row.get("text") is not None else row.get("contents")
    extras = {key: value for key, value in row.items() if key not in _OWN_KEYS or (key in _OF_OTHERS and value)}
    return passage_record(id_of(row), row.get("title"), text, where, extras=extras)


def sets_fields(row: Mapping[str, Any]) -> bool:
    """Return whether a row has new values of single fields in place of a passage."""
    return isinstance(row.get("set"), Mapping)


def fields_of(row: dict[str, Any], where: str) -> FieldsRecord | BadRow:
    """Read a row that sets fields, `{"id": ..., "set": {...}}`, or return a bad row."""
    others = [name for name, value in row.items() if name not in ("id", "_id", "set") and value is not None]
    if others:
        return BadRow(where, f"{others[0]!r} stands beside 'set', which has all that changes; leave one of them out")
    return fields_record(id_of(row), row["set"], where)


def write_jsonl(path: Path, passages: Iterable[Passage], progress: Progress = no_progress, total: int = 0) -> int:
    """Write passages, `total` if that is known, as lines that `read_jsonl` reads as equal ones where the types of
    their fields are declared. Returns how many there were."""
    count = 0
    with finished_file(path) as aside, aside.open("w", encoding="utf-8") as file:
        for count, (id_, title, text, fields) in enumerate(passages, 1):
            row = {"id": id_, "title": title, "text": text} | {name: to_json(value) for name, value in fields}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            if count % REPORT_EVERY == 0:
                progress("passages written", count, total)
    progress("passages written", count, count)
    return count


def id_of(row: dict[str, Any]) -> Any:
    """Return the id of a row, as passages, changes and dumps of BEIR name it."""
    return row["id"] if row.get("id") is not None else row.get("_id")
