"""Measure the gain of a reader from refinement (AOpt table 4): rank question sets, read and score the answers.

Option of the step: `questions`, the names of stored sets (default: `evaluate.questions`).
"""

import json
from typing import NamedTuple

from mvr_ray.config import RunConfig
from mvr_ray.distributed.read import ReadRow, read
from mvr_ray.distributed.retrieve import retrieve
from mvr_ray.errors import ConfigError
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.questions import articles_of, read_questions
from mvr_ray.studies.definition import NO_OPTIONS, Options
from mvr_ray.types import Progress, no_progress


class QuestionReading(NamedTuple):
    """One question's answer from the first `passages`: exact match and F1 by SQuAD's rules."""

    id: str
    article: str
    passages: int
    exact_match: float
    f1: float


class SetReading(NamedTuple):
    """One question set's answers: the number of questions, exact match and F1 from the first passages, and every
    question's own."""

    questions: str
    asked: int
    rows: list[ReadRow]
    values: list[QuestionReading]


class ReadingReport(NamedTuple):
    index: str
    version: int
    reader: str
    sets: list[SetReading]


def reading(run: RunConfig, progress: Progress = no_progress, options: Options = NO_OPTIONS) -> ReadingReport:
    """Read answers from the passages that the live version ranks first.

    Raises ConfigError without question sets, and the errors of `retrieve` and `read`.
    """
    names = options.get("questions", run.evaluate.questions)
    if not names:
        raise ConfigError("reading needs question sets; name some in the step's options or in evaluate.questions")
    settings = run.retrieve.model_copy(update={"k": max(run.read.top_passages, default=1)})
    ranking_run = run.model_copy(update={"retrieve": settings})
    sets, store = [], Store(run.store.path)
    passages = Corpus.open(store, run.prepare.corpus)
    with store.scratch() as folder:
        for name in names:
            article_of = articles_of(read_questions(passages, name), passages)
            file, answers = folder / f"{name}.jsonl", folder / f"{name}-answers.jsonl"
            ranking = retrieve(ranking_run, name, file, "jsonl", progress)
            report = read(run, file, answers, progress, article_of)
            values = [
                QuestionReading(
                    row["id"],
                    article_of[row["id"]],
                    one["passages"],
                    float(bool(one["exact_match"])),
                    one["f1"] or 0.0,
                )
                for row in map(json.loads, answers.read_bytes().splitlines())  # of bytes: at line feeds alone
                for one in (row["predictions"] if row["answers"] else ())
            ]
            sets.append(SetReading(name, report.questions, report.rows, values))
    return ReadingReport(ranking.index, ranking.version, report.fingerprint, sets)
