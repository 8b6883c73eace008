"""Measure the views of an index version: each alone, all together, their differences, and the winning view.

    each view alone     the same questions over an index of that view only (CAMVR table 2)
    answer_view/top-k   share of questions for which one of the first k hits was matched by a snippet that holds an
                        answer (CAMVR eq. 15 and table 4); `answer/top-k` of all views is the paper's "overall"
    LV, PPL             margin of the best view, and the number of views that a passage's questions use (MVR table 6)
    gold answer view    how often, in the gold passage, the view of the answer's snippet wins (ours)
    attention           KL divergence between what two views read (CAMVR eq. 14 and table 3)
    examples            scores of every view of a passage with two questions (CAMVR figure 4, MVR table 7)

The last four use questions with their own passages. Ray tasks search the shards, one view after the other.

Shapes: Q questions, V views, P passages, D dimension, T tokens.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from mvr_ray.config import EvaluateConfig, RunConfig
from mvr_ray.core.encoding.encoder import DualEncoder
from mvr_ray.core.encoding.snippets import TITLE, Span, snippet_spans, snippet_text
from mvr_ray.core.judging import metrics
from mvr_ray.core.judging.answers import AnswerMatcher, refuse_empty_answers
from mvr_ray.core.judging.attention import attention_kl, attention_kl_table, mean_attention_kl, view_attention
from mvr_ray.core.threads import torch_threads
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.tasks import run_tasks, share
from mvr_ray.distributed.encoders import open_encoder
from mvr_ray.distributed.evaluate import (
    HOW_TO_ADD_QUESTIONS,
    EvaluationRow,
    SystemResult,
    hit_marks,
    judge_hits,
    mean_row,
    most_ids,
    search_depth,
    system_result,
    with_marks,
)
from mvr_ray.distributed.indexing.shards import shard_embeddings
from mvr_ray.distributed.result_store import ResultStore
from mvr_ray.distributed.retrieve import checked_filter
from mvr_ray.distributed.searching.masks import VersionMasks
from mvr_ray.distributed.searching.merged_results import MergedResults, shard_starts
from mvr_ray.distributed.searching.messages import ShardResult
from mvr_ray.distributed.searching.searcher import as_result
from mvr_ray.errors import ConfigError, MissingInputError
from mvr_ray.index.flat import FlatIndex
from mvr_ray.store import manifest as manifests
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.embeddings import Views
from mvr_ray.store.files import Store
from mvr_ray.store.filters import parse_filter
from mvr_ray.store.formats.question_ranks import QuestionRanks
from mvr_ray.store.formats.question_views import QuestionViews
from mvr_ray.store.formats.rankings import RankedQuestion
from mvr_ray.store.manifest import Manifest, ShardEntry
from mvr_ray.store.questions import articles_of, own_passages, read_questions
from mvr_ray.types import EmbeddingBlock, FloatArray, Hit, IntArray, Passage, Progress, Question, no_progress

ALL_VIEWS = "all views"
ANSWER_VIEW = "answer view"
"""The system of the ranks of the first hits that were matched by a snippet with the answer."""
EXAMPLES = 2
"""Number of passages shown, with two questions each."""
QUESTIONS_AT_ONCE = 2048
"""Of their hits, 100 a view and shard, this process holds 14 bytes each: 1.6 GB over 64 shards and 8 views."""

Spans = Sequence[Span | None]
"""The snippet of each view of a passage, None where it has none."""


class ViewExample(NamedTuple):
    """One of two questions of a passage whose answers are in different snippets.

    `answer_view` counts from 0; where views read the whole passage it is the snippet of CAMVR's splitting. `scores` are
    raw inner products by view, None where the passage lacks the view.
    """

    passage_id: str
    title: str
    question: str
    answer_view: int
    scores: list[float | None]


class ViewReport(NamedTuple):
    """`rows` hold retrieval by all views and by each alone. `ranks` hold the ranks of the same systems for every
    question, and those of the answer's view, and `values` the measures of every question.

    The other values are None if there is only one view.

    questions_per_passage  mean number of analysed questions a passage: an upper bound of PPL
    lv                     MVR eq. 9
    ppl                    MVR eq. 10 as the mean over passages of exp(entropy), near-ties assigned to the lowest view
    ppl_of_mean_entropy    MVR eq. 10 as exp of the passages' mean entropy
    ppl_answer             `ppl` if the view of the answer's snippet always won
    view_pair_cosine       near 1: collapsed
    win_shares             share of questions for which each view is the best of their own passage
    gold_answer_view_share share of questions for which it is the view of the answer's snippet (ours)
    attention_kl           mean of the table below over the pairs i < j
    attention_kl_table     [V][V], D(i, j) = KL(view j || view i) of CAMVR eq. 14
    attention_passages     number of passages over which it is the mean
    examples               passages with two questions whose answers are in different snippets, a question each
    """

    index: str
    version: int
    encoder_fingerprint: str
    questions: str
    num_questions: int
    questions_per_passage: float
    lv: float | None
    ppl: float | None
    ppl_of_mean_entropy: float | None
    ppl_answer: float | None
    view_pair_cosine: float | None
    gold_answer_view_share: float | None
    attention_kl: float | None
    win_shares: list[float]
    attention_kl_table: list[list[float | None]]
    attention_passages: int
    examples: list[ViewExample]
    rows: list[EvaluationRow]
    ranks: list[QuestionRanks]
    values: list[QuestionViews]


class AnalyzedQuestions(NamedTuple):
    """Questions, their vectors, and each one's own passage as stored: missing views are zero, feedback views, which are
    not part of the passage, are left out."""

    questions: Sequence[Question]
    queries_QD: FloatArray
    views_QVD: FloatArray
    mask_QV: np.ndarray

    @property
    def wins_Q(self) -> IntArray:
        return metrics.winning_views(
            metrics.relative_scores(self.queries_QD, self.views_QVD, self.mask_QV), self.mask_QV
        )


class _JudgedHits(NamedTuple):
    """The hits of all questions by view (`num_views`: all views), and the ranks of `_answer_view_ranks`."""

    by_view: dict[int, list[RankedQuestion]]
    answer_view_ranks: dict[str, int]


def analyze(run: RunConfig, progress: Progress = no_progress) -> ViewReport:
    """Measure the views of the live version with one set of gold-labelled questions; with `retrieve.filter` the hits
    are those that pass.

    Raises ConfigError where no set is configured or for a filter that does not fit, MissingInputError where no question
    has a passage in the index, DataError for an answer that `retrieve.strict_answers` refuses.
    """
    settings, store = run.analyze, Store(run.store.path)
    name = settings.questions or next(iter(run.evaluate.questions), None)
    if name is None:
        raise ConfigError(
            f"analyze.questions names no question set, and evaluate.questions is empty. {HOW_TO_ADD_QUESTIONS}"
        )
    manifest = manifests.read(store, run.index.name)
    passages = Corpus.open(store, manifest.corpus, manifest.corpus_digest)
    questions, gold = _gold_questions(passages, name, settings.max_questions)
    if not questions:
        raise MissingInputError(f"no question of {name!r} has its passage in index {manifest.index!r}; name another")
    if run.retrieve.strict_answers:
        refuse_empty_answers(questions, run.evaluate.match)
    ranking_filter = checked_filter(run, passages)
    filter_text = "" if ranking_filter is None else parse_filter(ranking_filter, passages.fields).text
    encoder_id = manifest.encoder_name, manifest.encoder_fingerprint
    encoder = open_encoder(store, *encoder_id, only_embeds=False)  # `view_attention` reads attention
    progress("embed questions", 0, len(questions))
    passage_ids = list(dict.fromkeys(question.positive_ids[0] for question in questions))
    own_ids = _evenly_spaced(passage_ids, settings.attention_passages)
    with torch_threads(run.resources.threads):
        queries_QD = encoder.embed_queries([question.text for question in questions])
        progress("embed questions", len(questions), len(questions))
        tables = _attention_tables(encoder, [gold[i] for i in own_ids]) if manifest.num_views > 1 else {}
    need = session.Need("analyzers", 1, run.resources.cpus_per_encoder)
    with session.connect(run.resources, manifest.num_passages, [need]):
        hits = _judge_views(run, manifest, passages, encoder, questions, queries_QD, filter_text, progress)
        gold_views = _stored_views(run, manifest, passage_ids, progress)
    article_of = articles_of(questions, passages)
    systems: list[SystemResult] = []
    for view, results in hits.by_view.items():
        system = ALL_VIEWS if view == manifest.num_views else f"view {view}"
        systems.append(system_result(system, name, results, article_of, run.evaluate))
        if view == manifest.num_views and encoder.spec.has_snippets:
            all_views, ranks = systems[-1].ranks, hits.answer_view_ranks
            systems.append(_answer_view_result(ranks, all_views, article_of, run.evaluate))
    own = _gather_own_views(questions, queries_QD, gold_views, manifest)
    spans = {i: _spans(encoder, passage) for i, passage in gold.items()}
    answer_Q = np.array([_answer_view(question, spans[question.positive_ids[0]]) for question in questions])
    known_Q = answer_Q if encoder.spec.has_snippets else np.full(len(questions), -1)
    table_VV = attention_kl_table(list(tables.values())) if tables else np.empty((0, 0))
    return ViewReport(
        manifest.index,
        manifest.version,
        manifest.encoder_fingerprint,
        name,
        len(questions),
        attention_kl=mean_attention_kl(table_VV),
        attention_kl_table=[[_none_if_nan(value) for value in row] for row in table_VV],
        attention_passages=len(tables),
        examples=_examples(own, answer_Q, gold, spans) if manifest.num_views > 1 else [],
        rows=[row for system in systems for row in system.rows],
        ranks=[system.ranks for system in systems],
        values=_question_values(own, article_of, known_Q, tables),
        **_view_values(own, known_Q),
    )


def _judge_views(
    run: RunConfig,
    manifest: Manifest,
    corpus: Corpus,
    encoder: DualEncoder,
    questions: Sequence[Question],
    queries_QD: FloatArray,
    filter_text: str,
    progress: Progress,
) -> _JudgedHits:
    """Search by each view alone and by all, and judge the hits; continues after the results of a run that stopped."""
    store, cpus = corpus.store, run.resources.cpus_per_encoder
    own_ids = own_passages(questions, corpus, run.prepare.sources)
    depth = search_depth(run.evaluate) + most_ids(own_ids)
    views = list(range(manifest.num_views + 1)) if manifest.num_views > 1 else [1]
    matcher = AnswerMatcher(run.evaluate.match)
    entries = [entry for entry in manifest.shards if entry.num_passages]
    manifest_ref, start_of = share(manifest), shard_starts(manifest.shards)
    blocks = {
        start: questions[start : start + QUESTIONS_AT_ONCE] for start in range(0, len(questions), QUESTIONS_AT_ONCE)
    }

    def judge(batches: Sequence[str]) -> Iterator[str]:
        for start in (json.loads(batch)[0] for batch in batches):
            block, block_ref = blocks[start], share(queries_QD[start : start + QUESTIONS_AT_ONCE])
            calls = [(store.address, manifest_ref, entry, block_ref, depth, filter_text) for entry in entries]
            shards = run_tasks(_search_shard, calls, "analyzing views", "analyze views", progress, cpus=cpus)
            marks: list[list[Any]] = []
            answer_view_ranks: dict[str, int] = {}
            for view in views:
                merged_hits = MergedResults([shard[view] for shard in shards], start_of, depth).hits()
                hit_lists = [
                    [hit for hit in hits if hit.passage_id not in own_ids.get(question.id, ())]
                    for question, hits in zip(block, merged_hits, strict=True)
                ]
                results = judge_hits(block, hit_lists, corpus, matcher)
                marks.append([hit_marks(row) for row in results])
                if view == manifest.num_views and encoder.spec.has_snippets:
                    answer_view_ranks = _answer_view_ranks(results, hit_lists, corpus, encoder, run.evaluate)
            yield json.dumps([marks, answer_view_ranks])

    hits = _JudgedHits({view: [] for view in views}, {})
    inputs = ["analyze", manifest.to_json().decode(), depth, filter_text, run.evaluate.match, max(run.evaluate.k)]
    batches = [
        json.dumps([start, block, [sorted(own_ids.get(question.id, ())) for question in block]])
        for start, block in blocks.items()
    ]
    with ResultStore(store, manifest.index) as result_store:
        for block, result in zip(blocks.values(), result_store.map(inputs, batches, judge)):
            marks, answer_view_ranks = json.loads(result)
            for view, marks_Q in zip(views, marks):
                hits.by_view[view].extend(map(with_marks, block, marks_Q))
            hits.answer_view_ranks.update(answer_view_ranks)
            progress("judge views", len(hits.by_view[views[0]]), len(questions))
    return hits


def _stored_views(
    run: RunConfig, manifest: Manifest, passage_ids: Sequence[str], progress: Progress
) -> dict[str, Views]:
    """Read the views of passages by id."""
    address, ids_ref = Store(run.store.path).address, share(passage_ids)
    calls = [(address, manifest.index, entry, ids_ref) for entry in manifest.shards if entry.num_passages]
    shards = run_tasks(
        _find_views, calls, "analyzing views", "read views", progress, cpus=run.resources.cpus_per_encoder
    )
    return {passage_id: views for shard in shards for passage_id, views in shard.items()}


def _gold_questions(passages: Corpus, name: str, limit: int) -> tuple[list[Question], dict[str, Passage]]:
    """Read at most `limit` questions of a set whose own passage, the first positive, is in the corpus, and these
    passages by id."""
    questions = [question for question in read_questions(passages, name) if question.positive_ids]
    questions = _of_whole_passages(questions, limit)
    gold = passages.get(question.positive_ids[0] for question in questions)
    return [question for question in questions if question.positive_ids[0] in gold], gold


def _of_whole_passages(questions: Sequence[Question], limit: int) -> list[Question]:
    """Select at most `limit` questions, 0 all of them: those of passages at equal distances, since PPL counts the views
    that all questions of a passage use."""
    if not limit or len(questions) <= limit:
        return list(questions)
    ids = list(dict.fromkeys(question.positive_ids[0] for question in questions))
    selection = set(_evenly_spaced(ids, max(1, len(ids) * limit // len(questions))))
    return [question for question in questions if question.positive_ids[0] in selection][:limit]


def _evenly_spaced(ids: Sequence[str], limit: int) -> list[str]:
    """Select at most `limit` ids at equal distances: the first ones would be of few articles, as those of one article
    stand together."""
    return [ids[number * len(ids) // limit] for number in range(limit)] if len(ids) > limit else list(ids)


def _question_values(
    own: AnalyzedQuestions, article_of: Mapping[str, str], answer_Q: IntArray, tables: Mapping[str, FloatArray]
) -> list[QuestionViews]:
    """Measure every question. `tables` has the attention divergences of the measured passages."""
    if own.mask_QV.shape[1] == 1:
        return []
    lv_Q = metrics.question_lv(own.queries_QD, own.views_QVD, own.mask_QV)
    divergence_of = {passage: mean_attention_kl(table_VV) for passage, table_VV in tables.items()}
    return [
        QuestionViews(
            question.id,
            article_of[question.id],
            question.positive_ids[0],
            _none_if_nan(lv),
            bool(win == answer) if answer >= 0 else None,
            divergence_of.get(question.positive_ids[0]),
        )
        for question, lv, win, answer in zip(own.questions, lv_Q, own.wins_Q, answer_Q, strict=True)
    ]


def _none_if_nan(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _answer_view_ranks(
    results: Sequence[RankedQuestion],
    hit_lists: Sequence[Sequence[Hit]],
    passages: Corpus,
    encoder: DualEncoder,
    settings: EvaluateConfig,
) -> dict[str, int]:
    """Map the id of each question with answers to the rank of the first hit whose matched snippet holds one, else -1.

    The matched snippet is that of the hit's best view. It counts only if the passage counts, so titles hold no answer,
    and a feedback view, which is not part of the passage, matches no snippet.
    """
    matcher, depth = AnswerMatcher(settings.match), max(settings.k)
    spans: dict[str, Spans] = {}

    def holds(question: Question, hit: Hit) -> bool:
        passage = passages.get([hit.passage_id])[hit.passage_id]
        if passage.id not in spans:
            spans[passage.id] = encoder.view_spans(passage)
        span = spans[passage.id][hit.view] if 0 <= hit.view < encoder.num_views else None
        if span is None or span == TITLE:
            return False
        return matcher.has_answer(snippet_text(passage, span), question.answers)

    ranks: dict[str, int] = {}
    for row, hits in zip(results, hit_lists, strict=True):
        if row.question.answers:
            pairs = enumerate(zip(row.passages, hits[:depth]))
            matches = (rank for rank, (passage, hit) in pairs if passage.has_answer and holds(row.question, hit))
            ranks[row.question.id] = next(matches, -1)
    return ranks


def _answer_view_result(
    rank_of: Mapping[str, int], all_views: QuestionRanks, article_of: Mapping[str, str], settings: EvaluateConfig
) -> SystemResult:
    """Return CAMVR eq. 15 as metrics of all views, and its ranks as a system of their own, beside the ranks of all
    views."""
    name, articles, ranks_Q = all_views.questions, [article_of[i] for i in rank_of], np.array(list(rank_of.values()))
    rows = [
        mean_row(ALL_VIEWS, name, f"answer_view/top-{k}", metrics.hit_within(ranks_Q, k), articles, settings)
        for k in (sorted(set(settings.k)) if rank_of else ())
    ]
    ranks = [rank_of.get(question_id) for question_id in all_views.question_ids]
    no_gold = {"gold_ranks": [None] * len(ranks), "gold_ndcgs": ()}
    return SystemResult(rows, all_views._replace(system=ANSWER_VIEW, answer_ranks=ranks, **no_gold))


def _attention_tables(encoder: DualEncoder, passages: Sequence[Passage]) -> dict[str, FloatArray]:
    """Compute the table of divergences of each passage that the encoder reads in one piece, by passage id."""
    if encoder.spec.has_pieces:
        return {}
    tokens = zip(passages, encoder.tokenize_passages(passages))
    whole_passages = {passage.id: own for passage, own in tokens if len(encoder.rows(own)) == 1}
    attention = view_attention(encoder, list(whole_passages.values()))
    return {passage_id: attention_kl(own) for passage_id, own in zip(whole_passages, attention)}


def _spans(encoder: DualEncoder, passage: Passage) -> Spans:
    """Return the snippet of each view; where views read the whole passage, the snippets of CAMVR's splitting."""
    if encoder.spec.has_snippets:
        return encoder.view_spans(passage)
    return snippet_spans(passage.text, encoder.num_views, encoder.splitter)


