"""Choose the weight of the dense score in a hybrid search, on questions outside every reported figure.

Each weight is tried with the exact production search. The best one has the most questions with a gold passage at rank
1; ties go to the higher mean reciprocal rank, then to the smaller weight. The report has the whole curve, the dense
score alone and reciprocal rank fusion.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mvr_ray.config import RunConfig
from mvr_ray.core.judging.metrics import first_ranks, hit_within, reciprocal_ranks
from mvr_ray.distributed.retrieve import QuestionRanker, QuestionSet, RankSettings
from mvr_ray.distributed.router import Router, open_router, require_words
from mvr_ray.errors import ConfigError, MissingInputError
from mvr_ray.store import manifest as manifests
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.questions import read_questions
from mvr_ray.types import HybridQueries, HybridWeight, Progress, Question, no_progress

log = logging.getLogger(__name__)

WEIGHTS = (0.0, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 80.0, 120.0, 200.0)
"""Weights for the dense score, a cosine; BM25 scores of a question are some tens."""
DEPTH = 20


class WeightAccuracy(NamedTuple):
    """Accuracy of one weight: shares of questions with a gold passage in the top k, and the mean reciprocal rank.
    Weight None is the dense score alone."""

    weight: HybridWeight | None
    top1: float
    top5: float
    top20: float
    mrr: float


class TuneReport(NamedTuple):
    """The curve, and the setting for the run file."""

    index: str
    version: int
    questions: str
    num_questions: int
    setting: str
    rows: list[WeightAccuracy]


def tune(run: RunConfig, questions: str, progress: Progress = no_progress) -> TuneReport:
    """Measure each weight on a stored question set with gold passages.

    Raises ConfigError for a set of `evaluate.questions` or one without gold passages, MissingInputError, CoverageError,
    ShardIndexError for a version without words.
    """
    if questions in run.evaluate.questions:
        raise ConfigError(
            f"tune: question set {questions!r} is one of evaluate.questions, which are reported; name another one"
        )
    store = Store(run.store.path)
    base = manifests.read(store, run.index.name)
    require_words(base)
    corpus = Corpus.open(store, base.corpus, base.corpus_digest)
    query_set = gold_questions(corpus, questions, "tune")
    with open_router(run, base.version) as router:
        rows = try_weights(run, router, query_set, (None, "rrf", *WEIGHTS), progress)
    weight = best_weight(rows).weight
    setting = f"search.hybrid={'null' if weight is None else weight if isinstance(weight, str) else f'{weight:g}'}"
    log.info("tuned: index=%s version=%d set=%s %s", base.index, base.version, questions, setting)
    return TuneReport(base.index, base.version, questions, len(query_set.questions), setting, rows)


def gold_questions(corpus: Corpus, name: str, setting: str) -> QuestionSet:
    """The questions of a stored set that name gold passages. Raises ConfigError, which names the setting, if there are
    none, else as `require_gold_passages`."""
    questions = [question for question in read_questions(corpus, name) if question.positive_ids]
    if not questions:
        raise ConfigError(
            f"{setting}: question set {name!r} names no gold passages; name a set that does, or rank without a weight: "
            f"search.hybrid=rrf"
        )
    require_gold_passages(name, questions, corpus)
    return QuestionSet(name, questions)


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


def try_weights(
    run: RunConfig,
    router: Router,
    questions: QuestionSet,
    weights: Sequence[HybridWeight | None] = WEIGHTS,
    progress: Progress = no_progress,
) -> list[WeightAccuracy]:
    """Search with each of the weights; every question names gold passages. Raises ShardIndexError, CoverageError."""
    ranker = QuestionRanker(router, RankSettings(k=DEPTH), run.resources.torch_threads)
    batches = questions.batches(run.retrieve.batch)
    queries = [ranker.embed(batch) for batch in batches]
    rows = []
    for count, weight in enumerate(weights, 1):
        marks: list[list[bool]] = []
        for batch, queries_QD in zip(batches, queries):
            hybrid = None if weight is None else HybridQueries(batch.texts, weight)
            answer = ranker.search(queries_QD, DEPTH, hybrid)
            for question, hits in zip(batch.questions, answer.hits):
                marks.append([hit.passage_id in question.positive_ids for hit in hits])
        ranks_Q = first_ranks(marks)
        top1, top5, top20 = (float(np.mean(hit_within(ranks_Q, k))) for k in (1, 5, DEPTH))
        rows.append(WeightAccuracy(weight, top1, top5, top20, float(np.mean(reciprocal_ranks(ranks_Q, DEPTH)))))
        progress("weights", count, len(weights))
    return rows


def best_weight(rows: Sequence[WeightAccuracy]) -> WeightAccuracy:
    """The best weight; ties go to the dense score alone, then to the smallest weight."""
    return max(rows, key=lambda row: (row.top1, row.mrr, row.weight is None, -_as_number(row.weight)))


def _as_number(weight: HybridWeight | None) -> float:
    return float("inf") if isinstance(weight, str) else weight or 0.0
