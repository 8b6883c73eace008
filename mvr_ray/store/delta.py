"""Store a shard with few changed passages as its earlier files, and beside them a file of the changes.

    <shard>/embeddings.arrow    as it was, byte for byte; on a local store another name of the same file
    <shard>/changes.arrow       every passage that differs or is new, with all its views as they are now, and in the
                                file's metadata the ids of the passages that are gone
    <shard>/changes-2.arrow     later changes, laid over those before; and so on

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
from mvr_ray.store.files import same_file
from mvr_ray.types import EmbeddingBlock, IntArray

MOST_SHARE = 0.25
_PASSAGES_WORTH_DIVIDING = 256
"""A block is divided around its changes where so many of its passages are between two of them, else copied. A scan
takes 17 us longer for each part; copies of all blocks take the memory of the shard."""


class ViewChanges:
    """What files of changes come to, later ones laid over earlier ones."""

    def __init__(self, files: Sequence[EmbeddingShard]) -> None:
        self.files = files
        self._file_of: dict[str, EmbeddingShard] = {}
        gone: set[str] = set()
        for file in files:
            gone.update(file.deleted_ids)
            for name in file.deleted_ids:
                self._file_of.pop(name, None)
            self._file_of.update(dict.fromkeys(file.ids(), file))
        self.deleted_ids = sorted(gone - self._file_of.keys())
        self.ids = sorted(self._file_of)

    def __len__(self) -> int:
        return len(self.ids) + len(self.deleted_ids)

    def views(self) -> dict[str, Views]:
        """Every new or changed passage with its views, in order of id; the vectors are not copied."""
        found = [(file, views_by_id(file.blocks())) for file in self.files]
        views = {name: own[name] for file, own in found for name in own if self._file_of.get(name) is file}
        return {name: views[name] for name in self.ids}

    def num_vectors(self) -> int:
        return sum(file.num_views_of(pa.chunked_array([self._ids_in(file)])) for file in self.files)

    def find(self, names: Iterable[str]) -> dict[str, Views]:
        """Copy the views of those of the passages that are new or changed."""
        wanted = [name for name in names if name in self._file_of]
        found: dict[str, Views] = {}
        for file in self.files:
            found |= file.find(name for name in wanted if self._file_of[name] is file)
        return found

    def _ids_in(self, file: EmbeddingShard) -> pa.Array:
        return pa.array([name for name, own in self._file_of.items() if own is file], pa.string())


class DeltaShard(EmbeddingShard):
    """A shard whose changes come from other files; see `open_embeddings`."""

    changes: ViewChanges

    def lay_over(self, changes: ViewChanges) -> None:
        self.changes = changes
        changes.deleted_ids = _common_ids(pa.array(changes.deleted_ids, pa.string()), super().arrow_ids())
        hidden = pa.chunked_array([pa.array([*changes.ids, *changes.deleted_ids], pa.string())])
        self.num_passages += len(changes.ids) - len(_common_ids(hidden, super().arrow_ids()))
        self.num_vectors += changes.num_vectors() - self.num_views_of(hidden)

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
        hidden = pa.array([*self.changes.ids, *self.changes.deleted_ids], pa.string())
        stays_P = ~np.asarray(pc.is_in(super().arrow_ids(), value_set=hidden), bool)  # pyrefly: ignore
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
        hidden = {*now, *self.changes.deleted_ids}
        return {**super().find(passage_id for passage_id in ids if passage_id not in hidden), **now}


def open_embeddings(folder: Path, files: Collection[str]) -> EmbeddingShard:
    """Open the embeddings of a shard that consists of these files, which are known to be whole."""
    return _open(folder, paths.changes_files(files))


def _open(folder: Path, changes: Sequence[str]) -> EmbeddingShard:
    if not changes:
        return EmbeddingShard.open(folder / paths.EMBEDDINGS)
    shard = DeltaShard.open(folder / paths.EMBEDDINGS)
    shard.lay_over(ViewChanges([EmbeddingShard.open(folder / name) for name in changes]))
    return shard


def num_kept(sizes: Sequence[int], num_changes: int) -> int:
    """How many files of changes, of so many changes each, stay as they are where others come: the first ones.

    Those after them are written again with the new changes. A file that stays is more than one and a half times as
    large as the next one, so there are few, and a change is written again only into a file that is two thirds larger.
    """
    kept = len(sizes)
    while kept and 2 * sizes[kept - 1] <= 3 * num_changes:
        kept -= 1
        num_changes += sizes[kept]
    return kept


def changed_ids(ids: list[str], upserts: Iterable[str], deleted_ids: Iterable[str]) -> list[str]:
    """Return ascending ids with these among them and without those. Takes no time for ids between changes."""
    added = {*upserts}
    changed: list[str] = []
    row = 0
    for name in sorted({*added, *deleted_ids}):
        at = bisect.bisect_left(ids, name, row)
        changed += ids[row:at]
        row = at + (at < len(ids) and ids[at] == name)
        if name in added:
            changed.append(name)
    return changed + ids[row:]


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
    without `deleted_ids`. A block without a change is the one given."""
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
    """Parts of a block around `names`, ascending, and the new ones between them: each has the views of `upserts`, or is
    gone where it has none there. The vectors are not copied."""
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
    most_share: float = MOST_SHARE,
) -> list[str]:
    """Write the files of a shard in which the passages of `upserts` have the views given there, and no others, and
    those of `deleted_ids` are gone.

    Returns the names of the files that are those of `shard`, so that their digests are known; none where the changes
    since the first file are more than `most_share` of its passages, and it was written whole.
    """
    assert upserts or deleted_ids, "a shard without a change is the one that is there"
    files = shard.changes.files if isinstance(shard, DeltaShard) else []
    sizes = [file.num_passages + len(file.deleted_ids) for file in files]
    kept = num_kept(sizes, len(upserts) + len(deleted_ids))
    below = _open(shard.path.parent, [file.path.name for file in files[:kept]])
    rest = ViewChanges(files[kept:])
    gone = pa.array(sorted({*rest.deleted_ids, *deleted_ids} - upserts.keys()), pa.string())
    gone = _common_ids(gone, below.arrow_ids())
    now = {**{name: views for name, views in rest.views().items() if name not in deleted_ids}, **upserts}
    base = EmbeddingShard.open(shard.path)
    before = below.changes if isinstance(below, DeltaShard) else ViewChanges([])
    hidden = _common_ids(pa.array([*before.deleted_ids, *gone], pa.string()), base.arrow_ids())
    if len({*before.ids, *now}.difference(gone).union(hidden)) > most_share * base.num_passages:
        rewrite(shard, folder / paths.EMBEDDINGS, upserts, deleted_ids)
        return []
    names = [paths.EMBEDDINGS, *(file.path.name for file in files[:kept])]
    for name in names:
        same_file(shard.path.with_name(name), folder / name)
    path = folder / paths.changes_file(len(names))
    with EmbeddingWriter(path, shard.dimension, shard.num_views, shard.dtype, gone) as writer:
        if now:
            writer.write(_to_block({name: now[name] for name in sorted(now)}))
    return names


def _to_block(passages: Mapping[str, Views]) -> EmbeddingBlock:
    """The passages with their views as one block of float32."""
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
    """The ids that are among others."""
    return ids.filter(pc.is_in(ids, value_set=others)).to_pylist()  # pyrefly: ignore
