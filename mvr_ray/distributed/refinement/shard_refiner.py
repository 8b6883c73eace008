"""Refine some shards of an index version in one actor, with moved views overlaid on the stored ones in memory.

A plain class; `refiner_pool` makes actors of it. Its arguments are names and digests, never objects, and every call
names the state (`at`) that it works on: a call for another state than the one in memory first loads that state from
the staging folder. So a call may be retried in a new process at any moment, and a repeated round gives the same
result. Shards are independent: the bytes do not depend on which shards share a process.

Shapes: Q queries, K hits, L labels of one shard, M moved views, F feedback views, D dimension.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mvr_ray.checksums import with_trailer
from mvr_ray.core.judging.answers import AnswerMatcher
from mvr_ray.core.refining import aopt, feedback
from mvr_ray.core.refining.pseudo_labels import Labels, label_matrices, winning_slots
from mvr_ray.core.searching.exact import distinct
from mvr_ray.core.searching.merging import merge, replace_hits
from mvr_ray.distributed.refinement.state import PUBLISHED, ShardChanges, StateId, StoredViews, read_staged
from mvr_ray.distributed.shards import build_shard, keep_codes, shard_recall
from mvr_ray.index.base import IndexParams, ShardIndex
from mvr_ray.index.kinds import open_index
from mvr_ray.store import paths
from mvr_ray.store.changes import MAX_CHANGED_SHARE
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.delta import open_embeddings, rewrite, write_changed
from mvr_ray.store.embeddings import EmbeddingShard
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest, ShardEntry, open_shard
from mvr_ray.types import EmbeddingBlock, FloatArray, IntArray, ShardHits

FLAT = IndexParams(kind="flat")
MAX_CACHED_QUESTIONS = 1 << 18
"""Answers are matched passage by passage, for nearly all questions each time; evicted ones are prepared again."""


@dataclass(frozen=True)
class RefinerTask:
    """Arguments of a refiner. `staging` is the folder of the states, relative to the store; `starts` are the numbers of
    the shards' first passages in the whole index. A shard of which more than `compact_share` changed is written
    whole."""

    store: str
    manifest: Manifest
    staging: str
    threads: int = 1
    shards: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    compact_share: float = MAX_CHANGED_SHARE

    def with_shards(self, start_of: Mapping[int, int]) -> "RefinerTask":
        """Copy the task with these shards, each with the number of its first passage."""
        shards = tuple(sorted(start_of))
        return replace(self, shards=shards, starts=tuple(start_of[shard] for shard in shards))


class GradientSettings(NamedTuple):
    """One gradient step of the labelled views (eqs. 13 and 14)."""

    step_size: float
    guard: float
    keep_length: bool


class LinearSettings(NamedTuple):
    """The linear form (eq. 9)."""

    alpha: float
    beta: float
    gamma: float
    keep_length: bool


class FeedbackSettings(NamedTuple):
    """Feedback views: their norm relative to the passage's own views, and the maximum per passage."""

    weight: float
    clusters: int


class ShardStep(NamedTuple):
    """Result of one step on one shard. Drift is the distance of all moved vectors from the published version."""

    num_moved: int
    moved_passages: int
    loss_sum: float
    skipped_domain: int
    skipped_no_positive: int
    skipped_no_negative: int
    drift_sum: float
    drift_max: float
    num_drifted: int


class WrittenShard(NamedTuple):
    """A stored shard; `recall` where its index is approximate."""

    entry: ShardEntry
    dirty_passages: int
    recall: float | None


