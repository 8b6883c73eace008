"""Tests laws of corpus changes through the stages themselves: encoded, kept and returned passages."""

import dataclasses
import json
import shutil
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bm25_index import BM25Index
from damaged_file import flip_byte
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from kill_at_call import NEVER, kill_points, run_and_kill

from mvr_ray.config import MineConfig, RunConfig
from mvr_ray.core.encoding.snapshot import read_punkt
from mvr_ray.core.encoding.snippets import train_punkt
from mvr_ray.distributed import bm25
from mvr_ray.distributed import evaluate as evaluation
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.indexing import build_index, carry_over, encode, rewrite, shards
from mvr_ray.distributed.indexing.lexical import LexicalTask, build_lexical, has_words
from mvr_ray.distributed.indexing.repair import repair
from mvr_ray.distributed.indexing.shards import build_shard, shard_recall
from mvr_ray.distributed.indexing.staging import EncodeTask
from mvr_ray.distributed.mine import mine
from mvr_ray.distributed.retrieve import QuestionSet, RankSettings
from mvr_ray.distributed.router import Router, open_router
from mvr_ray.distributed.searching.searcher import LocalSearchers, SearcherTask
from mvr_ray.errors import DigestError, StorageError
from mvr_ray.index.candidates import LABELS_FILE
from mvr_ray.index.kinds import KINDS
from mvr_ray.index.lexical import Postings, write_statistics
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import Corpus, shard_of
from mvr_ray.store.delta import open_embeddings, views_by_id, write_changed
from mvr_ray.store.embeddings import EmbeddingShard, Views
from mvr_ray.store.files import Store
from mvr_ray.store.gc import collect
from mvr_ray.store.local_files import sha256_of
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.prepare import prepare
from mvr_ray.store.questions import write_questions
from mvr_ray.store.update import update
from mvr_ray.types import EmbeddingBlock, Question, no_progress
from mvr_ray.versions import rollback

pytestmark = pytest.mark.data

NUM_IDS, NUM_TEXTS = 30, 60
IDS = st.integers(0, NUM_IDS - 1)
UPSERTS = st.dictionaries(IDS, st.integers(0, NUM_TEXTS - 1), max_size=5)
STEPS = st.lists(
    st.tuples(st.just("update"), UPSERTS, st.sets(IDS, max_size=3))
    | st.tuples(st.just("refine"), st.sets(IDS, min_size=1, max_size=3))
    | st.tuples(st.just("reshard"), st.integers(1, 8))
    | st.tuples(st.just("compact"))
    | st.tuples(st.just("rollback"), st.integers(0, 9)),
    min_size=2,
    max_size=6,
)
Contents = dict[str, int]
"""The number of the text of each passage."""


def text_of(number: int) -> str:
    return f"Passage number {number} says {'little ' * (number % 7)}about {number * 37 % 101} rivers. It ends here."


