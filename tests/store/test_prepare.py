"""Checks the laws of prepare: every row is accounted for, the same input gives the same bytes.

The old corpus stays until the new one is whole.
"""

import itertools
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from drafts import describe, make_shard
from prepared_corpus import only_corpus

from mvr_ray.config import PrepareConfig, SourceConfig, SplitConfig, load_run
from mvr_ray.errors import ConfigError, DataError, MissingInputError, RowsLostError
from mvr_ray.store import manifest, paths
from mvr_ray.store.chunks import word_spans
from mvr_ray.store.corpus import Corpus, publications
from mvr_ray.store.files import Store
from mvr_ray.store.formats.records import NUMBERED_ROWS
from mvr_ray.store.formats.sources import read_source
from mvr_ray.store.formats.text_folder import text_files
from mvr_ray.store.gc import collect, collect_corpus
from mvr_ray.store.prepare import prepare
from mvr_ray.store.questions import QUESTION_SCHEMA, carry_to_chunks, only_with, read_questions, write_question_file
from mvr_ray.store.sampling import draw, hash_rank
from mvr_ray.store.shard_spill import ShardSpill
from mvr_ray.types import Question

Write = Callable[[str, str | bytes], Path]


def lines(*rows: dict) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def config(path: Path, **more: object) -> PrepareConfig:
    return PrepareConfig(sources=[SourceConfig(path=str(path), questions="q")], **more)


def passage(number: int, text: str = "") -> dict:
    return {"id": f"p{number}", "title": f"t{number % 7}", "text": text or f"body of {number}"}


def question(number: int, *positives: int, **more: object) -> dict:
    return {"id": f"q{number}", "question": "why?", "positive_ids": [f"p{i}" for i in positives], **more}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_everything_read_is_written_and_counted(write: Write, store: Store):
    path = write("rows.jsonl", lines(*map(passage, range(40)), question(1, 3), question(2)))
    calls = []
    report = prepare(config(path, num_shards=3), store, lambda *args: calls.append(args))
    assert (report.passages_read, report.passages_written, report.parts) == (40, 40, 3)
    assert report.questions == {"q": 2}
    corpus = Corpus.open(store, "corpus")
    assert (corpus.num_passages, corpus.digest) == (40, report.digest)
    assert corpus.info.sources[0].num_bytes == path.stat().st_size
    assert corpus.info.questions == {"q": 2}
    assert {what for what, _, _ in calls} == {"rows read", "parts written"}
    assert read_questions(only_corpus(store), "q")[0] == Question("q1", "why?", (), ("p3",))
    assert corpus.verify().damage == []


@pytest.mark.parametrize(("settings", "times"), [({}, 1), ({"max_passages": 20}, 3), ({"chunk_words": 5}, 2)])
def test_passages_that_stay_as_they_are_are_sorted_once(write: Write, tmp_path: Path, monkeypatch, settings, times):
    sorts, unique = [], ShardSpill.unique
    monkeypatch.setattr(ShardSpill, "unique", lambda spill, shard: (sorts.append(shard), unique(spill, shard))[1])
    path, steps = write("rows.jsonl", lines(*map(passage, range(40)), question(1, 3))), []
    prepare(config(path, num_shards=3, **settings), Store(str(tmp_path / "store")), lambda *args: steps.append(args))
    assert sorted(sorts) == sorted(times * [0, 1, 2])
    assert [count for what, count, _ in steps if what == "parts written"] == [1, 2, 3]


