"""Damage is reported file by file, quarantined, and repaired to the manifest's digests, or a remedy is named."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from prepared_corpus import empty_corpus
from random_index import publish_random_index, random_views

from mvr_ray.cli import main
from mvr_ray.config import PrepareConfig, RunConfig, SourceConfig
from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.distributed.encoders import save_encoder
from mvr_ray.distributed.indexing.repair import repair
from mvr_ray.errors import DigestError, ManifestError, MissingInputError
from mvr_ray.index.base import IndexParams
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import Corpus, CorpusInfo
from mvr_ray.store.files import Store
from mvr_ray.store.gc import collect
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.prepare import prepare
from mvr_ray.versions import act, verify

INT8 = IndexParams(scan="int8")
IVF = IndexParams(kind="faiss", factory="IVF2,Flat")


def truncate(file: Path) -> None:
    file.chmod(0o644)
    file.write_bytes(file.read_bytes()[:-1])


def flip_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 16
    file.chmod(0o644)
    file.write_bytes(data)


def lengthen(file: Path) -> None:
    file.chmod(0o644)
    file.write_bytes(file.read_bytes() + b"\0")


def missing(file: Path) -> None:
    file.unlink()


DAMAGES = {
    truncate: r"has \d+ bytes, not \d+",
    flip_byte: "has another sha256 than",
    lengthen: r"has \d+ bytes, not \d+",
    missing: "is missing",
}


def folder_of(root: Path, version: Manifest, shard: int) -> Path:
    return root / paths.shard_dir(version.index, version.shards[shard].digest)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.chaos("index file truncated, flipped, lengthened or gone", "built again from the embeddings, to the byte")
@pytest.mark.parametrize("params", [INT8, IVF], ids=["int8", "ivf"])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_index_is_built_again_from_its_embeddings_to_the_same_bytes(
    tmp_path: Path, damage: Callable[[Path], None], params: IndexParams, record_property
):
    version = publish_random_index(tmp_path, random_views(200, 3), 2, params)
    store, folder = Store(str(tmp_path)), folder_of(tmp_path, version, 1)
    before = contents(folder)
    files = [folder / name for name in version.shards[1].files if name != paths.EMBEDDINGS]
    for file in files:
        damage(file)
    report = manifest.verify(store, version)
    assert [(problem.shard, Path(problem.path).name) for problem in report.problems] == [(1, f.name) for f in files]
    with pytest.raises(DigestError, match=rf"of shard 1 {DAMAGES[damage]}.*next: mvr-ray versions CONFIG repair"):
        report.require()
    damaged_contents = contents(folder)

    [row] = repair(store, version).repairs
    assert (row.shard, row.state, len(row.damaged)) == (1, "repaired", len(files))
    assert contents(folder) == before
    assert contents(tmp_path / row.set_aside) == damaged_contents
    assert manifest.verify(store, version).problems == []
    assert repair(store, version).repairs == []
    rebuilt_bytes = sum(len(before[file.name]) for file in files)
    record_property("figures", f"{len(files)} of {len(before)} files, {rebuilt_bytes:,} bytes built again")


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_lost_embeddings_stay_in_their_place_and_the_command_that_encodes_them_is_named(
    tmp_path: Path, damage: Callable[[Path], None]
):
    store = Store(str(tmp_path))
    version = publish_random_index(tmp_path, random_views(60, 3), 3, INT8, corpus=empty_corpus(store))
    folder = folder_of(tmp_path, version, 2)
    damage(folder / paths.EMBEDDINGS)
    damaged_contents = contents(folder)
    report = repair(store, version)
    assert [(row.shard, row.state, row.set_aside) for row in report.repairs] == [(2, "lost", "")]
    assert contents(folder) == damaged_contents
    message = r"shard 2 of index 'random' version 1 .*index it again.*mvr-ray index CONFIG"
    with pytest.raises(DigestError, match=message):
        report.require()


def test_several_damaged_shards_are_repaired_apart_and_each_is_named(tmp_path: Path):
    version = publish_random_index(tmp_path, random_views(90, 3), 4, INT8)
    store = Store(str(tmp_path))
    codes = next(name for name in version.shards[0].files if name != paths.EMBEDDINGS)
    flip_byte(folder_of(tmp_path, version, 0) / codes)
    flip_byte(folder_of(tmp_path, version, 2) / paths.EMBEDDINGS)
    missing(folder_of(tmp_path, version, 3) / codes)
    report = repair(store, version)
    assert [(row.shard, row.state) for row in report.repairs] == [(0, "repaired"), (2, "lost"), (3, "repaired")]
    with pytest.raises(DigestError, match="1 of 3 not repaired; first: shard 2"):
        report.require()


def test_a_repair_that_died_after_setting_aside_is_continued_and_nothing_set_aside_is_ever_removed(tmp_path: Path):
    version = publish_random_index(tmp_path, random_views(90, 3), 2, INT8)
    store, entry = Store(str(tmp_path)), version.shards[0]
    whole = contents(folder_of(tmp_path, version, 0))
    codes = next(name for name in entry.files if name != paths.EMBEDDINGS)
    flip_byte(folder_of(tmp_path, version, 0) / codes)
    store.move_dir(paths.shard_dir("random", entry.digest), paths.quarantine_dir("random", entry.digest, 1))
    [row] = repair(store, version).repairs
    assert (row.state, row.set_aside) == ("repaired", "")
    assert contents(folder_of(tmp_path, version, 0)) == whole
    flip_byte(folder_of(tmp_path, version, 0) / paths.EMBEDDINGS)  # the quarantined copy is whole
    [row] = repair(store, version).repairs
    assert (row.state, row.set_aside) == ("repaired", paths.quarantine_dir("random", entry.digest, 2))
    assert manifest.verify(store, version).problems == []
    collect(store, "random", keep=1, grace_s=0)
    assert len(store.list(paths.index_dir("random", "quarantine"))) == 2


def test_a_shard_is_repaired_again_after_the_oldest_quarantined_folder_was_deleted(tmp_path: Path):
    """This program never deletes one, so users do."""
    version = publish_random_index(tmp_path, random_views(90, 3), 2, INT8)
    store, entry = Store(str(tmp_path)), version.shards[0]
    codes = next(name for name in entry.files if name != paths.EMBEDDINGS)
    for number, first_free in enumerate((1, 2, 1), start=1):
        flip_byte(folder_of(tmp_path, version, 0) / codes)
        [row] = repair(store, version).repairs
        assert (row.state, row.set_aside) == ("repaired", paths.quarantine_dir("random", entry.digest, first_free))
        if number == 2:
            store.delete_dir(paths.quarantine_dir("random", entry.digest, 1))
    assert manifest.verify(store, version).problems == []


def test_what_a_refinement_lost_is_cured_by_a_version_that_does_not_need_it(tmp_path: Path):
    first = publish_random_index(tmp_path, random_views(60, 3), 1)
    other = publish_random_index(tmp_path / "other", random_views(60, 4), 1)
    store = Store(str(tmp_path))
    folder_of(tmp_path / "other", other, 0).rename(folder_of(tmp_path, other, 0))
    queries_file = tmp_path / "queries.arrow"
    queries_file.write_bytes(b"moved")
    digest = manifest.add_refined_queries(store, "random", queries_file)
    refined_version = dataclasses.replace(
        first, parent=1, operation="refine:hybrid", shards=other.shards, refined_queries={"known": digest}
    )
    refined_version = manifest.publish(store, refined_version)
    truncate(folder_of(tmp_path, refined_version, 0) / paths.EMBEDDINGS)
    store.write_bytes(paths.refined_queries("random", digest), b"moveD")
    store.write_bytes(paths.manifest("random", 3), b"of a later version, and damaged")
    report = repair(store, refined_version)
    assert [(row.shard, row.state) for row in report.repairs] == [(-1, "lost"), (0, "lost")]
    assert {row.cure for row in report.repairs} == {
        "version 1 does not need it: mvr-ray versions CONFIG rollback 1; or do the refine again on it"
    }
    with pytest.raises(DigestError, match="first: moved queries of index 'random' version 2"):
        report.require()


def test_an_index_of_a_corpus_that_has_changed_since_is_not_cured_by_another_one(tmp_path: Path):
    store = Store(str(tmp_path))
    first = publish_random_index(tmp_path, random_views(60, 3), 1, corpus=empty_corpus(store))
    corpus = Corpus(store, CorpusInfo("corpus", "1" * 32, 0, (), (), {}, {}))
    corpus.publish(after=1)
    publish_random_index(tmp_path, random_views(60, 4), 1, parent=1, corpus=corpus)
    flip_byte(folder_of(tmp_path, first, 0) / paths.EMBEDDINGS)
    [row] = repair(store, first).repairs
    assert row.cure == (
        "the live version 2 does not need it; to have version 1 back, index the last corpus: mvr-ray index CONFIG"
    )


def test_a_version_that_is_damaged_itself_is_no_cure(tmp_path: Path):
    store = Store(str(tmp_path))
    oldest = publish_random_index(tmp_path, random_views(60, 3), 1)
    middle = publish_random_index(tmp_path, random_views(60, 4), 1, parent=1)
    last = publish_random_index(tmp_path, random_views(60, 5), 1, parent=2)
    truncate(folder_of(tmp_path, middle, 0) / paths.EMBEDDINGS)
    flip_byte(folder_of(tmp_path, last, 0) / paths.EMBEDDINGS)
    [row] = repair(store, last).repairs
    assert row.cure.startswith(f"version {oldest.version} does not need it: ")


def test_a_version_that_shares_the_lost_file_by_a_hard_link_is_no_cure(tmp_path: Path):
    other = publish_random_index(tmp_path, random_views(60, 4), 1)
    own = publish_random_index(tmp_path / "other", random_views(60, 3), 1)
    store = Store(str(tmp_path))
    folder = folder_of(tmp_path / "other", own, 0).rename(folder_of(tmp_path, own, 0))
    second = manifest.publish(store, dataclasses.replace(own, parent=1, operation="index:refined"))
    (copy := tmp_path / "copy").mkdir()
    (copy / paths.EMBEDDINGS).hardlink_to(folder / paths.EMBEDDINGS)
    (copy / "more").write_bytes(b"of the next version")
    entry = manifest.add_shard(store, "random", copy, manifest.ShardMeta(0, 60, own.num_vectors))
    third = manifest.publish(store, dataclasses.replace(second, parent=2, shards=(entry,)))
    flip_byte(folder / paths.EMBEDDINGS)
    [row] = repair(store, third).repairs
    assert row.cure.startswith(f"version {other.version} does not need it: ")


def encoder_file(version: manifest.Manifest) -> str:
    return f"{paths.encoder_dir(version.encoder_name, version.encoder_fingerprint)}/{paths.ENCODER_JSON}"


def test_a_version_without_its_encoder_or_corpus_is_not_whole_and_nothing_rolls_back_to_it(tmp_path: Path):
    version = publish_random_index(tmp_path / "store", random_views(9, 3), 2)
    store = Store(str(tmp_path / "store"))
    run = RunConfig.model_validate({"store": {"path": str(tmp_path / "store")}, "index": {"name": "random"}})
    path = paths.corpus_version(version.corpus, "c" * 32)
    store.write_bytes(path, CorpusInfo(version.corpus, "c" * 32, 0, (), (), {}, {}).to_json())
    manifest.publish(store, dataclasses.replace(version, parent=1, corpus_digest="c" * 32))
    store.delete(path)
    wrong = {problem.path for problem in verify(store, manifest.read(store, "random", 2)).problems}
    assert wrong == {encoder_file(version), path}
    with pytest.raises(MissingInputError, match=r"version 2 was not made live: .*encoder\.json is missing"):
        act(run, "rollback", 2)
    store.write_bytes(encoder_file(version), b"{}")
    with pytest.raises(MissingInputError, match="corpus"):
        act(run, "rollback", 2)
    empty_corpus(store, version.corpus)
    with pytest.raises(DigestError, match=r"encoders/none/f{16} is damaged"):
        act(run, "rollback", 1)
    assert manifest.list_versions(store, "random") == [1, 2]
    assert act(run, "rollback", 1, sizes_only=True).checked == "sizes alone: no file was read"
    assert manifest.list_versions(store, "random") == [1, 2, 3]


def test_a_roll_back_reads_what_verify_reads_and_is_refused_where_a_byte_differs(tmp_path: Path, tiny_backbone: Path):
    store = Store(str(tmp_path / "store"))
    run = RunConfig.model_validate({"store": {"path": str(tmp_path / "store")}, "index": {"name": "random"}})
    first = with_encoder(store, publish_random_index(tmp_path / "store", random_views(9, 3), 2), tiny_backbone)
    report = act(run, "rollback", first.version)
    assert (report.version, report.to, report.files) == (3, 2, verify(store, first).num_files)
    assert report.checked == "every digest, and the encoder's fingerprint"
    shard = folder_of(tmp_path / "store", first, 1) / paths.EMBEDDINGS
    weights = tmp_path / "store" / paths.encoder_dir(first.encoder_name, first.encoder_fingerprint)
    weights = weights / "shared" / "model.safetensors"
    for file in (shard, weights):
        whole = file.read_bytes()
        flip_byte(file)
        with pytest.raises(DigestError):
            act(run, "rollback", first.version)
        file.write_bytes(whole)
    assert act(run, "rollback", first.version).version == 4


def with_encoder(store: Store, version: manifest.Manifest, backbone: Path) -> manifest.Manifest:
    """Publish the version again with an encoder of the store and an empty corpus."""
    encoder = DualEncoder.from_backbone(str(backbone), EncoderSpec(strategy="mean"))
    snapshot = save_encoder(store, "own", encoder)
    empty_corpus(store, version.corpus)
    own = {"encoder_name": snapshot.name, "encoder_fingerprint": snapshot.fingerprint}
    return manifest.publish(store, dataclasses.replace(version, parent=version.version, **own))


def test_verifying_a_version_reads_its_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    store, source = Store(str(tmp_path / "store")), tmp_path / "p.jsonl"
    version = publish_random_index(tmp_path / "store", random_views(9, 3), 2)
    source.write_text("".join(f'{{"id": "p{i:03d}", "title": "t", "text": "body {i}"}}\n' for i in range(9)))
    prepare(PrepareConfig(sources=[SourceConfig(path=str(source))], num_shards=2), store)
    corpus = Corpus.open(store, "corpus")
    own = {"corpus": "corpus", "corpus_digest": corpus.digest}
    live = manifest.publish(store, dataclasses.replace(version, parent=1, **own))
    store.write_bytes(encoder_file(live), b"{}")
    assert verify(store, live).num_files == manifest.verify(store, live).num_files + 2
    assert [problem.path for problem in verify(store, live).problems] == [str(Path(encoder_file(live)).parent)]
    file = tmp_path / "store" / paths.corpus_dir("corpus") / corpus.info.parts[1].file
    file.chmod(0o644)
    file.write_bytes(file.read_bytes().replace(b"body", b"bodi", 1))
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump({"store": {"path": str(tmp_path / "store")}, "index": {"name": "random"}}))
    with pytest.raises(SystemExit) as error:
        main(["versions", str(run_file), "verify"])
    output = capsys.readouterr()
    assert error.value.code == 1
    assert file.name in output.out + output.err and "mvr-ray prepare CONFIG" in output.out + output.err


def test_the_command_names_repairs_and_verifies(
    tmp_path: Path, tiny_backbone: Path, capsys: pytest.CaptureFixture[str]
):
    version = publish_random_index(tmp_path / "store", random_views(90, 3), 2, INT8)
    with_encoder(Store(str(tmp_path / "store")), version, tiny_backbone)
    run_file = tmp_path / "run.yaml"
    run_file.write_text(yaml.safe_dump({"store": {"path": str(tmp_path / "store")}, "index": {"name": "random"}}))

    def run_versions(action: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as error:
            main(["versions", str(run_file), action])
        output = capsys.readouterr()
        return int(error.value.code or 0), output.out + output.err

    codes = next(name for name in version.shards[1].files if name != paths.EMBEDDINGS)
    flip_byte(folder_of(tmp_path / "store", version, 1) / codes)
    status, text = run_versions("verify")
    assert status == 1 and "of shard 1" in text and "versions CONFIG repair" in text
    status, text = run_versions("repair")
    assert status == 0 and "repaired" in text
    assert run_versions("verify")[0] == 0
    flip_byte(folder_of(tmp_path / "store", version, 1) / paths.EMBEDDINGS)
    (tmp_path / "store" / paths.quarantine_dir("random", version.shards[1].digest, 1) / paths.EMBEDDINGS).unlink()
    status, text = run_versions("repair")
    assert status == 1 and "mvr-ray index CONFIG" in text


def test_verify_names_the_repair_of_the_version_that_it_read(tmp_path: Path):
    version = publish_random_index(tmp_path, random_views(30, 3), 2)
    store = Store(str(tmp_path))
    store.create_once(paths.manifest("random", 2), b"damage")
    flip_byte(folder_of(tmp_path, version, 1) / paths.EMBEDDINGS)
    run = RunConfig.model_validate({"store": {"path": str(tmp_path)}, "index": {"name": "random"}})
    first = act(run, "verify", None).problems[0]
    assert (first.shard, first.cure) == (1, "mvr-ray versions CONFIG repair 1")
    assert [one.state for one in act(run, "repair", 1).repairs] == ["lost"]


@pytest.mark.chaos("manifest of a newer format", "refused by name; rolling back past it works")
def test_a_manifest_of_a_newer_format_is_refused_and_a_roll_back_past_it_works(tmp_path: Path, record_property):
    version = publish_random_index(tmp_path, random_views(30, 3), 2)
    store = Store(str(tmp_path))
    newer = json.loads(version.to_json()) | {"parent": 1, "version": 2, "format_version": manifest.NEWEST_FORMAT + 1}
    store.create_once(paths.manifest("random", 2), json.dumps(newer).encode())
    refusal = r"2\.json has format version 4, this program reads 1 to 3; use the program that wrote it, or roll back"
    with pytest.raises(ManifestError, match=refusal):
        manifest.read(store, "random")
    assert collect(store, "random", keep=1, grace_s=0) == []
    back = manifest.rollback(store, "random", 1)
    assert manifest.read(store, "random") == back and back.shards == version.shards
    outcome = f"format {newer['format_version']} refused; version {back.version} has version 1's content"
    record_property("figures", outcome)
