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
from mvr_ray.distributed.reshard import require_same_counts
from mvr_ray.distributed.shards import (
    BUILD_CPUS,
    RECALL_METRICS,
    BuiltShard,
    build_shard,
    read_note,
    recall_metrics,
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
from mvr_ray.store.delta import open_embeddings, rewrite
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
    base = manifests.read(store, run.index.name)
    changed_entries = [entry for entry in base.shards if paths.CHANGES in entry.files]
    lexical, manifest = base.lexical, base
    if changed_entries or (lexical and lexical.has_changes):
        with session.connect(run.resources, base.num_passages) as info:
            session.require(info, [session.Need("index builders", 1, BUILD_CPUS)])
            new = _write(store, base, changed_entries, run.index.recall_sample, progress)
            if lexical and lexical.has_changes:
                corpus = Corpus.open(store, base.corpus, base.corpus_digest)
                lexical = compact_lexical(lexical_task(corpus, base.index, len(base.shards)), lexical, progress)
        new = dataclasses.replace(new, lexical=lexical)
        require_same_counts(base, new)
        manifest = manifests.publish(store, new)
        store.delete_dir(paths.staging_dir(base.index, _staging_key(base)))
    progress("passages before = after", manifest.num_passages, base.num_passages)
    return CompactReport(
        index=base.index,
        base_version=base.version,
        version=manifest.version,
        shards_written=len(changed_entries),
        passages=manifest.num_passages,
        bytes_before=base.num_bytes,
        bytes=manifest.num_bytes,
    )


def _write(store: Store, base: Manifest, entries: list[ShardEntry], sample: int, progress: Progress) -> Manifest:
    """Compact these shards; returns the manifest. If an index is rebuilt, the recall of all shards is measured."""
    is_rebuilt = any(LABELS_FILE in entry.files for entry in entries)
    calls = [(store.address, base, entry, sample * is_rebuilt) for entry in (base.shards if is_rebuilt else entries)]
    results: dict[int, BuiltShard] = {}
    for result in run_tasks(compact_one, calls, "compacting", cpus=BUILD_CPUS):
        results[result.entry.shard] = result
        progress("compact", len(results), len(calls))
    shards = tuple(results[entry.shard].entry if entry.shard in results else entry for entry in base.shards)
    new = dataclasses.replace(base, operation="compact", parent=base.version, shards=shards, dirty_share=0.0)
    if not is_rebuilt:
        return new
    recalls = recall_metrics(list(results.values()))
    metrics = {name: value for name, value in base.metrics.items() if name not in RECALL_METRICS}
    return dataclasses.replace(new, recall=recalls.get("recall"), metrics={**metrics, **recalls})


def compact_one(address: str, base: Manifest, entry: ShardEntry, sample: int = 0) -> BuiltShard:
    """Compact one shard, or return its note, or the shard itself if it has no changes; its recall is measured with
    `sample` queries."""
    store = Store(address)
    if paths.CHANGES not in entry.files:
        return BuiltShard(entry, shard_recall(store, base, entry, sample), None, None)
    note = paths.staged_shard(base.index, _staging_key(base), "compact", entry.shard)
    if result := read_note(store, base.index, note):
        return result
    before = manifests.open_shard(store, base.index, entry)
    embeddings = open_embeddings(before, entry.files)
    with shard_folder(store) as folder:
        rewrite(embeddings, folder / paths.EMBEDDINGS, {})
        is_rebuilt, names = LABELS_FILE in entry.files, {*entry.files} - {*paths.embedding_files(entry.files)}
        names -= CODES_FILES  # of the old first file, or vector order: built again
        if is_rebuilt:
            names &= {paths.PRUNED_JSON}
        index_files = {name: file for name, file in entry.files.items() if name in names}
        for name in index_files:
            link_or_copy(before / name, folder / name)
        new_entry = build_shard(store, base, entry.shard, folder, index_files)
    recall = shard_recall(store, base, new_entry, sample)
    built_shard = BuiltShard(new_entry, recall, None, None, is_updated=False if is_rebuilt else None)
    write_note(store, note, built_shard)
    return built_shard


def _staging_key(base: Manifest) -> str:
    return f"compact-{base.content_digest()[:16]}"
