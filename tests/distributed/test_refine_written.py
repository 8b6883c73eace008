"""A stored refined shard, without Ray: few changes are in a change file, and searchers use them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from random_index import D, V, Views, brute_force, publish_random_index, random_views

from mvr_ray.config import RefineConfig
from mvr_ray.core.refining.pseudo_labels import Labels
from mvr_ray.distributed.indexing.repair import repair
from mvr_ray.distributed.indexing.shards import build_shard, shard_folder
from mvr_ray.distributed.refinement.shard_refiner import RefinerTask, ShardRefiner
from mvr_ray.distributed.refinement.state import PUBLISHED, StateId
from mvr_ray.distributed.router import Router
from mvr_ray.distributed.searching.searcher import LocalSearchers, SearcherTask
from mvr_ray.errors import DigestError, ShardIndexError
from mvr_ray.index.base import IndexParams
from mvr_ray.index.kinds import open_index
from mvr_ray.store import manifest, paths
from mvr_ray.store.delta import open_embeddings
from mvr_ray.store.files import Store
from mvr_ray.store.local_files import link_or_copy
from mvr_ray.store.manifest import Manifest

K = 9
QUERIES_QD = np.random.default_rng(5).integers(-2, 3, (6, D)).astype(np.float32)


def answers(root: Path, version: Manifest) -> list[list[tuple[str, float, int]]]:
    task = SearcherTask(str(root), version)
    answer = Router(Store(str(root)), version, LocalSearchers(task)).search(QUERIES_QD, K)
    assert answer.exact.certified and answer.coverage_share == 1.0
    return [[(hit.passage_id, hit.score, hit.view) for hit in hits] for hits in answer.hits]


def teach(root: Path, version: Manifest, per_shard: dict[int, list[int]], at: int = 0) -> Manifest:
    """Publish a version with a feedback view for these rows of each shard: the direction of a query each."""
    shards = tuple(entry.shard for entry in version.shards)
    refine = RefineConfig(feedback_clusters=1)
    starts = dict.fromkeys(shards, 0)
    refiner = ShardRefiner(RefinerTask(str(root), version, f"staging/{version.version}", refine, starts=starts))
    first = StateId("round", 1)
    results = []
    for shard in shards:
        rows = np.array(per_shard.get(shard, []), np.int64)
        count = len(rows)
        labels = Labels(np.arange(count) % len(QUERIES_QD), rows, np.zeros(count, np.int16), np.ones(count, bool))
        refiner.step(shard, PUBLISHED, first, labels, QUERIES_QD, 0.8)
        results.append(refiner.write(shard, first, 0))
        assert results[-1].dirty_passages == count
    entries = tuple(one.shard.entry for one in results)
    fields = {
        **version.__dict__,
        "shards": entries,
        "parent": version.version,
        "operation": "refine:feedback_views",
    }
    return manifest.publish(Store(str(root)), Manifest(**fields))


def with_feedback(root: Path, version: Manifest, views: Views) -> Views:
    """Reconstruct all views from a router's scores; own views must equal `views`."""
    task = SearcherTask(str(root), version)
    router = Router(Store(str(root)), version, LocalSearchers(task))
    unit_QD = np.eye(D, dtype=np.float32)
    all_views = {}
    for name, scores in zip(views, router.explain(unit_QD, list(views))):
        all_views[name] = dict(zip(scores.view_numbers_N.tolist(), scores.scores_QN.T))
        assert {view: vector.tolist() for view, vector in all_views[name].items() if view < V} == {
            view: vector.tolist() for view, vector in views[name].items()
        }
    return all_views


