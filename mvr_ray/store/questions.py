"""Store and read the question sets of a corpus.

The questions lie in an Arrow file that is named by its content, and that the description of the set names (`corpus`).
It is not parsed before its digest matches.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute

from mvr_ray.config import SourceConfig
from mvr_ray.core.judging.answers import Match
from mvr_ray.errors import DataError, MissingInputError, StorageError, count_noun
from mvr_ray.store import paths
from mvr_ray.store.chunks import AnswerPlace, TextChunk, carry_over, chunk, locate, source_id
from mvr_ray.store.corpus import Corpus, SetInfo, question_digest, question_set, question_sets, undescribed_path
from mvr_ray.store.local_files import sha256_of
from mvr_ray.store.parts import CURE, map_batches, map_file, write_rows
from mvr_ray.types import Passage, Question

_TITLES_READ = 8192
QUESTION_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), False),
        pa.field("text", pa.string(), False),
        pa.field("answers", pa.list_(pa.string()), False),
        pa.field("positive_ids", pa.list_(pa.string()), False),
        pa.field("hard_negative_ids", pa.list_(pa.string()), False),
        pa.field("answer_starts", pa.list_(pa.int32()), False),
        pa.field("teacher_scores", pa.list_(pa.float32()), False),
        pa.field("positive_grades", pa.list_(pa.int32()), False),
    ]
)
"""The last column is written only where a set has grades: earlier programs read the others."""
_PASSAGE_LISTS = slice(3, 5)
"""The columns of passage ids."""
_ORIGIN = b"origin"
"""Metadata of the file of a set that was carried over and changed: the sha256 of the set that a user stored."""
pc: Any = pyarrow.compute


def write_questions(corpus: Corpus, name: str, questions: Iterable[Question], origin: str = "") -> int:
    """Store a question set of a corpus, replacing it in one step; `origin` is that of a set that is carried over.
    Returns how many questions there were."""
    with corpus.store.scratch() as folder:
        file = folder / "questions.arrow"
        count = write_question_file(file, name, questions, origin)
        put_questions(corpus, name, file, count)
    return count


def add_questions(corpus: Corpus, name: str, questions: Iterable[Question]) -> None:
    """Store a question set of a corpus, and carry it over to the corpora that were published meanwhile."""
    write_questions(corpus, name, questions)
    carried_digest = corpus.digest
    while (last := Corpus.open(corpus.store, corpus.name)).digest != carried_digest:
        carry_questions(corpus, last, name)
        carried_digest = last.digest


def put_questions(corpus: Corpus, name: str, file: Path, num_questions: int) -> None:
    """Move a finished local file of questions into the store, and describe it as this set of the corpus."""
    digest, num_bytes = sha256_of(file), file.stat().st_size
    info = SetInfo(corpus.digest, name, paths.question_file(name, digest), num_questions, num_bytes, digest)
    corpus.store.put_file(file, f"{paths.corpus_dir(corpus.name)}/{info.file}")
    corpus.store.write_bytes(paths.question_set(corpus.name, corpus.digest, name), info.to_json())


def copy_questions(source: Corpus, corpus: Corpus, name: str, info: SetInfo | None = None) -> None:
    """Add a question set of an earlier corpus of the same name to a corpus; both describe one file."""
    if info := info or question_set(source, name):
        info = replace(info, corpus_digest=corpus.digest)
        corpus.store.write_bytes(paths.question_set(corpus.name, corpus.digest, name), info.to_json())
    else:
        write_questions(corpus, name, read_questions(source, name))


def set_origin(corpus: Corpus, name: str, info: SetInfo | None = None) -> str:
    """Return the sha256 of the set that a user stored, which updates carried over to this one. Raises as
    `read_questions` does."""
    info = info or question_set(corpus, name)
    metadata = map_file(corpus.open_file(f"question set {name!r}", info))[1] if info else {}
    return metadata.get(_ORIGIN, b"").decode() or (info.sha256 if info else question_digest(corpus, name))


def archive(corpus: Corpus, names: Iterable[str]) -> None:
    """Describe a corpus and the named sets under its digest if an earlier program did not: another corpus may follow,
    and the versions that name this one find it."""
    path = paths.corpus_version(corpus.name, corpus.digest)
    if not corpus.store.exists(path):
        for name in names:
            write_questions(corpus, name, read_questions(corpus, name))
        corpus.store.write_bytes(path, corpus.info.to_json())


def carry_questions(source: Corpus, corpus: Corpus, name: str) -> None:
    """Add a question set of a corpus to a changed one of its name, as an update does: without passages that are gone
    and questions that have lost every gold passage."""
    info = question_set(source, name)
    questions = read_questions(source, name, info)
    ids = {one for question in questions for one in (*question.positive_ids, *question.hard_negative_ids)}
    before, now = source.get(ids), corpus.get(ids)
    rewritten_ids = changed_texts(before, now)
    questions_now = only_with(lambda one: one in now or one not in before, questions, rewritten_ids)
    if questions_now == questions:
        copy_questions(source, corpus, name, info)
    else:
        write_questions(corpus, name, questions_now, set_origin(source, name, info))


def changed_texts(before: Mapping[str, Passage], now: Mapping[str, Passage]) -> set[str]:
    """Return the ids of the passages whose text is another one now, or that were not there before."""
    return {name for name, passage in now.items() if name not in before or before[name].text != passage.text}


def write_question_file(path: Path, name: str, questions: Iterable[Question], origin: str = "") -> int:
    rows = checked_questions(questions, name)
    has_grades = any(question.positive_grades for question in rows)
    schema = QUESTION_SCHEMA if has_grades else pa.schema(list(QUESTION_SCHEMA)[:-1])
    return write_rows(path, schema.with_metadata({_ORIGIN: origin}) if origin else schema, rows)


def query_key(question: Question) -> str:
    """Return what names a question's refined vector: the id and the text, as a set can be stored again with others."""
    return f"{question.id}\t{hashlib.sha256(question.text.encode()).hexdigest()[:16]}"


