"""Store the judgements of `Index.add_feedback`: numbered files of JSON lines, each with all judgements of its group.

A call creates the file after the newest one of the last group, or once that has `GROUP_BYTES`, the first file of the
next group: its cost does not grow with what is stored. A group is named by the number of judgements before it. Only one
process can create a file; another reads the newest one again and tries the next number, unless the file holds just what
it was to create: equal judgements of two processes at the same moment count once. As old files are deleted, a slow
process can create a number that another had used before: so each call ends by looking whether the newest file of the
group continues its own. The two newest files of a group stay, and the last one of every group holds all of it.
"""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

from mvr_ray.errors import MissingInputError
from mvr_ray.store import paths
from mvr_ray.store.files import Store
from mvr_ray.store.gc import GRACE_S

GROUP_BYTES = 1 << 16
"""Size from which a group gets no further judgements."""


class JudgementFile(NamedTuple):
    """A file by its group and number, and its lines."""

    group: int
    number: int
    lines: list[bytes]


def add_judgements(store: Store, index: str, lines: Sequence[str]) -> int:
    """Add judgements, one a line, to those of an index; returns how many there are."""
    while True:
        group, number, all_lines = _newest(store, index)
        if not lines:
            return group + len(all_lines)
        if sum(len(line) + 1 for line in all_lines) >= GROUP_BYTES:
            group, number, all_lines = group + len(all_lines), 0, []
        all_lines += [line.encode() for line in lines]
        path, data = paths.judgements(index, number + 1, group), b"".join(line + b"\n" for line in all_lines)
        try:
            store.create_once(path, data)
        except OSError as error:  # FileExistsError too: a client that repeats a put meets its own file
            if not store.holds(path, data, error):
                if isinstance(error, FileExistsError):
                    continue
                raise
        if _newest(store, index, (group, number + 1)).lines[: len(all_lines)] != all_lines:
            store.delete(path)
            continue
        for old in _numbers(store, index).get(group, ()):
            if 0 < old < number:
                store.delete(paths.judgements(index, old, group))
        return group + len(all_lines)


def copy_judgements(store: Store, index: str) -> str | None:
    """Copy all judgements of an index to a file that further ones leave as it is; return its path, or None without any.

    The file is named by its content, so an interrupted refinement continues with it. It replaces copies of an hour ago:
    another refinement may be about to read a younger one.
    """
    *full_groups, last = sorted((group, max(numbers)) for group, numbers in _numbers(store, index).items())
    files = [*store.for_each(lambda own: _read(store, index, *own), full_groups), _newest(store, index, last)]
    data = b"".join(line + b"\n" for file in files for line in file.lines)
    if not data:
        return None
    folder = paths.judgement_folder(index)
    name = f"copy-{hashlib.sha256(data).hexdigest()[:16]}.jsonl"
    store.write_bytes(f"{folder}/{name}", data)
    for other in store.list(folder):
        if other.startswith("copy-") and other != name and store.age_s(f"{folder}/{other}") >= GRACE_S:
            store.delete(f"{folder}/{other}")
    return f"{folder}/{name}"


def _newest(store: Store, index: str, file: tuple[int, int] | None = None) -> JudgementFile:
    """Read the newest file of the group of `file` (group, number), which a listing that lags may lack; None: of the
    last group.

    A name that was listed may be that of a slow process's file when it is read: then newer files exist, so the newest
    name is listed again after the read.
    """
    newest = _newest_name(store, index, file)
    while True:
        try:
            file_read = _read(store, index, *newest)
        except MissingInputError:  # two further calls have deleted it since it was listed
            file_read = None
        listed_name, newest = newest, _newest_name(store, index, file)
        if file_read and newest == listed_name:
            return file_read


def _newest_name(store: Store, index: str, file: tuple[int, int] | None) -> tuple[int, int]:
    numbers = _numbers(store, index)
    group, number = file or (max(numbers), 0)
    return group, max(number, *numbers.get(group, (0,)))


def _read(store: Store, index: str, group: int, number: int) -> JudgementFile:
    try:
        data = store.read_bytes(paths.judgements(index, number, group))
    except MissingInputError:
        if number:
            raise
        data = b""
    return JudgementFile(group, number, [*filter(bytes.strip, data.split(b"\n"))])


def _numbers(store: Store, index: str) -> dict[int, list[int]]:
    """List the numbers of the files of each group. The first group has at least 0: the file of an earlier commit, or
    nothing."""
    numbers = {0: [0]}
    for name in store.list(paths.judgement_folder(index)):
        group, _, number = name.removesuffix(".jsonl").rpartition("-")
        if number.isdecimal() and (group or "0").isdecimal():
            numbers.setdefault(int(group or 0), []).append(int(number))
    return numbers