def test_each_file_of_a_folder_is_described_by_its_path_there_and_the_folder_is_listed_a_few_times(
    write: Write, store: Store, monkeypatch: pytest.MonkeyPatch
):
    names = ["a.md", *(f"deep/{number:02}.md" for number in range(20))]
    folder, *_ = (write(f"notes/{name}", f"Text of {name}.\n").parent for name in names)
    listings: list[Path] = []

    def list_files(folder: Path) -> list[Path]:
        listings.append(folder)
        return text_files(folder)

    monkeypatch.setattr("mvr_ray.store.formats.sources.text_files", list_files)
    prepare(PrepareConfig(sources=[SourceConfig(path=f"{folder}/")]), store)
    described_files = [(one.path, one.format) for one in Corpus.open(store, "corpus").info.sources]
    assert described_files == [(f"{folder}/{name}", "text") for name in names]
    assert len(listings) < 10


def test_the_same_rows_in_any_order_give_the_same_parts_and_the_same_run_the_same_bytes(write: Write, tmp_path: Path):
    rows = [passage(number) for number in range(50)]
    one, other = write("one.jsonl", lines(*rows)), write("other.jsonl", lines(*reversed(rows)))
    reports = [prepare(config(path), Store(tmp_path / name)) for name, path in (("a", one), ("b", one), ("c", other))]
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")
    assert reports[0].digest == reports[2].digest
    parts = [{k: v for k, v in snapshot(tmp_path / name).items() if "part-" in k} for name in "ac"]
    assert parts[0] == parts[1]


def test_sources_without_a_passage_are_named_with_what_they_hold_and_the_corpus_stays(write: Write, tmp_path: Path):
    store = Store(tmp_path / "store")
    prepare(config(write("rows.jsonl", lines(*map(passage, range(4))))), store)
    before = snapshot(tmp_path / "store")
    only = write("only.jsonl", lines(question(1), question(2), {"id": "p1", "text": " "}))
    share = SourceConfig(path=str(write("few.jsonl", lines(passage(1)))), share=1e-9)
    other = SourceConfig(path=str(write("other.jsonl", lines(passage(1)))), passages=False)
    with pytest.raises(DataError) as refusal:
        prepare(PrepareConfig(sources=[SourceConfig(path=str(only)), share, other], max_bad_rows=1), store)
    assert str(refusal.value).replace(f"{only.parent}/", "") == (
        "prepare: the sources give no passage: only.jsonl (format jsonl) holds 0 passages, 2 questions, 1 bad row; "
        "few.jsonl (format jsonl) holds 1 passage (share: 1e-09), 0 questions, 0 bad rows; "
        "other.jsonl (format jsonl) holds 1 passage (passages: false), 0 questions, 0 bad rows. "
        "Nothing was changed; add a source with passages to prepare.sources"
    )
    assert snapshot(tmp_path / "store") == before


def test_bad_rows_stop_the_stage_with_file_and_line_unless_allowed(write: Write, tmp_path: Path):
    rows = [passage(0), passage(1), {"id": "p2", "text": " "}, passage(1, "again"), question(1, 9), question(2, 0), {}]
    path = write("rows.jsonl", lines(*rows, question(2, 1)))
    store = Store(tmp_path / "store")
    with pytest.raises(DataError, match=r"1 bad row, more than prepare.max_bad_rows=0: .*rows\.jsonl:3: text is empty"):
        prepare(config(path), store)
    assert not store.exists(paths.corpus_dir("corpus"))
    with pytest.raises(DataError, match="max_bad_rows=4"):
        prepare(config(path, max_bad_rows=4), store)
    report = prepare(config(path, max_bad_rows=5), store)
    args = [str(row).partition("/sources/")[2].partition(" already occurs")[0] for row in report.bad_rows]
    assert args == [
        "rows.jsonl:3: text is empty",
        f"rows.jsonl:7: id is missing; name its column in the source's fields: {{id: NAME}}; {NUMBERED_ROWS}",
        "rows.jsonl:8: question id 'q2'",
        "rows.jsonl:4: passage id 'p1'",
        "rows.jsonl:5: positive 'p9' of question 'q1' names no passage of the corpus",
    ]
    assert (report.passages_read, report.passages_written) == (3, 2)
    assert Corpus.open(store, "corpus").get(["p1"])["p1"].text == "body of 1"
    assert [q.id for q in read_questions(only_corpus(store), "q")] == ["q2"]


