"""Defines the value types that all packages share: plain, immutable, numpy only.

Shapes: Q queries, P passages, N view vectors, D dimension, K hits kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating]
IntArray = NDArray[np.integer]


FieldValue = str | int | float | bool | date | tuple[str, ...]
"""A timestamp is a `datetime`, which is a `date`, in UTC."""


class Passage(NamedTuple):
    """The unit that is embedded and retrieved.

    `fields` are names and values in the order of the corpus's fields, without those that the passage lacks. Filters
    and readers use them; embeddings do not depend on them.
    """

    id: str
    title: str
    text: str
    fields: tuple[tuple[str, FieldValue], ...] = ()

    @property
    def values(self) -> dict[str, FieldValue]:
        """The fields by name: dates and timestamps are those of Python."""
        return dict(self.fields)


class Question(NamedTuple):
    """A question, its known answers and its known passages.

    `answer_starts[i]` is the character offset of `answers[i]` in the text of `positive_ids[0]`, -1 where unknown.
    `teacher_scores` of a cross-encoder, if any: of `positive_ids[0]`, then of each hard negative. `positive_grades` say
    how relevant each of `positive_ids` is, from 1; empty: 1 each.
    """

    id: str
    text: str
    answers: tuple[str, ...] = ()
    positive_ids: tuple[str, ...] = ()
    hard_negative_ids: tuple[str, ...] = ()
    answer_starts: tuple[int, ...] = ()
    teacher_scores: tuple[float, ...] = ()
    positive_grades: tuple[int, ...] = ()

    @property
    def grade_of(self) -> dict[str, int]:
        """The grade of each positive passage."""
        return dict(zip(self.positive_ids, self.positive_grades or (1,) * len(self.positive_ids)))


class ShardHits(NamedTuple):
    """The best passages of one shard, best first: score descending, then row ascending (rows are in id order).

    rows_QK    int64, row of the passage in its shard, -1 where the shard has fewer than K passages
    scores_QK  float32, the exact inner product of the best view, -inf on padding
    views_QK   int16, the view number that won (lowest on ties), -1 on padding
    frontier_Q float32, upper bound on the score of every omitted passage (-inf when all were returned)
    """

    rows_QK: IntArray
    scores_QK: FloatArray
    views_QK: IntArray
    frontier_Q: FloatArray


class CountedHits(NamedTuple):
    """The hits of one shard, and the number of passages that the search scored exactly.

    rescored_Q int64, passages proposed by a fast scan, an approximate index or their words, whose stored views were
               then scored exactly; the number varies with the threads, the hits do not
    """

    hits: ShardHits
    rescored_Q: IntArray


class Hit(NamedTuple):
    """One retrieved passage. `view` is the view number that won; `shard` and `row` locate it."""

    passage_id: str
    score: float
    view: int
    shard: int
    row: int


HybridWeight = float | Literal["rrf", "words"]
"""The weight of the dense score beside BM25; "rrf": both sides' reciprocal ranks; "words": BM25 alone, of passages that
have a word of the query."""


class HybridQueries(NamedTuple):
    """Input of a hybrid search beside the query vectors: the queries' texts, and the weight of the dense score."""

    texts: tuple[str, ...]
    weight: HybridWeight

    def take(self, queries: IntArray) -> "HybridQueries":
        return HybridQueries(tuple(self.texts[query] for query in queries.tolist()), self.weight)


class HybridParts(NamedTuple):
    """The parts of a hybrid hit's score: the BM25 score, and the dense score of the view that won."""

    lexical: float
    dense: float


@dataclass(frozen=True)
class Exactness:
    """`certified`: the hits are those of exhaustive search over every passage's stored views, to the last tie.

    `method` is flat, or the approximate index's name; where views were pruned from the index, it says so, with their
    distance from the others. `recall` of an approximate index comes from its manifest: measured against exact search
    when it was built; None for an exact index, and where it was not measured. `rounds` counts the requests to shards.
    `rescored` counts, over all queries and shards, the passages proposed by a fast scan, an approximate index or their
    words, whose stored views were then scored exactly.
    """

    certified: bool
    method: str
    rounds: int
    rescored: int
    recall: float | None = None


