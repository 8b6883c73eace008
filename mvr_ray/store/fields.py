"""Read the fields of passages: their values besides id, title and text.

| type        | value in Python             | in JSON                                        | in Arrow             |
|-------------|-----------------------------|------------------------------------------------|----------------------|
| `string`    | str                         | a string                                       | string               |
| `int`       | int, of 64 bits             | a whole number, also as 1958.0                 | int64                |
| `float`     | float, finite               | a number                                       | double               |
| `bool`      | bool                        | true, false                                    | bool                 |
| `date`      | datetime.date               | "1958-07-01"                                   | date32               |
| `timestamp` | datetime.datetime in UTC    | "1958-07-01T12:00:00Z", UTC where it says none | timestamp(us, UTC)   |
| `strings`   | tuple of str                | a list of strings                              | list of string       |

A passage that lacks a field, or has null there, has null in the column.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from mvr_ray.config import check_field_name
from mvr_ray.types import FieldValue

log = logging.getLogger(__name__)

Fields = tuple[tuple[str, FieldValue], ...]
"""As `Passage.fields`."""
ARROW_TYPES: Mapping[str, pa.DataType] = {
    "string": pa.string(),
    "int": pa.int64(),
    "float": pa.float64(),
    "bool": pa.bool_(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "strings": pa.list_(pa.string()),
}
_LARGEST_INT = 2**63 - 1
_LARGEST_EXACT_FLOAT = 2**53
"""Above it a float may be a whole number that was rounded. pandas holds a column of int with a gap as float."""
_BOOLS = {"true": True, "false": False}


class TextCell(str):
    """A cell of a text file: a string that a declared type may read as a number or as true and false."""

    __slots__ = ()


def parse_field(value: Any, kind: str) -> FieldValue:
    """Read a value of a type, from Python or JSON. Raises ValueError, which says what the value is."""
    if isinstance(value, TextCell):
        value = _parse_cell(value, kind)
    elif isinstance(value, np.generic | Decimal):
        value = python_value(value)
    try:
        match kind:
            case "string" if isinstance(value, str):
                value.encode()
                return value
            case "bool" if isinstance(value, bool):
                return value
            case "int" if type(value) is int and -_LARGEST_INT <= value <= _LARGEST_INT:
                return value
            case "int" if type(value) is float and value.is_integer() and abs(value) <= _LARGEST_EXACT_FLOAT:
                return int(value)
            case "float" if type(value) in (int, float) and math.isfinite(value):
                return float(value)
            case "timestamp" if isinstance(value, date | str):
                when = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
                when = datetime.combine(when.date(), when.timetz())  # without the nanoseconds of pandas
                return (when if when.tzinfo else when.replace(tzinfo=UTC)).astimezone(UTC)
            case "date" if isinstance(value, date | str) and not isinstance(value, datetime):
                return date.fromisoformat(value) if isinstance(value, str) else value
            case "strings" if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
                "".join(value).encode()
                return tuple(value)
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"{value!r:.60} is no {kind}")


def python_value(value: np.generic | Decimal) -> Any:
    """Convert a value of numpy, or a decimal number of a database, to Python, a time without its nanoseconds. A time
    beyond Python's range stays as it is."""
    if isinstance(value, Decimal):
        return float(value)
    plain = value.item()
    if isinstance(value, np.datetime64) and isinstance(plain, int):
        plain = value.astype("datetime64[us]").item()
        return value if isinstance(plain, int) else plain
    return plain


def to_json(value: FieldValue) -> str | int | float | bool | list[str]:
    """Convert a value to JSON; `parse_field` reads it."""
    if isinstance(value, date):
        return value.isoformat()
    return list(value) if isinstance(value, tuple) else value


class FieldReader:
    """Reads fields of declared types, or infers the types from the values. `types` are those of the fields so far."""

    def __init__(self, fields: Mapping[str, str] | Literal["infer"]) -> None:
        self.infers = fields == "infer"
        self.types: dict[str, str] = {} if isinstance(fields, str) else dict(fields)
        self._left_out: set[str] = set()
        """Names that no field can have, and names of values that no type holds."""

    def read(self, extras: Mapping[str, Any]) -> Fields:
        """Read the fields from the extras of a passage. Raises ValueError that names the field of a wrong type."""
        for name, value in extras.items() if self.infers else ():
            if value is not None and (name in self.types or self._is_field_name(name)):
                kind = self._infer(name, value)
                if kind is None:
                    extras = {**extras, name: None}
                else:
                    self.types[name] = kind
        return read_fields(extras, self.types)

    def _is_field_name(self, name: str) -> bool:
        try:
            check_field_name(name)
        except ValueError as error:
            self._leave_out(name, f"{error}; rename it to keep it")
            return False
        return True

    def _infer(self, name: str, value: Any) -> str | None:
        """Return the type of all values so far, None for a value that no type holds. Whole numbers and floats are
        floats."""
        kind, before = _type_of(value), self.types.get(name)
        if kind is None:
            self._leave_out(name, f"{name!r} is {value!r:.60}, which no type holds: {', '.join(ARROW_TYPES)}")
        elif {before, kind} == {"int", "float"}:
            return "float"
        elif before not in (kind, None):
            raise ValueError(
                f"field {name!r} is {value!r:.60}, of type {kind}, and of type {before} before; name the fields to keep"
                f', with their types, in prepare.fields (in Python: settings={{"prepare": {{"fields": {{...}}}}}})'
            )
        return kind

    def _leave_out(self, name: str, why: str) -> None:
        """Warn of a value that is left out, once a name."""
        if name not in self._left_out:
            self._left_out.add(name)
            log.warning("a value of passages is left out: %s", why)


def read_fields(values: Mapping[str, Any], types: Mapping[str, str]) -> Fields:
    """Read the fields of these types, in their order, without nulls. Raises ValueError that names the field."""
    fields = []
    for name, kind in types.items():
        value = values.get(name)
        if value is not None and not (value == "" and isinstance(value, TextCell)):
            try:
                fields.append((name, parse_field(value, kind)))
            except ValueError as error:
                raise ValueError(f"field {name!r}: {error}") from None
    return tuple(fields)


def _parse_cell(value: str, kind: str) -> Any:
    """Read a cell of a text file as a declared type; text that does not fit stays text."""
    if kind == "bool":
        return _BOOLS.get(value.strip().lower(), value)
    return cell_number(value, {"int": (int, float), "float": (float,)}.get(kind, ()))


def cell_number(cell: str, kinds: Sequence[Callable[[str], int | float]] = (int, float)) -> int | float | str:
    """Read a cell as a number of the first kind that it fits, else as text: pandas writes an int beside a gap as
    1958.0. `2020_01` is text, though Python reads it as 202001."""
    for read in () if "_" in cell else kinds:
        with suppress(ValueError):
            return read(cell)
    return str(cell)


def _type_of(value: Any) -> str | None:
    is_whole = isinstance(value, int | np.integer)
    for kind in ARROW_TYPES:
        is_number = kind in ("int", "float")
        if isinstance(value, str) == (kind == "string") and not (is_number and is_whole != (kind == "int")):
            try:
                parse_field(value, kind)
            except ValueError:
                continue
            return kind
    return None
