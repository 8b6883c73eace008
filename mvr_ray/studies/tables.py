"""The reports of a study's steps, as tables: what was measured, beside what the paper has.

A value is a mean over seeds and questions, and its 95 % interval counts both: articles are resampled, since questions
of one article are not independent, and seeds add Student's half width (`metrics.interval_over_seeds`). Shares are
shown in percent.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from mvr_ray.core.judging.metrics import interval_over_seeds
from mvr_ray.distributed.analyze import ALL_VIEWS
from mvr_ray.store.formats.question_ranks import QuestionRanks
from mvr_ray.studies.comparisons import Difference, Values, change, difference, values_of
from mvr_ray.studies.definition import BM25, FUSED, ContrastConfig, Study
from mvr_ray.studies.execute import StepRecord
from mvr_ray.studies.steps import PlannedVariant, StudyPlan
from mvr_ray.types import FloatArray

Value = str | float | int | None
CROSS_ENCODER, READER = "cross-encoder training", "reader training"


class Cell(NamedTuple):
    """A share or a plain number with its 95 % interval, over `n` questions and `seeds` seeds."""

    value: float
    low: float
    high: float
    seeds: int
    n: int = 0


class Table(NamedTuple):
    """`rows` hold values as they are shown; `note` says what they are."""

    title: str
    note: str
    columns: list[str]
    rows: list[list[Value]]


class VariantResult(NamedTuple):
    """What one variant came to: its metrics, what it found for every question, and the reports of its steps by stage,
    one a seed."""

    name: str
    paper: Mapping[str, float]
    setting: str
    cells: dict[str, Cell]
    ranks: dict[int, QuestionRanks]
    reports: dict[str, list[dict[str, Any]]]

    def values(self, metric: str) -> Values | None:
        """The values of a metric that follows from ranks; None for others."""
        return values_of(list(self.ranks.values()), metric) if self.ranks else None


def variant_results(study: Study, plan: StudyPlan, done: Mapping[str, StepRecord]) -> list[VariantResult]:
    """Every variant with what its seeds came to, and after it what else it was compared with (BM25, fusion)."""
    found: list[VariantResult] = []
    for variant in study.config.variants:
        runs = [one for one in plan.variants if one.variant.name == variant.name]
        found += [_measure_variant(study, variant.name, runs, done), *_beside(study, variant.name, runs, done)]
    return found


def _beside(
    study: Study, name: str, runs: Sequence[PlannedVariant], done: Mapping[str, StepRecord]
) -> Iterator[VariantResult]:
    """The other systems of an evaluation, BM25 and the fusion with it, each a line of its own. BM25 was not trained:
    one seed says all."""
    rows: dict[str, dict[str, dict[int, dict[str, Any]]]] = {}
    ranks: dict[str, dict[int, QuestionRanks]] = {}
    settings: dict[str, list[str]] = {}
    for planned in runs:
        for key in planned.keys:
            if done[key].stage != "evaluate":
                continue
            for row in done[key].report["rows"]:
                if row["questions"] != study.config.questions or "bm25" not in row["system"]:
                    continue
                told = BM25 if row["system"] == "bm25" else name + FUSED
                if told == BM25 and planned.seed != runs[0].seed:
                    continue
                rows.setdefault(told, {}).setdefault(row["metric"], {})[planned.seed] = row
                ranks.setdefault(told, {})[planned.seed] = _ranks(done[key].report, row["system"], study, planned.seed)
                if told != BM25 and row["system"] not in settings.setdefault(told, []):
                    settings[told].append(row["system"])
    for told, metrics in rows.items():
        cells = _cells(metrics, ranks[told])
        yield VariantResult(told, {}, "; ".join(settings.get(told, [])), cells, ranks[told], {})


def _ranks(report: Mapping[str, Any], system: str, study: Study, seed: int) -> QuestionRanks:
    """What a system found for each of the study's questions."""
    [found] = [one for one in report["ranks"] if one["system"] == system and one["questions"] == study.config.questions]
    return QuestionRanks(*(found[name] for name in QuestionRanks._fields[:-1]), seed=seed)


def _kind(step: StepRecord) -> str:
    """The step's stage; training a cross-encoder or a reader is told apart from training a retriever."""
    epoch = (step.report.get("epochs") or [{}])[-1]
    if step.stage != "train" or "view_pair_cosine" in epoch:
        return step.stage
    return CROSS_ENCODER if "dev_top1" in epoch else READER if "dev_f1" in epoch else step.stage


