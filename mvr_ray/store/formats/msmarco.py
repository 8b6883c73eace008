"""Read MS MARCO's files: collection.tsv, queries.<split>.tsv and qrels.<split>.tsv, in one folder.

A row of the collection is `id text`, or of documents `id url title text`; tabs part the columns, and quotes mean
nothing. The judgements are held in memory; queries without a relevant passage in the split are left out.
"""

from collections.abc import Iterator
from pathlib import Path

from mvr_ray.errors import MissingInputError
from mvr_ray.store.formats.records import BadRow, DroppedRow, Record, passage_record, question_record
from mvr_ray.store.formats.text_files import Row, open_text
from mvr_ray.store.formats.trec import read_qrels

COLLECTION = "collection.tsv"


def is_msmarco(folder: Path) -> bool:
    return any((folder / f"{COLLECTION}{end}").is_file() for end in ("", ".gz"))


def msmarco_files(folder: Path, split: str) -> list[Path]:
    """List the files of a folder that are there."""
    names = (COLLECTION, f"queries.{split}.tsv", f"qrels.{split}.tsv")
    return [folder / f"{name}{end}" for name in names for end in ("", ".gz") if (folder / f"{name}{end}").is_file()]


def read_msmarco(folder: Path, prefix: str, split: str, passages: bool, questions: bool) -> Iterator[Record]:
    if passages:
        yield from read_collection(_file(folder, COLLECTION), prefix)
    if questions:
        judgements = read_qrels(_file(folder, f"qrels.{split}.tsv"))
        for row in _rows(_file(folder, f"queries.{split}.tsv"), 2):
            if isinstance(row, BadRow):
                yield row
                continue
            id_, text = row.values
            positives = [passage for passage, grade in judgements.get(id_, {}).items() if grade > 0]
            if positives:
                yield question_record(id_, text, row.where, positive_ids=positives, prefix=prefix)
            else:
                yield DroppedRow(row.where, "query without a relevant passage in this split")


def read_collection(path: Path, prefix: str = "") -> Iterator[Record]:
    """Read the rows of a collection; the first row says whether it has passages or documents."""
    with open_text(path) as file:
        columns = 4 if file.readline().count("\t") == 3 else 2
    for row in _rows(path, columns):
        if isinstance(row, BadRow):
            yield row
        elif columns == 2:
            yield passage_record(row.values[0], "", row.values[1], row.where, prefix)
        else:
            id_, url, title, text = row.values
            yield passage_record(id_, title, text, row.where, prefix, extras={"url": url})


def _rows(path: Path, num_columns: int) -> Iterator[Row | BadRow]:
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            values = line.rstrip("\r\n").split("\t")
            where = f"{path}:{number}"
            if len(values) == num_columns:
                yield Row(values, where)
            elif values != [""]:
                yield BadRow(where, f"{len(values)} tab-separated columns, not {num_columns}")


def _file(folder: Path, name: str) -> Path:
    for end in ("", ".gz"):
        if (folder / f"{name}{end}").is_file():
            return folder / f"{name}{end}"
    raise MissingInputError(
        f"{folder / name} does not exist; an MS MARCO folder has {COLLECTION}, queries.<split>.tsv and "
        f"qrels.<split>.tsv (the split is the source's `split`, such as dev.small)"
    )
