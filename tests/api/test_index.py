"""Every shape of passages gives `Index.build` the command line's index, and its hits are those of brute force."""

import copy
import dataclasses
import gc
import inspect
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import UTC, date, datetime, time
from decimal import Decimal
from functools import partial
from html import unescape
from io import StringIO
from itertools import islice
from pathlib import Path
from threading import Event
from time import sleep
from types import MappingProxyType
from typing import Any
from uuid import UUID
from weakref import WeakSet, ref

import datasets
import numpy as np
import pandas
import polars
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from langchain_core.documents import Document
from llama_index.core.schema import TextNode
from prepared_corpus import only_corpus
from sentence_transformers import SentenceTransformer

from mvr_ray import Encoder, Index, Passage, load_run
from mvr_ray.api import encoder as encoder_module
from mvr_ray.api import searching
from mvr_ray.api.hits import SearchHits
from mvr_ray.api.rows import passage_records, questions_of, sources_of, upsert_records
from mvr_ray.api.run_settings import with_settings
from mvr_ray.cli import main
from mvr_ray.client import Client, RefusedError
from mvr_ray.config import EvaluateConfig, PrepareConfig, RunConfig, SourceConfig
from mvr_ray.core.encoding.encoder import DualEncoder
from mvr_ray.core.judging.answers import AnswerMatcher
from mvr_ray.core.threads import torch_threads
from mvr_ray.distributed import hot_swap
from mvr_ray.distributed.analyze import analyze
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.evaluate import evaluate, try_weights
from mvr_ray.distributed.indexing import build_index, external_vectors
from mvr_ray.distributed.indexing.staging import EncodeTask, checked_params
from mvr_ray.distributed.mine import filter_hits
from mvr_ray.distributed.refinement.journal import Journal
from mvr_ray.distributed.result_store import ResultStore
from mvr_ray.distributed.retrieve import QuestionSet
from mvr_ray.distributed.router import open_router
from mvr_ray.errors import (
    ConfigError,
    DataError,
    EncoderError,
    MissingInputError,
    MvrRayError,
    PublishConflictError,
    ShardIndexError,
)
from mvr_ray.explanation import render_html
from mvr_ray.serving.schemas import SearchResponse
from mvr_ray.serving.service import SearchService
from mvr_ray.store import parts
from mvr_ray.store.corpus import Corpus, question_sets
from mvr_ray.store.feedback import copy_judgements
from mvr_ray.store.fields import FieldReader
from mvr_ray.store.files import Store
from mvr_ray.store.formats.rankings import PARQUET_SCHEMA
from mvr_ray.store.formats.records import BadRow, PassageRecord
from mvr_ray.store.prepare import prepare
from mvr_ray.store.questions import own_passages, read_questions
from mvr_ray.store.update import update, update_by_records
from mvr_ray.types import Progress, Question

