"""Laws of index versions: one winner, live stays whole through crashes, damage is named, nothing live is collected."""

import dataclasses
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from drafts import describe, make_shard

from mvr_ray.errors import DigestError, ManifestError, MissingInputError, PublishConflictError, StorageError
from mvr_ray.store import manifest, paths
from mvr_ray.store.files import Store
from mvr_ray.store.gc import collect
from mvr_ray.store.manifest import FileEntry, LexicalPart, Manifest, ShardEntry


@pytest.fixture
def entry(store: Store, tmp_path: Path) -> ShardEntry:
    return make_shard(store, tmp_path / "made", b"content")


def test_what_is_published_is_read_back(store: Store, entry: ShardEntry):
    version = manifest.publish(store, dataclasses.replace(describe([entry]), recall=0.1 + 0.2, metrics={"ä": 1e-30}))
    assert version.version == 1
    assert version.created
    assert manifest.read(store, "i") == version
    assert manifest.read(store, "i", 1) == version
    assert manifest.latest_version(store, "i") == 1
    assert manifest.verify(store, version).problems == []
    assert manifest.verify(store, version).num_files == 2


def test_content_digest_is_equal_for_equal_content_only(entry: ShardEntry):
    first = describe([entry])
    assert dataclasses.replace(first, parent=3, version=4, created="now").content_digest() == first.content_digest()
    assert dataclasses.replace(first, dtype="fp32").content_digest() != first.content_digest()


def test_equal_shards_are_kept_once(store: Store, tmp_path: Path, entry: ShardEntry):
    assert make_shard(store, tmp_path / "again", b"content") == entry
    assert make_shard(store, tmp_path / "other", b"other").digest != entry.digest
    assert make_shard(store, tmp_path / "moved", b"content", shard=1).digest != entry.digest
    assert len(store.list(paths.index_dir("i", "shards"))) == 3


def test_a_damaged_shard_is_repaired_by_building_it_again(store: Store, tmp_path: Path, entry: ShardEntry):
    store.write_bytes(f"{paths.shard_dir('i', entry.digest)}/index.bin", b"tnetnoX")
    assert make_shard(store, tmp_path / "again", b"content") == entry
    folder = manifest.open_shard(store, "i", entry)
    assert (folder / "index.bin").read_bytes() == b"tnetnoc"


@pytest.mark.chaos("flipped bit", "refused before it is opened, file and shard named")
def test_a_flipped_bit_is_a_digest_error_naming_file_and_shard(store: Store, tmp_path: Path, record_property):
    entries = [make_shard(store, tmp_path / f"s{n}", b"content%d" % n, n) for n in range(2)]
    version = manifest.publish(store, describe(entries))
    path = f"{paths.shard_dir('i', entries[1].digest)}/{paths.EMBEDDINGS}"
    data = bytearray(store.read_bytes(path))
    data[3] ^= 1
    store.write_bytes(path, bytes(data))
    report = manifest.verify(store, version)
    assert [(problem.shard, problem.path) for problem in report.problems] == [(1, path)]
    with pytest.raises(DigestError, match=r"embeddings\.arrow of shard 1"):
        report.require()
    with pytest.raises(DigestError, match=r"embeddings\.arrow of shard 1"):
        manifest.open_shard(store, "i", entries[1])
    manifest.open_shard(store, "i", entries[0])
    record_property("figures", f"1 bit of {report.num_bytes} bytes; {len(report.problems)} of {report.num_files} files")


def test_a_damaged_manifest_is_refused(store: Store, entry: ShardEntry):
    version = manifest.publish(store, describe([entry]))
    path = paths.manifest("i", 1)
    good = version.to_json()
    for bad, error in (
        (good.replace(b"fp16", b"fp32"), DigestError),
        (good[:-9], ManifestError),
        (b"[]", ManifestError),
        (json.dumps({**json.loads(good), "format_version": 99}).encode(), ManifestError),
    ):
        store.write_bytes(path, bad)
        with pytest.raises(error, match=r"1\.json"):
            manifest.read(store, "i")