def write_rows(file: Path, contents: Mapping[str, int], deletions: set[str] = frozenset()) -> str:
    rows: list[dict] = [
        {"id": name, "title": "T", "text": text_of(number), "year": 1900 + number} for name, number in contents.items()
    ]
    rows += [{"id": name, "delete": True} for name in sorted(deletions)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def stored_views(store: Store, version: Manifest) -> dict[str, Views]:
    views: dict[str, Views] = {}
    for entry in version.shards:
        folder = manifest.open_shard(store, version.index, entry)
        views |= views_by_id(open_embeddings(folder, entry.files).blocks())
    return views


def add_views(store: Store, version: Manifest, names: set[str]) -> Manifest:
    """Publish a refinement that adds or replaces one view of each of these passages."""
    entries = list(version.shards)
    for name in sorted(names):
        entry = entries[shard_of(name, len(entries))]
        shard = open_embeddings(manifest.open_shard(store, version.index, entry), entry.files)
        own = shard.find([name])[name]
        is_own_N = own.view_numbers_N < shard.num_views
        numbers_N = np.append(own.view_numbers_N[is_own_N], np.int16(shard.num_views))
        new_views = Views(numbers_N, np.vstack([own.vectors_ND[is_own_N], -own.vectors_ND[:1]]))
        with store.scratch() as scratch:
            folder = scratch / "shard"
            folder.mkdir()
            write_changed(shard, folder, {name: new_views})
            entries[entry.shard] = build_shard(store, version, entry.shard, folder).entry
    refined_version = dataclasses.replace(
        version, parent=version.version, operation="refine:feedback_views", shards=tuple(entries)
    )
    return manifest.publish(store, refined_version)


def require_true_answers(root: Path, version: Manifest, views: Mapping[str, Views], contents: Contents) -> None:
    """Hits equal those of brute force over these views, with and without a filter, ties by id."""
    task = SearcherTask(str(root), version)
    router = Router(Store(str(root)), version, LocalSearchers(task))
    queries_QD = np.stack([own.vectors_ND[0] for own in list(views.values())[:3]]).astype(np.float32)
    for year in (1900, 1930):
        passing = [name for name, number in contents.items() if 1900 + number >= year]
        answer = router.search(queries_QD, 7, filter={"year": {"gte": year}})
        assert answer.exact.certified and answer.coverage_share == 1
        for hits, query_D in zip(answer.hits, queries_QD):
            true = {name: float((views[name].vectors_ND.astype(np.float32) @ query_D).max()) for name in passing}
            best = sorted(passing, key=lambda name: (-true[name], name))[:7]
            assert [hit.score for hit in hits] == pytest.approx([true[name] for name in best], abs=1e-4)
            assert all(hit.score == pytest.approx(true[hit.passage_id], abs=1e-4) for hit in hits)
            assert len({hit.passage_id for hit in hits}) == len(best)


@pytest.fixture(scope="module")
def first_store(run_over, tmp_path_factory) -> Path:
    """A store with its encoder; no test changes it."""
    root = tmp_path_factory.mktemp("first") / "store"
    run = own_run(run_over, root, 3)
    write_rows(root.parent / "passages.jsonl", {f"p{number:02d}": number for number in range(20)})
    prepare(run.prepare, Store(str(root)))
    with session.staying_local():  # also after other tests have joined the cluster
        build_index.index(run)
    return root


def own_run(run_over, root: Path, num_shards: int, **index) -> RunConfig:
    source = {"path": str(root.parent / "passages.jsonl")}
    own = {"num_shards": num_shards, "sources": [source], "fields": {"year": "int"}}
    return run_over(root, prepare=own, index=index, resources={"local_passages": 10_000})


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, st.sampled_from([{"dtype": "fp32"}, {"dtype": "fp16"}, {"scan": "int8"}]), st.integers(1, 8))
@example([("refine", {18}), ("update", {0: 54}, set()), ("update", {0: 0, 2: 54}, set())], {"dtype": "fp32"}, 1)
@example(
    [("refine", {18}), ("update", {0: 54}, set()), ("refine", {0}), ("reshard", 3), ("update", {0: 0, 2: 54}, set())],
    {"dtype": "fp32"},
    2,
)
def test_after_any_history_nothing_is_encoded_twice_and_what_was_learned_stays(
    first_store, run_over, tmp_path_factory, steps, way, num_shards
):
    """The oracle keeps the content and the learned views of every passage at every version."""
    root = tmp_path_factory.mktemp("history") / "store"
    shutil.copytree(first_store / "encoders", root / "encoders")
    store, run = Store(str(root)), own_run(run_over, root, num_shards, **way)
    contents: Contents = {f"p{number:02d}": number for number in range(0, NUM_IDS, 2)}
    write_rows(root.parent / "passages.jsonl", contents)
    prepare(run.prepare, store)
    live = build_index.index(run)
    encoded_views = {contents[name]: own for name, own in stored_views(store, live).items()}
    learned_ids: set[str] = set()
    history = {live.version: (dict(contents), set(learned_ids))}
    for kind, *words in steps:
        if kind == "update":
            upserts = {f"p{at:02d}": number for at, number in words[0].items()}
            deletions = {f"p{at:02d}" for at in words[1]} - set(upserts)
            before = dict(contents)
            contents = {name: own for name, own in (contents | upserts).items() if name not in deletions}
            if not contents:
                break
            update(run.prepare, store, write_rows(root.parent / "changes.jsonl", upserts, deletions), index="index")
            new = {name for name, number in contents.items() if number not in encoded_views}
            new_contents = {contents[name] for name in new}
            old, live = live, build_index.index(run)
            learned_ids = {name for name in learned_ids if contents.get(name) == before[name]}
            if live.version != old.version:
                assert live.metrics["encoded"] == len(new_contents)
                assert live.metrics["carried_over"] == len(contents) - len(new_contents)
            else:
                assert contents == before
            views = stored_views(store, live)
            for name in sorted(new):
                encoded_views.setdefault(contents[name], views[name])
            event(f"contents under another id: {len(upserts) > len(new)}, twice: {len(new) > len(new_contents)}")
        elif kind == "refine":
            names = {f"p{at:02d}" for at in words[0]} & set(contents)
            if names:
                live, learned_ids = add_views(store, live, names), learned_ids | names
        elif kind == "reshard":
            rewrite.reshard(run, words[0])
            live = manifest.read(store, "index")
        elif kind == "compact":
            rewrite.compact(run)
            live = manifest.read(store, "index")
        else:
            to = sorted(history)[words[0] % len(history)]
            rollback(store, "index", to)
            live = manifest.read(store, "index")
            contents, learned_ids = dict(history[to][0]), set(history[to][1])
        history[live.version] = dict(contents), set(learned_ids)
    for number, (there, is_learned) in history.items():  # every earlier version still gives its own answers
        version = manifest.read(store, "index", number)
        views = stored_views(store, version)
        assert sorted(views) == sorted(there)
        for name, own in views.items():
            true = encoded_views[there[name]]
            as_encoded = own.vectors_ND[own.view_numbers_N < version.num_views]
            assert as_encoded.tobytes() == true.vectors_ND.tobytes()
            assert (len(own.vectors_ND) > len(as_encoded)) == (name in is_learned)
        require_true_answers(root, version, views, there)
        assert manifest.verify(store, version).problems == []


def test_after_any_number_of_updates_an_index_finds_what_the_manifest_promises_or_is_built_from_nothing(
    first_store, run_over, tmp_path, monkeypatch
):
    """Deep searches of few passages are exhaustive: recall is measured at depth 2, with every view."""
    monkeypatch.setattr(shards, "RECALL_DEPTH", 2)
    root = shutil.copytree(first_store / "encoders", tmp_path / "store" / "encoders").parent
    index = {"kind": "faiss", "factory": "IVF8,Flat", "nprobe": 1, "compact_share": 0.9, "recall_sample": 400}
    store, run, rng = Store(str(root)), own_run(run_over, root, 3, **index), np.random.default_rng(3)
    write_rows(tmp_path / "passages.jsonl", {f"p{number:02d}": number for number in range(60)})
    prepare(run.prepare, store)
    version, counts = build_index.index(run), []
    for step in range(6):
        upserts = {f"p{at:02d}": 100 * (step + 1) + at for at in rng.choice(60, 8, replace=False).tolist()}
        update(run.prepare, store, write_rows(tmp_path / "changes.jsonl", upserts), index="index")
        before, version = version, build_index.index(run)
        counts.append((version.metrics["shards_updated"], version.metrics["shards_rebuilt"]))
        new = [entry for entry in version.shards if entry not in before.shards]
        assert sum(counts[-1]) == len(new)
        assert counts[-1][0] == sum(LABELS_FILE in entry.files for entry in new)
        recalls = [shard_recall(store, version, entry, 400) for entry in version.shards]
        updated_recalls = [recall for recall, entry in zip(recalls, version.shards) if LABELS_FILE in entry.files]
        assert all(one >= version.metrics["recall_least"] for one in updated_recalls)
        assert version.metrics["recall_least"] >= before.metrics["recall_least"] or not updated_recalls
        weights = [entry.num_passages for entry in version.shards]
        assert version.recall == version.metrics["recall"] == pytest.approx(np.average(recalls, weights=weights))
    assert min(sum(column) for column in zip(*counts)) > 0, "both ways were taken"


