"""The software bill of materials of the wheel against the published JSON schema of CycloneDX."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

bill_of_materials = runpy.run_path(str(Path(__file__).parent.parent / "sbom.py"))["bill_of_materials"]


def schema_error(bill: dict[str, Any]) -> object:
    version = SchemaVersion.from_version(bill["specVersion"])
    return JsonStrictValidator(version).validate_str(json.dumps(bill))


def test_the_bill_of_materials_is_valid_cyclonedx() -> None:
    bill = bill_of_materials("1.2.3")
    assert bill["components"] and schema_error(bill) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda bill: bill.pop("bomFormat"),
        lambda bill: bill.update(time="now"),
        lambda bill: bill.update(version=0),
        lambda bill: bill["components"][0].update(type="package"),
        lambda bill: bill["components"][0].update(scope="dev"),
        lambda bill: bill["components"][0].pop("name"),
        lambda bill: bill["components"].append(bill["components"][0]),
        lambda bill: bill["metadata"]["component"].update(licenses=[{"license": {"id": "ours"}}]),
        lambda bill: bill["dependencies"][0].pop("ref"),
    ],
)
def test_a_broken_bill_is_not(damage: Callable[[dict[str, Any]], object]) -> None:
    damage(bill := bill_of_materials("1.2.3"))
    assert schema_error(bill) is not None
