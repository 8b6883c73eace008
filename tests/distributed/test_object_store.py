"""An index whose files are on an object store, by the S3 protocol of another's server: the folder's own bytes."""

from pathlib import Path

import pytest

from mvr_ray.config import RunConfig
from mvr_ray.distributed import refine as refining
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.hot_swap import open_hot_swap_router
from mvr_ray.distributed.indexing import build_index
from mvr_ray.store import manifest, prepare
from mvr_ray.store.files import Store

pytestmark = [pytest.mark.data, pytest.mark.ray, pytest.mark.slow]

REFINE = {"questions": "dev", "method": "hybrid", "step_size": 0.05, "rounds": 2, "depth": 20, "max_heldout_loss": 100}
ASKED = ["Which team won the game?", "Who founded the university?", "When did the war end?"]


def answers(run: RunConfig) -> list[object]:
    """Searchers' answers from the first version and, after a switch, from its refined version."""
    results: list[object] = []
    with open_hot_swap_router(run, probe_s=60.0) as live:
        for version in (1, 2):
            with live.pin() as router:
                answer = router.search_text(ASKED, 5)
                hits = [[(hit.passage_id, hit.score, hit.view) for hit in row] for row in answer.hits]
                passages = router.passages([hits[0][0][0]])
            assert answer.version == version and answer.exact.certified and answer.coverage_share == 1.0
            results.append((hits, {name: passage.text for name, passage in passages.items()}))
            if version == 1:
                refining.refine(run)
                assert live.follow()
    return results


def test_an_index_on_an_object_store_has_the_bytes_and_the_answers_of_one_in_a_folder(
    own_index: Path, run_over, bucket: str, ray_session
):
    """Workers of Ray read and write the object store, and this process the folder."""
    near = run_over(own_index, refine=REFINE, resources={"local_passages": 1000})
    far = near.model_copy(update={"store": near.store.model_copy(update={"path": bucket})})
    prepare.prepare(far.prepare, Store(bucket))
    build_index.index(far)
    with session.staying_local():
        expected = answers(near)
    assert answers(far) == expected
    for version in (1, 2):
        mine, other = (manifest.read(Store(run.store.path), near.index.name, version) for run in (near, far))
        assert [entry.digest for entry in mine.shards] == [entry.digest for entry in other.shards]
        assert manifest.verify(Store(bucket), other).problems == []
    assert manifest.read(Store(bucket), near.index.name).dirty_share
