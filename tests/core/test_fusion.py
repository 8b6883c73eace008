"""Fusing two rankings, by hand and against a slow sort."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mvr_ray.core.searching.fusion import choose_weight, fuse

scores = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 9).map(float), max_size=6)


def test_a_passage_that_a_list_lacks_has_the_lists_lowest_score():
    hits = fuse({"a": 9.0, "b": 5.0}, {"b": 0.9, "c": 0.7}, 10.0, 3)
    assert [hit[:2] for hit in hits] == [("a", 9 + 7), ("b", 5 + 9), ("c", 5 + 7)]


@given(first=scores, second=scores, weight=st.floats(0, 5), k=st.integers(1, 9))
@settings(max_examples=100)
def test_fusion_is_the_sorted_sum_with_ties_by_id(first, second, weight, k):
    low_first, low_second = min(first.values(), default=0.0), min(second.values(), default=0.0)
    total = {p: first.get(p, low_first) + weight * second.get(p, low_second) for p in {*first, *second}}
    wanted = sorted(total.items(), key=lambda item: (-item[1], item[0]))[:k]
    assert [hit[:2] for hit in fuse(first, second, weight, k)] == wanted


@given(first=scores)
@settings(max_examples=30)
def test_weight_zero_ranks_as_the_first_list_does(first):
    found = [one.passage_id for one in fuse(first, {"a": 1.0}, 0.0, 9) if one.passage_id in first]
    assert found == sorted(first, key=lambda p: (-first[p], p))


def test_the_weight_is_the_smallest_that_answers_most_questions():
    pairs = [({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}), ({"a": 1.0, "b": 0.5}, {"a": 0.0, "b": 1.0})]
    assert choose_weight(pairs, [{"b"}, {"b"}], [0.0, 0.4, 0.6, 2.0, 3.0]) == (2.0, 1.0)
    assert choose_weight(pairs, [{"a"}, {"b"}], [0.0, 0.6, 2.0]) == (0.6, 1.0)
