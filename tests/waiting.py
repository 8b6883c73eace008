"""Waits, up to a limit, for a condition that another thread or process makes true, or for what a process writes."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from subprocess import Popen
from typing import TypeVar

T = TypeVar("T")


def until(what: Callable[[], T], seconds: float = 60.0, every_s: float = 0.002) -> T:
    """The first true value of `what()`, polled until the time is over."""
    end = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(every_s)
    return value


def lines_of(process: Popen[str], stream: Iterable[str] | None, seconds: float = 1200.0) -> Iterator[str]:
    """The lines of a process's stdout or stderr. It is killed when the time is over."""
    assert stream
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        for line in stream:  # noqa: UP028 - `yield from` would close the stream, which may be read on
            yield line
        assert timer.is_alive(), f"the process neither wrote the line nor ended within {seconds:g} s"
    finally:
        timer.cancel()
