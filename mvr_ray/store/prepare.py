"""Source files to a corpus and question sets: checked, counted, cut, drawn, split, and put in place at once.

Passages go through scratch files, one shard in memory at a time; questions are held in memory. The result depends on
the sources and the settings alone. Nothing of the store changes before all is written aside; the last file to be
replaced is corpus.json, which names the parts.
"""

import logging
from collections.abc import Iterator, Mapping, Sized
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from mvr_ray.config import PrepareConfig, SourceConfig
from mvr_ray.errors import ConfigError, DataError, MissingInputError, RowsLostError, StorageError
from mvr_ray.store import paths
from mvr_ray.store.chunks import Located, carried, chunk, locate
from mvr_ray.store.corpus import (
    Corpus,
    CorpusInfo,
    CorpusPart,
    PartInfo,
    SourceInfo,
    corpus_digest,
    write_passages,
    write_question_file,
)
from mvr_ray.store.files import Store, sha256_of
from mvr_ray.store.formats import (
    BadRow,
    DroppedRow,
    PassageRecord,
    QuestionRecord,
    format_of,
    read_source,
    source_files,
)
from mvr_ray.store.prepare_report import BadRows, PrepareReport
from mvr_ray.store.sampling import BottomK, SplitShares, hash_rank, split
from mvr_ray.store.shard_spill import ShardSpill
from mvr_ray.types import Passage, Progress, Question, no_progress

log = logging.getLogger(__name__)

REPORT_EVERY = 5000


class _SetQuestion(NamedTuple):
    """A question in its set, with the place it was read from."""

    question: Question
    where: str


class _Read(NamedTuple):
    """What the sources gave, and what their `share` left there."""

    spool: ShardSpill
    sets: dict[str, list[_SetQuestion]]
    rows_dropped: int
    passages_left: int
    questions_left: int


class _Findings(NamedTuple):
    """What the passages said about the questions: places by (set, question id, positive id), negatives that exist."""

    places: dict[tuple[str, str, str], Located]
    negatives: dict[str, str]


class _Cut(NamedTuple):
    """Passages ready for their parts (`pieces` may hold each id several times), and how many there are."""

    pieces: ShardSpill
    found: _Findings
    num_repeats: int
    num_unique: int
    num_pieces: int


class _WrittenParts(NamedTuple):
    infos: list[PartInfo]
    num_passages: int


def prepare(cfg: PrepareConfig, store: Store, progress: Progress = no_progress) -> PrepareReport:
    """Make the corpus and its question sets, replacing those of the same names.

    Raises DataError with file and line when there are more bad rows than allowed, MissingInputError for a missing
    source, RowsLostError if a passage went missing on the way.
    """
    _check(cfg)
    bad = BadRows(cfg.max_bad_rows)
    with store.scratch() as folder:
        read = _read(cfg, folder / "read", bad, progress)
        kept = {name: _draw_questions(asked, cfg.max_questions) for name, asked in read.sets.items()}
        cut = _cut(cfg, read.spool, folder / "cut", kept, bad, progress)
        resolved = {name: _resolve(name, asked, cut.found, bad) for name, asked in kept.items()}
        passages = _draw_passages(cfg, cut, resolved)
        questions = {name: _with_passages(some, passages) for name, some in resolved.items()}
        num_unused = _count(kept) - _count(resolved)
        num_not_drawn = _count(read.sets) - num_unused - _count(questions)
        questions |= _splits(cfg, questions, cut.found)
        files = folder / "out"
        written = _write_parts(cfg, cut, passages, files, progress)
        for name, some in questions.items():
            write_question_file(files / f"{name}.arrow", name, some)
        report = PrepareReport(
            passages_read=read.spool.num_added + read.passages_left,
            passages_written=written.num_passages,
            bad_rows=tuple(bad.rows),
            duplicates=cut.num_repeats,
            questions={name: len(some) for name, some in sorted(questions.items())},
            parts=len(written.infos),
            digest=corpus_digest(written.infos),
            chunks_gained=cut.num_pieces - cut.num_unique,
            passages_not_drawn=cut.num_pieces - written.num_passages + read.passages_left,
            questions_not_drawn=num_not_drawn + read.questions_left,
            rows_dropped=read.rows_dropped,
            hard_negatives_dropped=_num_lost_negatives(kept, cut.found),
        )
        _require_equal(cut.num_pieces if passages is None else len(passages), written.num_passages, "kept", "written")
        _put_in_place(cfg, store, files, written.infos, report)
    log.info("prepared: corpus=%s passages=%d digest=%s", cfg.corpus, report.passages_written, report.digest)
    return report


