"""Write the shards of the live version whole that have changes beside their first file.

No view changes, and no index but an approximate one that was updated: it is built from nothing, and the version's
recall is measured again. The words of its passages are written whole with them.

A shard that is written is noted in the staging folder, so the same command continues after any crash.
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
from mvr_ray.store.files import Store, same_file
from mvr_ray.store.manifest import Manifest, ShardEntry
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
            new = _write(store, base, changed, run.index.recall_sample, progress)
            if lexical and lexical.has_changes:
                corpus = Corpus.open(store, base.corpus, base.corpus_digest)
                lexical = compact_lexical(lexical_task(corpus, base.index, len(base.shards)), lexical, progress)
        new = dataclasses.replace(new, lexical=lexical)
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


def _write(store: Store, base: Manifest, entries: list[ShardEntry], sample: int, progress: Progress) -> Manifest:
    """The manifest with these shards written whole. Where an index of theirs is built, all shards are measured."""
    is_rebuilt = any(LABELS_FILE in entry.files for entry in entries)
    calls = [(store.address, base, entry, sample * is_rebuilt) for entry in (base.shards if is_rebuilt else entries)]
    written: dict[int, BuiltShard] = {}
    for built in run_tasks(compact_one, calls, "compacting", cpus=BUILD_CPUS):
        written[built.entry.shard] = built
        progress("compact", len(written), len(calls))
    shards = tuple(written[entry.shard].entry if entry.shard in written else entry for entry in base.shards)
    new = dataclasses.replace(base, operation="compact", parent=base.version, shards=shards, dirty_share=0.0)
    if not is_rebuilt:
        return new
    measured = recall_metrics(list(written.values()))
    metrics = {name: value for name, value in base.metrics.items() if name not in RECALL_METRICS}
    return dataclasses.replace(new, recall=measured.get("recall"), metrics={**metrics, **measured})


def compact_one(address: str, base: Manifest, entry: ShardEntry, sample: int = 0) -> BuiltShard:
    """One shard written whole, or as it is noted already, or as it is where it has no changes; its recall is measured
    by `sample` queries."""
    store = Store(address)
    if paths.CHANGES not in entry.files:
        return BuiltShard(entry, shard_recall(store, base, entry, sample), None, None)
    note = paths.staged_shard(base.index, _staging_key(base), "compact", entry.shard)
    if noted := read_note(store, base.index, note):
        return noted
    before = manifests.open_shard(store, base.index, entry)
    embedded = open_embeddings(before, entry.files)
    with shard_folder(store) as folder:
        rewrite(embedded, folder / paths.EMBEDDINGS, {})
        is_rebuilt, kept = LABELS_FILE in entry.files, {*entry.files} - {*paths.embedding_files(entry.files)}
        kept -= CODES_FILES  # of the first file, or of vectors in another order: they are made of what is there now
        if is_rebuilt:
            kept &= {paths.PRUNED_JSON}
        index_files = {name: file for name, file in entry.files.items() if name in kept}
        for name in index_files:
            same_file(before / name, folder / name)
        written = build_shard(store, base, entry.shard, folder, index_files)
    recall = shard_recall(store, base, written, sample)
    built = BuiltShard(written, recall, None, None, is_updated=False if is_rebuilt else None)
    write_note(store, note, built)
    return built


def _staging_key(base: Manifest) -> str:
    return f"compact-{base.content_digest()[:16]}"