def _measure_variant(
    study: Study, name: str, runs: Sequence[PlannedVariant], done: Mapping[str, StepRecord]
) -> VariantResult:
    """`analyze` may have been asked fewer questions than `evaluate`: what both measured is told as `evaluate` did, and
    under the system's name, beside the views alone, as `analyze` did."""
    rows: dict[str, dict[int, dict[str, Any]]] = {}
    ranks: dict[int, QuestionRanks] = {}
    reports: dict[str, list[dict[str, Any]]] = {}
    for planned in runs:
        for key in sorted(planned.keys, key=lambda key: done[key].stage == "evaluate"):
            step = done[key]
            reports.setdefault(_kind(step), []).append(step.report)
            if step.stage not in ("evaluate", "analyze"):
                continue
            for row in step.report["rows"]:
                if row["questions"] == study.config.questions and "bm25" not in row["system"]:
                    if step.stage == "analyze":
                        rows.setdefault(f"{row['system']}: {row['metric']}", {})[planned.seed] = row
                    if step.stage == "evaluate" or row["system"] == ALL_VIEWS:
                        rows.setdefault(row["metric"], {})[planned.seed] = row
            for found in step.report["ranks"]:
                if found["questions"] == study.config.questions and "bm25" not in found["system"]:
                    ranks[planned.seed] = _ranks(step.report, found["system"], study, planned.seed)
    variant = runs[0].variant
    return VariantResult(name, variant.paper, variant.setting, _cells(rows, ranks), ranks, reports)


def _cells(rows: Mapping[str, Mapping[int, Mapping[str, Any]]], ranks: Mapping[int, QuestionRanks]) -> dict[str, Cell]:
    """Of every metric the cell: from every question's own value where there is one, else from the reports' rows."""
    return {metric: _cell(metric, list(found.values()), list(ranks.values())) for metric, found in rows.items()}


def _cell(metric: str, rows: Sequence[Mapping[str, Any]], ranks: Sequence[QuestionRanks]) -> Cell:
    values = values_of(ranks, metric) if ranks else None
    mean = float(np.mean([row["value"] for row in rows]))
    if values is not None and values.values_SQ.shape == (len(rows), rows[0]["n"]):
        low, high = interval_over_seeds(values.values_SQ, values.articles_Q)
        return Cell(mean, low, high, len(rows), rows[0]["n"])
    low, high = (float(np.mean([row[name] for row in rows])) for name in ("low", "high"))
    spread = float(np.std([row["value"] for row in rows], ddof=1)) if len(rows) > 1 else 0.0
    half = float(stats.t.ppf(0.975, len(rows) - 1)) * spread / math.sqrt(len(rows)) if len(rows) > 1 else 0.0
    return Cell(
        mean, mean - math.hypot(mean - low, half), mean + math.hypot(high - mean, half), len(rows), rows[0]["n"]
    )


def retrieval_table(study: Study, found: Sequence[VariantResult]) -> Table:
    """Every variant beside the paper's figures, and the paired test against the first variant."""
    metrics = study.config.metrics
    tested = metrics[0]
    shown = [one for one in found if any(metric in one.cells for metric in metrics)]
    columns = ["variant", *(word for metric in metrics for word in (f"paper {metric}", metric)), "n", "seeds"]
    columns.append(f"{tested} against {shown[0].name}, p" if shown else "")
    rows: list[list[Value]] = []
    for one in shown:
        pairs = [(one.paper.get(metric), one.cells.get(metric)) for metric in metrics]
        cells = [cell for _, cell in pairs if cell]
        told = [text for paper, cell in pairs for text in (percent(paper), spoken(cell))]
        apart = compared(one, shown[0], tested) if one is not shown[0] else None
        name = f"{one.name} ({one.setting})" if one.setting else one.name
        row: list[Value] = [name, *told, max(cell.n for cell in cells), max(cell.seeds for cell in cells)]
        rows.append([*row, change(apart) if apart else ""])
    kept = [0, *(at for at in range(1, len(columns)) if any(row[at] not in ("", None) for row in rows))]
    note = (
        "Percent, with 95 % intervals: articles resampled, and the spread over seeds added. n: questions. The last "
        "column is the difference in points, its interval, and the p of the paired test, which flips whole articles."
    )
    return Table("Retrieval", note, [columns[at] for at in kept], [[row[at] for at in kept] for row in rows])


def compared(better: VariantResult, than: VariantResult, metric: str) -> Difference | None:
    """The difference between two variants on the same questions; None where either was not asked them."""
    seeds = sorted(set(better.ranks) & set(than.ranks))
    if len(better.ranks) == 1 or len(than.ranks) == 1:  # what was not trained stands beside every seed
        a, b = better.values(metric), than.values(metric)
    else:
        a, b = (values_of([one.ranks[seed] for seed in seeds], metric) if seeds else None for one in (better, than))
    if a is None or b is None or a.ids_Q != b.ids_Q:
        return None
    return difference(list(a.values_SQ), list(b.values_SQ), a.articles_Q)


