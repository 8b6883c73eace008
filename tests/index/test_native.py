"""The compiled loops give the bytes of the plain ones: every width of panel, every tail, every kind of vector."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy_kernel import numpy_index

from mvr_ray.core.refining import native_step
from mvr_ray.core.searching import native
from mvr_ray.core.searching import scan as scan_module
from mvr_ray.core.searching.codes import decode, encode
from mvr_ray.core.searching.exact import Pairs
from mvr_ray.core.searching.kernels import Step, StepPart
from mvr_ray.core.searching.scan import Scan, score_error
from mvr_ray.index.flat import FlatIndex

SLOW = settings(max_examples=40, suppress_health_check=list(HealthCheck))
SEEDS = st.integers(0, 2**20)
built = pytest.mark.skipif(native.library() is None, reason="not compiled, or a processor without AVX-512 and VNNI")

short = pytest.mark.skipif(
    native.library() is None or not native.library().mvr_short(), reason="a processor without products of bfloat16"
)


def as_bytes(hits) -> list[bytes]:
    return [column.tobytes() for column in hits]


def rounding_norms(vectors_ND) -> np.ndarray:
    """What torch's bfloat16 takes off each vector, in float64."""
    rounded_ND = torch.from_numpy(vectors_ND).to(torch.bfloat16).to(torch.float64).numpy()
    return np.linalg.norm(vectors_ND.astype(np.float64) - rounded_ND, axis=1)


@built
@given(
    seed=SEEDS,
    num_queries=st.sampled_from([1, 2, 16, 17, 32, 33, 48, 49, 64, 95, 96]),
    dimension=st.sampled_from([1, 5, 16, 31, 64, 65, 130]),
    max_views=st.sampled_from([1, 3, 8, 20]),
    gaps=st.booleans(),
    dtype=st.sampled_from(["float16", "float32"]),
    with_codes=st.booleans(),
    step=st.sampled_from([5, 200, 16384]),
    threads=st.sampled_from([1, 2, 5]),
    tiles=st.booleans(),
    coarse=st.booleans(),
)
@SLOW
def test_compiled_loops_give_the_bytes_of_the_plain_ones(
    shard,
    queries,
    palette,
    seed,
    num_queries,
    dimension,
    max_views,
    gaps,
    dtype,
    with_codes,
    step,
    threads,
    tiles,
    coarse,
):
    blocks = shard(seed, 80, max_views, dimension, palette=palette, gaps=gaps, empty=gaps, dtype=dtype)
    batch = queries(seed, num_queries, dimension, palette)
    codes = [encode(block.vectors_ND) for block in blocks] if with_codes else None
    kernel = native.NativeKernel(threads, tiles=tiles, coarse=coarse)
    kernel.vectors_per_step = step
    actual = Scan(blocks, kernel, codes=codes).search_with_counts(batch, 9).hits
    assert as_bytes(actual) == as_bytes(numpy_index(blocks).search(batch, 9))


avx2 = pytest.mark.skipif(native.library_avx2() is None, reason="not compiled, or a processor without AVX2")


@avx2
@given(
    seed=SEEDS,
    num_queries=st.sampled_from([1, 2, 8, 17, 32]),
    dimension=st.sampled_from([1, 5, 8, 31, 32, 40, 65, 130]),
    max_views=st.sampled_from([1, 3, 8, 20]),
    gaps=st.booleans(),
    dtype=st.sampled_from(["float16", "float32"]),
    with_codes=st.booleans(),
    step=st.sampled_from([5, 200, 16384]),
    threads=st.sampled_from([1, 2, 5]),
)
@SLOW
def test_loops_for_avx2_give_the_bytes_of_the_plain_ones(
    shard, queries, monkeypatch, palette, seed, num_queries, dimension, max_views, gaps, dtype, with_codes, step,
    threads,
):  # fmt: skip
    monkeypatch.setattr(scan_module, "VIEWS_A_STEP", 0)
    blocks = shard(seed, 80, max_views, dimension, palette=palette, gaps=gaps, empty=gaps, dtype=dtype)
    batch = queries(seed, num_queries, dimension, palette)
    codes = [encode(block.vectors_ND) for block in blocks] if with_codes else None
    kernel = native.Avx2Kernel(threads)
    kernel.vectors_per_step = step
    chance_P = np.random.default_rng(seed).random(sum(len(block.ids) for block in blocks))
    plain = numpy_index(blocks)
    scan = Scan(blocks, kernel, codes=codes)
    for mask_P in (None, chance_P < 0.03, chance_P < 0.5, chance_P < 1):
        assert as_bytes(scan.search_with_counts(batch, 9, mask_P).hits) == as_bytes(plain.search(batch, 9, mask_P))


