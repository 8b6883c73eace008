"""Describe, publish and open corpora.

A corpus is a description and one part a shard (`parts`), which is named by its content. The description names the parts
and is stored by its digest, so an index version finds its corpus after later runs of `prepare`. Publications are
numbered and created once each; the highest is the last corpus of a name. A passage's shard is a hash of its id. A
question set belongs to the corpus of one digest, and is described by a JSON file beside its others; its questions are
read and written by `questions`. No file is parsed before its digest matches the description, nor a description before
its own checksum.
"""

import hashlib
import json
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, TypeVar

import numpy as np
from pydantic import BeforeValidator, ConfigDict, ValidationError
from pydantic.dataclasses import dataclass

from mvr_ray.checksums import json_with_checksum, parse_json, require_format
from mvr_ray.config.base import describe_problems
from mvr_ray.errors import DigestError, MissingInputError, PublishConflictError, StorageError, count_noun
from mvr_ray.store import paths
from mvr_ray.store.files import Store
from mvr_ray.store.filters import Filter
from mvr_ray.store.parts import BATCH_ROWS, CURE, UPDATED_CURE, CorpusPart, map_batches
from mvr_ray.types import Passage

FORMAT_VERSION = 1
_PUBLICATION_FORMAT = 2
"""Of publications that hold their number, `_NUMBER`; those of earlier programs do not, and have the first format."""
_NUMBER = "publication"
_SEVERAL_FORMAT = 3
"""Of descriptions of a part with several files of changes, of which earlier programs read one."""
_CONFIG = ConfigDict(extra="forbid", use_attribute_docstrings=True)
SETTINGS_OF_CHANGES = ("chunk_words", "max_passages")
"""Settings of `prepare` that a change of the corpus needs again; `CorpusInfo.counts` has them."""
_CACHED_BYTES = 1 << 26
"""Of the passages read by id that a corpus keeps in memory: searches return the same ones again and again."""
_PASSAGE_BYTES = 500
"""Of a passage in memory, beside its text."""
_OTHER_NAME = "set prepare.corpus to another name and prepare again"


def shard_of(passage_id: str, num_shards: int) -> int:
    """Return the shard of a passage, from its id alone."""
    digest = hashlib.blake2b(passage_id.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % num_shards


def ids_by_shard(passage_ids: Iterable[str], num_shards: int) -> dict[int, list[str]]:
    """Group passage ids, each once, by shard."""
    by_shard: dict[int, list[str]] = {}
    for passage_id in dict.fromkeys(passage_ids):
        by_shard.setdefault(shard_of(passage_id, num_shards), []).append(passage_id)
    return by_shard


@dataclass(frozen=True, config=_CONFIG)
class ChangesInfo:
    """A file of changes of a part."""

    file: str
    num_bytes: int
    sha256: str


def _as_list(changes: Any) -> Any:
    return [changes] if isinstance(changes, dict) else changes


@dataclass(frozen=True, config=_CONFIG)
class PartInfo:
    """One part of a corpus, as in its description. `num_passages` counts them with the changes."""

    file: str
    num_passages: int
    num_bytes: int
    sha256: str
    changes: Annotated[tuple[ChangesInfo, ...], BeforeValidator(_as_list)] = ()
    """Each overrides the ones before it. In JSON a single one has no list around it."""

    @property
    def digest(self) -> str:
        """Digest of all files of the part."""
        return "+".join(file.sha256 for file in self.files)

    @property
    def files(self) -> "list[PartInfo | ChangesInfo]":
        return [self, *self.changes]


@dataclass(frozen=True, config=_CONFIG)
class SourceInfo:
    """A file that a corpus was made from."""

    path: str
    format: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True, config=_CONFIG)
class ChangeFile:
    """A change file that `follow` has processed: applied, or left out for a `problem`.

    `changed_s` is the Unix time of the file's last change, as the source reports it.
    """

    name: str
    num_bytes: int
    changed_s: float
    sha256: str
    problem: str = ""


