"""Write a commented run file by looking at the data: `mvr-ray init DATA...`.

The first rows of every source say which format it has, under which names its rows have id, title, text and question,
how long passages are, and which further fields come with them.
"""

import json
import os
import re
import shlex
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from mvr_ray.api.rows import ID_NAMES
from mvr_ray.cli.args import require_writable
from mvr_ray.config import SourceConfig, check_field_name, load_run
from mvr_ray.config.loader import parse_yaml
from mvr_ray.errors import ConfigError, DataError
from mvr_ray.store.chunks import word_spans
from mvr_ray.store.fields import FieldReader, TextCell, cell_number
from mvr_ray.store.files import address_name
from mvr_ray.store.formats.huggingface import dataset_rows
from mvr_ray.store.formats.judged_folders import JUDGED_FOLDERS
from mvr_ray.store.formats.records import BadRow, PassageRecord, QuestionRecord
from mvr_ray.store.formats.rows import parquet_rows
from mvr_ray.store.formats.sources import NAMED_FIELDS, format_of, read_source, source_files, source_path
from mvr_ray.store.formats.text_files import Row, csv_rows, first_cells, json_lines, plain_name
from mvr_ray.store.formats.training_rows import is_training_row
from mvr_ray.store.local_files import finished_file

SAMPLE_ROWS = 500
LABELS_LINE = "  labels: gold                       # the questions name their passages, and no answers\n"
LONG_WORDS = 250
"""Mean words of a passage above which `init` cuts passages into chunks of 100 words, as DPR does."""
SHARD_BYTES = 50_000_000
NAMES = {
    "id": ("id", "_id", *ID_NAMES, "key", "url"),
    "title": ("title", "name", "heading", "headline", "subject"),
    "text": ("text", "contents", "content", "body", "passage", "document", "context", "abstract", "extract", "summary"),
    "question": ("question", "query", "query_text"),
    "answers": ("answers", "answer"),
}
"""Common names of the parts of a passage or question, the first one first."""
QUESTION_NAMES = {
    "id": ("id", "_id", "question_id", "query_id", "qid", "uid", "uuid", "key"),
    "positive_ids": (
        *("positive_ids", "positive_id", "passage_ids", "passage_id", "pid"),
        *("doc_ids", "doc_id", "docid", "document_id", "context_id", "positive_document_ids"),
    ),
    "hard_negative_ids": (
        *("hard_negative_ids", "hard_negative_id", "negative_ids", "negative_id"),
        *("negative_passage_ids", "negative_doc_ids", "negative_document_ids"),
    ),
}
"""The same for the ids of a file of questions alone, where a passage's id names the gold passage."""
OWN_NAMES = {
    "id": ("id", "_id"),
    "text": ("text", "contents"),
    "answers": ("answers", "answer"),
    "hard_negative_ids": ("hard_negative_ids", "negative_ids"),
}
"""Names that the readers of rows expect."""
TRAINING_NAME, DEV_NAME = re.compile(r"(?<![a-z])train"), re.compile(r"(?<![a-z])(dev|val)")
"""Parts of the names of question sets that say what the set is for."""


class SourceSample(NamedTuple):
    """The first records of a source: how it is read, and their properties."""

    path: str
    format: str
    names: dict[str, str | None]
    split: str | None
    passages: list[PassageRecord]
    has_questions: bool
    has_answers: bool
    has_positives: bool
    mean_words: float
    bad: str
    num_bytes: int

    @property
    def title(self) -> str:
        """The properties in one line."""
        kinds = [f"{self.mean_words:.0f} words a passage"] * bool(self.passages) + ["questions"] * self.has_questions
        parts = ", ".join(f"{part} from {name!r}" if name else f"no unique {part}" for part, name in self.names.items())
        return f"{self.path}: {self.format}{f' ({parts})' if parts else ''}, {', '.join(kinds) or 'nothing to read'}"


