"""Read answers from a ranking's passages with a pool of readers, and score them by SQuAD's rules.

    exact match    1 where the prediction equals an answer, ignoring case, punctuation and articles
    F1             overlap of their words, with the best-matching answer

Every passage is read once; the answer from the first k is the best of their spans, so one pass gives all k. A batch is
`read.batch` questions in the ranking's order, so the composition of batches, and with it every answer, does not depend
on the number of readers.

Shapes: Q questions, K numbers of passages.
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mvr_ray.config import RunConfig
from mvr_ray.core.judging.answers import exact_match_score, f1_score
from mvr_ray.core.judging.metrics import share_interval
from mvr_ray.core.reading.reader import ReadRequest, Span, choose
from mvr_ray.distributed import models
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.ray_data import map_in_pool, pool_need
from mvr_ray.distributed.result_store import ResultStore
from mvr_ray.errors import ConfigError, DataError, MissingInputError, StorageError, count_noun
from mvr_ray.store.corpus import Corpus, question_sets
from mvr_ray.store.files import Store, local_copy
from mvr_ray.store.formats.rankings import RankedQuestion, read_ranking
from mvr_ray.store.local_files import finished_file
from mvr_ray.store.questions import articles_of, read_questions
from mvr_ray.types import Progress, no_progress

log = logging.getLogger(__name__)


class ReadRow(NamedTuple):
    """One measured value (a share, 0..1) of answers from the first `passages`, with its 95 % interval over `n`."""

    passages: int
    metric: str
    value: float
    low: float
    high: float
    n: int


class ReadReport(NamedTuple):
    """The ranking, the reader and its scores. `unread` counts questions without any passage that has text."""

    reader: str
    fingerprint: str
    ranking: str
    questions: int
    unread: int
    output: str | None
    rows: list[ReadRow]


class Prediction(NamedTuple):
    """The answer from the first `passages`: characters [`start`, `stop`) of the text of the passage at `rank`.

    Ranks count from 1; 0 without an answer span. `exact_match` and `f1` are None for questions without answers.
    """

    passages: int
    text: str
    passage_id: str
    rank: int
    start: int
    stop: int
    score: float | None
    log_prob: float | None
    exact_match: bool | None
    f1: float | None


class QuestionReader(models.ModelWorker):
    """Read batches of questions, each with the texts of its passages."""

    def __call__(self, batch: Sequence[tuple[str, Sequence[str]]]) -> list[list[Span | None]]:
        with models.translate_out_of_memory(f"{self.task.tokens_per_batch} tokens", "read.tokens_per_batch"):
            return self.model.read([ReadRequest(*item) for item in batch], self.task.tokens_per_batch)


def read(
    run: RunConfig,
    ranking: str | Path,
    output: Path | None = None,
    progress: Progress = no_progress,
    articles: Mapping[str, str] | None = None,
) -> ReadReport:
    """Answer every question of a ranking file; with `output`, write the predictions as JSON lines, in its order.

    `articles` maps question ids to articles, whose questions are resampled together for intervals (None: by
    `stored_articles`); a question of an unknown article is independent. Texts that the file lacks come from the corpus.
    Raises ConfigError (answers that are patterns), DataError, MissingInputError, ReaderError, ResourceError.
    """
    path, ks = local_copy(str(ranking)), sorted(set(run.read.top_passages))
    if not ks:
        raise ConfigError("read.top_passages is empty; set the numbers of passages to read, such as [1, 5, 20]")
    task = models.find_worker_model(run, models.READERS, run.read.reader, models.reader_spec(run))
    results = _with_texts(run, path, list(read_ranking(path, ks[-1])))
    depth = max((len(row.passages) for row in results), default=0)
    if depth < ks[-1]:
        log.warning(
            "ranking %s has at most %d passages a question, and read.top_passages asks for %d: the answers from more "
            "than %d are those from %d; retrieve more (retrieve.k)",
            *(path, depth, ks[-1], depth, depth),
        )
    if run.read.score_weight:
        _require_scores(path, results)
    if run.evaluate.match == "regex" and any(row.question.answers for row in results):
        raise ConfigError(
            f"evaluate.match is regex, but the answers of ranking {path} would be scored by exact match and F1 with "
            f"their words, which a pattern does not have; leave the answers out of the ranking, or set "
            f"evaluate.match=string to score them as words"
        )
    articles = stored_articles(run, results) if articles is None else articles
    predictions_QK: list[list[Prediction]] = []
    num_unread = 0
    num_passages, needs = sum(len(row.passages) for row in results), [pool_need("readers", run.resources)]
    with ExitStack() as stack:
        stack.enter_context(session.connect(run.resources, num_passages, needs))
        result_store = stack.enter_context(ResultStore(Store(run.store.path), run.index.name))
        file = None
        if output is not None:
            temporary = stack.enter_context(finished_file(output))
            file = stack.enter_context(temporary.open("w", encoding="utf-8", errors="replace", newline="\n"))
        for result, spans in zip(results, _read_all(run, task, results, progress, result_store)):
            predictions_QK.append(predictions(result, spans, ks, run.read.score_weight))
            num_unread += not any(spans)
            if file is not None:
                file.write(_output_line(result, predictions_QK[-1]))
    name, fingerprint = run.read.reader, task.fingerprint
    log.info("read: questions=%d unread=%d reader=%s fingerprint=%s", len(results), num_unread, name, fingerprint)
    return ReadReport(
        reader=name,
        fingerprint=fingerprint,
        ranking=str(ranking),
        questions=len(results),
        unread=num_unread,
        output=str(output) if output else None,
        rows=_scores(run, ks, results, predictions_QK, articles),
    )


def stored_articles(run: RunConfig, results: Sequence[RankedQuestion]) -> dict[str, str]:
    """Map question ids of a ranking to articles: those of the questions of the corpus's sets that have their texts, as
    a ranking names no gold passages."""
    texts = {row.question.id: row.question.text.strip() for row in results}  # as stored ones are
    try:
        corpus = Corpus.open(Store(run.store.path), run.prepare.corpus)
        stored_questions = [one for name in question_sets(corpus) for one in read_questions(corpus, name)]
    except (MissingInputError, StorageError) as error:
        log.warning("intervals take every question as independent: %s", error)
        return {}
    by_text = {question.text: question for question in stored_questions}
    return articles_of([by_text[text]._replace(id=i) for i, text in texts.items() if text in by_text], corpus)


def predictions(
    result: RankedQuestion, spans: Sequence[Span | None], ks: Sequence[int], weight: float
) -> list[Prediction]:
    """Return the answer from the first k passages, for each k."""
    rows, answers = [], result.question.answers
    for k in ks:
        at = choose(spans[:k], [hit.score for hit in result.passages[:k]], weight)
        span = spans[at] if at >= 0 else None
        text = result.passages[at].text[span.start : span.stop] if span else ""
        rows.append(
            Prediction(
                passages=k,
                text=text,
                passage_id=result.passages[at].id if span else "",
                rank=at + 1,
                start=span.start if span else -1,
                stop=span.stop if span else -1,
                score=span.score if span else None,
                log_prob=span.start_log_prob + span.end_log_prob if span else None,
                exact_match=bool(span) and exact_match_score(text, answers) if answers else None,
                f1=f1_score(text, answers) * bool(span) if answers else None,  # nothing read is not right
            )
        )
    return rows


def _read_all(
    run: RunConfig,
    task: models.WorkerModel,
    results: Sequence[RankedQuestion],
    progress: Progress,
    result_store: ResultStore,
) -> Iterator[list[Span | None]]:
    """Yield the best spans of each question's passages, in order."""
    size, count = run.read.batch, 0
    questions = [(row.question.text, [hit.text for hit in row.passages]) for row in results]
    batches = [questions[start : start + size] for start in range(0, len(questions), size)]
    through = partial(result_store.map, ["read", task.fingerprint, repr(task.spec)])
    for batch in map_in_pool(QuestionReader, {"task": task}, batches, run.resources, "reading", through):
        count += len(batch)
        progress("read", count, len(results))
        for spans in batch:
            yield [Span(*fields) if fields else None for fields in spans]


