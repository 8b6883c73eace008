"""The commands that stand beside the figures of retrieval quality are those that make them."""

import json

import quality
from machine import RESULTS


def test_commands_on_file_are_those_of_the_script_with_every_setting_that_it_pins():
    report = json.loads((RESULTS / "quality.json").read_text())
    systems = {system.key: system for system in quality.SYSTEMS}
    assert list(report["systems"]) == list(systems)
    text = (RESULTS / "quality.md").read_text()
    for name, steps in report["systems"].items():
        stages = quality.commands(systems[name].commands, [])
        expected = [quality.command_line(stage, overrides) for stage, overrides in stages]
        assert [step["command"] for step in steps] == expected
        assert all(f"`{command}`" in text for command in expected)
        if "feedback views" in name:
            clusters = 2 if "two" in name else 1
            assert f"refine.feedback_weight=0.8 refine.feedback_clusters={clusters}" in expected[1]


def test_every_row_is_compared_with_another_one_of_its_table():
    names = {quality.BM25, *(system.name for system in quality.SYSTEMS)}
    assert {system.than for system in quality.SYSTEMS} <= names
    assert len({system.key for system in quality.SYSTEMS}) == len(quality.SYSTEMS)


def test_a_cell_of_the_page_is_made_again_from_the_stored_ranks():
    than, name = "BM25", "snippet means, 8 views"
    cell = quality.change(RESULTS / "quality.parquet", "cranfield", name, than)
    assert f"| {cell} |" in (RESULTS / "quality.md").read_text() and cell.endswith(f"against {than}")
