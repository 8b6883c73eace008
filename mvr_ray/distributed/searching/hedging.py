"""Decides from numbers alone when a second call for the same answer is worth its cost.

    wait     the 95th percentile of the group's own recent calls, at least FLOOR_S
    budget   of the last WINDOW calls, at most 5 % may have had a second one

(After Dean and Barroso, "The Tail at Scale", CACM 56(2), 2013, which defers the second request until the 95th
percentile and so pays about 5 % more load.)
"""

from collections import deque

import numpy as np

QUANTILE = 0.95
FLOOR_S = 0.01
SHARE = 0.05
WINDOW = 1000
ENOUGH = 20
"""Calls to have seen before their percentile says anything."""


class Latencies:
    """Seconds of a group's last calls."""

    def __init__(self, window: int = 256) -> None:
        self._seconds: deque[float] = deque(maxlen=window)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def hedge_after_s(self) -> float | None:
        """When to ask another replica; None as long as too little is known."""
        if len(self._seconds) < ENOUGH:
            return None
        return max(float(np.quantile(list(self._seconds), QUANTILE, method="higher")), FLOOR_S)

    def median_s(self) -> float:
        return float(np.median(list(self._seconds))) if self._seconds else 0.0


class HedgeBudget:
    """Second calls, counted against the last `window` first ones."""

    def __init__(self, share: float = SHARE, window: int = WINDOW) -> None:
        self.share = share
        self.window = window
        self.calls = 0
        self.hedges = 0
        self._taken: deque[int] = deque()

    def call(self) -> None:
        """A first call was made."""
        self.calls += 1
        while self._taken and self._taken[0] <= self.calls - self.window:
            self._taken.popleft()

    def take(self) -> bool:
        """Whether a second call may be made now; if so it is counted."""
        if len(self._taken) + 1 > self.share * min(self.calls, self.window):
            return False
        self._taken.append(self.calls)
        self.hedges += 1
        return True
