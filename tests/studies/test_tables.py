"""Checks the tables and heat maps of reports cell by cell, and what the cost step times."""

import math
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mvr_ray.config import resolve_path
from mvr_ray.core.encoding.encoder import DualEncoder
from mvr_ray.core.judging.metrics import interval_over_seeds, paired_test
from mvr_ray.distributed.encoders import encoder_spec
from mvr_ray.errors import MissingInputError
from mvr_ray.store import prepare
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.formats.question_ranks import QuestionRanks
from mvr_ray.studies import plots
from mvr_ray.studies.cost import VIEWS, cost
from mvr_ray.studies.definition import load_study
from mvr_ray.studies.plots import Plot, draw_plots
from mvr_ray.studies.report import _markdown, _page
from mvr_ray.studies.results import CROSS_ENCODER, READER, VariantResult
from mvr_ray.studies.retrieval_tables import index_table, reading_table
from mvr_ray.studies.tables import Cell, make_table
from mvr_ray.studies.training_tables import curve_table, mining_table, training_table


def result(name: str, **reports) -> VariantResult:
    return VariantResult(name, {}, "", {}, {}, reports)


def records(table) -> list[dict]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    (folder / "run.yaml").write_text("{}\n")
    (folder / "one.yaml").write_text(
        "{study: one, title: one, paper: none, run: run.yaml, questions: dev, metrics: [gold/top-1], steps: [index],"
        " sizes: {quick: {about: tiny, set: []}}, variants: [{name: a}]}\n"
    )
    return load_study(folder / "one.yaml", "quick")


def test_a_table_has_the_columns_of_its_rows_in_order_and_drops_those_that_stay_empty():
    rows = [{"variant": "a", "paper": "", "top-1": "50.0"}, {"variant": "b", "paper": None, "n": 3}]
    table = make_table("Title", "note", rows)
    assert table.columns == ["variant", "paper", "top-1", "n"]
    assert table.rows == [["a", "", "50.0", ""], ["b", "", "", 3]]
    assert make_table("Title", "note", rows, drop_empty=True).columns == ["variant", "top-1", "n"]
    assert make_table("Title", "note", []) is None


def test_reading_is_reported_by_the_number_of_passages_with_both_measures_beside_the_first_variant():
    def row(passages: int, metric: str, value: float) -> dict:
        interval = {"low": value - 0.01, "high": value + 0.02}
        return {"passages": passages, "metric": metric, "value": value, "n": 8, **interval}

    def value(number: int, passages: int, f1: float) -> dict:
        return {"id": f"q{number}", "article": "abcd"[number % 4], "passages": passages, "exact_match": 0.0, "f1": f1}

    def read(shift: float) -> dict:
        rows = [row(5, "f1", 0.6), row(5, "exact_match", 0.5), row(1, "exact_match", 0.3), row(1, "f1", 0.4)]
        values = [value(number, k, number / 16 + shift) for number in range(8) for k in (1, 5)]
        return {"sets": [{"questions": "dev", "asked": 9, "rows": rows, "values": values}]}

    base = result("a", reading=[read(0.0)])._replace(paper={"exact_match": 0.415})
    first, _, second, _ = records(reading_table([base, result("b", reading=[read(0.25)])]))
    assert (first["passages"], first["n"], first["paper exact match"]) == (1, 8, "41.5")
    assert first["exact match"] == "30.0 (29.0 to 32.0)"
    assert first["F1"] == "40.0 (39.0 to 42.0)"
    assert first["F1 against a, p"] == ""
    assert second["n"] == 8, "without the question that has no answers"
    assert second["F1 against a, p"] == "+25.0 (no interval, as articles agree), 0.12", (
        "each of four better: 2 of 16 flips"
    )
    assert reading_table([result("a")]) is None


def test_training_is_reported_by_its_last_epoch_over_seeds_beside_the_loss_of_equal_views():
    def training(loss: float, collapse: bool) -> dict:
        epoch = {"step": 40, "loss": loss, "loss_local": 2.0, "view_pair_cosine": 0.5, "lv": 0.2}
        return {"epochs": [{**epoch, "loss": 9.0}, epoch | {"view_shares": [0.25] * 4, "collapsed": collapse}]}

    [row] = records(training_table([result("a", train=[training(1.0, True), training(2.0, False)])]))
    assert (row["steps"], row["loss"], row["local loss"], row["collapsed"]) == (40, "1.5", "2", "1 of 2")
    assert float(row["ln V"]) == pytest.approx(math.log(4), abs=1e-3)


