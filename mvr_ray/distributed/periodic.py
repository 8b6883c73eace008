"""Run a function periodically in a background thread."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

JOIN_S = 1.0


@contextmanager
def run_periodically(
    function: Callable[[], float], wait_s: float, name: str, join_s: float | None = JOIN_S
) -> Iterator[None]:
    """Call `function` after `wait_s`, then each time after the seconds that its last call returned.

    The block's end waits for a call that still runs, at most `join_s` (None: without limit).
    """
    stop = threading.Event()

    def loop() -> None:
        next_s = wait_s
        while not stop.wait(next_s):
            next_s = function()

    thread = threading.Thread(target=loop, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(join_s)
