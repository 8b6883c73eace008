"""Defines the deadline of a request, created when it arrives and passed to every function that works on it."""

import time
from typing import NamedTuple


class Deadline(NamedTuple):
    """The time of one request: `timeout_s` from `start_s` on, by this process's monotonic clock."""

    start_s: float
    timeout_s: float

    @classmethod
    def after(cls, timeout_s: float) -> "Deadline":
        """Return a deadline `timeout_s` from now."""
        return cls(time.monotonic(), timeout_s)

    @property
    def due_s(self) -> float:
        """The deadline's time by the monotonic clock."""
        return self.start_s + self.timeout_s

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, 0 after it."""
        return max(self.due_s - time.monotonic(), 0.0)

    def within(self, timeout_s: float | None) -> "Deadline":
        """Return this deadline, or an earlier one `timeout_s` after the same start."""
        return self if timeout_s is None else self._replace(timeout_s=min(timeout_s, self.timeout_s))

    def share(self, share: float) -> "Deadline":
        """Return a deadline at the end of this share of the remaining time."""
        return Deadline.after(share * self.left_s)
