"""Bounds how many requests are accepted and how long each may take, in a replica and in Ray Serve's proxy.

    inside >= max_waiting   ->  refused at once: 503 with Retry-After, the mean stay of those before
    deadline passed         ->  504; work that had not begun never begins

A request that was cut off keeps its slot until the thread that works for it is done: a hung index exhausts the slots,
and later requests get 503 (`overloaded`), instead of piling up threads.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

from mvr_ray.deadline import Deadline
from mvr_ray.serving.schemas import RequestError, retry_seconds

T = TypeVar("T")

MEMORY = 0.9
"""Weight of the past in the running mean of stays."""


def late_error(deadline: Deadline) -> RequestError:
    """The answer to a request whose time is over."""
    message = f"no answer within {round(1000 * deadline.timeout_s)} ms"
    return RequestError(504, "timeout", "", message, "send fewer queries, or raise timeout_ms or serve.timeout_ms")


class Admission:
    """The slots of one process: `max_waiting` requests inside."""

    def __init__(self, max_waiting: int) -> None:
        self.max_waiting = max_waiting
        self.inside = 0
        self._mean_s = 0.0
        self._lock = threading.Lock()

    def enter(self) -> "Slot":
        """A slot. Raises RequestError (503) where all are taken."""
        with self._lock:
            if self.inside >= self.max_waiting:
                message = f"{self.max_waiting} requests are here already"
                hint = f"ask again in {retry_seconds(self._mean_s)} s (Retry-After)"
                raise RequestError(503, "overloaded", "", message, hint, retry_after_s=self._mean_s)
            self.inside += 1
        return Slot(self)

    def leave(self, stay_s: float) -> None:
        with self._lock:
            self.inside -= 1
            self._mean_s = MEMORY * self._mean_s + (1 - MEMORY) * stay_s


class Slot:
    """One request's slot. It is free again when its answer has gone and its work has ended."""

    def __init__(self, admission: Admission) -> None:
        self.work: Future[Any] | None = None
        self._admission = admission
        self._start_s = time.monotonic()
        self._is_free = False

    def leave(self) -> None:
        """Free the slot, or have its work free it. A second call does nothing."""
        if not self._is_free:
            self._is_free = True
            if self.work is None:
                self._end()
            else:
                self.work.add_done_callback(self._end)

    def _end(self, _: object = None) -> None:
        self._admission.leave(time.monotonic() - self._start_s)


class Workers:
    """Threads that work for admitted requests; `note_queue` gets the seconds that each waited for one."""

    def __init__(self, num_threads: int, note_queue: Callable[[float], None]) -> None:
        self._note_queue = note_queue
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="answer")

    async def run(self, slot: Slot, work: Callable[[], T], deadline: Deadline) -> T:
        """Do `work` on a thread, in the caller's context. Raises RequestError (504) when the time is over."""
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
