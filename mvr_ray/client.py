"""Calls a search server over HTTP, or a service in this process: `Client` blocks, `AsyncClient` is for asyncio.

    with Client("http://127.0.0.1:8000", token=...) as client:
        answer = client.search(["who built it?"], k=5)

    ClientError                the request has no result; has status, code, field, message, hint
    ├── RefusedError           4xx: the request, the token or the id is wrong; sent once
    ├── UnavailableError       5xx: the server cannot answer now
    └── UnreachableError       no answer: no connection, the deadline has passed, or the client is closed

`timeout_s` is one deadline over connecting, waiting and every attempt; absent, it is that of the client. Each attempt
has the time that is left, and sends it to the server (X-Timeout-Ms). A request is sent again without a connection,
after one that broke, and after 502, 503 and 504, at the server's Retry-After or after growing pauses; never after a
4xx, and a rollback only if the server certainly did not begin it. Imports without Ray and torch.

To publish, give as much time as reading every file of the version once may take: `client.publish(manifest,
timeout_s=3600)`.
"""

import asyncio
import dataclasses
import functools
import inspect
import os
import random
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from numbers import Integral, Real
from typing import Any, Generic, ParamSpec, Self, TypeVar, get_args, overload
from urllib.parse import quote, urlsplit

import httpx2
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError

from mvr_ray.config import RunConfig
from mvr_ray.deadline import Deadline
from mvr_ray.errors import ConfigError, MvrRayError
from mvr_ray.explanation import Explanation
from mvr_ray.serving import schemas
from mvr_ray.serving.catalog import PublishRequest, VersionCatalog
from mvr_ray.serving.schemas import EmbeddingsResponse, Readiness, RequestError, SearchResponse
from mvr_ray.serving.service import SearchService
from mvr_ray.store.files import Store
from mvr_ray.store.filters import to_plain_filter
from mvr_ray.store.formats.records import PassageId, is_id
from mvr_ray.store.manifest import Manifest
from mvr_ray.types import FloatArray
from mvr_ray.versions import VersionInfo

A = TypeVar("A", bound=BaseModel)
P = ParamSpec("P")
T = TypeVar("T")
Queries = str | Sequence[str] | Sequence[Sequence[float]] | FloatArray

TIMEOUT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_SPREAD = 0.25
"""Jitter: pauses are up to this share longer, so that refused clients do not retry at the same moment."""
_SERVER_SHARE = 0.95
"""Share of the time left that is sent to the server; the rest is for the way back."""
_LONGEST_S = 1e6
"""Longest time that is sent to the server, whose own is shorter."""
_KEEPALIVE_S = 2.0
"""Shorter than servers keep a connection, so that none is reused while the server closes it."""
_RETRY_STATUSES = (502, 503, 504)
_BROKEN = (httpx2.NetworkError, httpx2.RemoteProtocolError)
"""Errors of a connection that ended before its answer: of a proxy that ended, or that has too many connections."""
_NOT_BEGUN = ("overloaded", "publishing")
"""Codes of errors after which any request may be sent again: the server has not begun it."""
_TIME_HINT = "give a number of seconds above 0"


class ClientError(RequestError, MvrRayError):
    """A request without a result. `status` is 0 if there was no answer."""

    def __str__(self) -> str:
        return f"{self.code}: {super().__str__()}"


class RefusedError(ClientError):
    """The request, the token or the id is wrong."""


class UnavailableError(ClientError):
    """The server cannot answer now."""


class UnreachableError(ClientError):
    """There was no answer."""


@dataclass(frozen=True)
class EndpointRequest(Generic[A]):
    """One request. `work(service, deadline)` does what method, path and body do over HTTP."""

    method: str
    path: str
    response: type[A]
    work: Callable[[SearchService, Deadline], A]
    body: BaseModel | None = None
    statuses: tuple[int, ...] = (200,)
    """Statuses that carry a response of this type."""
    repeatable: bool = True
    """Sending it twice does what sending it once does."""


