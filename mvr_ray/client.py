"""Calls a search server over HTTP, or a service in this process: `Client` waits, `AsyncClient` is awaited.

    with Client("http://127.0.0.1:8000", token=...) as client:
        answer = client.search(["who built it?"], k=5)

    ClientError                the request has no result; has status, code, field, message, hint
    ├── RefusedError           4xx: the request, the token or the id is wrong; sent once
    ├── UnavailableError       5xx: the server cannot answer now
    └── UnreachableError       no answer came: no connection, or the time was over

`timeout_s` is one deadline over connecting, waiting and every attempt; absent, it is that of the client. What never
arrived (no connection) and what the server could not do at that time (502, 503, 504) is sent again, after the server's
Retry-After or growing pauses; never a 4xx, and a rollback only where the server certainly did not begin it. Imports
without Ray and torch.

To publish, give as much time as reading every file of the version once may take: `client.publish(manifest,
timeout_s=3600)`.
"""

import functools
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

from pydantic import BaseModel

from mvr_ray.config import RunConfig
from mvr_ray.serving import endpoints
from mvr_ray.serving.catalog import VersionCatalog
from mvr_ray.serving.endpoints import EndpointRequest
from mvr_ray.serving.service import SearchService
from mvr_ray.serving.transports import (
    ClientError,
    HttpTransport,
    InProcessTransport,
    LoopThread,
    RefusedError,
    Transport,
    UnavailableError,
    UnreachableError,
    client_errors,
)
from mvr_ray.store.files import Store

__all__ = ["AsyncClient", "Client", "ClientError", "RefusedError", "UnavailableError", "UnreachableError"]

A = TypeVar("A", bound=BaseModel)
P = ParamSpec("P")
TIMEOUT_S = 10.0


class Endpoint(Generic[P, A]):
    """A method of both clients, written once as a function from its arguments to the request."""

    def __init__(self, build: Callable[P, EndpointRequest[A]]) -> None:
        self._build = build

    @overload
    def __get__(self, client: "AsyncClient", owner: type) -> Callable[P, Coroutine[Any, Any, A]]: ...

    @overload
    def __get__(self, client: "Client", owner: type) -> Callable[P, A]: ...

    def __get__(self, client: Any, owner: type) -> Any:
        if client is None:  # help() looks at the class
            return self._build
        method = functools.partial(client._call, self._build)
        return functools.update_wrapper(method, self._build)


class _Endpoints:
    """The requests that a client can make. Each raises ClientError where it has no result."""

    def __init__(self, address: str, *, token: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        """`address` is the server's, such as http://127.0.0.1:8000; `timeout_s` is the time of calls that name none."""
        self._open(HttpTransport(address, token), timeout_s)

    @classmethod
    def over(cls, service: SearchService, *, timeout_s: float = TIMEOUT_S) -> Self:
        """A client of a service in this process: no network, the same answers and errors."""
        client = cls.__new__(cls)
        client._open(InProcessTransport(service, ExitStack()), timeout_s)
        return client

    @classmethod
    def in_process(cls, run: RunConfig, version: int | None = None, *, timeout_s: float = TIMEOUT_S) -> Self:
        """A client of an index opened in this process, without a cluster; closing the client closes it."""
        client = cls.__new__(cls)
        client._open(_open_in_process(run, version), timeout_s)
        return client

    def _open(self, transport: Transport, timeout_s: float) -> None:
        self._transport = transport
        self.timeout_s = timeout_s

    async def _send(self, build: Callable[P, EndpointRequest[A]], *args: P.args, **options: P.kwargs) -> A:
        with client_errors():
            request = build(*args, **options)
        return await self._transport.send(request, self.timeout_s if request.timeout_s is None else request.timeout_s)

    search = Endpoint(endpoints.search_request)
    explain = Endpoint(endpoints.explain_request)
    passage = Endpoint(endpoints.passage_request)
    versions = Endpoint(endpoints.versions_request)
    version = Endpoint(endpoints.version_request)
    publish = Endpoint(endpoints.publish_request)
    rollback = Endpoint(endpoints.rollback_request)
    promote = Endpoint(endpoints.promote_request)
    ready = Endpoint(endpoints.readiness_request)


class AsyncClient(_Endpoints):
    """A client whose methods are awaited."""

    _call = _Endpoints._send

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Client(_Endpoints):
    """A client whose methods wait. Also where an event loop is running already, as in a notebook."""

    def _open(self, transport: Transport, timeout_s: float) -> None:
        super()._open(transport, timeout_s)
        self._loop = LoopThread()

    def _call(self, build: Callable[P, EndpointRequest[A]], *args: P.args, **options: P.kwargs) -> A:
        return self._loop.run(self._send(build, *args, **options))

    def close(self) -> None:
        self._loop.run(self._transport.close())
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open_in_process(run: RunConfig, version: int | None) -> InProcessTransport:
    from mvr_ray.distributed.hot_swap import open_hot_swap_router

    with ExitStack() as stack:
        opened = open_hot_swap_router(run, version, local=True, follow_s=run.serve.follow_s or None)
        router = stack.enter_context(opened)
        catalog = VersionCatalog(Store(run.store.path), run.index.name)
        return InProcessTransport(SearchService(router, run.serve, catalog, router), stack.pop_all())
