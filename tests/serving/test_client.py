"""The client, against a real server on the loopback, a scripted one that misbehaves, and a service in this process."""

import asyncio
import copy
import gc
import inspect
import json
import math
import multiprocessing
import pickle
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from in_memory_index import PASSAGES, InMemoryIndex
from server import listening
from version_store import version_catalog
from waiting import until

from mvr_ray.client import (
    TIMEOUT_S,
    AsyncClient,
    Client,
    ClientError,
    RefusedError,
    UnavailableError,
    UnreachableError,
    next_pause_s,
)
from mvr_ray.config import ServeConfig
from mvr_ray.errors import ConfigError, CoverageError, MvrRayError, OverloadedError
from mvr_ray.serving.app import create_app
from mvr_ray.serving.auth import read_tokens
from mvr_ray.serving.schemas import Readiness, SearchResponse
from mvr_ray.serving.service import SearchService
from mvr_ray.types import Passage

READ, ADMIN = "read-" + "r" * 20, "admin-" + "a" * 20
ODD = ["a/b", "..", ".", "../../etc/passwd", "a b?c#d&e", "é漢🙂", "%2e%2e", "100%", "a//b/", "\x00", "7"]


class WithOddIds(InMemoryIndex):
    """Holds its own passages, and one under every id of ODD."""

    def passages(self, ids):
        return super().passages(ids) | {one: Passage(one, "Odd", PASSAGES[0].text) for one in ids if one in ODD}

    def view_spans(self, passage):
        return super().view_spans(PASSAGES[0] if passage.id in ODD else passage)


@contextmanager
def running(service: SearchService) -> Iterator[str]:
    """The address of a server over the service."""
    tokens = read_tokens(None, {"MVR_RAY_READ_TOKEN": READ, "MVR_RAY_ADMIN_TOKEN": ADMIN})
    with listening(create_app(service, tokens)) as address:
        yield address


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> SearchService:
    return SearchService(WithOddIds(), ServeConfig(max_k=20), version_catalog(tmp_path_factory.mktemp("store")))


@pytest.fixture(scope="module")
def address(service) -> Iterator[str]:
    with running(service) as url:
        yield url


@pytest.fixture(scope="module", params=["http", "inside"])
def client(request, service, address) -> Iterator[Client]:
    client = Client(address, token=ADMIN) if request.param == "http" else Client.over(service)
    with client:
        yield client


def without_time(answer) -> dict:
    return answer.model_dump(exclude={"took_ms"})


def test_a_search_gives_what_the_service_gives(client, service) -> None:
    answer = client.search(["Where is the Rhine?", "hill"], k=2)
    assert without_time(answer) == without_time(Client.over(service).search(["Where is the Rhine?", "hill"], k=2))
    assert answer.exact.certified and answer.results[0][0].snippet.text == "The Rhine is shorter."
    vectors = np.array([[0, 1, 0], [0, 0, 1]], dtype=np.float32)
    for queries in (vectors, vectors.tolist(), vectors.astype(np.float64)):
        assert client.search(queries, k=2).results == answer.results


def test_one_text_is_one_query_and_not_its_characters(client) -> None:
    one, several = client.search("nile", k=2), client.search(["nile"], k=2)
    assert without_time(one) == without_time(several) and len(one.results) == 1
    assert client.explain("nile", "p1") == client.explain(["nile"], ["p1"])
    assert all(
        without_time(client.search(make(["nile"]), k=2)) == without_time(one) for make in (pd.Series, pa.array, iter)
    )
    assert client.embed("nile", model="words").data == client.embed(["nile"], model="words").data
    with pytest.raises(RefusedError, match="the corpus has no field 'year'"):
        client.search("nile", fields="year")


@pytest.mark.parametrize("passage_id", ODD)
def test_a_passage_is_found_by_its_id_whatever_it_holds(client, passage_id) -> None:
    assert client.passage(passage_id).id == passage_id