class Endpoint(Generic[P, A]):
    """A method of both clients, written once: a function from its arguments, without the client, to the request. The
    client itself reads the keyword `timeout_s`, the time for all attempts; absent: the client's."""

    def __init__(self, build: Callable[P, EndpointRequest[A]]) -> None:
        self._build = build
        request = inspect.signature(build)
        [answer] = get_args(request.return_annotation)
        self._signature = request.replace(return_annotation=answer)
        self._async_signature = request.replace(return_annotation=Coroutine[Any, Any, answer])

    @overload
    def __get__(self, client: "AsyncClient", owner: type) -> Callable[P, Coroutine[Any, Any, A]]: ...

    @overload
    def __get__(self, client: "Client", owner: type) -> Callable[P, A]: ...

    def __get__(self, client: Any, owner: type) -> Any:
        if client is None:  # help() looks at the class
            return self._build
        call: Any = functools.update_wrapper(functools.partial(client._call, self._build), self._build)
        call.__signature__ = self._async_signature if isinstance(client, AsyncClient) else self._signature
        return call


class HttpTransport:
    """Sends requests to a server over HTTP."""

    def __init__(self, address: str, token: str | None) -> None:
        """Check the address and the token. Raises ConfigError for an invalid one."""
        if isinstance(address, str) and "@" in address.partition("//")[2].partition("/")[0]:
            message = "the address has a user or a password before its host, which is not shown here; leave both out, "
            raise ConfigError(message + "and give the server's token as token=...")
        if not _is_address(address):
            raise ConfigError(f"{address!r} is no address of a server; give one such as http://127.0.0.1:8000")
        self.address = address.rstrip("/")
        headers = {"accept": "application/json"}
        if token is not None:
            word = token.strip()
            if not (word and word.isascii() and word.isprintable() and " " not in word):
                message = "the token is not one word of printable ASCII characters; give it as the server has it"
                raise ConfigError(message)
            headers["authorization"] = f"Bearer {word}"
        self._headers = headers
        self._clients: dict[asyncio.AbstractEventLoop, httpx2.AsyncClient] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_clients": {}}

    @property
    def _http(self) -> httpx2.AsyncClient:
        """The connections of the running loop: no other loop, nor a process that this one forks, can use them."""
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            limits = httpx2.Limits(keepalive_expiry=_KEEPALIVE_S)
            client = httpx2.AsyncClient(headers=self._headers, timeout=None, limits=limits)
            open_clients = {own: one for own, one in self._clients.items() if not own.is_closed()}
            self._clients = open_clients | {loop: client}
        return client

    async def send(self, request: EndpointRequest[A], deadline: Deadline) -> A:
        """Send a request until there is a response, a permanent error, or no time."""
        tries, path, content, headers = 0, self.address + request.path, None, {}
        if request.body is not None:
            try:
                content, headers = request.body.model_dump_json(exclude_none=True), {"content-type": "application/json"}
            except PydanticSerializationError as error:  # of a value in a filter or a manifest
                hint = "give texts that UTF-8 can encode, numbers, true or false, dates, lists and objects"
                raise RequestError(422, "not_json", "", f"the request is no JSON: {error}", hint) from None
        last: ClientError | None = None
        while (left_s := deadline.left_s) > 0:
            retry_after, tries = "", tries + 1
            headers["x-timeout-ms"] = str(max(1, int(1000 * _SERVER_SHARE * min(left_s, _LONGEST_S))))
            try:
                async with asyncio.timeout(left_s):
                    response = await self._http.request(request.method, path, headers=headers, content=content)
                result = _parse(request, response)
                if not isinstance(result, ClientError):
                    return result
                last, retry_after = result, response.headers.get("retry-after", "")
                again = response.status_code in _RETRY_STATUSES and (request.repeatable or last.code in _NOT_BEGUN)
            except TimeoutError:
                break
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                broke = isinstance(error, _BROKEN) and not isinstance(error, httpx2.ConnectError)
                why, hint = str(error) or type(error).__name__, "see whether the server runs at this address"
                message = f"{self.address} was not reached ({why})"
                if broke:
                    message = f"the connection to {self.address} broke before the answer ({why})"
                if broke and not request.repeatable:
                    hint = "it may have been done: see versions() before you ask again"
                last = UnreachableError(0, "unreachable", "", message, hint)
                again = isinstance(error, httpx2.ConnectError) or (request.repeatable and broke)
            pause_s = next_pause_s(tries, retry_after, random.random())
            if not again or pause_s >= deadline.left_s:
                raise last
            await asyncio.sleep(pause_s)
        before, noun = f"; before that: {last.message}" if last else "", "try" if tries == 1 else "tries"
        message = f"{self.address} gave no answer within {deadline.timeout_s:g} s in {tries} {noun}{before}"
        raise UnreachableError(0, "timeout", "", message, "allow more time (timeout_s), or see GET /readyz")

    async def close(self) -> None:
        await self._http.aclose()


