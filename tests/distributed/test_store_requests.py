"""Counts the requests of a build or an update at the server of an object store."""

import json
import pickle
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import pytest
import s3_server

from mvr_ray.config import RunConfig
from mvr_ray.distributed.indexing import build_index, carry_over
from mvr_ray.distributed.indexing.staging import EncodePlan, EncodeTask
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus, shard_of
from mvr_ray.store.files import Store
from mvr_ray.store.prepare import prepare
from mvr_ray.store.update import update

pytestmark = pytest.mark.usefixtures("without_ray")


class Request(NamedTuple):
    """One that the server answered. `path` is the object's in the store; empty for a listing."""

    method: str
    path: str
    num_bytes: int


class S3Store(NamedTuple):
    store: Store
    requests: list[Request]


@pytest.fixture
def s3_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Store]:
    """An empty store on an S3 server, and the requests for it."""
    requests: list[Request] = []

    def note(handler: s3_server.Handler, code: object = "-", size: object = "-") -> None:
        key = unquote(urlsplit(handler.path).path).removeprefix("/")
        first, _, last = handler.headers.get("Range", "").removeprefix("bytes=").partition("-")
        size = len(handler.objects[key].data) if key in handler.objects else 0
        num_bytes = min(int(last) + 1, size) - int(first) if first and last else size
        requests.append(Request(handler.command, key.removeprefix("bucket/some/prefix/"), num_bytes))

    monkeypatch.setattr(s3_server.Handler, "log_request", note)
    monkeypatch.setenv("MVR_RAY_CACHE", str(tmp_path / "cache"))
    with s3_server.serve() as root:
        yield S3Store(Store(root), requests)


