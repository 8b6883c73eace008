"""Executes requests against a router: limits, search, and hits with their matching snippets.

A plain class over a router: no HTTP and no Ray in here. `app.py` puts it on the network, and a client in the
same process calls it as it is.

Shapes: Q queries, D dimension.
"""

import base64
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from mvr_ray.config import ServeConfig
from mvr_ray.core.encoding.snippets import TITLE, snippet_text
from mvr_ray.deadline import Deadline
from mvr_ray.errors import FilterError, MissingInputError, OverloadedError
from mvr_ray.explanation import Explanation
from mvr_ray.serving import schemas
from mvr_ray.serving.admission import in_time
from mvr_ray.serving.catalog import UNREADABLE, PublishRequest, VersionCatalog
from mvr_ray.serving.explain import explain
from mvr_ray.serving.recall_monitor import RecallMonitor
from mvr_ray.serving.schemas import RequestError
from mvr_ray.store.fields import to_json
from mvr_ray.store.filters import to_plain_filter
from mvr_ray.store.manifest import INDEX_WORDS, Manifest
from mvr_ray.types import Answer, FloatArray, Hit, HybridParts, HybridWeight, Passage
from mvr_ray.versions import VersionInfo

if TYPE_CHECKING:
    from mvr_ray.distributed.hot_swap import HotSwapRouter
    from mvr_ray.distributed.router import Router
    from mvr_ray.serving.freshness import FreshnessMonitor

log = logging.getLogger(__name__)

SEARCH_SHARE = 0.9
"""Share of a request's time for the search; the rest is for texts and the response, so that partial answers arrive."""
BATCH_PASSAGES = 256
NUM_EXAMPLES = 6
MAX_NORM = 1e16
"""Norm limit of query vectors: squares, and products with any fp16 view of 65,504 dimensions, are finite in float32."""


