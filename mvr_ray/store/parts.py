"""Store and read the passages of one shard of a corpus as Arrow files.

A part holds its passages in id order. After an update it may be the earlier part's files and beside them a file of
changes: passages that are new or differ, and in its metadata the ids of deleted ones.
"""

import bisect
import io
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from mvr_ray.errors import StorageError
from mvr_ray.store.changes import Changes, lay_over
from mvr_ray.store.fields import ARROW_TYPES
from mvr_ray.store.local_files import finished_file
from mvr_ray.types import Passage

_ROWS_WORTH_DIVIDING = 32
BATCH_ROWS = 4096
CURE = "run `mvr-ray prepare CONFIG` again"
UPDATED_CURE = "copy it back from a backup, or run `mvr-ray prepare CONFIG` and then every later update again"
"""Of a corpus that an update made, which its sources alone do not give."""
DELETED_IDS = b"deleted_ids"
PASSAGE_SCHEMA = pa.schema([pa.field(name, pa.string(), False) for name in ("id", "title", "text")])
_LARGE_SCHEMA = pa.schema([pa.field(name, pa.large_string(), False) for name in PASSAGE_SCHEMA.names])
"""For rows taken from a whole part: Arrow joins its batches first, and offsets of 32 bits end at 2 GiB of text."""


class CorpusPart:
    """The passages of one shard in id order, mapped from their file when one is read first; with files of changes, a
    batch with a few changes is divided around them, and one with many is copied into memory."""

    def __init__(self, path: Path, *changes: Path, fields: Mapping[str, str] | None = None) -> None:
        """`fields` are those of the corpus; without them passages are read as if they had none."""
        self.path, self.change_paths = path, changes
        self._schema = passage_schema(fields or {})

    @cached_property
    def _batches(self) -> list[pa.RecordBatch]:
        batches = [batch.select(self._schema.names).replace_schema_metadata() for batch in map_batches(self.path)]
        if not self.change_paths:
            return batches
        return list(
            lay_over(
                batches,
                Changes.join(self.read_changes()),
                ids_of=lambda batch: batch.column(0).to_pylist(),
                piece_of=lambda _, row: row,
                cut=lambda batch, start, stop: batch.slice(start, stop - start),
                join=pa.concat_batches,
                rows_worth_dividing=_ROWS_WORTH_DIVIDING,
            )
        )

    @cached_property
    def _starts(self) -> list[int]:
        return list(itertools.accumulate((batch.num_rows for batch in self._batches), initial=0))

    @cached_property
    def _first_ids(self) -> list[str]:
        return [batch.column(0)[0].as_py() for batch in self._batches]

    def read_changes(self) -> list[Changes[pa.RecordBatch]]:
        """Read the files of changes. They are not kept: a row, as a batch of its own, takes 600 bytes of memory."""
        return [_read_changes(path, self._schema.names) for path in self.change_paths]

    def __len__(self) -> int:
        return self._starts[-1]

    def __iter__(self) -> Iterator[Passage]:
        """Yield all passages, a batch of which is in memory at a time."""
        for start in range(0, len(self), BATCH_ROWS):
            yield from self.passages(start, start + BATCH_ROWS)

    def passages(self, start: int = 0, stop: int | None = None) -> list[Passage]:
        """Read rows `start` up to `stop`, like a slice of a list."""
        start, stop, _ = slice(start, stop).indices(len(self))
        passages: list[Passage] = []
        for at in range(max(bisect.bisect_right(self._starts, start) - 1, 0), bisect.bisect_left(self._starts, stop)):
            first = max(start, self._starts[at])
            passages += passages_of(self._batches[at].slice(first - self._starts[at], stop - first))
        return passages

    def take(self, rows: Sequence[int]) -> list[Passage]:
        """Read some rows, in ascending order."""
        edges = [bisect.bisect_left(rows, start) for start in self._starts]
        passages: list[Passage] = []
        for batch, first, low, high in zip(self._batches, self._starts, edges, edges[1:]):
            if low < high:
                passages += passages_of(batch.take(pa.array([row - first for row in rows[low:high]], pa.int64())))
        return passages

    def table(self, columns: Iterable[str]) -> pa.Table:
        """Return some columns of all passages, mapped: any of id, title, text and the corpus's fields."""
        return pa.Table.from_batches(self._batches, self._schema).select(list(columns))

    def ids(self) -> list[str]:
        return [passage_id for batch in self._batches for passage_id in batch.column(0).to_pylist()]

    def row(self, passage_id: str) -> int:
        """Find the row of a passage, -1 when it is not in this part."""
        which = bisect.bisect_right(self._first_ids, passage_id) - 1
        if which < 0:
            return -1
        column = self._batches[which].column(0)
        at = bisect.bisect_left(range(len(column)), passage_id, key=lambda row: column[row].as_py())
        is_there = at < len(column) and column[at].as_py() == passage_id
        return self._starts[which] + at if is_there else -1

    def get(self, passage_id: str) -> Passage | None:
        row = self.row(passage_id)
        return self.passages(row, row + 1)[0] if row >= 0 else None


class PartDifference(NamedTuple):
    """How a part differs from an earlier one: rows of new or changed passages, and ids of deleted ones."""

    changed_rows: list[int]
    deleted_ids: list[str]


