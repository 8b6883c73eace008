"""Change a corpus by upserts and deletions: only the changes are written; unchanged files are shared.

The result is the next corpus of the name; the one before stays for index versions that name it. `mvr-ray index` then
encodes the contents that are new. Nothing of the store changes before all changes are read (`change_records`) and every
new part is written, so a file with a bad line changes nothing, and the same file applied again changes nothing more.
"""

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from mvr_ray.config import PrepareConfig
from mvr_ray.errors import (
    DataError,
    MissingInputError,
    PublishConflictError,
)
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.change_records import ChangeRecord, in_chunks, read_changes
from mvr_ray.store.changes import MAX_CHANGED_SHARE, Changes, changed_ids, num_kept
from mvr_ray.store.corpus import (
    ChangesInfo,
    Corpus,
    CorpusInfo,
    PartInfo,
    SetInfo,
    SourceInfo,
    corpus_digest,
    ids_by_shard,
    question_set,
    question_sets,
)
from mvr_ray.store.files import REQUESTS_AT_ONCE, Store, copy_name, local_copy, name_address
from mvr_ray.store.gc import KEPT_PUBLICATIONS, collect_corpus
from mvr_ray.store.local_files import sha256_of
from mvr_ray.store.manifest import is_rolled_back
from mvr_ray.store.parts import CorpusPart, passages_of, write_passages
from mvr_ray.store.questions import (
    archive,
    carry_questions,
    changed_texts,
    copy_questions,
    only_with,
    questions_about,
    read_questions,
    set_origin,
    write_questions,
)
from mvr_ray.types import Passage, Progress, Question, no_progress

log = logging.getLogger(__name__)
CHANGES = "changes"
"""The format of a source that `update` applied."""
MAX_CHANGES_SOURCES = 20
"""The last ones stay in the description of a corpus, so that it does not grow with every update."""


@dataclasses.dataclass(frozen=True)
class UpdateReport:
    """What an update did to a corpus. passages = passages_before + added - deleted."""

    corpus: str
    parent: str
    digest: str
    passages_before: int
    passages: int
    added: int
    replaced: int
    unchanged: int
    """Upserts of what the corpus had already, also of fields."""
    deleted: int
    absent: int
    """Deletions of passages that the corpus does not have, and new values of fields of such."""
    parts_written: int
    questions_dropped: int
    """Questions of the corpus's sets that have lost every gold passage."""


def update(
    cfg: PrepareConfig, store: Store, changes: str, progress: Progress = no_progress, *, index: str = ""
) -> UpdateReport:
    """Make the next corpus of `prepare.corpus` from the last one and a file of changes.

    If a roll back in `index` replaced the last one, it is made from the corpus of that index's live version.

    A row of a corpus of chunks (`prepare.chunk_words`) is a whole passage. Raises DataError with file and line for a
    bad or doubled row, MissingInputError for a missing file or corpus, ConfigError for a corpus of sampled
    chunks, PublishConflictError if another update, `prepare` or a roll back was faster.
    """
    file = local_copy(changes)
    if not file.is_file():
        raise MissingInputError(
            f"update: {copy_name(changes, file)} does not exist or is not a file; give changes=FILE, a file of JSON "
            f"lines"
        )
    parent = parent_corpus(store, cfg.corpus, index)
    try:
        with name_address(changes, file):
            passage_changes = read_changes(file, parent, cfg)
    except DataError as error:
        raise DataError(
            f"update: {error}; nothing was changed. Correct the file and run the same command again"
        ) from None
    source = SourceInfo(file.name, CHANGES, file.stat().st_size, sha256_of(file))
    prepared_sources = [one for one in parent.info.sources if one.format != CHANGES]
    changes_files = [*(one for one in parent.info.sources if one.format == CHANGES), source]
    sources = (*prepared_sources, *changes_files[-MAX_CHANGES_SOURCES:])
    description = dataclasses.replace(parent.info, sources=sources)
    return apply_changes(parent, in_chunks(parent, passage_changes, cfg.chunk_words), description, progress, index)


def update_by_records(
    cfg: PrepareConfig,
    store: Store,
    records: Iterable[ChangeRecord] | Path,
    progress: Progress = no_progress,
    *,
    index: str = "",
    check: Callable[[Corpus, Changes[Passage]], None] | None = None,
) -> UpdateReport:
    """Make the next corpus as `update` does, by records, or by a file that the corpus does not name as a source. Raises
    DataError with the place of a bad or doubled record, and what `check` raises of the corpus that is changed and the
    changes."""
    parent = parent_corpus(store, cfg.corpus, index)
    changes = in_chunks(parent, read_changes(records, parent, cfg), cfg.chunk_words)
    if check:
        check(parent, changes)
    return apply_changes(parent, changes, parent.info, progress, index)


