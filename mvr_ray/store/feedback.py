"""Store the judgements of `Index.add_feedback`: numbered files of JSON lines, each with all judgements so far.

A call creates the file after the newest, which succeeds for one process alone; another process then reads that file and
tries the next number, so no judgement is lost. The two newest files stay.
"""

from collections.abc import Sequence

from mvr_ray.errors import MissingInputError
from mvr_ray.store import paths
from mvr_ray.store.files import Store


def feedback_file(store: Store, index: str) -> str | None:
    """Return the path of the file with all judgements of an index; None where there are none."""
    number = max(_numbers(store, index), default=0)
    path = paths.feedback(index, number)
    return path if number or store.exists(path) else None


def add_judgements(store: Store, index: str, lines: Sequence[str]) -> int:
    """Add judgements, one a line, to those of an index; returns how many there are."""
    while True:
        numbers = _numbers(store, index)
        number = max(numbers, default=0)
        try:
            before = store.read_bytes(paths.feedback(index, number)).decode()
        except MissingInputError:
            if number:  # deleted by two further calls
                continue
            before = ""
        all_lines = [*filter(str.strip, before.split("\n")), *lines]
        if not lines:
            return len(all_lines)
        path, data = paths.feedback(index, number + 1), "".join(f"{line}\n" for line in all_lines).encode()
        try:
            store.create_once(path, data)
        except OSError as error:
            if not store.holds(path, data, error):
                if isinstance(error, FileExistsError):
                    continue
                raise
        for old in numbers:
            if old < number:
                store.delete(paths.feedback(index, old))
        return len(all_lines)


def _numbers(store: Store, index: str) -> list[int]:
    stems = (name.removesuffix(".jsonl") for name in store.list(paths.feedback_folder(index)))
    return [int(stem) for stem in stems if stem.isdecimal()]
