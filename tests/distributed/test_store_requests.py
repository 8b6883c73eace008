"""What a build or an update asks an object store for: requests and bytes, as the server counts them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

import pytest
import s3_server

from mvr_ray.config import RunConfig
from mvr_ray.distributed.indexing import build_index
from mvr_ray.store import paths
from mvr_ray.store.files import Store
from mvr_ray.store.prepare import prepare

pytestmark = pytest.mark.usefixtures("without_ray")


class Request(NamedTuple):
    """One that the server answered. `path` is the object's in the store; empty for a listing."""

    method: str
    path: str
    num_bytes: int


class ServedStore(NamedTuple):
    store: Store
    requests: list[Request]


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServedStore]:
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
        yield ServedStore(Store(root), requests)


def write_rows(file: Path, texts: Mapping[str, str]) -> str:
    rows = [{"id": name, "title": "T", "text": text} for name, text in texts.items()]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def prepared_run(run_over, store: Store, folder: Path, texts: Mapping[str, str], num_shards: int, **index) -> RunConfig:
    sources = [{"path": write_rows(folder / "passages.jsonl", texts)}]
    own = run_over(folder, prepare={"num_shards": num_shards, "sources": sources}, index=index)
    run = own.model_copy(update={"store": own.store.model_copy(update={"path": store.root})})
    prepare(run.prepare, store)
    return run


@pytest.mark.parametrize("index", [{}, {"kind": "faiss", "factory": "IVF2,Flat", "nprobe": 1, "recall_sample": 20}])
def test_a_build_reads_nothing_back_of_the_shards_that_it_wrote(run_over, served: ServedStore, tmp_path: Path, index):
    texts = {f"p{number:02d}": f"Text {number} is here. It says {number * 37 % 101}." for number in range(40)}
    run = prepared_run(run_over, served.store, tmp_path, texts, 2, **index)
    version = build_index.index(run)
    assert version.num_passages == 40 and (version.recall is not None) == bool(index)
    assert "lv" in version.metrics
    shards = tuple(paths.shard_dir("index", entry.digest) for entry in version.shards)
    own = [request for request in served.requests if request.path.startswith(shards)]
    methods = [request.method for request in own]
    assert methods.count("PUT") >= 2 * len(shards) and "GET" not in methods
