"""Measure the accuracy of an index version on question sets, by answers and gold passages, with BM25 and hybrid search.

    answer/top-k    share of questions with an answer-bearing passage among the first k        questions with answers
    gold/top-k      share of questions with a gold passage among the first k                   questions with gold ids
    gold/recall@k   share of a question's gold passages among the first k, where some have several (BEIR's Recall@k)
    gold/mrr        mean reciprocal rank of the first gold passage, over the first max(k)
    gold/ndcg@10    normalised discounted cumulative gain of gold passages

Every value is a mean over questions with its 95 % interval, which resamples whole articles: questions of one article
are not independent. Every search has at least 10 hits, for gold/ndcg@10; ranks are over the first max(k), as gold/mrr
is. Only complete answers count: a version with an unavailable shard is not measured. A question that is a passage of
the corpus itself (`own_passages`) is searched without that one. `evaluate_ranking` measures the ranking of any program
by the same figures.

`tune` chooses the weight of the dense score in a hybrid search, on questions outside every reported figure. Each weight
is tried with the exact production search. The best one has the most questions with a gold passage at rank 1; ties go to
the higher mean reciprocal rank, then to the dense score alone, then to the smaller weight. The report has the whole
curve, the dense score alone and reciprocal rank fusion.
"""

import itertools
import json
import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from mvr_ray.config import EvaluateConfig, RunConfig
from mvr_ray.core.judging.answers import AnswerMatcher, refuse_empty_answers, warn_of_runs
from mvr_ray.core.judging.metrics import (
    NDCG_CUTOFF,
    first_ranks,
    hit_within,
    ndcg,
    recall,
    reciprocal_ranks,
    share_interval,
)
from mvr_ray.core.searching.hybrid import system_name
from mvr_ray.distributed.bm25 import open_bm25
from mvr_ray.distributed.encoders import is_trained, require_encoder
from mvr_ray.distributed.indexing.lexical import has_words
from mvr_ray.distributed.result_store import ResultStore
from mvr_ray.distributed.retrieve import (
    QuestionRanker,
    QuestionSet,
    RankSettings,
    checked_filter,
    rank_questions,
    warn_of_plain_queries,
)
from mvr_ray.distributed.router import Router, open_router, require_words
from mvr_ray.distributed.text_table import interval_text, text_table
from mvr_ray.errors import ConfigError, DataError, MissingInputError, count_noun
from mvr_ray.store import manifest as manifests
from mvr_ray.store.corpus import Corpus, question_sets
from mvr_ray.store.files import Store, address_name, copy_name, local_copy, name_address
from mvr_ray.store.formats.question_ranks import QuestionRanks
from mvr_ray.store.formats.ranked_ids import QuestionHits, read_ranked_ids, rows_by_id
from mvr_ray.store.formats.rankings import RankedPassage, RankedQuestion
from mvr_ray.store.formats.text_files import plain_name
from mvr_ray.store.questions import articles_of, own_passages, read_questions, require_gold_passages
from mvr_ray.types import FloatArray, Hit, HybridQueries, HybridWeight, IntArray, Progress, Question, no_progress

log = logging.getLogger(__name__)

WEIGHTS = (0.0, 1.0, 2.0, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 80.0, 120.0, 200.0)
"""Weights for the dense score, a cosine; BM25 scores of a question are some tens."""
DEPTH = 20
BM25_SYSTEM = "bm25"
"""BM25's name among the systems of a report."""
HOW_TO_ADD_QUESTIONS = "Name a source's set by `questions: NAME` in prepare.sources, and run `mvr-ray prepare CONFIG`"


class WeightAccuracy(NamedTuple):
    """Accuracy of one weight: shares of questions with a gold passage in the top k, and the mean reciprocal rank.
    Weight None is the dense score alone."""

    weight: HybridWeight | None
    top1: float
    top5: float
    top20: float
    mrr: float


class TuneReport(NamedTuple):
    """The curve, and the setting for the run file."""

    index: str
    version: int
    questions: str
    num_questions: int
    setting: str
    rows: list[WeightAccuracy]


