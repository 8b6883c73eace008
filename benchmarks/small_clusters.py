"""Run clusters of 1, 2 and 4 searchers on this machine, to check the model that predicts larger ones.

The model's inputs are measured on one searcher and in this process: seconds of a search and of half its shards, the
speed of two busy cores, the router's own CPU time per query and group, and the time between processes. It must predict
the latency with more searchers, alone and under load. Both get the same arrivals.
"""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import made_up
import numpy as np
from cluster_model import Cluster, Routing, Scan, Service, poisson, simulate
from made_up import BLOCK, V, block, queries
from measure import in_a_row
from numpy.typing import NDArray

from mvr_ray.config import ResourcesConfig, RunConfig
from mvr_ray.core.searching.codes import encode
from mvr_ray.deadline import Deadline
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.hot_swap import HotSwapRouter, open_hot_swap_router
from mvr_ray.distributed.searching.messages import ScanRequest, encode_scan
from mvr_ray.index.flat import FlatIndex
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest
from mvr_ray.types import FloatArray

K, SHARDS = 100, 8
SEARCHERS = (1, 2, 4)
LOAD = 0.5
"""Of what the cores could bear."""
IDLE_CALLS = 30
PAUSE_S = 0.01
"""Between calls of an idle cluster, as between queries that come now and then: a core that slept takes its time."""


class Sizes(NamedTuple):
    """The sizes of the data and of the measurement."""

    passages: int = 10_000
    load_s: float = 3.0
    idle_calls: int = IDLE_CALLS
    rounds: int = 3


class Calibration(NamedTuple):
    """Inputs of the model. `scan` grows with the shards; `fixed_s`: of every call; `own_s`: of every call that
    searches."""

    scan: Scan
    speeds: tuple[float, ...]
    routing: Routing
    fixed_s: float
    own_s: float


class Check(NamedTuple):
    """Measured latencies of queries, and their prediction from measurements of the same round."""

    what: str
    is_calibrated: bool
    rounds: list[tuple[NDArray[np.float64], NDArray[np.float64]]]

    @property
    def measured_Q(self) -> NDArray[np.float64]:
        return np.concatenate([latency_Q for latency_Q, _ in self.rounds])

    def prediction(self, share: float) -> float:
        return statistics.median(float(np.quantile(prediction_Q, share)) for _, prediction_Q in self.rounds)

    def ratio(self, share: float) -> float:
        """Return predicted over measured: the median of the rounds, as this machine's speed changes by the minute."""
        return statistics.median(
            float(np.quantile(prediction_Q, share) / np.quantile(latency_Q, share))
            for latency_Q, prediction_Q in self.rounds
        )


def make_run(folder: Path, searchers: int = 1) -> RunConfig:
    """Return the run of an index `simulated` under `folder`."""
    return RunConfig.model_validate(
        {
            "store": {"path": str(folder)},
            "index": {"name": "simulated"},
            "resources": {"searchers": searchers, "cpus_per_searcher": 0.5, "torch_threads": 1},
        }
    )


def publish(folder: Path, passages: int) -> Manifest:
    """Publish that index, of synthetic views in SHARDS shards."""
    return made_up.publish(Store(str(folder)), make_run(folder), passages, SHARDS)