@pytest.mark.parametrize("own", [{"index": "j", "version": 1}, {"version": 2}])
def test_a_manifest_of_another_index_or_version_is_refused(tmp_path: Path, own: dict):
    store = Store(tmp_path / "store")
    store.write_bytes(paths.manifest("i", 1), dataclasses.replace(describe([]), **own).to_json())
    with pytest.raises(ManifestError, match=r"is the manifest of index .*, copied or moved here"):
        manifest.read(store, "i")


def test_the_newest_versions_leave_out_what_cannot_be_read_but_the_live_one(tmp_path: Path):
    store = Store(tmp_path / "store")
    entry = make_shard(store, tmp_path / "made", b"content")
    for parent in range(4):
        manifest.publish(store, describe([entry], parent=parent))
    store.write_bytes(paths.manifest("i", 2), b"[]")
    assert [version.version for version in manifest.newest_first(store, "i")] == [4, 3, 1]
    store.write_bytes(paths.manifest("i", 4), b"[]")
    assert [version.version for version in manifest.newest_first(store, "i", require_live=False)] == [3, 1]
    with pytest.raises(ManifestError, match=r"4\.json"):
        next(manifest.newest_first(store, "i"))


def test_a_damaged_description_of_a_shard_is_a_problem_of_the_version(tmp_path: Path):
    store = Store(tmp_path / "store")
    entries = [make_shard(store, tmp_path / f"{n}", b"%d" % n, n) for n in range(2)]
    version = manifest.publish(store, describe(entries))
    [path, other] = (f"{paths.shard_dir('i', entry.digest)}/{paths.SHARD_JSON}" for entry in entries)
    store.write_bytes(path, store.read_bytes(other))
    assert [(problem.shard, problem.path) for problem in manifest.verify(store, version).problems] == [(0, path)]


def words_of(store: Store, folder: Path, num_files: int) -> tuple[FileEntry, ...]:
    files = []
    for number in range(num_files):
        (folder / "words").write_bytes(b"words %d" % number)
        files.append(manifest.add_lexical(store, "i", folder / "words"))
    return tuple(files)


def test_a_version_has_the_words_of_every_shard_and_a_format_by_its_files_of_changes(tmp_path: Path):
    store = Store(tmp_path / "store")
    entry = make_shard(store, tmp_path / "made", b"content")
    for num_files, format_version in ((1, 1), (2, 1), (3, 3)):
        words = words_of(store, tmp_path, num_files)
        draft = describe([entry], parent=manifest.latest_version(store, "i"))
        for lexical in (LexicalPart(words, (words[:1],)), LexicalPart(words[:1], (words,))):
            with pytest.raises(ManifestError, match="it has 2 shards and the words of 1; index again"):
                manifest.publish(store, dataclasses.replace(draft, shards=(entry, entry), lexical=lexical))
            version = manifest.publish(store, dataclasses.replace(draft, lexical=lexical))
            assert version.format_version == format_version
            draft = dataclasses.replace(draft, parent=version.version)


def test_refined_queries_are_verified_with_the_version(store: Store, entry: ShardEntry, tmp_path: Path):
    file = tmp_path / "queries.arrow"
    file.write_bytes(b"moved")
    with pytest.raises(ManifestError, match="1 of 3 files missing"):
        manifest.publish(store, dataclasses.replace(describe([entry]), refined_queries={"known": "0" * 32}))
    digest = manifest.add_refined_queries(store, "i", file)
    version = manifest.publish(store, dataclasses.replace(describe([entry]), refined_queries={"known": digest}))
    assert manifest.verify(store, version).problems == []
    store.write_bytes(paths.refined_queries("i", digest), b"moveD")
    with pytest.raises(DigestError, match="queries"):
        manifest.verify(store, version).require()


