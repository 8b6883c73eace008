"""Draws and chunks: the same whatever else is there; nothing lost, nothing twice; offsets stay true."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mvr_ray.store.chunks import carry_over, chunk, locate
from mvr_ray.store.sampling import draw, hash_rank, split
from mvr_ray.types import Passage, Question

shares = st.fixed_dictionaries(
    {
        "unseen_share": st.floats(0, 1),
        "known_share": st.floats(0, 0.6),
        "gate_share": st.floats(0, 0.4),
        "seed": st.integers(0, 3),
    }
)


@given(st.sets(st.text(max_size=5), max_size=60), st.integers(1, 20), st.integers(0, 9))
def test_a_draw_is_the_same_in_any_order_and_equals_sorting_all(names: set[str], limit: int, seed: int):
    order = sorted(names)
    random.Random(seed).shuffle(order)
    by_rank = sorted(names, key=lambda name: (hash_rank(name, "purpose"), name))
    assert draw(iter(order), limit, "purpose") == set(by_rank[:limit])


def test_first_names_precede_the_others_of_a_long_stream():
    names = [str(number) for number in range(5000)]
    first = {str(number) for number in range(5000) if number % 1000 == 7}
    others = sorted(set(names) - first, key=lambda name: hash_rank(name, "p"))
    assert draw(iter(names), 10, "p", first=first) == first | set(others[:5])


def test_ranks_of_purposes_and_seeds_are_independent():
    names = [str(number) for number in range(2000)]
    both = draw(names, 1000, "a") & draw(names, 1000, "b")
    seeds = draw(names, 1000, "a", 0) & draw(names, 1000, "a", 1)
    assert 430 < len(both) < 570
    assert 430 < len(seeds) < 570


@given(st.lists(st.integers(0, 9), max_size=60), shares)
def test_a_split_loses_and_repeats_nothing_and_keeps_articles_apart(owners: list[int], settings: dict[str, Any]):
    questions = [Question(str(i), "?") for i in range(len(owners))]
    articles = {str(i): f"article {owner}" for i, owner in enumerate(owners)}
    sets = split(questions, articles, **settings)
    assert sorted(sets) == ["gate", "known", "other", "unseen"]
    assert sorted((q for part in sets.values() for q in part), key=lambda q: int(q.id)) == questions
    for part in sets.values():
        assert part == sorted(part, key=lambda q: int(q.id))
    unseen = {articles[q.id] for q in sets["unseen"]}
    assert unseen.isdisjoint(articles[q.id] for name in ("known", "other", "gate") for q in sets[name])
    assert split(questions, articles, **settings) == sets


def test_split_shares_are_kept():
    questions = [Question(str(i), "?") for i in range(10_000)]
    articles = {str(i): str(i % 100) for i in range(10_000)}
    sets = split(questions, articles, unseen_share=0.3, known_share=0.6, gate_share=0.1, seed=0)
    # 30 of 100 articles are unseen, 3 of those for the gate; of 7,000 questions 60 % are known, 10 % for the gate.
    assert {name: len(part) for name, part in sets.items()} == {
        "unseen": 2700,
        "known": 4200,
        "gate": 700 + 300,
        "other": 2100,
    }


def test_the_gate_has_one_unseen_article_at_least_unless_it_has_no_share():
    questions = [Question(str(i), "?") for i in range(100)]
    articles = {str(i): str(i % 10) for i in range(100)}
    for gate_share, num_articles in ((0.1, 1), (0.7, 2), (0.0, 0)):
        sets = split(questions, articles, unseen_share=0.3, known_share=0.6, gate_share=gate_share, seed=0)
        assert len(sets["unseen"]) == 10 * (3 - num_articles)
        assert len(sets["gate"]) == 10 * num_articles + min(round(gate_share * 70), 28)


texts = (
    st.lists(st.text("ab \n\u00a0", min_size=1, max_size=6), min_size=1, max_size=12).map(" ".join).filter(str.strip)
)


@given(texts, st.integers(1, 5))
def test_chunks_hold_every_word_once_in_order(text: str, words: int):
    chunks = chunk(Passage("p", "T", text), words)
    assert [word for piece in chunks for word in piece.passage.text.split()] == text.split()
    assert all(len(piece.passage.text.split()) == words for piece in chunks[:-1])
    for number, piece in enumerate(chunks):
        assert piece.passage.id == f"p#{number}"
        assert piece.passage.title == "T"
        assert text.startswith(piece.passage.text, piece.start)
    assert chunk(Passage("p", "T", text), 0)[0].passage == Passage("p", "T", text)


@given(texts, st.integers(1, 5), st.data())
def test_answers_follow_their_chunk_with_true_offsets(text: str, words: int, data: st.DataObject):
    start = data.draw(st.integers(0, len(text) - 1))
    stop = data.draw(st.integers(start + 1, len(text)))
    answer = text[start:stop]
    chunks = chunk(Passage("p", "T", text), words)
    place = locate(text, chunks, [answer], [start])
    by_id = {piece.passage.id: piece for piece in chunks}
    home = by_id[place.chunk_ids[0]]
    holders = [p for p in chunks if p.start <= start and stop <= p.start + len(p.passage.text)]
    if holders:
        assert home == holders[0]
        assert home.passage.text.startswith(answer, place.answer_starts[0])
        assert home.start + place.answer_starts[0] == start
    else:
        assert place.answer_starts == (-1,)
        candidates = [p for p in chunks if p.start <= start]
        assert home == (candidates[-1] if candidates else chunks[0])


def test_unknown_offsets_are_looked_for_and_unfound_answers_stay_unknown():
    chunks = chunk(Passage("p", "T", "one two three four five"), 2)
    place = locate("one two three four five", chunks, ["four", "nine", "five"], [])
    assert place.chunk_ids == ("p#1", "p#2")
    assert place.answer_starts == (6, -1, -1)
    assert locate("one two", chunk(Passage("p", "", "one two"), 1), [], []).chunk_ids == ("p#0",)


@pytest.mark.parametrize(
    ("text", "answers", "number", "starts"),
    [
        ("Romeo met Juliet outside of Rome .", ["Rome"], 1, (3,)),
        ("He was born in Besanc\u0327on .", ["Besançon"], 1, (-1,)),
        ("He met her on Sunset Boulevard .", ["sunset boulevard"], 1, (-1,)),
        ("He met her near the U.S. border", ["u. s", "\u200b", " "], 1, (-1, -1, -1)),
        ("he met her in the 北京大学 .", ["北京"], 1, (4,)),
        ("he met her in the end .", ["am", "x y"], 0, (-1, -1)),
    ],
)
def test_an_answer_without_an_offset_is_in_the_chunk_that_holds_it_by_the_rule(text, answers, number, starts):
    place = locate(text, chunk(Passage("p", "T", text), 4), answers, [])
    assert (place.chunk_ids, place.answer_starts) == ((f"p#{number}",), starts)


def test_an_offset_at_which_the_answer_does_not_stand_is_none():
    text = "\U0001f600\U0001f600 Rome is old . Paris is far"
    chunks = chunk(Passage("p", "T", text), 4)
    in_utf16 = len(text[: text.index("Paris")].encode("utf-16-le")) // 2
    for wrong in (in_utf16, 0, 999):
        assert locate(text, chunks, ["Paris"], [wrong]) == ("T", ("p#1",), (2,))


def test_patterns_are_looked_for_in_chunks_and_known_places_stay():
    text = "Born in Bonn . Died 12 May 1977 in Cork"
    chunks = chunk(Passage("p", "T", text), 4)
    place = locate(text, chunks, ["197(6|7)", "bonn", "(", "Cork", "x+"], [], "regex")
    assert place.chunk_ids == ("p#1", "p#0", "p#2") and place.answer_starts == (-1, -1, -1, -1, -1)
    assert locate(text, chunks, ["197(6|7)"], []).chunk_ids == ("p#0",)
    assert locate(text, chunks, ["in"], [text.rindex("in")], "regex") == ("T", ("p#2",), (0,))
    assert locate(text, chunks, ["absent|gone"], [], "regex").chunk_ids == ("p#0",)


def test_a_question_over_chunks_names_each_once_and_no_positive_as_negative():
    question = Question("q", "?", ("a",), ("p", "r"), ("n",), (0,))
    first = locate("a b", chunk(Passage("p", "T", "a b"), 1), ["a"], [0])
    second = locate("c a", chunk(Passage("r", "T", "c a"), 1), ["a"], [])
    assert carry_over(question, {"p": first, "r": second}, ("n#0", "p#0")) == Question(
        "q", "?", ("a",), ("p#0", "r#1"), ("n#0",), (0,)
    )
