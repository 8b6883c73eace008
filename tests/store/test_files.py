"""Laws of files at rest: whole or absent, created once; errors say in full why they cannot be written."""

import errno
import hashlib
import os
import pickle
import random
import resource
import shutil
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import count
from pathlib import Path, PosixPath
from types import SimpleNamespace
from typing import Any

import pytest
from file_size_limit import file_size_limit
from ray._private.runtime_env.working_dir import WorkingDirPlugin

from mvr_ray.cli import main
from mvr_ray.cli.inputs import check_inputs
from mvr_ray.config import RunConfig
from mvr_ray.errors import ConfigError, MissingInputError, PublishConflictError, StorageError
from mvr_ray.store import files as files_module
from mvr_ray.store import local_files, objects
from mvr_ray.store.files import Store
from mvr_ray.store.local_files import cached_sha256_of, finished_file, sha256_of


def test_what_is_written_is_read_back_and_replaced_whole(store: Store):
    for data in (b"", b"first", b"second" * 100_000):
        store.write_bytes("a/b/file.bin", data)
        assert store.read_bytes("a/b/file.bin") == data
        assert store.size_bytes("a/b/file.bin") == len(data)
        assert store.local_path("a/b/file.bin").read_bytes() == data
    assert store.list("a/b") == ["file.bin"]


def test_what_is_missing_is_named(store: Store):
    for ask in (store.read_bytes, store.sha256):
        with pytest.raises(MissingInputError, match="nowhere/file"):
            ask("nowhere/file")
    assert store.list("nowhere") == []
    assert store.size_bytes("nowhere/file") == -1
    assert not store.exists("nowhere")
    store.delete("nowhere/file")
    store.delete_dir("nowhere")


@pytest.mark.parametrize(("at", "remaining"), [(1, ["file"]), (2, [])])
@pytest.mark.parametrize("kind", ["bytes", "file"])
def test_a_write_survives_that_another_process_deletes_the_folder(
    tmp_path: Path, monkeypatch, kind: str, at: int, remaining: list[str]
):
    """Of two equal commands the faster one deletes the unfinished work of both: here at a sync, of the new file or of
    its folder."""
    store, source, sync, syncs = Store(tmp_path), tmp_path / "source", os.fsync, []
    store.write_bytes("work/other", b"x")
    source.write_bytes(b"new")

    def delete_and_sync(handle: int) -> None:
        syncs.append(handle)
        if len(syncs) == at:
            shutil.rmtree(tmp_path / "work")
        sync(handle)

    monkeypatch.setattr(os, "fsync", delete_and_sync)
    store.write_bytes("work/file", b"new") if kind == "bytes" else store.put_file(source, "work/file")
    assert store.list("work") == remaining


def test_a_store_survives_the_way_to_another_process(store: Store):
    store.write_bytes("a/file", b"x")
    assert pickle.loads(pickle.dumps(store)).read_bytes("a/file") == b"x"


def test_a_job_refuses_a_store_and_files_that_ray_would_delete_with_its_copy(tmp_path: Path, monkeypatch, capsys):
    plugin = WorkingDirPlugin(str(tmp_path), None)
    folder = Path(plugin._resources_dir, "_ray_pkg_1")
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(ConfigError, match=r"^mine \(store\.path or follow\.source\) would be lost.* s3://"):
        Store("mine")
    with pytest.raises(ConfigError, match=r"retrieve: output=ranks\.tsv would be lost.* full path$"):
        check_inputs("retrieve", RunConfig(), {"output": "ranks.tsv", "questions": "asked"})
    store = Store(tmp_path / "mine")
    run_file = tmp_path / "run.yaml"
    run_file.write_text(f"store: {{path: {store.address}}}")
    for words in (
        ["explain", run_file, "why?", "--html", "a.html"],
        ["export", run_file, "model"],
        ["passages", run_file, "output=a.jsonl"],
        ["study", run_file, "output=reports"],
        ["vectors", run_file, "output=a.parquet"],
    ):
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        assert end.value.code == 2 and "would be lost" in capsys.readouterr().err
    store.write_bytes("a", b"1")
    monkeypatch.chdir(tmp_path)
    assert Store("mine").read_bytes("a") == b"1"


