"""The plan of an epoch, joining, shares, cloze: laws over random data."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mvr_ray.core.encoding.length_batches import token_batches
from mvr_ray.core.encoding.snippets import Splitter
from mvr_ray.core.judging.answers import AnswerMatcher
from mvr_ray.core.learning.batches import Example, join_batch, negatives_for, plan_epoch, rank_share
from mvr_ray.core.learning.cloze import cloze_example
from mvr_ray.types import Passage

collections = st.lists(st.integers(0, 9), min_size=8, max_size=60)


@settings(max_examples=60)
@given(passages=collections, batch=st.integers(2, 8), per_passage=st.integers(1, 4), siblings=st.booleans())
def test_an_epoch_brings_every_example_once_and_fills_its_last_batch(passages, batch, per_passage, siblings):
    passage_E = np.array(passages)
    plan_SB = plan_epoch(
        passage_E, passage_E // 3 if siblings else None, batch=batch, per_passage=per_passage, seed=1, epoch=0
    )
    flat = plan_SB.reshape(-1).tolist()
    assert plan_SB.shape == (-(-len(passages) // batch), batch)
    assert sorted(flat[: len(passages)]) == list(range(len(passages)))
    assert all(len(set(row)) == batch for row in plan_SB.tolist())


@settings(max_examples=60)
@given(passages=collections, per_passage=st.integers(2, 4), siblings=st.booleans())
def test_questions_of_a_passage_stand_together_up_to_the_limit(passages, per_passage, siblings):
    passage_E = np.array(passages)
    article_E = passage_E // 3 if siblings else None
    plan_SB = plan_epoch(passage_E, article_E, batch=6, per_passage=per_passage, seed=1, epoch=0)
    flat = plan_SB.reshape(-1)[: len(passages)]
    longest = Counter(passages)
    runs = Counter()
    at = 0
    while at < len(flat):
        end = at + 1
        while end < len(flat) and passage_E[flat[end]] == passage_E[flat[at]]:
            end += 1
        runs[passage_E[flat[at]]] += 1
        at = end
    for passage, number in runs.items():
        assert number <= -(-longest[passage] // per_passage)


def test_questions_of_a_passage_beyond_the_limit_are_spread_over_the_epoch():
    """Two groups of a passage are neighbours by chance alone, so not in most of twenty epochs."""
    passage_E = np.array([0] * 8 + list(range(1, 393)))
    longest_runs = []
    for epoch in range(20):
        plan_SB = plan_epoch(passage_E, None, batch=8, per_passage=2, seed=1, epoch=epoch)
        places = np.flatnonzero(passage_E[plan_SB.reshape(-1)[: len(passage_E)]] == 0)
        runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
        longest_runs.append(max(map(len, runs)))
    assert np.median(longest_runs) == 2


def test_siblings_share_batches_and_no_article_takes_a_whole_one():
    passage_E = np.arange(400)
    article_E = passage_E // 40
    plan_SB = plan_epoch(passage_E, article_E, batch=8, per_passage=1, seed=3, epoch=0)
    counts = [Counter(article_E[row].tolist()) for row in plan_SB]
    assert np.mean([max(count.values()) for count in counts]) >= 4
    assert sum(len(count) == 1 for count in counts) < len(counts) / 2
    alone = plan_epoch(passage_E, None, batch=8, per_passage=1, seed=3, epoch=0)
    assert np.mean([max(Counter(article_E[row].tolist()).values()) for row in alone]) < 4


def test_a_plan_depends_on_seed_and_epoch_alone():
    passage_E = np.arange(100) // 2

    def plan(seed, epoch):
        return plan_epoch(passage_E, None, batch=10, per_passage=2, seed=seed, epoch=epoch)

    assert np.array_equal(plan(1, 0), plan(1, 0))
    assert not np.array_equal(plan(1, 0), plan(1, 1))
    assert not np.array_equal(plan(1, 0), plan(2, 0))


def test_a_passage_of_two_questions_comes_once_and_other_positives_are_known():
    a, b, c = (Passage(i, "", i) for i in "abc")
    batch = join_batch(
        [
            Example("1", a, 5, negatives=(c, b)),
            Example("2", b, known_ids=("c", "gone", "b")),
            Example("3", a, negatives=(c,)),
        ]
    )
    assert [p.id for p in batch.passages] == ["a", "b", "c"]
    assert batch.positive_Q.tolist() == [0, 1, 0]
    assert batch.known_QP.tolist() == [[False] * 3, [False, False, True], [False] * 3]
    assert batch.answer_start_Q.tolist() == [5, -1, -1]


@pytest.mark.parametrize(("questions", "passages", "world"), [(8, 11, 4), (8, 3, 4), (4, 4, 1), (6, 7, 2)])
def test_shares_put_together_are_the_batch(questions, passages, world):
    shares = [rank_share(questions, passages, rank, world) for rank in range(world)]
    assert [q for share in shares for q in share.questions] == list(range(questions))
    assert [p for share in shares for p, real in zip(share.passages, share.real_P) if real] == list(range(passages))
    assert len({len(share.passages) for share in shares}) == 1


TEXT = "The Rhine rises in the Alps of Switzerland. It flows north to the sea. Basel is the first large city on it."


@pytest.mark.parametrize("seed", range(12))
def test_a_cloze_question_is_a_sentence_that_left_its_passage_and_knows_where_it_stood(seed):
    example = cloze_example(Passage("p", "Rhine", TEXT), Splitter(), 0.0, np.random.default_rng(seed))
    assert example.text in TEXT
    assert example.text not in example.passage.text
    assert sorted((example.text + " " + example.passage.text).split()) == sorted(TEXT.split())
    assert 0 <= example.answer_start < len(example.passage.text)
    before = TEXT[: TEXT.index(example.text)].rstrip()
    assert example.passage.text.startswith(before)
    if not TEXT.endswith(example.text):
        assert (
            example.passage.text[example.answer_start :]
            == TEXT[TEXT.index(example.text) + len(example.text) :].lstrip()
        )


def test_a_kept_cloze_sentence_stays_and_points_at_itself():
    example = cloze_example(Passage("p", "Rhine", TEXT), Splitter(), 1.0, np.random.default_rng(0))
    assert example.passage.text == TEXT
    assert TEXT[example.answer_start :].startswith(example.text)


def test_a_passage_of_one_sentence_keeps_it():
    example = cloze_example(Passage("p", "", "Only one sentence is here."), Splitter(), 0.0, np.random.default_rng(0))
    assert example.passage.text == example.text == "Only one sentence is here."


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(64, 600))
def test_batches_hold_every_row_once_and_stay_within_the_budget(lengths, budget):
    batches = token_batches(lengths, budget)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    for batch in batches:
        num_tokens = len(batch) * max(lengths[row] for row in batch)
        assert num_tokens <= budget or len(batch) == 1
    widest = [max(lengths[row] for row in batch) for batch in batches]
    assert widest == sorted(widest, reverse=True)


def test_a_passage_with_any_answer_is_no_negative_and_one_with_its_letters_is():
    texts = "The café is in Rome.", "It is ROME.", "A cafe\u0301.", "A cafeteria.", "Romeo."
    own, *others, part = (Passage(str(at), "", text) for at, text in enumerate(texts))
    examples = [Example("q0", own, 16, answer_stop=20, answers=("Rome", "café"))]
    examples += [Example("q", other) for other in (*others, part)]
    assert negatives_for(0, examples, 5, AnswerMatcher()) == [others[2], part]
    assert negatives_for(3, examples, 2, AnswerMatcher()) == [part, own], "a question without answers excludes none"


def test_a_teachers_scores_belong_to_the_positive_and_then_to_the_negatives_in_order():
    a, b, c = (Passage(i, "", i) for i in "abc")
    batch = join_batch([Example("1", a, negatives=(c, b), teacher=(3.0, 2.0, 1.0)), Example("2", b, negatives=(c,))])
    assert [p.id for p in batch.passages] == ["a", "b", "c"]
    np.testing.assert_array_equal(batch.teacher_QP, [[3.0, 1.0, 2.0], [np.nan] * 3])


def test_other_positives_and_passages_that_a_pattern_matches_are_no_negatives():
    own, iron, year, salt = (
        Passage(name, "", text) for name, text in (("a", "In 1976."), ("b", "Iron."), ("c", "In 1977."), ("d", "Salt."))
    )
    examples = [Example("q0", own, known_ids=("b",), answers=("197[67]",))]
    examples += [Example(f"q{at}", other) for at, other in enumerate((iron, year, salt), 1)]
    assert negatives_for(0, examples, 3, AnswerMatcher()) == [year, salt]
    assert negatives_for(0, examples, 3, AnswerMatcher("regex")) == [salt]


def test_a_cloze_question_is_a_short_sentence_only_where_there_is_no_long_one():
    short, long = "Salt is old.", "Trade with the north was older than the town."
    for seed in range(8):
        rng = np.random.default_rng(seed)
        assert cloze_example(Passage("p", "", f"{short} {long}"), Splitter(), 0.0, rng).text == long
    assert cloze_example(Passage("p", "", short), Splitter(), 0.0, rng).text == short