class ShardRefiner:
    """Searches, labels, moves and writes the shards of one task."""

    def __init__(self, task: RefinerTask) -> None:
        self.task = task
        self.store = Store(task.store)
        self.manifest = task.manifest
        self.entries = {entry.shard: entry for entry in task.manifest.shards if entry.shard in task.shards}
        self.stored = {shard: self._embeddings(shard) for shard in task.shards}
        self.views = {shard: StoredViews(embeddings.blocks()) for shard, embeddings in self.stored.items()}
        self.states: dict[int, tuple[StateId, ShardChanges]] = {}
        self.blocks: dict[int, tuple[StateId, list[EmbeddingBlock]]] = {}
        self.index: tuple[StateId, ShardIndex] | None = None
        self.ids: dict[int, list[str]] = {}
        self.matcher = AnswerMatcher(max_questions=MAX_CACHED_QUESTIONS)

    def search(self, at: StateId, queries_QD: FloatArray, k: int) -> ShardHits:
        """Search all shards of the actor exactly at a state: score descending, then passage id ascending; rows are
        numbers in the whole index.

        The scan ranks passages of equal scores by their local row. Where omitted passages tie with the last row, each
        shard is searched separately, which finds the lower ids.
        """
        hits = self._index(at).search(queries_QD, k)
        if len(self.task.shards) == 1:
            return hits._replace(rows_QK=np.where(hits.rows_QK >= 0, hits.rows_QK + self.task.starts[0], -1))
        k = hits.rows_QK.shape[1]
        merged_hits = merge(self._split(hits), k, self._ids_of_numbers)
        tied_Q = np.flatnonzero((hits.frontier_Q > -np.inf) & (hits.frontier_Q == merged_hits.scores_QK[:, -1]))
        if not len(tied_Q):
            return merged_hits
        lists = [
            (start, open_index(FLAT, self._blocks(at, shard), Path(), threads=self.task.threads))
            for shard, start in zip(self.task.shards, self.task.starts)
            if self.entries[shard].num_passages
        ]
        shard_hits = [(start, index.search(queries_QD[tied_Q], k)) for start, index in lists]
        return replace_hits(merged_hits, merge(shard_hits, k, self._ids_of_numbers), tied_Q)

    def _split(self, hits: ShardHits) -> list[tuple[int, ShardHits]]:
        """Split hits by shard: its start, and its own rows at their positions among all."""
        first = np.cumsum([0, *(self.entries[shard].num_passages for shard in self.task.shards)])
        lists = []
        for start, low, high in zip(self.task.starts, first, first[1:]):
            own_QK = (hits.rows_QK >= low) & (hits.rows_QK < high)
            lists.append(
                (
                    start,
                    ShardHits(
                        np.where(own_QK, hits.rows_QK - low, -1),
                        np.where(own_QK, hits.scores_QK, -np.inf),
                        np.where(own_QK, hits.views_QK, -1),
                        hits.frontier_Q,
                    ),
                )
            )
        return lists

    def _ids_of_numbers(self, passages: IntArray) -> list[str]:
        at = np.searchsorted(self.task.starts, passages, side="right") - 1
        rows = passages - np.array(self.task.starts)[at]
        return [self._ids(self.task.shards[place])[row] for place, row in zip(at.tolist(), rows.tolist())]

    def ids_of(self, shard: int, rows: Sequence[int]) -> list[str]:
        """Passage ids of some rows."""
        ids = self._ids(shard)
        return [ids[row] for row in rows]

    def locate(self, shard: int, ids: Sequence[str]) -> list[int]:
        """Row of each passage id, -1 where the shard does not hold it."""
        all_ids = self._ids(shard)
        rows = [bisect_left(all_ids, passage_id) for passage_id in ids]
        return [row if row < len(all_ids) and all_ids[row] == passage_id else -1 for row, passage_id in zip(rows, ids)]

    def mark(self, shard: int, row_L: IntArray, answer_L: IntArray, answers: Sequence[tuple[str, ...]]) -> np.ndarray:
        """Test whether each passage holds one of `answers[answer_L[i]]`."""
        ids, index = self._ids(shard), self.matcher.index(answers)
        marked_L = np.zeros(len(row_L), bool)
        order_L = np.argsort(row_L, kind="stable")
        rows, first = np.unique(row_L[order_L], return_index=True)
        for row, labels_of_row in zip(rows.tolist(), np.split(order_L, first[1:])):
            text = self.corpus.get([ids[row]])[ids[row]].text
            marked_L[labels_of_row] = index.marks(text, answer_L[labels_of_row])
        return marked_L

    def winners(self, at: StateId, shard: int, query_L: IntArray, row_L: IntArray, queries_QD: FloatArray) -> IntArray:
        """View number that scores best for each (query, passage) at a state."""
        state = self._state(at, shard)
        rows, inverse_L = np.unique(row_L, return_inverse=True)
        now = StoredViews(self.views[shard].current(state, self.manifest.num_views)).gather(rows)
        slot_L = winning_slots(queries_QD, now.vectors_ND, now.row_ptr, query_L, inverse_L)
        return now.view_numbers_N[slot_L]

    def query_sums(self, at: StateId, shard: int, labels: Labels, num_queries: int) -> aopt.LabelSums:
        """Compute this shard's part of each query's sums (query side, eqs. 7 and 11)."""
        slot_M, inverse_L = np.unique(self._slots(shard, labels), return_inverse=True)
        views_MD = self.views[shard].vectors(slot_M, self._state(at, shard))
        matrices = label_matrices(inverse_L, labels.question_L, labels.positive_L, len(slot_M), num_queries)
        return aopt.label_sums(views_MD, matrices.transpose())

    def move(
        self,
        at: StateId,
        to: StateId,
        shard: int,
        labels: Labels,
        queries_QD: FloatArray,
        settings: GradientSettings | LinearSettings,
    ) -> ShardStep:
        """Move the labelled views (AOpt) from state `at`, and save the result as `to`."""
        state = self._state(at, shard)
        slot_M, inverse_L = np.unique(self._slots(shard, labels), return_inverse=True)
        views_MD = self.views[shard].vectors(slot_M, state)
        matrices = label_matrices(inverse_L, labels.question_L, labels.positive_L, len(slot_M), len(queries_QD))
        match settings:
            case LinearSettings(alpha, beta, gamma, keep_length):
                step = aopt.linear_step(views_MD, queries_QD, matrices, alpha=alpha, beta=beta, gamma=gamma)
            case GradientSettings(step_size, guard, keep_length):
                step = aopt.passage_step(views_MD, queries_QD, matrices, step_size=step_size, guard=guard, single=True)
        step = step.keep_length(views_MD) if keep_length else step
        moved_M = slot_M[step.moved_M]
        state = state.with_moved(moved_M, step.vectors_MD)
        self._save(to, shard, state)
        drift_M = self.views[shard].drift(state)
        return ShardStep(
            num_moved=step.num_moved,
            moved_passages=len(distinct(self.views[shard].rows(moved_M))),
            loss_sum=step.loss * step.num_moved if step.num_moved else 0.0,
            skipped_domain=step.num_outside_domain,
            skipped_no_positive=step.num_no_positive,
            skipped_no_negative=step.num_no_negative,
            drift_sum=float(drift_M.sum()),
            drift_max=float(drift_M.max(initial=0.0)),
            num_drifted=len(drift_M),
        )

    def add_feedback(
        self,
        at: StateId,
        to: StateId,
        shard: int,
        labels: Labels,
        queries_QD: FloatArray,
        settings: FeedbackSettings,
    ) -> ShardStep:
        """Add feedback views to every positively labelled passage, and save the state as `to`.

        They replace feedback views of earlier rounds and of the base version.
        """
        state, views = self._state(at, shard), self.views[shard]
        rows_F, inverse_L = np.unique(labels.passage_L, return_inverse=True)
        block = views.gather(rows_F)
        norms_F = feedback.own_norms(block.vectors_ND, block.row_ptr, block.view_numbers_N, self.manifest.num_views)
        labels = labels._replace(passage_L=inverse_L)
        new_views = feedback.feedback_views(
            queries_QD, labels, norms_F, weight=settings.weight, clusters=settings.clusters
        )
        now = ShardChanges.none(queries_QD.shape[1]).with_feedback(rows_F[new_views.passage_F], new_views.vectors_FD)
        self._save(to, shard, now)
        changed_rows = state.feedback_changes(now)
        return ShardStep(len(changed_rows), len(changed_rows), 0.0, new_views.num_cancelled, 0, 0, 0.0, 0.0, 0)

    def write(self, at: StateId, shard: int, recall_sample: int) -> WrittenShard:
        """Write the shard at a state; returns its old entry if no stored byte differs, else a new one."""
        entry = self.entries[shard]
        changes = self.views[shard].changes(self._state(at, shard), self.manifest.num_views)
        if changes:
            with self.store.scratch() as scratch:
                folder = scratch / "shard"
                folder.mkdir()
                params, embeddings, known_files = IndexParams(**self.manifest.index_params), self.stored[shard], {}
                if params.kind != "flat":
                    rewrite(embeddings, folder / paths.EMBEDDINGS, changes)
                elif names := write_changed(embeddings, folder, changes, max_changed_share=self.task.compact_share):
                    known_files = {name: entry.files[name] for name in names}
                    known_files |= keep_codes(params, embeddings.path.parent, entry.files, folder)
                entry = build_shard(self.store, self.manifest, shard, folder, known_files)
        return WrittenShard(entry, len(changes), shard_recall(self.store, self.manifest, entry, recall_sample))

    def _embeddings(self, shard: int) -> EmbeddingShard:
        folder = open_shard(self.store, self.manifest.index, self.entries[shard])
        return open_embeddings(folder, self.entries[shard].files)

    @cached_property
    def corpus(self) -> Corpus:
        """Source of the texts. Its parts may differ from the index's shards, so passages are read by id."""
        return Corpus.open(self.store, self.manifest.corpus, self.manifest.corpus_digest)

    def _ids(self, shard: int) -> list[str]:
        if shard not in self.ids:
            self.ids[shard] = [passage_id for block in self.views[shard].blocks for passage_id in block.ids]
        return self.ids[shard]

    def _slots(self, shard: int, labels: Labels) -> IntArray:
        return self.views[shard].slots(labels.passage_L, labels.view_L)

    def _state(self, at: StateId, shard: int) -> ShardChanges:
        cache_entry = self.states.get(shard)
        if cache_entry is None or cache_entry[0] != at:
            dimension = self.manifest.dimension
            state = (
                ShardChanges.none(dimension)
                if at == PUBLISHED
                else ShardChanges.from_bytes(read_staged(self.store, at.shard_path(self.task.staging, shard)))
            )
            self.states[shard] = cache_entry = (at, state)
        return cache_entry[1]

    def _save(self, at: StateId, shard: int, state: ShardChanges) -> None:
        self.store.write_bytes(at.shard_path(self.task.staging, shard), with_trailer(state.to_bytes()))
        self.states[shard] = (at, state)

    def _blocks(self, at: StateId, shard: int) -> list[EmbeddingBlock]:
        cache_entry = self.blocks.get(shard)
        if cache_entry is None or cache_entry[0] != at:
            self.index = None  # it refers to the blocks to replace
            self.blocks.pop(shard, None)
            current = self.views[shard].current(self._state(at, shard), self.manifest.num_views)
            self.blocks[shard] = cache_entry = (at, current)
        return cache_entry[1]

    def _index(self, at: StateId) -> ShardIndex:
        """One index over all shards, so that only passages among the best of them all are scored exactly."""
        if self.index is None or self.index[0] != at:
            nonempty_shards = [shard for shard in self.task.shards if self.entries[shard].num_passages]
            blocks = [block for shard in nonempty_shards for block in self._blocks(at, shard)]
            self.index = (at, open_index(FLAT, blocks, Path(), threads=self.task.threads))
        return self.index[1]
