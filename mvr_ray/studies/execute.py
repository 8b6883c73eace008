"""The steps of a study, run one by one on Ray: what is on file is not run again.

Each step is a Ray task that calls the stage's own function, so it runs wherever the cluster has room and a step whose
worker dies is started again; the stages themselves continue where they stopped. A finished step's report lies in the
store under its key.
"""

import json
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from mvr_ray import versions
from mvr_ray.config import RunConfig
from mvr_ray.distributed import session
from mvr_ray.distributed.relay import on_a_worker
from mvr_ray.errors import MvrRayError, StudyError
from mvr_ray.stages import STAGES
from mvr_ray.store import layout, manifest
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.runs import to_plain
from mvr_ray.studies.cost import cost
from mvr_ray.studies.reading import reading
from mvr_ray.studies.refinement import refinement_grid
from mvr_ray.studies.steps import PlannedStep, StudyPlan
from mvr_ray.types import Progress, no_progress

log = logging.getLogger(__name__)

MEASURES: dict[str, Callable[..., Any]] = {
    "cost": cost,
    "refinement_grid": refinement_grid,
    "reading": reading,
}
"""What studies do beyond the stages."""


class DoneStep(NamedTuple):
    """A finished step: its command as typed, how long it took, and its report as plain values."""

    key: str
    stage: str
    command: str
    seconds: float
    report: dict[str, Any]


def run_plan(plan: StudyPlan, store: Store, run: RunConfig, progress: Progress = no_progress) -> dict[str, DoneStep]:
    """Run what is not on file; every step's result by key. Raises StudyError naming the step that failed."""
    done = {key: found for key in plan.steps if (found := read_step(store, key))}
    left = [step for step in plan.steps.values() if step.key not in done]
    if not left:
        return done
    with session.connect(run.resources, dashboard=run.resources.train_workers > 0):
        for number, step in enumerate(left):
            progress("study steps", number, len(left))
            log.info("study step: key=%s stage=%s command=%s", step.key, step.stage, step.command)
            if step.stage != "prepare":
                _corpus_in_place(plan, step, store, progress)
            _make_live(step, done)
            began = time.monotonic()
            try:
                report = _run(step, progress)
            except MvrRayError as error:
                raise StudyError(
                    f"step {number + 1} of {len(left)} failed: {step.command}: {error}; correct it and run the same "
                    f"command again, finished steps are kept"
                ) from error
            finished = DoneStep(step.key, step.stage, step.command, round(time.monotonic() - began, 1), report)
            store.write_bytes(layout.study_step(step.key), (json.dumps(finished._asdict()) + "\n").encode())
            done[step.key] = finished
        progress("study steps", len(left), len(left))
    return done


def _run(step: PlannedStep, progress: Progress) -> Any:
    """`prepare` reads files that only this machine may have; every other stage runs where there is room."""
    if step.stage == "prepare":
        return _prepare(step, Store(step.run.store.path), progress)
    work = MEASURES.get(step.stage)
    if work is not None:
        return on_a_worker(partial(work, options=step.options), step.run, progress)
    return on_a_worker(STAGES[step.stage], step.run, progress)


def _prepare(step: PlannedStep, store: Store, progress: Progress) -> Any:
    report = to_plain(STAGES["prepare"](step.run, progress))
    marker = {"key": step.key, "digest": report["digest"]}
    store.write_bytes(layout.study_corpus(step.run.prepare.corpus), json.dumps(marker).encode())
    return report


def _corpus_in_place(plan: StudyPlan, step: PlannedStep, store: Store, progress: Progress) -> None:
    """Prepare a step's corpus again where another one has taken its place since, as another size of a study does."""
    [needed] = {key for key in plan.ancestors(step.key) if plan.steps[key].stage == "prepare"}
    name = plan.steps[needed].run.prepare.corpus
    path = layout.study_corpus(name)
    marker = json.loads(store.read_bytes(path)) if store.exists(path) else {}
    there = Corpus.open(store, name).digest if store.exists(layout.corpus_json(name)) else None
    if marker.get("key") != needed or marker.get("digest") != there:
        _prepare(plan.steps[needed], store, progress)


def read_step(store: Store, key: str) -> DoneStep | None:
    path = layout.study_step(key)
    return DoneStep(**json.loads(store.read_bytes(path))) if store.exists(path) else None


def _make_live(step: PlannedStep, done: dict[str, DoneStep]) -> None:
    """Variants that refine one index each begin at its first version, and are measured at the one that they made."""
    if step.stage not in ("refine", "evaluate", "analyze", "cost", "refinement_grid", "mine", "reading"):
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