@pytest.mark.parametrize(
    ("kind", "scan"),
    [pytest.param(kind, "vectors", marks=[pytest.mark.slow] * (kind != "flat")) for kind in KINDS] + [("flat", "int8")],
)
def test_an_update_that_was_interrupted_at_any_step_ends_with_the_same_bytes(
    first_store, run_over, tmp_path, kind, scan, without_ray
):
    stores: dict[str, Manifest] = {}
    for moment in ("", "look for embeddings", "look for equal", "encode", "build shards"):
        root = shutil.copytree(first_store, tmp_path / (moment or "whole") / "store")
        store = Store(str(root))
        run = own_run(run_over, root, 3, kind=kind, scan=scan, factory="IVF2,Flat", hnsw_m=4)
        write_rows(root.parent / "passages.jsonl", {f"p{number:02d}": number for number in range(20)})
        first = build_index.index(run)
        update(
            run.prepare, store, write_rows(root.parent / "changes.jsonl", {"p03": 50, "new": 51, "twin": 51}, {"p04"})
        )

        def interrupt(stage: str, num: int, total: int, moment: str = moment) -> None:
            if moment and stage.startswith(moment):
                raise KeyboardInterrupt

        if moment:
            with pytest.raises(KeyboardInterrupt):
                build_index.index(run, interrupt)
        stores[moment] = build_index.index(run)
        assert manifest.verify(store, stores[moment]).problems == []
    assert len({version.content_digest() for version in stores.values()}) == 1
    assert any(LABELS_FILE in entry.files for entry in stores[""].shards) == (kind != "flat")
    if scan == "int8":
        for before, entry in zip(first.shards, stores[""].shards):
            prefix = "first-" if paths.CHANGES in entry.files else ""
            for name in ("codes.npy", "scales.npy"):
                assert entry.files[prefix + name] == before.files[name], "an update writes no codes"
        assert any(paths.CHANGES in entry.files for entry in stores[""].shards)
        rewrite.compact(run)
        whole = manifest.read(store, "index")
        assert not any(name.startswith("first-") for entry in whole.shards for name in entry.files)
        router = Router(store, whole, LocalSearchers(SearcherTask(store.root, whole)))
        answer = router.search(np.ones((1, whole.dimension), np.float32), 5)
        assert answer.exact.certified and answer.coverage_share == 1.0, "codes fit what compaction wrote"


@pytest.mark.slow
@pytest.mark.chaos(
    "index over a changed corpus killed at each call that writes, syncs, names or renames",
    "the live version is whole: the old one or the new one; the same command ends with the undisturbed bytes",
)
@pytest.mark.parametrize("kind", ["flat", "hnsw"])
def test_an_index_of_changes_killed_at_any_call_leaves_a_whole_version_and_ends_with_the_same_bytes(
    first_store, run_over, tmp_path, kind, without_ray, record_property
):
    """The new contents stand in the index under other ids, so a fork, which cannot use the threads of torch, need not
    encode."""
    before = shutil.copytree(first_store, tmp_path / "before" / "store")
    write_rows(before.parent / "passages.jsonl", {f"p{number:02d}": number for number in range(20)})
    run = own_run(run_over, before, 3, kind=kind, hnsw_m=4)
    build_index.index(run)
    changes = write_rows(tmp_path / "changes.jsonl", {"p03": 5, "new": 6, "newer": 7}, {"p04"})
    update(run.prepare, Store(str(before)), changes)
    old = manifest.read(Store(str(before)), "index")

    def copy(name: str) -> RunConfig:
        root = shutil.copytree(before, tmp_path / name / "store")
        write_rows(root.parent / "passages.jsonl", {f"p{number:02d}": number for number in range(20)})
        return own_run(run_over, root, 3, kind=kind, hnsw_m=4, encoder=old.encoder_fingerprint)  # needs no backbone

    new = build_index.index(copy("whole"))
    assert new.metrics["encoded"] == 0 and new.version == old.version + 1
    assert kind == "flat" or any(LABELS_FILE in entry.files for entry in new.shards)
    outcomes: list[bool] = []
    for at in kill_points(run_and_kill(partial(build_index.index, copy("undisturbed")), NEVER)):
        run = copy(f"killed at {at}")
        store = Store(str(run.store.path))
        assert len(run_and_kill(partial(build_index.index, run), at)) == at
        live = manifest.read(store, "index")
        assert live.content_digest() in (old.content_digest(), new.content_digest())
        assert manifest.verify(store, live).problems == []
        outcomes.append(live.version == new.version)
        build_index.index(run)
        live = manifest.read(store, "index")
        assert (live.version, live.content_digest()) == (new.version, new.content_digest())
        assert manifest.verify(store, live).problems == [] == manifest.verify(store, old).problems
        shutil.rmtree(tmp_path / f"killed at {at}")
    assert outcomes == sorted(outcomes) and {*outcomes} == {False, True}, "old until it is named, new from then on"
    record_property("figures", f"killed {len(outcomes)} times; the new one was live after {sum(outcomes)}")


@pytest.mark.parametrize("is_removed", [True, False], ids=["collected", "damaged"])
def test_an_interrupted_index_is_continued_though_the_shards_that_it_builds_on_are_gone(
    first_store, run_over, tmp_path, is_removed
):
    class Interruption(Exception):
        pass

    def interrupt(what: str, *_) -> None:
        if what == "encode":
            raise Interruption

    root = tmp_path / "store"
    shutil.copytree(first_store, root)
    store, run = Store(str(root)), own_run(run_over, root, 3)
    first = manifest.read(store, "index")
    update(run.prepare, store, write_rows(tmp_path / "changes.jsonl", {f"p{at:02d}": 30 + at for at in range(12)}))
    with pytest.raises(Interruption):
        build_index.index(run, interrupt)
    for entry in first.shards if is_removed else first.shards[:1]:
        path = paths.shard_dir("index", entry.digest)
        if is_removed:
            store.delete_dir(path)
        else:
            flip_byte(root / path / paths.EMBEDDINGS)
    version = build_index.index(run)
    assert (version.version, version.num_passages) == (2, 20) and manifest.verify(store, version).problems == []