ROWS = [
    {
        "id": f"p{n}",
        "title": f"Town {n % 5}",
        "text": f"Tower {n} was built by king {n * n}. It stands in town {n % 5}.",
        "year": 1900 + n,
        "opened": date(1950, 1, 1 + n),
    }
    for n in range(24)
]
TRANSFORMER = "sentence_transformers.models.Transformer"
SMALL = {
    "prepare": {"num_shards": 3},
    "encoder": {"num_views": 3, "max_passage_tokens": 64},
    "index": {"precision": "fp32"},
}


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process of its own: other tests of this one may have joined a cluster."""
    monkeypatch.setattr(session, "has_session", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture(scope="module")
def index_store(tiny_backbone: Path, tmp_path_factory) -> Path:
    """A store that no test may change; `index` gives a copy."""
    path = tmp_path_factory.mktemp("api") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "has_session", lambda: False)
        patch.delenv("RAY_ADDRESS", raising=False)
        Index.build(ROWS, model=str(tiny_backbone), path=path, settings=SMALL)
    return path


@pytest.fixture
def index(index_store: Path, tmp_path: Path) -> Iterator[Index]:
    with Index.open(shutil.copytree(index_store, tmp_path / "store")) as open_index:
        yield open_index


def shard_digests(index: Index) -> list[str]:
    return [entry.digest for entry in index.manifest.shards]


def json_file(folder: Path) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row, default=str) + "\n" for row in ROWS))
    return file


SHAPES = {
    "mappings": lambda: ROWS,
    "generator": lambda: (row for row in ROWS),
    "pandas": lambda: pandas.DataFrame(ROWS),
    "polars": lambda: polars.DataFrame(ROWS),
    "polars, lazy": lambda: polars.DataFrame(ROWS).lazy(),
    "arrow table": lambda: pa.Table.from_pylist(ROWS),
    "arrow batches": lambda: pa.Table.from_pylist(ROWS).to_reader(max_chunksize=7),
    "dataset": lambda: datasets.Dataset.from_list(ROWS),
    "passages": lambda: [
        Passage(r["id"], r["title"], r["text"], (("year", r["year"]), ("opened", r["opened"]))) for r in ROWS
    ],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_the_same_passages_gives_the_same_corpus(shape: str, tmp_path: Path):
    cfg = PrepareConfig(num_shards=3, fields={"year": "int", "opened": "date"})
    reports = [
        prepare(cfg, Store(str(tmp_path / name)), records=passage_records(rows))
        for name, rows in (("one", ROWS), ("other", SHAPES[shape]()))
    ]
    assert reports[0].digest == reports[1].digest
    assert reports[1].passages_written == len(ROWS)


def test_no_file_of_a_store_holds_the_keys_of_an_address(tiny_backbone: Path, tmp_path: Path):
    settings = {**SMALL, "follow": {"source": "s3://KEY:secret@bucket/changes"}}
    Index.build(ROWS, model=str(tiny_backbone), path=tmp_path / "store", settings=settings).close()
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert b"s3://bucket/changes" in (tmp_path / "store" / "run.yaml").read_bytes()
    assert not [path for path in files if b"KEY:secret" in path.read_bytes()]


def test_a_version_counts_the_passages_it_encoded_that_are_cut(tiny_backbone: Path, tmp_path: Path):
    rows = [("long", "The tower was built. " * 40), ("short", "The tower fell.")]
    with Index.build(rows, model=str(tiny_backbone), path=tmp_path / "store", settings=SMALL) as index:
        assert [index.manifest.metrics[name] for name in ("encoded", "encoded_cut")] == [2, 1]
        version = index.upsert([("short", "The tower stands.")])
        assert [version.metrics[name] for name in ("encoded", "encoded_cut")] == [1, 0]


def test_a_version_counts_the_passages_outside_the_vocabulary(tiny_backbone: Path, tmp_path: Path, caplog):
    rows = [("thai", "นักศึกษาสวมเสื้อคลุม นักศึกษา"), ("mixed", "The tower was built by นักศึกษา."), ("short", "It fell.")]
    with Index.build(rows, model=str(tiny_backbone), path=tmp_path / "store", settings=SMALL) as index:
        assert [index.manifest.metrics[name] for name in ("encoded", "encoded_unknown")] == [3, 2]
        assert (
            "encoded passages: index=index passages=2: a quarter or more of the text is outside the vocabulary"
            in caplog.text
        )
        assert index.upsert([("short", "It stands.")]).metrics["encoded_unknown"] == 0


def test_texts_and_tuples_are_passages_and_a_row_without_an_id_gets_its_number(tmp_path: Path):
    records = passage_records(["One.", ("a", "Two."), ("b", "Title", "Three."), {"text": "Four.", "year": 4}])
    passages = [(record.passage.id, record.passage.title, record.passage.text) for record in records]
    assert passages == [("0", "", "One."), ("a", "", "Two."), ("b", "Title", "Three."), ("3", "", "Four.")]
    numbers = passage_records([(np.int64(3), "Two."), (np.int64(4), "Title", "Three.")])
    assert [record.passage.id for record in numbers] == ["3", "4"]


@pytest.mark.parametrize("kind", ["array", "chunked array", "structs"])
def test_a_column_of_arrow_holds_the_passages_of_its_list(kind: str):
    columns = {
        "array": pa.array(["One.", "Two."]),
        "chunked array": pa.chunked_array([["One."], ["Two."]]),
        "structs": pa.array([{"text": "One."}, {"text": "Two."}]),
    }
    assert list(passage_records(columns[kind])) == list(passage_records(["One.", "Two."]))


def test_a_time_in_arrow_that_python_cannot_hold_is_left_out_as_from_a_file(tmp_path: Path, caplog):
    times = {"when": pa.array([2**62, 0], pa.timestamp("ms")), "zone": pa.array([0, 0], pa.timestamp("s", "Mars/X"))}
    table = pa.table({"id": ["a", "b"], "text": ["One.", "Two."], **times})
    pa.parquet.write_table(table, tmp_path / "rows.parquet")
    sources = [SourceConfig(path=str(tmp_path / "rows.parquet"))]
    for number, rows in enumerate([table, table.to_reader(), table.to_batches()[0], None]):
        config = PrepareConfig(sources=[] if rows is not None else sources, fields="infer")
        store = Store(str(tmp_path / str(number)))
        prepare(config, store, records=None if rows is None else passage_records(rows))
        first, second = sorted(Corpus.open(store, "corpus"))
        assert (first.values, second.values) == ({}, {"when": datetime(1970, 1, 1, tzinfo=UTC)})
        assert "'when' is b'unreadable timestamp" in caplog.text
        caplog.clear()


@pytest.mark.parametrize("kind", ["torch", "pandas", "arrow", "numpy"])
def test_the_format_of_a_dataset_changes_no_passage(kind: str):
    rows = datasets.Dataset.from_list(ROWS)
    assert list(passage_records(rows.with_format(kind))) == list(passage_records(ROWS))
    stream = rows.to_iterable_dataset()
    assert list(passage_records(stream.with_format(kind))) == list(passage_records(ROWS))


def test_a_tensor_of_another_column_changes_no_passage():
    row = {"id": "a", "text": "One."}
    tensors = [torch.ones(3), torch.ones(1), torch.tensor(float("nan"))]
    records = [list(passage_records([row | {"vector": tensor}])) for tensor in tensors]
    assert [[record.passage.text for record in of_tensor] for of_tensor in records] == [["One."]] * 3


def test_an_index_of_a_frame_that_has_a_name_is_a_column():
    frame = pandas.DataFrame({"id": ["a", "b"], "text": ["One.", "Two."], "year": [1, 2]})
    expected = list(passage_records(frame))
    assert list(passage_records(frame.set_index("id"))) == expected
    by_year = [record.passage.id for record in passage_records(frame.set_index(["year", "id"]))]
    assert by_year == ["a", "b"]
    frame.index.name = "id"
    assert list(passage_records(frame)) == expected


def test_files_are_given_by_paths_or_by_an_entry_of_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(f"{name}.jsonl").write_text(json.dumps({"key": name, "body": f"Text {name}."}) + "\n")
    names, fields = ["a.jsonl", "b.jsonl"], {"id": "key", "text": "body"}
    assert sources_of(names) == sources_of([Path(name) for name in names]) == [{"path": name} for name in names]
    assert sources_of([*names, "a text"]) is None and sources_of(["a\0", "x" * 9999]) is None
    assert sources_of({"path": Path("a.jsonl"), "fields": fields}) == [{"path": "a.jsonl", "fields": fields}]
    for passages in ("hf:owner/name", {"path": "hf:owner/name"}):
        [source] = PrepareConfig.model_validate({"sources": sources_of(passages)}).sources
        assert source == SourceConfig.model_validate("hf:owner/name") == SourceConfig(path=source.path, split="train")
    assert SourceConfig(path="hf:owner/name", split="test").split == SourceConfig(path="folder").split == "test"
    [bad] = passage_records(iter([Path("a.jsonl")]))
    assert isinstance(bad, BadRow) and bad.reason.endswith("; give paths as a list")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("b.jsonl", "passages has 'b.jsonl', and no file or folder"),
        ("data/*.parquet", r"passages has 'data/\*.parquet', and no file or folder"),
        ("b.csv.gz", "passages has 'b.csv.gz', and no file or folder"),
    ],
)
def test_paths_of_which_one_is_no_file_are_never_taken_as_texts(tmp_path: Path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text('{"id": "a", "text": "Text a."}\n')
    for names in (["a.jsonl", name], [name, "a.jsonl"]):
        with pytest.raises(MvrRayError, match=message):
            Index.build(names, path=tmp_path / "store")
    assert sources_of([f"{name} is a file", "a.jsonl"]) is None
    assert sources_of(["a.jsonl", address := "s3://bucket/b.parquet"]) == [{"path": "a.jsonl"}, {"path": address}]


def test_an_index_of_a_file_with_other_names_is_built(tiny_backbone: Path, tmp_path: Path):
    (tmp_path / "own.csv").write_text("doc_id,body\nx,A tower of stone.\n")
    source = {"path": tmp_path / "own.csv", "fields": {"id": "doc_id", "text": "body"}}
    feedback = {"feedback": tmp_path / "feedback.jsonl"}
    settings = {**SMALL, "encoder": {**SMALL["encoder"], "num_views": np.int64(2)}, "refine": feedback}
    with Index.build(source, model=tiny_backbone, path=tmp_path / "own", settings=settings) as index:
        assert index.search("tower", 1)[0].id == "x"
    with Index.open(tmp_path / "own") as index:
        assert index.run.encoder.num_views == 2
    with pytest.raises(ConfigError, match=r"prepare\.sources\.0.*fild"):
        Index.build({"path": "x.csv", "fild": {}}, model=tiny_backbone, path=tmp_path / "other")


def test_rows_are_numbered_with_a_warning_if_a_column_looks_like_their_ids(caplog):
    frame = pandas.DataFrame({"doc_id": ["a", "b"], "text": ["One.", "Two."]})
    assert [record.passage.id for record in passage_records(frame)] == ["0", "1"]
    [warning] = caplog.messages
    assert warning == "passages are numbered, since none has an id; rename 'doc_id' to 'id' if it is theirs"
    assert [record.passage.id for record in passage_records(frame.rename(columns={"doc_id": "id"}))] == ["a", "b"]
    assert len(caplog.messages) == 1


def test_the_items_of_a_mapping_are_passages_by_their_ids():
    corpus = {"d1": {"title": "I", "text": "One."}, "d2": {"title": "", "text": "Two."}}
    parts = [record.passage for record in passage_records(corpus.items())]
    assert parts == [Passage("d1", "I", "One."), Passage("d2", "", "Two.")]


def test_answers_may_be_an_object_with_their_texts():
    """As in data sets of SQuAD on the Hugging Face hub."""
    row = {"id": "q", "question": "Who?", "answers": {"text": ["Eiffel", "G. Eiffel"], "answer_start": [3, 1]}}
    frame = pandas.DataFrame([{**row, "answers": {"text": np.array(["Eiffel", "G. Eiffel"])}}])
    for rows in ([row], frame, datasets.Dataset.from_list([row])):
        [question] = questions_of(rows)
        assert (question.answers, question.answer_starts) == (("Eiffel", "G. Eiffel"), ())
    [question] = questions_of([{**row, "positive_ids": ["p"]}])
    assert question.answer_starts == (3, 1)  # offsets in the text of the first gold passage


def test_evaluate_ranks_by_words_and_views_as_requested(command_store: Path):
    texts = [f"Tower {n} has 9 stones" for n in range(6)]
    gold = [f"p{n}#1" for n in range(6)]
    questions = [{"question": text, "positive_ids": [name]} for text, name in zip(texts, gold)]
    shares = []
    with Index.open(command_store) as index:
        for hybrid in ("off", "rrf", 50):
            top = [hits[0].id for hits in index.search(texts, 1, hybrid=hybrid)]
            shares.append(sum(map(str.__eq__, top, gold)) / 6)
            report = index.evaluate(questions, k=1, hybrid=hybrid)
            rows = [row for row in report.rows if (row.system, row.metric) == (report.configured_system, "gold/top-1")]
            assert [row.value for row in rows] == pytest.approx([shares[-1]])
    assert len({*shares}) > 1


def test_an_index_in_a_ray_session_of_others_is_searched_in_its_own_process(index: Index, monkeypatch):
    monkeypatch.setattr(session, "has_session", lambda: True)
    monkeypatch.setattr(session, "ray_session", None)
    assert len(index.search("tower", 2)) == 2


def test_an_index_whose_ray_session_other_code_has_ended_opens_its_shards_again(index: Index):
    for change in (lambda: None, lambda: index.upsert([{"id": "p7", "text": "A tower of cork."}])):
        index.search("tower", 2)
        router = index._open_router
        assert router is not None
        router.searchers.is_lost = True
        change()
        assert len(index.search("tower", 2)) == 2
        assert index._open_router is not router


@pytest.mark.parametrize(
    "work",
    [
        lambda index, questions: repr(index.refine(questions, **ONE_ROUND).rounds),
        lambda index, questions: index.evaluate(questions).rows,
        lambda index, questions: index.retrieve(questions, 3),
    ],
    ids=["refine", "evaluate", "retrieve"],
)
def test_work_that_began_in_this_process_ends_there_though_another_thread_enters_ray(index: Index, work, monkeypatch):
    questions = [("Who built tower 3?", "king 9"), ("Who built tower 4?", "king 16")]
    alone = work(index, questions)
    if index.manifest.version > 1:
        index.rollback(1)
    at_its_begin = iter([False])
    monkeypatch.setattr(session, "has_session", lambda: next(at_its_begin, True))
    assert work(index, questions) == alone


def test_the_rows_of_itertuples_are_read_by_name():
    frame = pandas.DataFrame({"text": ["One.", "Two."], "title": ["I", "II"], "id": ["a", "b"]})
    for rows in (frame.itertuples(index=False), frame.itertuples()):
        assert list(passage_records(rows)) == list(passage_records(frame))
    parts = [record.passage for record in passage_records(frame[["text", "title"]].itertuples())]
    assert [(passage.id, passage.title, passage.text) for passage in parts] == [
        ("0", "I", "One."),
        ("1", "II", "Two."),
    ]


def test_the_questions_of_itertuples_are_read_by_name():
    frame = pandas.DataFrame({"id": ["a", "b"], "question": ["Who?", "When?"], "answers": [["I"], ["1413"]]})
    for columns in (["id", "question"], ["id", "question", "answers"], ["question", "answers"]):
        for rows in (frame[columns].itertuples(index=False), frame[columns].itertuples()):
            assert questions_of(rows) == questions_of(frame[columns])


def test_a_mapping_without_a_text_is_refused_with_its_keys():
    [record] = passage_records([{"id": "a", "page_content": "One."}])
    assert isinstance(record, BadRow) and "'id', 'page_content': rename" in record.reason


def test_a_csv_with_a_question_beside_each_text_gives_the_corpus_of_its_frame(tmp_path: Path):
    file = tmp_path / "rows.csv"
    file.write_text("id,text,question,hue\np1,A tower.,What is it?,red\np2,A town.,,\n")
    cfg = PrepareConfig(fields="infer")
    from_file = prepare(
        cfg.model_copy(update={"sources": [SourceConfig.model_validate(*sources_of(file))]}), Store(tmp_path / "file")
    )
    from_frame = prepare(cfg, Store(tmp_path / "frame"), records=passage_records(pandas.read_csv(file)))
    assert from_file.digest == from_frame.digest and from_file.fields == {"hue": "string"}


def test_missing_cells_of_a_frame_are_no_value(tmp_path: Path):
    frame = pandas.DataFrame({"id": ["a", "b"], "text": ["One.", "Two."], "year": [1958.5, None]})
    frame["seen"] = pandas.to_datetime(["2020-01-01", None])
    frame["note"] = pandas.array(["x", None], dtype="string")
    for rows in (frame, frame.to_dict("records")):
        extras = [dict(record.extras) for record in passage_records(rows)]
        assert extras[1] == {"year": None, "seen": None, "note": None}


def test_a_frame_whose_whole_numbers_have_a_gap_is_accepted_for_a_field_of_int(index: Index):
    frame = pandas.DataFrame(
        {"id": ["p1", "new"], "title": ["T", "U"], "text": ["A tower.", "A new town."], "year": [2001, None]}
    )
    assert frame.year.dtype == float
    index.upsert(frame)
    assert index.passages("p1")["p1"].values == {"year": 2001}
    assert index.passages("new")["new"].values == {}


def test_a_list_in_a_cell_of_a_frame_is_a_list_whatever_reads_the_file(index: Index, tmp_path: Path):
    file, lists = tmp_path / "rows.parquet", {"tags": [["a"], ["b", "c"], []], "year": [1, 2, 3]}
    pa.parquet.write_table(pa.table({"id": ["x", "y", "z"], "text": ["One.", "Two.", "Three."], **lists}), file)
    frame = pandas.read_parquet(file)
    assert isinstance(frame["tags"][0], np.ndarray)
    tables = {"file": pa.parquet.read_table(file), "frame": frame, "arrays": frame.to_dict("records")}
    cfg = PrepareConfig(fields="infer")
    reports = [
        prepare(cfg, Store(str(tmp_path / name)), records=passage_records(rows)) for name, rows in tables.items()
    ]
    assert {report.digest for report in reports} == {reports[0].digest}
    index.upsert(frame)
    assert dict(index.passages("y")["y"].fields) == {"year": 2}


def test_passages_are_streamed_and_never_all_held(tmp_path: Path):
    class Row(dict):
        pass

    alive: WeakSet[Row] = WeakSet()
    most = 0

    def stream() -> Iterator[Row]:
        nonlocal most
        for number in range(20_000):
            row = Row(id=str(number), text=f"Text {number}.")
            Row.__hash__ = object.__hash__  # type: ignore[assignment]
            alive.add(row)
            most = max(most, len(alive))
            yield row

    assert prepare(PrepareConfig(), Store(str(tmp_path)), records=passage_records(stream())).passages_written == 20_000
    assert most < 100


def test_build_in_python_and_by_the_command_line_leave_the_same_shards_and_answers(
    index_store: Path, tiny_backbone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    store, source = tmp_path / "store", json_file(tmp_path)
    run_file = tmp_path / "run.yaml"
    sections = {
        "store": {"path": str(store)},
        "prepare": {**SMALL["prepare"], "fields": {"opened": "date", "year": "int"}, "sources": [str(source)]},
        "encoder": {**SMALL["encoder"], "backbone": str(tiny_backbone)},
        "index": SMALL["index"],
    }
    run_file.write_text(json.dumps(sections))
    for stage in ("prepare", "index"):
        with pytest.raises(SystemExit) as end:
            main([stage, str(run_file)])
        assert not end.value.code, capsys.readouterr().err
    own, other = Index.open(index_store), Index.open(store)
    assert shard_digests(own) == shard_digests(other) == shard_digests(Index.open(run_file))
    assert own.manifest.corpus_digest == other.manifest.corpus_digest
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["search", str(index_store / "run.yaml"), "who built tower 7?", "-k", "3", "--json"])
    cli_hits = json.loads(capsys.readouterr().out)["results"][0]
    for index in (own, other):
        hits = index.search("who built tower 7?", k=3)
        assert [(hit.id, hit.score, hit.view) for hit in hits] == [(h["id"], h["score"], h["view"]) for h in cli_hits]


def test_a_run_file_and_python_read_as_much_of_a_text_as_the_model_says_and_leave_the_same_bytes(
    tiny_backbone: Path, tmp_path: Path
):
    model = tmp_path / "model"
    shutil.copytree(tiny_backbone, model)
    (model / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": TRANSFORMER}]))
    (model / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 300}))
    source = tmp_path / "long.jsonl"
    texts = [f"The tower of town {n} leans. " * 100 for n in range(4)]
    source.write_text("".join(json.dumps({"id": f"p{n}", "text": text}) + "\n" for n, text in enumerate(texts)))
    run_file = tmp_path / "run.yaml"
    sections = {"store": {"path": str(tmp_path / "commands")}, "prepare": {"sources": [str(source)]}}
    index = {"precision": "fp32"}
    run_file.write_text(json.dumps({**sections, "encoder": {"backbone": str(model)}, "index": index}))
    for stage in ("prepare", "index"):
        with pytest.raises(SystemExit) as end:
            main([stage, str(run_file)])
        assert not end.value.code
    own = Index.build(source, model=str(model), path=tmp_path / "python", settings={"index": index})
    other = Index.open(run_file)
    assert shard_digests(own) == shard_digests(other)
    assert own.manifest.encoder_fingerprint == other.manifest.encoder_fingerprint
    spec = own.encoder._encoder.spec
    assert (spec.max_query_tokens, spec.max_passage_tokens) == (300, 300)


def test_hits_are_those_of_brute_force_over_the_vectors_of_the_encoder(index: Index, tiny_backbone: Path):
    questions = ["who built tower 7?", "which king ruled town 3?"]
    encoder = Encoder(str(tiny_backbone), **SMALL["encoder"])
    assert encoder.fingerprint == index.manifest.encoder_fingerprint == index.encoder.fingerprint
    views_PVD, mask_PV = encoder.embed_passages(ROWS)
    stored_PVD = views_PVD.astype(np.float16).astype(np.float32)
    scores_QPV = np.einsum("qd,pvd->qpv", encoder.embed_queries(questions), stored_PVD)
    best_QP = np.where(mask_PV, scores_QPV, -np.inf).max(2)
    for scores_P, hits in zip(best_QP, index.search(questions, k=5)):
        order = sorted(range(len(ROWS)), key=lambda row: (-scores_P[row], ROWS[row]["id"]))[:5]
        assert [hit.id for hit in hits] == [ROWS[row]["id"] for row in order]
        assert [hit.score for hit in hits] == pytest.approx(scores_P[order].tolist(), abs=1e-5)
        for hit in hits:
            row = ROWS[int(hit.id[1:])]
            assert (hit.title, hit.text) == (row["title"], row["text"])
            assert hit.fields == {"year": row["year"], "opened": row["opened"].isoformat()}
            assert hit.snippet is not None and hit.text is not None
            assert hit.text[hit.snippet.start : hit.snippet.stop] == hit.snippet.text
    vectors_QD = encoder.embed_queries(questions)
    assert [[h.id for h in hits] for hits in index.search(vectors_QD)] == [
        [h.id for h in hits] for hits in index.search(questions)
    ]


def test_an_explanation_has_the_product_of_every_view_and_question_and_a_page_of_its_own(index: Index):
    questions = ["who built tower 7?", "which king ruled town 3?"]
    encoder = index.encoder
    views_PVD, mask_PV = encoder.embed_passages(ROWS)
    scores_QPV = np.einsum(
        "qd,pvd->qpv", encoder.embed_queries(questions), views_PVD.astype(np.float16).astype(np.float32)
    )
    explanation = index.explain(questions, ["p7", "p3"])
    assert [passage.id for passage in explanation.passages] == ["p7", "p3"]
    for passage, row in zip(explanation.passages, (7, 3)):
        views = [view.view for view in passage.views]
        assert views == np.flatnonzero(mask_PV[row]).tolist()
        expected = np.where(mask_PV[row], scores_QPV[:, row], -np.inf)
        scores_QN = np.array([view.scores for view in passage.views]).T
        np.testing.assert_allclose(scores_QN, expected[:, views], atol=1e-5)
        assert [winner.view for winner in passage.winners] == expected.argmax(1).tolist()
    hits = index.search(questions[0], k=2)
    of_hits = index.explain(questions[0], k=2)
    assert [passage.id for passage in of_hits.passages] == [hit.id for hit in hits]
    assert [passage.winners[0].view for passage in of_hits.passages] == [hit.view for hit in hits]
    assert of_hits._repr_html_().startswith("<iframe sandbox ") and render_html(of_hits) in unescape(
        of_hits._repr_html_()
    )


@pytest.mark.parametrize(
    ("questions", "passages", "message"),
    [
        ("", (), "question"),
        ([], (), "questions"),
        ("who?", "p99", "p99"),
        ([5], (), "questions"),
        (pandas.DataFrame({"question": ["who?"]}), (), "questions"),
        (42, (), "questions are 42; give a text, or a list of texts"),
        (np.ones((1, 32), np.float32), (), "questions"),
    ],
)
def test_an_explanation_of_no_question_or_an_unknown_passage_is_refused(index: Index, questions, passages, message):
    with pytest.raises(ConfigError, match=rf"^explain: .*{message}"):
        index.explain(questions, passages)


def test_one_text_is_one_question_or_passage_and_not_its_characters(index: Index):
    encoder = index.encoder
    np.testing.assert_array_equal(encoder.embed_queries("who built it?"), encoder.embed_queries(["who built it?"]))
    one, several = encoder.embed_passages("A tower. A town."), encoder.embed_passages(["A tower. A town."])
    np.testing.assert_array_equal(one.views_PVD, several.views_PVD)
    assert index.passages("p1") == index.passages(["p1"]) != {}
    with pytest.raises(DataError, match=r"^'A tower\.' is one text and holds no rows; give a list"):
        index.upsert("A tower.")


def test_an_encoder_shows_how_many_of_many_texts_it_has_embedded(index: Index, monkeypatch, capsys):
    steps: list[tuple[str, int, int]] = []
    texts = [row["text"] for row in ROWS]

    def embed(**options: Any) -> tuple[np.ndarray, np.ndarray]:
        return index.encoder.embed_passages(ROWS, **options).views_PVD, index.encoder.embed_queries(texts, 8, **options)

    whole = embed(progress=lambda *step: steps.append(step))
    assert steps[0] == ("embed passages", len(ROWS), len(ROWS)) and steps[1] == ("embed questions", 8, len(ROWS))
    assert steps[-1] == ("embed questions", len(ROWS), len(ROWS))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    embed()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(encoder_module, "MANY", 8)
    steps.clear()
    for one, other in zip(whole, embed(progress=lambda *step: steps.append(step)), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert steps[0] == ("embed passages", 8, len(ROWS))
    embed()
    output = capsys.readouterr().err
    assert "embed passages" in output and "embed questions" in output
    embed(progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("question", ["half a pair: \ud800", 5])
def test_a_question_that_is_no_text_is_refused_by_its_number(index: Index, question):
    with pytest.raises(DataError, match="question 1 is not text that UTF-8 can encode"):
        index.encoder.embed_queries(["who?", question])
    with pytest.raises(ConfigError, match=r"^search: "):
        index.search(["who?", question])
    with pytest.raises(ConfigError, match=r"^search: filter\.title"):
        index.search("who?", filter={"title": question})


def test_an_encoder_of_a_precision_embeds_as_an_index_of_it(tiny_backbone: Path, tmp_path: Path):
    settings = {**SMALL, "index": {"precision": "auto"}}
    own = Index.build(ROWS, model=str(tiny_backbone), path=tmp_path, settings=settings)
    encoder = Encoder(str(tiny_backbone), precision="auto", **SMALL["encoder"])
    assert encoder.fingerprint == own.manifest.encoder_fingerprint
    views_PVD, _ = encoder.embed_passages(ROWS)
    np.testing.assert_array_equal(views_PVD, own.encoder.embed_passages(ROWS).views_PVD)
    with pytest.raises(ConfigError, match="precision is 'int8'; give one of auto, fp32"):
        Encoder(str(tiny_backbone), precision="int8")


def test_a_device_that_is_not_here_is_refused_before_the_model_is_read(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="device is 'cuda', but torch finds no GPU here; leave device out"):
        Encoder("no model", device="cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ConfigError, match="precision openvino is for CPUs, and device is 'cuda'; give fp32 or bf16"):
        Encoder("no model", device="cuda", precision="openvino")
    with pytest.raises(ConfigError, match="device is 'gpu'; give one of cpu, cuda"):
        Encoder("no model", device="gpu")


def test_limits_of_the_server_do_not_apply_to_searches_in_this_process(index_store: Path):
    limits = {"max_k": 1, "max_batch": 1, "max_query_chars": 4, "timeout_ms": 1}
    questions = [f"who built tower {n}?" for n in range(3)]
    ids = []
    for serve in ({}, limits):
        with Index.open(index_store, settings={"serve": serve}) as index:
            ids.append([[hit.id for hit in hits] for hits in index.search(questions, k=5)])
    assert ids[0] == ids[1] and len(ids[0][0]) == 5
    with Index.open(index_store) as index, pytest.raises(ConfigError, match=r"^search: k is 0; .* passages$"):
        index.search(questions, k=0)


def test_one_version_answers_all_queries_of_a_call_whatever_other_threads_publish(index: Index, monkeypatch):
    search, change = SearchService.search, once(lambda: index.delete(["p1"]), "searched")
    monkeypatch.setattr(SearchService, "search", lambda *own: (search(*own), change("searched", 0, 0))[0])
    monkeypatch.setattr(searching, "BATCH_QUERIES", 1)
    first, second = index.search(["Who built tower 1?"] * 2, k=30)
    assert [hit.id for hit in first] == [hit.id for hit in second]
    assert index.manifest.version == 2


def test_earlier_versions_are_searched_and_explained_as_they_were_also_more_than_stay_open(index: Index):
    for text in ("A bridge of wood.", "A bridge of stone.", "A bridge of iron."):
        index.upsert([{"id": "p3", "text": text}])
    for version, text in (
        (1, ROWS[3]["text"]),
        (2, "A bridge of wood."),
        (3, "A bridge of stone."),
    ):
        hits = index.search("bridge", 24, version=version)
        assert hits.version == version and {hit.id: hit.text for hit in hits}["p3"] == text
        explanation = index.explain("bridge", "p3", version=version)
        assert explanation.version == version and explanation.passages[0].text == text
        [ranking] = index.retrieve(["bridge"], 24, version=version)
        assert [hit.id for hit in ranking.passages] == [hit.id for hit in hits]
        assert {hit.id: hit.text for hit in ranking.passages}["p3"] == text
        for answer in ("A bridge of wood.", "A bridge of stone.", "A bridge of iron."):
            report = index.evaluate([("bridge", [answer])], 24, version=version)
            assert report.version == version
            assert {row.value for row in report.rows if row.metric == "answer/top-24"} == {float(answer == text)}
    assert index.evaluate([("bridge", ["A bridge of iron."])], 24).rows[0].value == 1
    assert index.search(["bridge"], 1)[0][0].text == "A bridge of iron." and index.manifest.version == 4
    for call in (index.search, index.explain, index.retrieve, index.evaluate):
        with pytest.raises(MissingInputError, match=r"no version 9 in .*there are 1, 2, 3, 4"):
            call("bridge", version=9)
        with pytest.raises(ConfigError, match=r"version is '1'; give a number"):
            call("bridge", version="1")


def test_versions_are_verified_repaired_and_collected_in_python(index: Index):
    for number in range(4):
        index.upsert([{"id": "new", "text": f"A tower of {number} stones."}])
    with Index.open(index.run.store.path, settings={"index": {"keep_versions": 2, "grace_s": 0}}) as own:
        assert own.collect().versions == [4, 5] == [version.version for version in own.versions()]
        assert own.search("tower", 1).version == 5 and own.verify().problems == own.verify(4).problems == []
        file = next((Path(own.run.store.path) / "indexes").rglob("embeddings.arrow"))
        file.chmod(0o644)
        file.write_bytes(b"damage")
        assert own.verify().problems and own.repair().repairs
        for call in (own.verify, own.repair):
            with pytest.raises(MissingInputError, match=r"no version 1; there are 4, 5"):
                call(1)


def test_a_number_of_a_version_may_be_of_numpy_and_its_report_is_json(index: Index):
    index.delete("p1")
    assert json.loads(json.dumps(index.rollback(np.int64(1))._asdict()))["to"] == 1
    for call in (index.rollback, index.verify, index.repair):
        with pytest.raises(ConfigError, match="version is '1'; give a number"):
            call("1")


def test_a_version_that_was_collected_is_named_by_an_index_that_has_it_open(index: Index):
    with Index.open(index.run.store.path) as earlier:
        earlier.search("tower")
        for number in range(3):
            index.upsert([{**row, "text": f"A tower of {number} stones."} for row in ROWS])
        with Index.open(index.run.store.path, settings={"index": {"keep_versions": 1, "grace_s": 0}}) as own:
            own.collect()
        filtered_search = partial(earlier.search, "tower", filter={"year": 1901})
        for call in (earlier.scan, filtered_search, lambda: list(earlier.vectors())):
            with pytest.raises(MvrRayError, match="open the index again"):
                call()
        earlier.close()
        assert len(list(earlier)) == len(ROWS) == len(earlier.search("tower", 99))


def test_an_index_of_a_run_file_stays_in_its_store_whatever_the_working_folder_is(index: Index, tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text("store: {path: store}\n")
    monkeypatch.chdir(tmp_path)
    with Index.open("run.yaml") as own:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir("elsewhere")
        assert own.search("tower", 1) and own.add_feedback([("Who?", "p1", 1)]) == 1
        assert own.upsert([("new", "A new tower.")]).num_passages == len(ROWS) + 1
        assert not list(Path().iterdir())


def test_passages_are_indexed_again_by_other_settings_without_giving_them(index: Index):
    index.delete([f"p{n}" for n in range(12)])
    index.rollback(1)
    with Index.open(index.run.store.path, settings={"index": {"lexical": True}}) as own:
        manifest = own.reindex()
        assert manifest.lexical and (manifest.version, len(own)) == (4, len(ROWS))
        assert own.search("tower", 3, hybrid="rrf").version == 4


def test_an_encoder_is_exported_for_sentence_transformers(index: Index, tmp_path: Path):
    losses = index.encoder.export(tmp_path / "folder")
    assert any(loss.startswith("views: ") for loss in losses)
    vectors_QD = SentenceTransformer(str(tmp_path / "folder"), device="cpu").encode(["who built it?"])
    np.testing.assert_allclose(vectors_QD, index.encoder.embed_queries("who built it?"), atol=1e-5)
    with pytest.raises(ConfigError, match=r"^export: .*folder exists already, or the folder above it does not"):
        index.encoder.export(tmp_path / "folder")


def test_a_filter_leaves_only_what_passes(index: Index):
    ids = {hit.id for hit in index.search("who built the tower?", k=100, filter={"year": {"gte": 1920}})}
    assert ids == {row["id"] for row in ROWS if row["year"] >= 1920}
    with pytest.raises(ConfigError, match="colour"):
        index.search("who?", filter={"colour": "red"})
    condition = {"year": MappingProxyType({"gte": np.int64(1920)})}
    assert {hit.id for hit in index.search("who built the tower?", k=100, filter=condition)} == ids
    for method in (lambda condition: index.search("who?", filter=condition), index.scan):
        assert {one.id for one in method({"id": {"in": np.array(["p1"])}})} == {"p1"}
        with pytest.raises(ConfigError, match="JSON has no value such as"):
            method({"year": {"in": {1920}}})
    with pytest.raises(ConfigError, match="JSON has no value such as"):
        index.delete(filter={"year": {"in": {1920}}})
    assert {hit.id for hit in index.search("who?", filter={"year": {"in": [Decimal(1920), 1921]}})} == {"p20", "p21"}
    index.delete(filter={"id": {"in": np.array(["p1"])}})
    assert "p1" not in index and "p2" in index


def test_a_date_of_python_is_its_midnight_where_a_timestamp_is_compared(tiny_backbone: Path, tmp_path: Path):
    rows = [{"id": str(n), "text": f"Tower {n}.", "seen": datetime(2020, 6, n, 12)} for n in (1, 2, 3)]
    with Index.build(rows, model=str(tiny_backbone), path=tmp_path / "store", settings=SMALL) as index:
        for start in ("2020-06-02", date(2020, 6, 2), datetime(2020, 6, 2)):
            assert {hit.id for hit in index.search("tower", filter={"seen": {"gte": start}})} == {"2", "3"}


def test_a_copy_of_an_open_index_searches_shards_of_its_own(index: Index):
    before = index.search("Who built tower 3?")
    with pickle.loads(pickle.dumps(index)) as other, copy.deepcopy(index) as third:
        index.close()
        assert other.search("Who built tower 3?") == third.search("Who built tower 3?") == before


def test_a_closed_index_has_no_file_open_and_no_encoder_in_memory(index: Index):
    """Python's next collection can be hundreds of opened indexes away."""

    def open_files() -> list[str]:
        names = (os.path.realpath(link) for link in Path("/proc/self/fd").iterdir())
        return [name for name in names if name.startswith(str(index.run.store.path))]

    gc.disable()
    try:
        index.search("river", k=2, filter={"year": 1905})
        index.explain("river", "p1")
        with index._router.pin() as router:
            encoder = ref(router.encoder)
        del router
        assert open_files() and encoder()
        index.close()
        assert not open_files() and not encoder()
    finally:
        gc.enable()


