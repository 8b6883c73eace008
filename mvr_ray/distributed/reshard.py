"""Distribute the live version over another number of shards, without encoding: views are copied bit for bit.

    shard of a passage:  h(id) mod n   before,   h(id) mod m   after
    read by new shard t: old shards s with  s = t  (mod gcd(n, m)),  for h = s (mod n) and h = t (mod m) agree there

So 8 to 12 reads each shard three times, 8 to 16 twice, and each new shard is one task that reads n / gcd(n, m) old
ones. A note of each built shard in the staging folder lets the same command resume after any crash. The publication
requires equal counts of passages and views before and after; the corpus does not change.
"""

import dataclasses
import hashlib
import logging
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mvr_ray.config import RunConfig
from mvr_ray.distributed import session
from mvr_ray.distributed.lexical import build_lexical, lexical_task
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
from mvr_ray.errors import ConfigError, DigestError, RowsLostError, StorageError
from mvr_ray.index.base import IndexParams
from mvr_ray.index.kinds import check_params
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus, shard_of
from mvr_ray.store.delta import open_embeddings
from mvr_ray.store.embeddings import (
    BATCH_PASSAGES,
    BlockRow,
    Dtype,
    EmbeddingShard,
    EmbeddingWriter,
    gather_rows,
)
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import FileEntry, Manifest, ShardEntry
from mvr_ray.types import Progress, no_progress

log = logging.getLogger(__name__)

MAX_SHARDS = 65_536


class ReshardTask(NamedTuple):
    """Arguments of a task that builds one new shard. `base` is the version to reshard, `staging` the key of notes."""

    store: str
    base: Manifest
    num_shards: int
    staging: str
    recall_sample: int


class ReshardReport(NamedTuple):
    """The published version, with counts before and after; `version` is `base_version` if nothing changed."""

    index: str
    base_version: int
    version: int
    shards_before: int
    shards: int
    passages_before: int
    passages: int
    views_before: int
    views: int
    bytes_before: int
    bytes: int
    recall: float | None


def reshard(run: RunConfig, num_shards: int, progress: Progress = no_progress) -> ReshardReport:
    """Publish the live version over `num_shards` shards; does nothing if it has that number already.

    Views, moved queries and measurements stay; only an approximate index is rebuilt and its recall measured again.
    Raises ConfigError, MissingInputError, ShardIndexError, StorageError (no space), DigestError (an old shard is
    damaged), RowsLostError and PublishConflictError. After any of them the live version is unchanged.
    """
    if not 1 <= num_shards <= MAX_SHARDS:
        raise ConfigError(f"reshard: shards={num_shards} is outside 1 to {MAX_SHARDS}")
    store = Store(run.store.path)
    base = manifests.read(store, run.index.name)
    if num_shards == len(base.shards):
        progress(f"version {base.version} has {num_shards} shards; passages", base.num_passages, base.num_passages)
        return _report(base, base)
    _require_possible(store, base)
    task = ReshardTask(store.address, base, num_shards, staging_key(base, num_shards), run.index.recall_sample)
    with session.connect(run.resources, base.num_passages) as info:
        session.require(info, [session.Need("index builders", 1, BUILD_CPUS)])
        new = manifest_over(base, _build(task, progress))
        if base.lexical:
            corpus = Corpus.open(store, base.corpus, base.corpus_digest)
            words = lexical_task(corpus, base.index, num_shards)
            lexical = build_lexical(words, progress, statistics=base.lexical.statistics)  # the same in any shards
            new = dataclasses.replace(new, lexical=lexical)
    require_same_counts(base, new)
    manifest = manifests.publish(store, new)
    store.delete_dir(paths.staging_dir(base.index, task.staging))
    progress("passages before = after", manifest.num_passages, base.num_passages)
    progress("views before = after", manifest.num_vectors, base.num_vectors)
    return _report(base, manifest)


def staging_key(base: Manifest, num_shards: int) -> str:
    """Key of the notes: a digest of the version's content and the number of shards."""
    decides = f"{base.content_digest()} {base.version} {num_shards}"
    return f"reshard-{hashlib.sha256(decides.encode()).hexdigest()[:16]}"


def sources(shard: int, num_before: int, num_after: int) -> list[int]:
    """The old shards that can hold a passage of a new one."""
    step = math.gcd(num_before, num_after)
    return list(range(shard % step, num_before, step))


