"""Run the steps of a study on a cluster; finished steps do not run again.

Each step is a Ray task that calls the stage's function, so it runs on any node with free resources, and Ray restarts it
if its worker dies; the stages resume where they stopped. The store keeps a finished step's report under its key.
`at_once` steps run concurrently: a step waits for those before it, and for a step that uses the same index, since both
may change its live version.
"""

import json
import logging
import operator
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mvr_ray import __version__, versions
from mvr_ray.checksums import json_with_checksum, parse_json
from mvr_ray.config import RunConfig, resolve_path
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.job_metrics import with_metrics
from mvr_ray.distributed.cluster.stage_pool import StagePool
from mvr_ray.errors import ConfigError, MissingInputError, MvrRayError, StorageError, StudyError
from mvr_ray.stages import STAGES
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.local_files import cached_sha256_of
from mvr_ray.store.prepare import describe_sources
from mvr_ray.store.runs import to_plain
from mvr_ray.studies.cost import cost
from mvr_ray.studies.definition import Study
from mvr_ray.studies.entities import entity_frequency
from mvr_ray.studies.reading import reading
from mvr_ray.studies.refinement import refinement_grid
from mvr_ray.studies.steps import RULES, PlannedStep, StudyPlan, plan_study
from mvr_ray.types import Progress, no_progress

log = logging.getLogger(__name__)

MEASURES: dict[str, Callable[..., Any]] = {
    "cost": cost,
    "refinement_grid": refinement_grid,
    "reading": reading,
    "entity_frequency": entity_frequency,
}
"""The measures of studies, beside the stages."""


class StepRecord(NamedTuple):
    """A finished step: its command, its duration, its report as plain values, and the date, the version of the code and
    the hardware of its run. The key does not cover these: new code does not run a finished step again. `inputs` are the
    digests of the files that its setting `StageRule.reads` named."""

    key: str
    stage: str
    command: str
    seconds: float
    report: dict[str, Any]
    date: str = ""
    version: str = ""
    hardware: str = ""
    inputs: Sequence[str] = ()


class _RunningStep(NamedTuple):
    """A step that runs since `start`; `lane` numbers concurrent steps in progress lines."""

    step: PlannedStep
    lane: int
    start: float
    inputs: list[str]


def run_plan(
    plan: StudyPlan, store: Store, run: RunConfig, progress: Progress = no_progress, at_once: int = 1
) -> dict[str, StepRecord]:
    """Run the unfinished steps, `at_once` concurrently where independent; returns the records by key.

    Raises StudyError naming the failed step; concurrent steps are stopped, and resume in the next run.
    """
    records = read_records(plan, store)
    waiting = [step for step in plan.steps.values() if step.key not in records]
    if not waiting:
        return records
    labels = {step.key: f"step {number} of {len(waiting)}" for number, step in enumerate(waiting, 1)}
    running: dict[str, _RunningStep] = {}
    code, machine = code_version(), hardware()

    def finish(own: _RunningStep, report: Any) -> None:
        step, seconds, date = own.step, round(time.monotonic() - own.start, 1), f"{datetime.now(UTC):%Y-%m-%d}"
        record = StepRecord(step.key, step.stage, step.command, seconds, report, date, code, machine, own.inputs)
        _write_json(store, paths.study_step(step.key), record._asdict())
        records[step.key] = record
        progress("study steps", len(labels) - len(waiting) - len(running), len(labels))

    with session.connect(run.resources, dashboard=run.resources.train_workers > 0) as info, StagePool(info) as pool:
        progress("study steps", 0, len(labels))
        while waiting or running:
            step = _next_step(waiting, records, [one.step for one in running.values()], at_once)
            if step is None:
                own = running.pop(pool.wait())
                with _name_failed_step(own.step, labels):
                    report = pool.report(own.step.key)
                finish(own, report)
                continue
            waiting.remove(step)
            lane = min(set(range(at_once)) - {one.lane for one in running.values()})
            own = _RunningStep(step, lane, time.monotonic(), _input_digests(step))
            log.info("study step: key=%s stage=%s command=%s", step.key, step.stage, step.command)
            with _name_failed_step(step, labels):
                if step.stage != "prepare":
                    _restore_corpus(plan, step, store, progress)
                    _make_live(step, records)
                    _start(step, pool, progress if at_once == 1 else _in_lane(progress, lane))
                    running[step.key] = own
                    continue
                report = _prepare(step, store, progress)  # here: its files may exist only on this machine
            finish(own, report)
    return records


