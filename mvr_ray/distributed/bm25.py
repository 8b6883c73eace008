"""Search a corpus by BM25, with the words and the scores of `index.lexical`.

The words are those that a version stores of the corpus, else they are indexed in a folder of this machine. Equal scores
are ordered by passage id, so the ranking is deterministic.

Shapes: Q queries, P passages, K hits.
"""

import heapq
import logging
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from mvr_ray.config import RunConfig
from mvr_ray.core.searching.hybrid import best_positive
from mvr_ray.distributed.indexing.lexical import open_statistics
from mvr_ray.errors import MissingInputError, ShardIndexError, StorageError
from mvr_ray.index.lexical import (
    CorpusStatistics,
    Postings,
    PostingsFile,
    WordRule,
    WordWeights,
    write_postings,
    write_statistics,
)
from mvr_ray.store import manifest as manifests
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.embeddings import arrow_rows
from mvr_ray.store.scratch import scratch_folder
from mvr_ray.store.storage_errors import storage_errors
from mvr_ray.types import Hit, Progress, no_progress

log = logging.getLogger(__name__)
_CACHED_BYTES = 1 << 29
"""Of the weights of words that are kept in memory: many questions have the same words."""

NO_VIEW = -1
"""The view number of a BM25 hit."""


def open_bm25(run: RunConfig, corpus: Corpus, progress: Progress = no_progress) -> "BM25":
    """Open the words of the newest version of the run's index with this corpus and language, else index them."""
    store, language = corpus.store, run.index.language
    for version in manifests.newest_first(store, run.index.name, require_live=False):
        if version.lexical and version.corpus_digest == corpus.digest and len(version.shards) == corpus.num_shards:
            try:
                statistics = open_statistics(store, version.index, version.lexical.statistics)
                if statistics.rule != WordRule(language):
                    continue
                open_files = partial(manifests.open_lexical, store, version.index)
                files = store.for_each(open_files, version.lexical.postings)
                return BM25(corpus, statistics, [Postings(*own) for own in files])
            except (MissingInputError, StorageError, ShardIndexError) as error:
                log.warning("words of version %d are not used: %s", version.version, error)
    return index_words(corpus, language, progress)


def index_words(corpus: Corpus, language: str = "english", progress: Progress = no_progress) -> "BM25":
    """Index the words of a corpus; `language` as `index.language`. The files stay mapped after their folder is deleted.

    Raises StorageError where the temporary folder is full.
    """
    parent, rule, postings, num_passages = Path(tempfile.gettempdir()), WordRule(language), [], 0
    with scratch_folder(parent, "mvr-words-") as folder:
        with storage_errors("write in", str(parent), only_full_disk=True):
            for shard in range(corpus.num_shards):
                path, part = folder / f"{shard}.arrow", corpus.part(shard)
                write_postings(part, path, rule)
                postings.append(Postings(path))
                num_passages += len(part)
                progress("bm25 index", num_passages, corpus.num_passages)
            path = folder / "statistics.arrow"
            write_statistics([own.whole for own in postings], path)
        return BM25(corpus, CorpusStatistics(path), postings)


class BM25:
    """BM25 by the words of a corpus, of which each part has a shard; mapped."""

    def __init__(self, corpus: Corpus, statistics: CorpusStatistics, postings: Sequence[Postings]) -> None:
        """Raises MissingInputError, StorageError for a corpus that cannot be read."""
        self._statistics, self._postings, shards = statistics, postings, range(corpus.num_shards)
        self._weights: dict[tuple[PostingsFile, str], WordWeights | None] = {}
        self._num_bytes = 0
        corpus.open_parts(shards)
        self._ids = [corpus.part(shard).table(["id"]).column("id") for shard in shards]

    def search(self, texts: Sequence[str], k: int, progress: Progress = no_progress) -> list[list[Hit]]:
        """Search each text for the best k passages, fewer if fewer share a word with it. Hits have shard -1."""
        hit_lists: list[list[Hit]] = []
        for words in self._statistics.rule.tokenize(texts):
            scores = [postings.scores(words, self._statistics, self._weigh) for postings in self._postings]
            rows = [best_positive(scores_P, k) for scores_P in scores]
            best_scores = [scores_P[own] for scores_P, own in zip(scores, rows)]
            least = np.sort(np.concatenate(best_scores))[-k:].min(initial=np.inf)
            best: list[tuple[float, str]] = []
            for ids, own, own_scores in zip(self._ids, rows, best_scores, strict=True):
                num = int(np.count_nonzero(own_scores >= least))  # they are the first ones
                best += zip((-own_scores[:num]).tolist(), ids.take(arrow_rows(own[:num])).to_pylist())
            hit_lists.append([Hit(name, -score, NO_VIEW, -1, -1) for score, name in heapq.nsmallest(k, best)])
            progress("bm25", len(hit_lists), len(texts))
        return hit_lists

    def _weigh(self, file: PostingsFile, word: str, statistics: CorpusStatistics) -> WordWeights | None:
        """Return the weights of a word, which are computed once until they fill the memory for them."""
        key = file, word
        if key not in self._weights:
            weights = file.weights(word, statistics)
            self._num_bytes += sum(own.nbytes for own in weights or ())
            if self._num_bytes > _CACHED_BYTES:
                self._weights, self._num_bytes = {}, sum(own.nbytes for own in weights or ())
            self._weights[key] = weights
        return self._weights[key]