@pytest.mark.parametrize("name", ["p.csv", "p.tsv"])
def test_every_row_that_an_open_quote_swallows_counts_as_a_bad_row(write: Write, store: Store, name: str):
    rows = ["id,title,text", *(f"{number},t,a text" for number in range(100))]
    rows[3] = '2,t,"a text'
    path = write(name, "\n".join(rows).replace(",", "," if name == "p.csv" else "\t") + "\n")
    with pytest.raises(DataError, match=r"98 bad rows, more than prepare\.max_bad_rows=97: .*\.[ct]sv:4: "):
        prepare(config(path, max_bad_rows=97), store)
    report = prepare(config(path, max_bad_rows=98), store)
    assert (report.passages_read, len(report.bad_rows)) == (2, 98)


def test_repeats_in_training_files_are_kept_once_and_conflicts_are_bad(write: Write, tmp_path: Path):
    def row(text: str) -> dict:
        ctx = {"title": "T", "text": text, "passage_id": "1"}
        negative = {"title": "L", "text": "lost", "passage_id": "2"}
        return {"question": "q", "answers": ["same"], "positive_ctxs": [ctx], "hard_negative_ctxs": [negative]}

    report = prepare(config(write("a.json", json.dumps([row("same"), row("same")]))), Store(tmp_path / "a"))
    assert (report.passages_read, report.passages_written, report.duplicates) == (4, 2, 2)
    assert read_questions(only_corpus(Store(tmp_path / "a")), "q")[0].answer_starts == (0,)
    with pytest.raises(DataError, match="passage id '1' already occurs"):
        prepare(config(write("b.json", json.dumps([row("same"), row("other")]))), Store(tmp_path / "b"))


def test_hard_negatives_that_name_no_passage_are_dropped_and_counted(write: Write, tmp_path: Path):
    path = write("r.jsonl", lines(passage(0), passage(1), question(1, 0, hard_negative_ids=["p1", "p8", "p9"])))
    report = prepare(config(path), Store(tmp_path))
    assert report.hard_negatives_dropped == 2
    assert read_questions(only_corpus(Store(tmp_path)), "q")[0].hard_negative_ids == ("p1",)


def test_limits_keep_gold_first_by_draws_that_do_not_depend_on_order(write: Write, tmp_path: Path):
    rows = [passage(number) for number in range(60)] + [question(number, number) for number in range(20)]
    digests = set()
    for name, order in (("a", rows), ("b", rows[::-1])):
        path, store = write(f"{name}.jsonl", lines(*order)), Store(tmp_path / name)
        report = prepare(config(path, max_passages=15, max_questions=5), store)
        question_ids = {q.id for q in read_questions(only_corpus(store), "q")}
        assert question_ids == draw([f"q{number}" for number in range(20)], 5, "questions")
        ids = {p.id for p in Corpus.open(store, "corpus")}
        assert len(ids) == 15
        assert {f"p{q[1:]}" for q in question_ids} <= ids
        assert (report.passages_not_drawn, report.questions_not_drawn) == (45, 15)
        digests.add(report.digest)
    assert len(digests) == 1


def test_questions_without_a_drawn_gold_passage_go_and_are_counted(write: Write, tmp_path: Path):
    rows = [passage(number) for number in range(10)] + [question(number, number) for number in range(10)]
    report = prepare(config(write("r.jsonl", lines(*rows, question(99))), max_passages=4), Store(tmp_path))
    ids = {p.id for p in Corpus.open(Store(tmp_path), "corpus")}
    questions = read_questions(only_corpus(Store(tmp_path)), "q")
    assert len(questions) == 5
    assert {p for q in questions for p in q.positive_ids} == ids
    assert report.questions_not_drawn == 6


