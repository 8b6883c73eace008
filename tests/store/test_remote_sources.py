"""Sources, changes and questions on an object store give what the same files give in a folder."""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from prepared_corpus import only_corpus

from mvr_ray.api.rows import questions_of
from mvr_ray.cli.init_run import sample_source
from mvr_ray.config import PrepareConfig, RunConfig
from mvr_ray.distributed.indexing.external_vectors import read_external
from mvr_ray.distributed.read import read
from mvr_ray.distributed.retrieve import question_set
from mvr_ray.errors import ConfigError, DataError, MissingInputError
from mvr_ray.store.files import Store, split_address
from mvr_ray.store.formats.view_vectors import write_pairs
from mvr_ray.store.prepare import prepare
from mvr_ray.store.update import update

CORPUS = "".join(json.dumps({"_id": f"d{n}", "title": "", "text": f"Text number {n}."}) + "\n" for n in range(5))
QUERIES = json.dumps({"_id": "q0", "text": "which one?"}) + "\n"
FILES = {
    "beir/corpus.jsonl": CORPUS.encode(),
    "beir/queries.jsonl": QUERIES.encode(),
    "beir/qrels/test.tsv": b"query-id\tcorpus-id\tscore\nq0\td3\t2\n",
    "rows/a.jsonl.gz": gzip.compress(b'{"id": "a", "text": "First."}\n', mtime=0),
    "rows/b.jsonl": b'{"id": "b", "text": "Second."}\n',
    "table.csv": b"id,text\nc,Third.\n",
    "changes.jsonl": b'{"id": "c", "text": "Third, changed."}\n{"id": "a", "delete": true}\n',
    "ask.txt": b"which one?\nwhy?\n",
}