@avx2
@pytest.mark.parametrize("with_codes", [False, True])
def test_a_few_queries_under_a_filter_read_what_passes_alone(shard, queries, with_codes):
    blocks, batch = shard(3, 400, 4, 48), queries(3, 3, 48)
    codes = [encode(block.vectors_ND) for block in blocks] if with_codes else None
    index, mask_P = FlatIndex(blocks, codes=codes), np.arange(400) % 4 == 0
    assert isinstance(index.scan_for(3, 0.25).kernel, native.Avx2Kernel)
    assert isinstance(index.scan_for(9, 0.25).kernel, native.NativeKernel if native.library() else native.Avx2Kernel)
    plain = numpy_index(blocks)
    assert as_bytes(index.search(batch, 9, mask_P)) == as_bytes(plain.search(batch, 9, mask_P))


@avx2
@given(
    seed=SEEDS, num_queries=st.sampled_from([1, 7]), dimension=st.sampled_from([1, 4, 65, 768, 8200]),
    with_codes=st.booleans(), spread=st.sampled_from([1e-25, 1.0, 1e12]),
)  # fmt: skip
@SLOW
def test_products_for_avx2_err_within_the_bound(queries, palette, seed, num_queries, dimension, with_codes, spread):
    vectors_ND, batch_QD = queries(seed, 40, dimension, palette), queries(seed + 1, num_queries, dimension, palette)
    vectors_ND = vectors_ND * np.float32(spread)
    codes, kernel = encode(vectors_ND), native.Avx2Kernel(1)
    batch = kernel.prepare(batch_QD, 40, with_codes)
    rows = kernel.prepare_rows(*((codes.codes_ND, codes.scale_N[:, None]) if with_codes else (vectors_ND,)))
    decoded_ND = (decode(codes.codes_ND, codes.scale_N) if with_codes else vectors_ND).astype(np.float64)
    best_QP = kernel.best_views(batch, rows, np.arange(40), np.ones(40, np.int64)).T
    norm_Q, norm = np.linalg.norm(batch_QD.astype(np.float64), axis=1), float(np.linalg.norm(decoded_ND, axis=1).max())
    assert kernel.max_norm(rows) == pytest.approx(norm, rel=1e-4)
    true_QP = batch_QD.astype(np.float64) @ decoded_ND.T
    bound_Q = score_error(norm_Q + batch.rounding_Q, norm, dimension, 0.0) + batch.rounding_Q * norm
    assert (np.abs(best_QP - true_QP) <= bound_Q[:, None]).all()


@avx2
@pytest.mark.parametrize("dimension", [4096, 4112, 16384, 16390])
@pytest.mark.parametrize("num_queries", [1, 5])
def test_the_sum_of_the_largest_codes_and_queries_does_not_overflow(dimension, num_queries):
    codes, kernel = encode(np.ones((7, dimension), np.float32)), native.Avx2Kernel(1)
    assert (codes.codes_ND == 127).all()
    batch = kernel.prepare(np.full((num_queries, dimension), -1.0, np.float32), 7, True)
    rows = kernel.prepare_rows(codes.codes_ND, codes.scale_N[:, None])
    best_PQ = kernel.best_views(batch, rows, np.arange(7), np.ones(7, np.int64))
    assert best_PQ.shape == (7, num_queries) and best_PQ == pytest.approx(-dimension, rel=1e-4)


