"""Read text files, plain, gzip or bzip2 (detected by their first bytes), and their rows.

Bytes that are not UTF-8 come through as lone surrogates; the row that holds them is then a bad row, not the file.
"""

import bz2
import contextlib
import csv
import gzip
import io
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from mvr_ray.errors import DataError, MissingInputError, MvrRayError, count_noun
from mvr_ray.store.formats.json_stream import DECODER
from mvr_ray.store.formats.records import NUMBERED_ROWS, BadRow

GZIP_MAGIC = b"\x1f\x8b"
BZIP2_MAGIC = b"BZh"
KINDS = {",": "comma-separated", "\t": "tab-separated"}


class Row(NamedTuple):
    """Values of one row of a file, and `file:line`."""

    values: Any
    where: str


def plain_name(path: Path) -> Path:
    """Return the path without an ending of compressed files, `.gz` or `.bz2`."""
    return path.with_suffix("") if path.suffix.lower() in (".gz", ".bz2") else path


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
            # gzip and bz2 report damage by an OSError without a number, which errors of the system have.
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
                values = DECODER.decode(line)
            except (ValueError, RecursionError) as error:
                hint = "; it holds NULs, as UTF-16 does: save it as UTF-8" * ("\0" in line)
                yield BadRow(where, f"not valid JSON: {error}{hint}")
                continue
            yield Row(values, where) if isinstance(values, dict) else BadRow(where, "not a JSON object")


def first_cells(path: Path) -> list[str]:
    """Return the cells of the first line of a tab-separated file, without their quotes."""
    csv.field_size_limit(sys.maxsize)
    with open_text(path) as file:
        return [cell.strip() for cell in next(csv.reader([file.readline()], delimiter="\t"), [])]


def csv_header(path: Path, delimiter: str = ",") -> list[str]:
    """Return the column names of a separated file, as `csv_rows` names them."""
    return _header(next(separated_rows(path, delimiter), None))


def _header(row: Row | BadRow | None) -> list[str]:
    names = [name.strip() for name in row.values] if isinstance(row, Row) else []
    return [name.lower() if name.lower() in ("id", "title", "text") else name for name in names]


def csv_rows(path: Path, columns: Sequence[str], delimiter: str = ",") -> Iterator[Row | BadRow]:
    """Yield the rows of a separated file with a header, each as a dict by column. The columns id, title and text may be
    in any case.

    Raises DataError for a header that is no row, is not UTF-8, lacks one of `columns` or has one twice.
    """
    rows = separated_rows(path, delimiter)
    first = next(rows, None)
    if first is None:
        raise DataError(f"{path} is empty; it needs a header and rows")
    if isinstance(first, BadRow):
        raise DataError(f"{first}; correct the header")
    header = _header(first)
    if delimiter == "," and len(header) == 1 and ";" in header[0]:
        raise DataError(f"{path}: its columns are separated by semicolons; save it with commas, or as .tsv")
    if any("\0" in name for name in header):
        raise DataError(f"{path} is not UTF-8, but perhaps UTF-16, as Excel's Unicode text is; save it as UTF-8")
    if any("\udc80" <= char <= "\udcff" for name in header for char in name):  # bytes that `open_text` could not decode
        raise DataError(f"{path} is not UTF-8 in its header, {', '.join(map(repr, header)):.200}; save it as UTF-8")
    missing = [name for name in columns if name not in header]
    if missing or len(set(header)) < len(header):
        problem, cure = "has a column twice", "Rename one of them"
        if missing:
            problem = f"lacks {' and '.join(missing)}"
            cure = f"Needed are {' and '.join(columns)}, in any order; other names can be given in the source's fields"
            cure += ": {id: NAME, text: NAME}" + (f"; {NUMBERED_ROWS}" if "id" in missing else "")
        there = f"it has {len(header)} {KINDS[delimiter]} columns: {', '.join(map(repr, header)) or 'none'}"
        raise DataError(f"{path}: the header {problem}; {there}. {cure}")
    for row in rows:
        yield row if isinstance(row, BadRow) else Row(dict(zip(header, row.values)), row.where)


def separated_rows(
    path: Path, delimiter: str, num_columns: int | None = None, is_quoted: bool = True
) -> Iterator[Row | BadRow]:
    """Yield rows of `num_columns`, quoted as Python's csv module does, or without quotes. None: as many columns as the
    first row has. A bad row yields a BadRow for each of its lines: a quote that is not closed takes in the rows after
    it."""
    csv.field_size_limit(sys.maxsize)
    quoting = csv.QUOTE_MINIMAL if is_quoted else csv.QUOTE_NONE
    with open_text(path) as file:
        reader = csv.reader(file, delimiter=delimiter, strict=delimiter == ",", quoting=quoting)
        while True:
            first, values, problem = reader.line_num + 1, [], ""
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                problem = f"not a row: {error}"
            last = reader.line_num
            if not (values or problem):
                continue
            num_columns = num_columns or len(values)
            if delimiter == "\t" and last > first and any("\t" in value for value in values):
                problem = f"a quote is not closed; it swallows the rows up to line {last}"
            elif not problem and len(values) != num_columns:
                problem = f"{count_noun(len(values), f'{KINDS[delimiter]} column')}, not {num_columns}"
            if not problem:
                yield Row(values, f"{path}:{first}")
                continue
            yield BadRow(f"{path}:{first}", problem)
            for line in range(first + 1, last + 1):
                yield BadRow(f"{path}:{line}", f"taken in by a quote of the bad row of line {first}")
