"""A brute-force oracle in plain Python floats, and shards to search: random, tied, nearly tied, ragged."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import numpy as np
import pytest
from numpy.typing import NDArray

from mvr_ray.core.searching import scan
from mvr_ray.types import EmbeddingBlock, FloatArray, ShardHits, StoredBlocks

Ranked = list[tuple[float, str, int, int]]  # -score, passage id, row, view


@pytest.fixture(scope="module", autouse=True)
def threads_for_small_shards() -> Iterator[None]:
    """Let the threads of a scan share the small shards of tests, which are not worth it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "VALUES_WORTH_THREADS", 0)
        yield


def tree_sum(terms: list[float]) -> float:
    while len(terms) > 1:
        half = (len(terms) + 1) // 2
        terms = [low + high for low, high in zip(terms[:half], [*terms[half:], 0.0])]
    return terms[0] + 0.0


def plain_score(query: list[float], vector: list[float]) -> float:
    return float(np.float32(tree_sum([a * b for a, b in zip(query, vector)])))


def rank_everything(
    queries_QD: FloatArray, blocks: Sequence[EmbeddingBlock], mask_P: NDArray[np.bool_] | None = None
) -> list[Ranked]:
    """Every passage that has a view and is in the mask, best first, for each query."""
    rankings = _rank_all(pickle.dumps((np.asarray(queries_QD, np.float32).tolist(), list(blocks))))
    return [[one for one in ranking if mask_P is None or mask_P[one[2]]] for ranking in rankings]


@lru_cache(maxsize=16)
def _rank_all(data: bytes) -> list[Ranked]:
    """Rank all passages of pickled queries and blocks, which tests search for several masks and numbers of hits."""
    queries, blocks = pickle.loads(data)
    rankings: list[Ranked] = []
    for query in queries:
        rows, row = [], 0
        for block in blocks:
            vectors, numbers = block.vectors_ND.tolist(), block.view_numbers_N.tolist()
            for passage_id, start, stop in zip(block.ids, block.row_ptr[:-1].tolist(), block.row_ptr[1:].tolist()):
                best = min(((-plain_score(query, vectors[at]), numbers[at]) for at in range(start, stop)), default=None)
                if best is not None:
                    rows.append((best[0], passage_id, row, best[1]))
                row += 1
        rankings.append(sorted(rows))
    return rankings


def assert_exact(
    hits: ShardHits,
    queries_QD: FloatArray,
    blocks: Sequence[EmbeddingBlock],
    k: int,
    mask_P: NDArray[np.bool_] | None = None,
) -> None:
    truth = rank_everything(queries_QD, blocks, mask_P)
    for query, ranking in enumerate(truth):
        num_hits = min(k, len(ranking))
        top, empty = ranking[:k], k - num_hits
        assert hits.rows_QK[query].tolist() == [row for _, _, row, _ in top] + [-1] * empty
        assert hits.scores_QK[query].tolist() == [-score for score, _, _, _ in top] + [-np.inf] * empty
        assert hits.views_QK[query].tolist() == [view for _, _, _, view in top] + [-1] * empty
        assert hits.frontier_Q[query] == (-ranking[k][0] if len(ranking) > k else -np.inf)


PALETTES = ("gaussian", "ternary", "constant", "nearly equal", "cancelling", "duplicates")


