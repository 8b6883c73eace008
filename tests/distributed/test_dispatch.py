"""Tests of replicas, hedging, bounded queues and probes with slow, dead, hung and overloaded searchers."""

import dataclasses
import gc
import os
import signal
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from random_index import D, brute_force, publish_random_index, random_views
from waiting import until

from mvr_ray.deadline import Deadline
from mvr_ray.distributed.router import open_router
from mvr_ray.distributed.searching.dispatch import Dispatcher
from mvr_ray.distributed.searching.fleet import RemoteSearchers
from mvr_ray.distributed.searching.health import HealthMonitor, LastHeartbeat
from mvr_ray.distributed.searching.hedging import MIN_CALLS, MIN_DELAY_S, HedgeBudget, Latencies
from mvr_ray.distributed.searching.messages import ScanRequest, encode_scan
from mvr_ray.distributed.searching.rendezvous import balance_shards
from mvr_ray.distributed.searching.searcher import Heartbeat, ShardAssignment
from mvr_ray.distributed.searching.transport import Connection, ConnectionLost
from mvr_ray.errors import CoverageError, OverloadedError

SHARDS, K = 3, 7
VIEWS = random_views(60, 1)
QUERIES_QD = np.random.default_rng(5).integers(-2, 3, (4, D)).astype(np.float32)
WAYS = ["by Ray", "over Flight"]
TRUTH = [brute_force(VIEWS, query_D, K) for query_D in QUERIES_QD]


@pytest.fixture
def open_with(tmp_path, run_over, ray_session):
    """A function that opens a router over two groups of searchers."""
    publish_random_index(tmp_path, VIEWS, SHARDS)

    def open_small(**resources):
        small = {"searchers": 2, "cpus_per_searcher": 0.25, **resources}
        return open_router(run_over(tmp_path, index={"name": "random"}, resources=small))

    return open_small


def is_whole(answer) -> bool:
    rows = [[(hit.passage_id, hit.score, hit.view) for hit in hits] for hits in answer.hits]
    return rows == TRUTH and answer.exact.certified and answer.coverage_share == 1.0


def shut(actor, gate: str = "gate", later: bool = False) -> None:
    """Block the request path of a running searcher for all calls after this one; `later`: after those before it."""

    def hold(searcher) -> None:
        with searcher.request_lock:
            searcher.__dict__.setdefault(f"{gate} shut", threading.Event()).set()
            searcher.__dict__.setdefault(gate, threading.Event()).wait()

    actor.__ray_call__.remote(hold)
    if not later:
        ray.get(beside(actor, lambda searcher: searcher.__dict__.setdefault(f"{gate} shut", threading.Event()).wait()))


def reopen(actor, gate: str = "gate") -> None:
    ray.get(beside(actor, lambda searcher: searcher.__dict__.setdefault(gate, threading.Event()).set()))


def beside(actor, ask):
    return actor.__ray_call__.options(concurrency_group="health").remote(ask)


def kill(actor, number: int = signal.SIGKILL) -> None:
    os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), number)


def use_transport(way: str, router, monkeypatch) -> None:
    """Send searches by Ray only, or over Flight after all connections are open."""
    if way == WAYS[0]:
        monkeypatch.setattr(Connection, "_usable_client", lambda _: None)
        return
    replicas = [replica for group in router.fleet.dispatcher.groups for replica in group]
    while not all(replica.is_connected for replica in replicas):
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(lambda _: is_whole(router.search(QUERIES_QD, K)), range(4)))


def hold_searches(actor) -> int:
    """Block every search that this searcher begins, in the middle of it; return its process id."""

    def hold(searcher) -> int:
        searcher.search_event = threading.Event()

        def stop(*_):
            searcher.search_event.set()
            threading.Event().wait()

        searcher._get_open = stop
        return os.getpid()

    return ray.get(actor.__ray_call__.remote(hold))


def record_searches(actor) -> None:
    """Record the shards that this searcher searches."""

    def note(searcher) -> None:
        real, searcher.shards_log = searcher._get_open, []

        def record(of, shard, call=""):
            searcher.shards_log.append(shard)
            return real(of, shard, call)

        searcher._get_open = record

    ray.get(beside(actor, note))