@dataclass
class SearchService:
    """Answers requests from one router, within the limits of the run file's `serve` section.

    `deadline` is that of the request; absent, one begins with the call. All methods raise RequestError for a request
    that cannot be answered.
    """

    router: "Router | HotSwapRouter"
    limits: ServeConfig
    catalog: VersionCatalog | None = None
    """Without it no version can be listed, published or rolled back."""
    recall_monitor: RecallMonitor | None = None
    """Gets every dense answer."""
    freshness: "FreshnessMonitor | None" = None
    hybrid: HybridWeight | None = None
    """Weight of the dense score if a request names none (`search.hybrid`); None: hits are ranked by it alone."""

    def search(self, request: schemas.SearchRequest, deadline: Deadline | None = None) -> schemas.SearchResponse:
        """Search after checking the limits."""
        start_s = time.perf_counter()
        request.check(self.limits)
        deadline = self._deadline(deadline).within(request.timeout_s)
        search_deadline = deadline.share(SEARCH_SHARE)
        texts = [query for query in request.queries if isinstance(query, str)]
        vectors = [query for query in request.queries if not isinstance(query, str)]
        with self._pin(request.version, search_deadline) as router:
            require_encoder(request.encoder_fingerprint, router.manifest)
            require_fields(request.fields, router)
            weight = self._weight(request.hybrid, router) if texts else None
            options: dict[str, Any] = {"deadline": search_deadline, "min_coverage": request.min_coverage}
            try:
                options["filter"] = to_plain_filter(request.filter)
                if texts:
                    answer = router.search_text(texts, request.k, **options, hybrid=weight, parts=request.text)
                else:
                    answer = router.search(parse_vectors(vectors, router.dimension), request.k, **options)
            except FilterError as error:
                raise schemas.to_request_error(error) from None
            if self.recall_monitor is not None and request.filter is None and weight is None:
                self.recall_monitor.note(request.queries, request.k, answer)
            results = passage_hits(answer, request, router, deadline)
        took_ms = 1000 * (time.perf_counter() - start_s)
        log.info(
            "searched: index=%s version=%d queries=%d k=%d coverage=%.4f certified=%s took_ms=%.1f",
            *(answer.index, answer.version, len(request.queries), request.k),
            *(answer.coverage_share, answer.exact.certified, took_ms),
        )
        return schemas.SearchResponse(
            index=answer.index,
            version=answer.version,
            encoder_fingerprint=answer.encoder_fingerprint,
            coverage=schemas.Coverage(
                share=answer.coverage_share,
                passages_searched=answer.passages_searched,
                passages_total=answer.passages_total,
                shards=list(answer.shards),
            ),
            exact=answer.exact,
            took_ms=round(took_ms, 3),
            results=results,
        )

    def explain(self, request: schemas.ExplainRequest, deadline: Deadline | None = None) -> Explanation:
        """Score every view of some passages with every question, after checking the limits."""
        request.check(self.limits)
        deadline = self._search_deadline(deadline)
        with self._pin(request.version, deadline) as router:
            require_encoder(request.encoder_fingerprint, router.manifest)
            return explain(router, request, deadline, self._weight(request.hybrid, router))

    def embed(self, request: schemas.EmbeddingsRequest, deadline: Deadline | None = None) -> schemas.EmbeddingsResponse:
        """Embed texts by the index's own encoder, as a search does."""
        texts = request.texts(self.limits)
        with self._pin(None, deadline) as router:
            model = f"{router.manifest.encoder_name}/{router.manifest.encoder_fingerprint}"
            if request.model not in (None, model, *model.split("/")):
                message, hint = (
                    f"this server embeds by encoder {model!r}",
                    f"send model {model!r}, a part of it, or none",
                )
                raise RequestError(404, "unknown_model", "model", message, hint)
            if request.dimensions not in (None, router.dimension):
                message = f"dimensions is {request.dimensions}, the encoder's vectors have {router.dimension}"
                raise RequestError(422, "wrong_dimension", "dimensions", message, "leave it out")
            vectors_QD = router.embed(texts).astype("<f4")
            num_tokens = router.count_tokens(texts)
        embeddings: list[list[float]] | list[str] = vectors_QD.tolist()
        if request.encoding_format == "base64":
            embeddings = [base64.b64encode(vector_D.tobytes()).decode("ascii") for vector_D in vectors_QD]
        data = [schemas.Embedding(index=number, embedding=embedding) for number, embedding in enumerate(embeddings)]
        usage = schemas.TokenUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
        return schemas.EmbeddingsResponse(data=data, model=model, usage=usage)

    def passage(
        self, passage_id: str, version: int | None = None, deadline: Deadline | None = None
    ) -> schemas.PassageResponse:
        """Return one passage as it was indexed, in the version that answers or another one."""
        with self._pin(version, self._search_deadline(deadline)) as router:
            current = router.manifest
            passages = router.passages([passage_id]) if schemas.is_text(passage_id) else {}
            if passage_id not in passages:
                message = f"index {current.index!r} version {current.version} holds no passage of this id"
                hint = "give an id as a search shows it, percent-encoded as a part of the path"
                raise RequestError(404, "unknown_passage", "id", message, hint)
            passage = passages[passage_id]
            views = [
                schemas.PassageView(view=view, **snippet_of(passage, span).model_dump())
                for view, span in enumerate(router.view_spans(passage))
                if span is not None
            ]
        fields = {name: to_json(value) for name, value in passage.fields}
        own = passage._asdict() | {"fields": fields}
        return schemas.PassageResponse(index=current.index, version=current.version, **own, views=views)

    def examples(self) -> schemas.ExampleQueries:
        """Return a few texts to search for."""
        with self._pin(None) as router:
            return schemas.ExampleQueries(queries=router.example_queries(NUM_EXAMPLES))

    def versions(self) -> schemas.VersionList:
        """List the published versions, and the one that answers."""
        current, versions = self.current_version(), self._catalog().all()
        live = max((one.version for one in versions), default=0)
        return schemas.VersionList(index=current.index, live=live, serving=current.version, versions=versions)

    def version(self, number: int) -> schemas.VersionDetail:
        return self._catalog().one(number)

    def publish(self, request: PublishRequest, deadline: Deadline | None = None) -> VersionInfo:
        """Publish a manifest whose files are all in the store and whole; `promote` then answers from it at once."""
        return self._catalog().publish(request, self._search_deadline(deadline))

    def rollback(self, number: int, deadline: Deadline | None = None) -> VersionInfo:
        """Publish the content of a version as a new one, when every file is whole, and answer from it at once. Raises
        RequestError (503) if this server stays on a fixed version; or if that is published, but cannot be opened
        here."""
        if not self.router.state.follows:
            serving = self.current_version().version
            message = (
                f"version {number} not rolled back to: this server was started with version {serving}, which stays"
            )
            hint = f"use `mvr-ray versions CONFIG rollback {number}`, or a server that follows"
            raise RequestError(503, "not_opened", "n", message, hint)
        deadline = self._search_deadline(deadline)
        version = self._catalog().rollback(number, deadline)
        self._follow_to(version.version, f"version {number} was published again as {version.version}, which", deadline)
        return version

    def promote(self, number: int, deadline: Deadline | None = None) -> schemas.Readiness:
        """Answer from the newest version now, which `number` names; other servers follow on their own."""
        if not self._catalog().one(number).live:
            message = f"version {number} is not the newest one of its index"
            hint = f"roll back to it (POST /v1/versions/{number}/rollback), or name the newest one"
            raise RequestError(409, "not_newest", "n", message, hint)
        deadline = self._deadline(deadline)
        self._follow_to(number, f"version {number}", deadline.share(SEARCH_SHARE))
        return self.readiness(deadline)

    def _follow_to(self, number: int, what: str, deadline: Deadline) -> None:
        """Move to the newest version. Raises RequestError (503) if an older one than `number`, which `what` names,
        still answers then, or if that one could not be opened, as where the manifest of a newer one was deleted."""
        why, hint, retry_s = "", "see `mvr-ray versions CONFIG verify`", None
        try:
            self.router.follow(deadline)
        except OverloadedError as error:
            why, hint, retry_s = str(error), f"ask again: POST /v1/versions/{number}/promote", error.retry_after_s
        serving = self.current_version().version
        if serving < number or self.router.state.failed_version == number:
            why = why or self.router.state.failure or "the server was started with a fixed version"
            message = f"{what} could not be opened beside version {serving}, which stays in use: {why}"
            raise RequestError(503, "not_opened", "n", message, hint, retry_after_s=retry_s)

    def ready(self, deadline: Deadline) -> None:
        """Search for a fixed vector, so that the health check fails if searches hang. Shards that do not answer by the
        deadline and full queues of searchers are no failure: `HealthMonitor` replaces a hung searcher."""
        with suppress(OverloadedError), self._pin(None) as router:
            _probe(router, deadline)

    def readiness(self, deadline: Deadline | None = None) -> schemas.Readiness:
        """Report whether that search covered every passage, and the version's corpus, its encoder, and the words that
        `hybrid` needs exist; and a version that could not be followed."""
        with self._pin(None) as router:
            answer = _probe(router, self._search_deadline(deadline))
            problems, manifest = router.missing_sources(), router.manifest
        if self.hybrid is not None and manifest.lexical is None:
            problems = [*problems, f"{_no_words(manifest)}, which search.hybrid needs; roll back, or {INDEX_WORDS}"]
        state = self.router.state
        return schemas.Readiness(
            ready=answer.passages_searched == answer.passages_total and not problems,
            problems=problems,
            failure=state.failure,
            failed_version=state.failed_version or None,
            freshness=self.freshness.measure() if self.freshness else None,
            index=answer.index,
            version=answer.version,
            coverage=answer.coverage_share,
            shards=list(answer.shards),
        )

    def current_version(self) -> Manifest:
        """Return the version that answers now."""
        with self._pin(None) as router:
            return router.manifest

    def _weight(self, hybrid: schemas.Hybrid, router: "Router") -> HybridWeight | None:
        """Return the hybrid weight of a request. Raises RequestError (409) for a version without words."""
        weight = self.hybrid if hybrid is None else None if hybrid == "off" else hybrid
        if weight is not None and router.manifest.lexical is None:
            hint = (
                'search without them ("hybrid": "off", in Python hybrid="off", in a run file search.hybrid: off), or '
                f"index them: {INDEX_WORDS}"
            )
            raise RequestError(409, "no_words", "hybrid", _no_words(router.manifest), hint)
        return weight

    def _deadline(self, deadline: Deadline | None) -> Deadline:
        """Return the deadline of a request, at most the limits' from its start on."""
        max_s = self.limits.timeout_ms / 1000
        return (deadline or Deadline.after(max_s)).within(max_s)

    def _search_deadline(self, deadline: Deadline | None) -> Deadline:
        """Return the deadline of the search: a share of the time that the sender and the limits allow."""
        return self._deadline(deadline).share(SEARCH_SHARE)

    @contextmanager
    def _pin(self, version: int | None, deadline: Deadline | None = None) -> "Iterator[Router]":
        """Yield the router of one version, for all calls of one request; wait for it until the deadline."""
        with ExitStack() as stack:
            try:
                router = stack.enter_context(self.router.pin(version, deadline))
            except MissingInputError as error:
                message, _, hint = str(error).partition("; ")
                raise RequestError(404, "unknown_version", "version", message, hint or "see GET /v1/versions") from None
            except UNREADABLE:
                if self.catalog and version is not None:
                    self.catalog.read(version, "version")
                raise  # a file of the version is damaged
            yield router

    def _catalog(self) -> VersionCatalog:
        if self.catalog is None:
            hint = "ask a server of `mvr-ray serve`"
            raise RequestError(404, "no_versions", "", "this service answers from only one version", hint)
        return self.catalog


