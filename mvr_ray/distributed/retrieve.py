"""Rank many questions, and write the rankings of a question set in standard formats.

A pool of rankers embeds batches of questions, queries the searchers, and judges the hits. A batch is `retrieve.batch`
questions of one set, in order, so the composition of batches, and with it every score, does not depend on the number of
rankers. Batches finish in any order and are returned in theirs.

Shapes: Q queries, D dimension.
"""

import base64
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mvr_ray.config import RunConfig
from mvr_ray.core.judging.answers import AnswerMatcher, Match, refuse_empty_answers
from mvr_ray.core.searching.hybrid import system_name
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.ray_data import map_in_pool, pool_need
from mvr_ray.distributed.encoders import require_encoder
from mvr_ray.distributed.result_store import ResultStore
from mvr_ray.distributed.router import Router, open_router, require_words
from mvr_ray.distributed.searching.searcher import Fleet
from mvr_ray.errors import ConfigError, CoverageError, FilterError, MissingInputError
from mvr_ray.store import manifest as manifests
from mvr_ray.store.corpus import Corpus, question_sets
from mvr_ray.store.files import Store, local_copy
from mvr_ray.store.filters import parse_filter, to_plain_filter
from mvr_ray.store.formats.rankings import RankedPassage, RankedQuestion, RankingFormat, write_ranking
from mvr_ray.store.formats.sources import read_question_file
from mvr_ray.store.formats.trec import refuse_spaces
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.questions import query_key, read_questions
from mvr_ray.types import Answer, FloatArray, Hit, HybridQueries, HybridWeight, Passage, Progress, Question, no_progress

log = logging.getLogger(__name__)

TRIES = 3


class QuestionSet(NamedTuple):
    """Questions and the name of their stored set, or of their file."""

    name: str
    questions: Sequence[Question]

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(question.text for question in self.questions)

    def batches(self, size: int) -> list["QuestionSet"]:
        """Return the parts of `size` questions, in order."""
        starts = range(0, len(self.questions), size)
        return [QuestionSet(self.name, self.questions[start : start + size]) for start in starts]


class RankSettings(NamedTuple):
    """Search settings, and the content of each hit. `snippets` costs a tokenisation a passage."""

    k: int
    match: Match = "string"
    texts: bool = False
    snippets: bool = False
    refined_queries: bool = False
    filter: Mapping[str, Any] | None = None
    hybrid: HybridWeight | None = None


class QuestionRanker:
    """Rank batches of questions over one version with a router; needs Ray only if the fleet does."""

    def __init__(self, router: Router, settings: RankSettings) -> None:
        self.router = router
        self.settings = settings
        self.matcher = AnswerMatcher(settings.match)
        self._refined_queries = lru_cache(router.refined_queries)

    def rank(self, batch: QuestionSet, queries_QD: FloatArray | None = None) -> list[list[RankedPassage]]:
        """Search for each question; hits are best first and judged by the question's answers. `queries_QD`: the result
        of `embed`, if it is known."""
        queries_QD = self.embed(batch) if queries_QD is None else queries_QD
        weight = self.settings.hybrid
        hybrid = None if weight is None else HybridQueries(batch.texts, weight)
        answer = self.search(queries_QD, self.settings.k, hybrid)
        passages = self.router.passages(sorted({hit.passage_id for hits in answer.hits for hit in hits}))
        return [
            [self.to_ranked(question, hit, passages[hit.passage_id]) for hit in hits]
            for question, hits in zip(batch.questions, answer.hits)
        ]

    def embed(self, batch: QuestionSet) -> FloatArray:
        """Embed queries; with `refined_queries`, use the refined vector of a question where one is stored."""
        if self.settings.hybrid == "words":  # which vectors do not affect
            return np.zeros((len(batch.questions), self.router.dimension), np.float32)
        queries_QD = self.router.embed(batch.texts)
        if not self.settings.refined_queries:
            return queries_QD
        vectors = self._refined_queries(batch.name)
        own_vectors = (vectors.get(query_key(question), vectors.get(question.id)) for question in batch.questions)
        return np.stack([query_D if own is None else own for own, query_D in zip(own_vectors, queries_QD)])

    def search(self, queries_QD: FloatArray, k: int, hybrid: HybridQueries | None = None) -> Answer:
        """Search until the answer is complete: retry after a searcher died and restarted."""
        for again in range(1, TRIES):
            try:
                return self.router.search(queries_QD, k, filter=self.settings.filter, hybrid=hybrid)
            except CoverageError as error:
                log.warning("search retried: try=%d reason=%s", again, error)
                self.router.ready()
        return self.router.search(queries_QD, k, filter=self.settings.filter, hybrid=hybrid)

    def to_ranked(self, question: Question, hit: Hit, passage: Passage) -> RankedPassage:
        """Convert a hit for output; hits without a view (-1) have no snippet."""
        has_answer = self.matcher.has_answer(passage.text, question.answers) if question.answers else None
        title, text = (passage.title, passage.text) if self.settings.texts else ("", "")
        has_snippet = self.settings.snippets and hit.view >= 0
        snippet = self.router.matching_snippet(passage, hit.view) if has_snippet else ""
        return RankedPassage(hit.passage_id, title, text, hit.score, has_answer, hit.view, snippet)


