"""Batches of texts by their number of tokens."""

from collections.abc import Sequence


def token_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Rows in batches of at most `budget` tokens once padded to the batch's longest, longest first, ties by row.

    A text longer than the budget has a batch of its own.
    """
    batches: list[list[int]] = []
    width = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if not batches or (len(batches[-1]) + 1) * width > budget:
            batches.append([])
            width = lengths[row]
        batches[-1].append(row)
    return batches


def filled_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Texts in their order, in batches of at most `budget` tokens; a longer text has a batch of its own."""
    batches: list[list[int]] = []
    start = taken = 0
    for row, length in enumerate(lengths):
        if row > start and taken + length > budget:
            batches.append(list(range(start, row)))
            start, taken = row, 0
        taken += length
    if lengths:
        batches.append(list(range(start, len(lengths))))
    return batches
