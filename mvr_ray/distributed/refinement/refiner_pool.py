"""Drive the refiner actors: scatter to all shards, gather in shard order, merge.

Results do not depend on which actor holds which shard: hits are exact and merged by score and id, and all other results
are per shard and summed in shard order, so one refiner and eight give the same bytes. Ray restarts a killed actor from
files, and the actor loads the state that a call names; an actor that hangs is killed.

Shapes: Q queries, K hits, L labels. Passages are numbered through all shards: `shard_start[shard] + row`.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mvr_ray.core.refining.aopt import LabelSums
from mvr_ray.core.refining.pseudo_labels import Labels
from mvr_ray.core.searching.exact import distinct
from mvr_ray.core.searching.merging import first_depth, merge, replace_hits, uncertain_queries
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.ray_errors import translate_ray_errors
from mvr_ray.distributed.cluster.tasks import HANG_S, share
from mvr_ray.distributed.refinement.shard_refiner import RefinerTask, ShardRefiner, ShardStep, WrittenShard
from mvr_ray.distributed.refinement.state import StateId
from mvr_ray.distributed.searching.rendezvous import balance_shards
from mvr_ray.errors import ResourceError
from mvr_ray.store.corpus import ids_by_shard
from mvr_ray.types import FloatArray, IntArray, Progress, ShardHits

log = logging.getLogger(__name__)

R = TypeVar("R")

QUERY_BLOCK = 256  # queries scattered at a time: at most two blocks of hits a shard are in flight
LABEL_BLOCK = 1_000_000
MAX_RESTARTS = 4
START_S = 120.0
"""Added to the time limit until actors have started: they import torch and open their shards."""


class LabelCache:
    """Cache of whether a passage answers a question, kept across rounds in two flat arrays.

    A key is `passage * num_questions + question`: sorted keys group by passage, so its text is read once.
    """

    def __init__(self) -> None:
        self.keys_X: IntArray = np.empty(0, np.int64)
        self.values_X: np.ndarray = np.empty(0, bool)

    def missing(self, keys: IntArray) -> IntArray:
        """Return the keys that the cache lacks, sorted, each once."""
        keys = distinct(keys)
        if not len(self.keys_X):
            return keys
        at = np.minimum(np.searchsorted(self.keys_X, keys), len(self.keys_X) - 1)
        return keys[self.keys_X[at] != keys]

    def add(self, keys: IntArray, values: np.ndarray) -> None:
        all_keys = np.concatenate([self.keys_X, keys])
        order = np.argsort(all_keys, kind="stable")
        self.keys_X, self.values_X = all_keys[order], np.concatenate([self.values_X, values])[order]

    def get(self, keys: IntArray) -> np.ndarray:
        values = np.empty(len(keys), bool)
        order = np.argsort(keys)  # sorted lookups hit the CPU cache
        values[order] = self.values_X[np.searchsorted(self.keys_X, keys[order])]
        return values


class RefinerPool:
    """All shards of one index version in `count` actors. Use as a context manager."""

    def __init__(self, task: RefinerTask, count: int, cpus: float, hang_s: float = HANG_S) -> None:
        """Shards are assigned, largest first, to the least loaded actor.

        An actor that finishes no call for `hang_s` is killed and restarted.
        """
        self.task = task
        self.hang_s = hang_s
        self.has_started = False
        counts = {entry.shard: entry.num_passages for entry in task.manifest.shards}
        self.index = task.manifest.index
        self.shards = sorted(counts)
        self.num_passages = sum(counts.values())
        self.shard_start = np.cumsum([0, *(counts[shard] for shard in self.shards)])
        self.start_of = dict(zip(self.shards, self.shard_start.tolist()))
        self.actors: list[Any] = []
        self.searchers: list[tuple[Any, int]] = []
        """Actors with passages, and their number."""
        self.holder: dict[int, Any] = {}
        for shards in balance_shards(counts, min(count, len(counts))):
            actor = _new_refiner(replace(task, starts={shard: self.start_of[shard] for shard in shards}), cpus)
            self.actors.append(actor)
            self.holder |= dict.fromkeys(shards, actor)
            if num_passages := sum(counts[shard] for shard in shards):
                self.searchers.append((actor, num_passages))
        self.labels = LabelCache()

    def __enter__(self) -> "RefinerPool":
        return self

    def __exit__(self, *exception: object) -> None:
        if session.in_ray():
            import ray

            for actor in self.actors:
                if not isinstance(actor, ShardRefiner):
                    ray.kill(actor)

    def results(self, calls: Sequence["Call"]) -> list[Any]:
        """Wait for the results of calls, in their order. Hanging actors are killed; Ray restarts them and their calls.

        Raises ResourceError where an actor dies or hangs repeatedly.
        """
        if all(isinstance(call.actor, ShardRefiner) for call in calls):
            return [call.ref for call in calls]
        import ray

        waiting = [call.ref for call in calls]
        num_hangs = 0
        with translate_ray_errors("refinement"):
            while waiting:
                bound_s = self.hang_s if self.has_started else self.hang_s + START_S
                ready_refs, waiting = ray.wait(waiting, num_returns=1, timeout=bound_s)
                self.has_started = bool(ready_refs)
                if ready_refs:
                    continue
                num_hangs += 1
                if num_hangs > MAX_RESTARTS:
                    raise ResourceError(
                        f"refiners finished no call for {self.hang_s:g} s, {num_hangs} times; see what hangs on their "
                        f"machines (py-spy dump), then run the same command again, it continues"
                    )
                pending = set(waiting)
                for actor in {call.actor for call in calls if call.ref in pending}:
                    log.warning("refiner hangs, restarting it: index=%s after_s=%g", self.index, self.hang_s)
                    ray.kill(actor, no_restart=False)
            return ray.get([call.ref for call in calls])

    def per_shard(self, method: Callable[..., R], arguments: Mapping[int, Sequence[Any]]) -> list[R]:
        """Call a method of the refiner of each shard with the shard and its arguments; results in shard order."""
        return self.results([_call(self.holder[s], method, s, *arguments[s]) for s in sorted(arguments)])

    def place(self, passages: IntArray) -> tuple[IntArray, IntArray]:
        """Return the position in `shards`, and row, of numbered passages."""
        at = np.searchsorted(self.shard_start, passages, side="right") - 1
        return at, passages - self.shard_start[at]

    def locate(self, ids: Iterable[str]) -> dict[str, int]:
        """Return the numbers of the passages that are in the index; unknown ids are omitted."""
        parts = dict(sorted(ids_by_shard(ids, len(self.shards)).items()))
        rows_by_shard = self.per_shard(ShardRefiner.locate, {shard: (part,) for shard, part in parts.items()})
        return {
            passage_id: self.start_of[shard] + int(row)
            for shard, rows in zip(parts, rows_by_shard)
            for passage_id, row in zip(parts[shard], rows)
            if row >= 0
        }

    def search(self, at: StateId, queries_QD: FloatArray, k: int, what: str, progress: Progress) -> ShardHits:
        """Search all shards exactly for the top k of every query at a state; k is limited to the number of passages.

        Every actor returns the hits of its shards as of one shard. Like a router, the pool first requests as many rows
        as settle most queries, and then k rows where the merge is uncertain.
        """
        k = min(k, self.num_passages)
        first = first_depth(k, [size for _, size in self.searchers], min(QUERY_BLOCK, len(queries_QD)))
        tables = [merge([], k, self.ids_of)]
        blocks = [slice(low, low + QUERY_BLOCK) for low in range(0, len(queries_QD), QUERY_BLOCK)]

        def send(block: slice) -> list[Call]:
            part = share(np.ascontiguousarray(queries_QD[block]))
            return [_call(actor, ShardRefiner.search, at, part, first) for actor, _ in self.searchers]

        for block, calls in zip(blocks, _in_flight(map(send, blocks), 2)):
            lists: list[tuple[int, ShardHits]] = [(0, hits) for hits in self.results(calls)]
            merged_hits = merge(lists, k, self.ids_of)
            queries_S = uncertain_queries(lists, merged_hits, self.ids_of)
            again = {number: queries for number, queries in enumerate(queries_S) if len(queries)}
            if again:
                parts = [(self.searchers[number][0], queries_QD[block][queries]) for number, queries in again.items()]
                more_hits = self.results([_call(actor, ShardRefiner.search, at, part, k) for actor, part in parts])
                for (number, queries), hits in zip(again.items(), more_hits):
                    lists[number] = 0, replace_hits(lists[number][1], hits, queries)
                merged_hits = merge(lists, k, self.ids_of)
            tables.append(merged_hits)
            progress(what, min(block.stop, len(queries_QD)), len(queries_QD))
        return ShardHits(*(np.concatenate(columns) for columns in zip(*tables)))

    def ids_of(self, passages: IntArray) -> list[str]:
        """Return the ids of numbered passages."""
        ids = np.empty(len(passages), object)
        return self._by_passage(ShardRefiner.ids_of, passages, lambda _, rows: (rows.tolist(),), ids).tolist()

    def _by_passage(
        self,
        method: Callable[..., Any],
        passages: IntArray,
        arguments: Callable[[IntArray, IntArray], Sequence[Any]],
        out: Any,
    ) -> Any:
        """Call a refiner's method for the numbered passages of each shard, and fill `out` with the results.

        `arguments` gets the positions of a shard's passages in `passages`, and their rows in the shard.
        """
        at, rows = self.place(passages)
        positions = {self.shards[number]: np.flatnonzero(at == number) for number in distinct(at)}
        parts = {shard: arguments(own, rows[own]) for shard, own in positions.items()}
        for own, values in zip(positions.values(), self.per_shard(method, parts)):
            out[own] = values
        return out

    def mark(self, questions_Q: IntArray, answers: Sequence[tuple[str, ...]], passage_QK: IntArray) -> np.ndarray:
        """Test whether each hit holds an answer of its question, bool [Q, K]; once per (question, passage).

        `answers` belong to all table rows, `questions_Q` are the table rows of the hits' questions.
        """
        real_QK = passage_QK >= 0
        keys_QK = passage_QK * np.int64(len(answers)) + questions_Q[:, None]
        missing = self.labels.missing(keys_QK[real_QK])
        blocks = [missing[low : low + LABEL_BLOCK] for low in range(0, len(missing), LABEL_BLOCK)]
        if blocks:
            self.labels.add(missing, np.concatenate([self._mark_pairs(keys, answers) for keys in blocks]))
        marked_QK = np.zeros(passage_QK.shape, bool)
        marked_QK[real_QK] = self.labels.get(keys_QK[real_QK])
        return marked_QK

    def _mark_pairs(self, keys: IntArray, answers: Sequence[tuple[str, ...]]) -> np.ndarray:
        passages, questions = np.divmod(keys, len(answers))

        def arguments(own: IntArray, rows: IntArray) -> Sequence[Any]:
            own_questions, inverse = np.unique(questions[own], return_inverse=True)
            return rows, inverse, [answers[question] for question in own_questions]

        return self._by_passage(ShardRefiner.mark, passages, arguments, np.zeros(len(keys), bool))

    def split(self, labels: Labels) -> dict[int, Labels]:
        """Split labels by shard (perhaps none), keeping their order; passages become rows of the shard."""
        at_L, row_L = self.place(labels.passage_L)
        by_row = labels._replace(passage_L=row_L)
        return {shard: by_row.take(at_L == number) for number, shard in enumerate(self.shards)}

    def winners(self, at: StateId, labels: Labels, queries_LD: FloatArray) -> IntArray:
        """Return the best-scoring view of the passage of each label at a state."""

        def arguments(own: IntArray, rows: IntArray) -> Sequence[Any]:
            questions, query_L = np.unique(labels.question_L[own], return_inverse=True)
            return at, query_L, rows, queries_LD[questions]

        return self._by_passage(
            ShardRefiner.winners, labels.passage_L, arguments, np.zeros(len(labels.view_L), np.int16)
        )

    def query_sums(self, at: StateId, by_shard: Mapping[int, Labels], num_queries: int) -> list[LabelSums]:
        """Compute each shard's part of the queries' sums (eqs. 7 and 11)."""
        return self.per_shard(
            ShardRefiner.query_sums, {shard: (at, own, num_queries) for shard, own in by_shard.items()}
        )

    def step(
        self, at: StateId, to: StateId, by_shard: Mapping[int, Labels], queries_LD: FloatArray, weight: float = 0.0
    ) -> list[ShardStep]:
        """Change the labelled passages of every shard by the task's method, from one state to the next. `weight` of
        feedback views."""
        queries = share(queries_LD)
        return self.per_shard(
            ShardRefiner.step, {shard: (at, to, own, queries, weight) for shard, own in by_shard.items()}
        )

    def write(self, at: StateId, recall_sample: int) -> list[WrittenShard]:
        """Write every shard at a state to the store."""
        return self.per_shard(ShardRefiner.write, dict.fromkeys(self.shards, (at, recall_sample)))


class Call(NamedTuple):
    """A call to an actor, and the reference of its result; for a refiner in this process the result itself."""

    actor: Any
    ref: Any


def _new_refiner(task: RefinerTask, cpus: float) -> Any:
    """Create a refiner of the task's shards: an actor in a Ray session, else an object in this process."""
    if not session.in_ray():
        return ShardRefiner(task)
    import ray

    limits = {"max_restarts": MAX_RESTARTS, "max_task_retries": MAX_RESTARTS}
    # By default Ray fills a node to half of its CPUs first, and its memory with it.
    return ray.remote(ShardRefiner).options(num_cpus=cpus, scheduling_strategy="SPREAD", **limits).remote(task)


def _call(actor: Any, method: Callable[..., Any], *arguments: Any) -> Call:
    """Call a method of `ShardRefiner`."""
    if isinstance(actor, ShardRefiner):
        return Call(actor, method(actor, *arguments))
    return Call(actor, getattr(actor, method.__name__).remote(*arguments))


def _in_flight(requests: Iterator[Any], width: int) -> Iterator[Any]:
    """Keep `width` requests in flight, so that the next one runs while a result is merged."""
    waiting = deque(islice(requests, width))
    while waiting:
        yield waiting.popleft()
        waiting.extend(islice(requests, 1))
