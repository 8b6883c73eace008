"""Turn source files into a corpus and question sets, and replace the old ones in one step.

Stages: check, count, cut, sample, split. Passages go through scratch files, one shard in memory at a time; questions
are held in memory. The result depends on the sources and the settings alone. The store changes only after all output is
in scratch files; the next publication, which names the parts, is written last. Corpora that index versions name stay.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from mvr_ray.config import PrepareConfig, SourceConfig
from mvr_ray.errors import (
    ConfigError,
    DataError,
    FormatError,
    MissingInputError,
    PublishConflictError,
    RowsLostError,
    StorageError,
)
from mvr_ray.store import paths
from mvr_ray.store.chunks import AnswerPlace, carry_over, chunk, locate
from mvr_ray.store.corpus import (
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
from mvr_ray.store.files import Store, sha256_of
from mvr_ray.store.formats import (
    BadRow,
    DroppedRow,
    PassageRecord,
    QuestionRecord,
    Record,
    format_of,
    read_source,
    source_files,
)
from mvr_ray.store.gc import collect_corpus
from mvr_ray.store.parts import CorpusPart, write_passages
from mvr_ray.store.prepare_report import BadRows, PrepareReport
from mvr_ray.store.questions import put_questions, read_questions, write_question_file, write_questions
from mvr_ray.store.sampling import draw, hash_rank, split
from mvr_ray.store.shard_spill import ShardSpill
from mvr_ray.types import Passage, Progress, Question, no_progress

log = logging.getLogger(__name__)

REPORT_EVERY = 5000


class _SourceRows(NamedTuple):
    """The sources' passages and question sets, and how many rows formats (by reason) and `share` leave out."""

    passages: ShardSpill
    sets: dict[str, list[QuestionRecord]]
    dropped_by_reason: Counter[str]
    passages_left_out: int
    questions_left_out: int


class _Links(NamedTuple):
    """References of questions to passages: answer places by (set, question id, positive id), negatives that exist."""

    places: dict[tuple[str, str, str], AnswerPlace]
    negatives: dict[str, str]


class _Pieces(NamedTuple):
    """Passages ready for their parts (`spill` may hold each id several times), and how many there are."""

    spill: ShardSpill
    links: _Links
    num_repeats: int
    num_unique: int
    num_pieces: int


def prepare(
    cfg: PrepareConfig, store: Store, progress: Progress = no_progress, records: Iterable[Record] | None = None
) -> PrepareReport:
    """Make the corpus and its question sets, replacing those of the same names. `records` are passages that replace
    those of the sources.

    Raises DataError with file and line when there are more bad rows than allowed, and with the content of sources
    that give no passage; MissingInputError for a missing source; RowsLostError if a passage was lost.
    """
    if records is not None:
        cfg = cfg.model_copy(update={"sources": [], "splits": []})
    else:
        _check(cfg)
    _require_readable(cfg, store)
    bad = BadRows(cfg.max_bad_rows)
    with store.scratch() as folder:
        rows = _read(cfg, folder / "read", bad, progress, records)
        if not rows.passages.num_added and records is not None:
            raise DataError("prepare: no passage is given; nothing was changed")
        if not rows.passages.num_added:
            raise DataError(
                f"prepare: the sources give no passage: {'; '.join(map(_holdings, cfg.sources))}. Nothing was changed; "
                f"add a source with passages to prepare.sources"
            )
        sets = {name: _draw_questions(records, cfg.max_questions) for name, records in rows.sets.items()}
        pieces = _cut(cfg, rows.passages, folder / "cut", sets, bad, progress)
        over_pieces = {name: _resolve(name, records, pieces.links, bad) for name, records in sets.items()}
        passages = _draw_passages(cfg, pieces, over_pieces)
        questions = {name: _with_passages(some, passages) for name, some in over_pieces.items()}
        num_unused = _count(sets) - _count(over_pieces)
        num_not_drawn = _count(rows.sets) - num_unused - _count(questions)
        questions |= _splits(cfg, questions, pieces.links)
        files = folder / "out"
        parts = _write_parts(cfg, pieces, passages, files, progress)
        num_written = sum(part.num_passages for part in parts)
        for name, some in questions.items():
            write_question_file(files / f"{name}.arrow", name, some)
        report = PrepareReport(
            passages_read=rows.passages.num_added + rows.passages_left_out,
            passages_written=num_written,
            bad_rows=tuple(bad.rows),
            duplicates=pieces.num_repeats,
            questions={name: len(some) for name, some in sorted(questions.items())},
            parts=len(parts),
            digest=corpus_digest(parts),
            chunks_gained=pieces.num_pieces - pieces.num_unique,
            passages_not_drawn=pieces.num_pieces - num_written + rows.passages_left_out,
            questions_not_drawn=num_not_drawn + rows.questions_left_out,
            rows_dropped=rows.dropped_by_reason.total(),
            dropped_by_reason=dict(sorted(rows.dropped_by_reason.items())),
            hard_negatives_dropped=_num_lost_negatives(sets, pieces.links),
            fields=dict(pieces.spill.types),
        )
        _require_equal(pieces.num_pieces if passages is None else len(passages), num_written, "kept", "written")
        _put_in_place(cfg, store, files, parts, report)
    log.info("prepared: corpus=%s passages=%d digest=%s", cfg.corpus, report.passages_written, report.digest)
    return report


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