def read_questions(corpus: Corpus, name: str, info: SetInfo | None = None) -> list[Question]:
    """Read a question set of a corpus, after its digest matched; `info` is its description if that was read before.

    Raises MissingInputError that names the sets that the corpus has, StorageError for a set that is damaged.
    """
    return _questions_of(_question_batches(corpus, name, info))


def questions_about(corpus: Corpus, name: str, ids: Iterable[str], info: SetInfo | None = None) -> list[Question]:
    """Read the questions of a set that name one of these passages, without parsing the others. Raises as
    `read_questions` does."""
    passage_ids = pa.array(ids, pa.string())

    def only_about(batch: pa.RecordBatch) -> pa.RecordBatch:
        lists = batch.columns[_PASSAGE_LISTS]
        rows = [pc.list_parent_indices(own).filter(pc.is_in(own.flatten(), passage_ids)) for own in lists]
        return batch.take(pa.concat_arrays(rows).unique())

    return _questions_of(map(only_about, _question_batches(corpus, name, info)))


def _questions_of(batches: Iterable[pa.RecordBatch]) -> list[Question]:
    rows: list[Question] = []
    for batch in batches:
        lists = [column.to_pylist() for column in batch.columns]
        rows += (Question(row[0], row[1], *map(tuple, row[2:])) for row in zip(*lists))  # older files lack last columns
    return rows


def _question_batches(corpus: Corpus, name: str, info: SetInfo | None = None) -> list[pa.RecordBatch]:
    """Map the record batches of a set's file. Raises as `read_questions` does."""
    if info := info or question_set(corpus, name):
        return map_batches(corpus.open_file(f"question set {name!r}", info))
    return _map_undescribed(corpus.store.local_path(undescribed_path(corpus, name)))


