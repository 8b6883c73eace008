"""Read DPR's files: passage TSV, training JSON (array or lines) and question CSV."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mvr_ray.store.fields import TextCell
from mvr_ray.store.formats.json_stream import JsonReader
from mvr_ray.store.formats.records import (
    BadRow,
    Record,
    passage_record,
    plain_apostrophes,
    question_id,
    question_record,
)
from mvr_ray.store.formats.text_files import Row, csv_header, json_lines, open_text, separated_rows
from mvr_ray.store.formats.training_rows import CONTEXTS, is_training_row, training_records


def read_dpr_tsv(path: Path) -> Iterator[Record]:
    """Read `id text title`, tab-separated; a row whose id is `id` is a header in any row, as in DPR.

    A header in the first row may name further columns, which come with each passage as extras.
    """
    header = csv_header(path, "\t")
    for row in separated_rows(path, "\t", len(header) if header[:3] == ["id", "text", "title"] else 3):
        if isinstance(row, BadRow):
            yield row
        elif row.values[0] != "id":
            id_, text, title, *more = row.values
            extras = dict(zip(header[3:], map(TextCell, more)))
            yield passage_record(id_, title, text, row.where, extras=extras)


def read_dpr_json(path: Path) -> Iterator[Record]:
    """Read the training array, one row at a time."""
    with open_text(path) as file:
        reader = JsonReader(file, str(path))
        for number, row in enumerate(reader.items()):
            yield from _dpr_records(row, number, path, f"{path}:{reader.line} (row {number})")
        reader.finish()


def read_dpr_jsonl(path: Path) -> Iterator[Record]:
    """Read training rows, one a line."""
    for number, row in enumerate(json_lines(path)):
        if isinstance(row, BadRow):
            yield row
        else:
            yield from _dpr_records(row.values, number, path, row.where)


def read_qas_csv(path: Path) -> Iterator[Record]:
    """Read `question` and its answers as a Python list, tab-separated. The list is parsed as a literal, never run."""
    for number, row in enumerate(separated_rows(path, "\t", 2)):
        if isinstance(row, Row):
            text, literal = row.values
            answers = _literal_list(literal)
            if answers is None:
                yield BadRow(row.where, f"the answers are not a Python list of texts: {literal!r:.80}")
            else:
                yield question_record(question_id(path, number), plain_apostrophes(text), row.where, answers)
        else:
            yield row


def _dpr_records(row: Any, number: int, path: Path, where: str) -> Iterator[Record]:
    if not isinstance(row, dict):
        yield BadRow(where, "a row is not an object")
    elif row.keys().isdisjoint(CONTEXTS) and not is_training_row(row.keys()):
        reason = f"no training row of DPR ({CONTEXTS[0]}); write passages and questions one object a line, as .jsonl"
        yield BadRow(where, reason)
    else:
        yield from training_records(row, number, path, where)


def _literal_list(text: str) -> list[str] | None:
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        return None
    return list(value)
