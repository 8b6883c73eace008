"""Two nodes on one machine, as docs/cluster.md starts them: its lines of work, and stages submitted as jobs.

Ports and folders are the tests' own. The nodes are stopped by a signal to their own processes, so that no other Ray on
the machine notices.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from node_ports import free_ports

from mvr_ray.cli import main
from mvr_ray.store import manifest
from mvr_ray.store.files import Store

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
ONCE, HEAD, SECOND, WORK = dict(re.findall(r'^```bash title="([^"]+)"\n(.*?)^```$', PAGE, re.M | re.S)).values()
NODE_OPTIONS = (
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
)
NUM_ARTICLES, PARAGRAPHS = 3, 20
MAX_UPLOAD_BYTES = 4 << 20


class Cluster(NamedTuple):
    """Two nodes: the head's port, what a client's environment needs, and the folder in which all of it runs."""

    port: int
    environment: dict[str, str]
    folder: Path

    def submit(self, stage: str, *words: str) -> str:
        """Run a job script as a job and wait for its end; its log."""
        command = ["ray", "job", "submit", "--working-dir", ".", "--", "python", f"jobs/{stage}.py", *words]
        environment = self.environment | {"RAY_AUTH_MODE": "token"}
        process = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout


def with_options(lines: str, port: int, options: str) -> str:
    """The lines of a terminal, with a port of the test's own and `options` for each `ray start`."""
    return re.sub(r"^(ray start .*)$", rf"exec \1 {options}", lines.replace("6379", str(port)), flags=re.MULTILINE)


@contextmanager
def terminal(lines: str, folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """A node that runs until the block ends, like a terminal that is left open."""
    command = ["bash", "-e", "-c", lines]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as node:
        try:
            assert node.stdout
            output = []
            for line in node.stdout:
                output.append(line)
                if "Ray runtime started" in line:
                    break
            else:
                pytest.fail("the node did not start:\n" + "".join(output))
            yield
        finally:
            node.terminate()
            with suppress(subprocess.TimeoutExpired):  # it can wait for its raylet, which is gone, forever
                node.communicate(timeout=60)
            node.kill()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="mvr-", dir="/tmp"))  # Ray's sockets stand in it: its path must be short
    port, dashboard, client, *agents = free_ports(3 + 2 * len(NODE_OPTIONS))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {
        "HOME": str(folder),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "80",
        "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # no job is left to wait for when the head is stopped
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    own = [
        " ".join(f"--{name}={number}" for name, number in zip(NODE_OPTIONS, numbers))
        for numbers in (agents[: len(NODE_OPTIONS)], agents[len(NODE_OPTIONS) :])
    ]
    head_options = f"{own[0]} --temp-dir={folder}/ray --dashboard-port={dashboard} --ray-client-server-port={client}"
    try:
        subprocess.run(["bash", "-e", "-c", ONCE], cwd=folder, env=environment, check=True, capture_output=True)
        with ExitStack() as nodes:
            nodes.enter_context(terminal(with_options(HEAD, port, head_options), folder, environment))
            second = SECOND.replace("/tmp/ray-2", f"{folder}/ray-2")
            nodes.enter_context(terminal(with_options(second, port, own[1]), folder, environment))
            yield Cluster(port, environment, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_two_nodes_on_one_machine_do_what_the_page_says(cluster: Cluster) -> None:
    process = subprocess.run(
        ["bash", "-e", "-x", "-c", WORK.replace("6379", str(cluster.port))],
        cwd=cluster.folder,
        env=cluster.environment,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert re.search(r"cluster +yes +127.0.0.1:\d+: 2 nodes, 4 CPUs", process.stdout), process.stdout
    assert "live: version 1 of index wiki, 60 passages" in process.stdout
    assert "60 of 60 passages searched, exact" in process.stdout
    assert "evaluated: version 1" in process.stdout


def run_file(folder: Path, source: Path, backbone: Path) -> str:
    run = {
        "prepare": {
            "corpus": "squad",
            "num_shards": 3,
            "sources": [{"path": str(source), "format": "squad", "questions": "squad"}],
            "splits": [{"source": "squad", "known_share": 0.5, "gate_share": 0.2}],
            "max_questions": 200,
        },
        "encoder": {"backbone": str(backbone), "num_views": 4, "max_passage_tokens": 96},
        "index": {"name": "squad", "encoder": "untrained", "sort_window": 8, "precision": "fp32"},
        "refine": {
            "questions": "squad_known",
            "gate": ["squad_gate"],
            "report": ["squad_other", "squad_unseen"],
            "method": "feedback_views",
            "rounds": 1,
            "max_heldout_loss": 100,
        },
        "resources": {"encoders_max": 1},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run))
    return str(path)


def locally(*words: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert not end.value.code


@pytest.mark.data
def test_jobs_on_a_cluster_publish_what_the_command_line_publishes(
    cluster, without_ray, squad_dev, tiny_backbone, tmp_path
):
    """The command line needs no Ray for so few passages."""
    articles = [{**a, "paragraphs": a["paragraphs"][:PARAGRAPHS]} for a in squad_dev["data"][:NUM_ARTICLES]]
    (tmp_path / "squad.json").write_text(json.dumps({"version": "1.1", "data": articles}))
    config = run_file(tmp_path, tmp_path / "squad.json", tiny_backbone)
    here, there = tmp_path / "here", tmp_path / "there"
    locally("prepare", config, f"store.path={here}")
    shutil.copytree(here, there)

    for stage in ("index", "refine"):
        cluster.submit(stage, config, f"store.path={there}")
        locally(stage, config, f"store.path={here}")

    actual, expected = Store(str(there)), Store(str(here))
    assert manifest.list_versions(actual, "squad") == manifest.list_versions(expected, "squad") == [1, 2]
    for version in (1, 2):
        by_job, by_command = (manifest.read(store, "squad", version) for store in (actual, expected))
        assert by_job.content_digest() == by_command.content_digest()
        assert manifest.verify(actual, by_job).problems == []
    assert len({manifest.read(actual, "squad", version).content_digest() for version in (1, 2)}) == 2

    uploads = list(cluster.folder.glob("ray*/session_2*/runtime_resources/working_dir_files/_ray_pkg_*/"))
    assert uploads
    for upload in uploads:
        names = {path.name for path in upload.iterdir()}
        assert {"jobs", "mvr_ray"} <= names
        assert not names & {".venv", ".git", "store", "demo-store", "tests", "docs"}
        files = [path for path in upload.rglob("*") if path.is_file() and path.suffix != ".pyc"]  # the jobs write these
        assert sum(path.stat().st_size for path in files) < MAX_UPLOAD_BYTES
