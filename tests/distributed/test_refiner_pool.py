"""Several refiners return the hits of one search over all passages, including ties."""

import os
import signal

import numpy as np
import pytest
from random_index import D, brute_force, publish_random_index, random_views

from mvr_ray.distributed.refinement.refiner_pool import RefinerPool
from mvr_ray.distributed.refinement.shard_refiner import RefinerTask
from mvr_ray.distributed.refinement.state import PUBLISHED
from mvr_ray.types import no_progress

QUERIES_QD = np.random.default_rng(8).integers(-2, 3, (300, D)).astype(np.float32)


CORPORA = pytest.mark.parametrize(("num_passages", "num_shards"), [(90, 5), (3, 5), (1, 1)])


@pytest.mark.ray
@CORPORA
def test_any_number_of_refiners_finds_what_brute_force_does(tmp_path, ray_session, num_passages, num_shards):
    assert_brute_force(tmp_path, num_passages, num_shards)


@CORPORA
def test_refiners_of_this_process_find_what_brute_force_does(tmp_path, without_ray, num_passages, num_shards):
    assert_brute_force(tmp_path, num_passages, num_shards)


def assert_brute_force(tmp_path, num_passages, num_shards):
    """Few distinct values give ties within a refiner, across refiners, and at the last rank; some shards are empty."""
    views = random_views(num_passages, seed=3, levels=1)
    version = publish_random_index(tmp_path, views, num_shards)
    for count, k in [(1, 7), (2, 89), (3, 1)]:
        with RefinerPool(RefinerTask(str(tmp_path), version, "staging/none"), count, 0.2) as refiners:
            hits = refiners.search(PUBLISHED, QUERIES_QD, k, "", no_progress)
            ids = dict(enumerate(refiners.ids_of(np.arange(num_passages))))
        for passages, winners, query_D in zip(hits.rows_QK, hits.views_QK, QUERIES_QD):
            pairs = [(ids[passage], view) for passage, view in zip(passages.tolist(), winners.tolist())]
            assert pairs == [(name, view) for name, _, view in brute_force(views, query_D, k)]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.chaos("refiner hangs", "killed within the bound, restarted, same hits")
def test_a_refiner_that_hangs_is_restarted_within_the_bound_and_answers_alike(tmp_path, actor_processes):
    """A stopped process does not answer, and Ray cannot distinguish it from a slow one."""
    version = publish_random_index(tmp_path, random_views(40, seed=3), 2)
    task = RefinerTask(str(tmp_path), version, "staging/none")
    with RefinerPool(task, 2, 0.2, hang_s=5) as refiners:
        before = refiners.search(PUBLISHED, QUERIES_QD, 7, "", no_progress)
        [hung_pid, other_pid] = actor_processes("ShardRefiner")
        os.kill(hung_pid, signal.SIGSTOP)
        after = refiners.search(PUBLISHED, QUERIES_QD, 7, "", no_progress)
        pids = actor_processes("ShardRefiner")
        assert other_pid in pids
        assert hung_pid not in pids
    assert np.array_equal(before.rows_QK, after.rows_QK)
    assert np.array_equal(before.views_QK, after.views_QK)
