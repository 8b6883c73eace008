"""Make folders for unfinished work, each under a lease that ends with the process that made it.

    <shelf>/<id>.lease     locked (flock) as long as its owner lives; holds the boot id of the owner's machine
    <shelf>/<id>           the folder

Who makes a folder deletes those of dead owners. On one machine the lock alone says who lives, whatever the clock does.
A file system that several machines share may not tell the locks of others: a folder of another machine, or of an
earlier boot, goes only when its lease is free and a day older than a file that was made just now, by the file system's
own clock. A folder without a lease, as earlier programs left them, goes after a day.
"""

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

STALE_S = 86_400
LEASE = ".lease"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@contextlib.contextmanager
def scratch_folder(shelf: Path) -> Iterator[Path]:
    """Give a new folder on the shelf and delete it afterwards; what dead processes left there goes first."""
    shelf.mkdir(parents=True, exist_ok=True)
    folder, lease, handle = _make_folder(shelf)
    try:
        _delete_abandoned(shelf, lease.stat().st_mtime)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lease.unlink(missing_ok=True)
        os.close(handle)


def _make_folder(shelf: Path) -> tuple[Path, Path, int]:
    while True:
        folder = shelf / uuid.uuid4().hex
        lease = folder.with_name(folder.name + LEASE)
        handle = os.open(lease, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        try:
            _lock(handle)
            os.write(handle, _boot_id().encode())  # what has no content yet is nobody's to delete
            folder.mkdir()
            return folder, lease, handle
        except BaseException as error:
            os.close(handle)
            lease.unlink(missing_ok=True)
            if not isinstance(error, BlockingIOError):  # raised where another process looks whether the owner lives
                raise


def _delete_abandoned(shelf: Path, now_s: float) -> None:
    """`now_s` is the time of a file that was made just now."""
    names = {entry.name for entry in shelf.iterdir()}
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            if name.endswith(LEASE):
                _delete_if_free(shelf / name, now_s)
            elif f"{name}{LEASE}" not in names and now_s - (shelf / name).stat().st_mtime > STALE_S:
                shutil.rmtree(shelf / name, ignore_errors=True)


def _delete_if_free(lease: Path, now_s: float) -> None:
    handle = os.open(lease, os.O_RDWR)
    try:
        tells = _lock(handle) and os.read(handle, 64).decode(errors="replace") == _boot_id()
        if tells or now_s - os.fstat(handle).st_mtime > STALE_S:
            shutil.rmtree(lease.with_name(lease.name.removesuffix(LEASE)), ignore_errors=True)
            lease.unlink(missing_ok=True)
    except BlockingIOError:
        pass  # its owner lives
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    """Whether the file system has locks, and this one was free. Raises BlockingIOError where another one holds it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _boot_id() -> str:
    """Name this boot of this machine; the machine where the system does not number its boots."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else os.uname().nodename