@pytest.fixture
def bucket(s3_server: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of FILES on a server, in whose place `{}` stands for the name of one."""
    monkeypatch.setenv("MVR_RAY_CACHE", str(tmp_path / "cache"))
    with s3_server.serve() as root:
        for name, data in FILES.items():
            Store(root).write_bytes(name, data)
        place, _, options = root.partition("?")
        yield f"{place}/{{}}?{options}"


@pytest.fixture
def folder(tmp_path: Path) -> str:
    for name, data in FILES.items():
        file = tmp_path / "files" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return str(tmp_path / "files" / "{}")


def config_of(place: str) -> PrepareConfig:
    beir = {"path": place.format("beir"), "questions": "dev", "id_prefix": "beir:"}
    return PrepareConfig.model_validate({"sources": [beir, place.format("rows"), place.format("table.csv")]})


def test_a_corpus_of_an_object_store_its_changes_and_questions_are_those_of_the_same_files(
    bucket: str, folder: str, tmp_path: Path
) -> None:
    infos, questions = [], []
    for place, name in ((folder, "local"), (bucket, "remote")):
        store = Store(tmp_path / name)
        report = prepare(config_of(place), store)
        assert (report.passages_written, report.questions) == (8, {"dev": 1})
        update(config_of(place), store, place.format("changes.jsonl"))
        infos.append(only_corpus(store).info)
        sets = (question_set(only_corpus(store), place.format(source)) for source in ("ask.txt", "beir"))
        questions.append([*sets, questions_of(place.format("ask.txt"))])
    local, remote = infos
    assert local.digest == remote.digest and remote.num_passages == 7 and questions[0] == questions[1]
    assert [source.sha256 for source in remote.sources] == [source.sha256 for source in local.sources]
    names = [source.path for source in remote.sources]
    assert (
        names[0].startswith("s3://bucket/") and names[0].endswith("/beir/corpus.jsonl") and names[-1] == "changes.jsonl"
    )
    assert not any("secret" in name or "?" in name for name in names)


def test_an_object_that_is_gone_is_no_part_of_a_source_any_more(bucket: str, tmp_path: Path) -> None:
    cfg = PrepareConfig.model_validate({"sources": [bucket.format("rows")]})
    assert prepare(cfg, Store(tmp_path / "store")).passages_written == 2
    root = bucket.replace("/{}", "")
    Store(root).delete("rows/b.jsonl")
    Store(root).write_bytes("rows/c.jsonl", b'{"id": "c", "text": "x"}\n{"id": "d", "text": "y"}\n')
    report = prepare(cfg, Store(tmp_path / "store"))
    assert report.passages_written == 3
    assert [source.path.rpartition("/")[2] for source in only_corpus(Store(tmp_path / "store")).info.sources] == [
        "a.jsonl.gz",
        "c.jsonl",
    ]


def test_what_is_not_there_is_named_without_keys(bucket: str, tmp_path: Path) -> None:
    store, missing = Store(tmp_path / "store"), bucket.format("none.jsonl")
    prepare(config_of(bucket), store)
    for reads in (
        lambda: prepare(PrepareConfig.model_validate({"sources": [missing]}), store),
        lambda: update(config_of(bucket), store, missing),
        lambda: question_set(only_corpus(store), missing),
        lambda: read(RunConfig(), missing),
    ):
        with pytest.raises(MissingInputError, match=r"^s3://bucket/\S+/none\.jsonl does not exist$"):
            reads()
    with pytest.raises(ConfigError, match=r"^source s3://bucket/\S+/beir: fields are set, but format beir has names"):
        prepare(
            PrepareConfig.model_validate({"sources": [{"path": bucket.format("beir"), "fields": {"id": "x"}}]}), store
        )


def test_bad_content_is_named_by_its_address(bucket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, root = Store(tmp_path / "store"), Store(bucket.replace("/{}", ""))
    prepare(config_of(bucket), store)
    root.write_bytes("rows/b.jsonl", b'{"id": "b", "text": ""}\n')
    root.write_bytes("ask.txt", "\ufffd\n".encode())
    root.write_bytes("ask.jsonl", b'{"id": "q", "question": ""}\n')
    root.write_bytes("bad.parquet", b"PAR1")
    root.write_bytes("bad.jsonl", b"1\n")
    root.write_bytes("empty.csv", b"")

    def prepare_one(name: str) -> None:
        prepare(PrepareConfig.model_validate({"sources": [bucket.format(name)]}), Store(tmp_path / "other"))

    for call, place in (
        (lambda: prepare_one("rows"), "rows/b.jsonl:1"),
        (lambda: prepare_one("bad.parquet"), "bad.parquet"),
        (lambda: prepare_one("empty.csv"), "empty.csv"),
        (lambda: update(config_of(bucket), store, bucket.format("bad.jsonl")), "bad.jsonl:1"),
        (lambda: update(config_of(bucket), store, bucket.format("rows")), "rows"),
        (lambda: question_set(only_corpus(store), bucket.format("ask.txt")), "ask.txt:1"),
        (lambda: question_set(only_corpus(store), bucket.format("ask.jsonl")), "ask.jsonl:1"),
    ):
        with pytest.raises((DataError, MissingInputError)) as error:
            call()
        assert re.search(rf"(^|\s)s3://bucket/\S+/{place}\b", str(error.value)), str(error.value)
        assert str(tmp_path / "cache") not in str(error.value) + caplog.text


def test_init_looks_at_objects_as_at_files(bucket: str, folder: str) -> None:
    for name in ("beir", "rows", "table.csv"):
        local, remote = (sample_source(place.format(name)) for place in (folder, bucket))
        assert remote.path == bucket.format(name)
        assert (remote.format, remote.split, len(remote.passages)) == (local.format, local.split, len(local.passages))


def test_vectors_of_an_object_store_are_read(bucket: str, tmp_path: Path) -> None:
    write_pairs(tmp_path / "own.parquet", {"p1": [0.6, 0.8]})
    Store(split_address(bucket.format("x"))[0]).write_bytes("own.parquet", (tmp_path / "own.parquet").read_bytes())
    run = RunConfig.model_validate({"store": {"path": str(tmp_path / "store")}})
    assert read_external(run, bucket.format("own.parquet")).block.ids == ["p1"]
