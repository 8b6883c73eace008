"""Tests of calls over Flight: messages return unchanged, callers need the token, and Ray sends what Flight cannot."""

import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import flight
from random_index import D, brute_force, publish_random_index, random_views
from waiting import until

from mvr_ray import logs
from mvr_ray.deadline import Deadline
from mvr_ray.distributed.router import open_router
from mvr_ray.distributed.searching import transport
from mvr_ray.distributed.searching.dispatch import Dispatcher
from mvr_ray.distributed.searching.messages import (
    ScanRequest,
    ShardFailure,
    ShardResult,
    ShardResults,
    ViewResults,
    decode_results,
    decode_scan,
    decode_views,
    encode_results,
    encode_scan,
    encode_views,
    frame,
)
from mvr_ray.distributed.searching.node_placement import SearcherActor
from mvr_ray.distributed.searching.searcher import SearcherTask
from mvr_ray.distributed.searching.transport import (
    Connection,
    ConnectionLost,
    FairLock,
    SearcherAddress,
    SearcherServer,
    read_tls_files,
    require_valid_tls,
)
from mvr_ray.errors import ConfigError, ShardIndexError
from mvr_ray.store.embeddings import Views
from mvr_ray.types import HybridQueries, ShardHits

SHARDS, K = 3, 7
NEW_CERTIFICATE = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=mvr-ray"]
NEW_CERTIFICATE += ["-addext", "subjectAltName=DNS:mvr-ray"]
VIEWS = random_views(60, 1)
QUERIES_QD = np.random.default_rng(5).integers(-2, 3, (4, D)).astype(np.float32)
TRUTH = [brute_force(VIEWS, query_D, K) for query_D in QUERIES_QD]


class Desk:
    """The methods of a server: they return their message, after the gate opens, or raise an error."""

    def __init__(self) -> None:
        self.calls = 0
        self.gate = threading.Event()
        self.error = Exception()

    def handle(self, method, call, message):
        self.calls += 1
        if method == "later":
            self.gate.wait(60)
        if method == "fail":
            raise self.error
        return message


class FakeActor:
    """Replaces an actor: returns an endpoint by Ray, and counts its calls."""

    def __init__(self, endpoint: SearcherAddress) -> None:
        self.address = endpoint
        self.num_connects, self.by_ray = 0, 0
        self.endpoint = self.handle = self
        self.cancel = MagicMock()

    def options(self, **_):
        return self

    def remote(self, *message):
        if message:
            self.by_ray += 1
            return ray.put(message[-1])
        self.num_connects += 1
        return ray.put(self.address)


