"""Encode passages into embeddings on a pool of encoder actors, chunk by chunk.

A chunk is `index.sort_window` passages of one corpus part, in id order, without embeddings in an earlier version. A CPU
task tokenises it (where encoders use no GPU, Ray Data runs that step inside the encoder's process); an encoder sorts it
by length, embeds it in batches of at most `index.tokens_per_batch` padded tokens, and writes it whole to the staging
folder. Batches depend on the chunk alone, so the bytes do not depend on the number of workers or on their failures;
a killed run loses the chunks in progress, and the same command encodes only the missing ones.

Shapes: P passages, V views per passage, N view vectors, D dimension.
"""

import ctypes
import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from pydantic.dataclasses import dataclass

from mvr_ray.checksums import add_trailer, with_trailer
from mvr_ray.config import ResourcesConfig, RunConfig
from mvr_ray.core.encoding.encoder import DualEncoder, TokenizedPassage
from mvr_ray.core.encoding.stored_model import torch_threads
from mvr_ray.core.encoding.unpadded_cpu import supports_unpadded_cpu
from mvr_ray.core.encoding.views import TOKEN_ARRAYS, pack_tokens, unpack_tokens
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.ray_data import dataset, pool_need, pool_options, stream_rows
from mvr_ray.distributed.encoders import LocalEncoder, cached_encoder, open_encoder
from mvr_ray.distributed.indexing.shards import STAGED, index_params, parse_staged
from mvr_ray.distributed.models import translate_out_of_memory
from mvr_ray.errors import DigestError, FormatError, StagingError
from mvr_ray.index.kinds import check_params
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.embeddings import Dtype, EmbeddingWriter
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest, ShardEntry
from mvr_ray.types import ALL_READ, EmbeddingBlock, Progress, UnreadCounts, no_progress

if TYPE_CHECKING:
    import ray.data

log = logging.getLogger(__name__)

REFINED = "index:refined"
"""Operation of a version that keeps refined views."""
MALLOC_TRIM: Any = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
"""Returns free heap pages to the system with glibc. Batches of many lengths fragment the heap, which grows with the
passages read (benchmarks/notes.md)."""


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
        """`rows`, with None resolved to all `num_passages` rows."""
        return range(num_passages) if self.rows is None else self.rows


class EncodeTask(NamedTuple):
    """Arguments of a worker. `draft` is the version to build, without shards; `key` names the staging folder."""

    store: str
    draft: Manifest
    key: str
    tokens_per_batch: int
    sort_window: int

    def chunk_path(self, chunk: ChunkRange) -> str:
        return paths.staged_chunk(self.draft.index, self.key, chunk.shard, chunk.start)

    def plan_path(self, shard: int) -> str:
        return paths.staged_plan(self.draft.index, self.key, shard)

    def carried_path(self, shard: int) -> str:
        return paths.staged_carried(self.draft.index, self.key, shard)

    def embedding_writer(self, path: Path, unread_counts: UnreadCounts = ALL_READ) -> EmbeddingWriter:
        draft = self.draft
        return EmbeddingWriter(path, draft.dimension, draft.num_views, draft.dtype, unread_counts=unread_counts)

    def open_corpus(self) -> Corpus:
        return Corpus.open(Store(self.store), self.draft.corpus, self.draft.corpus_digest)

    def cached_encoder(self) -> DualEncoder:
        return cached_encoder(self.store, self.draft.encoder_name, self.draft.encoder_fingerprint)

    def plan(self, store: Store, shard: int) -> EncodePlan:
        """Read the plan of `carry_over` for a shard; without one, all of it is encoded.

        Raises StagingError for a damaged plan or a newer program's, after removing all staged work that follows it.
        """
        path = self.plan_path(shard)
        if not store.exists(path):
            return EncodePlan()
        try:
            return parse_staged(EncodePlan, store.read_bytes(path), store.where(path))
        except (DigestError, FormatError) as error:
            raise self.discard(store, shard, error) from error

    def write_plan(self, store: Store, shard: int, plan: EncodePlan) -> None:
        store.write_bytes(self.plan_path(shard), with_trailer(json.dumps(asdict(plan)).encode()))

    def discard(self, store: Store, shard: int, reason: Exception) -> StagingError:
        """Remove staged files of a shard except its note, the plan last: chunks without a plan would count as those of
        a shard that is encoded whole. Returns the error to raise."""
        folder, start = paths.staging_dir(self.draft.index, self.key), self.chunk_path(ChunkRange(shard, 0, 0))
        chunks = start.rpartition("/")[2].rpartition("-")[0]
        for name in store.list(folder):
            if name.startswith(f"{chunks}-"):
                store.delete(f"{folder}/{name}")
        store.delete(self.carried_path(shard))
        store.delete(self.plan_path(shard))
        return StagingError(f"staged work of shard {shard} is removed ({reason}); run the same command again")


