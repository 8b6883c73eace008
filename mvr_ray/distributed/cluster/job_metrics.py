"""Export Prometheus metrics of a running stage through Ray's metrics agent of every node.

    ray_mvr_ray_job_done, ray_mvr_ray_job_total    {stage, index, step}    units done, and units in all
    ray_mvr_ray_job_moved_at_seconds               {stage, index}          Unix time of the newest step; constant
                                                                           in a hung job
    ray_mvr_ray_refine_FIGURE                      {index}                 the newest round: every figure of its report

Nothing is recorded outside a Ray session.
"""

import functools
import math
import re
import time
from collections.abc import Mapping
from typing import Any

from mvr_ray.distributed.cluster import session
from mvr_ray.types import Progress

_NUMBER = re.compile(r" [\d.]+")


def with_metrics(stage: str, index: str, progress: Progress) -> Progress:
    """Return a progress callable that also sets the job's gauges. Step names are without numbers and figures in
    brackets, to limit the series."""

    def report(what: str, count: int, total: int) -> None:
        progress(what, count, total)
        if session.in_ray():
            job = {"stage": stage, "index": index}
            step = {**job, "step": _NUMBER.sub("", what.partition(" (")[0])}
            _gauge("job_done", "Units of a step that are done.", *step).set(count, step)
            _gauge("job_total", "Units of a step.", *step).set(total, step)
            _gauge("job_moved_at_seconds", "When the job last moved, as Unix time.", *job).set(time.time(), job)

    return report


def record_round(index: str, figures: Mapping[str, Any]) -> None:
    """Set a gauge for each figure of a refinement round's report; figures that are nan are left out."""
    for name, value in figures.items():
        if session.in_ray() and not math.isnan(value):
            gauge = _gauge(f"refine_{name}", f"{name} of the newest refinement round.", "index")
            gauge.set(value, {"index": index})


@functools.cache
def _gauge(name: str, description: str, *tags: str) -> Any:
    from ray.util.metrics import Gauge

    return Gauge(f"mvr_ray_{name}", description, tag_keys=tags)