class EvaluationRow(NamedTuple):
    """One measured value (a share, 0..1) with its 95 % interval over `n` questions; NaN, in JSON null, are the ends
    where all articles agree on a value between 0 and 1."""

    system: str
    questions: str
    metric: str
    value: float
    low: float
    high: float
    n: int

    def in_percent(self) -> str:
        return f"{100 * self.value:.1f} ({interval_text(self.low, self.high, 100)})"


class EvaluationReport(NamedTuple):
    """`configured_system` is the one of `rows` that `search` and `serve` rank by: with `search.hybrid`, the hybrid.
    `ranking` is the file that was measured in place of the index; only its passages are those of the version."""

    index: str
    version: int
    encoder_fingerprint: str
    passages: int
    exact: bool
    rows: list[EvaluationRow]
    ranks: list[QuestionRanks]
    configured_system: str = ""
    ranking: str = ""

    def __repr__(self) -> str:
        """Show the figures, in percent, as a table; `pandas.DataFrame(report.rows)` has them as shares."""
        lines = [(row.questions, row.system, f"{row.n:,}", row.metric, row.in_percent()) for row in self.rows]
        title = f"index {self.index} version {self.version}, {count_noun(self.passages, 'passage')}"
        return text_table(title, ("questions", "system", "number", "metric", "%"), lines)


class SystemResult(NamedTuple):
    """The metrics of one system on one question set, and its ranks for every question."""

    rows: list[EvaluationRow]
    ranks: QuestionRanks


def evaluate(
    run: RunConfig,
    progress: Progress = no_progress,
    sets: Sequence[QuestionSet] | None = None,
    version: int | None = None,
) -> EvaluationReport:
    """Measure a version, the live one by default, on every set of `evaluate.questions`, or on `sets` of these names: by
    the dense score, and by hybrid search with `search.hybrid` and with the weight tuned on `evaluate.hybrid`. With
    `retrieve.filter` only passages that pass it are ranked, as by `retrieve`.

    Raises ConfigError without a set or any label, or for a filter that does not fit or beside BM25, MissingInputError,
    CoverageError, ResourceError, ShardIndexError for a hybrid search over a version without words.
    """
    settings, store = run.evaluate, Store(run.store.path)
    if settings.bm25 and run.index.name == BM25_SYSTEM:
        raise ConfigError(
            f"index.name is {BM25_SYSTEM}, as BM25 in the report, so the report could not distinguish them; set "
            f"evaluate.bm25=false, or index under another name"
        )
    base = manifests.read(store, run.index.name, version)
    require_encoder(store, base)
    corpus = Corpus.open(store, base.corpus, base.corpus_digest)
    measurement = _Measurement(run, corpus, _configured_sets(corpus, settings) if sets is None else sets)
    sets = measurement.sets
    tuning_set = None
    if settings.hybrid:
        texts = trained_texts(run, corpus)
        tuning_set = unreported_questions(corpus, settings.hybrid, sets, "evaluate.hybrid", texts)
    if settings.hybrid or run.search.hybrid is not None:
        require_words(base)
    rank = RankSettings(
        k=search_depth(settings) + max(map(most_ids, measurement.own_ids.values())),
        match=settings.match,
        refined_queries=run.retrieve.refined_queries,
        filter=checked_filter(run, corpus),
    )
    if settings.bm25 and rank.filter is not None:
        raise ConfigError(
            "evaluate.bm25 ranks all passages, and retrieve.filter restricts what the other systems of the report "
            "rank; set evaluate.bm25=false, or retrieve.filter=null"
        )
    if rank.refined_queries:
        warn_of_plain_queries(base, [own.name for own in sets])
    with open_router(run, base.version) as router, ResultStore(store, base.index) as result_store:
        rank_all = partial(rank_questions, run, router, sets, progress=progress, result_store=result_store)
        queries: list[str] | None = [] if settings.hybrid or run.search.hybrid is not None else None
        measurement.add(run.index.name, rank_all(rank, queries=queries))
        if settings.bm25:
            measurement.add(BM25_SYSTEM, _rank_by_words(run, router, sets, rank, progress, result_store))
        weights: list[HybridWeight | None] = [run.search.hybrid]
        if tuning_set:
            weight_rows = try_weights(run, router, tuning_set, rank.filter, result_store, progress=progress)
            best = best_weight(weight_rows)
            log.info("hybrid weight: weight=%s accuracy=%.3f set=%s", best.weight, best.top1, tuning_set.name)
            weights.append(best.weight)
        for weight in dict.fromkeys(weight for weight in weights if weight is not None):
            measurement.add(system_name(weight), rank_all(rank._replace(hybrid=weight), queries=queries))
    log.info("evaluated: index=%s version=%d sets=%d", base.index, base.version, len(sets))
    return EvaluationReport(
        base.index,
        base.version,
        base.encoder_fingerprint,
        base.num_passages,
        base.index_params["kind"] == "flat",
        *measurement.rows_and_ranks(),
        run.index.name if run.search.hybrid is None else system_name(run.search.hybrid),
    )


