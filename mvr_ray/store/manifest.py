"""Describes, publishes, opens, verifies and rolls back index versions.

A manifest is the whole truth about one version: immutable, created once under its number, naming shards by their
content. The live version is the highest. A shard folder is shared by all versions that name it and goes only when
none is left. `publish` follows a parent, so of two publishers with the same parent exactly one wins.
"""

import dataclasses
import hashlib
import json
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self

from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from mvr_ray.config.base import Name
from mvr_ray.errors import DigestError, ManifestError, MissingInputError, PublishConflictError, StorageError
from mvr_ray.store import paths
from mvr_ray.store.files import Store, sha256_of

log = logging.getLogger(__name__)

FORMAT_VERSION = 1
DIGEST_HEX = 32
READ_TRIES = 2
FIRST_PAUSE_S = 0.1

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
    """What a builder knows about the shard that it finished."""

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


@dataclass(frozen=True, config=_CONFIG)
class Manifest:
    """One index version, in the store and over HTTP. `version` 0 stands for one that is not published yet; `parent` 0
    for no parent."""

    index: Name
    operation: Word
    """index, refine:METHOD or rollback."""
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
    """What this operation made feedback views with: `feedback_weight`, and `feedback_clusters`, the most a passage."""
    refined_queries: dict[Name, Digest] = field(default_factory=dict)
    """Question set -> digest of its moved query vectors (`paths.refined_queries`)."""
    token: Word = ""
    """Made by the publisher, at random: by it a manifest whose creation went unanswered is known as one's own."""
    format_version: Literal[1] = 1

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
        """Equal for equal content, whenever and as whichever version it was published."""
        left_out = {"version", "parent", "created", "operation", "token"}
        fields = {key: value for key, value in dataclasses.asdict(self).items() if key not in left_out}
        return digest_of(fields)

    def to_json(self) -> bytes:
        """The manifest with a digest over all of it, so that a damaged one is noticed."""
        fields = dataclasses.asdict(self)
        return (json.dumps({**fields, "digest": digest_of(fields)}, indent=1, ensure_ascii=False) + "\n").encode()

    @classmethod
    def from_json(cls, data: bytes, where: str) -> Self:
        try:
            fields = json.loads(data)
            format_version, written = fields["format_version"], fields.pop("digest")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ManifestError(f"{where} is not a manifest ({error}); publish again or roll back") from error
        if format_version != FORMAT_VERSION:
            raise ManifestError(
                f"{where} has format version {format_version}, this program reads {FORMAT_VERSION}; "
                f"use the program that wrote it, or roll back: mvr-ray versions CONFIG rollback N"
            )
        if digest_of(fields) != written:
            raise DigestError(f"{where} is damaged: its digest is not {written}; publish again or roll back")
        try:
            return cls(**fields)
        except (TypeError, ValidationError) as error:
            raise ManifestError(f"{where} is not a manifest that this program reads: {error}") from error


class Problem(NamedTuple):
    """A file of a version that is not what the manifest says."""

    shard: int
    path: str
    reason: str


class VerifyReport(NamedTuple):
    num_files: int
    num_bytes: int
    problems: list[Problem]

    def require(self) -> None:
        """DigestError naming the first damaged file and its shard, if any."""
        if self.problems:
            shard, path, reason = self.problems[0]
            raise DigestError(
                f"{len(self.problems)} of {self.num_files} files damaged; first: {path} "
                f"{f'of shard {shard} ' * (shard >= 0)}{reason}; repair it: mvr-ray versions CONFIG repair"
            )


def add_shard(
    store: Store, index: str, folder: Path, meta: ShardMeta, known: Mapping[str, FileEntry] | None = None
) -> ShardEntry:
    """Move a finished local folder to the name that its content gives it. An equal shard that is there is reused.

    `known` describes files that were found whole before and are not read again.
    A shard there under that name with other bytes is damaged; its files are replaced by the given ones.
    """
    (folder / paths.SHARD_JSON).unlink(missing_ok=True)
    files_by_name = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    files = {n: (known or {}).get(n) or FileEntry(p.stat().st_size, sha256_of(p)) for n, p in files_by_name.items()}
    described = {**meta._asdict(), "files": {name: dataclasses.asdict(file) for name, file in files.items()}}
    digest = digest_of(described)[:DIGEST_HEX]
    told = (json.dumps(described, indent=1) + "\n").encode()
    entry = ShardEntry(meta.shard, digest, meta.num_passages, meta.num_vectors, files)
    path = paths.shard_dir(index, digest)
    if store.exists(path):
        store.touch(path)
        for problem in _check_shard(store, index, entry).problems:
            log.warning("shard repaired: index=%s shard=%d file=%s (%s)", index, meta.shard, *problem[1:])
            store.put_file(folder / problem.path.removeprefix(f"{path}/"), problem.path)
        if not store.exists(f"{path}/{paths.SHARD_JSON}"):
            store.write_bytes(f"{path}/{paths.SHARD_JSON}", told)
    store.upload_dir(folder, path, {paths.SHARD_JSON: told})
    return entry