def misalign(values_ND: np.ndarray, skew: int) -> np.ndarray:
    """The same, `skew` bytes behind a line of memory. What lies before and behind is no number."""
    room = np.full(values_ND.nbytes + 320, 0xFF, np.uint8)
    start = -room.ctypes.data % 64 + 128 + skew
    moved_ND = np.frombuffer(room, values_ND.dtype, values_ND.size, start).reshape(values_ND.shape)
    assert moved_ND.ctypes.data % 64 == skew
    np.copyto(np.ndarray(moved_ND.shape, moved_ND.dtype, room, start), values_ND)
    return moved_ND


@built
@given(
    seed=SEEDS, dimension=st.sampled_from([1, 16, 48, 64, 80, 100, 144, 192, 384]),
    dtype=st.sampled_from(["float16", "float32"]), with_codes=st.booleans(), skew=st.integers(0, 63),
    num_queries=st.sampled_from([1, 3]), threads=st.sampled_from([1, 2]),
)  # fmt: skip
@SLOW
def test_vectors_and_codes_may_begin_anywhere_in_memory(
    shard, queries, seed, dimension, dtype, with_codes, skew, num_queries, threads
):
    block, *_ = shard(seed, 30, 3, dimension, dtype=dtype)
    codes = [encode(block.vectors_ND)] if with_codes else None
    codes = codes and [own._replace(codes_ND=misalign(own.codes_ND, skew)) for own in codes]
    kernel = native.NativeKernel(threads)
    kernel.vectors_per_step = 20
    batch = queries(seed, num_queries, dimension)
    moved_block = block._replace(vectors_ND=misalign(block.vectors_ND, skew))
    actual = Scan([moved_block], kernel, codes=codes).search_with_counts(batch, 9).hits
    assert as_bytes(actual) == as_bytes(numpy_index([block]).search(batch, 9))


@built
@pytest.mark.parametrize("with_codes", [False, True])
@pytest.mark.parametrize("num_queries", [1, 2])
def test_vectors_of_many_dimensions(shard, queries, num_queries, with_codes):
    blocks, batch = shard(5, 20, 2, 8200, dtype="float32"), queries(5, num_queries, 8200)
    codes = [encode(block.vectors_ND) for block in blocks] if with_codes else None
    actual = Scan(blocks, native.NativeKernel(1), codes=codes).search_with_counts(batch, 5).hits
    assert as_bytes(actual) == as_bytes(numpy_index(blocks).search(batch, 5))


@pytest.mark.skipif((native.library() or native.library_avx2()) is None, reason="not compiled, or an older processor")
@given(
    seed=SEEDS, dimension=st.sampled_from([1, 3, 8, 13, 100, 384]), max_views=st.sampled_from([1, 5, 130]),
    spread=st.sampled_from([1e-30, 1e-23, 1e-4, 1.0, 3e4, 1e19]), query_spread=st.sampled_from([1e-23, 1.0, 1e19]),
    dtype=st.sampled_from(["float16", "float32"]),
)  # fmt: skip
@SLOW
def test_compiled_exact_scores_are_the_plain_ones_to_the_last_bit(
    shard, queries, palette, seed, dimension, max_views, spread, query_spread, dtype
):
    raw_blocks = shard(seed, 30, max_views, dimension, palette=palette, dtype="float32")
    with np.errstate(over="ignore"):
        blocks = [
            block._replace(vectors_ND=(block.vectors_ND * np.float32(spread)).astype(dtype)) for block in raw_blocks
        ]
    blocks = [block._replace(vectors_ND=np.nan_to_num(block.vectors_ND)) for block in blocks]
    batch = queries(seed, 3, dimension, palette) * np.float32(query_spread)
    rng = np.random.default_rng(seed)
    pairs = Pairs(rng.integers(0, 3, 50), rng.integers(0, 30, 50))
    assert all(map(native.rows_of, blocks))
    with np.errstate(over="ignore"):
        fast, plain = (index.scan.table.rescore(batch, pairs) for index in (FlatIndex(blocks), numpy_index(blocks)))
    finite_M = np.isfinite(plain.score_M)
    assert fast.score_M.tobytes() == plain.score_M.tobytes()
    assert as_bytes(fast.take(finite_M)) == as_bytes(plain.take(finite_M))


