"""Store a shard with few changed passages as its earlier files, and beside them a file of the changes.

    <shard>/embeddings.arrow    unchanged, byte for byte; on a local store a hard link to the same file
    <shard>/changes.arrow       every passage that differs or is new, with all its views as they are now, and in the
                                file's metadata the ids of the deleted passages
    <shard>/changes-2.arrow     later changes, which override the earlier ones; and so on

All have the same format. Readers get the shard as it would be if it were written whole: blocks with a few changes are
divided around them and stay mapped, those with many are copied into memory. An update writes in proportion to what it
changes: only files of changes that are about as small are written again with the new ones (`num_kept`). When all
changes are more than a share of the first file's passages, the shard is written whole.
"""

import bisect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mvr_ray.store import paths
from mvr_ray.store.embeddings import EmbeddingShard, EmbeddingWriter, Views, cut_block, join_blocks
from mvr_ray.store.files import link_or_copy
from mvr_ray.types import EmbeddingBlock, IntArray

MAX_CHANGED_SHARE = 0.25
_PASSAGES_WORTH_DIVIDING = 256
"""Passages between two changes from which a block is divided around them instead of copied. A scan takes 17 us longer
for each part; copies of all blocks take the memory of the shard."""


class ViewChanges:
    """The merged content of files of changes; later files override earlier ones."""

    def __init__(self, files: Sequence[EmbeddingShard]) -> None:
        self.files = files
        self._file_of: dict[str, EmbeddingShard] = {}
        deletions: set[str] = set()
        for file in files:
            deletions.update(file.deleted_ids)
            for name in file.deleted_ids:
                self._file_of.pop(name, None)
            self._file_of.update(dict.fromkeys(file.ids(), file))
        self.deleted_ids = sorted(deletions - self._file_of.keys())
        self.ids = sorted(self._file_of)

    def __len__(self) -> int:
        return len(self.ids) + len(self.deleted_ids)

    def views(self) -> dict[str, Views]:
        """Return every new or changed passage with its views, in order of id; the vectors are not copied."""
        views_of_file = [(file, views_by_id(file.blocks())) for file in self.files]
        views = {name: own[name] for file, own in views_of_file for name in own if self._file_of.get(name) is file}
        return {name: views[name] for name in self.ids}

    def num_vectors(self) -> int:
        return sum(file.num_views_of(pa.chunked_array([self._ids_in(file)])) for file in self.files)

    def find(self, names: Iterable[str]) -> dict[str, Views]:
        """Copy the views of those of the passages that are new or changed."""
        changed_names = [name for name in names if name in self._file_of]
        views: dict[str, Views] = {}
        for file in self.files:
            views |= file.find(name for name in changed_names if self._file_of[name] is file)
        return views

    def _ids_in(self, file: EmbeddingShard) -> pa.Array:
        return pa.array([name for name, own in self._file_of.items() if own is file], pa.string())


class DeltaShard(EmbeddingShard):
    """A shard whose changes come from other files; see `open_embeddings`."""

    changes: ViewChanges

    def set_changes(self, changes: ViewChanges) -> None:
        self.changes = changes
        changes.deleted_ids = _common_ids(pa.array(changes.deleted_ids, pa.string()), super().arrow_ids())
        hidden_ids = pa.chunked_array([pa.array([*changes.ids, *changes.deleted_ids], pa.string())])
        self.num_passages += len(changes.ids) - len(_common_ids(hidden_ids, super().arrow_ids()))
        self.num_vectors += changes.num_vectors() - self.num_views_of(hidden_ids)

    @cached_property
    def _upserts(self) -> dict[str, Views]:
        return self.changes.views()

    def blocks(self) -> list[EmbeddingBlock]:
        """Return all rows, with the changes."""
        return list(changed_blocks(super().blocks(), self._upserts, self.changes.deleted_ids))

    def arrow_ids(self) -> pa.ChunkedArray:
        return pa.chunked_array([pa.array(self.ids(), pa.string())])

    def ids(self) -> list[str]:
        """Read the ids alone: blocks would copy the vectors beside them."""
        return changed_ids(super().ids(), self.changes.ids, self.changes.deleted_ids)

    def first_rows(self) -> IntArray:
        hidden_ids = pa.array([*self.changes.ids, *self.changes.deleted_ids], pa.string())
        stays_P = ~np.asarray(pc.is_in(super().arrow_ids(), value_set=hidden_ids), bool)  # pyrefly: ignore
        first_counts_P = self.num_views_by_row()
        counts_P = np.zeros(self.num_passages, np.int64)
        is_changed_P = np.zeros(self.num_passages, bool)
        is_changed_P[np.searchsorted(self.ids(), self.changes.ids)] = True
        counts_P[is_changed_P] = [len(views.view_numbers_N) for views in self._upserts.values()]
        counts_P[~is_changed_P] = first_counts_P[stays_P]
        rows_N = np.full(self.num_vectors, -1)
        rows_N[np.repeat(~is_changed_P, counts_P)] = np.flatnonzero(np.repeat(stays_P, first_counts_P))
        return rows_N

    def find(self, passage_ids: Iterable[str]) -> dict[str, Views]:
        ids = list(passage_ids)
        now = self.changes.find(ids)
        hidden_ids = {*now, *self.changes.deleted_ids}
        return {**super().find(passage_id for passage_id in ids if passage_id not in hidden_ids), **now}


