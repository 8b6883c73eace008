"""Change a corpus by a file of upserts and deletions: only the changes are written, what they leave alone is shared.

    {"id": "p1", "title": "Normandy", "text": "...", "year": 1958}    a new passage, or new content for the one there
    {"id": "p2", "delete": true}                                      a passage that goes

The new content is the whole of it: a field of the corpus that the row lacks is null from then on.

The result is the next corpus of the name; the one before stays for index versions that name it. `mvr-ray index` then
encodes the contents that are new. Nothing of the store changes before the whole file is read and every new part is
written, so a file with a bad line changes nothing, and the same file applied again changes nothing more.
"""

import dataclasses
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from mvr_ray.config import PrepareConfig, resolve_path
from mvr_ray.errors import ConfigError, DataError, MissingInputError
from mvr_ray.store import paths
from mvr_ray.store.corpus import (
    ChangesInfo,
    Corpus,
    CorpusPart,
    PartInfo,
    SourceInfo,
    copy_questions,
    corpus_digest,
    question_sets,
    read_questions,
    shard_of,
    write_part_changes,
    write_passages,
    write_questions,
)
from mvr_ray.store.delta import MOST_SHARE
from mvr_ray.store.fields import read_fields
from mvr_ray.store.files import Store, sha256_of
from mvr_ray.store.formats import BadRow, PassageRecord, Record
from mvr_ray.store.formats.rows import passage_of
from mvr_ray.store.formats.text_files import json_lines
from mvr_ray.store.gc import collect_corpus
from mvr_ray.types import Passage, Progress, Question, no_progress

log = logging.getLogger(__name__)


class Changes(NamedTuple):
    """What a file of changes asks for: passages by id, and ids to delete."""

    upserts: dict[str, Passage]
    deletions: set[str]


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
    """Upserts of what the corpus had already."""
    deleted: int
    absent: int
    """Deletions of passages that the corpus does not have."""
    parts_written: int
    questions_dropped: int
    """Questions of the corpus's sets that have lost every gold passage."""


def update(cfg: PrepareConfig, store: Store, changes: str, progress: Progress = no_progress) -> UpdateReport:
    """Make the next corpus of `prepare.corpus` from the last one and a file of changes.

    Raises DataError with file and line for a bad or doubled row, MissingInputError for a missing file or corpus,
    ConfigError for a corpus of chunks, PublishConflictError where another update or `prepare` was faster.
    """
    if cfg.chunk_words:
        raise ConfigError(
            f"update: prepare.chunk_words is {cfg.chunk_words}, so the corpus holds chunks of passages, which no file "
            f"of changes names; run `mvr-ray prepare CONFIG` on the new sources instead, only new contents are encoded"
        )
    file = resolve_path(changes)
    parent = Corpus.open(store, cfg.corpus)
    asked = read_changes(file, parent.fields)
    before = parent.get([*asked.upserts, *asked.deletions])
    upserts = {name: passage for name, passage in asked.upserts.items() if before.get(name) != passage}
    deletions = asked.deletions & set(before)
    touched = sorted({shard_of(name, parent.num_shards) for name in [*upserts, *deletions]})
    parts = list(parent.info.parts)
    with store.scratch() as folder:
        for done, shard in enumerate(touched, 1):
            parts[shard] = _write_part(parent, shard, upserts, deletions, folder)
            progress("parts written", done, len(touched))
        corpus = _next_corpus(parent, parts, file)
        sets = {name: read_questions(parent, name) for name in question_sets(parent)}
        changed_sets = {name: _follow(questions, upserts, deletions) for name, questions in sets.items()}
        num_dropped = sum(len(questions) - len(changed_sets[name]) for name, questions in sets.items())
        if touched:
            _publish(parent, corpus, {name: own for name, own in changed_sets.items() if own != sets[name]})
    log.info("updated: corpus=%s parent=%s digest=%s parts=%d", cfg.corpus, parent.digest, corpus.digest, len(touched))
    return UpdateReport(
        corpus=cfg.corpus,
        parent=parent.digest,
        digest=corpus.digest,
        passages_before=parent.num_passages,
        passages=corpus.num_passages,
        added=sum(name not in before for name in upserts),
        replaced=sum(name in before for name in upserts),
        unchanged=len(asked.upserts) - len(upserts),
        deleted=len(deletions),
        absent=len(asked.deletions) - len(deletions),
        parts_written=len(touched),
        questions_dropped=num_dropped,
    )


