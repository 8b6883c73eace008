"""Law: reading piece by piece equals reading at once, wherever the pieces end; breaks are reported with their line."""

import io
import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvr_ray.errors import DataError
from mvr_ray.store.formats import json_stream
from mvr_ray.store.formats.json_stream import JsonReader
from mvr_ray.store.formats.text_files import json_lines

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


class Drip(io.StringIO):
    """A file that gives a few characters at a time, whatever is asked."""

    def __init__(self, text: str, size: int) -> None:
        super().__init__(text, newline="")
        self.size = size

    def read(self, size: int | None = -1) -> str:
        return super().read(min(self.size, size) if size and size > 0 else self.size)


@given(st.lists(values, max_size=6), st.integers(1, 9), st.sampled_from([None, 1]), st.booleans())
def test_items_equal_the_array(rows: list, size: int, indent: int | None, ascii_only: bool):
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    reader = JsonReader(Drip(f" \n{text}\n ", size), "f")
    assert list(reader.items()) == rows
    reader.finish()


@given(st.dictionaries(st.text(max_size=5), values, max_size=6), st.integers(1, 9))
def test_members_equal_the_object(content: dict, size: int):
    reader = JsonReader(Drip(json.dumps(content), size), "f")
    assert {key: reader.value() for key in reader.members()} == content
    reader.finish()


@given(st.lists(values, min_size=1, max_size=4), st.data())
def test_an_array_that_breaks_off_is_reported(rows: list, data: st.DataObject):
    text = json.dumps(rows)
    cut = data.draw(st.integers(0, len(text) - 1))
    with pytest.raises(DataError, match=r"^f:1: not valid JSON"):
        list(JsonReader(Drip(text[:cut], 3), "f").items())


def test_a_break_is_reported_with_its_line():
    text = '[\n{"a": 1},\n{"a": 2},\n{"a": oops},\n{"a": 3}]'
    reader = JsonReader(io.StringIO(text), "f.json")
    with pytest.raises(DataError, match=r"f\.json:4: not valid JSON: Expecting value"):
        list(reader.items())


def test_a_key_that_an_object_has_twice_is_reported_with_its_line(tmp_path: Path):
    text = '{"id": "1", "more": {"a": 1}}\n{"id": "2", "more": {"a": 1, "b": 2, "a": 3}}\n'
    message = "not valid JSON: an object has the key 'a' twice"
    (tmp_path / "f.jsonl").write_text(text)
    first, second = json_lines(tmp_path / "f.jsonl")
    assert first.values == {"id": "1", "more": {"a": 1}}
    assert second.where.endswith("f.jsonl:2") and second.reason.startswith(message)
    reader = JsonReader(io.StringIO(f"[{text.replace('}}', '}},', 1)}]"), "f.json")
    with pytest.raises(DataError, match=rf"^f\.json:2: {message}"):
        list(reader.items())


def test_of_many_keys_the_one_that_is_there_twice_is_found_at_once(tmp_path: Path):
    keys = ", ".join(f'"{number}": 0' for number in [*range(20_000), 19_999])
    (tmp_path / "f.jsonl").write_text(f"{{{keys}}}\n")
    start_s = time.perf_counter()
    [row] = json_lines(tmp_path / "f.jsonl")
    assert "an object has the key '19999' twice" in row.reason
    assert time.perf_counter() - start_s < 1


@pytest.mark.parametrize("text", ["[1, 2] 3", "[1 2]", "[1,]", "{}", "[1, 2", ""])
def test_what_is_no_array_is_refused(text: str):
    reader = JsonReader(io.StringIO(text), "f")
    with pytest.raises(DataError):
        list(reader.items())
        reader.finish()


def test_memory_is_that_of_an_item_not_of_the_file():
    rows = 20_000
    file = io.StringIO("[" + ",".join('{"text": "%s"}' % ("x" * 100) for _ in range(rows)) + "]")
    reader = JsonReader(file, "f")
    longest = 0
    for count, _ in enumerate(reader.items(), 1):  # noqa: B007
        longest = max(longest, len(reader._buffer))
    assert count == rows
    assert longest <= 2 * json_stream.READ_CHARS


def test_few_items_are_decoded_twice(monkeypatch: pytest.MonkeyPatch):
    """The rows of DPR's files have 125,000 characters, the articles of SQuAD 68,000."""
    text, calls = json.dumps([{"ctxs": ["x" * 1000] * 120}] * 40), []

    class Decoder(json.JSONDecoder):
        def raw_decode(self, s: str, idx: int = 0) -> tuple:
            calls.append(idx)
            return super().raw_decode(s, idx)

    monkeypatch.setattr(json_stream, "DECODER", Decoder())
    assert list(JsonReader(io.StringIO(text), "f").items()) == json.loads(text)
    assert len(calls) <= 40 + len(text) / 2**20 + 1


def test_a_broken_item_in_a_long_file_is_reported_without_reading_on():
    file = io.StringIO('[{"a": nope}' + ", 1" * 1_000_000 + "]")
    with pytest.raises(DataError, match="Expecting value"):
        list(JsonReader(file, "f").items())
    assert file.tell() <= 2 * json_stream.READ_CHARS


def test_deep_nesting_is_refused_not_a_crash():
    with pytest.raises(DataError, match="nested too deeply"):
        list(JsonReader(io.StringIO("[" * 200_000), "f").items())
