"""The command line: `mvr-ray STAGE CONFIG [section.key=value ...] [--print-config] [--json]`.

Every stage reads one run file, does its work, prints a table (or JSON) on stdout and stores config and report under
<store>/runs/. Exit status: 0 success, 1 failure, 2 wrong request, 130 interrupted (Ctrl-C or SIGTERM).
"""

import errno
import functools
import inspect
import io
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from mvr_ray import __version__
from mvr_ray.cli import tables
from mvr_ray.cli.args import arguments_and_overrides, json_object, question_and_overrides, require_writable
from mvr_ray.cli.summaries import summarize, versions_tables
from mvr_ray.cli.tables import print_json, print_result, report_tables, results_only, table, write
from mvr_ray.errors import ConfigError, MvrRayError, is_full_disk
from mvr_ray.stages import STAGES, StageFunction

if TYPE_CHECKING:  # pydantic's models take a fifth of a second to make
    from mvr_ray.config import RunConfig
    from mvr_ray.store.formats.rankings import RankingFormat
    from mvr_ray.types import Progress

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
    list[str],
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


def run_words(arguments: Sequence[str] | None = None) -> None:
    """Run the command of these words, or of the process's own; always ends by SystemExit."""
    if sys.stdout is None:  # the next file to be opened would take its place
        sys.exit("mvr-ray: standard output is closed; redirect it to a file, or to /dev/null")
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - open as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # of a locale that lacks a character
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    _set_terminal_level(logging.WARNING)  # a run's record takes INFO lines, the terminal does not
    try:
        app(args=None if arguments is None else list(arguments), prog_name="mvr-ray")
    except OSError as error:  # of --help, which typer prints: `exit_on_error` ends commands
        if not is_full_disk(error):
            raise
        sys.exit(f"mvr-ray: {tables.stdout_error(error)}")


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
            _err(f"mvr-ray: {origin}")
            raise typer.Exit(2 if isinstance(origin, ConfigError) else 1) from None
        except BrokenPipeError as error:  # of a connection: typer would take it for stdout's, and exit without a word
            raise RuntimeError("a process or server closed its connection") from error
        except OSError as error:
            if isinstance(error, PermissionError) and error.filename:
                advice = "check the permissions of it and of the folders above"
                _err(f"mvr-ray: {error.filename}: permission denied; {advice}")
                raise typer.Exit(1) from None
            if is_full_disk(error):
                _err(f"mvr-ray: {error}; free space and run the same command again")
                raise typer.Exit(1) from None
            if error.errno != errno.ENAMETOOLONG:
                raise
            name = Path(str(error.filename or error)).name
            _err(f"mvr-ray: the file system has no name as long as {name:.40}... ({len(name)} characters)")
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
        _set_terminal_level(logging.INFO)
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
        _err(f"report: {folder}/report.json")
    if plain.get("questions_file"):
        _err(f"every question's ranks, for `mvr-ray compare`: {plain['questions_file']}")
    if summary and words and (following := ready_command(summary.next, run)):
        _err(without_keys(f"next: mvr-ray {following}"))


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


def _load_run(
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
        import yaml

        write(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))
    raise typer.Exit


def _run_and_output(command: str, config: str, words: Sequence[str] | None, ending: str) -> tuple["RunConfig", Path]:
    """Read the run file, and check the `output=FILE` of a command that writes a file of a version."""
    usage = f"give output=FILE{ending}"
    arguments, overrides = arguments_and_overrides(command, words or (), ("output",), (), usage, show_only=False)
    file = Path(arguments["output"])
    if file.suffix != ending:
        raise ConfigError(f"{command}: output={file} does not end in {ending}; {usage}")
    require_writable(file, f"{command}: output={file}")
    return _load_run(config, overrides), file


def _conclude(command: str, report: Mapping[str, Any], words: Sequence[str]) -> None:
    """Print the verdict on a plain report, and the next command."""
    if summary := summarize(command, report, words):
        print_result(summary.verdict)
        _err(f"next: mvr-ray {summary.next}")


def _set_terminal_level(level: int) -> None:
    for handler in logging.getLogger().handlers:
        handler.setLevel(level)


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
            run, words = _load_run(config, overrides, print_config, as_json), (config, *(overrides or ()))
            step = functools.partial(work, **arguments)
            run_stage(stage, run, step, words, arguments, as_json=as_json, verbose=verbose)

        app.command(stage, help=work.__doc__)(exit_on_error(run_as_command))
        return work

    return register


