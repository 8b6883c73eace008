"""Run a function over many arguments: as Ray tasks in a Ray session, else in this process.

Waiting for tasks fails if none of them finishes within a time limit.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mvr_ray.distributed import session
from mvr_ray.distributed.ray_errors import translate_ray_errors
from mvr_ray.errors import ResourceError

log = logging.getLogger(__name__)

HANG_S = 7200.0
"""Time limit without a finished task: building the index of a large shard takes an hour."""


def run_tasks(function: Callable[..., Any], calls: Iterable[Sequence[Any]], what: str, *, cpus: float) -> Iterator[Any]:
    """Yield the function's results for all argument sequences, in the order of completion.

    In a Ray session each call is a task with `cpus` CPUs; else this process makes the calls one by one. Raises as
    `task_results`.
    """
    if not session.in_ray():
        for arguments in calls:
            yield function(*arguments)
        return
    import ray

    remote: Any = ray.remote(function).options(num_cpus=cpus)
    yield from task_results([remote.remote(*arguments) for arguments in calls], what)


def share(value: Any) -> Any:
    """Put an argument of many tasks or actors into Ray's object store once; outside a session, return the value."""
    if not session.in_ray():
        return value
    import ray

    return ray.put(value)


def task_results(tasks: Sequence[Any], what: str, hang_s: float | None = None) -> Iterator[Any]:
    """Yield results of tasks, in the order of completion. `what` names the work in errors.

    Raises ResourceError if no task finishes for `hang_s` (HANG_S by default), after cancelling them, or if Ray failed
    to run one; re-raises a task's own exception.
    """
    import ray

    bound_s, waiting = HANG_S if hang_s is None else hang_s, list(tasks)
    with translate_ray_errors(what):
        while waiting:
            ready_refs, waiting = ray.wait(waiting, num_returns=1, timeout=bound_s)
            if not ready_refs:
                for task in waiting:
                    ray.cancel(task, force=True)
                raise ResourceError(
                    f"{what} stopped: none of {len(waiting)} tasks finished for {bound_s:g} s; see whether the cluster "
                    f"has resources for them and its machines answer, then run the same command again, it continues"
                )
            yield ray.get(ready_refs[0])
