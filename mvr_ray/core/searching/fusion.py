"""One ranking from two: BM25 plus dense, with a weight (DPR, section 5: BM25(q, p) + lambda x dense(q, p)).

A passage that one list lacks gets that list's lowest score, since it scored no more. The weight is chosen on questions
that are not reported on. Ties go to the lower passage id.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class FusedHit(NamedTuple):
    """A passage with its fused score."""

    passage_id: str
    score: float


def fuse(first: Mapping[str, float], second: Mapping[str, float], weight: float, k: int) -> list[FusedHit]:
    """The best k of both lists by `first + weight x second`. Scores by passage id; an empty list adds nothing."""
    floors = [min(scores.values()) if scores else 0.0 for scores in (first, second)]
    fused = [
        FusedHit(passage, first.get(passage, floors[0]) + weight * second.get(passage, floors[1]))
        for passage in {**first, **second}
    ]
    return sorted(fused, key=lambda one: (-one.score, one.passage_id))[:k]


class Choice(NamedTuple):
    """A weight and the accuracy that it was chosen by."""

    weight: float
    accuracy: float


def choose_weight(
    pairs: Sequence[tuple[Mapping[str, float], Mapping[str, float]]],
    relevant: Sequence[frozenset[str] | set[str]],
    weights: Sequence[float],
) -> Choice:
    """The weight whose fused ranking has a relevant passage first most often; the smallest of equals."""
    best = Choice(weights[0], -1.0)
    for weight in sorted(weights):
        found = sum(
            bool(top and top[0].passage_id in wanted)
            for wanted, top in zip(relevant, (fuse(first, second, weight, 1) for first, second in pairs))
        )
        share = found / max(len(pairs), 1)
        if share > best.accuracy:
            best = Choice(weight, share)
    return best
