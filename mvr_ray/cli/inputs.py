"""Check the inputs of a stage before Ray starts, and that they are there before torch is imported.

The store's own functions read manifests, corpora and question sets, so errors have the messages of the stage itself,
some seconds earlier and without a cluster.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from mvr_ray.cli.args import require_writable
from mvr_ray.config import RunConfig, resolve_model, resolve_path
from mvr_ray.config.train import check_train
from mvr_ray.errors import MissingInputError
from mvr_ray.store import manifest
from mvr_ray.store.corpus import Corpus, question_set
from mvr_ray.store.files import Store, require_lasting
from mvr_ray.store.model_records import CROSS_ENCODERS, READERS, find_model, require_snapshot, starting_name


def check_inputs(stage: str, run: RunConfig, arguments: Mapping[str, str]) -> None:
    """Raise MissingInputError or ConfigError for missing inputs. `arguments` are the command's own, such as
    `questions=...` of `retrieve`."""
    if "output" in arguments:
        path = Path(arguments["output"])
        require_lasting(path, f"{stage}: output={path}")
        require_writable(path, f"{stage}: output={path}")
    match stage:
        case "index":
            _check_corpus(run, ())
        case "train":
            check_train(run.train)
            _check_corpus(run, (run.train.questions, run.train.dev_questions, run.train.hard_negatives))
            if run.train.init_from is None:
                resolve_model(run.encoder.backbone)
            else:
                require_snapshot(Store(run.store.path), *starting_name(run, run.train.init_from))
                from mvr_ray.distributed.encoders import starting_snapshot

                starting_snapshot(run, run.train.init_from)
        case "mine":
            _check_corpus(run, (run.mine.questions,))
            if run.mine.method == "index":
                check_version(run)
            if run.mine.cross_encoder:
                find_model(run, CROSS_ENCODERS, run.mine.cross_encoder)
        case "refine":
            if run.refine.feedback and not resolve_path(run.refine.feedback).is_file():
                raise MissingInputError(f"refine.feedback {run.refine.feedback} does not exist or is not a file")
            label_set = None if run.refine.feedback else run.refine.questions
            check_version(run, sets=(label_set, *run.refine.gate, *run.refine.report))
        case "evaluate":
            check_version(run, sets=(*run.evaluate.questions, run.evaluate.hybrid))
        case "analyze":
            check_version(run, sets=(run.analyze.questions or next(iter(run.evaluate.questions), None),))
        case "retrieve":
            is_path = resolve_path(arguments["questions"]).exists()
            check_version(run, sets=() if is_path else (arguments["questions"],))
        case "tune":
            check_version(run, sets=(arguments["questions"],))
        case "read":
            if not resolve_path(arguments["ranking"]).is_file():
                raise MissingInputError(
                    f"ranking {arguments['ranking']} does not exist or is not a file; `mvr-ray retrieve` writes one"
                )
            find_model(run, READERS, run.read.reader)
        case "compact" | "reshard":
            check_version(run)


def ready_command(command: str, run: RunConfig) -> str:
    """Return the command to be suggested: itself, a search where it lacks question sets, empty where it lacks a
    reader."""
    stage, _, words = command.partition(" ")
    sets = {"evaluate": run.evaluate.questions, "analyze": run.analyze.questions or run.evaluate.questions}
    if not sets.get(stage, True):
        return f'search {words} "your question"'
    if stage == "read":
        try:
            find_model(run, READERS, run.read.reader)
        except MissingInputError:
            return ""
    return command


def _check_corpus(run: RunConfig, sets: Iterable[str | None]) -> None:
    corpus = Corpus.open(Store(run.store.path), run.prepare.corpus)
    for name in filter(None, sets):
        question_set(corpus, name)


def check_version(run: RunConfig, version: int | None = None, sets: Iterable[str | None] = ()) -> None:
    """Raise MissingInputError if the index has no such version (None: no version at all), or its corpus lacks one of
    the question sets."""
    store = Store(run.store.path)
    live = manifest.read(store, run.index.name, version)
    if names := list(filter(None, sets)):
        corpus = Corpus.open(store, live.corpus, live.corpus_digest)
        for name in names:
            question_set(corpus, name)
