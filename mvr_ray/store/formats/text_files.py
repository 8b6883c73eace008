"""Read text files, plain or gzip (detected by their first bytes), and their rows.

Bytes that are not UTF-8 come through as lone surrogates; the row that holds them is then a bad row, not the file.
"""

import contextlib
import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from mvr_ray.errors import DataError, MissingInputError
from mvr_ray.store.formats.records import BadRow

GZIP_MAGIC = b"\x1f\x8b"


class Row(NamedTuple):
    """Values of one row of a file, and `file:line`."""

    values: Any
    where: str


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    if not path.is_file():
        raise MissingInputError(f"{path} does not exist or is not a file; check the path in prepare.sources")
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(path.open("rb"))
        head = raw.peek(2)[:2]
        data = stack.enter_context(gzip.GzipFile(fileobj=raw)) if head == GZIP_MAGIC else raw
        text = io.TextIOWrapper(data, encoding="utf-8-sig", errors="surrogateescape", newline="")
        stack.enter_context(text)
        try:
            yield text
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path} is a damaged or unfinished gzip file: {error}; fetch it again") from error


def json_lines(path: Path) -> Iterator[Row | BadRow]:
    """Yield the objects of a JSON-lines file; blank lines are skipped."""
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield BadRow(where, f"not valid JSON: {error}")
                continue
            yield Row(values, where) if isinstance(values, dict) else BadRow(where, "not a JSON object")


def tsv_rows(path: Path, num_columns: int | None) -> Iterator[Row | BadRow]:
    """Yield the rows of a tab-separated file, quoted as Python's csv module does. None takes any number of columns."""
    csv.field_size_limit(sys.maxsize)
    with open_text(path) as file:
        reader = csv.reader(file, delimiter="\t")
        before = 0
        while True:
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield BadRow(f"{path}:{reader.line_num}", f"not a row: {error}")
                continue
            finally:
                first, before = before + 1, reader.line_num
            where = f"{path}:{first}"
            if not values:
                continue
            if before > first and any("\t" in value for value in values):
                yield BadRow(where, f"a quote is not closed; it swallows the rows up to line {before}")
            elif num_columns is not None and len(values) != num_columns:
                yield BadRow(where, f"{len(values)} tab-separated columns, not {num_columns}")
            else:
                yield Row(values, where)
