"""Files in an object store, through pyarrow's file systems.

An object appears whole when its upload ends. On S3 `create_once` is one conditional PUT (`conditional`); whether the
server honours the condition is found out once, by creating one object twice. Elsewhere it goes by claims: a writer puts
a claim beside the name, lists the claims, and writes only if its own is the only one and the name is still free.
Listings of S3 and Google Cloud Storage show every finished put, so of two writers at least one sees the other; both
may, then both step back and try again after a random pause. At most one ever writes.
"""

import contextlib
import hashlib
import logging
import os
import random
import shutil
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from mvr_ray.errors import PublishConflictError
from mvr_ray.store.conditional import ConditionalPuts, UnknownConditionError, conditional_puts

log = logging.getLogger(__name__)

PROBE = ".conditional"
CLAIM_TRIES = 8
FIRST_PAUSE_S = 0.05
SETTLED_S = 5.0
COPY_CHUNK_BYTES = 1 << 20


class ObjectFiles:
    """The operations of `files.Store` on a bucket prefix; paths are checked by the store."""

    def __init__(self, filesystem: fs.FileSystem, prefix: str) -> None:
        self.filesystem = filesystem
        self.prefix = prefix.rstrip("/")
        self._asked_puts = False
        self._puts: ConditionalPuts | None = None

    def __reduce__(self) -> tuple[type["ObjectFiles"], tuple[fs.FileSystem, str]]:
        return type(self), (self.filesystem, self.prefix)

    def read(self, path: str) -> bytes:
        with self.filesystem.open_input_stream(self._at(path)) as stream:
            return stream.read()

    def write(self, path: str, data: bytes) -> None:
        self._make_parent(path)
        with self.filesystem.open_output_stream(self._at(path)) as stream:
            stream.write(data)

    def create_once(self, path: str, data: bytes) -> None:
        """Write unless there: FileExistsError if it is, PublishConflictError if other claims never went away."""
        if puts := self.conditional_puts():
            puts.create(self._at(path), data, lambda: self._read_if_there(path))
        else:
            self._create_claimed(path, data)

    def conditional_puts(self) -> ConditionalPuts | None:
        """How this service creates an object once; None where it cannot, which is found out by asking it."""
        if not self._asked_puts:
            puts = conditional_puts(self.filesystem)
            if puts and not self._honours(puts):
                log.warning("conditional writes not honoured, claims are used: store=%s", puts.endpoint)
                puts = None
            self._puts, self._asked_puts = puts, True
        return self._puts

    def _honours(self, puts: ConditionalPuts) -> bool:
        """Whether creating an object that is there is refused."""
        for _ in range(2):
            try:
                puts.create(self._at(PROBE), b"", lambda: self._read_if_there(PROBE))
            except FileExistsError:
                return True
            except UnknownConditionError:
                return False
        return False

    def _read_if_there(self, path: str) -> bytes | None:
        try:
            return self.read(path)
        except FileNotFoundError:
            return None

    def _create_claimed(self, path: str, data: bytes) -> None:
        folder, _, name = path.rpartition("/")
        claims = f"{folder}/.claims/{name}"
        token = uuid.uuid4().hex
        others: list[str] = []
        for attempt in range(CLAIM_TRIES):
            self.write(f"{claims}/{token}", b"")
            try:
                others = [claim for claim in self.list(claims) if claim != token]
                # Looking for the name must come after listing: a claim that is gone has left its file.
                if self.exists(path):
                    raise FileExistsError(f"{self._at(path)} exists")
                if not others:
                    self.write(path, data)
                    return
            finally:
                self.delete(f"{claims}/{token}")
            time.sleep(random.uniform(0, FIRST_PAUSE_S * 2**attempt))
        raise PublishConflictError(
            f"{self._at(path)} not created: another writer's claim stands ({self._at(claims)}/{others[0]}); "
            f"wait for that writer, or delete the claim if none is running"
        )

    def upload(self, source: Path, path: str) -> None:
        self._make_parent(path)
        with source.open("rb") as file, self.filesystem.open_output_stream(self._at(path)) as stream:
            shutil.copyfileobj(file, stream, COPY_CHUNK_BYTES)

    def download(self, path: str, cache: Path) -> Path:
        """A local copy of a file or folder; what changed in size or time is fetched anew, what is very young always."""
        info = self._info(path)
        if info.type == fs.FileType.NotFound:
            raise FileNotFoundError(self._at(path))
        if info.type == fs.FileType.File:
            return self._download_file(info, cache / path)
        base = info.path.rstrip("/") + "/"
        for child in self._below(path):
            if child.type == fs.FileType.File:
                self._download_file(child, cache / path / child.path.removeprefix(base))
        return cache / path

    def exists(self, path: str) -> bool:
        return self._info(path).type != fs.FileType.NotFound

    def list(self, path: str) -> list[str]:
        selector = fs.FileSelector(self._at(path), allow_not_found=True)
        return [info.base_name for info in self.filesystem.get_file_info(selector)]

    def size_bytes(self, path: str) -> int:
        info = self._info(path)
        return info.size if info.type == fs.FileType.File else -1

    def newest_s(self, path: str) -> float | None:
        """Unix time of the newest object at or below the path."""
        found = [self._info(path), *self._below(path)]
        return max((_changed_s(info) for info in found if info.type == fs.FileType.File), default=None)

    def touch(self, path: str) -> None:
        """Write the folder's JSON files again, which makes them young."""
        for info in self._below(path):
            if info.path.endswith(".json"):
                relative = info.path.removeprefix(self.prefix).lstrip("/")
                self.write(relative, self.read(relative))

    def delete(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_file(self._at(path))

    def delete_dir(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_dir(self._at(path))

    def move_dir(self, path: str, to: str) -> None:
        """All copies are there before the first original goes."""
        files = [info.path for info in self._below(path) if info.type == fs.FileType.File]
        for file in files:
            copy = f"{to}/{file.removeprefix(self._at(path)).lstrip('/')}"
            self._make_parent(copy)
            self.filesystem.copy_file(file, self._at(copy))
        self.delete_dir(path)

    def sha256(self, path: str) -> str:
        digest = hashlib.sha256()
        with self.filesystem.open_input_stream(self._at(path)) as stream:
            while piece := stream.read(COPY_CHUNK_BYTES):
                digest.update(piece)
        return digest.hexdigest()

    def _at(self, path: str) -> str:
        return f"{self.prefix}/{path}"

    def _make_parent(self, path: str) -> None:
        # Object stores have no folders; making them would leave empty marker objects.
        if isinstance(self.filesystem, fs.LocalFileSystem):
            self.filesystem.create_dir(self._at(path).rpartition("/")[0], recursive=True)

    def _info(self, path: str) -> fs.FileInfo:
        return self.filesystem.get_file_info(self._at(path))

    def _below(self, path: str) -> Sequence[fs.FileInfo]:
        if self._info(path).type != fs.FileType.Directory:
            return []
        return self.filesystem.get_file_info(fs.FileSelector(self._at(path), recursive=True))

    def _download_file(self, info: fs.FileInfo, target: Path) -> Path:
        if target.is_file():
            have = target.stat()
            if have.st_size == info.size and have.st_mtime_ns == info.mtime_ns:
                return target
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        try:
            with self.filesystem.open_input_stream(info.path) as stream, pa.OSFile(str(aside), "wb") as file:
                while piece := stream.read(COPY_CHUNK_BYTES):
                    file.write(piece)
            # Object times are whole seconds: a copy of a very young object may be outdated without looking so.
            if info.mtime_ns is not None and time.time() - _changed_s(info) > SETTLED_S:
                os.utime(aside, ns=(info.mtime_ns, info.mtime_ns))
            aside.replace(target)
        finally:
            aside.unlink(missing_ok=True)
        return target


def _changed_s(info: fs.FileInfo) -> float:
    return (info.mtime_ns or 0) / 1e9