def open_embeddings(folder: Path, files: Collection[str]) -> EmbeddingShard:
    """Open the embeddings of a shard that consists of these files, which are known to be whole."""
    return _open(folder, paths.changes_files(files))


def _open(folder: Path, changes: Sequence[str]) -> EmbeddingShard:
    if not changes:
        return EmbeddingShard.open(folder / paths.EMBEDDINGS)
    shard = DeltaShard.open(folder / paths.EMBEDDINGS)
    shard.set_changes(ViewChanges([EmbeddingShard.open(folder / name) for name in changes]))
    return shard


def num_kept(sizes: Sequence[int], num_changes: int) -> int:
    """Return how many of the first files of changes, of `sizes` changes each, stay unchanged when others are added.

    The files after them are written again with the new changes. A file that stays is more than one and a half times as
    large as the next one, so there are few, and a change is written again only into a file that is two thirds larger.
    """
    num_files = len(sizes)
    while num_files and 2 * sizes[num_files - 1] <= 3 * num_changes:
        num_files -= 1
        num_changes += sizes[num_files]
    return num_files


def changed_ids(ids: list[str], upserts: Iterable[str], deleted_ids: Iterable[str]) -> list[str]:
    """Return ascending ids with `upserts` added and `deleted_ids` removed; copies the ids between changes as slices."""
    upsert_ids = {*upserts}
    result: list[str] = []
    row = 0
    for name in sorted({*upsert_ids, *deleted_ids}):
        at = bisect.bisect_left(ids, name, row)
        result += ids[row:at]
        row = at + (at < len(ids) and ids[at] == name)
        if name in upsert_ids:
            result.append(name)
    return result + ids[row:]


def views_by_id(blocks: Iterable[EmbeddingBlock]) -> dict[str, Views]:
    """Return every passage with its views, in order; the vectors are not copied."""
    return {
        name: Views(block.view_numbers_N[start:stop], block.vectors_ND[start:stop])
        for block in blocks
        for name, start, stop in zip(block.ids, block.row_ptr.tolist(), block.row_ptr[1:].tolist())
    }


def changed_blocks(
    blocks: Iterable[EmbeddingBlock], upserts: Mapping[str, Views], deleted_ids: Collection[str]
) -> Iterator[EmbeddingBlock]:
    """Yield the rows of `blocks` in order of id, with the views of `upserts` in place of theirs or beside them, and
    without `deleted_ids`. A block without a change is not copied."""
    names = sorted({*upserts, *deleted_ids})
    blocks = list(blocks) or [_empty_block(views) for views in islice(upserts.values(), 1)]
    starts = [0, *(bisect.bisect_left(names, block.ids[0]) for block in blocks[1:]), len(names)]
    for block, low, high in zip(blocks, starts, starts[1:]):
        parts = list(_divide(block, names[low:high], upserts))
        is_divided = (high - low) * _PASSAGES_WORTH_DIVIDING <= len(block.ids)
        yield from parts if is_divided or len(parts) < 2 else [join_blocks(parts)]


def _empty_block(views: Views) -> EmbeddingBlock:
    return EmbeddingBlock([], np.zeros(1, np.int64), views.view_numbers_N[:0], views.vectors_ND[:0])


