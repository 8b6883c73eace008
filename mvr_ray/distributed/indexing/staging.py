"""Describe what an index run encodes and builds: the arguments of its workers, and their files in the staging folder.

Importing this module imports no torch: workers that copy embeddings or build shards need none.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic.dataclasses import dataclass

from mvr_ray.checksums import add_trailer, with_trailer
from mvr_ray.config import IndexConfig, RunConfig
from mvr_ray.distributed.indexing.shards import STAGED, index_params, parse_staged
from mvr_ray.errors import DigestError, FormatError, MissingInputError, StagingError
from mvr_ray.index.base import IndexParams
from mvr_ray.index.kinds import check_params
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.embeddings import EmbeddingWriter
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest, ShardEntry
from mvr_ray.types import ALL_READ, EmbeddingBlock, UnreadCounts

if TYPE_CHECKING:
    from mvr_ray.distributed.encoders import LocalEncoder

REFINED = "index:refined"
"""Operation of a version that keeps refined views."""


class ChunkRange(NamedTuple):
    """Positions `start` to `stop` (exclusive) among the rows to encode of one corpus part."""

    shard: int
    start: int
    stop: int


@dataclass(frozen=True, config=STAGED)
class BaseShard:
    """An earlier shard with the passages of a part, except for the changes of a plan. `index_params` are those of its
    version, `least_recall` the minimum recall that it promises."""

    index: str
    entry: ShardEntry
    index_params: Mapping[str, Any] | None = None
    least_recall: float | None = None

    def promise(self, draft: Manifest) -> float | None:
        """Return the least recall of an updated copy: none where the version is searched by other parameters."""
        return self.least_recall if self.index_params == draft.index_params else None


@dataclass(frozen=True, config=STAGED)
class EncodePlan:
    """The rows of one part to encode, and the source of the others.

    `rows` to encode, None for all. The others are in `base`, or, if `is_carried`, in the staged file of carried-over
    embeddings. `copies` maps rows of passages that equal another, encoded passage to its id; None before `find_copies`
    ran. Their rows are not among those to encode. `deleted_ids` are passages of `base` that the part does not have.
    `num_deleted` counts passages of the previous version that the part lacks, `num_unlearned` the changed and deleted
    ones that refinement had changed.
    """

    rows: list[int] | None = None
    base: BaseShard | None = None
    deleted_ids: Sequence[str] = ()
    num_deleted: int = 0
    num_unlearned: int = 0
    is_carried: bool = False
    copies: dict[int, str] | None = None

    def rows_to_encode(self, num_passages: int) -> Sequence[int]:
        """Return `rows`, with None resolved to all `num_passages` rows."""
        return range(num_passages) if self.rows is None else self.rows


class EncodeTask(NamedTuple):
    """Arguments of a worker. `draft` is the version to build, without shards; `key` names the staging folder.
    `is_external`: another program made the vectors, so those of a text may differ between versions."""

    store: str
    draft: Manifest
    key: str
    tokens_per_batch: int
    sort_window: int
    is_external: bool = False

    def chunk_path(self, chunk: ChunkRange) -> str:
        return paths.staged_chunk(self.draft.index, self.key, chunk.shard, chunk.start)

    def plan_path(self, shard: int) -> str:
        return paths.staged_plan(self.draft.index, self.key, shard)

    def carried_path(self, shard: int) -> str:
        return paths.staged_carried(self.draft.index, self.key, shard)

    def originals_path(self, shard: int, ids: Sequence[str]) -> str:
        return paths.staged_originals(self.draft.index, self.key, shard, _digest([*ids]))

    def embedding_writer(self, path: Path, unread_counts: UnreadCounts = ALL_READ) -> EmbeddingWriter:
        draft = self.draft
        return EmbeddingWriter(path, draft.dimension, draft.num_views, draft.dtype, unread_counts=unread_counts)

    def write_staged(
        self, store: Store, path: str, blocks: Iterable[EmbeddingBlock], unread_counts: UnreadCounts = ALL_READ
    ) -> None:
        """Write embeddings whole to one of the paths above."""
        with store.scratch() as folder:
            file = folder / "views.arrow"
            with self.embedding_writer(file, unread_counts) as writer:
                for block in blocks:
                    writer.write(block)
            add_trailer(file)
            store.put_file(file, path)

    def open_corpus(self) -> Corpus:
        return Corpus.open(Store(self.store), self.draft.corpus, self.draft.corpus_digest)

    def plan(self, store: Store, shard: int) -> EncodePlan:
        """Read the plan of `carry_over` for a shard; without one, all of it is encoded.

        Raises StagingError for a damaged plan or a newer program's, after removing all staged work that follows it.
        """
        path = self.plan_path(shard)
        try:
            return parse_staged(EncodePlan, store.read_bytes(path), store.where(path))
        except MissingInputError:
            return EncodePlan()
        except (DigestError, FormatError) as error:
            raise self.discard(store, shard, error) from error

    def plans(self, store: Store, shards: Iterable[int]) -> Sequence[EncodePlan]:
        """Read the plans of several shards, several at once from an object store. Raises as `plan`."""
        return store.for_each(lambda shard: self.plan(store, shard), shards)

    def write_plan(self, store: Store, shard: int, plan: EncodePlan) -> None:
        store.write_bytes(self.plan_path(shard), with_trailer(json.dumps(asdict(plan)).encode()))

    def discard(self, store: Store, shard: int, reason: Exception) -> StagingError:
        """Remove staged files of a shard except its note, the plan last: chunks without a plan would count as those of
        a shard that is encoded whole. Returns the error to raise."""
        folder = paths.staging_dir(self.draft.index, self.key)
        files = self.chunk_path(ChunkRange(shard, 0, 0)), self.originals_path(shard, ())
        prefixes = tuple(path.rpartition("/")[2].rpartition("-")[0] + "-" for path in files)
        for name in store.list(folder):
            if name.startswith(prefixes):
                store.delete(f"{folder}/{name}")
        store.delete(self.carried_path(shard))
        store.delete(self.plan_path(shard))
        return StagingError(f"staged work of shard {shard} is removed ({reason}); run the same command again")


def config_digest(index: IndexConfig, fingerprint: str, params: IndexParams) -> str:
    """Return the digest of everything that determines the bytes of a shard and its measured recall, except its
    passages."""
    return _digest([_encoding(index, fingerprint), asdict(params), index.recall_sample, index.prune_views])


def _encoding(index: IndexConfig, fingerprint: str) -> list[str | int]:
    return [fingerprint, index.dtype, index.tokens_per_batch, index.sort_window]


def _digest(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def checked_params(run: RunConfig, dimension: int) -> IndexParams:
    """Return the index parameters of a run. Raises ShardIndexError where they do not fit embeddings of this
    dimension."""
    params = index_params(run.index, dimension, run.resources.gpus_per_searcher > 0)
    check_params(params, dimension)
    return params


def encode_task(
    run: RunConfig, corpus: Corpus, encoder: "LocalEncoder", before: Manifest | None = None, vectors: str = ""
) -> EncodeTask:
    """Make the task of a run, with the draft of its version. `before` is the version whose refined views of unchanged
    passages are kept, `vectors` the digest of given vectors.

    The staging key covers everything that changes an embedding's bytes; for vectors of another program also the live
    version, whose vectors stay where none are given. Raises ShardIndexError for index parameters that do not fit the
    encoder.
    """
    store, index = Store(run.store.path), run.index
    params = checked_params(run, encoder.dimension)
    parent = before.version if before else manifests.latest_version(store, index.name)
    stage_parts = [corpus.digest, *_encoding(index, encoder.fingerprint)]
    stage_parts += [before.content_digest()] if before else []
    stage_parts += [vectors, parent] if encoder.is_external else []
    key = _digest(stage_parts)
    draft = Manifest(
        index=index.name,
        operation=REFINED if before else "index",
        encoder_name=encoder.name,
        encoder_fingerprint=encoder.fingerprint,
        similarity=encoder.similarity,
        num_views=encoder.num_views,
        dimension=encoder.dimension,
        dtype=index.dtype,
        corpus=corpus.name,
        corpus_digest=corpus.digest,
        index_params=asdict(params),
        shards=(),
        parent=parent,
        refined_queries=before.refined_queries if before else {},
        config_digest=config_digest(index, encoder.fingerprint, params),
    )
    return EncodeTask(
        store.address, draft, key, index.tokens_per_batch, index.sort_window, is_external=encoder.is_external
    )


def chunks_of(task: EncodeTask, corpus: Corpus, *shards: int) -> list[ChunkRange]:
    """Return the chunks of these shards, in order."""
    chunks: list[ChunkRange] = []
    for shard, plan in zip(shards, task.plans(corpus.store, shards)):
        total, size = len(plan.rows_to_encode(corpus.info.parts[shard].num_passages)), task.sort_window
        chunks += [ChunkRange(shard, start, min(start + size, total)) for start in range(0, total, size)]
    return chunks


def staged_chunks(task: EncodeTask, chunks: Iterable[ChunkRange]) -> set[ChunkRange]:
    """Return the chunks that are in the staging folder. Files are written atomically; the build of the shard checks
    their digests."""
    names = set(Store(task.store).list(paths.staging_dir(task.draft.index, task.key)))
    return {chunk for chunk in chunks if task.chunk_path(chunk).rpartition("/")[2] in names}


def staged_shards(task: EncodeTask, *prefixes: str) -> set[int]:
    """Return shards with a file of one of these prefixes in the staging folder."""
    names = Store(task.store).list(paths.staging_dir(task.draft.index, task.key))
    return {int(name.split("-")[1].partition(".")[0]) for name in names if name.startswith(prefixes)}
