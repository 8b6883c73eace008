"""Read a BEIR folder: corpus.jsonl, queries.jsonl and qrels/<split>.tsv.

The judgements are held in memory; corpus and queries are streamed. Queries without a judgement are left out, as BEIR
does. A document without text but with a title has its title as text. What else a document has are its extras, the
members of its `metadata` among them.
"""

from collections.abc import Iterator
from pathlib import Path

from mvr_ray.errors import MissingInputError
from mvr_ray.store.formats.records import BadRow, DroppedRow, Record, passage_record, question_record
from mvr_ray.store.formats.text_files import json_lines
from mvr_ray.store.formats.trec import read_qrels


def read_beir(folder: Path, prefix: str, split: str, passages: bool, questions: bool) -> Iterator[Record]:
    if passages:
        yield from _documents(_file(folder, "corpus.jsonl"), prefix)
    if questions:
        judgements = read_qrels(_file(folder, f"qrels/{split}.tsv"))
        yield from _queries(_file(folder, "queries.jsonl"), judgements, prefix)


def beir_files(folder: Path, split: str) -> list[Path]:
    """List the files of a BEIR folder that are there."""
    names = ("corpus.jsonl", "queries.jsonl", f"qrels/{split}.tsv")
    return [folder / f"{name}{end}" for name in names for end in ("", ".gz") if (folder / f"{name}{end}").is_file()]


def _documents(path: Path, prefix: str) -> Iterator[Record]:
    for row in json_lines(path):
        if isinstance(row, BadRow):
            yield row
            continue
        title, text = row.values.get("title"), row.values.get("text")
        if isinstance(text, str) and not text.strip() and isinstance(title, str):
            text = title
        extras = {key: value for key, value in row.values.items() if key not in ("_id", "title", "text", "metadata")}
        if isinstance(metadata := row.values.get("metadata"), dict):
            extras |= metadata
        yield passage_record(row.values.get("_id"), title, text, row.where, prefix, extras=extras)


def _queries(path: Path, judgements: dict[str, dict[str, int]], prefix: str) -> Iterator[Record]:
    for row in json_lines(path):
        if isinstance(row, BadRow):
            yield row
            continue
        positives = [doc for doc, grade in judgements.get(str(row.values.get("_id")), {}).items() if grade > 0]
        if positives:
            yield question_record(
                row.values.get("_id"), row.values.get("text"), row.where, positive_ids=positives, prefix=prefix
            )
        else:
            yield DroppedRow(row.where, "query without a relevant document in this split")


def _file(folder: Path, name: str) -> Path:
    for end in ("", ".gz"):
        if (folder / f"{name}{end}").is_file():
            return folder / f"{name}{end}"
    raise MissingInputError(
        f"{folder / name} does not exist; a BEIR folder has corpus.jsonl, queries.jsonl and qrels/<split>.tsv "
        f"(the split is the source's `split`)"
    )