def code_version() -> str:
    """Return the version, with the commit where the package is in the root of a repository, and whether the package's
    files are others than those of the commit."""
    package = Path(__file__).resolve().parent.parent
    try:
        root, commit = _git_lines(package, "rev-parse", "--show-toplevel", "--short", "HEAD")
        has_changes = _git_lines(package, "status", "--porcelain", ".")
    except (OSError, subprocess.CalledProcessError):  # without git, or in no repository
        return __version__
    if Path(root).resolve() != package.parent:
        return __version__
    return f"{__version__} (commit {commit}{' with changes' if has_changes else ''})"


def _git_lines(folder: Path, *words: str) -> list[str]:
    """Run git in a folder; returns the lines that it prints."""
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.splitlines()


def hardware() -> str:
    """Describe the GPUs, else the processor's cores and name."""
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{os.cpu_count()} cores, {names[0] if names else platform.machine()}, no GPU"


@contextmanager
def _name_failed_step(step: PlannedStep, labels: dict[str, str]) -> Iterator[None]:
    """Convert the errors of a block to StudyError with the step's name."""
    try:
        yield
    except MvrRayError as error:
        raise StudyError(
            f"{labels[step.key]} failed: {step.command}: {error}; correct it and run the same command again, finished "
            f"steps are kept"
        ) from error


def _start(step: PlannedStep, pool: StagePool, progress: Progress) -> None:
    """Start the step's work on a worker."""
    gpus = step.run.resources.gpus_per_encoder if step.stage == "cost" else 0  # stages request GPUs for their workers
    work = partial(MEASURES[step.stage], options=step.options) if step.stage in MEASURES else STAGES[step.stage]
    pool.start(step.key, work, step.run, with_metrics(step.stage, step.run.index.name, progress), gpus)


def _next_step(
    waiting: list[PlannedStep], records: Mapping[str, StepRecord], running: list[PlannedStep], at_once: int
) -> PlannedStep | None:
    """Return the first step that can start now beside the running ones, if any.

    Sizes and variants may prepare different corpora under one name: their steps do not run concurrently.
    """
    if len(running) >= at_once or any(RULES[step.stage].alone for step in running):
        return None
    indexes = {step.run.index.name for step in running if RULES[step.stage].uses_version}
    corpora = {step.run.prepare.corpus: step.corpus for step in running}
    for step in waiting:
        rule = RULES[step.stage]
        is_ready = all(key in records for key in step.after) and not (running and rule.alone)
        index_free = not rule.uses_version or step.run.index.name not in indexes
        if is_ready and index_free and corpora.get(step.run.prepare.corpus, step.corpus) == step.corpus:
            return step
    return None


def _in_lane(progress: Progress, lane: int) -> Progress:
    """Prefix progress lines with the lane's number, for concurrent steps."""
    return lambda what, count, total: progress(f"lane {lane + 1}: {what}", count, total)


def read_records(plan: StudyPlan, store: Store) -> dict[str, StepRecord]:
    """Read the records of the finished steps, by key."""
    contents = {key: _read_json(store, paths.study_step(key)) for key in plan.steps}
    return {key: StepRecord(**fields) for key, fields in contents.items() if fields}


