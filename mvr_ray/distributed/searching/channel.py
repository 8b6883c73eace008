"""A searcher's calls over a socket of its own, beside Ray's.

What a call of an actor costs is threads that wake one another: some eight by Ray, two by a socket.

    meet   a caller asks the actor, by Ray, where it listens and for its key; both prove that they know the key before
           anything is unpickled
    call   one call at a time on a channel, and as many channels as calls run side by side
    else   while no channel is free, or where none can be had, a call goes by Ray; nobody waits for a connection
    cut    a channel that breaks under a call means what a dead actor's call means

What goes over a channel may be read by whoever can read the network, as Ray's own calls without TLS.
"""

import hashlib
import hmac
import logging
import math
import pickle
import secrets
import select
import socket
import struct
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayError

log = logging.getLogger(__name__)

MEET_S = 5.0
"""For asking where a searcher listens, for connecting, and for each step of meeting."""
AGAIN_S = 30.0
"""After so long it is tried again to connect where it failed."""
SOON_S = 1.0
"""After so long where the searcher did not say, for it is starting again."""
SEND_S = 10.0
"""A searcher always reads a free channel: who takes longer than this is not there."""
MIXED_S = 0.001
_KEEPALIVE = {"SO_KEEPALIVE": 1, "TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_NODELAY": 1}
"""Whose machine is gone is known after 20 s, where the system can tell."""
_LENGTH = struct.Struct("!Q")
_NONCE_BYTES = 32
_CHUNK_BYTES = 1 << 16


class Address(NamedTuple):
    """Where a searcher listens, and what callers must know; only who may call the actor is told."""

    host: str
    port: int
    key: bytes


class Cut(ConnectionError):
    """A channel broke while a call ran."""


class Turns:
    """One at a time, in the order in which they came."""

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


