"""What an HTTP search request means: limits, the search itself, and hits with their matching snippets.

A plain class over a router: no HTTP and no Ray in here. `app.py` puts it on the network.

Shapes: Q queries, D dimension.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Protocol

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from mvr_ray.config import ServeConfig
from mvr_ray.types import Answer, FloatArray, Hit, Passage


class Searchable(Protocol):
    """The part of a router that answering needs."""

    @property
    def dimension(self) -> int: ...

    @property
    def num_views(self) -> int: ...

    def search(
        self, queries_QD: FloatArray, k: int, *, timeout_s: float | None = None, min_coverage: float = 1.0
    ) -> Answer: ...

    def search_text(
        self, texts: Sequence[str], k: int, *, timeout_s: float | None = None, min_coverage: float = 1.0
    ) -> Answer: ...

    def passages(self, ids: Sequence[str]) -> Mapping[str, Passage]: ...

    def view_spans(self, passage: Passage) -> Sequence[tuple[int, int] | None]: ...


class SearchRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    queries: Annotated[list[str] | list[list[float]], Field(min_length=1)]
    """Texts, or query vectors of the index's dimension; one kind a request."""
    k: int = 10
    """Distinct passages a query."""
    text: bool = True
    """Send passage texts and snippets with the hits."""
    timeout_ms: int | None = None
    """Time for the answer, at most the server's own (`serve.timeout_ms`), which is what absent means."""
    min_coverage: float = 1.0
    """The share of the passages that must be searched; with fewer there is an error, not a short answer."""


class Snippet(BaseModel):
    start: int
    stop: int
    text: str


class FoundPassage(BaseModel):
    id: str
    score: float
    view: int
    feedback: bool
    title: str | None = None
    text: str | None = None
    snippet: Snippet | None = None


class Shard(BaseModel):
    shard: int
    passages: int
    state: str


class Coverage(BaseModel):
    """How many of the manifest's passages were searched, and what became of each shard."""

    share: float
    passages_searched: int
    passages_total: int
    shards: list[Shard]


class Exact(BaseModel):
    """`certified`: the hits are those of exhaustive search over every passage, to the last tie."""

    certified: bool
    method: str
    rounds: int
    rescored: int


class SearchResponse(BaseModel):
    index: str
    version: int
    encoder_fingerprint: str
    coverage: Coverage
    exact: Exact
    took_ms: float
    results: list[list[FoundPassage]]


class RequestError(Exception):
    """A request that cannot be answered as asked: HTTP status, a code for programs, the field, and what to do."""

    def __init__(self, status: int, code: str, field: str, message: str, hint: str) -> None:
        super().__init__(message)
        self.status, self.code, self.field, self.message, self.hint = status, code, field, message, hint

    def body(self) -> dict[str, dict[str, str]]:
        return {"error": {"code": self.code, "field": self.field, "message": self.message, "hint": self.hint}}


