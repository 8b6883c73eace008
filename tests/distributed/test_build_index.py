"""Building and publishing: every row is counted, no work is repeated, and measurements are exact."""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from damaged_file import flip_byte
from random_index import brute_force, publish_random_index, random_views

from mvr_ray.checksums import add_trailer
from mvr_ray.config import PrepareConfig, SourceConfig
from mvr_ray.distributed.encoders import resolve_encoder
from mvr_ray.distributed.indexing import build_index, rewrite, shards, staging
from mvr_ray.distributed.indexing.shards import RECALL_DEPTH, build_shard, sample_views, shard_recall
from mvr_ray.distributed.router import Router
from mvr_ray.distributed.searching.searcher import LocalSearchers, SearcherTask
from mvr_ray.errors import MissingInputError, ShardIndexError, StorageError
from mvr_ray.index.base import IndexParams
from mvr_ray.index.candidates import LABELS_FILE
from mvr_ray.index.kinds import open_index
from mvr_ray.store import manifest, paths, prepare
from mvr_ray.store.corpus import Corpus, shard_of
from mvr_ray.store.delta import open_embeddings, write_changed
from mvr_ray.store.delta import views_by_id as by_id
from mvr_ray.store.embeddings import EmbeddingShard, EmbeddingWriter, Views
from mvr_ray.store.files import Store
from mvr_ray.store.update import update
from mvr_ray.types import EmbeddingBlock, Passage

pytestmark = [pytest.mark.data, pytest.mark.ray, pytest.mark.usefixtures("without_ray")]


def open_shard(store: Path, index: str, entry: manifest.ShardEntry) -> EmbeddingShard:
    return open_embeddings(store / paths.shard_dir(index, entry.digest), entry.files)


def test_every_passage_of_the_corpus_is_in_its_shard_with_views(small_index):
    store = Store(str(small_index))
    version, corpus = manifest.read(store, "index"), Corpus.open(store, "corpus")
    assert version.num_passages == corpus.num_passages == 60
    for entry in version.shards:
        shard = open_shard(small_index, "index", entry)
        assert shard.ids() == corpus.part(entry.shard).ids()
        assert (shard.num_passages, shard.num_vectors) == (entry.num_passages, entry.num_vectors)
        norms_N = np.concatenate([np.linalg.norm(b.vectors_ND.astype(np.float64), axis=1) for b in shard.blocks()])
        assert np.abs(norms_N - 1).max() < 2e-3
    assert version.similarity == "cosine" and version.metrics["collapsed"] == 0.0
    assert 0.2 < version.metrics["view_pair_cosine"] < 0.99
    assert manifest.verify(store, version).problems == []


def test_the_same_command_again_publishes_nothing(own_index, run_over):
    store, reports = Store(str(own_index)), []
    before = manifest.read(store, "index")
    assert before.metrics["encoded"] == before.num_passages
    counts = {"encoded": 0, "encoded_cut": 0, "encoded_unknown": 0, "carried_over": before.num_passages, "deleted": 0}
    again = build_index.index(run_over(own_index), lambda *report: reports.append(report))
    assert again == dataclasses.replace(before, metrics=before.metrics | counts)
    assert manifest.read(store, "index") == before and manifest.list_versions(store, "index") == [1]
    assert [what for what, _, _ in reports] == ["nothing changed, version 1 stays live; passages"]


