"""Run a function over many arguments: as Ray tasks in a Ray session, else in this process.

Waiting for tasks has a bound on how long none of them may finish.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from mvr_ray.distributed import session
from mvr_ray.distributed.ray_errors import translate_ray_errors
from mvr_ray.errors import ResourceError

log = logging.getLogger(__name__)

HANG_S = 7200.0
"""Where nothing finishes for so long, something hangs: building the index of a large shard takes an hour."""


def run_tasks(function: Callable[..., Any], calls: Iterable[Sequence[Any]], what: str, *, cpus: float) -> Iterator[Any]:
    """Results of the function for each sequence of arguments, in the order in which they finish.

    In a Ray session each call is a task of so many CPUs; else this process makes the calls one after another. Raises as
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
    """What many tasks or actors are given, put into Ray's object store once; outside a session the value itself."""
    if not session.in_ray():
        return value
    import ray

    return ray.put(value)


def task_results(tasks: Sequence[Any], what: str, hang_s: float | None = None) -> Iterator[Any]:
    """Results of tasks, in the order in which they finish. `what` names the work in errors.

    Raises ResourceError where no task finishes for `hang_s` (HANG_S by default), after it has cancelled them, and where
    Ray gave one up; what the task itself raised, as it is.
    """
    import ray

    bound_s, waiting = HANG_S if hang_s is None else hang_s, list(tasks)
    with translate_ray_errors(what):
        while waiting:
            finished, waiting = ray.wait(waiting, num_returns=1, timeout=bound_s)
            if not finished:
                for task in waiting:
                    ray.cancel(task, force=True)
                raise ResourceError(
                    f"{what} stopped: none of {len(waiting)} tasks finished for {bound_s:g} s; see whether the cluster "
                    f"has room for them and its machines answer, then run the same command again, it continues"
                )
            yield ray.get(finished[0])
