"""The chosen weight of a hybrid search ranks most gold passages first, by a count of single searches."""

import itertools
import math

import numpy as np
import pytest

from mvr_ray.distributed import evaluate
from mvr_ray.distributed.evaluate import (
    WEIGHTS,
    WeightAccuracy,
    best_weight,
    trained_texts,
    tune,
    unreported_questions,
)
from mvr_ray.distributed.retrieve import QuestionSet
from mvr_ray.distributed.router import open_router
from mvr_ray.errors import ConfigError, ShardIndexError
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.questions import read_questions, write_questions
from mvr_ray.types import Question

pytestmark = [pytest.mark.data, pytest.mark.ray, pytest.mark.usefixtures("without_ray")]


def test_the_weight_is_the_first_of_those_with_most_gold_passages_at_rank_one(lexical_index, run_over):
    run = run_over(lexical_index, evaluate={"questions": ["other"]})
    report = tune(run, "dev")
    questions = read_questions(Corpus.open(Store(str(lexical_index)), "corpus"), "dev")
    assert [row.weight for row in report.rows] == [None, "rrf", *WEIGHTS]
    with open_router(run, local=True) as router:
        for row in report.rows:
            hits = router.search_text([question.text for question in questions], 20, hybrid=row.weight).hits
            ranks = [
                next((rank for rank, hit in enumerate(own, 1) if hit.passage_id in question.positive_ids), math.inf)
                for own, question in zip(hits, questions, strict=True)
            ]
            shares = [np.mean([rank <= k for rank in ranks]) for k in (1, 5, 20)]
            assert row[1:] == pytest.approx([*shares, np.mean([1 / rank for rank in ranks])])
    weight = float(report.setting.removeprefix("search.hybrid="))
    best = next(row for row in report.rows if row.weight == weight)
    assert best.top1 == max(row.top1 for row in report.rows)
    assert (report.questions, report.num_questions, report.version) == ("dev", 40, 2)


@pytest.mark.parametrize("title", ["nothing", {"in": np.array(["nothing"])}], ids=["json", "python"])
def test_weights_are_tried_under_the_filter_of_retrieval(lexical_index, run_over, title):
    settings = {"evaluate": {"questions": []}, "retrieve": {"filter": {"title": title}}}
    assert {row.top20 for row in tune(run_over(lexical_index, **settings), "dev").rows} == {0.0}
    run = run_over(lexical_index, **{**settings, "evaluate": {"hybrid": "dev", "bm25": False}})
    others = QuestionSet("others", [Question("q", "Who wrote it?", ("nobody",))])
    assert {row.value for row in evaluate.evaluate(run, sets=[others]).rows} == {0.0}
    with pytest.raises(ConfigError, match=r"^retrieve\.filter: .* no field 'year'"):
        tune(run_over(lexical_index, **{**settings, "retrieve": {"filter": {"year": 1}}}), "dev")


@pytest.mark.parametrize(
    ("figures", "best"),
    [
        ({None: (0.5, 0.9), 1.0: (0.6, 0.7), 2.0: (0.5, 0.9)}, 1.0),
        ({None: (0.6, 0.7), 1.0: (0.6, 0.7), "rrf": (0.6, 0.8)}, "rrf"),
        ({None: (0.6, 0.7), 0.0: (0.6, 0.7), 1.0: (0.6, 0.7)}, None),
        ({"rrf": (0.6, 0.7), 2.0: (0.6, 0.7), 10.0: (0.6, 0.7)}, 2.0),
    ],
    ids=["rank one", "reciprocal rank", "dense alone", "smallest weight"],
)
def test_the_best_weight_follows_from_rank_one_then_reciprocal_rank_then_the_weight(figures, best):
    rows = [WeightAccuracy(weight, top1, 0.9, 0.9, mrr) for weight, (top1, mrr) in figures.items()]
    assert {best_weight(order).weight for order in itertools.permutations(rows)} == {best}


def test_reported_questions_choose_no_weight_and_versions_without_words_are_refused(own_index, run_over, caplog):
    none = r"tune: all 40 questions of 'dev' with gold passages are also reported, in evaluate\.questions \(dev\).*"
    with pytest.raises(ConfigError, match=none + "that has others: there is none"):
        tune(run_over(own_index), "dev")
    corpus = Corpus.open(Store(str(own_index)), "corpus")
    dev = read_questions(corpus, "dev")
    other = next(question.positive_ids for question in dev if question.positive_ids != dev[2].positive_ids)
    copies = [question._replace(id=f"copy {question.id}") for question in dev[:3]]
    write_questions(corpus, "copy", [*copies[:2], copies[2]._replace(positive_ids=other)])
    write_questions(corpus, "without-gold", [Question("q", "Which one?", ("this",))])
    with pytest.raises(ConfigError, match=r"tune: all 3 questions of 'copy' .* that has others: dev"):
        tune(run_over(own_index, evaluate={"questions": ["copy"]}), "copy")
    with pytest.raises(ConfigError, match=r"tune: all 3 questions of 'copy' .* that has others: there is none"):
        tune(run_over(own_index), "copy")
    with pytest.raises(ShardIndexError, match=r"index\.lexical: true"):
        tune(run_over(own_index, evaluate={"questions": []}), "dev")
    rest = unreported_questions(corpus, "dev", [QuestionSet("copy", copies)], "tune")
    assert rest.questions == dev[3:]
    assert "questions left out that are also reported: 3 of 40 set=dev" in caplog.text


def test_no_weight_is_chosen_on_questions_that_the_encoder_was_trained_on_where_there_are_others(
    own_index, run_over, caplog, monkeypatch
):
    corpus = Corpus.open(Store(str(own_index)), "corpus")
    dev = read_questions(corpus, "dev")
    write_questions(corpus, "learned", [question._replace(id=f"own {question.id}") for question in dev[:5]])
    run = run_over(own_index, train={"questions": "learned"})
    assert not trained_texts(run, corpus), "the encoder of this index is untrained"
    monkeypatch.setattr(evaluate, "is_trained", lambda run: True)
    texts = trained_texts(run, corpus)
    assert texts == {question.text for question in dev[:5]}
    assert unreported_questions(corpus, "dev", [], "tune", texts).questions == dev[5:]
    assert caplog.messages == ["questions left out that the encoder was trained on: 5 set=dev"]
    caplog.clear()
    assert len(unreported_questions(corpus, "learned", [], "tune", texts).questions) == 5
    [message] = caplog.messages
    assert message.startswith("the encoder was trained on all of these questions") and message.endswith("set=learned")
