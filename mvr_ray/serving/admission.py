"""Bounds how many requests are accepted and how long each may take, in a replica and in Ray Serve's proxy.

    in_flight >= max_waiting   ->  refused at once: 503 with Retry-After, the mean duration of earlier requests
    deadline passed            ->  504; queued work does not start

A request past its deadline keeps its slot until its worker thread ends: a hung index exhausts the slots,
and later requests get 503 (`overloaded`), instead of piling up threads.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

from mvr_ray.deadline import Deadline
from mvr_ray.serving.schemas import RequestError, retry_seconds

T = TypeVar("T")

MEMORY = 0.9
"""Weight of earlier requests in the running mean of durations."""


def late_error(deadline: Deadline) -> RequestError:
    """Return the error for a request past its deadline."""
    message = f"no answer within {round(1000 * deadline.timeout_s)} ms"
    return RequestError(504, "timeout", "", message, "send fewer queries, or raise timeout_ms or serve.timeout_ms")


def in_time(items: Iterable[T], deadline: Deadline) -> Iterator[T]:
    """Yield the items. Raises RequestError (504) for the first one past the deadline."""
    for item in items:
        if not deadline.left_s:
            raise late_error(deadline)
        yield item


class Admission:
    """The slots of one process, for `max_waiting` requests at a time."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.in_flight = 0
        self._mean_s = 0.0
        self._lock = threading.Lock()

    def acquire(self) -> "Slot":
        """Take a slot. Raises RequestError (503) if all are taken."""
        with self._lock:
            if self.in_flight >= self.max_waiting:
                message = f"{self.max_waiting} requests are in flight already"
                hint = f"ask again in {retry_seconds(self._mean_s)} s (Retry-After)"
                raise RequestError(503, "overloaded", "", message, hint, retry_after_s=self._mean_s)
            self.in_flight += 1
        return Slot(self)

    def release(self, duration_s: float) -> None:
        with self._lock:
            self.in_flight -= 1
            self._mean_s = MEMORY * self._mean_s + (1 - MEMORY) * duration_s


class Slot:
    """One request's slot. It is free again after its response is sent and its work has ended."""

    def __init__(self, admission: Admission) -> None:
        self.work: Future[Any] | None = None
        self._admission = admission
        self._start_s = time.monotonic()
        self._is_free = False

    def release(self) -> None:
        """Free the slot now, or when its work ends. A second call does nothing."""
        if not self._is_free:
            self._is_free = True
            if self.work is None:
                self._end()
            else:
                self.work.add_done_callback(self._end)

    def _end(self, _: object = None) -> None:
        self._admission.release(time.monotonic() - self._start_s)


class Workers:
    """Threads that execute admitted requests; `note_queue` gets the seconds that each request waited for one."""

    def __init__(self, num_threads: int, note_queue: Callable[[float], None]) -> None:
        self._note_queue = note_queue
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="answer")

    async def run(self, slot: Slot, work: Callable[[], T], deadline: Deadline) -> T:
        """Run `work` on a thread, in the caller's context. Raises RequestError (504) after the deadline."""
        start_s = time.monotonic()

        def work_in_time() -> T:
            self._note_queue(time.monotonic() - start_s)
            if deadline.left_s <= 0:
                raise late_error(deadline)
            return work()

        slot.work = future = self._threads.submit(copy_context().run, work_in_time)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), deadline.left_s)
        except TimeoutError:
            raise late_error(deadline) from None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
