"""How well an index version answers question sets: by answers, by gold passages, beside BM25.

    answer/top-k    share of questions with an answer-bearing passage among the first k        questions with answers
    gold/top-k      share of questions with a gold passage among the first k                   questions with gold ids
    gold/mrr        mean reciprocal rank of the first gold passage, over the first max(k)
    gold/ndcg@10    normalised discounted cumulative gain of gold passages

Every value is a mean over questions with its 95 % bootstrap interval. Only whole answers count: a version of which a
shard is silent is not measured.
"""

import itertools
import logging
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from mvr_ray.config import EvaluateConfig, RunConfig
from mvr_ray.core.answers import AnswerMatcher, Match
from mvr_ray.core.fusion import choose_weight, fuse
from mvr_ray.core.metrics import bootstrap_interval, first_ranks, found_within, ndcg, reciprocal_ranks
from mvr_ray.distributed.bm25 import BM25Index
from mvr_ray.distributed.hybrid import both_lists
from mvr_ray.distributed.rank import QuestionSet, RankSettings, rank_questions
from mvr_ray.distributed.router import Router, open_router
from mvr_ray.errors import ConfigError
from mvr_ray.store import corpus
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.formats import RankedPassage, RankedQuestion
from mvr_ray.types import FloatArray, Progress, Question, no_progress

log = logging.getLogger(__name__)

NDCG_CUTOFF = 10
HYBRID_WEIGHTS = (0.0, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 80.0, 120.0, 200.0)
"""Tried for the dense score, a cosine; BM25 scores of a question are some tens."""


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


def evaluate(run: RunConfig, progress: Progress = no_progress, version: int | None = None) -> EvaluationReport:
    """Measure a version (the live one when none is named) on every set of `evaluate.questions`.

    Raises ConfigError where no set is named, MissingInputError, CoverageError, ResourceError.
    """
    settings, store = run.evaluate, Store(run.store.path)
    if not settings.questions:
        raise ConfigError(
            f"evaluate.questions names no question set; stored are: {', '.join(corpus.question_sets(store)) or 'none'}"
        )
    sets = [QuestionSet(name, corpus.read_questions(store, name)) for name in dict.fromkeys(settings.questions)]
    rank = RankSettings(
        k=max(settings.k),
        match=settings.match,
        strict_answers=run.retrieve.strict_answers,
        refined_queries=run.retrieve.refined_queries,
    )
    rows: list[EvaluationRow] = []
    with open_router(run, version) as router:
        described = router.manifest
        ranked = rank_questions(run, router, sets, rank, progress)
        for name, questions in sets:
            rows += measured(run.index.name, name, list(itertools.islice(ranked, len(questions))), settings)
        words = BM25Index(router.corpus, progress) if settings.bm25 or settings.hybrid else None
        if words and settings.bm25:
            for asked in sets:
                found = bm25_ranking(words, router.corpus, asked, rank, progress)
                rows += measured("bm25", asked.name, found, settings)
        if words and settings.hybrid:
            rows += _hybrid_rows(run, router, words, sets, progress)
    log.info("evaluated: index=%s version=%d sets=%d", described.index, described.version, len(sets))
    return EvaluationReport(
        described.index,
        described.version,
        described.encoder_fingerprint,
        described.num_passages,
        described.index_params["kind"] == "flat",
        rows,
    )


def _hybrid_rows(
    run: RunConfig, router: Router, words: BM25Index, sets: Sequence[QuestionSet], progress: Progress
) -> list[EvaluationRow]:
    """BM25 + weight x dense on every set, with the weight that answers most of the held-out set's questions."""
    settings, store, name = run.evaluate, Store(run.store.path), run.evaluate.hybrid
    assert name is not None
    if name in {asked.name for asked in sets}:
        raise ConfigError(f"evaluate.hybrid is {name!r}, which is also reported on; choose the weight on another set")
    held = QuestionSet(name, corpus.read_questions(store, name))
    pairs = [list(both_lists(run, router, words, asked, progress)) for asked in (held, *sets)]
    scores = [[both.scores for both in lists] for lists in pairs]
    chosen = choose_weight(scores[0], [set(question.positive_ids) for question in held.questions], HYBRID_WEIGHTS)
    log.info("hybrid weight: weight=%g accuracy=%.3f set=%s", chosen.weight, chosen.accuracy, name)
    rows: list[EvaluationRow] = []
    for asked, both in zip(sets, scores[1:]):
        fused = [fuse(first, second, chosen.weight, max(settings.k)) for first, second in both]
        found = judged(asked.questions, fused, router.corpus, settings.match)
        rows += measured(f"bm25 + {chosen.weight:g} x dense", asked.name, found, settings)
    return rows


def measured(system: str, name: str, ranked: Sequence[RankedQuestion], settings: EvaluateConfig) -> list[EvaluationRow]:
    """Every metric that the set's questions allow."""
    ks = sorted(set(settings.k))
    values: list[tuple[str, FloatArray]] = []
    answered = [row for row in ranked if row.question.answers]
    if answered:
        ranks_Q = first_ranks([[bool(hit.has_answer) for hit in row.passages] for row in answered])
        values += [(f"answer/top-{k}", found_within(ranks_Q, k)) for k in ks]
    judged = [row for row in ranked if row.question.positive_ids]
    if judged:
        gold = [dict.fromkeys(row.question.positive_ids, 1) for row in judged]
        lists = [[hit.id for hit in row.passages] for row in judged]
        ranks_Q = first_ranks([[i in wanted for i in ids] for ids, wanted in zip(lists, gold)])
        values += [(f"gold/top-{k}", found_within(ranks_Q, k)) for k in ks]
        values.append(("gold/mrr", reciprocal_ranks(ranks_Q, max(ks))))
        values.append((f"gold/ndcg@{NDCG_CUTOFF}", ndcg(lists, gold, NDCG_CUTOFF)))
    return [_row(system, name, metric, values_Q, settings) for metric, values_Q in values]


def _row(system: str, name: str, metric: str, values_Q: FloatArray, settings: EvaluateConfig) -> EvaluationRow:
    low, high = bootstrap_interval(values_Q, settings.seed, settings.bootstrap)
    return EvaluationRow(system, name, metric, float(np.mean(values_Q)), low, high, len(values_Q))


def bm25_ranking(
    words: BM25Index, searched: Corpus, asked: QuestionSet, settings: RankSettings, progress: Progress = no_progress
) -> list[RankedQuestion]:
    """BM25's hits over the same passages, judged by the same rules."""
    hits = words.search([question.text for question in asked.questions], settings.k, progress)
    return judged(asked.questions, hits, searched, settings.match, strict=settings.strict_answers)


class Found(Protocol):
    """A hit of any search."""

    @property
    def passage_id(self) -> str: ...
    @property
    def score(self) -> float: ...


def judged(
    questions: Sequence[Question],
    hits: Sequence[Sequence[Found]],
    searched: Corpus,
    match: Match = "string",
    *,
    strict: bool = False,
) -> list[RankedQuestion]:
    """The hits of each question, marked by whether their passage holds an answer (None where there are no answers)."""
    matcher = AnswerMatcher(match, strict=strict)
    ranked: list[RankedQuestion] = []
    for question, found in zip(questions, hits, strict=True):
        texts = searched.get(hit.passage_id for hit in found)
        marks = [
            matcher.has_answer(texts[hit.passage_id].text, question.answers) if question.answers else None
            for hit in found
        ]
        passages = [RankedPassage(hit.passage_id, "", "", hit.score, mark) for hit, mark in zip(found, marks)]
        ranked.append(RankedQuestion(question, passages))
    return ranked