def test_a_content_under_another_id_is_not_encoded_again(first_store, run_over, tmp_path):
    root = shutil.copytree(first_store, tmp_path / "store")
    store, run = Store(str(root)), own_run(run_over, root, 3)
    first = manifest.read(store, "index")
    write_rows(tmp_path / "passages.jsonl", {f"renamed {number}": number for number in range(20)} | {"new": 50})
    prepare(run.prepare, store)
    reports: list[tuple] = []
    version = build_index.index(run, lambda *report: reports.append(report))
    assert [version.metrics[name] for name in ("encoded", "carried_over", "deleted")] == [1, 20, 20]
    before, after = stored_views(store, first), stored_views(store, version)
    for number in range(20):
        assert after[f"renamed {number}"].vectors_ND.tobytes() == before[f"p{number:02d}"].vectors_ND.tobytes()


def test_sentences_learned_from_the_corpus_stay_when_it_changes(first_store, run_over, tmp_path):
    root = shutil.copytree(first_store, tmp_path / "store")
    store, run = Store(str(root)), own_run(run_over, root, 3)
    encoder = run.encoder.model_copy(update={"strategy": "snippet_means", "sentences": "corpus"})
    run = run.model_copy(update={"encoder": encoder})
    first = build_index.index(run)
    changes = tmp_path / "changes.jsonl"
    changes.write_text(
        json.dumps({"id": "new", "text": "It is approx. three miles. " * 20 + "See approx. here."}) + "\n"
    )
    update(run.prepare, store, str(changes))
    passages = Corpus.open(store, run.prepare.corpus)
    assert train_punkt(one.text for one in passages) != read_punkt(
        root / paths.encoder_dir(first.encoder_name, first.encoder_fingerprint)
    )
    version = build_index.index(run)
    assert (
        version.encoder_fingerprint == first.encoder_fingerprint != manifest.read(store, "index", 1).encoder_fingerprint
    )
    assert [version.metrics[name] for name in ("encoded", "carried_over")] == [1, 20]


@pytest.mark.parametrize("kind", ["hnsw", "faiss"])
def test_a_damaged_file_of_an_updated_index_is_named_and_made_again_to_the_same_bytes(
    first_store, run_over, tmp_path, kind
):
    root = shutil.copytree(first_store, tmp_path / "store")
    store, run = Store(str(root)), own_run(run_over, root, 3, kind=kind, factory="IVF2,Flat", hnsw_m=4)
    write_rows(tmp_path / "passages.jsonl", {f"p{number:02d}": number for number in range(20)})
    build_index.index(run)
    update(run.prepare, store, write_rows(tmp_path / "changes.jsonl", {"p03": 50, "new": 51}, {"p04"}))
    version = build_index.index(run)
    entry, reports = next(entry for entry in version.shards if LABELS_FILE in entry.files), list[tuple]()
    for name in set(entry.files) - {paths.EMBEDDINGS}:
        file = root / paths.shard_dir("index", entry.digest) / name
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.chmod(0o644)
        file.write_bytes(data)
        [problem] = manifest.verify(store, version).problems
        assert (problem.shard, Path(problem.path).name) == (entry.shard, name)
        [result] = repair(store, version).repairs
        assert result.state == "repaired" or "mvr-ray index CONFIG" in result.cure
        reports.clear()
        again = build_index.index(run, lambda *report: reports.append(report))
        assert (again.version, again.content_digest()) == (version.version, version.content_digest())
        assert manifest.verify(store, version).problems == []
        assert (name == paths.CHANGES) == ("encode" in {what for what, _, _ in reports})


@pytest.mark.parametrize("is_refined", [False, True])
def test_an_index_whose_file_alone_is_damaged_is_built_of_its_embeddings_where_no_other_version_has_them(
    first_store, run_over, tmp_path, is_refined
):
    root = shutil.copytree(first_store, tmp_path / "store")
    store, run = Store(str(root)), own_run(run_over, root, 3, kind="hnsw", hnsw_m=4)
    if is_refined:
        add_views(store, build_index.index(run), {"p03", "p05"})
    update(run.prepare, store, write_rows(tmp_path / "changes.jsonl", {"p07": 50, "new": 51}, {"p04"}))
    version = build_index.index(run)
    for number in range(1, version.version):
        store.delete(paths.manifest("index", number))
    collect(store, "index", keep=1, grace_s=0)
    views = stored_views(store, version)
    for entry in version.shards:
        [name] = {*entry.files} - {*paths.embedding_files(entry.files), LABELS_FILE}
        flip_byte(root / paths.shard_dir("index", entry.digest) / name)
    again = build_index.index(run)
    assert (again.operation, again.metrics["encoded"]) == ("index:refined" if is_refined else "index", 0)
    assert manifest.verify(store, again).problems == []
    after = stored_views(store, again)
    assert {name: own.vectors_ND.tobytes() for name, own in after.items()} == {
        name: own.vectors_ND.tobytes() for name, own in views.items()
    }


@pytest.mark.parametrize("num_shards", [1, 4])
def test_equal_passages_are_encoded_once_and_each_has_the_embedding(run_over, first_store, tmp_path, num_shards):
    """Each content has several passages, in one shard or several; the title is part of the content."""
    root = shutil.copytree(first_store / "encoders", tmp_path / "store" / "encoders").parent
    store, run = Store(str(root)), own_run(run_over, root, num_shards)
    contents = {f"p{number:02d}": number % 7 for number in range(40)}
    file = Path(write_rows(tmp_path / "passages.jsonl", contents))
    other = {"id": "q", "title": "Other", "text": text_of(3), "year": 1903}
    file.write_text(file.read_text() + json.dumps(other) + "\n")
    prepare(run.prepare, store)
    version = build_index.index(run)
    assert [version.metrics[name] for name in ("encoded", "carried_over", "deleted")] == [8, 33, 0]
    views = stored_views(store, version)
    assert len(views) == 41
    for name, number in contents.items():
        assert views[name].vectors_ND.tobytes() == views[f"p{number:02d}"].vectors_ND.tobytes()
    assert len({views[name].vectors_ND.tobytes() for name in views}) == 8
    assert manifest.verify(store, version).problems == []


