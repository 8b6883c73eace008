"""Tests of the placement of searchers on nodes: only the searchers of a node that joins or leaves move."""

import os
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from hosts import HEALTH
from hypothesis import given
from hypothesis import strategies as st
from live_search import live_search
from random_index import D, brute_force, publish_random_index, random_views
from ray.cluster_utils import Cluster
from ray.exceptions import GetTimeoutError, RayError
from waiting import until

from mvr_ray.config import ResourcesConfig
from mvr_ray.deadline import Deadline
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.hot_swap import HotSwapRouter, open_hot_swap_router
from mvr_ray.distributed.refinement.refiner_pool import RefinerPool
from mvr_ray.distributed.refinement.shard_refiner import RefinerTask
from mvr_ray.distributed.router import searcher_task
from mvr_ray.distributed.searching.node_placement import NodeCapacity, Rebalancer, assign_nodes
from mvr_ray.distributed.searching.rendezvous import Move
from mvr_ray.errors import CoverageError

sizes_of = st.dictionaries(st.integers(0, 40), st.integers(1, 1000), min_size=1, max_size=20)
capacities_of = st.dictionaries(
    st.text("abcdef0123456789", min_size=4, max_size=6),
    st.builds(NodeCapacity, st.integers(1, 12), st.integers(1, 10)),
    min_size=1,
    max_size=6,
)


@given(sizes_of, capacities_of, st.integers(1, 3))
def test_no_node_gets_more_searchers_than_it_has_cpus_for_and_replicas_sit_apart(sizes, nodes, replicas):
    nodes_of = assign_nodes(sizes, nodes, replicas)
    assert nodes_of.keys() == sizes.keys()
    for node, capacity in nodes.items():
        assert sum(node in own for own in nodes_of.values()) <= capacity.max_searchers
    for own in nodes_of.values():
        assert len(set(own)) == len(own) <= replicas
    roomy = {node: capacity._replace(max_searchers=len(sizes)) for node, capacity in nodes.items()}
    assert all(len(own) == min(replicas, len(nodes)) for own in assign_nodes(sizes, roomy, replicas).values())


@given(sizes_of, capacities_of, st.data())
def test_a_node_that_goes_takes_its_own_searchers_along_and_no_other(sizes, nodes, data):
    roomy = {node: capacity._replace(max_searchers=len(sizes)) for node, capacity in nodes.items()}
    before = assign_nodes(sizes, roomy, 1)
    lost_node = data.draw(st.sampled_from(sorted(roomy)))
    rest = {node: capacity for node, capacity in roomy.items() if node != lost_node}
    after = assign_nodes(sizes, rest, 1, before)
    assert all(after[group] == own for group, own in before.items() if own != (lost_node,))
    assert assign_nodes(sizes, roomy, 1, before) == before


@given(sizes_of, capacities_of)
def test_searchers_that_run_on_a_node_take_its_capacity_first(sizes, nodes):
    full = {node: capacity._replace(max_searchers=len(sizes)) for node, capacity in nodes.items()}
    before = assign_nodes(sizes, full, 1)
    tight = {
        node: capacity._replace(max_searchers=sum(own == (node,) for own in before.values()))
        for node, capacity in full.items()
    }
    assert assign_nodes(sizes, tight, 1, before) == before


def test_a_node_gets_searchers_in_proportion_to_its_memory():
    nodes = {"small": NodeCapacity(400, 1), "large": NodeCapacity(400, 7)}
    count = Counter(node for own in assign_nodes(dict.fromkeys(range(400), 1), nodes, 1).values() for node in own)
    assert 300 < count["large"] < 400


def test_without_nodes_everything_is_left_to_ray():
    assert assign_nodes({0: 5, 1: 7}, {}, 2) == {0: (), 1: ()}


SHARDS, GROUPS, K = 12, 12, 5
VIEWS = random_views(120, 3)
QUERIES_QD = np.random.default_rng(4).integers(-2, 3, (6, D)).astype(np.float32)
TRUTH = [brute_force(VIEWS, query_D, K) for query_D in QUERIES_QD]


@pytest.fixture
def cluster(monkeypatch) -> Iterator[Cluster]:
    """A head without CPUs for searchers and two nodes; health checks that take seconds."""
    for name, value in HEALTH.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", str(value))
    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=5, memory=10**9, object_store_memory=100_000_000)
    cluster.wait_for_nodes()
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    yield cluster
    cluster.shutdown()


def places(live: HotSwapRouter) -> dict[int, tuple[str, str]]:
    """Group -> the node and the instance id of its searcher."""
    actors = [actors[0] for actors in live.searchers.groups]
    nodes = ray.get([actor.node.remote() for actor in actors], timeout=60)
    return dict(
        enumerate(zip(nodes, [heartbeat.instance_id for heartbeat in ray.get([a.heartbeat.remote() for a in actors])]))
    )


def places_without(live: HotSwapRouter, without: str) -> dict[int, tuple[str, str]] | None:
    """`places`, None until every searcher answers from another node; one may answer shortly after its node's end."""
    try:
        current = places(live)
    except (RayError, GetTimeoutError):
        return None
    return None if any(node == without for node, _ in current.values()) else current