def evaluate_ranking(
    run: RunConfig, ranking: str, progress: Progress = no_progress, version: int | None = None
) -> EvaluationReport:
    """Measure a ranking file of any program, over the passages of a version, the live one by default, on every set of
    `evaluate.questions`, as `evaluate` measures the index. The system has the name of the file without its ending.

    Questions that the file lacks have no hits. What lies below its deepest rank is not known, so deeper cut-offs are
    left out, unless it ranks all passages. Raises ConfigError as `evaluate` does, and if no cut-off is left; DataError
    for a file that ranks no question of a set, or a passage twice; MissingInputError for a passage of another corpus.
    """
    settings, store, path = run.evaluate, Store(run.store.path), local_copy(ranking)
    base = manifests.read(store, run.index.name, version)
    corpus = Corpus.open(store, base.corpus, base.corpus_digest)
    measurement = _Measurement(run, corpus, _configured_sets(corpus, settings))
    with name_address(ranking, path):
        rows = read_ranked_ids(path)
    name, ranking = copy_name(ranking, path), address_name(ranking)
    own_of = {
        key: measurement.own_ids[set_name].get(question.id, ())
        for set_name, questions in measurement.sets
        for question in questions
        for key in (question.id, question.text)
    }
    depth = max(sum(hit not in own_of.get(row.id or row.text or "", ()) for hit, _ in row.hits) for row in rows)
    if depth < base.num_passages and (too_deep := sorted(k for k in {*settings.k, NDCG_CUTOFF} if k > depth)):
        if depth < min(settings.k):
            raise ConfigError(
                f"evaluate.k is {min(settings.k)} or more, but {ranking} ranks only {count_noun(depth, 'passage')} a "
                f"question; set a smaller evaluate.k, or rank more"
            )
        log.warning("cut-offs left out: k=%s ranking=%s depth=%d", ",".join(map(str, too_deep)), ranking, depth)
        measurement.depth = depth
    system = plain_name(path).stem
    measurement.add(system, _rank_by_file(run, corpus, measurement.sets, rows, ranking, progress))
    log.info("evaluated: ranking=%s index=%s version=%d", ranking, base.index, base.version)
    figures = measurement.rows_and_ranks()
    return EvaluationReport(base.index, base.version, "", base.num_passages, False, *figures, system, name)


class _Measurement:
    """Measures systems on question sets of a corpus. `depth` is that of the systems' rankings, None: as deep as needed.

    Raises ConfigError without any label, MissingInputError for sets of another corpus.
    """

    def __init__(self, run: RunConfig, corpus: Corpus, sets: Sequence[QuestionSet]) -> None:
        if not any(question.answers or question.positive_ids for own in sets for question in own.questions):
            raise ConfigError(
                f"evaluate.questions: no question of {', '.join(own.name for own in sets)} has an answer or a gold "
                f"passage, so there is nothing to measure; give answers or positive_ids, or rank passages alone by "
                f"`mvr-ray retrieve`"
            )
        for name, questions in sets:
            require_gold_passages(name, questions, corpus)
            if run.retrieve.strict_answers:
                refuse_empty_answers(questions, run.evaluate.match)
            warn_of_runs(name, (question.answers for question in questions), run.evaluate.match)
        self.sets, self.settings = sets, run.evaluate
        self.depth: int | None = None
        self.articles = {name: articles_of(questions, corpus) for name, questions in sets}
        self.own_ids = {name: own_passages(questions, corpus, run.prepare.sources) for name, questions in sets}
        self.results: list[SystemResult] = []

    def add(self, system: str, ranked_questions: Iterator[RankedQuestion]) -> None:
        """Measure a system by its hits for every question of every set, in order."""
        for name, questions in self.sets:
            own_ids, rows = self.own_ids[name], itertools.islice(ranked_questions, len(questions))
            own = [without_contents(row, own_ids.get(row.question.id, ())) for row in rows]
            self.results.append(system_result(system, name, own, self.articles[name], self.settings, self.depth))

    def rows_and_ranks(self) -> tuple[list[EvaluationRow], list[QuestionRanks]]:
        return [row for result in self.results for row in result.rows], [result.ranks for result in self.results]


