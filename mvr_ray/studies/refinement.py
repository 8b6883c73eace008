"""Simulate many refinements of one index in memory: grids, curves over rounds, gain against cost.

Option of the step: `settings`, a list of `refinement_simulator.Setting` fields; a list of values for a field gives one
setting a value, and several lists all their combinations. Labels come from `refine.questions`; every set of
`refine.gate` and `refine.report` is measured too. Memory holds all views in float32: intended for up to a few hundred
thousand.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mvr_ray.config import RunConfig
from mvr_ray.core.refining.refine_policy import Continue, RefineState, Stop, next_action
from mvr_ray.core.threads import torch_threads
from mvr_ray.distributed.encoders import open_encoder
from mvr_ray.distributed.indexing.shards import version_blocks
from mvr_ray.errors import ConfigError, MissingInputError
from mvr_ray.store import manifest
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.embeddings import BlockRow, gather_rows
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.questions import articles_of, read_questions
from mvr_ray.studies.definition import NO_OPTIONS, Options
from mvr_ray.studies.refinement_simulator import (
    LabelledQuestions,
    RefinementSimulator,
    Round,
    Setting,
    expand_settings,
)
from mvr_ray.types import EmbeddingBlock, Progress, no_progress

MOST_VECTORS = 2_000_000


class SettingResult(NamedTuple):
    """The rounds of one setting, and the rounds that each rule chooses.

    `label` has the fields that differ between the settings. `chosen` is the best of all rounds by the rule of `refine`,
    0 where every round cost more than `refine.max_heldout_loss` points. With its patience `refine` would stop after
    round `stopped` and restore round `restored`; the paper's rule, which uses the loss, would choose `lowest_loss`.
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
    """The rounds of each setting. Only those in tables have the ranks of every question: the first, the last, the
    chosen and the restored one, and that of the lowest loss."""

    index: str
    version: int
    passages: int
    vectors: int
    labelled: str
    num_labelled: int
    gate: str
    sets: list[GridQuestions]
    tried: list[SettingResult]


def refinement_grid(run: RunConfig, progress: Progress = no_progress, options: Options = NO_OPTIONS) -> GridReport:
    """Simulate every setting on the live version. Raises ConfigError for invalid settings or question sets."""
    settings = list(expand_settings(options.get("settings", [{}])))
    refine, store = run.refine, Store(run.store.path)
    if refine.questions is None or not refine.gate:
        raise ConfigError("refinement_grid needs refine.questions and refine.gate; name the sets that a split made")
    version = manifest.read(store, run.index.name)
    views, passages = load_views(store, version), Corpus.open(store, version.corpus, version.corpus_digest)
    simulator = RefinementSimulator(
        views,
        version.num_views,
        lambda row: passages.get([views.ids[row]])[views.ids[row]].text,
        run.evaluate.match,
    )
    encoder = open_encoder(store, version.encoder_name, version.encoder_fingerprint)
    row_of = {passage_id: row for row, passage_id in enumerate(views.ids)}
    sets: list[GridQuestions] = []
    question_sets: list[LabelledQuestions] = []
    for name in (refine.questions, *refine.gate, *refine.report):
        questions = read_questions(passages, name)
        if not questions:
            raise MissingInputError(f"question set {name!r} is empty; give refinement_grid sets with questions")
        article_of = articles_of(questions, passages)
        sets.append(GridQuestions(name, list(article_of), list(article_of.values())))
        with torch_threads(run.resources.threads):
            queries_QD = encoder.embed_queries([question.text for question in questions])
        gold_Q = [{row_of[i] for i in question.positive_ids if i in row_of} for question in questions]
        question_sets.append(LabelledQuestions(name, queries_QD, [question.answers for question in questions], gold_Q))
    source, *others = question_sets
    ks, results = sorted({1, *run.evaluate.k}), []  # rules and tables compare top-1
    for number, fields in enumerate(settings, 1):
        names = [name for name in fields if any(other.get(name) != fields[name] for other in settings)]
        label = ", ".join(f"{name} {fields[name]}" for name in names) or str(fields.get("method", "feedback_views"))
        rounds = simulator.simulate(Setting(**fields), source, others, ks)
        results.append(_setting_result(run, Setting(**fields), label, rounds))
        progress("settings", number, len(settings))
    return GridReport(
        index=version.index,
        version=version.version,
        passages=len(views.ids),
        vectors=len(views.vectors_ND),
        labelled=refine.questions,
        num_labelled=len(source.queries_QD),
        gate=", ".join(refine.gate),
        sets=sets,
        tried=results,
    )


def _setting_result(run: RunConfig, setting: Setting, label: str, rounds: Sequence[Round]) -> SettingResult:
    """Find where each rule ends these rounds, and drop the ranks of rounds that no table compares."""
    by, last, refine = "gold" if setting.labels == "gold" else "answer", len(rounds) - 1, run.refine
    top1_RS = [{one.questions: 100 * getattr(one, by)[1] for one in each.sets} for each in rounds]
    labelled_R = tuple(next(iter(top1_S.values())) for top1_S in top1_RS)
    gate_RG = tuple(tuple(top1_S[name] for name in top1_S if name in refine.gate) for top1_S in top1_RS)
    (_, best_round), (last_round, final_round) = (
        find_ending(labelled_R, gate_RG, patience, refine.max_heldout_loss) for patience in (last, refine.patience)
    )
    loss_R = [each.loss for each in rounds[1:]]  # that of round r is measured before its step, on the state of r - 1
    lowest_loss = int(np.nanargmin(loss_R)) if np.isfinite(loss_R).any() else last
    compared_rounds = {0, best_round, final_round, lowest_loss, last}
    rounds = [
        each
        if each.number in compared_rounds
        else each._replace(sets=[one._replace(answer_ranks=[], gold_ranks=[]) for one in each.sets])
        for each in rounds
    ]
    return SettingResult(label, setting._asdict(), best_round, last_round, final_round, lowest_loss, rounds)


def find_ending(
    labelled_R: tuple[float, ...], gate_RG: tuple[tuple[float, ...], ...], patience: int, max_loss: float
) -> tuple[int, int]:
    """Return the round at which `refine_policy` stops when it receives the rounds in turn, and the round that it
    restores, 0 where every round exceeded the gate's bound.

    `labelled_R` and `gate_RG` are top-1 of the labelled questions and of the gate sets after each round, in points.
    """
    last = len(gate_RG) - 1
    for number in range(last + 1):
        until = slice(number + 1)
        action = next_action(RefineState(gate_RG[until], labelled_R[until], last, max(1, patience), max_loss))
        if not isinstance(action, Continue):
            return number, action.best_round if isinstance(action, Stop) else 0
    raise AssertionError("refine_policy did not stop at the last round")


def load_views(store: Store, version: Manifest) -> EmbeddingBlock:
    """Load every passage of a version in id order, so that ties break by id."""
    if version.num_vectors > MOST_VECTORS:
        raise ConfigError(
            f"refinement_grid holds all views in memory, at most {MOST_VECTORS:,}; index {version.index!r} has "
            f"{version.num_vectors:,}. Use `mvr-ray refine`, or a smaller corpus (prepare.max_passages)"
        )
    blocks = [*version_blocks(store, version)]
    rows = (BlockRow(name, at, row) for at, block in enumerate(blocks) for row, name in enumerate(block.ids))
    return gather_rows(blocks, sorted(rows))
