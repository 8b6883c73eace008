"""Change a corpus by a file of upserts and deletions: only the changes are written; unchanged files are shared.

    {"id": "p1", "title": "Normandy", "text": "...", "year": 1958}    a new passage, or new content for the one there
    {"id": "p2", "delete": true}                                      a passage to delete
    {"id": "p3", "set": {"year": 1959, "tags": null}}                 new values of some fields, null for none
    {"delete": true, "filter": {"year": {"lt": 1958}}}                all passages that pass, but those of other rows

The content of a new passage is the whole of it: a field of the corpus that the row lacks is null from then on. `set`
leaves the other fields, the title and the text as they are when the change is published. Where all sources of
passages have the same `fields` (`prepare.sources`), a row may have its parts under those names; where all have the same
`id_prefix`, it goes before the id of a row that lacks it.

The result is the next corpus of the name; the one before stays for index versions that name it. `mvr-ray index` then
encodes the contents that are new. Nothing of the store changes before the whole file is read and every new part is
written, so a file with a bad line changes nothing, and the same file applied again changes nothing more.
"""

import dataclasses
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from mvr_ray.config import PrepareConfig, SourceConfig
from mvr_ray.errors import (
    ConfigError,
    DataError,
    FilterError,
    MissingInputError,
    PublishConflictError,
    count_noun,
)
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.changes import MAX_CHANGED_SHARE, Changes, changed_ids, num_kept
from mvr_ray.store.chunks import chunk, source_id
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
from mvr_ray.store.fields import FieldReader, read_fields
from mvr_ray.store.files import (
    REQUESTS_AT_ONCE,
    Store,
    address_name,
    copy_name,
    local_copy,
    name_address,
    sha256_of,
)
from mvr_ray.store.filters import Filter, parse_filter
from mvr_ray.store.formats.mediawiki import REVISION_FIELD, page_record, read_pages
from mvr_ray.store.formats.records import (
    BadRow,
    DeletionRecord,
    FieldsRecord,
    FilteredDeletion,
    PassageRecord,
    Record,
    deletion_record,
    with_fields,
    with_prefix,
)
from mvr_ray.store.formats.rows import fields_of, id_of, lookup, passage_of, rename, sets_fields
from mvr_ray.store.formats.sources import DUMP_NAME
from mvr_ray.store.formats.text_files import Row, json_lines
from mvr_ray.store.gc import KEPT_PUBLICATIONS, collect_corpus
from mvr_ray.store.manifest import is_rolled_back
from mvr_ray.store.parts import CorpusPart, passages_of, write_passages
from mvr_ray.store.prepare import BadRows
from mvr_ray.store.questions import (
    archive,
    carry_questions,
    changed_texts,
    copy_questions,
    only_with,
    questions_about,
    read_questions,
    write_questions,
)
from mvr_ray.types import Passage, Progress, Question, no_progress

log = logging.getLogger(__name__)
ChangeRecord = Record | DeletionRecord | FieldsRecord | FilteredDeletion
Content = Passage | FieldsRecord
"""What a change sets: a whole passage, or values of some of its fields."""
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


def require_settings(corpus: Corpus, cfg: PrepareConfig) -> None:
    """Raise ConfigError for other `prepare.chunk_words` than those of a corpus, and for one that holds some chunks of a
    passage and not others: no change names them."""
    num_words = corpus.info.counts.get("chunk_words", cfg.chunk_words)
    max_passages = corpus.info.counts.get("max_passages", cfg.max_passages)
    if num_words != cfg.chunk_words:
        raise ConfigError(
            f"update: prepare.chunk_words is {cfg.chunk_words}, but corpus {corpus.name!r} was prepared with "
            f"{num_words}; give that number, or prepare the corpus again"
        )
    if num_words and max_passages:
        raise ConfigError(
            f"update: corpus {corpus.name!r} was prepared with prepare.chunk_words {num_words} and "
            f"prepare.max_passages {max_passages}, so it holds chunks that were drawn; run `mvr-ray prepare CONFIG` on "
            f"the new sources instead, only new contents are encoded"
        )


def join_changes(corpus: Corpus, files: Iterable[Changes[Content]]) -> Changes[Content]:
    """Merge several changes in order: the last one to name a passage decides, but new values of fields are laid over
    what the ones before make of it."""
    result: Changes[Content] = Changes({}, set())
    for own in files:
        for name, content in own.upserts.items():
            if isinstance(content, FieldsRecord):
                if name in result.deletions:
                    continue
                match result.upserts.get(name):
                    case Passage() as before:
                        content = content.over(before, corpus.fields)
                    case FieldsRecord() as before:
                        content = content._replace(values={**before.values, **content.values})
            result.deletions.discard(name)
            result.upserts[name] = content
        for name in own.deletions:
            result.upserts.pop(name, None)
        result.deletions.update(own.deletions)
    return result


