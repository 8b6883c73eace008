"""Computes the score of every view of a passage for some questions, and the part of the text behind each view.

Like `service`, a plain function over a router: no HTTP and no Ray in here.

Shapes: Q queries, D dimension.
"""

from collections.abc import Sequence
from typing import Annotated

from pydantic import ConfigDict, Field

from mvr_ray.config import ServeConfig
from mvr_ray.core.encoding.snippets import TITLE
from mvr_ray.errors import UnknownPassageError
from mvr_ray.explanation import ExplainedPassage, ExplainedView, Explanation, Winner
from mvr_ray.serving.limits import check_text
from mvr_ray.serving.protocols import Explainable as Explainable
from mvr_ray.serving.schemas import RequestError, RequestModel
from mvr_ray.types import Answer, Passage, PassageScores

Ranks = list[dict[str, int]]
"""For each question, the rank of its hits by passage id, counted from 1."""


class ExplainRequest(RequestModel):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"questions": ["Who built it?", "When was it built?"], "k": 3},
                {"questions": ["Who built it?"], "passages": ["tower_4"]},
            ]
        }
    )

    questions: Annotated[list[str], Field(min_length=1)]
    passages: list[str] = Field(default_factory=list)
    """Passage ids; where there are none, the questions are searched and the best `k` hits of each explained."""
    k: int = 3
    """Hits a question that are explained, where no passages are named."""
    encoder_fingerprint: str | None = None
    """The encoder that the questions are meant for; another index encoder is a 409."""
    version: Annotated[int, Field(ge=1)] | None = None
    """An index version; absent: the one that the server answers from. Another one is opened beside it."""


def check_explain(request: ExplainRequest, limits: ServeConfig) -> None:
    """What can be refused before any index is open. Raises RequestError."""
    for i, question in enumerate(request.questions):
        check_text(question, f"questions.{i}", "question", limits)
    if len(request.questions) > limits.max_batch:
        message, hint = f"{len(request.questions)} questions in one request", f"send at most {limits.max_batch}"
        raise RequestError(422, "too_many_questions", "questions", message, f"{hint} (serve.max_batch)")
    for field, number in (("k", request.k), ("passages", len(request.passages) or 1)):
        if not 1 <= number <= limits.max_k:
            message = f"k is {number}" if field == "k" else f"{number} passages in one request"
            hint = f"ask for 1 to {limits.max_k} passages (serve.max_k)"
            raise RequestError(422, f"{field}_out_of_range", field, message, hint)


def explain(router: Explainable, request: ExplainRequest, limits: ServeConfig) -> Explanation:
    """Every view of the passages asked for, or of the questions' best hits, with every question.

    Raises RequestError for what the limits forbid, and for a passage that the index does not hold.
    """
    check_explain(request, limits)
    queries_QD = router.embed(request.questions)
    answer = router.search(queries_QD[:0] if request.passages else queries_QD, request.k)
    ranks: Ranks = [{hit.passage_id: rank for rank, hit in enumerate(hits, 1)} for hits in answer.hits]
    ranks = ranks or [{} for _ in request.questions]
    wanted = list(dict.fromkeys(request.passages)) or passages_by_rank(answer)
    try:
        scored = router.explain(queries_QD, wanted)
    except UnknownPassageError as error:
        field = f"passages.{request.passages.index(error.passage_id)}"
        told, _, hint = str(error).partition("; ")
        raise RequestError(404, "unknown_passage", field, told, hint) from None
    passages = router.passages(wanted)
    explained = [
        _explained(passages[one.passage_id], one, ranks, router.view_spans(passages[one.passage_id]), router.num_views)
        for one in scored
    ]
    return Explanation(
        index=answer.index,
        version=answer.version,
        encoder_fingerprint=answer.encoder_fingerprint,
        num_views=router.num_views,
        questions=list(request.questions),
        passages=explained,
    )


def passages_by_rank(answer: Answer) -> list[str]:
    """The hits of all questions, each passage once: the first of every question, then the second, and so on."""
    deepest = max((len(hits) for hits in answer.hits), default=0)
    return list(dict.fromkeys(hits[at].passage_id for at in range(deepest) for hits in answer.hits if at < len(hits)))


def _explained(
    passage: Passage,
    scored: PassageScores,
    ranks: Ranks,
    spans: Sequence[tuple[int, int] | None],
    num_views: int,
) -> ExplainedPassage:
    numbers, scores_QN = scored.view_numbers_N.tolist(), scored.scores_QN
    views = [
        _view(passage, number, scores_QN[:, at].tolist(), spans[number] if number < num_views else None, num_views)
        for at, number in enumerate(numbers)
    ]
    winners = [
        Winner(view=view, score=float(scores_N[numbers.index(view)]), rank=rank_of.get(passage.id))
        for view, scores_N, rank_of in zip(scored.winner_Q.tolist(), scores_QN, ranks)
    ]
    return ExplainedPassage(id=passage.id, title=passage.title, text=passage.text, views=views, winners=winners)


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
