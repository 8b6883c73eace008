"""Check the inputs of a stage before Ray starts, and that they are there before torch is imported.

The store's own functions read manifests, corpora and question sets, so errors have the messages of the stage itself,
some seconds earlier and without a cluster.
"""

import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from mvr_ray.cli.args import require_writable
from mvr_ray.config import RunConfig, resolve_model, resolve_path
from mvr_ray.config.train import check_train
from mvr_ray.errors import MissingInputError
from mvr_ray.store import manifest
from mvr_ray.store.corpus import Corpus, question_set
from mvr_ray.store.files import Store, local_copy
from mvr_ray.store.model_records import CROSS_ENCODERS, READERS, find_model, require_snapshot, starting_name

SettingOfSet = tuple[str, str | None]
"""A setting, and the question set that it names."""


def check_inputs(stage: str, run: RunConfig, arguments: Mapping[str, str]) -> None:
    """Raise MissingInputError or ConfigError for missing inputs. `arguments` are the command's own, such as
    `questions=...` of `retrieve`."""
    if "output" in arguments:
        path = Path(arguments["output"])
        require_writable(path, f"{stage}: output={path}")
    version = int(arguments["version"]) if arguments.get("version") else None
    match stage:
        case "index":
            _check_corpus(run, ())
        case "train":
            check_train(run.train)
            sets = {key: getattr(run.train, key) for key in ("questions", "dev_questions", "hard_negatives")}
            _check_corpus(run, ((f"train.{key}", name) for key, name in sets.items()))
            if run.train.init_from is None:
                resolve_model(run.encoder.backbone)
            else:
                require_snapshot(Store(run.store.path), *starting_name(run, run.train.init_from))
                from mvr_ray.distributed.encoders import starting_snapshot

                starting_snapshot(run, run.train.init_from)
        case "mine":
            _check_corpus(run, [("mine.questions", run.mine.questions)])
            if run.mine.method == "index":
                check_version(run)
            if run.mine.cross_encoder:
                find_model(run, CROSS_ENCODERS, run.mine.cross_encoder)
        case "refine":
            if run.refine.feedback and not resolve_path(run.refine.feedback).is_file():
                raise MissingInputError(f"refine.feedback {run.refine.feedback} does not exist or is not a file")
            label_set = None if run.refine.feedback else run.refine.questions
            more = [(f"refine.{key}", name) for key in ("gate", "report") for name in getattr(run.refine, key)]
            check_version(run, sets=[("refine.questions", label_set), *more])
        case "evaluate":
            sets = [("evaluate.questions", name) for name in run.evaluate.questions]
            ranking = arguments.get("ranking")
            if ranking:
                _require_ranking(ranking)
            check_version(run, version, [*sets, ("evaluate.hybrid", None if ranking else run.evaluate.hybrid)])
        case "analyze":
            own = run.analyze.questions
            key = "analyze.questions" if own else "evaluate.questions"
            check_version(run, sets=[(key, own or next(iter(run.evaluate.questions), None))])
        case "retrieve" if "://" in arguments["questions"] or resolve_path(arguments["questions"]).exists():
            check_version(run, version)
        case "retrieve":
            check_version(run, version, [("questions, which is no file", arguments["questions"])])
        case "tune":
            check_version(run, sets=[("questions", arguments["questions"])])
        case "read":
            _require_ranking(arguments["ranking"])
            find_model(run, READERS, run.read.reader)
        case "compact" | "reshard":
            check_version(run)


def ready_command(command: str, run: RunConfig) -> str:
    """Return the command to be suggested: itself, a search where it lacks question sets, `serve` in place of a search
    with a text over vectors of another program, empty where it lacks a reader."""
    stage, _, words = command.partition(" ")
    sets = {"evaluate": run.evaluate.questions, "analyze": run.analyze.questions or run.evaluate.questions}
    if not sets.get(stage, True):
        stage, words = "search", f'{words} "your question"'
    if stage == "search" and not _takes_texts(run):
        return f"serve {words}".removesuffix(' "your question"')
    if stage == "search":
        return f"search {words}"
    if stage == "read":
        setting = f"{READERS.setting}="
        names = [word.removeprefix(setting) for word in shlex.split(words) if word.startswith(setting)]
        try:
            find_model(run, READERS, names[-1] if names else run.read.reader)
        except MissingInputError:
            return ""
    return command


def _takes_texts(run: RunConfig) -> bool:
    """Return whether a search of the live version embeds a text; True where there is none."""
    from mvr_ray.distributed.encoders import embeds_texts

    store = Store(run.store.path)
    with suppress(MissingInputError):
        return embeds_texts(store, manifest.read(store, run.index.name))
    return True


def _require_ranking(name: str) -> None:
    if not local_copy(name).is_file():
        raise MissingInputError(f"ranking {name} does not exist or is not a file; `mvr-ray retrieve` writes one")


def _check_corpus(run: RunConfig, sets: Iterable[SettingOfSet]) -> None:
    _require_sets(Corpus.open(Store(run.store.path), run.prepare.corpus), sets)


def _require_sets(corpus: Corpus, sets: Iterable[SettingOfSet]) -> None:
    for setting, name in sets:
        try:
            if name:
                question_set(corpus, name)
        except MissingInputError as error:
            raise MissingInputError(f"{setting}: {error}") from None


def check_version(run: RunConfig, version: int | None = None, sets: Iterable[SettingOfSet] = ()) -> None:
    """Raise MissingInputError if the index has no such version (None: no version at all), or its corpus lacks one of
    the question sets; it begins with the setting."""
    store = Store(run.store.path)
    live = manifest.read(store, run.index.name, version)
    if names := list(sets):
        _require_sets(Corpus.open(store, live.corpus, live.corpus_digest), names)
