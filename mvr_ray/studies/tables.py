"""Define the tables of a report, and format their cells.

A row maps columns to values. A table has the columns of its rows, in the order of their first occurrence, so the rows
define the table. Shares are in percent, differences in points.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

Value = str | float | int | None
Row = dict[str, Value]


class Cell(NamedTuple):
    """A share or a plain number with its 95 % interval, over `n` questions and `seeds` seeds."""

    value: float
    low: float
    high: float
    seeds: int
    n: int = 0


class Table(NamedTuple):
    """`rows` hold formatted values; `note` explains them."""

    title: str
    note: str
    columns: list[str]
    rows: list[list[Value]]


def make_table(title: str, note: str, rows: Iterable[Row], *, drop_empty: bool = False) -> Table | None:
    """Build a table; None without rows. `drop_empty` omits columns that are empty in every row."""
    rows = list(rows)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if drop_empty:
        columns = [column for column in columns if any(row.get(column, "") not in ("", None) for row in rows)]
    return Table(title, note, columns, [[row.get(column, "") for column in columns] for row in rows]) if rows else None


def format_percent(share: float | None, decimals: int = 1) -> str:
    return "" if share is None else f"{100 * share:.{decimals}f}"


def format_cell(cell: Cell | None) -> str:
    """Format a share in percent, with its interval."""
    return "" if cell is None else f"{100 * cell.value:.1f} ({100 * cell.low:.1f} to {100 * cell.high:.1f})"


def format_change(value: float, low: float, high: float, p: float, decimals: int = 1) -> str:
    """Format a difference with its interval, and the p of the paired test."""
    return f"{value:+.{decimals}f} ({low:+.{decimals}f} to {high:+.{decimals}f}), {p:.2g}"


def format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None; None without any."""
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else None
