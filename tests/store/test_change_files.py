"""Checks the laws of change files.

Each is applied once, in the order of names, whatever batches they come in; what cannot be applied stops none of the
others; and what was done with each is written with the corpus.
"""

import gzip
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kill_at_call import NEVER, kill_points, run_and_kill

from mvr_ray.config import FollowConfig, PrepareConfig, SourceConfig
from mvr_ray.errors import ConfigError, PublishConflictError, StorageError
from mvr_ray.store import change_files
from mvr_ray.store.change_files import Backlog, Batches, BatchReport, apply_batch, list_change_files, open_source
from mvr_ray.store.change_records import read_changes
from mvr_ray.store.corpus import ChangeFile, Corpus
from mvr_ray.store.files import Store, StoredFile
from mvr_ray.store.prepare import prepare

CONFIG = PrepareConfig(corpus="corpus", num_shards=2)
NAMES = [f"p{number}" for number in range(12)]
GOOD = st.dictionaries(st.sampled_from(NAMES), st.none() | st.sampled_from("xyz"), max_size=4)
CONTENTS = GOOD | st.sampled_from(['{"id": "p1", "te', '{"id": "p1", "delete": true}\n{"id": "p1", "text": "x"}\n'])
FIRST = {"p0": "first", "p1": "first", "p2": "first"}


def change_lines(changes: dict[str, str | None]) -> str:
    rows = [{"id": n, "delete": True} if text is None else {"id": n, "text": text} for n, text in changes.items()]
    return "".join(json.dumps(row) + "\n" for row in rows)


def make_corpus(store: Store, folder: Path, texts: dict[str, str] = FIRST, **settings: Any) -> Corpus:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "rows.jsonl"
    file.write_text(change_lines(dict(texts)))
    prepare(CONFIG.model_copy(update={"sources": [SourceConfig(path=str(file))], **settings}), store)
    return Corpus.open(store, "corpus")


def apply_next(store: Store, source: Store, count: int = 99, cfg: PrepareConfig = CONFIG) -> BatchReport:
    """Apply so many of the files that wait."""
    corpus, listing = Corpus.open(store, "corpus"), list_change_files(source)
    waiting = Backlog.of(listing, corpus.info.change_files).waiting
    return apply_batch(corpus, cfg, source, waiting[:count], listing)


def texts_of(store: Store) -> dict[str, str]:
    return {passage.id: passage.text for passage in Corpus.open(store, "corpus")}


def problems(store: Store) -> dict[str, str]:
    return {file.name: file.problem for file in Corpus.open(store, "corpus").info.change_files}


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(CONTENTS, max_size=6), st.lists(st.integers(1, 4), min_size=6, max_size=6))
def test_in_whatever_batches_files_come_the_corpus_is_that_of_the_good_ones_one_by_one(
    tmp_path_factory, contents: Sequence[dict | str], sizes: list[int]
):
    folder = tmp_path_factory.mktemp("follow")
    store, source = Store(folder / "store"), Store(folder / "source")
    make_corpus(store, folder)
    now: dict[str, str | None] = dict(FIRST)
    (folder / "source").mkdir()
    for number, content in enumerate(contents):
        text = content if isinstance(content, str) else change_lines(content)
        (folder / "source" / f"{number:03}.jsonl").write_text(text)
        now |= {} if isinstance(content, str) else content
    for size in sizes:
        apply_next(store, source, size)
    assert texts_of(store) == {name: text for name, text in now.items() if text is not None}
    assert [bool(problem) for problem in problems(store).values()] == [isinstance(one, str) for one in contents]
    before = Corpus.open(store, "corpus").info
    assert apply_next(store, source).files == []
    assert Corpus.open(store, "corpus").info == before


