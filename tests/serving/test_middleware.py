"""Checks the middleware: tokens, slots, time and bytes, all refused in one shape before anything is searched."""

import asyncio
import io
import json
import logging
import threading

import pytest
from asgi import ask, call
from in_memory_index import InMemoryIndex
from version_store import version_catalog

from mvr_ray import logs
from mvr_ray.config import ServeConfig
from mvr_ray.serving.app import create_app
from mvr_ray.serving.auth import read_tokens
from mvr_ray.serving.proxy_limit import ProxyLimiter
from mvr_ray.serving.service import SearchService

READ, ADMIN = "read-" + "r" * 20, "admin-" + "a" * 20
NILE = {"queries": ["nile"], "k": 1}


def app(library: InMemoryIndex | None = None, *, tokens: bool = False, **limits: int):
    environ = {"MVR_RAY_READ_TOKEN": READ, "MVR_RAY_ADMIN_TOKEN": ADMIN} if tokens else {}
    return create_app(SearchService(library or InMemoryIndex(), ServeConfig(**limits)), read_tokens(None, environ))


GUARDED = [
    ("POST", "/v1/search"),
    ("POST", "/v1/explain"),
    ("GET", "/v1/passages/p1"),
    ("GET", "/v1/versions"),
    ("GET", "/v1/versions/1"),
    ("POST", "/v1/versions/1/rollback"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/nowhere"),
]


@pytest.mark.parametrize(("method", "path"), GUARDED)
def test_without_a_known_token_an_answer_says_only_how_to_send_one(method, path) -> None:
    application = app(tokens=True)
    for headers, code in (
        ([], "no_token"),
        ([(b"authorization", b"Basic cmVhZA==")], "no_token"),
        ([(b"authorization", b"Bearer ")], "no_token"),
        ([(b"authorization", b"Bearer " + READ[:-1].encode())], "wrong_token"),
        ([(b"authorization", b"Bearer \xff\xfe")], "wrong_token"),
    ):
        reply = call(application, method, path, headers=headers)
        assert (reply.status, reply.body["error"]["code"]) == (401, code)
        assert reply.headers["www-authenticate"].startswith('Bearer realm="mvr_ray"')
        assert READ[:-1] not in str(reply)


def test_a_known_token_opens_and_health_is_open_to_all() -> None:
    application = app(tokens=True)
    for token in (READ, ADMIN):
        assert call(application, "POST", "/v1/search", NILE, token=token).status == 200
    lower = [(b"authorization", f"bearer {READ}".encode())]
    assert call(application, "POST", "/v1/search", NILE, headers=lower).status == 200
    assert [call(application, "GET", path).status for path in ("/livez", "/readyz")] == [200, 200]


def test_only_an_admin_token_rolls_back(tmp_path) -> None:
    catalog = version_catalog(tmp_path)
    service = SearchService(InMemoryIndex(), ServeConfig(), catalog)
    application = create_app(service, read_tokens(None, {"MVR_RAY_READ_TOKEN": READ, "MVR_RAY_ADMIN_TOKEN": ADMIN}))
    for refusal in (
        call(application, "POST", "/v1/versions/1/rollback", token=READ),
        call(create_app(service), "POST", "/v1/versions/1/rollback"),
    ):
        assert (refusal.status, refusal.body["error"]["code"]) == (403, "admin_needed")
    assert [one.version for one in catalog.all()] == [1, 2]
    reply = call(application, "POST", "/v1/versions/1/rollback", token=ADMIN)
    fields = [reply.body[name] for name in ("version", "operation", "live")]
    assert (reply.status, *fields) == (200, 3, "rollback", True)


def test_a_rollback_that_cannot_be_opened_is_no_success(tmp_path) -> None:
    index = InMemoryIndex()
    service = SearchService(index, ServeConfig(), version_catalog(tmp_path, versions=3))
    index.state = index.state._replace(failure="too little memory")
    tokens = read_tokens(None, {"MVR_RAY_READ_TOKEN": READ, "MVR_RAY_ADMIN_TOKEN": ADMIN})
    reply = call(create_app(service, tokens), "POST", "/v1/versions/1/rollback", token=ADMIN)
    assert (reply.status, reply.body["error"]["code"]) == (503, "not_opened")
    assert "published again as 4" in reply.body["error"]["message"] and "too little memory" in str(reply.body)


def test_only_the_newest_version_is_promoted_and_only_by_an_admin(tmp_path) -> None:
    service = SearchService(InMemoryIndex(), ServeConfig(), version_catalog(tmp_path, versions=3))
    tokens = read_tokens(None, {"MVR_RAY_READ_TOKEN": READ, "MVR_RAY_ADMIN_TOKEN": ADMIN})
    application = create_app(service, tokens)
    replies = [
        call(application, "POST", f"/v1/versions/{number}/promote", token=token)
        for number, token in ((3, READ), (2, ADMIN), (9, ADMIN), (3, ADMIN))
    ]
    codes = [(reply.status, reply.body.get("error", {}).get("code")) for reply in replies]
    assert codes == [(403, "admin_needed"), (409, "not_newest"), (404, "unknown_version"), (200, None)]
    assert (replies[3].body["version"], replies[3].body["ready"]) == (3, True)
    (tmp_path / "more").mkdir()
    ahead = SearchService(InMemoryIndex(), ServeConfig(), version_catalog(tmp_path / "more", versions=4))
    reply = call(create_app(ahead, tokens), "POST", "/v1/versions/4/promote", token=ADMIN)
    assert (reply.status, reply.body["error"]["code"]) == (503, "not_opened")


def test_a_body_without_a_length_is_read_no_further_than_the_limit() -> None:
    chunks = [b"x" * 60] * 50
    reply = call(app(max_body_bytes=100), "POST", "/v1/search", chunks=chunks)
    assert (reply.status, reply.body["error"]["code"], reply.read) == (413, "body_too_large", 2)
    whole = [b'{"queries": ', b'["nile"], ', b'"k": 1}']
    assert call(app(max_body_bytes=100), "POST", "/v1/search", chunks=whole).status == 200


@pytest.mark.parametrize("timeout_ms", [b"0", b"1"])
def test_a_request_whose_senders_time_is_over_is_late_whatever_it_waited_for(timeout_ms) -> None:
    async def send_late() -> tuple[int, dict]:
        messages: list[dict] = []

        async def receive() -> dict:
            await asyncio.sleep(60)
            return {"type": "http.disconnect"}

        async def send(message: dict) -> None:
            messages.append(message)

        headers = [(b"x-timeout-ms", timeout_ms), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/search", "query_string": b"", "headers": headers}
        await app()(scope, receive, send)
        return messages[0]["status"], json.loads(messages[1]["body"])["error"]

    status, error = asyncio.run(send_late())
    assert (status, error["code"]) == (504, "timeout")
    assert error["message"] == f"no answer within {timeout_ms.decode()} ms"


@pytest.mark.parametrize("in_body", [True, False])
def test_a_request_that_is_given_up_counts_as_one_without_a_response_not_as_a_fault(in_body, caplog) -> None:
    index = InMemoryIndex()
    index.gate, has_begun = threading.Event(), threading.Event()
    search_text = index.search_text

    def wait_and_search(*args, **options):
        has_begun.set()
        assert index.gate.wait(20)
        return search_text(*args, **options)

    index.search_text = wait_and_search
    application, body = app(index), json.dumps(NILE).encode()
    messages = [{"type": "http.request", "body": body, "more_body": in_body}, {"type": "http.disconnect"}]

    async def receive() -> dict:
        return messages.pop(0)

    async def send(message: dict) -> None:
        raise AssertionError(f"nothing is sent: {message}")

    async def give_up() -> None:
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/search", "query_string": b"", "headers": headers}
        request = asyncio.create_task(application(scope, receive, send))
        if not in_body:  # as Ray Serve does when the sender or its proxy has gone
            assert await asyncio.to_thread(has_begun.wait, 20)
            request.cancel()
        await asyncio.wait([request])
        index.gate.set()
        assert in_body or request.cancelled()

    with caplog.at_level(logging.INFO, "mvr_ray"):
        asyncio.run(give_up())
    [line] = [record for record in caplog.records if record.name == "mvr_ray.serving.middleware"]
    assert line.levelname == "INFO" and "status=499" in line.getMessage()
    metrics = call(application, "GET", "/metrics").body
    counts = [line for line in metrics.splitlines() if line.startswith("mvr_ray_requests_total{") and "POST" in line]
    assert len(counts) == 1 and 'status="499"' in counts[0]


@pytest.mark.parametrize("encoding", [b"gzip", b"br", b"GZIP", b"gzip, identity"])
def test_a_body_that_is_declared_compressed_is_refused(encoding) -> None:
    reply = call(app(), "POST", "/v1/search", NILE, headers=[(b"content-encoding", encoding)])
    assert (reply.status, reply.body["error"]["code"]) == (415, "wrong_content_encoding")
    assert call(app(), "POST", "/v1/search", NILE, headers=[(b"content-encoding", b"identity")]).status == 200


@pytest.mark.parametrize("with_response", [True, False])
@pytest.mark.parametrize("at_proxy", [True, False])
def test_a_websocket_is_refused_by_a_response_or_closed(with_response, at_proxy) -> None:
    messages: list[dict] = []

    async def receive() -> dict:
        return {"type": "websocket.connect"}

    async def send(message: dict) -> None:
        messages.append(message)

    extensions = {"websocket.http.response": {}} if with_response else {}
    scope = {"type": "websocket", "path": "/v1/search", "query_string": b"", "headers": [], "extensions": extensions}
    server_app = ProxyLimiter(app(), 1, 1.0) if at_proxy else app()
    asyncio.run(server_app(scope, receive, send))
    if with_response:
        assert (messages[0]["type"], messages[0]["status"]) == ("websocket.http.response.start", 400)
        assert json.loads(messages[1]["body"])["error"]["code"] == "no_websocket"
    else:
        assert [message["type"] for message in messages] == ["websocket.close"]


@pytest.mark.parametrize("length", [b"101", b"9" * 5000])
def test_a_length_over_the_limit_is_refused_unread(length) -> None:
    reply = call(app(max_body_bytes=100), "POST", "/v1/search", headers=[(b"content-length", length)])
    assert (reply.status, reply.read) == (413, 0)


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    application, messages = app(timeout_ms=30), []

    async def silence() -> dict:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message) -> None:
        messages.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/search", "headers": [], "query_string": b""}
    asyncio.run(application(scope, silence, send))
    assert messages[0]["status"] == 408


@pytest.mark.chaos("flood over HTTP, 10x", "503 with Retry-After at the bound; what was let in is answered")
def test_no_more_than_max_waiting_are_accepted_and_the_others_are_refused_at_once(record_property) -> None:
    slow, places, num_tasks = InMemoryIndex(), 3, 30
    slow.gate.clear()
    application = app(slow, max_waiting=places, max_running=1, timeout_ms=60_000)

    async def flood() -> tuple[list, list]:
        tasks = [asyncio.create_task(ask(application, "POST", "/v1/search", NILE)) for _ in range(num_tasks)]
        refusals = []
        for reply in asyncio.as_completed(tasks):
            refusals.append(await reply)
            if len(refusals) == num_tasks - places:
                break
        health = await ask(application, "GET", "/livez")
        assert health.status == 200
        slow.gate.set()
        return refusals, [one for one in await asyncio.gather(*tasks) if one.status != 503]

    refusals, answers = asyncio.run(flood())
    assert {(one.status, one.body["error"]["code"]) for one in refusals} == {(503, "overloaded")}
    retries_s = [int(one.headers["retry-after"]) for one in refusals]
    assert min(retries_s) >= 1
    assert [one.status for one in answers] == [200] * places
    assert {row[0]["id"] for one in answers for row in one.body["results"]} == {"p1"}
    assert call(application, "POST", "/v1/search", NILE).status == 200
    figures = f"{num_tasks} asked, {len(refusals)} refused with Retry-After {max(retries_s)} s, {len(answers)} answered"
    record_property("figures", figures)


def test_a_place_is_free_again_when_the_work_has_ended_not_when_the_answer_was_late() -> None:
    slow = InMemoryIndex()
    slow.gate.clear()
    application = app(slow, max_waiting=1, max_running=1, timeout_ms=2000)

    async def run_requests() -> list[int]:
        late = await ask(application, "POST", "/v1/search", NILE)
        full = await ask(application, "POST", "/v1/search", NILE)
        slow.gate.set()
        for _ in range(10_000):
            after = await ask(application, "POST", "/v1/search", NILE)
            if after.status == 200:
                break
            await asyncio.sleep(0.001)
        return [late.status, full.status, after.status]

    assert asyncio.run(run_requests()) == [504, 503, 200]


def test_what_waited_past_its_time_is_never_begun() -> None:
    slow = InMemoryIndex()
    slow.gate.clear()
    searches: list[list[str]] = []
    slow_search = slow.search_text

    def search_and_count(texts, k, **options):
        searches.append(texts)
        return slow_search(texts, k, **options)

    slow.search_text = search_and_count
    application = app(slow, max_waiting=8, max_running=1, timeout_ms=60_000)

    async def run_requests() -> list[int]:
        first = asyncio.create_task(ask(application, "POST", "/v1/search", NILE))
        while not searches:
            await asyncio.sleep(0.001)
        headers = [(b"x-timeout-ms", b"40")]
        late = await asyncio.gather(*(ask(application, "POST", "/v1/search", NILE, headers=headers) for _ in range(4)))
        slow.gate.set()
        return [one.status for one in (await first, *late)]

    assert asyncio.run(run_requests()) == [200, 504, 504, 504, 504]
    assert len(searches) == 1


def test_the_sender_may_ask_for_less_time() -> None:
    slow = InMemoryIndex()
    slow.gate.clear()
    reply = call(app(slow), "POST", "/v1/search", NILE, headers=[(b"x-timeout-ms", b"40")])
    slow.gate.set()
    assert (reply.status, reply.body["error"]["message"]) == (504, "no answer within 40 ms")


def test_an_unexpected_error_is_a_500_whose_response_and_log_lines_carry_the_request_id(caplog) -> None:
    class FailingIndex(InMemoryIndex):
        def search_text(self, texts, k, **options):
            raise ZeroDivisionError("secret of the index")

    lines = io.StringIO()
    caplog.set_level(logging.INFO, "mvr_ray")
    caplog.handler.setFormatter(logs.JsonLines())
    caplog.handler.setStream(lines)
    application = app(FailingIndex(), max_waiting=1)
    for request in ("r1", "r2"):
        reply = call(application, "POST", "/v1/search", NILE, headers=[(b"x-request-id", request.encode())])
        assert (reply.status, reply.body["error"]["code"]) == (500, "internal")
        assert reply.headers["x-request-id"] == request and "secret" not in str(reply)
    records = [json.loads(line) for line in lines.getvalue().splitlines()]
    records = [one for one in records if one["logger"] == "mvr_ray.serving.middleware"]
    assert [(one["level"], one["request"]) for one in records] == [
        (level, request) for request in ("r1", "r2") for level in ("ERROR", "INFO")
    ]
    assert all("secret of the index" in one["exception"] for one in records if one["level"] == "ERROR")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "unknown_route"),
        ("DELETE", "/v1/search", 405, "wrong_method"),
        ("GET", "/v1/search/", 404, "unknown_route"),
    ],
)
def test_a_wrong_route_or_method_is_answered_like_every_error(method, path, status, code) -> None:
    reply = call(app(), method, path)
    assert (reply.status, reply.body["error"]["code"]) == (status, code)
    assert reply.body["error"].keys() == {"code", "field", "message", "hint"}
    assert status != 405 or reply.headers["allow"] == "POST"


def test_a_body_of_another_kind_is_not_read_as_json() -> None:
    for kind in (b"text/plain", b"application/x-www-form-urlencoded", b""):
        reply = call(app(), "POST", "/v1/search", NILE, headers=[(b"content-type", kind)])
        assert (reply.status, reply.body["error"]["code"]) == (415, "wrong_content_type")
    assert (
        call(app(), "POST", "/v1/search", NILE, headers=[(b"content-type", b"application/JSON; charset=utf-8")]).status
        == 200
    )


def test_a_request_has_an_id_its_own_where_it_is_a_plain_word() -> None:
    for request_id, is_valid in ((b"job-7.a_b", True), (b"a b", False), (b"x" * 65, False), (b"\xff", False)):
        answer_id = call(app(), "GET", "/livez", headers=[(b"x-request-id", request_id)]).headers["x-request-id"]
        assert (answer_id.encode("latin-1") == request_id) is is_valid
    assert (
        call(app(), "GET", "/nowhere").headers["x-request-id"] != call(app(), "GET", "/nowhere").headers["x-request-id"]
    )
