"""Feedback views and their clusters against slow loops; the same bytes in any order, over any shards."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mvr_ray.core.refining.feedback import MAX_ROUNDS, SAME_COSINE, feedback_views, own_norms, spherical_clusters
from mvr_ray.core.refining.pseudo_labels import Labels


def unit(seed: int, num: int, dimension: int = 6) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(num, dimension))
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def labels_of(rows: list[tuple[int, int, bool]]) -> Labels:
    question, passage, positive = np.array(rows, np.int64).reshape(-1, 3).T
    return Labels(question, passage, np.zeros(len(rows), np.int16), positive.astype(bool))


def test_a_feedback_view_is_the_weighted_unit_mean_of_the_questions_that_the_passage_answered():
    queries = np.array([[3.0, 0.0], [0.0, 3.0], [0.0, -3.0], [5.0, 5.0]], np.float32)
    norms = np.array([2.0, 1.0, 10.0, 1.0])
    labels = labels_of(
        [(0, 2, True), (1, 2, True), (3, 2, False), (3, 0, True), (0, 1, False), (1, 3, True), (2, 3, True)]
    )
    views = feedback_views(queries, labels, norms, weight=0.5)
    assert views.passage_F.tolist() == [0, 2]
    close = feedback_views(np.array([[1e-6, 3.0], [0.0, -3.0]], np.float32), labels.take(np.array([0, 1])), norms)
    assert (len(close.passage_F), close.num_cancelled) == (0, 1), "what rounding leaves of a mean is no direction"
    half = math.sqrt(0.5)
    np.testing.assert_allclose(views.vectors_FD, [[half, half], [5 * half, 5 * half]], rtol=1e-6)
    assert views.num_cancelled == 1


@settings(max_examples=50)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 1.0))
def test_every_feedback_view_has_weight_times_the_norm_of_its_passage_and_the_direction_of_a_loop(seed, weight):
    rng = np.random.default_rng(seed)
    queries = rng.normal(size=(6, 4)).astype(np.float32)
    norms = rng.uniform(0.5, 3.0, 5)
    pairs = [(q, p, bool(rng.random() < 0.5)) for q in range(6) for p in range(5) if rng.random() < 0.6]
    if not pairs:
        return
    views = feedback_views(queries, labels_of(pairs), norms, weight=weight)
    assert views.passage_F.tolist() == sorted({p for _, p, positive in pairs if positive})
    for passage, vector in zip(views.passage_F, views.vectors_FD):
        mean = np.mean([queries[q].astype(np.float64) for q, p, positive in pairs if positive and p == passage], axis=0)
        np.testing.assert_allclose(vector, weight * norms[passage] * mean / np.linalg.norm(mean), rtol=2e-6, atol=1e-7)


def test_feedback_without_positives_makes_no_view():
    views = feedback_views(np.ones((2, 3), np.float32), labels_of([(0, 0, False), (1, 1, False)]), np.ones(2))
    assert views.passage_F.tolist() == []
    assert views.vectors_FD.shape == (0, 3)


def test_norms_are_means_over_own_views_and_leave_feedback_views_out():
    vectors = np.array([[3, 4], [0, 1], [0, 90], [6, 8]], np.float16)
    norms = own_norms(vectors, np.array([0, 3, 4]), np.array([0, 2, 8, 1], np.int16), num_views=8)
    assert norms.tolist() == [3.0, 10.0]
    assert own_norms(np.empty((0, 2), np.float32), np.array([0]), np.empty(0, np.int16), 8).tolist() == []


def slow_clusters(unit_ND: np.ndarray, most: int) -> list[set[int]]:
    """Farthest-first starts and k-means on the sphere, one number at a time; clusters as sets, largest first."""
    rows = sorted(range(len(unit_ND)), key=lambda row: unit_ND[row].tobytes())
    vectors = [[float(x) for x in unit_ND[row]] for row in rows]

    def dot(x: list[float], y: list[float]) -> float:
        return math.fsum(a * b for a, b in zip(x, y))

    centres: list[list[float]] = []
    whole = [math.fsum(column) for column in zip(*vectors)]
    while len(centres) < most:
        nearest = [max(dot(v, c) for c in centres or [whole]) for v in vectors]
        farthest = nearest.index(min(nearest))
        if centres and nearest[farthest] > SAME_COSINE:
            break
        centres.append(vectors[farthest])
    member = [0] * len(vectors)
    for _ in range(MAX_ROUNDS):
        before = member
        scores = [[dot(v, c) for c in centres] for v in vectors]
        member = [row.index(max(row)) for row in scores]
        for cluster in set(member):
            own = [v for v, one in zip(vectors, member) if one == cluster]
            total = [math.fsum(column) for column in zip(*own)]
            centres[cluster] = [x / math.sqrt(dot(total, total)) for x in total]
        if member == before:
            break
    positions = [[at for at, one in enumerate(member) if one == cluster] for cluster in set(member)]
    return [{rows[at] for at in own} for own in sorted(positions, key=lambda own: (-len(own), own[0]))]


@settings(max_examples=80)
@given(st.integers(0, 2**32 - 1), st.integers(1, 14), st.integers(1, 5))
def test_clusters_are_those_of_a_slow_transcription(seed, num, most):
    vectors = unit(seed, num)
    clusters_N = spherical_clusters(vectors, most)
    assert [set(np.flatnonzero(clusters_N == c).tolist()) for c in range(clusters_N.max() + 1)] == slow_clusters(
        vectors, most
    )


@settings(max_examples=80)
@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 6), st.integers(1, 3))
def test_clusters_part_all_questions_none_is_empty_and_the_largest_comes_first(seed, num, most, copies):
    vectors = np.tile(unit(seed, num), (copies, 1))
    clusters_N = spherical_clusters(vectors, most)
    sizes = np.bincount(clusters_N)
    assert (sizes > 0).all()
    assert len(sizes) <= min(most, num)
    assert sizes.tolist() == sorted(sizes, reverse=True)
    assert (clusters_N == np.tile(clusters_N[:num], copies)).all(), "equal questions are in one cluster"


@pytest.mark.parametrize("most", [2, 4])
def test_questions_that_differ_by_rounding_alone_are_one(most):
    one = np.float32(unit(3, 1))
    vectors = np.concatenate([one, np.nextafter(one, np.float32(2)), one]).astype(np.float64)
    assert spherical_clusters(vectors, most).tolist() == [0, 0, 0]
    labels = labels_of([(q, 0, True) for q in range(3)])
    views = feedback_views(vectors.astype(np.float32), labels, np.ones(1), clusters=most)
    assert len(views.passage_F) == 1


def test_bundles_of_questions_get_a_view_each_and_the_view_of_the_larger_bundle_comes_first():
    rng = np.random.default_rng(8)
    queries = (np.eye(8)[[2, 0, 2, 5, 0, 2]] + 0.01 * rng.normal(size=(6, 8))).astype(np.float32)
    labels = labels_of([(q, 3, True) for q in range(6)])
    views = feedback_views(queries, labels, np.full(4, 2.0), weight=0.5, clusters=3)
    assert views.passage_F.tolist() == [3, 3, 3]
    assert np.abs(views.vectors_FD).argmax(axis=1).tolist() == [2, 0, 5]
    np.testing.assert_allclose(np.linalg.norm(views.vectors_FD, axis=1), 1.0, rtol=1e-6)
    more = feedback_views(queries, labels, np.full(4, 2.0), weight=0.5, clusters=9)
    assert len(more.passage_F) == 6, "no more views than distinct questions"


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.booleans())
def test_neither_the_order_of_questions_nor_how_passages_are_spread_changes_a_byte(seed, clusters, double):
    """As questions are asked in another order, and as each passage is refined alone, in a shard of its own."""
    rng = np.random.default_rng(seed)
    num, passages = 12, 4
    queries = rng.normal(size=(num, 5)).astype(np.float64 if double else np.float32)
    queries[3] = queries[7]
    norms = rng.uniform(0.5, 3.0, passages)
    pairs = [(q, p, bool(rng.random() < 0.7)) for q in range(num) for p in range(passages) if rng.random() < 0.7]
    whole = feedback_views(queries, labels_of(pairs), norms, clusters=clusters)

    order = rng.permutation(num)
    place = np.argsort(order)
    new_pairs = [(int(place[q]), p, positive) for q, p, positive in pairs]
    again = feedback_views(queries[order], labels_of(sorted(new_pairs)), norms, clusters=clusters)
    assert all(np.array_equal(a, b) for a, b in zip(whole, again))

    for passage in range(passages):
        own = [(q, 0, positive) for q, p, positive in pairs if p == passage]
        alone = feedback_views(queries, labels_of(own), norms[[passage]], clusters=clusters)
        assert alone.vectors_FD.tobytes() == whole.vectors_FD[whole.passage_F == passage].tobytes()
    assert whole.vectors_FD.dtype == np.float32


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(2, 5))
def test_each_of_several_views_is_that_of_its_cluster_alone(seed, clusters):
    rng = np.random.default_rng(seed)
    queries = rng.normal(size=(9, 5)).astype(np.float32)
    views = feedback_views(queries, labels_of([(q, 0, True) for q in range(9)]), np.array([2.0]), clusters=clusters)
    directions = queries.astype(np.float64) / np.linalg.norm(queries.astype(np.float64), axis=1, keepdims=True)
    groups = spherical_clusters(directions, clusters)
    assert len(views.vectors_FD) == groups.max() + 1
    for cluster, vector in enumerate(views.vectors_FD):
        alone = labels_of([(int(q), 0, True) for q in np.flatnonzero(groups == cluster)])
        assert vector.tobytes() == feedback_views(queries, alone, np.array([2.0])).vectors_FD[0].tobytes()


def test_shares_weigh_the_questions_of_a_mean_and_what_is_taken_away_is_taken_from_each():
    queries = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    labels = labels_of([(0, 0, True), (1, 0, True)])
    views = feedback_views(queries, labels, np.ones(1), weight=1.0, share_Q=np.array([3.0, 1.0]))
    np.testing.assert_allclose(views.vectors_FD, [np.array([3, 1]) / math.sqrt(10)], rtol=1e-6)
    away = feedback_views(queries, labels, np.ones(1), weight=1.0, clusters=2, offset_PD=np.array([[0.0, -1.0]]))
    clusters_N = sorted(vector.tolist() for vector in away.vectors_FD)
    np.testing.assert_allclose(clusters_N, [[0, 1], [math.sqrt(0.5)] * 2], atol=1e-6)


def test_questions_whose_sum_rounds_by_its_order_give_the_same_bytes_in_any_order():
    queries = np.array([[1e20, 1e20], [-1e20, 1e20], [1.0, 0.0]], np.float32)
    labels = labels_of([(q, 0, True) for q in range(3)])
    orders = itertools.permutations(range(3))
    assert len({feedback_views(queries[[*order]], labels, np.ones(1)).vectors_FD.tobytes() for order in orders}) == 1
