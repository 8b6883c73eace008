"""Sends filters, and asks for fields of hits, over HTTP and in the process."""

from datetime import date

import pytest
from asgi import call
from built_index import build
from in_memory_index import PASSAGES, VIEWS_PVD, InMemoryIndex

from mvr_ray.cli.tables import hit_text
from mvr_ray.client import Client, RefusedError
from mvr_ray.config import ServeConfig
from mvr_ray.distributed.router import Router
from mvr_ray.distributed.searching.searcher import LocalSearchers, SearcherTask
from mvr_ray.serving.app import create_app
from mvr_ray.serving.recall_monitor import RecallMonitor
from mvr_ray.serving.service import SearchService
from mvr_ray.store.files import Store

TYPES = {"year": "int", "share": "float", "open": "bool", "day": "date", "tags": "strings", "source": "string"}
FIELDS = {
    "p1": {"year": 1958, "share": 1.0, "open": True, "day": date(1958, 7, 1), "tags": ("a", "b"), "source": "x"},
    "p2": {"year": 1960, "tags": ()},
}
QUERY = [1.0, 1.0, 1.0]


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> SearchService:
    root = tmp_path_factory.mktemp("library")
    version = build(root, types=TYPES, fields=FIELDS)
    task = SearcherTask(str(root), version)
    return SearchService(Router(Store(str(root)), version, LocalSearchers(task)), ServeConfig())


def post(service: SearchService, **more):
    return call(create_app(service), "POST", "/v1/search", {"queries": [QUERY], "k": 3, "text": False, **more})


@pytest.mark.parametrize(
    ("condition", "passing"),
    [
        ({"year": {"gte": 1958}, "tags": {"in": ["b", "c"]}}, {"p1"}),
        ({"year": {"exists": False}}, {"p3"}),
        ({"not": {"day": "1958-07-01"}}, {"p2", "p3"}),
        ({"or": [{"id": "p3"}, {"title": "Hills"}]}, {"p2", "p3"}),
        ({"year": 1900}, set()),
        ({}, {"p1", "p2", "p3"}),
    ],
)
def test_hits_are_the_best_of_the_passages_that_pass(service: SearchService, condition, passing):
    scores = {passage.id: float((views @ QUERY).max()) for passage, views in zip(PASSAGES, VIEWS_PVD)}
    reply = post(service, filter=condition)
    best = sorted(passing, key=lambda name: (-scores[name], name))
    assert [(hit["id"], hit["score"]) for hit in reply.body["results"][0]] == [
        (i, pytest.approx(scores[i])) for i in best
    ]
    assert reply.body["exact"]["certified"] and reply.body["coverage"]["passages_searched"] == 3
    with Client.over(service) as client:
        [hits] = client.search([QUERY], 3, text=False, filter=condition).results
    assert [hit.id for hit in hits] == best


def test_hits_come_with_the_fields_that_are_asked_for(service: SearchService):
    reply = post(service, fields=["tags", "day", "share", "open", "year"])
    assert {hit["id"]: hit["fields"] for hit in reply.body["results"][0]} == {
        "p1": {"tags": ["a", "b"], "day": "1958-07-01", "share": 1.0, "open": True, "year": 1958},
        "p2": {"tags": [], "day": None, "share": None, "open": None, "year": 1960},
        "p3": {"tags": None, "day": None, "share": None, "open": None, "year": None},
    }
    with Client.over(service) as client:
        [hits] = client.search([QUERY], 3, text=False, fields=["year", "open"]).results
    fields = {hit.id: hit.fields for hit in hits}
    assert fields["p1"] == {"year": 1958, "open": True} and fields["p1"]["open"] is True
    assert "tags a, b, day 1958-07-01" in hit_text(1, next(hit for hit in hits if hit.id == "p1").model_copy(
        update={"fields": {"tags": ["a", "b"], "day": "1958-07-01"}}
    )).plain  # fmt: skip
    assert all(hit["fields"] is None for hit in post(service).body["results"][0])


@pytest.mark.parametrize(
    ("more", "code", "field", "message"),
    [
        (
            {"filter": {"yaer": 3}},
            "wrong_filter",
            "filter",
            "did you mean 'year'? there are: id (string), title (string), ",
        ),
        ({"filter": {"year": {"like": 3}}}, "wrong_filter", "filter", "'like' does not compare field 'year'"),
        ({"filter": {"year": "1958"}}, "wrong_filter", "filter", "'1958' is no int"),
        ({"filter": [1]}, "wrong_type", "filter", "is an object"),
        ({"fields": ["year", "text"]}, "unknown_passage_field", "fields.1", "there are: year (int), share (float)"),
        ({"fields": "year"}, "wrong_type", "fields", "valid array"),
    ],
)
def test_what_does_not_fit_the_corpus_is_a_422_that_says_what_there_is(service, more, code, field, message):
    reply = post(service, **more)
    error = reply.body["error"]
    assert (reply.status, error["code"], error["field"]) == (422, code, field)
    assert message in f"{error['message']}; {error['hint']}"
    if code == "wrong_filter":
        with Client.over(service) as client, pytest.raises(RefusedError, match="filter"):
            client.search([QUERY], filter=more["filter"])


def test_a_passage_is_shown_with_its_fields():
    class WithFields(InMemoryIndex):
        def passages(self, ids):
            return {one.id: one._replace(fields=tuple(FIELDS["p1"].items())) for one in PASSAGES if one.id in ids}

    reply = call(create_app(SearchService(WithFields(), ServeConfig())), "GET", "/v1/passages/p1")
    assert reply.body["fields"] == {**FIELDS["p1"], "day": "1958-07-01", "tags": ["a", "b"]}


def test_the_description_documents_filter_and_fields(service: SearchService):
    properties = create_app(service).openapi()["components"]["schemas"]["SearchRequest"]["properties"]
    assert "exists: false" in properties["filter"]["description"]
    assert properties["fields"]["items"] == {"type": "string"}


def test_a_filtered_answer_is_no_sample_of_an_index_s_recall(service: SearchService, monkeypatch):
    notes = []
    monkeypatch.setattr(RecallMonitor, "note", lambda *arguments: notes.append(arguments))
    monitor = RecallMonitor(None, notes.append)
    monitored_service = SearchService(service.router, service.limits, recall_monitor=monitor)
    assert post(monitored_service, filter={"year": 1958}).status == 200 and not notes
    assert post(monitored_service).status == 200 and len(notes) == 1
    monitor.close()
