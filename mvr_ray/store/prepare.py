"""Turn source files into a corpus and question sets, and replace the old ones in one step.

Stages: check, count, cut, sample, split. Passages go through scratch files, one shard in memory at a time; questions
are held in memory. The result depends on the sources and the settings alone. The store changes only after all output is
in scratch files; the next publication, which names the parts, is written last. Corpora that index versions name stay.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from mvr_ray.config import PrepareConfig, SourceConfig
from mvr_ray.core.judging.answers import Match, warn_of_runs
from mvr_ray.errors import (
    ConfigError,
    DataError,
    FormatError,
    MissingInputError,
    PublishConflictError,
    RowsLostError,
    StorageError,
    count_noun,
)
from mvr_ray.store import paths
from mvr_ray.store.chunks import AnswerPlace, carry_over, chunk, locate
from mvr_ray.store.corpus import (
    SETTINGS_OF_CHANGES,
    Corpus,
    CorpusInfo,
    PartInfo,
    SourceInfo,
    corpus_digest,
    publications,
    question_set,
    question_sets,
)
from mvr_ray.store.fields import FieldReader
from mvr_ray.store.files import Store, address_name
from mvr_ray.store.formats.records import BadRow, DroppedRow, PassageRecord, QuestionRecord, Record, with_fields
from mvr_ray.store.formats.sources import format_of, read_source, source_files, source_path
from mvr_ray.store.gc import collect_corpus
from mvr_ray.store.local_files import sha256_of
from mvr_ray.store.parts import CorpusPart, write_passages
from mvr_ray.store.questions import archive, only_with, put_questions, write_question_file
from mvr_ray.store.sampling import draw, hash_rank, split
from mvr_ray.store.shard_spill import ShardSpill
from mvr_ray.types import Passage, Progress, Question, no_progress

log = logging.getLogger(__name__)

REPORT_EVERY = 5000
NUM_NAMED = 5


@dataclass(frozen=True)
class PrepareReport:
    """Counts of rows read and written, and of the difference: every row read is written, or named, or counted here.

    passages_read + chunks_gained = passages_written + repeated ids + duplicates + passages_not_drawn
    """

    passages_read: int
    passages_written: int
    bad_rows: tuple[BadRow, ...]
    duplicates: int
    """Repeats of a passage in sources that repeat them, such as DPR's training files; kept once."""
    questions: dict[str, int]
    parts: int
    digest: str
    chunks_gained: int = 0
    passages_not_drawn: int = 0
    questions_not_drawn: int = 0
    """Left out by the `share` of a source or max_questions, or as max_passages left out all their gold passages."""
    rows_dropped: int = 0
    """Rows that their format's convention leaves out, such as queries without judgements."""
    dropped_by_reason: Mapping[str, int] = field(default_factory=dict)
    """The same rows, counted by reason: redirects, pages of other namespaces, queries without judgements."""
    hard_negatives_dropped: int = 0
    """Hard negatives that name no passage of the corpus."""
    fields: dict[str, str] = field(default_factory=dict)
    """Names and types of the passages' fields."""


@dataclass
class BadRows:
    """Collects bad rows up to the limit."""

    limit: int
    rows: list[BadRow] = field(default_factory=list)

    def add(self, row: BadRow) -> None:
        self.rows.append(row)
        log.warning("bad row: %s", row)
        if len(self.rows) > self.limit:
            first = "; ".join(str(bad) for bad in self.rows[:NUM_NAMED])
            more = f" (and {len(self.rows) - NUM_NAMED} before this)" if len(self.rows) > NUM_NAMED else ""
            raise DataError(
                f"{count_noun(len(self.rows), 'bad row')}, more than prepare.max_bad_rows={self.limit}: {first}{more}; "
                f"correct the source, or raise prepare.max_bad_rows to skip such rows"
            )


