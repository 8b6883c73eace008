"""Read passages and questions from Python objects: texts, records, frames, tables and datasets.

A passage is a text, a tuple (id, text) or (id, title, text), a mapping as of a JSON lines file (docs/formats.md), or a
`Passage`. One without an id gets the number of its row. Rows are streamed: of a frame or table, 1,024 at a time.
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mvr_ray.config import resolve_path
from mvr_ray.errors import DataError, MissingInputError, count_noun
from mvr_ray.store.files import local_copy
from mvr_ray.store.formats.records import (
    BadRow,
    DeletionRecord,
    FieldsRecord,
    QuestionRecord,
    Record,
    deletion_record,
    is_id,
    question_record,
)
from mvr_ray.store.formats.rows import batch_rows, fields_of, passage_of, question_of, sets_fields
from mvr_ray.store.formats.sources import DATA_ENDS, read_question_file
from mvr_ray.store.formats.text_files import plain_name
from mvr_ray.store.formats.text_folder import TEXT_ENDS
from mvr_ray.types import Passage, Question

BATCH_ROWS = 1024
ID_NAMES = ("doc_id", "docid", "document_id", "passage_id", "pid", "uid", "uuid")
"""Columns that are ids of passages elsewhere, and fields here."""
log = logging.getLogger(__name__)
_SCHEME = re.compile(r"hf:|\w+://")
"""Of sources that are not on this machine."""
_OF_TABLES = ("with_format", "to_batches", "to_pylist", "read_next_batch", "iter_rows", "collect_schema", "iloc")
"""Each object of rows that `rows_of` knows, other than an iterable, has one of these."""


def sources_of(passages: Any) -> list[Mapping[str, Any]] | None:
    """Return entries of `prepare.sources` that are given instead of passages: one path, a list of `Path`s or of texts
    that all name files or all look like paths, or a mapping with `path`; None for anything else.

    Raises MissingInputError for a path that names neither a file or folder nor a source elsewhere.
    """
    if isinstance(passages, Mapping) and "path" in passages:
        return [{**passages, "path": str(passages["path"])}]
    if isinstance(passages, str | Path):
        return [_source_of(str(passages), "is", "give texts as a list")]
    is_list = isinstance(passages, list | tuple) and len(passages) > 0
    if is_list and any(all(map(names, passages)) for names in (_is_path, _names_file, _looks_like_path)):
        return [_source_of(str(path), "has", "give such texts as (id, text)") for path in passages]
    return None


def _source_of(path: str, verb: str, other_cure: str) -> dict[str, Any]:
    """Return the entry of a file, a folder or a source elsewhere. Raises MissingInputError."""
    if not _SCHEME.match(path) and not os.access(resolve_path(path), os.R_OK):
        raise MissingInputError(
            f"passages {verb} {path!r:.80}, and no file or folder of this name can be read (working folder: "
            f"{Path.cwd()}); correct the path, or {other_cure}"
        )
    return {"path": path}


def _is_path(passage: Any) -> bool:
    return isinstance(passage, Path)


def _looks_like_path(passage: Any) -> bool:
    """Return whether a text is one word with a scheme, or with the ending of a file of data."""
    if not isinstance(passage, str) or len(passage.split()) != 1:
        return False
    ending = plain_name(Path(passage)).suffix.lower()
    return _SCHEME.match(passage) is not None or ending in (*DATA_ENDS, *TEXT_ENDS)


def _names_file(passage: Any) -> bool:
    """Return whether a text is the path of a file, as `glob.glob` returns them."""
    try:
        return isinstance(passage, str) and Path(passage).is_file()
    except (OSError, ValueError):  # a text is longer than a path, or holds a NUL
        return False


def _names_question_file(question: str | Path) -> bool:
    path = Path(question)
    return plain_name(path).suffix.lower() in (*DATA_ENDS, ".txt") and _names_file(str(question))


def passage_records(passages: Any) -> Iterator[Record]:
    """Yield a record of each passage; a bad row for an invalid one. Raises DataError for an object without rows."""
    for number, row in enumerate(rows_of(passages)):
        values = _passage_values(row) if number == 0 else None
        if values and not {"id", "_id"} & values.keys() and (others := [name for name in values if name in ID_NAMES]):
            log.warning("passages are numbered, since none has an id; rename %r to 'id' if it is theirs", others[0])
        yield _passage_record(row, f"passage {number}", {"id": number})


def upserts(passages: Any) -> list[Record | FieldsRecord] | Path:
    """Return the file of changes that a path names, else the records of upserts. Raises MissingInputError for a path
    without a file, and DataError for a text that is no path."""
    if not any(names(passages) for names in (_is_path, _names_file, _looks_like_path)):
        return list(upsert_records(passages))
    file = local_copy(str(passages))
    if not file.is_file():
        raise MissingInputError(
            f"upsert: {str(passages)!r:.80} is no file (working folder: {Path.cwd()}); correct the path, or give "
            f"passages as a list"
        )
    return file


def upsert_records(passages: Any) -> Iterator[Record | FieldsRecord]:
    """Yield a record of each passage as `passage_records` does, or of new values of its fields (`set`); a bad row for
    one without an id, too, and for a null that a table may have put in place of a field that the row did not name."""
    is_table = any(hasattr(passages, name) for name in _OF_TABLES)
    for number, row in enumerate(rows_of(passages)):
        if isinstance(row, Mapping) and sets_fields(row):
            if is_table and None in row["set"].values():
                reason = (
                    "set has nulls, as a table also has for fields that only other rows set; give a list of mappings"
                )
                yield BadRow(f"item {number}", reason)
                continue
            yield fields_of(_plain_values({**row, "set": _plain_values(row["set"])}), f"item {number}")
        else:
            yield _passage_record(row, f"item {number}", {})


def deletion_records(ids: Any) -> Iterator[DeletionRecord | BadRow]:
    """Yield a record of each passage to delete; a bad row for what is no id."""
    for number, name in enumerate(ids_of(ids)):
        yield deletion_record(_plain_value(name), f"item {number}")


def ids_of(ids: Any) -> Iterator[Any]:
    """Return one id, or those of an iterable or column, in order."""
    return iter([ids]) if is_id(ids) else rows_of(ids)


def passage_ids(ids: Any) -> list[str]:
    """Return one id, or those of an iterable or column, as texts. Raises DataError for what is no id."""
    names = list(ids_of(ids))
    for number, name in enumerate(names):
        if not is_id(name):
            raise DataError(f"item {number} is {name!r:.60}, no id; give texts and whole numbers, such as one column")
    return [str(name) for name in names]


def _passage_record(row: Any, where: str, own_id: Mapping[str, Any]) -> Record:
    """Make the record of a passage, or a bad row with the reason. `own_id` is the id of one without, if it may lack
    one."""
    values = _passage_values(row)
    if values is None:
        own = "give paths as a list" if own_id else "to read a file of changes, give its path alone, in no list"
        hint = f"; {own}" if isinstance(row, Path) else ""
        return BadRow(where, f"{row!r:.60} is no text, no (id, text) or (id, title, text), and no mapping{hint}")
    if not {"text", "contents"} & values.keys():
        names = ", ".join(map(repr, values))
        cure = "" if own_id else "; to change fields alone give {'id': .., 'set': {..}}, to delete use Index.delete"
        return BadRow(where, f"text is missing; its keys are {names:.200}: rename the one of the text to 'text'{cure}")
    if not own_id and not {"id", "_id"} & values.keys():
        return BadRow(where, "id is missing; give a list of (id, text), or of mappings with id and text")
    return passage_of({**({} if "_id" in values else own_id), **values}, where)


def _passage_values(row: Any) -> Mapping[str, Any] | None:
    """Return the parts and fields of a passage by name; None for an object that is no passage."""
    match row:
        case Passage(id_, title, text, fields):
            return {"id": id_, "title": title, "text": text, **dict(fields)}
        case str():
            return {"text": row}
        case tuple() if "text" in getattr(row, "_fields", ()):
            return _plain_values(_named_values(row))
        case (id_, Mapping() as parts):  # of a mapping's items(), as BEIR's own program loads a corpus
            return _plain_values({**parts, "id": id_})
        case (id_, text):
            return _plain_values({"id": id_, "text": text})
        case (id_, title, text):
            return _plain_values({"id": id_, "title": title, "text": text})
        case Mapping():
            return _plain_values(row)
    for text, own_id in (("page_content", "id"), ("text", "node_id")):  # documents of LangChain, nodes of LlamaIndex
        if hasattr(row, text) and isinstance(metadata := getattr(row, "metadata", None), Mapping):
            id_ = getattr(row, own_id, None)
            return _plain_values({**metadata, "text": getattr(row, text)} | ({} if id_ is None else {"id": id_}))
    return None


def _named_values(row: Any) -> dict[str, Any]:
    """Return the values of a named tuple by name. An index without a name, as DataFrame.itertuples gives, is none."""
    is_of_pandas = type(row).__name__ == "Pandas" and row._fields[:1] == ("Index",)
    return dict(list(zip(row._fields, row))[is_of_pandas:])


def questions_of(questions: Any) -> list[Question]:
    """Read the questions of a file, or of an iterable of texts, `Question`s, tuples (question, answer or answers) and
    mappings with question, answers, positive_ids (docs/formats.md). Raises DataError that names the first bad one, or
    the first whose id occurs before it."""
    if isinstance(questions, str | Path):
        return read_question_file(questions)
    all_rows = list(rows_of(questions))
    row_ids = {str(row.get("id") if isinstance(row, Mapping) else getattr(row, "id", "")) for row in all_rows}
    question_by_id: dict[str, Question] = {}
    for number, row in enumerate(all_rows):
        own_id = f"q{number}"
        while own_id in row_ids:
            own_id += "_"
        record = _question_record(row, f"question {number}", own_id)
        if not isinstance(record, QuestionRecord):
            raise DataError(f"{record}; a question is a text, (question, answers), or a mapping with question")
        question = record.question
        if question.id in question_by_id:
            place = f"question {list(question_by_id).index(question.id)}"
            raise DataError(f"question {number}: id {question.id!r} already occurs in {place}; give it another one")
        question_by_id[question.id] = question
    if not question_by_id:
        raise DataError("no question is given; give texts, (question, answers), or mappings with question")
    return list(question_by_id.values())


def _question_record(row: Any, where: str, own_id: str) -> Record:
    match row:
        case str() | Path() if _names_question_file(row):
            return BadRow(where, f"{str(row)!r:.200} is a file; to read its questions, give its path alone, in no list")
        case Question(id_, text, answers, positive_ids, negative_ids, starts, teacher_scores, grades):
            lists = map(_plain_value, (answers, positive_ids, negative_ids, starts))  # of any type in a notebook
            record = question_record(id_, text, where, *lists, positive_grades=grades)
            if not isinstance(record, QuestionRecord):
                return record
            return record._replace(question=record.question._replace(teacher_scores=teacher_scores))
        case str():
            return question_record(own_id, row, where)
        case tuple() if "question" in getattr(row, "_fields", ()):
            return question_of(_plain_values(_named_values(row)), where, own_id)
        case (text, answers):
            own_answers = [answers] if isinstance(answers, str) else _plain_value(answers)
            return question_record(own_id, text, where, own_answers)
        case Mapping():
            return question_of(_plain_values(row), where, own_id)
        case _:
            return BadRow(where, f"{row!r:.60} is no question")


def rows_of(rows: Any) -> Iterator[Any]:
    """Return the rows of an iterable, a pandas or polars frame, a table, column, batch reader or dataset of
    Arrow, a dataset of Hugging Face or Ray, in order."""
    if isinstance(rows, str | bytes):
        raise DataError(f"{rows!r:.60} is one text and holds no rows; give a list")
    if isinstance(rows, Mapping):
        raise DataError(
            f"a mapping of {count_noun(len(rows), 'key')} holds no rows; give a list of mappings, its items(), "
            f"or the split that you mean"
        )
    if hasattr(rows, "with_format"):  # Hugging Face
        return iter(rows.with_format(None))
    if hasattr(rows, "to_batches"):  # of Arrow: Table, Dataset
        return (row for batch in rows.to_batches() for row in batch_rows(batch))
    if hasattr(rows, "num_columns"):  # RecordBatch
        return batch_rows(rows)
    if hasattr(rows, "to_pylist"):  # Array, ChunkedArray
        return iter(rows.to_pylist())
    if hasattr(rows, "read_next_batch"):  # RecordBatchReader
        return (row for batch in rows for row in batch_rows(batch))
    if hasattr(rows, "iter_rows"):  # polars, and Ray, whose rows are named
        return rows.iter_rows(named=True) if hasattr(rows, "to_dicts") else iter(rows.iter_rows())
    if hasattr(rows, "collect_schema"):  # polars, lazy
        return rows.collect().iter_rows(named=True)
    if hasattr(rows, "iloc"):  # pandas
        return _pandas_rows(rows)
    if not isinstance(rows, Iterable):
        raise DataError(f"{type(rows).__name__} holds no rows; give texts, records, a frame, a table or a dataset")
    return iter(rows)


def plain(value: Any) -> Any:
    """Convert paths, and numbers and arrays of numpy, in mappings and lists to values that a run file can hold."""
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, Path):
        return str(value)
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _plain_values(row: Mapping[Any, Any]) -> dict[Any, Any]:
    """Convert arrays of numpy, as pandas reads lists from Parquet, and columns to lists, numbers of numpy to those of
    Python, and what a frame has for a missing value (NaN, NaT, NA) to None."""
    return {name: _plain_value(value) for name, value in row.items()}


def _plain_value(value: Any) -> Any:
    if _is_missing(value):
        return None
    if to_list := getattr(value, "to_list", getattr(value, "to_pylist", None)):  # a column of a frame or a table
        return to_list()
    return value.tolist() if isinstance(value, np.ndarray | np.number | np.bool_) else value


def _pandas_rows(frame: Any) -> Iterator[Any]:
    """Yield the rows of a frame; an index with a name is a column, as `set_index("id")` leaves it."""
    if not hasattr(frame, "columns"):  # a series of texts
        yield from frame
        return
    if all(name is not None and name not in frame.columns for name in frame.index.names):
        frame = frame.reset_index()
    for start in range(0, len(frame), BATCH_ROWS):
        for row in frame.iloc[start : start + BATCH_ROWS].to_dict("records"):
            yield {str(name): value for name, value in row.items()}


def _is_missing(value: Any) -> bool:
    """Return whether a value is NaN, NaT or NA: what is not equal to itself. An array is a value."""
    try:
        return not isinstance(value, np.ndarray) and bool(value != value)
    except (TypeError, ValueError, RuntimeError):  # NA, which is neither; the last of a tensor
        return type(value).__name__ == "NAType"
