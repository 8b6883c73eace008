"""`mvr-ray serve` as a process: it answers, is started again after a kill, and ends by a signal, sent once or twice.

The tests share one server, which the last of them kills.
"""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import ray
import yaml
from attacks import SEARCH as SEARCH_HEADERS
from attacks import RawReply, chunked_body, send
from node_ports import free_ports
from ray._private.state import actors
from server import ADMIN, command
from waiting import lines_of, until

from mvr_ray.cli import main
from mvr_ray.client import Client, RefusedError, UnreachableError
from mvr_ray.config import RunConfig
from mvr_ray.distributed.cluster.ray_internals import has_orphan
from mvr_ray.distributed.cluster.session import staying_local
from mvr_ray.errors import ConfigError
from mvr_ray.serving.replica import serve_until_interrupted

QUESTION = "What was the oil crisis?"


def asked_at_once(address: str, times: int) -> list[str]:
    """Of so many requests at a time: how each was answered, with the message of an error."""
    body = json.dumps({"queries": [QUESTION] * 64}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {ADMIN}"}
    request = urllib.request.Request(f"{address}/v1/search", body, headers)

    def search_once(_: int) -> str:
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return str(reply.status)
        except urllib.error.HTTPError as error:
            return f"{error.code} {json.loads(error.read())['error']['message']} {error.headers['retry-after']}"

    with ThreadPoolExecutor(times) as threads:
        return list(threads.map(search_once, range(times)))


def serving_processes() -> set[int]:
    """Process ids of the live actors of the job that deployed the replica; the cluster may have other jobs."""
    alive = actors(actor_state_name="ALIVE").values()
    [job] = {actor["JobID"] for actor in alive if actor["ActorClassName"].startswith("ServeReplica")}
    return {actor["Pid"] for actor in alive if actor["JobID"] == job}


def log_lines(processes: set[int]) -> list[dict[str, str]]:
    """The log lines of these processes, in no order of time."""
    folder = Path(ray._private.worker.global_worker.node.get_session_dir_path()) / "logs"
    files = [file for file in folder.glob("worker-*.err") if int(file.stem.rpartition("-")[2]) in processes]
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.startswith('{"time": ')]


def births(lines: list[dict[str, str]]) -> Counter[str]:
    return Counter(
        line["message"] for line in lines if line["message"].startswith(("replica started", "searcher started"))
    )


QUERY = b'{"queries": ["What was the oil crisis?"], "k": 2'
LATE_S = 5.75
"""HAProxy answers 0.75 s after a deadline; the rest is for a busy machine, and far from the 10 s of a request without
one of its own."""
SEARCH, ZEROS = "/v1/search", ", ".join(64 * ["0"])
BAD = {
    "wrong dimension": (SEARCH, b'{"queries": [[1, 2]]}', "422 wrong_dimension"),
    "NaN": (SEARCH, b'{"queries": [[NaN, 1]]}', "422 not_finite"),
    "infinity": (SEARCH, b'{"queries": [[1e999, 1]]}', "422 not_finite"),
    "zero vector": (SEARCH, f'{{"queries": [[{ZEROS}]]}}'.encode(), "422 zero_vector"),
    "too large for float32": (SEARCH, f'{{"queries": [[1e300{ZEROS[1:]}]]}}'.encode(), "422 not_finite"),
    "empty batch": (SEARCH, b'{"queries": []}', "422 wrong_value"),
    "k of 0": (SEARCH, b'{"queries": ["x"], "k": 0}', "422 k_out_of_range"),
    "k beyond": (SEARCH, b'{"queries": ["x"], "k": 1000000000000000000000}', "422 k_out_of_range"),
    "1 MB of text": (SEARCH, b'{"queries": ["' + b"oil " * 250_000 + b'"]}', "422 query_too_long"),
    "invalid UTF-8": (SEARCH, b'{"queries": ["\xff\xfe"]}', "422 not_json"),
    "unknown version": (SEARCH, QUERY + b', "version": 99}', "404 unknown_version"),
    "a path in an id": ("/v1/passages/%2E%2E%2F%2E%2E%2Fetc%2Fpasswd", None, "404 unknown_passage"),
    "a path in the path": ("/v1/passages/../../../etc/passwd", None, "404 unknown_passage"),
    "no token": (SEARCH, QUERY + b"}", "401 no_token"),
    "wrong token": (SEARCH, QUERY + b"}", "401 wrong_token"),
}
"""Path, body and the answer. The bytes go as they are."""


