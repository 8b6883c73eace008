"""Read a source of change files, select the files of the next batch, and record the outcome of each.

A source is a folder, or a prefix of an object store. Its files are applied in the order of their names, each whole or
not at all, and the source itself is never changed. The description of the corpus that holds a file's changes records
the outcome (`CorpusInfo.change_files`), which takes effect with it.

    waiting    its name comes after the last processed file
    late       its name comes before that one, and it was not processed: it may be older than what was applied, so it
               is left out
    left out   a row of it cannot be read, or an id occurs in it twice: nothing of it is applied. The result is
               that of the other files alone: a row holds a whole passage, or new values of some of its fields
"""

import dataclasses
import itertools
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mvr_ray.config import FollowConfig, PrepareConfig
from mvr_ray.errors import ConfigError, DataError, MissingInputError
from mvr_ray.store.change_records import Content, in_chunks, join_changes, read_changes, read_records
from mvr_ray.store.changes import Changes
from mvr_ray.store.chunks import source_id
from mvr_ray.store.corpus import ChangeFile, Corpus
from mvr_ray.store.files import Store, StoredFile
from mvr_ray.store.formats.records import FilteredDeletion, PassageRecord
from mvr_ray.store.formats.sources import DUMP_NAME
from mvr_ray.store.local_files import sha256_of
from mvr_ray.store.storage_errors import storage_errors
from mvr_ray.store.update import UpdateReport, apply_changes
from mvr_ray.types import Progress, no_progress

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.bz2")
"""Endings of change files beside MediaWiki dumps."""


class Backlog(NamedTuple):
    """Unprocessed files of a source, in order of their names."""

    waiting: list[StoredFile]
    late: list[StoredFile]

    @classmethod
    def of(cls, files: Sequence[StoredFile], change_files: Sequence[ChangeFile]) -> "Backlog":
        """Return the files of a listing that are not among the processed `change_files` of a corpus."""
        last = change_files[-1].name if change_files else ""
        names = {file.name for file in change_files}
        rest = [file for file in files if file.name not in names]
        return cls([file for file in rest if file.name > last], [file for file in rest if file.name < last])


class BatchReport(NamedTuple):
    """What a batch did to the corpus, and the files that it processed."""

    update: UpdateReport
    files: list[ChangeFile]


class Batches:
    """Selects the files of the next batch from each listing of the source.

    Files make a batch when they have `batch_bytes` together, or when one of them was first listed `max_age_s` ago.
    Unless the source shows only whole files, a file counts from its second listing with the same size and time of
    change: a writer may still be writing it. Files after such a file in order of name wait with it.
    """

    def __init__(self, cfg: FollowConfig, shows_whole_files: bool) -> None:
        self.batch_bytes = cfg.batch_bytes
        self.max_age_s = cfg.max_age_s
        self.shows_whole_files = shows_whole_files
        self._first_listed_s: dict[StoredFile, float] = {}

    def next(self, waiting: Sequence[StoredFile], now_s: float) -> list[StoredFile]:
        """Return the files to apply now; empty while none are due. `now_s` is from a monotonic clock."""
        before = self._first_listed_s
        self._first_listed_s = {file: before.get(file, now_s) for file in waiting}
        ready = list(itertools.takewhile(lambda file: self.shows_whole_files or file in before, waiting))
        totals = list(itertools.accumulate((file.num_bytes for file in ready), initial=0))
        is_due = totals[-1] >= self.batch_bytes
        is_due = is_due or any(now_s - self._first_listed_s[file] >= self.max_age_s for file in ready)
        return [file for file, total in zip(ready, totals) if is_due and total < self.batch_bytes]


def open_source(cfg: FollowConfig) -> Store:
    """Open the source that the run file names. Raises ConfigError if there is none."""
    if cfg.source is None:
        raise ConfigError("follow.source is not set; name the folder, or s3:// or gs:// prefix, of the change files")
    source = Store(cfg.source)
    if source.is_local and not Path(source.address).is_dir():
        raise ConfigError(f"follow.source: {cfg.source} is not a folder; make it, or name another")
    return source


