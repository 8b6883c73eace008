"""HTTP for a search service; needs no Ray. `replica.py` puts it on Ray Serve.

    POST /v1/search                   {"queries": ["who ...?"], "k": 10}  ->  per query its hits (passage, score, view,
                                      snippet), and what answered: version, encoder, coverage, exact
    POST /v1/explain                  every view of some passages with every question
    GET  /v1/passages/{id}            one passage; its id may hold anything, percent-encoded
    GET  /v1/versions                 what is published, what is live, what is served
    POST /v1/versions                 a manifest whose files are in the store, as a new version (admin token)
    GET  /v1/versions/{n}             one of them, and how it was made
    POST /v1/versions/{n}/rollback    its content as a new version (admin token)
    POST /v1/versions/{n}/promote     answer from the newest version now (admin token)
    GET  /readyz                      200 once a real search has covered every passage of the manifest, else 503
    GET  /livez                       200 while the process answers
    GET  /metrics                     Prometheus
    GET  /                            the search page

Errors are {"error": {"code", "field", "message", "hint"}} with a 4xx or 503/504 status, whoever raises them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Scope

from mvr_ray import __version__, logs
from mvr_ray.errors import MvrRayError
from mvr_ray.explanation import Explanation
from mvr_ray.serving import gate, wire
from mvr_ray.serving.admission import Admission, Place, late
from mvr_ray.serving.explain import ExplainRequest
from mvr_ray.serving.metrics import CONTENT_TYPE, Metrics
from mvr_ray.serving.offer import PublishRequest
from mvr_ray.serving.openapi import describe, documented, documented_readiness, takes
from mvr_ray.serving.pages import add_page
from mvr_ray.serving.service import SearchService
from mvr_ray.serving.tokens import Tokens
from mvr_ray.serving.wire import (
    Liveness,
    PassageResponse,
    Readiness,
    RequestError,
    SearchRequest,
    SearchResponse,
    VersionDetail,
    VersionInfo,
    VersionList,
)

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
log = logging.getLogger(__name__)


def create_app(service: SearchService, tokens: Tokens | None = None, metrics: Metrics | None = None) -> FastAPI:
    """The ASGI app over one service. Without tokens everyone may read, and nobody change anything."""
    limits, metrics = service.limits, metrics or Metrics()
    timeout_s = limits.timeout_ms / 1000
    places = Admission(limits.max_waiting, limits.max_running, timeout_s, lambda s: metrics.note_stage("queue", s))
    metrics.in_flight.set_function(lambda: places.in_flight)
    probe = _Probe(service, timeout_s)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        places.close()

    api = FastAPI(
        title="mvr_ray",
        version=__version__,
        description="Multi-view passage retrieval. Every answer says how much was searched and whether it is exact.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    api.add_middleware(gate.Gate, limits=limits, tokens=tokens or Tokens(), admission=places, metrics=metrics)
    _answer_errors(api)

    async def run(request: Request, work: Callable[[float], T], own_s: float | None = None) -> T:
        place: Place = request.state.place

        def timed(left_s: float) -> T:
            with metrics.stage_s.labels("service").time(), logs.during(request.state.request_id):
                return work(left_s)

        return await place.run(timed, own_s)

    @api.post("/v1/search", openapi_extra=takes(SearchRequest), responses=documented(404, 409, 415, 422))
    async def search(request: Request) -> SearchResponse:
        """The best passages of each query. Coverage and exactness are always told."""
        asked = await _body(request, SearchRequest)
        own_s = asked.timeout_ms / 1000 if asked.timeout_ms is not None and asked.timeout_ms > 0 else None
        answer = await run(request, lambda left_s: service.search(asked, left_s), own_s)
        metrics.note_answer(answer)
        return answer

    @api.post("/v1/explain", openapi_extra=takes(ExplainRequest), responses=documented(404, 409, 415, 422))
    async def explain(request: Request) -> Explanation:
        """Every view of the named passages, or of the questions' best hits, with every question."""
        asked = await _body(request, ExplainRequest)
        return await run(request, lambda left_s: service.explain(asked, left_s))

    @api.get("/v1/passages/{id:path}", responses=documented(404))
    async def passage(request: Request, id: str) -> PassageResponse:
        """One passage as it was indexed, and the parts of its text that its views stand for."""
        return await run(request, lambda _: service.passage(id))

    @api.get("/v1/versions", responses=documented(404))
    async def versions(request: Request) -> VersionList:
        """All published versions, which of them is live, and which one this server answers from."""
        return await run(request, lambda _: service.versions())

    @api.post("/v1/versions", openapi_extra=takes(PublishRequest), responses=documented(403, 404, 409, 415, 422))
    async def publish(request: Request) -> VersionInfo:
        """Publish a manifest whose files are all in the store, once each has been read and found whole. Sent again, it
        is published once. Needs an admin token.
        """
        gate.require_admin(request.state.role)
        offer = await _body(request, PublishRequest)
        done = await run(request, lambda left_s: service.publish(offer, left_s))
        log.info("published: request=%s version=%d", request.state.request_id, done.version)
        return done

    @api.get("/v1/versions/{n}", responses=documented(404, 422))
    async def version(request: Request, n: int) -> VersionDetail:
        """One version, and what its manifest says about how it was made."""
        return await run(request, lambda _: service.version(n))

    @api.post("/v1/versions/{n}/rollback", responses=documented(403, 404, 409, 422))
    async def rollback(request: Request, n: int) -> VersionInfo:
        """Publish the content of version `n` as a new version. Needs an admin token."""
        gate.require_admin(request.state.role)
        done = await run(request, lambda _: service.rollback(n))
        log.info("rolled back: request=%s to=%d published=%d", request.state.request_id, n, done.version)
        return done

    @api.post("/v1/versions/{n}/promote", responses=documented(403, 404, 409, 422))
    async def promote(request: Request, n: int) -> Readiness:
        """Answer from version `n`, the newest one, as soon as it is open. Needs an admin token."""
        gate.require_admin(request.state.role)
        return await run(request, lambda _: service.promote(n))

    @api.get("/readyz", responses=documented_readiness())
    async def ready(response: Response) -> Readiness:
        """Whether a real search has just covered every passage. Open to all."""
        told = await probe.readiness()
        metrics.note_served(told.index, told.version, told.coverage)
        response.status_code = 200 if told.ready else 503
        return told

    @api.get("/livez", responses=documented(place=False))
    async def live() -> Liveness:
        """Whether the process answers. Open to all."""
        return Liveness(live=True, version=__version__)

    @api.get("/metrics", response_class=Response, responses=documented(401, place=False))
    async def measured() -> Response:
        """Counters of this replica for Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    add_page(api)
    bodies = (SearchRequest, ExplainRequest, PublishRequest)
    describe(api, bodies, limits, with_tokens=bool(tokens), open_paths=gate.OPEN)
    return api


class _Probe:
    """One readiness search at a time, however many ask: a flood of probes is not one more flood."""

    def __init__(self, service: SearchService, timeout_s: float) -> None:
        self._service = service
        self._timeout_s = timeout_s
        self._asked: asyncio.Task[Readiness] | None = None

    async def readiness(self) -> Readiness:
        if self._asked is None or self._asked.done() or self._asked.get_loop() is not asyncio.get_running_loop():
            self._asked = asyncio.create_task(asyncio.to_thread(self._service.readiness))
        try:
            return await asyncio.wait_for(asyncio.shield(self._asked), self._timeout_s)
        except TimeoutError:
            raise late(self._timeout_s) from None


async def _body(request: Request, model: type[M]) -> M:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        shown = repr(kind[:80]) if kind else "missing"
        hint = "send the header `Content-Type: application/json`"
        raise RequestError(415, "wrong_content_type", "", f"the content type is {shown}", hint)
    return wire.read(model, await request.body())


def _answer_errors(api: FastAPI) -> None:
    """Everything that is raised, in the one shape of errors."""

    @api.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> Response:
        return _response(error)

    @api.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        problem = error.errors()[0]
        field = ".".join(str(part) for part in problem["loc"][1:])
        return _response(RequestError(422, "wrong_value", field, problem["msg"], "see GET /openapi.json"))

    @api.exception_handler(HTTPException)
    async def astray(request: Request, error: HTTPException) -> Response:
        code = {404: "unknown_route", 405: "wrong_method"}.get(error.status_code, "http_error")
        told = f"{request.method} {request.url.path[:200]}: {error.detail}"
        headers = dict(error.headers or {})
        if error.status_code == 405:  # raised by one route of this path, which knows its own methods only
            headers["allow"] = ", ".join(sorted(_methods(api, request.scope)))
        return _response(RequestError(error.status_code, code, "", told, "see GET /openapi.json", headers))

    @api.exception_handler(MvrRayError)
    async def failed(request: Request, error: MvrRayError) -> Response:
        log.warning("request failed: id=%s", request.state.request_id, exc_info=error)
        return _response(wire.failure(error))

    @api.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        log.error("request broke: path=%s", request.url.path[:200], exc_info=error)
        hint = "this is a fault of the server; its log says more"
        return _response(RequestError(500, "internal", "", f"an unexpected {type(error).__name__}", hint))


def _methods(api: FastAPI, scope: Scope) -> set[str]:
    """Everything that can be done with the path of a request."""
    routes = (route for route in api.routes if isinstance(route, Route) and route.matches(scope)[0] != Match.NONE)
    return {method for route in routes for method in route.methods or ()}


def _response(error: RequestError) -> Response:
    return Response(error.encoded(), status_code=error.status, headers=error.headers, media_type="application/json")
