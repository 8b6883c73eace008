"""Tables of what the views of each variant are worth, beside the papers' own.

    views                view-pair cosine, LV, PPL, attention KL, and how often the answer's view wins (MVR table 6)
    each view alone      accuracy of an index of one view only, and of all together (CAMVR tables 2 and 7)
    answer view          retrieved passages matched by a snippet with the answer (CAMVR eq. 15, table 4)
    attention divergence D(i, j) for i < j (CAMVR eq. 14, table 3)
    two questions        every view's inner product with two questions of one passage (CAMVR figure 4, MVR table 7)

A variant's `paper` holds the figures under `lv`, `ppl`, `view 1: answer/top-5`, `all views: answer/top-5`,
`answer_view/top-5`, `attention_kl/1,2` (row 1, column 2) and `figure 4/1,2` (question 1, view 2).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mvr_ray.distributed.analyze import ALL_VIEWS
from mvr_ray.studies.definition import Study
from mvr_ray.studies.tables import Table, Value, VariantResult, mean, number, percent, spoken

MIN_QUESTIONS_FOR_PPL = 3
"""Mean questions a passage below which a paper's PPL stands beside nothing: PPL cannot exceed that number, and the
paper's documents have 4.8."""

VIEW_VALUES = {
    "view_pair_cosine": "view-pair cosine",
    "lv": "LV",
    "ppl": "PPL",
    "ppl_of_mean_entropy": "PPL of mean entropy",
    "ppl_answer": "PPL of answer views",
    "gold_answer_view_share": "gold answer view wins",
    "attention_kl": "attention KL",
}
FIGURE_4 = (("query 1", 3), ("query 2", 5))
"""The two questions of CAMVR's figure 4, and the views of the snippets that answer them."""
FIGURE_4_PASSAGE = "Argentina at the FIFA World Cup"


def view_table(found: Sequence[VariantResult]) -> Table | None:
    """How different the views of each variant are (MVR eqs. 9 and 10, CAMVR eq. 14)."""
    shown = [one for one in found if one.reports.get("analyze")]
    known = [name for name in VIEW_VALUES if any(name in one.paper for one in shown)]
    rows: list[list[Value]] = []
    blanked = False
    for one in shown:
        reports = one.reports["analyze"]
        each = mean([report["questions_per_passage"] for report in reports]) or 0.0
        row: list[Value] = [one.name]
        for name in VIEW_VALUES:
            paper = one.paper.get(name)
            if name == "ppl" and paper is not None and each < MIN_QUESTIONS_FOR_PPL:
                paper, blanked = None, True
            row += [number(paper)] if name in known else []
            row.append(number(mean([report[name] for report in reports])))
        most = mean([max(report["win_shares"]) for report in reports])
        rows.append([*row, number(most), int(reports[0]["num_questions"]), number(each)])
    heads = [told for name, head in VIEW_VALUES.items() for told in ([f"paper {head}"] * (name in known) + [head])]
    note = (
        "Cosine 1 and LV 0 mean that the views are one vector, and PPL then means nothing; near-ties go to the lowest "
        "view. PPL (MVR eq. 10) is the mean over passages of exp(entropy), `of mean entropy` the exponent of the mean; "
        "the paper does not say which it has. `most` is the share of questions won by the view that wins most. "
        "Attention KL is the mean over pairs i < j. n: questions, with their number a passage."
    )
    if blanked:
        note += (
            f" The paper's PPL is of 4.8 questions a passage, which bounds it; it does not stand beside fewer than "
            f"{MIN_QUESTIONS_FOR_PPL} a passage."
        )
    return Table("Views", note, ["variant", *heads, "most", "n", "questions a passage"], rows) if rows else None


def alone_table(study: Study, found: Sequence[VariantResult]) -> Table | None:
    """Each view alone, and all together (CAMVR tables 2 and 7)."""
    metrics = study.config.metrics
    rows: list[list[Value]] = []
    for one in found:
        alone = {key.partition(": ")[0] for key in one.cells if key.startswith("view ")}
        for view in [*sorted(alone, key=lambda view: int(view[5:])), *([ALL_VIEWS] if alone else [])]:
            keys = [f"{view}: {metric}" for metric in metrics]
            pairs = [(one.paper.get(key), one.cells.get(key)) for key in keys]
            told = [text for paper, cell in pairs for text in (_two_decimals(paper), spoken(cell))]
            rows.append([one.name, view, *told, max((cell.n for _, cell in pairs if cell), default=0)])
    columns = ["variant", "view", *(word for metric in metrics for word in (f"paper {metric}", metric)), "n"]
    note = "Percent of the questions that were analysed, with 95 % intervals over articles (CAMVR tables 2 and 7)."
    return _without_empty_columns(Table("Each view alone", note, columns, rows)) if rows else None


def _two_decimals(share: float | None) -> str:
    """Percent as CAMVR's table 2 prints it."""
    return "" if share is None else f"{100 * share:.2f}"


def _without_empty_columns(table: Table) -> Table:
    """The first two columns say what a row is of, and stay."""
    kept = [at for at in range(len(table.columns)) if at < 2 or any(row[at] != "" for row in table.rows)]
    rows = [[row[at] for at in kept] for row in table.rows]
    return table._replace(columns=[table.columns[at] for at in kept], rows=rows)


