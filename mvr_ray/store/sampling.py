"""Sample names and split question sets by hashes of names: the same on any machine, and over a longer list.

An item's rank is a hash of its name and a seed; the lowest ranks are drawn.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from mvr_ray.types import Question

RankedName = tuple[int, int, str]


def hash_rank(name: str, purpose: str, seed: int = 0) -> int:
    """Return the rank of a name, a 64-bit number; independent between purposes and seeds."""
    digest = hashlib.blake2b(f"{seed}\0{purpose}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


class BottomK:
    """Keeps the names with the lowest ranks, however many are added; those marked first win over all others."""

    def __init__(self, limit: int, purpose: str) -> None:
        self.limit = limit
        self._purpose = purpose
        self._lowest: list[RankedName] = []

    def add(self, name: str, first: bool = False) -> None:
        self._lowest.append((0 if first else 1, hash_rank(name, self._purpose), name))
        if len(self._lowest) > 2 * self.limit + 1024:
            self._trim()

    def names(self) -> set[str]:
        self._trim()
        return {name for _, _, name in self._lowest}

    def _trim(self) -> None:
        self._lowest.sort()
        del self._lowest[self.limit :]


def draw(names: Iterable[str], count: int, purpose: str, seed: int = 0) -> set[str]:
    """Return the `count` names with the lowest ranks."""
    return set(sorted(names, key=lambda name: (hash_rank(name, purpose, seed), name))[:count])


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
    unseen = draw(names, round(unseen_share * len(names)), "unseen", seed)
    num_gate = round(gate_share * len(unseen))
    if gate_share and len(unseen) > 1:
        num_gate = max(1, num_gate)
    unseen_gate = draw(unseen, num_gate, "unseen gate", seed)
    seen_ids = [question.id for question in questions if articles[question.id] not in unseen]
    known_ids = draw(seen_ids, round(known_share * len(seen_ids)), "known", seed)
    rest = [name for name in seen_ids if name not in known_ids]
    gate = draw(rest, round(gate_share * len(seen_ids)), "gate", seed)
    sets: dict[str, list[Question]] = {"known": [], "gate": [], "other": [], "unseen": []}
    for question in questions:
        article = articles[question.id]
        if article in unseen:
            sets["gate" if article in unseen_gate else "unseen"].append(question)
        elif question.id in known_ids:
            sets["known"].append(question)
        else:
            sets["gate" if question.id in gate else "other"].append(question)
    return sets
