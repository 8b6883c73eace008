"""Write rankings as DPR reader JSON, TREC and MS MARCO runs, pyserini JSON, JSON lines and Parquet.

A file appears whole when its last row is written. Those with passages' texts, the JSON files, are read back by
`read_ranking`, row by row, whichever program wrote them.
"""

import itertools
import json
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TextIO, get_args

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mvr_ray.errors import DataError, count_noun
from mvr_ray.store.formats.json_stream import JsonReader
from mvr_ray.store.formats.records import BadRow, question_id
from mvr_ray.store.formats.text_files import json_lines, open_text, plain_name
from mvr_ray.store.formats.training_rows import context_id
from mvr_ray.store.formats.trec import run_lines
from mvr_ray.store.local_files import finished_file
from mvr_ray.store.parts import to_columns
from mvr_ray.types import Question

log = logging.getLogger(__name__)
_encode = json.JSONEncoder(ensure_ascii=False).encode

RankingFormat = Literal["dpr", "trec", "msmarco", "pyserini", "jsonl", "parquet"]
FORMAT_OF_ENDING: dict[str, RankingFormat] = {".trec": "trec", ".jsonl": "jsonl", ".parquet": "parquet"}
HIT_FORMATS = ("trec", "msmarco", "parquet")
"""Formats of one row a hit, which cannot hold a question without any."""
PARQUET_QUESTIONS = 256
_NO_HITS = "[]\n}"
"""The end of an entry of DPR's JSON without hits."""
_FORMATS = "give a ranking as `mvr-ray retrieve` writes it with format=dpr, jsonl or pyserini"


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

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The hits as flat rows, for a frame, with the columns of a ranking in Parquet.

        pandas.DataFrame(row for one in index.retrieve("dev") for row in one.rows)
        """
        question_id, question = self.question[:2]
        hits = enumerate(self.passages, 1)
        return [dict(zip(PARQUET_SCHEMA.names, (question_id, question, rank, *hit))) for rank, hit in hits]

    def __repr__(self) -> str:
        best = f", best {self.passages[0].id!r}" if self.passages else ""
        return f"RankedQuestion({self.question.id!r}, {count_noun(len(self.passages), 'passage')}{best})"


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
    count = 0
    if format in HIT_FORMATS:
        rows = _warn_of_empty(rows, path, format)
    with finished_file(path) as aside:
        if format == "parquet":
            return _write_parquet(rows, aside)
        brackets = {"dpr": "[]", "pyserini": "{}"}.get(format, "")
        with aside.open("w", encoding="utf-8", newline="\n") as file:
            for count, row in enumerate(rows, 1):
                file.write((",\n" if count > 1 else f"{brackets[0]}\n") if brackets else "")
                file.write(_entry(row, format, tag, extras))
            if brackets:
                file.write(f"\n{brackets[1]}\n" if count else f"{brackets}\n")
    return count


def _warn_of_empty(rows: Iterable[RankedQuestion], path: Path, format: str) -> Iterator[RankedQuestion]:
    """Pass rankings on, and warn of those without a hit once all are written."""
    num_empty = 0
    for row in rows:
        num_empty += not row.passages
        yield row
    if num_empty:
        message = "questions without a hit left out, which format=jsonl holds: questions=%d output=%s format=%s"
        log.warning(message, num_empty, path, format)


def read_ranking(path: Path, max_passages: int | None = None) -> Iterator[RankedQuestion]:
    """Read the questions of a JSON ranking, each with its first `max_passages` passages.

    A title or text that the file lacks is empty, a score NaN. Raises DataError naming the row that is none.
    """
    for number, row in enumerate(ranking_rows(path)):
        where = f"{path}, entry {number + 1}"
        answers = row.get("answers") or []
        if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
            raise DataError(f"{where}: answers is {answers!r:.60}, not a list of texts")
        passages = [_hit(hit, f"{where}, passage {at}") for at, hit in enumerate(row["hits"][:max_passages], 1)]
        name = question_id(path, number) if row.get("id") is None else str(row["id"])
        yield RankedQuestion(Question(name, row["question"], tuple(answers)), passages)


def ranking_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Read the objects of DPR's reader JSON, JSON lines, or pyserini's JSON by question id, each with a text as
    `question`, objects as `hits`, and an `id` where the file has one. Raises as `read_ranking`."""
    if not path.is_file():
        raise DataError(f"ranking {path} does not exist; make one with `mvr-ray retrieve CONFIG ... output={path}`")
    number = 0
    with open_text(path) as file:
        for number, row in enumerate(_rows(file, path), 1):
            names = ("ctxs", "hits", "contexts") if isinstance(row, dict) else ()
            hits = next((row[name] for name in names if name in row), None)
            if not isinstance(hits, list) or not isinstance(row.get("question"), str):
                raise DataError(f"{path}, entry {number}: no question with its ctxs, hits or contexts; {_FORMATS}")
            for at, hit in enumerate(hits, 1):
                if not isinstance(hit, dict):
                    where = f"{path}, entry {number}, passage {at}"
                    raise DataError(f"{where}: {hit!r:.60} is not a passage with id, title, text and score")
            yield {**row, "hits": hits}
    if not number:
        raise DataError(f"ranking {path} holds no question")


