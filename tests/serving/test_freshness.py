"""Checks that a server knows how old the changes are that it does not answer from yet."""

import json
import os
import time
from pathlib import Path

import pytest
from version_store import manifest_of

from mvr_ray.config import FollowConfig, PrepareConfig, SourceConfig
from mvr_ray.serving.freshness import FreshnessMonitor
from mvr_ray.serving.metrics import Metrics
from mvr_ray.store import paths
from mvr_ray.store.change_files import Backlog, apply_batch, list_change_files
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import FileEntry, Manifest, ShardEntry
from mvr_ray.store.prepare import prepare
from mvr_ray.store.update import update

SLACK_S = 60
"""What a test may take, of ages that are hours apart."""
CONFIG = PrepareConfig(corpus="books", num_shards=1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (tmp_path / "source").mkdir()
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "text": "one"}\n')
    store = Store(tmp_path / "store")
    prepare(CONFIG.model_copy(update={"sources": [SourceConfig(path=str(tmp_path / "rows.jsonl"))]}), store)
    return store


def version_of_now(store: Store) -> Manifest:
    entry = ShardEntry(0, "0" * 32, 1, 1, {"x": FileEntry(1, "0" * 64)})
    return manifest_of((entry,), 0, Corpus.open(store, "books").digest)


def write_change(folder: Path, name: str, hours: float, text: str = "") -> None:
    content = text or json.dumps({"id": "a", "text": name}) + "\n"
    (folder / "source" / name).write_text(content)
    changed_s = time.time() - 3600 * hours
    os.utime(folder / "source" / name, (changed_s, changed_s))


def apply_all(store: Store, folder: Path) -> None:
    source = Store(folder / "source")
    corpus, listing = Corpus.open(store, "books"), list_change_files(source)
    apply_batch(corpus, CONFIG, source, Backlog.of(listing, corpus.info.change_files).waiting, listing)


def ages(store: Store, version: Manifest, source: Path | None) -> tuple[float, float, int]:
    """Ages in hours, and files."""
    monitor = FreshnessMonitor(store, FollowConfig(source=source and str(source)), lambda: version)
    assert monitor.measure() is None
    monitor.update()
    freshness = monitor.measure()
    assert freshness is not None
    seconds = freshness.oldest_change_s, freshness.newest_passage_s
    assert all(age % 3600 < SLACK_S for age in seconds)
    return seconds[0] // 3600, seconds[1] // 3600, freshness.waiting_files


def test_the_oldest_change_that_no_answer_knows_ages_until_a_version_with_it_answers(store: Store, tmp_path: Path):
    source = tmp_path / "source"
    before = version_of_now(store)
    assert ages(store, before, source) == (0, 0, 0)
    write_change(tmp_path, "1.jsonl", hours=5)
    write_change(tmp_path, "2.jsonl", hours=3)
    write_change(tmp_path, "3.jsonl", hours=9, text="{")
    assert ages(store, before, source) == (9, 0, 3)
    apply_all(store, tmp_path)
    assert ages(store, before, source) == (5, 0, 2), "one that can never be answered from is not waited for"
    assert ages(store, before, None) == (5, 0, 2), "the last corpus tells of files, too"
    now = version_of_now(store)
    assert ages(store, now, source) == (0, 3, 0)
    write_change(tmp_path, "4.jsonl", hours=2)
    assert ages(store, now, source) == (2, 3, 1)
    assert ages(store, before, source) == (5, 0, 3), "as after a roll back"


def test_an_update_after_change_files_is_the_newest_change_and_versions_over_its_corpus_are_none(
    store: Store, tmp_path: Path
):
    write_change(tmp_path, "1.jsonl", hours=5)
    apply_all(store, tmp_path)
    assert ages(store, version_of_now(store), tmp_path / "source") == (0, 5, 0)
    (tmp_path / "update.jsonl").write_text('{"id": "a", "text": "updated"}\n')
    update(CONFIG, store, str(tmp_path / "update.jsonl"))
    publication = tmp_path / "store" / "corpora" / "books" / "publications" / "3.json"
    os.utime(publication, (time.time() - 2 * 3600,) * 2)
    version = version_of_now(store)
    store.touch(paths.corpus_version("books", version.corpus_digest))  # as each publication of a version does
    assert ages(store, version, tmp_path / "source") == (0, 2, 0)


def test_a_change_of_a_clock_that_is_ahead_is_new(store: Store, tmp_path: Path):
    write_change(tmp_path, "1.jsonl", hours=-5)
    assert ages(store, version_of_now(store), tmp_path / "source") == (0, 0, 1)


def test_a_corpus_that_was_prepared_and_not_indexed_is_a_change(store: Store, tmp_path: Path):
    before = version_of_now(store)
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "text": "two"}\n')
    prepare(CONFIG.model_copy(update={"sources": [SourceConfig(path=str(tmp_path / "rows.jsonl"))]}), store)
    publication = tmp_path / "store" / "corpora" / "books" / "publications" / "2.json"
    os.utime(publication, (time.time() - 4 * 3600,) * 2)
    assert ages(store, before, None) == (4, 0, 0)
    assert ages(store, version_of_now(store), None)[0] == 0


def test_a_source_that_cannot_be_listed_leaves_the_last_times_and_metrics_show_them(store: Store, tmp_path: Path):
    version = version_of_now(store)
    write_change(tmp_path, "1.jsonl", hours=5)
    monitor = FreshnessMonitor(store, FollowConfig(source=str(tmp_path / "source")), lambda: version)
    metrics = Metrics()
    metrics.add_freshness(monitor)
    assert b"\nmvr_ray_oldest_change_seconds" not in metrics.text()
    monitor.update()
    (tmp_path / "source").rename(tmp_path / "moved")
    monitor.update()
    values = dict(line.split(" ") for line in metrics.text().decode().splitlines() if not line.startswith("#"))
    assert float(values["mvr_ray_oldest_change_seconds"]) == pytest.approx(5 * 3600, abs=SLACK_S)
    assert float(values["mvr_ray_newest_passage_seconds"]) < SLACK_S
    assert float(values["mvr_ray_waiting_change_files"]) == 1


def test_a_change_that_changes_no_passage_is_answered_by_the_version_before(store: Store, tmp_path: Path):
    version = version_of_now(store)
    monitor = FreshnessMonitor(store, FollowConfig(source=str(tmp_path / "source")), lambda: version)
    write_change(tmp_path, "1.jsonl", hours=5, text='{"id": "a", "text": "one"}\n')
    for waiting in (1, 0):
        monitor.update()
        assert monitor.measure().waiting_files == waiting
        apply_all(store, tmp_path)


def test_descriptions_of_corpora_are_read_once_until_another_one_is_published(store: Store, monkeypatch):
    version, reads = version_of_now(store), list[str]()
    read = Store.read_bytes
    monkeypatch.setattr(Store, "read_bytes", lambda self, path: (reads.append(path), read(self, path))[1])
    monitor = FreshnessMonitor(store, FollowConfig(), lambda: version)
    monitor.update()
    assert reads
    reads.clear()
    monitor.update()
    assert not reads
    corpus = Corpus.open(store, "books")
    corpus.publish(corpus.number)
    reads.clear()
    monitor.update()
    assert {Path(path).parent.name for path in reads} == {"publications", "versions"}
