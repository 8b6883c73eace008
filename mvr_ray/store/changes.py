"""Merge changes of rows in id order, lay them over the rows, and decide how many files of them stay.

A file of changes holds every row that differs or is new, and the ids of deleted rows; later files override earlier
ones. An update writes in proportion to what it changes: only files of changes that are about as small are written again
with the new ones (`num_kept`). When all changes are more than a share of the first file's rows, it is written whole.
"""

import bisect
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeVar

MAX_CHANGED_SHARE = 0.25
Row = TypeVar("Row")
Piece = TypeVar("Piece")


class Changes(NamedTuple, Generic[Row]):
    """New or changed rows by id, and the ids of deleted rows."""

    upserts: dict[str, Row]
    deletions: set[str]

    def ids(self) -> set[str]:
        return self.deletions.union(self.upserts)

    @classmethod
    def join(cls, parts: Iterable["Changes[Row]"]) -> "Changes[Row]":
        """Merge several changes in order: the last one to name a row decides."""
        result = cls({}, set())
        for part in parts:
            for name in part.deletions:
                result.upserts.pop(name, None)
            result.deletions.update(part.deletions)
            result.deletions.difference_update(part.upserts)
            result.upserts.update(part.upserts)
        return result


def num_kept(sizes: Sequence[int], num_changes: int) -> int:
    """Return how many of the first files of changes, of `sizes` changes each, stay unchanged when others are added.

    The files after them are written again with the new changes. A file that stays is more than one and a half times as
    large as the next one, so there are few, and a change is written again only into a file that is two thirds larger.
    """
    num_files = len(sizes)
    while num_files and 2 * sizes[num_files - 1] <= 3 * num_changes:
        num_files -= 1
        num_changes += sizes[num_files]
    return num_files


def changed_ids(ids: list[str], upsert_ids: Collection[str], deleted_ids: Collection[str]) -> list[str]:
    """Return ascending ids with `upsert_ids`, a set or keys, added and `deleted_ids` removed; ids between two changes
    are copied as slices."""
    result, row = [], 0
    for name in sorted({*upsert_ids, *deleted_ids}):
        at = bisect.bisect_left(ids, name, row)
        result += ids[row:at]
        row = at + (at < len(ids) and ids[at] == name)
        result += [name] * (name in upsert_ids)
    return result + ids[row:]


def lay_over(
    pieces: Iterable[Piece],
    changes: Changes[Row],
    ids_of: Callable[[Piece], list[str]],
    piece_of: Callable[[str, Row], Piece],
    cut: Callable[[Piece, int, int], Piece],
    join: Callable[[list[Piece]], Piece],
    rows_worth_dividing: int,
) -> Iterator[Piece]:
    """Yield pieces of rows in id order with the changes: upserts are in place of rows of the same id or between others.

    A piece without a change stays as it is. Around one change in `rows_worth_dividing` rows, or fewer, a piece is
    divided, and `cut` copies nothing; with more of them its parts are joined again.
    """
    pieces, names = list(pieces), sorted(changes.ids())
    starts = [0, *(bisect.bisect_left(names, ids_of(cut(piece, 0, 1))[0]) for piece in pieces[1:]), len(names)]
    for piece, low, high in zip(pieces, starts, starts[1:]):
        if low == high:
            yield piece
            continue
        ids, parts, row = ids_of(piece), [], 0
        for name in names[low:high]:
            at = bisect.bisect_left(ids, name, row)
            if row < at:
                parts.append(cut(piece, row, at))
            row = at + (at < len(ids) and ids[at] == name)
            if name in changes.upserts:
                parts.append(piece_of(name, changes.upserts[name]))
        if row < len(ids):
            parts.append(cut(piece, row, len(ids)))
        is_divided = (high - low) * rows_worth_dividing <= len(ids) or len(parts) < 2
        yield from parts if is_divided else [join(parts)]