@pytest.mark.parametrize("at", [0, 1, 2])
def test_words_are_verified_with_the_version(tmp_path: Path, at: int):
    """The statistics of all shards, the words of a shard, and those of its changes."""
    store = Store(tmp_path / "store")
    words = words_of(store, tmp_path, 3)
    draft = describe([make_shard(store, tmp_path / "made", b"content")])
    draft = dataclasses.replace(draft, lexical=LexicalPart(words[:1], (words[1:],)))
    path = manifest.lexical_path("i", words[at])
    content = store.read_bytes(path)
    store.delete(path)
    with pytest.raises(ManifestError, match=f"1 of 5 files missing .*{path}"):
        manifest.publish(store, draft)
    store.write_bytes(path, content)
    version = manifest.publish(store, draft)
    assert manifest.verify(store, version).problems == []
    store.write_bytes(path, content.upper())
    assert [problem.path for problem in manifest.verify(store, version).problems] == [path]


def test_versions_in_an_object_store_are_read_several_at_once(store: Store, entry: ShardEntry, monkeypatch):
    for _ in range(4):
        manifest.publish(store, describe([entry], parent=manifest.latest_version(store, "i")))
    store.write_bytes(paths.manifest("i", 2), b"{}")
    store.delete(paths.manifest("i", 1))
    at_once, read_version = threading.Barrier(1 if store.is_local else 4), manifest.read_version

    def read_at_once(*own: Any) -> Manifest:
        at_once.wait(30)
        return read_version(*own)

    monkeypatch.setattr(manifest, "read_version", read_at_once)
    versions = manifest.read_versions(store, "i", range(1, 5))
    assert list(versions.manifests) == [3, 4] and list(versions.problems) == [2]


def test_missing_versions_name_the_command_or_what_there_is(store: Store, entry: ShardEntry):
    with pytest.raises(MissingInputError, match="mvr-ray index CONFIG"):
        manifest.read(store, "i")
    manifest.publish(store, describe([entry]))
    with pytest.raises(MissingInputError, match=r"no version 7 .* there are 1"):
        manifest.read(store, "i", 7)
    with pytest.raises(MissingInputError, match=r"no version '1' .* there are 1"):
        manifest.read(store, "i", "1")


def test_a_manifest_whose_files_are_not_there_is_not_published(store: Store, entry: ShardEntry):
    store.delete(f"{paths.shard_dir('i', entry.digest)}/index.bin")
    with pytest.raises(ManifestError, match=r"1 of 2 files missing .*index\.bin"):
        manifest.publish(store, describe([entry]))
    assert manifest.list_versions(store, "i") == []


def test_numbers_that_are_not_finite_are_refused(store: Store, entry: ShardEntry):
    with pytest.raises(ManifestError, match="finite"):
        manifest.publish(store, dataclasses.replace(describe([entry]), recall=float("nan")))


@pytest.mark.chaos("many publishers at once", "exactly one wins, the others raise")
def test_of_many_publishers_exactly_one_wins_and_the_others_raise(store: Store, entry: ShardEntry, record_property):
    start = threading.Barrier(6)

    def publish(number: int) -> Manifest | None:
        start.wait()
        try:
            return manifest.publish(store, dataclasses.replace(describe([entry]), config_digest=str(number)))
        except PublishConflictError:
            return None

    with ThreadPoolExecutor(6) as pool:
        winners = [version for version in pool.map(publish, range(6)) if version]
    assert len(winners) == 1
    assert manifest.read(store, "i") == winners[0]
    assert manifest.list_versions(store, "i") == [1]
    record_property("figures", f"6 publishers, {len(winners)} won, {6 - len(winners)} raised a conflict")


def test_a_publisher_with_an_old_parent_raises(store: Store, entry: ShardEntry):
    manifest.publish(store, describe([entry]))
    manifest.publish(store, describe([entry], parent=1))
    for parent in (0, 1, 5):
        with pytest.raises(PublishConflictError, match="version 2 is live"):
            manifest.publish(store, describe([entry], parent=parent))


@pytest.mark.chaos("acknowledgement of publishing lost", "read again, not repeated")
def test_an_error_after_the_manifest_was_created_counts_as_published(
    store: Store, entry: ShardEntry, monkeypatch: pytest.MonkeyPatch, record_property
):
    create_once = Store.create_once
    creations: list[str] = []

    def create_then_fail(self: Store, path: str, data: bytes) -> None:
        creations.append(path)
        create_once(self, path, data)
        raise StorageError("the connection broke")

    monkeypatch.setattr(Store, "create_once", create_then_fail)
    version = manifest.publish(store, describe([entry]))
    assert manifest.read(store, "i") == version
    assert creations == [paths.manifest("i", 1)], "not created twice"
    record_property("figures", f"{len(creations)} creation, 0 repeated, version {version.version} live")