def test_every_point_of_a_curve_is_tested_against_the_first_variant_at_the_same_step(study):
    chance, articles = np.random.default_rng(3), [f"article {at // 3}" for at in range(30)]
    metric = study.config.metrics[0]
    k = int(metric.rpartition("-")[2])

    def point(name: str, **curve) -> VariantResult:
        ranks_Q = chance.integers(-1, 4, 30).tolist()
        ranks = QuestionRanks(name, "dev", [f"q{at}" for at in range(30)], articles, ranks_Q, ranks_Q, 1)
        return VariantResult(name, {}, "", {metric: Cell(0.5, 0.4, 0.6, 1, 30)}, {1: ranks}, {}, **curve)

    first, second = (point(name, curve={5: point(name), 9: point(name)}) for name in "ab")
    late = point("c", curve={7: point("c")})
    table = curve_table(study, [point("untrained"), first, second, late])
    column = f"{metric} against a, p"
    rows = {(row["variant"], row["steps"]): row for row in records(table)}
    assert list(rows) == [*((name, at) for name in "ab" for at in (5, 9, "all")), ("c", 7), ("c", "all")]
    assert {row["n"] for row in rows.values()} == {30}
    for at in (5, 9, "all"):
        own, other = (one if at == "all" else one.curve[at] for one in (second, first))
        found_SQ = [[[float(0 <= rank < k) for rank in one.ranks[1].gold_ranks]] for one in (own, other)]
        low, high = interval_over_seeds(100 * (np.array(found_SQ[0]) - np.array(found_SQ[1])), articles)
        gap, p = 100 * (np.mean(found_SQ[0]) - np.mean(found_SQ[1])), paired_test(*map(np.ravel, found_SQ), articles)
        assert rows["b", at][column] == f"{gap:+.1f} ({low:+.1f} to {high:+.1f}), {p:.2g}"
        assert rows["a", at][column] == ""
    assert rows["c", 7][column] == "" and rows["c", "all"][column], "the first variant was not measured at step 7"
    assert curve_table(study, [point("untrained")]) is None


def test_the_training_of_a_cross_encoder_and_of_a_reader_stands_below_that_of_encoders_without_dev_questions():
    """A share of dev questions that names neither their number nor a test is no result; report.json keeps it."""
    teacher = {"metrics": {"steps": 120, "loss": 0.5, "dev_top1_before": 0.1, "dev_top1": 0.625}}
    reader = {"metrics": {"steps": 150.0, "loss": 0.7, "dev_f1_before": 0.05, "dev_f1": 0.525}}
    rows = records(training_table([result("a", **{READER: [reader], CROSS_ENCODER: [teacher]}), result("b")]))
    assert rows == [
        {"variant": "a: cross-encoder training", "steps": 120, "loss": "0.5"},
        {"variant": "a: reader training", "steps": 150, "loss": "0.7"},
    ]
    assert training_table([result("b")]) is None


def test_what_mining_dropped_is_a_share_of_the_hits():
    mining = {"method": "index", "questions": 10, "hits": 200, "dropped_gold": 20, "dropped_answer_bearing": 50,
             "dropped_by_cross_encoder": 1, "negatives": 129, "without": 2}  # fmt: skip
    variants = [result("a", mine=[mining, {**mining, "method": "bm25"}])]
    first, second = records(mining_table(variants))
    assert [first[name] for name in ("pass", "gold", "answer-bearing", "by the cross-encoder")] == [
        1, "10.0", "25.0", "0.5"]  # fmt: skip
    assert (second["pass"], second["search"], second["kept"], second["questions without"]) == (2, "bm25", 129, 2)


def test_an_index_is_reported_by_what_its_shards_hold():
    shards = [{"num_passages": 30, "num_vectors": 200}, {"num_passages": 10, "num_vectors": 100}]
    index = {"shards": shards, "dimension": 384, "dtype": "fp16"}
    variants = [result("a", index=[{**index, "shards": shards[:1]}, index]), result("b")]
    [row] = records(index_table(variants))
    assert (row["passages"], row["vectors"], row["vectors a passage"]) == (40, 300, "7.5")
    assert index_table(variants[1:]) is None


@pytest.fixture
def heat_maps(monkeypatch) -> list:
    """What each heat map says in each of its cells, [row][column], `None` where nothing was measured."""
    maps = []
    keep = plots._plot

    def look(figure, name, title):
        for axes in figure.axes:
            if axes.images:
                texts = {tuple(map(int, text.get_position()[::-1])): text.get_text() for text in axes.texts}
                shape = axes.images[0].get_array().shape
                rows = [[texts.get((row, column)) for column in range(shape[1])] for row in range(shape[0])]
                maps.append((name, axes.get_title(), [t.get_text() for t in axes.get_yticklabels()], rows))
        return keep(figure, name, title)

    monkeypatch.setattr(plots, "_plot", look)
    return maps


