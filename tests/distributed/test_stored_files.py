"""Holds that a store written by an older commit opens, verifies, answers alike, and can be refined and resharded.

The store and the answers of the commit that wrote it lie in tests/fixtures/store-baa77f8.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from mvr_ray import versions
from mvr_ray.config import RunConfig
from mvr_ray.distributed import refine
from mvr_ray.distributed.indexing import rewrite
from mvr_ray.distributed.router import open_router
from mvr_ray.store import manifest
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.gc import collect_corpus
from mvr_ray.store.questions import read_questions
from mvr_ray.store.update import update

FIXTURE = Path(__file__).resolve().parent.parent / "fixtures" / "store-baa77f8"
ANSWERS = json.loads((FIXTURE / "answers.json").read_text(encoding="utf-8"))
QUERIES_QD = np.array(ANSWERS["queries"], np.float32)
K = 5
ROUNDING = 1e-5  # another processor sums products in another order


def run_over(store: Path, index: str, **refine_settings) -> RunConfig:
    return RunConfig.model_validate(
        {"store": {"path": str(store)}, "index": {"name": index}, "refine": refine_settings, "retrieve": {"k": K}}
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return shutil.copytree(FIXTURE / "store", tmp_path / "store")


def assert_same(hits, expected) -> None:
    """The same passages and views, with scores equal up to rounding."""
    for row, old in zip(hits, expected, strict=True):
        np.testing.assert_allclose([hit.score for hit in row], [score for _, score, _ in old], atol=ROUNDING)
        assert [(hit.passage_id, hit.view) for hit in row] == [(passage_id, view) for passage_id, _, view in old]


@pytest.mark.parametrize("answer", ANSWERS["answers"], ids=lambda answer: f"{answer['index']}-{answer['version']}")
def test_an_older_store_verifies_and_answers_as_the_commit_that_wrote_it(store: Path, answer: dict) -> None:
    index, version = answer["index"], answer["version"]
    run = run_over(store, index)
    report = versions.act(run, "verify", version)
    assert report.problems == [] and report.num_files > 3
    with open_router(run, version, local=True) as router:
        np.testing.assert_allclose(router.embed(ANSWERS["questions"]), QUERIES_QD, atol=ROUNDING)
        assert_same(router.search(QUERIES_QD, K).hits, answer["hits"])


@pytest.mark.ray
def test_an_older_store_is_refined_and_resharded_and_its_versions_stay(store: Path, ray_session) -> None:
    run = run_over(store, "flat", questions="years", rounds=1, max_heldout_loss=100)
    before = manifest.read(Store(str(store)), "flat", 1)
    manifest.rollback(Store(str(store)), "flat", 1)
    version = refine.refine(run).published
    assert version is not None and version.parent == 3
    assert version.num_passages == before.num_passages and version.num_vectors > before.num_vectors
    with open_router(run, version.version, local=True) as router:
        refined_hits = router.search(QUERIES_QD, K).hits
    assert refined_hits != [[]] * len(QUERIES_QD)
    report = rewrite.reshard(run, 2)
    assert (report.shards_before, report.shards, report.views) == (3, 2, version.num_vectors)
    with open_router(run, report.version, local=True) as router:
        hits = router.search(QUERIES_QD, K).hits
    assert [[(h.passage_id, h.view) for h in row] for row in hits] == [
        [(h.passage_id, h.view) for h in row] for row in refined_hits
    ]
    old = next(answer for answer in ANSWERS["answers"] if (answer["index"], answer["version"]) == ("flat", 2))
    with open_router(run, 2, local=True) as router:
        assert_same(router.search(QUERIES_QD, K).hits, old["hits"])


def test_versions_of_an_older_store_have_their_corpus_after_an_update(store: Path, tmp_path: Path) -> None:
    run, own = run_over(store, "flat"), Store(str(store))
    before = Corpus.open(own, "corpus")
    questions = read_questions(before, "years")
    (changes := tmp_path / "changes.jsonl").write_text('{"id": "Bakery_0", "delete": true}\n')
    assert update(run.prepare, own, str(changes)).deleted == 1
    assert len(read_questions(Corpus.open(own, "corpus"), "years")) == len(questions) - 1
    assert collect_corpus(own, "corpus", grace_s=0) == []
    same = Corpus.open(own, "corpus", before.digest)
    assert list(same) == list(before) and read_questions(same, "years") == questions
    assert versions.act(run, "verify", 1).problems == []
    assert versions.act(run, "rollback", 1).passages == before.num_passages