def _with_texts(run: RunConfig, path: Path, results: list[RankedQuestion]) -> list[RankedQuestion]:
    """Fill missing texts of the ranking from the corpus."""
    textless = list(dict.fromkeys(hit.id for row in results for hit in row.passages if not hit.text))
    if not textless:
        return results
    try:
        corpus = Corpus.open(Store(run.store.path), run.prepare.corpus)
    except MissingInputError as error:
        raise MissingInputError(
            f"ranking {path} has {count_noun(len(textless), 'passage')} without text, and {error}"
        ) from None
    passages = corpus.get(textless)
    if absent := [passage_id for passage_id in textless if passage_id not in passages]:
        raise DataError(
            f"ranking {path} has no text for {count_noun(len(absent), 'passage')} (first: {absent[0]!r}) that "
            f"corpus {corpus.name!r} does not hold; retrieve again with format=dpr or format=jsonl, or set "
            f"prepare.corpus to the ranked corpus"
        )
    return [
        row._replace(passages=[hit if hit.text else hit._replace(text=passages[hit.id].text) for hit in row.passages])
        for row in results
    ]


def _require_scores(path: Path, results: Sequence[RankedQuestion]) -> None:
    for row in results:
        for hit in row.passages:
            if not math.isfinite(hit.score):
                raise DataError(
                    f"ranking {path}: passage {hit.id!r} of question {row.question.text!r} has no score, which "
                    f"read.score_weight needs; set read.score_weight=0, or give a ranking with scores"
                )


def _output_line(result: RankedQuestion, predictions_K: Sequence[Prediction]) -> str:
    row = {
        "id": result.question.id,
        "question": result.question.text,
        "answers": list(result.question.answers),
        "predictions": [prediction._asdict() for prediction in predictions_K],
    }
    return json.dumps(row, ensure_ascii=False) + "\n"


def _scores(
    run: RunConfig,
    ks: Sequence[int],
    results: Sequence[RankedQuestion],
    predictions_QK: Sequence[Sequence[Prediction]],
    articles: Mapping[str, str],
) -> list[ReadRow]:
    """Score the answers from the first k passages, for each k, over the questions with known answers."""
    numbers = [number for number, row in enumerate(results) if row.question.answers]
    if not numbers:
        return []
    groups_Q = [articles.get(results[number].question.id, f"question {number}") for number in numbers]
    rows = []
    for column, k in enumerate(ks):
        for metric in ("exact_match", "f1"):
            values_Q = np.array([getattr(predictions_QK[number][column], metric) for number in numbers], np.float64)
            low, high = share_interval(values_Q, groups_Q, run.evaluate.seed, run.evaluate.bootstrap)
            rows.append(ReadRow(k, metric, float(values_Q.mean()), low, high, len(values_Q)))
    return rows
