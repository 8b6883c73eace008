"""Build the tables of the training of variants' models, and of the negatives that were mined for them."""

import math
from collections.abc import Sequence

from mvr_ray.studies.definition import Study
from mvr_ray.studies.results import CROSS_ENCODER, READER, VariantResult, compare_ranks, stage_reports
from mvr_ray.studies.tables import P_NOTE, Row, Table, make_table, mean, percent

_LOSSES = {"loss": "loss", "loss_local": "local loss", "view_pair_cosine": "view-pair cosine", "lv": "LV"}
_FILTERS = {
    "dropped_gold": "gold",
    "dropped_answer_bearing": "answer-bearing",
    "dropped_by_cross_encoder": "by the cross-encoder",
}


def training_table(results: Sequence[VariantResult]) -> Table | None:
    """Tabulate the end of training: losses and collapse; then the steps and the loss of each reader and cross-encoder,
    whose dev metrics do not compare variants and are only in report.json."""
    rows: list[Row] = []
    for result in results:
        if ends := [report["epochs"][-1] for report in result.reports.get("train", []) if report.get("epochs")]:
            views = len(ends[0]["view_shares"])
            row: Row = {"variant": result.name, "steps": ends[0]["step"]}
            row |= {column: mean([end[name] for end in ends]) for name, column in _LOSSES.items()}
            row["ln V"] = math.log(views) if views > 1 else None
            rows.append(row | {"collapsed": f"{sum(end['collapsed'] for end in ends)} of {len(ends)}"})
    for kind in (CROSS_ENCODER, READER):
        for result, report in stage_reports(results, kind, first_seed=True):
            steps, loss = int(report["metrics"]["steps"]), report["metrics"].get("loss")
            rows.append({"variant": f"{result.name}: {kind}", "steps": steps, "loss": loss})
    note = (
        "Of the last epoch. A local loss of ln V, in bf16 within 0.6 % of it at temperatures of 0.6 to 1, means equal "
        "views; where passages have fewer, n each, the mean of ln n does."
    )
    return make_table("Training", note, rows)


def curve_table(study: Study, results: Sequence[VariantResult]) -> Table | None:
    """Tabulate every trained variant over its training budget, with the paired test against the first one at the same
    step."""
    variants = [result for result in results if result.curve]
    metrics, rows = study.config.metrics, []
    for result in variants:
        for at in [*sorted(result.curve), 0]:
            point, first = (one.curve.get(at) if at else one for one in (result, variants[0]))
            cells = {metric: point.cells.get(metric) if point else None for metric in metrics}
            row: Row = {"variant": result.name, "steps": at or "all", **cells}
            row["n"] = max((cell.n for cell in cells.values() if cell), default=0)
            gap = compare_ranks(point.ranks, first.ranks, metrics[0]) if point and first else None
            rows.append(row | {f"{metrics[0]} against {variants[0].name}, p": gap})
    note = (
        "Percent, with 95 % intervals over articles, after a number of steps of one training: the learning rate "
        "decays to zero at its end, so a shorter training may do better than the same steps of a longer one. The last "
        f"column is the difference in points at the same step, its interval, and p. {P_NOTE}"
    )
    return make_table("Over the training budget", note, rows)


def mining_table(results: Sequence[VariantResult]) -> Table | None:
    """Tabulate the share of hits that each filter of mining dropped, and the number of remaining negatives."""
    rows: list[Row] = []
    for result in results:
        for number, report in enumerate(result.reports.get("mine", []), 1):
            row: Row = {"variant": result.name, "pass": number, "search": report["method"]}
            row |= {name: report[name] for name in ("questions", "hits")}
            row |= {name: percent(report.get(field, 0) / max(1, report["hits"])) for field, name in _FILTERS.items()}
            rows.append(row | {"kept": report["negatives"], "questions without": report["without"]})
    note = "Hits that each filter dropped, in percent of all hits (first seed first); kept: the remaining negatives."
    return make_table("Mining", note, rows)