def parent_corpus(store: Store, name: str, index: str) -> Corpus:
    """Open the corpus that the next change of a name applies to: the last one, or if a roll back replaced that, the one
    of the index's live version, with the change files that the last one records."""
    last = Corpus.open(store, name)
    live = manifests.read(store, index) if index and manifests.latest_version(store, index) else None
    if live is None or not is_rolled_back(last, live):
        return last
    info = Corpus.open(store, name, live.corpus_digest).info
    return Corpus(store, dataclasses.replace(info, change_files=last.info.change_files), last.number)


def apply_changes(
    parent: Corpus,
    changes: Changes[Passage],
    description: CorpusInfo,
    progress: Progress = no_progress,
    index: str = "",
) -> UpdateReport:
    """Make the next corpus of a name from `parent` (`parent_corpus`) and changes to it.

    `description` is the parent's, with other fields that change in the same step. Raises PublishConflictError if
    another update or `prepare` was faster, or a roll back in `index` replaced the parent meanwhile.
    """
    before = parent.get(changes.upserts)
    upserts = {name: passage for name, passage in changes.upserts.items() if before.get(name) != passage}
    deletions = parent.existing_ids(changes.deletions)
    by_shard = {
        shard: Changes({name: upserts[name] for name in names if name in upserts}, deletions.intersection(names))
        for shard, names in ids_by_shard((*upserts, *deletions), parent.num_shards).items()
    }
    sets = _change_sets(parent, changed_texts(before, upserts), deletions)
    parts = _write_parts(parent, by_shard, progress)
    digest = corpus_digest(parts)
    earlier = _earlier_info(parent, digest)  # the same passages were a corpus before: it keeps its questions
    counts = {name: len(questions) for name, questions in sets.new_questions.items()}
    info = dataclasses.replace(
        description,
        digest=digest,
        num_passages=sum(part.num_passages for part in parts),
        parts=tuple(parts),
        questions=earlier.questions if earlier else parent.info.questions | counts,
        parent=parent.digest,
    )
    corpus = Corpus(parent.store, info)
    is_changed = bool(by_shard) or description.change_files != parent.info.change_files
    if is_changed or Corpus.open(parent.store, parent.name).digest != digest:  # a roll back replaced the last corpus
        parent.store.touch(paths.corpus_version(parent.name, digest))  # an old corpus that returns is not collected now
        if digest != parent.digest:
            _store_sets(parent, corpus, sets, has_returned=earlier is not None)
        archive(parent, sets.infos)
        _require_no_roll_back(parent, index)
        corpus.publish(after=parent.number)
        _require_no_roll_back(corpus, index)
        if digest != parent.digest:
            _carry_later_sets(parent, corpus, sets)
        if corpus.number % KEPT_PUBLICATIONS == 0:  # it reads every version of every index
            collect_corpus(parent.store, parent.name)
    log.info("updated: corpus=%s parent=%s digest=%s parts=%d", parent.name, parent.digest, digest, len(by_shard))
    if sets.num_dropped:
        log.warning(
            "questions removed from the sets of corpus %r: %d; the last gold passage of each was deleted, or is a "
            "chunk that its shorter text no longer has; the corpus before, %s, keeps them",
            *(parent.name, sets.num_dropped, parent.digest),
        )
    return UpdateReport(
        corpus=parent.name,
        parent=parent.digest,
        digest=digest,
        passages_before=parent.num_passages,
        passages=corpus.num_passages,
        added=sum(name not in before for name in upserts),
        replaced=sum(name in before for name in upserts),
        unchanged=len(changes.upserts) - len(upserts),
        deleted=len(deletions),
        absent=len(changes.deletions) - len(deletions),
        parts_written=len(by_shard),
        questions_dropped=sets.num_dropped,
    )


class _ChangedSets(NamedTuple):
    """The question sets of a corpus by name, and the questions by now of those that a change of it changes."""

    infos: dict[str, SetInfo | None]
    new_questions: dict[str, list[Question]]
    num_dropped: int


def _change_sets(parent: Corpus, rewritten_ids: set[str], deletions: set[str]) -> _ChangedSets:
    """Change the question sets of a corpus as its passages change. A set is parsed whole only if it differs after."""

    def change(questions: Iterable[Question]) -> list[Question]:
        return only_with(lambda own: own not in deletions, questions, rewritten_ids)

    sets = _ChangedSets({name: question_set(parent, name) for name in question_sets(parent)}, {}, 0)
    for name, info in sets.infos.items():
        questions = questions_about(parent, name, rewritten_ids | deletions, info)
        questions_now = change(questions)
        sets = sets._replace(num_dropped=sets.num_dropped + len(questions) - len(questions_now))
        if questions_now != questions:
            sets.new_questions[name] = change(read_questions(parent, name, info))
    return sets


