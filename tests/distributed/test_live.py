"""A router goes from version to version under load: each answer is one version's, whole, and none fails."""

import os
import re
import shutil
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import ray
from made import D, brute_force, made_index, made_views

from mvr_ray.distributed.live import LiveRouter, open_live
from mvr_ray.distributed.router import open_router
from mvr_ray.errors import CoverageError, DamagedShardsError, DigestError, MissingInputError, ResourceError
from mvr_ray.index.base import IndexParams
from mvr_ray.store import layout, manifest
from mvr_ray.store.collect import collect
from mvr_ray.store.corpus import shard_of
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest

SHARDS, K = 3, 7
FIRST = made_views(60, 1)
SECOND = {i: {v: x + (shard_of(i, SHARDS) == 1) for v, x in own.items()} for i, own in FIRST.items()}
"""Shard 1 is another, the other two are those of FIRST."""
QUERIES_QD = np.random.default_rng(5).integers(-2, 3, (12, D)).astype(np.float32)


def run_of(root: Path, run_over, **resources):
    return run_over(root, index={"name": "made"}, resources={"searchers": 2, "cpus_per_searcher": 0.25, **resources})


def expected(views) -> list[list[tuple[str, float, int]]]:
    return [brute_force(views, query_D, K) for query_D in QUERIES_QD]


def answered(live, number: int) -> list[tuple[str, float, int]]:
    return [(hit.passage_id, hit.score, hit.view) for hit in live.search(QUERIES_QD[number : number + 1], K).hits[0]]


def digests(described: Manifest) -> list[str]:
    return sorted(entry.digest for entry in described.shards)


def damage(root: Path, digest: str) -> Path:
    """Put another file, with a byte changed, in the place of a shard's embeddings; mapped ones stay as they are."""
    file = root / layout.shard_dir("made", digest) / layout.EMBEDDINGS
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    shutil.copy(file, file.with_suffix(".whole"))
    file.unlink()
    file.write_bytes(data)
    return file


class Crowd:
    """Many who ask all the time, each the next query as soon as it has an answer."""

    def __init__(self, live: LiveRouter, size: int, truth: dict[int, list[list[tuple[str, float, int]]]]) -> None:
        self.live, self.truth = live, truth
        self.seen: Counter[int] = Counter()
        """Answers by version."""
        self.wrong: list[tuple[int, int]] = []
        self.under_way = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._threads = ThreadPoolExecutor(size)
        self._asking = [self._threads.submit(self._ask, number) for number in range(size)]

    def _ask(self, number: int) -> None:
        while not self._ended.is_set():
            at, number = number % len(QUERIES_QD), number + 1
            with self._lock:
                self.under_way += 1
            answer = self.live.search(QUERIES_QD[at : at + 1], K, timeout_s=120)
            hits = [(hit.passage_id, hit.score, hit.view) for hit in answer.hits[0]]
            right = hits == self.truth[answer.version][at] and answer.exact.certified and answer.coverage_share == 1
            with self._lock:
                self.under_way -= 1
                self.seen[answer.version] += 1
                if not right:
                    self.wrong.append((at, answer.version))

    def until_answered(self, version: int, count: int, under_way: float = 0) -> None:
        """Return when so many more answers came of a version, and so many are under way."""
        enough, end = self.seen[version] + count, time.monotonic() + 120
        while self.seen[version] < enough or self.under_way < under_way:
            failed = [one for one in self._asking if one.done()]
            assert not failed, failed[0].result()
            assert time.monotonic() < end, (self.seen, self.under_way)
            time.sleep(0.01)

    def __enter__(self) -> "Crowd":
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
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
    store, first, size = Store(str(tmp_path)), made_index(tmp_path, FIRST, SHARDS), 1000
    truth = {1: expected(FIRST), 2: expected(SECOND), 3: expected(FIRST), 4: expected(SECOND)}

    def publish_and_follow() -> None:
        made_index(tmp_path, SECOND, SHARDS, parent=1)
        assert live.follow()

    def roll_back_and_follow() -> None:
        manifest.rollback(store, "made", 1)
        assert live.follow()

    def go_back() -> None:
        assert live.move_to(2) == 2
        assert not live.follow()

    def publish_move_and_collect() -> None:
        made_index(tmp_path, SECOND, SHARDS, parent=3)
        assert not live.follow()
        assert live.move_to() == 4
        removed = collect(store, "made", keep=1, grace_s=0)
        assert layout.shard_dir("made", first.shards[1].digest) in removed

    with open_live(run_of(tmp_path, run_over), local=local, follow_s=3600) as live:
        with Crowd(live, size, truth) as crowd:
            under_way = []
            for change in (publish_and_follow, roll_back_and_follow, go_back, publish_move_and_collect):
                crowd.until_answered(live.manifest.version, 200, under_way=0.99 * size)
                under_way.append(crowd.under_way)
                change()
                under_way.append(crowd.under_way)
            crowd.until_answered(4, 200)
        assert crowd.wrong == []
        assert crowd.seen.keys() == {1, 2, 3, 4}
        assert min(under_way) >= 0.95 * size, under_way
        assert live.following == (4, True, 0, "")
        live.ready()
        held = live.searchers.searcher.health() if local else live.searchers.actors
        if not local:
            held = sorted(digest for actor in held for digest in ray.get(actor.health.remote()))
        assert held == digests(live.manifest)
    told = f"{crowd.seen.total()} answers, {min(under_way)} to {max(under_way)} under way at each of 4 changes"
    record_property("figures", told)


