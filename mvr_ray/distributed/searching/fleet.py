"""Opens the versions of an index on searchers in actors, and searches them there.

    assign   an unchanged shard stays with the group that holds it, a changed one with that of its number in the newest
             version over as many shards, whose files it shares; the others go largest first to the lightest group
    load     check the memory, open shards beside those in use, and probe every searcher for them
    drop     release in the background what no other version names

A group is `resources.replicas` actors that hold the same shards (`node_placement` starts them); calls go through
`dispatch`. `searcher.LocalSearchers` has the same methods for one searcher in this process, without Ray.

Shapes: Q queries, D dimension.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import ray

from mvr_ray.deadline import Deadline
from mvr_ray.distributed.cluster.ray_errors import translate_ray_errors
from mvr_ray.distributed.cluster.ray_internals import current_session
from mvr_ray.distributed.searching.dispatch import QUEUE, Dispatcher
from mvr_ray.distributed.searching.memory import require_memory
from mvr_ray.distributed.searching.messages import (
    ScanRequest,
    ShardFailure,
    ShardResult,
    ShardResults,
    ViewResults,
    decode_results,
    decode_views,
    encode_scan,
    encode_views_request,
)
from mvr_ray.distributed.searching.rendezvous import balance_shards
from mvr_ray.distributed.searching.searcher import OnPartial, ShardAssignment, assignment_bytes, version_name
from mvr_ray.errors import ResourceError, ShardIndexError
from mvr_ray.store.manifest import Manifest
from mvr_ray.types import FleetCounts, FloatArray

log = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 3600.0
"""Time to start searchers and read every file of their shards once; the deadline of a search is much shorter."""
PROBE_TIMEOUT_S = 60.0


class RemoteSearchers:
    """Searches versions of an index on actors, in groups that hold the same shards.

    Other processes that it is sent to call the same actors.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[Any]],
        queue: int = QUEUE,
        limit_bytes: int = 0,
        assignments: Mapping[int, list[ShardAssignment]] | None = None,
    ) -> None:
        self.groups = [list(actors) for actors in groups]
        self.limit_bytes = limit_bytes
        self.assignments = dict(assignments or {})
        """Version -> the shards of it that each group holds."""
        self.change_lock = threading.Lock()
        self._session = current_session()
        self._drops: list[Any] = []
        self.dispatcher = Dispatcher(self.groups, self._reopen, queue)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.groups, self.dispatcher.queue, self.limit_bytes, dict(self.assignments))

    @property
    def actors(self) -> list[Any]:
        return [actor for actors in self.groups for actor in actors]

    @property
    def is_lost(self) -> bool:
        """Whether the Ray session in which the searchers ran has ended; a call to them would start another cluster."""
        return current_session() is not self._session

    def unless_lost(self, function: Callable[[], object]) -> Callable[[], object]:
        """Return a function that calls this one as long as the searchers' session lasts."""
        return lambda: None if self.is_lost else function()

    def assign(self, manifest: Manifest) -> list[ShardAssignment]:
        """Return the shards of a version that each group holds."""
        if manifest.version not in self.assignments:
            group_of = {
                entry.digest: group
                for assignments in list(self.assignments.values())
                for group, (version, shards) in enumerate(assignments)
                for entry in version.shards
                if entry.shard in shards
            }
            newest_first = (own for _, own in sorted(self.assignments.items(), reverse=True))
            before = next((own for own in newest_first if len(own[0].manifest.shards) == len(manifest.shards)), [])
            group_of_number = {shard: group for group, own in enumerate(before) for shard in own.shards}
            groups = {one.shard: group_of.get(one.digest, group_of_number.get(one.shard)) for one in manifest.shards}
            num_bytes = {entry.shard: entry.num_bytes for entry in manifest.shards}
            holders = {shard: group for shard, group in groups.items() if group is not None}
            shards_of = balance_shards(num_bytes, len(self.groups), holders)
            self.assignments[manifest.version] = [ShardAssignment(manifest, shards) for shards in shards_of]
        return self.assignments[manifest.version]

    def load(self, manifest: Manifest) -> None:
        """Open and probe a version as `LocalSearchers.load` does; raises ResourceError for a dead searcher too."""
        self._require_session()
        with self.change_lock:
            self.assign(manifest)
            try:
                self._pending_drops(PROBE_TIMEOUT_S)
                usages = self._all(lambda actor: actor.memory.options(concurrency_group="health").remote(), manifest)
                needs = [assignment_bytes(*assignment) for _, assignment in self._actor_assignments(manifest.version)]
                require_memory(version_name(manifest), needs, usages, self.limit_bytes)
                self._open(manifest.version, 0)
                self._all(lambda actor: actor.probe.remote(manifest.version), manifest)
            except BaseException:  # nothing stays open, after Ctrl-C either
                self.drop(manifest.version)
                raise

    def drop(self, version: int) -> None:
        self.assignments.pop(version, None)
        options = {"concurrency_group": "load", "max_task_retries": -1}
        drops = [actor.drop.options(**options).remote(version) for actor in self.actors]
        self._drops = [*self._pending_drops(0.0), *drops]

    def counts(self) -> FleetCounts:
        return self.dispatcher.counts()

    def stop(self) -> None:
        for actor in [] if self.is_lost else self.actors:
            ray.kill(actor)
        self.dispatcher.close()

    def _require_session(self) -> None:
        if self.is_lost:
            raise ResourceError("the Ray session of the searchers has ended (ray.shutdown); open the index again")

    def _pending_drops(self, timeout_s: float) -> list[Any]:
        """Return the drops that searchers have not completed by then; their bytes count as held until completion."""
        drops = list(self._drops)
        return ray.wait(drops, num_returns=len(drops), timeout=timeout_s)[1] if drops else []

    def _all(self, send: Callable[[Any], Any], manifest: Manifest) -> list[Any]:
        """Call every searcher and return the answers. Raises ResourceError after PROBE_TIMEOUT_S."""
        try:
            with translate_ray_errors(f"opening {version_name(manifest)}"):
                return ray.get([send(actor) for actor in self.actors], timeout=PROBE_TIMEOUT_S)
        except TimeoutError:
            raise ResourceError(
                f"{version_name(manifest)} not opened: not all {len(self.actors)} searchers answered within "
                f"{PROBE_TIMEOUT_S:g} s; the live version stays, try again when they do"
            ) from None

    def _reopen(self, group: int, actor: Any) -> Any:
        """Send the call that an actor answers when it has (re)started and holds its shards of every version."""
        assignments = [groups[group] for groups in list(self.assignments.values())]
        return actor.open.options(concurrency_group="load", max_task_retries=-1).remote(assignments)

    def ready(self, manifest: Manifest) -> None:
        replicas = [replica for group in self.dispatcher.groups for replica in group]
        while any(one.killed_instance == name for one, name in zip(replicas, self._open(manifest.version, -1))):
            log.info("a searcher that hung has not ended yet")
        for replica in replicas:
            self.dispatcher.mark_up(replica)

    def _actor_assignments(self, version: int) -> list[tuple[Any, ShardAssignment]]:
        """Return each actor with its shards of a version."""
        return [(actor, own) for own, actors in zip(self.assignments[version], self.groups) for actor in actors]

    def _open(self, version: int, max_task_retries: int) -> list[str]:
        """Wait until every searcher has opened its shards, and return the searchers' instance ids. Without retries the
        death of a searcher is an error.
        """
        refs = [
            actor.open.options(concurrency_group="load", max_task_retries=max_task_retries).remote([assignment])
            for actor, assignment in self._actor_assignments(version)
        ]
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=OPEN_TIMEOUT_S)
        if len(ready) < len(refs):
            raise ShardIndexError(
                f"the {len(self.actors)} searchers did not open their shards within {OPEN_TIMEOUT_S:g} s; "
                f"check the resources of the cluster (mvr-ray doctor)"
            )
        with translate_ray_errors("opening the index"):
            return ray.get(refs)

    def fan_out(
        self, request: ScanRequest, deadline: Deadline, *, admit: bool = False, on_partial: OnPartial | None = None
    ) -> ShardResults:
        """Scan the request's shards. Raises OverloadedError if too many calls wait and `admit` is false."""
        shards_of = self._by_group(request.version, request.shards)
        messages = {group: encode_scan(request._replace(shards=shards)) for group, shards in shards_of.items()}
        parts, failures = self._gather("scan", messages, shards_of, decode_results, deadline, admit, on_partial)
        return ShardResults([one for part in parts for one in part.results], failures)

    def exact(self, queries_QD: FloatArray, k: int, manifest: Manifest, deadline: Deadline) -> list[ShardResult]:
        """Search as `LocalSearchers.exact` does, past the request queues."""
        version = manifest.version
        refs = [
            actors[0].exact.options(concurrency_group="load").remote(queries_QD, k, assignment.shards, version)
            for assignment, actors in zip(self.assignments[version], self.groups)
        ]
        with translate_ray_errors("searching exactly"):
            return [one for answers in ray.get(refs, timeout=deadline.left_s) for one in answers]

    def views(self, ids: Mapping[int, Sequence[str]], version: int, deadline: Deadline) -> ViewResults:
        shards_of = self._by_group(version, ids)
        messages = {
            group: encode_views_request({shard: ids[shard] for shard in shards}, version)
            for group, shards in shards_of.items()
        }
        parts, failures = self._gather("views", messages, shards_of, decode_views, deadline)
        return ViewResults({name: one for part in parts for name, one in part.views.items()}, failures)

    def _by_group(self, version: int, shards: Iterable[int]) -> dict[int, tuple[int, ...]]:
        """Return these shards of a version by the group that holds them."""
        shard_set, assignments = set(shards), self.assignments[version]
        by_group = {group: tuple(s for s in own if s in shard_set) for group, (_, own) in enumerate(assignments)}
        return {group: own for group, own in by_group.items() if own}

    def _gather(
        self,
        method: str,
        messages: Mapping[int, pa.Buffer],
        shards_of: Mapping[int, tuple[int, ...]],
        decode: Callable[[pa.Buffer], Any],
        deadline: Deadline,
        admit: bool = False,
        on_partial: Callable[[Any], None] | None = None,
    ) -> tuple[list[Any], list[ShardFailure]]:
        """Return the decoded answers of the groups, and the failures of shards."""
        self._require_session()
        on_message = (lambda message: on_partial(decode(message))) if on_partial else None
        answers, states = self.dispatcher.gather(method, messages, deadline, admit=admit, on_partial=on_message)
        parts = [decode(answers[group]) for group in sorted(answers)]
        failures = [ShardFailure(shards_of[group], state) for group, state in states.items()]
        return parts, failures + [one for part in parts for one in part.failures]
