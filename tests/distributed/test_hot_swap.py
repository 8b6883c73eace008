"""Tests that a router switches versions under load: each answer is complete, from one version, and none fails."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
import ray
from live_search import live_search
from random_index import D, brute_force, publish_random_index, random_views
from test_hybrid_laws import corpus_of, random_rows
from waiting import until

from mvr_ray.config import ServeConfig
from mvr_ray.deadline import Deadline
from mvr_ray.distributed import hot_swap
from mvr_ray.distributed.hot_swap import HotSwapRouter, open_hot_swap_router
from mvr_ray.distributed.router import open_router
from mvr_ray.errors import (
    CoverageError,
    DamagedShardsError,
    DigestError,
    MissingInputError,
    OverloadedError,
    ResourceError,
    ShardIndexError,
)
from mvr_ray.index.base import IndexParams
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import shard_of
from mvr_ray.store.files import Store
from mvr_ray.store.gc import collect
from mvr_ray.store.manifest import Manifest
from mvr_ray.types import HybridQueries

SHARDS, K = 3, 7
FIRST = random_views(60, 1)
SECOND = {i: {v: x + (shard_of(i, SHARDS) == 1) for v, x in own.items()} for i, own in FIRST.items()}
"""Shard 1 is another, the other two are those of FIRST."""
QUERIES_QD = np.random.default_rng(5).integers(-2, 3, (12, D)).astype(np.float32)


def run_of(root: Path, run_over, **resources):
    return run_over(root, index={"name": "random"}, resources={"searchers": 2, "cpus_per_searcher": 0.25, **resources})


def expected(views) -> list[list[tuple[str, float, int]]]:
    return [brute_force(views, query_D, K) for query_D in QUERIES_QD]


def search_one(live, number: int) -> list[tuple[str, float, int]]:
    return [
        (hit.passage_id, hit.score, hit.view) for hit in live_search(live, QUERIES_QD[number : number + 1], K).hits[0]
    ]


def digests(version: Manifest) -> list[str]:
    return sorted(entry.digest for entry in version.shards)


def damage(root: Path, digest: str) -> Path:
    """Replace a shard's embeddings file by one with a changed byte; mapped files stay as they are."""
    file = root / paths.shard_dir("random", digest) / paths.EMBEDDINGS
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    shutil.copy(file, file.with_suffix(".whole"))
    file.unlink()
    file.write_bytes(data)
    return file


class SearchClients:
    """Clients in threads that search all the time, each with the next query as soon as it has an answer."""

    def __init__(self, live: HotSwapRouter, size: int, truth: dict[int, list[list[tuple[str, float, int]]]]) -> None:
        self.live, self.truth = live, truth
        self.counts: Counter[int] = Counter()
        """Answers by version."""
        self.wrong: list[tuple[int, int]] = []
        self.under_way = 0
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._threads = ThreadPoolExecutor(size)
        self._asking = [self._threads.submit(self._ask, number) for number in range(size)]

    def _ask(self, number: int) -> None:
        while not self._end.is_set():
            at, number = number % len(QUERIES_QD), number + 1
            with self._lock:
                self.under_way += 1
            answer = live_search(self.live, QUERIES_QD[at : at + 1], K, deadline=Deadline.after(120))
            hits = [(hit.passage_id, hit.score, hit.view) for hit in answer.hits[0]]
            right = hits == self.truth[answer.version][at] and answer.exact.certified and answer.coverage_share == 1
            with self._lock:
                self.under_way -= 1
                self.counts[answer.version] += 1
                if not right:
                    self.wrong.append((at, answer.version))

    def until_answered(self, version: int, count: int, under_way: float = 0) -> None:
        """Wait until `count` further answers came from a version, and `under_way` searches run."""
        enough, end = self.counts[version] + count, time.monotonic() + 120
        while self.counts[version] < enough or self.under_way < under_way:
            failures = [one for one in self._asking if one.done()]
            assert not failures, failures[0].result()
            assert time.monotonic() < end, (self.counts, self.under_way)
            time.sleep(0.01)

    def __enter__(self) -> "SearchClients":
        return self

    def __exit__(self, *_) -> None:
        self._end.set()
        self._threads.shutdown()
        for one in self._asking:
            one.result()


