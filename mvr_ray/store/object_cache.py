"""Hold the local copies of object-store files, which readers map into memory, within the space of their disk.

A copy stays until space is short: then those go that no process has asked for in the last hour, the longest unused
first. A reader that has one open keeps its content.
"""

import logging
import os
import re
import shutil
import time
from pathlib import Path

log = logging.getLogger(__name__)

IDLE_S = 3600.0
FREE_SHARE, MAX_FREE_BYTES = 0.1, 20 << 30
"""Space that copies leave free: a tenth of the disk, 20 GiB at most."""


def cache_dir() -> Path:
    """Return the folder for copies of object-store files: `MVR_RAY_CACHE`, else a folder of the user's cache."""
    folder = os.environ.get("MVR_RAY_CACHE")
    return Path(folder) if folder else Path.home() / ".cache" / "mvr_ray"


def mark_used(file: Path, changed_s: float) -> None:
    """Record that a copy is used now. `changed_s`: the time of its object, which its own time stands for."""
    os.utime(file, (time.time(), changed_s))


def make_room(num_bytes: int) -> None:
    """Delete unused copies until `num_bytes` more fit beside the space that stays free, or until none is left."""
    folder = cache_dir()
    usage = shutil.disk_usage(folder)
    num_missing = num_bytes + int(min(FREE_SHARE * usage.total, MAX_FREE_BYTES)) - usage.free
    if num_missing <= 0:
        return
    copies: list[tuple[float, int, Path]] = []
    for store in folder.iterdir():
        if re.fullmatch("[0-9a-f]{16}", store.name):  # another program's files may lie beside those of stores
            copies += [(stat.st_atime, stat.st_size, file) for file in store.rglob("*") if (stat := _stat(file))]
    for used_s, size, file in sorted(copies):
        if num_missing <= 0 or used_s > time.time() - IDLE_S:
            return
        file.unlink(missing_ok=True)
        num_missing -= size
        log.info("deleted the unused copy %s: bytes=%d", file, size)


def _stat(file: Path) -> os.stat_result | None:
    """Return the state of a file; None for a folder, and for a file that another process has deleted."""
    try:
        return None if file.is_dir() else file.stat()
    except FileNotFoundError:
        return None
