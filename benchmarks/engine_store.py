"""Publish, open and change an index version of given vectors: mvr_ray's side of `engines.py`.

The files are those of `prepare`, `index` and `update`, without an encoder: the views replace an encoder's, and a change
is written beside each shard's first file, as `index` does it. Questions go through a router in this process.

Shapes: Q questions, P passages, V views per passage, D dimension.
"""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import synthetic

from mvr_ray.config import RunConfig
from mvr_ray.distributed.indexing.shards import build_shard, index_params, keep_codes, shard_embeddings, shard_folder
from mvr_ray.distributed.router import Router, open_router
from mvr_ray.index.base import IndexParams
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus, shard_of
from mvr_ray.store.delta import write_changed
from mvr_ray.store.embeddings import EmbeddingWriter, Views
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.prepare import prepare

PASSAGES_A_SHARD = 50_000
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


class Ours:
    """An index of kind flat, searched exactly; `with codes` it scans codes beside the vectors."""

    def __init__(self, folder: Path, task: dict[str, Any], precision: str, threads: int) -> None:
        self.folder, self.passages, self.views, self.dimension = (
            folder,
            task["passages"],
            task["views"],
            task["dimension"],
        )
        self.run = RunConfig.model_validate(
            {
                "store": {"path": str(folder)},
                "prepare": {
                    "corpus": "engines",
                    "sources": [{"path": str(folder / "passages.jsonl")}],
                    "fields": {"n": "int"},
                    "num_shards": -(-self.passages // PASSAGES_A_SHARD),
                },
                "index": {
                    "name": "engines",
                    "dtype": precision.split()[0],
                    "scan": "int8" if "codes" in precision else "vectors",
                },
                "resources": {"torch_threads": threads},
            }
        )
        self.stack = ExitStack()
        if folder.exists():
            self._open()

    def _open(self) -> None:
        self.router: Router = self.stack.enter_context(open_router(self.run, local=True))

    def build(self, batches: Iterator[Rows]) -> None:
        self.folder.mkdir()
        source = self.folder / "passages.jsonl"
        parts: list[Rows] = []
        dtype = np.float16 if self.run.index.dtype == "fp16" else np.float32
        with source.open("w") as file:
            for rows, fields, vectors_PVD in batches:
                for row, n in zip(rows.tolist(), fields.tolist()):
                    file.write(json.dumps({"id": name(row), "title": "", "text": f"passage {row}", "n": n}) + "\n")
                parts.append((rows, fields, vectors_PVD.astype(dtype)))
        store = Store(self.run.store.path)
        prepare(self.run.prepare, store)
        source.unlink()
        draft, entries = self._draft(store), []
        for shard in range(self.run.prepare.num_shards):
            with shard_folder(store) as folder:
                with EmbeddingWriter(folder / paths.EMBEDDINGS, self.dimension, self.views, draft.dtype) as writer:
                    for rows, _, vectors_PVD in parts:
                        own_P = [shard_of(name(row), self.run.prepare.num_shards) == shard for row in rows.tolist()]
                        ids = [name(row) for row in rows[own_P].tolist()]
                        views_ND = vectors_PVD[own_P].reshape(-1, vectors_PVD.shape[2])
                        writer.write(synthetic.block(views_ND, vectors_PVD.shape[1], ids))
                entries.append(build_shard(store, draft, shard, folder).entry)
        manifests.publish(store, dataclasses.replace(draft, shards=tuple(entries)))
        self._open()

    def _draft(self, store: Store) -> Manifest:
        corpus = Corpus.open(store, self.run.prepare.corpus)
        return Manifest(
            index=self.run.index.name,
            operation="index",
            encoder_name="none",
            encoder_fingerprint="f" * 16,
            similarity="cosine",
            num_views=self.views,
            dimension=self.dimension,
            dtype=self.run.index.dtype,
            corpus=corpus.name,
            corpus_digest=corpus.digest,
            index_params=dataclasses.asdict(index_params(self.run.index, self.dimension)),
            shards=(),
            parent=manifests.latest_version(store, self.run.index.name),
        )

    def search(self, query_D: np.ndarray, k: int, share: int) -> list[tuple[int, float]]:
        condition = {"n": {"lt": share}} if share < 100 else None
        return _pairs(self.router.search(query_D[None], k, filter=condition).hits[0])

    def search_batch(self, queries_QD: np.ndarray, k: int) -> list[list[tuple[int, float]]]:
        return [_pairs(hits) for hits in self.router.search(queries_QD, k).hits]

    def upsert(self, rows: np.ndarray, fields: np.ndarray, vectors_PVD: np.ndarray) -> None:
        """Publish the next version, and open it instead of this one."""
        store = Store(self.run.store.path)
        draft, before, entries = self._draft(store), manifests.read(store, self.run.index.name), []
        numbers_V = np.arange(self.views, dtype=np.int16)
        for entry in before.shards:
            upserts = {
                name(row): Views(numbers_V, views_VD)
                for row, views_VD in zip(rows.tolist(), vectors_PVD)
                if shard_of(name(row), len(before.shards)) == entry.shard
            }
            base = shard_embeddings(store, before.index, entry)
            with shard_folder(store) as folder:
                base_files = write_changed(base, folder, upserts, (), self.run.index.compact_share)
                files = {name: entry.files[name] for name in base_files}
                if base_files:
                    files |= keep_codes(IndexParams(**draft.index_params), base.path.parent, entry.files, folder)
                entries.append(build_shard(store, draft, entry.shard, folder, files).entry)
        manifests.publish(store, dataclasses.replace(draft, shards=tuple(entries)))
        self.close()
        self._open()

    def close(self) -> None:
        self.stack.close()


def name(row: int) -> str:
    return f"{row:08d}"


def _pairs(hits: list[Any]) -> list[tuple[int, float]]:
    return [(int(hit.passage_id), hit.score) for hit in hits]
