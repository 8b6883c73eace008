"""Laws of passages and questions at rest."""

import hashlib
import json
import random
import resource
import threading
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prepared_corpus import empty_corpus

from mvr_ray.checksums import json_with_checksum
from mvr_ray.config import PrepareConfig, SourceConfig
from mvr_ray.errors import DataError, DigestError, MissingInputError, StorageError
from mvr_ray.store import local_files, paths
from mvr_ray.store.corpus import Corpus, CorpusFile, question_set, question_sets, shard_of
from mvr_ray.store.files import Store
from mvr_ray.store.parts import BATCH_ROWS, CorpusPart, difference, find_contents, write_passages
from mvr_ray.store.prepare import prepare
from mvr_ray.store.questions import copy_questions, read_questions, write_questions
from mvr_ray.types import Passage, Question

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = texts.filter(bool)
worded = texts.filter(str.strip)


def test_a_passages_shard_depends_on_its_id_alone_and_never_changes():
    assert [shard_of(name, 7) for name in ("", "a", "wiki:1", "ä")] == [
        int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") % 7
        for name in ("", "a", "wiki:1", "ä")
    ]
    counts = [sum(shard_of(str(i), 8) == shard for i in range(8000)) for shard in range(8)]
    assert all(880 < count < 1120 for count in counts)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(names, st.tuples(texts, texts), max_size=30), names)
def test_a_part_gives_back_its_passages_by_row_and_by_id(tmp_path: Path, content: dict, other: str):
    passages = [Passage(name, *content[name]) for name in sorted(content)]
    assert write_passages(tmp_path / "p.arrow", passages) == len(passages)
    part = CorpusPart(tmp_path / "p.arrow")
    assert part.passages() == passages
    assert part.passages(3, 7) == passages[3:7]
    assert part.ids() == [passage.id for passage in passages]
    for row, passage in enumerate(passages):
        assert part.row(passage.id) == row
        assert part.get(passage.id) == passage
    assert (part.get(other) is None) == (other not in content)


def test_a_part_of_several_batches_is_one_sequence(tmp_path: Path):
    passages = [Passage(f"{i:06d}", "t", str(i)) for i in range(2 * BATCH_ROWS + 3)]
    write_passages(tmp_path / "p.arrow", passages)
    part = CorpusPart(tmp_path / "p.arrow")
    assert len(part) == len(passages)
    assert part.passages(BATCH_ROWS - 2, 2 * BATCH_ROWS + 1) == passages[BATCH_ROWS - 2 : 2 * BATCH_ROWS + 1]
    for row in (0, BATCH_ROWS - 1, BATCH_ROWS, 2 * BATCH_ROWS + 2):
        assert part.row(passages[row].id) == row
    assert part.row("000000x") == -1


ROWS = 3 * BATCH_ROWS // 2
EDITS = st.dictionaries(st.integers(0, 2 * ROWS), st.sampled_from(["new", "fields", "gone"]), max_size=40)


@pytest.fixture(scope="module")
def base_part(tmp_path_factory) -> tuple[Path, dict[str, Passage]]:
    passages = {f"{2 * row:05d}": Passage(f"{2 * row:05d}", "t", str(row), (("n", row),)) for row in range(ROWS)}
    path = tmp_path_factory.mktemp("base") / "p.arrow"
    write_passages(path, passages.values(), {"n": "int"})
    return path, passages


def edited_part(base: tuple[Path, dict[str, Passage]], folder: Path, layers: Sequence[dict[int, str]], whole: bool):
    """A part with these edits, as files of changes beside the base or written whole, and its passages by id."""
    base_path, now = base
    folder.mkdir(exist_ok=True)
    files = []
    for edits in layers:
        upserts: dict[str, Passage] = {}
        for number, how in edits.items():
            name = f"{number:05d}"
            before = now.get(name, Passage(name, "t", "added", ()))
            if how != "gone":
                text = f"new in {len(files)}"
                upserts[name] = before._replace(**({"text": text} if how == "new" else {"fields": (("n", -1),)}))
        deletions = sorted({f"{number:05d}" for number in edits} & set(now) - set(upserts))
        now = {name: own for name, own in sorted((now | upserts).items()) if name not in deletions}
        files.append(folder / f"{folder.name}-changes-{len(files)}")
        write_passages(files[-1], [upserts[name] for name in sorted(upserts)], {"n": "int"}, deletions)
    if whole:
        write_passages(folder / "whole", now.values(), {"n": "int"})
        return CorpusPart(folder / "whole", fields={"n": "int"}), now
    return CorpusPart(base_path, *files, fields={"n": "int"}), now