def _configured_sets(corpus: Corpus, settings: EvaluateConfig) -> list[QuestionSet]:
    """Return the sets of `evaluate.questions`, each once. Raises ConfigError without any."""
    if not settings.questions:
        set_names = ", ".join(question_sets(corpus)) or "none"
        raise ConfigError(
            f"evaluate.questions names no question set; corpus {corpus.name!r} has: {set_names}. {HOW_TO_ADD_QUESTIONS}"
        )
    return [QuestionSet(name, read_questions(corpus, name)) for name in dict.fromkeys(settings.questions)]


def _rank_by_words(
    run: RunConfig,
    router: Router,
    sets: Sequence[QuestionSet],
    rank: RankSettings,
    progress: Progress,
    result_store: ResultStore | None = None,
) -> Iterator[RankedQuestion]:
    """Yield every question with its hits by BM25, in order: by the searchers where the version has whole words by the
    run's rule, else in this process."""
    if has_words(router.store, router.manifest, run.index.language):
        rank = rank._replace(hybrid="words")
        yield from rank_questions(run, router, sets, rank, progress, result_store=result_store)
        return
    index, matcher, count = open_bm25(run, router.corpus, progress), AnswerMatcher(rank.match), 0
    for batch in (batch for own in sets for batch in own.batches(run.retrieve.batch)):
        hits = index.search(batch.texts, rank.k)
        count += len(hits)
        progress("bm25", count, sum(len(own.questions) for own in sets))
        yield from judge_hits(batch.questions, hits, router.corpus, matcher)


def _rank_by_file(
    run: RunConfig,
    corpus: Corpus,
    sets: Sequence[QuestionSet],
    rows: Sequence[QuestionHits],
    ranking: str,
    progress: Progress,
) -> Iterator[RankedQuestion]:
    """Yield every question with its hits in a ranking file, in order; questions are the same by id, by text where the
    file has no ids."""
    matcher = AnswerMatcher(run.evaluate.match)
    has_ids = all(row.id is not None for row in rows)
    row_of = rows_by_id(rows, ranking) if has_ids else {row.text: row for row in rows}
    count, total = 0, sum(len(own.questions) for own in sets)
    for name, questions in sets:
        names = [question.id if has_ids else question.text for question in questions]
        if num_missing := sum(one not in row_of for one in names):
            if num_missing == len(names):
                raise DataError(
                    f"{ranking} ranks none of the {count_noun(len(names), 'question')} of set {name!r} (first: "
                    f"{names[0]!r}; the ranking's first: {next(iter(row_of))!r}); rank these questions, or name the "
                    f"set that it ranks by evaluate.questions"
                )
            log.warning("questions not ranked, which count as misses: %d of %d set=%s", num_missing, len(names), name)
        for question, one in zip(questions, names):
            row = row_of.get(one, QuestionHits(None, None, []))
            row.require_distinct(ranking)
            hits = [Hit(passage_id, math.nan, -1, -1, -1) for passage_id, _ in row.hits]
            count += 1
            progress("questions", count, total)  # first, as the caller asks for no question beyond the last one
            yield from judge_hits([question], [hits], corpus, matcher)


def search_depth(settings: EvaluateConfig) -> int:
    """Return the number of hits that the metrics of `system_result` need."""
    return max(*settings.k, NDCG_CUTOFF)


def most_ids(own_ids: Mapping[str, Collection[str]]) -> int:
    """Return the most passages that one question is itself."""
    return max(map(len, own_ids.values()), default=0)


