# ruff: noqa: ANN001, ANN201
"""Define the kernel of `cuda_scan` in Triton.

Shapes: N rows of a tile (slots for the views of some passages), P its passages, Q its queries, D components at once.
"""

import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]


@triton.jit
def best_views(
    rows_ptr,
    scale_ptr,
    start_ptr,
    queries_ptr,
    power_ptr,
    best_ptr,
    num_passages,
    num_queries,
    width,
    DIMENSION: tl.constexpr,
    VIEWS: tl.constexpr,
    SLOTS: tl.constexpr,
    WITH_SCALES: tl.constexpr,
    PASSAGES: tl.constexpr,
    QUERIES: tl.constexpr,
    QUERY_TILES: tl.constexpr,
    COMPONENTS: tl.constexpr,
):
    """Score PASSAGES x SLOTS rows with QUERIES queries. VIEWS: the common number of views; 0: from `start_ptr`."""
    program = tl.program_id(0)  # query tiles of the same vectors are adjacent, and share these in the cache
    tile = program // QUERY_TILES
    query_Q = (program % QUERY_TILES) * QUERIES + tl.arange(0, QUERIES)
    valid_Q = query_Q < num_queries
    slot_N = tl.arange(0, PASSAGES * SLOTS)
    view_N = slot_N % SLOTS
    passage_N = tile * PASSAGES + slot_N // SLOTS
    valid_N = passage_N < num_passages
    if VIEWS > 0:
        row_N = passage_N.to(tl.int64) * VIEWS + view_N
        valid_N = valid_N & (view_N < VIEWS)
    else:
        first_N = tl.load(start_ptr + passage_N, mask=valid_N, other=0)
        end_N = tl.load(start_ptr + passage_N + 1, mask=valid_N, other=0)
        row_N = first_N.to(tl.int64) + view_N
        valid_N = valid_N & (view_N < end_N - first_N)
    scores_NQ = tl.zeros((PASSAGES * SLOTS, QUERIES), tl.float32)
    for start in range(0, DIMENSION, COMPONENTS):
        at_D = start + tl.arange(0, COMPONENTS)
        read_ND, read_DQ = valid_N[:, None], valid_Q[None, :]
        if DIMENSION % COMPONENTS:
            read_ND = read_ND & (at_D < DIMENSION)[None, :]
            read_DQ = read_DQ & (at_D < DIMENSION)[:, None]
        rows_ND = tl.load(rows_ptr + row_N[:, None] * DIMENSION + at_D[None, :], mask=read_ND, other=0)
        half_DQ = tl.load(queries_ptr + query_Q[None, :] * DIMENSION + at_D[:, None], mask=read_DQ, other=0.0)
        scores_NQ = tl.dot(rows_ND.to(tl.float16), half_DQ, scores_NQ)
    if WITH_SCALES:
        scores_NQ = scores_NQ * tl.load(scale_ptr + row_N, mask=valid_N, other=0.0)[:, None]
    scores_NQ = scores_NQ * tl.load(power_ptr + query_Q, mask=valid_Q, other=0.0)[None, :]
    scores_NQ = tl.where(valid_N[:, None], scores_NQ, float("-inf"))
    best_PQ = tl.max(tl.reshape(scores_NQ, (PASSAGES, SLOTS, QUERIES)), axis=1)
    passage_P = tile * PASSAGES + tl.arange(0, PASSAGES)
    out_PQ = best_ptr + query_Q[None, :].to(tl.int64) * width + passage_P[:, None]
    tl.store(out_PQ, best_PQ, mask=valid_Q[None, :] & (passage_P < width)[:, None])
