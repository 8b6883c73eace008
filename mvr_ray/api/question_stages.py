"""Stores questions and judgements of a caller, and runs the stages that take questions over an index."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mvr_ray.api import rows
from mvr_ray.api.run_settings import with_settings
from mvr_ray.api.searching import version_number
from mvr_ray.config import RunConfig
from mvr_ray.config.train import check_train
from mvr_ray.errors import ConfigError, DataError, MissingInputError
from mvr_ray.serving.schemas import Hybrid, is_text
from mvr_ray.store import manifest as manifests
from mvr_ray.store.corpus import Corpus, question_sets
from mvr_ray.store.files import Store
from mvr_ray.store.formats.records import is_id
from mvr_ray.store.questions import add_questions, carry_to_chunks, checked_questions, require_gold_passages
from mvr_ray.types import Progress, Question

if TYPE_CHECKING:
    from mvr_ray.distributed.evaluate import EvaluationReport, TuneReport
    from mvr_ray.distributed.mine import MineReport
    from mvr_ray.distributed.refinement.report import RefineReport
    from mvr_ray.distributed.train import TrainedModel
    from mvr_ray.store.formats.rankings import RankedQuestion


def judgement_lines(judgements: Iterable[Any]) -> list[str]:
    """Return judgements as lines of a feedback file, which are mappings of the same names. Raises DataError for a wrong
    one."""
    lines = []
    for number, judgement in enumerate(rows.rows_of(judgements)):
        parts = judgement
        if isinstance(judgement, Mapping):
            parts = tuple(judgement.get(name) for name in ("question", "passage_id", "label"))
        match parts:
            case (str() as question, passage, (1 | -1) as label) if (
                question.strip() and is_id(passage) and label is not True
            ):
                row = {"question": question, "passage_id": str(passage), "label": int(label)}
                for name, text in (("question", question), ("passage id", str(passage))):
                    if not is_text(text):
                        raise DataError(f"judgement {number}: {name} is not valid UTF-8: {text!r:.60}")
                lines.append(json.dumps(row, ensure_ascii=False))
            case _:
                raise DataError(
                    f"judgement {number} is {judgement!r:.80}, not (question, passage id, 1 or -1), and no mapping "
                    f"with question, passage_id and label"
                )
    return lines


def store_questions(run: RunConfig, questions: Any, name: str) -> str:
    """Store a set with the live version's corpus, as `Index.add_questions` says; returns its name."""
    with_settings(run, evaluate={"questions": [name]})
    corpus = _live_corpus(run)
    own = _with_chunks(run, corpus, rows.questions_of(questions), name)
    require_gold_passages(name, own, corpus)
    add_questions(corpus, name, own)  # also to the corpus of a change that waits for `index`
    return name


def refine(run: RunConfig, questions: Any, progress: Progress, settings: Mapping[str, Any]) -> "RefineReport":
    """Refine the live version, as `Index.refine` says."""
    from mvr_ray.distributed import refine as stage

    own = dict(settings)
    if questions is not None:
        if run.refine.feedback and "feedback" not in own:
            raise ConfigError(
                f"refine: questions are given, but the run file's refine.feedback, {run.refine.feedback}, "
                f"would be learned from instead; pass feedback=None, or leave the questions out"
            )
        own["questions"] = _set_of(run, questions, "refine")
    return stage.refine(with_settings(run, refine=own), progress)


def train(
    run: RunConfig,
    questions: Any,
    dev: Any,
    loss: str | Callable[..., Any] | None,
    progress: Progress,
    settings: Mapping[str, Any],
) -> "TrainedModel":
    """Train an encoder, as `Index.train` says."""
    from mvr_ray.distributed import train as stage

    own = dict(settings)
    for key, value in (("questions", questions), ("dev_questions", dev)):
        if value is not None:
            own[key] = _set_of(run, value, "train")
    if isinstance(loss, str):
        own["loss"] = loss
    workers = {} if "train_workers" in run.resources.model_fields_set else {"train_workers": 0}
    live = manifests.read(Store(run.store.path), run.index.name)
    run = with_settings(run, train=own, resources=workers, prepare={"corpus": live.corpus})
    check_train(run.train)
    return stage.train(run, progress, None if isinstance(loss, str) else loss, live.corpus_digest)


