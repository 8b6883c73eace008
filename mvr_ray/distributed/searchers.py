"""Searchers hold the shards of one index version and search them; a fleet of them is asked and gathered from.

A searcher is a plain class built from names and digests, so an actor that died can start again anywhere and be the
same. Its files are read once and compared with their digests before anything opens them. A fleet, of actors or inside
this process, asks for some shards and tells answered, dead and late ones apart; it decides nothing. Besides searching,
a shard can be asked for the stored views of some passages.

Shapes: Q queries, K hits, D dimension.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import ray
from ray.exceptions import RayActorError

from mvr_ray.config import ResourcesConfig
from mvr_ray.distributed.failures import own_errors, unwrapped
from mvr_ray.errors import ManifestError, ShardIndexError
from mvr_ray.index.base import IndexParams, ShardIndex, open_index
from mvr_ray.store import layout, manifest
from mvr_ray.store.embeddings import EmbeddingShard, Views
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest
from mvr_ray.types import FloatArray, IntArray, ShardHits

log = logging.getLogger(__name__)

INLINE_BYTES = 100_000
OPEN_TIMEOUT_S = 3600.0
"""For starting searchers and reading every file of their shards once; an answer's own deadline is much shorter."""
_remote: Any = ray.remote
Asked = Mapping[int, IntArray | None]
"""Shard -> positions of the queries to ask it, None: all of them."""
Wanted = Mapping[int, Sequence[str]]
"""Shard -> ids of the passages whose views are wanted of it."""


class SearcherTask(NamedTuple):
    """What a searcher is made of. `device` is cpu or cuda."""

    store: str
    manifest: Manifest
    shards: tuple[int, ...]
    threads: int = 1
    device: str = "cpu"


class ShardFound(NamedTuple):
    """What one shard answered. `ids` names the rows that were hit."""

    shard: int
    ids: dict[int, str]
    hits: ShardHits


class Unanswered(NamedTuple):
    """Shards that gave no answer, and why: `died` or `late`."""

    shards: tuple[int, ...]
    reason: str


class Gathered(NamedTuple):
    found: list[ShardFound]
    unanswered: list[Unanswered]


class GatheredViews(NamedTuple):
    """Views by passage id, of the passages that the answering shards hold."""

    found: dict[str, Views]
    unanswered: list[Unanswered]


class _Held(NamedTuple):
    index: ShardIndex | None
    embedded: EmbeddingShard
    ids: list[str]


class ShardSearcher:
    """Some shards of one version. Opens them when first asked to."""

    def __init__(self, task: SearcherTask) -> None:
        self.task = task
        self._held: dict[int, _Held] = {}
        self._opening = threading.Lock()

    def open(self) -> list[int]:
        """Open every shard, once; DigestError or ManifestError where its files are not what the manifest says."""
        with self._opening:
            for shard in self.task.shards:
                if shard not in self._held:
                    self._held[shard] = self._open(shard)
        return list(self._held)

    def health(self) -> list[int]:
        """The shards that are open now; answered even while a search runs."""
        return sorted(self._held)

    def search(self, queries_QD: FloatArray, k: int, asked: Asked) -> list[ShardFound]:
        """The best k passages of each shard asked, for its queries."""
        self.open()
        return [
            self._search(shard, queries_QD if positions is None else queries_QD[positions], k)
            for shard, positions in asked.items()
        ]

    def views(self, wanted: Wanted) -> list[dict[str, Views]]:
        """The stored views of these passages, a shard each; ids that a shard does not hold are absent."""
        self.open()
        return [self._held[shard].embedded.find(ids) for shard, ids in wanted.items()]

    def _search(self, shard: int, queries_QD: FloatArray, k: int) -> ShardFound:
        index, _, ids = self._held[shard]
        if index is None:
            none_Q0 = np.zeros((len(queries_QD), 0))
            frontier_Q = np.full(len(queries_QD), -np.inf, np.float32)
            empty = none_Q0.astype(np.int64), none_Q0.astype(np.float32), none_Q0.astype(np.int16), frontier_Q
            return ShardFound(shard, {}, ShardHits(*empty))
        hits = index.search(queries_QD, min(k, index.num_passages))
        rows = np.unique(hits.rows_QK)
        return ShardFound(shard, {row: ids[row] for row in rows[rows >= 0].tolist()}, hits)

    def _open(self, shard: int) -> _Held:
        described = self.task.manifest
        entry = next(entry for entry in described.shards if entry.shard == shard)
        folder = manifest.open_shard(Store(self.task.store), described.index, entry)
        embedded = EmbeddingShard.open(folder / layout.EMBEDDINGS)
        if (embedded.dimension, embedded.num_passages) != (described.dimension, entry.num_passages):
            raise ManifestError(
                f"shard {shard} of index {described.index!r} holds {embedded.num_passages} passages in dimension "
                f"{embedded.dimension}; its manifest says {entry.num_passages} in {described.dimension}. "
                f"Roll back, or index again"
            )
        if not embedded.num_passages:
            return _Held(None, embedded, [])
        params = IndexParams(**described.index_params)
        index = open_index(params, embedded.blocks(), folder, device=self.task.device, threads=self.task.threads)
        log.info("shard open: index=%s version=%d shard=%d", described.index, described.version, shard)
        return _Held(index, embedded, embedded.ids())


