"""What refiners find together is what one search of all passages finds, to the last tie."""

import numpy as np
import pytest
from made import D, brute_force, made_index, made_views

from mvr_ray.distributed.refinement.fleet import Refiners
from mvr_ray.distributed.refinement.shards import RefinerTask
from mvr_ray.types import no_progress

QUERIES_QD = np.random.default_rng(8).integers(-2, 3, (300, D)).astype(np.float32)


@pytest.mark.ray
@pytest.mark.parametrize(("num_passages", "num_shards"), [(90, 5), (3, 5), (1, 1)])
def test_any_number_of_refiners_finds_what_brute_force_does(tmp_path, ray_session, num_passages, num_shards):
    """Few distinct values, so ties within a refiner, across them, and at the last place; shards without a passage."""
    views = made_views(num_passages, seed=3, levels=1)
    described = made_index(tmp_path, views, num_shards)
    for count, k in [(1, 7), (2, 89), (3, 1)]:
        with Refiners(RefinerTask(str(tmp_path), described, "staging/none"), num_shards, count, 0.2) as refiners:
            found = refiners.search(0, QUERIES_QD, k, "", no_progress)
            ids = dict(enumerate(refiners.ids_of(np.arange(num_passages))))
        for passages, winners, query_D in zip(found.passage_QK, found.view_QK, QUERIES_QD):
            told = [(ids[passage], view) for passage, view in zip(passages.tolist(), winners.tolist())]
            assert told == [(name, view) for name, _, view in brute_force(views, query_D, k)]