WHOLE = st.builds(lambda text, x: {"text": text, "x": x}, st.sampled_from(["1 2 3", "1 2 3 4 5"]), st.integers(0, 3))
SET = st.dictionaries(st.sampled_from("xy"), st.none() | st.integers(4, 9), min_size=1).map(lambda own: {"set": own})
ROWS = st.dictionaries(st.sampled_from(NAMES[:4]), WHOLE | SET | st.just({"delete": True}), max_size=4)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(ROWS, min_size=1, max_size=5), st.integers(1, 5), st.sampled_from([0, 2]))
def test_in_whatever_batches_fields_are_set_the_corpus_is_that_of_rows_one_by_one(
    tmp_path_factory, files: list[dict[str, dict]], size: int, chunk_words: int
):
    folder = tmp_path_factory.mktemp("fields")
    store, source = Store(folder / "store"), Store(folder / "source")
    cfg = CONFIG.model_copy(update={"fields": {"x": "int", "y": "int"}, "chunk_words": chunk_words})
    make_corpus(store, folder, {"p0": "1 2 3", "p1": "1 2 3"}, fields=cfg.fields, chunk_words=chunk_words)
    (folder / "source").mkdir()
    now: dict[str, dict] = {"p0": {"text": "1 2 3"}, "p1": {"text": "1 2 3"}}
    for number, rows in enumerate(files):
        for name, row in rows.items():
            if "set" in row and name in now:
                now[name] = now[name] | row["set"]
            elif "text" in row:
                now[name] = row
            elif "delete" in row:
                now.pop(name, None)
        text = "".join(json.dumps({"id": name, **row}) + "\n" for name, row in rows.items())
        (folder / "source" / f"{number}.jsonl").write_text(text)
    while apply_next(store, source, size, cfg).files:
        pass
    expected = {}
    for name, own in now.items():
        words, fields = own["text"].split(), {key: own[key] for key in "xy" if own.get(key) is not None}
        step = chunk_words or len(words)
        for number, start in enumerate(range(0, len(words), step)):
            piece_id = f"{name}#{number}" if chunk_words else name
            expected[piece_id] = (" ".join(words[start : start + step]), fields)
    assert {p.id: (p.text, dict(p.fields)) for p in Corpus.open(store, "corpus")} == expected
    assert not any(problems(store).values())


def test_files_of_every_kind_of_source_are_applied_and_their_record_is_in_the_corpus(store: Store, tmp_path: Path):
    """The record names what was read by its digest; files of other names, folders and hidden files are no changes."""
    home = Store(tmp_path / "home")
    make_corpus(home, tmp_path)
    store.write_bytes("2.jsonl.gz", gzip.compress(change_lines({"p1": None}).encode()))
    store.write_bytes("1.jsonl", change_lines({"p1": "new", "p5": "five"}).encode())
    for other in ("notes.txt", ".3.jsonl", "folder/4.jsonl"):
        store.write_bytes(other, b"{")
    first = apply_next(home, store, 1)
    assert [file.name for file in first.files] == ["1.jsonl"]
    apply_next(home, store)
    assert texts_of(home) == {"p0": "first", "p2": "first", "p5": "five"}
    files = Corpus.open(home, "corpus").info.change_files
    assert [(file.name, file.num_bytes, file.sha256) for file in files] == [
        (name, store.size_bytes(name), store.sha256(name)) for name in ("1.jsonl", "2.jsonl.gz")
    ]
    store.delete("1.jsonl")
    store.delete("2.jsonl.gz")
    store.write_bytes("3.jsonl", change_lines({"p0": "third"}).encode())
    apply_next(home, store)
    assert list(problems(home)) == ["3.jsonl"], "what the source has no more is forgotten"


def test_a_file_whose_name_comes_too_late_is_left_out_and_said_once(tmp_path: Path):
    store, source = Store(tmp_path / "store"), Store(tmp_path / "source")
    make_corpus(store, tmp_path)
    source.write_bytes("2.jsonl", change_lines({"p1": "second"}).encode())
    apply_next(store, source)
    source.write_bytes("1.jsonl", change_lines({"p1": "older"}).encode())
    [late] = apply_next(store, source).files
    assert late.name == "1.jsonl" and "came after 2.jsonl" in late.problem
    assert texts_of(store)["p1"] == "second" and problems(store) == {"1.jsonl": late.problem, "2.jsonl": ""}
    assert apply_next(store, source).files == []
    for name in ("1.jsonl", "2.jsonl"):
        source.delete(name)
    apply_next(store, source)
    source.write_bytes("2.jsonl", change_lines({"p1": "again"}).encode())
    assert apply_next(store, source).files == [] and texts_of(store)["p1"] == "second"