class Proxy:
    """Forwards TCP connections to a server until it is cut."""

    def __init__(self, endpoint: SearcherAddress) -> None:
        self._there = int(endpoint.uri.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self.endpoint = endpoint._replace(uri=f"grpc://127.0.0.1:{self._listener.getsockname()[1]}")
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                ends = self._listener.accept()[0], socket.create_connection(("127.0.0.1", self._there))
                self._sockets += ends
                for one, other in (ends, ends[::-1]):
                    threading.Thread(target=self._forward, args=(one, other), daemon=True).start()

    def _forward(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)

    def cut(self) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@pytest.fixture
def desk():
    return Desk()


@pytest.fixture(params=["127.0.0.1", "::1"])
def server(desk, request):
    one = SearcherServer(desk.handle, request.param)
    yield one
    desk.gate.set()
    one.shutdown()


def call(connection: Connection, method: str, message: bytes = b"", timeout_s: float = 30.0):
    connection.add_waiting(1)
    return connection.call(method, "a call", pa.py_buffer(message), Deadline.after(timeout_s))


def connect(endpoint: SearcherAddress) -> Connection:
    """Open a connection; its first call went by Ray."""
    connection = Connection(FakeActor(endpoint), 4)
    assert call(connection, "say", b"by Ray").result(30).to_pybytes() == b"by Ray"
    until(lambda: connection.is_connected)
    assert connection.actor.by_ray == 1 and connection.waiting == 0
    return connection


def whole(router) -> bool:
    answer = router.search(QUERIES_QD, K)
    rows = [[(hit.passage_id, hit.score, hit.view) for hit in hits] for hits in answer.hits]
    return rows == TRUTH and answer.exact.certified


class NotByRay:
    """An actor to which Ray must send no message."""

    def __init__(self, actor) -> None:
        self.actor = actor

    def __getattr__(self, name):
        assert name != "handle", "Ray sent a message"
        return getattr(self.actor, name)


@given(st.data())
def test_messages_are_decoded_as_they_were_encoded(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    num_queries, k = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 5))
    queries_QD = rng.normal(size=(num_queries, D)).astype(np.float32)
    hybrid = HybridQueries(tuple(data.draw(st.lists(st.text(), max_size=3))), data.draw(st.floats(0, 99)))
    shards, condition = tuple(range(data.draw(st.integers(0, 3)))), data.draw(st.sampled_from(["", '{"year": 1}']))
    request = ScanRequest(queries_QD, k, shards, 7, condition, data.draw(st.sampled_from([None, hybrid])))
    other_queries_QD, *settings = decode_scan(encode_scan(request))
    np.testing.assert_array_equal(other_queries_QD, queries_QD, strict=True)
    assert settings == list(request[1:])
    results = []
    for shard in request.shards:
        width = data.draw(st.integers(0, k)) if num_queries else 0
        rows_QK = np.sort(rng.permuted(np.tile(np.arange(-1, 9), (num_queries, 1)), axis=1)[:, :width])
        score_QK, frontier_Q = rng.normal(size=rows_QK.shape), rng.normal(size=num_queries)
        hits = ShardHits(rows_QK, score_QK.astype(np.float32), rows_QK.astype(np.int16), frontier_Q.astype(np.float32))
        rows_R = np.unique(rows_QK[rows_QK >= 0]).astype(np.int64)
        ids_R = pa.array([f"p\u00e4{row}" for row in rows_R.tolist()], pa.string())
        results.append(ShardResult(shard, hits, np.arange(num_queries), rows_R, ids_R))
    failures = [ShardFailure((5, 6), "damaged", "part-6 is not what it was")]
    reply = decode_results(encode_results(ShardResults(results, failures)))
    assert reply.failures == failures and len(reply.results) == len(results)
    for one, other in zip(reply.results, results):
        width = other.hits.rows_QK.shape[1]
        for name in ("rows_QK", "scores_QK", "views_QK"):
            np.testing.assert_equal(getattr(one.hits, name)[:, :width], getattr(other.hits, name))
        assert (one.hits.rows_QK[:, width:] == -1).all() and (one.hits.scores_QK[:, width:] == -np.inf).all()
        np.testing.assert_equal(one.hits.frontier_Q, other.hits.frontier_Q)
        np.testing.assert_equal((one.shard, one.rescored_Q, one.rows_R), (other.shard, other.rescored_Q, other.rows_R))
        assert one.ids_R.to_pylist() == other.ids_R.to_pylist()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_stored_views_keep_their_type_and_their_passages(dtype):
    rng = np.random.default_rng(3)
    views = {f"p{n}": Views(np.arange(n, dtype=np.int16), rng.normal(size=(n, D)).astype(dtype)) for n in range(4)}
    reply = decode_views(encode_views(ViewResults(views, [ShardFailure((1,), "late")])))
    assert reply.failures == [ShardFailure((1,), "late")]
    np.testing.assert_equal(reply.views, views)
    assert all(one.vectors_ND.dtype == dtype for one in reply.views.values())
    assert decode_views(encode_views(ViewResults({}, []))) == ViewResults({}, [])


def test_the_fair_lock_is_held_by_one_thread_at_a_time_in_order_of_arrival():
    lock, order, inside = FairLock(), [], []

    def take(number: int) -> None:
        with lock:
            inside.append(number)
            assert len(inside) == 1
            order.append(number)
            inside.clear()

    with lock:
        threads = []
        for number in range(20):
            threads.append(threading.Thread(target=take, args=(number,)))
            threads[-1].start()
            until(lambda number=number: len(lock._queue) == number + 2)
        assert order == []
    for thread in threads:
        thread.join(30)
    assert order == list(range(20))
    with lock:
        order.append("free again")
    assert order[-1] == "free again"


