"""Resharding: the same views, bit for bit, the same answers, no lost rows, and resumption after any crash."""

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_index import D, V, brute_force, publish_random_index, random_views

from mvr_ray.config import RunConfig
from mvr_ray.distributed import refine
from mvr_ray.distributed.indexing import build_index, rewrite
from mvr_ray.distributed.indexing.rewrite import (
    require_same_counts,
    reshard_one,
    rewritten_manifest,
    staging_key,
)
from mvr_ray.distributed.indexing.shards import related_shards
from mvr_ray.distributed.router import Router
from mvr_ray.distributed.searching.searcher import LocalSearchers, SearcherTask
from mvr_ray.errors import ConfigError, DigestError, RowsLostError, ShardIndexError, StorageError
from mvr_ray.index.base import IndexParams
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import shard_of
from mvr_ray.store.delta import open_embeddings
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest

Stored = dict[str, tuple[bytes, bytes]]


def reshard_locally(root: Path, base: Manifest, num_shards: int) -> Manifest:
    """Publish the stage's version, with its tasks run one by one in this process."""
    store = Store(str(root))
    key = staging_key(base, num_shards)
    shards = [reshard_one(store.address, base, num_shards, key, shard, 50) for shard in range(num_shards)]
    version = rewritten_manifest(base, "reshard", shards)
    require_same_counts(base, version)
    return manifest.publish(store, version)


def answers(root: Path, version: Manifest, queries_QD: np.ndarray, k: int) -> list[list[tuple[str, float, int]]]:
    task = SearcherTask(str(root), version)
    answer = Router(Store(str(root)), version, LocalSearchers(task)).search(queries_QD, k)
    assert answer.coverage_share == 1.0
    return [[(hit.passage_id, hit.score, hit.view) for hit in hits] for hits in answer.hits]


def read_contents(root: Path, version: Manifest) -> Stored:
    """Every passage's view numbers and vectors as bytes; asserts that ids hash to their shards."""
    contents: Stored = {}
    for entry in version.shards:
        folder = root / paths.shard_dir(version.index, entry.digest)
        for block in open_embeddings(folder, entry.files).blocks():
            for row, passage_id in enumerate(block.ids):
                own = slice(int(block.row_ptr[row]), int(block.row_ptr[row + 1]))
                assert passage_id not in contents and shard_of(passage_id, len(version.shards)) == entry.shard
                contents[passage_id] = (block.view_numbers_N[own].tobytes(), block.vectors_ND[own].tobytes())
    return contents


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 10_000))
def test_a_new_shard_reads_every_old_shard_that_can_hold_one_of_its_passages(before, after, seed):
    for number in range(30):
        passage_id = f"{seed}-{number}"
        assert shard_of(passage_id, before) in related_shards(shard_of(passage_id, after), before, after)


@given(st.data())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_answer_and_every_byte_is_the_same_over_any_number_of_shards(tmp_path, data):
    seed, num_passages = data.draw(st.integers(0, 999)), data.draw(st.integers(1, 70))
    before, after = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 13))
    root = tmp_path / f"{seed}-{num_passages}-{before}-{after}"
    shutil.rmtree(root, ignore_errors=True)
    views = random_views(num_passages, seed, levels=data.draw(st.integers(1, 3)))
    base = publish_random_index(root, views, before, IndexParams(scan=data.draw(st.sampled_from(["vectors", "int8"]))))
    version = reshard_locally(root, base, after)
    queries_QD = np.random.default_rng(seed + 1).integers(-2, 3, (4, D)).astype(np.float32)
    k = data.draw(st.integers(1, num_passages + 3))
    assert [len(base.shards), len(version.shards)] == [before, after]
    assert read_contents(root, version) == read_contents(root, base)
    expected = [brute_force(views, query_D, k) for query_D in queries_QD]
    assert answers(root, base, queries_QD, k) == answers(root, version, queries_QD, k) == expected


