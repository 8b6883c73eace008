"""Chooses the points of a sweep (kills, cuts, seeds): all under `make chaos`, a sample in other runs of the tests."""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

IS_WHOLE = False
"""Whether `-m` selects the marker `chaos`: `conftest.py` sets this before it collects tests."""
STEP = 8
Point = TypeVar("Point")


def take(points: Sequence[Point], kind: Callable[[Point], Hashable] = lambda _: None) -> list[Point]:
    """All points, or of a sample every eighth, the first of each kind, and the last, in their order."""
    if IS_WHOLE:
        return list(points)
    kinds = [kind(point) for point in points]
    numbers = {*range(0, len(points), STEP), *map(kinds.index, kinds), len(points) - 1}
    return [points[number] for number in sorted(numbers)]