@pytest.mark.chaos(
    "versions published, rolled back and collected under 1,000 queries",
    "every answer is right for exactly one version; none fails",
)
@pytest.mark.ray
@pytest.mark.parametrize("local", [True, False], ids=["in this process", "actors"])
def test_every_answer_is_one_versions_while_versions_come_and_go(
    tmp_path, run_over, ray_session, local, record_property
):
    """1,000 queries are under way at every moment of two publishes, a rollback, moves and collection."""
    store, first, size = Store(str(tmp_path)), publish_random_index(tmp_path, FIRST, SHARDS), 1000
    truth = {1: expected(FIRST), 2: expected(SECOND), 3: expected(FIRST), 4: expected(SECOND)}

    def publish_and_follow() -> None:
        publish_random_index(tmp_path, SECOND, SHARDS, parent=1)
        assert live.follow()

    def roll_back_and_follow() -> None:
        manifest.rollback(store, "random", 1)
        assert live.follow()

    def go_back() -> None:
        assert live.move_to(2) == 2
        assert not live.follow()

    def publish_move_and_collect() -> None:
        publish_random_index(tmp_path, SECOND, SHARDS, parent=3)
        assert not live.follow()
        assert live.move_to() == 4
        removed_paths = collect(store, "random", keep=1, grace_s=0)
        assert paths.shard_dir("random", first.shards[1].digest) in removed_paths

    with open_hot_swap_router(run_of(tmp_path, run_over), local=local, follow_s=3600) as live:
        with SearchClients(live, size, truth) as clients:
            under_way = []
            for change in (publish_and_follow, roll_back_and_follow, go_back, publish_move_and_collect):
                clients.until_answered(live.manifest.version, 200, under_way=0.99 * size)
                under_way.append(clients.under_way)
                change()
                under_way.append(clients.under_way)
            clients.until_answered(4, 200)
        assert clients.wrong == []
        assert clients.counts.keys() == {1, 2, 3, 4}
        assert min(under_way) >= 0.95 * size, under_way
        assert live.state == (4, True, 0, "")
        live.ready()
        open_digests = live.searchers.searcher.health() if local else live.searchers.actors
        if not local:
            open_digests = sorted(digest for actor in open_digests for digest in ray.get(actor.health.remote()))
        assert open_digests == digests(live.manifest)
    figures = f"{clients.counts.total()} answers, {min(under_way)} to {max(under_way)} under way at each of 4 changes"
    record_property("figures", figures)


def test_a_call_under_way_ends_on_its_version_and_takes_its_shards_along(tmp_path, run_over):
    first, second = (
        publish_random_index(tmp_path, FIRST, SHARDS),
        publish_random_index(tmp_path, SECOND, SHARDS, parent=1),
    )
    with open_hot_swap_router(run_of(tmp_path, run_over), 1, local=True) as live:
        searcher = live.searchers.searcher
        with live.pin() as before:
            assert live.move_to(2) == 2
            assert (before.manifest.version, live.manifest.version) == (1, 2)
            assert search_one(before, 0) == brute_force(FIRST, QUERIES_QD[0], K)
            assert search_one(live, 0) == brute_force(SECOND, QUERIES_QD[0], K)
            assert searcher.health() == sorted({*digests(first), *digests(second)})
            with live.pin():
                assert live.move_to(1) == 1  # back while it is still open
                assert search_one(live, 0) == brute_force(FIRST, QUERIES_QD[0], K)
            assert searcher.health() == digests(first)
        assert searcher.health() == digests(first)
        assert search_one(live, 1) == brute_force(FIRST, QUERIES_QD[1], K)


VIEWS = {
    1: FIRST,
    2: SECOND,
    3: {i: {v: -x for v, x in own.items()} for i, own in FIRST.items()},
    4: {i: {v: 2 * x for v, x in own.items()} for i, own in FIRST.items()},
}


def test_a_version_that_a_call_names_is_opened_beside_and_keeps_a_place_until_others_take_it(tmp_path, run_over):
    versions = {number: publish_random_index(tmp_path, VIEWS[number], SHARDS, parent=number - 1) for number in VIEWS}
    with open_hot_swap_router(run_of(tmp_path, run_over), local=True) as live:
        live.min_idle_s = 0
        searcher = live.searchers.searcher

        def holds(*numbers: int) -> bool:
            return searcher.health() == sorted({digest for number in numbers for digest in digests(versions[number])})

        with live.pin(4) as router, live.pin() as same:
            assert router is same and holds(4)
        for number, open_versions in (
            (1, (1, 4)),
            (1, (1, 4)),
            (4, (1, 4)),
            (2, (1, 2, 4)),
            (1, (1, 2, 4)),
            (3, (1, 3, 4)),
        ):
            with live.pin(number) as router:
                assert (router.manifest.version, live.manifest.version) == (number, 4)
                assert search_one(router, 0) == brute_force(VIEWS[number], QUERIES_QD[0], K)
                assert search_one(live, 0) == brute_force(VIEWS[4], QUERIES_QD[0], K)
            assert holds(*open_versions)
        for move, open_versions in ((1, (1, 3)), (None, (3, 4)), (2, (2, 3)), (3, (3,))):
            live.move_to(move)
            with live.pin():
                assert holds(*open_versions)
        with pytest.raises(MissingInputError, match="5"), live.pin(5):
            pass
        assert search_one(live, 2) == brute_force(VIEWS[3], QUERIES_QD[2], K)


