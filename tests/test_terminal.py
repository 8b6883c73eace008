"""Checks what a user reads: progress lines, sizes, tables of reports, hits with the snippet marked."""

import io
import json
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from mvr_ray.cli.tables import (
    exactness,
    explanation_table,
    hit_text,
    print_json,
    print_result,
    report_tables,
    results_only,
    size,
    write,
)
from mvr_ray.explanation import ExplainedPassage, ExplainedView, Winner
from mvr_ray.progress import Reporter, duration, progress_line
from mvr_ray.serving.schemas import PassageHit, Snippet
from mvr_ray.types import Exactness


@pytest.mark.parametrize(
    ("count", "total", "rate", "line"),
    [
        (1024, 4096, 32.0, "encode: 1,024 of 4,096 (25 %), 32/s, 1 min 36 s left"),
        (4096, 4096, 512.0, "encode: 4,096 of 4,096 (100 %), 512/s"),
        (0, 4096, 0.0, "encode: 0 of 4,096 (0 %)"),
        (7, 0, 0.5, "encode: 7, 0.5/s"),
    ],
)
def test_a_progress_line_tells_share_rate_and_time_left(count: int, total: int, rate: float, line: str) -> None:
    assert progress_line("encode", count, total, rate).removesuffix(", 0 s left") == line


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (7260, "2 h 1 min")])
def test_durations_are_said_in_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (1.5e6, "1.5 MB"), (64.6e9, "64.6 GB"), (2.58e14, "258 TB")),
        *((999_499, "999 kB"), (999_600, "1 MB"), (999_999_999, "1 GB"), (1e15, ">999 TB")),
    ],
)
def test_sizes_are_said_in_thousands(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text


def test_away_from_a_terminal_progress_is_first_and_last_line_and_one_an_interval() -> None:
    stream = io.StringIO()
    with Reporter(stream, interval_s=3600) as progress:
        for count in range(101):
            progress(f"train (loss {1 / (count + 1):.2f})", count, 100)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("train (loss 1.00): 0 of 100")
    assert lines[1].startswith("train (loss 0.01): 100 of 100 (100 %)")


def test_a_long_description_is_cut_on_a_terminal_and_its_counts_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    with Reporter(stream) as progress:
        progress("passages read = embedded = indexed = in the manifest of the new version", 0, 21_015_324)
        progress("passages read = embedded = indexed = in the manifest of the new version", 2_941_234, 21_015_324)
    assert "2941234/21015324" in stream.getvalue() and "passages read = embedded = in… " in stream.getvalue()


def test_the_same_work_once_more_has_a_clock_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 10.0, 1000.0, 1010.0])
    monkeypatch.setattr("mvr_ray.progress.time", SimpleNamespace(monotonic=lambda: next(clock)))
    stream = io.StringIO()
    with Reporter(stream, interval_s=0) as progress:
        for count in (1, 3, 1, 3):
            progress("train", count, 3)
    assert stream.getvalue().splitlines()[1::2] == ["train: 3 of 3 (100 %), 0.2/s"] * 2


def test_the_snippet_that_matched_is_marked_and_nothing_else_changes() -> None:
    text = "The Nile is long. The Rhine is shorter. So it goes."
    hit = PassageHit(
        id="p1",
        score=0.5,
        view=1,
        feedback=False,
        title="Rivers",
        text=text,
        snippet=Snippet(start=18, stop=39, text=text[18:39]),
    )
    head, body = hit_text(1, hit).plain.split("\n")
    assert head == " 1. Rivers  [p1] score 0.5000, view 1"
    assert body == "The Nile is long. »The Rhine is shorter.« So it goes."
    for score in (-0.0, -1e-5):
        assert "score 0.0000, " in hit_text(1, hit.model_copy(update={"score": score})).plain
    feedback_hit = hit.model_copy(update={"view": 9, "feedback": True, "snippet": None})
    assert hit_text(1, feedback_hit).plain.split("\n")[0].endswith("score 0.5000, feedback view 9")
    assert hit_text(1, hit.model_copy(update={"snippet": None})).plain.endswith("\n" + text)
    by_title = hit.model_copy(update={"view": 0, "snippet": Snippet(start=0, stop=0, text="Rivers")})
    assert hit_text(1, by_title).plain.endswith(f"\n»Rivers« {text}")
    fields = {"year": 1958, "price": 19.995, "sold": True, "tags": ["a", "b"], "day": None}
    with_fields = hit_text(1, hit.model_copy(update={"fields": fields})).plain.split("\n")[1]
    assert with_fields == "    year 1958, price 19.995, sold yes, tags a, b, day -"


