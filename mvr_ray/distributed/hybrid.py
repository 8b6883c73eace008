"""Try weights of the dense score in a hybrid search, each with the exact production search.

The best weight has the most questions with a gold passage at rank 1; ties go to the higher mean reciprocal rank, then
to the smaller weight.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mvr_ray.config import RunConfig
from mvr_ray.core.judging.metrics import first_ranks, hit_within, reciprocal_ranks
from mvr_ray.distributed.rank import QuestionRanker, QuestionSet, RankSettings
from mvr_ray.distributed.router import Router
from mvr_ray.types import HybridQueries, HybridWeight, Progress, no_progress

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


def try_weights(
    run: RunConfig,
    router: Router,
    questions: QuestionSet,
    weights: Sequence[HybridWeight | None] = WEIGHTS,
    progress: Progress = no_progress,
) -> list[WeightAccuracy]:
    """Search with each of the weights; every question names gold passages. Raises ShardIndexError, CoverageError."""
    ranker, size = QuestionRanker(router, RankSettings(k=DEPTH), run.resources.torch_threads), run.retrieve.batch
    own = questions.questions
    batches = [QuestionSet(questions.name, own[low : low + size]) for low in range(0, len(own), size)]
    queries = [ranker.embed(batch) for batch in batches]
    rows = []
    for count, weight in enumerate(weights, 1):
        marks: list[list[bool]] = []
        for batch, queries_QD in zip(batches, queries):
            texts = tuple(question.text for question in batch.questions)
            answer = ranker.search(queries_QD, DEPTH, None if weight is None else HybridQueries(texts, weight))
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