def test_damaged_embeddings_of_equal_passages_are_gathered_again(run_over, first_store, tmp_path, monkeypatch):
    root = shutil.copytree(first_store / "encoders", tmp_path / "store" / "encoders").parent
    store, run, drafts = Store(str(root)), own_run(run_over, root, 3), list[Manifest]()
    write_rows(tmp_path / "passages.jsonl", {f"p{number:02d}": number % 7 for number in range(20)})
    prepare(run.prepare, store)

    def stop(_: Store, version: Manifest) -> None:
        drafts.append(version)
        raise StorageError("stopped before it is published")

    for damage in (None, flip_byte, Path.unlink):
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "publish", stop)
            with pytest.raises(StorageError, match="stopped before"):
                build_index.index(run)
        files = [*root.rglob("originals-*.arrow")]
        assert files and drafts[-1].shards == drafts[0].shards
        for file in root.rglob("built-*.json"):
            file.unlink()
        if damage:
            damage(files[0])
    version = build_index.index(run)
    assert (version.shards, version.metrics["encoded"]) == (drafts[0].shards, 7)
    assert manifest.verify(store, version).problems == []


def test_a_change_after_a_roll_back_does_not_bring_back_what_was_rolled_back(first_store, run_over, tmp_path):
    root = shutil.copytree(first_store, tmp_path / "store")
    store, run = Store(str(root)), own_run(run_over, root, 3)

    def change(contents: Mapping[str, int], deletions: set[str] = frozenset(), is_indexed: bool = True) -> list[str]:
        update(run.prepare, store, write_rows(tmp_path / "changes.jsonl", contents, deletions), index="index")
        if is_indexed:
            build_index.index(run)
        return sorted(passage.id for passage in Corpus.open(store, "corpus"))

    first = sorted(stored_views(store, manifest.read(store, "index")))
    assert change({"wrong": 51}, {"p00"}) == sorted({*first, "wrong"} - {"p00"})
    rollback(store, "index", 1)
    rewrite.compact(run)
    assert change({"right": 52}, is_indexed=False) == sorted([*first, "right"])
    assert change({"later": 53}) == sorted([*first, "right", "later"]), "a change that waits for `index` stays"
    assert sorted(stored_views(store, manifest.read(store, "index"))) == sorted([*first, "right", "later"])
    assert change({"last": 54}) == sorted([*first, "right", "later", "last"])
    assert paths.CHANGES in {name for entry in manifest.read(store, "index").shards for name in entry.files}


@pytest.mark.parametrize("is_rolled_back", [False, True])
def test_moved_queries_stay_with_the_version_that_follows_though_no_view_moved(
    first_store, run_over, tmp_path, is_rolled_back
):
    """A refinement of queries alone has the shards of the version before it."""
    root = shutil.copytree(first_store, tmp_path / "store")
    store, run = Store(str(root)), own_run(run_over, root, 3)
    first = build_index.index(run)
    (tmp_path / "queries").write_bytes(b"moved")
    queries = {"known": manifest.add_refined_queries(store, "index", tmp_path / "queries")}
    own = {"parent": first.version, "operation": "refine:query", "refined_queries": queries}
    version = manifest.publish(store, dataclasses.replace(first, **own))
    if is_rolled_back:
        version = manifest.rollback(store, "index", version.version)
    update(run.prepare, store, write_rows(tmp_path / "changes.jsonl", {"p03": 50, "copy": 5}))
    after = build_index.index(run)
    assert (after.parent, after.operation, after.refined_queries) == (version.version, "index:refined", queries)
    assert after.metrics["encoded"] == 1, "the first version has the text of the copy as encoded"


def test_a_compaction_stays_and_its_views_are_as_encoded_without_its_parent(first_store, run_over, tmp_path):
    root = shutil.copytree(first_store, tmp_path / "store")
    store, run = Store(str(root)), own_run(run_over, root, 3)

    def index_change(contents: Mapping[str, int]) -> Manifest:
        update(run.prepare, store, write_rows(tmp_path / "changes.jsonl", contents), index="index")
        return build_index.index(run)

    number = index_change({"p00": 51}).version
    assert rewrite.compact(run).version == build_index.index(run).version == number + 1
    whole = manifest.read(store, "index")
    for earlier in range(1, number + 1):
        store.delete(paths.manifest("index", earlier))
    version = index_change({"p01": 52})
    assert (version.operation, version.metrics["encoded"]) == ("index", 1)
    assert sum(entry not in whole.shards for entry in version.shards) == 1


@pytest.mark.parametrize("num_shards", [6, 1])
def test_a_corpus_prepared_again_over_the_shards_of_a_reshard_is_not_encoded_again(
    first_store, run_over, tmp_path, num_shards
):
    """The shards of the resharded version are then as many as the parts, but its own corpus has others."""
    root = shutil.copytree(first_store, tmp_path / "store")
    shutil.copy(first_store.parent / "passages.jsonl", tmp_path)
    store, run = Store(str(root)), own_run(run_over, root, 3, lexical=True)
    refined_version = add_views(store, build_index.index(run), {"p03", "p11"})
    rewrite.reshard(run, num_shards)
    run = own_run(run_over, root, num_shards, lexical=True)
    prepare(run.prepare, store)
    for keeps, views in (
        (True, stored_views(store, refined_version)),
        (False, stored_views(store, manifest.read(store, "index", 1))),
    ):
        version = build_index.index(own_run(run_over, root, num_shards, lexical=True, keep_refinement=keeps))
        assert [len(version.shards), version.metrics["encoded"], version.metrics.get("unlearned", 0)] == [
            num_shards,
            0,
            0,
        ]
        now = stored_views(store, version)
        assert {name: own.vectors_ND.tobytes() for name, own in now.items()} == {
            name: own.vectors_ND.tobytes() for name, own in views.items()
        }
        task = LexicalTask(Corpus.open(store, "corpus"), "index", num_shards, "english")
        assert version.lexical == build_lexical(task), "the words are those of an index from nothing"


