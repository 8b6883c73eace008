"""The one table of all parts."""

import json
import subprocess

import floors
import machine
import measure
import pytest
import suite

BAR = {"measured": 1.0, "bar": 2.0, "at_least": True, "unit": "x", "met": False}
HARDWARE = {"date": "2026-01-01", "commit": "abc", "cores": "2", "processor": "some"}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """table(parts) is the page made of these parts."""
    monkeypatch.setattr(suite, "RESULTS", tmp_path)
    monkeypatch.setattr(suite, "FOLDER", tmp_path)

    def make_rows(*parts: str) -> str:
        for part in parts:
            report = {
                "name": part,
                "title": part.title(),
                "unit": "queries",
                "work": {},
                "samples": {},
                "floors": {},
                "bars": [{**BAR, "what": f"{part} is fast", "note": f"why {part} is slow"}],
                "facts": {},
                "hardware": HARDWARE,
            }
            (tmp_path / f"{part}.json").write_text(json.dumps(report))
        return suite.collect().read_text()

    return make_rows


def test_the_page_names_a_gpu_that_was_not_there(table):
    assert "| gpu | not measured, no GPU: every bar of `python benchmarks/gpu.py` | |" in table("search")
    both = table("search", "gpu")
    assert "no GPU" not in both and "| [Gpu](#gpu) | 0 of 1 | gpu is fast: 1 x, asked >= 2 x |" in both


def test_the_page_names_a_part_until_it_is_measured(table):
    unseen = "| router | not measured yet: every bar of `python benchmarks/router.py` | |"
    assert unseen in table("search")
    assert unseen not in table("router")


def test_a_missed_bar_is_at_the_top_and_with_its_reason_below(table):
    page = table("router")
    assert "| [Router](#router) | 0 of 1 | router is fast: 1 x, asked >= 2 x |" in page
    assert "| router is fast | >= 2 x | 1 x | **missed** |" in page
    assert "- router is fast: why router is slow" in page


def test_names_of_many_by_many_are_a_grid_with_misses_in_bold():
    bars = [
        {**BAR, "what": f"{case}: {peer}", "measured": ratio, "met": ratio >= 2, "note": "" if ratio >= 2 else "why"}
        for case, ratio in [("k 1", 1.5), ("k 9", 2.5), ("k 99", 3.0)]
        for peer in ("A", "B", "C")
    ]
    report = {"title": "T", "samples": {}, "bars": bars, "facts": {"size": 3}, "hardware": HARDWARE}
    page = measure.markdown(report)
    assert "| | k 1 | k 9 | k 99 |\n|---|---|---|---|\n| A | **1.5** | 2.5 | 3 |\n| B |" in page
    assert ">= 2 x" in page and page.count("- k 1: why\n") == 1 and "- size: 3\n" in page
    bars[0]["bar"] = 3.0  # with several targets each bar has a row of its own
    assert "| k 1: A | >= 3 x | 1.5 x | **missed** |" in measure.markdown(report)


def test_the_page_and_the_file_have_the_seconds_of_parts_and_their_sum(table, tmp_path):
    assert "| all parts, one after the other | seconds of search" in table(*suite.PARTS)
    for number, part in enumerate(suite.PARTS):
        suite.keep_seconds(part, 60.0 * number)
    page = suite.collect().read_text()
    minutes = sum(range(len(suite.PARTS)))
    assert f"| all parts, one after the other | {minutes} minutes, asked <= 30 minutes | |" in page
    assert "2 cores of some, in 60 s" in page
    report = json.loads((tmp_path / "suite.json").read_text())
    assert (
        report["total"] == 60 * minutes
        and report["seconds"]["search"] == 0
        and len(report["seconds"]) == len(suite.PARTS)
    )


def test_the_page_names_the_kind_of_processor_by_the_run_or_by_the_notes(table, monkeypatch):
    flags = {"family, model": "25, 1", "instructions": "avx2", "one thread": {"GB/s": 19.5, "GFLOP/s in fp32": 90.0}}
    text = "2 cores of some (family and model 25, 1; avx2), one thread GB/s 19.5, GFLOP/s in fp32 90"
    assert measure.describe({**HARDWARE, **flags}) == text
    monkeypatch.setattr(suite, "KINDS_IN_NOTES", {"router abc": "old: notes.md"})
    page = table("router", "search")
    assert page.count("2 cores of some (old: notes.md)\n") == page.count("2 cores of some\n") == 1


def test_this_machine_has_the_instructions_that_loops_are_chosen_by(monkeypatch):
    monkeypatch.setattr(floors, "ROUNDS", 1 << 12)
    monkeypatch.setattr(floors, "TRIES", 1)
    now = machine.hardware()
    assert set(now["instructions"].split()) <= set(machine.INSTRUCTIONS)
    has_bfloat16 = not {"avx512_bf16", "amx_bf16"}.isdisjoint(now["instructions"].split())
    assert has_bfloat16 is floors.has_bfloat16()
    rates = floors.one_thread_rates(1 << 20, 32)
    assert min(rates.values()) > 0 and ("in bfloat16" in rates) is has_bfloat16


def test_seconds_stand_beside_the_samples_that_were_written_last(table, tmp_path):
    table("search", "search-avx2")
    (tmp_path / "search-avx2.json").touch()
    suite.keep_seconds("search", 7.0)
    assert json.loads((tmp_path / "search-avx2.json").read_text())["seconds"] == 7
    assert "seconds" not in json.loads((tmp_path / "search.json").read_text())
    assert "search-avx2 is fast" in suite.collect().read_text()


def test_a_commit_whose_files_were_changed_is_marked_and_is_never_on_file(table, tmp_path, monkeypatch):
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True)

    root = tmp_path / "root"
    (root / "benchmarks" / "results").mkdir(parents=True)
    (root / "code.py").write_text("1")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    clean = machine.commit(root)
    assert len(clean) >= 7 and not clean.endswith(machine.DIRTY)
    (root / "benchmarks" / "results" / "new.json").write_text("{}")
    assert machine.commit(root) == clean
    (root / "code.py").write_text("2")
    assert machine.commit(root) == clean + machine.DIRTY
    table("search")
    for commit, there in (("abc", True), ("abd", False)):
        monkeypatch.setattr(suite, "hardware", lambda commit=commit: {"commit": commit})
        assert suite.on_file("search") is there
    report = json.loads((tmp_path / "search.json").read_text())
    dirty = {"commit": "abc" + machine.DIRTY}
    (tmp_path / "search.json").write_text(json.dumps({**report, "hardware": dirty}))
    monkeypatch.setattr(suite, "hardware", lambda: dirty)
    assert not suite.on_file("search")
