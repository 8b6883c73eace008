"""Refusals of files that a newer program wrote: they name file, both formats and the cure, and change nothing.

The store is the one of tests/fixtures/store-baa77f8; of one file of each kind with a format number, the number is
raised as a newer program would.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from mvr_ray import versions
from mvr_ray.checksums import json_with_checksum
from mvr_ray.config import RunConfig
from mvr_ray.distributed.router import open_router
from mvr_ray.errors import EncoderError, FormatError, ManifestError, MvrRayError
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.delta import open_embeddings
from mvr_ray.store.files import Store
from mvr_ray.store.gc import collect, collect_corpus
from mvr_ray.store.prepare import prepare
from mvr_ray.store.update import update

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


def raise_format(store: Store, path: str) -> None:
    """Rewrite a description as of the format after its own, whole by its checksum."""
    fields = json.loads(store.read_bytes(path))
    fields.pop("checksum", None)
    fields["format_version"] += 1
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
    raise_format(store, paths.manifest(INDEX, 2))
    text = (
        r"store/indexes/flat/versions/2\.json has format version 2, this program reads 1; use the program that wrote "
        r"it, or roll back: mvr-ray versions CONFIG rollback N"
    )
    require_refusals(
        store,
        ManifestError,
        text,
        *(lambda action=action: versions.act(run, action, None) for action in ("list", "show", "verify", "collect")),
        lambda: versions.act(run, "rollback", 2),
        lambda: open_router(run, local=True).__enter__(),
    )
    before = content(store)
    assert collect_corpus(store, CORPUS, grace_s=0) == [] and content(store) == before
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
    text = rf"{path} has format version 2, this program reads 1; use the program that wrote it, or set prepare\.corpus"
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
    made = manifest.publish(store, dataclasses.replace(live, parent=2, shards=(newer, *live.shards[1:])))
    text = (
        r"embeddings\.arrow has format mvr_ray\.embeddings/9, this program reads mvr_ray\.embeddings/1 and .*/2; use "
        r"the program that wrote it, or roll back"
    )
    require_refusals(
        store,
        FormatError,
        text,
        lambda: open_embeddings(manifest.open_shard(store, INDEX, made.shards[0]), made.shards[0].files),
    )
    removed = collect(store, INDEX, keep=2, grace_s=0)
    assert not [path for path in removed if newer.digest in path]
