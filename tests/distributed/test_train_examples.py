"""Checks training examples: existing positives, true negatives, and the same sample every time."""

import contextlib
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mvr_ray.config import PrepareConfig, RunConfig, SourceConfig, TrainConfig
from mvr_ray.core.encoding.encoder import DualEncoder
from mvr_ray.core.encoding.snippets import Splitter
from mvr_ray.core.encoding.views import EncoderSpec
from mvr_ray.core.judging.answers import AnswerMatcher
from mvr_ray.core.learning.batches import JoinedBatch, negatives_for
from mvr_ray.distributed.training.cross_encoder import CrossEncoderLoop
from mvr_ray.distributed.training.examples import (
    DEV_PASSAGES,
    ClozeExamples,
    QuestionExamples,
    open_answer_examples,
    open_dev,
    open_examples,
)
from mvr_ray.distributed.training.retriever import RetrieverLoop
from mvr_ray.errors import ConfigError
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.prepare import prepare
from mvr_ray.store.questions import write_questions
from mvr_ray.store.sampling import draw
from mvr_ray.types import Passage, Question


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    """Three articles of four paragraphs; every paragraph has three sentences of its own words."""
    folder: Path = tmp_path_factory.mktemp("examples")
    sentences = [
        "The {0} number {1} has a first fact.",
        "A second fact of {0} {1} follows.",
        "The last {0} {1} fact ends.",
    ]
    data = [
        {
            "title": title,
            "paragraphs": [{"context": " ".join(sentences).format(title, number), "qas": []} for number in range(4)],
        }
        for title in ("river", "hill", "town")
    ]
    (folder / "source.json").write_text(json.dumps({"version": "1.1", "data": data}))
    store = Store(str(folder / "store"))
    source = SourceConfig(path=str(folder / "source.json"), format="squad")
    prepare(PrepareConfig(sources=[source], num_shards=3), store)
    return Corpus.open(store, "corpus")


@pytest.fixture(scope="module")
def ids(corpus: Corpus) -> list[str]:
    return sorted(passage.id for passage in corpus)


@pytest.mark.parametrize(
    ("answer_views", "settings", "max_tokens", "second", "without_place"),
    [
        ("first", {}, 0, [1], []),
        ("all", {}, 0, [0, 1], [0, 1]),
        ("first", {"title_view": True, "use_title": True}, 0, [2], []),
        ("all", {"title_view": True, "use_title": True}, 0, [1, 2], [1, 2]),
        ("first", {"strategy": "snippet_means", "whole_view": True}, 0, [0, 2], []),
        ("all", {"strategy": "snippet_means", "whole_view": True}, 0, [0, 1, 2], [0, 1, 2]),
        ("first", {"strategy": "snippet_means"}, 9, [], []),
        ("all", {"strategy": "snippet_means"}, 9, [0], [0]),
    ],
)
def test_views_that_hold_an_answer_are_those_of_its_place_or_of_its_words(
    tiny_backbone, answer_views, settings, max_tokens, second, without_place
):
    """The place is that of the second sentence; a question whose answer has no place is found by words alone. With a
    title view the sentences have the views after it, and the title holds no answer; a whole view holds what they do.
    Nine tokens end before the second answer."""
    text = "Paris is old. The capital is Paris. Nobody stayed."
    loop = RetrieverLoop.__new__(RetrieverLoop)
    spec = EncoderSpec(**{"strategy": "snippets", "num_views": 4, "use_title": False, **settings})
    loop.model = DualEncoder.from_backbone(str(tiny_backbone), spec)
    loop.cfg = TrainConfig(loss="camvr", answer_views=answer_views, max_passage_tokens=max_tokens)
    loop.matcher = AnswerMatcher()
    batch = JoinedBatch(
        texts=["Which one?", "Where?"],
        passages=[Passage("p", "Paris", text)],
        positive_Q=np.array([0, 0]),
        known_QP=np.zeros((2, 1), bool),
        answer_start_Q=np.array([text.rindex("Paris"), -1]),
        teacher_QP=np.full((2, 1), np.nan, np.float32),
        answers=[("Paris",), ("Paris",)],
    )
    answers_QV = loop._answer_views(batch)
    assert answers_QV.shape == (2, 4)
    assert [np.flatnonzero(row).tolist() for row in answers_QV] == [second, without_place]


