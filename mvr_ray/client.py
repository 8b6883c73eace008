"""A client of a search server, sync and async, with the same interface over a service in this process.

    with Client("http://127.0.0.1:8000", token=...) as client:
        answer = client.search(["who built it?"], k=5)

    ClientError                what was asked did not come; has status, code, field, message, hint
    ├── RefusedError           4xx: the request, the token or the id is wrong; asked once
    ├── UnavailableError       5xx: the server cannot answer now
    └── UnreachableError       no answer came: no connection, or the time was over

`timeout_s` is one deadline over connecting, waiting and every retry. What never arrived (no connection) and what the
server could not do then (502, 503, 504) is asked again, after the server's Retry-After or growing pauses; never a 4xx,
and a rollback only where the server certainly did not begin it. Imports without Ray and torch.

To publish, give as much time as reading every file of the version once may take: `client.publish(manifest,
timeout_s=3600)`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Self, TypeVar

from pydantic import BaseModel

from mvr_ray.config import RunConfig
from mvr_ray.explanation import Explanation
from mvr_ray.serving import calls
from mvr_ray.serving.calls import Call, Queries
from mvr_ray.serving.catalog import StoreCatalog
from mvr_ray.serving.links import (
    ClientError,
    HttpLink,
    InnerLink,
    Link,
    Loop,
    RefusedError,
    UnavailableError,
    UnreachableError,
    raise_refused,
)
from mvr_ray.serving.service import SearchService
from mvr_ray.serving.wire import (
    PassageResponse,
    Readiness,
    RequestError,
    SearchResponse,
    VersionDetail,
    VersionInfo,
    VersionList,
)
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest

__all__ = ["AsyncClient", "Client", "ClientError", "RefusedError", "UnavailableError", "UnreachableError"]

A = TypeVar("A", bound=BaseModel)
TIMEOUT_S = 10.0


class AsyncClient:
    """Asks a server, or a service in this process. Everything raises ClientError for what did not come."""

    def __init__(self, address: str, *, token: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        """`address` is the server's, such as http://127.0.0.1:8000; `timeout_s` is for calls that say nothing else."""
        self._link: Link = HttpLink(address, token)
        self.timeout_s = timeout_s

    @classmethod
    def over(cls, service: SearchService, *, timeout_s: float = TIMEOUT_S) -> Self:
        """A client of a service in this process: no network, the same answers and errors."""
        return cls._linked(InnerLink(service, ExitStack()), timeout_s)

    @classmethod
    def in_process(cls, run: RunConfig, version: int | None = None, *, timeout_s: float = TIMEOUT_S) -> Self:
        """A client of an index opened in this process, without a cluster; closing the client closes it."""
        return cls._linked(_opened(run, version), timeout_s)

    @classmethod
    def _linked(cls, link: Link, timeout_s: float) -> Self:
        made = cls.__new__(cls)
        made._link, made.timeout_s = link, timeout_s
        return made

    async def search(
        self,
        queries: Queries,
        k: int = 10,
        *,
        text: bool = True,
        min_coverage: float = 1.0,
        version: int | None = None,
        encoder_fingerprint: str | None = None,
        timeout_s: float | None = None,
    ) -> SearchResponse:
        """The best `k` passages of each query: texts, or vectors_QD of the index's encoder."""
        which = {"version": version, "encoder_fingerprint": encoder_fingerprint}
        told = {"text": text, "min_coverage": min_coverage, **which}
        return await self._ask(lambda: calls.searching(queries, k, **told), timeout_s)

    async def explain(
        self,
        questions: Sequence[str],
        passages: Sequence[str] = (),
        k: int = 3,
        *,
        version: int | None = None,
        encoder_fingerprint: str | None = None,
        timeout_s: float | None = None,
    ) -> Explanation:
        """Every view of the named passages, or of each question's best `k`, with every question."""
        which = {"version": version, "encoder_fingerprint": encoder_fingerprint}
        return await self._ask(lambda: calls.explaining(questions, passages, k, **which), timeout_s)

    async def passage(self, passage_id: str, *, timeout_s: float | None = None) -> PassageResponse:
        """One passage as it was indexed."""
        return await self._ask(lambda: calls.reading(passage_id), timeout_s)

    async def versions(self, *, timeout_s: float | None = None) -> VersionList:
        """What is published, what is live, and what is served."""
        return await self._ask(lambda: calls.listing(), timeout_s)

    async def version(self, number: int, *, timeout_s: float | None = None) -> VersionDetail:
        """One version, and how it was made."""
        return await self._ask(lambda: calls.describing(number), timeout_s)

    async def publish(
        self,
        manifest: Manifest | Mapping[str, Any],
        *,
        parent: int | None = None,
        timeout_s: float | None = None,
    ) -> VersionInfo:
        """Publish a manifest (or its JSON) whose files are all in the server's store. Needs an admin token.

        `parent` must be the newest version there (0: there is none); absent: the manifest's own parent.
        """
        return await self._ask(lambda: calls.publishing(manifest, parent), timeout_s)

    async def rollback(self, number: int, *, timeout_s: float | None = None) -> VersionInfo:
        """Publish the content of a version as a new one. Needs an admin token."""
        return await self._ask(lambda: calls.rolling_back(number), timeout_s)

    async def promote(self, number: int, *, timeout_s: float | None = None) -> Readiness:
        """Answer from this version, the newest one, as soon as it is open. Needs an admin token."""
        return await self._ask(lambda: calls.promoting(number), timeout_s)

    async def ready(self, *, timeout_s: float | None = None) -> Readiness:
        """Whether a real search has just covered every passage; `ready` false is an answer, not an error."""
        return await self._ask(lambda: calls.probing(), timeout_s)

    async def close(self) -> None:
        await self._link.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _ask(self, make: Callable[[], Call[A]], timeout_s: float | None) -> A:
        try:
            call = make()
        except RequestError as error:
            raise_refused(error)
        return await self._link.ask(call, self.timeout_s if timeout_s is None else timeout_s)


