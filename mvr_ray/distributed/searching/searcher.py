"""Holds shards of several versions of an index, each shard once, and scans them.

A searcher is a plain class built from names and digests, so an actor that died can start again anywhere and be the
same: what it does not hold it opens when asked, and a version that it was not told of it reads from the store. A
shard's files are read once and compared with their digests before anything opens them; versions that name the same
shard (by its digest) share it. A damaged shard is told with the answer, and the others are searched. Besides searching,
a shard can be asked for the stored views of some passages.

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
"""What an open shard is: its digest, a space, and how it is indexed."""


FORGOTTEN = 4096
"""Calls to pass by that are remembered; those that ended before they were to be forgotten make up most."""


class SearcherTask(NamedTuple):
    """What a searcher is made of. `device` is cpu or cuda; `tls_dir` and `scrub_bytes_s` as in the run
    file."""

    store: str
    manifest: Manifest
    shards: tuple[int, ...]
    threads: int = 1
    device: str = "cpu"
    tls_dir: str = ""
    scrub_bytes_s: int = 0


class ShardAssignment(NamedTuple):
    """Shards of one version that a searcher is to hold."""

    manifest: Manifest
    shards: tuple[int, ...]


OnPartial = Callable[[ShardResults], None]


class Heartbeat(NamedTuple):
    """What a searcher says beside its work: `born` names its life, `finished` counts the calls that it ended.

    While it is `opening` files it ends none.
    """

    born: str
    finished: int
    opening: bool


class _Version(NamedTuple):
    """A manifest, with its entries by shard, what each is when open, and the words of each where it has them."""

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
        """What the words of a shard are, postings and statistics; None for a version without."""
        return f"{self.postings_keys[shard]} {self.statistics_key}" if self.statistics_key else None

    def all_keys(self) -> set[Key]:
        words = {key for shard in self.postings_keys if (key := self.words_key(shard))}
        return {*self.keys.values(), *self.postings_keys.values(), self.statistics_key, *words}


class OpenFile(NamedTuple):
    """A file of an open shard, whatever has its path by now, and what the manifest says of it."""

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
        """The same shard without its index: every view is scanned."""
        if self.index is None or self.index.exact:
            return self
        flat = open_index(IndexParams(), self.embedded.blocks(), Path(), device=task.device, threads=task.threads)
        return self._replace(index=flat)


class ShardSearcher:
    """Some shards of some versions. Opens them when told or first asked to. Safe to use from several threads."""

    def __init__(self, task: SearcherTask) -> None:
        self.task = task
        self.born = uuid.uuid4().hex
        self._versions: dict[int, _Version] = {}
        self._dropped: set[int] = set()
        self._held: dict[Key, OpenShard] = {}
        self._postings: dict[Key, Postings] = {}
        self._statistics: dict[Key, CorpusStatistics] = {}
        self._word_files: dict[Key, tuple[OpenFile, ...]] = {}
        self._damaged: dict[Key, str] = {}
        self._opening = threading.Lock()
        self._books = threading.Lock()
        self._finished = 0
        self._forgotten: dict[str, None] = {}
        self._masks = MaskCache(task.store)

    def open(self, assignments: Sequence[ShardAssignment] = ()) -> str:
        """Open every shard of these, beside what is held; of the task's where none are given. Gives `born`.

        Raises DigestError, ManifestError or another StorageError where a shard's files are not what the manifest says,
        when all others are open. A shard that was found damaged is read again.
        """
        failed: MvrRayError | None = None
        for manifest, shards in assignments or [ShardAssignment(self.task.manifest, self.task.shards)]:
            of = _Version.of(manifest)
            with self._books:
                self._versions[manifest.version] = of
                self._dropped.discard(manifest.version)
            for shard in shards:
                for key, opens in ((of.keys[shard], self._open), (of.words_key(shard), self._open_words)):
                    try:
                        if key is not None:
                            opens(of, shard)
                    except MvrRayError as error:
                        self._damaged[key or ""] = str(error)
                        failed = failed or error
        if failed:
            raise failed
        return self.born

    def drop(self, version: int) -> None:
        """Forget a version, and what of its shards no other one names. A search that runs over it ends well."""
        self._masks.drop(version)
        with self._books:
            self._dropped.add(version)
            self._versions.pop(version, None)
            named = {key for one in self._versions.values() for key in one.all_keys()}
            for kept in (self._held, self._postings, self._statistics, self._word_files, self._damaged):
                for key in [key for key in kept if key not in named]:
                    del kept[key]

    def health(self) -> list[str]:
        """Digests of the shards that are open now; answered even while a search runs."""
        return sorted({key.partition(" ")[0] for key in list(self._held)})

    def open_files(self) -> list[tuple[Key, tuple["OpenFile", ...]]]:
        """The files of each shard and of its words that are open."""
        return [(key, held.files) for key, held in list(self._held.items())] + list(self._word_files.items())

    def damaged_keys(self) -> list[Key]:
        return list(self._damaged)

    def withdraw(self, key: Key, files: tuple["OpenFile", ...], reason: str) -> None:
        """Let go a shard, or words, whose files have changed since they were opened; searches find the shard, or those
        by words all that these belong to, damaged from now on."""
        with self._books:
            if key in self._held and self._held[key].files is files:
                self._damaged[key] = reason
                del self._held[key]
            elif self._word_files.get(key) is files:
                for kept in (self._word_files, self._postings, self._statistics):
                    kept.pop(key, None)
                for of in self._versions.values():
                    own = [shard for shard, one in of.postings_keys.items() if key in (one, of.statistics_key)]
                    self._damaged |= {of.words_key(shard) or "": reason for shard in own}

    def reopen(self, key: Key) -> bool:
        """Try to open a damaged shard, or its words, again; whether it is open, or no version names it any more."""
        for of in list(self._versions.values()):
            for shard, own in of.keys.items():
                opens = {own: self._open, of.words_key(shard): self._open_words}.get(key)
                if opens is not None:
                    try:
                        opens(of, shard)
                    except (MvrRayError, OSError) as error:
                        self._damaged[key] = str(error)
                        return False
                    version = of.manifest
                    log.info("shard open again: index=%s version=%d shard=%d", version.index, version.version, shard)
                    return True
        self._damaged.pop(key, None)
        return True

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self.born, self._finished, self._opening.locked())

    def memory(self) -> MemoryUsage:
        """What is held here, and what is free on this machine."""
        held = {key: one.num_bytes for key, one in list(self._held.items())}
        held |= {key: one.num_bytes for kept in (self._postings, self._statistics) for key, one in list(kept.items())}
        return MemoryUsage(node_name(), free_bytes(), held)

    def scan(self, request: ScanRequest, call: str = "") -> ShardResults:
        """The best k passages of each of the request's shards for every query. A shard is told as damaged where it has
        a filter and the passages' fields cannot be read, or ranks by words, too, and these cannot.

        Nothing for a `call` that was cancelled. A call's name begins with its request's, before a slash.
        """
        answer = ShardResults([], [])
        if self._passed_by(call):
            return answer
        of, hybrid = self._version(request.version), request.hybrid
        words = tokenize(hybrid.texts) if hybrid else []
        for shard in request.shards:
            held = self._get_open(of, shard, call)
            if isinstance(held, ShardFailure):
                answer.failures.append(held)
                continue
            mask_P = self._mask(of, shard, held, request.filter)
            lexical = self._get_words(of, shard, call) if hybrid else None
            if isinstance(mask_P, ShardFailure):
                answer.failures.append(mask_P)
            elif isinstance(lexical, ShardFailure):
                answer.failures.append(lexical)
            elif hybrid and lexical:
                answer.results.append(_scan_hybrid(held, lexical, shard, request, words, mask_P))
            else:
                answer.results.append(_scan(held, shard, request.queries_QD, request.k, mask_P))
        self._finished += 1
        return answer

    def exact(self, queries_QD: FloatArray, k: int, shards: Sequence[int], version: int) -> list[ShardResult]:
        """The true best k of these shards, whatever their index is; those that cannot be opened are left out."""
        of = self._version(version)
        opened = [(shard, self._get_open(of, shard)) for shard in shards]
        return [
            _scan(held.as_flat(self.task), shard, queries_QD, k)
            for shard, held in opened
            if isinstance(held, OpenShard)
        ]

    def views(self, ids: Mapping[int, Sequence[str]], version: int | None = None, call: str = "") -> ViewResults:
        """The stored views of these passages, by shard; ids that a shard does not hold are absent."""
        answer = ViewResults({}, [])
        if self._passed_by(call):
            return answer
        of = self._version(version)
        for shard, names in ids.items():
            held = self._get_open(of, shard, call)
            if isinstance(held, OpenShard):
                answer.views.update(held.embedded.find(names))
            else:
                answer.failures.append(held)
        self._finished += 1
        return answer

    def cancel(self, call: str) -> None:
        """Nobody waits for this call any more: pass it by if it has not begun."""
        with self._books:
            self._forgotten[call] = None
            while len(self._forgotten) > FORGOTTEN:
                del self._forgotten[next(iter(self._forgotten))]

    def probe(self, version: int | None = None) -> list[int]:
        """A real search for one query in what is open of one version, or of all; gives how many hits a shard found."""
        versions = list(self._versions.values()) if version is None else [self._version(version)]
        wanted = {key: one.manifest.dimension for one in versions for key in one.keys.values()}
        found = []
        for key, dimension in wanted.items():
            held = self._held.get(key)
            if held is not None:
                query_1D = np.eye(1, dimension, dtype=np.float32)
                found.append(int((_scan(held, -1, query_1D, 1).hits.rows_QK >= 0).sum()))
        self._finished += 1
        return found

    def _mask(self, of: _Version, shard: int, open_shard: OpenShard, filter: str) -> Mask | ShardFailure | None:
        if not filter or not open_shard.embedded.num_passages:
            return None
        try:
            return self._masks.mask(of.manifest, shard, open_shard.ids, filter)
        except (StorageError, MissingInputError) as error:
            log.error("no fields: index=%s shard=%d reason=%s", of.manifest.index, shard, error)
            return ShardFailure((shard,), "damaged", str(error))

    def _passed_by(self, call: str) -> bool:
        with self._books:
            forgotten = call in self._forgotten
            self._forgotten.pop(call, None)
        self._finished += forgotten
        return forgotten

    def _version(self, version: int | None) -> _Version:
        index, version = self.task.manifest.index, self.task.manifest.version if version is None else version
        of = self._versions.get(version)
        if of is not None:
            return of
        if version in self._dropped:
            raise ShardIndexError(f"index {index!r} version {version} was dropped here; ask the live one")
        own = self.task.manifest
        of = _Version.of(own if version == own.version else manifests.read(Store(self.task.store), index, version))
        with self._books:
            return self._versions.setdefault(version, of)

    def _get_open(self, of: _Version, shard: int, call: str = "") -> OpenShard | ShardFailure:
        return self._held.get(of.keys[shard]) or self._open_late(self._open, of, shard, of.keys[shard], call)

    def _get_words(self, of: _Version, shard: int, call: str) -> LexicalIndex | ShardFailure:
        key = of.words_key(shard)
        if key is None:
            raise ShardIndexError(
                f"index {of.manifest.index!r} version {of.manifest.version} has no words of its passages; "
                f"{NO_WORDS_HINT}"
            )
        return self._open_late(self._open_words, of, shard, key, call)

    def _open_late(
        self, opens: Callable[[_Version, int], T], of: _Version, shard: int, key: Key, call: str
    ) -> T | ShardFailure:
        """What a call opens that nothing opened before; a failure where its files are damaged."""
        if key not in self._damaged:
            with logs.request_context(call.rpartition("/")[0]):
                try:
                    return opens(of, shard)
                except MvrRayError as error:
                    log.error("shard damaged: index=%s shard=%d reason=%s", of.manifest.index, shard, error)
                    self._damaged[key] = str(error)
        return ShardFailure((shard,), "damaged", self._damaged[key])

    def _open(self, of: _Version, shard: int) -> OpenShard:
        key = of.keys[shard]
        with self._opening:
            held = self._held.get(key)
            if held is None:
                held = self._read(of.manifest, of.entries[shard])
                with self._books:
                    self._held[key] = held
                    self._damaged.pop(key, None)
        return held

    def _open_words(self, of: _Version, shard: int) -> LexicalIndex:
        entry, lexical = of.entries[shard], of.manifest.lexical
        assert lexical, "the version has no words"
        key, files = of.postings_keys[shard], lexical.postings[of.manifest.shards.index(entry)]
        postings, statistics = self._postings.get(key), self._statistics.get(of.statistics_key)
        if postings is not None and statistics is not None and of.words_key(shard) not in self._damaged:
            return LexicalIndex(postings, statistics)
        with self._opening:
            postings = self._read_words(self._postings, Postings, of, key, files)
            statistics = self._read_words(self._statistics, CorpusStatistics, of, of.statistics_key, lexical.statistics)
        if postings.num_passages != entry.num_passages:
            raise ManifestError(
                f"the words of shard {shard} of index {of.manifest.index!r} are those of {postings.num_passages} "
                f"passages, its manifest says {entry.num_passages}. Roll back, or index again"
            )
        with self._books:
            self._damaged.pop(of.words_key(shard) or "", None)
        return LexicalIndex(postings, statistics)

    def _read_words(
        self, cache: dict[Key, T], kind: Callable[..., T], of: _Version, key: Key, files: Sequence[FileEntry]
    ) -> T:
        """What of words is held under a key, read where it is not."""
        held = cache.get(key)
        if held is None:
            paths = manifests.open_lexical(Store(self.task.store), of.manifest.index, files)
            open_files = tuple(OpenFile(path, pa.OSFile(str(path)), file) for path, file in zip(paths, files))
            held = kind(*paths)
            with self._books:
                cache[key], self._word_files[key] = held, open_files
        return held

    def _read(self, manifest: Manifest, entry: ShardEntry) -> OpenShard:
        shard = entry.shard
        folder = manifests.open_shard(Store(self.task.store), manifest.index, entry)
        files = tuple(
            OpenFile(folder / name, pa.OSFile(str(folder / name)), file) for name, file in entry.files.items()
        )
        embedded = open_embeddings(folder, entry.files)
        if (embedded.dimension, embedded.num_passages) != (manifest.dimension, entry.num_passages):
            raise ManifestError(
                f"shard {shard} of index {manifest.index!r} holds {embedded.num_passages} passages in dimension "
                f"{embedded.dimension}; its manifest says {entry.num_passages} in {manifest.dimension}. "
                f"Roll back, or index again"
            )
        if not embedded.num_passages:
            return OpenShard(None, embedded, pa.nulls(0, pa.string()), entry.num_bytes, files)
        params, blocks = IndexParams(**manifest.index_params), embedded.blocks()
        rows_N = embedded.first_rows() if params.scan == "int8" else None
        index = open_index(params, blocks, folder, rows_N, device=self.task.device, threads=self.task.threads)
        log.info("shard open: index=%s version=%d shard=%d", manifest.index, manifest.version, shard)
        ids = pa.concat_arrays(embedded.arrow_ids().chunks)
        return OpenShard(index, embedded, ids, entry.num_bytes, files, BlockTable(blocks))


class Fleet(Protocol):
    """Searchers that together hold every shard of a version."""

    def ready(self) -> None:
        """Return when every shard is open."""
        ...

    def fan_out(
        self, request: ScanRequest, deadline: Deadline, *, again: bool = False, on_partial: OnPartial | None = None
    ) -> ShardResults:
        """Scan the request's shards. `again`: a further round of a search, which no bound on queues refuses.
        `on_partial` gets each part of the answer as it comes, where parts come one by one."""
        ...

    def views(self, ids: Mapping[int, Sequence[str]], deadline: Deadline) -> ViewResults:
        """Stored views of passages, by the shard that holds them."""
        ...


class ExactFleet(Fleet, Protocol):
    """A fleet that can be asked past its indexes."""

    def exact(self, queries_QD: FloatArray, k: int, deadline: Deadline) -> list[ShardResult]: ...


class LocalFleet:
    """One searcher in this process, which takes the time that it takes."""

    def __init__(self, task: SearcherTask, searcher: ShardSearcher | None = None) -> None:
        """`searcher` is one that holds other versions too."""
        self.task = task
        self.searcher = searcher or ShardSearcher(task)

    def ready(self) -> None:
        self.searcher.open([ShardAssignment(self.task.manifest, self.task.shards)])

    def fan_out(
        self, request: ScanRequest, deadline: Deadline, *, again: bool = False, on_partial: OnPartial | None = None
    ) -> ShardResults:
        return self.searcher.scan(request)

    def exact(self, queries_QD: FloatArray, k: int, deadline: Deadline) -> list[ShardResult]:
        """The true best k of every shard, by exhaustive search."""
        return self.searcher.exact(queries_QD, k, self.task.shards, self.task.manifest.version)

    def views(self, ids: Mapping[int, Sequence[str]], deadline: Deadline) -> ViewResults:
        return self.searcher.views(ids, self.task.manifest.version)


def shard_keys(manifest: Manifest) -> dict[int, Key]:
    """What each shard of a version is when open. The same files, indexed with other parameters, are another thing."""
    params = json.dumps(manifest.index_params, sort_keys=True)
    return {entry.shard: f"{entry.digest} {params}" for entry in manifest.shards}


def postings_keys(manifest: Manifest) -> dict[int, Key]:
    """What the postings of each shard of a version are when open; empty for a version without words."""
    postings = manifest.lexical.postings if manifest.lexical else ()
    return {entry.shard: _words_key(files) for entry, files in zip(manifest.shards, postings)}


def statistics_key(manifest: Manifest) -> Key:
    """What the statistics of a version's corpus are when open; empty for a version without words."""
    return _words_key(manifest.lexical.statistics) if manifest.lexical else ""


def _words_key(files: Sequence[FileEntry]) -> Key:
    return " ".join(["words", *(file.sha256 for file in files)])


def assignment_bytes(manifest: Manifest, shards: Sequence[int]) -> dict[Key, int]:
    """The bytes of what a searcher holds of these shards, by key."""
    keys, words = shard_keys(manifest), postings_keys(manifest)
    own = {keys[entry.shard]: entry.num_bytes for entry in manifest.shards if entry.shard in shards}
    if manifest.lexical:
        files = {statistics_key(manifest): manifest.lexical.statistics}
        files |= {words[entry.shard]: one for entry, one in zip(manifest.shards, manifest.lexical.postings)}
        named = {statistics_key(manifest), *(words[shard] for shard in shards)}
        own |= {key: sum(file.num_bytes for file in files[key]) for key in named}
    return own


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