@pytest.mark.chaos(
    "three versions named in turn beside the live one", "none is read twice; the third gets a retry time"
)
def test_versions_named_in_turn_are_read_once_and_one_too_many_gets_a_retry_time(tmp_path, run_over):
    versions = {number: publish_random_index(tmp_path, VIEWS[number], SHARDS, parent=number - 1) for number in VIEWS}
    with open_hot_swap_router(run_of(tmp_path, run_over), local=True) as live:
        loaded_versions, load = [], live.searchers.load
        live.searchers.load = lambda version: (loaded_versions.append(version.version), load(version))[1]
        for number in (1, 2, 1, 2, 1, 2):
            with live.pin(number) as router:
                assert search_one(router, 0) == brute_force(VIEWS[number], QUERIES_QD[0], K)
        with pytest.raises(OverloadedError, match="version 3 not opened: all 2 places"), live.pin(3):
            pass
        assert loaded_versions == [1, 2]
        with live.pin(1), pytest.raises(OverloadedError) as refusal, live.pin(3):
            pass
        assert 1 <= refusal.value.retry_after_s <= live.min_idle_s
        live.min_idle_s = 0
        with live.pin(1), live.pin(3) as third:  # one is in use: the other one goes
            assert search_one(third, 0) == brute_force(VIEWS[3], QUERIES_QD[0], K)
        assert loaded_versions == [1, 2, 3]
        open_digests = {digest for number in (1, 3, 4) for digest in digests(versions[number])}
        assert live.searchers.searcher.health() == sorted(open_digests)


def test_a_cached_version_is_refused_without_memory_and_evicted_for_a_new_live_version(tmp_path, run_over):
    versions = {
        number: publish_random_index(tmp_path, VIEWS[number], SHARDS, parent=number - 1) for number in (1, 2, 3)
    }
    second, added_bytes = versions[2].shards[1].num_bytes, versions[3].num_bytes
    limit = added_bytes + versions[1].num_bytes + second - 1
    with open_hot_swap_router(run_of(tmp_path, run_over, searcher_bytes=limit), local=True) as live:
        with live.pin(1):
            pass
        numbers = (
            rf"needs {second:,} more, {limit + 1:,} in all; .* allows {limit:,}.*version 1\) was called .* ask again"
        )
        with pytest.raises(OverloadedError, match=numbers), live.pin(2):
            pass
        with live.pin(1):
            pass
        publish_random_index(tmp_path, VIEWS[4], SHARDS, parent=3)
        assert live.move_to() == 4
        assert search_one(live, 0) == brute_force(VIEWS[4], QUERIES_QD[0], K)
    small, refusal = (
        run_of(tmp_path, run_over, searcher_bytes=added_bytes),
        pytest.raises(ResourceError, match=f"{added_bytes:,}"),
    )
    with open_hot_swap_router(small, local=True) as live, refusal, live.pin(1):
        pass


class OverlappingCalls:
    """A thread whose calls name a version; each one begins, or is refused, before the one before it ends."""

    def __init__(self, live: HotSwapRouter, version: int) -> None:
        self.live, self.version = live, version
        self.num_calls = 0
        self._stop_event = threading.Event()
        self._begin_event = threading.Event()
        self._thread = threading.Thread(target=self._call)

    def _call(self) -> None:
        calls: list[ExitStack] = []
        while not self._stop_event.wait(0.001):
            call = ExitStack()
            with suppress(OverloadedError):
                call.enter_context(self.live.pin(self.version, Deadline.after(0.05)))
                self.num_calls += 1
                self._begin_event.set()
            if calls:
                calls.pop().close()
            calls.append(call)
        calls.pop().close()

    def until_called(self) -> None:
        """Wait for two further calls."""
        until(lambda after=self.num_calls + 2: self.num_calls >= after)

    def __enter__(self) -> "OverlappingCalls":
        self._thread.start()
        assert self._begin_event.wait(30)
        return self

    def __exit__(self, *_) -> None:
        self._stop_event.set()
        self._thread.join(30)


