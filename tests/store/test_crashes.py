"""Publishers that die at any step, or find the disk full: the live version stays whole, and the same work ends well.

a folder   a process is killed before each call that changes the disk, and in the middle of each write
S3         it is killed before the server does what a request asks for, and when that is done but not yet answered
"""

import itertools
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from drafts import describe, finish_shard
from kill_at_call import NEVER, kill_points, run_and_kill

from mvr_ray.config import PrepareConfig, SourceConfig
from mvr_ray.errors import StorageError
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest, ShardEntry, ShardMeta
from mvr_ray.store.prepare import prepare
from mvr_ray.store.questions import read_questions, write_questions
from mvr_ray.store.update import update
from mvr_ray.types import Question

FIRST = replace(describe([]), config_digest="old")


def publish_shard(store: Store, folder: Path) -> Manifest:
    """The work that is cut short: a finished folder becomes a shard, and a version that follows the live one names it.

    `PUBLISHER` does the same in a process of its own.
    """
    entry = manifest.add_shard(store, "i", folder, ShardMeta(0, 2, 5))
    live = manifest.read(store, "i")
    return manifest.publish(store, replace(live, shards=(entry,), parent=live.version, config_digest="new"))


PUBLISHER = """
import json
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from mvr_ray.store import manifest
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import ShardMeta

def publish(root, folder):
    store = Store(root)
    entry = manifest.add_shard(store, "i", Path(folder), ShardMeta(0, 2, 5))
    live = manifest.read(store, "i")
    manifest.publish(store, replace(live, shards=(entry,), parent=live.version, config_digest="new"))

for line in sys.stdin:
    go, end = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.read(go, 1)
            publish(*json.loads(line))
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    print(child, flush=True)
    sys.stdin.readline()
    os.write(end, b".")
    os.close(go)
    os.close(end)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Publisher:
    """Does the work in forks of a process that has no client of an object store: its threads would be lacking there."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", PUBLISHER]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def prepare(self, store: Store, folder: Path) -> int:
        """The id of a fork that waits for `publish`."""
        return int(self._ask(json.dumps([store.root, str(folder)])))

    def publish(self) -> int:
        """The exit code of the fork."""
        return int(self._ask("go"))

    def _ask(self, line: str) -> str:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()


@pytest.fixture
def publisher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Publisher]:
    monkeypatch.setenv("MVR_RAY_CACHE", str(tmp_path / "cache"))
    own = Publisher()
    with own.process:
        yield own


def require_whole(store: Store, first: Manifest, folder: Path) -> bool:
    """Old or new, what is live is whole; the work done again, with the shard in `folder`, ends well.

    Gives whether the new one was live.
    """
    live = manifest.read(store, "i")
    assert live == first or (live.version, live.config_digest) == (2, "new")
    assert manifest.verify(store, live).problems == []
    after = publish_shard(store, folder)
    assert manifest.read(store, "i") == after and after.version == live.version + 1
    assert after.shards[0].digest != first.shards[0].digest
    assert live == first or live.shards == after.shards
    assert manifest.verify(store, after).problems == []
    assert manifest.verify(store, first).problems == []
    return live != first


@pytest.mark.slow
@pytest.mark.chaos(
    "publisher killed at each call that writes, syncs, names or renames",
    "the live version is whole: the old one or the new one; the same work then ends well",
)
def test_a_publisher_killed_at_any_call_leaves_a_whole_live_version(tmp_path: Path, record_property):
    before = Store(tmp_path / "before")
    first = manifest.publish(before, replace(FIRST, shards=(add(before, tmp_path / "made"),)))
    outcomes: list[bool] = []
    control = Store(shutil.copytree(before.root, tmp_path / "undisturbed"))
    calls = run_and_kill(partial(publish_shard, control, finish_shard(tmp_path / "new", b"changed")), NEVER)
    for at in kill_points(calls):
        root = shutil.copytree(before.root, tmp_path / f"killed at {at}")
        store = Store(root)
        work = partial(publish_shard, store, finish_shard(tmp_path / f"new {at}", b"changed"))
        assert len(run_and_kill(work, at)) == at
        for digest in store.list(paths.index_dir("i", "shards")):
            assert sorted(file.name for file in (root / paths.shard_dir("i", digest)).iterdir()) == sorted(
                [paths.EMBEDDINGS, "index.bin", paths.SHARD_JSON]
            )
        again = finish_shard(tmp_path / f"again {at}", b"changed")
        outcomes.append(require_whole(store, first, again))
    assert {"create", "write", "fsync", "rename", "link", "utime", "unlink"} <= {*calls}
    assert outcomes == sorted(outcomes) and {*outcomes} == {False, True}, "old until it is named, new from then on"
    counts = ", ".join(f"{count} {name}" for name, count in sorted(Counter(calls).items()))
    record_property("figures", f"killed {len(outcomes)} times ({counts}); the new one was live after {sum(outcomes)}")