def prepare(
    cfg: PrepareConfig,
    store: Store,
    progress: Progress = no_progress,
    records: Iterable[Record] | None = None,
    match: Match = "string",
) -> PrepareReport:
    """Make the corpus and its question sets, replacing those of the same names. `records` are passages that replace
    those of the sources; `match` is `evaluate.match`, by which answers are found in chunks.

    Raises DataError with file and line when there are more bad rows than allowed, and with the content of sources
    that give no passage; MissingInputError for a missing source; RowsLostError if a passage was lost.
    """
    if records is not None:
        cfg = cfg.model_copy(update={"sources": [], "splits": []})
    else:
        _check(cfg)
    _require_readable(cfg, store)
    with store.scratch() as folder:
        work = _Preparation(cfg, folder, progress, match)
        work.read(records)
        if not work.passages.num_added:
            raise DataError(_without_passages(cfg.sources))
        work.draw_questions()
        work.cut()
        questions = {name: work.resolve(name, own) for name, own in work.sets.items()}
        for name, own in questions.items():
            warn_of_runs(name, (question.answers for question in own), match)
        names = work.draw_passages(questions)
        if names is not None:
            questions = work.with_drawn(names, questions)
        questions |= work.split(questions)
        parts = work.write_parts(names)
        for name, own in questions.items():
            write_question_file(folder / f"{name}.arrow", name, own)
        report = work.report(parts, questions)
        _put_in_place(cfg, store, folder, parts, report)
    log.info("prepared: corpus=%s passages=%d digest=%s", cfg.corpus, report.passages_written, report.digest)
    return report


class _Origin(NamedTuple):
    """The place of a question, and the passages that the `share` of its source leaves out."""

    where: str
    left_out_ids: set[str]