def test_rolling_back_publishes_the_old_content_as_a_new_version(store: Store, tmp_path: Path, entry: ShardEntry):
    first = manifest.publish(store, describe([entry]))
    second = manifest.publish(store, describe([make_shard(store, tmp_path / "s2", b"new")], parent=1))
    third = manifest.rollback(store, "i", 1)
    assert (third.version, third.parent, third.operation) == (3, 2, "rollback")
    assert third.content_digest() == first.content_digest() != second.content_digest()
    assert third.shards == first.shards


def test_collection_removes_what_no_kept_version_names_and_nothing_young(store: Store, tmp_path: Path):
    entries = [make_shard(store, tmp_path / f"s{n}", b"content%d" % n) for n in range(4)]
    for parent in range(3):
        manifest.publish(store, describe([entries[parent], entries[0]], parent=parent))
    orphan = paths.shard_dir("i", entries[3].digest)
    store.write_bytes(f"{paths.staging_dir('i', 'key')}/chunk", b"x")
    assert collect(store, "i", keep=1, grace_s=3600) == []
    removals = collect(store, "i", keep=2, grace_s=0)
    assert removals == [paths.manifest("i", 1), orphan, paths.staging_dir("i", "key")]
    removals = collect(store, "i", keep=1, grace_s=0)
    assert removals == [paths.manifest("i", 2), paths.shard_dir("i", entries[1].digest)]
    live = manifest.read(store, "i")
    assert live.version == 3
    assert manifest.verify(store, live).problems == []


def test_collection_removes_what_killed_processes_left_aside_and_nothing_young(store: Store, tmp_path: Path):
    version = manifest.publish(store, describe([make_shard(store, tmp_path / "s", b"content")]))
    if store.is_local:
        leftovers = [f"training/encoder/.key.{'1f' * 16}.gone", f"indexes/i/versions/.2.json.{'0e' * 16}.tmp"]
        files = [f"{leftovers[0]}/state/file", leftovers[1]]
    else:
        leftovers = files = [".touched/corpora/corpus/versions/digest.json"]
    others = ["training/encoder/key/state", ".own.tmp"]
    for file in [*files, *others]:
        store.write_bytes(file, b"x")
    assert collect(store, "i", keep=1, grace_s=3600) == []
    assert sorted(collect(store, "i", keep=1, grace_s=0)) == sorted(leftovers)
    assert [store.exists(path) for path in [*leftovers, *others]] == [False] * len(leftovers) + [True] * 2
    assert manifest.verify(store, version).problems == []


@pytest.mark.chaos(
    "clock leaps ten days while a version is published, and old work is collected",
    "the version that was live is live again and whole; the same command then publishes",
)
def test_a_leap_of_the_clock_while_publishing_leaves_a_whole_live_version(
    store, tmp_path, monkeypatch, record_property
):
    first = manifest.publish(store, describe([make_shard(store, tmp_path / "old", b"old")]))
    entry = make_shard(store, tmp_path / "new", b"new")
    create, clock = Store.create_once, time.time
    leaps = [10 * 86_400]

    def late(self, path, data):
        if leaps:
            by = leaps.pop()
            monkeypatch.setattr(time, "time", lambda: clock() + by)
            collect(store, "i", keep=1, grace_s=3600)
        return create(self, path, data)

    monkeypatch.setattr(Store, "create_once", late)
    message = r"version 2 lost \d+ files while it was published .*version 3 has version 1's content again; run the same"
    with pytest.raises(ManifestError, match=message):
        manifest.publish(store, describe([entry], parent=1))
    live = manifest.read(store, "i")
    assert (live.version, live.operation) == (3, manifest.ROLLBACK)
    assert live.content_digest() == first.content_digest()
    assert manifest.verify(store, live).problems == []
    again = manifest.publish(store, describe([make_shard(store, tmp_path / "again", b"new")], parent=3))
    assert manifest.verify(store, again).problems == []
    monkeypatch.setattr(time, "time", lambda: clock() - 10 * 86_400)
    assert collect(store, "i", keep=1, grace_s=3600) == [], "a clock that leaps back makes nothing old"
    message = f"version 2 torn, version {live.version} is version 1 again, version {again.version} is the new one whole"
    record_property("figures", message)


