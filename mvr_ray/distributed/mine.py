"""Mine hard negatives: passages that a search ranks high for a question and that do not answer it.

The search is BM25 over the corpus, or the live index (ANCE's loop: train, index, mine, train again). From the ranks of
the window, gold passages and those that hold an answer are dropped, and the report counts the hits dropped by each
filter. With a cross-encoder, likely answers are dropped, too (RocketQA's denoising, Qu et al. 2021), and its scores are
stored with the rest for distillation. A pool of actors computes them, in batches of questions in order, so no score
depends on the number of actors.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from mvr_ray.config import MineConfig, RunConfig
from mvr_ray.core.judging.answers import AnswerMatcher
from mvr_ray.core.reading.cross_encoder import Pair, share_beside
from mvr_ray.distributed import models
from mvr_ray.distributed.bm25 import open_bm25
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.ray_data import map_in_pool, pool_need
from mvr_ray.distributed.encoders import require_encoder
from mvr_ray.distributed.result_store import ResultStore
from mvr_ray.distributed.retrieve import QuestionRanker, RankSettings
from mvr_ray.distributed.router import open_router
from mvr_ray.distributed.training.examples import limit_per_passage
from mvr_ray.errors import ConfigError, DataError
from mvr_ray.store import manifest as manifests
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.questions import add_questions, own_passages, read_questions
from mvr_ray.types import FloatArray, IntArray, Progress, Question, no_progress

log = logging.getLogger(__name__)

_BATCH = 128
_SCORE_BATCH = 16
_SAMPLE = 5
Candidates = tuple[str, Sequence[str]]
"""A question and the ids of passages."""


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
    """The hard negatives of one question, best first, or the candidates for them, and counts of its hits: all, and
    those dropped as gold, as answer-bearing and as likely answers. `scores`: of its positive, then of each."""

    ids: Sequence[str]
    hits: int
    gold: int
    answer_bearing: int
    likely: int = 0
    scores: tuple[float, ...] = ()


def mine(run: RunConfig, progress: Progress = no_progress, corpus_digest: str | None = None) -> MineReport:
    """Store `mine.questions` with hard negatives as `mine.output`, deterministically; they are passages of the corpus
    version `corpus_digest` (None: the last)."""
    cfg, store = run.mine, Store(run.store.path)
    if cfg.rank_from >= cfg.rank_to:
        raise ConfigError(
            f"mine.rank_from is {cfg.rank_from} and mine.rank_to {cfg.rank_to}, an empty window; raise mine.rank_to"
        )
    if cfg.output == cfg.questions and cfg.max_passage_questions:
        raise ConfigError(
            f"mine.output is {cfg.output!r}, as mine.questions, and mine.max_passage_questions is "
            f"{cfg.max_passage_questions}: the set would lose its other questions; give another mine.output"
        )
    corpus = Corpus.open(store, run.prepare.corpus, corpus_digest)
    questions = limit_per_passage(read_questions(corpus, cfg.questions), cfg.max_passage_questions)
    matcher = AnswerMatcher(run.evaluate.match)
    scorer = None
    if cfg.cross_encoder:
        scorer = models.find_worker_model(run, models.CROSS_ENCODERS, cfg.cross_encoder, models.pair_spec(run))
    candidates: list[HardNegatives] = []
    own_ids = own_passages(questions, corpus, run.prepare.sources)
    scores: list[FloatArray] = [np.zeros(0, np.float32)] * len(questions)
    with ResultStore(store, run.index.name) as result_store:
        for question, hits in zip(questions, _rank_passages(run, corpus, questions, progress, result_store)):
            candidates.append(
                filter_hits(question, own_ids.get(question.id, ()), hits[cfg.rank_from :], corpus, matcher, cfg)
            )
            progress("mine", len(candidates), len(questions))
        if scorer:
            scores = _scores_with_positives(run, scorer, corpus, questions, candidates, progress, result_store)
    results = [
        denoise(of, own, cfg, number=row) if len(own) else choose_negatives(of, cfg, number=row)
        for row, (of, own) in enumerate(zip(candidates, scores))
    ]
    report = _report(cfg, results)
    if report.dropped_by_cross_encoder and not report.negatives:  # the cross-encoder may be untrained
        raise DataError(
            f"cross-encoder {cfg.cross_encoder!r} scored all {report.dropped_by_cross_encoder} candidate passages as "
            f"answers, each at least {cfg.denoise_share:g} likely beside the known one (mine.denoise_share); no "
            f"negative is left: train it longer (mvr-ray train CONFIG train.task=cross_encoder), or raise "
            f"mine.denoise_share above 0.5"
        )
    mined_questions = [
        question._replace(hard_negative_ids=tuple(result.ids), teacher_scores=result.scores)
        for question, result in zip(questions, results)
    ]
    add_questions(corpus, cfg.output, mined_questions)
    log.info("mined: %s", " ".join(f"{name}={value}" for name, value in report._asdict().items()))
    return report


def _report(cfg: MineConfig, results: Sequence[HardNegatives]) -> MineReport:
    counts = [len(result.ids) for result in results]
    hits, gold, bearing, likely = (
        sum(getattr(result, name) for result in results) for name in ("hits", "gold", "answer_bearing", "likely")
    )
    return MineReport(
        questions=len(results),
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


def filter_hits(
    question: Question,
    own_ids: Iterable[str],
    ids: Sequence[str],
    corpus: Corpus,
    matcher: AnswerMatcher,
    cfg: MineConfig,
) -> HardNegatives:
    """Drop gold and answer-bearing passages, and `own_ids`, the question itself, from its hits; all others are
    candidates."""
    own_or_gold = {*question.positive_ids, *own_ids}
    others = [passage_id for passage_id in ids if passage_id not in own_or_gold]
    negatives = others
    if cfg.drop_answer_bearing and question.answers:
        texts = corpus.get(others)
        negatives = [i for i in others if not matcher.has_answer(texts[i].text, question.answers)]
    return HardNegatives(negatives, len(ids), len(ids) - len(others), len(others) - len(negatives))


def choose_negatives(candidates: HardNegatives, cfg: MineConfig, *, number: int) -> HardNegatives:
    """Take the best candidates, or a sample seeded by `number`."""
    rows = _sample_negatives(len(candidates.ids), cfg, number)
    return candidates._replace(ids=tuple(candidates.ids[row] for row in rows))


def denoise(candidates: HardNegatives, scores: FloatArray, cfg: MineConfig, *, number: int) -> HardNegatives:
    """Choose negatives that the cross-encoder does not score as answers. `scores` begin with the positive's."""
    scored_ids = candidates.ids[: cfg.denoise_depth]
    clean = np.flatnonzero(share_beside(float(scores[0]), scores[1:]) < cfg.denoise_share)
    rows = clean[_sample_negatives(len(clean), cfg, number)]
    teacher_scores = (float(scores[0]), *(float(scores[1 + row]) for row in rows))
    negatives, num_likely = tuple(scored_ids[row] for row in rows), len(scored_ids) - len(clean)
    return candidates._replace(ids=negatives, likely=num_likely, scores=teacher_scores)


