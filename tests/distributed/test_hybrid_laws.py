"""Compares hybrid searches over any shards, precision, weight and filter with brute force over both scores."""

import dataclasses
import json
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from random_index import (
    D,
    Views,
    bm25_over,
    brute_force,
    hybrid_brute_force,
    publish_random_index,
    random_views,
)
from test_compact import STEPS, publish_compaction, publish_reshard, publish_update
from test_router import Stuck

from mvr_ray import deadline as deadline_module
from mvr_ray.config import PrepareConfig, SourceConfig
from mvr_ray.deadline import Deadline
from mvr_ray.distributed import router as router_module
from mvr_ray.distributed.indexing.lexical import (
    LexicalTask,
    build_lexical,
    compact_lexical,
    find_base,
    open_statistics,
    repair_lexical,
)
from mvr_ray.distributed.router import Router
from mvr_ray.distributed.searching.messages import ShardResults
from mvr_ray.distributed.searching.searcher import LocalSearchers, SearcherTask
from mvr_ray.errors import CoverageError
from mvr_ray.index.base import IndexParams
from mvr_ray.index.lexical import Postings, WordRule, find_words_as_bm25s
from mvr_ray.store import manifest as manifests
from mvr_ray.store.corpus import Corpus, shard_of
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.prepare import prepare
from mvr_ray.store.update import update
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


def test_a_shard_that_never_answers_leaves_time_for_the_parts_of_the_others_hits(tmp_path, monkeypatch):
    views = random_views(30, 5)
    corpus = corpus_of(tmp_path, random_rows(views, 5), 2)
    version = publish_random_index(tmp_path, views, 3, corpus=corpus, words="english")
    whole = local_router(tmp_path, version)
    fleet = Stuck(whole.fleet, 1, deaf=False)
    router = Router(whole.store, version, fleet)
    monkeypatch.setattr(router, "embed", lambda _: np.ones((1, D), np.float32))
    monkeypatch.setattr(deadline_module, "time", SimpleNamespace(monotonic=fleet.clock))
    options = {"hybrid": 2.0, "parts": True, "deadline": Deadline.after(2.0)}
    answer = router.search_text(QUESTIONS[:1], 1, **options, min_coverage=0.0)
    assert [shard.state for shard in answer.shards] == ["searched", "late", "searched"]
    [[hit]], [[both]] = answer.hits, answer.parts
    assert hit.score == np.float32(both.lexical + 2.0 * both.dense) and fleet.now_s < 102.0


def test_a_second_round_without_an_answer_leaves_time_for_the_other_list_of_reciprocal_ranks(tmp_path, monkeypatch):
    class StuckInSecondRounds(Stuck):
        def fan_out(self, request, deadline, admit=False) -> ShardResults:
            if admit:
                self.now_s = deadline.due_s
            return super().fan_out(request, deadline, admit)

    views = random_views(240, 5)
    rows = random_rows(views, 5)
    for name, row in rows.items():
        row |= {"title": "", "text": "ship" if shard_of(name, 4) == 2 else "x"}
    corpus = corpus_of(tmp_path, rows, 2)
    version = publish_random_index(tmp_path, views, 4, corpus=corpus, words="english")
    whole = local_router(tmp_path, version)
    fleet = StuckInSecondRounds(whole.fleet, -1, deaf=True)
    monkeypatch.setattr(deadline_module, "time", SimpleNamespace(monotonic=fleet.clock))
    words, query_1D = HybridQueries(QUESTIONS[:1], "rrf"), np.ones((1, D), np.float32)
    options = {"hybrid": words, "deadline": Deadline.after(2.0), "min_coverage": 0.5}
    answer = Router(whole.store, version, fleet).search(query_1D, 10, **options)
    assert [shard.state for shard in answer.shards] == ["searched", "searched", "late", "searched"]
    assert len(answer.hits[0]) == 10 and not answer.exact.certified and fleet.now_s <= 102.0


def test_past_the_deadline_a_hybrid_search_reads_no_further_texts(tmp_path, monkeypatch):
    views = random_views(30, 5)
    corpus = corpus_of(tmp_path, random_rows(views, 5), 2)
    router = local_router(tmp_path, publish_random_index(tmp_path, views, 3, corpus=corpus, words="english"))
    read: list[str] = []

    def passages(ids):
        read.extend(ids)
        return corpus.get(ids)

    class EndsAfterTexts(Deadline):
        @property
        def left_s(self) -> float:
            return 0.0 if len(read) >= 8 else 1.0

    monkeypatch.setattr(router, "embed", lambda _: np.ones((1, D), np.float32))
    monkeypatch.setattr(router, "passages", passages)
    monkeypatch.setattr(router_module, "TEXTS_AT_ONCE", 4)
    with pytest.raises(CoverageError, match=r"the words of 22 of the 30 hits were not counted by the deadline; ask"):
        router.search_text(QUESTIONS[:1], 30, hybrid=2.0, parts=True, deadline=EndsAfterTexts.after(1.0))
    assert len(read) == 8


