"""The lexical index of a version: built with its shards, shared by versions, verified, repaired and collected."""

import dataclasses
import json
from pathlib import Path

import pytest
from bm25_index import BM25Index

from mvr_ray.distributed.indexing import build_index, repair, rewrite
from mvr_ray.distributed.indexing.lexical import LexicalTask, open_statistics, shard_words
from mvr_ray.index.lexical import Postings, WordRule
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.delta import open_embeddings
from mvr_ray.store.files import Store
from mvr_ray.store.gc import collect
from mvr_ray.store.manifest import LEXICAL, Manifest
from mvr_ray.store.update import update

pytestmark = [pytest.mark.data, pytest.mark.ray, pytest.mark.usefixtures("without_ray")]


@pytest.fixture
def with_words(own_index, run_over) -> Path:
    build_index.index(run_over(own_index, index={"lexical": True}))
    return own_index


def open_postings(store: Store, version: Manifest, at: int) -> Postings:
    assert version.lexical
    return Postings(*manifest.open_lexical(store, version.index, version.lexical.postings[at]))


def words_score_as_bm25_over_the_corpus(store: Store, version: Manifest, language: str = "english") -> bool:
    corpus = Corpus.open(store, version.corpus, version.corpus_digest)
    oracle, texts = BM25Index(corpus, language), ["Which team won the league season?", "the university of Warsaw"]
    for words, expected in zip(
        WordRule(language).tokenize(texts), oracle.search(texts, corpus.num_passages), strict=True
    ):
        scores: dict[str, float] = {}
        for at, entry in enumerate(version.shards):
            folder = manifest.open_shard(store, version.index, entry)
            ids = open_embeddings(folder, entry.files).ids()
            own = open_postings(store, version, at).scores(
                words, open_statistics(store, version.index, version.lexical.statistics)
            )
            scores |= dict(zip(ids, own.tolist(), strict=True))
        assert len(scores) == corpus.num_passages and expected
        assert {i: s for i, s in scores.items() if s} == {hit.passage_id: hit.score for hit in expected}
    return True


def test_words_join_a_version_without_encoding_and_score_as_bm25_over_the_corpus(own_index, run_over):
    store, reports = Store(str(own_index)), []
    first = manifest.read(store, "index")
    run = run_over(own_index, index={"lexical": True})
    second = build_index.index(run, lambda *progress: reports.append(progress[0]))
    assert first.lexical is None and second.lexical and second.shards == first.shards
    assert "encode" not in reports and "index the words, shards" in reports
    assert words_score_as_bm25_over_the_corpus(store, second)
    assert build_index.index(run) == second
    assert manifest.rollback(store, "index", 1).lexical is None


def test_a_version_without_words_is_written_as_before_there_were_any(own_index):
    store = Store(str(own_index))
    fields = json.loads(store.read_bytes(paths.manifest("index", 1)))
    assert "lexical" not in fields
    assert manifest.read(store, "index").lexical is None


def test_a_changed_corpus_has_new_statistics_and_the_postings_of_parts_that_stay(with_words, run_over, tmp_path):
    store = Store(str(with_words))
    before = manifest.read(store, "index")
    assert before.lexical
    run = run_over(with_words, index={"lexical": True})
    changes = tmp_path / "changes.jsonl"
    changes.write_text(json.dumps({"id": "new", "title": "League", "text": "A team won the league season."}) + "\n")
    update(run.prepare, store, str(changes))
    after = build_index.index(run)
    assert after.lexical and after.num_passages == before.num_passages + 1
    assert after.lexical.statistics != before.lexical.statistics
    is_same = [old == new for old, new in zip(before.lexical.postings, after.lexical.postings, strict=True)]
    assert sorted(is_same) == [False, True, True]
    shard = is_same.index(False)
    old, new = before.lexical.postings[shard], after.lexical.postings[shard]
    assert new[:1] == old and len(new) == 2 and new[1].num_bytes < old[0].num_bytes / 2
    assert after.lexical.statistics[:1] == before.lexical.statistics and len(after.lexical.statistics) == 2
    assert words_score_as_bm25_over_the_corpus(store, after)


def test_an_unchanged_part_keeps_its_words_without_being_read(with_words, monkeypatch: pytest.MonkeyPatch):
    store = Store(str(with_words))
    version = manifest.read(store, "index")
    assert version.lexical
    task = LexicalTask(Corpus.open(store, version.corpus), "index", len(version.shards), "english", version)
    monkeypatch.setattr(Corpus, "part", None)
    assert tuple(shard_words(task, shard).files for shard in range(3)) == version.lexical.postings


def test_resharding_keeps_the_words(with_words, run_over):
    store = Store(str(with_words))
    rewrite.reshard(run_over(with_words), 4)
    version = manifest.read(store, "index")
    assert version.lexical and len(version.lexical.postings) == 4
    assert words_score_as_bm25_over_the_corpus(store, version)


def test_a_version_keeps_the_language_of_its_words_until_index_sets_another(own_index, run_over):
    store, reports = Store(str(own_index)), []
    run = run_over(own_index, index={"lexical": True, "language": "german"})
    german = build_index.index(run)
    assert german.lexical and words_score_as_bm25_over_the_corpus(store, german, "german")
    with pytest.raises(AssertionError):
        words_score_as_bm25_over_the_corpus(store, german)
    rewrite.reshard(run_over(own_index), 4)
    four_shards = manifest.read(store, "index")
    assert four_shards.lexical and words_score_as_bm25_over_the_corpus(store, four_shards, "german")
    path = own_index / manifest.lexical_path("index", four_shards.lexical.statistics[0])
    whole = path.read_bytes()
    path.unlink()
    assert [one.state for one in repair.repair(store, four_shards).repairs] == [
        "repaired"
    ] and path.read_bytes() == whole
    english = build_index.index(run_over(own_index, index={"lexical": True}), lambda *own: reports.append(own[0]))
    assert words_score_as_bm25_over_the_corpus(store, english)
    assert english.shards == german.shards and "encode" not in reports


@pytest.mark.parametrize("which", [0, 2])
def test_damaged_words_are_found_and_written_again_from_the_corpus(with_words, run_over, which):
    store = Store(str(with_words))
    version = manifest.read(store, "index")
    assert version.lexical
    path = with_words / manifest.lexical_path("index", version.lexical.files[which])
    whole = path.read_bytes()
    path.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    (problem,) = manifest.verify(store, version).problems
    assert problem.shard == LEXICAL and problem.path in str(path)
    with pytest.raises(manifest.DigestError, match=r"missing or damaged .*versions CONFIG repair"):
        (
            open_statistics(store, version.index, version.lexical.statistics),
            [open_postings(store, version, at) for at in range(3)],
        )
    report = repair.repair(store, version)
    assert [(one.shard, one.state) for one in report.repairs] == [(LEXICAL, "repaired")]
    assert path.read_bytes() == whole and not manifest.verify(store, version).problems
    path.unlink()
    assert build_index.index(run_over(with_words, index={"lexical": True})) == version
    assert path.read_bytes() == whole


def test_words_go_when_no_version_names_them(with_words):
    store = Store(str(with_words))
    version = manifest.read(store, "index")
    assert version.lexical
    manifest.publish(store, dataclasses.replace(version, parent=version.version, lexical=None))
    assert not [path for path in collect(store, "index", keep=2, grace_s=0) if "lexical" in path]
    removed_paths = collect(store, "index", keep=1, grace_s=0)
    assert {path for path in removed_paths if "lexical" in path} == {
        manifest.lexical_path("index", entry) for entry in version.lexical.files
    }