def turned_away(port: int, case: str) -> str:
    path, body, _ = BAD[case]
    headers = {"content-type": "application/json", "x-request-id": f"bad-{case.replace(' ', '-')}"}
    if case != "no token":
        headers["authorization"] = "Bearer nobody" if case == "wrong token" else f"Bearer {ADMIN}"
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST" if body else "GET", path, body, headers)
        reply = connection.getresponse()
        return f"{reply.status} {json.loads(reply.read())['error']['code']}"
    finally:
        connection.close()


class RunningCommand(NamedTuple):
    """A server that answers: the run of its command, its process, and the lines that this has written."""

    run: RunConfig
    process: subprocess.Popen[str]
    lines: list[str]

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.run.serve.port}"


@pytest.fixture(scope="module")
def server(small_index, run_over, serve_turn, tmp_path_factory) -> Iterator[RunningCommand]:
    run = run_over(small_index, serve={"port": free_ports(1)[0]})
    with command(run, tmp_path_factory.mktemp("served")) as (process, lines):
        yield RunningCommand(run, process, lines)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.stderr.read()


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.ray
def test_the_command_answers_whatever_it_is_sent_and_no_bad_input_ends_a_process(
    server, small_index, run_over, proxy_waiting
):
    port = server.run.serve.port
    with Client(server.address, token=ADMIN, timeout_s=60) as client:
        answer = client.search([QUESTION], k=2)
        assert client.passage(answer.results[0][0].id).text == answer.results[0][0].text
        assert client.versions().serving == 1 and client.ready().ready
    processes = serving_processes()
    first_births = births(log_lines(processes))
    born = Counter(line.split(":")[0] for line in first_births.elements())
    assert born["replica started"] == 1 <= born["searcher started"]
    assert {case: turned_away(port, case) for case in BAD} == {case: answer for case, (*_, answer) in BAD.items()}
    replies = asked_at_once(server.address, 4 * proxy_waiting)
    with Client(server.address, timeout_s=60) as client, pytest.raises(RefusedError, match="no_token"):
        client.search([QUESTION])
    headers = SEARCH_HEADERS + f"Authorization: Bearer {ADMIN}\r\n".encode()
    assert send(port, chunked_body(headers, 33)) == RawReply(413, "body_too_large")
    with Client(server.address, token=ADMIN, timeout_s=60) as client:
        assert client.search([QUESTION], k=2).results == answer.results and client.ready().ready
    assert serving_processes() == processes
    lines = log_lines(processes)
    assert births(lines) == first_births, "bad input has ended a replica or a searcher"
    by_request = {line["request"]: line for line in lines if line["message"].startswith("request: ")}
    line = by_request["bad-unknown-version"]
    assert (line["level"], line["logger"]) == ("INFO", "mvr_ray.serving.middleware")
    assert re.match(
        r"request: id=bad-unknown-version method=POST route=/v1/search status=404 took_ms=", line["message"]
    )
    search_lines = [line for line in lines if line["message"].startswith("searched: index=")]
    assert search_lines and all("status=200" in by_request[line["request"]]["message"] for line in search_lines)
    assert not any(ADMIN in str(line) for line in lines)
    with pytest.raises(ConfigError, match=r"listens on 127\.0\.0\.1:\d+ already"):
        serve_until_interrupted(run_over(small_index, serve={"port": free_ports(1)[0]}), None, print)
    with Client(server.address, token=ADMIN, timeout_s=60) as client:  # it goes on
        assert client.ready().ready
    refusal = f"503 {proxy_waiting} requests are in flight already 1"  # by the proxy; the replica would take more
    assert set(replies) == {"200", refusal} and replies.count("200") >= proxy_waiting
    assert len(answer.results[0]) == 2 and answer.exact.certified and answer.coverage.share == 1


