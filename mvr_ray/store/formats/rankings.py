"""Write rankings as DPR reader JSON, TREC and MS MARCO runs, pyserini JSON, JSON lines and Parquet.

A file appears whole when its last row is written. Those with passages' texts, DPR's JSON and JSON lines, are read back
by `read_ranking`, row by row, whichever program wrote them.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mvr_ray.errors import DataError
from mvr_ray.store.files import finished_file
from mvr_ray.store.formats.dpr import context_id, question_id
from mvr_ray.store.formats.json_stream import JsonReader
from mvr_ray.store.formats.records import BadRow
from mvr_ray.store.formats.text_files import json_lines, open_text
from mvr_ray.store.formats.trec import run_lines
from mvr_ray.types import Question

RankingFormat = Literal["dpr", "trec", "msmarco", "pyserini", "jsonl", "parquet"]
PARQUET_QUESTIONS = 256
_TEXTS = "give a ranking with texts, as `mvr-ray retrieve` writes it with format=dpr or format=jsonl"


class RankedPassage(NamedTuple):
    """One hit with the fields of ranking files. `has_answer` None: the question's answers are not known."""

    id: str
    title: str
    text: str
    score: float
    has_answer: bool | None = None
    view: int = -1
    snippet: str = ""


class RankedQuestion(NamedTuple):
    """A question and its hits, best first."""

    question: Question
    passages: Sequence[RankedPassage]


PARQUET_SCHEMA = pa.schema(
    [
        ("question_id", pa.string()),
        ("question", pa.string()),
        ("rank", pa.int32()),
        ("passage_id", pa.string()),
        ("title", pa.string()),
        ("text", pa.string()),
        ("score", pa.float32()),
        ("has_answer", pa.bool_()),
        ("view", pa.int16()),
        ("snippet", pa.string()),
    ]
)


def write_ranking(
    rows: Iterable[RankedQuestion], path: Path, format: RankingFormat, *, tag: str = "mvr_ray", extras: bool = False
) -> int:
    """Write rankings as they come; returns how many questions there were.

    `extras` adds view and snippet to the DPR JSON, which DPR's own reader then refuses. `tag` names a TREC run.
    """
    if format not in get_args(RankingFormat):
        raise DataError(f"ranking format {format!r} is not known; there are {', '.join(get_args(RankingFormat))}")
    numbers = itertools.count()
    rows = (row for row, _ in zip(rows, numbers))
    with finished_file(path) as aside:
        if format == "parquet":
            _write_parquet(rows, aside)
        else:
            with aside.open("w", encoding="utf-8", newline="\n") as file:
                _text_writer(format, tag, extras)(rows, file)
    return next(numbers)


def read_ranking(path: Path, max_passages: int | None = None) -> Iterator[RankedQuestion]:
    """Read the questions of a DPR reader JSON or JSON lines file, each with its first `max_passages` passages.

    A title or text that the file lacks is empty, a score NaN. Raises DataError naming the row that is none.
    """
    if not path.is_file():
        raise DataError(f"ranking {path} does not exist; make one with `mvr-ray retrieve CONFIG ... output={path}`")
    number = -1
    with open_text(path) as file:
        for number, row in enumerate(_rows(file, path)):
            yield _parse_ranking(row, number, path, max_passages)
    if number < 0:
        raise DataError(f"ranking {path} holds no question")


def _rows(file: TextIO, path: Path) -> Iterator[Any]:
    reader = JsonReader(file, str(path))
    first = reader.peek()
    if first == "[":
        yield from reader.items()
        reader.finish()
    elif first in ("{", ""):
        for row in json_lines(path):
            if isinstance(row, BadRow):
                raise DataError(f"{row}; {_TEXTS}")
            yield row.values
    else:
        raise DataError(f"{path}: neither a JSON array nor JSON lines; {_TEXTS}")


def _parse_ranking(row: Any, number: int, path: Path, max_passages: int | None) -> RankedQuestion:
    where = f"{path}, entry {number + 1}"
    hits = row.get("ctxs", row.get("hits")) if isinstance(row, dict) else None
    if not isinstance(hits, list) or not isinstance(row.get("question"), str):
        raise DataError(f"{where}: no question with its ctxs or hits; {_TEXTS}")
    answers = row.get("answers") or []
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise DataError(f"{where}: answers is {answers!r:.60}, not a list of texts")
    passages = [_hit(hit, f"{where}, passage {at}") for at, hit in enumerate(hits[:max_passages], 1)]
    name = row.get("id")
    question = Question(question_id(path, number) if name is None else str(name), row["question"], tuple(answers))
    return RankedQuestion(question, passages)


