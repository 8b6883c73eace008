"""Hold the changes of refinement to one shard, and overlay them on its stored views.

The embeddings of a version never change: a state holds only moved views (in float32, so that small steps add up) and
feedback views; the current blocks are the version's with these overlaid, in the stored type, so that measurements
equal those of the published version.

Shapes: P passages of the shard, N their view vectors, M moved views, F new feedback views, D dimension.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from mvr_ray.checksums import without_trailer
from mvr_ray.core.searching.exact import distinct, ranks
from mvr_ray.errors import DigestError, MissingInputError, StagingError
from mvr_ray.store.delta import views_by_id
from mvr_ray.store.embeddings import BlockRow, Views, gather_rows
from mvr_ray.store.files import Store
from mvr_ray.types import EmbeddingBlock, FloatArray, IntArray

VIEW_BASE = 1 << 16  # above every view number (int16)


def read_staged(store: Store, path: str) -> bytes:
    """Read a file of unfinished refinement. Raises StagingError where it is missing, truncated or damaged."""
    try:
        return bytes(without_trailer(store.read_bytes(path), store.where(path)))
    except (DigestError, MissingInputError) as error:
        raise StagingError(f"{error}; the refinement restarts") from error


class StateId(NamedTuple):
    """Identifies a state of the index: after a round, or of a trial weight of feedback views."""

    kind: Literal["round", "weight"]
    number: int

    def folder(self, staging: str) -> str:
        """Return the path of this state in the staging folder."""
        return f"{staging}/{self.kind}-{self.number}"

    def shard_path(self, staging: str, shard: int) -> str:
        return f"{self.folder(staging)}/shard-{shard:05d}.npz"


PUBLISHED = StateId("round", 0)
"""The published version, before the first round."""


@dataclass(frozen=True)
class ShardChanges:
    """The changes of one shard after some rounds. `moved_M` are vector numbers in the shard, `feedback_F` rows,
    repeated for each new feedback view of the passage."""

    moved_M: IntArray
    moved_MD: FloatArray
    feedback_F: IntArray
    feedback_FD: FloatArray

    @classmethod
    def none(cls, dimension: int) -> "ShardChanges":
        none, empty = np.empty(0, np.int64), np.empty((0, dimension), np.float32)
        return cls(none, empty, none, empty)

    def with_moved(self, slots_M: IntArray, vectors_MD: FloatArray) -> "ShardChanges":
        """Set the vectors of these views; slots are distinct."""
        stays_M = ~np.isin(self.moved_M, slots_M)
        slots = np.concatenate([self.moved_M[stays_M], slots_M])
        vectors = np.concatenate([self.moved_MD[stays_M], vectors_MD.astype(np.float32)])
        order = np.argsort(slots, kind="stable")
        return ShardChanges(slots[order], vectors[order], self.feedback_F, self.feedback_FD)

    def with_feedback(self, rows_F: IntArray, vectors_FD: FloatArray) -> "ShardChanges":
        """Replace all feedback views by these; those of one passage keep their order."""
        order = np.argsort(rows_F, kind="stable")
        return ShardChanges(self.moved_M, self.moved_MD, rows_F[order], vectors_FD[order].astype(np.float32))

    def feedback_changes(self, other: "ShardChanges") -> IntArray:
        """Return the rows whose feedback views differ between two states: present in one only, or with another
        vector."""
        keys, other_keys = (state.feedback_F * VIEW_BASE + ranks(state.feedback_F) for state in (self, other))
        common, mine, theirs = np.intersect1d(keys, other_keys, True, return_indices=True)
        differs = (self.feedback_FD[mine] != other.feedback_FD[theirs]).any(axis=1)
        return distinct(np.concatenate([np.setxor1d(keys, other_keys, True), common[differs]]) // VIEW_BASE)

    def to_bytes(self) -> bytes:
        buffer = io.BytesIO()
        np.savez(buffer, **vars(self))
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "ShardChanges":
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            return cls(**arrays)


class StoredViews:
    """The stored views of one shard, addressed by (row, view number) and by vector number."""

    def __init__(self, blocks: Sequence[EmbeddingBlock]) -> None:
        self.blocks = list(blocks)
        self.row_start = np.cumsum([0, *(len(block.ids) for block in self.blocks)])
        self.vector_start = np.cumsum([0, *(len(block.vectors_ND) for block in self.blocks)])
        rows_N = [np.repeat(np.arange(len(b.ids)), np.diff(b.row_ptr)) + s for b, s in zip(self.blocks, self.row_start)]
        numbers_N = [block.view_numbers_N.astype(np.int64) for block in self.blocks]
        self.keys_N = (
            np.concatenate([r * VIEW_BASE + n for r, n in zip(rows_N, numbers_N)]) if blocks else np.empty(0, np.int64)
        )

    def slots(self, rows_L: IntArray, views_L: IntArray) -> IntArray:
        """Return the vector numbers of these views. Each must exist."""
        keys_L = rows_L.astype(np.int64) * VIEW_BASE + views_L
        slots_L = np.searchsorted(self.keys_N, keys_L)
        assert np.array_equal(self.keys_N[slots_L], keys_L), "a label names a view that its passage does not have"
        return slots_L

    def vectors(self, slots_M: IntArray, state: ShardChanges) -> FloatArray:
        """Return float32 copies of the current views: moved ones from the state, the rest as stored."""
        out_MD = np.empty((len(slots_M), state.moved_MD.shape[1]), np.float32)
        block_M = np.searchsorted(self.vector_start, slots_M, side="right") - 1
        for number in distinct(block_M):
            is_in_block = block_M == number
            out_MD[is_in_block] = self.blocks[number].vectors_ND[slots_M[is_in_block] - self.vector_start[number]]
        is_moved_M = np.isin(slots_M, state.moved_M)
        out_MD[is_moved_M] = state.moved_MD[np.searchsorted(state.moved_M, slots_M[is_moved_M])]
        return out_MD

    def rows(self, slots_M: IntArray) -> IntArray:
        """Return the passage of each vector."""
        return self.keys_N[slots_M] // VIEW_BASE

    def drift(self, state: ShardChanges) -> FloatArray:
        """Return the distance of each moved view from its stored vector, float64 [M]."""
        stored_MD = self.vectors(state.moved_M, ShardChanges.none(state.moved_MD.shape[1]))
        return np.linalg.norm(state.moved_MD.astype(np.float64) - stored_MD, axis=1)

    def gather(self, rows_F: IntArray) -> EmbeddingBlock:
        """Copy some passages (ascending) into one block."""
        if not len(rows_F):
            return EmbeddingBlock([], np.zeros(1, np.int64), np.empty(0, np.int16), np.empty((0, 0), np.float32))
        block_F = np.searchsorted(self.row_start, rows_F, side="right") - 1
        places = zip(block_F.tolist(), (rows_F - self.row_start[block_F]).tolist())
        return gather_rows(self.blocks, [BlockRow(self.blocks[number].ids[row], number, row) for number, row in places])

    def current(self, state: ShardChanges, num_views: int) -> list[EmbeddingBlock]:
        """Overlay the state on all blocks; a block without a change is the stored one, not a copy."""
        return [self._overlaid(number, state, num_views) for number in range(len(self.blocks))]

    def _overlaid(self, number: int, state: ShardChanges, num_views: int) -> EmbeddingBlock:
        block = self.blocks[number]
        low, high = np.searchsorted(state.moved_M, self.vector_start[number : number + 2])
        first, last = np.searchsorted(state.feedback_F, self.row_start[number : number + 2])
        if low < high:
            vectors_ND = np.array(block.vectors_ND)
            vectors_ND[state.moved_M[low:high] - self.vector_start[number]] = state.moved_MD[low:high]
            block = block._replace(vectors_ND=vectors_ND)
        if first == last:
            return block
        rows_F = state.feedback_F[first:last] - self.row_start[number]
        row_N = np.repeat(np.arange(len(block.ids)), np.diff(block.row_ptr))
        stays_N = ~(np.isin(row_N, rows_F) & (block.view_numbers_N >= num_views))
        row_N = np.concatenate([row_N[stays_N], rows_F])
        new_numbers_F = (num_views + ranks(rows_F)).astype(block.view_numbers_N.dtype)
        numbers_N = np.concatenate([block.view_numbers_N[stays_N], new_numbers_F])
        extra_FD = state.feedback_FD[first:last].astype(block.vectors_ND.dtype)
        vectors_ND = np.concatenate([block.vectors_ND[stays_N], extra_FD])
        order = np.argsort(row_N, kind="stable")  # stable: new views follow their passage's own
        counts_P = np.bincount(row_N, minlength=len(block.ids))
        row_ptr = np.concatenate([[0], np.cumsum(counts_P)]).astype(np.int64)
        return EmbeddingBlock(block.ids, row_ptr, numbers_N[order], vectors_ND[order])

    def changes(self, state: ShardChanges, current: Sequence[EmbeddingBlock]) -> dict[str, Views]:
        """Return the passages whose stored bytes differ at this state, with all their current views (`current` of the
        state)."""
        rows = distinct(np.concatenate([self.rows(state.moved_M), state.feedback_F]))
        old, new = (views_by_id([views.gather(rows)]) for views in (self, StoredViews(current)))
        return {name: new[name] for name in old if not _same_bytes(old[name], new[name])}


def _same_bytes(before: Views, after: Views) -> bool:
    same_views = np.array_equal(before.view_numbers_N, after.view_numbers_N)
    return same_views and before.vectors_ND.tobytes() == after.vectors_ND.tobytes()