@pytest.mark.parametrize("params", [IndexParams(), IndexParams(scan="int8")], ids=["flat", "codes"])
def test_a_refined_version_answers_with_its_changes_generation_after_generation(tmp_path, params):
    views = random_views(120, 3)
    first = publish_random_index(tmp_path, views, 2, params)
    second = teach(tmp_path, first, {0: [1, 7], 1: [3]})
    third = teach(tmp_path, second, {0: [7, 9]})
    for version, before in ((second, first), (third, second)):
        for entry, old in zip(version.shards, before.shards):
            laid_over = paths.CHANGES in entry.files
            assert laid_over == (entry != first.shards[entry.shard])
            if laid_over:
                assert entry.files[paths.EMBEDDINGS] == old.files[paths.EMBEDDINGS]
            if params.scan == "int8":
                codes = [name for name in entry.files if name.endswith(".npy")]
                assert sorted(codes) == (
                    ["first-codes.npy", "first-scales.npy"] if laid_over else ["codes.npy", "scales.npy"]
                )
                of_first = first.shards[entry.shard].files
                assert all(entry.files[name] == of_first[name.removeprefix("first-")] for name in codes)
        assert not manifest.verify(Store(str(tmp_path)), version).problems
        now = with_feedback(tmp_path, version, views)
        assert sum(view >= V for own in now.values() for view in own) == {2: 3, 3: 4}[version.version]
        assert version.num_vectors == sum(len(own) for own in now.values())
        assert answers(tmp_path, version) == [brute_force(now, query_D, K) for query_D in QUERIES_QD]
    assert third.shards[1] == second.shards[1]
    assert answers(tmp_path, first) == [brute_force(views, query_D, K) for query_D in QUERIES_QD]


def test_a_shard_of_which_much_has_changed_is_written_again(tmp_path):
    views = random_views(40, 4)
    first = publish_random_index(tmp_path, views, 1)
    few = teach(tmp_path, first, {0: list(range(10))})
    many = teach(tmp_path, few, {0: list(range(10, 21))})
    assert paths.CHANGES in few.shards[0].files
    assert paths.CHANGES not in many.shards[0].files
    now = with_feedback(tmp_path, many, views)
    assert answers(tmp_path, many) == [brute_force(now, query_D, K) for query_D in QUERIES_QD]


def test_lost_changes_are_not_made_up_by_repair(tmp_path):
    views = random_views(60, 6)
    refined_version = teach(tmp_path, publish_random_index(tmp_path, views, 1), {0: [2]})
    store = Store(str(tmp_path))
    (tmp_path / paths.shard_dir("random", refined_version.shards[0].digest) / paths.CHANGES).unlink()
    [result] = repair(store, refined_version).repairs
    assert result.state == "lost"
    assert "rollback 1" in result.cure


def test_codes_beside_changes_are_made_again_by_repair(tmp_path):
    params, views = IndexParams(scan="int8"), random_views(60, 6)
    refined_version = teach(tmp_path, publish_random_index(tmp_path, views, 1, params), {0: [2]})
    store, before = Store(str(tmp_path)), answers(tmp_path, refined_version)
    folder = tmp_path / paths.shard_dir("random", refined_version.shards[0].digest)
    with pytest.raises(ShardIndexError, match=r"first-codes\.npy has codes of .* vectors, the embeddings are"):
        open_index(params, open_embeddings(folder, refined_version.shards[0].files).blocks(), folder)
    for name in ("first-codes.npy", "first-scales.npy"):
        (folder / name).unlink()
    with pytest.raises(DigestError, match=r"first-codes\.npy .*is missing"):
        manifest.verify(store, refined_version).require()
    [result] = repair(store, refined_version).repairs
    assert result.state == "repaired" and not manifest.verify(store, refined_version).problems
    assert answers(tmp_path, refined_version) == before


def test_codes_of_a_whole_changed_shard_are_read_and_the_next_changes_have_codes_of_all(tmp_path):
    """The files of versions before shared codes: `codes.npy` of all vectors beside a change file."""
    params, views = IndexParams(scan="int8"), random_views(60, 6)
    store = Store(str(tmp_path))
    refined_version = teach(tmp_path, publish_random_index(tmp_path, views, 1, params), {0: [2]})
    source = tmp_path / paths.shard_dir("random", refined_version.shards[0].digest)
    with shard_folder(store) as folder:
        for name in (paths.EMBEDDINGS, paths.CHANGES):
            link_or_copy(source / name, folder / name)
        entry = build_shard(store, refined_version, 0, folder).entry
    assert "codes.npy" in entry.files
    older = manifest.publish(
        store, dataclasses.replace(refined_version, shards=(entry,), parent=refined_version.version)
    )
    assert answers(tmp_path, older) == answers(tmp_path, refined_version)
    later = teach(tmp_path, older, {0: [1, 2]})
    assert {"codes.npy", paths.CHANGES} <= later.shards[0].files.keys()
    now = with_feedback(tmp_path, later, views)
    assert answers(tmp_path, later) == [brute_force(now, query_D, K) for query_D in QUERIES_QD]