SEARCHED = "searched"


class SwapState(NamedTuple):
    """The live version of a router, whether it follows the newest one, and why its last move failed (empty: it did
    not): `failed_version` was not opened, or, if that is 0, the versions could not be listed."""

    version: int
    follows: bool
    failed_version: int = 0
    failure: str = ""


@dataclass(frozen=True)
class ShardState:
    """State of one shard in an answer: `searched`, or why it was not.

    `died` its searcher is restarting; `late` no answer in time; `hung` its searcher did not answer its probe and was
    replaced; `damaged` a file of it differs from its manifest, and `reason` names it. A shard that returned its first
    rows, but not further ones that the router requested, is not `searched`, and `reason` says so.
    """

    shard: int
    passages: int
    state: str
    reason: str = ""


class Answer(NamedTuple):
    """A router's answer to a batch of queries: hits per query, and the shards that were searched.

    `shards` are all of the version's, in order.
    """

    hits: list[list[Hit]]
    index: str
    version: int
    encoder_fingerprint: str
    shards: tuple[ShardState, ...]
    exact: Exactness
    parts: Sequence[Sequence[HybridParts]] = ()
    """Of each hit of a hybrid search, if the request included them."""

    @property
    def passages_total(self) -> int:
        return sum(shard.passages for shard in self.shards)

    @property
    def passages_searched(self) -> int:
        return sum(shard.passages for shard in self.shards if shard.state == SEARCHED)

    @property
    def coverage_share(self) -> float:
        return self.passages_searched / self.passages_total if self.passages_total else 1.0


class FleetCounts(NamedTuple):
    """A process's calls to searchers since it started; `waiting` is the current number.

    `hedges` counts calls sent because another replica was slow, `hedge_wins` those that answered first, `refusals` the
    requests that found every queue full. `waiting` calls wait or run, at most `most_waiting` at one searcher.
    """

    hedges: int = 0
    hedge_wins: int = 0
    refusals: int = 0
    waiting: int = 0
    most_waiting: int = 0


class PassageScores(NamedTuple):
    """Scores of every stored view of one passage with every query; a search takes the best of them.

    view_numbers_N  int16, ascending; numbers from V on are feedback views, a missing view is absent
    scores_QN       float32, the exact inner products
    winner_Q        int16, the view number that wins (lowest on ties), as a hit names it
    """

    passage_id: str
    view_numbers_N: IntArray
    scores_QN: FloatArray
    winner_Q: IntArray


class UnreadCounts(NamedTuple):
    """Numbers of passages that an encoder does not read whole: `num_cut` are longer than its limit, and `num_unknown`
    have a quarter or more of their characters in tokens outside its vocabulary."""

    num_cut: int = 0
    num_unknown: int = 0


ALL_READ = UnreadCounts()


class EmbeddingBlock(NamedTuple):
    """Some passages of one shard with all their views, in id order.

    ids            passage ids, P of them, ascending
    row_ptr        int64 [P + 1], from 0 to N; the views of passage i are vectors row_ptr[i] .. row_ptr[i + 1]
    view_numbers_N int16, ascending within a passage; a missing view is absent; numbers from V on are feedback views
    vectors_ND     float16 or float32, perhaps memory-mapped and read-only
    """

    ids: list[str]
    row_ptr: IntArray
    view_numbers_N: IntArray
    vectors_ND: FloatArray


class StoredBlocks(NamedTuple):
    """The blocks of a shard as its files have them, so that none is copied for a change.

    rows    for each block the row in the shard of each passage, -1 where a later file hides it by a change; None: the
            rows are consecutive
    """

    blocks: list[EmbeddingBlock]
    rows: list[IntArray] | None = None


Progress = Callable[[str, int, int], None]
"""Callback of long work, called with (what, count, total)."""


def no_progress(what: str, count: int, total: int) -> None:
    """Ignore progress."""
