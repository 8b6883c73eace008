"""What the views of an index version are worth: each alone and all together, how they differ, and who wins.

    each view alone     the same questions over an index of that view only (CAMVR table 2)
    LV, PPL             how far the best view stands out, and how many views a passage's questions use (MVR table 6)
    answer view         how often the view of the snippet with the answer wins (CAMVR eq. 15)
    attention           KL divergence between what two views read (CAMVR eq. 14)

The last three look at questions with their own passages. Shards are searched as Ray tasks, one view after the other.

Shapes: Q questions, V views, P passages, D dimension, T tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import ray

from mvr_ray.config import RunConfig
from mvr_ray.core import metrics
from mvr_ray.core.attention import attention_kl_table, view_attention
from mvr_ray.core.encoder import DualEncoder
from mvr_ray.core.scoring import ShardAnswer, merge_hits, score_blocks
from mvr_ray.core.searching.exact import distinct
from mvr_ray.distributed import session
from mvr_ray.distributed.encoders import open_encoder
from mvr_ray.distributed.evaluate import EvaluationRow, judged, system_result
from mvr_ray.distributed.failures import own_errors
from mvr_ray.errors import ConfigError, MissingInputError
from mvr_ray.store import corpus, manifest
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.manifest import Manifest
from mvr_ray.store.overlay import open_embeddings
from mvr_ray.types import EmbeddingBlock, FloatArray, IntArray, Progress, Question, no_progress

ALL_VIEWS = "all views"


class ViewReport(NamedTuple):
    """`rows` hold retrieval by all views and by each alone. The other values are None where there is one view only.

    lv, ppl              MVR eq. 9 and perplexity, near-ties sent to the lowest view
    ppl_answer           the perplexity if the view of the answer's snippet always won
    view_pair_cosine     near 1: collapsed
    win_shares           how often each view is the best of the question's own passage
    answer_view_accuracy CAMVR eq. 15
    attention_kl         mean of the table below, off its diagonal
    attention_kl_table   [V][V], CAMVR eq. 14
    """

    index: str
    version: int
    encoder_fingerprint: str
    questions: str
    num_questions: int
    lv: float | None
    ppl: float | None
    ppl_answer: float | None
    view_pair_cosine: float | None
    answer_view_accuracy: float | None
    attention_kl: float | None
    win_shares: list[float]
    attention_kl_table: list[list[float | None]]
    rows: list[EvaluationRow]


class OwnViews(NamedTuple):
    """Each question's own passage as stored, missing views zero."""

    views_QVD: FloatArray
    mask_QV: np.ndarray


class _ShardViews(NamedTuple):
    """What a shard gave: hits by view (`num_views` stands for all), and some of its passages as they are stored."""

    found: list[ShardAnswer]
    own: EmbeddingBlock


