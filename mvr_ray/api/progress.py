"""Decide whether a method of `Index` or `Encoder` shows its progress."""

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from mvr_ray.types import Progress, no_progress


@contextmanager
def progress_callback(progress: Progress | bool | None) -> Iterator[Progress]:
    """Return a callback as it is; for True one that shows progress on stderr, for False none. None is True on a
    terminal and in IPython."""
    if progress is None:
        is_terminal = False
        with suppress(AttributeError, ValueError):  # stderr is None, an object without isatty, or closed
            is_terminal = sys.stderr.isatty()
        progress = is_terminal or hasattr(builtins, "__IPYTHON__")
    if not isinstance(progress, bool):
        yield progress
    elif progress:
        from mvr_ray.progress import Reporter

        with Reporter() as reporter:
            yield reporter
    else:
        yield no_progress