def read_changes(file: Path, fields: Mapping[str, str]) -> Changes:
    """Read a file of changes whole, with the corpus's fields.

    Raises DataError that names the line of a row that is bad, or names an id again.
    """
    if not file.is_file():
        raise MissingInputError(
            f"update: {file} does not exist or is not a file; give changes=FILE, a file of JSON lines"
        )
    changes = Changes({}, set())
    line_of: dict[str, str] = {}
    for row in json_lines(file):
        if isinstance(row, BadRow):
            raise DataError(f"update: {row}; nothing was changed. Correct the file and run the same command again")
        name, where = row.values.get("id"), row.where
        if row.values.get("delete") is True:
            record = PassageRecord(Passage(str(name), "", ""), where) if name else BadRow(where, "it has no id")
        else:
            record = _with_fields(passage_of(row.values, where), fields)
        if not isinstance(record, PassageRecord):
            raise DataError(
                f"update: {record}; nothing was changed. A row is a passage with id, title and text, or an id with "
                f'"delete": true'
            )
        name = record.passage.id
        if name in line_of:
            raise DataError(
                f"update: {where} names passage {name!r}, which {line_of[name]} names already; nothing was changed. "
                f"Keep one of them"
            )
        line_of[name] = where
        if row.values.get("delete") is True:
            changes.deletions.add(name)
        else:
            changes.upserts[name] = record.passage
    return changes


def _with_fields(record: Record, fields: Mapping[str, str]) -> Record:
    if not isinstance(record, PassageRecord):
        return record
    try:
        return record._replace(passage=record.passage._replace(fields=read_fields(record.extras, fields)))
    except ValueError as error:
        return BadRow(record.where, str(error))


def _write_part(parent: Corpus, shard: int, upserts: dict[str, Passage], deletions: set[str], folder: Path) -> PartInfo:
    """Put the changes of one part beside its first file, or write the part whole where they are too many. Either file
    is named by its content."""
    part, info = parent.part(shard), parent.info.parts[shard]
    own = {name: passage for name, passage in upserts.items() if shard_of(name, parent.num_shards) == shard}
    base = CorpusPart(part.path, fields=parent.fields)
    changed = {
        name: passage
        for name, passage in (part.changes.passages() | own).items()
        if name not in deletions and base.get(name) != passage
    }
    gone = {name for name in {*part.changes.deleted_ids, *deletions} - set(own) if base.row(name) >= 0}
    ids = sorted(({*part.ids()} | set(own)) - deletions)
    if not changed and not gone:
        return dataclasses.replace(info, num_passages=len(base), changes=None)
    file = folder / "part.arrow"
    if is_delta := len(changed) + len(gone) <= MOST_SHARE * len(base):
        write_part_changes(file, [changed[name] for name in sorted(changed)], sorted(gone), parent.fields)
        written = CorpusPart(part.path, file)
    else:
        passages = {passage.id: passage for passage in part.passages()} | own
        write_passages(file, [passages[name] for name in ids], parent.fields)
        written = CorpusPart(file)
    assert written.ids() == ids
    digest, num_bytes = sha256_of(file), file.stat().st_size
    if is_delta:
        changes = ChangesInfo(paths.corpus_changes(shard, digest), num_bytes, digest)
        new = dataclasses.replace(info, num_passages=len(ids), changes=changes)
    else:
        new = PartInfo(paths.corpus_part(shard, digest), len(ids), num_bytes, digest)
    parent.store.put_file(file, f"{paths.corpus_dir(parent.name)}/{new.files[-1].file}")
    return new


def _next_corpus(parent: Corpus, parts: list[PartInfo], file: Path) -> Corpus:
    source = SourceInfo(file.name, "changes", file.stat().st_size, sha256_of(file))
    info = dataclasses.replace(
        parent.info,
        digest=corpus_digest(parts),
        num_passages=sum(part.num_passages for part in parts),
        parts=tuple(parts),
        sources=(*parent.info.sources, source),
        parent=parent.digest,
    )
    return Corpus(parent.store, info)


def _follow(questions: Iterable[Question], upserts: dict[str, Passage], deletions: set[str]) -> list[Question]:
    """Questions without the passages that went. One that loses every gold passage goes; where the text of its first
    one changed, the places of its answers are no longer known."""
    results = []
    for question in questions:
        positives = tuple(name for name in question.positive_ids if name not in deletions)
        negatives = tuple(name for name in question.hard_negative_ids if name not in deletions)
        if question.positive_ids and not positives:
            continue
        if positives[:1] != question.positive_ids[:1] or any(name in upserts for name in positives[:1]):
            question = question._replace(answer_starts=(-1,) * len(question.answer_starts))
        if negatives != question.hard_negative_ids:
            question = question._replace(teacher_scores=())
        results.append(question._replace(positive_ids=positives, hard_negative_ids=negatives))
    return results


def _publish(parent: Corpus, corpus: Corpus, changed_sets: dict[str, list[Question]]) -> None:
    """Store the question sets of the new corpus, and then the corpus, which fails where another one came between."""
    counts = parent.info.questions | {name: len(questions) for name, questions in changed_sets.items()}
    for name in question_sets(parent):
        if name in changed_sets:
            write_questions(corpus, name, changed_sets[name])
        else:
            copy_questions(parent, corpus, name)
    corpus = Corpus(corpus.store, dataclasses.replace(corpus.info, questions=counts))
    corpus.publish(after=parent.number)
    collect_corpus(parent.store, parent.name)