def in_chunks(corpus: Corpus, changes: Changes[Content], chunk_words: int) -> Changes[Passage]:
    """Convert changes to those of what the corpus holds: new values of fields to passages that have them, and whole
    passages to chunks of so many words; 0: to themselves. New values of a passage that it lacks change nothing, like a
    deletion of it."""
    pieces: dict[str, list[Passage]] = {}
    for name, content in changes.upserts.items():
        if isinstance(content, FieldsRecord):
            passages = corpus.get(_chunk_ids(corpus, name, 0) if chunk_words else [name])
            pieces[name] = [content.over(passage, corpus.fields) for passage in passages.values()]
        else:
            pieces[name] = [one.passage for one in chunk(content, chunk_words)]
    upserts = {piece.id: piece for own in pieces.values() for piece in own}
    absent_ids = {name for name, own in pieces.items() if not own}
    if absent_ids:
        message = f"update: no passage of corpus {corpus.name!r}, and left out: fields of {min(absent_ids)!r}"
        log.warning(f"{message} and {len(absent_ids) - 1} others" if len(absent_ids) > 1 else message)
    if not chunk_words:
        return Changes(upserts, changes.deletions | absent_ids)
    counts = {name: len(own) for name, own in pieces.items()} | dict.fromkeys(changes.deletions, 0)
    chunk_ids = {name for own, count in counts.items() for name in _chunk_ids(corpus, own, count)}
    return Changes(upserts, chunk_ids | absent_ids)


def _chunk_ids(corpus: Corpus, name: str, start: int) -> Iterator[str]:
    """Yield the ids of a passage's chunks that the corpus holds, from number `start` on."""
    for number in itertools.count(start):
        if not corpus.get([one := f"{name}#{number}"]):
            return
        yield one


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
    for name in sets.infos:
        questions = questions_about(parent, name, rewritten_ids | deletions)
        questions_now = change(questions)
        sets = sets._replace(num_dropped=sets.num_dropped + len(questions) - len(questions_now))
        if questions_now != questions:
            sets.new_questions[name] = change(read_questions(parent, name))
    return sets


def _store_sets(parent: Corpus, corpus: Corpus, sets: _ChangedSets, has_returned: bool) -> None:
    """Store the question sets of a changed corpus; one whose passages have returned keeps those that it had."""
    for name in sets.infos:
        if has_returned and corpus.store.exists(paths.question_set(corpus.name, corpus.digest, name)):
            continue
        if name in sets.new_questions:
            write_questions(corpus, name, sets.new_questions[name])
        else:
            copy_questions(parent, corpus, name)


def _carry_later_sets(parent: Corpus, corpus: Corpus, sets: _ChangedSets) -> None:
    """Carry over the sets that were added to the parent while the corpus was made. A set that is added later finds the
    corpus published, and `add_questions` carries it over."""
    for name in question_sets(parent):
        before = sets.infos.get(name)
        is_of_earlier_program = name in sets.infos and before is None  # `archive` has described it since
        if not is_of_earlier_program and question_set(parent, name) != before:
            carry_questions(parent, corpus, name)


def _require_no_roll_back(corpus: Corpus, index: str) -> None:
    """Raise PublishConflictError if the last corpus of a name is no longer the parent of the next change."""
    now = parent_corpus(corpus.store, corpus.name, index)
    if now.number == corpus.number and now.digest != corpus.digest:
        raise PublishConflictError(
            f"corpus {corpus.name!r} was not changed: a roll back in index {index!r} replaced the corpus of digest "
            f"{corpus.digest} meanwhile; nothing was lost: run the same command again"
        )


def read_changes(source: Path | Iterable[ChangeRecord], corpus: Corpus, cfg: PrepareConfig) -> Changes[Content]:
    """Read changes to passages: a file of JSON lines, a MediaWiki dump, or records.

    Raises DataError that names the place of a row that is bad, or names an id again, or that names a chunk in place of
    a passage; ConfigError as `require_settings`.
    """
    require_settings(corpus, cfg)
    if isinstance(source, Path) and DUMP_NAME.search(source.name):
        changes = read_dump(source, corpus, cfg)
    else:
        changes = _read_records(read_records(source, corpus, cfg) if isinstance(source, Path) else source, corpus, cfg)
    if cfg.chunk_words and (known_ids := corpus.get(changes.ids())):
        if "chunk_words" not in corpus.info.counts:
            raise ConfigError(
                f"update: prepare.chunk_words is {cfg.chunk_words}, but corpus {corpus.name!r} holds passage "
                f"{min(known_ids)!r} whole; give the chunk_words that it was prepared with"
            )
        raise DataError(f"{min(known_ids)!r} is a chunk in corpus {corpus.name!r}; name the whole passage instead")
    return changes