def encode_task(run: RunConfig, corpus: Corpus, encoder: LocalEncoder, before: Manifest | None = None) -> EncodeTask:
    """Make the task of a run, with the draft of its version. `before` is the version whose refined views of unchanged
    passages are kept.

    The staging key covers everything that changes an embedding's bytes, `config_digest` everything that determines the
    bytes of a shard, except its passages. Raises ShardIndexError for index parameters that do not fit the encoder.
    """
    store, index = Store(run.store.path), run.index
    params = index_params(index, encoder.dimension, run.resources.gpus_per_searcher > 0)
    check_params(params, encoder.dimension)
    encoding = [encoder.fingerprint, index.dtype, index.tokens_per_batch, index.sort_window]
    stage_parts = [corpus.digest, *encoding, *([before.content_digest()] if before else [])]
    config_parts = [encoding, asdict(params), index.recall_sample, index.prune_views]
    key, config_digest = (
        hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16] for parts in (stage_parts, config_parts)
    )
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
        parent=before.version if before else manifests.latest_version(store, index.name),
        refined_queries=before.refined_queries if before else {},
        config_digest=config_digest,
    )
    return EncodeTask(store.address, draft, key, index.tokens_per_batch, index.sort_window)


def chunks_of(task: EncodeTask, corpus: Corpus, shard: int) -> list[ChunkRange]:
    total = len(task.plan(corpus.store, shard).rows_to_encode(corpus.info.parts[shard].num_passages))
    return [
        ChunkRange(shard, start, min(start + task.sort_window, total)) for start in range(0, total, task.sort_window)
    ]


def staged_chunks(task: EncodeTask, chunks: Iterable[ChunkRange]) -> set[ChunkRange]:
    """The chunks that are in the staging folder. Files are written atomically; the build of the shard checks their
    digests."""
    names = set(Store(task.store).list(paths.staging_dir(task.draft.index, task.key)))
    return {chunk for chunk in chunks if task.chunk_path(chunk).rpartition("/")[2] in names}


def staged_shards(task: EncodeTask, *prefixes: str) -> set[int]:
    """Shards with a file of one of these prefixes in the staging folder."""
    names = Store(task.store).list(paths.staging_dir(task.draft.index, task.key))
    return {int(name.split("-")[1].partition(".")[0]) for name in names if name.startswith(prefixes)}


def encode_corpus(
    task: EncodeTask,
    corpus: Corpus,
    shards: Sequence[int],
    resources: ResourcesConfig,
    progress: Progress = no_progress,
) -> None:
    """Encode the missing chunks of these shards into the staging folder.

    Raises ResourceError before any work if the cluster cannot place the encoders.
    """
    chunks = [chunk for shard in shards for chunk in chunks_of(task, corpus, shard)]
    total = sum(chunk.stop - chunk.start for chunk in chunks)
    existing = staged_chunks(task, chunks)
    count = sum(chunk.stop - chunk.start for chunk in existing)
    missing = [chunk for chunk in chunks if chunk not in existing]
    log.info("encode: index=%s passages=%d already=%d chunks=%d", task.draft.index, total, count, len(missing))
    if count:
        progress("encode", count, total)
    if missing:
        with session.connect(resources, total, [pool_need("encoders", resources)]):
            for num_passages in _encode_chunks(task, missing, resources):
                count += num_passages
                progress("encode", count, total)


def _encode_chunks(task: EncodeTask, chunks: Sequence[ChunkRange], resources: ResourcesConfig) -> Iterator[int]:
    """Encode chunks on a pool of actors, or one after another in this process; yields the passages of each."""
    if session.in_ray():
        yield from (row["passages"] for row in stream_rows(_pipeline(task, chunks, resources), "encoding"))
        return
    gpu = resources.gpus_per_encoder > 0
    threads = resources.torch_threads
    if not gpu and supports_unpadded_cpu(task.cached_encoder().passage_tower.backbone):
        threads = max(threads, os.cpu_count() or 1)  # elsewhere bytes depend on the number of threads
    encoder = ChunkEncoder(task, threads, gpu)
    for chunk in chunks:
        yield encoder(tokenize_chunk(pa.Table.from_pylist([chunk._asdict()]), task)).column("passages")[0].as_py()


def _pipeline(task: EncodeTask, chunks: Sequence[ChunkRange], resources: ResourcesConfig) -> "ray.data.Dataset":
    from ray.data import TaskPoolStrategy

    gpu = resources.gpus_per_encoder > 0
    tokenizers = TaskPoolStrategy(size=resources.encoders_max * (4 if gpu else 1))
    tokenize: Any = tokenize_chunk
    encoder: Any = ChunkEncoder
    arguments = {"task": task, "threads": resources.torch_threads, "gpu": gpu}
    strategy = {"max_concurrent_calls_per_actor": chunks_at_once(gpu), "enable_true_multi_threading": True}
    return (
        dataset([chunk._asdict() for chunk in chunks])
        .map_batches(tokenize, batch_size=1, batch_format="pyarrow", fn_kwargs={"task": task}, compute=tokenizers)
        .map_batches(encoder, fn_constructor_kwargs=arguments, **pool_options(resources, **strategy))
    )


