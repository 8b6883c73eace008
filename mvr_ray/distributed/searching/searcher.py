"""Holds shards of several versions of an index, each shard once, and scans them.

A searcher is a plain class built from names and digests, so Ray can restart a dead actor on any node: a request opens
shards that are not open, and reads the manifest of an unknown version from the store. A shard's files are read once and
compared with their digests before they are opened; versions that name the same shard (by its digest) share it. The
answer reports a damaged shard and has the results of the others. A searcher also returns the stored views of passages.

Shapes: Q queries, K hits, D dimension.
"""

import json
import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from mvr_ray import logs
from mvr_ray.core.searching.exact import BlockTable, Pairs, ScoredPairs, check_queries, distinct
from mvr_ray.core.searching.hybrid import hybrid_search, lexical_search
from mvr_ray.deadline import Deadline
from mvr_ray.distributed.searching.masks import Mask, MaskCache
from mvr_ray.distributed.searching.memory import MemoryUsage, free_bytes, node_name
from mvr_ray.distributed.searching.messages import ScanRequest, ShardFailure, ShardResult, ShardResults, ViewResults
from mvr_ray.errors import ManifestError, MissingInputError, MvrRayError, ShardIndexError, StorageError
from mvr_ray.index.base import IndexParams, ShardIndex
from mvr_ray.index.kinds import open_index
from mvr_ray.index.lexical import CorpusStatistics, LexicalIndex, Postings, tokenize
from mvr_ray.store import manifest as manifests
from mvr_ray.store.delta import open_embeddings
from mvr_ray.store.embeddings import EmbeddingShard, arrow_rows
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import FileEntry, Manifest, ShardEntry
from mvr_ray.types import CountedHits, FloatArray, IntArray, ShardHits

log = logging.getLogger(__name__)
T = TypeVar("T")
NO_WORDS_HINT = "index them, without encoding again: mvr-ray index CONFIG index.lexical=true"

Key = str
"""The identity of an open shard: its digest, a space, and its index parameters."""
MAX_CANCELLED = 4096
"""Cancelled calls to remember; most of them end before the cancellation arrives."""


class SearcherTask(NamedTuple):
    """The settings of a searcher. `device` is cpu or cuda; `tls_dir` and `scrub_bytes_s` as in the run file."""

    store: str
    manifest: Manifest
    shards: tuple[int, ...]
    threads: int = 1
    device: str = "cpu"
    tls_dir: str = ""
    scrub_bytes_s: int = 0


class ShardAssignment(NamedTuple):
    """Shards of one version, assigned to a searcher."""

    manifest: Manifest
    shards: tuple[int, ...]


OnPartial = Callable[[ShardResults], None]


class Heartbeat(NamedTuple):
    """A searcher's progress: `instance_id` changes with every restart, `num_finished` counts the calls that ended.

    While `is_opening` files, a searcher ends no call.
    """

    instance_id: str
    num_finished: int
    is_opening: bool


class _Version(NamedTuple):
    """A manifest, with its entries by shard, and the keys of shards, postings and statistics."""

    manifest: Manifest
    entries: dict[int, ShardEntry]
    keys: dict[int, Key]
    postings_keys: dict[int, Key]
    statistics_key: Key

    @classmethod
    def of(cls, manifest: Manifest) -> "_Version":
        entries = {entry.shard: entry for entry in manifest.shards}
        return cls(manifest, entries, shard_keys(manifest), postings_keys(manifest), statistics_key(manifest))

    def words_key(self, shard: int) -> Key | None:
        """The key of a shard's lexical index (postings and statistics); None for a version without words."""
        return f"{self.postings_keys[shard]} {self.statistics_key}" if self.statistics_key else None

    def all_keys(self) -> set[Key]:
        words = {key for shard in self.postings_keys if (key := self.words_key(shard))}
        return {*self.keys.values(), *self.postings_keys.values(), self.statistics_key, *words}


class OpenFile(NamedTuple):
    """An open file of a shard, even if its path names another file now, and its entry in the manifest."""

    path: Path
    handle: pa.NativeFile
    entry: FileEntry


