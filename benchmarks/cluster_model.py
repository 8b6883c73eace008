"""Simulate a cluster of searchers as a queueing model, event by event. Plain Python: no Ray, no measurements.

    query     arrives -> router sends (serial) -> one call to the least loaded replica of every group -> each answers
              -> router merges (serial) -> done when the last group has answered
    searcher  one call at a time, first come first served; with `batch` it takes that many waiting calls at once
    work      fixed_s + max(read_s, n query_s) for n queries, times a lognormal factor of mean 1
    host      n running jobs on C cores have total speed `speeds[min(n, C) - 1]`, shared equally
    hedge     as `mvr_ray.distributed.searching.hedging`: after the group's own 95th percentile, at most 5 % more calls
    refuse    a query for which all replicas of some group have `queue` calls waiting

Times are seconds. Same seed, same result.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mvr_ray.distributed.searching.hedging import HedgeBudget, Latencies

ROUTER, BESIDE = "router", "beside"
LOOK_AGAIN = 16
"""Answers of a group after which its percentile is formed anew."""


class Service(NamedTuple):
    """Cost of one call for a searcher."""

    fixed_s: float
    read_s: float
    query_s: float = 0.0
    spread: float = 0.0
    """Standard deviation of the logarithm of the factor by which calls differ."""

    def work_s(self, queries: int) -> float:
        return self.fixed_s + max(self.read_s, queries * self.query_s)


class Scan(NamedTuple):
    """Seconds of one exhaustive search of `vectors`: of one query and of `batch` together, on `threads`, and the
    variation between calls of the same size."""

    vectors: int
    one_s: float
    many_s: float
    batch: int
    spread: float
    threads: int = 1

    def service(self, vectors: float, speed: float = 1.0) -> Service:
        """Return the same scan for another number of vectors, on a machine `speed` times as fast."""
        share = vectors / self.vectors / speed
        return Service(0.0, self.one_s * share, self.many_s / self.batch * share, self.spread)


class Routing(NamedTuple):
    """Cost of one query for the router, and the time that a call spends between processes without work. `beside_s`:
    work of its process per query that no answer waits for, but that slows other processes of its host."""

    query_s: float = 0.0
    group_s: float = 0.0
    wire_s: float = 0.0
    beside_s: float = 0.0


class Fault(NamedTuple):
    """A share of all calls that takes `factor` times as long: a pause, a slow disk, a noisy neighbour."""

    share: float = 0.0
    factor: float = 1.0


@dataclass(frozen=True)
class Cluster:
    """`groups` of `replicas` searchers. `shared`: all of them and the router on one host, else a host each."""

    groups: int
    replicas: int = 1
    speeds: tuple[float, ...] = (1.0,)
    """Total speed of a host with 1, 2, .. jobs at work, in cores."""
    is_shared: bool = False
    queue: int = 64
    batch: int = 1
    hedging: bool = True
    fault: Fault = field(default_factory=Fault)


class Outcome(NamedTuple):
    """Latencies, nan for a refused query. `busy_share` is of the searchers' time."""

    latency_Q: NDArray[np.float64]
    calls: int
    hedges: int
    busy_share: float

    @property
    def refusals(self) -> int:
        return int(np.isnan(self.latency_Q).sum())

    def quantile_s(self, share: float) -> float:
        latencies = self.latency_Q[~np.isnan(self.latency_Q)]
        return float(np.quantile(latencies, share)) if len(latencies) else float("nan")


class _Host:
    """Running jobs on one machine: all advance at the same rate."""

    def __init__(self, speeds: Sequence[float]) -> None:
        self.speeds = speeds
        self.remaining_s: dict[int, float] = {}
        self.at_s = 0.0
        self.version = 0

    def advance(self, now_s: float) -> None:
        if self.remaining_s:
            progress_s = (now_s - self.at_s) * self._rate()
            for job in self.remaining_s:
                self.remaining_s[job] -= progress_s
        self.at_s = now_s

    def next_end_s(self) -> float | None:
        return self.at_s + max(min(self.remaining_s.values()), 0.0) / self._rate() if self.remaining_s else None

    def _rate(self) -> float:
        return self.speeds[min(len(self.remaining_s), len(self.speeds)) - 1] / len(self.remaining_s)