def local_router(root: Path, version: Manifest) -> Router:
    store = Store(str(root))
    fleet = LocalSearchers(SearcherTask(store.root, version))
    return Router(store, version, fleet)


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
)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_filtered_hybrid_search_is_brute_force_over_both_scores_of_what_passes(
    tmp_path, seed, num_shards, num_parts, num_passages, k, precision, weight
):
    scan, dtype = precision
    root = tmp_path / "index"
    shutil.rmtree(root, ignore_errors=True)
    views = random_views(num_passages, seed, levels=2)
    rows = random_rows(views, seed)
    corpus, params = corpus_of(root, rows, num_parts), IndexParams(scan=scan)
    version = publish_random_index(root, views, num_shards, params, dtype=dtype, corpus=corpus, words="english")
    queries_QD = np.random.default_rng(seed + 1).integers(-2, 3, (3, D)).astype(np.float32)
    assert_brute_force(local_router(root, version), views, rows, queries_QD, weight, k)


@given(st.integers(0, 999), st.integers(1, 8), st.integers(1, 150), st.integers(1, 40), PRECISIONS)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_reciprocal_ranks_are_those_in_the_certified_lists_of_both_sides(
    tmp_path, seed, num_shards, num_passages, k, precision
):
    scan, dtype = precision
    root = tmp_path / "index"
    shutil.rmtree(root, ignore_errors=True)
    views = random_views(num_passages, seed, levels=2)
    rows = random_rows(views, seed)
    corpus, params = corpus_of(root, rows, 2), IndexParams(scan=scan)
    version = publish_random_index(root, views, num_shards, params, dtype=dtype, corpus=corpus, words="english")
    router = local_router(root, version)
    queries_QD = np.random.default_rng(seed + 1).integers(-2, 3, (3, D)).astype(np.float32)
    texts = {name: f"{row['title']}\n{row['text']}" for name, row in rows.items()}
    for filter in FILTERS:
        answer = router.search(queries_QD, k, filter=filter, hybrid=HybridQueries(QUESTIONS, "rrf"))
        there = {name: own for name, own in views.items() if passes(filter, rows[name])}
        for question, query_D, hits in zip(QUESTIONS, queries_QD, answer.hits, strict=True):
            lexical = {name: score for name, score in bm25_over(texts, question).items() if score and name in there}
            near = brute_force(there, query_D, len(there))
            lists = [sorted(lexical, key=lambda name: (-lexical[name], name))[:100], [hit[0] for hit in near][:100]]
            total: dict[str, float] = {}
            for ranking in lists:
                for rank, name in enumerate(ranking, 1):
                    total[name] = total.get(name, 0.0) + 1 / (60 + rank)
            views_of = {name: view for name, _, view in near}
            best = sorted(total, key=lambda name: (-total[name], name))[:k]
            expected = [(name, total[name], views_of[name]) for name in best]
            assert [(hit.passage_id, hit.score, hit.view) for hit in hits] == expected
        assert answer.exact.certified and answer.coverage_share == 1.0
        assert answer.exact.method.startswith("reciprocal ranks in the first 100 by bm25 and the first 100 by flat")