@pytest.mark.chaos(
    "files lost while publishing, and another publisher takes the next number",
    "the error says that the publisher's own version is torn, and that the other one is live",
)
@pytest.mark.parametrize("other", ["publishes", "cannot be followed"])
def test_a_publisher_that_cannot_withdraw_a_torn_version_reports_that_it_is_torn(
    store, tmp_path, monkeypatch, record_property, other
):
    old = make_shard(store, tmp_path / "old", b"old")
    manifest.publish(store, describe([old]))
    entry = make_shard(store, tmp_path / "new", b"new")
    create = Store.create_once

    def tear(self, path, data):
        monkeypatch.setattr(Store, "create_once", create)
        create(self, path, data)
        store.delete_dir(paths.shard_dir("i", entry.digest))
        if other == "publishes":
            third = manifest.publish(store, describe([make_shard(store, tmp_path / "third", b"third")], parent=2))
            assert third.version == 3
        else:
            store.delete_dir(paths.shard_dir("i", old.digest))

    monkeypatch.setattr(Store, "create_once", tear)
    prefix = r"version 2 lost \d+ files while it was published .*; version 1's content was not published after it "
    if other == "publishes":
        message = (
            prefix + r"\(.*version 3 is live.*\); version 3 of another publisher is live\. Never roll back to version 2"
        )
    else:
        message = prefix + r"\(.*\d of \d files missing.*\); it is live, incomplete\. "
    with pytest.raises(ManifestError, match=message) as error:
        manifest.publish(store, describe([entry], parent=1))
    assert not isinstance(error.value, PublishConflictError)
    assert manifest.verify(store, manifest.read(store, "i", 2)).problems
    if other == "publishes":
        assert manifest.verify(store, manifest.read(store, "i")).problems == []
    missing = len(manifest.verify(store, manifest.read(store, "i", 2)).problems)
    record_property("figures", f"{missing} files of version 2 gone, version {manifest.read(store, 'i').version} live")


def test_publishing_to_an_object_store_asks_for_several_shards_at_once(tmp_path: Path, s3_server):
    both = threading.Barrier(2)

    def meet(moment: str, request: str) -> bool:
        """Hold the first copy of a shard's description until that of another shard has begun."""
        if moment == "before" and ".touched/" in request and request.startswith("PUT") and not both.broken:
            both.wait(10)
        return True

    script = s3_server.Script([], [])
    with s3_server.serve(script._replace(on_request=meet)) as root:
        store = Store(root)
        entries = [make_shard(store, tmp_path / f"s{n}", b"content%d" % n, n) for n in range(2)]
        version = manifest.publish(store, describe(entries))
    assert not both.broken and version.version == 1


def test_publishing_copies_nothing_in_an_object_store_that_the_parent_names(tmp_path: Path, s3_server):
    requests: list[str] = []
    script = s3_server.Script([], [])._replace(on_request=lambda moment, request: not requests.append(request))
    with s3_server.serve(script) as root:
        store = Store(root)
        entries = [make_shard(store, tmp_path / f"s{n}", b"content%d" % n, n) for n in range(3)]
        (tmp_path / "words").write_bytes(b"words")
        words = manifest.add_lexical(store, "i", tmp_path / "words")
        draft = dataclasses.replace(describe(entries), lexical=LexicalPart((words,), ((words,),) * 3))
        counts = []
        for parent in range(2):
            requests.clear()
            manifest.publish(store, dataclasses.replace(draft, parent=parent))
            counts.append(sum("/.touched/" in request for request in requests))
    assert counts[0] and not counts[1]