def analyze(run: RunConfig, progress: Progress = no_progress, version: int | None = None) -> ViewReport:
    """Look at the views of a version (the live one when none is named) with one set of gold-labelled questions.

    Raises ConfigError where no set is named, MissingInputError where no question has a passage in the index.
    """
    settings, store = run.analyze, Store(run.store.path)
    name = settings.questions or next(iter(run.evaluate.questions), None)
    if name is None:
        raise ConfigError("analyze.questions names no question set, and evaluate.questions is empty; name one")
    described = manifest.read(store, run.index.name, version)
    passages = Corpus.open(store, described.corpus)
    asked = [question for question in corpus.read_questions(store, name) if question.positive_ids]
    asked = asked[: settings.max_questions or None]
    there = passages.get(question.positive_ids[0] for question in asked)
    asked = [question for question in asked if question.positive_ids[0] in there]
    if not asked:
        raise MissingInputError(f"no question of {name!r} has its passage in index {described.index!r}; name another")
    encoder = open_encoder(
        store, described.encoder_name, described.encoder_fingerprint, threads=run.resources.torch_threads
    )
    queries_QD = encoder.embed_queries([question.text for question in asked])
    shards = _search(run, store, described, queries_QD, [q.positive_ids[0] for q in asked], progress)
    rows: list[EvaluationRow] = []
    for view in range(described.num_views + 1) if described.num_views > 1 else [1]:
        merged = merge_hits([shard.found[view] for shard in shards], max(run.evaluate.k))
        said = ALL_VIEWS if view == described.num_views else f"view {view + 1}"
        found = judged(asked, merged, passages, run.evaluate.match)
        result = system_result(said, name, found, passages, run.evaluate)
        rows += result.rows
    own = _own_views(asked, shards, described)
    told = _view_values(asked, own, queries_QD, encoder, passages)
    table_VV = np.empty((0, 0))
    if described.num_views > 1 and not encoder.spec.has_pieces:
        shown = list(dict.fromkeys(question.positive_ids[0] for question in asked))[: settings.attention_passages]
        read = view_attention(encoder, encoder.tokenize_passages([there[passage] for passage in shown]))
        table_VV = attention_kl_table(read)
    apart = table_VV[~np.eye(len(table_VV), dtype=bool)]
    return ViewReport(
        described.index,
        described.version,
        described.encoder_fingerprint,
        name,
        len(asked),
        attention_kl=float(np.nanmean(apart)) if np.isfinite(apart).any() else None,
        attention_kl_table=[[None if np.isnan(value) else float(value) for value in row] for row in table_VV],
        rows=rows,
        **told,
    )


def _view_values(
    asked: Sequence[Question], own: OwnViews, queries_QD: FloatArray, encoder: DualEncoder, passages: Corpus
) -> dict[str, Any]:
    scores_QV = np.einsum("qd,qvd->qv", _unit(queries_QD), _unit(own.views_QVD))
    wins_Q = metrics.winning_views(scores_QV, own.mask_QV)
    number: dict[str, int] = {}
    passage_Q = np.array([number.setdefault(question.positive_ids[0], len(number)) for question in asked])
    answer_Q = np.full(len(asked), -1)
    if encoder.spec.has_snippets:
        there = passages.get(number)
        spans = {i: encoder.view_spans(passage) for i, passage in there.items()}
        answer_Q = np.array([_answer_view(question, spans[question.positive_ids[0]]) for question in asked])
    known_Q = answer_Q >= 0
    first_P = np.unique(passage_Q, return_index=True)[1]
    several = own.mask_QV.shape[1] > 1
    return {
        "lv": metrics.lv(queries_QD, own.views_QVD, own.mask_QV),
        "ppl": metrics.ppl(wins_Q, passage_Q) if several else None,
        "ppl_answer": metrics.ppl(answer_Q[known_Q], passage_Q[known_Q]) if known_Q.any() and several else None,
        "view_pair_cosine": metrics.view_pair_cosine(own.views_QVD[first_P], own.mask_QV[first_P]),
        "answer_view_accuracy": metrics.answer_view_accuracy(wins_Q, answer_Q) if several else None,
        "win_shares": (np.bincount(wins_Q, minlength=own.mask_QV.shape[1]) / len(wins_Q)).tolist(),
    }


def _answer_view(question: Question, spans: Sequence[tuple[int, int] | None]) -> int:
    start = next((start for start in question.answer_starts if start >= 0), -1)
    return next((view for view, span in enumerate(spans) if span and span[0] <= start < span[1]), -1)


def _search(
    run: RunConfig,
    store: Store,
    described: Manifest,
    queries_QD: FloatArray,
    wanted: Sequence[str],
    progress: Progress,
) -> list[_ShardViews]:
    with session.connect(run.resources) as info:
        session.require(info, [session.Need("analyzers", 1, run.resources.cpus_per_encoder)])
        task: Any = ray.remote(_analyze_shard).options(num_cpus=run.resources.cpus_per_encoder)
        shipped, ids = ray.put(queries_QD), ray.put(sorted(set(wanted)))
        waiting: list[Any] = [
            task.remote(store.address, described, entry.shard, shipped, ids, max(run.evaluate.k))
            for entry in described.shards
            if entry.num_passages
        ]
        done: list[_ShardViews] = []
        with own_errors("analyzing views"):
            for reference in waiting:
                done.append(ray.get(reference))
                progress("analyze views", len(done), len(waiting))
    return done


