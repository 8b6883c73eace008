"""Read the steps of a study's report, to continue a report that was made over another store.

A report contains the reports of its steps, but not their encoders and indexes. So a variant counts as finished where
the report has all its steps; all steps of other variants run.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mvr_ray.distributed.analyze import ALL_VIEWS, ANSWER_VIEW
from mvr_ray.distributed.evaluate import BM25_SYSTEM
from mvr_ray.errors import ConfigError, DataError
from mvr_ray.store.formats.question_ranks import QUESTION_RANKS, QuestionRanks, read_question_ranks
from mvr_ray.store.formats.question_views import QUESTION_VIEWS, read_question_views
from mvr_ray.store.runs import to_plain
from mvr_ray.studies.definition import BM25, Study
from mvr_ray.studies.execute import StepRecord
from mvr_ray.studies.report import ANSWERS
from mvr_ray.studies.results import Report, bm25_name, curve_system_name, system_name, view_system_name
from mvr_ray.studies.steps import PlannedVariant, StudyPlan

REPORTED_STAGES = frozenset({"prepare", "train", "mine", "index", "refine", "evaluate", "analyze", "reading"})
"""Stages whose reports are complete in a study's report, with its files of ranks, answers and views."""


def read_report(folder: Path, study: Study, plan: StudyPlan) -> dict[str, StepRecord]:
    """Read the records of the plan's steps from a report in `folder`, by key.

    Raises ConfigError where there is no report of this study and size, DataError where its ranks cannot be read.
    """
    path = folder / "report.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        report_id = content["study"], content["size"]
        machine = {"hardware": content["facts"]["hardware"]}
        records = {step["key"]: StepRecord(**machine | step) for step in content["steps"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"earlier={folder}: no study's report is there ({error!r}); name the folder of one") from None
    if report_id != (study.config.study, study.size):
        raise ConfigError(
            f"earlier={folder} is the report of study {report_id[0]}, size {report_id[1]}; name one of study "
            f"{study.config.study}, size {study.size}"
        )
    files = _QuestionFiles(folder)
    for run in plan.variants:
        for key in run.keys:
            if key in records:
                report = files.complete(records[key], run)
                if report is None:
                    del records[key]
                else:
                    records[key] = records[key]._replace(report=report)
    return {key: step for key, step in records.items() if key in plan.steps and step.stage in REPORTED_STAGES}


class _QuestionFiles:
    """The values of every question in a report's files: ranks and views by system and seed, answers by system and
    question set. A file that does not exist has none. Raises DataError for another kind of file."""

    def __init__(self, folder: Path) -> None:
        self.ranks: dict[tuple[str, int], list[QuestionRanks]] = defaultdict(list)
        self.answers: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        ranks, answers, views = (folder / name for name in (QUESTION_RANKS, ANSWERS, QUESTION_VIEWS))
        try:
            for part in read_question_ranks(ranks) if ranks.exists() else ():
                self.ranks[part.system, part.seed].append(part)
        except DataError as error:
            raise DataError(f"{error}; make the report again, or leave earlier= out") from None
        try:
            for row in pq.read_table(answers).to_pylist() if answers.exists() else ():
                self.answers[row["system"], row["questions"]].append(row)
        except (OSError, pa.ArrowException, KeyError) as error:
            raise DataError(f"{answers}: no answers of a report ({error!r}); leave earlier= out") from None
        self.views = read_question_views(views) if views.exists() else {}

    def complete(self, record: StepRecord, run: PlannedVariant) -> Report | None:
        """Return a step's report with the values of every question; None where the files lack some."""
        report, variant = record.report, run.variant.name
        match record.stage:
            case "reading":  # a report does not store the seed of an answer
                sets = [one | {"values": self.answers[variant, one["questions"]]} for one in report["sets"]]
                sizes = [one["asked"] * len({row["passages"] for row in one["rows"]}) for one in sets]
                is_complete = sizes == [len(one["values"]) for one in sets]
                return report | {"sets": sets} if is_complete else None
            case "analyze":
                return self._analysis(report, variant, run.seed) if not run.at else None
            case "evaluate" if "ranks" not in report:
                systems = {row["system"]: system_name(variant, row["system"]) for row in report["rows"]}
                names = {system: curve_system_name(name, run.at) for system, name in systems.items()}
                if (bm25_name(variant), run.seed) in self.ranks:
                    names[BM25_SYSTEM] = bm25_name(variant)
                own_names = {names[system] for system, name in systems.items() if name != BM25}  # BM25 has one seed
                if any((name, run.seed) not in self.ranks for name in own_names):
                    return None
                return report | {"ranks": self._ranks_of(names, run.seed)}
        return report

    def _analysis(self, report: Report, variant: str, seed: int) -> Report | None:
        systems = dict.fromkeys(row["system"] for row in report["rows"])
        if any("answer_view/" in row["metric"] for row in report["rows"]):
            systems[ANSWER_VIEW] = None
        names = {system: view_system_name(variant, system) for system in systems}
        values = self.views.get((variant, seed), [])
        has_several_views = not {*systems} <= {ALL_VIEWS, ANSWER_VIEW}  # an index of one view has no values to store
        if any((name, seed) not in self.ranks for name in names.values()) or (has_several_views and not values):
            return None
        return report | {"ranks": self._ranks_of(names, seed), "values": [row._asdict() for row in values]}

    def _ranks_of(self, names: dict[str, str], seed: int) -> list[dict[str, Any]]:
        """Return the ranks of systems, each under its name in the step's report; `names` are those in the file."""
        return [
            to_plain(part._replace(system=system))
            for system, name in names.items()
            for part in self.ranks.get((name, seed), ())
        ]
