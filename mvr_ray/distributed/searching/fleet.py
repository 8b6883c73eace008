"""Starts the searchers of an index, opens its versions on them, and gives a fleet for each version.

    nodes    searchers run on the nodes that `node_placement` gives them
    place    an unchanged shard stays with the group that holds it, the others go largest first to the lightest group
    load     room is counted, shards are opened beside those in use, and every searcher answers a probe for them
    drop     what no other version names is let go; nobody waits for it

A group is `resources.replicas` actors that hold the same shards; calls go through `dispatch`. `local_searchers` has the
same over one searcher in this process, which needs no Ray.

Shapes: Q queries, D dimension.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import ray

from mvr_ray.config import ResourcesConfig
from mvr_ray.deadline import Deadline
from mvr_ray.distributed import session
from mvr_ray.distributed.ray_errors import translate_ray_errors
from mvr_ray.distributed.searching.dispatch import QUEUE, Dispatcher, ShardRequest
from mvr_ray.distributed.searching.local_searchers import version_name
from mvr_ray.distributed.searching.memory import MemoryUsage, require_memory
from mvr_ray.distributed.searching.messages import (
    ScanRequest,
    ShardFailure,
    ShardResult,
    ShardResults,
    ViewResults,
    ViewsRequest,
    decode_results,
    decode_views,
    encode_scan,
    encode_views_request,
)
from mvr_ray.distributed.searching.node_placement import assign_nodes, new_searcher, node_capacities
from mvr_ray.distributed.searching.searcher import OnPartial, SearcherTask, ShardAssignment, assignment_bytes
from mvr_ray.errors import ResourceError, ShardIndexError
from mvr_ray.store.manifest import Manifest
from mvr_ray.types import FleetCounts, FloatArray

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 3600.0
"""For starting searchers and reading every file of their shards once; an answer's own deadline is much shorter."""
PROBE_TIMEOUT_S = 60.0


