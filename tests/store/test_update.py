"""Checks the laws of updates.

The corpus is what the changes say, only touched parts are written, and a bad file changes nothing.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from drafts import describe, make_shard
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from mvr_ray.config import PrepareConfig, SourceConfig
from mvr_ray.errors import ConfigError, DataError, DigestError, MissingInputError, PublishConflictError, StorageError
from mvr_ray.store import gc, manifest, paths
from mvr_ray.store import update as update_module
from mvr_ray.store.corpus import Corpus, publications, shard_of
from mvr_ray.store.files import Store
from mvr_ray.store.formats.records import DeletionRecord, FilteredDeletion, PassageRecord
from mvr_ray.store.gc import collect, collect_corpus
from mvr_ray.store.parts import CorpusPart, difference
from mvr_ray.store.prepare import prepare
from mvr_ray.store.questions import read_questions, write_questions
from mvr_ray.store.update import update, update_by_records
from mvr_ray.types import Passage, Question

Write = Callable[[str, str | bytes], Path]
CONFIG = PrepareConfig(corpus="corpus", num_shards=3)
TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc", "Cf"]), min_size=1, max_size=9).filter(str.strip)
NAMES = [f"p{number}" for number in range(60)]


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def row(name: str, text: str) -> dict:
    return {"id": name, "title": "t", "text": text}


def make_corpus(store: Store, write: Write, texts: dict[str, str], num_shards: int = 3, name: str = "corpus") -> Corpus:
    source = SourceConfig(path=str(write("rows.jsonl", lines(*(row(n, text) for n, text in texts.items())))))
    prepare(PrepareConfig(corpus=name, sources=[source], num_shards=num_shards), store)
    return Corpus.open(store, name)


def num_deltas(corpus: Corpus) -> int:
    return sum(bool(part.changes) for part in corpus.info.parts)


def test_a_deletion_reads_no_text(store: Store, write: Write, monkeypatch):
    make_corpus(store, write, dict.fromkeys(NAMES, "first"))
    monkeypatch.delattr("mvr_ray.store.parts.passages_of")
    report = update_by_records(CONFIG, store, [DeletionRecord("p7", "row 0"), DeletionRecord("unknown", "row 1")])
    assert (report.deleted, report.absent, report.passages) == (1, 1, 59)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sets(st.sampled_from(NAMES), min_size=1).map(lambda names: dict.fromkeys(sorted(names), "first")),
    st.lists(st.dictionaries(st.sampled_from(NAMES), st.none() | TEXTS, max_size=5), min_size=1, max_size=4),
    st.integers(1, 4),
)
def test_after_any_changes_the_corpus_is_that_of_sources_that_had_them(tmp_path_factory, content, batches, shards):
    """Whether changes lie beside a part's first file or the part is written whole."""
    folder = tmp_path_factory.mktemp("update")
    store = Store(folder / "store")

    def write(name: str, text: str | bytes) -> Path:
        (folder / name).write_text(str(text), encoding="utf-8")
        return folder / name

    make_corpus(store, write, content, shards)
    now = dict(content)
    for changes in batches:
        rows = [{"id": n, "delete": True} if text is None else row(n, text) for n, text in changes.items()]
        before = Corpus.open(store, "corpus")
        report = update(CONFIG, store, str(write("changes.jsonl", lines(*rows))))
        changed_ids = {n for n, text in changes.items() if now.get(n) != text}
        assert report.added == len({n for n in changed_ids if n not in now})
        assert report.deleted == len({n for n in changed_ids if changes[n] is None})
        assert report.parts_written == len({shard_of(n, shards) for n in changed_ids})
        now = {n: text for n, text in {**now, **changes}.items() if text is not None}
        after = Corpus.open(store, "corpus")
        same = {shard_of(n, shards) for n in NAMES} - {shard_of(n, shards) for n in changed_ids}
        assert all(after.info.parts[shard] == before.info.parts[shard] for shard in same)
        assert report.passages == after.num_passages == len(now)
        assert {passage.id: passage.text for passage in Corpus.open(store, "corpus", report.parent)} == {
            passage.id: passage.text for passage in before
        }
    if now:
        other = make_corpus(store, write, now, shards, name="other")
        assert list(after) == list(other)
        assert [len(after.part(shard)) for shard in range(shards)] == [len(other.part(at)) for at in range(shards)]
        assert after.verify().damage == []
        event(f"parts with a file of changes: {num_deltas(after)}")


def test_few_changes_lie_beside_the_part_and_many_are_written_into_it(store: Store, write: Write):
    texts = {f"p{number:02d}": f"text {number}" for number in range(40)}
    first = make_corpus(store, write, texts, 1)

    def change(*rows: dict) -> Corpus:
        update(CONFIG, store, str(write("changes.jsonl", lines(*rows))))
        return Corpus.open(store, "corpus")

    few = change(row("p03", "new"), row("p03a", "beside it"), {"id": "p39", "delete": True})
    assert few.info.parts[0].file == first.info.parts[0].file and num_deltas(few) == 1
    assert few.part(0).row("p39") == -1 and few.part(0).get("p03a") == Passage("p03a", "t", "beside it")
    assert few.get(["p03", "p39", "p00"]) == {"p03": Passage("p03", "t", "new"), "p00": Passage("p00", "t", "text 0")}
    many = change(*(row(f"p{number:02d}", "many") for number in range(11)))
    assert many.info.parts[0].file != first.info.parts[0].file and num_deltas(many) == 0
    again = change(row("p20", "new"))
    assert num_deltas(again) == 1
    back = change(row("p20", "text 20"))
    assert (back.digest, back.info.parts) == (many.digest, many.info.parts)


