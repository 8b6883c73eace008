"""Build the tables of retrieval, reading, index contents and costs of variants."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mvr_ray.comparison import Difference, difference
from mvr_ray.core.judging.metrics import holm
from mvr_ray.distributed.text_table import interval_text
from mvr_ray.store.formats.question_ranks import QuestionRanks
from mvr_ray.studies.definition import BM25, ContrastConfig, Study
from mvr_ray.studies.results import BM25_SYSTEM, VariantResult, compare_ranks, stage_reports
from mvr_ray.studies.tables import ADJUSTED_P, P_NOTE, Cell, Row, Table, format_change, make_table, percent
from mvr_ray.types import FloatArray

_COSTS = ("vectors_a_passage", "encode_ms", "encode_ratio", "search_ms", "search_ratio")


def retrieval_table(study: Study, results: Sequence[VariantResult]) -> Table | None:
    """Tabulate every variant beside the paper's figures, with the paired test against the first variant."""
    metrics = study.config.metrics
    variants = [result for result in results if any(metric in result.cells for metric in metrics)]
    rows = []
    for result in variants:
        row: Row = {"variant": f"{result.name} ({result.setting})" if result.setting else result.name}
        for metric in metrics:
            row |= {f"paper {metric}": percent(result.paper.get(metric)), metric: result.cells.get(metric)}
        cells = [result.cells[metric] for metric in metrics if metric in result.cells]
        row |= {"n": max(cell.n for cell in cells), "seeds": max(cell.seeds for cell in cells)}
        gap = compare_ranks(result.ranks, variants[0].ranks, metrics[0])
        rows.append(row | {f"{metrics[0]} against {variants[0].name}, p": gap})
    note = (
        "Percent, with 95 % intervals: articles resampled, and the spread over seeds added. n: questions. The last "
        f"column is the difference in points, its interval, and p. {P_NOTE}"
    )
    return make_table("Retrieval", note, rows, drop_empty=True)


def contrast_table(contrasts: Sequence[ContrastConfig], results: Sequence[VariantResult]) -> Table | None:
    """Tabulate differences on the same questions, over the same seeds: the planned tests of a study, a family."""
    ranks = {result.name: result.ranks for result in results}
    gaps: list[tuple[ContrastConfig, Difference]] = []
    for one in contrasts:
        has_both = {one.better, one.than} <= ranks.keys()
        gap = compare_ranks(ranks[one.better], ranks[one.than], one.metric) if has_both else None
        gaps += [(one, gap)] if gap is not None else []
    rows: list[Row] = []
    for (one, gap), holm_p in zip(gaps, holm([gap.p for _, gap in gaps])):
        tests = {
            "p, paired by article": gap.articles_p,
            "p, t-test over seeds": gap.unpaired_t,
            "p, paired t-test over seeds": gap.paired_t,
            ADJUSTED_P: holm_p,
        }
        row: Row = {"variant": one.better, "against": one.than, "metric": one.metric}
        row |= {
            "difference (points)": f"{gap.points:+.1f}",
            "95 % interval": interval_text(gap.low, gap.high, form="+.1f"),
        }
        row |= {test: f"{p:.2g}" if math.isfinite(p) else "" for test, p in tests.items()}
        rows.append(row | {"n": gap.questions, "seeds": gap.seeds})
    note = (
        "In points of percent. The interval resamples articles and adds the spread over seeds. The paired test flips "
        "whole articles; the t-tests use only seeds (the unpaired one is that of CAMVR table 6). The last p is the "
        "larger of the paired ones (against one untrained system, too), adjusted by Holm's method for all rows."
    )
    return make_table("Differences", note, rows)


def index_table(results: Sequence[VariantResult]) -> Table | None:
    """Tabulate passages and vectors of each variant's index."""
    rows: list[Row] = []
    for result in results:
        for report in result.reports.get("index", [])[-1:]:
            shards = report.get("shards") or []
            passages, vectors = (sum(shard[name] for shard in shards) for name in ("num_passages", "num_vectors"))
            if passages:
                row: Row = {"variant": result.name, "passages": passages, "vectors": vectors}
                row |= {"vectors a passage": vectors / passages, "dimension": report["dimension"]}
                rows.append(row | {"stored as": report["dtype"]})
    return make_table("Index", "Of the last seed; before any refinement.", rows)


