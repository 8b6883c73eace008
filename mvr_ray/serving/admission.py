"""How many requests a replica takes in, and how long each may stay.

    in flight >= max_waiting   ->  refused at once: 503 with Retry-After
    time over                  ->  504; what had not begun never begins

A request that was cut off keeps its place until the thread that works for it is done: a hung index fills the house and
is then told as `overloaded`, instead of piling up threads.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from mvr_ray.serving.wire import RequestError

T = TypeVar("T")

LONGEST_RETRY_S = 60
MEMORY = 0.9
"""Weight of the past in the running mean of work times."""


class Admission:
    """The places of one replica: `max_running` at work, the others of `max_waiting` in a queue."""

    def __init__(
        self, max_waiting: int, max_running: int, timeout_s: float, note_queue: Callable[[float], None]
    ) -> None:
        """`timeout_s`: from entering to the answer, where a request does not ask for less."""
        self.max_waiting = max_waiting
        self.max_running = max_running
        self.timeout_s = timeout_s
        self.in_flight = 0
        self._note_queue = note_queue
        self._mean_s = 0.0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max_running, thread_name_prefix="answer")

    def enter(self, timeout_s: float | None = None) -> "Place":
        """A place for at most `timeout_s`, or RequestError when there is none."""
        with self._lock:
            if self.in_flight >= self.max_waiting:
                wait_s = retry_after_s(self.in_flight, self.max_running, self._mean_s)
                raise overloaded(self.max_waiting, wait_s)
            self.in_flight += 1
        return Place(self, self.timeout_s if timeout_s is None else min(timeout_s, self.timeout_s))

    def submit(self, work: Callable[[float], T], deadline: float, timeout_s: float) -> "Future[T]":
        """Start `work(seconds left)` when a thread is free, unless its time, `timeout_s` in all, is over by then."""
        entered = time.monotonic()

        def worked() -> T:
            began = time.monotonic()
            self._note_queue(began - entered)
            if began >= deadline:
                raise late(timeout_s)
            try:
                return work(deadline - began)
            finally:
                with self._lock:
                    self._mean_s = MEMORY * self._mean_s + (1 - MEMORY) * (time.monotonic() - began)

        return self._threads.submit(worked)

    def left(self, _: object = None) -> None:
        with self._lock:
            self.in_flight -= 1

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


class Place:
    """One request's place, given back when its answer has gone and its work has ended."""

    def __init__(self, admission: Admission, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._admission = admission
        self._began = time.monotonic()
        self._work: Future[Any] | None = None

    def left_s(self, timeout_s: float | None = None) -> float:
        """Seconds until this request's time is over; `timeout_s` is what it asked for itself."""
        allowed = self.timeout_s if timeout_s is None else min(timeout_s, self.timeout_s)
        return self._began + allowed - time.monotonic()

    async def run(self, work: Callable[[float], T], timeout_s: float | None = None) -> T:
        """`work(seconds left)` on a thread. Raises RequestError (504) when its time is over."""
        left_s = self.left_s(timeout_s)
        self._work = future = self._admission.submit(work, time.monotonic() + left_s, self.timeout_s)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), left_s)
        except TimeoutError:
            raise late(self.timeout_s if timeout_s is None else min(timeout_s, self.timeout_s)) from None

    def leave(self) -> None:
        if self._work is None:
            self._admission.left()
        else:
            self._work.add_done_callback(self._admission.left)


def retry_after_s(in_flight: int, max_running: int, mean_s: float) -> int:
    """Whole seconds in which those who are here will have been answered, 1 to 60."""
    return max(1, min(LONGEST_RETRY_S, math.ceil(in_flight * mean_s / max_running)))


def overloaded(max_waiting: int, wait_s: int) -> RequestError:
    message, hint = f"{max_waiting} requests are here already", f"ask again in {wait_s} s (Retry-After)"
    return RequestError(503, "overloaded", "", message, hint, {"retry-after": str(wait_s)})


def late(timeout_s: float) -> RequestError:
    message = f"no answer within {round(1000 * timeout_s)} ms"
    return RequestError(504, "timeout", "", message, "send fewer queries, or raise timeout_ms or serve.timeout_ms")
