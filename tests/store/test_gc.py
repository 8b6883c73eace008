"""Collection through lists of names that are of a while ago: what kept versions name stays, whatever a list shows.

A store is built in steps, and its lists are kept after each. Collection of the last state is then shown lists of
earlier moments, each folder's of its own, while files are read as they are now.
"""

import contextlib
import dataclasses
import json
import os
import random
import shutil
from pathlib import Path

import pytest
from drafts import describe, make_shard

from mvr_ray.config import PrepareConfig
from mvr_ray.errors import MvrRayError
from mvr_ray.store import manifest, objects, paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store, StoredFile
from mvr_ray.store.gc import collect, collect_corpus
from mvr_ray.store.prepare import prepare
from mvr_ray.store.questions import read_questions

STEPS, CORPUS = 8, "corpus"


class StoreWithOldLists(Store):
    """A store whose lists of names are those of earlier moments, drawn once for each folder."""

    def __init__(self, root: Path, moments: tuple[Path, ...], seed: int) -> None:
        super().__init__(root)
        self.moments, self.seed = moments, seed

    def moment(self, path: str) -> Store:
        return Store(random.Random(f"{self.seed} {path}").choice(self.moments))

    def stored_files(self, path: str = "") -> list[StoredFile]:
        return self.moment(path).stored_files(path)

    def list(self, path: str) -> list[str]:
        return self.moment(path).list(path)


def make_step(store: Store, number: int, folder: Path) -> None:
    """Prepare other passages with a question set of another name, and publish a version of them."""
    rows = [{"id": name, "title": "", "text": f"of {name}"} for name in ("both", f"p{number}")]
    rows += [{"question": "Who?", "id": f"q{number}", "answers": ["of"], "positive_ids": ["both"]}]
    source = folder / f"set{number}.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sources = [{"path": str(source), "format": "jsonl", "questions": f"set{number}"}]
    cfg = PrepareConfig(corpus=CORPUS, num_shards=2, sources=sources)
    digest = prepare(cfg, store).digest
    shards = [make_shard(store, folder / f"{number}-{shard}", bytes([number * shard]) * 9, shard) for shard in range(2)]
    manifest.publish(store, dataclasses.replace(describe(shards, parent=number), corpus_digest=digest))
    if number == STEPS // 2:
        collect(store, "i", keep=2, grace_s=0)


def require_whole(store: Store, keep: int) -> None:
    for number in range(STEPS - keep + 1, STEPS + 1):
        version = manifest.read(store, "i", number)
        assert manifest.verify(store, version).problems == []
        corpus = Corpus.open(store, CORPUS, version.corpus_digest)
        assert {one.id for one in corpus} == {"both", f"p{number - 1}"}
        [name] = corpus.info.questions
        assert [question.id for question in read_questions(corpus, name)] == [f"q{number - 1}"]
    assert Corpus.open(store, CORPUS).digest == version.corpus_digest


