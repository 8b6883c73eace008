"""Checks that a shard whose bytes change under a searcher is withdrawn, and answers again once it is repaired."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from random_index import D, publish_random_index, random_views

from mvr_ray.config import PrepareConfig, SourceConfig
from mvr_ray.distributed.router import Router
from mvr_ray.distributed.searching.scrubber import FIRST_RETRY_S, Scrubber
from mvr_ray.distributed.searching.searcher import LocalSearchers, SearcherTask
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.local_files import SETTLED_NS
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.prepare import prepare
from mvr_ray.types import HybridQueries

WHOLE_PASS = 1 << 40
"""Bytes a second that are more than any shard has."""


@pytest.fixture
def version(tmp_path: Path) -> Manifest:
    return publish_random_index(tmp_path, random_views(60, seed=1), num_shards=3)


def overwrite(file: Path) -> bytes:
    """Change bytes in the middle of a file, in its place; gives those that it had."""
    whole = file.read_bytes()
    file.chmod(0o644)
    with file.open("r+b") as open_file:
        open_file.seek(len(whole) // 2)
        open_file.write(bytes(255 - byte for byte in whole[len(whole) // 2 :][:64]))
    return whole


def small_corpus(root: Path, passages: dict[str, str]) -> Corpus:
    source = root / "passages.jsonl"
    rows = ({"id": name, "title": "", "text": text} for name, text in passages.items())
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    cfg = PrepareConfig(num_shards=3, sources=[SourceConfig(path=str(source))])
    prepare(cfg, store := Store(str(root)))
    return Corpus.open(store, cfg.corpus)


def states(router: Router, queries_QD: np.ndarray) -> tuple[list[str], bool]:
    answer = router.search(queries_QD, 5, min_coverage=0)
    return [shard.state for shard in answer.shards], answer.exact.certified


def test_a_shard_that_was_overwritten_under_a_searcher_is_withdrawn_and_reopened_when_repaired(
    tmp_path: Path, version: Manifest
):
    """Overwrites the file in place, in spite of its permissions."""
    task = SearcherTask(str(tmp_path), version)
    searchers = LocalSearchers(task)
    searcher = searchers.searcher
    router, scrubber = Router(Store(tmp_path), version, searchers), Scrubber(searcher, WHOLE_PASS)
    queries_QD = np.eye(2, D, dtype=np.float32)
    router.ready()
    before = router.search(queries_QD, 5)
    scrubber.scrub(0.0)
    assert states(router, queries_QD) == (["searched"] * 3, True)
    entry = version.shards[1]
    file = tmp_path / paths.shard_dir("random", entry.digest) / paths.EMBEDDINGS
    whole = overwrite(file)
    os.utime(file, (1, 1))
    scrubber.scrub(1.0)
    assert states(router, queries_QD) == (["searched", "damaged", "searched"], False)
    scrubber.scrub(1.0 + FIRST_RETRY_S)
    assert states(router, queries_QD)[0][1] == "damaged", "the bytes differ still"
    repaired_file = file.with_name("repaired")
    repaired_file.write_bytes(whole)
    repaired_file.replace(file)
    scrubber.scrub(2.0 + 4 * FIRST_RETRY_S)
    after = router.search(queries_QD, 5)
    assert (after.hits, after.exact.certified, after.coverage_share) == (before.hits, True, 1.0)
    scrubber.scrub(3.0 + 4 * FIRST_RETRY_S)
    assert states(router, queries_QD) == (["searched"] * 3, True), "what is read again is the file that is open now"


def test_a_shard_that_was_damaged_before_it_was_opened_answers_once_it_is_whole(tmp_path: Path, version: Manifest):
    entry = version.shards[0]
    file = tmp_path / paths.shard_dir("random", entry.digest) / paths.EMBEDDINGS
    moved_file = file.rename(file.with_name("kept"))
    task = SearcherTask(str(tmp_path), version)
    searchers = LocalSearchers(task)
    searcher = searchers.searcher
    router, scrubber = Router(Store(tmp_path), version, searchers), Scrubber(searcher, 0)
    queries_QD = np.eye(2, D, dtype=np.float32)
    assert states(router, queries_QD)[0] == ["damaged", "searched", "searched"]
    for now_s in (0.0, FIRST_RETRY_S):
        scrubber.scrub(now_s)
    moved_file.rename(file)
    scrubber.scrub(2 * FIRST_RETRY_S)
    assert states(router, queries_QD)[0][0] == "damaged", "the pause has doubled"
    scrubber.scrub(3 * FIRST_RETRY_S)
    assert states(router, queries_QD) == (["searched"] * 3, True)
    searcher.drop(version.version)
    assert searcher.damaged_keys() == []


def test_words_that_were_overwritten_under_a_searcher_are_withdrawn_and_taken_up_again_when_repaired(tmp_path: Path):
    """Answers by views alone stay certified; postings belong to one shard, statistics to all."""
    views = random_views(60, seed=1)
    passages = {name: f"harbour {'castle ' * (number % 5)}" for number, name in enumerate(sorted(views))}
    corpus = small_corpus(tmp_path, passages)
    version = publish_random_index(tmp_path, views, num_shards=3, corpus=corpus, words="english")
    task = SearcherTask(str(tmp_path), version)
    searchers = LocalSearchers(task)
    searcher = searchers.searcher
    router, scrubber = Router(Store(tmp_path), version, searchers), Scrubber(searcher, WHOLE_PASS)
    queries_QD, by_words = np.eye(2, D, dtype=np.float32), HybridQueries(("castle", "harbour castle"), 0.5)
    router.ready()
    before = router.search(queries_QD, 5, hybrid=by_words)
    assert version.lexical and before.exact.certified
    now_s = 0.0
    for entry, damaged_shards in ((version.lexical.postings[1][0], {1}), (version.lexical.statistics[0], {0, 1, 2})):
        file = tmp_path / manifest.lexical_path("random", entry)
        whole = overwrite(file)
        scrubber.scrub(now_s)
        for _ in range(2):  # it is not reopened while the bytes differ
            answer = router.search(queries_QD, 5, hybrid=by_words, min_coverage=0)
            assert {shard.shard for shard in answer.shards if shard.state == "damaged"} == damaged_shards
            assert not answer.exact.certified
            assert states(router, queries_QD) == (["searched"] * 3, True)
            scrubber.scrub(now_s := now_s + FIRST_RETRY_S)
        repaired_file = file.with_name("repaired")
        repaired_file.write_bytes(whole)
        repaired_file.replace(file)
        scrubber.scrub(now_s := now_s + 4 * FIRST_RETRY_S)
        after = router.search(queries_QD, 5, hybrid=by_words)
        assert (after.hits, after.exact.certified, after.coverage_share) == (before.hits, True, 1.0)
    searcher.drop(version.version)
    assert searcher.open_files() == {} and searcher.damaged_keys() == []


def test_a_shard_stays_withdrawn_whose_changed_file_has_the_time_and_size_that_it_had(
    tmp_path: Path, version: Manifest
):
    """This is how a disk loses bytes. Digests of settled files are cached by time and size."""
    entry = version.shards[1]
    file = tmp_path / paths.shard_dir("random", entry.digest) / paths.EMBEDDINGS
    long_ago = time.time_ns() - 10 * SETTLED_NS
    os.utime(file, ns=(long_ago, long_ago))
    task = SearcherTask(str(tmp_path), version)
    searchers = LocalSearchers(task)
    searcher = searchers.searcher
    router, scrubber = Router(Store(tmp_path), version, searchers), Scrubber(searcher, WHOLE_PASS)
    queries_QD = np.eye(2, D, dtype=np.float32)
    router.ready()
    overwrite(file)
    os.utime(file, ns=(long_ago, long_ago))
    for number in range(4):
        scrubber.scrub(number * FIRST_RETRY_S)
        assert states(router, queries_QD) == (["searched", "damaged", "searched"], False)


def test_no_more_is_read_in_a_second_than_is_allowed(tmp_path: Path, version: Manifest):
    """A pass continues where the previous second ended."""
    task = SearcherTask(str(tmp_path), version)
    searchers = LocalSearchers(task)
    searcher = searchers.searcher
    searchers.ready(version)
    entry = version.shards[2]
    file = tmp_path / paths.shard_dir("random", entry.digest) / paths.EMBEDDINGS
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    scrubber = Scrubber(searcher, 1)
    num_files = sum(len(one.files) for one in version.shards)
    seconds = 0
    while not searcher.damaged_keys():
        scrubber.scrub(0.0)
        seconds += 1
    assert num_files / 2 < seconds <= num_files + 1


def test_files_of_a_version_that_was_dropped_do_not_stay_open(tmp_path: Path, version: Manifest):
    """Deleted files would keep their disk space until the pass ends, which takes hours over a large index."""
    task = SearcherTask(str(tmp_path), version)
    searchers = LocalSearchers(task)
    searcher = searchers.searcher
    searchers.ready(version)
    scrubber = Scrubber(searcher, 1)
    scrubber.scrub(0.0)

    def open_paths() -> list[str]:
        links = (file for file in Path("/proc/self/fd").iterdir() if file.is_symlink())
        return [path for path in map(os.readlink, links) if path.startswith(str(tmp_path))]

    assert open_paths()
    searcher.drop(version.version)
    scrubber.scrub(1.0)
    end = time.monotonic() + 30
    while open_paths() and time.monotonic() < end:  # the thread that opened the last shard may still hold its result
        time.sleep(0.01)
    assert open_paths() == []
