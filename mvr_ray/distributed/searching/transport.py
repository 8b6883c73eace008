"""Sends calls to a searcher over Arrow Flight; as Ray actor calls while there is no connection.

    serve     a searcher listens on a free port of its node's address; in a private cluster only on the loopback
    connect   a caller gets the address and the bearer token from the actor through Ray; a thread connects, and calls go
              by Ray until it is connected
    call      an Arrow message each way (`messages`), with a header that names the method and the call; no code is sent;
              streams of messages stay open for further calls, since opening one takes half a millisecond
    refuse    a caller without the token reaches no method
    lose      a call whose connection breaks is repeated by Ray under its name, unless its caller has given it up: the
              searcher gives it the answer of the run that it began, a restarted one runs it, or the call fails. gRPC
              also ends a connection over which no searcher has sent anything for about two minutes (too_many_pings)

With `resources.tls_dir` the connection is encrypted, and the searcher proves that it holds the certificate's key. Calls
by Ray are encrypted only if Ray is (RAY_USE_TLS).
"""

import hmac
import logging
import os
import secrets
import socket
import ssl
import stat
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import ray
from pyarrow import flight
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from mvr_ray import errors
from mvr_ray.config import resolve_path
from mvr_ray.deadline import Deadline
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.ray_errors import unwrap_error
from mvr_ray.distributed.searching.messages import frame, split_frame
from mvr_ray.errors import ConfigError, MvrRayError, first_line

log = logging.getLogger(__name__)

