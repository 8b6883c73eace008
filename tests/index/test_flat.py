"""Flat search equals brute force to the last tie, whatever the batch, the blocks, the shards, the kernel."""

import ctypes
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy_kernel import NumpyKernel, numpy_index

from mvr_ray.core.searching import engines
from mvr_ray.core.searching import scan as scan_module
from mvr_ray.core.searching.codes import LEVELS, Codes, decode, encode
from mvr_ray.core.searching.engines import make_kernel
from mvr_ray.core.searching.kernels import MANY_SCORES, PreparedQueries, TorchKernel, select_candidates
from mvr_ray.core.searching.merging import merge, replace_hits, uncertain_queries
from mvr_ray.core.searching.native import NativeKernel, library, library_avx2
from mvr_ray.core.searching.scan import Scan
from mvr_ray.core.threads import torch_threads
from mvr_ray.errors import ShardIndexError
from mvr_ray.index import flat
from mvr_ray.index.base import IndexParams
from mvr_ray.index.flat import CODES_FILE, SCALES_FILE, FlatIndex, build_codes, open_codes, shared_codes
from mvr_ray.index.kinds import build_index, open_index
from mvr_ray.types import EmbeddingBlock

KERNELS = [NumpyKernel, TorchKernel, *([NativeKernel] if library() else [])]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
SLOW = settings(max_examples=25, suppress_health_check=list(HealthCheck))


def as_bytes(hits) -> list[bytes]:
    return [column.tobytes() for column in hits]


def codes_of(blocks) -> list[Codes]:
    return [encode(block.vectors_ND) for block in blocks]