def ranks_of(found: Sequence[VariantResult]) -> list[QuestionRanks]:
    """What every variant and seed found for every question, under the variant's name."""
    return [ranks._replace(system=one.name) for one in found for ranks in one.ranks.values()]


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def spoken(cell: Cell | None) -> str:
    return "" if cell is None else f"{100 * cell.value:.1f} ({100 * cell.low:.1f} to {100 * cell.high:.1f})"


def index_table(found: Sequence[VariantResult]) -> Table | None:
    """What each variant's index holds."""
    rows: list[list[Value]] = []
    for one in found:
        for report in (one.reports.get("index") or [])[-1:]:
            shards = report.get("shards") or []
            passages, vectors = (sum(shard[name] for shard in shards) for name in ("num_passages", "num_vectors"))
            if passages:
                each = number(vectors / passages)
                rows.append([one.name, passages, vectors, each, report["dimension"], report["dtype"]])
    columns = ["variant", "passages", "vectors", "vectors a passage", "dimension", "stored as"]
    return Table("Index", "Of the last seed; before any refinement.", columns, rows) if rows else None


def contrast_table(contrasts: Sequence[ContrastConfig], found: Sequence[VariantResult]) -> Table | None:
    """Differences on the same questions, over the same seeds."""
    by_name = {one.name: one for one in found}
    rows: list[list[Value]] = []
    for contrast in contrasts:
        if contrast.better not in by_name or contrast.than not in by_name:
            continue
        apart = compared(by_name[contrast.better], by_name[contrast.than], contrast.metric)
        if apart is not None:
            interval = f"{apart.low:+.1f} to {apart.high:+.1f}"
            tests = [f"{p:.2g}" if math.isfinite(p) else "" for p in (apart.p, apart.unpaired_t, apart.paired_t)]
            head = [contrast.better, contrast.than, contrast.metric, f"{apart.points:+.1f}", interval]
            rows.append([*head, *tests, apart.questions, apart.seeds])
    columns = ["variant", "against", "metric", "difference (points)", "95 % interval", "p, paired by article"]
    columns += ["p, t-test over seeds", "p, paired t-test over seeds", "n", "seeds"]
    note = (
        "In points of percent. The interval resamples articles and adds the spread over seeds. The paired test flips "
        "whole articles; the t-tests see seeds alone (the unpaired one is that of CAMVR table 6)."
    )
    return Table("Differences", note, columns, rows) if rows else None


def training_table(found: Sequence[VariantResult]) -> Table | None:
    """How training ended: what the loss says of the views."""
    rows: list[list[Value]] = []
    for one in found:
        ends = [report["epochs"][-1] for report in one.reports.get("train", []) if report.get("epochs")]
        if ends:
            views = len(ends[0]["view_shares"])
            told = [mean([end[name] for end in ends]) for name in ("loss", "loss_local", "view_pair_cosine", "lv")]
            limit = math.log(views) if views > 1 else None
            collapsed = f"{sum(end['collapsed'] for end in ends)} of {len(ends)}"
            rows.append([one.name, ends[0]["step"], *map(number, told), number(limit), collapsed])
    columns = ["variant", "steps", "loss", "local loss", "view-pair cosine", "LV", "ln V", "collapsed"]
    note = "Of the last epoch. A local loss of ln V, in bf16 within 0.3 % of it, means equal views."
    return Table("Training", note, columns, rows) if rows else None


def teacher_table(found: Sequence[VariantResult]) -> Table | None:
    """How the cross-encoders that variants denoise with, or learn from, were trained."""
    rows: list[list[Value]] = []
    for one in found:
        for report in one.reports.get(CROSS_ENCODER, [])[:1]:
            metrics = report["metrics"]
            told = [percent(metrics.get(name)) for name in ("dev_top1_before", "dev_top1")]
            rows.append([one.name, int(metrics["steps"]), number(metrics.get("loss")), *told])
    note = "Top-1, percent: a dev question's own passage among eight, most of them of the same article."
    return Table("Cross-encoders", note, ["variant", "steps", "loss", "top-1 before", "top-1"], rows) if rows else None


def reader_table(found: Sequence[VariantResult]) -> Table | None:
    """How the readers of variants were trained."""
    rows: list[list[Value]] = []
    for one in found:
        for report in one.reports.get(READER, [])[:1]:
            metrics = report["metrics"]
            told = [percent(metrics.get(name)) for name in ("dev_f1_before", "dev_exact_match", "dev_f1")]
            rows.append([one.name, int(metrics["steps"]), number(metrics.get("loss")), *told])
    note = "Percent by SQuAD's rules, of dev questions read in their own passage; of the best epoch."
    columns = ["variant", "steps", "loss", "F1 before", "exact match", "F1"]
    return Table("Readers", note, columns, rows) if rows else None


