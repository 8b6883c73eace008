"""Lists, publishes and rolls back the versions of one index.

    manifest  ->  every file has its digest  ->  the parent is the newest version  ->  published, and live

Reading an index takes longer than a request may. The job therefore continues after the request's deadline, and the same
request sent again waits for it, or gets its result: a manifest that is published already is answered by its version,
and never published twice. Of two publishers that follow the same version one wins, and the other gets an error.
"""

import dataclasses
import json
import logging
import math
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from mvr_ray.deadline import Deadline
from mvr_ray.errors import (
    AccessError,
    DigestError,
    FormatError,
    ManifestError,
    MissingInputError,
    MvrRayError,
    PublishConflictError,
    StorageError,
)
from mvr_ray.index.base import IndexParams
from mvr_ray.index.kinds import check_params
from mvr_ray.serving.schemas import RequestError, RequestModel, ShardContent, VersionDetail
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.delta import open_embeddings
from mvr_ray.store.embeddings import SCHEMA_BYTES, dimension_of
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import DIGEST_HEX, ROLLBACK, Manifest, Number, ShardEntry, Word, digest_of
from mvr_ray.versions import VersionInfo, encoder_damage, list_versions, version_info

log = logging.getLogger(__name__)

RETRY_S = 2
MEMORY_S = 60.0
"""Time for which the result of a job is kept for a repeated request; after that the files are read again."""
_SOURCE = "send a manifest as it lies in the store, indexes/<name>/versions/<n>.json"
_NOT_READABLE = "not_readable", "give the server read access to all of the store's files"
UNREADABLE = DigestError, ManifestError
"""Errors of a manifest that is damaged or a newer program's."""


@dataclass(frozen=True, config=RequestModel.model_config)
class ManifestPayload(Manifest):
    """A manifest in a request. Its `version`, `created` and `token` are replaced when it is published."""

    shards: Annotated[tuple[ShardEntry, ...], Field(min_length=1)]
    digest: Word | None = None
    """Over all other fields, as the store's file has it; absent: not checked."""


class PublishRequest(RequestModel):
    manifest: ManifestPayload
    parent: Number | None = None
    """The version that must be the newest one now (0: there is none yet); absent: the manifest's own parent. Of two
    publishers with the same parent, the first wins."""