@dataclass
class InProcessTransport:
    """Executes requests by a service in this process; `resources` are closed with it."""

    service: SearchService
    resources: ExitStack

    async def send(self, request: EndpointRequest[A], deadline: Deadline) -> A:
        """Execute a request once. A search ends by its deadline; other work runs on in its thread, without a result."""
        try:
            async with asyncio.timeout(deadline.left_s):
                return await asyncio.to_thread(request.work, self.service, deadline)
        except TimeoutError:
            message = f"no answer within {deadline.timeout_s:g} s"
            raise UnreachableError(0, "timeout", "", message, "allow more time (timeout_s)") from None

    async def close(self) -> None:
        await asyncio.to_thread(self.resources.close)


Transport = HttpTransport | InProcessTransport


class _Endpoints:
    """The requests that a client can make. Each raises ClientError if it has no result."""

    def __init__(self, address: str, *, token: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        """`address` is the server's, such as http://127.0.0.1:8000; `timeout_s` is the time of calls that name none.

        Raises ConfigError for an invalid address, token or time."""
        _check_time(timeout_s)
        self._open(HttpTransport(address, token), timeout_s)

    @classmethod
    def over(cls, service: SearchService, *, timeout_s: float = TIMEOUT_S) -> Self:
        """Make a client of a service in this process: no network, the same answers and errors. Raises ConfigError for
        an invalid time."""
        _check_time(timeout_s)
        client = cls.__new__(cls)
        client._open(InProcessTransport(service, ExitStack()), timeout_s)
        return client

    @classmethod
    def in_process(cls, run: RunConfig, version: int | None = None, *, timeout_s: float = TIMEOUT_S) -> Self:
        """Make a client of an index opened in this process, without a cluster; closing the client closes it. Raises
        ConfigError for an invalid run or time, and what opening an index raises."""
        if not isinstance(run, RunConfig):
            raise ConfigError(f"in_process: {run!r:.60} is no run; give index.run of an Index, or load_run(FILE)")
        _check_time(timeout_s)
        from mvr_ray.distributed.hot_swap import open_hot_swap_router

        client = cls.__new__(cls)
        with ExitStack() as stack:
            options = {"follow_s": run.serve.follow_s or None, "needs_words": run.search.hybrid is not None}
            router = stack.enter_context(open_hot_swap_router(run, version, local=True, **options))
            catalog = VersionCatalog(Store(run.store.path), run.index.name)
            service = SearchService(router, run.serve, catalog, hybrid=run.search.hybrid)
            client._open(InProcessTransport(service, stack.pop_all()), timeout_s)
        return client

    def _open(self, transport: Transport, timeout_s: float, is_closed: bool = False) -> None:
        self._transport = transport
        self._is_closed = is_closed
        self.timeout_s = timeout_s

    def __getstate__(self) -> tuple[Transport, float, bool]:
        """Go to another process without connections. Raises TypeError for a client of an index in this process."""
        if not isinstance(self._transport, HttpTransport):
            raise TypeError("a client of an index in this process cannot be pickled; make one in the other process")
        return self._transport, self.timeout_s, self._is_closed

    def __setstate__(self, state: tuple[Transport, float, bool]) -> None:
        self._open(*state)

    def _require_open(self) -> None:
        if self._is_closed:
            raise UnreachableError(0, "closed", "", "the client is closed", "make another one")

    async def _send(self, build: Callable[P, EndpointRequest[A]], *args: P.args, **options: P.kwargs) -> A:
        self._require_open()
        own_s: Any = options.get("timeout_s")
        timeout_s = self.timeout_s if own_s is None else own_s
        if not _is_time(timeout_s):
            raise RefusedError(422, "wrong_value", "timeout_s", f"the time is {timeout_s!r:.80}", _TIME_HINT)
        deadline = Deadline.after(timeout_s)
        try:
            return await self._transport.send(build(*args, **options), deadline)
        except ClientError:
            raise
        except RequestError as error:  # of the arguments, or of a service in this process
            refusal = error
        except MvrRayError as error:
            refusal = schemas.to_request_error(error)
        except RuntimeError:  # of a transport that was closed between two tries
            self._require_open()
            raise
        raise _typed_error(refusal.status, refusal)

    @Endpoint
    @staticmethod
    def search(
        queries: Queries,
        k: int = 10,
        *,
        text: bool = True,
        min_coverage: float = 1.0,
        version: int | None = None,
        encoder_fingerprint: str | None = None,
        hybrid: schemas.Hybrid = None,
        timeout_s: float | None = None,
        filter: Mapping[str, Any] | None = None,
        fields: str | Sequence[str] = (),
    ) -> EndpointRequest[SearchResponse]:
        """Return the best `k` passages of each query: one text, texts, or vectors_QD of the index's encoder; of those
        passages that pass a filter, such as `{"year": {"gte": 1958}}`. `fields` come with the hits. `hybrid` w scores
        by BM25 + w x dense, "rrf" by the ranks in both, "off" by the dense score alone; absent: as the server's run
        file says."""
        body = schemas.validate(
            schemas.SearchRequest,
            queries=_texts("queries", queries.tolist() if hasattr(queries, "tolist") else queries),
            k=k,
            text=text,
            min_coverage=min_coverage,
            version=version,
            encoder_fingerprint=encoder_fingerprint,
            filter=to_plain_filter(filter),
            fields=_texts("fields", fields),
            hybrid=hybrid,
        )
        return EndpointRequest("POST", "/v1/search", SearchResponse, lambda s, due: s.search(body, due), body)

    @Endpoint
    @staticmethod
    def explain(
        questions: str | Sequence[str],
        passages: PassageId | Iterable[PassageId] = (),
        k: int = 3,
        *,
        version: int | None = None,
        encoder_fingerprint: str | None = None,
        hybrid: schemas.Hybrid = None,
        timeout_s: float | None = None,
    ) -> EndpointRequest[Explanation]:
        """Score every view of the named passages, or of each question's best `k`, with every question; `hybrid` as in
        `search`: with the words of each passage, too."""
        body = schemas.validate(
            schemas.ExplainRequest,
            questions=_texts("questions", questions),
            passages=_ids(passages),
            k=k,
            version=version,
            encoder_fingerprint=encoder_fingerprint,
            hybrid=hybrid,
        )
        return EndpointRequest("POST", "/v1/explain", Explanation, lambda s, due: s.explain(body, due), body)

    @Endpoint
    @staticmethod
    def embed(
        texts: str | Sequence[str], *, model: str | None = None, timeout_s: float | None = None
    ) -> EndpointRequest[EmbeddingsResponse]:
        """Embed one text or several by the index's encoder, as a search embeds its queries. `model` is the name or
        fingerprint that it must have; absent: any."""
        body = schemas.validate(schemas.EmbeddingsRequest, model=model, input=_texts("input", texts))
        return EndpointRequest("POST", "/v1/embeddings", EmbeddingsResponse, lambda s, due: s.embed(body, due), body)

    @Endpoint
    @staticmethod
    def examples(*, timeout_s: float | None = None) -> EndpointRequest[schemas.ExampleQueries]:
        """Return a few texts to search for: questions that came with the corpus, else titles."""
        return EndpointRequest("GET", "/v1/examples", schemas.ExampleQueries, lambda s, _: s.examples())

    @Endpoint
    @staticmethod
    def passage(
        passage_id: PassageId, *, version: int | None = None, timeout_s: float | None = None
    ) -> EndpointRequest[schemas.PassageResponse]:
        """Return one passage as it was indexed, in the version that answers or another one."""
        if not is_id(passage_id):
            message = f"the id is {passage_id!r:.80}, no text and no whole number"
            raise RequestError(422, "wrong_type", "id", message, "give an id as a search shows it")
        # Dots too: as a part of a path, `.` and `..` would mean folders.
        name = str(passage_id)
        path = "/v1/passages/" + quote(name, safe="", errors="surrogatepass").replace(".", "%2E")
        path += "" if version is None else f"?version={_version_number(version, 'version')}"
        return EndpointRequest("GET", path, schemas.PassageResponse, lambda s, due: s.passage(name, version, due))

    @Endpoint
    @staticmethod
    def versions(*, timeout_s: float | None = None) -> EndpointRequest[schemas.VersionList]:
        """Return the published versions (`versions` of the result), the live one, and the one that answers."""
        return EndpointRequest("GET", "/v1/versions", schemas.VersionList, lambda s, _: s.versions())

    @Endpoint
    @staticmethod
    def version(version: int, *, timeout_s: float | None = None) -> EndpointRequest[schemas.VersionDetail]:
        """Return one version, and how it was made."""
        return EndpointRequest("GET", _version_path(version), schemas.VersionDetail, lambda s, _: s.version(version))

    @Endpoint
    @staticmethod
    def publish(
        manifest: Manifest | Mapping[str, Any], *, parent: int | None = None, timeout_s: float | None = None
    ) -> EndpointRequest[VersionInfo]:
        """Publish a manifest (or its JSON) whose files are all in the server's store. Needs an admin token.

        `parent` must be the newest version there (0: there is none); absent: the manifest's own parent. Sent twice, it
        is published once, so it may be sent again while the server reads files.
        """
        fields = dataclasses.asdict(manifest) if isinstance(manifest, Manifest) else manifest
        body = schemas.validate(PublishRequest, manifest=fields, parent=parent)
        return EndpointRequest("POST", "/v1/versions", VersionInfo, lambda s, due: s.publish(body, due), body)

    @Endpoint
    @staticmethod
    def rollback(version: int, *, timeout_s: float | None = None) -> EndpointRequest[VersionInfo]:
        """Publish the content of a version, after checking its files, as a new one. Needs an admin token."""
        path = f"{_version_path(version)}/rollback"
        return EndpointRequest("POST", path, VersionInfo, lambda s, due: s.rollback(version, due), repeatable=False)

    @Endpoint
    @staticmethod
    def promote(version: int, *, timeout_s: float | None = None) -> EndpointRequest[Readiness]:
        """Answer from this version, the newest one, as soon as it is open. Needs an admin token."""
        path = f"{_version_path(version)}/promote"
        return EndpointRequest("POST", path, Readiness, lambda s, due: s.promote(version, due))

    @Endpoint
    @staticmethod
    def ready(*, timeout_s: float | None = None) -> EndpointRequest[Readiness]:
        """Return whether a real search has just covered every passage; `ready` false is an answer, not an error."""
        return EndpointRequest("GET", "/readyz", Readiness, lambda s, due: s.readiness(due), statuses=(200, 503))


class AsyncClient(_Endpoints):
    """A client for asyncio: its methods are coroutines."""

    def _open(self, transport: Transport, timeout_s: float, is_closed: bool = False) -> None:
        super()._open(transport, timeout_s, is_closed)
        self._calls: set[asyncio.Task[Any]] = set()

    async def _call(self, build: Callable[P, EndpointRequest[A]], *args: P.args, **options: P.kwargs) -> A:
        call = asyncio.create_task(self._send(build, *args, **options))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        try:
            return await call
        except asyncio.CancelledError:  # by `close`, or of the caller
            self._require_open()
            raise

    async def close(self) -> None:
        """Close connections, or the index in this process. Running calls, and later ones, raise UnreachableError, a
        second `close` does nothing."""
        if not self._is_closed:
            self._is_closed = True
            for call in self._calls:
                call.cancel()
            await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Client(_Endpoints):
    """A blocking client. It works beside a running event loop, as in a notebook: it has a loop of its own, on a
    thread, which ends with `close`, or when the client is dropped."""

    def _open(self, transport: Transport, timeout_s: float, is_closed: bool = False) -> None:
        super()._open(transport, timeout_s, is_closed)
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()  # else a call could begin after `close` has ended the others
        self._pid = os.getpid()
        if self._is_closed:
            return
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_run, args=(self._loop,), name="mvr_ray client", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end_dropped, self._loop, self._transport, self._pid)
        self._end.atexit = False  # type: ignore[missing-attribute]  # a slot that type stubs lack

    def _restart_after_fork(self) -> None:
        """Start a loop in a process that was forked, which has no threads of its parent."""
        if self._pid != os.getpid():
            self._start()

    def _call(self, build: Callable[P, EndpointRequest[A]], *args: P.args, **options: P.kwargs) -> A:
        self._restart_after_fork()
        with self._lock:
            self._require_open()
            future = asyncio.run_coroutine_threadsafe(self._send(build, *args, **options), self._loop)
        try:
            return future.result()
        except CancelledError:  # by `close` in another thread
            self._require_open()
            raise
        except BaseException:  # the call must not continue after Ctrl-C
            future.cancel()
            raise

    async def _close(self) -> None:
        """Cancel the calls of other threads, then close the transport."""
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._transport.close()

    def close(self) -> None:
        """Close connections, or the index in this process. Calls of other threads, and later ones, raise
        UnreachableError, a second `close` does nothing."""
        self._restart_after_fork()
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        finally:
            self._end.detach()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop until it is stopped, then close it."""
    try:
        loop.run_forever()
    finally:
        loop.close()


def _end_dropped(loop: asyncio.AbstractEventLoop, transport: Transport, pid: int) -> None:
    """End the connections and the loop of a client that was dropped without `close`. Waits for nothing, since objects
    are collected in any thread, the loop's own too; a process that was forked has no such loop."""

    async def end() -> None:
        try:
            await transport.close()
        finally:
            loop.stop()

    if pid == os.getpid():
        asyncio.run_coroutine_threadsafe(end(), loop)


