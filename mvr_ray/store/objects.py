"""Read and write the files of a store on an object store: `s3://` or `gs://`, by obstore.

An object appears whole when its upload ends. `create_once` is one conditional PUT. Whether the service honours the
condition is checked once for each opened store, by creating one object twice; a service that does not is refused, since
two publishers could overwrite each other. A failed PUT may have taken effect: the object is read before deciding.

    s3://[KEY:SECRET@]BUCKET/PREFIX[?region=...&endpoint_override=HOST:PORT&scheme=http]
    gs://[anonymous@]BUCKET/PREFIX[?endpoint_override=HOST:PORT&scheme=http]

Without keys in the address those of the environment are used, then those that boto3 finds if it is installed
(profiles), then those of the machine or pod.
"""

import contextlib
import hashlib
import importlib.util
import os
import random
import re
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

import obstore
import pyarrow.fs
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import GCSStore, ObjectStore, S3Store

from mvr_ray.errors import ConfigError, StorageError
from mvr_ray.store.object_cache import make_room, mark_used, translate_copy_errors

if TYPE_CHECKING:
    from obstore import ObjectMeta

PROBE = ".conditional"
TOUCHED = ".touched"
"""Folder of short-lived copies, which no listing of a folder shows."""
CREATE_TRIES = 5
FIRST_PAUSE_S = 0.1
SETTLED_S = 5.0
CHUNK_BYTES = 1 << 20
PIECE_BYTES, PIECES_AT_ONCE = 64 << 20, 8
"""Of downloads."""
MAX_COPY_BYTES = 5 << 30
"""The largest object that S3 copies in one request."""
MIN_PART_BYTES, MAX_PARTS = 8 << 20, 10_000
"""Of uploads in parts, as S3 takes them."""
CLIENT: Any = {"allow_http": True, "timeout": "1day", "read_timeout": "60s"}
"""A service that is silent for a minute has failed; a large object may take longer than that to arrive."""
RETRY: Any = {"max_retries": 4, "retry_timeout": timedelta(seconds=30)}
OPTIONS = ("region", "scheme", "endpoint_override", "force_virtual_addressing")
UNUSED_OPTIONS = (
    *("allow_bucket_creation", "allow_bucket_deletion"),
    *("background_writes", "project_id", "retry_limit_seconds"),
)
"""Options that addresses may have, and that are ignored."""


def open_address(address: str) -> ObjectStore:
    """Open the service, bucket and prefix of an address. Raises ConfigError for one that names none."""
    parts = urlsplit(address)
    if parts.scheme not in ("s3", "gs"):
        scheme = address.partition("://")[0]
        raise ConfigError(f"{scheme}:// is no store; give a folder, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX")
    user, _, bucket = parts.netloc.rpartition("@")
    if not bucket:
        raise ConfigError(f"an address of {parts.scheme}:// names no bucket; write {parts.scheme}://BUCKET/PREFIX")
    options = dict(parse_qsl(parts.query))
    if unknown_options := sorted(set(options) - {*OPTIONS, *UNUSED_OPTIONS}):
        raise ConfigError(
            f"{parts.scheme}://{bucket} has an unknown option {unknown_options[0]!r}; known: {', '.join(OPTIONS)}"
        )
    host = options.get("endpoint_override", "")
    endpoint = host if not host or "://" in host else f"{options.get('scheme', 'https')}://{host}"
    common: dict[str, Any] = {"prefix": parts.path.strip("/"), "client_options": CLIENT, "retry_config": RETRY}
    if parts.scheme == "gs":
        own = ({"skip_signature": True} if user == "anonymous" else {}) | ({"base_url": endpoint} if endpoint else {})
        return GCSStore(bucket, **common, **own)
    virtual = options.get("force_virtual_addressing", "").lower() == "true"
    own = _s3_settings(bucket, user, endpoint, options.get("region", ""))
    return S3Store(bucket, virtual_hosted_style_request=virtual, **common, **own)


