"""Turn nearest vectors into the best passages, for all approximate indexes.

A vector index returns vectors; k vectors may belong to one passage. So more are fetched, six times k at first (or the
beam of a graph search, if that is more) and twice as many each further time, until a query has k distinct passages, or
`beam_passages`. Where an index cannot find k passages (a badly connected graph, too few probed lists), the shard is
scanned. Every candidate is then scored exactly with all its views.

Under a filter the vectors of excluded passages are dropped, and the first fetch grows by 1 / the share that passes.
Where few pass, or scanning their vectors costs no more than fetching that many, the passing vectors are scanned, which
is exact.

An index that was updated in a copy of its file identifies vectors by labels: those of the first build are vector
numbers, later vectors have the next ones, and a file beside the index maps labels to vector numbers, or to DELETED;
without it they are equal. So deleted vectors are dropped before they become candidates, for every kind of index.

Shapes: Q queries, F vectors fetched per query, M candidates, N vectors, L labels, D dimension.
"""

import io
import math
import re
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mvr_ray.core.searching.engines import make_kernel
from mvr_ray.core.searching.exact import Pairs, best_first, check_k, check_queries, distinct
from mvr_ray.core.searching.scan import Scan, pack_hits
from mvr_ray.errors import ShardIndexError
from mvr_ray.index.base import ShardIndex, count_vectors
from mvr_ray.types import CountedHits, EmbeddingBlock, FloatArray, IntArray

VECTORS_AT_ONCE = 16384
LABELS_FILE = "labels.npy"
REBUILD = "; delete that file, and `mvr-ray index CONFIG` builds it again from the stored embeddings"
NO_RESULT, DELETED = -1, -2
"""In place of a vector number: the index found no more; the vector of this label was deleted."""
SCAN_SHARE = 0.05
"""Share of passages that pass a filter below which they are scanned."""
SCAN_VECTORS = 100
"""Vectors that a scan reads while one is fetched and scored: some 250 to 1,000 for hnswlib, 100 for Faiss's lists
(`benchmarks/approximate.py`). Where a filter passes fewer for each one to fetch, they are scanned."""


