"""Define the tables of a report, and format their cells.

A row maps columns to values. A table has the columns of its rows, in the order of their first occurrence, so the rows
define the table. The type of a value says how it is written: a `Cell` in percent and a `Difference` in points, both
with their interval; a float with four digits; texts and whole numbers as they are; None as an empty cell.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from mvr_ray.comparison import Difference
from mvr_ray.distributed.text_table import interval_text


class Cell(NamedTuple):
    """A share or a plain number with its 95 % interval, over `n` questions and `seeds` seeds."""

    value: float
    low: float
    high: float
    seeds: int = 1
    n: int = 0


ADJUSTED_P = "p, Holm"
"""Column of p-values that are adjusted for the number of rows. Other columns of p-values end in ", p"."""
P_NOTE = (
    "The p's are those of the paired test, which flips whole articles, or, where larger, of the paired t-test over "
    "seeds; they are not corrected for their number."
)

Value = str | float | int | Cell | Difference | None
Row = dict[str, Value]


class Table(NamedTuple):
    """`rows` hold formatted values; `note` explains them."""

    title: str
    note: str
    columns: list[str]
    rows: list[list[str | int]]


def make_table(title: str, note: str, rows: Iterable[Row], *, drop_empty: bool = False) -> Table | None:
    """Build a table; None without rows. `drop_empty` omits columns that are empty in every row."""
    texts = [{column: format_value(value) for column, value in row.items()} for row in rows]
    if not texts:
        return None
    columns = list(dict.fromkeys(column for row in texts for column in row))
    if drop_empty:
        columns = [column for column in columns if any(row.get(column, "") != "" for row in texts)]
    return Table(title, note, columns, [[row.get(column, "") for column in columns] for row in texts])


def format_value(value: Value) -> str | int:
    """Format the value of a cell by its type."""
    match value:
        case None:
            return ""
        case Cell(share, low, high):
            return f"{100 * share:.1f} ({interval_text(low, high, 100)})"
        case Difference():
            return format_change(*value[:4])
        case float():
            return f"{value:.4g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"
    return value


def count_tests(tables: Iterable[Table]) -> tuple[int, int]:
    """Count the p-values of all tables: those that are adjusted for their number, and the others."""
    num_holm = num_others = 0
    for table in tables:
        for column, *cells in zip(table.columns, *table.rows):
            size = sum(str(cell).count(" / ") + 1 for cell in cells if cell != "")
            num_holm += size if column == ADJUSTED_P else 0
            num_others += size if column.endswith(", p") else 0
    return num_holm, num_others


def percent(share: float | None, decimals: int = 1) -> str:
    """Format a share in percent."""
    return "" if share is None else f"{100 * share:.{decimals}f}"


def format_change(
    value: float, low: float | None, high: float | None, p: float, scale: float = 1.0, decimals: int = 1
) -> str:
    """Format a difference with its interval and its p."""
    form = f"+.{decimals}f"
    return f"{scale * value:{form}} ({interval_text(low, high, scale, form)}), {p:.2g}"


def mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None; None without any."""
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else None
