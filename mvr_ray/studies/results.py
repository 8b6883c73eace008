"""Collect the measurements of a study's steps, by variant, over seeds and questions.

A value is a mean over seeds and questions. Its 95 % interval covers both: articles are resampled, since questions of
one article are not independent, and seeds add Student's half width (`metrics.interval_over_seeds`).

Shapes: S seeds, Q questions.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from mvr_ray.comparison import Difference, difference
from mvr_ray.core.judging.metrics import NDCG_CUTOFF, hit_within, interval_over_seeds
from mvr_ray.distributed.analyze import ALL_VIEWS
from mvr_ray.store.formats.question_ranks import QuestionRanks
from mvr_ray.studies.definition import BM25, WITH_BM25, Study, VariantConfig
from mvr_ray.studies.execute import StepRecord
from mvr_ray.studies.steps import PlannedVariant, StudyPlan
from mvr_ray.studies.tables import Cell
from mvr_ray.types import FloatArray

Report = dict[str, Any]
"""A step's report, as plain values."""
CROSS_ENCODER, READER = "cross-encoder training", "reader training"
BM25_SYSTEM = "bm25"
"""BM25's name in the reports of steps; the name of a fusion with it contains this name."""


class MetricValues(NamedTuple):
    """values_SQ of the questions for which a metric is defined, their ids and articles."""

    values_SQ: FloatArray
    ids_Q: list[str]
    articles_Q: list[str]


class VariantResult(NamedTuple):
    """The metrics of one variant, the ranks of every question by seed, the reports of its steps by stage, one a seed,
    and the ranks of each of its views by system of `analyze` and seed."""

    name: str
    paper: Mapping[str, float]
    setting: str
    cells: dict[str, Cell]
    ranks: dict[int, QuestionRanks]
    reports: dict[str, list[Report]]
    curve: Mapping[int, "VariantResult"] = MappingProxyType({})
    """The results after fewer training steps, by their number, where the study measures a curve."""
    view_ranks: Mapping[str, Mapping[int, QuestionRanks]] = MappingProxyType({})


class _SystemRows(NamedTuple):
    """The rows of one system by metric and seed, its ranks by seed, and its names in the reports."""

    rows: dict[str, dict[int, Report]]
    ranks: dict[int, QuestionRanks]
    names: list[str]


def variant_results(study: Study, plan: StudyPlan, records: Mapping[str, StepRecord]) -> list[VariantResult]:
    """Collect every variant over its seeds, followed by the other systems of its evaluation (BM25, and fusion with
    it)."""
    results: list[VariantResult] = []
    for variant in study.config.variants:
        runs = [run for run in plan.variants if run.variant.name == variant.name]
        if all(run.at for run in runs):
            continue
        systems = list(_system_results(study, variant, [run for run in runs if not run.at], records))
        curves: dict[str, dict[int, VariantResult]] = {}
        for at in sorted({run.at for run in runs} - {0}):
            for curve_result in _system_results(study, variant, [run for run in runs if run.at == at], records):
                curves.setdefault(curve_result.name, {})[at] = curve_result
        results += [
            system._replace(curve={} if system.name == BM25 else curves.get(system.name, {})) for system in systems
        ]
    return results


