"""Divide texts into batches by their number of tokens."""

from collections.abc import Sequence


def token_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Divide rows into batches of at most `budget` tokens, padding included: longest first, ties by row.

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
    """Divide texts, in order, into batches of at most `budget` tokens; a longer text has a batch of its own."""
    batches: list[list[int]] = []
    free_tokens = 0
    for row, length in enumerate(lengths):
        if not batches or length > free_tokens:
            batches.append([])
            free_tokens = budget
        batches[-1].append(row)
        free_tokens -= length
    return batches
