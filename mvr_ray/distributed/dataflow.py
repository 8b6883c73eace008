"""Running a Ray Data pipeline: its rows as they come, its own talk silenced, its failures as errors of ours."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import ray.data

from mvr_ray.distributed.failures import own_errors


def rows(pipeline: ray.data.Dataset, what: str) -> Iterator[dict[str, Any]]:
    """The pipeline's rows, in the order in which they are finished. `what` names the work where Ray gives it up."""
    pipeline.context.enable_progress_bars = False
    pipeline.context.raise_original_map_exception = True
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    with own_errors(what):
        yield from pipeline.iter_rows()


def in_order(found: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows that carry their `number`, from 0 on, in that order: what comes early waits."""
    early: dict[int, dict[str, Any]] = {}
    expected = 0
    for row in found:
        early[row["number"]] = row
        while expected in early:
            yield early.pop(expected)
            expected += 1