@built
@given(
    seed=SEEDS, num_queries=st.sampled_from([1, 7, 40]), dimension=st.sampled_from([1, 4, 65, 768]),
    with_codes=st.booleans(), tiles=st.booleans(), coarse=st.booleans(), spread=st.sampled_from([1e-25, 1.0, 1e12]),
)  # fmt: skip
@SLOW
def test_compiled_products_err_within_the_bound(
    queries, palette, seed, num_queries, dimension, with_codes, tiles, coarse, spread
):
    """With no error allowed for, the upper bounds that a step gives are its products as computed."""
    vectors_ND, batch_QD = queries(seed, 40, dimension, palette), queries(seed + 1, num_queries, dimension, palette)
    vectors_ND = vectors_ND * np.float32(spread)
    codes, kernel = encode(vectors_ND), native.NativeKernel(1, tiles=tiles, coarse=coarse)
    batch = kernel.prepare(batch_QD, 40, with_codes)
    rows = kernel.prepare_rows(*((codes.codes_ND, codes.scale_N[:, None]) if with_codes else (vectors_ND,)))
    decoded_ND = (decode(codes.codes_ND, codes.scale_N) if with_codes else vectors_ND).astype(np.float64)
    row_P, counts_P = np.arange(40), np.ones(40, np.int64)
    step = Step(row_P, counts_P, 1, vectors_ND)
    actual = kernel.candidates(batch, rows, StepPart(step, row_P, counts_P), np.zeros(num_queries))
    assert len(actual.query_M) == 40 * num_queries  # the 40 best of 40
    norm_Q, norm = np.linalg.norm(batch_QD.astype(np.float64), axis=1), float(np.linalg.norm(decoded_ND, axis=1).max())
    assert kernel.max_norm(rows) == pytest.approx(norm, rel=1e-4)
    if batch.coarse:
        residual = 0.0 if with_codes else rounding_norms(vectors_ND).max()  # codes are exact in bfloat16
        rounding_Q = rounding_norms(batch_QD)
        bound_Q = score_error(norm_Q + rounding_Q, norm + residual, dimension, 0.0)
        bound_Q += norm_Q * residual + rounding_Q * (norm + residual)
    else:
        bound_Q = score_error(norm_Q + batch.rounding_Q, norm, dimension * batch.products, batch.input_rounding)
        bound_Q += batch.rounding_Q * norm
    true_M = (batch_QD[actual.query_M].astype(np.float64) * decoded_ND[actual.passage_M]).sum(axis=1)
    assert (np.abs(actual.upper_M - true_M) <= bound_Q[actual.query_M]).all()
    assert (batch.rounding_Q <= norm_Q * dimension**0.5 / native.LARGEST_HALF).all()


def count_steps(kernel: native.NativeKernel) -> list[bool]:
    """Which of the kernel's steps from now on are coarse."""
    steps, scan = [], kernel.candidates

    def candidates(batch, *rest):
        steps.append(batch.coarse is not None)
        return scan(batch, *rest)

    kernel.candidates = candidates
    return steps


@short
@pytest.mark.parametrize("num_queries", [2, 40])
def test_products_stay_coarse_where_few_passages_are_within_the_bound(shard, queries, num_queries):
    blocks, batch = shard(3, 2000, 4, 64, dtype="float32"), queries(3, num_queries, 64)
    kernel = native.NativeKernel(1)
    kernel.vectors_per_step, steps = 200, count_steps(kernel)
    actual = Scan(blocks, kernel).search_with_counts(batch, 20).hits
    assert len(steps) > 20
    assert all(steps)
    assert as_bytes(actual) == as_bytes(numpy_index(blocks).search(batch, 20))


@short
@given(seed=SEEDS, close=st.sampled_from([2.0**-9, 2.0**-12, 2.0**-20, 0.0]), plain=st.integers(0, 3),
       dtype=st.sampled_from(["float16", "float32"]), tiles=st.booleans())  # fmt: skip
