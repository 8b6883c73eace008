"""Holds shards of several versions of an index, each shard once, and scans them.

A searcher is a plain class built from names and digests, so Ray can restart a dead actor on any node: a request opens
shards that are not open, and reads the manifest of an unknown version from the store. What it opens are *parts*: the
views of a shard, the words of a shard, and the statistics of all words. A part's files are read once and compared with
their digests before they are opened; versions that name the same part (by its digests) share it. The answer reports a
damaged shard and has the results of the others. A searcher also returns the stored views of passages.

`Fleet` is the protocol of all holders of shards; here is the one in this process, without Ray (`fleet`: in actors).

Shapes: Q queries, K hits, D dimension.
"""

import json
import logging
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa

from mvr_ray import logs
from mvr_ray.core.searching.exact import check_queries, distinct, no_hits
from mvr_ray.core.searching.hybrid import hybrid_search, lexical_search
from mvr_ray.deadline import Deadline
from mvr_ray.distributed.searching.file_limit import raise_file_limit, translate_open_errors
from mvr_ray.distributed.searching.masks import Mask, VersionMasks, limit_masks
from mvr_ray.distributed.searching.memory import MemoryUsage, free_bytes, node_name, require_memory
from mvr_ray.distributed.searching.messages import ScanRequest, ShardFailure, ShardResult, ShardResults, ViewResults
from mvr_ray.errors import ManifestError, MissingInputError, MvrRayError, ShardIndexError, StorageError
from mvr_ray.index.base import IndexParams, ShardIndex
from mvr_ray.index.flat import CODES_FILE
from mvr_ray.index.kinds import open_index
from mvr_ray.index.lexical import CorpusStatistics, Postings
from mvr_ray.store import manifest as manifests
from mvr_ray.store.delta import open_embeddings
from mvr_ray.store.embeddings import EmbeddingShard, arrow_rows
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import FileEntry, Manifest, ShardEntry
from mvr_ray.types import CountedHits, FleetCounts, FloatArray, IntArray

log = logging.getLogger(__name__)

Key = str
"""The identity of a part: its digests, and the index parameters of views."""
MAX_CANCELLED = 4096
"""Cancelled calls to remember; most of them end before the cancellation arrives."""


class SearcherTask(NamedTuple):
    """The settings of a searcher. `device` is cpu or cuda; `tls_dir` and `scrub_bytes_s` as in the run file."""

    store: str
    manifest: Manifest
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


class OpenFile(NamedTuple):
    """An open file of a part, even if its path names another file now, and its entry in the manifest."""

    path: Path
    handle: pa.NativeFile
    entry: FileEntry


class OpenShard(NamedTuple):
    """The views of a shard; an empty shard has no index."""

    embeddings: EmbeddingShard
    ids: pa.Array
    index: ShardIndex | None = None

    def as_flat(self, task: SearcherTask) -> "OpenShard":
        """Return the same shard with a flat index, which scans every view."""
        if self.index is None or self.index.exact:
            return self
        blocks, rows = self.embeddings.stored_blocks()
        flat = open_index(IndexParams(), blocks, Path(), rows, device=task.device, threads=task.threads)
        return self._replace(index=flat)


class Part(NamedTuple):
    """A part of a version: what to open (`kind`: OpenShard, Postings or CorpusStatistics), and its files."""

    kind: Any
    key: Key
    entry: ShardEntry
    files: tuple[FileEntry, ...]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)


class OpenPart(NamedTuple):
    """A part in memory; `value` is of its kind."""

    value: Any
    files: tuple[OpenFile, ...]


class _Version(NamedTuple):
    manifest: Manifest
    parts: dict[int, list[Part]]
    masks: VersionMasks

    def by_key(self) -> dict[Key, Part]:
        return {part.key: part for own in self.parts.values() for part in own}


class _DamagedError(Exception):
    """A shard cannot answer, because one of its parts or the fields of its passages are damaged."""


