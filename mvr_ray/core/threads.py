"""Share with other threads what holds for the whole process: torch's number of threads, and settings of libraries."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

MODEL_LOCK = threading.RLock()
"""Held while a model is loaded, converted or prepared: libraries do that under settings of the whole process."""
os.register_at_fork(
    before=MODEL_LOCK.acquire, after_in_parent=MODEL_LOCK.release, after_in_child=MODEL_LOCK.release
)  # else a fork would inherit the lock of a thread that it lacks


class _Default:
    """Torch's default for threads that have not asked for their number, as it is outside all blocks."""

    def __init__(self) -> None:
        self.lock, self.num_users, self.num_threads = threading.Lock(), 0, 0
        self.thread = threading.local()


_DEFAULT = _Default()
os.register_at_fork(after_in_child=_DEFAULT.__init__)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads for this thread in the block, and restore its own afterwards.

    To set the number of a thread also sets the default, which a new thread reads at its first use of torch. A thread
    that enters its first block while others are in theirs gets the default that was there before all of them.
    """
    import torch

    with _DEFAULT.lock:
        before = torch.get_num_threads()
        if not _DEFAULT.num_users:
            _DEFAULT.num_threads = before
        elif not hasattr(_DEFAULT.thread, "is_known"):
            before = _DEFAULT.num_threads
        _DEFAULT.thread.is_known = True  # torch has its number from now on
        _DEFAULT.num_users += 1
        torch.set_num_threads(count)
    try:
        yield
    finally:
        with _DEFAULT.lock:
            _DEFAULT.num_users -= 1
            torch.set_num_threads(before)