class OpenShard(NamedTuple):
    index: ShardIndex | None
    embedded: EmbeddingShard
    ids: pa.Array
    num_bytes: int
    files: tuple[OpenFile, ...] = ()
    table: BlockTable | None = None

    def as_flat(self, task: SearcherTask) -> "OpenShard":
        """The same shard with a flat index, which scans every view."""
        if self.index is None or self.index.exact:
            return self
        flat = open_index(IndexParams(), self.embedded.blocks(), Path(), device=task.device, threads=task.threads)
        return self._replace(index=flat)


class ShardSearcher:
    """Searches shards of several versions. Opens them on request or at the first search. Safe to use from several
    threads."""

    def __init__(self, task: SearcherTask) -> None:
        self.task = task
        self.instance_id = uuid.uuid4().hex
        self._versions: dict[int, _Version] = {}
        self._dropped_versions: set[int] = set()
        self._shards: dict[Key, OpenShard] = {}
        self._postings: dict[Key, Postings] = {}
        self._statistics: dict[Key, CorpusStatistics] = {}
        self._word_files: dict[Key, tuple[OpenFile, ...]] = {}
        self._damaged: dict[Key, str] = {}
        self._open_lock = threading.Lock()
        self._lock = threading.Lock()
        self._num_finished = 0
        self._cancelled: dict[str, None] = {}
        self._masks = MaskCache(task.store)

    def open(self, assignments: Sequence[ShardAssignment] = ()) -> str:
        """Open every shard of the assignments (by default the task's) beside the open ones; return `instance_id`.

        Raises DigestError, ManifestError or another StorageError if a shard's files differ from the manifest, after all
        others are open. Reads damaged shards again.
        """
        failure: MvrRayError | None = None
        for manifest, shards in assignments or [ShardAssignment(self.task.manifest, self.task.shards)]:
            version = _Version.of(manifest)
            with self._lock:
                self._versions[manifest.version] = version
                self._dropped_versions.discard(manifest.version)
            for shard in shards:
                for key, opens in ((version.keys[shard], self._open), (version.words_key(shard), self._open_words)):
                    try:
                        if key is not None:
                            opens(version, shard)
                    except MvrRayError as error:
                        self._damaged[key or ""] = str(error)
                        failure = failure or error
        if failure:
            raise failure
        return self.instance_id

    def drop(self, version: int) -> None:
        """Release a version and its shards that no other version names. A search that runs on them can finish."""
        self._masks.drop(version)
        with self._lock:
            self._dropped_versions.add(version)
            self._versions.pop(version, None)
            keys = {key for one in self._versions.values() for key in one.all_keys()}
            for cache in (self._shards, self._postings, self._statistics, self._word_files, self._damaged):
                for key in [key for key in cache if key not in keys]:
                    del cache[key]

    def health(self) -> list[str]:
        """Digests of the shards that are open now; also answers during a search."""
        return sorted({key.partition(" ")[0] for key in list(self._shards)})

    def open_files(self) -> list[tuple[Key, tuple["OpenFile", ...]]]:
        """The open files of each shard and of its words."""
        return [(key, shard.files) for key, shard in list(self._shards.items())] + list(self._word_files.items())

    def damaged_keys(self) -> list[Key]:
        return list(self._damaged)

    def withdraw(self, key: Key, files: tuple["OpenFile", ...], reason: str) -> None:
        """Release a shard, or words, whose files have changed since they were opened, and mark as damaged the shard,
        or for hybrid searches every shard with these words."""
        with self._lock:
            if key in self._shards and self._shards[key].files is files:
                self._damaged[key] = reason
                del self._shards[key]
            elif self._word_files.get(key) is files:
                for cache in (self._word_files, self._postings, self._statistics):
                    cache.pop(key, None)
                for version in self._versions.values():
                    shards = [
                        shard for shard, one in version.postings_keys.items() if key in (one, version.statistics_key)
                    ]
                    self._damaged |= {version.words_key(shard) or "": reason for shard in shards}

    def reopen(self, key: Key) -> bool:
        """Try to open a damaged shard, or its words, again. True if it is open, or if no version names it any more."""
        for version in list(self._versions.values()):
            for shard, shard_key in version.keys.items():
                opens = {shard_key: self._open, version.words_key(shard): self._open_words}.get(key)
                if opens is not None:
                    try:
                        opens(version, shard)
                    except (MvrRayError, OSError) as error:
                        self._damaged[key] = str(error)
                        return False
                    index, number = version.manifest.index, version.manifest.version
                    log.info("shard open again: index=%s version=%d shard=%d", index, number, shard)
                    return True
        self._damaged.pop(key, None)
        return True

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self.instance_id, self._num_finished, self._open_lock.locked())

    def memory(self) -> MemoryUsage:
        """The bytes held here, and those free on this machine."""
        caches = self._shards, self._postings, self._statistics
        held_bytes = {key: one.num_bytes for cache in caches for key, one in list(cache.items())}
        return MemoryUsage(node_name(), free_bytes(), held_bytes)

    def scan(self, request: ScanRequest, call: str = "") -> ShardResults:
        """Search each of the request's shards for every query's best k passages. A shard counts as damaged also if a
        filter cannot read its passages' fields, or a hybrid search its words.

        Returns nothing for a `call` that was cancelled. A call's name begins with its request's, before a slash.
        """
        answer = ShardResults([], [])
        if self._is_cancelled(call):
            return answer
        version, hybrid = self._get_version(request.version), request.hybrid
        words = tokenize(hybrid.texts) if hybrid else []
        for shard in request.shards:
            open_shard = self._get_open(version, shard, call)
            if isinstance(open_shard, ShardFailure):
                answer.failures.append(open_shard)
                continue
            mask_P = self._mask(version, shard, open_shard, request.filter)
            lexical = self._get_words(version, shard, call) if hybrid else None
            if isinstance(mask_P, ShardFailure):
                answer.failures.append(mask_P)
            elif isinstance(lexical, ShardFailure):
                answer.failures.append(lexical)
            elif hybrid and lexical:
                answer.results.append(_scan_hybrid(open_shard, lexical, shard, request, words, mask_P))
            else:
                answer.results.append(_scan(open_shard, shard, request.queries_QD, request.k, mask_P))
        self._num_finished += 1
        return answer

    def exact(self, queries_QD: FloatArray, k: int, shards: Sequence[int], version: int) -> list[ShardResult]:
        """Search these shards exhaustively for the true best k; omits those that cannot be opened."""
        own = self._get_version(version)
        open_shards = [(shard, self._get_open(own, shard)) for shard in shards]
        return [
            _scan(one.as_flat(self.task), shard, queries_QD, k)
            for shard, one in open_shards
            if isinstance(one, OpenShard)
        ]

    def views(self, ids: Mapping[int, Sequence[str]], version: int | None = None, call: str = "") -> ViewResults:
        """The stored views of these passages, by shard; ids that a shard does not hold are absent."""
        answer = ViewResults({}, [])
        if self._is_cancelled(call):
            return answer
        own = self._get_version(version)
        for shard, names in ids.items():
            open_shard = self._get_open(own, shard, call)
            if isinstance(open_shard, OpenShard):
                answer.views.update(open_shard.embedded.find(names))
            else:
                answer.failures.append(open_shard)
        self._num_finished += 1
        return answer

    def cancel(self, call: str) -> None:
        """Skip this call if it has not begun."""
        with self._lock:
            self._cancelled[call] = None
            while len(self._cancelled) > MAX_CANCELLED:
                del self._cancelled[next(iter(self._cancelled))]

    def probe(self, version: int | None = None) -> list[int]:
        """Search the open shards of one version, or of all, for one query; return the number of hits of each."""
        versions = list(self._versions.values()) if version is None else [self._get_version(version)]
        dimensions = {key: one.manifest.dimension for one in versions for key in one.keys.values()}
        counts = []
        for key, dimension in dimensions.items():
            open_shard = self._shards.get(key)
            if open_shard is not None:
                query_1D = np.eye(1, dimension, dtype=np.float32)
                counts.append(int((_scan(open_shard, -1, query_1D, 1).hits.rows_QK >= 0).sum()))
        self._num_finished += 1
        return counts

    def _mask(self, version: _Version, shard: int, open_shard: OpenShard, filter: str) -> Mask | ShardFailure | None:
        if not filter or not open_shard.embedded.num_passages:
            return None
        try:
            return self._masks.mask(version.manifest, shard, open_shard.ids, filter)
        except (StorageError, MissingInputError) as error:
            log.error("no fields: index=%s shard=%d reason=%s", version.manifest.index, shard, error)
            return ShardFailure((shard,), "damaged", str(error))

    def _is_cancelled(self, call: str) -> bool:
        with self._lock:
            is_cancelled = call in self._cancelled
            self._cancelled.pop(call, None)
        self._num_finished += is_cancelled
        return is_cancelled

    def _get_version(self, number: int | None) -> _Version:
        own = self.task.manifest
        number = own.version if number is None else number
        version = self._versions.get(number)
        if version is not None:
            return version
        if number in self._dropped_versions:
            raise ShardIndexError(f"index {own.index!r} version {number} was dropped here; ask the live one")
        manifest = own if number == own.version else manifests.read(Store(self.task.store), own.index, number)
        version = _Version.of(manifest)
        with self._lock:
            return self._versions.setdefault(number, version)

    def _get_open(self, version: _Version, shard: int, call: str = "") -> OpenShard | ShardFailure:
        key = version.keys[shard]
        return self._shards.get(key) or self._try_open(self._open, version, shard, key, call)

    def _get_words(self, version: _Version, shard: int, call: str) -> LexicalIndex | ShardFailure:
        key = version.words_key(shard)
        if key is None:
            raise ShardIndexError(
                f"index {version.manifest.index!r} version {version.manifest.version} has no words of its passages; "
                f"{NO_WORDS_HINT}"
            )
        return self._try_open(self._open_words, version, shard, key, call)

    def _try_open(
        self, opens: Callable[[_Version, int], T], version: _Version, shard: int, key: Key, call: str
    ) -> T | ShardFailure:
        """Open a shard, or its words, during a call; return a failure if its files are damaged."""
        if key not in self._damaged:
            with logs.request_context(call.rpartition("/")[0]):
                try:
                    return opens(version, shard)
                except MvrRayError as error:
                    log.error("shard damaged: index=%s shard=%d reason=%s", version.manifest.index, shard, error)
                    self._damaged[key] = str(error)
        return ShardFailure((shard,), "damaged", self._damaged[key])

    def _open(self, version: _Version, shard: int) -> OpenShard:
        key = version.keys[shard]
        with self._open_lock:
            open_shard = self._shards.get(key)
            if open_shard is None:
                open_shard = self._read(version.manifest, version.entries[shard])
                with self._lock:
                    self._shards[key] = open_shard
                    self._damaged.pop(key, None)
        return open_shard

    def _open_words(self, version: _Version, shard: int) -> LexicalIndex:
        entry, lexical, statistics_key = version.entries[shard], version.manifest.lexical, version.statistics_key
        assert lexical, "the version has no words"
        key, files = version.postings_keys[shard], lexical.postings[version.manifest.shards.index(entry)]
        postings, statistics = self._postings.get(key), self._statistics.get(statistics_key)
        if postings is not None and statistics is not None and version.words_key(shard) not in self._damaged:
            return LexicalIndex(postings, statistics)
        with self._open_lock:
            postings = self._read_words(self._postings, Postings, key, files)
            statistics = self._read_words(self._statistics, CorpusStatistics, statistics_key, lexical.statistics)
        if postings.num_passages != entry.num_passages:
            raise ManifestError(
                f"the words of shard {shard} of index {version.manifest.index!r} are those of {postings.num_passages} "
                f"passages, its manifest says {entry.num_passages}. Roll back, or index again"
            )
        with self._lock:
            self._damaged.pop(version.words_key(shard) or "", None)
        return LexicalIndex(postings, statistics)

    def _read_words(self, cache: dict[Key, T], kind: Callable[..., T], key: Key, files: Sequence[FileEntry]) -> T:
        """The postings or statistics of a key, read from the store if the cache lacks them."""
        value = cache.get(key)
        if value is None:
            paths = manifests.open_lexical(Store(self.task.store), self.task.manifest.index, files)
            open_files = tuple(OpenFile(path, pa.OSFile(str(path)), file) for path, file in zip(paths, files))
            value = kind(*paths)
            with self._lock:
                cache[key], self._word_files[key] = value, open_files
        return value

    def _read(self, manifest: Manifest, entry: ShardEntry) -> OpenShard:
        shard = entry.shard
        folder = manifests.open_shard(Store(self.task.store), manifest.index, entry)
        files = tuple(
            OpenFile(folder / name, pa.OSFile(str(folder / name)), file) for name, file in entry.files.items()
        )
        embeddings = open_embeddings(folder, entry.files)
        if (embeddings.dimension, embeddings.num_passages) != (manifest.dimension, entry.num_passages):
            raise ManifestError(
                f"shard {shard} of index {manifest.index!r} holds {embeddings.num_passages} passages in dimension "
                f"{embeddings.dimension}; its manifest says {entry.num_passages} in {manifest.dimension}. "
                f"Roll back, or index again"
            )
        if not embeddings.num_passages:
            return OpenShard(None, embeddings, pa.nulls(0, pa.string()), entry.num_bytes, files)
        params, blocks = IndexParams(**manifest.index_params), embeddings.blocks()
        rows_N = embeddings.first_rows() if params.scan == "int8" else None
        index = open_index(params, blocks, folder, rows_N, device=self.task.device, threads=self.task.threads)
        log.info("shard open: index=%s version=%d shard=%d", manifest.index, manifest.version, shard)
        ids = pa.concat_arrays(embeddings.arrow_ids().chunks)
        return OpenShard(index, embeddings, ids, entry.num_bytes, files, BlockTable(blocks))


