"""Serves search, explanation and versions over HTTP; needs no Ray. `replica.py` runs it on Ray Serve.

    POST /v1/search                   {"queries": ["who ...?"], "k": 10}  ->  per query its hits (passage, score, view,
                                      snippet), and what answered: version, encoder, coverage, exact
    POST /v1/explain                  every view of some passages with every question
    GET  /v1/passages/{id}            one passage; its id may hold anything, percent-encoded
    GET  /v1/versions                 the published versions, the live one, and the one that answers
    POST /v1/versions                 a manifest whose files are in the store, as a new version (admin token)
    GET  /v1/versions/{n}             one of them, and how it was made
    POST /v1/versions/{n}/rollback    its content as a new version (admin token)
    POST /v1/versions/{n}/promote     answer from the newest version now (admin token)
    GET  /readyz                      200 once a real search has covered every passage of the manifest, else 503
    GET  /livez                       200 while the process answers
    GET  /metrics                     Prometheus
    GET  /                            the search page

Errors are {"error": {"code", "field", "message", "hint"}} with a 4xx or 5xx status, whatever raises them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Scope

from mvr_ray import __version__, logs
from mvr_ray.errors import MvrRayError
from mvr_ray.explanation import Explanation
from mvr_ray.serving import middleware, schemas
from mvr_ray.serving.admission import Admission, Workers, late
from mvr_ray.serving.auth import TokenStore
from mvr_ray.serving.explain import ExplainRequest
from mvr_ray.serving.manifest_payload import PublishRequest
from mvr_ray.serving.metrics import CONTENT_TYPE, Metrics
from mvr_ray.serving.openapi import describe_limits, error_responses, readiness_responses
from mvr_ray.serving.schemas import (
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
from mvr_ray.serving.service import SearchService
from mvr_ray.serving.static import add_page

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
log = logging.getLogger(__name__)


def create_app(service: SearchService, tokens: TokenStore | None = None, metrics: Metrics | None = None) -> FastAPI:
    """The ASGI app over one service. Without tokens everyone may read, and nobody change anything."""
    limits, metrics = service.limits, metrics or Metrics()
    timeout_s = limits.timeout_ms / 1000
    admission = Admission(limits.max_waiting, timeout_s)
    workers = Workers(limits.max_running, lambda waited_s: metrics.note_stage("queue", waited_s))
    metrics.in_flight.set_function(lambda: admission.inside)
    probe = _Probe(service, timeout_s)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        workers.close()

    api = FastAPI(
        title="mvr_ray",
        version=__version__,
        description="Multi-view passage retrieval. Every answer says how much was searched and whether it is exact.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    api.router.route_class = _JsonRoute
    api.add_middleware(
        middleware.RequestMiddleware, limits=limits, tokens=tokens or TokenStore(), admission=admission, metrics=metrics
    )
    _answer_errors(api)
    bearer = [Security(HTTPBearer(auto_error=False, scheme_name="bearer"))] if tokens else []

    def get(path: str, *statuses: int) -> Callable[[F], F]:
        return api.get(path, dependencies=bearer, responses=error_responses(*statuses))

    def post(path: str, *statuses: int) -> Callable[[F], F]:
        return api.post(path, dependencies=bearer, responses=error_responses(*statuses, 404, 409, 422))

    def admin_post(path: str, *statuses: int) -> Callable[[F], F]:
        dependencies, responses = [*bearer, Depends(_require_admin)], error_responses(*statuses, 403, 404, 409, 422)
        return api.post(path, dependencies=dependencies, responses=responses)

    async def run(request: Request, work: Callable[[float], T], own_s: float | None = None) -> T:
        def timed(left_s: float) -> T:
            with metrics.stage_s.labels("service").time(), logs.request_context(request.state.request_id):
                return work(left_s)

        return await workers.run(request.state.slot, timed, own_s)

    @post("/v1/search", 415)
    async def search(request: Request, query: SearchRequest) -> SearchResponse:
        """The best passages of each query. Coverage and exactness are always part of the answer."""
        own_s = query.timeout_ms / 1000 if query.timeout_ms is not None and query.timeout_ms > 0 else None
        answer = await run(request, lambda left_s: service.search(query, left_s), own_s)
        metrics.note_answer(answer)
        return answer

    @post("/v1/explain", 415)
    async def explain(request: Request, query: ExplainRequest) -> Explanation:
        """Every view of the named passages, or of the questions' best hits, with every question."""
        return await run(request, lambda left_s: service.explain(query, left_s))

    @get("/v1/passages/{id:path}", 404)
    async def passage(request: Request, id: str) -> PassageResponse:
        """One passage as it was indexed, and the parts of its text that its views stand for."""
        return await run(request, lambda _: service.passage(id))

    @get("/v1/versions", 404)
    async def versions(request: Request) -> VersionList:
        """All published versions, which of them is live, and which one this server answers from."""
        return await run(request, lambda _: service.versions())

    @admin_post("/v1/versions", 415)
    async def publish(request: Request, offer: PublishRequest) -> VersionInfo:
        """Publish a manifest whose files are all in the store, once each has been read and its digest matches. Sent
        again, it is published once. Needs an admin token.
        """
        published = await run(request, lambda left_s: service.publish(offer, left_s))
        log.info("published: request=%s version=%d", request.state.request_id, published.version)
        return published

    @get("/v1/versions/{n}", 404, 422)
    async def version(request: Request, n: int) -> VersionDetail:
        """One version, and what its manifest says about how it was made."""
        return await run(request, lambda _: service.version(n))

    @admin_post("/v1/versions/{n}/rollback")
    async def rollback(request: Request, n: int) -> VersionInfo:
        """Publish the content of version `n` as a new version. Needs an admin token."""
        published = await run(request, lambda _: service.rollback(n))
        log.info("rolled back: request=%s to=%d published=%d", request.state.request_id, n, published.version)
        return published

    @admin_post("/v1/versions/{n}/promote")
    async def promote(request: Request, n: int) -> Readiness:
        """Answer from version `n`, the newest one, as soon as it is open. Needs an admin token."""
        return await run(request, lambda _: service.promote(n))

    @api.get("/readyz", responses=readiness_responses())
    async def ready(response: Response) -> Readiness:
        """Whether a real search has just covered every passage. Open to all."""
        readiness = await probe.readiness()
        metrics.note_served(readiness.index, readiness.version, readiness.coverage)
        response.status_code = 200 if readiness.ready else 503
        return readiness

    @api.get("/livez", responses=error_responses(in_slot=False))
    async def live() -> Liveness:
        """Whether the process answers. Open to all."""
        return Liveness(live=True, version=__version__)

    @api.get("/metrics", response_class=Response, dependencies=bearer, responses=error_responses(401, in_slot=False))
    async def prometheus() -> Response:
        """Counters of this replica for Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    add_page(api)
    describe_limits(api, limits)
    return api


class _Probe:
    """Runs one readiness search at a time, however many requests wait for it: a flood of probes is one search."""

    def __init__(self, service: SearchService, timeout_s: float) -> None:
        self._service = service
        self._timeout_s = timeout_s
        self._search: asyncio.Task[Readiness] | None = None

    async def readiness(self) -> Readiness:
        search = self._search
        if search is None or search.done() or search.get_loop() is not asyncio.get_running_loop():
            search = self._search = asyncio.create_task(asyncio.to_thread(self._service.readiness))
        try:
            return await asyncio.wait_for(asyncio.shield(search), self._timeout_s)
        except TimeoutError:
            raise late(self._timeout_s) from None


class _JsonRequest(Request):
    """A request whose body is validated already: FastAPI takes an instance of the model as it is."""

    content: BaseModel

    async def json(self) -> BaseModel:
        return self.content


class _JsonRoute(APIRoute):
    """Validates the bytes of a body by its model, which is stricter than FastAPI's own way over Python values."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def validate_and_handle(request: Request) -> Response:
            json_request = _JsonRequest(request.scope, request.receive)
            if self.body_field is not None:
                model: Any = self.body_field.field_info.annotation
                kind = request.headers.get("content-type", "")
                json_request.content = schemas.parse_json(model, await json_request.body(), kind)
            return await handle(json_request)

        return validate_and_handle


