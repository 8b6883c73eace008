"""Read any source of a run file, and detect its format if none is set."""

import errno
import itertools
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import regex

from mvr_ray.config import SourceConfig
from mvr_ray.core.scripts import SPACELESS
from mvr_ray.errors import ConfigError, DataError, MissingInputError, count_noun
from mvr_ray.store.files import address_name, copy_name, local_copy, name_address
from mvr_ray.store.formats.dpr import read_dpr_json, read_dpr_jsonl, read_dpr_tsv, read_qas_csv
from mvr_ray.store.formats.huggingface import SAVED_NAMES, SCHEME, dataset_rows
from mvr_ray.store.formats.json_stream import JsonReader
from mvr_ray.store.formats.judged_folders import JUDGED_FOLDERS, read_collection
from mvr_ray.store.formats.mediawiki import read_mediawiki
from mvr_ray.store.formats.records import (
    BadRow,
    DroppedRow,
    PassageRecord,
    QuestionRecord,
    Record,
    question_id,
    question_record,
    with_prefix,
)
from mvr_ray.store.formats.rows import (
    read_csv,
    read_jsonl,
    read_nq_open,
    read_parquet,
    read_rows,
    read_summaries,
)
from mvr_ray.store.formats.squad import read_squad
from mvr_ray.store.formats.text_files import first_cells, open_text, plain_name
from mvr_ray.store.formats.text_folder import TEXT_ENDS, leaves_folder, read_text_file, text_files
from mvr_ray.store.formats.training_rows import CONTEXTS, is_training_row, read_triples
from mvr_ray.types import Question

log = logging.getLogger(__name__)

READERS: dict[str, Callable[..., Iterator[Record]]] = {
    "squad": read_squad,
    "dpr_tsv": read_dpr_tsv,
    "dpr_json": read_dpr_json,
    "dpr_jsonl": read_dpr_jsonl,
    "triples": read_triples,
    "qas_csv": read_qas_csv,
    "csv": read_csv,
    "tsv": partial(read_csv, delimiter="\t"),
    "msmarco": read_collection,
    "jsonl": read_jsonl,
    "parquet": read_parquet,
    "nq_open": read_nq_open,
    "summaries": read_summaries,
    "mediawiki": read_mediawiki,
    "text": read_text_file,
}
"""Formats of files. `beir`, `msmarco`, `text` and `huggingface` may be whole folders."""
NAMED_FIELDS = ("jsonl", "csv", "tsv", "parquet", "huggingface")
"""Formats whose fields a source may name (`SourceConfig.fields`)."""
LINE_KEYS = ("id", "_id", "text", "contents", "question")
"""Keys by which a whole object on the first line of a `.json` file is a row, also if an object is its first value."""
MAX_ROW_CHARS = 1 << 24
"""A longer first line of a `.json` file is that of one object, which may be larger than the memory, and no row."""
DATA_ENDS = (".parquet", ".tsv", ".csv", ".jsonl", ".ndjson", ".json")
DOCUMENT_ENDS = (".pdf", ".docx", ".doc", ".pptx", ".odt", ".rtf", ".epub", ".html", ".htm", ".rst", ".tex")
IMAGE_ENDS = (".png", ".jpg", ".jpeg", ".gif", ".svg", ".webp", ".ico")
COMPRESSED_ENDS = (".zst", ".xz", ".zip", ".7z", ".lz4", ".tar", ".tgz")
HOW_TO_CONVERT = "convert documents to .txt or .md first (pandoc, pdftotext)"
_IN_SENTENCES = regex.compile(rf"[ {SPACELESS}]")
DUMP_NAME = re.compile(r"\.xml(-p\w+)?(\.gz|\.bz2)?$", re.IGNORECASE)
"""Names of MediaWiki dumps, whole or in several files: `pages-articles1.xml-p1p41242.bz2`."""