def _rows(file: TextIO, path: Path) -> Iterator[Any]:
    reader = JsonReader(file, str(path))
    first = reader.peek()
    members = reader.members() if first == "{" and plain_name(path).suffix != ".jsonl" else iter(())
    first_key = next(members, "")
    if first == "[":
        yield from reader.items()
        reader.finish()
    elif first not in ("{", ""):
        raise DataError(f"{path}: neither a JSON array or object nor JSON lines; {_FORMATS}")
    elif first_key and reader.peek() == "{":
        for key in itertools.chain([first_key], members):
            row = reader.value()
            yield {"id": key, **row} if isinstance(row, dict) else row
        reader.finish()
    else:
        for row in json_lines(path):
            if isinstance(row, BadRow):
                raise DataError(f"{row}; {_FORMATS}")
            yield row.values


def _hit(hit: dict[str, Any], where: str) -> RankedPassage:
    title, text, score, mark = hit.get("title") or "", hit.get("text") or "", hit.get("score"), hit.get("has_answer")
    if not isinstance(title, str) or not isinstance(text, str):
        raise DataError(f"{where}: title {title!r:.40} or text {text!r:.40} is not a text")
    try:
        number = math.nan if score is None else float(score)
    except (TypeError, ValueError, OverflowError):
        raise DataError(f"{where}: score {score!r:.60} is not a number") from None
    return RankedPassage(str(context_id(hit)), title, text, number, mark if isinstance(mark, bool) else None)


def _entry(row: RankedQuestion, format: RankingFormat, tag: str, extras: bool) -> str:
    """Return the text of one question: whole lines, or an entry between the brackets of a JSON array or object."""
    question, hits = row
    match format:
        case "trec":
            return "".join(run_lines(question.id, ((hit.id, hit.score) for hit in hits), tag))
        case "msmarco":
            return "".join(_run_line(question.id, hit.id, rank) for rank, hit in enumerate(hits, 1))
        case "dpr":
            fields = {"question": question.text, "answers": list(question.answers), "ctxs": []}
            text = json.dumps(fields, ensure_ascii=False, indent=4)
            contexts = ",\n".join(_dpr_context(hit, extras) for hit in hits)
            return f"{text[: -len(_NO_HITS)]}[\n{contexts}\n    ]\n}}" if hits else text
        case "pyserini":
            contexts = [
                {
                    "docid": hit.id,
                    "score": _float32_text(hit.score),
                    "text": f"{hit.title}\n{hit.text}",
                    "has_answer": bool(hit.has_answer),
                }
                for hit in hits
            ]
            fields = {"question": question.text, "answers": list(question.answers), "contexts": contexts}
            return f"{json.dumps(question.id)}: {json.dumps(fields, ensure_ascii=False)}"
        case _:
            entries = [
                {"rank": rank, **hit._asdict(), "score": float(_float32_text(hit.score))}
                for rank, hit in enumerate(hits, 1)
            ]
            fields = {"id": question.id, "question": question.text, "answers": list(question.answers), "hits": entries}
            return json.dumps(fields, ensure_ascii=False) + "\n"


def _dpr_context(hit: RankedPassage, extras: bool) -> str:
    """Return a ctx of DPR's reader file: exactly id, title, text, score (a text) and has_answer, without `extras`.

    The text is that of `json.dumps` with an indent, which is slower: it encodes in Python.
    """
    texts = {"id": hit.id, "title": hit.title, "text": hit.text, "score": _float32_text(hit.score)}
    lines = [f'"{name}": {_encode(text)}' for name, text in texts.items()]
    lines.append(f'"has_answer": {"true" if hit.has_answer else "false"}')
    if extras:
        lines += [f'"view": {hit.view}', f'"snippet": {_encode(hit.snippet)}']
    return "        {\n            " + ",\n            ".join(lines) + "\n        }"


def _run_line(question_id: str, passage_id: str, rank: int) -> str:
    if not {*"\t\n\r"}.isdisjoint(question_id + passage_id):
        raise DataError(f"id {question_id!r} or {passage_id!r} holds a tab or newline; an MS MARCO run cannot")
    return f"{question_id}\t{passage_id}\t{rank}\n"


def _write_parquet(rows: Iterable[RankedQuestion], path: Path) -> int:
    count, remaining = 0, iter(rows)
    with pq.ParquetWriter(path, PARQUET_SCHEMA) as writer:
        while questions := list(itertools.islice(remaining, PARQUET_QUESTIONS)):
            count += len(questions)
            table = [
                (question.id, question.text, rank, *hit)
                for question, hits in questions
                for rank, hit in enumerate(hits, 1)
            ]
            if table:
                writer.write_table(pa.table(to_columns(table, PARQUET_SCHEMA), schema=PARQUET_SCHEMA))
    return count


def _float32_text(score: float) -> str:
    """Return the shortest text that reads back as the same 32-bit score."""
    return str(np.float32(score))
