"""Searches put together: answers are those of searches alone, each in its own time, and fewer calls are made."""

import threading
from concurrent.futures import ThreadPoolExecutor

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
from mvr_ray.distributed.searching.searcher import LocalFleet, SearcherTask
from mvr_ray.errors import CoverageError, OverloadedError
from mvr_ray.store.files import Store

VIEWS = random_views(80, 3)
SHARDS, K = 3, 6
LONG_S = 300.0


class Gated:
    """A fleet in this process whose calls wait at a gate, or end as they are told to, and are counted."""

    def __init__(self, fleet, first_parts: int = 0) -> None:
        self.fleet = fleet
        self.gate = threading.Event()
        self.at_gate = threading.Semaphore(0)
        self.sizes: list[int] = []
        self.first_parts = first_parts
        self.error: Exception | None = None

    def fan_out(self, request, deadline, again=False, on_partial=None) -> ShardResults:
        self.sizes.append(len(request.queries_QD))
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
def indexed(tmp_path_factory):
    root = tmp_path_factory.mktemp("coalesce")
    return root, publish_random_index(root, VIEWS, SHARDS)


def routed(indexed, fleet_of) -> Router:
    root, described = indexed
    task = SearcherTask(str(root), described, tuple(range(SHARDS)))
    return Router(Store(str(root)), described, fleet_of(LocalFleet(task)), timeout_s=LONG_S)


def is_true(queries_QD, hits, k) -> bool:
    found = [[(hit.passage_id, hit.score, hit.view) for hit in row] for row in hits]
    return found == [brute_force(VIEWS, query_D, k) for query_D in queries_QD]


def queries(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-2, 3, (count, D)).astype(np.float32)


def in_line(together: DynamicBatcher, count: int) -> None:
    while len(together._line) < count:
        pass


@example([(1, K), (2, K)], 3, 1)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.sampled_from([3, K])), min_size=1, max_size=14),
    st.integers(3, 12),
    st.integers(1, 2),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_answers_put_together_are_the_answers_of_searches_alone(indexed, searches, most, at_once):
    """All searches stand behind `at_once` calls at a gate; what is in line then goes in as few calls as may be."""
    root, described = indexed
    gated = Gated(LocalFleet(SearcherTask(str(root), described, tuple(range(SHARDS)))))
    together = DynamicBatcher(gated, most, at_once)
    router = Router(Store(str(root)), described, together, timeout_s=LONG_S)
    with ThreadPoolExecutor(len(searches) + at_once) as threads:
        ahead = [threads.submit(router.search, queries(900 + i, 1), K) for i in range(at_once)]
        for _ in range(at_once):
            gated.at_gate.acquire()
        asked = [(queries(seed, count), k) for seed, (count, k) in enumerate(searches)]
        small = [one for one in asked if len(one[0]) < most]
        waiting = [threads.submit(router.search, queries_QD, k) for queries_QD, k in asked]
        in_line(together, len(small))
        gated.gate.set()
        answers = [one.result() for one in waiting]
        assert all(one.result().exact.certified for one in ahead)
    for (queries_QD, k), answer in zip(asked, answers):
        assert is_true(queries_QD, answer.hits, k)
        assert answer.exact.certified and answer.coverage_share == 1.0
    assert max(gated.sizes) <= max(most, max(len(queries_QD) for queries_QD, _ in asked))
    assert together.searches == len(small) + at_once
    for k in (3, K):
        sizes = [len(queries_QD) for queries_QD, own in small if own == k]
        if sizes and sum(sizes) <= most:  # they fit into one call, and so they went in one
            assert together.calls <= at_once + sum(own != k for _, own in small) + 1


def test_a_search_alone_is_asked_in_its_own_thread(indexed):
    threads: list[str] = []

    class Told:
        def __init__(self, fleet):
            self.fleet = fleet

        def fan_out(self, request, deadline, again=False, on_partial=None):
            threads.append(threading.current_thread().name)
            return self.fleet.fan_out(request, deadline)

    router = routed(indexed, lambda fleet: DynamicBatcher(Told(fleet)))
    for seed in range(3):
        assert is_true(queries(seed, 2), router.search(queries(seed, 2), K).hits, K)
    assert set(threads) == {threading.current_thread().name}


