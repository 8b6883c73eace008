"""Laws of conditional writes on S3, over the wire: created once, a lost answer is read again, one publisher wins."""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from drafts import describe, make_shard
from obstore.exceptions import UnauthenticatedError
from obstore.store import GCSStore, MemoryStore, S3Store
from pyarrow.fs import FileSystem

from mvr_ray.errors import ConfigError, ManifestError, NoAnswerError, PublishConflictError, StorageError
from mvr_ray.store import manifest, objects, paths
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.objects import ObjectFiles, open_address

Serve = Callable[..., Any]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("mvr_ray.store.objects.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("mvr_ray.store.files.READ_TRIES", 1)
    monkeypatch.setenv("MVR_RAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def serve(s3_server: ModuleType) -> Serve:
    """Run a scripted server; gives its store and its script."""

    @contextmanager
    def run(conditional: str = "honoured") -> Iterator[tuple[Store, Any]]:
        script = s3_server.Script([], [], conditional)
        with s3_server.serve(script) as root:
            yield Store(root), script

    return run


def draft(store: Store, folder: Path) -> Manifest:
    """A manifest of one shard, not yet published."""
    return describe([make_shard(store, folder, b"content")])


def of_manifests(script: Any) -> list[int]:
    return [status for key, status in script.answers if key.endswith(".json")]


def test_a_manifest_is_created_by_one_conditional_put_and_what_is_there_stays(serve: Serve, tmp_path: Path):
    with serve() as (store, script):
        first = manifest.publish(store, draft(store, tmp_path / "made"))
        assert of_manifests(script) == [200]
        path = paths.manifest("i", 1)
        before = store.read_bytes(path)
        with pytest.raises(FileExistsError):
            store.create_once(path, b"other")
        assert store.read_bytes(path) == before
        assert of_manifests(script) == [200, 412]
        assert manifest.read(store, "i") == first
        assert store.list("indexes/i/versions") == ["1.json"]


def test_names_of_any_letters_are_created_once(serve: Serve):
    with serve() as (store, script):
        for name in ("a b", "ä+1", "x=1&y=~2", "50%"):
            store.create_once(f"odd/{name}.json", name.encode())
            assert store.read_bytes(f"odd/{name}.json") == name.encode()
            with pytest.raises(FileExistsError):
                store.create_once(f"odd/{name}.json", b"other")
        assert of_manifests(script) == [200, 412] * 4


@pytest.mark.chaos("object store creates, its answer is lost", "read again and known as ones own, never a conflict")
def test_a_lost_answer_is_read_again_and_known_as_ones_own(
    serve: Serve, s3_server: ModuleType, tmp_path: Path, record_property
):
    with serve() as (store, script):
        script.faults.append(s3_server.Fault("versions/1.json", "lost"))
        version = manifest.publish(store, draft(store, tmp_path / "made"))
        assert not script.faults and of_manifests(script) == [412]
        assert manifest.read(store, "i") == version
        assert manifest.list_versions(store, "i") == [1]
        record_property("figures", f"2 puts: the answer of one lost, the other answered {of_manifests(script)[0]}")


def test_a_publisher_of_equal_content_in_the_same_second_is_not_taken_for_oneself(
    serve: Serve, s3_server: ModuleType, tmp_path: Path
):
    """The first one's answer is lost; the second one meets its bytes, which differ in the token alone."""
    with serve() as (store, script):
        new_version = draft(store, tmp_path / "made")
        start = threading.Barrier(2)
        script.faults.extend([s3_server.Fault("versions/1.json", "lost")] * 2)

        def publish(_: int) -> Manifest | None:
            start.wait()
            try:
                return manifest.publish(Store(store.root), new_version)
            except PublishConflictError:
                return None

        with ThreadPoolExecutor(2) as pool:
            winners = [version for version in pool.map(publish, range(2)) if version]
        assert len(winners) == 1
        assert manifest.read(store, "i") == winners[0]


@pytest.mark.parametrize("kind", ["broken", "503", "409"])
def test_a_put_that_did_not_happen_is_done_again(serve: Serve, s3_server: ModuleType, tmp_path: Path, kind: str):
    with serve() as (store, script):
        script.faults.extend([s3_server.Fault("versions/1.json", kind)] * 3)
        version = manifest.publish(store, draft(store, tmp_path / "made"))
        assert not script.faults and of_manifests(script)[-1] == 200
        assert manifest.read(store, "i") == version


@pytest.mark.parametrize("conditional", ["ignored", "refused"])
def test_a_server_that_does_not_honour_the_condition_is_found_and_nothing_is_published(
    serve: Serve, tmp_path: Path, conditional: str
):
    with serve(conditional) as (store, script):
        new_version = draft(store, tmp_path / "made")
        with pytest.raises(ManifestError, match=r"not published, 0 stays live: .*conditional PUT"):
            manifest.publish(store, new_version)
        assert manifest.list_versions(store, "i") == [] and of_manifests(script) == []


def test_two_publishers_over_and_over_one_wins_each_number(serve: Serve, s3_server: ModuleType, tmp_path: Path):
    """40 numbers; of a third of them the first answer is lost, broken off, or put off."""
    rng = random.Random(7)
    with serve() as (store, script):
        new_version, start = draft(store, tmp_path / "made"), threading.Barrier(2)
        stores = [Store(store.root), Store(store.root)]
        winners: list[list[Manifest]] = []

        def publish(own: Store, parent: int, number: int) -> Manifest | None:
            start.wait()
            try:
                return manifest.publish(own, replace(new_version, parent=parent, config_digest=str(number)))
            except PublishConflictError:
                return None

        with ThreadPoolExecutor(2) as pool:
            for parent in range(40):
                if rng.random() < 1 / 3:
                    kind = rng.choice(["lost", "broken", "503", "409"])
                    script.faults.append(s3_server.Fault(f"versions/{parent + 1}.json", kind))
                versions = pool.map(publish, stores, [parent] * 2, range(2))
                winners.append([version for version in versions if version])
        assert [len(version) for version in winners] == [1] * 40
        assert manifest.list_versions(store, "i") == list(range(1, 41))
        assert [manifest.read(store, "i", n) for n in range(1, 41)] == [version[0] for version in winners]
        assert {version[0].config_digest for version in winners} == {"0", "1"}
        keys = [key for key, status in script.answers if status == 200 and key.endswith(".json")]
        assert len(keys) == len(set(keys))


def test_an_outcome_that_cannot_be_known_is_reported_as_unknown(
    serve: Serve, s3_server: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(objects, "RETRY", {**objects.RETRY, "max_retries": 0})
    with serve() as (store, script):
        new_version = draft(store, tmp_path / "made")
        script.faults.append(s3_server.Fault("versions/1.json", "down"))
        with pytest.raises(ManifestError, match=r"1\.json was published is not known: .*versions CONFIG list"):
            manifest.publish(store, new_version)


def test_an_address_names_bucket_prefix_keys_and_endpoint_and_what_is_unknown_is_refused():
    store = open_address("s3://key:se%2Fcret@bucket/some/prefix?endpoint_override=host:9000&scheme=http&region=r")
    assert isinstance(store, S3Store) and store.prefix == "some/prefix"
    expected = {
        "bucket": "bucket",
        "access_key_id": "key",
        "secret_access_key": "se/cret",
        "endpoint": "http://host:9000",
        "region": "r",
    }
    assert expected.items() <= store.config.items()
    assert isinstance(open_address("gs://anonymous@bucket/p?endpoint_override=host:1&scheme=http"), GCSStore)
    with pytest.raises(ConfigError, match="unknown option 'regoin'"):
        open_address("s3://key:secret@bucket/prefix?regoin=x")
    for address in ("s3:///prefix", "gs://", "s3://key:secret@/prefix"):
        with pytest.raises(ConfigError, match=r"^an address of (s3|gs):// names no bucket; write "):
            open_address(address)
    for address in ("memory:///x", "http://host/x", "az://container/x"):
        with pytest.raises(ConfigError, match=r":// is no store; give a folder, s3://BUCKET/PREFIX or gs://"):
            open_address(address)


@pytest.mark.parametrize("ask", ["exists", "list", "size_bytes", "age_s", "touch"])
def test_a_service_that_refuses_is_named_by_every_error(serve: Serve, monkeypatch: pytest.MonkeyPatch, ask: str):
    """Histories met the client's own errors, which no command catches."""
    with serve() as (store, _):
        store.write_bytes("a/b.json", b"{}")

        def refuse(*_: object) -> None:
            raise UnauthenticatedError("the token has expired")

        for name in ("head", "list", "list_with_delimiter"):
            monkeypatch.setattr(f"mvr_ray.store.objects.obstore.{name}", refuse)
        with pytest.raises(StorageError, match=r"cannot .*/a/b\.json: the token has expired"):
            getattr(store, ask)("a/b.json")
        with pytest.raises(StorageError, match=r"cannot list .*: the token has expired"):
            store.delete_leftovers(0)


def test_what_is_misread_is_not_written_back_when_an_age_is_renewed(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    with serve() as (store, _):
        store.write_bytes("a/shard.json", b"described")
        store.write_bytes("a/words.arrow", b"words")
        with monkeypatch.context() as patch:
            patch.setattr("mvr_ray.store.objects.obstore.get", lambda *_: SimpleNamespace(bytes=lambda: b"descri"))
            store.touch("a")
            store.touch("a/words.arrow")
            store.touch("a/absent")
        assert store.read_bytes("a/shard.json") == b"described"
        assert store.list("a") == ["shard.json", "words.arrow"]
        assert store.list(".touched") == []


def test_the_age_of_a_lone_object_is_renewed():
    objects = ObjectFiles(MemoryStore())
    objects.write("a/words.arrow", b"words")
    before = objects.newest_s("a/words.arrow")
    objects.touch("a/words.arrow")
    assert before and (objects.newest_s("a/words.arrow") or 0) > before


def test_a_download_that_is_cut_short_is_refused(serve: Serve, monkeypatch: pytest.MonkeyPatch):
    with serve() as (store, _):
        store.write_bytes("a/changes.jsonl", b"two\nlines")
        cut = SimpleNamespace(stream=lambda _: [b"two\n"])
        monkeypatch.setattr("mvr_ray.store.objects.obstore.get", lambda *_: cut)
        with pytest.raises(StorageError, match=r"changes\.jsonl came with 4 bytes, not 9"):
            store.local_path("a/changes.jsonl")


def test_empty_objects_that_other_programs_make_for_folders_are_neither_files_nor_names(bucket: str):
    store = Store(bucket)
    file_system, root = FileSystem.from_uri(bucket)
    file_system.create_dir(f"{root}/indexes/squad/shards/a")
    file_system.create_dir(f"{root}/indexes/empty")
    store.write_bytes("indexes/squad/shards/a/shard.json", b"described")
    store.write_bytes("indexes/squad/marker", b"")
    assert store.list("indexes") == ["empty", "squad"]
    assert store.list("indexes/squad") == ["marker", "shards"]
    assert [file.name for file in store.stored_files("indexes/squad")] == ["marker"]
    assert not store.exists("indexes/empty")
    assert [file.name for file in store.local_path("indexes/squad").rglob("*.json")] == ["shard.json"]
    assert (store.local_path("indexes/squad") / "marker").read_bytes() == b""


def test_a_bucket_that_is_not_there_is_named_by_every_writer(bucket: str, tmp_path: Path):
    store = Store(bucket.replace("@bucket/", "@absent/"))
    (tmp_path / "file").write_bytes(b"data")
    for write in (
        lambda: store.write_bytes("a/file", b"data"),
        lambda: store.create_once("a/file", b"data"),
        lambda: store.put_file(tmp_path / "file", "a/file"),
    ):
        with pytest.raises(StorageError, match=r"^no bucket .*/absent/.*NoSuchBucket.*; create it, or correct"):
            write()


def test_the_answer_of_a_service_is_in_the_message_and_its_dump_is_not(bucket: str):
    with pytest.raises(NoAnswerError) as failure:
        Store(bucket.replace("@bucket/", "@absent/")).list("a")
    assert "<Code>NoSuchBucket</Code>" in str(failure.value)
    assert not any(part in str(failure.value) for part in ("\n", "xml version", "RetryErrorImpl"))
