"""Read and write the files of a store under one root: a folder, or a bucket prefix (`s3://`, `gs://`).

Every path is relative to the root with `/` between parts (names come from `paths`). A file appears whole or not at
all: it is written aside, synced and renamed. A folder appears whole by one rename; on an object store its files are
uploaded in name order with the JSON that describes them last. `create_once` succeeds for one writer of a name only.
"""

import contextlib
import errno
import hashlib
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar
from urllib.parse import unquote

from mvr_ray.config import resolve_path
from mvr_ray.errors import (
    ConfigError,
    MissingInputError,
    MvrRayError,
    StorageError,
)
from mvr_ray.store.local_files import (
    cached_sha256_of,
    create_claimed,
    files_of,
    make_synced_folder,
    on_disk_of,
    seal,
    sha256_of,
    sync_folder,
)
from mvr_ray.store.object_cache import cache_dir
from mvr_ray.store.objects import ObjectFiles, open_address
from mvr_ray.store.scratch import scratch_folder
from mvr_ray.store.storage_errors import storage_errors

SCRATCH = ".scratch"
_KEYS = re.compile(r"(\b\w+://)[^/?#\s'\":]*:[^/?#\s'\"]*@")
ASIDE = re.compile(r"\..+\.[0-9a-f]{32}\.(tmp|gone)")
"""Names of files and folders that are being written or deleted."""
READ_TRIES = 2
WRITE_TRIES = 3
FIRST_PAUSE_S = 0.1
REQUESTS_AT_ONCE = 16
"""Of `Store.for_each`: an object store answers each after tens of milliseconds, and many side by side."""
_JOB_FOLDERS = "working_dir_files"
"""Where Ray unpacks the working directories of jobs."""

T = TypeVar("T")
R = TypeVar("R")


class StoredFile(NamedTuple):
    """A file as a listing shows it; `changed_s` is the Unix time of its last change."""

    name: str
    num_bytes: int
    changed_s: float