class ShardSearcher:
    """Searches shards of several versions. Opens them on request or at the first search. Safe to use from several
    threads."""

    def __init__(self, task: SearcherTask) -> None:
        raise_file_limit()
        self.task = task
        self.instance_id = uuid.uuid4().hex
        self._versions: dict[int, _Version] = {}
        self._dropped_versions: set[int] = set()
        self._parts: dict[Key, OpenPart] = {}
        self._damage: dict[Key, str] = {}
        self._open_lock = threading.Lock()
        self._lock = threading.Lock()
        self._num_finished = 0
        self._cancelled_calls: dict[str, None] = {}

    def open(self, assignments: Sequence[ShardAssignment]) -> str:
        """Open every shard of the assignments beside the open ones; return `instance_id`.

        Raises DigestError, ManifestError or another StorageError if a shard's files differ from the manifest, after all
        others are open. Reads damaged shards again.
        """
        failure: MvrRayError | None = None
        for manifest, shards in assignments:
            version = self._new_version(manifest)
            with self._lock:
                former = self._versions.get(manifest.version)
                if former and former.manifest.token == manifest.token:
                    version = version._replace(masks=former.masks)
                self._versions[manifest.version] = version
                self._dropped_versions.discard(manifest.version)
            for part in [part for shard in shards for part in version.parts[shard]]:
                try:
                    self._open(version, part)
                except MvrRayError as error:
                    failure = failure or error
        if failure:
            raise failure
        return self.instance_id

    def drop(self, version: int) -> None:
        """Release a version and its parts that no other version names. A search that runs on them can finish."""
        with self._lock:
            self._dropped_versions.add(version)
            self._versions.pop(version, None)
            keys = {key for one in self._versions.values() for key in one.by_key()}
            self._parts = {key: part for key, part in self._parts.items() if key in keys}
            self._damage = {key: reason for key, reason in list(self._damage.items()) if key in keys}

    def health(self) -> list[str]:
        """Return the digests of the shards that are open now; also answers during a search."""
        open_parts = list(self._parts.items())
        return sorted({key.partition(" ")[0] for key, part in open_parts if isinstance(part.value, OpenShard)})

    def open_files(self) -> dict[Key, tuple[OpenFile, ...]]:
        """Return the open files of each part."""
        return {key: part.files for key, part in list(self._parts.items())}

    def damaged_keys(self) -> list[Key]:
        return list(self._damage)

    def withdraw(self, key: Key, files: tuple[OpenFile, ...], reason: str) -> None:
        """Release a part whose files have changed since they were opened, and mark it as damaged."""
        with self._lock:
            if key in self._parts and self._parts[key].files is files:
                self._damage[key] = reason
                del self._parts[key]

    def reopen(self, key: Key) -> bool:
        """Try to open a damaged part again. True if it is open, or if no version names it any more."""
        for version in list(self._versions.values()):
            if part := version.by_key().get(key):
                try:
                    self._open(version, part)
                except (MvrRayError, OSError) as error:
                    self._damage[key] = str(error)
                    return False
                index, number = version.manifest.index, version.manifest.version
                log.info("shard open again: index=%s version=%d shard=%d", index, number, part.entry.shard)
                return True
        self._damage.pop(key, None)
        return True

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self.instance_id, self._num_finished, self._open_lock.locked())

    def memory(self) -> MemoryUsage:
        """Return the bytes held here, and those free on this machine."""
        held_bytes = {key: sum(file.entry.num_bytes for file in files) for key, files in self.open_files().items()}
        return MemoryUsage(node_name(), free_bytes(), held_bytes)

    def scan(self, request: ScanRequest, call: str = "") -> ShardResults:
        """Search each of the request's shards for every query's best k passages. A shard counts as damaged also if a
        filter cannot read its passages' fields, or a hybrid search its words.

        Returns nothing for a `call` that was cancelled. A call's name begins with its request's, before a slash.
        """
        answer = ShardResults([], [])
        if self._is_cancelled(call):
            return answer
        version = self._get_version(request.version)
        words: list[list[str]] = []
        for shard in request.shards:
            try:
                open_shard = self._get_open(version, shard, call)
                mask_P = self._mask(version, shard, open_shard, request.filter)
                if request.hybrid:
                    lexical = self._get_words(version, shard, call)
                    words = words or lexical[1].rule.tokenize(request.hybrid.texts)  # the same for every shard
                    result = _scan_hybrid(open_shard, lexical, shard, request, words, mask_P)
                else:
                    result = _scan(open_shard, shard, request.queries_QD, request.k, mask_P)
                answer.results.append(result)
            except _DamagedError as error:
                answer.failures.append(ShardFailure((shard,), "damaged", str(error)))
        self._num_finished += 1
        return answer

    def exact(self, queries_QD: FloatArray, k: int, shards: Sequence[int], version: int) -> list[ShardResult]:
        """Search these shards exhaustively for the true best k; omits those that cannot be opened."""
        own, results = self._get_version(version), []
        for shard in shards:
            with suppress(_DamagedError):
                results.append(_scan(self._get_open(own, shard).as_flat(self.task), shard, queries_QD, k))
        return results

    def views(self, ids: Mapping[int, Sequence[str]], version: int, call: str = "") -> ViewResults:
        """Return the stored views of the passages with these ids (by shard); those that a shard does not hold are
        absent."""
        answer = ViewResults({}, [])
        if self._is_cancelled(call):
            return answer
        own = self._get_version(version)
        for shard, names in ids.items():
            try:
                answer.views.update(self._get_open(own, shard, call).embeddings.find(names))
            except _DamagedError as error:
                answer.failures.append(ShardFailure((shard,), "damaged", str(error)))
        self._num_finished += 1
        return answer

    def cancel(self, call: str) -> None:
        """Skip this call if it has not begun."""
        with self._lock:
            self._cancelled_calls[call] = None
            while len(self._cancelled_calls) > MAX_CANCELLED:
                del self._cancelled_calls[next(iter(self._cancelled_calls))]

    def probe(self, version: int | None = None) -> list[int]:
        """Search the open shards of one version, or of all, for one query; return the number of hits of each."""
        versions = list(self._versions.values()) if version is None else [self._get_version(version)]
        dimensions = {own[0].key: one.manifest.dimension for one in versions for own in one.parts.values()}
        counts = []
        for key, dimension in dimensions.items():
            if part := self._parts.get(key):
                query_1D = np.eye(1, dimension, dtype=np.float32)
                counts.append(int((_scan(part.value, -1, query_1D, 1).hits.rows_QK >= 0).sum()))
        self._num_finished += 1
        return counts

    def _mask(self, version: _Version, shard: int, open_shard: OpenShard, filter: str) -> Mask | None:
        if not filter or not open_shard.embeddings.num_passages:
            return None
        try:
            mask_P = version.masks.mask(shard, open_shard.ids, filter)
        except (StorageError, MissingInputError) as error:
            log.error("no fields: index=%s shard=%d reason=%s", version.manifest.index, shard, error)
            raise _DamagedError(str(error)) from error
        limit_masks([own.masks for own in list(self._versions.values())])
        return mask_P

    def _is_cancelled(self, call: str) -> bool:
        with self._lock:
            is_cancelled = call in self._cancelled_calls
            self._cancelled_calls.pop(call, None)
        self._num_finished += is_cancelled
        return is_cancelled

    def _is_named(self, part: Part) -> bool:
        """Return whether an open version has this part."""
        shard = part.entry.shard
        return any(part.key == own.key for one in self._versions.values() for own in one.parts.get(shard, ()))

    def _get_version(self, number: int) -> _Version:
        own = self.task.manifest
        version = self._versions.get(number)
        if version is not None:
            return version
        if number in self._dropped_versions:
            raise ShardIndexError(f"index {own.index!r} version {number} was dropped here; ask the live one")
        manifest = own if number == own.version else manifests.read(Store(self.task.store), own.index, number)
        version = self._new_version(manifest)
        with self._lock:
            return self._versions.setdefault(number, version)

    def _new_version(self, manifest: Manifest) -> _Version:
        return _Version(manifest, shard_parts(manifest), VersionMasks(self.task.store, manifest))

    def _get_open(self, version: _Version, shard: int, call: str = "") -> OpenShard:
        return self._get(version, version.parts[shard][0], call)

    def _get_words(self, version: _Version, shard: int, call: str) -> tuple[Postings, CorpusStatistics]:
        words = version.parts[shard][1:]
        assert words, "the router refuses hybrid searches of a version without words"
        postings, statistics = (self._get(version, part, call) for part in words)
        return postings, statistics

    def _get(self, version: _Version, part: Part, call: str) -> Any:
        """Return the value of a part, which this call opens if necessary. Raises _DamagedError if its files are
        damaged."""
        if open_part := self._parts.get(part.key):
            return open_part.value
        reason = self._damage.get(part.key)
        if reason is None:
            with logs.request_context(call.rpartition("/")[0]):
                try:
                    return self._open(version, part)
                except MvrRayError as error:
                    reason, index, shard = str(error), version.manifest.index, part.entry.shard
                    log.error("shard damaged: index=%s shard=%d reason=%s", index, shard, error)
        raise _DamagedError(reason)

    def _open(self, version: _Version, part: Part) -> Any:
        """Open a part that is not open, and return its value. Records the error if it cannot be opened."""
        with self._open_lock:
            open_part = self._parts.get(part.key)
            if open_part is None:
                try:
                    with translate_open_errors(f"shard {part.entry.shard} of {version_name(version.manifest)}"):
                        open_part = self._read(version.manifest, part)
                except MvrRayError as error:
                    self._damage[part.key] = str(error)
                    raise
                with self._lock:
                    if self._is_named(part):  # else the version was dropped meanwhile
                        self._parts[part.key] = open_part
                    self._damage.pop(part.key, None)
        return open_part.value

    def _read(self, manifest: Manifest, part: Part) -> OpenPart:
        """Verify, open and map the files of a part."""
        entry, store = part.entry, Store(self.task.store)
        if part.kind is OpenShard:
            folder = manifests.open_shard(store, manifest.index, entry)
            paths = [folder / name for name in entry.files]
            map_files: Callable[[], Any] = partial(self._map_shard, manifest, entry, folder)
        else:
            paths = manifests.open_lexical(store, manifest.index, part.files)
            map_files = partial(part.kind, *paths)
        files = tuple(OpenFile(path, pa.OSFile(str(path)), file) for path, file in zip(paths, part.files))
        value = map_files()
        if isinstance(value, Postings) and value.num_passages != entry.num_passages:
            raise ManifestError(
                f"the words of shard {entry.shard} of index {manifest.index!r} are those of {value.num_passages} "
                f"passages, its manifest says {entry.num_passages}. Roll back, or index again"
            )
        return OpenPart(value, files)

    def _map_shard(self, manifest: Manifest, entry: ShardEntry, folder: Path) -> OpenShard:
        embeddings = open_embeddings(folder, entry.files)
        if (embeddings.dimension, embeddings.num_passages) != (manifest.dimension, entry.num_passages):
            raise ManifestError(
                f"shard {entry.shard} of index {manifest.index!r} holds {embeddings.num_passages} passages in "
                f"dimension {embeddings.dimension}; its manifest says {entry.num_passages} in {manifest.dimension}. "
                f"Roll back, or index again"
            )
        if not embeddings.num_passages:
            return OpenShard(embeddings, pa.nulls(0, pa.string()))
        params, whole_codes = IndexParams(**manifest.index_params), CODES_FILE in entry.files
        blocks, rows = (embeddings.blocks(), None) if whole_codes else embeddings.stored_blocks()
        index = open_index(params, blocks, folder, rows, device=self.task.device, threads=self.task.threads)
        log.info("shard open: index=%s version=%d shard=%d", manifest.index, manifest.version, entry.shard)
        return OpenShard(embeddings, pa.concat_arrays(embeddings.arrow_ids().chunks), index)


