"""Translate Ray's errors: to our own error if a task raised one, else to ResourceError."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from mvr_ray.errors import MvrRayError, ResourceError, first_line

_RAY_DATA_NOTE = "\nFailed to apply UDF transform"
"""Ray Data appends a paragraph about its retry settings to the message of an error of our function."""


@contextmanager
def translate_ray_errors(what: str) -> Iterator[None]:
    """Raise our own error if one caused Ray's, else ResourceError, which names `what`.

    A timeout (GetTimeoutError) passes unchanged: the caller set the deadline.
    """
    try:
        yield
    except TimeoutError:
        raise
    except ray_error_types() as error:
        raise unwrap_error(error, what) from error


def ray_error_types() -> tuple[type[Exception], ...]:
    """Return the types of Ray's errors; empty where Ray is not imported."""
    if "ray" not in sys.modules:
        return ()
    import ray.exceptions
    from ray.data.exceptions import SystemException

    return ray.exceptions.RayError, SystemException


def unwrap_error(error: BaseException, what: str) -> BaseException:
    """Return our error that caused one of Ray's; else the task's exception unchanged, else ResourceError."""
    import ray.exceptions

    at: BaseException | None = error
    while at is not None:
        if isinstance(at, ray.exceptions.RayTaskError) and isinstance(at.cause, MvrRayError):
            at.cause.args = str(at.cause).partition(_RAY_DATA_NOTE)[0], *at.cause.args[1:]
            return at.cause
        if isinstance(at, MvrRayError) and not isinstance(at, ray.exceptions.RayError):
            return at
        at = getattr(at, "cause", None) if isinstance(at, ray.exceptions.RayTaskError) else at.__cause__
    if isinstance(error, ray.exceptions.RayTaskError):
        return error
    return ResourceError(
        f"{what} stopped: {type(error).__name__}: {first_line(error)}; see whether a machine ran out of memory or left "
        f"the cluster, then run the same command again, it continues"
    )