def mining_table(found: Sequence[VariantResult]) -> Table | None:
    """What each filter of mining took, in shares of the hits looked at."""
    rows: list[list[Value]] = []
    for one in found:
        for pass_, report in enumerate(one.reports.get("mine", [])):
            dropped = ("dropped_gold", "dropped_answer_bearing", "dropped_by_cross_encoder")
            told = [percent(report.get(name, 0) / max(1, report["hits"])) for name in dropped]
            row = [one.name, pass_ + 1, report["method"], report["questions"], report["hits"], *told]
            rows.append([*row, report["negatives"], report["without"]])
    columns = ["variant", "pass", "search", "questions", "hits", "gold", "answer-bearing", "by the cross-encoder"]
    note = "Hits that each filter dropped, in percent of those looked at (first seed first); what was kept."
    return Table("Mining", note, [*columns, "kept", "questions without"], rows) if rows else None


def reading_table(found: Sequence[VariantResult]) -> Table | None:
    """What a reader answers from the rankings of each variant, beside the paper's exact match (AOpt table 4), and the
    paired test against the first variant."""
    rows: list[list[Value]] = []
    first: dict[tuple[str, int], FloatArray] = {}
    for one in found:
        for report in one.reports.get("reading", [])[:1]:
            for asked in report["sets"]:
                told = {(row["passages"], row["metric"]): row for row in asked["rows"]}
                for k in sorted({passages for passages, _ in told}):
                    cells = [
                        Cell(row["value"], row["low"], row["high"], 1)
                        for row in (told[k, "exact_match"], told[k, "f1"])
                    ]
                    own = [value for value in asked["values"] if value["passages"] == k]
                    f1_Q = np.array([value["f1"] for value in own])
                    base_Q = first.setdefault((asked["questions"], k), f1_Q)
                    apart = difference([f1_Q], [base_Q], [value["article"] for value in own])
                    row: list[Value] = [one.name, asked["questions"], asked["asked"], k]
                    row += [percent(one.paper.get("exact_match")), *map(spoken, cells)]
                    rows.append([*row, "" if base_Q is f1_Q else change(apart)])
    columns = ["variant", "questions", "n", "passages", "paper exact match", "exact match", "F1"]
    columns.append(f"F1 against {rows[0][0]}, p" if rows else "")
    note = (
        "Percent by SQuAD's rules, with 95 % intervals for which articles are resampled; answers from the first so "
        "many passages. Paper: AOpt table 4, NQ, transductive. The last column is the difference of F1 in points, its "
        "interval, and the p of the paired test, which flips whole articles."
    )
    return Table("Reading", note, columns, rows) if rows else None


def cost_table(found: Sequence[VariantResult]) -> Table | None:
    """Milliseconds, and ratios to DPR of the same run, beside the paper's (of its own milliseconds)."""
    rows: list[list[Value]] = []
    threads: set[int] = set()
    devices: set[str] = set()
    heads = [told for name in _COST for told in ([f"paper {name}"] * name.endswith("_ratio") + [name])]
    for one in found:
        for report in one.reports.get("cost", []):
            threads.add(report["threads"])
            devices.add(report.get("device", "cpu"))
            for line in report["lines"]:
                method = line["system"].partition(" (")[0]
                row: list[Value] = [line["system"]]
                for name in _COST:
                    paper = [one.paper.get(f"{name.replace('_ratio', '_ms')}/{of}") for of in (method, "DPR")]
                    ratio = paper[0] / paper[1] if paper[0] and paper[1] else None
                    row += [number(ratio)] if name.endswith("_ratio") else []
                    row.append(number(line[name]))
                rows.append(row)
    told = "one thread" if threads == {1} else f"{', '.join(map(str, sorted(threads)))} threads"
    used = " and ".join(told if device == "cpu" else device for device in sorted(devices))
    note = f"Medians of interleaved runs on {used}; ratios to DPR of the same run."
    return Table("Cost", note, ["system", *(name.replace("_", " ") for name in heads)], rows) if rows else None


_COST = ("vectors_a_passage", "encode_ms", "encode_ratio", "search_ms", "search_ratio")


def mean(values: Sequence[float | None]) -> float | None:
    """The mean of the values that there are; None where there is none."""
    there = [value for value in values if value is not None]
    return float(np.mean(there)) if there else None


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e}"