def test_few_changes_after_many_are_written_alone_and_earlier_programs_refuse_the_corpus(store: Store, write: Write):
    texts = {f"p{number:03d}": f"text {number}" for number in range(400)}
    make_corpus(store, write, texts, 1)

    def change(*rows: dict) -> Corpus:
        update(CONFIG, store, str(write("changes.jsonl", lines(*rows))))
        return Corpus.open(store, "corpus")

    def formats(corpus: Corpus) -> list[int]:
        files = (paths.corpus_publication("corpus", corpus.number), paths.corpus_version("corpus", corpus.digest))
        return [json.loads(store.read_bytes(file))["format_version"] for file in files]

    many = change(*(row(f"p{number:03d}", "many") for number in range(60)))
    assert formats(many) == [2, 1]
    few = change(row("p003", "few"), row("p399x", "new"))
    [first, second] = few.info.parts[0].changes
    assert (first,) == many.info.parts[0].changes and formats(few) == [3, 3]
    alone = CorpusPart(store.local_path(f"corpora/corpus/{second.file}"))
    assert alone.ids() == ["p003", "p399x"]
    back = change(row("p003", "text 3"), {"id": "p399x", "delete": True})
    assert back.info.parts[0].changes[0] == first and len(back.info.parts[0].changes) == 2
    assert difference(few.part(0), back.part(0)) == ([3], ["p399x"])
    assert list(back) == list(make_corpus(store, write, {passage.id: passage.text for passage in back}, 1, "other"))
    assert back.get(["p003", "p399x", "p004"]).keys() == {"p003", "p004"}
    whole = change(*(row(f"p{number:03d}", "all") for number in range(60, 110)))
    assert whole.info.parts[0].changes == () and formats(whole) == [2, 1]


def test_an_update_describes_and_its_collection_reads_no_more_than_the_one_before(
    store: Store, write: Write, monkeypatch
):
    make_corpus(store, write, dict.fromkeys(NAMES, "first"))
    num_bytes = []
    for number in range(24):
        update(CONFIG, store, str(write("c.jsonl", lines(row("p0", f"text {number:02}")))))
        num_bytes.append(len(Corpus.open(store, "corpus").info.to_json()))
    assert len(set(num_bytes[-4:])) == 1, "the sources are those of `prepare`, and the last changes"
    reads, read_bytes = [], Store.read_bytes
    monkeypatch.setattr(Store, "read_bytes", lambda own, path: reads.append(path) or read_bytes(own, path))
    assert collect_corpus(store, "corpus") == []
    assert not [path for path in reads if path.startswith(paths.corpus_dir("corpus", "versions"))]


def test_updates_remove_old_corpora_and_publications_once_in_so_many_publications(
    tmp_path: Path, write: Write, monkeypatch
):
    for module in ("update", "gc"):
        monkeypatch.setattr(f"mvr_ray.store.{module}.KEPT_PUBLICATIONS", 3)
    store, counts = Store(tmp_path / "store"), []
    make_corpus(store, write, dict.fromkeys(NAMES, "first"))
    for number in range(5):
        for file in (tmp_path / "store").rglob("*"):
            os.utime(file, (0, 0))
        update(CONFIG, store, str(write("c.jsonl", lines(row("p0", f"text {number}")))))
        counts.append(len(store.json_names(paths.corpus_dir("corpus", "versions"))))
    assert counts == [2, 1, 2, 3, 1]
    assert publications(store, "corpus") == [4, 5, 6]


def test_damage_of_a_file_of_changes_is_found(store: Store, write: Write):
    make_corpus(store, write, {f"p{number:02d}": f"text {number}" for number in range(40)}, 1)
    update(CONFIG, store, str(write("changes.jsonl", lines(row("p03", "new")))))
    corpus = Corpus.open(store, "corpus")
    [changes] = corpus.info.parts[0].changes
    path = f"corpora/corpus/{changes.file}"
    data = store.read_bytes(path)
    store.write_bytes(path, data.replace(b"new", b"old"))
    assert [name for name, _ in corpus.verify().damage] == [path]
    with pytest.raises(DigestError, match=r"is damaged .* prepare CONFIG` and then every later update again"):
        Corpus.open(store, "corpus").part(0)


def test_an_update_is_the_same_on_every_kind_of_store_and_again_changes_nothing(store: Store, write: Write):
    before = make_corpus(store, write, {"a": "one", "b": "two", "c": "three"})
    changes = str(write("c.jsonl", lines(row("a", "changed"), row("new", "four"), {"id": "b", "delete": True})))
    first = update(CONFIG, store, changes)
    assert (first.added, first.replaced, first.deleted, first.absent) == (1, 1, 1, 0)
    corpus = Corpus.open(store, "corpus")
    assert sorted(corpus) == [Passage("a", "t", "changed"), Passage("c", "t", "three"), Passage("new", "t", "four")]
    assert (corpus.info.parent, corpus.info.sources[-1].format) == (before.digest, "changes")
    again = update(CONFIG, store, changes)
    assert (again.unchanged, again.absent, again.parts_written, again.digest) == (2, 1, 0, corpus.digest)


def test_questions_follow_their_passages(tmp_path: Path, write: Write):
    store = Store(tmp_path / "store")
    corpus = make_corpus(store, write, {name: f"text of {name}" for name in "abcd"})
    questions = [
        Question("kept", "?", ("of a",), ("a",), ("c",), (5,), (1.0, 0.5)),
        Question("moved", "?", ("of b",), ("b", "a"), (), (5,)),
        Question("gone", "?", (), ("c",), ()),
        Question("changed", "?", ("of d",), ("d",), (), (5,)),
        Question("open", "?", ("x",)),
    ]
    write_questions(corpus, "set", questions)
    file = write("c.jsonl", lines({"id": "b", "delete": True}, {"_id": "c", "delete": True}, row("d", "now of d")))
    assert update(CONFIG, store, str(file)).questions_dropped == 1
    assert read_questions(Corpus.open(store, "corpus"), "set") == [
        Question("kept", "?", ("of a",), ("a",), (), (5,), ()),
        Question("moved", "?", ("of b",), ("a",), (), (-1,)),
        Question("changed", "?", ("of d",), ("d",), (), (-1,)),
        Question("open", "?", ("x",)),
    ]
    assert read_questions(Corpus.open(store, "corpus", corpus.digest), "set") == questions


