"""Batches searches that arrive while others run: one call of each searcher answers several searches.

    direct   while fewer than `concurrent_calls` calls run, a search goes to the fleet at once, in its caller's thread
    queue    otherwise it waits until a call ends, at most twice the median duration of a call and a quarter of its time
    batch    queued searches with equal k, filter and hybrid weight share one call of at most `max_queries` queries
    split    each search gets its own rows when all shards answered, or at its deadline those that arrived until then

A score depends on its two vectors alone (`core.searching.exact`), so an exact answer is the same to the last bit in any
batch. Second rounds ask about queries of one search and bypass the queue.

Shapes: Q queries, D dimension.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from mvr_ray import logs
from mvr_ray.deadline import Deadline
from mvr_ray.distributed.searching.messages import ScanRequest, ShardFailure, ShardResult, ShardResults, ViewResults
from mvr_ray.distributed.searching.searcher import Fleet, OnPartial
from mvr_ray.store.manifest import Manifest
from mvr_ray.types import HybridQueries, ShardHits

CALLS = 2
"""Searchers work on one call while the router merges the answer of the other and prepares the next one."""
MAX_QUERIES = 64
THREADS = 64
"""Limit of concurrent calls: searches that wait too long start further ones."""


@dataclass(eq=False)
class _Search:
    """One search. `rows` are its queries in its batch, once it has one."""

    request: ScanRequest
    deadline: Deadline
    rows: slice = field(default_factory=lambda: slice(0))
    request_id: str = field(default_factory=logs.request_id)
    batch: "Future[_SearchBatch]" = field(default_factory=Future)

    @property
    def batch_key(self) -> tuple[Any, ...]:
        """Searches with equal keys may share a batch."""
        one = self.request
        return one.k, one.shards, one.version, one.filter, one.hybrid and one.hybrid.weight

    @property
    def size(self) -> int:
        return len(self.request.queries_QD)


class _SearchBatch:
    """Searches that share one call, the partial results of that call, and its future."""

    def __init__(self, searches: Sequence[_Search]) -> None:
        self.searches = searches
        self.partial = ShardResults([], [])
        self.future: Future[ShardResults] = Future()
        for search, end in zip(searches, accumulate(search.size for search in searches)):
            search.rows = slice(end - search.size, end)

    def joined_request(self) -> ScanRequest:
        """Make one request with the queries of all searches."""
        requests = [search.request for search in self.searches]
        first = requests[0]
        texts = [text for request in requests if request.hybrid for text in request.hybrid.texts]
        hybrid = first.hybrid and HybridQueries(tuple(texts), first.hybrid.weight)
        return first._replace(queries_QD=np.concatenate([one.queries_QD for one in requests]), hybrid=hybrid)

    def add_partial(self, part: ShardResults) -> None:
        self.partial.results.extend(part.results)
        self.partial.failures.extend(part.failures)

    def answer(self, search: _Search) -> ShardResults:
        """Return the results of one search: all, or at its deadline those so far; the remaining shards then count as
        late."""
        try:
            results, failures = self.future.result(search.deadline.left_s)
        except TimeoutError:
            results, failures = list(self.partial.results), list(self.partial.failures)
            settled_shards = {one.shard for one in results} | {shard for one in failures for shard in one.shards}
            late = tuple(shard for shard in search.request.shards if shard not in settled_shards)
            failures += [ShardFailure(late, "late")] if late else []
        return ShardResults([_select_queries(one, search.rows) for one in results], failures)


class DynamicBatcher:
    """A fleet that batches the searches of concurrent threads."""

    def __init__(self, fleet: Fleet, max_queries: int = MAX_QUERIES, concurrent_calls: int = CALLS) -> None:
        self.fleet = fleet
        self.max_queries = max_queries
        self.concurrent_calls = concurrent_calls
        self._running = 0
        self._queue: deque[_Search] = deque()
        self._seconds: deque[float] = deque(maxlen=32)
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="mvr-batch")

    def ready(self, manifest: Manifest) -> None:
        self.fleet.ready(manifest)

    def views(self, ids: Mapping[int, Sequence[str]], version: int, deadline: Deadline) -> ViewResults:
        return self.fleet.views(ids, version, deadline)

    def fan_out(
        self, request: ScanRequest, deadline: Deadline, *, admit: bool = False, on_partial: OnPartial | None = None
    ) -> ShardResults:
        """Search with the fleet, possibly in a batch with other searches; raises what the fleet raises."""
        search = _Search(request, deadline)
        if on_partial is not None or admit or search.size >= self.max_queries:
            return self.fleet.fan_out(request, deadline, admit=admit, on_partial=on_partial)
        began_s = time.monotonic()
        with self._lock:
            is_direct = self._running < self.concurrent_calls and not self._queue
            if is_direct:
                self._running += 1
            else:
                self._queue.append(search)
        if is_direct:
            try:
                return self.fleet.fan_out(request, deadline)
            finally:
                self._finish_call(began_s)
        try:
            batch = search.batch.result(self._max_wait_s(deadline.left_s))
        except TimeoutError:
            self._send_next(search)
            batch = search.batch.result()
        return batch.answer(search)

    def _max_wait_s(self, left_s: float) -> float:
        with self._lock:
            median_s = float(np.median(self._seconds)) if self._seconds else left_s
        return min(left_s / 4, 2 * median_s)

    def _send_next(self, overdue: _Search | None = None) -> None:
        """Send the batch of the first queued search if a call is free; send that of an `overdue` search in any case."""
        with self._lock:
            is_allowed = overdue in self._queue if overdue else self._queue and self._running < self.concurrent_calls
            if not is_allowed:
                return
            first = overdue or self._queue[0]
            searches, size = [first], first.size
            for search in self._queue:
                is_alike = search is not first and search.batch_key == first.batch_key
                if is_alike and size + search.size <= self.max_queries:
                    searches.append(search)
                    size += search.size
            for search in searches:
                self._queue.remove(search)
            self._running += 1
        batch, began_s = _SearchBatch(searches), time.monotonic()
        with logs.request_context(first.request_id):
            run = copy_context().run  # log lines of a batch carry the request of its first search
        fan_out = partial(self.fleet.fan_out, on_partial=batch.add_partial)
        latest = max((search.deadline for search in searches), key=lambda deadline: deadline.due_s)
        try:
            batch.future = self._threads.submit(run, fan_out, batch.joined_request(), latest)
        except Exception as error:  # noqa: BLE001 - every waiting search must end, such as when the process exits
            batch.future.set_exception(error)
        for search in searches:
            search.batch.set_result(batch)
        batch.future.add_done_callback(lambda _: self._finish_call(began_s))

    def _finish_call(self, began_s: float) -> None:
        with self._lock:
            self._running -= 1
            self._seconds.append(time.monotonic() - began_s)
        self._send_next()


def _select_queries(result: ShardResult, rows: slice) -> ShardResult:
    """Return a shard's result for one search; its `ids_R` may include rows of other searches."""
    hits = result.hits
    own = hits.rows_QK[rows], hits.scores_QK[rows], hits.views_QK[rows], hits.frontier_Q[rows]
    return result._replace(hits=ShardHits(*own), rescored_Q=result.rescored_Q[rows])