@pytest.mark.chaos(
    "update killed at each call that writes, syncs, names or renames",
    "the last corpus is whole: the old one or the new one; the same command ends with the undisturbed bytes",
)
def test_an_update_killed_at_any_call_leaves_a_whole_corpus_and_ends_with_the_same_bytes(
    tmp_path: Path, record_property
):
    rows, changes = tmp_path / "rows.jsonl", tmp_path / "changes.jsonl"
    rows.write_text("".join(json.dumps(row(f"p{at:02d}", f"text {at}")) + "\n" for at in range(40)))
    new_rows = [row("p01", "other words"), row("new", "new words"), {"id": "p02", "delete": True}]
    changes.write_text("".join(json.dumps(one) + "\n" for one in new_rows))
    cfg = PrepareConfig(corpus="corpus", num_shards=3, sources=[SourceConfig(path=str(rows))])
    before = Store(tmp_path / "before")
    prepare(cfg, before)
    old = Corpus.open(before, "corpus")
    write_questions(
        old, "dev", [Question("q1", "who?", (), ("p03",), (), (), ()), Question("q2", "a", (), ("p02",), (), (), ())]
    )
    whole = Store(shutil.copytree(before.root, tmp_path / "whole"))
    update(cfg, whole, str(changes))
    new = Corpus.open(whole, "corpus")
    control = Store(shutil.copytree(before.root, tmp_path / "undisturbed"))
    outcomes: list[bool] = []
    for at in kill_points(run_and_kill(partial(update, cfg, control, str(changes)), NEVER)):
        store = Store(shutil.copytree(before.root, tmp_path / f"killed at {at}"))
        assert len(run_and_kill(partial(update, cfg, store, str(changes)), at)) == at
        last = Corpus.open(store, "corpus")
        assert last.digest in (old.digest, new.digest) and last.verify().damage == []
        assert Corpus.open(store, "corpus", old.digest).verify().damage == []
        outcomes.append(last.digest == new.digest)
        update(cfg, store, str(changes))
        again = Corpus.open(store, "corpus")
        assert (again.info.parts, again.number) == (new.info.parts, new.number)
        assert list(again) == list(new) and again.verify().damage == []
        assert read_questions(again, "dev") == read_questions(new, "dev")
        assert {file.name: file.num_bytes for file in store.stored_files(paths.corpus_dir("corpus"))}.items() >= {
            file.name: file.num_bytes for file in whole.stored_files(paths.corpus_dir("corpus"))
        }.items()
        shutil.rmtree(store.root)
    assert outcomes == sorted(outcomes) and {*outcomes} == {False, True}, "old until it is published, new from then on"
    record_property("figures", f"killed {len(outcomes)} times; the new one was published after {sum(outcomes)}")


def row(name: str, text: str) -> dict:
    return {"id": name, "title": "t", "text": text}


def add(store: Store, folder: Path) -> ShardEntry:
    return manifest.add_shard(store, "i", finish_shard(folder, b"content"), ShardMeta(0, 2, 5))


class End:
    """Comes to a publisher at its request number `at` of those that change the store."""

    def __init__(self, at: int, moment: str) -> None:
        self.at, self.moment = at, moment
        self.of: int | None = None
        self.requests: list[str] = []

    def receive(self, when: str, request: str) -> bool:
        if self.of is None or when != self.moment:
            return True
        self.requests.append(request)
        if len(self.requests) <= self.at:
            return True
        end = os.pidfd_open(self.of)
        signal.pidfd_send_signal(end, signal.SIGKILL)
        select.select([end], [], [])  # readable once it has ended
        os.close(end)
        return False


