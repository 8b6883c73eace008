"""Refine some shards of an index version in one actor, with moved views overlaid on the stored ones in memory.

A plain class; `refiner_pool` makes actors of it. Its arguments are names and digests, never objects, and every call
names the state (`at`) that it works on: a call for another state than the one in memory first loads that state from
the staging folder. So a call may be retried in a new process at any moment, and a repeated round gives the same
result. Shards are independent: the bytes do not depend on which shards share a process.

Shapes: Q queries, K hits, L labels of one shard, M moved views, F feedback views, D dimension.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mvr_ray.checksums import with_trailer
from mvr_ray.config import RefineConfig
from mvr_ray.core.judging.answers import AnswerMatcher, Match
from mvr_ray.core.refining import aopt, feedback
from mvr_ray.core.refining.pseudo_labels import Labels, label_matrices, winning_view_numbers
from mvr_ray.core.refining.refine_policy import ONE_SHOT
from mvr_ray.core.searching.exact import distinct
from mvr_ray.distributed.indexing import shards
from mvr_ray.distributed.refinement.state import PUBLISHED, ShardChanges, StateId, StoredViews, read_staged
from mvr_ray.errors import ConfigError
from mvr_ray.index.base import IndexParams, ShardIndex
from mvr_ray.index.kinds import open_index
from mvr_ray.store import paths
from mvr_ray.store.changes import MAX_CHANGED_SHARE
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.delta import rewrite, write_changed
from mvr_ray.store.embeddings import Dtype
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest
from mvr_ray.types import EmbeddingBlock, FloatArray, IntArray, ShardHits

MAX_CACHED_QUESTIONS = 1 << 18
"""Answers are matched passage by passage, for nearly all questions each time; evicted ones are prepared again."""


@dataclass(frozen=True)
class RefinerTask:
    """Arguments of a refiner. `staging` is the folder of the states, relative to the store; `starts` has the number of
    each shard's first passage in the whole index. A shard of which more than `compact_share` changed is written
    whole. `match` is the rule by which passages hold answers."""

    store: str
    manifest: Manifest
    staging: str
    refine: RefineConfig = field(default_factory=RefineConfig)
    threads: int = 1
    starts: Mapping[int, int] = field(default_factory=dict)
    compact_share: float = MAX_CHANGED_SHARE
    match: Match = "string"

    @property
    def keep_length(self) -> bool:
        """Whether moved vectors are brought back to their length; by default in an index of unit vectors."""
        keep_length = self.refine.keep_length
        return self.manifest.similarity == "cosine" if keep_length is None else keep_length


class ShardStep(NamedTuple):
    """Result of one step on one shard. Drift is the distance of all moved vectors from the published version."""

    num_moved: int
    moved_passages: int = 0
    loss_sum: float = 0.0
    skipped_domain: int = 0
    skipped_no_positive: int = 0
    skipped_no_negative: int = 0
    drift_sum: float = 0.0
    drift_max: float = 0.0
    num_drifted: int = 0

    @classmethod
    def of(
        cls, steps: Sequence[aopt.StepResult], drift_M: FloatArray, num_drifted: int, moved_passages: int = 0
    ) -> "ShardStep":
        """Add up the steps of disjoint vectors, and take the drift of all."""
        return cls(
            num_moved=sum(step.num_moved for step in steps),
            moved_passages=moved_passages,
            loss_sum=math.fsum(step.loss * step.num_moved for step in steps if step.num_moved),
            skipped_domain=sum(step.num_outside_domain for step in steps),
            skipped_no_positive=sum(step.num_no_positive for step in steps),
            skipped_no_negative=sum(step.num_no_negative for step in steps),
            drift_sum=float(drift_M.sum()),
            drift_max=float(drift_M.max(initial=0.0)),
            num_drifted=num_drifted,
        )


def require_finite(step: aopt.StepResult, dtype: Dtype, refine: RefineConfig) -> None:
    """Raise ConfigError if a moved vector has a number that a type cannot hold."""
    with np.errstate(over="ignore"):
        moved_MD = step.vectors_MD.astype(np.float16 if dtype == "fp16" else np.float32)
    if not np.isfinite(moved_MD).all():
        settings = "alpha, beta and gamma" if refine.method in ONE_SHOT else "step_size"
        raise ConfigError(
            f"refine: method {refine.method} moves a vector so far that {dtype} cannot hold it; set refine.{settings} "
            f"nearer to 0, or refine.keep_length=true"
        )


class WrittenShard(NamedTuple):
    """A stored shard, and the number of its passages that changed."""

    shard: shards.BuiltShard
    dirty_passages: int


@dataclass
class _LoadedState:
    """A state of one shard in memory; `blocks` of its current views are made when they are searched."""

    at: StateId
    changes: ShardChanges
    blocks: list[EmbeddingBlock] | None = None


class ShardRefiner:
    """Searches, labels, moves and writes the shards of one task."""

    def __init__(self, task: RefinerTask) -> None:
        self.task = task
        self.store = Store(task.store)
        self.manifest = task.manifest
        self.starts = dict(sorted(task.starts.items()))
        self.entries = {entry.shard: entry for entry in task.manifest.shards if entry.shard in task.starts}
        index = self.manifest.index
        self.embeddings = {
            shard: shards.shard_embeddings(self.store, index, self.entries[shard]) for shard in self.starts
        }
        self.views = {shard: StoredViews(embeddings.blocks()) for shard, embeddings in self.embeddings.items()}
        self.states: dict[int, _LoadedState] = {}
        self.index: tuple[StateId, ShardIndex] | None = None
        self.ids: dict[int, list[str]] = {}
        self.matcher = AnswerMatcher(task.match, max_questions=MAX_CACHED_QUESTIONS)

    def search(self, at: StateId, queries_QD: FloatArray, k: int) -> ShardHits:
        """Search all shards of the actor exactly at a state: score descending, then passage id ascending; rows are
        numbers in the whole index."""
        hits = self._index(at).search(queries_QD, k)
        return hits._replace(rows_QK=np.where(hits.rows_QK >= 0, self._numbers_P[hits.rows_QK], -1))

    @cached_property
    def _numbers_P(self) -> IntArray:
        """Number in the whole index of each passage of the actor, in order of id."""
        ids = [name for shard in self.starts for name in self._ids(shard)]
        numbers = [start + np.arange(self.entries[shard].num_passages) for shard, start in self.starts.items()]
        return np.concatenate(numbers)[sorted(range(len(ids)), key=ids.__getitem__)]

    def ids_of(self, shard: int, rows: Sequence[int]) -> list[str]:
        """Return the passage ids of some rows."""
        ids = self._ids(shard)
        return [ids[row] for row in rows]

    def locate(self, shard: int, ids: Sequence[str]) -> list[int]:
        """Return the row of each passage id, -1 where the shard does not hold it."""
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

    def winners(self, shard: int, at: StateId, query_L: IntArray, row_L: IntArray, queries_QD: FloatArray) -> IntArray:
        """Return the number of the view that scores best for each (query, passage) at a state."""
        rows, inverse_L = np.unique(row_L, return_inverse=True)
        now = StoredViews(self._blocks(at, shard)).gather(rows)
        return winning_view_numbers(queries_QD, now, query_L, inverse_L)

    def query_sums(self, shard: int, at: StateId, labels: Labels, num_queries: int) -> aopt.LabelSums:
        """Compute this shard's part of each query's sums (query side, eqs. 7 and 11)."""
        slot_M, inverse_L = np.unique(self._slots(shard, labels), return_inverse=True)
        views_MD = self.views[shard].vectors(slot_M, self._state(at, shard).changes)
        matrices = label_matrices(inverse_L, labels.question_L, labels.positive_L, len(slot_M), num_queries)
        return aopt.label_sums(views_MD, matrices.transpose())

    def step(
        self, shard: int, at: StateId, to: StateId, labels: Labels, queries_QD: FloatArray, weight: float = 0.0
    ) -> ShardStep:
        """Change the labelled passages from state `at` by the task's method, and save the result as `to`.

        `weight`: the norm of feedback views relative to the passage's own views.
        """
        if self.task.refine.method == "feedback_views":
            return self._add_feedback(shard, at, to, labels, queries_QD, weight)
        return self._move(shard, at, to, labels, queries_QD)

    def _move(self, shard: int, at: StateId, to: StateId, labels: Labels, queries_QD: FloatArray) -> ShardStep:
        """Move the labelled views by AOpt: the linear form (eq. 9), or a gradient step (eqs. 13 and 14)."""
        refine, changes = self.task.refine, self._state(at, shard).changes
        slot_M, inverse_L = np.unique(self._slots(shard, labels), return_inverse=True)
        views_MD = self.views[shard].vectors(slot_M, changes)
        matrices = label_matrices(inverse_L, labels.question_L, labels.positive_L, len(slot_M), len(queries_QD))
        if refine.method == "linear":
            factors = {"alpha": refine.alpha, "beta": refine.beta, "gamma": refine.gamma}
            step = aopt.linear_step(views_MD, queries_QD, matrices, **factors)
        else:
            size, guard = refine.step_size, refine.domain_guard
            step = aopt.passage_step(views_MD, queries_QD, matrices, step_size=size, guard=guard, single=True)
        step = step.keep_length(views_MD) if self.task.keep_length else step
        require_finite(step, self.manifest.dtype, refine)
        moved_M = slot_M[step.moved_M]
        changes = changes.with_moved(moved_M, step.vectors_MD)
        self._save(to, shard, changes)
        drift_M = self.views[shard].drift(changes)
        return ShardStep.of([step], drift_M, len(drift_M), len(distinct(self.views[shard].rows(moved_M))))

    def _add_feedback(
        self, shard: int, at: StateId, to: StateId, labels: Labels, queries_QD: FloatArray, weight: float
    ) -> ShardStep:
        """Add feedback views to every positively labelled passage. They replace feedback views of earlier rounds and of
        the base version."""
        rows_F, inverse_L = np.unique(labels.passage_L, return_inverse=True)
        block = self.views[shard].gather(rows_F)
        norms_F = feedback.own_norms(block.vectors_ND, block.row_ptr, block.view_numbers_N, self.manifest.num_views)
        labels = labels._replace(passage_L=inverse_L)
        clusters = self.task.refine.feedback_clusters
        new_views = feedback.feedback_views(queries_QD, labels, norms_F, weight=weight, clusters=clusters)
        now = ShardChanges.none(queries_QD.shape[1]).with_feedback(rows_F[new_views.passage_F], new_views.vectors_FD)
        num_changed = len(self._state(at, shard).changes.feedback_changes(now))
        self._save(to, shard, now)
        return ShardStep(num_changed, num_changed, skipped_domain=new_views.num_cancelled)

    def write(self, shard: int, at: StateId, recall_sample: int) -> WrittenShard:
        """Write the shard at a state; returns its old entry if no stored byte differs, else a new one."""
        entry = self.entries[shard]
        changes = self.views[shard].changes(self._state(at, shard).changes, self._blocks(at, shard))
        if changes:
            with shards.shard_folder(self.store) as folder:
                params, embeddings, known_files = IndexParams(**self.manifest.index_params), self.embeddings[shard], {}
                if params.kind != "flat":
                    rewrite(embeddings, folder / paths.EMBEDDINGS, changes)
                elif names := write_changed(embeddings, folder, changes, max_changed_share=self.task.compact_share):
                    known_files = {name: entry.files[name] for name in names}
                    known_files |= shards.keep_codes(params, embeddings.path.parent, entry.files, folder)
                built_shard = shards.build_shard(self.store, self.manifest, shard, folder, known_files, recall_sample)
            path = paths.shard_dir(self.manifest.index, built_shard.entry.digest)
            self.store.write_bytes(paths.staged_claim(self.task.staging, path), b"")
        else:
            recall = shards.shard_recall(self.store, self.manifest, entry, recall_sample)
            built_shard = shards.BuiltShard(entry, recall)
        is_updated = False if changes and self.manifest.index_params["kind"] != "flat" else None
        floor = shards.promised_recall(self.manifest)
        return WrittenShard(replace(built_shard, is_updated=is_updated, least_recall=floor), len(changes))

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

    def _state(self, at: StateId, shard: int) -> _LoadedState:
        state = self.states.get(shard)
        if state is None or state.at != at:
            if at == PUBLISHED:
                changes = ShardChanges.none(self.manifest.dimension)
            else:
                changes = ShardChanges.from_bytes(read_staged(self.store, at.shard_path(self.task.staging, shard)))
            state = self._set_state(at, shard, changes)
        return state

    def _set_state(self, at: StateId, shard: int, changes: ShardChanges) -> _LoadedState:
        self.index = None  # it refers to blocks of the state before
        self.states[shard] = _LoadedState(at, changes)
        return self.states[shard]

    def _save(self, at: StateId, shard: int, changes: ShardChanges) -> None:
        self.store.write_bytes(at.shard_path(self.task.staging, shard), with_trailer(changes.to_bytes()))
        self._set_state(at, shard, changes)

    def _blocks(self, at: StateId, shard: int) -> list[EmbeddingBlock]:
        state = self._state(at, shard)
        if state.blocks is None:
            state.blocks = self.views[shard].current(state.changes, self.manifest.num_views)
        return state.blocks

    def _index(self, at: StateId) -> ShardIndex:
        """Return one index over all shards, so that only passages among the best of them all are scored exactly. Its
        rows are in order of id, as ties are."""
        if self.index is None or self.index[0] != at:
            nonempty_shards = [shard for shard in self.starts if self.entries[shard].num_passages]
            blocks = [block for shard in nonempty_shards for block in self._blocks(at, shard)]
            row_P, edges = np.argsort(self._numbers_P), np.cumsum([len(block.ids) for block in blocks])
            rows = np.split(row_P, edges[:-1]) if len(nonempty_shards) > 1 else None
            self.index = at, open_index(IndexParams(kind="flat"), blocks, Path(), rows, threads=self.task.threads)
        return self.index[1]
