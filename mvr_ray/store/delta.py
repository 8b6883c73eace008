"""Store a shard with few changed passages as its earlier file, and beside it a file of the changed passages.

    <shard>/embeddings.arrow    as it was, byte for byte; on a local store another name of the same file
    <shard>/changes.arrow       every passage that differs, with all its views as they are now

Both have the same format. Readers get the changed passages in place of the old ones; blocks that hold any are copied
into memory, the others stay mapped. Later changes also go beside the first file; when they are more than `MOST_SHARE`
of the passages, the shard is written again.
"""

import bisect
import os
import shutil
from collections.abc import Collection, Iterable
from functools import cached_property
from pathlib import Path

import numpy as np

from mvr_ray.store import paths
from mvr_ray.store.embeddings import Changes, EmbeddingShard, EmbeddingWriter, Views, changed_block, rewrite
from mvr_ray.types import EmbeddingBlock, FloatArray, IntArray

MOST_SHARE = 0.25


class DeltaShard(EmbeddingShard):
    """A shard whose changed passages come from a second file; see `open_embeddings`."""

    delta: EmbeddingShard

    def lay_over(self, delta: EmbeddingShard) -> None:
        self.delta = delta
        self.num_vectors += delta.num_vectors - self.num_views_of(delta.arrow_ids())

    @cached_property
    def _changed_views(self) -> dict[str, Views]:
        return passages_of(self.delta)

    @cached_property
    def _changed_ids(self) -> list[str]:
        return list(self._changed_views)

    def blocks(self) -> list[EmbeddingBlock]:
        """Return all rows, with the changes."""
        return [self._lay_over(block) for block in super().blocks()]

    def find(self, passage_ids: Iterable[str]) -> dict[str, Views]:
        ids = list(passage_ids)
        now = self.delta.find(ids)
        return {**super().find(passage_id for passage_id in ids if passage_id not in now), **now}

    def _lay_over(self, block: EmbeddingBlock) -> EmbeddingBlock:
        low = bisect.bisect_left(self._changed_ids, block.ids[0])
        high = bisect.bisect_right(self._changed_ids, block.ids[-1])
        here = self._changed_ids[low:high]
        return changed_block(
            block, 0, {bisect.bisect_left(block.ids, name): self._changed_views[name] for name in here}
        )


def open_embeddings(folder: Path, files: Collection[str]) -> EmbeddingShard:
    """Open the embeddings of a shard that consists of these files, which are known to be whole."""
    path = folder / paths.EMBEDDINGS
    if paths.CHANGES not in files:
        return EmbeddingShard.open(path)
    shard = DeltaShard.open(path)
    shard.lay_over(EmbeddingShard.open(folder / paths.CHANGES))
    return shard


def passages_of(shard: EmbeddingShard) -> dict[str, Views]:
    """Return every passage with its views, in order; the vectors stay mapped."""
    return {
        name: Views(block.view_numbers_N[start:stop], block.vectors_ND[start:stop])
        for block in shard.blocks()
        for name, start, stop in zip(block.ids, block.row_ptr.tolist(), block.row_ptr[1:].tolist())
    }


def write_changed(shard: EmbeddingShard, folder: Path, changes: Changes) -> bool:
    """Write the files of a shard in which the rows of `changes` have the views given there, and no others.

    True where the first file is as it was, so that its digest is known.
    """
    assert changes, "a shard without a change is the one that is there"
    before = shard.delta if isinstance(shard, DeltaShard) else None
    laid_over = len(changes) + (before.num_passages if before else 0)
    if laid_over > MOST_SHARE * shard.num_passages:
        rewrite(shard, folder / paths.EMBEDDINGS, changes)
        return False
    same_file(shard.path, folder / paths.EMBEDDINGS)
    now: dict[str, tuple[IntArray, FloatArray]] = {**(passages_of(before) if before else {})}
    now.update(zip(shard.ids_of(list(changes)), changes.values()))
    names = sorted(now)
    counts = [len(now[name][0]) for name in names]
    with EmbeddingWriter(folder / paths.CHANGES, shard.dimension, shard.num_views, shard.dtype) as writer:
        writer.write(
            EmbeddingBlock(
                names,
                np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
                np.concatenate([now[name][0] for name in names]),
                np.concatenate([now[name][1] for name in names]),
            )
        )
    return True


def same_file(source: Path, target: Path) -> None:
    """Link a file that never changes under another name; copy it where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
