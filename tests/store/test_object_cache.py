"""Copies of objects on a disk that is short of space: unused ones go, the longest unused first, and come again."""

import errno
import hashlib
import os
import shutil
import time
from collections import namedtuple
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pytest

from mvr_ray.errors import ConfigError, DigestError, StorageError
from mvr_ray.store import object_cache
from mvr_ray.store.files import Store

Usage = namedtuple("Usage", "total used free")
pytestmark = pytest.mark.parametrize("store", ["s3", "s3 of others"], indirect=True)
HOUR_S = 3600.0
SIZE = 1000


@pytest.fixture
def copies(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Copies of four objects, used one to four hours ago; another program's file beside them."""
    monkeypatch.setattr(object_cache, "_next_walk_s", 0.0)
    files = {}
    for hours in (3, 1.1, 4, 2):
        name = f"shards/{hours}"
        store.write_bytes(name, str(hours).encode() * SIZE)
        time.sleep(0.01)
        files[name] = store.local_path(name)
        os.utime(files[name], (time.time() - hours * HOUR_S, 0))
    (tmp_path / "cache" / "of another program").write_text("old")
    os.utime(tmp_path / "cache" / "of another program", (0, 0))
    return files


def free_space(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    """Give the disk so many bytes beyond those that stay free."""
    total = 100 * SIZE
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(total, 0, total // 10 + num_bytes))


ROOM = {SIZE: "4 3 2 1.1", SIZE - 1: "3 2 1.1", -SIZE: "2 1.1", -9 * SIZE: ""}
"""The copies that stay, by the space."""


@pytest.mark.parametrize(("free", "names"), ROOM.items())
def test_as_many_go_as_the_next_copy_needs_the_longest_unused_first(copies, tmp_path, monkeypatch, free, names):
    free_space(monkeypatch, free)
    object_cache.make_room(SIZE)
    there = [name.removeprefix("shards/") for name, file in copies.items() if file.exists()]
    assert sorted(there, key=float, reverse=True) == names.split()
    assert (tmp_path / "cache" / "of another program").exists()


@pytest.mark.parametrize(("free", "names"), [(SIZE, "40 30 20 5"), (SIZE - 1, "30 20 5"), (-9 * SIZE, "5")])
def test_of_the_copies_of_the_last_hour_as_many_go_as_the_next_one_needs_on_a_full_disk(
    store, tmp_path, monkeypatch, free, names
):
    """Also right after a walk that made too little room."""
    monkeypatch.setattr(object_cache, "_next_walk_s", time.monotonic() + HOUR_S)
    files = {}
    for minutes in (20, 5, 40, 30):
        store.write_bytes(f"shards/{minutes}", bytes(SIZE))
        files[minutes] = store.local_path(f"shards/{minutes}")
        os.utime(files[minutes], (time.time() - minutes * 60, 0))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(100 * SIZE, 0, free))
    object_cache.make_room(SIZE)
    assert [minutes for minutes in sorted(files, reverse=True) if files[minutes].exists()] == [*map(int, names.split())]


def test_a_copy_that_was_asked_for_lately_stays_and_a_deleted_one_is_fetched_again(store, copies, monkeypatch):
    monkeypatch.setattr("mvr_ray.store.objects.SETTLED_S", 0.0)
    for _ in range(2):  # the first call fetches what is young, the second takes the copy
        store.local_path("shards/4")
    with pa.memory_map(str(copies["shards/3"])) as reader:
        os.utime(copies["shards/3"], (time.time() - 3 * HOUR_S, 0))  # opening it was a use
        free_space(monkeypatch, -(10**6))
        object_cache.make_room(SIZE)
        assert [name for name, file in copies.items() if file.exists()] == ["shards/4"]
        assert reader.read() == b"3" * SIZE, "a reader keeps what it has open"
    store.write_bytes("shards/new", b"new")
    assert store.local_path("shards/new").read_bytes() == b"new"
    assert store.local_path("shards/3").read_bytes() == b"3" * SIZE


def test_a_copy_that_is_asked_for_while_space_is_made_stays(store, copies, monkeypatch):
    def ask_meanwhile(files: list) -> list:
        os.utime(copies["shards/4"])
        return sorted(files)

    free_space(monkeypatch, -(10**6))
    monkeypatch.setattr(object_cache, "sorted", ask_meanwhile, raising=False)
    object_cache.make_room(SIZE)
    assert [name for name, file in copies.items() if file.exists()] == ["shards/4"]


def test_a_copy_that_another_process_deleted_is_fetched_again_before_its_bytes_are_compared(store, copies):
    content = b"2" * SIZE
    copies["shards/2"].unlink()
    assert store.is_whole(copies["shards/2"], "shards/2", len(content), hashlib.sha256(content).hexdigest())


def test_a_file_that_is_neither_in_the_cache_nor_in_the_store_is_not_whole(store, copies):
    copies["shards/2"].unlink()
    store.delete("shards/2")
    assert not store.is_whole(copies["shards/2"], "shards/2", SIZE, "0" * 64)


def test_an_unfinished_copy_stays_while_it_is_written(store, copies, monkeypatch):
    aside = copies["shards/4"].with_name(".new.tmp")
    aside.write_bytes(b"x")
    os.utime(aside, (0, time.time()))
    free_space(monkeypatch, -(10**6))
    object_cache.make_room(SIZE)
    assert aside.exists()


def test_copies_of_another_user_are_read_and_stay(store, copies, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "not the owner")

    monkeypatch.setattr("mvr_ray.store.objects.SETTLED_S", -HOUR_S)
    store.local_path("shards/4")
    monkeypatch.setattr(object_cache.os, "utime", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert store.local_path("shards/4") == copies["shards/4"]
    free_space(monkeypatch, -(10**6))
    object_cache.make_room(SIZE)
    assert all(file.exists() for file in copies.values())


@pytest.mark.parametrize("path", ["shards", "shards/2"])
def test_a_copy_that_its_reader_refuses_is_fetched_again_once(store, copies, monkeypatch, path):
    """A power failure may leave a file of its size and time with other bytes."""
    monkeypatch.setattr("mvr_ray.store.objects.SETTLED_S", 0.0)
    local, file = store.local_path(path), copies["shards/2"]
    stat = file.stat()
    file.write_bytes(bytes(stat.st_size))
    os.utime(file, (stat.st_atime, stat.st_mtime))
    times = []

    def load(copy: Path) -> bytes:
        times.append(time.time())
        if not any(content := file.read_bytes()):
            raise DigestError(f"{copy} is damaged")
        return content

    assert store.open_copy(store.local_path(path), path, load) == b"2" * SIZE and len(times) == 2
    assert store.open_copy(local, path, load) == b"2" * SIZE and len(times) == 3
    with pytest.raises(ConfigError):
        store.open_copy(local, path, Mock(side_effect=ConfigError))


def test_a_cache_that_cannot_be_written_is_named_and_not_the_object(store, tmp_path, monkeypatch, tiny_disk):
    store.write_bytes("shards/1", bytes(1 << 20))
    (tmp_path / "file").touch()
    folders = {"/proc/absent": "No such file or directory", str(tmp_path / "file"): "Not a directory"}
    if tiny_disk:
        folders[str(tiny_disk)] = "No space left on device; free space on its disk"
    for folder, reason in folders.items():
        monkeypatch.setenv("MVR_RAY_CACHE", folder)
        with pytest.raises(StorageError, match=rf"cannot be written in {folder}: {reason}.* or set MVR_RAY_CACHE"):
            store.local_path("shards/1")


def test_the_cache_may_be_named_from_the_home_of_the_user_and_the_error_without_one_names_the_setting(
    store, tmp_path, monkeypatch
):
    store.write_bytes("shards/1", b"1")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MVR_RAY_CACHE", "~/copies")
    assert store.local_path("shards/1").is_relative_to(tmp_path / "copies")
    for name in ("HOME", "MVR_RAY_CACHE"):
        monkeypatch.delenv(name)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    with pytest.raises(StorageError, match="home of a user without one; set MVR_RAY_CACHE to another folder"):
        store.local_path("shards/1")