def test_a_version_that_was_live_and_that_overlapping_calls_name_takes_a_place_beside_the_live_one(tmp_path, run_over):
    versions = {number: publish_random_index(tmp_path, VIEWS[number], SHARDS, parent=number - 1) for number in VIEWS}
    with open_hot_swap_router(run_of(tmp_path, run_over), 1, local=True) as live:
        live.min_idle_s = 0
        with OverlappingCalls(live, 1) as calls:
            assert live.move_to(4) == 4
            calls.until_called()
            with live.pin(2), pytest.raises(OverloadedError, match="all 2 places"), live.pin(3):
                pass
        with live.pin(2), live.pin(3):
            open_digests = {digest for number in (2, 3, 4) for digest in digests(versions[number])}
            assert live.searchers.searcher.health() == sorted(open_digests)


def test_a_version_that_overlapping_calls_name_is_evicted_for_a_new_live_version(tmp_path, run_over):
    """It closes after the calls that run; those that follow wait for it, or are refused."""
    first = publish_random_index(tmp_path, VIEWS[1], SHARDS)
    limit = first.num_bytes + publish_random_index(tmp_path, VIEWS[3], SHARDS, parent=1).num_bytes
    run = run_of(tmp_path, run_over, searcher_bytes=limit)
    with open_hot_swap_router(run, local=True) as live, OverlappingCalls(live, 1) as calls:
        calls.until_called()
        publish_random_index(tmp_path, VIEWS[4], SHARDS, parent=2)
        assert live.move_to() == 3
        assert search_one(live, 0) == brute_force(VIEWS[4], QUERIES_QD[0], K)


@pytest.mark.chaos(
    "a cached version that takes long to open", "its callers wait no longer than they may; live ones go on"
)
def test_calls_for_a_version_that_is_being_opened_wait_within_their_time_and_not_all_of_them(tmp_path, run_over):
    for number in (1, 2, 3):
        publish_random_index(tmp_path, VIEWS[number], SHARDS, parent=number - 1)
    run = run_of(tmp_path, run_over).model_copy(update={"serve": ServeConfig(max_running=4)})
    with open_hot_swap_router(run, local=True) as live, ThreadPoolExecutor(4) as threads:
        load_event, open_event, load = threading.Event(), threading.Event(), live.searchers.load

        def slow(version: Manifest):
            load_event.set()
            assert open_event.wait(60)
            return load(version)

        def name_version(version: int, timeout_s: float) -> list[tuple[str, float, int]]:
            with live.pin(version, Deadline.after(timeout_s)) as router:
                return search_one(router, 0)

        live.searchers.load = slow
        waits = [threads.submit(name_version, 1, 60), threads.submit(name_version, 2, 60)]
        assert load_event.wait(60)
        while live._loader._slots._value:
            threading.Event().wait(0.001)
        with pytest.raises(OverloadedError, match="2 calls wait for versions already"):
            name_version(1, 60)
        for _ in range(20):
            assert search_one(live, 1) == brute_force(VIEWS[3], QUERIES_QD[1], K)
        with pytest.raises(MissingInputError, match="no version 9"):
            name_version(9, 60)
        open_event.set()
        assert [one.result(60) for one in waits] == [brute_force(VIEWS[n], QUERIES_QD[0], K) for n in (1, 2)]


def test_a_call_whose_time_is_over_leaves_the_opening_to_the_next_one(tmp_path, run_over):
    for number in (1, 2):
        publish_random_index(tmp_path, VIEWS[number], SHARDS, parent=number - 1)
    with open_hot_swap_router(run_of(tmp_path, run_over), local=True) as live:
        open_event, loaded_versions, load = threading.Event(), [], live.searchers.load

        def slow(version: Manifest):
            loaded_versions.append(version.version)
            assert open_event.wait(60)
            return load(version)

        live.searchers.load = slow
        for _ in range(3):
            message = "version 1 is not open yet: version 1 is being opened"
            with pytest.raises(OverloadedError, match=message), live.pin(1, Deadline.after(0.01)):
                pass
        open_event.set()
        with live.pin(1, Deadline.after(60)) as router:
            assert search_one(router, 0) == brute_force(FIRST, QUERIES_QD[0], K)
        assert loaded_versions == [1]