class Asking:
    """Searches all the time from a thread; counts right answers, and refusals for too little coverage."""

    def __init__(self, live: HotSwapRouter) -> None:
        self.live = live
        self.right = self.refusals = 0
        self.wrong: list[object] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._end.set()
        self._thread.join(60)

    def _ask(self) -> None:
        while not self._end.is_set():
            try:
                answer = live_search(self.live, QUERIES_QD, K, deadline=Deadline.after(20))
            except CoverageError:
                self.refusals += 1
                self._end.wait(0.05)
                continue
            hits = [[(hit.passage_id, hit.score, hit.view) for hit in row] for row in answer.hits]
            if hits == TRUTH and answer.exact.certified:
                self.right += 1
            else:
                self.wrong.append(answer)


@pytest.mark.nodes
@pytest.mark.chaos(
    "searcher node joins, then is killed",
    "only shards of that node move; no answer is wrong, and none is refused while the node joins",
)
def test_only_the_shards_of_a_node_that_comes_or_goes_are_moved(
    tmp_path: Path, run_over, cluster: Cluster, record_property
):
    version = publish_random_index(tmp_path, VIEWS, SHARDS)
    resources = {"searchers": GROUPS, "cpus_per_searcher": 0.25, "local_cpus": 4, "address": os.environ["RAY_ADDRESS"]}
    run = run_over(tmp_path, index={"name": "random"}, resources=resources)
    with open_hot_swap_router(run, probe_s=3600) as live, Asking(live) as asking:
        rebalancer = Rebalancer(live.searchers, searcher_task(run, version, local=False), run.resources)
        assert rebalancer.rebalance() == []
        before = places(live)
        assert len({node for node, _ in before.values()}) == 2
        node = cluster.add_node(num_cpus=5, memory=10**9, object_store_memory=100_000_000)
        cluster.wait_for_nodes()
        moves = until(rebalancer.rebalance, 90, every_s=0.1)
        during = places(live)
        assert {move.to for move in moves} == {node.node_id}
        groups = {move.shard for move in moves}
        assert 0 < len(groups) < GROUPS
        assert {group for group in during if during[group] != before[group]} == groups
        assert {group for group, (where, _) in during.items() if where == node.node_id} == groups
        assert asking.refusals == 0
        cluster.remove_node(node, allow_graceful=False)
        after = until(lambda: places_without(live, node.node_id), 90, every_s=0.1)
        restarted_groups = {group for group in after if after[group] != during[group]}
        assert restarted_groups == groups
        right = asking.right
        until(lambda: asking.right > right + 5, 90, every_s=0.1)
    assert asking.wrong == []
    text = f"{len(groups)} of {GROUPS} groups moved each time; {asking.right} right answers, {asking.refusals} refused"
    record_property("figures", text)


class InterruptedRebalancer(Rebalancer):
    """Calls `meanwhile` when the new searcher has opened the shards."""

    meanwhile = staticmethod(lambda: None)

    def _open_shards(self, actor, assignments, target) -> None:
        super()._open_shards(actor, assignments, target)
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()


@pytest.mark.nodes
def test_refiners_are_spread_over_the_nodes_as_their_memory_is_not_reserved(tmp_path: Path, cluster):
    task = RefinerTask(str(tmp_path), publish_random_index(tmp_path, VIEWS, 4), "staging/none")
    with session.connect(ResourcesConfig()), RefinerPool(task, 4, 0.2) as refiners:
        calls = [
            actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()) for actor in refiners.actors
        ]
        assert sorted(Counter(ray.get(calls, timeout=120)).values()) == [2, 2]


@pytest.mark.ray
def test_a_version_that_is_opened_while_a_searcher_moves_is_open_on_the_new_one(tmp_path: Path, run_over, ray_session):
    other = {i: {v: -x for v, x in own.items()} for i, own in VIEWS.items()}
    version = publish_random_index(tmp_path, VIEWS, 3)
    run = run_over(tmp_path, index={"name": "random"}, resources={"searchers": 2, "cpus_per_searcher": 0.25})
    with open_hot_swap_router(run, 1, probe_s=3600) as live:
        rebalancer = InterruptedRebalancer(live.searchers, searcher_task(run, version, local=False), run.resources)
        second = publish_random_index(tmp_path, other, 3, parent=1)
        rebalancer.meanwhile = live.move_to
        [here] = {node for node, _ in places(live).values()}
        before = places(live)[0]
        assert rebalancer._move(Move(0, here, here), [here])
        assert live.state.version == 2 and places(live)[0] != before
        own = [entry.digest for entry in second.shards if entry.shard in live.searchers.assignments[2][0].shards]
        [actor] = live.searchers.groups[0]
        assert ray.get(actor.health.remote()) == sorted(own)  # before a search could have had it opened
        answer = live_search(live, QUERIES_QD, K)
        hits = [[(hit.passage_id, hit.score, hit.view) for hit in row] for row in answer.hits]
        assert hits == [brute_force(other, query_D, K) for query_D in QUERIES_QD]
