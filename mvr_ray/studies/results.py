"""Collect the measurements of a study's steps, by variant, over seeds and questions.

A value is a mean over seeds and questions. Its 95 % interval covers both: articles are resampled, since questions of
one article are not independent, and seeds add Student's half width (`metrics.interval_over_seeds`).

Shapes: S seeds, Q questions.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
from scipy import stats

from mvr_ray.comparison import Difference, difference
from mvr_ray.core.judging.metrics import NDCG_CUTOFF, hit_within, interval_over_seeds, share_interval
from mvr_ray.distributed.analyze import ALL_VIEWS
from mvr_ray.distributed.evaluate import BM25_SYSTEM
from mvr_ray.store.formats.question_ranks import QuestionRanks
from mvr_ray.studies.definition import BM25, WITH_BM25, Study, VariantConfig
from mvr_ray.studies.execute import StepRecord
from mvr_ray.studies.steps import PlannedVariant, StudyPlan
from mvr_ray.studies.tables import Cell
from mvr_ray.types import FloatArray

T = TypeVar("T")
Report = dict[str, Any]
"""A step's report, as plain values."""
SeedRanks = Mapping[int, QuestionRanks]
"""The ranks of every question, by seed."""
CROSS_ENCODER, READER = "cross-encoder training", "reader training"


class MetricValues(NamedTuple):
    """values_SQ of the questions for which a metric is defined, their ids and articles."""

    values_SQ: FloatArray
    ids_Q: list[str]
    articles_Q: list[str]


class VariantResult(NamedTuple):
    """The metrics of one variant, the ranks of every question by seed, the reports of its steps by stage, one a seed,
    which its `seed` names, and the ranks of each of its views by system of `analyze` and seed."""

    name: str
    paper: Mapping[str, float]
    setting: str
    cells: dict[str, Cell]
    ranks: SeedRanks
    reports: Mapping[str, list[Report]]
    curve: Mapping[int, "VariantResult"] = MappingProxyType({})
    """The results after fewer training steps, by their number, where the study measures a curve."""
    view_ranks: Mapping[str, SeedRanks] = MappingProxyType({})


@dataclass
class _SystemRows:
    """The rows of one system by metric and seed, its ranks by seed, and its names in the reports, in order."""

    rows: dict[str, dict[int, Report]] = field(default_factory=lambda: defaultdict(dict))
    ranks: dict[int, QuestionRanks] = field(default_factory=dict)
    names: dict[str, None] = field(default_factory=dict)


def variant_results(study: Study, plan: StudyPlan, records: Mapping[str, StepRecord]) -> list[VariantResult]:
    """Collect every variant over its seeds, followed by the other systems of its evaluation (BM25, once where it ranks
    alike, else also as `bm25_name`, and fusion with it)."""
    results: list[VariantResult] = []
    words: list[VariantResult] = []
    for variant in study.config.variants:
        runs: dict[int, list[PlannedVariant]] = defaultdict(list)
        for run in plan.variants:
            if run.variant.name == variant.name:
                runs[run.at].append(run)
        points = {at: _system_results(study, variant, own, records) for at, own in sorted(runs.items())}
        for name, result in points.pop(0, {}).items():
            if name == BM25:
                if any(one.ranks == result.ranks for one in words):
                    continue  # of another variant over the same passages
                result = result._replace(name=bm25_name(variant.name) if words else BM25)
                words.append(result)
            curve = {at: systems[name] for at, systems in points.items() if name in systems and name != BM25}
            results.append(result._replace(curve=curve))
    return results


def _system_results(
    study: Study, variant: VariantConfig, runs: Sequence[PlannedVariant], records: Mapping[str, StepRecord]
) -> dict[str, VariantResult]:
    """Collect a variant's systems by name. `analyze` may have fewer questions than `evaluate`: a metric of both is that
    of `evaluate`, and that of `analyze` has the system's name as prefix. BM25 is untrained: one seed is enough."""
    systems = defaultdict(_SystemRows, {variant.name: _SystemRows()})
    reports: dict[str, list[Report]] = defaultdict(list)
    view_ranks: dict[str, dict[int, QuestionRanks]] = defaultdict(dict)
    for run in runs:
        for record in sorted((records[key] for key in run.keys), key=lambda record: record.stage == "evaluate"):
            stage, report = record.stage, record.report
            reports[_kind(record)].append(report | {"seed": run.seed})
            for row in [*report["rows"], *report["ranks"]] if stage in ("evaluate", "analyze") else ():
                name = system_name(variant.name, row["system"])
                if row["questions"] != study.config.questions or (name == BM25 and run.seed != runs[0].seed):
                    continue
                system, is_main = systems[name], stage == "evaluate" or row["system"] == ALL_VIEWS
                if "metric" in row:
                    system.names[row["system"]] = None
                    if stage == "analyze":
                        system.rows[f"{row['system']}: {row['metric']}"][run.seed] = row
                    if is_main:
                        system.rows[row["metric"]][run.seed] = row
                else:
                    ranks = QuestionRanks(**row)._replace(seed=run.seed)
                    if stage == "analyze":
                        view_ranks[ranks.system][run.seed] = ranks
                    if is_main:
                        system.ranks[run.seed] = ranks
    results = {}
    for name, system in systems.items():
        cells = {
            metric: _cell(metric, [*own.values()], [*system.ranks.values()]) for metric, own in system.rows.items()
        }
        setting = "" if name == BM25 else "; ".join(system.names)
        results[name] = VariantResult(name, {}, setting, cells, system.ranks, {})
    own = results[variant.name]._replace(paper=variant.paper, setting=variant.setting)
    return results | {variant.name: own._replace(reports=reports, view_ranks=view_ranks)}


