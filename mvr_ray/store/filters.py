"""Parse filters over the fields of passages, and evaluate them over columns.

    {"year": {"gte": 1958}, "source": {"in": ["a", "b"]}}       both
    {"or": [{"year": 1958}, {"not": {"tags": "draft"}}]}        either; a bare value means eq

A filter is true or false of a passage, never unknown:

    eq, gt, gte, lt, lte    the passage has the field, and its value compares so; strings go by code point
    in                      it has the field, and its value is one of the list
    exists                  true: it has the field; false: it has not
    ne, nin, not            the opposites of eq, in and of a filter: true where the passage lacks the field

A list of strings equals a value where any of its strings does, and is in a list where any of them is; lists and truth
values have no order. Every field can be named, and `id` and `title`, which all passages have. `{}` is true of
all passages, as `in` of an empty list is of none.
"""

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from decimal import Decimal
from functools import reduce
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from mvr_ray.errors import FilterError
from mvr_ray.store.fields import ARROW_TYPES, parse_field, python_value
from mvr_ray.store.formats.records import is_id

pc: Any = pyarrow.compute
"""Typed as Any: its functions are generated when it is imported."""
OWN_FIELDS: Mapping[str, str] = {"id": "string", "title": "string"}
EQUALITIES = ("eq", "ne", "in", "nin", "exists")
ORDERS: Mapping[str, Any] = {"gt": pc.greater, "gte": pc.greater_equal, "lt": pc.less, "lte": pc.less_equal}
WITHOUT_ORDER = ("bool", "strings")
MAX_DEPTH, MAX_FILTERS, MAX_CONDITIONS = 32, 1000, 1000
Mask = NDArray[np.bool_]
Expression = Callable[[pa.Table], Mask]
"""Returns for each row of a table of passages whether it passes."""


class Filter(NamedTuple):
    """A filter that fits a corpus. `text` is its JSON: equal texts are equal filters. `mask` reads the `columns`."""

    text: str
    columns: list[str]
    mask: Expression


class _Parser:
    def __init__(self, fields: Mapping[str, str]) -> None:
        self.fields = {**OWN_FIELDS, **fields}
        self.columns: set[str] = set()
        self.num_filters = self.num_conditions = 0

    def parse(self, value: Any, place: str = "", depth: int = 1) -> Expression:
        if not isinstance(value, Mapping):
            raise FilterError(
                f'filter{place} is {value!r:.60}, not an object; write it like {{"year": {{"gte": 1958}}}}'
            )
        if depth > MAX_DEPTH:
            raise FilterError(f"filter: more than {MAX_DEPTH} filters stand within each other; use fewer")
        self.num_filters += depth > 1
        if self.num_filters > MAX_FILTERS:
            raise FilterError(f"filter: more than {MAX_FILTERS} filters stand in and, or and not; use fewer")
        parts = [part for key, own in value.items() for part in self._member(key, own, place, depth)]
        return parts[0] if len(parts) == 1 else _junction("and", parts)

    def _member(self, key: Any, value: Any, place: str, depth: int) -> list[Expression]:
        at = f"{place}.{key}"
        if key == "not":
            return [_negation(self.parse(value, at, depth + 1))]
        if key in ("and", "or"):
            if not isinstance(value, list | tuple) or not value:
                raise FilterError(f"filter{at} is {value!r:.60}; give a list of filters, at least one")
            return [_junction(key, [self.parse(one, f"{at}.{n}", depth + 1) for n, one in enumerate(value)])]
        kind = self.fields.get(key) if isinstance(key, str) else None
        if kind is None:
            close = difflib.get_close_matches(str(key), self.fields, n=1)
            there = ", ".join(f"{name} ({own})" for name, own in self.fields.items())
            raise FilterError(
                f"filter{place}: the corpus has no field {key!r:.60}; "
                f"{f'did you mean {close[0]!r}? ' if close else ''}there are: {there}"
            )
        conditions = value if isinstance(value, Mapping) else {"eq": value}
        self.num_conditions += len(conditions)
        if not conditions or self.num_conditions > MAX_CONDITIONS:
            fault = (
                f"more than {MAX_CONDITIONS} comparisons" if conditions else f"field {key!r} is compared with nothing"
            )
            raise FilterError(f'filter{at}: {fault}; write it like {{"{key}": {{"eq": ...}}}}')
        self.columns.add(key)
        return [_comparison(at, key, kind, operator, own) for operator, own in conditions.items()]


