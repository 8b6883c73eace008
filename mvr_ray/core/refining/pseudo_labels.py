"""Label hits by answers: the views of passages that did, or did not, answer a question (AOpt, eq. 8).

A label is a question, a passage, the view that won, and a sign. The caller defines passage numbers (a row of one
shard, or of all shards laid end to end). Labels are in order of question, then passage, each pair once.

Shapes: Q questions, K hits, L labels, N view vectors, D dimension.
"""

from collections.abc import Collection, Sequence
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from mvr_ray.core.searching.exact import BlockTable, Pairs
from mvr_ray.types import EmbeddingBlock, FloatArray, IntArray

BoolArray = NDArray[np.bool_]
Positives = Literal["all", "first"]


class Labels(NamedTuple):
    """question_L, passage_L int64; view_L int16, the winning view number; positive_L bool."""

    question_L: IntArray
    passage_L: IntArray
    view_L: IntArray
    positive_L: BoolArray

    def take(self, chosen_L: BoolArray | IntArray) -> "Labels":
        """Select labels by mask or position."""
        return Labels._make(column[chosen_L] for column in self)

    @property
    def num_positive(self) -> int:
        return int(self.positive_L.sum())

    @property
    def num_negative(self) -> int:
        return len(self.positive_L) - self.num_positive


class LabelMatrices(NamedTuple):
    """Labels as weights: entry (n, q) of `positive_NQ` is 1 where vector n answered question q; negatives alike."""

    positive_NQ: csr_array
    negative_NQ: csr_array

    def rows(self, chosen_M: IntArray) -> "LabelMatrices":
        """Select the labels of some vectors."""
        return LabelMatrices(csr_array(self.positive_NQ[chosen_M]), csr_array(self.negative_NQ[chosen_M]))

    def transpose(self) -> "LabelMatrices":
        """Exchange questions and vectors, for the query-centric step."""
        return LabelMatrices(csr_array(self.positive_NQ.T), csr_array(self.negative_NQ.T))


def labels_from_hits(
    passage_QK: IntArray, view_QK: IntArray, relevant_QK: BoolArray, positives: Positives = "all"
) -> Labels:
    """Label the retrieved passages of each question, best first, -1 on padding.

    `all` is eq. 8: relevant hits are positive, the rest negative. `first` labels only the best-ranked relevant hit as
    positive; the other relevant hits get no label, as they hold the answer.
    """
    real_QK = passage_QK >= 0
    relevant_QK = relevant_QK & real_QK
    positive_QK = relevant_QK & (relevant_QK.cumsum(axis=1) == 1) if positives == "first" else relevant_QK
    labelled_QK = positive_QK | (real_QK & ~relevant_QK)
    in_order_QK = np.argsort(passage_QK, axis=1, kind="stable")
    question_L, at_L = np.nonzero(np.take_along_axis(labelled_QK, in_order_QK, axis=1))
    rank_L = in_order_QK[question_L, at_L]
    return Labels(
        question_L.astype(np.int64),
        passage_QK[question_L, rank_L].astype(np.int64),
        view_QK[question_L, rank_L].astype(np.int16),
        positive_QK[question_L, rank_L],
    )


def gold_relevance(passage_QK: IntArray, gold_Q: Sequence[Collection[int]]) -> BoolArray:
    """Return whether each hit is a gold passage of its question; False on padding."""
    relevant_QK = np.zeros(passage_QK.shape, bool)
    count_Q = np.array([len(gold) for gold in gold_Q], np.int64)
    golds = np.fromiter(chain.from_iterable(gold_Q), np.int64)
    first_Q = count_Q.cumsum() - count_Q
    for number in range(count_Q.max(initial=0)):
        rows = np.flatnonzero(count_Q > number)
        relevant_QK[rows] |= passage_QK[rows] == golds[first_Q[rows] + number, None]
    return relevant_QK & (passage_QK >= 0)


def winning_view_numbers(
    queries_QD: FloatArray, block: EmbeddingBlock, question_L: IntArray, passage_L: IntArray
) -> IntArray:
    """Return the number of the view by which a search would rank the passage for each (question, passage). int16 [L].

    Every passage must have a view.
    """
    view_L = np.empty(len(passage_L), np.int16)
    view_L[np.argsort(passage_L, kind="stable")] = (
        BlockTable([block]).rescore(queries_QD, Pairs(question_L, passage_L)).view_M
    )
    return view_L


def label_matrices(
    slot_L: IntArray, question_L: IntArray, positive_L: BoolArray, num_vectors: int, num_questions: int
) -> LabelMatrices:
    """Build the sparse vectors x questions matrices of the labels. To step only labelled vectors, number only those."""

    def matrix(chosen_L: BoolArray) -> csr_array:
        where = (slot_L[chosen_L], question_L[chosen_L])
        labels_NQ = csr_array((np.ones(int(chosen_L.sum())), where), shape=(num_vectors, num_questions))
        labels_NQ.sum_duplicates()
        labels_NQ.data[:] = 1.0
        return labels_NQ

    return LabelMatrices(matrix(positive_L), matrix(~positive_L))
