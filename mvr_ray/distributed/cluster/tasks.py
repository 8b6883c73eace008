"""Run a function over many arguments: as Ray tasks in a Ray session, else in this process.

Waiting for tasks fails if none of them finishes within a time limit.
"""

from collections.abc import Callable, Sequence
from typing import Any

from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.ray_errors import translate_ray_errors
from mvr_ray.errors import ResourceError
from mvr_ray.types import Progress, no_progress

HANG_S = 7200.0
"""Time limit without a finished task: building the index of a large shard takes an hour."""
FINISH_S = 0.5
"""Time in which tasks may finish before they are cancelled."""


def run_tasks(
    function: Callable[..., Any],
    calls: Sequence[Sequence[Any]],
    what: str,
    step: str,
    progress: Progress = no_progress,
    *,
    cpus: float = 1.0,
    memory: Sequence[int] = (),
) -> list[Any]:
    """Call the function with each of the argument sequences; returns the results in order of the calls.

    In a Ray session each call is a task with `cpus` CPUs and, if given, its bytes of `memory`: a node runs no more of
    them at once than it has memory for. One that needs more than any node has asks for all of the largest. Else this
    process makes the calls one by one. `progress` counts finished calls as `step`. Raises as `task_results`.
    """
    if session.in_ray():
        import ray

        remote: Any = ray.remote(function)
        of_nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        largest = max((of.get("memory", 0) for of in of_nodes if of.get("CPU", 0) >= cpus), default=0)
        tasks = [
            remote.options(num_cpus=cpus, memory=min(num_bytes, int(largest)) or None).remote(*arguments)
            for arguments, num_bytes in zip(calls, memory or [0] * len(calls), strict=True)
        ]
        return task_results(tasks, what, step, progress)
    results = []
    for arguments in calls:
        results.append(function(*arguments))
        progress(step, len(results), len(calls))
    return results


def share(value: Any) -> Any:
    """Put an argument of many tasks or actors into Ray's object store once; outside a session, return the value."""
    if not session.in_ray():
        return value
    import ray

    return ray.put(value)


def task_results(
    tasks: Sequence[Any], what: str, step: str = "", progress: Progress = no_progress, hang_s: float = HANG_S
) -> list[Any]:
    """Wait for tasks; returns their results in order. `what` names the work in errors, `step` in `progress`.

    Raises ResourceError if no task finishes for `hang_s`, or if Ray failed to run one; re-raises a task's own
    exception. After any error, or Ctrl-C, the unfinished tasks are cancelled.
    """
    import ray

    results: dict[Any, Any] = {}
    waiting = list(tasks)
    with translate_ray_errors(what):
        try:
            while waiting:
                ready_refs, waiting = ray.wait(waiting, num_returns=1, timeout=hang_s)
                if not ready_refs:
                    raise ResourceError(
                        f"{what} stopped: none of {len(waiting)} tasks finished for {hang_s:g} s; see whether the "
                        f"cluster has resources for them and its machines answer, then run the same command again, it "
                        f"continues"
                    )
                results[ready_refs[0]] = ray.get(ready_refs[0])
                progress(step, len(results), len(tasks))
        except BaseException:  # no task stays, after Ctrl-C either
            cancel_tasks(waiting, force=True)
            raise
    return [results[task] for task in tasks]


def cancel_tasks(tasks: Sequence[Any], *, force: bool) -> None:
    """Cancel the tasks that do not finish within FINISH_S; `force` ends their processes.

    Ray 2.60 aborts this process if a task finishes while it is cancelled ("Tried to complete task that was not
    pending"), as tasks of equal length do.
    """
    import ray

    others = ray.wait(list(tasks), num_returns=len(tasks), timeout=FINISH_S)[1] if tasks else []
    for task in others:
        ray.cancel(task, force=force)
