"""Source files to a corpus and question sets: checked, counted, cut, drawn, split, and put in place at once.

Passages go through scratch files, one shard in memory at a time; questions are held in memory. The result depends on
the sources and the settings alone. Nothing of the store changes before all is written aside; the last file to be
replaced is corpus.json, which names the parts.
"""

import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from mvr_ray.config import PrepareConfig, SourceConfig
from mvr_ray.errors import ConfigError, DataError, RowsLostError
from mvr_ray.store import layout
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
from mvr_ray.store.draws import LowestLots, SplitShares, split
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
from mvr_ray.store.spool import Spool
from mvr_ray.types import Passage, Progress, Question, no_progress

log = logging.getLogger(__name__)

REPORT_EVERY = 5000
NUM_NAMED = 5


@dataclass(frozen=True)
class PrepareReport:
    """What came in, what went out, and where the difference is.

    passages_read + chunks_gained = passages_written + bad passages + duplicates + passages_not_drawn
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
    """Left out by max_questions, or because max_passages left out all their gold passages."""
    rows_dropped: int = 0
    """Rows that their format's convention leaves out, such as queries without judgements."""
    hard_negatives_dropped: int = 0
    """Hard negatives that name no passage of the corpus."""


@dataclass
class _Bad:
    """Collects bad rows up to the limit."""

    limit: int
    rows: list[BadRow] = field(default_factory=list)

    def add(self, row: BadRow) -> None:
        self.rows.append(row)
        log.warning("bad row: %s", row)
        if len(self.rows) > self.limit:
            named = "; ".join(str(bad) for bad in self.rows[:NUM_NAMED])
            more = f" (and {len(self.rows) - NUM_NAMED} before this)" if len(self.rows) > NUM_NAMED else ""
            raise DataError(
                f"{len(self.rows)} bad rows, more than prepare.max_bad_rows={self.limit}: {named}{more}; "
                f"correct the file, or raise prepare.max_bad_rows to go on without such rows"
            )


class _Asked(NamedTuple):
    """A question in its set, with the place it was read from."""

    question: Question
    where: str


class _Read(NamedTuple):
    spool: Spool
    sets: dict[str, list[_Asked]]
    rows_dropped: int


class _Found(NamedTuple):
    """What the passages said about the questions: places by (set, question id, positive id), negatives that exist."""

    places: dict[tuple[str, str, str], Located]
    negatives: dict[str, str]


def prepare(cfg: PrepareConfig, store: Store, progress: Progress = no_progress) -> PrepareReport:
    """Make the corpus and its question sets, replacing those of the same names.

    Raises DataError with file and line when there are more bad rows than allowed, MissingInputError for a missing
    source, RowsLostError if a passage went missing on the way.
    """
    _check(cfg)
    bad = _Bad(cfg.max_bad_rows)
    with store.scratch() as folder:
        read = _read(cfg, folder / "read", bad, progress)
        kept = {name: _draw_questions(asked, cfg.max_questions) for name, asked in read.sets.items()}
        pieces, found, repeats, num_unique = _cut(cfg, read.spool, folder / "cut", kept, bad, progress)
        resolved = {name: _resolve(name, asked, found, bad) for name, asked in kept.items()}
        passages = _draw_passages(cfg, pieces, resolved)
        questions = {name: _with_passages(qs, passages) for name, qs in resolved.items()}
        num_kept = {name: len(qs) for name, qs in questions.items()}
        questions |= _splits(cfg, questions, found)
        files = folder / "out"
        infos = _write_parts(cfg, pieces, passages, files, bad, progress)
        for name, qs in questions.items():
            write_question_file(files / f"{name}.arrow", name, qs)
        written = sum(info.num_passages for info in infos)
        report = PrepareReport(
            passages_read=read.spool.num_added,
            passages_written=written,
            bad_rows=tuple(bad.rows),
            duplicates=repeats,
            questions={name: len(qs) for name, qs in sorted(questions.items())},
            parts=len(infos),
            digest=corpus_digest(infos),
            chunks_gained=pieces.num_added - num_unique,
            passages_not_drawn=0 if passages is None else pieces.num_added - written,
            questions_not_drawn=sum(len(asked) for asked in read.sets.values())
            - sum(num_kept.values())
            - sum(len(asked) - len(resolved[name]) for name, asked in kept.items()),
            rows_dropped=read.rows_dropped,
            hard_negatives_dropped=_num_lost_negatives(kept, found),
        )
        _require_whole(report, pieces, passages)
        _put_in_place(cfg, store, files, infos, report)
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


