"""Whatever is sent to any route is answered by a status that the route documents, never by a fault of the server."""

import json
import tempfile
from collections import Counter
from pathlib import Path
from urllib.parse import quote

import pytest
from asgi import Reply, call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_memory_index import InMemoryIndex
from version_store import version_catalog

from mvr_ray.config import ServeConfig
from mvr_ray.serving.app import create_app
from mvr_ray.serving.auth import read_tokens
from mvr_ray.serving.service import SearchService

READ, ADMIN = "read-" + "r" * 20, "admin-" + "a" * 20
LIMITS = ServeConfig(max_batch=4, max_k=20, max_query_chars=50, max_body_bytes=4000)
once = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

numbers = st.integers() | st.integers(-3, 30) | st.floats() | st.sampled_from([10**400, -(10**400), 1e308, 5e-324])
leaves = st.none() | st.booleans() | numbers | st.text() | st.sampled_from(["nile", "p1", "f" * 16])
values = st.recursive(leaves, lambda one: st.lists(one, max_size=4) | st.dictionaries(st.text(), one, max_size=3))

words = st.sampled_from(["nile", "hill rhine", "", "\u200b", "x" * 51, "\ud800"]) | st.text(max_size=60)
vectors = st.lists(st.lists(st.floats(-2, 2) | numbers, min_size=3, max_size=3), min_size=1, max_size=4)
accepted = {
    "queries": st.lists(st.sampled_from(["nile", "hill rhine"]), min_size=1, max_size=4)
    | st.lists(st.lists(st.floats(0.5, 2), min_size=3, max_size=3), min_size=1, max_size=4),
    "questions": st.lists(st.just("nile"), min_size=1, max_size=4),
    "passages": st.lists(st.sampled_from(["p1", "p2"]), min_size=1, max_size=3, unique=True),
    "k": st.integers(1, 20),
    "text": st.booleans(),
    "timeout_ms": st.none() | st.integers(1000, 20_000),
    "min_coverage": st.none() | st.floats(0, 1),
    "version": st.none(),
    "filter": st.none(),
    "fields": st.just([]),
    "encoder_fingerprint": st.none() | st.just("f" * 16),
    "hybrid": st.sampled_from([None, "off"]),
}
doubtful = {
    "queries": st.lists(words, min_size=1, max_size=5) | vectors,
    "questions": st.lists(words, min_size=1, max_size=5),
    "passages": st.lists(st.sampled_from(["p1", "p2", "p9", "../p1"]) | st.text(), max_size=3),
    "k": st.integers(-1, 25),
    "timeout_ms": st.integers(-1, 20_000),
    "min_coverage": st.floats(-0.5, 1.5) | st.just(1),
    "version": st.integers(0, 4) | st.just(10**30),
    "filter": st.dictionaries(st.sampled_from(["id", "title", "and", "or", "not", "x"]), values, max_size=3),
    "fields": st.lists(st.sampled_from(["year", ""]), max_size=1),
    "encoder_fingerprint": st.just("other"),
    "hybrid": st.sampled_from([0, 2.5, -1, "rrf", "on"]),
}


@pytest.fixture(scope="module")
def api():
    with tempfile.TemporaryDirectory() as folder:
        service = SearchService(InMemoryIndex(), LIMITS, version_catalog(Path(folder)))
        yield create_app(service, read_tokens(None, {"MVR_RAY_READ_TOKEN": READ, "MVR_RAY_ADMIN_TOKEN": ADMIN}))


def check(reply: Reply, operation: dict, body: object) -> None:
    assert str(reply.status) in operation["responses"], (body, reply)
    assert reply.status < 500 or reply.status in (503, 504)
    if reply.status != 200:
        assert reply.body["error"].keys() == {"code", "field", "message", "hint"}
        assert reply.body["error"]["code"] and reply.body["error"]["hint"]


@given(data=st.data())
@settings(once, max_examples=200)
def test_every_request_gets_a_documented_status(api, data) -> None:
    openapi = api.openapi()
    path, methods = data.draw(st.sampled_from(sorted(openapi["paths"].items())))
    method, operation = data.draw(st.sampled_from(sorted(methods.items())))
    parts = {
        "id": data.draw(st.text() | st.sampled_from(["p1", "..", "a/b"])),
        "n": data.draw((st.text() | st.integers().map(str) | st.just("1")).filter(lambda n: "/" not in n)),
    }
    for name, value in parts.items():
        path = path.replace(f"{{{name}}}", quote(value, safe="", errors="surrogatepass"))
    body = data.draw(values.map(lambda one: json.dumps(one).encode()) | st.binary(max_size=5000))
    token = data.draw(st.sampled_from([READ, ADMIN, ADMIN, "wrong", None]))
    names = st.sampled_from([b"x-timeout-ms", b"x-request-id", b"accept", b"content-type"])
    headers = data.draw(st.lists(st.tuples(names, st.binary(max_size=9)), max_size=2))
    chunks = [body[:7], body[7:]] if data.draw(st.booleans()) else None
    check(call(api, method.upper(), path, raw=body, token=token, headers=headers, chunks=chunks), operation, path)


@pytest.mark.parametrize("path", ["/v1/search", "/v1/explain"])
def test_every_body_made_of_the_described_fields_gets_a_documented_status(api, path) -> None:
    """Two fields at most have a value that may be refused, so that many a body is accepted."""
    openapi = api.openapi()
    operation = openapi["paths"][path]["post"]
    name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    schema = openapi["components"]["schemas"][name]
    statuses = Counter[int]()

    @given(data=st.data())
    @settings(max_examples=200)
    def send(data) -> None:
        odd = data.draw(st.lists(st.sampled_from(sorted(schema["properties"])), max_size=2))
        fields = {
            field: st.one_of(*[doubtful.get(field, values)] * 12, values) if field in odd else accepted[field]
            for field in schema["properties"]
        }
        required_fields = {field: fields.pop(field) for field in schema["required"]}
        body = data.draw(st.fixed_dictionaries(required_fields, optional=fields))
        reply = call(api, "POST", path, raw=json.dumps(body).encode(), token=READ)
        check(reply, operation, body)
        statuses[reply.status] += 1
        if reply.status == 200 and path == "/v1/search":
            assert [len(row) for row in reply.body["results"]] == [min(int(body.get("k", 10)), 3)] * len(
                body["queries"]
            )

    send()
    assert statuses[200] > 40 and statuses[422] > 5


def test_a_search_of_a_version_that_is_not_served_is_documented(api) -> None:
    reply = call(api, "POST", "/v1/search", {"queries": ["nile"], "version": 10**30}, token=READ)
    assert reply.status == 404
    check(reply, api.openapi()["paths"]["/v1/search"]["post"], "version 10**30")