@SLOW
def test_a_step_of_too_many_candidates_is_undone_and_made_finely(
    check_exact, shard, queries, seed, close, plain, dtype, tiles
):
    """After some plain blocks come passages whose scores lie within the coarse bound, or are equal; three stand out."""
    rng, blocks = np.random.default_rng(seed), shard(seed, 600, 3, 24, dtype="float32", gaps=False)
    every_ND = np.concatenate([block.vectors_ND for block in blocks])
    one = every_ND[np.linalg.norm(every_ND, axis=1).argmax()][None]  # of the longest, no other has the score of itself
    for block in blocks[plain:]:
        block.vectors_ND.setflags(write=True)
        block.vectors_ND[:] = one * (1 + close * rng.integers(-2, 3, block.vectors_ND.shape))
    blocks[plain].vectors_ND[:9] *= 2  # counted twice, they would fill the best k
    blocks = [block._replace(vectors_ND=block.vectors_ND.astype(dtype)) for block in blocks]
    batch = np.concatenate([queries(seed, 2, 24), one])
    kernel = native.NativeKernel(1, tiles=tiles)
    steps = count_steps(kernel)
    check_exact(Scan(blocks, kernel).search_with_counts(batch, 7).hits, batch, blocks, 7)
    assert len(steps) == len(blocks) + 1  # the step that was undone is made twice
    assert steps == sorted(steps, reverse=True)


@short
@pytest.mark.parametrize("tiles", [False, True])
def test_rounding_that_turns_the_order_round_changes_no_answer(check_exact, shard, tiles):
    """Vectors of the best four are rounded down, those of the next four up, by nearly 2^-8."""
    [block] = shard(1, 100, 1, 32, dtype="float32", gaps=False)
    block.vectors_ND.setflags(write=True)
    block.vectors_ND[:] *= 0.01
    block.vectors_ND[40:44] = 1 + 2.0**-8
    block.vectors_ND[20:24] = np.where(np.arange(32) % 4, 1 + 2.0**-8 + 2.0**-20, 1 + 2.0**-8 - 2.0**-16)
    batch, kernel = np.ones((3, 32), np.float32), native.NativeKernel(1, tiles=tiles)
    steps = count_steps(kernel)
    check_exact(Scan([block], kernel).search_with_counts(batch, 3).hits, batch, [block], 3)
    assert steps == [True]


@short
@given(seed=SEEDS, dimension=st.sampled_from([1, 31, 384]), tiny=st.booleans())
@settings(max_examples=20)
def test_what_rounding_takes_off_is_measured(queries, palette, seed, dimension, tiny):
    vectors_ND = queries(seed, 20, dimension, palette) * np.float32(1e-20 if tiny else 1)
    kernel = native.NativeKernel(1)
    norm_N = rounding_norms(vectors_ND)
    floor = dimension**0.5 * 2.0**-62
    assert kernel.max_residual(kernel.prepare_rows(vectors_ND)) == pytest.approx(norm_N.max(), rel=1e-4, abs=floor)
    coarse = kernel.prepare(vectors_ND, 5, False).coarse
    assert coarse is not None
    np.testing.assert_allclose(coarse.rounding_Q, norm_N, rtol=1e-9)
    vectors_ND[3, 0] = 2.0**120
    assert kernel.max_residual(kernel.prepare_rows(vectors_ND)) == np.inf


@built
@pytest.mark.parametrize("tiles", [False, True])
def test_vectors_and_queries_beyond_what_bfloat16_holds_are_ranked_rightly(shard, queries, check_exact, tiles):
    """1.7e38 rounds to 2^127 in eight bits; a little more would be infinite."""
    for of_vectors, of_queries in ((1e37, 1e-3), (1e-3, 1e37), (5e37, 1e-30)):
        blocks = [
            block._replace(vectors_ND=block.vectors_ND * np.float32(of_vectors))
            for block in shard(2, 50, dtype="float32")
        ]
        batch = queries(2, 20) * np.float32(of_queries)
        actual = Scan(blocks, native.NativeKernel(1, tiles=tiles)).search_with_counts(batch, 7).hits
        check_exact(actual, batch, blocks, 7)