@pytest.mark.parametrize("passage_id", [7, np.int64(7)])
def test_a_whole_number_is_the_id_of_its_digits(client, passage_id) -> None:
    assert client.passage(passage_id) == client.passage("7")
    for ids in (passage_id, [passage_id]):
        with pytest.raises(RefusedError, match=r"passages\.0: .*'7'"):
            client.explain("nile", ids)


def test_explain_versions_and_readiness_are_the_models_of_the_server(client) -> None:
    [passage] = client.explain(["nile"], ["p1"]).passages
    assert [view.scores for view in passage.views] == [[1.0], [0.0]]
    versions = client.versions()
    assert (versions.serving, versions.versions[0].version) == (3, 1)
    assert client.version(1).vectors == 5
    assert client.ready().ready
    rollback = client.rollback(1)
    assert client.version(version=1) == client.version(1)
    assert (rollback.operation, rollback.live, client.rollback(version=1)) == ("rollback", True, rollback)


REFUSED = [
    (lambda c: c.search(["x"], k=0), 422, "k_out_of_range", "k"),
    (lambda c: c.search([]), 422, "wrong_value", "queries"),
    (lambda c: c.search([[1, 2]]), 422, "wrong_dimension", "queries.0"),
    (lambda c: c.search([[float("nan"), 0, 0]]), 422, "not_finite", "queries.0.0"),
    (lambda c: c.search(["\ud800"]), 422, "not_text", "queries.0"),
    (lambda c: c.search(None), 422, "wrong_type", "queries"),
    (lambda c: c.search({"question": "x"}), 422, "wrong_type", "queries"),
    (lambda c: c.search(pd.DataFrame({"nile": ["x"]})), 422, "wrong_type", "queries"),
    (lambda c: c.search(pa.table({"nile": ["x"]})), 422, "wrong_type", "queries"),
    (lambda c: c.search(["x"], fields={"year": 1}), 422, "wrong_type", "fields"),
    (lambda c: c.explain(pd.DataFrame({"nile": ["x"]})), 422, "wrong_type", "questions"),
    (lambda c: c.explain("x", pd.DataFrame({"p1": ["x"]})), 422, "wrong_type", "passages"),
    (lambda c: c.embed({"nile": 1}, model="words"), 422, "wrong_type", "input"),
    (lambda c: c.search(["x"], encoder_fingerprint="other"), 409, "encoder_mismatch", "encoder_fingerprint"),
    (lambda c: c.explain(["x"], ["p9"]), 404, "unknown_passage", "passages.0"),
    (lambda c: c.passage("p9"), 404, "unknown_passage", "id"),
    (lambda c: c.passage("\ud800"), 404, "unknown_passage", "id"),
    (lambda c: c.passage(""), 404, "unknown_passage", "id"),
    (lambda c: c.passage("p1", version=99), 404, "unknown_version", "version"),
    (lambda c: c.passage("p1", version=1.5), 422, "wrong_type", "version"),
    (lambda c: c.passage(True), 422, "wrong_type", "id"),
    (lambda c: c.passage(1.0), 422, "wrong_type", "id"),
    (lambda c: c.search(["x"], filter="year > 3"), 422, "wrong_type", "filter"),
    (lambda c: c.search(["x"], filter={"id": b"x"}), 422, "wrong_filter", "filter"),
    (lambda c: c.search(["x"], filter={"id": {"in": {"p1"}}}), 422, "wrong_filter", "filter"),
    (lambda c: c.search(["x"], filter={"id": {"lt": math.inf}}), 422, "wrong_filter", "filter"),
    (lambda c: c.search(["x"], fields=5), 422, "wrong_type", "fields"),
    (lambda c: c.explain("x", True), 422, "wrong_type", "passages"),
    (lambda c: c.explain("x", [True]), 422, "wrong_type", "passages.0"),
    (lambda c: c.explain(5), 422, "wrong_type", "questions"),
    (lambda c: c.embed(5, model="words"), 422, "wrong_type", "input"),
    (lambda c: c.embed(["x", None]), 422, "wrong_type", "input"),
    (lambda c: c.search(["x"], hybrid=math.inf), 422, "not_finite", "hybrid"),
    (lambda c: c.publish(None), 422, "wrong_type", "manifest"),
    (lambda c: c.version(99), 404, "unknown_version", "n"),
    (lambda c: c.version("x"), 422, "wrong_type", "n"),
    (lambda c: c.version(True), 422, "wrong_type", "n"),
    (lambda c: c.rollback(None), 422, "wrong_type", "n"),
    (lambda c: c.promote(1.5), 422, "wrong_type", "n"),
    (lambda c: c.ready(timeout_s="2"), 422, "wrong_value", "timeout_s"),
    (lambda c: c.ready(timeout_s=math.nan), 422, "wrong_value", "timeout_s"),
    (lambda c: c.ready(timeout_s=0), 422, "wrong_value", "timeout_s"),
]


