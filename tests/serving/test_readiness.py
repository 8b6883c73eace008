"""Checks that a server is ready only while the store has the corpus and the encoder of its version."""

import dataclasses
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from mvr_ray.config import RunConfig, ServeConfig
from mvr_ray.distributed.hot_swap import open_hot_swap_router
from mvr_ray.errors import NoAnswerError
from mvr_ray.serving.schemas import Readiness
from mvr_ray.serving.service import SearchService
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store

pytestmark = [pytest.mark.data, pytest.mark.ray]


def readiness(run: RunConfig) -> Readiness:
    """As a replica that has just started says it."""
    with open_hot_swap_router(run, local=True) as router:
        return SearchService(router, ServeConfig()).readiness()


def test_a_replica_over_a_store_that_lost_corpus_or_encoder_is_not_ready_and_says_what_is_missing(
    own_index: Path, run_over, tmp_path: Path
):
    run, store = run_over(own_index), Store(str(own_index))
    assert readiness(run).ready and readiness(run).problems == []
    version = manifest.read(store, "index")
    corpus = Corpus.open(store, version.corpus, version.corpus_digest)
    part = own_index / paths.corpus_dir(version.corpus) / corpus.info.parts[1].file
    encoder = own_index / paths.encoder_dir(version.encoder_name, version.encoder_fingerprint)
    corpus_file = own_index / paths.corpus_version(version.corpus, version.corpus_digest)
    weights = encoder / "shared" / "model.safetensors"
    for path, message in (
        (part, f"{part.name} is missing"),
        (encoder, "encoder snapshot"),
        (weights, "model.safetensors"),
        (corpus_file.parent.parent, "mvr-ray prepare CONFIG"),
    ):
        path.rename(tmp_path / "aside")
        answer = readiness(run)
        assert not answer.ready and answer.coverage == 1.0
        assert any(message in problem for problem in answer.problems), answer.problems
        (tmp_path / "aside").rename(path)
    whole = part.read_bytes()
    part.chmod(0o644)
    for content, reason in ((whole[:-9], "bytes, not"), (b"\0" * len(whole), "cannot be opened")):
        part.write_bytes(content)
        [problem] = readiness(run).problems
        assert part.name in problem and reason in problem
    part.write_bytes(whole)
    assert readiness(run).ready
    shutil.rmtree(encoder)
    assert not readiness(run).ready


def test_a_server_stays_ready_while_its_store_does_not_answer(own_index: Path, run_over, monkeypatch):
    """What it answers from is open; else an outage of the store would end every server's at once."""
    run = run_over(own_index)
    monkeypatch.setattr("mvr_ray.distributed.router.SOURCES_S", 0.0)
    with open_hot_swap_router(run, local=True) as router:
        service = SearchService(router, ServeConfig())
        assert service.readiness().ready
        down = Mock(side_effect=NoAnswerError("the store is down"))
        monkeypatch.setattr("mvr_ray.distributed.router.require_encoder", down)
        assert service.readiness().ready and down.called
    answer = readiness(run)
    assert not answer.ready and answer.problems == ["the store is down"]


def test_a_server_that_cannot_follow_a_version_is_ready_and_names_it_until_it_can(own_index: Path, run_over):
    run, store = run_over(own_index), Store(str(own_index))
    with open_hot_swap_router(run, local=True) as router:
        service = SearchService(router, ServeConfig())
        live = service.readiness()
        assert (live.ready, live.failure, live.failed_version) == (True, "", None)
        first = manifest.read(store, "index")
        entry = dataclasses.replace(first.shards[0], digest="0" * 32)
        shards = (entry, *first.shards[1:])
        file = own_index / paths.manifest("index", 2)
        file.write_bytes(dataclasses.replace(first, version=2, parent=1, shards=shards).to_json())
        assert not router.follow()
        answer = service.readiness()
        assert (answer.ready, answer.version, answer.failed_version) == (True, 1, 2)
        assert answer.failure == router.state.failure and "0" * 32 in answer.failure
        file.unlink()
        assert manifest.rollback(store, "index", 1).version == 2 and router.follow()
        answer = service.readiness()
        assert (answer.ready, answer.version, answer.failure, answer.failed_version) == (True, 2, "", None)