def only_with(
    is_there: Callable[[str], bool], questions: Iterable[Question], changed_ids: Set[str] = frozenset()
) -> list[Question]:
    """Remove passages that are not there from questions, and questions without a gold passage left.

    The places of the answers are no longer known if the first gold passage is another one by now, or its text is
    (`changed_ids`). A teacher's scores go if one of the passages that they score has gone or changed so.
    """
    results = []
    for question in questions:
        positives = tuple(filter(is_there, question.positive_ids))
        negatives = tuple(filter(is_there, question.hard_negative_ids))
        if question.positive_ids and not positives:
            continue
        is_first_same = positives[:1] == question.positive_ids[:1] and changed_ids.isdisjoint(positives[:1])
        if not is_first_same:
            question = question._replace(answer_starts=(-1,) * len(question.answer_starts))
        if not is_first_same or negatives != question.hard_negative_ids or not changed_ids.isdisjoint(negatives):
            question = question._replace(teacher_scores=())
        if question.positive_grades:
            question = question._replace(positive_grades=tuple(map(question.grade_of.__getitem__, positives)))
        results.append(question._replace(positive_ids=positives, hard_negative_ids=negatives))
    return results


def carry_to_chunks(corpus: Corpus, questions: Sequence[Question], match: Match) -> list[Question]:
    """Return questions of a caller with the places of their answers, and with each text's id that the corpus holds in
    chunks replaced by the chunks that hold the answers by `match`, or else the first one, as `prepare` does."""
    ids = {name for question in questions for name in question.positive_ids}
    chunks_of = {name: [TextChunk(passage, 0)] for name, passage in corpus.get(ids).items()}
    if corpus.info.counts.get("chunk_words"):
        chunks_of |= {name: chunks for name in ids - chunks_of.keys() if (chunks := _chunks_of(corpus, name))}
    return [_over_chunks(question, chunks_of, match) for question in questions]


def require_gold_passages(name: str, questions: Sequence[Question], passages: Corpus) -> None:
    """Raise MissingInputError if the corpus lacks a gold passage.

    Accuracy by gold passages would be wrong for a question set of another corpus.
    """
    gold = {passage_id for question in questions for passage_id in question.positive_ids}
    missing = sorted(gold.difference(passages.get(gold)))
    if missing:
        advice = "correct them; prepare a set of another corpus with this one, under a name of its own"
        if passages.get([first := f"{missing[0]}#0"]):
            advice = f"the corpus holds chunks of passages: name those, such as {first!r}"
        raise MissingInputError(
            f"question set {name!r}: {len(missing)} of its {len(gold)} gold passages are not in corpus "
            f"{passages.name!r} (first: {missing[0]!r}); {advice}"
        )


def _chunks_of(corpus: Corpus, name: str) -> list[TextChunk]:
    """Read the chunks of a text, at the places they have in it if one character stands between any two."""
    chunks: list[TextChunk] = []
    start = 0
    while pieces := corpus.get([f"{name}#{len(chunks)}"]):
        [piece] = pieces.values()
        chunks.append(TextChunk(piece, start))
        start += len(piece.text) + 1
    return chunks


def _over_chunks(question: Question, chunks_of: Mapping[str, list[TextChunk]], match: Match) -> Question:
    if chunks_of.keys().isdisjoint(question.positive_ids):
        return question
    place_of = {}
    for name in question.positive_ids:
        starts = question.answer_starts if name == question.positive_ids[0] else ()
        if chunks := chunks_of.get(name):
            text = " ".join(piece.passage.text for piece in chunks)
            place_of[name] = locate(text, chunks, question.answers, starts, match)
        else:
            place_of[name] = AnswerPlace("", (name,), starts or (-1,) * len(question.answers))
    return carry_over(question, place_of, question.hard_negative_ids)


def articles_of(questions: Sequence[Question], corpus: Corpus) -> dict[str, str]:
    """Map question ids to articles: the title of the first gold passage, or that passage if it has none, all chunks
    of a text being one. A question without a gold passage is its own article."""
    name_of = source_id if corpus.info.counts.get("chunk_words") else str
    gold_passages = corpus.get(question.positive_ids[0] for question in questions if question.positive_ids)
    articles = {i: passage.title or f"passage {name_of(i)}" for i, passage in gold_passages.items()}
    firsts = ((question.id, next(iter(question.positive_ids), "")) for question in questions)
    return {question_id: articles.get(first, f"question {question_id}") for question_id, first in firsts}


