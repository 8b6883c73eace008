"""Health of a running job for Prometheus, through Ray's metrics: every node exports what its processes note.

    ray_mvr_ray_job_done, ray_mvr_ray_job_total    {stage, index, step}    so many of so many
    ray_mvr_ray_job_moved_at_seconds               {stage, index}          Unix time of the newest step: a hung job
                                                                           stands still
    ray_mvr_ray_refine_FIGURE                      {index}                 the newest round: every figure of its report

Nothing is noted outside a Ray session.
"""

import functools
import math
import re
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.metrics import Gauge

from mvr_ray.types import Progress

_NUMBER = re.compile(r" [\d.]+")


def watched(stage: str, index: str, progress: Progress) -> Progress:
    """A progress that tells Prometheus, too. Steps lose their numbers, so that a long job does not make many series."""

    def told(what: str, done: int, total: int) -> None:
        progress(what, done, total)
        if ray.is_initialized():
            job = {"stage": stage, "index": index}
            step = {**job, "step": _NUMBER.sub("", what)}
            _gauge("job_done", "Units of a step that are done.", *step).set(done, step)
            _gauge("job_total", "Units of a step.", *step).set(total, step)
            _gauge("job_moved_at_seconds", "When the job last moved, as Unix time.", *job).set(time.time(), job)

    return told


def note_round(index: str, figures: Mapping[str, Any]) -> None:
    """The report of a refinement round, a gauge a figure; what could not be measured (nan) is left out."""
    for name, value in figures.items():
        if ray.is_initialized() and not math.isnan(value):
            gauge = _gauge(f"refine_{name}", f"{name} of the newest refinement round.", "index")
            gauge.set(value, {"index": index})


@functools.cache
def _gauge(name: str, description: str, *tags: str) -> Gauge:
    return Gauge(f"mvr_ray_{name}", description, tag_keys=tags)