def _s3_settings(bucket: str, user: str, endpoint: str, region: str) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    key, _, secret = user.partition(":")
    if key:
        settings |= {"access_key_id": unquote(key), "secret_access_key": unquote(secret)}
    elif not os.environ.get("AWS_ACCESS_KEY_ID") and importlib.util.find_spec("boto3"):
        from obstore.auth.boto3 import Boto3CredentialProvider

        with contextlib.suppress(ValueError):  # no keys; the machine or pod may have some
            settings["credential_provider"] = Boto3CredentialProvider()
    if endpoint:
        settings["endpoint"] = endpoint
    elif not (region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        region = pyarrow.fs.resolve_s3_region(bucket)
    return settings | ({"region": region} if region else {})


def reason_of(error: BaseException | None) -> str:
    """Return the message of an error in one line, with the service's answer, XML of several lines, and without the dump
    that obstore adds."""
    text = str(error).partition("Debug source:")[0]
    return " ".join(re.sub(r"<\?xml.*?\?>", "", text).split()) or type(error).__name__


def _part_bytes(num_bytes: int) -> int:
    """Return the size of an upload's parts, so that there are not too many."""
    return max(MIN_PART_BYTES, -(-num_bytes // MAX_PARTS))


def _without_folders(path: str, listing: "Sequence[ObjectMeta]") -> "Sequence[ObjectMeta]":
    """Return the listing of a path without the empty objects of names with a last `/` that other programs make for
    folders. Listings show these without the `/`."""
    folders = {path}
    for meta in listing:
        folder = meta["path"]
        while (folder := folder.rpartition("/")[0]) not in folders:
            folders.add(folder)
    return [meta for meta in listing if meta["size"] or meta["path"] not in folders]


class ObjectFiles:
    """The operations of `files.Store` under one address; the store checks paths and converts errors."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._is_conditional = False

    def read(self, path: str, max_bytes: int | None = None) -> bytes:
        own: Any = {"options": {"range": (0, max_bytes)}} if max_bytes else {}
        return bytes(obstore.get(self._objects, path, **own).bytes())

    def write(self, path: str, data: bytes) -> None:
        self._put(path, data)

    def create_once(self, path: str, data: bytes) -> None:
        """Write to a free path. Raises FileExistsError if it is taken, TimeoutError if no try succeeded."""
        self._require_conditional_puts()
        failure: BaseError | None = None
        for attempt in range(CREATE_TRIES):
            if attempt:
                time.sleep(random.uniform(0.5, 1) * FIRST_PAUSE_S * 2**attempt)
            try:
                self._put(path, data, mode="create")
                return
            except (PermissionDeniedError, UnauthenticatedError):
                raise
            except AlreadyExistsError as error:
                content = self._read_if_there(path)
                if failure and content == data:
                    return  # an earlier try took effect, and its reply was lost
                if content is not None:
                    raise FileExistsError(f"{path} exists") from None
                failure = error  # 409: another writer's request was under way
            except BaseError as error:
                failure = error
        content = self._read_if_there(path)
        if content is None:
            raise TimeoutError(f"{path} not created in {CREATE_TRIES} tries: {reason_of(failure)}")
        if content != data:
            raise FileExistsError(f"{path} exists")

    def _require_conditional_puts(self) -> None:
        """Raise StorageError unless the service refuses to create an object that is there."""
        for _ in range(2):
            if self._is_conditional:
                return
            try:
                self._put(PROBE, b"", mode="create")
            except AlreadyExistsError:
                self._is_conditional = True
            except (PermissionDeniedError, UnauthenticatedError):
                raise
            except BaseError as error:
                if self.exists(PROBE):
                    continue
                raise StorageError(f"the store takes no conditional PUT ({reason_of(error)})") from error
        if not self._is_conditional:
            raise StorageError(
                "the store ignores the condition of a conditional PUT (If-None-Match), so that two publishers could "
                "overwrite each other; use a service or a version of it that honours it"
            )

    def _read_if_there(self, path: str) -> bytes | None:
        try:
            return self.read(path)
        except FileNotFoundError:
            return None

    def upload(self, source: Path, path: str) -> None:
        self._put(path, source, chunk_size=_part_bytes(source.stat().st_size))

    def download(self, path: str, cache: Path, exact: bool) -> Path:
        """Copy a file or folder to the cache; fetch files with another size or time again, very young ones always;
        `exact`: delete copies of files that are gone."""
        if not (files := self._at_or_below(path)):
            raise FileNotFoundError(path)
        with translate_copy_errors():
            for file in files:
                self._download_file(file, cache / file["path"])
            names = {cache / file["path"] for file in files}
            for copy in (cache / path).rglob("*") if exact else ():
                if copy not in names and not copy.name.startswith(".") and not copy.is_dir():
                    copy.unlink(missing_ok=True)
        return cache / path

    def exists(self, path: str) -> bool:
        return bool(self._at_or_below(path))

    def files(self, path: str) -> list[tuple[str, int, float]]:
        """List name, size and time of change of the objects directly under a path, or the whole prefix."""
        listing = _without_folders(path, obstore.list_with_delimiter(self._objects, path or None)["objects"])
        return [(meta["path"].rpartition("/")[2], meta["size"], meta["last_modified"].timestamp()) for meta in listing]

    def list(self, path: str) -> list[str]:
        listing = obstore.list_with_delimiter(self._objects, path)
        objects = _without_folders(path, listing["objects"])
        names = {name.rstrip("/") for name in (*listing["common_prefixes"], *(meta["path"] for meta in objects))}
        return [name.rpartition("/")[2] for name in names]

    def size_bytes(self, path: str) -> int:
        meta = self._meta(path)
        return meta["size"] if meta else -1

    def newest_s(self, path: str) -> float | None:
        """Return the Unix time of the newest object at or below the path."""
        return max((file["last_modified"].timestamp() for file in self._at_or_below(path)), default=None)

    def touch(self, path: str) -> None:
        """Renew the time of an object, or of a folder's JSON files, by copies within the service as far as it makes
        them, so that no error of a transfer is written back."""
        sizes = {file["path"]: file["size"] for file in self._at_or_below(path)}
        for name in (name for name in sizes if name == path or name.endswith(".json")):
            aside = f"{TOUCHED}/{name}"
            self._copy(name, aside, sizes[name])
            self._copy(aside, name, sizes[name])
            self.delete(aside)

    def delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            obstore.delete(self._objects, path)

    def delete_dir(self, path: str) -> None:
        if files := [file["path"] for file in self._below(path)]:
            obstore.delete(self._objects, files)

    def leftovers(self) -> Sequence[str]:
        """List the copies of `touch` that are there, as those of killed processes."""
        return [file["path"] for file in self._below(TOUCHED)]

    def move_dir(self, path: str, to: str) -> None:
        """Copy every file, then delete the originals."""
        for file in self._below(path):
            self._copy(file["path"], f"{to}/{file['path'].removeprefix(path).lstrip('/')}", file["size"])
        self.delete_dir(path)

    def _copy(self, path: str, to: str, size: int) -> None:
        """Copy an object within the service; one that is too large for that is read and written."""
        if size <= MAX_COPY_BYTES:
            obstore.copy(self._objects, path, to)
            return
        writer = obstore.open_writer(self._objects, to, buffer_size=_part_bytes(size), max_concurrency=2)
        for piece in obstore.get(self._objects, path).stream(CHUNK_BYTES):
            writer.write(piece)
        writer.close()  # not after an error: it would finish the object
        if (num_bytes := self.size_bytes(to)) != size:
            raise OSError(f"{to} has {num_bytes} bytes, not {size} as {path}")

    def sha256(self, path: str) -> str:
        digest = hashlib.sha256()
        for piece in obstore.get(self._objects, path).stream(CHUNK_BYTES):
            digest.update(piece)
        return digest.hexdigest()

    def _put(self, path: str, data: bytes | Path, **options: Any) -> None:
        """Put an object. Raises StorageError where there is no bucket, for which obstore says that the object is not
        there."""
        try:
            obstore.put(self._objects, path, data, **options)
        except FileNotFoundError as error:
            cure = "create it, or correct store.path"
            raise StorageError(f"no bucket to write in ({reason_of(error)}); {cure}") from None

    def _meta(self, path: str) -> "ObjectMeta | None":
        try:
            return obstore.head(self._objects, path)
        except FileNotFoundError:
            return None

    def _at_or_below(self, path: str) -> "Sequence[ObjectMeta]":
        """List the object at a path, or those of a folder."""
        return [meta] if (meta := self._meta(path)) else self._below(path)

    def _below(self, path: str) -> "Sequence[ObjectMeta]":
        return _without_folders(path, [meta for page in obstore.list(self._objects, path) for meta in page])

    def _fetch(self, meta: "ObjectMeta", target: Path) -> None:
        """Write an object to a new file, the pieces of a large one at once, as one stream reaches a tenth of what a
        machine receives; in one stream if it changes meanwhile."""

        def fetch(start: int, length: int, **options: Any) -> None:
            with target.open("r+b") as file:
                file.seek(start)
                for chunk in obstore.get(self._objects, meta["path"], **options).stream(CHUNK_BYTES):
                    file.write(chunk)
                if (num_bytes := file.tell() - start) != length:
                    raise OSError(f"{meta['path']} came with {num_bytes} bytes, not {length}")

        def fetch_piece(start: int) -> None:
            stop = min(start + PIECE_BYTES, meta["size"])
            fetch(start, stop - start, options={"range": (start, stop), "if_match": meta["e_tag"]})

        target.touch()
        if meta["size"] > PIECE_BYTES:
            with contextlib.suppress(PreconditionError), ThreadPoolExecutor(PIECES_AT_ONCE, "mvr-fetch") as pool:
                list(pool.map(fetch_piece, range(0, meta["size"], PIECE_BYTES)))
                return
        fetch(0, meta["size"])

    def _download_file(self, meta: "ObjectMeta", target: Path) -> None:
        changed_s = meta["last_modified"].timestamp()
        if target.is_file():
            local = target.stat()
            if local.st_size == meta["size"] and local.st_mtime == changed_s:
                mark_used(target, changed_s)
                if target.is_file():  # `make_room` of another process may have deleted it
                    return
        target.parent.mkdir(parents=True, exist_ok=True)
        make_room(meta["size"])
        aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        try:
            self._fetch(meta, aside)
            # Object times may be whole seconds: a copy of a very young object may be outdated without looking so.
            if time.time() - changed_s > SETTLED_S:
                os.utime(aside, (time.time(), changed_s))
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)