def system_result(
    system: str,
    name: str,
    results: Sequence[RankedQuestion],
    article_of: Mapping[str, str],
    settings: EvaluateConfig,
    depth: int | None = None,
) -> SystemResult:
    """Compute every metric that the set's questions allow, and their ranks over the first max(k) hits. `article_of`
    maps question ids to articles (`articles_of`). Cut-offs beyond `depth` are left out."""
    ks = sorted(k for k in set(settings.k) if depth is None or k <= depth)
    last = max(ks)
    rows: list[EvaluationRow] = []
    ranks_of: dict[str, dict[str, int]] = {"answer": {}, "gold": {}}
    gold_ndcgs: dict[str, float] = {}

    def add(metric: str, values_Q: FloatArray, of: Sequence[RankedQuestion]) -> None:
        rows.append(mean_row(system, name, metric, values_Q, [article_of[row.question.id] for row in of], settings))

    def rank(kind: str, marks: Sequence[Sequence[bool]], of: Sequence[RankedQuestion]) -> IntArray:
        ranks_Q = first_ranks(marks)
        ranks_of[kind] = dict(zip((row.question.id for row in of), ranks_Q.tolist()))
        for k in ks:
            add(f"{kind}/top-{k}", hit_within(ranks_Q, k), of)
        return ranks_Q

    if with_answers := [row for row in results if row.question.answers]:
        rank("answer", [[bool(hit.has_answer) for hit in row.passages[:last]] for row in with_answers], with_answers)
    if with_gold := [row for row in results if row.question.positive_ids]:
        gold = [row.question.grade_of for row in with_gold]
        lists = [[hit.id for hit in row.passages] for row in with_gold]
        ranks_Q = rank("gold", [[i in gold_ids for i in ids[:last]] for ids, gold_ids in zip(lists, gold)], with_gold)
        add("gold/mrr", reciprocal_ranks(ranks_Q, last), with_gold)
        if any(len(own) > 1 for own in gold):  # else it is top-k
            for k in ks:
                add(f"gold/recall@{k}", recall(lists, gold, k), with_gold)
        if depth is None or depth >= NDCG_CUTOFF:
            ndcg_Q = ndcg(lists, gold, NDCG_CUTOFF)
            gold_ndcgs = dict(zip((row.question.id for row in with_gold), ndcg_Q.tolist()))
            add(f"gold/ndcg@{NDCG_CUTOFF}", ndcg_Q, with_gold)
    ids = [row.question.id for row in results]
    question_ranks = QuestionRanks(
        system,
        name,
        ids,
        [article_of[i] for i in ids],
        [ranks_of["answer"].get(i) for i in ids],
        [ranks_of["gold"].get(i) for i in ids],
        gold_ndcgs=[gold_ndcgs.get(i) for i in ids] if gold_ndcgs else (),
    )
    return SystemResult(rows, question_ranks)


def without_contents(row: RankedQuestion, own_ids: Collection[str] = ()) -> RankedQuestion:
    """Drop what no metric reads of the hits, so that those of all questions fit into memory, and the passages that are
    the question itself (`own_passages`)."""
    gold_ids, hits = set(row.question.positive_ids), enumerate(hit for hit in row.passages if hit.id not in own_ids)
    return row._replace(passages=[hit if hit.id in gold_ids else _no_gold(rank, hit.has_answer) for rank, hit in hits])


@lru_cache(None)
def _no_gold(rank: int, has_answer: bool | None) -> RankedPassage:
    """Stand for the hits of this rank that are no gold passage, by an id that no passage can have."""
    return RankedPassage(f"\ud800{rank}", "", "", 0.0, has_answer)


def hit_marks(row: RankedQuestion) -> list[Any]:
    """Return what metrics read of each hit, for JSON: `has_answer`, with the id before it if it is a gold passage."""
    gold_ids = set(row.question.positive_ids)
    return [[hit.id, hit.has_answer] if hit.id in gold_ids else hit.has_answer for hit in row.passages]


def with_marks(question: Question, marks: Sequence[Any]) -> RankedQuestion:
    """Return a question with the hits that `hit_marks` describes, as `without_contents` does."""
    hits = (
        RankedPassage(mark[0], "", "", 0.0, mark[1]) if isinstance(mark, list) else _no_gold(rank, mark)
        for rank, mark in enumerate(marks)
    )
    return RankedQuestion(question, list(hits))


