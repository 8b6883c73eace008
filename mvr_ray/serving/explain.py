"""Computes the score of every view of a passage for some questions, and the part of the text behind each view.

Like `service`, a plain function over a router: no HTTP and no Ray in here.

Shapes: Q queries, D dimension, N views of one passage.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mvr_ray.config import ServeConfig
from mvr_ray.core.encoding.snippets import TITLE
from mvr_ray.core.searching.hybrid import hybrid_scores
from mvr_ray.errors import UnknownPassageError
from mvr_ray.explanation import ExplainedPassage, ExplainedView, Explanation, Winner
from mvr_ray.serving.schemas import ExplainRequest, RequestError
from mvr_ray.types import Answer, FloatArray, HybridQueries, HybridWeight, Passage, PassageScores

if TYPE_CHECKING:
    from mvr_ray.distributed.router import Router

Ranks = list[dict[str, int]]
"""For each question, the rank of its hits by passage id, counted from 1."""


def explain(
    router: "Router", request: ExplainRequest, limits: ServeConfig, hybrid: HybridWeight | None = None
) -> Explanation:
    """Explain the passages of the request, or the questions' best hits: every view with every question; with `hybrid`
    the words, too.

    Raises RequestError for what the limits forbid, and for a passage that the index does not hold.
    """
    request.check(limits)
    queries_QD = router.embed(request.questions)
    if request.passages:
        answer = router.search(queries_QD[:0], request.k)
    else:
        words = None if hybrid is None else HybridQueries(tuple(request.questions), hybrid)
        answer = router.search(queries_QD, request.k, hybrid=words)
    ranks: Ranks = [{hit.passage_id: rank for rank, hit in enumerate(hits, 1)} for hits in answer.hits]
    ranks = ranks or [{} for _ in request.questions]
    passage_ids = list(dict.fromkeys(request.passages)) or passages_by_rank(answer)
    try:
        all_scores = router.explain(queries_QD, passage_ids)
    except UnknownPassageError as error:
        field = f"passages.{request.passages.index(error.passage_id)}"
        message, _, hint = str(error).partition("; ")
        raise RequestError(404, "unknown_passage", field, message, hint) from None
    passages = router.passages(passage_ids)
    explanations = []
    lexical = {} if hybrid is None else router.lexical_scores(request.questions, list(passages.values()))
    for scores in all_scores:
        passage = passages[scores.passage_id]
        one = _explain_passage(passage, scores, ranks, router.view_spans(passage), router.num_views)
        if hybrid is not None:
            _add_lexical(one, lexical[passage.id], hybrid, answer)
        explanations.append(one)
    return Explanation(
        index=answer.index,
        version=answer.version,
        encoder_fingerprint=answer.encoder_fingerprint,
        num_views=router.num_views,
        questions=list(request.questions),
        hybrid=hybrid,
        passages=explanations,
    )


def passages_by_rank(answer: Answer) -> list[str]:
    """Return the hits of all questions, each passage once: the first of every question, then the second, and so on."""
    deepest = max((len(hits) for hits in answer.hits), default=0)
    return list(dict.fromkeys(hits[at].passage_id for at in range(deepest) for hits in answer.hits if at < len(hits)))


def _explain_passage(
    passage: Passage,
    scores: PassageScores,
    ranks: Ranks,
    spans: Sequence[tuple[int, int] | None],
    num_views: int,
) -> ExplainedPassage:
    numbers, scores_QN = scores.view_numbers_N.tolist(), scores.scores_QN
    views = [
        _view(passage, number, scores_QN[:, at].tolist(), spans[number] if number < num_views else None, num_views)
        for at, number in enumerate(numbers)
    ]
    winners = [
        Winner(view=view, score=float(scores_N[numbers.index(view)]), rank=rank_of.get(passage.id))
        for view, scores_N, rank_of in zip(scores.winner_Q.tolist(), scores_QN, ranks)
    ]
    return ExplainedPassage(id=passage.id, title=passage.title, text=passage.text, views=views, winners=winners)


def _add_lexical(passage: ExplainedPassage, scores: FloatArray, weight: HybridWeight, answer: Answer) -> None:
    """Add the BM25 score and the total to the best view's dense score, for each question. Reciprocal ranks have a total
    if the passage is among the question's hits."""
    totals: list[float | None]
    if isinstance(weight, str):
        hits = answer.hits or [[] for _ in passage.winners]
        totals = [next((hit.score for hit in own if hit.passage_id == passage.id), None) for own in hits]
    else:
        dense = np.array([winner.score for winner in passage.winners], np.float32)
        totals = hybrid_scores(scores, dense, weight).tolist()
    for winner, lexical, total in zip(passage.winners, scores.tolist(), totals):
        winner.lexical, winner.total = lexical, total


def _view(
    passage: Passage, number: int, scores: list[float], span: tuple[int, int] | None, num_views: int
) -> ExplainedView:
    if span is None:
        return ExplainedView(view=number, kind="feedback" if number >= num_views else "passage", scores=scores)
    if span == TITLE:
        return ExplainedView(view=number, kind="title", text=passage.title, scores=scores)
    start, stop = span
    return ExplainedView(
        view=number, kind="snippet", start=start, stop=stop, text=passage.text[start:stop], scores=scores
    )
