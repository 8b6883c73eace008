"""Store the judgements of `Index.add_feedback`: numbered files of JSON lines, each with all judgements so far.

A call creates the file after the newest. Only one process can; another reads the newest file again and tries the next
number. As old files are deleted, a slow process can create a number that another had used before: so each call ends by
looking whether the newest file continues its own. The two newest files stay.
"""

import hashlib
from collections.abc import Sequence

from mvr_ray.errors import MissingInputError
from mvr_ray.store import paths
from mvr_ray.store.files import Store


def add_judgements(store: Store, index: str, lines: Sequence[str]) -> int:
    """Add judgements, one a line, to those of an index; returns how many there are."""
    while True:
        number, before = _newest(store, index)
        all_lines = [*filter(bytes.strip, before.split(b"\n")), *(line.encode() for line in lines)]
        if not lines:
            return len(all_lines)
        path, data = paths.judgements(index, number + 1), b"".join(line + b"\n" for line in all_lines)
        try:
            store.create_once(path, data)
        except FileExistsError:
            continue
        except OSError as error:
            if not store.holds(path, data, error):
                raise
        if not _newest(store, index)[1].startswith(data):
            store.delete(path)
            continue
        for old in _numbers(store, index):
            if old < number:
                store.delete(paths.judgements(index, old))
        return len(all_lines)


def copy_judgements(store: Store, index: str) -> str | None:
    """Copy all judgements of an index to a file that further ones leave as it is; return its path, or None without any.

    The file is named by its content, so an interrupted refinement continues with it. It replaces the copy before.
    """
    data = _newest(store, index)[1]
    if not data:
        return None
    folder = paths.judgement_folder(index)
    name = f"copy-{hashlib.sha256(data).hexdigest()[:16]}.jsonl"
    store.write_bytes(f"{folder}/{name}", data)
    for other in store.list(folder):
        if other.startswith("copy-") and other != name:
            store.delete(f"{folder}/{other}")
    return f"{folder}/{name}"


def _newest(store: Store, index: str) -> tuple[int, bytes]:
    """Read the newest file and return its number with it; 0 and the file of an earlier commit, or nothing, else."""
    while True:
        number = max(_numbers(store, index), default=0)
        try:
            return number, store.read_bytes(paths.judgements(index, number))
        except MissingInputError:
            if not number:
                return 0, b""
            # two further calls have deleted it since it was listed


def _numbers(store: Store, index: str) -> list[int]:
    stems = (name.removesuffix(".jsonl") for name in store.list(paths.judgement_folder(index)))
    return [int(stem) for stem in stems if stem.isdecimal()]