def _read(
    cfg: PrepareConfig, folder: Path, bad: BadRows, progress: Progress, records: Iterable[Record] | None
) -> _SourceRows:
    fields = FieldReader(cfg.fields)
    spill = ShardSpill(folder, cfg.num_shards, fields.types)
    sets: dict[str, list[QuestionRecord]] = {source.questions: [] for source in cfg.sources if source.questions}
    place_of: dict[tuple[str, str], str] = {}
    dropped_by_reason: Counter[str] = Counter()
    count = 0
    left_out: set[str] = set()
    sources = [(source, read_source(source)) for source in cfg.sources]
    if records is not None:
        sources = [(SourceConfig(path="records"), iter(records))]
    for source, own_records in sources:
        for record in own_records:
            count += 1
            if count % REPORT_EVERY == 0:
                progress("rows read", count, 0)
            match record:
                case PassageRecord(passage) if not _is_sampled(source, passage):
                    left_out.add(passage.id)
                case PassageRecord(passage, where):
                    try:
                        passage = passage._replace(fields=fields.read(record.extras))
                    except ValueError as error:
                        bad.add(BadRow(where, str(error)))
                    else:
                        spill.add(record._replace(passage=passage))
                case QuestionRecord(question, where):
                    assert source.questions is not None
                    key = (source.questions, question.id)
                    if key in place_of:
                        bad.add(BadRow(where, f"question id {question.id!r} already occurs in {place_of[key]}"))
                    else:
                        place_of[key] = where
                        sets[source.questions].append(record)
                case BadRow():
                    bad.add(record)
                case DroppedRow(_, reason):
                    dropped_by_reason[reason] += 1
    progress("rows read", count, count)
    if fields.infers:  # the corpus does not depend on the order of the fields in the sources
        spill.types = dict(sorted(fields.types.items()))
    own = {
        name: [record for record in records if not left_out.intersection(record.question.positive_ids[:1])]
        for name, records in sets.items()
    }
    return _SourceRows(spill, own, dropped_by_reason, len(left_out), _count(sets) - _count(own))


def _is_sampled(source: SourceConfig, passage: Passage) -> bool:
    return source.share == 1 or hash_rank(passage.title or passage.id, "source") < source.share * 2**64


def _holdings(source: SourceConfig) -> str:
    """Describe the content of a source, including rows that the run does not take."""
    counts = Counter(
        type(record) for record in read_source(source.model_copy(update={"passages": True, "questions": "all"}))
    )
    limit = (
        "" if not counts[PassageRecord] else f" (share: {source.share})" if source.passages else " (passages: false)"
    )
    return (
        f"{source.path} (format {format_of(source)}) holds {counts[PassageRecord]} passages{limit}, "
        f"{counts[QuestionRecord]} questions, {counts[BadRow]} bad rows"
    )


def _draw_questions(records: list[QuestionRecord], limit: int) -> list[QuestionRecord]:
    if not limit or len(records) <= limit:
        return records
    names = draw((record.question.id for record in records), limit, "questions")
    return [record for record in records if record.question.id in names]


