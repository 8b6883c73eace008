"""Read folders of passages, queries and judgements, as BEIR and MS MARCO publish them.

The judgements are held in memory; passages and queries are streamed. Queries without a relevant passage in the split
are left out; BEIR and trec_eval count one that is judged, by grades below 1 alone, as 0. Every file may be plain or
compressed by gzip.

In BEIR, a document without text but with a title has its title as text. What else a document has are its extras, the
members of its `metadata` among them. A row of MS MARCO's collection is `id text`, or of documents `id url title text`;
tabs part the columns, and quotes mean nothing.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mvr_ray.errors import MissingInputError
from mvr_ray.store.formats.records import BadRow, DroppedRow, Record, is_id, passage_record, question_record
from mvr_ray.store.formats.text_files import Row, json_lines, open_text, separated_rows
from mvr_ray.store.formats.trec import read_qrels


class JudgedFolder(NamedTuple):
    """A kind of folder by the names of its files, and how their rows are read."""

    title: str
    passages: str
    queries: str
    judgements: str
    read_passages: Callable[[Path], Iterator[Record]]
    query_rows: Callable[[Path], Iterator[Row | BadRow]]
    """Rows of id and text."""
    passage_noun: str

    def is_at(self, folder: Path) -> bool:
        return bool(_present(folder, self.passages))

    def files(self, folder: Path, split: str) -> list[Path]:
        """List the files of a folder that are there."""
        names = (self.passages, self.queries.format(split), self.judgements.format(split))
        return [file for name in names for file in _present(folder, name)]

    def read(self, folder: Path, split: str, passages: bool, questions: bool) -> Iterator[Record]:
        if passages:
            yield from self.read_passages(self._file(folder, self.passages))
        if not questions:
            return
        judgements = read_qrels(self._file(folder, self.judgements.format(split)))
        for row in self.query_rows(self._file(folder, self.queries.format(split))):
            if isinstance(row, BadRow):
                yield row
                continue
            id_, text = row.values
            own = judgements.get(str(id_), {})
            grades = {passage: grade for passage, grade in own.items() if grade > 0}
            if grades or not is_id(id_):  # which makes a bad row
                yield question_record(
                    id_, text, row.where, positive_ids=list(grades), positive_grades=tuple(grades.values())
                )
            else:
                why = "judged, none relevant: BEIR counts it as 0" if own else "not judged"
                yield DroppedRow(row.where, f"query without a relevant {self.passage_noun} in this split ({why})")

    def _file(self, folder: Path, name: str) -> Path:
        if files := _present(folder, name):
            return files[0]
        raise MissingInputError(
            f"{folder / name} does not exist; {self.title} folder has {self.passages}, "
            f"{self.queries.format('<split>')} and {self.judgements.format('<split>')} (the split is the source's "
            f"`split`, such as test or dev.small)"
        )


def read_collection(path: Path) -> Iterator[Record]:
    """Read the rows of MS MARCO's collection; the first row says whether it has passages or documents."""
    with open_text(path) as file:
        columns = 4 if file.readline().count("\t") == 3 else 2
    for row in separated_rows(path, "\t", columns, is_quoted=False):
        if isinstance(row, BadRow):
            yield row
        elif columns == 2:
            yield passage_record(row.values[0], "", row.values[1], row.where)
        else:
            id_, url, title, text = row.values
            yield passage_record(id_, title, text, row.where, extras={"url": url})


def _read_documents(path: Path) -> Iterator[Record]:
    for row in json_lines(path):
        if isinstance(row, BadRow):
            yield row
            continue
        title, text = row.values.get("title"), row.values.get("text")
        is_empty = not text.strip() if isinstance(text, str) else text is None and "text" in row.values
        if is_empty and isinstance(title, str):
            text = title
        extras = {key: value for key, value in row.values.items() if key not in ("_id", "title", "text", "metadata")}
        if isinstance(metadata := row.values.get("metadata"), dict):
            extras |= metadata
        yield passage_record(row.values.get("_id"), title, text, row.where, extras=extras)


def _beir_queries(path: Path) -> Iterator[Row | BadRow]:
    for row in json_lines(path):
        yield row if isinstance(row, BadRow) else Row((row.values.get("_id"), row.values.get("text")), row.where)


def _present(folder: Path, name: str) -> list[Path]:
    return [file for end in ("", ".gz", ".bz2") if (file := folder / f"{name}{end}").is_file()]


_MARCO_QUERIES = partial(separated_rows, delimiter="\t", num_columns=2, is_quoted=False)

JUDGED_FOLDERS = {
    "beir": JudgedFolder(
        "a BEIR", "corpus.jsonl", "queries.jsonl", "qrels/{}.tsv", _read_documents, _beir_queries, "document"
    ),
    "msmarco": JudgedFolder(
        "an MS MARCO", "collection.tsv", "queries.{}.tsv", "qrels.{}.tsv", read_collection, _MARCO_QUERIES, "passage"
    ),
}
