"""A cluster that grows when an index is to be built, and shrinks when it is: nodes come for encoders, and go.

Run by `make chaos`. The nodes are processes of this machine, which Ray's own autoscaler starts and ends by the provider
that Ray has for that; a cloud's differs in how a node is made, not in when.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import RAY
from test_nodes import WIDE, command, finish, live, run_file

pytestmark = [pytest.mark.data, pytest.mark.nodes]

HEAD = "f" * 51 + "00000"
HEAD_TYPE = "ray.head.default"  # as the provider calls it
LISTS = (
    *("initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands"),
    *("head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files", "rsync_exclude", "rsync_filter"),
)
"""A provider of Ray's own needs none; Ray asks for them all the same."""
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"


class Growing:
    """A head without CPUs and an autoscaler that may start two nodes with more."""

    def __init__(self, folder: Path, token: str) -> None:
        self.folder = folder
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{sock.getsockname()[1]}"
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": HEAD,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD,
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        }

    def start(self) -> None:
        cluster = {
            "cluster_name": "growing",
            "max_workers": 2,
            "idle_timeout_minutes": 0.1,
            "provider": {
                "type": "external",
                "module": PROVIDER,
                "launch_multiple": True,
                "head_node_id": HEAD,
                "gcs_address": self.address,
            },
            "available_node_types": {
                HEAD_TYPE: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                "encoder": {"resources": {"CPU": 3}, "node_config": {}, "min_workers": 0, "max_workers": 2},
            },
            "head_node_type": HEAD_TYPE,
            "upscaling_speed": 1.0,
            "auth": {},
            "file_mounts": {},
            **{key: [] for key in LISTS},
        }
        file = self.folder / "cluster.json"
        file.write_text(json.dumps(cluster))
        command = [*RAY, "start", "--head", "--block", "--num-cpus=0", "--include-dashboard=false"]
        command += ["--node-ip-address=127.0.0.1", f"--port={self.address.rpartition(':')[2]}"]
        command += [f"--temp-dir={self.folder}", f"--autoscaling-config={file}", "--object-store-memory=150000000"]
        with (self.folder / "head.log").open("w") as log:
            self.head = subprocess.Popen(command, env=self.environ, stdout=log, stderr=log)

    def workers(self) -> int | None:
        """Nodes beside the head that are alive; None where the head does not answer."""
        asking = "import ray; ray.init(logging_level='ERROR'); print('nodes', sum(n['Alive'] for n in ray.nodes()) - 1)"
        result = subprocess.run(
            [sys.executable, "-c", asking], env=self.client, capture_output=True, text=True, timeout=60, check=False
        )
        match = re.search(r"^nodes (\d+)$", result.stdout, re.MULTILINE)  # among what the autoscaler tells
        return int(match[1]) if match else None

    @property
    def client(self) -> dict[str, str]:
        names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED")
        plain = {k: v for k, v in self.environ.items() if not k.startswith("RAY_") or k in names}
        return plain | {"RAY_ADDRESS": self.address}

    def until(self, what, seconds: float = 90.0) -> None:
        end = time.monotonic() + seconds
        while not what(self.workers()):
            assert time.monotonic() < end, (self.folder / "head.log").read_text()[-2000:]

    def stop(self) -> None:
        """The head, and what the autoscaler started, which outlives it: every process that was given our folder."""
        self.head.terminate()
        try:
            self.head.wait(40)
        except subprocess.TimeoutExpired:
            self.head.kill()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if str(self.folder) in path.read_text():
                    os.kill(int(path.parent.name), signal.SIGKILL)
            except (OSError, UnicodeDecodeError):
                continue


@pytest.fixture
def growing(monkeypatch) -> Iterator[Growing]:
    folder = Path(tempfile.mkdtemp(prefix="mvr-", dir="/tmp"))
    cluster = Growing(folder, "growing-" + "t" * 40)
    try:
        cluster.start()
        cluster.until(lambda workers: workers == 0)
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            monkeypatch.delenv(name)
        for name, value in cluster.client.items():
            monkeypatch.setenv(name, value)
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.chaos(
    "autoscaler adds nodes for an index and takes them away when idle",
    "the command waits for them, ends well, and the index is the one of a calm machine to the byte",
)
def test_nodes_come_for_an_index_and_go_when_it_is_built(corpus_store, run_over, tmp_path, growing, record_property):
    calm, store = (shutil.copytree(corpus_store, tmp_path / name) for name in ("calm", "store"))
    began = time.monotonic()
    indexing = command("index", run_file(run_over, store, autoscaling=True))
    growing.until(lambda workers: workers)
    came = time.monotonic() - began
    output = finish(indexing)
    took = time.monotonic() - began
    growing.until(lambda workers: workers == 0)
    shrink_s = time.monotonic() - began - took
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        os.environ.pop(name)
    finish(command("index", run_file(run_over, calm)))
    assert live(store).content_digest() == live(calm).content_digest()
    assert WIDE["encoders_min"] == 2 and "passages read = embedded" in output
    record_property(
        "figures", f"first node after {came:.0f} s, built after {took:.0f} s, no node left {shrink_s:.0f} s later"
    )
