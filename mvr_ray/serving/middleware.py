"""Authenticates requests, bounds their number and size, assigns ids, and counts and logs each response.

    request id  ->  deadline  ->  host  ->  token  ->  a slot  ->  the whole body, bounded  ->  the app

A refused request never reaches the app. Pure ASGI: bodies are counted as they arrive, with or without a content-length.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mvr_ray import logs
from mvr_ray.config import ServeConfig
from mvr_ray.deadline import Deadline
from mvr_ray.errors import MvrRayError
from mvr_ray.serving.admission import Admission, Slot, late_error
from mvr_ray.serving.auth import REALM, Role, TokenStore, is_loopback
from mvr_ray.serving.metrics import Metrics
from mvr_ray.serving.schemas import RequestError, to_request_error

log = logging.getLogger(__name__)

SLOT_PATHS = "/v1/"
"""Requests below it take a slot."""
NO_RESPONSE = 499
"""Status, in metrics and log, of a request that ended without a response: its sender or the proxy gave it up."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_TOKEN_HINT = "send the header `Authorization: Bearer TOKEN` with a token of this server"
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


@dataclass
class RequestMiddleware:
    """ASGI middleware around the app."""

    app: ASGIApp
    limits: ServeConfig
    tokens: TokenStore
    open_paths: Collection[str]
    """Paths that need no token: they expose nothing about the passages."""
    admission: Admission
    metrics: Metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            if scope["method"] == "HEAD":  # the response of GET, whose body the HTTP server leaves out
                scope = {**scope, "method": "GET"}
            response = ResponseSender(send, request_id(Headers(scope=scope)))
            with logs.request_context(response.request_id):
                await self._respond(scope, receive, response)
        elif scope["type"] == "websocket":
            await refuse_websocket(scope, receive, send)

    async def _respond(self, scope: Scope, receive: Receive, response: "ResponseSender") -> None:
        start_s, headers, path = time.perf_counter(), Headers(scope=scope), scope["path"]
        deadline = request_deadline(headers, self.limits.timeout_ms / 1000)
        slot: Slot | None = None
        try:
            check_host(headers, self.tokens, self.limits.hosts)
            role = None if path in self.open_paths else authenticate(headers, self.tokens)
            takes_body = path.startswith(SLOT_PATHS)  # of any method: the app answers a wrong one
            if takes_body:
                slot = self.admission.acquire()
            body = await _read_body(headers, receive, self.limits, deadline, takes_body)
            scope.setdefault("state", {}).update(role=role, slot=slot, deadline=deadline)
            messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

            async def replay() -> Message:
                return messages.pop() if messages else await receive()

            await self.app(scope, replay, response)
        except ClientDisconnect:
            pass  # there is no one to respond to
        except RequestError as error:
            await error_response(error)(scope, receive, response)
        except MvrRayError as error:
            log.warning("request failed: id=%s", response.request_id, exc_info=error)
            await error_response(to_request_error(error))(scope, receive, response)
        except Exception as error:  # every error of the app gets a response and a log line with the request's id
            log.error("request failed unexpectedly: path=%s", path[:200], exc_info=error)
            if response.status:
                raise
            hint = "this is a fault of the server; its log has the request id (X-Request-Id)"
            internal_error = RequestError(500, "internal", "", f"an unexpected {type(error).__name__}", hint)
            await error_response(internal_error)(scope, receive, response)
        finally:
            if slot:
                slot.release()
            took_s, status = time.perf_counter() - start_s, response.status or NO_RESPONSE
            route = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self.metrics.note_request(route, method, status, took_s)
            log.info(
                "request: id=%s method=%s route=%s status=%d took_ms=%.1f",
                *(response.request_id, method, route, status, 1000 * took_s),
            )


