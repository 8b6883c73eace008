"""Searchers as a whole: they open versions beside each other, and give a fleet for each.

    seats    searchers run on the nodes that `seats` gives them
    place    an unchanged shard stays with the group that holds it, the others go largest first to the lightest group
    load     room is counted, shards are opened beside those in use, and every searcher answers a canary for them
    drop     what no other version names is let go; nobody waits for it

A group is `resources.replicas` actors that hold the same shards; calls go through `scatter`. The same over one searcher
in this process needs no Ray.

Shapes: Q queries, D dimension.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import ray

from mvr_ray.config import ResourcesConfig
from mvr_ray.distributed import session
from mvr_ray.distributed.failures import own_errors
from mvr_ray.distributed.searching.room import Room, require_room
from mvr_ray.distributed.searching.scatter import QUEUE, Ask, Scatter
from mvr_ray.distributed.searching.searchers import (
    Asked,
    ExactFleet,
    Fleet,
    Gathered,
    GatheredViews,
    Hear,
    Holding,
    LocalFleet,
    SearcherTask,
    ShardFound,
    ShardSearcher,
    Unanswered,
    Wanted,
    gathered,
    gathered_views,
    shard_keys,
)
from mvr_ray.distributed.searching.seats import new_searcher, seated, seats
from mvr_ray.errors import ResourceError, ShardIndexError
from mvr_ray.store.manifest import Manifest
from mvr_ray.types import FleetCounts, FloatArray

log = logging.getLogger(__name__)

INLINE_BYTES = 100_000
OPEN_TIMEOUT_S = 3600.0
"""For starting searchers and reading every file of their shards once; an answer's own deadline is much shorter."""
CANARY_TIMEOUT_S = 60.0


class Searchers(Protocol):
    """Holders of versions of one index."""

    def fleet(self, described: Manifest) -> ExactFleet:
        """Of a version whose shards are opened when first asked for."""
        ...

    def load(self, described: Manifest) -> Fleet:
        """Of a version whose shards are all open and have answered a canary.

        Raises ResourceError where it has no room or a searcher died, StorageError where a file is damaged; then
        nothing of it stays open.
        """
        ...

    def drop(self, version: int) -> None: ...

    def counts(self) -> FleetCounts: ...

    def stop(self) -> None: ...


class LocalSearchers:
    """One searcher in this process."""

    def __init__(self, task: SearcherTask, limit_bytes: int = 0) -> None:
        self.task = task
        self.limit_bytes = limit_bytes
        self.searcher = ShardSearcher(task)

    def fleet(self, described: Manifest) -> LocalFleet:
        shards = tuple(entry.shard for entry in described.shards)
        return LocalFleet(self.task._replace(manifest=described, shards=shards), self.searcher)

    def load(self, described: Manifest) -> LocalFleet:
        fleet = self.fleet(described)
        keys = shard_keys(described)
        bytes_of = {keys[entry.shard]: entry.num_bytes for entry in described.shards}
        require_room(told(described), [bytes_of], [self.searcher.room()], self.limit_bytes)
        try:
            fleet.ready()
            self.searcher.canary(described.version)
        except BaseException:
            self.drop(described.version)
            raise
        return fleet

    def drop(self, version: int) -> None:
        self.searcher.drop(version)

    def counts(self) -> FleetCounts:
        return FleetCounts()

    def stop(self) -> None:
        pass


