"""Answers that are patterns (`evaluate.match: regex`): every stage judges by them as an independent `re.search`."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from bm25_index import BM25Index
from prepared_corpus import only_corpus

from mvr_ray.config import RunConfig, parse_run
from mvr_ray.core.learning.batches import join_batch
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.evaluate import evaluate
from mvr_ray.distributed.indexing import build_index
from mvr_ray.distributed.mine import mine
from mvr_ray.distributed.refine import embed_questions, refine
from mvr_ray.distributed.refinement.measure import Evaluator
from mvr_ray.distributed.refinement.questions import gather
from mvr_ray.distributed.refinement.refiner_pool import RefinerPool
from mvr_ray.distributed.refinement.shard_refiner import RefinerTask
from mvr_ray.distributed.refinement.state import PUBLISHED
from mvr_ray.distributed.training.cross_encoder import CrossEncoderLoop
from mvr_ray.distributed.training.reader import ReaderLoop
from mvr_ray.distributed.training.retriever import RetrieverLoop
from mvr_ray.errors import ConfigError
from mvr_ray.stages import STAGES
from mvr_ray.store import manifest
from mvr_ray.store.files import Store
from mvr_ray.store.prepare import prepare
from mvr_ray.store.questions import read_questions, write_questions
from mvr_ray.types import no_progress

TOWNS = ("Aden", "Bonn", "Cork", "Dover")
YEARS = range(1970, 1982)


@pytest.fixture(scope="module")
def store_path(tiny_backbone, tmp_path_factory) -> Path:
    """Passages of four towns and twelve years, with an index; each question's answers are patterns of years."""
    folder = tmp_path_factory.mktemp("patterns")
    (folder / "backbone").symlink_to(tiny_backbone)
    rows = [
        {"id": f"{town}-{year}", "title": town, "text": f"The bridge of {town} was mended. It was in {year} or so."}
        for town in TOWNS
        for year in YEARS
    ]
    for town in TOWNS:
        for first in (1, 3, 5, 7):
            answers = [f"197({first}|{first + 1})", f"In 19{first + 2}[0-2]"]
            question = f"When was the bridge of {town} mended after {first}?"
            gold = f"{town}-197{first}"
            rows.append({"id": f"{town}{first}", "question": question, "answers": answers, "positive_ids": [gold]})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = run_of(folder / "store", "string")
    prepare(run.prepare, Store(run.store.path))
    build_index.index(run)
    return folder / "store"


def run_of(path: Path, match: str = "regex", **sections) -> RunConfig:
    settings = {
        "store": {"path": str(path)},
        "prepare": {"sources": [{"path": str(path.parent / "rows.jsonl"), "questions": "years"}], "num_shards": 2},
        "encoder": {"backbone": str(path.parent / "backbone"), "strategy": "mean", "max_passage_tokens": 64},
        "index": {"encoder": "untrained", "precision": "fp32", "recall_sample": 5},
        "refine": {"questions": "years", "depth": 12, "rounds": 1, "positives": "all", "max_heldout_loss": 100},
        "evaluate": {"questions": ["years"], "match": match, "k": [1, 5]},
        "mine": {"questions": "years", "output": "mined", "num_negatives": 30},
        "resources": {"train_workers": 0},
    }
    return parse_run({name: {**settings.get(name, {}), **sections.get(name, {})} for name in settings | sections}, "")


def bears(text: str, answers: tuple[str, ...]) -> bool:
    return any(re.search(answer, text, re.IGNORECASE) for answer in answers)


def labels_of(run: RunConfig, *more_answers: str) -> dict[tuple[str, str], bool]:
    """The labels of a refinement's first round, by question and passage id; `more_answers` are of every question."""
    store = Store(run.store.path)
    base = manifest.read(store, run.index.name)
    questions = gather(only_corpus(store), run.refine)
    table = tuple(one._replace(answers=(*one.answers, *more_answers)) for one in questions.table)
    questions = replace(questions, table=table)
    queries_TD = embed_questions(store, base, questions, 1, lambda *_: None)
    task = RefinerTask(store.address, base, "", run.refine, match=run.evaluate.match)
    with session.connect(run.resources, base.num_passages), RefinerPool(task, 1, 1) as pool:
        queries_LD = queries_TD[: questions.num_labelled]
        hits = pool.search(PUBLISHED, queries_LD, run.refine.depth, "", lambda *_: None)
        labels = Evaluator(run.refine, questions, pool).label(PUBLISHED, queries_LD, hits)
        ids = [name for entry in base.shards for name in pool.actors[0].ids_of(entry.shard, range(entry.num_passages))]
    names = ((questions.table[row].id, ids[passage]) for row, passage in zip(labels.question_L, labels.passage_L))
    return dict(zip(names, labels.positive_L.tolist()))


@pytest.mark.parametrize("match", ["regex", "string"])
def test_the_gold_chunks_of_a_cut_passage_are_those_that_an_independent_search_finds(store_path, tmp_path, match):
    (tmp_path / "rows.jsonl").symlink_to(store_path.parent / "rows.jsonl")
    run = run_of(tmp_path / "store", match, prepare={"chunk_words": 7})
    STAGES["prepare"](run, no_progress)
    corpus = only_corpus(Store(run.store.path))
    questions = read_questions(corpus, "years")
    gold = [(one, corpus.get([name])[name].text) for one in questions for name in one.positive_ids]
    assert len(gold) == len(questions) == 16
    assert {bears(text, one.answers) for one, text in gold} == {match == "regex"}


