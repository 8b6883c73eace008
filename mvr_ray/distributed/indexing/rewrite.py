"""Rewrite the shards of the live version, without encoding.

`reshard` distributes it over another number of shards, `compact` rewrites shards that have change files beside their
first file.

    shard of a passage:  h(id) mod n   before,   h(id) mod m   after
    read by new shard t: old shards s with  s = t  (mod gcd(n, m)),  for h = s (mod n) and h = t (mod m) agree there

So 8 to 12 reads each shard three times, 8 to 16 twice, and each new shard is one task that reads n / gcd(n, m) old
ones; a compaction distributes shards with change files onto the same number. Views are copied bit for bit; the
approximate index of a new shard is rebuilt, and recall measured again. A note of each built shard in the staging folder
lets the same command resume after any crash. The publication requires equal counts of passages and views before and
after; the corpus does not change.
"""

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

from mvr_ray.config import RunConfig
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.tasks import run_tasks, share
from mvr_ray.distributed.indexing import shards
from mvr_ray.distributed.indexing.lexical import LexicalTask, build_lexical, compact_lexical, open_statistics
from mvr_ray.distributed.indexing.shards import BuiltShard
from mvr_ray.errors import ConfigError, DigestError, RowsLostError, StorageError
from mvr_ray.index.base import IndexParams
from mvr_ray.index.kinds import check_params
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus, shard_of
from mvr_ray.store.embeddings import BlockRow, EmbeddingWriter
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest, ShardEntry
from mvr_ray.types import Progress, no_progress

MAX_SHARDS = 65_536


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
    base = version = manifests.read(store, run.index.name)
    if num_shards == len(base.shards):
        progress(f"version {base.version} has {num_shards} shards; passages", base.num_passages, base.num_passages)
    else:
        _require_possible(store, base)
        staging, sample = staging_key(base, num_shards), run.index.recall_sample
        with (
            session.connect(run.resources, base.num_passages, [shards.INDEX_BUILDERS]),
            shards.renew_periodically(store, base, staging, run.index.grace_s),
        ):
            shared_base = share(base)
            calls = [(store.address, shared_base, num_shards, staging, shard, sample) for shard in range(num_shards)]
            memory = shards.builder_memory(base, [math.ceil(base.num_vectors / num_shards)] * num_shards)
            new_shards: list[BuiltShard] = run_tasks(
                reshard_one, calls, "resharding", "reshard", progress, memory=memory
            )
            new = rewritten_manifest(base, "reshard", new_shards)
            if base.lexical:
                corpus = Corpus.open(store, base.corpus, base.corpus_digest)
                rule = open_statistics(store, base.index, base.lexical.statistics).rule
                words = LexicalTask(corpus, base.index, num_shards, rule.language, key=staging)
                statistics = base.lexical.statistics if rule == words.rule else ()  # the same in any shards
                new = dataclasses.replace(new, lexical=build_lexical(words, progress, statistics=statistics))
            version = publish_rewritten(store, base, new, progress)
        store.delete_dir(paths.staging_dir(base.index, staging))
        progress("views before = after", version.num_vectors, base.num_vectors)
    return ReshardReport(
        index=base.index,
        base_version=base.version,
        version=version.version,
        shards_before=len(base.shards),
        shards=len(version.shards),
        passages_before=base.num_passages,
        passages=version.num_passages,
        views_before=base.num_vectors,
        views=version.num_vectors,
        bytes_before=base.num_bytes,
        bytes=version.num_bytes,
        recall=version.recall,
    )


def staging_key(base: Manifest, num_shards: int) -> str:
    """Return the key of the notes: a digest of the version's content and the number of shards."""
    decides = f"{base.content_digest()} {base.version} {num_shards}"
    return f"reshard-{hashlib.sha256(decides.encode()).hexdigest()[:16]}"


def reshard_one(
    address: str, base: Manifest, num_shards: int, staging: str, shard: int, recall_sample: int = 0
) -> BuiltShard:
    """Build one of `num_shards` new shards from the old ones, or return its note, staged under the key `staging`."""
    store = Store(address)
    note = paths.staged_shard(base.index, staging, "dealt", shard)
    if result := shards.read_note(store, base.index, note):
        return result
    entries = [base.shards[number] for number in shards.related_shards(shard, len(base.shards), num_shards)]
    old_shards = [shards.shard_embeddings(store, base.index, shards.embeddings_alone(entry)) for entry in entries]
    blocks = [block for old in old_shards for block in old.blocks()]
    places = (BlockRow(name, at, row) for at, block in enumerate(blocks) for row, name in enumerate(block.ids))
    rows = [place for place in places if shard_of(place.passage_id, num_shards) == shard]
    with shards.shard_folder(store) as folder:
        with EmbeddingWriter(folder / paths.EMBEDDINGS, base.dimension, base.num_views, base.dtype) as writer:
            for block in shards.gather_batches(blocks, sorted(rows)):
                writer.write(block)
        built_shard = shards.build_shard(store, base, shard, folder, recall_sample=recall_sample)
    is_updated = None if base.index_params["kind"] == "flat" else False
    return shards.write_note(store, note, dataclasses.replace(built_shard, is_updated=is_updated))


