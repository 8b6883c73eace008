"""BM25 over a corpus: Lucene's form with k1 0.9 and b 0.4, English stems, no stop words.

A passage is its title and its text. Equal scores are ordered by passage id, so the ranking is deterministic.

Shapes: Q queries, P passages, K hits.
"""

import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import Stemmer  # type: ignore[missing-import]

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

log = logging.getLogger(__name__)

K1, B = 0.9, 0.4
_STOP_WORDS = "en"
_BATCH = 256
NO_VIEW = -1
"""The view number of a BM25 hit."""


class BM25Index:
    """A BM25 index of the whole corpus in memory, about as large as its text."""

    def __init__(self, corpus: Corpus, progress: Progress = no_progress) -> None:
        self._stemmer = Stemmer.Stemmer("english")
        ids: list[str] = []
        texts: list[str] = []
        for passage in corpus:
            ids.append(passage.id)
            texts.append(f"{passage.title}\n{passage.text}")
        order = sorted(range(len(ids)), key=ids.__getitem__)
        self._ids = [ids[at] for at in order]
        tokens: Any = bm25s.tokenize(
            [texts[at] for at in order], stopwords=_STOP_WORDS, stemmer=self._stemmer, show_progress=False
        )
        self._searcher = bm25s.BM25(method="lucene", k1=K1, b=B)
        self._searcher.index(tokens, show_progress=False)
        self._vocabulary = set(tokens.vocab)
        progress("bm25 index", len(ids), len(ids))

    def search(self, texts: Sequence[str], k: int, progress: Progress = no_progress) -> list[list[Hit]]:
        """Search each text for the best k passages, fewer if fewer share a word with it. Hits have shard -1."""
        hit_lists: list[list[Hit]] = []
        for at in range(0, len(texts), _BATCH):
            words: Any = bm25s.tokenize(
                list(texts[at : at + _BATCH]),
                stopwords=_STOP_WORDS,
                stemmer=self._stemmer,
                return_ids=False,
                show_progress=False,
            )
            hit_lists += [self._best([word for word in some if word in self._vocabulary], k) for some in words]
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
