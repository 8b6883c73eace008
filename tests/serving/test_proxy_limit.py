"""The bound in Ray Serve's proxy: what is too much never reaches a replica, all else goes through as it is."""

import asyncio
import contextlib
import json
import time

import pytest
from asgi import Reply, ask, call

from mvr_ray.config import ServeConfig
from mvr_ray.serving import admission, proxy_limit


def limiter(app, max_waiting: int, timeout_s: float = 60.0) -> proxy_limit.ProxyLimiter:
    return proxy_limit.ProxyLimiter(app, max_waiting, timeout_s)


class Replica:
    """Answers when it may, and remembers what came."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.came: list[str] = []

    async def __call__(self, scope, receive, send) -> None:
        self.came.append(scope["path"])
        await self.gate.wait()
        if scope["path"] == "/v1/broken":
            raise RuntimeError("the replica died")
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"kept")]})
        await send({"type": "http.response.body", "body": b'{"own": 1}'})


def test_requests_beyond_the_bound_are_refused_at_once_in_the_shape_of_errors_and_places_come_back():
    replica = Replica()
    limited_app = limiter(replica, max_waiting=2)

    async def run_requests() -> tuple[list[Reply], Reply, list[Reply]]:
        inside = [asyncio.create_task(ask(limited_app, "POST", "/v1/search")) for _ in range(2)]
        while len(replica.came) < 2:
            await asyncio.sleep(0)
        refusal = await ask(limited_app, "POST", "/v1/search")
        replica.gate.set()
        answers = [await one for one in inside]
        return answers, refusal, [await ask(limited_app, "POST", "/v1/search") for _ in range(5)]

    answers, refusal, after = asyncio.run(run_requests())
    assert [one.status for one in (*answers, *after)] == [200] * 7
    assert json.loads(answers[0].body) == {"own": 1} and answers[0].headers["x-own"] == "kept"
    assert (refusal.status, refusal.headers["retry-after"]) == (503, "1")
    assert (
        refusal.body["error"]["code"] == "overloaded" and "2 requests are in flight" in refusal.body["error"]["message"]
    )
    assert len(replica.came) == 7


def test_a_request_whose_answer_is_sent_frees_its_slot_and_one_with_more_to_send_does_not():
    more, end, over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def lingering(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})
        more.set()
        await end.wait()
        await send({"type": "http.response.body", "body": b"}"})
        await over.wait()

    limited_app = limiter(lingering, max_waiting=1)

    async def run_requests() -> list[int]:
        counts = []
        first = asyncio.create_task(ask(limited_app, "POST", "/v1/search"))
        await more.wait()
        counts.append((await ask(limited_app, "POST", "/v1/search")).status)
        end.set()
        while limited_app.admission.in_flight:
            await asyncio.sleep(0)
        second = asyncio.create_task(ask(limited_app, "POST", "/v1/search"))
        while not (first.done() or second.done()) and limited_app.admission.in_flight:
            await asyncio.sleep(0)
        over.set()
        counts += [(await first).status, (await second).status, limited_app.admission.in_flight]
        return counts

    assert asyncio.run(asyncio.wait_for(run_requests(), 30)) == [503, 200, 200, 0]


def test_a_request_that_breaks_gives_its_place_back():
    replica = Replica()
    replica.gate.set()
    limited_app = limiter(replica, max_waiting=1)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="the replica died"):
            call(limited_app, "POST", "/v1/broken")
    assert call(limited_app, "POST", "/v1/search").status == 200


def test_probes_pages_and_metrics_are_never_refused():
    replica = Replica()
    replica.gate.set()
    limited_app = limiter(replica, max_waiting=0)
    assert call(limited_app, "POST", "/v1/search").status == 503
    assert [call(limited_app, "GET", path).status for path in ("/livez", "/readyz", "/metrics", "/")] == [200] * 4


def test_the_retry_time_is_the_time_that_accepted_requests_take(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(admission.time, "monotonic", lambda: now[0])

    async def slow(scope, receive, send) -> None:
        now[0] += 30.0
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    limited_app = limiter(slow, max_waiting=1)
    for _ in range(100):
        call(limited_app, "POST", "/v1/search")
    limited_app.admission.max_waiting = 0
    assert call(limited_app, "POST", "/v1/search").headers["retry-after"] == "30"


async def hanging(scope, receive, send) -> None:
    await asyncio.Event().wait()


async def hanging_and_deaf(scope, receive, send) -> None:
    """Like Ray Serve's proxy: a request that is cancelled ends without a response and without an error."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()


async def replica_without_answer(scope, receive, send) -> None:
    """Like Ray Serve's proxy whose replica was killed."""


@pytest.mark.parametrize("app", [hanging, hanging_and_deaf])
@pytest.mark.parametrize(("path", "header_ms", "allowed_ms"), [("/v1/search", 40, 40), ("/readyz", None, 80)])
def test_a_replica_that_hangs_is_answered_for_when_the_time_of_the_request_is_over(app, path, header_ms, allowed_ms):
    limited_app = limiter(app, max_waiting=1, timeout_s=0.08)
    headers = [(b"x-timeout-ms", str(header_ms).encode())] if header_ms else []
    for _ in range(2):
        start_s = time.monotonic()
        reply = call(limited_app, "POST", path, headers=[*headers, (b"x-request-id", b"r1")])
        assert allowed_ms / 1000 <= time.monotonic() - start_s < 5
        assert (reply.status, reply.body["error"]["code"], reply.headers["x-request-id"]) == (504, "timeout", "r1")
        assert reply.body["error"]["message"] == f"no answer within {allowed_ms} ms"


def test_a_replica_that_ended_without_an_answer_is_answered_for_at_once():
    reply = call(limiter(replica_without_answer, max_waiting=1), "POST", "/v1/search")
    assert (reply.status, reply.body["error"]["code"], reply.headers["retry-after"]) == (503, "unavailable", "1")
    assert reply.headers["x-request-id"]


def test_a_replica_gets_the_request_id_that_the_proxy_answers_with():
    ids = []

    async def replica(scope, receive, send) -> None:
        ids.extend(value.decode() for name, value in scope["headers"] if name == b"x-request-id")

    for own in (b"job-7", b"not a word", None):
        headers = [] if own is None else [(b"x-request-id", own)]
        reply = call(limiter(replica, max_waiting=1), "GET", "/livez", headers=headers)
        assert reply.headers["x-request-id"] == ids[-1]
    assert ids[0] == "job-7" and len(set(ids)) == len(ids) == 3


def test_serve_finds_the_callback_and_its_limits_by_variables(monkeypatch):
    variables = proxy_limit.proxy_variables(ServeConfig(max_waiting=7, timeout_ms=1500))
    assert variables == {
        proxy_limit.MAX_WAITING: "7",
        proxy_limit.TIMEOUT_MS: "1500",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "mvr_ray.serving.proxy_limit.middlewares",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    [middleware] = proxy_limit.middlewares()
    assert middleware.cls is proxy_limit.ProxyLimiter
    assert middleware.kwargs == {"max_waiting": 7, "timeout_s": 1.5}
