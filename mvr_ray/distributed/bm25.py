"""BM25 over a corpus in memory, with the words and the scores of `index.lexical`.

Equal scores are ordered by passage id, so the ranking is deterministic.

Shapes: Q queries, P passages, K hits.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from mvr_ray.index.lexical import K1, B, WordRule, indexed_text
from mvr_ray.store.corpus import Corpus
from mvr_ray.types import Hit, Progress, no_progress


@contextmanager
def _without_jax() -> Iterator[None]:
    """Hide an installed JAX from the imports of a block: bm25s starts it, and it then takes 3/4 of a GPU's memory."""
    if "jax" in sys.modules:
        yield
        return
    sys.modules["jax"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["jax"]


with _without_jax():
    import bm25s

_BATCH = 1000
"""Texts that are cut into words at a time."""

NO_VIEW = -1
"""The view number of a BM25 hit."""


class BM25Index:
    """A BM25 index of the whole corpus in memory, about as large as its text; `language` as `index.language`."""

    def __init__(self, corpus: Corpus, language: str = "english", progress: Progress = no_progress) -> None:
        self._rule = WordRule(language)
        text_of = {passage.id: indexed_text(passage) for passage in corpus}
        self._ids = sorted(text_of)
        numbers_of: list[list[int]] = []
        number_of: dict[str, int] = {}
        for start in range(0, len(self._ids), _BATCH):
            for words in self._rule.tokenize([text_of[passage_id] for passage_id in self._ids[start : start + _BATCH]]):
                numbers_of.append([number_of.setdefault(word, len(number_of)) for word in words])
        self._searcher = bm25s.BM25(method="lucene", k1=K1, b=B)
        self._vocabulary = number_of
        if number_of:  # bm25s fails over texts without a word
            self._searcher.index((numbers_of, number_of), show_progress=False)
        progress("bm25 index", len(self._ids), len(self._ids))

    def search(self, texts: Sequence[str], k: int, progress: Progress = no_progress) -> list[list[Hit]]:
        """Search each text for the best k passages, fewer if fewer share a word with it. Hits have shard -1."""
        hit_lists: list[list[Hit]] = []
        for words in self._rule.tokenize(texts):
            hit_lists.append(self._best([word for word in words if word in self._vocabulary], k))
            progress("bm25", len(hit_lists), len(texts))
        return hit_lists

    def _best(self, words: list[str], k: int) -> list[Hit]:
        if not words:
            return []
        scores_P = np.asarray(self._searcher.get_scores(words))
        rows = np.flatnonzero(scores_P > 0)
        if len(rows) > k:
            kth = np.partition(scores_P[rows], len(rows) - k)[len(rows) - k]
            rows = rows[scores_P[rows] >= kth]
        best = rows[np.argsort(-scores_P[rows], kind="stable")][:k]
        return [Hit(self._ids[row], float(scores_P[row]), NO_VIEW, -1, -1) for row in best]