def cut_short(file: Path) -> None:
    os.truncate(file, file.stat().st_size * 2 // 3)


@pytest.mark.slow
@pytest.mark.chaos(
    "a byte flipped in, or bytes cut off, any file of unfinished indexing",
    "it is made again, and the version has the same bytes",
)
def test_whatever_staged_file_is_damaged_the_same_command_ends_with_the_same_bytes(
    empty_store, run_over, tmp_path, monkeypatch, without_ray, record_property
):
    run = run_over(empty_store, resources={"local_passages": 100})
    store, versions = Store(str(empty_store)), []
    build_index.index(run)
    old = list(Corpus.open(store, "corpus"))
    new = [Passage(f"new {number}", "A title", f"Text {number} of nobody.") for number in range(9)]
    prepare_texts(store, tmp_path, [*old[5:], *new], 2)  # other shards than before: some are carried over

    def stop(_, version: manifest.Manifest) -> None:
        versions.append(version)
        raise StorageError("stopped before it is published")

    def build() -> manifest.Manifest:
        with monkeypatch.context() as patch:
            patch.setattr(manifest, "publish", stop)
            with pytest.raises(StorageError, match="stopped before"):
                build_index.index(run)
        return versions[-1]

    first = build()
    [staging] = (empty_store / paths.index_dir("index", "staging")).iterdir()
    names = sorted(file.name for file in staging.glob("*-*"))
    assert [name.split("-")[0] for name in names] == ["built"] * 2 + ["carried"] * 2 + ["chunk"] * 2 + ["plan"] * 2
    whole = shutil.copytree(staging, tmp_path / "whole")
    shard_file = empty_store / paths.shard_dir("index", first.shards[0].digest) / paths.EMBEDDINGS
    for damage, name in [(flip_byte, name) for name in names[::2]] + [(cut_short, name) for name in names[1::2]]:
        shutil.rmtree(staging)
        shutil.copytree(whole, staging)
        damage(staging / name)
        if not name.startswith("built"):
            for note in staging.glob("built-*"):
                note.unlink()
        again = build()
        assert (again.shards, again.metrics) == (first.shards, first.metrics), name
        assert manifest.verify(store, again).problems == []
    flip_byte(shard_file)
    assert build().shards == first.shards and manifest.verify(store, first).problems == []
    version = build_index.index(run)
    assert (version.shards, version.metrics["encoded"]) == (first.shards, 9)
    assert store.list(paths.index_dir("index", "staging")) == []
    record_property("figures", f"{len(names)} staged files and a built shard damaged, all made again")


def test_the_same_command_repairs_a_damaged_shard_and_encodes_only_that(own_index, run_over):
    store, reports = Store(str(own_index)), []
    before = manifest.read(store, "index")
    file = own_index / paths.shard_dir("index", before.shards[1].digest) / paths.EMBEDDINGS
    os.truncate(file, 1000)
    after = build_index.index(run_over(own_index), lambda *row: reports.append(row) if row[0] == "encode" else None)
    assert after == before
    assert manifest.verify(store, before).problems == []
    assert reports[-1][1:] == (before.shards[1].num_passages,) * 2


def test_going_back_from_another_version_takes_the_shards_that_are_there(own_index, run_over):
    """As after a refinement: the live version has other shards, and indexing again must not encode."""
    store, reports = Store(str(own_index)), []
    first = manifest.read(store, "index")
    other = dataclasses.replace(first, parent=1, operation="refine:passage", shards=first.shards[:2], config_digest="x")
    manifest.publish(store, other)
    again = build_index.index(run_over(own_index, index={"keep_refinement": False}), lambda *row: reports.append(row))
    assert (again.version, again.parent, again.shards) == (3, 2, first.shards)
    counts = {"encoded": 0, "encoded_cut": 0, "encoded_unknown": 0, "carried_over": first.num_passages, "deleted": 0}
    assert again.metrics == first.metrics | counts
    assert "encode" not in {what for what, _, _ in reports}


@pytest.mark.parametrize("is_newer", [True, False], ids=["of a newer program", "damaged"])
def test_an_old_version_that_cannot_be_read_stops_no_build_and_the_live_one_is_named(
    own_index, run_over, tmp_path, is_newer
):
    """With words, with and without refinement to keep: every place that looks for earlier work leaves it out."""

    def spoil(version: int) -> None:
        path = paths.manifest("index", version)
        fields = json.loads(store.read_bytes(path)) | ({"format_version": 9} if is_newer else {"created": "never"})
        store.write_bytes(path, json.dumps(fields).encode())

    store, texts = Store(str(own_index)), list(Corpus.open(Store(str(own_index)), "corpus"))
    build_index.index(run_over(own_index, index={"lexical": True}))
    spoil(1)
    for number, keeps in ((3, True), (4, False)):
        prepare_texts(store, tmp_path, texts[number:], 3)
        index = {"lexical": True, "keep_refinement": keeps}
        version = build_index.index(run_over(own_index, index=index))
        assert (version.version, version.metrics["encoded"], version.num_passages) == (number, 0, 60 - number)
    spoil(4)
    prepare_texts(store, tmp_path, texts, 3)
    for keeps in (True, False):
        with pytest.raises(StorageError, match=r"indexes/index/versions/4\.json"):
            build_index.index(run_over(own_index, index={"lexical": True, "keep_refinement": keeps}))
    assert manifest.list_versions(store, "index") == [1, 2, 3, 4]


def test_a_lost_passage_is_named_and_its_shard_encoded_again(own_index, run_over, caplog):
    run, store = run_over(own_index, index={"name": "holed"}), Store(str(own_index))
    corpus = Corpus.open(store, "corpus")
    encoder = resolve_encoder(run, corpus)
    task = staging.encode_task(run, corpus, encoder)
    old = manifest.read(store, "index")
    for entry in old.shards:
        shard = open_shard(own_index, "index", entry)
        block = shard.blocks()[0]
        for chunk in staging.chunks_of(task, corpus, entry.shard):
            stop = chunk.stop - 1 if chunk.shard == 2 and chunk.start == 6 else chunk.stop
            low, high = int(block.row_ptr[chunk.start]), int(block.row_ptr[stop])
            with EmbeddingWriter(own_index / task.chunk_path(chunk), shard.dimension, shard.num_views) as writer:
                writer.write(
                    EmbeddingBlock(
                        block.ids[chunk.start : stop],
                        block.row_ptr[chunk.start : stop + 1] - low,
                        block.view_numbers_N[low:high],
                        block.vectors_ND[low:high],
                    )
                )
            add_trailer(own_index / task.chunk_path(chunk))
    lost_id = corpus.part(2).ids()[11]
    version = build_index.index(run)
    assert (
        f"shard 2 from row 6: 6 passages read, 5 embedded; 1 missing ({lost_id}); nothing was published" in caplog.text
    )
    assert (version.num_passages, manifest.list_versions(store, "holed")) == (corpus.num_passages, [1])


def prepare_texts(store: Store, folder: Path, passages: Iterable[Passage], shards: int, corpus: str = "corpus") -> None:
    source = folder / "passages.jsonl"
    source.write_text("".join(json.dumps(passage._asdict()) + "\n" for passage in passages))
    cfg = PrepareConfig(corpus=corpus, sources=[SourceConfig(path=str(source))], num_shards=shards)
    prepare.prepare(cfg, store)


def views_by_id(store: Path, version: manifest.Manifest) -> dict[str, Views]:
    return {
        name: views
        for entry in version.shards
        for name, views in by_id(open_shard(store, version.index, entry).blocks()).items()
    }


@pytest.mark.parametrize("shards", [3, 2])
def test_only_new_contents_are_encoded_when_a_corpus_was_prepared_again(own_index, run_over, tmp_path, shards):
    """Changed, new and deleted passages, over as many shards or others: the views are those of an index from nothing,
    and the version before still has its texts."""
    store, reports = Store(str(own_index)), []
    before, old = manifest.read(store, "index"), list(Corpus.open(store, "corpus"))
    rest = old[3:]
    changed_passages = [passage._replace(text=f"{passage.text} It was changed.") for passage in rest[:2]]
    passages = [*changed_passages, *rest[2:], Passage("new", "A new one", "Nobody has read this passage before.")]
    prepare_texts(store, tmp_path, passages, shards)
    version = build_index.index(run_over(own_index), lambda *report: reports.append(report))
    assert version.num_passages == len(passages) and manifest.verify(store, version).problems == []
    assert [report for report in reports if report[0] == "encode"][-1] == ("encode", 3, 3)
    own_store = tmp_path / "from_nothing"
    shutil.copytree(own_index / "encoders", own_store / "encoders")
    prepare_texts(Store(str(own_store)), tmp_path, passages, shards)
    from_nothing = build_index.index(run_over(own_store, index={"encoder": version.encoder_fingerprint}))
    mine, true = views_by_id(own_index, version), views_by_id(own_store, from_nothing)
    assert list(mine) == list(true)
    for name, views in mine.items():
        assert views.view_numbers_N.tolist() == true[name].view_numbers_N.tolist()
        np.testing.assert_allclose(views.vectors_ND, true[name].vectors_ND, atol=1e-3)
    router = Router(store, before, LocalSearchers(SearcherTask(store.address, before)))
    assert router.passages([old[0].id]) == {old[0].id: old[0]}


def test_an_unchanged_shard_is_taken_whole_and_a_second_corpus_encodes_what_is_new(own_index, run_over, tmp_path):
    store, reports = Store(str(own_index)), []
    before, old = manifest.read(store, "index"), list(Corpus.open(store, "corpus"))
    new = Passage("new", "A new one", "Nobody has read this passage before.")
    prepare_texts(store, tmp_path, [*old, new], 3)
    version = build_index.index(run_over(own_index), lambda *report: reports.append(report))
    same = [entry.shard for entry, one in zip(version.shards, before.shards) if entry == one]
    assert same == [shard for shard in range(3) if shard != shard_of("new", 3)]
    assert [report for report in reports if report[0] == "encode"][-1] == ("encode", 1, 1)
    newest = Passage("newest", "A newer one", "Nor has anybody read this one.")
    prepare_texts(store, tmp_path, [*old[:20], new._replace(id="newer"), newest], 2, corpus="second")
    reports.clear()
    second = build_index.index(
        run_over(own_index, prepare={"corpus": "second"}, index={"name": "second"}),
        lambda *report: reports.append(report),
    )
    assert second.num_passages == 22
    prepare_texts(store, tmp_path, old[:20], 3, corpus="third")
    third = build_index.index(run_over(own_index, prepare={"corpus": "third"}, index={"name": "third"}))
    counts = third.metrics["encoded"], third.metrics["carried_over"], third.metrics["deleted"]
    assert counts == (0, 20, 0), "an index that begins has deleted nothing, whatever others hold"
    assert [report for report in reports if report[0] == "encode"][-1] == ("encode", 1, 1), "one content is new"
    mine, first = views_by_id(own_index, second), views_by_id(own_index, before)
    for passage in old[:20]:
        assert mine[passage.id].vectors_ND.tobytes() == first[passage.id].vectors_ND.tobytes()


def give_feedback_view(store: Store, version: manifest.Manifest, names: Iterable[str]) -> manifest.Manifest:
    """Publish a refinement of a version that adds one view to each of these passages."""
    shards = list(version.shards)
    for name in names:
        entry = shards[shard_of(name, len(shards))]
        shard = open_embeddings(manifest.open_shard(store, version.index, entry), entry.files)
        views = shard.find([name])[name]
        numbers_N = np.append(views.view_numbers_N, np.int16(shard.num_views))
        now = Views(numbers_N, np.vstack([views.vectors_ND, -views.vectors_ND[:1]]))
        with store.scratch() as scratch:
            folder = scratch / "shard"
            folder.mkdir()
            write_changed(shard, folder, {name: now})
            shards[entry.shard] = build_shard(store, version, entry.shard, folder).entry
    live = manifest.latest_version(store, version.index)
    refined_version = dataclasses.replace(version, parent=live, operation="refine:feedback_views", shards=tuple(shards))
    return manifest.publish(store, refined_version)


@pytest.mark.parametrize("num_shards", [3, 2])
def test_what_was_learned_of_unchanged_passages_stays(own_index, run_over, tmp_path, num_shards):
    store = Store(str(own_index))
    first, old = manifest.read(store, "index"), list(Corpus.open(store, "corpus"))
    refined_version = give_feedback_view(store, first, [old[0].id, old[1].id, old[2].id])
    assert build_index.index(run_over(own_index)).version == refined_version.version, "nothing changed"
    changed_passage = old[1]._replace(text=f"{old[1].text} It was changed.")
    prepare_texts(store, tmp_path, [old[0], changed_passage, *old[3:]], num_shards)
    version = build_index.index(run_over(own_index))
    counts = {name: version.metrics[name] for name in ("encoded", "carried_over", "deleted", "unlearned")}
    assert (version.operation, counts) == (
        "index:refined",
        {"encoded": 1, "carried_over": 58, "deleted": 1, "unlearned": 2},
    )
    before, after = views_by_id(own_index, refined_version), views_by_id(own_index, version)
    for passage in (old[0], *old[3:]):
        assert after[passage.id].vectors_ND.tobytes() == before[passage.id].vectors_ND.tobytes()
    feedback_view = first.num_views
    assert (
        feedback_view in before[changed_passage.id].view_numbers_N
        and feedback_view not in after[changed_passage.id].view_numbers_N
    )
    assert build_index.index(run_over(own_index)).version == version.version, "nothing changed since"
    plain = build_index.index(run_over(own_index, index={"keep_refinement": False}))
    assert (plain.operation, plain.metrics["encoded"]) == ("index", 0), "the refined version encoded the changed one"
    assert all(views.view_numbers_N.max() < feedback_view for views in views_by_id(own_index, plain).values())


def test_a_passage_that_changes_again_has_nothing_learned_to_lose(own_index, run_over, tmp_path):
    store, unlearned_counts = Store(str(own_index)), []
    first, old = manifest.read(store, "index"), list(Corpus.open(store, "corpus"))
    give_feedback_view(store, first, [old[0].id])
    for text in ("A second text.", "A third text."):
        prepare_texts(store, tmp_path, [old[0]._replace(text=text), *old[1:]], 3)
        unlearned_counts.append(build_index.index(run_over(own_index)).metrics["unlearned"])
    prepare_texts(store, tmp_path, old[1:], 3)
    assert [*unlearned_counts, build_index.index(run_over(own_index)).metrics["unlearned"]] == [1, 0, 0]


def test_learned_views_of_another_encoder_are_not_dropped_in_silence(own_index, run_over, caplog):
    store = Store(str(own_index))
    first = manifest.read(store, "index")
    give_feedback_view(store, first, [next(iter(Corpus.open(store, "corpus"))).id])
    assert build_index.index(run_over(own_index, index={"dtype": "fp32"})).operation == "index"
    assert "what refinement changed in version 2 of index 'index' is not kept" in caplog.text
    caplog.clear()
    build_index.index(run_over(own_index))
    assert "is not kept" not in caplog.text, "nothing was refined since"


def test_learned_views_that_are_damaged_are_not_dropped_in_silence(own_index, run_over, tmp_path):
    store = Store(str(own_index))
    first, old = manifest.read(store, "index"), list(Corpus.open(store, "corpus"))
    refined_version = give_feedback_view(store, first, [old[0].id])
    entry = refined_version.shards[shard_of(old[0].id, 3)]
    file = own_index / paths.shard_dir("index", entry.digest) / paths.CHANGES
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-8])
    prepare_texts(store, tmp_path, old[1:], 3)
    with pytest.raises(StorageError, match=r"what refinement changed.*cannot be kept.*keep_refinement=false"):
        build_index.index(run_over(own_index))
    assert manifest.latest_version(store, "index") == refined_version.version
    assert build_index.index(run_over(own_index, index={"keep_refinement": False})).num_passages == len(old) - 1