@settings(max_examples=15, deadline=None)
@given(EDITS, EDITS, st.sampled_from(["whole", "beside", "over"]), st.randoms(use_true_random=False))
def test_a_part_with_changes_reads_as_if_written_whole_and_its_difference_is_returned(
    base_part, tmp_path_factory, edits, later, way, draw
):
    """Few changes of a batch are laid into it without a copy, many with one: forty of 6,144 rows are either."""
    folder = tmp_path_factory.mktemp("edited")
    if draw.random() < 0.3:
        edits = edits | dict.fromkeys(range(1, 400, draw.randint(1, 3)), "new")
    before, passages = edited_part(base_part, folder, [edits], False)
    assert (
        before.passages() == list(passages.values()) and before.ids() == list(passages) and len(before) == len(passages)
    )
    rows = sorted(draw.sample(range(len(before)), 50))
    assert before.take(rows) == [before.passages(row, row + 1)[0] for row in rows]
    assert [before.row(name) for name in passages][::97] == list(range(len(passages)))[::97]
    layers = [edits, later] if way == "over" else [later]
    after, others = edited_part(base_part, folder if way == "over" else folder / "after", layers, way == "whole")
    assert after.passages() == list(others.values())
    report = difference(before, after)
    contents = {name: passage[1:3] for name, passage in passages.items()}
    assert report.changed_rows == [
        row for row, passage in enumerate(others.values()) if contents.get(passage.id) != passage[1:3]
    ]
    assert report.deleted_ids == [name for name in passages if name not in others]
    lost_contents = {*contents.values()} - {passage[1:3] for passage in others.values()}
    queries = lost_contents | {passage[1:3] for passage in others.values()} - {*contents.values()}
    names = {
        name: content
        for file in (after.path, *after.change_paths)
        for name, content in find_contents(file, queries).items()
        if others.get(name, (None,) * 3)[1:3] == content
    }
    assert {*names.values()} == queries - lost_contents
    assert not find_contents(before.path, {("T", "in no part")})


def test_an_open_part_keeps_no_object_for_each_of_its_changes(base_part, tmp_path: Path):
    edited_part(base_part, tmp_path, [dict.fromkeys(range(0, ROWS, 2), "new")], False)
    tracemalloc.start()
    try:
        part = CorpusPart(base_part[0], *tmp_path.iterdir(), fields={"n": "int"})
        assert len(part) == ROWS and tracemalloc.get_traced_memory()[0] < 20 * ROWS // 2
    finally:
        tracemalloc.stop()


@st.composite
def questions(draw: st.DrawFn) -> Question:
    answers = tuple(draw(st.lists(texts, max_size=3)))
    starts = tuple(draw(st.integers(-1, 99)) for _ in answers) if draw(st.booleans()) else ()
    ids = st.lists(names, max_size=3).map(tuple)
    return Question(draw(names), draw(worded), answers, draw(ids), draw(ids), starts)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(questions(), max_size=10))
def test_questions_come_back_as_they_were(tmp_path: Path, rows: list[Question]):
    corpus = empty_corpus(Store(tmp_path))
    assert write_questions(corpus, "set", rows) == len(rows)
    assert read_questions(corpus, "set") == rows


def test_question_sets_work_on_every_kind_of_store(store: Store):
    corpus, other = empty_corpus(store), empty_corpus(store, "other")
    write_questions(corpus, "set", [Question("1", "why?")])
    write_questions(corpus, "set", [Question("2", "how?")])
    write_questions(other, "set", [Question("3", "who?")])
    assert read_questions(corpus, "set") == [Question("2", "how?")]
    assert read_questions(other, "set") == [Question("3", "who?")]
    write_questions(other, "more", [])
    assert (question_sets(corpus), question_sets(other)) == (["set"], ["more", "set"])


def test_wrong_questions_are_refused_and_the_old_set_stays(tmp_path: Path):
    corpus = empty_corpus(Store(tmp_path))
    write_questions(corpus, "set", [Question("1", "why?")])
    for wrong in (Question("", "x"), Question("1", " "), Question("1", "x", ("a",), (), (), (1, 2))):
        with pytest.raises(DataError, match="set"):
            write_questions(corpus, "set", [wrong])
    assert read_questions(corpus, "set") == [Question("1", "why?")]


