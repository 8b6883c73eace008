"""Carries calls to a searcher over Arrow Flight; by Ray's own calls where no connection can be had.

    serve     a searcher listens on its node's address, on a free port: in a private cluster on the loopback alone
    connect   a caller asks the actor, by Ray, for the address and the bearer token; the connection is made in a thread,
              and calls go by Ray until it stands
    call      an action named by the method and the call, an Arrow message each way (`messages`); no code is carried
    refuse    a caller without the token reaches no method
    lose      a call whose connection breaks goes by Ray: to the searcher's next life, or it fails as a dead actor's

With `resources.tls_dir` the connection is encrypted, and the searcher proves that it holds the certificate's key.
"""

import hmac
import json
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import ray
from pyarrow import flight
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from mvr_ray import errors
from mvr_ray.deadline import Deadline
from mvr_ray.distributed.ray_errors import unwrap_error
from mvr_ray.errors import MvrRayError

log = logging.getLogger(__name__)

CONNECT_S = 5.0
"""For asking where a searcher listens, and for its first answer there."""
RETRY_S = 30.0
"""Wait before another attempt where a connection failed."""
RESTART_RETRY_S = 1.0
"""Wait before another attempt where the actor itself did not answer: it is starting again."""
LINGER_S = 60.0
"""A call that its caller gave up on still counts as load until it ends, but for no longer than this."""
HELLO = "hello"
"""The action that shows that a connection stands."""
TLS_NAME = "mvr-ray"
"""The DNS name in the searchers' certificate, whatever their addresses are."""
_KEEPALIVE = [("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 10_000)]
"""A peer whose machine is gone is detected within 20 s."""
_BROKEN = flight.FlightUnavailableError, flight.FlightUnauthenticatedError, flight.FlightCancelledError

Handle = Callable[[str, str, pa.Buffer], pa.Buffer]
"""Answers a method's message; the second argument is the call's name."""


class SearcherAddress(NamedTuple):
    """Where a searcher listens, and what callers must know. Only callers of the actor are told."""

    uri: str
    token: str
    authority: bytes = b""


class ConnectionLost(ConnectionError):
    """A connection broke while a call ran."""


class FairLock:
    """Mutual exclusion in the order of arrival."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken = False
        self._line: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Lock()
            mine.acquire()
            self._line.append(mine)
        mine.acquire()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._line:
                self._line.popleft().release()
            else:
                self._taken = False


class SearcherServer(flight.FlightServerBase):
    """Serves one searcher's methods over Flight, each call in a thread of gRPC's."""

    def __init__(self, handle: Handle, host: str, tls_dir: str = "") -> None:
        """`tls_dir` holds `tls.crt`, `tls.key` and `ca.crt`; empty: no encryption."""
        token, tls = secrets.token_urlsafe(32), Path(tls_dir)
        scheme, pairs = ("grpc+tls", [_certificate(tls)]) if tls_dir else ("grpc", None)
        place = f"{scheme}://{f'[{host}]' if ':' in host else host}"
        super().__init__(f"{place}:0", tls_certificates=pairs, middleware={"token": _TokenCheck(token)})
        authority = (tls / "ca.crt").read_bytes() if tls_dir else b""
        self.endpoint = SearcherAddress(f"{place}:{self.port}", token, authority)
        self._handle = handle

    def do_action(self, context: Any, action: flight.Action) -> Iterator[flight.Result]:
        """Answer one call. Errors of ours keep their type; others are told as Flight tells them."""
        method, _, call = action.type.partition(" ")
        if method == HELLO:
            yield flight.Result(action.body)
            return
        try:
            yield flight.Result(self._handle(method, call, action.body))
        except MvrRayError as error:
            told = json.dumps([type(error).__name__, str(error)])
            raise flight.FlightServerError(str(error), extra_info=told.encode()) from None


class Connection:
    """A caller's way to one searcher. Safe to use from several threads.

    `waiting` counts the calls that wait or run there, those included that their caller gave up on.
    """

    def __init__(self, actor: Any, num_threads: int) -> None:
        self.actor = actor
        self.waiting = 0
        self._lock = threading.Lock()
        self._running: set[Future[pa.Buffer]] = set()
        self._client: tuple[flight.FlightClient, str] | None = None
        self._connecting = False
        self._not_before_s = 0.0
        self._epoch = 0
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="mvr-call")

    @property
    def is_connected(self) -> bool:
        return self._client is not None

    def book(self, calls: int) -> None:
        """Count calls that are going to be made, or with a negative number such as were not."""
        with self._lock:
            self.waiting += calls

    def call(self, method: str, call: str, message: pa.Buffer, deadline: Deadline) -> "Future[pa.Buffer]":
        """The answer to a booked call, later. The future raises what the searcher raised, and ConnectionLost."""
        future: Future[pa.Buffer] = Future()
        with self._lock:
            self._running.add(future)
        self._threads.submit(self._call, future, method, call, message, deadline.left_s + LINGER_S)
        return future

    def close(self) -> None:
        """Fail the calls that run: the searcher is not to be asked now. The next call connects anew."""
        with self._lock:
            running, self._running, self._client = self._running, set(), None
            self._epoch += 1
            self.waiting -= len(running)
        for future in running:
            with suppress(InvalidStateError):
                future.set_exception(ConnectionLost("the searcher is being restarted"))

    def _call(self, future: "Future[pa.Buffer]", method: str, call: str, message: pa.Buffer, timeout_s: float) -> None:
        answer, failure = None, None
        try:
            answer = self._ask(method, call, message, timeout_s)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the caller must get it
            failure = error
        with self._lock:
            if future not in self._running:  # closed meanwhile
                return
            self._running.discard(future)
            self.waiting -= 1
        with suppress(InvalidStateError):
            future.set_exception(failure) if failure else future.set_result(answer)

    def _ask(self, method: str, call: str, message: pa.Buffer, timeout_s: float) -> pa.Buffer:
        """Over Flight where a connection stands. Where it breaks, Ray knows whether the searcher is another one now."""
        client = self._usable_client()
        try:
            if client is not None:
                with suppress(*_BROKEN):
                    return _act(*client, f"{method} {call}", message, timeout_s)
                self._forget_client(client)
            return ray.get(self.actor.handle.remote(method, call, message), timeout=timeout_s)
        except (RayActorError, GetTimeoutError, flight.FlightTimedOutError) as error:
            raise ConnectionLost(str(error).partition("\n")[0]) from error
        except RayTaskError as error:
            raise unwrap_error(error, "searching") from error
        except flight.FlightServerError as error:
            raise _own_error(error) from error

    def _forget_client(self, client: tuple[flight.FlightClient, str]) -> None:
        with self._lock:
            if self._client is client:
                self._client = None

    def _usable_client(self) -> tuple[flight.FlightClient, str] | None:
        """The connection; None while there is none, which this call has attempted in a thread."""
        with self._lock:
            idle = self._client is None and not self._connecting and time.monotonic() >= self._not_before_s
            self._connecting = self._connecting or idle
            if not idle:
                return self._client
        threading.Thread(target=self._connect, name="mvr-connect", daemon=True).start()
        return None

    def _connect(self) -> None:
        client, retry_s, epoch = None, RETRY_S, self._epoch
        try:
            if not ray.is_initialized():
                return
            ref = self.actor.endpoint.options(concurrency_group="health").remote()
            uri, token, authority = ray.get(ref, timeout=CONNECT_S)
            options: Any = {"tls_root_certs": authority, "override_hostname": TLS_NAME} if authority else {}
            opened = flight.FlightClient(uri, generic_options=_KEEPALIVE, **options)
            _act(opened, token, HELLO, pa.py_buffer(b""), CONNECT_S)
            client = opened, token
        except RayError as error:  # the actor is starting again, or gone
            retry_s = RESTART_RETRY_S
            log.info("not connected yet: %s", str(error).partition("\n")[0])
        except (pa.ArrowException, OSError) as error:
            log.warning("not connected, calls go by Ray: %s", str(error).partition("\n")[0])
        finally:
            with self._lock:
                self._client, self._connecting = client if epoch == self._epoch else None, False
                self._not_before_s = time.monotonic() + retry_s if client is None else 0.0


class _TokenCheck(flight.ServerMiddlewareFactory):
    """Refuses calls without the bearer token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: dict[str, list[Any]]) -> None:
        """Raises FlightUnauthenticatedError."""
        given = [one.encode() if isinstance(one, str) else one for one in headers.get("authorization", [])]
        if len(given) != 1 or not hmac.compare_digest(given[0], self._expected):
            log.warning("call refused: no valid token")
            raise flight.FlightUnauthenticatedError("no valid token")


def _act(client: flight.FlightClient, token: str, action: str, message: pa.Buffer, timeout_s: float) -> pa.Buffer:
    options = flight.FlightCallOptions(timeout=timeout_s, headers=[(b"authorization", f"Bearer {token}".encode())])
    return next(iter(client.do_action(flight.Action(action, message), options))).body


def _own_error(error: flight.FlightServerError) -> BaseException:
    """The error of ours that a searcher raised, or else Flight's."""
    try:
        name, message = json.loads(error.extra_info)
        kind = getattr(errors, name)
    except (ValueError, AttributeError):
        return error
    return kind(message) if isinstance(kind, type) and issubclass(kind, MvrRayError) else error


def _certificate(tls: Path) -> tuple[bytes, bytes]:
    return (tls / "tls.crt").read_bytes(), (tls / "tls.key").read_bytes()