def test_a_damaged_version_that_calls_name_is_not_read_for_each_of_them(tmp_path, run_over):
    first = publish_random_index(tmp_path, FIRST, SHARDS)
    publish_random_index(tmp_path, SECOND, SHARDS, parent=1)
    file = damage(tmp_path, first.shards[1].digest)
    with open_hot_swap_router(run_of(tmp_path, run_over), local=True) as live:
        loaded_versions, load = [], live.searchers.load
        live.searchers.load = lambda version: (loaded_versions.append(version.version), load(version))[1]
        for _ in range(3):
            with pytest.raises(DigestError, match=re.escape(str(file))), live.pin(1):
                pass
        assert loaded_versions == [1]
        file.with_suffix(".whole").replace(file)
        live._loader.min_idle_s = 0
        with live.pin(1) as router:
            assert search_one(router, 0) == brute_force(FIRST, QUERIES_QD[0], K)


def test_shards_that_both_versions_name_are_not_read_again(tmp_path, run_over):
    first = publish_random_index(tmp_path, FIRST, SHARDS)
    with open_hot_swap_router(run_of(tmp_path, run_over), local=True) as live:
        assert live.manifest.dimension == D
        second = publish_random_index(tmp_path, SECOND, SHARDS, parent=1)
        shared_digests = {*digests(first)} & {*digests(second)}
        assert len(shared_digests) == 2
        for digest in shared_digests:
            damage(tmp_path, digest)
        assert live.move_to() == 2
        assert [search_one(live, number) for number in range(len(QUERIES_QD))] == expected(SECOND)


@pytest.mark.chaos("no memory for the next version", "refused before a byte is read, with both numbers")
def test_a_version_that_does_not_fit_into_memory_is_refused_before_it_is_read(tmp_path, run_over, record_property):
    first = publish_random_index(tmp_path, FIRST, SHARDS)
    added_bytes = first.shards[1].num_bytes
    limit = first.num_bytes + added_bytes - 1
    with open_hot_swap_router(run_of(tmp_path, run_over, searcher_bytes=limit), local=True) as live:
        second = publish_random_index(tmp_path, SECOND, SHARDS, parent=1)
        assert second.shards[1].num_bytes == added_bytes
        damage(tmp_path, second.shards[1].digest)
        both = re.escape(f"holds {first.num_bytes:,} bytes and needs {added_bytes:,} more, {limit + 1:,} in all; ")
        with pytest.raises(ResourceError, match=rf"'random' version 2 .*{both}.*searcher_bytes allows {limit:,}"):
            live.move_to()
        assert search_one(live, 0) == brute_force(FIRST, QUERIES_QD[0], K)
    record_property(
        "figures", f"{first.num_bytes:,} bytes held, {added_bytes:,} more needed, {limit:,} allowed: 1 too few"
    )


def test_the_same_files_indexed_otherwise_need_their_memory_again(tmp_path, run_over):
    first = publish_random_index(tmp_path, FIRST, SHARDS)
    twice = 2 * first.num_bytes
    for limit in (twice - 1, twice):
        with open_hot_swap_router(run_of(tmp_path, run_over, searcher_bytes=limit), 1, local=True) as live:
            if limit < twice:
                other = publish_random_index(tmp_path, FIRST, SHARDS, IndexParams(nprobe=7), parent=1)
                assert digests(other) == digests(first)
                with pytest.raises(ResourceError, match=f"needs {first.num_bytes:,} more, {twice:,} in all"):
                    live.move_to()
            else:
                assert live.move_to() == 2
            assert [search_one(live, number) for number in range(len(QUERIES_QD))] == expected(FIRST)


@pytest.mark.chaos("next version damaged", "not moved to until whole; the live version goes on")
def test_a_damaged_version_is_not_moved_to_until_it_is_whole_again(tmp_path, run_over, record_property):
    publish_random_index(tmp_path, FIRST, SHARDS)
    with open_hot_swap_router(run_of(tmp_path, run_over), local=True, follow_s=3600) as live:
        second = publish_random_index(tmp_path, SECOND, SHARDS, parent=1)
        file = damage(tmp_path, second.shards[1].digest)
        with pytest.raises(DigestError, match="shard 1"):
            live.move_to()
        assert not live.follow()
        assert live.state[:3] == (1, True, 2) and str(file) in live.state.failure
        assert search_one(live, 0) == brute_force(FIRST, QUERIES_QD[0], K)
        assert live.searchers.searcher.health() == digests(live.manifest)
        file.with_suffix(".whole").replace(file)
        assert live.follow()
        assert live.state == (2, True, 0, "")
        assert search_one(live, 0) == brute_force(SECOND, QUERIES_QD[0], K)
        with pytest.raises(MissingInputError, match="no version 9"):
            live.move_to(9)
        assert search_one(live, 0) == brute_force(SECOND, QUERIES_QD[0], K)
    record_property("figures", "2 moves refused, 3 answers right, moved at the first look after the repair")