def test_what_is_missing_names_the_command_and_what_there_is(tmp_path: Path):
    store = Store(tmp_path)
    with pytest.raises(MissingInputError, match="mvr-ray prepare CONFIG"):
        Corpus.open(store, "corpus")
    corpus = empty_corpus(store)
    with pytest.raises(MissingInputError, match="there are: none"):
        read_questions(corpus, "dev")
    write_questions(corpus, "train", [])
    with pytest.raises(MissingInputError, match="there are: train"):
        read_questions(corpus, "dev")


def test_a_corpus_is_found_by_its_digest_when_another_one_was_prepared_since(store: Store, write):
    def prepare_texts(*texts: str) -> Corpus:
        lines = "".join(f'{{"id": "{name}", "title": "t", "text": "{text}"}}\n' for name, text in zip("abc", texts))
        prepare(PrepareConfig(sources=[SourceConfig(path=str(write("p.jsonl", lines)))], num_shards=2), store)
        return Corpus.open(store, "corpus")

    first, second = prepare_texts("one"), prepare_texts("two", "three")
    assert list(Corpus.open(store, "corpus")) == list(second) != list(first)
    assert list(Corpus.open(store, "corpus", first.digest)) == [Passage("a", "t", "one")]
    with pytest.raises(MissingInputError, match=f"of digest {'f' * 32} not found.*{second.digest}"):
        Corpus.open(store, "corpus", "f" * 32)


def test_sets_of_an_earlier_program_are_found_with_a_corpus_of_that_program_alone(tmp_path: Path):
    store = Store(tmp_path)
    corpus = empty_corpus(store)
    write_questions(corpus, "set", [Question("1", "why?")])
    older = Store(tmp_path / "older")
    older.write_bytes("corpora/corpus/corpus.json", corpus.info.to_json())
    older.write_bytes("questions/set.arrow", store.read_bytes(set_file(corpus, "set")))
    assert read_questions(Corpus.open(older, "corpus"), "set") == [Question("1", "why?")]
    with pytest.raises(MissingInputError, match="there are: none"):
        read_questions(empty_corpus(older, "later"), "set")


def test_a_description_of_questions_that_names_no_corpus_is_of_the_one_that_it_lies_with(store: Store):
    corpus = empty_corpus(store)
    write_questions(corpus, "set", [Question("1", "why?")])
    fields = json.loads(store.read_bytes(path := paths.question_set("corpus", corpus.digest, "set")))
    first = {key: fields[key] for key in ("name", "file", "num_questions", "num_bytes", "sha256")}
    store.write_bytes(path, json.dumps(json_with_checksum(first)).encode())
    assert read_questions(corpus, "set") == [Question("1", "why?")]
    assert corpus.verify().damage == []


def set_file(corpus: Corpus, name: str) -> str:
    info = question_set(corpus, name)
    assert info is not None
    return f"{paths.corpus_dir(corpus.name)}/{info.file}"


ASKED = [
    Question(f"q{n}", f"which river is {n}?", (f"river {n}",), (f"p{n}",), ("p0",), (n,), (0.5, n)) for n in range(40)
]


def answers_after(corpus: Corpus, path: str, data: bytes) -> list[Question] | None:
    """The questions that are read where a file of theirs holds `data`; None where they are refused by name."""
    corpus.store.write_bytes(path, data)
    try:
        return read_questions(Corpus.open(corpus.store, "corpus"), "set")
    except StorageError as error:
        assert "mvr-ray prepare CONFIG" in str(error)
        return None


