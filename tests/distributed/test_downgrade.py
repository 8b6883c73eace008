"""Refusals of files that a newer program wrote: they name file, both formats and the cure, and change nothing.

The store is the one of tests/fixtures/store-baa77f8; of one file of each kind with a format number, the number is
raised as a newer program would.
"""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from mvr_ray import versions
from mvr_ray.checksums import json_with_checksum
from mvr_ray.config import RunConfig
from mvr_ray.distributed.router import open_router
from mvr_ray.distributed.training.checkpoints import Checkpoints, TrainState
from mvr_ray.errors import DigestError, EncoderError, FormatError, ManifestError, MvrRayError, StorageError
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import Corpus, question_digest
from mvr_ray.store.delta import open_embeddings
from mvr_ray.store.files import Store
from mvr_ray.store.gc import collect, collect_corpus
from mvr_ray.store.model_records import ENCODERS, find_model, latest_fingerprint, record_latest
from mvr_ray.store.prepare import prepare
from mvr_ray.store.questions import read_questions, write_questions
from mvr_ray.store.update import update
from mvr_ray.types import Question

FIXTURE = Path(__file__).resolve().parent.parent / "fixtures" / "store-baa77f8" / "store"
INDEX, CORPUS = "flat", "corpus"


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(shutil.copytree(FIXTURE, tmp_path / "store"))


@pytest.fixture
def run(store: Store, tmp_path: Path) -> RunConfig:
    source = tmp_path / "source.jsonl"
    source.write_text(json.dumps({"id": "p", "title": "", "text": "other"}) + "\n")
    sections = {
        "store": {"path": store.root},
        "index": {"name": INDEX, "keep_versions": 1, "grace_s": 0},
        "prepare": {"sources": [str(source)]},
    }
    return RunConfig.model_validate(sections)


def raise_format(store: Store, path: str, newest: int = 1) -> None:
    """Rewrite a description as of the format after its own, or after the newest, whole by its checksum."""
    fields = json.loads(store.read_bytes(path))
    fields.pop("checksum", None)
    fields["format_version"] = max(newest, fields.get("format_version", 1)) + 1
    store.write_bytes(path, json.dumps(json_with_checksum(fields)).encode())


def content(store: Store) -> dict[str, bytes]:
    files = (file for file in Path(store.root).rglob("*") if file.is_file() and ".scratch" not in file.parts)
    return {str(file.relative_to(store.root)): file.read_bytes() for file in files}


def require_refusals(store: Store, error: type[MvrRayError], text: str, *actions: Callable[[], object]) -> None:
    """Each action is refused with the text, and no file is another one afterwards."""
    before = content(store)
    for action in actions:
        with pytest.raises(error, match=text):
            action()
        assert content(store) == before


def test_a_newer_manifest_is_refused_by_name_and_nothing_is_changed_beside_it(store: Store, run: RunConfig) -> None:
    raise_format(store, paths.manifest(INDEX, 2), newest=manifest.NEWEST_FORMAT)
    text = (
        r"store/indexes/flat/versions/2\.json has format version 4, this program reads 1 to 3; use the program that "
        r"wrote it, or roll back: mvr-ray versions CONFIG rollback N"
    )
    require_refusals(
        store,
        ManifestError,
        text,
        lambda: versions.act(run, "show", None),
        lambda: versions.act(run, "rollback", 2),
        lambda: open_router(run, local=True).__enter__(),
    )
    before = content(store)
    assert collect_corpus(store, CORPUS, grace_s=0) == [] and content(store) == before
    first, newer = versions.act(run, "list", None)
    assert first.passages and not first.problem
    assert newer.live and newer.operation == "unreadable" and re.search(text, newer.problem)
    report = versions.act(run, "verify", None)
    assert report.num_files and re.search(text, report.problems[-1].reason)
    with pytest.raises(DigestError, match=text):
        report._replace(problems=report.problems[-1:]).require()
    report = versions.act(run, "collect", None)
    assert (report.removed, report.versions) == ([], [1, 2]) and content(store) == before
    assert re.search(text, report.unreadable[0])
    assert versions.act(run, "rollback", 1).version == 3
    with open_router(run, local=True) as router:
        assert router.manifest.version == 3


