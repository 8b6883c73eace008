"""Accuracy by entity frequency: what an entity is, how often it occurs, and that buckets divide the questions."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepared_corpus import only_corpus

from mvr_ray.core.judging.answers import has_answer
from mvr_ray.core.judging.metrics import cluster_interval, hit_within, paired_test, share_interval
from mvr_ray.distributed.evaluate import evaluate
from mvr_ray.errors import ConfigError
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.formats.question_ranks import QuestionRanks
from mvr_ray.store.questions import read_questions, write_questions
from mvr_ray.store.runs import to_plain
from mvr_ray.studies.definition import BM25
from mvr_ray.studies.entities import (
    ALL,
    NO_ENTITY,
    entity_frequency,
    entity_of,
    frequency_buckets,
    passage_frequencies,
    rows_by_frequency,
)
from mvr_ray.studies.results import VariantResult
from mvr_ray.studies.retrieval_tables import entity_ranks, entity_table

WORDS = ["Ada", "Bell", "Ada Bell", "U.S.", "Élan", "O'Neil", "ada"]
entities = st.lists(st.sampled_from(["", *WORDS]), min_size=1, max_size=12)
texts = st.lists(st.lists(st.sampled_from([*WORDS, "x", "x,", "Adab"]), max_size=6).map(" ".join), max_size=8)


@pytest.mark.parametrize(
    "question, entity",
    [
        ("Who set up what became the Second Polish Republic?", "Second Polish Republic"),
        ("What was Kublai Khan's relation to Ogedei?", "Kublai Khan"),
        ("What is Thomas B. Edsall's profession?", "Thomas B. Edsall"),
        ("Which officer settled at St. Augustine?", "St. Augustine"),
        ("How many people live in the U.S. Virgin Islands?", "U.S. Virgin Islands"),
        ("How many games were lost before Super Bowl 50?", "Super Bowl"),
        ("When Iqbal promoted unity, what did he encourage?", "Iqbal"),
        ("In what year did ABC restructure?", "ABC"),
        (
            "In Paris, London and Rome, what fell?",
            "London",
        ),  # as many words, more letters than Rome; a comma parts runs
        ("Are Bell or Ford older?", "Bell"),  # as many letters: the first
        ("Preschool targets what age?", "Preschool"),
        ("Insects are studied at ABC by whom?", "ABC"),  # the first word is capitalised wherever it stands
        ("Doctor Who was shown when?", "Doctor Who"),
        ("What do chloroplasts store?", ""),
        ("what did beyoncé sing in 2003?", ""),
        ("Was Élan Vital a book?", "Élan Vital"),
        ("1973 was the year of what?", ""),
        ("", ""),
    ],
)
def test_an_entity_is_the_longest_run_of_capitalised_words(question, entity):
    assert entity_of(question) == entity


@given(entities, texts)
def test_a_frequency_is_the_number_of_passages_that_hold_the_entity_as_an_answer(entities_Q, passages):
    frequencies = passage_frequencies(entities_Q, iter(passages))
    assert frequencies.tolist() == [
        sum(has_answer(text, [entity]) for text in passages) if entity else 0 for entity in entities_Q
    ]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), min_size=1, max_size=60))
def test_buckets_divide_the_questions_and_never_one_frequency(questions):
    names = ["Ada" if has_entity else "" for has_entity, _ in questions]
    frequency_Q = np.array([count for _, count in questions])
    everything, *parts = frequency_buckets(names, frequency_Q)
    assert (everything.name, everything.questions) == (ALL, list(range(len(questions))))
    assert sorted(at for part in parts for at in part.questions) == everything.questions
    of_frequency = [part for part in parts if part.name != NO_ENTITY]
    assert all(names[at] for part in of_frequency for at in part.questions)
    assert all(not names[at] for part in parts if part.name == NO_ENTITY for at in part.questions)
    for before, after in pairwise(of_frequency):
        assert before.high < after.low
    for part in of_frequency:
        own = frequency_Q[part.questions]
        assert (part.low, part.high) == (own.min(), own.max())
    if of_frequency:
        assert 4 * len(of_frequency[0].questions) >= sum(map(bool, names)), "the rarest quarter is not cut"


def test_quartiles_of_different_frequencies_are_of_equal_size():
    buckets = frequency_buckets(["Ada"] * 40, np.random.default_rng(0).permutation(40))
    assert [len(bucket.questions) for bucket in buckets] == [40, 10, 10, 10, 10]
    assert [bucket.name for bucket in buckets[1:3]] == ["entity in 0 to 9 passages", "entity in 10 to 19 passages"]
    assert frequency_buckets(["Ada"], np.array([3]))[1].name == "entity in 3 passages"


def test_rows_are_shares_of_the_buckets_questions_with_the_gain_over_bm25():
    rng = np.random.default_rng(5)
    questions = ["Who met Ada?", "Who met Bell?", "who met him?", "Where did Ada Bell live?"] * 15
    passages = ["Ada Bell", "Ada", "Ada and Bell", "nothing"]
    articles = [f"article {at % 7}" for at in range(60)]
    ranks = {BM25: rng.integers(-1, 30, 60), "index": rng.integers(-1, 30, 60)}
    rows = rows_by_frequency(questions, ranks, articles, passages, (1, 20), seed=3, num=200)
    holders = {
        ALL: range(60),
        NO_ENTITY: range(2, 60, 4),
        "entity in 1 passage": range(3, 60, 4),  # Ada Bell
        "entity in 2 passages": range(1, 60, 4),  # Bell
        "entity in 3 passages": range(0, 60, 4),  # Ada
    }
    assert {(row.bucket, row.system, row.k) for row in rows} == {
        (bucket, system, k) for bucket in holders for system in ranks for k in (1, 20)
    }
    for row in rows:
        at = list(holders[row.bucket])
        groups = [articles[number] for number in at]
        own, words = (hit_within(ranks[system][at], row.k) for system in (row.system, BM25))
        assert (row.n, row.articles) == (len(at), len(set(groups)))
        assert row.value == pytest.approx(own.mean())
        assert (row.low, row.high) == share_interval(own, groups, 3, 200)
        if row.system == BM25:
            assert row.over_bm25 is None
        else:
            assert row.over_bm25.value == pytest.approx(own.mean() - words.mean())
            assert row.over_bm25[1:3] == cluster_interval(own - words, groups, 3, 200)
            assert row.over_bm25.p == paired_test(own, words, groups, 3)
    alone = rows_by_frequency(questions, {"index": ranks["index"]}, articles, passages)
    assert {row.over_bm25 for row in alone} == {None}


def test_the_table_has_bm25_once_and_every_variant_beside_the_papers_text():
    questions, articles = ["Who met Ada?", "who met him?"] * 4, [f"article {at % 3}" for at in range(8)]
    one, none, far = (np.full(8, rank) for rank in (0, -1, 3))
    study = SimpleNamespace(config=SimpleNamespace(paper="NQ 80.1, BM25 64.4"))

    def results(name, ranks_Q):
        rows = rows_by_frequency(questions, {BM25: far, "study-1": ranks_Q}, articles, ["Ada"], (1, 5), num=50)
        system_ranks = [
            QuestionRanks(system, "dev", list("abcdefgh"), articles, ranks.tolist(), [None] * 8)
            for system, ranks in (("study-1", ranks_Q), ("bm25", far))
        ]
        report = to_plain({"sets": [{"questions": "dev", "rows": rows}], "ranks": system_ranks})
        return VariantResult(name, {}, "", {}, {}, {"entity_frequency": [report | {"seed": 1}]})

    variants = [results("mean", one), results("snippets", none), VariantResult("x", {}, "", {}, {}, {})]
    answer_ranks = [(ranks.system, list(ranks.answer_ranks)) for ranks in entity_ranks(variants)]
    assert answer_ranks == [("mean", [0] * 8), (BM25, [3] * 8), ("snippets", [-1] * 8)]
    table = entity_table(study, variants)
    lines = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [(row["system"], row["bucket"], row["n"]) for row in lines] == [
        (system, bucket, n)
        for system in (BM25, "mean", "snippets")
        for bucket, n in ((ALL, 8), (NO_ENTITY, 4), ("entity in 1 passage", 4))
    ]
    without = "(no interval, as articles agree)"
    assert (lines[0]["top-1"], lines[0]["top-5"]) == ("0.0 (0.0 to 70.8)", "100.0 (29.2 to 100.0)"), "3 articles"
    assert lines[0]["top-1 over BM25, p"] == ""
    assert lines[3]["top-1 over BM25, p"].startswith(f"+100.0 {without}, ")
    assert lines[6]["top-5 over BM25, p"].startswith(f"-100.0 {without}, ")
    assert "NQ 80.1, BM25 64.4" in table.note
    assert entity_table(study, [VariantResult("x", {}, "", {}, {}, {})]) is None


@pytest.mark.usefixtures("without_ray")
@pytest.mark.slow
@pytest.mark.data
@pytest.mark.ray
def test_the_step_ranks_as_evaluate_does_and_divides_those_questions(own_index, run_over):
    store = Store(str(own_index))
    report = entity_frequency(run_over(own_index), options={"k": [5, 1]})
    rows = {(row.system, row.bucket, row.k): row for row in report.sets[0].rows}
    results = evaluate(run_over(own_index, evaluate={"bm25": True}))
    assert [ranks.system for ranks in report.ranks] == ["index", "bm25"]
    names = {"bm25": BM25}
    for row in results.rows:
        kind, _, k = row.metric.partition("/top-")
        if kind == "answer" and k in ("1", "5"):
            own = rows[names.get(row.system, row.system), ALL, int(k)]
            assert (own.value, own.low, own.high, own.n) == (row.value, row.low, row.high, row.n)
    questions = read_questions(only_corpus(store), "dev")
    texts = [passage.text for passage in Corpus.open(store, "corpus")]
    entity_names = [entity for question in questions if (entity := entity_of(question.text))]
    assert rows["index", NO_ENTITY, 1].n == len(questions) - len(entity_names)
    spans = [
        (row.low_frequency, row.high_frequency, row.n) for row in report.sets[0].rows if row.low_frequency is not None
    ]
    assert sum(n for *_, n in set(spans)) == len(entity_names)
    counts = [sum(has_answer(text, [entity]) for text in texts) for entity in entity_names]
    for low, high, n in spans:
        assert sum(low <= count <= high for count in counts) == n
    write_questions(
        only_corpus(store), "bare", [question._replace(answers=(), answer_starts=()) for question in questions]
    )
    with pytest.raises(ConfigError, match=r"entity_frequency needs answers; question set 'bare' has none"):
        entity_frequency(run_over(own_index, evaluate={"questions": ["bare"]}))