@contextmanager
def limits(**values: int) -> Iterator[None]:
    """Set limits of the scan's module."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(scan_module, name, value)
        yield


@given(
    seed=st.integers(0, 2**20),
    num_passages=st.integers(1, 60),
    max_views=st.integers(1, 5),
    dimension=st.sampled_from([1, 2, 3, 8, 33]),
    k=st.integers(1, 70),
    gaps=st.booleans(),
    empty=st.booleans(),
    dtype=st.sampled_from(["float16", "float32"]),
    per_block=st.integers(1, 64),
    new_kernel=st.sampled_from(KERNELS),
    step=st.sampled_from([1, 7, 16384]),
    at_once=st.sampled_from([1, 3, 256]),
    pending=st.sampled_from([0, 1 << 18]),
    with_codes=st.booleans(),
    threads=st.sampled_from([1, 3]),
    changed_share=st.sampled_from([0.0, 0.1, 0.7]),
)
@SLOW
def test_flat_search_equals_brute_force(
    shard, queries, check_exact, change, palette, seed, num_passages, max_views, dimension, k, gaps, empty, dtype,
    per_block, new_kernel, step, at_once, pending, with_codes, threads, changed_share,
):  # fmt: skip
    blocks = shard(
        seed, num_passages, max_views, dimension,
        palette=palette, gaps=gaps, empty=empty, dtype=dtype, per_block=per_block,
    )  # fmt: skip
    queries_QD = queries(seed, 4, dimension, palette)
    kernel = new_kernel()
    kernel.vectors_per_step, kernel.threads = step, threads
    stored_shard = change(blocks, seed, changed_share)
    codes = codes_of(stored_shard.blocks) if with_codes else None
    scan = Scan(stored_shard.blocks, kernel, stored_shard.rows, codes=codes)
    with limits(QUERIES_AT_ONCE=at_once, CANDIDATES_AT_ONCE=pending):
        check_exact(scan.search_with_counts(queries_QD, k).hits, queries_QD, blocks, k)


def test_every_thread_has_a_step_of_a_small_shard(shard, queries):
    blocks, batch = shard(1, 40_000, 1, 8, per_block=40_000), queries(1, 4, 8)
    kernel = make_kernel()
    kernel.vectors_per_step, kernel.threads = 32_768, 8
    scan = Scan(blocks, kernel)
    assert len(scan.steps) >= kernel.threads
    assert as_bytes(scan.search_with_counts(batch, 3).hits) == as_bytes(numpy_index(blocks).search(batch, 3))


@pytest.mark.parametrize(("num_passages", "share", "num_threads"), [(500, 1.0, 1), (9000, 0.3, 1), (9000, 1.0, 2)])
def test_a_scan_of_little_work_has_one_thread(shard, queries, monkeypatch, num_passages, share, num_threads):
    monkeypatch.setattr(scan_module, "VIEWS_A_STEP", 0)
    monkeypatch.setattr(scan_module, "VALUES_WORTH_THREADS", 1 << 15)
    blocks, batch = shard(3, num_passages, 2, 16, per_block=num_passages), queries(3, 2, 16)
    mask_P, threads = np.arange(num_passages) < share * num_passages, set[int]()
    scan, own_scan = FlatIndex(blocks, threads=2).scan, Scan._scan

    def scan_in_thread(*arguments: Any) -> Any:
        threads.add(threading.get_ident())
        time.sleep(0.1)  # until the other thread has taken a step
        return own_scan(*arguments)

    monkeypatch.setattr(Scan, "_scan", scan_in_thread)
    hits = scan.search_with_counts(batch, 3, mask_P).hits
    assert len(threads) == num_threads
    assert as_bytes(hits) == as_bytes(numpy_index(blocks).search(batch, 3, mask_P))


@pytest.mark.parametrize("new_kernel", KERNELS)
def test_threads_that_score_many_ties_at_once_do_not_wait_for_each_other(shard, queries, monkeypatch, new_kernel):
    """More threads scan than the pool has, and each has pairs for several threads."""
    monkeypatch.setattr(scan_module, "PAIRS_WORTH_THREADS", 8)
    blocks, batch = shard(1, 3000, 1, 8, palette="constant", per_block=3000), queries(1, 4, 8)
    kernel = new_kernel()
    kernel.vectors_per_step, kernel.threads = 100, (os.cpu_count() or 1) + 2
    expected = as_bytes(FlatIndex(blocks).search(batch, 3))
    monkeypatch.setattr(scan_module, "CANDIDATES_AT_ONCE", 10)
    scan, results = Scan(blocks, kernel), []
    search = threading.Thread(
        target=lambda: results.append(as_bytes(scan.search_with_counts(batch, 3).hits)), daemon=True
    )
    search.start()
    search.join(timeout=60)
    assert results == [expected]


@given(
    seed=st.integers(0, 2**20),
    num_passages=st.integers(1, 120),
    max_views=st.integers(1, 5),
    dimension=st.sampled_from([1, 8, 33]),
    num_queries=st.sampled_from([1, 4, 17]),
    k=st.integers(1, 70),
    share=st.sampled_from([0.0, 0.02, 0.15, 0.5, 0.95, 1.0]),
    runs=st.booleans(),
    gaps=st.booleans(),
    dtype=st.sampled_from(["float16", "float32"]),
    per_block=st.integers(1, 64),
    new_kernel=st.sampled_from(KERNELS),
    step=st.sampled_from([1, 20, 16384]),
    pending=st.sampled_from([0, 1 << 18]),
    with_codes=st.booleans(),
    threads=st.sampled_from([1, 3]),
    views_a_step=st.sampled_from([0, 12, 2048]),
    changed_share=st.sampled_from([0.0, 0.1, 0.7]),
)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_a_search_under_a_mask_equals_brute_force_over_what_passes(
    shard, queries, check_exact, change, palette, seed, num_passages, max_views, dimension, num_queries, k, share, runs,
    gaps, dtype, per_block, new_kernel, step, pending, with_codes, threads, views_a_step, changed_share,
):  # fmt: skip
    """Passages pass at random or in runs; none, fewer than k, most or all of them; one scan has several masks."""
    blocks = shard(
        seed,
        num_passages,
        max_views,
        dimension,
        palette=palette,
        gaps=gaps,
        empty=True,
        dtype=dtype,
        per_block=per_block,
    )
    queries_QD = queries(seed, num_queries, dimension, palette)
    kernel = new_kernel()
    kernel.vectors_per_step, kernel.threads = step, threads
    stored_shard = change(blocks, seed, changed_share)
    codes = codes_of(stored_shard.blocks) if with_codes else None
    scan = Scan(stored_shard.blocks, kernel, stored_shard.rows, codes=codes)
    rng = np.random.default_rng(seed)
    chances_P = rng.random((3, num_passages))
    masks = [*((np.sort(chances_P) if runs else chances_P) < share), None]
    with limits(CANDIDATES_AT_ONCE=pending, VIEWS_A_STEP=views_a_step):
        for mask_P in masks:
            check_exact(scan.search_with_counts(queries_QD, k, mask_P).hits, queries_QD, blocks, k, mask_P)


@pytest.mark.parametrize(("share", "has_steps"), [(0.01, False), (0.9, True)])
def test_where_few_pass_all_of_them_are_scored_exactly_and_nothing_is_scanned(shard, queries, share, has_steps):
    blocks, batch = shard(4, 4000, 4, 16, gaps=True, per_block=4000), queries(4, 2, 16)
    index, mask_P = FlatIndex(blocks), np.random.default_rng(4).random(4000) < share
    num_passing = int(np.count_nonzero(mask_P & (np.concatenate([np.diff(block.row_ptr) for block in blocks]) > 0)))
    rescored_Q = index.search_with_counts(batch, 3, mask_P).rescored_Q
    assert (rescored_Q < num_passing).all() if has_steps else (rescored_Q == num_passing).all()


def test_a_mask_of_other_rows_is_refused(shard, queries):
    with pytest.raises(ShardIndexError, match="a mask of 4 rows does not fit 5 passages"):
        FlatIndex(shard(1, 5, 2, 8)).search(queries(1, 1, 8), 3, np.ones(4, bool))


@given(seed=st.integers(0, 2**20), num_shards=st.integers(1, 6), k=st.integers(1, 80), share=st.integers(1, 80))
@SLOW
def test_merging_shards_equals_ranking_everything(shard, queries, oracle, reshard, palette, seed, num_shards, k, share):
    """Shards are first asked for `share` rows only, and for k only where the first round leaves a doubt."""
    blocks, queries_QD = shard(seed, 60, 3, 8, palette=palette, empty=True), queries(seed, 3, 8, palette)
    shards = [one for one in reshard(blocks, num_shards, seed) if one[0].ids]
    ids = [passage_id for one in shards for block in one for passage_id in block.ids]
    starts = np.cumsum([0, *(sum(len(block.ids) for block in one) for one in shards)]).tolist()

    def ids_of(passages):
        return [ids[passage] for passage in passages]

    lists = [(start, FlatIndex(one).search(queries_QD, min(share, k))) for start, one in zip(starts, shards)]
    again = uncertain_queries(lists, merge(lists, k, ids_of), ids_of)
    for number, doubtful_Q in enumerate(again):
        start, hits = lists[number]
        if len(doubtful_Q):
            second = FlatIndex(shards[number]).search(queries_QD[doubtful_Q], k)
            lists[number] = start, replace_hits(hits, second, doubtful_Q)
    for best, ranking in zip(zip(*merge(lists, k, ids_of)), oracle(queries_QD, blocks)):
        passage_K, score_K, view_K = (column[: len(ranking)].tolist() for column in best[:3])
        assert list(zip(ids_of(passage_K), view_K, score_K)) == [(i, v, -s) for s, i, _, v in ranking[:k]]


@given(
    seed=st.integers(0, 2**20),
    dtype=st.sampled_from(["float16", "float32"]),
    spread=st.sampled_from([1e-6, 1.0, 300.0]),
)
@SLOW
def test_a_code_is_the_nearest_of_its_levels_and_its_residual_no_less_than_the_distance(
    queries, palette, seed, dtype, spread
):
    vectors_ND = np.clip(queries(seed, 20, 9, palette) * spread, -6e4, 6e4).astype(dtype)
    vectors_ND[0] = 0
    codes = encode(vectors_ND)
    for vector, code, scale, residual in zip(vectors_ND.astype(np.float64), *codes):
        assert float(scale) == np.float32(np.abs(vector).max() / LEVELS)
        levels = [float(np.float32(level) * scale) for level in range(-LEVELS, LEVELS + 1)]
        nearest = [min(abs(level - value) for level in levels) for value in vector.tolist()]
        away = [abs(float(np.float32(one) * scale) - value) for one, value in zip(code.tolist(), vector.tolist())]
        assert away == pytest.approx(nearest, rel=1e-5, abs=float(scale) * 1e-4)
        assert float(residual) >= sum(one * one for one in away) ** 0.5
        assert float(residual) <= sum(one * one for one in away) ** 0.5 * (1 + 1e-6) + 1e-37
    assert not codes.codes_ND[0].any()
    assert decode(codes.codes_ND, codes.scale_N).dtype == np.float32


def test_the_c_library_is_loaded_once(monkeypatch):
    loads, load = [], ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name: (loads.append(name), load(name))[1])
    flat._libc.cache_clear()
    assert all(flat._in_memory(np.ones((400, 64))) for _ in range(3)) and loads == [None]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_batch_over_codes_scans_halves_that_are_in_memory_where_these_are_faster(shard, queries, dtype):
    [block], batch = shard(8, 4000, 4, 64, dtype=dtype, per_block=4000), queries(8, 9, 64)
    vectors_ND = np.frombuffer(mmap.mmap(-1, block.vectors_ND.nbytes), dtype).reshape(block.vectors_ND.shape)
    index = FlatIndex([block._replace(vectors_ND=vectors_ND)], codes=codes_of([block]), threads=1)
    assert index.scan_for(9).has_codes, "no page of the vectors is in memory"
    vectors_ND[:] = block.vectors_ND
    faster = dtype == "float16" and index.scan.kernel.halves_are_faster
    assert index.scan_for(9).has_codes != faster
    assert index.scan_for(1).has_codes
    assert as_bytes(index.search(batch, 9)) == as_bytes(numpy_index([block]).search(batch, 9))


@pytest.mark.parametrize("device", DEVICES)
def test_codes_on_file_give_the_bytes_of_the_vectors_and_a_damaged_file_is_an_error(shard, queries, tmp_path, device):
    blocks, queries_QD = shard(8, 120, 4, 24, empty=True), queries(8, 6, 24)
    params = IndexParams(scan="int8")
    assert build_index(params, blocks, tmp_path) == ["codes.npy", "scales.npy"]
    before = [(tmp_path / name).read_bytes() for name in ("codes.npy", "scales.npy")]
    build_index(params, blocks, tmp_path)
    assert [(tmp_path / name).read_bytes() for name in ("codes.npy", "scales.npy")] == before
    with_codes = open_index(params, blocks, tmp_path, device=device)
    assert with_codes.exact
    for k in (1, 10, 500):
        assert as_bytes(with_codes.search(queries_QD, k)) == as_bytes(FlatIndex(blocks).search(queries_QD, k))
    with pytest.raises(ShardIndexError, match=r"codes of .* vectors, the embeddings are .*; build the index again"):
        open_index(params, shard(8, 40, 4, 24), tmp_path)
    (tmp_path / "codes.npy").write_bytes(before[0][:50])
    with pytest.raises(ShardIndexError, match=r"no eight-bit codes can be read in .*; build the index again"):
        open_index(params, blocks, tmp_path)
    with pytest.raises(ShardIndexError, match="index scan 'int4' is unknown; it is one of vectors, int8"):
        build_index(IndexParams(scan="int4"), blocks, tmp_path)
    vectors_ND = blocks[0].vectors_ND.copy()
    vectors_ND[3, 2] = np.nan
    with pytest.raises(ShardIndexError, match=r"vector 3 of .* has NaN or infinity"):
        build_index(params, [blocks[0]._replace(vectors_ND=vectors_ND)], tmp_path)


def test_codes_are_arrays_of_numpy_and_a_full_disk_is_an_error(shard, tmp_path, tiny_disk):
    blocks = shard(8, 2000, 8, 24)
    for name in build_index(IndexParams(scan="int8"), blocks, tmp_path):
        np.save(tmp_path / "array.npy", np.load(tmp_path / name))
        assert (tmp_path / name).read_bytes() == (tmp_path / "array.npy").read_bytes()
    if tiny_disk is None:
        pytest.skip("no file system can be mounted here")
    with pytest.raises(OSError, match="No space left on device"):
        build_index(IndexParams(scan="int8"), blocks, tiny_disk)


@pytest.mark.parametrize("device", DEVICES)
def test_batch_size_changes_no_byte(shard, queries, palette, device):
    index = FlatIndex(shard(3, palette=palette), device=device)
    queries_QD = queries(3, 40, palette=palette)
    whole = index.search(queries_QD, 12)
    for size in (1, 3, 17, 40):
        parts = [index.search(queries_QD[at : at + size], 12) for at in range(0, len(queries_QD), size)]
        assert as_bytes(whole) == [np.concatenate(columns).tobytes() for columns in zip(*parts)]


@pytest.mark.parametrize("device", DEVICES)
def test_kernels_blocks_and_devices_change_no_byte(shard, queries, palette, device):
    queries_QD = queries(4, 9, palette=palette)
    answers = [
        as_bytes(FlatIndex(shard(4, palette=palette, per_block=size), kernel=kernel).search(queries_QD, 20))
        for size in (7, 300)
        for kernel in [*(new_kernel() for new_kernel in KERNELS), TorchKernel(device), make_kernel(device)]
    ]
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize(("precision", "rounding"), [("high", 2.0**-10), ("medium", 2.0**-8)])
def test_coarse_matrix_products_change_no_byte(shard, queries, palette, precision, rounding):
    """Someone else in the process may allow products of TF32 or bfloat16; the bound then widens."""
    blocks, queries_QD = shard(5, dimension=64, palette=palette), queries(5, 9, 64, palette)
    index = FlatIndex(blocks, kernel=TorchKernel())
    exact = as_bytes(index.search(queries_QD, 10))
    torch.set_float32_matmul_precision(precision)
    try:
        assert index.scan.kernel.input_rounding == rounding
        assert as_bytes(index.search(queries_QD, 10)) == exact
    finally:
        torch.set_float32_matmul_precision("highest")


def test_without_compiled_loops_torch_scans_with_these_threads_and_keeps_the_caller_s(shard, queries, monkeypatch):
    """As on a processor that has no loops of ours, such as one of ARM."""
    numbers: list[int] = []

    def best_views(kernel: TorchKernel, *args, best_views=TorchKernel.best_views):
        numbers.append(torch.get_num_threads())
        return best_views(kernel, *args)

    monkeypatch.setattr(engines, "library", lambda: None)
    monkeypatch.setattr(engines, "library_avx2", lambda: None)
    monkeypatch.setattr(TorchKernel, "best_views", best_views)
    with torch_threads(3):
        index = FlatIndex(shard(6), threads=2)
        index.search(queries(6, 5), 10)
        assert torch.get_num_threads() == 3
    assert {*numbers} == {2}


def test_a_kept_index_answers_the_same_again(shard, queries):
    index = FlatIndex(shard(6))
    assert as_bytes(index.search(queries(6, 5), 10)) == as_bytes(index.search(queries(6, 5), 10))
    assert as_bytes(index.search(queries(6, 5), 10)) == as_bytes(FlatIndex(shard(6)).search(queries(6, 5), 10))


def test_vectors_resident_on_the_device_give_the_same_bytes(shard, queries):
    kernel = TorchKernel(DEVICES[-1])
    scans = [Scan(shard(6), kernel, resident=on_device) for on_device in (True, False)]
    resident, stream = (as_bytes(scan.search_with_counts(queries(6, 5), 10).hits) for scan in scans)
    assert resident == stream


def test_asking_for_more_than_there_is_returns_all_and_pads(shard, queries):
    hits = FlatIndex(shard(7, 20)).search(queries(7, 2), 50)
    assert sorted(hits.rows_QK[0, :20].tolist()) == list(range(20))
    assert (hits.rows_QK[:, 20:] == -1).all()
    assert (hits.scores_QK[:, 20:] == -np.inf).all()
    assert (hits.views_QK[:, 20:] == -1).all()
    assert (hits.frontier_Q == -np.inf).all()


def test_an_empty_shard_answers_with_padding(shard, queries):
    nothing = EmbeddingBlock(["a", "b"], np.zeros(3, np.int64), np.zeros(0, np.int16), np.zeros((0, 16), np.float16))
    for blocks in (shard(0, 0), [nothing]):
        hits = FlatIndex(blocks).search(queries(0, 3), 4)
        assert hits.rows_QK.tolist() == [[-1] * 4] * 3
        assert (hits.frontier_Q == -np.inf).all()


def test_no_queries_get_no_hits(shard):
    assert FlatIndex(shard(0)).search(np.zeros((0, 16), np.float32), 4).rows_QK.shape == (0, 4)


def test_float64_queries_are_taken_as_float32(shard, queries):
    index, queries_QD = FlatIndex(shard(8)), queries(8, 3)
    assert as_bytes(index.search(queries_QD.astype(np.float64), 5)) == as_bytes(index.search(queries_QD, 5))


@pytest.mark.parametrize(
    ("damage", "k", "words"),
    [
        (lambda q: q, 0, "k is 0; ask for at least one passage"),
        (lambda q: q, -3, "k is -3"),
        (lambda q: q[:, :5], 3, r"shape \(2, 5\), the index has dimension 16"),
        (lambda q: q[0], 3, r"shape \(16,\), the index has dimension 16"),
        (lambda q: np.where(np.arange(2)[:, None] == 1, np.nan, q), 3, "query 1 holds NaN or infinity"),
        (lambda q: q * np.float64(1e300), 3, "query 0 holds NaN or infinity"),
        (lambda q: np.sign(q) * np.float32(3e38), 3, "overflow float32 scores; normalise the embeddings"),
    ],
)
def test_senseless_questions_are_refused(shard, queries, damage, k, words):
    with pytest.raises(ShardIndexError, match=words):
        FlatIndex(shard(0)).search(damage(queries(0, 2)), k)


@pytest.mark.parametrize("new_kernel", KERNELS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_damaged_vector_is_named(shard, queries, new_kernel, value):
    blocks = shard(0, dtype="float32")
    vectors_ND = blocks[1].vectors_ND.copy()
    vectors_ND[blocks[1].row_ptr[7], 3] = value
    index = FlatIndex([blocks[0], blocks[1]._replace(vectors_ND=vectors_ND), blocks[2]], kernel=new_kernel())
    for mask_P in (None, np.arange(300) % 50 == 7):
        with pytest.raises(ShardIndexError, match=rf"passage '{blocks[1].ids[7]}' \(row 107\) has a vector with NaN"):
            index.search(queries(0, 2), 3, mask_P)


@pytest.mark.parametrize("new_kernel", KERNELS)
def test_huge_and_tiny_vectors_are_ranked_rightly(shard, queries, check_exact, new_kernel):
    for factor in (1e16, 1e-22, 1e-38):
        blocks = [
            block._replace(vectors_ND=block.vectors_ND * np.float32(factor)) for block in shard(2, 50, dtype="float32")
        ]
        check_exact(FlatIndex(blocks, kernel=new_kernel()).search(queries(2, 3), 7), queries(2, 3), blocks, 7)


def test_blocks_of_two_dimensions_are_refused(shard):
    with pytest.raises(ShardIndexError, match=r"have dimensions \[8, 16\]"):
        FlatIndex(shard(0, dimension=8) + shard(0, dimension=16))


def test_an_absent_device_is_refused(shard):
    with pytest.raises(ShardIndexError, match="cannot search on device 'cuda:99'"):
        FlatIndex(shard(0), device="cuda:99")


@pytest.mark.skipif(library_avx2() is None, reason="not compiled, or a processor without AVX2")
def test_flat_needs_numpy_alone():
    program = """