def test_an_open_encoder_shows_its_size_and_fingerprint(index: Index):
    encoder = index.encoder
    assert repr(encoder) == f"Encoder(up to 3 views of 64, fingerprint {encoder.fingerprint})"


@pytest.mark.parametrize("size", [0, -1, 1.5, None, True])
def test_a_batch_of_no_size_is_refused(index: Index, size):
    with pytest.raises(ConfigError, match=f"^batch_size is {size}; give a whole number of at least 1$"):
        index.encoder.embed_queries(["A question?"], batch_size=size)
    with pytest.raises(ConfigError, match=f"^tokens_per_batch is {size}; give a whole number of at least 1$"):
        index.encoder.embed_passages(["A passage."], tokens_per_batch=size)


def test_upserts_and_deletions_give_the_answers_of_an_index_built_from_nothing(
    index: Index, tiny_backbone: Path, tmp_path: Path
):
    question = "who built tower 7?"
    assert index.search(question)  # the first version is open when the next ones come
    upserts = [{**ROWS[7], "text": "Bananas are yellow."}, {**ROWS[0], "id": "new", "text": "Tower 7 again."}]
    version = index.upsert(upserts)
    assert (version.version, version.metrics["encoded"], len(index)) == (2, 2, 25)
    assert (same := index.upsert(upserts)).version == 2 and same.metrics["encoded"] == 0
    with Index.open(index.run.store.path, settings={"index": {"precision": "openvino"}}) as other:
        assert other.upsert(upserts).version == 2  # the next `reindex` embeds in another precision
    index.delete(["p3", "unknown"])
    rows = [row for row in ROWS if row["id"] not in ("p3", "p7")] + upserts
    fresh = Index.build(rows, model=str(tiny_backbone), path=tmp_path / "fresh", settings=SMALL)
    for k in (3, 100):
        ways = [
            [(hit.id, hit.score, hit.text, hit.fields) for hit in one.search(question, k)] for one in (index, fresh)
        ]
        assert ways[0] == ways[1]
    assert [line.version for line in index.versions()] == [1, 2, 3]
    index.rollback(1)
    assert (len(index), index.manifest.operation) == (24, "rollback")
    assert "p3" in {hit.id for hit in index.search(question, 100)}


def test_a_set_that_is_added_while_a_change_waits_for_index_stays_with_the_changed_corpus(index: Index, tmp_path: Path):
    (tmp_path / "changes.jsonl").write_text('{"id": "p3", "delete": true}\n')
    update(index.run.prepare, Store(index.run.store.path), str(tmp_path / "changes.jsonl"), index="index")
    own = [{"question": f"Who built tower {n}?", "id": f"q{n}", "positive_ids": [f"p{n}"]} for n in (3, 4)]
    index.add_questions(own, "towers")
    store = Store(index.run.store.path)
    last, first = Corpus.open(store, "corpus"), Corpus.open(store, "corpus", index.manifest.corpus_digest)
    assert [[one.id for one in read_questions(of, "towers")] for of in (first, last)] == [["q3", "q4"], ["q4"]]


@pytest.mark.parametrize("step", ["parts written", "encode"])
def test_a_set_that_is_added_or_replaced_while_a_change_is_made_is_of_the_changed_corpus(index: Index, step: str):
    def questions(*numbers: int) -> list[dict[str, object]]:
        return [{"question": f"Who built {n}?", "id": f"q{n}", "positive_ids": [f"p{n}"]} for n in numbers]

    def add(*_: object) -> None:
        for name in ("added", "replaced"):
            index.add_questions(questions(3, 4), name)

    for name in ("replaced", "kept"):
        index.add_questions(questions(3, 5), name)
    index.upsert([("p5", "Another text.")], progress=once(add, step))
    index.delete("p3")
    corpus = Corpus.open(Store(index.run.store.path), "corpus", index.manifest.corpus_digest)
    ids = {name: [one.id for one in read_questions(corpus, name)] for name in question_sets(corpus)}
    assert ids == {"added": ["q4"], "kept": ["q5"], "replaced": ["q4"]}


def test_an_index_shows_the_version_that_it_answers_from_and_changes_the_newest_one(index: Index):
    """Another `Index` over the same store publishes a version after this one has searched."""

    def state() -> tuple[int, int, int, int, int]:
        hits = index.search("who built the tower?", k=100)
        [in_repr] = map(int, re.findall(r"version (\d+)", repr(index)))
        return index.manifest.version, hits.version, in_repr, len(index), len(hits)

    assert state() == (1, 1, 1, 24, 24)
    with Index.open(index.run.store.path) as other:
        other.delete("p3")
    assert state() == (1, 1, 1, 24, 24)
    index.close()
    assert state() == (2, 2, 2, 23, 23)
    with Index.open(index.run.store.path) as other:
        other.delete("p4")
    index.delete("p5")
    assert state() == (4, 4, 4, 21, 21)


WRONG_ARGUMENTS = {
    "settings are texts": (lambda index: Index.open(index.run.store.path, settings=["index"]), "settings is"),
    "a section is a number": (lambda index: Index.open(index.run.store.path, settings={"index": 3}), "settings is"),
    "another index than that of a run file": (
        lambda index: Index.open(f"{index.run.store.path}/run.yaml", name="other"),
        r"describes index 'index', not 'other'; give the path of the store with name=, or settings=\{'index': ",
    ),
    "a section of a build": (lambda index: Index.build(ROWS, path="never", settings={"index": 3}), "settings is"),
    "k is no number": (lambda index: index.evaluate([("who?", "king 9")], k="one"), r"evaluate\.k"),
    "no k": (lambda index: index.evaluate(["who?"], k=[]), r"evaluate\.k: \[\] is not a list of at least 1"),
    "ids": (lambda index: index.passages(2.5), "float holds no rows"),
    "numbers that are no ids": (lambda index: index.passages([1.0]), r"item 0 is 1\.0, no id; give texts and whole"),
    "a frame of ids": (lambda index: index.passages(pandas.DataFrame({"id": ["p1"]})), r"item 0 is \{'id': 'p1'\}, no"),
    "ids to delete": (lambda index: index.delete(2.5), "float holds no rows"),
    "nothing to delete": (lambda index: index.delete(), "delete: neither ids nor a filter are given"),
    "judgements": (lambda index: index.add_feedback(5), "int holds no rows"),
    "questions to embed": (lambda index: index.encoder.embed_queries(5), "int holds no rows"),
}