def _read(cfg: PrepareConfig, folder: Path, bad: _Bad, progress: Progress) -> _Read:
    spool = Spool(folder, cfg.num_shards)
    sets: dict[str, list[_Asked]] = {source.questions: [] for source in cfg.sources if source.questions}
    seen: dict[tuple[str, str], str] = {}
    dropped = count = 0
    for source in cfg.sources:
        for record in read_source(source):
            count += 1
            if count % REPORT_EVERY == 0:
                progress("rows read", count, 0)
            match record:
                case PassageRecord():
                    spool.add(record)
                case QuestionRecord(question, where):
                    assert source.questions is not None
                    key = (source.questions, question.id)
                    if key in seen:
                        bad.add(BadRow(where, f"question id {question.id!r} stands already in {seen[key]}"))
                    else:
                        seen[key] = where
                        sets[source.questions].append(_Asked(question, where))
                case BadRow():
                    bad.add(record)
                case DroppedRow():
                    dropped += 1
    progress("rows read", count, count)
    return _Read(spool, sets, dropped)


def _draw_questions(asked: list[_Asked], limit: int) -> list[_Asked]:
    if not limit or len(asked) <= limit:
        return asked
    lots = LowestLots(limit, "questions")
    for one in asked:
        lots.add(one.question.id)
    names = lots.names()
    return [one for one in asked if one.question.id in names]


def _cut(
    cfg: PrepareConfig, spool: Spool, folder: Path, kept: dict[str, list[_Asked]], bad: _Bad, progress: Progress
) -> tuple[Spool, _Found, int, int]:
    """Unique passages, cut; what they say about the questions; how many repeats and how many unique there were."""
    asking: dict[str, list[tuple[str, Question]]] = {}
    negatives_wanted: set[str] = set()
    for name, asked in kept.items():
        for question, _ in asked:
            negatives_wanted.update(question.hard_negative_ids)
            for passage_id in question.positive_ids:
                asking.setdefault(passage_id, []).append((name, question))
    found = _Found({}, {})
    pieces = Spool(folder, cfg.num_shards)
    repeats = num_unique = 0
    for shard in range(spool.num_shards):
        shelf = spool.unique(shard)
        repeats += shelf.repeats
        num_unique += len(shelf.passages)
        for row in shelf.bad:
            bad.add(row)
        for passage in shelf.passages:
            chunks = chunk(passage, cfg.chunk_words)
            if passage.id in negatives_wanted:
                found.negatives[passage.id] = chunks[0].passage.id
            for name, question in asking.get(passage.id, ()):
                starts = question.answer_starts if passage.id == question.positive_ids[0] else ()
                place = locate(passage.text, chunks, question.answers, starts)
                found.places[name, question.id, passage.id] = place
            for piece in chunks:
                pieces.add(PassageRecord(piece.passage, f"passage {passage.id!r}"))
        progress("parts sorted", shard + 1, spool.num_shards)
    _require_equal(spool.num_added, num_unique + repeats + _num_duplicates(bad), "read", "sorted")
    return pieces, found, repeats, num_unique


def _resolve(name: str, asked: list[_Asked], found: _Found, bad: _Bad) -> list[Question]:
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


