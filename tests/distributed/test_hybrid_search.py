"""Hybrid search of a version: exhaustive search over BM25 and views, in this process and over actors."""

import dataclasses
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from bm25_index import BM25Index

from mvr_ray.core.encoding.encoder import DualEncoder
from mvr_ray.core.searching.exact import exact_scores
from mvr_ray.distributed.hot_swap import open_hot_swap_router
from mvr_ray.distributed.router import Router, open_router
from mvr_ray.errors import CoverageError, ShardIndexError
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.delta import open_embeddings
from mvr_ray.store.files import Store
from mvr_ray.store.questions import read_questions
from mvr_ray.types import HybridQueries

pytestmark = [pytest.mark.data, pytest.mark.ray]
without_ray = pytest.mark.usefixtures("without_ray")

WEIGHTS = (0.0, 0.3, 12.0, 500.0)


@pytest.fixture(scope="module")
def texts(lexical_index) -> list[str]:
    """Twelve questions, and one of which no passage has a word."""
    questions = read_questions(Corpus.open(Store(str(lexical_index)), "corpus"), "dev")
    return [*(question.text for question in questions[:12]), "zzyzx qwrtp"]


@pytest.fixture(scope="module")
def both_scores(lexical_index, texts) -> list[dict[str, tuple[float, float]]]:
    """BM25 and the dense score of every passage with every question, one by one."""
    store = Store(str(lexical_index))
    version = manifest.read(store, "index")
    encoder = DualEncoder.load(lexical_index / paths.encoder_dir("encoder", version.encoder_fingerprint))
    words = BM25Index(Corpus.open(store, "corpus"))
    views = {}
    for entry in version.shards:
        embeddings = open_embeddings(manifest.open_shard(store, "index", entry), entry.files)
        views |= embeddings.find(embeddings.ids())
    scores = []
    for query_D, hits in zip(encoder.embed_queries(texts), words.search(texts, 60), strict=True):
        lexical = {hit.passage_id: hit.score for hit in hits}
        scores.append(
            {i: (lexical.get(i, 0.0), float(exact_scores(query_D, own.vectors_ND).max())) for i, own in views.items()}
        )
    return scores


def exhaustive(scores: dict[str, tuple[float, float]], weight: float, k: int) -> list[tuple[str, float]]:
    total = {i: float(np.float32(lexical + weight * dense)) for i, (lexical, dense) in scores.items()}
    return sorted(total.items(), key=lambda hit: (-hit[1], hit[0]))[:k]


@without_ray
@pytest.mark.parametrize("scan", ["vectors", "int8"])
@pytest.mark.parametrize("weight", WEIGHTS)
def test_an_answer_is_exhaustive_search_over_words_and_views(
    lexical_index, run_over, texts, both_scores, weight, scan, tmp_path
):
    store = lexical_index
    if scan == "int8":
        from mvr_ray.distributed.indexing import build_index

        store = shutil.copytree(lexical_index, tmp_path / "store")
        build_index.index(run_over(store, index={"lexical": True, "scan": scan}))
    with open_router(run_over(store), local=True) as router:
        for k in (1, 7, 80):
            answer = router.search_text(texts, k, hybrid=weight)
            for scores, hits in zip(both_scores, answer.hits, strict=True):
                assert [(hit.passage_id, hit.score) for hit in hits] == exhaustive(scores, weight, k)
            assert answer.exact.certified and answer.exact.method.startswith("bm25 + flat")
        assert all(hit.view >= 0 for hits in answer.hits for hit in hits)
        assert router.search_text(texts, 5).exact.method.startswith("flat")
        nothing = router.search(router.embed(texts)[:0], 5, hybrid=HybridQueries((), weight))
        assert nothing.hits == [] and nothing.exact.method.startswith("bm25 + flat")


