"""Computes the score of every view of a passage for some questions, and the part of the text behind each view.

Like `service`, a plain function over a router: no HTTP and no Ray in here.

Shapes: Q queries, D dimension, N views of one passage.
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import numpy as np

from mvr_ray.core.encoding.snippets import TITLE
from mvr_ray.core.searching.hybrid import hybrid_scores
from mvr_ray.deadline import Deadline
from mvr_ray.errors import UnknownPassageError
from mvr_ray.explanation import ExplainedPassage, ExplainedView, Explanation, Winner
from mvr_ray.serving.admission import in_time
from mvr_ray.serving.schemas import ExplainRequest, RequestError
from mvr_ray.types import FloatArray, Hit, HybridQueries, HybridWeight, Passage, PassageScores

if TYPE_CHECKING:
    from mvr_ray.distributed.router import Router

RankedScores = dict[str, tuple[int, float]]
"""By passage id, the rank of a question's hit, counted from 1, and its score."""


def explain(
    router: "Router", request: ExplainRequest, deadline: Deadline, hybrid: HybridWeight | None = None
) -> Explanation:
    """Explain the passages of a checked request, or the questions' best hits: the first of every question, then the
    second, and so on. Every view is scored with every question; with `hybrid` the words, too.

    Raises RequestError for a passage that the index does not hold, and past the deadline.
    """
    queries_QD = router.embed(request.questions)
    hits: list[list[Hit]] = [[] for _ in request.questions]
    if not request.passages:
        words = None if hybrid is None else HybridQueries(tuple(request.questions), hybrid)
        hits = router.search(queries_QD, request.k, deadline=deadline, hybrid=words).hits
    hits_Q: list[RankedScores] = [
        {hit.passage_id: (rank, hit.score) for rank, hit in enumerate(own, 1)} for own in hits
    ]
    by_rank = (hit.passage_id for of_rank in zip_longest(*hits) for hit in of_rank if hit)
    passage_ids = list(dict.fromkeys(request.passages or by_rank))
    try:
        all_scores = router.explain(queries_QD, passage_ids, deadline)
    except UnknownPassageError as error:
        field = f"passages.{request.passages.index(error.passage_id)}"
        message, _, hint = str(error).partition("; ")
        raise RequestError(404, "unknown_passage", field, message, hint) from None
    passages = router.passages(passage_ids)
    lexical = {} if hybrid is None else router.lexical_scores(request.questions, list(passages.values()))
    explanations = []
    for scores in in_time(all_scores, deadline):
        passage, num_views = passages[scores.passage_id], router.num_views
        spans = router.view_spans(passage)
        views = [
            _view(passage, number, scores_Q, spans, num_views)
            for number, scores_Q in zip(scores.view_numbers_N.tolist(), scores.scores_QN.T.tolist())
        ]
        winners = _winners(scores, hits_Q, lexical.get(passage.id), hybrid)
        explanations.append(
            ExplainedPassage(id=passage.id, title=passage.title, text=passage.text, views=views, winners=winners)
        )
    return Explanation(
        index=router.manifest.index,
        version=router.manifest.version,
        encoder_fingerprint=router.manifest.encoder_fingerprint,
        num_views=router.num_views,
        questions=list(request.questions),
        hybrid=hybrid,
        passages=explanations,
    )


def _winners(
    scores: PassageScores, hits_Q: list[RankedScores], lexical_Q: FloatArray | None, hybrid: HybridWeight | None
) -> list[Winner]:
    """Return the best view for each question. With `hybrid` it has the BM25 score, and the total: for reciprocal ranks,
    if the passage is among the question's hits."""
    columns_Q = np.searchsorted(scores.view_numbers_N, scores.winner_Q)
    dense_Q = scores.scores_QN[np.arange(len(columns_Q)), columns_Q]
    hits = [hits.get(scores.passage_id, (None, None)) for hits in hits_Q]
    totals: list[float | None] = [score for _, score in hits]
    if lexical_Q is not None and isinstance(hybrid, int | float):
        totals = hybrid_scores(lexical_Q, dense_Q, hybrid).tolist()
    lexical = [None] * len(hits) if lexical_Q is None else lexical_Q.tolist()
    return [
        Winner(view=view, score=score, rank=rank, lexical=words, total=None if words is None else total)
        for view, score, (rank, _), words, total in zip(
            scores.winner_Q.tolist(), dense_Q.tolist(), hits, lexical, totals
        )
    ]


def _view(
    passage: Passage, number: int, scores: list[float], spans: Sequence[tuple[int, int] | None], num_views: int
) -> ExplainedView:
    if number >= num_views:
        return ExplainedView(view=number, kind="feedback", scores=scores)
    span = spans[number]
    if span == TITLE:
        return ExplainedView(view=number, kind="title", text=passage.title, scores=scores)
    if span is None and any(spans[:number]):  # `empty_snippets: kept`: a viewer after the last snippet
        span = len(passage.text), len(passage.text)
    if span is None:
        return ExplainedView(view=number, kind="passage", scores=scores)
    start, stop = span
    return ExplainedView(
        view=number, kind="snippet", start=start, stop=stop, text=passage.text[start:stop], scores=scores
    )
