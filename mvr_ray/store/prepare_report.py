"""Count the rows of `prepare`: every row read is written, or named, or counted here."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from mvr_ray.errors import DataError
from mvr_ray.store.formats import BadRow

log = logging.getLogger(__name__)

NUM_NAMED = 5


@dataclass(frozen=True)
class PrepareReport:
    """Counts of rows read and written, and of the difference.

    passages_read + chunks_gained = passages_written + bad passages + duplicates + passages_not_drawn
    """

    passages_read: int
    passages_written: int
    bad_rows: tuple[BadRow, ...]
    duplicates: int
    """Repeats of a passage in sources that repeat them, such as DPR's training files; kept once."""
    questions: dict[str, int]
    parts: int
    digest: str
    chunks_gained: int = 0
    passages_not_drawn: int = 0
    questions_not_drawn: int = 0
    """Left out by max_questions, or because max_passages left out all their gold passages."""
    rows_dropped: int = 0
    """Rows that their format's convention leaves out, such as queries without judgements."""
    dropped_by_reason: Mapping[str, int] = field(default_factory=dict)
    """The same rows, counted by reason: redirects, pages of other namespaces, queries without judgements."""
    hard_negatives_dropped: int = 0
    """Hard negatives that name no passage of the corpus."""
    fields: dict[str, str] = field(default_factory=dict)
    """Names and types of the passages' fields."""


@dataclass
class BadRows:
    """Collects bad rows up to the limit."""

    limit: int
    rows: list[BadRow] = field(default_factory=list)

    def add(self, row: BadRow) -> None:
        self.rows.append(row)
        log.warning("bad row: %s", row)
        if len(self.rows) > self.limit:
            first = "; ".join(str(bad) for bad in self.rows[:NUM_NAMED])
            more = f" (and {len(self.rows) - NUM_NAMED} before this)" if len(self.rows) > NUM_NAMED else ""
            raise DataError(
                f"{len(self.rows)} bad rows, more than prepare.max_bad_rows={self.limit}: {first}{more}; "
                f"correct the file, or raise prepare.max_bad_rows to skip such rows"
            )