@pytest.mark.parametrize(("call", "message"), WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_an_argument_of_a_wrong_type_is_an_error_of_the_package(index: Index, call, message: str):
    with pytest.raises((ConfigError, DataError), match=message):
        call(index)


@pytest.fixture
def command_store(tiny_backbone: Path, tmp_path: Path) -> Path:
    """A store of the command line, without a run file, of chunks, with words, and without redundant views."""
    store, source, run_file = tmp_path / "commands", tmp_path / "long.jsonl", tmp_path / "run.yaml"
    texts = [" ".join(f"Tower {n} has {word} stones." for word in range(20)) for n in range(6)]
    source.write_text("".join(json.dumps({"id": f"p{n}", "text": text}) + "\n" for n, text in enumerate(texts)))
    sections = {
        "store": {"path": str(store)},
        "prepare": {"chunk_words": 30, "num_shards": 2, "sources": [str(source)]},
        "encoder": {**SMALL["encoder"], "backbone": str(tiny_backbone)},
        "index": {**SMALL["index"], "lexical": True, "language": "german", "prune_views": 0.25},
    }
    run_file.write_text(json.dumps(sections))
    for stage in ("prepare", "index"):
        with pytest.raises(SystemExit) as end:
            main([stage, str(run_file)])
        assert not end.value.code
    return store


def test_a_store_of_the_command_line_is_changed_in_python_as_its_run_file_says(command_store: Path, tmp_path: Path):
    run_file = tmp_path / "run.yaml"
    for open_from in (run_file, command_store):
        with Index.open(open_from) as index:
            index.rollback(1)
            index.delete("p1")
            assert not index.passages([f"p1#{number}" for number in range(4)])
            index.upsert([("p2", "A tower of gold. " * 20)])
            assert {*index.passages(["p2", "p2#0", "p2#1", "p2#2", "p2#3"])} == {"p2#0", "p2#1", "p2#2"}
            assert index.search("gold", hybrid=30)[0].id.startswith("p2#")
            with pytest.raises(MissingInputError, match=r"1 of its 1 gold passages are not in corpus .*'p1'"):
                index.evaluate([{"question": "Of gold?", "positive_ids": ["p1"]}], k=1)
            manifest = index.manifest
        if open_from == run_file:
            by_run_file = manifest
    for name in ("shards", "lexical", "config_digest"):
        assert getattr(manifest, name) == getattr(by_run_file, name)
    assert manifest.lexical is not None and manifest.metrics["prune_views"] == 0.25


@pytest.mark.parametrize(("words", "expected"), [([], "IVF256,PQ8x4fs"), (["index.factory=SQ8"], "SQ8")])
def test_a_store_without_a_run_file_has_the_faiss_factory_of_the_next_encoder_or_the_named_one(
    command_store: Path, tmp_path: Path, words: list[str], expected: str
):
    with pytest.raises(SystemExit):
        main(["index", str(tmp_path / "run.yaml"), *words])
    with Index.open(command_store, settings={"index": {"kind": "faiss"}}) as index:
        assert checked_params(index.run, dimension=16).factory == expected


def test_commands_rank_and_measure_an_earlier_version(command_store: Path, tmp_path: Path, capsys):
    run_file, output, questions = tmp_path / "run.yaml", tmp_path / "ranked.trec", tmp_path / "new.jsonl"
    questions.write_text(json.dumps({"id": "q", "question": "Of gold?", "answers": ["gold"]}) + "\n")

    def run(*words: str) -> tuple[int, Any, str]:
        with pytest.raises(SystemExit) as end:
            main([words[0], str(run_file), "--json", *words[1:]])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), json.loads(out) if out else None, err

    with Index.open(command_store) as index:
        index.add_questions(questions, "new")
        index.upsert([("p2", "A tower of gold. " * 20)])
        index.upsert([("p2", "A tower of tin. " * 20)])
    rankings = set()
    for version, value in ((1, 0), (2, 1), (3, 0)):
        number = () if version == 3 else (f"version={version}",)
        _, report, _ = run("evaluate", "evaluate.questions=[new]", "evaluate.bm25=false", "evaluate.k=[100]", *number)
        assert (report["version"], report["rows"][0]["value"]) == (version, value)
        _, report, _ = run("retrieve", f"questions={questions}", f"output={output}", "retrieve.k=100", *number)
        assert report["version"] == version
        _, report, _ = run("evaluate", f"ranking={output}", "evaluate.questions=[new]", "evaluate.k=[20]", *number)
        assert (report["version"], report["rows"][0]["value"]) == (version, value)
        rankings.add(output.read_text())
    assert len(rankings) == 3
    for stage, *words in (("evaluate",), ("retrieve", f"questions={questions}", f"output={output}")):
        assert "no version 9" in run(stage, *words, "version=9")[2]
        code, _, error = run(stage, *words, "version=x")
        assert (code, f"{stage}: version=x is not a whole number; `mvr-ray versions" in error) == (2, True), error


def test_the_id_of_a_cut_text_stands_for_the_chunks_that_hold_the_answers(command_store: Path, tmp_path: Path):
    """As `prepare` carries over the same questions about the same texts."""
    own = [
        {"id": "one", "question": "Which stones?", "answers": ["has 13 stones"], "positive_ids": ["p4"]},
        {"id": "two", "question": "Which?", "answers": ["has 9 stones", "has 1 stones"], "positive_ids": ["p2", "p3"]},
        {"id": "no answer", "question": "Of what?", "positive_ids": ["p5"]},
        {"id": "chunk", "question": "Of what?", "answers": ["stones"], "positive_ids": ["p5#2"]},
    ]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({**row, "text": row["question"]}) + "\n" for row in own[:3]))
    run = RunConfig.model_validate(json.loads((tmp_path / "run.yaml").read_text()))
    sources = [*run.prepare.sources, SourceConfig(path=str(questions), questions="own", passages=False)]
    store = Store(str(command_store))
    with Index.open(command_store) as index:
        index.add_questions(own, "added")
        chunk_ids = [question.positive_ids for question in read_questions(Corpus.open(store, "corpus"), "added")]
        assert chunk_ids[2:] == [("p5#0",), ("p5#2",)]
        with pytest.raises(MissingInputError, match=r"question set 'wrong': 1 of its 2 gold .* \(first: 'p77'\)"):
            index.add_questions([own[0], {"question": "Who?", "positive_ids": ["p77"]}], "wrong")
        whole = index.evaluate(own, k=3).rows
        by_chunk = [{**row, "positive_ids": list(ids)} for row, ids in zip(own, chunk_ids)]
        assert whole == index.evaluate(by_chunk, k=3).rows
    prepare(run.prepare.model_copy(update={"sources": sources, "corpus": "other"}), store)
    prepared_ids = [question.positive_ids for question in read_questions(Corpus.open(store, "other"), "own")]
    assert chunk_ids[:3] == prepared_ids
    assert [len(ids) for ids in prepared_ids] == [1, 4, 1]


def test_a_store_whose_chunk_words_no_program_recorded_is_changed_by_its_run_file_alone(
    command_store: Path, tmp_path: Path
):
    corpus = Corpus.open(Store(str(command_store)), "corpus")
    counts = {name: count for name, count in corpus.info.counts.items() if name not in ("chunk_words", "max_passages")}
    Corpus(corpus.store, dataclasses.replace(corpus.info, counts=counts)).publish(after=corpus.number)
    with Index.open(command_store) as index:
        for change in (lambda: index.delete("p1"), lambda: index.upsert([("p1", "A text.")])):
            with pytest.raises(ConfigError, match=r"prepare\.chunk_words.*nothing was changed\. Open the run file"):
                change()
        assert index.manifest.version == 1
    for open_from, settings in ((command_store, {"prepare": {"chunk_words": 30}}), (tmp_path / "run.yaml", {})):
        with Index.open(open_from, settings=settings) as index:
            index.delete("p1")
            assert not index.passages(["p1#0", "p1#1"])


def test_a_rollback_on_the_command_line_ends_with_a_verdict_and_the_next_command(index: Index, capsys):
    index.delete("p3")
    words = [f"{index.run.store.path}/run.yaml", f"store.path={index.run.store.path}"]
    with pytest.raises(SystemExit) as end:
        main(["versions", words[0], "rollback", "1", words[1]])
    out, err = capsys.readouterr()
    assert end.value.code == 0
    assert out.endswith("\nlive: version 3 of index index, the content of version 1, 24 passages\n")
    assert err.endswith(f'next: mvr-ray search {" ".join(words)} "your question"\n')


def test_a_change_that_is_refused_names_the_id_and_the_item_and_no_file(index: Index):
    cure = "nothing was changed. Correct the items and call the method again"
    with pytest.raises(DataError) as error:
        index.upsert([("x", "A text."), ("x", "Another text.")])
    assert str(error.value) == f"item 1 names passage 'x', which item 0 names already; keep one of them; {cure}"
    with pytest.raises(DataError, match=r"^item 0: text is empty.*; nothing was changed\. Correct the items"):
        index.upsert([("x", "")])
    with pytest.raises(DataError, match=r"^item 1 names passage 'p1', which item 0 names already"):
        index.delete(["p1", "p1"])
    assert (index.manifest.version, len(index)) == (1, 24)


def test_an_index_is_changed_by_the_rows_that_made_it(tiny_backbone: Path, tmp_path: Path):
    rows = [
        {"id": n, "text": f"Text {n}.", "year": n, "price": Decimal("1.5"), "raw": b"x", ("a", "b"): 1}
        for n in range(3)
    ]
    with Index.build(rows, model=str(tiny_backbone), path=tmp_path / "store", settings=SMALL) as index:
        assert index.upsert(rows).version == 1
        assert index.upsert([{**rows[0], "text": "A new text."}]).version == 2
        assert dict(index.passages(0)["0"].fields) == {"year": 0, "price": 1.5}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"year": Decimal("1.5")}, r"field 'year': 1\.5 is no int"),
        ({"year": 10**5000}, "field 'year': "),
        ({"place": date(2020, 1, 1)}, r"field 'place': datetime\.date\(2020, 1, 1\) is no string"),
        ({"place": time(1, 2)}, r"field 'place': datetime\.time\(1, 2\) is no string"),
        ({"title": date(2020, 1, 1)}, r"title is datetime\.date\(2020, 1, 1\), not a text"),
        ({"text": date(2020, 1, 1)}, r"text is datetime\.date\(2020, 1, 1\), not a text"),
        ({"id": date(2020, 1, 1)}, r"id is datetime\.date\(2020, 1, 1\), not a text or a whole number"),
        ({"id": 10**5000}, ""),
        ({"id": 7.0}, "id is 7.0, .*; a missing id elsewhere in a column makes pandas read whole numbers as such"),
    ],
)
def test_an_upsert_refuses_the_values_that_a_build_refuses(tmp_path: Path, row: dict, reason: str):
    cfg, store = PrepareConfig(fields={"year": "int", "place": "string"}), Store(str(tmp_path))
    rows = [{"id": "a", "text": "Text."}, {"id": "b", "text": "Text.", **row}]
    with pytest.raises(DataError, match=f"passage 1: {reason}"):
        prepare(cfg, store, records=passage_records(rows))
    prepare(cfg, store, records=passage_records([("a", "Text.")]))
    with pytest.raises(DataError, match=f"^item 1: {reason}"):
        update_by_records(cfg, store, upsert_records(rows))


def test_a_build_with_a_model_that_is_none_leaves_the_corpus_that_changes_start_from(index: Index, tmp_path: Path):
    for settings in (SMALL, SMALL | {"encoder": {"num_views": 3, "sentences": "corpus", "strategy": "snippets"}}):
        with pytest.raises(EncoderError):
            Index.build(["One."], model=str(tmp_path), path=index.run.store.path, settings=settings)
    assert index.upsert([("new", "A tower.")]).num_passages == len(ROWS) + 1


def test_a_run_file_holds_settings_of_any_type_of_text(tiny_backbone: Path, tmp_path: Path):
    Index.build(
        ROWS[:2],
        model=np.str_(tiny_backbone),
        path=tmp_path / "own",
        settings={np.str_("index"): {np.str_("precision"): np.str_("fp32")}},
    )
    assert Index.open(tmp_path / "own").run.encoder.backbone == str(tiny_backbone)


def test_a_command_that_searches_once_has_no_deadline(index: Index, capsys):
    run_file = Path(index.run.store.path) / "run.yaml"
    run_file.write_text(run_file.read_text() + "serve: {timeout_ms: 1}\n")
    with pytest.raises(SystemExit) as end:
        main(["search", str(run_file), "Who built tower 3?", "--json"])
    assert not end.value.code and json.loads(capsys.readouterr().out)["results"][0]


def test_a_search_has_ten_hits_in_python_and_on_the_command_line(index: Index, capsys):
    run_file = Path(index.run.store.path) / "run.yaml"
    with pytest.raises(SystemExit):
        main(["search", str(run_file), "Who built tower 3?", "--json"])
    [hits] = json.loads(capsys.readouterr().out)["results"]
    assert [hit["id"] for hit in hits] == [hit.id for hit in index.search("Who built tower 3?")] and len(hits) == 10


def test_a_uuid_is_an_id_wherever_ids_are_taken(index: Index):
    name = UUID(int=7)
    assert [record.passage.id for record in passage_records([(name, "A text.")])] == [str(name)]
    index.upsert([(name, "A text.")])
    assert [*index.passages(name)] == [str(name)]
    index.delete(name)
    assert not index.passages([name])


def once(call: Callable[[], object], at: str) -> Progress:
    """Return a callback that makes a call at the first report of `at`."""
    calls = iter([call])
    return lambda what, *_: [own() for own in ([*islice(calls, 1)] if what == at else [])]


def test_threads_that_change_an_index_at_once_lose_nothing(index: Index):
    rows = [(f"new{n}", f"Text {n}.") for n in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda row: index.upsert([row]), rows))
    assert {*index.passages([name for name, _ in rows])} == {name for name, _ in rows}


def test_threads_open_an_index_once_and_follow_a_change_during_that(index: Index, monkeypatch):
    routers, is_open, open_one = [], Event(), hot_swap.open_hot_swap_router

    @contextmanager
    def open_slowly(*own, **options):
        with open_one(*own, **options) as router:
            routers.append(router)
            is_open.set()
            for _ in range(1000):
                if len(index.versions()) == 2:
                    break
                sleep(0.02)
            sleep(0.5)  # the change looks for an open router
            yield router

    monkeypatch.setattr(hot_swap, "open_hot_swap_router", open_slowly)
    with ThreadPoolExecutor(3) as pool:
        searches = [pool.submit(index.search, "Who built tower 3?") for _ in range(3)]
        assert is_open.wait(20)
        index.upsert([("new", "A text.")])
        assert all(search.result() for search in searches)
    assert len(routers) == 1 and index.manifest.version == 2


def test_an_index_that_a_thread_closes_meanwhile_answers_all_searches(index: Index):
    ends = Event()

    def close_often() -> None:
        while not ends.wait(0.01):
            index.close()

    with ThreadPoolExecutor(3) as pool:
        closing = pool.submit(close_often)
        searches = [pool.submit(index.search, "Who built tower 3?") for _ in range(40)]
        try:
            assert all(search.result()[0].id for search in searches)
        finally:
            ends.set()
        closing.result()


def test_what_is_not_the_first_argument_is_given_by_its_name():
    """A path is no model, and a second id no progress."""
    for call in (Index.build, Index.upsert, Index.delete, Index.refine):
        with pytest.raises(TypeError, match="positional argument"):
            call(["p1"], "p2", "p3")


@pytest.mark.parametrize("at", ["parts written", "build shards"])
def test_a_change_goes_on_after_a_faster_one_and_keeps_it(index: Index, at: str):
    with Index(index.run) as rival:
        rows = [("mine", "Text."), ("p1", "Of me, and later of the rival.")]
        index.upsert(rows, progress=once(lambda: rival.upsert([("other", "Text."), ("p1", "Of the rival.")]), at))
    passages = index.passages(["mine", "other", "p1"])
    assert len(passages) == 3
    assert passages["p1"].text == ("Of the rival." if at == "build shards" else rows[1][1])


