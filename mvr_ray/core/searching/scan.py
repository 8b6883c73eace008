"""Find the exact top k over all vectors of a shard at the speed of a float32 matrix product.

Each step multiplies some thousands of vectors with the queries, takes the best view of each passage, and keeps passages
that may be among the best k. At the end these candidates are scored exactly (`exact`) and sorted: score descending, row
ascending.

**Why it is exact.** Let u = 2^-24 and g(n) = n u / (1 - n u). For any order of summation, with or without fused
operations, a float32 sum of D products errs by at most g(D) sum_d |q_d v_d| <= g(D) |q| |v| (Higham, Accuracy and
Stability of Numerical Algorithms, sec. 3.1, then Cauchy-Schwarz). If the hardware first rounds factors by a relative r
(TF32: 2^-10), the bound is ((1 + r)^2 (1 + g(D)) - 1) |q| |v|. Results below 2^-126 may be flushed to zero, factors
too: at most 2^-126 (2 + |q| + |v|) a term. The exact score s is itself rounded once to float32 (u |q| |v|), and so are
`a + e` and `a - e` below (about u |q| |v| each). With 16 more terms to cover those three and a kernel's other
roundings, and the largest norm of a step for |v|,

    e = ((1 + r)^2 (1 + g(D + 16)) - 1) |q| max|v| + 2 D 2^-126 (2 + |q| + max|v|)

bounds |a - s| for each view, and so for a passage's best view, since a maximum errs no more than its parts. So
a - e <= s <= a + e. Let L be the k-th largest `a - e` seen: k passages score at least L. A passage with `a + e < L`
scores less than all of those, ties included, and can be dropped, since L only grows.

**Eight bits.** With codes, a step multiplies w in place of v (`codes`), and e grows by |q| max r, the largest residual
of the step. A kernel that rounds queries too, to q', adds |q - q'| max|w|. The candidates are still scored with v, so
only their number changes. A kernel that sums n products a dimension has n D terms.

**Coarse and fine.** Where a kernel has coarse products (`kernels.Coarse`), its rounded vectors and queries replace
codes, and a step is first scanned by them: e is some twenty times as large, so more passages are candidates. When these
exceed twice the best k plus a hundredth of the passages scanned, exact scores cost more than coarse products save: the
step is undone, the previous lower bounds are restored, and further products are fine.

**Filters.** A mask selects the passages that may be hits; those that a change hides are never selected. The others are
skipped before a lower bound is raised: L is then the k-th largest among those that pass, to which the reasoning above
applies. Where few of a step pass, only their vectors are multiplied: read in place, or copied first, depending on the
kernel. Where few of a shard pass (`VIEWS_A_STEP`), all of them are scored exactly without a scan.

**Threads.** Each thread of a kernel takes the next free step, for all queries; the best lower bounds of all threads
are lower bounds for the whole shard. A small shard has shorter steps, so that every thread has as many.

**Memory** holds the best k, a bounded number of candidates (with too many, because of ties, they are scored exactly and
cut to k meanwhile), and, where the kernel needs them, a step's vectors as float32 and its scores for 256 queries.

Shapes: Q queries, P passages, N vectors, K best kept, M candidates, D dimension.
"""

import copy
import functools
import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvr_ray.core.searching.codes import Codes
from mvr_ray.core.searching.exact import (
    LARGEST,
    BlockTable,
    Pairs,
    ScoredPairs,
    best_first,
    join_pairs,
    no_hits,
    ranks,
)
from mvr_ray.core.searching.kernels import Coarse, Kernel, Step, StepPart, round_up
from mvr_ray.errors import ShardIndexError
from mvr_ray.types import CountedHits, EmbeddingBlock, FloatArray, IntArray, ShardHits

