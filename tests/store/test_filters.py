"""Compares filters over columns with a plain evaluator, and checks that each wrong filter is refused by name."""

import json
from collections.abc import Mapping
from datetime import UTC, date, datetime
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mvr_ray.errors import FilterError
from mvr_ray.store.fields import to_json
from mvr_ray.store.filters import parse_filter, to_plain_filter
from mvr_ray.store.parts import passage_schema

FIELDS = {
    "s": "string",
    "i": "int",
    "f": "float",
    "b": "bool",
    "d": "date",
    "t": "timestamp",
    "l": "strings",
}
VALUES = {
    "s": st.sampled_from(["", "a", "b", "\ue000", "\U0001f600"]),
    "i": st.sampled_from([-(2**63) + 1, -1, 0, 1, 2**53 + 1, 2**63 - 1]),
    "f": st.sampled_from([-0.0, 0.0, 0.1, 1.0, -1e300, 5e-324]),
    "b": st.booleans(),
    "d": st.dates(date(1958, 7, 1), date(1958, 7, 3)),
    "t": st.datetimes(datetime(1958, 7, 1), datetime(1958, 7, 1, 0, 0, 1), timezones=st.just(UTC)),
    "l": st.lists(st.sampled_from("abc"), max_size=3).map(tuple),
}
ORDERS = ("gt", "gte", "lt", "lte")


def comparisons(name: str) -> st.SearchStrategy[object]:
    """A bare value, or one to three operators with values."""
    value = (st.sampled_from("abc") if name == "l" else VALUES[name]).map(to_json)
    operators: dict[str, st.SearchStrategy[object]] = {
        "eq": value,
        "ne": value,
        "in": st.lists(value, max_size=3),
        "nin": st.lists(value, max_size=3),
        "exists": st.booleans(),
        **({} if name in "bl" else dict.fromkeys(ORDERS, value)),
    }
    pair = st.sampled_from(sorted(operators)).flatmap(lambda key: operators[key].map(lambda own: (key, own)))
    return value | st.lists(pair, min_size=1, max_size=3).map(dict)


CONDITIONS = st.sampled_from(sorted(FIELDS)).flatmap(lambda name: comparisons(name).map(lambda own: {name: own}))
FILTERS = st.recursive(
    CONDITIONS | st.just({}),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"and": parts}),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"or": parts}),
        inner.map(lambda part: {"not": part}),
        st.tuples(inner, inner).map(lambda pair: {**pair[0], **pair[1]}),
    ),
    max_leaves=8,
)
ROWS = st.lists(st.fixed_dictionaries({name: st.none() | values for name, values in VALUES.items()}), max_size=6)


def read_literal(kind: str, value: object) -> object:
    if kind == "d":
        return date.fromisoformat(str(value))
    return datetime.fromisoformat(str(value)) if kind == "t" else value


def holds(condition: Mapping[str, object], row: Mapping[str, object]) -> bool:
    """The rules as the module has them, a passage at a time, without columns."""
    for key, own in condition.items():
        if key == "and":
            true = all(holds(part, row) for part in own)
        elif key == "or":
            true = any(holds(part, row) for part in own)
        elif key == "not":
            true = not holds(own, row)
        else:
            pairs = own.items() if isinstance(own, dict) else [("eq", own)]
            true = all(compares(key, row[key], operator, literal) for operator, literal in pairs)
        if not true:
            return False
    return True


def compares(kind: str, value: object, operator: str, literal: object) -> bool:
    if operator == "exists":
        return (value is not None) == literal
    if operator in ("ne", "nin"):
        return not compares(kind, value, {"ne": "eq", "nin": "in"}[operator], literal)
    if value is None:
        return False
    literals = [read_literal(kind, one) for one in (literal if operator == "in" else [literal])]
    if operator in ("eq", "in"):
        return any(one in literals for one in (value if kind == "l" else [value]))
    less, equal = value < literals[0], value == literals[0]
    return {"lt": less, "lte": less or equal, "gt": not less and not equal, "gte": not less}[operator]


@given(FILTERS, ROWS, st.integers(1, 6))
@settings(max_examples=200)
def test_a_filter_over_columns_is_the_plain_evaluator_row_by_row(condition, rows, per_batch):
    schema = passage_schema(FIELDS)
    full = [{"id": str(number), "title": "", "text": "", **row} for number, row in enumerate(rows)]
    batches = [pa.RecordBatch.from_pylist(full[at : at + per_batch], schema) for at in range(0, len(full), per_batch)]
    table = pa.Table.from_batches(batches, schema)
    passage_filter = parse_filter(condition, FIELDS)
    assert passage_filter.mask(table.select(passage_filter.columns)).tolist() == [holds(condition, row) for row in rows]
    assert len(passage_filter.mask(table)) == len(rows)
    again = parse_filter(json.loads(passage_filter.text), FIELDS)
    assert (again.text, again.mask(table).tolist()) == (passage_filter.text, passage_filter.mask(table).tolist())


def test_id_and_title_can_be_named_and_values_of_python_are_taken():
    schema = passage_schema({"d": "date"})
    rows = [("a", "T", "x", date(1958, 7, 1)), ("b", "U", "x", None)]
    table = pa.Table.from_pylist([dict(zip(schema.names, row)) for row in rows], schema)
    assert parse_filter({"id": "b"}, {}).mask(table).tolist() == [False, True]
    assert parse_filter({"title": {"lt": "U"}}, {}).mask(table).tolist() == [True, False]
    by_day = parse_filter({"d": {"in": (date(1958, 7, 1),)}}, {"d": "date"})
    assert by_day.mask(table).tolist() == [True, False]
    assert by_day.text == '{"d": {"in": ["1958-07-01"]}}'


