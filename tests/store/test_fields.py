"""Checks that fields come from sources to the corpus, and through updates, as they are."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mvr_ray.api.rows import passage_records
from mvr_ray.config import PrepareConfig, SourceConfig, load_run
from mvr_ray.errors import ConfigError, DataError
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.fields import ARROW_TYPES, FieldReader, parse_field, to_json
from mvr_ray.store.files import Store
from mvr_ray.store.filters import parse_filter, to_plain_filter
from mvr_ray.store.formats.records import deletion_record, passage_record
from mvr_ray.store.formats.rows import write_jsonl
from mvr_ray.store.prepare import prepare
from mvr_ray.store.update import update, update_by_records

Write = Callable[[str, str | bytes], Path]
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
VALUES = {
    "string": WORDS,
    "int": st.integers(-(2**63) + 1, 2**63 - 1),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "bool": st.booleans(),
    "date": st.dates(),
    "timestamp": st.datetimes(datetime(1000, 1, 1), timezones=st.just(UTC)),
    "strings": st.lists(WORDS, max_size=3).map(tuple),
}


def corpus_of(folder: Path, path: Path | list[Path], **settings) -> Corpus:
    paths = path if isinstance(path, list) else [path]
    sources = [SourceConfig(path=str(path)) for path in paths]
    prepare(PrepareConfig(sources=sources, num_shards=3, **settings), Store(folder / "store"))
    return Corpus.open(Store(folder / "store"), "corpus")


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def row(name: str, **extras) -> dict:
    return {"id": name, "title": "t", "text": f"text {name[1:]}", **extras}


def fields_of(corpus: Corpus) -> dict[str, dict]:
    return {passage.id: dict(passage.fields) for passage in corpus}


@settings(max_examples=30)
@given(
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from(sorted(VALUES)), min_size=1),
    st.integers(1, 9),
    st.booleans(),
    st.data(),
)
def test_any_fields_are_read_back_as_they_were_from_json_lines_and_from_parquet(
    tmp_path_factory, types, num_passages, infers, data
):
    folder = tmp_path_factory.mktemp("fields")
    cells = {
        f"p{number}": {name: data.draw(st.none() | VALUES[kind]) for name, kind in types.items()}
        for number in range(num_passages)
    }
    expected = {name: {key: value for key, value in own.items() if value is not None} for name, own in cells.items()}
    as_json = {i: {key: to_json(value) for key, value in own.items()} for i, own in expected.items()}
    (folder / "rows.jsonl").write_text(lines(*(row(i, **own) for i, own in as_json.items())))
    from_json = corpus_of(folder, folder / "rows.jsonl", fields=types)
    assert fields_of(from_json) == expected
    assert from_json.fields == types
    columns = {name: pa.array([own[name] for own in cells.values()], ARROW_TYPES[kind]) for name, kind in types.items()}
    texts = {"id": list(cells), "title": ["t"] * num_passages, "text": [f"text {i[1:]}" for i in cells]}
    pq.write_table(pa.table({**texts, **columns}), folder / "rows.parquet")
    from_parquet = corpus_of(folder, folder / "rows.parquet", fields="infer" if infers else types)
    assert fields_of(from_parquet) == expected
    if not infers:
        assert from_parquet.digest == from_json.digest


LETTERS = st.characters(exclude_categories=["Cs"])
TEXTS = st.text(LETTERS, min_size=1, max_size=9).map("a{}".format)


@settings(max_examples=12, deadline=None)
@given(
    st.dictionaries(st.sampled_from("abc"), st.sampled_from(sorted(VALUES))),
    st.lists(st.tuples(TEXTS, WORDS, TEXTS), min_size=1, max_size=9, unique_by=lambda row: row[0]),
    st.data(),
)
def test_a_corpus_is_prepared_from_its_own_lines_as_it_is_after_any_updates(tmp_path_factory, types, rows, data):
    def records(rows):
        for name, title, text in rows:
            values = {key: data.draw(st.none() | VALUES[kind]) for key, kind in types.items()}
            yield passage_record(name, title, text, "drawn", extras=values)

    folder = tmp_path_factory.mktemp("lines")
    store, cfg, file = Store(folder / "store"), PrepareConfig(num_shards=2, fields=types), folder / "lines.jsonl"
    prepare(cfg, store, records=records(rows))
    changes, deletions = (data.draw(st.lists(st.sampled_from(rows), unique=True)) for _ in range(2))
    update_by_records(cfg, store, records(changes))
    update_by_records(cfg, store, [deletion_record(name, "drawn") for name, *_ in deletions])
    corpus = Corpus.open(store, "corpus")
    assert write_jsonl(file, corpus) == corpus.num_passages == len(rows) - len(deletions)
    assert update(cfg, store, str(file)).unchanged == corpus.num_passages
    if corpus.num_passages:
        own = cfg.model_copy(update={"sources": [SourceConfig(path=str(file))]})
        prepare(own, Store(folder / "other"))
        other = Corpus.open(Store(folder / "other"), "corpus")
        assert list(other) == list(corpus) and other.fields == corpus.fields
        if not any(part.changes for part in corpus.info.parts):
            assert other.digest == corpus.digest


SCAN = """
import sys
from peak_memory import peak_kb
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.filters import parse_filter