def test_files_that_change_passages_of_a_corpus_of_chunks_change_their_chunks(tmp_path: Path):
    store, source = Store(tmp_path / "store"), Store(tmp_path / "source")
    texts = {"a": "one two three four five", "b": "six", "c": "seven eight nine"}
    make_corpus(store, tmp_path, texts, chunk_words=2)
    source.write_bytes("1.jsonl", change_lines({"a": "one two new", "c": None, "d": "x y z"}).encode())
    apply_next(store, source, cfg=CONFIG.model_copy(update={"chunk_words": 2}))
    now = texts_of(store)
    other = Store(tmp_path / "other")
    make_corpus(other, tmp_path / "again", {"a": "one two new", "b": "six", "d": "x y z"}, chunk_words=2)
    assert now == texts_of(other) == {"a#0": "one two", "a#1": "new", "b#0": "six", "d#0": "x y", "d#1": "z"}
    corpus = make_corpus(store, tmp_path, texts)
    counts = {name: count for name, count in corpus.info.counts.items() if name != "chunk_words"}
    Corpus(store, replace(corpus.info, counts=counts)).publish(after=corpus.number)  # as an earlier program
    with pytest.raises(ConfigError, match="holds passage 'a' whole"):
        apply_next(store, source, cfg=CONFIG.model_copy(update={"chunk_words": 2}))


@pytest.mark.parametrize("count", [1, 99])
def test_in_whatever_batches_a_filter_deletes_what_the_files_before_it_left(count: int, tmp_path: Path):
    store, source = Store(tmp_path / "store"), Store(tmp_path / "source")
    make_corpus(store, tmp_path)
    source.write_bytes("1.jsonl", change_lines({"p3": "x", "p4": "x", "p0": None}).encode())
    source.write_bytes("2.jsonl", b'{"delete": true, "filter": {"id": {"in": ["p3", "p1"]}}}')
    source.write_bytes("3.jsonl", change_lines({"p1": "y"}).encode())
    source.write_bytes("4.jsonl", b'{"delete": true, "filter": {"year": 1}}')
    files = [file for _ in range(4) for file in apply_next(store, source, count).files]
    assert [file.name for file in files] == ["1.jsonl", "2.jsonl", "3.jsonl", "4.jsonl"]
    assert texts_of(store) == {"p1": "y", "p2": "first", "p4": "x"}
    assert problems(store)["4.jsonl"].startswith("4.jsonl:1: filter: the corpus has no field 'year'")


def test_a_file_that_names_a_chunk_is_left_out_and_later_ones_are_applied(tmp_path: Path):
    store, source = Store(tmp_path / "store"), Store(tmp_path / "source")
    make_corpus(store, tmp_path, {"a": "one two three"}, chunk_words=2)
    source.write_bytes("1.jsonl", change_lines({"a#1": None, "b": "never"}).encode())
    source.write_bytes("2.jsonl", change_lines({"c": "four"}).encode())
    apply_next(store, source, cfg=CONFIG.model_copy(update={"chunk_words": 2}))
    assert texts_of(store) == {"a#0": "one two", "a#1": "three", "c#0": "four"}
    problem = "'a#1' is a chunk in corpus 'corpus'; name the whole passage instead"
    assert problems(store) == {"1.jsonl": problem, "2.jsonl": ""}


def test_a_file_that_the_system_does_not_let_read_is_an_error_that_a_follower_tries_again_after(tmp_path: Path):
    store, source = Store(tmp_path / "store"), Store(tmp_path / "source")
    make_corpus(store, tmp_path)
    source.write_bytes("1.jsonl", change_lines({"p0": "x"}).encode())
    (tmp_path / "source" / "2.jsonl").symlink_to("/proc/self/mem")
    with pytest.raises(StorageError, match=r"^cannot read \S+/source/2\.jsonl: Input/output error"):
        apply_next(store, source)
    assert texts_of(store) == FIRST


@pytest.mark.parametrize("count", [1, 99])
def test_in_whatever_batches_a_file_that_names_a_chunk_of_the_files_before_it_is_left_out(count: int, tmp_path: Path):
    store, source = Store(tmp_path / "store"), Store(tmp_path / "source")
    make_corpus(store, tmp_path, {"a": "one"}, chunk_words=2)
    source.write_bytes("1.jsonl", change_lines({"b": "two three four"}).encode())
    source.write_bytes("2.jsonl", change_lines({"b#1": "five", "c": "six"}).encode())
    for _ in range(2):
        apply_next(store, source, count, CONFIG.model_copy(update={"chunk_words": 2}))
    assert texts_of(store) == {"a#0": "one", "b#0": "two three", "b#1": "four"}
    assert problems(store)["2.jsonl"].startswith("'b#1' is a chunk in corpus 'corpus'")


def dump(revision: int, page: int = 1, encoding: str = "utf-8", mark: str = "") -> str:
    return (
        f'<?xml version="1.0" encoding="{encoding}"?><mediawiki><page><title>T</title><ns>0</ns><id>{page}</id>{mark}'
        f"<revision><id>{revision}</id><text>Text {revision}.</text></revision></page></mediawiki>"
    )