class RemoteSearchers:
    """Actors, in groups that hold the same shards."""

    def __init__(self, groups: Sequence[Sequence[Any]], queue: int = QUEUE, limit_bytes: int = 0) -> None:
        self.groups = [list(actors) for actors in groups]
        self.limit_bytes = limit_bytes
        self.placed: dict[int, list[Holding]] = {}
        """Version -> what each group holds of it."""
        self.changing = threading.Lock()
        self._drops: list[Any] = []
        self.scatter = Scatter(self.groups, self._open_again, queue)

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
        nodes = seated(sizes, seats(cpus, gpus), count)
        groups = [
            [
                new_searcher(task._replace(shards=shards), resources, node)
                for node in (*nodes[group], *[None] * (count - len(nodes[group])))
            ]
            for group, shards in enumerate(placed)
        ]
        searchers = cls(groups, resources.searcher_queue, resources.searcher_bytes)
        searchers.placed[task.manifest.version] = [Holding(task.manifest, shards) for shards in placed]
        return searchers

    @property
    def actors(self) -> list[Any]:
        return [actor for actors in self.groups for actor in actors]

    def fleet(self, described: Manifest) -> "RemoteFleet":
        if described.version not in self.placed:
            held = {
                entry.digest: group
                for holdings in list(self.placed.values())
                for group, (of, shards) in enumerate(holdings)
                for entry in of.shards
                if entry.shard in shards
            }
            placed = place(described, held, len(self.groups))
            self.placed[described.version] = [Holding(described, shards) for shards in placed]
        return RemoteFleet(self, self.placed[described.version])

    def load(self, described: Manifest) -> "RemoteFleet":
        with self.changing:
            fleet = self.fleet(described)
            try:
                self._undone(CANARY_TIMEOUT_S)
                rooms = self._all(lambda actor, _: actor.room.options(concurrency_group="health").remote(), described)
                keys, bytes_of = shard_keys(described), {entry.shard: entry.num_bytes for entry in described.shards}
                wanted = [{keys[shard]: bytes_of[shard] for shard in holding.shards} for holding in fleet.of_actors]
                require_room(told(described), wanted, [Room(*room) for room in rooms], self.limit_bytes)
                fleet.open(max_task_retries=0)
                self._all(lambda actor, _: actor.canary.remote(described.version), described)
            except BaseException:
                self.drop(described.version)
                raise
            return fleet

    def drop(self, version: int) -> None:
        self.placed.pop(version, None)
        drop = {"concurrency_group": "load", "max_task_retries": -1}
        self._drops = [*self._undone(0.0), *(actor.drop.options(**drop).remote(version) for actor in self.actors)]

    def counts(self) -> FleetCounts:
        return self.scatter.counts()

    def stop(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        self.scatter.close()

    def _undone(self, timeout_s: float) -> list[Any]:
        """Drops that searchers have not done by then; what they let go is counted as held until they have."""
        drops = list(self._drops)
        return ray.wait(drops, num_returns=len(drops), timeout=timeout_s)[1] if drops else []

    def _all(self, send: Callable[[Any, int], Any], described: Manifest) -> list[Any]:
        """What every searcher answers, which must be soon."""
        try:
            with own_errors(f"opening {told(described)}"):
                waiting = [send(actor, group) for group, actors in enumerate(self.groups) for actor in actors]
                return ray.get(waiting, timeout=CANARY_TIMEOUT_S)
        except TimeoutError:
            raise ResourceError(
                f"{told(described)} not opened: not all {len(self.actors)} searchers answered within "
                f"{CANARY_TIMEOUT_S:g} s; the live version goes on, try again when they do"
            ) from None

    def _open_again(self, group: int, actor: Any) -> Any:
        """Sends the call that an actor answers when it is there (again) and holds its shards of every version."""
        holdings = [placed[group] for placed in list(self.placed.values())]
        return actor.open.options(concurrency_group="load", max_task_retries=-1).remote(holdings)


class RemoteFleet:
    """One version on the actors. May be sent to other processes, which then ask the same actors."""

    def __init__(self, searchers: RemoteSearchers, holdings: Sequence[Holding]) -> None:
        """`holdings` of each group."""
        self.searchers = searchers
        self.holdings = list(holdings)
        self.version = self.holdings[0].manifest.version

    def __reduce__(self) -> tuple[Any, ...]:
        return _rejoined, (self.searchers.groups, self.searchers.scatter.queue, self.holdings)

    @property
    def actors(self) -> list[Any]:
        return self.searchers.actors

    @property
    def shards(self) -> list[tuple[int, ...]]:
        """What each actor holds."""
        return [holding.shards for holding in self.of_actors]

    @property
    def of_actors(self) -> list[Holding]:
        return [holding for holding, actors in zip(self.holdings, self.searchers.groups) for _ in actors]

    def ready(self) -> None:
        scatter = self.searchers.scatter
        replicas = [replica for group in scatter.groups for replica in group]
        while any(replica.killed == born for replica, born in zip(replicas, self.open(max_task_retries=-1))):
            log.info("a searcher that hung has not ended yet")
        for replica in replicas:
            scatter.up(replica)

    def open(self, max_task_retries: int) -> list[str]:
        """Return when every searcher has opened its shards, with the lives that did; without retries a death is an
        error.
        """
        opened = [
            actor.open.options(concurrency_group="load", max_task_retries=max_task_retries).remote([holding])
            for actor, holding in zip(self.actors, self.of_actors)
        ]
        done, _ = ray.wait(opened, num_returns=len(opened), timeout=OPEN_TIMEOUT_S)
        if len(done) < len(opened):
            raise ShardIndexError(
                f"the {len(self.actors)} searchers did not open their shards within {OPEN_TIMEOUT_S:g} s; "
                f"see whether the cluster has room for them (mvr-ray doctor)"
            )
        with own_errors("opening the index"):
            return ray.get(opened)

    def ask(self, queries_QD: FloatArray, k: int, asked: Asked, timeout_s: float, hear: Hear | None = None) -> Gathered:
        """OverloadedError where too many calls wait; a second round, which names queries, is let in always."""
        again = any(positions is not None for positions in asked.values())
        shipped = lru_cache(1)(lambda: ray.put(queries_QD) if queries_QD.nbytes > INLINE_BYTES else queries_QD)

        def ask(here: Asked) -> Ask:
            args = (k, here, self.version)
            return Ask("search", (queries_QD, *args), lambda actor, call: actor.search.remote(shipped(), *args, call))

        answers, silent = self._gathered(
            asked,
            ask,
            timeout_s,
            again,
            (lambda parts: hear(gathered(parts, []))) if hear else None,
        )
        return gathered(answers, silent)

    def exact(self, queries_QD: FloatArray, k: int, timeout_s: float) -> list[ShardFound]:
        """The true best k of every shard, by exhaustive search beside the searches that wait in the queues."""
        asked = zip(self.holdings, self.searchers.groups)
        waiting = [
            actors[0].exact.options(concurrency_group="load").remote(queries_QD, k, holding.shards, self.version)
            for holding, actors in asked
        ]
        with own_errors("searching exactly"):
            return [one for answers in ray.get(waiting, timeout=timeout_s) for one in answers]

    def views(self, wanted: Wanted, timeout_s: float) -> GatheredViews:
        answers, silent = self._gathered(
            wanted,
            lambda here: Ask(
                "views", (here, self.version), lambda actor, call: actor.views.remote(here, self.version, call)
            ),
            timeout_s,
            False,
        )
        return gathered_views(answers, silent)

    def _gathered(
        self,
        asked: Mapping[int, Any],
        ask: Callable[[dict[int, Any]], Ask],
        timeout_s: float,
        admitted: bool,
        hear: Callable[[list[Any]], None] | None = None,
    ) -> tuple[list[Any], list[Unanswered]]:
        here = {
            group: parts
            for group, (_, shards) in enumerate(self.holdings)
            if (parts := {shard: asked[shard] for shard in shards if shard in asked})
        }
        requests = {group: ask(parts) for group, parts in here.items()}
        answers, silent = self.searchers.scatter.gather(requests, timeout_s, admitted=admitted, hear=hear)
        unanswered = [Unanswered(tuple(here[group]), state) for group, state in silent.items()]
        return [one for group in sorted(answers) for one in answers[group]], unanswered

    def health(self, timeout_s: float) -> list[int]:
        """The shards that are open now, as far as their searchers say so in time; asked beside running searches."""
        waiting = [actor.health.options(concurrency_group="health").remote() for actor in self.actors]
        done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=timeout_s)
        digests = {digest for ref in done for digest in _said(ref)}
        return sorted(entry.shard for entry in self.holdings[0].manifest.shards if entry.digest in digests)


