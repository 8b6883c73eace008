"""`mvr-ray serve` as a process: it answers, and ends when it is told to, once or twice."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest
import ray
import yaml

COMMAND = """
import signal, sys
from mvr_ray.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background may have it ignored
main(sys.argv[1:])
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.data
@pytest.mark.ray
def test_the_command_answers_until_it_is_interrupted_and_then_ends_without_a_word_too_many(
    small_index, run_over, tmp_path
):
    port = free_port()
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run_over(small_index, serve={"port": port}).model_dump(mode="json")))
    environment = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, "-c", COMMAND, "serve", str(file)]
    said = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as server:
        for line in server.stderr:
            said.append(line)
            if line.startswith("serving on"):
                break
        asked = json.dumps({"queries": ["What was the oil crisis?"], "k": 2}).encode()
        address = f"http://127.0.0.1:{port}/v1/search"
        request = urllib.request.Request(address, asked, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as reply:
            answer = json.load(reply)
        server.send_signal(signal.SIGINT)
        for line in server.stderr:
            said.append(line)
            if line == "stopping\n":
                server.send_signal(signal.SIGINT)
    assert server.returncode == 0, "".join(said)
    assert len(answer["results"][0]) == 2 and answer["exact"]["certified"] and answer["coverage"]["share"] == 1
    assert "stopping\n" in said and not any("Traceback" in line for line in said)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
