"""Build the tables of the views of each variant, beside the papers' figures.

    views                view-pair cosine, LV, PPL, attention KL, and how often the answer's view wins (MVR table 6)
    each view alone      accuracy of an index of a single view, and of all together (CAMVR tables 2 and 7)
    answer view          retrieved passages matched by a snippet with the answer (CAMVR eq. 15, table 4)
    attention divergence D(i, j) for i < j (CAMVR eq. 14, table 3)
    two questions        every view's inner product with two questions of one passage (CAMVR figure 4, MVR table 7)

A variant's `paper` has the figures under `lv`, `ppl`, `view 0: answer/top-5`, `all views: answer/top-5`,
`answer_view/top-5`, `attention_kl/1,2` (row 1, column 2) and `figure 4/1,2` (question 1, view 2). Views are
numbered from 0, as in a hit; the last two name a cell by the paper's own numbers, from 1.
"""

import math
from collections.abc import Sequence

import numpy as np

from mvr_ray.distributed.analyze import ALL_VIEWS, ANSWER_VIEW
from mvr_ray.studies.definition import Study
from mvr_ray.studies.results import VariantResult, compare_ranks, compare_views, stage_reports
from mvr_ray.studies.tables import P_NOTE, Row, Table, Value, format_change, make_table, mean, percent

MIN_QUESTIONS_FOR_PPL = 3
"""Mean questions a passage below which a paper's PPL is omitted: PPL cannot exceed that number, and the paper's
documents have 4.8."""

VIEW_VALUES = {
    "view_pair_cosine": "view-pair cosine",
    "lv": "LV",
    "ppl": "PPL",
    "ppl_of_mean_entropy": "PPL of mean entropy",
    "ppl_answer": "PPL of answer views",
    "gold_answer_view_share": "gold answer view wins",
    "attention_kl": "attention KL",
}
FIGURE_4 = (("query 1", 2), ("query 2", 4))
"""The two questions of CAMVR's figure 4, and the views of the snippets that answer them."""
FIGURE_4_PASSAGE = "Argentina at the FIFA World Cup"


def view_table(results: Sequence[VariantResult]) -> Table | None:
    """Tabulate the differences between the views of each variant (MVR eqs. 9 and 10, CAMVR eq. 14)."""
    variants = [result for result in results if result.reports.get("analyze")]
    paper_values = [name for name in VIEW_VALUES if any(name in variant.paper for variant in variants)]
    rows = []
    few_questions = False
    for variant in variants:
        reports = variant.reports["analyze"]
        questions = mean([report["questions_per_passage"] for report in reports]) or 0.0
        row: Row = {"variant": variant.name}
        for name, column in VIEW_VALUES.items():
            paper = variant.paper.get(name)
            if name == "ppl" and paper is not None and questions < MIN_QUESTIONS_FOR_PPL:
                paper, few_questions = None, True
            row |= {f"paper {column}": paper} if name in paper_values else {}
            row[column] = mean([report[name] for report in reports])
        row |= {"most": mean([max(report["win_shares"]) for report in reports])}
        row |= {"n": int(reports[0]["num_questions"]), "questions a passage": questions}
        for measure, column in (("lv", "LV"), ("gold_answer_view", "gold answer view wins (points)")):
            first = _first_with_views(variants, measure)
            row[f"{column} against {first.name}, p"] = _view_change(variant, first, measure)
        rows.append(row)
    note = (
        "Cosine 1 and LV 0 mean that the views are one vector, and PPL is then meaningless; near-ties go to the lowest "
        "view. PPL (MVR eq. 10) is the mean over passages of exp(entropy), `of mean entropy` the exponent of the mean; "
        "the paper does not say which it uses. `most` is the share of questions won by the view that wins most. "
        "Attention KL is the mean over pairs i < j. n: questions, with their number a passage. The last columns are "
        f"differences on the same questions, with their intervals and p. {P_NOTE}"
    )
    if few_questions:
        note += (
            f" The paper's PPL is of 4.8 questions a passage, which bounds it; it is omitted for fewer than "
            f"{MIN_QUESTIONS_FOR_PPL} a passage."
        )
    return make_table("Views", note, rows, drop_empty=True)


