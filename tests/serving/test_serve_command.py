"""`mvr-ray serve` as a process: it answers, and ends when it is told to, once or twice."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import yaml

from mvr_ray.client import Client, RefusedError
from mvr_ray.errors import ConfigError
from mvr_ray.serving.replica import deploy

COMMAND = """
import signal, sys
from mvr_ray.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background may have it ignored
main(sys.argv[1:])
"""


ADMIN = "admin-" + "a" * 20


def unmeasured(address: str, num_bytes: int) -> urllib.request.Request:
    """A body that comes in chunks, without a length."""

    def chunks() -> Iterator[bytes]:
        for _ in range(num_bytes // 100_000):
            yield b" " * 100_000

    headers = {"content-type": "application/json", "authorization": f"Bearer {ADMIN}", "transfer-encoding": "chunked"}
    return urllib.request.Request(address, chunks(), headers)


def asked_at_once(address: str, times: int) -> list[str]:
    """Of so many requests at a time: how each was answered, with the message of an error."""
    body = json.dumps({"queries": ["What was the oil crisis?"] * 64}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {ADMIN}"}
    request = urllib.request.Request(f"{address}/v1/search", body, headers)

    def asked(_: int) -> str:
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return str(reply.status)
        except urllib.error.HTTPError as error:
            return f"{error.code} {json.loads(error.read())['error']['message']} {error.headers['retry-after']}"

    with ThreadPoolExecutor(times) as threads:
        return list(threads.map(asked, range(times)))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.data
@pytest.mark.ray
def test_the_command_answers_until_it_is_interrupted_and_then_ends_without_a_word_too_many(
    small_index, run_over, proxy_waiting, tmp_path
):
    port = free_port()
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run_over(small_index, serve={"port": port}).model_dump(mode="json")))
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "MVR_RAY_ADMIN_TOKEN": ADMIN}
    command = [sys.executable, "-c", COMMAND, "serve", str(file)]
    said = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        for line in server.stderr:
            said.append(line)
            if line.startswith("serving on"):
                break
        address = f"http://127.0.0.1:{port}"
        with Client(address, token=ADMIN, timeout_s=60) as client:
            answer = client.search(["What was the oil crisis?"], k=2)
            assert client.passage(answer.results[0][0].id).text == answer.results[0][0].text
            assert client.versions().serving == 1 and client.ready().ready
        told = asked_at_once(address, 4 * proxy_waiting)
        with Client(address, timeout_s=60) as stranger, pytest.raises(RefusedError, match="no_token"):
            stranger.search(["What was the oil crisis?"])
        with pytest.raises(urllib.error.HTTPError, match="413"):
            urllib.request.urlopen(unmeasured(f"{address}/v1/search", 33_000_000), timeout=60)
        with pytest.raises(ConfigError, match=rf"listens on 127\.0\.0\.1:{port} already"):
            deploy(run_over(small_index, serve={"port": free_port()}))
        server.send_signal(signal.SIGINT)
        for line in server.stderr:
            said.append(line)
            if line == "stopping\n":
                server.send_signal(signal.SIGINT)
    assert server.returncode == 0, "".join(said)
    refused = f"503 {proxy_waiting} requests are here already 1"  # by the proxy; the replica would take more
    assert set(told) == {"200", refused} and told.count("200") >= proxy_waiting
    assert len(answer.results[0]) == 2 and answer.exact.certified and answer.coverage.share == 1
    assert not any(ADMIN in line for line in said)
    assert "stopping\n" in said and not any("Traceback" in line for line in said)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
