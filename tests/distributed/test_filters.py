"""Compares filtered searches over any shards, index and corpus with brute force over the passages that pass."""

import gc
import json
import shutil
import sys
import tracemalloc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_index import D, Views, brute_force, publish_random_index, random_views
from waiting import until

from mvr_ray.config import PrepareConfig, SourceConfig
from mvr_ray.deadline import Deadline
from mvr_ray.distributed.router import Router
from mvr_ray.distributed.searching import masks
from mvr_ray.distributed.searching.batching import DynamicBatcher
from mvr_ray.distributed.searching.masks import ENTRY_BYTES, VersionMasks, limit_masks
from mvr_ray.distributed.searching.messages import ScanRequest
from mvr_ray.distributed.searching.searcher import LocalSearchers, SearcherTask, ShardAssignment, ShardSearcher
from mvr_ray.errors import DamagedShardsError, FilterError, ManifestError
from mvr_ray.index.base import IndexParams
from mvr_ray.store import paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.filters import parse_filter
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.prepare import prepare
from mvr_ray.types import Answer

FIELDS = {"year": "int", "tags": "strings"}
Rows = dict[str, dict]
FILTERS: list[tuple[dict, Callable[[dict], bool]]] = [
    ({}, lambda row: True),
    ({"year": {"gte": 3}}, lambda row: row.get("year", -1) >= 3),
    ({"year": 0}, lambda row: row.get("year") == 0),
    ({"year": {"lt": 0}}, lambda row: False),
    ({"year": {"exists": False}}, lambda row: "year" not in row),
    ({"not": {"year": {"gte": 3}}}, lambda row: row.get("year", -1) < 3),
    ({"tags": "a", "year": {"lte": 5}}, lambda row: "a" in row["tags"] and row.get("year", 9) <= 5),
    ({"or": [{"tags": {"in": ["b"]}}, {"id": {"lt": "p003"}}]}, lambda row: "b" in row["tags"] or row["id"] < "p003"),
]


