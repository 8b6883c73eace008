"""Make indexes of synthetic views, in the files of an encoder's views.

A view is a unit vector: equal parts of its passage's direction and of its own. One block of passages is random; any
other has the same vectors with their components permuted by the block's number. So ten million views take seconds to
make, and the stages take the same time as for real vectors.
"""

import dataclasses
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import synthetic

from mvr_ray.checksums import add_trailer
from mvr_ray.config import RunConfig
from mvr_ray.distributed.encoders import resolve_encoder
from mvr_ray.distributed.indexing.shards import build_shard, index_params, shard_folder
from mvr_ray.distributed.indexing.staging import chunks_of, encode_task
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import Corpus, CorpusInfo, PartInfo, corpus_digest, shard_of
from mvr_ray.store.embeddings import EmbeddingWriter
from mvr_ray.store.files import Store
from mvr_ray.store.local_files import sha256_of
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.parts import write_passages
from mvr_ray.store.questions import write_questions
from mvr_ray.types import EmbeddingBlock, FloatArray, Passage, Question

V, D = 8, 384
BLOCK = 4096
WORDS = ("the", "of", "and", "in", "was", "is", "for", "as", "on", "with", "by", "he", "at", "from", "his", "which")


@cache
def draw_views() -> FloatArray:
    """Draw the views of the first block, float16 [BLOCK * V, D]."""
    rng = np.random.default_rng(0)
    own_PVD = rng.standard_normal((BLOCK, V, D), dtype=np.float32)
    own_PVD += rng.standard_normal((BLOCK, 1, D), dtype=np.float32)
    own_PVD /= np.linalg.norm(own_PVD, axis=2, keepdims=True)
    return own_PVD.reshape(-1, D).astype(np.float16)


def views(number: int, passages: int) -> FloatArray:
    """Return the views of block `number`, float16 [passages * V, D]."""
    return np.take(draw_views()[: passages * V], np.random.default_rng(number).permutation(D), axis=1)


def block(ids: list[str], number: int) -> EmbeddingBlock:
    """Return a block of passages with all their views."""
    return synthetic.block(views(number, len(ids)), V, ids)


def queries(count: int, seed: int = 1) -> FloatArray:
    """Draw unit vectors near views of the first block, float32 [Q, D]."""
    rng = np.random.default_rng((seed, 1))
    near_QD = views(0, BLOCK)[rng.integers(0, BLOCK * V, count)].astype(np.float32)
    near_QD += 0.05 * rng.standard_normal(near_QD.shape, dtype=np.float32)
    return near_QD / np.linalg.norm(near_QD, axis=1, keepdims=True)


def shards_of(passages: int, num_shards: int) -> list[list[str]]:
    """Return ids in order, by shard."""
    shards: list[list[str]] = [[] for _ in range(num_shards)]
    for number in range(passages):
        name = f"{number:09d}"
        shards[shard_of(name, num_shards)].append(name)
    return shards


def publish(store: Store, run: RunConfig, passages: int, num_shards: int, parent: int = 0) -> Manifest:
    """Publish a version of synthetic views for searchers only."""
    draft = Manifest(
        index=run.index.name,
        operation="index",
        encoder_name="none",
        encoder_fingerprint="f" * 16,
        similarity="cosine",
        num_views=V,
        dimension=D,
        dtype="fp16",
        corpus="none",
        corpus_digest="",
        index_params=dataclasses.asdict(index_params(run.index, D)),
        shards=(),
        parent=parent,
    )
    entries = []
    for shard, ids in enumerate(shards_of(passages, num_shards)):
        with shard_folder(store) as folder:
            with EmbeddingWriter(folder / paths.EMBEDDINGS, D, V) as writer:
                for low in range(0, len(ids), BLOCK):
                    writer.write(block(ids[low : low + BLOCK], shard * 1000 + low // BLOCK))
            entries.append(build_shard(store, draft, shard, folder).entry)
    return manifest.publish(store, dataclasses.replace(draft, shards=tuple(entries)))


def prepare(run: RunConfig, passages: int, sets: dict[str, int], text_chars: int = 620) -> Corpus:
    """Write a synthetic corpus as `mvr-ray prepare` does, and question sets of the given sizes.

    Each question is for a passage of its own, anywhere in the corpus.

    Raises ValueError for more questions than passages.
    """
    if sum(sets.values()) > passages:
        raise ValueError(f"{sum(sets.values())} questions ask for as many passages, but {passages} are made; make more")
    store, rng = Store(run.store.path), np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, text_chars // 3))[:text_chars] for _ in range(256)]
    infos = []
    for shard, ids in enumerate(shards_of(passages, run.prepare.num_shards)):
        with store.scratch() as folder:
            file = folder / "part.arrow"
            write_passages(file, (Passage(name, f"article {name}", texts[int(name) % 256]) for name in ids))
            digest = sha256_of(file)
            part = PartInfo(paths.corpus_part(shard, digest), len(ids), file.stat().st_size, digest)
            store.put_file(file, f"{paths.corpus_dir(run.prepare.corpus)}/{part.file}")
        infos.append(part)
    gold = iter(rng.permutation(passages).tolist())
    info = CorpusInfo(run.prepare.corpus, corpus_digest(infos), passages, tuple(infos), (), dict(sets), {})
    corpus = Corpus(store, info)
    for name, count in sets.items():
        write_questions(corpus, name, [_question(name, i, next(gold)) for i in range(count)])
    corpus.publish(after=corpus.number)
    return corpus


def _question(name: str, number: int, passage: int) -> Question:
    seed = int.from_bytes(hashlib.blake2b(f"{name} {number}".encode(), digest_size=8).digest(), "big")
    words = np.random.default_rng(seed).choice(WORDS, 10)
    return Question(f"{name}-{number}", f"{' '.join(words)} {number}?", (), (f"{passage:09d}",))


def stage(run: RunConfig, corpus: Corpus) -> int:
    """Stage synthetic views of every passage instead of an encoder's; `mvr-ray index` then encodes nothing.

    Returns their number of bytes.
    """
    store = Store(run.store.path)
    task = encode_task(run, corpus, resolve_encoder(run, corpus))
    assert (task.draft.num_views, task.draft.dimension) == (V, D), "made-up views have another shape than the encoder's"
    num_bytes = 0
    for chunk, path in _chunks(task, corpus):
        ids = corpus.part(chunk.shard).ids()[chunk.start : chunk.stop]
        with store.scratch() as folder:
            file: Path = folder / "chunk.arrow"
            with EmbeddingWriter(file, D, V, task.draft.dtype) as writer:
                writer.write(block(ids, chunk.shard * 100_000 + chunk.start // task.sort_window))
            add_trailer(file)
            num_bytes += file.stat().st_size
            store.put_file(file, path)
    return num_bytes


def _chunks(task, corpus: Corpus) -> Iterator:  # noqa: ANN001
    for shard in range(corpus.num_shards):
        for chunk in chunks_of(task, corpus, shard):
            yield chunk, task.chunk_path(chunk)