def read_source(source: SourceConfig) -> Iterator[Record]:
    """Stream the records of a source: passages if it gives passages, questions if it names a set for them.

    The files of a folder are read in name order; a BEIR folder is one source. Bad rows are yielded, not raised; a file
    that breaks off, or whose format cannot be detected, is a DataError.
    """
    path = source_path(source)
    copy, name = str(path), copy_name(source.path, path)
    with name_address(source.path, path):
        for record in itertools.chain.from_iterable(_parts(source, path)):
            match record:
                case PassageRecord() | DroppedRow(is_passage=True):
                    is_selected = source.passages
                case QuestionRecord() | DroppedRow():
                    is_selected = source.questions is not None
                case BadRow():
                    is_selected = source.passages or source.questions is not None
            if is_selected:
                own = record if name == copy else record._replace(where=record.where.replace(copy, name, 1))
                yield with_prefix(own, source.id_prefix) if source.id_prefix else own


def source_path(source: SourceConfig) -> Path:
    """Return the file or folder of a source on this machine, of an object store its copy; of a data set of the Hugging
    Face hub its name."""
    return Path(source.path) if source.path.startswith(SCHEME) else local_copy(source.path)


def source_files(source: SourceConfig) -> list[Path]:
    """List the files of a source, in reading order; a data set of the Hugging Face hub has none here."""
    if source.path.startswith(SCHEME):
        return []
    if not source.path:
        raise MissingInputError("the path of a source is empty; name a file or a folder ('.' is the working folder)")
    path, name = source_path(source), address_name(source.path)
    try:
        is_there = path.exists()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # a text, such as a question, in place of a path
            raise
        is_there = False
    if not is_there:
        raise MissingInputError(f"source {name} does not exist ({path.absolute()}); correct its path")
    if not path.is_dir():
        return [path]
    match folder_format(source, path):
        case "beir" | "msmarco" as whole:
            files = JUDGED_FOLDERS[whole].files(path, source.split)
        case "text":
            files = text_files(path)
        case "huggingface":
            files = sorted(file for file in path.rglob("*") if file.is_file())
        case _:
            files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    if not files:
        of_format = "" if source.format == "auto" else f" of format {source.format}"
        raise MissingInputError(
            f"source {name} is a folder without files{of_format} ({path.absolute()}); correct its path"
        )
    return files


def _warn_of_others(source: SourceConfig, folder: Path) -> None:
    """Warn of files of a folder of text that are left out, such as PDFs and data in its sub-folders; of no images."""
    files = (file for file in folder.rglob("*") if file.is_file() and not _is_text(file))
    visible_files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
    ends = Counter(file.suffix.lower() or file.name for file in visible_files)
    if others := [f"{number} {end}" for end, number in ends.most_common() if end not in IMAGE_ENDS]:
        name, cure = address_name(source.path), HOW_TO_CONVERT
        if data := next((file for file in visible_files if plain_name(file).suffix.lower() in DATA_ENDS), None):
            cure = f"data is a source of its own, such as {name}/{data.relative_to(folder).as_posix()}; {cure}"
        log.warning("files left out of source %s: %s; %s", name, ", ".join(others), cure)


def format_of(source: SourceConfig) -> str:
    """Return the source's format as set, or detected from its name and first bytes."""
    if source.format != "auto":
        return source.format
    if source.path.startswith(SCHEME):
        return "huggingface"
    path = source_path(source)
    whole = folder_format(source, path) if path.is_dir() else None
    return whole or _detect_format(source_files(source)[0], source, bool(_names_of(source)))


def folder_format(source: SourceConfig, folder: Path) -> str | None:
    """Return the format of a folder that is one source; None for a folder of files that are read one by one."""
    if source.format != "auto":
        return source.format if source.format in ("beir", "msmarco", "text", "huggingface") else None
    for name, kind in JUDGED_FOLDERS.items():
        if kind.is_at(folder):
            return name
    if any((folder / name).is_file() for name in SAVED_NAMES):
        return "huggingface"
    names = [plain_name(file).name.lower() for file in folder.iterdir() if not file.name.startswith(".")]
    has_data = any(name.endswith(DATA_ENDS) or DUMP_NAME.search(name) for name in names)
    return "text" if not has_data and text_files(folder) else None