QUERIES_AT_ONCE = 256
CANDIDATES_AT_ONCE = 1 << 18
PAIRS_WORTH_THREADS = 2048
VALUES_WORTH_THREADS = 3 << 18  # a step, of one or two queries; less work takes longer in threads that take turns
MIN_STEP = 4096  # vectors; less work than the overhead of a step is not worth a thread
VIEWS_A_STEP = 2048  # scoring this many exactly takes as long as a step of them; half as many of float32 beside codes
COARSE_SHARE = 0.01  # of the passages scanned: one exact score takes as long as coarse products save on a hundred
UNIT = 2.0**-24
TINY = 2.0**-126
MAX_FLOAT32_NORM = 1e15  # a larger one, or NaN, is computed again in float64: its squares may overflow float32


def score_error(query_norm_Q: FloatArray, vector_norm: float, dimension: int, input_rounding: float) -> FloatArray:
    """Compute the bound e of the module's docstring, float64 [Q]."""
    terms = (dimension + 16) * UNIT
    relative = (1 + input_rounding) ** 2 * (1 + terms / (1 - terms)) - 1
    return relative * query_norm_Q * vector_norm + 2 * dimension * TINY * (2 + query_norm_Q + vector_norm)


def passing_part(step: Step, mask_P: NDArray[np.bool_] | None, gather_share: float) -> StepPart | None:
    """Select the part of a step that passes a mask over the rows of the shard, None where nothing passes. Where less
    than `gather_share` passes, the part has only these passages."""
    whole = StepPart(step, step.row_P, step.counts_P, step.visible_P)
    if mask_P is None:
        return whole
    own_P = mask_P[step.row_P]
    if step.visible_P is not None:
        own_P &= step.visible_P
    num_passing = int(np.count_nonzero(own_P))
    if num_passing == len(own_P):
        return whole
    if not num_passing:
        return None
    if num_passing > gather_share * len(own_P):
        return whole._replace(mask_P=own_P)
    vectors_M = np.flatnonzero(np.repeat(own_P, step.counts_P))
    return StepPart(step, step.row_P[own_P], step.counts_P[own_P], None, vectors_M)


def cut_steps(table: BlockTable, vectors_per_step: int, codes: Sequence[Codes | None]) -> Iterator[Step]:
    """Cut the blocks, each with its codes, into steps of about `vectors_per_step` vectors; no step splits a passage."""
    for at, (block, own) in enumerate(zip(table.blocks, codes)):
        row_P = table.rows_of_block(at)
        ptr = np.asarray(block.row_ptr)
        low, last = 0, len(block.ids)
        while low < last:
            high = int(np.searchsorted(ptr, ptr[low] + vectors_per_step, side="right")) - 1
            high = min(max(high, low + 1), last)
            counts_P = np.diff(ptr[low : high + 1])
            local_P = low + np.flatnonzero(counts_P)
            is_visible_P = row_P[local_P] >= 0
            if is_visible_P.any():
                visible_P = None if is_visible_P.all() else is_visible_P
                counts_P = counts_P[counts_P > 0]
                uniform = int(counts_P[0]) if (counts_P == counts_P[0]).all() else 0
                vectors = slice(int(ptr[low]), int(ptr[high]))
                vectors_ND, step_codes = block.vectors_ND[vectors], own and own.rows(vectors)
                yield Step(row_P[local_P], counts_P, uniform, vectors_ND, visible_P, step_codes)
            low = high


