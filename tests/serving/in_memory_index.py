"""A three-passage index held in arrays: what a service needs from a router, computed by brute force."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from mvr_ray.deadline import Deadline
from mvr_ray.errors import CoverageError, MissingInputError, UnknownPassageError
from mvr_ray.store.filters import parse_filter
from mvr_ray.types import SEARCHED, Answer, Exactness, FloatArray, Hit, Passage, PassageScores, ShardState, SwapState

PASSAGES = [
    Passage("p1", "Rivers", "The Nile is long. The Rhine is shorter."),
    Passage("p2", "Hills", "A hill is low."),
    Passage("p3", "Seas", "The sea is deep. It is salt."),
]
SPANS: dict[str, list[tuple[int, int] | None]] = {
    "p1": [(0, 17), (18, 39)],
    "p2": [(0, 14), None],
    "p3": [(0, 16), (17, 28)],
}
VIEWS_PVD = np.array([[[1, 0, 0], [0, 1, 0]], [[0, 0, 1], [0, 0, 0]], [[0.5, 0.5, 0], [0, 0.6, 0.6]]], dtype=np.float32)
WORDS = ("nile", "rhine", "hill")


class InMemoryIndex:
    """Scores every view of every passage. `missing` passages count as not searched; `gate` holds an answer back.
    `exact` says what an answer tells of itself, in place of what is so."""

    dimension = 3
    num_views = 2
    state = SwapState(1, follows=True)
    corpus = SimpleNamespace(fields={})
    manifest = SimpleNamespace(
        index="library", version=3, encoder_name="words", encoder_fingerprint="f" * 16, lexical=None
    )

    def __init__(self, missing: int = 0, feedback: bool = False, exact: Exactness | None = None) -> None:
        self.exact = exact or Exactness(not missing, "flat", 1, 0, None)
        self.missing = missing
        self.feedback = feedback
        self.gate = threading.Event()
        self.gate.set()

    @contextmanager
    def pin(self, version: int | None = None, deadline: Deadline | None = None) -> Iterator["InMemoryIndex"]:
        if version not in (None, 3):
            raise MissingInputError(f"only version 3 is open here, not {version}; leave version out")
        yield self

    def follow(self, deadline: Deadline | None = None) -> bool:
        return False

    def search(
        self,
        queries_QD: FloatArray,
        k: int,
        *,
        deadline: Deadline | None = None,
        min_coverage: float = 1.0,
        filter: Mapping[str, Any] | None = None,
        hybrid: object = None,
        parts: bool = False,
    ) -> Answer:
        self.gate.wait(60)
        condition, table = parse_filter(filter or {}, {}), pa.Table.from_pylist([one._asdict() for one in PASSAGES])
        passing = np.flatnonzero(condition.mask(table)).tolist()
        rows = []
        for query_D in queries_QD:
            scores_PV = VIEWS_PVD @ query_D
            order = sorted(passing, key=lambda p: (-scores_PV[p].max(), PASSAGES[p].id))[:k]
            offset = 2 if self.feedback else 0
            rows.append(
                [
                    Hit(PASSAGES[p].id, float(scores_PV[p].max()), int(scores_PV[p].argmax()) + offset, 0, p)
                    for p in order
                ]
            )
        states = (ShardState(0, 3 - self.missing, SEARCHED), ShardState(1, self.missing, "died"))
        answer = Answer(rows, "library", 3, "f" * 16, states, self.exact)
        if answer.coverage_share < min_coverage:
            raise CoverageError("1 of 2 shards did not answer: 1 (died)", states)
        return answer

    def search_text(self, texts: Sequence[str], k: int, **options: Any) -> Answer:
        return self.search(self.embed(texts), k, **options)

    def embed(self, texts: Sequence[str]) -> FloatArray:
        counts = [[float(text.lower().count(word)) for word in WORDS] for text in texts]
        return np.array(counts, dtype=np.float32)

    def count_tokens(self, texts: Sequence[str]) -> int:
        return sum(len(text.split()) for text in texts)

    def example_queries(self, num: int) -> list[str]:
        return ["How long is the Nile?", "What is a hill?", "Is the sea salt?"][:num]

    def explain(
        self, queries_QD: FloatArray, passage_ids: Sequence[str], deadline: Deadline | None = None
    ) -> list[PassageScores]:
        """Every passage has a third, feedback view where the library has any: half of its first view."""
        rows = {passage.id: row for row, passage in enumerate(PASSAGES)}
        all_scores = []
        for passage_id in passage_ids:
            if passage_id not in rows:
                raise UnknownPassageError(f"index 'library' version 3 holds no passage {passage_id!r}; ask", passage_id)
            vectors_ND = VIEWS_PVD[rows[passage_id]][: 1 + (SPANS[passage_id][1] is not None)]
            numbers_N = np.arange(len(vectors_ND))
            if self.feedback:
                vectors_ND = np.concatenate([vectors_ND, vectors_ND[:1] / 2])
                numbers_N = np.append(numbers_N, 2)
            scores_QN = queries_QD @ vectors_ND.T
            all_scores.append(PassageScores(passage_id, numbers_N, scores_QN, numbers_N[scores_QN.argmax(axis=1)]))
        return all_scores

    def missing_sources(self) -> list[str]:
        return []

    def passages(self, ids: Sequence[str]) -> Mapping[str, Passage]:
        return {passage.id: passage for passage in PASSAGES if passage.id in set(ids)}

    def view_spans(self, passage: Passage) -> Sequence[tuple[int, int] | None]:
        return SPANS[passage.id]
