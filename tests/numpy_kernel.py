"""Scans in plain numpy, without compiled loops and torch: a reference for other kernels."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mvr_ray.core.searching.kernels import (
    CPU_STEP,
    Candidates,
    Kernel,
    PreparedQueries,
    StepPart,
    select_candidates,
)
from mvr_ray.index.flat import FlatIndex
from mvr_ray.types import EmbeddingBlock, FloatArray


class NumpyKernel(Kernel):
    vectors_per_step = CPU_STEP

    def prepare_rows(self, rows_ND: Any, scale_N1: Any = None) -> Any:
        vectors_ND = rows_ND.astype(np.float32, copy=False)
        return vectors_ND if scale_N1 is None else vectors_ND * scale_N1

    def max_norm(self, step_rows: Any) -> float:
        with np.errstate(over="ignore", invalid="ignore"):
            return float(np.sqrt(np.einsum("nd,nd->n", step_rows, step_rows).max()))

    def candidates(self, queries: PreparedQueries, step_rows: Any, part: StepPart, error_Q: FloatArray) -> Candidates:
        scores_QN = queries.queries_QD @ step_rows.T
        first_P = np.cumsum(part.counts_P) - part.counts_P
        return select_candidates(queries, np.maximum.reduceat(scores_QN, first_P, axis=1).T, error_Q, part.mask_P)


def numpy_index(blocks: Sequence[EmbeddingBlock]) -> FlatIndex:
    """Return an index that scans and scores in numpy."""
    index = FlatIndex(blocks, kernel=NumpyKernel())
    index.scan.table.compiled_rows = [None] * len(index.scan.table.blocks)
    return index