@pytest.mark.parametrize("is_published", [False, True], ids=["corpus.json", "publication"])
def test_a_newer_corpus_is_refused_by_name_and_nothing_is_changed_beside_it(
    store: Store, run: RunConfig, is_published: bool
) -> None:
    path = paths.corpus_json(CORPUS)
    if is_published:
        Corpus.open(store, CORPUS).publish(after=0)
        path = paths.corpus_publication(CORPUS, 1)
    raise_format(store, path)
    own = 1 + is_published
    text = rf"{path} has format version {own + 1}, this program reads {own}; use the program that wrote it, or set prep"
    require_refusals(
        store,
        FormatError,
        text,
        lambda: Corpus.open(store, CORPUS),
        lambda: prepare(run.prepare, store),
        lambda: update(run.prepare, store, run.prepare.sources[0].path),
    )
    before = content(store)
    assert collect_corpus(store, CORPUS, grace_s=0) == [] and content(store) == before
    other = run.prepare.model_copy(update={"corpus": "other"})
    assert prepare(other, store).passages_written == 1


def test_a_newer_encoder_is_refused_by_name_and_stays(store: Store, run: RunConfig) -> None:
    live = manifest.read(store, INDEX)
    path = f"{paths.encoder_dir(live.encoder_name, live.encoder_fingerprint)}/{paths.ENCODER_JSON}"
    raise_format(store, path)
    text = rf"{path} has format version 2, this program reads 1; use the program that wrote it, or make the encoder"
    with open_router(run, local=True) as router:
        require_refusals(store, EncoderError, text, lambda: router.embed(["When?"]))
    [problem] = versions.act(run, "verify", None).problems
    assert "has format version 2, this program reads 1" in problem.reason


def test_newer_embeddings_are_refused_by_name_and_stay(store: Store, run: RunConfig, tmp_path: Path) -> None:
    live = manifest.read(store, INDEX, 1)
    entry = live.shards[0]
    source = manifest.open_shard(store, INDEX, entry) / paths.EMBEDDINGS
    table = pa.ipc.open_file(source).read_all()
    (folder := tmp_path / "shard").mkdir()
    schema = table.schema.with_metadata((table.schema.metadata or {}) | {b"format": b"mvr_ray.embeddings/9"})
    with pa.OSFile(str(folder / paths.EMBEDDINGS), "wb") as sink, pa.ipc.new_file(sink, schema) as file:
        file.write_table(table.replace_schema_metadata(schema.metadata))
    meta = manifest.ShardMeta(entry.shard, entry.num_passages, entry.num_vectors)
    newer = manifest.add_shard(store, INDEX, folder, meta)
    version = manifest.publish(store, dataclasses.replace(live, parent=2, shards=(newer, *live.shards[1:])))
    text = (
        r"embeddings\.arrow has format mvr_ray\.embeddings/9, this program reads mvr_ray\.embeddings/1 and .*/2; use "
        r"the program that wrote it, or roll back"
    )
    require_refusals(
        store,
        FormatError,
        text,
        lambda: open_embeddings(manifest.open_shard(store, INDEX, version.shards[0]), version.shards[0].files),
    )
    removed_paths = collect(store, INDEX, keep=2, grace_s=0)
    assert not [path for path in removed_paths if newer.digest in path]


def test_a_newer_description_of_a_shard_is_refused_by_name_and_stays(
    store: Store, run: RunConfig, tmp_path: Path
) -> None:
    live = manifest.read(store, INDEX, 1)
    entry = live.shards[0]
    folder = paths.shard_dir(INDEX, entry.digest)
    shutil.copytree(Path(store.root) / folder, shard_copy := tmp_path / "built")
    meta = manifest.ShardMeta(entry.shard, entry.num_passages, entry.num_vectors)
    raise_format(store, f"{folder}/{paths.SHARD_JSON}")
    text = (
        rf"{folder}/shard\.json has format version 2, this program reads 1; use the program that wrote it, or roll back"
    )
    require_refusals(
        store,
        FormatError,
        text,
        lambda: manifest.open_shard(store, INDEX, entry),
        lambda: manifest.add_shard(store, INDEX, shard_copy, meta),
        *(lambda action=action: versions.act(run, action, 1) for action in ("verify", "repair", "rollback")),
    )
    assert not [path for path in collect(store, INDEX, keep=2, grace_s=0) if entry.digest in path]


