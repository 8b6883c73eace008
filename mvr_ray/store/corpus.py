"""Store and read passages and questions as Arrow files.

A corpus is a description and one part a shard. A part holds its passages in id order and is named by its content; after
an update it may be the earlier part's files and beside them a file of changes: passages that are new or differ, and in
its metadata the ids of those that are gone. The description names the parts and is stored by its digest, so an index
version finds the corpus that it was made from whatever was prepared since. Publications, numbered and each created
once, say which corpus is the last of its name. A passage's shard is a hash of its id. A question set belongs to the
corpus of one digest, and is described by a JSON file beside its others; the questions themselves lie in a file that is
named by its content. No file is parsed before its digest matches the description, nor a description before its own
checksum.
"""

import bisect
import hashlib
import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc

from mvr_ray.checksums import json_with_checksum, parse_json, require_format
from mvr_ray.errors import DataError, DigestError, MissingInputError, PublishConflictError, StorageError
from mvr_ray.store import paths
from mvr_ray.store.fields import ARROW_TYPES
from mvr_ray.store.files import Store, finished_file, known_sha256_of, sha256_of
from mvr_ray.types import Passage, Question

FORMAT_VERSION = 1
_PUBLICATION_FORMAT = 2
"""Of publications that say their number, `_NUMBER`; those of earlier programs do not, and have the first format."""
_NUMBER = "publication"
_SEVERAL_FORMAT = 3
"""Of descriptions of a part with several files of changes, of which earlier programs know one."""
_ROWS_WORTH_DIVIDING = 32
BATCH_ROWS = 4096
_CURE = "run `mvr-ray prepare CONFIG` again"
_OTHER_NAME = "set prepare.corpus to another name and prepare again"
DELETED_IDS = b"deleted_ids"
_TITLES_READ = 8192
_CONTENT = ("id", "title", "text")
PASSAGE_SCHEMA = pa.schema([pa.field(name, pa.string(), False) for name in ("id", "title", "text")])
QUESTION_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), False),
        pa.field("text", pa.string(), False),
        pa.field("answers", pa.list_(pa.string()), False),
        pa.field("positive_ids", pa.list_(pa.string()), False),
        pa.field("hard_negative_ids", pa.list_(pa.string()), False),
        pa.field("answer_starts", pa.list_(pa.int32()), False),
        pa.field("teacher_scores", pa.list_(pa.float32()), False),
    ]
)


