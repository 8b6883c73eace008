"""Carries client requests to a service: over HTTP with one deadline over all attempts, or within the process.

left = deadline - now          every try may take what is left, and the server is told so (X-Timeout-Ms)
pause = Retry-After, or 0.05 s doubled with every try; no pause that would outlast the deadline
"""

import asyncio
import random
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, Protocol, TypeVar

import httpx2
from pydantic import BaseModel, ValidationError

from mvr_ray.errors import MvrRayError
from mvr_ray.serving.endpoints import EndpointRequest
from mvr_ray.serving.schemas import ErrorResponse, RequestError, to_request_error
from mvr_ray.serving.service import SearchService

A = TypeVar("A", bound=BaseModel)
T = TypeVar("T")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_SPREAD = 0.25
"""Pauses are up to this share longer, by chance: clients that were sent away together come back apart."""
_SERVER_SHARE = 0.95
"""Of the time left, what the server is told that it has; the rest is for the way back."""
_KEEPALIVE_S = 2.0
"""Shorter than servers keep a connection: it is not used again in the moment in which it is closed."""
_AGAIN = (502, 503, 504)


class ClientError(MvrRayError):
    """A request that has no result. `status` is 0 where there was no answer."""

    def __init__(self, status: int, code: str, field: str, message: str, hint: str) -> None:
        super().__init__(f"{code}: {field + ': ' if field else ''}{message}; {hint}")
        self.status = status
        self.code = code
        self.field = field
        self.message = message
        self.hint = hint


class RefusedError(ClientError):
    """The request, the token or the id is wrong."""


class UnavailableError(ClientError):
    """The server cannot answer now."""


class UnreachableError(ClientError):
    """No answer came."""


class Reply(NamedTuple):
    """What came back from a server."""

    status: int
    retry_after: str
    content: bytes


class Transport(Protocol):
    """A way to a service."""

    async def send(self, request: EndpointRequest[A], timeout_s: float) -> A: ...

    async def close(self) -> None: ...


class HttpTransport:
    """The way to a server at an address."""

    def __init__(self, address: str, token: str | None) -> None:
        """Raises ValueError for what is no address of HTTP, or no token."""
        if httpx2.URL(address).scheme not in ("http", "https"):
            raise ValueError(f"{address!r} is no address of a server; give one such as http://127.0.0.1:8000")
        self.address = address.rstrip("/")
        headers = {"accept": "application/json"}
        if token is not None:
            word = token.strip()
            if not (word and word.isascii() and word.isprintable() and " " not in word):
                raise ValueError(
                    "the token is not one word of printable ASCII characters; give it as the server has it"
                )
            headers["authorization"] = f"Bearer {word}"
        limits = httpx2.Limits(keepalive_expiry=_KEEPALIVE_S)
        self._http = httpx2.AsyncClient(headers=headers, timeout=None, limits=limits)

    async def send(self, request: EndpointRequest[A], timeout_s: float) -> A:
        """The response to a request. Raises ClientError."""
        deadline, tries = time.monotonic() + timeout_s, 0
        last: ClientError | None = None
        while (left_s := deadline - time.monotonic()) > 0:
            retry_after, tries = "", tries + 1
            try:
                async with asyncio.timeout(left_s):
                    reply = await self._once(request, left_s)
                if (answer := _parse(request, reply)) is not None:
                    return answer
                last, retry_after = _error(reply), reply.retry_after
                again = reply.status in _AGAIN and (request.repeatable or last.code == "overloaded")
            except TimeoutError:
                break
            except httpx2.ConnectError as error:
                last, again = self._unreachable(error), True
            except httpx2.HTTPError as error:
                last, again = self._unreachable(error), False
            pause_s = next_pause_s(tries, retry_after, random.random())
            if not again or pause_s >= deadline - time.monotonic():
                raise last
            await asyncio.sleep(pause_s)
        before = f"; before that: {last.message}" if last else ""
        message = f"{self.address} gave no answer within {timeout_s:g} s in {tries} tries{before}"
        raise UnreachableError(0, "timeout", "", message, "allow more time (timeout_s), or see GET /readyz")

    async def close(self) -> None:
        await self._http.aclose()

    async def _once(self, request: EndpointRequest[A], left_s: float) -> Reply:
        headers = {"x-timeout-ms": str(max(1, int(1000 * _SERVER_SHARE * left_s)))}
        content = None
        if request.body is not None:
            headers["content-type"] = "application/json"
            content = request.body.model_dump_json(exclude_none=True)
        response = await self._http.request(
            request.method, self.address + request.path, headers=headers, content=content
        )
        return Reply(response.status_code, response.headers.get("retry-after", ""), response.content)

    def _unreachable(self, error: Exception) -> "UnreachableError":
        said = str(error) or type(error).__name__
        message = f"{self.address} was not reached ({said})"
        return UnreachableError(0, "unreachable", "", message, "see whether the server runs at this address")


