"""Makes commands of stages: runs one with a record, and prints its report, or its summary and the next command."""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mvr_ray.cli.app import (
    AsJson,
    Config,
    Overrides,
    PrintConfig,
    Verbose,
    app,
    exit_on_error,
    load_run,
    print_note,
    set_terminal_level,
)
from mvr_ray.cli.args import arguments_and_overrides
from mvr_ray.cli.summaries import summarize
from mvr_ray.cli.tables import print_json, print_result, report_tables
from mvr_ray.stages import StageFunction

if TYPE_CHECKING:  # pydantic's models take a fifth of a second to make
    from mvr_ray.config import RunConfig


def run_stage(
    name: str,
    run: "RunConfig",
    work: StageFunction,
    words: Sequence[str] = (),
    arguments: Mapping[str, str] | None = None,
    *,
    as_json: bool = False,
    verbose: bool = False,
) -> None:
    """Run one stage with a record of its own, then print its report as JSON, or its summary and the next command;
    `verbose`: also what summaries leave out.

    `words` are CONFIG and overrides as given, which the next command repeats; `arguments` the command's own. Inputs
    are checked before Ray or torch is imported.
    """
    from mvr_ray.cli.inputs import check_inputs, ready_command
    from mvr_ray.distributed.cluster import job_metrics, session
    from mvr_ray.progress import Reporter
    from mvr_ray.store.files import Store, without_keys
    from mvr_ray.store.runs import record, to_plain

    if verbose:
        logging.getLogger("mvr_ray").setLevel(logging.INFO)
        set_terminal_level(logging.INFO)
    with Reporter() as progress, session.announcing(progress.say), record(run, name) as run_record:
        if words:
            check_inputs(name, run, arguments or {})
        report = work(run, job_metrics.with_metrics(name, run.index.name, progress))
        run_record.report = _question_values_to_files(report, run, run_record.files)
    plain = to_plain(run_record.report)
    plain = plain if isinstance(plain, dict) else {name: plain}
    folder = Store(run.store.path).where(run_record.folder) if run_record.folder else ""
    plain.pop("values", None)
    if plain.pop("ranks", None) is not None:
        from mvr_ray.store.formats.question_ranks import QUESTION_RANKS

        is_written = folder and QUESTION_RANKS in run_record.files
        plain["questions_file"] = f"{folder}/{QUESTION_RANKS}" if is_written else None
    if as_json:
        print_json(plain)
        return
    if name == "mine" and words:  # the next command, train, refuses negatives that it would ignore
        if not run.train.questions:
            words = (*words, f"train.questions={run.mine.questions}")
        if not run.train.num_hard_negatives:
            words = (*words, "train.num_hard_negatives=1")
    summary = summarize(name, plain, words)
    print_result(*(report_tables(name, plain) if verbose or summary is None else summary.tables))
    if summary:
        print_result(summary.verdict)
    if folder:
        print_note(f"report: {folder}/report.json")
    if plain.get("questions_file"):
        print_note(f"every question's ranks, for `mvr-ray compare`: {plain['questions_file']}")
    if summary and words and (following := ready_command(summary.next, run)):
        print_note(without_keys(f"next: mvr-ray {following}"))


def _question_values_to_files(report: Any, run: "RunConfig", files: dict[str, bytes]) -> Any:
    """Return a report without the ranks and the measures of every question, which become files, as do the metrics of
    a training's steps."""
    if ranks := getattr(report, "ranks", None):
        from mvr_ray.store.formats.question_ranks import QUESTION_RANKS, question_ranks_bytes

        files[QUESTION_RANKS] = question_ranks_bytes(ranks)
        report = report._replace(ranks=[])
    if isinstance(views := getattr(report, "values", None), list) and views:
        from mvr_ray.store.formats.question_views import QUESTION_VIEWS, question_views_bytes

        files[QUESTION_VIEWS] = question_views_bytes({(report.index, run.encoder.seed): views})
        report = report._replace(values=[])
    if metrics_file := getattr(report, "metrics_file", ""):
        from mvr_ray.store.files import Store

        files[Path(metrics_file).name] = Store(run.store.path).read_bytes(metrics_file)
    return report


def stage_command(
    usage: str = "", check: Callable[[Mapping[str, str]], None] = lambda arguments: None, name: str = ""
) -> Callable[..., Any]:
    """Register a stage as a command of its own name, or of `name`; its docstring is the help.

    Its parameters after run and progress are arguments of the command: NAME=VALUE words among the overrides. `usage` is
    the hint for a missing one; `check` raises ConfigError for a wrong value.
    """

    def register(work: Callable[..., Any]) -> Callable[..., Any]:
        stage, parameters = name or work.__name__, list(inspect.signature(work).parameters.values())[2:]
        mandatory = [one.name for one in parameters if one.default is one.empty]
        optional = [one.name for one in parameters if one.default is not one.empty]

        def run_as_command(
            config: Config,
            overrides: Overrides = None,
            print_config: PrintConfig = False,
            as_json: AsJson = False,
            verbose: Verbose = False,
        ) -> None:
            arguments: dict[str, str] = {}
            if parameters:
                arguments, overrides = arguments_and_overrides(
                    stage, overrides or (), mandatory, optional, usage, show_only=print_config
                )
            if not print_config:
                check(arguments)
            run, words = load_run(config, overrides, print_config, as_json), (config, *(overrides or ()))
            step = functools.partial(work, **arguments)
            run_stage(stage, run, step, words, arguments, as_json=as_json, verbose=verbose)

        app.command(stage, help=work.__doc__)(exit_on_error(run_as_command))
        return work

    return register