CONNECT_S = 5.0
"""Timeout of the call for a searcher's address, and of the first answer there."""
RETRY_S = 30.0
"""Delay before another attempt to connect after a failed one."""
RESTART_RETRY_S = 1.0
"""Delay before another attempt if the actor did not answer because it restarts."""
LINGER_S = 60.0
"""A call counts as load until it ends: by Ray at most this long after its deadline, over Flight at most until gRPC ends
its stream, after twice the sum of this and the time left to the call that opened it."""
IDLE_S = 20.0
"""Streams close after so much time without a call: over idle ones gRPC sends keepalive pings, and after a few of them
without data the searcher ends the connection (too_many_pings)."""
HELLO = "hello"
"""The method that tests a connection."""
TLS_NAME = "mvr-ray"
"""The DNS name in the searchers' certificate, independent of their addresses."""
_KEEPALIVE = [("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 10_000)]
"""gRPC keepalive detects a dead peer within 20 s."""
_BROKEN = flight.FlightUnavailableError, flight.FlightUnauthenticatedError, flight.FlightCancelledError

Handle = Callable[[str, str, pa.Buffer], pa.Buffer]
"""A function that answers a method's message; the second argument is the call's name, which no other call has."""


class SearcherAddress(NamedTuple):
    """A searcher's URI, bearer token and certificate authority. Only callers of the actor get it."""

    uri: str
    token: str
    authority: bytes = b""


class TlsFiles(NamedTuple):
    """The searchers' certificate, its key and the authority that signed it, in PEM."""

    certificate: bytes
    key: bytes
    authority: bytes


def read_tls_files(tls_dir: str) -> TlsFiles | None:
    """Read `tls.crt`, `tls.key` and `ca.crt`; None without a folder. Raises ConfigError."""
    try:
        return TlsFiles(*(path.read_bytes() for path in _tls_paths(tls_dir))) if tls_dir else None
    except OSError as error:
        raise _tls_error(tls_dir, str(error)) from None


def require_valid_tls(tls_dir: str) -> None:
    """Make a handshake in memory with the files of a folder, if there is one. Raises ConfigError if it fails."""
    if read_tls_files(tls_dir) is None:
        return
    certificate, key, authority = _tls_paths(tls_dir)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        server.load_cert_chain(certificate, key)
        client.load_verify_locations(authority)
        ends = (
            client.wrap_bio(to_client, to_server, server_hostname=TLS_NAME),
            server.wrap_bio(to_server, to_client, server_side=True),
        )
        for end in ends * 2:
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except OSError as error:
        raise _tls_error(tls_dir, str(error)) from None


def _tls_paths(tls_dir: str) -> list[Path]:
    return [resolve_path(tls_dir) / name for name in ("tls.crt", "tls.key", "ca.crt")]


def _tls_error(tls_dir: str, reason: str) -> ConfigError:
    return ConfigError(
        f"resources.tls_dir is {tls_dir!r} on {socket.gethostname()}: {reason}; on every node this folder has "
        f"tls.crt, a certificate for the name {TLS_NAME}, its key tls.key, and ca.crt, the authority that signed it"
    )


class ConnectionLost(ConnectionError):
    """A connection that broke during a call."""


class FairLock:
    """Mutual exclusion in the order of arrival: the first in the queue holds the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        turn = threading.Event()
        with self._lock:
            self._queue.append(turn)
            self._queue[0].set()
        turn.wait()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._queue.popleft()
            if self._queue:
                self._queue[0].set()


class SearcherServer(flight.FlightServerBase):
    """Serves one searcher's methods over Flight, each call in a gRPC thread."""

    def __init__(self, handle: Handle, host: str, tls: TlsFiles | None = None) -> None:
        """Without `tls` nothing is encrypted."""
        token, authority, scheme, options = secrets.token_urlsafe(32), b"", "grpc", {}
        if tls:
            scheme, authority, options = "grpc+tls", tls.authority, {"tls_certificates": [(tls.certificate, tls.key)]}
        origin = f"{scheme}://{f'[{host}]' if ':' in host else host}"
        super().__init__(f"{origin}:0", middleware={"token": _TokenCheck(token)}, **options)
        self.endpoint = SearcherAddress(f"{origin}:{self.port}", token, authority)
        self._handle = handle
        weakref.finalize(self, _break_connections, self.port)  # before Flight's own, which waits for open streams

    def do_exchange(
        self,
        context: Any,
        descriptor: Any,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Answer the calls of one stream in turn. An MvrRayError keeps its type."""
        for chunk in reader:
            (method, call), message = split_frame(_copy_of(chunk.app_metadata))
            try:
                answer = frame(None, message if method == HELLO else self._handle(method, call, message))
            except Exception as error:  # noqa: BLE001 - the caller must get every error
                answer = frame([type(error).__name__, str(error)])
            writer.write_metadata(answer)

    def shutdown(self) -> None:
        """Break all connections and shut the server down."""
        _break_connections(self.port)
        super().shutdown()


def _break_connections(port: int) -> None:
    """Break this process's connections to callers of its server. Flight has no call for it."""
    for number in [int(path.name) for path in Path("/dev/fd").iterdir()]:
        with suppress(OSError):
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                with socket.socket(fileno=os.dup(number)) as own:
                    if own.family in (socket.AF_INET, socket.AF_INET6) and own.getsockname()[1] == port:
                        own.shutdown(socket.SHUT_RDWR)


class _Stream:
    """An open stream of messages on one client, which gRPC ends at `end_s`. Without references it closes."""

    def __init__(self, client: flight.FlightClient, token: str, seconds: float) -> None:
        self.client = client
        self.end_s = time.monotonic() + seconds
        options = flight.FlightCallOptions(timeout=seconds, headers=[(b"authorization", f"Bearer {token}".encode())])
        self._writer, self._reader = client.do_exchange(flight.FlightDescriptor.for_command(b""), options)
        weakref.finalize(self, _close_stream, self._writer, self._reader)

    def send(self, method: str, call: str, message: pa.Buffer) -> tuple[list[str] | None, pa.Buffer]:
        """Send a message, and wait for the searcher's error, if any, and its answer. Raises Flight's errors."""
        self._writer.write_metadata(frame([method, call], message))
        return split_frame(_copy_of(self._reader.read_chunk().app_metadata))

    def cancel(self) -> None:
        """End the stream, and the call that waits on it in another thread."""
        self._reader.cancel()


def _close_stream(writer: flight.MetadataRecordBatchWriter, reader: flight.MetadataRecordBatchReader) -> None:
    """Close a stream without waiting for the searcher. Arrow would write to stderr if a broken one were left to it."""
    reader.cancel()
    with suppress(pa.ArrowException, OSError):
        writer.close()


class Connection:
    """Sends a caller's calls to one searcher. Safe to use from several threads.

    `waiting` counts the calls that wait or run there, including those past their deadline.
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
        self._idle_streams: list[_Stream] = []
        self._busy_streams: set[_Stream] = set()
        self._last_use_s = 0.0
        self._closes_idle = False

    @property
    def is_connected(self) -> bool:
        return self._client is not None

    def add_waiting(self, calls: int) -> None:
        """Add to the number of waiting calls before they are sent; a negative number removes unsent ones."""
        with self._lock:
            self.waiting += calls

    def call(self, method: str, call: str, message: pa.Buffer, deadline: Deadline) -> "Future[pa.Buffer]":
        """Send a call that `add_waiting` has counted. The future raises what the searcher raised, or ConnectionLost;
        cancel it to give the call up."""
        future: Future[pa.Buffer] = Future()
        with self._lock:
            self._running.add(future)
        self._threads.submit(self._call_in_ray, future, method, call, message, deadline.left_s + LINGER_S)
        return future

    def close(self) -> None:
        """Fail the running calls, because the searcher is down. The next call connects again."""
        with self._lock:
            running, self._running, self._client = self._running, set(), None
            self._epoch += 1
            self.waiting -= len(running)
            for stream in (*self._idle_streams, *self._busy_streams):
                stream.cancel()
            self._idle_streams.clear()
        for future in running:
            if future.set_running_or_notify_cancel():
                future.set_exception(ConnectionLost("the searcher is being restarted"))

    def _call_in_ray(self, *arguments: Any) -> None:
        with session.using_ray():
            self._call(*arguments)

    def _call(self, future: "Future[pa.Buffer]", method: str, call: str, message: pa.Buffer, timeout_s: float) -> None:
        try:
            settle = partial(future.set_result, self._send(future, method, call, message, timeout_s))
        except BaseException as error:  # noqa: BLE001 - the caller must get every error
            settle = partial(future.set_exception, error)
        with self._lock:
            if future not in self._running:  # closed meanwhile
                return
            self._running.discard(future)
            self.waiting -= 1
        if future.set_running_or_notify_cancel():
            settle()

    def _send(
        self, future: "Future[pa.Buffer]", method: str, call: str, message: pa.Buffer, timeout_s: float
    ) -> pa.Buffer:
        """Send over Flight if connected. By Ray otherwise, or if the connection breaks: Ray finds a restarted actor."""
        client = self._usable_client()
        try:
            if client is not None:
                try:
                    with self._stream(*client, timeout_s) as stream:
                        problem, answer = stream.send(method, call, message)
                except _BROKEN as error:
                    with self._lock:
                        self._client = None if self._client is client else self._client
                        if future not in self._running:
                            raise ConnectionLost("the connection was closed during the call") from error
                else:
                    if problem:
                        raise _decode_error(*problem)
                    return answer
            if future.cancelled():
                raise ConnectionLost("the caller gave the call up")
            return ray.get(self.actor.handle.remote(method, call, message), timeout=timeout_s)
        except (RayActorError, GetTimeoutError, flight.FlightTimedOutError) as error:
            raise ConnectionLost(first_line(error)) from error
        except RayTaskError as error:
            raise unwrap_error(error, "searching") from error

    @contextmanager
    def _stream(self, client: flight.FlightClient, token: str, timeout_s: float) -> Iterator[_Stream]:
        """Lend a stream of the client that stays open for at least `timeout_s`; keep it afterwards unless it broke.

        gRPC has no timeout of a message, so a call that the searcher never answers ends with its stream.
        """
        with self._lock:
            needed_s = time.monotonic() + timeout_s
            self._idle_streams = [one for one in self._idle_streams if one.client is client and one.end_s >= needed_s]
            stream = self._idle_streams.pop() if self._idle_streams else None
        stream = stream or _Stream(client, token, 2 * timeout_s)
        with self._lock:
            self._busy_streams.add(stream)
        try:
            yield stream
        except BaseException:  # an answer may still arrive on the stream, after Ctrl-C too
            stream.cancel()
            raise
        else:
            with self._lock:
                self._idle_streams.append(stream)
                self._last_use_s = time.monotonic()
                starts, self._closes_idle = not self._closes_idle, True
            if starts:
                threading.Thread(target=self._close_idle_streams, name="mvr-idle", daemon=True).start()
        finally:
            with self._lock:
                self._busy_streams.discard(stream)

    def _close_idle_streams(self) -> None:
        while (left_s := self._last_use_s + IDLE_S - time.monotonic()) > 0:
            time.sleep(left_s)
        with self._lock:
            self._idle_streams.clear()
            self._closes_idle = False

    def _usable_client(self) -> tuple[flight.FlightClient, str] | None:
        """Return the connection; if there is none, start connecting in a thread and return None."""
        with self._lock:
            idle = self._client is None and not self._connecting and time.monotonic() >= self._not_before_s
            self._connecting = self._connecting or idle
            if not idle:
                return self._client
        threading.Thread(target=self._connect_in_ray, name="mvr-connect", daemon=True).start()
        return None

    def _connect_in_ray(self) -> None:
        with session.using_ray():
            self._connect()

    def _connect(self) -> None:
        client, retry_s, epoch, authority = None, RETRY_S, self._epoch, b""
        try:
            if not ray.is_initialized():
                return
            ref = self.actor.endpoint.options(concurrency_group="health").remote()
            uri, token, authority = ray.get(ref, timeout=CONNECT_S)
            options: Any = {"tls_root_certs": authority, "override_hostname": TLS_NAME} if authority else {}
            new_client = flight.FlightClient(uri, generic_options=_KEEPALIVE, **options)
            _Stream(new_client, token, CONNECT_S).send(HELLO, "", pa.py_buffer(b""))
            client = new_client, token
        except (RayActorError, GetTimeoutError) as error:  # the actor restarts, or is dead
            retry_s = RESTART_RETRY_S
            log.info("not connected yet: %s", first_line(error))
        except (RayError, pa.ArrowException, OSError) as error:
            if authority:
                log.error("not connected, calls go by Ray, without TLS unless RAY_USE_TLS=1: %s", first_line(error))
            else:
                log.warning("not connected, calls go by Ray: %s", first_line(error))
        finally:
            with self._lock:
                self._client, self._connecting = client if epoch == self._epoch else None, False
                self._not_before_s = time.monotonic() + retry_s if client is None else 0.0


class _TokenCheck(flight.ServerMiddlewareFactory):
    """Refuses calls without the bearer token."""

    def __init__(self, token: str) -> None:
        self._expected = f"Bearer {token}".encode()

    def start_call(self, info: Any, headers: dict[str, list[Any]]) -> None:
        """Refuse a call without the token, by FlightUnauthenticatedError."""
        values = [one.encode() if isinstance(one, str) else one for one in headers.get("authorization", [])]
        if len(values) != 1 or not hmac.compare_digest(values[0], self._expected):
            log.warning("call refused: no valid token")
            raise flight.FlightUnauthenticatedError("no valid token")


def _copy_of(buffer: pa.Buffer) -> pa.Buffer:
    """Make a copy at the start of an allocation: gRPC's own is a part of one, where arrays would not be aligned."""
    return pa.py_buffer(buffer.to_pybytes())


def _decode_error(name: str, message: str) -> BaseException:
    """Return the MvrRayError that a searcher raised, else an error of Flight with its name."""
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, MvrRayError):
        return kind(message)
    return flight.FlightServerError(f"{name}: {message}")
