"""Read changes to the passages of a corpus: a file of rows, a MediaWiki dump, or records.

    {"id": "p1", "title": "Normandy", "text": "...", "year": 1958}    a new passage, or new content for the one there
    {"id": "p2", "delete": true}                                      a passage to delete
    {"id": "p3", "set": {"year": 1959, "tags": null}}                 new values of some fields, null for none
    {"delete": true, "filter": {"year": {"lt": 1958}}}                all passages that pass, but those of other rows

The content of a new passage is the whole of it: a field of the corpus that the row lacks is null from then on. `set`
leaves the other fields, the title and the text as they are when the change is published. Where all sources of
passages have the same `fields` (`prepare.sources`), a row may have its parts under those names; where all have the same
`id_prefix`, it goes before the id of a row that lacks it.
"""

import difflib
import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from mvr_ray.config import PrepareConfig, SourceConfig
from mvr_ray.errors import (
    ConfigError,
    DataError,
    FilterError,
    count_noun,
)
from mvr_ray.store.changes import Changes
from mvr_ray.store.chunks import chunk, source_id
from mvr_ray.store.corpus import (
    Corpus,
    ids_by_shard,
)
from mvr_ray.store.fields import FieldReader, read_fields
from mvr_ray.store.files import address_name
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
from mvr_ray.store.prepare import BadRows
from mvr_ray.types import Passage

log = logging.getLogger(__name__)
ChangeRecord = Record | DeletionRecord | FieldsRecord | FilteredDeletion
Content = Passage | FieldsRecord
"""What a change sets: a whole passage, or values of some of its fields."""


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
    """Read records of changes. A value that is no field of the corpus is left out, with a warning for those of
    `_unknown_fields`."""
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
            unknown_fields.update(_unknown_fields(record, corpus, cfg))
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
    if unknown_fields:
        counts = ", ".join(f"{name!r} of {count_noun(count, 'passage')}" for name, count in unknown_fields.items())
        log.warning(
            f"update: no field of corpus {corpus.name!r} ({', '.join(corpus.fields) or 'it has none'}), and left out: "
            f"{counts}; correct the names, or prepare the corpus again from sources that have them to add them"
        )
    return changes


def _unknown_fields(record: PassageRecord, corpus: Corpus, cfg: PrepareConfig) -> Iterator[str]:
    """Yield the names of values that are no field of the corpus: of all, where `prepare.fields` does not name those to
    keep; else of those that it names, and of those that look like a field that the row lacks."""
    absent_fields = [name for name in corpus.fields if name not in record.extras]
    for name, value in record.extras.items():
        if name not in corpus.fields and value is not None:
            is_kept = cfg.fields == "infer" or name in cfg.fields
            if is_kept or difflib.get_close_matches(name, absent_fields, n=1):
                yield name


def _parse_filter(record: FilteredDeletion, corpus: Corpus) -> Filter:
    """Parse the filter of a deletion. Raises DataError with the place of one that does not fit, in a file."""
    try:
        return parse_filter(record.filter, corpus.fields)
    except FilterError as error:
        if not record.where:
            raise
        raise DataError(f"{record.where}: {error}") from None


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
    chunk_ids = {name: {*_chunk_ids(corpus, name, count)} for name, count in counts.items()}
    absent_ids |= {name for name in changes.deletions if not chunk_ids[name]}
    return Changes(upserts, absent_ids.union(*chunk_ids.values()))


def _chunk_ids(corpus: Corpus, name: str, start: int) -> Iterator[str]:
    """Yield the ids of a passage's chunks that the corpus holds, from number `start` on."""
    for number in itertools.count(start):
        if not corpus.get([one := f"{name}#{number}"]):
            return
        yield one