def test_a_question_about_a_chunk_that_a_shorter_text_no_longer_has_is_counted_and_reported(
    tmp_path: Path, write: Write, caplog
):
    store, cfg = Store(tmp_path / "store"), CONFIG.model_copy(update={"chunk_words": 1})
    sources = [SourceConfig(path=str(write("rows.jsonl", lines(row("a", "one two"), row("b", "three")))))]
    prepare(cfg.model_copy(update={"sources": sources}), store)
    corpus = Corpus.open(store, "corpus")
    write_questions(corpus, "set", [Question("q", "?", ("two",), ("a#1",)), Question("r", "?", ("one",), ("a#0",))])
    assert not caplog.messages
    assert update(cfg, store, str(write("c.jsonl", lines(row("a", "one"))))).questions_dropped == 1
    assert [question.id for question in read_questions(Corpus.open(store, "corpus"), "set")] == ["r"]
    [message] = caplog.messages
    assert message.startswith("questions removed from the sets of corpus 'corpus': 1;") and corpus.digest in message


def test_a_deletion_of_a_passage_that_a_corpus_of_chunks_lacks_is_counted_as_absent(tmp_path: Path, write: Write):
    store, cfg = Store(tmp_path / "store"), CONFIG.model_copy(update={"chunk_words": 1})
    sources = [SourceConfig(path=str(write("rows.jsonl", lines(row("a", "one two"), row("b", "three")))))]
    prepare(cfg.model_copy(update={"sources": sources}), store)
    changes = lines(*({"id": name, "delete": True} for name in "ax"))
    report = update(cfg, store, str(write("c.jsonl", changes)))
    assert (report.deleted, report.absent, report.passages) == (2, 1, 1)


def test_the_places_of_answers_stay_with_the_text_and_a_teachers_scores_with_all_that_they_score(
    tmp_path: Path, write: Write
):
    store = Store(tmp_path / "store")
    rows = lines(*({**row(name, f"text of {name}"), "year": 1900} for name in "abcd"))
    sources = [SourceConfig(path=str(write("rows.jsonl", rows)))]
    prepare(CONFIG.model_copy(update={"sources": sources, "fields": {"year": "int"}}), store)
    questions = [
        Question("other field", "?", ("of a",), ("a",), ("d",), (5,), (2.0, 0.5)),
        Question("no first", "?", ("of b",), ("b", "a"), ("d",), (5,), (2.0, 0.5)),
        Question("other negative", "?", ("of a",), ("a",), ("c",), (5,), (2.0, 0.5)),
    ]
    write_questions(Corpus.open(store, "corpus"), "set", questions)
    change = [{**row("a", "text of a"), "title": "T", "year": 2000}, {"id": "b", "delete": True}, row("c", "new")]
    update(CONFIG, store, str(write("c.jsonl", lines(*change))))
    assert read_questions(Corpus.open(store, "corpus"), "set") == [
        questions[0],
        questions[1]._replace(positive_ids=("a",), answer_starts=(-1,), teacher_scores=()),
        questions[2]._replace(teacher_scores=()),
    ]


def test_an_update_reads_no_question_of_other_passages(tmp_path: Path, write: Write, monkeypatch):
    """Else each change of a passage would cost as much as all questions of the corpus."""
    store = Store(tmp_path / "store")
    corpus = make_corpus(store, write, {name: f"text of {name}" for name in "abc"})
    questions = [Question(f"q{n}", "?", ("of a",), ("a", "b")[n % 2 :], ("b",), (5,)) for n in range(20)]
    write_questions(corpus, "set", questions)
    monkeypatch.setattr("mvr_ray.store.questions.Question", None)
    file = write("c.jsonl", lines(row("c", "now of c"), row("d", "text of d")))
    assert update(CONFIG, store, str(file)).questions_dropped == 0
    monkeypatch.undo()
    assert read_questions(Corpus.open(store, "corpus"), "set") == questions


def test_contents_that_return_are_the_corpus_of_before_with_its_questions(tmp_path: Path, write: Write):
    store = Store(tmp_path / "store")
    first = make_corpus(store, write, {name: f"text of {name}" for name in NAMES[:9]})
    questions = [Question("q", "?", ("of p1",), ("p1",), (), (5,)), Question("open", "?", ("x",))]
    write_questions(first, "set", questions)
    draft = describe([make_shard(store, tmp_path / "shard", b"content")])
    manifest.publish(store, replace(draft, corpus_digest=first.digest))

    def change(*rows: dict) -> Corpus:
        update(CONFIG, store, str(write("c.jsonl", lines(*rows))), index="i")
        return Corpus.open(store, "corpus")

    more = change(row("p20", "new"))
    for _ in range(2):
        fewer = change({"id": "p1", "delete": True})
        assert [one.id for one in read_questions(fewer, "set")] == ["open"]
        again = change(row("p1", "text of p1"))
        assert (again.digest, again.info.parent) == (more.digest, fewer.digest)
        assert read_questions(again, "set") == questions and again.info.questions == more.info.questions


def test_a_set_that_was_stored_since_replaces_the_one_of_contents_that_return(tmp_path: Path, write: Write):
    """Also one that an update has changed since, and again after each return."""
    store = Store(tmp_path / "store")
    first = make_corpus(store, write, {name: f"text of {name}" for name in NAMES[:9]})
    write_questions(first, "old", [Question("o", "?", ("of p1",), ("p1",), (), (5,))])
    write_questions(first, "set", [Question("q", "?", ("of p1",), ("p1",), (), (5,))])
    for number, is_changed_twice in enumerate((False, True, False)):
        questions = [Question(f"new {number} {n}", "?", ("of p2",), (f"p{n}",), (), (5,)) for n in (2, 3, 4)]
        texts = {"p1": "other", **({"p3": "other"} if is_changed_twice else {})}
        update(CONFIG, store, str(write("c.jsonl", lines(row("p1", "other")))))
        write_questions(Corpus.open(store, "corpus"), "set", questions)
        if is_changed_twice:
            update(CONFIG, store, str(write("c.jsonl", lines({"id": "p4", "delete": True}, row("p3", "other")))))
            questions = [questions[0], questions[1]._replace(answer_starts=(-1,))]
            texts["p4"] = ""
        update(CONFIG, store, str(write("c.jsonl", lines(*(row(name, f"text of {name}") for name in texts)))))
        again = Corpus.open(store, "corpus")
        assert again.digest == first.digest
        assert read_questions(again, "set") == questions
        assert read_questions(again, "old")[0].answer_starts == (5,)