@pytest.mark.ray
def test_what_is_sent_comes_back_whatever_its_size_and_errors_of_ours_keep_their_type(server, desk, ray_session):
    connection = connect(server.endpoint)
    for message in (b"", b"a", os.urandom(9_000_000)):
        assert call(connection, "say", message).result(30).to_pybytes() == message
    desk.error = ShardIndexError("version 3 was dropped here; ask the live one")
    with pytest.raises(ShardIndexError) as error:
        call(connection, "fail").result(30)
    assert str(error.value) == "version 3 was dropped here; ask the live one"
    desk.error = KeyError("x")
    with pytest.raises((KeyError, pa.ArrowException)):
        call(connection, "fail").result(30)
    assert connection.is_connected and connection.waiting == 0 and connection.actor.by_ray == 1


@pytest.mark.ray
def test_a_caller_without_the_token_reaches_no_method_and_unpickles_nothing(server, desk, ray_session, tmp_path):
    class Trap:
        def __reduce__(self):
            return open, (str(tmp_path / "sprung"), "w")

    trap = pickle.dumps(("say", (Trap(),)))
    token = server.endpoint.token
    client = flight.FlightClient(server.endpoint.uri)
    for headers in (
        [],
        [(b"authorization", b"Bearer another")],
        [(b"authorization", token.encode())],
        [(b"authorization", b"Bearer another"), (b"authorization", f"Bearer {token}".encode())],
    ):
        options = flight.FlightCallOptions(timeout=10, headers=headers)
        for method in ("say", "hello"):
            with pytest.raises(flight.FlightUnauthenticatedError):
                writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b""), options)
                writer.write_metadata(frame([method, "a call"], trap))
                reader.read_chunk()
    assert desk.calls == 0 and not (tmp_path / "sprung").exists()
    impostor = Connection(FakeActor(server.endpoint._replace(token="another key")), 1)
    assert call(impostor, "say", b"by Ray").result(30).to_pybytes() == b"by Ray"
    until(lambda: not impostor._connecting)
    assert not impostor.is_connected and desk.calls == 0


@pytest.mark.ray
def test_without_a_server_calls_go_by_ray_and_no_second_connect_follows_at_once(ray_session):
    with socket.create_server(("127.0.0.1", 0)) as there:
        free_port = there.getsockname()[1]
    actor = FakeActor(SearcherAddress(f"grpc://127.0.0.1:{free_port}", "token"))
    connection = Connection(actor, 2)
    call(connection, "say", b"1").result(30)
    until(lambda: not connection._connecting)
    assert [call(connection, "say", b"1").result(30).to_pybytes() for _ in range(5)] == [b"1"] * 5
    assert (actor.num_connects, actor.by_ray) == (1, 6) and not connection.is_connected


@pytest.mark.ray
def test_calls_run_side_by_side_and_count_until_they_end(server, desk, ray_session):
    connection = connect(server.endpoint)
    slow, quick = call(connection, "later", b"1"), call(connection, "say", b"2")
    assert quick.result(30).to_pybytes() == b"2"
    assert connection.waiting == 1 and not slow.done()
    desk.gate.set()
    assert slow.result(30).to_pybytes() == b"1"
    assert connection.waiting == 0


@pytest.mark.ray
def test_a_closed_connection_fails_its_calls_at_once_and_the_next_call_connects_anew(server, desk, ray_session):
    connection = connect(server.endpoint)
    waits = call(connection, "later")
    until(lambda: desk.calls == 1)
    connection.close()
    with pytest.raises(ConnectionLost):
        waits.result(0)
    assert connection.waiting == 0 and not connection.is_connected
    assert call(connection, "say", b"by Ray").result(30).to_pybytes() == b"by Ray"
    until(lambda: connection.is_connected)
    desk.gate.set()
    assert call(connection, "say", b"again").result(30).to_pybytes() == b"again"
    assert connection.actor.by_ray == 2 and connection.waiting == 0


@pytest.mark.ray
def test_where_a_connection_breaks_ray_carries_the_calls_that_run_and_those_that_follow(desk, ray_session):
    server = SearcherServer(desk.handle, "127.0.0.1")
    proxy = Proxy(server.endpoint)
    connection = connect(proxy.endpoint)
    waits = call(connection, "later", b"runs")
    until(lambda: desk.calls == 1)
    proxy.cut()
    assert waits.result(30).to_pybytes() == b"runs"
    assert call(connection, "say", b"follows").result(30).to_pybytes() == b"follows"
    assert not connection.is_connected and connection.actor.by_ray >= 2
    desk.gate.set()
    server.shutdown()


