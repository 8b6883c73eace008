"""The driver's side of refinement actors: scatter to all shards, gather in shard order, merge.

Nothing here depends on which actor holds which shard: what is found is exact and merged by score and id, and every
other answer is per shard and is summed in shard order, so one refiner and eight give the same bytes. A killed actor is
started again by Ray from files and brings itself to the round that a call names.

Shapes: Q queries, K hits, L labels. Passages are numbered through all shards: `shard_start[shard] + row`.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import ray

from mvr_ray.core.merging import NumberedHits, in_doubt, merge_numbered
from mvr_ray.core.pseudo_labels import Labels
from mvr_ray.core.scoring import first_depth
from mvr_ray.core.searching.exact import distinct
from mvr_ray.distributed.failures import own_errors
from mvr_ray.distributed.refinement.shards import RefinerTask, ShardRefiner
from mvr_ray.store.corpus import shard_of
from mvr_ray.types import FloatArray, Hit, IntArray, Progress, ShardHits

QUERY_BLOCK = 256  # queries scattered at a time; bounds what is in flight to two blocks of hits a shard
LABEL_BLOCK = 1_000_000


class HitTable(NamedTuple):
    """Merged hits as arrays, best first: passage_QK int64 and view_QK int16, both -1 on padding."""

    passage_QK: IntArray
    view_QK: IntArray


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


class Refiners:
    """All shards of one index version, held by `count` actors. Use as a context manager."""

    def __init__(self, task: RefinerTask, num_shards: int, count: int, cpus: float) -> None:
        """`num_shards` is what passage ids are hashed to; the largest shards go first, to the least loaded actor."""
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
        remote: Any = ray.remote(ShardRefiner).options(num_cpus=cpus, max_restarts=4, max_task_retries=4)
        self.start_of = dict(zip(self.shards, self.shard_start.tolist()))
        self.actors: list[Any] = [
            remote.remote(task.holding({shard: self.start_of[shard] for shard in shards})) for _, shards in loads
        ]
        self.searched = [(actor, held) for actor, (held, _) in zip(self.actors, loads) if held]
        self.holder: dict[int, Any] = {}
        for actor, (_, shards) in zip(self.actors, loads):
            self.holder.update(dict.fromkeys(shards, actor))
        self.labels = LabelCache()

    def __enter__(self) -> "Refiners":
        return self

    def __exit__(self, *exception: object) -> None:
        for actor in self.actors:
            ray.kill(actor)

    def get(self, refs: Sequence[Any]) -> list[Any]:
        with own_errors("refinement"):
            return ray.get(list(refs))

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
        asked = [shard for shard in self.shards if by_shard[shard]]
        found = self.get([self.holder[shard].locate.remote(shard, by_shard[shard]) for shard in asked])
        return {
            passage_id: self.start_of[shard] + int(row)
            for shard, rows in zip(asked, found)
            for passage_id, row in zip(by_shard[shard], rows)
            if row >= 0
        }

    def search(self, at: int, queries_QD: FloatArray, k: int, what: str, progress: Progress) -> HitTable:
        """Exact top k of every query over the shards as they stand after round `at`.

        Actors are asked for fewer than k, as the router asks them, for k where that leaves a doubt, and for each shard
        alone where ties do: only within a shard do rows stand in order of id.
        """
        k = min(k, self.num_passages)
        first = first_depth(k, [held for _, held in self.searched], min(QUERY_BLOCK, len(queries_QD)))
        passage_QK = np.full((len(queries_QD), k), -1, np.int64)
        view_QK = np.full((len(queries_QD), k), -1, np.int16)
        blocks = [slice(low, low + QUERY_BLOCK) for low in range(0, len(queries_QD), QUERY_BLOCK)]

        def ask(block: slice) -> list[Any]:
            part = ray.put(np.ascontiguousarray(queries_QD[block]))
            return [actor.search.remote(at, part, first) for actor, _ in self.searched]

        for block, answers in zip(blocks, _in_flight(map(ask, blocks), 2)):
            found = self.get(answers)
            merged = self._merged(found, k)
            passage_QK[block], view_QK[block] = merged.passage_QK, merged.view_QK
            again = in_doubt(found, merged.kth_Q)
            if first < k and len(again):
                rows = block.start + again
                found = self.get([actor.search.remote(at, queries_QD[rows], k) for actor, _ in self.searched])
                merged = self._merged(found, k)
                passage_QK[rows], view_QK[rows] = merged.passage_QK, merged.view_QK
                again = again[in_doubt(found, merged.kth_Q)]
            if len(again):
                rows = block.start + again
                apart = self.get([actor.search_apart.remote(at, queries_QD[rows], k) for actor, _ in self.searched])
                shards = [one for answer in apart for one in answer]
                passage_QK[rows], view_QK[rows], _ = merge_numbered(shards, k, self.ids_of)
            progress(what, min(block.stop, len(queries_QD)), len(queries_QD))
        return HitTable(passage_QK, view_QK)

    def _merged(self, answers: Sequence[ShardHits], k: int) -> NumberedHits:
        return merge_numbered([(0, hits) for hits in answers], k, self.ids_of, in_id_order=False)

    def ids_of(self, passages: IntArray) -> list[str]:
        """Ids of numbered passages."""
        at, rows = self.place(passages)
        numbers = distinct(at)
        asked = [self.shards[number] for number in numbers]
        told = self.get([self.holder[s].ids_of.remote(s, rows[at == n].tolist()) for s, n in zip(asked, numbers)])
        ids = np.empty(len(passages), object)
        for number, names in zip(numbers, told):
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
        picked, refs = [], []
        for number in distinct(at):
            here = np.flatnonzero(at == number)
            asked, inverse = np.unique(questions[here], return_inverse=True)
            shard = self.shards[number]
            refs.append(
                self.holder[shard].mark.remote(shard, rows[here], inverse, [answers[question] for question in asked])
            )
            picked.append(here)
        marked = np.zeros(len(keys), bool)
        for here, values in zip(picked, self.get(refs)):
            marked[here] = values
        return marked

    def split(self, labels: Labels) -> dict[int, Labels]:
        """Labels of every shard (perhaps none), in the order given; passages become rows of the shard."""
        at_L, row_L = self.place(labels.passage_L)
        by_row = labels._replace(passage_L=row_L)
        return {shard: by_row.take(at_L == number) for number, shard in enumerate(self.shards)}

    def each(self, method: str, at: int, per_shard: Mapping[int, tuple[Any, ...]], *common: Any) -> list[Any]:
        """Call `method(at, shard, *its arguments, *common)` for each shard named; answers in shard order."""
        shards = sorted(per_shard)
        common = tuple(ray.put(value) if isinstance(value, np.ndarray) else value for value in common)
        return self.get([getattr(self.holder[s], method).remote(at, s, *per_shard[s], *common) for s in shards])


def fill(merged: list[list[Hit]], passage_QK: IntArray, view_QK: IntArray, number_of: Any) -> None:
    """Write merged hits into rows of the two arrays."""
    for row, hits in enumerate(merged):
        passage_QK[row, : len(hits)] = [number_of(hit) for hit in hits]
        view_QK[row, : len(hits)] = [hit.view for hit in hits]


def _in_flight(asked: Iterator[Any], width: int) -> Iterator[Any]:
    """Draw `width` items ahead of the one handed out, so that the next request runs while an answer is merged."""
    waiting = deque(islice(asked, width))
    while waiting:
        yield waiting.popleft()
        waiting.extend(islice(asked, 1))
