"""Convert errors of a disk or an object store to StorageError, which names the action and the remedy."""

import contextlib
import errno
from collections.abc import Callable, Iterator

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from mvr_ray.errors import AccessError, NoAnswerError, StorageError, is_full_disk
from mvr_ray.store.objects import reason_of


@contextlib.contextmanager
def storage_errors(
    action: str,
    where: str,
    num_bytes: int = 0,
    free_bytes: Callable[[], int | None] | None = None,
    *,
    only_full_disk: bool = False,
) -> Iterator[None]:
    """Convert errors of the system and of obstore, and any library's of a full disk, to StorageError, which names the
    action and the remedy; with `only_full_disk`, no others."""
    try:
        yield
    except (FileNotFoundError, FileExistsError, StorageError):
        raise
    except Exception as error:  # of any library, where the disk is full; others pass
        full = is_full_disk(error)
        if not full and (only_full_disk or not isinstance(error, OSError | BaseError)):
            raise
        free = free_bytes() if full and free_bytes else None
        size = f"{num_bytes} bytes to write, {free} free" if num_bytes else f"{free} bytes free"
        space = f" ({size})" if free is not None else ""
        cure = "free space and run the same command again" if full else "check the path and its permissions"
        reason = getattr(error, "strerror", None) or reason_of(error)
        is_denied = getattr(error, "errno", None) in (errno.EACCES, errno.EPERM, errno.EROFS)
        is_denied |= isinstance(error, PermissionDeniedError | UnauthenticatedError)
        kind = AccessError if is_denied else NoAnswerError if isinstance(error, BaseError) else StorageError
        raise kind(f"cannot {action} {where}: {reason}{space}; {cure}") from error