@pytest.mark.parametrize(("ask", "status", "code", "field"), REFUSED, ids=[f"{c}-{f}" for _, _, c, f in REFUSED])
def test_a_refusal_is_the_same_error_inside_and_over_http(client, ask, status, code, field) -> None:
    with pytest.raises(RefusedError) as refusal:
        ask(client)
    error = refusal.value
    assert (error.status, error.code, error.field) == (status, code, field)
    assert error.hint and error.message in str(error)


def test_a_filter_holds_values_of_numpy_and_any_mapping(client) -> None:
    condition = MappingProxyType({"id": MappingProxyType({"in": (np.str_("p1"),), "exists": np.bool_(True)})})
    assert [hit.id for hit in client.search(["nile"], filter=condition).results[0]] == ["p1"]


@pytest.mark.parametrize("value", ["half a pair: \ud800", object()], ids=["surrogate", "object"])
def test_a_filter_that_json_cannot_hold_is_refused(client, value) -> None:
    with pytest.raises(RefusedError) as refusal:
        client.search(["x"], filter={"id": value})
    assert refusal.value.status == 422 and refusal.value.hint


def test_tokens_are_sent_and_their_refusals_raised(address) -> None:
    for token, status, code in ((None, 401, "no_token"), (READ[1:], 401, "wrong_token"), (READ, 403, "admin_needed")):
        with Client(address, token=token) as client, pytest.raises(RefusedError) as refusal:
            client.rollback(1)
        assert (refusal.value.status, refusal.value.code) == (status, code)
        assert token is None or token not in str(refusal.value)


