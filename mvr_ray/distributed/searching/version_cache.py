"""Keeps a few versions open beside the live one for calls that name them, and decides which one to evict.

places   so many beside the live version; a further guest takes the place of the one that nobody called for longest
rest     a guest that was called a moment ago stays: who names many versions in turn is told to wait, instead of
         having each of them read again for every call
one      is opened at a time, in a thread of its own, and stays when those who asked for it have gone
wait     only some calls may, and none past its own time; the others are told when to ask again, so that those who
         ask the live version find a thread
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

from mvr_ray.deadline import Deadline
from mvr_ray.errors import OverloadedError, StorageError
from mvr_ray.store.manifest import Manifest

T = TypeVar("T")

PLACES = 2
"""Two versions are compared with each other as well as with the live one."""
REST_S = 30.0
"""For so long after a call a guest keeps its place, and a version with a damaged file is not read again."""
WAITS = 4
LONGEST_RETRY_S = 60.0


class CachedVersion(NamedTuple):
    """An open version beside the live one: calls under way on it, and when one last began or ended (monotonic)."""

    version: int
    calls: int
    called_s: float


def evict(name: str, guests: Sequence[CachedVersion], why: str, now_s: float, rest_s: float) -> int:
    """The version that goes for `name`: of those at rest the one that nobody called for longest.

    Raises OverloadedError where none rests, with `why` one must go and when one may.
    """
    resting = [guest for guest in guests if not guest.calls and now_s - guest.called_s >= rest_s]
    if resting:
        return min(resting, key=lambda guest: (guest.called_s, guest.version)).version
    retry_s = max(1.0, min(guest.called_s + rest_s - now_s for guest in guests))
    open_here = ", ".join(str(guest.version) for guest in guests)
    raise OverloadedError(
        f"{name} not opened: {why}, and who is open beside the live version (version {open_here}) was called less "
        f"than {rest_s:g} s ago and stays; ask again in {retry_s:.0f} s",
        retry_s,
    )


class _Opening(NamedTuple):
    version: int
    began_s: float
    done: "Future[None]"


class VersionLoader:
    """Opens one version at a time for calls that wait no longer than they may. Safe to use from several threads."""

    def __init__(self, open_one: Callable[[Manifest], None], most_waiting: int = WAITS, rest_s: float = REST_S) -> None:
        """`open_one` runs in a thread of its own. `most_waiting`: calls that may wait at the same time."""
        self.most_waiting = most_waiting
        self.rest_s = rest_s
        self._open_one = open_one
        self._now: _Opening | None = None
        self._waiting = 0
        self._damaged: dict[int, tuple[float, StorageError]] = {}
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mvr-guest")

    def wait_for(self, manifest: Manifest, deadline: Deadline, there: Callable[[], T | None]) -> T:
        """What `there()` gives when the version is open.

        Raises what opening it raised; OverloadedError where it is not open by the deadline, or as many wait as may.
        """
        waits = False
        try:
            while (found := there()) is None:
                opening = self._start(manifest)
                if not waits:
                    waits = self._let_wait(manifest, opening)
                try:
                    opening.done.exception(deadline.left_s)
                except TimeoutError:
                    raise _later(manifest, opening, "is not open yet") from None
                if opening.version == manifest.version:
                    opening.done.result()
            return found
        finally:
            if waits:
                with self._lock:
                    self._waiting -= 1

    def _let_wait(self, manifest: Manifest, opening: _Opening) -> bool:
        with self._lock:
            if self._waiting >= self.most_waiting:
                told = f"is not open, and {self._waiting} calls wait for versions already, as many as may"
                raise _later(manifest, opening, told)
            self._waiting += 1
        return True

    def _start(self, manifest: Manifest) -> _Opening:
        """The opening that is under way, or else one of this version. Raises StorageError where it was just found
        damaged.
        """
        with self._lock:
            if self._now is not None and not self._now.done.done():
                return self._now
            found_s, error = self._damaged.get(manifest.version, (0.0, None))
            if error is not None and time.monotonic() - found_s < self.rest_s:
                raise error
            done = self._thread.submit(self._open, manifest)
            self._now = _Opening(manifest.version, time.monotonic(), done)
            return self._now

    def _open(self, manifest: Manifest) -> None:
        try:
            self._open_one(manifest)
        except StorageError as error:
            with self._lock:
                self._damaged[manifest.version] = time.monotonic(), error
            raise


def _later(manifest: Manifest, opening: _Opening, reason: str) -> OverloadedError:
    """It has taken so long already: it may take as long again."""
    retry_s = min(max(1.0, time.monotonic() - opening.began_s), LONGEST_RETRY_S)
    return OverloadedError(
        f"index {manifest.index!r} version {manifest.version} {reason}: version {opening.version} is being opened "
        f"beside the live one; ask again in {retry_s:.0f} s",
        retry_s,
    )
