"""The one door to an index version: queries in, the best passages of all shards out, and what was searched for them.

    dispatcher  every shard gives its best rows and its frontier
    merge    the best k of all shards; shards whose frontier reaches into them are asked again for k rows
    state    version, encoder, passages searched of those in the manifest, certified exact or approximate

Shards of an exact index are first asked for as many rows as settle the merge in 99 of 100 calls
(`merging.first_depth`); the certificate says when they do not. The same Router runs over actors and, for laptops and
tests, over shards held in this process.

Shapes: Q queries, K hits, D dimension.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np

from mvr_ray.config import RunConfig
from mvr_ray.core.encoding.encoder import DualEncoder
from mvr_ray.core.encoding.snippets import TITLE, snippet_text
from mvr_ray.core.searching.exact import check_k, check_queries, distinct, score_views
from mvr_ray.core.searching.fusion import LIST_DEPTH, fuse_ranks
from mvr_ray.core.searching.merging import first_depth
from mvr_ray.deadline import Deadline
from mvr_ray.distributed import session
from mvr_ray.distributed.encoders import open_encoder, require_encoder
from mvr_ray.distributed.lexical import open_statistics
from mvr_ray.distributed.searching.merged_results import MergedResults, overlay_results, shard_starts
from mvr_ray.distributed.searching.messages import ScanRequest, ShardFailure
from mvr_ray.distributed.searching.searcher import NO_WORDS_HINT, Fleet, LocalFleet, SearcherTask, ShardSearcher
from mvr_ray.errors import (
    CoverageError,
    DamagedShardsError,
    DigestError,
    EncoderError,
    MissingInputError,
    ShardIndexError,
    StorageError,
    UnknownPassageError,
)
from mvr_ray.index.lexical import CorpusStatistics, count_words, tokenize
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus, shard_of
from mvr_ray.store.embeddings import EmbeddingShard, Views
from mvr_ray.store.files import Store
from mvr_ray.store.filters import parse_filter
from mvr_ray.store.manifest import Manifest
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
)

__all__ = ["MatchingSnippet", "Router", "ShardSearcher", "open_router"]

log = logging.getLogger(__name__)

TIMEOUT_S = 600.0
SPANS_KEPT = 16_384
"""Passages whose sentences a router remembers: cutting those of ten hits takes longer than finding them."""
DEPTHS_KEPT = 256
SOURCES_S = 10.0
"""What was seen of corpus and encoder in the store holds so long."""
SECOND_ROUND_SHARE = 0.25
"""Of an answer's time, where a part of the passages is enough: a shard that says nothing does not use it all up."""
FIRST_ROWS_KEPT = "its first rows are among the hits, the further ones that it was asked for did not come"
DAMAGED = "damaged"
Observe = Callable[[str, float], None]
"""Told how many seconds a stage took: `encode` the questions, `search` the shards, `merge` their answers."""


class MatchingSnippet(NamedTuple):
    """What won: a snippet of the text, the title, the passage as a whole, or a feedback view (no part of its text)."""

    kind: Literal["snippet", "title", "passage", "feedback"]
    start: int
    stop: int
    text: str


