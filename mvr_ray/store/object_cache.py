"""Hold the local copies of object-store files, which readers map into memory, within the space of their disk.

A copy stays until space is short: then those go that no process has asked for in the last hour, the longest unused
first; where the next copy would not fit at all, those of the last ten minutes stay. A reader that has one open keeps
its content.
"""

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from mvr_ray.errors import StorageError, is_full_disk

log = logging.getLogger(__name__)

IDLE_S, FULL_IDLE_S = 3600.0, 600.0
"""Time for which an unused copy stays, and on a full disk: updates every minute need new copies of all shards."""
FREE_SHARE, MAX_FREE_BYTES = 0.1, 20 << 30
"""Space that copies leave free: a tenth of the disk, 20 GiB at most."""
WALK_INTERVAL_S = 60.0
"""Pause of a process that could not make enough room, since a walk over many copies takes long."""
_next_walk_s = 0.0


def cache_dir() -> Path:
    """Return the folder for copies of object-store files: `MVR_RAY_CACHE`, else a folder of the user's cache."""
    folder = os.environ.get("MVR_RAY_CACHE") or "~/.cache/mvr_ray"
    try:
        return Path(folder).expanduser()
    except RuntimeError:
        raise StorageError(
            f"local copies of the store's objects have no folder: {folder} names the home of a user without one; set "
            f"MVR_RAY_CACHE to another folder"
        ) from None


@contextlib.contextmanager
def translate_copy_errors() -> Iterator[None]:
    """Convert the system's errors of writing copies to StorageError. Errors of the object store have no number."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        cure = "free space on its disk" if is_full_disk(error) else "let this process write in that folder"
        raise StorageError(
            f"local copies of the store's objects cannot be written in {cache_dir()}: {error.strerror}; {cure}, or set "
            f"MVR_RAY_CACHE to another folder"
        ) from error


def mark_used(file: Path, changed_s: float) -> None:
    """Record that a copy is used now, where this process may: it can be another user's, or on a read-only disk.

    `changed_s`: the time of its object, which its own time stands for.
    """
    with contextlib.suppress(OSError):
        os.utime(file, (time.time(), changed_s))


def make_room(num_bytes: int) -> None:
    """Delete unused copies until `num_bytes` more fit beside the space that stays free, or until none is left."""
    global _next_walk_s
    folder = cache_dir()
    usage = shutil.disk_usage(folder)
    num_spare = int(min(FREE_SHARE * usage.total, MAX_FREE_BYTES))
    num_missing = num_bytes + num_spare - usage.free
    if num_missing <= (num_spare if time.monotonic() < _next_walk_s else 0):
        return
    copies: list[tuple[float, int, Path]] = []
    for store in folder.iterdir():
        if re.fullmatch("[0-9a-f]{16}", store.name):  # another program's files may lie beside those of stores
            copies += [(_used_s(stat), stat.st_size, file) for file in store.rglob("*") if (stat := _stat(file))]
    for used_s, size, file in sorted(copies):
        idle_s = IDLE_S if num_missing <= num_spare else FULL_IDLE_S
        if num_missing <= 0 or used_s > time.time() - idle_s:
            break
        stat = _stat(file)
        if stat is None or _used_s(stat) > used_s:  # deleted, or asked for meanwhile
            continue
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            log.info("the unused copy %s stays: %s", file, error)
            continue
        num_missing -= size
        log.info("deleted the unused copy %s: bytes=%d", file, size)
    if num_missing > 0:
        _next_walk_s = time.monotonic() + WALK_INTERVAL_S


def _used_s(stat: os.stat_result) -> float:
    """Return when a copy was used last; an unfinished one was written then."""
    return max(stat.st_atime, stat.st_mtime)


def _stat(file: Path) -> os.stat_result | None:
    """Return the state of a file; None for a folder, for a file that another process has deleted, and for one that
    this process may not see."""
    try:
        return None if file.is_dir() else file.stat()
    except OSError:
        return None