def test_a_question_learns_from_its_first_positive_that_is_there(corpus, ids):
    questions = [
        Question("a", "A?", ("x",), (ids[0], ids[5]), answer_starts=(7,)),
        Question("b", "B?", ("x",), ("gone", ids[1]), answer_starts=(7,)),
        Question("c", "C?", ("x",), ("gone",)),
        Question("d", "D?", ("x",)),
    ]
    examples = QuestionExamples(corpus, questions, [], TrainConfig(questions="q"))
    first, second = examples.get([0, 1], 0)
    assert len(examples) == 2
    assert (first.passage.id, first.answer_start, first.known_ids) == (ids[0], 7, (ids[5],))
    assert (second.passage.id, second.answer_start) == (ids[1], -1), "an offset belongs to the first positive's text"


def test_a_passage_that_holds_an_answer_without_a_place_is_no_negative_of_a_reader(corpus, ids):
    """The first passage has the first answer alone, the second passage the other one."""
    first, second, third = (corpus.get([name])[name] for name in ids[:3])
    own, other = first.text[:12], second.text[:24]
    start = first.text.index(own)
    questions = [
        Question("a", "A?", (own, other, "not there", ""), (ids[0],), answer_starts=(start, -1, 3, 0)),
        Question("b", "B?", (other,), (ids[1],), answer_starts=(second.text.index(other),)),
        Question("c", "C?", (third.text[:24],), (ids[2],), answer_starts=(0,)),
        Question("d", "D?", ("x",), (ids[2],), answer_starts=(-1,)),
    ]
    write_questions(corpus, "places", questions)
    examples = open_answer_examples(corpus, TrainConfig(questions="places", batch_questions=3)).get([0, 1, 2], 0)
    assert len(examples) == 3
    assert [examples[0].text, examples[0].answer_start, examples[0].answer_stop] == ["A?", start, start + len(own)]
    assert [one.id for one in negatives_for(0, examples, 9, AnswerMatcher())] == [ids[2]]


def test_a_teachers_scores_are_dropped_with_the_positive_that_they_score(corpus, ids):
    question = Question("a", "A?", ("x",), (ids[0], ids[1]), (ids[2],), teacher_scores=(5.0, 1.0))
    orphan = question._replace(id="b", positive_ids=("gone", ids[1]))
    own, other = QuestionExamples(corpus, [question, orphan], [], TrainConfig(questions="q")).get([0, 1], 0)
    assert (own.passage.id, own.teacher) == (ids[0], (5.0, 1.0))
    assert (other.passage.id, other.teacher) == (ids[1], ())


def test_hard_negatives_are_drawn_anew_each_epoch_and_are_never_gold_or_missing(corpus, ids):
    questions = [Question("a", "A?", ("x",), (ids[0], ids[1]), (ids[0], ids[1], "gone", *ids[2:8]))]
    examples = QuestionExamples(corpus, questions, [], TrainConfig(questions="q", num_hard_negatives=2))
    samples = [tuple(passage.id for passage in examples.get([0], epoch)[0].negatives) for epoch in range(20)]
    assert all(len(set(pair)) == 2 for pair in samples)
    assert set().union(*samples) == set(ids[2:8])
    again = QuestionExamples(corpus, questions, [], TrainConfig(questions="q", num_hard_negatives=2))
    assert samples == [tuple(passage.id for passage in again.get([0], epoch)[0].negatives) for epoch in range(20)]


def test_mined_negatives_replace_those_of_the_question(corpus, ids):
    questions = [Question("a", "A?", ("x",), (ids[0],), (ids[1],)), Question("b", "B?", ("x",), (ids[0],), (ids[2],))]
    mined_questions = [questions[0]._replace(hard_negative_ids=(ids[7],))]
    mined_questions += [Question("b", "What was b before?", ("x",), (ids[0],), (ids[8],))]
    first, second = QuestionExamples(corpus, questions, mined_questions, TrainConfig(questions="q")).get([0, 1], 0)
    assert [passage.id for passage in first.negatives] == [ids[7]]
    assert [passage.id for passage in second.negatives] == [ids[2]]


