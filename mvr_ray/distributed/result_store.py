"""Store the results of batches of questions while a command runs, so that the same command continues after them.

    indexes/INDEX/staging/KEY/results-FIRST.jsonl    the results from batch FIRST on, a line each, and their digest

A file is written once `SAVE_S` seconds have passed, or `SAVE_CHARS` characters have come, since the one before, so a
command that takes less time stores nothing. KEY is a digest of all that the results depend on.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

from mvr_ray import __version__
from mvr_ray.checksums import with_trailer, without_trailer
from mvr_ray.errors import MissingInputError, StorageError
from mvr_ray.store import paths
from mvr_ray.store.files import Store

log = logging.getLogger(__name__)

SAVE_S = 60.0
SAVE_CHARS = 256_000_000

Compute = Callable[[Sequence[str]], Iterator[str]]
"""Computes the result of each batch, in order; batches and results are JSON of one line, in ASCII."""


class ResultStore:
    """The stored results of a command; a context that deletes them when it ends without an error."""

    def __init__(self, store: Store, index: str) -> None:
        self._store, self._index = store, index
        self._folders: list[str] = []
        self._is_writable = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        for folder in dict.fromkeys(self._folders) if error is None else ():
            try:
                self._store.delete_dir(folder)
            except OSError as reason:  # `collect` deletes them
                log.warning("results of finished work stay: %s", reason)

    def map(self, inputs: Any, batches: Sequence[str], compute: Compute) -> Iterator[str]:
        """Yield the result of each batch, in order: the stored ones, then those of `compute` for all others.

        `inputs`: all else that the results depend on, as JSON, and dates. An unwritable store is logged once.
        """
        digest = hashlib.sha256(json.dumps([__version__, inputs], default=str).encode())
        for batch in batches:
            digest.update(hashlib.sha256(batch.encode()).digest())
        folder, count = paths.staging_dir(self._index, digest.hexdigest()[:32]), 0
        while results := self._read(folder, count):
            self._folders.append(folder)  # before the last result, after which a caller asks for no further one
            count += len(results)
            yield from results
        if count:
            log.info("continues after stored results: batches=%d of %d", count, len(batches))
        unsaved_results, num_chars, save_time = list[str](), 0, time.monotonic()
        for result in compute(batches[count:]) if count < len(batches) else ():
            if self._is_writable:
                unsaved_results.append(result)
                num_chars += len(result)
            if unsaved_results and (num_chars > SAVE_CHARS or time.monotonic() - save_time >= SAVE_S):
                self._write(folder, count, unsaved_results)
                count += len(unsaved_results)
                unsaved_results, num_chars, save_time = [], 0, time.monotonic()
            yield result

    def _read(self, folder: str, first: int) -> list[str]:
        """Read the results that are stored from batch `first` on; none for a file that is damaged or not there."""
        path = paths.staged_results(folder, first)
        try:
            return str(without_trailer(self._store.read_bytes(path), path), "ascii").split("\n")
        except MissingInputError:
            return []
        except StorageError as error:
            log.warning("stored results are computed again: %s", error)
            return []

    def _write(self, folder: str, first: int, results: Sequence[str]) -> None:
        try:
            self._store.write_bytes(paths.staged_results(folder, first), with_trailer("\n".join(results).encode()))
            self._folders.append(folder)
        except OSError as error:
            self._is_writable = False
            log.warning("this command, if it is stopped, starts over, as its results cannot be stored: %s", error)
