"""The one table of all parts."""

import json

import pytest
import suite


@pytest.fixture
def table(tmp_path, monkeypatch):
    """table(parts) is the page made of these parts."""
    monkeypatch.setattr(suite, "RESULTS", tmp_path)
    monkeypatch.setattr(suite, "FOLDER", tmp_path)

    def made(*parts: str) -> str:
        for part in parts:
            bar = {"what": f"{part} is fast", "measured": 1.0, "bar": 2.0, "at_least": True, "unit": "x", "met": False}
            report = {
                "name": part,
                "title": part.title(),
                "unit": "queries",
                "work": {},
                "samples": {},
                "floors": {},
                "bars": [{**bar, "note": f"why {part} is slow"}],
                "facts": {},
                "hardware": {"date": "2026-01-01", "commit": "abc", "cores": "2", "processor": "some"},
            }
            (tmp_path / f"{part}.json").write_text(json.dumps(report))
        return suite.collect().read_text()

    return made


def test_a_gpu_that_was_not_there_is_told_in_the_table(table):
    assert "| gpu | every bar of `python benchmarks/gpu.py` | | not measured: no GPU | |" in table("search")
    both = table("search", "gpu")
    assert "no GPU" not in both and "| gpu | gpu is fast | >= 2 x | 1 x | **missed** |" in both


def test_a_part_that_was_never_measured_is_told_until_it_is(table):
    unseen = "| router | every bar of `python benchmarks/router.py` | | not measured yet | |"
    assert unseen in table("search")
    assert unseen not in table("router")


def test_a_missed_bar_stands_in_the_table_with_its_reason_below(table):
    page = table("router")
    assert "| router | router is fast | >= 2 x | 1 x | **missed** |" in page
    assert "- router is fast: why router is slow" in page