def _is_address(address: object) -> bool:
    """Return whether it is the URL of a server, with a host and, if any, a port that exists."""
    if not isinstance(address, str) or not address.lower().startswith(("http://", "https://")):
        return False
    if {"?", "#", " "} & set(address) or not address.isprintable():  # paths of requests would not follow its own path
        return False
    try:
        parts = urlsplit(address)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port above 65535, or half an IPv6 address
        return False


def _is_time(timeout_s: object) -> bool:
    return isinstance(timeout_s, Real) and not isinstance(timeout_s, bool) and float(timeout_s) > 0


def _check_time(timeout_s: object) -> None:
    if not _is_time(timeout_s):
        raise ConfigError(f"timeout_s is {timeout_s!r:.80}; {_TIME_HINT}")


def _version_path(number: object) -> str:
    return f"/v1/versions/{_version_number(number, 'n')}"


def _version_number(number: object, field: str) -> str:
    """Return the number of a version as a part of an address. Raises RequestError for what is no whole number."""
    if isinstance(number, bool) or not isinstance(number, Integral):
        message = f"a version is a whole number, not {number!r:.80}"
        raise RequestError(422, "wrong_type", field, message, "give a number that `versions` lists")
    return str(number)


def _texts(field: str, values: Any) -> Any:
    """Return a list of several values, or of the one text given; anything else as it is, for the validation. Raises
    RequestError for a mapping and a frame, which iterate over their names."""
    if isinstance(values, Mapping) or hasattr(values, "columns"):
        message, hint = (
            f"{field} is of type {type(values).__name__}",
            "give a text, or a list, such as one column of it",
        )
        raise RequestError(422, "wrong_type", field, message, hint)
    return [values] if isinstance(values, str) else list(values) if isinstance(values, Iterable) else values


