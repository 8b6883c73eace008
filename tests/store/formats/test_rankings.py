"""Rankings as others read them: DPR's reader, trec_eval, and our own files back again."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import ir_measures
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mvr_ray.errors import DataError
from mvr_ray.store.formats.ranked_ids import QuestionHits, read_ranked_ids
from mvr_ray.store.formats.rankings import RankedPassage, RankedQuestion, read_ranking, write_ranking
from mvr_ray.store.formats.trec import read_qrels, read_trec_run
from mvr_ray.types import Question

ROWS = [
    RankedQuestion(
        Question("q1", 'who "is" it?', ("me", "ä")),
        [
            RankedPassage("p2", "T", "body", 81.37321, True, 3, "bo"),
            RankedPassage("p1", "", "other", 80.5, False, 0, "other"),
        ],
    ),
    RankedQuestion(Question("q2", "no hits"), []),
]


class DprReaderPassage:
    """The fields that DPR's reader accepts for a passage, and no others."""

    def __init__(self, id: str, text: str, title: str, score: str, has_answer: bool) -> None:
        self.key = (id, text, title, score, has_answer)


def test_dprs_reader_accepts_every_context(tmp_path: Path):
    assert write_ranking(ROWS, tmp_path / "r.json", "dpr") == 2
    rows = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert [(row["question"], row["answers"]) for row in rows] == [('who "is" it?', ["me", "ä"]), ("no hits", [])]
    read = [DprReaderPassage(**ctx).key for ctx in rows[0]["ctxs"]]
    assert read == [("p2", "body", "T", "81.37321", True), ("p1", "other", "", "80.5", False)]


@given(
    st.lists(st.builds(RankedPassage, *[st.text()] * 3, st.floats(width=32), view=st.integers(-1, 9))), st.booleans()
)
def test_dprs_json_is_that_of_python_with_an_indent(tmp_path_factory, hits: list[RankedPassage], extras: bool):
    rows = [RankedQuestion(Question("q", 'a\n"b"', answers), hits) for answers in ((), ("ä", "\u2028"))]
    names = ["id", "title", "text", "score", "has_answer", *(["view", "snippet"] if extras else [])]
    contexts = [
        {name: value for name, value in {**hit._asdict(), "score": str(np.float32(hit.score))}.items() if name in names}
        for hit in (hit._replace(has_answer=bool(hit.has_answer)) for hit in hits)
    ]
    entries = [{"question": own.text, "answers": list(own.answers), "ctxs": contexts} for own, _ in rows]
    text = ",\n".join(json.dumps(entry, ensure_ascii=False, indent=4) for entry in entries)
    path = tmp_path_factory.getbasetemp() / "dpr.json"
    write_ranking(rows, path, "dpr", extras=extras)
    assert path.read_bytes() == f"[\n{text}\n]\n".encode()


def test_extras_come_only_on_request(tmp_path: Path):
    write_ranking(ROWS, tmp_path / "r.json", "dpr", extras=True)
    ctx = json.loads((tmp_path / "r.json").read_text())[0]["ctxs"][0]
    assert (ctx["view"], ctx["snippet"]) == (3, "bo")
    with pytest.raises(TypeError):
        DprReaderPassage(**ctx)


@pytest.mark.parametrize("format", ["dpr", "pyserini"])
def test_an_empty_ranking_is_still_valid_json(tmp_path: Path, format: str):
    write_ranking([], tmp_path / "r.json", format)
    assert not json.loads((tmp_path / "r.json").read_text())


@pytest.mark.parametrize("format", ["trec", "msmarco", "parquet"])
def test_a_question_without_a_hit_that_a_format_cannot_hold_is_warned_of(tmp_path: Path, caplog, format: str):
    assert write_ranking(ROWS, tmp_path / "r", format) == 2
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        f"questions=1 output={tmp_path / 'r'} format={format}"
    ]
    caplog.clear()
    write_ranking(ROWS[:1], tmp_path / "r", format)
    write_ranking(ROWS, tmp_path / "r", "jsonl")
    assert not caplog.messages


def test_pyserini_json(tmp_path: Path):
    write_ranking(ROWS, tmp_path / "r.json", "pyserini")
    entries = json.loads((tmp_path / "r.json").read_text())
    assert list(entries) == ["q1", "q2"]
    assert entries["q1"]["contexts"][0] == {"docid": "p2", "score": "81.37321", "text": "T\nbody", "has_answer": True}