def _sample_negatives(count: int, cfg: MineConfig, number: int) -> IntArray:
    if not cfg.sample or count <= cfg.num_negatives:
        return np.arange(min(count, cfg.num_negatives))
    rng = np.random.default_rng([cfg.seed, number, _SAMPLE])
    return np.sort(rng.choice(count, cfg.num_negatives, replace=False))


def _rank_passages(
    run: RunConfig, corpus: Corpus, questions: Sequence[Question], progress: Progress, result_store: ResultStore
) -> Iterator[Sequence[str]]:
    """Return passage ids for each question down to `mine.rank_to`, best first."""
    texts = [question.text for question in questions]
    batches = [json.dumps(texts[start : start + _BATCH]) for start in range(0, len(texts), _BATCH)]
    inputs, k = ["mine", run.mine.method, corpus.digest], run.mine.rank_to
    if run.mine.method == "bm25":
        compute = partial(_rank_by_words, run, corpus, progress)
        inputs.append(run.index.language)
    else:
        store = Store(run.store.path)
        base = manifests.read(store, run.index.name)
        if base.corpus_digest != corpus.digest:
            raise ConfigError(
                f"index {run.index.name!r} holds a corpus of digest {base.corpus_digest}, but corpus {corpus.name!r} "
                f"now has {corpus.digest}: its negatives would not be found in training; index again (mvr-ray index "
                f"CONFIG)"
            )
        require_encoder(store, base)
        compute = partial(_rank_by_index, run, base.version)
        inputs.append(base.to_json().decode())
    for hit_lists in result_store.map([*inputs, k], batches, compute):
        yield from json.loads(hit_lists)