class Fleet(Protocol):
    """Searchers that together hold every shard of a version."""

    def ready(self) -> None:
        """Return when every shard is open."""
        ...

    def fan_out(
        self, request: ScanRequest, deadline: Deadline, *, admit: bool = False, on_partial: OnPartial | None = None
    ) -> ShardResults:
        """Scan the request's shards. `admit`: never refuse the request for a full queue (a second round).
        `on_partial` is called with each part of the answer when it arrives, if parts arrive separately."""
        ...

    def views(self, ids: Mapping[int, Sequence[str]], deadline: Deadline) -> ViewResults:
        """Stored views of passages, by the shard that holds them."""
        ...


class ExactFleet(Fleet, Protocol):
    """A fleet that can also search exhaustively."""

    def exact(self, queries_QD: FloatArray, k: int, deadline: Deadline) -> list[ShardResult]: ...


class LocalFleet:
    """Searches with one searcher in this process; ignores deadlines."""

    def __init__(self, task: SearcherTask, searcher: ShardSearcher | None = None) -> None:
        """`searcher` may hold other versions too."""
        self.task = task
        self.searcher = searcher or ShardSearcher(task)

    def ready(self) -> None:
        self.searcher.open([ShardAssignment(self.task.manifest, self.task.shards)])

    def fan_out(
        self, request: ScanRequest, deadline: Deadline, *, admit: bool = False, on_partial: OnPartial | None = None
    ) -> ShardResults:
        return self.searcher.scan(request)

    def exact(self, queries_QD: FloatArray, k: int, deadline: Deadline) -> list[ShardResult]:
        """Search every shard exhaustively for the true best k."""
        return self.searcher.exact(queries_QD, k, self.task.shards, self.task.manifest.version)

    def views(self, ids: Mapping[int, Sequence[str]], deadline: Deadline) -> ViewResults:
        return self.searcher.views(ids, self.task.manifest.version)


