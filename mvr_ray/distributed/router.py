"""Searches one index version: sends queries to all shards, merges their results, and reports what was searched.

    scatter  every shard returns its best rows and its frontier
    merge    the best k of all shards; shards whose frontier reaches into them get a second round for k rows
    report   version, encoder, passages searched of those in the manifest, certified exact or approximate

The first round asks the shards of an exact index for as many rows as suffice in 99 of 100 calls
(`merging.first_depth`); the certificate says when they do not. The same Router runs over actors and, for laptops and
tests, over shards in this process.

Shapes: Q queries, K hits, D dimension.
"""

import logging
import math
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mvr_ray.config import RunConfig
from mvr_ray.core.encoding.encoder import DualEncoder
from mvr_ray.core.encoding.snippets import snippet_text
from mvr_ray.core.searching.exact import check_k, check_queries, distinct, score_views
from mvr_ray.core.searching.fusion import LIST_DEPTH, fuse_ranks
from mvr_ray.core.searching.merging import first_depth
from mvr_ray.core.threads import torch_threads
from mvr_ray.deadline import Deadline
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.periodic import LastResult
from mvr_ray.distributed.encoders import embeds_texts, open_encoder, require_encoder
from mvr_ray.distributed.indexing.lexical import open_statistics
from mvr_ray.distributed.searching.merged_results import MergedResults, overlay_results, shard_starts
from mvr_ray.distributed.searching.messages import ScanRequest, ShardFailure
from mvr_ray.distributed.searching.searcher import Fleet, LocalSearchers, SearcherTask
from mvr_ray.errors import (
    CoverageError,
    DamagedShardsError,
    DigestError,
    EncoderError,
    MissingInputError,
    NoAnswerError,
    ShardIndexError,
    StorageError,
    UnknownPassageError,
    count_noun,
)
from mvr_ray.index.lexical import CorpusStatistics
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus, ids_by_shard
from mvr_ray.store.embeddings import EmbeddingShard, Views
from mvr_ray.store.files import Store
from mvr_ray.store.filters import parse_filter
from mvr_ray.store.manifest import INDEX_WORDS, LexicalPart, Manifest
from mvr_ray.store.questions import example_queries
from mvr_ray.types import (
    SEARCHED,
    Answer,
    Exactness,
    FloatArray,
    Hit,
    HybridParts,
    HybridQueries,
    HybridWeight,
    Passage,
    PassageScores,
    ShardState,
    SwapState,
)

if TYPE_CHECKING:
    from mvr_ray.distributed.searching.fleet import RemoteSearchers

log = logging.getLogger(__name__)

TIMEOUT_S = 600.0
MAX_SPANS = 16_384
"""Passages whose sentences a router caches: splitting those of ten hits takes longer than the search."""
MAX_DEPTHS = 256
TEXTS_AT_ONCE = 256
"""Texts of hits that are read and counted before the deadline is checked again."""
SOURCES_S = 10.0
"""Seconds for which a check of corpus and encoder in the store stays valid."""
SOURCES_WAIT_S = 1.0
"""Wait for a later check, as the store may be slow; until it ends, the last one is valid."""
PARTS_IN_TURN = 16
"""Open parts of the corpus whose files a check looks for: a list of all is tens of thousands long in a large store."""
SECOND_ROUND_SHARE = 0.25
"""Share of the time reserved for a second round, and for the parts of hybrid scores, if `min_coverage` is below 1; a
silent shard cannot use it up."""
FIRST_ROWS_ONLY = "its first rows are among the hits, those of the second round did not arrive"
RETRY_HINT = "Ray restarts dead searchers: ask again"
DAMAGED = "damaged"
Observe = Callable[[str, float], None]
"""Gets a stage and its seconds: `encode` the questions, `search` the shards, `merge` their answers."""


