"""Drive the refiner actors: scatter to all shards, gather in shard order, merge.

Nothing here depends on which actor holds which shard: what is found is exact and merged by score and id, and every
other answer is per shard and is summed in shard order, so one refiner and eight give the same bytes. Ray restarts a
killed actor from files, and it brings itself to the state that a call names; an actor that hangs is killed.

Shapes: Q queries, K hits, L labels. Passages are numbered through all shards: `shard_start[shard] + row`.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mvr_ray.core.refining.aopt import LabelSums
from mvr_ray.core.refining.pseudo_labels import Labels
from mvr_ray.core.searching.exact import distinct
from mvr_ray.core.searching.merging import first_depth, merge, overlay_hits, uncertain_queries
from mvr_ray.distributed import session
from mvr_ray.distributed.ray_errors import translate_ray_errors
from mvr_ray.distributed.refinement.shard_refiner import (
    FeedbackSettings,
    GradientSettings,
    LinearSettings,
    RefinerTask,
    ShardRefiner,
    ShardStep,
    WrittenShard,
)
from mvr_ray.distributed.refinement.state import StateId
from mvr_ray.distributed.tasks import HANG_S, share
from mvr_ray.errors import ResourceError
from mvr_ray.store.corpus import shard_of
from mvr_ray.types import FloatArray, IntArray, Progress, ShardHits

log = logging.getLogger(__name__)

QUERY_BLOCK = 256  # queries scattered at a time; bounds what is in flight to two blocks of hits a shard
LABEL_BLOCK = 1_000_000
MAX_RESTARTS = 4
START_S = 120.0
"""Added where actors have yet to start: they import torch and open their shards."""

T = TypeVar("T")


class LabelCache:
    """Which pairs of a passage and a question hold an answer, remembered across rounds in two flat arrays.

    A key is `passage * num_questions + question`: keys in order go passage by passage, whose text is then read once.
    """

    def __init__(self) -> None:
        self.keys_X: IntArray = np.empty(0, np.int64)
        self.known_X: np.ndarray = np.empty(0, bool)

    def missing(self, keys: IntArray) -> IntArray:
        """Those of the keys that are not known, in order, each once."""
        keys = distinct(keys)
        if not len(self.keys_X):
            return keys
        at = np.minimum(np.searchsorted(self.keys_X, keys), len(self.keys_X) - 1)
        return keys[self.keys_X[at] != keys]

    def add(self, keys: IntArray, values: np.ndarray) -> None:
        joined = np.concatenate([self.keys_X, keys])
        order = np.argsort(joined, kind="stable")
        self.keys_X, self.known_X = joined[order], np.concatenate([self.known_X, values])[order]

    def get(self, keys: IntArray) -> np.ndarray:
        values = np.empty(len(keys), bool)
        order = np.argsort(keys)  # looked up in order, neighbours are in the cache
        values[order] = self.known_X[np.searchsorted(self.keys_X, keys[order])]
        return values


class RefinerPool:
    """All shards of one index version, held by `count` actors. Use as a context manager."""

    def __init__(
        self, task: RefinerTask, num_shards: int, count: int, cpus: float, hang_s: float | None = None
    ) -> None:
        """`num_shards` is what passage ids are hashed to; the largest shards go first, to the least loaded actor.

        An actor that finishes no call for `hang_s` (HANG_S by default) is killed and restarted.
        """
        self.hang_s = HANG_S if hang_s is None else hang_s
        self.started = False
        counts = {entry.shard: entry.num_passages for entry in task.manifest.shards}
        self.index, self.num_shards = task.manifest.index, num_shards
        self.shards = sorted(counts)
        sizes = np.array([counts[shard] for shard in self.shards], np.int64)
        self.num_passages = int(sizes.sum())
        self.shard_start = np.concatenate([[0], np.cumsum(sizes)])
        loads: list[tuple[int, list[int]]] = [(0, []) for _ in range(min(count, len(self.shards)))]
        for shard in sorted(self.shards, key=lambda shard: (-counts[shard], shard)):
            number = min(range(len(loads)), key=lambda n: loads[n][0])
            loads[number] = (loads[number][0] + counts[shard], [*loads[number][1], shard])
        self.start_of = dict(zip(self.shards, self.shard_start.tolist()))
        tasks = [task.holding({shard: self.start_of[shard] for shard in shards}) for _, shards in loads]
        self.actors = [_new_refiner(own, cpus) for own in tasks]
        self.searchers = [(actor, held) for actor, (held, _) in zip(self.actors, loads) if held]
        self.holder: dict[int, Any] = {}
        for actor, (_, shards) in zip(self.actors, loads):
            self.holder.update(dict.fromkeys(shards, actor))
        self.labels = LabelCache()

    def __enter__(self) -> "RefinerPool":
        return self

    def __exit__(self, *exception: object) -> None:
        if session.in_ray():
            import ray

            for actor in self.actors:
                ray.kill(actor)

    def results(self, calls: Sequence["Call"]) -> list[Any]:
        """The results of calls, in their order. Actors that hang are killed, and their calls run again after a restart.

        Raises ResourceError where an actor dies or hangs again and again.
        """
        if not session.in_ray():
            return [call.ref for call in calls]
        import ray

        waiting = [call.ref for call in calls]
        hung = 0
        with translate_ray_errors("refinement"):
            while waiting:
                bound_s = self.hang_s if self.started else self.hang_s + START_S
                finished, waiting = ray.wait(waiting, num_returns=1, timeout=bound_s)
                self.started = bool(finished)
                if finished:
                    continue
                hung += 1
                if hung > MAX_RESTARTS:
                    raise ResourceError(
                        f"refiners finished no call for {self.hang_s:g} s, {hung} times; see what hangs on their "
                        f"machines (py-spy dump), then run the same command again, it continues"
                    )
                pending = set(waiting)
                for actor in {call.actor for call in calls if call.ref in pending}:
                    log.warning("refiner hangs and is restarted: index=%s after_s=%g", self.index, self.hang_s)
                    ray.kill(actor, no_restart=False)
            return ray.get([call.ref for call in calls])

    def per_shard(self, arguments: Mapping[int, T], method: Callable[[Any, int, T], Any]) -> list[Any]:
        """Results of `method(actor, shard, argument)` for each shard named, in shard order."""
        shards = sorted(arguments)
        return self.results([Call(self.holder[s], method(self.holder[s], s, arguments[s])) for s in shards])

    def place(self, passages: IntArray) -> tuple[IntArray, IntArray]:
        """Position in `shards`, and row, of numbered passages."""
        at = np.searchsorted(self.shard_start, passages, side="right") - 1
        return at, passages - self.shard_start[at]

    def in_shard(self, passages: IntArray, shard: int) -> np.ndarray:
        """Which numbered passages a shard holds."""
        return self.place(passages)[0] == self.shards.index(shard)

    def locate(self, ids: Iterable[str]) -> dict[str, int]:
        """Numbers of the passages that are in the index; unknown ids are left out."""
        by_shard: dict[int, list[str]] = {shard: [] for shard in self.shards}
        for passage_id in sorted(set(ids)):
            by_shard.setdefault(shard_of(passage_id, self.num_shards), []).append(passage_id)
        parts = {shard: by_shard[shard] for shard in self.shards if by_shard[shard]}
        rows_by_shard = self.per_shard(parts, lambda actor, shard, part: actor.locate.remote(shard, part))
        return {
            passage_id: self.start_of[shard] + int(row)
            for shard, rows in zip(parts, rows_by_shard)
            for passage_id, row in zip(parts[shard], rows)
            if row >= 0
        }

    def search(self, at: StateId, queries_QD: FloatArray, k: int, what: str, progress: Progress) -> ShardHits:
        """Exact top k of every query over all shards at a state; k is cut to the number of passages.

        Every actor answers for its shards together as one shard would. As a router does, the pool first asks for as
        many rows as settle most queries, and then for k rows where the merge is uncertain.
        """
        k = min(k, self.num_passages)
        first = first_depth(k, [size for _, size in self.searchers], min(QUERY_BLOCK, len(queries_QD)))
        tables = [merge([], k, self.ids_of)]
        blocks = [slice(low, low + QUERY_BLOCK) for low in range(0, len(queries_QD), QUERY_BLOCK)]

        def send(block: slice) -> list[Call]:
            part = share(np.ascontiguousarray(queries_QD[block]))
            return [Call(actor, actor.search.remote(at, part, first)) for actor, _ in self.searchers]

        for block, calls in zip(blocks, _in_flight(map(send, blocks), 2)):
            lists: list[tuple[int, ShardHits]] = [(0, hits) for hits in self.results(calls)]
            merged = merge(lists, k, self.ids_of)
            queries_S = uncertain_queries(lists, merged, self.ids_of)
            again = [number for number, queries in enumerate(queries_S) if len(queries)]
            if again:
                calls = []
                for number in again:
                    actor, _ = self.searchers[number]
                    part = queries_QD[block][queries_S[number]]
                    calls.append(Call(actor, actor.search.remote(at, part, k)))
                for number, hits in zip(again, self.results(calls)):
                    lists[number] = 0, overlay_hits(lists[number][1], hits, queries_S[number])
                merged = merge(lists, k, self.ids_of)
            tables.append(merged)
            progress(what, min(block.stop, len(queries_QD)), len(queries_QD))
        return ShardHits(*(np.concatenate(columns) for columns in zip(*tables)))

    def ids_of(self, passages: IntArray) -> list[str]:
        """Ids of numbered passages."""
        at, rows = self.place(passages)
        numbers = distinct(at).tolist()
        parts = {self.shards[number]: rows[at == number].tolist() for number in numbers}
        ids = np.empty(len(passages), object)
        for number, names in zip(numbers, self.per_shard(parts, lambda actor, shard, r: actor.ids_of.remote(shard, r))):
            ids[at == number] = names
        return ids.tolist()

    def mark(self, questions_Q: IntArray, answers: Sequence[tuple[str, ...]], passage_QK: IntArray) -> np.ndarray:
        """Whether each hit holds an answer of its question, bool [Q, K]; asked once a (question, passage).

        `answers` belong to all table rows, `questions_Q` are the table rows of the hits' questions.
        """
        real_QK = passage_QK >= 0
        keys_QK = passage_QK * np.int64(len(answers)) + questions_Q[:, None]
        missing = self.labels.missing(keys_QK[real_QK])
        blocks = [missing[low : low + LABEL_BLOCK] for low in range(0, len(missing), LABEL_BLOCK)]
        if blocks:
            self.labels.add(missing, np.concatenate([self._ask_answers(keys, answers) for keys in blocks]))
        marked_QK = np.zeros(passage_QK.shape, bool)
        marked_QK[real_QK] = self.labels.get(keys_QK[real_QK])
        return marked_QK

    def _ask_answers(self, keys: IntArray, answers: Sequence[tuple[str, ...]]) -> np.ndarray:
        passages, questions = np.divmod(keys, len(answers))
        at, rows = self.place(passages)
        places, calls = [], []
        for number in distinct(at):
            here = np.flatnonzero(at == number)
            own, inverse = np.unique(questions[here], return_inverse=True)
            shard = self.shards[number]
            actor = self.holder[shard]
            texts = [answers[question] for question in own]
            calls.append(Call(actor, actor.mark.remote(shard, rows[here], inverse, texts)))
            places.append(here)
        marked = np.zeros(len(keys), bool)
        for here, values in zip(places, self.results(calls)):
            marked[here] = values
        return marked

    def split(self, labels: Labels) -> dict[int, Labels]:
        """Labels of every shard (perhaps none), in the order given; passages become rows of the shard."""
        at_L, row_L = self.place(labels.passage_L)
        by_row = labels._replace(passage_L=row_L)
        return {shard: by_row.take(at_L == number) for number, shard in enumerate(self.shards)}

    def winners(self, at: StateId, by_shard: Mapping[int, Labels], queries_LD: FloatArray) -> dict[int, IntArray]:
        """By shard with labels: the view that scores best at a state, for each label."""
        parts = {shard: part for shard, part in by_shard.items() if len(part.question_L)}

        def call(actor: Any, shard: int, part: Labels) -> Any:
            questions, query_L = np.unique(part.question_L, return_inverse=True)
            return actor.winners.remote(at, shard, query_L, part.passage_L, queries_LD[questions])

        return dict(zip(sorted(parts), self.per_shard(parts, call)))

    def query_sums(self, at: StateId, by_shard: Mapping[int, Labels], num_queries: int) -> list[LabelSums]:
        """Each shard's part of the queries' sums (eqs. 7 and 11)."""
        return self.per_shard(by_shard, lambda actor, s, part: actor.query_sums.remote(at, s, part, num_queries))

    def move(
        self,
        at: StateId,
        to: StateId,
        by_shard: Mapping[int, Labels],
        queries_LD: FloatArray,
        settings: GradientSettings | LinearSettings,
    ) -> list[ShardStep]:
        """Move the labelled views of every shard from one state to the next."""
        sent = share(queries_LD)
        return self.per_shard(by_shard, lambda actor, s, part: actor.move.remote(at, to, s, part, sent, settings))

    def add_feedback(
        self,
        at: StateId,
        to: StateId,
        by_shard: Mapping[int, Labels],
        queries_LD: FloatArray,
        settings: FeedbackSettings,
    ) -> list[ShardStep]:
        """Give the positively labelled passages of every shard their feedback views, from one state to the next."""
        sent = share(queries_LD)
        return self.per_shard(
            by_shard, lambda actor, s, part: actor.add_feedback.remote(at, to, s, part, sent, settings)
        )

    def write(self, at: StateId, recall_sample: int) -> list[WrittenShard]:
        """Put every shard at rest as it is at a state."""
        parts = dict.fromkeys(self.shards, recall_sample)
        return self.per_shard(parts, lambda actor, shard, sample: actor.write.remote(at, shard, sample))


class Call(NamedTuple):
    """A call that an actor works on, and the reference of its result; of a `LocalRefiner` the result itself."""

    actor: Any
    ref: Any


def _new_refiner(task: RefinerTask, cpus: float) -> Any:
    """An actor over the task's shards in a Ray session, else the same in this process."""
    if not session.in_ray():
        return LocalRefiner(ShardRefiner(task))
    import ray

    limits = {"max_restarts": MAX_RESTARTS, "max_task_retries": MAX_RESTARTS}
    return ray.remote(ShardRefiner).options(num_cpus=cpus, **limits).remote(task)


class LocalRefiner:
    """Stands for an actor where there is none: `refiner.METHOD.remote(...)` calls the method at once."""

    def __init__(self, refiner: ShardRefiner) -> None:
        self._refiner = refiner

    def __getattr__(self, method: str) -> "LocalMethod":
        return LocalMethod(getattr(self._refiner, method))


class LocalMethod(NamedTuple):
    """A method of a `LocalRefiner`."""

    remote: Callable[..., Any]


def _in_flight(requests: Iterator[Any], width: int) -> Iterator[Any]:
    """Draw `width` items ahead of the one handed out, so that the next request runs while an answer is merged."""
    waiting = deque(islice(requests, width))
    while waiting:
        yield waiting.popleft()
        waiting.extend(islice(requests, 1))