def test_a_refinement_round_labels_hits_as_an_independent_search_for_the_patterns(store_path):
    run = run_of(store_path)
    labels = labels_of(run)
    corpus = only_corpus(Store(run.store.path))
    questions = {question.id: question for question in read_questions(corpus, "years")}
    text_of = {passage.id: passage.text for passage in corpus}
    assert labels == {(q, p): bears(text_of[p], questions[q].answers) for q, p in labels}
    assert len(set(labels.values())) == 2
    assert labels_of(run, "x*") == labels
    assert all(labels_of(run, " ").values())
    assert not any(labels_of(run_of(store_path, "string")).values())


@pytest.mark.parametrize("labels", ["answers", "gold"])
def test_hits_of_a_question_of_which_nothing_is_known_get_no_label(store_path, labels):
    corpus = only_corpus(Store(str(store_path)))
    first, *others = read_questions(corpus, "years")
    unknown = first._replace(answers=(), answer_starts=()) if labels == "answers" else first._replace(positive_ids=())
    write_questions(corpus, f"without-{labels}", [unknown, *others])
    settings = {"questions": f"without-{labels}", "labels": labels}
    labels_then, whole = (
        labels_of(run_of(store_path, refine={**settings, **own})) for own in ({}, {"questions": "years"})
    )
    assert labels_then == {
        (question, passage): own for (question, passage), own in whole.items() if question != first.id
    }
    assert len(labels_then) < len(whole)


def test_a_refinement_omits_patterns_that_match_every_passage(store_path):
    corpus = only_corpus(Store(str(store_path)))
    questions = read_questions(corpus, "years")
    more = [one._replace(answers=(*one.answers, "(?:years)*"), answer_starts=()) for one in questions]
    write_questions(corpus, "any", more)
    labels = labels_of(run_of(store_path, refine={"questions": "any"}))
    assert labels == labels_of(run_of(store_path))
    assert not all(labels.values())


def test_a_refinement_counts_the_answers_that_evaluate_counts(store_path):
    run = run_of(store_path, refine={"report": ["years"], "method": "rocchio"})
    [expected] = [row for row in evaluate(run).rows if row.metric == "answer/top-1"]
    rows = [row for row in refine(run).accuracy if row.kind == "answer" and row.group == "years"]
    assert sum(row.num_questions for row in rows) == expected.n
    assert sum(row.before[0] * row.num_questions for row in rows) / expected.n == pytest.approx(expected.value)
    assert expected.value > 0


def test_mining_drops_the_passages_that_an_independent_search_finds(store_path):
    run = run_of(store_path)
    report = mine(run)
    corpus = only_corpus(Store(run.store.path))
    text_of = {passage.id: passage.text for passage in corpus}
    mined_questions = read_questions(corpus, "mined")
    rankings = BM25Index(corpus).search([one.text for one in mined_questions], run.mine.rank_to)
    num_bearing = 0
    for one, hits in zip(mined_questions, rankings, strict=True):
        others = [hit.passage_id for hit in hits if hit.passage_id not in one.positive_ids]
        expected = [i for i in others if not bears(text_of[i], one.answers)]
        num_bearing += len(others) - len(expected)
        assert list(one.hard_negative_ids) == expected[: run.mine.num_negatives]
    assert report.dropped_answer_bearing == num_bearing > 0
    assert mine(run_of(store_path, "string")).dropped_answer_bearing == 0


def test_the_views_that_hold_an_answer_in_training_are_those_that_an_independent_search_finds(store_path):
    sections = {"encoder": {"strategy": "snippet_means", "num_views": 2}}
    train = {"questions": "years", "loss": "camvr", "answer_views": "all", "batch_questions": 8}
    job = RetrieverLoop.open_job(run_of(store_path, **sections, train=train))
    loop = RetrieverLoop(job, lambda *_: None, job.model.device)
    examples = job.examples.get(range(8), 0)
    expected_QV = [
        [bears(one.passage.text[start:stop], one.answers) for start, stop in loop.model.snippets(one.passage)]
        for one in examples
    ]
    assert loop._answer_views(join_batch(examples)).tolist() == expected_QV
    assert any(map(any, expected_QV)) and not all(map(all, expected_QV))


def test_a_cross_encoder_never_learns_a_passage_of_the_batch_as_negative_that_a_pattern_finds(store_path):
    train = {"task": "cross_encoder", "questions": "years", "num_hard_negatives": 15, "batch_questions": 16}
    job = CrossEncoderLoop.open_job(run_of(store_path, train=train))
    examples = job.examples.get(range(16), 0)
    groups = CrossEncoderLoop(job, lambda *_: None, job.model.device).units(examples)
    for example, (positive, *negatives) in zip(examples, groups):
        others = {other.passage.id: other.passage for other in examples if other.passage.id != example.passage.id}
        expected_ids = {i for i, passage in others.items() if not bears(passage.text, example.answers)}
        assert positive.passage == example.passage
        assert {pair.passage.id for pair in negatives} == expected_ids
        assert len(expected_ids) < len(others)


def test_a_reader_refuses_to_learn_from_patterns(store_path):
    run = run_of(store_path, train={"task": "reader", "questions": "years"})
    with pytest.raises(
        ConfigError, match=r"evaluate\.match is regex, .* train\.task is reader.*; set evaluate\.match=s"
    ):
        ReaderLoop.open_job(run)


def test_keys_of_unfinished_work_depend_on_the_rule_and_stay_as_they_were_for_words(store_path):
    assert RunConfig().digest("refine") == "917ad06676cc1efe", "journals of refinements begun before no longer resume"
    words, patterns = (run_of(store_path, match) for match in ("string", "regex"))
    for sections in (["refine"], ["train"], ["encoder", "train"]):
        assert words.digest(*sections) != patterns.digest(*sections)
    train = {"questions": "years", "batch_questions": 8}
    words, patterns = (
        RetrieverLoop.open_job(run_of(store_path, match, train=train)).checkpoints for match in ("string", "regex")
    )
    assert words.folder != patterns.folder