def test_of_many_creators_at_once_exactly_one_wins_and_its_bytes_stay(store: Store):
    start = threading.Barrier(6)

    def create(number: int) -> bytes | None:
        start.wait()
        try:
            store.create_once("v/1.json", b"%d" % number)
        except (FileExistsError, PublishConflictError):
            return None
        return b"%d" % number

    with ThreadPoolExecutor(6) as pool:
        winners = [data for data in pool.map(create, range(6)) if data is not None]
    assert len(winners) == 1
    assert store.read_bytes("v/1.json") == winners[0]
    assert store.list("v") == ["1.json"]


def test_of_many_processes_exactly_one_creates(tmp_path: Path):
    program = (
        "import sys\nfrom mvr_ray.store.files import Store\nsys.stdin.readline()\n"
        "try:\n Store(sys.argv[1]).create_once('v/1', sys.argv[2].encode())\n print('won')\n"
        "except FileExistsError:\n print('lost')\n"
    )
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", program, tmp_path, str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    outputs = [worker.communicate()[0].strip() for worker in workers]
    assert sorted(outputs) == ["lost", "lost", "lost", "won"]
    assert Store(tmp_path).read_bytes("v/1") == str(outputs.index("won")).encode()


class WholeSecondsPath(PosixPath):
    """A file on a system that keeps whole seconds of the time when an inode changed; others keep ticks of a clock."""

    def stat(self, **options: Any) -> Any:
        stat = super().stat(**options)
        names = ("st_dev", "st_ino", "st_mode", "st_size", "st_mtime_ns")
        return SimpleNamespace(**{name: getattr(stat, name) for name in names}, st_ctime_ns=int(stat.st_ctime) * 10**9)


@pytest.mark.parametrize("kind", [Path, WholeSecondsPath])
def test_a_restored_file_on_the_inode_of_a_damaged_one_is_whole(tmp_path: Path, kind: type[Path], monkeypatch):
    path, store, digest = kind(tmp_path / "codes.npy"), Store(tmp_path), hashlib.sha256(b"1").hexdigest()
    for content in (b"2", b"1"):
        with path.open("wb") as file:
            file.write(content)
        os.utime(path, ns=(10**18, 10**18))
        assert store.is_whole(path, "codes.npy", 1, digest) == (content == b"1")
    path.chmod(0o400)
    monkeypatch.setattr(files_module, "sha256_of", lambda path: pytest.fail("read again"))
    monkeypatch.setattr(local_files, "sha256_of", lambda path: pytest.fail("read again"))
    assert store.is_whole(path, "codes.npy", 1, digest)


def test_a_creation_whose_reply_was_lost_is_its_own_and_one_whose_file_was_deleted_since_is_not(tmp_path, monkeypatch):
    store, link = Store(tmp_path), os.link

    def lose_reply(source, target):
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", lose_reply)
    store.create_once("own", b"1")
    assert store.read_bytes("own") == b"1"

    def find_file(source, target):
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", find_file)
    with pytest.raises(FileExistsError):
        store.create_once("gone", b"1")
    assert not store.exists("gone")