def test_one_whose_time_is_over_has_what_came_and_the_others_wait_on(indexed):
    root, described = indexed
    gated = Gated(LocalFleet(SearcherTask(str(root), described, tuple(range(SHARDS)))), first_parts=2)
    together = DynamicBatcher(gated, at_once=1)
    router = Router(Store(str(root)), described, together, timeout_s=LONG_S)
    with ThreadPoolExecutor(3) as threads:
        ahead = threads.submit(router.search, queries(1, 1), K)
        gated.at_gate.acquire()
        patient = threads.submit(router.search, queries(2, 1), K)
        in_line(together, 1)
        answer = router.search(queries(3, 2), K, deadline=Deadline.after(0.4), min_coverage=0.0)
        assert [shard.state for shard in answer.shards] == ["searched", "searched", "late"]
        assert not answer.exact.certified
        with pytest.raises(CoverageError, match=r"2 \(late\)"):
            router.search(queries(3, 2), K, deadline=Deadline.after(0.2))
        assert not patient.done() and not ahead.done()
        gated.gate.set()
        assert is_true(queries(2, 1), patient.result().hits, K)
        assert is_true(queries(1, 1), ahead.result().hits, K)


def test_one_in_line_behind_a_call_that_hangs_is_asked_before_its_time_is_over(indexed):
    root, described = indexed
    gated = Gated(LocalFleet(SearcherTask(str(root), described, tuple(range(SHARDS)))), first_parts=SHARDS)
    router = Router(Store(str(root)), described, DynamicBatcher(gated, at_once=1), timeout_s=LONG_S)
    with ThreadPoolExecutor(1) as threads:
        hung = threads.submit(router.search, queries(1, 1), K)
        gated.at_gate.acquire()
        answer = router.search(queries(2, 1), K, deadline=Deadline.after(1.0))
        assert is_true(queries(2, 1), answer.hits, K) and answer.coverage_share == 1.0
        assert not hung.done()
        gated.gate.set()
        assert is_true(queries(1, 1), hung.result().hits, K)


def test_an_error_of_the_call_is_told_to_all_that_it_was_made_for(indexed):
    root, described = indexed
    gated = Gated(LocalFleet(SearcherTask(str(root), described, tuple(range(SHARDS)))))
    together = DynamicBatcher(gated, at_once=1)
    router = Router(Store(str(root)), described, together, timeout_s=LONG_S)
    with ThreadPoolExecutor(4) as threads:
        ahead = threads.submit(router.search, queries(0, 1), K)
        gated.at_gate.acquire()
        waiting = [threads.submit(router.search, queries(seed, 1), K) for seed in (1, 2, 3)]
        in_line(together, 3)
        gated.error = OverloadedError("full", 0.5)
        gated.gate.set()
        for one in [ahead, *waiting]:
            with pytest.raises(OverloadedError, match="full"):
                one.result()
    assert together.calls == 2
    gated.error = None
    assert is_true(queries(4, 1), router.search(queries(4, 1), K).hits, K)


@pytest.mark.ray
def test_many_clients_of_searchers_get_whole_answers_from_fewer_calls(tmp_path, run_over, ray_session):
    publish_random_index(tmp_path, VIEWS, SHARDS)
    run = run_over(tmp_path, index={"name": "random"}, resources={"searchers": 2, "cpus_per_searcher": 0.25})
    with open_hot_swap_router(run) as live, ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(lambda seed: live_search(live, queries(seed, 1), K), range(120)))
        for seed, answer in enumerate(answers):
            assert is_true(queries(seed, 1), answer.hits, K) and answer.exact.certified
        with live.pin() as router:
            assert router.fleet.searches == 120 > router.fleet.calls


@pytest.mark.ray
def test_of_searchers_one_of_which_hangs_the_other_ones_answer_is_there_in_time(tmp_path, run_over, ray_session):
    """No search goes alone, so that what comes is heard by a batch."""
    publish_random_index(tmp_path, VIEWS, SHARDS)
    run = run_over(tmp_path, index={"name": "random"}, resources={"searchers": 2, "cpus_per_searcher": 0.25})
    with open_router(run) as opened:
        fleet = opened.fleet
        assert is_true(queries(1, 2), opened.search(queries(1, 2), K, deadline=Deadline.after(60)).hits, K)
        router = Router(opened.store, opened.manifest, DynamicBatcher(fleet, at_once=0))
        assert is_true(queries(1, 2), router.search(queries(1, 2), K, deadline=Deadline.after(16)).hits, K)
        hung, other = fleet.shards
        gate = "gate"

        def hold(one) -> None:
            with one.turn:
                one.__dict__.setdefault(gate, threading.Event()).wait()

        fleet.actors[0].__ray_call__.remote(hold)
        answer = router.search(queries(1, 2), K, deadline=Deadline.after(8), min_coverage=0.0)
        assert {answer.shards[shard].state for shard in hung} == {"late"}
        assert {answer.shards[shard].state for shard in other} == {"searched"}
        again = fleet.actors[0].__ray_call__.options(concurrency_group="health")
        ray.get(again.remote(lambda one: one.__dict__.setdefault(gate, threading.Event()).set()))
        assert is_true(queries(1, 2), router.search(queries(1, 2), K, deadline=Deadline.after(60)).hits, K)
