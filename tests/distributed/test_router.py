"""Tests of the router: S shards answer as one, answers report missing shards, and dead searchers restart."""

import dataclasses
import json
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
import ray
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_index import D, V, brute_force, publish_random_index, random_views

from mvr_ray import deadline as deadline_module
from mvr_ray.config import PrepareConfig, RunConfig
from mvr_ray.core.encoding.encoder import DualEncoder
from mvr_ray.core.encoding.snippets import TITLE
from mvr_ray.core.searching.exact import BlockTable
from mvr_ray.deadline import Deadline
from mvr_ray.distributed import router
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.router import Router, open_router, open_searchers, searcher_task
from mvr_ray.distributed.searching.merged_results import overlay_results
from mvr_ray.distributed.searching.messages import ShardFailure, ShardResult, ShardResults, ViewResults
from mvr_ray.distributed.searching.rendezvous import balance_shards
from mvr_ray.distributed.searching.searcher import LocalSearchers, SearcherTask
from mvr_ray.errors import (
    CoverageError,
    DigestError,
    EncoderError,
    FingerprintError,
    MissingInputError,
    OverloadedError,
    ShardIndexError,
    UnknownPassageError,
)
from mvr_ray.index.base import IndexParams
from mvr_ray.store import corpus, paths
from mvr_ray.store.corpus import shard_of
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.prepare import prepare
from mvr_ray.types import Passage, ShardHits


def local(root: Path, version: Manifest, **options) -> Router:
    store = Store(str(root))
    task = SearcherTask(store.root, version)
    return Router(store, version, LocalSearchers(task), **options)


