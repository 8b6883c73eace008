"""Hybrid search as a service: the weight of the run file or of the request, both parts of a score, and refusals."""

import numpy as np
import pytest
import yaml

from mvr_ray.cli.search_once import open_service
from mvr_ray.client import Client
from mvr_ray.config import ServeConfig
from mvr_ray.distributed.router import open_router
from mvr_ray.errors import ConfigError, ShardIndexError
from mvr_ray.serving.replica import AppArgs, app, serve_until_interrupted
from mvr_ray.serving.schemas import ExplainRequest, RequestError, SearchRequest, parse_json
from mvr_ray.serving.service import SearchService

pytestmark = [pytest.mark.data, pytest.mark.ray]
QUESTION = "Which team won the league season?"


def hits(response) -> list[tuple[str, float]]:
    return [(hit.id, hit.score) for hit in response.results[0]]


def assert_parts(service: SearchService, response, weight: float | str | None) -> None:
    """Every hit says both scores, whose sum is its own; one without words, or without texts, says neither."""
    dense = service.search(SearchRequest(queries=[QUESTION], k=60, hybrid="off")).results[0]
    for hit in response.results[0]:
        if weight is None:
            assert (hit.lexical, hit.dense) == (None, None)
            continue
        assert hit.dense == next(one.score for one in dense if one.id == hit.id)
        if weight != "rrf":
            assert hit.score == float(np.float32(hit.lexical + weight * hit.dense))
        assert hit.lexical >= 0
    [bare] = service.search(SearchRequest(queries=[QUESTION], k=1, text=False)).results[0]
    assert (bare.lexical, bare.dense) == (None, None)


def test_a_request_has_the_weight_that_it_names_else_the_run_files(lexical_index, run_over):
    with open_router(run_over(lexical_index), local=True) as router:
        expected = {
            weight: [(hit.passage_id, hit.score) for hit in router.search_text([QUESTION], 5, hybrid=weight).hits[0]]
            for weight in (None, 2.0, 40.0, "rrf")
        }
        assert len({str(one) for one in expected.values()}) == 4
        service = SearchService(router, ServeConfig(), hybrid=2.0)
        for hybrid, weight in ((None, 2.0), (40.0, 40.0), ("off", None), ("rrf", "rrf")):
            response = service.search(SearchRequest(queries=[QUESTION], k=5, hybrid=hybrid))
            assert hits(response) == expected[weight] and response.exact.certified
            assert_parts(service, response, weight)
            assert Client.over(service).search([QUESTION], 5, hybrid=hybrid).results == response.results
        vectors = router.embed([QUESTION]).tolist()
        assert hits(service.search(SearchRequest(queries=vectors, k=5))) == expected[None]
        with pytest.raises(RequestError, match="vectors have no words"):
            service.search(SearchRequest(queries=vectors, k=5, hybrid=1.0))


def test_an_explanation_has_both_parts_of_the_score_that_ranks_the_passage(lexical_index, run_over):
    with open_router(run_over(lexical_index), local=True) as router:
        service = SearchService(router, ServeConfig(), hybrid=7.5)
        score_of = dict(hits(service.search(SearchRequest(queries=[QUESTION], k=4))))
        explanation = service.explain(ExplainRequest(questions=[QUESTION], k=4))
        assert explanation.hybrid == 7.5 and [passage.id for passage in explanation.passages] == list(score_of)
        for passage in explanation.passages:
            [winner] = passage.winners
            assert winner.total == score_of[passage.id] and winner.lexical is not None
            assert winner.total == pytest.approx(winner.lexical + 7.5 * winner.score, rel=1e-6)
        ranks = service.explain(ExplainRequest(questions=[QUESTION], k=4, hybrid="rrf"))
        own = dict(hits(service.search(SearchRequest(queries=[QUESTION], k=4, hybrid="rrf"))))
        assert {passage.id: passage.winners[0].total for passage in ranks.passages} == own
        assert all(passage.winners[0].lexical is not None for passage in ranks.passages)
        plain = service.explain(ExplainRequest(questions=[QUESTION], k=4, hybrid="off"))
        assert plain.hybrid is None and plain.passages[0].winners[0].lexical is None


def test_a_version_without_words_refuses_and_says_what_to_do(small_index, run_over, tmp_path, monkeypatch):
    with open_router(run_over(small_index), local=True) as router:
        service = SearchService(router, ServeConfig(), hybrid=2.0)
        with pytest.raises(
            RequestError, match=r'"hybrid": "off", .*, or index them: set index\.lexical: true'
        ) as error:
            service.search(SearchRequest(queries=[QUESTION]))
        assert (error.value.status, error.value.code, error.value.field) == (409, "no_words", "hybrid")
        assert service.search(SearchRequest(queries=[QUESTION], hybrid="off")).results[0]
    run, file = run_over(small_index, search={"hybrid": 2.0}), tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(run.model_dump(mode="json")))
    monkeypatch.setenv("MVR_RAY_READ_TOKEN", "read-" + "r" * 20)
    for start in (lambda: serve_until_interrupted(run, None, print), lambda: app(AppArgs(config=str(file)))):
        with pytest.raises(ShardIndexError, match="has no words of its passages, which a hybrid search needs"):
            start()


def test_the_command_line_names_the_setting_that_a_version_without_words_needs(small_index, run_over):
    run, request = run_over(small_index, search={"hybrid": 2.0}), SearchRequest(queries=[QUESTION])
    advice = r"^search: index .* has no words .*in a run file search\.hybrid: off\), or index them: set index\.lexical"
    with pytest.raises(ConfigError, match=advice), open_service("search", run, None, request) as service:
        service.search(request)


@pytest.mark.parametrize("hybrid", ["-1", '"on"', "true", "1e999", "[1]"])
def test_a_weight_that_is_none_is_refused_with_its_field(hybrid):
    body = f'{{"queries": ["x"], "hybrid": {hybrid}}}'.encode()
    with pytest.raises(RequestError) as error:
        parse_json(SearchRequest, body, {"content-type": "application/json"})
    assert error.value.status == 422 and error.value.field.startswith("hybrid")