def shard_of(passage_id: str, num_shards: int) -> int:
    """Return the shard of a passage, from its id alone."""
    digest = hashlib.blake2b(passage_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % num_shards


@dataclass(frozen=True)
class ChangesInfo:
    """A file of changes of a part."""

    file: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class PartInfo:
    """One part of a corpus, as its description has it. `num_passages` counts them with the changes."""

    file: str
    num_passages: int
    num_bytes: int
    sha256: str
    changes: tuple[ChangesInfo, ...] = ()
    """Each is laid over the ones before it."""

    @property
    def digest(self) -> str:
        """Digest of all files of the part."""
        return "+".join(file.sha256 for file in self.files)

    @property
    def files(self) -> "list[PartInfo | ChangesInfo]":
        return [self, *self.changes]

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Make one from its JSON, which has no `changes` where the part has none, and no list of a single file."""
        changes = fields.pop("changes", [])
        several = changes if isinstance(changes, list) else [changes]
        return cls(**fields, changes=tuple(ChangesInfo(**own) for own in several))


@dataclass(frozen=True)
class SourceInfo:
    """A file that a corpus was made from."""

    path: str
    format: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class ChangeFile:
    """A change file that `follow` has dealt with: applied, or left out for a `problem`.

    `changed_s` is the Unix time at which the source says that the file was changed last.
    """

    name: str
    num_bytes: int
    changed_s: float
    sha256: str
    problem: str = ""


@dataclass(frozen=True)
class CorpusInfo:
    """What a corpus's description holds. `digest` is that of the passages, whatever files they came from."""

    name: str
    digest: str
    num_passages: int
    parts: tuple[PartInfo, ...]
    sources: tuple[SourceInfo, ...]
    questions: dict[str, int]
    counts: dict[str, int]
    parent: str = ""
    """Digest of the corpus that an update changed; empty for one that `prepare` made."""
    fields: dict[str, str] = field(default_factory=dict)
    """Types of the passages' fields by name, in the order of their columns."""
    change_files: tuple[ChangeFile, ...] = ()
    """In the order of their names: those that were in the followed source last, and the one with the last name."""
    format_version: int = FORMAT_VERSION

    def to_json(self, publication: int = 0) -> bytes:
        """Encode it, as the publication of this number if there is one."""
        plain = asdict(self)
        if publication:
            plain |= {"format_version": _PUBLICATION_FORMAT, _NUMBER: publication}
        if any(len(part.changes) > 1 for part in self.parts):
            plain["format_version"] = _SEVERAL_FORMAT
        for name in ("fields", "change_files"):  # as every corpus was before these were known
            if not plain[name]:
                del plain[name]
        for part in plain["parts"]:
            changes = part.pop("changes")
            if changes:
                part["changes"] = changes if len(changes) > 1 else changes[0]
        return _to_json(plain)

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Self:
        return cls.from_fields(_parse_json(data, where), where)

    @classmethod
    def from_fields(cls, fields: dict[str, Any], where: str, format_version: int = FORMAT_VERSION) -> Self:
        """Make one from its JSON. Raises FormatError for another format, StorageError for what no program wrote."""
        try:
            several = any(isinstance(part.get("changes"), list) for part in fields["parts"])
            require_format(fields, _SEVERAL_FORMAT if several else format_version, where, _OTHER_NAME)
            fields |= {"format_version": FORMAT_VERSION}
            parts = tuple(map(PartInfo.from_fields, fields.pop("parts")))
            sources = tuple(SourceInfo(**source) for source in fields.pop("sources"))
            change_files = tuple(ChangeFile(**file) for file in fields.pop("change_files", ()))
            return cls(parts=parts, sources=sources, change_files=change_files, **fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(f"{where} is damaged ({error}); {_CURE}") from error


@dataclass(frozen=True)
class SetInfo:
    """The description of a question set of the corpus of one digest. `file` is its path within the corpus's folder."""

    corpus_digest: str
    name: str
    file: str
    num_questions: int
    num_bytes: int
    sha256: str
    format_version: int = FORMAT_VERSION

    def to_json(self) -> bytes:
        return _to_json(asdict(self))

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Self:
        fields = _parse_json(data, where)
        require_format(fields, FORMAT_VERSION, where, _OTHER_NAME)
        try:
            return cls(**fields)
        except TypeError as error:
            raise StorageError(f"{where} is damaged ({error}); {_CURE}") from error


def _to_json(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(json_with_checksum(fields), indent=1, ensure_ascii=False) + "\n").encode()


def _parse_json(data: bytes, where: str) -> dict[str, Any]:
    try:
        return parse_json(data, where)
    except StorageError as error:
        raise type(error)(f"{error}; {_CURE}") from error


def corpus_digest(parts: Iterable[PartInfo]) -> str:
    """Digest all passages and how they are divided into parts, 32 hex digits."""
    return hashlib.sha256("\n".join(part.digest for part in parts).encode()).hexdigest()[:32]


class CorpusPart:
    """The passages of one shard in id order, mapped from their file; with files of changes, a batch with a few of them
    is divided around these, and one with many is copied into memory."""

    def __init__(self, path: Path, *changes: Path, fields: Mapping[str, str] | None = None) -> None:
        """`fields` are those of the corpus; without them passages are read as if they had none."""
        self.path, self.change_paths = path, changes
        self._schema = passage_schema(fields or {})
        self.change_files = [read_part_changes(file, self._schema) for file in changes]
        self.changes = merge_changes(self.change_files)
        self._batches = [batch.select(self._schema.names) for batch in _map_batches(path)]
        if changes:
            self._batches = _changed_batches(self._batches, self.changes)
        self._starts = [0]
        for batch in self._batches:
            self._starts.append(self._starts[-1] + batch.num_rows)
        self._first_ids = [batch.column(0)[0].as_py() for batch in self._batches]

    def __len__(self) -> int:
        return self._starts[-1]

    def passages(self, start: int = 0, stop: int | None = None) -> list[Passage]:
        """Read rows `start` up to `stop`, like a slice of a list."""
        start, stop, _ = slice(start, stop).indices(len(self))
        passages: list[Passage] = []
        for at in range(max(bisect.bisect_right(self._starts, start) - 1, 0), bisect.bisect_left(self._starts, stop)):
            first = max(start, self._starts[at])
            passages += _passages_of(self._batches[at].slice(first - self._starts[at], stop - first))
        return passages

    def take(self, rows: Sequence[int]) -> list[Passage]:
        """Read some rows, in ascending order."""
        edges = [bisect.bisect_left(rows, start) for start in self._starts]
        passages: list[Passage] = []
        for batch, first, low, high in zip(self._batches, self._starts, edges, edges[1:]):
            if low < high:
                passages += _passages_of(batch.take(pa.array([row - first for row in rows[low:high]], pa.int64())))
        return passages

    def table(self, columns: Iterable[str]) -> pa.Table:
        """Some columns of all passages, mapped: any of id, title, text and the corpus's fields."""
        return pa.Table.from_batches(self._batches, self._schema).select(list(columns))

    def ids(self) -> list[str]:
        return [passage_id for batch in self._batches for passage_id in batch.column(0).to_pylist()]

    def row(self, passage_id: str) -> int:
        """Find the row of a passage, -1 when it is not in this part."""
        which = bisect.bisect_right(self._first_ids, passage_id) - 1
        if which < 0:
            return -1
        column = self._batches[which].column(0)
        at = bisect.bisect_left(range(len(column)), passage_id, key=lambda row: column[row].as_py())
        is_there = at < len(column) and column[at].as_py() == passage_id
        return self._starts[which] + at if is_there else -1

    def get(self, passage_id: str) -> Passage | None:
        row = self.row(passage_id)
        return self.passages(row, row + 1)[0] if row >= 0 else None


class PartDifference(NamedTuple):
    """How a part differs from an earlier one: rows of passages that are new or changed, and ids that are gone."""

    changed_rows: list[int]
    deleted_ids: list[str]


def difference(before: CorpusPart, after: CorpusPart) -> PartDifference:
    """Compare what an encoder reads of two parts, title and text, passage by passage; of parts that are changes of one
    file, the changes alone that are not in a file of both."""
    if before.path == after.path:
        return _difference_of_changes(before, after)
    old, new = (part.table(_CONTENT) for part in (before, after))
    compute: Any = pc
    found = old.take(compute.index_in(new.column("id"), value_set=old.column("id")))
    same = compute.and_(*(compute.equal(found.column(name), new.column(name)) for name in ("title", "text")))
    is_gone = compute.invert(compute.is_in(old.column("id"), value_set=new.column("id")))
    rows = compute.indices_nonzero(compute.invert(compute.fill_null(same, False)))
    return PartDifference(rows.to_pylist(), old.column("id").filter(is_gone).to_pylist())


def _difference_of_changes(before: CorpusPart, after: CorpusPart) -> PartDifference:
    difference = PartDifference([], [])
    pairs = zip(before.change_paths, after.change_paths)
    num_both = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    files = [own for part in (before, after) for own in part.change_files[num_both:]]
    for name in sorted({name for own in files for name in own.ids()}):
        row, old = after.row(name), before.get(name)
        if row < 0:
            difference.deleted_ids.extend([name] if old else [])
        elif old is None or after.passages(row, row + 1)[0][1:3] != old[1:3]:
            difference.changed_rows.append(row)
    return difference


def find_contents(
    part: CorpusPart, contents: Collection[tuple[str, str]], lacking: set[str]
) -> dict[tuple[str, str], str]:
    """Find a passage of each of these contents, title and text, in a part; contents that it lacks are left out.

    Each file of the part is searched by itself, but for those named in `lacking`, which have none of these contents;
    files that turn out to have none are added. Texts are read only where one has the length of a text that is looked
    for.
    """
    names: dict[tuple[str, str], str] = {}
    base = CorpusPart(part.path)
    files = [(part.path, base.table(_CONTENT)), *zip(part.change_paths, map(_content_table, part.change_files))]
    for path, table in files:
        if path.name in lacking:
            continue
        own = [(content, name) for content, name in _rows_with(table, contents) if content in contents]
        shown = [(content, name) for content, name in own if (now := part.get(name)) and now[1:3] == content]
        names |= {content: name for content, name in reversed(shown) if content not in names}
        if not own:
            lacking.add(path.name)
    return names


def _content_table(changes: "PartChanges") -> pa.Table:
    plain = [batch.replace_schema_metadata().select(list(_CONTENT)) for batch in changes.batches]
    return pa.Table.from_batches(plain, pa.schema([PASSAGE_SCHEMA.field(name) for name in _CONTENT]))


def _rows_with(table: pa.Table, contents: Collection[tuple[str, str]]) -> Iterator[tuple[tuple[str, str], str]]:
    """Title and text, and id, of the rows that have the text of one of these contents."""
    compute: Any = pc
    texts = pa.array(sorted({text for _, text in contents}), pa.string())
    lengths = compute.binary_length(table.column("text"))
    table = table.filter(compute.is_in(lengths, value_set=compute.unique(compute.binary_length(texts))))
    table = table.filter(compute.is_in(table.column("text"), value_set=texts))
    for name, title, text in zip(*(column.to_pylist() for column in table.columns)):
        yield (title, text), name


def publications(store: Store, name: str) -> list[int]:
    """List the numbers of the publications under a name, ascending. What a list of a while ago lacks, at its end, is
    asked for by its name."""
    stems = (file.removesuffix(".json") for file in store.list(paths.corpus_publications(name)))
    numbers = sorted(int(stem) for stem in stems if stem.isdigit())
    while store.exists(paths.corpus_publication(name, after := max(numbers, default=0) + 1)):
        numbers.append(after)
    return numbers


def _read_publication(store: Store, name: str, number: int) -> CorpusInfo:
    """Read a publication. Raises StorageError where it is another one: it says another number, or none although the one
    before says its own."""
    path = paths.corpus_publication(name, number)
    where = store.where(path)
    fields = _parse_json(store.read_bytes(path), where)
    own = fields.pop(_NUMBER, None)
    before = paths.corpus_publication(name, number - 1)
    if own is None and store.exists(before) and _NUMBER in _parse_json(store.read_bytes(before), store.where(before)):
        own = "without a number"
    if own not in (None, number):
        raise StorageError(f"{where} is damaged (it is publication {own}); {_CURE}")
    return CorpusInfo.from_fields(fields, where, _PUBLICATION_FORMAT if own else FORMAT_VERSION)


class Corpus:
    """A prepared corpus: `Corpus.open(store, name)`."""

    def __init__(self, store: Store, info: CorpusInfo, number: int = 0) -> None:
        """`number` is that of the publication that it was opened from; 0 where there is none."""
        self.store = store
        self.info = info
        self.number = number
        self._parts: dict[int, CorpusPart] = {}

    @classmethod
    def open(cls, store: Store, name: str, digest: str | None = None) -> Self:
        """Open the corpus that was published last under a name, or the one of this digest, which a version names.

        Raises MissingInputError where it is not there, StorageError for a description that is damaged.
        """
        number = 0
        path = paths.corpus_version(name, digest) if digest else ""
        if not digest or not store.exists(path):
            path = paths.corpus_json(name)
            number = max(publications(store, name), default=0)
        if not number and not store.exists(path):
            where = store.where(paths.corpus_dir(name))
            raise MissingInputError(f"corpus {name!r} not found in {where}; make it: mvr-ray prepare CONFIG")
        if number:
            info = _read_publication(store, name, number)
        else:
            info = CorpusInfo.from_json(store.read_bytes(path), store.where(path))
        if digest and info.digest != digest:
            raise MissingInputError(
                f"corpus {name!r} of digest {digest} not found ({store.where(paths.corpus_version(name, digest))}), "
                f"the one that was prepared last has digest {info.digest}; index again (mvr-ray index CONFIG), or "
                f"prepare the old sources"
            )
        return cls(store, info, number)

    def publish(self, after: int) -> None:
        """Make this the last corpus of its name, as publication `after + 1`, and keep its description under its digest.

        Raises PublishConflictError where publication `after` is not the last one any more, StorageError where a part is
        not there or the store fails. Then the corpus that was the last one still is.
        """
        store, number = self.store, after + 1
        self._require_parts("was not published")
        store.write_bytes(paths.corpus_version(self.name, self.digest), self.info.to_json())
        last = max(publications(store, self.name), default=0)
        if last != after or not self._create_publication(number, self.info):
            raise PublishConflictError(
                f"corpus {self.name!r} of digest {self.digest} was not published: another update or `prepare` was "
                f"faster (publication {max(last, number)}); nothing was lost: run the same command again"
            )
        self.number = number
        try:
            self._require_parts("lost files while it was published, as when a clock leaps and `versions collect` runs")
        except StorageError:
            if after:
                before = _read_publication(store, self.name, after)  # what was misread is not published
                self._create_publication(number + 1, before)
            raise

    def _create_publication(self, number: int, info: CorpusInfo) -> bool:
        """Create a publication; False where it is another's."""
        path, data = paths.corpus_publication(self.name, number), info.to_json(number)
        try:
            self.store.create_once(path, data)
        except OSError as error:
            if self.store.holds(path, data, error):
                return True
            if isinstance(error, FileExistsError):
                return False
            raise
        return True

    def missing_files(self) -> list[str]:
        """List the paths of parts that are not there with their size."""
        files = [file for part in self.info.parts for file in part.files]
        return [path for file in files if self.store.size_bytes(path := self._path_of(file)) != file.num_bytes]

    def _require_parts(self, what: str) -> None:
        if missing := self.missing_files():
            raise StorageError(
                f"corpus {self.name!r} of digest {self.digest} {what}: {len(missing)} files are missing or cut short "
                f"(first: {self.store.where(missing[0])}); run the same command again"
            )

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def digest(self) -> str:
        return self.info.digest

    @property
    def num_passages(self) -> int:
        return self.info.num_passages

    @property
    def num_shards(self) -> int:
        return len(self.info.parts)

    @property
    def fields(self) -> dict[str, str]:
        """Types of the passages' fields by name."""
        return self.info.fields

    def part(self, shard: int) -> CorpusPart:
        """Open a part; its file is read whole and compared with its digest when this process first opens it.

        Raises StorageError for a file that is missing or cut short, DigestError for one with other bytes.
        """
        if shard not in self._parts:
            info = self.info.parts[shard]
            files = [self.open_file(f"part {shard}", file) for file in info.files]
            self._parts[shard] = CorpusPart(*files, fields=self.fields)
        return self._parts[shard]

    def open_file(self, what: str, info: "CorpusFile") -> Path:
        """Return a local file with the content that `info` describes, after it was read whole. Raises as `part` does,
        of `what`."""
        path = self._path_of(info)
        if self.store.size_bytes(path) != info.num_bytes:
            raise StorageError(
                f"{what} of corpus {self.name!r} is missing or cut short ({self.store.where(path)}); {_CURE}"
            )
        local = self.store.local_path(path)
        if not self.store.is_local and not _is_whole(local, info):
            local.unlink(missing_ok=True)
            local = self.store.local_path(path)
        if not _is_whole(local, info):
            raise DigestError(
                f"{what} of corpus {self.name!r} is damaged ({local}: its sha256 is not {info.sha256}); {_CURE}"
            )
        return local

    def get(self, ids: Iterable[str]) -> dict[str, Passage]:
        """Find the passages of these ids; ids that the corpus does not hold are absent."""
        pairs = ((passage_id, self.part(shard_of(passage_id, self.num_shards)).get(passage_id)) for passage_id in ids)
        return {passage_id: passage for passage_id, passage in pairs if passage is not None}

    def __iter__(self) -> Iterator[Passage]:
        """Yield all passages, part by part."""
        for shard in range(self.num_shards):
            part = self.part(shard)
            for start in range(0, len(part), BATCH_ROWS):
                yield from part.passages(start, start + BATCH_ROWS)

    @cached_property
    def _articles(self) -> dict[str, list[str]]:
        ids_of_title: dict[str, list[str]] = {}
        for passage in self:
            ids_of_title.setdefault(passage.title, []).append(passage.id)
        return {title: sorted(ids_of_title[title]) for title in sorted(ids_of_title)}

    def articles(self) -> dict[str, list[str]]:
        """Return the passage ids of each title, all in order. Reads the whole corpus once and caches the ids."""
        return self._articles

    def find_missing(self) -> list[tuple[str, str]]:
        """Look for files of parts that are not in the store with their size, or that cannot be mapped; returns path and
        reason of each. No part is read whole."""
        sizes = {file.name: file.num_bytes for file in self.store.stored_files(paths.corpus_dir(self.name))}
        problems: list[tuple[str, str]] = []
        for file in (file for part in self.info.parts for file in part.files):
            path = self._path_of(file)
            if sizes.get(file.file) != file.num_bytes:
                is_there = file.file in sizes
                problems.append(
                    (path, f"has {sizes[file.file]} bytes, not {file.num_bytes}" if is_there else "is missing")
                )
            elif self.store.is_local:
                try:
                    _map_batches(self.store.local_path(path))
                except StorageError as error:
                    problems.append((path, f"cannot be opened ({error})"))
        return problems

    def files(self) -> "list[CorpusFile]":
        """Return what is known of each file: of the parts, and of the question sets that are described."""
        sets = (self._set_or_reason(name) for name in question_sets(self))
        parts = [file for part in self.info.parts for file in part.files]
        return parts + [own for own in sets if isinstance(own, SetInfo)]

    def find_damage(self) -> list[tuple[str, str]]:
        """Compare every part and question set in the store with its digest; returns path and reason of each that
        differs."""
        checks = ((self._path_of(file), file) for file in self.files())
        reasons = [(path, self.store.damage(path, file.num_bytes, file.sha256)) for path, file in checks]
        for name in question_sets(self):
            if isinstance(reason := self._set_or_reason(name), str):
                reasons.append((paths.question_set(self.name, self.digest, name), reason))
        return [(path, reason) for path, reason in reasons if reason]

    def _set_or_reason(self, name: str) -> "SetInfo | str | None":
        try:
            return question_set(self, name)
        except StorageError as error:
            return f"cannot be read ({error})"

    def _path_of(self, info: "CorpusFile") -> str:
        return f"{paths.corpus_dir(self.name)}/{info.file}"


CorpusFile = PartInfo | ChangesInfo | SetInfo


def _is_whole(path: Path, info: CorpusFile) -> bool:
    return path.is_file() and known_sha256_of(path) == info.sha256


def passage_schema(fields: Mapping[str, str]) -> pa.Schema:
    """The columns of a part: id, title, text, and a nullable one for each field."""
    return pa.schema([*PASSAGE_SCHEMA, *(pa.field(name, ARROW_TYPES[kind]) for name, kind in fields.items())])


def write_passages(path: Path, passages: Iterable[Passage], fields: Mapping[str, str] | None = None) -> int:
    """Write one part's file, with a column for each of the corpus's fields; the rows must come in id order.

    Returns how many there were.
    """
    fields = fields or {}
    return _write_rows(path, passage_schema(fields), _rows(passages, fields))


def _rows(passages: Iterable[Passage], fields: Mapping[str, str]) -> Iterator[tuple[Any, ...]]:
    return ((*passage[:3], *map(dict(passage.fields).get, fields)) for passage in passages)


class PartChanges(NamedTuple):
    """What a file of changes holds, or several laid over each other."""

    batches: list[pa.RecordBatch]
    deleted_ids: list[str]

    def ids(self) -> list[str]:
        """All ids that it names: of passages that are new or differ, and of those that are gone."""
        return [*itertools.chain(*(batch.column(0).to_pylist() for batch in self.batches)), *self.deleted_ids]

    def passages(self) -> dict[str, Passage]:
        return {passage.id: passage for batch in self.batches for passage in _passages_of(batch)}


def write_part_changes(
    path: Path, passages: Iterable[Passage], deleted_ids: Iterable[str], fields: Mapping[str, str]
) -> int:
    """Write the file of changes of a part; passages and ids come in order. Returns how many passages there were."""
    metadata = {DELETED_IDS: json.dumps(list(deleted_ids), ensure_ascii=False).encode()}
    return _write_rows(path, passage_schema(fields).with_metadata(metadata), _rows(passages, fields))


def read_part_changes(path: Path, schema: pa.Schema) -> PartChanges:
    """Read a file of changes, of it the columns of `schema`."""
    batches, metadata = _map_file(path)
    deleted_ids = json.loads(metadata.get(DELETED_IDS, b"[]"))
    return PartChanges([batch.select(schema.names) for batch in batches], deleted_ids)


def merge_changes(files: Sequence[PartChanges]) -> PartChanges:
    """Lay the changes of each file over those of the ones before it. The result has a batch a run of passages."""
    if len(files) < 2:
        return files[0] if files else PartChanges([], [])
    rows: dict[str, pa.RecordBatch] = {}
    gone: set[str] = set()
    for file in files:
        own = _rows_by_id(file.batches)
        gone = gone.union(file.deleted_ids).difference(own)
        rows = {name: row for name, row in rows.items() if name not in gone} | own
    ordered = [rows[name] for name in sorted(rows)]
    return PartChanges([pa.concat_batches(ordered)] if ordered else [], sorted(gone))


def _rows_by_id(batches: Iterable[pa.RecordBatch]) -> dict[str, pa.RecordBatch]:
    """Each passage as a batch of one row; nothing is copied."""
    plain = (batch.replace_schema_metadata() for batch in batches)
    return {name: own.slice(at, 1) for own in plain for at, name in enumerate(own.column(0).to_pylist())}


def _changed_batches(batches: list[pa.RecordBatch], changes: PartChanges) -> list[pa.RecordBatch]:
    """The rows of `batches` in id order, with the passages of the changes in place of theirs or beside them, and
    without those that are gone."""
    upserts = _rows_by_id(changes.batches)
    names = sorted({*upserts, *changes.deleted_ids})
    starts = [0, *(bisect.bisect_left(names, batch.column(0)[0].as_py()) for batch in batches[1:]), len(names)]
    results: list[pa.RecordBatch] = []
    for batch, low, high in zip(batches, starts, starts[1:]):
        batch = batch.replace_schema_metadata()
        parts = list(_divide(batch, names[low:high], upserts))
        is_divided = (high - low) * _ROWS_WORTH_DIVIDING <= batch.num_rows
        results += parts if is_divided or len(parts) < 2 else [pa.concat_batches(parts)]
    return results


def _divide(batch: pa.RecordBatch, names: list[str], upserts: Mapping[str, pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Parts of a batch around `names`, ascending, and the new ones between them: each is a row of `upserts`, or is gone
    where there is none. Nothing is copied."""
    row, column = 0, batch.column(0)
    for name in names:
        at = bisect.bisect_left(range(len(column)), name, row, key=lambda at: column[at].as_py())
        if row < at:
            yield batch.slice(row, at - row)
        row = at + (at < len(column) and column[at].as_py() == name)
        if name in upserts:
            yield upserts[name]
    if row < len(column):
        yield batch.slice(row)


def write_questions(corpus: Corpus, name: str, questions: Iterable[Question]) -> int:
    """Store a question set of a corpus, replacing it in one step. Returns how many questions there were."""
    with corpus.store.scratch() as folder:
        file = folder / "questions.arrow"
        count = write_question_file(file, name, questions)
        put_questions(corpus, name, file, count)
    return count


def put_questions(corpus: Corpus, name: str, file: Path, num_questions: int) -> None:
    """Move a finished local file of questions to its place in the store, and describe it as this set of the corpus."""
    digest, num_bytes = sha256_of(file), file.stat().st_size
    info = SetInfo(corpus.digest, name, paths.question_file(name, digest), num_questions, num_bytes, digest)
    corpus.store.put_file(file, f"{paths.corpus_dir(corpus.name)}/{info.file}")
    corpus.store.write_bytes(paths.question_set(corpus.name, corpus.digest, name), info.to_json())


def copy_questions(source: Corpus, corpus: Corpus, name: str) -> None:
    """Give a corpus a question set of an earlier corpus of its name; both describe one file."""
    if info := question_set(source, name):
        info = replace(info, corpus_digest=corpus.digest)
        corpus.store.write_bytes(paths.question_set(corpus.name, corpus.digest, name), info.to_json())
    else:
        write_questions(corpus, name, read_questions(source, name))


def write_question_file(path: Path, name: str, questions: Iterable[Question]) -> int:
    return _write_rows(path, QUESTION_SCHEMA, (_checked_question(question, name) for question in questions))


def read_questions(corpus: Corpus, name: str) -> list[Question]:
    """Read a question set of a corpus, after its digest matched.

    Raises MissingInputError that names the sets that the corpus has, StorageError for a set that is damaged.
    """
    rows: list[Question] = []
    for batch in _question_batches(corpus, name):
        lists = [column.to_pylist() for column in batch.columns]
        rows += (Question(row[0], row[1], *map(tuple, row[2:])) for row in zip(*lists))  # older files lack last columns
    return rows


def _question_batches(corpus: Corpus, name: str) -> list[pa.RecordBatch]:
    """Map the questions of a set as they lie in its file. Raises as `read_questions` does."""
    if info := question_set(corpus, name):
        return _map_batches(corpus.open_file(f"question set {name!r}", info))
    return _map_undescribed(corpus.store.local_path(_undescribed_path(corpus, name)))


def question_set(corpus: Corpus, name: str) -> SetInfo | None:
    """Read the description of a question set; None for one of an earlier program, which described none.

    Raises MissingInputError that names the sets that the corpus has, StorageError for a damaged description.
    """
    path = paths.question_set(corpus.name, corpus.digest, name)
    if corpus.store.exists(path):
        info, where = (
            SetInfo.from_json(corpus.store.read_bytes(path), corpus.store.where(path)),
            corpus.store.where(path),
        )
        if (info.corpus_digest, info.name) != (corpus.digest, name):
            raise StorageError(
                f"{where} describes question set {info.name!r} of the corpus of digest {info.corpus_digest}; {_CURE}"
            )
        return info
    if not corpus.store.exists(_undescribed_path(corpus, name)):
        raise MissingInputError(
            f"question set {name!r} not found with corpus {corpus.name!r} in {corpus.store.name}; there are: "
            f"{', '.join(question_sets(corpus)) or 'none'}. `mvr-ray prepare CONFIG` stores the sets that "
            f"prepare.sources and prepare.splits name"
        )
    return None


def question_digest(corpus: Corpus, name: str) -> str:
    """Return the sha256 of the questions of a set. Raises as `question_set` does."""
    info = question_set(corpus, name)
    return info.sha256 if info else corpus.store.sha256(_undescribed_path(corpus, name))


def question_sets(corpus: Corpus) -> list[str]:
    """Return the names of a corpus's question sets."""
    own = corpus.store.list(paths.questions_dir(corpus.name, corpus.digest))
    files = [*(name for name in own if name.endswith(".json")), *corpus.store.list(_undescribed_dir(corpus))]
    return sorted({name.rpartition(".")[0] for name in files if name.endswith((".json", ".arrow"))})


def _undescribed_dir(corpus: Corpus) -> str:
    """Where sets are that earlier programs stored, without a description: beside the others, or, of programs before
    corpus versions, in one folder for the sets of all corpora."""
    if corpus.store.exists(paths.corpus_version(corpus.name, corpus.digest)):
        return paths.questions_dir(corpus.name, corpus.digest)
    return paths.shared_questions_dir()


def _undescribed_path(corpus: Corpus, name: str) -> str:
    return f"{_undescribed_dir(corpus)}/{name}.arrow"


def example_queries(corpus: Corpus, num: int) -> list[str]:
    """Up to `num` texts to search a corpus for: questions of its first set, else titles of its first part; at even
    distances, so that they are of several articles."""
    for name in question_sets(corpus):
        batches = _question_batches(corpus, name)
        if texts := _spread(pa.chunked_array([batch.column(1) for batch in batches], pa.string()), num):
            return texts
    titles = dict.fromkeys(passage.title for passage in corpus.part(0).passages(0, _TITLES_READ) if passage.title)
    return _spread(pa.chunked_array([list(titles)], pa.string()), num)


def _spread(texts: pa.ChunkedArray, num: int) -> list[str]:
    step = max(1, len(texts) // num)
    return texts.take(pa.array(range(0, len(texts), step)[:num], pa.int64())).to_pylist()


def _checked_question(question: Question, name: str) -> Question:
    if not question.id or not question.text.strip():
        raise DataError(f"question set {name!r}: question {question.id!r} has no id or no text")
    if question.answer_starts and len(question.answer_starts) != len(question.answers):
        raise DataError(
            f"question set {name!r}: question {question.id!r} has {len(question.answers)} answers and "
            f"{len(question.answer_starts)} answer starts; give one each, -1 where unknown"
        )
    if question.teacher_scores and len(question.teacher_scores) != 1 + len(question.hard_negative_ids):
        raise DataError(
            f"question set {name!r}: question {question.id!r} has {len(question.hard_negative_ids)} hard negatives and "
            f"{len(question.teacher_scores)} teacher scores; give one for the positive and one for each negative"
        )
    return question


def _passages_of(batch: pa.RecordBatch) -> Iterator[Passage]:
    ids, titles, texts, *columns = (column.to_pylist() for column in batch.columns)
    if not columns:
        return map(Passage, ids, titles, texts)
    names = batch.schema.names[3:]
    rows = (
        tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in zip(names, values))
        for values in zip(*columns)
    )
    fields = (tuple(pair for pair in row if pair[1] is not None) for row in rows)
    return map(Passage, ids, titles, texts, fields)


def _write_rows(path: Path, schema: pa.Schema, rows: Iterable[tuple[Any, ...]]) -> int:
    count = 0
    with finished_file(path) as aside, pa.OSFile(str(aside), "wb") as sink, pa.ipc.new_file(sink, schema) as file:
        remaining = iter(rows)
        while chunk := list(islice(remaining, BATCH_ROWS)):
            columns = [pa.array(values, field.type) for values, field in zip(zip(*chunk), schema)]
            file.write_batch(pa.record_batch(columns, schema=schema))
            count += len(chunk)
    return count


def _map_batches(path: Path) -> list[pa.RecordBatch]:
    return _map_file(path)[0]


def _map_undescribed(path: Path) -> list[pa.RecordBatch]:
    """Map a file whose digest is not known. What it says about lengths is checked before anything is copied.

    Raises StorageError where it holds more than its bytes, as a compressed or damaged file does.
    """
    batches = _map_batches(path)
    try:
        for batch in batches:
            batch.validate(full=True)
            if not batch.schema.equals(pa.schema(list(QUESTION_SCHEMA)[: batch.num_columns])):
                raise pa.ArrowInvalid("it has other columns than questions have")
    except pa.ArrowException as error:
        raise StorageError(f"{path} is damaged ({error}); {_CURE}") from error
    if sum(batch.nbytes for batch in batches) > path.stat().st_size:
        raise StorageError(f"{path} is damaged (it says that it holds more than its bytes); {_CURE}")
    return batches


def _map_file(path: Path) -> tuple[list[pa.RecordBatch], dict[bytes, bytes]]:
    """Map the non-empty record batches of an Arrow file; gives its metadata, too."""
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        return [batch for batch in batches if batch.num_rows], reader.schema.metadata or {}
    except (pa.ArrowException, OSError, ValueError) as error:
        raise StorageError(f"{path} is missing or damaged ({error}); {_CURE}") from error