def test_a_killed_update_leaves_no_question_about_a_deleted_passage_though_the_set_was_replaced_meanwhile(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
):
    store = Store(tmp_path / "store")
    first = make_corpus(store, write, {name: f"text of {name}" for name in NAMES[:9]})
    write_questions(first, "set", [Question("before", "?", (), ("p2",))])
    publish, write_parts = Corpus.publish, update_module._write_parts

    def replace_set(*args: Any) -> Any:
        write_questions(first, "set", [Question("meanwhile", "?", (), ("p1",))])
        return write_parts(*args)

    def publish_and_end(corpus: Corpus, after: int) -> None:
        publish(corpus, after)
        raise KeyboardInterrupt

    monkeypatch.setattr(update_module, "_write_parts", replace_set)
    monkeypatch.setattr(Corpus, "publish", publish_and_end)
    with pytest.raises(KeyboardInterrupt):
        update(CONFIG, store, str(write("c.jsonl", lines({"id": "p1", "delete": True}))))
    assert [one.id for one in read_questions(Corpus.open(store, "corpus"), "set")] == ["before"]


def test_a_set_that_is_stored_with_a_new_corpus_is_not_replaced_by_one_that_its_parent_got_before(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
):
    store = Store(tmp_path / "store")
    first = make_corpus(store, write, {name: f"text of {name}" for name in NAMES[:9]})
    write_questions(first, "set", [Question("before", "?", (), ("p2",))])
    publish, write_parts = Corpus.publish, update_module._write_parts

    def replace_set(*args: Any) -> Any:
        write_questions(first, "set", [Question("with the parent", "?", (), ("p2",))])
        return write_parts(*args)

    def publish_and_replace_set(corpus: Corpus, after: int) -> None:
        publish(corpus, after)
        write_questions(corpus, "set", [Question("with the new one", "?", (), ("p2",))])

    monkeypatch.setattr(update_module, "_write_parts", replace_set)
    monkeypatch.setattr(Corpus, "publish", publish_and_replace_set)
    update(CONFIG, store, str(write("c.jsonl", lines({"id": "p1", "delete": True}))))
    assert [one.id for one in read_questions(Corpus.open(store, "corpus"), "set")] == ["with the new one"]


def test_an_update_after_a_killed_one_whose_files_were_collected_has_its_questions(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
):
    store, change = Store(tmp_path / "store"), str(write("c.jsonl", lines({"id": "p1", "delete": True})))
    first = make_corpus(store, write, {name: f"text of {name}" for name in NAMES[:9]})
    write_questions(first, "set", [Question("q", "?", (), ("p1",)), Question("open", "?", ("x",))])

    def interrupt(corpus: Corpus, after: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Corpus, "publish", interrupt)
        update(CONFIG, store, change)
    assert collect_corpus(store, "corpus", grace_s=0)
    update(CONFIG, store, change)
    assert [one.id for one in read_questions(Corpus.open(store, "corpus"), "set")] == ["open"]


@pytest.mark.parametrize("command", ["update", "prepare"])
def test_an_old_corpus_that_returns_keeps_its_questions_from_a_collection_that_runs_meanwhile(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch, command: str
):
    store = Store(tmp_path / "store")
    sources = [SourceConfig(path=str(write("q.jsonl", lines({"question": "Who?", "id": "q"}))), questions="set")]
    sources.append(SourceConfig(path=str(write("rows.jsonl", lines(*(row(name, "text") for name in NAMES[:9]))))))
    cfg = PrepareConfig(corpus="corpus", sources=sources, num_shards=3)
    prepare(cfg, store)
    first, change = Corpus.open(store, "corpus"), write("a.jsonl", lines(row("p20", "new")))
    update(CONFIG, store, str(change))
    for file in tmp_path.rglob("*"):
        os.utime(file, (time.time() - 7200,) * 2)
    publish = Corpus.publish

    def collect_and_publish(corpus: Corpus, after: int) -> None:
        collect_corpus(store, "corpus")
        publish(corpus, after)

    monkeypatch.setattr(Corpus, "publish", collect_and_publish)
    if command == "update":
        update(CONFIG, store, str(write("b.jsonl", lines({"id": "p20", "delete": True}))))
    else:
        prepare(cfg, store)
    again = Corpus.open(store, "corpus")
    assert again.digest == first.digest
    assert [question.id for question in read_questions(again, "set")] == ["q"]


FIELDS = CONFIG.model_copy(update={"fields": {"year": "int", "tags": "strings"}})


def with_fields(write: Write, store: Store, *rows: dict) -> None:
    source = SourceConfig(path=str(write("fields.jsonl", lines(*rows))))
    prepare(FIELDS.model_copy(update={"sources": [source]}), store)


def test_two_writers_of_different_fields_of_a_passage_both_win(store: Store, write: Write):
    with_fields(write, store, row("a", "one") | {"year": 1, "tags": ["x"]}, row("b", "two"))
    year, tags = (str(write(f"{n}.jsonl", lines({"id": "a", "set": own}))) for n, own in SETS.items())
    calls = []

    def be_faster(what: str, count: int, total: int) -> None:
        if what == "parts written" and not calls:
            calls.append(update(FIELDS, store, tags))

    with pytest.raises(PublishConflictError):
        update(FIELDS, store, year, be_faster)
    report = update(FIELDS, store, year)
    assert (report.replaced, report.passages, calls[0].replaced) == (1, 2, 1)
    passages = Corpus.open(store, "corpus").get(["a", "b"])
    assert passages == {"a": Passage("a", "t", "one", (("year", 2),)), "b": Passage("b", "t", "two")}
    assert update(FIELDS, store, year).unchanged == 1


