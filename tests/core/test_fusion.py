"""Reciprocal rank fusion against its formula."""

from hypothesis import given
from hypothesis import strategies as st

from mvr_ray.core.searching.fusion import fuse_ranks
from mvr_ray.types import Hit

RANKING = st.lists(st.sampled_from("abcdefghij"), unique=True, max_size=8)


def hits(names: list[str], view: int) -> list[Hit]:
    return [Hit(name, 9.0 - rank, view, 0, 0) for rank, name in enumerate(names)]


@given(RANKING, RANKING, st.integers(1, 12))
def test_each_list_adds_the_reciprocal_of_sixty_and_the_rank_and_ties_go_by_id(first, second, k):
    expected = []
    for name in {*first, *second}:
        ranks = [ranking.index(name) + 1 for ranking in (first, second) if name in ranking]
        expected.append((name, sum(1 / (60 + rank) for rank in ranks), 2 if name in second else 1))
    expected.sort(key=lambda one: (-one[1], one[0]))
    result = fuse_ranks([hits(first, 1), hits(second, 2)], k)
    assert [(hit.passage_id, hit.score, hit.view) for hit in result] == expected[:k]
