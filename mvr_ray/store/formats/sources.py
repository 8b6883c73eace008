"""Read any source of a run file, and detect its format where none is set."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from mvr_ray.config import SourceConfig, resolve_path
from mvr_ray.errors import DataError, MissingInputError
from mvr_ray.store.formats.beir import beir_files, read_beir
from mvr_ray.store.formats.dpr import CONTEXTS, question_id, read_dpr_json, read_dpr_jsonl, read_dpr_tsv, read_qas_csv
from mvr_ray.store.formats.json_stream import JsonReader
from mvr_ray.store.formats.mediawiki import read_mediawiki
from mvr_ray.store.formats.records import BadRow, DroppedRow, PassageRecord, QuestionRecord, Record, question_record
from mvr_ray.store.formats.rows import read_csv, read_jsonl, read_nq_open, read_parquet, read_summaries
from mvr_ray.store.formats.squad import read_squad
from mvr_ray.store.formats.text_files import open_text
from mvr_ray.types import Question

READERS = {
    "squad": read_squad,
    "dpr_tsv": read_dpr_tsv,
    "dpr_json": read_dpr_json,
    "dpr_jsonl": read_dpr_jsonl,
    "qas_csv": read_qas_csv,
    "csv": read_csv,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "nq_open": read_nq_open,
    "summaries": read_summaries,
    "mediawiki": read_mediawiki,
}


def read_source(source: SourceConfig) -> Iterator[Record]:
    """Stream the records of a source: passages if it gives passages, questions if it names a set for them.

    The files of a folder are read in name order; a BEIR folder is one source. Bad rows are yielded, not raised; a file
    that breaks off, or whose format cannot be told, is a DataError.
    """
    path = resolve_path(source.path)
    for read in _readers(source, path):
        for record in read():
            match record:
                case PassageRecord() | DroppedRow(is_passage=True):
                    takes = source.passages
                case QuestionRecord() | DroppedRow():
                    takes = source.questions is not None
                case BadRow():
                    takes = source.passages or source.questions is not None
            if takes:
                yield record


def source_files(source: SourceConfig) -> list[Path]:
    """List the files of a source, in reading order."""
    path = resolve_path(source.path)
    if not path.exists():
        raise MissingInputError(f"source {source.path} does not exist ({path}); check prepare.sources")
    if path.is_file():
        return [path]
    if source.format == "beir" or (source.format == "auto" and _is_beir(path)):
        files = beir_files(path, source.split)
    else:
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    if not files:
        raise MissingInputError(f"source {source.path} is a folder without files ({path}); check prepare.sources")
    return files


def format_of(source: SourceConfig) -> str:
    """Return the source's format as set, or detected from its name and first bytes."""
    return source.format if source.format != "auto" else _tell_format(source_files(source)[0], source.path)


def read_question_file(path: Path) -> list[Question]:
    """Read the questions of a file in any question format; a `.txt` file has one a line. Bad rows are refused."""
    if path.name.endswith((".txt", ".txt.gz")):
        with open_text(path) as file:
            lines = [(number, line.strip()) for number, line in enumerate(file, 1) if line.strip()]
        records = [question_record(question_id(path, number - 1), text, f"{path}:{number}") for number, text in lines]
    else:
        records = list(read_source(SourceConfig(path=str(path), passages=False, questions="file")))
    bad = [record for record in records if isinstance(record, BadRow)]
    questions = [record.question for record in records if isinstance(record, QuestionRecord)]
    if bad:
        raise DataError(f"{len(bad)} bad rows, first: {bad[0]}")
    if not questions:
        raise DataError(f"{path} holds no question; known formats: {', '.join(READERS)}, or .txt with one a line")
    return questions


def _readers(source: SourceConfig, path: Path) -> Iterator[partial[Iterator[Record]]]:
    files = source_files(source)
    if path.is_dir() and (source.format == "beir" or (source.format == "auto" and _is_beir(path))):
        yield partial(read_beir, path, source.id_prefix, source.split, source.passages, source.questions is not None)
        return
    if source.format == "beir":
        raise DataError(f"source {source.path} is a file, but BEIR is a folder with corpus.jsonl and queries.jsonl")
    for file in files:
        format = source.format if source.format != "auto" else _tell_format(file, source.path)
        yield partial(READERS[format], file, source.id_prefix)


def _is_beir(path: Path) -> bool:
    return any((path / f"corpus.jsonl{end}").is_file() for end in ("", ".gz"))


def _tell_format(file: Path, source: str) -> str:
    stem = file.name.lower().removesuffix(".gz").removesuffix(".bz2")
    if _is_beir(file.parent) and stem == "corpus.jsonl":
        return "beir"
    if stem.endswith(".parquet"):
        return "parquet"
    if stem.endswith(".tsv"):
        return "dpr_tsv"
    if stem.endswith(".csv"):
        with open_text(file) as text:
            return "qas_csv" if "\t" in text.readline() else "csv"
    if stem.endswith((".jsonl", ".ndjson")):
        return _tell_lines(file)
    if stem.endswith(".json"):
        return _tell_json(file)
    if stem.endswith(".xml") or ".xml-p" in stem:  # a dump in several files: pages-articles1.xml-p1p41242.bz2
        return "mediawiki"
    raise DataError(
        f"the format of source {source} cannot be told from the name {file.name!r}; "
        f"set `format:` to one of {', '.join([*READERS, 'beir'])}"
    )


def _tell_lines(file: Path) -> str:
    with open_text(file) as text:
        first = text.readline()
    try:
        keys = set(json.loads(first))
    except (ValueError, TypeError, RecursionError):
        return "jsonl"
    if keys & set(CONTEXTS):
        return "dpr_jsonl"
    return "nq_open" if keys == {"question", "answer"} else "jsonl"


def _tell_json(file: Path) -> str:
    with open_text(file) as text:
        reader = JsonReader(text, str(file))
        if reader.peek() == "[":
            return "dpr_json"
        first = next(reader.members(), "")
    return "squad" if first in ("data", "version") else "summaries"