def test_a_call_under_way_ends_on_its_version_and_takes_its_shards_along(tmp_path, run_over):
    first, second = made_index(tmp_path, FIRST, SHARDS), made_index(tmp_path, SECOND, SHARDS, parent=1)
    with open_live(run_of(tmp_path, run_over), 1, local=True) as live:
        searcher = live.searchers.searcher
        with live.pinned() as before:
            assert live.move_to(2) == 2
            assert (before.manifest.version, live.manifest.version) == (1, 2)
            assert answered(before, 0) == brute_force(FIRST, QUERIES_QD[0], K)
            assert answered(live, 0) == brute_force(SECOND, QUERIES_QD[0], K)
            assert searcher.health() == sorted({*digests(first), *digests(second)})
            with live.pinned():
                assert live.move_to(1) == 1  # back while it is still open
                assert answered(live, 0) == brute_force(FIRST, QUERIES_QD[0], K)
            assert searcher.health() == digests(first)
        assert searcher.health() == digests(first)
        assert answered(live, 1) == brute_force(FIRST, QUERIES_QD[1], K)


def test_a_version_that_a_call_names_is_opened_beside_and_stays_until_another_is_named(tmp_path, run_over):
    third = {i: {v: -x for v, x in own.items()} for i, own in FIRST.items()}
    views = {1: FIRST, 2: SECOND, 3: third}
    made = {number: made_index(tmp_path, views[number], SHARDS, parent=number - 1) for number in views}
    with open_live(run_of(tmp_path, run_over), local=True) as live:
        searcher = live.searchers.searcher

        def holds(*numbers: int) -> bool:
            return searcher.health() == sorted({digest for number in numbers for digest in digests(made[number])})

        with live.pinned(3) as router, live.pinned() as same:
            assert router is same and holds(3)
        for number, held in ((1, (1, 3)), (1, (1, 3)), (3, (1, 3)), (2, (2, 3))):
            with live.pinned(number) as router:
                assert (router.manifest.version, live.manifest.version) == (number, 3)
                assert answered(router, 0) == brute_force(views[number], QUERIES_QD[0], K)
                assert answered(live, 0) == brute_force(third, QUERIES_QD[0], K)
            assert holds(*held)
        with live.pinned(2) as old, live.pinned(1):
            assert holds(1, 2, 3)
            assert answered(old, 1) == brute_force(SECOND, QUERIES_QD[1], K)
        assert holds(1, 3)
        for move, held in ((1, (1, 3)), (None, (3,)), (2, (2,))):
            live.move_to(move)
            with live.pinned(3 if move == 1 else None):
                assert holds(*held)
        with pytest.raises(MissingInputError, match="4"), live.pinned(4):
            pass
        assert answered(live, 2) == brute_force(SECOND, QUERIES_QD[2], K)


def test_shards_that_both_versions_name_are_not_read_again(tmp_path, run_over):
    first = made_index(tmp_path, FIRST, SHARDS)
    with open_live(run_of(tmp_path, run_over), local=True) as live:
        assert live.dimension == D
        second = made_index(tmp_path, SECOND, SHARDS, parent=1)
        shared = {*digests(first)} & {*digests(second)}
        assert len(shared) == 2
        for digest in shared:
            damage(tmp_path, digest)
        assert live.move_to() == 2
        assert [answered(live, number) for number in range(len(QUERIES_QD))] == expected(SECOND)


