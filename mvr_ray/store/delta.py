"""Store a shard with few changed passages as its earlier files, and beside them a file of the changes.

    <shard>/embeddings.arrow    unchanged, byte for byte; on a local store a hard link to the same file
    <shard>/changes.arrow       every passage that differs or is new, with all its views as they are now, and in the
                                file's metadata the ids of the deleted passages
    <shard>/changes-2.arrow     later changes, which override the earlier ones; and so on

All have the same format. Searches read the files as they are (`stored_blocks`). Other readers get the shard as it would
be if it were written whole: blocks with a few changes are divided around them and stay mapped, those with many are
copied into memory. `store.changes` decides what is written.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import DTypeLike, NDArray

from mvr_ray.store import paths
from mvr_ray.store.changes import MAX_CHANGED_SHARE, Changes, changed_ids, lay_over, num_kept
from mvr_ray.store.embeddings import EmbeddingShard, EmbeddingWriter, Views, cut_block, join_blocks
from mvr_ray.store.local_files import link_or_copy
from mvr_ray.types import EmbeddingBlock, StoredBlocks

_PASSAGES_WORTH_DIVIDING = 256
"""Passages between two changes from which a block is divided around them instead of copied: copies of all blocks take
the memory of the shard."""


class DeltaShard(EmbeddingShard):
    """A shard whose changes come from other files; see `open_embeddings`."""

    change_files: Sequence[Changes[Views]]
    changes: Changes[Views]
    """Upserts in the order of ids, and deletions of passages that the first file has."""

    def set_changes(self, files: Sequence[Changes[Views]]) -> None:
        self.change_files = files
        upserts, deletions = Changes.join(files)
        upserts = {name: upserts[name] for name in sorted(upserts)}
        self.changes = Changes(upserts, _common_ids(deletions, super().arrow_ids()))
        hidden_P = self._hidden_rows()
        self.num_passages += len(upserts) - int(hidden_P.sum())
        self.num_vectors += sum(len(views.view_numbers_N) for views in upserts.values())
        self.num_vectors -= int(self.num_views_by_row()[hidden_P].sum())

    def _hidden_rows(self) -> NDArray[np.bool_]:
        """Return for each passage of the first file whether it is replaced or deleted."""
        hidden_ids = pa.array(list(self.changes.ids()), pa.string())
        return np.asarray(pc.is_in(super().arrow_ids(), value_set=hidden_ids), bool)  # pyrefly: ignore

    def iter_blocks(self) -> Iterator[EmbeddingBlock]:
        """Yield all rows, with the changes."""
        return changed_blocks(super().iter_blocks(), *self.changes)

    def arrow_ids(self) -> pa.ChunkedArray:
        return pa.chunked_array([pa.array(self.ids(), pa.string())])

    def ids(self) -> list[str]:
        """Read the ids alone: blocks would copy the vectors beside them."""
        return changed_ids(super().ids(), *self.changes)

    def stored_blocks(self) -> StoredBlocks:
        """Return the blocks of the first file, then one with the upserts."""
        ids, hidden_P, blocks = self.ids(), self._hidden_rows(), list(super().iter_blocks())
        is_changed_P = np.zeros(self.num_passages, bool)
        is_changed_P[[bisect_left(ids, name) for name in self.changes.upserts]] = True
        row_P = np.full(len(hidden_P), -1)
        row_P[~hidden_P] = np.flatnonzero(~is_changed_P)
        edges = np.cumsum([0, *(len(block.ids) for block in blocks)])
        rows = [row_P[low:high] for low, high in pairwise(edges)]
        if self.changes.upserts:
            blocks.append(_join_views(self.changes.upserts))
            rows.append(np.flatnonzero(is_changed_P))
        return StoredBlocks(blocks, rows)

    def find(self, passage_ids: Iterable[str]) -> dict[str, Views]:
        upserts, ids = self.changes.upserts, list(passage_ids)
        now = {name: Views(own[0].copy(), own[1].copy()) for name in ids if (own := upserts.get(name))}
        hidden_ids = {*now, *self.changes.deletions}
        return {**super().find(name for name in ids if name not in hidden_ids), **now}


def open_embeddings(folder: Path, files: Collection[str]) -> EmbeddingShard:
    """Open the embeddings of a shard that consists of these files, which are known to be whole."""
    changes = [EmbeddingShard.open(folder / name) for name in paths.changes_files(files)]
    if not changes:
        return EmbeddingShard.open(folder / paths.EMBEDDINGS)
    shard = DeltaShard.open(folder / paths.EMBEDDINGS)
    shard.set_changes([Changes(views_by_id(file.blocks()), set(file.deleted_ids)) for file in changes])
    return shard


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
    blocks = list(blocks) or [cut_block(_to_block(*row), 0, 0) for row in islice(upserts.items(), 1)]
    return lay_over(
        blocks,
        Changes(dict(upserts), set(deleted_ids)),
        ids_of=lambda block: block.ids,
        piece_of=lambda name, views: _to_block(name, views, blocks[0].vectors_ND.dtype),
        cut=cut_block,
        join=join_blocks,
        rows_worth_dividing=_PASSAGES_WORTH_DIVIDING,
    )


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
    files = shard.change_files if isinstance(shard, DeltaShard) else []
    num_files = num_kept([len(file.ids()) for file in files], len(upserts) + len(deleted_ids))
    before = Changes.join(files[:num_files])
    new = Changes.join([*files[num_files:], Changes(dict(upserts), set(deleted_ids))])
    since_first = Changes.join([before, new])
    base = EmbeddingShard.open(shard.path)
    deletions = _common_ids(since_first.deletions, base.arrow_ids())
    if len(since_first.upserts) + len(deletions) > max_changed_share * base.num_passages:
        rewrite(shard, folder / paths.EMBEDDINGS, upserts, deleted_ids)
        return []
    names = [paths.EMBEDDINGS, *(paths.changes_file(number) for number in range(1, num_files + 1))]
    for name in names:
        link_or_copy(shard.path.with_name(name), folder / name)
    missing_ids = sorted(new.deletions & (deletions - before.deletions).union(before.upserts))
    path = folder / paths.changes_file(len(names))
    with EmbeddingWriter(path, shard.dimension, shard.num_views, shard.dtype, missing_ids) as writer:
        if new.upserts:
            writer.write(_join_views(dict(sorted(new.upserts.items()))))
    return names


def _join_views(views_by_id: Mapping[str, Views]) -> EmbeddingBlock:
    """Copy passages, in order of ids, into a block."""
    numbers, vectors = zip(*views_by_id.values())
    row_ptr = np.cumsum([0, *map(len, numbers)])
    return EmbeddingBlock(list(views_by_id), row_ptr, np.concatenate(numbers), np.concatenate(vectors))


def _to_block(name: str, views: Views, dtype: DTypeLike | None = None) -> EmbeddingBlock:
    numbers_N, vectors_ND = np.asarray(views.view_numbers_N, np.int16), np.asarray(views.vectors_ND, dtype)
    return EmbeddingBlock([name], np.array([0, len(numbers_N)], np.int64), numbers_N, vectors_ND)


def _common_ids(ids: Collection[str], others: pa.ChunkedArray) -> set[str]:
    """Return the ids that are among others."""
    own = pa.array(list(ids), pa.string())
    return set(others.filter(pc.is_in(others, value_set=own)).to_pylist())  # pyrefly: ignore