def test_too_few_passages_searched_is_asked_again_until_the_time_is_over(monkeypatch) -> None:
    """By a clock that only pauses move, of which each is over half of the time."""
    now_s, pauses_s = [0.0], []

    async def pause(seconds: float) -> None:
        pauses_s.append(seconds)
        now_s[0] += seconds

    monkeypatch.setattr("mvr_ray.serving.schemas.retry_seconds", lambda _: 20)
    monkeypatch.setattr("mvr_ray.deadline.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr("mvr_ray.client.asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": pause}))
    short = SearchService(InMemoryIndex(missing=1), ServeConfig())
    with running(short) as at, Client(at, token=READ) as client:
        with pytest.raises(UnavailableError) as failure:
            client.search(["nile"], timeout_s=39)
        assert (failure.value.status, failure.value.code) == (503, "not_covered")
        assert len(pauses_s) == 1 and 20 <= pauses_s[0] < 39
        assert client.search(["nile"], min_coverage=0.5).coverage.passages_searched == 2
        assert not client.ready().ready


@pytest.mark.parametrize(
    ("error", "code"),
    [(CoverageError("1 of 2 shards did not answer"), "not_covered"), (OverloadedError("full"), "overloaded")],
)
def test_an_error_of_a_search_is_the_same_inside_and_over_http(monkeypatch, error, code) -> None:
    """Both are errors of Python's runtime, too, as that of a closed transport is."""
    failing = InMemoryIndex()
    monkeypatch.setattr(failing, "search", Mock(side_effect=error))
    monkeypatch.setattr("mvr_ray.serving.schemas.retry_seconds", lambda _: 60)
    service = SearchService(failing, ServeConfig())
    with running(service) as at, Client(at, token=READ) as over_http, Client.over(service) as inside:
        for client in (over_http, inside):
            with pytest.raises(UnavailableError) as failure:
                client.search(["nile"], timeout_s=30)
            assert (failure.value.status, failure.value.code) == (503, code)


def test_the_signature_of_a_method_names_what_the_call_returns(service) -> None:
    with Client.over(service) as client:
        assert inspect.signature(client.search).return_annotation is SearchResponse
        assert list(inspect.signature(client.search).parameters)[:2] == ["queries", "k"]
        assert inspect.signature(AsyncClient.over(service).ready).return_annotation == Coroutine[Any, Any, Readiness]


def test_many_async_searches_share_one_client(address) -> None:
    async def run_requests() -> list:
        async with AsyncClient(address, token=READ) as client:
            return await asyncio.gather(*(client.search(["nile"], k=1 + n % 3) for n in range(30)))

    assert [len(answer.results[0]) for answer in asyncio.run(run_requests())] == [1 + n % 3 for n in range(30)]


def test_the_waiting_client_works_where_a_loop_is_running(service) -> None:
    async def notebook() -> int:
        with Client.over(service) as client:
            return client.search(["nile"], k=1).version

    assert asyncio.run(notebook()) == 3


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_client_works_in_a_process_that_this_one_forks(address) -> None:
    def use() -> None:
        assert client.passage("p1").id == "p1"
        client.close()

    with Client(address, token=READ) as client:
        assert client.passage("p1").id == "p1"
        child = multiprocessing.get_context("fork").Process(target=use)
        child.start()
        try:
            child.join(60)
            assert child.exitcode == 0
        finally:
            child.kill()
        assert client.passage("p1").id == "p1"


def test_a_client_that_has_been_used_goes_to_another_process_unless_its_index_is_in_this_one(address) -> None:
    with Client(address, token=READ, timeout_s=7) as client:
        assert client.passage("p1").id == "p1"
        for other in (pickle.loads(pickle.dumps(client)), copy.deepcopy(client)):
            assert other.timeout_s == 7 and other.passage("p1").id == "p1"
            other.close()
        assert client.passage("p1").id == "p1"
    threads = {*threading.enumerate()}
    copy_of_closed = pickle.loads(pickle.dumps(client))
    with pytest.raises(UnreachableError, match="the client is closed"):
        copy_of_closed.passage("p1")
    copy_of_closed.close()
    assert {*threading.enumerate()} <= threads
    here = Client.over(SearchService(InMemoryIndex(), ServeConfig()))
    with here, pytest.raises(TypeError, match="cannot be pickled; make one in the other process"):
        pickle.dumps(here)


def test_an_async_client_works_in_one_loop_after_another(address) -> None:
    client = AsyncClient(address, token=READ)
    for _ in range(3):
        assert asyncio.run(client.passage("p1")).id == "p1"
    del client
    gc.collect()  # connections whose loops have ended warn when they are collected: here, and not in another test


def test_an_inner_search_that_hangs_ends_with_the_callers_time() -> None:
    stuck = InMemoryIndex()
    stuck.gate.clear()
    with Client.over(SearchService(stuck, ServeConfig())) as client:
        with pytest.raises(UnreachableError, match=r"timeout: no answer within 0\.05 s"):
            client.search(["nile"], timeout_s=0.05)
        stuck.gate.set()


class ScriptedServer(ThreadingHTTPServer):
    """Answers every request with the next line of a script: (status, headers, body); of status 0 with none."""

    def __init__(self, script: list[tuple[int, dict[str, str], bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.script = script
        self.requests: list[str] = []
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class _Answers(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.do_GET()

    def do_GET(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        status, headers, body = self.server.script[min(len(self.server.requests), len(self.server.script)) - 1]
        if not status:
            return
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


def error(code: str) -> bytes:
    return json.dumps({"error": {"code": code, "field": "", "message": "m", "hint": "h"}}).encode()


FINE = Client.over(SearchService(InMemoryIndex(), ServeConfig())).search(["nile"]).model_dump_json().encode()
READY = b'{"ready": true, "index": "i", "version": 1, "coverage": 1.0}'
ROLLED = (
    b'{"version": 3, "parent": 2, "operation": "rollback", "created": "", "passages": 1, "vectors": 1, "shards": 1, '
    b'"encoder": "e", "content": "c", "live": true}'
)


def test_what_a_server_could_not_do_then_is_asked_again() -> None:
    script = [(503, {}, error("overloaded")), (502, {}, b"<html>"), (504, {}, error("timeout")), (200, {}, FINE)]
    with closing(ScriptedServer(script)) as server, Client(server.address) as client:
        assert client.search(["nile"]).version == 3
        assert len(server.requests) == 4


def test_a_request_whose_connection_breaks_is_sent_again_unless_it_is_a_rollback() -> None:
    with closing(ScriptedServer([(0, {}, b""), (200, {}, FINE)])) as server, Client(server.address) as client:
        assert client.search(["nile"]).version == 3
        assert len(server.requests) == 2
    with closing(ScriptedServer([(0, {}, b""), (200, {}, ROLLED)])) as server, Client(server.address) as client:
        text = r"the connection to http://.* broke before the answer .*; it may have been done: see versions\(\)"
        with pytest.raises(UnreachableError, match=text):
            client.rollback(1)
        assert len(server.requests) == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422, 429, 500, 501, 302])
def test_no_other_status_is_asked_again(status) -> None:
    script = [(status, {"retry-after": "0"}, error("no")), (200, {}, FINE)]
    with closing(ScriptedServer(script)) as server, Client(server.address) as client:
        with pytest.raises(RefusedError if 400 <= status < 500 else UnavailableError) as refusal:
            client.search(["nile"])
        assert (refusal.value.status, len(server.requests)) == (status, 1)


def test_retry_after_is_kept_to_and_never_waited_for_beyond_the_time() -> None:
    script = [(503, {"retry-after": "1"}, error("overloaded")), (200, {}, FINE)]
    with closing(ScriptedServer(script)) as server, Client(server.address) as client:
        start_s = time.monotonic()
        client.search(["nile"], timeout_s=5)
        assert time.monotonic() - start_s >= 1
    with closing(ScriptedServer([(503, {"retry-after": "30"}, error("overloaded"))])) as server:
        with Client(server.address) as client, pytest.raises(UnavailableError) as refusal:
            start_s = time.monotonic()
            client.search(["nile"], timeout_s=20)
        assert time.monotonic() - start_s < 20
        assert (refusal.value.code, len(server.requests)) == ("overloaded", 1)


def test_a_rollback_is_repeated_only_where_it_never_began() -> None:
    script = [(503, {}, error("overloaded")), (503, {}, error("publishing")), (200, {}, ROLLED)]
    with closing(ScriptedServer(script)) as server, Client(server.address) as client:
        assert client.rollback(1).version == 3
    for status, code in ((503, "unavailable"), (504, "timeout"), (502, "")):
        with closing(ScriptedServer([(status, {}, error(code)), (200, {}, ROLLED)])) as server:
            with Client(server.address) as client, pytest.raises(UnavailableError):
                client.rollback(1)
            assert len(server.requests) == 1


@pytest.mark.filterwarnings("error::RuntimeWarning", "error::pytest.PytestUnraisableExceptionWarning")
def test_closing_twice_is_closing_once_and_a_call_after_it_is_refused(service, address) -> None:
    for client in (Client(address, token=ADMIN), Client.over(service)):
        with client:
            client.search("nile")
            client.close()
        client.close()
        with pytest.raises(UnreachableError, match=r"^closed: the client is closed; make another one$"):
            client.search("nile")

    async def close_twice(client: AsyncClient) -> None:
        async with client:
            await client.search("nile")
            await client.close()
        with pytest.raises(UnreachableError, match=r"^closed: "):
            await client.search("nile")

    for async_client in (AsyncClient(address, token=ADMIN), AsyncClient.over(service)):
        asyncio.run(close_twice(async_client))


def test_a_client_that_is_dropped_ends_its_thread_and_its_connections(address) -> None:
    inside = SearchService(InMemoryIndex(), ServeConfig())
    for make in (lambda: Client(address, token=READ), lambda: Client.over(inside)):
        client = make()
        client.search(["nile"])
        thread, loop = client._thread, client._loop
        del client
        gc.collect()
        thread.join(60)
        assert not thread.is_alive() and loop.is_closed()


def test_closing_ends_the_calls_of_other_threads(monkeypatch) -> None:
    stuck, search_start, connections = InMemoryIndex(), threading.Event(), []
    stuck.gate.clear()
    monkeypatch.setattr(stuck, "embed", lambda texts: search_start.set() or InMemoryIndex.embed(stuck, texts))
    busy = [(503, {"retry-after": "60"}, error("overloaded"))]
    with socket.socket() as hanging, closing(ScriptedServer(busy)) as server, ThreadPoolExecutor(1) as thread:
        hanging.bind(("127.0.0.1", 0))
        hanging.listen()
        clients = [
            (
                Client(f"http://127.0.0.1:{hanging.getsockname()[1]}", timeout_s=600),
                lambda: connections.append(hanging.accept()),
            ),
            (Client(server.address, timeout_s=600), lambda: until(lambda: server.requests)),
            (Client.over(SearchService(stuck, ServeConfig()), timeout_s=600), search_start.wait),
        ]
        for client, wait_for_call in clients:
            call = thread.submit(client.search, ["nile"])
            wait_for_call()
            client.close()
            with pytest.raises(UnreachableError, match=r"^closed: the client is closed; make another one$"):
                call.result(30)
        stuck.gate.set()
        for connection, _ in connections:
            connection.close()


def test_closing_an_async_client_ends_a_call_that_would_send_again() -> None:
    async def close_meanwhile(server: ScriptedServer) -> None:
        client = AsyncClient(server.address, timeout_s=600)
        call = asyncio.create_task(client.search(["nile"]))
        await asyncio.to_thread(until, lambda: server.requests)
        await client.close()
        with pytest.raises(UnreachableError):
            await call

    with closing(ScriptedServer([(503, {"retry-after": "1"}, error("overloaded"))])) as server:
        asyncio.run(close_meanwhile(server))


def test_closing_an_async_client_ends_a_call_that_connects() -> None:
    async def close_meanwhile(address: str) -> None:
        client = AsyncClient(address, timeout_s=math.inf)
        call = asyncio.create_task(client.search(["nile"]))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(UnreachableError, match="closed"):
            await asyncio.wait_for(call, 30)

    with socket.create_server(("127.0.0.1", 0)) as server:
        asyncio.run(close_meanwhile(f"http://127.0.0.1:{server.getsockname()[1]}"))


def test_an_answer_of_something_else_is_an_error_that_says_so() -> None:
    for body in (b"<html>hello</html>", b"{}", b""):
        with (
            closing(ScriptedServer([(200, {}, body)])) as server,
            Client(server.address) as client,
            pytest.raises(UnavailableError, match="is this a server of mvr_ray"),
        ):
            client.search(["nile"])


def test_an_address_where_no_server_listens_is_tried_until_the_time_is_over() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers, bind_and_activate=False) as server:
        server.server_bind()  # bound and not listening: no other process gets the port meanwhile
        with Client(f"http://127.0.0.1:{server.server_port}") as client:
            start_s = time.monotonic()
            with pytest.raises(UnreachableError, match=r"was not reached|gave no answer"):
                client.ready(timeout_s=0.4)
            assert 0.1 < time.monotonic() - start_s < TIMEOUT_S


def test_a_server_that_starts_late_is_found() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Answers, bind_and_activate=False) as server:
        server.script, server.requests = [(200, {}, READY)], []
        server.server_bind()

        def start_late() -> None:
            server.server_activate()
            server.serve_forever(0.01)

        timer = threading.Timer(0.3, start_late)
        timer.start()
        with Client(f"http://127.0.0.1:{server.server_port}") as client:
            assert client.ready(timeout_s=15).ready
        server.shutdown()
        timer.join()


@pytest.mark.parametrize(
    ("tries", "retry_after", "spread", "seconds"),
    [
        (1, "", 0, 0.05),
        (2, "", 0, 0.1),
        (4, "", 1, 0.5),
        (60, "", 0, 2),
        (1, "3", 0, 3),
        (9, "0", 1, 0),
        (1, "3", 1, 3.75),
        (1, "soon", 0, 0.05),
        (1, "-1", 0, 0.05),
        (1, "Wed, 21 Oct 2015 07:28:00 GMT", 0, 0),
        (1, "9" * 30, 0, 0.05),
        (1, f"Wed, {'9' * 30} Oct 2015 07:28:00 GMT", 0, 0.05),
    ],
)
def test_pauses_grow_and_never_undercut_the_server(tries, retry_after, spread, seconds) -> None:
    assert next_pause_s(tries, retry_after, spread) == pytest.approx(seconds)


def test_a_token_with_a_line_end_is_the_token_and_what_is_none_is_refused_without_being_shown(address) -> None:
    with Client(address, token=f"{READ}\n") as client:
        assert client.search(["nile"], k=1).version == 3
    for wrong in ("", "two words", "line\nbreak", "tür"):
        with pytest.raises(ConfigError, match="not one word") as refusal:
            Client(address, token=wrong)
        assert not wrong or wrong not in str(refusal.value)


def test_what_is_no_address_is_refused() -> None:
    ports = ("localhost:8000", "http://:80", "http://127.0.0.1:99999")
    for wrong in (
        *ports,
        "ftp://x",
        "",
        8000,
        None,
        "http://[::1",
        "http://h/?key=1",
        "http://h#search",
        "http://h\n",
        "http://h\x00st",
        "http://a b",
    ):
        with pytest.raises(ConfigError, match="no address of a server"):
            Client(wrong)
    for wrong in ("http://user:secret@127.0.0.1", "https://secret@host:99999/path", "http://:se#cret@h"):
        with pytest.raises(ConfigError, match="give the server's token as token=") as refusal:
            Client(wrong, token=READ)
        assert not re.search("se#?cret", str(refusal.value))


@pytest.mark.parametrize("run", ["run.yaml", SimpleNamespace(search=lambda: None)])
def test_what_is_no_run_is_refused_with_what_to_give(run) -> None:
    with pytest.raises(ConfigError, match=r"in_process: .* is no run; give index.run of an Index, or load_run"):
        Client.in_process(run)


def test_no_query_is_refused_with_what_to_give(client) -> None:
    for ask in (lambda: client.search([]), lambda: client.explain([])):
        with pytest.raises(RefusedError, match="is empty; give at least one"):
            ask()


def test_one_vector_in_place_of_a_list_is_refused_with_how_to_send_it(client) -> None:
    with pytest.raises(RefusedError, match=r"one vector is sent as \[vector\]"):
        client.search(np.zeros(3, np.float32))


def test_a_time_that_is_no_number_above_0_is_refused(address, service) -> None:
    for wrong in (None, "2", True, math.nan, 0, -1):
        for make in (Client, AsyncClient):
            with pytest.raises(ConfigError, match=f"timeout_s is {wrong!r}; give a number of seconds above 0"):
                make(address, timeout_s=wrong)
            with pytest.raises(ConfigError, match="give a number of seconds above 0"):
                make.over(service, timeout_s=wrong)


def test_what_stands_in_no_address_is_an_error_of_the_package(address) -> None:
    with Client(address, token=READ) as client, pytest.raises(UnreachableError, match="URL too long"):
        client.passage("p" * 100_000)


def test_a_client_may_wait_for_ever(address, service) -> None:
    for client in (Client(address, token=READ, timeout_s=math.inf), Client.over(service, timeout_s=math.inf)):
        with client:
            assert client.search(["nile"], k=1).version == 3


def test_the_client_imports_without_ray_and_torch() -> None:
    program = "import sys, mvr_ray.client; sys.exit(len({'ray', 'torch', 'transformers'} & set(sys.modules)))"
    root = Path(__file__).resolve().parents[2]
    process = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_every_error_of_the_client_is_one_of_the_packages() -> None:
    assert all(issubclass(one, ClientError) for one in (RefusedError, UnavailableError, UnreachableError))
    assert issubclass(ClientError, MvrRayError)