def test_actors_answer_as_one_process_and_searches_that_wait_go_together(lexical_index, run_over, texts, both_scores):
    run = run_over(lexical_index, resources={"searchers": 2})
    with open_hot_swap_router(run) as live, live.pin() as router:
        queries_QD = router.embed(texts)

        def search(number: int) -> None:
            weight, own = WEIGHTS[number % 2 + 1], slice(number % 12, number % 12 + 2)
            hybrid = None if number % 3 == 0 else HybridQueries(tuple(texts[own]), weight)
            answer = router.search(queries_QD[own], 5, hybrid=hybrid)
            for scores, hits in zip(both_scores[own], answer.hits, strict=True):
                dense = {i: (0.0, one[1]) for i, one in scores.items()}
                expected = exhaustive(dense, 1.0, 5) if hybrid is None else exhaustive(scores, weight, 5)
                assert [(hit.passage_id, hit.score) for hit in hits] == expected

        fan_out = mock.patch.object(live.searchers, "fan_out", wraps=live.searchers.fan_out)
        with fan_out as calls, ThreadPoolExecutor(8) as threads:
            list(threads.map(search, range(36)))
        assert calls.call_count < 36


@without_ray
def test_a_version_without_words_says_how_to_get_them(small_index, run_over, texts):
    with (
        open_router(run_over(small_index), local=True) as router,
        pytest.raises(ShardIndexError, match=r"version 1 has no words .* set index\.lexical: true in the run file"),
    ):
        router.search_text(texts, 5, hybrid=1.0)


@without_ray
@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(lexical_index, run_over, texts, weight):
    with open_router(run_over(lexical_index), local=True) as router:
        with pytest.raises(ShardIndexError, match="it must be finite and at least 0"):
            router.search_text(texts, 5, hybrid=weight)
        with pytest.raises(ShardIndexError, match="2 query vectors and 1 text"):
            router.search(router.embed(texts[:2]), 5, hybrid=HybridQueries(("one",), 1.0))


@without_ray
def test_damaged_words_of_a_shard_are_reported_and_views_are_still_searched(lexical_index, run_over, texts, tmp_path):
    store = shutil.copytree(lexical_index, tmp_path / "store")
    version = manifest.read(Store(str(store)), "index")
    assert version.lexical
    path = store / manifest.lexical_path("index", version.lexical.postings[1][0])
    path.write_bytes(path.read_bytes()[:-8] + b"x" * 8)
    with open_hot_swap_router(run_over(store), local=True) as live, live.pin() as router:
        assert router.search_text(texts, 5).coverage_share == 1.0
        with pytest.raises(CoverageError, match="1 \\(damaged\\)"):
            router.search_text(texts, 5, hybrid=1.0)
        partial = router.search_text(texts, 5, hybrid=1.0, min_coverage=0.1)
        assert [state.state for state in partial.shards] == ["searched", "damaged", "searched"]
        assert not partial.exact.certified


@without_ray
def test_versions_that_share_a_shard_have_each_its_own_statistics(lexical_index, run_over, texts, tmp_path: Path):
    """The same postings with the statistics of another corpus are another lexical index, also in one searcher."""
    root = shutil.copytree(lexical_index, tmp_path / "store")
    store = Store(str(root))
    second = manifest.read(store, "index")
    assert second.lexical
    from mvr_ray.index.lexical import Postings, write_statistics

    [path] = manifest.open_lexical(store, "index", second.lexical.postings[0])
    write_statistics([Postings(path).whole], tmp_path / "other")
    other = dataclasses.replace(second.lexical, statistics=(manifest.add_lexical(store, "index", tmp_path / "other"),))
    manifest.publish(store, dataclasses.replace(second, parent=2, lexical=other))
    with open_hot_swap_router(run_over(root), 2, local=True) as live:

        def score(router: Router) -> list[float]:
            return [hit.score for hits in router.search_text(texts[:3], 5, hybrid=0.0).hits for hit in hits]

        with live.pin(2) as before, live.pin(3) as after:
            first = score(before)
            assert first != score(after) and first == score(before)