class _Preparation:
    """One run of `prepare`: rows of the sources, the pieces that they are cut into, and counts of both."""

    def __init__(self, cfg: PrepareConfig, folder: Path, progress: Progress, match: Match) -> None:
        self.cfg, self.folder, self.progress, self.match = cfg, folder, progress, match
        self.bad = BadRows(cfg.max_bad_rows)
        self.fields = FieldReader(cfg.fields)
        self.value_names: set[str] = set()
        """Names of what passages have besides their own parts."""
        self.passages = ShardSpill(folder / "read", cfg.num_shards, self.fields.types)
        self.sets: dict[str, list[QuestionRecord]] = {one.questions: [] for one in cfg.sources if one.questions}
        self.origin_of: dict[tuple[str, str], _Origin] = {}
        """Origins of the questions by set and id."""
        self.dropped_by_reason: Counter[str] = Counter()
        """Rows that their formats leave out."""
        self.left_out_ids: set[str] = set()
        """Passages that the `share` of a source leaves out, and no other source gives."""
        self.questions_not_drawn = 0
        self.pieces = self.passages
        """Passages ready for their parts; each id may occur several times."""
        self.num_repeats = self.num_unique = self.num_pieces = 0
        self.places: dict[tuple[str, str, str], AnswerPlace] = {}
        """Where questions are answered, by set, question id and positive id."""
        self.negatives: dict[str, str] = {}
        """Pieces by the ids of hard negatives that exist."""
        self.parts: list[PartInfo] = []
        """The parts written so far, in order."""

    def read(self, records: Iterable[Record] | None) -> None:
        sources = [(source, read_source(source)) for source in self.cfg.sources]
        if records is not None:
            sources = [(SourceConfig(path="records"), iter(records))]
        count = 0
        for source, own_records in sources:
            left_out_ids: set[str] = set()
            for record in own_records:
                count += 1
                if count % REPORT_EVERY == 0:
                    self.progress("rows read", count, 0)
                self._add(record, source, left_out_ids)
            self.left_out_ids |= left_out_ids
        self.progress("rows read", count, count)
        if self.fields.infers:  # the corpus does not depend on the order of the fields in the sources
            self.passages.types = dict(sorted(self.fields.types.items()))
        absent_names = sorted(self.fields.types.keys() - self.value_names)
        if absent_names and self.passages.num_added:
            names = ", ".join(sorted(self.value_names - self.fields.types.keys())[:NUM_NAMED]) or "no others"
            message = "no passage has %s of prepare.fields, which is null in all; correct the name (passages have: %s)"
            log.warning(message, ", ".join(absent_names), names)
        self._leave_out_questions()

    def _add(self, record: Record, source: SourceConfig, left_out_ids: set[str]) -> None:
        """Add a record of a source, or to `left_out_ids` a passage that its `share` leaves out."""
        match record:
            case PassageRecord(passage) if not _is_sampled(source, passage):
                left_out_ids.add(passage.id)
            case PassageRecord():
                self.value_names.update(record.extras)
                record = with_fields(record, self.fields.read)
                self.passages.add(record) if isinstance(record, PassageRecord) else self.bad.add(record)
            case QuestionRecord(question, where):
                assert source.questions is not None
                key = (source.questions, question.id)
                if key in self.origin_of:
                    reason = f"question id {question.id!r} already occurs in {self.origin_of[key].where}"
                    self.bad.add(BadRow(where, reason))
                else:
                    self.origin_of[key] = _Origin(where, left_out_ids)
                    self.sets[source.questions].append(record)
            case BadRow():
                self.bad.add(record)
            case DroppedRow(_, reason):
                self.dropped_by_reason[reason] += 1

    def _leave_out_questions(self) -> None:
        """Leave out the questions whose first positive the `share` of their own source leaves out, or that of another
        one while no source gives it."""
        for shard in range(self.passages.num_shards) if self.left_out_ids else ():
            self.left_out_ids.difference_update(passage.id for passage in self.passages.unique(shard).passages)
        for name, own in self.sets.items():
            self.sets[name] = [record for record in own if not self._is_left_out(name, record.question)]
            self.questions_not_drawn += len(own) - len(self.sets[name])

    def _is_left_out(self, name: str, question: Question) -> bool:
        own_ids = self.origin_of[name, question.id].left_out_ids
        return any(first in own_ids or first in self.left_out_ids for first in question.positive_ids[:1])

    def draw_questions(self) -> None:
        """Draw the questions of each set, `max_questions` at most."""
        for name, own in self.sets.items() if self.cfg.max_questions else ():
            ids = draw((record.question.id for record in own), self.cfg.max_questions, "questions")
            self.sets[name] = [record for record in own if record.question.id in ids]
            self.questions_not_drawn += len(own) - len(ids)

    def cut(self) -> None:
        """Drop repeats and duplicates, cut the other passages, and record which chunks answer the questions. Without
        chunks and draws, each part has all its passages, and is written here."""
        questions_of: dict[str, list[tuple[str, Question]]] = {}
        negative_ids: set[str] = set()
        for name, records in self.sets.items():
            for question, _ in records:
                negative_ids.update(question.hard_negative_ids)
                for passage_id in question.positive_ids:
                    questions_of.setdefault(passage_id, []).append((name, question))
        num_words, passages = self.cfg.chunk_words, self.passages
        if num_words:
            self.pieces = ShardSpill(self.folder / "cut", self.cfg.num_shards, passages.types)
        num_duplicates = 0
        for shard in range(passages.num_shards):
            own = passages.unique(shard)
            self.num_repeats += own.repeats
            self.num_unique += len(own.passages)
            num_duplicates += len(own.bad)
            for row in own.bad:
                self.bad.add(row)
            for passage in own.passages:
                chunks = chunk(passage, num_words)
                self.num_pieces += len(chunks)
                if passage.id in negative_ids:
                    self.negatives[passage.id] = chunks[0].passage.id
                for name, question in questions_of.get(passage.id, ()):
                    starts = question.answer_starts if passage.id == question.positive_ids[0] else ()
                    place = locate(passage.text, chunks, question.answers, starts, self.match)
                    self.places[name, question.id, passage.id] = place
                for piece in chunks if num_words else ():
                    self.pieces.add(PassageRecord(piece.passage, f"chunk of passage {passage.id!r}"))
            if num_words or self.cfg.max_passages:
                self.progress("parts sorted", shard + 1, passages.num_shards)
            else:
                self._write_part(shard, own.passages)
        _require_equal(passages.num_added, self.num_unique + self.num_repeats + num_duplicates, "read", "sorted")

    def resolve(self, name: str, records: list[QuestionRecord]) -> list[Question]:
        """Carry questions over to the cut corpus, without positives that a `share` leaves out; one whose positive id
        names no passage of the sources is a bad row."""
        questions = []
        for question, where in records:
            places = {positive: self.places.get((name, question.id, positive)) for positive in question.positive_ids}
            place_of = {positive: place for positive, place in places.items() if place}
            if missing := [one for one in places if one not in place_of and one not in self.left_out_ids]:
                reason = f"positive {missing[0]!r} of question {question.id!r} names no passage of the corpus"
                self.bad.add(BadRow(where, reason))
                continue
            negatives = tuple(self.negatives[n] for n in question.hard_negative_ids if n in self.negatives)
            questions.append(carry_over(question, place_of, negatives))
        return questions

    def draw_passages(self, sets: dict[str, list[Question]]) -> set[str] | None:
        """Draw the ids of the passages to keep, gold first; None keeps all."""
        cfg = self.cfg
        if not cfg.max_passages or self.num_pieces <= cfg.max_passages:
            return None
        gold = {positive for questions in sets.values() for question in questions for positive in question.positive_ids}
        ids = (passage.id for shard in range(cfg.num_shards) for passage in self.pieces.unique(shard).passages)
        return draw(ids, cfg.max_passages, "passages", first=gold)

    def with_drawn(self, names: set[str], sets: dict[str, list[Question]]) -> dict[str, list[Question]]:
        """Return the questions without the passages that were not drawn, and without questions of these alone."""
        sets_now = {name: only_with(names.__contains__, own) for name, own in sets.items()}
        self.questions_not_drawn += _count(sets) - _count(sets_now)
        return sets_now

    def split(self, questions: dict[str, list[Question]]) -> dict[str, list[Question]]:
        """Return the sets of `prepare.splits`. A passage without a title is an article, with all its chunks."""
        places = ((place, place.title or f"passage {positive}") for (*_, positive), place in self.places.items())
        article_of = {piece: article for place, article in places for piece in place.chunk_ids}
        sets: dict[str, list[Question]] = {}
        for own in self.cfg.splits:
            source = questions[own.source]
            firsts = ((q.id, next(iter(q.positive_ids), "")) for q in source)
            articles = {name: article_of.get(first, f"question {name}") for name, first in firsts}
            for name, part in split(source, articles, **own.model_dump(exclude={"source"})).items():
                full = f"{own.source}_{name}"
                if full in questions or full in sets:
                    raise ConfigError(
                        f"prepare.splits: two question sets would be named {full!r}; rename a source's set"
                    )
                sets[full] = part
        return sets

    def write_parts(self, passages: set[str] | None) -> list[PartInfo]:
        """Write the parts that `cut` did not."""
        for shard in range(len(self.parts), self.cfg.num_shards):
            pieces = self.pieces.unique(shard).passages
            rows = [passage for passage in pieces if passages is None or passage.id in passages]
            self._write_part(shard, rows)
        num_written = sum(part.num_passages for part in self.parts)
        _require_equal(self.num_pieces if passages is None else len(passages), num_written, "kept", "written")
        return self.parts

    def _write_part(self, shard: int, rows: Sequence[Passage]) -> None:
        """Write a part under its content's name and read it back: every passage must be there."""
        aside = self.folder / "part.arrow"
        write_passages(aside, rows, self.pieces.types)
        if missing := sorted({row.id for row in rows} - set(CorpusPart(aside).ids())):
            raise RowsLostError(
                f"part {shard}: {len(missing)} of {len(rows)} passages not written, first: {missing[:5]}"
            )
        digest = sha256_of(aside)
        name = paths.corpus_part(shard, digest)
        self.parts.append(PartInfo(name, len(rows), aside.stat().st_size, digest))
        aside.rename(self.folder / name)
        self.progress("parts written", shard + 1, self.cfg.num_shards)

    def report(self, parts: Sequence[PartInfo], questions: Mapping[str, Sized]) -> PrepareReport:
        """Count what was read, written and left out."""
        num_written = sum(part.num_passages for part in parts)
        hard_negatives = [own for rows in self.sets.values() for row in rows for own in row.question.hard_negative_ids]
        return PrepareReport(
            passages_read=self.passages.num_added + len(self.left_out_ids),
            passages_written=num_written,
            bad_rows=tuple(self.bad.rows),
            duplicates=self.num_repeats,
            questions={name: len(own) for name, own in sorted(questions.items())},
            parts=len(parts),
            digest=corpus_digest(parts),
            chunks_gained=self.num_pieces - self.num_unique,
            passages_not_drawn=self.num_pieces - num_written + len(self.left_out_ids),
            questions_not_drawn=self.questions_not_drawn,
            rows_dropped=self.dropped_by_reason.total(),
            dropped_by_reason=dict(sorted(self.dropped_by_reason.items())),
            hard_negatives_dropped=sum(name not in self.negatives for name in hard_negatives),
            fields=dict(self.pieces.types),
        )


