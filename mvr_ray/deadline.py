"""The time by which a request must be answered: made once when it arrives, and handed down to all that work on it."""

import time
from typing import NamedTuple


class Deadline(NamedTuple):
    """The time of one request: `timeout_s` from `start_s` on, by this process's monotonic clock."""

    start_s: float
    timeout_s: float

    @classmethod
    def after(cls, timeout_s: float) -> "Deadline":
        """So many seconds from now."""
        return cls(time.monotonic(), timeout_s)

    @property
    def due_s(self) -> float:
        """When it is over, by the monotonic clock."""
        return self.start_s + self.timeout_s

    @property
    def left_s(self) -> float:
        """Seconds until it is over, 0 where it is."""
        return max(self.due_s - time.monotonic(), 0.0)

    def within(self, timeout_s: float | None) -> "Deadline":
        """This deadline, or an earlier one `timeout_s` after the same start."""
        return self if timeout_s is None else self._replace(timeout_s=min(timeout_s, self.timeout_s))

    def share(self, share: float) -> "Deadline":
        """A deadline at the end of this share of the time that is left."""
        return Deadline.after(share * self.left_s)
