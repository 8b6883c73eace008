"""Run stages as concurrent Ray tasks, and return each report when its stage ends.

A stage may rightly take days, so none is ended for its length; one that makes no step for long is named in the log.
"""

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import ray

from mvr_ray.config import RunConfig, StoreConfig
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.progress import forward_progress
from mvr_ray.distributed.cluster.ray_errors import translate_ray_errors
from mvr_ray.distributed.cluster.tasks import HANG_S, cancel_tasks
from mvr_ray.store.files import Store
from mvr_ray.store.runs import to_plain
from mvr_ray.types import Progress

log = logging.getLogger(__name__)

_HINT = "see what its workers do (py-spy dump), or end this command: the same one continues"
_Stage = Callable[[RunConfig, Progress], Any]


class _Task(NamedTuple):
    """The reference of a task's report, and its resources: exiting them by an error cancels the task."""

    report: Any
    resources: ExitStack


class StagePool(ExitStack):
    """Stages that run in Ray tasks, by name. An exception in the block cancels the running ones."""

    def __init__(self, cluster: session.ClusterInfo) -> None:
        super().__init__()
        self._cluster = cluster
        self._tasks: dict[str, _Task] = {}
        self._due_s: dict[str, float] = {}
        """By stage, when a step of it is due, by the monotonic clock."""

    def start(self, name: str, stage: _Stage, run: RunConfig, progress: Progress, gpus: float = 0) -> None:
        """Start a stage on any node with free resources. Raises ResourceError if the cluster lacks the GPUs."""
        if gpus:
            session.require(self._cluster, [session.Need("stages", 1, 0, gpus)])
        resources = self.enter_context(ExitStack())

        def note(what: str, count: int, total: int) -> None:
            self._due_s[name] = time.monotonic() + HANG_S
            progress(what, count, total)

        self._due_s[name] = time.monotonic() + HANG_S
        actor = resources.enter_context(forward_progress(note))
        task: Any = ray.remote(_run_stage).options(num_cpus=0, num_gpus=gpus)  # Ray restarts it if its worker dies
        report = task.remote(stage, plain_run(run), str(Path.cwd()), actor)
        resources.push(lambda kind, *_: cancel_tasks([report], force=False) if kind else None)  # also for Ctrl-C
        self._tasks[name] = _Task(report, resources)

    def wait(self) -> str:
        """Wait until a stage ends; returns its name. Logs a warning whenever one has made no step for `HANG_S`."""
        reports = [task.report for task in self._tasks.values()]
        while True:
            left_s = min(self._due_s[name] for name in self._tasks) - time.monotonic()
            ready, _ = ray.wait(reports, num_returns=1, timeout=max(left_s, 0))
            if ready:
                return next(name for name, task in self._tasks.items() if task.report == ready[0])
            for name in self._tasks:
                if self._due_s[name] <= time.monotonic():
                    self._due_s[name] = time.monotonic() + HANG_S
                    log.warning("stage has made no step for %g s, and is waited for: %s; %s", HANG_S, name, _HINT)

    def report(self, name: str) -> Any:
        """Remove an ended stage from the pool; returns its report as plain values, or raises its error."""
        task = self._tasks.pop(name)
        with task.resources, translate_ray_errors("the stage"):
            return ray.get(task.report)


def plain_run(run: RunConfig) -> dict[str, Any]:
    """Return the settings of a run as another process needs them: the store by its address, and no defaults, as some
    stages ask what a run file sets."""
    resolved_run = run.model_copy(update={"store": StoreConfig(path=Store(run.store.path).address)})
    return resolved_run.model_dump(mode="json", exclude_unset=True)


def enter_folder(folder: str) -> None:
    """Work in the driver's folder, if this machine has it: Ray's workers are in that of their node, and paths of a run
    file may be relative."""
    with suppress(OSError):
        os.chdir(folder)


def _run_stage(stage: _Stage, plain: dict[str, Any], folder: str, actor: Any) -> Any:
    enter_folder(folder)
    return to_plain(stage(RunConfig.model_validate(plain), actor.report.remote))
