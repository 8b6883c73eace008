"""Bounds how many requests are accepted and how long each may take, in a replica and in Ray Serve's proxy.

    inside >= max_waiting   ->  refused at once: 503 with Retry-After, the mean stay of those before
    deadline passed         ->  504; work that had not begun never begins

A request that was cut off keeps its slot until the thread that works for it is done: a hung index exhausts the slots,
and later requests get 503 (`overloaded`), instead of piling up threads.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from mvr_ray.serving.schemas import RequestError

T = TypeVar("T")

LONGEST_RETRY_S = 60
MEMORY = 0.9
"""Weight of the past in the running mean of stays."""


class Admission:
    """The slots of one process: `max_waiting` requests inside, each for at most `timeout_s`."""

    def __init__(self, max_waiting: int, timeout_s: float) -> None:
        self.max_waiting = max_waiting
        self.timeout_s = timeout_s
        self.inside = 0
        self._mean_s = 0.0
        self._lock = threading.Lock()

    def enter(self, timeout_s: float | None = None) -> "Slot":
        """A slot for at most `timeout_s`. Raises RequestError (503) where all are taken."""
        with self._lock:
            if self.inside >= self.max_waiting:
                wait_s = max(1, min(LONGEST_RETRY_S, math.ceil(self._mean_s)))
                message = f"{self.max_waiting} requests are here already"
                hint, headers = f"ask again in {wait_s} s (Retry-After)", {"retry-after": str(wait_s)}
                raise RequestError(503, "overloaded", "", message, hint, headers)
            self.inside += 1
        return Slot(self, self.shorter(timeout_s))

    def leave(self, stay_s: float) -> None:
        with self._lock:
            self.inside -= 1
            self._mean_s = MEMORY * self._mean_s + (1 - MEMORY) * stay_s

    def shorter(self, timeout_s: float | None) -> float:
        """The time that a request may take which asks for `timeout_s` itself."""
        return self.timeout_s if timeout_s is None else min(timeout_s, self.timeout_s)


class Slot:
    """One request's slot. It is free again when its answer has gone and its work has ended."""

    def __init__(self, admission: Admission, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._admission = admission
        self._began = time.monotonic()
        self._work: Future[Any] | None = None
        self._occupied = True

    def left_s(self, timeout_s: float | None = None) -> float:
        """Seconds until this request's time is over; `timeout_s` is what its body asks for."""
        allowed_s = self.timeout_s if timeout_s is None else min(timeout_s, self.timeout_s)
        return self._began + allowed_s - time.monotonic()

    def leave(self) -> None:
        """Free the slot, or have its work free it. A second call does nothing."""
        if self._occupied:
            self._occupied = False
            if self._work is None:
                self._end()
            else:
                self._work.add_done_callback(self._end)

    def _end(self, _: object = None) -> None:
        self._admission.leave(time.monotonic() - self._began)


class Workers:
    """Threads that work for admitted requests; `note_queue` gets the seconds that each waited for one."""

    def __init__(self, num_threads: int, note_queue: Callable[[float], None]) -> None:
        self._note_queue = note_queue
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="answer")

    async def run(self, slot: Slot, work: Callable[[float], T], timeout_s: float | None = None) -> T:
        """`work(seconds left)` on a thread. Raises RequestError (504) when the time is over."""
        left_s, entered = slot.left_s(timeout_s), time.monotonic()

        def work_in_time() -> T:
            waited_s = time.monotonic() - entered
            self._note_queue(waited_s)
            if waited_s >= left_s:
                raise late(slot.timeout_s)
            return work(left_s - waited_s)

        slot._work = future = self._threads.submit(work_in_time)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), left_s)
        except TimeoutError:
            raise late(slot.timeout_s if timeout_s is None else min(timeout_s, slot.timeout_s)) from None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def late(timeout_s: float) -> RequestError:
    message = f"no answer within {round(1000 * timeout_s)} ms"
    return RequestError(504, "timeout", "", message, "send fewer queries, or raise timeout_ms or serve.timeout_ms")
