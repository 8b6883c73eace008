"""Read the ids of the passages in a ranking of any program: TREC run, DPR's or pyserini's JSON, JSON lines, Parquet."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mvr_ray.errors import ConfigError, DataError
from mvr_ray.store.formats.question_ranks import read_question_ranks
from mvr_ray.store.formats.rankings import PARQUET_SCHEMA, ranking_rows
from mvr_ray.store.formats.text_files import plain_name
from mvr_ray.store.formats.training_rows import context_id
from mvr_ray.store.formats.trec import read_trec_run


class QuestionHits(NamedTuple):
    """Id and text of a question in a ranking file, None where the file has none, and its hits with "bears an answer",
    best first. The text is without blanks at its ends, as stored questions are."""

    id: str | None
    text: str | None
    hits: list[tuple[str, bool | None]]

    def require_distinct(self, path: Path | str) -> None:
        """Raise DataError if a passage stands twice among the hits."""
        ids = [passage_id for passage_id, _ in self.hits]
        if len(ids) > len(set(ids)):
            twice, name = next(one for one in ids if ids.count(one) > 1), self.text if self.id is None else self.id
            raise DataError(f"{path}: question {name!r} ranks passage {twice!r} twice; keep the better rank")


def is_trec_run(name: str) -> bool:
    """Return whether a file of this name is read as a TREC run; an ending of compressed files does not count."""
    return plain_name(Path(name)).suffix.lower() not in (".parquet", ".jsonl", ".json")


def read_ranked_ids(path: Path) -> list[QuestionHits]:
    """Read the questions of a ranking file with their hits. Raises DataError for another kind of file."""
    if not path.is_file():
        raise DataError(f"ranking {path} does not exist; make one with `mvr-ray retrieve CONFIG ... output={path}`")
    read = _parquet if path.suffix.lower() == ".parquet" else _trec if is_trec_run(path.name) else _json
    rows = list(read(path))
    if not rows:
        raise DataError(f"ranking {path} holds no question")
    return rows


def rows_by_id(rows: Iterable[QuestionHits], path: Path | str) -> dict[str, QuestionHits]:
    """Map rows with ids by them. Raises DataError where a question stands twice, as in a file of two question sets that
    number their questions alike."""
    row_of: dict[str, QuestionHits] = {}
    for row in rows:
        if row_of.setdefault(str(row.id), row) is not row:
            raise DataError(f"{path} ranks question {row.id!r} twice; give each question set a file of its own")
    return row_of


def _trec(path: Path) -> Iterator[QuestionHits]:
    """Order hits as trec_eval: by the score in 32 bits, then by id, both descending; it ignores ranks."""
    rankings: dict[str, list[tuple[np.float32, str]]] = {}
    for line in read_trec_run(path):
        rankings.setdefault(line.question_id, []).append((np.float32(line.score), line.passage_id))
    for question, hits in rankings.items():
        yield QuestionHits(question, None, [(passage, None) for _, passage in sorted(hits, reverse=True)])


def _parquet(path: Path) -> Iterator[QuestionHits]:
    columns = ["question_id", "question", "rank", "passage_id", "has_answer"]
    schema = pa.schema([PARQUET_SCHEMA.field(name) for name in columns])
    try:
        names = pq.read_schema(path).names
        if "gold_rank" in names:
            systems = ", ".join(sorted({part.system for part in read_question_ranks(path)}))
            raise ConfigError(
                f"{path} holds the ranks of systems, no passages; `mvr-ray compare` takes {path}:SYSTEM, one of "
                f"{systems}"
            )
        if missing := [name for name in columns if name not in names]:
            raise DataError(f"{path} is not a Parquet ranking of `mvr-ray retrieve`: it has no column {missing[0]!r}")
        table = pq.read_table(path, columns=columns).select(columns).cast(schema).sort_by("rank")
        table.validate(full=True)  # text is UTF-8
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} is not a Parquet ranking of `mvr-ray retrieve`: {error}") from None
    if missing := [name for name in ("question_id", "rank", "passage_id") if table[name].null_count]:
        raise DataError(f"{path} has a row without {missing[0]}; give each hit one")
    rows: dict[str, QuestionHits] = {}
    for row in table.to_pylist():
        text = row["question"]
        own = rows.setdefault(row["question_id"], QuestionHits(row["question_id"], text and text.strip(), []))
        own.hits.append((row["passage_id"], row["has_answer"]))
    yield from rows.values()


def _json(path: Path) -> Iterator[QuestionHits]:
    for row in ranking_rows(path):
        marks = [hit.get("has_answer") if row.get("answers") else None for hit in row["hits"]]
        hits = [(str(context_id(hit)), mark) for hit, mark in zip(row["hits"], marks)]
        yield QuestionHits(None if row.get("id") is None else str(row["id"]), row["question"].strip(), hits)
