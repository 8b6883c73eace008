"""An index built in one store, and its files copied to another, where nothing of it is published yet."""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from in_memory_index import PASSAGES, VIEWS_PVD
from version_store import add_encoder, manifest_of

from mvr_ray.distributed.indexing.shards import shard_folder
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import CorpusInfo, PartInfo, corpus_digest, shard_of
from mvr_ray.store.delta import open_embeddings, write_changed
from mvr_ray.store.embeddings import EmbeddingWriter, Views
from mvr_ray.store.files import Store
from mvr_ray.store.local_files import sha256_of
from mvr_ray.store.manifest import Manifest, ShardMeta
from mvr_ray.store.parts import write_passages
from mvr_ray.types import EmbeddingBlock

SHARDS = 2
NO_FIELDS: Mapping[str, Any] = {}
Content = Mapping[str, Mapping[str, Any]]


def build(
    root: Path, scale: float = 1.0, types: Mapping[str, str] = NO_FIELDS, fields: Content = NO_FIELDS
) -> Manifest:
    """Version 1 of index `library` in the store at `root`: the passages of the library, their views times `scale`, and
    fields of these types by passage id."""
    store = Store(str(root))
    add_encoder(store)
    digest = corpus(store, types, fields)
    entries = tuple(shard(store, number, scale) for number in range(SHARDS))
    version = manifest_of(entries, 0, digest)
    return manifest.publish(store, dataclasses.replace(version, metrics={"lv": 0.25, "collapsed": 0}))


def corpus(store: Store, types: Mapping[str, str] = NO_FIELDS, fields: Content = NO_FIELDS) -> str:
    parts = []
    passages = [one._replace(fields=tuple(fields.get(one.id, {}).items())) for one in PASSAGES]
    for number in range(SHARDS):
        with store.scratch() as folder:
            file = folder / "part.arrow"
            num = write_passages(file, [one for one in passages if shard_of(one.id, SHARDS) == number], types)
            part = PartInfo("", num, file.stat().st_size, sha256_of(file))
            name = paths.corpus_part(number, part.sha256)
            store.put_file(file, f"{paths.corpus_dir('books')}/{name}")
        parts.append(dataclasses.replace(part, file=name))
    digest = corpus_digest(parts)
    info = CorpusInfo("books", digest, len(PASSAGES), tuple(parts), (), {}, {}, fields=dict(types))
    store.write_bytes(paths.corpus_json("books"), info.to_json())
    return digest


def shard(store: Store, number: int, scale: float) -> manifest.ShardEntry:
    rows = [row for row, one in enumerate(PASSAGES) if shard_of(one.id, SHARDS) == number]
    views = {PASSAGES[row].id: scale * VIEWS_PVD[row] for row in rows}
    block = EmbeddingBlock(
        sorted(views),
        np.arange(len(views) + 1) * 2,
        np.array([0, 1] * len(views), np.int16),
        np.array([vector for name in sorted(views) for vector in views[name]], np.float32).reshape(-1, 3),
    )
    with shard_folder(store) as folder:
        with EmbeddingWriter(folder / paths.EMBEDDINGS, 3, 2, "fp32") as writer:
            writer.write(block)
        return manifest.add_shard(store, "library", folder, ShardMeta(number, len(views), 2 * len(views)))


def refine(root: Path) -> Manifest:
    """Version 2 there: the first passage of shard 0 has one view more, in a file over that of version 1."""
    store, before = Store(str(root)), manifest.read(Store(str(root)), "library", 1)
    entry = before.shards[0]
    embeddings = open_embeddings(manifest.open_shard(store, "library", entry), entry.files)
    now = Views(np.array([0, 1, 2], np.int16), np.eye(3, dtype=np.float32))
    first = embeddings.ids()[0]
    with shard_folder(store) as folder:
        assert write_changed(embeddings, folder, {first: now}, max_changed_share=1.0), "the first file was written anew"
        meta = ShardMeta(0, entry.num_passages, entry.num_vectors + 1)
        laid_over = manifest.add_shard(store, "library", folder, meta)
    return manifest.publish(store, dataclasses.replace(before, parent=1, shards=(laid_over, *before.shards[1:])))


def copy_files(root: Path, to: Path) -> Path:
    """All but the manifests: what a copying tool brings to another store."""
    shutil.copytree(root, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns("versions", ".scratch"))
    return to


def as_sent(root: Path, version: int = 1) -> dict[str, Any]:
    """A manifest as it lies in its store."""
    return json.loads(Store(str(root)).read_bytes(paths.manifest("library", version)))