def test_a_newer_question_set_is_refused_by_name_and_nothing_is_changed_beside_it(
    store: Store, run: RunConfig, tmp_path: Path
) -> None:
    corpus = Corpus.open(store, CORPUS)
    write_questions(corpus, "asked", [Question("q", "When?")])
    raise_format(store, path := paths.question_set(CORPUS, corpus.digest, "asked"))
    (changes := tmp_path / "changes.jsonl").write_text(json.dumps({"id": "p", "title": "", "text": "other"}) + "\n")
    text = rf"{path} has format version 2, this program reads 1; use the program that wrote it, or set prepare\.corpus"
    require_refusals(
        store,
        FormatError,
        text,
        lambda: read_questions(corpus, "asked"),
        lambda: question_digest(corpus, "asked"),
        lambda: update(run.prepare, store, str(changes)),
        lambda: prepare(run.prepare, store),
    )
    [(damaged_path, reason)] = corpus.verify().damage
    assert damaged_path == path and "has format version 2, this program reads 1" in reason
    before = content(store)
    assert collect_corpus(store, CORPUS, grace_s=0) == [] and content(store) == before


def test_a_newer_record_of_the_newest_model_is_refused_by_name_and_models_are_found_by_fingerprint(
    store: Store, run: RunConfig
) -> None:
    live = manifest.read(store, INDEX)
    record_latest(store, ENCODERS, live.encoder_name, {"fingerprint": live.encoder_fingerprint})
    assert latest_fingerprint(store, ENCODERS, live.encoder_name) == live.encoder_fingerprint
    raise_format(store, path := paths.latest_model("encoders", live.encoder_name))
    text = (
        rf"{path} has format version 2, this program reads 1; use the program that wrote it, or name one by its "
        r"fingerprint in index\.encoder"
    )
    require_refusals(
        store,
        FormatError,
        text,
        lambda: latest_fingerprint(store, ENCODERS, live.encoder_name),
        lambda: find_model(run, ENCODERS, live.encoder_name),
    )
    address = find_model(run, ENCODERS, f"{live.encoder_name}/{live.encoder_fingerprint}")
    assert address.path == paths.encoder_dir(live.encoder_name, live.encoder_fingerprint)


def checkpoint(store: Store) -> tuple[str, Checkpoints, torch.nn.Linear]:
    """The folder of a training that is 7 steps far, best after 5 of them; its checkpoints and its weights."""
    checkpoints = Checkpoints(store, folder := paths.training_dir("encoder", "key"))
    model = torch.nn.Linear(3, 2)
    checkpoints.save_weights(model, 5, "best")
    checkpoints.save(model, torch.optim.AdamW(model.parameters()), TrainState(step=6, best_step=5))
    state = TrainState(step=7, best_step=5, metrics=[{"step": 7, "loss": 0.5}])
    Checkpoints(store, folder).save(model, torch.optim.AdamW(model.parameters()), state)
    return folder, Checkpoints(store, folder), model


def test_a_newer_checkpoint_is_refused_by_name_and_stays(store: Store) -> None:
    folder, checkpoints, _ = checkpoint(store)
    assert checkpoints.latest_step() == 7
    raise_format(store, path := f"{folder}/latest.json")
    text = rf"{path} has format version 2, this program reads 1; use the program that wrote it, or delete .*{folder}"
    require_refusals(store, FormatError, text, checkpoints.latest_step)