def difference(before: CorpusPart, after: CorpusPart) -> PartDifference:
    """Compare title and text, which an encoder reads, of two parts passage by passage; for parts with the same first
    file, only the changes that they do not share."""
    if before.path == after.path:
        return _difference_of_changes(before, after)
    old, new = (part.table(PASSAGE_SCHEMA.names).cast(_LARGE_SCHEMA) for part in (before, after))
    compute: Any = pc
    matches = old.take(compute.index_in(new.column("id"), value_set=old.column("id")))
    same = compute.and_(*(compute.equal(matches.column(name), new.column(name)) for name in ("title", "text")))
    is_deleted = compute.invert(compute.is_in(old.column("id"), value_set=new.column("id")))
    rows = compute.indices_nonzero(compute.invert(compute.fill_null(same, False)))
    return PartDifference(rows.to_pylist(), old.column("id").filter(is_deleted).to_pylist())


def _difference_of_changes(before: CorpusPart, after: CorpusPart) -> PartDifference:
    difference = PartDifference([], [])
    pairs = zip(before.change_paths, after.change_paths)
    num_both = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    files = [_read_changes(path, ["id"]) for part in (before, after) for path in part.change_paths[num_both:]]
    for name in sorted({name for own in files for name in own.ids()}):
        row, old = after.row(name), before.get(name)
        if row < 0:
            difference.deleted_ids.extend([name] if old else [])
        elif old is None or after.passages(row, row + 1)[0][1:3] != old[1:3]:
            difference.changed_rows.append(row)
    return difference


def find_contents(file: Path, contents: Collection[tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Find the ids of the rows with these contents, title and text, in one file of a part; later files may override
    them. Reads only texts of a length that one of the contents has."""
    compute: Any = pc
    texts = pa.array(sorted({text for _, text in contents}), pa.string())
    table = CorpusPart(file).table(PASSAGE_SCHEMA.names)
    lengths = compute.binary_length(table.column("text"))
    table = table.filter(compute.is_in(lengths, value_set=compute.unique(compute.binary_length(texts))))
    table = table.filter(compute.is_in(table.column("text"), value_set=texts))
    rows = zip(*(column.to_pylist() for column in table.columns))
    return {name: (title, text) for name, title, text in rows if (title, text) in contents}


def passage_schema(fields: Mapping[str, str]) -> pa.Schema:
    """Return the columns of a part: id, title, text, and a nullable one for each field."""
    return pa.schema([*PASSAGE_SCHEMA, *(pa.field(name, ARROW_TYPES[kind]) for name, kind in fields.items())])


def write_passages(
    path: Path,
    passages: Iterable[Passage],
    fields: Mapping[str, str] | None = None,
    deleted_ids: Iterable[str] | None = None,
) -> int:
    """Write one part's file, with a column for each of the corpus's fields, or with `deleted_ids` a file of its
    changes; the passages, and these ids, must come in order. Returns how many passages there were."""
    fields = fields or {}
    schema = passage_schema(fields)
    if deleted_ids is not None:
        schema = schema.with_metadata({DELETED_IDS: json.dumps(list(deleted_ids), ensure_ascii=False).encode()})
    rows = ((*passage[:3], *map(dict(passage.fields).get, fields)) for passage in passages)
    return write_rows(path, schema, rows)


def _read_changes(path: Path, columns: list[str]) -> Changes[pa.RecordBatch]:
    """Read a file of changes: each row as a batch of its own, without a copy."""
    batches, metadata = map_file(path)
    plain = [batch.select(columns).replace_schema_metadata() for batch in batches]
    rows = {name: own.slice(at, 1) for own in plain for at, name in enumerate(own.column(0).to_pylist())}
    return Changes(rows, set(json.loads(metadata.get(DELETED_IDS, b"[]"))))


def passages_of(batch: pa.RecordBatch) -> Iterator[Passage]:
    ids, titles, texts, *columns = (column.to_pylist() for column in batch.columns)
    if not columns:
        return map(Passage, ids, titles, texts)
    names = batch.schema.names[3:]
    rows = (
        tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in zip(names, values))
        for values in zip(*columns)
    )
    fields = (tuple(pair for pair in row if pair[1] is not None) for row in rows)
    return map(Passage, ids, titles, texts, fields)


def write_rows(path: Path, schema: pa.Schema, rows: Iterable[tuple[Any, ...]]) -> int:
    count, remaining = 0, iter(rows)
    with finished_file(path) as aside, pa.OSFile(str(aside), "wb") as sink, pa.ipc.new_file(sink, schema) as file:
        while chunk := list(itertools.islice(remaining, BATCH_ROWS)):
            file.write_batch(pa.record_batch(to_columns(chunk, schema), schema=schema))
            count += len(chunk)
    return count


def to_columns(rows: Iterable[tuple[Any, ...]], schema: pa.Schema) -> list[pa.Array]:
    """Convert rows, at least one, to the columns of a schema."""
    return [pa.array(values, field.type) for values, field in zip(zip(*rows), schema)]


def map_batches(path: Path) -> list[pa.RecordBatch]:
    return map_file(path)[0]


def map_file(path: Path) -> tuple[list[pa.RecordBatch], dict[bytes, bytes]]:
    """Map the non-empty record batches of an Arrow file; returns its metadata, too."""
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        return [batch for batch in batches if batch.num_rows], reader.schema.metadata or {}
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StorageError(f"{path} is missing or damaged ({error}); {CURE}") from error


def parquet_bytes(rows: Iterable[tuple[Any, ...]], schema: pa.Schema) -> bytes:
    """Write rows as the bytes of a Parquet file, zstd-compressed."""
    import pyarrow.parquet as pq

    rows, buffer = list(rows), io.BytesIO()
    table = pa.table(to_columns(rows, schema), schema=schema) if rows else schema.empty_table()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()
