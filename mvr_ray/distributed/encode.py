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
from functools import cache, cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import torch

from mvr_ray.checksums import add_trailer, without_trailer
from mvr_ray.config import ResourcesConfig, RunConfig
from mvr_ray.core.encoding.encoder import DualEncoder, TokenizedPassage
from mvr_ray.core.encoding.unpadded_cpu import supports_unpadded_cpu
from mvr_ray.core.encoding.views import TOKEN_ARRAYS, pack_tokens, unpack_tokens
from mvr_ray.distributed import session
from mvr_ray.distributed.encoders import LocalEncoder, cached_encoder, open_encoder, resolve_encoder
from mvr_ray.distributed.models import translate_out_of_memory
from mvr_ray.distributed.ray_data import dataset, pool_need, pool_options, stream_rows
from mvr_ray.errors import DigestError, StagingError
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.embeddings import Dtype, EmbeddingWriter
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest, ShardEntry
from mvr_ray.types import EmbeddingBlock, Passage, Progress, no_progress

if TYPE_CHECKING:
    import ray.data

__all__ = [
    "ChunkRange",
    "EncodeTask",
    "LocalEncoder",
    "encode_corpus",
    "encode_task",
    "resolve_encoder",
    "staged_chunks",
]

log = logging.getLogger(__name__)


class ChunkRange(NamedTuple):
    """Positions `start` to `stop` (exclusive) among the rows to encode of one corpus part."""

    shard: int
    start: int
    stop: int


class BaseShard(NamedTuple):
    """An earlier shard with the passages of a part, except for the changes of a plan. `index_params` are those of its
    version, `least_recall` the minimum recall that it promises."""

    index: str
    entry: ShardEntry
    index_params: Mapping[str, Any] | None = None
    least_recall: float | None = None


class EncodePlan(NamedTuple):
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
    copies: Mapping[int, str] | None = None

    def rows_to_encode(self, num_passages: int) -> Sequence[int]:
        """`rows`, with None resolved to all `num_passages` rows."""
        return range(num_passages) if self.rows is None else self.rows

    def to_json(self) -> bytes:
        base = self.base and {**self.base._asdict(), "entry": asdict(self.base.entry)}
        return json.dumps({**self._asdict(), "base": base, "deleted_ids": list(self.deleted_ids)}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        fields = json.loads(data)
        if copies := fields.get("copies"):
            fields["copies"] = {int(row): name for row, name in copies.items()}
        if base := fields.pop("base"):
            entry = ShardEntry(**base["entry"])
            base = BaseShard(base["index"], entry, base.get("index_params"), base.get("least_recall"))
        return cls(**fields, base=base)


class EncodeTask(NamedTuple):
    """Arguments of a worker: names and numbers, no objects. `key` names the staging folder. `refined_version` is the
    version whose refined views of unchanged passages are kept; 0 where all are as encoded."""

    store: str
    corpus: str
    corpus_digest: str
    index: str
    key: str
    encoder_name: str
    fingerprint: str
    num_views: int
    dimension: int
    dtype: Dtype
    tokens_per_batch: int
    sort_window: int
    refined_version: int = 0

    def chunk_path(self, chunk: ChunkRange) -> str:
        return paths.staged_chunk(self.index, self.key, chunk.shard, chunk.start)

    def plan_path(self, shard: int) -> str:
        return paths.staged_plan(self.index, self.key, shard)

    def carried_path(self, shard: int) -> str:
        return paths.staged_carried(self.index, self.key, shard)

    def plan(self, store: Store, shard: int) -> EncodePlan:
        """Read the plan of `carry_over` for a shard; without one, all of it is encoded.

        Raises StagingError for a damaged plan, after removing all staged work that follows it.
        """
        path = self.plan_path(shard)
        if not store.exists(path):
            return EncodePlan()
        try:
            return EncodePlan.from_json(bytes(without_trailer(store.read_bytes(path), store.where(path))))
        except DigestError as error:
            raise self.discard(store, shard, error) from error

    def discard(self, store: Store, shard: int, reason: Exception) -> StagingError:
        """Remove staged files of a shard except its note, the plan last: chunks without a plan would count as those of
        a shard that is encoded whole. Returns the error to raise."""
        folder, start = paths.staging_dir(self.index, self.key), self.chunk_path(ChunkRange(shard, 0, 0))
        chunks = start.rpartition("/")[2].rpartition("-")[0]
        for name in store.list(folder):
            if name.startswith(f"{chunks}-"):
                store.delete(f"{folder}/{name}")
        store.delete(self.carried_path(shard))
        store.delete(self.plan_path(shard))
        return StagingError(f"staged work of shard {shard} is removed ({reason}); run the same command again")


def encode_task(run: RunConfig, corpus: Corpus, encoder: LocalEncoder, before: Manifest | None = None) -> EncodeTask:
    """Make the task of a run; its staging key covers everything that changes an embedding's bytes. `before` is the
    version whose refined views of unchanged passages are kept."""
    index = run.index
    decides = [corpus.digest, encoder.fingerprint, index.dtype, index.tokens_per_batch, index.sort_window]
    if before:
        decides.append(before.content_digest())
    return EncodeTask(
        store=Store(run.store.path).address,
        corpus=corpus.name,
        corpus_digest=corpus.digest,
        index=index.name,
        key=hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16],
        encoder_name=encoder.name,
        fingerprint=encoder.fingerprint,
        num_views=encoder.num_views,
        dimension=encoder.dimension,
        dtype=index.dtype,
        tokens_per_batch=index.tokens_per_batch,
        sort_window=index.sort_window,
        refined_version=before.version if before else 0,
    )