def test_a_version_of_an_earlier_corpus_is_not_published_over_one_of_a_later(index: Index, monkeypatch):
    with Index(index.run) as rival:
        faster = once(lambda: rival.upsert([("other", "Text.")]), "resolve")
        resolve = external_vectors.resolve_encoder
        monkeypatch.setattr(
            external_vectors, "resolve_encoder", lambda *own: (faster("resolve", 0, 0), resolve(*own))[1]
        )
        index.upsert([("mine", "Text.")])
    assert {*index.passages(["mine", "other"])} == {"mine", "other"}


def test_a_change_opens_few_files_more_for_each_earlier_version(index: Index, monkeypatch):
    counts, map_file = [], parts.map_file
    for n in range(12):
        files: list[Path] = []
        monkeypatch.setattr(parts, "map_file", lambda path, own=files: own.append(path) or map_file(path))
        index.upsert([("p1", f"Text {n}.")])
        counts.append(len(files))
    assert counts[-1] - counts[3] <= 2 * 8, counts


@pytest.mark.parametrize("numbers", [[1], range(0, 24, 5)], ids=["one shard", "all shards"])
def test_an_upsert_reads_a_manifest_and_two_descriptions_of_each_version_that_stands_whatever_changes(
    index: Index, numbers: Sequence[int], monkeypatch: pytest.MonkeyPatch
):
    """Those tell which shards and embeddings can be reused. Nothing else grows with the history but files of texts."""
    renew = "mvr_ray.distributed.indexing.shards.renew_periodically"  # in a thread, which reads what is staged
    monkeypatch.setattr(renew, lambda *_: nullcontext())
    counts: list[Counter[str]] = []

    def with_count(name: str) -> Callable[..., Any]:
        real = getattr(Store, name)
        return lambda *arguments: (counts[-1].update([name]), real(*arguments))[1]

    for name in ("read_bytes", "exists", "list", "age_s", "sha256"):
        monkeypatch.setattr(Store, name, with_count(name))
    for step in range(12):
        counts.append(Counter())
        index.upsert([{"id": f"p{number}", "text": f"Text {step} of tower {number}."} for number in numbers])
    growth = (counts[10] & counts[11]) - (counts[2] | counts[3])
    assert growth.keys() == {"read_bytes"} and growth["read_bytes"] <= 3 * 8


def test_a_change_goes_on_where_faster_processes_remove_its_plans(index: Index, monkeypatch):
    read, shards = build_index._encoded_chunks, iter([None] * 2)

    def read_without_plan(store: Store, task: EncodeTask, corpus: Corpus, shard: int, *own: Any) -> Iterator[Any]:
        for _ in islice(shards, 1):
            store.delete(task.plan_path(shard))
        return read(store, task, corpus, shard, *own)

    monkeypatch.setattr(build_index, "_encoded_chunks", read_without_plan)
    index.upsert([("new", "Text.")])
    assert index.passages("new") and not [*shards]


@pytest.mark.parametrize("at", ["parts written", "publish", "build shards"])
def test_a_roll_back_during_an_upsert_stays(index: Index, at: str, monkeypatch: pytest.MonkeyPatch):
    index.upsert([("p1", "A bad text.")])
    with Index(index.run) as rival:
        progress, publish = once(lambda: rival.rollback(1), at), build_index.index
        monkeypatch.setattr(
            build_index, "index", lambda *own, **two: (progress("publish", 0, 0), publish(*own, **two))[1]
        )
        index.upsert([("new", "Text.")], progress=progress)
    assert index.passages(["new", "p1"])["p1"].text == ROWS[1]["text"]
    assert len(index) == 25


def test_half_a_surrogate_is_refused_by_item_and_changes_nothing(index: Index):
    for change, reason in (
        (lambda: index.upsert([("x", "A text."), ("y", "bad \ud83d text")]), "item 1: text is not valid UTF-8"),
        (lambda: index.upsert([{"id": "x", "text": "A text.", "year": "\ud83d"}]), "item 0: field 'year'"),
        (lambda: index.delete(["p1", "p\ud83d"]), "item 1: id is not valid UTF-8"),
    ):
        with pytest.raises(DataError, match=f"^{reason}.*nothing was changed"):
            change()
    assert index.passages(["p\ud83d"]) == {}
    assert (index.manifest.version, len(index)) == (1, 24)


@pytest.mark.parametrize("queries", [np.ones(32, np.float32), [0.1, 0.2], 5, [None], [["x"]], ["x", [1.0]]])
def test_what_is_neither_texts_nor_vectors_is_refused(index: Index, queries):
    with pytest.raises(ConfigError, match=r"^search: "):
        index.search(queries)


def test_one_passage_in_place_of_a_list_and_a_path_in_place_of_a_run_are_refused_with_what_to_give(index: Index):
    for one in ({"id": "p9", "text": "A tower."}, ("p9", "A tower.")):
        with pytest.raises(DataError, match=r"give a list of .*mappings"):
            index.upsert(one)
    with pytest.raises(ConfigError, match=r"^path is None, which names no store"):
        Index.build(["A tower."], path=None)
    with pytest.raises(ConfigError, match=r"^Index: 'towers' is no run; give it to Index\.open"):
        Index("towers")


def test_a_filter_that_is_a_text_is_refused_with_an_example(index: Index):
    with pytest.raises(ConfigError, match=r"^search: a filter is an object of fields and conditions; give"):
        index.search("tower", filter="year > 3")


def test_a_frame_or_a_mapping_is_refused_and_its_names_are_no_questions(index: Index):
    for queries in (
        pandas.DataFrame({"question": ["Who?"]}),
        pandas.DataFrame([[1.0, 2.0]]),
        polars.DataFrame({"question": ["Who?"]}),
        {"question": "Who?"},
        [{"question": "Who?"}],
    ):
        with pytest.raises(ConfigError, match=r"^search: .*give a text, a list of texts, or vectors_QD"):
            index.search(queries)


def test_an_error_about_one_of_several_queries_has_its_number(index: Index):
    vectors_QD = np.ones((258, index.manifest.dimension), np.float32)
    vectors_QD[257] = 0
    for queries, message in (
        (["tower", " "], "query 1: the query is empty; "),
        (["tower"] * 256 + ["\ud83d"], "query 256: the text holds half of a surrogate pair; "),
        (vectors_QD, "query 257: the vector is zero; "),
        (" ", "the query is empty; "),
    ):
        with pytest.raises(ConfigError, match=f"^search: {message}"):
            index.search(queries)
    with pytest.raises(ConfigError, match=r"^explain: question 1: the question is empty; "):
        index.explain(["tower", ""])


def test_an_argument_of_another_type_is_refused_with_its_value(index: Index):
    for arguments, message in (
        ({"hybrid": True}, "hybrid is True; "),
        ({"hybrid": -1}, "hybrid is -1, neither a number from 0 to 1e20 nor rrf or off; "),
        ({"k": True}, "k is True; "),
        ({"k": None}, "k is None; it must be a valid integer$"),
        ({"k": 2.5}, "k is 2.5; it must be a valid integer"),
    ):
        with pytest.raises(ConfigError, match=f"^search: {message}"):
            index.search("tower", **arguments)


def test_a_query_that_is_no_text_is_named_by_its_number(index: Index):
    with pytest.raises(ConfigError, match=r"^search: query 1 is nan; "):
        index.search(pandas.Series(["Who?", None]))
    with pytest.raises(ConfigError, match=r"^search: queries are {'question': 'Who\?'}; "):
        index.search({"question": "Who?"})


def test_every_column_of_questions_is_that_of_its_list(index: Index):
    texts = ["Who built tower 3?", "Which town?"]
    columns = (tuple(texts), np.array(texts), pandas.Series(texts), polars.Series(texts), pa.array(texts))
    assert all(index.search(column) == index.search(texts) for column in columns)
    assert index.search(pa.chunked_array([texts])) == index.search(texts)


def test_building_again_is_a_version_over_the_new_passages_and_embeds_only_what_changed(
    index: Index, tiny_backbone: Path
):
    again = Index.build(ROWS[:20], model=str(tiny_backbone), path=index.run.store.path, settings=SMALL)
    assert (again.manifest.version, again.manifest.metrics["encoded"], len(again)) == (2, 0, 20)


def test_the_run_file_of_a_store_describes_the_index_that_it_names_also_where_a_caller_names_it(
    index: Index, tiny_backbone: Path
):
    settings, store = SMALL | {"index": {"name": "second"}, "search": {"hybrid": 7}}, index.run.store.path
    second = Index.build(ROWS, model=str(tiny_backbone), path=store, settings=settings)
    assert Index.open(store).run == Index.open(store, name="second").run == second.run
    first = Index.open(store, name="index")
    assert (first.run.index.name, first.run.search.hybrid) == ("index", None)


def test_a_build_names_another_index_whose_next_change_applies_to_its_passages(
    index: Index, tiny_backbone: Path, caplog
):
    def build(rows: list, **prepare: str) -> None:
        settings = SMALL | {"index": {"name": "second"}, "prepare": {**SMALL.get("prepare", {}), **prepare}}
        Index.build(rows, model=str(tiny_backbone), path=index.run.store.path, settings=settings)

    build(ROWS)
    build(ROWS[:3], corpus="other")
    assert "too, and its next change" not in caplog.text
    build(ROWS[:3])
    assert "index 'index' is of corpus 'corpus', too, and its next change applies to the passages" in caplog.text
    assert index.upsert([("new", "A tower.")]).num_passages == 4


def test_evaluation_counts_questions_whose_answer_or_gold_passage_is_among_the_hits(index: Index):
    questions = [
        ("who built tower 7?", "king 49"),
        {"question": "tower 9?", "answers": ["no such"], "positive_ids": ["p9"]},
    ]
    hits = index.search(["who built tower 7?", "tower 9?"], k=24)
    rows = {(row.metric, row.questions): row for row in index.evaluate(questions, k=[1, 24]).rows}
    answer, gold = rows["answer/top-24", "evaluate"], rows["gold/top-24", "evaluate"]
    has_answer = [any("king 49" in (hit.text or "") for hit in hits[0]), False]
    assert (answer.value, answer.n) == (sum(has_answer) / 2, 2)
    assert (gold.value, gold.n) == (1.0, 1)
    assert index.evaluate(index.add_questions(questions, "towers"), k=[24]).rows[0].questions == "towers"


def test_evaluate_and_retrieve_obey_the_settings_that_the_commands_obey(index_store: Path, tmp_path: Path, capsys):
    retrieval = {"filter": {"year": {"lt": 1904}}, "k": 3, "strict_answers": True}
    settings = {"retrieve": retrieval, "evaluate": {"k": [1, 2]}}
    with Index.open(index_store, settings=settings) as index:
        [ranking] = index.retrieve([("Who built it?", "king 9")])
        hits = index.search("Who built it?", 3, filter=retrieval["filter"])
        assert [hit.id for hit in ranking.passages] == [hit.id for hit in hits]
        [ranking] = index.retrieve([("Who built it?", "king 9")], k=9, filter={"opened": {"gte": date(1950, 1, 23)}})
        assert {hit.id for hit in ranking.passages} == {"p22", "p23"}
        assert len(index.retrieve(["Who built it?"], 9, filter={})[0].passages) == 9
        report = index.evaluate([("Who built it?", "king 9")])
        assert {row.metric for row in report.rows} == {"answer/top-1", "answer/top-2"}
        with pytest.raises(DataError, match=r"would match every passage"):
            index.retrieve([("Who built it?", "")])
        with pytest.raises(ConfigError, match=r"^retrieve: filter: the corpus has no field 'bad'"):
            index.retrieve(["a"], filter={"bad": 1})
    with Index.open(index_store, settings={"retrieve": {"filter": {"bad": 1}}}) as index:
        for stage in (index.retrieve, index.evaluate):
            with pytest.raises(ConfigError, match=r"^retrieve\.filter: the corpus has no field 'bad'"):
                stage([("a", "b")])
    file, output = tmp_path / "questions.jsonl", tmp_path / "ranking.json"
    file.write_text('{"question": "a"}\n')
    own = [f"store.path={index_store}", f"questions={file}", f"output={output}", "retrieve.filter={bad: 1}"]
    with pytest.raises(SystemExit) as end:
        main(["retrieve", str(index_store / "run.yaml"), *own])
    assert end.value.code == 2 and "no field 'bad'" in capsys.readouterr().err


@pytest.mark.parametrize(("own_id", "is_itself"), [("p3", True), ("q3", False), ("p4", False)])
def test_a_question_that_is_a_passage_itself_is_no_hit_of_its_own(index: Index, own_id: str, is_itself: bool):
    """As in ArguAna and Quora, whose questions are passages; other sets number questions and passages alike."""
    text = ROWS[3]["text"]
    same, nearest, *_ = (hit.id for hit in index.search(text, k=24))
    question = Question(own_id, text, (), (nearest,))
    run = index.run.model_copy(update={"evaluate": EvaluateConfig(questions=["own"], k=[1])})
    index.add_questions([question], "own")
    for report in (evaluate(run), analyze(run)):
        values = {row.metric: row.value for row in report.rows}  # the last system has all views
        assert values["gold/top-1"] == is_itself and (values["gold/ndcg@10"] == 1) == is_itself
    with open_router(run) as router, ResultStore(router.store, "index") as result_store:
        [dense] = try_weights(run, router, QuestionSet("own", [question]), None, result_store, [None])
    assert dense.top1 == is_itself
    corpus = only_corpus(Store(run.store.path))
    own_ids = own_passages([question], corpus).get(own_id, ())
    negatives = filter_hits(question, own_ids, [same, nearest], corpus, AnswerMatcher(), run.mine).ids
    assert same == "p3" and negatives == [same] * (not is_itself)


@pytest.mark.parametrize("chunk_words", [0, 4])
def test_a_question_that_is_a_passage_is_found_behind_a_prefix_and_in_chunks(tmp_path: Path, chunk_words: int):
    texts = {"a": "one two three four five six seven", "b": "eight nine ten eleven twelve"}
    source = tmp_path / "own.jsonl"
    source.write_text("".join(json.dumps({"id": name, "text": text}) + "\n" for name, text in texts.items()))
    sources = [SourceConfig(path=str(source), id_prefix="own:")]
    cfg = PrepareConfig(sources=sources, chunk_words=chunk_words, num_shards=2)
    store = Store(str(tmp_path / "store"))
    prepare(cfg, store)
    ids = {name: {f"own:{name}#0", f"own:{name}#1"} if chunk_words else {f"own:{name}"} for name in texts}
    gold = tuple(ids["b"])
    same, other = Question("a", texts["a"], (), gold), Question("b", "of another text", (), gold)
    assert own_passages([same, other], only_corpus(store), sources) == {"a": ids["a"]}
    assert own_passages([same._replace(positive_ids=tuple(ids["a"]))], only_corpus(store), sources) == {}


def test_documents_of_langchain_and_nodes_of_llama_index_are_passages():
    text, metadata = "The Nile is long.", {"title": "Nile", "year": 1958, "source": None}
    rows = [
        Document(page_content=text, metadata=metadata, id="d"),
        TextNode(text=text, metadata=metadata, id_="d"),
        {"id": "d", "text": text, **metadata},
    ]
    first, *others = (record._replace(where="") for row in rows for record in passage_records([row]))
    assert first.passage == Passage("d", "Nile", text) and first.extras["year"] == 1958
    assert others == [first, first]
    [numbered_record] = passage_records([Document(page_content=text)])
    assert numbered_record.passage == Passage("0", "", text)


STRANGE = [
    "purple clouds",
    "green rain",
    "seven moons",
    "loud silence",
    "cold fire",
    "warm ice",
    "blue sand",
    "tall valley",
]
CLICKS = [(text, f"p{at}", 1) for at, text in enumerate(STRANGE)]
ONE_ROUND = {"rounds": 1, "depth": 10, "max_heldout_loss": 100.0}


