"""Many refinements of one index, tried out in memory: grids, curves over rounds, gain against cost.

Options of the step: `settings`, a list of `refinement_simulator.Setting` fields; a field with a list of values stands
for one setting a value, and several such fields for all their combinations. Labels come from `refine.questions`; every
set of `refine.gate` and `refine.report` is measured beside it. Memory holds all views in float32: made for up to a few
hundred thousand of them.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mvr_ray.config import RunConfig
from mvr_ray.core.refining.refine_policy import Continue, RefineState, Stop, next_action
from mvr_ray.distributed.encoders import open_encoder
from mvr_ray.distributed.evaluate import articles_of
from mvr_ray.errors import ConfigError, MissingInputError
from mvr_ray.store import corpus, manifest
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.delta import open_embeddings
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest
from mvr_ray.studies.refinement_simulator import LabelledQuestions, RefinementSimulator, Round, Setting
from mvr_ray.types import FloatArray, IntArray, Progress, no_progress

MOST_VECTORS = 2_000_000


Heldout = tuple[tuple[float, ...], ...]
"""heldout_RG, as `RefineState` has it."""
Labelled = tuple[float, ...]
"""labelled_R, likewise."""


class Ending(NamedTuple):
    """The round after which the rule stops, and what it restores, 0 where every round cost the gate too much."""

    stopped: int
    restored: int


class SettingResult(NamedTuple):
    """`label` says what differs between the settings. `chosen` is the best of all rounds by the rule of `refine`, 0
    where every round cost more than `refine.max_heldout_loss` points. `refine` would have stopped after round
    `stopped`, for want of patience, and restored round `restored`; the paper's rule, which looks at the loss, would
    keep `lowest_loss`.
    """

    label: str
    setting: dict[str, Any]
    chosen: int
    stopped: int
    restored: int
    lowest_loss: int
    rounds: list[Round]


class GridQuestions(NamedTuple):
    """The questions of a set, in order, and the article of each."""

    questions: str
    ids: list[str]
    articles: list[str]


class GridReport(NamedTuple):
    """Of a setting's rounds only the first, the chosen and the last keep the ranks of every question."""

    index: str
    version: int
    passages: int
    vectors: int
    labelled: str
    num_labelled: int
    gate: str
    sets: list[GridQuestions]
    tried: list[SettingResult]


class _LoadedIndex(NamedTuple):
    ids: list[str]
    row_ptr: IntArray
    view_numbers_N: IntArray
    vectors_ND: FloatArray


def refinement_grid(
    run: RunConfig, progress: Progress = no_progress, options: Mapping[str, Any] | None = None
) -> GridReport:
    """Try every setting on the live version. Raises ConfigError for settings or question sets that make no sense."""
    settings = list(expanded((options or {}).get("settings", [{}])))
    refine, store = run.refine, Store(run.store.path)
    if refine.questions is None or not refine.gate:
        raise ConfigError("refinement_grid needs refine.questions and refine.gate; name the sets that a split made")
    described = manifest.read(store, run.index.name)
    loaded = _load(store, described)
    passages = Corpus.open(store, described.corpus)
    simulator = RefinementSimulator(
        loaded.vectors_ND,
        loaded.row_ptr,
        loaded.view_numbers_N,
        described.num_views,
        lambda row: passages.get([loaded.ids[row]])[loaded.ids[row]].text,
        described.dtype,
    )
    encoder = open_encoder(
        store, described.encoder_name, described.encoder_fingerprint, threads=run.resources.torch_threads
    )
    row_of = {passage_id: row for row, passage_id in enumerate(loaded.ids)}
    sets: list[GridQuestions] = []

    def asked(name: str) -> LabelledQuestions:
        questions = corpus.read_questions(store, name)
        if not questions:
            raise MissingInputError(f"question set {name!r} is empty; give refinement_grid sets with questions")
        article_of = articles_of(questions, passages)
        sets.append(GridQuestions(name, list(article_of), list(article_of.values())))
        queries_QD = encoder.embed_queries([question.text for question in questions])
        gold_Q = [{row_of[i] for i in question.positive_ids if i in row_of} for question in questions]
        return LabelledQuestions(name, queries_QD, [question.answers for question in questions], gold_Q)

    labelled = asked(refine.questions)
    others = [asked(name) for name in (*refine.gate, *refine.report)]
    tried = []
    for number, fields in enumerate(settings):
        setting = Setting(**fields)
        rounds = simulator.simulate(setting, labelled, others, run.evaluate.k)
        by = "gold" if setting.labels == "gold" else "answer"
        known, heldout = _labelled_curve(rounds, refine.questions, by), _heldout(rounds, refine.gate, by)
        last, most = len(rounds) - 1, refine.max_heldout_loss
        best, end = (stopping(known, heldout, patience, most) for patience in (last, refine.patience))
        tried.append(
            SettingResult(
                label=_label(fields, settings),
                setting=setting._asdict(),
                chosen=best.restored,
                stopped=end.stopped,
                restored=end.restored,
                lowest_loss=_lowest_loss(rounds),
                rounds=_kept_ranks(rounds, {0, best.restored, last}),
            )
        )
        progress("settings", number + 1, len(settings))
    return GridReport(
        described.index,
        described.version,
        len(loaded.ids),
        len(loaded.vectors_ND),
        refine.questions,
        len(labelled.queries_QD),
        ", ".join(refine.gate),
        sets,
        tried,
    )