class Router:
    """Answers from one version and its own encoder. Safe to use from several threads."""

    failure = ""
    """Why a newer version is not answered from, as `HotSwapRouter.failure` says: nothing failed."""

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
        """`timeout_s`: for an answer, where a search does not say. `threads` and `gpu` are for embedding questions in
        this process. `observe` is called by the threads that search.
        """
        self.store = store
        self.manifest = manifest
        self.fleet = fleet
        self.timeout_s = timeout_s
        self.threads = threads
        self.gpu = gpu
        self.observe = observe
        sizes = [entry.num_passages for entry in manifest.shards]
        self._start_of = shard_starts(manifest.shards)
        self._first_depth = lru_cache(DEPTHS_KEPT)(lambda k, num_queries: first_depth(k, sizes, num_queries))
        self._lock = threading.Lock()
        self._encoder: DualEncoder | None = None
        self._corpus: Corpus | None = None
        self._sources_lock = threading.Lock()
        self._missing_sources: list[str] = []
        self._sources_s = -math.inf
        self._corpus_statistics: CorpusStatistics | None = None
        self._spans = lru_cache(SPANS_KEPT)(lambda passage: tuple(self.encoder.view_spans(passage)))

    @contextmanager
    def pin(self, version: int | None = None, deadline: Deadline | None = None) -> Iterator["Router"]:
        """This router, as `HotSwapRouter.pin` gives that of any. Raises MissingInputError for another version."""
        if version not in (None, self.manifest.version):
            raise MissingInputError(
                f"version {self.manifest.version} of index {self.manifest.index!r} alone is open here, not {version}; "
                f"leave version out"
            )
        yield self

    def follow(self) -> bool:
        """Stay with the version, where `HotSwapRouter.follow` moves to a newer one."""
        return False

    @property
    def dimension(self) -> int:
        return self.manifest.dimension

    @property
    def num_views(self) -> int:
        return self.manifest.num_views

    @property
    def encoder(self) -> DualEncoder:
        """The snapshot that made the index, opened when first needed.

        Raises MissingInputError if the store lacks it, FingerprintError if another stands in its place.
        """
        with self._lock:
            if self._encoder is None:
                name, fingerprint = self.manifest.encoder_name, self.manifest.encoder_fingerprint
                self._encoder = open_encoder(self.store, name, fingerprint, threads=self.threads, gpu=self.gpu)
            return self._encoder

    @property
    def corpus(self) -> Corpus:
        """The passages that were indexed. Raises MissingInputError where the store has lost the corpus."""
        with self._lock:
            if self._corpus is None:
                self._corpus = Corpus.open(self.store, self.manifest.corpus, self.manifest.corpus_digest)
            return self._corpus

    def embed(self, texts: Sequence[str]) -> FloatArray:
        """queries_QD of the version's own encoder. Raises EncoderError for a text without a word."""
        return self.encoder.embed_queries(texts)

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Tokens that `embed` reads of all texts together."""
        return sum(tokenized.num_tokens for tokenized in self.encoder.tokenize_queries(texts))

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
        """`search` with the questions' embeddings; embedding them counts towards the time. With `hybrid` w a passage
        scores BM25 + w x its dense score, with "rrf" the sum of its reciprocal ranks in both; `parts`: the answer has
        both scores of every hit."""
        deadline = deadline or Deadline.after(self.timeout_s)
        with self._record_time("encode"):
            queries_QD = self.embed(texts)
        words = None if hybrid is None else HybridQueries(tuple(texts), hybrid)
        options = {"deadline": deadline, "min_coverage": min_coverage}
        answer = self.search(queries_QD, k, **options, filter=filter, hybrid=words)
        if parts and words is not None:
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
        """The best k distinct passages a query, or all there are, of the shards that answer by the deadline, which is
        `timeout_s` of the router where none is given.

        With a filter (`store.filters`), of the passages that pass it. An exact index is then exact over those, and
        coverage counts passages as ever, whether they pass or not.

        Where `min_coverage` is below 1, a quarter of the time is kept for asking again. A shard that answers only the
        first time leaves its first rows in the hits and counts as not searched: it may hold more of the best.

        With `hybrid` a passage scores BM25 + weight x its dense score, as exactly and with the same certificate. The
        statistics of BM25 are those of the whole corpus, whatever a filter lets pass. With "rrf" it scores by its ranks
        among the first 100 (or k) of both sides; certified then means that both lists are.

        Raises ShardIndexError for k below 1, vectors of another dimension, a weight below 0 and a version without
        words, FilterError for a filter that does not fit the version's corpus, OverloadedError when too many calls
        wait, CoverageError when fewer than `min_coverage` of the manifest's passages were searched; DamagedShardsError,
        one of those, when damaged files are among the causes.
        """
        check_k(k)
        queries_QD = check_queries(queries_QD, self.dimension)
        deadline = deadline or Deadline.after(self.timeout_s)
        text = parse_filter(filter, self.corpus.fields).text if filter is not None else ""
        if hybrid is not None:
            self._check_hybrid(hybrid, len(queries_QD))
            if hybrid.weight == "rrf":
                return self._search_by_ranks(queries_QD, k, hybrid, deadline, min_coverage, filter)
        if not len(queries_QD):
            return self._answer([], {}, 0, 0)
        exact = self._is_exact(hybrid)
        first = self._first_depth(k, _rounded_up(len(queries_QD))) if exact else k
        keeps_time = first < k and min_coverage < 1
        first_deadline = deadline.share(1 - SECOND_ROUND_SHARE) if keeps_time else deadline
        shards = tuple(entry.shard for entry in self.manifest.shards)
        request = ScanRequest(queries_QD, first, shards, self.manifest.version, text, hybrid)
        with self._record_time("search"):
            answers = self.fleet.fan_out(request, first_deadline)
        found, failures = {answer.shard: answer for answer in answers.results}, list(answers.failures)
        with self._record_time("merge"):
            merged, rounds = MergedResults(found.values(), self._start_of, k), 1
            again = merged.ask_again() if exact else {}
        if again:
            with self._record_time("search"):
                positions = distinct(np.concatenate(list(again.values())))
                doubtful_QD, texts = queries_QD[positions], hybrid and hybrid.take(positions)
                doubtful = request._replace(queries_QD=doubtful_QD, k=k, shards=tuple(again), hybrid=texts)
                second = self.fleet.fan_out(doubtful, deadline, again=True)
            for answer in second.results:
                found[answer.shard] = overlay_results(found[answer.shard], answer, positions)
            failures += [one._replace(detail=one.detail or FIRST_ROWS_KEPT) for one in second.failures]
            merged, rounds = MergedResults(found.values(), self._start_of, k), 2
        rescored = sum(int(answer.rescored_Q.sum()) for answer in found.values())
        silent = {shard: missing for missing in failures for shard in missing.shards}
        hits = merged.hits() or [[] for _ in queries_QD]
        answer = self._answer(hits, silent, rounds, rescored, hybrid)
        if silent:
            self._check_coverage(answer, min_coverage)
        return answer

    def _search_by_ranks(
        self,
        queries_QD: FloatArray,
        k: int,
        hybrid: HybridQueries,
        deadline: Deadline,
        min_coverage: float,
        filter: Mapping[str, Any] | None,
    ) -> Answer:
        """Fuse the best of both sides by reciprocal rank (`core.searching.fusion`)."""
        depth, options = max(k, LIST_DEPTH), {"deadline": deadline, "min_coverage": min_coverage, "filter": filter}
        words = self.search(queries_QD, depth, hybrid=hybrid._replace(weight="words"), **options)
        dense = self.search(queries_QD, depth, **options)
        hits = [fuse_ranks(lists, k) for lists in zip(words.hits, dense.hits)]
        shards = tuple(max(both, key=lambda shard: shard.state != SEARCHED) for both in zip(words.shards, dense.shards))
        exact = dense.exact._replace(
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
        """Whether shards answer exactly: words do, whatever the index of the views is."""
        return self.manifest.index_params["kind"] == "flat" or (hybrid is not None and hybrid.weight == "words")

    def _check_hybrid(self, hybrid: HybridQueries, num_queries: int) -> None:
        require_words(self.manifest)
        if not isinstance(hybrid.weight, str) and not (math.isfinite(hybrid.weight) and hybrid.weight >= 0):
            raise ShardIndexError(f"the weight of the dense score is {hybrid.weight}; give a finite number from 0 on")
        if len(hybrid.texts) != num_queries:
            raise ShardIndexError(
                f"{num_queries} query vectors come with {len(hybrid.texts)} texts; a hybrid search needs one each"
            )

    @contextmanager
    def _record_time(self, stage: str) -> Iterator[None]:
        """Tell how long it took, also where it failed."""
        began = time.perf_counter()
        try:
            yield
        finally:
            if self.observe:
                self.observe(stage, time.perf_counter() - began)

    def explain(self, queries_QD: FloatArray, passage_ids: Sequence[str]) -> list[PassageScores]:
        """Every stored view of these passages with every query, by the rules of `search`; asks the shards that hold
        them, and no others.

        Raises UnknownPassageError for an id that the version does not hold, ShardIndexError for vectors of another
        dimension, CoverageError when a shard is silent.
        """
        queries_QD = check_queries(queries_QD, self.dimension)
        stored = self._stored_views(passage_ids, Deadline.after(self.timeout_s))
        for passage_id in passage_ids:
            if passage_id not in stored:
                raise UnknownPassageError(
                    f"index {self.manifest.index!r} version {self.manifest.version} holds no passage {passage_id!r}; "
                    f"give an id as `mvr-ray search CONFIG` shows it",
                    passage_id,
                )
        return [score_views(queries_QD, passage_id, *stored[passage_id]) for passage_id in passage_ids]

    def _stored_views(self, passage_ids: Sequence[str], deadline: Deadline) -> dict[str, Views]:
        manifest = self.manifest
        wanted: dict[int, list[str]] = {}
        for passage_id in dict.fromkeys(passage_ids):
            wanted.setdefault(shard_of(passage_id, len(manifest.shards)), []).append(passage_id)
        stored = self.fleet.views(wanted, deadline)
        for missing in stored.failures:
            if missing.reason == DAMAGED:
                raise DamagedShardsError(missing.detail)
            raise CoverageError(
                f"shard {missing.shards[0]} of index {manifest.index!r} version {manifest.version}, which would hold "
                f"passage {wanted[missing.shards[0]][0]!r}, did not answer ({missing.reason}). "
                f"Searchers that died start again by themselves: ask again"
            )
        return stored.views

    def lexical_scores(self, texts: Sequence[str], passages: Sequence[Passage]) -> dict[str, FloatArray]:
        """By passage id, the BM25 score with each text, as a hybrid search counts it.

        Raises ShardIndexError for a version without words, DigestError where the statistics are damaged.
        """
        statistics, words = self._statistics(), tokenize(texts)
        counts = zip(passages, count_words(passages))
        return {one.id: np.array([statistics.score(own, of) for own in words], np.float32) for one, of in counts}

    def _statistics(self) -> CorpusStatistics:
        require_words(self.manifest)
        with self._lock:
            if self._corpus_statistics is None:
                self._corpus_statistics = open_statistics(self.store, self.manifest)
            return self._corpus_statistics

    def _parts(
        self, queries_QD: FloatArray, texts: Sequence[str], hits: Sequence[Sequence[Hit]], deadline: Deadline
    ) -> list[list[HybridParts]]:
        """Both scores of every hit. Raises CoverageError where the shard of one does not answer again in time."""
        statistics, queries_QD = self._statistics(), check_queries(queries_QD, self.dimension)
        passages = list(self.passages(sorted({hit.passage_id for own in hits for hit in own})).values())
        counts = dict(zip((passage.id for passage in passages), count_words(passages)))
        views = self._stored_views(list(counts), deadline)
        return [
            [
                HybridParts(
                    statistics.score(words, counts[hit.passage_id]),
                    float(score_views(query_1D, hit.passage_id, *views[hit.passage_id]).scores_QN.max()),
                )
                for hit in own
            ]
            for query_1D, words, own in zip(queries_QD[:, None], tokenize(texts), hits)
        ]

    def missing_sources(self) -> list[str]:
        """Say what of the version's corpus and encoder is not in the store or cannot be opened, and what to do.

        Nothing where texts can be embedded and passages shown. What was seen is repeated for some seconds.
        """
        with self._sources_lock:
            if time.monotonic() - self._sources_s > SOURCES_S:
                self._missing_sources = list(self._find_missing_sources())
                self._sources_s = time.monotonic()
            return self._missing_sources

    def _find_missing_sources(self) -> Iterator[str]:
        try:
            require_encoder(self.store, self.manifest)
            _ = self.encoder
        except (EncoderError, StorageError, MissingInputError) as error:
            yield str(error)
        try:
            corpus = Corpus.open(self.store, self.manifest.corpus, self.manifest.corpus_digest)
            for path, reason in corpus.find_missing():
                yield f"{self.store.where(path)} {reason}; roll back, or `mvr-ray prepare CONFIG` on the same sources"
        except (StorageError, MissingInputError) as error:
            yield str(error)

    def take_over(self, before: "Router") -> None:
        """Have open what the router before this one had open: its encoder and corpus where they are the same."""
        with before._lock:
            encoder, corpus = before._encoder, before._corpus
        mine, other = self.manifest, before.manifest
        same_encoder = (mine.encoder_name, mine.encoder_fingerprint) == (other.encoder_name, other.encoder_fingerprint)
        same_corpus = (mine.corpus, mine.corpus_digest) == (other.corpus, other.corpus_digest)
        with self._lock:
            self._encoder = encoder if same_encoder else None
            self._corpus = corpus if same_corpus else None
        if encoder is not None:
            _ = self.encoder
        if corpus is not None:
            _ = self.corpus

    def ready(self) -> None:
        """Return when every shard can be searched, also after a searcher has died and started again."""
        self.fleet.ready()

    def passages(self, ids: Sequence[str]) -> dict[str, Passage]:
        return self.corpus.get(ids)

    def example_queries(self, num: int) -> list[str]:
        """Up to `num` texts that the corpus has an answer to: questions of a set, else titles."""
        return example_queries(self.corpus, num)

    def view_spans(self, passage: Passage) -> Sequence[tuple[int, int] | None]:
        """`DualEncoder.view_spans`, kept for what was shown last."""
        return self._spans(passage)

    def matching_snippet(self, passage: Passage, view: int) -> MatchingSnippet:
        """What of the passage the winning view stands for."""
        if view >= self.num_views:
            return MatchingSnippet("feedback", 0, 0, "")
        span = self.view_spans(passage)[view]
        if span is None:
            return MatchingSnippet("passage", 0, len(passage.text), passage.text)
        return MatchingSnippet("title" if span == TITLE else "snippet", *span, snippet_text(passage, span))

    def refined_queries(self, questions: str) -> dict[str, FloatArray]:
        """Moved vectors of a question set by question id, where refinement kept some; else empty.

        They have seen the answers of their questions: results with them are transductive.
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
        silent: Mapping[int, ShardFailure],
        rounds: int,
        num_rescored: int,
        hybrid: HybridQueries | None = None,
    ) -> Answer:
        manifest = self.manifest
        params = manifest.index_params
        kind, coded = str(params["kind"]), params.get("scan") == "int8"
        method = f"faiss {params['factory']}" if kind == "faiss" else "flat int8" if coded else kind
        if bound := manifest.metrics.get("pruned_bound", 0.0):
            method += f" over stored views (indexed within {math.ceil(1e4 * bound) / 1e4:g} of all views)"
        if hybrid is not None:
            method = "bm25" if hybrid.weight == "words" else f"bm25 + {method}"
        is_exact = self._is_exact(hybrid)
        recall = None if is_exact else manifest.recall
        exactness = Exactness(is_exact and not silent, method, rounds, num_rescored, recall)
        states = tuple(
            ShardState(entry.shard, entry.num_passages, missing.reason, missing.detail)
            if (missing := silent.get(entry.shard))
            else ShardState(entry.shard, entry.num_passages, SEARCHED)
            for entry in manifest.shards
        )
        return Answer(hits, manifest.index, manifest.version, manifest.encoder_fingerprint, states, exactness)

    def _check_coverage(self, answer: Answer, min_coverage: float) -> None:
        """CoverageError naming the silent shards, or a warning where so much is enough."""
        silent = [shard for shard in answer.shards if shard.state != SEARCHED]
        told = (
            f"{len(silent)} of {len(answer.shards)} shards of index {answer.index!r} version {answer.version} did not "
            f"answer: {', '.join(f'{shard.shard} ({shard.state})' for shard in silent)}; {answer.passages_searched} of "
            f"{answer.passages_total} passages were searched"
        )
        if answer.coverage_share < min_coverage:
            for shard in silent:
                if shard.state == DAMAGED:
                    raise DamagedShardsError(f"{told}. {shard.reason}", answer.shards)
            raise CoverageError(f"{told}. Searchers that died start again by themselves: ask again", answer.shards)
        log.warning(told)


