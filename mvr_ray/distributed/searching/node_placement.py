"""Places searcher groups on nodes by weighted rendezvous, and moves them when nodes join or leave.

    start    the replicas of a group run on its first choices among the nodes, each on another one
    leaves   Ray starts the lost searchers elsewhere; no other one moves, unless its node is then over its bound
    joins    a group that prefers the new node is opened there and answers a probe; the old searcher ends when its last
             call has

The laws are those of `rendezvous`: holders are nodes, weighted by their memory, and what is placed is a group with all
its shards, so only the shards of that node are read again. A node with too few CPUs for its
searchers leaves the rest to Ray, which spreads them.
"""

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mvr_ray import logs
from mvr_ray.config import ResourcesConfig
from mvr_ray.distributed import session
from mvr_ray.distributed.periodic import run_periodically
from mvr_ray.distributed.ray_errors import translate_ray_errors
from mvr_ray.distributed.searching import rendezvous
from mvr_ray.distributed.searching.dispatch import Dispatcher, Replica
from mvr_ray.distributed.searching.memory import MemoryUsage, require_memory
from mvr_ray.distributed.searching.messages import (
    decode_scan,
    decode_views_request,
    encode_results,
    encode_views,
)
from mvr_ray.distributed.searching.scrubber import Scrubber
from mvr_ray.distributed.searching.searcher import (
    SearcherTask,
    ShardAssignment,
    ShardSearcher,
    assignment_bytes,
)
from mvr_ray.distributed.searching.transport import FairLock, SearcherAddress, SearcherServer
from mvr_ray.errors import MvrRayError, ShardIndexError

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 3600.0
ANSWER_TIMEOUT_S = 30.0
DRAIN_S = 60.0
"""A searcher that was replaced is ended when its calls have ended, or after so long."""
LOOK_S = 5.0
_POLL_S = 0.02
_remote: Any = ray.remote


class NodeCapacity(NamedTuple):
    """What one node offers to searchers: how many it has CPUs and GPUs for, and its memory."""

    places: int
    memory_bytes: float


class SearcherActor(ShardSearcher):
    """A searcher that is an actor: answers messages over Flight and by Ray, one at a time whichever way they came.

    It knows where it is, and its log is read by machines.
    """

    def __init__(self, task: SearcherTask) -> None:
        logs.to_stderr()
        super().__init__(task)
        self.turn = FairLock()
        self._server: SearcherServer | None = None
        self._scrubbing = ExitStack()
        self._scrubbing.enter_context(Scrubber(self, task.scrub_bytes_s).running())
        log.info("searcher started: pid=%d born=%s", os.getpid(), self.born)

    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()

    def endpoint(self) -> SearcherAddress:
        """Where it listens, from the first time that a caller asks."""
        if self._server is None:
            node = next(node for node in ray.nodes() if node["NodeID"] == self.node())
            host = "127.0.0.1" if session.PRIVATE_LABEL in node["Labels"] else node["NodeManagerAddress"]
            self._server = SearcherServer(self.handle, host, self.task.tls_dir)
        return self._server.endpoint

    def handle(self, method: str, call: str, message: pa.Buffer) -> pa.Buffer:
        """Answer the message of a method, `scan` or `views`."""
        if method == "scan":
            request = decode_scan(message)
            with self.turn:
                results = self.scan(request, call)
            return encode_results(results, len(request.queries_QD))
        if method == "views":
            ids, version = decode_views_request(message)
            with self.turn:
                views = self.views(ids, version, call)
            return encode_views(views)
        raise ShardIndexError(f"a searcher has no method {method[:80]!r}; scan and views are there")

    def probe(self, version: int | None = None) -> list[int]:
        with self.turn:
            return super().probe(version)


class Groups(Protocol):
    """Searchers in groups, and what they hold."""

    groups: list[list[Any]]
    placed: dict[int, list[ShardAssignment]]
    dispatcher: Dispatcher
    limit_bytes: int
    changing: threading.Lock
    """Held while a version is opened, so while `placed` says more than searchers hold."""


