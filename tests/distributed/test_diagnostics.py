"""Diagnostics of a live router: its counters, its version, and exhaustive search past its index."""

import queue

import numpy as np
import pytest
from live_search import live_search
from random_index import D, brute_force, publish_random_index, random_views
from waiting import until

from mvr_ray.config import ResourcesConfig, RunConfig
from mvr_ray.distributed.hot_swap import HotSwapRouter, open_hot_swap_router
from mvr_ray.distributed.router import TIMEOUT_S
from mvr_ray.distributed.searching.searcher import LocalSearchers, SearcherTask
from mvr_ray.errors import DamagedShardsError, ShardIndexError
from mvr_ray.index.base import IndexParams
from mvr_ray.serving.recall_monitor import RecallMonitor
from mvr_ray.store import paths
from mvr_ray.store.files import Store
from mvr_ray.types import FleetCounts

POOR = IndexParams(kind="hnsw", hnsw_m=2, hnsw_ef_construction=2, hnsw_ef_search=1)
QUERIES_QD = np.random.default_rng(4).standard_normal((40, D)).astype(np.float32)
K = 8


def live_over(root, views, params=None) -> HotSwapRouter:
    version = publish_random_index(root, views, 3, params)
    return HotSwapRouter(Store(str(root)), version, LocalSearchers(SearcherTask(str(root), version)))


def truth(views, query_D):
    return brute_force(views, query_D, K)


def hit_pairs(hits):
    return [(hit.passage_id, pytest.approx(hit.score, rel=1e-6), hit.view) for hit in hits]


@pytest.mark.parametrize("params", [POOR, IndexParams(), IndexParams(scan="int8")])
def test_the_exact_answer_is_exhaustive_searchs_whatever_the_index(tmp_path, params):
    views = random_views(400, 3)
    live = live_over(tmp_path, views, params)
    for query_D, hits in zip(QUERIES_QD, live.exact(QUERIES_QD, K)):
        assert [(one, score, view) for one, score, view in truth(views, query_D)] == hit_pairs(hits)
    with pytest.raises(ShardIndexError, match="dimension"):
        live.exact(np.ones((1, D + 1), np.float32), K)
    with pytest.raises(ShardIndexError, match="at least one"):
        live.exact(QUERIES_QD, 0)


def test_an_exact_search_without_a_damaged_shard_is_an_error_and_no_best_k(tmp_path):
    live = live_over(tmp_path, random_views(90, 3), POOR)
    file = tmp_path / paths.shard_dir("random", live.manifest.shards[1].digest) / paths.EMBEDDINGS
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.unlink()
    file.write_bytes(data)
    with pytest.raises(DamagedShardsError, match=r"version 1 not searched exactly: shards \[1\] are damaged"):
        live.exact(QUERIES_QD, K)


def test_an_exact_search_may_take_longer_than_an_answer(tmp_path):
    """Samples that were given up would wait in the searchers' queues, before the calls that open versions."""
    version, deadlines = publish_random_index(tmp_path, random_views(60, 3), 3, POOR), []

    class RecordingSearchers(LocalSearchers):
        def exact(self, queries_QD, k, manifest, deadline):
            deadlines.append(deadline)
            return super().exact(queries_QD, k, manifest, deadline)

    searchers = RecordingSearchers(SearcherTask(str(tmp_path), version))
    live = HotSwapRouter(Store(str(tmp_path)), version, searchers, timeout_s=0.5)
    assert [len(hits) for hits in live.exact(QUERIES_QD, K)] == [K] * len(QUERIES_QD)
    assert [deadline.timeout_s for deadline in deadlines] == [TIMEOUT_S]


def test_sampled_recall_is_the_share_of_the_true_best_that_the_answer_reached(tmp_path):
    views = random_views(400, 3, levels=50)
    live = live_over(tmp_path, views, POOR)
    recalls: queue.Queue[float] = queue.Queue()
    recall_monitor = RecallMonitor(live, recalls.put, every=1)
    shares = []
    for query_D in QUERIES_QD:
        answer = live_search(live, query_D[None], K)
        best = {passage_id for passage_id, _, _ in truth(views, query_D)}
        recall_monitor.note([query_D.tolist()], K, answer)
        recall = recalls.get(timeout=60)
        while recall_monitor._busy:
            pass
        assert recall == pytest.approx(len(best & {hit.passage_id for hit in answer.hits[0]}) / K)
        shares.append(recall)
    assert 0 < min(shares) < 1
    recall_monitor.close()
    recall_monitor.note([QUERIES_QD[0].tolist()], K, live_search(live, QUERIES_QD[:1], K))
    assert recalls.empty()


def test_one_query_of_so_many_is_taken_wherever_it_stands_in_its_batch_and_exact_answers_none(tmp_path):
    views = random_views(60, 3)
    live, exact = live_over(tmp_path / "poor", views, POOR), live_over(tmp_path / "flat", views)
    recalls: queue.Queue[float] = queue.Queue()
    recall_monitor = RecallMonitor(live, recalls.put, every=10)
    for size in (4, 4, 4, 7, 1, 10):  # the tenth, twentieth and thirtieth query are in the third, fifth and last
        recall_monitor.note(QUERIES_QD[:size].tolist(), K, live_search(live, QUERIES_QD[:size], K))
        while recall_monitor._busy:
            pass
    assert recalls.qsize() == 3
    never = RecallMonitor(exact, recalls.put, every=1)
    never.note(QUERIES_QD.tolist(), K, live_search(exact, QUERIES_QD, K))
    assert not never._busy and recalls.qsize() == 3
    recall_monitor.close()
    never.close()


def test_a_version_that_was_replaced_is_not_opened_again_for_a_sample(tmp_path):
    live = live_over(tmp_path, random_views(60, 3), POOR)
    recalls: queue.Queue[float] = queue.Queue()
    recall_monitor = RecallMonitor(live, recalls.put, every=1)
    answer = live_search(live, QUERIES_QD[:1], K)
    publish_random_index(tmp_path, random_views(60, 4), 3, POOR, parent=1)
    assert live.move_to(2) == 2
    open_before = live.searchers.searcher.health()
    recall_monitor.note(QUERIES_QD[:1].tolist(), K, answer)
    until(lambda: not recall_monitor._busy)
    assert (recalls.qsize(), live.searchers.searcher.health()) == (0, open_before)
    recall_monitor.note(QUERIES_QD[:1].tolist(), K, live_search(live, QUERIES_QD[:1], K))
    assert recalls.get(timeout=60) is not None
    recall_monitor.close()


@pytest.mark.ray
def test_searchers_answer_exactly_beside_their_queues(tmp_path, ray_session):
    views = random_views(300, 3)
    publish_random_index(tmp_path, views, 4, POOR)
    resources = ResourcesConfig(searchers=2, replicas=2, cpus_per_searcher=0.5)
    run = RunConfig.model_validate({"store": {"path": str(tmp_path)}, "index": {"name": "random"}})
    with open_hot_swap_router(run.model_copy(update={"resources": resources}), probe_s=3600) as live:
        for query_D, hits in zip(QUERIES_QD[:3], live.exact(QUERIES_QD[:3], K)):
            assert [(one, score, view) for one, score, view in truth(views, query_D)] == hit_pairs(hits)
        assert not live_search(live, QUERIES_QD[:3], K).exact.certified
        assert live.searchers.counts() == FleetCounts()
        assert live.index == "random" and live.manifest.dirty_share is None