import sys
for name in ("torch", "ray", "pydantic", "faiss", "hnswlib", "pyarrow", "transformers", "scipy"):
    sys.modules[name] = None
from pathlib import Path
import numpy as np
from mvr_ray.index.base import IndexParams
from mvr_ray.index.kinds import build_index, open_index
from mvr_ray.types import EmbeddingBlock
block = EmbeddingBlock(["a", "b"], np.array([0, 2, 3]), np.array([0, 1, 0]), np.eye(3, dtype=np.float16))
assert build_index(IndexParams(), [block], Path()) == []
hits = open_index(IndexParams(), [block], Path()).search(np.array([[0, 1, 2]]), 2)
assert hits.rows_QK.tolist() == [[1, 0]] and hits.scores_QK.tolist() == [[2, 1]] and hits.views_QK.tolist() == [[0, 1]]
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_codes_of_a_changed_shard_are_those_of_its_vectors_now(shard, change, tmp_path, monkeypatch):
    """Vectors of the first file keep its codes, in whatever rows; those of changes are encoded, a few at a time."""
    blocks, _ = change(shard(11, 40, per_block=15), 1, 0.2)
    build_codes(blocks[:-1], tmp_path)
    sizes: list[int] = []
    monkeypatch.setattr(flat, "_ROWS", 4)
    monkeypatch.setattr(flat, "encode", lambda vectors_ND: (sizes.append(len(vectors_ND)), encode(vectors_ND))[1])
    for name, first_name in shared_codes([CODES_FILE, SCALES_FILE], has_changes=False).items():
        (tmp_path / name).rename(tmp_path / first_name)
    for block, codes in zip(blocks, open_codes(tmp_path, blocks, is_changed=True), strict=True):
        for own, expected in zip(codes, encode(block.vectors_ND), strict=True):
            np.testing.assert_array_equal(own, expected)
    assert max(sizes) <= 4 and sum(sizes) == len(blocks[-1].vectors_ND) > 4
    for others, is_changed in ((blocks, False), (blocks[:-1], False), (blocks[1:], True)):
        with pytest.raises(
            ShardIndexError, match=r"codes of \d+ vectors, the embeddings are \d+; build the index again"
        ):
            open_codes(tmp_path, others, is_changed=is_changed)


@pytest.mark.parametrize("num_passages", [300, 5000])
@pytest.mark.parametrize("share", [0.01, 1.0])
def test_candidates_of_a_step_hold_its_best_passages_whatever_its_size(num_passages, share):
    rng, k, error = np.random.default_rng(num_passages), 10, np.float32(1e-3)
    best_PQ = rng.standard_normal((num_passages, 32)).astype(np.float32)
    assert (best_PQ.size > MANY_SCORES) == (num_passages == 5000)
    mask_P = rng.random(num_passages) < share
    queries = PreparedQueries(None, np.full((32, k), -np.inf, np.float32), np.zeros(32))
    candidates = select_candidates(queries, best_PQ, np.full(32, error), mask_P)
    passing = np.flatnonzero(mask_P)
    for query in range(32):
        own = set(candidates.passage_M[candidates.query_M == query].tolist())
        order = passing[np.argsort(-best_PQ[passing, query])]
        assert set(order[:k].tolist()) <= own <= set(passing.tolist())
        kth = best_PQ[order[k - 1], query] if len(order) >= k else -np.inf
        assert kth - 2 * error <= queries.low_QK[query, -1] <= kth