class SearchService:
    """Answers requests from one router, within the limits of the run file's `serve` section."""

    def __init__(self, router: Searchable, limits: ServeConfig) -> None:
        self.router = router
        self.limits = limits

    def search(self, request: SearchRequest) -> SearchResponse:
        """Raises RequestError for what the limits forbid, before anything is searched."""
        began = time.perf_counter()
        texts, queries_QD = self._checked(request)
        timeout_ms = self.limits.timeout_ms if request.timeout_ms is None else request.timeout_ms
        timeout_s, least = timeout_ms / 1000, request.min_coverage
        answer = (
            self.router.search_text(texts, request.k, timeout_s=timeout_s, min_coverage=least)
            if queries_QD is None
            else self.router.search(queries_QD, request.k, timeout_s=timeout_s, min_coverage=least)
        )
        results = [[bare(hit, self.router.num_views) for hit in hits] for hits in answer.hits]
        if request.text:
            wanted = sorted({hit.passage_id for hits in answer.hits for hit in hits})
            passages = self.router.passages(wanted)
            spans = {i: self.router.view_spans(passages[i]) for i in wanted}
            results = [[with_text(found, passages[found.id], spans[found.id]) for found in row] for row in results]
        return SearchResponse(
            index=answer.index,
            version=answer.version,
            encoder_fingerprint=answer.encoder_fingerprint,
            coverage=coverage(answer),
            exact=Exact(**answer.exact._asdict()),
            took_ms=round(1000 * (time.perf_counter() - began), 3),
            results=results,
        )

    def ready(self) -> Answer:
        """A real search with a fixed vector: a health check that passes while searches hang proves nothing."""
        probe_QD = np.zeros((1, self.router.dimension), dtype=np.float32)
        probe_QD[0, 0] = 1.0
        return self.router.search(probe_QD, 1, min_coverage=0.0)

    def _checked(self, request: SearchRequest) -> tuple[list[str], FloatArray | None]:
        check_request(request, self.limits)
        texts = [query for query in request.queries if isinstance(query, str)]
        if texts:
            return texts, None
        return [], self._vectors([query for query in request.queries if not isinstance(query, str)])

    def _vectors(self, queries: list[list[float]]) -> FloatArray:
        for i, query in enumerate(queries):
            if len(query) != self.router.dimension:
                raise RequestError(
                    422,
                    "wrong_dimension",
                    f"queries.{i}",
                    f"the vector has {len(query)} numbers, the index {self.router.dimension} dimensions",
                    "send vectors of the index's own encoder",
                )
        with np.errstate(over="ignore"):
            queries_QD = np.asarray(queries, dtype=np.float64).astype(np.float32)
        if not np.isfinite(queries_QD).all():
            at = int(np.argmin(np.isfinite(queries_QD).all(axis=1)))
            raise RequestError(
                422, "not_finite", f"queries.{at}", "the vector holds a number that is not finite", "send float32"
            )
        return queries_QD


def check_request(request: SearchRequest, limits: ServeConfig) -> None:
    """What can be refused before any index is open. Raises RequestError."""
    if not 1 <= request.k <= limits.max_k:
        hint = f"ask for 1 to {limits.max_k} passages (serve.max_k)"
        raise RequestError(422, "k_out_of_range", "k", f"k is {request.k}", hint)
    if request.timeout_ms is not None and not 1 <= request.timeout_ms <= limits.timeout_ms:
        hint = f"give 1 to {limits.timeout_ms} ms (serve.timeout_ms), or leave it out"
        raise RequestError(422, "timeout_out_of_range", "timeout_ms", f"timeout_ms is {request.timeout_ms}", hint)
    if not 0 <= request.min_coverage <= 1:
        said = f"min_coverage is {request.min_coverage:g}"
        raise RequestError(422, "coverage_out_of_range", "min_coverage", said, "give a share from 0 to 1")
    if len(request.queries) > limits.max_batch:
        hint, said = (
            f"send at most {limits.max_batch} (serve.max_batch)",
            f"{len(request.queries)} queries in one request",
        )
        raise RequestError(422, "too_many_queries", "queries", said, hint)
    for i, query in enumerate(request.queries):
        if isinstance(query, str):
            check_text(query, f"queries.{i}", "query", limits)


def check_text(text: str, field: str, what: str, limits: ServeConfig) -> None:
    """Raises RequestError for a text that cannot be embedded within the limits; `what` it is called in the message."""
    if not text.strip():
        raise RequestError(422, f"empty_{what}", field, f"the {what} is empty", "send a text with words in it")
    if len(text) > limits.max_query_chars:
        hint = f"send at most {limits.max_query_chars} (serve.max_query_chars)"
        raise RequestError(422, f"{what}_too_long", field, f"the {what} has {len(text)} characters", hint)


def coverage(answer: Answer) -> Coverage:
    return Coverage(
        share=answer.coverage_share,
        passages_searched=answer.passages_searched,
        passages_total=answer.passages_total,
        shards=[Shard(**shard._asdict()) for shard in answer.shards],
    )


def bare(hit: Hit, num_views: int) -> FoundPassage:
    """View numbers from V on are feedback views: questions that the passage answered, no part of its text."""
    return FoundPassage(id=hit.passage_id, score=hit.score, view=hit.view, feedback=hit.view >= num_views)


def with_text(found: FoundPassage, passage: Passage, spans: Sequence[tuple[int, int] | None]) -> FoundPassage:
    span = spans[found.view] if found.view < len(spans) and not found.feedback else None
    snippet = Snippet(start=span[0], stop=span[1], text=passage.text[span[0] : span[1]]) if span else None
    return found.model_copy(update={"title": passage.title, "text": passage.text, "snippet": snippet})
