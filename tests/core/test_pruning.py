"""Dropping views costs no query more than the bound says, and drops what could be dropped."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mvr_ray.core.searching.pruning import hull_distance, prune_block, prune_views
from mvr_ray.types import EmbeddingBlock

SLOW = settings(max_examples=60)


def drawn_views(seed: int, kind: str, num_views: int, dimension: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    views = rng.normal(size=(num_views, dimension))
    if kind == "alike":
        views = rng.normal(size=dimension) + 0.05 * views
    if kind == "inside":  # the last half are mixtures of the others
        half = max(1, num_views // 2)
        views[half:] = rng.dirichlet(np.ones(half), num_views - half) @ views[:half]
    if kind == "copies":
        views = views[rng.integers(0, max(1, num_views // 2), num_views)]
    return views.astype(np.float32).astype(np.float64)


@given(
    seed=st.integers(0, 2**20),
    kind=st.sampled_from(["apart", "alike", "inside", "copies"]),
    num_views=st.integers(1, 8),
    dimension=st.sampled_from([2, 5, 24]),
    tolerance=st.sampled_from([0.0, 1e-3, 0.05, 0.5]),
)
@SLOW
def test_no_query_loses_more_than_the_bound(seed, kind, num_views, dimension, tolerance):
    """Random queries, and those that a dropped view likes best: along what its kept siblings lack of it."""
    views = drawn_views(seed, kind, num_views, dimension)
    keep_V, worst = prune_views(views, tolerance)
    assert keep_V.any() and worst <= tolerance
    small_keep_V, small_worst = prune_views(views / 64, tolerance)
    assert (small_keep_V == keep_V).all() and small_worst == worst, "distances are relative to the views' norms"
    rng = np.random.default_rng(seed + 1)
    queries = [rng.normal(size=dimension) for _ in range(50)]
    queries += [views[view] - views[keep_V].mean(0) for view in np.flatnonzero(~keep_V)]
    norms = np.linalg.norm(views, axis=1)
    for query in queries:
        scores = views @ query
        slack = 1e-9 * np.linalg.norm(query) * norms.max()
        for view in np.flatnonzero(~keep_V):
            assert scores[view] <= scores[keep_V].max() + np.linalg.norm(query) * worst * norms[view] + slack


@given(seed=st.integers(0, 2**20), num_views=st.integers(2, 6), tolerance=st.sampled_from([0.0, 1e-3, 0.2]))
@SLOW
def test_copies_and_mixtures_are_dropped_and_nothing_that_stands_out(seed, num_views, tolerance):
    copies = drawn_views(seed, "copies", num_views, 24)
    keep_V, worst = prune_views(copies, tolerance)
    assert len(np.unique(copies, axis=0)) == keep_V.sum() and worst == 0
    firsts = {copies[at].tobytes(): at for at in reversed(range(num_views))}
    assert sorted(firsts.values()) == np.flatnonzero(keep_V).tolist()
    apart = np.eye(num_views)
    assert prune_views(apart, tolerance)[0].all()
    inside = drawn_views(seed, "inside", num_views, 24)
    assert bool(prune_views(inside, 1e-5)[0][max(1, num_views // 2) :].any()) is False


@given(seed=st.integers(0, 2**20), num_others=st.integers(2, 5))
@SLOW
def test_the_distance_is_never_below_the_true_one_and_close_to_it(seed, num_others):
    """Against the projection onto every face, of which one is the true answer."""
    rng = np.random.default_rng(seed)
    others, view = rng.normal(size=(num_others, 7)), rng.normal(size=7)
    true = np.inf
    for size in range(1, num_others + 1):
        for face in itertools.combinations(range(num_others), size):
            base, *rest = others[list(face)]
            edges = np.array([one - base for one in rest]).reshape(len(rest), 7)
            steps = np.linalg.lstsq(edges.T, view - base, rcond=None)[0] if len(rest) else np.zeros(0)
            if (steps >= -1e-12).all() and steps.sum() <= 1 + 1e-12:
                true = min(true, float(np.linalg.norm(view - base - steps @ edges)))
    actual = hull_distance(view, others)
    assert true - 1e-9 <= actual <= true * (1 + 1e-4) + 1e-9


def test_a_block_keeps_ids_order_and_view_numbers():
    rng = np.random.default_rng(5)
    first, second = rng.normal(size=(2, 8)).astype(np.float16)
    vectors = np.stack([first, second, first, second, second])
    block = EmbeddingBlock(["a", "b", "c"], np.array([0, 3, 3, 5]), np.array([0, 2, 5, 1, 7], np.int16), vectors)
    result = prune_block(block, 0.0)
    assert (result.num_dropped, result.worst) == (2, 0.0)
    assert result.block.ids == block.ids
    assert result.block.row_ptr.tolist() == [0, 2, 2, 3]
    assert result.block.view_numbers_N.tolist() == [0, 2, 1]
    assert result.block.vectors_ND.tobytes() == np.stack([first, second, second]).tobytes()


@pytest.mark.parametrize("tolerance", [0.0, 0.1])
def test_of_zero_vectors_one_stays(tolerance):
    assert prune_views(np.zeros((1, 4)), tolerance)[0].tolist() == [True]
    assert prune_views(np.zeros((3, 4)), tolerance)[0].tolist() == [True, False, False]


def test_a_view_near_the_hull_of_others_is_dropped_and_without_tolerance_none_that_is_no_copy():
    near = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.02]])
    keep_V, worst = prune_views(near, 0.05)
    assert keep_V.tolist() == [True, True, False]
    assert worst == pytest.approx(0.02 / np.linalg.norm(near[2]), rel=1e-5)
    inside = np.array([[-3.0, 4.0, 1.0], [2.0, 4.0, 1.0], [-0.5, 4.0, 1.0]])  # to the solver, its distance is 0
    assert prune_views(inside, 0.0)[0].all()
    assert prune_views(inside, 1e-9)[0].tolist() == [True, True, False]