def test_without_hard_links_creation_is_still_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_links(source: object, target: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", no_links)
    store = Store(tmp_path)
    store.create_once("v/1", b"first")
    with pytest.raises(FileExistsError):
        store.create_once("v/1", b"second")
    assert store.read_bytes("v/1") == b"first"
    monkeypatch.setattr(local_files, "CLAIM_PAUSE_S", 0.0)
    (tmp_path / "v" / ".2.claim").touch()
    with pytest.raises(StorageError, match=r"delete that file, and run the same command again"):  # of a killed process
        store.create_once("v/2", b"x")


def test_a_finished_folder_arrives_whole_once_and_its_source_is_gone(store: Store, tmp_path: Path):
    for attempt in range(2):
        source = tmp_path / "made"
        (source / "deep").mkdir(parents=True)
        (source / "deep" / "x.bin").write_bytes(b"content")
        (source / "about.json").write_bytes(b"{}")
        assert store.upload_dir(source, "shards/abc") == (attempt == 0)
        assert not source.exists()
    folder = store.local_path("shards/abc")
    assert (folder / "deep" / "x.bin").read_bytes() == b"content"
    assert store.list("shards/abc") == ["about.json", "deep"]
    store.delete_dir("shards/abc")
    assert store.list("shards") == []


def test_whoever_can_read_a_folder_of_the_store_can_read_its_files(tmp_path: Path):
    store = Store(tmp_path / "store")
    for name, mode in (("open", 0o755), ("closed", 0o700)):
        source = tmp_path / "source"
        source.mkdir()
        store.write_bytes(f"{name}/x", b"")
        (tmp_path / "store" / name).chmod(mode)
        for file in (source / "x.bin", tmp_path / "y.bin"):
            file.touch(0o600)  # as safetensors makes it
        store.upload_dir(source, f"{name}/model")
        store.put_file(tmp_path / "y.bin", f"{name}/y.bin")
        for path in ("model/x.bin", "y.bin"):
            assert store.local_path(f"{name}/{path}").stat().st_mode & 0o777 == mode & 0o444


def test_an_upload_that_was_killed_before_its_last_file_is_completed(store: Store, tmp_path: Path):
    if store.is_local:
        return  # a folder is renamed into place
    store.write_bytes("models/abc/deep/x.bin", b"con")
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "x.bin").write_bytes(b"content")
    (source / "other.json").write_bytes(b"{}")
    assert store.upload_dir(source, "models/abc", {"about.json": b"{}"})
    assert store.list("models/abc") == ["about.json", "deep", "other.json"]
    assert store.read_bytes("models/abc/deep/x.bin") == b"content"


def test_a_file_that_cannot_be_read_is_an_error_of_the_store(tmp_path: Path, monkeypatch):
    store = Store(tmp_path)
    store.write_bytes("x.bin", b"content")

    def fail(path: Path, expected: str) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files_module, "cached_sha256_of", fail)
    with pytest.raises(StorageError, match=r"cannot read .*x\.bin: Input/output error"):
        store.is_whole(tmp_path / "x.bin", "x.bin", 7, "0" * 64)


def test_a_moved_folder_is_whole_at_its_new_name_and_gone_at_the_old(store: Store):
    for name in ("x.bin", "deep/y.bin", "about.json"):
        store.write_bytes(f"shards/abc/{name}", name.encode())
    store.move_dir("shards/abc", "aside/abc-1")
    assert store.list("shards") == [] and store.list("aside/abc-1") == ["about.json", "deep", "x.bin"]
    assert store.read_bytes("aside/abc-1/deep/y.bin") == b"deep/y.bin"


