"""A power failure after any call: what was acknowledged is whole, and the same work goes on.

A history of one process is recorded on a disk that forgets what was not synced (`volatile_disk`); the model of the
other histories judges what is left. Controls leave out syncs, and must be found.
"""

import contextlib
import copy
import errno
import itertools
import os
import random
import shutil
from collections.abc import Iterable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import NamedTuple

import pytest
import sweep
from drafts import describe, make_shard
from model import CORPUS, INDEX, SHARDS, History
from volatile_disk import SYNCS, DiskRecorder, ProcessKill

from mvr_ray.errors import MvrRayError, StorageError
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.gc import collect
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.prepare import prepare
from mvr_ray.versions import verify

WORK = ("update", "index", "update", "index whole", "compact", "reshard", "rollback", "collect")
FIRST, _, LAST = os.environ.get("MVR_RAY_HISTORIES", "").partition(":")
SLOW_SEEDS = range(int(FIRST), int(LAST)) if LAST else range(1, 9)


class Acknowledgment(NamedTuple):
    """What the store had acknowledged to the program by a time."""

    time: int
    is_prepared: bool
    versions: dict[int, Manifest]
    updates: list[str]


class RecordedHistory(History):
    """One process at work on a disk that forgets; it is killed at some calls, and does the same again."""

    def __init__(self, folder: Path, seed: int, syncs: frozenset[str], num_kills: int = 2) -> None:
        self.disk = DiskRecorder(folder / "store", syncs)
        self.history = [Acknowledgment(0, False, {}, [])]
        self.is_prepared = False
        with self.disk.recording():
            super().__init__(folder, str(self.disk.root), seed, frozenset())
            for _ in range(2):
                work = [*WORK[:2], *self.draw.sample(WORK[2:], len(WORK) - 2)]
                kills = set(self.draw.sample(range(len(work)), num_kills // 2))
                for number, what in enumerate(work):
                    self.disk.kill_at = self.disk.now + self.draw.randint(1, 60) if number in kills else float("inf")
                    with contextlib.suppress(ProcessKill):
                        self._act(what)
                    self.disk.kill_at = float("inf")
                    if number in kills:
                        self._act(what)

    def _act(self, what: str) -> None:
        store = Store(self.address)
        match what:
            case "update":
                self.update(store)
            case "index" | "index whole":
                self.index(store, whole=what == "index whole")
            case "collect":
                collect(store, INDEX, keep=2, grace_s=0.0)
            case _:
                self.keep(store, what)
        self._note()

    def index(self, store: Store, whole: bool) -> None:
        if not self.is_prepared:
            self.is_prepared = True
            self._note()
        super().index(store, whole)

    def _note(self) -> None:
        self.history.append(
            Acknowledgment(self.disk.now, True, dict(self.acknowledgments), list(self.acknowledged_updates))
        )

    def judge(self, time: int, draw: random.Random, folder: Path) -> None:
        """Judge what a power failure after call number `time` may leave; raises what is wrong with it."""
        self.disk.write_state(time, draw, folder)
        acknowledgment = [one for one in self.history if one.time <= time][-1]
        after = copy.copy(self)
        after.address, after.draw, after.history = str(folder), draw, []
        after.changes, after.answers = dict(self.changes), []
        after.acknowledgments, after.acknowledged_updates = dict(acknowledgment.versions), list(acknowledgment.updates)
        store = Store(folder)
        if acknowledgment.is_prepared:
            for shard in range(SHARDS):
                Corpus.open(store, CORPUS).part(shard)
        for number in manifest.list_versions(store, INDEX):
            problems = [
                one for one in verify(store, manifest.read(store, INDEX, number)).problems if "encoder" not in one.path
            ]
            assert not problems, f"version {number} is there and not whole: {problems[0]}"
        if not acknowledgment.versions:
            prepare(self.config, store)
            after.index(store, whole=True)
        collect(store, INDEX, keep=2, grace_s=0.0)
        after._judge_end()


def losses(history: RecordedHistory, seed: int, failures: Iterable[int], folder: Path) -> list[str]:
    """What was wrong after power failures at moments that follow from the seed."""
    problems = []
    for number in failures:
        draw = random.Random(f"{seed} {number}")
        time, place = draw.randint(0, history.disk.now), folder / f"after-{seed}-{number}"
        try:
            history.judge(time, draw, place)
        except (AssertionError, MvrRayError) as error:
            problems.append(f"seed {seed}, failure {number} after call {time}: {error!r}")
        shutil.rmtree(place)
    return problems


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is judged lies on a disk that does not fail, so nothing has to wait for it."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


def test_what_was_acknowledged_survives_a_power_failure_after_any_call(tmp_path, no_waiting):
    history = RecordedHistory(tmp_path / "0", 0, SYNCS)
    assert losses(history, 0, range(25), tmp_path) == []


@pytest.mark.parametrize("syncs", [(), ("file",), ("folder",)], ids=["no sync", "of files alone", "of folders alone"])
def test_a_power_failure_is_found_to_lose_work_where_syncs_are_left_out(tmp_path, no_waiting, syncs):
    """The control: a store that did not sync its files, or its folders, would be found."""
    history = RecordedHistory(tmp_path / "0", 0, frozenset(syncs))
    assert len(losses(history, 0, range(8), tmp_path)) >= 2


@pytest.mark.slow
@pytest.mark.chaos(
    "power failure: of what was not synced, any part is lost or torn (bytes, names, moves, deletions)",
    "every acknowledged corpus and version is whole, nothing torn is taken for whole, the same work goes on",
)
@pytest.mark.parametrize("seed", SLOW_SEEDS)
def test_what_was_acknowledged_survives_many_power_failures(tmp_path, no_waiting, seed, record_property):
    history = RecordedHistory(tmp_path / "0", seed, SYNCS)
    failures = sweep.take(range(150))
    assert losses(history, seed, failures, tmp_path) == []
    control = len(losses(RecordedHistory(tmp_path / "1", seed, frozenset()), seed, range(20), tmp_path))
    record_property(
        "figures",
        f"seed {seed}: {len(failures)} failures within {history.disk.now} calls, nothing lost; "
        f"without fsync {control} of 20 lost",
    )
    assert control


def test_work_that_was_killed_at_any_call_and_done_again_survives_a_power_failure(tmp_path, no_waiting):
    """What a killed process named and did not sync is found by the next one, which acknowledges it."""
    problems = []
    for at in itertools.count(1):
        folder = tmp_path / str(at)
        disk = DiskRecorder(folder / "store")
        with disk.recording():
            disk.kill_at = at
            try:
                publish_shard(Store(disk.root), b"content")
                break
            except ProcessKill:
                disk.kill_at = inf
            version = publish_shard(Store(disk.root), b"content")
        disk.write_state(disk.now, None, folder / "after")
        after = Store(folder / "after")
        try:
            assert manifest.read(after, "i") == version
            manifest.verify(after, version).require()
        except (AssertionError, MvrRayError) as error:
            problems.append(f"killed at call {at}: {error!r}")
    assert problems == [] and at > 20


def test_a_version_that_a_power_failure_brings_back_after_collection_is_whole(tmp_path, no_waiting):
    disk = DiskRecorder(tmp_path / "store")
    store = Store(disk.root)
    with disk.recording():
        for content in (b"content", b"changed"):
            publish_shard(store, content)
        start = disk.now
        assert len(collect(store, "i", keep=1, grace_s=0.0)) == 2
    for time, number in itertools.product(range(start, disk.now + 1), range(20)):
        after = Store(tmp_path / f"after-{time}-{number}")
        disk.write_state(time, random.Random(number), Path(after.root))
        for version in manifest.list_versions(after, "i"):
            manifest.verify(after, manifest.read(after, "i", version)).require()


def test_a_version_whose_name_cannot_be_synced_is_not_acknowledged(tmp_path, monkeypatch):
    store = Store(tmp_path / "store")
    first = publish_shard(store, b"content")
    versions, sync = (tmp_path / "store" / paths.index_dir("i", "versions")).stat().st_ino, os.fsync

    def fail(handle: int) -> None:
        if os.fstat(handle).st_ino == versions:
            raise OSError(errno.EIO, "Input/output error")
        sync(handle)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match=r"whether .* was published is not known"):
        manifest.publish(store, replace(first, parent=1))


def publish_shard(store: Store, content: bytes) -> Manifest:
    with store.scratch() as folder:
        entry = make_shard(store, folder / "shard", content)
    return manifest.publish(store, describe([entry], manifest.latest_version(store, "i")))