class Fleet(Protocol):
    """Searchers that together hold every shard of the versions that they are asked about."""

    def ready(self, manifest: Manifest) -> None:
        """Return when every shard of a version is open."""
        ...

    def fan_out(
        self, request: ScanRequest, deadline: Deadline, *, admit: bool = False, on_partial: OnPartial | None = None
    ) -> ShardResults:
        """Scan the request's shards. `admit`: never refuse the request for a full queue (a second round).
        `on_partial` is called with each part of the answer when it arrives, if parts arrive separately."""
        ...

    def views(self, ids: Mapping[int, Sequence[str]], version: int, deadline: Deadline) -> ViewResults:
        """Return the stored views of passages of a version, by the shard that holds them."""
        ...


class LocalSearchers:
    """Opens, searches and drops versions of an index with one searcher in this process; ignores deadlines. A search
    opens the shards that are not open."""

    is_lost = False

    def __init__(self, task: SearcherTask, limit_bytes: int = 0) -> None:
        self.limit_bytes = limit_bytes
        self.searcher = ShardSearcher(task)

    def ready(self, manifest: Manifest) -> None:
        self.searcher.open([ShardAssignment(manifest, _all_shards(manifest))])

    def fan_out(
        self, request: ScanRequest, deadline: Deadline, *, admit: bool = False, on_partial: OnPartial | None = None
    ) -> ShardResults:
        return self.searcher.scan(request)

    def views(self, ids: Mapping[int, Sequence[str]], version: int, deadline: Deadline) -> ViewResults:
        return self.searcher.views(ids, version)

    def exact(self, queries_QD: FloatArray, k: int, manifest: Manifest, deadline: Deadline) -> list[ShardResult]:
        """Search every shard of a version exhaustively for the true best k; omits those that cannot be opened."""
        return self.searcher.exact(queries_QD, k, _all_shards(manifest), manifest.version)

    def load(self, manifest: Manifest) -> None:
        """Open all shards of a version, and probe them.

        Raises ResourceError for too little memory, StorageError for a damaged file; then nothing of the version stays
        open.
        """
        needs = assignment_bytes(manifest, _all_shards(manifest))
        require_memory(version_name(manifest), [needs], [self.searcher.memory()], self.limit_bytes)
        try:
            self.ready(manifest)
            self.searcher.probe(manifest.version)
        except BaseException:  # nothing stays open, after Ctrl-C either
            self.drop(manifest.version)
            raise

    def drop(self, version: int) -> None:
        self.searcher.drop(version)

    def counts(self) -> FleetCounts:
        return FleetCounts()