@pytest.mark.parametrize(
    ("extras", "has_warning"), [({"yaer": 3}, True), ({"yaer": 3, "year": 2}, False), ({"x": 1}, False)]
)
def test_a_value_that_looks_like_a_field_that_its_row_lacks_is_named_in_a_warning(
    tmp_path: Path, write: Write, caplog, extras: dict, has_warning: bool
):
    """Other values are not to be kept, where the run file names the fields."""
    store = Store(tmp_path / "store")
    with_fields(write, store, row("a", "one") | {"year": 1})
    update(FIELDS, store, str(write("c.jsonl", lines(row("a", "one") | extras))))
    message = "update: no field of corpus 'corpus' (year, tags), and left out: 'yaer' of 1 passage; correct the names"
    assert (message in caplog.text) is has_warning
    assert ("left out" in caplog.text) is has_warning


SETS = {"year": {"year": 2}, "tags": {"tags": None}}


def test_fields_of_a_passage_that_is_not_there_change_nothing(tmp_path: Path, write: Write, caplog):
    store = Store(tmp_path / "store")
    with_fields(write, store, row("a", "one"))
    report = update(FIELDS, store, str(write("c.jsonl", lines({"id": "x", "set": {"year": 1}}))))
    assert (report.absent, report.added, report.digest) == (1, 0, report.parent)
    assert "update: no passage of corpus 'corpus', and left out: fields of 'x'" in caplog.text


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"set": {"year": 1}}, "id is missing"),
        ({"id": "a", "set": {"yaer": 1}}, "set: the corpus has no field 'yaer'; there are: year, tags"),
        ({"id": "a", "set": {"text": "x"}}, "set: the corpus has no field 'text'; there are: year, tags"),
        ({"id": "a", "set": {"year": "x"}}, "set: field 'year': 'x' is no int"),
        ({"id": "a", "set": {"year": 1}, "text": "x"}, "'text' stands beside 'set', which has all that changes"),
        ({"id": "a", "set": {"year": 1}, "delete": True}, "'delete' stands beside 'set'"),
        ({"id": "a", "set": 1}, 'text is missing. A row is a passage .* or "set": {"field": value}'),
    ],
)
def test_a_bad_row_of_fields_is_named_and_nothing_changes(tmp_path: Path, write: Write, row: dict, message: str):
    store = Store(tmp_path / "store")
    with_fields(write, store, {"id": "a", "text": "one", "year": 1})
    before = Corpus.open(store, "corpus").info
    with pytest.raises(DataError, match=rf"c\.jsonl:1: {message}"):
        update(FIELDS, store, str(write("c.jsonl", lines(row))))
    assert Corpus.open(store, "corpus").info == before


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"id": "a", "title": "", "text": "x"}\n{"id": "b", "ti', r"c\.jsonl:2"),
        ('{"id": "a", "text": "x"}\n{"id": "a", "delete": true}\n', r"c\.jsonl:2 names passage 'a', which .*:1 names"),
        ('{"title": "x", "text": "x"}\n', r"c\.jsonl:1"),
        ('{"id": "a", "title": "x"}\n', r"c\.jsonl:1"),
        ('{"delete": true}\n', r"c\.jsonl:1: id is missing"),
        ('{"id": "", "delete": true}\n', r"c\.jsonl:1: id is missing"),
        ('{"id": 1.5, "delete": true}\n', r"c\.jsonl:1: id is 1\.5, not a text or a whole number"),
        ('{"id": "a", "text": "x", "delete": 1}\n', r"c\.jsonl:1: delete is 1, not true or false"),
        ('{"id": "a", "text": "x", "delete": "true"}\n', r"c\.jsonl:1: delete is 'true', not true or false"),
        ('{"id": "a\\ud83d", "delete": true}\n', r"c\.jsonl:1: id is not valid UTF-8"),
        ("[1]\n", r"c\.jsonl:1"),
    ],
)
def test_a_bad_file_is_named_by_line_and_nothing_changes(tmp_path: Path, write: Write, content: str, message: str):
    store = Store(tmp_path / "store")
    before = make_corpus(store, write, {"a": "one", "b": "two"})
    with pytest.raises(DataError, match=f"(?s){message}.*nothing was changed"):
        update(CONFIG, store, str(write("c.jsonl", content)))
    assert Corpus.open(store, "corpus").info == before.info


def test_a_line_deletes_what_passes_a_filter_but_no_passage_of_another_line(store: Store, write: Write):
    make_corpus(store, write, {name: name for name in "abcdef"})
    deletion = {"delete": True, "filter": {"id": {"in": ["a", "b", "c"]}}}
    report = update(CONFIG, store, str(write("c.jsonl", lines(row("b", "new"), deletion, {"id": "d", "delete": True}))))
    assert [(passage.id, passage.text) for passage in sorted(Corpus.open(store, "corpus"))] == [
        *zip("bef", ("new", "e", "f"))
    ]
    assert (report.deleted, report.replaced) == (3, 1)
    by_record = update_by_records(CONFIG, store, [FilteredDeletion({"id": {"gte": "e"}})])
    update(CONFIG, store, str(write("back.jsonl", lines(row("e", "e"), row("f", "f")))))
    by_line = update(CONFIG, store, str(write("d.jsonl", lines({"delete": True, "filter": {"id": {"gte": "e"}}}))))
    assert by_line.digest == by_record.digest
    for wrong, message in (
        ({"delete": True, "filter": {"yaer": 1}}, r"c\.jsonl:1: filter: the corpus has no field 'yaer'"),
        ({"id": "b", "delete": True, "filter": {"id": "e"}}, r"c\.jsonl:1: an id stands beside 'filter'"),
        ({"delete": True, "filter": "b"}, r"c\.jsonl:1: id is missing"),
    ):
        with pytest.raises(DataError, match=rf"{message}.*nothing was changed"):
            update(CONFIG, store, str(write("c.jsonl", lines(wrong))))
    assert Corpus.open(store, "corpus").digest == by_line.digest


def test_a_passage_is_deleted_by_every_id_that_adds_one(tmp_path: Path, write: Write):
    store, ids = Store(tmp_path / "store"), [0, 1, "a"]
    make_corpus(store, write, {"b": "one"})
    for change in ({"text": "x"}, {"delete": True}):
        update(CONFIG, store, str(write("c.jsonl", lines(*({"id": id_, **change} for id_ in ids)))))
        assert len(Corpus.open(store, "corpus").get(map(str, ids))) == (3 if "text" in change else 0)