def make_corpus_of_dump(store: Store, folder: Path) -> None:
    (folder / "first.xml").write_text(dump(1))
    sources = [SourceConfig(path=str(folder / "first.xml"))]
    prepare(CONFIG.model_copy(update={"sources": sources, "fields": {"revision_id": "int"}}), store)


@pytest.mark.parametrize("count", [1, 99])
def test_in_whatever_batches_a_dump_is_compared_with_what_the_files_before_it_left(count: int, tmp_path: Path):
    store, source = Store(tmp_path / "store"), Store(tmp_path / "changes")
    make_corpus_of_dump(store, tmp_path)
    names = ["1.xml", "2.xml", "3.jsonl"]
    source.write_bytes("1.xml", dump(2, page=5).encode())
    source.write_bytes("2.xml", dump(3, page=5, mark='<redirect title="T" />').encode())
    source.write_bytes("3.jsonl", b'{"id": "6", "text": "sixth"}')
    assert [file.name for _ in range(3) for file in apply_next(store, source, count).files] == names
    assert texts_of(store) == {"1": "Text 1.", "6": "sixth"}, "the page is a redirect by now"


def test_a_dump_in_an_encoding_that_cannot_be_read_is_left_out_and_later_ones_are_applied(tmp_path: Path):
    store, source = Store(tmp_path / "store"), Store(tmp_path / "changes")
    (tmp_path / "changes").mkdir()
    make_corpus_of_dump(store, tmp_path)
    for number, encoding in ((2, "GBK"), (3, "utf-8")):
        (tmp_path / "changes" / f"{number}.xml").write_text(dump(number, encoding=encoding))
    apply_next(store, source)
    assert "2.xml is not a whole MediaWiki dump" in problems(store)["2.xml"]
    assert texts_of(store) == {"1": "Text 3."} and not problems(store)["3.xml"]


def test_files_whose_names_are_not_utf_8_are_sources_and_change_files(tmp_path: Path):
    store, source = Store(tmp_path / "store"), Store(tmp_path / "source")
    (tmp_path / "rows").mkdir()
    for name in (b"caf\xe9.jsonl", b"d.jsonl"):
        Path(os.fsdecode(bytes(tmp_path / "rows") + b"/" + name)).write_text(change_lines({repr(name): "first"}))
    prepare(CONFIG.model_copy(update={"sources": [SourceConfig(path=str(tmp_path / "rows"))]}), store)
    assert set(texts_of(store).values()) == {"first"} and len(texts_of(store)) == 2
    source.write_bytes(os.fsdecode(b"caf\xe9.jsonl"), change_lines({"p1": "second"}).encode())
    [file] = apply_next(store, source).files
    assert not file.problem and os.fsencode(file.name) == b"caf\xe9.jsonl"
    assert texts_of(store)["p1"] == "second" and apply_next(store, source).files == []


def test_of_two_followers_of_one_corpus_the_slower_one_raises(tmp_path: Path):
    store, source = Store(tmp_path / "store"), Store(tmp_path / "source")
    corpus = make_corpus(store, tmp_path)
    source.write_bytes("1.jsonl", b'{"id": ')
    listing = list_change_files(source)
    apply_batch(corpus, CONFIG, source, listing, listing)
    with pytest.raises(PublishConflictError):
        apply_batch(corpus, CONFIG, source, listing, listing)


def test_files_that_an_update_takes_are_change_files(tmp_path: Path):
    """Wikipedia divides its dumps into files named by their pages."""
    source = Store(tmp_path)
    names = ["1.jsonl", "2.jsonl.gz", "3.xml.bz2", "pages-articles1.xml-p1p41242.bz2"]
    for name in [*names, "README", "4.jsonl.tmp", "5.csv", ".6.jsonl"]:
        source.write_bytes(name, b"{}")
    assert [file.name for file in list_change_files(source)] == names


def test_a_source_that_is_no_folder_is_refused(tmp_path: Path):
    for source, message in ((None, "follow.source is not set"), (str(tmp_path / "nowhere"), "is not a folder")):
        with pytest.raises(ConfigError, match=message):
            open_source(FollowConfig(source=source))


def file_named(name: str, num_bytes: int = 10, changed_s: float = 0) -> StoredFile:
    return StoredFile(name, num_bytes, changed_s)


