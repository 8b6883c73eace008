"""Checks that the papers' figures stand beside ours in the right row and column, or not at all."""

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from mvr_ray.core.judging.metrics import interval_over_seeds, paired_test
from mvr_ray.store.formats.question_ranks import QuestionRanks
from mvr_ray.studies import view_tables
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


ARTICLES = [f"article {at // 4}" for at in range(40)]


def result(
    name: str,
    shares: dict[str, float] | None = None,
    paper: dict[str, float] | None = None,
    view_ranks: dict[str, dict[int, QuestionRanks]] | None = None,
    **reports,
):
    cells = {metric: Cell(value, value - 0.1, value + 0.1, 1, 40) for metric, value in (shares or {}).items()}
    reports = {stage: [{"seed": seed, **one} for seed, one in enumerate(own, 1)] for stage, own in reports.items()}
    return VariantResult(name, paper or {}, "", cells, {}, reports, view_ranks=view_ranks or {})


def ranks(system: str, seed: int, by_seed: int = 1) -> dict[int, QuestionRanks]:
    """Random ranks of 40 questions of ten articles, for `by_seed` seeds."""
    chance = np.random.default_rng(seed)
    parts = [chance.integers(-1, 8, 40).tolist() for _ in range(by_seed)]
    ids = [f"q{at}" for at in range(40)]
    return {at: QuestionRanks(system, "dev", ids, ARTICLES, own, own, at) for at, own in enumerate(parts, 1)}


def expected_change(better_SQ, than_SQ, articles, scale=100.0, decimals=1) -> str:
    """A difference as a table shows it, from the metrics that have their own oracles."""
    gap_SQ = np.asarray(better_SQ, float) - np.asarray(than_SQ, float)
    low, high = interval_over_seeds(gap_SQ, articles)
    p = paired_test(np.mean(better_SQ, axis=0), np.mean(than_SQ, axis=0), articles)
    if len(gap_SQ) > 1:
        p = max(p, stats.ttest_1samp(gap_SQ.mean(axis=1), 0).pvalue)
    value, low, high = (scale * number for number in (gap_SQ.mean(), low, high))
    return f"{value:+.{decimals}f} ({low:+.{decimals}f} to {high:+.{decimals}f}), {p:.2g}"


def hits(by_seed: dict[int, QuestionRanks], k: int) -> list[list[float]]:
    return [[float(0 <= rank < k) for rank in part.answer_ranks] for part in by_seed.values()]


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
    cells = {f"view {view}: answer/top-{k}": (view + k) / 20 for view in range(10) for k in (1, 5)}
    cells |= {"all views: answer/top-1": 0.75, "all views: answer/top-5": 0.9}
    paper = {"view 2: answer/top-5": 0.5551, "all views: answer/top-5": 0.638}
    table = alone_table(study, [result("ten", cells, paper), result("none", {"lv": 1.0})])
    assert table.columns == ["variant", "view", "answer/top-1", "paper answer/top-5", "answer/top-5", "n"]
    rows = {row["view"]: row for row in records(table)}
    assert list(rows) == [*(f"view {view}" for view in range(10)), "all views"], "in the order of numbers"
    assert rows["view 2"]["paper answer/top-5"] == "55.51"
    assert rows["view 2"]["answer/top-5"] == "35.0 (25.0 to 45.0)"
    assert rows["all views"]["paper answer/top-5"] == "63.80" and rows["view 0"]["paper answer/top-5"] == ""
    assert alone_table(study, [result("none", {"lv": 1.0})]) is None


def test_every_view_alone_is_tested_against_all_views_on_the_same_questions(study):
    cells = {f"{view}: answer/top-1": 0.5 for view in ("view 0", "view 1", "all views")}
    view_ranks = {view: ranks(view, seed, 2) for seed, view in enumerate(("view 0", "view 1", "all views"))}
    rows = {row["view"]: row for row in records(alone_table(study, [result("two", cells, view_ranks=view_ranks)]))}
    column = "answer/top-1 against all views, p"
    for view in ("view 0", "view 1"):
        pair = hits(view_ranks[view], 1), hits(view_ranks["all views"], 1)
        assert rows[view][column] == expected_change(*pair, ARTICLES)
    assert (rows["all views"][column], rows["view 0"]["n"]) == ("", 40)