def _analyze_shard(
    root: str, described: Manifest, shard: int, queries_QD: FloatArray, wanted: Sequence[str], k: int
) -> _ShardViews:
    entry = next(entry for entry in described.shards if entry.shard == shard)
    folder = manifest.open_shard(Store(root), described.index, entry)
    blocks = open_embeddings(folder, entry.files).blocks()
    found: list[ShardAnswer] = []
    for view in range(described.num_views):
        kept = [own for block in blocks if (own := of_view(block, view)).ids]
        found.append(_found(shard, kept, queries_QD, k))
    found.append(_found(shard, blocks, queries_QD, k))
    return _ShardViews(found, _passages_of(blocks, set(wanted), described.dimension))


def _found(shard: int, blocks: Sequence[EmbeddingBlock], queries_QD: FloatArray, k: int) -> ShardAnswer:
    ids = [passage_id for block in blocks for passage_id in block.ids]
    hits = score_blocks(queries_QD, blocks, k) if blocks else None
    if hits is None:
        empty = EmbeddingBlock([], np.zeros(1, np.int64), np.zeros(0, np.int16), np.zeros((0, queries_QD.shape[1])))
        hits = score_blocks(queries_QD, [empty], k)
    rows = distinct(hits.rows_QK)
    return shard, {row: ids[row] for row in rows[rows >= 0].tolist()}, hits


def of_view(block: EmbeddingBlock, view: int) -> EmbeddingBlock:
    """The passages that have this view, with it alone."""
    kept_N = np.flatnonzero(block.view_numbers_N == view)
    rows = np.searchsorted(block.row_ptr, kept_N, side="right") - 1
    return EmbeddingBlock(
        [block.ids[row] for row in rows],
        np.arange(len(rows) + 1, dtype=np.int64),
        np.asarray(block.view_numbers_N)[kept_N],
        block.vectors_ND[kept_N],
    )


def _passages_of(blocks: Sequence[EmbeddingBlock], wanted: set[str], dimension: int) -> EmbeddingBlock:
    ids: list[str] = []
    counts: list[int] = []
    numbers: list[IntArray] = [np.zeros(0, np.int16)]
    vectors: list[FloatArray] = [np.zeros((0, dimension), np.float32)]
    for block in blocks:
        for row, passage_id in enumerate(block.ids):
            if passage_id in wanted:
                here = slice(int(block.row_ptr[row]), int(block.row_ptr[row + 1]))
                ids.append(passage_id)
                counts.append(here.stop - here.start)
                numbers.append(np.asarray(block.view_numbers_N[here]))
                vectors.append(block.vectors_ND[here].astype(np.float32))
    return EmbeddingBlock(ids, np.cumsum([0, *counts]), np.concatenate(numbers), np.concatenate(vectors))


def _own_views(asked: Sequence[Question], shards: Sequence[_ShardViews], described: Manifest) -> OwnViews:
    """Feedback views are left out: they are no part of the passage."""
    at = {passage_id: (shard.own, row) for shard in shards for row, passage_id in enumerate(shard.own.ids)}
    views_QVD = np.zeros((len(asked), described.num_views, described.dimension), np.float32)
    mask_QV = np.zeros(views_QVD.shape[:2], bool)
    for number, question in enumerate(asked):
        block, row = at[question.positive_ids[0]]
        for slot in range(int(block.row_ptr[row]), int(block.row_ptr[row + 1])):
            view = int(block.view_numbers_N[slot])
            if view < described.num_views:
                views_QVD[number, view] = block.vectors_ND[slot]
                mask_QV[number, view] = True
    return OwnViews(views_QVD, mask_QV)


def _unit(vectors: FloatArray) -> FloatArray:
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(norms > 0, norms, 1.0)