def to_plain_filter(value: Any, depth: int = 0) -> Any:
    """Return a filter of Python values as JSON has it, dates apart. Raises FilterError for a value that JSON lacks."""
    if depth > 3 * MAX_DEPTH:  # the parser refuses it
        return value
    if isinstance(value, np.generic | Decimal):
        value = python_value(value)
    elif isinstance(value, UUID):
        value = str(value)
    elif isinstance(value, np.ndarray):
        value = list(np.atleast_1d(value))
    elif to_list := getattr(value, "to_list", getattr(value, "to_pylist", None)):  # a column of a frame or a table
        value = to_list()
    if isinstance(value, Mapping):
        return {key: to_plain_filter(own, depth + 1) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_filter(one, depth + 1) for one in value]
    if isinstance(value, bytes | set | frozenset) or (isinstance(value, float) and not math.isfinite(value)):
        raise FilterError(
            f"filter: JSON has no value such as {value!r:.60}; give texts, finite numbers, true or false, dates, lists"
        )
    return value


def parse_filter(value: Any, fields: Mapping[str, str]) -> Filter:
    """Parse a filter, as from JSON, over a corpus's fields (names and types).

    Raises FilterError for a field that the corpus lacks, naming those that it has with their types, an unknown
    operator or one that the field's type lacks, and a value of another type.
    """
    parser = _Parser(fields)
    mask = parser.parse(value)
    return Filter(json.dumps(value, sort_keys=True, default=_to_json), sorted(parser.columns), mask)


def _to_json(value: date | np.generic) -> Any:
    return value.isoformat() if isinstance(value, date) else value.item()


def _comparison(place: str, field: str, kind: str, operator: str, value: Any) -> Expression:
    """Parse a comparison. Raises FilterError for an operator or a value that does not fit the field's type."""
    operators = EQUALITIES if kind in WITHOUT_ORDER else (*EQUALITIES, *ORDERS)
    if operator not in operators:
        raise FilterError(
            f"filter{place}: {operator!r} does not compare field {field!r}, which is of type {kind}; "
            f"use {', '.join(operators)}"
        )
    if operator == "exists":
        if not isinstance(value, bool):
            raise FilterError(f"filter{place}: exists is {value!r:.60}; say true or false")
        return lambda table: _to_mask(pc.equal(pc.is_valid(table.column(field)), value))
    several = operator in ("in", "nin")
    if several and not isinstance(value, list | tuple):
        raise FilterError(f"filter{place}: {operator} is {value!r:.60}; give a list")
    own_kind, own_values = "string" if kind == "strings" else kind, value if several else [value]
    if field == "id" and operator in EQUALITIES:  # an id that was given as a number is its text
        own_values = [str(one) if is_id(one) else one for one in own_values]
    try:
        values: list[Any] = [parse_field(one, own_kind) for one in own_values]
    except ValueError as error:
        hint = '; for passages without the field use {"exists": false}' if value is None else ""
        hint = '; for one of several use {"in": [...]}' if isinstance(value, list | tuple) and not several else hint
        raise FilterError(
            f"filter{place}: {error}, and field {field!r} is of type {kind}; compare it with a value of "
            f"type {own_kind}{hint}"
        ) from None
    if operator in ORDERS:
        limit = pa.scalar(values[0], ARROW_TYPES[kind])
        return lambda table: _to_mask(pc.fill_null(ORDERS[operator](table.column(field), limit), False))
    equal = _membership(field, kind, pa.array(values, ARROW_TYPES[own_kind]))
    return _negation(equal) if operator in ("ne", "nin") else equal


def _membership(field: str, kind: str, values: pa.Array) -> Expression:
    """Test whether a field is one of some values; a list of strings, whether any of its strings is."""
    if kind == "float":  # the two zeros are one number
        values = pc.add(values, 0.0)

    def mask(table: pa.Table) -> Mask:
        column = table.column(field)
        if kind != "strings":
            return _to_mask(pc.is_in(pc.add(column, 0.0) if kind == "float" else column, value_set=values))
        lists = pa.concat_arrays([pa.array([], column.type), *column.chunks])
        rows = pc.list_parent_indices(lists).filter(pc.is_in(pc.list_flatten(lists), value_set=values))
        passes = np.zeros(len(lists), bool)
        passes[rows.to_numpy()] = True
        return passes

    return mask


def _junction(operator: str, parts: Sequence[Expression]) -> Expression:
    """Combine some parts: all (`and`) or any (`or`); all of none is true."""
    join, start = (np.logical_and, np.ones) if operator == "and" else (np.logical_or, np.zeros)
    return lambda table: reduce(join, (part(table) for part in parts), start(len(table), bool))


def _negation(part: Expression) -> Expression:
    return lambda table: ~part(table)


def _to_mask(values: pa.ChunkedArray) -> Mask:
    return values.to_numpy().astype(bool)
