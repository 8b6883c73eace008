"""Record one run of one stage: its configuration, log lines and report, without the keys of object stores.

    <store>/runs/<time>-<stage>/config.yaml    the run file with its overrides, as run
    <store>/runs/<time>-<stage>/report.json    {stage, outcome, started, seconds, version, error, report}
    <store>/runs/<time>-<stage>/log            the package's log lines, in UTC as all times of a record
    <store>/runs/<time>-<stage>/metrics.jsonl        of `train`: the metrics of its steps
    <store>/runs/<time>-<stage>/questions.parquet    of `evaluate` and `analyze`: the ranks of every question
    <store>/runs/<time>-<stage>/views.parquet        of `analyze`: what views do for every question

No stage reads a record: deleting `runs/` loses history, never a result.
"""

import dataclasses
import datetime
import io
import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

import numpy as np
from pydantic import BaseModel

from mvr_ray import __version__
from mvr_ray.config import RunConfig
from mvr_ray.config.loader import write_yaml
from mvr_ray.errors import MvrRayError, StorageError
from mvr_ray.store import paths
from mvr_ray.store.files import Store, without_keys

log = logging.getLogger(__name__)

READING_STAGES = frozenset({"retrieve", "evaluate", "analyze", "read", "tune"})
"""Stages that write only their record into the store; if it cannot be written, they run without one."""


@dataclasses.dataclass
class RunRecord:
    """A run's report, and files to be written beside it by name. `folder` is relative to the store, empty where nothing
    is recorded."""

    folder: str
    report: Any = None
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)


@contextmanager
def record(run: RunConfig, stage: str) -> Iterator[RunRecord]:
    """Write the config before the work and the report after it, whether it succeeds, fails or is interrupted.

    A run that ends in an error of the package where no store was before, and stores nothing, leaves none.
    """
    store = Store(run.store.path)
    new_folders, is_refused = store.missing_folders(), False
    start = datetime.datetime.now(datetime.UTC)
    run_record = RunRecord("")
    config = without_keys(write_yaml(run.model_dump(mode="json")))
    try:
        run_record.folder = _create_folder(store, start, stage, config.encode())
    except StorageError as error:
        if stage not in READING_STAGES:
            raise
        log.warning("no record of this run: %s", error)
        yield run_record
        return
    clock, outcome, message, lines = time.monotonic(), "done", None, io.StringIO()
    try:
        with _write_log(lines):
            yield run_record
    except KeyboardInterrupt:
        outcome = "interrupted"
        raise
    except BaseException as error:  # every outcome is recorded
        outcome, message = "failed", f"{type(error).__name__}: {error}"
        is_refused = isinstance(error, MvrRayError)
        raise
    finally:
        summary = {
            "stage": stage,
            "outcome": outcome,
            "started": start.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - clock, 3),
            "version": __version__,
            "error": message,
            "report": to_plain(run_record.report),
        }
        try:
            own_files = {
                "report.json": without_keys(json.dumps(summary, indent=2)).encode(),
                "log": without_keys(lines.getvalue()).encode(errors="backslashreplace"),
            }
            if not (is_refused and new_folders and store.delete_if_alone(run_record.folder, new_folders)):
                for name, data in (own_files | run_record.files).items():
                    store.write_bytes(f"{run_record.folder}/{name}", data)
        except StorageError as error:
            # What stopped a run matters more, and work that is done need not be done again.
            what = "is done" if outcome == "done" else outcome
            log.warning("no record of a run that %s: %s", what, str(error).partition("; ")[0])
            run_record.folder = ""


@contextmanager
def _write_log(lines: io.StringIO) -> Iterator[None]:
    """Write the package's log lines, from INFO on, to `lines`."""
    handler, logger = logging.StreamHandler(lines), logging.getLogger("mvr_ray")
    formatter = logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()))
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def to_plain(value: Any) -> Any:
    """Convert a report to JSON types: named tuples and dataclasses become objects, NaN becomes null."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: to_plain(part) for name, part in zip(value._fields, value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(part) for part in value]
    if isinstance(value, np.ndarray | np.generic):
        return to_plain(value.tolist())
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _create_folder(store: Store, start: datetime.datetime, stage: str, config: bytes) -> str:
    """Create the record of a run with its configuration; runs of one second have a folder each."""
    stem = start.strftime("%Y%m%dT%H%M%S")
    folder, again = paths.run_dir(stem, stage), 1
    while True:
        try:
            store.create_once(f"{folder}/config.yaml", config)
            return folder
        except FileExistsError:
            again += 1
            folder = paths.run_dir(f"{stem}.{again}", stage)