def write_rows(file: Path, texts: Mapping[str, str]) -> str:
    rows = [{"id": name, "title": "T", "text": text} for name, text in texts.items()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def require_side_by_side(monkeypatch: pytest.MonkeyPatch, name: str, num: int) -> None:
    """The server answers a GET of a key with `name` once so many wait."""
    answer, barrier = s3_server.Handler.do_GET, threading.Barrier(num, timeout=20)

    def wait(handler: s3_server.Handler) -> None:
        if name in handler.path:
            barrier.wait()
        answer(handler)

    monkeypatch.setattr(s3_server.Handler, "do_GET", wait)


class SharedArgument(NamedTuple):
    """An argument in Ray's object store."""

    data: bytes


def send_calls(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[tuple[str, int]]:
    """Make each call of a module's tasks with arguments of its own, as a worker receives them; returns names of
    functions and the bytes of each call without shared ones."""
    calls_sent: list[tuple[str, int]] = []

    def run(function: Any, calls: Any, *_: Any) -> list[Any]:
        results = []
        for call in calls:
            data = pickle.dumps([None if isinstance(value, SharedArgument) else value for value in call])
            calls_sent.append((function.__name__, len(data)))
            own = pickle.loads(data)
            shared_values = [pickle.loads(value.data) if isinstance(value, SharedArgument) else None for value in call]
            results.append(function(*(a if b is None else b for a, b in zip(own, shared_values))))
        return results

    monkeypatch.setattr(module, "share", lambda value: SharedArgument(pickle.dumps(value)))
    monkeypatch.setattr(module, "run_tasks", run)
    return calls_sent


def prepared_run(
    run_over, store: Store, folder: Path, texts: Mapping[str, str], num_shards: int, prefix: str = "", **index
) -> RunConfig:
    sources = [{"path": write_rows(folder / "passages.jsonl", texts), "id_prefix": prefix}]
    own = run_over(folder, prepare={"num_shards": num_shards, "sources": sources}, index=index)
    run = own.model_copy(update={"store": own.store.model_copy(update={"path": store.root})})
    prepare(run.prepare, store)
    return run


@pytest.mark.parametrize("index", [{}, {"kind": "faiss", "factory": "IVF2,Flat", "nprobe": 1, "recall_sample": 20}])
def test_a_build_reads_nothing_back_of_the_shards_that_it_wrote(run_over, s3_store: S3Store, tmp_path: Path, index):
    texts = {f"p{number:02d}": f"Text {number} is here. It says {number * 37 % 101}." for number in range(40)}
    run = prepared_run(run_over, s3_store.store, tmp_path, texts, 2, **index)
    version = build_index.index(run)
    assert version.num_passages == 40 and (version.recall is not None) == bool(index)
    assert "lv" in version.metrics
    shards = tuple(paths.shard_dir("index", entry.digest) for entry in version.shards)
    own = [request for request in s3_store.requests if request.path.startswith(shards)]
    methods = [request.method for request in own]
    assert methods.count("PUT") >= 2 * len(shards) and "GET" not in methods


def test_what_an_update_reads_of_older_versions_and_sends_to_tasks_does_not_grow_with_the_shards(
    run_over, s3_store: S3Store, tmp_path: Path, monkeypatch
):
    names, num_shards, num_versions = [f"p{number:02d}" for number in range(12)], 4, 4
    assert len({shard_of(name, num_shards) for name in names}) == num_shards
    run = prepared_run(run_over, s3_store.store, tmp_path, {name: f"Text of {name}." for name in names}, num_shards)
    digests = []
    for number in range(1, num_versions + 1):
        build_index.index(run)
        digests.append(Corpus.open(s3_store.store, "corpus").digest)
        texts = {name: f"Text {number} of {name}." for name in names[3 * (number % 4) :][:3]}
        texts = {name: f"Text {number} of {name}." for name in names} if number == num_versions else texts
        update(run.prepare, s3_store.store, write_rows(tmp_path / "changes.jsonl", texts))
    task_calls = send_calls(monkeypatch, carry_over)
    s3_store.requests.clear()
    version = build_index.index(run)
    assert (version.version, version.metrics["encoded"]) == (num_versions + 1, 12)
    gets = Counter(request.path for request in s3_store.requests if request.method == "GET")
    assert all(gets[paths.corpus_version("corpus", digest)] <= 2 for digest in digests[:-1])
    searches = [num_bytes for name, num_bytes in task_calls if name == "find_in_part"]
    assert len(searches) == num_shards and max(searches) < 1000 + 300 * num_versions
    assert Counter(name for name, _ in task_calls)["carry_shard"] == num_shards


def test_a_chunk_is_read_once_for_all_copies_of_its_passages(run_over, s3_store: S3Store, tmp_path: Path):
    texts = {f"p{number:02d}": f"Text {number}." for number in range(20)}
    texts |= {f"q{number:02d}": "Text 0." for number in range(20)}
    run = prepared_run(run_over, s3_store.store, tmp_path, texts, 4)
    assert build_index.index(run).metrics["encoded"] == 20
    assert len({shard_of(name, 4) for name in texts if name[0] == "q"}) > 2
    gets = Counter(request.path for request in s3_store.requests if request.method == "GET")
    chunks = [count for path, count in gets.items() if "/chunk-" in path]
    assert sorted(chunks) == [1] * (len(chunks) - 1) + [2], "by the build of its shard, and for all copies"


def test_plans_are_read_side_by_side_and_one_request_finds_that_there_is_none(
    run_over, s3_store: S3Store, tmp_path: Path, monkeypatch
):
    run = prepared_run(run_over, s3_store.store, tmp_path, {f"p{number}": f"Text {number}" for number in range(12)}, 4)
    version, corpus = build_index.index(run), Corpus.open(s3_store.store, "corpus")
    assert not [request for request in s3_store.requests if request.method == "HEAD" and "/plan-" in request.path]
    task = EncodeTask(s3_store.store.root, version, "key", 512, 6)
    task.write_plan(s3_store.store, 2, EncodePlan(rows=[0]))
    require_side_by_side(monkeypatch, "/plan-", 4)
    s3_store.requests.clear()
    num_encoded = carry_over.count_passages(task, corpus, range(4))["encoded"]
    assert num_encoded == 13 - corpus.info.parts[2].num_passages
    assert len([request for request in s3_store.requests if "/plan-" in request.path]) == 4


def test_an_update_of_rows_without_the_prefix_of_their_ids_opens_parts_side_by_side(
    run_over, s3_store: S3Store, tmp_path: Path, monkeypatch
):
    texts = {str(number): f"Text {number}" for number in range(40)}
    run = prepared_run(run_over, s3_store.store, tmp_path, texts, 4, prefix="a:")
    changes = {name: f"New text {name}" for name in texts}
    with monkeypatch.context() as patch:
        require_side_by_side(patch, "/corpora/corpus/part", 4)
        update(run.prepare, s3_store.store, write_rows(tmp_path / "changes.jsonl", changes))
    corpus = Corpus.open(s3_store.store, "corpus")
    assert {passage.id: passage.text for passage in corpus} == {f"a:{name}": text for name, text in changes.items()}
