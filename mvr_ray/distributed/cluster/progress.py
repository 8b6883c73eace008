"""Forward a worker's progress to the driver through an actor: the worker reports to it, the driver polls it.

The worker's progress callable is `actor.report.remote`, which does not wait.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from mvr_ray.distributed.cluster.periodic import run_periodically
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


@contextmanager
def forward_progress(progress: Progress) -> Iterator[Any]:
    """Yield an actor to send to the worker. Its latest report is forwarded twice a second, and at the end."""
    actor: Any = ray.remote(ProgressActor).options(num_cpus=0).remote()
    last = None

    def forward() -> float:
        nonlocal last
        try:
            latest = ray.get(actor.latest.remote(), timeout=10)
        except (ray.exceptions.RayError, TimeoutError):
            latest = None
        if latest and latest != last:
            progress(*latest)
            last = latest
        return _POLL_S

    try:
        with run_periodically(forward, _POLL_S, "forward-progress", _LAST_REPORT_S):
            yield actor
    finally:
        forward()
        ray.kill(actor)
