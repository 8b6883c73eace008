"""Builds the sdist and the wheel, and uses what `pip install` gives in an empty folder."""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mvr_ray import __version__

ROOT = Path(__file__).resolve().parent.parent
FIVE_LINES = """
from mvr_ray import Index

passages = ["The tower leans because its ground is soft.", "Bread is baked before dawn."]
index = Index.build(passages, model="all-MiniLM-L6-v2", path="towers")
print(index.search("Why does it lean?", k=1)[0].text)
"""
PLACE = """
import mvr_ray
from mvr_ray.config import load_run
from mvr_ray.core.searching import native
import pathlib, sys

pathlib.Path("own.yaml").write_text("base: presets/camvr.yaml\\nstore: {path: other}\\n")
assert load_run("own.yaml").encoder.strategy == load_run("presets/camvr.yaml").encoder.strategy == "snippets"
assert native.importlib.util.find_spec(native.LIBRARY), "the scan is compiled"
assert "ray" not in sys.modules
print(mvr_ray.__file__)
"""


def call(*command: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
    process = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=own | environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    return process


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    return call(*command, cwd=cwd, **environment).stdout


def copy_of_tracked_files(folder: Path) -> Path:
    """The files that git has, as they are now: builds leave their own beside the sources."""
    names = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    for name in names:
        if name and (ROOT / name).is_file() and not name.startswith(("tests/", "benchmarks/results/")):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    return folder


def require_every_pin(bill: dict[str, Any]) -> None:
    """A bill of materials names what constraints.txt pins, and depends on all that pip would install with the wheel."""
    pins = [line.split("==") for line in (ROOT / "constraints.txt").read_text().split()]
    normal = {(canonicalize_name(name), version) for name, version in pins}
    assert {(one["name"], one["version"]) for one in bill["components"]} == normal and len(pins) == len(normal)
    assert all(one["purl"] == f"pkg:pypi/{one['name']}@{one['version']}" for one in bill["components"])
    assert (bill["bomFormat"], bill["metadata"]["component"]["version"]) == ("CycloneDX", __version__)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {canonicalize_name(Requirement(one).name) for one in project["dependencies"]}
    [own] = bill["dependencies"]
    assert {ref.removeprefix("pkg:pypi/").partition("@")[0] for ref in own["dependsOn"]} == names
    scopes = {one["name"]: one.get("scope") for one in bill["components"]}
    assert (scopes["faiss-cpu"], scopes["pytest"], scopes["tokenizers"]) == ("optional", "excluded", None)


def new_environment(folder: Path, wheel: Path) -> Path:
    """An environment with the wheel installed, which finds what the wheel depends on in this one. Gives its `bin`."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=folder)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(f"{Path(pytest.__file__).parent.parent}\n")
    return folder / "bin"


@pytest.mark.slow
def test_a_wheel_from_the_sdist_runs_the_five_lines_and_the_command_line_in_an_empty_folder(tmp_path: Path):
    source, dist, empty = copy_of_tracked_files(tmp_path / "source"), tmp_path / "built", tmp_path / "empty"
    dist.mkdir()
    empty.mkdir()
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, dist, cwd=source)
    [sdist] = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "mvr_ray/core/searching/scan.c", "mvr_ray/config/presets/camvr.yaml"} <= names
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", dist, sdist, cwd=dist)
    [wheel] = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        [place] = [name for name in names if name.endswith(".dist-info/sboms/mvr-ray.cdx.json")]
        require_every_pin(json.loads(archive.read(place)))
    files = ("py.typed", "config/presets/camvr.yaml", "core/encoding/punkt_en.json", "serving/page/index.html")
    assert {f"mvr_ray/{name}" for name in files} <= names
    assert any(name.startswith("mvr_ray/core/searching/_scan.") for name in names), "the scan is compiled"
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/", "examples/"))]

    programs = new_environment(tmp_path / "environment", wheel)
    assert str(tmp_path / "environment") in run(programs / "python", "-c", PLACE, cwd=empty)
    process = call(programs / "python", "-c", FIVE_LINES, cwd=empty)
    assert "ground is soft" in process.stdout and process.stderr == ""
    command = (programs / "mvr-ray", "search", "towers/run.yaml", "Why does it lean?", "-k", "1")
    assert "ground is soft" in run(*command, cwd=empty)
