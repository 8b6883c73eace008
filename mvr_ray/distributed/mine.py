"""Mine hard negatives: passages that a search ranks high for a question and that do not answer it.

The search is BM25 over the corpus, or the live index (ANCE's loop: train, index, mine, train again). From the ranks of
the window, gold passages and those that hold an answer are dropped, and the report counts the hits dropped by each
filter. With a cross-encoder, likely answers are dropped, too (RocketQA's denoising, Qu et al. 2021), and its scores are
stored with the rest for distillation.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from mvr_ray.config import MineConfig, RunConfig
from mvr_ray.core.judging.answers import AnswerMatcher
from mvr_ray.core.reading.cross_encoder import share_beside
from mvr_ray.distributed.bm25 import BM25Index
from mvr_ray.distributed.encoders import require_encoder
from mvr_ray.distributed.rerank import find_pair_model, pair_scores
from mvr_ray.errors import ConfigError, DataError
from mvr_ray.store import manifest as manifests
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.questions import read_questions, write_questions
from mvr_ray.types import FloatArray, IntArray, Passage, Progress, Question, no_progress

log = logging.getLogger(__name__)

_BATCH = 128
_SAMPLE = 5


class MineReport(NamedTuple):
    """Counts of mining: hits in the window, hits dropped by each filter, and negatives.

    `short` counts the questions with fewer than `mine.num_negatives`, `without` those with none.
    """

    questions: int
    output: str
    method: str
    hits: int
    dropped_gold: int
    dropped_answer_bearing: int
    dropped_by_cross_encoder: int
    beyond_count: int
    negatives: int
    short: int
    without: int


class HardNegatives(NamedTuple):
    """The hard negatives of one question, and counts of its hits. `scores`: of its positive, then of each."""

    ids: tuple[str, ...]
    hits: int
    gold: int
    answer_bearing: int
    likely: int = 0
    scores: tuple[float, ...] = ()


def mine(run: RunConfig, progress: Progress = no_progress) -> MineReport:
    """Store `mine.questions` with hard negatives as `mine.output`, deterministically."""
    cfg, store = run.mine, Store(run.store.path)
    if cfg.rank_from >= cfg.rank_to:
        raise ConfigError(
            f"mine.rank_from is {cfg.rank_from} and mine.rank_to {cfg.rank_to}, an empty window; raise mine.rank_to"
        )
    corpus = Corpus.open(store, run.prepare.corpus)
    questions = read_questions(corpus, cfg.questions)
    matcher = AnswerMatcher()
    scorer = find_pair_model(run) if cfg.cross_encoder else None
    filtered_hits: list[FilteredHits] = []
    for question, hits in zip(questions, _rank_passages(run, corpus, questions, progress)):
        filtered_hits.append(filter_hits(question, hits[cfg.rank_from :], corpus, matcher, cfg))
        progress("mine", len(filtered_hits), len(questions))
    if scorer:
        positives = corpus.get(dict.fromkeys(one for question in questions for one in question.positive_ids[:1]))
        candidates = [
            (
                question.text,
                [question.positive_ids[0], *of.ids[: cfg.denoise_depth]] if _has_positive(positives, question) else [],
            )
            for question, of in zip(questions, filtered_hits)
        ]
        scores = pair_scores(run, scorer, corpus, candidates, progress)
        results = [
            denoise(of, own, cfg, number=row) if len(own) else choose_negatives(of, cfg, number=row)
            for row, (of, own) in enumerate(zip(filtered_hits, scores))
        ]
    else:
        results = [choose_negatives(of, cfg, number=row) for row, of in enumerate(filtered_hits)]
    _require_negatives(results, cfg)
    mined_questions = [
        question._replace(hard_negative_ids=result.ids, teacher_scores=result.scores)
        for question, result in zip(questions, results)
    ]
    write_questions(corpus, cfg.output, mined_questions)
    counts = [len(result.ids) for result in results]
    hits = sum(result.hits for result in results)
    gold = sum(result.gold for result in results)
    bearing = sum(result.answer_bearing for result in results)
    likely = sum(result.likely for result in results)
    report = MineReport(
        questions=len(mined_questions),
        output=cfg.output,
        method=cfg.method,
        hits=hits,
        dropped_gold=gold,
        dropped_answer_bearing=bearing,
        dropped_by_cross_encoder=likely,
        beyond_count=hits - gold - bearing - likely - sum(counts),
        negatives=sum(counts),
        short=sum(count < cfg.num_negatives for count in counts),
        without=sum(count == 0 for count in counts),
    )
    log.info("mined: %s", " ".join(f"{name}={value}" for name, value in report._asdict().items()))
    return report


class FilteredHits(NamedTuple):
    """Hits of one question that are neither gold nor answer-bearing, best first, and counts of both."""

    ids: list[str]
    hits: int
    gold: int
    answer_bearing: int


def filter_hits(
    question: Question, ids: Sequence[str], corpus: Corpus, matcher: AnswerMatcher, cfg: MineConfig
) -> FilteredHits:
    """Drop gold and answer-bearing passages from a question's hits."""
    gold = set(question.positive_ids)
    others = [passage_id for passage_id in ids if passage_id not in gold]
    negatives = others
    if cfg.drop_answer_bearing and question.answers:
        texts = corpus.get(others)
        negatives = [i for i in others if not matcher.has_answer(texts[i].text, question.answers)]
    return FilteredHits(negatives, len(ids), len(ids) - len(others), len(others) - len(negatives))