def _system_results(
    study: Study, variant: VariantConfig, runs: Sequence[PlannedVariant], records: Mapping[str, StepRecord]
) -> Iterator[VariantResult]:
    """Yield the results of a variant's systems. `analyze` may have fewer questions than `evaluate`: a metric of both is
    that of `evaluate`, and that of `analyze` has the system's name as prefix. BM25 is untrained: one seed is enough."""
    systems = {variant.name: _SystemRows({}, {}, [])}
    reports: dict[str, list[Report]] = {}
    view_ranks: dict[str, dict[int, QuestionRanks]] = {}
    for run in runs:
        for key in sorted(run.keys, key=lambda key: records[key].stage == "evaluate"):
            stage, report = records[key].stage, records[key].report
            reports.setdefault(_kind(records[key]), []).append(report)
            if stage not in ("evaluate", "analyze"):
                continue
            for row in [*report["rows"], *report["ranks"]]:
                name = system_name(variant.name, row["system"])
                if row["questions"] != study.config.questions or (name == BM25 and run.seed != runs[0].seed):
                    continue
                rows, ranks, names = systems.setdefault(name, _SystemRows({}, {}, []))
                if "metric" not in row:
                    one = QuestionRanks(**row)._replace(seed=run.seed)
                    if stage == "analyze":
                        view_ranks.setdefault(one.system, {})[run.seed] = one
                    if stage == "evaluate" or one.system == ALL_VIEWS:
                        ranks[run.seed] = one
                    continue
                if row["system"] not in names:
                    names.append(row["system"])
                if stage == "analyze":
                    rows.setdefault(f"{row['system']}: {row['metric']}", {})[run.seed] = row
                if stage == "evaluate" or row["system"] == ALL_VIEWS:
                    rows.setdefault(row["metric"], {})[run.seed] = row
    for name, (rows, ranks, names) in systems.items():
        cells = {metric: _cell(metric, list(own.values()), list(ranks.values())) for metric, own in rows.items()}
        if name == variant.name:
            yield VariantResult(name, variant.paper, variant.setting, cells, ranks, reports, view_ranks=view_ranks)
        else:
            yield VariantResult(name, {}, "" if name == BM25 else "; ".join(names), cells, ranks, {})


def system_name(variant: str, system: str) -> str:
    """Return the name in tables of a system in a variant's reports."""
    return BM25 if system == BM25_SYSTEM else variant + WITH_BM25 if BM25_SYSTEM in system else variant


def _kind(step: StepRecord) -> str:
    """Return the step's stage, or the kind of training for a cross-encoder or a reader."""
    epoch = (step.report.get("epochs") or [{}])[-1]
    if step.stage != "train" or "view_pair_cosine" in epoch:
        return step.stage
    return CROSS_ENCODER if "dev_top1" in epoch else READER if "dev_f1" in epoch else step.stage


def _cell(metric: str, rows: Sequence[Report], ranks: Sequence[QuestionRanks]) -> Cell:
    """Compute a cell from every question's value where known, else from the intervals in the rows."""
    values = metric_values(ranks, metric)
    mean, seeds, n = float(np.mean([row["value"] for row in rows])), len(rows), rows[0]["n"]
    if values is not None and values.values_SQ.shape == (seeds, n):
        return Cell(mean, *interval_over_seeds(values.values_SQ, values.articles_Q), seeds, n)
    low, high = (float(np.mean([row[name] for row in rows])) for name in ("low", "high"))
    half = 0.0
    if seeds > 1:
        spread = float(np.std([row["value"] for row in rows], ddof=1))
        half = float(stats.t.ppf(0.975, seeds - 1)) * spread / math.sqrt(seeds)
    return Cell(mean, mean - math.hypot(mean - low, half), mean + math.hypot(high - mean, half), seeds, n)


def metric_values(parts: Sequence[QuestionRanks], metric: str) -> MetricValues | None:
    """Compute every question's value of `answer/top-K`, `gold/top-K` or `gold/ndcg@10`, a row a part (seed); None for
    other metrics, and where no question has one.

    All parts must rank the same questions.
    """
    kind, _, cutoff = metric.partition("/top-")
    own_SQ: list[Sequence[float | None]]
    if metric == f"gold/ndcg@{NDCG_CUTOFF}":
        own_SQ = [part.gold_ndcgs for part in parts]
    elif kind in ("answer", "gold") and cutoff.isdigit():
        own_SQ = [part.answer_ranks if kind == "answer" else part.gold_ranks for part in parts]
    else:
        return None
    if not own_SQ or not all(own_SQ):
        return None
    places = [at for at, value in enumerate(own_SQ[0]) if value is not None]
    if not places:
        return None
    values_SQ = np.array([[own_Q[at] for at in places] for own_Q in own_SQ], np.float64)
    if cutoff:
        values_SQ = hit_within(values_SQ.astype(np.int64), int(cutoff))
    first = parts[0]
    return MetricValues(values_SQ, [first.question_ids[at] for at in places], [first.articles[at] for at in places])


