"""Forward a worker's progress to the driver through an actor: the worker reports to it, the driver polls it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from mvr_ray.types import Progress

_POLL_S = 0.5
_LAST_REPORT_S = 15


class ProgressActor:
    """Holds the latest report of a worker."""

    def __init__(self) -> None:
        self._latest: tuple[str, int, int] | None = None

    def report(self, what: str, count: int, total: int) -> None:
        self._latest = (what, count, total)

    def latest(self) -> tuple[str, int, int] | None:
        return self._latest


def remote_progress(actor: Any) -> Progress:
    """The worker's side: a progress callable that reports to the actor without waiting."""

    def report(what: str, count: int, total: int) -> None:
        actor.report.remote(what, count, total)

    return report


@contextmanager
def forward_progress(progress: Progress) -> Iterator[Any]:
    """The driver's side: an actor to send to the worker. Its latest report is forwarded twice a second to the end."""
    actor: Any = ray.remote(ProgressActor).options(num_cpus=0).remote()
    stop = threading.Event()

    def forward() -> None:
        last = None
        while True:
            is_last = stop.wait(_POLL_S)
            try:
                latest = ray.get(actor.latest.remote(), timeout=10)
            except (ray.exceptions.RayError, TimeoutError):
                latest = None
            if latest and latest != last:
                progress(*latest)
                last = latest
            if is_last:
                return

    thread = threading.Thread(target=forward, name="forward-progress", daemon=True)
    thread.start()
    try:
        yield actor
    finally:
        stop.set()
        thread.join(timeout=_LAST_REPORT_S)
        ray.kill(actor)
