"""Read text files, plain, gzip or bzip2 (detected by their first bytes), and their rows.

Bytes that are not UTF-8 come through as lone surrogates; the row that holds them is then a bad row, not the file.
"""

import bz2
import contextlib
import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from mvr_ray.errors import DataError, MissingInputError, MvrRayError
from mvr_ray.store.formats.records import BadRow

GZIP_MAGIC = b"\x1f\x8b"
BZIP2_MAGIC = b"BZh"


class Row(NamedTuple):
    """Values of one row of a file, and `file:line`."""

    values: Any
    where: str


@contextlib.contextmanager
def open_bytes(path: Path) -> Iterator[BinaryIO]:
    """Open a file and decompress what is read; DataError where a compressed file is damaged or breaks off."""
    if not path.is_file():
        raise MissingInputError(f"{path} does not exist or is not a file; check the path in prepare.sources")
    with contextlib.ExitStack() as stack:
        raw = stack.enter_context(path.open("rb"))
        head = raw.peek(3)[:3]
        data: Any = raw
        kind = ""
        if head.startswith(GZIP_MAGIC):
            data, kind = stack.enter_context(gzip.GzipFile(fileobj=raw)), "gzip"
        elif head == BZIP2_MAGIC:
            data, kind = stack.enter_context(bz2.BZ2File(raw)), "bzip2"
        try:
            yield data
        except (EOFError, zlib.error, OSError) as error:
            # gzip and bz2 tell damage by an OSError without a number, which errors of the system have.
            if not kind or isinstance(error, MvrRayError) or getattr(error, "errno", None) is not None:
                raise
            raise DataError(f"{path} is a damaged or unfinished {kind} file: {error}; fetch it again") from error


@contextlib.contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    with (
        open_bytes(path) as data,
        io.TextIOWrapper(data, encoding="utf-8-sig", errors="surrogateescape", newline="") as text,
    ):
        yield text


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


def tsv_rows(path: Path, num_columns: int) -> Iterator[Row | BadRow]:
    """Yield the rows of a tab-separated file, quoted as Python's csv module does."""
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
            elif len(values) != num_columns:
                yield BadRow(where, f"{len(values)} tab-separated columns, not {num_columns}")
            else:
                yield Row(values, where)