class Router:
    """Searches one version with its own encoder. Safe to use from several threads."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        fleet: Fleet,
        *,
        timeout_s: float = TIMEOUT_S,
        threads: int = 1,
        gpu: bool = False,
        observe: Observe | None = None,
    ) -> None:
        """`timeout_s` bounds a search without a deadline; `threads` and `gpu` embed questions in this process.
        The searching threads call `observe`.
        """
        self.store = store
        self.manifest = manifest
        self.fleet = fleet
        self.timeout_s = timeout_s
        self.threads = threads
        self.gpu = gpu
        self.observe = observe
        own = weakref.proxy(self)  # so a closed router is freed at once, with its encoder and files
        sizes = [entry.num_passages for entry in manifest.shards]
        self.state = SwapState(manifest.version, follows=False)
        self._start_of = shard_starts(manifest.shards)
        self._first_depth = lru_cache(MAX_DEPTHS)(lambda k, num_queries: first_depth(k, sizes, num_queries))
        self._lock = threading.Lock()
        self._encoder: DualEncoder | None = None
        self._embeds: bool | None = None
        self._corpus: Corpus | None = None
        self._num_looks, self._lacks_parts = 0, False
        self._missing_sources = LastResult(lambda: list(own._find_missing_sources()), SOURCES_S, SOURCES_WAIT_S)
        self._corpus_statistics: CorpusStatistics | None = None
        self._spans = lru_cache(MAX_SPANS)(lambda passage: tuple(own.encoder.view_spans(passage)))

    @contextmanager
    def pin(self, version: int | None = None, deadline: Deadline | None = None) -> Iterator["Router"]:
        """Yield this router, like `HotSwapRouter.pin`. Raises MissingInputError for another version."""
        if version not in (None, self.manifest.version):
            raise MissingInputError(
                f"only version {self.manifest.version} of index {self.manifest.index!r} is open here, not {version}; "
                f"leave version out"
            )
        yield self

    def follow(self, deadline: Deadline | None = None) -> bool:
        """Stay on the version, unlike `HotSwapRouter.follow`."""
        return False

    @property
    def dimension(self) -> int:
        return self.manifest.dimension

    @property
    def num_views(self) -> int:
        return self.manifest.num_views

    @property
    def encoder(self) -> DualEncoder:
        """The encoder snapshot of the index, opened at the first use.

        Raises MissingInputError if the store lacks it, FingerprintError if its folder holds another one.
        """
        with self._lock:
            if self._encoder is None:
                name, fingerprint = self.manifest.encoder_name, self.manifest.encoder_fingerprint
                self._encoder = open_encoder(self.store, name, fingerprint, gpu=self.gpu)
            return self._encoder

    @property
    def embeds(self) -> bool:
        """Whether texts can be embedded: not where another program made the vectors."""
        if self._embeds is None:
            self._embeds = self._encoder is not None or embeds_texts(self.store, self.manifest)
        return self._embeds

    @property
    def corpus(self) -> Corpus:
        """The passages of the index. Raises MissingInputError if the store lacks the corpus."""
        with self._lock:
            if self._corpus is None:
                self._corpus = Corpus.open(self.store, self.manifest.corpus, self.manifest.corpus_digest)
            return self._corpus

    def embed(self, texts: Sequence[str]) -> FloatArray:
        """Embed texts with the version's own encoder: queries_QD. Raises EncoderError for a text without a word."""
        encoder = self.encoder
        with torch_threads(self.threads):
            return encoder.embed_queries(texts)

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Return the number of tokens that `embed` reads of all texts together."""
        return sum(query.num_tokens for query in self.encoder.tokenize_queries(texts))

    def search_text(
        self,
        texts: Sequence[str],
        k: int,
        *,
        deadline: Deadline | None = None,
        min_coverage: float = 1.0,
        filter: Mapping[str, Any] | None = None,
        hybrid: HybridWeight | None = None,
        parts: bool = False,
    ) -> Answer:
        """Embed the questions and `search`; embedding counts towards the deadline. With `hybrid` w a passage scores
        BM25 + w x its dense score, with "rrf" the sum of its reciprocal ranks in both; `parts`: the answer has both
        scores of every hit. For them, too, a quarter of the time is reserved if `min_coverage` is below 1."""
        deadline = deadline or Deadline.after(self.timeout_s)
        with self._record_time("encode"):
            has_vectors = hybrid != 0 or self.embeds  # else BM25 alone ranks
            queries_QD = self.embed(texts) if has_vectors else np.zeros((len(texts), self.dimension), np.float32)
        words = None if hybrid is None else HybridQueries(tuple(texts), hybrid)
        has_parts = parts and words is not None
        search_deadline = deadline.share(1 - SECOND_ROUND_SHARE) if has_parts and min_coverage < 1 else deadline
        options = {"deadline": search_deadline, "min_coverage": min_coverage}
        answer = self.search(queries_QD, k, **options, filter=filter, hybrid=words)
        if has_parts:
            answer = answer._replace(parts=self._parts(queries_QD, texts, answer.hits, deadline))
        return answer

    def search(
        self,
        queries_QD: FloatArray,
        k: int,
        *,
        deadline: Deadline | None = None,
        min_coverage: float = 1.0,
        filter: Mapping[str, Any] | None = None,
        hybrid: HybridQueries | None = None,
    ) -> Answer:
        """Search for the best k distinct passages a query (or all if there are fewer) of the shards that answer by the
        deadline, by default `timeout_s` of the router.

        A filter (`store.filters`) restricts the search to the passages that pass it. An exact index is then exact over
        those; coverage counts all passages, whether they pass or not.

        If `min_coverage` is below 1, a quarter of the time is reserved for a second round. A shard that answers only
        the first round leaves its first rows in the hits and counts as not searched: it may hold better passages.

        With `hybrid` a passage scores BM25 + weight x its dense score, as exactly and with the same certificate. The
        BM25 statistics are those of the whole corpus, independent of a filter. With "rrf" it scores by its ranks among
        the first 100 (or k) of both sides; certified then means that both lists are, and half of the time is reserved
        for the dense side if `min_coverage` is below 1.

        Raises ShardIndexError for k below 1, vectors of another dimension, a weight below 0 and a version without
        words, FilterError for a filter that does not fit the version's corpus, OverloadedError if too many calls wait,
        CoverageError if fewer than `min_coverage` of the manifest's passages were searched, and its subclass
        DamagedShardsError if damaged files are among the causes.
        """
        k, queries_QD = min(check_k(k), self.manifest.num_passages or 1), check_queries(queries_QD, self.dimension)
        deadline = deadline or Deadline.after(self.timeout_s)
        text = parse_filter(filter, self.corpus.fields).text if filter is not None else ""
        if hybrid is not None:
            self._check_hybrid(hybrid, len(queries_QD))
            if hybrid.weight == "rrf":
                return self._search_by_ranks(queries_QD, k, hybrid, min_coverage, deadline=deadline, filter=filter)
        if not len(queries_QD):
            return self._answer([], {}, 0, 0, hybrid)
        exact = self._is_exact(hybrid)
        first_k = self._first_depth(k, _round_up(len(queries_QD))) if exact else k
        reserves_time = first_k < k and min_coverage < 1
        first_deadline = deadline.share(1 - SECOND_ROUND_SHARE) if reserves_time else deadline
        shards = tuple(entry.shard for entry in self.manifest.shards)
        request = ScanRequest(queries_QD, first_k, shards, self.manifest.version, text, hybrid)
        with self._record_time("search"):
            first = self.fleet.fan_out(request, first_deadline)
        results, failures = {result.shard: result for result in first.results}, list(first.failures)
        with self._record_time("merge"):
            merged_results, rounds = MergedResults(results.values(), self._start_of, k), 1
            uncertain = merged_results.uncertain_queries() if exact else {}
        if uncertain:
            with self._record_time("search"):
                positions = distinct(np.concatenate(list(uncertain.values())))
                uncertain_QD, words = queries_QD[positions], hybrid and hybrid.take(positions)
                request = request._replace(queries_QD=uncertain_QD, k=k, shards=tuple(uncertain), hybrid=words)
                second = self.fleet.fan_out(request, deadline, admit=True)
            for result in second.results:
                results[result.shard] = overlay_results(results[result.shard], result, positions)
            failures += [one._replace(detail=one.detail or FIRST_ROWS_ONLY) for one in second.failures]
            merged_results, rounds = MergedResults(results.values(), self._start_of, k), 2
        num_rescored = sum(int(result.rescored_Q.sum()) for result in results.values())
        failure_of = {shard: failure for failure in failures for shard in failure.shards}
        hits = merged_results.hits() or [[] for _ in queries_QD]
        answer = self._answer(hits, failure_of, rounds, num_rescored, hybrid)
        if failure_of:
            self._check_coverage(answer, min_coverage)
        return answer

    def _search_by_ranks(
        self,
        queries_QD: FloatArray,
        k: int,
        hybrid: HybridQueries,
        min_coverage: float,
        *,
        deadline: Deadline,
        **options: Any,
    ) -> Answer:
        """Search both sides and fuse their best hits by reciprocal rank (`core.searching.fusion`)."""
        depth, options["min_coverage"] = max(k, LIST_DEPTH), min_coverage
        words_deadline = deadline.share(0.5) if min_coverage < 1 else deadline
        words_only = hybrid._replace(weight="words")
        words = self.search(queries_QD, depth, deadline=words_deadline, hybrid=words_only, **options)
        dense = self.search(queries_QD, depth, deadline=deadline, **options)
        hits = [fuse_ranks(lists, k) for lists in zip(words.hits, dense.hits)]
        shards = tuple(max(both, key=lambda shard: shard.state != SEARCHED) for both in zip(words.shards, dense.shards))
        exact = replace(
            dense.exact,
            certified=words.exact.certified and dense.exact.certified,
            method=f"reciprocal ranks in the first {depth} by bm25 and the first {depth} by {dense.exact.method}",
            rounds=max(words.exact.rounds, dense.exact.rounds),
            rescored=words.exact.rescored + dense.exact.rescored,
        )
        answer = dense._replace(hits=hits, shards=shards, exact=exact)
        if answer.coverage_share < 1:
            self._check_coverage(answer, min_coverage)
        return answer

    def _is_exact(self, hybrid: HybridQueries | None = None) -> bool:
        """Return whether shards answer exactly; a search by words alone does, with any index of the views."""
        return self.manifest.index_params["kind"] == "flat" or (hybrid is not None and hybrid.weight == "words")

    def _check_hybrid(self, hybrid: HybridQueries, num_queries: int) -> None:
        require_words(self.manifest)
        if not isinstance(hybrid.weight, str) and not (math.isfinite(hybrid.weight) and hybrid.weight >= 0):
            raise ShardIndexError(f"the weight of the dense score is {hybrid.weight}; it must be finite and at least 0")
        if len(hybrid.texts) != num_queries:
            raise ShardIndexError(
                f"{count_noun(num_queries, 'query vector')} and "
                f"{count_noun(len(hybrid.texts), 'text')}; a hybrid search needs one text a vector"
            )

    @contextmanager
    def _record_time(self, stage: str) -> Iterator[None]:
        """Pass the duration of the block to `observe`, also if it fails."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if self.observe:
                self.observe(stage, time.perf_counter() - began)

    def explain(
        self, queries_QD: FloatArray, passage_ids: Sequence[str], deadline: Deadline | None = None
    ) -> list[PassageScores]:
        """Score every stored view of these passages with every query, as `search` does; calls only the shards that
        hold them.

        Raises UnknownPassageError for an id that the version does not hold, ShardIndexError for vectors of another
        dimension, CoverageError if a shard does not answer.
        """
        queries_QD = check_queries(queries_QD, self.dimension)
        stored_views = self._stored_views(passage_ids, deadline or Deadline.after(self.timeout_s))
        for passage_id in passage_ids:
            if passage_id not in stored_views:
                raise UnknownPassageError(
                    f"index {self.manifest.index!r} version {self.manifest.version} holds no passage {passage_id!r}; "
                    f"give an id as `mvr-ray search CONFIG` shows it",
                    passage_id,
                )
        return [score_views(queries_QD, passage_id, *stored_views[passage_id]) for passage_id in passage_ids]

    def _stored_views(self, passage_ids: Sequence[str], deadline: Deadline) -> dict[str, Views]:
        manifest = self.manifest
        ids = ids_by_shard(passage_ids, len(manifest.shards))
        results = self.fleet.views(ids, manifest.version, deadline)
        for failure in results.failures:
            if failure.reason == DAMAGED:
                raise DamagedShardsError(failure.detail)
            raise CoverageError(
                f"shard {failure.shards[0]} of index {manifest.index!r} version {manifest.version}, which would hold "
                f"passage {ids[failure.shards[0]][0]!r}, did not answer ({failure.reason}). {RETRY_HINT}"
            )
        return results.views

    def lexical_scores(self, texts: Sequence[str], passages: Sequence[Passage]) -> dict[str, FloatArray]:
        """Return, by passage id, the BM25 score with each text, as in a hybrid search.

        Raises ShardIndexError for a version without words, DigestError if the statistics are damaged.
        """
        statistics = self._statistics()
        words, counts = statistics.rule.tokenize(texts), zip(passages, statistics.rule.count_words(passages))
        return {one.id: np.array([statistics.score(own, of) for own in words], np.float32) for one, of in counts}

    def _statistics(self) -> CorpusStatistics:
        files = require_words(self.manifest).statistics
        with self._lock:
            if self._corpus_statistics is None:
                self._corpus_statistics = open_statistics(self.store, self.manifest.index, files)
            return self._corpus_statistics

    def _parts(
        self, queries_QD: FloatArray, texts: Sequence[str], hits: Sequence[Sequence[Hit]], deadline: Deadline
    ) -> list[list[HybridParts]]:
        """Return both scores of every hit. Raises CoverageError if a hit's shard does not answer in time, or the texts
        of the hits cannot be read in time."""
        statistics, queries_QD = self._statistics(), check_queries(queries_QD, self.dimension)
        ids = sorted({hit.passage_id for own in hits for hit in own})
        counts: dict[str, Counter[str]] = {}
        for start in range(0, len(ids), TEXTS_AT_ONCE):
            if not deadline.left_s:
                raise CoverageError(
                    f"the words of {len(ids) - start} of the {count_noun(len(ids), 'hit')} were not counted by the "
                    f"deadline; ask for fewer hits at once, or without their texts, or allow more time"
                )
            passages = self.passages(ids[start : start + TEXTS_AT_ONCE])
            counts |= zip(passages, statistics.rule.count_words(list(passages.values())))
        views = self._stored_views(list(counts), deadline)
        return [
            [
                HybridParts(
                    statistics.score(words, counts[hit.passage_id]),
                    float(score_views(query_1D, hit.passage_id, *views[hit.passage_id]).scores_QN.max()),
                )
                for hit in own
            ]
            for query_1D, words, own in zip(queries_QD[:, None], statistics.rule.tokenize(texts), hits)
        ]

    def missing_sources(self) -> list[str]:
        """Return the problems with the version's corpus and encoder in the store, each with what to do.

        Empty if texts can be embedded and passages shown. The check is repeated every SOURCES_S. An object store that
        does not answer changes nothing: what the version needs is open here.
        """
        try:
            return self._missing_sources.get()
        except NoAnswerError as error:
            return [str(error)]

    def _find_missing_sources(self) -> Iterator[str]:
        try:
            require_encoder(self.store, self.manifest)
            if self.embeds:
                _ = self.encoder
        except NoAnswerError:
            raise
        except (EncoderError, StorageError, MissingInputError) as error:
            yield str(error)
        try:
            corpus = Corpus.open(self.store, self.manifest.corpus, self.manifest.corpus_digest)
            for path, reason in self._find_missing_parts(corpus):
                yield f"{self.store.where(path)} {reason}; roll back, or `mvr-ray prepare CONFIG` on the same sources"
        except NoAnswerError:
            raise
        except (StorageError, MissingInputError) as error:
            yield str(error)

    def _find_missing_parts(self, corpus: Corpus) -> list[tuple[str, str]]:
        """Look for the files of PARTS_IN_TURN parts; for those of all while one is missing, or a part is not open."""
        shards = None
        if self._corpus and len(self._corpus.open_shards) == corpus.num_shards and not self._lacks_parts:
            start = self._num_looks * PARTS_IN_TURN % corpus.num_shards
            shards = range(corpus.num_shards)[start : start + PARTS_IN_TURN]
            self._num_looks += 1
        problems = [*corpus.find_missing(shards)]
        self._lacks_parts = bool(problems)
        return problems

    def take_over(self, before: "Router") -> None:
        """Open the encoder, the corpus and its parts if the previous router has them open; share them if they are the
        same."""
        with before._lock:
            encoder, corpus = before._encoder, before._corpus
        own, other = self.manifest, before.manifest
        same_encoder = (own.encoder_name, own.encoder_fingerprint) == (other.encoder_name, other.encoder_fingerprint)
        same_corpus = (own.corpus, own.corpus_digest) == (other.corpus, other.corpus_digest)
        with self._lock:
            self._encoder = encoder if same_encoder else None
            self._corpus = corpus if same_corpus else None
        if encoder is not None:
            _ = self.encoder
        if corpus is not None:
            num_shards = self.corpus.num_shards
            self._open_parts(shard for shard in corpus.open_shards if shard < num_shards)

    def warm_up(self) -> None:
        """Open the encoder and all parts of the corpus if they are there, so that no request waits for it."""
        if not self.missing_sources():
            if self.embeds:
                self.embed(["the first question"])  # imports, too
            self._open_parts(range(self.corpus.num_shards))

    def _open_parts(self, shards: Iterable[int]) -> None:
        """Open parts of the corpus before a request needs them. Requests that need a damaged part say so."""
        corpus = self.corpus

        def open_one(shard: int) -> None:
            try:
                corpus.open_parts([shard])
            except (MissingInputError, StorageError) as error:
                log.warning("a part of the corpus stays closed: %s", error)

        self.store.for_each(open_one, shards)

    def ready(self) -> None:
        """Wait until every shard can be searched, also after the restart of a searcher."""
        self.fleet.ready(self.manifest)

    def passages(self, ids: Sequence[str]) -> dict[str, Passage]:
        return self.corpus.get(ids)

    def example_queries(self, num: int) -> list[str]:
        """Return up to `num` texts with an answer in the corpus: questions of a set, else titles."""
        return example_queries(self.corpus, num)

    def view_spans(self, passage: Passage) -> Sequence[tuple[int, int] | None]:
        """Return `DualEncoder.view_spans`, cached for the passages shown last; what the views of another program stand
        for is not known."""
        return self._spans(passage) if self.embeds else [None] * self.num_views

    def matching_snippet(self, passage: Passage, view: int) -> str:
        """Return the snippet or title that a view represents; nothing for one of the whole passage, or of no part of
        it."""
        span = self.view_spans(passage)[view] if view < self.num_views else None
        return "" if span is None else snippet_text(passage, span)

    def refined_queries(self, questions: str) -> dict[str, FloatArray]:
        """Return the refined vectors of a question set by `query_key`, or by id in versions of earlier commits; empty
        without any.

        They are trained on the answers of their questions, so results with them are transductive.
        """
        digest = self.manifest.refined_queries.get(questions)
        if digest is None:
            return {}
        path = paths.refined_queries(self.manifest.index, digest)
        if not self.store.sha256(path).startswith(digest):
            raise DigestError(f"{self.store.where(path)} is damaged; refine again, or search without it")
        blocks = EmbeddingShard.open(self.store.local_path(path)).blocks()
        return {name: vector for block in blocks for name, vector in zip(block.ids, block.vectors_ND)}

    def _answer(
        self,
        hits: list[list[Hit]],
        failure_of: Mapping[int, ShardFailure],
        rounds: int,
        num_rescored: int,
        hybrid: HybridQueries | None = None,
    ) -> Answer:
        manifest, params = self.manifest, self.manifest.index_params
        kind, is_int8 = str(params["kind"]), params.get("scan") == "int8"
        method = f"faiss {params['factory']}" if kind == "faiss" else "flat int8" if is_int8 else kind
        if pruning_bound := manifest.metrics.get("pruned_bound", 0.0):
            method += f" over stored views (indexed within {math.ceil(1e4 * pruning_bound) / 1e4:g} of all views)"
        if hybrid is not None:
            method = "bm25" if hybrid.weight == "words" else f"bm25 + {method}"
        is_exact = self._is_exact(hybrid)
        recall = None if is_exact else manifest.recall
        exactness = Exactness(is_exact and not failure_of, method, rounds, num_rescored, recall)
        states = tuple(
            ShardState(entry.shard, entry.num_passages, failure.reason, failure.detail)
            if (failure := failure_of.get(entry.shard))
            else ShardState(entry.shard, entry.num_passages, SEARCHED)
            for entry in manifest.shards
        )
        return Answer(hits, manifest.index, manifest.version, manifest.encoder_fingerprint, states, exactness)

    def _check_coverage(self, answer: Answer, min_coverage: float) -> None:
        """Raise CoverageError that names the shards without an answer; log a warning if the coverage suffices."""
        missing = [shard for shard in answer.shards if shard.state != SEARCHED]
        message = (
            f"{len(missing)} of {len(answer.shards)} shards of index {answer.index!r} version {answer.version} did not "
            f"answer: {', '.join(f'{shard.shard} ({shard.state})' for shard in missing)}; "
            f"{answer.passages_searched} of {answer.passages_total} passages were searched"
        )
        if answer.coverage_share < min_coverage:
            for shard in missing:
                if shard.state == DAMAGED:
                    raise DamagedShardsError(f"{message}. {shard.reason}", answer.shards)
            raise CoverageError(f"{message}. {RETRY_HINT}", answer.shards)
        log.warning(message)