def test_a_share_of_a_source_is_whole_articles_with_their_questions_and_the_rest_is_counted(
    write: Write, tmp_path: Path
):
    path = write("rows.jsonl", lines(*map(passage, range(70)), *(question(n, n, (n + 1) % 70) for n in range(70))))

    def take(share: float) -> set[str]:
        cfg = PrepareConfig(sources=[SourceConfig(path=str(path), questions="q", share=share)])
        store = Store(str(tmp_path / str(share)))
        report = prepare(cfg, store)
        passages = {one.id: one.title for one in Corpus.open(store, "corpus")}
        assert report.passages_read == 70 == report.passages_written + report.passages_not_drawn
        assert len(passages) == report.passages_written == 10 * len(set(passages.values()))
        positives = {one.id: one.positive_ids for one in read_questions(only_corpus(store), "q")}
        pairs = ((n, (f"p{n}", f"p{(n + 1) % 70}")) for n in range(70))
        assert positives == {f"q{n}": tuple(filter(passages.get, pair)) for n, pair in pairs if pair[0] in passages}
        assert report.questions_not_drawn == 70 - len(passages)
        return set(passages)

    assert set() < take(0.4) < take(0.8) < take(1.0)


@pytest.mark.parametrize("order", [1, -1])
def test_a_share_leaves_out_no_question_of_another_source_that_gives_the_passage(
    write: Write, store: Store, order: int
):
    """As in the training and dev files of DPR, whose contexts are the same passages in part."""

    def training_row(number: int) -> dict:
        context = {"title": f"t{number}", "text": f"body {number}", "passage_id": number}
        return {"question": f"who is {number}?", "answers": [], "positive_ctxs": [context]}

    train = str(write("train.json", json.dumps([training_row(number) for number in range(40)])))
    dev = str(write("dev.json", json.dumps([training_row(number) for number in range(20, 60)])))
    sources = [SourceConfig(path=train, questions="train", share=0.3), SourceConfig(path=dev, questions="dev")]
    report = prepare(PrepareConfig(sources=sources[::order]), store)
    sample = {str(number) for number in range(40) if hash_rank(f"t{number}", "source") < 0.3 * 2**64}
    assert {passage.id for passage in Corpus.open(store, "corpus")} == sample | set(map(str, range(20, 60)))
    positives = {question.positive_ids[0] for question in read_questions(Corpus.open(store, "corpus"), "train")}
    assert positives == sample and 0 < len(sample) < 20
    assert report.questions == {"train": len(sample), "dev": 40}
    assert report.questions_not_drawn == 40 - len(sample)
    assert report.passages_read == report.passages_written + report.duplicates + report.passages_not_drawn


def test_chunks_carry_answers_and_positives(write: Write, tmp_path: Path):
    text = " ".join(f"w{i}" for i in range(250))
    answers = {"answers": ["w120", "w240 w241"], "answer_starts": [text.index("w120"), text.index("w240")]}
    rows = [passage(0, text), passage(1), question(1, 0, hard_negative_ids=["p1"], **answers)]
    report = prepare(config(write("r.jsonl", lines(*rows)), chunk_words=100), Store(tmp_path))
    corpus = Corpus.open(Store(tmp_path), "corpus")
    assert sorted(p.id for p in corpus) == ["p0#0", "p0#1", "p0#2", "p1#0"]
    assert (report.passages_read, report.chunks_gained, report.passages_written) == (2, 2, 4)
    (actual,) = read_questions(only_corpus(Store(tmp_path)), "q")
    assert actual.positive_ids == ("p0#1", "p0#2")
    assert actual.hard_negative_ids == ("p1#0",)
    assert actual.answer_starts[1] == -1
    assert corpus.get(["p0#1"])["p0#1"].text.startswith("w120", actual.answer_starts[0])


