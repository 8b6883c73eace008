"""Checks the HTTP app: hits with the snippet that matched, and refusals that a program can act on."""

import threading

import pytest
from asgi import call
from in_memory_index import PASSAGES, InMemoryIndex
from version_store import version_catalog

from mvr_ray.config import ServeConfig
from mvr_ray.deadline import Deadline
from mvr_ray.explanation import Explanation
from mvr_ray.serving import schemas
from mvr_ray.serving.app import create_app
from mvr_ray.serving.schemas import RequestError, first_problem
from mvr_ray.serving.service import SearchService
from mvr_ray.types import Exactness

SHORT = [(b"x-timeout-ms", b"30000")]


def app(library: InMemoryIndex | None = None, **limits: int):
    return create_app(SearchService(library or InMemoryIndex(), ServeConfig(**limits)))


def test_a_question_is_answered_by_its_passage_and_the_snippet_that_matched() -> None:
    reply = call(app(), "POST", "/v1/search", {"queries": ["Where is the Rhine?"], "k": 1})
    assert reply.status == 200
    assert (reply.body["index"], reply.body["version"], reply.body["coverage"]["share"]) == ("library", 3, 1.0)
    assert reply.body["exact"] == {"certified": True, "method": "flat", "rounds": 1, "rescored": 0, "recall": None}
    [[hit]] = reply.body["results"]
    assert (hit["id"], hit["title"], hit["score"], hit["view"]) == ("p1", "Rivers", 1.0, 1)
    assert hit["snippet"] == {"start": 18, "stop": 39, "text": "The Rhine is shorter."}


def test_an_approximate_answer_carries_the_recall_that_was_measured() -> None:
    library = InMemoryIndex(exact=Exactness(False, "hnsw", 1, 12, 0.9731))
    reply = call(app(library), "POST", "/v1/search", {"queries": ["nile"]})
    exact = {"certified": False, "method": "hnsw", "rounds": 1, "rescored": 12, "recall": 0.9731}
    assert reply.body["exact"] == exact


def test_text_and_its_vector_get_the_same_hits() -> None:
    texts = call(app(), "POST", "/v1/search", {"queries": ["nile", "hill"], "k": 3}).body["results"]
    vectors = call(app(), "POST", "/v1/search", {"queries": [[1, 0, 0], [0, 0, 1]], "k": 3}).body["results"]
    assert texts == vectors
    assert [[hit["id"] for hit in row] for row in texts] == [["p1", "p3", "p2"], ["p2", "p3", "p1"]]


def test_k_beyond_the_corpus_gets_every_passage_once() -> None:
    [row] = call(app(), "POST", "/v1/search", {"queries": ["nile"], "k": 50}).body["results"]
    assert sorted(hit["id"] for hit in row) == [passage.id for passage in PASSAGES]


def test_a_feedback_view_has_no_snippet() -> None:
    reply = call(app(InMemoryIndex(feedback=True)), "POST", "/v1/search", {"queries": ["hill"], "k": 1})
    [[hit]] = reply.body["results"]
    assert (hit["feedback"], hit["view"], hit["snippet"]) == (True, 2, None)


def test_texts_stay_away_when_they_are_not_asked_for() -> None:
    [[hit]] = call(app(), "POST", "/v1/search", {"queries": ["hill"], "k": 1, "text": False}).body["results"]
    assert (hit["id"], hit["text"], hit["snippet"]) == ("p2", None, None)


REFUSALS = [
    ({"queries": ["x"], "k": 0}, "k_out_of_range", "k", "k is 0"),
    ({"queries": ["x"], "k": 21}, "k_out_of_range", "k", "k is 21"),
    ({"queries": ["x", "x", "x"]}, "too_many_queries", "queries", "3 queries in one request"),
    ({"queries": ["x", "  "]}, "empty_query", "queries.1", "the query is empty"),
    ({"queries": ["y" * 41]}, "query_too_long", "queries.0", "the query has 41 characters"),
    ({"queries": [[1, 2]]}, "wrong_dimension", "queries.0", "the vector has 2 numbers, the index 3 dimensions"),
    ({"queries": [[1, 2, 1e300]]}, "not_finite", "queries.0", "the vector holds a number that is not finite"),
    ({"queries": ["x", [1, 2, 3]]}, "wrong_type", "queries", "queries is neither a list of texts"),
    ({"queries": "x"}, "wrong_type", "queries", "queries is neither a list of texts"),
    ({"k": 3}, "missing_field", "queries", "Field required"),
    ({"queries": []}, "wrong_value", "queries", "queries is empty"),
    ({"queries": ["x"], "k": "many"}, "wrong_type", "k", "Input should be a valid integer"),
    ({"queries": ["x"], "top": 3}, "unknown_field", "top", "top: Extra inputs are not permitted"),
    ({"queries": ["x"], "hybrid": "rff"}, "wrong_value", "hybrid", "neither a number from 0 to 1e20 nor rrf or off"),
    ({"queries": ["x"], "hybrid": -1}, "wrong_value", "hybrid", "neither a number from 0 to 1e20 nor rrf or off"),
    ({"queries": ["x"], "hybrid": 1e300}, "wrong_value", "hybrid", "neither a number from 0 to 1e20 nor rrf or off"),
]


