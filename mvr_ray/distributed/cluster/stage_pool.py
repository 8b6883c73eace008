"""Run stages as concurrent Ray tasks, and return each report when its stage ends."""

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import ray

from mvr_ray.config import RunConfig, StoreConfig
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.progress import forward_progress
from mvr_ray.distributed.cluster.ray_errors import translate_ray_errors
from mvr_ray.distributed.cluster.tasks import cancel_tasks
from mvr_ray.store.files import Store
from mvr_ray.store.runs import to_plain
from mvr_ray.types import Progress

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

    def start(self, name: str, stage: _Stage, run: RunConfig, progress: Progress, gpus: float = 0) -> None:
        """Start a stage on any node with free resources. Raises ResourceError if the cluster lacks the GPUs."""
        if gpus:
            session.require(self._cluster, [session.Need("stages", 1, 0, gpus)])
        resources = self.enter_context(ExitStack())
        actor = resources.enter_context(forward_progress(progress))
        task: Any = ray.remote(_run_stage).options(num_cpus=0, num_gpus=gpus)  # Ray restarts it if its worker dies
        report = task.remote(stage, plain_run(run), str(Path.cwd()), actor)
        resources.push(lambda kind, *_: cancel_tasks([report], force=False) if kind else None)  # also for Ctrl-C
        self._tasks[name] = _Task(report, resources)

    def wait(self) -> str:
        """Wait until a stage ends; returns its name."""
        [report], _ = ray.wait([task.report for task in self._tasks.values()], num_returns=1)
        return next(name for name, task in self._tasks.items() if task.report == report)

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
