"""Build the words of a version's passages beside its views: postings a shard, and the statistics of the corpus.

A shard of which an earlier version has the same passages keeps its postings; the statistics are written anew for each
corpus. Names come from content, so the same corpus has the same files whatever was built before.
"""

import math
from collections.abc import Mapping
from typing import Any

import ray

from mvr_ray.distributed.shards import BUILD_CPUS
from mvr_ray.distributed.tasks import task_results
from mvr_ray.index.lexical import CorpusStatistics, LexicalIndex, Postings, write_postings, write_statistics
from mvr_ray.store import manifest as manifests
from mvr_ray.store.corpus import Corpus, shard_of
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import FileEntry, LexicalPart, Manifest
from mvr_ray.types import Passage, Progress, no_progress


def build_lexical(
    index: str,
    corpus: Corpus,
    num_shards: int,
    entries: Mapping[int, FileEntry] | None = None,
    progress: Progress = no_progress,
) -> LexicalPart:
    """Write what is missing, a Ray task a shard. `entries` has the postings of shards that are whole in the store."""
    postings = dict(entries or {})
    missing = [shard for shard in range(num_shards) if shard not in postings]
    remote: Any = ray.remote(_build_task).options(num_cpus=BUILD_CPUS)
    store, name = corpus.store.address, corpus.name
    tasks = [remote.remote(store, index, name, corpus.digest, shard, num_shards) for shard in missing]
    for done, (shard, entry) in enumerate(task_results(tasks, "indexing the words"), 1):
        postings[shard] = entry
        progress("index the words, shards", done, len(missing))
    files = tuple(postings[shard] for shard in range(num_shards))
    return LexicalPart(_add_statistics(corpus.store, index, files), files)


def build_postings(store: Store, index: str, corpus: Corpus, shard: int, num_shards: int) -> FileEntry:
    """Write the postings of one of `num_shards` shards."""
    with store.scratch() as folder:
        write_postings(shard_passages(corpus, shard, num_shards), folder / "postings.arrow")
        return manifests.add_lexical(store, index, folder / "postings.arrow")


def repair_lexical(store: Store, manifest: Manifest) -> bool:
    """Write the files of words of a version again from its corpus; whether they are now what its manifest says."""
    corpus = Corpus.open(store, manifest.corpus, manifest.corpus_digest)
    return make_lexical(manifest.index, corpus, len(manifest.shards)) == manifest.lexical


def make_lexical(index: str, corpus: Corpus, num_shards: int) -> LexicalPart:
    """Write all files of words, in this process."""
    files = tuple(build_postings(corpus.store, index, corpus, shard, num_shards) for shard in range(num_shards))
    return LexicalPart(_add_statistics(corpus.store, index, files), files)


def open_lexical(store: Store, manifest: Manifest, at: int) -> LexicalIndex:
    """The words of the version's shard at this place. Raises DigestError for a damaged file, ShardIndexError."""
    assert manifest.lexical, "the version has no lexical part"
    postings = manifests.open_lexical(store, manifest.index, manifest.lexical.postings[at])
    return LexicalIndex.open(postings, manifests.open_lexical(store, manifest.index, manifest.lexical.statistics))


def open_statistics(store: Store, manifest: Manifest) -> CorpusStatistics:
    """The statistics of the version's corpus. Raises DigestError for a damaged file, ShardIndexError."""
    assert manifest.lexical, "the version has no lexical part"
    return CorpusStatistics(manifests.open_lexical(store, manifest.index, manifest.lexical.statistics))


def shard_passages(corpus: Corpus, shard: int, num_shards: int) -> list[Passage]:
    """The passages of a shard in order of id, in however many parts the corpus lies."""
    if num_shards == corpus.num_shards:
        return corpus.part(shard).passages()
    step = math.gcd(num_shards, corpus.num_shards)  # a part of another residue holds no passage of the shard
    parts = range(shard % step, corpus.num_shards, step)
    own = (one for part in parts for one in corpus.part(part).passages() if shard_of(one.id, num_shards) == shard)
    return sorted(own)


def _build_task(store: str, index: str, corpus: str, digest: str, shard: int, num_shards: int) -> tuple[int, FileEntry]:
    opened = Store(store)
    return shard, build_postings(opened, index, Corpus.open(opened, corpus, digest), shard, num_shards)


def _add_statistics(store: Store, index: str, entries: tuple[FileEntry, ...]) -> FileEntry:
    shards = [Postings(manifests.open_lexical(store, index, entry)) for entry in entries]
    with store.scratch() as folder:
        write_statistics(shards, folder / "statistics.arrow")
        return manifests.add_lexical(store, index, folder / "statistics.arrow")