class _PoolRanker:
    """A ranker on a worker. It loads its encoder with the first batch to embed, and returns the vectors, too, if its
    caller `keeps_queries`."""

    def __init__(
        self,
        store: str,
        manifest: Manifest,
        fleet: Fleet,
        settings: RankSettings,
        threads: int,
        gpu: bool,
        keeps_queries: bool,
    ) -> None:
        router = Router(Store(store), manifest, fleet, threads=threads, gpu=gpu)
        self.ranker = QuestionRanker(router, settings)
        self.keeps_queries = keeps_queries

    def __call__(self, batch: tuple[str, Sequence[Sequence[Any]], str]) -> list[Any]:
        name, fields_of, vectors = batch
        questions = [_question(fields) for fields in fields_of]
        own = QuestionSet(name, questions)
        if vectors:
            queries_QD = np.frombuffer(base64.b64decode(vectors), np.float32).reshape(len(questions), -1)
        else:
            queries_QD = self.ranker.embed(own).astype(np.float32, copy=False)
        text = base64.b64encode(queries_QD.tobytes()).decode() if self.keeps_queries else ""
        return [self.ranker.rank(own, queries_QD), text]


def rank_questions(
    run: RunConfig,
    router: Router,
    sets: Sequence[QuestionSet],
    settings: RankSettings,
    progress: Progress = no_progress,
    queries: list[str] | None = None,
    result_store: ResultStore | None = None,
) -> Iterator[RankedQuestion]:
    """Yield every question with its hits, in order. `queries`: their vectors by batch in base64, which an empty list
    gets, so that a further ranking of the same sets does not embed them again. `result_store` keeps hits meanwhile.
    Raises ResourceError if the cluster cannot place the rankers, or if this process lacks their GPU."""
    resources = run.resources
    batches = [batch for own in sets for batch in own.batches(run.retrieve.batch)]
    if not batches:
        return
    needs = [pool_need("rankers", resources)]
    if session.in_ray():
        num_searchers = min(resources.searchers, len(router.manifest.shards)) * resources.replicas
        cpus, gpus = resources.cpus_per_searcher, resources.gpus_per_searcher
        needs.append(session.Need("searchers", num_searchers, cpus, gpus))
    session.require(session.describe(resources), needs)
    collected_queries = None if queries else queries
    arguments = {
        "store": router.store.address,
        "manifest": router.manifest,
        "fleet": router.fleet,
        "settings": settings,
        "threads": resources.threads,
        "gpu": resources.gpus_per_encoder > 0,
        "keeps_queries": collected_queries is not None,
    }
    count, total = 0, sum(len(batch.questions) for batch in batches)
    with_vectors = [(*batch, vectors) for batch, vectors in zip(batches, queries or itertools.repeat(""))]
    inputs = ["rank", router.manifest.to_json().decode(), settings, arguments["keeps_queries"]]
    through = None if result_store is None else partial(result_store.map, inputs)
    results = map_in_pool(_PoolRanker, arguments, with_vectors, resources, "ranking questions", through)
    for (_, questions), (lists, vectors) in zip(batches, results):
        if collected_queries is not None:
            collected_queries.append(vectors)
        count += len(questions)
        progress("questions", count, total)  # first, as a caller that has its last question asks for no further one
        for question, hits in zip(questions, lists):
            yield RankedQuestion(question, [RankedPassage(*fields) for fields in hits])


def _question(fields: Sequence[Any]) -> Question:
    name, text, *lists = fields
    return Question(name, text, *(tuple(values) for values in lists))


class RetrieveReport(NamedTuple):
    """The file written, and the version searched. `exact`: the hits are the best k of all passages. `system` names the
    ranking as `evaluate` does: the index, or a hybrid."""

    output: str
    format: str
    questions: int
    k: int
    index: str
    version: int
    encoder_fingerprint: str
    passages: int
    exact: bool
    system: str = ""