def test_jsonl_and_parquet_hold_everything(tmp_path: Path):
    write_ranking(ROWS, tmp_path / "r.jsonl", "jsonl")
    write_ranking(ROWS, tmp_path / "r.parquet", "parquet")
    lines = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["id"] for line in lines] == ["q1", "q2"]
    first = {"rank": 1, "id": "p2", "title": "T", "text": "body", "has_answer": True, "view": 3, "snippet": "bo"}
    assert {key: value for key, value in lines[0]["hits"][0].items() if key != "score"} == first
    table = pq.read_table(tmp_path / "r.parquet").to_pylist()
    assert [(row["question_id"], row["rank"], row["passage_id"], row["snippet"]) for row in table] == [
        ("q1", 1, "p2", "bo"),
        ("q1", 2, "p1", "other"),
    ]
    assert np.float32(table[0]["score"]) == np.float32(lines[0]["hits"][0]["score"]) == np.float32(81.37321)


def test_a_parquet_ranking_of_another_program_may_have_numbers_as_ids_and_ranks_as_texts(tmp_path: Path):
    file = tmp_path / "r.parquet"
    columns = {"question_id": [7] * 3, "question": ["q"] * 3, "passage_id": [1, 2, 3], "has_answer": [None] * 3}
    pq.write_table(pa.table(columns | {"rank": ["10", "9", "1"]}), file)
    assert read_ranked_ids(file) == [("7", "q", [("3", None), ("2", None), ("1", None)])]
    for wrong, problem in (
        ({"rank": ["first", "2", "3"]}, "is not a Parquet ranking"),
        ({"rank": [1, 2, 3], "passage_id": pa.array([b"p1", b"\xff", b"p2"]).view(pa.string())}, "Invalid UTF8"),
        ({"rank": [1, 2, None]}, "a row without rank"),
        ({"rank": [1, 2, 3], "passage_id": ["p1", None, "p2"]}, "a row without passage_id"),
    ):
        pq.write_table(pa.table(columns | wrong), file)
        with pytest.raises(DataError, match=problem):
            read_ranked_ids(file)


def test_msmarco_run(tmp_path: Path):
    write_ranking(ROWS, tmp_path / "r.tsv", "msmarco")
    assert (tmp_path / "r.tsv").read_text() == "q1\tp2\t1\nq1\tp1\t2\n"
    for name in ("a\tb", "a\nb", "a\rb"):
        with pytest.raises(DataError, match="holds a tab or newline"):
            write_ranking([RankedQuestion(Question(name, "q"), ROWS[0].passages)], tmp_path / "r.tsv", "msmarco")


def test_trec_run_reads_back(tmp_path: Path):
    write_ranking(ROWS, tmp_path / "r.txt", "trec", tag="mine")
    assert (tmp_path / "r.txt").read_text() == "q1 Q0 p2 1 81.373210 mine\nq1 Q0 p1 2 80.500000 mine\n"
    assert [*read_trec_run(tmp_path / "r.txt")] == [("q1", "p2", 81.37321), ("q1", "p1", 80.5)]