@pytest.mark.parametrize(
    "setting", [{"hard_negatives": "mined"}, {"distil_weight": 0.5}], ids=lambda one: next(iter(one))
)
@pytest.mark.parametrize(
    ("cause", "cure"),
    [
        ({"questions": None}, r"questions of the corpus's own sentences.*train\.questions"),
        ({"num_hard_negatives": 0}, r"num_hard_negatives is 0.*set train\.num_hard_negatives=1"),
    ],
    ids=["without questions", "without negatives"],
)
def test_negatives_that_a_training_would_ignore_are_refused(corpus, ids, setting, cause, cure):
    questions = [Question(name, "A?", ("x",), (ids[0],), (ids[1],), (0,), (2.0, 1.0)) for name in "ab"]
    for name in ("own", "mined"):
        write_questions(corpus, name, questions)
    cfg = TrainConfig(**{"questions": "own", "batch_questions": 2, **setting, **cause})
    with pytest.raises(ConfigError, match=rf"train\.{next(iter(setting))} is .*{cure}"):
        open_examples(corpus, Splitter(), cfg)


def test_mined_negatives_of_other_questions_are_refused(corpus, ids):
    write_questions(corpus, "own", [Question(f"q{at}", "Which fact?", positive_ids=(ids[at],)) for at in range(2)])
    write_questions(corpus, "others", [Question("q9", "Which fact?", positive_ids=ids[:1], hard_negative_ids=ids[1:])])
    cfg = TrainConfig(questions="own", hard_negatives="others", batch_questions=2)
    with pytest.raises(ConfigError, match=r"'others', but it has none of the 2 usable questions .*mine.questions=own"):
        open_examples(corpus, Splitter(), cfg)


@pytest.mark.parametrize(
    ("settings", "places", "reason"),
    [
        ({"loss": "camvr"}, (-1,), "an answer at a known place in its first positive"),
        ({}, (), "an answer at a known place in its first positive"),
        ({"loss": "camvr"}, (4,), None),
        ({"loss": "camvr", "answer_views": "all"}, (), None),
        ({"loss": "camvr", "answer_share": 0}, (), None),
        ({"loss": "mvr"}, (), None),
        ({"loss": "camvr", "questions": None}, (), None),
    ],
)
def test_the_loss_camvr_is_refused_without_an_answer_to_score_by(
    corpus, ids, tiny_backbone, caplog, settings, places, reason
):
    write_questions(corpus, "own", [Question(f"q{at}", "Which?", ("x",), (ids[at],), (), places) for at in range(2)])
    run = RunConfig.model_validate(
        {
            "store": {"path": str(corpus.store.root)},
            "encoder": {"backbone": str(tiny_backbone), "strategy": "snippets", "num_views": 2},
            "train": {"questions": "own", "batch_questions": 2, **settings},
        }
    )
    is_refused = reason is not None and "loss" in settings
    with pytest.raises(ConfigError, match=reason) if is_refused else contextlib.nullcontext():
        RetrieverLoop.open_job(run)
    assert ("train.loss is auto, which is camvr here" in caplog.text) == (reason is not None and not is_refused)


def test_questions_of_one_passage_and_passages_of_one_article_are_grouped(corpus, ids):
    questions = [Question(str(n), "?", (), (passage_id,)) for n, passage_id in enumerate([*ids, *ids])]
    examples = QuestionExamples(corpus, questions, [], TrainConfig(questions="q", siblings=True))
    assert examples.article_E is not None
    titles = [corpus.get([passage_id])[passage_id].title for passage_id in [*ids, *ids]]
    assert examples.passage_E[: len(ids)].tolist() == examples.passage_E[len(ids) :].tolist()
    same = examples.article_E[:, None] == examples.article_E[None]
    assert same.tolist() == [[a == b for b in titles] for a in titles]