def _check(cfg: PrepareConfig) -> None:
    if not cfg.sources:
        raise ConfigError("prepare.sources is empty; name at least one file, such as - path: train-v1.1.json")
    if not any(source.passages for source in cfg.sources):
        raise ConfigError("no entry of prepare.sources gives passages; set passages: true on one")
    named = {source.questions for source in cfg.sources if source.questions}
    for number, wanted in enumerate(cfg.splits):
        if wanted.source not in named:
            known = ", ".join(sorted(named)) or "none"
            raise ConfigError(f"prepare.splits.{number}.source: no question set {wanted.source!r}; there are: {known}")
        if wanted.known_share + wanted.gate_share > 1:
            raise ConfigError(
                f"prepare.splits.{number}: known_share {wanted.known_share} and gate_share {wanted.gate_share} "
                f"are more than 1 together; lower one"
            )


def _read(cfg: PrepareConfig, folder: Path, bad: BadRows, progress: Progress) -> _Read:
    spool = ShardSpill(folder, cfg.num_shards)
    sets: dict[str, list[_SetQuestion]] = {source.questions: [] for source in cfg.sources if source.questions}
    seen: dict[tuple[str, str], str] = {}
    dropped = count = 0
    left: set[str] = set()
    for source in cfg.sources:
        for record in read_source(source):
            count += 1
            if count % REPORT_EVERY == 0:
                progress("rows read", count, 0)
            match record:
                case PassageRecord(passage, _) if not _takes(source, passage):
                    left.add(passage.id)
                case PassageRecord():
                    spool.add(record)
                case QuestionRecord(question, where):
                    assert source.questions is not None
                    key = (source.questions, question.id)
                    if key in seen:
                        bad.add(BadRow(where, f"question id {question.id!r} stands already in {seen[key]}"))
                    else:
                        seen[key] = where
                        sets[source.questions].append(_SetQuestion(question, where))
                case BadRow():
                    bad.add(record)
                case DroppedRow():
                    dropped += 1
    progress("rows read", count, count)
    taken = {
        name: [one for one in asked if not left.intersection(one.question.positive_ids[:1])]
        for name, asked in sets.items()
    }
    return _Read(spool, taken, dropped, len(left), _count(sets) - _count(taken))


def _takes(source: SourceConfig, passage: Passage) -> bool:
    return source.share == 1 or hash_rank(passage.title or passage.id, "source") < source.share * 2**64


def _draw_questions(asked: list[_SetQuestion], limit: int) -> list[_SetQuestion]:
    if not limit or len(asked) <= limit:
        return asked
    lots = BottomK(limit, "questions")
    for one in asked:
        lots.add(one.question.id)
    names = lots.names()
    return [one for one in asked if one.question.id in names]