def node_capacities(cpus: float, gpus: float) -> dict[str, NodeCapacity]:
    """The live nodes that have room for a searcher of so many CPUs and GPUs, by id."""
    found = {}
    for node in ray.nodes():
        has = node["Resources"]
        fits = [int(has.get(name, 0) // want) for name, want in (("CPU", cpus), ("GPU", gpus)) if want > 0]
        if node["Alive"] and min(fits, default=1) > 0:
            found[node["NodeID"]] = NodeCapacity(min(fits, default=1), max(float(has.get("memory", 0)), 1.0))
    return found


def assign_nodes(
    group_bytes: Mapping[int, int],
    node_capacities: Mapping[str, NodeCapacity],
    replicas: int,
    before: Mapping[int, tuple[str, ...]] | None = None,
) -> rendezvous.Placement:
    """Group -> the nodes of its replicas, in order of preference; fewer where a node has no place left, or where
    there are fewer nodes.
    """
    if not node_capacities:
        return dict.fromkeys(group_bytes, ())
    weights = {node: seat.memory_bytes for node, seat in node_capacities.items()}
    placed = rendezvous.place(group_bytes, weights, replicas, before)
    left = {node: seat.places for node, seat in node_capacities.items()}
    taken: dict[int, list[str]] = {group: [] for group in placed}
    for stays in (True, False):  # who is there already has the first claim to its node's places
        for group, nodes in placed.items():
            for node in nodes:
                if (node in (before or {}).get(group, ())) is stays and left[node]:
                    left[node] -= 1
                    taken[group].append(node)
    return {group: tuple(node for node in nodes if node in taken[group]) for group, nodes in placed.items()}


def new_searcher(task: SearcherTask, resources: ResourcesConfig, node: str | None) -> Any:
    """An actor that restarts by itself, on this node as long as that is there and has room, else wherever there is."""
    where: Any = "SPREAD" if node is None else NodeAffinitySchedulingStrategy(node, True, _spill_on_unavailable=True)
    made = _remote(concurrency_groups={"health": 1, "load": 1})(SearcherActor).options(
        num_cpus=resources.cpus_per_searcher,
        num_gpus=resources.gpus_per_searcher,
        max_restarts=-1,
        max_task_retries=0,
        scheduling_strategy=where,
    )
    return made.remote(task)


class Rebalancer:
    """Brings searchers to the nodes that their groups prefer, one look after the other."""

    def __init__(self, searchers: Groups, task: SearcherTask, resources: ResourcesConfig) -> None:
        """`task` is what new searchers are made of."""
        self.searchers = searchers
        self.task = task
        self.resources = resources
        self._seen: frozenset[str] = frozenset()
        self._failed: set[tuple[int, str]] = set()

    def look(self) -> list[rendezvous.Move]:
        """Where nodes came or went since the last look: move who prefers another one; gives the moves that were made.

        While a searcher does not say where it is, nobody moves; the next look tries again.
        """
        own = node_capacities(self.resources.cpus_per_searcher, self.resources.gpus_per_searcher)
        if frozenset(own) == self._seen:
            return []
        there = self._nodes()
        if there is None:
            return []
        before = {group: tuple(dict.fromkeys(nodes)) for group, nodes in there.items()}
        after = assign_nodes(self._bytes(), own, self.resources.replicas, before)
        made = []
        for move in rendezvous.moves(before, after):
            if (move.shard, move.to) not in self._failed and self._move(move, there[move.shard]):
                made.append(move)
        self._seen = frozenset(own)
        self._failed = {(group, node) for group, node in self._failed if node in own}
        return made

    def running(self, every_s: float = LOOK_S) -> AbstractContextManager[None]:
        """Looks every so many seconds, in a thread, until the block ends."""

        def look() -> float:
            try:
                self.look()
            except RayError as error:
                log.warning("nodes not looked at: %s", str(error).partition("\n")[0])
            return every_s

        return run_periodically(look, every_s, "mvr-rebalancer")

    def _nodes(self) -> dict[int, list[str]] | None:
        """The node of each searcher, by group; None where one does not say (it is starting again)."""
        waiting = [
            [actor.node.options(concurrency_group="health").remote() for actor in actors]
            for actors in self.searchers.groups
        ]
        try:
            return dict(enumerate(ray.get(refs, timeout=ANSWER_TIMEOUT_S) for refs in waiting))
        except (RayError, GetTimeoutError):
            return None

    def _bytes(self) -> dict[int, int]:
        """What each group holds of all versions that are open, and at least something."""
        total: Counter[int] = Counter(dict.fromkeys(range(len(self.searchers.groups)), 1))
        for assignments in list(self.searchers.placed.values()):
            for group, (manifest, shards) in enumerate(assignments):
                total[group] += sum(entry.num_bytes for entry in manifest.shards if entry.shard in shards)
        return dict(total)

    def _move(self, move: rendezvous.Move, nodes: list[str]) -> bool:
        """Open a group's shards on another node and put that searcher in the place of one of the group's."""
        group, _, target = move
        doubled = [node for node, count in Counter(nodes).items() if count > 1]
        leaves = move.source if move.source is not None else next(iter(doubled), None)
        if leaves is None:
            return False
        number = nodes.index(leaves)
        began = time.monotonic()
        actor = new_searcher(self.task, self.resources, target)
        opened: set[int] = set()
        try:
            with translate_ray_errors("moving a searcher"):
                while (old := self._replace_searcher(group, number, actor, opened)) is None:
                    placed = dict(self.searchers.placed)
                    self._open_shards(
                        actor, [placed[version][group] for version in placed if version not in opened], target
                    )
                    opened |= placed.keys()
        except (MvrRayError, RayError) as error:
            log.warning("searcher stays: group=%d node=%s reason=%s", group, leaves[:8], error)
            self._failed.add((group, target))
            ray.kill(actor)
            return False
        nodes[number] = target
        for version in opened - set(self.searchers.placed):  # dropped meanwhile
            actor.drop.options(concurrency_group="load").remote(version)
        log.info(
            "searcher moved: group=%d from=%s to=%s seconds=%.1f",
            *(group, leaves[:8], target[:8], time.monotonic() - began),
        )
        _end(old)
        return True

    def _open_shards(self, actor: Any, assignments: Sequence[ShardAssignment], target: str) -> None:
        """Return when it is where it shall be, has room for the shards, has opened them and answers a search."""
        node = ray.get(actor.node.options(concurrency_group="health").remote(), timeout=ANSWER_TIMEOUT_S)
        if node != target:
            raise MvrRayError(f"Ray started it on node {node[:8]}, not on {target[:8]}")
        bytes_of: dict[str, int] = {}
        for manifest, shards in assignments:
            bytes_of |= assignment_bytes(manifest, shards)
        room = MemoryUsage(
            *ray.get(actor.memory.options(concurrency_group="health").remote(), timeout=ANSWER_TIMEOUT_S)
        )
        require_memory("a moved searcher's shards", [bytes_of], [room], self.searchers.limit_bytes)
        ray.get(actor.open.options(concurrency_group="load").remote(list(assignments)), timeout=OPEN_TIMEOUT_S)
        ray.get(actor.probe.remote(), timeout=ANSWER_TIMEOUT_S)

    def _replace_searcher(self, group: int, number: int, actor: Any, versions: set[int]) -> Replica | None:
        """Send calls to the new searcher from now on, and return the old one. None where `versions`, which the new one
        opened, are not all: others may have come meanwhile.
        """
        with self.searchers.changing:
            if not versions or not versions.issuperset(self.searchers.placed):
                return None
            self.searchers.groups[group][number] = actor
            return self.searchers.dispatcher.replace(group, number, actor)


def _end(old: Replica) -> None:
    until = time.monotonic() + DRAIN_S
    while old.waiting and time.monotonic() < until:
        time.sleep(_POLL_S)
    ray.kill(old.actor)
    old.close()
