"""Switches a router to newer index versions while it answers.

    move     the next version is opened beside the live one, sharing unchanged shards; it answers a probe; the flip
    finish   calls under way end on the version that they began with; its own shards go when the last one has ended
    guest    a version that a call names is opened in the same way, and keeps one of a few places (`version_cache`)
    refuse   no room, a damaged shard, a searcher that died: the live version stays, and the reason is told
    follow   the newest published version, looked for every so many seconds

All calls on one `pin()` router are answered by one version, so a search and the passages that it found agree.

Shapes: Q queries, D dimension.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from mvr_ray.config import RunConfig
from mvr_ray.deadline import Deadline
from mvr_ray.distributed import session
from mvr_ray.distributed.periodic import run_periodically
from mvr_ray.distributed.ray_errors import ray_error_types, translate_ray_errors
from mvr_ray.distributed.router import TIMEOUT_S, Observe, Router, searcher_task
from mvr_ray.distributed.searching.batching import DynamicBatcher
from mvr_ray.distributed.searching.local_searchers import LocalSearchers, Searchers, version_name
from mvr_ray.distributed.searching.scrubber import Scrubber
from mvr_ray.distributed.searching.searcher import Fleet
from mvr_ray.distributed.searching.version_cache import PLACES, REST_S, WAITS, CachedVersion, VersionLoader, evict
from mvr_ray.errors import InsufficientMemoryError, MissingInputError, MvrRayError, StorageError
from mvr_ray.store import manifest as manifests
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest

log = logging.getLogger(__name__)

LONGEST_FOLLOW_S = 600.0
"""A version that could not be opened is tried again, each time after twice as long, up to this."""


class SwapState(NamedTuple):
    """Which version answers, whether the newest one is followed, and why the last move failed (empty: it did not)."""

    version: int
    follows: bool
    failed_version: int = 0
    failure: str = ""


@dataclass
class _OpenVersion:
    """A version that is open here, and the calls under way on it."""

    router: Router
    calls: int = 0
    retired: bool = False
    called_s: float = field(default_factory=time.monotonic)

    @property
    def guest(self) -> CachedVersion:
        return CachedVersion(self.router.manifest.version, self.calls, self.called_s)


class HotSwapRouter:
    """Gives the router of the live version, which changes under it, or of another one (`pin`). Safe to use from several
    threads."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        searchers: Searchers,
        *,
        timeout_s: float = TIMEOUT_S,
        threads: int = 1,
        gpu: bool = False,
        observe: Observe | None = None,
        coalesce: bool = False,
        waits: int = WAITS,
    ) -> None:
        """`manifest` is answered from first; its shards are opened by `ready`, or when asked. `coalesce`: searches
        that come while others run are asked together. `waits`: calls that may wait at the same time for versions that
        are opened for them.
        """
        self.store = store
        self.index = manifest.index
        self.searchers = searchers
        self.timeout_s = timeout_s
        self.threads = threads
        self.gpu = gpu
        self.observe = observe
        self.coalesce = coalesce
        self.rest_s = REST_S
        self._lock = threading.Lock()
        self._moving = threading.Lock()
        self._live = _OpenVersion(self._router(manifest, searchers.fleet(manifest)))
        self._open = {manifest.version: self._live}
        self._guests: list[_OpenVersion] = []
        self._openings = VersionLoader(self._invite, waits)
        self._state = SwapState(manifest.version, True)

    @property
    def state(self) -> SwapState:
        return self._state

    @property
    def failure(self) -> str:
        """Why the last move failed; empty where it did not."""
        return self._state.failure

    @contextmanager
    def pin(self, version: int | None = None, deadline: Deadline | None = None) -> Iterator[Router]:
        """The router of one version (None: the live one), open until the block ends, whatever becomes live meanwhile.

        Another version than the live one may have to be opened, for which the call waits until the deadline. Raises
        MissingInputError, StorageError or ResourceError where it cannot be; OverloadedError where it is not open in
        time, or where others were called too short a time ago to go for it.
        """
        served = self._acquire(version)
        if served is None:
            manifest = manifests.read(self.store, self.index, version)
            deadline = deadline or Deadline.after(self.timeout_s)
            served = self._openings.wait_for(manifest, deadline, lambda: self._acquire(version))
        try:
            yield served.router
        finally:
            self._release(served)

    def move_to(self, version: int | None = None) -> int:
        """Answer from another version from now on; a named one is kept, None: the newest, which is followed again.

        Gives the version that is live then. Raises MissingInputError, StorageError or ResourceError where it cannot be
        opened beside the live one; that one goes on.
        """
        with self._moving:
            return self._move(version)

    def follow(self) -> bool:
        """Move to the newest version if there is a newer one and none was asked for by number; whether it moved.

        A move that fails raises nothing: what failed is in `failure`.
        """
        with self._moving:
            before = self._state
            if not before.follows:
                return False
            try:
                return self._move(None) != before.version
            except (MvrRayError, *ray_error_types()) as error:
                log.error("move failed: index=%s live=%d reason=%s", self.index, before.version, error)
                return False

    def following(self, every_s: float) -> AbstractContextManager[None]:
        """Looks for a newer version every so many seconds, in a thread, until the block ends."""
        wait_s = every_s

        def follow() -> float:
            nonlocal wait_s
            self.follow()
            wait_s = min(2 * wait_s, max(LONGEST_FOLLOW_S, every_s)) if self._state.failure else every_s
            return wait_s

        return run_periodically(follow, every_s, "mvr-follow")

    def _move(self, version: int | None) -> int:
        number = version or 0
        try:
            number = version or manifests.latest_version(self.store, self.index)
            if version is None and self._state.follows and number < self._state.version:
                raise MissingInputError(
                    f"index {self.index!r} has no version {self._state.version} any more, which answers here and goes "
                    f"on; the newest one is {number}: put the manifest back, or start anew to answer from {number}"
                )
            manifest = manifests.read(self.store, self.index, number or None)
            if number == self._state.version:
                self._require_same(manifest)
                self._state = SwapState(number, version is None)
                return number
            served = self._beside_instead(manifest, moves=True)
        except (MvrRayError, *ray_error_types()) as error:
            self._state = self._state._replace(failed_version=number, failure=str(error))
            raise
        with self._lock:
            before, self._live = self._live, served
            served.retired, before.retired = False, True
            self._guests = [guest for guest in self._guests if guest is not served]
            self._state = SwapState(manifest.version, version is None)
        log.info("moved: index=%s from=%d to=%d", self.index, before.router.manifest.version, manifest.version)
        for one in (served, before):
            self._release(one)
        return manifest.version

    def _require_same(self, manifest: Manifest) -> None:
        """Raises StorageError where another manifest has taken the number of the version that answers."""
        if manifest.content_digest() != self.manifest.content_digest():
            raise StorageError(
                f"index {self.index!r} version {manifest.version} is another one now than that which answers here and "
                f"goes on: its manifest was deleted, and its number taken; publish once more, or start anew"
            )

    def _acquire(self, version: int | None) -> _OpenVersion | None:
        """A version that is open, held by one more call."""
        with self._lock:
            served = self._live if version is None else self._open.get(version)
            if served is not None:
                served.calls += 1
                served.called_s = time.monotonic()
            return served

    def _invite(self, manifest: Manifest) -> None:
        """Open a version beside the live one; where the places or the memory are taken, a guest at rest goes for it."""
        with self._moving:
            if manifest.version in self._open:
                return
            live = self._live
            if len(self._guests) >= PLACES:
                self._make_way(manifest, f"all {PLACES} places beside the live one are taken")
            with translate_ray_errors(f"opening {version_name(manifest)}"):
                served = self._beside_instead(manifest, moves=False)
            with self._lock:
                self._guests.append(served)
        for one in (live, served):
            self._release(one)

    def _beside_instead(self, manifest: Manifest, moves: bool) -> _OpenVersion:
        """`_beside`; without room guests go for it: one at rest, or each in turn where the live version moves."""
        while True:
            try:
                return self._beside(manifest)
            except InsufficientMemoryError as error:
                if not self._guests:
                    raise
                self._retire(self._guests[0]) if moves else self._make_way(manifest, str(error))

    def _make_way(self, manifest: Manifest, why: str) -> None:
        with self._lock:
            guests = [served.guest for served in self._guests]
        leaves = evict(version_name(manifest), guests, why, time.monotonic(), self.rest_s)
        self._retire(next(served for served in self._guests if served.guest.version == leaves))

    def _retire(self, guest: _OpenVersion) -> None:
        """Let it go when its last call has ended."""
        with self._lock:
            self._guests.remove(guest)
            guest.retired = True
            guest.calls += 1
        self._release(guest)

    def _beside(self, manifest: Manifest) -> _OpenVersion:
        """A version open beside the live one, held by one call; the live one is held by one more, too."""
        with self._lock:
            self._live.calls += 1
            old = self._open.get(manifest.version)
            if old is not None:  # it was live before, and calls of that time still run
                old.calls += 1
                return old
        try:
            fleet = self.searchers.load(manifest)
            try:
                router = self._router(manifest, fleet)
                router.take_over(self._live.router)
                router.search(np.eye(1, manifest.dimension, dtype=np.float32), 1)
            except BaseException:  # nothing stays open, after Ctrl-C either
                self.searchers.drop(manifest.version)
                raise
        except BaseException:  # the live version is let go, after Ctrl-C too
            self._release(self._live)
            raise
        with self._lock:
            served = self._open[manifest.version] = _OpenVersion(router, calls=1)
        return served

    def _release(self, open_version: _OpenVersion) -> None:
        with self._lock:
            open_version.calls -= 1
            open_version.called_s = time.monotonic()
            if open_version.retired and not open_version.calls:
                version = open_version.router.manifest.version
                del self._open[version]
                self.searchers.drop(version)
                log.info("dropped: index=%s version=%d", self.index, version)

    def _router(self, manifest: Manifest, fleet: Fleet) -> Router:
        return Router(
            self.store,
            manifest,
            DynamicBatcher(fleet) if self.coalesce else fleet,
            timeout_s=self.timeout_s,
            threads=self.threads,
            gpu=self.gpu,
            observe=self.observe,
        )

    @property
    def manifest(self) -> Manifest:
        return self._live.router.manifest

    def ready(self) -> None:
        """Return when every shard of the live version can be searched."""
        with self.pin() as router:
            router.ready()


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
    coalesce: bool = True,
) -> Iterator[HotSwapRouter]:
    """A live router over `index.name`, first from `version` (None: the newest), until the block ends.

    With `follow_s` it looks so often for a newer version, unless one was named. Searchers are asked a probe every
    `probe_s`, and move when nodes come. Searches that come while others run are asked together (`coalesce`). `local`
    holds the shards in this process and needs no Ray; None: as `session.needs_ray` says. A first version with damaged
    shards is answered from without them; a later one is not moved to.

    Raises MissingInputError, ManifestError, ResourceError.
    """
    store = Store(run.store.path)
    manifest = manifests.read(store, run.index.name, version)
    resources = run.resources
    local = not session.needs_ray(resources, manifest.num_passages) if local is None else local
    task = searcher_task(run, manifest, local=local)
    with ExitStack() as stack:
        if local:
            own = LocalSearchers(task, resources.searcher_bytes)
            stack.enter_context(Scrubber(own.searcher, task.scrub_bytes_s).running())
            searchers: Searchers = own
        else:
            from mvr_ray.distributed.searching.fleet import RemoteSearchers
            from mvr_ray.distributed.searching.health import HealthMonitor
            from mvr_ray.distributed.searching.node_placement import Rebalancer

            info = stack.enter_context(session.connect(resources))
            searchers = started = RemoteSearchers.start(task, resources, info)
            stack.callback(searchers.stop)
        opened = partial(
            HotSwapRouter, timeout_s=timeout_s, threads=resources.torch_threads, observe=observe, coalesce=coalesce
        )
        live = opened(store, manifest, searchers, waits=max(run.serve.max_running // 2, 1))
        try:
            live.ready()
        except StorageError as error:
            log.error("opened with damage: index=%s version=%d reason=%s", live.index, manifest.version, error)
        if not local:
            watch = HealthMonitor(started.dispatcher, resources.hung_s)
            stack.enter_context(watch.running(probe_s))
            stack.enter_context(Rebalancer(started, task, resources).running(probe_s))
        if version is not None:
            live.move_to(version)
        if follow_s is not None:
            stack.enter_context(live.following(follow_s))
        yield live