def analysis(**changes) -> dict:
    values = {"view_pair_cosine": 0.9, "lv": 0.1, "ppl": 2.5, "ppl_of_mean_entropy": 2.25, "ppl_answer": 2.0}
    values |= {"gold_answer_view_share": 0.5, "attention_kl": 0.2, "win_shares": [0.75, 0.25]}
    return {**values, "num_questions": 100, "questions_per_passage": 4.5, "values": [], **changes}


def question_values(seed: int, has_answers: bool = True) -> list[dict]:
    """Random measures of 40 questions, two a passage; some are not defined."""
    chance = np.random.default_rng(seed)
    lv, kl = chance.random(40), chance.random(20)
    return [
        {
            "question_id": f"q{at}",
            "article": ARTICLES[at],
            "passage_id": f"p{at // 2}",
            "lv": None if at == seed else float(lv[at]),
            "gold_answer_view": bool(chance.random() < 0.5) if has_answers and at % 5 else None,
            "attention_kl": float(kl[at // 2]) if at < 30 else None,
        }
        for at in range(40)
    ]


def expected_measure(better: list[list[dict]], than: list[list[dict]], measure: str, **numbers) -> str:
    """The difference of a measure over the questions for which every seed of both has it."""
    parts = better, than
    indices = [at for at in range(40) if all(rows[at][measure] is not None for part in parts for rows in part)]
    values = [[[float(rows[at][measure]) for at in indices] for rows in part] for part in parts]
    return expected_change(*values, [ARTICLES[at] for at in indices], **numbers)


def test_variants_are_tested_against_the_first_that_has_the_measure_where_both_have_it():
    of_variant = {"two": question_values(1, has_answers=False), "three": question_values(2), "four": question_values(3)}
    more = question_values(4)
    reports = {name: [analysis(values=values)] for name, values in of_variant.items()}
    reports["four"].append(analysis(values=more))
    variants = [result("one view", analyze=[analysis()]), *(result(name, analyze=own) for name, own in reports.items())]
    table = view_table(variants)
    rows = {row["variant"]: row for row in records(table)}
    lv, wins = "LV against two, p", "gold answer view wins (points) against three, p"
    assert table.columns[-2:] == [lv, wins]
    assert [(rows[name][lv], rows[name][wins]) for name in ("one view", "two")] == [("", "")] * 2

    def expected(name: str, than: str, measure: str, **numbers) -> str:
        better = [of_variant[name], *([more] if name == "four" else [])]
        return expected_measure(better, [of_variant[than]], measure, **numbers)

    for name in ("three", "four"):
        assert rows[name][lv] == expected(name, "two", "lv", scale=1.0, decimals=3)
    assert rows["four"][wins] == expected("four", "three", "gold_answer_view")
    assert rows["three"][wins] == ""


def test_variants_of_which_some_seeds_have_not_run_are_compared_by_the_seeds_of_both():
    """As in a study that was interrupted, or ran in part."""
    runs = {"first": (1, 2, 3), "second": (13, 11)}
    first, second = (
        result(name, analyze=[analysis(values=question_values(number), seed=number % 10) for number in numbers])
        for name, numbers in runs.items()
    )
    [_, row] = records(view_table([first, second]))
    better, than = ([question_values(number) for number in numbers] for numbers in ((11, 13), (1, 3)))
    assert row["LV against first, p"] == expected_measure(better, than, "lv", scale=1.0, decimals=3)


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
    both = {name: ranks(name, seed) for seed, name in enumerate(("all views", "answer view"))}
    variants = [result("a", cells, paper, view_ranks=both), result("b", {"all views: answer/top-5": 0.5})]
    [row] = records(answer_view_table(variants))
    assert row == {
        "variant": "a",
        "hits": "top-5",
        "paper overall": "69.0",
        "overall": "75.0 (65.0 to 85.0)",
        "paper answer view": "59.4",
        "answer view": "50.0 (40.0 to 60.0)",
        "paper other views": "9.6",
        "other views, p": expected_change(hits(both["all views"], 5), hits(both["answer view"], 5), ARTICLES),
        "n": 40,
    }
    assert answer_view_table([result("b", {"all views: answer/top-5": 0.5})]) is None


def test_answer_views_are_tested_against_the_first_variants_at_every_k():
    cells = {f"all views: {kind}/top-{k}": 0.5 for kind in ("answer", "answer_view") for k in (1, 5)}
    both = [ranks("answer view", seed) for seed in (1, 2)]
    variants = [result(name, cells, view_ranks={"answer view": own}) for name, own in zip("ab", both)]
    rows = records(answer_view_table([result("without", {"all views: answer/top-5": 0.5}), *variants]))
    column = "answer view against a, p"
    assert [row[column] for row in rows[:2]] == ["", ""]
    for row, k in zip(rows[2:], (1, 5), strict=True):
        assert row[column] == expected_change(hits(both[1], k), hits(both[0], k), ARTICLES)


def attention_report(table: list[list[float | None]], values: list[dict]) -> dict:
    return {"attention_kl_table": table, "attention_passages": 15, "values": values}


def test_a_small_difference_of_a_measure_keeps_a_digit():
    def one(name: str, lv: float) -> VariantResult:
        values = [
            {"question_id": f"q{at}", "article": article, "lv": lv + at * 1e-6} for at, article in enumerate(ARTICLES)
        ]
        return result(name, analyze=[{"values": values}])

    assert view_tables._view_change(one("b", 0.3002), one("a", 0.3), "lv").startswith("+0.0002 (")


def test_the_upper_triangle_of_attention_has_the_papers_figures_above_ours():
    ours = [[0.0, 0.5, 0.25], [9.0, 0.0, None], [9.0, 9.0, 0.0]]
    more = [[0.0, 0.7, 0.25], [9.0, 0.0, 2.0], [9.0, 9.0, 0.0]]
    variants = [
        result("CAMVR", paper={"attention_kl/1,2": 0.5, "attention_kl/2,3": 0.21}, analyze=[
            attention_report(ours, question_values(1)), attention_report(more, question_values(1))]),
        result("MVR", paper={"attention_kl": 0.0}, analyze=[
            attention_report([[0.0, 1e-12], [1e-12, 0.0]], question_values(2))]),
        result("pieces", analyze=[{"attention_kl_table": []}]),
        result("no analysis"),
    ]  # fmt: skip
    table = attention_table(variants)
    passages = range(15)
    kl, other = ([[own[2 * at]["attention_kl"] for at in passages]] for own in map(question_values, (2, 1)))
    change = expected_change(kl, other, [ARTICLES[2 * at] for at in passages], scale=1.0, decimals=3)
    n, test = "n (passages)", "mean against CAMVR, p"
    assert table.columns == ["variant", "view i", "figures", "j = 1", "j = 2", n, test]
    assert table.rows == [
        ["CAMVR", 0, "paper", "0.50", "", "", ""],
        ["CAMVR", 0, "ours", "0.6", "0.25", 15, ""],
        ["CAMVR", 1, "paper", "", "0.21", "", ""],
        ["CAMVR", 1, "ours", "", "2", "", ""],
        ["MVR", 0, "paper", "0.00", "", "", ""],
        ["MVR", 0, "ours", "1.0e-12", "", 15, change],
    ]
    assert attention_table(variants[2:]) is None


def test_two_questions_of_one_passage_stand_under_each_view_with_the_papers_rows_first():
    example = {"passage_id": "p1", "title": "Norway", "question": "Who?", "answer_view": 1, "scores": [0.25, None, 0.5]}
    paper = {f"figure 4/2,{view}": 130.0 + (view == 5) for view in range(1, 9)}
    paper_row, row = records(examples_table([result("CAMVR", paper=paper, analyze=[{"examples": [example]}] * 2)]))
    assert (row["variant"], row["passage"], row["question"]) == ("CAMVR", "Norway (p1)", "Who?")
    assert (row["answer's view"], row["best"]) == (1, 2)
    assert [row[f"view {view}"] for view in (0, 1, 2, 3)] == ["0.2500", "", "0.5000", ""]
    assert (paper_row["passage"], paper_row["question"]) == (FIGURE_4_PASSAGE, "query 2")
    assert (paper_row["best"], paper_row["answer's view"], paper_row["view 4"]) == (4, 4, "131.00")
    assert examples_table([result("none", analyze=[{"examples": []}])]) is None