class VersionCatalog:
    """The versions of `index` in a store. Safe to use from several threads."""

    def __init__(self, store: Store, index: str) -> None:
        self.store = store
        self.index = index
        self._lock = threading.Lock()
        self._job: _PublishJob | None = None

    def all(self) -> list[VersionInfo]:
        """List every version, ascending; the last is live."""
        return list_versions(self.store, self.index)

    def one(self, version: int) -> VersionDetail:
        """Describe a version. Raises RequestError: 404 for one that does not exist, 422 for one that cannot be read."""
        live = self._require(version)
        manifest = self.read(version)
        shards = [
            ShardContent(
                shard=e.shard, digest=e.digest, passages=e.num_passages, vectors=e.num_vectors, bytes=e.num_bytes
            )
            for e in manifest.shards
        ]
        parts = vars(manifest) | dict(version_info(manifest, version == live))
        fields: dict[str, str] = {}
        with suppress(MissingInputError, StorageError):  # a version of an earlier program may own no corpus
            fields = Corpus.open(self.store, manifest.corpus, manifest.corpus_digest).info.fields
        return VersionDetail.model_validate(parts | {"shard_list": shards, "fields": fields})

    def rollback(self, version: int, deadline: Deadline) -> VersionInfo:
        """Publish that version's content as a new version, which is then live; sent again, even to another server, it
        is published once: a live version that is such a rollback is the answer.

        Raises RequestError: 404 for a version that does not exist, 422 if its manifest cannot be read or a file of it,
        the corpus or the encoder does not match it, 503 while files are being read. PublishConflictError if another
        publisher was first.
        """
        self._require(version)
        manifest = self.read(version)
        with self._lock:
            job, is_done = self._job_now()
            live = manifests.latest_version(self.store, self.index)
            is_same = job is not None and job.was_published and job.key[0] == manifest.content_digest()
            if job is None or not is_same or (is_done and not job.is_of(live)):
                for newest in manifests.read_versions(self.store, self.index, [live]).manifests.values():
                    if newest.operation == ROLLBACK and newest.content_digest() == manifest.content_digest():
                        return self._info(newest)
                manifest = manifests.as_rollback(self.store, manifest, live)
                job = self._start(_PublishJob(self.store, manifest, was_published=True))
        return self._result(job, deadline)

    def publish(self, request: PublishRequest, deadline: Deadline) -> VersionInfo:
        """Publish a manifest whose files are in the store, or return the version that has its content.

        Raises RequestError: 422 if a file, the corpus or the encoder does not match the manifest, 503 while files are
        being read. PublishConflictError if its parent is not the newest version.
        """
        manifest = check_payload(request.manifest, self.index)
        if request.parent is not None:
            manifest = dataclasses.replace(manifest, parent=request.parent)
        with self._lock:
            job, _ = self._job_now()
            if job is None or job.key != (manifest.content_digest(), manifest.parent):
                if version := published_version(self.store, manifest):
                    return self._info(version)
                live = manifests.latest_version(self.store, self.index)
                if live != manifest.parent:
                    raise PublishConflictError(
                        f"index {self.index!r} version {manifest.parent + 1} not published: version {live} is live, "
                        f"not {manifest.parent}; check it, then send the request with parent {live} to follow it"
                    )
                job = self._start(_PublishJob(self.store, manifest, was_published=False))
        return self._result(job, deadline)

    def _job_now(self) -> tuple["_PublishJob | None", bool]:
        """Return the job whose result was not returned yet, and whether it is done. Read it before the live version."""
        if self._job is None or self._job.is_over():
            return None, True
        return self._job, self._job.result.done()

    def _start(self, job: "_PublishJob") -> "_PublishJob":
        """Start a job, while `_lock` is held. Raises RequestError (503) while another job runs."""
        if not self._job_now()[1]:
            raise _busy("another version is being published here", "ask again when it is done")
        self._job = job
        threading.Thread(target=job.run, name="mvr-publish", daemon=True).start()
        return job

    def _result(self, job: "_PublishJob", deadline: Deadline) -> VersionInfo:
        """Wait for a job's version. Raises RequestError: 503 if the deadline ends before the job, 403 if this process
        may not write to the store."""
        wait([job.result], timeout=deadline.left_s)
        if not job.result.done():
            progress = f"{job.num_whole} of {len(job.manifest.shards)} shards were found whole so far"
            raise _busy(f"the files of this version are being read; {progress}", "send the same request again")
        with self._lock:
            if self._job is job:  # a third request reads the files again
                self._job = None
        hint = "give the server write access to the store, or publish with a process that has it"
        with _access_refused("not_writable", hint):
            return self._info(job.result.result())

    def _info(self, version: Manifest) -> VersionInfo:
        return version_info(version, version.version == manifests.latest_version(self.store, self.index))

    def read(self, version: int, field: str = "n") -> Manifest:
        """Read a manifest. Raises RequestError (422) for one that is damaged or a newer program's, named by `field`."""
        try:
            return manifests.read(self.store, self.index, version)
        except UNREADABLE as error:
            hint = "roll back to a version that can be read, or see `mvr-ray versions CONFIG verify`"
            raise RequestError(422, "unreadable_version", field, str(error), hint) from None

    def _require(self, version: int) -> int:
        """Return the live version's number. Raises RequestError (404) if `version` does not exist."""
        numbers = manifests.list_versions(self.store, self.index)
        if version not in numbers:
            number = f"{version}" if abs(version) < 10**12 else "of that number"
            have = f"there are {', '.join(map(str, numbers[-20:]))}" if numbers else "there is none yet"
            message = f"index {self.index!r} has no version {number}"
            raise RequestError(404, "unknown_version", "n", message, f"{have}; see GET /v1/versions")
        return numbers[-1]