def wait_until_held(actor) -> None:
    """Wait until a search is blocked there."""
    assert ray.get(beside(actor, lambda searcher: searcher.search_event.wait(300)))


def test_a_call_lost_before_a_searcher_came_back_does_not_mark_it_down(monkeypatch):
    """Where no group has a second replica, failures are read when the slowest group answers."""
    failure, slow, are_sent = Future(), Future(), threading.Event()
    dispatcher = Dispatcher([["one"], ["two"]], lambda *_: None)
    [[replica], [other]] = dispatcher.groups
    monkeypatch.setattr(other, "call", lambda *_: slow)
    monkeypatch.setattr(replica, "call", lambda *_: (are_sent.set(), failure)[1])
    with ThreadPoolExecutor(1) as pool:
        search = pool.submit(dispatcher.gather, "search", {0: b"", 1: b""}, Deadline.after(20))
        assert are_sent.wait(20)
        failure.set_exception(ConnectionLost("the searcher died"))
        dispatcher.mark_down(replica, 0, "died")
        dispatcher.mark_up(replica)
        slow.set_result(b"answer")
        assert search.result() == ({1: b"answer"}, {0: "died"})
    assert replica.state == ""


@given(st.lists(st.booleans(), max_size=600), st.sampled_from([0.05, 0.1, 0.5]), st.integers(10, 60))
def test_second_calls_stay_within_their_share_of_every_window(wants, share, window):
    """Each call may be followed by a request for a second one."""
    budget = HedgeBudget(share, window)
    hedges = []
    for wish in wants:
        budget.call()
        hedges.append(bool(wish and budget.take()))
    assert budget.hedges == sum(hedges)
    for end in range(1, len(hedges) + 1):
        last = hedges[max(0, end - window) : end]
        assert sum(last) <= share * len(last)
    if all(wants):
        assert sum(hedges) >= int(share * len(wants)) - 1


@given(st.lists(st.floats(0.001, 10), min_size=MIN_CALLS, max_size=200))
def test_a_second_call_waits_for_all_but_the_slowest_twentieth(seconds):
    latencies = Latencies()
    for one in seconds[: MIN_CALLS - 1]:
        latencies.add(one)
    assert latencies.hedge_after_s() is None
    for one in seconds[MIN_CALLS - 1 :]:
        latencies.add(one)
    after_s = latencies.hedge_after_s()
    assert after_s >= MIN_DELAY_S
    assert sum(one > after_s for one in seconds) <= 0.05 * len(seconds)
    if after_s > MIN_DELAY_S:
        assert sum(one >= after_s for one in seconds) >= 0.05 * len(seconds) - 1


@pytest.mark.parametrize(
    ("heartbeat", "works"),
    [
        (Heartbeat("a", 7, False), False),
        (None, False),
        (Heartbeat("a", 8, False), True),
        (Heartbeat("a", 7, True), True),
        (Heartbeat("b", 7, False), True),
    ],
    ids=["same", "nothing", "a call ended", "opens files", "another life"],
)
def test_only_work_is_a_sign_of_life(heartbeat, works):
    last = LastHeartbeat(Heartbeat("a", 7, False), 10.0)
    assert last.after(heartbeat, 50.0) == (LastHeartbeat(heartbeat, 50.0) if works else last)


@pytest.fixture(scope="module")
def six_shards(tmp_path_factory):
    return publish_random_index(tmp_path_factory.mktemp("six"), random_views(12, 1), 6)


@given(st.data())
def test_unchanged_shards_stay_where_they_are_and_every_shard_has_one_place(six_shards, data):
    groups = data.draw(st.integers(1, 4))
    entries = six_shards.shards[: data.draw(st.integers(1, 6))]
    group_of = {one.shard: data.draw(st.integers(0, groups - 1)) for one in entries if data.draw(st.booleans())}
    searchers = RemoteSearchers([[] for _ in range(groups)])
    before = [tuple(shard for shard in group_of if group_of[shard] == group) for group in range(groups)]
    searchers.assignments[six_shards.version] = [ShardAssignment(six_shards, shards) for shards in before]
    version = dataclasses.replace(six_shards, version=six_shards.version + 1, shards=entries)
    assignment = [one.shards for one in searchers.assign(version)]
    assert sorted(shard for shards in assignment for shard in shards) == [one.shard for one in entries]
    assert all(shard in assignment[group] for shard, group in group_of.items())
    if not group_of:
        assert assignment == balance_shards({one.shard: one.num_bytes for one in entries}, groups)