@pytest.mark.chaos(
    "a byte flipped or bytes cut off anywhere in a question set", "refused, never read as other questions"
)
def test_a_question_set_is_refused_wherever_a_byte_of_it_is_flipped_or_cut_off(tmp_path: Path, record_property):
    corpus = empty_corpus(Store(tmp_path))
    write_questions(corpus, "set", ASKED)
    rng, cases = random.Random(7), 0
    for path in (set_file(corpus, "set"), paths.question_set("corpus", corpus.digest, "set")):
        whole = corpus.store.read_bytes(path)
        corruptions = [whole[:at] for at in rng.sample(range(len(whole)), 30)]
        for at in rng.sample(range(len(whole)), 150):
            corruptions.append(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
        refusals = sum(answers_after(corpus, path, data) is None for data in corruptions)
        assert refusals == len(corruptions), "not one was read"
        corpus.store.write_bytes(path, corruptions[-1])
        assert [bad for bad, _ in corpus.verify().damage] == [path]
        assert answers_after(corpus, path, whole) == ASKED
        cases += refusals
    record_property("figures", f"{cases} damaged files, all refused by name")


def test_damaged_questions_of_an_earlier_program_are_refused_or_read_in_little_memory(tmp_path: Path):
    """No digest of them is known, so what they say about lengths is checked before anything is copied."""
    corpus = empty_corpus(Store(tmp_path))
    write_questions(corpus, "set", ASKED)
    whole = corpus.store.read_bytes(set_file(corpus, "set"))
    corpus.store.delete(paths.question_set("corpus", corpus.digest, "set"))
    path = f"{paths.questions_dir('corpus', corpus.digest)}/set.arrow"
    limits = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 30), limits[1]))
    try:
        assert answers_after(corpus, path, whole) == ASKED
        for at in range(0, len(whole), 7):
            answers_after(corpus, path, whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_set_that_two_corpora_share_is_one_file_and_another_set_of_its_name_leaves_it(store: Store):
    first, second = (Corpus(store, replace(empty_corpus(store).info, digest=digit * 32)) for digit in "12")
    write_questions(first, "set", ASKED)
    copy_questions(first, second, "set")
    assert set_file(first, "set") == set_file(second, "set")
    write_questions(second, "set", ASKED[:3])
    assert (read_questions(first, "set"), read_questions(second, "set")) == (ASKED, ASKED[:3])


@pytest.fixture
def corpus(store: Store, write) -> Corpus:
    lines = "".join(f'{{"id": "{i}", "title": "t{i % 3}", "text": "body {i}"}}\n' for i in range(50))
    prepare(PrepareConfig(sources=[SourceConfig(path=str(write("p.jsonl", lines)))], num_shards=3), store)
    return Corpus.open(store, "corpus")


def test_a_corpus_holds_every_passage_in_the_shard_of_its_id(corpus: Corpus):
    assert (corpus.num_passages, corpus.num_shards) == (50, 3)
    for shard in range(3):
        ids = corpus.part(shard).ids()
        assert ids == sorted(ids)
        assert all(shard_of(name, 3) == shard for name in ids)
    assert {passage.id for passage in corpus} == {str(i) for i in range(50)}
    assert corpus.get(["7", "none", "49"]) == {
        "7": Passage("7", "t1", "body 7"),
        "49": Passage("49", "t1", "body 49"),
    }


def test_a_corpus_finds_a_passage_once_however_many_searches_return_it(corpus: Corpus, monkeypatch):
    lookups, row = [], CorpusPart.row
    monkeypatch.setattr(CorpusPart, "row", lambda part, name: (lookups.append(name), row(part, name))[1])
    whole = {passage.id: passage for passage in corpus}
    for ids in (["7", "8", "none"], ["8", "49", "7"], ["none", "49"]):
        assert list(corpus.get(ids).items()) == [(name, whole[name]) for name in ids if name in whole]
    assert sorted(lookups) == ["49", "7", "8", "none"]


@pytest.mark.chaos("a byte flipped in a passage's text", "refused with its file, never shown")
def test_a_part_with_a_flipped_byte_in_a_text_is_never_opened(corpus: Corpus):
    path = f"{paths.corpus_dir('corpus')}/{corpus.info.parts[1].file}"
    whole = corpus.store.read_bytes(path)
    at = whole.index(b"body ") + 1
    corpus.part(1)
    corpus.store.write_bytes(path, whole[:at] + b"u" + whole[at + 1 :])
    again = Corpus.open(corpus.store, "corpus")
    with pytest.raises(DigestError, match=r"part 1 of corpus 'corpus' is damaged .*mvr-ray prepare CONFIG"):
        again.part(1)
    with pytest.raises(DigestError):
        again.get([str(i) for i in range(50)])
    assert [bad for bad, _ in again.verify().damage] == [path]
    corpus.store.write_bytes(path, whole)
    assert Corpus.open(corpus.store, "corpus").part(1).ids() == corpus.part(1).ids()


def test_a_corpus_that_was_collected_while_it_was_open_says_so(corpus: Corpus):
    """Preparing again would not bring it back, and would replace later changes."""
    store, part = corpus.store, corpus.info.parts[0]
    store.delete(f"{paths.corpus_dir(corpus.name)}/{part.file}")
    with pytest.raises(StorageError, match=r"part 0 .* is missing or cut short .*mvr-ray prepare CONFIG"):
        Corpus.open(store, corpus.name).part(0)
    store.delete(paths.corpus_version(corpus.name, corpus.digest))
    with pytest.raises(StorageError, match=rf"{corpus.digest} was collected .*; close the index, and the newest"):
        Corpus.open(store, corpus.name).part(0)


def test_a_part_is_read_once_in_a_process_however_often_its_corpus_is_opened(corpus: Corpus, monkeypatch):
    read = []

    def file(path):
        return path, path.stat().st_ino, path.stat().st_mtime_ns

    sha256_of = local_files.sha256_of
    monkeypatch.setattr(local_files, "sha256_of", lambda path: (read.append(file(path)), sha256_of(path))[1])
    monkeypatch.setattr(local_files, "_DIGESTS", local_files.OrderedDict())
    monkeypatch.setattr(local_files, "SETTLED_NS", -1)
    for _ in range(5):
        other = Corpus.open(corpus.store, "corpus")
        assert sum(len(other.part(shard)) for shard in range(3)) == 50
    assert len(read) == len(set(read)), "copies of what is very young in an object store are fetched anew"
    assert not corpus.store.is_local or len(read) == 3


def test_parts_of_an_object_store_are_opened_side_by_side(corpus: Corpus, monkeypatch):
    at_once, open_file = threading.Barrier(1 if corpus.store.is_local else 3), Corpus.open_file

    def open_at_once(own: Corpus, what: str, info: CorpusFile) -> Path:
        at_once.wait(30)
        return open_file(own, what, info)

    monkeypatch.setattr(Corpus, "open_file", open_at_once)
    assert len(corpus.get(map(str, range(60)))) == 50


def test_a_publication_in_the_place_of_another_is_damage(corpus: Corpus):
    store, first, number = corpus.store, corpus.info, corpus.number
    first_path = paths.corpus_publication("corpus", number)
    second = replace(first, sources=first.sources * 2)
    Corpus(store, second).publish(after=number)
    assert Corpus.open(store, "corpus").info == second
    path = paths.corpus_publication("corpus", number + 1)
    for data in (store.read_bytes(first_path), first.to_json()):
        store.write_bytes(path, data)
        with pytest.raises(StorageError, match=rf"publications/{number + 1}\.json is damaged \(it is publication"):
            Corpus.open(store, "corpus")
    store.write_bytes(first_path, first.to_json())  # as earlier programs did
    assert Corpus.open(store, "corpus").info == first
    store.write_bytes(path, second.to_json(number + 1))
    assert Corpus.open(store, "corpus").info == second


def test_damage_is_named(corpus: Corpus):
    assert corpus.verify().damage == []
    path = f"{paths.corpus_dir('corpus')}/{corpus.info.parts[1].file}"
    data = corpus.store.read_bytes(path)
    corpus.store.write_bytes(path, data[:-1] + b"X")
    assert corpus.verify().damage == [(path, f"has another sha256 than {corpus.info.parts[1].sha256}")]
    corpus.store.write_bytes(path, data[:-1])
    with pytest.raises(StorageError, match=r"part 1 .* cut short"):
        Corpus.open(corpus.store, "corpus").part(1)
    for bad in (b"{", b"[]", b'{"format_version": 9}', b'{"format_version": 1}', b'{"parts": 5}'):
        corpus.store.write_bytes(paths.corpus_publication("corpus", 1), bad)
        with pytest.raises(StorageError, match=r"publications/1\.json"):
            Corpus.open(corpus.store, "corpus")


def test_a_description_without_a_checksum_names_its_invalid_fields_in_one_line(corpus: Corpus):
    path = paths.question_set("corpus", corpus.digest, "dev")
    corpus.store.write_bytes(path, b'{"format_version": 1, "name": 3}')
    with pytest.raises(StorageError) as error:
        question_set(corpus, "dev")
    message = str(error.value)
    assert "name: Input should be a valid string" in message and "sha256: Field required" in message
    assert message.startswith(corpus.store.where(path)) and message.endswith("run `mvr-ray prepare CONFIG` again")
    assert "\n" not in message and "pydantic" not in message
