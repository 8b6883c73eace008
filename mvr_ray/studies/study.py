"""Run a study from its file to its report: plan the steps, run the unfinished ones, write the report."""

import logging
from pathlib import Path
from typing import NamedTuple

from mvr_ray.errors import ConfigError
from mvr_ray.store import paths
from mvr_ray.store.files import Store
from mvr_ray.store.local_files import finished_file
from mvr_ray.studies.definition import load_study
from mvr_ray.studies.earlier_report import read_report
from mvr_ray.studies.execute import plan_over_sources, read_records, run_plan
from mvr_ray.studies.report import make_report
from mvr_ray.studies.tables import Table
from mvr_ray.types import Progress, no_progress

log = logging.getLogger(__name__)


class StudyResult(NamedTuple):
    """The result of a study. `folder` holds the report: in the store, or under `output`."""

    study: str
    size: str
    variants: int
    steps: int
    folder: str
    tables: list[Table]


def run_study(
    path: str | Path,
    size: str = "quick",
    extra: tuple[str, ...] = (),
    output: Path | None = None,
    progress: Progress = no_progress,
    at_once: int | None = None,
    only: str = "",
    earlier: Path | None = None,
) -> StudyResult:
    """Run a study in one size; the same command again runs only the missing steps.

    `only`: run the variants whose name matches this regular expression. The report has every variant with finished
    steps, and names the others.

    `earlier`: the folder of a report of this study and size, made over another store. Its variants do not run, and the
    new report includes them.

    `output` receives a copy of the report, in a folder named by study and size. `at_once`: concurrent steps, in place
    of the size's number. Raises ConfigError, DataError, StudyError.
    """
    if at_once is not None and at_once < 1:
        raise ConfigError(f"at_once is {at_once}; at least one step must run")
    study = load_study(path, size, extra)
    store = Store(study.run.store.path)
    plan = plan_over_sources(study, store)
    earlier_records = read_report(earlier, study, plan) if earlier else {}
    part = plan.part(only)
    part = part.of([run for run in part.variants if not earlier_records.keys() >= {*run.keys}])
    records = run_plan(part, store, study.run, progress, at_once or study.at_size.at_once)
    report = make_report(study, plan, earlier_records | records | read_records(plan, store))
    folder = paths.study_report_dir(study.config.study, size)
    for name, data in report.files.items():
        store.write_bytes(f"{folder}/{name}", data)
    location = store.where(folder)
    if output is not None:
        target = output / f"{study.config.study}-{size}"
        for name, data in report.files.items():
            with finished_file(target / name) as aside:
                aside.write_bytes(data)
        location = str(target)
    log.info("study done: study=%s size=%s steps=%d folder=%s", study.config.study, size, len(plan.steps), location)
    return StudyResult(study.config.study, size, len(plan.variants), len(plan.steps), location, report.tables)