def test_chunks_of_scripts_without_spaces_count_two_characters_as_a_word(write: Write, tmp_path: Path):
    texts = [
        "长江是中国最长的河流，全长6300公里。它流入东海。" * 9,
        "กรุงเทพมหานครเป็นเมืองหลวงของประเทศไทย" * 9,
        "The 東京タワー (Tokyo Tower) is 333 m high. " * 9,
    ]
    path = write("r.jsonl", lines(*(passage(number, text) for number, text in enumerate(texts))))
    prepare(config(path, chunk_words=20), Store(tmp_path))
    pieces = {one.id: one.text for one in Corpus.open(Store(tmp_path), "corpus")}
    for number, text in enumerate(texts):
        own = [pieces[f"p{number}#{n}"] for n in range(sum(name.startswith(f"p{number}#") for name in pieces))]
        assert "".join("".join(own).split()) == "".join(text.split())
        assert len(own) > 4 and all(len(piece) < 110 for piece in own)


@pytest.mark.parametrize("chunk_words", [0, 2])
def test_grades_of_judgements_are_stored_by_passage_and_leave_with_it(write: Write, tmp_path: Path, chunk_words: int):
    write("beir/corpus.jsonl", lines(*({"_id": f"d{n}", "text": "two words and two more"[: 9 * n]} for n in (1, 2, 3))))
    write("beir/queries.jsonl", lines({"_id": "graded", "text": "why?"}, {"_id": "plain", "text": "who?"}))
    folder = write("beir/qrels/test.tsv", "graded\td1\t1\ngraded\td2\t3\ngraded\td3\t0\nplain\td3\t1\n").parent.parent
    prepare(config(folder, chunk_words=chunk_words), Store(tmp_path))
    question, plain = both = read_questions(only_corpus(Store(tmp_path)), "q")
    suffix = "#0" if chunk_words else ""
    assert question.grade_of == {f"d1{suffix}": 1, f"d2{suffix}": 3}
    assert (plain.grade_of, plain.positive_grades) == ({f"d3{suffix}": 1}, ())
    [question, _] = only_with(lambda name: not name.startswith("d1"), both)
    assert question.grade_of == {f"d2{suffix}": 3}


def test_a_set_without_grades_is_the_file_that_earlier_programs_wrote_and_read(tmp_path: Path):
    path = tmp_path / "set.arrow"
    for grades, columns in (((), 7), ((2,), 8)):
        write_question_file(path, "q", [Question("q1", "why?", (), ("p1",), positive_grades=grades)])
        assert pa.ipc.open_file(path).schema.equals(pa.schema(list(QUESTION_SCHEMA)[:columns]))
    with pytest.raises(DataError, match="'q1' has 1 positive id and 2 grades"):
        write_question_file(path, "q", [Question("q1", "why?", (), ("p1",), positive_grades=(1, 2))])


def test_splits_are_stored_beside_their_source(write: Write, tmp_path: Path):
    rows = [passage(number) for number in range(70)] + [question(number, number) for number in range(70)]
    cfg = config(write("r.jsonl", lines(*rows)), splits=[SplitConfig(source="q")])
    report = prepare(cfg, Store(tmp_path))
    names = ["q_gate", "q_known", "q_other", "q_unseen"]
    sets = {name: read_questions(only_corpus(Store(tmp_path)), name) for name in names}
    assert sum(map(len, sets.values())) == report.questions["q"] == 70
    titles = {p.id: p.title for p in Corpus.open(Store(tmp_path), "corpus")}
    unseen = {titles[q.positive_ids[0]] for q in sets["q_unseen"]}
    assert unseen
    assert unseen.isdisjoint(titles[q.positive_ids[0]] for n in names[:3] for q in sets[n])


