"""Opens a few versions beside the live one for calls that name them; `hot_swap` keeps and evicts them.

capacity  a fixed number of versions; a further one replaces the least recently called
idle time a version is evicted only some time after its last call; until then calls for a further version are
          refused, so calls that name many versions in turn cannot make each one be read again for every call
loading   one version at a time, in a background thread; it stays open if its callers time out
waiting   a limited number of calls, each until its deadline; others are refused with a retry time, so that
          calls to the live version find a free thread
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from mvr_ray.deadline import Deadline
from mvr_ray.errors import OverloadedError, StorageError
from mvr_ray.store.manifest import Manifest

T = TypeVar("T")

MAX_VERSIONS = 2
"""Two versions can be compared with each other and with the live one."""
MIN_IDLE_S = 30.0
"""Seconds since its last call after which a version may be evicted, and after which a damaged one is read again."""
MAX_WAITING = 4
MAX_RETRY_S = 60.0


class _Load(NamedTuple):
    version: int
    began_s: float
    future: "Future[None]"


class VersionLoader:
    """Opens one version at a time for calls, which wait until their deadlines. Safe to use from several threads."""

    def __init__(self, open_version: Callable[[Manifest], None], max_waiting: int) -> None:
        """`open_version` runs in a background thread. `max_waiting`: calls that may wait at the same time."""
        self.max_waiting = max_waiting
        self.min_idle_s = MIN_IDLE_S
        self._open_version = open_version
        self._current: _Load | None = None
        self._slots = threading.Semaphore(max_waiting)
        self._damaged_versions: dict[int, tuple[float, StorageError]] = {}
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mvr-load")

    def wait_for(self, manifest: Manifest, deadline: Deadline, get: Callable[[], T | None]) -> T:
        """Open a version, and return what `get()` gives then.

        Raises what opening it raises; OverloadedError if it is not open by the deadline, or if too many calls wait.
        """
        if (value := get()) is not None:
            return value
        load = self._start(manifest)
        if not self._slots.acquire(blocking=False):
            reason = f"is not open, and {self.max_waiting} calls wait for versions already, the most that may"
            raise _retry_later(manifest, load, reason)
        try:
            while True:
                try:
                    load.future.exception(deadline.left_s)
                except TimeoutError:
                    raise _retry_later(manifest, load, "is not open yet") from None
                if load.version == manifest.version:
                    load.future.result()
                if (value := get()) is not None:
                    return value
                load = self._start(manifest)
        finally:
            self._slots.release()

    def _start(self, manifest: Manifest) -> _Load:
        """Return the running load, else a new one of this version. Raises StorageError for a version damaged a moment
        ago."""
        with self._lock:
            if self._current is not None and not self._current.future.done():
                return self._current
            failed_s, error = self._damaged_versions.get(manifest.version, (0.0, None))
            if error is not None and time.monotonic() - failed_s < self.min_idle_s:
                raise error
            future = self._thread.submit(self._open, manifest)
            self._current = _Load(manifest.version, time.monotonic(), future)
            return self._current

    def _open(self, manifest: Manifest) -> None:
        try:
            self._open_version(manifest)
        except StorageError as error:
            with self._lock:
                self._damaged_versions[manifest.version] = time.monotonic(), error
            raise


def _retry_later(manifest: Manifest, load: _Load, reason: str) -> OverloadedError:
    """Return an error whose retry time is the load's duration so far."""
    retry_s = min(max(1.0, time.monotonic() - load.began_s), MAX_RETRY_S)
    return OverloadedError(
        f"index {manifest.index!r} version {manifest.version} {reason}: version {load.version} is being opened "
        f"beside the live one; ask again in {retry_s:.0f} s",
        retry_s,
    )