def open_shard(store: Store, index: str, entry: ShardEntry) -> Path:
    """A local folder with the shard's files, each read once and found equal to its digest, else DigestError."""
    remote = paths.shard_dir(index, entry.digest)
    folder = store.local_path(remote)
    for name, file in entry.files.items():
        path = folder / name
        if not store.is_local and path.is_file() and not _equals(path, file):
            path.unlink()
            store.local_path(f"{remote}/{name}")
        if not _equals(path, file):
            raise DigestError(
                f"{path} of shard {entry.shard} is missing or damaged (its sha256 is not {file.sha256}); "
                f"repair it: mvr-ray versions CONFIG repair"
            )
    return folder


def add_refined_queries(store: Store, index: str, file: Path) -> str:
    """Move a file of moved query vectors to the name that its content gives it; returns its digest."""
    digest = sha256_of(file)[:DIGEST_HEX]
    store.put_file(file, paths.refined_queries(index, digest))
    return digest


def list_versions(store: Store, index: str) -> list[int]:
    """Numbers of the versions that are there, ascending. The last is live."""
    stems = (name.removesuffix(".json") for name in store.list(paths.versions_dir(index)) if name.endswith(".json"))
    return sorted(int(stem) for stem in stems if stem.isdigit())


def read(store: Store, index: str, version: int | None = None) -> Manifest:
    """A version's manifest; the live one's when no version is named."""
    versions = list_versions(store, index)
    if not versions:
        raise MissingInputError(f"index {index!r} has no version in {store.name}; make one: mvr-ray index CONFIG")
    if version is not None and version not in versions:
        raise MissingInputError(
            f"index {index!r} has no version {version} in {store.name}; there are {', '.join(map(str, versions))}"
        )
    path = paths.manifest(index, versions[-1] if version is None else version)
    return Manifest.from_json(store.read_bytes(path), store.where(path))


def latest_version(store: Store, index: str) -> int:
    """The live version's number, 0 where there is none."""
    return max(list_versions(store, index), default=0)


def publish(store: Store, manifest: Manifest) -> Manifest:
    """Make a manifest the live version: number `parent + 1`, where `parent` must be live now.

    PublishConflictError if another publisher was faster; then nothing of ours is visible, and its version stays.
    """
    index, version = manifest.index, manifest.parent + 1
    live = latest_version(store, index)
    if live != manifest.parent:
        raise _conflict(index, version, live)
    _require_files(store, manifest, version)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    published = dataclasses.replace(manifest, version=version, created=created, token=uuid.uuid4().hex)
    path, data = paths.manifest(index, version), published.to_json()
    try:
        store.create_once(path, data)
    except ManifestError:
        raise
    except OSError as error:
        # It may have been created all the same, by a try whose answer was lost: what is there decides, not the error.
        if _is_there(store, path, data, error):
            log.warning("published in spite of an error: index=%s version=%d error=%s", index, version, error)
        elif isinstance(error, FileExistsError):
            raise _conflict(index, version, latest_version(store, index)) from None
        else:
            raise ManifestError(
                f"index {index!r} version {version} not published, {live} stays live: {error}"
            ) from error
    _withdraw_if_torn(store, published)
    log.info("published: index=%s version=%d passages=%d", index, version, published.num_passages)
    return published


def _withdraw_if_torn(store: Store, published: Manifest) -> None:
    """Where files went since they were looked at, what was live comes back; ManifestError says so, or why not."""
    if not (lost := _missing_files(store, published)):
        return
    index, parent = published.index, published.parent
    torn = (
        f"index {index!r} version {published.version} lost {len(lost)} files while it was published (first: "
        f"{store.where(lost[0])}), as when a clock leaps and `versions collect` runs"
    )
    if not parent:
        raise ManifestError(f"{torn}; no earlier version is there; run the same command again")
    try:
        back = publish(store, dataclasses.replace(read(store, index, parent), parent=published.version))
    except StorageError as error:
        live = latest_version(store, index)
        now = f"version {live} of another publisher is live" if live > published.version else "it is live, and torn"
        raise ManifestError(
            f"{torn}; version {parent}'s content was not published after it ({error}); {now}. Never roll back to "
            f"version {published.version}; see `mvr-ray versions CONFIG verify`, and run the same command again"
        ) from error
    now = f"version {back.version} has version {parent}'s content again"
    raise ManifestError(f"{torn}; {now}; run the same command again")