def test_no_version_without_words_becomes_live_where_searches_are_hybrid(tmp_path, run_over):
    corpus = corpus_of(tmp_path, random_rows(FIRST, 1), 2)
    publish_random_index(tmp_path, FIRST, SHARDS, corpus=corpus, words="english")
    with open_hot_swap_router(run_of(tmp_path, run_over), local=True, needs_words=True) as live:
        publish_random_index(tmp_path, SECOND, SHARDS, parent=1)
        assert not live.follow()
        assert live.state[:3] == (1, True, 2) and "version 2 has no words" in live.state.failure
        with pytest.raises(ShardIndexError, match="version 2 has no words"):
            live.move_to(2)
        with live.pin(2) as router:
            assert search_one(router, 0) == expected(SECOND)[0]
        assert live_search(live, QUERIES_QD[:1], K, hybrid=HybridQueries(("ships",), 2.0)).version == 1
        publish_random_index(tmp_path, SECOND, SHARDS, parent=2, corpus=corpus, words="english")
        assert live.follow() and live.state == (3, True, 0, "")


def test_a_follower_that_waits_for_an_opening_gives_up_at_its_deadline(tmp_path, run_over):
    publish_random_index(tmp_path, FIRST, SHARDS)
    with open_hot_swap_router(run_of(tmp_path, run_over), local=True) as live, ThreadPoolExecutor(1) as threads:
        publish_random_index(tmp_path, SECOND, SHARDS, parent=1)
        load_event, open_event, load = threading.Event(), threading.Event(), live.searchers.load

        def slow(version: Manifest):
            load_event.set()
            assert open_event.wait(30)
            return load(version)

        live.searchers.load = slow
        move = threads.submit(live.follow)
        assert load_event.wait(30)
        with pytest.raises(OverloadedError, match="still opens a version"):
            live.follow(Deadline.after(0.01))
        open_event.set()
        assert move.result(30) and not live.follow(Deadline.after(30))
        assert search_one(live, 0) == expected(SECOND)[0]


def test_a_follower_finds_what_is_published_by_itself(tmp_path, run_over):
    publish_random_index(tmp_path, FIRST, SHARDS)
    move_event = threading.Event()
    with open_hot_swap_router(run_of(tmp_path, run_over), local=True) as live:
        follow = live.follow

        def follow_once() -> bool:
            if follow():
                move_event.set()
            return move_event.is_set()

        live.follow = follow_once
        with live.follow_periodically(0.01):
            publish_random_index(tmp_path, SECOND, SHARDS, parent=1)
            assert move_event.wait(30)
        assert search_one(live, 0) == brute_force(SECOND, QUERIES_QD[0], K)


def test_following_without_a_new_version_lists_and_reads_once_and_parses_nothing(tmp_path, run_over, monkeypatch):
    publish_random_index(tmp_path, FIRST, SHARDS)
    calls = Counter[str]()
    with open_hot_swap_router(run_of(tmp_path, run_over), local=True) as live:
        assert not live.follow()
        for owner, name in (
            *((Store, name) for name in ("list", "read_bytes", "exists")),
            (Manifest, "content_digest"),
        ):
            call = getattr(owner, name)
            count = lambda *own, name=name, call=call: (calls.update([name]), call(*own))[1]  # noqa: E731
            monkeypatch.setattr(owner, name, count)
        assert [live.follow() for _ in range(3)] == [False] * 3 and calls == {"list": 3, "read_bytes": 3}
        file = tmp_path / paths.manifest("random", 1)
        file.rename(tmp_path / "away")
        file.write_bytes((tmp_path / "away").read_bytes()[:-9])
        assert not live.follow() and "is not a manifest" in live.state.failure
        (tmp_path / "away").rename(file)
        assert not live.follow() and not live.state.failure


def test_a_follower_waits_longer_after_failures_but_not_for_one_of_a_version_that_was_named(
    tmp_path, run_over, monkeypatch
):
    publish_random_index(tmp_path, FIRST, SHARDS)
    monkeypatch.setattr(hot_swap, "run_periodically", lambda function, *_: nullcontext(function))
    with open_hot_swap_router(run_of(tmp_path, run_over), 1, local=True) as live, live.follow_periodically(1.0) as call:
        with pytest.raises(MissingInputError, match="no version 9"):
            live.move_to(9)
        assert [call() for _ in range(3)] == [1.0, 1.0, 1.0]
        live.move_to()
        (tmp_path / paths.manifest("random", 1)).rename(tmp_path / "away")
        assert [call() for _ in range(3)] == [2.0, 4.0, 8.0]
        (tmp_path / "away").rename(tmp_path / paths.manifest("random", 1))
        assert [call(), call()] == [1.0, 1.0]


