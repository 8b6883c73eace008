"""Checks that a shard whose bytes change under a searcher is withdrawn, and answers again once it is repaired."""

import os
from pathlib import Path

import numpy as np
import pytest
from random_index import D, publish_random_index, random_views

from mvr_ray.distributed.router import Router
from mvr_ray.distributed.searching.scrubber import FIRST_RETRY_S, Scrubber
from mvr_ray.distributed.searching.searcher import LocalFleet, SearcherTask, ShardSearcher
from mvr_ray.store import paths
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest

WHOLE_PASS = 1 << 40
"""Bytes a second that are more than any shard has."""


@pytest.fixture
def version(tmp_path: Path) -> Manifest:
    return publish_random_index(tmp_path, random_views(60, seed=1), num_shards=3)


def states(router: Router, queries_QD: np.ndarray) -> tuple[list[str], bool]:
    answer = router.search(queries_QD, 5, min_coverage=0)
    return [shard.state for shard in answer.shards], answer.exact.certified


def test_a_shard_that_was_overwritten_under_a_searcher_is_withdrawn_and_taken_up_again_when_repaired(
    tmp_path: Path, version: Manifest
):
    """Overwritten in its place, and through a file system that does not heed the rights."""
    task = SearcherTask(str(tmp_path), version, tuple(entry.shard for entry in version.shards))
    searcher = ShardSearcher(task)
    router, scrubber = Router(Store(tmp_path), version, LocalFleet(task, searcher)), Scrubber(searcher, WHOLE_PASS)
    queries_QD = np.eye(2, D, dtype=np.float32)
    router.ready()
    before = router.search(queries_QD, 5)
    scrubber.look(0.0)
    assert states(router, queries_QD) == (["searched"] * 3, True)
    entry = version.shards[1]
    file = tmp_path / paths.shard_dir("random", entry.digest) / paths.EMBEDDINGS
    whole = file.read_bytes()
    file.chmod(0o644)
    with file.open("r+b") as open_file:
        open_file.seek(len(whole) // 2)
        open_file.write(bytes(255 - byte for byte in whole[len(whole) // 2 :][:64]))
    os.utime(file, (1, 1))
    scrubber.look(1.0)
    assert states(router, queries_QD) == (["searched", "damaged", "searched"], False)
    scrubber.look(1.0 + FIRST_RETRY_S)
    assert states(router, queries_QD)[0][1] == "damaged", "the bytes differ still"
    repaired = file.with_name("repaired")
    repaired.write_bytes(whole)
    repaired.replace(file)
    scrubber.look(2.0 + 4 * FIRST_RETRY_S)
    after = router.search(queries_QD, 5)
    assert (after.hits, after.exact.certified, after.coverage_share) == (before.hits, True, 1.0)
    scrubber.look(3.0 + 4 * FIRST_RETRY_S)
    assert states(router, queries_QD) == (["searched"] * 3, True), "what is read again is the file that is open now"


def test_a_shard_that_was_damaged_before_it_was_opened_answers_once_it_is_whole(tmp_path: Path, version: Manifest):
    entry = version.shards[0]
    file = tmp_path / paths.shard_dir("random", entry.digest) / paths.EMBEDDINGS
    kept = file.rename(file.with_name("kept"))
    task = SearcherTask(str(tmp_path), version, tuple(entry.shard for entry in version.shards))
    searcher = ShardSearcher(task)
    router, scrubber = Router(Store(tmp_path), version, LocalFleet(task, searcher)), Scrubber(searcher, 0)
    queries_QD = np.eye(2, D, dtype=np.float32)
    assert states(router, queries_QD)[0] == ["damaged", "searched", "searched"]
    for now_s in (0.0, FIRST_RETRY_S):
        scrubber.look(now_s)
    kept.rename(file)
    scrubber.look(2 * FIRST_RETRY_S)
    assert states(router, queries_QD)[0][0] == "damaged", "the pause has doubled"
    scrubber.look(3 * FIRST_RETRY_S)
    assert states(router, queries_QD) == (["searched"] * 3, True)
    searcher.drop(version.version)
    assert searcher.damaged_keys() == []


def test_no_more_is_read_in_a_second_than_is_allowed(tmp_path: Path, version: Manifest):
    """A pass goes on where the second before it ended."""
    task = SearcherTask(str(tmp_path), version, tuple(entry.shard for entry in version.shards))
    searcher = ShardSearcher(task)
    searcher.open()
    entry = version.shards[2]
    file = tmp_path / paths.shard_dir("random", entry.digest) / paths.EMBEDDINGS
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    scrubber = Scrubber(searcher, 1)
    num_files = sum(len(one.files) for one in version.shards)
    seconds = 0
    while not searcher.damaged_keys():
        scrubber.look(0.0)
        seconds += 1
    assert num_files / 2 < seconds <= num_files + 1