def test_what_came_out_of_a_training_is_refused_where_a_newer_program_wrote_it(store: Store) -> None:
    folder, checkpoints, _ = checkpoint(store)
    assert checkpoints.result() == {}
    checkpoints.finish(record := {"fingerprint": "0" * 16, "metrics": {"steps": 7.0}, "epochs": [{"step": 7}]})
    assert checkpoints.result() == record and checkpoints.latest_step() == -1
    raise_format(store, path := f"{folder}/finished.json")
    text = rf"{path} has format version 2, this program reads 1; use the program that wrote it, or delete .*{folder}"
    require_refusals(store, FormatError, text, checkpoints.result)


def test_a_changed_byte_of_a_checkpoint_is_named_and_never_trained_on(store: Store) -> None:
    folder, checkpoints, model = checkpoint(store)
    optimiser = torch.optim.AdamW(model.parameters())
    reads = {
        "step-00000007/state.json": lambda: checkpoints.state(7),
        "step-00000007/model.safetensors": lambda: checkpoints.load_model(model, 7),
        "step-00000007/metrics.jsonl": lambda: checkpoints.state(7),
        "step-00000007/optimiser.safetensors": lambda: checkpoints.load_optimiser(optimiser, 7),
        "best-00000005/model.safetensors": lambda: checkpoints.load_model(model, 5, "best"),
    }
    files = {path for path in content(store) if path.startswith(f"{folder}/")}
    assert files == {f"{folder}/latest.json", f"{folder}/metrics.jsonl", *(f"{folder}/{name}" for name in reads)}
    for name, read in reads.items():
        read()
        data = bytearray(whole := store.read_bytes(path := f"{folder}/{name}"))
        data[-2] ^= 1
        store.write_bytes(path, bytes(data))
        require_refusals(
            store, StorageError, rf"{path} is damaged .*; delete .*{folder} and train from the start", read
        )
        store.write_bytes(path, whole)
        read()


def test_files_without_a_number_have_format_1(store: Store, run: RunConfig, tmp_path: Path) -> None:
    """As the first programs wrote them: shards, question sets and the newest model are found, and no byte changes."""
    corpus, live = Corpus.open(store, CORPUS), manifest.read(store, INDEX)
    write_questions(corpus, "asked", [Question("q", "When?")])
    record_latest(store, ENCODERS, live.encoder_name, {"fingerprint": live.encoder_fingerprint})
    own = [paths.question_set(CORPUS, corpus.digest, "asked"), paths.latest_model("encoders", live.encoder_name)]
    for path in own:
        fields = json.loads(store.read_bytes(path))
        del fields["format_version"], fields["checksum"]
        store.write_bytes(path, json.dumps(fields).encode())
    shards = [f"{paths.shard_dir(INDEX, entry.digest)}/{paths.SHARD_JSON}" for entry in live.shards]
    assert not [path for path in [*own, *shards] if b"format_version" in store.read_bytes(path)]
    before = content(store)
    assert [question.id for question in read_questions(corpus, "asked")] == ["q"]
    assert latest_fingerprint(store, ENCODERS, live.encoder_name) == live.encoder_fingerprint
    assert versions.act(run, "verify", None).problems == []
    for number, entry in enumerate(live.shards):
        shard_copy = shutil.copytree(manifest.open_shard(store, INDEX, entry), tmp_path / str(number))
        meta = manifest.ShardMeta(entry.shard, entry.num_passages, entry.num_vectors)
        assert manifest.add_shard(store, INDEX, shard_copy, meta) == entry
    assert content(store) == before


def test_a_changed_format_number_is_damage_not_a_newer_format(store: Store) -> None:
    """One digit of a shard's description is damaged: the shard is served, `verify` names the file."""
    entry = manifest.read(store, INDEX).shards[0]
    path = f"{paths.shard_dir(INDEX, entry.digest)}/{paths.SHARD_JSON}"
    fields = json.loads(store.read_bytes(path)) | {"format_version": 1}
    store.write_bytes(
        path, json.dumps(json_with_checksum(fields)).replace('"format_version": 1', '"format_version": 4').encode()
    )
    assert manifest.open_shard(store, INDEX, entry).is_dir()
    [problem] = manifest.verify(store, manifest.read(store, INDEX)).problems
    assert problem.path == path and "does not describe the shard" in problem.reason