@pytest.mark.ray
def test_a_call_that_its_caller_gave_up_is_not_repeated_by_ray_where_its_connection_breaks(desk, ray_session):
    server = SearcherServer(desk.handle, "127.0.0.1")
    proxy = Proxy(server.endpoint)
    dispatcher = Dispatcher([[actor := FakeActor(proxy.endpoint)]], lambda *_: None)
    [[replica]], message = dispatcher.groups, {0: pa.py_buffer(b"1")}
    assert dispatcher.gather("say", message, Deadline.after(30)).failures == {}
    until(lambda: replica.is_connected)
    assert dispatcher.gather("later", message, Deadline.after(2.0)).failures == {0: "late"}
    until(lambda: desk.calls == 1)
    proxy.cut()
    until(lambda: replica.waiting == 0)
    assert actor.by_ray == 1 and replica.state == ""
    desk.gate.set()
    server.shutdown()


@pytest.mark.ray
def test_calls_one_after_the_other_share_a_stream_and_one_that_would_end_too_early_is_replaced(
    server, desk, ray_session
):
    connection = connect(server.endpoint)
    for timeout_s, is_new in ((30, True), (30, False), (20, False), (300, True), (30, False)):
        before = list(connection._idle_streams)
        assert call(connection, "say", b"1", timeout_s).result(30).to_pybytes() == b"1"
        until(lambda: len(connection._idle_streams) == 1)
        assert (connection._idle_streams != before) == is_new
    assert connection.actor.by_ray == 1


@pytest.mark.ray
def test_streams_close_without_calls_and_the_connection_stays(server, desk, ray_session, monkeypatch):
    monkeypatch.setattr(transport, "IDLE_S", 0.1)
    connection = connect(server.endpoint)
    for _ in range(2):
        assert call(connection, "say", b"1").result(30).to_pybytes() == b"1"
        until(lambda: not connection._idle_streams and not connection._closes_idle)
    assert connection.actor.by_ray == 1 and connection.is_connected


@pytest.mark.ray
def test_a_call_that_is_never_answered_ends_with_its_stream(server, desk, ray_session, monkeypatch):
    connection = connect(server.endpoint)
    monkeypatch.setattr(transport, "LINGER_S", 0.0)
    with pytest.raises(ConnectionLost):
        call(connection, "later", timeout_s=2.0).result(30)
    assert desk.calls == 1 and connection.waiting == 0 and connection.actor.by_ray == 1
    assert call(connection, "say", b"next").result(30).to_pybytes() == b"next"


def test_a_call_that_is_repeated_while_it_runs_runs_once(tmp_path, monkeypatch):
    """Ray repeats a call of more than about two minutes, because gRPC ends its connection."""
    monkeypatch.setattr(logs, "to_stderr", lambda: None)
    manifest = publish_random_index(tmp_path, VIEWS, SHARDS)
    searcher = SearcherActor(SearcherTask(str(tmp_path), manifest))
    message = encode_scan(ScanRequest(QUERIES_QD, K, tuple(range(SHARDS)), 1))
    calls: list[str] = []

    class RecordingDict(dict[str, Any]):
        def setdefault(self, call: str, default: Any = None) -> Any:
            running = super().setdefault(call, default)
            calls.append(call)
            return running

    searcher._running = RecordingDict()
    with ThreadPoolExecutor(2) as threads:
        with searcher.request_lock:
            first = threads.submit(searcher.handle, "scan", "request/1", message)
            until(lambda: len(searcher.request_lock._queue) == 2)
            second = threads.submit(searcher.handle, "scan", "request/1", message)
            until(lambda: len(calls) == 2)
        assert first.result(30).equals(second.result(30))
    assert searcher.heartbeat().num_finished == 1
    assert searcher.handle("scan", "request/1", message).equals(first.result())
    searcher._resources.close()


SERVE = """
from mvr_ray.distributed.searching.transport import SearcherServer
server = SearcherServer(lambda method, call, message: message, "127.0.0.1")
print(*server.endpoint[:2], flush=True)
input()
"""


