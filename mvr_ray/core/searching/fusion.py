"""Fuse two rankings with a weight: BM25 plus dense (DPR, section 5: BM25(q, p) + lambda x dense(q, p)).

A passage that one list lacks gets that list's lowest score, since it scored no more. The weight is chosen on questions
that are not reported on. Ties go to the lower passage id.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mvr_ray.types import Hit


def fuse(first: Mapping[str, float], second: Mapping[str, float], weight: float, k: int) -> list[Hit]:
    """Rank both lists by `first + weight x second` and return the best k hits, whose view, shard and row are -1.

    The lists are scores by passage id; an empty list adds nothing.
    """
    floors = [min(scores.values()) if scores else 0.0 for scores in (first, second)]
    hits = [
        Hit(passage, first.get(passage, floors[0]) + weight * second.get(passage, floors[1]), -1, -1, -1)
        for passage in {**first, **second}
    ]
    return sorted(hits, key=lambda one: (-one.score, one.passage_id))[:k]


class Choice(NamedTuple):
    """A weight and the accuracy that it was chosen by."""

    weight: float
    accuracy: float


def choose_weight(
    pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]],
    relevant: Sequence[frozenset[str] | set[str]],
    weights: Sequence[float],
) -> Choice:
    """Choose the weight whose fused ranking has a relevant passage first most often; the smallest of equals."""
    best = Choice(weights[0], -1.0)
    for weight in sorted(weights):
        num_right = sum(
            bool(top and top[0].passage_id in relevant_ids)
            for relevant_ids, top in zip(relevant, (fuse(first, second, weight, 1) for first, second in pairs))
        )
        share = num_right / max(len(pairs), 1)
        if share > best.accuracy:
            best = Choice(weight, share)
    return best