def test_reports_and_manifests_print_as_tables_and_a_line(index: Index):
    report = index.evaluate([("Who built tower 3?", ["king 9"]), ("Who built tower 5?", ["king 99"])], k=[1, 5])
    title, header, *lines = repr(report).split("\n")
    assert title == f"index index version {index.manifest.version}, 24 passages"
    assert header.split() == ["questions", "system", "number", "metric", "%"]
    for line, row in zip(lines, report.rows, strict=True):
        start = [row.questions, row.system, str(row.n), row.metric, f"{100 * row.value:.1f}"]
        assert line.split()[:5] == start and line.startswith("  ")
    refinement = index.refine([(f"Who built tower {n}?", f"king {n * n}") for n in range(8)])
    text = repr(refinement)
    assert refinement.reason in text and f"{100 * refinement.accuracy[0].top_1_after:.1f}" in text
    assert len(text.split("\n")) == 2 + len(refinement.accuracy)
    assert repr(index.manifest).count("\n") == 0 and f"version {index.manifest.version} by" in repr(index.manifest)


def test_a_scan_yields_what_passes_of_one_version_whatever_is_published_meanwhile(index: Index):
    def years(passages) -> list[int]:
        return sorted(passage.values["year"] for passage in passages)

    assert years(index) == [row["year"] for row in ROWS] and index.passages("p3")["p3"] in list(index)
    assert years(index.scan({"year": {"lt": 1903}, "opened": {"gte": date(1950, 1, 2)}})) == [1901, 1902]
    assert ("p3" in index, "p99" in index, 3.5 in index) == (True, False, False)
    passages = index.scan()
    first = next(passages)
    index.delete([f"p{n}" for n in range(12)])
    assert years([first, *passages]) == [row["year"] for row in ROWS]
    assert years(index) == [row["year"] for row in ROWS[12:]]
    for call in (index.scan, lambda filter: index.delete(filter=filter)):
        with pytest.raises(ConfigError, match=r"the corpus has no field 'yaer'; did you mean 'year'\?"):
            call({"yaer": 1})


def test_a_filter_deletes_what_passes_also_of_a_writer_that_was_faster(index: Index):
    faster = Index.open(index.run.store.path)
    rows = [{"id": "new", "text": "A new tower.", "year": 1999}, {"id": "p23", "text": "A tower.", "year": 1}]

    def publish_first(what: str, count: int, total: int) -> None:
        while what == "parts written" and rows:
            faster.upsert([rows.pop()])

    index.delete("p0", filter={"year": {"gte": 1922}}, progress=publish_first)
    assert {passage.id for passage in index} == {"p23", *(f"p{n}" for n in range(1, 22))}
    index.delete(filter={})
    assert list(index) == [] and index.search("tower") == []


def test_a_filter_that_a_chunk_passes_deletes_its_whole_text(command_store: Path, tmp_path: Path):
    with Index.open(tmp_path / "run.yaml") as index:
        index.delete(filter={"id": {"in": ["p1#2", "p4#0"]}})
        assert {passage.id.partition("#")[0] for passage in index} == {"p0", "p2", "p3", "p5"}


def test_a_passage_over_a_client_is_that_of_the_version_that_is_named(index: Index):
    index.upsert([("p1", "A new text.")])
    index.delete("p2")
    with Client.in_process(index.run, timeout_s=60) as client:
        assert client.passage("p1").text == "A new text."
        for row in ROWS[1:3]:
            passage = client.passage(row["id"], version=1)
            assert (passage.text, passage.version) == (row["text"], 1)
        with pytest.raises(RefusedError, match="unknown_passage"):
            client.passage("p2")
        with pytest.raises(RefusedError, match="unknown_version"):
            client.passage("p1", version=9)


def test_the_lines_of_an_index_are_prepared_and_indexed_as_the_same_passages(index: Index, tmp_path: Path, capsys):
    def command(*words: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(words)
        assert not end.value.code, capsys.readouterr().err
        return capsys.readouterr().out

    index.upsert([{"id": "new", "text": "A \u2028 \r new \0 tower.", "year": 7, "opened": date(1, 1, 1)}])
    index.delete("p3")
    run, output = tmp_path / "run.yaml", tmp_path / "own.jsonl"
    sections = index.run.model_dump(mode="json", exclude_unset=True)
    sections["prepare"] |= {"splits": [{"source": "dev"}], "max_passages": 20}
    run.write_text(json.dumps(sections))
    assert command("passages", str(run), f"output={output}").startswith(f"written: {output}, 24 passages of version 3")
    words = ["passages", str(run), f"output={output}", "--json"]
    assert json.loads(command(*words, "--version", "1", "--filter", '{"year": {"lt": 1904}}'))["passages"] == 4
    assert {"p3"} < {json.loads(line)["id"] for line in output.read_text().splitlines()}
    report = json.loads(command(*words))
    assert (report["passages"], report["prepare"]["fields"]) == (24, {"opened": "date", "year": "int"})
    settings = [f"prepare.{key}={json.dumps(value)}" for key, value in report["prepare"].items()]
    passages = list(index)
    for stage in ("prepare", "index"):
        version = json.loads(command(stage, str(run), *settings, "--json"))
    assert (version["version"], version["metrics"]["encoded"]) == (4, 0)
    with Index.open(index.run.store.path) as again:
        assert list(again) == passages
    index.delete(filter={"year": {"gte": 1900}})
    assert [passage.id for passage in index] == ["new"]


def test_the_vectors_of_an_index_are_the_views_that_searches_find(index: Index, tmp_path: Path, capsys):
    index.upsert([{"id": "p1", "text": "A new tower. It is tall."}, {"id": "p2", "text": "A tower."}])
    index.delete("p3")
    assert any("changes.arrow" in entry.files for entry in index.manifest.shards)
    views_PVD, mask_PV = index.encoder.embed_passages(list(index))
    expected = {p.id: views_VD[mask_V] for p, views_VD, mask_V in zip(index, views_PVD, mask_PV, strict=True)}
    own: dict[str, np.ndarray] = {}
    for block in index.vectors():
        own |= zip(block.ids, np.split(block.vectors_ND, block.row_ptr[1:-1]), strict=True)
    assert own.keys() == expected.keys() == {passage.id for passage in index}
    for name, views_ND in own.items():
        assert views_ND.astype(np.float32) == pytest.approx(expected[name], abs=2e-3)
    query_D = index.encoder.embed_queries("Who built tower 7?")[0]
    best = sorted(((name, (views_ND.astype(np.float32) @ query_D).max()) for name, views_ND in own.items()), key=_rank)
    hits = index.search("Who built tower 7?", 30)
    assert [hit.id for hit in hits] == [name for name, _ in best]
    assert [hit.score for hit in hits] == pytest.approx([score for _, score in best], abs=1e-5)
    output, path = tmp_path / "views.parquet", index.run.store.path
    with pytest.raises(SystemExit) as end:
        main(["vectors", f"{path}/run.yaml", f"store.path={path}", f"output={output}"])
    assert not end.value.code and "45 vectors of 64 of version 3" in capsys.readouterr().out
    table = pandas.read_parquet(output)
    assert list(table.columns) == ["passage_id", "view", "vector"]
    for name, rows in table.groupby("passage_id"):
        assert np.array_equal(np.stack(rows["vector"]), own[name].astype(np.float32))
    assert len(table) == index.manifest.num_vectors


def _rank(pair: tuple[str, float]) -> tuple[float, str]:
    return -pair[1], pair[0]


def test_vectors_map_one_shard_at_a_time(index: Index):
    counts = []
    for block in index.vectors():
        maps = Path("/proc/self/maps").read_text().splitlines()
        counts.append(len({line.split()[-1] for line in maps if index.run.store.path in line}))
        del block
    assert counts == [1, 1, 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "passages: output=... is missing; give output=FILE.jsonl"),
        (("output=rows.csv",), "passages: output=rows.csv does not end in .jsonl; give output=FILE.jsonl"),
        (("output=nowhere/rows.jsonl",), "passages: output=nowhere/rows.jsonl cannot be written"),
        (("output=rows.jsonl", "--filter", '{"yaer": 1}'), "passages: filter: the corpus has no field 'yaer'"),
    ],
)
def test_passages_says_what_it_lacks(words: tuple[str, ...], message: str, index_store: Path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["passages", str(index_store / "run.yaml"), *words])
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_fields_are_set_without_the_text_and_nothing_is_encoded(index: Index):
    digests, before = shard_digests(index), index.passages(["p1", "p2"])
    other = Index.open(index.run.store.path)
    frame = pandas.DataFrame([{"id": "p2", "set": {"year": np.int64(7), "opened": np.nan}, "text": None}])
    rows: list[Any] = [[{"id": "p1", "set": {"opened": date(2001, 2, 3)}}], frame]

    def be_faster(what: str, count: int, total: int) -> None:
        while what == "parts written" and rows:
            other.upsert(rows.pop())

    version = index.upsert(
        [{"id": "p1", "set": {"year": None}}, {"id": "none", "set": {"year": 3}}], progress=be_faster
    )
    assert (shard_digests(index), version.num_passages, version.metrics["encoded"]) == (digests, 24, 0)
    after = index.passages(["p1", "p2"])
    assert [after[name][:3] for name in ("p1", "p2")] == [before[name][:3] for name in ("p1", "p2")]
    assert (after["p1"].fields, after["p2"].fields) == ((("opened", date(2001, 2, 3)),), (("year", 7),))
    assert [passage.id for passage in index.scan({"year": {"exists": False}})] == ["p1"]
    with pytest.raises(
        DataError, match=r"item 0: set: the corpus has no field 'yaer'; there are: opened, year; nothing"
    ):
        index.upsert([{"id": "p1", "set": {"yaer": 1}}])


def test_a_null_of_a_table_sets_no_field(index: Index):
    changes = [{"id": "p1", "set": {"year": 7}}, {"id": "p2", "set": {"opened": date(2001, 2, 3)}}]
    before, table = index.passages(["p1", "p2"]), pa.Table.from_pylist(changes)
    for rows in (
        table,
        table.to_reader(),
        polars.from_arrow(table),
        datasets.Dataset(table),
        pandas.DataFrame(table.to_pylist()),
    ):
        with pytest.raises(DataError, match=r"item 0: set has nulls, .*; give a list of mappings"):
            index.upsert(rows)
    assert index.passages(["p1", "p2"]) == before
    index.upsert(pa.Table.from_pylist(changes[:1]))
    index.upsert(changes[1:])
    after = index.passages(["p1", "p2"])
    assert after["p1"].fields == (("opened", date(1950, 1, 2)), ("year", 7))
    assert after["p1"].values == {"opened": date(1950, 1, 2), "year": 7}
    assert after["p2"].fields == (("opened", date(2001, 2, 3)), ("year", 1902))


def test_fields_are_set_in_all_chunks_of_a_text(command_store: Path, tmp_path: Path):
    source, run_file = tmp_path / "long.jsonl", tmp_path / "run.yaml"
    update_file = tmp_path / "changes.jsonl"
    update_file.write_text(json.dumps({"id": "p1", "set": {"year": 1959}}) + "\n")
    run = load_run(run_file, ["prepare.fields={year: int}"])
    prepare(run.prepare, Store(command_store))
    report = update(run.prepare, Store(command_store), str(update_file))
    passages = list(Corpus.open(Store(command_store), "corpus"))
    years = {passage.id: dict(passage.fields) for passage in passages}
    assert {name for name, own in years.items() if own == {"year": 1959}} == {f"p1#{n}" for n in range(report.replaced)}
    assert report.replaced == sum(name.startswith("p1#") for name in years) > 2 and source.is_file()


def test_progress_is_shown_on_request_and_a_callback_gets_it(index: Index, capsys: pytest.CaptureFixture[str]):
    index.upsert([("p1", "A new text.")])
    assert capsys.readouterr().err == ""
    index.upsert([("p1", "A newer text.")], progress=True)
    assert "build shards: 3 of 3 (100 %)" in capsys.readouterr().err
    calls: list[tuple[str, int, int]] = []
    index.delete("p1", progress=lambda *call: calls.append(call))
    assert ("build shards", 3, 3) in calls and capsys.readouterr().err == ""


def test_every_method_with_progress_shows_it_by_default():
    methods = [getattr(of, name) for of in (Index, Encoder) for name in dir(of) if not name.startswith("_")]
    parameters = [inspect.signature(method).parameters for method in methods if callable(method)]
    assert {own["progress"].default for own in parameters if "progress" in own} == {None}


def test_progress_is_shown_by_default_on_a_terminal_and_in_ipython(index: Index, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr("builtins.__IPYTHON__", True, raising=False)  # as IPython does
        index.delete("p1")
    assert "build shards: 3 of 3" in capsys.readouterr().err
    terminal = StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(terminal, "isatty", lambda: True)
        patch.setattr(sys, "stderr", terminal)
        index.delete("p2")
    assert "build shards" in terminal.getvalue()
    terminal.close()
    for number, stderr in enumerate([None, object(), terminal], 3):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stderr)
            assert index.delete(f"p{number}").version == number + 1


def test_the_rows_of_hits_are_a_flat_frame_and_no_field_replaces_a_column(index: Index):
    index.upsert([{**ROWS[1], "text": "The tower of queen 77.", "year": None}])
    hits = index.search("Who is queen 77?", 3)
    frame = pandas.DataFrame(hits.rows)
    own_columns = ["question", "rank", "id", "score", "title", "snippet", "text", "view"]
    assert list(frame.columns) == [*own_columns, "opened", "year"]
    assert list(frame["id"]) == [hit.id for hit in hits] and list(frame["rank"]) == [1, 2, 3]
    first = frame[frame["id"] == "p1"].iloc[0]
    assert (first["text"], first["opened"], pandas.isna(first["year"])) == (
        "The tower of queen 77.",
        "1950-01-02",
        True,
    )
    assert first["snippet"] in first["text"] and set(frame["question"]) == {"Who is queen 77?"}
    hit = hits[0].model_copy(update={"fields": {"score": 7, "hue": "red"}, "snippet": None})
    response = SearchResponse.model_construct(version=1, exact=hits.exact)
    [row] = SearchHits("q", [hit], response).rows
    assert (row["score"], row["fields.score"], row["hue"], row["snippet"]) == (hit.score, 7, "red", None)


def test_the_rows_of_an_answer_over_a_client_are_those_of_hits_but_for_the_question(index: Index):
    questions = ["Who built tower 3?", "Who built tower 4?"]
    with Client.in_process(index.run, timeout_s=60) as client:
        rows = client.search(questions, k=3, fields=["opened", "year"]).rows
    own_rows = [(number, row) for number, hits in enumerate(index.search(questions, 3)) for row in hits.rows]
    for (number, own), row in zip(own_rows, rows, strict=True):
        assert row == {"query": number, **{name: value for name, value in own.items() if name != "question"}}


def test_each_question_has_an_id_of_its_own_and_one_that_occurs_twice_is_refused(index: Index):
    with_ids = [{"id": "q0", "question": "who built tower 1?"}, {"id": "q0_", "question": "who built tower 2?"}]
    assert [question.id for question in questions_of(["who?", *with_ids, "when?"])] == ["q0__", "q0", "q0_", "q3"]
    for questions in ([*with_ids, with_ids[1]], [Question("q0_", "who?")] * 2):
        message = f"^question {len(questions) - 1}: id 'q0_' already occurs in question {len(questions) - 2};"
        for call in (index.evaluate, lambda own: index.add_questions(own, "twice")):
            with pytest.raises(DataError, match=message):
                call(questions)


