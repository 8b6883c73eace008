"""Takes embeddings that earlier versions have, so that no passage is encoded twice by the same encoder.

A passage's embedding depends on its title, its text and the encoder. Where a version that still stands was made by the
same encoder, in whatever index of the store, a passage of the same id and the same content has its embedding there. A
task a shard looks for the passages of its part, newest version first, and leaves in the staging folder the embeddings
that it found, and the rows that are to be encoded: a try that continues finds the same division.

Only views as encoded are taken: from versions that `index` built, with all their views, and from what was resharded or
rolled back to without a change of a view.
"""

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import ray

from mvr_ray.distributed.encode import EncodeTask, staged_shards
from mvr_ray.distributed.shards import BUILD_CPUS
from mvr_ray.distributed.tasks import task_results
from mvr_ray.errors import MissingInputError, StorageError
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus, shard_of
from mvr_ray.store.delta import open_embeddings
from mvr_ray.store.embeddings import BATCH_PASSAGES, BlockRow, EmbeddingWriter, gather_rows
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest, ShardEntry
from mvr_ray.types import EmbeddingBlock, Passage, Progress, no_progress

log = logging.getLogger(__name__)


class EmbeddedCorpus(NamedTuple):
    """A corpus, and the shards of an index that hold its views as encoded."""

    index: str
    corpus: str
    corpus_digest: str
    shards: tuple[ShardEntry, ...]


def carry_over(
    task: EncodeTask, corpus: Corpus, shards: Sequence[int], progress: Progress = no_progress
) -> tuple[int, int]:
    """Take what can be taken for these shards. Returns how many passages that is, and how many are to be encoded.

    Shards of which a chunk or a division is staged already stay as they are. Ray must be connected.
    """
    store = Store(task.store)
    begun = staged_shards(task)
    sources = embedded_corpora(store, task)
    remote: Any = ray.remote(carry_shard).options(num_cpus=BUILD_CPUS)
    open_shards = [shard for shard in shards if shard not in begun] if sources else []
    tasks = [remote.remote(task, shard, sources) for shard in open_shards]
    total = sum(corpus.info.parts[shard].num_passages for shard in shards)
    for done, _ in enumerate(task_results(tasks, "looking for embeddings of earlier versions"), 1):
        progress("look for embeddings of earlier versions, shards", done, len(open_shards))
    rows = [task.rows_to_encode(store, shard) for shard in shards]
    missing = sum(
        corpus.info.parts[shard].num_passages if own is None else len(own) for shard, own in zip(shards, rows)
    )
    log.info("carried over: index=%s passages=%d to_encode=%d", task.index, total - missing, missing)
    if total > missing:
        progress("carried over from earlier versions, passages", total - missing, total)
    return total - missing, missing


def embedded_corpora(store: Store, task: EncodeTask) -> list[EmbeddedCorpus]:
    """The corpora that versions of the store embedded with the task's encoder; of the task's own index first, and there
    the newest first."""
    indexes = sorted(store.list(paths.indexes_dir()), key=lambda name: name != task.index)
    found: dict[tuple[str, tuple[str, ...]], EmbeddedCorpus] = {}
    for index in indexes:
        versions = {number: manifests.read(store, index, number) for number in manifests.list_versions(store, index)}
        for version in reversed(versions.values()):
            same = (version.encoder_fingerprint, version.dtype) == (task.fingerprint, task.dtype)
            if same and _as_encoded(version, versions):
                key = version.corpus_digest, tuple(entry.digest for entry in version.shards)
                found.setdefault(
                    key, EmbeddedCorpus(index, version.corpus, version.corpus_digest, tuple(version.shards))
                )
    return list(found.values())


def _as_encoded(version: Manifest, versions: dict[int, Manifest]) -> bool:
    """Whether a version holds all views as its encoder made them. `versions` are those of the index that stand."""
    if "pruned_views" in version.metrics:
        return False
    if version.operation == "reshard":
        return version.parent in versions and _as_encoded(versions[version.parent], versions)
    if version.operation == "rollback":
        earlier = (one for one in versions.values() if one.version < version.version and one.shards == version.shards)
        return any(_as_encoded(one, versions) for one in earlier)
    return version.operation == "index"


def carry_shard(task: EncodeTask, shard: int, sources: Sequence[EmbeddedCorpus]) -> None:
    """Stage the embeddings of one shard's passages that any source has, and then the rows that none has."""
    store = Store(task.store)
    part = Corpus.open(store, task.corpus, task.corpus_digest).part(shard)
    remaining = {passage.id: passage for passage in part.passages()}
    blocks: list[EmbeddingBlock] = []
    places: list[BlockRow] = []
    for source in sources:
        if not remaining:
            break
        for block in _blocks_of_unchanged(store, source, dict(remaining)):
            for row, passage_id in enumerate(block.ids):
                if remaining.pop(passage_id, None) is not None:
                    places.append(BlockRow(passage_id, len(blocks), row))
            blocks.append(block)
    places.sort()
    if places:
        with store.scratch() as folder:
            file = folder / "carried.arrow"
            with EmbeddingWriter(file, task.dimension, task.num_views, task.dtype) as writer:
                for start in range(0, len(places), BATCH_PASSAGES):
                    writer.write(gather_rows(blocks, places[start : start + BATCH_PASSAGES]))
            store.put_file(file, task.carried_path(shard))
    rows = None if not places else [row for row, name in enumerate(part.ids()) if name in remaining]
    store.write_bytes(task.rows_path(shard), json.dumps(rows).encode())


def _content(passage: Passage) -> Passage:
    """What an embedding depends on."""
    return passage._replace(fields=())


def _blocks_of_unchanged(
    store: Store, source: EmbeddedCorpus, passages: dict[str, Passage]
) -> Iterator[EmbeddingBlock]:
    """Blocks that hold passages of `passages` with the content that they have now, and no others of `passages`.

    What is missing or damaged of a source is passed over: its passages are encoded.
    """
    try:
        before = Corpus.open(store, source.corpus, source.corpus_digest)
        unchanged = {
            name for name, passage in before.get(passages).items() if _content(passage) == _content(passages[name])
        }
    except (MissingInputError, StorageError) as error:
        log.warning("embeddings are not carried over: index=%s (%s)", source.index, error)
        return
    by_shard: dict[int, set[str]] = {}
    for passage_id in unchanged:
        by_shard.setdefault(shard_of(passage_id, len(source.shards)), set()).add(passage_id)
    for number, ids in sorted(by_shard.items()):
        entry = source.shards[number]
        try:
            folder = manifests.open_shard(store, source.index, entry)
        except (MissingInputError, StorageError) as error:
            log.warning("embeddings are not carried over: index=%s shard=%d (%s)", source.index, number, error)
            continue
        for block in open_embeddings(folder, entry.files).blocks():
            here = [BlockRow(passage_id, 0, row) for row, passage_id in enumerate(block.ids) if passage_id in ids]
            if here:
                yield gather_rows([block], here)