class Fleet(Protocol):
    """Searchers that together hold every shard of a version."""

    def ready(self) -> None:
        """Return when every shard is open."""
        ...

    def ask(self, queries_QD: FloatArray, k: int, asked: Asked, timeout_s: float) -> Gathered: ...

    def views(self, wanted: Wanted, timeout_s: float) -> GatheredViews: ...


class LocalFleet:
    """One searcher in this process, which takes the time that it takes."""

    def __init__(self, task: SearcherTask) -> None:
        self.searcher = ShardSearcher(task)

    def ready(self) -> None:
        self.searcher.open()

    def ask(self, queries_QD: FloatArray, k: int, asked: Asked, timeout_s: float) -> Gathered:
        return Gathered(self.searcher.search(queries_QD, k, asked), [])

    def views(self, wanted: Wanted, timeout_s: float) -> GatheredViews:
        return GatheredViews(_joined(self.searcher.views(wanted)), [])


class RemoteFleet:
    """Actors. May be sent to other processes, which then ask the same actors."""

    def __init__(self, actors: Sequence[Any], shards: Sequence[tuple[int, ...]]) -> None:
        self.actors = list(actors)
        self.shards = list(shards)

    @classmethod
    def start(cls, task: SearcherTask, resources: ResourcesConfig) -> "RemoteFleet":
        """Make the actors, shards spread over them by size; they restart by themselves, wherever there is room."""
        groups = share_out({entry.shard: entry.num_bytes for entry in task.manifest.shards}, resources.searchers)
        placed = _remote(concurrency_groups={"health": 1})(ShardSearcher).options(
            num_cpus=resources.cpus_per_searcher,
            num_gpus=resources.gpus_per_searcher,
            max_restarts=-1,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )
        return cls([placed.remote(task._replace(shards=shards)) for shards in groups], groups)

    def ready(self) -> None:
        try:
            with own_errors("opening the index"):
                opened = [actor.open.options(max_task_retries=-1).remote() for actor in self.actors]
                ray.get(opened, timeout=OPEN_TIMEOUT_S)
        except TimeoutError:
            raise ShardIndexError(
                f"the {len(self.actors)} searchers did not open their shards within {OPEN_TIMEOUT_S:g} s; "
                f"see whether the cluster has room for them (mvr-ray doctor)"
            ) from None

    def ask(self, queries_QD: FloatArray, k: int, asked: Asked, timeout_s: float) -> Gathered:
        shipped = ray.put(queries_QD) if queries_QD.nbytes > INLINE_BYTES else queries_QD
        return Gathered(*self._gathered(asked, lambda actor, here: actor.search.remote(shipped, k, here), timeout_s))

    def views(self, wanted: Wanted, timeout_s: float) -> GatheredViews:
        found, unanswered = self._gathered(wanted, lambda actor, here: actor.views.remote(here), timeout_s)
        return GatheredViews(_joined(found), unanswered)

    def _gathered(
        self, asked: Mapping[int, Any], send: Callable[[Any, dict[int, Any]], Any], timeout_s: float
    ) -> tuple[list[Any], list[Unanswered]]:
        """One call to each holder of a shard that is asked; every shard's answer, and who gave none in time."""
        waiting: dict[Any, tuple[int, ...]] = {}
        for actor, held in zip(self.actors, self.shards):
            here = {shard: asked[shard] for shard in held if shard in asked}
            if here:
                waiting[send(actor, here)] = tuple(here)
        if not waiting:
            return [], []
        done, late = ray.wait(list(waiting), num_returns=len(waiting), timeout=max(timeout_s, 0.0))
        found: list[Any] = []
        unanswered = [Unanswered(waiting[ref], "late") for ref in late]
        for ref in done:
            answer = _fetched(ref)
            if answer is None:
                unanswered.append(Unanswered(waiting[ref], "died"))
            else:
                found += answer
        return found, unanswered

    def health(self, timeout_s: float) -> list[int]:
        """The shards that are open now, as far as their searchers say so in time; asked beside running searches."""
        waiting = [actor.health.options(concurrency_group="health").remote() for actor in self.actors]
        done, _ = ray.wait(waiting, num_returns=len(waiting), timeout=timeout_s)
        return sorted(shard for ref in done for shard in _fetched(ref) or [])

    def stop(self) -> None:
        for actor in self.actors:
            ray.kill(actor)


def share_out(num_bytes: Mapping[int, int], groups: int) -> list[tuple[int, ...]]:
    """Shards over at most `groups` holders, largest first to the lightest one; none without a shard."""
    held: list[list[int]] = [[] for _ in range(min(groups, len(num_bytes)))]
    loads = [0] * len(held)
    for shard in sorted(num_bytes, key=lambda shard: (-num_bytes[shard], shard)):
        lightest = loads.index(min(loads))
        held[lightest].append(shard)
        loads[lightest] += num_bytes[shard] + 1
    return [tuple(sorted(shards)) for shards in held]


def _joined(parts: Sequence[dict[str, Views]]) -> dict[str, Views]:
    return {passage_id: views for part in parts for passage_id, views in part.items()}


def _fetched(ref: Any) -> list[Any] | None:
    """A finished call's answer, None where its actor died: a dead actor's reference counts as ready."""
    try:
        return ray.get(ref)
    except RayActorError as error:
        log.warning("searcher lost: %s", str(error).splitlines()[0])
        return None
    except ray.exceptions.RayTaskError as error:
        raise unwrapped(error, "searching") from error
