"""Describe, publish, open, verify and roll back index versions.

A manifest describes one version completely: it is immutable, created once under its number, and names shards by their
content. The live version is the highest. A shard folder is shared by all versions that name it and is deleted after
the last of them. `publish` follows a parent, so of two publishers with the same parent exactly one wins.
"""

import dataclasses
import hashlib
import itertools
import json
import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from mvr_ray.checksums import FORMAT_VERSION as FORMAT_KEY
from mvr_ray.checksums import json_with_checksum, parse_json, require_format
from mvr_ray.config.base import Name, describe_problems
from mvr_ray.errors import DigestError, ManifestError, MissingInputError, PublishConflictError, StorageError, count_noun
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus, publications
from mvr_ray.store.files import Store
from mvr_ray.store.local_files import sha256_of

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
NEWEST_FORMAT = 3
"""3: several files of changes for words; 2: for a shard. Earlier programs, which read one, refuse these formats."""
DIGEST_HEX = 32
_ROLL_BACK = "roll back: mvr-ray versions CONFIG rollback N"
_DAMAGE_CURE = f"copy the file back, or {_ROLL_BACK}"
ROLLBACK = "rollback"
"""The operation of a version that has an earlier one's content."""
REPLACED = "replaced_publication"
"""The metric of a rolled-back version, and of those made of it but by `index`: the last publication of its corpus that
the roll back replaced (0: none). Those after it were made on top of the version."""
COPIES = ("reshard", "compact", ROLLBACK)
"""The operations whose versions have the views of an earlier one."""

Size = Annotated[int, Field(ge=0, le=2**53)]
Number = Annotated[int, Field(ge=0, le=2**31)]
Word = Annotated[str, Field(max_length=200)]
Digest = Annotated[str, Field(pattern=f"^[0-9a-f]{{{DIGEST_HEX}}}$")]
FileName = Annotated[str, Field(pattern="^[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*$", max_length=200)]
if TYPE_CHECKING:
    ParamValue = Any  # each parameter has a type of its own in index.base.IndexParams
else:
    ParamValue = int | str
_CONFIG = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class ShardMeta(NamedTuple):
    """Number and sizes of a finished shard, from its builder."""

    shard: int
    num_passages: int
    num_vectors: int


@dataclass(frozen=True, config=_CONFIG)
class FileEntry:
    num_bytes: Size
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


@dataclass(frozen=True, config=_CONFIG)
class ShardEntry:
    """One shard of a version."""

    shard: Number
    digest: Digest
    """The name of the shard's folder; it covers the other fields."""
    num_passages: Size
    num_vectors: Size
    files: dict[FileName, FileEntry]

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files.values())


WordFiles = Annotated[tuple[FileEntry, ...], Field(min_length=1)]

INDEX_WORDS = (
    'set index.lexical: true in the run file, in Python settings={"index": {"lexical": True}}, and index again, '
    "which encodes nothing for it"
)
"""What to do about a version without words; an override alone would last until the next `index` or `upsert`."""


@dataclass(frozen=True, config=_CONFIG)
class LexicalPart:
    """The words of a version's passages, in files that are named by their content (`paths.lexical`): one for all,
    then one for each later change."""

    statistics: WordFiles
    """Of the whole corpus."""
    postings: tuple[WordFiles, ...]
    """Of each shard, in the order of the version's shards."""

    @property
    def files(self) -> tuple[FileEntry, ...]:
        return tuple(dict.fromkeys(file for own in (self.statistics, *self.postings) for file in own))

    @property
    def has_changes(self) -> bool:
        """Whether there is a file of changes."""
        return any(len(own) > 1 for own in (self.statistics, *self.postings))