def test_an_edit_of_fields_alone_encodes_nothing_and_shares_every_shard(own_index, run_over, tmp_path):
    store, reports = Store(str(own_index)), []
    before, old = manifest.read(store, "index"), list(Corpus.open(store, "corpus"))
    for number in range(2):
        rows = [{**passage._asdict(), "year": 1958 + number} for passage in old]
        source = tmp_path / "passages.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        fields = {"fields": {"year": "int"}, "sources": [SourceConfig(path=str(source))]}
        prepare.prepare(PrepareConfig(num_shards=3, **fields), store)
        version = build_index.index(run_over(own_index), lambda *report: reports.append(report))
        assert version.version == 2 + number and version.shards == before.shards
        assert "encode" not in {report[0] for report in reports}
        corpus = Corpus.open(store, version.corpus, version.corpus_digest)
        assert {passage.fields for passage in corpus} == {(("year", 1958 + number),)}


def test_moved_views_are_never_taken_for_views_as_encoded(own_index, run_over, tmp_path):
    """Only a refined version with moved views exists: its passages are encoded again."""
    store, reports = Store(str(own_index)), []
    first = manifest.read(store, "index")
    manifest.publish(store, dataclasses.replace(first, parent=1, operation="refine:passage"))
    store.delete(paths.manifest("index", 1))
    old = list(Corpus.open(store, "corpus"))
    prepare_texts(store, tmp_path, old[1:], 3)
    run = run_over(own_index, index={"keep_refinement": False})
    build_index.index(run, lambda *report: reports.append(report))
    assert [report for report in reports if report[0] == "encode"][-1] == ("encode", 59, 59)


