"""Every example runs to its end on twenty passages, in a folder of its own."""

import os
import subprocess
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
ARGUMENTS = {"quickstart": ["towers"], "train_an_encoder": ["1"], "serve_and_ask": ["PORT"]}


def run(script: str, folder: Path) -> str:
    words = [str(free_ports(1)[0]) if word == "PORT" else word for word in ARGUMENTS.get(script, [])]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])
    result = subprocess.run(
        [sys.executable, EXAMPLES / f"{script}.py", *([] if script == "quickstart" else [PASSAGES]), *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_every_script_is_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SCRIPTS, "wikipedia"}


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=[pytest.mark.slow] * (name != "quickstart")) for name in SCRIPTS]
)
def test_an_example_runs_and_says_what_it_shows(script: str, tmp_path: Path) -> None:
    assert SCRIPTS[script] in run(script, tmp_path)


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