@command
def init(
    data: Annotated[list[str], typer.Argument(metavar="DATA...", help="Files, folders or hf:OWNER/NAME.")],
    output: Annotated[Path | None, typer.Option(help="The run file; absent: named after the data.")] = None,
) -> None:
    """Write a run file by looking at the data; start here.

    DATA is any source: CSV, TSV, JSON lines, Parquet, SQuAD, BEIR, MS MARCO, a folder of text or Markdown files, a
    MediaWiki dump, a Hugging Face data set.
    """
    from mvr_ray.cli.init_run import write_run_file

    file, samples = write_run_file(data, output)
    for sample in samples:
        print_result(sample.title)
        if sample.bad:
            print_result(f"  a bad row, which `prepare` refuses: {sample.bad}")
    print_result(f"written: {file}")
    _err(f"next: mvr-ray prepare {shlex.quote(str(file))}")


_SAVE_BEST = "save=best stores the best weights so far of an interrupted training; settings are section.key=value"
_USAGE = {
    "evaluate": "give ranking=FILE (a TREC run, or a ranking in dpr, pyserini, jsonl or parquet), or nothing",
    "train": _SAVE_BEST,
}


def _check_save(arguments: Mapping[str, str]) -> None:
    if arguments.get("save", "best") != "best":
        raise ConfigError(f"train: save={arguments['save']} is not known; {_SAVE_BEST}")


for _name, _work in STAGES.items():
    stage_command(_USAGE.get(_name, ""), _check_save, _name)(_work)


def _check_format(arguments: Mapping[str, str]) -> None:
    from mvr_ray.store.formats.rankings import RankingFormat

    if arguments.get("format", "dpr") not in get_args(RankingFormat):
        raise ConfigError(f"retrieve: format={arguments['format']} is not one of {', '.join(get_args(RankingFormat))}")


@stage_command(
    "give questions=FILE (or a stored set), output=FILE, format=dpr|trec|msmarco|pyserini|jsonl|parquet", _check_format
)
def retrieve(
    run: "RunConfig", progress: "Progress", questions: str, output: str, format: "RankingFormat" = "dpr"
) -> Any:
    """Rank passages for many questions into a file.

    `retrieve CONFIG questions=FILE output=FILE format=dpr|trec|msmarco|pyserini|jsonl|parquet`; questions may be a
    stored set.
    """
    from mvr_ray.distributed import retrieve as stage

    return stage.retrieve(run, questions, Path(output), format, progress)


@stage_command("give questions=SET, a stored question set with gold passages that is not one of evaluate.questions")
def tune(run: "RunConfig", progress: "Progress", questions: str) -> Any:
    """Choose the weight of words and views, search.hybrid.

    `tune CONFIG questions=SET`, a set with questions that are not reported on.
    """
    from mvr_ray.distributed import evaluate as stage

    return stage.tune(run, questions, progress)


@stage_command(
    "give ranking=FILE as `mvr-ray retrieve` wrote it (dpr or jsonl), and output=FILE to keep the predictions"
)
def read(run: "RunConfig", progress: "Progress", ranking: str, output: str = "") -> Any:
    """Read answers out of ranked passages and score them.

    `read CONFIG ranking=FILE [output=FILE]`, a file of `retrieve` in format dpr or jsonl.
    """
    from mvr_ray.distributed import read as stage

    return stage.read(run, ranking, Path(output) if output else None, progress)


@stage_command('give changes=FILE: lines of {"id", "title", "text"}, {"id", "set": {...}} or {"id", "delete": true}')
def update(run: "RunConfig", progress: "Progress", changes: str) -> Any:
    """Upsert and delete passages of the corpus; then run `index`.

    `update CONFIG changes=FILE`, lines of {"id", "title", "text"}, {"id", "set": {...}} or {"id", "delete": true}.
    """
    from mvr_ray.store import update as stage
    from mvr_ray.store.files import Store

    return stage.update(run.prepare, Store(run.store.path), changes, progress, index=run.index.name)


