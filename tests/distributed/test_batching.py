"""Tests of batched searches: answers are those of single searches, each by its own deadline, from fewer calls."""

import threading
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import numpy as np
import pytest
import ray
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from live_search import live_search
from random_index import D, brute_force, publish_random_index, random_views

from mvr_ray.deadline import Deadline
from mvr_ray.distributed.hot_swap import open_hot_swap_router
from mvr_ray.distributed.router import Router, open_router
from mvr_ray.distributed.searching.batching import DynamicBatcher
from mvr_ray.distributed.searching.messages import ShardResults
from mvr_ray.distributed.searching.searcher import LocalSearchers, SearcherTask
from mvr_ray.errors import CoverageError, OverloadedError
from mvr_ray.store.files import Store

VIEWS = random_views(80, 3)
SHARDS, K = 3, 6
LONG_S = 300.0


class GatedFleet:
    """A fleet in this process that records its calls, holds them at a gate, and may raise an error."""

    def __init__(self, fleet, first_parts: int = 0) -> None:
        self.fleet = fleet
        self.gate = threading.Event()
        self.at_gate = threading.Semaphore(0)
        self.sizes: list[int] = []
        self.deadlines: list[Deadline] = []
        self.first_parts = first_parts
        self.error: Exception | None = None

    def fan_out(self, request, deadline, admit=False, on_partial=None) -> ShardResults:
        self.sizes.append(len(request.queries_QD))
        self.deadlines.append(deadline)
        answer = self.fleet.fan_out(request, deadline)
        if on_partial:
            for one in answer.results[: self.first_parts]:
                on_partial(ShardResults([one], []))
        self.at_gate.release()
        self.gate.wait()
        if self.error:
            raise self.error
        return answer


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    root = tmp_path_factory.mktemp("batching")
    return root, publish_random_index(root, VIEWS, SHARDS)


def route(index, fleet_of) -> Router:
    root, version = index
    task = SearcherTask(str(root), version)
    return Router(Store(str(root)), version, fleet_of(LocalSearchers(task)), timeout_s=LONG_S)


def is_true(queries_QD, hits, k) -> bool:
    rows = [[(hit.passage_id, hit.score, hit.view) for hit in row] for row in hits]
    return rows == [brute_force(VIEWS, query_D, k) for query_D in queries_QD]


def queries(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-2, 3, (count, D)).astype(np.float32)


def wait_for_queue(batcher: DynamicBatcher, count: int) -> None:
    while len(batcher._queue) < count:
        pass


@example([(1, K), (2, K)], 3, 1)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.sampled_from([3, K])), min_size=1, max_size=14),
    st.integers(3, 12),
    st.integers(1, 2),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_answers_of_batched_searches_are_those_of_single_searches(index, searches, max_queries, concurrent_calls):
    """Searches wait behind `concurrent_calls` calls at a gate; then the queued ones share as few calls as possible."""
    root, version = index
    gated_fleet = GatedFleet(LocalSearchers(SearcherTask(str(root), version)))
    batcher = DynamicBatcher(gated_fleet, max_queries, concurrent_calls)
    router = Router(Store(str(root)), version, batcher, timeout_s=LONG_S)
    with ThreadPoolExecutor(len(searches) + concurrent_calls) as threads:
        first = [threads.submit(router.search, queries(900 + i, 1), K) for i in range(concurrent_calls)]
        for _ in range(concurrent_calls):
            gated_fleet.at_gate.acquire()
        cases = [(queries(seed, count), k) for seed, (count, k) in enumerate(searches)]
        small = [one for one in cases if len(one[0]) < max_queries]
        waiting = [threads.submit(router.search, queries_QD, k) for queries_QD, k in cases]
        wait_for_queue(batcher, len(small))
        gated_fleet.gate.set()
        answers = [one.result() for one in waiting]
        assert all(one.result().exact.certified for one in first)
    single = route(index, lambda fleet: fleet)
    for (queries_QD, k), answer in zip(cases, answers):
        assert is_true(queries_QD, answer.hits, k)
        assert answer.exact.certified and answer.coverage_share == 1.0
        assert answer.exact.rescored == single.search(queries_QD, k).exact.rescored
    assert max(gated_fleet.sizes) <= max(max_queries, max(len(queries_QD) for queries_QD, _ in cases))
    for k in (3, K):
        sizes = [len(queries_QD) for queries_QD, own in small if own == k]
        if sizes and sum(sizes) <= max_queries:  # they fit into one call, and so they went in one
            num_alone = len(cases) - len(small)
            assert len(gated_fleet.sizes) <= concurrent_calls + num_alone + sum(own != k for _, own in small) + 1