def share_out(num_bytes: Mapping[int, int], groups: int) -> list[tuple[int, ...]]:
    """Shards over at most `groups` holders, largest first to the lightest one; none without a shard."""
    held: list[list[int]] = [[] for _ in range(min(groups, len(num_bytes)))]
    loads = [0] * len(held)
    for shard in sorted(num_bytes, key=lambda shard: (-num_bytes[shard], shard)):
        _to_lightest(shard, num_bytes[shard], held, loads)
    return [tuple(sorted(shards)) for shards in held]


def place(described: Manifest, held: Mapping[str, int], groups: int) -> list[tuple[int, ...]]:
    """A version's shards over the groups: where they are `held` (by digest) already, else to the lightest."""
    placed: list[list[int]] = [[] for _ in range(groups)]
    loads = [0] * groups
    moving = []
    for entry in described.shards:
        if entry.digest in held:
            placed[held[entry.digest]].append(entry.shard)
            loads[held[entry.digest]] += entry.num_bytes + 1
        else:
            moving.append(entry)
    for entry in sorted(moving, key=lambda entry: (-entry.num_bytes, entry.shard)):
        _to_lightest(entry.shard, entry.num_bytes, placed, loads)
    return [tuple(sorted(shards)) for shards in placed]


def told(described: Manifest) -> str:
    return f"index {described.index!r} version {described.version}"


def _to_lightest(shard: int, num_bytes: int, held: list[list[int]], loads: list[int]) -> None:
    lightest = loads.index(min(loads))
    held[lightest].append(shard)
    loads[lightest] += num_bytes + 1


def _rejoined(groups: Sequence[Sequence[Any]], queue: int, holdings: Sequence[Holding]) -> RemoteFleet:
    searchers = RemoteSearchers(groups, queue)
    searchers.placed[holdings[0].manifest.version] = list(holdings)
    return RemoteFleet(searchers, holdings)


def _said(ref: Any) -> list[str]:
    try:
        return ray.get(ref)
    except ray.exceptions.RayActorError:
        return []
