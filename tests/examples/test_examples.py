"""Every example runs to its end on twenty passages, in a folder of its own."""

import os
import runpy
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from node_ports import free_ports

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "examples"
PASSAGES = "20"
SCRIPTS = {
    "quickstart": "Tower of Pisa",
    "filters": "filter: None",
    "hybrid": "  hybrid rrf: ",
    "changing_corpus": "version 2: 1 encoded, 20 kept",
    "refine_from_feedback": "published: version 2 (",
    "train_an_encoder": "trained: encoder ",
    "serve_and_ask": "exact: True",
}
ARGUMENTS = {"quickstart": ["towers"], "train_an_encoder": [PASSAGES, "1"], "serve_and_ask": [PASSAGES, "PORT"]}
"""Of the others: the number of passages alone."""


def test_every_script_is_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SCRIPTS, "wikipedia"}


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=[pytest.mark.slow] * (name != "quickstart")) for name in SCRIPTS]
)
def test_an_example_runs_and_says_what_it_shows(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], without_ray: None
) -> None:
    """In this process, which has imported what takes most of the time of a script; `serve_and_ask` starts its own."""
    words = [str(free_ports(1)[0]) if word == "PORT" else word for word in ARGUMENTS.get(script, [PASSAGES])]
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]]))
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *words])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
    assert SCRIPTS[script] in capsys.readouterr().out


@pytest.mark.slow
def test_the_notebook_runs_and_draws_its_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = nbformat.read(EXAMPLES / "views.ipynb", as_version=4)
    [setting] = [cell for cell in notebook.cells if "NUM_PASSAGES = 500" in cell.source]
    setting.source = setting.source.replace("500", PASSAGES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(EXAMPLES), str(ROOT), os.environ["PYTHONPATH"]]))
    NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    pages = [output.get("data", {}).get("text/html", "") for output in outputs]
    assert any("<mark>" in page for page in pages) and any("<iframe" in page for page in pages)


def test_the_notebook_is_stored_without_outputs() -> None:
    notebook = nbformat.read(EXAMPLES / "views.ipynb", as_version=4)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code")