def _cut(
    cfg: PrepareConfig,
    spool: ShardSpill,
    folder: Path,
    kept: dict[str, list[_SetQuestion]],
    bad: BadRows,
    progress: Progress,
) -> _Cut:
    """Drop repeats and duplicates, cut what is left, and note what it says about the questions."""
    asking: dict[str, list[tuple[str, Question]]] = {}
    negatives_wanted: set[str] = set()
    for name, asked in kept.items():
        for question, _ in asked:
            negatives_wanted.update(question.hard_negative_ids)
            for passage_id in question.positive_ids:
                asking.setdefault(passage_id, []).append((name, question))
    found = _Findings({}, {})
    pieces = ShardSpill(folder, cfg.num_shards) if cfg.chunk_words else spool
    num_repeats = num_unique = num_duplicates = num_pieces = 0
    for shard in range(spool.num_shards):
        shelf = spool.unique(shard)
        num_repeats += shelf.repeats
        num_unique += len(shelf.passages)
        num_duplicates += len(shelf.bad)
        for row in shelf.bad:
            bad.add(row)
        for passage in shelf.passages:
            chunks = chunk(passage, cfg.chunk_words)
            num_pieces += len(chunks)
            if passage.id in negatives_wanted:
                found.negatives[passage.id] = chunks[0].passage.id
            for name, question in asking.get(passage.id, ()):
                starts = question.answer_starts if passage.id == question.positive_ids[0] else ()
                place = locate(passage.text, chunks, question.answers, starts)
                found.places[name, question.id, passage.id] = place
            if cfg.chunk_words:
                for piece in chunks:
                    pieces.add(PassageRecord(piece.passage, f"chunk of passage {passage.id!r}"))
        progress("parts sorted", shard + 1, spool.num_shards)
    _require_equal(spool.num_added, num_unique + num_repeats + num_duplicates, "read", "sorted")
    return _Cut(pieces, found, num_repeats, num_unique, num_pieces)


def _resolve(name: str, asked: list[_SetQuestion], found: _Findings, bad: BadRows) -> list[Question]:
    """Questions over the corpus as cut; one whose positive names no passage is a bad row."""
    resolved = []
    for question, where in asked:
        places = [found.places.get((name, question.id, positive)) for positive in question.positive_ids]
        lost = [positive for positive, place in zip(question.positive_ids, places) if place is None]
        if lost:
            bad.add(BadRow(where, f"positive {lost[0]!r} of question {question.id!r} names no passage of the corpus"))
            continue
        negatives = tuple(found.negatives[n] for n in question.hard_negative_ids if n in found.negatives)
        resolved.append(carried(question, [place for place in places if place is not None], negatives))
    return resolved


def _draw_passages(cfg: PrepareConfig, cut: _Cut, resolved: dict[str, list[Question]]) -> set[str] | None:
    """Ids of the passages to keep, gold first; None keeps all."""
    if not cfg.max_passages or cut.num_pieces <= cfg.max_passages:
        return None
    gold = {positive for questions in resolved.values() for question in questions for positive in question.positive_ids}
    lots = BottomK(cfg.max_passages, "passages")
    for shard in range(cfg.num_shards):
        for passage in cut.pieces.unique(shard).passages:
            lots.add(passage.id, first=passage.id in gold)
    return lots.names()


def _with_passages(questions: list[Question], passages: set[str] | None) -> list[Question]:
    """Questions without the ids that were not drawn; those left without a gold passage go."""
    if passages is None:
        return questions
    kept = []
    for question in questions:
        positives = tuple(name for name in question.positive_ids if name in passages)
        if question.positive_ids and not positives:
            continue
        same_home = positives[:1] == question.positive_ids[:1]
        kept.append(
            question._replace(
                positive_ids=positives,
                hard_negative_ids=tuple(name for name in question.hard_negative_ids if name in passages),
                answer_starts=question.answer_starts if same_home else (-1,) * len(question.answers),
            )
        )
    return kept


def _splits(cfg: PrepareConfig, questions: dict[str, list[Question]], found: _Findings) -> dict[str, list[Question]]:
    titles = {(name, question_id): place.title for (name, question_id, _), place in reversed(found.places.items())}
    made: dict[str, list[Question]] = {}
    for wanted in cfg.splits:
        source = questions[wanted.source]
        articles = {q.id: titles.get((wanted.source, q.id), f"question {q.id}") for q in source}
        shares = SplitShares(wanted.unseen_share, wanted.known_share, wanted.gate_share, wanted.seed)
        for name, part in split(source, articles, shares).items():
            full = f"{wanted.source}_{name}"
            if full in questions or full in made:
                raise ConfigError(f"prepare.splits: two question sets would be named {full!r}; rename a source's set")
            made[full] = part
    return made


