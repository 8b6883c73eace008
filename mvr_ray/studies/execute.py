"""Run the steps of a study on a cluster; what is on file is not run again.

Each step is a task that calls the stage's own function, so it runs wherever the cluster has room and a step whose
worker dies is started again; the stages themselves continue where they stopped. A finished step's report lies in the
store under its key. `at_once` steps run side by side: a step waits for those that it stands on, and for one that looks
at the same index, whose live version both may want to set.
"""

import json
import logging
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mvr_ray import __version__, versions
from mvr_ray.config import RunConfig
from mvr_ray.distributed import session
from mvr_ray.distributed.stage_pool import StagePool
from mvr_ray.errors import MvrRayError, StudyError
from mvr_ray.stages import STAGES
from mvr_ray.store import manifest, paths
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.runs import to_plain
from mvr_ray.studies.cost import cost
from mvr_ray.studies.entities import entity_frequency
from mvr_ray.studies.reading import reading
from mvr_ray.studies.refinement import refinement_grid
from mvr_ray.studies.steps import PlannedStep, StudyPlan
from mvr_ray.types import Progress, no_progress

log = logging.getLogger(__name__)

MEASURES: dict[str, Callable[..., Any]] = {
    "cost": cost,
    "refinement_grid": refinement_grid,
    "reading": reading,
    "entity_frequency": entity_frequency,
}
"""What studies do beyond the stages."""
_AT_A_VERSION = ("refine", "evaluate", "analyze", "cost", "refinement_grid", "mine", "reading", "entity_frequency")
"""They look at an index as it is at one version, and so need that version live."""
_ALONE = ("prepare", "cost")
"""One lays down what others read, the other reads the clock."""


class StepRecord(NamedTuple):
    """A finished step: its command as typed, how long it took, its report as plain values, and when and by which
    version of the code it was run. The key does not cover the code: a step that is on file is not run again for it."""

    key: str
    stage: str
    command: str
    seconds: float
    report: dict[str, Any]
    date: str = ""
    version: str = ""


class _Running(NamedTuple):
    """A step that runs since `began`. Its progress stands under a lane's number."""

    step: PlannedStep
    lane: int
    began: float


def run_plan(
    plan: StudyPlan, store: Store, run: RunConfig, progress: Progress = no_progress, at_once: int = 1
) -> dict[str, StepRecord]:
    """Run what is not on file, `at_once` steps side by side where none needs the other; every step's result by key.

    Raises StudyError naming the step that failed; those beside it are stopped and continue the next time.
    """
    done = {key: found for key in plan.steps if (found := read_step(store, key))}
    left = [step for step in plan.steps.values() if step.key not in done]
    if not left:
        return done
    places = {step.key: f"step {number} of {len(left)}" for number, step in enumerate(left, 1)}
    running: dict[str, _Running] = {}
    code = code_version()

    def finished(step: PlannedStep, began: float, report: dict[str, Any]) -> None:
        took = round(time.monotonic() - began, 1)
        made = StepRecord(step.key, step.stage, step.command, took, report, f"{datetime.now(UTC):%Y-%m-%d}", code)
        store.write_bytes(paths.study_step(step.key), (json.dumps(made._asdict()) + "\n").encode())
        done[step.key] = made
        progress("study steps", len(places) - len(left) - len(running), len(places))

    with session.connect(run.resources, dashboard=run.resources.train_workers > 0) as info, StagePool(info) as pool:
        progress("study steps", 0, len(places))
        while left or running:
            step = _next(plan, left, done, [one.step for one in running.values()], at_once)
            if step is None:
                ended = running.pop(pool.wait())
                with _name_failed_step(ended.step, places):
                    report = pool.report(ended.step.key)
                finished(ended.step, ended.began, report)
                continue
            left.remove(step)
            log.info("study step: key=%s stage=%s command=%s", step.key, step.stage, step.command)
            began = time.monotonic()
            with _name_failed_step(step, places):
                if step.stage == "prepare":  # it reads files that only this machine may have
                    finished(step, began, _prepare(step, store, progress))
                    continue
                _corpus_in_place(plan, step, store, progress)
                _make_live(step, done)
                lane = min(set(range(at_once)) - {one.lane for one in running.values()})
                _start(step, pool, progress if at_once == 1 else _in_lane(progress, lane))
                running[step.key] = _Running(step, lane, began)
    return done