def test_changes_have_the_names_of_the_source_or_the_standard_ones(tmp_path: Path, write: Write):
    """A name with dots reaches into an object. Sources whose names differ give none to changes."""
    own = [{"key": "a", "body": {"text": "one"}, "title": "of the web page", "head": "First"}]
    changes = [{"key": "b", "body": {"text": "two"}, "head": "Second"}, {"key": "a", "delete": True}]
    standard = [{"id": "b", "text": "two", "title": "Second"}, {"id": "a", "delete": True}]
    fields = {"id": "key", "title": "head", "text": "body.text"}
    source = SourceConfig.model_validate({"path": str(write("own.jsonl", lines(*own))), "fields": fields})
    cfg = PrepareConfig(corpus="corpus", num_shards=3, sources=[source])
    digests = []
    for rows in (changes, standard):
        store = Store(tmp_path / f"store-{len(digests)}")
        prepare(cfg, store)
        assert Corpus.open(store, "corpus").get(["a"])["a"].title == "First"
        digests.append(update(cfg, store, str(write("c.jsonl", lines(*rows)))).digest)
        assert [*Corpus.open(store, "corpus")] == [Passage("b", "Second", "two")]
    assert digests[0] == digests[1]
    two = cfg.model_copy(update={"sources": [source, SourceConfig(path="other.jsonl")]})
    with pytest.raises(DataError, match=r"c\.jsonl:1: id is missing"):
        update(two, store, str(write("c.jsonl", lines(*changes))))


def test_changes_have_the_ids_of_the_source_or_of_the_corpus(tmp_path: Path, write: Write):
    """Sources whose prefixes differ give none to changes."""
    rows = [row("1", "one"), row("2", "two"), row("3", "three")]
    source = SourceConfig(path=str(write("own.jsonl", lines(*rows))), id_prefix="w:")
    cfg, digests = PrepareConfig(corpus="corpus", num_shards=3, sources=[source]), set()
    for prefix in ("", "w:"):
        store = Store(tmp_path / f"store-{len(digests)}")
        prepare(cfg, store)
        changes = lines(row(f"{prefix}1", "new"), row(f"{prefix}4", "four"), {"id": f"{prefix}2", "delete": True})
        report = update(cfg, store, str(write("c.jsonl", changes)))
        assert (report.replaced, report.added, report.deleted, report.absent) == (1, 1, 1, 0)
        assert sorted(passage.id for passage in Corpus.open(store, "corpus")) == ["w:1", "w:3", "w:4"]
        digests.add(report.digest)
    assert len(digests) == 1
    bare = [PassageRecord(Passage("9", "", "bare"), ""), PassageRecord(Passage("w:9", "", "of the source"), "")]
    update_by_records(cfg, store, bare)
    assert update(cfg, store, str(write("c.jsonl", lines({"id": "9", "delete": True})))).deleted == 1
    assert sorted(passage.id for passage in Corpus.open(store, "corpus")) == ["w:1", "w:3", "w:4", "w:9"]
    two = cfg.model_copy(update={"sources": [source, SourceConfig(path="other.jsonl")]})
    assert update(two, store, str(write("c.jsonl", lines({"id": "1", "delete": True})))).absent == 1


def test_parts_that_were_written_long_before_they_are_named_outlive_a_collection_that_runs_meanwhile(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
):
    """It lists the files that no corpus names, an update of hours publishes, and the collection goes on to delete."""
    store = Store(tmp_path / "store")
    make_corpus(store, write, {f"p{n}": "one" for n in range(9)})
    publish, list_files = Corpus.publish, gc._files_without_corpus

    def publish_beside_a_collection(corpus: Corpus, after: int) -> None:
        def list_then_publish(*arguments: Any) -> list[str]:
            files = list(list_files(*arguments))
            assert files
            publish(corpus, after)
            return files

        for file in (tmp_path / "store").rglob("part-*"):
            os.utime(file, (0, 0))
        monkeypatch.setattr(gc, "_files_without_corpus", list_then_publish)
        collect_corpus(store, "corpus", grace_s=3600)

    monkeypatch.setattr(Corpus, "publish", publish_beside_a_collection)
    report = update(CONFIG, store, str(write("c.jsonl", lines(*(row(f"p{n}", "two") for n in range(9))))))
    corpus = Corpus.open(store, "corpus")
    assert corpus.digest == report.digest and {passage.text for passage in corpus} == {"two"}


def test_what_cannot_be_updated_is_refused(tmp_path: Path, write: Write):
    store = Store(tmp_path / "store")
    changes = str(write("c.jsonl", lines(row("a", "x"))))
    with pytest.raises(MissingInputError, match="mvr-ray prepare CONFIG"):
        update(CONFIG, store, changes)
    make_corpus(store, write, {"a": "one"})
    with pytest.raises(MissingInputError, match=r"nowhere\.jsonl does not exist"):
        update(CONFIG, store, "nowhere.jsonl")
    for before, now in ((0, 100), (10, 5), (10, 0)):
        sources = [SourceConfig(path=str(write("rows.jsonl", lines(row("a", "one")))))]
        prepare(PrepareConfig(corpus="corpus", chunk_words=before, sources=sources), store)
        with pytest.raises(ConfigError, match=rf"prepare\.chunk_words is {now}, .* was prepared with {before};"):
            update(CONFIG.model_copy(update={"chunk_words": now}), store, changes)


def test_a_corpus_of_chunks_that_were_drawn_is_not_updated_whatever_the_run_file_says_by_now(
    tmp_path: Path, write: Write
):
    """Chunks of the earlier passage that no number leads to would stay."""
    store, changes = Store(tmp_path / "store"), str(write("c.jsonl", lines(row("a", "new words"))))
    sources = [SourceConfig(path=str(write("rows.jsonl", lines(row("a", "one two three four")))))]
    for before, now in ((2, 0), (0, 2)):
        cfg = CONFIG.model_copy(update={"chunk_words": 1, "max_passages": now})
        prepare(cfg.model_copy(update={"max_passages": before, "sources": sources}), store)
        if before:
            with pytest.raises(ConfigError, match=r"prepare\.chunk_words 1 and prepare\.max_passages 2, so it holds"):
                update(cfg, store, changes)
    assert update(cfg, store, changes).passages == 2


