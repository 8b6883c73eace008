"""Switches a router to newer index versions while it answers.

    move     open the next version beside the live one, sharing unchanged shards; probe it; make it live
    finish   running calls end on the version that they began with; its own shards are released after the last one, and
             later calls that name it find it among the cached versions
    cache    a version that a call names is opened in the same way and stays open for later calls (`version_cache`)
    refuse   too little memory, a damaged shard, a dead searcher: the live version stays, and the error says why
    follow   move to the newest published version, checked periodically

One version answers all calls on one `pin()` router, so a search and its passages agree.

Shapes: Q queries, D dimension.
"""

import logging
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mvr_ray.config import RunConfig
from mvr_ray.core.searching.exact import check_k, check_queries
from mvr_ray.deadline import Deadline
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.periodic import run_every, run_periodically
from mvr_ray.distributed.cluster.ray_errors import ray_error_types, translate_ray_errors
from mvr_ray.distributed.router import TIMEOUT_S, Observe, Router, open_searchers, require_words, searcher_task
from mvr_ray.distributed.searching import version_cache
from mvr_ray.distributed.searching.batching import DynamicBatcher
from mvr_ray.distributed.searching.merged_results import MergedResults, shard_starts
from mvr_ray.distributed.searching.scrubber import Scrubber
from mvr_ray.distributed.searching.searcher import LocalSearchers, version_name
from mvr_ray.distributed.searching.version_cache import VersionLoader
from mvr_ray.errors import (
    DamagedShardsError,
    InsufficientMemoryError,
    MissingInputError,
    MvrRayError,
    OverloadedError,
    StorageError,
)
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest
from mvr_ray.types import FloatArray, Hit, SwapState

if TYPE_CHECKING:
    from mvr_ray.distributed.searching.fleet import RemoteSearchers

log = logging.getLogger(__name__)

MAX_FOLLOW_S = 600.0
"""Maximum interval between attempts to open a version; it doubles after each failure."""


@dataclass
class _OpenVersion:
    """An open version and its running calls; the last one of them closes a retired version, which takes no new ones."""

    router: Router
    calls: int = 0
    is_retired: bool = False
    called_s: float = field(default_factory=time.monotonic)
    """When a call last began or ended (monotonic)."""

    @property
    def version(self) -> int:
        return self.router.manifest.version


