"""Publishing over HTTP: nothing but a whole version, once, after the version that its sender has seen."""

import copy
import dataclasses
import json
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from asgi import Reply, call
from built_index import as_sent, build, copy_files, corpus, refine
from damaged_file import flip_byte
from in_memory_index import InMemoryIndex

from mvr_ray.client import Client, RefusedError, UnavailableError
from mvr_ray.config import RunConfig, ServeConfig
from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.deadline import Deadline
from mvr_ray.distributed.encoders import save_encoder
from mvr_ray.distributed.hot_swap import open_hot_swap_router
from mvr_ray.errors import AccessError
from mvr_ray.serving.app import create_app
from mvr_ray.serving.auth import read_tokens
from mvr_ray.serving.catalog import VersionCatalog
from mvr_ray.serving.schemas import RequestError
from mvr_ray.serving.service import SearchService
from mvr_ray.store import manifest, objects, paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store

READ, ADMIN = "read-" + "r" * 20, "admin-" + "a" * 20


class Elsewhere:
    """A server over a store to which an index was copied that was built and published in another one."""

    def __init__(self, folder: Path, **limits: int) -> None:
        self.source = folder / "source"
        self.version = build(self.source)
        self.payload = as_sent(self.source)
        self.root = copy_files(self.source, folder / "served")
        self.store = Store(str(self.root))
        self.service = SearchService(InMemoryIndex(), ServeConfig(**limits), VersionCatalog(self.store, "library"))
        tokens = read_tokens(None, {"MVR_RAY_READ_TOKEN": READ, "MVR_RAY_ADMIN_TOKEN": ADMIN})
        self.app = create_app(self.service, tokens)

    def post(self, payload: dict, token: str = ADMIN, **more) -> Reply:
        return call(self.app, "POST", "/v1/versions", {"manifest": payload, **more}, token=token)

    def versions(self) -> list[int]:
        return manifest.list_versions(self.store, "library")


@pytest.fixture
def elsewhere(tmp_path) -> Elsewhere:
    return Elsewhere(tmp_path)


def test_an_index_built_elsewhere_is_published_with_the_content_that_it_has_there(elsewhere) -> None:
    reply = elsewhere.post(elsewhere.payload)
    assert (reply.status, reply.body["version"], reply.body["live"], reply.body["parent"]) == (200, 1, True, 0)
    version = manifest.read(elsewhere.store, "library")
    assert version.content_digest() == elsewhere.version.content_digest()
    assert version.token != elsewhere.version.token
    assert reply.body["passages"] == elsewhere.version.num_passages
    manifest.verify(elsewhere.store, version).require()


def test_a_version_of_which_few_passages_were_changed_is_published_too(tmp_path) -> None:
    one = Elsewhere(tmp_path)
    version = refine(one.source)
    copy_files(one.source, one.root)
    assert one.post(one.payload).status == 200
    reply = one.post(as_sent(one.source, 2))
    assert (reply.status, reply.body.get("version")) == (200, 2), reply.body
    assert paths.CHANGES in manifest.read(one.store, "library").shards[0].files
    assert manifest.read(one.store, "library").num_vectors == version.num_vectors == one.version.num_vectors + 1


def test_the_same_request_again_is_answered_by_the_version_that_it_made(elsewhere) -> None:
    first, again = elsewhere.post(elsewhere.payload), elsewhere.post(elsewhere.payload)
    assert first.body == again.body
    assert elsewhere.versions() == [1]
    VersionCatalog(elsewhere.store, "library").rollback(1, Deadline.after(60))
    late = elsewhere.post(elsewhere.payload)
    assert late.body == {**first.body, "live": False}
    assert elsewhere.versions() == [1, 2]


def test_only_an_admin_token_publishes_and_no_request_where_there_are_no_tokens(elsewhere) -> None:
    refusal = elsewhere.post(elsewhere.payload, token=READ)
    assert (refusal.status, refusal.body["error"]["code"]) == (403, "admin_needed")
    for body in ({"manifest": elsewhere.payload}, {"manifest": {}}):
        refusal = call(create_app(elsewhere.service), "POST", "/v1/versions", body)
        assert (refusal.status, refusal.body["error"]["code"]) == (403, "admin_needed")
    assert elsewhere.versions() == []