A, B, C = map(file_named, "abc")
TABLE = {
    "young and few": (False, [(0, [A]), (9, [A])], []),
    "one is old": (False, [(0, [A]), (9, [A, B]), (10, [A, B])], [A, B]),
    "enough bytes": (False, [(0, [A, B, C]), (1, [A, B, C])], [A, B, C]),
    "no more than needed": (
        False,
        [(0, [file_named("0", 30), A]), (1, [file_named("0", 30), A])],
        [file_named("0", 30)],
    ),
    "seen once": (False, [(0, []), (50, [A, B, C])], []),
    "whole at once": (True, [(0, [A, B, C])], [A, B, C]),
    "grows": (False, [(0, [A, B]), (50, [A, file_named("b", 11)])], [A]),
    "behind one that grows": (False, [(0, [A, B]), (50, [file_named("a", 11), B])], []),
    "gone and here again": (False, [(0, [A]), (5, []), (12, [A]), (13, [A])], []),
}


@pytest.mark.parametrize("case", TABLE)
def test_a_batch_is_due_by_bytes_or_by_age_of_files_that_are_whole(case: str):
    shows_whole_files, looks, batch = TABLE[case]
    batches = Batches(FollowConfig(batch_bytes=25, max_age_s=10), shows_whole_files)
    results = [batches.next(files, now_s) for now_s, files in looks]
    assert results[-1] == batch


def test_a_backlog_is_what_comes_after_the_last_name_and_what_came_too_late():
    prior = [ChangeFile("b", 10, 0, ""), ChangeFile("d", 10, 0, "")]
    files = list(map(file_named, "abcdef"))
    assert Backlog.of(files, prior) == ([file_named("e"), file_named("f")], [file_named("a"), file_named("c")])
    assert Backlog.of(files, []) == (files, [])


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_two_followers_of_one_bucket_leave_each_other_the_local_copies(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """They share them, as two indexes of one source on one machine do."""
    store.write_bytes("1.jsonl", change_lines({"p0": "second"}).encode())
    one, other = Store(tmp_path / "one"), Store(tmp_path / "other")
    for own in (one, other):
        make_corpus(own, tmp_path)

    def read_after_the_other(*own: Any) -> Any:
        monkeypatch.setattr(change_files, "read_changes", read_changes)
        apply_next(other, store)
        return read_changes(*own)

    monkeypatch.setattr(change_files, "read_changes", read_after_the_other)
    apply_next(one, store)
    assert texts_of(one) == texts_of(other) == FIRST | {"p0": "second"}


@pytest.mark.slow
@pytest.mark.chaos(
    "follower killed at each call that writes, syncs, names or renames",
    "every file applied, and noted as applied, or neither; the same work then ends with the undisturbed bytes",
)
def test_a_follower_killed_at_any_call_applies_each_file_once(tmp_path: Path, record_property):
    before = Store(tmp_path / "before")
    first = make_corpus(before, tmp_path, num_shards=1)
    source = Store(tmp_path / "source")
    source.write_bytes("1.jsonl", change_lines({"p0": "second", "p1": None, "p7": "new"}).encode())
    source.write_bytes("2.jsonl", b'{"id": "p2", "te')
    source.write_bytes("3.jsonl", change_lines({"p7": "newer"}).encode())
    whole = Store(shutil.copytree(before.root, tmp_path / "whole"))
    apply_next(whole, source)
    expected = Corpus.open(whole, "corpus").info
    cfg, listing = CONFIG.model_copy(update={"num_shards": 1}), list_change_files(source)

    def work(name: str) -> Callable[[], object]:
        store = Store(shutil.copytree(before.root, tmp_path / name))
        return partial(apply_batch, Corpus.open(store, "corpus"), cfg, source, listing, listing)

    states: list[bool] = []
    calls = run_and_kill(work("undisturbed"), NEVER)
    for at in kill_points(calls):
        assert len(run_and_kill(work(f"killed at {at}"), at)) == at
        store = Store(tmp_path / f"killed at {at}")
        states.append(Corpus.open(store, "corpus").info == expected)
        assert states[-1] or Corpus.open(store, "corpus").info == first.info
        apply_next(store, source)
        assert Corpus.open(store, "corpus").info == expected and Corpus.open(store, "corpus").verify().damage == []
        assert texts_of(store) == {"p0": "second", "p2": "first", "p7": "newer"}
    assert states == sorted(states) and {*states} == {False, True}
    counts = ", ".join(f"{count} {name}" for name, count in sorted(Counter(calls).items()))
    record_property("figures", f"killed {len(states)} times ({counts}); applied after {sum(states)}")