def code_version() -> str:
    """The version, and the commit where the code lies in a repository."""
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return f"{__version__} (commit {asked.stdout.strip()})" if asked.returncode == 0 else __version__


@contextmanager
def _name_failed_step(step: PlannedStep, places: dict[str, str]) -> Iterator[None]:
    """An error of a step says which step it was."""
    try:
        yield
    except MvrRayError as error:
        raise StudyError(
            f"{places[step.key]} failed: {step.command}: {error}; correct it and run the same command again, finished "
            f"steps are kept"
        ) from error


def _start(step: PlannedStep, pool: StagePool, progress: Progress) -> None:
    """Start the step's work on a worker."""
    gpus = step.run.resources.gpus_per_encoder if step.stage == "cost" else 0  # stages ask for their workers' own
    work = partial(MEASURES[step.stage], options=step.options) if step.stage in MEASURES else STAGES[step.stage]
    pool.start(step.key, work, step.run, progress, gpus)


def _next(
    plan: StudyPlan, left: list[PlannedStep], done: dict[str, StepRecord], running: list[PlannedStep], at_once: int
) -> PlannedStep | None:
    """The first step that can start now beside those that run, if one can.

    Sizes and variants may lay different corpora under one name: of those, one at a time.
    """
    if len(running) >= at_once or any(step.stage in _ALONE for step in running):
        return None
    taken = {step.run.index.name for step in running if step.stage in _AT_A_VERSION}
    corpora = {step.run.prepare.corpus: _corpus(plan, step) for step in running}
    for step in left:
        if not all(key in done for key in step.after):
            continue
        if step.stage in _ALONE:
            if not running:
                return step
            continue
        if step.stage in _AT_A_VERSION and step.run.index.name in taken:
            continue
        if corpora.get(step.run.prepare.corpus, _corpus(plan, step)) == _corpus(plan, step):
            return step
    return None


def _in_lane(progress: Progress, lane: int) -> Progress:
    """StageFunction side by side is told apart."""

    def tell(what: str, done: int, total: int) -> None:
        progress(f"lane {lane + 1}: {what}", done, total)

    return tell


def _prepare(step: PlannedStep, store: Store, progress: Progress) -> Any:
    report = to_plain(STAGES["prepare"](step.run, progress))
    marker = {"key": step.key, "digest": report["digest"]}
    store.write_bytes(paths.study_corpus(step.run.prepare.corpus), json.dumps(marker).encode())
    return report


def _corpus_in_place(plan: StudyPlan, step: PlannedStep, store: Store, progress: Progress) -> None:
    """Prepare a step's corpus again where another one has taken its place since, as another size of a study does."""
    needed = _corpus(plan, step)
    name = plan.steps[needed].run.prepare.corpus
    path = paths.study_corpus(name)
    marker = json.loads(store.read_bytes(path)) if store.exists(path) else {}
    there = Corpus.open(store, name).digest if store.exists(paths.corpus_json(name)) else None
    if marker.get("key") != needed or marker.get("digest") != there:
        _prepare(plan.steps[needed], store, progress)


def _corpus(plan: StudyPlan, step: PlannedStep) -> str:
    """The key of the `prepare` step that made what a step stands on."""
    [needed] = {key for key in plan.ancestors(step.key) if plan.steps[key].stage == "prepare"}
    return needed


def read_step(store: Store, key: str) -> StepRecord | None:
    path = paths.study_step(key)
    return StepRecord(**json.loads(store.read_bytes(path))) if store.exists(path) else None


def _make_live(step: PlannedStep, done: dict[str, StepRecord]) -> None:
    """Variants that refine one index each begin at its first version, and are measured at the one that they made."""
    if step.stage not in _AT_A_VERSION:
        return
    store, name = Store(step.run.store.path), step.run.index.name
    numbers = manifest.list_versions(store, name)
    if not numbers:
        return
    wanted = 1
    if step.refined is not None:
        published = done[step.refined].report["published"]
        wanted = published["version"] if published else 1
    live = manifest.read(store, name)
    if live.content_digest() != manifest.read(store, name, wanted).content_digest():
        versions.act(step.run, "rollback", wanted)
