"""A run file on an object store describes the store that it lies in, to commands and to `Index.open`."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from mvr_ray import Index
from mvr_ray.cli import main
from mvr_ray.errors import ConfigError, MissingInputError
from mvr_ray.store.files import Store
from mvr_ray.store.run_file import load_run_at


@pytest.fixture
def root(s3_server: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a prefix, with keys and options."""
    monkeypatch.setenv("MVR_RAY_CACHE", str(tmp_path / "cache"))
    with s3_server.serve() as root:
        yield root


def within(root: str, name: str) -> str:
    place, mark, options = root.partition("?")
    return f"{place}/{name}{mark}{options}"


@pytest.mark.usefixtures("without_ray")
def test_commands_and_open_read_the_run_file_of_an_index_in_a_bucket(root: str, tiny_backbone: Path, capsys) -> None:
    texts = ["The Nile is a river of Africa.", "Mont Blanc is the highest peak of the Alps."]
    settings = {"encoder": {"num_views": 2}, "index": {"precision": "fp32"}}
    with Index.build(texts, model=tiny_backbone, path=root, settings=settings) as index:
        expected = [hit.id for hit in index.search("the highest mountain", k=2)]
    address = within(root, "run.yaml")
    with pytest.raises(SystemExit) as end:
        main(["search", address, "the highest mountain", "-k", "2", "--json"])
    assert not end.value.code
    assert [hit["id"] for hit in json.loads(capsys.readouterr().out)["results"][0]] == expected
    index = Index.open(address)
    assert index.run.store.path == root and len(index) == 2


def test_the_store_around_a_run_file_is_its_store_also_after_a_copy_and_before_overrides(root: str) -> None:
    store, address = Store(root), within(root, "run.yaml")
    store.write_bytes("run.yaml", b"store: {path: 's3://elsewhere/wiki'}")
    assert load_run_at(address).store.path == "s3://elsewhere/wiki", "there is no index beside it"
    store.write_bytes("indexes/index/versions/1.json", b"{}")
    assert load_run_at(address).store.path == root
    store.write_bytes("corpora/corpus/corpus.json", b"{}")
    for folder in ("indexes", "corpora"):
        store.local_path(folder)  # the cache looks like a store by now
    assert load_run_at(address).store.path == root
    assert load_run_at(address, ["store.path=other"]).store.path == "other"


def test_the_base_of_a_run_file_in_a_bucket_is_never_an_earlier_copy(root: str) -> None:
    store = Store(root)
    store.write_bytes("common.yaml", b"index: {kind: hnsw}")
    store.write_bytes("own.yaml", b"base: common.yaml")
    assert load_run_at(within(root, "common.yaml")).index.kind == "hnsw"
    store.local_path("common.yaml")
    with pytest.raises(ConfigError) as error:
        load_run_at(within(root, "own.yaml"))
    assert str(error.value).startswith(f"{store.where('own.yaml')}: base: {store.where('common.yaml')} does not exist")


def test_a_run_file_that_is_missing_or_wrong_is_named_by_its_address_without_keys(root: str) -> None:
    name = Store(root).where("runs/wiki.yaml")
    assert "@" not in name and name.startswith("s3://") and name.endswith("/runs/wiki.yaml")
    with pytest.raises(MissingInputError) as missing:
        load_run_at(within(root, "runs/wiki.yaml"))
    assert str(missing.value) == f"{name} does not exist"
    Store(root).write_bytes("runs/wiki.yaml", b"index: {knd: flat}")
    with pytest.raises(ConfigError) as wrong:
        load_run_at(within(root, "runs/wiki.yaml"))
    assert str(wrong.value).startswith(name) and "cache" not in str(wrong.value)
    with pytest.raises(ConfigError, match=r"s3://bucket names no file or folder in its bucket"):
        load_run_at("s3://key:secret@bucket?region=x")
