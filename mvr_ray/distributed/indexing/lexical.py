"""Build the lexical index of a version: postings of each shard, and the statistics of the corpus.

A shard with the same passages as in the base version keeps its files. If few passages changed, only their words are
read, and written to a change file beside the postings; the statistics get a change file with the difference of added
and removed passages. Change files of similar size are merged with the new one (`num_kept`). Beyond
`index.compact_share` a file is rewritten. Names come from content, so whole files of a corpus do not depend on earlier
versions.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute

from mvr_ray.distributed.cluster.tasks import run_tasks, share
from mvr_ray.distributed.indexing.shards import related_shards
from mvr_ray.errors import MissingInputError, ShardIndexError, StorageError
from mvr_ray.index.lexical import (
    CorpusStatistics,
    Postings,
    WordCounts,
    WordRule,
    read_rule,
    write_postings,
    write_postings_changes,
    write_statistics,
    write_statistics_changes,
)
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.changes import MAX_CHANGED_SHARE, num_kept
from mvr_ray.store.corpus import Corpus, shard_of
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import FileEntry, LexicalPart, Manifest
from mvr_ray.store.parts import CorpusPart, PartDifference, difference
from mvr_ray.types import IntArray, Passage, Progress, no_progress

Files = tuple[FileEntry, ...]
NO_CHANGE = WordCounts(0, 0, {})
pc: Any = pyarrow.compute


class ShardWords(NamedTuple):
    """The postings of a shard, and the difference of its word counts from the base version; or, without one, the bytes
    of its own statistics if they are wanted."""

    files: Files
    change: WordCounts = NO_CHANGE
    statistics: bytes = b""


class LexicalTask(NamedTuple):
    """Arguments of a task that builds the postings of a shard.

    `language` is that of the words (`index.language`). `before` is the base version with words, over as many shards as
    the corpus has parts; None: every shard is written whole. New files are claimed for the unfinished work of `key`, if
    any.
    """

    corpus: Corpus
    index: str
    num_shards: int
    language: str
    before: Manifest | None = None
    most_share: float = MAX_CHANGED_SHARE
    key: str = ""

    @property
    def rule(self) -> WordRule:
        return WordRule(self.language)


def find_base(store: Store, index: str, corpus: Corpus, language: str) -> Manifest | None:
    """Find the newest version that can serve as base: with words of this language by today's rule, over as many parts
    of its own corpus, and its corpus and statistics whole in the store."""
    for version in manifests.newest_first(store, index):
        if version.lexical is None or len(version.shards) != corpus.num_shards:
            continue
        try:
            is_whole = is_over_parts(store, version) and are_whole(store, index, version.lexical.statistics)
            if is_whole and open_statistics(store, index, version.lexical.statistics).rule == WordRule(language):
                return version
        except (MissingInputError, StorageError, ShardIndexError):
            continue
    return None


def is_over_parts(store: Store, version: Manifest) -> bool:
    """Return whether the shards of a version are the parts of its corpus, as those of a resharded one are not. Raises
    MissingInputError, StorageError."""
    return Corpus.open(store, version.corpus, version.corpus_digest).num_shards == len(version.shards)


def build_lexical(task: LexicalTask, progress: Progress = no_progress, *, statistics: Files = ()) -> LexicalPart:
    """Write the missing files, with a task for each shard. `statistics` are the existing files of the statistics of the
    corpus, if any."""
    before, shared_task, what = task.before, share(task), "index the words"
    needs_statistics = not statistics and before is None
    calls = [(shared_task, shard, needs_statistics) for shard in range(task.num_shards)]
    words: list[ShardWords] = run_tasks(shard_words, calls, what, f"{what}, shards", progress)
    files = tuple(own.files for own in words)
    if needs_statistics:  # a tenth of the postings, which stay where they are
        statistics = (_add(task, lambda path: _join_statistics([own.statistics for own in words], path)),)
    elif not statistics:
        assert before and before.lexical, "the base version has no words"
        statistics = _change_statistics(task, before.lexical.statistics, [own.change for own in words])
    return LexicalPart(statistics, files)


def _join_statistics(shards: Sequence[bytes], path: Path) -> None:
    """Write the statistics of a corpus, the sum of those of its shards."""
    files = [path.with_name(f"{shard}.arrow") for shard in range(len(shards))]
    for file, own in zip(files, shards):
        file.write_bytes(own)
    write_statistics_changes(CorpusStatistics(*files), 0, NO_CHANGE, path)


def shard_words(task: LexicalTask, shard: int, needs_statistics: bool = False) -> ShardWords:
    """Make the postings of one shard: unchanged, with a new change file, or written whole."""
    store, before = task.corpus.store, task.before
    corpus = Corpus(store, task.corpus.info)  # its parts are open for this shard alone
    if before is None:
        statistics: list[bytes] = []

        def write(path: Path) -> None:
            write_postings(shard_passages(corpus, shard, task.num_shards), path, task.rule)
            if needs_statistics:
                own = path.with_name("statistics.arrow")
                write_statistics([Postings(path).whole], own)
                statistics.append(own.read_bytes())

        return ShardWords((_add(task, write),), statistics=b"".join(statistics))
    assert before.lexical, "the base version has no words"
    files, old_corpus = before.lexical.postings[shard], Corpus.open(store, before.corpus, before.corpus_digest)
    is_same = corpus.info.parts[shard].digest == old_corpus.info.parts[shard].digest
    sizes_only = corpus.digest != old_corpus.digest  # an update reads no words that it does not change
    if is_same and are_whole(store, task.index, files, sizes_only):  # without reading the part
        return ShardWords(files)
    old, part = old_corpus.part(shard), corpus.part(shard)
    changes = difference(old, part)
    new_passages = part.take(changes.changed_rows)
    previous = [own for own in map(old.get, [*(one.id for one in new_passages), *changes.deleted_ids]) if own]
    change = WordCounts.difference(new_passages, previous, task.rule)
    if not new_passages and not previous and are_whole(store, task.index, files):
        return ShardWords(files, change)
    new_files = _write_changes(task, files, old, part, changes)
    whole = () if new_files else (_add(task, lambda path: write_postings(part, path, task.rule)),)
    return ShardWords(new_files or whole, change)


def compact_lexical(task: LexicalTask, part: LexicalPart, progress: Progress = no_progress) -> LexicalPart:
    """Rewrite the words with every file whole, as in a version built from scratch."""
    if open_statistics(task.corpus.store, task.index, part.statistics).rule != task.rule:
        return build_lexical(task, progress)
    what = "compact the words"
    changed_shards = [shard for shard, own in enumerate(part.postings) if len(own) > 1]
    results = run_tasks(shard_words, [(task, shard) for shard in changed_shards], what, f"{what}, shards", progress)
    files = {shard: words.files for shard, words in zip(changed_shards, results)}
    postings = tuple(files.get(shard, own) for shard, own in enumerate(part.postings))
    return LexicalPart(_merged_statistics(task, part.statistics), postings)


def _merged_statistics(task: LexicalTask, files: Files, change: WordCounts = NO_CHANGE) -> Files:
    """Merge statistics and a change into one file."""
    if len(files) == 1 and change == NO_CHANGE:
        return files
    statistics = open_statistics(task.corpus.store, task.index, files)
    return (_add(task, lambda path: write_statistics_changes(statistics, 0, change, path)),)


def repair_lexical(store: Store, manifest: Manifest) -> bool:
    """Rebuild the lexical files of a version from its corpus and, in order, those of the earlier versions that share
    files with it; returns whether they now match its manifest."""
    assert manifest.lexical, "the version has no words"
    earlier: list[Manifest] = []
    versions = manifests.newest_first(store, manifest.index, require_live=False) if manifest.lexical.has_changes else ()
    for version in reversed([*versions]):
        is_earlier = version.version < manifest.version
        if not is_earlier or version.lexical is None or len(version.shards) != len(manifest.shards):
            continue
        if {*version.lexical.files} & {*manifest.lexical.files}:
            try:
                _write_again(store, version, earlier)
                if is_over_parts(store, version):
                    earlier.append(version)
            except (MissingInputError, StorageError):
                continue
    return _write_again(store, manifest, earlier)


def _write_again(store: Store, version: Manifest, earlier: Sequence[Manifest]) -> bool:
    """Write the words of a version whole, then on each earlier one as base, until all its files are whole."""
    assert version.lexical, "the version has no words"
    index, num_shards, files = version.index, len(version.shards), version.lexical.files
    language = language_of(store, index, files)
    for base in [None, *reversed(earlier)]:
        if are_whole(store, index, files):
            return True
        corpus = Corpus.open(store, version.corpus, version.corpus_digest)
        if base and corpus.num_shards != num_shards:
            break
        build_lexical(LexicalTask(corpus, index, num_shards, language, base, most_share=1.0))
    return are_whole(store, index, files)


def language_of(store: Store, index: str, files: Files) -> str:
    """Return the language of words by the first whole file; of none, that of `WordRule`."""
    for entry in files:
        with suppress(MissingInputError, StorageError, ShardIndexError):
            return read_rule(*manifests.open_lexical(store, index, [entry])).language
    return WordRule().language


def open_statistics(store: Store, index: str, files: Files) -> CorpusStatistics:
    """Open the statistics of a version's corpus. Raises DigestError for a damaged file, ShardIndexError."""
    return CorpusStatistics(*manifests.open_lexical(store, index, files))


