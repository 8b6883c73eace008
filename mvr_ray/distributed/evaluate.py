"""Measure the accuracy of an index version on question sets, by answers and gold passages, with BM25 and hybrid search.

    answer/top-k    share of questions with an answer-bearing passage among the first k        questions with answers
    gold/top-k      share of questions with a gold passage among the first k                   questions with gold ids
    gold/mrr        mean reciprocal rank of the first gold passage, over the first max(k)
    gold/ndcg@10    normalised discounted cumulative gain of gold passages

Every value is a mean over questions with its 95 % interval, which resamples whole articles: questions of one article
are not independent. Only complete answers count: a version with an unavailable shard is not measured.
"""

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mvr_ray.config import EvaluateConfig, RunConfig
from mvr_ray.core.judging.answers import AnswerMatcher, Match
from mvr_ray.core.judging.metrics import NDCG_CUTOFF, cluster_interval, first_ranks, hit_within, ndcg, reciprocal_ranks
from mvr_ray.distributed.bm25 import BM25Index
from mvr_ray.distributed.encoders import require_encoder
from mvr_ray.distributed.hybrid import best_weight, try_weights
from mvr_ray.distributed.rank import QuestionSet, RankSettings, rank_questions
from mvr_ray.distributed.router import Router, open_router, require_words
from mvr_ray.errors import ConfigError, MissingInputError
from mvr_ray.store import manifest as manifests
from mvr_ray.store.corpus import Corpus, question_sets
from mvr_ray.store.files import Store
from mvr_ray.store.formats.question_ranks import QuestionRanks
from mvr_ray.store.formats.rankings import RankedPassage, RankedQuestion
from mvr_ray.store.questions import read_questions
from mvr_ray.types import FloatArray, Hit, HybridWeight, Progress, Question, no_progress

log = logging.getLogger(__name__)


class EvaluationRow(NamedTuple):
    """One measured value (a share, 0..1) with its 95 % interval over `n` questions."""

    system: str
    questions: str
    metric: str
    value: float
    low: float
    high: float
    n: int


class EvaluationReport(NamedTuple):
    index: str
    version: int
    encoder_fingerprint: str
    passages: int
    exact: bool
    rows: list[EvaluationRow]
    ranks: list[QuestionRanks]


class SystemResult(NamedTuple):
    """The metrics of one system on one question set, and its ranks for every question."""

    rows: list[EvaluationRow]
    ranks: QuestionRanks


def evaluate(run: RunConfig, progress: Progress = no_progress, version: int | None = None) -> EvaluationReport:
    """Measure a version (default: the live one) on every set of `evaluate.questions`: by the dense score, and by hybrid
    search with `search.hybrid` or the weight tuned on `evaluate.hybrid`.

    Raises ConfigError without a configured set, MissingInputError, CoverageError, ResourceError, ShardIndexError for a
    hybrid search over a version without words.
    """
    settings, store = run.evaluate, Store(run.store.path)
    base = manifests.read(store, run.index.name, version)
    require_encoder(store, base)
    corpus = Corpus.open(store, base.corpus, base.corpus_digest)
    if not settings.questions:
        set_names = ", ".join(question_sets(corpus)) or "none"
        raise ConfigError(f"evaluate.questions names no question set; corpus {corpus.name!r} has: {set_names}")
    sets = [QuestionSet(name, read_questions(corpus, name)) for name in dict.fromkeys(settings.questions)]
    if settings.hybrid in settings.questions:
        raise ConfigError(
            f"evaluate.hybrid is {settings.hybrid!r}, which is also reported; choose the weight on another set"
        )
    if settings.hybrid or run.search.hybrid is not None:
        require_words(base)
    rank = RankSettings(
        k=max(settings.k),
        match=settings.match,
        strict_answers=run.retrieve.strict_answers,
        refined_queries=run.retrieve.refined_queries,
    )
    results: list[SystemResult] = []
    with open_router(run, version) as router:
        manifest = router.manifest
        for name, questions in sets:
            require_gold_passages(name, questions, router.corpus)
        ranked_questions = rank_questions(run, router, sets, rank, progress)
        articles = {name: articles_of(questions, router.corpus) for name, questions in sets}
        for name, questions in sets:
            own = list(itertools.islice(ranked_questions, len(questions)))
            results.append(system_result(run.index.name, name, own, articles[name], settings))
        if settings.bm25:
            words = BM25Index(router.corpus, progress)
            for question_set in sets:
                bm25_results = bm25_ranking(words, router.corpus, question_set, rank, progress)
                results.append(
                    system_result("bm25", question_set.name, bm25_results, articles[question_set.name], settings)
                )
        weight = _choose_weight(run, router, progress) if settings.hybrid else run.search.hybrid
        if weight is not None:
            ranked_questions = rank_questions(run, router, sets, rank._replace(hybrid=weight), progress)
            for name, questions in sets:
                own = list(itertools.islice(ranked_questions, len(questions)))
                results.append(system_result(hybrid_system(weight), name, own, articles[name], settings))
    log.info("evaluated: index=%s version=%d sets=%d", manifest.index, manifest.version, len(sets))
    return EvaluationReport(
        manifest.index,
        manifest.version,
        manifest.encoder_fingerprint,
        manifest.num_passages,
        manifest.index_params["kind"] == "flat",
        [row for result in results for row in result.rows],
        [result.ranks for result in results],
    )


def _choose_weight(run: RunConfig, router: Router, progress: Progress) -> HybridWeight | None:
    """Choose the weight that answers most questions of the set `evaluate.hybrid`."""
    name = run.evaluate.hybrid
    assert name is not None
    own = [question for question in read_questions(router.corpus, name) if question.positive_ids]
    if not own:
        raise ConfigError(f"evaluate.hybrid: question set {name!r} names no gold passages; name a set that does")
    require_gold_passages(name, own, router.corpus)
    best = best_weight(try_weights(run, router, QuestionSet(name, own), progress=progress))
    log.info("hybrid weight: weight=%s accuracy=%.3f set=%s", best.weight, best.top1, name)
    return best.weight