def _check(cfg: PrepareConfig) -> None:
    if not cfg.sources:
        raise ConfigError("prepare.sources is empty; name at least one file, such as - path: train-v1.1.json")
    if not any(source.passages for source in cfg.sources):
        raise ConfigError("no entry of prepare.sources gives passages; set passages: true on one")
    names = {source.questions for source in cfg.sources if source.questions}
    for number, part in enumerate(cfg.splits):
        if part.source not in names:
            there = ", ".join(sorted(names)) or "none"
            raise ConfigError(f"prepare.splits.{number}.source: no question set {part.source!r}; there are: {there}")
        if part.known_share + part.gate_share > 1:
            raise ConfigError(
                f"prepare.splits.{number}: known_share {part.known_share} and gate_share {part.gate_share} "
                f"are more than 1 together; lower one"
            )


def _is_sampled(source: SourceConfig, passage: Passage) -> bool:
    return source.share == 1 or hash_rank(passage.title or passage.id, "source") < source.share * 2**64


def _without_passages(sources: Sequence[SourceConfig]) -> str:
    """Say that the sources give no passage, or without any the records of a caller."""
    if not sources:
        return "prepare: no passage is given; nothing was changed"
    return (
        f"prepare: the sources give no passage: {'; '.join(map(_holdings, sources))}. Nothing was changed; add a "
        f"source with passages to prepare.sources"
    )