def _all_shards(manifest: Manifest) -> tuple[int, ...]:
    return tuple(entry.shard for entry in manifest.shards)


def version_name(manifest: Manifest) -> str:
    return f"index {manifest.index!r} version {manifest.version}"


def shard_parts(manifest: Manifest) -> dict[int, list[Part]]:
    """Return the parts of each shard of a version: its views, its words and the statistics of all words, if it has
    these.

    The same files with other index parameters have another key.
    """
    params, lexical = json.dumps(manifest.index_params, sort_keys=True), manifest.lexical
    parts = {}
    for number, entry in enumerate(manifest.shards):
        own = [Part(OpenShard, f"{entry.digest} {params}", entry, tuple(entry.files.values()))]
        if lexical:
            sources = (Postings, lexical.postings[number]), (CorpusStatistics, lexical.statistics)
            for kind, files in sources:
                name = f"{kind.__name__} {entry.num_passages if kind is Postings else ''}"
                own.append(Part(kind, " ".join([name, *(file.sha256 for file in files)]), entry, files))
        parts[entry.shard] = own
    return parts


def assignment_bytes(manifest: Manifest, shards: Sequence[int]) -> dict[Key, int]:
    """Return the bytes of these shards and their words in a searcher, by key."""
    parts = shard_parts(manifest)
    return {part.key: part.num_bytes for shard in shards for part in parts[shard]}