def entity_table(study: Study, results: Sequence[VariantResult]) -> Table | None:
    """Tabulate BM25 and every variant (first seed) in every bucket of entity frequency, and their difference (AOpt
    table 1)."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for result, report in stage_reports(results, "entity_frequency", first_seed=True):
        for question_set in report["sets"]:
            questions, lines = question_set["questions"], question_set["rows"]
            for system in dict.fromkeys(line["system"] for line in lines):
                name = BM25 if system == BM25 else result.name
                own = [line for line in lines if line["system"] == system]
                groups.setdefault((questions, name), _bucket_rows({"system": name, "questions": questions}, own))
    note = (
        "Percent of the questions with an answer-bearing passage among the first, with 95 % intervals over articles; "
        f"the difference from BM25 in points, with its interval and p. {P_NOTE} A question's entity is its longest run "
        "of capitalised words; the buckets are the quartiles of the number of passages whose text contains it. "
        f"The paper's table: {study.config.paper}"
    )
    return make_table("Accuracy by entity frequency", note, [row for rows in groups.values() for row in rows])


def _bucket_rows(head: Row, lines: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Build a row a bucket: accuracy at every depth, then the gain over BM25 at every depth."""
    rows: list[Row] = []
    for bucket in dict.fromkeys(line["bucket"] for line in lines):
        own = sorted((line for line in lines if line["bucket"] == bucket), key=lambda line: line["k"])
        row: Row = {**head, "bucket": bucket, "n": own[0]["n"], "articles": own[0]["articles"]}
        row |= {f"top-{line['k']}": Cell(line["value"], line["low"], line["high"]) for line in own}
        for line in own:
            gain = line["over_bm25"]
            row[f"top-{line['k']} over BM25, p"] = (
                format_change(gain["value"], gain["low"], gain["high"], gain["p"], scale=100) if gain else ""
            )
        rows.append(row)
    return rows


def entity_ranks(results: Sequence[VariantResult]) -> list[QuestionRanks]:
    """Return the ranks of every variant (first seed) and, once, of BM25 for every question."""
    ranks: dict[tuple[str, str], QuestionRanks] = {}
    for result, report in stage_reports(results, "entity_frequency", first_seed=True):
        for fields in report["ranks"]:
            name = BM25 if fields["system"] == BM25_SYSTEM else result.name
            own = QuestionRanks(**fields)._replace(system=name, seed=report["seed"])
            ranks.setdefault((name, own.questions), own)
    return list(ranks.values())


def reading_table(results: Sequence[VariantResult]) -> Table | None:
    """Tabulate the accuracy of a reader over the rankings of each variant, beside the paper's exact match (AOpt table
    4), with the paired test against the first variant."""
    rows: list[Row] = []
    first: dict[tuple[str, int], FloatArray] = {}
    for result, report in stage_reports(results, "reading", first_seed=True):
        for question_set in report["sets"]:
            cells = {
                (line["passages"], line["metric"]): Cell(line["value"], line["low"], line["high"])
                for line in question_set["rows"]
            }
            for k in sorted({passages for passages, _ in cells}):
                values = [value for value in question_set["values"] if value["passages"] == k]
                f1_Q = np.array([value["f1"] for value in values])
                base_Q = first.setdefault((question_set["questions"], k), f1_Q)
                gap = difference(f1_Q, base_Q, [value["article"] for value in values]) if base_Q is not f1_Q else None
                row: Row = {"variant": result.name, "questions": question_set["questions"]}
                row["n"] = question_set["rows"][0]["n"]
                row |= {"passages": k, "paper exact match": percent(result.paper.get("exact_match"))}
                row |= {"exact match": cells[k, "exact_match"], "F1": cells[k, "f1"]}
                rows.append(row | {f"F1 against {rows[0]['variant'] if rows else result.name}, p": gap})
    note = (
        "Percent by SQuAD's rules, with 95 % intervals for which articles are resampled; answers from the first so "
        "many passages. Paper: AOpt table 4, NQ, transductive. The last column is the difference of F1 in points, its "
        f"interval, and p. {P_NOTE}"
    )
    return make_table("Reading", note, rows)


def cost_table(results: Sequence[VariantResult]) -> Table | None:
    """Tabulate milliseconds, and ratios to DPR of the same run, beside the paper's (of its own milliseconds)."""
    rows: list[Row] = []
    reports = list(stage_reports(results, "cost"))
    for result, report in reports:
        for line in report["lines"]:
            method = line["system"].partition(" (")[0]
            row: Row = {"system": line["system"]}
            for name in _COSTS:
                if name.endswith("_ratio"):
                    own, base = (result.paper.get(f"{name.replace('_ratio', '_ms')}/{of}") for of in (method, "DPR"))
                    row[f"paper {name}".replace("_", " ")] = own / base if own and base else None
                row[name.replace("_", " ")] = float(line[name])
            rows.append(row)
    threads = sorted({report["threads"] for _, report in reports})
    cpu = "one thread" if threads == [1] else f"{', '.join(map(str, threads))} threads"
    devices = sorted({report.get("device", "cpu") for _, report in reports})
    places = " and ".join(cpu if device == "cpu" else device for device in devices)
    return make_table("Cost", f"Medians of interleaved runs on {places}; ratios to DPR of the same run.", rows)
