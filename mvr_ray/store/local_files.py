"""Write files of the local disk so that each is whole and on the disk when its name appears, and digest them."""

import contextlib
import errno
import hashlib
import os
import shutil
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from mvr_ray.errors import StorageError
from mvr_ray.store.scratch import scratch_folder
from mvr_ray.store.storage_errors import storage_errors

MAX_DIGESTS = 1 << 14
MAX_SYNCED = 1 << 12
SETTLED_NS = 2 * 10**9
CLAIM_PAUSE_S = 0.1
CLAIM_TRIES = 5

_DIGESTS = OrderedDict[tuple[int, int, int, int], tuple[str, int]]()
"""The digest asked for last is at the end."""
_SYNCED: dict[Path, tuple[int, int]] = {}
"""The folders whose names this process has synced, with device and inode: a new folder of a name is synced again."""


def sha256_of(path: Path) -> str:
    """Compute the hex digest of a local file, read piece by piece."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cached_sha256_of(path: Path, expected: str = "") -> str:
    """Digest a file as `sha256_of` does, with a cache of the process: a file is read again if its inode, time or size
    has changed.

    A file that changed a moment ago is read each time: it could change again within one tick of its time. One that
    differs from `expected` is read again if its inode has changed, or had a moment before it was read: a copy that
    keeps its time, such as a restored file, can get the inode of a deleted file of its time and size.
    """
    stat = path.stat()
    key = stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size
    digest, inode_ns = _DIGESTS.get(key, ("", 0))
    if digest and (expected in ("", digest) or inode_ns == stat.st_ctime_ns):
        with contextlib.suppress(KeyError):  # dropped meanwhile
            _DIGESTS.move_to_end(key)
        return digest
    digest = sha256_of(path)
    settled_ns = time.time_ns() - SETTLED_NS
    if stat.st_mtime_ns < settled_ns:
        while len(_DIGESTS) >= MAX_DIGESTS:
            _DIGESTS.popitem(last=False)
        _DIGESTS[key] = digest, stat.st_ctime_ns if stat.st_ctime_ns < settled_ns else 0
    return digest


def drop_cached_sha256_of(path: Path) -> None:
    """Drop a file from the cache of `cached_sha256_of`: its bytes have changed, its time and size have not."""
    with contextlib.suppress(OSError):
        stat = path.stat()
        _DIGESTS.pop((stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size), None)


def sync_file(path: Path) -> None:
    """Wait until the file's bytes are on the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the folder's names are on the disk; some network file systems cannot do that and return EINVAL."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Make a folder with the missing ones above it, and wait until their names are on the disk."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        _SYNCED.pop(folder, None)
        try:
            folder.mkdir(exist_ok=True)
        except FileExistsError:
            raise NotADirectoryError(errno.ENOTDIR, "a file exists where a folder is needed", str(folder)) from None
        except FileNotFoundError:  # /proc and the like hold no folders of others
            raise PermissionError(errno.EACCES, "no folder can be made there", str(folder)) from None
        sync_folder(folder.parent)


def make_synced_folder(folder: Path, root: Path) -> None:
    """Make a folder under `root`, and sync its name and those of the folders above at this process's first use: the
    process that made one may have been killed before."""
    make_folder(folder)
    for place in (folder, *folder.parents):
        stat = place.stat()
        own = stat.st_dev, stat.st_ino
        if _SYNCED.get(place) == own:
            break
        with contextlib.suppress(PermissionError):  # the folder that the root lies in may not be readable
            sync_folder(place.parent)
        while len(_SYNCED) >= MAX_SYNCED:
            _SYNCED.pop(next(iter(_SYNCED)), None)
        _SYNCED[place] = own
        if place == root:
            break


def seal(path: Path, folder: Path) -> None:
    """Let those read a file, and none write it, that can read the `folder` of its final name, as some libraries create
    files for their owner alone; then wait until its bytes are on the disk."""
    with contextlib.suppress(OSError):
        path.chmod(folder.stat().st_mode & 0o444)
    sync_file(path)


def create_claimed(aside: Path, target: Path) -> None:
    """Do `create_once` on file systems without hard links: the claim is the lock, the rename is the creation."""
    claim = target.with_name(f".{target.name}.claim")
    for attempt in range(CLAIM_TRIES):
        if target.exists():
            raise FileExistsError(errno.EEXIST, "exists", str(target))
        with contextlib.suppress(FileExistsError):
            os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
            break
        time.sleep(CLAIM_PAUSE_S * 2**attempt)
    else:
        raise StorageError(
            f"{target} cannot be created: {claim} says that another process does so; if none is running, delete "
            f"that file, and run the same command again"
        )
    try:
        if target.exists():
            raise FileExistsError(errno.EEXIST, "exists", str(target))
        aside.rename(target)
    finally:
        claim.unlink(missing_ok=True)


def on_disk_of(source: Path, target: Path) -> Path:
    """Return `source`, or move it to `target`'s disk when it is on another one."""
    if source.stat().st_dev == target.parent.stat().st_dev:
        return source
    copy = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    shutil.move(source, copy, copy_function=shutil.copyfile)
    return copy


def link_or_copy(source: Path, target: Path) -> None:
    """Link a file that never changes under another name; copy it where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


@contextlib.contextmanager
def finished_file(target: Path, sync: bool = True) -> Iterator[Path]:
    """Yield a path of a file or folder to write, and rename it to `target` when the block succeeds, else delete it; a
    killed process's is deleted by the next one with this target. A device or a pipe is written itself.

    Without `sync`, for files that are then moved to a `Store`, which syncs them.
    """
    with storage_errors("write", str(target)):
        make_folder(target.parent)
        if target.exists() and not target.is_file():
            yield target
            return
        with scratch_folder(target.parent, f".{target.name}.") as folder:
            aside = folder / target.name
            yield aside
            for file in (files_of(aside) or [aside]) if sync else ():
                sync_file(file)
            aside.replace(target)
            if sync:
                sync_folder(target.parent)


def files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else []