@command
def follow(
    config: Config,
    overrides: Overrides = None,
    once: Annotated[bool, typer.Option("--once", help="End when no change file waits any more.")] = False,
    print_config: PrintConfig = False,
    as_json: AsJson = False,
) -> None:
    """Apply change files as they come (follow.source), until Ctrl-C.

    Every batch is published as a version.
    """
    run = _load_run(config, overrides, print_config, as_json)
    from mvr_ray.distributed.indexing import follow as stage
    from mvr_ray.progress import Reporter
    from mvr_ray.store.runs import to_plain

    report = stage.FollowReport()
    with Reporter() as progress:
        try:
            stage.follow(run, report, progress.say, progress, once=once)
        except KeyboardInterrupt:
            progress.say("follow ended; what was not applied is applied by the same command")
    if as_json:
        print_json(report)
    else:
        plain = to_plain(report)
        print_result(*report_tables("follow", plain))
        _conclude("follow", {**plain, "index": run.index.name}, (config, *(overrides or ())))


@stage_command()
def compact(run: "RunConfig", progress: "Progress") -> Any:
    """Write shards whole that have changes beside them."""
    from mvr_ray.distributed.indexing import rewrite as stage

    return stage.compact(run, progress)


_SHARDS = "give shards=N, the number of shards that the next version shall have"


def _check_shards(arguments: Mapping[str, str]) -> None:
    if not arguments["shards"].isdecimal():
        raise ConfigError(f"reshard: shards={arguments['shards']} is not a whole number; {_SHARDS}")


@stage_command(_SHARDS, _check_shards)
def reshard(run: "RunConfig", progress: "Progress", shards: str) -> Any:
    """Redistribute the live version over a new number of shards.

    `reshard CONFIG shards=12`; nothing is encoded.
    """
    from mvr_ray.distributed.indexing import rewrite as stage

    return stage.reshard(run, int(shards), progress)