@pytest.mark.chaos("two publishers over HTTP", "one wins; the other gets 409 and the version that is live")
def test_of_two_that_follow_the_same_version_one_wins(elsewhere, tmp_path, record_property) -> None:
    assert elsewhere.post(elsewhere.payload).status == 200
    offers = []
    for number in (2, 3):
        root = tmp_path / f"built{number}"
        build(root, scale=number)
        copy_files(root, elsewhere.root)
        offers.append(as_sent(root))
    both = [create_app(other(elsewhere), tokens()) for _ in offers]
    with ThreadPoolExecutor(2) as threads:
        start = threading.Barrier(2)

        def send(app, payload) -> Reply:
            start.wait()
            return call(app, "POST", "/v1/versions", {"manifest": payload, "parent": 1}, token=ADMIN)

        replies = list(threads.map(send, both, offers))
    assert sorted(reply.status for reply in replies) == [200, 409]
    [error] = [reply.body["error"] for reply in replies if reply.status == 409]
    assert error["code"] == "publish_conflict" and "version 2 is live" in error["message"]
    [winner] = [n for n, reply in enumerate(replies) if reply.status == 200]
    live = manifest.read(elsewhere.store, "library")
    assert (live.version, live.shards[0].digest) == (2, offers[winner]["shards"][0]["digest"])
    assert elsewhere.versions() == [1, 2]
    record_property("figures", f"answered {' and '.join(str(reply.status) for reply in replies)}, version 2 live")


def other(elsewhere: Elsewhere) -> SearchService:
    """Another server of the same store."""
    return SearchService(InMemoryIndex(), ServeConfig(), VersionCatalog(Store(str(elsewhere.root)), "library"))


def tokens():
    return read_tokens(None, {"MVR_RAY_ADMIN_TOKEN": ADMIN})


def test_a_manifest_that_follows_another_version_than_the_newest_is_a_conflict_unless_the_request_names_its_parent(
    elsewhere, tmp_path
) -> None:
    assert elsewhere.post(elsewhere.payload).status == 200
    build(tmp_path / "next", scale=2)
    copy_files(tmp_path / "next", elsewhere.root)
    payload = as_sent(tmp_path / "next")
    for parent in ({}, {"parent": 0}, {"parent": 7}):
        reply = elsewhere.post(payload, **parent)
        assert (reply.status, reply.body["error"]["code"]) == (409, "publish_conflict")
    assert elsewhere.versions() == [1]
    reply = elsewhere.post(payload, parent=1)
    assert (reply.status, reply.body["version"], reply.body["parent"]) == (200, 2, 1)


def first_file(elsewhere: Elsewhere) -> Path:
    return elsewhere.root / paths.shard_dir("library", elsewhere.version.shards[1].digest) / paths.EMBEDDINGS


