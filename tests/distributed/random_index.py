"""Publishes an index of random views, and searches the same views exhaustively in ten lines."""

import dataclasses
from pathlib import Path
from typing import Literal

import bm25s
import numpy as np
import Stemmer

from mvr_ray.distributed.indexing.lexical import LexicalTask, build_lexical
from mvr_ray.distributed.indexing.shards import build_shard, folder_embeddings
from mvr_ray.index.base import IndexParams
from mvr_ray.index.kinds import update_index
from mvr_ray.store import embeddings, manifest, paths
from mvr_ray.store.corpus import Corpus, shard_of
from mvr_ray.store.delta import open_embeddings, write_changed
from mvr_ray.store.embeddings import EmbeddingWriter
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest
from mvr_ray.types import EmbeddingBlock

V, D = 3, 8
Views = dict[str, dict[int, np.ndarray]]


def random_views(num_passages: int, seed: int, levels: int = 3) -> Views:
    """Random views by passage id, with few distinct values, so that many scores tie; some views are missing."""
    rng = np.random.default_rng(seed)
    return {
        f"p{number:03d}": {
            view: rng.integers(-levels, levels + 1, D).astype(np.float32)
            for view in sorted(rng.choice(V, rng.integers(1, V + 1), replace=False).tolist())
        }
        for number in rng.permutation(num_passages)
    }


def publish_random_index(
    root: Path,
    views: Views,
    num_shards: int,
    params: IndexParams | None = None,
    parent: int = 0,
    dtype: Literal["fp16", "fp32"] = "fp16",
    corpus: Corpus | None = None,
    words: str = "",
) -> Manifest:
    """Publish an index named `random` of these views, after version `parent`, as of a corpus where one is given, and
    with the words of its passages in a language."""
    store = Store(str(root))
    draft = Manifest(
        index="random",
        operation="index",
        encoder_name="none",
        encoder_fingerprint="f" * 16,
        similarity="inner_product",
        num_views=V,
        dimension=D,
        dtype=dtype,
        corpus=corpus.name if corpus else "none",
        corpus_digest=corpus.digest if corpus else "",
        index_params=dataclasses.asdict(params or IndexParams()),
        shards=(),
        parent=parent,
    )
    entries = []
    for shard in range(num_shards):
        folder = root / "new"
        folder.mkdir(parents=True)
        with EmbeddingWriter(folder / paths.EMBEDDINGS, D, V, dtype) as writer:
            writer.write(block_of({i: own for i, own in views.items() if shard_of(i, num_shards) == shard}))
        entries.append(build_shard(store, draft, shard, folder).entry)
    lexical = build_lexical(LexicalTask(corpus, "random", num_shards, words)) if corpus and words else None
    return manifest.publish(store, dataclasses.replace(draft, shards=tuple(entries), lexical=lexical))


def block_of(views: Views) -> EmbeddingBlock:
    ids = sorted(views)
    return EmbeddingBlock(
        ids,
        np.cumsum([0, *(len(views[i]) for i in ids)]),
        np.array([view for i in ids for view in views[i]], np.int16),
        np.array([vector for i in ids for vector in views[i].values()], np.float32).reshape(-1, D),
    )


def brute_force(views: Views, query_D: np.ndarray, k: int) -> list[tuple[str, float, int]]:
    names = [(passage_id, view) for passage_id, own in views.items() for view in own]
    vectors_ND = np.array([vector for own in views.values() for vector in own.values()]).reshape(-1, len(query_D))
    best: dict[str, tuple[float, int]] = {}
    for (passage_id, view), score in zip(names, (vectors_ND @ query_D).astype(np.float32).tolist()):
        best[passage_id] = min(best.get(passage_id, (np.inf, 0)), (-score, view))
    hits = [(passage_id, -negative, view) for passage_id, (negative, view) in best.items()]
    return sorted(hits, key=lambda hit: (-hit[1], hit[0]))[:k]


def bm25_over(texts: dict[str, str], question: str) -> dict[str, float]:
    """The BM25 score of every text by its id, by bm25s over all of them."""
    stemmer = Stemmer.Stemmer("english")
    oracle = bm25s.BM25(method="lucene", k1=0.9, b=0.4)
    words = bm25s.tokenize(list(texts.values()), stopwords="en", stemmer=stemmer, show_progress=False)
    if not any(words.ids):  # bm25s rejects a corpus without words
        return dict.fromkeys(texts, 0.0)
    oracle.index(words, show_progress=False)
    [tokens] = bm25s.tokenize([question], stopwords="en", stemmer=stemmer, return_ids=False, show_progress=False)
    terms = [word for word in tokens if word in oracle.vocab_dict]
    return dict(zip(texts, oracle.get_scores(terms).tolist() if terms else [0.0] * len(texts)))


def hybrid_brute_force(
    views: Views, lexical: dict[str, float], weight: float, query_D: np.ndarray, k: int
) -> list[tuple[str, float, int]]:
    best = [
        (name, float(np.float32(lexical[name] + weight * dense)), view)
        for name, dense, view in brute_force(views, query_D, len(views))
    ]
    return sorted(best, key=lambda hit: (-hit[1], hit[0]))[:k]


def publish_update(store: Store, base: Manifest, upserts: Views, deletions: set[str]) -> Manifest:
    """Publish a version with these changes, each in its shard, in a change file or in the first file."""
    shards = list(base.shards)
    for entry in base.shards:
        here = [name for name in sorted({*upserts, *deletions}) if shard_of(name, len(shards)) == entry.shard]
        own = {
            name: embeddings.Views(
                np.array(list(upserts[name]), np.int16), np.array(list(upserts[name].values()), np.float32)
            )
            for name in here
            if name in upserts
        }
        if here:
            shard = open_embeddings(manifest.open_shard(store, base.index, entry), entry.files)
            with store.scratch() as scratch:
                folder = scratch / "shard"
                folder.mkdir()
                if write_changed(shard, folder, own, [name for name in here if name in deletions]):
                    params, blocks = IndexParams(**base.index_params), folder_embeddings(folder).blocks()
                    update_index(params, shard.blocks(), blocks, own, shard.path.parent, folder, 0.25)
                shards[entry.shard] = build_shard(store, base, entry.shard, folder).entry
    return manifest.publish(store, dataclasses.replace(base, parent=base.version, shards=tuple(shards)))
