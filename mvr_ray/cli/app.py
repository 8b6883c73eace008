"""Defines what commands share: the application, arguments, exit statuses, and how a command ends.

Exit status: 0 success, 1 failure, 2 wrong request, 130 interrupted (Ctrl-C or SIGTERM).
"""

import errno
import functools
import logging
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mvr_ray.cli.summaries import summarize
from mvr_ray.cli.tables import print_json, print_result, results_only, write
from mvr_ray.errors import ConfigError, MvrRayError, is_full_disk

if TYPE_CHECKING:  # pydantic's models take a fifth of a second to make
    from mvr_ray.config import RunConfig

app = typer.Typer(
    name="mvr-ray",
    help="Multi-view passage retrieval on Ray. Begin with: mvr-ray init DATA",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Config = Annotated[str, typer.Argument(metavar="CONFIG", help="The run file, such as configs/squad.yaml.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Laid over the run file; values are YAML.")
]
QuestionWords = Annotated[
    list[str] | None,
    typer.Argument(metavar="QUESTION [SECTION.KEY=VALUE]...", help="One question, in quotes, and overrides around it."),
]
OutputWords = Annotated[
    list[str] | None,
    typer.Argument(metavar="output=FILE [SECTION.KEY=VALUE]...", help="The file to write; overrides of the run file."),
]
FilterText = Annotated[
    str | None, typer.Option("--filter", help='Only passages whose fields pass, as JSON: \'{"year": {"gte": 1958}}\'.')
]
Version = Annotated[int | None, typer.Option(help="An index version; absent: the live one.")]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Show the resolved run and stop.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Print the whole report and the log, not the summary alone.")
]


def exit_on_error(function: Callable[..., None]) -> Callable[..., None]:
    """Convert an MvrRayError to its message on stderr and an exit status; SIGTERM interrupts as Ctrl-C does."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            with results_only(), _interrupt_on_sigterm():
                function(*args, **kwargs)
        except MvrRayError as error:
            cause = getattr(error, "cause", None)  # an error of mvr_ray that crossed a Ray task
            origin = cause if isinstance(cause, MvrRayError) else error
            print_note(f"mvr-ray: {origin}")
            raise typer.Exit(2 if isinstance(origin, ConfigError) else 1) from None
        except BrokenPipeError as error:  # of a connection: typer would take it for stdout's, and exit without a word
            raise RuntimeError("a process or server closed its connection") from error
        except OSError as error:
            if isinstance(error, PermissionError) and error.filename:
                advice = "check the permissions of it and of the folders above"
                print_note(f"mvr-ray: {error.filename}: permission denied; {advice}")
                raise typer.Exit(1) from None
            if is_full_disk(error):
                print_note(f"mvr-ray: {error}; free space and run the same command again")
                raise typer.Exit(1) from None
            if error.errno != errno.ENAMETOOLONG:
                raise
            name = Path(str(error.filename or error)).name
            print_note(f"mvr-ray: the file system has no name as long as {name:.40}... ({len(name)} characters)")
            raise typer.Exit(2) from None

    return run


@contextmanager
def _interrupt_on_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, which service managers send, so that the run is recorded and leaves Ray."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Register a function as a command of its name; its docstring is the help."""
    return app.command()(exit_on_error(function))


def load_run(
    config: str, overrides: Sequence[str] | None, print_config: bool = False, as_json: bool = False
) -> "RunConfig":
    """Read the run file. With `print_config`, print it and end the command."""
    from mvr_ray.store.run_file import load_run_at

    run = load_run_at(config, overrides or ())
    if not print_config:
        return run
    plain = run.model_dump(mode="json")
    if as_json:
        print_json(plain)
    else:
        from mvr_ray.config.loader import write_yaml

        write(write_yaml(plain))
    raise typer.Exit


def conclude(command: str, report: Mapping[str, Any], words: Sequence[str], run: "RunConfig") -> None:
    """Print the verdict on a plain report, and the next command."""
    from mvr_ray.cli.inputs import ready_command

    if summary := summarize(command, report, words):
        print_result(summary.verdict)
        print_note(f"next: mvr-ray {ready_command(summary.next, run)}")


def set_terminal_level(level: int) -> None:
    for handler in logging.getLogger().handlers:
        handler.setLevel(level)


def print_note(line: str) -> None:
    """Write a line beside the results, on stderr."""
    sys.stderr.write(line + "\n")