@pytest.mark.chaos("no memory for the next version", "refused before a byte is read, with both numbers")
def test_a_version_without_room_is_refused_before_it_is_read(tmp_path, run_over, record_property):
    first = made_index(tmp_path, FIRST, SHARDS)
    added = first.shards[1].num_bytes
    limit = first.num_bytes + added - 1
    with open_live(run_of(tmp_path, run_over, searcher_bytes=limit), local=True) as live:
        second = made_index(tmp_path, SECOND, SHARDS, parent=1)
        assert second.shards[1].num_bytes == added
        damage(tmp_path, second.shards[1].digest)
        both = re.escape(f"holds {first.num_bytes:,} bytes and needs {added:,} more, {limit + 1:,} in all; ")
        with pytest.raises(ResourceError, match=rf"'made' version 2 .*{both}.*searcher_bytes allows {limit:,}"):
            live.move_to()
        assert answered(live, 0) == brute_force(FIRST, QUERIES_QD[0], K)
    record_property("figures", f"{first.num_bytes:,} bytes held, {added:,} more needed, {limit:,} allowed: 1 too few")


def test_the_same_files_indexed_otherwise_need_their_room_again(tmp_path, run_over):
    first = made_index(tmp_path, FIRST, SHARDS)
    twice = 2 * first.num_bytes
    for limit in (twice - 1, twice):
        with open_live(run_of(tmp_path, run_over, searcher_bytes=limit), 1, local=True) as live:
            if limit < twice:
                other = made_index(tmp_path, FIRST, SHARDS, IndexParams(nprobe=7), parent=1)
                assert digests(other) == digests(first)
                with pytest.raises(ResourceError, match=f"needs {first.num_bytes:,} more, {twice:,} in all"):
                    live.move_to()
            else:
                assert live.move_to() == 2
            assert [answered(live, number) for number in range(len(QUERIES_QD))] == expected(FIRST)


@pytest.mark.chaos("next version damaged", "not moved to until whole; the live version goes on")
def test_a_damaged_version_is_not_moved_to_until_it_is_whole_again(tmp_path, run_over, record_property):
    made_index(tmp_path, FIRST, SHARDS)
    with open_live(run_of(tmp_path, run_over), local=True, follow_s=3600) as live:
        second = made_index(tmp_path, SECOND, SHARDS, parent=1)
        file = damage(tmp_path, second.shards[1].digest)
        with pytest.raises(DigestError, match="shard 1"):
            live.move_to()
        assert not live.follow()
        assert live.following[:3] == (1, True, 2) and str(file) in live.following.failure
        assert answered(live, 0) == brute_force(FIRST, QUERIES_QD[0], K)
        assert live.searchers.searcher.health() == digests(live.manifest)
        file.with_suffix(".whole").replace(file)
        assert live.follow()
        assert live.following == (2, True, 0, "")
        assert answered(live, 0) == brute_force(SECOND, QUERIES_QD[0], K)
        with pytest.raises(MissingInputError, match="no version 9"):
            live.move_to(9)
        assert answered(live, 0) == brute_force(SECOND, QUERIES_QD[0], K)
    record_property("figures", "2 moves refused, 3 answers right, moved at the first look after the repair")


def test_a_follower_finds_what_is_published_by_itself(tmp_path, run_over):
    made_index(tmp_path, FIRST, SHARDS)
    moved = threading.Event()
    with open_live(run_of(tmp_path, run_over), local=True) as live:
        follow = live.follow

        def told() -> bool:
            if follow():
                moved.set()
            return moved.is_set()

        live.follow = told
        with live.followed(0.01):
            made_index(tmp_path, SECOND, SHARDS, parent=1)
            assert moved.wait(30)
        assert answered(live, 0) == brute_force(SECOND, QUERIES_QD[0], K)