def test_damaged_words_of_a_resharded_version_are_never_rebuilt_from_the_parts_of_its_corpus(
    first_store, run_over, tmp_path
):
    root = shutil.copytree(first_store, tmp_path / "store")
    store, run = Store(str(root)), own_run(run_over, root, 3, lexical=True, compact_share=1.0)
    build_index.index(run)
    update(run.prepare, store, write_rows(tmp_path / "changes.jsonl", {"p00": 51}), index="index")
    build_index.index(run)
    rewrite.reshard(run, 6)
    number = manifest.read(store, "index").version
    build_index.index(run)
    rollback(store, "index", number)
    version = manifest.read(store, "index")
    assert version.lexical and len(version.lexical.statistics) == 2
    for entry in version.lexical.statistics[1:]:
        flip_byte(root / manifest.lexical_path("index", entry))
    assert [one.state for one in repair(store, version).repairs] == ["lost"]


def test_learned_views_of_a_pruned_version_are_not_dropped_in_silence(first_store, run_over, tmp_path, caplog):
    root = shutil.copytree(first_store, tmp_path / "store")
    store, run = Store(str(root)), own_run(run_over, root, 3, prune_views=0.9)
    refined_version = add_views(store, build_index.index(run), {"p03"})
    assert "is not kept" not in caplog.text
    assert build_index.index(run).operation == "index"
    assert f"what refinement changed in version {refined_version.version} of index 'index' is not kept" in caplog.text
    caplog.clear()
    build_index.index(run)
    assert "is not kept" not in caplog.text, "nothing was refined since"


def test_a_version_of_which_pruning_left_no_view_out_is_kept_and_changed_as_one_with_all_views(
    first_store, run_over, tmp_path, caplog
):
    root = shutil.copytree(first_store, tmp_path / "store")
    store, run = Store(str(root)), own_run(run_over, root, 3, prune_views=0.0)
    version = build_index.index(run)
    assert version.metrics["pruned_views"] == 0
    refined_version = add_views(store, version, {"p03"})
    kept_version = build_index.index(run)
    assert build_index.index(run).version == kept_version.version
    update(run.prepare, store, write_rows(tmp_path / "changes.jsonl", {"p05": 51}), index="index")
    changed_version = build_index.index(run)
    whole_version = build_index.index(own_run(run_over, root, 3))
    assert not caplog.text
    assert (changed_version.metrics["encoded"], whole_version.metrics["encoded"]) == (1, 0)
    assert not any(paths.PRUNED_JSON in entry.files for entry in whole_version.shards)
    views = stored_views(store, refined_version)
    for own_version in (kept_version, changed_version, whole_version):
        own = stored_views(store, own_version)
        assert all(
            own[name].vectors_ND.tobytes() == views[name].vectors_ND.tobytes() for name in views if name != "p05"
        )


def test_a_version_with_all_views_takes_none_of_a_version_that_was_refined_and_pruned(first_store, run_over, tmp_path):
    root = shutil.copytree(first_store, tmp_path / "store")
    store, run = Store(str(root)), own_run(run_over, root, 3)
    add_views(store, build_index.index(run), {"p03"})
    update(run.prepare, store, write_rows(tmp_path / "changes.jsonl", {"p05": 51}), index="index")
    pruned_version = build_index.index(own_run(run_over, root, 3, prune_views=0.9))
    version = build_index.index(run)
    assert (pruned_version.operation, version.operation, version.metrics["encoded"]) == ("index:refined", "index", 1)


def test_an_update_of_pruned_versions_alone_says_that_it_encodes_what_did_not_change(
    first_store, run_over, tmp_path, caplog
):
    root = shutil.copytree(first_store, tmp_path / "store")
    store, run = Store(str(root)), own_run(run_over, root, 3, prune_views=0.9)
    whole = own_run(run_over, root, 3, name="index-all-views")
    build_index.index(run)
    assert "are encoded again" not in caplog.text
    store.delete(paths.manifest("index", 1))

    def index_change(contents: Mapping[str, int], *runs: RunConfig) -> list[float]:
        caplog.clear()
        update(run.prepare, store, write_rows(tmp_path / "changes.jsonl", contents), index="index")
        return [build_index.index(one).metrics["encoded"] for one in runs]

    [num_encoded] = index_change({"p00": 51}, run)
    assert num_encoded == sum(shard_of(f"p{number:02d}", 3) == shard_of("p00", 3) for number in range(20))
    assert "mvr-ray index CONFIG index.name=index-all-views index.prune_views=null" in caplog.text
    build_index.index(whole)
    assert index_change({"p00": 52}, whole, run) == [1, 0]
    assert "are encoded again" not in caplog.text


def test_a_command_whose_plans_a_faster_one_removed_makes_them_again(first_store, run_over, tmp_path, monkeypatch):
    root = shutil.copytree(first_store, tmp_path / "store")
    store, run = Store(str(root)), own_run(run_over, root, 3)
    update(run.prepare, store, write_rows(tmp_path / "changes.jsonl", {"p00": 51}), index="index")
    encode_corpus, calls = encode.encode_corpus, []

    def encode_and_remove_plans(task: EncodeTask, corpus: Corpus, numbers: list[int], *rest: Any) -> None:
        encode_corpus(task, corpus, numbers, *rest)
        for shard in numbers if not calls else ():
            store.delete(task.plan_path(shard))
        calls.append(numbers)

    monkeypatch.setattr(encode, "encode_corpus", encode_and_remove_plans)
    version = build_index.index(run)
    assert (len(calls), version.num_passages, version.metrics["encoded"]) == (2, 20, 1)


