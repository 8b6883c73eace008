"""Waits for a condition that another thread or process makes true."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(what: Callable[[], T], seconds: float = 60.0, every_s: float = 0.002) -> T:
    """The first true value of `what()`, polled until the time is over."""
    end = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(every_s)
    return value