def read_question_file(path: str | Path) -> list[Question]:
    """Read the questions of a file or folder in any question format; a `.txt` file has one a line. Bad rows, and ids
    that occur twice, are refused."""
    address, path = str(path), local_copy(str(path))
    name = copy_name(address, path)
    if plain_name(path).suffix.lower() == ".txt":
        with name_address(address, path), open_text(path) as file:
            lines = [(number, line.strip()) for number, line in enumerate(file, 1) if line.strip()]
        records = [question_record(question_id(path, number - 1), text, f"{name}:{number}") for number, text in lines]
    else:
        place = address if "://" in address else str(path)
        records = list(read_source(SourceConfig(path=place, passages=False, questions="file")))
    bad = [record for record in records if isinstance(record, BadRow)]
    if dropped_rows := [record for record in records if isinstance(record, DroppedRow)]:
        rows = count_noun(len(dropped_rows), "row")
        log.warning("%s left out of the questions, first: %s (%s)", rows, dropped_rows[0].where, dropped_rows[0].reason)
    questions: list[Question] = []
    place_of: dict[str, str] = {}
    for record in records:
        if isinstance(record, QuestionRecord):
            questions.append(record.question)
            own_id, where = record.question.id, f"{record.where} (question {len(questions)})"
            if (place := place_of.setdefault(own_id, where)) != where:
                bad.append(BadRow(where, f"question id {own_id!r} already occurs in {place}; give it another one"))
    if bad:
        none = "" if questions else f"{name} holds no question, such as a row with the key 'question': "
        raise DataError(f"{none}{count_noun(len(bad), 'bad row')}, first: {bad[0]}")
    if not questions:
        raise DataError(f"{name} holds no question; known formats: {', '.join(READERS)}, or .txt with one a line")
    return questions


def _parts(source: SourceConfig, path: Path) -> Iterator[Iterator[Record]]:
    """Yield the records of a source part by part: of a folder that is one source, or of each of its files."""
    names = _names_of(source)
    files, whole = source_files(source), folder_format(source, path) if path.is_dir() else None
    if source.path.startswith(SCHEME) or whole == "huggingface":
        name = source.path if source.path.startswith(SCHEME) else str(path)
        yield read_rows(dataset_rows(name, source.split), name, names)
        return
    if whole in JUDGED_FOLDERS:
        _refuse_names(source, whole, names)
        yield JUDGED_FOLDERS[whole].read(path, source.split, source.passages, source.questions is not None)
        return
    if source.format in ("beir", "huggingface"):
        expected = {
            "beir": "BEIR is a folder with corpus.jsonl and queries.jsonl",
            "huggingface": "a data set is a folder",
        }
        raise DataError(f"source {address_name(source.path)} is a file, but {expected[source.format]}")
    if whole == "text":
        _warn_of_others(source, path)
    for file in files:
        format = whole or (source.format if source.format != "auto" else _detect_format(file, source, bool(names)))
        _refuse_names(source, format, names)
        if format == "text" and path.is_dir() and leaves_folder(file, path):
            yield iter([BadRow(f"{file}:1", f"a link to a text outside the folder ({file.resolve()}); copy it here")])
        elif whole == "text":
            yield read_text_file(file, path)
        else:
            yield READERS[format](file, names) if names else READERS[format](file)


def _names_of(source: SourceConfig) -> dict[str, str | None]:
    """Return the names that a source gives to parts of its rows."""
    return dict(sorted(source.fields.model_dump(exclude_defaults=True).items()))


