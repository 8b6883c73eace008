"""Run a function periodically in a background thread, or hold its last result."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Generic, TypeVar

from mvr_ray.distributed.cluster.ray_errors import ray_error_types
from mvr_ray.errors import NoAnswerError, first_line

log = logging.getLogger(__name__)

JOIN_S = 1.0
RETRY_S = 1.0
T = TypeVar("T")


class LastResult(Generic[T]):
    """The last result of a function that asks a store. Safe to use from several threads."""

    def __init__(self, function: Callable[[], T], valid_s: float, wait_s: float) -> None:
        self._function, self._valid_s, self._wait_s = function, valid_s, wait_s
        self._lock = threading.Lock()
        self._results: list[T] = []
        self._call: Future[T] | None = None
        self._due_s = 0.0

    def get(self) -> T:
        """Return the last result. One older than `valid_s` first begins another call, in a thread of its own; if that
        has no result in `wait_s`, or fails with NoAnswerError, the last one holds. The first call may take any time."""
        with self._lock:
            if self._call is None or (self._call.done() and time.monotonic() >= self._due_s):
                self._call, self._due_s = Future(), time.monotonic() + self._valid_s
                threading.Thread(target=self._run, args=(self._call,), name="mvr-last-result", daemon=True).start()
            call, results = self._call, self._results
        try:
            return call.result(self._wait_s if results else None)
        except (TimeoutError, NoAnswerError):
            if not results:
                raise
            return results[0]

    def _run(self, call: "Future[T]") -> None:
        try:
            result = self._function()
        except BaseException as error:  # noqa: BLE001  # the caller gets it from the future
            call.set_exception(error)
        else:
            self._results = [result]
            call.set_result(result)


@contextmanager
def run_periodically(
    function: Callable[[], float], wait_s: float, name: str, join_s: float | None = JOIN_S
) -> Iterator[None]:
    """Call `function` after `wait_s`, then each time after the seconds that its last call returned.

    A call that fails is logged and repeated after the same wait, at least RETRY_S. The block's end waits for a call
    that still runs, at most `join_s` (None: without limit).
    """
    stop = threading.Event()

    def loop() -> None:
        next_s = wait_s
        while not stop.wait(next_s):
            try:
                next_s = function()
            except Exception as error:  # a thread that ended would leave its work undone without a word
                next_s = max(next_s, RETRY_S)
                log.error("%s failed, next time in %g s", name, next_s, exc_info=error)

    thread = threading.Thread(target=loop, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(join_s)


def run_every(
    interval_s: float, function: Callable[[], object], name: str, join_s: float | None = JOIN_S
) -> AbstractContextManager[None]:
    """Call `function` every `interval_s` seconds, as `run_periodically`; an error of Ray is a warning."""

    def call() -> float:
        try:
            function()
        except ray_error_types() as error:
            log.warning("%s failed, next time in %g s: %s", name, interval_s, first_line(error))
        return interval_s

    return run_periodically(call, interval_s, name, join_s)