def paint(palette: str, num: int, dimension: int, rng: np.random.Generator) -> FloatArray:
    """Vectors that make ranking hard in different ways, float32."""
    gaussian = rng.standard_normal((num, dimension))
    if palette == "ternary":  # small integers: most scores are tied
        gaussian = rng.integers(-1, 2, (num, dimension))
    elif palette == "constant":
        gaussian = np.broadcast_to(gaussian[:1], gaussian.shape)
    elif palette == "nearly equal":  # scores differ by less than a float32 sum errs
        gaussian = gaussian[:1] * (1 + 2.0**-22 * rng.integers(-2, 3, (num, dimension)))
    elif palette == "cancelling":  # large terms that cancel: float32 sums are wrong in most digits
        gaussian = gaussian + 1e4 * np.where(np.arange(dimension) % 2, 1, -1)
    elif palette == "duplicates":
        gaussian = gaussian[rng.integers(0, max(1, num // 5), num)]
    return np.asarray(gaussian, np.float32).reshape(num, dimension)


def cut_blocks(
    vectors_ND: FloatArray, counts_P: Sequence[int], numbers_N: Sequence[int], ids: Sequence[str], per_block: int
) -> list[EmbeddingBlock]:
    ptr = np.concatenate([[0], np.cumsum(counts_P)]).astype(np.int64)
    blocks = []
    for low in range(0, max(len(ids), 1), per_block):
        high = min(low + per_block, len(ids))
        vectors = vectors_ND[ptr[low] : ptr[high]].copy()
        vectors.setflags(write=False)  # as a mapped file is
        numbers = np.asarray(numbers_N[ptr[low] : ptr[high]], np.int16)
        blocks.append(EmbeddingBlock(list(ids[low:high]), ptr[low : high + 1] - ptr[low], numbers, vectors))
    return blocks


def make_blocks(
    seed: int,
    num_passages: int = 300,
    max_views: int = 4,
    dimension: int = 16,
    *,
    palette: str = "gaussian",
    gaps: bool = True,
    empty: bool = False,
    dtype: str = "float16",
    per_block: int = 100,
) -> list[EmbeddingBlock]:
    """A shard. `gaps`: views are missing here and there; `empty`: some passages have none at all."""
    rng = np.random.default_rng(seed)
    present_PV = np.ones((num_passages, max_views), bool)
    if gaps:
        present_PV = rng.random((num_passages, max_views)) < 0.7
        if not empty:
            present_PV[~present_PV.any(axis=1), max_views - 1] = True
    with np.errstate(over="ignore"):
        vectors_ND = paint(palette, int(present_PV.sum()), dimension, rng).astype(dtype)
    ids = sorted(f"p{number}" for number in rng.permutation(10 * num_passages)[:num_passages])
    return cut_blocks(vectors_ND, present_PV.sum(axis=1), np.nonzero(present_PV)[1], ids, per_block)


def as_changed(blocks: Sequence[EmbeddingBlock], seed: int, share: float) -> StoredBlocks:
    """The same shard as files have it after changes to this share of its passages: the first file also has passages
    that a change replaced or deleted, with views that would win; the last block has the changed ones."""
    if not share:
        return StoredBlocks(list(blocks))
    rng, row, pieces, rows = np.random.default_rng([11, seed]), 0, [], []
    upserts: list[tuple[int, str, FloatArray, FloatArray]] = []
    for block in blocks:
        passages: list[tuple[int, str, FloatArray, FloatArray]] = []
        for name, low, high in zip(block.ids, block.row_ptr, block.row_ptr[1:]):
            own = row, name, block.view_numbers_N[low:high], block.vectors_ND[low:high]
            if rng.random() < share:
                upserts.append(own)
                own = -1, name, own[2], np.float16(1.5) * own[3]
            passages += [own] if own[0] >= 0 or rng.random() < 0.5 else []
            passages += [(-1, f"{name}-", own[2], np.float16(1.5) * own[3])] if rng.random() < share else []
            row += 1
        pieces.append(passages)
    dimension, dtype = blocks[0].vectors_ND.shape[1], blocks[0].vectors_ND.dtype
    result = []
    for passages in [*pieces, upserts]:
        vectors_ND = np.concatenate([np.zeros((0, dimension), dtype), *(own[3] for own in passages)])
        numbers_N = np.concatenate([np.zeros(0, np.int16), *(own[2] for own in passages)])
        row_ptr = np.cumsum([0, *(len(own[2]) for own in passages)])
        result.append(EmbeddingBlock([own[1] for own in passages], row_ptr, numbers_N, vectors_ND))
        rows.append(np.array([own[0] for own in passages], np.int64))
    return StoredBlocks(result, rows)


@pytest.fixture(scope="session")
def change() -> Callable[[Sequence[EmbeddingBlock], int, float], StoredBlocks]:
    return as_changed


@pytest.fixture(scope="session")
def oracle() -> Callable[[FloatArray, Sequence[EmbeddingBlock]], list[Ranked]]:
    return rank_everything


@pytest.fixture(scope="session")
def check_exact() -> Callable[..., None]:
    return assert_exact


@pytest.fixture(scope="session")
def shard() -> Callable[..., list[EmbeddingBlock]]:
    return make_blocks


@pytest.fixture(scope="session")
def queries() -> Callable[..., FloatArray]:
    def draw(seed: int, num: int, dimension: int = 16, palette: str = "gaussian") -> FloatArray:
        return paint(palette, num, dimension, np.random.default_rng([7, seed]))

    return draw


@pytest.fixture(params=PALETTES, scope="session")
def palette(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def reshard() -> Callable[..., list[list[EmbeddingBlock]]]:
    """Deals the passages of a shard to S shards; rows stay in id order."""

    def deal(blocks: Sequence[EmbeddingBlock], num_shards: int, seed: int) -> list[list[EmbeddingBlock]]:
        vectors = np.concatenate([block.vectors_ND for block in blocks])
        numbers = np.concatenate([block.view_numbers_N for block in blocks])
        counts = np.concatenate([np.diff(block.row_ptr) for block in blocks])
        ids = [passage_id for block in blocks for passage_id in block.ids]
        shard_P = np.random.default_rng([8, seed]).integers(0, num_shards, len(ids))
        shard_N = np.repeat(shard_P, counts)
        return [
            cut_blocks(
                vectors[shard_N == one],
                counts[shard_P == one],
                numbers[shard_N == one],
                [ids[at] for at in np.flatnonzero(shard_P == one)],
                1 + seed % 40,
            )
            for one in range(num_shards)
        ]

    return deal