def scan_rates(passages: int, times: int) -> dict[str, Scan]:
    """Measure one thread over one shard's views, as stored and by their codes."""
    ids = [f"{number:09d}" for number in range(passages)]
    blocks = [block(ids[low : low + BLOCK], low // BLOCK) for low in range(0, passages, BLOCK)]
    codes = [encode(one.vectors_ND) for one in blocks]
    one_QD, many_QD = queries(1), queries(32)
    scans = {}
    for name, index in (
        ("fp16", FlatIndex(blocks, threads=1)),
        ("int8", FlatIndex(blocks, codes=codes, threads=1)),
    ):
        one = in_a_row(lambda index=index: index.search(one_QD, K), times, warm=1)
        many = in_a_row(lambda index=index: index.search(many_QD, K), max(3, times // 8), warm=1)
        spread = float(np.std(np.log(one)))
        scans[name] = Scan(passages * V, statistics.median(one), statistics.median(many), 32, spread)
    return scans


@contextmanager
def open_live_router(folder: Path, searchers: int) -> Iterator[HotSwapRouter]:
    with open_hot_swap_router(make_run(folder, searchers), probe_s=3600, batching=False) as live:
        live.ready()
        for _ in range(3):
            search_live(live, queries(1))
        yield live


def search_live(live: HotSwapRouter, queries_QD: FloatArray) -> None:
    with live.pin() as router:
        router.search(queries_QD, K)


class Quiet(NamedTuple):
    """Measurements without load, in turn, for the same state of the machine. `work`: a searcher's own seconds on the
    first one's shards; `half_s`: on half of them; `call_s`: of an empty call; `longer`: how much longer the work takes
    when a second searcher works too (1 if there is none); `search`: seconds of whole searches; `cpu_s`: this process's
    CPU in each."""

    work: NDArray[np.float64]
    half_s: float
    call_s: float
    longer: float
    search: NDArray[np.float64]
    cpu_s: float

    @property
    def two_cores(self) -> float:
        """The speed of two busy cores, relative to one."""
        return float(np.clip(2 / self.longer, 1.0, 2.0))


def quiet(live: HotSwapRouter, times: int) -> Quiet:
    searchers: Any = live.searchers
    version = live.manifest.version
    shards = [own.shards for own, actors in zip(searchers.assignments[version], searchers.groups) for _ in actors]
    query_1D = queries(1)
    cpu: list[float] = []

    def ask(*shard_sets: tuple[int, ...]) -> None:
        """Of the first searchers, one each."""
        messages = {
            group: encode_scan(ScanRequest(query_1D, K, here, version)) for group, here in enumerate(shard_sets)
        }
        searchers.dispatcher.gather("scan", messages, Deadline.after(60.0))

    def search() -> None:
        began = time.process_time()
        search_live(live, query_1D)
        cpu.append(time.process_time() - began)

    cases: dict[str, Callable[[], Any]] = {
        "call": lambda: ask(()),
        "alone": lambda: ask(shards[0]),
        "half": lambda: ask(shards[0][::2]),
        "search": search,
    }
    if len(shards) > 1:
        cases["both"] = lambda: ask(*shards[:2])
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(3 + times):
        for name, run in cases.items():
            time.sleep(PAUSE_S)
            began = time.perf_counter()
            run()
            if number >= 3:
                samples[name].append(time.perf_counter() - began)
    call_s = statistics.median(samples["call"])
    work = np.maximum(np.array(samples["alone"]) - call_s, 1e-6)
    half_s = max(statistics.median(samples["half"]) - call_s, 1e-6)
    longer = (statistics.median(samples["both"]) - call_s) / float(np.median(work)) if len(shards) > 1 else 1.0
    return Quiet(work, half_s, call_s, max(longer, 1.0), np.array(samples["search"]), statistics.median(cpu))


def send_load(live: HotSwapRouter, arrival_Q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Measure searches that arrive at these times, regardless of running ones."""
    latency_Q = np.zeros(len(arrival_Q))
    query_1D = queries(1)

    def ask(number: int, due_s: float) -> None:
        search_live(live, query_1D)
        latency_Q[number] = time.perf_counter() - due_s

    with ThreadPoolExecutor(32) as threads:
        began = time.perf_counter() + 0.05
        for number, at_s in enumerate(arrival_Q.tolist()):
            time.sleep(max(0.0, began + at_s - time.perf_counter()))
            threads.submit(ask, number, began + at_s)
    return latency_Q


class Observation(NamedTuple):
    """The measurements of one cluster."""

    own: Quiet
    arrival_Q: NDArray[np.float64]
    loaded_Q: NDArray[np.float64]


def observe(live: HotSwapRouter, searchers: int, sizes: Sizes, seed: int) -> Observation:
    own = quiet(live, sizes.idle_calls)
    at_once = min(searchers, 2 / own.longer) if searchers > 1 else 1.0
    rate = LOAD * at_once / (searchers * float(np.median(own.work)) + own.cpu_s)
    arrival_Q = poisson(rate, max(20, round(rate * sizes.load_s)), seed=seed)
    return Observation(own, arrival_Q, send_load(live, arrival_Q))


def calibrate(vectors: int, one: Observation, two: Observation) -> Calibration:
    """Derive the inputs from one searcher; from two only the cores' speed and the router's work per group."""
    work_s = float(np.median(one.own.work))
    own_s = float(np.clip(2 * one.own.half_s - work_s, 0, work_s))
    middle = np.quantile(np.log(one.own.work), [0.25, 0.75])
    scan = Scan(vectors, work_s - own_s, 0.0, 32, float(middle[1] - middle[0]) / 1.35)
    group_s = max(0.0, two.own.cpu_s - one.own.cpu_s)
    fixed_s = max(0.0, one.own.call_s - group_s)
    rest_s = max(0.0, float(np.median(one.own.search)) - work_s - group_s - fixed_s)
    query_s = min(rest_s, max(0.0, one.own.cpu_s - group_s))  # more CPU than this is spent beside the searcher's work
    wire_s = rest_s - query_s
    beside_s = max(0.0, one.own.cpu_s - query_s - group_s)
    speeds = (1.0, two.own.two_cores)
    return Calibration(scan, speeds, Routing(query_s, group_s, wire_s, beside_s), fixed_s, own_s)


def predict_latencies(
    calibration: Calibration, searchers: int, one: Observation
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Predict the latencies of such a cluster alone, and under the arrivals that it got."""
    speeds = (1.0, one.own.two_cores) if searchers > 1 else calibration.speeds
    cluster = Cluster(searchers, speeds=speeds, is_shared=True)
    service = Service(
        calibration.fixed_s + calibration.own_s, calibration.scan.one_s / searchers, 0.0, calibration.scan.spread
    )
    alone_Q = simulate(cluster, service, np.arange(200) * 100.0, calibration.routing).latency_Q
    return alone_Q, simulate(cluster, service, one.arrival_Q, calibration.routing).latency_Q


def measure_clusters(folder: Path, sizes: Sizes, say: Callable[[str], None]) -> tuple[Calibration, list[Check]]:
    """Return the calibration of the middle round, and every check. Uses the current Ray session, or starts one."""
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's own is 15: whatever else runs here would go first
    manifest = publish(folder, sizes.passages)
    vectors = sum(entry.num_vectors for entry in manifest.shards)
    alone: dict[int, Check] = {}
    busy: dict[int, Check] = {}
    for searchers in SEARCHERS:
        name = f"{searchers} searcher{'s' * (searchers > 1)}"
        alone[searchers] = Check(f"{name}, idle", searchers == 1, [])
        busy[searchers] = Check(f"{name}, {LOAD:.0%} of what the cores bear", False, [])
    calibrations, rates = [], []
    with session.connect(ResourcesConfig(local_cpus=8)), ExitStack() as stack:
        clusters = {searchers: stack.enter_context(open_live_router(folder, searchers)) for searchers in SEARCHERS}
        for number in range(sizes.rounds):
            observations = {
                searchers: observe(live, searchers, sizes, number * len(SEARCHERS) + searchers)
                for searchers, live in clusters.items()
            }
            calibration = calibrate(vectors, observations[1], observations[2])
            calibrations.append(calibration)
            say(f"calibrated: {calibration}")
            for searchers, one in observations.items():
                alone_Q, busy_Q = predict_latencies(calibration, searchers, one)
                alone[searchers].rounds.append((one.own.search, alone_Q))
                busy[searchers].rounds.append((one.loaded_Q, busy_Q))
                rates.append(len(one.arrival_Q) / one.arrival_Q[-1])
    checks = [check for searchers in SEARCHERS for check in (alone[searchers], busy[searchers])]
    for check in checks:
        say(f"{check.what}: predicted / measured p50 {check.ratio(0.5):.2f}, p90 {check.ratio(0.9):.2f}")
    say(f"queries/s under load: {min(rates):.1f} to {max(rates):.1f}")
    return sorted(calibrations, key=lambda one: one.scan.one_s)[len(calibrations) // 2], checks