def list_change_files(source: Store) -> list[StoredFile]:
    return [file for file in source.stored_files() if file.name.endswith(SUFFIXES) or DUMP_NAME.search(file.name)]


def apply_batch(
    parent: Corpus,
    cfg: PrepareConfig,
    source: Store,
    batch: Sequence[StoredFile],
    listing: Sequence[StoredFile],
    progress: Progress = no_progress,
    index: str = "",
) -> BatchReport:
    """Make the next corpus from the last one, `parent`, and a batch of its source, whose files are `listing`.

    Late files of the listing are recorded too. The batch ends before a dump, a file that deletes by a filter, and one
    that may name a chunk of a passage in a file before it: they apply to what those make of the corpus.
    Raises PublishConflictError if the corpus was changed, or replaced by a roll back in `index`, meanwhile.
    """
    changes: list[Changes[Content]] = []
    before = parent.info.change_files
    files = [_late(file, before[-1].name) for file in Backlog.of(listing, before).late]
    for file in batch:
        if (path := _local_copy(source, file.name)) is None:
            continue
        with storage_errors("read", source.where(file.name)):
            if changes and (DUMP_NAME.search(file.name) or _deletes_by_filter(path, parent, cfg)):
                break
            record = ChangeFile(file.name, path.stat().st_size, file.changed_s, sha256_of(path))
            try:
                own = read_changes(path, parent, cfg)
            except DataError as error:
                record = dataclasses.replace(record, problem=str(error).replace(str(path), file.name))
            else:
                if cfg.chunk_words and any(source_id(name) in one.upserts for one in changes for name in own.ids()):
                    break
                changes.append(own)
        files.append(record)
    names = {file.name for file in listing}
    processed_files = sorted([*before, *files], key=lambda file: file.name)
    recorded_files = tuple(file for file in processed_files if file.name in names or file is processed_files[-1])
    description = dataclasses.replace(parent.info, change_files=recorded_files)
    chunk_changes = in_chunks(parent, join_changes(parent, changes), cfg.chunk_words)
    return BatchReport(apply_changes(parent, chunk_changes, description, progress, index), files)


def row_of(passage_id: str, source: Store, corpus: Corpus, cfg: PrepareConfig, before: Sequence[ChangeFile]) -> str:
    """Return the place of the newest row that gave a passage of the corpus its text, of the change files that were
    applied since those `before`; empty without any."""
    processed_names, name = {file.name for file in before}, source_id(passage_id) if cfg.chunk_words else passage_id
    for file in reversed(corpus.info.change_files):
        is_new = file.name.endswith(SUFFIXES) and not file.problem and file.name not in processed_names
        if is_new and (path := _local_copy(source, file.name)):
            for record in read_records(path, corpus, cfg):
                if isinstance(record, PassageRecord) and record.passage.id == name:
                    return record.where.replace(str(path), file.name)
    return ""


def _deletes_by_filter(path: Path, corpus: Corpus, cfg: PrepareConfig) -> bool:
    with suppress(DataError):  # which the caller raises again
        return any(isinstance(record, FilteredDeletion) for record in read_records(path, corpus, cfg))
    return False


def _late(file: StoredFile, last: str) -> ChangeFile:
    problem = f"came after {last}, whose changes may be newer, was applied; give it a name after that one"
    return ChangeFile(*file, sha256="", problem=problem)


def _local_copy(source: Store, name: str) -> Path | None:
    """Return a local file with the content of a file of the source; None if it was deleted. A copy of an object stays:
    another process of this machine may read it, and `object_cache` deletes unused ones."""
    with suppress(MissingInputError):
        path = source.local_path(name)
        if path.is_file():
            return path
    return None