def _is_there(store: Store, path: str, data: bytes, error: OSError) -> bool:
    """Whether `data` came to be at `path`. ManifestError where that cannot be read either."""
    failed = error
    for attempt in range(READ_TRIES):
        try:
            return store.exists(path) and store.read_bytes(path) == data
        except MissingInputError:
            return False
        except OSError as unread:
            failed = unread
            time.sleep(FIRST_PAUSE_S * 2**attempt)
    raise ManifestError(
        f"whether {store.where(path)} was published is not known: creating it failed ({error}), and so did reading it "
        f"({failed}). When the store answers again: mvr-ray versions CONFIG list; if it is not there, run the same "
        f"command again"
    )


def verify(store: Store, manifest: Manifest) -> VerifyReport:
    """Read every file of a version and compare it with its digest."""
    reports = [_check_shard(store, manifest.index, entry) for entry in manifest.shards]
    num_files = sum(report.num_files for report in reports)
    num_bytes = sum(report.num_bytes for report in reports)
    problems = [problem for report in reports for problem in report.problems]
    for digest in manifest.refined_queries.values():
        path = paths.refined_queries(manifest.index, digest)
        size = store.size_bytes(path)
        num_files, num_bytes = num_files + 1, num_bytes + max(size, 0)
        if size < 0:
            problems.append(Problem(-1, path, "is missing"))
        elif not store.sha256(path).startswith(digest):
            problems.append(Problem(-1, path, f"has another sha256 than {digest}"))
    return VerifyReport(num_files, num_bytes, problems)


def rollback(store: Store, index: str, to: int) -> Manifest:
    """Publish a new version with the content of version `to`."""
    live = latest_version(store, index)
    return publish(store, dataclasses.replace(read(store, index, to), parent=live, operation="rollback"))


def _require_files(store: Store, manifest: Manifest, version: int) -> None:
    """Every file that the manifest names is there with its size; its folders are made young."""
    missing = _missing_files(store, manifest)
    if missing:
        raise ManifestError(
            f"index {manifest.index!r} version {version} not published: {len(missing)} of {_num_files(manifest)} files "
            f"missing or cut short (first: {store.where(missing[0])}); run the same command again, it continues"
        )
    for shard in manifest.shards:
        store.touch(paths.shard_dir(manifest.index, shard.digest))


def _missing_files(store: Store, manifest: Manifest) -> list[str]:
    """Paths that the manifest names and that are not there with their size."""
    wanted = [
        (f"{paths.shard_dir(manifest.index, shard.digest)}/{name}", file.num_bytes)
        for shard in manifest.shards
        for name, file in shard.files.items()
    ]
    missing = [path for path, num_bytes in wanted if store.size_bytes(path) != num_bytes]
    refined = [paths.refined_queries(manifest.index, digest) for digest in manifest.refined_queries.values()]
    return missing + [path for path in refined if store.size_bytes(path) < 0]


def _num_files(manifest: Manifest) -> int:
    return sum(len(shard.files) for shard in manifest.shards) + len(manifest.refined_queries)


def _check_shard(store: Store, index: str, entry: ShardEntry) -> VerifyReport:
    problems: list[Problem] = []
    for name, file in entry.files.items():
        path = f"{paths.shard_dir(index, entry.digest)}/{name}"
        size = store.size_bytes(path)
        if size < 0:
            problems.append(Problem(entry.shard, path, "is missing"))
        elif size != file.num_bytes:
            problems.append(Problem(entry.shard, path, f"has {size} bytes, not {file.num_bytes}"))
        elif store.sha256(path) != file.sha256:
            problems.append(Problem(entry.shard, path, f"has another sha256 than {file.sha256}"))
    return VerifyReport(len(entry.files), entry.num_bytes, problems)


def _equals(path: Path, file: FileEntry) -> bool:
    return path.is_file() and path.stat().st_size == file.num_bytes and sha256_of(path) == file.sha256


def _conflict(index: str, version: int, live: int) -> PublishConflictError:
    return PublishConflictError(
        f"index {index!r} version {version} not published: version {live} is live; another publisher was first, "
        f"or this one started from an older version. Nothing was lost: run the same command again on version {live}"
    )


def digest_of(fields: Mapping[str, Any]) -> str:
    """sha256 of the canonical JSON, which is the same before a value is written and after it is read."""
    try:
        text = json.dumps(fields, sort_keys=True, allow_nan=False)
    except (ValueError, TypeError) as error:
        raise ManifestError(f"a manifest holds finite numbers, texts, lists and objects only: {error}") from error
    return hashlib.sha256(text.encode()).hexdigest()