corpus = Corpus.open(Store(sys.argv[1]), "corpus")
everything = parse_filter({"year": {"gte": 0}}, corpus.fields)
next(corpus.scan(everything))
before = peak_kb()
print(sum(1 for _ in corpus.scan(everything)) + sum(1 for _ in corpus), peak_kb() - before)
"""


def test_a_scan_holds_one_part_of_the_corpus_at_a_time(tmp_path: Path):
    texts = (passage_record(f"p{n}", "", "x" * 8_000, "row", extras={"year": n}) for n in range(4_000))
    prepare(PrepareConfig(num_shards=16, fields={"year": "int"}), Store(tmp_path), records=texts)
    path = os.pathsep.join([str(Path(__file__).resolve().parent.parent), *sys.path])
    words = [sys.executable, "-c", SCAN, str(tmp_path)]
    out = subprocess.run(words, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path})
    num_passages, kilobytes = map(int, out.stdout.split())
    assert num_passages == 8_000
    assert kilobytes < 10_000, "the corpus has 32 MB, its largest part less than 3"


def test_without_fields_a_corpus_is_byte_for_byte_what_it_was(tmp_path: Path, write: Write):
    """The digest is that of the program before passages had fields."""
    source = write("rows.jsonl", lines(*(row(f"p{i}", year=i) for i in range(5))))
    prepare(PrepareConfig(sources=[SourceConfig(path=str(source))], num_shards=2), Store(tmp_path))
    corpus = Corpus.open(Store(tmp_path), "corpus")
    assert corpus.digest == "b69b8bee5a2220a40a64aca698051b21"
    assert "fields" not in json.loads(corpus.info.to_json())
    assert not any(passage.fields for passage in corpus)


def test_the_digest_covers_names_types_and_values_of_fields(tmp_path: Path, write: Write):
    texts = [lines(row("p1", year=1)), lines(row("p1", year=2)), lines(row("p1"))]
    sources = [write(f"{number}.jsonl", text) for number, text in enumerate(texts)]
    kinds: list[dict] = [{"year": "int"}, {"year": "float"}, {"other": "int"}, {}]
    digests = [corpus_of(tmp_path, source, fields=fields).digest for source in sources for fields in kinds]
    assert len(set(digests)) == 3 * 2 + 1 + 1  # three values by two types, nulls of another name, no field


@pytest.mark.data
def test_the_fields_of_cranfield_are_those_of_its_file(tmp_path: Path, data_dir: Path):
    source = data_dir / "cranfield"
    own = {"author": "string", "bib": "string"}
    corpus = corpus_of(tmp_path, source, fields=own)
    rows = [json.loads(line) for line in (source / "corpus.jsonl").read_text().splitlines()]
    assert fields_of(corpus) == {one["_id"]: {name: one[name] for name in own if name in one} for one in rows}
    assert corpus.num_passages == len(rows) > 1000
    inferred_corpus = corpus_of(tmp_path, source, fields="infer")
    assert (inferred_corpus.fields, inferred_corpus.digest) == (own, corpus.digest)


def test_a_header_of_a_tsv_file_names_further_columns(tmp_path: Path, write: Write):
    """Their cells are read as the declared type; an empty one is null; inferred they are strings."""
    header = "id\ttext\ttitle\tyear\topen\tshare\n"
    source = write("rows.tsv", f"{header}w1\tA.\tT\t1958\ttrue\t0.5\n{header}w2\tB.\tT\t\t\t\n")
    typed_corpus = corpus_of(tmp_path, source, fields={"year": "int", "open": "bool", "share": "float"})
    assert fields_of(typed_corpus) == {"w1": {"year": 1958, "open": True, "share": 0.5}, "w2": {}}
    corpus = corpus_of(tmp_path, source, fields="infer")
    assert corpus.fields == {"open": "string", "share": "string", "year": "string"}
    with pytest.raises(DataError, match=r"rows\.tsv:2: field 'year': '19a' is no int"):
        corpus_of(tmp_path, write("rows.tsv", "id\ttext\ttitle\tyear\nw1\tA.\tT\t19a\n"), fields={"year": "int"})
    with pytest.raises(DataError, match=r"rows\.tsv:2: 3 tab-separated columns, not 4"):
        corpus_of(tmp_path, write("rows.tsv", "id\ttext\ttitle\tyear\nw1\tA.\tT\n"), fields={"year": "int"})


def test_inferred_types_join_over_all_files_and_metadata_of_beir_counts(tmp_path: Path, write: Write):
    first = write("a.jsonl", lines(row("p1", n=1, tags=["x"]), row("p2", n=None), row("p3", n=0.5)))
    second = write("b.jsonl", lines(row("p4", n=2, tags=[], flag=True)))
    corpus = corpus_of(tmp_path, [first, second], fields="infer")
    assert corpus.fields == {"flag": "bool", "n": "float", "tags": "strings"}
    assert fields_of(corpus) == {
        "p1": {"n": 1.0, "tags": ("x",)}, "p2": {}, "p3": {"n": 0.5}, "p4": {"flag": True, "n": 2.0, "tags": ()}
    }  # fmt: skip
    assert corpus_of(tmp_path, [second, first], fields="infer").digest == corpus.digest
    beir = write(
        "beir/corpus.jsonl", lines({"_id": "d1", "title": "T", "text": "X", "metadata": {"year": 3}, "url": "u"})
    )
    assert fields_of(corpus_of(tmp_path, beir.parent, fields="infer")) == {"d1": {"url": "u", "year": 3}}


def test_chunks_have_the_fields_of_their_passage(tmp_path: Path, write: Write):
    source = write("rows.jsonl", lines({"id": "p", "text": "a b c", "when": "1958-07-01"}))
    corpus = corpus_of(tmp_path, source, fields={"when": "date"}, chunk_words=2)
    assert fields_of(corpus) == {f"p#{n}": {"when": date(1958, 7, 1)} for n in range(2)}


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("string", 3), ("string", ["a"]), ("string", "\ud800"), ("int", 1.5), ("int", True), ("int", "3"),
        ("int", 2**63), ("float", "0.5"), ("float", math.nan), ("float", 10**400), ("bool", 1), ("bool", "true"),
        ("date", "yesterday"), ("date", 3), ("timestamp", "noon"), ("timestamp", 1.5), ("strings", "a"),
        ("strings", ["a", 1]), ("strings", ["\ud800"]),
    ],
)  # fmt: skip
def test_a_value_of_a_wrong_type_is_a_bad_row_with_its_line(tmp_path: Path, write: Write, kind: str, value: object):
    source = write("rows.jsonl", lines(row("p1"), row("p2", f=value)))
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: field 'f': .* is no {kind}"):
        corpus_of(tmp_path, source, fields={"f": kind})
    assert set(fields_of(corpus_of(tmp_path, source, fields={"f": kind}, max_bad_rows=1))) == {"p1"}


@pytest.mark.parametrize("value", [{"a": 1}, [1], 2**63, -(2**70), ["a", None], math.inf])
def test_a_value_that_no_type_holds_is_null_beside_others_with_one_warning(
    tmp_path: Path, write: Write, value: object, caplog: pytest.LogCaptureFixture
):
    for values in ([3, value, value], [value, 3, value]):
        caplog.clear()
        source = write("rows.jsonl", lines(*(row(f"p{n}", f=one) for n, one in enumerate(values))))
        corpus = corpus_of(tmp_path, source, fields="infer")
        assert corpus.fields == {"f": "int"}
        assert fields_of(corpus) == {f"p{n}": {"f": 3} if one == 3 else {} for n, one in enumerate(values)}
        assert sum("'f' is" in text for text in caplog.messages) == 1


@pytest.mark.parametrize("value", ["x", ["a"], True])
def test_a_field_whose_values_share_no_type_is_a_bad_row_in_either_order(tmp_path: Path, write: Write, value: object):
    for first, second in [(3, value), (value, 3)]:
        source = write("rows.jsonl", lines(row("p1", f=first), row("p2", f=second)))
        with pytest.raises(DataError, match=r"rows\.jsonl:2: field 'f' is .*of type.* and of type.* before"):
            corpus_of(tmp_path, source, fields="infer")


def test_a_field_that_no_passage_has_is_named_with_what_they_have(
    tmp_path: Path, write: Write, caplog: pytest.LogCaptureFixture
):
    source = write("rows.jsonl", lines(row("p1", year=None, meta={"size": 1}), row("p2", tags=["a"])))
    corpus_of(tmp_path, source, fields={"year": "int", "meta.size": "int", "tag": "string"})
    absent = "no passage has meta.size, tag of prepare.fields, which is null in all"
    assert caplog.messages == [f"{absent}; correct the name (passages have: meta, tags)"]


def test_a_field_of_values_that_no_type_holds_is_left_out_with_one_warning(
    tmp_path: Path, write: Write, caplog: pytest.LogCaptureFixture
):
    """Such as a vector or a mapping in each row of a data set."""
    rows = [row(f"p{n}", emb=[0.5, n], answers={"text": ["a"]}, year=n) for n in range(3)]
    corpus = corpus_of(tmp_path, write("rows.jsonl", lines(*rows)), fields="infer")
    assert (corpus.fields, fields_of(corpus)) == ({"year": "int"}, {f"p{n}": {"year": n} for n in range(3)})
    warnings = [text for text in caplog.messages if "is left out" in text]
    assert [name for text in warnings for name in ("emb", "answers") if f"'{name}' is" in text] == ["emb", "answers"]


def test_a_name_that_no_field_can_have_is_left_out_with_one_warning(
    tmp_path: Path, write: Write, caplog: pytest.LogCaptureFixture
):
    rows = [row(f"p{n}", **{"and": 3, "Unnamed: 0": n, "year": n}) for n in range(3)]
    corpus = corpus_of(tmp_path, write("rows.jsonl", lines(*rows)), fields="infer")
    assert fields_of(corpus) == {f"p{n}": {"year": n} for n in range(3)}
    assert [name for name in ("'and'", "'Unnamed: 0'") for text in caplog.messages if name in text] == [
        "'and'",
        "'Unnamed: 0'",
    ]


@pytest.mark.parametrize("name", ["ปี", "वर्ष", "année", "annee\u0301", "年", "سَنَة"])
def test_a_name_in_any_script_names_a_field(tmp_path: Path, write: Write, name: str):
    corpus = corpus_of(tmp_path, write("rows.csv", f"id,text,{name}\np1,A.,1958\np2,B.,\n"), fields={name: "int"})
    assert [passage.id for passage in corpus.scan(parse_filter({name: 1958}, corpus.fields))] == ["p1"]
    without_types = corpus_of(tmp_path / "other", write("rows.jsonl", lines(row("p1", **{name: 1}))), fields="infer")
    assert without_types.fields == {name: "int"}


def test_a_run_file_with_fields_that_cannot_be_is_refused(tmp_path: Path):
    path = tmp_path / "run.yaml"
    for fields, message in [
        ("{year: number}", "'number' is no type; a field is one of string, int"),
        ("{title: string}", "'title' cannot name a field"),
        ("{a b: string}", "'a b' cannot name a field"),
        ("[year]", "give names with types"),
    ]:
        path.write_text(f"prepare: {{fields: {fields}}}\n")
        with pytest.raises(ConfigError, match=f"prepare.fields: .*{message}"):
            load_run(path)


def test_timestamps_are_in_utc_and_dates_are_days():
    nanoseconds = parse_field(pandas.Timestamp("1958-07-01T00:00:00.000001999"), "timestamp")
    assert nanoseconds == datetime(1958, 7, 1, microsecond=1, tzinfo=UTC)
    assert parse_field("1958-07-01T02:00:00+02:00", "timestamp") == datetime(1958, 7, 1, tzinfo=UTC)
    assert parse_field("1958-07-01", "timestamp") == parse_field(datetime(1958, 7, 1), "timestamp")
    assert parse_field("1958-07-01", "timestamp") == parse_field(date(1958, 7, 1), "timestamp")
    with pytest.raises(ValueError, match="is no date"):
        parse_field(datetime(1958, 7, 1), "date")


@pytest.mark.parametrize("unit", ["D", "h", "s", "us", "ns"])
def test_a_value_of_numpy_is_that_of_python_in_rows_frames_and_filters(unit: str):
    moment = np.datetime64("1958-07-01", unit)
    assert parse_field(moment, "timestamp") == parse_field("1958-07-01", "timestamp")
    plain = date(1958, 7, 1) if unit == "D" else datetime(1958, 7, 1)
    assert to_plain_filter({"seen": {"gte": moment}}) == {"seen": {"gte": plain}}
    scalars = [moment, np.datetime64("NaT", unit), pandas.NaT, np.int64(5), np.float32(0.5), np.bool_(True)]
    row = {"text": "A text.", **{f"f{number}": value for number, value in enumerate(scalars)}}
    frame = pandas.DataFrame([row])
    kind = "date" if unit == "D" else "timestamp"
    for rows, first in ([row], kind), (frame, "timestamp"), (pa.Table.from_pandas(frame), "timestamp"):
        [record], reader = list(passage_records(rows)), FieldReader("infer")
        assert dict(reader.read(record.extras)).keys() == {"f0", "f3", "f4", "f5"}
        assert reader.types == {"f0": first, "f3": "int", "f4": "float", "f5": "bool"}
    with pytest.raises(ValueError, match=r"12000-01-01.* is no timestamp"):
        parse_field(np.datetime64("12000-01-01", "us"), "timestamp")


def test_an_update_carries_fields_and_a_row_without_one_makes_it_null(tmp_path: Path, write: Write):
    fields = {"year": "int", "tags": "strings"}
    source = write("rows.jsonl", lines(*(row(f"p{i}", year=i, tags=["a"]) for i in range(4))))
    before = corpus_of(tmp_path, source, fields=fields)
    changes = write("c.jsonl", lines(row("p1", year=9), row("p2", year=2, tags=["a"]), row("new", tags=[])))
    report = update(PrepareConfig(), before.store, str(changes))
    assert (report.added, report.replaced, report.unchanged) == (1, 1, 1)
    after = Corpus.open(before.store, "corpus")
    assert after.fields == fields
    expected = {f"p{i}": {"year": i, "tags": ("a",)} for i in range(4)}
    assert fields_of(after) == {**expected, "p1": {"year": 9}, "new": {"tags": ()}}
    with pytest.raises(DataError, match=r"(?s)c\.jsonl:1: field 'year': 'x' is no int.*nothing was changed"):
        update(PrepareConfig(), before.store, str(write("c.jsonl", lines(row("p1", year="x")))))


def test_decimal_numbers_of_databases_are_numbers():
    reader = FieldReader("infer")
    assert reader.read({"price": Decimal("1.5"), "year": Decimal(1958)}) == (("price", 1.5), ("year", 1958.0))
    assert reader.types == {"price": "float", "year": "float"}
    assert parse_field(Decimal(1958), "int") == 1958
    with pytest.raises(ValueError, match="nan is no float"):
        parse_field(Decimal("NaN"), "float")


def test_a_whole_float_is_an_int_where_the_type_says_so_and_a_float_where_it_is_inferred(tmp_path: Path, write: Write):
    source = write("rows.jsonl", lines(row("p1", year=1958), row("p2", year=1959.0)))
    assert fields_of(corpus_of(tmp_path, source, fields={"year": "int"})) == {
        "p1": {"year": 1958},
        "p2": {"year": 1959},
    }
    without_types = corpus_of(tmp_path / "without", source, fields="infer")
    assert without_types.fields == {"year": "float"}


def test_a_cell_of_an_int_beside_a_gap_is_read_as_pandas_writes_it(tmp_path: Path, write: Write):
    source = write("rows.csv", "id,text,year\nw1,A.,1958.0\nw2,B.,\n")
    assert fields_of(corpus_of(tmp_path, source, fields={"year": "int"})) == {"w1": {"year": 1958}, "w2": {}}
    with pytest.raises(DataError, match=r"1958\.5 is no int"):
        corpus_of(tmp_path / "other", write("rows.csv", "id,text,year\nw1,A.,1958.5\n"), fields={"year": "int"})


@pytest.mark.parametrize("kind", ["int", "float"])
def test_a_code_with_an_underscore_is_no_number(tmp_path: Path, write: Write, kind: str):
    with pytest.raises(DataError, match=rf"'2020_01' is no {kind}"):
        corpus_of(tmp_path, write("rows.csv", "id,text,month\nw1,A.,2020_01\n"), fields={"month": kind})


def test_a_change_says_which_of_its_values_are_no_field_of_the_corpus_unless_none_is_to_be_kept(
    tmp_path: Path, write: Write, caplog: pytest.LogCaptureFixture
):
    before = corpus_of(tmp_path, write("rows.jsonl", lines(row("p1", year=1))), fields="infer")
    changes = write("c.jsonl", lines(row("p1", year=2, hue="red"), row("p2", hue="blue", size=None)))
    update(PrepareConfig(fields={"year": "int"}), before.store, str(changes))
    assert not caplog.messages
    for fields in ("infer", {"year": "int", "hue": "string"}):
        report = update(PrepareConfig(fields=fields), before.store, str(changes))
        assert report.unchanged == 2 and fields_of(Corpus.open(before.store, "corpus")) == {"p1": {"year": 2}, "p2": {}}
        [message] = caplog.messages
        assert "'hue' of 2 passages" in message and "size" not in message
        caplog.clear()


def test_a_header_of_a_csv_file_names_further_columns(tmp_path: Path, write: Write):
    source = write("rows.csv", "ID,Year,title,text\nw1,1958,T,A.\nw2,,T,B.\n")
    assert fields_of(corpus_of(tmp_path, source, fields={"Year": "int"})) == {"w1": {"Year": 1958}, "w2": {}}


def test_changes_beside_a_part_have_its_fields(tmp_path: Path, write: Write):
    """An update of few passages writes them alone; the part's columns are as if it had been written whole."""
    fields = {"year": "int", "tags": "strings"}
    rows = {f"p{i:02d}": row(f"p{i:02d}", year=i, tags=["a"] * (i % 3)) for i in range(60)}
    before = corpus_of(tmp_path, write("rows.jsonl", lines(*rows.values())), fields=fields)
    changes = [row("p07", year=99), row("q", tags=["b"]), {"id": "p30", "delete": True}]
    update(PrepareConfig(), before.store, str(write("c.jsonl", lines(*changes))))
    after = Corpus.open(before.store, "corpus")
    assert any(part.changes for part in after.info.parts)
    now = {**rows, "p07": changes[0], "q": changes[1]}
    del now["p30"]
    whole = corpus_of(tmp_path / "whole", write("now.jsonl", lines(*now.values())), fields=fields)
    assert fields_of(after) == fields_of(whole)
    names = ["id", *fields]
    for shard in range(3):
        assert after.part(shard).table(names).to_pylist() == whole.part(shard).table(names).to_pylist()