def test_the_changes_of_an_update_lie_beside_the_shard_until_they_are_many(own_index, run_over, tmp_path):
    """Each version has the views of an index built from scratch, with or without change files."""
    store, run = Store(str(own_index)), run_over(own_index)
    passages = {passage.id: passage for passage in Corpus.open(store, "corpus")}
    first = manifest.read(store, "index")
    names = sorted(passages)
    steps = [
        ({names[0]: passages[names[0]]._replace(text="Other words.")}, [names[7]], True),
        ({"new": Passage("new", "A title", "A text that nobody has read.")}, [names[0]], True),
        ({name: passages[name]._replace(text="Words of many.") for name in names[20:50]}, [], False),
    ]
    for upserts, deletions, stays in steps:
        rows = [passage._asdict() for passage in upserts.values()] + [
            {"id": name, "delete": True} for name in deletions
        ]
        file = tmp_path / "changes.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        update(run.prepare, store, str(file))
        passages = {name: one for name, one in (passages | upserts).items() if name not in deletions}
        version = build_index.index(run)
        num_contents = len({(passage.title, passage.text) for passage in upserts.values()})
        assert (version.metrics["encoded"], version.metrics["deleted"]) == (num_contents, len(deletions))
        assert version.metrics["carried_over"] == version.num_passages - num_contents
        bases = {entry.files[paths.EMBEDDINGS].sha256 for entry in first.shards}
        assert stays == all(entry.files[paths.EMBEDDINGS].sha256 in bases for entry in version.shards)
        own_store = tmp_path / f"from_nothing_{version.version}"
        shutil.copytree(own_index / "encoders", own_store / "encoders")
        prepare_texts(Store(str(own_store)), tmp_path, passages.values(), 3)
        from_nothing = build_index.index(run_over(own_store, index={"encoder": version.encoder_fingerprint}))
        mine, true = views_by_id(own_index, version), views_by_id(own_store, from_nothing)
        assert list(mine) == list(true) and manifest.verify(store, version).problems == []
        for name, views in mine.items():
            assert views.view_numbers_N.tolist() == true[name].view_numbers_N.tolist()
            np.testing.assert_allclose(views.vectors_ND, true[name].vectors_ND, atol=1e-3)