def _examples(
    own: AnalyzedQuestions, answer_Q: IntArray, passages: Mapping[str, Passage], spans: Mapping[str, Spans]
) -> list[ViewExample]:
    """Select passages with two questions answered in different snippets: those of most snippets first, then by id."""
    pairs: dict[str, list[int]] = {}
    for number, (question, view) in enumerate(zip(own.questions, answer_Q.tolist())):
        pair = pairs.setdefault(question.positive_ids[0], [])
        if view >= 0 and len(pair) < 2 and view not in answer_Q[pair]:
            pair.append(number)
    several = [i for i, pair in pairs.items() if len(pair) == 2]
    several.sort(key=lambda i: (-sum(span is not None for span in spans[i]), i))
    examples: list[ViewExample] = []
    for number in (number for i in several[:EXAMPLES] for number in pairs[i]):
        question, passage = own.questions[number], passages[own.questions[number].positive_ids[0]]
        scores_V = own.views_QVD[number].astype(np.float64) @ own.queries_QD[number].astype(np.float64)
        scores = [float(score) if present else None for score, present in zip(scores_V, own.mask_QV[number])]
        examples.append(ViewExample(passage.id, passage.title, question.text, int(answer_Q[number]), scores))
    return examples


def _view_values(own: AnalyzedQuestions, answer_Q: IntArray) -> dict[str, Any]:
    """Compute the values of a ViewReport that need no text. `answer_Q` is -1 where no view holds the answer."""
    questions, wins_Q = own.questions, own.wins_Q
    number: dict[str, int] = {}
    passage_Q = np.array([number.setdefault(question.positive_ids[0], len(number)) for question in questions])
    known_Q = answer_Q >= 0
    first_P = np.unique(passage_Q, return_index=True)[1]
    several = own.mask_QV.shape[1] > 1
    return {
        "questions_per_passage": len(questions) / len(number),
        "lv": metrics.lv(own.queries_QD, own.views_QVD, own.mask_QV),
        "ppl": metrics.ppl(wins_Q, passage_Q) if several else None,
        "ppl_of_mean_entropy": metrics.ppl_of_mean_entropy(wins_Q, passage_Q) if several else None,
        "ppl_answer": metrics.ppl(answer_Q[known_Q], passage_Q[known_Q]) if known_Q.any() and several else None,
        "view_pair_cosine": metrics.view_pair_cosine(own.views_QVD[first_P], own.mask_QV[first_P]),
        "gold_answer_view_share": metrics.gold_answer_view_share(wins_Q, answer_Q) if several else None,
        "win_shares": (np.bincount(wins_Q, minlength=own.mask_QV.shape[1]) / len(wins_Q)).tolist(),
    }


