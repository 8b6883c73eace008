"""Stages submitted to a cluster that somebody else started: the same content as from the command line.

The cluster is one head node with ports, a temporary folder and a token of its own; it is stopped by a signal to its own
process, so that no other Ray on the machine notices.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from node_ports import free_ports

from mvr_ray.cli import main
from mvr_ray.store import manifest
from mvr_ray.store.files import Store

pytestmark = [pytest.mark.data, pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).resolve().parent.parent.parent
RAY = str(Path(sys.executable).with_name("ray"))
NUM_ARTICLES, PARAGRAPHS = 3, 20
MAX_UPLOAD_BYTES = 4 << 20


class Cluster(NamedTuple):
    """A head node: what a client's environment needs, and where it keeps its files."""

    environment: dict[str, str]
    folder: Path

    def submit(self, stage: str, *words: str) -> str:
        """Run a job script as a job and wait for its end; its log."""
        command = [RAY, "job", "submit", "--working-dir", ".", "--", "python", f"jobs/{stage}.py", *words]
        process = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False, timeout=240
        )
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="mvr-", dir="/tmp"))  # Ray's sockets stand in it: its path must be short
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    gcs, dashboard, client, *agents = free_ports(7)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # no job is left to wait for when the head is stopped
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [RAY, "start", "--head", "--block", "--num-cpus=4", "--object-store-memory=200000000"]
    command += [f"--temp-dir={folder}", "--node-ip-address=127.0.0.1", f"--port={gcs}", "--include-dashboard=true"]
    command += [f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"]
    options = ("dashboard-agent-listen-port", "dashboard-agent-grpc-port", "runtime-env-agent-port")
    command += [f"--{name}={port}" for name, port in zip((*options, "metrics-export-port"), agents)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
    ) as head:
        assert head.stdout
        output = []
        for line in head.stdout:
            output.append(line)
            if "Ray runtime started" in line:
                break
        else:
            pytest.fail("the head did not start:\n" + "".join(output))
        try:
            address = f"http://127.0.0.1:{dashboard}"
            yield Cluster({**environment, "RAY_API_SERVER_ADDRESS": address}, folder)
        finally:
            head.terminate()
            with suppress(subprocess.TimeoutExpired):  # it can wait for its raylet, which is gone, forever
                head.communicate(timeout=60)
            head.kill()
            shutil.rmtree(folder, ignore_errors=True)


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
        "index": {"name": "squad", "encoder": "untrained", "sort_window": 8},
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

    uploads = list(cluster.folder.glob("session_2*/runtime_resources/working_dir_files/_ray_pkg_*/"))
    assert uploads
    for upload in uploads:
        names = {path.name for path in upload.iterdir()}
        assert {"jobs", "mvr_ray"} <= names
        assert not names & {".venv", ".git", "store", "demo-store", "tests", "docs"}
        files = [path for path in upload.rglob("*") if path.is_file() and path.suffix != ".pyc"]  # the jobs write these
        assert sum(path.stat().st_size for path in files) < MAX_UPLOAD_BYTES