def test_a_file_in_a_list_of_questions_is_refused_with_what_to_pass(index: Index, tmp_path: Path, monkeypatch):
    (tmp_path / "dev.jsonl").write_text('{"question": "Who built tower 3?", "answers": ["king 9"]}\n')
    monkeypatch.chdir(tmp_path)
    for name in ("dev.jsonl", tmp_path / "dev.jsonl"):
        with pytest.raises(DataError, match=r"^question 1: '.*dev.jsonl' is a file; .* give its path alone"):
            index.evaluate(["Who built tower 5?", name])
    assert index.retrieve("dev.jsonl", 1)[0].question.text == "Who built tower 3?"
    assert index.retrieve(["no file.jsonl"], 1)[0].question.text == "no file.jsonl"


def test_questions_given_to_an_evaluation_are_no_set_of_the_store(index: Index):
    """So two processes that evaluate do not measure each other's, and a stored set of that name stays."""
    own, other = [("who built the tower?", ["king 1"])], [("who built the tower?", ["nobody"])] * 2
    index.add_questions(own, "evaluate")
    before = question_sets(only_corpus(Store(index.run.store.path)))
    alone = index.evaluate(own, k=20)
    assert index.evaluate(other, k=20).rows[0].n == 2
    assert question_sets(only_corpus(Store(index.run.store.path))) == before
    assert index.evaluate("evaluate", k=20).rows == alone.rows
    with pytest.raises(ConfigError, match="tune: question set 'tune' names no gold passages"):
        index.tune(own)
    with pytest.raises(ShardIndexError, match="no words"):
        index.tune([{"question": "Who built it?", "positive_ids": ["p1"]}])
    assert question_sets(only_corpus(Store(index.run.store.path))) == before


def test_a_value_under_a_name_with_a_meaning_is_left_out_with_a_warning(caplog):
    rows = [{"text": "A tower.", "question": "q", "delete": True, "and": 1}, {"text": "b", "delete": False}]
    records = [one for one in passage_records(rows) if isinstance(one, PassageRecord)]
    reader = FieldReader("infer")
    assert [reader.read(record.extras) for record in records] == [(), ()]
    warnings = [record.getMessage() for record in caplog.records]
    assert [re.findall("'([a-z]+)' cannot name a field", text) for text in warnings] == [
        ["question"],
        ["delete"],
        ["and"],
    ]


def test_questions_given_to_a_refinement_do_not_replace_others(index: Index):
    names = []
    for answer in ("king 1", "king 2"):
        questions = [
            {"question": f"who built tower {n}?", "positive_ids": [f"p{n}"], "answers": [answer]} for n in range(16)
        ]
        index.refine(questions, labels="gold", **ONE_ROUND)
        names.append(set(question_sets(only_corpus(Store(index.run.store.path)))))
    assert len(names[1]) == len(names[0]) + 1


def test_questions_without_answers_and_gold_passages_cannot_be_evaluated(index: Index):
    with pytest.raises(ConfigError, match="no question of evaluate has an answer or a gold passage"):
        index.evaluate(["who built the tower?"])
    with pytest.raises(DataError, match=r"answers is {'king 1'}, not a list"):
        index.evaluate([("who built the tower?", {"king 1"})])


@pytest.mark.parametrize("column", [np.array, pandas.Series, polars.Series, pa.array])
def test_columns_in_a_question_or_a_passage_are_their_lists(column):
    texts, ids = ["king 1", "king 2"], [1, 2]
    expected = Question("q0", "who?", ("king 1", "king 2"), ("1", "2"), ("1", "2"))
    row = {"question": "who?", "answers": column(texts), "positive_ids": column(ids)}
    row |= {"hard_negative_ids": list(np.array(ids))}
    assert questions_of([row]) == questions_of([Question("q0", *row.values())]) == [expected]
    assert questions_of([("who?", column(texts))]) == [Question("q0", "who?", ("king 1", "king 2"))]
    [passage] = passage_records([{"text": "One.", "tags": column(texts)}])
    assert isinstance(passage, PassageRecord) and passage.extras == {"tags": texts}


WRONG_QUESTIONS = {
    "empty text": (("a", ""), "question is empty"),
    "a number": (("a", 5), "question is 5, not a text"),
    "empty id": (("", "who?"), "id is missing"),
    "half a surrogate": (("a", "x\ud800y"), "question is not valid UTF-8"),
    "answer of a number": (("a", "who?", (5,)), "answer is 5, not a text"),
    "positive id of a float": (("a", "who?", (), (1.5,)), "id is 1.5, not a text or a whole number"),
    "answer starts": (("a", "who?", ("king",), (), (), (0.5,)), "answer_starts holds something other"),
}


@pytest.mark.parametrize(("values", "message"), WRONG_QUESTIONS.values(), ids=WRONG_QUESTIONS)
def test_a_question_object_is_checked(values, message: str):
    with pytest.raises(DataError, match=f"question 0: {message}"):
        questions_of([Question(*values)])


def test_a_lone_answer_and_whole_numbers_in_a_question_object_are_those_of_a_mapping():
    scores = {"teacher_scores": (0.5, 0.1), "positive_grades": (2,)}
    values: Any = 5, "who?", "king 1", (12,), [np.int64(7)]
    expected = Question("5", "who?", ("king 1",), ("12",), ("7",), **scores)
    assert questions_of([Question(*values, **scores)]) == [expected]


WRONG = {
    "empty text": ("a", "", ""),
    "blank text": ("a", "", "  "),
    "empty id": ("", "", "text"),
    "id of a number": (5.5, "", "text"),
    "no title": ("a", 7, "text"),
    "half a surrogate": ("a", "", "x\ud800y"),
    "no text": ("a", "", None),
    "a number": ("a", "", 5),
}


@pytest.mark.parametrize("values", WRONG.values(), ids=WRONG)
def test_a_passage_object_is_checked_as_a_tuple_is(values, tmp_path: Path):
    records = [next(iter(passage_records([row]))) for row in (Passage(*values), tuple(values))]
    assert isinstance(records[0], BadRow) and records[0] == records[1]


def test_a_file_of_changes_means_the_same_to_update_and_upsert(index: Index, tmp_path: Path, monkeypatch):
    lines = [
        {"id": "p3", "delete": True},
        {"id": "p4", "set": {"year": 1958}},
        {"id": "new", "text": "A new tower.", "opened": "1950-01-31"},
    ]
    (tmp_path / "changes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    other = Index.open(shutil.copytree(index.run.store.path, tmp_path / "commands"))
    update(other.run.prepare, Store(other.run.store.path), str(tmp_path / "changes.jsonl"), index="index")
    monkeypatch.chdir(tmp_path)
    assert index.upsert("changes.jsonl").corpus_digest == Corpus.open(Store(other.run.store.path), "corpus").digest
    assert (index.upsert(tmp_path / "changes.jsonl").version, len(index)) == (2, 24)
    with pytest.raises(DataError, match=r"changes\.jsonl:1: .*; nothing was changed\. Correct the items"):
        (tmp_path / "changes.jsonl").write_text("p3\n")
        index.upsert("changes.jsonl")
    with pytest.raises(
        MissingInputError, match=r"^upsert: 'no\.jsonl' is no file .*; correct the path, or give passages"
    ):
        index.upsert("no.jsonl")
    with pytest.raises(DataError, match=r"item 0: .*; to read a file of changes, give its path alone, in no list"):
        index.upsert([tmp_path / "changes.jsonl"])
    for row in ({"id": "p7", "year": 1959}, {"id": "p7", "delete": True}):
        with pytest.raises(
            DataError, match=r"rename .*; to change fields alone give \{'id': \.\., 'set'.*Index\.delete"
        ):
            index.upsert([row])
    assert index.manifest.version == 2


def test_a_column_named_delete_deletes_nothing_in_an_upsert(index: Index):
    """As in a build, which leaves it out."""
    before = len(index)
    index.upsert([{"id": "p1", "text": "Another tower.", "delete": True}])
    assert len(index) == before and index.passages(["p1"])["p1"].text == "Another tower."


def test_feedback_teaches_the_index_and_is_kept_until_then(index: Index):
    assert index.add_feedback(CLICKS[:3]) == 3
    assert index.add_feedback(CLICKS[3:]) == len(STRANGE)
    report = index.refine(**ONE_ROUND)
    assert report.published is not None
    answered_texts = [text for at, text in enumerate(STRANGE) if index.search(text, k=1)[0].id == f"p{at}"]
    assert len(answered_texts) >= 4, "questions outside the gate find the passage that was given for them"


def test_a_refinement_learns_what_the_run_file_says_and_else_from_feedback_in_python_and_by_the_command(
    index: Index, capsys
):
    index.add_questions([(text, f"king {n * n}") for n, text in enumerate(STRANGE)], "dev")
    with pytest.raises(ConfigError, match=r"and no feedback was added \(Index\.add_feedback\); give one of them"):
        index.refine()
    index.add_feedback(CLICKS)
    with Index.open(index.run.store.path, settings={"refine": {"questions": "dev"}}) as own:
        assert [row.group for row in own.refine(**ONE_ROUND).accuracy] == ["dev", "dev/gate"]
    words = [f"refine.{name}={value}" for name, value in ONE_ROUND.items()]
    with pytest.raises(SystemExit) as end:
        main(["refine", f"{index.run.store.path}/run.yaml", "--json", *words, f"store.path={index.run.store.path}"])
    report = json.loads(capsys.readouterr().out)
    assert not end.value.code and report["published"] and report["accuracy"][0]["group"] == "feedback"


def test_questions_beside_the_run_files_feedback_are_refused_unless_the_call_says_which_counts(index: Index, tmp_path):
    clicks = tmp_path / "clicks.jsonl"
    rows = [{"question": question, "passage_id": passage, "label": label} for question, passage, label in CLICKS]
    clicks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    refine = index.run.refine.model_copy(update={"feedback": str(clicks)})
    index = Index(index.run.model_copy(update={"refine": refine}))
    questions = [{"question": f"who built tower {n}?", "positive_ids": [f"p{n}"]} for n in range(16)]
    with pytest.raises(ConfigError, match=r"feedback, .*clicks.jsonl, would be learned from instead.*feedback=None"):
        index.refine(questions, **ONE_ROUND)
    for choice, count in (({"feedback": None, "labels": "gold"}, 16), ({"feedback": clicks}, 8)):
        report = index.refine(questions, **choice, **ONE_ROUND)
        assert sum(row.num_questions for row in report.accuracy if row.kind == "gold") == count


@pytest.mark.parametrize("text", ["no-such-file.csv", "The Nile is a river of Africa.", "Nile: " * 300])
def test_a_text_in_place_of_passages_that_names_no_file_is_refused(tmp_path: Path, text):
    with pytest.raises(MissingInputError, match=r"no file or folder of this name can be read .*give texts as a list"):
        Index.build(text, path=tmp_path / "store")


@pytest.mark.parametrize("label", [2, 0, True, False, "1"])
def test_feedback_of_another_grade_than_1_and_minus_1_is_refused_and_nothing_is_stored(index: Index, label):
    with pytest.raises(DataError, match=r"judgement 1 is .*not .question, passage id, 1 or -1"):
        index.add_feedback([("who?", "p1", 1), ("why?", "p1", label)])
    assert index.add_feedback([]) == 0


@pytest.mark.parametrize(
    ("click", "name"), [(("\ud800?", "p1", 1), "question"), (("why?", "p\ud800", 1), "passage id")]
)
def test_feedback_of_half_a_surrogate_is_refused_by_its_number_and_nothing_is_stored(index: Index, click, name):
    with pytest.raises(DataError, match=rf"judgement 1: {name} is not valid UTF-8: '.*ud800"):
        index.add_feedback([("who?", "p1", 1), click])
    assert index.add_feedback([]) == 0


def test_feedback_with_labels_of_numpy_is_that_of_python(index: Index):
    rows = [("who?", "p1", 1), ("why?", "p2", -1)]
    index.add_feedback(rows)
    index.add_feedback([(question, passage, np.int64(label)) for question, passage, label in rows])
    assert stored_judgements(index) == 2 * stored_judgements(index)[:2]


def test_feedback_as_mappings_and_frames_is_that_of_tuples(index: Index):
    rows = [("who?", "p1", 1), ("why?", "7", -1)]
    index.add_feedback(rows)
    names = ("question", "passage_id", "label")
    index.add_feedback([dict(zip(names, ("why?", 7, -1))), dict(zip(names, rows[0]))])
    index.add_feedback(pandas.DataFrame(rows, columns=names))
    lines = stored_judgements(index)
    assert lines[2:] == [*lines[1::-1], *lines[:2]]
    with pytest.raises(DataError, match=r"judgement 0 is {'question': 'who.'}, .* and no mapping with question"):
        index.add_feedback([{"question": "who?"}])


def stored_judgements(index: Index) -> list[str]:
    store = Store(index.run.store.path)
    return store.read_bytes(copy_judgements(store, index.run.index.name)).decode().splitlines()


@pytest.mark.parametrize("name", ["../../../set", "a b", "", None])
def test_a_name_that_no_question_set_can_have_is_refused(index: Index, name):
    with pytest.raises(ConfigError, match="is not a name"):
        index.add_questions(["who?"], name)


def test_the_name_of_a_stored_set_stands_for_its_questions(index: Index):
    questions = [(f"Who built tower {n}?", f"king {n * n}") for n in range(8)]
    index.add_questions(questions, "towers")
    assert index.evaluate("towers", k=1).rows[0].questions == "towers"
    report = index.refine("towers", **ONE_ROUND)
    assert report.accuracy[0].group == "towers"
    for method in (index.evaluate, index.refine):
        with pytest.raises(MissingInputError, match=r"source tower does not exist .*stored set .there are: towers."):
            method("tower")


def test_whole_numbers_are_ids_in_every_method(index: Index):
    index.upsert([(7, "Seven."), (8, "Eight."), (np.int64(9), "Nine.")])
    assert set(index.passages([7, "8", np.int64(9), 10])) == {"7", "8", "9"}
    assert set(index.passages(7)) == {"7"}
    index.delete(7)
    assert index.add_feedback([("who?", 7, 1), ("who?", np.int64(9), -1)]) == 2
    with pytest.raises(DataError, match=r"judgement 0 is .*True"):
        index.add_feedback([("who?", True, 1)])
    index.delete([8, np.int64(9)])
    assert index.passages([7, 8, 9]) == {} and len(index) == len(ROWS)


def test_feedback_that_contradicts_itself_is_kept_and_its_majority_is_learned(index: Index):
    disputes = [(text, "p20", label) for text in STRANGE for label in (1, -1)]
    majority = [(text, "p21", label) for text in STRANGE for label in (-1, 1, -1)]
    assert index.add_feedback([*CLICKS, *disputes, *majority]) == 8 * 6
    [first_round] = index.refine(**ONE_ROUND).rounds
    assert first_round.num_positives == first_round.num_negatives > 0


def test_feedback_on_passages_deleted_since_is_skipped_with_a_count(index: Index, caplog: pytest.LogCaptureFixture):
    index.add_feedback([*CLICKS, (STRANGE[0], "p20", 1), ("lost words", "p21", 1)])
    index.delete(["p1", "p20", "p21"])
    with caplog.at_level("WARNING", "mvr_ray"):
        report = index.refine(**ONE_ROUND)
    assert "feedback pairs_of_unknown_passages=3 pairs=10 first=p1 " in caplog.text
    gold_rows = [row for row in report.accuracy if row.kind == "gold"]
    assert sum(row.num_questions for row in gold_rows) == len(CLICKS) - 1, "questions without a passage go"


def test_feedback_on_a_passage_that_never_existed_stops_no_later_refinement(
    index: Index, caplog: pytest.LogCaptureFixture
):
    index.add_feedback([("who?", "nowhere", 1)])
    with pytest.raises(DataError, match=r"no passage that the index holds .first: 'nowhere'"):
        index.refine(**ONE_ROUND)
    index.add_feedback(CLICKS)
    assert index.refine(**ONE_ROUND).rounds
    assert "pairs_of_unknown_passages=1 " in caplog.text and "first=nowhere" in caplog.text


def test_feedback_on_deleted_passages_alone_is_refused(index: Index):
    index.add_feedback([(text, "p3", 1) for text in STRANGE])
    index.delete(["p3"])
    with pytest.raises(DataError, match=r"no passage that the index holds .first: 'p3'"):
        index.refine(**ONE_ROUND)


def test_an_index_without_passages_has_nothing_to_refine(index: Index):
    index.delete([row["id"] for row in ROWS])
    with pytest.raises(ConfigError, match=r"^refine: index 'index' version 2 holds no passage to refine; add passages"):
        index.refine([("Who built tower 1?", "king 1")])


def test_feedback_is_split_at_line_feeds_alone_whatever_its_questions_hold(index: Index):
    clicks = [(f"{text}\u2028{text}\u2029{text}\x85?", passage, label) for text, passage, label in CLICKS]
    for number, click in enumerate(clicks, 1):
        assert index.add_feedback([click]) == number
    report = index.refine(**ONE_ROUND)
    assert report.published is not None
    assert sum(row.num_questions for row in report.accuracy) == len(clicks)


def test_a_refinement_that_lost_the_race_to_another_refines_again_from_its_version(index: Index):
    index.add_feedback(CLICKS)
    rival = Index(index.run)

    def lose(what: str, count: int, total: int) -> None:
        if rival.manifest.version == 1:
            rival.refine(**ONE_ROUND, feedback_weight=0.7)

    with pytest.raises(PublishConflictError, match="run the same command again"):
        index.refine(progress=lose, **ONE_ROUND, feedback_weight=0.8)
    assert rival.manifest.refinement["feedback_weight"] == 0.7
    report = index.refine(**ONE_ROUND, feedback_weight=0.8)
    assert report.published is not None
    assert (report.base_version, report.published.version) == (2, 3)
    assert index.manifest.refinement["feedback_weight"] == 0.8


def test_the_same_refinement_beside_one_that_runs_leaves_it_its_rounds(index: Index):
    """The second reads the journal of a round that the first deletes before the second opens it."""
    questions = [(f"Who built tower {n}?", [f"king {n * n}."]) for n in range(8)]
    settings = {"method": "passage", "step_size": 0.05, "rounds": 4, "depth": 10}
    has_read, is_deleted, seconds = Event(), Event(), []
    counts: Counter[str] = Counter()

    def second(what: str, *_: object) -> None:
        if what == "embed questions":
            if has_read.is_set():
                raise InterruptedError("it restarted")
            has_read.set()
            is_deleted.wait(20)

    def first(what: str, number: int, _: int) -> None:
        counts[what] += 1
        if (what, number) == ("refine rounds", 2):
            seconds.append(pool.submit(Index(index.run).refine, questions, progress=second, **settings))
            assert has_read.wait(20)
        if (what, number) == ("refine rounds", 3):
            assert not [*Path(index.run.store.path).glob("indexes/*/staging/refine-*/round-2")]
            is_deleted.set()
            assert isinstance(seconds[0].exception(20), InterruptedError)

    with ThreadPoolExecutor(1) as pool:
        report = index.refine(questions, progress=first, **settings)
    assert 0 < report.best_round < len(report.rounds) == 4, "it reads the round that it restores"
    assert (counts["embed questions"], index.manifest.version) == (1, 2)


def test_a_refinement_killed_after_its_publish_reports_what_it_published(index: Index, monkeypatch):
    index.add_feedback(CLICKS)

    def interrupt(journal: Journal) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Journal, "delete", interrupt)
        index.refine(**ONE_ROUND)
    live = index.manifest
    assert live.version == 2
    report = index.refine(**ONE_ROUND)
    assert (report.base_version, report.published, index.manifest) == (1, live, live)
    assert index.refine(**ONE_ROUND).base_version == 2


