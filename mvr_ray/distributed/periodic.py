"""Run a function periodically in a background thread."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from mvr_ray.distributed.ray_errors import ray_error_types
from mvr_ray.errors import first_line

log = logging.getLogger(__name__)

JOIN_S = 1.0
RETRY_S = 1.0


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
