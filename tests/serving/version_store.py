"""A store with some published versions of an index of one tiny shard, and a catalog over it."""

import json
from pathlib import Path

from prepared_corpus import empty_corpus

from mvr_ray.checksums import json_with_checksum
from mvr_ray.distributed.encoders import EXTERNAL
from mvr_ray.serving.catalog import VersionCatalog
from mvr_ray.store import manifest, paths
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest, ShardMeta


def version_catalog(folder: Path, versions: int = 2) -> VersionCatalog:
    store = Store(str(folder / "store"))
    empty_corpus(store, "books")
    add_encoder(store)
    for number in range(1, versions + 1):
        folder_of_shard = folder / f"built{number}"
        folder_of_shard.mkdir()
        (folder_of_shard / "embeddings.arrow").write_bytes(b"vectors of version %d" % number)
        entry = manifest.add_shard(store, "library", folder_of_shard, ShardMeta(0, 3, 4 + number))
        manifest.publish(store, manifest_of((entry,), number - 1, "0" * 32))
    return VersionCatalog(store, "library")


def add_encoder(store: Store) -> None:
    """Write the encoder of `manifest_of`, of another program."""
    spec = {"strategy": EXTERNAL, "normalize": False, "sentences": "packaged"}
    settings = {"fingerprint": "f" * 16, "format_version": 1, "num_views": 2, "dimension": 3, "spec": spec}
    path = f"{paths.encoder_dir('words', 'f' * 16)}/{paths.ENCODER_JSON}"
    store.write_bytes(path, json.dumps(json_with_checksum(settings)).encode())


def manifest_of(shards: tuple[manifest.ShardEntry, ...], parent: int, corpus_digest: str) -> Manifest:
    return Manifest(
        index="library",
        operation="index",
        encoder_name="words",
        encoder_fingerprint="f" * 16,
        similarity="inner_product",
        num_views=2,
        dimension=3,
        dtype="fp32",
        corpus="books",
        corpus_digest=corpus_digest,
        index_params={"kind": "flat"},
        shards=shards,
        parent=parent,
    )