def test_feedback_views_and_moved_queries_go_along_and_the_way_back_ends_at_the_first_shards(tmp_path):
    views = random_views(90, 3)
    for number, passage_id in enumerate(sorted(views)):
        if number % 4 == 0:
            views[passage_id][V] = np.full(D, 0.1 * number, np.float32)
            views[passage_id][V + 1] = np.full(D, -0.1 * number, np.float32)
    first = publish_random_index(tmp_path, views, 8)
    refined_version = dataclasses.replace(
        first, parent=1, refined_queries={}, refinement={"feedback_weight": 0.5, "feedback_clusters": 2}
    )
    queries_file = tmp_path / "queries.arrow"
    queries_file.write_bytes(b"vectors of moved questions")
    digest = manifest.add_refined_queries(Store(str(tmp_path)), "random", queries_file)
    now = manifest.publish(
        Store(str(tmp_path)), dataclasses.replace(refined_version, refined_queries={"known": digest})
    )
    whole = read_contents(tmp_path, first)
    assert max(len(numbers) for numbers, _ in whole.values()) > 2 * V  # int16: some passage has more views than V
    for num_shards in (12, 5, 8):
        now = reshard_locally(tmp_path, now, num_shards)
        assert read_contents(tmp_path, now) == whole
        assert (now.refined_queries, now.refinement) == ({"known": digest}, refined_version.refinement)
        assert (now.num_passages, now.num_vectors) == (first.num_passages, first.num_vectors)
        assert manifest.verify(Store(str(tmp_path)), now).problems == []
    assert now.shards == first.shards


def test_lost_rows_are_never_published(tmp_path):
    base = publish_random_index(tmp_path, random_views(40, 1), 3)
    shards = [reshard_one(str(tmp_path), base, 2, "key", shard) for shard in range(2)]
    short = dataclasses.replace(base, shards=(base.shards[0], *base.shards[2:]))
    with pytest.raises(RowsLostError, match=r"has \d+ passages and \d+ views, its 2 new shards 40 and"):
        require_same_counts(short, rewritten_manifest(short, "reshard", shards))


def run_of(root: Path, **sections) -> RunConfig:
    return RunConfig.model_validate(
        {"store": {"path": str(root)}, "index": {"name": "random"}, "prepare": {"sources": []}, **sections}
    )


def test_what_cannot_be_is_refused_before_any_work(tmp_path):
    run, base = run_of(tmp_path), publish_random_index(tmp_path, random_views(40, 1), 3)
    store = Store(str(tmp_path))
    for wrong in (0, 65_537):
        with pytest.raises(ConfigError, match=f"shards={wrong} is outside 1 to 65536"):
            rewrite.reshard(run, wrong)
    file = tmp_path / paths.shard_dir("random", base.shards[1].digest) / paths.EMBEDDINGS
    whole = file.read_bytes()
    file.chmod(0o644)
    for cut, message in ((whole[:100], r"has 100 bytes, not \d+"), (None, "is missing")):
        file.write_bytes(cut) if cut else file.unlink()
        with pytest.raises(DigestError, match=rf"of shard 1 {message}; repair it first: mvr-ray versions"):
            rewrite.reshard(run, 5)
    file.write_bytes(whole)
    version = manifest.publish(store, dataclasses.replace(base, parent=1, shards=(base.shards[0], base.shards[2])))
    with pytest.raises(ConfigError, match=r"lacks shards \(it has 0, 2\); index again"):
        rewrite.reshard(run, 5)
    wrong_params = dataclasses.asdict(IndexParams(kind="faiss", factory="Nonsense"))
    manifest.publish(store, dataclasses.replace(base, parent=version.version, index_params=wrong_params))
    with pytest.raises(ShardIndexError, match="Nonsense"):
        rewrite.reshard(run, 5)
    assert manifest.list_versions(store, "random") == [1, 2, 3]


