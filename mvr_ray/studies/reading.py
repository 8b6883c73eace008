"""What refinement is worth to a reader downstream (AOpt table 4): rank question sets, read the answers, judge them.

Options of the step: `questions`, the names of stored sets; else those of `evaluate.questions`.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from mvr_ray.config import RunConfig
from mvr_ray.distributed.read import ReadRow, read
from mvr_ray.distributed.retrieve import retrieve
from mvr_ray.errors import ConfigError
from mvr_ray.store.files import Store
from mvr_ray.types import Progress, no_progress


class SetRead(NamedTuple):
    """One question set's answers: how many were asked, and exact match and F1 from the first passages."""

    questions: str
    asked: int
    rows: list[ReadRow]


class ReadingReport(NamedTuple):
    index: str
    version: int
    reader: str
    sets: list[SetRead]


def reading(
    run: RunConfig, progress: Progress = no_progress, options: Mapping[str, Any] | None = None
) -> ReadingReport:
    """Read what the live version ranks. Raises ConfigError without question sets; else as `retrieve` and `read` do."""
    names = (options or {}).get("questions", run.evaluate.questions)
    if not names:
        raise ConfigError("reading needs question sets; name some in the step's options or in evaluate.questions")
    ranking_run = run.model_copy(
        update={"retrieve": run.retrieve.model_copy(update={"k": max(run.read.top_passages, default=1)})}
    )
    sets = []
    with Store(run.store.path).scratch() as folder:
        for name in names:
            file = folder / f"{name}.jsonl"
            found = retrieve(ranking_run, name, file, "jsonl", progress)
            report = read(run, file, progress=progress)
            sets.append(SetRead(name, report.questions, report.rows))
    return ReadingReport(found.index, found.version, report.fingerprint, sets)
