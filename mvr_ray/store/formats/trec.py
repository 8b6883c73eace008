"""Read and write TREC files: runs and judgements.

trec_eval ignores ranks: it sorts by score (as a 32-bit float) and ties by id, descending. The run writer therefore
lowers a score that ties with the one above by the least amount that `%.6f` and 32 bits can show, so that trec_eval's
order is ours.
"""

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mvr_ray.errors import DataError, count_noun
from mvr_ray.store.formats.text_files import open_text

MILLION = 1_000_000
_SPACE = re.compile(r"\s")


class RunLine(NamedTuple):
    question_id: str
    passage_id: str
    score: float


def run_lines(question_id: str, hits: Iterable[tuple[str, float]], tag: str) -> Iterator[str]:
    """Yield the lines of one question's ranking, best first, ranks from 1."""
    above: int | None = None
    for rank, (passage_id, score) in enumerate(hits, 1):
        refuse_spaces(question_id, "question")
        refuse_spaces(passage_id, "passage")
        if not math.isfinite(score):
            raise DataError(f"question {question_id!r}: passage {passage_id!r} has score {score}, not a number")
        millionths = _below(above, round(float(score) * MILLION))
        yield f"{question_id} Q0 {passage_id} {rank} {millionths / MILLION:.6f} {tag}\n"
        above = millionths


def read_trec_run(path: Path) -> Iterator[RunLine]:
    """Read the lines of a run in the file's order; DataError names the first invalid one."""
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            parts = line.split()
            if not parts:
                continue
            if len(parts) != 6:
                problem = f"{path}:{number}: {count_noun(len(parts), 'column')}, not the 6 of a TREC run"
                raise DataError(f"{problem}; a ranking in another format ends in .json, .jsonl or .parquet")
            question_id, _, passage_id, rank, score, _ = parts
            try:
                int(rank)
                run_line = RunLine(question_id, passage_id, float(score))
                if math.isnan(run_line.score):  # no score is above or below it
                    raise ValueError
            except ValueError:
                raise DataError(f"{path}:{number}: rank {rank!r} or score {score!r} is not a number") from None
            yield run_line


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """Read judgements by question: TREC's four columns, or BEIR's three under a header line."""
    judgements: dict[str, dict[str, int]] = {}
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            parts = line.split("\t") if "\t" in line else line.split()
            parts = [part.strip() for part in parts]
            if not any(parts) or (number == 1 and len(parts) == 3 and not _is_number(parts[-1])):  # BEIR's header
                continue
            if len(parts) not in (3, 4):
                raise DataError(f"{path}:{number}: {count_noun(len(parts), 'column')}; qrels have 4, or 3 in BEIR")
            judgements.setdefault(parts[0], {})[parts[-2]] = _grade(parts[-1], f"{path}:{number}")
    return judgements


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _grade(text: str, where: str) -> int:
    """Read a grade, which is stored in 32 bits."""
    try:
        grade = float(text)
    except ValueError:
        grade = math.nan
    if not grade.is_integer() or not -(2**31) <= grade < 2**31:
        raise DataError(f"{where}: grade {text!r} is no whole number of 32 bits; multiply or round the grades")
    return int(grade)


def _below(above: int | None, millionths: int) -> int:
    """Find the highest number of millionths up to `millionths` that prints as less than `above`, also in 32 bits."""
    if above is None:
        return millionths
    lower = min(millionths, above - 1)
    limit = np.float32(above / MILLION)
    while np.float32(lower / MILLION) >= limit:
        lower -= max(1, int(abs(float(np.spacing(limit))) * MILLION) // 2)
    return lower


def refuse_spaces(id_: str, what: str) -> None:
    """Raise DataError for an id that no line of a run can hold. `what` has it: a question or passage."""
    if not id_ or _SPACE.search(id_):
        raise DataError(
            f"{what} id {id_!r} is empty or holds white space, which a TREC run cannot express; "
            f"write the ranking as dpr, jsonl or parquet, or give the source ids without white space"
        )