def _cut(
    cfg: PrepareConfig,
    passages: ShardSpill,
    folder: Path,
    sets: dict[str, list[QuestionRecord]],
    bad: BadRows,
    progress: Progress,
) -> _Pieces:
    """Drop repeats and duplicates, cut the other passages, and record which chunks answer the questions."""
    questions_of: dict[str, list[tuple[str, Question]]] = {}
    negative_ids: set[str] = set()
    for name, records in sets.items():
        for question, _ in records:
            negative_ids.update(question.hard_negative_ids)
            for passage_id in question.positive_ids:
                questions_of.setdefault(passage_id, []).append((name, question))
    links = _Links({}, {})
    pieces = ShardSpill(folder, cfg.num_shards, passages.types) if cfg.chunk_words else passages
    num_repeats = num_unique = num_duplicates = num_pieces = 0
    for shard in range(passages.num_shards):
        own = passages.unique(shard)
        num_repeats += own.repeats
        num_unique += len(own.passages)
        num_duplicates += len(own.bad)
        for row in own.bad:
            bad.add(row)
        for passage in own.passages:
            chunks = chunk(passage, cfg.chunk_words)
            num_pieces += len(chunks)
            if passage.id in negative_ids:
                links.negatives[passage.id] = chunks[0].passage.id
            for name, question in questions_of.get(passage.id, ()):
                starts = question.answer_starts if passage.id == question.positive_ids[0] else ()
                place = locate(passage.text, chunks, question.answers, starts)
                links.places[name, question.id, passage.id] = place
            if cfg.chunk_words:
                for piece in chunks:
                    pieces.add(PassageRecord(piece.passage, f"chunk of passage {passage.id!r}"))
        progress("parts sorted", shard + 1, passages.num_shards)
    _require_equal(passages.num_added, num_unique + num_repeats + num_duplicates, "read", "sorted")
    return _Pieces(pieces, links, num_repeats, num_unique, num_pieces)


def _resolve(name: str, records: list[QuestionRecord], links: _Links, bad: BadRows) -> list[Question]:
    """Carry questions over to the cut corpus; one whose positive id names no passage is a bad row."""
    questions = []
    for question, where in records:
        places = [links.places.get((name, question.id, positive)) for positive in question.positive_ids]
        missing = [positive for positive, place in zip(question.positive_ids, places) if place is None]
        if missing:
            reason = f"positive {missing[0]!r} of question {question.id!r} names no passage of the corpus"
            bad.add(BadRow(where, reason))
            continue
        negatives = tuple(links.negatives[n] for n in question.hard_negative_ids if n in links.negatives)
        questions.append(carry_over(question, [place for place in places if place is not None], negatives))
    return questions


def _draw_passages(cfg: PrepareConfig, pieces: _Pieces, sets: dict[str, list[Question]]) -> set[str] | None:
    """Draw the ids of the passages to keep, gold first; None keeps all."""
    if not cfg.max_passages or pieces.num_pieces <= cfg.max_passages:
        return None
    gold = {positive for questions in sets.values() for question in questions for positive in question.positive_ids}
    ids = (passage.id for shard in range(cfg.num_shards) for passage in pieces.spill.unique(shard).passages)
    return draw(ids, cfg.max_passages, "passages", first=gold)


def _with_passages(questions: list[Question], passages: set[str] | None) -> list[Question]:
    """Remove ids that were not drawn from questions, and questions that then have no gold passage."""
    if passages is None:
        return questions
    results = []
    for question in questions:
        positives = tuple(name for name in question.positive_ids if name in passages)
        if question.positive_ids and not positives:
            continue
        same_first = positives[:1] == question.positive_ids[:1]
        results.append(
            question._replace(
                positive_ids=positives,
                hard_negative_ids=tuple(name for name in question.hard_negative_ids if name in passages),
                answer_starts=question.answer_starts if same_first else (-1,) * len(question.answers),
            )
        )
    return results


def _splits(cfg: PrepareConfig, questions: dict[str, list[Question]], links: _Links) -> dict[str, list[Question]]:
    titles = {(name, question_id): place.title for (name, question_id, _), place in reversed(links.places.items())}
    sets: dict[str, list[Question]] = {}
    for own in cfg.splits:
        source = questions[own.source]
        articles = {q.id: titles.get((own.source, q.id), f"question {q.id}") for q in source}
        for name, part in split(source, articles, **own.model_dump(exclude={"source"})).items():
            full = f"{own.source}_{name}"
            if full in questions or full in sets:
                raise ConfigError(f"prepare.splits: two question sets would be named {full!r}; rename a source's set")
            sets[full] = part
    return sets


