"""Write and map embedding shards: every view of every passage of one shard, in id order, as an Arrow IPC file.

One row a passage: `id` string, `view` list<int16>, `vector` list<fixed_size_list<halffloat|float>[D]>. Uncompressed, in
record batches of 4,096 rows, so that a reader maps the file and copies nothing. The bytes depend on the rows alone,
not on the blocks that are written: writers cut batches themselves.

Shapes: P passages, N view vectors, D dimension.
"""

import bisect
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import pyarrow as pa

from mvr_ray.errors import FormatError, MissingInputError, StorageError
from mvr_ray.store.local_files import finished_file
from mvr_ray.types import ALL_READ, EmbeddingBlock, FloatArray, IntArray, StoredBlocks, UnreadCounts

Dtype = Literal["fp16", "fp32"]
BATCH_PASSAGES = 4096
SCHEMA_BYTES = 1 << 16
"""The schema of a shard's first file is within these."""
_ARROW = {"fp16": pa.float16(), "fp32": pa.float32()}
_NUMPY = {"fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}
_as_numpy: Callable[[pa.Array], Any] = np.from_dlpack
"""Without a copy; Arrow's own to_numpy imports pandas."""
_FORMAT, _FORMAT_WITH_DELETIONS = b"mvr_ray.embeddings/1", b"mvr_ray.embeddings/2"
"""A program that reads only the first format must not read a file of changes without its deletions."""


class Views(NamedTuple):
    """The views of one passage: numbers ascending, one vector each."""

    view_numbers_N: IntArray
    vectors_ND: FloatArray


class BlockRow(NamedTuple):
    """The position of a passage in a list of blocks."""

    passage_id: str
    block: int
    row: int


class EmbeddingWriter:
    """Writes a shard to a temporary file and renames it when the block succeeds; `Store` syncs it later:

    with EmbeddingWriter(path, dimension=384, num_views=8, dtype="fp16") as writer:
        writer.write(block)
    """

    def __init__(
        self,
        path: Path,
        dimension: int,
        num_views: int,
        dtype: Dtype = "fp16",
        deleted_ids: Sequence[str] = (),
        unread_counts: UnreadCounts = ALL_READ,
    ) -> None:
        """`deleted_ids` are the deleted passages of another file (`store.delta`). `unread_counts` are those of a
        staged chunk's passages."""
        self.path = path
        self.dimension = dimension
        self.dtype = dtype
        self._last_id: str | None = None
        self._pending: list[EmbeddingBlock] = []
        self._num_pending = 0
        vectors = pa.list_(pa.field("item", pa.list_(pa.field("item", _ARROW[dtype], False), dimension), False))
        fields = [
            pa.field("id", pa.string(), False),
            pa.field("view", pa.list_(pa.field("item", pa.int16(), False)), False),
            pa.field("vector", vectors, False),
        ]
        metadata = {b"format": _FORMAT, b"num_views": str(num_views).encode()}
        if deleted_ids:
            deleted_json = json.dumps(list(deleted_ids), ensure_ascii=False).encode()
            metadata |= {b"format": _FORMAT_WITH_DELETIONS, b"deleted_ids": deleted_json}
        metadata |= {name.encode(): str(count).encode() for name, count in unread_counts._asdict().items() if count}
        self._schema = pa.schema(fields, metadata)

    @contextmanager
    def _open(self) -> Iterator[Self]:
        with (
            finished_file(self.path, sync=False) as aside,
            pa.OSFile(str(aside), "wb") as sink,
            pa.ipc.new_file(sink, self._schema) as self._file,
        ):
            yield self
            self._flush(self._num_pending)

    def __enter__(self) -> Self:
        self._context = self._open()
        return self._context.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._context.__exit__(*error)

    def write(self, block: EmbeddingBlock) -> None:
        """Add passages; ids ascend over the whole file, each passage has a view, every number is finite."""
        if not block.ids:
            return
        self._check(block)
        vectors_ND = np.ascontiguousarray(block.vectors_ND, dtype=_NUMPY[self.dtype])
        if not _finite(vectors_ND):
            row = int(np.flatnonzero(~np.isfinite(vectors_ND).all(axis=1))[0])
            owner = block.ids[int(np.searchsorted(block.row_ptr, row, side="right")) - 1]
            raise StorageError(
                f"{self.path}: a view of passage {owner!r} is not finite in {self.dtype}; "
                f"use index.dtype=fp32 or encoder.normalize=true"
            )
        numbers_N = np.ascontiguousarray(block.view_numbers_N, dtype=np.int16)
        row_ptr = np.asarray(block.row_ptr, dtype=np.int64)
        self._pending.append(EmbeddingBlock(block.ids, row_ptr, numbers_N, vectors_ND))
        self._num_pending += len(block.ids)
        self._last_id = block.ids[-1]
        if self._num_pending >= BATCH_PASSAGES:
            self._flush(self._num_pending // BATCH_PASSAGES * BATCH_PASSAGES)

    def _check(self, block: EmbeddingBlock) -> None:
        ids = block.ids if self._last_id is None else [self._last_id, *block.ids]
        for before, after in pairwise(ids):
            if not before < after:
                raise StorageError(f"{self.path}: passage id {after!r} after {before!r}; ids must ascend, none twice")
        counts_P = np.diff(block.row_ptr)
        if (counts_P < 1).any():
            passage_id = block.ids[int(np.flatnonzero(counts_P < 1)[0])]
            raise StorageError(f"{self.path}: passage {passage_id!r} has no view and could never be found")
        num_vectors = int(block.row_ptr[-1])
        expected = (num_vectors, self.dimension)
        if block.vectors_ND.shape != expected or len(block.view_numbers_N) != num_vectors or block.row_ptr[0] != 0:
            raise StorageError(
                f"{self.path}: vectors of shape {block.vectors_ND.shape} with {len(block.view_numbers_N)} view "
                f"numbers given where {expected} was expected"
            )
        steps_N = np.diff(block.view_numbers_N.astype(np.int32))
        inside_N = np.ones(max(num_vectors - 1, 0), bool)
        inside_N[np.asarray(block.row_ptr[1:-1], dtype=np.int64) - 1] = False
        if (steps_N[inside_N] <= 0).any():
            raise StorageError(f"{self.path}: view numbers of a passage must ascend, none twice")

    def _flush(self, num_passages: int) -> None:
        if not num_passages:
            return
        block = join_blocks(self._pending)
        for start in range(0, num_passages, BATCH_PASSAGES):
            batch = cut_block(block, start, min(start + BATCH_PASSAGES, num_passages))
            self._file.write_batch(self._to_arrow(batch))
        rest = cut_block(block, num_passages, len(block.ids))
        self._pending = [rest] if rest.ids else []
        self._num_pending = len(rest.ids)

    def _to_arrow(self, block: EmbeddingBlock) -> pa.RecordBatch:
        offsets = pa.array(block.row_ptr.astype(np.int32), pa.int32())
        id_type, view_type, vector_type = (field.type for field in self._schema)
        flat = pa.array(block.vectors_ND.reshape(-1), vector_type.value_type.value_type)
        columns = [
            pa.array(block.ids, id_type),
            pa.ListArray.from_arrays(offsets, pa.array(block.view_numbers_N, pa.int16()), type=view_type),
            pa.ListArray.from_arrays(
                offsets, pa.FixedSizeListArray.from_arrays(flat, type=vector_type.value_type), type=vector_type
            ),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _checked_metadata(schema: pa.Schema, where: str | Path) -> dict[bytes, bytes]:
    """Return the metadata of a file of embeddings. Raises FormatError for one of a format that is not read here."""
    metadata = schema.metadata or {}
    if metadata.get(b"format") not in (_FORMAT, _FORMAT_WITH_DELETIONS):
        raise FormatError(
            f"{where} has format {metadata.get(b'format', b'none').decode()}, this program reads {_FORMAT.decode()} "
            f"and {_FORMAT_WITH_DELETIONS.decode()}; use the program that wrote it, or roll back"
        )
    return metadata


def dimension_of(start: bytes, where: str) -> int:
    """Return the dimension of a file of embeddings from its first SCHEMA_BYTES. Raises StorageError for another
    file."""
    try:
        schema = pa.ipc.open_stream(start[len("ARROW1\0\0") :]).schema
    except pa.ArrowInvalid as error:
        raise StorageError(f"{where} is not an embeddings file: {error}") from error
    _checked_metadata(schema, where)
    return schema.field("vector").type.value_type.list_size


class EmbeddingShard:
    """A shard's embeddings, mapped from its file and read on use."""

    def __init__(self, path: Path, reader: pa.RecordBatchFileReader) -> None:
        schema = reader.schema
        metadata = _checked_metadata(schema, path)
        self.path = path
        inner = schema.field("vector").type.value_type
        self.dimension: int = inner.list_size
        self.dtype: Dtype = "fp16" if pa.types.is_float16(inner.value_type) else "fp32"
        self.num_views = int(metadata[b"num_views"])
        self.unread_counts = UnreadCounts(*(int(metadata.get(name.encode(), b"0")) for name in UnreadCounts._fields))
        self.deleted_ids: list[str] = json.loads(metadata.get(b"deleted_ids", b"[]"))
        self._batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
        self.num_passages = sum(batch.num_rows for batch in self._batches)
        self.num_vectors = sum(len(batch.column("view").values) for batch in self._batches)

    @classmethod
    def open(cls, path: Path) -> Self:
        if not path.is_file():
            raise MissingInputError(f"{path} does not exist; `mvr-ray index CONFIG` writes it")
        try:
            return cls(path, pa.ipc.open_file(pa.memory_map(str(path))))
        except (pa.ArrowInvalid, OSError) as error:
            if isinstance(error, StorageError):
                raise
            raise StorageError(f"{path} is not a whole embeddings file: {error}") from error

    def iter_blocks(self) -> Iterator[EmbeddingBlock]:
        """Yield all rows, in batches of up to 4,096 passages; the vectors are views of the mapped file."""
        return map(self._block, self._batches)

    def blocks(self) -> list[EmbeddingBlock]:
        """Return all rows, as `iter_blocks` yields them."""
        return list(self.iter_blocks())

    def ids(self) -> list[str]:
        return [passage_id for batch in self._batches for passage_id in batch.column("id").to_pylist()]

    def arrow_ids(self) -> pa.ChunkedArray:
        """Return all passage ids in the order of the file."""
        return pa.chunked_array([batch.column("id") for batch in self._batches], pa.string())

    def stored_blocks(self) -> StoredBlocks:
        """Return all rows as the files have them."""
        return StoredBlocks(self.blocks())

    def num_views_by_row(self) -> IntArray:
        """Count the views of each passage in the file."""
        counts = [np.diff(_as_numpy(batch.column("view").offsets)) for batch in self._batches]
        return np.concatenate([np.zeros(0, np.int64), *counts])

    def find(self, passage_ids: Iterable[str]) -> dict[str, Views]:
        """Copy the views of these passages from the file; ids that the shard does not hold are absent."""
        return {passage_id: views for passage_id in passage_ids if (views := self._find(passage_id))}

    @cached_property
    def _first_ids(self) -> list[str]:
        return [batch.column("id")[0].as_py() for batch in self._batches]

    def _find(self, passage_id: str) -> Views | None:
        which = bisect.bisect_right(self._first_ids, passage_id) - 1
        if which < 0:
            return None
        ids, views, vectors = (self._batches[which].column(name) for name in ("id", "view", "vector"))
        row = bisect.bisect_left(range(len(ids)), passage_id, key=lambda at: ids[at].as_py())
        if row == len(ids) or ids[row].as_py() != passage_id:
            return None
        own = slice(*vectors.offsets[row : row + 2].to_pylist())
        vectors_ND = _as_numpy(vectors.values.values).reshape(-1, self.dimension)
        return Views(_as_numpy(views.values)[own].copy(), vectors_ND[own].copy())

    def _block(self, batch: pa.RecordBatch) -> EmbeddingBlock:
        vectors = batch.column("vector")
        flat = _as_numpy(vectors.values.values)
        return EmbeddingBlock(
            ids=batch.column("id").to_pylist(),
            row_ptr=_as_numpy(vectors.offsets).astype(np.int64),
            view_numbers_N=_as_numpy(batch.column("view").values),
            vectors_ND=flat.reshape(-1, self.dimension),
        )


def gather_rows(blocks: Sequence[EmbeddingBlock], rows: Sequence[BlockRow]) -> EmbeddingBlock:
    """Copy the passages at these rows, in their order, bit by bit as they are."""
    slots = [slice(*blocks[at.block].row_ptr[at.row : at.row + 2].tolist()) for at in rows]
    return EmbeddingBlock(
        ids=[at.passage_id for at in rows],
        row_ptr=np.cumsum([0, *(own.stop - own.start for own in slots)]),
        view_numbers_N=np.concatenate([blocks[at.block].view_numbers_N[own] for at, own in zip(rows, slots)]),
        vectors_ND=np.concatenate([blocks[at.block].vectors_ND[own] for at, own in zip(rows, slots)]),
    )


def arrow_rows(rows: IntArray) -> pa.Array:
    """Wrap row numbers without a copy. Arrow's own `array` imports pandas, half a second in every process."""
    rows = np.ascontiguousarray(rows, np.int64)
    return pa.Array.from_buffers(pa.int64(), len(rows), [None, pa.py_buffer(rows)])


def _finite(values: FloatArray) -> bool:
    """Return whether all are finite. Half precision is checked by its bits, ten times as fast as by numpy."""
    if values.dtype != np.float16:
        return bool(np.isfinite(values).all())
    return int((values.view(np.uint16) & 0x7FFF).max(initial=0)) < 0x7C00


def join_blocks(blocks: list[EmbeddingBlock]) -> EmbeddingBlock:
    if len(blocks) == 1:
        return blocks[0]
    counts_P = np.concatenate([np.diff(block.row_ptr) for block in blocks])
    return EmbeddingBlock(
        ids=[passage_id for block in blocks for passage_id in block.ids],
        row_ptr=np.concatenate([[0], np.cumsum(counts_P)]),
        view_numbers_N=np.concatenate([block.view_numbers_N for block in blocks]),
        vectors_ND=np.concatenate([block.vectors_ND for block in blocks]),
    )


def join_small_blocks(blocks: Iterable[EmbeddingBlock]) -> Iterator[EmbeddingBlock]:
    """Yield the same rows in blocks of 4,096 passages or more, but for the last one."""
    pending: list[EmbeddingBlock] = []
    for block in blocks:
        pending.append(block)
        if sum(len(one.ids) for one in pending) >= BATCH_PASSAGES:
            yield join_blocks(pending)
            pending = []
    if pending:
        yield join_blocks(pending)


def cut_block(block: EmbeddingBlock, start: int, stop: int) -> EmbeddingBlock:
    first, last = int(block.row_ptr[start]), int(block.row_ptr[stop])
    return EmbeddingBlock(
        ids=block.ids[start:stop],
        row_ptr=block.row_ptr[start : stop + 1] - first,
        view_numbers_N=block.view_numbers_N[first:last],
        vectors_ND=block.vectors_ND[first:last],
    )
