"""Search a corpus by BM25, with the words and the scores of `index.lexical`.

The words are those that a version stores of the corpus, else they are indexed in memory. Equal scores are ordered by
passage id, so the ranking is deterministic.

Shapes: Q queries, P passages, K hits.
"""

import heapq
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from mvr_ray.config import RunConfig
from mvr_ray.core.searching.hybrid import best_positive
from mvr_ray.distributed.indexing.lexical import open_statistics
from mvr_ray.errors import MissingInputError, ShardIndexError, StorageError
from mvr_ray.index.lexical import K1, B, Postings, WordRule, indexed_text
from mvr_ray.store import manifest as manifests
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.manifest import Manifest
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
_BATCH = 1000
"""Texts that are cut into words at a time."""

NO_VIEW = -1
"""The view number of a BM25 hit."""


def open_bm25(run: RunConfig, corpus: Corpus, progress: Progress = no_progress) -> "StoredBM25 | BM25Index":
    """Open the words of the newest version of the run's index with this corpus and language, else make an index."""
    store, language = corpus.store, run.index.language
    for version in manifests.newest_first(store, run.index.name, require_live=False):
        if version.lexical and version.corpus_digest == corpus.digest and len(version.shards) == corpus.num_shards:
            try:
                words = StoredBM25(corpus, version)
            except (MissingInputError, StorageError, ShardIndexError) as error:
                log.warning("words of version %d are not used: %s", version.version, error)
                continue
            if words.rule == WordRule(language):
                return words
    return BM25Index(corpus, language, progress)


class StoredBM25:
    """BM25 by the words that a version stores of its corpus, over as many shards as the corpus has parts; mapped."""

    def __init__(self, corpus: Corpus, version: Manifest) -> None:
        """Open the words of a version.

        Raises MissingInputError, StorageError and ShardIndexError if they cannot be read.
        """
        assert version.lexical, "the version has no words"
        store, shards = corpus.store, range(corpus.num_shards)
        self._statistics = open_statistics(store, version)
        self.rule = self._statistics.rule
        files = store.for_each(lambda own: manifests.open_lexical(store, version.index, own), version.lexical.postings)
        self._postings = [Postings(*own) for own in files]
        corpus.open_parts(shards)
        self._ids = [corpus.part(shard).table(["id"]).column("id") for shard in shards]

    def search(self, texts: Sequence[str], k: int, progress: Progress = no_progress) -> list[list[Hit]]:
        """Search as `BM25Index.search` does."""
        hit_lists: list[list[Hit]] = []
        for words in self.rule.tokenize(texts):
            scores = [postings.scores(words, self._statistics) for postings in self._postings]
            rows = [best_positive(scores_P, k) for scores_P in scores]
            best_scores = [scores_P[own] for scores_P, own in zip(scores, rows)]
            least = np.sort(np.concatenate(best_scores))[-k:].min(initial=np.inf)
            best = [
                (-score, ids[row].as_py())
                for ids, own, own_scores in zip(self._ids, rows, best_scores, strict=True)
                for row, score in zip(own.tolist(), own_scores.tolist())
                if score >= least
            ]
            hit_lists.append([Hit(name, -score, NO_VIEW, -1, -1) for score, name in heapq.nsmallest(k, best)])
            progress("bm25", len(hit_lists), len(texts))
        return hit_lists


class BM25Index:
    """A BM25 index of the whole corpus in memory, several times its text; `language` as `index.language`."""

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
        return [Hit(self._ids[row], float(scores_P[row]), NO_VIEW, -1, -1) for row in best_positive(scores_P, k)]