@pytest.mark.parametrize("index", [{"kind": "hnsw"}, {"kind": "faiss", "factory": "IVF2,SQ8"}], ids=["hnsw", "ivf"])
def test_an_approximate_index_is_updated_in_a_copy_or_built_anew_and_the_manifest_says_which(
    own_index, run_over, tmp_path, index
):
    store, run = Store(str(own_index)), run_over(own_index, index=index)
    old = list(Corpus.open(store, "corpus"))

    def change(row: int) -> manifest.Manifest:
        line = old[row]._replace(text=f"Words of change {row}.")._asdict()
        (tmp_path / "c.jsonl").write_text(json.dumps({name: line[name] for name in ("id", "title", "text")}))
        update(run.prepare, store, str(tmp_path / "c.jsonl"))
        return build_index.index(run)

    def counts(version: manifest.Manifest) -> tuple[int | float, ...]:
        return tuple(version.metrics[name] for name in ("encoded", "shards_updated", "shards_rebuilt"))

    def updated_shards(version: manifest.Manifest) -> set[int]:
        return {entry.shard for entry in version.shards if LABELS_FILE in entry.files}

    first = build_index.index(run)
    assert counts(first) == (0, 0, 3)
    version = change(0)
    assert counts(version) == (1, 1, 0)
    assert updated_shards(version) == {shard_of(old[0].id, 3)}
    task = SearcherTask(str(own_index), version)
    before, after = views_by_id(own_index, first)[old[0].id], views_by_id(own_index, version)[old[0].id]
    queries_QD = np.concatenate([before.vectors_ND, after.vectors_ND]).astype(np.float32)
    for hits, query_D in zip(Router(store, version, LocalSearchers(task)).search(queries_QD, 60).hits, queries_QD):
        assert len({hit.passage_id for hit in hits}) == 60
        [own] = [hit for hit in hits if hit.passage_id == old[0].id]
        assert own.score == pytest.approx((after.vectors_ND.astype(np.float32) @ query_D).max(), abs=1e-3)
    least_recall = version.metrics["recall_least"]
    assert least_recall == first.metrics["recall_least"] == pytest.approx(first.recall - 0.01)
    recalls = [shard_recall(store, version, entry, 100) for entry in version.shards if LABELS_FILE in entry.files]
    assert recalls and min(recalls) >= least_recall
    unreachable = dataclasses.replace(version, parent=version.version, metrics={**version.metrics, "recall_least": 1.5})
    manifest.publish(store, unreachable)
    again = change(1)
    assert counts(again) == (1, 0, 1)
    assert updated_shards(again) == {shard_of(old[0].id, 3)} - {shard_of(old[1].id, 3)}
    rewrite.compact(run)
    live = manifest.read(store, "index")
    assert updated_shards(live) == set() and live.recall == 1.0
    assert manifest.verify(store, live).problems == []