@pytest.mark.slow
@pytest.mark.chaos(
    "publisher to an object store killed around each upload and its conditional put",
    "the live version is whole: the old one or the new one; the same work then ends well",
)
def test_a_publisher_killed_around_any_request_leaves_a_whole_live_version(
    s3_server: ModuleType, tmp_path: Path, publisher: Publisher, record_property
):
    """Before a request has had its effect is as good as before it was sent; after it, its answer is never read."""
    live: dict[tuple[int, str], bool] = {}
    requests: list[str] = []
    for at, moment in ((number, moment) for number in itertools.count() for moment in ("before", "after")):
        end = End(at, moment)
        with s3_server.serve(s3_server.Script([], [], on_request=end.receive)) as root:
            store = Store(root)
            first = manifest.publish(store, replace(FIRST, shards=(add(store, tmp_path / f"made {at} {moment}"),)))
            end.of = publisher.prepare(store, finish_shard(tmp_path / f"new {at} {moment}", b"changed"))
            code = publisher.publish()
            end.of = None
            if code == 0:
                requests = end.requests
                break
            assert code == -signal.SIGKILL
            again = finish_shard(tmp_path / f"again {at} {moment}", b"changed")
            live[at, moment] = require_whole(store, first, again)
    [number] = [number for number, request in enumerate(requests) if request.endswith(paths.manifest("i", 2))]
    assert len(live) == 2 * len(requests)
    assert live == {(n, when): n > number or (n, when) == (number, "after") for n, when in live}
    text = f"killed {len(live)} times, around {len(requests)} requests; the new one was live after {sum(live.values())}"
    record_property("figures", text)


@pytest.fixture
def full_disk() -> Iterator[Callable[[bool], None]]:
    """Says whether the disk is full: then no file of this process may grow beyond a byte. It needs no rights."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda full: resource.setrlimit(resource.RLIMIT_FSIZE, (1 if full else soft, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("a file system cannot be mounted here; the bound on file sizes stands for the full disk")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.chaos("no file may grow while publishing", "the old version stays live; the same work then ends well")
def test_files_that_cannot_grow_while_publishing_leave_the_old_version_live(
    tmp_path: Path, full_disk: Callable[[bool], None], record_property
):
    store = Store(tmp_path / "store")
    first = manifest.publish(store, replace(FIRST, shards=(add(store, tmp_path / "made"),)))
    entry = manifest.add_shard(store, "i", finish_shard(tmp_path / "other", b"changed"), ShardMeta(0, 2, 5))
    new = finish_shard(tmp_path / "new", b"never named")
    full_disk(True)
    with pytest.raises(StorageError, match=r"version 2 not published, 1 stays live: .*File too large.*free space and"):
        manifest.publish(store, replace(first, shards=(entry,), parent=1))
    with pytest.raises(StorageError, match=r"cannot write .*File too large \(\d+ bytes to write, \d+ free\); free"):
        publish_shard(store, new)
    full_disk(False)
    leftovers = [file for file in Path(store.root).rglob("*") if file.name.endswith(".tmp")]
    assert leftovers == [] and len(store.list(paths.index_dir("i", "shards"))) == 2
    assert not require_whole(store, first, new)
    record_property("figures", f"2 refused, {len(leftovers)} files left behind")


@pytest.mark.chaos("disk full while publishing", "the old version stays live; the same work then ends well")
def test_a_full_disk_while_publishing_leaves_the_old_version_live(tmp_path: Path, small_disk: Path, record_property):
    store = Store(small_disk)
    first = manifest.publish(store, replace(FIRST, shards=(add(store, tmp_path / "made"),)))
    filler = small_disk / "filler"
    filler.write_bytes(b"x" * (store.free_bytes() or 0))
    with pytest.raises(StorageError, match=r"version 2 not published, 1 stays live: .*No space left on device"):
        manifest.publish(store, replace(first, parent=1))
    with pytest.raises(StorageError, match="No space left on device"):
        manifest.add_shard(store, "i", finish_shard(tmp_path / "big", b"y" * 500_000), ShardMeta(0, 2, 5))
    num_bytes = filler.stat().st_size
    filler.unlink()
    new = finish_shard(tmp_path / "new", b"changed")
    assert not require_whole(store, first, new)
    record_property("figures", f"2 refused on a disk with {num_bytes:,} bytes taken")
