"""Provides the command line `mvr-ray`: commands, arguments, tables, progress."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `mvr-ray`, or a script in jobs/, on the words of the command line; always end by SystemExit."""
    with exit_on_interrupt():
        from mvr_ray.cli.commands import run_words  # Ctrl-C may come while this is imported

        run_words(arguments)


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Convert Ctrl-C to one line on stderr and exit status 130, which is all that typer makes of it."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as end:
        if isinstance(end, SystemExit) and end.code != 130:
            raise
        exec("")  # else an interrupt within `exec`, as of a named tuple's definition, lets `python -m` end by SIGINT
        sys.stderr.write("mvr-ray: interrupted; the same command continues where it stopped\n")
        sys.exit(130)