def read_records(file: Path, corpus: Corpus, cfg: PrepareConfig) -> Iterator[ChangeRecord]:
    """Read the rows of a file of JSON lines, bad ones among them."""
    names, prefix = _names_of(cfg), _prefix_of(cfg)
    records = [_change_record(row, names) for row in json_lines(file)]
    bare_ids = [name for record in records if prefix and (name := _bare_id(record, prefix))]
    corpus.open_parts(ids_by_shard((own for name in bare_ids for own in (name, f"{name}#0")), corpus.num_shards))
    return (_with_prefix(record, prefix, corpus) for record in records)


def read_dump(file: Path, corpus: Corpus, cfg: PrepareConfig) -> Changes[Content]:
    """Read what a later dump changes of a corpus that `prepare` made from one of the same wiki.

    A page whose revision id the corpus has is not parsed; one that is a redirect or has no text by now is deleted.
    Other passages stay: the dump may be a part. Raises DataError for more pages that cannot be parsed than
    `prepare.max_bad_rows`, and for a corpus without the field `revision_id`.
    """
    if REVISION_FIELD not in corpus.fields:
        raise DataError(
            f"{file} is a dump, and corpus {corpus.name!r} has no field {REVISION_FIELD} to compare pages by; run "
            f"`mvr-ray prepare CONFIG` with prepare.fields: {{{REVISION_FIELD}: int}}"
        )
    prefix = next((source.id_prefix for source in cfg.sources if _is_dump(source, corpus)), "")
    changes, bad, fields = Changes[Content]({}, set()), BadRows(cfg.max_bad_rows), FieldReader(corpus.fields)
    for page in read_pages(file):
        name = prefix + page.id
        first = f"{name}#0" if cfg.chunk_words else name
        before = corpus.get([first]).get(first)
        if before and page.revision == str(dict(before.fields).get(REVISION_FIELD)):
            continue
        record = with_prefix(page_record(page, str(file)), prefix)
        if isinstance(record, PassageRecord):
            record = with_fields(record, fields.read)
        if isinstance(record, PassageRecord):
            changes.upserts[name] = record.passage
        elif isinstance(record, BadRow):
            bad.add(record)
        elif before:
            changes.deletions.add(name)
    changes.deletions.difference_update(changes.upserts)
    return changes


def _is_dump(source: SourceConfig, corpus: Corpus) -> bool:
    """Return whether a source is a dump by its settings, or a folder of dumps that the corpus was made from."""
    name = address_name(source.path)
    if source.format == "mediawiki" or DUMP_NAME.search(name):
        return True
    folder = f"{name.rstrip('/')}/"
    return any(one.format == "mediawiki" and f"{one.path}/".startswith(folder) for one in corpus.info.sources)


def _names_of(cfg: PrepareConfig) -> dict[str, str]:
    """Return the names that all sources of passages give to id, title and text; none where the sources differ."""
    parts = {"id", "title", "text"}
    names = [
        source.fields.model_dump(include=parts, exclude_defaults=True, exclude_none=True)
        for source in cfg.sources
        if source.passages
    ]
    return names[0] if names and names.count(names[0]) == len(names) else {}


def _prefix_of(cfg: PrepareConfig) -> str:
    """Return the `id_prefix` of all sources of passages; none where the sources differ."""
    prefixes = {source.id_prefix for source in cfg.sources if source.passages}
    return prefixes.pop() if len(prefixes) == 1 else ""


def _with_prefix(record: ChangeRecord, prefix: str, corpus: Corpus) -> ChangeRecord:
    """Put the prefix of the sources before the id of a row that lacks it, unless the corpus has a passage of the id."""
    if not isinstance(record, DeletionRecord | FieldsRecord | PassageRecord):
        return record
    if not (name := _bare_id(record, prefix)) or corpus.get([name, f"{name}#0"]):
        return record
    return with_prefix(record, prefix) if isinstance(record, PassageRecord) else record._replace(id=prefix + name)