class ApproximateIndex(ShardIndex):
    """An index over vector numbers 0 .. N - 1 in order of rows. Subclasses find the nearest vectors."""

    exact = False
    first_fetch = 6
    """Vectors of the first fetch for each of the k passages."""
    breadth = 0
    """Minimum number of vectors to fetch, such as the beam width of a graph search."""
    beam_passages = 0
    """Distinct passages to find and score for a query, where more than k."""

    def __init__(
        self,
        blocks: Sequence[EmbeddingBlock],
        folder: Path,
        rows: Sequence[IntArray] | None = None,
        *,
        threads: int | None = None,
    ) -> None:
        """`folder` holds the index file, and after an update the vector numbers of its labels."""
        super().__init__(Scan(blocks, make_kernel(threads=threads), rows))
        self.ends = np.cumsum(self.scan.table.view_counts())
        self.number_L = read_labels(folder)
        num_numbers = self.num_vectors if self.number_L is None else int((self.number_L >= 0).sum())
        if num_numbers != self.num_vectors:
            raise ShardIndexError(
                f"{folder / LABELS_FILE} has {num_numbers} vectors, the embeddings are {self.num_vectors}; build the "
                f"index again"
            )
        self.num_labels = self.num_vectors if self.number_L is None else len(self.number_L)

    @abstractmethod
    def nearest_labels(self, queries_QD: FloatArray, fetch: int) -> IntArray:
        """Find the labels of approximately the nearest vectors [Q, fetch], -1 where the index finds no more."""

    def nearest(self, queries_QD: FloatArray, fetch: int) -> IntArray:
        """Find the numbers of approximately the nearest vectors [Q, fetch], NO_RESULT where the index finds no more,
        DELETED for deleted vectors."""
        label_QF = self.nearest_labels(queries_QD, fetch)
        if self.number_L is None:
            return label_QF
        return np.where(label_QF >= 0, self.number_L[label_QF], NO_RESULT)

    def max_fetch(self) -> int:
        """Return the most labels that `nearest` can fetch."""
        return self.num_vectors

    def search_with_counts(
        self, queries_QD: FloatArray, k: int, mask_P: NDArray[np.bool_] | None = None
    ) -> CountedHits:
        """Find k distinct passages, or all there are, by exact score, and count the candidates that were scored
        exactly. `frontier_Q` is +inf: passages may be missing."""
        queries_QD = check_queries(queries_QD, self.dimension)
        table = self.scan.table
        num_passing = table.num_scorable if mask_P is None else len(table.rows_of(mask_P))
        passing_share = num_passing / max(table.num_scorable, 1)
        if check_k(k) >= num_passing or (mask_P is not None and self._is_scanned(k, passing_share)):
            return self.scan.search_with_counts(queries_QD, k, mask_P)
        candidates, incomplete_Q = self._candidates(queries_QD, k, mask_P, passing_share)
        best = best_first(table.rescore(queries_QD, candidates), k)
        hits = pack_hits([best], [len(queries_QD)], len(queries_QD), k)
        rescored_Q = np.bincount(candidates.query_M, minlength=len(queries_QD))
        if len(incomplete_Q):
            results = self.scan.search_with_counts(queries_QD[incomplete_Q], k, mask_P)
            for column, own in zip([*hits, rescored_Q], [*results.hits, results.rescored_Q]):
                column[incomplete_Q] = own
        hits.frontier_Q[:] = np.inf
        return CountedHits(hits, rescored_Q)

    def _is_scanned(self, k: int, passing_share: float) -> bool:
        """Return whether to scan the passages that pass a filter."""
        fetch = max(self.first_fetch * k, self.breadth) / passing_share
        return passing_share < SCAN_SHARE or passing_share * self.num_vectors <= SCAN_VECTORS * fetch

    def _candidates(
        self, queries_QD: FloatArray, k: int, mask_P: NDArray[np.bool_] | None = None, passing_share: float = 1.0
    ) -> tuple[Pairs, IntArray]:
        """Find at least k distinct passages for each query, and the queries for which the index finds fewer."""
        pending_Q = np.arange(len(queries_QD))
        fetch = min(math.ceil(max(self.first_fetch * k, self.breadth) / passing_share), self.max_fetch())
        query_parts, row_parts, incomplete = [], [], []
        while len(pending_Q):
            number_QF = self.nearest(queries_QD[pending_Q], fetch)
            is_vector_QF = number_QF >= 0
            row_M = np.searchsorted(self.ends, number_QF[is_vector_QF], side="right")
            query_M = np.repeat(pending_Q, is_vector_QF.sum(axis=1))
            if mask_P is not None:
                query_M, row_M = query_M[mask_P[row_M]], row_M[mask_P[row_M]]
            query_M, row_M = np.divmod(distinct(query_M * self.num_passages + row_M), self.num_passages)
            count_Q = np.bincount(query_M, minlength=len(queries_QD))[pending_Q]
            exhausted_Q = (number_QF == NO_RESULT).any(axis=1) | (fetch >= self.max_fetch())
            complete = np.zeros(len(queries_QD), bool)
            complete[pending_Q] = (count_Q >= k) & (exhausted_Q | (count_Q >= self.beam_passages))
            query_parts.append(query_M[complete[query_M]])
            row_parts.append(row_M[complete[query_M]])
            incomplete.append(pending_Q[exhausted_Q & (count_Q < k)])
            pending_Q = pending_Q[~exhausted_Q & ~complete[pending_Q]]
            fetch = min(2 * fetch, self.max_fetch())
        empty = [np.zeros(0, np.int64)]
        pairs = Pairs(np.concatenate(query_parts or empty), np.concatenate(row_parts or empty))
        return pairs, np.concatenate(incomplete or empty)