class Listener:
    """Lets callers who know the key call some methods of an object, each channel in a thread of its own."""

    def __init__(self, target: Any, methods: Sequence[str], host: str) -> None:
        self._target = target
        self._methods = frozenset(methods)
        self._socket = socket.create_server((host, 0))
        self.address = Address(host, self._socket.getsockname()[1], secrets.token_bytes(_NONCE_BYTES))
        threading.Thread(target=self._accept, name="mvr-channels", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(caller,), name="mvr-channel", daemon=True).start()

    def _serve(self, caller: socket.socket) -> None:
        with caller:
            try:
                _prepare(caller)
                if not _meets(caller, self.address.key, b"searcher", b"caller"):
                    log.warning("channel refused: %s does not know the key", caller.getpeername()[0])
                    return
                caller.settimeout(None)
                while True:
                    (size,) = _LENGTH.unpack(_read(caller, _LENGTH.size))
                    answer = self._answer(_read(caller, size))
                    caller.sendall(_LENGTH.pack(len(answer)) + answer)
            except OSError:
                return

    def _answer(self, called: bytearray) -> bytes:
        try:
            method, args = pickle.loads(called)
            if method not in self._methods:
                raise AttributeError(f"{method!r} is not called over a channel; {', '.join(sorted(self._methods))} are")
            return pickle.dumps((True, getattr(self._target, method)(*args)), pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller must hear it
            error.add_note("".join(traceback.format_exception(error)))
            try:
                return pickle.dumps((False, error), pickle.HIGHEST_PROTOCOL)
            except Exception:  # noqa: BLE001 - whatever an error raises that cannot be pickled
                return pickle.dumps((False, RuntimeError(repr(error))), pickle.HIGHEST_PROTOCOL)


class Channel:
    """One connection, and the call that runs on it."""

    def __init__(self, caller: socket.socket, home: "Channels") -> None:
        self.fileno = caller.fileno
        self._socket = caller
        self._home = home
        self._came = bytearray()
        self._cut = False

    @property
    def is_whole(self) -> bool:
        """Whether the answer is here, or will not come any more."""
        head = _LENGTH.size
        return self._cut or (len(self._came) >= head and len(self._came) - head >= _LENGTH.unpack(self._came[:head])[0])

    def send(self, called: bytes) -> None:
        """Raises OSError where the other side is gone."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        if poll.poll(0):
            raise Cut("closed while nothing was asked")
        self._socket.settimeout(SEND_S)
        self._socket.sendall(_LENGTH.pack(len(called)) + called)
        self._socket.setblocking(False)

    def receive(self) -> bool:
        """Take what has come; whether that is all."""
        try:
            while not self.is_whole:
                some = self._socket.recv(_CHUNK_BYTES)
                self._cut = not some
                self._came += some
        except BlockingIOError:
            return False
        except OSError:
            self._cut = True
        return True

    def answer(self) -> Any:
        """What was answered, when all of it is here; the channel is free again. Raises what was raised, and Cut."""
        if self._cut:
            self.close()
            raise Cut("the searcher's side ended")
        answered, value = pickle.loads(memoryview(self._came)[_LENGTH.size :])
        self._came = bytearray()
        self._home.free(self)
        if answered:
            return value
        raise value

    def pass_by(self) -> None:
        """Free the channel, whatever was answered."""
        self._came = bytearray()
        if self._cut:
            self.close()
        else:
            self._home.free(self)

    def cut(self) -> None:
        """End the call that runs: who waits for it is told at once."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._home.lost(self)
        self._socket.close()


class Channels:
    """A caller's channels to one searcher. Safe to use from several threads."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._free: list[Channel] = []
        self._open: set[Channel] = set()
        self._lock = threading.Lock()
        self._connecting = False
        self._not_before_s = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def call(self, method: str, args: tuple[Any, ...]) -> Channel | None:
        """The channel on which the call runs; None where none is free now, which the next call may find otherwise."""
        called = b""
        while (channel := self._taken()) is not None:
            called = called or pickle.dumps((method, args), pickle.HIGHEST_PROTOCOL)
            try:
                channel.send(called)
                return channel
            except OSError:
                channel.close()
        return None

    def cut(self) -> None:
        """Break all channels: the searcher is not to be asked now."""
        with self._lock:
            free, self._free = self._free, []
            under_way = self._open.difference(free)
        for channel in free:
            channel.close()
        for channel in under_way:
            channel.cut()

    def free(self, channel: Channel) -> None:
        with self._lock:
            self._free.append(channel)

    def lost(self, channel: Channel) -> None:
        with self._lock:
            self._open.discard(channel)

    def _taken(self) -> Channel | None:
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._connecting or time.monotonic() < self._not_before_s:
                return None
            self._connecting = True
        try:
            ref = self._actor.channel.options(concurrency_group="health").remote()
            threading.Thread(target=self._connect, args=(ref,), name="mvr-channel", daemon=True).start()
        except BaseException:
            self._connecting = False
            raise
        return None

    def _connect(self, ref: Any) -> None:
        failed_s = AGAIN_S
        try:
            if not ray.is_initialized():
                return
            host, port, key = ray.get(ref, timeout=MEET_S)
            caller = socket.create_connection((host, port), MEET_S)
            try:
                _prepare(caller)
                if not _meets(caller, key, b"caller", b"searcher"):
                    raise OSError(f"who listens at {host}:{port} is not the searcher")
            except BaseException:
                caller.close()
                raise
            channel, failed_s = Channel(caller, self), 0.0
            with self._lock:
                self._open.add(channel)
                self._free.append(channel)
        except (RayError, GetTimeoutError) as error:  # it is starting again, or gone
            failed_s = SOON_S
            log.info("no channel yet: %s", str(error).partition("\n")[0])
        except OSError as error:
            log.warning("no channel, calls go by Ray: %s", error)
        finally:
            with self._lock:
                self._connecting = False
                self._not_before_s = time.monotonic() + failed_s


def wait(calls: Sequence[Any], wanted: int, timeout_s: float) -> list[Any]:
    """Those of these calls, channels and references of Ray's, that have ended: so many, or fewer when time is over."""
    channels = [call for call in calls if isinstance(call, Channel)]
    refs = [call for call in calls if not isinstance(call, Channel)]
    if not channels:
        return ray.wait(refs, num_returns=wanted, timeout=max(timeout_s, 0.0))[0]
    until_s = time.monotonic() + timeout_s
    done: list[Any] = [channel for channel in channels if channel.is_whole]
    waits = {channel.fileno(): channel for channel in channels if not channel.is_whole}
    poll = select.poll()
    for number in waits:
        poll.register(number, select.POLLIN)
    while True:
        if refs:
            ended, refs = ray.wait(refs, num_returns=len(refs), timeout=0)
            done += ended
        left_s = max(until_s - time.monotonic(), 0.0)
        pause_s = 0.0 if len(done) >= wanted else min(left_s, MIXED_S) if refs else left_s
        for number, _ in poll.poll(math.ceil(1e3 * pause_s) if waits else 0):
            if waits[number].receive():
                poll.unregister(number)
                done.append(waits.pop(number))
        if len(done) >= wanted or not left_s:
            return done
        if not waits:
            ended, refs = ray.wait(refs, num_returns=wanted - len(done), timeout=left_s)
            return done + ended


def _prepare(end: socket.socket) -> None:
    end.settimeout(MEET_S)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):
            end.setsockopt(
                socket.SOL_SOCKET if name.startswith("SO_") else socket.IPPROTO_TCP, getattr(socket, name), value
            )


def _meets(end: socket.socket, key: bytes, own: bytes, other: bytes) -> bool:
    """Each side proves that it knows the key, by what the other side made up; whether the other one does."""
    mine = secrets.token_bytes(_NONCE_BYTES)
    end.sendall(mine)
    theirs = bytes(_read(end, _NONCE_BYTES))
    end.sendall(_proof(key, own, theirs))
    return hmac.compare_digest(_read(end, hashlib.sha256().digest_size), _proof(key, other, mine))


def _proof(key: bytes, who: bytes, nonce: bytes) -> bytes:
    return hmac.digest(key, who + nonce, "sha256")


def _read(end: socket.socket, size: int) -> bytearray:
    came = bytearray(size)
    at = memoryview(came)
    while at:
        some = end.recv_into(at)
        if not some:
            raise Cut("the other side ended")
        at = at[some:]
    return came
