"""Passages by any id, versions, explanations, the encoder asked for, numbers that cannot be, and what is counted."""

import pytest
from asgi import call
from in_memory_index import PASSAGES, InMemoryIndex
from jsonschema import Draft202012Validator
from prometheus_client.parser import text_string_to_metric_families
from version_store import version_catalog

from mvr_ray.config import ServeConfig
from mvr_ray.deadline import Deadline
from mvr_ray.serving.app import create_app
from mvr_ray.serving.auth import read_tokens
from mvr_ray.serving.service import SearchService
from mvr_ray.types import Passage

ADMIN = "admin-" + "a" * 20
ODD = [
    "a/b",
    "wiki:1",
    "..",
    "../../etc/passwd",
    "a b?c#d&e",
    "é漢🙂",
    "%2e%2e",
    "100%",
    "a//b/",
    "\x00",
    "-",
    "search",
    "/",
    "/a",
    "a\nb",
    "a\n",
    "\r\n",
]


class OddIdsOnly(InMemoryIndex):
    """Holds a passage under every id of ODD."""

    def passages(self, ids):
        return {one: Passage(one, "Odd", PASSAGES[0].text) for one in ids if one in ODD}

    def view_spans(self, passage):
        return super().view_spans(PASSAGES[0])


def quote_all(passage_id: str) -> str:
    return "".join(f"%{byte:02X}" for byte in passage_id.encode())


def app(library: InMemoryIndex | None = None, catalog=None, **limits: int):
    tokens = read_tokens(None, {"MVR_RAY_ADMIN_TOKEN": ADMIN})
    return create_app(SearchService(library or InMemoryIndex(), ServeConfig(**limits), catalog), tokens)


def get(server_app, path: str):
    return call(server_app, "GET", path, token=ADMIN)


@pytest.mark.parametrize("passage_id", ODD)
def test_a_passage_is_found_by_its_id_whatever_it_holds(passage_id) -> None:
    reply = get(app(OddIdsOnly()), f"/v1/passages/{quote_all(passage_id)}")
    assert (reply.status, reply.body["id"], reply.body["text"]) == (200, passage_id, PASSAGES[0].text)
    assert reply.body["views"][1] == {"view": 1, "start": 18, "stop": 39, "text": "The Rhine is shorter."}


@pytest.mark.parametrize(
    "path", ["p9", "", "..%2F..%2Fetc%2Fpasswd", "../../etc/passwd", "%FF%FE", "%00", "p1/", "x" * 9000]
)
def test_an_id_that_the_index_lacks_is_unknown_and_reaches_no_file(path) -> None:
    reply = get(app(), f"/v1/passages/{path}")
    assert (reply.status, reply.body["error"]["code"]) == (404, "unknown_passage")


@pytest.mark.parametrize(
    ("version", "status", "code"),
    [("3", 200, None), ("99", 404, "unknown_version"), ("0", 404, "unknown_version"), ("3.0", 422, "wrong_type")],
)
def test_a_passage_is_that_of_the_version_that_is_named(version, status, code) -> None:
    reply = get(app(), f"/v1/passages/p1?version={version}")
    error = reply.body.get("error", {})
    assert (reply.status, error.get("code"), error.get("field")) == (status, code, code and "version")


def test_versions_tell_what_is_published_live_and_served(tmp_path) -> None:
    reply = get(app(catalog=version_catalog(tmp_path, versions=2)), "/v1/versions")
    assert (reply.body["index"], reply.body["live"], reply.body["serving"]) == ("library", 2, 3)
    assert [(one["version"], one["parent"], one["live"]) for one in reply.body["versions"]] == [
        (1, 0, False),
        (2, 1, True),
    ]


def test_one_version_tells_how_it_was_made(tmp_path) -> None:
    catalog = version_catalog(tmp_path)
    info = get(app(catalog=catalog), "/v1/versions/1").body
    assert (info["version"], info["live"], info["vectors"], info["index_params"]) == (1, False, 5, {"kind": "flat"})
    assert info["shard_list"][0]["bytes"] == len(b"vectors of version 1")


@pytest.mark.parametrize("number", ["0", "3", "-1", "9" * 100])
def test_a_version_that_is_not_there_is_unknown_to_show_and_to_roll_back(tmp_path, number) -> None:
    server_app = app(catalog=version_catalog(tmp_path))
    for reply in (
        get(server_app, f"/v1/versions/{number}"),
        call(server_app, "POST", f"/v1/versions/{number}/rollback", token=ADMIN),
    ):
        assert (reply.status, reply.body["error"]["code"]) == (404, "unknown_version")


@pytest.mark.parametrize("number", ["1.0", "1e0", "1_0", "+1", "%201", "01", "true", "%D9%A1", "x", "1%0A", "9" * 5000])
def test_a_version_that_is_no_whole_number_is_refused_as_one(tmp_path, number) -> None:
    server_app = app(catalog=version_catalog(tmp_path))
    for reply in (
        get(server_app, f"/v1/versions/{number}"),
        call(server_app, "POST", f"/v1/versions/{number}/rollback", token=ADMIN),
        call(server_app, "POST", f"/v1/versions/{number}/promote", token=ADMIN),
    ):
        assert (reply.status, reply.body["error"]["field"]) == (422, "n")
        assert number.isdigit() or "a version is a whole number, not " in reply.body["error"]["message"]