def shard_keys(manifest: Manifest) -> dict[int, Key]:
    """The key of each shard of a version. The same files with other index parameters have another key."""
    params = json.dumps(manifest.index_params, sort_keys=True)
    return {entry.shard: f"{entry.digest} {params}" for entry in manifest.shards}


def postings_keys(manifest: Manifest) -> dict[int, Key]:
    """The key of the postings of each shard of a version; empty for a version without words."""
    postings = manifest.lexical.postings if manifest.lexical else ()
    return {entry.shard: _words_key(files) for entry, files in zip(manifest.shards, postings)}


def statistics_key(manifest: Manifest) -> Key:
    """The key of the statistics of a version's corpus; empty for a version without words."""
    return _words_key(manifest.lexical.statistics) if manifest.lexical else ""


def _words_key(files: Sequence[FileEntry]) -> Key:
    return " ".join(["words", *(file.sha256 for file in files)])


def assignment_bytes(manifest: Manifest, shards: Sequence[int]) -> dict[Key, int]:
    """The bytes of these shards and their words in a searcher, by key."""
    keys, words = shard_keys(manifest), postings_keys(manifest)
    bytes_of = {keys[entry.shard]: entry.num_bytes for entry in manifest.shards if entry.shard in shards}
    if manifest.lexical:
        files = {statistics_key(manifest): manifest.lexical.statistics}
        files |= {words[entry.shard]: one for entry, one in zip(manifest.shards, manifest.lexical.postings)}
        word_keys = {statistics_key(manifest), *(words[shard] for shard in shards)}
        bytes_of |= {key: sum(file.num_bytes for file in files[key]) for key in word_keys}
    return bytes_of