def test_changed_shards_stay_with_the_group_that_has_the_files_they_share(six_shards):
    searchers = RemoteSearchers([[] for _ in range(3)])
    searchers.assign(six_shards)
    entries = []
    for entry in six_shards.shards:
        files = {name: dataclasses.replace(file, num_bytes=10**6 + entry.shard) for name, file in entry.files.items()}
        entries.append(dataclasses.replace(entry, digest=f"{entry.shard:032x}", files=files))
    version = dataclasses.replace(six_shards, version=six_shards.version + 1, shards=tuple(entries))
    assert [one.shards for one in searchers.assign(version)] == [one.shards for one in searchers.assign(six_shards)]


@pytest.mark.chaos(
    "searcher killed while it searches, a replica left",
    "no answer fails; all are complete and certified",
)
@pytest.mark.ray
@pytest.mark.parametrize("way", WAYS)
def test_with_a_replica_lost_answers_stay_whole_and_certified(open_with, record_property, way, monkeypatch):
    with open_with(replicas=2) as router, ThreadPoolExecutor(1) as threads:
        use_transport(way, router, monkeypatch)
        groups, (first, second, *_) = router.fleet.dispatcher.groups, router.fleet.actors
        router.fleet.dispatcher.budget = HedgeBudget(share=0.0)  # a second call would hide the loss
        waits_s = []
        for target, replica, other in ((first, *groups[0]), (second, *reversed(groups[0]))):
            if other.open_ref:
                ray.wait([other.open_ref], timeout=300)  # it was killed before, and now gets calls again
            pid = hold_searches(target)
            other.waiting += 32  # so that the one to be killed is called first
            search = threads.submit(router.search, QUERIES_QD, K, deadline=Deadline.after(120))
            wait_until_held(target)
            other.waiting -= 32
            assert replica.waiting == 1 and not search.done()
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            assert is_whole(search.result())
            waits_s.append(time.monotonic() - began)
            assert replica.state == "died"
            assert all(is_whole(router.search(QUERIES_QD, K)) for _ in range(10))
        router.ready()
        assert [one.state for many in groups for one in many] == [""] * 4
        assert is_whole(router.search(QUERIES_QD, K))
    record_property("figures", f"2 killed with a call each, whole {max(waits_s):.1f} s later; 21 more answers whole")


@pytest.mark.chaos("slow searcher", "a second call elsewhere answers in time, at most 5 % more calls")
@pytest.mark.ray
def test_a_slow_replica_is_asked_for_a_second_time_elsewhere_but_not_while_shedding(
    open_with, monkeypatch, record_property
):
    with open_with(replicas=2) as router:
        dispatcher, (first, second, *_) = router.fleet.dispatcher, router.fleet.actors
        for _ in range(MIN_CALLS + 1):
            assert is_whole(router.search(QUERIES_QD, K))
        dispatcher.budget = HedgeBudget()
        for _ in range(100):
            dispatcher.budget.call()
        shut(first)
        for _ in range(10):
            assert is_whole(router.search(QUERIES_QD, K, deadline=Deadline.after(60)))
        hedges = dispatcher.budget.hedges
        assert 1 <= hedges <= 0.05 * dispatcher.budget.calls
        record_property("figures", f"10 whole answers with {hedges} second calls in {dispatcher.budget.calls} calls")
        assert 1 <= dispatcher.groups[0][0].waiting <= hedges  # once as the first, all others went elsewhere
        counts = dispatcher.counts()
        assert 0 <= counts.hedge_wins <= counts.hedges == hedges and counts.refusals == 0
        dispatcher.budget = HedgeBudget(share=1.0)
        dispatcher.groups[0][1].waiting += 32  # so that the shut one is called first
        assert is_whole(router.search(QUERIES_QD, K, deadline=Deadline.after(60)))
        dispatcher.groups[0][1].waiting -= 32
        assert counts.hedge_wins < dispatcher.counts().hedge_wins
        assert dispatcher.counts().most_waiting == dispatcher.groups[0][0].waiting <= dispatcher.counts().waiting
        hedges = dispatcher.budget.hedges
        monkeypatch.setattr("mvr_ray.distributed.searching.dispatch.HEDGE_PAUSE_S", 1e9)
        dispatcher._refused_s = float("-inf")  # so that only a refusal from now on can pause second calls
        dispatcher.queue = 0
        with pytest.raises(OverloadedError):
            router.search(QUERIES_QD, K)
        assert dispatcher.counts().refusals == 1
        dispatcher.queue = 64
        shut(second)
        answer = router.search(QUERIES_QD, K, deadline=Deadline.after(1), min_coverage=0.0)
        assert {answer.shards[shard].state for shard in router.fleet.assignments[1][0].shards} == {"late"}
        assert dispatcher.budget.hedges == hedges
        reopen(first)
        reopen(second)