def with_views_from_zero(record: StepRecord) -> StepRecord:
    """Number the views in a record of `analyze` from 0. Earlier programs did from 1, so their records lack `view 0`."""
    if record.stage != "analyze" or any(row["system"] == "view 0" for row in record.report["rows"]):
        return record
    report = dict(record.report)
    for part in ("rows", "ranks"):
        numbers = [row["system"].removeprefix("view ") for row in report[part]]
        report[part] = [
            row | {"system": f"view {int(number) - 1}"} if number.isdecimal() else row
            for row, number in zip(report[part], numbers)
        ]
    return record._replace(report=report)


def system_name(variant: str, system: str) -> str:
    """Return the name in tables of a system in a variant's reports: that of a fusion with BM25 contains BM25's."""
    return BM25 if system == BM25_SYSTEM else variant + WITH_BM25 if BM25_SYSTEM in system else variant


def bm25_name(variant: str) -> str:
    """Return the name of BM25 over the passages of a variant, where it ranks otherwise than over those before."""
    return f"{BM25}, {variant}"


def _kind(step: StepRecord) -> str:
    """Return the step's stage, or the kind of training for a cross-encoder or a reader."""
    epoch = (step.report.get("epochs") or [{}])[-1]
    if step.stage != "train" or "view_pair_cosine" in epoch:
        return step.stage
    return CROSS_ENCODER if "dev_top1" in epoch else READER if "dev_f1" in epoch else step.stage


def _cell(metric: str, rows: Sequence[Report], ranks: Sequence[QuestionRanks]) -> Cell:
    """Compute a cell from every question's value where known, else from the intervals in the rows. An interval of
    shares ends at 0 and 1, whatever Student's half width over few seeds is."""
    values = metric_values(ranks, metric)
    mean, seeds, n = float(np.mean([row["value"] for row in rows])), len(rows), rows[0]["n"]
    if values is not None and values.values_SQ.shape == (seeds, n):
        ends = interval_over_seeds(values.values_SQ, values.articles_Q, of=share_interval)
    else:
        low, high = np.array([(row["low"], row["high"]) for row in rows], np.float64).mean(axis=0)  # null is NaN
        half = stats.t.ppf(0.975, seeds - 1) * stats.sem([row["value"] for row in rows]) if seeds > 1 else 0.0
        ends = mean - math.hypot(mean - low, half), mean + math.hypot(high - mean, half)
    low, high = np.clip(ends, 0.0, 1.0).tolist()
    return Cell(mean, low, high, seeds, n)


def metric_values(parts: Sequence[QuestionRanks], metric: str) -> MetricValues | None:
    """Compute every question's value of `answer/top-K`, `gold/top-K` or `gold/ndcg@10`, a row a part (seed); None for
    other metrics, and where no question has one.

    All parts must rank the same questions.
    """
    kind, _, cutoff = metric.partition("/top-")
    if metric == f"gold/ndcg@{NDCG_CUTOFF}":
        attribute = "gold_ndcgs"
    elif kind in ("answer", "gold") and cutoff.isdigit():
        attribute = f"{kind}_ranks"
    else:
        return None
    own_SQ: list[Sequence[float | None]] = [getattr(part, attribute) for part in parts]
    places = [at for at, value in enumerate(own_SQ[0]) if value is not None] if own_SQ and all(own_SQ) else []
    if not places:
        return None
    values_SQ = np.array([[own_Q[at] for at in places] for own_Q in own_SQ], np.float64)
    if cutoff:
        values_SQ = hit_within(values_SQ.astype(np.int64), int(cutoff))
    first = parts[0]
    return MetricValues(values_SQ, [first.question_ids[at] for at in places], [first.articles[at] for at in places])


def compare_ranks(better: SeedRanks, than: SeedRanks, metric: str) -> Difference | None:
    """Compute the difference of two systems on the same questions; None of a system and itself, or where their
    questions differ."""
    a, b = (metric_values(parts, metric) for parts in _of_same_seeds(better, than))
    if better is than or a is None or b is None or a.ids_Q != b.ids_Q:
        return None
    return difference(a.values_SQ, b.values_SQ, a.articles_Q)


def _of_same_seeds(better: Mapping[int, T], than: Mapping[int, T]) -> tuple[list[T], list[T]]:
    """Return the parts of the seeds that both systems have; one of a single seed, as an untrained one, is compared with
    every seed of the other."""
    if 1 in (len(better), len(than)):
        return list(better.values()), list(than.values())
    seeds = sorted(better.keys() & than.keys())
    return [better[seed] for seed in seeds], [than[seed] for seed in seeds]


def compare_views(better: VariantResult, than: VariantResult, measure: str) -> Difference | None:
    """Compute the difference of a measure of `QuestionViews` (x 100) between two variants, over the questions for which
    both have it; None without one, and of a variant and itself. `attention_kl` is compared by passage."""
    name = "passage_id" if measure == "attention_kl" else "question_id"
    rows_by_seed = (
        {
            report["seed"]: {row[name]: row for row in report["values"] if row[measure] is not None}
            for report in one.reports.get("analyze", [])
        }
        for one in (better, than)
    )
    parts = _of_same_seeds(*rows_by_seed)
    ids = [i for i in parts[0][0] if all(i in rows for part in parts for rows in part)] if all(parts) else []
    if not ids or better is than:
        return None
    better_SQ, than_SQ = (np.array([[float(rows[i][measure]) for i in ids] for rows in part]) for part in parts)
    return difference(better_SQ, than_SQ, [parts[0][0][i]["article"] for i in ids])


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
    systems: list[tuple[str, SeedRanks]] = []
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