def test_the_heat_map_of_attention_has_view_i_in_row_i(study, heat_maps):
    table = [[1e-12, 0.5, None], [0.25, 0.0, 2.0], [3.0, 4.0, 0.0]]
    [plot] = draw_plots(study, [result("a b", analyze=[{"attention_kl_table": table}])])
    assert plot.name == "attention-kl-a-b" and plot.png.startswith(b"\x89PNG")
    assert [rows for _, _, _, rows in heat_maps] == [[["0", "0.5", None], ["0.25", "0", "2"], ["3", "4", "0"]]]
    assert draw_plots(study, [result("one view", analyze=[{"attention_kl_table": None}])]) == []


def test_every_plot_has_a_file_name_of_its_own(study):
    names, table = ["gamma 0.1", "gamma -0.1", "α", "γ", "gamma 0.1 2"], [[0.0, 1.0], [1.0, 0.0]]
    all_plots = draw_plots(study, [result(name, analyze=[{"attention_kl_table": table}]) for name in names])
    assert [plot.title.partition(":")[0] for plot in all_plots] == names
    endings = ["-gamma-0-1", "-gamma-0-1-2", "-", "--2", "-gamma-0-1-2-2"]
    assert [plot.name for plot in all_plots] == [f"attention-kl{ending}" for ending in endings]


@pytest.mark.parametrize(("keeps_length", "file_name"), [(True, "length-kept"), (False, "raw")])
def test_the_heat_maps_of_the_linear_form_have_beta_down_and_gamma_across(study, heat_maps, keeps_length, file_name):
    def one(beta: float, gamma: float) -> dict:
        answer = {k: (beta - gamma) / 10 + int(k) / 1000 for k in ("1", "5", "20", "100")}
        sets = [{"questions": "known", "answer": answer}, {"questions": "unseen", "answer": {**answer, "1": 0.5}}]
        setting = {"method": "linear", "beta": beta, "gamma": gamma, "keep_length": keeps_length}
        return {"setting": setting, "rounds": [{"sets": sets}] * 2}

    trials = [one(beta, gamma) for gamma in (-0.2, 0.0) for beta in (0.3, 0.1, 0.2)]
    plots_made = draw_plots(study, [result("a", refinement_grid=[{"tried": trials}])])
    assert [plot.name for plot in plots_made[:2]] == [f"linear-{file_name}-a-known", f"linear-{file_name}-a-unseen"]
    known_maps = [one for one in heat_maps if one[0] == f"linear-{file_name}-a-known"]
    assert [title for _, title, _, _ in known_maps] == [f"top-{k}, percent" for k in (1, 5, 20, 100)]
    for k, (_, _, rows, cells) in zip((1, 5, 20, 100), known_maps):
        assert rows == ["0.1", "0.2", "0.3"]
        expected = [[f"{10 * (beta - gamma) + k / 10:.1f}" for gamma in (0.0, -0.2)] for beta in (0.1, 0.2, 0.3)]
        assert cells == expected


def test_settings_that_differ_in_more_than_beta_and_gamma_have_heat_maps_of_their_own(study, heat_maps):
    trials = [
        {
            "setting": {"method": "linear", "positives": own, "beta": beta, "gamma": gamma, "keep_length": True},
            "rounds": [{"sets": [{"questions": "known", "answer": {"1": share}}]}] * 2,
        }
        for own, share in (("all", 0.25), ("first", 0.75))
        for beta in (0.1, 0.2)
        for gamma in (-0.2, 0.0)
    ]
    all_plots = draw_plots(study, [result("a", refinement_grid=[{"tried": trials}])])
    assert [plot.title.split(", ")[2] for plot in all_plots] == ["positives all", "positives first"]
    assert [cells for _, _, _, cells in heat_maps] == [[["25.0"] * 2] * 2, [["75.0"] * 2] * 2]


def test_the_mark_of_the_lowest_loss_is_at_the_lowest_point_of_its_curve(study, monkeypatch):
    figures = []
    keep = plots._plot
    monkeypatch.setattr(plots, "_plot", lambda figure, *names: figures.append(figure) or keep(figure, *names))
    accuracy = {"questions": "known", "answer": {"1": 0.5}, "gold": {"1": 0.5}, "hubs": {"most": 1}}
    losses = [None, 3.0, 2.0, 1.0, 2.0]  # of a round, measured before its step
    rounds = [{"loss": loss, "norm_mean": 1.0, "sets": [accuracy]} for loss in losses]
    setting = {"method": "passage", "keep_length": True}
    trial = {"label": "a", "setting": setting, "chosen": 1, "lowest_loss": 2, "rounds": rounds}
    draw_plots(study, [result("a", refinement_grid=[{"tried": [trial]}])])
    curve, mark = figures[0].axes[1].lines
    lowest = int(np.argmin(curve.get_ydata()))
    assert (list(curve.get_ydata()), curve.get_xdata()[lowest]) == (losses[1:], mark.get_xdata()[0])