@dataclass(frozen=True, config=_CONFIG)
class Manifest:
    """One index version, in the store and over HTTP. `version` 0 stands for one that is not published yet; `parent` 0
    for no parent."""

    index: Name
    operation: Word
    """index, index:refined, refine:METHOD, reshard, compact or rollback."""
    encoder_name: Name
    encoder_fingerprint: Name
    similarity: Annotated[str, Field(pattern="^(cosine|inner_product)$")]
    num_views: Annotated[int, Field(ge=1, le=1024)]
    dimension: Annotated[int, Field(ge=1, le=65_504)]
    dtype: Literal["fp16", "fp32"]
    corpus: Name
    corpus_digest: Word
    index_params: dict[str, ParamValue]
    shards: tuple[ShardEntry, ...]
    parent: Number = 0
    version: Number = 0
    created: Word = ""
    recall: int | float | None = None
    """Measured share of exact search's passages that the index finds; None for an exact index."""
    metrics: dict[str, int | float] = field(default_factory=dict)
    config_digest: Word = ""
    dirty_share: int | float | None = None
    """Share of passages whose views the operation changed."""
    refinement: dict[str, int | float] = field(default_factory=dict)
    """Parameters of this operation's feedback views: `feedback_weight`, and `feedback_clusters`, the most a passage."""
    refined_queries: dict[Name, Digest] = field(default_factory=dict)
    """Question set -> digest of its refined query vectors (`paths.refined_queries`)."""
    lexical: LexicalPart | None = None
    """The lexical index for hybrid search; None for a version without one."""
    token: Word = ""
    """Random, from the publisher: identifies its manifest if the reply to the creation is lost."""
    format_version: Literal[1, 2, 3] = 1

    def __repr__(self) -> str:
        """Name the version and its content; `shards` and other parts are attributes."""
        return (
            f"Manifest(index {self.index!r}, version {self.version} by {self.operation}, "
            f"{count_noun(self.num_passages, 'passage')} of corpus {self.corpus!r}, "
            f"{count_noun(self.num_vectors, 'vector')} of {self.dimension} ({self.dtype}) in "
            f"{count_noun(len(self.shards), 'shard')}, encoder {self.encoder_name}/{self.encoder_fingerprint})"
        )

    @property
    def num_passages(self) -> int:
        return sum(shard.num_passages for shard in self.shards)

    @property
    def num_vectors(self) -> int:
        return sum(shard.num_vectors for shard in self.shards)

    @property
    def num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self.shards)

    def content_digest(self) -> str:
        """Digest the content, without number, parent, time, operation, token and what a roll back replaced."""
        left_out = {"version", "parent", "created", "operation", "token"}
        metrics = {key: value for key, value in self.metrics.items() if key != REPLACED}
        fields = self._fields() | {"metrics": metrics, "format_version": FORMAT_VERSION}  # it follows from the shards
        return digest_of({key: value for key, value in fields.items() if key not in left_out})

    def _fields(self) -> dict[str, Any]:
        """Return all fields; `lexical` only if set, so that a version without keeps its earlier JSON form."""
        fields = dataclasses.asdict(self)
        return fields if self.lexical else {key: value for key, value in fields.items() if key != "lexical"}

    def to_json(self) -> bytes:
        """Write the manifest with a digest over all of it, which detects damage."""
        fields = self._fields()
        return (json.dumps({**fields, "digest": digest_of(fields)}, indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Self:
        try:
            fields = json.loads(data)
            format_version, digest = fields["format_version"], fields.pop("digest", None)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ManifestError(f"{where} is not a manifest ({error}); {_DAMAGE_CURE}") from error
        if format_version not in range(FORMAT_VERSION, NEWEST_FORMAT + 1):
            raise ManifestError(
                f"{where} has format version {format_version}, this program reads {FORMAT_VERSION} to "
                f"{NEWEST_FORMAT}; use the program that wrote it, or {_ROLL_BACK}"
            )
        if digest_of(fields) != digest:
            raise DigestError(f"{where} is damaged: its digest is not {digest}; {_DAMAGE_CURE}")
        try:
            return cls(**fields)
        except ValidationError as error:
            problems = describe_problems(error)
            raise ManifestError(f"{where} is not a manifest that this program reads: {problems}") from error


QUERIES, LEXICAL = -1, -2
"""The `shard` of a problem with refined queries, and of one with the words of a version."""


class Problem(NamedTuple):
    """A file of a version that differs from its entry in the manifest."""

    shard: int
    path: str
    reason: str
    cure: str = "mvr-ray versions CONFIG repair"


class VersionFile(NamedTuple):
    """A file that a version names: the number of its shard, or `LEXICAL`, and its path in the store."""

    shard: int
    path: str
    entry: FileEntry


class VerifyReport(NamedTuple):
    num_files: int
    num_bytes: int
    problems: list[Problem]

    def require(self) -> None:
        """Raise DigestError naming the first damaged file and its shard, if any, and what to do next."""
        if self.problems:
            shard, path, reason, cure = self.problems[0]
            raise DigestError(
                f"{count_noun(len(self.problems), 'problem')} in {count_noun(self.num_files, 'file')}; first: {path} "
                f"{f'of shard {shard} ' * (shard >= 0)}{reason}; next: {cure}"
            )


def add_shard(
    store: Store, index: str, folder: Path, meta: ShardMeta, entries: Mapping[str, FileEntry] | None = None
) -> ShardEntry:
    """Move a finished local folder to the name that its content gives it; an existing equal shard is reused.

    `entries` describes files that were checked before and are not read again.
    An existing shard of that name with other bytes is damaged; its damaged files are replaced. Raises FormatError, and
    changes nothing, if a newer program described it.
    """
    (folder / paths.SHARD_JSON).unlink(missing_ok=True)
    files_by_name = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    files = {n: (entries or {}).get(n) or FileEntry(p.stat().st_size, sha256_of(p)) for n, p in files_by_name.items()}
    description = {**meta._asdict(), "files": {name: dataclasses.asdict(file) for name, file in files.items()}}
    digest = digest_of(description)[:DIGEST_HEX]
    shard_json = (json.dumps(json_with_checksum({**description, FORMAT_KEY: FORMAT_VERSION}), indent=1) + "\n").encode()
    entry = ShardEntry(meta.shard, digest, meta.num_passages, meta.num_vectors, files)
    path = paths.shard_dir(index, digest)
    if store.exists(path):
        store.touch(path)
        is_described = store.exists(f"{path}/{paths.SHARD_JSON}") and not _check_description(store, index, entry)
        for problem in _damage(store, _shard_files(index, entry)):
            log.warning(
                "shard repaired: index=%s shard=%d file=%s (%s)", index, meta.shard, problem.path, problem.reason
            )
            store.put_file(folder / problem.path.removeprefix(f"{path}/"), problem.path)
        if not is_described:
            store.write_bytes(f"{path}/{paths.SHARD_JSON}", shard_json)
    store.upload_dir(folder, path, {paths.SHARD_JSON: shard_json})
    return entry


def open_shard(store: Store, index: str, entry: ShardEntry) -> Path:
    """Return a local folder with the shard's files. Reads each that has changed since this process read it, and raises
    DigestError if one has another digest, FormatError if a newer program described the shard."""
    remote = paths.shard_dir(index, entry.digest)
    folder = store.local_path(remote)
    if (description := folder / paths.SHARD_JSON).is_file():
        path = f"{remote}/{paths.SHARD_JSON}"
        store.open_copy(description, path, lambda file: _described_digest(file.read_bytes(), str(file)))
    for name, file in entry.files.items():
        _require_whole(store, folder / name, f"{remote}/{name}", file, f" of shard {entry.shard}")
    return folder


def add_refined_queries(store: Store, index: str, file: Path) -> str:
    """Move a file of refined query vectors to the name that its content gives it; returns its digest."""
    digest = sha256_of(file)[:DIGEST_HEX]
    store.put_file(file, paths.refined_queries(index, digest))
    return digest


def add_lexical(store: Store, index: str, file: Path) -> FileEntry:
    """Move a file of words to the name that its content gives it. A damaged one of that name is replaced."""
    entry = FileEntry(file.stat().st_size, sha256_of(file))
    path = lexical_path(index, entry)
    if store.damage(path, entry.num_bytes, entry.sha256):
        store.put_file(file, path)
    else:
        store.touch(path)
    return entry


def open_lexical(store: Store, index: str, files: Iterable[FileEntry]) -> list[Path]:
    """Return local files of words, checked as by `open_shard`."""
    remotes = [(entry, lexical_path(index, entry)) for entry in files]
    return [_require_whole(store, store.local_path(path), path, entry) for entry, path in remotes]


def _require_whole(store: Store, local: Path, path: str, entry: FileEntry, of_shard: str = "") -> Path:
    if not store.is_whole(local, path, entry.num_bytes, entry.sha256):
        raise DigestError(
            f"{local}{of_shard} is missing or damaged (its sha256 is not {entry.sha256}); "
            f"repair it: mvr-ray versions CONFIG repair [VERSION]"
        )
    return local


def lexical_path(index: str, entry: FileEntry) -> str:
    """Return the path of a file of words."""
    return paths.lexical(index, entry.sha256[:DIGEST_HEX])


def list_versions(store: Store, index: str) -> list[int]:
    """List the numbers of the versions, ascending. The last is live."""
    return sorted(int(name) for name in store.json_names(paths.index_dir(index, "versions")) if name.isdigit())


def find_versions(store: Store, index: str) -> list[int]:
    """List the numbers of the versions as `list_versions` does, although the listing may be outdated.

    Numbers are consecutive, and the lowest are deleted first: numbers that the listing lacks are looked up by name.
    Raises MissingInputError if the last listed version was deleted, since others then took its place.
    """
    if not (listing := list_versions(store, index)):
        return []
    if not store.exists(paths.manifest(index, listing[-1])):
        raise MissingInputError(
            f"{store.where(paths.manifest(index, listing[-1]))} is listed and not there: the list is out of date, or "
            f"another collection runs; run the same command again"
        )

    def exists(number: int) -> bool:
        return store.exists(paths.manifest(index, number))

    above = itertools.takewhile(exists, itertools.count(listing[-1] + 1))
    below = itertools.takewhile(exists, range(listing[0] - 1, 0, -1))
    between = filter(exists, set(range(listing[0], listing[-1])).difference(listing))
    return sorted([*listing, *above, *below, *between])


def read(store: Store, index: str, version: int | None = None) -> Manifest:
    """Read a version's manifest; the live one's when `version` is None."""
    versions = list_versions(store, index)
    if not versions:
        raise MissingInputError(f"index {index!r} has no version in {store.full_name}; make one: mvr-ray index CONFIG")
    if version is not None and version not in versions:
        raise MissingInputError(
            f"index {index!r} has no version {version!r} in {store.name}; there are {', '.join(map(str, versions))}"
        )
    return read_version(store, index, versions[-1] if version is None else version)


def live_corpus(store: Store, index: str) -> Corpus:
    """Open the corpus of the live version."""
    live = read(store, index)
    return Corpus.open(store, live.corpus, live.corpus_digest)


def read_version(store: Store, index: str, version: int) -> Manifest:
    """Read a version's manifest by its number, without a listing."""
    path = paths.manifest(index, version)
    manifest = Manifest.from_json(store.read_bytes(path), store.where(path))
    if (manifest.index, manifest.version) != (index, version):
        raise ManifestError(
            f"{store.where(path)} is the manifest of index {manifest.index!r} version {manifest.version}, copied or "
            f"moved here; put that of version {version} back, or roll back to another one"
        )
    return manifest


class Versions(NamedTuple):
    """The versions of an index by number: manifests, and the reason of each that this program cannot read."""

    manifests: dict[int, Manifest]
    problems: dict[int, str]


def read_versions(store: Store, index: str, numbers: Iterable[int]) -> Versions:
    """Read the versions of these numbers, ascending; those that were deleted meanwhile are left out."""
    versions, numbers = Versions({}, {}), list(numbers)

    def read_one(number: int) -> Manifest | str | None:
        try:
            return read_version(store, index, number)
        except MissingInputError:
            return None
        except StorageError as error:
            return str(error)

    for number, result in zip(numbers, store.for_each(read_one, numbers)):
        if isinstance(result, Manifest):
            versions.manifests[number] = result
        elif result is not None:
            versions.problems[number] = result
    return versions


def newest_first(store: Store, index: str, require_live: bool = True) -> Iterator[Manifest]:
    """Read the versions of an index. One that cannot be read (deleted meanwhile, damaged, of a newer program) is left
    out with a warning; the live one only without `require_live`, else its error is raised."""
    versions = list_versions(store, index)
    for number in reversed(versions):
        try:
            yield read_version(store, index, number)
        except (MissingInputError, StorageError) as error:
            if require_live and number == versions[-1]:
                raise
            log.warning("version left out: index=%s version=%d reason=%s", index, number, error)


def read_all(store: Store, index: str, require_live: bool = True) -> dict[int, Manifest]:
    """Read the versions that `newest_first` yields, in its order, several at once from an object store."""
    numbers = list_versions(store, index)[::-1]
    manifests, problems = read_versions(store, index, numbers)
    for number in (number for number in numbers if number not in manifests):
        if require_live and number == numbers[0]:
            manifests[number] = read_version(store, index, number)
        else:
            reason = problems.get(number, "deleted meanwhile")
            log.warning("version left out: index=%s version=%d reason=%s", index, number, reason)
    return {number: manifests[number] for number in numbers if number in manifests}


def latest_version(store: Store, index: str) -> int:
    """Return the live version's number, 0 where there is none."""
    return max(list_versions(store, index), default=0)


def _format_of(manifest: Manifest) -> int:
    words = (manifest.lexical.statistics, *manifest.lexical.postings) if manifest.lexical else ()
    if any(len(files) > 2 for files in words):
        return NEWEST_FORMAT
    return 2 if any(len(paths.changes_files(entry.files)) > 1 for entry in manifest.shards) else FORMAT_VERSION


def require_live(store: Store, index: str, version: int) -> None:
    """Raise PublishConflictError unless a version (0: none) is live, so that another may be published after it."""
    if (live := latest_version(store, index)) != version:
        raise _conflict(index, version + 1, live)


def publish(store: Store, manifest: Manifest) -> Manifest:
    """Make a manifest the live version: number `parent + 1`, where `parent` must be live now.

    Raises PublishConflictError if another publisher was faster; its version stays, and nothing of this one is visible.
    """
    index, version, live = manifest.index, manifest.parent + 1, manifest.parent
    require_live(store, index, live)
    _require_files(store, manifest, version)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    own = {"version": version, "created": now, "token": uuid.uuid4().hex, "format_version": _format_of(manifest)}
    manifest = dataclasses.replace(manifest, **own)
    path, data = paths.manifest(index, version), manifest.to_json()
    try:
        store.create_once(path, data)
    except OSError as error:
        try:
            is_there = store.holds(path, data, error)
        except StorageError as store_error:
            raise ManifestError(f"{store_error} (mvr-ray versions CONFIG list)") from error
        if is_there:
            log.warning("published in spite of an error: index=%s version=%d error=%s", index, version, error)
        elif isinstance(error, FileExistsError):
            raise _conflict(index, version, latest_version(store, index)) from None
        else:
            raise ManifestError(
                f"index {index!r} version {version} not published, {live} stays live: {error}"
            ) from error
    _withdraw_if_torn(store, manifest)
    log.info("published: index=%s version=%d passages=%d", index, version, manifest.num_passages)
    return manifest


def _withdraw_if_torn(store: Store, manifest: Manifest) -> None:
    """Publish the parent's content again if files vanished during a publish; raises ManifestError with the outcome."""
    if not (missing := _missing_files(store, manifest)):
        return
    index, parent = manifest.index, manifest.parent
    problem = (
        f"index {index!r} version {manifest.version} lost {count_noun(len(missing), 'file')} while it was published "
        f"(first: {store.where(missing[0])}), as when a clock jumps and `versions collect` runs"
    )
    if not parent:
        raise ManifestError(f"{problem}; no earlier version is there; run the same command again")
    try:
        version = read(store, index, parent)
        metrics = {REPLACED: 0, **version.metrics}  # no other passages: the next index is of the last published ones
        own = {"parent": manifest.version, "operation": ROLLBACK, "metrics": metrics}
        back = publish(store, dataclasses.replace(version, **own))
    except StorageError as error:
        live = latest_version(store, index)
        now = f"version {live} of another publisher is live" if live > manifest.version else "it is live, incomplete"
        raise ManifestError(
            f"{problem}; version {parent}'s content was not published after it ({error}); {now}. Never roll back to "
            f"version {manifest.version}; see `mvr-ray versions CONFIG verify`, and run the same command again"
        ) from error
    now = f"version {back.version} has version {parent}'s content again"
    raise ManifestError(f"{problem}; {now}; run the same command again")


def verify(store: Store, manifest: Manifest, *, sizes_only: bool = False) -> VerifyReport:
    """Read every file of a version and compare it with its digest; with `sizes_only`, those of shards and words with
    their sizes alone."""
    files = _files(manifest)
    problems = _damage(store, files, sizes_only)
    checks = store.for_each(lambda entry: _check_description(store, manifest.index, entry), manifest.shards)
    problems += itertools.chain.from_iterable(checks)
    num_bytes = sum(file.entry.num_bytes for file in files)
    for digest in manifest.refined_queries.values():
        path = paths.refined_queries(manifest.index, digest)
        size = store.size_bytes(path)
        num_bytes += max(size, 0)
        if size < 0:
            problems.append(Problem(QUERIES, path, "is missing"))
        elif not store.sha256(path).startswith(digest):
            problems.append(Problem(QUERIES, path, f"has another sha256 than {digest}"))
    return VerifyReport(len(files) + len(manifest.refined_queries), num_bytes, problems)


def rollback(store: Store, index: str, to: int) -> Manifest:
    """Publish a new version with the content of version `to`; only the sizes of its files are checked."""
    return publish(store, as_rollback(store, read(store, index, to), latest_version(store, index)))


def is_rolled_back(last: Corpus, live: Manifest) -> bool:
    """Return whether a roll back to the passages of the live version replaced the last corpus of a name."""
    if live.corpus != last.name or live.corpus_digest == last.digest:
        return False
    if REPLACED in live.metrics:
        number, corpus = live.metrics[REPLACED], last
        while corpus.number > number > 0 and corpus.info.parent not in ("", live.corpus_digest):
            before = corpus.publication_before()
            if before is None or before.digest != corpus.info.parent:
                return False
            corpus = before  # an update changed it that overtook the roll back
        return corpus.number <= number
    own = (paths.corpus_publication(last.name, last.number), paths.manifest(live.index, live.version))
    last_age_s, live_age_s = map(last.store.age_s, own)
    return live.operation == ROLLBACK and last_age_s >= live_age_s  # by a program that recorded no number


def as_rollback(store: Store, version: Manifest, live: int) -> Manifest:
    """Describe the version after the `live` one with the content of an earlier one. To other passages it replaces
    whatever was published last under the name of their corpus."""
    number = max(publications(store, version.corpus), default=0)
    for newest in read_versions(store, version.index, [live]).manifests.values():  # none if the live one is damaged
        if (version.corpus, version.corpus_digest) == (newest.corpus, newest.corpus_digest):
            number = newest.metrics.get(REPLACED, 0)
    metrics = {**version.metrics, REPLACED: number}
    return dataclasses.replace(version, parent=live, operation=ROLLBACK, metrics=metrics)


def _require_files(store: Store, manifest: Manifest, version: int) -> None:
    """Raise ManifestError unless every file of the manifest is there with its size; renew the age of what its parent,
    which is live now, does not name."""
    if manifest.lexical and len(manifest.lexical.postings) != len(manifest.shards):
        raise ManifestError(
            f"index {manifest.index!r} version {version} not published: it has {len(manifest.shards)} shards and the "
            f"words of {len(manifest.lexical.postings)}; index again: mvr-ray index CONFIG index.lexical=true"
        )
    if missing := _missing_files(store, manifest):
        num_files = len(_files(manifest)) + len(manifest.refined_queries)
        raise ManifestError(
            f"index {manifest.index!r} version {version} not published: {len(missing)} of {num_files} files "
            f"missing or cut short (first: {store.where(missing[0])}); run the same command again, it continues"
        )
    # What the parent names needs no new age, which on an object store is a copy: a collection deletes no path that a
    # version names right before, and the parent's manifest not before its successor is `grace_s` old. The parent was
    # live after this publication began, so a successor came later: this version, or another one, and then this one
    # fails. A new age would end at the same time: both protect a publication for `grace_s`. A collection that read the
    # versions before the parent was published finds the age that its publisher renewed then, or that of an ancestor
    # which was live at that time. The corpus is renewed always: collections read once which ones versions name.
    parents = read_versions(store, manifest.index, [manifest.parent]).manifests.values()  # none if it is damaged
    new_paths = named_paths(manifest).difference(*map(named_paths, parents))
    store.touch(*sorted(new_paths), paths.corpus_version(manifest.corpus, manifest.corpus_digest))


def _missing_files(store: Store, manifest: Manifest) -> list[str]:
    """List the paths of the manifest, and of the corpus that it names, that are missing or have another size."""
    missing = _missing(store, _files(manifest))
    queries = [paths.refined_queries(manifest.index, digest) for digest in manifest.refined_queries.values()]
    missing += [path for path in queries if store.size_bytes(path) < 0]
    if not manifest.corpus_digest:
        return missing
    try:
        return missing + Corpus.open(store, manifest.corpus, manifest.corpus_digest).missing_files()
    except (MissingInputError, StorageError):
        return [*missing, paths.corpus_version(manifest.corpus, manifest.corpus_digest)]


def missing_files(store: Store, index: str, entry: ShardEntry) -> list[str]:
    """List the paths of a shard's files that are missing or have another size."""
    return _missing(store, _shard_files(index, entry))


def _missing(store: Store, files: Sequence[VersionFile]) -> list[str]:
    sizes = store.for_each(lambda file: store.size_bytes(file.path), files)
    return [file.path for file, num_bytes in zip(files, sizes) if num_bytes != file.entry.num_bytes]


def named_paths(manifest: Manifest) -> set[str]:
    """Return the paths that a version names: folders of shards, files of refined queries and words."""
    shards = {paths.shard_dir(manifest.index, shard.digest) for shard in manifest.shards}
    queries = {paths.refined_queries(manifest.index, digest) for digest in manifest.refined_queries.values()}
    return shards | queries | {file.path for file in _files(manifest) if file.shard == LEXICAL}


def _files(manifest: Manifest) -> list[VersionFile]:
    """List the files of shards and words; those of refined queries have no entry."""
    words = manifest.lexical.files if manifest.lexical else ()
    files = [file for shard in manifest.shards for file in _shard_files(manifest.index, shard)]
    return files + [VersionFile(LEXICAL, lexical_path(manifest.index, entry), entry) for entry in words]


def _shard_files(index: str, shard: ShardEntry) -> list[VersionFile]:
    folder = paths.shard_dir(index, shard.digest)
    return [VersionFile(shard.shard, f"{folder}/{name}", entry) for name, entry in shard.files.items()]


def _damage(store: Store, files: Sequence[VersionFile], sizes_only: bool = False) -> list[Problem]:
    checks = [(file.path, file.entry.num_bytes, "" if sizes_only else file.entry.sha256) for file in files]
    reasons = store.for_each(lambda check: store.damage(*check), checks)
    return [Problem(file.shard, file.path, reason) for file, reason in zip(files, reasons) if reason]


def _check_description(store: Store, index: str, entry: ShardEntry) -> list[Problem]:
    """Compare the shard's description, where it is there, with the digest that names the shard's folder. Raises
    FormatError if a newer program wrote it."""
    path = f"{paths.shard_dir(index, entry.digest)}/{paths.SHARD_JSON}"
    if not store.exists(path) or _described_digest(store.read_bytes(path), store.where(path)) == entry.digest:
        return []
    return [Problem(entry.shard, path, f"does not describe the shard of digest {entry.digest}")]


def _described_digest(shard_json: bytes, where: str) -> str:
    """Return the digest of a shard's description without its format, which names the shard's folder; empty for a
    damaged description. Raises FormatError for one of a newer program."""
    try:
        fields = parse_json(shard_json, where)
    except StorageError:
        return ""
    require_format(fields, FORMAT_VERSION, where, _ROLL_BACK)
    fields.pop(FORMAT_KEY, None)
    return digest_of(fields)[:DIGEST_HEX]


def _conflict(index: str, version: int, live: int) -> PublishConflictError:
    return PublishConflictError(
        f"index {index!r} version {version} not published: version {live} is live; another publisher was first, "
        f"or this one started from an older version. Nothing was lost: run the same command again on version {live}"
    )


def digest_of(fields: Mapping[str, Any]) -> str:
    """Compute the sha256 of the canonical JSON, which is the same before writing and after reading."""
    try:
        text = json.dumps(fields, sort_keys=True, allow_nan=False)
    except (ValueError, TypeError) as error:
        raise ManifestError(f"a manifest holds finite numbers, texts, lists and objects only: {error}") from error
    return hashlib.sha256(text.encode()).hexdigest()
