"""An explanation: every view with every question, what each stands for, and refusals that a program can act on."""

import pytest
from in_memory_index import PASSAGES, SPANS, InMemoryIndex

from mvr_ray.config import ServeConfig
from mvr_ray.core.encoding.snippets import TITLE
from mvr_ray.deadline import Deadline
from mvr_ray.explanation import ExplainedView, Winner, describe_view
from mvr_ray.serving.explain import explain
from mvr_ray.serving.schemas import ExplainRequest, RequestError, SearchRequest, Snippet
from mvr_ray.serving.service import SearchService


def explain_in_memory(library: InMemoryIndex | None = None, **request):
    service = SearchService(library or InMemoryIndex(), ServeConfig(max_k=20, max_batch=2))
    return service.explain(ExplainRequest(**request))


def test_every_view_has_its_snippet_and_one_score_a_question() -> None:
    [passage] = explain_in_memory(questions=["nile", "rhine rhine"], passages=["p1"]).passages
    assert (passage.title, passage.text) == PASSAGES[0][1:3]
    assert passage.views == [
        ExplainedView(view=0, kind="snippet", start=0, stop=17, text="The Nile is long.", scores=[1.0, 0.0]),
        ExplainedView(view=1, kind="snippet", start=18, stop=39, text="The Rhine is shorter.", scores=[0.0, 2.0]),
    ]
    assert passage.winners == [Winner(view=0, score=1.0), Winner(view=1, score=2.0)]


def test_without_a_passage_the_best_hits_of_all_questions_are_explained_each_once() -> None:
    explanation = explain_in_memory(questions=["nile", "hill"], k=2)
    assert [passage.id for passage in explanation.passages] == ["p1", "p2", "p3"]
    ranks = {passage.id: [winner.rank for winner in passage.winners] for passage in explanation.passages}
    assert ranks == {"p1": [1, None], "p2": [None, 1], "p3": [2, 2]}


@pytest.mark.parametrize("passages", [[], ["p1"]])
def test_an_explanation_hands_its_deadline_to_every_search(passages: list[str]) -> None:
    """Otherwise a request that ended with 504 holds a thread for the server's whole time, once more for the views."""
    deadlines = []

    class NotingIndex(InMemoryIndex):
        def search(self, queries_QD, k, *, deadline=None, **options):
            deadlines.append(deadline)
            return super().search(queries_QD, k, **options)

        def explain(self, queries_QD, passage_ids, deadline=None):
            deadlines.append(deadline)
            return super().explain(queries_QD, passage_ids)

    own = Deadline.after(5)
    SearchService(NotingIndex(), ServeConfig()).explain(ExplainRequest(questions=["nile"], passages=passages), own)
    assert [one.due_s <= own.due_s for one in deadlines] == [True] * (1 if passages else 2)


def test_an_explanation_of_many_passages_ends_at_its_deadline() -> None:
    due = Deadline.after(60)
    texts: list[str] = []

    class SlowIndex(InMemoryIndex):
        def view_spans(self, passage):
            texts.append(passage.id)
            return super().view_spans(passage)

    class EarlyDeadline(Deadline):
        @property
        def left_s(self) -> float:
            return 0.0 if texts else 60.0

    request = ExplainRequest(questions=["nile"], passages=["p1", "p2", "p3"])
    with pytest.raises(RequestError, match="no answer within 60000 ms") as refusal:
        explain(SlowIndex(), request, EarlyDeadline(*due))
    assert (refusal.value.status, texts) == (504, ["p1"])


def test_hits_of_several_questions_go_by_rank_then_question() -> None:
    explanation = explain_in_memory(questions=["hill", "rhine"], k=3)
    assert [passage.id for passage in explanation.passages] == ["p2", "p1", "p3"]


def test_a_feedback_view_stands_for_no_part_of_the_text_and_a_missing_one_is_not_there() -> None:
    [passage] = explain_in_memory(InMemoryIndex(feedback=True), questions=["hill"], passages=["p2"]).passages
    assert passage.views == [
        ExplainedView(view=0, kind="snippet", start=0, stop=14, text="A hill is low.", scores=[1.0]),
        ExplainedView(view=2, kind="feedback", scores=[0.5]),
    ]


