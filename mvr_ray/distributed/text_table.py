"""Formats figures of a report as plain text, for `print`, notebooks and the terminal."""

import math
from collections.abc import Sequence


def text_table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return lines of text, indented by two: under a title the columns, and below each its cells."""
    widths = [max(map(len, cells)) for cells in zip(columns, *lines)]
    rows = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in (columns, *lines))
    return "\n  ".join([title, *rows])


def interval_text(low: float | None, high: float | None, scale: float = 1.0, form: str = ".1f") -> str:
    """Format the ends of an interval; NaN, null in a stored report, is no interval."""
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return "no interval, as articles agree"
    return f"{scale * low:{form}} to {scale * high:{form}}"