@contextmanager
def _access_refused(code: str, hint: str) -> Iterator[None]:
    """Raise RequestError (403) where this process may not read or write a file of the store."""
    try:
        yield
    except AccessError as error:
        raise RequestError(403, code, "", str(error), hint) from None


@dataclasses.dataclass(eq=False)
class _PublishJob:
    """Reads every file that one manifest names, then publishes it."""

    store: Store
    manifest: Manifest
    was_published: bool
    """The content is that of an existing version, whose counts are correct."""
    result: Future[Manifest] = dataclasses.field(default_factory=Future)
    _whole_shards: list[int] = dataclasses.field(default_factory=list)
    """Shards checked so far, by several threads."""
    _end_s: float = math.inf

    def __post_init__(self) -> None:
        self.key = (self.manifest.content_digest(), self.manifest.parent)

    @property
    def num_whole(self) -> int:
        return len(self._whole_shards)

    def is_of(self, live: int) -> bool:
        """Return whether the result is the live version, or the reason why the job could not follow it."""
        return self.key[1] == live if self.result.exception() else self.result.result().version == live

    def is_over(self) -> bool:
        return time.monotonic() - self._end_s > MEMORY_S

    def run(self) -> None:
        try:
            self.result.set_result(self._check_and_publish())
        except BaseException as error:  # noqa: BLE001 - `_result` raises it
            self.result.set_exception(error)
        self._end_s = time.monotonic()

    def _check_and_publish(self) -> Manifest:
        manifest = self.manifest
        rest = dataclasses.replace(manifest, shards=(), refined_queries={}, lexical=None)

        def check(number: int) -> None:
            entry = manifest.shards[number]
            self._check_shard(entry, dataclasses.replace(rest, shards=(entry,)), f"manifest.shards.{number}")
            self._whole_shards.append(number)

        self.store.for_each(check, range(len(manifest.shards)))
        for field in ("refined_queries", "lexical"):
            self._check_files(dataclasses.replace(rest, **{field: getattr(manifest, field)}), f"manifest.{field}")
        self._check_sources()
        try:
            version = manifests.publish(self.store, self.manifest)
        except PublishConflictError:
            if version := published_version(self.store, self.manifest):
                return version
            raise
        log.info("published by request: index=%s version=%d", version.index, version.version)
        return version

    def _check_shard(self, entry: ShardEntry, part: Manifest, field: str) -> None:
        folder = paths.shard_dir(self.manifest.index, entry.digest)
        if not self.store.exists(folder):
            raise _not_whole(field, f"{folder} is missing")
        self.store.touch(folder)  # so that a concurrent collection keeps it
        self._check_files(part, field)
        if self.was_published:
            return
        try:
            counts = self._counts(folder, entry)
        except StorageError as error:
            raise _not_whole(field, str(error)) from None
        expected = (self.manifest.dimension, entry.num_passages, entry.num_vectors)
        if counts != expected:
            text = "dimension {}, {} passages and {} views"
            raise _not_whole(field, f"its embeddings have {text.format(*counts)}, not {text.format(*expected)}")

    def _counts(self, folder: str, entry: ShardEntry) -> tuple[int, int, int]:
        """Return dimension, passages and views of a whole shard. From an object store its embeddings are not fetched:
        the description there is that of the entry's digest, so that it has the entry's counts."""
        path = f"{folder}/{paths.EMBEDDINGS}"
        if not self.store.is_local and self.store.exists(f"{folder}/{paths.SHARD_JSON}"):
            start = self.store.read_bytes(path, SCHEMA_BYTES)
            return dimension_of(start, self.store.where(path)), entry.num_passages, entry.num_vectors
        shard = open_embeddings(self.store.local_path(folder), entry.files)
        return shard.dimension, shard.num_passages, shard.num_vectors

    @_access_refused(*_NOT_READABLE)
    def _check_files(self, part: Manifest, field: str) -> None:
        try:
            for problem in manifests.verify(self.store, part).problems:
                raise _not_whole(field, f"{problem.path} {problem.reason}")
        except FormatError as error:
            raise _not_whole(field, str(error)) from None

    @_access_refused(*_NOT_READABLE)
    def _check_sources(self) -> None:
        """Raise RequestError (422) unless encoder and corpus of the version, which searches need, are whole here."""
        manifest, hint = self.manifest, "copy its folder there, too"
        for problem in encoder_damage(self.store, manifest):
            message = f"{problem.path} {problem.reason}"
            raise RequestError(422, "no_encoder", "manifest.encoder_fingerprint", message, problem.cure)
        try:
            for path, reason in Corpus.open(self.store, manifest.corpus, manifest.corpus_digest).verify().damage:
                raise RequestError(422, "no_corpus", "manifest.corpus_digest", f"{path} {reason}", hint)
        except AccessError:
            raise
        except (MissingInputError, StorageError) as error:
            raise RequestError(422, "no_corpus", "manifest.corpus_digest", str(error), hint) from None


