"""A few lines of ASGI client: one HTTP request to an app in this process."""

import asyncio
import json
from typing import Any, NamedTuple


class Reply(NamedTuple):
    status: int
    body: Any


def call(app: Any, method: str, path: str, body: Any = None, raw: bytes | None = None) -> Reply:
    """Send `body` as JSON, or `raw` as it is."""
    sent = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(sent)).encode())]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }
    told: list[dict[str, Any]] = []
    waiting = [{"type": "http.request", "body": sent, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return waiting.pop() if waiting else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        told.append(message)

    asyncio.run(app(scope, receive, send))
    status = next(m["status"] for m in told if m["type"] == "http.response.start")
    text = b"".join(m.get("body", b"") for m in told if m["type"] == "http.response.body")
    return Reply(status, json.loads(text) if text else None)