def _refuse_names(source: SourceConfig, format: str, names: dict[str, str | None]) -> None:
    if names and format not in NAMED_FIELDS:
        raise ConfigError(
            f"source {address_name(source.path)}: fields are set, but format {format} has names of its own; leave "
            f"fields out, or set format to one of {', '.join(NAMED_FIELDS)}"
        )


def _is_text(file: Path) -> bool:
    return plain_name(file).suffix.lower() in TEXT_ENDS


def _detect_format(file: Path, source: SourceConfig, has_names: bool = False) -> str:
    """Detect the format of a file. `has_names`: the source names fields, so it has no format with own names."""
    stem = plain_name(file).name.lower()
    if stem.endswith(".parquet"):
        return "parquet"
    if stem.endswith(".tsv"):
        return "tsv" if has_names else _detect_tsv(file)
    if stem.endswith(".csv"):
        with open_text(file) as text:
            columns = text.readline().strip().lower().split("\t")
        if len(columns) == 1 or has_names:
            return "csv"
        return _detect_tsv(file) if {"id", "text"} <= set(columns) else "qas_csv"
    if stem.endswith((".jsonl", ".ndjson")):
        return _detect_lines(_first_row(file), has_names)
    if stem.endswith(".json"):
        return _detect_json(file, has_names)
    if DUMP_NAME.search(file.name):
        return "mediawiki"
    if _is_text(file):
        return "text"
    cure = f"set `format:` to one of {', '.join([*READERS, 'beir', 'huggingface'])}"
    if stem.endswith(DOCUMENT_ENDS):
        cure = HOW_TO_CONVERT
    elif stem.endswith(COMPRESSED_ENDS):
        cure = "unpack it first, as only gzip and bzip2 are read"
    raise DataError(
        f"the format of source {address_name(source.path)} cannot be detected from the name {file.name!r}; {cure}"
    )


def _detect_tsv(file: Path) -> str:
    """Detect the format of a TSV file. Two columns are MS MARCO's; a header with id and text in any case, other than
    DPR's, with question or the names of a training row is that of a table; triples are named so, and their first column
    is no id, since it has blanks or is in a script without them."""
    columns = first_cells(file)
    is_table = {"id", "text"} <= {name.lower() for name in columns} or "question" in columns
    if (is_table or is_training_row(dict.fromkeys(columns).keys())) and columns[:3] != ["id", "text", "title"]:
        return "tsv"
    if "triples" in file.name.lower() and _IN_SENTENCES.search("".join(columns[:1])):
        return "triples"
    return "msmarco" if len(columns) == 2 else "dpr_tsv"


def _first_row(file: Path, max_chars: int = -1) -> dict[str, Any]:
    """Return the object on the first line that is not blank; an empty one where there is none, or it is longer."""
    with open_text(file) as text:
        lines = iter(partial(text.readline, max_chars), "")
        try:
            row = json.loads(next(filter(str.strip, lines), ""))
        except (ValueError, RecursionError):
            row = {}
    return row if isinstance(row, dict) else {}


def _detect_lines(row: dict[str, Any], has_names: bool) -> str:
    if has_names:
        return "jsonl"
    if row.keys() & {*CONTEXTS}:
        return "dpr_jsonl"
    return "nq_open" if row.keys() == {"question", "answer"} else "jsonl"


def _detect_json(file: Path, has_names: bool) -> str:
    """Detect the format of a JSON file: an array, an object of SQuAD or of summaries, which are objects, or lines of
    objects as in a `.jsonl` file."""
    with open_text(file) as text:
        reader = JsonReader(text, str(file))
        if reader.peek() == "[":
            return "dpr_json"
        key = next(reader.members(), "")
        if key in ("data", "version"):
            return "squad"
        has_summaries = not key or reader.peek() == "{"
    row = _first_row(file, MAX_ROW_CHARS)
    is_line = row and (not has_summaries or any(isinstance(row.get(key), str | int) for key in LINE_KEYS))
    return _detect_lines(row, has_names) if is_line else "summaries"
