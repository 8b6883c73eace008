"""Commands of `mvr-ray` that die by SIGKILL: the same command, given again, ends with the bytes of one never touched.

`test_encode.py` and `test_refine.py` hold the stages' functions to this; here it is the whole command, as a process.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
import yaml
from ray._private import state
from waiting import lines_of

from mvr_ray.cli import main
from mvr_ray.distributed.cluster import session
from mvr_ray.store import manifest
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest

pytestmark = [pytest.mark.data, pytest.mark.ray, pytest.mark.slow]

INDEX = "index"
REFINE = {
    "questions": "dev",
    "method": "hybrid",
    "step_size": 0.05,
    "depth": 20,
    "rounds": 12,
    "patience": 12,
    "max_heldout_loss": 100,
}
COMMAND = """
import json, os, sys
from mvr_ray.cli import main
from mvr_ray.progress import Reporter, progress_line

signals, report = json.loads(sys.argv[1]), Reporter.__call__

def report_and_signal(reporter, *step):
    report(reporter, *step)
    for moment in [moment for moment in signals if moment in progress_line(*step, rate=0.0)]:
        os.kill(os.getpid(), signals.pop(moment))

Reporter.__call__ = report_and_signal
main(sys.argv[2:])
"""
"""Sends itself a signal when its progress first says a moment: a test that sends it would come late now and then."""


@pytest.fixture
def run_file(run_over, tmp_path) -> Callable[[Path], str]:
    """Writes the run file of a store."""

    def write(store: Path) -> str:
        path = tmp_path / f"{store.name}.yaml"
        path.write_text(yaml.safe_dump(run_over(store, refine=REFINE).model_dump(mode="json")))
        return str(path)

    return write


def killed_at(moment: str, words: list[str], when_encoding: Callable[[int], None] | None = None, **environment) -> None:
    """A command that dies by SIGKILL when its progress says `moment`. While it encodes it is stopped for a call of
    `when_encoding`, which gets its process id."""
    signals = {moment: signal.SIGKILL} | ({"encode:": signal.SIGSTOP} if when_encoding else {})
    command = [sys.executable, "-c", COMMAND, json.dumps(signals), *words]
    lines = []
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=os.environ | environment
    ) as driver:
        for line in lines_of(driver, driver.stderr):
            lines.append(line)
            if when_encoding and line.startswith("encode:"):
                os.waitid(os.P_PID, driver.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
                when_encoding(driver.pid)
                when_encoding = None
                driver.send_signal(signal.SIGCONT)
    assert driver.returncode == -signal.SIGKILL, "".join(lines)


def finish(*words: str) -> None:
    """The same command once more, in this process."""
    with pytest.raises(SystemExit) as error:
        main(words)
    assert not error.value.code


def finish_without_ray(*words: str) -> None:
    with session.staying_local():
        finish(*words, "resources.local_passages=1000")


def live(store: Path) -> Manifest:
    return manifest.read(Store(str(store)), INDEX)


def sizes(store: Path) -> str:
    version = live(store)
    return f"{version.num_passages} passages, {version.num_vectors} vectors, {version.num_bytes:,} bytes the same"


def encoder_processes(driver: int) -> list[int]:
    """Encoder actors of a driver of the shared cluster."""
    [job] = [job["JobID"] for job in state.jobs() if job["DriverPid"] == driver]
    actors = state.actors(job_id=ray.JobID.from_hex(job), actor_state_name="ALIVE").values()
    return [actor["Pid"] for actor in actors if "ChunkEncoder" in actor["ActorClassName"]]


@pytest.mark.chaos("index command and its encoder killed", "the same command ends with the undisturbed bytes")
def test_an_index_command_survives_its_encoder_and_continues_after_its_own_end(
    empty_store, small_index, run_file, record_property
):
    killed_pids: list[int] = []

    def kill_encoder(driver: int) -> None:
        killed_pids.extend(encoder_processes(driver)[:1])
        os.kill(killed_pids[0], signal.SIGKILL)

    command = ["index", run_file(empty_store)]
    killed_at("build shards: 1 of 3", command, kill_encoder, RAY_ADDRESS=ray.get_runtime_context().gcs_address)
    assert killed_pids
    assert manifest.list_versions(Store(str(empty_store)), INDEX) == []
    finish(*command)
    assert live(empty_store).content_digest() == live(small_index).content_digest()
    finish("versions", command[1], "verify")
    record_property("figures", f"an encoder killed, then the command at 1 of 3 shards; {sizes(empty_store)}")


@pytest.mark.chaos(
    "refine command killed in a round and at its end",
    "the same command ends with the undisturbed bytes",
)
def test_a_refine_command_killed_in_a_round_and_at_its_end_publishes_the_same_bytes(
    small_index, run_file, tmp_path, record_property
):
    whole = shutil.copytree(small_index, tmp_path / "whole")
    finish_without_ray("refine", run_file(whole))
    assert live(whole).operation == "refine:hybrid"

    cut_store = shutil.copytree(small_index, tmp_path / "cut")
    command = ["refine", run_file(cut_store)]
    address = ray.get_runtime_context().gcs_address
    killed_at("refine round 2: retrieve", command, RAY_ADDRESS=address)
    assert live(cut_store).version == 1
    killed_at(": final", command, RAY_ADDRESS=address)
    finish(*command)
    assert live(cut_store).version == live(whole).version == 2
    assert live(cut_store).content_digest() == live(whole).content_digest()
    finish("versions", command[1], "verify")
    record_property("figures", f"killed in round 2 of {REFINE['rounds']} and at the end; {sizes(cut_store)}")


@pytest.mark.chaos("reshard command killed", "the same command ends with the undisturbed bytes")
def test_a_reshard_command_killed_in_the_middle_publishes_the_same_bytes(
    small_index, run_file, tmp_path, record_property
):
    whole = shutil.copytree(small_index, tmp_path / "whole")
    finish_without_ray("reshard", run_file(whole), "shards=4")
    assert [len(live(whole).shards), live(whole).operation] == [4, "reshard"]

    cut_store = shutil.copytree(small_index, tmp_path / "cut")
    command = ["reshard", run_file(cut_store), "shards=4"]
    killed_at("reshard: 1 of 4", command, RAY_ADDRESS=ray.get_runtime_context().gcs_address)
    assert live(cut_store).version == 1
    finish(*command)
    assert live(cut_store).version == live(whole).version == 2
    assert live(cut_store).content_digest() == live(whole).content_digest()
    finish("versions", command[1], "verify")
    record_property("figures", f"killed at 1 of 4 shards; {sizes(cut_store)}")


@pytest.mark.chaos(
    "follow command killed while it applies, plans, encodes and builds",
    "the same command applies every file once and ends with the undisturbed bytes",
)
def test_a_follow_command_killed_at_each_of_its_steps_publishes_the_same_bytes(
    small_index, run_over, tmp_path, without_ray, record_property
):
    """Without Ray: four drivers and their workers took five times as long for what the same code writes alone."""
    source = tmp_path / "source"
    source.mkdir()
    first, second, *_ = sorted(passage.id for passage in Corpus.open(Store(str(small_index)), "corpus"))
    rows = [{"id": f"new {number}", "title": "T", "text": f"New text {number}."} for number in range(20)]
    (source / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"id": first, "delete": True}]))
    (source / "2.jsonl").write_text('{"id": "cut')
    (source / "3.jsonl").write_text(json.dumps({"id": second, "title": "T", "text": "Another text."}) + "\n")
    follow = {"source": str(source), "max_age_s": 0, "poll_s": 0.01}

    def command(name: str) -> tuple[Path, list[str]]:
        store = shutil.copytree(small_index, tmp_path / name)
        file = tmp_path / f"{name}.yaml"
        run = run_over(store, follow=follow, resources={"local_passages": 100})
        file.write_text(yaml.safe_dump(run.model_dump(mode="json")))
        return store, ["follow", str(file), "--once"]

    whole, words = command("whole")
    finish(*words)
    cut_store, words = command("cut")
    moments = ("parts written: 1", "look for embeddings of earlier versions", "encode:", "build shards: 1")
    for moment in moments:
        killed_at(moment, words)
        assert live(cut_store).version == 1
    finish(*words)
    assert live(cut_store).version == live(whole).version == 2
    assert live(cut_store).content_digest() == live(whole).content_digest()
    assert live(cut_store).metrics["encoded"] == 21
    assert Corpus.open(Store(str(cut_store)), "corpus").info == Corpus.open(Store(str(whole)), "corpus").info
    finish("versions", words[1], "verify")
    record_property("figures", f"killed {len(moments)} times; {sizes(cut_store)}")