@pytest.mark.parametrize(
    ("index", "few", "many"),
    [
        ({"kind": "faiss", "factory": "IVF8,Flat"}, {"nprobe": 1}, {"nprobe": 8}),
        ({"kind": "faiss", "factory": "IVF8,Flat", "prune_views": 0.2}, {"nprobe": 1}, {"nprobe": 8}),
        ({"kind": "hnsw", "hnsw_m": 2}, {"hnsw_ef_search": 1}, {"hnsw_ef_search": 200}),
    ],
    ids=["faiss", "pruned", "hnsw"],
)
def test_settings_of_a_search_change_without_building_the_index_again(
    own_index, run_over, tmp_path, monkeypatch, index, few, many
):
    """Also beside changes of passages, and with a promise of recall that only the earlier settings keep."""
    monkeypatch.setattr(shards, "RECALL_DEPTH", 2)
    store, calls = Store(str(own_index)), []

    def build(**settings: object) -> manifest.Manifest:
        return build_index.index(run_over(own_index, index={**index, "recall_sample": 400, **settings}))

    first = build(**few)
    monkeypatch.setattr(shards, "build_index", lambda *parts: calls.append(parts))
    second = build(**many)
    assert (second.version, second.shards) == (first.version + 1, first.shards) and not calls
    assert second.recall > first.recall
    assert (second.metrics["encoded"], second.metrics["carried_over"]) == (0, first.num_passages)
    assert {name: second.index_params[name] for name in many} == many
    if "prune_views" not in index:
        passage = next(iter(Corpus.open(store, "corpus")))
        (tmp_path / "c.jsonl").write_text(json.dumps({"id": passage.id, "text": "Words of a change."}))
        update(run_over(own_index).prepare, store, str(tmp_path / "c.jsonl"))
        third = build(**few)
        assert [third.metrics[name] for name in ("encoded", "shards_updated", "shards_rebuilt")] == [1, 1, 0]
        assert not calls and manifest.verify(store, third).problems == []


