"""Shards and manifests for tests of the store: small, and whole."""

from collections.abc import Sequence
from pathlib import Path

from mvr_ray.store import manifest, paths
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest, ShardEntry, ShardMeta


def finish_shard(folder: Path, content: bytes) -> Path:
    """A shard as its builder leaves it."""
    folder.mkdir(parents=True)
    (folder / paths.EMBEDDINGS).write_bytes(content)
    (folder / "index.bin").write_bytes(content[::-1])
    return folder


def make_shard(store: Store, folder: Path, content: bytes, shard: int = 0) -> ShardEntry:
    return manifest.add_shard(store, "i", finish_shard(folder, content), ShardMeta(shard, 2, 5))


def describe(shards: Sequence[ShardEntry], parent: int = 0) -> Manifest:
    """Of these shards, not yet published."""
    return Manifest(
        index="i",
        operation="index",
        encoder_name="encoder",
        encoder_fingerprint="f" * 16,
        similarity="cosine",
        num_views=8,
        dimension=4,
        dtype="fp16",
        corpus="corpus",
        corpus_digest="",
        index_params={"kind": "flat"},
        shards=tuple(shards),
        parent=parent,
    )