class InProcessTransport:
    """The way to a service in this process; `held` is what goes with it at the end."""

    def __init__(self, service: SearchService, held: ExitStack) -> None:
        self.service = service
        self._held = held

    async def send(self, request: EndpointRequest[A], timeout_s: float) -> A:
        """The response to a request, which is executed once. Raises ClientError.

        A search ends by its deadline; other work goes on in its thread, and its result is dropped.
        """
        try:
            with client_errors():
                async with asyncio.timeout(timeout_s):
                    return await asyncio.to_thread(request.work, self.service, timeout_s)
        except TimeoutError:
            message = f"no answer within {timeout_s:g} s"
            raise UnreachableError(0, "timeout", "", message, "allow more time (timeout_s)") from None

    async def close(self) -> None:
        await asyncio.to_thread(self._held.close)


class LoopThread:
    """An event loop on a thread of its own, for code that waits."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mvr_ray client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        done = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return done.result()
        except BaseException:
            done.cancel()
            raise

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def next_pause_s(tries: int, retry_after: str, spread: float) -> float:
    """Seconds to wait after `tries` tries; `spread` in 0..1 is chance. A server's Retry-After is the least."""
    wait_s = _retry_after_s(retry_after)
    if wait_s is None:
        wait_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(tries - 1, 10))
    return wait_s * (1 + _SPREAD * spread)


@contextmanager
def client_errors() -> Iterator[None]:
    """Errors of a service, as a client raises them."""
    try:
        yield
    except RequestError as error:
        refused = error
    except MvrRayError as error:
        refused = to_request_error(error)
    else:
        return
    raise _typed(refused.status, refused.code, refused.field, refused.message, refused.hint)


def _retry_after_s(retry_after: str) -> float | None:
    """Seconds, or until an HTTP date; None where it says neither."""
    value = retry_after.strip()
    if value.isascii() and value.isdigit() and len(value) < 10:
        return float(value)
    try:
        at = parsedate_to_datetime(value)
    except ValueError:
        return None
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max(0.0, (at - datetime.now(UTC)).total_seconds())


def _parse(request: EndpointRequest[A], reply: Reply) -> A | None:
    """None where the server answered with an error. Raises UnavailableError for what is no answer of ours."""
    if reply.status not in request.statuses:
        return None
    try:
        return request.response.model_validate_json(reply.content)
    except ValidationError as error:
        if reply.status != 200:
            return None
        first = error.errors(include_url=False, include_input=False)[0]["msg"]
        message, hint = f"the answer is not a {request.response.__name__} ({first})", "is this a server of mvr_ray?"
        raise UnavailableError(reply.status, "bad_answer", "", message, hint) from None


def _error(reply: Reply) -> ClientError:
    try:
        detail = ErrorResponse.model_validate_json(reply.content).error
    except ValidationError:
        message = f"status {reply.status} without a word of mvr_ray"
        return _typed(reply.status, f"http_{reply.status}", "", message, "is there a proxy in between?")
    return _typed(reply.status, detail.code, detail.field, detail.message, detail.hint)


def _typed(status: int, code: str, field: str, message: str, hint: str) -> ClientError:
    kind = RefusedError if 400 <= status < 500 else UnavailableError
    return kind(status, code, field, message, hint)