class Scan:
    """Searches all vectors of one shard. Caches bounds of each step, and with `resident` the vectors on the kernel's
    device. With `codes` (of each block's vectors) it scans these, and reads vectors for candidates only."""

    def __init__(
        self,
        blocks: Sequence[EmbeddingBlock],
        kernel: Kernel,
        rows: Sequence[IntArray] | None = None,
        *,
        codes: Sequence[Codes] | None = None,
        resident: bool = False,
    ) -> None:
        self.table = BlockTable(blocks, rows)
        self.kernel = kernel
        self.has_codes = codes is not None
        pairs = zip(blocks, codes or [None] * len(blocks), strict=True)
        own = [block_codes for block, block_codes in pairs if len(block.ids)]
        vectors_per_step = kernel.vectors_per_step
        if kernel.threads > 1:
            rounds = -(-self.table.num_vectors // (kernel.threads * vectors_per_step))
            share = self.table.num_vectors // max(1, kernel.threads * rounds)
            of_a_passage = -(-self.table.num_vectors // max(1, self.table.num_passages))
            vectors_per_step = min(vectors_per_step, max(MIN_STEP, share + of_a_passage))
        self.steps = list(cut_steps(self.table, vectors_per_step, own))
        for step in self.steps if resident else ():
            step.resident = self._put(step)

    def of_vectors(self) -> "Scan":
        """Create a scan of the vectors in place of the codes, over the same steps."""
        scan = copy.copy(self)
        scan.has_codes = False
        scan.steps = [
            Step(step.row_P, step.counts_P, step.uniform, step.vectors_ND, step.visible_P) for step in self.steps
        ]
        return scan

    def search_with_counts(
        self, queries_QD: FloatArray, k: int, mask_P: NDArray[np.bool_] | None = None
    ) -> CountedHits:
        """Find the exact top k of the passages in the mask (None: of all). `queries_QD` float32 and finite; k >= 1.

        k + 1 passages are ranked, so `frontier_Q` is the exact score of the best passage left out.
        """
        if mask_P is not None and (counted_hits := self._score_few(queries_QD, k, mask_P)):
            return counted_hits
        every = (passing_part(step, mask_P, self.kernel.gather_share) for step in self.steps)
        steps = [part for part in every if part is not None]
        limit, num_queries = min(k + 1, sum(part.num_passages for part in steps)), len(queries_QD)
        if not limit or not num_queries:
            return CountedHits(no_hits(num_queries, k), np.zeros(num_queries, np.int64))
        parts = [queries_QD[at : at + QUERIES_AT_ONCE] for at in range(0, num_queries, QUERIES_AT_ONCE)]
        batches = [reduce(QueryBatch.absorb, own) for own in zip(*self._by_threads(parts, limit, steps))]
        hits = pack_hits([batch.finish() for batch in batches], [len(part) for part in parts], num_queries, k)
        return CountedHits(hits, np.concatenate([batch.rescored_Q for batch in batches]))

    def _score_few(self, queries_QD: FloatArray, k: int, mask_P: NDArray[np.bool_]) -> CountedHits | None:
        """Score all passages of a mask exactly where they are few; None where they are many, or where a score is not
        finite, as the scan names that passage."""
        row_P, num_queries = self.table.rows_of(mask_P), len(queries_QD)
        num_views = len(row_P) * num_queries * self.table.num_vectors / max(self.table.num_passages, 1)
        is_resident = any(step.resident for step in self.steps)
        reads_quarter = self.has_codes and any(block.vectors_ND.dtype == np.float32 for block in self.table.blocks)
        views_a_step = VIEWS_A_STEP // 2 if reads_quarter else VIEWS_A_STEP
        if is_resident or not 0 < num_views <= views_a_step * (len(self.steps) + 4):
            return None
        pairs = Pairs(np.tile(np.arange(num_queries), len(row_P)), np.repeat(row_P, num_queries))
        scores = join_pairs(self.rescore(queries_QD, pairs))
        if not np.isfinite(scores.score_M).all():
            return None
        best = best_first(scores, k + 1)
        return CountedHits(pack_hits([best], [num_queries], num_queries, k), np.full(num_queries, len(row_P)))

    def _by_threads(
        self, parts: Sequence[FloatArray], limit: int, steps: Sequence[StepPart]
    ) -> "list[list[QueryBatch]]":
        """Scan with several threads; each returns its batches, one for each part of the queries.

        A free thread takes the next step, so a late thread delays no other.
        """
        queue = deque(steps)
        share = sum(part.num_passages for part in steps) / self.table.num_scorable
        work = share * self.table.num_vectors * self.table.dimension * min(sum(map(len, parts)), 2)
        is_worth_threads = work >= VALUES_WORTH_THREADS * (len(steps) + 6)
        others = min(self.kernel.threads, len(steps)) - 1 if is_worth_threads else 0
        if others < 1:
            return [self._scan(parts, limit, queue)]
        futures = [_pool().submit(self._scan, parts, limit, queue) for _ in range(others)]
        try:
            own = self._scan(parts, limit, queue)
        finally:
            queue.clear()
            running = [other for other in futures if not other.cancel()]
            wait(running)
        return [own, *(other.result() for other in running)]

    def _scan(self, parts: Sequence[FloatArray], limit: int, queue: deque[StepPart]) -> "list[QueryBatch]":
        """Scan the steps that this thread takes from `queue`, in its order, for each part."""
        with self.kernel.running():
            batches = [QueryBatch(self, part, limit) for part in parts]
            for part in _pop_parts(queue):
                step, step_rows = part.step, None
                coarse = next((batch.queries.coarse for batch in batches if batch.queries.coarse), None)
                coarse = None if self.has_codes else coarse
                is_measured = step.norm >= 0 and (coarse is None or step.coarse_residual >= 0)
                if part.vectors_M is None or not is_measured:  # bounds are over the whole step
                    step_rows = self.kernel.prepare_rows(*(step.resident or self._put(step)))
                    self._measure(step, step_rows, coarse)
                if part.vectors_M is not None:
                    step_rows = self.kernel.prepare_rows(*self._gather(step, part.vectors_M))
                for batch in batches:
                    batch.scan(part, step_rows)
        return batches

    def _measure(self, step: Step, step_rows: Any, coarse: Coarse | None) -> None:
        """Measure the bounds of a step, unless cached; that of coarse products is infinite if unknown."""
        if step.norm < 0:
            step.norm = round_up(self._norm(step, self.kernel.max_norm(step_rows)))
        if coarse and step.coarse_residual < 0:
            residual = coarse.max_residual(step_rows)
            is_known = residual < MAX_FLOAT32_NORM
            step.coarse_residual = round_up(self._round_up_norm(residual)) if is_known else math.inf

    def rescore(self, queries_QD: FloatArray, pairs: Pairs) -> list[ScoredPairs]:
        """Score pairs exactly, in parts; all threads share many pairs."""
        count, threads = len(pairs.row_M), self.kernel.threads
        if threads == 1 or count < PAIRS_WORTH_THREADS:
            return [self.table.rescore(queries_QD, pairs)]
        edges = [part * count // threads for part in range(threads + 1)]
        parts = [Pairs(pairs.query_M[low:high], pairs.row_M[low:high]) for low, high in pairwise(edges)]
        futures = [_pool().submit(self.table.rescore, queries_QD, part) for part in parts]
        return [  # a caller that only waits may be the pool's last thread
            self.table.rescore(queries_QD, part) if future.cancel() else future.result()
            for future, part in zip(futures, parts)
        ]

    def _gather(self, step: Step, vectors_M: IntArray) -> tuple[Any, Any]:
        """Copy some vectors of a step, or their codes with scales, to the kernel's device."""
        if step.resident:
            rows, scales = step.resident
            return rows[vectors_M], None if scales is None else scales[vectors_M]
        if step.codes is None:
            return self.kernel.put(step.vectors_ND[vectors_M]), None
        return self._put(replace(step, codes=step.codes.rows(vectors_M)))

    def _put(self, step: Step) -> tuple[Any, Any]:
        if step.codes is None:
            return self.kernel.put(step.vectors_ND), None
        return self.kernel.put(step.codes.codes_ND), self.kernel.put(step.codes.scale_N[:, None])

    def _norm(self, step: Step, norm: float) -> float:
        """Bound the vectors' norms from above. Moderate float32 squares are accurate within their error."""
        if norm < MAX_FLOAT32_NORM:
            return self._round_up_norm(norm)
        norm_N = np.linalg.norm(step.vectors_ND.astype(np.float64), axis=1) + step.residual
        if not np.isfinite(norm_N).all():
            vector = int(np.flatnonzero(~np.isfinite(norm_N))[0])
            row = int(step.row_P[np.searchsorted(np.cumsum(step.counts_P), vector, side="right")])
            raise ShardIndexError(
                f"passage {self.table.passage_id(row)!r} (row {row}) has a vector with NaN or infinity; encode it again"
            )
        return float(norm_N.max()) * (1 + 2.0**-40)

    def _round_up_norm(self, norm: float) -> float:
        """Bound a norm computed in float32 from above."""
        terms = (self.table.dimension + 2) * UNIT
        return norm * (1 + terms / (1 - terms)) + self.table.dimension**0.5 * 2.0**-62


class QueryBatch:
    """Lower bounds and candidates of some queries, over the steps scanned so far."""

    def __init__(self, scan: Scan, queries_QD: FloatArray, limit: int) -> None:
        self.parent, self.queries_QD, self.limit = scan, queries_QD, limit
        self.norm_Q = np.linalg.norm(queries_QD.astype(np.float64), axis=1) * (1 + 2.0**-40)
        self.queries = scan.kernel.prepare(queries_QD, limit, scan.has_codes)
        self.pending: list[ScoredPairs] = []  # with upper bounds as scores
        self.num_pending = 0
        self.exact: list[ScoredPairs] = []
        self.rescored_Q = np.zeros(len(queries_QD), np.int64)
        self.errors: dict[tuple[float, float, bool], FloatArray] = {}
        self.max_pending = CANDIDATES_AT_ONCE + 4 * limit * len(queries_QD)
        self.num_seen = 0

    def scan(self, part: StepPart, step_rows: Any) -> None:
        """Scan one step. Codes are exact in coarse products."""
        step = part.step
        self.num_seen += part.num_passages
        if self.queries.coarse and not self.parent.has_codes:
            if math.isfinite(step.coarse_residual) and self._scan_coarsely(part, step_rows):
                return
            self.queries.coarse = None
        self._add(part, step_rows, self._error(step.norm, step.residual, coarse=self.queries.coarse is not None))
        if self.num_pending > self.max_pending:
            self._prune_pending()
            if self.num_pending > self.max_pending // 2:
                self._rescore_pending()

    def _scan_coarsely(self, part: StepPart, step_rows: Any) -> bool:
        """Scan a step by coarse products; undo it and return False if too many passages remain candidates."""
        kernel = self.parent.kernel
        previous_QK = kernel.lower_bounds(self.queries).copy()
        previous_pending, previous_count = list(self.pending), self.num_pending
        self._add(part, step_rows, self._error(part.step.norm, part.step.coarse_residual, coarse=True))
        max_pending = len(self.queries_QD) * (2 * self.limit + COARSE_SHARE * self.num_seen)
        if self.num_pending > max_pending:
            self._prune_pending()
        if self.num_pending <= max_pending:
            return True
        kernel.set_lower_bounds(self.queries, previous_QK)
        self.pending, self.num_pending = previous_pending, previous_count
        return False

    def _add(self, part: StepPart, step_rows: Any, error_Q: FloatArray) -> None:
        """Add the step's candidates."""
        candidates = self.parent.kernel.candidates(self.queries, step_rows, part, error_Q)
        if len(candidates.query_M):
            row_M = part.row_P[candidates.passage_M]
            views_M = np.zeros(len(row_M), np.int16)
            self.pending.append(ScoredPairs(candidates.query_M, row_M, candidates.upper_M, views_M))
            self.num_pending += len(row_M)

    def _error(self, norm: float, residual: float, coarse: bool = False) -> FloatArray:
        """Return the bound e of the module's docstring, with the terms for codes, coarse products and rounded
        queries."""
        key = norm, residual, coarse
        if key not in self.errors:
            self.errors[key] = self._new_error(norm, residual, coarse)
        return self.errors[key]

    def _new_error(self, norm: float, residual: float, coarse: bool) -> FloatArray:
        if self.norm_Q.max() * norm > LARGEST:
            raise ShardIndexError(
                f"queries of norm up to {self.norm_Q.max():g} and vectors of norm up to {norm:g} "
                f"overflow float32 scores; normalise the embeddings"
            )
        rounding_Q, input_rounding = self.queries.rounding_Q, self.queries.input_rounding
        num_terms = self.parent.table.dimension * self.queries.products
        if coarse and self.queries.coarse:
            rounding_Q, input_rounding = self.queries.coarse.rounding_Q, 0.0
            num_terms, norm = self.parent.table.dimension, norm + residual
        error_Q = score_error(self.norm_Q + rounding_Q, norm, num_terms, input_rounding)
        error_Q += (self.norm_Q * residual + rounding_Q * norm) * (1 + 2.0**-20)
        return error_Q.astype(np.float32)

    def absorb(self, other: "QueryBatch") -> "QueryBatch":
        """Merge the results of other steps for the same queries."""
        kernel = self.parent.kernel
        low_QK = np.concatenate([kernel.lower_bounds(self.queries), kernel.lower_bounds(other.queries)], axis=1)
        kernel.set_lower_bounds(self.queries, -np.sort(-low_QK, axis=1)[:, : self.limit])
        self.pending += other.pending
        self.exact += other.exact
        self.rescored_Q += other.rescored_Q
        return self

    def finish(self) -> ScoredPairs:
        self._prune_pending()
        self._rescore_pending()
        return self.exact[0] if len(self.exact) == 1 else best_first(join_pairs(self.exact), self.limit)

    def _prune_pending(self) -> None:
        if not self.pending:
            return
        pending = join_pairs(self.pending)
        kth_Q = self.parent.kernel.lower_bounds(self.queries).min(axis=1)
        self.pending = [pending.take(np.flatnonzero(pending.score_M >= kth_Q[pending.query_M]))]
        self.num_pending = len(self.pending[0].row_M)

    def _rescore_pending(self) -> None:
        """Score the candidates exactly and keep the best; their scores become the lower bounds."""
        if not self.pending:
            return
        pending = join_pairs(self.pending)
        self.rescored_Q += np.bincount(pending.query_M, minlength=len(self.queries_QD))
        scores = self.parent.rescore(self.queries_QD, Pairs(pending.query_M, pending.row_M))
        best = best_first(join_pairs([*self.exact, *scores]), self.limit)
        self.exact, self.pending, self.num_pending = [best], [], 0
        low_QK = np.full((len(self.queries_QD), self.limit), -np.inf, np.float32)
        low_QK[best.query_M, ranks(best.query_M)] = best.score_M
        self.parent.kernel.set_lower_bounds(self.queries, low_QK)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Return the threads for scans, which are reused: starting them takes longer than a small scan."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="mvr_ray-scan")


os.register_at_fork(after_in_child=_pool.cache_clear)  # a fork does not copy threads


def _pop_parts(queue: deque[StepPart]) -> Iterator[StepPart]:
    """Yield parts from the left until the queue is empty."""
    with suppress(IndexError):
        while True:
            yield queue.popleft()


def pack_hits(scores: Sequence[ScoredPairs], sizes: Sequence[int], num_queries: int, k: int) -> ShardHits:
    """Build hits from best-first pairs of consecutive batches of queries, the (k + 1)-th as the frontier."""
    hits = no_hits(num_queries, k)
    first = 0
    for part, size in zip(scores, sizes):
        rank_M, query_M = ranks(part.query_M), part.query_M + first
        top, out = rank_M < k, rank_M == k
        at = (query_M[top], rank_M[top])
        hits.rows_QK[at], hits.scores_QK[at], hits.views_QK[at] = part.row_M[top], part.score_M[top], part.view_M[top]
        hits.frontier_Q[query_M[out]] = part.score_M[out]
        first += size
    return hits