def _write_parts(
    cfg: PrepareConfig, cut: _Cut, passages: set[str] | None, folder: Path, progress: Progress
) -> _WrittenParts:
    """Write every part under its content's name and read it back: what was to be written must be there."""
    infos: list[PartInfo] = []
    for shard in range(cfg.num_shards):
        shelf = cut.pieces.unique(shard)
        if cfg.chunk_words and shelf.bad:
            raise DataError(f"a chunk's id is a passage's id: {shelf.bad[0]}; give the source an id_prefix")
        rows = [passage for passage in shelf.passages if passages is None or passage.id in passages]
        aside = folder / "part.arrow"
        write_passages(aside, rows)
        lost = sorted({row.id for row in rows} - set(CorpusPart(aside).ids()))
        if lost:
            raise RowsLostError(f"part {shard}: {len(lost)} of {len(rows)} passages not written, first: {lost[:5]}")
        digest = sha256_of(aside)
        name = paths.corpus_part(shard, digest)
        infos.append(PartInfo(name, len(rows), aside.stat().st_size, digest))
        aside.rename(folder / name)
        progress("parts written", shard + 1, cfg.num_shards)
    return _WrittenParts(infos, sum(info.num_passages for info in infos))


def _put_in_place(cfg: PrepareConfig, store: Store, files: Path, infos: list[PartInfo], report: PrepareReport) -> None:
    """Parts first, under names that no live corpus uses with other bytes; corpus.json last."""
    before = _parts_before(cfg, store)
    for part in infos:
        store.put_file(files / part.file, f"{paths.corpus_dir(cfg.corpus)}/{part.file}")
    for name in report.questions:
        store.put_file(files / f"{name}.arrow", paths.questions(name))
    counts = {key: value for key, value in asdict(report).items() if isinstance(value, int)}
    info = CorpusInfo(
        name=cfg.corpus,
        digest=report.digest,
        num_passages=report.passages_written,
        parts=tuple(infos),
        sources=tuple(_describe_sources(cfg)),
        questions=report.questions,
        counts={**counts, "bad_rows": len(report.bad_rows)},
    )
    store.write_bytes(paths.corpus_json(cfg.corpus), info.to_json())
    # The corpus before this one stays for readers that have it open; what is older goes.
    keep = before | {part.file for part in infos}
    for name in store.list(paths.corpus_dir(cfg.corpus)):
        if name.endswith(".arrow") and name not in keep:
            store.delete(f"{paths.corpus_dir(cfg.corpus)}/{name}")


def _parts_before(cfg: PrepareConfig, store: Store) -> set[str]:
    try:
        return {part.file for part in Corpus.open(store, cfg.corpus).info.parts}
    except (MissingInputError, StorageError):
        return set()


def _describe_sources(cfg: PrepareConfig) -> Iterator[SourceInfo]:
    for source in cfg.sources:
        files = source_files(source)
        for file in files:
            named = _name_of(source, file, len(files))
            yield SourceInfo(named, format_of(source), file.stat().st_size, sha256_of(file))


def _name_of(source: SourceConfig, file: Path, num_files: int) -> str:
    return source.path if num_files == 1 and not source.path.endswith("/") else f"{source.path.rstrip('/')}/{file.name}"


def _num_lost_negatives(kept: dict[str, list[_SetQuestion]], found: _Findings) -> int:
    return sum(
        negative not in found.negatives
        for asked in kept.values()
        for question, _ in asked
        for negative in question.hard_negative_ids
    )


def _count(sets: Mapping[str, Sized]) -> int:
    return sum(len(some) for some in sets.values())


def _require_equal(num_in: int, num_out: int, first: str, second: str) -> None:
    if num_in != num_out:
        raise RowsLostError(f"{num_in} passages {first}, {num_out} {second}; this is a fault of the program, report it")