def require_words(manifest: Manifest) -> None:
    """Raise ShardIndexError for a version that has not the words of its passages."""
    if manifest.lexical is None:
        raise ShardIndexError(
            f"index {manifest.index!r} version {manifest.version} has no words of its passages, which a hybrid search "
            f"needs; {NO_WORDS_HINT}"
        )


@contextmanager
def open_router(
    run: RunConfig,
    version: int | None = None,
    *,
    local: bool | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[Router]:
    """A version of `index.name` (the live one when none is named), every shard open.

    `local` holds the shards in this process and needs no Ray; None: as `session.needs_ray` says. Else
    `resources.searchers` actors hold them until the end; an answer is given `timeout_s`, where a search does not say
    otherwise.

    Raises MissingInputError, DigestError, ManifestError, ResourceError.
    """
    store = Store(run.store.path)
    manifest = manifests.read(store, run.index.name, version)
    resources = run.resources
    local = not session.needs_ray(resources, manifest.num_passages) if local is None else local
    task = searcher_task(run, manifest, local=local)
    with ExitStack() as stack:
        if local:
            fleet: Fleet = LocalFleet(task)
        else:
            from mvr_ray.distributed.searching.fleet import RemoteSearchers

            info = stack.enter_context(session.connect(resources))
            searchers = RemoteSearchers.start(task, resources, info)
            stack.callback(searchers.stop)
            fleet = searchers.fleet(manifest)
        fleet.ready()
        yield Router(store, manifest, fleet, timeout_s=timeout_s, threads=resources.torch_threads)


def searcher_task(run: RunConfig, manifest: Manifest, *, local: bool) -> SearcherTask:
    """All shards of a version, as the run file wants them searched; `local`: in this process."""
    resources = run.resources
    shards = tuple(entry.shard for entry in manifest.shards)
    device = "cuda" if resources.gpus_per_searcher and not local else "cpu"
    store = Store(run.store.path).address
    threads, scrub_bytes_s = resources.torch_threads, resources.scrub_bytes_s
    return SearcherTask(store, manifest, shards, threads, device, resources.tls_dir, scrub_bytes_s)


def _rounded_up(num_queries: int) -> int:
    """To 16, 256, ... so that searches of about as many queries ask for as many rows, and can be asked together."""
    return 1 << 4 * max(1, -(-(num_queries - 1).bit_length() // 4))