def test_recall_of_an_approximate_index_is_that_of_a_plain_count(tmp_path):
    views = random_views(400, 7, levels=40)
    params = IndexParams(kind="faiss", factory="PQ1x4")
    version = publish_random_index(tmp_path, views, 1, params)
    store, entry = Store(str(tmp_path)), version.shards[0]
    blocks = open_shard(tmp_path, "random", entry).blocks()
    queries_QD = sample_views(blocks, 20, entry.shard)
    assert all((blocks[0].vectors_ND == query_D).all(1).any() for query_D in queries_QD)
    folder = tmp_path / paths.shard_dir("random", entry.digest)
    hits = open_index(params, blocks, folder).search(queries_QD, RECALL_DEPTH)
    share = []
    for query_D, rows in zip(queries_QD, hits.rows_QK):
        true = brute_force(views, query_D, len(views))
        kth = true[RECALL_DEPTH - 1][1]
        scores = {passage_id: score for passage_id, score, _ in true}
        hit_ids = {blocks[0].ids[row] for row in rows if row >= 0}
        share.append(sum(scores[passage_id] >= kth for passage_id in hit_ids) / RECALL_DEPTH)
    assert shard_recall(store, version, entry, 20) == pytest.approx(np.mean(share))
    assert 0.2 < np.mean(share) < 1
    exact = dataclasses.replace(version, index_params=dataclasses.asdict(IndexParams()))
    assert shard_recall(store, exact, entry, 20) is None