def publish_version(store: Store, tmp_path: Path, operation: str = "index") -> None:
    """Publish a version of the last corpus."""
    parent = manifest.latest_version(store, "i")
    shard = make_shard(store, tmp_path / f"shard-{parent}", b"%d" % parent)
    digest = Corpus.open(store, "corpus").digest
    manifest.publish(store, replace(describe([shard], parent), operation=operation, corpus_digest=digest))


@pytest.fixture
def folder(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def change(folder: Store, write: Write, tmp_path: Path) -> Callable[..., dict[str, str]]:
    """Change a corpus with an index, and return its texts; the store has version 1 of the passages p0 and p1."""
    make_corpus(folder, write, {"p0": "first", "p1": "first"})
    publish_version(folder, tmp_path)

    def update_by(*rows: dict) -> dict[str, str]:
        update(CONFIG, folder, str(write("changes", lines(*rows))), index="i")
        return {passage.id: passage.text for passage in Corpus.open(folder, "corpus")}

    return update_by


def test_a_change_that_changes_nothing_does_not_restore_what_was_rolled_back(folder: Store, tmp_path: Path, change):
    for rows in ([row("p0", "first")], [{"id": "unknown", "delete": True}]):
        assert change(row("p0", "bad"))["p0"] == "bad"
        publish_version(folder, tmp_path)
        manifest.rollback(folder, "i", 1)
        assert change(*rows) == {"p0": "first", "p1": "first"}


def test_an_update_that_a_roll_back_overtakes_does_not_restore_what_it_replaced(
    folder: Store, tmp_path: Path, change, write: Write
):
    change(row("p0", "bad"))
    publish_version(folder, tmp_path)
    own = str(write("own", lines(row("p1", "good"))))
    with pytest.raises(PublishConflictError, match=r"a roll back in index 'i' replaced .* run the same command again"):
        update(CONFIG, folder, own, lambda *_: manifest.rollback(folder, "i", 1), index="i")
    assert change(row("p1", "good")) == {"p0": "first", "p1": "good"}


@pytest.mark.parametrize("is_repeated", [False, True])
def test_an_update_published_just_after_a_roll_back_does_not_restore_what_it_replaced(
    folder: Store, tmp_path: Path, change, monkeypatch: pytest.MonkeyPatch, is_repeated: bool
):
    change(row("p0", "bad"))
    publish_version(folder, tmp_path)
    change(row("p1", "also bad"))
    publish = Corpus.publish

    def roll_back_and_publish(corpus: Corpus, after: int) -> None:
        manifest.rollback(folder, "i", 1)
        publish(corpus, after)

    own = {"id": "p1", "delete": True} if is_repeated else row("p2", "good")
    with monkeypatch.context() as patch, pytest.raises(PublishConflictError, match="run the same command again"):
        patch.setattr(Corpus, "publish", roll_back_and_publish)
        change(row("p1", "first") if is_repeated else own)
    assert change(own) == {"p0": "first"} | ({} if is_repeated else {"p1": "first", "p2": "good"})
    assert change(row("p3", "good"))["p0"] == "first"


def test_a_roll_back_replaces_what_an_update_publishes_meanwhile(
    folder: Store, tmp_path: Path, change, monkeypatch: pytest.MonkeyPatch
):
    change(row("p0", "bad"))
    publish_version(folder, tmp_path)
    publications = manifest.publications

    def update_after_reading(*own: Any) -> list[int]:
        numbers = publications(*own)
        for number in range(2):
            change(row(f"p{number}", "also bad"))
        return numbers

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "publications", update_after_reading)
        manifest.rollback(folder, "i", 1)
    assert change(row("p2", "good")) == {"p0": "first", "p1": "first", "p2": "good"}


def test_changes_on_top_of_a_roll_back_are_not_lost_where_one_repeats_what_was_rolled_back(
    folder: Store, tmp_path: Path, change
):
    change(row("p0", "new"))
    publish_version(folder, tmp_path)
    manifest.rollback(folder, "i", 1)
    change(row("p0", "new"))
    assert change(row("p1", "new")) == {"p0": "new", "p1": "new"}
    manifest.rollback(folder, "i", 1)  # to the same passages: what waits for `index` still waits
    assert change(row("p2", "new")) == {"p0": "new", "p1": "new", "p2": "new"}
    manifest.rollback(folder, "i", 2)
    assert change(row("p3", "new")) == {"p0": "new", "p1": "first", "p3": "new"}


@pytest.mark.parametrize("operation", ["compact", "refine:passage"])
def test_a_roll_back_holds_when_no_version_tells_of_it_but_the_live_one(
    folder: Store, tmp_path: Path, change, operation: str
):
    change(row("p0", "bad"))
    publish_version(folder, tmp_path)
    live = manifest.rollback(folder, "i", 1)
    manifest.publish(folder, replace(live, parent=live.version, operation=operation))
    collect(folder, "i", keep=1, grace_s=0)
    assert manifest.list_versions(folder, "i") == [4]
    assert change(row("p1", "good")) == {"p0": "first", "p1": "good"}


def test_a_roll_back_by_an_earlier_program_holds(folder: Store, tmp_path: Path, change):
    change(row("p0", "bad"))
    publish_version(folder, tmp_path)
    first = manifest.read(folder, "i", 1)
    manifest.publish(folder, replace(first, parent=2, operation=manifest.ROLLBACK))
    change(row("p1", "good"))
    assert change(row("p2", "good")) == {"p0": "first", "p1": "good", "p2": "good"}


def test_no_unreadable_version_but_the_live_one_stops_an_update(folder: Store, tmp_path: Path, change):
    for number in (1, 2):
        change(row("p0", f"text {number}"))
        publish_version(folder, tmp_path)
    manifest.rollback(folder, "i", 1)
    for number in (1, 2, 3):
        folder.write_bytes(paths.manifest("i", number), b"{")
    assert change(row("p1", "good"))["p0"] == "first"
    folder.write_bytes(paths.manifest("i", 4), b"{")
    with pytest.raises(StorageError, match=r"4\.json is not a manifest"):
        change(row("p2", "good"))