def choose_negatives(candidates: FilteredHits, cfg: MineConfig, *, number: int) -> HardNegatives:
    """Take the best candidates, or a sample seeded by `number`."""
    rows = _sample_negatives(len(candidates.ids), cfg, number)
    return HardNegatives(tuple(candidates.ids[row] for row in rows), *candidates[1:])


def denoise(candidates: FilteredHits, scores: FloatArray, cfg: MineConfig, *, number: int) -> HardNegatives:
    """Choose negatives that the cross-encoder does not score as answers. `scores` begin with the positive's."""
    scored_ids = candidates.ids[: cfg.denoise_depth]
    clean = np.flatnonzero(share_beside(float(scores[0]), scores[1:]) < cfg.denoise_share)
    rows = clean[_sample_negatives(len(clean), cfg, number)]
    negatives = tuple(scored_ids[row] for row in rows)
    teacher_scores = (float(scores[0]), *(float(scores[1 + row]) for row in rows))
    return HardNegatives(negatives, *candidates[1:], likely=len(scored_ids) - len(clean), scores=teacher_scores)


def _require_negatives(results: Sequence[HardNegatives], cfg: MineConfig) -> None:
    """Raise DataError if the cross-encoder, perhaps untrained, dropped all candidates as answers."""
    likely = sum(result.likely for result in results)
    if likely and not any(result.ids for result in results):
        raise DataError(
            f"cross-encoder {cfg.cross_encoder!r} scored all {likely} candidate passages as answers, each "
            f"at least {cfg.denoise_share:g} likely beside the known one (mine.denoise_share); no negative is left: "
            f"train it longer (mvr-ray train CONFIG train.task=cross_encoder), or raise mine.denoise_share above 0.5"
        )


def _has_positive(passages: Mapping[str, Passage], question: Question) -> bool:
    """Whether the question's first positive is a passage of the corpus."""
    return bool(question.positive_ids) and question.positive_ids[0] in passages


def _sample_negatives(count: int, cfg: MineConfig, number: int) -> IntArray:
    if not cfg.sample or count <= cfg.num_negatives:
        return np.arange(min(count, cfg.num_negatives))
    rng = np.random.default_rng([cfg.seed, number, _SAMPLE])
    return np.sort(rng.choice(count, cfg.num_negatives, replace=False))


def _rank_passages(
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

    store = Store(run.store.path)
    base = manifests.read(store, run.index.name)
    _require_same_corpus(base.corpus_digest, corpus, run)
    require_encoder(store, base)
    with open_router(run, base.version) as router:
        for at in range(0, len(texts), _BATCH):
            answer = router.search_text(texts[at : at + _BATCH], k)
            yield from ([hit.passage_id for hit in hits] for hits in answer.hits)


def _require_same_corpus(digest: str, corpus: Corpus, run: RunConfig) -> None:
    if digest != corpus.digest:
        raise ConfigError(
            f"index {run.index.name!r} holds a corpus of digest {digest}, but corpus {corpus.name!r} now has "
            f"{corpus.digest}: its negatives would not be found in training; index again (mvr-ray index CONFIG)"
        )