def test_square_brackets_in_a_table_are_shown_as_they_are() -> None:
    [output] = report_tables("index [/x]", {"to do": "pip install 'mvr-ray[cpu]'", "path [b]": "data[/x].json"})
    stream = io.StringIO()
    Console(file=stream, width=120).print(output)
    for text in ("index [/x]", "pip install 'mvr-ray[cpu]'", "path [b]", "data[/x].json"):
        assert text in stream.getvalue()


@pytest.mark.parametrize("is_terminal", [True, False])
def test_square_brackets_and_colons_of_a_task_and_a_text_are_shown_as_they_are(is_terminal, monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    stream, name = io.StringIO(), "read [old]:car:[/i]"
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    with Reporter(stream) as progress:
        progress(name, 1, 1)
        progress.say(f"said: {name}")
    assert stream.getvalue().count(name) >= 2
    winner = Winner(view=0, score=0.5, lexical=0.25, total=0.75)
    view = ExplainedView(view=0, kind="snippet", text=name, scores=[0.5])
    passage = ExplainedPassage(id=name, title="", text=name, views=[view], winners=[winner])
    print_result(name, explanation_table(passage, [name]))
    out = capsys.readouterr().out
    assert out.startswith(f"{name}\n") and out.count(name) == 5 and "words (BM25)" in out


def test_control_characters_of_a_text_are_shown_and_never_reach_the_terminal(monkeypatch, capsys) -> None:
    """A passage of a foreign corpus could set the window's title, the clipboard, or hide what stands beside it."""
    text = "\x1b]0;title\x07\x1b[2Ja\tb\nc\r\x00\x7f\x9b1m é"
    escapes = r"\x1b]0;title\x07\x1b[2Ja\tb\nc\x00\x7f\x9b1m é".replace(r"\t", "\t").replace(r"\n", "\n")
    snippet = Snippet(start=0, stop=len(text), text=text)
    hit = PassageHit(id=text, score=0.5, view=1, feedback=False, title=text, text=text * 2, fields={"f": text})
    assert hit_text(1, hit).plain.count(escapes) == 5
    assert f"»{escapes}«{escapes}" in hit_text(1, hit.model_copy(update={"snippet": snippet})).plain
    views = [ExplainedView(view=0, kind="snippet", text=text, scores=[0.5])]
    passage = ExplainedPassage(id=text, title=text, text=text, views=views, winners=[Winner(view=0, score=0.5)])
    print_result(text, hit_text(1, hit), explanation_table(passage, [text]), *report_tables(text, {text: text}))
    out = capsys.readouterr().out
    assert {char for char in out if ord(char) < 32 or 127 <= ord(char) < 160} <= {"\n", "\t"}
    assert out.count(r"\x9b") == 1 + 5 + 4 + 3


def test_half_a_surrogate_pair_is_shown_as_its_escape(monkeypatch) -> None:
    data = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(data, encoding="utf-8"))
    print_result("a\udcff", *report_tables("b\ud800", {"c": "d\udfff"}))
    print_json({"e": "f\udcff é"})
    out = data.getvalue().decode()
    assert [escape in out for escape in (r"a\udcff", r"b\ud800", r"d\udfff")] == [True] * 3
    assert json.loads(out[out.index("{") :]) == {"e": "f\udcff é"}


def test_a_report_is_one_table_of_single_values_and_one_a_list_of_records() -> None:
    report = {
        "digest": "ab",
        "empty": [],
        "rounds": [{"number": 1, "shares": [0.5, 0.25]}],
        "published": {"version": 3, "index": "squad", "shards": [{"shard": 0}]},
    }
    stream = io.StringIO()
    tables = report_tables("refine", report)
    for table in tables:
        Console(file=stream, width=120).print(table)
    output = stream.getvalue()
    assert len(tables) == 2
    assert "version 3 of index squad" in output
    assert "0.5, 0.25" in output
    assert "empty" not in output


def test_while_results_are_wanted_alone_what_others_print_goes_to_stderr(capsys):
    with results_only():
        sys.stdout.write("(raylet) a worker died\n")
        print_json({"own": 1})
        print_result("shown")
        with results_only():
            write("within\n")
        write("after\n")
    sys.stdout.write("outside\n")
    out, err = capsys.readouterr()
    assert out == '{\n  "own": 1\n}\nshown\nwithin\nafter\noutside\n'
    assert err == "(raylet) a worker died\n"


def test_what_an_answer_is_worth_is_said_in_a_few_words():
    def certificate_text(is_certified: bool, method: str, recall: float | None = None) -> str:
        return exactness(Exactness(certified=is_certified, method=method, rounds=1, rescored=9, recall=recall))

    assert certificate_text(True, "flat") == "exact"
    assert certificate_text(True, "flat over stored views") == "exact (flat over stored views)"
    assert certificate_text(False, "hnsw") == "approximate (hnsw)"
    assert certificate_text(False, "faiss IVF8,SQ8", 0.97349) == "approximate (faiss IVF8,SQ8, recall 0.973 when built)"