def hybrid_system(weight: HybridWeight) -> str:
    """Name of a hybrid search in reports."""
    return f"bm25 + {weight:g} x dense" if not isinstance(weight, str) else "bm25 and dense, reciprocal ranks"


def system_result(
    system: str,
    name: str,
    results: Sequence[RankedQuestion],
    article_of: Mapping[str, str],
    settings: EvaluateConfig,
) -> SystemResult:
    """Compute every metric that the set's questions allow, and their ranks. `article_of` maps question ids to
    articles (`articles_of`)."""
    ks = sorted(set(settings.k))
    rows: list[EvaluationRow] = []
    answer_ranks: dict[str, int] = {}
    gold_ranks: dict[str, int] = {}
    gold_ndcgs: dict[str, float] = {}

    def add(metric: str, values_Q: FloatArray, of: Sequence[RankedQuestion]) -> None:
        groups_Q = [article_of[row.question.id] for row in of]
        low, high = cluster_interval(values_Q, groups_Q, settings.seed, settings.bootstrap)
        rows.append(EvaluationRow(system, name, metric, float(np.mean(values_Q)), low, high, len(values_Q)))

    with_answers = [row for row in results if row.question.answers]
    if with_answers:
        ranks_Q = first_ranks([[bool(hit.has_answer) for hit in row.passages] for row in with_answers])
        answer_ranks = dict(zip((row.question.id for row in with_answers), ranks_Q.tolist()))
        for k in ks:
            add(f"answer/top-{k}", hit_within(ranks_Q, k), with_answers)
    with_gold = [row for row in results if row.question.positive_ids]
    if with_gold:
        gold = [dict.fromkeys(row.question.positive_ids, 1) for row in with_gold]
        lists = [[hit.id for hit in row.passages] for row in with_gold]
        ranks_Q = first_ranks([[i in gold_ids for i in ids] for ids, gold_ids in zip(lists, gold)])
        gold_ranks = dict(zip((row.question.id for row in with_gold), ranks_Q.tolist()))
        for k in ks:
            add(f"gold/top-{k}", hit_within(ranks_Q, k), with_gold)
        add("gold/mrr", reciprocal_ranks(ranks_Q, max(ks)), with_gold)
        ndcg_Q = ndcg(lists, gold, NDCG_CUTOFF)
        gold_ndcgs = dict(zip((row.question.id for row in with_gold), ndcg_Q.tolist()))
        add(f"gold/ndcg@{NDCG_CUTOFF}", ndcg_Q, with_gold)
    ids = [row.question.id for row in results]
    ranks = QuestionRanks(
        system,
        name,
        ids,
        [article_of[i] for i in ids],
        [answer_ranks.get(i) for i in ids],
        [gold_ranks.get(i) for i in ids],
        gold_ndcgs=[gold_ndcgs.get(i) for i in ids] if gold_ndcgs else (),
    )
    return SystemResult(rows, ranks)


def require_gold_passages(name: str, questions: Sequence[Question], passages: Corpus) -> None:
    """Raise MissingInputError if the corpus lacks a gold passage.

    Accuracy by gold passages would be wrong for a question set of another corpus.
    """
    gold = {passage_id for question in questions for passage_id in question.positive_ids}
    missing = sorted(gold.difference(passages.get(gold)))
    if missing:
        raise MissingInputError(
            f"question set {name!r}: {len(missing)} of its {len(gold)} gold passages are not in corpus "
            f"{passages.name!r} (first: {missing[0]!r}); the set belongs to another corpus: prepare it with this one, "
            f"under a name of its own"
        )


def articles_of(questions: Sequence[Question], passages: Corpus) -> dict[str, str]:
    """Map question ids to articles: the title of the first gold passage. A question without one, or whose passage has
    no title, is its own article."""
    firsts = {question.id: question.positive_ids[0] for question in questions if question.positive_ids}
    gold_passages = passages.get(firsts.values())
    articles = {i: gold_passages[first].title for i, first in firsts.items() if first in gold_passages}
    return {question.id: articles.get(question.id) or f"question {question.id}" for question in questions}


def bm25_ranking(
    words: BM25Index,
    indexed_corpus: Corpus,
    questions: QuestionSet,
    settings: RankSettings,
    progress: Progress = no_progress,
) -> list[RankedQuestion]:
    """Rank the same passages by BM25, judged by the same rules."""
    hits = words.search([question.text for question in questions.questions], settings.k, progress)
    return judge_hits(questions.questions, hits, indexed_corpus, settings.match, strict=settings.strict_answers)


def judge_hits(
    questions: Sequence[Question],
    hits: Sequence[Sequence[Hit]],
    indexed_corpus: Corpus,
    match: Match = "string",
    *,
    strict: bool = False,
) -> list[RankedQuestion]:
    """Mark each question's hits by whether their passage holds an answer (None for a question without answers)."""
    matcher = AnswerMatcher(match, strict=strict)
    results: list[RankedQuestion] = []
    for question, question_hits in zip(questions, hits, strict=True):
        texts = indexed_corpus.get(hit.passage_id for hit in question_hits)
        marks = [
            matcher.has_answer(texts[hit.passage_id].text, question.answers) if question.answers else None
            for hit in question_hits
        ]
        passages = [RankedPassage(hit.passage_id, "", "", hit.score, mark) for hit, mark in zip(question_hits, marks)]
        results.append(RankedQuestion(question, passages))
    return results
