"""Compact the live version: rewrite shards that have change files beside their first file.

Views do not change. An updated approximate index is rebuilt from scratch, and the version's recall is measured again.
The words of the passages are rewritten, too.

A note of each written shard in the staging folder lets the same command resume after any crash.
"""

import dataclasses
from typing import NamedTuple

from mvr_ray.config import RunConfig
from mvr_ray.distributed import session
from mvr_ray.distributed.lexical import compact_lexical, lexical_task
from mvr_ray.distributed.reshard import publish_rewritten, rewritten_manifest
from mvr_ray.distributed.shards import (
    INDEX_BUILDERS,
    BuiltShard,
    build_shard,
    read_note,
    shard_embeddings,
    shard_folder,
    shard_recall,
    write_note,
)
from mvr_ray.distributed.tasks import run_tasks
from mvr_ray.index.candidates import LABELS_FILE
from mvr_ray.index.flat import CODES_FILES
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.delta import rewrite
from mvr_ray.store.files import Store, link_or_copy
from mvr_ray.store.manifest import Manifest, ShardEntry
from mvr_ray.types import Progress, no_progress


class CompactReport(NamedTuple):
    """The published version; `version` is `base_version` where no shard had change files."""

    index: str
    base_version: int
    version: int
    shards_written: int
    passages: int
    bytes_before: int
    bytes: int


def compact(run: RunConfig, progress: Progress = no_progress) -> CompactReport:
    """Publish the live version with all its shards compacted.

    Raises MissingInputError, StorageError, DigestError (a shard is damaged), RowsLostError and PublishConflictError.
    After any of them the live version is unchanged.
    """
    store = Store(run.store.path)
    base = version = manifests.read(store, run.index.name)
    changed_entries = [entry for entry in base.shards if paths.CHANGES in entry.files]
    lexical = base.lexical
    if changed_entries or (lexical and lexical.has_changes):
        with session.connect(run.resources, base.num_passages, [INDEX_BUILDERS]):
            new = _write(store, base, changed_entries, run.index.recall_sample, progress)
            if lexical and lexical.has_changes:
                corpus = Corpus.open(store, base.corpus, base.corpus_digest)
                lexical = compact_lexical(lexical_task(corpus, base.index, len(base.shards)), lexical, progress)
        new = dataclasses.replace(new, lexical=lexical)
        version = publish_rewritten(store, base, new, _staging_key(base), progress)
    else:
        progress("passages before = after", base.num_passages, base.num_passages)
    return CompactReport(
        index=base.index,
        base_version=base.version,
        version=version.version,
        shards_written=len(changed_entries),
        passages=version.num_passages,
        bytes_before=base.num_bytes,
        bytes=version.num_bytes,
    )


def _write(store: Store, base: Manifest, entries: list[ShardEntry], sample: int, progress: Progress) -> Manifest:
    """Compact these shards; returns the manifest. If an index is rebuilt, the recall of all shards is measured."""
    is_rebuilt = any(LABELS_FILE in entry.files for entry in entries)
    calls = [(store.address, base, entry, sample * is_rebuilt) for entry in (base.shards if is_rebuilt else entries)]
    results: list[BuiltShard] = run_tasks(compact_one, calls, "compacting", "compact", progress)
    built_shards = {result.entry.shard: result for result in results}
    shards = [built_shards.get(entry.shard, BuiltShard(entry, None)) for entry in base.shards]
    return rewritten_manifest(base, "compact", shards, has_new_recall=is_rebuilt)


def compact_one(address: str, base: Manifest, entry: ShardEntry, sample: int = 0) -> BuiltShard:
    """Compact one shard, or return its note, or the shard itself if it has no changes; its recall is measured with
    `sample` queries."""
    store = Store(address)
    if paths.CHANGES not in entry.files:
        return BuiltShard(entry, shard_recall(store, base, entry, sample))
    note = paths.staged_shard(base.index, _staging_key(base), "compact", entry.shard)
    if result := read_note(store, base.index, note):
        return result
    embeddings = shard_embeddings(store, base.index, entry)
    with shard_folder(store) as folder:
        rewrite(embeddings, folder / paths.EMBEDDINGS, {})
        is_rebuilt, names = LABELS_FILE in entry.files, {*entry.files} - {*paths.embedding_files(entry.files)}
        names -= CODES_FILES  # of the old first file, or vector order: built again
        if is_rebuilt:
            names &= {paths.PRUNED_JSON}
        index_files = {name: file for name, file in entry.files.items() if name in names}
        for name in index_files:
            link_or_copy(embeddings.path.with_name(name), folder / name)
        new_entry = build_shard(store, base, entry.shard, folder, index_files)
    recall = shard_recall(store, base, new_entry, sample)
    return write_note(store, note, BuiltShard(new_entry, recall, is_updated=False if is_rebuilt else None))


def _staging_key(base: Manifest) -> str:
    return f"compact-{base.content_digest()[:16]}"