def test_numbers_of_numpy_are_those_of_python():
    condition = {"i": {"gte": np.int64(1958), "in": [np.int32(1958), 1960]}, "f": np.float32(0.5), "b": np.bool_(True)}
    plain = {"i": {"gte": 1958, "in": [1958, 1960]}, "f": 0.5, "b": True}
    assert parse_filter(condition, FIELDS).text == parse_filter(plain, FIELDS).text


@pytest.mark.parametrize(
    "make", [np.array, pd.Series, pd.Index, pl.Series, pa.array, lambda values: pa.chunked_array([values])]
)
def test_a_column_or_an_array_is_the_list_of_its_values(make):
    days = [datetime(1958, 7, 1), datetime(1958, 7, 2)]
    assert to_plain_filter({"i": {"in": make([1, 2])}, "s": {"in": make(["a"])}}) == {
        "i": {"in": [1, 2]},
        "s": {"in": ["a"]},
    }
    assert to_plain_filter({"t": {"in": make(days)}}) == {"t": {"in": days}}
    assert to_plain_filter(np.array(days, "datetime64[ns]")) == days


def test_an_id_given_as_a_number_or_uuid_is_its_text():
    one = UUID("12345678-1234-5678-1234-567812345678")
    ids = pa.table({"id": ["7", "8", str(one), "p9"]})

    def passes(condition: Any) -> list[bool]:
        return parse_filter(json.loads(parse_filter(to_plain_filter(condition), {}).text), {}).mask(ids).tolist()

    assert passes({"id": 7}) == passes({"id": np.int64(7)}) == passes({"id": "7"}) == [True, False, False, False]
    assert passes({"id": {"in": [8, one, "p9"]}}) == [False, True, True, True]
    assert passes({"id": {"nin": np.array([7, 8])}}) == [False, False, True, True]
    for other in (True, 7.5, None, {"gt": 7}):
        with pytest.raises(FilterError, match="field 'id' is of type string"):
            passes({"id": other})


def test_a_whole_float_is_the_int_of_its_value():
    years = pa.table({"i": pa.array([1957, 1958, None], pa.int64())})
    assert parse_filter({"i": np.float64(1958)}, FIELDS).mask(years).tolist() == [False, True, False]
    for other in (1958.5, 2.0**53 + 2, float("inf"), float("nan")):
        with pytest.raises(FilterError, match="is no int"):
            parse_filter({"i": np.float64(other)}, FIELDS)


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ([], r"filter is \[\], not an object"),
        ({"yaer": 3}, r"no field 'yaer'; did you mean 'year'\? there are: id \(string\), title .*, year \(int\), tags"),
        ({3: 3}, "no field 3; there are"),
        ({"and": [{"text": "a"}]}, r"filter\.and\.0: the corpus has no field 'text'"),
        (
            {"year": {"like": 3}},
            r"filter\.year: 'like' does not compare field 'year', which is of type int; use eq, ne",
        ),
        (
            {"tags": {"gt": "a"}},
            "'gt' does not compare field 'tags', which is of type strings; use eq, ne, in, nin, exists",
        ),
        ({"open": {"lte": True}}, "'lte' does not compare field 'open'"),
        ({"year": "1958"}, r"filter\.year: '1958' is no int, and field 'year' is of type int"),
        ({"year": True}, "True is no int"),
        ({"year": 1.5}, "1.5 is no int"),
        ({"year": 2**63}, "9223372036854775808 is no int"),
        ({"year": None}, r'None is no int.*use \{"exists": false\}'),
        ({"year": [1958]}, r'\[1958\] is no int.* for one of several use \{"in": \[...\]\}$'),
        ({"share": float("nan")}, "nan is no float"),
        ({"tags": ["a"]}, r"\['a'\] is no string.* for one of several use"),
        ({"tags": {"in": [["a"]]}}, r"\['a'\] is no string.* of type string$"),
        ({"title": "\ud800"}, "is no string"),
        ({"year": {"in": 1958}}, "in is 1958; give a list"),
        ({"year": {"nin": [1958, "x"]}}, "'x' is no int"),
        ({"year": {"exists": 1}}, "exists is 1; say true or false"),
        ({"year": {}}, "field 'year' is compared with nothing"),
        ({"or": []}, r"filter\.or is \[\]; give a list of filters"),
        ({"and": {"year": 1}}, "give a list of filters"),
        ({"not": 3}, r"filter\.not is 3, not an object"),
        ({"or": [{"year": {"in": [], "ne": 1}}] * 501}, "more than 1000 comparisons"),
        ({"and": [{}] * 1001}, "more than 1000 filters stand in and, or and not"),
        ({"or": [{"not": {}}] * 501}, "more than 1000 filters stand in and, or and not"),
    ],
)
def test_a_filter_that_does_not_fit_is_refused_by_name(condition, message):
    fields = {"year": "int", "tags": "strings", "open": "bool", "share": "float"}
    with pytest.raises(FilterError, match=message):
        parse_filter(condition, fields)


def test_a_filter_nested_beyond_measure_is_refused():
    condition: dict = {}
    for _ in range(5000):
        condition = {"not": condition}
    with pytest.raises(FilterError, match="more than 32 filters stand within each other"):
        parse_filter(condition, {})
