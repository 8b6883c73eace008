"""Labels from hits and gold passages, and the views that win, against loops over pairs."""

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mvr_ray.core.refining.pseudo_labels import (
    Labels,
    gold_relevance,
    label_matrices,
    labels_from_hits,
    winning_view_numbers,
)
from mvr_ray.index.base import IndexParams
from mvr_ray.index.kinds import open_index
from mvr_ray.types import EmbeddingBlock


def as_set(labels: Labels) -> set[tuple[int, int, int, bool]]:
    return set(zip(*(column.tolist() for column in labels)))


HITS = np.array([[7, 3, 9, 1], [4, 7, -1, -1], [5, 6, 8, 2]])
VIEWS = np.array([[0, 2, 1, 0], [3, 1, -1, -1], [0, 0, 0, 0]])
RELEVANT = np.array([[False, True, True, False], [True, False, True, True], [False] * 4])


def test_every_relevant_hit_is_positive_and_every_other_negative():
    assert as_set(labels_from_hits(HITS, VIEWS, RELEVANT, "all")) == {
        (0, 7, 0, False),
        (0, 3, 2, True),
        (0, 9, 1, True),
        (0, 1, 0, False),
        (1, 4, 3, True),
        (1, 7, 1, False),
        (2, 5, 0, False),
        (2, 6, 0, False),
        (2, 8, 0, False),
        (2, 2, 0, False),
    }


def test_the_first_relevant_hit_alone_is_positive_and_later_ones_are_not_negative():
    labels = as_set(labels_from_hits(HITS, VIEWS, RELEVANT, "first"))
    assert {label for label in labels if label[3]} == {(0, 3, 2, True), (1, 4, 3, True)}
    assert not any(label[:2] == (0, 9) for label in labels)
    assert {label for label in labels if not label[3]} == {
        label for label in as_set(labels_from_hits(HITS, VIEWS, RELEVANT, "all")) if not label[3]
    }


@settings(max_examples=100)
@given(st.data(), st.sampled_from(["all", "first"]))
def test_labels_equal_a_loop_over_hits_and_stand_in_order(data: st.DataObject, positives: str):
    questions, depth = data.draw(st.integers(0, 4)), data.draw(st.integers(1, 6))
    hits = np.full((questions, depth), -1)
    relevant = np.zeros((questions, depth), bool)
    for question in range(questions):
        rows = data.draw(st.lists(st.integers(0, 9), unique=True, max_size=depth))
        hits[question, : len(rows)] = rows
        relevant[question] = data.draw(st.lists(st.booleans(), min_size=depth, max_size=depth))
    expected = set()
    for question in range(questions):
        has_positive = False
        for rank in range(depth):
            if hits[question, rank] < 0:
                continue
            if not relevant[question, rank]:
                expected.add((question, int(hits[question, rank]), rank, False))
            elif not has_positive or positives == "all":
                expected.add((question, int(hits[question, rank]), rank, True))
                has_positive = True
    views = np.tile(np.arange(depth), (questions, 1))
    labels = labels_from_hits(hits, views, relevant, positives)
    assert as_set(labels) == expected
    pairs = list(zip(labels.question_L.tolist(), labels.passage_L.tolist()))
    assert pairs == sorted(pairs)
    assert labels.num_positive + labels.num_negative == len(pairs)


def test_gold_passages_mark_hits_and_never_padding():
    assert gold_relevance(HITS, [{3}, {-1, 7, 99}, ()]).tolist() == [
        [False, True, False, False],
        [False, True, False, False],
        [False] * 4,
    ]


@given(st.integers(0, 6), st.integers(0, 5), st.data())
def test_gold_passages_are_those_of_the_own_question(num_questions: int, k: int, data: st.DataObject):
    numbers = st.integers(-1, 5)
    hits = [data.draw(st.lists(numbers, min_size=k, max_size=k)) for _ in range(num_questions)]
    golds = [data.draw(st.sets(numbers)) for _ in range(num_questions)]
    relevant_QK = gold_relevance(np.array(hits, np.int64).reshape(num_questions, k), golds)
    assert relevant_QK.tolist() == [[hit >= 0 and hit in gold for hit in row] for row, gold in zip(hits, golds)]


def random_passages(rng: np.random.Generator, passages: int, dimension: int):
    counts = rng.integers(1, 5, passages)
    row_ptr = np.concatenate([[0], np.cumsum(counts)])
    numbers = np.concatenate([np.sort(rng.choice(8, count, replace=False)) for count in counts]).astype(np.int16)
    return row_ptr, numbers, rng.normal(size=(int(row_ptr[-1]), dimension)).astype(np.float16)


def test_the_winning_view_is_the_best_scored_and_the_first_of_equals():
    rng = np.random.default_rng(3)
    row_ptr, numbers, vectors = random_passages(rng, 12, 4)
    vectors[row_ptr[5] : row_ptr[6]] = vectors[row_ptr[5]]
    queries = rng.normal(size=(6, 4)).astype(np.float32)
    question, passage = rng.integers(0, 6, 40), rng.integers(0, 12, 40)
    block = EmbeddingBlock([f"{row:02}" for row in range(12)], row_ptr, numbers, vectors)
    views = winning_view_numbers(queries, block, question, passage)
    for view, q, p in zip(views, question, passage):
        own = slice(row_ptr[p], row_ptr[p + 1])
        scores = [np.float32(sum(float(a) * float(b) for a, b in zip(queries[q], v))) for v in vectors[own]]
        assert view == numbers[own][scores.index(max(scores))]


def test_a_label_goes_to_the_view_that_wins_the_search():
    """The first view scores 0 or 1 in float64, by the order of the sum; the search's order gives 0."""
    vectors = np.array([[1, 2.0**60, -(2.0**60), 1], [0.5, 0, 0, 0]], np.float32)
    block = EmbeddingBlock(["a"], np.array([0, 2]), np.array([0, 1], np.int16), vectors)
    queries, first = np.ones((1, 4), np.float32), np.array([0])
    index = open_index(IndexParams(kind="flat"), [block], Path())
    assert index.search(queries, 1).views_QK.tolist() == [[1]]
    assert winning_view_numbers(queries, block, first, first).tolist() == [1]


def test_matrices_hold_each_label_once_on_its_side():
    slot, question = np.array([0, 2, 2, 2]), np.array([1, 0, 0, 1])
    positive = np.array([True, True, True, False])
    matrices = label_matrices(slot, question, positive, 3, 2)
    assert matrices.positive_NQ.toarray().tolist() == [[0, 1], [0, 0], [1, 0]]
    assert matrices.negative_NQ.toarray().tolist() == [[0, 0], [0, 0], [0, 1]]
    assert matrices.transpose().positive_NQ.toarray().tolist() == [[0, 0, 1], [1, 0, 0]]


def test_no_hits_give_no_labels_and_empty_matrices():
    labels = labels_from_hits(np.empty((0, 5), int), np.empty((0, 5), int), np.empty((0, 5), bool))
    assert as_set(labels) == set()
    assert label_matrices(labels.passage_L, labels.question_L, labels.positive_L, 4, 0).positive_NQ.shape == (4, 0)