def test_a_roll_back_publishes_the_old_content_and_changes_no_version(tmp_path) -> None:
    catalog = version_catalog(tmp_path)
    server_app = app(catalog=catalog)
    before = [one.content for one in catalog.all()]
    assert call(server_app, "POST", "/v1/versions/1/rollback", token=ADMIN).body["version"] == 3
    listing = get(server_app, "/v1/versions").body
    assert listing["live"] == 3
    assert [one["content"] for one in listing["versions"]] == [*before, before[0]]


def test_of_two_publishers_the_second_gets_a_conflict(tmp_path, monkeypatch) -> None:
    catalog = version_catalog(tmp_path)
    create_once = catalog.store.create_once

    def late(path, data):
        if catalog.all()[-1].version == 2:
            monkeypatch.setattr(catalog.store, "create_once", create_once)
            other_catalog = type(catalog)(catalog.store, "library")
            other_catalog.rollback(2, Deadline.after(60))
        return create_once(path, data)

    monkeypatch.setattr(catalog.store, "create_once", late)
    reply = call(app(catalog=catalog), "POST", "/v1/versions/1/rollback", token=ADMIN)
    assert (reply.status, reply.body["error"]["code"]) == (409, "publish_conflict")
    assert [one.version for one in catalog.all()] == [1, 2, 3]


def test_explain_gives_every_view_of_the_passages_with_every_question() -> None:
    reply = call(app(), "POST", "/v1/explain", {"questions": ["nile", "rhine"], "passages": ["p1"]}, token=ADMIN)
    [passage] = reply.body["passages"]
    assert [view["scores"] for view in passage["views"]] == [[1.0, 0.0], [0.0, 1.0]]
    unknown = call(app(), "POST", "/v1/explain", {"questions": ["nile"], "passages": ["p9"]}, token=ADMIN)
    assert (unknown.status, unknown.body["error"]["code"]) == (404, "unknown_passage")


@pytest.mark.parametrize(("path", "key"), [("/v1/search", "queries"), ("/v1/explain", "questions")])
def test_an_encoder_that_is_not_the_index_s_is_a_conflict_that_names_both(path, key) -> None:
    right = {key: ["nile"], "encoder_fingerprint": "f" * 16}
    assert call(app(), "POST", path, right, token=ADMIN).status == 200
    reply = call(app(), "POST", path, right | {"encoder_fingerprint": "0123abcd"}, token=ADMIN)
    assert (reply.status, reply.body["error"]["code"]) == (409, "encoder_mismatch")
    assert "0123abcd" in reply.body["error"]["message"] and "f" * 16 in reply.body["error"]["message"]


RAW = [
    (b'{"queries": [[NaN, 0, 0]]}', "not_finite", "queries.0.0"),
    (b'{"queries": [[1, -Infinity, 0]]}', "not_finite", "queries.0.1"),
    (b'{"queries": [[1e999, 0, 0]]}', "not_finite", "queries.0.0"),
    (b'{"queries": ["x"], "min_coverage": NaN}', "not_finite", "min_coverage"),
    (b'{"queries": [[0, 0, 0]]}', "zero_vector", "queries.0"),
    (b'{"queries": [[1, 0, 0], [1e-60, 0, 0]]}', "zero_vector", "queries.1"),
    (b'{"queries": [[1e30, 0, 0]]}', "vector_too_long", "queries.0"),
    (b'{"queries": ["x"], "k": 1' + b"0" * 5000 + b"}", "not_json", ""),
    (b'{"queries": ["x"], "k": 1' + b"0" * 300 + b"}", "k_out_of_range", "k"),
    (b'{"queries": ["\xff\xfe"]}', "not_json", ""),
    (b'{"queries": ["\\ud800"]}', "not_json", ""),
    (b'{"\\udfff": 1}', "not_json", ""),
    (b"[" * 100_000, "not_json", ""),
    (b"", "not_json", ""),
    (b"null", "wrong_type", ""),
    ('{"queries": ["\u200b\u0301\ufffd"]}'.encode(), "empty_query", "queries.0"),
    (b'{"queries": ["' + b"y" * 1_000_000 + b'"]}', "query_too_long", "queries.0"),
]


@pytest.mark.parametrize(("raw", "code", "field"), RAW, ids=[f"{code}-{raw[:24]!r}" for raw, code, _ in RAW])
def test_what_no_search_can_use_is_refused_by_name(raw, code, field) -> None:
    reply = call(app(), "POST", "/v1/search", raw=raw, token=ADMIN)
    assert (reply.status, reply.body["error"]["code"], reply.body["error"]["field"]) == (422, code, field)