def reshard_one(task: ReshardTask, shard: int) -> BuiltShard:
    """Build one new shard from the old ones, or return its note."""
    store, base = Store(task.store), task.base
    note = paths.staged_shard(base.index, task.staging, "dealt", shard)
    if result := read_note(store, base.index, note):
        return result
    with shard_folder(store) as folder:
        blocks = [block for old in _open_old_shards(store, task, shard) for block in old.blocks()]
        rows = sorted(
            BlockRow(passage_id, number, row)
            for number, block in enumerate(blocks)
            for row, passage_id in enumerate(block.ids)
            if shard_of(passage_id, task.num_shards) == shard
        )
        dtype: Dtype = "fp16" if base.dtype == "fp16" else "fp32"
        with EmbeddingWriter(folder / paths.EMBEDDINGS, base.dimension, base.num_views, dtype) as writer:
            for start in range(0, len(rows), BATCH_PASSAGES):
                writer.write(gather_rows(blocks, rows[start : start + BATCH_PASSAGES]))
        entry = build_shard(store, base, shard, folder)
    recall = shard_recall(store, base, entry, task.recall_sample)
    is_updated = None if base.index_params["kind"] == "flat" else False
    built_shard = BuiltShard(entry, recall, None, None, is_updated=is_updated)
    write_note(store, note, built_shard)
    return built_shard


def manifest_over(base: Manifest, shards: Sequence[BuiltShard]) -> Manifest:
    """The manifest of the version over its new shards; measurements on views are unchanged."""
    metrics = {name: value for name, value in base.metrics.items() if name not in RECALL_METRICS}
    recalls = recall_metrics(shards)
    return dataclasses.replace(
        base,
        operation="reshard",
        parent=base.version,
        shards=tuple(shard.entry for shard in shards),
        recall=recalls.get("recall"),
        metrics={**metrics, **recalls},
        dirty_share=0.0,
    )


def require_same_counts(base: Manifest, new: Manifest) -> None:
    """Raise RowsLostError unless the counts of passages and views are equal before and after.

    A new shard holds no id twice and only ids that hash to it, so equal numbers mean equal sets.
    """
    if (new.num_passages, new.num_vectors) != (base.num_passages, base.num_vectors):
        raise RowsLostError(
            f"index {base.index!r} version {base.version} has {base.num_passages} passages and {base.num_vectors} "
            f"views, its {len(new.shards)} new shards {new.num_passages} and {new.num_vectors}; "
            f"nothing was published. Its shards are not the hash of their ids: index again (mvr-ray index CONFIG)"
        )


def _report(base: Manifest, result: Manifest) -> ReshardReport:
    return ReshardReport(
        index=base.index,
        base_version=base.version,
        version=result.version,
        shards_before=len(base.shards),
        shards=len(result.shards),
        passages_before=base.num_passages,
        passages=result.num_passages,
        views_before=base.num_vectors,
        views=result.num_vectors,
        bytes_before=base.num_bytes,
        bytes=result.num_bytes,
        recall=result.recall,
    )


def _require_possible(store: Store, base: Manifest) -> None:
    """Raise early for problems that would otherwise fail after hours of work."""
    check_params(IndexParams(**base.index_params), base.dimension)
    if [entry.shard for entry in base.shards] != list(range(len(base.shards))):
        raise ConfigError(
            f"reshard: index {base.index!r} version {base.version} lacks shards (it has "
            f"{', '.join(str(entry.shard) for entry in base.shards)}); index again: mvr-ray index CONFIG"
        )
    files = [(entry, name, file) for entry in base.shards for name, file in _embeddings(entry).items()]
    for entry, name, file in files:
        path = f"{paths.shard_dir(base.index, entry.digest)}/{name}"
        size, expected_bytes = store.size_bytes(path), file.num_bytes
        if size != expected_bytes:
            has = "is missing" if size < 0 else f"has {size} bytes, not {expected_bytes}"
            raise DigestError(
                f"reshard: {store.where(path)} of shard {entry.shard} {has}; "
                f"repair it first: mvr-ray versions CONFIG repair"
            )
    free = store.free_bytes()
    if free is not None and free < base.num_bytes:
        raise StorageError(
            f"reshard: {store.name} has {free} bytes free, a second copy of index {base.index!r} takes "
            f"{base.num_bytes}; free space, or collect old versions: mvr-ray versions CONFIG collect"
        )


def _open_old_shards(store: Store, task: ReshardTask, shard: int) -> Iterator[EmbeddingShard]:
    """Open the old shards that a new one reads, after checking their digests."""
    base = task.base
    for source in sources(shard, len(base.shards), task.num_shards):
        entry = base.shards[source]
        alone = dataclasses.replace(entry, files=_embeddings(entry))
        folder = manifests.open_shard(store, base.index, alone)
        yield open_embeddings(folder, alone.files)


def _embeddings(entry: ShardEntry) -> dict[str, FileEntry]:
    """The files of a shard that hold its views."""
    return {name: entry.files[name] for name in paths.embedding_files(entry.files)}


def _build(task: ReshardTask, progress: Progress) -> list[BuiltShard]:
    """Build all new shards, one task each, as many at a time as CPUs allow; returns them in order."""
    calls = [(task, shard) for shard in range(task.num_shards)]
    shards: list[BuiltShard] = []
    for shard in run_tasks(reshard_one, calls, "resharding", cpus=BUILD_CPUS):
        shards.append(shard)
        progress("reshard", len(shards), task.num_shards)
    return sorted(shards, key=lambda shard: shard.entry.shard)