@pytest.mark.parametrize(("body", "code", "field", "message"), REFUSALS)
def test_a_wrong_request_is_refused_with_code_field_message_and_hint(body, code, field, message) -> None:
    reply = call(app(max_k=20, max_batch=2, max_query_chars=40), "POST", "/v1/search", body)
    assert reply.status == 422
    error = reply.body["error"]
    assert (error["code"], error["field"].split(".")[0]) == (code, field.split(".")[0])
    assert error["field"] == field or code == "wrong_type"
    assert message in error["message"]
    assert error["hint"]


def test_a_request_at_all_its_limits_is_answered() -> None:
    body = {"queries": ["nile" * 10] * 2, "k": 20}
    assert call(app(max_k=20, max_batch=2, max_query_chars=40), "POST", "/v1/search", body).status == 200


def test_what_is_no_json_is_refused() -> None:
    reply = call(app(), "POST", "/v1/search", raw=b"{queries: 1")
    assert (reply.status, reply.body["error"]["code"]) == (422, "not_json")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"queries": ["x"], "k": 1, "k" : 2}', "k"),
        (b'{"queries": ["x"], "queries": ["y"]}', "queries"),
        (b'{"queries": ["x"], "filter": {"or": [{"year": {"gte": 1}, "year": {"lt": 9}}]}}', "year"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(body, field) -> None:
    reply = call(app(), "POST", "/v1/search", raw=body)
    assert (reply.status, reply.body["error"]["code"]) == (422, "repeated_field")
    assert reply.body["error"]["field"] == field


def test_a_text_that_looks_like_keys_is_none() -> None:
    query = 'nile "k": 1, "k": 2'
    assert call(app(), "POST", "/v1/search", {"queries": [query], "k": 1}).status == 200
    many_digits = b'{"queries": ["nile"], "filter": {"year": 1%s}}' % (b"0" * 5000)
    assert call(app(), "POST", "/v1/search", raw=many_digits).status == 422


def test_a_body_over_the_limit_is_refused_before_it_is_read() -> None:
    reply = call(app(max_body_bytes=100), "POST", "/v1/search", {"queries": ["x" * 200]})
    assert (reply.status, reply.body["error"]["code"]) == (413, "body_too_large")


def test_an_answer_that_comes_too_late_is_a_timeout() -> None:
    slow = InMemoryIndex()
    slow.gate.clear()
    reply = call(app(slow, timeout_ms=50), "POST", "/v1/search", {"queries": ["nile"]})
    slow.gate.set()
    assert (reply.status, reply.body["error"]["code"]) == (504, "timeout")


@pytest.mark.parametrize("step", ["search", "passages"])
def test_past_the_deadline_no_text_is_read_and_no_passage_cut(step: str) -> None:
    steps: list[str] = []

    class Steps(InMemoryIndex):
        def search(self, *args, **options):
            steps.append("search")
            return super().search(*args, **options)

        def passages(self, ids):
            steps.append("passages")
            return super().passages(ids)

        def view_spans(self, passage):
            steps.append("spans")
            return super().view_spans(passage)

    class EndsAfterStep(Deadline):
        @property
        def left_s(self) -> float:
            return 0.0 if step in steps else 1.0

    with pytest.raises(RequestError, match="no answer within") as error:
        service = SearchService(Steps(), ServeConfig())
        service.search(schemas.SearchRequest(queries=["nile"]), EndsAfterStep.after(1.0))
    assert error.value.status == 504 and steps[-1] == step


def test_texts_of_more_passages_than_an_answer_holds_are_refused() -> None:
    queries = [f"a {number}" for number in range(256)]
    for more in ({}, {"text": False, "fields": ["year"]}):
        reply = call(app(), "POST", "/v1/search", {"queries": queries, "k": 1000, **more})
        assert (reply.status, reply.body["error"]["code"]) == (422, "passages_out_of_range")
        assert "at most 32000 (32 x serve.max_k)" in reply.body["error"]["hint"]
    for fewer in ({"text": False}, {"k": 125}):
        assert call(app(), "POST", "/v1/search", {"queries": queries, "k": 1000, **fewer}).status == 200


def test_ready_means_that_every_passage_was_searched() -> None:
    assert call(app(), "GET", "/readyz").status == 200
    reply = call(app(InMemoryIndex(missing=1)), "GET", "/readyz")
    assert reply.status == 503
    readiness = {"ready": False, "index": "library", "version": 3, "coverage": pytest.approx(2 / 3)}
    shards = [(0, 2, "searched", ""), (1, 1, "died", "")]
    assert reply.body == {
        **readiness,
        "problems": [],
        "failure": "",
        "failed_version": None,
        "freshness": None,
        "shards": [dict(zip(("shard", "passages", "state", "reason"), one)) for one in shards],
    }


class RecordsDeadlines(InMemoryIndex):
    """Keeps the deadline of every search, and has the version that a catalog of three versions promotes."""

    def __init__(self) -> None:
        super().__init__()
        self.deadlines: list[Deadline | None] = []

    def search(self, *args, **options):
        self.deadlines.append(options["deadline"])
        return super().search(*args, **options)


def test_a_search_that_reports_readiness_ends_within_the_time_of_its_request(tmp_path) -> None:
    library, due = RecordsDeadlines(), Deadline.after(5.0)
    service = SearchService(library, ServeConfig(), version_catalog(tmp_path, versions=3))
    service.readiness(due)
    service.promote(3, due)
    assert len(library.deadlines) == 2
    assert all(deadline and deadline.due_s < due.due_s for deadline in library.deadlines)


def test_the_search_that_readiness_probes_share_has_the_time_of_the_server_less_that_of_the_response() -> None:
    library = RecordsDeadlines()
    call(create_app(SearchService(library, ServeConfig(timeout_ms=600_000))), "GET", "/readyz", headers=SHORT)
    [deadline] = library.deadlines
    assert deadline and 300 < deadline.timeout_s < 600


def test_alive_says_so_without_a_search() -> None:
    stuck = InMemoryIndex()
    stuck.gate.clear()
    assert call(app(stuck), "GET", "/livez").status == 200


def test_missing_passages_are_named_in_the_answer() -> None:
    request = {"queries": ["nile"], "min_coverage": 0.3}
    reply = call(app(InMemoryIndex(missing=2)), "POST", "/v1/search", request)
    body = reply.body["coverage"]
    assert (body["passages_searched"], body["passages_total"], reply.body["exact"]["certified"]) == (1, 3, False)
    assert body["shards"][1] == {"shard": 1, "passages": 2, "state": "died", "reason": ""}


def test_too_few_passages_searched_is_an_error_unless_allowed() -> None:
    for least in ({}, {"min_coverage": 0.4}):
        reply = call(app(InMemoryIndex(missing=2)), "POST", "/v1/search", {"queries": ["nile"], **least})
        assert (reply.status, reply.body["error"]["code"]) == (503, "not_covered")


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("timeout_ms", 0, "timeout_out_of_range"),
        ("timeout_ms", 10_001, "timeout_out_of_range"),
        ("min_coverage", 1.5, "coverage_out_of_range"),
        ("min_coverage", -0.1, "coverage_out_of_range"),
    ],
)
def test_a_time_or_coverage_that_cannot_be_given_is_refused(field, value, code) -> None:
    reply = call(app(), "POST", "/v1/search", {"queries": ["nile"], field: value})
    assert (reply.status, reply.body["error"]["code"], reply.body["error"]["field"]) == (422, code, field)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/search", {"queries": [1] * 9}),
        ("/v1/search", {"queries": [["x"] * 9] * 9}),
        ("/v1/search", {"queries": ["x"], "fields": [1] * 9}),
        ("/v1/explain", {"questions": [1] * 9, "passages": [1] * 9}),
        ("/v1/embeddings", {"model": "words", "input": [None] * 9}),
        ("/v1/embeddings", {"model": "words", "input": [["x"] * 9] * 9}),
    ],
)
def test_validation_ends_at_the_first_wrong_element_of_a_list(path, body, monkeypatch) -> None:
    counts = []

    def count_problems(problems, fields):
        counts.append(len(problems))
        return first_problem(problems, fields)

    monkeypatch.setattr(schemas, "first_problem", count_problems)
    reply = call(app(), "POST", path, body)
    assert (reply.status, reply.body["error"]["code"]) == (422, "wrong_type")
    assert counts[0] <= 5  # one of each list, and of each type of a union


@pytest.mark.parametrize(
    ("model", "path", "body"),
    [
        (schemas.SearchResponse, "/v1/search", {"queries": ["nile"]}),
        (Explanation, "/v1/explain", {"questions": ["nile"]}),
        (schemas.EmbeddingsResponse, "/v1/embeddings", {"model": "words", "input": ["nile"]}),
    ],
)
def test_a_large_answer_becomes_json_in_a_thread_beside_the_event_loop(model, path, body, monkeypatch) -> None:
    threads, dump = [], model.model_dump_json
    monkeypatch.setattr(
        model, "model_dump_json", lambda self: (threads.append(threading.current_thread()), dump(self))[1]
    )
    assert call(app(), "POST", path, body).status == 200
    assert [thread.name.startswith("answer") for thread in threads] == [True]
