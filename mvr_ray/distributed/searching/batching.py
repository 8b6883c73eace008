"""Batches searches that arrive while others run: one call of each searcher answers them all.

    alone     fewer than `at_once` calls run: a search goes at once, in its caller's thread, as if nothing stood here
    wait      else it stands in line until a call ends, but not for longer than twice the median call takes, nor for
              longer than a quarter of its own time
    together  those in line with the same k, filter and weight of words are asked as one batch of at most `most` queries
    apart     each has its own rows when all shards have answered; at its own deadline it has what came until then

What a score is depends on its two vectors alone (`core.searching.exact`), so an exact answer is the same to the last
bit, however many were asked together. Second rounds name queries of one search, and go as they are.

Shapes: Q queries, D dimension.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any

import numpy as np

from mvr_ray import logs
from mvr_ray.deadline import Deadline
from mvr_ray.distributed.searching.messages import ScanRequest, ShardFailure, ShardResult, ShardResults, ViewResults
from mvr_ray.distributed.searching.searcher import Fleet, OnPartial
from mvr_ray.types import HybridQueries, ShardHits

AT_ONCE = 2
"""One call is searched while the answer of the other is on its way and the next one is being put together."""
MOST = 64
THREADS = 64
"""Calls that may run at the same time, where searchers are so slow that searches in line run out of patience."""


class _Search:
    """One search in line. `rows` are its queries in the batch that it goes with."""

    def __init__(self, request: ScanRequest, deadline: Deadline) -> None:
        self.request, self.deadline = request, deadline
        self.rows = slice(0, 0)
        self.request_id = logs.request_id()
        self.batch: _SearchBatch | None = None
        self.sent = threading.Event()

    def goes_with(self, other: "_Search") -> bool:
        return self._kind() == other._kind()

    def _kind(self) -> tuple[Any, ...]:
        one = self.request
        return one.k, one.shards, one.version, one.filter, one.hybrid and one.hybrid.weight

    @property
    def size(self) -> int:
        return len(self.request.queries_QD)


class _SearchBatch:
    """Searches asked together, and what has come for them."""

    def __init__(self, searches: Sequence[_Search]) -> None:
        self.searches = searches
        self.heard: list[ShardResult | ShardFailure] = []
        self.future: Future[ShardResults] | None = None
        first = 0
        for search in searches:
            search.rows = slice(first, first + search.size)
            search.batch = self
            first = search.rows.stop

    def whole(self) -> ScanRequest:
        """All searches as one."""
        requests = [search.request for search in self.searches]
        first = requests[0]
        texts = [text for request in requests if request.hybrid for text in request.hybrid.texts]
        hybrid = first.hybrid and HybridQueries(tuple(texts), first.hybrid.weight)
        return first._replace(queries_QD=np.concatenate([one.queries_QD for one in requests]), hybrid=hybrid)

    @property
    def deadline(self) -> Deadline:
        """That of the search which may take longest."""
        return max((search.deadline for search in self.searches), key=lambda deadline: deadline.due_s)

    def on_partial(self, some: ShardResults) -> None:
        self.heard += [*some.results, *some.failures]

    def now(self, shards: Sequence[int]) -> ShardResults:
        """What has come; the other shards are late."""
        heard = list(self.heard)
        found = [one for one in heard if isinstance(one, ShardResult)]
        told = [one for one in heard if isinstance(one, ShardFailure)]
        known = {one.shard for one in found} | {shard for one in told for shard in one.shards}
        late = tuple(shard for shard in shards if shard not in known)
        return ShardResults(found, [*told, ShardFailure(late, "late")] if late else told)


class DynamicBatcher:
    """A fleet before which searches of many threads are put together."""

    def __init__(self, fleet: Fleet, most: int = MOST, at_once: int = AT_ONCE) -> None:
        self.fleet = fleet
        self.most = most
        self.at_once = at_once
        self.searches = 0
        self.calls = 0
        self._running = 0
        self._line: deque[_Search] = deque()
        self._seconds: deque[float] = deque(maxlen=32)
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="together")

    def ready(self) -> None:
        self.fleet.ready()

    def views(self, ids: Mapping[int, Sequence[str]], deadline: Deadline) -> ViewResults:
        return self.fleet.views(ids, deadline)

    def fan_out(
        self, request: ScanRequest, deadline: Deadline, *, again: bool = False, on_partial: OnPartial | None = None
    ) -> ShardResults:
        """As the fleet answers, which this search shares with others; raises what the fleet raises."""
        search = _Search(request, deadline)
        if on_partial is not None or again or search.size >= self.most:
            return self.fleet.fan_out(request, deadline, again=again, on_partial=on_partial)
        began_s = time.monotonic()
        with self._lock:
            self.searches += 1
            alone = self._running < self.at_once and not self._line
            if alone:
                self._running += 1
                self.calls += 1
            else:
                self._line.append(search)
        if alone:
            try:
                return self.fleet.fan_out(request, deadline)
            finally:
                self._finish_call(began_s)
        if not search.sent.wait(self._patience_s(deadline.left_s)):
            self._send_next(search)
            search.sent.wait()
        return self._answer(search)

    def _answer(self, search: _Search) -> ShardResults:
        batch = search.batch
        assert batch is not None and batch.future is not None, "a search was sent without a batch"
        try:
            answers = batch.future.result(search.deadline.left_s)
        except TimeoutError:
            answers = batch.now(search.request.shards)
        return ShardResults([_cut(one, search.rows) for one in answers.results], answers.failures)

    def _patience_s(self, left_s: float) -> float:
        with self._lock:
            usual_s = float(np.median(self._seconds)) if self._seconds else left_s
        return min(left_s / 4, 2 * usual_s)

    def _send_next(self, impatient: _Search | None = None) -> None:
        """Ask for the first in line and those that go with it; where one is impatient, for it and its like."""
        with self._lock:
            first = impatient or (self._line[0] if self._line else None)
            if first is None or first not in self._line or (impatient is None and self._running >= self.at_once):
                return
            together, size = [first], first.size
            for search in self._line:
                if search is not first and search.goes_with(first) and size + search.size <= self.most:
                    together.append(search)
                    size += search.size
            for search in together:
                self._line.remove(search)
            self._running += 1
            self.calls += 1
        batch, began_s = _SearchBatch(together), time.monotonic()
        with logs.request_context(first.request_id):
            run = copy_context().run  # log lines of a batch carry the request of its first search
        fan_out = partial(self.fleet.fan_out, on_partial=batch.on_partial)
        batch.future = self._threads.submit(run, fan_out, batch.whole(), batch.deadline)
        for search in together:
            search.sent.set()
        batch.future.add_done_callback(lambda _: self._finish_call(began_s))

    def _finish_call(self, began_s: float) -> None:
        with self._lock:
            self._running -= 1
            self._seconds.append(time.monotonic() - began_s)
        self._send_next()


def _cut(result: ShardResult, rows: slice) -> ShardResult:
    """One search's part of a shard's answer; `ids_R` may name rows of others too."""
    hits = result.hits
    own = hits.rows_QK[rows], hits.scores_QK[rows], hits.views_QK[rows], hits.frontier_Q[rows]
    return result._replace(hits=ShardHits(*own), rescored_Q=result.rescored_Q[rows])