class _Call:
    """One call to one replica."""

    __slots__ = ("group", "is_answered", "query", "replica", "sent_s")

    def __init__(self, query: int, group: int, replica: int, sent_s: float) -> None:
        self.query, self.group, self.replica, self.sent_s = query, group, replica, sent_s
        self.is_answered = False


class _Searcher:
    def __init__(self, host: int) -> None:
        self.host = host
        self.line: deque[_Call] = deque()
        self.running: list[_Call] = []
        self.waiting = 0
        self.busy_s = 0.0
        self.began_s = 0.0


class Simulation:
    """One run over given arrivals."""

    def __init__(self, cluster: Cluster, service: Service, routing: Routing, seed: int = 0) -> None:
        self.cluster, self.service, self.routing = cluster, service, routing
        self.rng = np.random.default_rng(seed)
        count = cluster.groups * cluster.replicas
        self.hosts = [_Host(cluster.speeds) for _ in range(1 if cluster.is_shared else count + 1)]
        self.searchers = [
            [_Searcher(0 if cluster.is_shared else group * cluster.replicas + one) for one in range(cluster.replicas)]
            for group in range(cluster.groups)
        ]
        self.budget = HedgeBudget()
        self.latencies = [Latencies() for _ in range(cluster.groups)]
        self.hedge_s: list[float | None] = [None] * cluster.groups
        self.answers_of = [0] * cluster.groups
        self.router_line: deque[tuple[str, int]] = deque()
        self.router_job: tuple[str, int] | None = None
        self.events: list[tuple[float, int, str, tuple]] = []
        self.numbers = 0
        self.jobs: dict[int, _Searcher | str] = {}
        self.calls = 0

    def run(self, arrival_Q: NDArray[np.float64]) -> Outcome:
        """`arrival_Q` ascends."""
        self.arrival_Q = arrival_Q
        self.latency_Q = np.full(len(arrival_Q), np.nan)
        self.open: dict[int, dict[int, list[_Call]]] = {}
        for query, at_s in enumerate(arrival_Q.tolist()):
            self._push(at_s, "arrive", (query,))
        now_s = 0.0
        while self.events:
            now_s, _, what, args = heapq.heappop(self.events)
            getattr(self, f"_{what}")(now_s, *args)
        every = [searcher for group in self.searchers for searcher in group]
        busy_s = sum(searcher.busy_s for searcher in every)
        return Outcome(self.latency_Q, self.calls, self.budget.hedges, busy_s / max(now_s * len(every), 1e-12))

    def _push(self, at_s: float, what: str, args: tuple) -> None:
        self.numbers += 1
        heapq.heappush(self.events, (at_s, self.numbers, what, args))

    def _start(self, now_s: float, host: int, job_s: float, whose: "_Searcher | str") -> None:
        one = self.hosts[host]
        one.advance(now_s)
        self.numbers += 1
        one.remaining_s[self.numbers] = job_s
        self.jobs[self.numbers] = whose
        self._plan(host)

    def _plan(self, host: int) -> None:
        one = self.hosts[host]
        one.version += 1
        end_s = one.next_end_s()
        if end_s is not None:
            self._push(end_s, "job_end", (host, one.version))

    def _job_end(self, now_s: float, host: int, version: int) -> None:
        one = self.hosts[host]
        if version != one.version:
            return
        one.advance(now_s)
        job = min(one.remaining_s, key=lambda number: (one.remaining_s[number], number))
        del one.remaining_s[job]
        self._plan(host)
        whose = self.jobs.pop(job)
        if isinstance(whose, _Searcher):
            self._search_ended(now_s, whose)
        elif whose == ROUTER:
            self._router_ended(now_s)

    def _arrive(self, now_s: float, query: int) -> None:
        for group in self.searchers:
            if min(searcher.waiting for searcher in group) >= self.cluster.queue:
                return
        self.open[query] = {}
        for group in range(self.cluster.groups):
            self.budget.call()
            self._book(query, group, now_s)
        self._route(now_s, "send", query)

    def _book(self, query: int, group: int, now_s: float) -> _Call | None:
        calls = self.open[query].setdefault(group, [])
        replicas = {call.replica for call in calls}
        others = [one for one in range(self.cluster.replicas) if one not in replicas]
        if not others:
            return None
        turn = self.calls  # equal loads take turns, as the router's do
        least = min(
            others,
            key=lambda one: (self.searchers[group][one].waiting, (one - turn // self.cluster.groups) % len(others)),
        )
        call = _Call(query, group, least, now_s)
        calls.append(call)
        self.searchers[group][least].waiting += 1
        self.calls += 1
        return call

    def _route(self, now_s: float, what: str, query: int) -> None:
        self.router_line.append((what, query))
        if self.router_job is None:
            self._router_next(now_s)

    def _router_next(self, now_s: float) -> None:
        self.router_job = self.router_line.popleft() if self.router_line else None
        if self.router_job is None:
            return
        half_s = (self.routing.query_s + self.routing.group_s * self.cluster.groups) / 2
        if half_s:
            self._start(now_s, len(self.hosts) - 1, half_s, ROUTER)
        else:
            self._router_ended(now_s)

    def _router_ended(self, now_s: float) -> None:
        assert self.router_job is not None
        what, query = self.router_job
        if what == "send":
            for group, [call] in self.open[query].items():
                self._push(now_s + self.routing.wire_s / 2, "deliver", (call,))
                after_s = self.hedge_s[group]
                if self.cluster.hedging and self.cluster.replicas > 1 and after_s is not None:
                    self._push(now_s + after_s, "hedge", (query, group))
        else:
            self.latency_Q[query] = now_s - self.arrival_Q[query]
            del self.open[query]
            if self.routing.beside_s:
                self._start(now_s, len(self.hosts) - 1, self.routing.beside_s, BESIDE)
        self.router_job = None
        self._router_next(now_s)

    def _hedge(self, now_s: float, query: int, group: int) -> None:
        calls = self.open.get(query, {}).get(group, [])
        if not calls or calls[0].is_answered or not self.budget.take():
            return
        call = self._book(query, group, now_s)
        if call is not None:
            self._push(now_s + self.routing.wire_s / 2, "deliver", (call,))

    def _deliver(self, now_s: float, call: _Call) -> None:
        searcher = self.searchers[call.group][call.replica]
        searcher.line.append(call)
        if not searcher.running:
            self._next_call(now_s, searcher)

    def _next_call(self, now_s: float, searcher: _Searcher) -> None:
        while searcher.line and len(searcher.running) < self.cluster.batch:
            call = searcher.line.popleft()
            if call.is_answered:
                searcher.waiting -= 1
            else:
                searcher.running.append(call)
        if not searcher.running:
            return
        searcher.began_s = now_s
        spread, fault = self.service.spread, self.cluster.fault
        factor = float(np.exp(spread * self.rng.standard_normal() - spread**2 / 2)) if spread else 1.0
        if fault.share and self.rng.random() < fault.share:
            factor *= fault.factor
        self._start(now_s, searcher.host, self.service.work_s(len(searcher.running)) * factor, searcher)

    def _search_ended(self, now_s: float, searcher: _Searcher) -> None:
        calls, searcher.running = searcher.running, []
        searcher.busy_s += now_s - searcher.began_s
        searcher.waiting -= len(calls)
        for call in calls:
            self._push(now_s + self.routing.wire_s / 2, "reply", (call,))
        self._next_call(now_s, searcher)

    def _reply(self, now_s: float, call: _Call) -> None:
        group = call.group
        self.latencies[group].add(now_s - call.sent_s)
        self.answers_of[group] += 1
        if self.cluster.hedging and self.cluster.replicas > 1 and self.answers_of[group] % LOOK_AGAIN == 0:
            self.hedge_s[group] = self.latencies[group].hedge_after_s()
        if call.is_answered:
            return
        for other in self.open[call.query][group]:
            other.is_answered = True
        if all(calls[0].is_answered for calls in self.open[call.query].values()):
            self._route(now_s, "merge", call.query)


def simulate(
    cluster: Cluster, service: Service, arrival_Q: NDArray[np.float64], routing: Routing | None = None, seed: int = 0
) -> Outcome:
    """Simulate queries that arrive at these times."""
    return Simulation(cluster, service, routing or Routing(), seed).run(arrival_Q)


def poisson(per_second: float, queries: int, seed: int = 0) -> NDArray[np.float64]:
    """Draw arrival times, `per_second` on average."""
    return np.cumsum(np.random.default_rng([seed, 1]).exponential(1 / per_second, queries))


def makespan_s(work_s: Sequence[float], workers: int) -> float:
    """Return when the last of `workers` is done; each takes the next job as soon as it is free."""
    free = [0.0] * min(workers, max(len(work_s), 1))
    for job_s in work_s:
        heapq.heapreplace(free, free[0] + job_s)
    return max(free)