DAMAGE = {
    "missing": (lambda file: file.unlink(), "is missing"),
    "cut short": (lambda file: file.write_bytes(file.read_bytes()[:-1]), "bytes, not"),
    "too long": (lambda file: file.write_bytes(file.read_bytes() + b"x"), "bytes, not"),
    "flipped": (flip_byte, "another sha256"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_version_with_a_damaged_file_is_not_published_until_the_file_is_whole(elsewhere, kind) -> None:
    do, reason = DAMAGE[kind]
    file = first_file(elsewhere)
    whole = file.read_bytes()
    file.chmod(0o644)
    do(file)
    error = elsewhere.post(elsewhere.payload).body["error"]
    assert (error["code"], error["field"]) == ("not_whole", "manifest.shards.1") and reason in error["message"]
    assert elsewhere.versions() == []
    file.write_bytes(whole)
    assert elsewhere.post(elsewhere.payload).status == 200


def test_a_version_without_its_shard_corpus_or_encoder_is_not_published(elsewhere, tmp_path) -> None:
    def refusal() -> tuple[str, str]:
        reply = elsewhere.post(elsewhere.payload)
        assert reply.status == 422
        return reply.body["error"]["code"], reply.body["error"]["field"]

    for path, field in (
        (paths.shard_dir("library", elsewhere.version.shards[0].digest), ("not_whole", "manifest.shards.0")),
        (paths.models_dir("encoders", "words"), ("no_encoder", "manifest.encoder_fingerprint")),
        (paths.corpus_dir("books"), ("no_corpus", "manifest.corpus_digest")),
    ):
        (elsewhere.root / path).rename(tmp_path / "aside")
        assert refusal() == field
        (tmp_path / "aside").rename(elsewhere.root / path)
    elsewhere.store.write_bytes(paths.corpus_json("books"), b'{"format_version": 1}')
    assert refusal()[0] == "no_corpus"
    corpus(elsewhere.store)
    assert elsewhere.post(elsewhere.payload).status == 200


@pytest.fixture
def read_only_store(elsewhere) -> Iterator[bool]:
    """The served store, mounted read-only; False where no mount is allowed."""
    mount = subprocess.run(["mount", "-o", "bind,ro", elsewhere.root, elsewhere.root], capture_output=True)
    yield mount.returncode == 0
    if mount.returncode == 0:
        subprocess.run(["umount", "-l", elsewhere.root], check=True)


def test_a_server_that_may_not_write_to_its_store_refuses_to_publish_for_good(elsewhere, read_only_store) -> None:
    if not read_only_store:
        pytest.skip("no mount is allowed here")
    reply = elsewhere.post(elsewhere.payload)
    error = reply.body["error"]
    assert (reply.status, error["code"]) == (403, "not_writable") and "Read-only file system" in error["message"]
    assert "retry-after" not in reply.headers and elsewhere.versions() == []


@pytest.mark.parametrize("part", ["shards/", "corpora/"])
def test_a_version_with_a_file_that_the_server_may_not_read_is_refused_by_that_name(
    elsewhere, monkeypatch, part
) -> None:
    sha256 = Store.sha256

    def read(store: Store, path: str) -> str:
        if part in path:
            raise AccessError(f"cannot read {path}: Permission denied")
        return sha256(store, path)

    monkeypatch.setattr(Store, "sha256", read)
    reply = elsewhere.post(elsewhere.payload)
    error = reply.body["error"]
    assert (reply.status, error["code"]) == (403, "not_readable") and part in error["message"]
    assert "read access" in error["hint"] and elsewhere.versions() == []


def test_publishing_from_an_object_store_reads_each_shard_once_several_at_once_and_fetches_none(
    elsewhere, bucket, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("MVR_RAY_CACHE", str(tmp_path / "cache"))
    store, both, whole_reads = Store(bucket), threading.Barrier(2), list[str]()
    for file in sorted(elsewhere.root.rglob("*")):
        if file.is_file():
            store.write_bytes(file.relative_to(elsewhere.root).as_posix(), file.read_bytes())
    get, sha256 = objects.obstore.get, Store.sha256

    def sha256_together(self: Store, path: str) -> str:
        if path.endswith(paths.EMBEDDINGS):
            both.wait(30)
        return sha256(self, path)

    def get_counted(objects, path: str, **options):
        whole_reads.extend([path] * (path.endswith(paths.EMBEDDINGS) and not options))
        return get(objects, path, **options)

    monkeypatch.setattr(Store, "sha256", sha256_together)
    monkeypatch.setattr(objects.obstore, "get", get_counted)
    service = SearchService(InMemoryIndex(), ServeConfig(), VersionCatalog(store, "library"))
    app = create_app(service, tokens())
    wrong = change(elsewhere.payload, ("dimension",), 4)
    error = call(app, "POST", "/v1/versions", {"manifest": wrong}, token=ADMIN).body["error"]
    assert error["code"] == "not_whole" and "dimension 3, " in error["message"]
    whole_reads.clear()
    reply = call(app, "POST", "/v1/versions", {"manifest": elsewhere.payload}, token=ADMIN)
    assert (reply.status, reply.body["version"]) == (200, 1)
    folders = [paths.shard_dir("library", entry.digest) for entry in elsewhere.version.shards]
    assert sorted(whole_reads) == sorted(f"{folder}/{paths.EMBEDDINGS}" for folder in folders)
    assert not [*(tmp_path / "cache").rglob(paths.EMBEDDINGS)]


def change(payload: dict, place: tuple, value: object) -> dict:
    """The manifest with one field changed, and without its digest, as someone would send who made it up."""
    variant = copy.deepcopy(payload)
    del variant["digest"]
    at = variant
    for part in place[:-1]:
        at = at[part]
    at[place[-1]] = value
    return variant


MADE_UP = [
    (("index",), "other", "wrong_index", "manifest.index"),
    (("index",), "../library", "wrong_value", "manifest.index"),
    (("encoder_name",), "../../etc", "wrong_value", "manifest.encoder_name"),
    (("corpus",), "a/b", "wrong_value", "manifest.corpus"),
    (("dimension",), 4, "not_whole", "manifest.shards.0"),
    (("dimension",), 0, "wrong_value", "manifest.dimension"),
    (("dimension",), 10**400, "wrong_value", "manifest.dimension"),
    (("index_params", "kind"), "magic", "wrong_value", "manifest.index_params"),
    (("index_params", "depth"), 3, "wrong_value", "manifest.index_params"),
    (("shards", 0, "digest"), "0" * 32, "wrong_digest", "manifest.shards.0.digest"),
    (("shards", 0, "digest"), "../" * 10 + "ab", "wrong_value", "manifest.shards.0.digest"),
    (("shards", 0, "num_passages"), 99, "wrong_digest", "manifest.shards.0.digest"),
    (("shards", 1, "shard"), 0, "wrong_value", "manifest.shards.1.shard"),
    (("shards", 0, "files"), {}, "wrong_value", "manifest.shards.0.files"),
    (("shards", 0, "files"), {"../x": {"num_bytes": 1, "sha256": "0" * 64}}, "wrong_value", None),
    (("shards",), [], "wrong_value", "manifest.shards"),
    (("refined_queries",), {"dev": "0" * 32}, "not_whole", "manifest.refined_queries"),
    (("corpus_digest",), "0" * 32, "no_corpus", "manifest.corpus_digest"),
    (("encoder_fingerprint",), "0" * 16, "no_encoder", "manifest.encoder_fingerprint"),
    (("format_version",), 4, "wrong_value", "manifest.format_version"),
    (("surprise",), 1, "unknown_field", "manifest.surprise"),
]


@pytest.mark.parametrize(
    ("place", "value", "code", "field"), MADE_UP, ids=[f"{'.'.join(map(str, p))}-{c}" for p, _, c, _ in MADE_UP]
)
def test_a_made_up_manifest_is_refused_by_name_and_nothing_is_published(elsewhere, place, value, code, field) -> None:
    reply = elsewhere.post(change(elsewhere.payload, place, value))
    error = reply.body["error"]
    assert (reply.status, error["code"], elsewhere.versions()) == (422, code, [])
    assert field is None or error["field"] == field


def test_a_manifest_that_was_changed_under_its_digest_is_refused(elsewhere) -> None:
    payload = elsewhere.payload | {"metrics": {"lv": 0.26}}
    error = elsewhere.post(payload).body["error"]
    assert (error["code"], error["field"]) == ("wrong_digest", "manifest.digest")


class Slow(Store):
    """Reads no file until it is let."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.let = threading.Event()
        self.read = 0

    def sha256(self, path: str) -> str:
        self.let.wait(60)
        self.read += 1
        return super().sha256(path)


def test_a_repeated_request_while_files_are_read_waits_for_the_same_reading(elsewhere) -> None:
    slow = Slow(str(elsewhere.root))
    service = SearchService(InMemoryIndex(), ServeConfig(timeout_ms=4000), VersionCatalog(slow, "library"))
    app = create_app(service, tokens())
    first = call(app, "POST", "/v1/versions", {"manifest": elsewhere.payload}, token=ADMIN)
    assert (first.status, first.body["error"]["code"], first.headers["retry-after"]) == (503, "publishing", "2")
    another = change(elsewhere.payload, ("metrics",), {"lv": 1.0})
    second = call(app, "POST", "/v1/versions", {"manifest": another}, token=ADMIN)
    assert (second.status, second.body["error"]["code"]) == (503, "publishing")
    assert call(app, "GET", "/v1/versions", token=ADMIN).status == 200
    slow.let.set()
    reply, until = first, time.monotonic() + 20
    while reply.status in (503, 504) and time.monotonic() < until:
        reply = call(app, "POST", "/v1/versions", {"manifest": elsewhere.payload}, token=ADMIN)
    assert (reply.status, reply.body["version"]) == (200, 1)
    num_parts = Corpus.open(slow, "books").num_shards
    assert slow.read == sum(len(entry.files) for entry in elsewhere.version.shards) + num_parts


def test_a_roll_back_whose_reading_outlasts_its_request_is_published_once(elsewhere) -> None:
    assert elsewhere.post(elsewhere.payload).status == 200
    slow = Slow(str(elsewhere.root))
    service = SearchService(InMemoryIndex(), ServeConfig(timeout_ms=4000), VersionCatalog(slow, "library"))
    app = create_app(service, tokens())
    first = call(app, "POST", "/v1/versions/1/rollback", token=ADMIN)
    assert (first.status, first.body["error"]["code"]) == (503, "publishing")
    slow.let.set()
    reply, until = first, time.monotonic() + 20
    while reply.status in (503, 504) and time.monotonic() < until:
        reply = call(app, "POST", "/v1/versions/1/rollback", token=ADMIN)
    assert (reply.status, reply.body["version"], reply.body["operation"]) == (200, 2, "rollback")
    assert elsewhere.versions() == [1, 2]


def test_a_roll_back_that_is_published_while_its_repetition_lists_the_versions_is_published_once(elsewhere) -> None:
    caller = threading.current_thread()

    class SlowListing(Slow):
        """Once files may be read, a listing of the caller's waits until the job has published version 2."""

        def json_names(self, path):
            names = super().json_names(path)
            while self.let.is_set() and threading.current_thread() is caller and elsewhere.versions() == [1]:
                time.sleep(0.01)
            return names

    assert elsewhere.post(elsewhere.payload).status == 200
    catalog = VersionCatalog(SlowListing(str(elsewhere.root)), "library")
    with pytest.raises(RequestError, match="being read"):
        catalog.rollback(1, Deadline.after(0.3))
    catalog.store.let.set()
    assert catalog.rollback(1, Deadline.after(20)).version == 2
    assert elsewhere.versions() == [1, 2]


def test_a_roll_back_is_published_once_by_whichever_replica_its_repetition_reaches(elsewhere) -> None:
    assert elsewhere.post(elsewhere.payload).status == 200
    first, second = (VersionCatalog(Slow(str(elsewhere.root)), "library") for _ in range(2))
    with pytest.raises(RequestError, match="being read"):
        first.rollback(1, Deadline.after(0.3))
    with pytest.raises(RequestError, match="being read"):
        second.rollback(1, Deadline.after(0.3))
    for catalog in (first, second, VersionCatalog(elsewhere.store, "library")):
        if isinstance(catalog.store, Slow):
            catalog.store.let.set()
        version = catalog.rollback(1, Deadline.after(20))
        assert (version.version, version.live) == (2, True)
    assert elsewhere.versions() == [1, 2]


def test_a_newest_version_that_cannot_be_read_is_rolled_back_from_and_described_by_a_permanent_error(elsewhere) -> None:
    assert elsewhere.post(elsewhere.payload).status == 200
    catalog = VersionCatalog(elsewhere.store, "library")
    newer = json.loads(elsewhere.store.read_bytes(paths.manifest("library", 1))) | {"format_version": 99, "version": 2}
    newer.pop("checksum", None)
    elsewhere.store.write_bytes(paths.manifest("library", 2), json.dumps(newer).encode())
    with pytest.raises(RequestError, match="has format version 99") as error:
        catalog.one(2)
    assert (error.value.status, error.value.code) == (422, "unreadable_version")
    version = catalog.rollback(1, Deadline.after(20))
    assert (version.version, version.operation, version.live) == (3, "rollback", True)


@pytest.mark.parametrize("data", [b'{"format_version": 99, "version": 2}', b"damaged"])
def test_a_search_of_a_version_that_cannot_be_read_is_refused(elsewhere, data) -> None:
    assert elsewhere.post(elsewhere.payload).status == 200
    sections = {"store": {"path": str(elsewhere.root)}, "index": {"name": "library"}, "serve": {"follow_s": 0}}
    with Client.in_process(RunConfig.model_validate(sections)) as client:
        elsewhere.store.write_bytes(paths.manifest("library", 2), data)
        with pytest.raises(RefusedError) as refusal:
            client.search([[1.0, 0, 0]], k=3, text=False, version=2)
    assert (refusal.value.status, refusal.value.code, refusal.value.field) == (422, "unreadable_version", "version")


def test_a_version_that_cannot_be_read_is_a_conflict_for_a_publisher_that_follows_the_one_before(elsewhere) -> None:
    elsewhere.store.write_bytes(paths.manifest("library", 1), b'{"format_version": 99, "version": 1}')
    reply = elsewhere.post(elsewhere.payload)
    assert (reply.status, reply.body["error"]["code"]) == (409, "publish_conflict")
    assert "version 1 is live" in reply.body["error"]["message"] and elsewhere.versions() == [1]


def test_a_server_of_a_fixed_version_refuses_to_roll_back_before_anything_is_published(elsewhere) -> None:
    assert elsewhere.post(elsewhere.payload).status == 200
    run = RunConfig.model_validate({"store": {"path": str(elsewhere.root)}, "index": {"name": "library"}})
    with Client.in_process(run, version=1) as client, pytest.raises(UnavailableError) as refusal:
        client.rollback(1)
    assert refusal.value.code == "not_opened"
    assert "version 1 not rolled back to: this server was started with version 1, which stays" in str(refusal.value)
    assert elsewhere.versions() == [1]


def test_nothing_rolls_back_to_a_version_of_which_a_byte_differs(elsewhere, tiny_backbone) -> None:
    encoder = DualEncoder.from_backbone(str(tiny_backbone), EncoderSpec(strategy="mean"))
    snapshot = save_encoder(elsewhere.store, "own", encoder)
    own = {"encoder_name": snapshot.name, "encoder_fingerprint": snapshot.fingerprint}
    manifest.publish(elsewhere.store, dataclasses.replace(elsewhere.version, **own))
    weights = elsewhere.root / paths.encoder_dir(snapshot.name, snapshot.fingerprint) / "shared" / "model.safetensors"
    file = first_file(elsewhere)
    part = elsewhere.root / paths.corpus_dir("books") / Corpus.open(elsewhere.store, "books").info.parts[0].file
    for path, code in ((file, "not_whole"), (part, "no_corpus"), (weights, "no_encoder")):
        whole = path.read_bytes()
        path.chmod(0o644)
        flip_byte(path)
        reply = call(create_app(elsewhere.service, tokens()), "POST", "/v1/versions/1/rollback", token=ADMIN)
        assert (reply.status, reply.body["error"]["code"]) == (422, code)
        path.write_bytes(whole)
    assert elsewhere.versions() == [1]


def test_the_client_publishes_a_manifest_or_its_json_and_names_what_is_wrong(elsewhere, tmp_path) -> None:
    with Client.over(elsewhere.service) as client:
        assert client.publish(elsewhere.payload).version == client.publish(elsewhere.version, parent=0).version == 1
        assert client.versions().live == 1
        with pytest.raises(RefusedError) as refusal:
            client.publish(elsewhere.version, parent=4)
        assert (refusal.value.status, refusal.value.code) == (409, "publish_conflict")
        with pytest.raises(RefusedError, match=r"unknown_field: manifest\.more"):
            client.publish({**elsewhere.payload, "more": 1})


def test_a_published_version_is_answered_from_as_its_source_is(elsewhere, tmp_path) -> None:
    """The second version of a served index comes from another store, and is promoted."""
    build(tmp_path / "next", scale=2)
    copy_files(tmp_path / "next", elsewhere.root)
    assert elsewhere.post(elsewhere.payload).status == 200
    run = RunConfig.model_validate({"store": {"path": str(elsewhere.root)}, "index": {"name": "library"}})
    with Client.in_process(run) as client:
        before = client.search([[1.0, 0, 0]], k=3, text=False)
        assert client.publish(as_sent(tmp_path / "next"), parent=1).version == 2
        assert client.promote(2).version == 2
        after = client.search([[1.0, 0, 0]], k=3, text=False)
    assert (before.version, after.version) == (1, 2)
    assert [hit.score for hit in after.results[0]] == [2 * hit.score for hit in before.results[0]]
    assert [hit.id for hit in after.results[0]] == [hit.id for hit in before.results[0]]


def test_an_older_version_is_not_promoted_where_the_manifest_of_the_one_in_use_is_deleted(elsewhere, tmp_path) -> None:
    build(tmp_path / "next", scale=2)
    copy_files(tmp_path / "next", elsewhere.root)
    assert elsewhere.post(elsewhere.payload).status == 200
    run = RunConfig.model_validate({"store": {"path": str(elsewhere.root)}, "index": {"name": "library"}})
    with Client.in_process(run) as client:
        client.publish(as_sent(tmp_path / "next"), parent=1)
        client.promote(2)
        (elsewhere.root / paths.manifest("library", 2)).unlink()
        with pytest.raises(UnavailableError, match="version 1 could not be opened beside version 2") as error:
            client.promote(1)
        assert (error.value.status, error.value.code) == (503, "not_opened")


def test_a_version_without_words_is_not_promoted_where_searches_are_hybrid(elsewhere) -> None:
    assert elsewhere.post(elsewhere.payload).status == 200
    sections = {"store": {"path": str(elsewhere.root)}, "index": {"name": "library"}, "search": {"hybrid": 2.0}}
    with Client.in_process(RunConfig.model_validate(sections)) as client:
        with pytest.raises(UnavailableError, match=r"published again as 2, .* version 1, .* 2 has no words") as error:
            client.rollback(1)
        assert (error.value.status, error.value.code, client.versions().serving) == (503, "not_opened", 1)


def test_promotes_that_wait_for_a_version_leave_threads_to_searches(elsewhere, tmp_path) -> None:
    assert elsewhere.post(elsewhere.payload).status == 200
    build(tmp_path / "next", scale=2)
    copy_files(tmp_path / "next", elsewhere.root)
    run = RunConfig.model_validate({"store": {"path": str(elsewhere.root)}, "index": {"name": "library"}})
    with open_hot_swap_router(run, local=True) as router, ThreadPoolExecutor(1) as thread:
        assert elsewhere.post(as_sent(tmp_path / "next"), parent=1).status == 200
        load, load_event, open_event = router.searchers.load, threading.Event(), threading.Event()

        def slow(version) -> None:
            load_event.set()
            assert open_event.wait(30)
            load(version)

        router.searchers.load = slow
        move = thread.submit(router.follow)
        assert load_event.wait(30)
        service = SearchService(router, ServeConfig(max_running=2), elsewhere.service.catalog)
        app, promote = create_app(service, tokens()), "/v1/versions/2/promote"
        short = [(b"x-timeout-ms", b"50")]
        late = [call(app, "POST", promote, token=ADMIN, headers=short) for _ in range(3)]
        assert {reply.body["error"]["code"] for reply in late} <= {"not_opened", "timeout"}
        body = {"queries": [[1.0, 0, 0]], "k": 1, "text": False}
        assert call(app, "POST", "/v1/search", body, token=ADMIN).body["version"] == 1
        with pytest.raises(RequestError, match=f"still opens a version; ask again: POST {promote}") as error:
            service.promote(2, Deadline.after(0.05))
        assert (error.value.status, error.value.code, error.value.headers) == (503, "not_opened", {"retry-after": "1"})
        open_event.set()
        assert move.result(30)
        assert call(app, "POST", promote, token=ADMIN).body["version"] == 2


def test_a_version_that_lost_its_corpus_is_unavailable_and_one_that_never_was_is_unknown(elsewhere, tmp_path) -> None:
    """The corpus of version 2 replaces that of version 1 in the store."""
    assert elsewhere.post(elsewhere.payload).status == 200
    build(tmp_path / "next", types={"year": "int"}, fields={"p1": {"year": 1958}})
    copy_files(tmp_path / "next", elsewhere.root)
    assert elsewhere.post(as_sent(tmp_path / "next"), parent=1).status == 200
    catalog = VersionCatalog(Store(str(elsewhere.root)), "library")
    assert [catalog.one(version).fields for version in (1, 2)] == [{}, {"year": "int"}]
    run = RunConfig.model_validate({"store": {"path": str(elsewhere.root)}, "index": {"name": "library"}})
    with open_hot_swap_router(run, local=True) as router:
        app = create_app(SearchService(router, ServeConfig()))
        body = {"queries": [[1.0, 0, 0]], "k": 1, "text": False, "fields": ["year"]}
        replies = [call(app, "POST", "/v1/search", {**body, **of}) for of in ({}, {"version": 1}, {"version": 3})]
    assert [reply.status for reply in replies] == [200, 503, 404]
    assert [reply.body["error"]["code"] for reply in replies[1:]] == ["unavailable", "unknown_version"]
    assert "corpus 'books' of digest" in replies[1].body["error"]["message"]
