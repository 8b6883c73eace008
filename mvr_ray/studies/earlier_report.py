"""Read the steps of a study's report, to continue a report that was made over another store.

A report contains the reports of its steps, but not their encoders and indexes. So a variant counts as finished where
the report has all its steps; all steps of other variants run.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mvr_ray.distributed.analyze import ALL_VIEWS, ANSWER_VIEW
from mvr_ray.errors import ConfigError, DataError
from mvr_ray.store.formats.question_ranks import QUESTION_RANKS, QuestionRanks, read_question_ranks
from mvr_ray.store.formats.question_views import QUESTION_VIEWS, QuestionViews, read_question_views
from mvr_ray.studies.definition import Study
from mvr_ray.studies.execute import StepRecord
from mvr_ray.studies.report import ANSWERS
from mvr_ray.studies.results import curve_system_name, system_name, view_system_name
from mvr_ray.studies.steps import StudyPlan

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
    ranks, answers = _ranks(folder / QUESTION_RANKS), _answers(folder / ANSWERS)
    views = read_question_views(folder / QUESTION_VIEWS) if (folder / QUESTION_VIEWS).exists() else {}
    for run in plan.variants:
        for key in run.keys:
            if key not in records:
                continue
            report = records[key].report
            if records[key].stage == "reading":
                values = [answers.get((run.variant.name, one["questions"]), []) for one in report["sets"]]
                sets = [one | {"values": own} for one, own in zip(report["sets"], values, strict=True)]
                records[key] = records[key]._replace(report=report | {"sets": sets})
                if not all(map(_has_every_answer, sets)):
                    del records[key]
            elif records[key].stage == "analyze":
                complete = None if run.at else _analysis(report, run.variant.name, run.seed, ranks, views)
                if complete is None:
                    del records[key]
                else:
                    records[key] = records[key]._replace(report=complete)
            elif records[key].stage == "evaluate" and "ranks" not in report:
                own = {
                    row["system"]: curve_system_name(system_name(run.variant.name, row["system"]), run.at)
                    for row in report["rows"]
                }
                parts = [
                    part._replace(system=system)._asdict()
                    for system, name in own.items()
                    for part in ranks.get((name, run.seed), [])
                ]
                records[key] = records[key]._replace(report=report | {"ranks": parts})
    return {key: step for key, step in records.items() if key in plan.steps and step.stage in REPORTED_STAGES}


def _analysis(
    report: dict[str, Any],
    variant: str,
    seed: int,
    ranks: Mapping[tuple[str, int], Sequence[QuestionRanks]],
    views: Mapping[tuple[str, int], Sequence[QuestionViews]],
) -> dict[str, Any] | None:
    """Return an analysis with its ranks and values of every question; None where the report's files lack some."""
    systems = list(dict.fromkeys(row["system"] for row in report["rows"]))
    if any("answer_view/" in row["metric"] for row in report["rows"]):
        systems.append(ANSWER_VIEW)
    names = {system: (view_system_name(variant, system), seed) for system in systems}
    values = views.get((variant, seed), [])
    has_several_views = not {*systems} <= {ALL_VIEWS, ANSWER_VIEW}  # an index of one view has no values to store
    if any(name not in ranks for name in names.values()) or (has_several_views and not values):
        return None
    parts = [part._replace(system=system)._asdict() for system, name in names.items() for part in ranks[name]]
    return report | {"ranks": parts, "values": [row._asdict() for row in values]}


def _answers(path: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Read the answers of a report by variant and question set; empty without answers."""
    answers: dict[tuple[str, str], list[dict[str, Any]]] = {}
    try:
        for row in pq.read_table(path).to_pylist() if path.exists() else []:
            answers.setdefault((row["system"], row["questions"]), []).append(row)
    except (OSError, pa.ArrowException, KeyError) as error:
        raise DataError(f"{path}: no answers of a report ({error!r}); leave earlier= out") from None
    return answers


def _has_every_answer(question_set: dict[str, Any]) -> bool:
    """Whether there is one answer a question and number of passages: a report does not store the seed of an answer."""
    return len(question_set["values"]) == question_set["asked"] * len({row["passages"] for row in question_set["rows"]})


def _ranks(path: Path) -> dict[tuple[str, int], list[QuestionRanks]]:
    """Read the ranks of a report by system and seed; empty without ranks."""
    ranks: dict[tuple[str, int], list[QuestionRanks]] = {}
    try:
        for part in read_question_ranks(path) if path.exists() else []:
            ranks.setdefault((part.system, part.seed), []).append(part)
    except DataError as error:
        raise DataError(f"{error}; make the report again, or leave earlier= out") from None
    return ranks