def _first_with_views(variants: Sequence[VariantResult], measure: str) -> VariantResult:
    """Return the first variant with this measure of several views, else the first one."""
    with_measure = (
        variant
        for variant, report in stage_reports(variants, "analyze")
        if any(row[measure] is not None for row in report["values"])
    )
    return next(with_measure, variants[0])


def _view_change(variant: VariantResult, first: VariantResult, measure: str) -> Value:
    """Compute the difference of a measure from the first variant's: in points for shares, else in its own unit."""
    gap = compare_views(variant, first, measure)
    if gap is None or measure == "gold_answer_view":
        return gap
    zeros = -math.floor(math.log10(max(abs(gap.points), 1e-6)))  # before the first digit of a difference below 1
    return format_change(*gap[:4], scale=0.01, decimals=max(3, 2 + zeros))


def alone_table(study: Study, results: Sequence[VariantResult]) -> Table | None:
    """Tabulate each view alone, and all together (CAMVR tables 2 and 7)."""
    rows: list[Row] = []
    metric = study.config.metrics[0]
    for result in results:
        alone = {metric.partition(": ")[0] for metric in result.cells if metric.startswith("view ")}
        for view in [*sorted(alone, key=lambda view: int(view[5:])), *([ALL_VIEWS] if alone else [])]:
            cells = {metric: result.cells.get(f"{view}: {metric}") for metric in study.config.metrics}
            row: Row = {"variant": result.name, "view": view}
            for name, cell in cells.items():
                row |= {f"paper {name}": percent(result.paper.get(f"{view}: {name}"), decimals=2), name: cell}
            row |= {"n": max((cell.n for cell in cells.values() if cell), default=0)}
            gap = compare_ranks(result.view_ranks.get(view, {}), result.view_ranks.get(ALL_VIEWS, {}), metric)
            rows.append(row | {f"{metric} against all views, p": gap})
    note = (
        "Percent of the questions that were analysed, with 95 % intervals over articles (CAMVR tables 2 and 7). The "
        f"last column is the difference from all views of the same variant in points, with its interval and p. {P_NOTE}"
    )
    return make_table("Each view alone", note, rows, drop_empty=True)


def answer_view_table(results: Sequence[VariantResult]) -> Table | None:
    """Tabulate answer-view accuracy over retrieved passages (CAMVR eq. 15 and table 4)."""
    prefix = f"{ALL_VIEWS}: answer_view/top-"
    rows: list[Row] = []
    for result in results:
        for k in sorted(int(metric.removeprefix(prefix)) for metric in result.cells if metric.startswith(prefix)):
            overall, answer_view = (result.cells[f"{ALL_VIEWS}: {kind}/top-{k}"] for kind in ("answer", "answer_view"))
            paper, paper_view = (result.paper.get(f"{kind}/top-{k}") for kind in ("answer", "answer_view"))
            rest = None if paper is None or paper_view is None else paper - paper_view
            first = next(one for one in results if one.cells.get(f"{prefix}{k}"))
            own, other = (one.view_ranks.get(ANSWER_VIEW, {}) for one in (result, first))
            row: Row = {"variant": result.name, "hits": f"top-{k}"}
            row |= {"paper overall": percent(paper), "overall": overall}
            row |= {"paper answer view": percent(paper_view), "answer view": answer_view}
            row |= {"paper other views": percent(rest)}
            row |= {"other views, p": compare_ranks(result.view_ranks.get(ALL_VIEWS, {}), own, f"answer/top-{k}")}
            gap = compare_ranks(own, other, f"answer/top-{k}")
            rows.append(row | {"n": answer_view.n, f"answer view against {first.name}, p": gap})
    note = (
        "Percent of the questions for which one of the first hits holds an answer (overall), and for which one of them "
        "was matched by a view whose own snippet holds it (answer view). Snippets are searched by the rule for "
        "passages; the title, and feedback views, hold no answer. Other views: overall less answer view. It and the "
        f"last column are differences in points, with their intervals and p. {P_NOTE}"
    )
    return make_table("Answer view (CAMVR eq. 15)", note, rows, drop_empty=True)


