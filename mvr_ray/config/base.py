"""Defines what every section of a YAML file shares: a frozen pydantic model that refuses unknown keys."""

import difflib
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def explain(error: ValidationError, where: str, model: type[BaseModel]) -> str:
    """Describe what is wrong with a file, key by key, with the nearest known key beside an unknown one."""
    lines = []
    for problem in error.errors():
        place = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            names = _known_keys(model, problem["loc"][:-1])
            close = difflib.get_close_matches(str(problem["loc"][-1]), names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(names)}"
            lines.append(f"{place}: unknown key; {hint}")
        else:
            lines.append(f"{place}: {problem['msg']} (given: {problem['input']!r})")
    return f"{where}: " + "; ".join(lines)


def _known_keys(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    at: Any = model
    for part in loc:
        if isinstance(part, str) and part in at.model_fields:
            at = _innermost(at.model_fields[part].annotation)
    return sorted(at.model_fields)


def _innermost(annotation: Any) -> Any:
    """The model in list[Model], dict[str, Model] or Annotated[Model, ...]."""
    while get_args(annotation):
        inner = get_args(annotation)
        annotation = inner[0] if get_origin(annotation) is Annotated else inner[-1]
    return annotation
