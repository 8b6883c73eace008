"""Encode passages into embeddings on a pool of encoder actors, chunk by chunk.

A chunk is `index.sort_window` passages of one corpus part, in id order, without embeddings in an earlier version. A CPU
task tokenises it (where encoders use no GPU, Ray Data runs that step inside the encoder's process); an encoder sorts it
by length, embeds it in batches of at most `index.tokens_per_batch` padded tokens, and writes it whole to the staging
folder. Batches depend on the chunk alone, so the bytes do not depend on the number of workers or on their failures;
a killed run loses the chunks in progress, and the same command encodes only the missing ones.

Shapes: P passages, V views per passage, N view vectors, D dimension.
"""

import ctypes
import logging
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch

from mvr_ray.config import ResourcesConfig
from mvr_ray.core.encoding.encoder import DualEncoder, TokenizedPassage
from mvr_ray.core.encoding.precision import ON_OPENVINO
from mvr_ray.core.encoding.unpadded_cpu import supports_unpadded_cpu
from mvr_ray.core.encoding.views import TOKEN_ARRAYS, pack_tokens, unpack_tokens
from mvr_ray.core.searching.native import num_cores
from mvr_ray.core.threads import torch_threads
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.ray_data import dataset, pool_need, pool_options, stream_rows
from mvr_ray.distributed.encoders import cached_encoder, open_encoder
from mvr_ray.distributed.indexing.staging import ChunkRange, EncodeTask, chunks_of, staged_chunks
from mvr_ray.distributed.models import translate_out_of_memory
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.embeddings import Dtype
from mvr_ray.store.files import Store
from mvr_ray.types import EmbeddingBlock, Progress, UnreadCounts, no_progress

if TYPE_CHECKING:
    import ray.data

log = logging.getLogger(__name__)

MALLOC_TRIM: Any = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
"""Returns free heap pages to the system with glibc. Batches of many lengths fragment the heap, which grows with the
passages read (benchmarks/notes.md)."""


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
    chunks = chunks_of(task, corpus, *shards)
    total = sum(chunk.stop - chunk.start for chunk in chunks)
    existing = staged_chunks(task, chunks)
    count = sum(chunk.stop - chunk.start for chunk in existing)
    missing = [chunk for chunk in chunks if chunk not in existing]
    log.info("encode: index=%s passages=%d already=%d chunks=%d", task.draft.index, total, count, len(missing))
    if count:
        progress("encode", count, total)
    if missing:
        if not resources.gpus_per_encoder and torch.cuda.is_available():
            log.warning("passages are embedded on the CPU beside a GPU; resources.gpus_per_encoder: 1 uses it")
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
    threads, own = resources.threads, _encoder_of(task)
    if not gpu and (supports_unpadded_cpu(own.passage_tower.backbone) or own.precision.name in ON_OPENVINO):
        threads = resources.torch_threads or num_cores()  # elsewhere bytes depend on the number of threads
    encoder = ChunkEncoder(task, threads, gpu)
    for chunk in chunks:
        yield encoder(tokenize_chunk(pa.Table.from_pylist([chunk._asdict()]), task)).column("passages")[0].as_py()


def _pipeline(task: EncodeTask, chunks: Sequence[ChunkRange], resources: ResourcesConfig) -> "ray.data.Dataset":
    from ray.data import TaskPoolStrategy

    gpu = resources.gpus_per_encoder > 0
    tokenizers = TaskPoolStrategy(size=resources.encoders_max * (4 if gpu else 1))
    tokenize: Any = tokenize_chunk
    encoder: Any = ChunkEncoder
    arguments = {"task": task, "threads": resources.threads, "gpu": gpu}
    strategy = {"max_concurrent_calls_per_actor": chunks_at_once(gpu), "enable_true_multi_threading": True}
    return (
        dataset([chunk._asdict() for chunk in chunks])
        .map_batches(tokenize, batch_size=1, batch_format="pyarrow", fn_kwargs={"task": task}, compute=tokenizers)
        .map_batches(encoder, fn_constructor_kwargs=arguments, **pool_options(resources, **strategy))
    )


def _encoder_of(task: EncodeTask) -> DualEncoder:
    return cached_encoder(task.store, task.draft.encoder_name, task.draft.encoder_fingerprint)


def chunks_at_once(gpu: bool) -> int:
    """Return the number of concurrent chunks of one encoder: a GPU embeds the next chunk while the previous one is
    written."""
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
    tokens = _encoder_of(task).tokenize_chunk(passages)
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
            return _encoder_of(self.task)
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
            task.write_staged(self.store, path, [block], unread_counts)
        return pa.table({"passages": pa.array([chunk.stop - chunk.start])})


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
