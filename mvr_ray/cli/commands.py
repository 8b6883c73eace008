"""Runs the command line: `mvr-ray STAGE CONFIG [section.key=value ...] [--print-config] [--json]`.

Every stage reads one run file, does its work, prints a table (or JSON) on stdout and stores config and report under
<store>/runs/. Exit status: 0 success, 1 failure, 2 wrong request, 130 interrupted (Ctrl-C or SIGTERM).
"""

import io
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mvr_ray import __version__
from mvr_ray.cli import stage_commands, version_commands  # noqa: F401 - they register commands, in this order
from mvr_ray.cli.app import AsJson, Config, Overrides, PrintConfig, Verbose, app, command, load_run, set_terminal_level
from mvr_ray.cli.tables import plan_table, print_json, print_result, size, stdout_error, table, write
from mvr_ray.errors import is_full_disk


def run_words(arguments: Sequence[str] | None = None) -> None:
    """Run the command of these words, or of the process's own; always ends by SystemExit."""
    if sys.stdout is None:  # the next file to be opened would take its place
        sys.exit("mvr-ray: standard output is closed; redirect it to a file, or to /dev/null")
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - open as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # of a locale that lacks a character
    try:
        Path.cwd()
    except FileNotFoundError:
        sys.exit("mvr-ray: the working folder was deleted; change to one that exists")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    set_terminal_level(logging.WARNING)  # a run's record takes INFO lines, the terminal does not
    try:
        app(args=None if arguments is None else list(arguments), prog_name="mvr-ray")
    except OSError as error:  # of --help, which typer prints: `exit_on_error` ends commands
        if not is_full_disk(error):
            raise
        sys.exit(f"mvr-ray: {stdout_error(error)}")


@command
def plan(
    config: Config,
    overrides: Overrides = None,
    passages: Annotated[int, typer.Option(help="Passages, where `prepare` has not counted them.")] = 0,
    print_config: PrintConfig = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Estimate disk, memory and GPU memory, before anything runs."""
    run = load_run(config, overrides, print_config, as_json)
    from mvr_ray import capacity

    corpus = capacity.corpus_size(run, passages)
    sizes = capacity.plan(run, corpus, capacity.most_feedback_views(run, corpus), capacity.passage_bytes(run))
    if as_json:
        totals = {kind: sizes.total(kind) for kind in ("disk", "memory", "gpu")}
        lines = [{**line._asdict(), "bytes_all": line.bytes_all} for line in sizes.lines]
        print_json({**sizes._asdict(), "lines": lines, "totals": totals})
    else:
        print_result(plan_table(sizes, with_notes=verbose))
        gpu = f" and {size(sizes.total('gpu'))} of GPU memory" if sizes.total("gpu") else ""
        disk, memory = size(sizes.total("disk")), size(sizes.total("memory"))
        print_result(f"needed: {disk} of disk, {memory} of memory{gpu}")


@command
def doctor(
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG]", help="A run file, for its cluster.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Check what this machine and its cluster have and lack.

    The cluster is that of `resources.address` or RAY_ADDRESS.
    """
    from mvr_ray.config import RunConfig
    from mvr_ray.distributed.cluster import session

    run = load_run(config, overrides) if config else RunConfig()
    checks = session.doctor(run.resources, run.index.precision)
    if as_json:
        print_json(checks)
    else:
        print_result(table("doctor", ("check", "ok", "detail"), checks))
    missing = [check.name for check in checks if not check.ok]
    if not as_json:
        print_result(f"missing: {', '.join(missing)}" if missing else "nothing is missing")
    if missing:
        raise typer.Exit(1)


@command
def compare(
    first: Annotated[
        str,
        typer.Argument(
            help="A ranking of `retrieve` (.json, .jsonl, .parquet, or a TREC run), or FILE:SYSTEM, a system of a file "
            "of question ranks that `evaluate` or `study` wrote."
        ),
    ],
    second: Annotated[str, typer.Argument(help="Another over the same questions.")],
    k: Annotated[list[int] | None, typer.Option("-k", help="Cut-offs of top-k accuracy; may be given again.")] = None,
    qrels: Annotated[
        Path | None,
        typer.Option(help="Which passages count: TREC or BEIR qrels, or a question file with gold passages."),
    ] = None,
    questions: Annotated[str | None, typer.Option(help="The question set, where FILE:SYSTEM has several.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the paired test.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Compare two rankings question by question, with a paired test."""
    from mvr_ray import comparison
    from mvr_ray.store.runs import to_plain

    rows = to_plain(comparison.compare(first, second, k, seed, qrels, questions))
    if as_json:
        print_json(rows)
    else:
        print_result(table(f"{first} against {second}", list(rows[0]), [list(row.values()) for row in rows]))


@command
def version() -> None:
    """Print the version of this package."""
    write(f"mvr_ray {__version__}\n")