def test_a_bad_row_is_named_and_changes_nothing(index: Index, tmp_path: Path):
    with pytest.raises(DataError, match="item 1: id is missing; give"):
        index.upsert([("a", "Text."), "no id"])
    with pytest.raises(DataError, match="passage 1: text is empty"):
        Index.build(["One.", " "], path=tmp_path / "bad")
    with pytest.raises(DataError, match=r"of 1 key holds no rows; give .* its items\(\)"):
        Index.build({"a": "One."}, path=tmp_path / "bad")
    with pytest.raises(DataError, match="no passage is given"):
        Index.build([], path=tmp_path / "bad")
    for folder, problem in ((tmp_path / "bad", "holds no index"), (tmp_path / "absent", "does not exist")):
        message = f"^{folder} {problem}; correct the path, or make an index there: Index.build"
        with pytest.raises(MissingInputError, match=message):
            Index.open(folder)
    with pytest.raises(ConfigError, match=r"num_view.*did you mean 'num_views'"):
        Index.build(["One."], path=tmp_path / "bad", settings={"encoder": {"num_view": 3}})
    assert index.manifest.version == 1


def test_hits_show_their_snippet_as_text_and_as_a_table_without_markup_of_passages(tiny_backbone: Path, tmp_path: Path):
    rows = [("x", "A <b>", "<script> here. The tower stands.")]
    index = Index.build(rows, model=str(tiny_backbone), path=tmp_path / "one", settings=SMALL)
    hits = index.search("tower", k=1)
    assert hits[0].snippet is not None
    assert f"»{hits[0].snippet.text}«" in repr(hits)
    html = hits._repr_html_()
    assert "<script>" not in html and "&lt;script&gt;" in html and "<mark>" in html
    assert repr(index).startswith(f"Index('{tmp_path / 'one'}', 1 passage, ")


def test_hits_of_a_long_sentence_are_shown_in_a_few_lines(tiny_backbone: Path, tmp_path: Path):
    with Index.build(["tower " * 50_000], model=str(tiny_backbone), path=tmp_path / "long", settings=SMALL) as index:
        hits = index.search("tower")
        index.upsert([("0", "It is. The" + " tower" * 50)])
        at_the_end = index.search("tower")
    assert hits[0].snippet is not None and len(hits[0].snippet.text) > 300
    assert len(repr(hits)) < 1000 and len(hits._repr_html_()) < 1000
    assert at_the_end[0].snippet.stop == len(at_the_end[0].text) and repr(at_the_end).endswith("«")


def test_torch_keeps_the_threads_of_the_caller(tiny_backbone: Path, tmp_path: Path):
    with torch_threads(3):
        with Index.build(["The tower stands.", "A river."], model=str(tiny_backbone), path=tmp_path / "one") as index:
            index.search("tower")
            index.upsert([("2", "A bridge.")])
            questions = [{"question": f"What stands {n}?", "positive_ids": ["0"]} for n in range(10)]
            index.refine(questions, labels="gold", rounds=1)
            index.search("bridge")
        assert torch.get_num_threads() == 3


def test_a_setting_that_is_absent_stays_absent_when_others_are_given(tiny_backbone: Path, tmp_path: Path):
    index = Index.build(["The tower stands."], model=str(tiny_backbone), path=tmp_path / "one", settings=SMALL)
    (run_file := tmp_path / "run.yaml").write_text((tmp_path / "one" / "run.yaml").read_text())
    for path in (tmp_path / "one", run_file):
        for threads in ({}, {"torch_threads": 1}):
            other = Index.open(path, settings={"resources": threads})
            for run in (other.run, with_settings(other.run, serve={"port": 1})):
                assert run.resources.model_fields_set == set(threads)
            resources = index.run.resources.model_copy(update=threads)
            assert other.run == index.run.model_copy(update={"store": other.run.store, "resources": resources})


def test_hits_of_a_filter_that_nothing_passes_say_so(index: Index):
    hits = index.search("tower", filter={"year": 1})
    assert hits == [] and repr(hits) == "tower\n    no passage" and "no passage" in hits._repr_html_()


def test_a_ranked_question_prints_as_a_line_and_its_rows_are_those_of_parquet(index: Index):
    [ranking] = index.retrieve(["Who built tower 3?"], k=5)
    assert repr([ranking]) == f"[RankedQuestion('q0', 5 passages, best {ranking.passages[0].id!r})]"
    frame = pandas.DataFrame(ranking.rows)
    assert list(frame.columns) == PARQUET_SCHEMA.names and list(frame["rank"]) == [1, 2, 3, 4, 5]
    assert list(frame["passage_id"]) == [hit.id for hit in ranking.passages] and set(frame["question_id"]) == {"q0"}


def test_retrieve_ranks_for_a_beir_folder_as_for_a_file_of_its_questions(index: Index, tmp_path: Path):
    folder = tmp_path / "beir"
    (folder / "qrels").mkdir(parents=True)
    queries = [{"_id": f"q{n}", "text": f"who built tower {n}?"} for n in range(3)]
    (folder / "corpus.jsonl").write_text("")
    (folder / "queries.jsonl").write_text("".join(f"{json.dumps(query)}\n" for query in queries))
    (folder / "qrels" / "test.tsv").write_text("".join(f"q{n}\t{ROWS[n]['id']}\t1\n" for n in range(3)))
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"id": q["_id"], "question": q["text"]}) + "\n" for q in queries))
    rankings = []
    for questions in (folder, file):
        with pytest.raises(SystemExit) as end:
            main(
                [
                    "retrieve",
                    f"{index.run.store.path}/run.yaml",
                    f"store.path={index.run.store.path}",
                    f"questions={questions}",
                    f"output={tmp_path}/run.trec",
                    "format=trec",
                ]
            )
        assert not end.value.code
        rankings.append((tmp_path / "run.trec").read_text())
    assert rankings[0] == rankings[1] and rankings[0].startswith("q0 Q0 ")


@pytest.mark.parametrize("path", ["", " "])
def test_a_path_of_nothing_is_refused(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for call in (lambda: Index.build(ROWS, path=path), lambda: Index.open(path)):
        with pytest.raises(ConfigError, match=r"path is '.?', which names no store; name a folder, or '\.'"):
            call()
    assert not list(tmp_path.iterdir())


def test_a_path_of_the_home_folder_names_a_run_file_and_a_model_may_be_a_path(
    tiny_backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    Index.build(ROWS, model=tiny_backbone, path="~/store", settings=SMALL)
    assert len(Index.open("~/store/run.yaml")) == len(Index.open(Path("~/store/run.yaml"))) == len(ROWS)
    assert Encoder(tiny_backbone).dimension == 64
    with pytest.raises(ConfigError, match=f"^model folder {tmp_path}/nothing does not exist"):
        Encoder(Path("~/nothing"))


@pytest.mark.parametrize(
    ("section", "key", "argument"),
    [("store", "path", "path"), ("encoder", "backbone", "model"), ("prepare", "sources", "passages")],
)
def test_settings_that_an_argument_gives_are_refused(tmp_path: Path, section: str, key: str, argument: str):
    with pytest.raises(ConfigError, match=rf"^Index.build: settings has {section}.{key}; give {argument}= instead$"):
        Index.build(["One."], path=tmp_path / "store", settings={section: {key: "other"}})
    assert not list(tmp_path.iterdir())


def test_an_encoder_refuses_a_backbone_beside_its_model():
    with pytest.raises(ConfigError, match=r"^Encoder: settings has encoder.backbone; give model= instead$"):
        Encoder(backbone="other")


def test_a_run_file_is_left_in_the_store_and_describes_it(index_store: Path):
    run = load_run(index_store / "run.yaml")
    assert (run.store.path, run.encoder.num_views, run.prepare.num_shards) == (str(index_store), 3, 3)


@pytest.mark.parametrize("content", ["- a list\n", "index: {name: [\n", "indx: {}\n"])
def test_a_run_file_of_a_store_that_cannot_be_read_is_named(index: Index, content: str):
    file = Path(index.run.store.path) / "run.yaml"
    file.unlink()
    file.write_text(content)
    with pytest.raises(ConfigError, match=f"^{file}"):
        Index.open(file.parent)


def test_a_run_file_of_a_store_may_have_a_base(index: Index, tmp_path: Path):
    file = Path(index.run.store.path) / "run.yaml"
    file.rename(tmp_path / "base.yaml")
    file.write_text("base: ../base.yaml\nretrieve: {k: 7}\n")
    again = Index.open(file.parent)
    assert (again.run.retrieve.k, len(again), again.run.store) == (7, len(index), index.run.store)


def test_a_build_loads_a_model_of_the_hub_once_and_writes_no_fingerprint_of_it(tiny_backbone, tmp_path, monkeypatch):
    loads: list[str] = []
    load = DualEncoder.from_backbone

    def load_of_hub(name: str, *settings: Any) -> DualEncoder:
        loads.append(name)
        return load(str(tiny_backbone), *settings)

    monkeypatch.setattr(DualEncoder, "from_backbone", load_of_hub)
    Index.build(ROWS, model="owner/model", path=tmp_path / "store", settings=SMALL)
    assert loads == ["owner/model"]
    assert load_run(tmp_path / "store" / "run.yaml").index.encoder == "auto"


def test_texts_are_read_to_the_models_own_length_unless_settings_say_another(tiny_backbone: Path):
    questions = ["tower " * 100, "tower " * 100 + "king"]
    for settings, are_equal in (({}, False), ({"max_query_tokens": 64}, True)):
        one_D, other_D = Encoder(str(tiny_backbone), **settings).embed_queries(questions)
        assert bool((one_D == other_D).all()) is are_equal


@pytest.mark.parametrize("module", ["mvr_ray", "mvr_ray.cli.commands"])
def test_the_package_and_the_command_line_are_imported_without_what_they_import_when_used(module: str):
    heavy = "{'numpy', 'torch', 'ray', 'pydantic', 'pyarrow', 'transformers'}"
    program = f"import sys, {module}; sys.exit(', '.join({heavy} & set(sys.modules)) or 0)"
    process = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")


SEARCH = """
import sys
from mvr_ray.cli import main
from mvr_ray.client import Client, RefusedError
status = 0
try:
    main()
except SystemExit as end:
    status = end.code
sys.exit(status or sorted({'ray', 'transformers', 'bm25s', 'faiss'} & set(sys.modules)) or 0)
"""
STAGES = """
import importlib, pkgutil, sys
import mvr_ray.distributed as package
for module in pkgutil.walk_packages(package.__path__, "mvr_ray.distributed."):
    if module.name != "mvr_ray.distributed.train" and ".training" not in module.name:
        importlib.import_module(module.name)
sys.exit(sorted({'transformers', 'pandas', 'torch._dynamo'} & set(sys.modules)) or 0)
"""


NAMES = """
import sys
import mvr_ray
assert all(getattr(mvr_ray, name).__name__ == name for name in mvr_ray.__all__ if name != "Encoder")
from mvr_ray import ConfigError, Index, MvrRayError, Question, RefusedError
assert issubclass(RefusedError, MvrRayError) and issubclass(ConfigError, MvrRayError)
sys.exit(sorted({'ray', 'torch', 'transformers'} & set(sys.modules)) or 0)
"""


def run_program(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *words], check=False, capture_output=True, text=True)


def test_a_search_with_a_bert_model_imports_neither_ray_nor_transformers(index_store: Path):
    process = run_program(SEARCH, "search", str(index_store / "run.yaml"), "Who built tower 7?", "-k", "3")
    assert process.returncode == 0, process.stderr
    assert process.stdout.count("score") == 3


def test_every_public_name_is_imported_without_ray_and_torch():
    process = run_program(NAMES)
    assert process.returncode == 0, process.stderr


def test_every_stage_but_training_is_imported_without_transformers_and_pandas():
    """A task or an actor imports its own module first: what that imports, each worker process pays for."""
    process = run_program(STAGES)
    assert process.returncode == 0, process.stderr
