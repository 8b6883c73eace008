"""Defines the commands that run stages, make a first run file, follow changes, and run studies."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from mvr_ray.cli.app import AsJson, Config, Overrides, PrintConfig, command, conclude, load_run, print_note
from mvr_ray.cli.args import arguments_and_overrides
from mvr_ray.cli.stage_runs import stage_command
from mvr_ray.cli.tables import print_json, print_result, report_tables, table
from mvr_ray.errors import ConfigError
from mvr_ray.stages import STAGES

if TYPE_CHECKING:  # pydantic's models take a fifth of a second to make
    from mvr_ray.config import RunConfig
    from mvr_ray.store.formats.rankings import RankingFormat
    from mvr_ray.types import Progress


@command
def init(
    data: Annotated[list[str], typer.Argument(metavar="DATA...", help="Files, folders or hf:OWNER/NAME.")],
    output: Annotated[Path | None, typer.Option(help="The run file; absent: named after the data.")] = None,
) -> None:
    """Write a run file by looking at the data; start here.

    DATA is any source: CSV, TSV, JSON lines, Parquet, SQuAD, BEIR, MS MARCO, training triples, a folder of text or
    Markdown files, a MediaWiki dump, a Hugging Face data set.
    """
    from mvr_ray.cli.init_run import write_run_file

    file, samples = write_run_file(data, output)
    for sample in samples:
        print_result(sample.title)
        if sample.bad:
            print_result(f"  a bad row, which `prepare` refuses: {sample.bad}")
    print_result(f"written: {file}")
    print_note(f"next: mvr-ray prepare {shlex.quote(str(file))}")


_SAVE_BEST = "save=best stores the best weights so far of an interrupted training; settings are section.key=value"
_USAGE = {
    "evaluate": "give version=N, ranking=FILE (a TREC run, or one in dpr, pyserini, jsonl or parquet), or nothing",
    "train": _SAVE_BEST,
}


def _check_number(command: str, arguments: Mapping[str, str], name: str, hint: str) -> None:
    if not (value := arguments.get(name, "0")).isdecimal():
        raise ConfigError(f"{command}: {name}={value} is not a whole number; {hint}")


def _check_save(arguments: Mapping[str, str]) -> None:
    if arguments.get("save", "best") != "best":
        raise ConfigError(f"train: save={arguments['save']} is not known; {_SAVE_BEST}")


def _check_version(arguments: Mapping[str, str]) -> None:
    _check_number("evaluate", arguments, "version", "`mvr-ray versions CONFIG` lists the versions")


_CHECKS = {"train": _check_save, "evaluate": _check_version}
for _name, _work in STAGES.items():
    stage_command(_USAGE.get(_name, ""), _CHECKS.get(_name, lambda arguments: None), _name)(_work)


def _check_ranking(arguments: Mapping[str, str]) -> None:
    from mvr_ray.store.formats.rankings import RankingFormat

    _check_number("retrieve", arguments, "version", "`mvr-ray versions CONFIG` lists the versions")
    if "format" in arguments and arguments["format"] not in get_args(RankingFormat):
        raise ConfigError(f"retrieve: format={arguments['format']} is not one of {', '.join(get_args(RankingFormat))}")


@stage_command(
    "give questions=FILE (or a stored set), output=FILE, format=dpr|trec|msmarco|pyserini|jsonl|parquet, version=N",
    _check_ranking,
)
def retrieve(
    run: "RunConfig",
    progress: "Progress",
    questions: str,
    output: str,
    format: "RankingFormat | None" = None,
    version: str = "",
) -> Any:
    """Rank passages for many questions into a file.

    `retrieve CONFIG questions=FILE output=FILE format=dpr|trec|msmarco|pyserini|jsonl|parquet`; questions may be a
    stored set. Without format, output's ending .trec, .jsonl or .parquet decides, else the format is dpr. version=N
    searches another version than the live one.
    """
    from mvr_ray.distributed import retrieve as stage
    from mvr_ray.store.formats.rankings import FORMAT_OF_ENDING

    path = Path(output)
    format = format or FORMAT_OF_ENDING.get(path.suffix.lower(), "dpr")
    return stage.retrieve(run, questions, path, format, progress, int(version) if version else None)


@stage_command("give questions=SET, a stored question set with gold passages that is not one of evaluate.questions")
def tune(run: "RunConfig", progress: "Progress", questions: str) -> Any:
    """Choose the weight of words and views, search.hybrid.

    `tune CONFIG questions=SET`, a set with questions that are not reported on.
    """
    from mvr_ray.distributed import evaluate as stage

    return stage.tune(run, questions, progress)


@stage_command(
    "give ranking=FILE as `mvr-ray retrieve` wrote it (dpr, jsonl or pyserini), and output=FILE to keep the predictions"
)
def read(run: "RunConfig", progress: "Progress", ranking: str, output: str = "") -> Any:
    """Read answers out of ranked passages and score them.

    `read CONFIG ranking=FILE [output=FILE]`, a file of `retrieve` in format dpr, jsonl or pyserini.
    """
    from mvr_ray.distributed import read as stage

    return stage.read(run, ranking, Path(output) if output else None, progress)


@stage_command('give changes=FILE: lines of {"id", "title", "text"}, {"id", "set": {...}} or {"id", "delete": true}')
def update(run: "RunConfig", progress: "Progress", changes: str) -> Any:
    """Upsert and delete passages of the corpus; then run `index`.

    `update CONFIG changes=FILE`, lines of {"id", "title", "text"}, {"id", "set": {...}}, {"id", "delete": true} or
    {"delete": true, "filter": {...}}.
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
    run = load_run(config, overrides, print_config, as_json)
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
        conclude("follow", {**plain, "index": run.index.name}, (config, *(overrides or ())), run)


@stage_command()
def compact(run: "RunConfig", progress: "Progress") -> Any:
    """Write shards whole that have changes beside them."""
    from mvr_ray.distributed.indexing import rewrite as stage

    return stage.compact(run, progress)


_SHARDS = "give shards=N, the number of shards that the next version shall have"


def _check_shards(arguments: Mapping[str, str]) -> None:
    _check_number("reshard", arguments, "shards", _SHARDS)


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
    earlier=DIR for those that a report made elsewhere has.
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
    from mvr_ray.store.files import require_lasting
    from mvr_ray.studies.study import run_study

    size, extra = options.get("size", "quick"), tuple(overrides)
    output, earlier = (Path(options[name]) if name in options else None for name in ("output", "earlier"))
    if output is not None:
        require_lasting(output, f"study: output={output}")
    at_once = int(options["at_once"]) if "at_once" in options else None
    for path in paths:
        with Reporter() as progress:
            progress.say(f"== {path}")
            result = run_study(path, size, extra, output, progress, at_once, options.get("only", ""), earlier)
        if as_json:
            print_json(result)
        else:
            print_result(*(table(one.title, one.columns, one.rows) for one in result.tables))
            print_note(f"report: {result.folder}/report.html")