def _scan_hybrid(
    open_shard: OpenShard,
    lexical: LexicalIndex,
    shard: int,
    request: ScanRequest,
    words: Sequence[Sequence[str]],
    mask_P: Mask | None,
) -> ShardResult:
    index, table = open_shard.index, open_shard.table
    if index is None or table is None:
        return _scan(open_shard, shard, request.queries_QD, request.k)
    assert request.hybrid and request.hybrid.weight != "rrf", "the router fuses ranks of whole lists"
    queries_QD, rows_P = check_queries(request.queries_QD, index.dimension), table.scorable_rows
    rows_P, k = rows_P if mask_P is None else rows_P[mask_P[rows_P]], min(request.k, index.num_passages)
    weight = request.hybrid.weight

    def search(queries: IntArray, depth: int) -> ShardHits:
        return index.search(queries_QD[queries], depth, mask_P)

    def rescore(pairs: Pairs) -> ScoredPairs:
        return table.rescore(queries_QD, pairs)

    def lexical_scores(query: int) -> FloatArray:
        return lexical.scores(words[query])

    if weight == "words":
        counted_hits = lexical_search(rescore, lexical_scores, rows_P, len(queries_QD), k)
    else:
        sides = search, rescore, lexical_scores
        counted_hits = hybrid_search(*sides, rows_P, len(queries_QD), weight, k, exact=index.exact)
    return _as_result(shard, counted_hits, open_shard.ids)


def _scan(open_shard: OpenShard, shard: int, queries_QD: FloatArray, k: int, mask_P: Mask | None = None) -> ShardResult:
    index, ids = open_shard.index, open_shard.ids
    if index is None:
        none_Q0 = np.zeros((len(queries_QD), 0))
        frontier_Q = np.full(len(queries_QD), -np.inf, np.float32)
        empty = none_Q0.astype(np.int64), none_Q0.astype(np.float32), none_Q0.astype(np.int16), frontier_Q
        return ShardResult(shard, ShardHits(*empty), np.zeros(len(queries_QD), np.int64), np.empty(0, np.int64), ids)
    return _as_result(shard, index.search_with_counts(queries_QD, min(k, index.num_passages), mask_P), ids)


def _as_result(shard: int, counted_hits: CountedHits, ids: pa.Array) -> ShardResult:
    hits, rescored_Q = counted_hits
    rows = distinct(hits.rows_QK)
    rows_R = rows[np.searchsorted(rows, 0) :]
    return ShardResult(shard, hits, rescored_Q, rows_R, ids.take(arrow_rows(rows_R)))