def has_words(store: Store, manifest: Manifest, language: str) -> bool:
    """Return whether a version has words of this language by today's rule, whole in the store."""
    if manifest.lexical is None or not are_whole(store, manifest.index, manifest.lexical.files):
        return False
    return open_statistics(store, manifest.index, manifest.lexical.statistics).rule == WordRule(language)


def shard_passages(corpus: Corpus, shard: int, num_shards: int) -> Iterator[Passage]:
    """Yield the passages of a shard in order of id, for any number of corpus parts."""
    parts = [corpus.part(part) for part in related_shards(shard, corpus.num_shards, num_shards)]
    return (passage for passage in heapq.merge(*parts) if shard_of(passage.id, num_shards) == shard)


def _write_changes(
    task: LexicalTask, files: Files, old: CorpusPart, part: CorpusPart, changes: PartDifference
) -> Files | None:
    """Write the changes since the first of these files; None if they are too many, or a file is damaged."""
    try:
        postings = Postings(*manifests.open_lexical(task.corpus.store, task.index, files))
    except (StorageError, ShardIndexError):
        return None
    sizes = [file.num_changes for file in postings.changes]
    num_files = num_kept(sizes, 2 * len(changes.changed_rows) + len(changes.deleted_ids))
    source_P = _sources(postings, old, part, changes.changed_rows)
    stays_N = np.zeros(postings.num_rows(num_files), bool)
    is_kept_P = (source_P >= 0) & (source_P < len(stays_N))
    stays_N[source_P[is_kept_P]] = True
    places, hidden_rows = np.flatnonzero(~is_kept_P), np.flatnonzero(~stays_N[postings.sources(num_files)])
    if sum(sizes[:num_files]) + len(places) + len(hidden_rows) > task.most_share * len(postings.whole.length_P):
        return None
    if not len(places) and not len(hidden_rows):
        return files[: 1 + num_files]
    passages = part.take(places.tolist())
    entry = _add(task, lambda path: write_postings_changes(passages, places, hidden_rows, path, task.rule))
    return *files[: 1 + num_files], entry


