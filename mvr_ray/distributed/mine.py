"""Hard negatives: passages that a search ranks high for a question and that do not answer it.

The search is BM25 over the corpus, or the live index (ANCE's loop: train, index, mine, train again). From the ranks of
the window, gold passages and those that hold an answer are dropped, and the report counts what each filter took.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mvr_ray.config import MineConfig, RunConfig
from mvr_ray.core.answers import AnswerMatcher
from mvr_ray.distributed.bm25 import BM25Hit, BM25Index
from mvr_ray.errors import ConfigError
from mvr_ray.store.corpus import Corpus, read_questions, write_questions
from mvr_ray.store.files import Store
from mvr_ray.types import Progress, Question, no_progress

log = logging.getLogger(__name__)

_BATCH = 128
_SAMPLE = 5


class MineReport(NamedTuple):
    """What mining found: hits looked at in the window, what each filter dropped, and what was kept.

    `short` counts the questions that got fewer than `mine.num_negatives`, `without` those that got none.
    """

    questions: int
    output: str
    method: str
    hits: int
    dropped_gold: int
    dropped_answer_bearing: int
    beyond_count: int
    negatives: int
    short: int
    without: int


class Mined(NamedTuple):
    """The hard negatives of one question, and what its hits came to."""

    ids: tuple[str, ...]
    hits: int
    gold: int
    answer_bearing: int


def bm25_search(corpus: Corpus, texts: Sequence[str], k: int, progress: Progress = no_progress) -> list[list[BM25Hit]]:
    """The best k passages a text by BM25, best first; fewer where fewer share a word with it."""
    return BM25Index(corpus, progress).search(texts, k, progress)


def mine(run: RunConfig, progress: Progress = no_progress) -> MineReport:
    """Store `mine.questions` as `mine.output`, with hard negatives. The same inputs give the same set."""
    cfg, store = run.mine, Store(run.store.path)
    if cfg.rank_from >= cfg.rank_to:
        raise ConfigError(
            f"mine.rank_from is {cfg.rank_from} and mine.rank_to {cfg.rank_to}, an empty window; raise mine.rank_to"
        )
    questions = read_questions(store, cfg.questions)
    corpus = Corpus.open(store, run.prepare.corpus)
    matcher = AnswerMatcher()
    made: list[Question] = []
    results: list[Mined] = []
    for question, hits in zip(questions, _ranked(run, corpus, questions, progress)):
        mined = choose_negatives(question, hits[cfg.rank_from :], corpus, matcher, cfg, number=len(made))
        made.append(question._replace(hard_negative_ids=mined.ids))
        results.append(mined)
        progress("mine", len(made), len(questions))
    write_questions(store, cfg.output, made)
    kept = [len(mined.ids) for mined in results]
    hits = sum(mined.hits for mined in results)
    gold = sum(mined.gold for mined in results)
    bearing = sum(mined.answer_bearing for mined in results)
    report = MineReport(
        questions=len(made),
        output=cfg.output,
        method=cfg.method,
        hits=hits,
        dropped_gold=gold,
        dropped_answer_bearing=bearing,
        beyond_count=hits - gold - bearing - sum(kept),
        negatives=sum(kept),
        short=sum(count < cfg.num_negatives for count in kept),
        without=sum(count == 0 for count in kept),
    )
    log.info("mined: %s", " ".join(f"{name}={value}" for name, value in report._asdict().items()))
    return report


def choose_negatives(
    question: Question, ids: Sequence[str], corpus: Corpus, matcher: AnswerMatcher, cfg: MineConfig, *, number: int
) -> Mined:
    """The best, or a draw, of the hits that are neither gold nor hold an answer; `number` seeds the draw."""
    gold = set(question.positive_ids)
    others = [passage_id for passage_id in ids if passage_id not in gold]
    left = others
    if cfg.drop_answer_bearing and question.answers:
        texts = corpus.get(others)
        left = [i for i in others if not matcher.has_answer(texts[i].text, question.answers)]
    chosen = left[: cfg.num_negatives]
    if cfg.sample and len(left) > cfg.num_negatives:
        rng = np.random.default_rng([cfg.seed, number, _SAMPLE])
        chosen = [left[at] for at in sorted(rng.choice(len(left), cfg.num_negatives, replace=False))]
    return Mined(tuple(chosen), len(ids), len(ids) - len(others), len(others) - len(left))


def _ranked(
    run: RunConfig, corpus: Corpus, questions: Sequence[Question], progress: Progress
) -> Iterator[Sequence[str]]:
    """Passage ids for each question down to `mine.rank_to`, best first."""
    texts, k = [question.text for question in questions], run.mine.rank_to
    if run.mine.method == "bm25":
        index = BM25Index(corpus, progress)
        for at in range(0, len(texts), _BATCH):
            yield from ([hit.passage_id for hit in hits] for hits in index.search(texts[at : at + _BATCH], k))
        return
    from mvr_ray.distributed.router import open_router

    with open_router(run) as router:
        _same_corpus(router.manifest.corpus_digest, corpus, run)
        for at in range(0, len(texts), _BATCH):
            answer = router.search_text(texts[at : at + _BATCH], k)
            yield from ([hit.passage_id for hit in hits] for hits in answer.hits)


def _same_corpus(indexed: str, corpus: Corpus, run: RunConfig) -> None:
    if indexed != corpus.digest:
        raise ConfigError(
            f"index {run.index.name!r} holds a corpus of digest {indexed}, but corpus {corpus.name!r} now has "
            f"{corpus.digest}: its negatives would not be found in training; index again (mvr-ray index CONFIG)"
        )
