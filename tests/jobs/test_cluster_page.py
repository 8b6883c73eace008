"""Checks what docs/cluster.md says that a node needs, and the steps of deploy/Dockerfile, as far as without Docker."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")

IMPORTS_OF_INDEX = """
import contextlib, importlib.metadata, json, sys
from mvr_ray.cli import commands, inputs
from mvr_ray.distributed.cluster import job_metrics
from mvr_ray.stages import STAGES

with contextlib.suppress(AttributeError):
    STAGES["index"](None, None)
assert "mvr_ray.distributed.indexing.build_index" in sys.modules
tops = {name.partition(".")[0] for name in sys.modules}
print(json.dumps([*{one for top, names in importlib.metadata.packages_distributions().items() if top in tops
                    for one in names}]))
"""


def with_dependencies(packages: list[Requirement]) -> set[str]:
    """The names of packages, and of all that pip installs with them."""
    todo, keys = [*packages], set[tuple[str, ...]]()
    while todo:
        package = todo.pop()
        key = (canonicalize_name(package.name), *sorted(package.extras))
        if key not in keys:
            keys.add(key)
            extras = {"", *package.extras}
            below = [Requirement(line) for line in requires(package.name) or ()]
            todo += [one for one in below if not one.marker or any(one.marker.evaluate({"extra": x}) for x in extras)]
    return {name for name, *_ in keys}


def test_the_runtime_environment_of_index_has_every_package_that_it_imports() -> None:
    [listing] = re.findall(r"--runtime-env-json '(\{\"pip\".*?\})'", PAGE, re.DOTALL)
    packages = [Requirement(line) for line in json.loads(listing)["pip"]]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    own = {canonicalize_name(one.name): one for one in map(Requirement, project["dependencies"])}
    there = with_dependencies([*packages, own["ray"], own["torch"]])
    process = subprocess.run([sys.executable, "-c", IMPORTS_OF_INDEX], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    needs = {canonicalize_name(name) for name in json.loads(process.stdout)} & set(own)
    assert len(needs) > 5 and not needs - there, needs - there
    extras = {Requirement(line).name for lines in project["optional-dependencies"].values() for line in lines}
    assert {canonicalize_name(one.name) for one in packages} <= {*own, *map(canonicalize_name, extras)}


def dockerfile() -> list[tuple[str, str]]:
    """Instructions of the Dockerfile with what follows them."""
    lines = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8").splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line and line[0] != "#")]


def test_the_steps_of_the_image_name_what_there_is() -> None:
    steps = dockerfile()
    arguments, variables = (
        dict(rest.split("=", 1) for word, rest in steps if word == kind and "=" in rest) for kind in ("ARG", "ENV")
    )
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert {arguments["EXTRA"], "gpu"} <= set(extras)
    compiler, install = (rest for word, rest in steps if word == "RUN")
    assert "apt-get install" in compiler and "g++" in compiler  # hnswlib has no wheel, and neither have the loops
    assert "-c constraints.txt" in install and (ROOT / "constraints.txt").is_file()
    assert '${TORCH} -e ".[${EXTRA}]"' in install and arguments["TORCH"].endswith('/whl/cpu"')
    assert int(variables.pop("RAY_ROTATION_MAX_BYTES")) > 0
    [place] = variables.values()
    assert [*variables] == ["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"]
    module, _, function = place.rpartition(".")
    assert callable(getattr(importlib.import_module(module), function))
    patterns = (ROOT / ".dockerignore").read_text(encoding="utf-8").split() if (ROOT / ".dockerignore").exists() else []
    assert not {"mvr_ray", "pyproject.toml", "constraints.txt", "README.md", "LICENSE", "jobs", "configs"} & set(
        patterns
    )


@pytest.mark.slow
def test_the_image_s_install_gives_the_command_and_its_compiled_loops(tmp_path: Path) -> None:
    checkout = tmp_path / "mvr_ray"
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listing.split("\0")):
        if (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, checkout / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    [site] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "others.pth").write_text(f"{next(path for path in sys.path if path.endswith('site-packages'))}\n")
    _, install = (rest for word, rest in dockerfile() if word == "RUN")
    # Every package is there already, as if it had been fetched; what is left of the step is this package.
    offline = install.replace("pip install", f"{python} -m pip install --no-deps --no-build-isolation --no-index")
    offline = offline.replace("${EXTRA}", "cpu").removesuffix(" boto3")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.run(
        ["bash", "-e", "-c", offline], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout + process.stderr
    program = """
import mvr_ray
from mvr_ray.core.searching import native
print(mvr_ray.__file__, native.load_library(native.LIBRARY, native.INTERFACE)._name)
"""
    process = subprocess.run([python, "-c", program], cwd=site, env=environment, capture_output=True, text=True)
    assert process.stdout.count(str(checkout)) == 2, process.stdout + process.stderr
    version = subprocess.run([python.with_name("mvr-ray"), "version"], env=environment, capture_output=True, text=True)
    assert version.stdout.startswith("mvr_ray "), version.stderr
