"""Whatever is sent to any route is answered by a status that the route documents, never by a fault of the server."""

import json
import tempfile
from pathlib import Path
from urllib.parse import quote

import pytest
from asgi import call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from library import Library
from shelf import shelf

from mvr_ray.config import ServeConfig
from mvr_ray.serving.app import create_app
from mvr_ray.serving.service import SearchService
from mvr_ray.serving.tokens import read_tokens

READ, ADMIN = "read-" + "r" * 20, "admin-" + "a" * 20
LIMITS = ServeConfig(max_batch=4, max_k=20, max_query_chars=50, max_body_bytes=4000)

numbers = st.integers() | st.integers(-3, 30) | st.floats() | st.sampled_from([10**400, -(10**400), 1e308, 5e-324])
leaves = st.none() | st.booleans() | numbers | st.text() | st.sampled_from(["nile", "p1", "f" * 16])
values = st.recursive(leaves, lambda one: st.lists(one, max_size=4) | st.dictionaries(st.text(), one, max_size=3))
vectors = st.lists(st.lists(numbers, min_size=2, max_size=4), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def served():
    with tempfile.TemporaryDirectory() as folder:
        service = SearchService(Library(), LIMITS, shelf(Path(folder)))
        yield create_app(service, read_tokens(None, {"MVR_RAY_READ_TOKEN": READ, "MVR_RAY_ADMIN_TOKEN": ADMIN}))


def bodies(schema: dict) -> st.SearchStrategy[bytes]:
    """Objects with the request's own fields, any other JSON (NaN and lone surrogates too), and any bytes."""
    likely = {name: values | vectors | st.lists(st.text(), max_size=3) for name in schema["properties"]}
    own = st.fixed_dictionaries({}, optional=likely)
    needed = {name: st.lists(st.sampled_from(["nile", "hill rhine"]), min_size=1) for name in schema["required"]}
    others = {name: one for name, one in likely.items() if name not in needed}
    valid = st.fixed_dictionaries(needed, optional=others)
    return (own | valid | values).map(lambda one: json.dumps(one).encode()) | st.binary(max_size=5000)


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_request_gets_a_documented_status(served, data) -> None:
    told = served.openapi()
    path, methods = data.draw(st.sampled_from(sorted(told["paths"].items())))
    method, described = data.draw(st.sampled_from(sorted(methods.items())))
    parts = {
        "id": data.draw(st.text() | st.sampled_from(["p1", "..", "a/b"])),
        "n": data.draw((st.text() | st.integers().map(str) | st.just("1")).filter(lambda n: "/" not in n)),
    }
    for name, value in parts.items():
        path = path.replace(f"{{{name}}}", quote(value, safe="", errors="surrogatepass"))
    sent = b""
    if "requestBody" in described:
        name = described["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        sent = data.draw(bodies(told["components"]["schemas"][name]))
    token = data.draw(st.sampled_from([READ, ADMIN, ADMIN, "wrong", None]))
    extra = data.draw(
        st.lists(st.tuples(st.sampled_from([b"x-timeout-ms", b"x-request-id", b"accept"]), st.binary(max_size=9)))
    )
    kind = data.draw(st.sampled_from([b"application/json"] * 4 + [b"text/plain", b"\xff"]))
    chunked = data.draw(st.booleans())
    reply = call(
        served,
        method.upper(),
        path,
        raw=sent,
        token=token,
        headers=[*extra, (b"content-type", kind)],
        chunks=[sent[:7], sent[7:]] if chunked else None,
    )
    assert str(reply.status) in described["responses"], (method, path, reply)
    assert reply.status < 500 or reply.status in (503, 504)
    if reply.status != 200:
        assert reply.body["error"].keys() == {"code", "field", "message", "hint"}
        assert reply.body["error"]["code"] and reply.body["error"]["hint"]