def _ids(values: Any) -> Any:
    """Return one passage id, or several, as texts; a whole number is the id of its digits, as in `Index.build`."""
    ids = _texts("passages", [values] if is_id(values) else values)
    return [str(one) if is_id(one) else one for one in ids] if isinstance(ids, list) else ids


def next_pause_s(tries: int, retry_after: str, spread: float) -> float:
    """Return the seconds to wait after `tries` tries, at least a server's Retry-After; `spread` in 0..1 is random."""
    wait_s = _retry_after_s(retry_after)
    if wait_s is None:
        wait_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(tries - 1, 10))
    return wait_s * (1 + _SPREAD * spread)


def _retry_after_s(retry_after: str) -> float | None:
    """Parse seconds or an HTTP date; None for anything else."""
    value = retry_after.strip()
    if value.isascii() and value.isdigit() and len(value) < 10:
        return float(value)
    try:
        at = parsedate_to_datetime(value)
    except (ValueError, OverflowError):
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max(0.0, (at - datetime.now(UTC)).total_seconds())


def _parse(request: EndpointRequest[A], response: httpx2.Response) -> A | ClientError:
    """Parse a response, or the error in it. Raises UnavailableError for a response that is none of mvr_ray."""
    status = response.status_code
    if status in request.statuses:
        try:
            return request.response.model_validate_json(response.content)
        except ValidationError as error:
            if status == 200:
                first = error.errors(include_url=False, include_input=False)[0]["msg"]
                message = f"the answer is not a {request.response.__name__} ({first})"
                raise UnavailableError(status, "bad_answer", "", message, "is this a server of mvr_ray?") from None
    try:
        return _typed_error(status, schemas.ErrorResponse.model_validate_json(response.content).error)
    except ValidationError:
        message, hint = f"status {status} without an error of mvr_ray", "is there a proxy in between?"
        return _typed_error(status, schemas.ErrorDetail(code=f"http_{status}", field="", message=message, hint=hint))


def _typed_error(status: int, error: schemas.ErrorDetail | RequestError) -> ClientError:
    kind = RefusedError if 400 <= status < 500 else UnavailableError
    return kind(status, error.code, error.field, error.message, error.hint)
