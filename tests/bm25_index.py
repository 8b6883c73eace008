"""BM25 by bm25s over a whole corpus in memory: a reference for the words that versions store."""

from collections.abc import Iterable, Sequence

import bm25s
import numpy as np

from mvr_ray.core.searching.hybrid import best_positive
from mvr_ray.distributed.bm25 import NO_VIEW
from mvr_ray.index.lexical import K1, B, WordRule, indexed_text
from mvr_ray.types import Hit, Passage


class BM25Index:
    """A BM25 index of all passages; `language` as `index.language`."""

    def __init__(self, passages: Iterable[Passage], language: str = "english") -> None:
        self._rule = WordRule(language)
        text_of = {passage.id: indexed_text(passage) for passage in passages}
        self._ids = sorted(text_of)
        self._vocabulary: dict[str, int] = {}
        numbers = [
            [self._vocabulary.setdefault(word, len(self._vocabulary)) for word in words]
            for words in self._rule.tokenize([text_of[passage_id] for passage_id in self._ids])
        ]
        self._searcher = bm25s.BM25(method="lucene", k1=K1, b=B)
        if self._vocabulary:  # bm25s fails over texts without a word
            self._searcher.index((numbers, self._vocabulary), show_progress=False)

    def search(self, texts: Sequence[str], k: int) -> list[list[Hit]]:
        """Search each text for the best k passages, fewer if fewer share a word with it. Hits have shard -1."""
        return [
            self._best([word for word in words if word in self._vocabulary], k) for words in self._rule.tokenize(texts)
        ]

    def _best(self, words: list[str], k: int) -> list[Hit]:
        if not words:
            return []
        scores_P = np.asarray(self._searcher.get_scores(words))
        return [Hit(self._ids[row], float(scores_P[row]), NO_VIEW, -1, -1) for row in best_positive(scores_P, k)]
