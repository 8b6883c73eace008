"""Tests that waiting for tasks has a time limit: a hanging task is an error. Tests also what their workers import."""

import logging
import math
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.data

from mvr_ray.api.rows import passage_records
from mvr_ray.config import RunConfig
from mvr_ray.distributed.cluster import ray_data, stage_pool, tasks
from mvr_ray.distributed.cluster.stage_pool import StagePool, enter_folder
from mvr_ray.distributed.cluster.tasks import run_tasks, task_results
from mvr_ray.distributed.indexing import build_index, carry_over, rewrite
from mvr_ray.distributed.indexing.lexical import shard_words
from mvr_ray.errors import DataError, ResourceError
from mvr_ray.types import no_progress


def square(number: int) -> int:
    return number * number


def stop_itself(file: str) -> None:
    Path(file).write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def refuse() -> None:
    raise DataError("these rows are not good")


def hanging_task(file: Path) -> Any:
    """A task that runs and hangs, and has written its process id."""
    task = ray.remote(stop_itself).remote(str(file))
    while not file.is_file() or not file.read_text():
        time.sleep(0.05)
    return task


def ends(file: Path) -> bool:
    """Whether the process of `hanging_task` ends within a minute."""
    deadline = time.monotonic() + 60
    while Path(f"/proc/{file.read_text()}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return not Path(f"/proc/{file.read_text()}").exists()


@pytest.mark.ray
def test_results_come_in_the_order_of_their_tasks_and_an_error_of_ours_as_it_is(ray_session):
    assert task_results([ray.remote(square).remote(n) for n in range(5)], "squares") == [0, 1, 4, 9, 16]
    with pytest.raises(DataError, match="these rows are not good"):
        task_results([ray.remote(refuse).remote()], "rows")


def write_late(file: str) -> None:
    time.sleep(0.3)
    Path(file).write_text("whole")


@pytest.mark.ray
def test_tasks_that_are_about_to_finish_when_another_fails_are_not_cancelled(ray_session, tmp_path, monkeypatch):
    """Ray aborts the driver if a task finishes while it is cancelled."""
    monkeypatch.setattr(tasks, "FINISH_S", 60.0)
    late = ray.remote(write_late).remote(str(tmp_path / "late"))
    with pytest.raises(DataError, match="these rows are not good"):
        task_results([late, ray.remote(refuse).remote()], "rows")
    assert (tmp_path / "late").read_text() == "whole"


def wait_a_moment() -> tuple[float, float]:
    start = time.time()
    time.sleep(0.5)
    return start, time.time()


def meets_the_other(own: str, other: str) -> bool:
    """Whether another task runs meanwhile: each writes a file and waits for that of the other."""
    Path(own).touch()
    deadline = time.monotonic() + 60
    while not Path(other).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return Path(other).exists()


@pytest.mark.ray
def test_tasks_run_at_once_as_far_as_the_memory_of_a_node_goes(ray_session, tmp_path: Path):
    """Of three that need six tenths of the node each, no two do; one that needs more than all of it still runs."""
    node_bytes = int(ray.cluster_resources()["memory"])
    times = sorted(run_tasks(wait_a_moment, [()] * 3, "waiting", "wait", memory=[node_bytes * 6 // 10] * 3))
    assert all(end <= start for (_, end), (start, _) in pairwise(times))
    times = run_tasks(wait_a_moment, [(), ()], "waiting", "wait", memory=[10 * node_bytes, 0])
    assert len(times) == 2
    files = [str(tmp_path / name) for name in ("one", "two")]
    assert (
        run_tasks(meets_the_other, [files, files[::-1]], "waiting", "wait", memory=[node_bytes // 10] * 2) == [True] * 2
    )


@pytest.mark.ray
@pytest.mark.chaos("build task hangs", "an error within the bound, no process left")
def test_a_task_that_hangs_is_an_error_within_the_bound_and_leaves_no_process(ray_session, tmp_path: Path):
    task = hanging_task(tmp_path / "pid")
    with pytest.raises(ResourceError, match="building stopped: none of 1 tasks finished for 3 s"):
        task_results([task], "building", hang_s=3)
    assert ends(tmp_path / "pid")


class FastClock:
    """A clock that goes 720 times as fast once a file is there: hours take ten seconds."""

    def __init__(self, file: Path) -> None:
        self.file, self.start_s = file, math.inf

    def monotonic(self) -> float:
        now_s = time.monotonic()
        if math.isinf(self.start_s) and self.file.is_file():
            self.start_s = now_s
        return now_s + 719 * max(now_s - self.start_s, 0)


class StopsItself:
    """A worker that finishes batches until the one of number 2."""

    def __init__(self, file: str) -> None:
        self.file = file

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if batch["item"][0] == 2:
            stop_itself(self.file)
        return batch


@pytest.mark.ray
@pytest.mark.chaos("encoder hangs", "an error within the bound, no process left")
def test_a_worker_of_a_pool_that_hangs_is_an_error_within_the_bound_and_leaves_no_process(
    ray_session, tmp_path: Path, monkeypatch
):
    file = tmp_path / "pid"
    monkeypatch.setattr(ray_data, "time", FastClock(file))
    options: dict[str, Any] = {"batch_size": 1, "num_cpus": 0.5, "compute": ray.data.ActorPoolStrategy(size=1)}
    pipeline = ray.data.range(3, override_num_blocks=3).rename_columns({"id": "item"})
    pipeline = pipeline.map_batches(StopsItself, fn_constructor_args=[str(file)], **options)
    with pytest.raises(ResourceError, match="encoding stopped: no worker finished a batch for 7200 s; see"):
        list(ray_data.stream_rows(pipeline, "encoding"))
    assert ends(file)


@pytest.mark.ray
def test_after_an_error_of_one_task_no_other_runs_on(ray_session, tmp_path: Path):
    task = hanging_task(tmp_path / "pid")
    with pytest.raises(DataError, match="these rows are not good"):
        task_results([task, ray.remote(refuse).remote()], "building")
    assert ends(tmp_path / "pid")


@pytest.mark.ray
def test_a_dataset_of_ray_holds_the_passages_of_its_rows(ray_session):
    rows = [{"id": f"p{n}", "text": f"Tower {n}.", "year": 1900 + n} for n in range(9)]
    assert list(passage_records(ray.data.from_items(rows))) == list(passage_records(rows))


@pytest.mark.parametrize(
    "function",
    [build_index.build_one, carry_over.carry_shard, carry_over.digest_contents, rewrite.compact_one, shard_words],
)
def test_a_worker_that_copies_or_builds_shards_imports_no_torch(function):
    """It takes two seconds of a core in each process."""
    program = f"import sys, {function.__module__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.ray
def test_a_stage_in_a_task_has_the_folder_of_the_driver_and_what_its_run_file_sets(ray_session, tmp_path, monkeypatch):
    """Ray's workers are in the folder of their node; a setting that is not given is not given in the task, either."""
    monkeypatch.chdir(tmp_path)
    run = RunConfig.model_validate({"encoder": {"num_views": 8}})
    with StagePool(ray_session) as pool:
        pool.start("own", lambda run, progress: [str(Path.cwd()), *run.encoder.model_fields_set], run, no_progress)
        assert (pool.wait(), pool.report("own")) == ("own", [str(tmp_path), "num_views"])


def wait_for_file(file: str) -> bool:
    """Whether a file appears within two minutes."""
    deadline = time.monotonic() + 120
    while not Path(file).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return Path(file).exists()


@pytest.mark.ray
def test_a_stage_that_makes_no_step_is_named_in_the_log_again_and_again_and_is_not_ended(
    ray_session, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr(stage_pool, "HANG_S", 0.5)
    messages = []

    class EndsStage(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())
            if len(messages) == 3:
                (tmp_path / "file").touch()

    monkeypatch.setattr(stage_pool.log, "handlers", [EndsStage()])
    with StagePool(ray_session) as pool:
        pool.start("own", lambda run, progress: wait_for_file(str(tmp_path / "file")), RunConfig(), no_progress)
        assert (pool.wait(), pool.report("own")) == ("own", True)
    assert all("no step for 0.5 s, and is waited for: own; see what its workers do" in one for one in messages)


def test_a_folder_that_a_machine_lacks_is_not_entered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    enter_folder(str(tmp_path / "nowhere"))
    assert Path.cwd() == tmp_path