def test_a_changed_sample_measures_the_recall_of_the_same_shards_once(first_store, run_over, tmp_path):
    root = shutil.copytree(first_store, tmp_path / "store")
    runs = [own_run(run_over, root, 3, kind="hnsw", recall_sample=sample) for sample in (0, 50, 50)]
    before, after, again = map(build_index.index, runs)
    assert before.recall is None and after.recall is not None
    assert (after.shards, after.version, again.version) == (before.shards, before.version + 1, after.version)


def test_an_update_reads_no_byte_of_what_it_does_not_change_and_its_metrics_are_those_of_all_shards(
    first_store, run_over, tmp_path, monkeypatch
):
    monkeypatch.setattr(shards, "RECALL_DEPTH", 2)
    root, reads = shutil.copytree(first_store / "encoders", tmp_path / "store" / "encoders").parent, list[str]()
    index = {"kind": "faiss", "factory": "IVF8,Flat", "nprobe": 1, "recall_sample": 400, "lexical": True}
    store, run = Store(str(root)), own_run(run_over, root, 4, **index)
    write_rows(tmp_path / "passages.jsonl", {f"p{number:02d}": number for number in range(60)})
    prepare(run.prepare, store)
    first = build_index.index(run)
    update(run.prepare, store, write_rows(tmp_path / "changes.jsonl", {"p03": 70}))
    with monkeypatch.context() as patch:
        for name in ("local_path", "sha256"):
            read = getattr(Store, name)
            patch.setattr(Store, name, lambda own, path, read=read: (reads.append(path), read(own, path))[1])
        version = build_index.index(run)
    assert first.lexical and version.lexical
    same_entries = [entry for entry in version.shards if entry in first.shards]
    words = [files for files in version.lexical.postings if files in first.lexical.postings]
    assert len(same_entries) == len(words) == 3
    places = [manifest.lexical_path("index", file) for files in words for file in files]
    places += [paths.shard_dir("index", entry.digest) for entry in same_entries]
    assert reads and not [path for path in reads if path.startswith(tuple(places))]

    folders = [root / paths.shard_dir("index", entry.digest) for entry in version.shards]
    views = [shards.shard_collapse(EmbeddingShard.open(folder / paths.EMBEDDINGS)) for folder in folders]
    recalls = [shard_recall(store, version, entry, 400) for entry in version.shards]
    measures = {"recall": recalls, "lv": [own.lv for own in views]}
    measures["view_pair_cosine"] = [own.mean_pair_cosine for own in views]
    for name, values in measures.items():
        expected = np.average(values, weights=[entry.num_passages for entry in version.shards])
        assert len({*values}) > 1 and version.metrics[name] == pytest.approx(expected)

    flip_byte(folders[same_entries[0].shard] / paths.EMBEDDINGS)
    flip_byte(root / places[0])
    again = build_index.index(run)
    assert (again.version, again.content_digest()) == (version.version, version.content_digest())
    assert manifest.verify(store, version).problems == []

    for file in root.rglob("measurements-*.json"):  # as in the store of an earlier program
        file.unlink()
    flip_byte(folders[same_entries[0].shard] / paths.EMBEDDINGS)
    update(run.prepare, store, write_rows(tmp_path / "changes.jsonl", {"p03": 71}))
    assert manifest.verify(store, build_index.index(run)).problems == []


def test_a_warm_router_and_the_one_that_takes_over_open_no_part_for_a_request(
    first_store, run_over, tmp_path, monkeypatch
):
    root = shutil.copytree(first_store, tmp_path / "store")
    store, run = Store(str(root)), own_run(run_over, root, 3)

    def change_to(number: int) -> Router:
        update(run.prepare, store, write_rows(tmp_path / "changes.jsonl", {"p03": number}))
        version = build_index.index(run)
        return Router(store, version, LocalSearchers(SearcherTask(str(root), version)))

    first, second, third, fourth = map(change_to, (70, 71, 72, 73))
    first.warm_up()
    second.take_over(first)
    [*_, changes] = third.corpus.info.parts[shard_of("p03", 3)].files
    flip_byte(root / paths.corpus_dir("corpus") / changes.file)
    third.take_over(first)  # which answers but for the texts of the damaged part
    with pytest.raises(DigestError, match=changes.file):
        third.passages(["p03"])
    flip_byte(root / paths.corpus_version("corpus", fourth.manifest.corpus_digest))
    with pytest.raises(StorageError, match="damaged"):
        fourth.take_over(first)  # nor does a server move to it
    monkeypatch.setattr(Corpus, "open_file", None)
    others = [name for name in (f"p{at:02d}" for at in range(20)) if shard_of(name, 3) != shard_of("p03", 3)]
    assert len(third.passages(others)) == len(others)
    for router, number in ((first, 70), (second, 71)):
        texts = {name: passage.text for name, passage in router.passages([f"p{at:02d}" for at in range(20)]).items()}
        assert len(texts) == 20 and texts["p03"] == text_of(number)


@pytest.mark.parametrize("before", [0, 20], ids=["encoded", "half of it carried over"])
def test_a_copied_passage_keeps_no_second_chunk_of_its_shard_in_memory(
    first_store, run_over, tmp_path, monkeypatch, before
):
    folder, root = "" if before else "encoders", tmp_path / "store"
    shutil.copytree(first_store / folder, root / folder)
    store, run = Store(str(root)), own_run(run_over, root, 1)
    write_rows(root.parent / "passages.jsonl", {f"p{number:02d}": number % 59 for number in range(60)})
    prepare(run.prepare, store)
    blocks, most, to_block = list[weakref.ref](), list[int](), EmbeddingShard._block

    def track(own: EmbeddingShard, batch: Any) -> EmbeddingBlock:
        most.append(sum(ref() is not None for ref in blocks))
        block = to_block(own, batch)
        if "chunk-" in str(own.path):
            blocks.append(weakref.ref(block.vectors_ND))
        return block

    monkeypatch.setattr(EmbeddingShard, "_block", track)
    version = build_index.index(run)
    assert (version.num_passages, version.metrics["encoded"]) == (60, 59 - before)
    assert len(blocks) > 5 and max(most) <= 1
    views = stored_views(store, version)
    assert views["p59"].vectors_ND.tobytes() == views["p00"].vectors_ND.tobytes()


