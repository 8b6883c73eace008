"""Run the approximate half of a scan as one GPU kernel: from fp16 vectors or int8 codes to each passage's best score.

    best(q, p) = max_v  2^e s_pv sum_d h_d c_pvd         h = fp16(2^-e q), e the exponent of q's largest component

A block of threads reads the views of some passages once, multiplies them with up to 64 queries on the tensor cores,
and takes the maximum over the views in registers. It writes one number a query and passage, and neither float32
vectors nor scores of single views. For one query the time is that of reading the vectors.

**Error.** Codes and halves are exact as factors, and products of two halves are exact in float32. Rounding q to h errs
by 2^-11 a component relative to it, or by 2^-25 of the largest one where h is subnormal. Tensor cores add with
truncation and a few spare bits (Fasi, Higham, Mikaitis, Pranesh 2021, PeerJ Comput. Sci. 7:e330), which 8 u an addition
cover many times over; for D <= 1016 that is under 2^-11 in all. So the rounding of a factor is 2^-11: the bound of
`scan` squares it, once for q and once for the sums. torch handles longer or float32 vectors.

**Selection** works on blocks of 32 passages: the K best are among those of the K blocks with the best maxima, and only
blocks whose maximum reaches the lower bound are read.

Shapes: Q queries, P passages of the step, N vectors of the step, D dimension, K best kept, B blocks, M candidates.
"""

import importlib.util
import logging
import os
import subprocess
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from mvr_ray.core.searching.kernels import GPU_STEP, Candidates, PreparedQueries, StepPart, TorchKernel
from mvr_ray.errors import first_line
from mvr_ray.types import FloatArray, IntArray

log = logging.getLogger(__name__)

BLOCK = 32
MAX_DIMENSION = 1016
MAX_VIEWS = 64
ROWS_PER_TILE = 128
MAX_STEP = 1 << 24
BYTES_PER_VECTOR = 8192
"""Free memory for each vector of a step: scores of 256 queries, one view a passage, take an eighth of it."""


class Tuning(NamedTuple):
    """Launch settings: vectors and bytes of each that a block of threads reads at once, warps, stages.

    Three stages of this size fit the shared memory of any card since Ampere.
    """

    rows: int = ROWS_PER_TILE
    row_bytes: int = 128
    warps: int = 4
    stages: int = 3


class DeviceRows(NamedTuple):
    """Vectors of a step on the device, as stored: fp16, or codes with their scales."""

    rows_ND: torch.Tensor
    scale_N1: torch.Tensor | None