@pytest.fixture(scope="module")
def moments(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The store after each step; the last one is the present."""
    root = tmp_path_factory.mktemp("steps")
    copies = [root / f"after-{number}" for number in range(STEPS)]
    for number, copy in enumerate(copies):
        make_step(Store(root / "store"), number, root)
        shutil.copytree(root / "store", copy)
    return copies


def collect_with(lists: tuple[Path, ...], present: Path, root: Path, keep: int, seed: int) -> list[str]:
    store = StoreWithOldLists(shutil.copytree(present, root), lists, seed)
    removals: list[str] = []
    with contextlib.suppress(MvrRayError):  # a list that is known to be old ends the collection
        removals = collect(store, "i", keep, grace_s=0)
    require_whole(Store(root), keep)
    collect(Store(root), "i", keep, grace_s=0)
    require_whole(Store(root), keep)
    return removals


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_collection_by_lists_of_one_earlier_moment_keeps_what_kept_versions_name(moments, tmp_path, keep):
    removals = [collect_with((old,), moments[-1], tmp_path / f"{n}", keep, n) for n, old in enumerate(moments)]
    assert bool(removals[-1]) == (keep < 5) and not removals[0]


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_collection_by_lists_of_several_moments_keeps_what_kept_versions_name(moments, tmp_path, keep):
    for seed in range(12):
        collect_with(tuple(moments), moments[-1], tmp_path / f"{seed}", keep, seed)


def test_a_version_stays_for_the_grace_time_after_another_one_has_replaced_it(tmp_path: Path):
    """A server may still answer from it, and open its files again."""
    store = Store(tmp_path / "store")
    for number in range(3):
        manifest.publish(store, describe([make_shard(store, tmp_path / f"{number}", b"%d" % number)], parent=number))
    for path in (tmp_path / "store").rglob("*"):
        if path.name != "3.json":  # version 3 is young, and version 2 was live until now
            os.utime(path, (0, 0))
    removals = collect(store, "i", keep=1, grace_s=3600)
    assert manifest.list_versions(store, "i") == [2, 3] and len(removals) == 2
    assert manifest.verify(store, manifest.read(store, "i", 2)).problems == []
    os.utime(tmp_path / "store" / paths.manifest("i", 3), (0, 0))
    collect(store, "i", keep=1, grace_s=3600)
    assert manifest.list_versions(store, "i") == [3]


@pytest.mark.parametrize("bad", [1, 2, 3, 4])
def test_what_an_unreadable_version_may_name_stays_and_the_newest_others_are_kept_beside_it(tmp_path: Path, bad):
    store = Store(tmp_path / "store")
    shards = [make_shard(store, tmp_path / f"{number}", b"%d" % number) for number in range(4)]
    for number, shard in enumerate(shards):
        manifest.publish(store, describe([shard], parent=number))
    store.write_bytes(paths.staged_marker("i", "work"), b"")
    whole = store.read_bytes(paths.manifest("i", bad))
    store.write_bytes(paths.manifest("i", bad), whole[:-9])
    removals = collect(store, "i", keep=1, grace_s=0)
    stays = {bad, 3 if bad == 4 else 4}
    others = [paths.manifest("i", number) for number in range(1, 5) if number not in stays]
    assert removals == [*others, paths.staging_dir("i", "work")]
    store.write_bytes(paths.manifest("i", bad), whole)
    assert manifest.verify(store, manifest.read(store, "i", bad)).problems == []
    collect(store, "i", keep=len(stays), grace_s=0)
    digests = {shards[number - 1].digest for number in stays}
    assert {*store.list(paths.index_dir("i", "shards"))} == digests


def test_young_files_of_updates_cost_a_collection_no_requests(store: Store, tmp_path: Path, monkeypatch):
    calls, counts, num_files = list[str](), list[int](), 0
    make_step(store, 0, tmp_path)
    for name in ("head", "get", "list", "list_with_delimiter"):
        call = getattr(objects.obstore, name)
        monkeypatch.setattr(objects.obstore, name, lambda *own, call=call: (calls.append(str(own[1:])), call(*own))[1])
    for up_to in (20, 200):
        while num_files < up_to:
            num_files += 1
            store.write_bytes(f"{paths.corpus_dir(CORPUS)}/{paths.corpus_changes(0, f'{num_files:016d}')}", b"")
        calls.clear()
        assert collect_corpus(store, CORPUS) == []
        counts.append(len(calls))
    assert counts[0] == counts[1]


class StoreThatCounts(Store):
    """Counts the lists of versions."""

    looks = 0

    def list(self, path: str) -> list[str]:
        self.looks += path == paths.index_dir("i", "versions")
        return super().list(path)


def test_versions_are_looked_up_again_only_for_what_no_kept_version_names(tmp_path: Path):
    looks = []
    for own in (5, 50):
        store = StoreThatCounts(tmp_path / f"{own}")
        shards = [make_shard(store, tmp_path / f"{own}-{number}", b"%d" % number, number) for number in range(own)]
        manifest.publish(store, describe(shards))
        other = make_shard(store, tmp_path / f"{own}-other", b"other")
        store.looks = 0
        removals = collect(store, "i", keep=1, grace_s=0)
        assert removals == [paths.shard_dir("i", other.digest)]
        looks.append(store.looks)
    assert looks[0] == looks[1]


def test_what_is_published_while_a_batch_of_paths_is_deleted_stays(tmp_path: Path, monkeypatch):
    store, delete_dir = Store(tmp_path / "store"), Store.delete_dir
    manifest.publish(store, describe([make_shard(store, tmp_path / "live", b"live")]))
    shards = {one.digest: one for one in (make_shard(store, tmp_path / f"{n}", b"%d" % n) for n in range(4))}
    make_old(tmp_path / "store")

    def publish_others(self: Store, path: str) -> None:
        delete_dir(self, path)
        shards.pop(Path(path).name)
        if len(shards) == 2:
            manifest.publish(self, describe([*shards.values()], parent=1))

    monkeypatch.setattr(Store, "delete_dir", publish_others)
    assert len(collect(store, "i", keep=1, grace_s=3600)) == 2
    assert manifest.verify(store, manifest.read(store, "i", 2)).problems == []


def test_a_collection_reads_each_kept_version_once_and_asks_seven_times_for_a_path_that_it_removes(
    tmp_path: Path, monkeypatch, s3_server
):
    monkeypatch.setenv("MVR_RAY_CACHE", str(tmp_path / "cache"))
    local, num_kept, num_paths = Store(tmp_path / "store"), 20, 40
    for number in range(num_kept + 4):  # step 4 removes three versions
        make_step(local, number, tmp_path)
    for number in range(num_paths):
        make_shard(local, tmp_path / f"unnamed-{number}", b"unnamed", number)
    calls = list[str]()
    with s3_server.serve() as root:
        store = Store(root)
        for file in (tmp_path / "store").rglob("*"):
            if file.is_file():
                store.write_bytes(file.relative_to(tmp_path / "store").as_posix(), file.read_bytes())
        for name in ("head", "get", "put", "list", "list_with_delimiter", "delete", "copy"):
            call = getattr(objects.obstore, name)
            count = lambda *own, call=call, name=name: (calls.append(f"{name} {own[1]}"), call(*own))[1]  # noqa: E731
            monkeypatch.setattr(objects.obstore, name, count)
        assert len(removals := collect(store, "i", num_kept, grace_s=0)) >= num_paths
    reads = [call for call in calls if call.startswith("get") and "/versions/" in call and "indexes/" in call]
    assert len(reads) == len({*reads}) == num_kept + 1
    assert len(calls) < 10 * num_kept + 7 * len(removals), "each corpus here has a question set of its own"


def test_what_was_left_aside_in_runs_is_looked_for_only_where_they_are_not_skipped(tmp_path: Path, monkeypatch):
    store, scans, scandir = Store(tmp_path / "store"), list[str](), os.scandir
    manifest.publish(store, describe([make_shard(store, tmp_path / "live", b"live")]))
    for number in range(300):
        (tmp_path / "store" / paths.run_dir(f"{number}", "index")).mkdir(parents=True)
    leftovers = [f"{folder}/.report.json.{'0e' * 16}.tmp" for folder in ("models", paths.run_dir("7", "index"))]
    for path in leftovers:
        store.write_bytes(path, b"x")
    monkeypatch.setattr(os, "scandir", lambda path: (scans.append(str(path)), scandir(path))[1])
    assert collect(store, "i", keep=1, grace_s=0, skips_runs=True) == leftovers[:1] and len(scans) < 100
    assert collect(store, "i", keep=1, grace_s=0) == leftovers[1:] and len(scans) > 300


def test_versions_that_a_list_lacks_are_found_by_name(tmp_path: Path):
    class StoreThatForgets(Store):
        def list(self, path: str) -> list[str]:
            return [name for name in super().list(path) if name not in missing_names]

    store, missing_names = StoreThatForgets(tmp_path / "store"), []
    for parent in range(5):
        manifest.publish(store, describe([make_shard(store, tmp_path / f"{parent}", b"shard")], parent=parent))
    for numbers in ([], [1], [1, 2], [3], [2, 4], [5], [4, 5], [1, 3, 5]):
        missing_names = [f"{number}.json" for number in numbers]
        assert manifest.find_versions(store, "i") == [1, 2, 3, 4, 5]


def make_old(root: Path) -> None:
    for path in root.rglob("*"):
        os.utime(path, (0, 0))


def test_publishing_and_adding_again_renew_the_age_of_what_a_version_names_and_its_parent_does_not(tmp_path: Path):
    store, words = Store(tmp_path / "store"), tmp_path / "words"
    make_step(store, 0, tmp_path)
    words.write_bytes(b"words")
    entry = manifest.add_lexical(store, "i", words)
    lexical = manifest.LexicalPart((entry,), ((entry,),) * 2)
    (tmp_path / "queries").write_bytes(b"queries")
    queries = {"known": manifest.add_refined_queries(store, "i", tmp_path / "queries")}
    first = manifest.read(store, "i")
    other = make_shard(store, tmp_path / "other", b"other")
    manifest.publish(store, dataclasses.replace(first, parent=1, shards=(other,)))
    make_old(tmp_path / "store")
    version = manifest.publish(store, dataclasses.replace(first, parent=2, lexical=lexical, refined_queries=queries))
    named_paths = [*manifest.named_paths(version), paths.corpus_version(CORPUS, version.corpus_digest)]
    assert len(named_paths) == 5 and all(store.age_s(path) < 3600 for path in named_paths)
    make_old(tmp_path / "store")
    manifest.publish(store, dataclasses.replace(version, parent=3))
    assert all(store.age_s(path) > 3600 for path in manifest.named_paths(version))
    words.write_bytes(b"words")
    manifest.add_lexical(store, "i", words)
    assert store.age_s(manifest.lexical_path("i", entry)) < 3600


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_collection_during_a_publication_keeps_the_old_files_that_it_shares_with_its_parent_or_an_earlier_version(
    tmp_path: Path, monkeypatch, is_readable
):
    store, create = Store(tmp_path / "store"), Store.create_once
    shards = [make_shard(store, tmp_path / f"{number}", b"%d" % number) for number in range(3)]
    for number, shard in enumerate(shards):
        manifest.publish(store, describe([shard], parent=number))
    collect(store, "i", keep=2, grace_s=0)
    new = make_shard(store, tmp_path / "new", b"new", 3)
    make_old(tmp_path / "store")
    if not is_readable:
        store.write_bytes(paths.manifest("i", 3), b"damaged")

    def collect_first(self: Store, path: str, data: bytes) -> None:
        collect(Store(self.root), "i", keep=1, grace_s=3600)
        create(self, path, data)

    monkeypatch.setattr(Store, "create_once", collect_first)
    version = manifest.publish(store, describe([shards[2], shards[1], new], parent=3))
    assert manifest.verify(store, version).problems == []


def test_a_shard_is_no_older_than_its_description_though_the_list_of_its_files_may_be(tmp_path: Path):
    """As in an object store that does not show yet that a publisher renewed the folder's age."""

    class StoreWithOldFolders(Store):
        def age_s(self, path: str) -> float:
            return 1e6 if path == folder else super().age_s(path)

    store = StoreWithOldFolders(tmp_path / "store")
    manifest.publish(store, describe([make_shard(store, tmp_path / "live", b"live")]))
    folder = paths.shard_dir("i", make_shard(store, tmp_path / "new", b"new").digest)
    assert collect(store, "i", keep=1, grace_s=3600) == []
    store.delete(f"{folder}/{paths.SHARD_JSON}")
    assert collect(store, "i", keep=1, grace_s=3600) == [folder]
