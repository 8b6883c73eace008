"""Make folders for unfinished work, each with a lease that ends with the process that made it.

    <parent>/<id>.lease    locked (flock) while its owner runs; holds the boot id of the owner's machine
    <parent>/<id>          the folder

Making a folder deletes those of dead owners. On one machine the lock alone shows whether an owner runs, whatever the
clock does. A file system that several machines share may not report the locks of others: a folder of another machine,
or of an earlier boot, is deleted only when its lease is free and a day older than a file that was made just now, by
the file system's own clock. A folder without a lease, as earlier programs made them, is deleted after a day. In a
parent that others use, too, such as /tmp, all names have a prefix, and folders without a lease stay. In a parent that
is a link nothing is deleted: it may point to a folder of other files.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

STALE_S = 86_400
LEASE = ".lease"
MAKE_TRIES = 100
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@contextlib.contextmanager
def scratch_folder(parent: Path, prefix: str = "") -> Iterator[Path]:
    """Yield a new folder under `parent` and delete it afterwards; first delete those of dead processes. With a
    `prefix`, its name is that and 8 characters, and only its user can read it."""
    folder, lease, handle = _make_folder(parent, prefix)
    try:
        if prefix or not parent.is_symlink():  # names without a prefix may be those of another's folders
            _delete_abandoned(parent, prefix, lease.stat().st_mtime)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lease.unlink(missing_ok=True)
        os.close(handle)


def _make_folder(parent: Path, prefix: str) -> tuple[Path, Path, int]:
    for tries_left in reversed(range(MAKE_TRIES)):
        name = uuid.uuid4().hex
        folder = parent / (f"{prefix}{name[:8]}" if prefix else name)
        lease = folder.with_name(folder.name + LEASE)
        parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(lease, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        except FileNotFoundError:  # another process has deleted the empty parent
            if tries_left:
                continue
            raise PermissionError(errno.EACCES, "no file can be made there", str(parent)) from None  # as in /proc
        try:
            _lock(handle)
            os.write(handle, _boot_id().encode())  # an empty lease is not deleted as one of this boot
            folder.mkdir(0o700 if prefix else 0o777)
            return folder, lease, handle
        except BaseException as error:  # nothing stays, after Ctrl-C either
            os.close(handle)
            lease.unlink(missing_ok=True)
            if not (tries_left and isinstance(error, BlockingIOError)):  # another process is checking this lease
                raise
    raise AssertionError("the last try returns or raises")


def _delete_abandoned(parent: Path, prefix: str, now_s: float) -> None:
    """Delete folders without a living owner. `now_s` is the time of a file that was made just now."""
    names = {entry.name for entry in parent.iterdir() if entry.name.startswith(prefix)}
    for name in names:
        with contextlib.suppress(OSError):  # another process deleted it, or another user made it: any kind of file
            if name.endswith(LEASE):
                _delete_if_free(parent / name, now_s)
            elif not prefix and f"{name}{LEASE}" not in names and now_s - (parent / name).stat().st_mtime > STALE_S:
                shutil.rmtree(parent / name, ignore_errors=True)


def _delete_if_free(lease: Path, now_s: float) -> None:
    handle = os.open(lease, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)  # a read of a pipe must not wait
    try:
        is_own_boot = _lock(handle) and os.read(handle, 64).decode(errors="replace") == _boot_id()
        if is_own_boot or now_s - os.fstat(handle).st_mtime > STALE_S:
            shutil.rmtree(lease.with_name(lease.name.removesuffix(LEASE)), ignore_errors=True)
            lease.unlink(missing_ok=True)
    except BlockingIOError:
        pass  # its owner runs
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
    """Lock a lease. Returns False if the file system has no locks, raises BlockingIOError if it is locked."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _boot_id() -> str:
    """Return the id of this boot of this machine; the machine's name if the system has no boot ids."""
    return _BOOT_ID.read_text().strip() if _BOOT_ID.is_file() else os.uname().nodename