def write_run_file(paths: Sequence[str], output: Path | None) -> tuple[Path, list[SourceSample]]:
    """Write the run file for sources, and load it as a check. The default name is that of the first source. Corpus,
    encoder and index have the file's name with its folders, so that run files of one store share nothing.

    Raises MissingInputError or DataError for what cannot be read, ConfigError if the file exists or a name is not text.
    """
    for name in (*paths, str(output or "")):
        try:
            name.encode()
        except UnicodeEncodeError:
            message = f"init: the name {name!r} is not UTF-8, as a run file is; rename the file or folder"
            raise ConfigError(message) from None
    samples = [sample_source(path) for path in paths]
    useless = [sample for sample in samples if not (sample.passages or sample.has_questions)]
    if useless and any(sample.passages for sample in samples):
        problems = "; ".join(sample.bad or sample.path for sample in useless)
        raise DataError(f"init: neither a passage nor a question among the first {SAMPLE_ROWS} rows: {problems}")
    if not any(sample.passages for sample in samples):
        problems = "; ".join(sample.bad or sample.title for sample in samples)
        raise DataError(f"init: no passage among the first {SAMPLE_ROWS} rows: {problems}")
    without_ids = [one for one in samples if any(record.passage.id.startswith("ctx-") for record in one.passages)]
    others = [one.path for one in samples if one.passages and one not in without_ids]
    training = [one.path for one in without_ids if one.has_questions]
    if training and others:
        raise DataError(
            f"init: {training[0]} holds texts without ids, which would be passages beside those of {others[0]}; train "
            f"on a run file of its own, mvr-ray init {training[0]}, and index the others with its encoder"
        )
    name = _file_name(output) if output else _name(paths[0])
    file = output or Path(f"{name}.yaml")
    if file.exists():
        raise ConfigError(f"init: {file} exists already; name another file with --output, or move it away")
    require_writable(file, f"init: --output {file}")
    with finished_file(file) as aside:
        aside.write_text(run_file_text(name, samples), encoding="utf-8")
    load_run(file)
    return file, samples


def sample_source(path: str) -> SourceSample:
    """Read the first rows of a source."""
    source = SourceConfig(path=path, questions="questions")
    split = source.split if path.startswith("hf:") else None
    files = source_files(source)
    kind = format_of(source)
    if kind not in (*JUDGED_FOLDERS, "huggingface"):  # which are folders of several
        _require_one_kind(path, files)
    if kind in ("dpr_tsv", "msmarco", "triples") and files[0].is_file():
        columns = [name.lower() for name in first_cells(files[0])]
        common_names = {*NAMES["text"], *NAMES["question"]}
        if columns[:3] != ["id", "text", "title"] and common_names & {*columns}:  # another order or name than DPR's
            kind = "tsv"
            source = source.model_copy(update={"format": kind})
    if kind in ("beir", "msmarco"):
        split = _split(source_path(source), kind)
        source = source.model_copy(update={"split": split} if split else {"questions": None})
    names = _names(list(islice(_raw_rows(source, kind), SAMPLE_ROWS))) if kind in NAMED_FIELDS else {}
    source = SourceConfig.model_validate({**source.model_dump(exclude_unset=True), "format": kind, "fields": names})
    records = list(islice(read_source(source), SAMPLE_ROWS))
    passages = [record for record in records if isinstance(record, PassageRecord)]
    questions = [record.question for record in records if isinstance(record, QuestionRecord)]
    words = [len(word_spans(record.passage.text)) for record in passages]
    has_qrels = kind in ("beir", "msmarco") and split is not None
    return SourceSample(
        path=path,
        format=kind,
        names=names,
        split=split,
        passages=passages,
        has_questions=bool(questions) or has_qrels,
        has_answers=any(question.answers for question in questions),
        has_positives=has_qrels or any(question.positive_ids for question in questions),
        mean_words=sum(words) / max(1, len(words)),
        bad=next((str(record) for record in records if isinstance(record, BadRow)), _repeat(passages)),
        num_bytes=sum(file.stat().st_size for file in files),
    )


def _repeat(passages: Sequence[PassageRecord]) -> str:
    """Describe the first passage whose id an earlier one of a source without repeats has; empty without any."""
    places: dict[str, str] = {}
    for record in passages:
        if not record.repeats and (first := places.setdefault(record.passage.id, record.where)) != record.where:
            return f"{record.where}: id {record.passage.id!r} occurs at {first} already"
    return ""


def _require_one_kind(path: str, files: Sequence[Path]) -> None:
    """Raise DataError for a folder whose files have several formats, by their names."""
    firsts: dict[str, str] = {}
    for file in files:
        ending = plain_name(file).suffix.lower()
        ending = {".ndjson": ".jsonl", ".md": ".txt", ".markdown": ".txt"}.get(ending, ending)
        if ending in (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".txt"):
            firsts.setdefault(ending, file.name)
    if len(firsts) > 1:
        raise DataError(
            f"init: folder {path} holds files of several formats ({', '.join(firsts.values())}); name its files one by "
            f"one, as in mvr-ray init {shlex.join(f'{path}/{name}' for name in firsts.values())}"
        )


def _raw_rows(source: SourceConfig, kind: str) -> Iterator[Mapping[str, Any]]:
    """Yield the unparsed rows of a source, without bad ones."""
    if kind == "huggingface":
        yield from dataset_rows(str(source_path(source)), source.split)
        return
    file = source_files(source)[0]
    if kind == "parquet":
        yield from (row for row in parquet_rows(file) if row is not None)
        return
    rows = json_lines(file) if kind == "jsonl" else csv_rows(file, (), "\t" if kind == "tsv" else ",")
    yield from (row.values for row in rows if isinstance(row, Row))


