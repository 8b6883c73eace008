"""Store a shard with few changed passages as its earlier file, and beside it a file of the changes.

    <shard>/embeddings.arrow    as it was, byte for byte; on a local store another name of the same file
    <shard>/changes.arrow       every passage that differs or is new, with all its views as they are now, and in the
                                file's metadata the ids of the passages that are gone

Both have the same format. Readers get the shard as it would be if it were written whole: blocks with a few changes are
divided around them and stay mapped, those with many are copied into memory. Later changes also go beside the first
file; when they are more than a share of its passages, the shard is written whole.
"""

import bisect
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mvr_ray.store import paths
from mvr_ray.store.embeddings import EmbeddingShard, EmbeddingWriter, Views, cut_block, join_blocks
from mvr_ray.store.files import same_file
from mvr_ray.types import EmbeddingBlock

MOST_SHARE = 0.25
_PASSAGES_WORTH_DIVIDING = 256
"""A block is divided around its changes where so many of its passages are between two of them, else copied. A scan
takes 17 us longer for each part; copies of all blocks take the memory of the shard."""


class DeltaShard(EmbeddingShard):
    """A shard whose changes come from a second file; see `open_embeddings`."""

    delta: EmbeddingShard

    def lay_over(self, delta: EmbeddingShard) -> None:
        self.delta = delta
        hidden = pa.chunked_array([*delta.arrow_ids().chunks, pa.array(delta.deleted_ids, pa.string())])
        self.num_passages += delta.num_passages - len(_common_ids(hidden, super().arrow_ids()))
        self.num_vectors += delta.num_vectors - self.num_views_of(hidden)

    @cached_property
    def _upserts(self) -> dict[str, Views]:
        return views_by_id(self.delta.blocks())

    def blocks(self) -> list[EmbeddingBlock]:
        """Return all rows, with the changes."""
        return list(changed_blocks(super().blocks(), self._upserts, self.delta.deleted_ids))

    def arrow_ids(self) -> pa.ChunkedArray:
        return pa.chunked_array([pa.array(self.ids(), pa.string())])

    def ids(self) -> list[str]:
        """Read the ids alone: blocks would copy the vectors beside them."""
        return changed_ids(super().ids(), self.delta.ids(), self.delta.deleted_ids)

    def find(self, passage_ids: Iterable[str]) -> dict[str, Views]:
        ids = list(passage_ids)
        now = self.delta.find(ids)
        hidden = {*now, *self.delta.deleted_ids}
        return {**super().find(passage_id for passage_id in ids if passage_id not in hidden), **now}


def open_embeddings(folder: Path, files: Collection[str]) -> EmbeddingShard:
    """Open the embeddings of a shard that consists of these files, which are known to be whole."""
    path = folder / paths.EMBEDDINGS
    if paths.CHANGES not in files:
        return EmbeddingShard.open(path)
    shard = DeltaShard.open(path)
    shard.lay_over(EmbeddingShard.open(folder / paths.CHANGES))
    return shard


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
) -> bool:
    """Write the files of a shard in which the passages of `upserts` have the views given there, and no others, and
    those of `deleted_ids` are gone.

    True where the first file is as it was, so that its digest is known; False where the changes since that file are
    more than `most_share` of its passages, and it was written whole.
    """
    assert upserts or deleted_ids, "a shard without a change is the one that is there"
    before = shard.delta if isinstance(shard, DeltaShard) else None
    base = EmbeddingShard.open(shard.path)
    now = {**(views_by_id(before.blocks()) if before else {}), **upserts}
    gone = {*(before.deleted_ids if before else ()), *deleted_ids}
    gone = set(_common_ids(pa.array(sorted(gone), pa.string()), base.arrow_ids())) - set(upserts)
    now = {name: now[name] for name in sorted(now) if name in upserts or name not in {*gone, *deleted_ids}}
    if len(now) + len(gone) > most_share * base.num_passages:
        rewrite(shard, folder / paths.EMBEDDINGS, upserts, deleted_ids)
        return False
    same_file(shard.path, folder / paths.EMBEDDINGS)
    with EmbeddingWriter(folder / paths.CHANGES, shard.dimension, shard.num_views, shard.dtype, sorted(gone)) as writer:
        if now:
            counts = [len(views.view_numbers_N) for views in now.values()]
            writer.write(
                EmbeddingBlock(
                    list(now),
                    np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
                    np.concatenate([views.view_numbers_N for views in now.values()]),
                    np.concatenate([np.asarray(views.vectors_ND, np.float32) for views in now.values()]),
                )
            )
    return True


def num_changes(shard: EmbeddingShard) -> int:
    """Count the passages that the second file changes or hides; 0 for a shard without one."""
    return shard.delta.num_passages + len(shard.delta.deleted_ids) if isinstance(shard, DeltaShard) else 0


def _common_ids(ids: pa.Array | pa.ChunkedArray, others: pa.ChunkedArray) -> list[str]:
    """The ids that are among others."""
    return ids.filter(pc.is_in(ids, value_set=others)).to_pylist()  # pyrefly: ignore
