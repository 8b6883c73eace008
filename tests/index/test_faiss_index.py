"""Checks what is particular to Faiss: mapped files, settings that reach the index, training on a sample."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import faiss
import numpy as np
import pytest

from mvr_ray.errors import ShardIndexError
from mvr_ray.index import faiss_index
from mvr_ray.index.base import IndexParams
from mvr_ray.index.kinds import build_index, check_params, open_index
from mvr_ray.types import FloatArray, IntArray


@pytest.mark.parametrize("factory", ["Flat", "IVF8,SQfp16", "IVF8,PQ4x4fs", "HNSW8", "PCA8,SQ8"])
def test_the_index_file_is_mapped_and_stays_as_it_was(factory, shard, queries, tmp_path):
    params = IndexParams("faiss", factory)
    [name] = build_index(params, shard(1), tmp_path)
    before = (tmp_path / name).read_bytes()
    (tmp_path / name).chmod(0o444)
    index = open_index(params, shard(1), tmp_path)
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path / name) in maps.read_text()
    index.search(queries(1, 4), 50)
    assert (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize("factory", ["IVF8,Flat", "PCA8,IVF8,Flat", "IVF8,SQ8,RFlat"])
def test_more_probed_lists_find_more(factory, shard, queries, tmp_path):
    actual = []
    blocks = shard(2, 600, 1, palette="gaussian", gaps=False)
    build_index(IndexParams("faiss", factory), blocks, tmp_path)
    for nprobe in (1, 8, 99):
        index = open_index(IndexParams("faiss", factory, nprobe=nprobe), blocks, tmp_path)
        actual.append(index.nearest(queries(2, 5), 600))
    assert (actual[0] == -1).any()
    assert not (actual[1] == -1).any()
    assert np.array_equal(actual[1], actual[2])


def test_training_samples_the_same_vectors_in_order(shard):
    blocks = shard(3)
    every = np.concatenate([block.vectors_ND for block in blocks]).astype(np.float32)
    sample = faiss_index._sample(blocks, len(every), 100)
    assert np.array_equal(sample, faiss_index._sample(blocks, len(every), 100))
    rows = [int(np.flatnonzero((every == vector).all(axis=1))[0]) for vector in sample]
    assert len(set(rows)) == 100
    assert rows == sorted(rows)
    assert np.array_equal(faiss_index._sample(blocks, len(every), len(every)), every)


@pytest.mark.parametrize("factory", ["IVF8,PQ4x4", "PQ4x4", "PCA8,IVF8,PQ4x4", "IVF8,PQ4x4,RFlat"])
def test_codes_find_what_they_find_when_trained_by_faiss_alone(factory, shard, queries, tmp_path):
    """No search uses the order that Faiss gives centroids for Hamming distances, so it is left out."""
    blocks = shard(5, 300, 1, palette="gaussian", gaps=False)
    params = IndexParams("faiss", factory, nprobe=8)
    build_index(params, blocks, tmp_path)
    vectors_ND = np.concatenate([block.vectors_ND for block in blocks]).astype(np.float32)
    plain = faiss.index_factory(vectors_ND.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
    plain.train(vectors_ND)
    plain.add(vectors_ND)
    if "IVF" in factory:
        faiss.extract_index_ivf(plain).nprobe = 8
    found_QN = open_index(params, blocks, tmp_path).nearest(queries(5, 6), 40)
    np.testing.assert_array_equal(found_QN, plain.search(queries(5, 6), 40)[1])


def test_building_leaves_the_thread_setting_alone(shard, tmp_path):
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(3)
    try:
        build_index(IndexParams("faiss", "IVF8,Flat"), shard(4), tmp_path)
        assert faiss.omp_get_max_threads() == 3
    finally:
        faiss.omp_set_num_threads(before)


def test_a_search_has_the_threads_of_its_index_in_any_thread_and_leaves_the_setting_alone(shard, queries, tmp_path):
    blocks, params = shard(4, 600, 1, palette="gaussian", gaps=False), IndexParams("faiss", "IVF8,Flat")
    build_index(params, blocks, tmp_path)
    counts: list[int] = []

    def open_and_search(threads: int | None) -> None:
        index = open_index(params, blocks, tmp_path, threads=threads)
        counts.append(faiss.omp_get_max_threads())
        assert index.index is not None
        search = index.index.search

        def count_and_search(queries_QD: FloatArray, fetch: int) -> tuple[FloatArray, IntArray]:
            counts.append(faiss.omp_get_max_threads())
            return search(queries_QD, fetch)

        index.index.search = count_and_search
        index.search(queries(4, 3), 5)
        counts.append(faiss.omp_get_max_threads())
        with ThreadPoolExecutor(1, initializer=faiss.omp_set_num_threads, initargs=(5,)) as pool:
            pool.submit(index.search, queries(4, 3), 5).result(60)
            counts.append(pool.submit(faiss.omp_get_max_threads).result(60))

    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(3)
    try:
        open_and_search(2)
        open_and_search(None)
    finally:
        faiss.omp_set_num_threads(before)
    assert counts == [3, 2, 3, 2, 5, 3, 3, 3, 5, 5]


@pytest.mark.parametrize("device", ["cuda:77"])
def test_an_absent_gpu_is_reported(device, shard, tmp_path):
    params = IndexParams("faiss", "Flat")
    build_index(params, shard(5), tmp_path)
    with pytest.raises(ShardIndexError, match=f"'{device}'"):
        open_index(params, shard(5), tmp_path, device=device)


def test_an_index_where_faiss_is_not_installed_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.delitem(sys.modules, "mvr_ray.index.faiss_index")
    with pytest.raises(ShardIndexError, match=r"pip install 'mvr-ray\[cpu\]'"):
        check_params(IndexParams(kind="faiss"), 8)