def test_a_flipped_bit_in_an_old_shard_is_never_copied(tmp_path):
    base = publish_random_index(tmp_path, random_views(40, 1), 2)
    file = tmp_path / paths.shard_dir("random", base.shards[1].digest) / paths.EMBEDDINGS
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.chmod(0o644)
    file.write_bytes(data)
    with pytest.raises(DigestError, match="of shard 1 is missing or damaged"):
        reshard_one(str(tmp_path), base, 3, "key", 0)


def test_too_little_space_is_reported_before_any_work(tmp_path, monkeypatch):
    base = publish_random_index(tmp_path, random_views(40, 1), 2)
    monkeypatch.setattr(Store, "free_bytes", lambda _: base.num_bytes - 1)
    with pytest.raises(StorageError, match=rf"a second copy of index 'random' takes {base.num_bytes}; free space"):
        rewrite.reshard(run_of(tmp_path), 5)


@pytest.mark.ray
def test_the_stage_continues_after_its_end_and_builds_nothing_twice(tmp_path, ray_session, monkeypatch):
    views = random_views(120, 9)
    whole, cut_root = tmp_path / "whole", tmp_path / "cut"
    base = publish_random_index(whole, views, 8)
    shutil.copytree(whole, cut_root)
    steps: list[tuple[str, int, int]] = []
    report = rewrite.reshard(run_of(whole), 12, lambda *row: steps.append(row))
    assert (report.shards_before, report.shards, report.base_version, report.version) == (8, 12, 1, 2)
    assert report.passages_before == report.passages == 120 and report.views_before == report.views
    assert steps[-2:] == [
        ("passages before = after", 120, 120),
        ("views before = after", base.num_vectors, base.num_vectors),
    ]
    assert Store(str(whole)).list(paths.index_dir("random", "staging")) == []

    class KilledError(BaseException):
        pass

    def die(what: str, count: int, total: int) -> None:
        if (what, count) == ("reshard", 5):
            raise KilledError

    with pytest.raises(KilledError):
        rewrite.reshard(run_of(cut_root), 12, die)
    store = Store(str(cut_root))
    assert manifest.list_versions(store, "random") == [1]
    staging = cut_root / paths.staging_dir("random", staging_key(base, 12))
    note_times = {note: note.stat().st_mtime_ns for note in staging.glob("built-*")}
    assert len(note_times) >= 5
    at_the_end: list[int] = []

    def look(what: str, count: int, total: int) -> None:
        if what == "reshard" and count == total:
            at_the_end.extend(note.stat().st_mtime_ns for note in note_times)

    report = rewrite.reshard(run_of(cut_root), 12, look)
    assert at_the_end == list(note_times.values())
    expected = manifest.read(Store(str(whole)), "random").content_digest()
    assert manifest.read(store, "random").content_digest() == expected
    again = rewrite.reshard(run_of(cut_root), 12)
    assert (again.base_version, again.version, again.shards_before) == (report.version, report.version, 12)


@pytest.mark.data
@pytest.mark.ray
def test_refinement_learns_the_same_and_indexing_goes_back_without_encoding(own_index, run_over, tmp_path):
    refinement = {"questions": "dev", "method": "passage", "step_size": 0.05, "rounds": 2, "max_heldout_loss": 100}
    other = shutil.copytree(own_index, tmp_path / "other")
    first = manifest.read(Store(str(own_index)), "index")
    rewrite.reshard(run_over(other), 5)
    reports = [refine.refine(run_over(store, refine=refinement)) for store in (own_index, other)]
    assert reports[0].published and reports[1].published
    assert reports[0].accuracy == reports[1].accuracy
    assert (
        read_contents(other, reports[1].published)
        == read_contents(own_index, reports[0].published)
        != read_contents(own_index, first)
    )
    steps: list[str] = []
    run = run_over(other, index={"keep_refinement": False})
    back = build_index.index(run, lambda what, *_: steps.append(what))
    assert back.shards == first.shards and "encode" not in steps