def _sources(postings: Postings, old: CorpusPart, part: CorpusPart, changed_rows: Sequence[int]) -> IntArray:
    """Return the row of each passage of a part in the earlier postings; -1 if it is new or changed."""
    rows = pc.index_in(part.table(["id"]).column("id"), value_set=old.table(["id"]).column("id"))
    row_P = pc.fill_null(rows, -1).to_numpy().astype(np.int64)
    row_P[np.asarray(changed_rows, np.int64)] = -1
    source_P = np.full(len(row_P), -1, np.int64)
    source_P[row_P >= 0] = postings.source_P[row_P[row_P >= 0]]
    return source_P


def _change_statistics(task: LexicalTask, files: Files, changes: Sequence[WordCounts]) -> Files:
    """Add the sum of the shards' changes to the statistics of the base version."""
    frequencies: Counter[str] = Counter()
    for own in changes:
        frequencies.update(own.frequencies)
    num_passages, num_words = sum(own.num_passages for own in changes), sum(own.num_words for own in changes)
    change = WordCounts(num_passages, num_words, {term: count for term, count in frequencies.items() if count})
    if change == NO_CHANGE:
        return files
    before = open_statistics(task.corpus.store, task.index, files)
    sizes, num_own = before.num_changes, len(change.frequencies)
    if sum(sizes) + num_own > task.most_share * before.num_terms:
        return _merged_statistics(task, files, change)
    num_files = 1 + num_kept(sizes, num_own)
    return *files[:num_files], _add(task, lambda path: write_statistics_changes(before, num_files, change, path))


def _add(task: LexicalTask, write: Callable[[Path], object]) -> FileEntry:
    """Add the file that `write` writes to the store."""
    store = task.corpus.store
    with store.scratch() as folder:
        path = folder / "words.arrow"
        write(path)
        entry = manifests.add_lexical(store, task.index, path)
    if task.key:
        staging, path_in_store = paths.staging_dir(task.index, task.key), manifests.lexical_path(task.index, entry)
        store.write_bytes(paths.staged_claim(staging, path_in_store), b"")
    return entry


def are_whole(store: Store, index: str, files: Files, sizes_only: bool = False) -> bool:
    """Return whether these lexical files are in the store undamaged; with `sizes_only`, whether they have their
    sizes."""
    checks = [(manifests.lexical_path(index, one), one.num_bytes, "" if sizes_only else one.sha256) for one in files]
    return not any(store.for_each(lambda check: store.damage(*check), checks))