def attention_table(results: Sequence[VariantResult]) -> Table | None:
    """Tabulate the upper triangle of D(i, j) (CAMVR eq. 14 and table 3), the paper's rows above ours."""
    rows: list[Row] = []
    variants = [
        result
        for result in results
        if any(report["attention_kl_table"] for report in result.reports.get("analyze", []))
    ]  # none for one view, or views that read different texts
    for result in variants:
        reports = result.reports["analyze"]
        tables = [report["attention_kl_table"] for report in reports]
        no_difference = 0.0 if result.paper.get("attention_kl") == 0 else None  # a mean of 0 has no other terms
        for i in range(len(tables[0]) - 1):
            head: Row = {"variant": result.name, "view i": i}
            columns = range(i + 1, len(tables[0]))
            paper = {f"j = {j}": result.paper.get(f"attention_kl/{i + 1},{j + 1}", no_difference) for j in columns}
            if any(value is not None for value in paper.values()):
                figures = {column: "" if value is None else f"{value:.2f}" for column, value in paper.items()}
                rows.append({**head, "figures": "paper", **figures})
            row: Row = {**head, "figures": "ours"}
            row |= {f"j = {j}": mean([table[i][j] for table in tables]) for j in columns}
            if i == 0:
                row["n (passages)"] = reports[0]["attention_passages"]
                row[f"mean against {variants[0].name}, p"] = _view_change(result, variants[0], "attention_kl")
            rows.append(row)
    note = (
        "Row i, column j > i: D(i, j) = KL(attention of view j || attention of view i), in nats, of the last layer, "
        "mean over heads and passages; the paper's are of 1,000 passages of Wikipedia. n, in a variant's first row: "
        "passages. Beside it, the difference of each passage's mean over its own pairs i < j (with few snippets, pairs "
        f"of the first views weigh more than in the mean of these rows), with its interval and p. {P_NOTE}"
    )
    return make_table("Attention divergence between views (CAMVR eq. 14)", note, rows, drop_empty=True)


def examples_table(results: Sequence[VariantResult]) -> Table | None:
    """Tabulate every view's inner product with two questions of one passage (CAMVR figure 4, MVR table 7)."""
    rows: list[Row] = []
    for result in results:
        for query, (question, view) in enumerate(FIGURE_4, 1):
            scores = [result.paper.get(f"figure 4/{query},{number}") for number in range(1, 9)]
            if any(score is not None for score in scores):
                rows.append(_example_row(f"{result.name}, the paper's", FIGURE_4_PASSAGE, question, view, scores))
        for _, report in stage_reports([result], "analyze", first_seed=True):
            for example in report["examples"]:
                title, passage_id = example["title"], example["passage_id"]
                passage = f"{title} ({passage_id})" if title else passage_id
                view = example["answer_view"]
                rows.append(_example_row(result.name, passage, example["question"], view, example["scores"]))
    note = (
        "Raw inner products of the first seed's views (CAMVR figure 4). The answer's view is that of the snippet that "
        "holds the answer; where views read the whole passage, it is the number of the snippet that CAMVR would cut."
    )
    return make_table("One passage, two questions", note, rows)


def _example_row(variant: str, passage: str, question: str, answer_view: int, scores: Sequence[float | None]) -> Row:
    best = int(np.argmax([-np.inf if score is None else score for score in scores]))
    row: Row = {"variant": variant, "passage": passage, "question": question, "answer's view": answer_view}
    row["best"] = best
    for number, score in enumerate(scores):
        row[f"view {number}"] = "" if score is None else f"{score:.2f}" if abs(score) >= 10 else f"{score:.4f}"
    return row