class ResponseSender:
    """Sends the response to one request, with the request's id in it."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self.status = 0
        """0 until the response begins."""
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self.request_id
        await self._send(message)


def request_deadline(headers: Headers, max_s: float) -> Deadline:
    """Return the deadline of a request that arrives now: after `max_s`, or the sender's shorter time (X-Timeout-Ms)."""
    timeout_ms = headers.get("x-timeout-ms", "")
    is_number = timeout_ms.isascii() and timeout_ms.isdigit() and len(timeout_ms) < 10
    return Deadline.after(max_s).within(int(timeout_ms) / 1000 if is_number else None)


def request_id(headers: Headers) -> str:
    """Return the sender's request id if it is a plain word, else a new one."""
    own = headers.get("x-request-id", "")
    return own if _REQUEST_ID.fullmatch(own) else uuid.uuid4().hex


def authenticate(headers: Headers, tokens: TokenStore) -> Role | None:
    """Return the role of the request's token; None if the server has no tokens. Raises RequestError (401)."""
    if not tokens:
        return None
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise no_token()
    role = tokens.role(token.strip().encode("latin-1"))
    if role is None:
        raise wrong_token()
    return role


def check_host(headers: Headers, tokens: TokenStore, hosts: Collection[str]) -> None:
    """Raise RequestError (421) if a server without tokens is called by a name that is not its own.

    A web page can have its own name resolved to the loopback (DNS rebinding), and would read the answers; the header
    Host then has that name. With tokens such a page is refused, since it has none.
    """
    host = headers.get("host")
    if tokens or host is None:
        return
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    if not is_loopback(name) and name not in map(str.lower, hosts):
        hint = "call it as localhost or 127.0.0.1, or add the name to serve.hosts"
        raise RequestError(421, "wrong_host", "", f"this server is not {host[:80]!r}", hint)


def no_token() -> RequestError:
    challenge = {"www-authenticate": REALM}
    return RequestError(401, "no_token", "", "this server answers to bearer tokens", _TOKEN_HINT, challenge)


def wrong_token() -> RequestError:
    challenge = {"www-authenticate": f'{REALM}, error="invalid_token"'}
    return RequestError(401, "wrong_token", "", "this server does not know the token", _TOKEN_HINT, challenge)


def no_websocket() -> RequestError:
    return RequestError(400, "no_websocket", "", "this server speaks no WebSocket", "send HTTP requests")


async def refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer an upgrade by 400 if the server can send a response to it, else close it: the server sends 403."""
    if "websocket.http.response" in scope.get("extensions", {}):
        await error_response(no_websocket())(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 1008, "reason": "no WebSocket here; send HTTP requests"})


def error_response(error: RequestError) -> Response:
    return Response(error.body(), status_code=error.status, headers=error.headers, media_type="application/json")


async def _read_body(
    headers: Headers, receive: Receive, limits: ServeConfig, deadline: Deadline, takes_body: bool
) -> bytes:
    """Read the body. Raises RequestError: 413 as soon as it is too large, 408 if it does not arrive in the server's
    time, 504 if it does not arrive in the sender's own."""
    max_bytes = limits.max_body_bytes if takes_body else 0
    message, hint = "this route takes no body", "send bodies only to routes below /v1/"
    if takes_body:
        message, hint = f"the body is larger than {max_bytes} bytes", f"send at most {max_bytes} (serve.max_body_bytes)"
    too_large = RequestError(413, "body_too_large", "", message, hint, {"connection": "close"})
    length = headers.get("content-length", "")
    if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > max_bytes):
        raise too_large

    async def read() -> bytes:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            body += message.get("body", b"")
            if len(body) > max_bytes:
                raise too_large
            if not message.get("more_body", False):
                break
        return bytes(body)

    try:
        return await asyncio.wait_for(read(), deadline.left_s)
    except TimeoutError:
        if deadline.timeout_s < limits.timeout_ms / 1000:
            raise late_error(deadline) from None
        message, hint = "the body did not arrive in time", "send it faster, or send less"
        raise RequestError(408, "body_late", "", message, hint, {"connection": "close"}) from None