def mine(run: RunConfig, questions: Any, progress: Progress, settings: Mapping[str, Any]) -> "MineReport":
    """Mine hard negatives, as `Index.mine` says."""
    from mvr_ray.distributed import mine as stage

    own = {**settings, "questions": _set_of(run, questions, "mine")}
    live = manifests.read(Store(run.store.path), run.index.name)
    return stage.mine(with_settings(run, mine=own, prepare={"corpus": live.corpus}), progress, live.corpus_digest)


def tune(run: RunConfig, questions: Any, progress: Progress) -> "TuneReport":
    """Choose the weight of a hybrid search, as `Index.tune` says."""
    from mvr_ray.distributed import evaluate as stage
    from mvr_ray.distributed.retrieve import QuestionSet

    corpus = _live_corpus(run)
    own = _questions(corpus, questions)
    if not isinstance(own, str):
        own = QuestionSet("tune", _with_chunks(run, corpus, own, "tune"))
    return stage.tune(run, own, progress)


def evaluate(
    run: RunConfig,
    questions: Any,
    k: int | Sequence[int] | None,
    hybrid: Hybrid,
    version: int | None,
    progress: Progress,
) -> "EvaluationReport":
    """Measure a version, as `Index.evaluate` says."""
    from mvr_ray.distributed import evaluate as stage
    from mvr_ray.distributed.retrieve import QuestionSet

    store = Store(run.store.path)
    base = manifests.read(store, run.index.name, version_number(version))
    corpus, name, sets = Corpus.open(store, base.corpus, base.corpus_digest), "evaluate", None
    own = _questions(corpus, questions)
    if isinstance(own, str):
        name = own
    else:
        sets = [QuestionSet(name, _with_chunks(run, corpus, own, name))]
    depths = {} if k is None else {"k": list(k) if isinstance(k, Iterable) else [k]}
    run = with_settings(run, evaluate={"questions": [name], **depths}, search=_weight(hybrid))
    return stage.evaluate(run, progress, sets, base.version)


def retrieve(
    run: RunConfig,
    questions: Any,
    k: int | None,
    filter: Mapping[str, Any] | None,
    hybrid: Hybrid,
    version: int | None,
    progress: Progress,
) -> "list[RankedQuestion]":
    """Rank passages of a version for questions, as `Index.retrieve` says."""
    from mvr_ray.distributed.retrieve import QuestionSet, checked_filter, open_ranking, question_set

    store = Store(run.store.path)
    base = manifests.read(store, run.index.name, version_number(version))
    corpus = Corpus.open(store, base.corpus, base.corpus_digest)
    own = _questions(corpus, questions)
    if isinstance(own, str):
        question_batch = question_set(corpus, own)
    else:
        question_batch = QuestionSet("retrieve", _with_chunks(run, corpus, own, "retrieve"))
    run = with_settings(run, retrieve={} if k is None else {"k": k}, search=_weight(hybrid))
    with open_ranking(run, base, question_batch, checked_filter(run, corpus, filter), progress) as results:
        return list(results)


def _set_of(run: RunConfig, questions: Any, use: str) -> str:
    """Return the name of a stored set, or store the questions under a name of this use."""
    own = _questions(_live_corpus(run), questions)
    if isinstance(own, str):
        return own
    digest = hashlib.sha256(repr(own).encode(errors="backslashreplace")).hexdigest()
    return store_questions(run, own, f"{use}-{digest[:12]}")


def _questions(corpus: Corpus, questions: Any) -> str | list[Question]:
    """Return the name of a stored set, or the questions of a file or an iterable."""
    names = question_sets(corpus)
    if isinstance(questions, str) and questions in names:
        return questions
    try:
        return rows.questions_of(questions)
    except MissingInputError as error:
        known_names = ", ".join(names) or "none"
        raise MissingInputError(f"{error}, or give the name of a stored set (there are: {known_names})") from None


def _live_corpus(run: RunConfig) -> Corpus:
    return manifests.live_corpus(Store(run.store.path), run.index.name)


def _with_chunks(run: RunConfig, corpus: Corpus, questions: list[Question], name: str) -> list[Question]:
    """Return the questions of a set with the chunks of a corpus in place of gold ids of whole texts."""
    return carry_to_chunks(corpus, checked_questions(questions, name), run.evaluate.match)


def _weight(hybrid: Hybrid) -> dict[str, Any]:
    """Return the `search` settings of a weight; none if it is absent."""
    return {} if hybrid is None else {"hybrid": None if hybrid == "off" else hybrid}