def samples(server_app) -> dict:
    text = get(server_app, "/metrics").body
    return {
        (one.name, *sorted(one.labels.values())): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_requests_answers_and_stages_are_counted() -> None:
    server_app = app(InMemoryIndex(missing=1))
    partly = {"queries": ["nile", "hill"], "min_coverage": 0.5}
    for _ in range(3):
        assert call(server_app, "POST", "/v1/search", partly, token=ADMIN).status == 200
    assert call(server_app, "POST", "/v1/search", {"queries": ["nile"]}, token=ADMIN).status == 503
    assert call(server_app, "POST", "/v1/search", {"queries": [""]}, token=ADMIN).status == 422
    assert get(server_app, "/v1/passages/p1").status == get(server_app, "/v1/passages/p2").status == 200
    assert call(server_app, "GET", "/nobody/knows").status == 401
    counts = samples(server_app)
    assert [counts["mvr_ray_requests_total", *sorted((s, "/v1/search", "POST"))] for s in ("200", "503", "422")] == [
        3,
        1,
        1,
    ]
    assert counts["mvr_ray_requests_total", "/v1/passages/{id:passage_id}", "200", "GET"] == 2
    assert counts["mvr_ray_requests_total", "401", "GET", "none"] == 1
    assert (counts["mvr_ray_answers_total", "false"], counts["mvr_ray_answers_total", "true"]) == (3, 0)
    assert (counts["mvr_ray_partial_answers_total",], counts["mvr_ray_queries_total",]) == (3, 6)
    coverage, version = counts["mvr_ray_coverage_share", "library"], counts["mvr_ray_index_version", "library"]
    assert (coverage, version) == (pytest.approx(2 / 3), 3)
    assert counts["mvr_ray_stage_seconds_count", "queue"] == counts["mvr_ray_stage_seconds_count", "service"] == 7
    assert counts["mvr_ray_requests_in_flight",] == 0
    assert ADMIN not in str(counts)


def test_a_replica_that_has_not_answered_yet_reports_neither_coverage_nor_version() -> None:
    """A coverage of 0 would be an alarm."""
    assert not [key for key in samples(app()) if key[0] in ("mvr_ray_coverage_share", "mvr_ray_index_version")]


def test_a_server_whose_searches_need_words_that_its_version_lacks_is_not_ready() -> None:
    reply = call(create_app(SearchService(InMemoryIndex(), ServeConfig(), hybrid=2.0)), "GET", "/readyz")
    [problem] = reply.body["problems"]
    assert reply.status == 503 and "version 3 has no words of its passages, which search.hybrid needs" in problem


def test_the_description_names_every_route_its_bodies_limits_and_token() -> None:
    openapi = get(app(max_k=77), "/openapi.json").body
    assert openapi["paths"].keys() >= {
        "/v1/search",
        "/v1/explain",
        "/v1/passages/{id}",
        "/v1/versions/{n}/rollback",
        "/metrics",
    }
    assert openapi["components"]["schemas"]["SearchRequest"]["properties"]["k"]["maximum"] == 77
    assert openapi["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    metrics = openapi["paths"]["/metrics"]["get"]["responses"]
    assert (*metrics["200"]["content"], *metrics["401"]["content"]) == ("text/plain", "application/json")
    for path, methods in openapi["paths"].items():
        for method in methods.values():
            any_request = {"200", "408", "413", "421", "431", "502", "503", "504"}  # the last three of a proxy
            assert method["description"] and method["responses"].keys() >= any_request, path


@pytest.mark.parametrize(
    ("model", "body"),
    [("SearchRequest", {"queries": []}), ("ExplainRequest", {"questions": []}), ("EmbeddingsRequest", {"input": []})],
)
def test_an_empty_list_does_not_fit_the_description_as_it_is_refused(model, body) -> None:
    openapi = get(app(), "/openapi.json").body
    schema = Draft202012Validator({"$ref": f"#/components/schemas/{model}", "components": openapi["components"]})
    assert not schema.is_valid(body)
    assert schema.is_valid({name: ["nile"] for name in body})


@pytest.mark.parametrize(
    ("path", "methods"), [("/v1/versions", "GET, HEAD, POST"), ("/v1/search", "POST"), ("/livez", "GET, HEAD")]
)
def test_an_answer_to_a_wrong_method_names_all_right_ones(path, methods) -> None:
    reply = call(app(), "DELETE", path, token=ADMIN)
    assert (reply.status, reply.body["error"]["code"], reply.headers["allow"]) == (405, "wrong_method", methods)


def test_what_is_no_number_in_json_is_none_here() -> None:
    for field, value in (("k", True), ("k", "5"), ("min_coverage", False), ("text", 1), ("timeout_ms", "100")):
        reply = call(app(), "POST", "/v1/search", {"queries": ["nile"], field: value}, token=ADMIN)
        assert (reply.status, reply.body["error"]["code"]) == (422, "wrong_type"), field


@pytest.mark.parametrize("path", ["/", "/livez", "/readyz", "/v1/versions", "/v1/versions/9", "/v1/search", "/nowhere"])
def test_head_has_the_status_and_the_headers_of_get(path) -> None:
    server = app()
    get, head = (call(server, method, path, token=ADMIN) for method in ("GET", "HEAD"))
    assert (head.status, head.headers["content-type"]) == (get.status, get.headers["content-type"])
    assert head.headers.get("allow") == get.headers.get("allow")