def _bare_id(record: ChangeRecord, prefix: str) -> str:
    """Return the id of a row if it lacks this prefix, else an empty text."""
    if not isinstance(record, DeletionRecord | FieldsRecord | PassageRecord):
        return ""
    name = record.passage.id if isinstance(record, PassageRecord) else record.id
    return "" if name.startswith(prefix) else name


def _change_record(row: Row | BadRow, names: Mapping[str, str]) -> ChangeRecord:
    """Make the record of a row of JSON lines, with those parts renamed that it has under `names`."""
    if isinstance(row, BadRow):
        return row
    values = rename(row.values, {part: name for part, name in names.items() if lookup(row.values, name) is not None})
    if not isinstance(is_deletion := values.get("delete") or False, bool):
        return BadRow(row.where, f"delete is {is_deletion!r:.60}, not true or false")
    if sets_fields(values):
        record = fields_of(values, row.where)
    elif is_deletion and isinstance(values.get("filter"), Mapping):
        record = FilteredDeletion(values["filter"], row.where)
        if id_of(values) is not None:
            record = BadRow(row.where, "an id stands beside 'filter'; leave one of them out")
    elif is_deletion:
        record = deletion_record(id_of(values), row.where)
    else:
        record = passage_of(values, row.where)
    if isinstance(record, BadRow):
        form = 'A row is a passage with id, title and text, or an id with "delete": true or "set": {"field": value}'
        form += ', or "delete": true with "filter": {...}'
        return record._replace(reason=f"{record.reason}. {form}")
    return record


def _typed_values(record: FieldsRecord, corpus: Corpus) -> FieldsRecord | BadRow:
    """Read the values of fields by the types of a corpus; a bad row for a name that is no field, or a wrong value."""
    for name in record.values:
        if name not in corpus.fields:
            fields = ", ".join(corpus.fields) or "none"
            return BadRow(record.where, f"set: the corpus has no field {name!r:.60}; there are: {fields}")
    try:
        values = dict(read_fields(record.values, corpus.fields))
    except ValueError as error:
        return BadRow(record.where, f"set: {error}")
    return record._replace(values={name: values.get(name) for name in record.values})


def _read_records(records: Iterable[ChangeRecord], corpus: Corpus, cfg: PrepareConfig) -> Changes[Content]:
    """Read records of changes. A value that is no field of the corpus is left out, with a warning where
    `prepare.fields` names it or does not name those to keep."""
    changes, fields = Changes[Content]({}, set()), FieldReader(corpus.fields)
    place_of: dict[str, str] = {}
    filtered_ids = set[str]()
    unknown_fields = Counter[str]()
    for record in records:
        if isinstance(record, FilteredDeletion):
            ids = (passage.id for passage in corpus.scan(_parse_filter(record, corpus)))
            filtered_ids.update(map(source_id, ids) if cfg.chunk_words else ids)
            continue
        if isinstance(record, PassageRecord):
            unknown_fields.update(
                name for name, value in record.extras.items() if name not in corpus.fields and value is not None
            )
            record = with_fields(record, fields.read)
        elif isinstance(record, FieldsRecord):
            record = _typed_values(record, corpus)
        if not isinstance(record, PassageRecord | DeletionRecord | FieldsRecord):
            raise DataError(str(record))
        where, name = record.where, record.passage.id if isinstance(record, PassageRecord) else record.id
        if name in place_of:
            raise DataError(f"{where} names passage {name!r}, which {place_of[name]} names already; keep one of them")
        place_of[name] = where
        if isinstance(record, PassageRecord):
            changes.upserts[name] = record.passage
        elif isinstance(record, FieldsRecord):
            changes.upserts[name] = record
        else:
            changes.deletions.add(name)
    changes.deletions.update(filtered_ids - changes.upserts.keys())
    names = [name for name in unknown_fields if cfg.fields == "infer" or name in cfg.fields]
    if names:
        counts = ", ".join(f"{name!r} of {count_noun(unknown_fields[name], 'passage')}" for name in names)
        log.warning(
            f"update: no field of corpus {corpus.name!r}, and left out: {counts}; prepare the corpus again from "
            f"sources that have them to add them"
        )
    return changes


def _parse_filter(record: FilteredDeletion, corpus: Corpus) -> Filter:
    """Parse the filter of a deletion. Raises DataError with the place of one that does not fit, in a file."""
    try:
        return parse_filter(record.filter, corpus.fields)
    except FilterError as error:
        if not record.where:
            raise
        raise DataError(f"{record.where}: {error}") from None


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