class FusedKernel(TorchKernel):
    """A `TorchKernel` without its memory traffic. Steps are `DeviceRows`, which are not converted.

    Without Triton, or where it cannot compile, torch computes the scores, in the same blocks.
    """

    def __init__(self, device: str = "cuda", tuning: Tuning | None = None) -> None:
        super().__init__(device)
        self.tuning = tuning or Tuning()
        is_cuda = self.device.type == "cuda"
        # Triton compiles the kernel for GPUs; with TRITON_INTERPRET=1 its interpreter runs it elsewhere.
        has_triton = importlib.util.find_spec("triton") is not None
        self.is_fused = has_triton and (is_cuda or os.environ.get("TRITON_INTERPRET") == "1")
        self._starts: dict[int, torch.Tensor] = {}
        if is_cuda:
            free_bytes = torch.cuda.mem_get_info(self.device)[0]
            self.vectors_per_step = min(MAX_STEP, max(GPU_STEP, free_bytes // BYTES_PER_VECTOR))
        if self.is_fused and is_cuda:
            self._test_kernel()

    @property
    def input_rounding(self) -> float:
        return max(2.0**-11, super().input_rounding)

    def prepare(self, queries_QD: NDArray[np.float32], limit: int, with_codes: bool) -> PreparedQueries:
        """Prepare queries whose lower bounds stay on the device."""
        queries = super().prepare(queries_QD, limit, with_codes)
        queries.low_QK = self.put(queries.low_QK)
        return queries

    def lower_bounds(self, queries: PreparedQueries) -> FloatArray:
        return self.get(queries.low_QK)

    def set_lower_bounds(self, queries: PreparedQueries, low_QK: FloatArray) -> None:
        super().set_lower_bounds(queries, low_QK)
        queries.low_QK = self.put(queries.low_QK)

    def prepare_rows(self, rows_ND: Any, scale_N1: Any = None) -> DeviceRows:
        """Return the rows unchanged."""
        return DeviceRows(rows_ND, scale_N1)

    def max_norm(self, step_rows: DeviceRows) -> float:
        highest = torch.zeros((), device=self.device)
        for at in range(0, len(step_rows.rows_ND), GPU_STEP):
            plain_ND = self._plain(step_rows, slice(at, at + GPU_STEP))
            highest = torch.maximum(highest, plain_ND.square().sum(1).max().sqrt())
        return float(highest)

    def candidates(
        self, queries: PreparedQueries, step_rows: DeviceRows, part: StepPart, error_Q: FloatArray
    ) -> Candidates:
        best_QP = self.best_views(queries.queries_QD, step_rows, part.counts_P, part.step.uniform)
        if part.mask_P is not None:
            best_QP[:, : len(part.mask_P)].masked_fill_(~self.put(part.mask_P), -torch.inf)
        queries.low_QK, candidates = self.select(best_QP, error_Q, queries.low_QK)
        return candidates

    def best_views(
        self, queries_QD: torch.Tensor, step_rows: DeviceRows, counts_P: IntArray, uniform: int
    ) -> torch.Tensor:
        """Compute best_QP, with columns of -inf up to a whole number of blocks."""
        rows_ND, num_queries = step_rows.rows_ND, len(queries_QD)
        max_views = uniform or int(counts_P.max())
        width = -(-len(counts_P) // BLOCK) * BLOCK
        is_half = rows_ND.dtype in (torch.int8, torch.float16)
        if not self.is_fused or not is_half or rows_ND.shape[1] > MAX_DIMENSION or max_views > MAX_VIEWS:
            return self._best_plain(queries_QD, step_rows, counts_P, uniform, width)
        from mvr_ray.core.searching.cuda_kernel import best_views

        half_QD, power_Q = _half_queries(queries_QD)
        best_QP = torch.empty(num_queries, width, device=self.device)
        slots = 1 << (max_views - 1).bit_length()
        passages = max(1, self.tuning.rows // slots)
        query_tile = 16 if num_queries <= 16 else 32 if num_queries <= 32 else 64
        query_tiles = -(-num_queries // query_tile)
        scale = power_Q if step_rows.scale_N1 is None else step_rows.scale_N1
        launch: Any = best_views[(-(-width // passages) * query_tiles,)]
        launch(
            rows_ND,
            scale,
            power_Q if uniform else self._start_of(counts_P),
            half_QD,
            power_Q,
            best_QP,
            len(counts_P),
            num_queries,
            width,
            DIMENSION=rows_ND.shape[1],
            VIEWS=uniform,
            SLOTS=slots,
            WITH_SCALES=step_rows.scale_N1 is not None,
            PASSAGES=passages,
            QUERIES=query_tile,
            QUERY_TILES=query_tiles,
            COMPONENTS=min(
                self.tuning.row_bytes // rows_ND.element_size(), max(16, 1 << (rows_ND.shape[1] - 1).bit_length())
            ),
            num_warps=self.tuning.warps,
            num_stages=self.tuning.stages,
        )
        return best_QP

    def _test_kernel(self) -> None:
        """Disable the kernel where it cannot be compiled or started: no C compiler, an old card, no memory."""
        from triton.errors import TritonError  # pyrefly: ignore[missing-import]

        rows_ND = torch.ones(8, 16, dtype=torch.float16, device=self.device)
        try:
            self.best_views(torch.ones(1, 16, device=self.device), DeviceRows(rows_ND, None), np.array([8]), 8)
            torch.cuda.synchronize(self.device)
        except (TritonError, RuntimeError, OSError, subprocess.SubprocessError) as error:
            log.warning("scan without its kernel: device=%s reason=%s", self.device, first_line(error))
            self.is_fused = False

    def select(
        self, best_QP: torch.Tensor, error_Q: FloatArray, low_QK: torch.Tensor
    ) -> tuple[torch.Tensor, Candidates]:
        """Raise the lower bounds by these scores, and find the passages that may be among the best K. A score of -inf
        is padding."""
        num_queries, keep = low_QK.shape
        best_QBP = best_QP.view(num_queries, -1, BLOCK)
        highest_QB = best_QBP.amax(2)
        error_Q1 = self.put(error_Q[:, None].astype(np.float32))
        blocks_QK = highest_QB.topk(min(keep, highest_QB.shape[1]), dim=1).indices
        inside_QP = best_QBP.gather(1, blocks_QK[..., None].expand(-1, -1, BLOCK)).flatten(1)
        high_QK = inside_QP.topk(min(keep, inside_QP.shape[1]), dim=1).values
        low_QK = torch.cat([low_QK, high_QK - error_Q1], dim=1).topk(keep, dim=1).values
        query_O, block_O = torch.nonzero(highest_QB + error_Q1 >= low_QK[:, -1:], as_tuple=True)
        upper_OP = best_QBP[query_O, block_O] + error_Q1[query_O]
        candidate_OP = (upper_OP >= low_QK[query_O, -1:]) & (upper_OP > -torch.inf)
        block_M, inside_M = torch.nonzero(candidate_OP, as_tuple=True)
        passage_M = block_O[block_M] * BLOCK + inside_M
        candidates = (query_O[block_M], passage_M, upper_OP[block_M, inside_M])
        return low_QK, Candidates(*(one.cpu().numpy() for one in candidates))

    def _plain(self, vectors: DeviceRows, index: slice) -> torch.Tensor:
        scale_N1 = None if vectors.scale_N1 is None else vectors.scale_N1[index]
        return super().prepare_rows(vectors.rows_ND[index], scale_N1)

    def _best_plain(
        self, queries_QD: torch.Tensor, vectors: DeviceRows, counts_P: IntArray, uniform: int, width: int
    ) -> torch.Tensor:
        """Compute the scores in torch, in batches of vectors."""
        starts_P = np.cumsum([0, *counts_P])
        parts, low = [], 0
        while low < len(counts_P):
            high = int(np.searchsorted(starts_P, starts_P[low] + GPU_STEP, side="right")) - 1
            high = min(max(high, low + 1), len(counts_P))
            plain_ND = self._plain(vectors, slice(int(starts_P[low]), int(starts_P[high])))
            parts.append(super().best_views(queries_QD, plain_ND, counts_P[low:high], uniform))
            low = high
        return F.pad(torch.cat(parts, 1), (0, width - len(counts_P)), value=-torch.inf)

    def _start_of(self, counts_P: IntArray) -> torch.Tensor:
        """Return the bounds of the passages' views on the device, cached as long as the array of counts exists: that of
        a step stays, that of a filtered search does not."""
        starts = self._starts.get(id(counts_P))
        if starts is None:
            starts = self._starts[id(counts_P)] = self.put(np.cumsum([0, *counts_P]).astype(np.int32))
            weakref.finalize(counts_P, self._starts.pop, id(counts_P), None)
        return starts


def _half_queries(queries_QD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Convert queries to fp16 of at most 2; also return the power of two that divides each."""
    largest_Q1 = queries_QD.abs().amax(1, keepdim=True)
    exponent_Q1 = torch.frexp(largest_Q1).exponent.clamp(-126, 127)
    power_Q1 = torch.ldexp(torch.ones_like(largest_Q1), exponent_Q1)
    return (queries_QD / power_Q1).half().contiguous(), power_Q1[:, 0].contiguous()
