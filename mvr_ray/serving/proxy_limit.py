"""Bounds waiting requests and response times in Ray Serve's proxy, where no replica is needed to answer.

A proxy forwards every request to a replica: under overload, requests that a replica would refuse wait for seconds
before they reach it. A replica that hangs or was killed answers nothing. The limiter therefore refuses requests above
the limit, and answers those that no replica has answered by the deadline. Ray Serve calls `middlewares` in every proxy
whose environment has

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=mvr_ray.serving.proxy_limit.middlewares

`mvr-ray serve` sets this for a cluster of its own; for a running cluster it is set where its nodes start.
"""

import asyncio
import os

from ray.util.metrics import Counter
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mvr_ray.config import ServeConfig
from mvr_ray.serving.admission import Admission, Slot, late_error
from mvr_ray.serving.middleware import (
    SLOT_PATHS,
    ResponseSender,
    error_response,
    refuse_websocket,
    request_deadline,
    request_id,
)
from mvr_ray.serving.schemas import RequestError

MAX_WAITING = "MVR_RAY_PROXY_MAX_WAITING"
"""Requests in one proxy at a time; absent: the default of `serve.max_waiting`."""
TIMEOUT_MS = "MVR_RAY_PROXY_TIMEOUT_MS"
"""Milliseconds until a proxy answers in place of a replica; absent: the default of `serve.timeout_ms`."""
GRACE_S = 0.25
"""Time beyond the deadline for a replica's own answer to a late request."""
_CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"


def proxy_variables(limits: ServeConfig) -> dict[str, str]:
    """Return the environment variables that install the limiter in the proxies of a cluster that starts with them."""
    callback = f"{__name__}.{middlewares.__name__}"
    return {_CALLBACK: callback, MAX_WAITING: str(limits.max_waiting), TIMEOUT_MS: str(limits.timeout_ms)}


def middlewares() -> list[Middleware]:
    """Return the middlewares that Ray Serve installs in a proxy."""
    max_waiting = int(os.environ.get(MAX_WAITING) or ServeConfig().max_waiting)
    timeout_ms = int(os.environ.get(TIMEOUT_MS) or ServeConfig().timeout_ms)
    return [Middleware(ProxyLimiter, max_waiting=max_waiting, timeout_s=timeout_ms / 1000)]


class ProxyLimiter:
    """ASGI middleware: 503 with Retry-After beyond `max_waiting` requests, 504 after the time of one.

    A request holds a slot until its response is sent; later work of the proxy takes none.
    """

    def __init__(self, app: ASGIApp, max_waiting: int, timeout_s: float) -> None:
        self.app = app
        self.admission = Admission(max_waiting)
        self.timeout_s = timeout_s
        self._refusals = Counter("mvr_ray_refused_at_proxy_total", "Requests refused before they reached a replica.")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await refuse_websocket(scope, receive, send)
            return
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, scope = Headers(scope=scope), dict(scope)
        deadline, response = request_deadline(headers, self.timeout_s), ResponseSender(send, request_id(headers))
        MutableHeaders(scope=scope)["x-request-id"] = response.request_id
        slot: Slot | None = None

        async def forward(message: Message) -> None:
            await response(message)
            if slot and message["type"] == "http.response.body" and not message.get("more_body", False):
                slot.release()

        if scope["path"].startswith(SLOT_PATHS):
            try:
                slot = self.admission.acquire()
            except RequestError as error:
                self._refusals.inc()
                await error_response(error)(scope, receive, response)
                return
        timeout = asyncio.timeout(deadline.left_s + GRACE_S)
        try:
            async with timeout:
                await self.app(scope, receive, forward)
        except TimeoutError:
            if not timeout.expired():
                raise
        finally:
            if slot:
                slot.release()
        if not response.status:
            message, hint = "the replica ended before it had answered", "try again; see GET /readyz"
            ended_error = RequestError(503, "unavailable", "", message, hint, retry_after_s=1)
            error = late_error(deadline) if timeout.expired() else ended_error
            await error_response(error)(scope, receive, response)