def plan_over_sources(study: Study, store: Store) -> StudyPlan:
    """Plan a study; steps that read other files than those of their records, and the steps after them, are others."""
    plan, changes = plan_study(study), dict[str, list[str]]()
    while new := {key: digests for key, digests in changed_sources(plan, store).items() if key not in changes}:
        changes |= new
        plan = plan_study(study, changes)
    return plan


def changed_sources(plan: StudyPlan, store: Store) -> dict[str, list[str]]:
    """Return the digests of the files that finished steps read and that have changed since, by key. Files that are not
    on this machine, or whose corpus was collected, count as unchanged."""
    changes: dict[str, list[str]] = {}
    readers = {key: step for key, step in plan.steps.items() if step.stage == "prepare" or RULES[step.stage].reads}
    for key, record in read_records(StudyPlan(readers), store).items():
        cfg = readers[key].run.prepare
        if record.stage != "prepare":
            digests = _input_digests(readers[key])
            if record.inputs and digests and digests != record.inputs:
                changes[key] = digests
            continue
        try:
            before = Corpus.open(store, cfg.corpus, record.report["digest"]).info.sources
            digests = [source.sha256 for source in describe_sources(cfg)]
        except (MissingInputError, StorageError):
            continue
        if digests != [source.sha256 for source in before]:
            changes[key] = digests
    return changes


def _input_digests(step: PlannedStep) -> list[str]:
    """Return the digests of the file or folder that a step's setting names, in order of names without hidden ones; none
    where it is not on this machine, or names something else, such as a model of a hub."""
    setting = RULES[step.stage].reads
    name = operator.attrgetter(setting)(step.run) if setting else None
    if not name:
        return []
    try:
        path = resolve_path(name)
        files = [one for one in sorted(path.rglob("*")) if one.is_file() and "/." not in f"/{one.relative_to(path)}"]
        return [cached_sha256_of(one) for one in (files if path.is_dir() else [path])]
    except (ConfigError, OSError):
        return []


def _read_json(store: Store, path: str) -> dict[str, Any]:
    """Read the fields of a file; empty where it does not exist, or is damaged: what it records runs again."""
    if not store.exists(path):
        return {}
    data = store.read_bytes(path)
    try:
        return parse_json(data, store.where(path), "what it records runs again")
    except StorageError as error:
        log.warning("%s", error)
        return {}


def _write_json(store: Store, path: str, fields: Mapping[str, Any]) -> None:
    store.write_bytes(path, (json.dumps(json_with_checksum(to_plain(fields))) + "\n").encode())


def _prepare(step: PlannedStep, store: Store, progress: Progress) -> Any:
    report = to_plain(STAGES["prepare"](step.run, progress))
    marker = {"key": step.key, "digest": report["digest"]}
    _write_json(store, paths.study_corpus(step.run.prepare.corpus), marker)
    return report


def _restore_corpus(plan: StudyPlan, step: PlannedStep, store: Store, progress: Progress) -> None:
    """Prepare a step's corpus again where another corpus of its name has replaced it, such as that of another size."""
    name = step.run.prepare.corpus
    marker = _read_json(store, paths.study_corpus(name))
    try:
        digest = Corpus.open(store, name).digest
    except MissingInputError:
        digest = None
    if marker.get("key") != step.corpus or marker.get("digest") != digest:
        _prepare(plan.steps[step.corpus], store, progress)


def _make_live(step: PlannedStep, records: Mapping[str, StepRecord]) -> None:
    """Roll the index back to the version that a step needs: refinements of several variants all begin at the first
    version, and each is measured at its own."""
    if not RULES[step.stage].uses_version:
        return
    store, name = Store(step.run.store.path), step.run.index.name
    if not manifest.list_versions(store, name):
        return
    publication = records[step.refinement].report["published"] if step.refinement else None
    number = publication["version"] if publication else 1
    if manifest.read(store, name).content_digest() != manifest.read(store, name, number).content_digest():
        versions.act(step.run, "rollback", number)
