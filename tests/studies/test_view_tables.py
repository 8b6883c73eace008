"""Checks that the papers' figures stand beside ours in the right row and column, or not at all."""

from pathlib import Path

import pytest

from mvr_ray.studies.definition import Study, load_study
from mvr_ray.studies.results import VariantResult
from mvr_ray.studies.tables import Cell, Table
from mvr_ray.studies.view_tables import (
    FIGURE_4_PASSAGE,
    alone_table,
    answer_view_table,
    attention_table,
    examples_table,
    view_table,
)

STUDIES = Path(__file__).resolve().parent.parent.parent / "configs" / "studies"


def result(name: str, shares: dict[str, float] | None = None, paper: dict[str, float] | None = None, **reports):
    cells = {metric: Cell(value, value - 0.1, value + 0.1, 1, 40) for metric, value in (shares or {}).items()}
    return VariantResult(name, paper or {}, "", cells, {}, reports)


def records(table: Table) -> list[dict]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


@pytest.fixture(scope="module")
def study(tmp_path_factory) -> Study:
    folder = tmp_path_factory.mktemp("study")
    (folder / "run.yaml").write_text("{}\n")
    (folder / "one.yaml").write_text(
        "{study: one, title: one, paper: none, run: run.yaml, questions: dev, metrics: [answer/top-1, answer/top-5],"
        " steps: [index], sizes: {quick: {about: tiny, set: []}}, variants: [{name: a}]}\n"
    )
    return load_study(folder / "one.yaml", "quick")


def test_every_view_alone_and_all_of_them_stand_beside_the_papers_at_every_k(study):
    cells = {f"view {view}: answer/top-{k}": (view + k) / 20 for view in range(1, 11) for k in (1, 5)}
    cells |= {"all views: answer/top-1": 0.75, "all views: answer/top-5": 0.9}
    paper = {"view 2: answer/top-5": 0.5551, "all views: answer/top-5": 0.638}
    table = alone_table(study, [result("ten", cells, paper), result("none", {"lv": 1.0})])
    assert table.columns == ["variant", "view", "answer/top-1", "paper answer/top-5", "answer/top-5", "n"]
    rows = {row["view"]: row for row in records(table)}
    assert list(rows) == [*(f"view {view}" for view in range(1, 11)), "all views"], "in the order of numbers"
    assert rows["view 2"]["paper answer/top-5"] == "55.51"
    assert rows["view 2"]["answer/top-5"] == "35.0 (25.0 to 45.0)"
    assert rows["all views"]["paper answer/top-5"] == "63.80" and rows["view 1"]["paper answer/top-5"] == ""
    assert alone_table(study, [result("none", {"lv": 1.0})]) is None


def analysis(**changes) -> dict:
    values = {"view_pair_cosine": 0.9, "lv": 0.1, "ppl": 2.5, "ppl_of_mean_entropy": 2.25, "ppl_answer": 2.0}
    values |= {"gold_answer_view_share": 0.5, "attention_kl": 0.2, "win_shares": [0.75, 0.25]}
    return {**values, "num_questions": 100, "questions_per_passage": 4.5, **changes}


def test_a_papers_ppl_stands_beside_ours_only_where_passages_have_three_questions():
    paper = {"lv": 0.126, "ppl": 3.19}
    many = result("many", paper=paper, analyze=[analysis(), analysis(ppl=3.0)])
    few = result("few", paper=paper, analyze=[analysis(questions_per_passage=2.9)])
    table = view_table([many, few])
    first, second = records(table)
    assert (first["paper PPL"], first["PPL"], first["PPL of mean entropy"]) == ("3.19", "2.75", "2.25")
    assert (first["n"], first["questions a passage"]) == (100, "4.5")
    assert (second["paper PPL"], second["PPL"], second["paper LV"]) == ("", "2.5", "0.126")
    assert "it is omitted for fewer than 3 a passage" in table.note
    assert "fewer than 3" not in view_table([many]).note
    assert (first["gold answer view wins"], first["most"]) == ("0.5", "0.75")


def test_other_views_are_overall_less_answer_view():
    cells = {"all views: answer/top-5": 0.75, "all views: answer_view/top-5": 0.5, "answer/top-5": 0.9}
    paper = {"answer/top-5": 0.69, "answer_view/top-5": 0.594}
    [row] = records(answer_view_table([result("a", cells, paper), result("b", {"all views: answer/top-5": 0.5})]))
    assert row == {
        "variant": "a",
        "hits": "top-5",
        "paper overall": "69.0",
        "overall": "75.0 (65.0 to 85.0)",
        "paper answer view": "59.4",
        "answer view": "50.0 (40.0 to 60.0)",
        "paper other views": "9.6",
        "other views": "25.0",
        "n": 40,
    }
    assert answer_view_table([result("b", {"all views: answer/top-5": 0.5})]) is None


def test_the_upper_triangle_of_attention_has_the_papers_figures_above_ours():
    ours = [[0.0, 0.5, 0.25], [9.0, 0.0, None], [9.0, 9.0, 0.0]]
    more = [[0.0, 0.7, 0.25], [9.0, 0.0, 2.0], [9.0, 9.0, 0.0]]
    variants = [
        result("CAMVR", paper={"attention_kl/1,2": 0.5, "attention_kl/2,3": 0.21}, analyze=[
            {"attention_kl_table": ours}, {"attention_kl_table": more}]),
        result("MVR", paper={"attention_kl": 0.0}, analyze=[{"attention_kl_table": [[0.0, 1e-12], [1e-12, 0.0]]}]),
        result("pieces", analyze=[{"attention_kl_table": []}]),
        result("no analysis"),
    ]  # fmt: skip
    table = attention_table(variants)
    assert table.columns == ["variant", "view i", "figures", "j = 2", "j = 3"]
    assert table.rows == [
        ["CAMVR", 1, "paper", "0.50", ""],
        ["CAMVR", 1, "ours", "0.6", "0.25"],
        ["CAMVR", 2, "paper", "", "0.21"],
        ["CAMVR", 2, "ours", "", "2"],
        ["MVR", 1, "paper", "0.00", ""],
        ["MVR", 1, "ours", "1.0e-12", ""],
    ]
    assert attention_table(variants[2:]) is None


def test_two_questions_of_one_passage_stand_under_each_view_with_the_papers_rows_first():
    example = {"passage_id": "p1", "title": "Norway", "question": "Who?", "answer_view": 1, "scores": [0.25, None, 0.5]}
    paper = {f"figure 4/2,{view}": 130.0 + (view == 5) for view in range(1, 9)}
    paper_row, row = records(examples_table([result("CAMVR", paper=paper, analyze=[{"examples": [example]}] * 2)]))
    assert (row["variant"], row["passage"], row["question"]) == ("CAMVR", "Norway (p1)", "Who?")
    assert (row["answer's view"], row["best"]) == (2, 3)
    assert [row[f"view {view}"] for view in (1, 2, 3, 4)] == ["0.2500", "", "0.5000", ""]
    assert (paper_row["passage"], paper_row["question"]) == (FIGURE_4_PASSAGE, "query 2")
    assert (paper_row["best"], paper_row["answer's view"], paper_row["view 5"]) == (5, 5, "131.00")
    assert examples_table([result("none", analyze=[{"examples": []}])]) is None