def _kept_ranks(rounds: Sequence[Round], kept: set[int]) -> list[Round]:
    """Without the ranks of the other rounds, which no table shows."""
    return [
        each
        if each.number in kept
        else each._replace(sets=[one._replace(answer_ranks=[], gold_ranks=[]) for one in each.sets])
        for each in rounds
    ]


def expanded(settings: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each entry once for every combination of its lists' values. Raises ConfigError for an unknown field."""
    for entry in settings:
        unknown = sorted(set(entry) - set(Setting._fields))
        if unknown:
            raise ConfigError(
                f"refinement_grid: unknown field {unknown[0]!r}; a setting has {', '.join(Setting._fields)}"
            )
        lists = {name: value if isinstance(value, list) else [value] for name, value in entry.items()}
        for values in itertools.product(*lists.values()):
            yield dict(zip(lists, values))


def _label(fields: Mapping[str, Any], settings: Sequence[Mapping[str, Any]]) -> str:
    """The fields that are not the same in all settings."""
    varying = [name for name in fields if any(other.get(name) != fields[name] for other in settings)]
    return ", ".join(f"{name} {fields[name]}" for name in varying) or str(fields.get("method", "feedback_views"))


def stopping(known: Labelled, heldout: Heldout, patience: int, max_loss: float) -> Ending:
    """Where `refine_policy` would have ended these rounds, told one after the other, and what it restores."""
    last = len(heldout) - 1
    for done in range(last + 1):
        seen = slice(done + 1)
        action = next_action(RefineState(heldout[seen], known[seen], last, max(1, patience), max_loss))
        if not isinstance(action, Continue):
            return Ending(done, action.best_round if isinstance(action, Stop) else 0)
    raise AssertionError("the last round ends it")


def _labelled_curve(rounds: Sequence[Round], labelled: str, by: str) -> Labelled:
    """Top-1 of the labelled questions after each round, in points."""
    return tuple(value for (value,) in _heldout(rounds, [labelled], by))


def _heldout(rounds: Sequence[Round], gate: Sequence[str], by: str) -> Heldout:
    """Top-1 of each gate set after each round, in points."""
    return tuple(
        tuple(100 * getattr(measured, by)[1] for measured in each.sets if measured.questions in gate) for each in rounds
    )


def _lowest_loss(rounds: Sequence[Round]) -> int:
    """The loss told with round r is that before its step, so the state of round r - 1 has it."""
    losses = [each.loss for each in rounds[1:]]
    return int(np.nanargmin(losses)) if losses and np.isfinite(losses).any() else len(rounds) - 1


def _load(store: Store, described: Manifest) -> _LoadedIndex:
    """Every passage of the version in id order, so that ties break as everywhere."""
    if described.num_vectors > MOST_VECTORS:
        raise ConfigError(
            f"refinement_grid holds all views in memory, at most {MOST_VECTORS:,}; index {described.index!r} has "
            f"{described.num_vectors:,}. Use `mvr-ray refine`, or a smaller corpus (prepare.max_passages)"
        )
    ids: list[str] = []
    counts: list[IntArray] = []
    numbers: list[IntArray] = []
    vectors: list[FloatArray] = []
    for entry in described.shards:
        folder = manifest.open_shard(store, described.index, entry)
        for block in open_embeddings(folder, entry.files).blocks():
            ids += block.ids
            counts.append(np.diff(block.row_ptr))
            numbers.append(np.asarray(block.view_numbers_N))
            vectors.append(block.vectors_ND.astype(np.float32))
    count_P, number_N, vectors_ND = np.concatenate(counts), np.concatenate(numbers), np.concatenate(vectors)
    start_P = np.cumsum(count_P) - count_P
    order = sorted(range(len(ids)), key=ids.__getitem__)
    slots = np.concatenate([np.arange(start_P[row], start_P[row] + count_P[row]) for row in order])
    row_ptr = np.concatenate([[0], np.cumsum(count_P[order])]).astype(np.int64)
    return _LoadedIndex([ids[row] for row in order], row_ptr, number_N[slots], vectors_ND[slots])
