"""Fuse rankings by reciprocal ranks (Cormack et al., SIGIR 2009): no weight, so no questions to choose it.

    f(p) = sum over lists with p of  1 / (60 + rank of p)        ranks count from 1

A list contributes 0 to passages that it lacks, so scores depend on the length of the lists. Ties go to the lower
passage id.
"""

from collections.abc import Sequence

from mvr_ray.types import Hit

RANK_OFFSET = 60
LIST_DEPTH = 100
"""Hits of each list; more where k is larger."""


def fuse_ranks(lists: Sequence[Sequence[Hit]], k: int) -> list[Hit]:
    """Return the best k hits of several rankings, with the fields of the last list that has them."""
    scores: dict[str, float] = {}
    hits: dict[str, Hit] = {}
    for ranking in lists:
        for rank, hit in enumerate(ranking, 1):
            scores[hit.passage_id] = scores.get(hit.passage_id, 0.0) + 1 / (RANK_OFFSET + rank)
            hits[hit.passage_id] = hit
    best = sorted(scores, key=lambda name: (-scores[name], name))[:k]
    return [hits[name]._replace(score=scores[name]) for name in best]
