"""Compares hybrid searches over any shards, precision, weight and filter with brute force over both scores."""

import json
import shutil
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_index import D, Views, bm25_over, hybrid_brute_force, publish_random_index, random_views

from mvr_ray.config import PrepareConfig, SourceConfig
from mvr_ray.distributed.router import Router
from mvr_ray.distributed.searching.batching import DynamicBatcher
from mvr_ray.distributed.searching.searcher import LocalFleet, SearcherTask
from mvr_ray.index.base import IndexParams
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.prepare import prepare
from mvr_ray.types import HybridQueries

WORDS = ("harbour", "ship", "library", "engine", "music", "river", "castle", "the")
QUESTIONS = ("Ships in the harbour", "music music castle", "the of")
FILTERS = (None, {"year": {"gte": 3}}, {"year": {"lt": 0}}, {"or": [{"year": 1}, {"id": {"lt": "p004"}}]})
PRECISIONS = st.sampled_from([("vectors", "fp32"), ("vectors", "fp16"), ("int8", "fp16"), ("int8", "fp32")])
WEIGHTS = st.sampled_from([0.0, 0.05, 0.5, 1.0, 30.0]) | st.floats(0, 50)


def random_rows(views: Views, seed: int) -> dict[str, dict]:
    """Texts of few words, so that BM25 scores tie, and some of no word that counts."""
    rng = np.random.default_rng(seed)
    return {
        name: {
            "id": name,
            "title": str(rng.choice(WORDS)),
            "text": " ".join(["x", *rng.choice(WORDS, rng.integers(0, 5)).tolist()]),
            "year": int(rng.integers(0, 6)),
        }
        for name in sorted(views)
    }


def passes(filter: dict | None, row: dict) -> bool:
    if filter is None:
        return True
    if "or" in filter:
        return row["year"] == 1 or row["id"] < "p004"
    return row["year"] >= 3 if "gte" in filter["year"] else False


def corpus_of(root: Path, rows: dict[str, dict], num_parts: int) -> Corpus:
    root.mkdir(parents=True, exist_ok=True)
    source = root / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    sources = [SourceConfig(path=str(source))]
    prepare(PrepareConfig(sources=sources, num_shards=num_parts, fields={"year": "int"}), Store(str(root)))
    return Corpus.open(Store(str(root)), "corpus")


def routed(root: Path, version: Manifest, together: bool = False) -> Router:
    store = Store(str(root))
    fleet = LocalFleet(SearcherTask(store.root, version, tuple(entry.shard for entry in version.shards)))
    return Router(store, version, DynamicBatcher(fleet, at_once=0) if together else fleet)


def assert_brute_force(
    router: Router, views: Views, rows: dict[str, dict], queries_QD: np.ndarray, weight: float, k: int
) -> None:
    """Scores, order to the last tie, winning views and the certificate, under every filter."""
    texts = {name: f"{row['title']}\n{row['text']}" for name, row in rows.items()}
    for filter in FILTERS:
        answer = router.search(queries_QD, k, filter=filter, hybrid=HybridQueries(QUESTIONS, weight))
        there = {name: own for name, own in views.items() if passes(filter, rows[name])}
        for question, query_D, hits in zip(QUESTIONS, queries_QD, answer.hits, strict=True):
            expected = hybrid_brute_force(there, bm25_over(texts, question), weight, query_D, k)
            assert [(hit.passage_id, hit.score, hit.view) for hit in hits] == expected
        assert answer.exact.certified and answer.coverage_share == 1.0


@given(
    st.integers(0, 999),
    st.integers(1, 8),
    st.integers(1, 5),
    st.integers(1, 90),
    st.integers(1, 95),
    PRECISIONS,
    WEIGHTS,
    st.booleans(),
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_filtered_hybrid_search_is_brute_force_over_both_scores_of_what_passes(
    tmp_path, seed, num_shards, num_parts, num_passages, k, precision, weight, together
):
    scan, dtype = precision
    root = tmp_path / "index"
    shutil.rmtree(root, ignore_errors=True)
    views = random_views(num_passages, seed, levels=2)
    rows = random_rows(views, seed)
    corpus, params = corpus_of(root, rows, num_parts), IndexParams(scan=scan)
    version = publish_random_index(root, views, num_shards, params, dtype=dtype, corpus=corpus, with_words=True)
    queries_QD = np.random.default_rng(seed + 1).integers(-2, 3, (3, D)).astype(np.float32)
    assert_brute_force(routed(root, version, together), views, rows, queries_QD, weight, k)