def timed_search(address: str, timeout_ms: int) -> tuple[str, float]:
    """Status and code of the answer to one search, and the seconds until it came."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {ADMIN}", "x-timeout-ms": str(timeout_ms)}
    request, start_s = urllib.request.Request(f"{address}/v1/search", QUERY + b"}", headers), time.monotonic()
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return f"{reply.status}", time.monotonic() - start_s
    except urllib.error.HTTPError as error:
        return f"{error.code} {json.loads(error.read())['error']['code']}", time.monotonic() - start_s


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.ray
def test_http_gives_what_the_command_line_gives(server, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(server.run.model_dump(mode="json")))
    with staying_local(), pytest.raises(SystemExit):
        main(["search", str(tmp_path / "run.yaml"), QUESTION, "-k", "3", "--json", "resources.local_passages=1000"])
    body = json.dumps({"queries": [QUESTION], "k": 3}).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {ADMIN}"}
    request = urllib.request.Request(f"{server.address}/v1/search", body, headers)
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert json.loads(reply.read())["results"] == json.loads(capsys.readouterr().out)["results"]


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.ray
@pytest.mark.chaos(
    "replica stopped, then killed, behind the real proxy", "504 by the deadline, 503 at once; then served"
)
def test_a_request_to_a_replica_that_hangs_or_was_killed_is_answered_by_its_deadline(server, record_property):
    alive = actors(actor_state_name="ALIVE").values()
    [replica] = [actor["Pid"] for actor in alive if actor["ActorClassName"].startswith("ServeReplica")]
    assert timed_search(server.address, 10_000)[0] == "200"
    os.kill(replica, signal.SIGSTOP)
    timeouts = [timed_search(server.address, int(1000 * deadline_s)) for deadline_s in (0.5, 1.5)]
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(timed_search, server.address, 10_000)
        with Client(server.address, token=ADMIN) as client, pytest.raises(UnreachableError, match="timeout"):
            client.ready(timeout_s=1)
        os.kill(replica, signal.SIGKILL)
        outcome = waiting.result()
    with Client(server.address, token=ADMIN) as client:
        assert client.search([QUESTION], k=2, timeout_s=120).coverage.share == 1
    assert [answer for answer, _ in timeouts] == ["504 timeout"] * 2
    for deadline_s, (_, took_s) in zip((0.5, 1.5), timeouts):
        assert deadline_s <= took_s < deadline_s + LATE_S
    assert outcome[0] in ("200", "503 unavailable", "504 timeout") and outcome[1] < 10 + LATE_S
    seconds = ", ".join(f"{seconds:.1f}" for _, seconds in timeouts)
    record_property("figures", f"stopped: 504 after {seconds} s; killed: {outcome[0]} after {outcome[1]:.1f} s")


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.ray
def test_the_command_starts_again_where_it_was_killed_and_then_ends_without_a_word_too_many(server, tmp_path):
    server.process.kill()
    server.process.wait()
    until(lambda: has_orphan("ServeController"), every_s=0.1)  # Ray notices it after a moment
    with command(server.run, tmp_path) as (again, output):
        with Client(server.address, token=ADMIN, timeout_s=60) as client:
            assert client.search([QUESTION], k=2).coverage.share == 1
        again.send_signal(signal.SIGTERM)  # for which Ray has a handler of its own
        for line in again.stderr:
            output.append(line)
            if line == "stopping\n":
                again.send_signal(signal.SIGINT)
    assert again.returncode == 0 and not has_orphan("ServeController"), "".join(output)
    assert not any(ADMIN in line for line in [*server.lines, *output])
    assert "stopping\n" in output and not any("Traceback" in line for line in output)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.run.serve.port)) != 0


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.ray
def test_a_signal_to_every_process_of_a_server_ends_it_as_one_to_the_command(
    small_index, run_over, serve_turn, tmp_path
):
    """Service managers send SIGTERM so, and Serve would wait half a minute for its controller, which has ended, too."""
    run = run_over(small_index, serve={"port": free_ports(1)[0]})
    with command(run, tmp_path, private=True) as (process, output):
        start_s = time.monotonic()
        os.killpg(process.pid, signal.SIGTERM)
        output += lines_of(process, process.stderr, 60)
        process.wait(60)
    assert process.returncode == 0 and output[-1] == "stopping\n", "".join(output)
    assert time.monotonic() - start_s < 25, "Serve waits 30 s"


NO_PROXY = """
import sys
import time


class ProxyWaits:
    def find_spec(self, name, path=None, target=None):
        if name == "mvr_ray.serving.proxy_limit" and sys.argv[0].endswith("default_worker.py"):
            time.sleep(3600)  # in the constructor of Serve's proxy, which imports its middlewares


sys.meta_path.insert(0, ProxyWaits())
"""


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.ray
def test_a_proxy_that_does_not_start_ends_the_command_with_one_line(small_index, run_over, tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run_over(small_index, serve={"port": free_ports(1)[0]}).model_dump(mode="json")))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "0.1"
    (tmp_path / "sitecustomize.py").write_text(NO_PROXY)
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    words = [
        sys.executable,
        "-m",
        "mvr_ray.cli",
        "serve",
        str(file),
        "resources.address=null",
        "resources.local_cpus=2",
    ]
    result = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert len(lines) == 2 and re.fullmatch(
        r"mvr-ray: Ray Serve did not start \(.*\); run the same command again", lines[1]
    )
