"""Estimates the recall of an approximate index while it serves: some queries are also answered exactly.

    every     one of so many queries is sampled; none while the previous sample is being measured, and only while the
              version that answered is the live one
    recall    of the exact best k, the share whose score the answer reached; scores are exact on both sides, so a
              passage tied with the k-th counts as well as the one ranked in its place

A thread computes the exact answer and bypasses the request queues; no request waits for it.

Shapes: Q queries, D dimension.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from mvr_ray.errors import MvrRayError, first_line
from mvr_ray.types import Answer

if TYPE_CHECKING:
    from mvr_ray.distributed.hot_swap import HotSwapRouter

log = logging.getLogger(__name__)

EVERY = 200
Query = str | Sequence[float]


class RecallMonitor:
    """Measures the recall of some queries. Safe to use from several threads."""

    def __init__(self, router: "HotSwapRouter", report: Callable[[float], None], every: int = EVERY) -> None:
        """The monitor's thread calls `report` with each recall."""
        self.router = router
        self.report = report
        self.every = every
        self._count = 0
        self._busy = self._is_closed = False
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mvr-recall")

    def note(self, queries: Sequence[Query], k: int, answer: Answer) -> None:
        """Count the queries of an answer, and measure one of every so many. An exact answer, or one of less than every
        passage, is not counted.
        """
        if answer.exact.certified or answer.coverage_share < 1:
            return
        with self._lock:
            before, self._count = self._count, self._count + len(queries)
            at = self.every - 1 - before % self.every
            if self._busy or self._is_closed or at >= len(queries):
                return
            self._busy = True
            scores = [hit.score for hit in answer.hits[at]]
            self._thread.submit(self._measure, queries[at], k, answer.version, scores)

    def close(self) -> None:
        """Sample no more queries. A running measurement completes."""
        with self._lock:
            self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _measure(self, query: Query, k: int, version: int, scores: Sequence[float]) -> None:
        try:
            with self.router.pin() as router:
                if router.manifest.version != version:
                    return
                query_1D = router.embed([query]) if isinstance(query, str) else np.array([query], np.float32)
                [truth] = self.router.exact(query_1D, k, router) or [[]]
            if truth:
                self.report(sum(score >= truth[-1].score for score in scores) / len(truth))
        except (MvrRayError, TimeoutError) as error:
            log.warning("recall not sampled: version=%d reason=%s", version, first_line(error))
        finally:
            self._busy = False