def _holdings(source: SourceConfig) -> str:
    """Describe the content of a source, including rows that the run does not take."""
    counts = Counter(map(type, read_source(source.model_copy(update={"passages": True, "questions": "all"}))))
    limit = f" (share: {source.share})" if source.passages else " (passages: false)"
    return (
        f"{address_name(source.path)} (format {format_of(source)}) holds "
        f"{count_noun(counts[PassageRecord], 'passage')}{limit * bool(counts[PassageRecord])}, "
        f"{count_noun(counts[QuestionRecord], 'question')}, {count_noun(counts[BadRow], 'bad row')}"
    )


def _put_in_place(cfg: PrepareConfig, store: Store, files: Path, infos: list[PartInfo], report: PrepareReport) -> None:
    """Move parts to the store under names of their content, then question sets, and publish the corpus last."""
    _archive_previous(cfg, store)
    for part in infos:
        store.put_file(files / part.file, f"{paths.corpus_dir(cfg.corpus)}/{part.file}")
    counts = {key: value for key, value in asdict(report).items() if isinstance(value, int)}
    settings = {name: getattr(cfg, name) for name in SETTINGS_OF_CHANGES}
    info = CorpusInfo(
        name=cfg.corpus,
        digest=report.digest,
        num_passages=report.passages_written,
        parts=tuple(infos),
        sources=tuple(describe_sources(cfg)),
        questions=report.questions,
        counts={**counts, "bad_rows": len(report.bad_rows), **settings},
        fields=report.fields,
    )
    corpus = Corpus(store, info)
    store.touch(paths.corpus_version(cfg.corpus, report.digest))  # an old corpus that returns is not collected now
    for name, count in report.questions.items():
        put_questions(corpus, name, files / f"{name}.arrow", count)
    while not corpus.number:
        try:
            corpus.publish(after=max(publications(store, cfg.corpus), default=0))
        except PublishConflictError as error:  # the sources define the whole corpus
            log.info("published once more: %s", error)
    collect_corpus(store, cfg.corpus)


def _require_readable(cfg: PrepareConfig, store: Store) -> None:
    """Raise FormatError if a newer program made the last corpus or a question set of it: new ones would lack what this
    program cannot represent. Damaged ones are replaced."""
    with _suppress_read_errors():
        corpus = Corpus.open(store, cfg.corpus)
        for name in question_sets(corpus):
            with _suppress_read_errors():
                question_set(corpus, name)


@contextmanager
def _suppress_read_errors() -> Iterator[None]:
    """Suppress errors of reading the store, except those of formats that this program does not read."""
    try:
        yield
    except FormatError:
        raise
    except (MissingInputError, StorageError):
        return


def _archive_previous(cfg: PrepareConfig, store: Store) -> None:
    """Archive the corpus that this one replaces, with the question sets of its preparation."""
    try:
        before = Corpus.open(store, cfg.corpus)
    except (MissingInputError, StorageError):
        return
    archive(before, (name for name in question_sets(before) if name in before.info.questions))


def describe_sources(cfg: PrepareConfig) -> Iterator[SourceInfo]:
    """Describe the files of the sources by size and digest."""
    for source in cfg.sources:
        files, kind, path = source_files(source), format_of(source), source_path(source)
        if not files:  # a data set of the Hugging Face hub
            yield SourceInfo(source.path, kind, 0, "")
        for file in files:
            within = "" if file == path else f"/{file.relative_to(path).as_posix()}"
            yield SourceInfo(
                f"{address_name(source.path).rstrip('/')}{within}", kind, file.stat().st_size, sha256_of(file)
            )


def _count(sets: Mapping[str, Sized]) -> int:
    return sum(len(some) for some in sets.values())


def _require_equal(num_in: int, num_out: int, first: str, second: str) -> None:
    if num_in != num_out:
        raise RowsLostError(f"{num_in} passages {first}, {num_out} {second}; this is a fault of the program, report it")