def _probe(router: "Router", deadline: Deadline) -> Answer:
    """Search for a fixed vector."""
    return router.search(np.eye(1, router.dimension, dtype=np.float32), 1, deadline=deadline, min_coverage=0.0)


def _no_words(manifest: Manifest) -> str:
    return f"index {manifest.index!r} version {manifest.version} has no words of its passages"


def require_encoder(fingerprint: str | None, version: Manifest) -> None:
    """Raise RequestError (409) if a request is for another encoder than the version's."""
    if fingerprint is not None and fingerprint != version.encoder_fingerprint:
        message = (
            f"the request is for encoder {fingerprint[:80]!r}, index {version.index!r} version {version.version} was "
            f"made by encoder {version.encoder_fingerprint!r}"
        )
        hint = "embed with the index's encoder, or send texts and leave encoder_fingerprint out"
        raise RequestError(409, "encoder_mismatch", "encoder_fingerprint", message, hint)


def require_fields(names: Sequence[str], router: "Router") -> None:
    """Raise RequestError for a field that the version's corpus lacks."""
    types = router.corpus.fields if names else {}
    for place, name in enumerate(names):
        if name not in types:
            own = ", ".join(f"{field} ({kind})" for field, kind in types.items())
            message, hint = f"the corpus has no field {name[:80]!r}", f"there are: {own}" if own else "it has none"
            raise RequestError(422, "unknown_passage_field", f"fields.{place}", message, hint)