def test_a_newest_manifest_that_is_deleted_takes_no_reader_back(tmp_path, run_over):
    publish_random_index(tmp_path, FIRST, SHARDS)
    publish_random_index(tmp_path, SECOND, SHARDS, parent=1)
    with open_hot_swap_router(run_of(tmp_path, run_over), local=True, follow_s=None) as live:
        (tmp_path / paths.manifest("random", 2)).unlink()
        assert not live.follow()
        assert (live.state.version, live.state.failed_version) == (2, 1)
        assert "has no version 2 any more" in live.state.failure and "the newest one is 1" in live.state.failure
        with pytest.raises(MissingInputError, match="no version 2 any more"):
            live.move_to()
        assert search_one(live, 0) == expected(SECOND)[0]
        for version, moves in ((2, False), (3, True)):
            assert manifest.rollback(Store(str(tmp_path)), "random", 1).version == version
            assert live.follow() is moves
            assert ("its number taken" in live.state.failure) is not moves
        assert search_one(live, 0) == expected(FIRST)[0]


def test_a_store_that_was_moved_away_is_named_and_followed_once_it_is_back(tmp_path, run_over):
    store = tmp_path / "store"
    publish_random_index(store, FIRST, SHARDS)
    with open_hot_swap_router(run_of(store, run_over), local=True, follow_s=None) as live:
        away = store.rename(tmp_path / "away")
        assert not live.follow()
        assert f"{store} has no version of it: restore the store" in live.state.failure
        assert search_one(live, 0) == expected(FIRST)[0] and not store.exists()
        away.rename(store)
        publish_random_index(store, SECOND, SHARDS, parent=1)
        assert live.follow() and not live.state.failure


def test_a_follower_that_cannot_read_the_list_of_versions_says_so(tmp_path, run_over, monkeypatch):
    """Otherwise a promotion would report another reason, and an old version would pass for the newest."""
    publish_random_index(tmp_path, FIRST, SHARDS)
    with open_hot_swap_router(run_of(tmp_path, run_over), local=True, follow_s=None) as live:
        publish_random_index(tmp_path, SECOND, SHARDS, parent=1)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "iterdir", lambda _: os.read(-1, 1))  # EBADF stands in for what a disk says
            assert not live.follow()
            assert f"cannot list {tmp_path}/indexes/random/versions: Bad file descriptor" in live.state.failure
        assert search_one(live, 0) == expected(FIRST)[0]
        assert live.follow() and not live.state.failure


def test_a_first_version_with_a_damaged_shard_answers_from_the_others(tmp_path, run_over):
    first = publish_random_index(tmp_path, FIRST, SHARDS)
    file = damage(tmp_path, first.shards[2].digest)
    with open_hot_swap_router(run_of(tmp_path, run_over), local=True) as live:
        with pytest.raises(DamagedShardsError, match=r"1 of 3 .*: 2 \(damaged\); .*versions CONFIG repair") as error:
            live_search(live, QUERIES_QD, K)
        answer = live_search(live, QUERIES_QD, K, min_coverage=0.5)
        assert answer.shards == error.value.shards
        assert [shard.state for shard in answer.shards] == ["searched", "searched", "damaged"]
        assert str(file) in answer.shards[2].reason and not answer.exact.certified
        there = {i: own for i, own in FIRST.items() if shard_of(i, SHARDS) != 2}
        for query_D, hits in zip(QUERIES_QD, answer.hits):
            assert [(hit.passage_id, hit.score, hit.view) for hit in hits] == brute_force(there, query_D, K)
        passage_id = next(i for i in FIRST if shard_of(i, SHARDS) == 2)
        with live.pin() as router, pytest.raises(DamagedShardsError, match=re.escape(str(file))):
            router.explain(QUERIES_QD, [passage_id])
        file.with_suffix(".whole").replace(file)
        live.ready()
        assert live_search(live, QUERIES_QD, K).exact.certified


LEAVING = """
import sys

import numpy as np
import ray

from mvr_ray.config import load_run
from mvr_ray.distributed.cluster.ray_internals import loopback_node
from mvr_ray.distributed.router import open_router
from mvr_ray.errors import ResourceError

def begin():
    with loopback_node():
        ray.init(log_to_driver=False, logging_level="ERROR")

run, vector = load_run(sys.argv[1]), np.eye(1, int(sys.argv[2]), dtype=np.float32)
begin()
with open_router(run, local=False) as router:
    print(len(router.search(vector, 1).hits))
    for next_session in (lambda: None, begin):
        ray.shutdown()
        next_session()
        try:
            router.search(vector, 1)
        except ResourceError as error:
            print(ray.is_initialized(), error)
print(ray.is_initialized())
"""


