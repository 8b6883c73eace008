"""Raises the limit of open files of a process that searches, and says what to do where that is too low.

A searcher keeps the files of a shard open, about five with words, and systems often allow a process 1,024.
"""

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mvr_ray.errors import MvrRayError, ResourceError, StorageError

MAX_OPEN_FILES = 65_536


def raise_file_limit() -> None:
    """Let this process open as many files as the system's hard limit allows, up to MAX_OPEN_FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with suppress(OSError, ValueError):  # macOS may allow less than its hard limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


@contextmanager
def translate_open_errors(what: str) -> Iterator[None]:
    """Convert the system's errors, where `what` is opened, to StorageError; too many open files to ResourceError."""
    try:
        yield
    except (MvrRayError, OSError) as error:
        cause = error.__cause__ or error
        if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise ResourceError(
                f"{what} not opened: too many open files, of which this process may have {limit:,}; raise the limit "
                f"(ulimit -n), use more searchers, or make fewer shards (mvr-ray reshard CONFIG shards=N)"
            ) from error
        if isinstance(error, MvrRayError):
            raise
        raise StorageError(f"{what} cannot be read: {error}; check its files and their permissions") from error