def _scan_hybrid(
    open_shard: OpenShard,
    lexical: tuple[Postings, CorpusStatistics],
    shard: int,
    request: ScanRequest,
    words: Sequence[Sequence[str]],
    mask_P: Mask | None,
) -> ShardResult:
    index = open_shard.index
    if index is None:
        return _scan(open_shard, shard, request.queries_QD, request.k)
    assert request.hybrid and request.hybrid.weight != "rrf", "the router fuses ranks of whole lists"
    table = index.scan.table
    queries_QD, rows_P = check_queries(request.queries_QD, index.dimension), table.scorable_rows
    rows_P, k = rows_P if mask_P is None else rows_P[mask_P[rows_P]], min(request.k, index.num_passages)
    weight, rescore = request.hybrid.weight, partial(table.rescore, queries_QD)
    postings, statistics = lexical

    def search(queries: IntArray, depth: int) -> CountedHits:
        return index.search_with_counts(queries_QD[queries], depth, mask_P)

    def lexical_scores(query: int) -> FloatArray:
        return postings.scores(words[query], statistics)

    if weight == "words":
        counted_hits = lexical_search(rescore, lexical_scores, rows_P, len(queries_QD), k)
    else:
        sides = search, rescore, lexical_scores
        counted_hits = hybrid_search(*sides, rows_P, len(queries_QD), weight, k, exact=index.exact)
    return as_result(shard, counted_hits, open_shard.ids)


def _scan(open_shard: OpenShard, shard: int, queries_QD: FloatArray, k: int, mask_P: Mask | None = None) -> ShardResult:
    index, num_queries = open_shard.index, len(queries_QD)
    if index is not None:
        counted_hits = index.search_with_counts(queries_QD, min(k, index.num_passages), mask_P)
    else:
        counted_hits = CountedHits(no_hits(num_queries, 0), np.zeros(num_queries, np.int64))
    return as_result(shard, counted_hits, open_shard.ids)


def as_result(shard: int, counted_hits: CountedHits, ids: pa.Array) -> ShardResult:
    hits, rescored_Q = counted_hits
    rows = distinct(hits.rows_QK)
    rows_R = rows[np.searchsorted(rows, 0) :]
    return ShardResult(shard, hits, rescored_Q, rows_R, ids.take(arrow_rows(rows_R)))