def test_a_single_search_runs_in_its_own_thread(index):
    threads: list[str] = []

    class RecordingFleet:
        def __init__(self, fleet):
            self.fleet = fleet

        def fan_out(self, request, deadline, admit=False, on_partial=None):
            threads.append(threading.current_thread().name)
            return self.fleet.fan_out(request, deadline)

    router = route(index, lambda fleet: DynamicBatcher(RecordingFleet(fleet)))
    for seed in range(3):
        assert is_true(queries(seed, 2), router.search(queries(seed, 2), K).hits, K)
    assert set(threads) == {threading.current_thread().name}


def test_a_search_past_its_deadline_gets_partial_results_and_the_others_wait_on(index):
    root, version = index
    gated_fleet = GatedFleet(LocalSearchers(SearcherTask(str(root), version)), first_parts=2)
    batcher = DynamicBatcher(gated_fleet, concurrent_calls=1)
    router = Router(Store(str(root)), version, batcher, timeout_s=LONG_S)
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(router.search, queries(1, 1), K)
        gated_fleet.at_gate.acquire()
        patient = threads.submit(router.search, queries(2, 1), K)
        wait_for_queue(batcher, 1)
        answer = router.search(queries(3, 2), K, deadline=Deadline.after(2.0), min_coverage=0.0)
        assert [shard.state for shard in answer.shards] == ["searched", "searched", "late"]
        assert not answer.exact.certified
        with pytest.raises(CoverageError, match=r"2 \(late\)"):
            router.search(queries(3, 2), K, deadline=Deadline.after(0.2))
        assert not patient.done() and not first.done()
        gated_fleet.gate.set()
        assert is_true(queries(2, 1), patient.result().hits, K)
        assert is_true(queries(1, 1), first.result().hits, K)
    assert gated_fleet.deadlines[1].left_s > 2.0, "the call of a batch has the time of its latest deadline"


def test_a_search_queued_behind_a_hung_call_is_sent_before_its_deadline(index):
    root, version = index
    gated_fleet = GatedFleet(LocalSearchers(SearcherTask(str(root), version)), first_parts=SHARDS)
    router = Router(Store(str(root)), version, DynamicBatcher(gated_fleet, concurrent_calls=1), timeout_s=LONG_S)
    with ThreadPoolExecutor(1) as threads:
        hung_search = threads.submit(router.search, queries(1, 1), K)
        gated_fleet.at_gate.acquire()
        answer = router.search(queries(2, 1), K, deadline=Deadline.after(2.0))
        assert is_true(queries(2, 1), answer.hits, K) and answer.coverage_share == 1.0
        assert not hung_search.done()
        gated_fleet.gate.set()
        assert is_true(queries(1, 1), hung_search.result().hits, K)


def test_an_error_of_a_call_is_raised_by_all_its_searches(index):
    root, version = index
    gated_fleet = GatedFleet(LocalSearchers(SearcherTask(str(root), version)))
    batcher = DynamicBatcher(gated_fleet, concurrent_calls=1)
    router = Router(Store(str(root)), version, batcher, timeout_s=LONG_S)
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(router.search, queries(0, 1), K)
        gated_fleet.at_gate.acquire()
        waiting = [threads.submit(router.search, queries(seed, 1), K) for seed in (1, 2, 3)]
        wait_for_queue(batcher, 3)
        gated_fleet.error = OverloadedError("full", 0.5)
        gated_fleet.gate.set()
        for one in [first, *waiting]:
            with pytest.raises(OverloadedError, match="full"):
                one.result()
    assert len(gated_fleet.sizes) == 2
    gated_fleet.error = None
    assert is_true(queries(4, 1), router.search(queries(4, 1), K).hits, K)