def answer_view_table(found: Sequence[VariantResult]) -> Table | None:
    """Answer-view accuracy over retrieved passages (CAMVR eq. 15 and table 4)."""
    prefix = f"{ALL_VIEWS}: answer_view/top-"
    rows: list[list[Value]] = []
    for one in found:
        for k in sorted(int(key.removeprefix(prefix)) for key in one.cells if key.startswith(prefix)):
            overall, matched = (one.cells[f"{ALL_VIEWS}: {kind}/top-{k}"] for kind in ("answer", "answer_view"))
            paper, paper_matched = (one.paper.get(f"{kind}/top-{k}") for kind in ("answer", "answer_view"))
            rest = None if paper is None or paper_matched is None else paper - paper_matched
            row: list[Value] = [one.name, f"top-{k}", percent(paper), spoken(overall)]
            row += [percent(paper_matched), spoken(matched), percent(rest), percent(overall.value - matched.value)]
            rows.append([*row, matched.n])
    heads = [told for name in ("overall", "answer view", "other views") for told in (f"paper {name}", name)]
    columns = ["variant", "hits", *heads, "n"]
    note = (
        "Percent of the questions for which one of the first hits holds an answer (overall), and for which one of them "
        "was matched by a view whose own snippet holds it (answer view); other views: the difference. Snippets are "
        "searched by the rule for passages; the title, and feedback views, hold no answer."
    )
    return _without_empty_columns(Table("Answer view (CAMVR eq. 15)", note, columns, rows)) if rows else None


def attention_table(found: Sequence[VariantResult]) -> Table | None:
    """The upper triangle of D(i, j) (CAMVR eq. 14 and table 3), the paper's rows above ours."""
    known = [(one, _attention_tables(one)) for one in found if _attention_tables(one)]
    most = max((len(own[0]) for _, own in known), default=0)
    rows: list[list[Value]] = []
    for one, own in known:
        num = len(own[0])
        for i in range(num - 1):
            paper = [_paper_attention(one, i, j) for j in range(i + 1, num)]
            ours = [number(mean([table[i][j] for table in own])) for j in range(i + 1, num)]
            if paper != [None] * len(paper):
                printed = ["" if value is None else f"{value:.2f}" for value in paper]
                rows.append([one.name, i + 1, "paper", *[""] * i, *printed, *[""] * (most - num)])
            rows.append([one.name, i + 1, "ours", *[""] * i, *ours, *[""] * (most - num)])
    note = (
        "Row i, column j > i: D(i, j) = KL(attention of view j || attention of view i), in nats, of the last layer, "
        "mean over heads and passages; the paper's are of 1,000 passages of Wikipedia."
    )
    columns = ["variant", "view i", "figures", *(f"j = {view + 1}" for view in range(1, most))]
    title = "Attention divergence between views (CAMVR eq. 14)"
    return Table(title, note, columns, rows) if rows else None


def _attention_tables(one: VariantResult) -> list[list[list[float | None]]]:
    """D(i, j) of each seed, [V][V]; none where a variant has one view, or views that read different texts."""
    tables = (report["attention_kl_table"] for report in one.reports.get("analyze", []))
    return [table for table in tables if table]


def _paper_attention(one: VariantResult, i: int, j: int) -> float | None:
    """The paper's D(i, j). Where its mean is 0 every pair is, for none is negative."""
    return one.paper.get(f"attention_kl/{i + 1},{j + 1}", 0.0 if one.paper.get("attention_kl") == 0 else None)


def examples_table(found: Sequence[VariantResult]) -> Table | None:
    """Every view's inner product with two questions of one passage (CAMVR figure 4, MVR table 7)."""
    lines: list[tuple[list[Value], list[float | None]]] = []
    for one in found:
        for query, (question, view) in enumerate(FIGURE_4, 1):
            scores = [one.paper.get(f"figure 4/{query},{number}") for number in range(1, 9)]
            if any(score is not None for score in scores):
                lines.append(([f"{one.name}, the paper's", FIGURE_4_PASSAGE, question, view], scores))
        for report in one.reports.get("analyze", [])[:1]:
            for example in report["examples"]:
                lines.append((_example(one.name, example), example["scores"]))
    most = max((len(scores) for _, scores in lines), default=0)
    rows: list[list[Value]] = []
    for head, scores in lines:
        best = int(np.argmax([-np.inf if score is None else score for score in scores])) + 1
        told = ["" if score is None else _product(score) for score in scores]
        rows.append([*head, best, *told, *[""] * (most - len(told))])
    note = (
        "Raw inner products of the first seed's views (CAMVR figure 4). The answer's view is that of the snippet that "
        "holds the answer; where views read the whole passage, it is the number of the snippet that CAMVR would cut."
    )
    columns = ["variant", "passage", "question", "answer's view", "best", *(f"view {view + 1}" for view in range(most))]
    return Table("One passage, two questions", note, columns, rows) if rows else None


def _example(name: str, example: dict[str, Any]) -> list[Value]:
    passage = f"{example['title']} ({example['passage_id']})" if example["title"] else example["passage_id"]
    return [name, passage, example["question"], example["answer_view"] + 1]


def _product(score: float) -> str:
    return f"{score:.2f}" if abs(score) >= 10 else f"{score:.4f}"