class HotSwapRouter:
    """Routes to the live version, which may change at any time, or to a named one (`pin`). Safe to use from several
    threads."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        searchers: "LocalSearchers | RemoteSearchers",
        *,
        batching: bool = False,
        max_waiting: int = version_cache.MAX_WAITING,
        needs_words: bool = False,
        **options: Any,
    ) -> None:
        """`manifest` is the first live version; `ready`, or the first search, opens its shards. `batching`: concurrent
        searches share calls (`DynamicBatcher`). `max_waiting`: calls that may wait at the same time for versions to be
        opened. `needs_words`: move to no version without words, which hybrid searches need. `options`: those of
        `Router`.
        """
        self.store = store
        self.index = manifest.index
        self.searchers = searchers
        self.options = options
        self.batching = batching
        self.needs_words = needs_words
        self.min_idle_s = version_cache.MIN_IDLE_S
        self._lock = threading.Condition()
        self._move_lock = threading.Lock()
        self._live = _OpenVersion(self._router(manifest))
        self._open = {manifest.version: self._live}
        self._cache: list[_OpenVersion] = []
        own = weakref.proxy(self)  # as in `Router`
        open_version = session.using_ray()(lambda manifest: own._open_in_cache(manifest))
        self._loader = VersionLoader(open_version, max_waiting)
        self._same_bytes = b""
        self.state = SwapState(manifest.version, True)

    @contextmanager
    def pin(self, version: int | None = None, deadline: Deadline | None = None) -> Iterator[Router]:
        """Yield the router of one version (None: the live one), open until the block ends, even if another one becomes
        live.

        If the version is not open, the call waits for that until the deadline. Raises MissingInputError for a version
        that does not exist, StorageError or ResourceError if it cannot be opened; OverloadedError if it is not open in
        time, or if no cached version may be evicted yet.
        """
        pinned_version = self._acquire(version)
        if pinned_version is None:
            manifest = manifests.read(self.store, self.index, version)
            deadline = deadline or Deadline.after(self._live.router.timeout_s)
            pinned_version = self._loader.wait_for(manifest, deadline, lambda: self._acquire(version))
        try:
            yield pinned_version.router
        finally:
            self._release(pinned_version)

    def move_to(self, version: int | None = None) -> int:
        """Make another version live and stay on it; None: the newest one, and follow newer ones again.

        Returns the live version. Raises MissingInputError, StorageError or ResourceError if the version cannot be
        opened beside the live one, ShardIndexError if it has no words and `needs_words`; the live one then stays.
        """
        with self._move_lock:
            return self._move(version)

    def follow(self, deadline: Deadline | None = None) -> bool:
        """Move to a newer version if there is one and no version was named; return whether the router moved.

        A move that fails raises nothing; `state` has the reason. Raises OverloadedError if at the deadline another call
        still opens a version.
        """
        if not self._move_lock.acquire(timeout=deadline.left_s if deadline else -1):
            raise OverloadedError("this process still opens a version", 1.0)
        try:
            before = self.state
            if not before.follows:
                return False
            try:
                return self._move(None) != before.version
            except (MvrRayError, *ray_error_types()) as error:
                log.error("move failed: index=%s live=%d reason=%s", self.index, before.version, error)
                return False
        finally:
            self._move_lock.release()

    def follow_periodically(self, interval_s: float) -> AbstractContextManager[None]:
        """Follow every `interval_s` seconds in a background thread until the block ends."""
        wait_s = interval_s

        def follow() -> float:
            nonlocal wait_s
            self.follow()
            fails = self.state.follows and self.state.failure  # not where a named version could not be opened
            wait_s = min(2 * wait_s, max(MAX_FOLLOW_S, interval_s)) if fails else interval_s
            return wait_s

        return run_periodically(follow, interval_s, "mvr-follow")

    def _move(self, version: int | None) -> int:
        number = version or 0
        try:
            number = version or manifests.latest_version(self.store, self.index)
            if version is None and self.state.follows and number < self.state.version:
                what = f"index {self.index!r} has no version {self.state.version} any more, which stays live here"
                if not number:
                    raise MissingInputError(f"{what}; {self.store.name} has no version of it: restore the store")
                raise MissingInputError(
                    f"{what}; the newest one is {number}: restore the manifest, or restart to answer from {number}"
                )
            if number == self.state.version:
                self._require_same(number)
                self.state = SwapState(number, version is None)
                return number
            manifest = manifests.read(self.store, self.index, number or None)
            if self.needs_words:
                require_words(manifest)
            live = self._open_with_eviction(manifest, is_move=True)
        except (MvrRayError, *ray_error_types()) as error:
            self.state = self.state._replace(failed_version=number, failure=str(error))
            raise
        with self._lock:
            before, self._live = self._live, live
            live.is_retired, before.is_retired = False, True
            self._cache = [one for one in self._cache if one is not live]
            self.state = SwapState(manifest.version, version is None)
        log.info("moved: index=%s from=%d to=%d", self.index, before.version, manifest.version)
        for one in (live, before):
            self._release(one)
        return manifest.version

    def _require_same(self, number: int) -> None:
        """Raise StorageError if another manifest has the number of the live version. A large one takes longer to parse
        than to read: bytes that were found the same are not parsed again."""
        data = b""
        with suppress(MissingInputError):  # `read` says which versions there are
            data = self.store.read_bytes(paths.manifest(self.index, number))
        if data and data == self._same_bytes:
            return
        manifest = manifests.read(self.store, self.index, number)
        if manifest.content_digest() != self.manifest.content_digest():
            raise StorageError(
                f"index {self.index!r} version {manifest.version} differs from the one that stays live here: its "
                f"manifest was deleted, and its number taken; publish once more, or restart"
            )
        self._same_bytes = data

    def _acquire(self, version: int | None) -> _OpenVersion | None:
        """Return the open version, and count one more call of it; None if it is not open, or retired."""
        with self._lock:
            open_version = self._live if version is None else self._open.get(version)
            if open_version is None or open_version.is_retired:
                return None
            open_version.calls += 1
            open_version.called_s = time.monotonic()
            return open_version

    def _open_in_cache(self, manifest: Manifest) -> None:
        """Open a version beside the live one; evict an idle one if the cache or the memory is full."""
        with self._move_lock:
            open_version = self._open.get(manifest.version)
            if open_version is not None and not open_version.is_retired:
                return
            live = self._live
            if len(self._cache) >= version_cache.MAX_VERSIONS:
                self._evict(manifest, f"all {version_cache.MAX_VERSIONS} places beside the live one are taken")
            name = version_name(manifest)
            try:
                with translate_ray_errors(f"opening {name}"):
                    open_version = self._open_with_eviction(manifest, is_move=False)
            except MissingInputError as error:  # to callers it would say that the version does not exist
                raise StorageError(f"{name} cannot be opened: {error}") from error
            with self._lock:
                open_version.is_retired = False
                self._cache.append(open_version)
        for one in (live, open_version):
            self._release(one)

    def _open_with_eviction(self, manifest: Manifest, is_move: bool) -> _OpenVersion:
        """Call `_open_beside_live`; while memory lacks, evict idle versions, or for a move any, and call it again."""
        while True:
            try:
                return self._open_beside_live(manifest)
            except InsufficientMemoryError as error:
                if not self._cache:
                    raise
                self._retire(self._cache[0]) if is_move else self._evict(manifest, str(error))

    def _evict(self, manifest: Manifest, reason: str) -> None:
        """Retire the idle version that was called least recently, to open another one.

        Raises OverloadedError, with the reason for an eviction and a retry time, if none is idle.
        """
        with self._lock:
            versions = sorted(self._cache, key=lambda one: (one.called_s, one.version))
            idle_s = time.monotonic() - self.min_idle_s
            idle = [one for one in versions if not one.calls and one.called_s <= idle_s]
        if idle:
            self._retire(idle[0])
            return
        retry_s = max(1.0, versions[0].called_s - idle_s)
        numbers = ", ".join(str(one.version) for one in self._cache)
        raise OverloadedError(
            f"{version_name(manifest)} not opened: {reason}, and what is open beside the live version (version "
            f"{numbers}) was called less than {self.min_idle_s:g} s ago and stays; ask again in {retry_s:.0f} s",
            retry_s,
        )

    def _retire(self, open_version: _OpenVersion) -> None:
        """Remove a version from the cache, and wait until its last call has closed it, at most as long as an answer may
        take."""
        with self._lock:
            self._cache.remove(open_version)
            open_version.is_retired = True
            open_version.calls += 1
        self._release(open_version)
        with self._lock:
            self._lock.wait_for(lambda: not open_version.calls, open_version.router.timeout_s)

    def _open_beside_live(self, manifest: Manifest) -> _OpenVersion:
        """Open a version beside the live one; counts a call on both."""
        with self._lock:
            self._live.calls += 1
            old = self._open.get(manifest.version)
            if old is not None:  # it is cached, or it is retired and calls of that time still run
                old.calls += 1
                return old
        with ExitStack() as undo:  # nothing stays open after an error, after Ctrl-C either
            undo.callback(self._release, self._live)
            self.searchers.load(manifest)
            undo.callback(self.searchers.drop, manifest.version)
            router = self._router(manifest)
            router.take_over(self._live.router)
            router.search(np.eye(1, manifest.dimension, dtype=np.float32), 1)
            undo.pop_all()
        with self._lock:
            open_version = self._open[manifest.version] = _OpenVersion(router, calls=1)
        return open_version

    def _release(self, open_version: _OpenVersion) -> None:
        with self._lock:
            open_version.calls -= 1
            open_version.called_s = time.monotonic()
            if open_version.is_retired and not open_version.calls:
                del self._open[open_version.version]
                self.searchers.drop(open_version.version)
                self._lock.notify_all()
                log.info("dropped: index=%s version=%d", self.index, open_version.version)

    def _router(self, manifest: Manifest) -> Router:
        fleet = DynamicBatcher(self.searchers) if self.batching else self.searchers
        return Router(self.store, manifest, fleet, **self.options)

    @property
    def manifest(self) -> Manifest:
        return self._live.router.manifest

    def ready(self) -> None:
        """Wait until every shard of the live version can be searched."""
        with self.pin() as router:
            router.ready()

    def exact(self, queries_QD: FloatArray, k: int, router: Router | None = None) -> list[list[Hit]]:
        """Search the live version, or a pinned `router`, exhaustively for the exact best k, whatever its index is, past
        the queues of requests.

        It may take TIMEOUT_S, whatever the limit of an answer: a call that is given up stays in its searcher's queue,
        before those that open versions. Raises ResourceError where a searcher died, DamagedShardsError for a damaged
        shard, TimeoutError.
        """
        with nullcontext(router) if router else self.pin() as router:
            queries_QD = check_queries(queries_QD, router.dimension)
            results = self.searchers.exact(queries_QD, check_k(k), router.manifest, Deadline.after(TIMEOUT_S))
            if missing := {entry.shard for entry in router.manifest.shards} - {result.shard for result in results}:
                raise DamagedShardsError(
                    f"{version_name(router.manifest)} not searched exactly: shards {sorted(missing)} are damaged; "
                    f"repair them: mvr-ray versions CONFIG repair"
                )
            return MergedResults(results, shard_starts(router.manifest.shards), k).hits()


@contextmanager
def open_hot_swap_router(
    run: RunConfig,
    version: int | None = None,
    *,
    local: bool | None = None,
    timeout_s: float = TIMEOUT_S,
    follow_s: float | None = None,
    probe_s: float = 5.0,
    observe: Observe | None = None,
    batching: bool = True,
    needs_words: bool = False,
) -> Iterator[HotSwapRouter]:
    """Open a hot-swap router over `index.name`, first on `version` (None: the newest), until the block ends.

    `follow_s`: interval of checks for a newer version, unless one was named. Every `probe_s` seconds the searchers are
    probed, and moved if nodes joined. `batching` and `needs_words` are those of `HotSwapRouter`. `local` holds the
    shards in this process, without Ray; None: as `session.needs_ray` decides. A first version with damaged shards
    answers without them; the router moves to no later one with damage.

    Raises MissingInputError, ManifestError, ResourceError.
    """
    store = Store(run.store.path)
    manifest = manifests.read(store, run.index.name, version)
    resources = run.resources
    with ExitStack() as stack:
        searchers = stack.enter_context(open_searchers(run, manifest, local))
        live = HotSwapRouter(
            store,
            manifest,
            searchers,
            batching=batching,
            max_waiting=max(run.serve.max_running // 2, 1),
            needs_words=needs_words,
            timeout_s=timeout_s,
            threads=resources.threads,
            observe=observe,
        )
        try:
            live.ready()
        except StorageError as error:
            log.error("opened with damage: index=%s version=%d reason=%s", live.index, manifest.version, error)
        if isinstance(searchers, LocalSearchers):
            scrubber = Scrubber(searchers.searcher, resources.scrub_bytes_s)
            stack.enter_context(scrubber.run_periodically())
        else:
            from mvr_ray.distributed.searching.health import HealthMonitor
            from mvr_ray.distributed.searching.node_placement import Rebalancer

            monitor = HealthMonitor(searchers.dispatcher, resources.hung_s)
            check = searchers.unless_lost(lambda: monitor.check(time.monotonic()))
            stack.enter_context(run_every(probe_s, check, "mvr-health", join_s=None))
            rebalancer = Rebalancer(searchers, searcher_task(run, manifest, local=False), resources)
            rebalance = session.using_ray()(searchers.unless_lost(rebalancer.rebalance))
            stack.enter_context(run_every(probe_s, rebalance, "mvr-rebalancer"))
        if version is not None:
            live.move_to(version)
        if follow_s is not None:
            stack.enter_context(live.follow_periodically(follow_s))
        yield live
