"""The door of the HTTP app: who asks, how many at a time, how much they send; and what is counted on the way out.

    request id  ->  token  ->  a place  ->  the whole body, bounded  ->  the app

A request that is turned away never reaches the app. Pure ASGI: bodies are counted as they come, with or without a
content-length.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from mvr_ray import logs
from mvr_ray.config import ServeConfig
from mvr_ray.serving.admission import Admission, Place
from mvr_ray.serving.metrics import Metrics
from mvr_ray.serving.pages import PATHS
from mvr_ray.serving.tokens import VARIABLES, Role, Tokens
from mvr_ray.serving.wire import RequestError

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN = ("/livez", "/readyz", *PATHS)
"""Answered without a token: they say nothing about the passages."""
BOUNDED = "/v1/"
"""Requests below it take a place."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_REALM = 'Bearer realm="mvr_ray"'


class Gate:
    """ASGI middleware around the app."""

    def __init__(
        self, app: App, *, limits: ServeConfig, tokens: Tokens, admission: Admission, metrics: Metrics
    ) -> None:
        self.app = app
        self.limits = limits
        self.tokens = tokens
        self.admission = admission
        self.metrics = metrics

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            request_id = _request_id(scope)
            with logs.during(request_id):
                await self._http(scope, receive, send, request_id)

    async def _http(self, scope: Message, receive: Receive, send: Send, request_id: str) -> None:
        began, status = time.perf_counter(), 500
        place: Place | None = None

        async def told(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            try:
                role = allowed(scope, self.tokens)
                if scope["path"].startswith(BOUNDED):
                    place = self.admission.enter(_asked_s(scope))
                left_s = place.left_s() if place else self.admission.timeout_s
                body = await _whole_body(scope, receive, self.limits.max_body_bytes, left_s)
            except RequestError as error:
                await respond(error, told)
            else:
                scope.setdefault("state", {}).update(role=role, place=place, request_id=request_id)
                await self.app(scope, _replay(body, receive), told)
        finally:
            if place:
                place.leave()
            took_s = time.perf_counter() - began
            route = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self.metrics.note_request(route, method, status, took_s)
            log.info(
                "request: id=%s method=%s route=%s status=%d took_ms=%.1f",
                *(request_id, method, route, status, 1000 * took_s),
            )


def allowed(scope: Message, tokens: Tokens) -> Role | None:
    """The role of the request's token; None where none is asked for. Raises RequestError (401)."""
    if not tokens or scope["path"] in OPEN:
        return None
    scheme, _, token = _header(scope, b"authorization").partition(b" ")
    hint = "send the header `Authorization: Bearer TOKEN` with a token of this server"
    if scheme.lower() != b"bearer" or not token.strip():
        headers = {"www-authenticate": _REALM}
        raise RequestError(401, "no_token", "", "this server answers to bearer tokens", hint, headers)
    role = tokens.role(token.strip())
    if role is None:
        headers = {"www-authenticate": f'{_REALM}, error="invalid_token"'}
        raise RequestError(401, "wrong_token", "", "this server does not know the token", hint, headers)
    return role


def require_admin(role: Role | None) -> None:
    """Raises RequestError (403) unless an admin token was sent: a page in a browser reaches a loopback, too."""
    if role == "admin":
        return
    message = "the token may only read" if role else "this server has no tokens, so nobody may change anything"
    hint = f"send an admin token; a server has those of serve.tokens_file and {VARIABLES['admin']}"
    headers = {"www-authenticate": f'{_REALM}, error="insufficient_scope"'}
    raise RequestError(403, "admin_needed", "", message, hint, headers)


async def respond(error: RequestError, send: Send) -> None:
    body = error.encoded()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in error.headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _whole_body(scope: Message, receive: Receive, max_bytes: int, left_s: float) -> bytes:
    """Raises RequestError: 413 as soon as it is known to be too large, 408 when it does not come in time."""
    told = _header(scope, b"content-length")
    if told.isdigit() and (len(told) > 18 or int(told) > max_bytes):
        raise _too_large(max_bytes)
    try:
        return await asyncio.wait_for(_read(receive, max_bytes), left_s)
    except TimeoutError:
        message, hint = "the body did not come in time", "send it faster, or send less"
        raise RequestError(408, "body_late", "", message, hint, {"connection": "close"}) from None


async def _read(receive: Receive, max_bytes: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            break
        body += message.get("body", b"")
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            break
    return bytes(body)


def _too_large(max_bytes: int) -> RequestError:
    message, hint = f"the body is larger than {max_bytes} bytes", f"send at most {max_bytes} (serve.max_body_bytes)"
    return RequestError(413, "body_too_large", "", message, hint, {"connection": "close"})


def _replay(body: bytes, receive: Receive) -> Receive:
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again


def _header(scope: Message, name: bytes) -> bytes:
    """The first header of this name, empty if there is none."""
    return next((value for key, value in scope["headers"] if key.lower() == name), b"")


def _asked_s(scope: Message) -> float | None:
    """Seconds after which the sender will have gone (X-Timeout-Ms), None where it does not say."""
    told = _header(scope, b"x-timeout-ms")
    return int(told) / 1000 if told.isdigit() and 0 < len(told) < 10 else None


def _request_id(scope: Message) -> str:
    """The sender's own where it is a plain word, else a new one."""
    given = _header(scope, b"x-request-id")
    return given.decode("ascii") if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
