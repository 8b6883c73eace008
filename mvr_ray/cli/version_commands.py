"""Defines the commands that read a version of an index, or act on versions: search, serve, roll back, export."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mvr_ray.cli import tables
from mvr_ray.cli.app import (
    AsJson,
    Config,
    FilterText,
    OutputWords,
    Overrides,
    PrintConfig,
    QuestionWords,
    Verbose,
    Version,
    command,
    conclude,
    load_run,
    print_note,
)
from mvr_ray.cli.args import arguments_and_overrides, json_object, question_and_overrides, require_writable
from mvr_ray.cli.summaries import versions_tables
from mvr_ray.cli.tables import print_json, print_result
from mvr_ray.errors import ConfigError, count_noun

if TYPE_CHECKING:  # pydantic's models take a fifth of a second to make
    from mvr_ray.config import RunConfig


@command
def search(
    config: Config,
    words: QuestionWords = None,
    k: Annotated[int, typer.Option("-k", help="Distinct passages to show.")] = 10,
    version: Version = None,
    filter: FilterText = None,
    fields: Annotated[str, typer.Option(help="Fields to show with each passage, separated by commas.")] = "",
    print_config: PrintConfig = False,
    as_json: AsJson = False,
) -> None:
    """Answer one question: passages, scores, snippets that matched."""
    question, overrides = question_and_overrides("search", words or (), show_only=print_config)
    run = load_run(config, overrides, print_config, as_json)
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
    words: QuestionWords = None,
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
    question, overrides = question_and_overrides("explain", words or (), show_only=print_config)
    run = load_run(config, overrides, print_config, as_json)
    from mvr_ray.cli.search_once import ExplainRequest, open_service
    from mvr_ray.explanation import render_html
    from mvr_ray.store.local_files import finished_file

    if html is not None:
        require_writable(html, f"explain: --html {html}")
    request = ExplainRequest(questions=[question, *(more or ())], passages=passages or [], k=k)
    with open_service("explain", run, version, request) as service:
        explanation = service.explain(request)
    if html is not None:
        with finished_file(html) as aside:
            aside.write_text(render_html(explanation), encoding="utf-8")
        print_note(f"page: {html}")
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
    run = load_run(config, overrides, print_config, as_json)
    from mvr_ray.cli.inputs import check_version

    check_version(run, version)
    from mvr_ray.serving.replica import serve_until_interrupted

    serve_until_interrupted(run, version, print_note)


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
    run = load_run(config, overrides)
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
        conclude(action, {**plain, "index": run.index.name}, (config, *overrides), run)
    if action == "verify" and not as_json:
        print_result(
            f"whole: {count_noun(result.num_files, 'file')}, {tables.size(result.num_bytes)}, each equal to its digest"
        )


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
    run = load_run(config, overrides)
    if folder.exists() or not folder.absolute().parent.is_dir():
        raise ConfigError(f"export: {folder} exists already, or the folder above it does not; name a new one")
    from mvr_ray.store import manifest
    from mvr_ray.store.files import Store, require_lasting
    from mvr_ray.store.local_files import finished_file

    require_lasting(folder, f"export: {folder}")
    store = Store(run.store.path)
    live = manifest.read(store, run.index.name, version)
    from mvr_ray.distributed.encoders import open_encoder

    encoder = open_encoder(store, live.encoder_name, live.encoder_fingerprint, only_embeds=False)
    with finished_file(folder) as aside:
        losses = encoder.export(aside)
    for loss in losses:
        print_result(f"not carried: {loss}")
    print_result(f"written: {folder}, encoder {live.encoder_name}/{live.encoder_fingerprint}")
    print_note(f"load it by: SentenceTransformer({str(folder)!r})")


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
    from mvr_ray.errors import FilterError
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
    print_note(f"settings by which `prepare` reads it: {overrides}")


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
        blocks = version_blocks(store, live)
        num = write_vectors(file, blocks, live.dimension, live.num_views, live.num_vectors, progress)
    if as_json:
        print_json({"vectors": num, "dimension": live.dimension, "version": live.version, "output": str(file)})
    else:
        print_result(f"written: {file}, {count_noun(num, 'vector')} of {live.dimension} of version {live.version}")


def _run_and_output(command: str, config: str, words: Sequence[str] | None, ending: str) -> tuple["RunConfig", Path]:
    """Read the run file, and check the `output=FILE` of a command that writes a file of a version."""
    usage = f"give output=FILE{ending}"
    arguments, overrides = arguments_and_overrides(command, words or (), ("output",), (), usage, show_only=False)
    file = Path(arguments["output"])
    if file.suffix != ending:
        raise ConfigError(f"{command}: output={file} does not end in {ending}; {usage}")
    require_writable(file, f"{command}: output={file}")
    return load_run(config, overrides), file