def hits_within(ranks: Sequence[int | None], k: int) -> FloatArray:
    """Return 1.0 for ranks (from 0, -1: not among the hits) among the first k. float64 [Q]."""
    return hit_within(np.asarray(ranks, np.int64), k)


def compare_variants(better: VariantResult, than: VariantResult, metric: str) -> Difference | None:
    """Compute the difference of two variants on the same questions; None where their questions differ."""
    return compare_ranks(better.ranks, than.ranks, metric)


def compare_ranks(
    better: Mapping[int, QuestionRanks], than: Mapping[int, QuestionRanks], metric: str
) -> Difference | None:
    """Compute the difference of two systems' ranks by seed; None where their questions differ."""
    seeds = sorted(set(better) & set(than))
    if len(better) == 1 or len(than) == 1:  # an untrained system is compared with every seed
        parts = [list(one.values()) for one in (better, than)]
    else:
        parts = [[one[seed] for seed in seeds] for one in (better, than)]
    a, b = (metric_values(part, metric) for part in parts)
    if a is None or b is None or a.ids_Q != b.ids_Q:
        return None
    return difference(a.values_SQ, b.values_SQ, a.articles_Q)


def compare_views(better: VariantResult, than: VariantResult, measure: str) -> Difference | None:
    """Compute the difference of a measure of `QuestionViews` (x 100) between two variants, over the questions for which
    both have it; None without one. `attention_kl` is compared by passage."""
    name = "passage_id" if measure == "attention_kl" else "question_id"
    first, second = (
        [
            {row[name]: row for row in report["values"] if row[measure] is not None}
            for report in one.reports.get("analyze", [])
        ]
        for one in (better, than)
    )
    ids = [i for i in (first[0] if first else ()) if all(i in rows for rows in [*first, *second])]
    if not ids or not second:
        return None
    first_SQ, second_SQ = (
        np.array([[float(rows[i][measure]) for i in ids] for rows in part]) for part in (first, second)
    )
    return difference(first_SQ, second_SQ, [first[0][i]["article"] for i in ids])


def stage_reports(
    results: Sequence[VariantResult], stage: str, *, first_seed: bool = False
) -> Iterator[tuple[VariantResult, Report]]:
    """Yield the reports of one stage, each with its variant."""
    for result in results:
        for report in result.reports.get(stage, [])[: 1 if first_seed else None]:
            yield result, report


def question_ranks(results: Sequence[VariantResult]) -> list[QuestionRanks]:
    """Return the ranks of every variant and seed for every question, under the variant's name, those of its views under
    `view_system_name`, and those after fewer steps under `curve_system_name`."""
    systems: list[tuple[str, Mapping[int, QuestionRanks]]] = []
    for result in results:
        systems.append((result.name, result.ranks))
        systems += [(view_system_name(result.name, system), ranks) for system, ranks in result.view_ranks.items()]
        systems += [(curve_system_name(result.name, at), point.ranks) for at, point in result.curve.items()]
    return [ranks._replace(system=name) for name, by_seed in systems for ranks in by_seed.values()]


def view_system_name(variant: str, system: str) -> str:
    """Return the name of a system of `analyze` in a file of question ranks."""
    return f"{variant}: {system}"


def curve_system_name(variant: str, at: int) -> str:
    """Return the name of a variant after fewer training steps than it has, in a file of question ranks."""
    return f"{variant}, {at} steps" if at else variant
