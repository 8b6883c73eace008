"""Decides from latencies and a budget when to hedge a call with a second one.

    delay    the 95th percentile of the group's own recent calls, at least MIN_DELAY_S
    budget   of the last WINDOW calls, at most 5 % may have a second one

(After Dean and Barroso, "The Tail at Scale", CACM 56(2), 2013, which defers the second request until the 95th
percentile and so pays about 5 % more load.)
"""

from collections import deque

import numpy as np

QUANTILE = 0.95
MIN_DELAY_S = 0.01
SHARE = 0.05
WINDOW = 1000
MIN_CALLS = 20
"""Calls before their percentile is used."""


class Latencies:
    """Keeps the durations of a group's last calls."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=256)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def hedge_after_s(self) -> float | None:
        """Return the delay before a call to another replica; None after too few calls."""
        if len(self._seconds) < MIN_CALLS:
            return None
        return max(float(np.quantile(list(self._seconds), QUANTILE, method="higher")), MIN_DELAY_S)

    def median_s(self) -> float:
        return float(np.median(list(self._seconds))) if self._seconds else 0.0


class HedgeBudget:
    """Limits second calls to a share of the last `window` first ones."""

    def __init__(self, share: float = SHARE, window: int = WINDOW) -> None:
        self.share = share
        self.window = window
        self.calls = 0
        self.hedges = 0
        self._hedge_calls: deque[int] = deque()

    def call(self) -> None:
        """Count a first call."""
        self.calls += 1
        while self._hedge_calls and self._hedge_calls[0] <= self.calls - self.window:
            self._hedge_calls.popleft()

    def take(self) -> bool:
        """Count a second call if the budget allows it; return whether it does."""
        if len(self._hedge_calls) + 1 > self.share * min(self.calls, self.window):
            return False
        self._hedge_calls.append(self.calls)
        self.hedges += 1
        return True