def test_each_earlier_part_is_searched_once_for_the_changes_of_all_shards(first_store, run_over, tmp_path, monkeypatch):
    root, files = shutil.copytree(first_store / "encoders", tmp_path / "store" / "encoders").parent, list[str]()
    store, run = Store(str(root)), own_run(run_over, root, 4)
    write_rows(tmp_path / "passages.jsonl", {f"p{number:02d}": number for number in range(60)})
    prepare(run.prepare, store)
    build_index.index(run)
    find = carry_over.find_contents
    monkeypatch.setattr(carry_over, "find_contents", lambda file, *own: (files.append(file.name), find(file, *own))[1])
    changes: list[Contents] = [{f"p{at:02d}": 60 + at for at in range(12)}, {f"p{at:02d}": 30 + at for at in range(12)}]
    for number, (own, num_encoded) in enumerate(zip(changes, (12, 0))):
        update(run.prepare, store, write_rows(tmp_path / "changes.jsonl", own))
        assert {shard_of(name, 4) for name in own} == {0, 1, 2, 3}
        version = build_index.index(run)
        assert version.metrics["encoded"] == num_encoded, "texts 30 to 41 are those of other passages"
        assert len(files) == len({*files}) == 4 + 4 * number
        files.clear()
    views = stored_views(store, version)
    assert views["p00"].vectors_ND.tobytes() == views["p30"].vectors_ND.tobytes()


@pytest.mark.parametrize("language", ["english", "none"])
def test_bm25_by_the_words_of_a_version_is_bm25_over_its_corpus_as_without_a_version(
    first_store, run_over, tmp_path, monkeypatch, language
):
    root = shutil.copytree(first_store, tmp_path / "store")
    store, run = Store(str(root)), own_run(run_over, root, 3, lexical=True, language=language)
    build_index.index(run)
    update(run.prepare, store, write_rows(tmp_path / "changes.jsonl", {"p03": 70, "p05": 6, "p20": 6}, {"p04"}))
    corpus = Corpus.open(store, "corpus")
    texts = [*map(text_of, (70, 6, 1)), "rivers little little", "no such thing", ""]
    expected = BM25Index(corpus, language).search(texts, 7)
    assert bm25.open_bm25(run, corpus).search(texts, 7) == expected and any(expected)
    version = build_index.index(run)
    write_questions(corpus, "asked", [Question("q", text_of(6), positive_ids=("p05",))])
    with monkeypatch.context() as patch:
        patch.setattr(bm25, "index_words", None)
        assert bm25.open_bm25(run, corpus).search(texts, 7) == expected
        assert mine(run.model_copy(update={"mine": MineConfig(questions="asked", output="mined")})).hits
    assert version.lexical
    flip_byte(root / manifest.lexical_path("index", version.lexical.postings[0][0]))
    assert bm25.open_bm25(run, corpus).search(texts, 7) == expected


def test_evaluation_ranks_by_words_through_the_searchers_as_in_this_process(
    first_store, run_over, tmp_path, monkeypatch
):
    root = shutil.copytree(first_store, tmp_path / "store")
    store, run = Store(str(root)), own_run(run_over, root, 3, lexical=True)
    build_index.index(run)
    update(run.prepare, store, write_rows(tmp_path / "changes.jsonl", {"p03": 70, "p05": 6, "p20": 6}, {"p04"}))
    version = build_index.index(run)
    texts = [*map(text_of, range(20)), "rivers little little", "no such thing", "passage"]
    questions = [Question(f"q{at}", text, positive_ids=("p05",)) for at, text in enumerate(texts)]
    sets = [QuestionSet("one", questions[:20]), QuestionSet("two", questions[20:])]
    rankings = []
    with open_router(run, local=True) as router:
        for whole in (True, False):
            monkeypatch.setattr(evaluation, "has_words", has_words if whole else lambda *_: False)
            monkeypatch.setattr(bm25, "index_words", None)  # the words of the version, in this process
            monkeypatch.setattr(evaluation, "open_bm25", None if whole else bm25.open_bm25)
            rankings.append([*evaluation._rank_by_words(run, router, sets, RankSettings(7), no_progress)])
    assert [[hit[:5] for hit in row.passages] for row in rankings[0]] == [
        [hit[:5] for hit in row.passages] for row in rankings[1]
    ]
    assert [row.question for row in rankings[0]] == [row.question for row in rankings[1]] == questions
    assert len({hit.score for hit in rankings[0][-1].passages}) < len(rankings[0][-1].passages), "equal scores"
    assert version.lexical and has_words(store, version, "english") and not has_words(store, version, "german")
    flip_byte(root / manifest.lexical_path("index", version.lexical.postings[0][0]))
    assert not has_words(store, version, "english")


def test_statistics_of_new_words_are_those_of_all_postings_which_are_not_read_back(
    first_store, run_over, tmp_path, monkeypatch
):
    root, reads, local_path = shutil.copytree(first_store, tmp_path / "store"), list[str](), Store.local_path
    with monkeypatch.context() as patch:
        patch.setattr(Store, "local_path", lambda own, path: (reads.append(path), local_path(own, path))[1])
        version = build_index.index(own_run(run_over, root, 3, lexical=True))
    assert version.lexical and reads
    store, names = Store(str(root)), [manifest.lexical_path("index", own[0]) for own in version.lexical.postings]
    assert not {*names} & {*reads}
    write_statistics([Postings(store.local_path(name)).whole for name in names], tmp_path / "statistics")
    assert sha256_of(tmp_path / "statistics") == version.lexical.statistics[0].sha256