def test_a_view_of_the_title_stands_for_the_title_in_explanations_hits_and_passages(monkeypatch) -> None:
    monkeypatch.setitem(SPANS, "p2", [TITLE, (0, 14)])
    [passage] = explain_in_memory(questions=["hill"], passages=["p2"]).passages
    assert passage.views[0] == ExplainedView(view=0, kind="title", text="Hills", scores=[1.0])
    assert describe_view(passage.views[0]) == "title: Hills"
    assert passage.views[1].text == "A hill is low."
    service = SearchService(InMemoryIndex(), ServeConfig())
    [[hit]] = service.search(SearchRequest(queries=["hill"], k=1)).results
    assert hit.snippet == Snippet(start=0, stop=0, text="Hills")
    views = service.passage("p2").views
    assert [(view.view, view.start, view.stop, view.text) for view in views] == [
        (0, 0, 0, "Hills"),
        (1, 0, 14, "A hill is low."),
    ]


def test_a_viewer_after_the_last_snippet_has_an_empty_one() -> None:
    """With `encoder.empty_snippets: kept` it is stored; the view of a whole passage comes before the snippets."""

    class IndexOfViewers(InMemoryIndex):
        def view_spans(self, passage):
            return [(0, 17), None]

    [passage] = explain_in_memory(IndexOfViewers(), questions=["nile"], passages=["p1"]).passages
    views = passage.views
    assert [(view.kind, view.start, view.stop, view.text) for view in views] == [
        ("snippet", 0, 17, "The Nile is long."),
        ("snippet", 39, 39, ""),
    ]
    assert describe_view(views[1]) == "no snippet: a viewer after the last one"


def test_a_viewer_before_no_title_does_not_stand_for_the_whole_passage() -> None:
    """`DualEncoder.view_spans` says so of passages without a title, with `empty_snippets: kept`."""

    class IndexOfTitles(InMemoryIndex):
        def view_spans(self, passage):
            return [TITLE, (0, 17)]

        def passages(self, ids):
            return {name: passage._replace(title="") for name, passage in super().passages(ids).items()}

    service = SearchService(IndexOfTitles(), ServeConfig())
    [passage] = service.explain(ExplainRequest(questions=["nile"], passages=["p1"])).passages
    assert [(view.kind, view.text) for view in passage.views] == [("title", ""), ("snippet", "The Nile is long.")]
    assert describe_view(passage.views[0]) == "no title"
    [[hit]] = service.search(SearchRequest(queries=["nile"], k=1)).results
    assert (hit.view, hit.snippet) == (0, None)


REFUSALS = [
    ({"questions": ["x", " "]}, 422, "empty_question", "questions.1", "the question is empty"),
    ({"questions": ["x", "x", "x"]}, 422, "too_many_questions", "questions", "3 questions in one request"),
    ({"questions": ["x"], "k": 21}, 422, "k_out_of_range", "k", "k is 21"),
    ({"questions": ["x"], "passages": ["p"] * 21}, 422, "passages_out_of_range", "passages", "21 passages"),
    (
        {"questions": ["x", "y"], "k": 11},
        422,
        "passages_out_of_range",
        "k",
        "2 questions with k 11 are up to 22",
    ),
    ({"questions": ["x"], "passages": ["p1", "p9"]}, 404, "unknown_passage", "passages.1", "holds no passage 'p9'"),
]


@pytest.mark.parametrize(("request_", "status", "code", "field", "message"), REFUSALS)
def test_a_wrong_request_is_refused_with_code_field_message_and_hint(request_, status, code, field, message) -> None:
    with pytest.raises(RequestError) as refusal:
        explain_in_memory(**request_)
    error = refusal.value
    assert (error.status, error.code, error.field) == (status, code, field)
    assert message in error.message and error.hint


def test_a_refused_explanation_opens_no_version() -> None:
    class WithoutVersions(InMemoryIndex):
        def pin(self, version=None, deadline=None):
            raise AssertionError("a version was opened")

    service = SearchService(WithoutVersions(), ServeConfig())
    with pytest.raises(RequestError, match="k is 0"):
        service.explain(ExplainRequest(questions=["x"], k=0, version=1))
