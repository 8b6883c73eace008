"""Write the shards of the live version whole that have changes beside their first file; no view and no index changes.

The words of its passages are written whole with them.

A shard that is written is noted in the staging folder, so the same command continues after any crash.
"""

import dataclasses
from typing import NamedTuple

from mvr_ray.config import RunConfig
from mvr_ray.distributed import session
from mvr_ray.distributed.lexical import compact_lexical, lexical_task
from mvr_ray.distributed.reshard import require_same_counts
from mvr_ray.distributed.shards import BUILD_CPUS, BuiltShard, read_note, shard_folder, write_note
from mvr_ray.distributed.tasks import run_tasks
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.delta import open_embeddings, rewrite
from mvr_ray.store.files import Store, same_file
from mvr_ray.store.manifest import Manifest, ShardEntry, ShardMeta
from mvr_ray.types import Progress, no_progress


class CompactReport(NamedTuple):
    """What was published; `version` is `base_version` where no shard had changes beside it."""

    index: str
    base_version: int
    version: int
    shards_written: int
    passages: int
    bytes_before: int
    bytes: int


def compact(run: RunConfig, progress: Progress = no_progress) -> CompactReport:
    """Publish the live version with every shard written whole.

    Raises MissingInputError, StorageError, DigestError (a shard is damaged), RowsLostError and PublishConflictError.
    After any of them the live version is as it was.
    """
    store = Store(run.store.path)
    base = manifests.read(store, run.index.name)
    changed = [entry for entry in base.shards if paths.CHANGES in entry.files]
    lexical, published = base.lexical, base
    if changed or (lexical and lexical.has_changes):
        with session.connect(run.resources, base.num_passages) as info:
            session.require(info, [session.Need("index builders", 1, BUILD_CPUS)])
            written = _write(store, base, changed, progress)
            if lexical and lexical.has_changes:
                corpus = Corpus.open(store, base.corpus, base.corpus_digest)
                lexical = compact_lexical(lexical_task(corpus, base.index, len(base.shards)), lexical, progress)
        shards = tuple(written.get(entry.shard, entry) for entry in base.shards)
        changes = {"operation": "compact", "parent": base.version, "shards": shards, "lexical": lexical}
        new = dataclasses.replace(base, **changes, dirty_share=0.0)
        require_same_counts(base, new)
        published = manifests.publish(store, new)
        store.delete_dir(paths.staging_dir(base.index, _staging_key(base)))
    progress("passages before = after", published.num_passages, base.num_passages)
    return CompactReport(
        index=base.index,
        base_version=base.version,
        version=published.version,
        shards_written=len(changed),
        passages=published.num_passages,
        bytes_before=base.num_bytes,
        bytes=published.num_bytes,
    )


def _write(store: Store, base: Manifest, entries: list[ShardEntry], progress: Progress) -> dict[int, ShardEntry]:
    calls = [(store.address, base, entry) for entry in entries]
    written: dict[int, ShardEntry] = {}
    for entry in run_tasks(compact_one, calls, "compacting", cpus=BUILD_CPUS):
        written[entry.shard] = entry
        progress("compact", len(written), len(entries))
    return written


def compact_one(address: str, base: Manifest, entry: ShardEntry) -> ShardEntry:
    """One shard written whole, or as it is noted already. Its index files are the ones that it has."""
    store = Store(address)
    note = paths.staged_shard(base.index, _staging_key(base), "compact", entry.shard)
    if noted := read_note(store, base.index, note):
        return noted.entry
    before = manifests.open_shard(store, base.index, entry)
    embedded = open_embeddings(before, entry.files)
    with shard_folder(store) as folder:
        rewrite(embedded, folder / paths.EMBEDDINGS, {})
        index_files = {n: file for n, file in entry.files.items() if n not in (paths.EMBEDDINGS, paths.CHANGES)}
        for name in index_files:
            same_file(before / name, folder / name)
        meta = ShardMeta(entry.shard, embedded.num_passages, embedded.num_vectors)
        written = manifests.add_shard(store, base.index, folder, meta, index_files)
    write_note(store, note, BuiltShard(written, None, None, None))
    return written


def _staging_key(base: Manifest) -> str:
    return f"compact-{base.content_digest()[:16]}"