@dataclass(frozen=True, config=_CONFIG)
class CorpusInfo:
    """The description of a corpus. `digest` covers the passages, whatever files they came from."""

    name: str
    digest: str
    num_passages: int
    parts: tuple[PartInfo, ...]
    sources: tuple[SourceInfo, ...]
    questions: dict[str, int]
    counts: dict[str, int]
    """The numbers of the report of `prepare`, and `SETTINGS_OF_CHANGES`, which earlier programs did not record."""
    parent: str = ""
    """Digest of the corpus that the update changed which published this one; empty for one of `prepare`."""
    fields: dict[str, str] = field(default_factory=dict)
    """Types of the passages' fields by name, in the order of their columns."""
    change_files: tuple[ChangeFile, ...] = ()
    """In order of name: the files of the source's last listing, and the file with the last name."""
    format_version: int = FORMAT_VERSION

    @property
    def part_files(self) -> "list[PartInfo | ChangesInfo]":
        """The files of all parts."""
        return [file for part in self.parts for file in part.files]

    def to_json(self, publication: int = 0) -> bytes:
        """Encode the description, as the publication of this number if there is one."""
        plain = asdict(self)
        if publication:
            plain |= {"format_version": _PUBLICATION_FORMAT, _NUMBER: publication}
        if any(len(part.changes) > 1 for part in self.parts):
            plain["format_version"] = _SEVERAL_FORMAT
        for name in ("fields", "change_files"):  # earlier formats have none of these
            if not plain[name]:
                del plain[name]
        for part in plain["parts"]:
            changes = part.pop("changes")
            if changes:
                part["changes"] = changes if len(changes) > 1 else changes[0]
        return _to_json(plain)


@dataclass(frozen=True, config=_CONFIG)
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


Description = TypeVar("Description", CorpusInfo, SetInfo)


def _from_fields(kind: type[Description], fields: dict[str, Any], where: str, format_version: int) -> Description:
    """Parse the JSON form. Raises FormatError for another format, StorageError for invalid content."""
    require_format(fields, format_version, where, _OTHER_NAME)
    try:
        return kind(**{**fields, "format_version": FORMAT_VERSION})
    except ValidationError as error:
        raise StorageError(f"{where} is damaged ({describe_problems(error)}); {CURE}") from error


def _corpus_info(fields: dict[str, Any], where: str, format_version: int = FORMAT_VERSION) -> CorpusInfo:
    parts = parts if isinstance(parts := fields.get("parts"), list) else []
    several = any(isinstance(part, dict) and isinstance(part.get("changes"), list) for part in parts)
    return _from_fields(CorpusInfo, fields, where, _SEVERAL_FORMAT if several else format_version)


def _to_json(fields: Mapping[str, Any]) -> bytes:
    text = json.dumps(json_with_checksum(fields), indent=1, ensure_ascii=False) + "\n"
    return text.encode(errors="backslashreplace")  # JSON's own escapes, for names of files that are not UTF-8


def _read_json(store: Store, path: str) -> dict[str, Any]:
    return parse_json(store.read_bytes(path), store.where(path), CURE)


def corpus_digest(parts: Iterable[PartInfo]) -> str:
    """Digest all passages and how they are divided into parts, 32 hex digits."""
    return hashlib.sha256("\n".join(part.digest for part in parts).encode()).hexdigest()[:32]


def publications(store: Store, name: str) -> list[int]:
    """List the numbers of the publications under a name, ascending. A listing may be outdated, so the numbers after its
    last one are looked up by name."""
    numbers = sorted(int(own) for own in store.json_names(paths.corpus_dir(name, "publications")) if own.isdigit())
    while store.exists(paths.corpus_publication(name, after := max(numbers, default=0) + 1)):
        numbers.append(after)
    return numbers


def _read_description(store: Store, path: str) -> CorpusInfo | None:
    """Read the description of a corpus; None where it is not there."""
    try:
        return _corpus_info(_read_json(store, path), store.where(path))
    except MissingInputError:
        return None


def _read_publication(store: Store, name: str, number: int) -> CorpusInfo:
    """Read a publication. Raises StorageError for a wrong one: it holds another number, or none although the one before
    holds its own."""
    path = paths.corpus_publication(name, number)
    where, fields = store.where(path), _read_json(store, path)
    own = fields.pop(_NUMBER, None)
    before = paths.corpus_publication(name, number - 1)
    if own is None and store.exists(before) and _NUMBER in _read_json(store, before):
        own = "without a number"
    if own not in (None, number):
        raise StorageError(f"{where} is damaged (it is publication {own}); {CURE}")
    return _corpus_info(fields, where, _PUBLICATION_FORMAT if own else FORMAT_VERSION)