def mean_row(
    system: str, name: str, metric: str, values_Q: FloatArray, articles_Q: Sequence[str], settings: EvaluateConfig
) -> EvaluationRow:
    """Return the mean of a metric (0..1) of a question set, with its interval over articles."""
    low, high = share_interval(values_Q, articles_Q, settings.seed, settings.bootstrap)
    return EvaluationRow(system, name, metric, float(np.mean(values_Q)), low, high, len(values_Q))


def judge_hits(
    questions: Sequence[Question], hits: Sequence[Sequence[Hit]], passages: Corpus, matcher: AnswerMatcher
) -> list[RankedQuestion]:
    """Mark each question's hits by whether their passage holds an answer (None for a question without answers). Raises
    MissingInputError for a hit that the corpus lacks, as of another program."""

    def judge(question: Question, hit: Hit, text: str) -> RankedPassage:
        has_answer = matcher.has_answer(text, question.answers) if question.answers else None
        return RankedPassage(hit.passage_id, "", "", hit.score, has_answer)

    results: list[RankedQuestion] = []
    for question, own in zip(questions, hits, strict=True):
        texts = passages.get(hit.passage_id for hit in own)
        if missing := next((hit.passage_id for hit in own if hit.passage_id not in texts), None):
            is_chunked = passages.get([f"{missing}#0"])
            hint = f"; it holds chunks of passages, such as {missing + '#0'!r}" if is_chunked else ""
            raise MissingInputError(
                f"question {question.id!r}: passage {missing!r} is not in corpus {passages.name!r}{hint}; rank the "
                f"passages of this corpus, by their ids"
            )
        results.append(RankedQuestion(question, [judge(question, hit, texts[hit.passage_id].text) for hit in own]))
    return results


def tune(run: RunConfig, questions: str | QuestionSet, progress: Progress = no_progress) -> TuneReport:
    """Measure each weight on the questions with gold passages that `evaluate.questions` lacks, of a stored set or given
    ones.

    Raises ConfigError for a set without any or a filter that does not fit, MissingInputError, CoverageError,
    ShardIndexError for a version without words.
    """
    store = Store(run.store.path)
    base = manifests.read(store, run.index.name)
    corpus = Corpus.open(store, base.corpus, base.corpus_digest)
    names = [name for name in run.evaluate.questions if name in question_sets(corpus)]
    reports = [QuestionSet(name, read_questions(corpus, name)) for name in names]
    query_set = unreported_questions(corpus, questions, reports, "tune", trained_texts(run, corpus))
    require_words(base)
    ranking_filter = checked_filter(run, corpus)
    with open_router(run, base.version) as router, ResultStore(store, base.index) as result_store:
        weights = (None, "rrf", *WEIGHTS)
        rows = try_weights(run, router, query_set, ranking_filter, result_store, weights, progress)
    weight = best_weight(rows).weight
    setting = f"search.hybrid={'null' if weight is None else weight if isinstance(weight, str) else f'{weight:g}'}"
    log.info("tuned: index=%s version=%d set=%s %s", base.index, base.version, query_set.name, setting)
    return TuneReport(base.index, base.version, query_set.name, len(query_set.questions), setting, rows)


def trained_texts(run: RunConfig, corpus: Corpus) -> set[str]:
    """Return texts of the stored questions on which the run's encoder was trained; none of an untrained one."""
    names = {run.train.questions, run.train.hard_negatives} & {*question_sets(corpus)} if is_trained(run) else set()
    return {question.text for name in names if name for question in read_questions(corpus, name)}