scores = st.lists(
    st.one_of(
        st.sampled_from([0.0, 1.0, 81.37321, -3.5, 1e-7, 16777216.0]),
        st.floats(-1e6, 1e6, width=32),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(scores, st.integers(0, 9))
def test_trec_evals_order_is_ours_whatever_ties(tmp_path: Path, values: list[float], seed: int):
    names = [f"d{i}" for i in range(len(values))]
    random.Random(seed).shuffle(names)
    hits = [RankedPassage(name, "", "x", score) for name, score in zip(names, sorted(values, reverse=True))]
    write_ranking([RankedQuestion(Question("q", "?"), hits)], tmp_path / "r.txt", "trec")
    lines = list(read_trec_run(tmp_path / "r.txt"))
    by_score = sorted(lines, key=lambda line: line.passage_id, reverse=True)
    by_score.sort(key=lambda line: np.float32(line.score), reverse=True)
    assert [line.passage_id for line in by_score] == [hit.id for hit in hits]
    for line, hit in zip(lines, hits):
        slack = 1e-6 + len(hits) * max(2e-6, 2 * float(np.spacing(np.float32(max(map(abs, values))))))
        assert math.isclose(line.score, hit.score, abs_tol=slack)


def test_an_independent_evaluator_sees_our_order_in_a_tie(tmp_path: Path):
    hits = [RankedPassage(name, "", "x", 1.0) for name in ("a", "b", "c")]
    write_ranking([RankedQuestion(Question("q", "?"), hits)], tmp_path / "r.txt", "trec")
    (tmp_path / "qrels").write_text("q 0 a 1\n")
    run = list(ir_measures.read_trec_run(str(tmp_path / "r.txt")))
    qrels = list(ir_measures.read_trec_qrels(str(tmp_path / "qrels")))
    assert ir_measures.calc_aggregate([ir_measures.RR], qrels, run)[ir_measures.RR] == 1.0


@pytest.mark.parametrize(("question", "passage"), [("q 1", "p"), ("q", "p 1"), ("q", "p\u00a0x"), ("", "p")])
def test_ids_that_a_trec_run_cannot_hold_are_refused_and_no_file_stays(tmp_path: Path, question: str, passage: str):
    rows = [RankedQuestion(Question(question, "?"), [RankedPassage(passage, "", "x", 1.0)])]
    with pytest.raises(DataError, match=r"white space.*dpr, jsonl or parquet"):
        write_ranking(rows, tmp_path / "r.txt", "trec")
    assert list(tmp_path.iterdir()) == []


def test_unknown_formats_are_refused_with_the_known_ones(tmp_path: Path):
    with pytest.raises(DataError, match="there are dpr, trec"):
        write_ranking([], tmp_path / "r", "xml")


def test_judgements_of_both_shapes(write: Callable[[str, str], Path]):
    expected = {"q1": {"d1": 2, "d2": 0}, "q2": {"d1": 1}}
    assert read_qrels(write("trec", "q1 0 d1 2\nq1 0 d2 0\n\nq2 0 d1 1\n")) == expected
    assert read_qrels(write("beir", "query-id\tcorpus-id\tscore\nq1\td1\t2\nq1\td2\t0\nq2\td1\t1\n")) == expected
    assert read_qrels(write("beir", "query_id\tdoc_id\trel\nq1\td1\t2\nq1\td2\t0\nq2\td1\t1\n")) == expected
    assert read_qrels(write("trec", "q 0 a 1\nq 0 b 2.0\nq 0 c -1\n")) == {"q": {"a": 1, "b": 2, "c": -1}}
    messages = {f"q 0 d {grade}\n": f":1: grade '{grade}'" for grade in ("x", "0.5", "2.7", "3000000000", "nan", "inf")}
    for content, message in {"q1 d1\n": ":1: 2 columns", **messages}.items():
        with pytest.raises(DataError, match=message):
            read_qrels(write("bad", content))


def test_broken_runs_are_named_with_their_line(write: Callable[[str, str], Path]):
    with pytest.raises(DataError, match="bad:2: 3 columns"):
        list(read_trec_run(write("bad", "q Q0 d 1 1.0 t\nq Q0 d\n")))
    with pytest.raises(DataError, match="bad:1: rank 'x'"):
        list(read_trec_run(write("bad", "q Q0 d x 1.0 t\n")))
    with pytest.raises(DataError, match="bad:2: rank '2' or score 'NaN' is not a number"):
        list(read_trec_run(write("bad", "q Q0 d 1 inf t\nq Q0 e 2 NaN t\n")))


@pytest.mark.parametrize("format", ["dpr", "jsonl", "pyserini"])
def test_a_ranking_reads_back_as_it_was_written(tmp_path: Path, format: str):
    path = tmp_path / "dev.ranked.json"
    write_ranking(ROWS, path, format)
    read = list(read_ranking(path))
    assert [row.question.text for row in read] == ['who "is" it?', "no hits"]
    assert [row.question.answers for row in read] == [("me", "ä"), ()]
    ids = ["dev-0", "dev-1"] if format == "dpr" else ["q1", "q2"]  # DPR's JSON keeps no ids
    assert [row.question.id for row in read] == ids
    for before, after in zip(ROWS, read, strict=True):
        assert [hit.id for hit in after.passages] == [hit.id for hit in before.passages]
        own = [(f"{hit.title}\n{hit.text}" if format == "pyserini" else hit.text) for hit in before.passages]
        assert [hit.text for hit in after.passages] == own
        titles = [hit.title for hit in before.passages]
        assert [hit.title for hit in after.passages] == ([""] * len(titles) if format == "pyserini" else titles)
        assert [np.float32(hit.score) for hit in after.passages] == [np.float32(hit.score) for hit in before.passages]
        assert [hit.has_answer for hit in after.passages] == [hit.has_answer for hit in before.passages]
    assert [len(row.passages) for row in read_ranking(path, 1)] == [1, 0]


def test_a_ranking_of_others_reads_without_ids_titles_or_scores(tmp_path: Path):
    path = tmp_path / "r.json"
    path.write_text('[{"question": "q", "target": "a", "ctxs": [{"id": 7}, {"text": "body", "score": 2}]}]')
    [row] = read_ranking(path)
    bare, full = row.passages
    assert (bare.id, bare.title, bare.text, math.isnan(bare.score), bare.has_answer) == ("7", "", "", True, None)
    assert (full.id[:4], full.text, full.score) == ("ctx-", "body", 2.0)


def test_ids_that_are_numbers_are_the_same_ids_in_every_format_of_a_ranking(tmp_path: Path):
    hits = {"question_id": 1, "question": " q ", "rank": [2, 1], "passage_id": [5, 7], "has_answer": None}
    columns = {name: value if isinstance(value, list) else [value] * 2 for name, value in hits.items()}
    pq.write_table(pa.table(columns), tmp_path / "r.parquet")
    (tmp_path / "r.jsonl").write_text('{"id": 1, "question": "q", "hits": [{"id": 7}, {"id": 5}]}')
    expected = [QuestionHits("1", "q", [("7", None), ("5", None)])]
    assert [read_ranked_ids(tmp_path / name) for name in ("r.parquet", "r.jsonl")] == [expected] * 2


FORMATS = "give a ranking as `mvr-ray retrieve` writes it with format=dpr, jsonl or pyserini"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("q1 Q0 p1 1 2.0 tag\n", f"{{path}}: neither a JSON array or object nor JSON lines; {FORMATS}"),
        ("", "ranking {path} holds no question"),
        ("[]", "ranking {path} holds no question"),
        (
            '{"question": "q",\n',
            f"{{path}}:1: not valid JSON: Expecting property name enclosed in double quotes*; {FORMATS}",
        ),
        (
            '{"q1": {"question": "q", "titles": []}}',
            f"{{path}}, entry 1: no question with its ctxs, hits or contexts; {FORMATS}",
        ),
        ('[{"ctxs": []}]', f"{{path}}, entry 1: no question with its ctxs, hits or contexts; {FORMATS}"),
        (
            '[{"question": "q", "ctxs": []}, 7]',
            f"{{path}}, entry 2: no question with its ctxs, hits or contexts; {FORMATS}",
        ),
        ('[{"question": "q", "answers": "a", "ctxs": []}]', "{path}, entry 1: answers is 'a', not a list of texts"),
        (
            '[{"question": "q", "ctxs": ["p1"]}]',
            "{path}, entry 1, passage 1: 'p1' is not a passage with id, title, text and score",
        ),
        (
            '[{"question": "q", "ctxs": [{"id": "p", "text": 5}]}]',
            "{path}, entry 1, passage 1: title '' or text 5 is not a text",
        ),
        (
            '[{"question": "q", "ctxs": [{"id": "p", "score": "high"}]}]',
            "{path}, entry 1, passage 1: score 'high' is not a number",
        ),
        ('[{"question": "q", "ctxs": []}] x', "{path}:1: not valid JSON: the JSON text ends, but 'x' follows"),
    ],
)
def test_what_cannot_be_read_is_refused_by_place(tmp_path: Path, content: str, message: str):
    path = tmp_path / "r.json"
    path.write_text(content)
    with pytest.raises(DataError) as error:
        list(read_ranking(path))
    begin, _, end = message.replace("{path}", str(path)).partition("*")
    assert str(error.value).startswith(begin) and str(error.value).endswith(end)
    assert "*" in message or str(error.value) == begin


def test_a_ranking_that_is_not_there_names_the_command_that_makes_it():
    with pytest.raises(DataError) as error:
        next(read_ranking(Path("nowhere.json")))
    assert str(error.value) == (
        "ranking nowhere.json does not exist; make one with `mvr-ray retrieve CONFIG ... output=nowhere.json`"
    )