class Corpus:
    """A prepared corpus: `Corpus.open(store, name)`."""

    def __init__(self, store: Store, info: CorpusInfo, number: int = 0) -> None:
        """`number` is that of the publication that it was opened from; 0 where there is none."""
        self.store = store
        self.info = info
        self.number = number
        self.name, self.digest, self.num_passages = info.name, info.digest, info.num_passages
        self.num_shards = len(info.parts)
        self.fields = info.fields
        """Types of the passages' fields by name."""
        self._parts: dict[int, CorpusPart] = {}
        own = weakref.proxy(self)  # as in `Router`
        num_bytes = sum(file.num_bytes for file in info.part_files) + _PASSAGE_BYTES * info.num_passages
        num_cached = _CACHED_BYTES * info.num_passages // max(num_bytes, 1)
        self._passage = lru_cache(num_cached)(lambda name: own.part(shard_of(name, own.num_shards)).get(name))

    def __reduce__(self) -> tuple[type["Corpus"], tuple[Store, CorpusInfo, int]]:
        return type(self), (Store(self.store.address), self.info, self.number)

    @classmethod
    def open(cls, store: Store, name: str, digest: str | None = None) -> Self:
        """Open the corpus that was published last under a name, or the one of this digest, which a version names.

        Raises MissingInputError where it is not there, StorageError for a description that is damaged.
        """
        number = 0
        if digest and (own := _read_description(store, paths.corpus_version(name, digest))):
            info = own
        elif number := max(publications(store, name), default=0):
            info = _read_publication(store, name, number)
        elif own := _read_description(store, paths.corpus_json(name)):
            info = own
        else:
            where = f"{store.full_name}/{paths.corpus_dir(name)}"
            raise MissingInputError(f"corpus {name!r} not found in {where}; make it: mvr-ray prepare CONFIG")
        if digest and info.digest != digest:
            raise MissingInputError(
                f"corpus {name!r} of digest {digest} not found ({store.where(paths.corpus_version(name, digest))}), "
                f"the one that was prepared last has digest {info.digest}; index again (mvr-ray index CONFIG), or "
                f"prepare the old sources; if its version was collected since it was opened, open the index again"
            )
        return cls(store, info, number)

    def publication_before(self) -> Self | None:
        """Open the publication before this one; None where it was collected."""
        try:
            return type(self)(self.store, _read_publication(self.store, self.name, self.number - 1), self.number - 1)
        except MissingInputError:
            return None

    def publish(self, after: int) -> None:
        """Make this the last corpus of its name, as publication `after + 1`, and keep its description under its digest.

        Parts that publication `after` does not name become young before, so that a collection keeps them.
        Raises PublishConflictError if publication `after` is no longer the last one, StorageError if a part is missing
        or the store fails. The last corpus then stays the last one.
        """
        store, number = self.store, after + 1
        named_before = []
        with suppress(MissingInputError):  # it was collected: another is the last one
            named_before = _read_publication(store, self.name, after).part_files if after else []
        store.touch(*(self._path_of(file) for file in self.info.part_files if file not in named_before))
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
            self._require_parts("lost files while it was published, as when a clock jumps and `versions collect` runs")
        except StorageError:
            if after:
                before = _read_publication(store, self.name, after)  # a misread publication is not published again
                self._create_publication(number + 1, before)
            raise

    def _create_publication(self, number: int, info: CorpusInfo) -> bool:
        """Create a publication; returns False if another writer created it."""
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

    @property
    def cure(self) -> str:
        """What restores a file of this corpus."""
        return UPDATED_CURE if self.info.parent else CURE

    def missing_files(self) -> list[str]:
        """List the paths of part files that are missing or have another size."""
        files = self.info.part_files
        sizes = self.store.for_each(lambda file: self.store.size_bytes(self._path_of(file)), files)
        return [self._path_of(file) for file, num_bytes in zip(files, sizes) if num_bytes != file.num_bytes]

    def _require_parts(self, what: str) -> None:
        if missing := self.missing_files():
            raise StorageError(
                f"corpus {self.name!r} of digest {self.digest} {what}: "
                f"{count_noun(len(missing), 'missing or unfinished file')} (first: {self.store.where(missing[0])}); "
                f"run the same command again"
            )

    def part(self, shard: int) -> CorpusPart:
        """Open a part; its file is read whole and compared with its digest when this process first opens it.

        Raises StorageError for a file that is missing or cut short, DigestError for one with other bytes.
        """
        if shard not in self._parts:
            self._parts[shard] = self._open_part(shard)
        return self._parts[shard]

    def _open_part(self, shard: int) -> CorpusPart:
        files = [self.open_file(f"part {shard}", file) for file in self.info.parts[shard].files]
        return CorpusPart(*files, fields=self.fields)

    @property
    def open_shards(self) -> list[int]:
        """The numbers of the parts that are open."""
        return list(self._parts)

    def open_parts(self, shards: Iterable[int]) -> None:
        """Open parts and lay their changes over them, several at once from an object store. Raises as `part`."""
        self.store.for_each(lambda shard: len(self.part(shard)), sorted({*shards}.difference(self._parts)))

    def open_file(self, what: str, info: "CorpusFile") -> Path:
        """Return a local file with the content that `info` describes, after checking its digest. Raises as `part`
        does; messages name the file as `what`."""
        path = self._path_of(info)
        if self.store.size_bytes(path) != info.num_bytes:
            problem = f"{what} of corpus {self.name!r} is missing or cut short ({self.store.where(path)})"
            if publications(self.store, self.name) and not self.store.exists(
                paths.corpus_version(self.name, self.digest)
            ):
                raise StorageError(
                    f"{problem}: the corpus of digest {self.digest} was collected with the last version that named it; "
                    f"close the index, and the newest version is opened"
                )
            raise StorageError(f"{problem}; {self.cure}")
        local = self.store.local_path(path)
        if not self.store.is_whole(local, path, info.num_bytes, info.sha256):
            raise DigestError(
                f"{what} of corpus {self.name!r} is damaged ({local}: its sha256 is not {info.sha256}); {self.cure}"
            )
        return local

    def get(self, ids: Iterable[str]) -> dict[str, Passage]:
        """Find the passages of these ids; ids that the corpus does not hold are absent."""
        names = list(ids)
        if len(self._parts) < self.num_shards:
            self.open_parts(shard_of(name, self.num_shards) for name in names)
        return {name: passage for name in names if (passage := self._passage(name))}

    def existing_ids(self, ids: Iterable[str]) -> set[str]:
        """Return those of these ids that the corpus holds, without reading a text."""
        by_shard = ids_by_shard(ids, self.num_shards)
        self.open_parts(by_shard)
        return {name for shard, names in by_shard.items() for name in names if self.part(shard).row(name) >= 0}

    def __iter__(self) -> Iterator[Passage]:
        """Yield all passages, as `scan` does."""
        return self.scan()

    def scan(self, filter: Filter | None = None) -> Iterator[Passage]:
        """Yield the passages that pass a filter, without one all, part by part and in order of id within each. A part
        that was not open is open only meanwhile, so memory does not grow with the corpus."""
        for shard in range(self.num_shards):
            part = self._parts[shard] if shard in self._parts else self._open_part(shard)
            if filter is None:
                yield from part
            else:
                rows = np.flatnonzero(filter.mask(part.table({"id", *filter.columns}))).tolist()
                for start in range(0, len(rows), BATCH_ROWS):
                    yield from part.take(rows[start : start + BATCH_ROWS])

    def find_missing(self, shards: Iterable[int] | None = None) -> Iterator[tuple[str, str]]:
        """Find the files of these parts (None: all) that are missing, have another size or cannot be mapped; yields
        path and reason of each. No part is read whole."""
        if shards is None:
            files = self.info.part_files
            size_by_name = {file.name: file.num_bytes for file in self.store.stored_files(paths.corpus_dir(self.name))}
            sizes = [size_by_name.get(file.file, -1) for file in files]
        else:
            files = [file for shard in shards for file in self.info.parts[shard].files]
            sizes = self.store.for_each(lambda file: self.store.size_bytes(self._path_of(file)), files)
        for file, num_bytes in zip(files, sizes):
            path = self._path_of(file)
            if num_bytes != file.num_bytes:
                yield path, "is missing" if num_bytes < 0 else f"has {num_bytes} bytes, not {file.num_bytes}"
            elif self.store.is_local:
                try:
                    map_batches(self.store.local_path(path))
                except StorageError as error:
                    yield path, f"cannot be opened ({error})"

    def verify(self) -> "CorpusReport":
        """Compare every part and question set in the store with its digest."""
        files = list[CorpusFile](self.info.part_files)
        set_damage = []
        for name in question_sets(self):
            try:
                info = question_set(self, name)
            except StorageError as error:
                path = paths.question_set(self.name, self.digest, name)
                set_damage.append((path, f"cannot be read ({error})"))
            else:
                files += [info] if info else []

        def check(file: "CorpusFile") -> tuple[str, str]:
            path = self._path_of(file)
            return path, self.store.damage(path, file.num_bytes, file.sha256)

        damage = [(path, reason) for path, reason in self.store.for_each(check, files) if reason]
        return CorpusReport(files, damage + set_damage)

    def _path_of(self, info: "CorpusFile") -> str:
        return f"{paths.corpus_dir(self.name)}/{info.file}"