@pytest.mark.parametrize("chunk_words", [0, 2])
def test_a_passage_without_a_title_is_an_article_of_its_own_in_a_split(write: Write, store: Store, chunk_words: int):
    texts = [{"id": f"p{number}", "text": f"one{number} two{number} three{number}"} for number in range(30)]
    answers = [f"{word}{number}" for number in range(30) for word in ("one", "three")]
    rows = [question(at, at // 2, answers=[answer]) for at, answer in enumerate(answers)]
    path = write("r.jsonl", lines(*texts, *rows))
    prepare(config(path, splits=[SplitConfig(source="q")], chunk_words=chunk_words), store)
    names = ("q_unseen", "q_gate", "q_known", "q_other")
    unseen, *others = ({one.id for one in read_questions(only_corpus(store), name)} for name in names)
    assert len(unseen) == 18  # a third of 30 texts, one of which is the gate's
    assert all(len({f"q{at}", f"q{at + 1}"} & unseen) != 1 for at in range(0, 60, 2))
    assert len(unseen.union(*others)) == 60


def test_a_question_of_a_split_is_of_the_article_of_its_first_positive(write: Write, store: Store):
    texts = [{**passage(number), "title": f"t{number}"} for number in range(40)]
    path = write("r.jsonl", lines(*texts, *(question(number, number, 0) for number in range(40))))
    prepare(config(path, splits=[SplitConfig(source="q", gate_share=0)]), store)
    assert len(read_questions(only_corpus(store), "q_unseen")) == 13  # a third of 40 articles


def test_the_run_file_of_wikipedia_prepares_files_as_dpr_publishes_them(store: Store, tmp_path: Path):
    """The ids of DPR's training rows are those of psgs_w100.tsv; DPR's own configuration gives both a prefix."""
    cfg = load_run(Path(__file__).resolve().parents[2] / "configs" / "wikipedia.yaml").prepare
    sources = [own.model_copy(update={"path": str(tmp_path / Path(own.path).name)}) for own in cfg.sources]
    contexts = [
        {"title": "Aaron", "text": f"body {number}", "score": 1, "passage_id": f"{number}"} for number in (1, 2)
    ]
    row = {"dataset": "nq", "question": "who?", "answers": ["one"], "negative_ctxs": []}
    row |= {"positive_ctxs": contexts[:1], "hard_negative_ctxs": contexts[1:]}
    texts = "".join(f'{number}\t"body {number}"\tAaron\n' for number in (1, 2))
    (tmp_path / "psgs_w100.tsv").write_text(f"id\ttext\ttitle\n{texts}")
    (tmp_path / "biencoder-nq-train.json").write_text(json.dumps([row] * 200))
    (tmp_path / "nq-dev.qas.csv").write_text("who?\t['one']\n")
    prepare(cfg.model_copy(update={"sources": sources}), store)
    for own in read_questions(only_corpus(store), "nq_train"):
        assert (own.positive_ids, own.hard_negative_ids) == (("wiki:1",), ("wiki:2",))


def test_settings_that_cannot_work_are_refused_before_reading(write: Write, tmp_path: Path):
    path = write("r.jsonl", lines(passage(0)))
    store = Store(tmp_path / "store")
    for cfg, message in (
        (PrepareConfig(), "sources is empty"),
        (PrepareConfig(sources=[SourceConfig(path=str(path), passages=False)]), "passages: true"),
        (config(path, splits=[SplitConfig(source="x")]), "no question set 'x'; there are: q"),
        (config(path, splits=[SplitConfig(source="q", known_share=0.8, gate_share=0.3)]), "more than 1 together"),
    ):
        with pytest.raises(ConfigError, match=message):
            prepare(cfg, store)
    with pytest.raises(MissingInputError, match=r"none\.json"):
        prepare(config(tmp_path / "none.json"), store)


def test_a_corpus_that_was_replaced_stays_for_its_readers_and_is_collected_once_it_is_old(write: Write, store: Store):
    corpora = []
    for number in range(3):
        prepare(config(write("r.jsonl", lines(passage(number))), num_shards=1), store)
        corpora.append(Corpus.open(store, "corpus"))
    assert [[p.id for p in corpus] for corpus in corpora] == [["p0"], ["p1"], ["p2"]]
    assert [corpus.number for corpus in corpora] == publications(store, "corpus") == [1, 2, 3]
    assert part_files(store) == {part.file for corpus in corpora for part in corpus.info.parts}
    assert collect_corpus(store, "corpus") == []  # they are young
    collect_corpus(store, "corpus", grace_s=0)
    assert part_files(store) == {part.file for part in corpora[2].info.parts}
    assert store.list(paths.corpus_dir("corpus", "versions")) == [f"{corpora[2].digest}.json"]


def part_files(store: Store) -> set[str]:
    return {name for name in store.list(paths.corpus_dir("corpus")) if name.endswith(".arrow")}


def test_a_corpus_that_an_index_version_names_stays_with_its_questions_until_that_version_goes(
    write: Write, tmp_path: Path
):
    store = Store(tmp_path / "store")
    for number in range(4):
        rows = write("r.jsonl", lines(passage(1), passage(number + 2), question(number, 1)))
        digest = prepare(config(rows, num_shards=2), store).digest
        if number < 2:
            entry = make_shard(store, tmp_path / str(number), bytes([number]) * 9)
            manifest.publish(store, replace(describe([entry], parent=number), corpus_digest=digest))
    for number in range(2):
        version = manifest.read(store, "i", number + 1)
        corpus = Corpus.open(store, "corpus", version.corpus_digest)
        assert {one.id for one in corpus} == {"p1", f"p{number + 2}"}
        assert [question.id for question in read_questions(corpus, "q")] == [f"q{number}"]
    first = manifest.read(store, "i", 1).corpus_digest
    removals = collect(store, "i", keep=1, grace_s=0)
    assert paths.corpus_version("corpus", first) in removals
    with pytest.raises(MissingInputError, match=first):
        Corpus.open(store, "corpus", first)
    live = Corpus.open(store, "corpus", manifest.read(store, "i").corpus_digest)
    assert {one.id for one in live} == {"p1", "p3"}
    last = Corpus.open(store, "corpus")
    assert part_files(store) == {part.file for corpus in (live, last) for part in corpus.info.parts}


def test_a_lost_row_is_an_error(write: Write, tmp_path: Path):
    def lose_a_file(what: str, number: int, total: int) -> None:
        if what == "parts written" and number == 1:
            (rows_file,) = (tmp_path / "store" / ".scratch").glob("*/read/1.jsonl")
            rows_file.unlink()

    path = write("r.jsonl", lines(*map(passage, range(20))))
    with pytest.raises(RowsLostError, match=r"20 passages read, \d+ sorted"):
        prepare(config(path, num_shards=2), Store(tmp_path / "store"), lose_a_file)


def stop_at_sync(cfg: PrepareConfig, store: Store, at: int, stop: str) -> int:
    """The exit code of a fork that prepares and gets a signal at its call number `at` of fsync."""
    child = os.fork()
    if not child:
        code, calls = 1, itertools.count(1)
        try:
            os.fsync = lambda _: next(calls) == at and os.kill(os.getpid(), getattr(signal, stop))
            prepare(cfg, store)
            code = 0
        except KeyboardInterrupt:
            code = signal.SIGINT
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("stop", ["SIGKILL", "SIGINT"])
@pytest.mark.parametrize("at", [1, 5, 9, 12])
def test_stopped_anywhere_the_corpus_stays_whole_and_the_same_command_finishes(
    write: Write, tmp_path: Path, stop: str, at: int
):
    old, new = write("old.jsonl", lines(*map(passage, range(20)))), write("new.jsonl", lines(*map(passage, range(30))))
    store = Store(tmp_path / "store")
    before = prepare(config(old, num_shards=2), store)
    assert (
        stop_at_sync(config(new, num_shards=2), store, at, stop)
        == {"SIGKILL": -signal.SIGKILL, "SIGINT": signal.SIGINT}[stop]
    )
    corpus = Corpus.open(store, "corpus")
    assert corpus.verify().damage == []
    assert corpus.digest == before.digest
    assert sum(1 for _ in corpus) == 20
    if stop == "SIGINT":
        assert store.list(".scratch") == []
    after = prepare(config(new, num_shards=2), store)
    assert Corpus.open(store, "corpus").digest == after.digest
    assert Corpus.open(store, "corpus").num_passages == 30


@pytest.mark.data
def test_real_squad_is_conserved_with_every_answer_in_its_place(data_dir: Path, squad_dev: dict, tmp_path: Path):
    source = SourceConfig(path=str(data_dir / "squad" / "dev-v1.1.json.gz"), questions="dev")
    store = Store(tmp_path)
    report = prepare(PrepareConfig(sources=[source], splits=[SplitConfig(source="dev")]), store)
    assert (report.passages_read, report.passages_written, report.questions["dev"]) == (1530, 1530, 7794)
    assert sum(report.questions[f"dev_{name}"] for name in ("known", "gate", "other", "unseen")) == 7794
    corpus = Corpus.open(store, "corpus")
    texts = sorted(p["context"] for article in squad_dev["data"] for p in article["paragraphs"])
    assert sorted(p.text for p in corpus) == texts
    assert len({passage.title for passage in corpus}) == 36
    questions = read_questions(only_corpus(store), "dev")
    gold = corpus.get({q.positive_ids[0] for q in questions})
    for q in questions:
        text = gold[q.positive_ids[0]].text
        assert all(text.startswith(answer, start) for answer, start in zip(q.answers, q.answer_starts, strict=True))


@pytest.mark.data
def test_real_squad_in_chunks_keeps_every_word_and_nearly_every_answer(data_dir: Path, tmp_path: Path):
    source = SourceConfig(path=str(data_dir / "squad" / "dev-v1.1.json.gz"), questions="dev")
    store = Store(tmp_path)
    report = prepare(PrepareConfig(sources=[source], chunk_words=100), store)
    corpus = Corpus.open(store, "corpus")
    words = sum(len(word_spans(r.passage.text)) for r in read_source(source.model_copy(update={"questions": None})))
    assert sum(len(word_spans(p.text)) for p in corpus) == words
    questions = read_questions(only_corpus(store), "dev")
    assert report.questions["dev"] == len(questions) == 7794
    gold = corpus.get({q.positive_ids[0] for q in questions})
    num_with_answer = 0
    for q in questions:
        text = gold[q.positive_ids[0]].text
        pairs = [(a, s) for a, s in zip(q.answers, q.answer_starts, strict=True) if s >= 0]
        assert all(text.startswith(answer, start) for answer, start in pairs)
        num_with_answer += bool(pairs)
    assert num_with_answer / len(questions) > 0.99


@pytest.mark.data
@pytest.mark.parametrize("chunk_words", [0, 60])
def test_questions_of_a_caller_get_the_places_of_their_answers_that_prepare_finds(
    squad_dev: dict, write: Write, store: Store, chunk_words: int
):
    rows, questions = [], []
    for number, paragraph in enumerate(squad_dev["data"][0]["paragraphs"][:20]):
        rows.append(passage(number, paragraph["context"]))
        for one in paragraph["qas"][:3]:
            answers = [*dict.fromkeys(answer["text"] for answer in one["answers"]), "nowhere in the text"]
            rows.append(
                {"id": one["id"], "question": one["question"], "answers": answers, "positive_ids": [f"p{number}"]}
            )
            questions.append(Question(one["id"], one["question"], tuple(answers), (f"p{number}",)))
    prepare(config(write("rows.jsonl", lines(*rows)), chunk_words=chunk_words), store)
    corpus = only_corpus(store)
    results = carry_to_chunks(corpus, questions, "string")
    assert results == read_questions(corpus, "q")
    assert all(max(question.answer_starts[:-1]) >= 0 > question.answer_starts[-1] for question in results)
