"""A few lines of ASGI client: one HTTP request to an app in this process."""

import asyncio
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote


class Reply(NamedTuple):
    status: int
    body: Any
    headers: dict[str, str]
    read: int
    """How many of the sent chunks were taken."""


def call(app: Any, method: str, path: str, *parts: Any, **more: Any) -> Reply:
    """`ask`, outside an event loop."""
    return asyncio.run(ask(app, method, path, *parts, **more))


async def ask(
    app: Any,
    method: str,
    path: str,
    body: Any = None,
    raw: bytes | None = None,
    *,
    token: str | None = None,
    headers: Iterable[tuple[bytes, bytes]] = (),
    chunks: Sequence[bytes] | None = None,
) -> Reply:
    """Send `body` as JSON, `raw` as it is, or `chunks` without a content-length."""
    payload = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
    all_headers = [*headers]
    if "content-type" not in {name.decode() for name, _ in all_headers}:
        all_headers.append((b"content-type", b"application/json"))
    if chunks is None:
        all_headers.append((b"content-length", str(len(payload)).encode()))
    if token is not None:
        all_headers.append((b"authorization", f"Bearer {token}".encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": unquote(path.partition("?")[0]),
        "raw_path": path.partition("?")[0].encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": path.partition("?")[2].encode(),
        "headers": all_headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    messages: list[dict[str, Any]] = []
    parts = [payload] if chunks is None else list(chunks)
    num_reads = 0

    async def receive() -> dict[str, Any]:
        nonlocal num_reads
        num_reads += 1
        if num_reads > len(parts):
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": parts[num_reads - 1], "more_body": num_reads < len(parts)}

    async def send(message: dict[str, Any]) -> None:
        messages.append(message)

    await app(scope, receive, send)
    start = next(m for m in messages if m["type"] == "http.response.start")
    text = b"".join(m.get("body", b"") for m in messages if m["type"] == "http.response.body")
    response_headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
    assert len(response_headers) == len(start["headers"]), "a header stands twice"
    plain = json.loads(text) if text and response_headers.get("content-type") == "application/json" else text.decode()
    return Reply(start["status"], plain, response_headers, num_reads)