@command
def study(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="STUDY... [NAME=VALUE]...",
            help="Study files; size, only, earlier, output and at_once; and SECTION.KEY=VALUE, laid over the run file.",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Run a grid of variants and write its report.

    `study configs/studies/mvr-views.yaml size=quick`, only=REGEX for the variants whose names have a match, and
    earlier=DIR for those that a report made elsewhere has
    """
    usage = "give study files, size=quick|gpu|paper, only=REGEX, earlier=DIR, output=DIR, at_once=N, section.key=value"
    paths, words = [word for word in files if "=" not in word], [word for word in files if "=" in word]
    names = ("size", "only", "earlier", "output", "at_once")
    options, overrides = arguments_and_overrides("study", words, (), names, usage, show_only=False)
    if not paths:
        raise ConfigError(f"study: no study file is named; {usage}")
    if not options.get("at_once", "1").isdecimal():
        raise ConfigError(f"study: at_once={options['at_once']}; it is how many steps run side by side, a whole number")
    from mvr_ray.progress import Reporter
    from mvr_ray.studies.study import run_study

    size, extra = options.get("size", "quick"), tuple(overrides)
    output, earlier = (Path(options[name]) if name in options else None for name in ("output", "earlier"))
    at_once = int(options["at_once"]) if "at_once" in options else None
    for path in paths:
        with Reporter() as progress:
            progress.say(f"== {path}")
            result = run_study(path, size, extra, output, progress, at_once, options.get("only", ""), earlier)
        if as_json:
            print_json(result)
        else:
            print_result(*(table(one.title, one.columns, one.rows) for one in result.tables))
            _err(f"report: {result.folder}/report.html")


@command
def search(
    config: Config,
    words: QuestionWords,
    k: Annotated[int, typer.Option("-k", help="Distinct passages to show.")] = 5,
    version: Version = None,
    filter: FilterText = None,
    fields: Annotated[str, typer.Option(help="Fields to show with each passage, separated by commas.")] = "",
    print_config: PrintConfig = False,
    as_json: AsJson = False,
) -> None:
    """Answer one question: passages, scores, snippets that matched."""
    question, overrides = question_and_overrides("search", words, show_only=print_config)
    run = _load_run(config, overrides, print_config, as_json)
    from mvr_ray.cli.search_once import SearchRequest, open_service

    condition = None if filter is None else json_object("search: --filter", filter)
    names = [name.strip() for name in fields.split(",") if name.strip()]
    request = SearchRequest(queries=[question], k=k, filter=condition, fields=names)
    with open_service("search", run, version, request) as service:
        response = service.search(request)
    if as_json:
        print_json(response)
        return
    coverage = f"{response.coverage.passages_searched:,} of {response.coverage.passages_total:,} passages searched"
    print_result(
        *(tables.hit_text(rank, hit) for rank, hit in enumerate(response.results[0], 1)),
        f"index {response.index} version {response.version}, {coverage}, {tables.exactness(response.exact)}",
    )


@command
def explain(
    config: Config,
    words: QuestionWords,
    more: Annotated[
        list[str] | None, typer.Option("--question", help="A further question; may be given again.")
    ] = None,
    passages: Annotated[list[str] | None, typer.Option("--passage", help="A passage's id; may be given again.")] = None,
    k: Annotated[int, typer.Option("-k", help="Best passages a question, where no passage is named.")] = 3,
    version: Version = None,
    html: Annotated[Path | None, typer.Option(help="Also write one self-contained page to this file.")] = None,
    print_config: PrintConfig = False,
    as_json: AsJson = False,
) -> None:
    """Score every view of a passage with a question."""
    question, overrides = question_and_overrides("explain", words, show_only=print_config)
    run = _load_run(config, overrides, print_config, as_json)
    from mvr_ray.cli.search_once import ExplainRequest, open_service
    from mvr_ray.explanation import render_html
    from mvr_ray.store.files import finished_file

    if html is not None:
        require_writable(html, f"explain: --html {html}")
    request = ExplainRequest(questions=[question, *(more or ())], passages=passages or [], k=k)
    with open_service("explain", run, version, request) as service:
        explanation = service.explain(request)
    if html is not None:
        with finished_file(html) as aside:
            aside.write_text(render_html(explanation), encoding="utf-8")
        _err(f"page: {html}")
    if as_json:
        print_json(explanation)
    else:
        print_result(*(tables.explanation_table(passage, explanation.questions) for passage in explanation.passages))


@command
def serve(
    config: Config,
    overrides: Overrides = None,
    version: Version = None,
    print_config: PrintConfig = False,
    as_json: AsJson = False,
) -> None:
    """Answer HTTP requests until interrupted: search page and API.

    Runs on Ray Serve; GET /openapi.json describes every route.
    """
    run = _load_run(config, overrides, print_config, as_json)
    from mvr_ray.cli.inputs import check_version

    check_version(run, version)
    from mvr_ray.serving.replica import serve_until_interrupted

    serve_until_interrupted(run, version, _err)


@command
def versions(
    config: Config,
    action: Annotated[str, typer.Argument(help="list, show, verify, repair, rollback or collect.")] = "list",
    rest: Annotated[list[str] | None, typer.Argument(metavar="[VERSION] [SECTION.KEY=VALUE]...")] = None,
    sizes_only: Annotated[
        bool, typer.Option("--unchecked", help="Of rollback: look at the sizes of files alone, and say so.")
    ] = False,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """List, show, verify, repair, roll back or collect versions."""
    words = [action, *(rest or ())]
    overrides = [word for word in words if "=" in word]
    action, *names = [word for word in words if "=" not in word] or ["list"]
    for name in names:
        if not name.isdecimal():
            raise ConfigError(
                f"versions {action}: {name!r} is no version; give its number, as `versions {config}` shows"
            )
    if len(names) > 1:
        raise ConfigError(f"versions {action}: {len(names)} versions are named ({', '.join(names)}); name one")
    run = _load_run(config, overrides)
    from mvr_ray import versions as actions
    from mvr_ray.store.runs import to_plain

    result = actions.act(run, action, int(names[0]) if names else None, sizes_only)
    plain = to_plain(result)
    if as_json:
        print_json(result)
    else:
        print_result(*versions_tables(run.index.name, action, plain, verbose=verbose))
    if action in ("verify", "repair"):
        result.require()
    if action in ("rollback", "repair", "collect") and not as_json:
        _conclude(action, {**plain, "index": run.index.name}, (config, *overrides))
    if action == "verify" and not as_json:
        print_result(f"whole: {result.num_files:,} files, {tables.size(result.num_bytes)}, each equal to its digest")


@command
def export(
    config: Config,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that does not exist yet.")],
    overrides: Overrides = None,
    version: Version = None,
) -> None:
    """Write the encoder as a folder that sentence-transformers loads.

    It is the encoder of the index's version. Prints what such a folder cannot represent.
    """
    run = _load_run(config, overrides)
    if folder.exists() or not folder.absolute().parent.is_dir():
        raise ConfigError(f"export: {folder} exists already, or the folder above it does not; name a new one")
    from mvr_ray.store import manifest
    from mvr_ray.store.files import Store, finished_file

    store = Store(run.store.path)
    live = manifest.read(store, run.index.name, version)
    from mvr_ray.distributed.encoders import open_encoder

    encoder = open_encoder(store, live.encoder_name, live.encoder_fingerprint, only_embeds=False)
    with finished_file(folder) as aside:
        losses = encoder.export(aside)
    for loss in losses:
        print_result(f"not carried: {loss}")
    print_result(f"written: {folder}, encoder {live.encoder_name}/{live.encoder_fingerprint}")
    _err(f"load it by: SentenceTransformer({str(folder)!r})")


@command
def passages(
    config: Config,
    words: OutputWords = None,
    filter: FilterText = None,
    version: Version = None,
    as_json: AsJson = False,
) -> None:
    """Write passages as JSON lines, which `prepare` and `update` read.

    `passages CONFIG output=FILE.jsonl [--filter JSON]`; they are those of the index's version.
    """
    run, file = _run_and_output("passages", config, words, ".jsonl")
    condition = None if filter is None else json_object("passages: --filter", filter)
    from mvr_ray.errors import FilterError, count_noun
    from mvr_ray.progress import Reporter
    from mvr_ray.store import manifest
    from mvr_ray.store.corpus import Corpus
    from mvr_ray.store.files import Store
    from mvr_ray.store.filters import parse_filter
    from mvr_ray.store.formats.rows import write_jsonl

    store = Store(run.store.path)
    live = manifest.read(store, run.index.name, version)
    corpus = Corpus.open(store, live.corpus, live.corpus_digest)
    try:
        own = None if condition is None else parse_filter(condition, corpus.fields)
    except FilterError as error:
        raise ConfigError(f"passages: {error}") from None
    with Reporter() as progress:
        num_passages = write_jsonl(file, corpus.scan(own), progress, 0 if own else corpus.num_passages)
    settings = {"sources": [str(file)]} | ({"fields": corpus.fields} if corpus.fields else {})
    others = {"chunk_words": 0, "max_passages": 0, "splits": []}  # the file has chunks, all passages, and no questions
    settings |= {name: value for name, value in others.items() if getattr(run.prepare, name)}
    if as_json:
        print_json({"passages": num_passages, "version": live.version, "prepare": settings})
        return
    print_result(f"written: {file}, {count_noun(num_passages, 'passage')} of version {live.version}")
    overrides = shlex.join(f"prepare.{key}={json.dumps(value)}" for key, value in settings.items())
    _err(f"settings by which `prepare` reads it: {overrides}")


@command
def vectors(config: Config, words: OutputWords = None, version: Version = None, as_json: AsJson = False) -> None:
    """Write the views of all passages as a Parquet file.

    `vectors CONFIG output=FILE.parquet`: columns passage_id, view and vector, a row a view of the index's version.
    """
    run, file = _run_and_output("vectors", config, words, ".parquet")
    from mvr_ray.distributed.indexing.shards import version_blocks
    from mvr_ray.progress import Reporter
    from mvr_ray.store import manifest
    from mvr_ray.store.files import Store
    from mvr_ray.store.formats.view_vectors import write_vectors

    store = Store(run.store.path)
    live = manifest.read(store, run.index.name, version)
    with Reporter() as progress:
        num = write_vectors(file, version_blocks(store, live), live.dimension, live.num_vectors, progress)
    if as_json:
        print_json({"vectors": num, "dimension": live.dimension, "version": live.version, "output": str(file)})
    else:
        print_result(f"written: {file}, {num:,} vectors of {live.dimension} of version {live.version}")


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
    run = _load_run(config, overrides, print_config, as_json)
    from mvr_ray import capacity

    size = capacity.corpus_size(run, passages)
    sizes = capacity.plan(run, size, capacity.most_feedback_views(run, size), capacity.passage_bytes(run))
    if as_json:
        totals = {kind: sizes.total(kind) for kind in ("disk", "memory", "gpu")}
        lines = [{**line._asdict(), "bytes_all": line.bytes_all} for line in sizes.lines]
        print_json({**sizes._asdict(), "lines": lines, "totals": totals})
    else:
        print_result(tables.plan_table(sizes, with_notes=verbose))
        gpu = f" and {tables.size(sizes.total('gpu'))} of GPU memory" if sizes.total("gpu") else ""
        disk, memory = tables.size(sizes.total("disk")), tables.size(sizes.total("memory"))
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

    run = _load_run(config, overrides) if config else RunConfig()
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
    qrels: Annotated[Path | None, typer.Option(help="TREC qrels: they say which passages count.")] = None,
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


def _err(line: str) -> None:
    sys.stderr.write(line + "\n")