@built
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("dimension", [1, 31, 32, 65, 384])
def test_the_largest_rounding_error_is_that_of_bfloat16(dimension, dtype):
    kernel, random = native.NativeKernel(1), np.random.default_rng(dimension)
    vectors_ND = random.standard_normal((40, dimension)).astype(dtype)
    rows = kernel.prepare_rows(vectors_ND)
    assert kernel.max_residual(rows) == pytest.approx(rounding_norms(vectors_ND).max(), rel=1e-5)
    vectors_ND[7, -1] = np.nan
    assert np.isnan(kernel.max_norm(rows)) and kernel.max_residual(rows) == np.inf


@built
@pytest.mark.parametrize("dimension", [32, 33])
def test_the_largest_rounding_error_is_infinite_where_a_product_of_bfloat16_could_be(dimension):
    kernel, vectors_ND = native.NativeKernel(1), np.ones((3, dimension), np.float32)
    vectors_ND[1, 5] = 2.0**119  # without a rounding error
    assert kernel.max_residual(kernel.prepare_rows(vectors_ND)) == 0
    vectors_ND[1, 5] = -(2.0**120)
    assert kernel.max_residual(kernel.prepare_rows(vectors_ND)) == np.inf


@built
def test_a_thread_that_flushes_small_numbers_changes_no_byte(shard, queries):
    blocks = [
        block._replace(vectors_ND=block.vectors_ND * np.float32(1e-38)) for block in shard(2, 50, dtype="float32")
    ]
    index = FlatIndex(blocks, threads=1, kernel=native.NativeKernel(1))
    plain = as_bytes(index.search(queries(2, 3), 7))
    assert torch.set_flush_denormal(True)
    try:
        assert as_bytes(index.search(queries(2, 3), 7)) == plain
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(("module", "load"), [(native, native.library_avx2), (native_step, native_step.library)])
def test_loops_that_were_built_from_other_sources_are_not_called(module, load, monkeypatch, caplog):
    """A checkout that went on without being installed again."""
    if load() is None:
        pytest.skip("not compiled")
    monkeypatch.setattr(module, "INTERFACE", module.INTERFACE + 1)
    assert load.__wrapped__() is None
    assert f"{module.LIBRARY} was built from other sources and is not used; install the package again" in caplog.text


def test_without_the_compiled_loops_the_answers_are_the_same(shard, queries, tmp_path):
    """In a process that finds no compiled module, as where no compiler was."""
    blocks, batch = shard(9, dtype="float32"), queries(9, 5)
    program = f"""
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "mvr_ray.core.searching._scan" else found(name, *rest)
import numpy as np
from mvr_ray.core.searching import native
from mvr_ray.index.flat import FlatIndex
from mvr_ray.types import EmbeddingBlock
assert native.library() is None
loaded = np.load({str(tmp_path / "shard.npz")!r})
ids = loaded["ids"].tolist()
block = EmbeddingBlock(ids, loaded["row_ptr"], loaded["numbers"], loaded["vectors"])
index = FlatIndex([block])
assert type(index.scan.kernel).__name__ == "TorchKernel"
np.savez({str(tmp_path / "hits.npz")!r}, *index.search(loaded["queries"], 10))
"""
    [block] = shard(9, dtype="float32", per_block=1000)
    np.savez(
        tmp_path / "shard.npz", ids=np.array(block.ids), row_ptr=block.row_ptr, numbers=block.view_numbers_N,
        vectors=block.vectors_ND, queries=batch,
    )  # fmt: skip
    subprocess.run([sys.executable, "-c", program], check=True)
    hits = np.load(tmp_path / "hits.npz")
    assert [hits[name].tobytes() for name in hits.files] == as_bytes(FlatIndex(blocks).search(batch, 10))


def test_the_source_of_the_compiled_loops_is_shipped():
    assert (Path(native.__file__).parent / "scan.c").is_file()


def test_the_number_of_threads_is_the_environments_while_torch_is_being_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert native.num_threads() == 3