def _divide(block: EmbeddingBlock, names: list[str], upserts: Mapping[str, Views]) -> Iterator[EmbeddingBlock]:
    """Yield the parts of a block around `names`, ascending, and between them the views that `upserts` has of each name;
    a name without views there is deleted. The vectors are not copied."""
    row = 0
    for name in names:
        at = bisect.bisect_left(block.ids, name, row)
        if row < at:
            yield cut_block(block, row, at)
        row = at + (at < len(block.ids) and block.ids[at] == name)
        if views := upserts.get(name):
            row_ptr = np.array([0, len(views.view_numbers_N)], np.int64)
            numbers_N = np.asarray(views.view_numbers_N, np.int16)
            yield EmbeddingBlock([name], row_ptr, numbers_N, np.asarray(views.vectors_ND, block.vectors_ND.dtype))
    if row < len(block.ids):
        yield cut_block(block, row, len(block.ids)) if row else block


def rewrite(shard: EmbeddingShard, path: Path, upserts: Mapping[str, Views], deleted_ids: Collection[str] = ()) -> None:
    """Write a whole copy of a shard with these changes."""
    with EmbeddingWriter(path, shard.dimension, shard.num_views, shard.dtype) as writer:
        for block in changed_blocks(shard.blocks(), upserts, deleted_ids):
            writer.write(block)


def write_changed(
    shard: EmbeddingShard,
    folder: Path,
    upserts: Mapping[str, Views],
    deleted_ids: Collection[str] = (),
    max_changed_share: float = MAX_CHANGED_SHARE,
) -> list[str]:
    """Write the files of a shard in which the passages of `upserts` have the views given there, and no others, and
    without those of `deleted_ids`.

    Returns the names of the files that are reused from `shard`, so that their digests are known; none if the changes
    since the first file exceed `max_changed_share` of its passages, and the shard was written whole.
    """
    assert upserts or deleted_ids, "the shard has no change to write"
    files = shard.changes.files if isinstance(shard, DeltaShard) else []
    sizes = [file.num_passages + len(file.deleted_ids) for file in files]
    num_files = num_kept(sizes, len(upserts) + len(deleted_ids))
    below = _open(shard.path.parent, [file.path.name for file in files[:num_files]])
    rest = ViewChanges(files[num_files:])
    missing_ids = pa.array(sorted({*rest.deleted_ids, *deleted_ids} - upserts.keys()), pa.string())
    missing_ids = _common_ids(missing_ids, below.arrow_ids())
    views = {**{name: own for name, own in rest.views().items() if name not in deleted_ids}, **upserts}
    base = EmbeddingShard.open(shard.path)
    before = below.changes if isinstance(below, DeltaShard) else ViewChanges([])
    hidden_ids = _common_ids(pa.array([*before.deleted_ids, *missing_ids], pa.string()), base.arrow_ids())
    if len({*before.ids, *views}.difference(missing_ids).union(hidden_ids)) > max_changed_share * base.num_passages:
        rewrite(shard, folder / paths.EMBEDDINGS, upserts, deleted_ids)
        return []
    names = [paths.EMBEDDINGS, *(file.path.name for file in files[:num_files])]
    for name in names:
        link_or_copy(shard.path.with_name(name), folder / name)
    path = folder / paths.changes_file(len(names))
    with EmbeddingWriter(path, shard.dimension, shard.num_views, shard.dtype, missing_ids) as writer:
        if views:
            writer.write(_to_block({name: views[name] for name in sorted(views)}))
    return names


def _to_block(passages: Mapping[str, Views]) -> EmbeddingBlock:
    """Join the passages with their views into one block of float32."""
    counts = [len(views.view_numbers_N) for views in passages.values()]
    return EmbeddingBlock(
        list(passages),
        np.cumsum([0, *counts]),
        np.concatenate([views.view_numbers_N for views in passages.values()]),
        np.concatenate([np.asarray(views.vectors_ND, np.float32) for views in passages.values()]),
    )


def num_changes(shard: EmbeddingShard) -> int:
    """Count the passages that the other files change or hide; 0 for a shard without one."""
    return len(shard.changes) if isinstance(shard, DeltaShard) else 0


def _common_ids(ids: pa.Array | pa.ChunkedArray, others: pa.ChunkedArray) -> list[str]:
    """Return the ids that are among others."""
    return ids.filter(pc.is_in(ids, value_set=others)).to_pylist()  # pyrefly: ignore