@pytest.mark.chaos(
    "flood of the searchers, 10x", "refused at once with a time to come back; what was let in is answered"
)
@pytest.mark.ray
def test_a_full_queue_refuses_at_once_and_what_was_let_in_is_answered(open_with, record_property):
    queue, num_asked = 2, 20
    with open_with(searcher_queue=queue) as router, ThreadPoolExecutor(queue) as threads:
        actor, waiting = router.fleet.actors[0], router.fleet.dispatcher.groups[0][0]
        shut(actor)
        searches = [threads.submit(router.search, QUERIES_QD, K, deadline=Deadline.after(120)) for _ in range(queue)]
        while waiting.waiting < queue:
            pass
        message = r"^2 calls wait .* group 0, .*searcher_queue=2\); ask again in \d+\.\d s, "
        retries_s = []
        for _ in range(num_asked - queue):
            with pytest.raises(OverloadedError, match=message) as error:
                router.search(QUERIES_QD, K)
            retries_s.append(error.value.retry_after_s)
        assert min(retries_s) > 0
        assert router.fleet.dispatcher.counts().refusals == len(retries_s)
        assert router.fleet.dispatcher.groups[1][0].waiting <= queue
        reopen(actor)
        assert all(is_whole(one.result()) for one in searches)
        assert is_whole(router.search(QUERIES_QD, K))
    counts = f"{num_asked} asked, {len(retries_s)} refused until {max(retries_s):.1f} s later, {len(searches)} answered"
    record_property("figures", counts)


@pytest.mark.ray
def test_cancelled_calls_are_skipped_and_count_as_waiting_until_then(open_with):
    with open_with(searcher_queue=3) as router:
        actor, replica = router.fleet.actors[0], router.fleet.dispatcher.groups[0][0]
        shut(actor)
        for _ in range(3):
            answer = router.search(QUERIES_QD, K, deadline=Deadline.after(2.0), min_coverage=0.0)
            assert {shard.state for shard in answer.shards} <= {"searched", "late"}
        with pytest.raises(OverloadedError):
            router.search(QUERIES_QD, K, min_coverage=0.0)
        record_searches(actor)
        reopen(actor)
        until(lambda: replica.waiting == 0)
        assert ray.get(beside(actor, lambda searcher: searcher.shards_log)) == []
        assert is_whole(router.search(QUERIES_QD, K))
        assert ray.get(beside(actor, lambda searcher: searcher.shards_log)) != []
        assert replica.waiting == 0


def check_health(monitor: HealthMonitor, at_s: float, *well) -> int:
    """Check once and return the number of hung searchers; then wait until `well` ones have answered their probes."""
    num_hung = monitor.check(at_s)
    ray.get([actor.probe.remote() for actor in well])
    return num_hung