def require_words(manifest: Manifest) -> LexicalPart:
    """Return the words of a version's passages. Raises ShardIndexError for one without."""
    if manifest.lexical is None:
        raise ShardIndexError(
            f"index {manifest.index!r} version {manifest.version} has no words of its passages, which a hybrid search "
            f"needs; {INDEX_WORDS}"
        )
    return manifest.lexical


@contextmanager
def open_router(run: RunConfig, version: int | None = None, *, local: bool | None = None) -> Iterator[Router]:
    """Open all shards of a version of `index.name` (by default the live one) until the block ends.

    `local` holds the shards in this process, without Ray; None: as `session.needs_ray` decides. Otherwise
    `resources.searchers` actors hold them.

    Raises MissingInputError, DigestError, ManifestError, ResourceError.
    """
    store = Store(run.store.path)
    manifest = manifests.read(store, run.index.name, version)
    with (
        open_searchers(run, manifest, local) as searchers,
        session.staying_local(isinstance(searchers, LocalSearchers)),
    ):
        searchers.ready(manifest)
        yield Router(store, manifest, searchers, threads=run.resources.threads)


@contextmanager
def open_searchers(
    run: RunConfig, manifest: Manifest, local: bool | None
) -> Iterator["LocalSearchers | RemoteSearchers"]:
    """Open searchers of the shards of a version, for other versions too, until the block ends. `local` as in
    `open_router`."""
    resources = run.resources
    local = not session.needs_ray(resources, manifest.num_passages) if local is None else local
    task = searcher_task(run, manifest, local=local)
    if local:
        if resources.gpus_per_searcher and torch.cuda.is_available():
            log.warning(
                "index %r is searched in this process, on the CPU beside a GPU: resources.gpus_per_searcher is for "
                "searchers on Ray (mvr-ray serve, or resources.address; for stages also resources.local_passages=0)",
                manifest.index,
            )
        yield LocalSearchers(task, resources.searcher_bytes)
        return
    from mvr_ray.distributed.searching.node_placement import start_searchers

    with session.ray_session(resources):
        with session.staying_local(False):  # not to the end, which may come in another thread
            searchers = start_searchers(task, resources, session.describe(resources))
        try:
            yield searchers
        finally:
            searchers.stop()


def searcher_task(run: RunConfig, manifest: Manifest, *, local: bool) -> SearcherTask:
    """Return the settings of a searcher of a version, from the run file; `local`: in this process."""
    resources = run.resources
    device = "cuda" if resources.gpus_per_searcher and not local else "cpu"
    store = Store(run.store.path).address
    is_scan = local and manifest.index_params["kind"] == "flat"
    threads = session.scan_threads(resources) if is_scan else resources.threads
    return SearcherTask(store, manifest, threads, device, resources.tls_dir, resources.scrub_bytes_s)


def _round_up(num_queries: int) -> int:
    """Round up to 16, 256, ... so that searches of similar size ask for equally many rows and can share a batch."""
    return 1 << 4 * max(1, -(-(num_queries - 1).bit_length() // 4))