def test_a_first_version_with_a_damaged_shard_answers_from_the_others(tmp_path, run_over):
    first = made_index(tmp_path, FIRST, SHARDS)
    file = damage(tmp_path, first.shards[2].digest)
    with open_live(run_of(tmp_path, run_over), local=True) as live:
        with pytest.raises(DamagedShardsError, match=r"1 of 3 .*: 2 \(damaged\); .*versions CONFIG repair") as refused:
            live.search(QUERIES_QD, K)
        answer = live.search(QUERIES_QD, K, min_coverage=0.5)
        assert answer.shards == refused.value.shards
        assert [shard.state for shard in answer.shards] == ["searched", "searched", "damaged"]
        assert str(file) in answer.shards[2].reason and not answer.exact.certified
        there = {i: own for i, own in FIRST.items() if shard_of(i, SHARDS) != 2}
        for query_D, hits in zip(QUERIES_QD, answer.hits):
            assert [(hit.passage_id, hit.score, hit.view) for hit in hits] == brute_force(there, query_D, K)
        lost = next(i for i in FIRST if shard_of(i, SHARDS) == 2)
        with pytest.raises(DamagedShardsError, match=re.escape(str(file))):
            live.explain(QUERIES_QD, [lost])
        file.with_suffix(".whole").replace(file)
        live.ready()
        assert live.search(QUERIES_QD, K).exact.certified


@pytest.mark.chaos("searcher killed while it opens the next version", "the live version goes on; the reason is told")
@pytest.mark.ray
def test_a_searcher_that_dies_while_a_version_is_opened_leaves_the_live_one(
    tmp_path, run_over, ray_session, record_property
):
    made_index(tmp_path, FIRST, SHARDS)
    with open_live(run_of(tmp_path, run_over), canary_s=3600) as live:
        second = made_index(tmp_path, SECOND, SHARDS, parent=1)
        actor = live.searchers.actors[0]
        os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        with pytest.raises(ResourceError, match="opening index 'made' version 2 stopped"):
            live.move_to()
        live.ready()
        assert answered(live, 0) == brute_force(FIRST, QUERIES_QD[0], K)
        file = damage(tmp_path, second.shards[1].digest)
        with pytest.raises(DigestError, match="shard 1"):
            live.move_to()
        assert answered(live, 1) == brute_force(FIRST, QUERIES_QD[1], K)
        file.with_suffix(".whole").replace(file)
        assert live.move_to() == 2
        os.kill(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        began = time.monotonic()
        live.ready()  # started with version 1, it comes back with version 2
        record_property("figures", f"killed twice; back with version 2 in {time.monotonic() - began:.1f} s")
        assert [answered(live, number) for number in range(len(QUERIES_QD))] == expected(SECOND)


@pytest.mark.chaos("shard damaged at rest", "told as damaged with its file; the others answer where that is allowed")
@pytest.mark.ray
def test_a_damaged_shard_is_told_by_actors_and_refused_when_a_router_is_opened(
    tmp_path, run_over, ray_session, record_property
):
    first = made_index(tmp_path, FIRST, SHARDS)
    damage(tmp_path, first.shards[0].digest)
    with pytest.raises(DigestError, match="shard 0"), open_router(run_of(tmp_path, run_over)):
        pass
    with open_live(run_of(tmp_path, run_over), canary_s=3600) as live:
        answer = live.search(QUERIES_QD, K, min_coverage=0.0)
        assert [shard.state for shard in answer.shards] == ["damaged", "searched", "searched"]
        record_property("figures", f"{answer.passages_searched} of {answer.passages_total} passages searched and told")


@pytest.mark.chaos("searcher stopped by a signal while a call waits", "killed and started again; the call ends")
@pytest.mark.ray
def test_a_searcher_that_hangs_is_replaced_while_a_call_waits_for_it(tmp_path, run_over, ray_session, record_property):
    made_index(tmp_path, FIRST, SHARDS)
    with open_live(run_of(tmp_path, run_over, hung_s=2), canary_s=0.2) as live:
        actor = live.searchers.actors[0]
        actor.__ray_call__.remote(lambda _: threading.Event().wait())
        began = time.monotonic()
        with pytest.raises(CoverageError, match=r"of 3 shards .* \(hung\)"):
            live.search(QUERIES_QD, K, timeout_s=120)
        took_s = time.monotonic() - began
        live.ready()
        whole_s = time.monotonic() - began
        record_property("figures", f"the call ended after {took_s:.1f} s (hung_s=2), all whole after {whole_s:.1f} s")
        assert [answered(live, number) for number in range(len(QUERIES_QD))] == expected(FIRST)