def own_passages(
    questions: Iterable[Question], corpus: Corpus, sources: Iterable[SourceConfig] = ()
) -> dict[str, set[str]]:
    """Map ids of questions that are passages themselves, by id and text, and whose gold passages are others, to the
    ids of that passage: of its chunks, where the corpus has chunks. `sources` are the corpus's, for their `id_prefix`.

    BEIR's ArguAna and Quora have such questions, and BEIR leaves out every hit of the question's id. Its text must be
    that of the passage here, since many sets number questions and passages alike.
    """
    num_words, prefixes = corpus.info.counts.get("chunk_words", 0), {"", *(source.id_prefix for source in sources)}
    pieces: dict[str, tuple[str, str]] = {}
    for question in questions:
        for prefix in prefixes if question.positive_ids else ():  # others would open each part for nothing
            own = [one.passage for one in chunk(Passage(prefix + question.id, "", question.text), num_words)]
            if not {piece.id for piece in own}.intersection(question.positive_ids):
                pieces |= {piece.id: (question.id, piece.text) for piece in own}
    own_ids: dict[str, set[str]] = {}
    for name, passage in corpus.get(pieces).items():
        question_id, text = pieces[name]
        if passage.text.strip() == text:
            own_ids.setdefault(question_id, set()).add(name)
    return own_ids


def example_queries(corpus: Corpus, num: int) -> list[str]:
    """Return up to `num` texts to search a corpus for: questions of its first set, else titles of its first part; at
    even distances, so that they come from several articles."""
    for name in question_sets(corpus):
        batches = _question_batches(corpus, name)
        if texts := _spread(pa.chunked_array([batch.column(1) for batch in batches], pa.string()), num):
            return texts
    titles = dict.fromkeys(passage.title for passage in corpus.part(0).passages(0, _TITLES_READ) if passage.title)
    return _spread(pa.chunked_array([list(titles)], pa.string()), num)


def _spread(texts: pa.ChunkedArray, num: int) -> list[str]:
    step = max(1, len(texts) // num)
    return texts.take(pa.array(range(0, len(texts), step)[:num], pa.int64())).to_pylist()


def checked_questions(questions: Iterable[Question], name: str) -> list[Question]:
    """Return the questions of a set. Raises DataError for one that no set can hold."""
    rows = list(questions)
    for question in rows:
        where, num_negatives = f"question set {name!r}: question {question.id!r}", len(question.hard_negative_ids)
        if not question.id or not question.text.strip():
            raise DataError(f"{where} has no id or no text")
        if question.answer_starts and len(question.answer_starts) != len(question.answers):
            raise DataError(
                f"{where} has {count_noun(len(question.answers), 'answer')} and "
                f"{count_noun(len(question.answer_starts), 'answer start')}; give one each, -1 where unknown"
            )
        if question.teacher_scores and len(question.teacher_scores) != 1 + num_negatives:
            raise DataError(
                f"{where} has {count_noun(num_negatives, 'hard negative')} and "
                f"{count_noun(len(question.teacher_scores), 'teacher score')}; give one for the positive and "
                f"one for each negative"
            )
        if question.positive_grades and len(question.positive_grades) != len(question.positive_ids):
            raise DataError(
                f"{where} has {count_noun(len(question.positive_ids), 'positive id')} and "
                f"{count_noun(len(question.positive_grades), 'grade')}; give one each"
            )
    return rows


def _map_undescribed(path: Path) -> list[pa.RecordBatch]:
    """Map a file without a known digest. Its lengths are checked before anything is copied.

    Raises StorageError where it holds more than its bytes, as a compressed or damaged file does.
    """
    batches = map_batches(path)
    try:
        for batch in batches:
            batch.validate(full=True)
            if not batch.schema.equals(pa.schema(list(QUESTION_SCHEMA)[: batch.num_columns])):
                raise pa.ArrowInvalid("it has other columns than questions have")
    except pa.ArrowException as error:
        raise StorageError(f"{path} is damaged ({error}); {CURE}") from error
    if sum(batch.nbytes for batch in batches) > path.stat().st_size:
        raise StorageError(f"{path} is damaged (it says that it holds more than its bytes); {CURE}")
    return batches