def _names(rows: Sequence[Mapping[str, Any]]) -> dict[str, str | None]:
    """Return the columns of the parts of passages and questions whose names are not those that readers expect."""
    if not rows or is_training_row(rows[0].keys()):
        return {}
    columns = list(dict.fromkeys(key for row in rows for key in row))
    by_lower = {column.lower(): column for column in reversed(columns)}
    has_only_questions = bool({*NAMES["question"]} & {*by_lower}) and not {*NAMES["text"]} & {*by_lower}
    parts = NAMES | QUESTION_NAMES if has_only_questions else NAMES
    match = {part: next((by_lower[name] for name in names if name in by_lower), None) for part, names in parts.items()}
    if any(isinstance(row.get(match["text"] or ""), dict) for row in rows):
        match["text"] = None
    if match["text"] is None and match["question"] is None:
        lengths: Counter[str] = Counter()
        for row in rows:
            for column, value in _values(row):
                lengths[column] += len(value) if isinstance(value, str) and column not in match.values() else 0
        longest = max(lengths, key=lambda column: lengths[column], default=None)
        match["text"] = longest if longest and lengths[longest] else None
    names: dict[str, str | None] = {
        part: column
        for part, column in match.items()
        if column is not None and column not in OWN_NAMES.get(part, (part,))
    }
    ids = [row.get(match["id"]) for row in rows] if match["id"] else []
    has_repeats = 2 * len(set(map(str, ids))) <= len(ids)
    needs_numbers = has_repeats if has_only_questions else match["question"] is None and (has_repeats or not ids)
    if needs_numbers:
        names["id"] = None
    return names


