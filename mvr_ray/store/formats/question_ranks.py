"""Store the ranks of every question by several systems as a Parquet file, to compare any two of them.

    system, seed, questions    which system, trained with which seed, on which question set
    question_id, article       articles group questions that are not independent (`metrics.cluster_interval`)
    answer_rank, gold_rank     rank of the first answer-bearing and of the first gold passage, from 0; -1: not among
                               the hits; null: the question has no answers, or no gold passages
    gold_ndcg                  nDCG@10 of the gold passages; null as for ranks, and where it was not computed

Shapes: Q questions.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from mvr_ray.errors import DataError
from mvr_ray.store.parts import parquet_bytes

QUESTION_RANKS = "questions.parquet"
"""Name of the file in the folder of a run and of a study's report."""
SCHEMA = pa.schema(
    [
        ("system", pa.dictionary(pa.int32(), pa.string())),
        ("seed", pa.int64()),
        ("questions", pa.dictionary(pa.int32(), pa.string())),
        ("question_id", pa.string()),
        ("article", pa.dictionary(pa.int32(), pa.string())),
        ("answer_rank", pa.int32()),
        ("gold_rank", pa.int32()),
        ("gold_ndcg", pa.float64()),
    ]
)


class QuestionRanks(NamedTuple):
    """One system on one question set. Every list has Q entries, in the set's order; `gold_ndcgs` may be empty."""

    system: str
    questions: str
    question_ids: Sequence[str]
    articles: Sequence[str]
    answer_ranks: Sequence[int | None]
    gold_ranks: Sequence[int | None]
    seed: int = 0
    gold_ndcgs: Sequence[float | None] = ()


def question_ranks_bytes(parts: Iterable[QuestionRanks]) -> bytes:
    """Write ranks as the bytes of a Parquet file, zstd-compressed; equal ranks give equal bytes."""
    rows = []
    for part in parts:
        ndcgs = part.gold_ndcgs or [None] * len(part.question_ids)
        columns = zip(part.question_ids, part.articles, part.answer_ranks, part.gold_ranks, ndcgs, strict=True)
        rows += ((part.system, part.seed, part.questions, *row) for row in columns)
    return parquet_bytes(rows, SCHEMA)


def read_question_ranks(path: Path) -> list[QuestionRanks]:
    """Read every system, seed and question set of a file. Raises DataError for another kind of file."""
    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} is not a Parquet file of question ranks: {error}") from None
    if "gold_ndcg" not in table.column_names:  # files of earlier versions
        table = table.append_column(SCHEMA.field("gold_ndcg"), pa.nulls(len(table), pa.float64()))
    if missing := [name for name in SCHEMA.names if name not in table.column_names]:
        raise DataError(f"{path} has no column {missing[0]!r}; a file of question ranks has {', '.join(SCHEMA.names)}")
    rows: dict[tuple[str, str, int], list[dict]] = {}
    for row in table.select(SCHEMA.names).to_pylist():
        rows.setdefault((row["system"], row["questions"], row["seed"]), []).append(row)
    return [
        QuestionRanks(
            system,
            questions,
            *([row[name] for row in own] for name in ("question_id", "article", "answer_rank", "gold_rank")),
            seed=seed,
            gold_ndcgs=[row["gold_ndcg"] for row in own] if any(row["gold_ndcg"] is not None for row in own) else (),
        )
        for (system, questions, seed), own in rows.items()
    ]


def reported_depth(path: Path) -> int:
    """Return the number of hits among which every rank of the file was looked for at least: the least over the steps of
    the report.json beside it of their deepest top-k. 0 where no report tells. Raises DataError for a damaged report."""
    report = path.with_name("report.json")
    if not report.is_file():
        return 0
    try:
        content = json.loads(report.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{report}, which tells how deep {path.name} is, is not JSON: {error}; restore it") from None
    steps = content.get("steps", [content]) if isinstance(content, dict) else []
    return min((max(ks) for step in steps if (ks := [*_cutoffs(step)])), default=0)


def _cutoffs(report: Any) -> Iterator[int]:
    """Yield every k for which a step's report has an accuracy: of `evaluate` and `analyze` in the names of metrics, of
    `entity_frequency` in a field of rows, of `refinement_grid` as keys."""
    if isinstance(report, list):
        for part in report:
            yield from _cutoffs(part)
    elif isinstance(report, dict):
        for name, value in report.items():
            if name == "metric" and "/top-" in value:
                yield int(value.rpartition("-")[2])
            elif name == "k" and isinstance(value, int):
                yield value
            elif name in ("answer", "gold") and isinstance(value, dict):
                yield from map(int, value)
            else:
                yield from _cutoffs(value)