def float32_vectors(blocks: Sequence[EmbeddingBlock]) -> Iterator[NDArray[np.float32]]:
    """Yield all vectors in order, some thousands at a time. Raises ShardIndexError for one that is not finite."""
    first_row = 0
    for block in blocks:
        for low in range(0, len(block.vectors_ND), VECTORS_AT_ONCE):
            vectors_ND = block.vectors_ND[low : low + VECTORS_AT_ONCE].astype(np.float32)
            finite_N = np.isfinite(vectors_ND).all(axis=1)
            if not finite_N.all():
                vector = low + int(np.flatnonzero(~finite_N)[0])
                row = int(np.searchsorted(block.row_ptr, vector, side="right")) - 1
                raise ShardIndexError(
                    f"passage {block.ids[row]!r} (row {first_row + row}) has a vector with NaN or infinity; "
                    f"encode it again"
                )
            yield vectors_ND
        first_row += len(block.ids)


@contextmanager
def translate_library_errors(failure: str, advice: str = "") -> Iterator[None]:
    """Convert an error of Faiss or hnswlib to ShardIndexError, without a location in their sources."""
    try:
        yield
    except RuntimeError as error:
        text = re.sub(r"^.*\.\w+:\d+: (Error: )?", "", str(error).strip(), flags=re.DOTALL)
        text = re.sub(r"\s+", " ", text)[-300:]
        raise ShardIndexError(f"{failure}: {text}{advice}") from error


def take_vectors(blocks: Sequence[EmbeddingBlock], numbers: IntArray) -> FloatArray:
    """Copy the vectors with these numbers, ascending, as float32."""
    parts, first = [], 0
    for vectors_ND in float32_vectors(blocks):
        low, high = np.searchsorted(numbers, [first, first + len(vectors_ND)])
        parts.append(vectors_ND[numbers[low:high] - first])
        first += len(vectors_ND)
    return np.concatenate(parts)


class LabelUpdate(NamedTuple):
    """The vector number of each label of an updated index, DELETED where there is none; labels from `first_new` on are
    those of vectors to add, in order of their numbers."""

    number_L: NDArray[np.int32]
    first_new: int

    def write(self, folder: Path) -> list[str]:
        buffer = io.BytesIO()  # numpy does not notice that a full disk lacks the end of a file
        np.save(buffer, self.number_L, allow_pickle=False)
        (folder / LABELS_FILE).write_bytes(buffer.getbuffer())
        return [LABELS_FILE]


def read_labels(folder: Path) -> NDArray[np.int32] | None:
    """Read the vector numbers of an index's labels; None where they equal the labels."""
    path = folder / LABELS_FILE
    try:
        return np.load(path, allow_pickle=False) if path.is_file() else None
    except (OSError, ValueError) as error:
        raise ShardIndexError(f"{path} cannot be read ({error}); build the index again") from error


def update_labels(
    old_blocks: Sequence[EmbeddingBlock], blocks: Sequence[EmbeddingBlock], changed_ids: Collection[str], folder: Path
) -> LabelUpdate:
    """Label the vectors of `blocks` for an update of the index in `folder`, which is of `old_blocks`.

    Passages of `changed_ids`, and those in only one of the two, lose their labels and get new ones.
    """
    numbers_of = {name: numbers for name, numbers in _passage_numbers(blocks) if name not in changed_ids}
    number_N = np.full(count_vectors(old_blocks), DELETED, np.int32)
    is_new_N = np.ones(count_vectors(blocks), bool)
    for name, old_numbers in _passage_numbers(old_blocks):
        if (numbers := numbers_of.get(name)) is not None:
            number_N[old_numbers], is_new_N[numbers] = np.arange(numbers.start, numbers.stop), False
    labels = read_labels(folder)
    old_L = number_N if labels is None else np.where(labels >= 0, number_N[labels], np.int32(DELETED))
    return LabelUpdate(np.concatenate([old_L, np.flatnonzero(is_new_N).astype(np.int32)]), len(old_L))


def _passage_numbers(blocks: Sequence[EmbeddingBlock]) -> Iterator[tuple[str, slice]]:
    """Yield each passage id with its vector numbers."""
    first = 0
    for block in blocks:
        edges = (np.asarray(block.row_ptr) + first).tolist()
        yield from zip(block.ids, map(slice, edges, edges[1:]))
        first = edges[-1]
