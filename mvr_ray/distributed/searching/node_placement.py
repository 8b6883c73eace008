"""Places searcher groups on nodes by weighted rendezvous, and moves them when nodes join or leave.

    start    the replicas of a group run on its most preferred nodes, each on a different one
    leave    Ray restarts the lost searchers elsewhere; no other one moves, unless its node is then over its bound
    join     a group that prefers the new node is opened there and answers a probe; the old searcher ends after its
             last call

`rendezvous` places groups, each with all its shards, on nodes weighted by their memory, so only the shards of that node
are read again. Searchers for which a node has too few CPUs are left to Ray, which spreads them.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any, NamedTuple

import pyarrow as pa
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mvr_ray import logs
from mvr_ray.config import ResourcesConfig
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.ray_errors import translate_ray_errors
from mvr_ray.distributed.searching import rendezvous
from mvr_ray.distributed.searching.dispatch import Replica
from mvr_ray.distributed.searching.fleet import OPEN_TIMEOUT_S, RemoteSearchers
from mvr_ray.distributed.searching.memory import require_memory
from mvr_ray.distributed.searching.messages import decode_scan, decode_views_request, encode_results, encode_views
from mvr_ray.distributed.searching.rendezvous import balance_shards
from mvr_ray.distributed.searching.scrubber import Scrubber
from mvr_ray.distributed.searching.searcher import SearcherTask, ShardAssignment, ShardSearcher, assignment_bytes
from mvr_ray.distributed.searching.transport import (
    FairLock,
    SearcherAddress,
    SearcherServer,
    read_tls_files,
    require_valid_tls,
)
from mvr_ray.errors import MvrRayError, ShardIndexError

log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 30.0
DRAIN_S = 60.0
"""Time limit for the running calls of a replaced searcher; then it is killed."""
_POLL_S = 0.02
_remote: Any = ray.remote


class NodeCapacity(NamedTuple):
    """The number of searchers for which a node has CPUs and GPUs, and its memory."""

    max_searchers: int
    memory_bytes: float


class SearcherActor(ShardSearcher):
    """Runs a searcher as an actor: answers messages over Flight and Ray, one at a time, and logs JSON to stderr."""

    def __init__(self, task: SearcherTask) -> None:
        logs.to_stderr()
        self._tls = read_tls_files(task.tls_dir)
        super().__init__(task)
        self.request_lock = FairLock()
        self._running: dict[str, Future[pa.Buffer]] = {}
        self._server: SearcherServer | None = None
        self._resources = ExitStack()
        self._resources.enter_context(Scrubber(self, task.scrub_bytes_s).run_periodically())
        log.info("searcher started: pid=%d instance=%s", os.getpid(), self.instance_id)

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def endpoint(self) -> SearcherAddress:
        """Return the address of the server, which the first call starts."""
        if self._server is None:
            node = next(node for node in ray.nodes() if node["NodeID"] == self.node())
            host = "127.0.0.1" if session.PRIVATE_LABEL in node["Labels"] else node["NodeManagerAddress"]
            self._server = SearcherServer(self.handle, host, self._tls)
        return self._server.endpoint

    def handle(self, method: str, call: str, message: pa.Buffer) -> pa.Buffer:
        """Answer the message of a method, `scan` or `views`. A call that is repeated while it runs, because its
        connection broke, gets the answer of that run."""
        future: Future[pa.Buffer] = Future()
        running = self._running.setdefault(call, future)
        if running is future:
            try:
                future.set_result(self._answer(method, call, message))
            except BaseException as error:  # noqa: BLE001 - each caller must get every error
                future.set_exception(error)
            finally:
                del self._running[call]
        return running.result()

    def _answer(self, method: str, call: str, message: pa.Buffer) -> pa.Buffer:
        if method == "scan":
            request = decode_scan(message)
            with self.request_lock:
                results = self.scan(request, call)
            return encode_results(results)
        if method == "views":
            ids, version = decode_views_request(message)
            with self.request_lock:
                views = self.views(ids, version, call)
            return encode_views(views)
        raise ShardIndexError(f"a searcher has no method {method[:80]!r}; its methods are scan and views")

    def probe(self, version: int | None = None) -> list[int]:
        with self.request_lock:
            return super().probe(version)


def node_capacities(cpus: float, gpus: float) -> dict[str, NodeCapacity]:
    """Return the capacities of the live nodes that can run a searcher with so many CPUs and GPUs, by id."""
    capacities = {}
    for node in ray.nodes():
        resources = node["Resources"]
        max_searchers = session.num_places(resources.get("CPU", 0), cpus)
        if gpus:
            max_searchers = min(max_searchers, session.num_places(resources.get("GPU", 0), gpus))
        if node["Alive"] and max_searchers:
            memory_bytes = max(float(resources.get("memory", 0)), 1.0)
            capacities[node["NodeID"]] = NodeCapacity(max_searchers, memory_bytes)
    return capacities


def assign_nodes(
    group_bytes: Mapping[int, int],
    node_capacities: Mapping[str, NodeCapacity],
    replicas: int,
    before: Mapping[int, tuple[str, ...]] | None = None,
) -> rendezvous.Placement:
    """Return the nodes of each group's replicas, in order of preference; fewer if a node's capacity is used up, or if
    there are fewer nodes.
    """
    if not node_capacities:
        return dict.fromkeys(group_bytes, ())
    weights = {node: capacity.memory_bytes for node, capacity in node_capacities.items()}
    placement = rendezvous.place(group_bytes, weights, replicas, before)
    free = {node: capacity.max_searchers for node, capacity in node_capacities.items()}
    pairs = [(group, node) for group, nodes in placement.items() for node in nodes]
    pairs.sort(key=lambda pair: pair[1] not in (before or {}).get(pair[0], ()))  # searchers that stay come first
    assigned_pairs = set()
    for group, node in pairs:
        if free[node]:
            free[node] -= 1
            assigned_pairs.add((group, node))
    return {group: tuple(n for n in nodes if (group, n) in assigned_pairs) for group, nodes in placement.items()}


def _new_searcher(task: SearcherTask, resources: ResourcesConfig, node: str | None) -> Any:
    """Create an actor that Ray restarts, on this node while it is alive and has resources, else on any node."""
    strategy: Any = "SPREAD" if node is None else NodeAffinitySchedulingStrategy(node, True, _spill_on_unavailable=True)
    actor_class = _remote(concurrency_groups={"health": 1, "load": 1})(SearcherActor).options(
        num_cpus=resources.cpus_per_searcher,
        num_gpus=resources.gpus_per_searcher,
        max_restarts=-1,
        max_task_retries=0,
        scheduling_strategy=strategy,
    )
    return actor_class.remote(task)


def start_searchers(task: SearcherTask, resources: ResourcesConfig, info: session.ClusterInfo) -> RemoteSearchers:
    """Create the actors for a first version, on the nodes that their groups prefer. Ray restarts them on any node with
    enough resources.

    Raises ResourceError if the cluster has too few resources, ConfigError if TLS does not work with the files of
    `tls_dir`.
    """
    require_valid_tls(resources.tls_dir)
    num_bytes = {entry.shard: entry.num_bytes for entry in task.manifest.shards}
    shards_of = balance_shards(num_bytes, min(resources.searchers, len(num_bytes)))
    count, cpus, gpus = resources.replicas, resources.cpus_per_searcher, resources.gpus_per_searcher
    session.require(info, [session.Need("searchers", len(shards_of) * count, cpus, gpus)])
    sizes = {group: 1 + sum(num_bytes[shard] for shard in shards) for group, shards in enumerate(shards_of)}
    nodes_of = assign_nodes(sizes, node_capacities(cpus, gpus), count)
    groups = [
        [_new_searcher(task, resources, node) for node in (*nodes, *[None] * (count - len(nodes)))]
        for _, nodes in sorted(nodes_of.items())
    ]
    searchers = RemoteSearchers(groups, resources.searcher_queue, resources.searcher_bytes)
    searchers.assign(task.manifest)
    return searchers


class Rebalancer:
    """Moves searchers to the nodes that their groups prefer. Not safe to use from several threads."""

    def __init__(self, searchers: RemoteSearchers, task: SearcherTask, resources: ResourcesConfig) -> None:
        """`task` is that of new searchers."""
        self.searchers = searchers
        self.task = task
        self.resources = resources
        self._nodes: frozenset[str] = frozenset()
        self._failed_moves: set[tuple[int, str]] = set()

    def rebalance(self) -> list[rendezvous.Move]:
        """Move searchers whose groups prefer another node, if nodes joined or left since the last call; return the
        moves.

        Moves none while a searcher does not report its node; the next call tries again.
        """
        capacities = node_capacities(self.resources.cpus_per_searcher, self.resources.gpus_per_searcher)
        if frozenset(capacities) == self._nodes:
            return []
        nodes_of = self._searcher_nodes()
        if nodes_of is None:
            return []
        before = {group: tuple(dict.fromkeys(nodes)) for group, nodes in nodes_of.items()}
        after = assign_nodes(self._bytes(), capacities, self.resources.replicas, before)
        moves = []
        for move in rendezvous.moves(before, after):
            if (move.shard, move.to) not in self._failed_moves and self._move(move, nodes_of[move.shard]):
                moves.append(move)
        self._nodes = frozenset(capacities)
        self._failed_moves = {(group, node) for group, node in self._failed_moves if node in capacities}
        return moves

    def _searcher_nodes(self) -> dict[int, list[str]] | None:
        """Return the node of each searcher, by group; None if one does not answer (it is restarting)."""
        groups = [
            [actor.node.options(concurrency_group="health").remote() for actor in actors]
            for actors in self.searchers.groups
        ]
        try:
            return dict(enumerate(ray.get(refs, timeout=ANSWER_TIMEOUT_S) for refs in groups))
        except (RayError, GetTimeoutError):
            return None

    def _bytes(self) -> dict[int, int]:
        """Return the bytes that each group holds of all open versions, plus one."""
        total: Counter[int] = Counter(dict.fromkeys(range(len(self.searchers.groups)), 1))
        for assignments in list(self.searchers.assignments.values()):
            for group, (manifest, shards) in enumerate(assignments):
                total[group] += sum(entry.num_bytes for entry in manifest.shards if entry.shard in shards)
        return dict(total)

    def _move(self, move: rendezvous.Move, nodes: list[str]) -> bool:
        """Open a group's shards on another node, and replace one of the group's searchers by the new one."""
        group, _, target = move
        shared_nodes = [node for node, count in Counter(nodes).items() if count > 1]
        source = move.source if move.source is not None else next(iter(shared_nodes), None)
        if source is None:
            return False
        number = nodes.index(source)
        began = time.monotonic()
        actor = _new_searcher(self.task, self.resources, target)
        versions: set[int] = set()
        try:
            with translate_ray_errors("moving a searcher"):
                while (old := self._replace_searcher(group, number, actor, versions)) is None:
                    current = dict(self.searchers.assignments)
                    self._open_shards(actor, [current[one][group] for one in current if one not in versions], target)
                    versions |= current.keys()
        except (MvrRayError, RayError) as error:
            log.warning("searcher stays: group=%d node=%s reason=%s", group, source[:8], error)
            self._failed_moves.add((group, target))
            ray.kill(actor)
            return False
        nodes[number] = target
        for version in versions - set(self.searchers.assignments):  # dropped meanwhile
            actor.drop.options(concurrency_group="load").remote(version)
        log.info(
            "searcher moved: group=%d from=%s to=%s seconds=%.1f",
            *(group, source[:8], target[:8], time.monotonic() - began),
        )
        _end(old)
        return True

    def _open_shards(self, actor: Any, assignments: Sequence[ShardAssignment], target: str) -> None:
        """Check the actor's node and memory, open the shards on it, and probe it."""
        node = ray.get(actor.node.options(concurrency_group="health").remote(), timeout=ANSWER_TIMEOUT_S)
        if node != target:
            raise MvrRayError(f"Ray started it on node {node[:8]}, not on {target[:8]}")
        needs: dict[str, int] = {}
        for manifest, shards in assignments:
            needs |= assignment_bytes(manifest, shards)
        memory = ray.get(actor.memory.options(concurrency_group="health").remote(), timeout=ANSWER_TIMEOUT_S)
        require_memory("a moved searcher's shards", [needs], [memory], self.searchers.limit_bytes)
        ray.get(actor.open.options(concurrency_group="load").remote(list(assignments)), timeout=OPEN_TIMEOUT_S)
        ray.get(actor.probe.remote(), timeout=ANSWER_TIMEOUT_S)

    def _replace_searcher(self, group: int, number: int, actor: Any, versions: set[int]) -> Replica | None:
        """Send calls to the new searcher, and return the old one. Return None if `versions`, which the new one has
        opened, are not all: the index may have opened further ones meanwhile.
        """
        with self.searchers.change_lock:
            if not versions or not versions.issuperset(self.searchers.assignments):
                return None
            self.searchers.groups[group][number] = actor
            return self.searchers.dispatcher.replace(group, number, actor)


def _end(old: Replica) -> None:
    end_s = time.monotonic() + DRAIN_S
    while old.waiting and time.monotonic() < end_s:
        time.sleep(_POLL_S)
    ray.kill(old.actor)
    old.close()