def update_corpus(root: Path, upserts: dict[str, dict], deletions: set[str]) -> Corpus:
    changes = root / "changes.jsonl"
    lines = [*upserts.values(), *({"id": name, "delete": True} for name in sorted(deletions))]
    changes.write_text("".join(json.dumps(line) + "\n" for line in lines))
    update(PrepareConfig(), Store(str(root)), str(changes))
    return Corpus.open(Store(str(root)), "corpus")


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 60), STEPS, st.integers(1, 8), PRECISIONS, WEIGHTS, st.integers(0, 999))
def test_after_any_history_a_hybrid_search_is_brute_force_over_what_is_there(
    tmp_path_factory, count, steps, shards, precision, weight, seed
):
    """Updates, deletions, compactions and reshards; every version of the history still answers for itself."""
    scan, dtype = precision
    root, rng = tmp_path_factory.mktemp("history"), np.random.default_rng(seed)
    store, views = Store(str(root)), random_views(count, seed, levels=2)
    rows = random_rows(views, seed)
    corpus = corpus_of(root, rows, shards)
    params = IndexParams(scan=scan)
    version = publish_random_index(root, views, shards, params, dtype=dtype, corpus=corpus, words="english")
    queries_QD = rng.integers(-2, 3, (3, D)).astype(np.float32)
    history = [(version, views, rows)]
    for step in steps:
        base, lexical = dataclasses.replace(version, lexical=None), version.lexical
        assert lexical
        if step[0] == "update":
            fresh = random_views(80, int(rng.integers(1 << 30)), levels=2)
            upserts = {f"p{at:03d}": fresh[f"p{at:03d}"] for at in sorted(step[1])}
            deletions = {f"p{at:03d}" for at in step[2]} - set(upserts)
            changed_rows = random_rows(upserts, int(rng.integers(1 << 30)))
            views = {name: own for name, own in (views | upserts).items() if name not in deletions}
            rows = {name: row for name, row in (rows | changed_rows).items() if name in views}
            if not views:
                break
            corpus = update_corpus(root, changed_rows, deletions)
            if len(base.shards) != corpus.num_shards:  # as `mvr-ray index` does
                base = publish_reshard(store, base, corpus.num_shards)
            plain = publish_update(store, base, upserts, deletions)
            task = LexicalTask(
                corpus, "random", corpus.num_shards, "english", find_base(store, "random", corpus, "english")
            )
            lexical = build_lexical(task)
        elif step[0] == "compact":
            plain = publish_compaction(store, base)
            lexical = compact_lexical(LexicalTask(corpus, "random", len(base.shards), "english"), lexical)
            assert lexical == build_lexical(LexicalTask(corpus, "random", len(base.shards), "english"))
        else:
            plain, task = publish_reshard(store, base, step[1]), LexicalTask(corpus, "random", step[1], "english")
            lexical = build_lexical(task, statistics=lexical.statistics)
        own = {"parent": plain.version, "corpus_digest": corpus.digest, "lexical": lexical}
        version = manifests.publish(store, dataclasses.replace(plain, **own))
        history.append((version, views, rows))
        event(f"shards with changes of words beside them: {sum(len(own) > 1 for own in lexical.postings)}")
    for version, there, own in history:
        assert_brute_force(local_router(root, version), there, own, queries_QD, weight, int(rng.integers(1, 20)))
        assert manifests.verify(store, version).problems == []


@pytest.fixture
def first_format(monkeypatch):
    """Words as earlier programs found and wrote them, until `undo`."""
    monkeypatch.setattr(LexicalTask, "rule", WordRule(find=find_words_as_bm25s))
    return monkeypatch


def test_words_of_an_earlier_rule_answer_by_it_until_any_writing_finds_them_anew(tmp_path, first_format):
    texts = {"p0": "学生。大学成立。", "p1": "大学的学生穿红色长袍。", "p2": "河流流向大海。", "p3": "छात्र लाल हैं"}
    rows = {name: {"id": name, "title": "", "text": text, "year": 1} for name, text in texts.items()}
    store, views = Store(str(tmp_path)), {name: random_views(1, 0)["p000"] for name in rows}
    corpus = corpus_of(tmp_path, rows, 2)
    earlier = publish_random_index(tmp_path, views, 2, corpus=corpus, words="english")
    first_format.undo()

    def matching_ids(version: Manifest, question: str) -> list[str]:
        router, passages = local_router(tmp_path, version), list(corpus)
        answer = router.search(np.zeros((1, D), np.float32), 9, hybrid=HybridQueries((question,), "words"))
        scores = router.lexical_scores([question], passages)
        assert {hit.passage_id: hit.score for hit in answer.hits[0]} == {
            one: float(score_Q[0]) for one, score_Q in scores.items() if score_Q[0]
        }
        return sorted(hit.passage_id for hit in answer.hits[0])

    assert matching_ids(earlier, "学生") == ["p0"] and matching_ids(earlier, "छात्र") == []
    assert earlier.lexical and find_base(store, "random", corpus, "english") is None
    assert manifests.verify(store, earlier).problems == []
    whole = build_lexical(LexicalTask(corpus, "random", 2, "english"))
    assert compact_lexical(LexicalTask(corpus, "random", 2, "english"), earlier.lexical) == whole
    assert open_statistics(store, "random", earlier.lexical.statistics).rule == WordRule(find=find_words_as_bm25s)
    version = manifests.publish(store, dataclasses.replace(earlier, parent=earlier.version, lexical=whole))
    assert find_base(store, "random", corpus, "english") == version
    assert find_base(store, "random", corpus, "german") is None
    assert open_statistics(store, "random", whole.statistics).rule == WordRule()
    assert matching_ids(version, "学生") == ["p0", "p1"] and matching_ids(version, "छात्र") == ["p3"]
    assert matching_ids(earlier, "学生") == ["p0"]