def _draw_passages(cfg: PrepareConfig, pieces: Spool, resolved: dict[str, list[Question]]) -> set[str] | None:
    """Ids of the passages to keep, gold first; None keeps all."""
    if not cfg.max_passages or pieces.num_added <= cfg.max_passages:
        return None
    gold = {positive for questions in resolved.values() for question in questions for positive in question.positive_ids}
    lots = LowestLots(cfg.max_passages, "passages")
    for shard in range(pieces.num_shards):
        for passage in pieces.unique(shard).passages:
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


def _splits(cfg: PrepareConfig, questions: dict[str, list[Question]], found: _Found) -> dict[str, list[Question]]:
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
    cfg: PrepareConfig, pieces: Spool, passages: set[str] | None, folder: Path, bad: _Bad, progress: Progress
) -> list[PartInfo]:
    """Write every part under its content's name and read it back: what was to be written must be there."""
    infos = []
    for shard in range(cfg.num_shards):
        shelf = pieces.unique(shard)
        for row in shelf.bad:
            bad.add(row)
        rows: list[Passage] = [p for p in shelf.passages if passages is None or p.id in passages]
        aside = folder / "part.arrow"
        write_passages(aside, rows)
        lost = sorted({row.id for row in rows} - set(CorpusPart(aside).ids()))
        if lost:
            raise RowsLostError(f"part {shard}: {len(lost)} of {len(rows)} passages not written, first: {lost[:5]}")
        digest = sha256_of(aside)
        name = layout.corpus_part(shard, digest)
        infos.append(PartInfo(name, len(rows), aside.stat().st_size, digest))
        aside.rename(folder / name)
        progress("parts written", shard + 1, cfg.num_shards)
    return infos


def _put_in_place(cfg: PrepareConfig, store: Store, files: Path, infos: list[PartInfo], report: PrepareReport) -> None:
    """Parts first, under names that no live corpus uses with other bytes; corpus.json last."""
    path = layout.corpus_json(cfg.corpus)
    before = {part.file for part in Corpus.open(store, cfg.corpus).info.parts} if store.exists(path) else set()
    for part in infos:
        store.put_file(files / part.file, f"{layout.corpus_dir(cfg.corpus)}/{part.file}")
    for name in report.questions:
        store.put_file(files / f"{name}.arrow", layout.questions(name))
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
    store.write_bytes(path, info.to_json())
    # The corpus before this one stays for readers that have it open; what is older goes.
    keep = before | {part.file for part in infos}
    for name in store.list(layout.corpus_dir(cfg.corpus)):
        if name.endswith(".arrow") and name not in keep:
            store.delete(f"{layout.corpus_dir(cfg.corpus)}/{name}")


def _describe_sources(cfg: PrepareConfig) -> Iterator[SourceInfo]:
    for source in cfg.sources:
        files = source_files(source)
        for file in files:
            named = _name_of(source, file, len(files))
            yield SourceInfo(named, format_of(source), file.stat().st_size, sha256_of(file))


def _name_of(source: SourceConfig, file: Path, num_files: int) -> str:
    return source.path if num_files == 1 and not source.path.endswith("/") else f"{source.path.rstrip('/')}/{file.name}"


def _num_lost_negatives(kept: dict[str, list[_Asked]], found: _Found) -> int:
    return sum(
        negative not in found.negatives
        for asked in kept.values()
        for question, _ in asked
        for negative in question.hard_negative_ids
    )


def _num_duplicates(bad: _Bad) -> int:
    return sum(row.reason.startswith("passage id ") for row in bad.rows)


def _require_equal(num_in: int, num_out: int, first: str, second: str) -> None:
    if num_in != num_out:
        raise RowsLostError(f"{num_in} passages {first}, {num_out} {second}; this is a fault of the program, report it")


def _require_whole(report: PrepareReport, pieces: Spool, passages: set[str] | None) -> None:
    expected = pieces.num_added if passages is None else len(passages)
    collisions = sum(row.where.startswith("passage ") for row in report.bad_rows)
    _require_equal(expected - (collisions if passages is None else 0), report.passages_written, "expected", "written")
