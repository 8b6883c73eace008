"""Compare the router with an in-process call to the same shards, and measure batched searches under load.

    python benchmarks/router.py

As many synthetic views as SQuAD's, 384 dimensions, fp16, exact search, k = 100, every answer merged and certified. The
searchers are Ray actors of one thread; the in-process router calls the same searcher class over the same files, on as
many threads as there are searchers. Both take turns for the ratio; the time added to "the slowest shard", by the
searchers' own clocks, is of consecutive searches on an otherwise idle machine.
"""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import made_up
import numpy as np
import ray
from measure import ROUNDS, Bar, Part, in_a_row, interleave, write

from mvr_ray.config import ResourcesConfig, RunConfig
from mvr_ray.deadline import Deadline
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.router import Router
from mvr_ray.distributed.searching.batching import DynamicBatcher
from mvr_ray.distributed.searching.fleet import RemoteSearchers
from mvr_ray.distributed.searching.messages import ScanRequest, ShardResults
from mvr_ray.distributed.searching.node_placement import SearcherActor
from mvr_ray.distributed.searching.searcher import LocalSearchers, SearcherTask, ShardAssignment
from mvr_ray.distributed.searching.transport import Connection
from mvr_ray.store import manifest
from mvr_ray.store.files import Store
from mvr_ray.types import FloatArray

PASSAGES, K = 20_958, 100
LAYOUTS = ((1, 1), (2, 2), (4, 2), (8, 2))
"""Shards, and the searchers that hold them."""
BATCHES = {1: 40, 32: 41, 256: 9}
"""Queries at once, and how many rounds of them."""
RUN = RunConfig.model_validate({"index": {"name": "made"}})
CLIENTS, ROUND_S, DEADLINE_S = 32, 4.0, 2.0
IDLE = "over a Flight connection to each searcher; what stays is waking two processes and merging."
FLOOR = (
    "with one searcher nothing is shared out, and the whole cost of a call shows: hits are encoded, sent, merged. With "
    "two searchers the router is faster than the process."
)


class TimedSearcher(SearcherActor):
    """A searcher that records the time of each search."""

    def __init__(self, task: SearcherTask) -> None:
        super().__init__(task)
        self.seconds: list[float] = []

    def scan(self, request: ScanRequest, call: str = "") -> ShardResults:
        began = time.perf_counter()
        answers = super().scan(request, call)
        self.seconds.append(time.perf_counter() - began)
        return answers

    def take_seconds(self) -> list[float]:
        """Return the recorded times, and clear them."""
        seconds, self.seconds = self.seconds, []
        return seconds


class Both(NamedTuple):
    """One version, behind the router and in this process."""

    router: Router
    local: Router
    actors: list[Any]


@contextmanager
def searchers(folder: str) -> Iterator[RemoteSearchers]:
    """Two searchers of one thread each, for all versions; the first one's index is the smallest."""
    store = Store(folder)
    version = made_up.publish(store, RUN, 8, 1)
    task = SearcherTask(store.address, version, 1)
    actor_class: Any = ray.remote(concurrency_groups={"health": 1, "load": 1})(TimedSearcher)
    remote = RemoteSearchers([[actor_class.options(num_cpus=1).remote(task)] for _ in range(2)])
    try:
        yield remote
    finally:
        remote.stop()


def open_both(folder: str, remote: RemoteSearchers, shards: int, held_by: int) -> Both:
    """Open a version of `shards` shards on the first `held_by` searchers, and in this process on as many threads."""
    store = Store(folder)
    version = made_up.publish(store, RUN, PASSAGES, shards, parent=manifest.latest_version(store, RUN.index.name))
    every = tuple(range(shards))
    parts = [every[at::held_by] if at < held_by else () for at in range(len(remote.groups))]
    remote.assignments[version.version] = [ShardAssignment(version, part) for part in parts]
    local = LocalSearchers(SearcherTask(store.address, version, held_by))
    remote.ready(version)
    local.ready(version)
    return Both(Router(store, version, remote), Router(store, version, local), remote.actors[:held_by])


def by_ray(router: Router, queries_QD: FloatArray) -> None:
    """Search by Ray's calls alone."""
    with patch.object(Connection, "_usable_client", lambda _: None):
        router.search(queries_QD, K)


def compare(part: Part, both: Both, name: str) -> dict[int, dict[str, float]]:
    """Measure both ways at each batch size, in turn, and the router's overhead."""
    figures = {}
    for batch, rounds in BATCHES.items():
        queries_QD = made_up.queries(batch, seed=batch)
        mine = both.router.search(queries_QD, K)
        assert mine.hits == both.local.search(queries_QD, K).hits and mine.exact.certified
        [ray.get(actor.take_seconds.remote()) for actor in both.actors]
        cases = {
            f"{name}, router, batch {batch}": lambda q=queries_QD: both.router.search(q, K),
            f"{name}, in process, batch {batch}": lambda q=queries_QD: both.local.search(q, K),
            f"{name}, router by Ray's calls, batch {batch}": lambda q=queries_QD: by_ray(both.router, q),
        }
        samples = interleave(cases, rounds=rounds, warm=2)
        part.add(samples, batch)
        router_s, local, slower = samples.values()
        alone = in_a_row(lambda q=queries_QD: both.router.search(q, K), rounds)
        part.add({f"{name}, router alone, batch {batch}": alone}, batch)
        own = [seconds[-rounds:] for seconds in ray.get([actor.take_seconds.remote() for actor in both.actors])]
        for number, seconds in enumerate(own, 1):
            part.add({f"{name}, searcher {number}'s own, batch {batch}": seconds}, batch)
        slowest = [max(seconds) for seconds in zip(*own)]
        figures[batch] = {
            "over in process": statistics.median(a / b for a, b in zip(router_s, local)) - 1,
            "ms over the slowest searcher": 1e3 * (statistics.median(alone) - statistics.median(slowest)),
            "slowest searcher, ms": 1e3 * statistics.median(slowest),
            "ms that Ray's calls take more": 1e3 * statistics.median(a - b for a, b in zip(slower, router_s)),
        }
        print(name, batch, {key: round(value, 3) for key, value in figures[batch].items()}, flush=True)
    return figures