CorpusFile = PartInfo | ChangesInfo | SetInfo


class CorpusReport(NamedTuple):
    """The descriptions of the files of a corpus, those of question sets that have one included, and path and reason of
    each file that differs from its description or cannot be read."""

    files: list[CorpusFile]
    damage: list[tuple[str, str]]


def question_set(corpus: Corpus, name: str) -> SetInfo | None:
    """Read the description of a question set; None for a set of an earlier program, which has none.

    Raises MissingInputError that names the sets that the corpus has, StorageError for a damaged description.
    """
    path = paths.question_set(corpus.name, corpus.digest, name)
    if corpus.store.exists(path):
        where = corpus.store.where(path)
        fields = {"corpus_digest": corpus.digest, **_read_json(corpus.store, path)}  # the first descriptions lack it
        info = _from_fields(SetInfo, fields, where, FORMAT_VERSION)
        if (info.corpus_digest, info.name) != (corpus.digest, name):
            raise StorageError(
                f"{where} describes question set {info.name!r} of the corpus of digest {info.corpus_digest}; {CURE}"
            )
        return info
    if not corpus.store.exists(undescribed_path(corpus, name)):
        raise MissingInputError(
            f"question set {name!r} not found with corpus {corpus.name!r} in {corpus.store.name}; there are: "
            f"{', '.join(question_sets(corpus)) or 'none'}. `mvr-ray prepare CONFIG` stores the sets that "
            f"prepare.sources and prepare.splits name"
        )
    return None


def question_digest(corpus: Corpus, name: str) -> str:
    """Return the sha256 of the questions of a set. Raises as `question_set` does."""
    info = question_set(corpus, name)
    return info.sha256 if info else corpus.store.sha256(undescribed_path(corpus, name))


def question_sets(corpus: Corpus) -> list[str]:
    """Return the names of a corpus's question sets."""
    own = corpus.store.list(paths.questions_dir(corpus.name, corpus.digest))
    files = [*(name for name in own if name.endswith(".json")), *corpus.store.list(_undescribed_dir(corpus))]
    return sorted({name.rpartition(".")[0] for name in files if name.endswith((".json", ".arrow"))})


def _undescribed_dir(corpus: Corpus) -> str:
    """Return the folder of question sets that earlier programs stored without a description: that of the other sets,
    or, for programs before corpus versions, one folder for the sets of all corpora."""
    if corpus.store.exists(paths.corpus_version(corpus.name, corpus.digest)):
        return paths.questions_dir(corpus.name, corpus.digest)
    return paths.SHARED_QUESTIONS


def undescribed_path(corpus: Corpus, name: str) -> str:
    return f"{_undescribed_dir(corpus)}/{name}.arrow"