def parse_vectors(queries: Sequence[Sequence[float]], dimension: int) -> FloatArray:
    """Return queries_QD float32. Raises RequestError naming the first vector that cannot be searched with."""
    for i, query in enumerate(queries):
        if len(query) != dimension:
            message = f"the vector has {len(query)} numbers, the index {dimension} dimensions"
            hint = "send vectors of the index's own encoder"
            raise RequestError(422, "wrong_dimension", f"queries.{i}", message, hint)
    with np.errstate(over="ignore"):
        queries_QD = np.asarray(queries, dtype=np.float64).astype(np.float32)
        norms_Q = np.linalg.norm(queries_QD.astype(np.float64), axis=1)
    for code, bad_Q, message, hint in (
        ("not_finite", ~np.isfinite(norms_Q), "the vector holds a number that is not finite", "send float32"),
        ("zero_vector", norms_Q == 0, "the vector is zero", "it scores all passages alike; send another"),
        ("vector_too_long", norms_Q > MAX_NORM, f"the vector's norm is above {MAX_NORM:g}", "scale it down"),
    ):
        if bad_Q.any():
            raise RequestError(422, code, f"queries.{int(bad_Q.argmax())}", message, hint)
    return queries_QD


def passage_hits(
    answer: Answer, request: schemas.SearchRequest, router: "Router", deadline: Deadline
) -> list[list[schemas.PassageHit]]:
    """Convert the hits of each query, with the texts, snippets and fields that the request names. View numbers from V
    on are feedback views: questions that the passage answered. Raises RequestError past the deadline."""
    ids = sorted({hit.passage_id for hits in answer.hits for hit in hits})
    passages: dict[str, Passage] = {}
    for start in in_time(range(0, len(ids), BATCH_PASSAGES), deadline) if request.text or request.fields else ():
        passages |= router.passages(ids[start : start + BATCH_PASSAGES])
    with_spans = in_time(passages.values(), deadline) if request.text else ()
    spans = {passage.id: router.view_spans(passage) for passage in with_spans}

    def convert(hit: Hit, parts: HybridParts | None) -> schemas.PassageHit:
        more: dict[str, Any] = {} if parts is None else parts._asdict()
        is_feedback = hit.view >= router.num_views
        if request.fields:
            fields = {name: to_json(value) for name, value in passages[hit.passage_id].fields}
            more["fields"] = {name: fields.get(name) for name in request.fields}
        if request.text:
            passage, own_spans = passages[hit.passage_id], spans[hit.passage_id]
            span = own_spans[hit.view] if hit.view < len(own_spans) and not is_feedback else None
            span = None if span == TITLE and not passage.title.strip() else span
            more |= {"title": passage.title, "text": passage.text, "snippet": span and snippet_of(passage, span)}
        return schemas.PassageHit(id=hit.passage_id, score=hit.score, view=hit.view, feedback=is_feedback, **more)

    parts = answer.parts or repeat(repeat(None))
    return [[convert(*hit) for hit in zip(*query)] for query in in_time(zip(answer.hits, parts), deadline)]


def snippet_of(passage: Passage, span: tuple[int, int]) -> schemas.Snippet:
    return schemas.Snippet(start=span[0], stop=span[1], text=snippet_text(passage, span))