def retrieve(
    run: RunConfig,
    questions: str,
    output: Path,
    format: RankingFormat = "dpr",
    progress: Progress = no_progress,
    version: int | None = None,
) -> RetrieveReport:
    """Write the best `retrieve.k` passages of every question to `output`, in question order, in one atomic step.

    `questions` is a stored set, or a file or folder in any question format; `version` absent: the live one. Raises
    MissingInputError, DataError, ConfigError for a filter that does not fit, CoverageError; ShardIndexError for
    `search.hybrid` over a version without words.
    """
    store = Store(run.store.path)
    base = manifests.read(store, run.index.name, version)
    require_encoder(store, base)
    if run.search.hybrid is not None:
        require_words(base)
    corpus = Corpus.open(store, base.corpus, base.corpus_digest)
    query_set = question_set(corpus, questions)
    if format == "trec":
        for question in query_set.questions:
            refuse_spaces(question.id, "question")
    texts = format not in ("trec", "msmarco")
    snippets = format in ("jsonl", "parquet") or (format == "dpr" and run.retrieve.extras)
    with open_ranking(run, base, query_set, checked_filter(run, corpus), progress, texts, snippets) as results:
        count = write_ranking(results, output, format, tag=run.retrieve.tag, extras=run.retrieve.extras)
    log.info("retrieved: questions=%d output=%s index=%s version=%d", count, output, base.index, base.version)
    return RetrieveReport(
        str(output),
        format,
        count,
        run.retrieve.k,
        base.index,
        base.version,
        base.encoder_fingerprint,
        base.num_passages,
        base.index_params["kind"] == "flat",
        base.index if run.search.hybrid is None else system_name(run.search.hybrid),
    )


@contextmanager
def open_ranking(
    run: RunConfig,
    base: Manifest,
    query_set: QuestionSet,
    filter: Mapping[str, Any] | None,
    progress: Progress,
    texts: bool = True,
    snippets: bool = True,
) -> Iterator[Iterator[RankedQuestion]]:
    """Open this version, and yield the best `retrieve.k` passages of every question, in question order, meanwhile.

    `filter` is one of `checked_filter`; `texts` and `snippets` as in `RankSettings`. Raises as `retrieve`.
    """
    if run.retrieve.refined_queries:
        warn_of_plain_queries(base, [query_set.name])
    if run.retrieve.strict_answers:
        refuse_empty_answers(query_set.questions, run.evaluate.match)
    settings = RankSettings(
        k=run.retrieve.k,
        match=run.evaluate.match,
        texts=texts,
        snippets=snippets,
        refined_queries=run.retrieve.refined_queries,
        filter=filter,
        hybrid=run.search.hybrid,
    )
    with open_router(run, base.version) as router, ResultStore(router.store, base.index) as result_store:
        yield rank_questions(run, router, [query_set], settings, progress, result_store=result_store)


def checked_filter(run: RunConfig, corpus: Corpus, filter: Mapping[str, Any] | None = None) -> Mapping[str, Any] | None:
    """Return the filter of a call, else `retrieve.filter`, as JSON has it, dates apart. Raises ConfigError for one that
    does not fit the fields of the corpus."""
    value, place = (run.retrieve.filter, "retrieve.") if filter is None else (filter, "retrieve: ")
    if value is None:
        return None
    try:
        plain = to_plain_filter(value)
        parse_filter(plain, corpus.fields)
    except FilterError as error:
        raise ConfigError(f"{place}{error}") from None
    return plain


def warn_of_plain_queries(base: Manifest, names: Sequence[str]) -> None:
    """Warn that `retrieve.refined_queries` does nothing for any of these question sets. No error: a study measures all
    sets by one setting, also where a refinement was not published."""
    if not base.refined_queries.keys() & set(names):
        log.warning(
            "retrieve.refined_queries has no effect: version %d of index %s has no refined queries of %s (there are: "
            "%s); refine with these questions by refine.method query, rocchio or hybrid, and name the stored set",
            *(base.version, base.index, ", ".join(names), ", ".join(base.refined_queries) or "none"),
        )


def question_set(corpus: Corpus, name: str) -> QuestionSet:
    """Read a question set of the corpus by name, else the questions of a file, or of a folder such as BEIR's."""
    if name in question_sets(corpus):
        return QuestionSet(name, read_questions(corpus, name))
    path = local_copy(name)
    if not path.exists():
        set_names = ", ".join(question_sets(corpus)) or "none"
        raise MissingInputError(
            f"questions {name!r}: neither a file, nor a folder, nor a set of corpus {corpus.name!r} in "
            f"{corpus.store.name} (sets: {set_names})"
        )
    return QuestionSet(path.name, read_question_file(name))
