"""Attacks on a server over raw sockets of the loopback, from an address (127.0.0.2) that is not the user's."""

import contextlib
import http.client
import json
import selectors
import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ATTACKER = "127.0.0.2"
MEGABYTE = b"x" * 1_000_000
GET = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n"
SEARCH = b"POST /v1/search HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


class RawReply(NamedTuple):
    """Status and error code of the first response to raw bytes; 0 where the connection was closed without one. HAProxy
    answers what is no HTTP in HTML, which has no code."""

    status: int
    code: str


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60, source_address=(ATTACKER, 0))


def send(port: int, parts: Iterable[bytes]) -> RawReply:
    """Send the parts, or as many as the server takes, and read one response."""
    with connect(port) as raw:
        with contextlib.suppress(OSError):
            for part in parts:
                raw.sendall(part)
        return read_reply(raw)


def read_reply(raw: socket.socket) -> RawReply:
    try:
        response = http.client.HTTPResponse(raw)
        response.begin()
        body = response.read()
    except (OSError, http.client.HTTPException):
        return RawReply(0, "")
    is_json = response.headers["content-type"] == "application/json" and response.status >= 400
    return RawReply(response.status, json.loads(body)["error"]["code"] if is_json else "")


def long_header(num_megabytes: int) -> Iterator[bytes]:
    yield GET + b"a: "
    for _ in range(num_megabytes):
        yield MEGABYTE
    yield b"\r\n\r\n"


def chunked_body(head: bytes, num_megabytes: int) -> Iterator[bytes]:
    yield head + CHUNKED
    for _ in range(num_megabytes):
        yield b"f4240\r\n" + MEGABYTE + b"\r\n"
    yield b"0\r\n\r\n"


@contextmanager
def half_requests(port: int, number: int, part: bytes = GET) -> Iterator[list[socket.socket]]:
    """So many connections that sent a part of a request and no more."""
    sockets = []
    try:
        for _ in range(number):
            with contextlib.suppress(OSError):
                raw = connect(port)
                sockets.append(raw)
                raw.sendall(part)
        yield sockets
    finally:
        for raw in sockets:
            raw.close()


def closed_by_server(sockets: list[socket.socket], within_s: float) -> int:
    """How many of them the server has closed by then."""
    end_s, num_closed = time.monotonic() + within_s, 0
    with selectors.DefaultSelector() as selector:
        for raw in sockets:
            raw.setblocking(False)
            selector.register(raw, selectors.EVENT_READ)
        while selector.get_map() and (left_s := end_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                with contextlib.suppress(BlockingIOError):
                    try:
                        is_open = bool(key.fileobj.recv(65536))
                    except ConnectionError:
                        is_open = False
                    if not is_open:
                        num_closed += 1
                        selector.unregister(key.fileobj)
    return num_closed


def at_once(number: int, work: Any) -> list[Any]:
    with ThreadPoolExecutor(number) as threads:
        return list(threads.map(lambda _: work(), range(number)))


def memory_bytes(process_id: int) -> int:
    status = Path(f"/proc/{process_id}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return 1024 * int(line.split()[1])
