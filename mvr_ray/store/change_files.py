"""Read a source of change files: which of them wait, which make the next batch, and what became of each.

A source is a folder, or a prefix of an object store. Its files are applied in the order of their names, each whole or
not at all, and nothing there is ever changed. What was done with a file is written in the description of the corpus
that holds its changes (`CorpusInfo.change_files`), and becomes true with it.

    waiting    its name comes after the last one that was dealt with
    late       its name comes before that one, and nothing was done with it: it may be older than what was applied, so
               it is left out
    left out   a row of it cannot be read, or an id stands in it twice: nothing of it is applied. Every row of the other
               files has the whole of a passage, so their result is what it would be had this file not come
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from mvr_ray.config import FollowConfig, PrepareConfig
from mvr_ray.errors import ConfigError, DataError, MissingInputError
from mvr_ray.store.corpus import ChangeFile, Corpus
from mvr_ray.store.files import Store, StoredFile, sha256_of
from mvr_ray.store.update import Changes, UpdateReport, apply_changes, in_chunks, read_changes
from mvr_ray.types import Progress, no_progress

SUFFIXES = tuple(f".{kind}{packed}" for kind in ("jsonl", "xml") for packed in ("", ".gz", ".bz2"))
"""Of JSON lines and of MediaWiki dumps."""


class Backlog(NamedTuple):
    """Files of a source that nothing was done with, in order of their names."""

    waiting: list[StoredFile]
    late: list[StoredFile]

    @classmethod
    def of(cls, files: Sequence[StoredFile], change_files: Sequence[ChangeFile]) -> "Backlog":
        """What of a listing is left to do for a corpus that has dealt with `change_files`."""
        last = change_files[-1].name if change_files else ""
        names = {file.name for file in change_files}
        rest = [file for file in files if file.name not in names]
        return cls([file for file in rest if file.name > last], [file for file in rest if file.name < last])


class BatchReport(NamedTuple):
    """What a batch did to the corpus, and the files that it dealt with."""

    update: UpdateReport
    files: list[ChangeFile]


class Batches:
    """Decides from one look at the source to the next which files make a batch.

    They do when they have `batch_bytes` together, or when one of them was first seen `max_age_s` ago. A file counts
    from the second look that sees it with one size and time of change on, unless its source shows whole files alone: a
    writer may be at work on it. What comes after such a file in order of name waits with it.
    """

    def __init__(self, cfg: FollowConfig, shows_whole_files: bool) -> None:
        self.batch_bytes = cfg.batch_bytes
        self.max_age_s = cfg.max_age_s
        self.shows_whole_files = shows_whole_files
        self._since_s: dict[StoredFile, float] = {}

    def next(self, waiting: Sequence[StoredFile], now_s: float) -> list[StoredFile]:
        """The files to apply now, none while none are due. `now_s` is from a clock that never goes back."""
        before = self._since_s
        self._since_s = {file: before.get(file, now_s) for file in waiting}
        ready = list(itertools.takewhile(lambda file: self.shows_whole_files or file in before, waiting))
        totals = list(itertools.accumulate((file.num_bytes for file in ready), initial=0))
        is_due = totals[-1] >= self.batch_bytes
        is_due = is_due or any(now_s - self._since_s[file] >= self.max_age_s for file in ready)
        return [file for file, total in zip(ready, totals) if is_due and total < self.batch_bytes]


def open_source(cfg: FollowConfig) -> Store:
    """The source that the run file names. Raises ConfigError where there is none."""
    if cfg.source is None:
        raise ConfigError("follow.source is not set; name the folder, or s3:// or gs:// prefix, of the change files")
    source = Store(cfg.source)
    if source.is_local and not Path(source.address).is_dir():
        raise ConfigError(f"follow.source: {cfg.source} is not a folder; make it, or name another")
    return source


def list_change_files(source: Store) -> list[StoredFile]:
    return [file for file in source.stored_files() if file.name.endswith(SUFFIXES)]


def apply_batch(
    parent: Corpus,
    cfg: PrepareConfig,
    source: Store,
    batch: Sequence[StoredFile],
    listing: Sequence[StoredFile],
    progress: Progress = no_progress,
) -> BatchReport:
    """Make the next corpus from the last one, `parent`, and a batch of its source, whose files are `listing`.

    The late files of the listing are noted, too. Raises PublishConflictError where the corpus was changed meanwhile.
    """
    changes: list[Changes] = []
    before = parent.info.change_files
    files = [_late(file, before[-1].name) for file in Backlog.of(listing, before).late]
    for file in batch:
        with _local_copy(source, file.name) as path:
            if path is None:
                continue
            record = ChangeFile(file.name, path.stat().st_size, file.changed_s, sha256_of(path))
            try:
                changes.append(read_changes(path, parent, cfg))
            except DataError as error:
                record = dataclasses.replace(record, problem=str(error).replace(str(path), file.name))
            files.append(record)
    names = {file.name for file in listing}
    finished = sorted([*before, *files], key=lambda file: file.name)
    kept = tuple(file for file in finished if file.name in names or file is finished[-1])
    description = dataclasses.replace(parent.info, change_files=kept)
    asked = in_chunks(parent, Changes.join(changes), cfg.chunk_words)
    return BatchReport(apply_changes(parent, asked, description, progress), files)


def _late(file: StoredFile, last: str) -> ChangeFile:
    problem = f"came after {last}, whose changes may be newer, was applied; give it a name after that one"
    return ChangeFile(*file, sha256="", problem=problem)


@contextmanager
def _local_copy(source: Store, name: str) -> Iterator[Path | None]:
    """A local file with the content of a file of the source, None where it is gone."""
    try:
        path = source.local_path(name)
    except MissingInputError:
        path = None
    if path is not None and not path.is_file():
        path = None
    try:
        yield path
    finally:
        if path is not None and not source.is_local:
            path.unlink(missing_ok=True)