@pytest.mark.ray
def test_a_process_ends_while_callers_hold_streams_to_its_server(ray_session):
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        connection = connect(SearcherAddress(*process.stdout.readline().split()))
        assert call(connection, "say", b"1").result(30).to_pybytes() == b"1" and connection.actor.by_ray == 1
        process.stdin.write("\n")
        process.stdin.flush()
        try:
            assert process.wait(30) == 0
        finally:
            process.kill()
    assert call(connection, "say", b"2").result(30).to_pybytes() == b"2" and connection.actor.by_ray == 2


@pytest.fixture(scope="module")
def tls_dir(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(["openssl", *NEW_CERTIFICATE, "-keyout", "tls.key", "-out", "tls.crt"], cwd=folder, check=True)
    (folder / "ca.crt").write_bytes((folder / "tls.crt").read_bytes())
    return str(folder)


def test_tls_that_cannot_work_is_refused_before_a_searcher_starts(tls_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "to_stderr", lambda: None)
    require_valid_tls("")
    require_valid_tls(tls_dir)
    with pytest.raises(ConfigError, match=r"resources.tls_dir is '/absent' on .*No such file.*tls\.crt"):
        SearcherActor(SearcherTask(str(tmp_path), MagicMock(), tls_dir="/absent"))
    for certificate, key in (("ca.crt", "/dev/null"), ("/dev/null", "tls.key")):
        folder = shutil.copytree(tls_dir, tmp_path / key.strip("/"))
        subprocess.run(["openssl", *NEW_CERTIFICATE, "-out", certificate, "-keyout", key], cwd=folder, check=True)
        with pytest.raises(
            ConfigError, match=r"every node this folder has tls\.crt, a certificate for the name mvr-ray"
        ):
            require_valid_tls(str(folder))


@pytest.mark.ray
def test_with_a_certificate_calls_are_encrypted_and_another_certificate_is_refused(desk, ray_session, tls_dir, caplog):
    server = SearcherServer(desk.handle, "127.0.0.1", read_tls_files(tls_dir))
    assert server.endpoint.uri.startswith("grpc+tls://")
    assert call(connect(server.endpoint), "say", b"secret").result(30).to_pybytes() == b"secret"
    plain = Connection(
        FakeActor(server.endpoint._replace(uri=server.endpoint.uri.replace("+tls", ""), authority=b"")), 1
    )
    other = subprocess.run(
        ["openssl", *NEW_CERTIFICATE, "-keyout", "/dev/null"], capture_output=True, check=True
    ).stdout
    strange = Connection(FakeActor(server.endpoint._replace(authority=other)), 1)
    for connection in (plain, strange):
        call(connection, "say", b"by Ray").result(30)
        until(lambda connection=connection: not connection._connecting)
        assert not connection.is_connected
    assert [one.levelname for one in caplog.records if "without TLS" in one.message] == ["ERROR"]
    assert desk.calls == 1
    server.shutdown()


@pytest.mark.ray
def test_a_router_gets_the_same_answers_over_flight_on_the_loopback_as_by_ray(tmp_path, run_over, ray_session, tls_dir):
    publish_random_index(tmp_path, VIEWS, SHARDS)
    resources = {"searchers": 2, "cpus_per_searcher": 0.25, "tls_dir": tls_dir}
    run = run_over(tmp_path, index={"name": "random"}, resources=resources)
    with open_router(run) as router:
        replicas = [replica for group in router.fleet.dispatcher.groups for replica in group]
        endpoints = ray.get([replica.actor.endpoint.remote() for replica in replicas])
        assert all(endpoint.uri.startswith("grpc+tls://127.0.0.1:") for endpoint in endpoints)
        assert len({endpoint.token for endpoint in endpoints}) == len(replicas) > 1
        assert whole(router)
        by_ray = router.explain(QUERIES_QD, ["p001", "p002"])
        until(lambda: whole(router) and all(replica.is_connected for replica in replicas))
        for replica in replicas:
            replica.actor = NotByRay(replica.actor)
        assert all(whole(router) for _ in range(20))
        over_flight = router.explain(QUERIES_QD, ["p001", "p002"])
        for one, other in zip(by_ray, over_flight, strict=True):
            np.testing.assert_equal(one, other)
        ray.get([replica.actor.drop.remote(1) for replica in replicas])
        with pytest.raises(ShardIndexError, match="version 1 was dropped here"):
            router.search(QUERIES_QD, K)
        until(lambda: router.fleet.counts().waiting == 0)