def chunks_of(task: EncodeTask, corpus: Corpus, shard: int) -> list[ChunkRange]:
    total = len(task.plan(corpus.store, shard).rows_to_encode(corpus.info.parts[shard].num_passages))
    return [
        ChunkRange(shard, start, min(start + task.sort_window, total)) for start in range(0, total, task.sort_window)
    ]


def staged_chunks(task: EncodeTask, chunks: Iterable[ChunkRange]) -> set[ChunkRange]:
    """The chunks that are in the staging folder. Files are written atomically; the build of the shard checks their
    digests."""
    store = Store(task.store)
    names = set(store.list(paths.staging_dir(task.index, task.key)))
    return {chunk for chunk in chunks if task.chunk_path(chunk).rpartition("/")[2] in names}


def staged_shards(task: EncodeTask, *prefixes: str) -> set[int]:
    """Shards with a file of one of these prefixes in the staging folder."""
    names = Store(task.store).list(paths.staging_dir(task.index, task.key))
    return {int(name.split("-")[1].partition(".")[0]) for name in names if name.startswith(prefixes)}


def encode_corpus(
    task: EncodeTask,
    corpus: Corpus,
    shards: Sequence[int],
    resources: ResourcesConfig,
    progress: Progress = no_progress,
) -> int:
    """Encode the missing chunks of these shards into the staging folder; returns the number of passages embedded.

    Raises ResourceError before any work if the cluster cannot place the encoders.
    """
    chunks = [chunk for shard in shards for chunk in chunks_of(task, corpus, shard)]
    total = sum(chunk.stop - chunk.start for chunk in chunks)
    existing = staged_chunks(task, chunks)
    count = before = sum(chunk.stop - chunk.start for chunk in existing)
    missing = [chunk for chunk in chunks if chunk not in existing]
    log.info("encode: index=%s passages=%d already=%d chunks=%d", task.index, total, before, len(missing))
    if before:
        progress("encode", before, total)
    if not missing:
        return 0
    with session.connect(resources, total) as info:
        session.require(info, [pool_need("encoders", resources)])
        for num_passages in _encode_chunks(task, missing, resources):
            count += num_passages
            progress("encode", count, total)
    return count - before


def _encode_chunks(task: EncodeTask, chunks: Sequence[ChunkRange], resources: ResourcesConfig) -> Iterator[int]:
    """Encode chunks on a pool of actors, or one after another in this process; yields the passages of each."""
    if session.in_ray():
        yield from (row["passages"] for row in stream_rows(_pipeline(task, chunks, resources), "encoding"))
        return
    gpu = resources.gpus_per_encoder > 0
    backbone = cached_encoder(task.store, task.encoder_name, task.fingerprint).passage_tower.backbone
    threads = resources.torch_threads
    if not gpu and supports_unpadded_cpu(backbone):  # elsewhere bytes depend on the number of threads
        threads = max(threads, os.cpu_count() or 1)
    encoder = ChunkEncoder(task, threads, gpu)
    for chunk in chunks:
        yield encoder(tokenize_chunks(pa.Table.from_pylist([chunk._asdict()]), task)).column("passages")[0].as_py()


def _pipeline(task: EncodeTask, chunks: Sequence[ChunkRange], resources: ResourcesConfig) -> "ray.data.Dataset":
    from ray.data import TaskPoolStrategy

    tokenize: Any = tokenize_chunks
    tokenizers = resources.encoders_max * (4 if resources.gpus_per_encoder else 1)
    encoder: Any = ChunkEncoder
    gpu = resources.gpus_per_encoder > 0
    constructor = {"task": task, "threads": resources.torch_threads, "gpu": gpu}
    strategy = {"max_concurrent_calls_per_actor": chunks_at_once(gpu), "enable_true_multi_threading": True}
    return (
        dataset([chunk._asdict() for chunk in chunks])
        .map_batches(
            tokenize,
            batch_size=1,
            batch_format="pyarrow",
            fn_kwargs={"task": task},
            compute=TaskPoolStrategy(size=tokenizers),
        )
        .map_batches(encoder, fn_constructor_kwargs=constructor, **pool_options(resources, **strategy))
    )