def _answer_view(question: Question, spans: Spans) -> int:
    """Return the view whose snippet holds the first character of the question's answer, -1 where none does."""
    start = next((start for start in question.answer_starts if start >= 0), -1)
    return next((view for view, span in enumerate(spans) if span and span[0] <= start < span[1]), -1)


def _search_shard(
    root: str, manifest: Manifest, entry: ShardEntry, queries_QD: FloatArray, k: int, filter: str
) -> list[ShardResult]:
    """Search a shard by each view alone, and by all views."""
    blocks = shard_embeddings(Store(root), manifest.index, entry).blocks()
    ids = pa.array([passage_id for block in blocks for passage_id in block.ids], pa.string())
    mask_P = VersionMasks(root, manifest).mask(entry.shard, ids, filter) if filter else None
    by_view = ([of_view(block, view) for block in blocks] for view in range(manifest.num_views))  # together a copy
    searches = (FlatIndex(own).search_with_counts(queries_QD, k, mask_P) for own in itertools.chain(by_view, [blocks]))
    return [as_result(entry.shard, hits, ids) for hits in searches]


def _find_views(root: str, index: str, entry: ShardEntry, ids: Sequence[str]) -> dict[str, Views]:
    return shard_embeddings(Store(root), index, entry).find(ids)


def of_view(block: EmbeddingBlock, view: int) -> EmbeddingBlock:
    """Leave this view alone of each passage, or nothing."""
    kept_N = np.flatnonzero(block.view_numbers_N == view)
    starts_P = np.searchsorted(kept_N, block.row_ptr)
    return EmbeddingBlock(block.ids, starts_P, block.view_numbers_N[kept_N], block.vectors_ND[kept_N])


def _gather_own_views(
    questions: Sequence[Question], queries_QD: FloatArray, stored_views: Mapping[str, Views], manifest: Manifest
) -> AnalyzedQuestions:
    views_QVD = np.zeros((len(questions), manifest.num_views, manifest.dimension), np.float32)
    mask_QV = np.zeros(views_QVD.shape[:2], bool)
    for number, question in enumerate(questions):
        view_numbers_N, vectors_ND = stored_views[question.positive_ids[0]]
        own_N = view_numbers_N < manifest.num_views
        views_QVD[number, view_numbers_N[own_N]] = vectors_ND[own_N]
        mask_QV[number, view_numbers_N[own_N]] = True
    return AnalyzedQuestions(questions, queries_QD, views_QVD, mask_QV)
