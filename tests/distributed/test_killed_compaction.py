"""Kills a compaction at each of its calls, in forks of this process.

No test of this file uses Ray, so that it runs after those that do (`conftest.py`).
"""

import shutil
from functools import partial
from pathlib import Path

import pytest
from kill_at_call import NEVER, kill_points, run_and_kill
from random_index import publish_random_index, publish_update, random_views

from mvr_ray.config import RunConfig
from mvr_ray.distributed.indexing import rewrite
from mvr_ray.index.base import IndexParams
from mvr_ray.store import manifest
from mvr_ray.store.files import Store


@pytest.mark.slow
@pytest.mark.chaos(
    "compact killed at each call that writes, syncs, names or renames",
    "the live version is whole: the old one or the new one; the same command ends with the undisturbed bytes",
)
@pytest.mark.parametrize("params", [IndexParams(scan="int8"), IndexParams(kind="hnsw", hnsw_m=4)], ids=["int8", "hnsw"])
def test_a_compaction_killed_at_any_call_leaves_a_whole_version_and_ends_with_the_same_bytes(
    tmp_path, params, record_property, without_ray
):
    views, before = random_views(60, 5), Store(str(tmp_path / "before"))
    publish_update(before, publish_random_index(Path(before.root), views, 3, params), random_views(2, 9), {"p007"})

    def compact_in(store: Store) -> None:
        sections = {"store": {"path": str(store.root)}, "resources": {"local_passages": 1000}}
        rewrite.compact(RunConfig.model_validate({**sections, "index": {"name": "random", "recall_sample": 5}}))

    whole = Store(shutil.copytree(before.root, tmp_path / "whole"))
    compact_in(whole)
    old, new = manifest.read(before, "random"), manifest.read(whole, "random")
    control = Store(shutil.copytree(before.root, tmp_path / "undisturbed"))
    outcomes: list[bool] = []
    for at in kill_points(run_and_kill(partial(compact_in, control), NEVER)):
        store = Store(shutil.copytree(before.root, tmp_path / f"killed at {at}"))
        assert len(run_and_kill(partial(compact_in, store), at)) == at
        live = manifest.read(store, "random")
        assert live.content_digest() in (old.content_digest(), new.content_digest())
        assert manifest.verify(store, live).problems == []
        outcomes.append(live.version == new.version)
        compact_in(store)
        live = manifest.read(store, "random")
        assert (live.version, live.shards, live.content_digest()) == (new.version, new.shards, new.content_digest())
        assert manifest.verify(store, live).problems == [] == manifest.verify(store, old).problems
        shutil.rmtree(store.root)
    assert outcomes == sorted(outcomes) and {*outcomes} == {False, True}, "old until it is named, new from then on"
    record_property("figures", f"killed {len(outcomes)} times; the new one was live after {sum(outcomes)}")
