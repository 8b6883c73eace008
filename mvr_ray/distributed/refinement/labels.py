"""Label the hits of one round: from answers, gold passages, or external judgements.

Answers label retrieved passages (AOpt, eq. 8). Gold passages and judgements are certain, so they are labelled whether
retrieved or not, at the best-scoring view; other hits are negatives of gold labels only.

Shapes: L labelled questions, K hits, D dimension.
"""

from collections.abc import Sequence

import numpy as np

from mvr_ray.config import RefineConfig
from mvr_ray.core.refining.pseudo_labels import Labels, labels_from_hits
from mvr_ray.distributed.refinement.measure import Evaluator, JudgedPair
from mvr_ray.distributed.refinement.refiner_pool import RefinerPool
from mvr_ray.distributed.refinement.state import StateId
from mvr_ray.types import FloatArray, ShardHits


def label_round(
    refine: RefineConfig,
    evaluator: Evaluator,
    refiners: RefinerPool,
    at: StateId,
    queries_LD: FloatArray,
    hits: ShardHits,
) -> Labels:
    """Label the hits of the labelled questions at a state; passages are numbered through all shards."""
    if evaluator.feedback:
        return winning_labels(refiners, at, queries_LD, evaluator.feedback)
    passage_LK, view_LK = hits.rows_QK[:, : refine.depth], hits.views_QK[:, : refine.depth]
    rows_L = np.arange(len(passage_LK))
    if refine.labels == "answers":
        return labels_from_hits(passage_LK, view_LK, evaluator.bears_answer(rows_L, passage_LK), refine.positives)
    labels = labels_from_hits(passage_LK, view_LK, evaluator.is_gold(rows_L, passage_LK), "all")
    unretrieved_pairs = [
        JudgedPair(row, passage, True)
        for row, hit_K in enumerate(passage_LK)
        for passage in sorted(evaluator.gold_T[row].difference(hit_K.tolist()))
    ]
    more = winning_labels(refiners, at, queries_LD, unretrieved_pairs)
    both = Labels(
        np.concatenate([labels.question_L, more.question_L]),
        np.concatenate([labels.passage_L, more.passage_L]),
        np.concatenate([labels.view_L, more.view_L]),
        np.concatenate([labels.positive_L, more.positive_L]),
    )
    return both.take(np.lexsort((both.passage_L, both.question_L)))


def winning_labels(refiners: RefinerPool, at: StateId, queries_LD: FloatArray, pairs: Sequence[JudgedPair]) -> Labels:
    """Label judged pairs at their best-scoring view, in order of question, then passage."""
    question_L, passage_L, positive_L = (np.array(column) for column in zip(*sorted(pairs))) if pairs else ([], [], [])
    labels = Labels(
        np.asarray(question_L, np.int64),
        np.asarray(passage_L, np.int64),
        np.zeros(len(pairs), np.int16),
        np.asarray(positive_L, bool),
    )
    for shard, view_L in refiners.winners(at, refiners.split(labels), queries_LD).items():
        labels.view_L[refiners.in_shard(labels.passage_L, shard)] = view_L
    return labels
