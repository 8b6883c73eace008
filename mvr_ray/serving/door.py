"""The bound on waiting requests, put in Ray Serve's proxy, where a refusal costs a replica nothing.

A proxy hands every request to a replica, however many are there: in a flood, requests that the replica's gate would
refuse wait for seconds until it sees them. Ray Serve calls `middlewares` in every proxy whose environment says

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=mvr_ray.serving.door.middlewares

`mvr-ray serve` says so to a cluster of its own; a cluster that runs already is told when its nodes start.
"""

import math
import os
import time
from collections.abc import MutableMapping

from ray.util.metrics import Counter
from starlette.middleware import Middleware

from mvr_ray.config import ServeConfig
from mvr_ray.serving.admission import LONGEST_RETRY_S, MEMORY, overloaded
from mvr_ray.serving.gate import BOUNDED, App, Message, Receive, Send, respond

MAX_WAITING = "MVR_RAY_PROXY_MAX_WAITING"
"""Requests that one proxy lets in at a time; absent: the default of `serve.max_waiting`."""
_CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"


def announce(max_waiting: int, environ: MutableMapping[str, str]) -> None:
    """Have the proxies of a cluster that starts in this environment stand at the door; what is set already stays."""
    environ.setdefault(_CALLBACK, f"{__name__}.{middlewares.__name__}")
    environ.setdefault(MAX_WAITING, str(max_waiting))


def middlewares() -> list[Middleware]:
    """What Ray Serve puts around a proxy."""
    allowed = int(os.environ.get(MAX_WAITING) or ServeConfig().max_waiting)
    return [Middleware(Door, max_waiting=allowed)]


class Door:
    """ASGI middleware: at most `max_waiting` requests inside, the others 503 with Retry-After.

    A request is inside until its answer has gone: what a proxy still does after that keeps nobody out.
    """

    def __init__(self, app: App, max_waiting: int) -> None:
        self.app = app
        self.max_waiting = max_waiting
        self.inside = 0
        self._mean_s = 0.0
        self._refused = Counter("mvr_ray_refused_at_proxy_total", "Requests turned away before they reached a replica.")

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(BOUNDED):
            await self.app(scope, receive, send)
        elif self.inside >= self.max_waiting:
            self._refused.inc()
            await respond(overloaded(self.max_waiting, self._wait_s()), send)
        else:
            await self._passed(scope, receive, send)

    async def _passed(self, scope: Message, receive: Receive, send: Send) -> None:
        began, inside = time.monotonic(), True
        self.inside += 1

        def leave() -> None:
            nonlocal inside
            if inside:
                inside = False
                self.inside -= 1
                self._mean_s = MEMORY * self._mean_s + (1 - MEMORY) * (time.monotonic() - began)

        async def sent(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                leave()

        try:
            await self.app(scope, receive, sent)
        finally:
            leave()

    def _wait_s(self) -> int:
        """Whole seconds in which those who are inside will have gone: each is there for the mean time."""
        return max(1, min(LONGEST_RETRY_S, math.ceil(self._mean_s)))