def test_of_two_updaters_the_slower_one_raises_and_the_faster_one_stays(tmp_path: Path, write: Write):
    store = Store(tmp_path / "store")
    make_corpus(store, write, {"a": "one"})
    mine, other = (write(f"{name}.jsonl", lines(row(name, "x"))) for name in ("mine", "other"))

    def be_slow(what: str, count: int, total: int) -> None:
        update(CONFIG, store, str(other))

    with pytest.raises(PublishConflictError, match="run the same command again"):
        update(CONFIG, store, str(mine), be_slow)
    assert {passage.id for passage in Corpus.open(store, "corpus")} == {"a", "other"}
    update(CONFIG, store, str(mine))
    assert {passage.id for passage in Corpus.open(store, "corpus")} == {"a", "mine", "other"}


def test_files_of_parts_go_to_an_object_store_several_at_once(tmp_path: Path, write: Write, monkeypatch, s3_server):
    monkeypatch.setenv("MVR_RAY_CACHE", str(tmp_path / "cache"))
    both = Barrier(2)

    def meet(moment: str, request: str) -> bool:
        """Hold the first file of changes until that of another part arrives."""
        if moment == "before" and ".changes.arrow" in request and not both.broken:
            both.wait(10)
        return True

    with s3_server.serve(s3_server.Script([], [])._replace(on_request=meet)) as root:
        store = Store(root)
        corpus = make_corpus(store, write, dict.fromkeys(NAMES, "one"), num_shards=2)
        ids = [next(name for name in NAMES if shard_of(name, 2) == shard) for shard in range(2)]
        steps: list[tuple[int, int]] = []
        changes = str(write("changes.jsonl", lines(*(row(name, "two") for name in ids))))
        update(CONFIG, store, changes, lambda what, *own: steps.append(own) if what == "parts written" else None)
        assert not both.broken and steps == [(1, 2), (2, 2)]
        now = Corpus.open(store, "corpus")
        assert {one.id: one.text for one in now} == {name: "two" if name in ids else "one" for name in NAMES}
        assert num_deltas(now) == 2 and now.digest != corpus.digest


def test_a_publication_that_was_misread_is_not_published_again(tmp_path: Path, write: Write, monkeypatch):
    """An update whose files vanish while it is published brings the corpus before it back; whole, or not at all."""
    store = Store(tmp_path / "store")
    make_corpus(store, write, {"a": "one"}, num_shards=1)
    changes = str(write("changes.jsonl", lines(row("a", "two"), row("b", "x"))))
    create, read = Store.create_once, Path.read_bytes

    def lose_a_part(self: Store, path: str, data: bytes) -> None:
        create(self, path, data)
        patch.setattr(Path, "read_bytes", lambda own: read(own)[: -9 if own.match("publications/1.json") else None])
        for file in json.loads(data)["parts"]:
            (tmp_path / "store/corpora/corpus" / file["file"]).unlink()

    with monkeypatch.context() as patch:
        patch.setattr(Store, "create_once", lose_a_part)
        with pytest.raises(StorageError, match=r"publications/1\.json is damaged"):
            update(CONFIG, store, changes)
    assert publications(store, "corpus") == [1, 2]


def test_of_two_updaters_at_the_same_moment_exactly_one_wins_on_every_kind_of_store(
    store: Store, write: Write, monkeypatch: pytest.MonkeyPatch
):
    make_corpus(store, write, {"a": "one"})
    files = [str(write(f"{name}.jsonl", lines(row(name, "x")))) for name in ("mine", "other")]
    together, create = Barrier(2), Store.create_once

    def create_together(self: Store, path: str, data: bytes) -> None:
        together.wait()
        create(self, path, data)

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(Store, "create_once", create_together)
        tries = [pool.submit(update, CONFIG, Store(store.root), file) for file in files]
        errors = [one.exception() for one in tries]
    [winner] = [at for at, error in enumerate(errors) if error is None]
    assert isinstance(errors[1 - winner], PublishConflictError)
    assert {passage.id for passage in Corpus.open(store, "corpus")} == {"a", ("mine", "other")[winner]}
    update(CONFIG, store, files[1 - winner])
    assert {passage.id for passage in Corpus.open(store, "corpus")} == {"a", "mine", "other"}


UPDATER = """
import os, sys, time
from pathlib import Path
from mvr_ray.config import PrepareConfig
from mvr_ray.errors import PublishConflictError
from mvr_ray.store.files import Store
from mvr_ray.store.update import update

create, ready = Store.create_once, Path(sys.argv[2]).parent
def create_together(self, path, data):
    (ready / f"{os.getpid()}.ready").touch()
    while len(list(ready.glob("*.ready"))) < 2:
        time.sleep(0.001)
    create(self, path, data)
Store.create_once = create_together
try:
    update(PrepareConfig(corpus="corpus", num_shards=3), Store(sys.argv[1]), sys.argv[2])
except PublishConflictError:
    sys.exit(3)
"""


@pytest.mark.chaos("two updaters publish at the same moment", "exactly one wins, the other raises; nothing is lost")
def test_of_two_processes_that_update_at_the_same_moment_exactly_one_wins(tmp_path: Path, write: Write):
    store = Store(tmp_path / "store")
    make_corpus(store, write, {"a": "one"})
    files = [write(f"{name}.jsonl", lines(row(name, "x"))) for name in ("mine", "other")]
    processes = [subprocess.Popen([sys.executable, "-c", UPDATER, store.root, str(file)]) for file in files]
    ends = [process.wait() for process in processes]
    assert sorted(ends) == [0, 3]
    assert {passage.id for passage in Corpus.open(store, "corpus")} == {"a", ("mine", "other")[ends.index(0)]}
    update(CONFIG, store, str(files[ends.index(3)]))
    assert {passage.id for passage in Corpus.open(store, "corpus")} == {"a", "mine", "other"}
    assert Corpus.open(store, "corpus").verify().damage == []