def test_left_out_views_cost_no_more_than_the_manifest_says_and_codes_change_no_answer(own_index, run_over):
    store = Store(str(own_index))
    whole = manifest.read(store, "index", 1)
    version = build_index.index(run_over(own_index, index={"prune_views": 0.6, "scan": "int8"}))
    assert version.version == 2 and manifest.verify(store, version).problems == []
    max_loss, num_pruned = version.metrics["pruned_bound"], 0
    assert 0 < max_loss <= 0.6
    for before, after in zip(whole.shards, version.shards):
        full_blocks, pruned_blocks = (open_shard(own_index, "index", entry).blocks() for entry in (before, after))
        for one, other in zip(full_blocks, pruned_blocks):
            assert one.ids == other.ids
            queries_QD = one.vectors_ND[::3].astype(np.float32)
            for row in range(len(one.ids)):
                one_span, other_span = (slice(*block.row_ptr[row : row + 2]) for block in (one, other))
                numbers = one.view_numbers_N[one_span].tolist()
                at = [numbers.index(number) for number in other.view_numbers_N[other_span].tolist()]
                assert one.vectors_ND[one_span][at].tobytes() == other.vectors_ND[other_span].tobytes()
                best, now = (
                    (queries_QD @ block.vectors_ND[own].T.astype(np.float32)).max(1)
                    for block, own in ((one, one_span), (other, other_span))
                )
                assert (best - now <= max_loss * 1.002 * np.linalg.norm(queries_QD, axis=1) + 1e-4).all()
        num_pruned += before.num_vectors - after.num_vectors
        folder = own_index / paths.shard_dir("index", after.digest)
        int8_hits = open_index(IndexParams(**version.index_params), pruned_blocks, folder).search(queries_QD, 7)
        plain_hits = open_index(IndexParams(), pruned_blocks, folder).search(queries_QD, 7)
        assert [column.tobytes() for column in int8_hits] == [column.tobytes() for column in plain_hits]
    assert version.metrics["pruned_views"] == num_pruned > 0


def test_what_cannot_be_built_is_refused_before_any_work(own_index, run_over):
    store, reports = Store(str(own_index)), []
    for sections, error, message in (
        ({"index": {"kind": "faiss", "factory": "Nonsense"}}, ShardIndexError, "Nonsense"),
        ({"prepare": {"corpus": "other"}}, MissingInputError, "mvr-ray prepare CONFIG"),
    ):
        with pytest.raises(error, match=message):
            build_index.index(run_over(own_index, **sections), lambda *report: reports.append(report))
    assert not reports and not store.list(paths.index_dir("index", "staging"))
    assert manifest.list_versions(store, "index") == [1]