def test_queued_searches_end_with_the_error_where_their_call_cannot_start(index):
    root, version = index
    gated_fleet = GatedFleet(LocalSearchers(SearcherTask(str(root), version)))
    batcher = DynamicBatcher(gated_fleet, concurrent_calls=1)
    router = Router(Store(str(root)), version, batcher, timeout_s=LONG_S)
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(router.search, queries(0, 1), K)
        gated_fleet.at_gate.acquire()
        waiting = [threads.submit(router.search, queries(seed, 1), k) for seed, k in ((1, K), (2, 2))]
        wait_for_queue(batcher, 2)
        batcher._threads.shutdown()
        gated_fleet.gate.set()
        assert is_true(queries(0, 1), first.result().hits, K)
        for one in waiting:
            with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
                one.result(30)


@pytest.mark.ray
def test_many_clients_of_searchers_get_whole_answers_from_fewer_calls(tmp_path, run_over, ray_session):
    publish_random_index(tmp_path, VIEWS, SHARDS)
    run = run_over(tmp_path, index={"name": "random"}, resources={"searchers": 2, "cpus_per_searcher": 0.25})
    with open_hot_swap_router(run) as live, ThreadPoolExecutor(12) as threads:
        with mock.patch.object(live.searchers, "fan_out", wraps=live.searchers.fan_out) as fan_out:
            answers = list(threads.map(lambda seed: live_search(live, queries(seed, 1), K), range(120)))
        for seed, answer in enumerate(answers):
            assert is_true(queries(seed, 1), answer.hits, K) and answer.exact.certified
        assert fan_out.call_count < 120


@pytest.mark.ray
def test_if_one_searcher_hangs_the_answer_of_the_other_arrives_in_time(tmp_path, run_over, ray_session):
    """No search goes directly, so that a batch receives the partial results."""
    publish_random_index(tmp_path, VIEWS, SHARDS)
    run = run_over(tmp_path, index={"name": "random"}, resources={"searchers": 2, "cpus_per_searcher": 0.25})
    with open_router(run) as default_router:
        fleet = default_router.fleet
        assert is_true(queries(1, 2), default_router.search(queries(1, 2), K, deadline=Deadline.after(60)).hits, K)
        router = Router(default_router.store, default_router.manifest, DynamicBatcher(fleet, concurrent_calls=0))
        assert is_true(queries(1, 2), router.search(queries(1, 2), K, deadline=Deadline.after(16)).hits, K)
        hung_shards, other_shards = (one.shards for one in fleet.assignments[1])
        gate = "gate"

        def hold(one) -> None:
            with one.request_lock:
                one.__dict__.setdefault(f"{gate} shut", threading.Event()).set()
                one.__dict__.setdefault(gate, threading.Event()).wait()

        fleet.actors[0].__ray_call__.remote(hold)
        beside = fleet.actors[0].__ray_call__.options(concurrency_group="health")
        ray.get(beside.remote(lambda one: one.__dict__.setdefault(f"{gate} shut", threading.Event()).wait()))
        answer = router.search(queries(1, 2), K, deadline=Deadline.after(8), min_coverage=0.0)
        assert {answer.shards[shard].state for shard in hung_shards} == {"late"}
        assert {answer.shards[shard].state for shard in other_shards} == {"searched"}
        ray.get(beside.remote(lambda one: one.__dict__.setdefault(gate, threading.Event()).set()))
        assert is_true(queries(1, 2), router.search(queries(1, 2), K, deadline=Deadline.after(60)).hits, K)