def published_version(store: Store, manifest: Manifest) -> Manifest | None:
    """Return the version after the manifest's parent if it has the same content: the publisher's reply was lost. What
    cannot be read has another content."""
    try:
        version = manifests.read_version(store, manifest.index, manifest.parent + 1)
    except (MissingInputError, *UNREADABLE):
        return None
    return version if version.content_digest() == manifest.content_digest() else None


def check_payload(payload: ManifestPayload, index: str) -> Manifest:
    """Return the manifest to publish in `index`. Raises RequestError for an invalid one."""
    manifest = Manifest(**{field.name: getattr(payload, field.name) for field in dataclasses.fields(Manifest)})
    if payload.digest is not None and json.loads(manifest.to_json())["digest"] != payload.digest:
        message = "the manifest's digest is not that of its fields: it is damaged, or was changed"
        raise RequestError(422, "wrong_digest", "manifest.digest", message, _SOURCE)
    if manifest.index != index:
        message = f"the manifest is of index {manifest.index!r}, this server answers from index {index!r}"
        raise RequestError(422, "wrong_index", "manifest.index", message, "send it to a server of that index")
    for place, entry in enumerate(manifest.shards):
        field = f"manifest.shards.{place}"
        if entry.shard != place:
            message, hint = f"shard {entry.shard} is at place {place}", "name every shard once, from 0 on, in order"
            raise RequestError(422, "wrong_value", f"{field}.shard", message, hint)
        if paths.EMBEDDINGS not in entry.files:
            raise RequestError(422, "wrong_value", f"{field}.files", f"the shard has no {paths.EMBEDDINGS}", _SOURCE)
        content = {name: value for name, value in dataclasses.asdict(entry).items() if name != "digest"}
        if digest_of(content)[:DIGEST_HEX] != entry.digest:
            message = f"{entry.digest} is not the digest of the shard's counts and files"
            raise RequestError(422, "wrong_digest", f"{field}.digest", message, _SOURCE)
    try:
        check_params(IndexParams(**manifest.index_params), manifest.dimension)
    except (MvrRayError, TypeError) as error:
        raise RequestError(422, "wrong_value", "manifest.index_params", str(error), _SOURCE) from None
    return manifest


def _not_whole(field: str, message: str) -> RequestError:
    hint = "copy the shard's folder into the store again, then send the same request"
    return RequestError(422, "not_whole", field, message, hint)


def _busy(message: str, hint: str) -> RequestError:
    return RequestError(503, "publishing", "", message, hint, retry_after_s=RETRY_S)
