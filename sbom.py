"""Puts a software bill of materials into the wheel: the versions that mvr_ray was tested with (PEP 770, CycloneDX).

setuptools finds the command in pyproject.toml. The components are the pins of constraints.txt; the scope of one is that
in which pyproject.toml names it: `required` by the package, `optional` by an extra, `excluded` by the extra for
development alone. A pin that is not named there is of a package that one of the others needs, and has no scope. The
same sources give the same bytes: there is neither a time nor a serial number.
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

from setuptools.command.bdist_wheel import bdist_wheel

PLACE = "sboms/mvr-ray.cdx.json"
ROOT = Path(__file__).parent


class WheelCommand(bdist_wheel):
    """Builds the wheel with the bill beside its other metadata."""

    def write_wheelfile(self, wheelfile_base: str, *args: Any, **options: Any) -> None:
        super().write_wheelfile(wheelfile_base, *args, **options)
        file = Path(wheelfile_base) / PLACE
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(bill_of_materials(self.distribution.get_version()), indent=1) + "\n")


def bill_of_materials(version: str) -> dict[str, Any]:
    """What mvr_ray of this version was tested with, in CycloneDX 1.6."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    scopes = {_name(one): "excluded" for one in project["optional-dependencies"]["dev"]}
    for extra in (own for name, own in project["optional-dependencies"].items() if name != "dev"):
        scopes |= {_name(one): "optional" for one in extra}
    scopes |= {_name(one): "required" for one in project["dependencies"]}
    pins = (line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    components = [_component("library", _name(name), pin) for name, pin in pins]
    for component in components:
        if scope := scopes.get(component["name"]):
            component["scope"] = scope
    own = _component("application", project["name"], version) | {"licenses": [{"license": {"id": project["license"]}}]}
    required = [one["bom-ref"] for one in components if one.get("scope") == "required"]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": components,
        "dependencies": [{"ref": own["bom-ref"], "dependsOn": required}],
    }


def _component(kind: str, name: str, version: str) -> dict[str, Any]:
    purl = f"pkg:pypi/{name}@{version}"
    return {"type": kind, "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _name(requirement: str) -> str:
    """The normal form of the name that a requirement begins with."""
    [name] = re.findall(r"^[\w.-]+", requirement)
    return re.sub(r"[-_.]+", "-", name).lower()
