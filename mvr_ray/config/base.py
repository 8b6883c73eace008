"""Defines what every section of a YAML file shares: a frozen pydantic model that refuses unknown keys."""

import difflib
import json
from collections.abc import Sequence
from datetime import date
from functools import cache
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

ALLOWED = "allowed"
"""Key of a JSON schema for a description of the allowed values."""

REPLACED_KEYS = {"retrieve.dense_weight": "search.hybrid", "evaluate.hybrid_depth": "search.hybrid"}
"""Key of a run file of an earlier program -> the key that replaces it."""

Name = Annotated[
    str,
    Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        max_length=100,
        json_schema_extra={
            ALLOWED: "a name (at most 100 letters, digits, '.', '_' and '-', the first a letter or a digit)"
        },
    ),
]
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true, which YAML also reads from `yes` and `on`, where pydantic would take it as 1."""
        kind = cls.model_fields[info.field_name or ""].annotation
        values = value if isinstance(value, list) else [value]
        if any(isinstance(one, bool) for one in values) and bool not in (kind, *get_args(kind)):
            raise PydanticCustomError("boolean", "true and false are no values of this key")
        return value


def describe_problems(error: ValidationError) -> str:
    """Name in one line each field of a file that is missing or invalid, and why."""
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())


def explain(error: ValidationError, where: str, model: type[BaseModel], overrides: Sequence[str] = ()) -> str:
    """Describe the errors of a file: each key with its value and what is allowed, or the nearest known key. An error in
    a key of `overrides` is that of the override, not of the file."""
    whole = _json_schema(model)
    lines: dict[str, str] = {}
    joint_places: set[str] = set()  # sections of which several keys are wrong together, which the line names
    for problem in error.errors():
        schema, loc = _schema_at(whole, problem["loc"])
        place = ".".join(map(str, loc))
        if problem["type"] in ("extra_forbidden", "invalid_key"):
            key, names = str(problem["loc"][len(loc)]), sorted(schema.get("properties", ()))
            close = difflib.get_close_matches(key, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(names)}"
            if new_key := REPLACED_KEYS.get(place_of_key := f"{place}.{key}".lstrip(".")):
                hint = f"{new_key} has replaced it"
            lines.setdefault(place_of_key, f"unknown key; {hint}")
        elif problem["type"] == "missing":
            lines.setdefault(place, f"missing; it must be {allowed_in_words(schema, whole)}")
        elif problem["type"] == "value_error":
            lines.setdefault(place, str(problem["ctx"]["error"]))
            joint_places.add(place)
        elif problem["type"] == "finite_number":
            lines.setdefault(place, f"{problem['input']} is not finite; it must be {allowed_in_words(schema, whole)}")
        else:
            value = problem["input"]
            text = repr(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
            is_no_text = isinstance(value, bool | int | float | date | dict)
            advice = "; put a text in quotes" * (is_no_text and _takes_text(schema, whole))
            lines.setdefault(place, f"{text:.80} is not {allowed_in_words(schema, whole)}{advice}")
    by_source: dict[str, list[str]] = {}
    for place, line in lines.items():
        source = _source(place, where, overrides, line if place in joint_places else None)
        by_source.setdefault(source, []).append(f"{place}: {line}")
    return "; ".join(f"{source}: {'; '.join(own)}" for source, own in by_source.items())


def _source(place: str, where: str, overrides: Sequence[str], line: str | None) -> str:
    """Return the override that set a place, what it is in, or something in it, of which `line` may name the keys that
    count; else the file."""
    for override in reversed(overrides):
        key = override.partition("=")[0]
        is_within = f"{key}.".startswith(f"{place}.") and (line is None or key.rpartition(".")[2] in line)
        if is_within or f"{place}.".startswith(f"{key}."):
            return f"override {override!r:.100}"
    return where


@cache
def _json_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return a model's JSON schema, which takes pydantic milliseconds to build. Callers do not change it."""
    return model.model_json_schema()


def _schema_at(whole: dict[str, Any], loc: tuple[int | str, ...]) -> tuple[dict[str, Any], tuple[int | str, ...]]:
    """Return the JSON schema of a place, and the place up to there, without pydantic's names of union branches."""
    schema = whole
    for depth, part in enumerate(loc):
        if "items" in schema and isinstance(part, int):
            below = schema["items"]
        else:
            below = schema.get("properties", {}).get(part, schema.get("additionalProperties"))
        if not isinstance(below, dict):
            return schema, loc[:depth]
        schema = _resolve(below, whole)
    return schema, loc


def _resolve(schema: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    reference = schema.get("$ref")
    return whole["$defs"][reference.rpartition("/")[2]] if reference else schema


def _takes_text(schema: dict[str, Any], whole: dict[str, Any]) -> bool:
    """Return whether a JSON schema allows texts that it does not list."""
    schema = _resolve(schema, whole)
    if "anyOf" in schema:
        return any(_takes_text(branch, whole) for branch in schema["anyOf"])
    return schema.get("type") == "string" and not {"const", "enum"} & {*schema}


def allowed_in_words(schema: dict[str, Any], whole: dict[str, Any]) -> str:
    """Describe what a JSON schema allows."""
    schema = _resolve(schema, whole)
    if ALLOWED in schema:
        return schema[ALLOWED]
    if "anyOf" in schema:
        return " or ".join(allowed_in_words(branch, whole) for branch in schema["anyOf"])
    if "const" in schema:
        return str(schema["const"])
    if "enum" in schema:
        return f"one of {', '.join(map(str, schema['enum']))}"
    match schema.get("type"):
        case "integer" | "number" as kind:
            low, above, high = (schema.get(key) for key in ("minimum", "exclusiveMinimum", "maximum"))
            limits = f" above {above}" * (above is not None) + f", at most {high}" * (high is not None)
            if low is not None:
                limits = f" of at least {low}" if high is None else f" from {low} to {high}"
            return f"{'a whole number' if kind == 'integer' else 'a number'}{limits}"
        case "array":
            least = f" of at least {schema['minItems']}" if "minItems" in schema else ""
            return f"a list{least}, each entry {allowed_in_words(schema.get('items', {}), whole)}"
        case "object" if "properties" in schema:
            return f"a mapping; known keys: {', '.join(sorted(schema['properties']))}"
        case "object":
            return "a mapping"
        case kind:
            return {"string": "a text", "boolean": "true or false", "null": "null"}.get(str(kind), "a value")