def unreported_questions(
    corpus: Corpus,
    own: str | QuestionSet,
    reports: Sequence[QuestionSet],
    setting: str,
    training_texts: Collection[str] = (),
) -> QuestionSet:
    """Return the questions that name gold passages, of a stored set or given ones, without those whose text is one of
    `reports`: a weight that is chosen on a question is not to be measured by it. Large sets share a few texts, copies
    share all. Without those of `training_texts`, too, as dense search ranks them better than others: if only such are
    left, they stay, and a warning says so.

    Raises ConfigError, which names the setting, if there are none, else as `require_gold_passages`.
    """
    reported_texts = {question.text for own in reports for question in own.questions}

    def others_of(questions: Sequence[Question]) -> list[Question]:
        return [question for question in questions if question.positive_ids and question.text not in reported_texts]

    name, all_questions = (own, read_questions(corpus, own)) if isinstance(own, str) else own
    questions = [question for question in all_questions if question.positive_ids]
    if not questions:
        raise ConfigError(
            f"{setting}: question set {name!r} names no gold passages; name a set that does, or rank without a weight: "
            f"search.hybrid=rrf"
        )
    require_gold_passages(name, questions, corpus)
    others = others_of(questions)
    if not others:
        sets = [own for own in question_sets(corpus) if others_of(read_questions(corpus, own))]
        raise ConfigError(
            f"{setting}: all {count_noun(len(questions), 'question')} of {name!r} with gold passages are also "
            f"reported, in evaluate.questions ({', '.join(own.name for own in reports)}); choose the weight on a set "
            f"that has others: {', '.join(sets) or 'there is none'}"
        )
    if num_left_out := len(questions) - len(others):
        log.warning("questions left out that are also reported: %d of %d set=%s", num_left_out, len(questions), name)
    if new := [question for question in others if question.text not in training_texts]:
        if num_trained := len(others) - len(new):
            log.warning("questions left out that the encoder was trained on: %d set=%s", num_trained, name)
        others = new
    else:
        log.warning(
            "the encoder was trained on all of these questions, so the weight of dense search is chosen too large; "
            "name a set that it was not trained on: set=%s",
            name,
        )
    return QuestionSet(name, others)


def try_weights(
    run: RunConfig,
    router: Router,
    questions: QuestionSet,
    filter: Mapping[str, Any] | None,
    result_store: ResultStore,
    weights: Sequence[HybridWeight | None] = WEIGHTS,
    progress: Progress = no_progress,
) -> list[WeightAccuracy]:
    """Search with each of the weights; every question names gold passages. Raises ShardIndexError, CoverageError."""
    own_ids = own_passages(questions.questions, router.corpus, run.prepare.sources)
    depth = DEPTH + most_ids(own_ids)
    ranker = QuestionRanker(router, RankSettings(k=depth, filter=filter))
    batches = questions.batches(run.retrieve.batch)
    queries = lru_cache(None)(lambda number: ranker.embed(batches[number]))

    def gold_ranks(call: str) -> str:
        """Return the rank of the first gold passage of each question of a batch, with one weight."""
        weight, number = json.loads(call)
        hybrid = None if weight is None else HybridQueries(batches[number].texts, weight)
        marks: list[list[bool]] = []
        for question, hits in zip(batches[number].questions, ranker.search(queries(number), depth, hybrid).hits):
            own = own_ids.get(question.id, ())
            marks.append([hit.passage_id in question.positive_ids for hit in hits if hit.passage_id not in own])
        return json.dumps(first_ranks(marks).tolist())

    inputs = ["tune", router.manifest.to_json().decode(), filter, depth, run.retrieve.batch, questions, own_ids]
    calls = [json.dumps([weight, number]) for weight in weights for number in range(len(batches))]
    results = map(json.loads, result_store.map(inputs, calls, lambda calls: map(gold_ranks, calls)))
    rows = []
    for count, weight in enumerate(weights, 1):
        ranks_Q = np.concatenate([next(results) for _ in batches])
        top1, top5, top20 = (float(np.mean(hit_within(ranks_Q, k))) for k in (1, 5, DEPTH))
        rows.append(WeightAccuracy(weight, top1, top5, top20, float(np.mean(reciprocal_ranks(ranks_Q, DEPTH)))))
        progress("weights", count, len(weights))
    return rows


def best_weight(rows: Sequence[WeightAccuracy]) -> WeightAccuracy:
    """Return the best weight; ties go to the dense score alone, then to the smallest weight."""
    return max(rows, key=lambda row: (row.top1, row.mrr, row.weight is None, -_as_number(row.weight)))


def _as_number(weight: HybridWeight | None) -> float:
    return float("inf") if isinstance(weight, str) else weight or 0.0
