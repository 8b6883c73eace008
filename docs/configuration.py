"""Writes docs/configuration.md: every key of the run file, from the sections and their docstrings.

python docs/configuration.py
"""

import inspect
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from mvr_ray.config import RunConfig
from mvr_ray.config.base import allowed_in_words

PAGE = Path(__file__).with_name("configuration.md")
HEAD = """# Configuration

A run file is YAML with the sections below; every key has a default, so a file holds only what differs.
`base: other.yaml` lays a file over another one, `section.key=value` on the command line lays a value over the file, and
`mvr-ray index CONFIG --print-config` shows the result. An unknown key is refused with the nearest known one.
`mvr-ray init DATA` writes a file for your data.

This page is generated from the package (`python docs/configuration.py`).
"""


def page() -> str:
    """Return the page as text."""
    parts = [HEAD]
    for name, field in RunConfig.model_fields.items():
        assert isinstance(field.annotation, type)
        parts.append(section(name, field.annotation))
    return "\n".join(parts)


def section(name: str, model: type[BaseModel], level: int = 2) -> str:
    """The keys of a section, and below them those of the sections that are its entries."""
    schema = model.model_json_schema()
    parts = [f"{'#' * level} {name}", ""]
    if "__doc__" in vars(model) and model.__doc__:
        parts += [inspect.cleandoc(model.__doc__), ""]
    entries = []
    for key, field in model.model_fields.items():
        values = allowed_in_words(schema["properties"][key], schema)
        text = " ".join((field.description or "").split())
        parts.append(f"- `{name}.{key}`: {values}{default(field)}.{f' {text}' if text else ''}")
        entries += [(f"{name}.{key}", entry) for entry in inner_sections(field.annotation)]
    parts.append("")
    for inner, entry in entries:
        parts.append(section(inner, entry, level + 1))
    return "\n".join(parts)


def default(field: Any) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "; mandatory"
    if value is None:
        return "; absent by default"
    if isinstance(value, BaseModel):
        return ""
    return (
        f"; default `{json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else value or repr(value)}`"
    )


def inner_sections(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a key holds or has a list of."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return [annotation]
    return [inner for part in getattr(annotation, "__args__", ()) for inner in inner_sections(part)]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