def _store_sets(parent: Corpus, corpus: Corpus, sets: _ChangedSets, has_returned: bool) -> None:
    """Store the question sets of a changed corpus; one whose passages have returned keeps those that it had, but for
    sets that a user has replaced since."""
    for name, info in sets.infos.items():
        origin = set_origin(parent, name, info)
        is_there = has_returned and corpus.store.exists(paths.question_set(corpus.name, corpus.digest, name))
        if is_there and set_origin(corpus, name) == origin:
            continue
        if name in sets.new_questions:
            write_questions(corpus, name, sets.new_questions[name], origin)
        else:
            copy_questions(parent, corpus, name, info)


def _carry_later_sets(parent: Corpus, corpus: Corpus, sets: _ChangedSets) -> None:
    """Carry over the sets that were added to the parent while the corpus was made. A set that is added later finds the
    corpus published, and `add_questions` carries it over; one that was stored there since is newer, and stays."""
    names = question_sets(corpus)
    for name in question_sets(parent):
        before = sets.infos.get(name)
        is_of_earlier_program = name in sets.infos and before is None  # `archive` has described it since
        if is_of_earlier_program or question_set(parent, name) == before:
            continue
        if name not in names or (before and set_origin(corpus, name) == set_origin(parent, name, before)):
            carry_questions(parent, corpus, name)


def _require_no_roll_back(corpus: Corpus, index: str) -> None:
    """Raise PublishConflictError if the last corpus of a name is no longer the parent of the next change."""
    now = parent_corpus(corpus.store, corpus.name, index)
    if now.number == corpus.number and now.digest != corpus.digest:
        raise PublishConflictError(
            f"corpus {corpus.name!r} was not changed: a roll back in index {index!r} replaced the corpus of digest "
            f"{corpus.digest} meanwhile; nothing was lost: run the same command again"
        )


def _earlier_info(parent: Corpus, digest: str) -> CorpusInfo | None:
    """Return the description of the parent, or of an earlier corpus of its name, if the digest is that one's."""
    if digest == parent.digest:
        return parent.info
    has_version = parent.store.exists(paths.corpus_version(parent.name, digest))
    return Corpus.open(parent.store, parent.name, digest).info if has_version else None


def _write_parts(parent: Corpus, by_shard: Mapping[int, Changes[Passage]], progress: Progress) -> list[PartInfo]:
    """Write the parts that change; returns all parts."""
    parts, shards, store = list(parent.info.parts), sorted(by_shard), parent.store
    with store.scratch() as folder:

        def put(shard: int) -> None:
            if (file := folder / f"{shard}.arrow").exists():
                store.put_file(file, f"{paths.corpus_dir(parent.name)}/{parts[shard].files[-1].file}")

        for start in range(0, len(shards), REQUESTS_AT_ONCE):  # written one by one: a whole part may need much memory
            batch = shards[start : start + REQUESTS_AT_ONCE]
            for shard in batch:
                parts[shard] = _write_part(parent, shard, by_shard[shard], folder / f"{shard}.arrow")
            store.for_each(put, batch)
            for count in range(start, start + len(batch)):
                progress("parts written", count + 1, len(shards))
    return parts


def _write_part(parent: Corpus, shard: int, own: Changes[Passage], file: Path) -> PartInfo:
    """Write to `file` the changes of one part, which go beside its files, or the part whole if they are too many; no
    file if its earlier ones have the content. Either is named by its content. Files of changes that are about as small
    are written again with these (`num_kept`)."""
    part, info = parent.part(shard), parent.info.parts[shard]
    files = part.read_changes()
    num_files = num_kept([len(file.ids()) for file in files], len(own.ids()))
    below = CorpusPart(part.path, *part.change_paths[:num_files], fields=parent.fields)
    rows, deletions = Changes.join(files[num_files:])
    again = Changes({passage.id: passage for row in rows.values() for passage in passages_of(row)}, deletions)
    upserts, deletions = Changes.join([again, own])
    passages = {name: upserts[name] for name in sorted(upserts) if below.get(name) != upserts[name]}
    deleted_ids = sorted(name for name in deletions if below.row(name) >= 0)
    ids = changed_ids(part.ids(), *own)
    if not passages and not deleted_ids:
        return dataclasses.replace(info, num_passages=len(below), changes=info.changes[:num_files])
    num_changes = len(Changes.join(files[:num_files]).ids().union(passages, deleted_ids))
    if is_delta := num_changes <= MAX_CHANGED_SHARE * len(CorpusPart(part.path)):
        write_passages(file, passages.values(), parent.fields, deleted_ids)
        new_part = CorpusPart(part.path, *part.change_paths[:num_files], file)
    else:
        passages = {passage.id: passage for passage in part.passages()} | own.upserts
        write_passages(file, [passages[name] for name in ids], parent.fields)
        new_part = CorpusPart(file)
    assert new_part.ids() == ids
    digest, num_bytes = sha256_of(file), file.stat().st_size
    if is_delta:
        changes = ChangesInfo(paths.corpus_changes(shard, digest), num_bytes, digest)
        return dataclasses.replace(info, num_passages=len(ids), changes=(*info.changes[:num_files], changes))
    return PartInfo(paths.corpus_part(shard, digest), len(ids), num_bytes, digest)