def test_heat_maps_are_of_the_depths_that_a_study_measures(study, heat_maps):
    trials = [
        {
            "setting": {"method": "linear", "beta": beta, "gamma": gamma, "keep_length": True},
            "rounds": [{"sets": [{"questions": "known", "answer": {"1": 0.25, "10": 0.5}}]}] * 2,
        }
        for beta in (0.1, 0.2)
        for gamma in (-0.2, 0.0)
    ]
    draw_plots(study, [result("a", refinement_grid=[{"tried": trials}])])
    assert [(title, cells[0][0]) for _, title, _, cells in heat_maps] == [
        ("top-1, percent", "25.0"),
        ("top-10, percent", "50.0"),
    ]


def test_the_trade_off_of_more_settings_than_styles_is_drawn(study, monkeypatch):
    def one(method: str, share: float) -> dict:
        sets = [{"questions": "known", "answer": {"1": share}}, {"questions": "unseen", "answer": {"1": 0.5}}]
        return {"setting": {"method": method, "keep_length": True}, "rounds": [{"sets": sets}] * 2}

    styles_of_plots, keep = [], plots._plot

    def look(figure, name, title):
        points = figure.axes[0].collections
        styles_of_plots.append({(str(each.get_facecolor()), each.get_paths()[0].vertices.tobytes()) for each in points})
        return keep(figure, name, title)

    monkeypatch.setattr(plots, "_plot", look)
    trials = [one(f"method-{number}", number / 100) for number in range(70)]
    draw_plots(study, [result("a", refinement_grid=[{"tried": trials}])])
    assert max(map(len, styles_of_plots)) == 60


@pytest.mark.data
def test_the_cost_step_times_every_system_over_the_same_passages_and_questions(corpus_store, run_over, tmp_path):
    plain = run_over(tmp_path / "store").model_dump(mode="json")
    plain["prepare"]["sources"][0]["path"] = str(corpus_store / "squad.json")
    run = type(run_over(tmp_path / "store")).model_validate(plain)
    with pytest.raises(MissingInputError):
        cost(run)
    prepare.prepare(run.prepare, Store(run.store.path))
    threads = torch.get_num_threads()
    progress_calls = []
    report = cost(run, lambda *call: progress_calls.append(call), {"passages": 12, "questions": 5, "repeats": 2})
    assert torch.get_num_threads() == threads
    assert (report.passages, report.questions, report.repeats) == (12, 5, 2)
    assert [one[1] for one in progress_calls] == [0, 1, 2]
    lines = {line.system: line for line in report.lines}
    vectors = {name: line.vectors_a_passage for name, line in lines.items()}
    several = ("ME-BERT (k=8)", "MVR (k=8)", "snippet means (k=8)", "DRPQ (k=8)")
    assert vectors == {"DPR": 1, **dict.fromkeys(several, VIEWS), "late interaction": vectors["late interaction"]}
    base = lines["DPR"]
    for line in report.lines:
        assert line.encode_ms > 0 and line.search_ms > 0
        assert line.encode_ratio == pytest.approx(line.encode_ms / base.encode_ms)
        assert line.search_ratio == pytest.approx(line.search_ms / base.search_ms)
    spec = replace(encoder_spec(run), strategy="cls", num_views=1)
    encoder = DualEncoder.from_backbone(str(resolve_path(run.encoder.backbone)), spec)
    passages = list(islice(Corpus.open(Store(run.store.path), run.prepare.corpus), 12))
    tokens = [passage.num_tokens for passage in encoder.tokenize_passages(passages)]
    assert vectors["late interaction"] == pytest.approx(np.mean(tokens)), "as many vectors as tokens"


def test_the_page_of_a_report_loads_no_picture_that_the_data_names():
    policy = '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
    markdown = "![bars](bars.png)\n\n| question |\n|---|\n| ![x](http://evil.example/p.png) |\n"
    page = _page("title", markdown, [Plot("bars", "Bars", b"png")])
    head, _, body = page.partition("</head>")
    assert policy in head and head.index(policy) < head.index("<style>")
    assert 'src="data:image/png;base64,cG5n"' in body and 'src="bars.png"' not in body


def test_a_cell_of_several_lines_stays_in_its_row_of_the_report():
    table = make_table("Examples", "note", [{"question": "Who founded\nthe town | city?\n", "n": 1}])
    config = SimpleNamespace(title="title", paper="paper", about="", notes=[])
    study = SimpleNamespace(config=config, words=["study", "study.yaml"], size="quick")
    page = _page("title", _markdown(study, {}, [table], [], []), [])
    assert page.count("<tr>") == 2 and "<td>Who founded the town | city?</td>" in page
