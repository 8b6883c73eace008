"""Checks that the benchmark of updates counts bytes of new files alone, and makes changes that lie everywhere."""

import time
from collections import Counter
from pathlib import Path

import pytest
import updates
from measure import sampling
from updates import LOOK_S, Corpora, WrittenBytes

from mvr_ray.store.corpus import shard_of


def test_bytes_of_new_files_count_once_and_linked_ones_not(tmp_path: Path):
    (tmp_path / "old").write_bytes(b"x" * 1000)
    with sampling(WrittenBytes(tmp_path), LOOK_S) as writes:
        (tmp_path / "linked").hardlink_to(tmp_path / "old")
        (tmp_path / "new").write_bytes(b"x" * 300)
        (tmp_path / "new").rename(tmp_path / "renamed")
        with (tmp_path / "old").open("ab") as file:
            file.write(b"x" * 20)
    assert writes.num_bytes == 320


def test_bytes_of_a_file_that_goes_again_count(tmp_path: Path):
    with sampling(WrittenBytes(tmp_path), LOOK_S) as writes:
        (tmp_path / "scratch").write_bytes(b"x" * 500)
        until = time.monotonic() + 10
        while 500 not in writes.most.values() and time.monotonic() < until:
            pass
        (tmp_path / "scratch").unlink()
    assert writes.num_bytes == 500


@pytest.fixture
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpora:
    monkeypatch.setattr(updates, "DATA", tmp_path / "nothing")
    return Corpora(tmp_path, 1000)


def test_changes_name_no_passage_twice_and_lie_in_all_shards(corpora: Corpora):
    occurrences: Counter[str] = Counter()
    for count in (1, 10, 100):
        _, passages = corpora.changes(count)
        ids = [passage.id for passage in passages]
        assert len(set(ids)) == count and all(0 <= int(name) < 1000 for name in ids)
        occurrences.update(ids)
    assert len({shard_of(name, updates.SHARDS) for name in occurrences}) == updates.SHARDS
    assert max(occurrences.values()) <= 2


def test_contents_differ_from_one_update_to_the_next(corpora: Corpora):
    texts = [passage.text for count in (5, 5, 50) for passage in corpora.changes(count)[1]]
    assert len(set(texts)) == len(texts)
    assert not set(texts) & {text for _, text in corpora.texts}