@pytest.mark.ray
def test_searchers_that_end_with_a_session_of_other_code_are_an_error_and_no_other_cluster_starts(
    tmp_path, run_over, ray_session
):
    publish_random_index(tmp_path, FIRST, SHARDS)
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(run_of(tmp_path, run_over).model_dump(mode="json", exclude_unset=True)))
    environ = os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    command = [sys.executable, "-c", LEAVING, str(file), str(D)]
    lines = subprocess.run(command, env=environ, check=True, capture_output=True, text=True).stdout.splitlines()
    error = "the Ray session of the searchers has ended (ray.shutdown); open the index again"
    assert lines == ["1", f"False {error}", f"True {error}", "True"]


@pytest.mark.chaos(
    "searcher killed while it opens the next version", "the live version goes on; the log has the reason"
)
@pytest.mark.ray
def test_a_searcher_that_dies_while_a_version_is_opened_leaves_the_live_one(
    tmp_path, run_over, ray_session, record_property
):
    publish_random_index(tmp_path, FIRST, SHARDS)
    with open_hot_swap_router(run_of(tmp_path, run_over), probe_s=3600) as live:
        second = publish_random_index(tmp_path, SECOND, SHARDS, parent=1)
        actor = live.searchers.actors[0]
        os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        with pytest.raises(ResourceError, match="opening index 'random' version 2 stopped"):
            live.move_to()
        live.ready()
        assert search_one(live, 0) == brute_force(FIRST, QUERIES_QD[0], K)
        file = damage(tmp_path, second.shards[1].digest)
        with pytest.raises(DigestError, match="shard 1"):
            live.move_to()
        assert search_one(live, 1) == brute_force(FIRST, QUERIES_QD[1], K)
        file.with_suffix(".whole").replace(file)
        assert live.move_to() == 2
        os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        began = time.monotonic()
        live.ready()  # started with version 1, it comes back with version 2
        record_property("figures", f"killed twice; back with version 2 in {time.monotonic() - began:.1f} s")
        assert [search_one(live, number) for number in range(len(QUERIES_QD))] == expected(SECOND)


@pytest.mark.chaos(
    "shard damaged at rest", "reported as damaged with its file; the others answer where that is allowed"
)
@pytest.mark.ray
def test_a_damaged_shard_is_reported_by_actors_and_refused_when_a_router_is_opened(
    tmp_path, run_over, ray_session, record_property
):
    first = publish_random_index(tmp_path, FIRST, SHARDS)
    damage(tmp_path, first.shards[0].digest)
    with pytest.raises(DigestError, match="shard 0"), open_router(run_of(tmp_path, run_over)):
        pass
    with open_hot_swap_router(run_of(tmp_path, run_over), probe_s=3600) as live:
        answer = live_search(live, QUERIES_QD, K, min_coverage=0.0)
        assert [shard.state for shard in answer.shards] == ["damaged", "searched", "searched"]
        record_property(
            "figures", f"{answer.passages_searched} of {answer.passages_total} passages searched, which the answer says"
        )


def hold_turn(actor) -> None:
    """Hold the request lock, so that the searcher begins no further search."""

    def hold(searcher) -> None:
        with searcher.request_lock:
            threading.Event().wait()

    actor.__ray_call__.remote(hold)


@pytest.mark.chaos("searcher stopped by a signal while a call waits", "killed and started again; the call ends")
@pytest.mark.ray
def test_a_searcher_that_hangs_is_replaced_while_a_call_waits_for_it(tmp_path, run_over, ray_session, record_property):
    publish_random_index(tmp_path, FIRST, SHARDS)
    with open_hot_swap_router(run_of(tmp_path, run_over, hung_s=2), probe_s=0.2) as live:
        actor = live.searchers.actors[0]
        hold_turn(actor)
        began = time.monotonic()
        with pytest.raises(CoverageError, match=r"of 3 shards .* \(hung\)"):
            live_search(live, QUERIES_QD, K, deadline=Deadline.after(120))
        took_s = time.monotonic() - began
        live.ready()
        whole_s = time.monotonic() - began
        record_property("figures", f"the call ended after {took_s:.1f} s (hung_s=2), all whole after {whole_s:.1f} s")
        assert [search_one(live, number) for number in range(len(QUERIES_QD))] == expected(FIRST)