def _hit(hit: Any, where: str) -> RankedPassage:
    if not isinstance(hit, dict):
        raise DataError(f"{where}: {hit!r:.60} is not a passage with id, title, text and score")
    title, text, score, mark = hit.get("title") or "", hit.get("text") or "", hit.get("score"), hit.get("has_answer")
    if not isinstance(title, str) or not isinstance(text, str):
        raise DataError(f"{where}: title {title!r:.40} or text {text!r:.40} is not a text")
    try:
        number = math.nan if score is None else float(score)
    except (TypeError, ValueError):
        raise DataError(f"{where}: score {score!r:.60} is not a number") from None
    return RankedPassage(str(context_id(hit)), title, text, number, mark if isinstance(mark, bool) else None)


def _text_writer(format: RankingFormat, tag: str, extras: bool) -> Callable[[Iterable[RankedQuestion], TextIO], None]:
    match format:
        case "dpr":
            return lambda rows, file: _write_dpr(rows, file, extras)
        case "trec":
            return lambda rows, file: _write_trec(rows, file, tag)
        case "msmarco":
            return _write_msmarco
        case "pyserini":
            return _write_pyserini
        case _:
            return _write_jsonl


def _write_dpr(rows: Iterable[RankedQuestion], file: TextIO, extras: bool) -> None:
    """Write an array of {question, answers, ctxs}; a ctx has exactly id, title, text, score (a text) and has_answer."""

    def context(hit: RankedPassage) -> dict[str, Any]:
        five = {
            "id": hit.id,
            "title": hit.title,
            "text": hit.text,
            "score": _float32_text(hit.score),
            "has_answer": bool(hit.has_answer),
        }
        return {**five, "view": hit.view, "snippet": hit.snippet} if extras else five

    separator = "[\n"
    for question, hits in rows:
        row = {"question": question.text, "answers": list(question.answers), "ctxs": [context(hit) for hit in hits]}
        file.write(separator + json.dumps(row, ensure_ascii=False, indent=4))
        separator = ",\n"
    file.write("[]\n" if separator == "[\n" else "\n]\n")


def _write_pyserini(rows: Iterable[RankedQuestion], file: TextIO) -> None:
    """Write an object by question id of {question, answers, contexts}; a context's text is title, newline, body."""
    separator = "{\n"
    for question, hits in rows:
        contexts = [
            {
                "docid": hit.id,
                "score": _float32_text(hit.score),
                "text": f"{hit.title}\n{hit.text}",
                "has_answer": bool(hit.has_answer),
            }
            for hit in hits
        ]
        row = {"question": question.text, "answers": list(question.answers), "contexts": contexts}
        file.write(f"{separator}{json.dumps(question.id)}: {json.dumps(row, ensure_ascii=False)}")
        separator = ",\n"
    file.write("{}\n" if separator == "{\n" else "\n}\n")


def _write_trec(rows: Iterable[RankedQuestion], file: TextIO, tag: str) -> None:
    for question, hits in rows:
        file.writelines(run_lines(question.id, ((hit.id, hit.score) for hit in hits), tag))


def _write_msmarco(rows: Iterable[RankedQuestion], file: TextIO) -> None:
    for question, hits in rows:
        for rank, hit in enumerate(hits, 1):
            if "\t" in question.id + hit.id or "\n" in question.id + hit.id:
                raise DataError(f"id {question.id!r} or {hit.id!r} holds a tab or newline; an MS MARCO run cannot")
            file.write(f"{question.id}\t{hit.id}\t{rank}\n")


def _write_jsonl(rows: Iterable[RankedQuestion], file: TextIO) -> None:
    for question, hits in rows:
        entries = [
            {
                "rank": rank,
                "id": hit.id,
                "title": hit.title,
                "text": hit.text,
                "score": float(_float32_text(hit.score)),
                "has_answer": hit.has_answer,
                "view": hit.view,
                "snippet": hit.snippet,
            }
            for rank, hit in enumerate(hits, 1)
        ]
        row = {"id": question.id, "question": question.text, "answers": list(question.answers), "hits": entries}
        file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _write_parquet(rows: Iterable[RankedQuestion], path: Path) -> None:
    with pq.ParquetWriter(path, PARQUET_SCHEMA) as writer:
        pending: list[tuple[Any, ...]] = []
        for number, (question, hits) in enumerate(rows, 1):
            for rank, hit in enumerate(hits, 1):
                place = (question.id, question.text, rank)
                pending.append((*place, hit.id, hit.title, hit.text, hit.score, hit.has_answer, hit.view, hit.snippet))
            if number % PARQUET_QUESTIONS == 0:
                _write_table(writer, pending)
                pending = []
        _write_table(writer, pending)


def _write_table(writer: pq.ParquetWriter, rows: list[tuple[Any, ...]]) -> None:
    if rows:
        columns = [pa.array(values, field.type) for values, field in zip(zip(*rows), PARQUET_SCHEMA)]
        writer.write_table(pa.table(columns, schema=PARQUET_SCHEMA))


def _float32_text(score: float) -> str:
    """Return the shortest text that reads back as the same 32-bit score."""
    return str(np.float32(score))