def _rank_by_words(run: RunConfig, corpus: Corpus, progress: Progress, batches: Sequence[str]) -> Iterator[str]:
    index = open_bm25(run, corpus, progress)
    for batch in batches:
        hit_lists = index.search(json.loads(batch), run.mine.rank_to)
        yield json.dumps([[hit.passage_id for hit in hits] for hits in hit_lists])


def _rank_by_index(run: RunConfig, version: int, batches: Sequence[str]) -> Iterator[str]:
    with open_router(run, version) as router:
        ranker = QuestionRanker(router, RankSettings(run.mine.rank_to))
        for batch in batches:
            hit_lists = ranker.search(router.embed(json.loads(batch)), run.mine.rank_to).hits
            yield json.dumps([[hit.passage_id for hit in hits] for hits in hit_lists])


class PairScorer(models.ModelWorker):
    """Score batches of questions with their candidates, whose texts are read from the corpus."""

    def __init__(self, task: models.WorkerModel, corpus: Corpus) -> None:
        super().__init__(task)
        self.corpus = corpus

    def __call__(self, batch: Sequence[Candidates]) -> list[float]:
        texts = self.corpus.get(dict.fromkeys(one for _, ids in batch for one in ids))
        pairs = [Pair(question, texts[one]) for question, ids in batch for one in ids]
        with models.translate_out_of_memory(f"{self.task.tokens_per_batch} tokens", "read.tokens_per_batch"):
            return self.model.score(pairs, self.task.tokens_per_batch).tolist()


def _scores_with_positives(
    run: RunConfig,
    model: models.WorkerModel,
    corpus: Corpus,
    questions: Sequence[Question],
    candidates: Sequence[HardNegatives],
    progress: Progress,
    result_store: ResultStore,
) -> list[FloatArray]:
    """Compute float32 scores of each question's positive and its candidates, none where the corpus lacks the positive.
    Raises ResourceError before any worker starts."""
    positives = corpus.get(dict.fromkeys(one for question in questions for one in question.positive_ids[:1]))
    pairs = [
        (question.text, [*question.positive_ids[:1], *of.ids[: run.mine.denoise_depth]])
        if positives.keys() & question.positive_ids[:1]
        else (question.text, [])
        for question, of in zip(questions, candidates)
    ]
    batches = [pairs[start : start + _SCORE_BATCH] for start in range(0, len(pairs), _SCORE_BATCH)]
    scores: list[FloatArray] = []
    num_passages, needs = sum(len(ids) for _, ids in pairs), [pool_need("cross-encoders", run.resources)]
    with session.connect(run.resources, num_passages, needs):
        arguments = {"task": model, "corpus": corpus}
        through = partial(result_store.map, ["score pairs", model.fingerprint, repr(model.spec), corpus.digest])
        results = map_in_pool(PairScorer, arguments, batches, run.resources, "scoring pairs", through)
        for batch, values in zip(batches, results):
            ends = np.cumsum([len(ids) for _, ids in batch])
            scores += np.split(np.array(values, np.float32), ends[:-1])
            progress("cross-encoder", len(scores), len(pairs))
    return scores
