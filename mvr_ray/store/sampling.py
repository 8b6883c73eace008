"""Draws that depend on nothing but names and a seed: the same today, elsewhere, and over a longer list.

An item's lot is a hash of its name; the lowest lots win.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from mvr_ray.types import Question

Ranked = tuple[int, int, str]


def hash_rank(name: str, purpose: str, seed: int = 0) -> int:
    """A 64-bit number that a name draws; independent between purposes and seeds."""
    digest = hashlib.blake2b(f"{seed}\0{purpose}\0{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


class BottomK:
    """Keeps the names with the lowest lots, however many pass by; those marked first win over all others."""

    def __init__(self, limit: int, purpose: str) -> None:
        self.limit = limit
        self._purpose = purpose
        self._kept: list[Ranked] = []

    def add(self, name: str, first: bool = False) -> None:
        self._kept.append((0 if first else 1, hash_rank(name, self._purpose), name))
        if len(self._kept) > 2 * self.limit + 1024:
            self._trim()

    def names(self) -> set[str]:
        self._trim()
        return {name for _, _, name in self._kept}

    def _trim(self) -> None:
        self._kept.sort()
        del self._kept[self.limit :]


def draw(names: Iterable[str], count: int, purpose: str, seed: int = 0) -> set[str]:
    """The `count` names with the lowest lots."""
    return set(sorted(names, key=lambda name: (hash_rank(name, purpose, seed), name))[:count])


class SplitShares(NamedTuple):
    """Shares in 0..1, as in `config.SplitConfig`."""

    unseen: float
    known: float
    gate: float
    seed: int


def split(questions: Sequence[Question], articles: Mapping[str, str], shares: SplitShares) -> dict[str, list[Question]]:
    """Divide questions into known, gate, other and unseen; `articles` names each question id's article.

    Articles are drawn for `unseen` and, from those, for the gate (one at least, if there are two and the gate has a
    share); of the other articles the questions are drawn one by one. Each set keeps the order of `questions`.
    """
    names = set(articles.values())
    unseen = draw(names, round(shares.unseen * len(names)), "unseen", shares.seed)
    num_gate = round(shares.gate * len(unseen))
    if shares.gate and len(unseen) > 1:
        num_gate = max(1, num_gate)
    unseen_gate = draw(unseen, num_gate, "unseen gate", shares.seed)
    seen_ids = [question.id for question in questions if articles[question.id] not in unseen]
    known = draw(seen_ids, round(shares.known * len(seen_ids)), "known", shares.seed)
    left = [name for name in seen_ids if name not in known]
    gate = draw(left, round(shares.gate * len(seen_ids)), "gate", shares.seed)
    sets: dict[str, list[Question]] = {"known": [], "gate": [], "other": [], "unseen": []}
    for question in questions:
        article = articles[question.id]
        if article in unseen:
            sets["gate" if article in unseen_gate else "unseen"].append(question)
        elif question.id in known:
            sets["known"].append(question)
        else:
            sets["gate" if question.id in gate else "other"].append(question)
    return sets