class Client:
    """`AsyncClient` for code that waits. Also where an event loop is running already, as in a notebook."""

    def __init__(self, address: str, *, token: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        self._client = AsyncClient(address, token=token, timeout_s=timeout_s)
        self._loop = Loop()

    @classmethod
    def over(cls, service: SearchService, *, timeout_s: float = TIMEOUT_S) -> Self:
        """A client of a service in this process: no network, the same answers and errors."""
        return cls._around(AsyncClient.over(service, timeout_s=timeout_s))

    @classmethod
    def in_process(cls, run: RunConfig, version: int | None = None, *, timeout_s: float = TIMEOUT_S) -> Self:
        """A client of an index opened in this process, without a cluster; closing the client closes it."""
        return cls._around(AsyncClient.in_process(run, version, timeout_s=timeout_s))

    @classmethod
    def _around(cls, client: AsyncClient) -> Self:
        made = cls.__new__(cls)
        made._loop, made._client = Loop(), client
        return made

    def search(
        self,
        queries: Queries,
        k: int = 10,
        *,
        text: bool = True,
        min_coverage: float = 1.0,
        version: int | None = None,
        encoder_fingerprint: str | None = None,
        timeout_s: float | None = None,
    ) -> SearchResponse:
        """The best `k` passages of each query: texts, or vectors_QD of the index's encoder."""
        which = {"version": version, "encoder_fingerprint": encoder_fingerprint}
        told = {"text": text, "min_coverage": min_coverage, **which}
        return self._loop.run(self._client.search(queries, k, **told, timeout_s=timeout_s))

    def explain(
        self,
        questions: Sequence[str],
        passages: Sequence[str] = (),
        k: int = 3,
        *,
        version: int | None = None,
        encoder_fingerprint: str | None = None,
        timeout_s: float | None = None,
    ) -> Explanation:
        """Every view of the named passages, or of each question's best `k`, with every question."""
        which = {"version": version, "encoder_fingerprint": encoder_fingerprint}
        return self._loop.run(self._client.explain(questions, passages, k, **which, timeout_s=timeout_s))

    def passage(self, passage_id: str, *, timeout_s: float | None = None) -> PassageResponse:
        """One passage as it was indexed."""
        return self._loop.run(self._client.passage(passage_id, timeout_s=timeout_s))

    def versions(self, *, timeout_s: float | None = None) -> VersionList:
        """What is published, what is live, and what is served."""
        return self._loop.run(self._client.versions(timeout_s=timeout_s))

    def version(self, number: int, *, timeout_s: float | None = None) -> VersionDetail:
        """One version, and how it was made."""
        return self._loop.run(self._client.version(number, timeout_s=timeout_s))

    def publish(
        self,
        manifest: Manifest | Mapping[str, Any],
        *,
        parent: int | None = None,
        timeout_s: float | None = None,
    ) -> VersionInfo:
        """Publish a manifest (or its JSON) whose files are all in the server's store. Needs an admin token.

        `parent` must be the newest version there (0: there is none); absent: the manifest's own parent.
        """
        return self._loop.run(self._client.publish(manifest, parent=parent, timeout_s=timeout_s))

    def rollback(self, number: int, *, timeout_s: float | None = None) -> VersionInfo:
        """Publish the content of a version as a new one. Needs an admin token."""
        return self._loop.run(self._client.rollback(number, timeout_s=timeout_s))

    def promote(self, number: int, *, timeout_s: float | None = None) -> Readiness:
        """Answer from this version, the newest one, as soon as it is open. Needs an admin token."""
        return self._loop.run(self._client.promote(number, timeout_s=timeout_s))

    def ready(self, *, timeout_s: float | None = None) -> Readiness:
        """Whether a real search has just covered every passage; `ready` false is an answer, not an error."""
        return self._loop.run(self._client.ready(timeout_s=timeout_s))

    def close(self) -> None:
        self._loop.run(self._client.close())
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _opened(run: RunConfig, version: int | None) -> InnerLink:
    from mvr_ray.distributed.live import open_live

    with ExitStack() as stack:
        router = stack.enter_context(open_live(run, version, local=True, follow_s=run.serve.follow_s or None))
        catalog = StoreCatalog(Store(run.store.path), run.index.name)
        return InnerLink(SearchService(router, run.serve, catalog, router), stack.pop_all())
