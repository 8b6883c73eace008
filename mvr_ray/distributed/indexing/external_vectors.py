"""Stage vectors that another program made, in place of those of an encoder.

Given vectors replace those of earlier versions. A passage without any keeps those that its title and text have there,
as `carry_over` plans it. Stored vectors that equal the given ones stay, so only what differs is written.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from mvr_ray.config import RunConfig
from mvr_ray.distributed.encoders import LocalEncoder, external_encoder, resolve_encoder
from mvr_ray.distributed.indexing.shards import shard_embeddings
from mvr_ray.distributed.indexing.staging import EncodeTask, chunks_of, staged_chunks
from mvr_ray.errors import ConfigError, DataError, count_noun
from mvr_ray.store.corpus import Corpus, ids_by_shard
from mvr_ray.store.embeddings import BlockRow, EmbeddingShard, Views, gather_rows
from mvr_ray.store.files import Store, local_copy
from mvr_ray.store.formats.view_vectors import read_vectors, require_shape
from mvr_ray.store.local_files import sha256_of
from mvr_ray.types import EmbeddingBlock, Passage, Progress


@dataclass(frozen=True)
class ExternalVectors:
    """The vectors of a file by passage, and the digest of the file; none without a file."""

    encoder: LocalEncoder
    block: EmbeddingBlock
    digest: str = ""

    @cached_property
    def rows(self) -> dict[str, int]:
        return {name: row for row, name in enumerate(self.block.ids)}

    def differing(self, ids: Iterable[str], shard: EmbeddingShard | None) -> set[str]:
        """Return those of these passages whose views are not those of the shard; feedback views are left aside."""
        names = {name for name in ids if name in self.rows}
        views = shard.find(names) if shard and names else {}
        return {name for name in names if name not in views or not self._has(name, views[name])}

    def require_passages(
        self, corpus: Corpus, new_ids: Set[str] = frozenset(), deletions: Set[str] = frozenset()
    ) -> None:
        """Raise DataError for vectors of passages that a corpus lacks after these changes."""
        for shard, ids in ids_by_shard(self.block.ids, corpus.num_shards).items():
            if unknown := sorted(set(ids) - new_ids - (set(corpus.part(shard).ids()) - deletions)):
                names = ", ".join(unknown[:5])
                raise DataError(f"index.vectors: corpus {corpus.name!r} has no passage {names}; leave them out")

    def without_vectors(self, passages: Iterable[Passage], *corpora: Corpus) -> list[str]:
        """Return the ids of passages without vectors here whose title or text is new to each of these corpora."""
        return sorted(
            passage.id
            for passage in passages
            if passage.id not in self.rows
            and all(one[:3] != passage[:3] for corpus in corpora for one in corpus.get([passage.id]).values())
        )

    def _has(self, name: str, views: Views) -> bool:
        own = slice(*self.block.row_ptr[self.rows[name] :][:2].tolist())
        is_own_V = views.view_numbers_N < self.encoder.num_views
        same_numbers = np.array_equal(self.block.view_numbers_N[own], views.view_numbers_N[is_own_V])
        return same_numbers and self.block.vectors_ND[own].tobytes() == views.vectors_ND[is_own_V].tobytes()

    def stage(self, task: EncodeTask, corpus: Corpus, shards: Sequence[int], progress: Progress) -> None:
        """Write the chunks of these planned shards. Raises DataError, before, for passages without vectors."""
        store = Store(task.store)
        chunks = []
        missing: list[str] = []
        for shard in shards:
            plan, ids = task.plan(store, shard), corpus.part(shard).ids()
            rows = plan.rows_to_encode(len(ids))
            missing += [ids[row] for row in rows if ids[row] not in self.rows]
            base = shard_embeddings(store, plan.base.index, plan.base.entry) if plan.base else None
            names = self.differing(ids, base).union(ids[row] for row in rows)
            if plan.rows is not None and len(names) > len(rows):
                own = [row for row, name in enumerate(ids) if name in names]
                task.write_plan(store, shard, replace(plan, rows=own, copies={}))
            chunks += chunks_of(task, corpus, shard)
        if missing:
            raise DataError(
                f"{count_noun(len(missing), 'passage')} without vectors in index.vectors and, in {task.draft.dtype} "
                f"(index.dtype), in earlier versions: {', '.join(missing[:5])}; nothing was published. Add them to the "
                f"file, or delete the passages"
            )
        existing = staged_chunks(task, chunks)
        for number, chunk in enumerate(chunks, 1):
            if chunk not in existing:
                ids = corpus.part(chunk.shard).ids()
                rows = task.plan(store, chunk.shard).rows_to_encode(len(ids))[chunk.start : chunk.stop]
                places = [BlockRow(ids[row], 0, self.rows[ids[row]]) for row in rows]
                task.write_staged(store, task.chunk_path(chunk), [gather_rows([self.block], places)])
            progress("given vectors, chunks", number, len(chunks))


def resolve_vectors(run: RunConfig, corpus: Corpus) -> tuple[LocalEncoder, ExternalVectors | None]:
    """Find the encoder, and read `index.vectors`; None where mvr_ray encodes. Raises DataError for vectors that do not
    fit the encoder, ConfigError for `index.prune_views`."""
    if run.index.vectors is None:
        encoder = resolve_encoder(run, corpus)
        if encoder.is_external:
            _require_all_views(run)
        nothing = EmbeddingBlock([], np.zeros(1, np.int64), np.zeros(0, np.int16), np.zeros((0, encoder.dimension)))
        return encoder, ExternalVectors(encoder, nothing) if encoder.is_external else None
    external = read_external(run, run.index.vectors)
    return external.encoder, external


def read_external(run: RunConfig, vectors: str) -> ExternalVectors:
    """Read a file of vectors. Raises DataError for vectors that do not fit the encoder, ConfigError for
    `index.prune_views`."""
    _require_all_views(run)
    path = local_copy(vectors)
    block = read_vectors(path, run.index.dtype)
    encoder = external_encoder(run, block.vectors_ND.shape[1])
    require_shape(path, block, encoder.dimension, encoder.num_views, encoder.similarity == "cosine")
    return ExternalVectors(encoder, block, sha256_of(path))


def _require_all_views(run: RunConfig) -> None:
    if run.index.prune_views is not None:
        raise ConfigError(
            "index.prune_views drops vectors of another program, which later changes need; leave it out, and index all "
            "vectors again where a version lacks some"
        )