class RemoteSearchers:
    """Actors, in groups that hold the same shards."""

    def __init__(self, groups: Sequence[Sequence[Any]], queue: int = QUEUE, limit_bytes: int = 0) -> None:
        self.groups = [list(actors) for actors in groups]
        self.limit_bytes = limit_bytes
        self.placed: dict[int, list[ShardAssignment]] = {}
        """Version -> what each group holds of it."""
        self.changing = threading.Lock()
        self._drops: list[Any] = []
        self.dispatcher = Dispatcher(self.groups, self._open_again, queue)

    @classmethod
    def start(cls, task: SearcherTask, resources: ResourcesConfig, info: session.ClusterInfo) -> "RemoteSearchers":
        """Make the actors for a first version, on the nodes that their groups prefer (`seats`); they restart by
        themselves, wherever there is room.

        Raises ResourceError where the cluster has no place for them.
        """
        num_bytes = {entry.shard: entry.num_bytes for entry in task.manifest.shards}
        placed = share_out(num_bytes, resources.searchers)
        count, cpus, gpus = resources.replicas, resources.cpus_per_searcher, resources.gpus_per_searcher
        session.require(info, [session.Need("searchers", len(placed) * count, cpus, gpus)])
        sizes = {group: 1 + sum(num_bytes[shard] for shard in shards) for group, shards in enumerate(placed)}
        nodes = assign_nodes(sizes, node_capacities(cpus, gpus), count)
        groups = [
            [
                new_searcher(task._replace(shards=shards), resources, node)
                for node in (*nodes[group], *[None] * (count - len(nodes[group])))
            ]
            for group, shards in enumerate(placed)
        ]
        searchers = cls(groups, resources.searcher_queue, resources.searcher_bytes)
        searchers.placed[task.manifest.version] = [ShardAssignment(task.manifest, shards) for shards in placed]
        return searchers

    @property
    def actors(self) -> list[Any]:
        return [actor for actors in self.groups for actor in actors]

    def fleet(self, manifest: Manifest) -> "RemoteFleet":
        if manifest.version not in self.placed:
            held = {
                entry.digest: group
                for assignments in list(self.placed.values())
                for group, (of, shards) in enumerate(assignments)
                for entry in of.shards
                if entry.shard in shards
            }
            placed = place(manifest, held, len(self.groups))
            self.placed[manifest.version] = [ShardAssignment(manifest, shards) for shards in placed]
        return RemoteFleet(self, self.placed[manifest.version])

    def load(self, manifest: Manifest) -> "RemoteFleet":
        with self.changing:
            fleet = self.fleet(manifest)
            try:
                self._undone(PROBE_TIMEOUT_S)
                usages = self._all(lambda actor, _: actor.memory.options(concurrency_group="health").remote(), manifest)
                wanted = [assignment_bytes(manifest, assignment.shards) for assignment in fleet.of_actors]
                require_memory(version_name(manifest), wanted, [MemoryUsage(*one) for one in usages], self.limit_bytes)
                fleet.open(max_task_retries=0)
                self._all(lambda actor, _: actor.probe.remote(manifest.version), manifest)
            except BaseException:  # nothing stays open, after Ctrl-C either
                self.drop(manifest.version)
                raise
            return fleet

    def drop(self, version: int) -> None:
        self.placed.pop(version, None)
        drop = {"concurrency_group": "load", "max_task_retries": -1}
        self._drops = [*self._undone(0.0), *(actor.drop.options(**drop).remote(version) for actor in self.actors)]

    def counts(self) -> FleetCounts:
        return self.dispatcher.counts()

    def stop(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        self.dispatcher.close()

    def _undone(self, timeout_s: float) -> list[Any]:
        """Drops that searchers have not done by then; what they let go is counted as held until they have."""
        drops = list(self._drops)
        return ray.wait(drops, num_returns=len(drops), timeout=timeout_s)[1] if drops else []

    def _all(self, send: Callable[[Any, int], Any], manifest: Manifest) -> list[Any]:
        """What every searcher answers, which must be soon."""
        try:
            with translate_ray_errors(f"opening {version_name(manifest)}"):
                waiting = [send(actor, group) for group, actors in enumerate(self.groups) for actor in actors]
                return ray.get(waiting, timeout=PROBE_TIMEOUT_S)
        except TimeoutError:
            raise ResourceError(
                f"{version_name(manifest)} not opened: not all {len(self.actors)} searchers answered within "
                f"{PROBE_TIMEOUT_S:g} s; the live version goes on, try again when they do"
            ) from None

    def _open_again(self, group: int, actor: Any) -> Any:
        """Sends the call that an actor answers when it is there (again) and holds its shards of every version."""
        assignments = [placed[group] for placed in list(self.placed.values())]
        return actor.open.options(concurrency_group="load", max_task_retries=-1).remote(assignments)


class RemoteFleet:
    """One version on the actors. May be sent to other processes, which then ask the same actors."""

    def __init__(self, searchers: RemoteSearchers, assignments: Sequence[ShardAssignment]) -> None:
        """`assignments` of each group."""
        self.searchers = searchers
        self.assignments = list(assignments)
        self.version = self.assignments[0].manifest.version

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_fleet, (self.searchers.groups, self.searchers.dispatcher.queue, self.assignments)

    @property
    def actors(self) -> list[Any]:
        return self.searchers.actors

    @property
    def shards(self) -> list[tuple[int, ...]]:
        """What each actor holds."""
        return [assignment.shards for assignment in self.of_actors]

    @property
    def of_actors(self) -> list[ShardAssignment]:
        return [assignment for assignment, actors in zip(self.assignments, self.searchers.groups) for _ in actors]

    def ready(self) -> None:
        dispatcher = self.searchers.dispatcher
        replicas = [replica for group in dispatcher.groups for replica in group]
        while any(replica.killed == born for replica, born in zip(replicas, self.open(max_task_retries=-1))):
            log.info("a searcher that hung has not ended yet")
        for replica in replicas:
            dispatcher.up(replica)

    def open(self, max_task_retries: int) -> list[str]:
        """Return when every searcher has opened its shards, with the lives that did; without retries a death is an
        error.
        """
        opened = [
            actor.open.options(concurrency_group="load", max_task_retries=max_task_retries).remote([assignment])
            for actor, assignment in zip(self.actors, self.of_actors)
        ]
        done, _ = ray.wait(opened, num_returns=len(opened), timeout=OPEN_TIMEOUT_S)
        if len(done) < len(opened):
            raise ShardIndexError(
                f"the {len(self.actors)} searchers did not open their shards within {OPEN_TIMEOUT_S:g} s; "
                f"see whether the cluster has room for them (mvr-ray doctor)"
            )
        with translate_ray_errors("opening the index"):
            return ray.get(opened)

    def fan_out(
        self, request: ScanRequest, deadline: Deadline, *, again: bool = False, on_partial: OnPartial | None = None
    ) -> ShardResults:
        """Raises OverloadedError where too many calls wait; a further round (`again`) is always let in."""
        requests = {
            group: ShardRequest("scan", encode_scan(request._replace(shards=here)))
            for group, here in self._by_group(request.shards).items()
        }
        hear = (lambda message: on_partial(decode_results(message))) if on_partial else None
        messages, failures = self._gather(requests, request.shards, deadline, again, hear)
        answers = [decode_results(message) for message in messages]
        failures += [one for answer in answers for one in answer.failures]
        return ShardResults([one for answer in answers for one in answer.results], failures)

    def exact(self, queries_QD: FloatArray, k: int, deadline: Deadline) -> list[ShardResult]:
        """The true best k of every shard, by exhaustive search beside the searches that wait in the queues."""
        asked = zip(self.assignments, self.searchers.groups)
        waiting = [
            actors[0].exact.options(concurrency_group="load").remote(queries_QD, k, assignment.shards, self.version)
            for assignment, actors in asked
        ]
        with translate_ray_errors("searching exactly"):
            return [one for answers in ray.get(waiting, timeout=deadline.left_s) for one in answers]

    def views(self, ids: Mapping[int, Sequence[str]], deadline: Deadline) -> ViewResults:
        requests = {}
        for group, here in self._by_group(list(ids)).items():
            request = ViewsRequest({shard: ids[shard] for shard in here}, self.version)
            requests[group] = ShardRequest("views", encode_views_request(request))
        messages, failures = self._gather(requests, list(ids), deadline, False)
        answers = [decode_views(message) for message in messages]
        failures += [one for answer in answers for one in answer.failures]
        return ViewResults({name: one for answer in answers for name, one in answer.views.items()}, failures)

    def _by_group(self, shards: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """These shards by the group that holds them."""
        wanted = set(shards)
        here = {group: tuple(s for s in held if s in wanted) for group, (_, held) in enumerate(self.assignments)}
        return {group: own for group, own in here.items() if own}

    def _gather(
        self,
        requests: Mapping[int, ShardRequest],
        shards: Sequence[int],
        deadline: Deadline,
        again: bool,
        hear: Callable[[pa.Buffer], None] | None = None,
    ) -> tuple[list[pa.Buffer], list[ShardFailure]]:
        """The messages of the groups that answered, and which of the shards did not."""
        gather = self.searchers.dispatcher.gather
        answers, silent = gather(requests, deadline, is_admitted=again, on_partial=hear)
        here = self._by_group(shards)
        failures = [ShardFailure(here[group], state) for group, state in silent.items()]
        return [answers[group] for group in sorted(answers)], failures

    def health(self, timeout_s: float) -> list[int]:
        """The shards that are open now, as far as their searchers say so in time; asked beside running searches."""
        waiting = [actor.health.options(concurrency_group="health").remote() for actor in self.actors]
        done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=timeout_s)
        digests = {digest for ref in done for digest in _digests_of(ref)}
        return sorted(entry.shard for entry in self.assignments[0].manifest.shards if entry.digest in digests)


def share_out(num_bytes: Mapping[int, int], groups: int) -> list[tuple[int, ...]]:
    """Shards over at most `groups` holders, largest first to the lightest one; none without a shard."""
    held: list[list[int]] = [[] for _ in range(min(groups, len(num_bytes)))]
    loads = [0] * len(held)
    for shard in sorted(num_bytes, key=lambda shard: (-num_bytes[shard], shard)):
        _to_lightest(shard, num_bytes[shard], held, loads)
    return [tuple(sorted(shards)) for shards in held]


def place(manifest: Manifest, holders: Mapping[str, int], groups: int) -> list[tuple[int, ...]]:
    """A version's shards over the groups: where `holders` has them (by digest) already, else to the lightest."""
    placed: list[list[int]] = [[] for _ in range(groups)]
    loads = [0] * groups
    moving = []
    for entry in manifest.shards:
        if entry.digest in holders:
            placed[holders[entry.digest]].append(entry.shard)
            loads[holders[entry.digest]] += entry.num_bytes + 1
        else:
            moving.append(entry)
    for entry in sorted(moving, key=lambda entry: (-entry.num_bytes, entry.shard)):
        _to_lightest(entry.shard, entry.num_bytes, placed, loads)
    return [tuple(sorted(shards)) for shards in placed]


def _to_lightest(shard: int, num_bytes: int, holders: list[list[int]], loads: list[int]) -> None:
    lightest = loads.index(min(loads))
    holders[lightest].append(shard)
    loads[lightest] += num_bytes + 1


def _restore_fleet(groups: Sequence[Sequence[Any]], queue: int, assignments: Sequence[ShardAssignment]) -> RemoteFleet:
    searchers = RemoteSearchers(groups, queue)
    searchers.placed[assignments[0].manifest.version] = list(assignments)
    return RemoteFleet(searchers, assignments)


def _digests_of(ref: Any) -> list[str]:
    try:
        return ray.get(ref)
    except ray.exceptions.RayActorError:
        return []