def rewritten_manifest(base: Manifest, operation: str, new_shards: Sequence[BuiltShard]) -> Manifest:
    """Return the manifest of a version over its new shards; measurements on views are unchanged, those on approximate
    indexes too if none was built."""
    entries, recalls = tuple(shard.entry for shard in new_shards), shards.recall_metrics(new_shards)
    origin = {} if base.operation in manifests.COPIES else {"refined": float(base.operation != "index")}
    base = dataclasses.replace(base, metrics=base.metrics | origin)
    new = dataclasses.replace(base, operation=operation, parent=base.version, shards=entries, dirty_share=0.0)
    if not recalls:
        return new
    metrics = {name: value for name, value in base.metrics.items() if name not in shards.RECALL_METRICS}
    return dataclasses.replace(new, recall=recalls.get("recall"), metrics={**metrics, **recalls})


def publish_rewritten(store: Store, base: Manifest, new: Manifest, progress: Progress) -> Manifest:
    """Publish a version over rewritten shards. Raises as `require_same_counts`."""
    require_same_counts(base, new)
    version = manifests.publish(store, new)
    progress("passages before = after", version.num_passages, base.num_passages)
    return version


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


def _require_possible(store: Store, base: Manifest) -> None:
    """Raise early for problems that would otherwise fail after hours of work."""
    check_params(IndexParams(**base.index_params), base.dimension)
    if [entry.shard for entry in base.shards] != list(range(len(base.shards))):
        raise ConfigError(
            f"reshard: index {base.index!r} version {base.version} lacks shards (it has "
            f"{', '.join(str(entry.shard) for entry in base.shards)}); index again: mvr-ray index CONFIG"
        )
    for entry in base.shards:
        for name, file in shards.embeddings_alone(entry).files.items():
            path = f"{paths.shard_dir(base.index, entry.digest)}/{name}"
            size = store.size_bytes(path)
            if size != file.num_bytes:
                has = "is missing" if size < 0 else f"has {size} bytes, not {file.num_bytes}"
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
    """Publish the live version with all its shards compacted. If an index is rebuilt, the recall of all is measured.

    Raises MissingInputError, StorageError, DigestError (a shard is damaged), RowsLostError and PublishConflictError.
    After any of them the live version is unchanged.
    """
    store = Store(run.store.path)
    base = version = manifests.read(store, run.index.name)
    changed_entries = [entry for entry in base.shards if paths.CHANGES in entry.files]
    lexical, staging = base.lexical, staging_key(base, len(base.shards))
    if changed_entries or (lexical and lexical.has_changes):
        with (
            session.connect(run.resources, base.num_passages, [shards.INDEX_BUILDERS]),
            shards.renew_periodically(store, base, staging, run.index.grace_s),
        ):
            is_rebuilt = changed_entries and base.index_params["kind"] != "flat"
            entries, sample = (base.shards, run.index.recall_sample) if is_rebuilt else (changed_entries, 0)
            shared_base = share(base)
            calls = [(store.address, shared_base, entry, sample) for entry in entries]
            memory = shards.builder_memory(base, [entry.num_vectors for entry in entries])
            results: list[BuiltShard] = run_tasks(compact_one, calls, "compacting", "compact", progress, memory=memory)
            built_shards = {result.entry.shard: result for result in results}
            new_shards = [built_shards.get(entry.shard, BuiltShard(entry, None)) for entry in base.shards]
            new = rewritten_manifest(base, "compact", new_shards)
            if lexical and lexical.has_changes:
                corpus = Corpus.open(store, base.corpus, base.corpus_digest)
                language = open_statistics(store, base.index, lexical.statistics).rule.language
                words = LexicalTask(corpus, base.index, len(base.shards), language, key=staging)
                lexical = compact_lexical(words, lexical, progress)
            version = publish_rewritten(store, base, dataclasses.replace(new, lexical=lexical), progress)
        store.delete_dir(paths.staging_dir(base.index, staging))
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


def compact_one(address: str, base: Manifest, entry: ShardEntry, sample: int = 0) -> BuiltShard:
    """Build one shard again, as `reshard_one` does, or return it as it is if it has no changes; its recall is measured
    with `sample` queries."""
    if paths.CHANGES not in entry.files:
        return BuiltShard(entry, shards.shard_recall(Store(address), base, entry, sample))
    return reshard_one(address, base, len(base.shards), staging_key(base, len(base.shards)), entry.shard, sample)
