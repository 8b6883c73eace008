"""Checks the answers of versions after any history of updates, compactions and reshards against brute force."""

import dataclasses
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from random_index import D, brute_force, publish_random_index, publish_update, random_views

from mvr_ray.config import RunConfig
from mvr_ray.distributed.indexing import rewrite
from mvr_ray.distributed.indexing.rewrite import compact_one, reshard_one, rewritten_manifest, staging_key
from mvr_ray.distributed.router import Router
from mvr_ray.distributed.searching.searcher import LocalSearchers, SearcherTask
from mvr_ray.index.base import IndexParams
from mvr_ray.index.candidates import LABELS_FILE
from mvr_ray.store import delta, manifest, paths
from mvr_ray.store.corpus import shard_of
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest

WAYS = st.tuples(st.sampled_from(["vectors", "int8"]), st.sampled_from(["fp16", "fp32"]))


def publish_compaction(store: Store, base: Manifest) -> Manifest:
    shards = [
        compact_one(store.address, base, entry).entry if paths.CHANGES in entry.files else entry
        for entry in base.shards
    ]
    return manifest.publish(store, dataclasses.replace(base, parent=base.version, shards=tuple(shards)))


def publish_reshard(store: Store, base: Manifest, num_shards: int) -> Manifest:
    key = staging_key(base, num_shards)
    shards = [reshard_one(store.address, base, num_shards, key, shard) for shard in range(num_shards)]
    return manifest.publish(store, rewritten_manifest(base, "reshard", shards))


def open_version(root: Path, version: Manifest) -> Router:
    return Router(Store(str(root)), version, LocalSearchers(SearcherTask(str(root), version)))


def answers(router: Router, queries_QD: np.ndarray, k: int) -> list[list[tuple[str, float, int]]]:
    answer = router.search(queries_QD, k)
    assert answer.coverage_share == 1.0
    return [[(hit.passage_id, hit.score, hit.view) for hit in hits] for hits in answer.hits]


UPDATE = st.tuples(st.just("update"), st.sets(st.integers(0, 79), max_size=9), st.sets(st.integers(0, 79), max_size=4))
STEPS = st.lists(
    UPDATE | st.tuples(st.just("compact")) | st.tuples(st.just("reshard"), st.integers(1, 8)), min_size=1, max_size=6
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 60), STEPS, st.integers(1, 8), WAYS, st.integers(0, 999), st.booleans())
def test_after_any_history_the_answers_are_those_of_brute_force(
    tmp_path_factory, count, steps, shards, way, seed, in_parts
):
    scan, dtype = way
    root = tmp_path_factory.mktemp("history")
    store, rng = Store(str(root)), np.random.default_rng(seed)
    views = random_views(count, seed)
    version = publish_random_index(root, views, shards, IndexParams(scan=scan), dtype=dtype)
    queries_QD = rng.integers(-2, 3, (3, D)).astype(np.float32)
    history = [(version, dict(views))]
    for step in steps:
        if step[0] == "update":
            fresh = random_views(80, int(rng.integers(1 << 30)))
            upserts = {f"p{at:03d}": fresh[f"p{at:03d}"] for at in sorted(step[1])}
            deletions = {f"p{at:03d}" for at in step[2]} - set(upserts)
            views = {name: own for name, own in (views | upserts).items() if name not in deletions}
            if not views:
                break
            version = publish_update(store, version, upserts, deletions)
        elif step[0] == "compact":
            version = publish_compaction(store, version)
            assert all(paths.CHANGES not in entry.files for entry in version.shards)
        else:
            version = publish_reshard(store, version, step[1])
        history.append((version, dict(views)))
        event(f"shards with changes beside them: {sum(paths.CHANGES in entry.files for entry in version.shards)}")
    for version, there in history:  # every earlier version still gives its own answers
        router = open_version(root, version)
        for k in (1, 7, len(there) + 1):
            with mock.patch.object(delta, "_PASSAGES_WORTH_DIVIDING", 0 if in_parts else 256):
                actual = answers(router, queries_QD, k)
            assert actual == [brute_force(there, query_D, k) for query_D in queries_QD]
        assert manifest.verify(store, version).problems == []
        assert version.num_passages == len(there)