@given(st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_shards_answer_as_one_to_the_last_tie(tmp_path, data):
    seed, num_shards = data.draw(st.integers(0, 999)), data.draw(st.integers(1, 5))
    num_passages = data.draw(st.integers(1, 60))
    root = tmp_path / f"{seed}-{num_shards}-{num_passages}"
    shutil.rmtree(root, ignore_errors=True)
    views = random_views(num_passages, seed, levels=data.draw(st.integers(1, 3)))
    version = publish_random_index(root, views, num_shards)
    queries_QD = np.random.default_rng(seed + 1).integers(-2, 3, (4, D)).astype(np.float32)
    k = data.draw(st.integers(1, num_passages + 3))
    answer = local(root, version).search(queries_QD, k)
    for query_D, hits in zip(queries_QD, answer.hits):
        assert [(hit.passage_id, hit.score, hit.view) for hit in hits] == brute_force(views, query_D, k)
    assert answer.exact.certified and answer.coverage_share == 1.0


@pytest.mark.parametrize(
    "resources, kind, is_local, has_session, threads",
    [
        ({}, "flat", True, False, 5),
        ({"torch_threads": 1}, "flat", True, False, 1),
        ({"torch_threads": 3}, "flat", True, False, 3),
        ({}, "flat", True, True, 1),
        ({}, "flat", False, False, 1),
        ({}, "hnsw", True, False, 1),
    ],
)
def test_an_exact_scan_without_ray_uses_the_cores_that_no_setting_and_no_session_limits(
    tmp_path, monkeypatch, resources, kind, is_local, has_session, threads
):
    monkeypatch.setattr(session, "num_cores", lambda: 5)
    monkeypatch.setattr(session, "library_avx2", lambda: "loops")
    monkeypatch.setattr(session, "in_ray", lambda: has_session)
    run = RunConfig.model_validate({"store": {"path": str(tmp_path)}, "resources": resources})
    version = publish_random_index(tmp_path, random_views(5, 3), 2)
    version = dataclasses.replace(version, index_params={**version.index_params, "kind": kind})
    assert searcher_task(run, version, local=is_local).threads == threads


@pytest.mark.parametrize(("gpus", "has_gpu"), [(1, True), (1, False), (0, True)])
def test_a_gpu_that_a_search_in_this_process_leaves_idle_is_reported(tmp_path, monkeypatch, caplog, gpus, has_gpu):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    run = RunConfig.model_validate({"store": {"path": str(tmp_path)}, "resources": {"gpus_per_searcher": gpus}})
    with open_searchers(run, publish_random_index(tmp_path, random_views(5, 3), 2), local=True):
        pass
    assert ("on the CPU beside a GPU: resources.gpus_per_searcher" in caplog.text) == (gpus and has_gpu)


def test_a_lopsided_shard_is_asked_again_and_the_answer_is_exact(tmp_path):
    """Every good passage lies in one shard, far more of them than its fair share of k."""
    views = random_views(240, 5)
    rich = {i for i in views if shard_of(i, 4) == 2}
    views = {i: {v: x + (9 if i in rich else 0) for v, x in own.items()} for i, own in views.items()}
    version = publish_random_index(tmp_path, views, 4)
    queries_QD = np.ones((3, D), np.float32) * np.array([[1], [-1], [2]], np.float32)
    assert len(rich) > 40
    stages: list[str] = []
    answer = local(tmp_path, version, observe=lambda stage, seconds: stages.append(stage)).search(queries_QD, 40)
    assert answer.exact.rounds == 2 and answer.exact.certified
    assert stages == ["search", "merge", "search"]
    for query_D, hits in zip(queries_QD, answer.hits):
        assert [(hit.passage_id, hit.score, hit.view) for hit in hits] == brute_force(views, query_D, 40)


def test_a_hit_names_its_shard_whatever_the_order_in_which_shards_answer(tmp_path, monkeypatch):
    """An empty shard begins where the next one does."""
    router = local(tmp_path, publish_random_index(tmp_path, random_views(5, 3), 8))
    fan_out = router.fleet.fan_out
    monkeypatch.setattr(router.fleet, "fan_out", lambda *args: ShardResults(fan_out(*args).results[::-1], []))
    [hits] = router.search(np.ones((1, D), np.float32), 5).hits
    assert [hit.shard for hit in hits] == [shard_of(hit.passage_id, 8) for hit in hits]


def test_at_most_one_search_in_a_hundred_asks_a_second_time(tmp_path):
    """Eight shards of hashed ids, 800 queries one by one; and all of them at once, which asks for more rows."""
    rng = np.random.default_rng(7)
    views = {i: {v: rng.normal(size=D) for v in own} for i, own in random_views(900, 7).items()}
    router = local(tmp_path, publish_random_index(tmp_path, views, 8))
    queries_QD = rng.normal(size=(800, D)).astype(np.float32)
    again = sum(router.search(query_D[None], 60).exact.rounds == 2 for query_D in queries_QD)
    assert again <= 8
    assert router.search(queries_QD, 60).exact.rounds == 1


@pytest.mark.parametrize("scan", ["vectors", "int8"])
def test_no_answer_of_five_thousand_is_wrong_and_every_one_is_certified(tmp_path, scan):
    """1 to 8 shards; views apart, alike, or of few values; all good passages on one shard; k up to all of them.

    Components are multiples of 1/64 below 16: every product and sum is exact in float32, and eight bits do not hold
    them.
    """
    rng = np.random.default_rng(18 if scan == "int8" else 19)
    again = 0
    for case in range(100):
        num_shards, num_passages = (
            int(rng.integers(1, 9)),
            int(rng.integers(*((60, 250) if case % 3 == 0 else (1, 80)))),
        )
        views = random_views(num_passages, case, levels=int(rng.choice([1, 3, 1000])))
        views = {i: {view: x / 64 for view, x in own.items()} for i, own in views.items()}
        if case % 3 == 0:
            rich = int(rng.integers(num_shards))
            views = {
                i: {v: abs(x) if shard_of(i, num_shards) == rich else x for v, x in o.items()} for i, o in views.items()
            }
        if case % 3 == 1:
            models = [views[i] for i in sorted(views)[:3]]
            views = {i: models[int(rng.integers(len(models)))] for i in views}
        version = publish_random_index(tmp_path / str(case), views, num_shards, IndexParams(scan=scan))
        queries_QD = rng.integers(-1000, 1001, (50, D)).astype(np.float32) / 64
        queries_QD[:25] = abs(queries_QD[:25])
        k = int(rng.integers(1, num_passages // (num_shards if case % 3 == 0 else 1) + 3))
        answer = local(tmp_path / str(case), version).search(queries_QD, k)
        assert answer.exact.certified
        again += answer.exact.rounds == 2
        for query_D, hits in zip(queries_QD, answer.hits):
            assert [(hit.passage_id, hit.score, hit.view) for hit in hits] == brute_force(views, query_D, k)
    assert again > 10


def test_a_second_answer_replaces_only_the_queries_asked_again():
    def hits(rows, scores, frontier) -> ShardHits:
        rows = np.array(rows)
        return ShardHits(rows, np.array(scores, np.float32), rows.astype(np.int16), np.array(frontier, np.float32))

    def result(lists: ShardHits, num_rescored: list[int], ids: dict[int, str]) -> ShardResult:
        return ShardResult(1, lists, np.array(num_rescored), np.array(list(ids)), pa.array(list(ids.values())))

    first = result(hits([[0], [1]], [[5], [4]], [3, 2]), [4, 5], {0: "a", 1: "b"})
    second = result(hits([[1, 2]], [[4, 2]], [-np.inf]), [2], {1: "b", 2: "c"})
    both = overlay_results(first, second, np.array([1]))
    assert dict(zip(both.rows_R.tolist(), both.ids_R.to_pylist())) == {0: "a", 1: "b", 2: "c"}
    assert both.hits.rows_QK.tolist() == [[0, -1], [1, 2]]
    assert both.hits.scores_QK.tolist() == [[5, -np.inf], [4, 2]]
    assert both.hits.frontier_Q.tolist() == [3, -np.inf]
    assert both.rescored_Q.tolist() == [4, 7]


@given(st.dictionaries(st.integers(0, 50), st.integers(0, 1000), min_size=1), st.integers(1, 9))
def test_every_shard_has_one_holder_and_no_holder_is_idle(num_bytes, groups):
    shards_of = balance_shards(num_bytes, min(groups, len(num_bytes)))
    assert sorted(shard for shards in shards_of for shard in shards) == sorted(num_bytes)
    assert all(shards_of)
    loads = [sum(num_bytes[shard] + 1 for shard in shards) for shards in shards_of]
    assert max(loads) - min(loads) <= max(num_bytes.values()) + 1


class HalfDead:
    """A fleet whose shards in `silent` give no answer."""

    def __init__(self, whole: LocalSearchers, silent: set[int]) -> None:
        self.whole, self.silent = whole, silent

    def ready(self, manifest) -> None:
        self.silent = set()

    def fan_out(self, request, deadline, admit=False) -> ShardResults:
        there = tuple(shard for shard in request.shards if shard not in self.silent)
        results = self.whole.fan_out(request._replace(shards=there), deadline).results
        late = tuple(shard for shard in request.shards if shard in self.silent)
        return ShardResults(results, [ShardFailure(late, "late")] if late else [])

    def views(self, ids, version, deadline) -> ViewResults:
        there = {shard: own for shard, own in ids.items() if shard not in self.silent}
        views = self.whole.views(there, version, deadline).views
        late = tuple(shard for shard in ids if shard in self.silent)
        return ViewResults(views, [ShardFailure(late, "late")] if late else [])


def test_silent_shards_are_named_and_counted_in_passages(tmp_path):
    views = random_views(50, 1)
    version = publish_random_index(tmp_path, views, 3)
    whole = local(tmp_path, version)
    query_QD = np.ones((1, D), np.float32)
    fleet = HalfDead(whole.fleet, {1})
    strict = Router(whole.store, version, fleet)
    missing = version.shards[1].num_passages
    with pytest.raises(CoverageError, match=rf"1 of 3 shards .*: 1 \(late\); {50 - missing} of 50 passages"):
        strict.search(query_QD, 5)
    least = 1 - missing / 50
    with pytest.raises(CoverageError) as error:
        strict.search(query_QD, 5, min_coverage=least + 1e-9)
    assert [shard.state for shard in error.value.shards] == ["searched", "late", "searched"]
    partial = strict.search(query_QD, 5, min_coverage=least)
    assert partial.shards == error.value.shards
    assert (partial.passages_searched, partial.passages_total) == (50 - missing, 50)
    assert not partial.exact.certified
    there = {i: own for i, own in views.items() if shard_of(i, 3) != 1}
    assert [(h.passage_id, h.score, h.view) for h in partial.hits[0]] == brute_force(there, query_QD[0], 5)
    strict.ready()
    assert strict.search(query_QD, 5).coverage_share == 1.0


class Stuck:
    """A fleet with a shard that never answers: every call of it takes all of its time by `clock`. A call without time,
    and every second round if `deaf`, gets no answer."""

    def __init__(self, whole: LocalSearchers, shard: int, deaf: bool) -> None:
        self.whole, self.shard, self.deaf = whole, shard, deaf
        self.now_s = 100.0

    def clock(self) -> float:
        return self.now_s

    def ready(self, manifest) -> None: ...

    def fan_out(self, request, deadline, admit=False) -> ShardResults:
        if deadline.left_s <= 0 or (admit and self.deaf):
            return ShardResults([], [ShardFailure(request.shards, "late")])
        if self.shard in request.shards:
            self.now_s = deadline.due_s
        there = tuple(shard for shard in request.shards if shard != self.shard)
        late = [ShardFailure((self.shard,), "late")] if self.shard in request.shards else []
        return ShardResults(self.whole.fan_out(request._replace(shards=there), deadline).results, late)

    def views(self, ids, version, deadline) -> ViewResults:
        if deadline.left_s <= 0:
            return ViewResults({}, [ShardFailure(tuple(ids), "late")])
        return self.whole.views(ids, version, deadline)


def with_a_rich_shard(root: Path) -> tuple[dict, Router]:
    """240 passages in 4 shards; those of shard 2 are better for a query of ones than all others."""
    views = random_views(240, 5)
    views = {i: {v: x + (9 if shard_of(i, 4) == 2 else 0) for v, x in own.items()} for i, own in views.items()}
    return views, local(root, publish_random_index(root, views, 4))


def test_a_silent_shard_leaves_time_to_ask_a_rich_one_again(tmp_path, monkeypatch):
    views, whole = with_a_rich_shard(tmp_path)
    query_QD, k = np.ones((1, D), np.float32), 40
    fleet = Stuck(whole.fleet, 1, deaf=False)
    monkeypatch.setattr(deadline_module, "time", SimpleNamespace(monotonic=fleet.clock))
    partial = Router(whole.store, whole.manifest, fleet).search(
        query_QD, k, deadline=Deadline.after(2.0), min_coverage=0.5
    )
    assert partial.exact.rounds == 2 and not partial.exact.certified
    assert [shard.state for shard in partial.shards] == ["searched", "late", "searched", "searched"]
    there = {i: own for i, own in views.items() if shard_of(i, 4) != 1}
    assert [(h.passage_id, h.score, h.view) for h in partial.hits[0]] == brute_force(there, query_QD[0], k)
    assert fleet.now_s <= 102.0


def test_a_shard_that_answers_only_at_first_keeps_its_first_rows_among_the_hits(tmp_path, monkeypatch):
    views, whole = with_a_rich_shard(tmp_path)
    query_QD, k = np.ones((1, D), np.float32), 40
    fleet = Stuck(whole.fleet, 1, deaf=True)
    monkeypatch.setattr(deadline_module, "time", SimpleNamespace(monotonic=fleet.clock))
    router = Router(whole.store, whole.manifest, fleet)
    partial = router.search(query_QD, k, deadline=Deadline.after(2.0), min_coverage=0.25)
    assert partial.exact.rounds == 2 and not partial.exact.certified
    assert [shard.state for shard in partial.shards] == ["searched", "late", "late", "searched"]
    assert [bool(shard.reason) for shard in partial.shards] == [False, False, True, False]
    assert "first rows are among the hits" in partial.shards[2].reason
    silent = sum(shard_of(i, 4) in (1, 2) for i in views)
    assert partial.passages_searched == 240 - silent
    rich = {i: own for i, own in views.items() if shard_of(i, 4) == 2}
    count = sum(shard_of(hit.passage_id, 4) == 2 for hit in partial.hits[0])
    assert 40 / 4 <= count < 40 == len(partial.hits[0])
    assert [(h.passage_id, h.score, h.view) for h in partial.hits[0][:count]] == brute_force(rich, query_QD[0], count)
    others = {i: own for i, own in views.items() if shard_of(i, 4) in (0, 3)}
    rest = [(h.passage_id, h.score, h.view) for h in partial.hits[0][count:]]
    assert rest == brute_force(others, query_QD[0], 40 - count)
    with pytest.raises(CoverageError, match=r"2 of 4 shards .*: 1 \(late\), 2 \(late\)"):
        router.search(query_QD, k, deadline=Deadline.after(2.0), min_coverage=0.75)


def test_a_search_that_fails_tells_its_time_too(tmp_path):
    whole = local(tmp_path, publish_random_index(tmp_path, random_views(9, 1), 2))

    class Full(HalfDead):
        def fan_out(self, request, deadline, admit=False) -> ShardResults:
            raise OverloadedError("every queue is full", 1.0)

    stages: list[str] = []
    fleet = Full(whole.fleet, set())
    full = Router(whole.store, whole.manifest, fleet, observe=lambda stage, seconds: stages.append(stage))
    with pytest.raises(OverloadedError):
        full.search(np.ones((1, D), np.float32), 3)
    assert stages == ["search"]


def test_what_cannot_be_searched_is_refused(tmp_path):
    version = publish_random_index(tmp_path, random_views(9, 1), 2)
    router = local(tmp_path, version)
    with pytest.raises(ShardIndexError, match="0"):
        router.search(np.ones((1, D), np.float32), 0)
    with pytest.raises(ShardIndexError, match=f"{D + 1}.*{D}"):
        router.search(np.ones((1, D + 1), np.float32), 1)
    assert router.search(np.ones((0, D), np.float32), 3).hits == []
    assert len(router.search(np.ones((1, D), np.float32), 1000).hits[0]) == 9


def test_an_approximate_answer_says_so_and_its_scores_are_true(tmp_path):
    views = random_views(60, 3, levels=50)
    version = publish_random_index(tmp_path, views, 2, IndexParams(kind="hnsw"))
    queries_QD = np.random.default_rng(0).normal(size=(5, D)).astype(np.float32)
    answer = local(tmp_path, version).search(queries_QD, 10)
    assert not answer.exact.certified
    assert answer.exact.method == "hnsw" and answer.exact.recall is None
    measured_version = dataclasses.replace(version, recall=0.83)
    assert local(tmp_path, measured_version).search(queries_QD, 10).exact.recall == 0.83
    assert 5 * 2 * 10 < answer.exact.rescored <= 5 * 60
    for query_D, hits in zip(queries_QD, answer.hits):
        assert len({hit.passage_id for hit in hits}) == 10
        for hit in hits:
            assert hit.score == pytest.approx(max(float(x @ query_D) for x in views[hit.passage_id].values()), rel=1e-5)


def test_an_answer_over_fewer_views_says_so_and_within_which_bound(tmp_path):
    version = publish_random_index(tmp_path, random_views(9, 1), 2, IndexParams(scan="int8"))

    def method(pruned_bound: float) -> str:
        metrics = {"pruned_views": 4.0, "pruned_bound": pruned_bound}
        answer = local(tmp_path, dataclasses.replace(version, metrics=metrics)).search(np.ones((1, D)), 3)
        assert answer.exact.certified
        return answer.exact.method

    assert method(0.12341) == "flat int8 over stored views (indexed within 0.1235 of all views)"
    assert method(0.0) == "flat int8"  # copies of views that stayed: no score is another


@pytest.mark.parametrize("scan", ["vectors", "int8"])
def test_an_answer_tells_how_many_passages_its_shards_scored_exactly(tmp_path, monkeypatch, scan):
    """Single queries and a batch, over a shard with a second round: counts every scored pair, and no other."""
    views, _ = with_a_rich_shard(tmp_path)
    router = local(tmp_path, publish_random_index(tmp_path, views, 4, IndexParams(scan=scan), parent=1))
    counts: list[int] = []
    rescore = BlockTable.rescore
    monkeypatch.setattr(BlockTable, "rescore", lambda *args: (counts.append(len(args[2].row_M)), rescore(*args))[1])
    queries_QD = np.random.default_rng(2).normal(size=(6, D)).astype(np.float32)
    queries_QD[0] = 1
    for asked_QD in [*queries_QD[:, None], queries_QD]:
        counts.clear()
        answer = router.search(asked_QD, 40)
        assert answer.exact.rescored == sum(counts) >= 40 * len(asked_QD)
    assert answer.exact.rounds == 2


def test_a_changed_byte_in_a_shard_is_never_searched(tmp_path):
    version = publish_random_index(tmp_path, random_views(20, 1), 2)
    file = tmp_path / paths.shard_dir("random", version.shards[1].digest) / paths.EMBEDDINGS
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    with pytest.raises(DigestError, match="shard 1"):
        local(tmp_path, version).search(np.ones((1, D), np.float32), 1)


@given(st.data())
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_stored_view_is_scored_and_the_winner_is_the_one_that_search_names(tmp_path, data):
    """Feedback views (numbers from V on) are among them; scores of few distinct values tie often."""
    seed, num_shards = data.draw(st.integers(0, 999)), data.draw(st.integers(1, 4))
    root = tmp_path / f"{seed}-{num_shards}"
    shutil.rmtree(root, ignore_errors=True)
    rng = np.random.default_rng(seed)
    views = random_views(20, seed, levels=data.draw(st.integers(1, 2)))
    for own in list(views.values())[:5]:
        for number in range(int(rng.integers(1, 4))):
            own[V + number] = rng.integers(-1, 2, D).astype(np.float32)
    router = local(root, publish_random_index(root, views, num_shards))
    queries_QD = rng.integers(-2, 3, (3, D)).astype(np.float32)
    ids = rng.permutation(sorted(views)).tolist()
    explanations = router.explain(queries_QD, ids)
    assert [one.passage_id for one in explanations] == ids
    by_search = [{hit.passage_id: hit for hit in hits} for hits in router.search(queries_QD, 20).hits]
    for one in explanations:
        own = views[one.passage_id]
        assert one.view_numbers_N.tolist() == sorted(own)
        for query_D, scores_N, winner, hits in zip(queries_QD, one.scores_QN, one.winner_Q, by_search):
            assert scores_N.tolist() == [float(own[view] @ query_D) for view in sorted(own)]
            hit = hits[one.passage_id]
            assert (winner, scores_N.max()) == (hit.view, hit.score)


def test_only_the_shard_that_holds_a_passage_is_asked_for_its_views(tmp_path):
    views = random_views(30, 2)
    version = publish_random_index(tmp_path, views, 3)
    whole = local(tmp_path, version)
    query_QD = np.ones((1, D), np.float32)
    here = [passage_id for passage_id in sorted(views) if shard_of(passage_id, 3) == 1]
    alone = Router(whole.store, version, HalfDead(whole.fleet, {0, 2}))
    assert [one.passage_id for one in alone.explain(query_QD, here)] == here
    silent = Router(whole.store, version, HalfDead(whole.fleet, {1}))
    message = (
        f"shard 1 of index 'random' version 1, which would hold passage {here[0]!r}, did not answer (late). "
        "Ray restarts dead searchers: ask again"
    )
    with pytest.raises(CoverageError, match=f"^{re.escape(message)}$"):
        silent.explain(query_QD, here)


def test_what_cannot_be_explained_is_refused(tmp_path):
    router = local(tmp_path, publish_random_index(tmp_path, random_views(9, 1), 2))
    message = "index 'random' version 1 holds no passage 'p9'; give an id as `mvr-ray search CONFIG` shows it"
    with pytest.raises(UnknownPassageError, match=f"^{re.escape(message)}$") as error:
        router.explain(np.ones((1, D), np.float32), ["p001", "p9"])
    assert error.value.passage_id == "p9"
    with pytest.raises(ShardIndexError, match=f"{D + 1}.*{D}"):
        router.explain(np.ones((1, D + 1), np.float32), ["p001"])
    assert router.explain(np.ones((1, D), np.float32), []) == []


@pytest.mark.data
@pytest.mark.ray
def test_views_come_from_actors_as_from_this_process(small_index, run_over):
    questions = ["When did the oil crisis begin?", "Who owned the radio stations?"]
    with (
        open_router(run_over(small_index), local=True) as inside,
        open_router(run_over(small_index, resources={"searchers": 2})) as router,
    ):
        queries_QD = inside.embed(questions)
        hits = inside.search(queries_QD, 4).hits
        ids = sorted({hit.passage_id for row in hits for hit in row})
        local_views, remote = inside.explain(queries_QD, ids), router.explain(queries_QD, ids)
        assert router.explain(queries_QD, []) == []
    assert len({shard_of(passage_id, 3) for passage_id in ids}) > 1
    for one, same in zip(local_views, remote, strict=True):
        assert one.passage_id == same.passage_id
        for ours, theirs in zip(one[1:], same[1:]):
            assert np.array_equal(ours, theirs)
    best = {one.passage_id: one for one in local_views}
    for query, row in enumerate(hits):
        for hit in row:
            assert best[hit.passage_id].winner_Q[query] == hit.view
            assert best[hit.passage_id].scores_QN[query].max() == hit.score


@pytest.mark.data
@pytest.mark.ray
def test_texts_are_embedded_by_the_indexs_own_encoder_and_no_other(own_index, run_over):
    run = run_over(own_index)
    with open_router(run, local=True) as router:
        with pytest.raises(EncoderError, match="empty"):
            router.search_text(["who?", " "], 3)
        folder = own_index / paths.encoder_dir("encoder", router.manifest.encoder_fingerprint)
        queries_QD = DualEncoder.load(folder).embed_queries(["Who won?"])
        assert router.search_text(["Who won?"], 3) == router.search(queries_QD, 3)
    file = folder / paths.ENCODER_JSON
    fields = {**json.loads(file.read_text()), "fingerprint": "0" * 16}
    del fields["checksum"]
    file.write_text(json.dumps(fields))
    with (
        open_router(run, local=True) as router,
        pytest.raises(FingerprintError, match=f"{'0' * 16}.*{folder.name}"),
    ):
        router.search_text(["Who won?"], 3)


def test_a_view_without_a_snippet_has_no_text(tmp_path, monkeypatch):
    """One of the whole passage, of an empty snippet, or of feedback."""
    router = local(tmp_path, publish_random_index(tmp_path, random_views(1, 1), 1))
    monkeypatch.setattr(Router, "view_spans", lambda _, passage: [TITLE, (5, 9), None])
    texts = [router.matching_snippet(Passage("p", "Nile", "One. Two."), view) for view in range(V + 1)]
    assert texts == ["Nile", "Two.", "", ""]


@pytest.mark.data
@pytest.mark.ray
def test_the_snippet_that_won_is_that_of_the_winning_view(small_index, run_over):
    with open_router(run_over(small_index), local=True) as router:
        hit = router.search_text(["When did the oil crisis begin?"], 1).hits[0][0]
        passage = router.passages([hit.passage_id])[hit.passage_id]
        start, stop = router.encoder.snippets(passage)[hit.view]
        assert router.matching_snippet(passage, hit.view) == passage.text[start:stop] != passage.text
        for number in (0, 3):
            assert router.matching_snippet(passage, router.num_views + number) == ""


@pytest.mark.data
@pytest.mark.ray
def test_a_passages_sentences_are_cut_once_and_another_text_under_its_id_anew(small_index, run_over, monkeypatch):
    with open_router(run_over(small_index), local=True) as router:
        [hit, *_] = router.search_text(["What was the oil crisis?"], 1).hits[0]
        passage = router.passages([hit.passage_id])[hit.passage_id]
        calls = []
        spans_of = type(router.encoder).view_spans

        def count_calls(encoder, passage):
            calls.append(passage)
            return spans_of(encoder, passage)

        monkeypatch.setattr(type(router.encoder), "view_spans", count_calls)
        other = passage._replace(text="One sentence. " + passage.text)
        for one in (passage, other):
            for _ in range(3):
                assert list(router.view_spans(one)) == spans_of(router.encoder, one)
        assert calls == [passage, other]


def test_parts_of_an_open_corpus_are_looked_for_in_turn_and_all_of_them_while_one_is_missing(tmp_path, monkeypatch):
    views = random_views(40, 5)
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"id": "{name}", "text": "{name}"}}\n' for name in views))
    prepare(PrepareConfig(sources=[{"path": str(tmp_path / "rows.jsonl")}], num_shards=6), Store(str(tmp_path)))
    passages = corpus.Corpus.open(Store(str(tmp_path)), "corpus")
    info, looks = passages.info, list[str]()
    version = publish_random_index(tmp_path, views, 2, corpus=passages)
    folder = tmp_path / paths.corpus_dir(info.name)
    names = [part.file for part in info.parts]
    for name in ("size_bytes", "stored_files"):
        call = getattr(Store, name)
        look = lambda self, path, call=call: (looks.append(Path(path).name), call(self, path))[1]  # noqa: E731
        monkeypatch.setattr(Store, name, look)
    monkeypatch.setattr(router, "SOURCES_S", 0.0)
    monkeypatch.setattr(router, "PARTS_IN_TURN", 2)
    own = local(tmp_path, version)

    def find_missing() -> list[str]:
        looks.clear()
        return [one for one in own.missing_sources() if ".arrow" in one]

    assert find_missing() == [] and looks == [folder.name], "no part is open"
    own.passages(list(views))
    seen_names = [name for _ in range(3) if not find_missing() for name in looks]
    assert seen_names == names
    (folder / names[4]).rename(tmp_path / "aside")
    problems = [find_missing() for _ in range(6)]
    assert problems[:2] == [[], []] and all(names[4] in problem for [problem] in problems[2:])
    assert looks == [folder.name]
    (tmp_path / "aside").rename(folder / names[4])
    assert find_missing() == [] and find_missing() == [] and len(looks) == 2


@pytest.mark.data
@pytest.mark.ray
def test_passages_of_another_corpus_are_refused(own_index, run_over):
    store = Store(str(own_index))
    last = corpus.Corpus.open(store, "corpus")
    info = last.info
    (own_index / paths.corpus_publication("corpus", last.number)).write_bytes(
        dataclasses.replace(info, digest="0" * 32).to_json(last.number)
    )
    with open_router(run_over(own_index), local=True) as router:
        assert router.corpus.digest == info.digest
    store.delete(paths.corpus_version("corpus", info.digest))
    with (
        open_router(run_over(own_index), local=True) as router,
        pytest.raises(MissingInputError, match=f"of digest {info.digest} not found.*last has digest {'0' * 32}"),
    ):
        router.passages(["any"])


@pytest.mark.data
@pytest.mark.ray
def test_a_dead_searcher_is_reported_and_then_answers_again(small_index, run_over):
    run = run_over(small_index, resources={"searchers": 2})
    questions = ["When did the oil crisis begin?", "Who owned the radio stations?"]
    with open_router(run, local=True) as inside, open_router(run) as router:
        whole = inside.search_text(questions, 10)
        assert router.search_text(questions, 10) == whole
        digests = {
            digest for own in ray.get([actor.health.remote() for actor in router.fleet.actors]) for digest in own
        }
        assert digests == {entry.digest for entry in router.manifest.shards}
        shards = router.fleet.assignments[router.manifest.version][0].shards
        os.kill(ray.get(router.fleet.actors[0].__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        with pytest.raises(CoverageError, match=rf"{len(shards)} of 3 shards .*{shards[0]} \(died\)"):
            router.search_text(questions, 10)
        router.ready()
        assert router.search_text(questions, 10) == whole