@pytest.mark.slow
@pytest.mark.chaos("hung searcher", "found by a probe, reported as hung, replaced")
@pytest.mark.ray
@pytest.mark.parametrize("freeze", [False, True], ids=["its queue stands", "its process stands"])
def test_a_hung_searcher_is_detected_by_its_probe_reported_and_replaced(open_with, freeze, record_property):
    with open_with() as router:
        dispatcher, (actor, other) = router.fleet.dispatcher, router.fleet.actors
        monitor = HealthMonitor(dispatcher, hung_s=30)
        assert [check_health(monitor, at_s, actor, other) for at_s in (0, 29, 58)] == [0, 0, 0]
        before = ray.get(actor.heartbeat.remote()).instance_id
        if freeze:
            kill(actor, signal.SIGSTOP)
        else:
            shut(actor)
        assert [check_health(monitor, at_s, other) for at_s in (100, 129.9)] == [0, 0]
        assert check_health(monitor, 140, other) == 1
        assert dispatcher.groups[0][0].state == "hung"
        began = time.monotonic()
        answer = router.search(QUERIES_QD, K, min_coverage=0.0)
        states = {shard.shard: shard.state for shard in answer.shards}
        assert {states[shard] for shard in router.fleet.assignments[1][0].shards} <= {"hung", "searched"}
        assert {states[shard] for shard in router.fleet.assignments[1][1].shards} == {"searched"}
        router.ready()
        assert is_whole(router.search(QUERIES_QD, K))
        record_property("figures", f"found at the third look, whole again {time.monotonic() - began:.1f} s later")
        assert ray.get(actor.heartbeat.remote()).instance_id != before
        assert check_health(monitor, 150, actor, other) == 0


@pytest.mark.ray
def test_a_busy_searcher_is_not_taken_for_a_hung_one(open_with):
    """The probe waits behind another call and a second gate; it may while calls end."""
    with open_with() as router:
        monitor, (actor, other) = HealthMonitor(router.fleet.dispatcher, hung_s=30), router.fleet.actors
        shut(actor, "first")
        message = encode_scan(ScanRequest(QUERIES_QD, K, router.fleet.assignments[1][0].shards, 1))
        others = actor.handle.remote("scan", "", message)
        shut(actor, "second", later=True)
        assert check_health(monitor, 0, other) == 0
        reopen(actor, "first")
        ray.get(others)
        assert [check_health(monitor, at_s, other) for at_s in (40, 69, 71)] == [0, 0, 1]
        router.ready()
        assert is_whole(router.search(QUERIES_QD, K))


@pytest.mark.ray
def test_nothing_keeps_a_replica_that_was_replaced(open_with):
    """It would keep its threads."""
    with open_with() as router:
        dispatcher, actor = router.fleet.dispatcher, router.fleet.actors[0]
        monitor = HealthMonitor(dispatcher, hung_s=30)
        assert monitor.check(0) == 0
        before = weakref.ref(dispatcher.replace(0, 0, actor))
        assert monitor.check(1) == 0
        gc.collect()
        assert before() is None


@pytest.mark.chaos(
    "searcher killed while it searches, no replica left", "its shards are reported as died; certified after its restart"
)
@pytest.mark.ray
@pytest.mark.parametrize("way", WAYS)
def test_without_a_live_replica_shards_are_reported_until_they_are_back(open_with, record_property, way, monkeypatch):
    with open_with() as router, ThreadPoolExecutor(2) as threads:
        use_transport(way, router, monkeypatch)
        target, replica = router.fleet.actors[1], router.fleet.dispatcher.groups[1][0]
        pid = hold_searches(target)
        strict = threads.submit(router.search, QUERIES_QD, K, deadline=Deadline.after(120))
        wait_until_held(target)
        lenient = threads.submit(router.search, QUERIES_QD, K, deadline=Deadline.after(120), min_coverage=0.0)
        while replica.waiting < 2:
            time.sleep(0.001)
        assert not strict.done()
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(CoverageError, match=r"\(died\)"):
            strict.result()
        states = {shard.shard: shard.state for shard in lenient.result().shards}
        assert {states[shard] for shard in router.fleet.assignments[1][0].shards} == {"searched"}
        assert {states[shard] for shard in router.fleet.assignments[1][1].shards} == {"died"}
        until(lambda: is_whole(router.search(QUERIES_QD, K, min_coverage=0.0)), 300)  # nothing called ready()
        took_s = time.monotonic() - began
    record_property("figures", f"2 calls reported what died; whole again {took_s:.1f} s later")