def _require_admin(request: Request) -> None:
    middleware.require_admin(request.state.role)


def _answer_errors(api: FastAPI) -> None:
    """Gives everything that is raised the one shape of errors; the middleware does so for what is not expected."""

    @api.exception_handler(RequestError)
    async def request_error(_: Request, error: RequestError) -> Response:
        return _response(error)

    @api.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> Response:
        """A wrong parameter in the path; bodies are validated by the route."""
        problems = [{**problem, "loc": problem["loc"][1:]} for problem in error.errors()]
        return _response(schemas.first_problem(problems, ()))

    @api.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        code = {404: "unknown_route", 405: "wrong_method"}.get(error.status_code, "http_error")
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        headers = dict(error.headers or {})
        if error.status_code == 405:  # raised by one route of this path, which knows its own methods only
            headers["allow"] = ", ".join(sorted(_methods(api, request.scope)))
        return _response(RequestError(error.status_code, code, "", message, "see GET /openapi.json", headers))

    @api.exception_handler(MvrRayError)
    async def package_error(request: Request, error: MvrRayError) -> Response:
        log.warning("request failed: id=%s", request.state.request_id, exc_info=error)
        return _response(schemas.to_request_error(error))


def _methods(api: FastAPI, scope: Scope) -> set[str]:
    """The methods of all routes that match the path of a request."""
    routes = (route for route in api.routes if isinstance(route, Route) and route.matches(scope)[0] != Match.NONE)
    return {method for route in routes for method in route.methods or ()}


def _response(error: RequestError) -> Response:
    return Response(error.encoded(), status_code=error.status, headers=error.headers, media_type="application/json")
