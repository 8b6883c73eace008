"""Choose the weight of the dense score in a hybrid search, on questions that no figure is reported for.

Every weight is tried with the search that will answer, exactly. The best has the most questions with a gold passage at
rank 1; of equals the one with the higher mean reciprocal rank, then the smaller one. Reports the whole curve.
"""

import logging
from typing import NamedTuple

import numpy as np

from mvr_ray.config import RunConfig
from mvr_ray.core.judging.metrics import first_ranks, hit_within, reciprocal_ranks
from mvr_ray.distributed.evaluate import require_gold_passages
from mvr_ray.distributed.rank import QuestionRanker, QuestionSet, RankSettings
from mvr_ray.distributed.router import open_router
from mvr_ray.errors import ConfigError
from mvr_ray.store.corpus import read_questions
from mvr_ray.types import HybridQueries, Progress, no_progress

log = logging.getLogger(__name__)

WEIGHTS = (0.0, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 80.0, 120.0, 200.0)
"""Tried for the dense score, a cosine; BM25 scores of a question are some tens."""
DEPTH = 20


class WeightAccuracy(NamedTuple):
    """What one weight is worth: shares of questions with a gold passage so high, and the mean reciprocal rank. Without
    a weight: the dense score alone."""

    weight: float | None
    top1: float
    top5: float
    top20: float
    mrr: float


class TuneReport(NamedTuple):
    """The curve, and what to put into the run file."""

    index: str
    version: int
    questions: str
    num_questions: int
    setting: str
    rows: list[WeightAccuracy]


def tune(run: RunConfig, questions: str, progress: Progress = no_progress) -> TuneReport:
    """Try the weights on a stored question set with gold passages.

    Raises ConfigError for a set of `evaluate.questions` or one without gold passages, MissingInputError, CoverageError,
    ShardIndexError for a version without words.
    """
    if questions in run.evaluate.questions:
        raise ConfigError(
            f"tune: question set {questions!r} is one of evaluate.questions, which are reported on; name another one"
        )
    with open_router(run) as router:
        own = [question for question in read_questions(router.corpus, questions) if question.positive_ids]
        if not own:
            raise ConfigError(f"tune: question set {questions!r} names no gold passages; name a set that does")
        require_gold_passages(questions, own, router.corpus)
        ranker, size = QuestionRanker(router, RankSettings(k=DEPTH), run.resources.torch_threads), run.retrieve.batch
        batches = [QuestionSet(questions, own[low : low + size]) for low in range(0, len(own), size)]
        queries = [ranker.embed(batch) for batch in batches]
        rows = []
        for done, weight in enumerate((None, *WEIGHTS), 1):
            marks: list[list[bool]] = []
            for batch, queries_QD in zip(batches, queries):
                texts = tuple(question.text for question in batch.questions)
                hybrid = None if weight is None else HybridQueries(texts, weight)
                answer = ranker.search(queries_QD, DEPTH, hybrid)
                for question, hits in zip(batch.questions, answer.hits):
                    marks.append([hit.passage_id in question.positive_ids for hit in hits])
            ranks_Q = first_ranks(marks)
            top1, top5, top20 = (float(np.mean(hit_within(ranks_Q, k))) for k in (1, 5, DEPTH))
            rows.append(WeightAccuracy(weight, top1, top5, top20, float(np.mean(reciprocal_ranks(ranks_Q, DEPTH)))))
            progress("weights", done, 1 + len(WEIGHTS))
        manifest = router.manifest
    best = max(rows, key=lambda row: (row.top1, row.mrr, row.weight is None, -(row.weight or 0)))
    setting = f"search.hybrid={'null' if best.weight is None else f'{best.weight:g}'}"
    log.info("tuned: index=%s version=%d set=%s %s", manifest.index, manifest.version, questions, setting)
    return TuneReport(manifest.index, manifest.version, questions, len(own), setting, rows)
