"""Sample names and split question sets by hashes of names: the same on any machine and in any order.

An item's rank is a hash of its name and a seed; the lowest ranks are drawn, so added names may displace others.
"""

import hashlib
import heapq
from collections.abc import Container, Iterable, Mapping, Sequence

from mvr_ray.types import Question


def hash_rank(name: str, purpose: str, seed: int = 0) -> int:
    """Return the rank of a name, a 64-bit number; independent between purposes and seeds."""
    digest = hashlib.blake2b(f"{seed}\0{purpose}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def draw(
    names: Iterable[str], count: int, purpose: str, seed: int = 0, first: Container[str] = frozenset()
) -> set[str]:
    """Return the `count` names with the lowest ranks; those in `first` precede all others. Holds only `count` names."""
    return set(heapq.nsmallest(count, names, lambda name: (name not in first, hash_rank(name, purpose, seed), name)))


def split(
    questions: Sequence[Question],
    articles: Mapping[str, str],
    *,
    unseen_share: float,
    known_share: float,
    gate_share: float,
    seed: int,
) -> dict[str, list[Question]]:
    """Divide questions into known, gate, other and unseen; `articles` names each question id's article.

    Articles are drawn for `unseen` and, from those, for the gate (one at least, if there are two and the gate has a
    share); of the other articles the questions are drawn one by one. Each set keeps the order of `questions`.
    """
    names = set(articles.values())
    unseen_articles = draw(names, round(unseen_share * len(names)), "unseen", seed)
    num_gate = round(gate_share * len(unseen_articles))
    if gate_share and len(unseen_articles) > 1:
        num_gate = max(1, num_gate)
    unseen_gate = draw(unseen_articles, num_gate, "unseen gate", seed)
    seen_ids = [question.id for question in questions if articles[question.id] not in unseen_articles]
    known_ids = draw(seen_ids, round(known_share * len(seen_ids)), "known", seed)
    rest = [name for name in seen_ids if name not in known_ids]
    gate = draw(rest, round(gate_share * len(seen_ids)), "gate", seed)
    sets: dict[str, list[Question]] = {"known": [], "gate": [], "other": [], "unseen": []}
    for question in questions:
        article = articles[question.id]
        if article in unseen_articles:
            sets["gate" if article in unseen_gate else "unseen"].append(question)
        elif question.id in known_ids:
            sets["known"].append(question)
        else:
            sets["gate" if question.id in gate else "other"].append(question)
    return sets