def chunks_at_once(gpu: bool) -> int:
    """Concurrent chunks of one encoder: a GPU embeds the next chunk while the previous one is written."""
    return 2 if gpu else 1


def tokenize_chunks(batch: pa.Table, task: EncodeTask) -> pa.Table:
    """Add the ids and concatenated tokens of its passages to each row, a chunk."""
    encoder = cached_encoder(task.store, task.encoder_name, task.fingerprint)
    corpus = Corpus.open(Store(task.store), task.corpus, task.corpus_digest)
    packed_rows: list[dict[str, Any]] = []
    for chunk in batch.to_pylist():
        passages = passages_of(task, corpus, ChunkRange(**chunk))
        token_arrays = pack_tokens(encoder.tokenize_passages(passages))
        packed_rows.append({**chunk, "ids": [passage.id for passage in passages], **token_arrays})
    columns = {name: pa.array([row[name] for row in packed_rows]) for name in ("shard", "start", "stop", "ids")}
    for name, dtype in TOKEN_ARRAYS.items():
        columns[name] = pa.array([row[name] for row in packed_rows], pa.large_list(pa.from_numpy_dtype(dtype)))
    return pa.table(columns)


def passages_of(task: EncodeTask, corpus: Corpus, chunk: ChunkRange) -> list[Passage]:
    """The passages of a chunk, in id order."""
    part, rows = corpus.part(chunk.shard), task.plan(corpus.store, chunk.shard).rows
    if rows is None:
        return part.passages(chunk.start, chunk.stop)
    return part.take(rows[chunk.start : chunk.stop])


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
        task = self.task
        if self.gpu:
            return open_encoder(self.store, task.encoder_name, task.fingerprint, threads=self.threads, gpu=True)
        return cached_encoder(task.store, task.encoder_name, task.fingerprint)

    def __call__(self, batch: pa.Table) -> pa.Table:
        counts = [self.encode(batch, at) for at in range(batch.num_rows)]
        return pa.table({"passages": pa.array(counts, pa.int64())})

    def encode(self, batch: pa.Table, at: int) -> int:
        """Embed the chunk in row `at`, unless an earlier try of this call wrote it."""
        shard, start, stop = (batch.column(name)[at].as_py() for name in ChunkRange._fields)
        path = self.task.chunk_path(ChunkRange(shard, start, stop))
        if not self.store.exists(path):
            token_arrays = {name: batch.column(name)[at].values.to_numpy() for name in TOKEN_ARRAYS}
            ids, tokens = batch.column("ids")[at].as_py(), unpack_tokens(token_arrays)
            encoder = self.encoder
            torch.set_num_threads(self.threads)
            with self.lock, translate_out_of_memory(self.task.tokens_per_batch, "index.tokens_per_batch"):
                block = embed_chunk(encoder, ids, tokens, self.task.tokens_per_batch, self.task.dtype)
            self._write(block, path)
        return stop - start

    def _write(self, block: EmbeddingBlock, path: str) -> None:
        with self.store.scratch() as folder:
            file = folder / "chunk.arrow"
            with EmbeddingWriter(file, self.task.dimension, self.task.num_views, self.task.dtype) as writer:
                writer.write(block)
            add_trailer(file)
            self.store.put_file(file, path)


def embed_chunk(
    encoder: DualEncoder,
    ids: list[str],
    tokens: Sequence[TokenizedPassage],
    tokens_per_batch: int,
    dtype: Dtype,
) -> EmbeddingBlock:
    """Embed a chunk's passages in batches; returns all views in the order given."""
    shape = (len(ids), encoder.num_views, encoder.dimension)
    views_PVD = np.zeros(shape, np.float16 if dtype == "fp16" else np.float32)
    mask_PV = np.zeros(shape[:2], bool)
    lengths = [passage.num_tokens for passage in tokens]
    batches = encoder.passage_batches(lengths, tokens_per_batch)
    results = encoder.embed_batches([tokens[row] for row in rows] for rows in batches)
    for rows_B, result in zip(batches, results):
        with np.errstate(over="ignore"):
            views_PVD[rows_B] = result[0]
        mask_PV[rows_B] = result[1]
    release_free_memory()
    row_ptr = np.concatenate([[0], np.cumsum(mask_PV.sum(1))]).astype(np.int64)
    return EmbeddingBlock(ids, row_ptr, np.nonzero(mask_PV)[1].astype(np.int16), views_PVD[mask_PV])


def release_free_memory() -> None:
    """Return free heap pages to the system with glibc's malloc_trim; does nothing elsewhere. Batches of many lengths
    fragment the heap, which grows with the passages read (benchmarks/notes.md)."""
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
