"""Bounds waiting requests and response times in Ray Serve's proxy, where no replica is needed to answer.

A proxy hands every request to a replica, however many are there: in a flood, requests that a replica would refuse wait
for seconds until it sees them. And a replica that hangs or was killed answers nothing. So the proxy refuses what is too
much, and answers what no replica has answered by the deadline. Ray Serve calls `middlewares` in every proxy whose
environment says

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=mvr_ray.serving.proxy_limit.middlewares

`mvr-ray serve` sets this for a cluster of its own; for a cluster that runs already it is set where its nodes start.
"""

import asyncio
import os
from collections.abc import MutableMapping

from ray.util.metrics import Counter
from starlette.middleware import Middleware

from mvr_ray.config import ServeConfig
from mvr_ray.serving.admission import Admission, Slot, late
from mvr_ray.serving.middleware import BOUNDED, App, Message, Receive, Send, request_id, requested_s, respond
from mvr_ray.serving.schemas import RequestError

MAX_WAITING = "MVR_RAY_PROXY_MAX_WAITING"
"""Requests that one proxy lets in at a time; absent: the default of `serve.max_waiting`."""
TIMEOUT_MS = "MVR_RAY_PROXY_TIMEOUT_MS"
"""Milliseconds until a proxy answers in place of a replica; absent: the default of `serve.timeout_ms`."""
GRACE_S = 0.25
"""Time beyond the deadline for a replica's own answer to a late request."""
_CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"


def configure_proxies(limits: ServeConfig, environ: MutableMapping[str, str]) -> None:
    """Install the limiter in the proxies of a cluster that starts in this environment; variables that are set stay."""
    environ.setdefault(_CALLBACK, f"{__name__}.{middlewares.__name__}")
    environ.setdefault(MAX_WAITING, str(limits.max_waiting))
    environ.setdefault(TIMEOUT_MS, str(limits.timeout_ms))


def middlewares() -> list[Middleware]:
    """What Ray Serve puts around a proxy."""
    max_waiting = int(os.environ.get(MAX_WAITING) or ServeConfig().max_waiting)
    timeout_ms = int(os.environ.get(TIMEOUT_MS) or ServeConfig().timeout_ms)
    return [Middleware(ProxyLimiter, max_waiting=max_waiting, timeout_s=timeout_ms / 1000)]


class ProxyLimiter:
    """ASGI middleware: 503 with Retry-After beyond `max_waiting` requests, 504 after the time of one.

    A request is inside until its answer has gone: what a proxy still does after that keeps nobody out.
    """

    def __init__(self, app: App, max_waiting: int, timeout_s: float) -> None:
        self.app = app
        self.admission = Admission(max_waiting, timeout_s)
        self._refused = Counter("mvr_ray_refused_at_proxy_total", "Requests turned away before they reached a replica.")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = request_id(scope).encode()
        others = [header for header in scope["headers"] if header[0].lower() != b"x-request-id"]
        scope = {**scope, "headers": [*others, (b"x-request-id", request)]}
        timeout_s = self.admission.shorter(requested_s(scope))
        slot: Slot | None = None
        started = False

        async def forward(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)
            if slot and message["type"] == "http.response.body" and not message.get("more_body", False):
                slot.leave()

        async def answer(error: RequestError) -> None:
            error.headers["x-request-id"] = request.decode()
            await respond(error, send)

        if scope["path"].startswith(BOUNDED):
            try:
                slot = self.admission.enter()
            except RequestError as error:
                self._refused.inc()
                await answer(error)
                return
        deadline = asyncio.timeout(timeout_s + GRACE_S)
        try:
            async with deadline:
                await self.app(scope, receive, forward)
        except TimeoutError:
            if not deadline.expired():
                raise
        finally:
            if slot:
                slot.leave()
        if not started:
            await answer(late(timeout_s) if deadline.expired() else replica_ended())


def replica_ended() -> RequestError:
    """The error for a request whose replica ended, or could not be reached."""
    message, hint = "the replica ended before it had answered", "try again; see GET /readyz"
    return RequestError(503, "unavailable", "", message, hint, {"retry-after": "1"})