APPROXIMATE = [
    IndexParams(kind="faiss", factory="IVF1,SQ8"),
    IndexParams(kind="faiss", factory="HNSW8"),
    IndexParams(kind="hnsw", hnsw_m=8),
]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(40, 90), STEPS, st.integers(1, 3), st.sampled_from(APPROXIMATE), st.integers(0, 999))
def test_after_any_history_an_approximate_index_finds_only_what_is_there_with_its_true_score(
    tmp_path_factory, count, steps, shards, params, seed
):
    """Its file is updated in a copy: what was deleted or replaced is never a hit, and the score is that of the best
    view as it is now. A search for all passages finds all of them."""
    root = tmp_path_factory.mktemp("history")
    store, rng = Store(str(root)), np.random.default_rng(seed)
    views = random_views(count, seed)
    version = publish_random_index(root, views, shards, params)
    queries_QD = rng.integers(-2, 3, (3, D)).astype(np.float32)
    history = [(version, dict(views))]
    for step in steps:
        if step[0] == "update":
            fresh = random_views(80, int(rng.integers(1 << 30)))
            upserts = {f"p{at:03d}": fresh[f"p{at:03d}"] for at in sorted(step[1])}
            deletions = {f"p{at:03d}" for at in step[2]} - set(upserts)
            views = {name: own for name, own in (views | upserts).items() if name not in deletions}
            version = publish_update(store, version, upserts, deletions)
        elif step[0] == "compact":
            version = publish_compaction(store, version)
        else:
            version = publish_reshard(store, version, step[1])
        history.append((version, dict(views)))
        event(f"updated indexes: {sum(LABELS_FILE in entry.files for entry in version.shards)}")
    for version, there in history:
        router = open_version(root, version)
        for k in (1, 5, len(there)):
            for hits, query_D in zip(answers(router, queries_QD, k), queries_QD):
                true = {name: (score, view) for name, score, view in brute_force(there, query_D, len(there))}
                assert len(hits) == k and {name: (score, view) for name, score, view in hits}.items() <= true.items()
        assert manifest.verify(store, version).problems == []


@pytest.mark.ray
@pytest.mark.parametrize("params", [IndexParams(scan="int8"), IndexParams(kind="faiss", factory="IVF2,Flat")])
def test_compaction_writes_what_has_changes_and_keeps_every_other_file(tmp_path, ray_session, params):
    views, store = random_views(120, 5), Store(str(tmp_path))
    base = publish_random_index(tmp_path, views, 4, params)
    run = RunConfig.model_validate({"store": {"path": str(tmp_path)}, "index": {"name": "random"}})
    assert rewrite.compact(run).version == base.version == 1
    updated_version = publish_update(store, base, random_views(2, 9), {"p007"})
    changed_shards = {shard_of(name, 4) for name in ("p000", "p001", "p007")}
    assert {entry.shard for entry in updated_version.shards if paths.CHANGES in entry.files} == changed_shards
    report = rewrite.compact(run)
    assert (report.base_version, report.version, report.shards_written) == (2, 3, len(changed_shards))
    version = manifest.read(store, "random")
    assert version.operation == "compact" and store.list(paths.index_dir("random", "staging")) == []
    whole = publish_random_index(
        tmp_path / "whole",
        {name: own for name, own in (views | random_views(2, 9)).items() if name != "p007"},
        4,
        params,
    )
    assert version.shards == whole.shards, "the bytes are those of a build from nothing"
    assert rewrite.compact(run).version == 3


@pytest.mark.ray
def test_the_version_is_serialised_once_for_all_tasks(tmp_path, ray_session, monkeypatch):
    """It describes every file of every shard."""
    base, serialised_versions = publish_random_index(tmp_path, random_views(120, 5), 4), list[int]()
    publish_update(Store(str(tmp_path)), base, random_views(6, 9), {"p007"})

    def record(version: Manifest) -> object:
        serialised_versions.append(version.version)
        return object.__getstate__(version)

    monkeypatch.setattr(Manifest, "__getstate__", record, raising=False)
    run = RunConfig.model_validate({"store": {"path": str(tmp_path)}, "index": {"name": "random"}})
    assert rewrite.compact(run).shards_written > 1 and rewrite.reshard(run, 3).shards == 3
    assert serialised_versions == [2, 3]