class ClientLoad(NamedTuple):
    latencies: list[float]
    misses: int
    seconds: float

    @property
    def rate(self) -> float:
        return len(self.latencies) / self.seconds

    def facts(self) -> dict[str, float]:
        at = np.quantile(self.latencies, [0.5, 0.99])
        return {"queries/s": self.rate, "p50 ms": 1e3 * at[0], "p99 ms": 1e3 * at[1], "missed": self.misses}


def under_load(search: Callable[[FloatArray], Any], clients: int, seconds: float) -> ClientLoad:
    """Run clients, each with one query at a time and a deadline for it, until the time is over."""
    queries_QD = made_up.queries(1024, seed=7)
    latencies: list[list[float]] = [[] for _ in range(clients)]
    misses = [0] * clients
    began = time.perf_counter()

    def ask(client: int) -> None:
        number = client
        while time.perf_counter() - began < seconds:
            start_s = time.perf_counter()
            answer = search(queries_QD[number % 1024 : number % 1024 + 1])
            took = time.perf_counter() - start_s
            misses[client] += answer.coverage_share < 1 or took > DEADLINE_S
            latencies[client].append(took)
            number += clients

    threads = [threading.Thread(target=ask, args=(client,)) for client in range(clients)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return ClientLoad([one for many in latencies for one in many], sum(misses), time.perf_counter() - began)


def loads(part: Part, both: Both) -> None:
    """Run the same clients with and without batching, in turn."""
    call_starts: list[float] = []

    def fan_out(*arguments: Any, **options: Any) -> ShardResults:
        call_starts.append(time.perf_counter())
        return both.router.fleet.fan_out(*arguments, **options)

    fleet: Any = SimpleNamespace(fan_out=fan_out)
    batching_router = Router(both.router.store, both.router.manifest, DynamicBatcher(fleet))
    cases = {"one by one": both.router, "coalesced": batching_router}
    runs: dict[str, list[ClientLoad]] = {name: [] for name in cases}
    for _ in range(ROUNDS):
        for name, router in cases.items():

            def search(query_1D: FloatArray, router: Router = router) -> Any:
                return router.search(query_1D, K, deadline=Deadline.after(DEADLINE_S), min_coverage=0.0)

            runs[name].append(under_load(search, CLIENTS, ROUND_S))
            print(name, runs[name][-1].facts(), flush=True)
    for name, many in runs.items():
        seconds = sum(one.seconds for one in many)
        total = ClientLoad([s for one in many for s in one.latencies], sum(m.misses for m in many), seconds)
        part.facts[f"{CLIENTS} clients, {name}, queries/s of each round"] = ", ".join(f"{one.rate:.1f}" for one in many)
        part.facts[f"{CLIENTS} clients of one query each, {name}"] = total.facts()
    size = sum(len(one.latencies) for one in runs["coalesced"]) / len(call_starts)
    part.facts["searches put together, mean"] = size
    gain = statistics.median(b.rate / a.rate for a, b in zip(*runs.values()))
    misses = sum(one.misses for one in runs["coalesced"])
    what = f"deadlines of {DEADLINE_S:g} s missed by coalesced searches of {CLIENTS} clients"
    part.bars.append(Bar(what, misses, 0, at_least=False, unit="missed"))
    part.bars.append(Bar(f"searches that one call answers with {CLIENTS} clients, mean", size, 2, unit="searches"))
    part.bars.append(Bar("queries/s coalesced over one by one", gain, 1))


def main() -> None:
    part = Part("router", "Router", "queries")
    part.facts["index"] = f"{PASSAGES:,} passages x {made_up.V} made-up views, {made_up.D} dimensions, fp16, k {K}"
    table: dict[str, dict[int, dict[str, float]]] = {}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mvr-router-"))
        stack.enter_context(session.connect(ResourcesConfig(local_cpus=4)))
        remote = stack.enter_context(searchers(folder))
        for shards, held_by in LAYOUTS:
            both = open_both(folder, remote, shards, held_by)
            name = f"{shards} shards on {held_by}"
            table[name] = compare(part, both, name)
            if shards == 4:
                loads(part, both)
            remote.drop(both.router.manifest.version)
    for name, figures in table.items():
        for what in ("over in process", "ms over the slowest searcher", "slowest searcher, ms"):
            part.facts[f"{name} searchers, {what}"] = {f"batch {b}": t[what] for b, t in figures.items()}
    worst = max(table, key=lambda name: table[name][32]["over in process"])
    part.bars.insert(
        0,
        Bar(
            f"time over in-process, batch 32, worst layout ({worst})",
            100 * table[worst][32]["over in process"],
            10,
            at_least=False,
            unit="%",
            note=FLOOR,
        ),
    )
    slow = max(table, key=lambda name: table[name][1]["ms over the slowest searcher"])
    part.bars.insert(
        1,
        Bar(
            f"p50 over the slowest shard's own, batch 1, worst layout ({slow})",
            table[slow][1]["ms over the slowest searcher"],
            3,
            at_least=False,
            unit="ms",
            note=IDLE,
        ),
    )
    write(part)


if __name__ == "__main__":
    main()