class Store:
    """Reads and writes one store. Cheap to construct, and picklable."""

    def __init__(self, root: str | Path) -> None:
        self.root = str(root)
        self._objects: ObjectFiles | None = None
        if "://" in self.root and not self.root.startswith("file://"):
            with storage_errors("open the store", self.name):
                self._objects = ObjectFiles(open_address(self.root))
        self._folder = _local_folder(self.root)

    def __reduce__(self) -> tuple[type["Store"], tuple[str]]:
        return type(self), (self.root,)

    def __repr__(self) -> str:
        return f"Store({self.name!r})"

    @property
    def is_local(self) -> bool:
        return self._objects is None

    @property
    def address(self) -> str:
        """The root for processes with any working folder: a folder by its full path."""
        return str(self._folder.absolute()) if self.is_local else self.root

    @property
    def name(self) -> str:
        """The root in messages: without the keys and options of its address."""
        return address_name(self.root)

    @property
    def full_name(self) -> str:
        """`name`, but of a folder the full path: for what may be missing because another folder is the working one."""
        return self.address if self.is_local else self.name

    def where(self, path: str) -> str:
        """Return the name of a path for error messages."""
        return f"{self.name.rstrip('/')}/{_check_path(path)}".removesuffix("/.")

    def read_bytes(self, path: str, max_bytes: int | None = None) -> bytes:
        """Read a file, or its first bytes."""
        with self._input(path):
            if self._objects:
                return self._objects.read(_check_path(path), max_bytes)
            if max_bytes is None:
                return self._local(path).read_bytes()
            with self._local(path).open("rb") as file:
                return file.read(max_bytes)

    def write_bytes(self, path: str, data: bytes) -> None:
        """Put `data` at `path`, replacing what is there in one step."""
        with storage_errors("write", self.where(path), len(data), self.free_bytes):
            if self._objects:
                self._objects.write(_check_path(path), data)
                return

            def write() -> None:
                with self._aside(path, data) as aside:
                    aside.replace(self._local(path))

            _again_if_deleted(write)

    def create_once(self, path: str, data: bytes) -> None:
        """Put `data` at a free `path`. Raises FileExistsError where something is there, which stays."""
        with storage_errors("create", self.where(path), len(data), self.free_bytes):
            if self._objects:
                self._objects.create_once(_check_path(path), data)
                return
            with self._aside(path, data) as aside:
                try:
                    os.link(aside, self._local(path))
                except FileExistsError:
                    # A network file system may repeat a link whose reply was lost, and find its own.
                    with contextlib.suppress(FileNotFoundError):  # deleted since
                        if aside.samefile(self._local(path)):
                            return
                    raise
                except OSError as error:
                    if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
                        raise
                    create_claimed(aside, self._local(path))

    def holds(self, path: str, data: bytes, error: OSError) -> bool:
        """Return whether `path` holds `data` after its creation failed with `error`: a reply may be lost.

        Raises StorageError if it cannot be read either.
        """
        cause = error
        for attempt in range(READ_TRIES):
            try:
                is_there = self.exists(path) and self.read_bytes(path) == data
                self.sync_names(str(PurePosixPath(path).parent))
                return is_there
            except MissingInputError:
                return False
            except OSError as read_error:
                cause = read_error
                time.sleep(FIRST_PAUSE_S * 2**attempt)
        raise StorageError(
            f"whether {self.where(path)} was published is not known: creating it failed ({error}), and so did reading "
            f"it ({cause}). When the store answers again, see whether it is there; if not, run the same command again"
        ) from error

    def put_file(self, source: Path, path: str) -> None:
        """Move a finished local file to `path`, replacing what is there in one step; do not write to it afterwards."""
        with storage_errors("write", self.where(path), source.stat().st_size, self.free_bytes):
            if self._objects:
                self._objects.upload(source, _check_path(path))
                source.unlink()
                return
            target = self._local(path)

            def place() -> None:
                make_synced_folder(target.parent, self._folder)
                aside = on_disk_of(source, target)
                seal(aside, target.parent)
                os.utime(aside)  # its age counts from here, however long ago it was written
                aside.replace(target)

            _again_if_deleted(place)
            with contextlib.suppress(FileNotFoundError):  # deleted again
                sync_folder(target.parent)

    def upload_dir(self, source: Path, path: str, last: Mapping[str, bytes] | None = None) -> bool:
        """Move a finished local folder to `path`, whole, with the small files `last`, which describe the others; do
        not write to them afterwards.

        Returns False if `path` exists, with `last` if there are any: it stays, and the source is deleted. In an object
        store they come after all others, so a folder without them is a part of a killed upload, which this completes.

        For folders that are named by their content, so that an existing one is equal.
        """
        last = last or {}
        if self.exists(f"{path}/{next(iter(last))}" if last else path):
            shutil.rmtree(source)
            return False
        num_bytes = sum(file.stat().st_size for file in files_of(source)) + sum(map(len, last.values()))
        with storage_errors("write", self.where(path), num_bytes, self.free_bytes):
            for name, data in last.items():
                (source / name).write_bytes(data)
            if self._objects:
                names = [file.relative_to(source).as_posix() for file in files_of(source)]
                for name in sorted(names, key=lambda name: (name in last, name)):
                    self._objects.upload(source / name, f"{_check_path(path)}/{name}")
                shutil.rmtree(source)
                return True
            return self._rename_folder(source, self._local(path))

    def local_path(self, path: str, *, exact: bool = False) -> Path:
        """Return a local file or folder with the content of `path`: itself, or a copy in the cache. `exact`: the copy
        of a folder has no file that the store has no more."""
        if self._objects is None:
            return self._local(path)
        with self._input(path, "download"):
            digest = hashlib.sha256(self.root.encode()).hexdigest()
            return self._objects.download(_check_path(path), cache_dir() / digest[:16], exact)

    def exists(self, path: str) -> bool:
        with self._input(path, "check"):
            return self._objects.exists(_check_path(path)) if self._objects else self._local(path).exists()

    def stored_files(self, path: str = "") -> list[StoredFile]:
        """List the files directly under a folder, or the root, sorted by name, without hidden ones.

        Raises MissingInputError for a folder of a local store that is not there.
        """
        files: list[StoredFile] = []
        with self._input(path or ".", "list"):
            if self._objects:
                files = [StoredFile(*file) for file in self._objects.files(path and _check_path(path))]
            else:
                with os.scandir(self._local(path or ".")) as entries:
                    for entry in entries:
                        with contextlib.suppress(FileNotFoundError):  # it may be deleted while the folder is read
                            stat = entry.stat()
                            files += [StoredFile(entry.name, stat.st_size, stat.st_mtime)] * entry.is_file()
        return sorted(file for file in files if not file.name.startswith("."))

    def json_names(self, path: str) -> list[str]:
        """List the names of the JSON files directly under `path`, without their ending."""
        return [name.removesuffix(".json") for name in self.list(path) if name.endswith(".json")]

    def list(self, path: str) -> list[str]:
        """List the names directly under `path`, sorted, without hidden ones; empty when it is not there."""
        names: list[str] = []
        with self._input(path, "list"), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if self._objects:
                names = self._objects.list(_check_path(path))
            else:
                names = [entry.name for entry in self._local(path).iterdir()]
        return sorted(name for name in names if not name.startswith("."))

    def size_bytes(self, path: str) -> int:
        """Return the size of the file at `path`, -1 when it is not there."""
        with self._input(path, "check"):
            if self._objects:
                return self._objects.size_bytes(_check_path(path))
            file = self._local(path)
            return file.stat().st_size if file.is_file() else -1

    def age_s(self, path: str) -> float:
        """Return the seconds since the newest file at or under `path` changed; 0 when there is none."""
        with self._input(path, "check"):
            if self._objects:
                newest = self._objects.newest_s(_check_path(path))
            else:
                newest = _newest_s(self._local(path))
        return max(0.0, time.time() - newest) if newest is not None else 0.0

    def for_each(self, work: Callable[[T], R], items: Iterable[T]) -> Sequence[R]:
        """Return the result of `work`, a request to the store, for each item in order; on an object store several
        requests run at once. Raises the error of the first item that has one."""
        if self.is_local:
            return [work(item) for item in items]
        pool = ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="mvr-store")
        try:
            return [*pool.map(work, items)]
        finally:
            pool.shutdown(cancel_futures=True)

    def touch(self, *paths: str) -> None:
        """Renew the ages of the files or folders at these paths, if there, so that collection keeps them, and sync
        their names to the disk: their writers may have been killed before."""

        def renew(path: str) -> None:
            with storage_errors("renew the age of", self.where(path)), contextlib.suppress(FileNotFoundError):
                self._objects.touch(_check_path(path)) if self._objects else os.utime(self._local(path))

        self.for_each(renew, paths)
        for folder in () if self._objects else dict.fromkeys(str(Path(path).parent) for path in paths):
            self.sync_names(folder)

    def sync_names(self, path: str) -> None:
        """Sync the names that were added to or deleted from the folder at `path`, if there, to the disk."""
        if self._objects is None and (folder := self._local(path)).is_dir():
            with storage_errors("sync", self.where(path)):
                sync_folder(folder)

    def delete(self, path: str) -> None:
        """Remove the file at `path`, if there."""
        with storage_errors("delete", self.where(path)):
            if self._objects:
                self._objects.delete(_check_path(path))
            else:
                self._local(path).unlink(missing_ok=True)

    def delete_dir(self, path: str) -> None:
        """Remove the folder at `path`, if there; on a local path in one step."""
        with storage_errors("delete", self.where(path)):
            if self._objects:
                self._objects.delete_dir(_check_path(path))
                return
            folder = self._local(path)
            aside = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.gone")
            with contextlib.suppress(FileNotFoundError):  # not there, or another process deletes it now
                folder.rename(aside)
                sync_folder(aside.parent)
                shutil.rmtree(aside)

    def missing_folders(self) -> Sequence[Path]:
        """List a local store's folder and those above it that do not exist, the store's first."""
        return [] if self._objects else [one for one in (self._folder, *self._folder.parents) if not one.exists()]

    def delete_if_alone(self, path: str, folders: Sequence[Path]) -> bool:
        """Remove the folder at `path` and then the empty ones of `folders`, of `missing_folders`; False if the local
        store holds another file, and everything stays."""
        own = self._local(path)
        if not all(file.is_relative_to(own) for file in files_of(self._folder)):
            return False
        self.delete_dir(path)
        for folder in (own.parent, self._folder / SCRATCH, *folders):
            with contextlib.suppress(OSError):  # not there, or another process has put something there
                folder.rmdir()
        return True

    def delete_leftovers(self, min_age_s: float, skip: str = "") -> Sequence[str]:
        """Remove what killed processes left aside, if at least this old, but in the folder `skip`; returns the
        paths."""
        if self._objects:
            with storage_errors("list", self.name):
                paths = self._objects.leftovers()
        else:
            paths = []
            for folder, folders, files in os.walk(self._folder):
                at = Path(folder).relative_to(self._folder)
                paths += [(at / name).as_posix() for name in [*folders, *files] if ASIDE.fullmatch(name)]
                folders[:] = [name for name in folders if not name.startswith(".") and (at / name).as_posix() != skip]
        removals = [path for path in paths if self.age_s(path) >= min_age_s]
        for path in removals:
            is_folder = self.is_local and self._local(path).is_dir()
            (self.delete_dir if is_folder else self.delete)(path)
        return removals

    def move_dir(self, path: str, to: str) -> None:
        """Move a folder to a name that is free: by one rename, or on an object store file by file, copied first."""
        with storage_errors("move", self.where(path)):
            if self._objects:
                self._objects.move_dir(_check_path(path), _check_path(to))
                return
            make_synced_folder(self._local(to).parent, self._folder)
            self._local(path).rename(self._local(to))
            sync_folder(self._local(to).parent)
            sync_folder(self._local(path).parent)

    def sha256(self, path: str) -> str:
        """Compute the hex digest of the file at `path`, as it is in the store now."""
        with self._input(path):
            return self._objects.sha256(_check_path(path)) if self._objects else sha256_of(self._local(path))

    def damage(self, path: str, num_bytes: int, sha256: str = "") -> str:
        """Compare the file at `path` with its size and digest, if given; returns how it differs, or an empty text."""
        size = self.size_bytes(path)
        if size < 0:
            return "is missing"
        if size != num_bytes:
            return f"has {size} bytes, not {num_bytes}"
        return "" if not sha256 or self.sha256(path) == sha256 else f"has another sha256 than {sha256}"

    def open_copy(self, local: Path, path: str, load: Callable[[Path], R]) -> R:
        """Return what `load` makes of `local`, from `local_path(path)`. If it refuses a copy in the cache, which may be
        damaged, that is fetched again first."""
        try:
            return load(local)
        except MvrRayError:
            if self.is_local:
                raise
        for file in files_of(local) or [local]:
            _distrust(file)
        return load(self.local_path(path))

    def is_whole(self, local: Path, path: str, num_bytes: int, sha256: str) -> bool:
        """Return whether `local`, from `local_path(path)`, is there with this size and digest. A copy in the cache that
        differs or is gone is fetched again first; it stays until then, as another process may read it. Raises
        StorageError if it cannot be read."""

        def equals() -> bool:
            return local.is_file() and local.stat().st_size == num_bytes and cached_sha256_of(local, sha256) == sha256

        with storage_errors("read", self.where(path)):
            if not self.is_local and not equals():
                _distrust(local)
                with contextlib.suppress(MissingInputError):
                    self.local_path(path)
            return equals()

    def free_bytes(self) -> int | None:
        """Return the free space of the disk under a local root; None on an object store."""
        if self._objects:
            return None
        folder = self._folder
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        return _free_bytes(folder)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Make a folder for unfinished work and delete it afterwards; on a local root it is on the store's disk, else
        only its user can read it. A disk that is full while the block writes is a StorageError."""
        parent = Path(tempfile.gettempdir()) if self._objects else self._folder / SCRATCH
        with contextlib.ExitStack() as stack:
            with storage_errors("make a scratch folder in", self.name):
                folder = stack.enter_context(scratch_folder(parent, "mvr-store-" if self._objects else ""))
            free_bytes = partial(_free_bytes, folder)
            with storage_errors("write in", str(parent), free_bytes=free_bytes, only_full_disk=True):
                yield folder

    def _rename_folder(self, source: Path, target: Path) -> bool:
        """Sync a finished folder and give it its final name; False if that is taken, and the source is deleted."""
        make_synced_folder(target.parent, self._folder)
        source = on_disk_of(source, target)
        files = files_of(source)
        for file in files:
            seal(file, target.parent)
        for folder in dict.fromkeys(file.parent for file in files):
            sync_folder(folder)
        try:
            source.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(source)
            return False
        sync_folder(target.parent)
        return True

    def _local(self, path: str) -> Path:
        return self._folder / _check_path(path)

    @contextlib.contextmanager
    def _input(self, path: str, action: str = "read") -> Iterator[None]:
        """Convert errors of reading to StorageError, and a missing file to MissingInputError."""
        try:
            with storage_errors(action, self.where(path)):
                yield
        except FileNotFoundError:
            raise MissingInputError(f"{self.where(path)} does not exist") from None

    @contextlib.contextmanager
    def _aside(self, path: str, data: bytes) -> Iterator[Path]:
        """Write `data` to a synced file beside `path`, and delete it afterwards; the folder is synced last."""
        target = self._local(path)
        make_synced_folder(target.parent, self._folder)
        aside = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        try:
            with aside.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield aside
            sync_folder(target.parent)
        finally:
            aside.unlink(missing_ok=True)


def _distrust(copy: Path) -> None:
    """Give a copy in the cache a time that no object has, so that it is fetched again."""
    with contextlib.suppress(OSError):  # not there, or another user's
        os.utime(copy, (0, 0))


def _again_if_deleted(write: Callable[[], None]) -> None:
    """Call `write`, and again if another process deletes the folder meanwhile, as the faster of two equal commands
    deletes the unfinished work of both."""
    for _ in range(WRITE_TRIES - 1):
        with contextlib.suppress(FileNotFoundError):
            return write()
    return write()


def without_keys(text: str) -> str:
    """Remove the keys from the addresses of object stores in a text that others may read."""
    return _KEYS.sub(r"\1", text)


def address_name(address: str) -> str:
    """Return a path or an address as messages show it: without its keys and options."""
    scheme, separator, rest = address.partition("://")
    return f"{scheme}://{rest.partition('?')[0].rpartition('@')[2]}" if separator else address


def split_address(address: str) -> tuple[str, str]:
    """Split the address of a file or folder on an object store into that of the folder around it, with the options, and
    the name. Raises ConfigError for one of a whole bucket."""
    place, mark, options = address.partition("?")
    folder, _, name = place.rstrip("/").rpartition("/")
    if not name or "://" not in folder:
        raise ConfigError(f"{address_name(address)} names no file or folder in its bucket; write s3://BUCKET/NAME")
    return f"{folder}{mark}{options}", name


def local_copy(address: str) -> Path:
    """Return a local file or folder with the content of what a run file or a command names: a path itself, or a copy in
    the cache of `s3://` or `gs://`. Raises MissingInputError for an address with nothing there."""
    if "://" not in address:
        return resolve_path(address)
    folder, name = split_address(address)
    return Store(folder).local_path(name, exact=True)


def copy_name(address: str, copy: Path) -> str:
    """Return a path of `local_copy` as messages show it: the address in place of its copy."""
    return address_name(address) if "://" in address else str(copy)


@contextlib.contextmanager
def name_address(address: str, copy: Path) -> Iterator[None]:
    """Name the address in errors of the block, in place of its local copy."""
    try:
        yield
    except MvrRayError as error:
        error.args = (str(error).replace(str(copy), copy_name(address, copy)), *error.args[1:])
        raise


def _local_folder(root: str) -> Path:
    """Resolve the root of a local store, a path or a `file://` address. Raises ConfigError for another machine's, and
    for a relative path in a job's copy of its working directory."""
    if not root.startswith("file://"):
        what, advice = f"{root} (store.path or follow.source)", " that every node has, or s3:// or gs://"
        require_lasting(folder := resolve_path(root), what, advice)
        return folder
    host, slash, path = root.removeprefix("file://").partition("/")
    if host not in ("", "localhost") or not slash:
        raise ConfigError(f"{root} names no folder of this machine; write file:///FOLDER, or the folder alone")
    return resolve_path(unquote(slash + path))


def require_lasting(path: Path, what: str, advice: str = "") -> None:
    """Raise ConfigError for a relative path in a job's copy of its working directory."""
    if not path.is_absolute() and _JOB_FOLDERS in Path.cwd().parts:
        raise ConfigError(
            f"{what} would be lost: this job runs in a copy of its working directory, which Ray deletes; give a full "
            f"path{advice}"
        )


def _check_path(path: str) -> str:
    pure = PurePosixPath(path)
    assert path and not pure.is_absolute() and ".." not in pure.parts, f"not a path inside the store: {path!r}"
    return str(pure)


def _free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _newest_s(root: Path) -> float | None:
    """Return the newest Unix time of a file or folder and the files in it, though some are deleted meanwhile; None
    where nothing is there."""
    times: list[float] = []
    for file in [root, *(Path(folder, name) for folder, _, names in os.walk(root) for name in names)]:
        with contextlib.suppress(FileNotFoundError):
            times.append(file.stat().st_mtime)
    return max(times, default=None)