def chunks_at_once(gpu: bool) -> int:
    """Concurrent chunks of one encoder: a GPU embeds the next chunk while the previous one is written."""
    return 2 if gpu else 1


def tokenize_chunk(batch: pa.Table, task: EncodeTask) -> pa.Table:
    """Add the ids and concatenated tokens of its passages, and the counts of those that are not read whole, to the row
    of a chunk."""
    [row] = batch.to_pylist()
    chunk, part = ChunkRange(**row), task.open_corpus().part(row["shard"])
    rows = task.plan(Store(task.store), chunk.shard).rows_to_encode(len(part))
    passages = part.take(rows[chunk.start : chunk.stop])
    columns = {name: pa.array([value]) for name, value in row.items()}
    columns["ids"] = pa.array([[passage.id for passage in passages]])
    tokens = task.cached_encoder().tokenize_chunk(passages)
    columns |= {name: pa.array([count]) for name, count in tokens.unread_counts._asdict().items()}
    token_arrays = pack_tokens(tokens.passages)
    for name, dtype in TOKEN_ARRAYS.items():
        columns[name] = pa.array([token_arrays[name]], pa.large_list(pa.from_numpy_dtype(dtype)))
    return pa.table(columns)


class ChunkEncoder:
    """Embed chunks and write them to the staging folder; one actor of the pool."""

    def __init__(self, task: EncodeTask, threads: int = 1, gpu: bool = False) -> None:
        self.task = task
        self.store = Store(task.store)
        self.threads = threads
        self.gpu = gpu
        self.lock = Lock()

    @cached_property
    def encoder(self) -> DualEncoder:
        """Loaded by the first chunk: an error in an actor's constructor would reach the driver as text only."""
        if not self.gpu:
            return self.task.cached_encoder()
        draft = self.task.draft
        return open_encoder(self.store, draft.encoder_name, draft.encoder_fingerprint, gpu=True)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Embed the chunk of a row of `tokenize_chunk`, unless an earlier try of this call wrote it."""
        chunk = ChunkRange(*(batch.column(name)[0].as_py() for name in ChunkRange._fields))
        path, task = self.task.chunk_path(chunk), self.task
        if not self.store.exists(path):
            tokens = unpack_tokens({name: batch.column(name)[0].values.to_numpy() for name in TOKEN_ARRAYS})
            encoder = self.encoder
            out_of_memory = translate_out_of_memory(f"{task.tokens_per_batch} tokens", "index.tokens_per_batch")
            with self.lock, torch_threads(self.threads), out_of_memory:
                ids = batch.column("ids")[0].as_py()
                block = embed_chunk(encoder, ids, tokens, task.tokens_per_batch, task.draft.dtype)
            unread_counts = UnreadCounts(*(batch.column(name)[0].as_py() for name in UnreadCounts._fields))
            self._write(block, path, unread_counts)
        return pa.table({"passages": pa.array([chunk.stop - chunk.start])})

    def _write(self, block: EmbeddingBlock, path: str, unread_counts: UnreadCounts) -> None:
        with self.store.scratch() as folder:
            file = folder / "chunk.arrow"
            with self.task.embedding_writer(file, unread_counts) as writer:
                writer.write(block)
            add_trailer(file)
            self.store.put_file(file, path)


def embed_chunk(
    encoder: DualEncoder, ids: list[str], tokens: Sequence[TokenizedPassage], tokens_per_batch: int, dtype: Dtype
) -> EmbeddingBlock:
    """Embed a chunk's passages in batches; returns all views in the order given."""
    shape = (len(ids), encoder.num_views, encoder.dimension)
    views_PVD = np.zeros(shape, np.float16 if dtype == "fp16" else np.float32)
    mask_PV = np.zeros(shape[:2], bool)
    batches = encoder.passage_batches([passage.num_tokens for passage in tokens], tokens_per_batch)
    results = encoder.embed_batches([tokens[row] for row in rows] for rows in batches)
    for rows_B, result in zip(batches, results):
        with np.errstate(over="ignore"):
            views_PVD[rows_B] = result[0]
        mask_PV[rows_B] = result[1]
    if MALLOC_TRIM is not None:
        MALLOC_TRIM(0)
    row_ptr = np.concatenate([[0], np.cumsum(mask_PV.sum(1))]).astype(np.int64)
    return EmbeddingBlock(ids, row_ptr, np.nonzero(mask_PV)[1].astype(np.int16), views_PVD[mask_PV])