SMALL_CHANGES = st.lists(
    st.tuples(st.sets(st.integers(0, 130), max_size=12), st.sets(st.integers(0, 130), max_size=3)),
    min_size=1,
    max_size=9,
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(SMALL_CHANGES, st.integers(1, 3), st.sampled_from(["english", "german", "none"]), st.integers(0, 999))
def test_words_in_several_files_of_changes_score_as_whole_ones(tmp_path_factory, steps, shards, language, seed):
    """After every change, of every passage, to the last bit; a file that stays is larger than what follows it."""
    root, rng = tmp_path_factory.mktemp("words"), np.random.default_rng(seed)
    store, names = Store(str(root)), {f"p{at:03d}": np.zeros((1, D), np.float32) for at in range(100)}
    rows = random_rows(names, seed)
    corpus = corpus_of(root, rows, shards)
    version = publish_random_index(root, random_views(100, seed), shards, corpus=corpus, words=language)
    most_files = 1
    for upserts, deletions in steps:
        changed_rows = random_rows({f"p{at:03d}": names["p000"] for at in upserts}, int(rng.integers(1 << 30)))
        deleted_ids = {f"p{at:03d}" for at in deletions} & {*rows} - {*changed_rows}
        corpus = update_corpus(root, changed_rows, deleted_ids)
        rows = {name: row for name, row in (rows | changed_rows).items() if name not in deleted_ids}
        lexical = build_lexical(LexicalTask(corpus, "random", shards, language, version, most_share=1.0))
        whole = build_lexical(LexicalTask(corpus, "random", shards, language))
        statistics, exact = (open_statistics(store, "random", own.statistics) for own in (lexical, whole))
        for own_files, whole_file in zip(lexical.postings, whole.postings, strict=True):
            own, other = (
                Postings(*manifests.open_lexical(store, "random", files)) for files in (own_files, whole_file)
            )
            for words in WordRule(language).tokenize(QUESTIONS):
                np.testing.assert_array_equal(own.scores(words, statistics), other.scores(words, exact))
            sizes = [file.num_changes for file in own.changes]
            assert all(2 * size > 3 * after for size, after in pairwise(sizes))
            most_files = max(most_files, len(own_files))
        assert compact_lexical(LexicalTask(corpus, "random", shards, language), lexical) == whole
        own = {"parent": version.version, "corpus_digest": corpus.digest, "lexical": lexical}
        version = manifests.publish(store, dataclasses.replace(version, **own))
        several = any(len(files) > 2 for files in (lexical.statistics, *lexical.postings))
        assert version.format_version == (manifests.NEWEST_FORMAT if several else 1)
    event(f"files: {most_files}")
    assert version.lexical
    damaged_file = version.lexical.files[int(rng.integers(len(version.lexical.files)))]
    path = root / manifests.lexical_path("random", damaged_file)
    whole_bytes = path.read_bytes()
    path.write_bytes(whole_bytes[:-1])
    assert repair_lexical(store, version) and path.read_bytes() == whole_bytes


def test_small_changes_after_a_larger_one_do_not_write_its_words_again(tmp_path):
    names = {f"p{at:04d}": np.zeros((1, D), np.float32) for at in range(3000)}
    rows = {name: row | {"text": f"{row['text']} w{name}"} for name, row in random_rows(names, 1).items()}
    corpus = corpus_of(tmp_path, rows, 1)
    version = publish_random_index(tmp_path, random_views(3000, 1), 1, IndexParams(), corpus=corpus, words="english")
    num_bytes: list[int] = []
    for change in [range(0, 3000, 5), *([at] for at in range(5, 2000, 200))]:
        changed_rows = {f"p{at:04d}": rows[f"p{at:04d}"] | {"text": f"new{at} words"} for at in change}
        before, corpus = version, update_corpus(tmp_path, changed_rows, set())
        lexical = build_lexical(LexicalTask(corpus, "random", 1, "english", before))
        own = {"parent": before.version, "corpus_digest": corpus.digest, "lexical": lexical}
        version = manifests.publish(Store(str(tmp_path)), dataclasses.replace(before, **own))
        assert before.lexical and version.lexical
        num_bytes.append(sum(file.num_bytes for file in {*version.lexical.files} - {*before.lexical.files}))
    assert max(num_bytes[1:]) < num_bytes[0] / 6, "a change of one passage, beside one of 600"