def test_cloze_examples_are_all_passages_each_with_another_sentence_by_epoch(corpus, ids):
    examples = ClozeExamples(corpus, Splitter(), TrainConfig(cloze_keep_share=0.0))
    epochs = [examples.get(range(len(examples)), epoch) for epoch in range(6)]
    assert sorted(example.passage.id for example in epochs[0]) == ids
    assert epochs[0] == examples.get(range(len(examples)), 0)
    questions = Counter(len({epoch[number].text for epoch in epochs}) for number in range(len(examples)))
    assert questions[1] < len(examples) / 3
    assert all(example.text not in example.passage.text for epoch in epochs for example in epoch)


def test_dev_questions_keep_their_own_passages_and_stop_at_a_pool(corpus, ids, monkeypatch):
    questions = [Question(str(n), "?", (), (passage_id,)) for n, passage_id in enumerate([ids[0], ids[0], *ids[1:]])]
    write_questions(corpus, "dev", questions)
    cfg = TrainConfig(dev_questions="dev")
    dev = open_dev(corpus, cfg)
    assert dev is not None
    assert [dev.passages[row].id for row in dev.positive_Q] == [q.positive_ids[0] for q in questions]
    assert len(dev.passages) == len(ids) < DEV_PASSAGES
    monkeypatch.setattr("mvr_ray.distributed.training.examples.DEV_PASSAGES", 3)
    few = open_dev(corpus, cfg)
    assert few is not None
    names = draw(ids, 3, "dev")
    assert [passage.id for passage in few.passages] == [name for name in ids if name in names], "not the first ones"
    expected = [question.positive_ids[0] for question in questions if question.positive_ids[0] in names]
    assert [few.passages[row].id for row in few.positive_Q] == expected


@pytest.mark.parametrize("loop", [RetrieverLoop, CrossEncoderLoop])
def test_a_dev_question_is_answered_by_any_of_its_own_passages(corpus, ids, loop):
    """The third passage scores best; it is one of the second question's two."""
    positives = ids[:1], ids[1:3], ids[2:3]
    write_questions(corpus, "dev", [Question(str(n), "?", (), tuple(own)) for n, own in enumerate(positives)])
    dev = open_dev(corpus, TrainConfig(dev_questions="dev"))
    assert dev is not None
    scores = {passage.id: float(row) for row, passage in enumerate(dev.passages)}
    model = SimpleNamespace(
        embed_queries=lambda texts: np.ones((len(texts), 1), np.float32),
        score=lambda pairs, _: np.array([scores[pair.passage.id] for pair in pairs]),
    )
    views = np.array([[[0.0]], [[1.0]], [[2.0]]], np.float32), np.ones((3, 1), bool)
    training = SimpleNamespace(job=SimpleNamespace(dev=dev, run=RunConfig()), model=model, _embed=lambda _: views)
    assert loop.measure(training) == (pytest.approx(2 / 3),)


def test_fewer_examples_than_a_batch_are_refused(corpus, ids):
    """With a single one no batch is small enough."""
    with pytest.raises(ConfigError, match=r"batch_questions is 32, but there are only 12 passages of .*; lower it"):
        open_examples(corpus, Splitter(), TrainConfig())
    write_questions(corpus, "one", [Question("1", "?", (), (ids[0],))])
    with pytest.raises(ConfigError, match="only 1 usable questions of 'one'; a batch takes 2 at least: give more"):
        open_examples(corpus, Splitter(), TrainConfig(questions="one", batch_questions=2))


def test_at_most_so_many_questions_of_a_passage_are_learned_the_same_in_any_order(corpus, ids):
    question_set = [Question(f"q{n}", f"{n}?", ("x",), (ids[n % 3],)) for n in range(12)]
    settings = TrainConfig(questions="q", max_passage_questions=2)

    def ids_of_examples(questions: list[Question]) -> set[str]:
        examples = QuestionExamples(corpus, questions, [], settings)
        assert Counter(examples.passage_E.tolist()) == {0: 2, 1: 2, 2: 2}
        return {example.text for example in examples.get(range(len(examples)), 0)}

    assert ids_of_examples(question_set) == ids_of_examples(question_set[::-1])
