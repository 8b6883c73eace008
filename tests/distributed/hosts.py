"""Two hosts on this machine: network namespaces with addresses of their own and one cable between them."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

ADDRESSES = {"head": "10.213.7.1", "other": "10.213.7.2"}
PORT = 6379
HEALTH = {"period_ms": 500, "timeout_ms": 1000, "failure_threshold": 3, "initial_delay_ms": 500}
RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class Hosts:
    """The two hosts, with Ray's head on the first."""

    def __init__(self, name: str, folder: Path, token: str) -> None:
        self.names = {host: f"{name}-{host[0]}" for host in ADDRESSES}
        self.folder = folder
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": token,
            "RAY_USAGE_STATS_ENABLED": "0",
            **{f"RAY_health_check_{key}": str(value) for key, value in HEALTH.items()},
        }
        self.address = f"{ADDRESSES['head']}:{PORT}"
        self.running: dict[str, subprocess.Popen[str]] = {}

    def on(self, host: str, command: list[str], **more) -> subprocess.Popen[str]:
        """A process on one host, that joins the cluster if it looks for one."""
        environ = self.environ | {"RAY_ADDRESS": self.address}
        return subprocess.Popen(["ip", "netns", "exec", self.names[host], *command], env=environ, text=True, **more)

    def start(self, host: str, cpus: int) -> None:
        """Ray on one host; what ran there before must have ended."""
        options = ["--head", f"--port={PORT}", "--include-dashboard=false"] if host == "head" else []
        options += [f"--temp-dir={self.folder}"] if host == "head" else [f"--address={self.address}"]
        command = [*RAY, "start", "--block", *options, f"--node-ip-address={ADDRESSES[host]}", f"--num-cpus={cpus}"]
        line = ["ip", "netns", "exec", self.names[host], *command, "--object-store-memory=150000000"]
        with (self.folder / f"{host}.log").open("a") as log:
            self.running[host] = subprocess.Popen(line, env=self.environ, stdout=log, stderr=log, text=True)

    def nodes(self) -> list[str]:
        """The addresses of the nodes that the head takes for alive; empty where it does not answer."""
        asking = "import ray; ray.init(logging_level='ERROR', log_to_driver=False); "
        asking += "print(*(n['NodeManagerAddress'] for n in ray.nodes() if n['Alive']))"
        with self.on(
            "head", [sys.executable, "-c", asking], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as process:
            return process.communicate(timeout=60)[0].split()

    def until_nodes(self, count: int, seconds: float = 90.0) -> None:
        end = time.monotonic() + seconds
        while len(nodes := self.nodes()) != count:
            assert time.monotonic() < end, f"{nodes} are there, {count} nodes were to be"

    def cut(self) -> None:
        """Pull the cable: no packet passes, and no process gets an error."""
        ip("-n", self.names["other"], "link", "set", "cable", "down")

    def mend(self) -> None:
        ip("-n", self.names["other"], "link", "set", "cable", "up")

    def stop(self) -> None:
        for host in ("other", "head"):
            if host in self.running:
                self.running[host].terminate()
        for process in self.running.values():
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


@contextmanager
def two_hosts(token: str) -> Iterator[Hosts]:
    """Skips where this machine does not let us make namespaces."""
    if shutil.which("ip") is None:
        pytest.skip("`ip` is not installed (Debian: iproute2)")
    name = f"mvr{os.getpid()}"
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="mvr-", dir="/tmp"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        hosts = Hosts(name, folder, token)
        for host in ADDRESSES:
            try:
                ip("netns", "add", hosts.names[host])
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace can be made here: {error.stderr.decode().strip()}")
            stack.callback(ip, "netns", "del", hosts.names[host])
            ip("-n", hosts.names[host], "link", "set", "lo", "up")
        other_end = ("peer", "name", "cable", "netns", hosts.names["other"])
        ip("-n", hosts.names["head"], "link", "add", "cable", "type", "veth", *other_end)
        for host, address in ADDRESSES.items():
            ip("-n", hosts.names[host], "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", hosts.names[host], "link", "set", "cable", "up")
        stack.callback(hosts.stop)
        yield hosts
