"""The time by which a request must be answered: made once when it arrives, and handed down to all that work on it."""

import time
from typing import NamedTuple


class Deadline(NamedTuple):
    """A point in time of this process (seconds of `time.monotonic`)."""

    due_s: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """So many seconds from now."""
        return cls(time.monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds until then, 0 where it has passed."""
        return max(self.due_s - time.monotonic(), 0.0)

    def earlier(self, seconds: float) -> "Deadline":
        """So many seconds before this one."""
        return Deadline(self.due_s - seconds)