def _write_parts(
    cfg: PrepareConfig, pieces: _Pieces, passages: set[str] | None, folder: Path, progress: Progress
) -> list[PartInfo]:
    """Write every part under its content's name and read it back: every passage must be there."""
    infos: list[PartInfo] = []
    for shard in range(cfg.num_shards):
        own = pieces.spill.unique(shard)
        if cfg.chunk_words and own.bad:
            raise DataError(f"a chunk's id is a passage's id: {own.bad[0]}; give the source an id_prefix")
        rows = [passage for passage in own.passages if passages is None or passage.id in passages]
        aside = folder / "part.arrow"
        write_passages(aside, rows, pieces.spill.types)
        missing = sorted({row.id for row in rows} - set(CorpusPart(aside).ids()))
        if missing:
            first = missing[:5]
            raise RowsLostError(f"part {shard}: {len(missing)} of {len(rows)} passages not written, first: {first}")
        digest = sha256_of(aside)
        name = paths.corpus_part(shard, digest)
        infos.append(PartInfo(name, len(rows), aside.stat().st_size, digest))
        aside.rename(folder / name)
        progress("parts written", shard + 1, cfg.num_shards)
    return infos


def _put_in_place(cfg: PrepareConfig, store: Store, files: Path, infos: list[PartInfo], report: PrepareReport) -> None:
    """Move parts to the store under names of their content, then question sets, and publish the corpus last."""
    _archive_previous(cfg, store)
    for part in infos:
        store.put_file(files / part.file, f"{paths.corpus_dir(cfg.corpus)}/{part.file}")
    counts = {key: value for key, value in asdict(report).items() if isinstance(value, int)}
    info = CorpusInfo(
        name=cfg.corpus,
        digest=report.digest,
        num_passages=report.passages_written,
        parts=tuple(infos),
        sources=tuple(_describe_sources(cfg)),
        questions=report.questions,
        counts={**counts, "bad_rows": len(report.bad_rows)},
        fields=report.fields,
    )
    corpus = Corpus(store, info)
    for name, count in report.questions.items():
        put_questions(corpus, name, files / f"{name}.arrow", count)
    _publish(corpus)
    collect_corpus(store, cfg.corpus)


def _publish(corpus: Corpus) -> None:
    """Publish after the last publication, and again on a conflict: the sources define the whole corpus."""
    while True:
        after = max(publications(corpus.store, corpus.name), default=0)
        try:
            return corpus.publish(after)
        except PublishConflictError as error:
            log.info("published once more: %s", error)


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
    """Store the corpus that this one replaces under its digest, if an earlier program prepared it."""
    try:
        before = Corpus.open(store, cfg.corpus)
    except (MissingInputError, StorageError):
        return
    path = paths.corpus_version(before.name, before.digest)
    if not store.exists(path):
        for name in question_sets(before):
            if name in before.info.questions:
                write_questions(before, name, read_questions(before, name))
        store.write_bytes(path, before.info.to_json())


def _describe_sources(cfg: PrepareConfig) -> Iterator[SourceInfo]:
    for source in cfg.sources:
        files = source_files(source)
        if not files:  # a data set of the Hugging Face hub
            yield SourceInfo(source.path, format_of(source), 0, "")
        for file in files:
            name = _name_of(source, file, len(files))
            yield SourceInfo(name, format_of(source), file.stat().st_size, sha256_of(file))


def _name_of(source: SourceConfig, file: Path, num_files: int) -> str:
    return source.path if num_files == 1 and not source.path.endswith("/") else f"{source.path.rstrip('/')}/{file.name}"


def _num_lost_negatives(sets: dict[str, list[QuestionRecord]], links: _Links) -> int:
    return sum(
        negative not in links.negatives
        for records in sets.values()
        for question, _ in records
        for negative in question.hard_negative_ids
    )


def _count(sets: Mapping[str, Sized]) -> int:
    return sum(len(some) for some in sets.values())


def _require_equal(num_in: int, num_out: int, first: str, second: str) -> None:
    if num_in != num_out:
        raise RowsLostError(f"{num_in} passages {first}, {num_out} {second}; this is a fault of the program, report it")
