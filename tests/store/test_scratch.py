"""Checks that scratch folders go with their owner: not while it lives, whatever the clock says, and soon after."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from mvr_ray.errors import StorageError
from mvr_ray.store.files import Store
from mvr_ray.store.local_files import finished_file
from mvr_ray.store.scratch import LEASE, STALE_S, scratch_folder

OWNER = """
import sys
from mvr_ray.store.files import Store
from mvr_ray.store.local_files import finished_file
with Store(sys.argv[1]).scratch() as folder:
    (folder / "work").write_text("unfinished")
    print(folder, flush=True)
    sys.stdin.read()
"""


def owner(root: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process with a scratch folder, which it holds until its input ends."""
    command = [sys.executable, "-c", OWNER, str(root)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    return process, Path(process.stdout.readline().strip())


def make_old(*files: Path) -> None:
    """As if made long ago, or the clock had leapt."""
    for file in files:
        os.utime(file, (1, 1))


def test_live_work_stays_however_old_it_looks_and_goes_with_its_process(tmp_path: Path):
    process, folder = owner(tmp_path)
    lease = folder.with_name(folder.name + LEASE)
    make_old(folder / "work", folder, lease)
    with process:
        with Store(tmp_path).scratch() as other:
            assert other != folder and (folder / "work").read_text() == "unfinished"
        assert sorted(folder.parent.iterdir()) == [folder, lease]
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert (folder / "work").exists()
    with Store(tmp_path).scratch() as other:
        assert {path.name for path in folder.parent.iterdir()} == {other.name, other.name + LEASE}
    assert list(folder.parent.iterdir()) == []


@pytest.mark.parametrize("age_s", [0, STALE_S + 60])
def test_what_another_machine_or_an_earlier_program_left_goes_after_a_day(tmp_path: Path, age_s: int):
    """The age is measured by the file system's own clock: that of a file made now."""
    scratch_dir = tmp_path / ".scratch"
    (scratch_dir / "foreign").mkdir(parents=True)
    (scratch_dir / "bare").mkdir()
    (scratch_dir / f"foreign{LEASE}").write_text("boot id of another machine")
    now = scratch_dir.stat().st_mtime
    for name in ("foreign", "bare", f"foreign{LEASE}"):
        os.utime(scratch_dir / name, (now - age_s, now - age_s))
    with Store(tmp_path).scratch() as own:
        others = {path.name for path in scratch_dir.iterdir()} - {own.name, own.name + LEASE}
    assert others == (set() if age_s else {"foreign", "bare", f"foreign{LEASE}"})


def test_of_a_parent_with_files_of_others_only_what_dead_owners_left_is_deleted(tmp_path: Path):
    with scratch_folder(tmp_path, "mvr-") as alive:
        lease = alive.with_name(alive.name + LEASE).read_text()
        for name in ("mvr-dead", "mvr-earlier-program", "other"):
            (tmp_path / name).mkdir()
        make_old(*tmp_path.iterdir())
        for name in ("mvr-dead", "other"):
            (tmp_path / f"{name}{LEASE}").write_text(lease)
        with scratch_folder(tmp_path, "mvr-") as own:
            names = {path.name for path in tmp_path.iterdir() if not path.name.endswith(LEASE)}
        assert names == {alive.name, own.name, "mvr-earlier-program", "other"}
        assert len(own.name) == 12 and alive.stat().st_mode & 0o777 == 0o700


def test_folders_of_a_prefix_that_dead_owners_left_behind_a_link_are_deleted(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    with scratch_folder(tmp_path / "link", "mvr-") as alive:
        (dead := tmp_path / "disk" / "mvr-dead").mkdir()
        (tmp_path / "disk" / f"mvr-dead{LEASE}").write_text(alive.with_name(alive.name + LEASE).read_text())
        with scratch_folder(tmp_path / "link", "mvr-"):
            assert alive.exists() and not dead.exists()


@pytest.mark.parametrize("link", ["mvr_ray-scratch-{uid}", "store/.scratch", ".out.json.unfinished"])
def test_through_a_link_that_another_user_made_nothing_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: str
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    victim = tmp_path / "victim"
    (victim / "old").mkdir(parents=True)
    (victim / "old.lease").touch()
    (victim / "older").mkdir()
    make_old(*victim.iterdir())
    (tmp_path / "store").mkdir()
    (tmp_path / link.format(uid=os.getuid())).symlink_to(victim)
    with Store("s3://key:secret@bucket/p?region=r").scratch() as private, Store(tmp_path / "store").scratch():
        assert private.parent == tmp_path and private.stat().st_mode & 0o077 == 0
        with finished_file(tmp_path / "out.json") as aside:
            aside.write_text("{}")
            assert not aside.resolve().is_relative_to(victim) and aside.parent.stat().st_mode & 0o077 == 0
    assert {path.name for path in victim.iterdir()} == {"old", "old.lease", "older"}


def test_leases_of_others_that_are_no_files_stay_and_stop_nothing(tmp_path: Path):
    (tmp_path / f"mvr-folder{LEASE}").mkdir()
    os.mkfifo(tmp_path / f"mvr-pipe{LEASE}")
    (tmp_path / f"mvr-link{LEASE}").symlink_to(tmp_path / "other")
    with scratch_folder(tmp_path, "mvr-elsewhere-"):
        (tmp_path / "other").write_text(next(tmp_path.glob(f"mvr-elsewhere-*{LEASE}")).read_text())  # of this boot
    before = set(tmp_path.iterdir())
    with scratch_folder(tmp_path, "mvr-") as folder:
        assert folder.is_dir()
    assert set(tmp_path.iterdir()) == before


def test_files_that_got_their_name_cannot_be_written_to_and_can_be_replaced(tmp_path: Path):
    store = Store(tmp_path / "store")
    for content in (b"one", b"two"):
        with store.scratch() as folder:
            (folder / "file").write_bytes(content)
            store.put_file(folder / "file", "a/file")
            (folder / "whole").mkdir()
            (folder / "whole" / "part").write_bytes(content)
            store.upload_dir(folder / "whole", f"b/{content.decode()}", {"about.json": b"{}"})
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert len(files) == 5 and store.read_bytes("a/file") == b"two"
    assert all(path.stat().st_mode & 0o222 == 0 for path in files)
    store.delete_dir("b")
    store.delete("a/file")
    assert store.list("b") == store.list("a") == []


def test_a_folder_that_takes_no_files_is_an_error_and_no_wait():
    message = r"cannot write /proc/out\.json: no file can be made there"
    with pytest.raises(StorageError, match=message), finished_file(Path("/proc/out.json")):
        pass


WRITER = """
import sys
from pathlib import Path
from mvr_ray.store.local_files import finished_file
with finished_file(Path(sys.argv[1])) as path:
    path.write_text("half")
    print("writing", flush=True)
    sys.stdin.read()
"""


def test_an_unfinished_file_stays_while_its_writer_lives_and_goes_with_the_next_one(tmp_path: Path):
    target = tmp_path / "out.json"
    command = [sys.executable, "-c", WRITER, str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "writing\n"
        with finished_file(target) as path:
            path.write_text("first")
        assert [file for file in tmp_path.rglob("*") if file.is_file() and file.read_text() == "half"]
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(list(tmp_path.iterdir())) == 3
    with finished_file(target) as path:
        path.write_text("second")
    assert list(tmp_path.iterdir()) == [target] and target.read_text() == "second"