def random_rows(views: Views, seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    rows = {}
    for name in sorted(views):
        year = int(rng.integers(0, 8))
        rows[name] = {"id": name, "title": "t", "text": "x", "tags": [tag for tag in "abc" if rng.random() < 0.3]}
        if year < 7:
            rows[name]["year"] = year
    return rows


def prepare_rows(root: Path, rows: Rows, num_parts: int) -> Corpus:
    root.mkdir(parents=True, exist_ok=True)
    source = root / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    store = Store(str(root))
    sources = [SourceConfig(path=str(source))]
    prepare(PrepareConfig(sources=sources, num_shards=num_parts, fields=FIELDS), store)
    return Corpus.open(store, "corpus")


def local(root: Path, version: Manifest) -> Router:
    store = Store(str(root))
    task = SearcherTask(store.root, version)
    return Router(store, version, LocalSearchers(task))


def assert_brute_force(router: Router, views: Views, rows: Rows, queries_QD: np.ndarray, k: int) -> None:
    answers = [router.search(queries_QD, k, filter=condition) for condition, _ in FILTERS]
    assert_answers(answers, views, rows, queries_QD, k)


def assert_answers(answers: list[Answer], views: Views, rows: Rows, queries_QD: np.ndarray, k: int) -> None:
    """`answers`: one for each of FILTERS."""
    for (_, passes), answer in zip(FILTERS, answers, strict=True):
        there = {name: own for name, own in views.items() if passes(rows[name])}
        for query_D, hits in zip(queries_QD, answer.hits):
            assert [(hit.passage_id, hit.score, hit.view) for hit in hits] == brute_force(there, query_D, k)
        assert answer.exact.certified and answer.coverage_share == 1.0


@given(st.integers(0, 999), st.integers(1, 5), st.integers(1, 5), st.integers(1, 60), st.integers(1, 70), st.booleans())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_filtered_search_of_any_shards_is_brute_force_over_what_passes(
    tmp_path, seed, num_shards, num_parts, num_passages, k, with_codes
):
    """Ties everywhere; as many parts of the corpus as shards, or others; filters that pass nothing, few or all."""
    root = tmp_path / f"{seed}-{num_shards}-{num_parts}-{num_passages}-{with_codes}"
    shutil.rmtree(root, ignore_errors=True)
    views = random_views(num_passages, seed, levels=2)
    rows = random_rows(views, seed)
    corpus = prepare_rows(root, rows, num_parts)
    params = IndexParams(scan="int8" if with_codes else "vectors")
    router = local(root, publish_random_index(root, views, num_shards, params, corpus=corpus))
    queries_QD = np.random.default_rng(seed + 1).integers(-2, 3, (3, D)).astype(np.float32)
    assert_brute_force(router, views, rows, queries_QD, k)
    assert_brute_force(router, views, rows, queries_QD[:1], k)


def test_versions_that_share_shards_have_the_fields_of_their_own_corpus(tmp_path):
    views = random_views(40, 3)
    rows = random_rows(views, 3)
    first = publish_random_index(tmp_path, views, 2, corpus=prepare_rows(tmp_path, rows, 2))
    later = random_rows(views, 4)
    second = publish_random_index(tmp_path, views, 2, parent=1, corpus=prepare_rows(tmp_path, later, 2))
    assert [one.digest for one in first.shards] == [one.digest for one in second.shards]
    fleet = LocalSearchers(SearcherTask(str(tmp_path), first))
    queries_QD = np.random.default_rng(5).integers(-2, 3, (3, D)).astype(np.float32)
    for version, now in ((first, rows), (second, later), (first, rows)):
        assert_brute_force(Router(Store(str(tmp_path)), version, fleet), views, now, queries_QD, 9)


def test_searches_under_other_filters_are_not_asked_together(tmp_path, monkeypatch):
    views = random_views(50, 6)
    rows = random_rows(views, 6)
    version = publish_random_index(tmp_path, views, 2, corpus=prepare_rows(tmp_path, rows, 2))
    plain = local(tmp_path, version)
    batcher, calls = DynamicBatcher(plain.fleet, concurrent_calls=0), mock.Mock(wraps=plain.fleet.fan_out)
    monkeypatch.setattr(plain.fleet, "fan_out", calls)
    together = Router(plain.store, version, batcher, timeout_s=300)
    queries_QD = np.ones((2, D), np.float32)
    with ThreadPoolExecutor(len(FILTERS)) as threads:
        futures = [threads.submit(together.search, queries_QD, 7, filter=condition) for condition, _ in FILTERS]
        until(lambda: len(batcher._queue) == len(FILTERS))
        batcher.concurrent_calls = 1
        batcher._send_next()
        assert_answers([future.result(60) for future in futures], views, rows, queries_QD, 7)
    assert calls.call_count == len(FILTERS)


def test_a_filter_that_does_not_fit_is_refused_before_a_search_is_sent(tmp_path, monkeypatch):
    views = random_views(5, 1)
    version = publish_random_index(tmp_path, views, 2, corpus=prepare_rows(tmp_path, random_rows(views, 1), 2))
    router = local(tmp_path, version)
    monkeypatch.setattr(LocalSearchers, "fan_out", None)
    with pytest.raises(FilterError, match=r"no field 'yaer'; did you mean 'year'\? .*year \(int\), tags \(strings\)"):
        router.search(np.ones((1, D), np.float32), 3, filter={"yaer": 3})


def test_fields_that_cannot_be_read_are_reported_and_other_searches_go_on(tmp_path):
    views = random_views(30, 2)
    corpus = prepare_rows(tmp_path, random_rows(views, 2), 2)
    router = local(tmp_path, publish_random_index(tmp_path, views, 2, corpus=corpus))
    file = tmp_path / paths.corpus_dir("corpus") / corpus.info.parts[1].file
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    queries_QD = np.ones((1, D), np.float32)
    with pytest.raises(DamagedShardsError, match=r"1 \(damaged\).*part 1 of corpus 'corpus' is damaged"):
        router.search(queries_QD, 3, filter={"year": 1})
    answer = router.search(queries_QD, 3, filter={"year": 1}, min_coverage=0.1)
    assert [shard.state for shard in answer.shards] == ["searched", "damaged"] and not answer.exact.certified
    assert router.search(queries_QD, 3).exact.certified


def test_one_more_mask_does_not_visit_those_that_are_kept(tmp_path):
    class NoVisits(OrderedDict):
        def values(self):
            raise AssertionError("a searcher with a million masks would visit them all, while it holds the lock")

    views = random_views(40, 8)
    version = publish_random_index(tmp_path, views, 1, corpus=prepare_rows(tmp_path, random_rows(views, 8), 1))
    cache = VersionMasks(str(tmp_path), version)
    cache._masks = NoVisits()
    for year in range(4):
        cache.mask(0, pa.array(sorted(views)), json.dumps({"year": year}))
        limit_masks([cache], 2 * ENTRY_BYTES + 100)
    assert cache.num_bytes == 2 * ENTRY_BYTES + 80


def test_masks_of_all_versions_are_kept_within_their_limit(tmp_path):
    views = random_views(40, 8)
    rows = random_rows(views, 8)
    version = publish_random_index(tmp_path, views, 1, corpus=prepare_rows(tmp_path, rows, 1))
    ids = pa.array(sorted(views))
    cache, other = (VersionMasks(str(tmp_path), version) for _ in range(2))
    masks = [cache.mask(0, ids, json.dumps({"year": year})) for year in range(4)]
    limit_masks([cache], 2 * ENTRY_BYTES + 100)
    assert [mask_P.tolist() for mask_P in masks] == [
        [rows[name].get("year") == year for name in sorted(views)] for year in range(4)
    ]
    assert cache.num_bytes == 2 * ENTRY_BYTES + 80
    assert cache.mask(0, ids, '{"year": 2}') is masks[2]
    other.mask(0, ids, '{"year": 2}')
    limit_masks([other, cache], 2 * ENTRY_BYTES + 100)
    assert (cache.num_bytes, other.num_bytes) == (ENTRY_BYTES + 40, ENTRY_BYTES + 40)
    assert cache.mask(0, ids, '{"year": 2}') is masks[2]
    assert cache.mask(0, ids, '{"year": 0}') is not masks[0]
    with pytest.raises(ManifestError, match="holds 1 passage that its corpus 'corpus' lacks, first 'q'"):
        VersionMasks(str(tmp_path), version).mask(0, pa.array([*sorted(views), "q"]), '{"year": 3}')


def test_the_limit_of_the_masks_bounds_the_memory_of_long_filters_over_few_passages(tmp_path):
    views = random_views(5, 8)
    version = publish_random_index(tmp_path, views, 1, corpus=prepare_rows(tmp_path, random_rows(views, 8), 1))
    cache, ids = VersionMasks(str(tmp_path), version), pa.array(sorted(views))
    cache.mask(0, ids, "{}")
    tracemalloc.start()
    try:
        for number in range(20):
            cache.mask(0, ids, json.dumps({"id": {"nin": [f"{number} {one}" for one in range(200)]}}))
        assert tracemalloc.get_traced_memory()[0] < cache.num_bytes
    finally:
        tracemalloc.stop()


def test_masks_are_removed_while_others_are_added(tmp_path):
    views = random_views(40, 8)
    version = publish_random_index(tmp_path, views, 1, corpus=prepare_rows(tmp_path, random_rows(views, 8), 1))
    caches, ids = [VersionMasks(str(tmp_path), version) for _ in range(3)], pa.array(sorted(views))

    def evaluate(number: int) -> None:
        caches[number % 3].mask(0, ids, json.dumps({"year": number}))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as threads:
            future = threads.submit(list, map(evaluate, range(200)))
            while not future.done():
                limit_masks(caches, 5 * (ENTRY_BYTES + 40))
            assert len(future.result()) == 200
    finally:
        sys.setswitchinterval(before)
    limit_masks(caches, 5 * (ENTRY_BYTES + 40))
    num_masks = [len(cache._masks) for cache in caches]
    assert sum(num_masks) <= 5 and [cache.num_bytes for cache in caches] == [n * (ENTRY_BYTES + 40) for n in num_masks]


def test_a_filtered_search_that_ends_after_its_version_was_dropped_leaves_nothing_of_it(tmp_path, monkeypatch):
    begins, may_go_on = Event(), Event()

    def wait_and_parse(*args):
        begins.set()
        assert may_go_on.wait(30)
        return parse_filter(*args)

    first = publish_random_index(tmp_path, random_views(40, 7), 2)
    corpus = prepare_rows(tmp_path, random_rows(views := random_views(40, 8), 8), 2)
    publish_random_index(tmp_path, views, 2, parent=1, corpus=corpus)
    fleet = LocalSearchers(SearcherTask(str(tmp_path), first))
    fleet.ready(first)
    searcher = fleet.searcher
    keys = set(searcher.open_files())
    monkeypatch.setattr(masks, "parse_filter", wait_and_parse)
    with ThreadPoolExecutor(1) as thread:
        request = ScanRequest(np.eye(1, D, dtype=np.float32), 5, (0, 1), 2, json.dumps({"year": {"gte": 3}}))
        future = thread.submit(searcher.scan, request)
        assert begins.wait(30)
        own_masks = weakref.ref(searcher._versions[2].masks)
        searcher.drop(2)
        may_go_on.set()
        assert not future.result().failures
    assert (list(searcher._versions), set(searcher.open_files())) == ([1], keys)
    gc.collect()
    assert own_masks() is None


def test_a_version_number_that_is_used_again_has_its_own_masks(tmp_path):
    """A collection deletes manifests; an index that begins again counts from 1."""
    views, searcher = random_views(40, 8), None
    for seed in (8, 9):
        rows = random_rows(views, seed)
        version = publish_random_index(tmp_path, views, 1, corpus=prepare_rows(tmp_path, rows, 1))
        searcher = searcher or ShardSearcher(SearcherTask(str(tmp_path), version))
        searcher.open([ShardAssignment(version, (0,))])
        request = ScanRequest(np.ones((1, D), np.float32), len(views), (0,), version.version, '{"year": 1}')
        expected = [name for name in sorted(views) if rows[name].get("year") == 1]
        for _ in range(2):
            [result] = searcher.scan(request).results
            assert result.ids_R.to_pylist() == expected
        masks = searcher._versions[version.version].masks
        searcher.open([ShardAssignment(version, (0,))])
        assert searcher._versions[version.version].masks is masks  # the same version keeps its masks
        Store(str(tmp_path)).delete(paths.manifest(version.index, version.version))


@pytest.mark.ray
def test_searchers_in_other_processes_filter_as_one_here_does(tmp_path, ray_session):
    from mvr_ray.config import ResourcesConfig
    from mvr_ray.distributed.searching.node_placement import start_searchers

    views = random_views(60, 9)
    rows = random_rows(views, 9)
    version = publish_random_index(tmp_path, views, 3, corpus=prepare_rows(tmp_path, rows, 3))
    task = SearcherTask(str(tmp_path), version)
    searchers = start_searchers(task, ResourcesConfig(searchers=2), ray_session)
    try:
        searchers.ready(version)
        router = Router(Store(str(tmp_path)), version, searchers)
        queries_QD = np.random.default_rng(2).integers(-2, 3, (3, D)).astype(np.float32)
        assert_brute_force(router, views, rows, queries_QD, 20)
        with pytest.raises(FilterError, match="no field 'none'"):
            searchers.fan_out(ScanRequest(queries_QD, 3, (0,), version.version, '{"none": 1}'), Deadline.after(60))
    finally:
        searchers.stop()
