"""The bound in Ray Serve's proxy: what is too much never reaches a replica, all else goes through as it is."""

import asyncio
import json

import pytest
from asgi import Reply, ask, call

from mvr_ray.serving import door


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
    guarded = door.Door(replica, max_waiting=2)

    async def story() -> tuple[list[Reply], Reply, list[Reply]]:
        inside = [asyncio.create_task(ask(guarded, "POST", "/v1/search")) for _ in range(2)]
        while len(replica.came) < 2:
            await asyncio.sleep(0)
        refused = await ask(guarded, "POST", "/v1/search")
        replica.gate.set()
        answered = [await one for one in inside]
        return answered, refused, [await ask(guarded, "POST", "/v1/search") for _ in range(5)]

    answered, refused, after = asyncio.run(story())
    assert [one.status for one in (*answered, *after)] == [200] * 7
    assert json.loads(answered[0].body) == {"own": 1} and answered[0].headers["x-own"] == "kept"
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    assert refused.body["error"]["code"] == "overloaded" and "2 requests are here" in refused.body["error"]["message"]
    assert len(replica.came) == 7


def test_a_request_whose_answer_has_gone_keeps_nobody_out_and_one_that_has_more_to_say_does():
    more, end, over = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def lingering(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{", "more_body": True})
        more.set()
        await end.wait()
        await send({"type": "http.response.body", "body": b"}"})
        await over.wait()

    guarded = door.Door(lingering, max_waiting=1)

    async def story() -> list[int]:
        counts = []
        first = asyncio.create_task(ask(guarded, "POST", "/v1/search"))
        await more.wait()
        counts.append((await ask(guarded, "POST", "/v1/search")).status)
        end.set()
        while guarded.inside:
            await asyncio.sleep(0)
        second = asyncio.create_task(ask(guarded, "POST", "/v1/search"))
        while not (first.done() or second.done()) and guarded.inside:
            await asyncio.sleep(0)
        over.set()
        counts += [(await first).status, (await second).status, guarded.inside]
        return counts

    assert asyncio.run(asyncio.wait_for(story(), 30)) == [503, 200, 200, 0]


def test_a_request_that_breaks_gives_its_place_back():
    replica = Replica()
    replica.gate.set()
    guarded = door.Door(replica, max_waiting=1)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="the replica died"):
            call(guarded, "POST", "/v1/broken")
    assert call(guarded, "POST", "/v1/search").status == 200


def test_probes_pages_and_metrics_are_never_refused():
    replica = Replica()
    replica.gate.set()
    guarded = door.Door(replica, max_waiting=0)
    assert call(guarded, "POST", "/v1/search").status == 503
    assert [call(guarded, "GET", path).status for path in ("/livez", "/readyz", "/metrics", "/")] == [200] * 4


def test_the_wait_that_is_told_is_the_time_that_those_inside_take(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(door.time, "monotonic", lambda: now[0])

    async def slow(scope, receive, send) -> None:
        now[0] += 30.0
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    guarded = door.Door(slow, max_waiting=1)
    for _ in range(100):
        call(guarded, "POST", "/v1/search")
    guarded.max_waiting = 0
    assert call(guarded, "POST", "/v1/search").headers["retry-after"] == "30"


def test_what_the_environment_says_already_stays_and_serve_finds_the_callback(monkeypatch):
    told = {door.MAX_WAITING: "7"}
    door.announce(64, told)
    assert told == {
        door.MAX_WAITING: "7",
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "mvr_ray.serving.door.middlewares",
    }
    monkeypatch.setenv(door.MAX_WAITING, "7")
    [around] = door.middlewares()
    assert around.cls is door.Door and around.kwargs == {"max_waiting": 7}