def _values(row: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a row and of the objects in it, under the names that `fields` takes."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _values(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _field_types(passages: Sequence[PassageRecord]) -> dict[str, str]:
    """Infer the types of the passages' fields; those without one type in all sources are left out. Cells of a column
    are numbers where all are, and none would lose a digit, as the zip code 02134 would."""
    types: dict[str, str] = {}
    for name in dict.fromkeys(name for record in passages for name in record.extras):
        reader = FieldReader("infer")
        try:
            check_field_name(name)
            values = [record.extras.get(name) for record in passages]
            cells = [value for value in values if isinstance(value, TextCell) and value]
            are_numbers = not any(re.match(r"[+-]?0\d", cell) or isinstance(cell_number(cell), str) for cell in cells)
            for value in values:
                if isinstance(value, TextCell):
                    value = (cell_number(value) if are_numbers else str(value)) if value else None
                reader.read({name: value})
        except ValueError:
            continue
        types |= reader.types
    return types


def _split(folder: Path, kind: str) -> str | None:
    """Return the judged split of a BEIR or MS MARCO folder: `test`, else `dev`, else the first; None without any."""
    files = folder.glob("qrels/*.tsv*") if kind == "beir" else folder.glob("qrels.*.tsv*")
    names = sorted(plain_name(file).name.removesuffix(".tsv").removeprefix("qrels.") for file in files)
    return next((name for name in ("test", "dev", "dev.small") if name in names), names[0] if names else None)


def _name(path: str) -> str:
    """Return a name for what comes from a source: the file's or folder's, without its endings."""
    name = Path(address_name(path)).name
    return _slug(name if path.startswith("hf:") else name.partition(".")[0])


def _file_name(output: Path) -> str:
    """Return a name for a run file: its own, after those of its folders below the working one, whose store is one."""
    parts = Path(os.path.relpath(output.parent / output.stem)).parts
    return "-".join(_slug(part) for part in parts if part != "..")[-60:].strip("-_")


def _slug(name: str) -> str:
    """Return a name with the characters that a store allows; without any, a checksum keeps names apart."""
    slug = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-_")[:60].lower()
    return slug or (f"corpus-{zlib.crc32(os.fsencode(name)):08x}" if name else "corpus")


def _question_sets(samples: Sequence[SourceSample]) -> dict[int, str]:
    """Return a name for the question set of each source that has one, by the source's place."""
    places = [at for at, sample in enumerate(samples) if sample.has_questions]
    sets: dict[int, str] = {}
    for at in places:
        base = "questions" if len(places) == 1 else _name(samples[at].path)
        names = (base, *(f"{base}{number}" for number in range(2, len(sets) + 2)))
        sets[at] = next(name for name in names if name not in sets.values())
    return sets


class QuestionUses(NamedTuple):
    """Question sets by their use. `prepare.splits` makes them of `split_set`, if there is one."""

    split_set: str | None
    learning: str
    gate: str
    report: list[str]


def _question_uses(names: Sequence[str]) -> QuestionUses:
    """Learn from the set that is named after training where there are others to measure with, else from a part of the
    first one."""
    learning = next(filter(TRAINING_NAME.search, names), "")
    others = [name for name in names if name != learning]
    if learning and others:
        gate = next(filter(DEV_NAME.search, others), others[0])
        return QuestionUses(None, learning, gate, [name for name in others if name != gate] or [gate])
    first = names[0]
    return QuestionUses(first, f"{first}_known", f"{first}_gate", [f"{first}_unseen"])


def _source_text(sample: SourceSample, set_name: str | None) -> str:
    """Return the lines of one source."""
    text = f"    - path: {_yaml_scalar(sample.path)}\n      format: {sample.format}\n"
    if sample.names:
        pairs = ", ".join(f"{part}: {_yaml_scalar(own) if own else 'null'}" for part, own in sample.names.items())
        note = "; null: rows are numbered" if None in sample.names.values() else ""
        text += f"      fields: {{{pairs}}}  # names in the file{note}\n"
    if sample.split:
        text += f"      split: {sample.split}\n"
    if set_name:
        text += f"      questions: {set_name}\n"
    return text if sample.passages else f"{text}      passages: false\n"


def run_file_text(name: str, samples: Sequence[SourceSample]) -> str:
    """Return the text of the run file, with a comment on every choice."""
    types = _field_types([record for sample in samples for record in sample.passages])
    mean_words = max(sample.mean_words for sample in samples)
    shards = max(2, min(256, sum(sample.num_bytes for sample in samples) // SHARD_BYTES))
    set_names = _question_sets(samples)
    sources = "".join(_source_text(sample, set_names.get(at)) for at, sample in enumerate(samples))
    chunks = "  chunk_words: 0                     # passages as they are; 100 cuts longer texts, as DPR does"
    windows = ""
    if mean_words > LONG_WORDS and set_names and not any(samples[at].has_answers for at in set_names):
        chunks = "  chunk_words: 0                     # whole texts, as the questions' judgements name them"
        windows = "\n  overlap_tokens: 64                 # long texts are read in windows that share so many tokens"
    elif mean_words > LONG_WORDS:
        chunks = f"  chunk_words: 100                   # texts are long ({mean_words:.0f} words): cut into passages"
    fields = "".join(f"    {_yaml_scalar(field)}: {kind}\n" for field, kind in types.items())
    if fields:
        fields = f"  fields:                            # for filters; take out what no search filters by\n{fields}"
    splits = training = questions = ""
    if set_names:
        labelled_sets = [own for at, own in set_names.items() if samples[at].has_answers or samples[at].has_positives]
        uses = _question_uses(labelled_sets or [*set_names.values()])
        sample_of = {own: samples[at] for at, own in set_names.items()}
        sample = sample_of[uses.split_set or uses.learning]
        if uses.split_set:
            splits = f"""\
  splits:
    - source: {uses.split_set:<22} # becomes {uses.split_set}_known, _gate, _other and _unseen
      unseen_share: 0.33             # articles whose questions neither training nor refinement sees
      known_share: 0.6
      gate_share: 0.1
"""
        if sample.has_positives:
            training = f"""
train:                               # `mvr-ray train`, before `index`; without it, the backbone is used as it is
  questions: {uses.learning:<23} # with their gold passages, and their hard negatives if they name some
"""
            if sample_of[uses.split_set or uses.gate].has_positives:
                training += f"  dev_questions: {uses.gate:<19} # choose the best epoch\n"
        labels = "" if sample.has_answers else LABELS_LINE
        report = ", ".join(uses.report)
        questions = f"""
refine:                              # from questions whose answers or passages are known
  questions: {uses.learning}
  gate: [{uses.gate}]
  report: [{report}]
{labels}
evaluate:
  questions: [{f"{uses.learning}, " * bool(uses.split_set)}{report}]
  bm25: true                         # for comparison
"""
    return f"""\
# Written by `mvr-ray init` from the first {SAMPLE_ROWS} rows of a source. docs/configuration.md: every key

store:
  path: store                        # where everything at rest lives: a folder, s3://.. or gs://..

prepare:
  corpus: {name}
  sources:
{sources}{chunks}
{fields}  num_shards: {shards:<22} # unit of work and of resume; 50 MB or more each
{splits}
encoder:
  name: {name}
  strategy: snippet_means            # a view is the mean of a snippet's tokens; mean: one vector a passage
  num_views: 8{windows}
{training}
index:
  name: {name}
  kind: flat                         # exact; hnsw or faiss: approximate, for many millions of views
{questions}"""


def _yaml_scalar(text: str) -> str:
    """Return a YAML scalar: plain if that is safe. YAML refuses or folds some characters that are not printable."""
    is_plain = re.fullmatch(r"[A-Za-z_./][\w./-]*", text) is not None
    if is_plain and isinstance(parse_yaml(text), str):
        return text
    scalar = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in scalar)