def test_a_file_too_large_for_one_copy_moves_in_parts_and_gets_a_new_age(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("mvr_ray.store.objects.MAX_COPY_BYTES", 1 << 20)
    monkeypatch.setattr("mvr_ray.store.objects.obstore.copy", None)
    data = random.Random(1).randbytes(19 << 20)
    (tmp_path / "large").write_bytes(data)
    store.put_file(tmp_path / "large", "shards/abc/large")
    store.touch("shards/abc/large")
    assert store.read_bytes("shards/abc/large") == data
    store.move_dir("shards/abc", "aside/abc-1")
    assert store.read_bytes("aside/abc-1/large") == data
    assert store.size_bytes("shards/abc/large") == -1


def test_the_pieces_of_a_large_object_are_fetched_side_by_side(store: Store, tmp_path: Path, monkeypatch):
    if store.is_local:
        return
    data, at_once, get = random.Random(1).randbytes(7 << 20), threading.Barrier(4), objects.obstore.get

    def get_at_once(*arguments, **options):
        at_once.wait(30)
        return get(*arguments, **options)

    store.write_bytes("large", data)
    with monkeypatch.context() as patch:
        patch.setattr(objects, "PIECE_BYTES", 2 << 20)
        patch.setattr(objects.obstore, "get", get_at_once)
        assert store.local_path("large").read_bytes() == data


def test_an_object_that_is_replaced_while_its_pieces_are_fetched_is_no_mixture(store: Store, monkeypatch):
    old, new = (random.Random(seed).randbytes(7 << 20) for seed in (1, 2))
    get, num_calls = objects.obstore.get, count()

    def replace_and_get(*arguments, **options):
        if next(num_calls) == 1:
            store.write_bytes("large", new)
        return get(*arguments, **options)

    store.write_bytes("large", old)
    monkeypatch.setattr(objects, "PIECE_BYTES", 2 << 20)
    monkeypatch.setattr(objects.obstore, "get", replace_and_get)
    assert store.local_path("large").read_bytes() == (old if store.is_local else new)


def test_an_object_may_take_longer_to_arrive_than_the_service_may_be_silent(s3_server, tmp_path: Path, monkeypatch):
    """3.2 s, in pieces with pauses of 0.1 s, where 3 s of silence are too much."""
    limits = {name: "3s" if value == "60s" else value for name, value in objects.CLIENT.items()}
    monkeypatch.setattr(objects, "CLIENT", limits)
    monkeypatch.setattr(objects, "RETRY", {**objects.RETRY, "retry_timeout": timedelta(seconds=0.5)})
    monkeypatch.setattr(s3_server, "PIECE_BYTES", 1 << 17)
    monkeypatch.setenv("MVR_RAY_CACHE", str(tmp_path / "cache"))
    with s3_server.serve(s3_server.Script([], [], pause_s=0.1)) as root, ThreadPoolExecutor(2) as pool:
        store = Store(root)
        store.write_bytes("large", bytes(32 * s3_server.PIECE_BYTES))
        digest = pool.submit(store.sha256, "large")
        local = store.local_path("large")
        assert sha256_of(local) == digest.result() == hashlib.sha256(bytes(32 * s3_server.PIECE_BYTES)).hexdigest()


def test_a_file_moves_in_and_a_changed_one_is_seen_through_the_cache(store: Store, tmp_path: Path):
    for content in (b"one", b"two"):
        source = tmp_path / "file"
        source.write_bytes(content)
        store.put_file(source, "a/file")
        assert not source.exists()
        assert store.local_path("a/file").read_bytes() == content


def test_a_damaged_copy_in_the_cache_stays_until_it_is_fetched_again_as_others_may_read_it(store: Store, monkeypatch):
    store.write_bytes("a/file", b"whole")
    local = store.local_path("a/file")
    local.write_bytes(b"wrong")
    fetch, was_there = Store.local_path, []

    def local_path(own: Store, path: str) -> Path:
        was_there.append(local.is_file())
        return fetch(own, path)

    monkeypatch.setattr(Store, "local_path", local_path)
    assert store.is_whole(local, "a/file", 5, hashlib.sha256(b"whole").hexdigest()) == (not store.is_local)
    assert was_there == [True] * (not store.is_local)


def test_a_folder_that_several_delete_at_once_is_deleted_without_an_error(tmp_path: Path):
    """As when two commands end the same work."""
    store, start = Store(tmp_path), threading.Barrier(4)

    def delete(path: str) -> None:
        start.wait()
        store.delete_dir(path)

    with ThreadPoolExecutor(4) as pool:
        for number in range(100):
            store.write_bytes(f"work-{number}/file", b"")
            list(pool.map(delete, [f"work-{number}"] * 4))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_deleted_meanwhile_has_an_age_and_a_list(tmp_path: Path):
    """As when collection meets a command that ends, and deletes its unfinished work."""
    store, is_over = Store(tmp_path), threading.Event()

    def make_and_delete() -> None:
        while not is_over.is_set():
            for number in range(40):
                (tmp_path / f"work/{number % 4}").mkdir(parents=True, exist_ok=True)
                (tmp_path / f"work/{number % 4}/{number}").touch()
            shutil.rmtree(tmp_path / "work")

    with ThreadPoolExecutor(1) as pool:
        deletions = pool.submit(make_and_delete)
        try:
            for _ in range(1000):
                assert store.age_s("work") < 60 and set(store.list("work")) <= set("0123")
        finally:
            is_over.set()
        deletions.result()


def test_scratch_is_gone_after_success_and_failure(store: Store):
    with store.scratch() as folder:
        (folder / "x").write_bytes(b"x")
    assert not folder.exists()
    with pytest.raises(KeyboardInterrupt), store.scratch() as folder:
        raise KeyboardInterrupt
    assert not folder.exists()


def test_keys_in_a_stores_address_are_never_shown():
    store = Store("s3://key:secret@bucket/some/prefix?region=eu-west-1&scheme=http")
    assert "secret" not in f"{store!r} {store.where('a/b')}"
    assert store.where("a/b") == "s3://bucket/some/prefix/a/b"


def test_paths_outside_the_store_are_refused(store: Store):
    for path in ("", "/etc/passwd", "../x", "a/../../x"):
        with pytest.raises(AssertionError):
            store.write_bytes(path, b"")


def test_a_full_disk_is_reported_and_the_old_file_stays(tiny_disk: Path | None, tmp_path: Path):
    if tiny_disk is None:  # not allowed to mount here: a limit on file size gives the same kind of error
        _check_file_size_limit(tmp_path)
        return
    store = Store(tiny_disk)
    store.write_bytes("a/file", b"old")
    with pytest.raises(StorageError, match=r"No space left on device.*bytes to write.*free space and run") as error:
        store.write_bytes("a/file", b"x" * 1_000_000)
    assert error.value.__cause__.errno == errno.ENOSPC
    assert store.read_bytes("a/file") == b"old"
    assert [path.name for path in (tiny_disk / "a").iterdir()] == ["file"]


def test_a_limit_on_file_size_is_reported_and_the_old_file_stays(tmp_path: Path):
    _check_file_size_limit(tmp_path)


def test_a_disk_that_is_full_during_unfinished_work_is_reported_and_other_errors_pass(tmp_path: Path):
    message = r"^cannot write in .*/\.scratch: (File too large|.*os error 28\)) \(\d+ bytes free\); free space and run"
    store = Store(tmp_path)
    with pytest.raises(StorageError, match=message), store.scratch() as folder, file_size_limit(10):
        (folder / "file").write_bytes(b"x" * 100)
    with pytest.raises(StorageError, match=message), store.scratch():
        raise RuntimeError("I/O error: No space left on device (os error 28)")
    with pytest.raises(PermissionError, match=r"^no access$"), store.scratch():
        raise PermissionError("no access")


def _check_file_size_limit(folder: Path) -> None:
    store = Store(folder)
    store.write_bytes("a/file", b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StorageError, match="File too large"):
            store.write_bytes("a/file", b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert store.read_bytes("a/file") == b"old"


@pytest.mark.parametrize("put", ["write_bytes", "create_once", "put_file", "upload_dir"])
def test_the_names_of_all_new_folders_are_synced_before_a_write_returns(tmp_path, monkeypatch, put):
    synced_paths: list[Path] = []
    fsync = os.fsync

    def record(handle: int) -> None:
        fsync(handle)
        synced_paths.append(Path(f"/proc/self/fd/{handle}").readlink())

    monkeypatch.setattr(os, "fsync", record)
    root, source = tmp_path / "new" / "store", tmp_path / "made"
    if put == "upload_dir":
        source.mkdir()
        (source / "file").write_bytes(b"x")
    else:
        source.write_bytes(b"x")
    getattr(Store(str(root)), put)(*((source, "a/b/c") if put in ("put_file", "upload_dir") else ("a/b/c", b"x")))
    assert {tmp_path, tmp_path / "new", root, root / "a", root / "a" / "b"} <= set(synced_paths)


def test_a_name_is_synced_once_a_process_and_again_when_its_folder_is_another(tmp_path: Path, monkeypatch):
    """Another process may have made the other folder, and been killed before it synced the name."""
    synced_paths: list[Path] = []
    monkeypatch.setattr(files_module, "sync_folder", synced_paths.append)
    monkeypatch.setattr(local_files, "sync_folder", synced_paths.append)
    Store(tmp_path / "store").write_bytes("a/b/one", b"x")
    assert {tmp_path, tmp_path / "store", tmp_path / "store" / "a"} <= {*synced_paths}
    synced_paths.clear()
    Store(tmp_path / "store").write_bytes("a/b/two", b"x")
    assert synced_paths == [tmp_path / "store" / "a" / "b"]
    (tmp_path / "store" / "a" / "b").rename(tmp_path / "store" / "a" / "c")
    (tmp_path / "store" / "a" / "b").mkdir()
    synced_paths.clear()
    Store(tmp_path / "store").write_bytes("a/b/three", b"x")
    assert synced_paths == [tmp_path / "store" / "a", tmp_path / "store" / "a" / "b"]


def test_a_file_is_read_once_a_process_under_any_name_and_again_when_it_has_changed(tmp_path: Path, monkeypatch):
    path, link, read = tmp_path / "file", tmp_path / "link", []
    sha256_of = local_files.sha256_of
    monkeypatch.setattr(local_files, "sha256_of", lambda path: (read.append(path), sha256_of(path))[1])
    monkeypatch.setattr(local_files, "SETTLED_NS", 3600 * 10**9)  # which no pause of this test outlasts
    path.write_bytes(b"first")
    for _ in range(2):
        assert cached_sha256_of(path) == sha256_of(path)
    assert len(read) == 2, "what changed a moment ago may change again within one tick of its time"
    os.utime(path, (1, 1))
    os.link(path, link)
    for name in (path, link, path):
        assert cached_sha256_of(name) == sha256_of(path)
    assert len(read) == 3
    path.write_bytes(b"other")  # of the same size
    assert cached_sha256_of(link) == sha256_of(path)
    assert len(read) == 4


def test_a_root_where_no_folder_can_be_made_is_an_error_of_the_store():
    with pytest.raises(StorageError, match=r"cannot write /proc/x/a: no folder can be made there; check the path"):
        Store("/proc/x").write_bytes("a", b"x")


def test_a_pipe_is_written_and_no_file_takes_its_place(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with finished_file(pipe) as path:
        path.write_text("rows")
    assert os.read(reader, 10) == b"rows" and pipe.is_fifo()
    os.close(reader)


def test_a_folder_of_no_user_is_refused_in_words():
    with pytest.raises(ConfigError, match=r"^~no such user/x: there is no user of this name"):
        Store("~no such user/x")


def test_an_address_of_a_file_is_a_folder_of_this_machine(tmp_path: Path):
    for address in (f"file://{tmp_path}/a%20b", f"file://localhost{tmp_path}/a%20b"):
        assert Store(address).address == str(tmp_path / "a b")
    for address in ("file://other/x", "file://x", "file://"):
        with pytest.raises(ConfigError, match=r"^file://.* names no folder of this machine; write file:///FOLDER"):
            Store(address)


def test_the_digest_of_a_file_that_is_asked_for_again_and_again_outlasts_those_of_many_others(tmp_path, monkeypatch):
    monkeypatch.setattr(local_files, "MAX_DIGESTS", 4)
    monkeypatch.setattr(local_files, "_DIGESTS", local_files.OrderedDict())
    reads: list[str] = []
    monkeypatch.setattr(local_files, "sha256_of", lambda path: (reads.append(path.name), sha256_of(path))[1])
    for number in range(20):
        for name in ("asked", f"{number}"):
            (tmp_path / name).write_bytes(b"content")
            os.utime(tmp_path / name, (1, 1))
            cached_sha256_of(tmp_path / name)
    assert reads.count("asked") == 1 and len(reads) == 21


def test_the_first_bytes_of_a_file_are_all_there_are_of_a_short_one(store: Store):
    store.write_bytes("file", b"0123456789")
    assert [store.read_bytes("file", size) for size in (1, 4, 10, 1 << 16)] == [b"0", b"0123", *[b"0123456789"] * 2]


@pytest.mark.parametrize("store", ["folder", "s3"], indirect=True)
def test_the_first_bytes_of_a_large_file_are_read_alone(store: Store):
    store.write_bytes("large", bytes(1 << 22))
    tracemalloc.start()
    first_bytes = store.read_bytes("large", 10)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert first_bytes == bytes(10)
    assert peak_bytes < 1 << 20
