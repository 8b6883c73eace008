"""Authenticates requests, bounds their number and size, assigns ids, and counts and logs each response.

    request id  ->  token  ->  a slot  ->  the whole body, bounded  ->  the app

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
from mvr_ray.serving.admission import Admission, Slot
from mvr_ray.serving.auth import VARIABLES, Role, TokenStore
from mvr_ray.serving.metrics import Metrics
from mvr_ray.serving.schemas import RequestError
from mvr_ray.serving.static import PATHS

log = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

OPEN = ("/livez", "/readyz", *PATHS)
"""Answered without a token: they say nothing about the passages."""
BOUNDED = "/v1/"
"""Requests below it take a slot."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_REALM = 'Bearer realm="mvr_ray"'


class RequestMiddleware:
    """ASGI middleware around the app."""

    def __init__(
        self, app: App, *, limits: ServeConfig, tokens: TokenStore, admission: Admission, metrics: Metrics
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
            request = request_id(scope)
            with logs.request_context(request):
                await self._http(scope, receive, send, request)

    async def _http(self, scope: Message, receive: Receive, send: Send, request: str) -> None:
        began, status = time.perf_counter(), 500
        slot: Slot | None = None

        started = False

        async def told(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request.encode())]
            await send(message)

        try:
            try:
                role = authenticate(scope, self.tokens)
                if scope["path"].startswith(BOUNDED):
                    slot = self.admission.enter(requested_s(scope))
                left_s = slot.left_s() if slot else self.admission.timeout_s
                body = await _whole_body(scope, receive, self.limits.max_body_bytes, left_s)
            except RequestError as error:
                await respond(error, told)
            else:
                scope.setdefault("state", {}).update(role=role, slot=slot, request_id=request)
                await self.app(scope, _replay(body, receive), told)
        except Exception as error:  # whatever the app raises gets a response and a log line with the request's id
            log.error("request failed unexpectedly: path=%s", scope["path"][:200], exc_info=error)
            if started:
                raise
            hint = "this is a fault of the server; its log has the request id (X-Request-Id)"
            await respond(RequestError(500, "internal", "", f"an unexpected {type(error).__name__}", hint), told)
        finally:
            if slot:
                slot.leave()
            took_s = time.perf_counter() - began
            route = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self.metrics.note_request(route, method, status, took_s)
            log.info(
                "request: id=%s method=%s route=%s status=%d took_ms=%.1f",
                *(request, method, route, status, 1000 * took_s),
            )


def authenticate(scope: Message, tokens: TokenStore) -> Role | None:
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


def requested_s(scope: Message) -> float | None:
    """Seconds after which the sender will have gone (X-Timeout-Ms), None where it does not say."""
    told = _header(scope, b"x-timeout-ms")
    return int(told) / 1000 if told.isdigit() and 0 < len(told) < 10 else None


def request_id(scope: Message) -> str:
    """The sender's own where it is a plain word, else a new one."""
    given = _header(scope, b"x-request-id")
    return given.decode("ascii") if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
