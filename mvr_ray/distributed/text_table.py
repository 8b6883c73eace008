"""Formats figures of a report as a table of plain text, for `print` and notebooks."""

from collections.abc import Sequence


def text_table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return lines of text, indented by two: under a title the columns, and below each its cells."""
    widths = [max(map(len, cells)) for cells in zip(columns, *lines)]
    rows = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in (columns, *lines))
    return "\n  ".join([title, *rows])
