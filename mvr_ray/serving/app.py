"""Serves search, explanation and versions over HTTP; needs no Ray. `replica.py` runs it on Ray Serve.

    POST /v1/search                   {"queries": ["who ...?"], "k": 10}  ->  per query its hits (passage, score, view,
                                      snippet), and what answered: version, encoder, coverage, exact
    POST /v1/explain                  every view of some passages with every question
    POST /v1/embeddings               vectors of texts by the index's encoder, in the shape of OpenAI's API
    GET  /v1/examples                 a few texts to search for
    GET  /v1/passages/{id}            one passage (?version=N: of this version); its id may hold anything,
                                      percent-encoded
    GET  /v1/versions                 the published versions, the live one, and the one that answers
    POST /v1/versions                 a manifest whose files are in the store, as a new version (admin token)
    GET  /v1/versions/{n}             one of them, and how it was made
    POST /v1/versions/{n}/rollback    its content as a new version (admin token)
    POST /v1/versions/{n}/promote     answer from the newest version now (admin token)
    GET  /readyz                      200 once a real search has covered every passage of the manifest, else 503
    GET  /livez                       200 while the process answers
    GET  /metrics                     Prometheus
    GET  /                            the search page
    GET  /docs                        a page of these routes, from /openapi.json

Errors are {"error": {"code", "field", "message", "hint"}} with a 4xx or 5xx status.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any, Generic, TypeVar

from fastapi import Depends, FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel, BeforeValidator
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from mvr_ray import __version__, logs
from mvr_ray.config import ServeConfig
from mvr_ray.deadline import Deadline
from mvr_ray.explanation import Explanation
from mvr_ray.serving import schemas
from mvr_ray.serving.admission import Admission, Workers, late_error
from mvr_ray.serving.auth import REALM, VARIABLES, TokenStore
from mvr_ray.serving.catalog import PublishRequest
from mvr_ray.serving.metrics import CONTENT_TYPE, Metrics
from mvr_ray.serving.middleware import RequestMiddleware, error_response
from mvr_ray.serving.schemas import RequestError
from mvr_ray.serving.service import SearchService
from mvr_ray.versions import VersionInfo

A = TypeVar("A", bound=BaseModel)
T = TypeVar("T")
VersionNumber = Annotated[int, BeforeValidator(schemas.parse_whole_number)]
F = TypeVar("F", bound=Callable[..., Any])
log = logging.getLogger(__name__)

PAGE = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/docs": ("docs.html", "text/html; charset=utf-8"),
    "/page/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page/elements.js": ("elements.js", "text/javascript; charset=utf-8"),
    "/page/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/page/docs.js": ("docs.js", "text/javascript; charset=utf-8"),
}
"""The search page and that of the routes: files of this package. They call the same routes as every client, so they
need a token if the server does; their own files need none."""
PAGE_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
MEANINGS = {
    401: "No token, or an unknown one.",
    403: "The token may only read, or the server may not write to the store.",
    404: "There is no such passage or version.",
    408: "The body did not arrive in time.",
    409: "Another encoder made the index, another publisher was first, or the index has no words.",
    413: "The body is larger than serve.max_body_bytes, or the route takes none.",
    415: "The body is not declared to be JSON, or is compressed.",
    421: "A server without tokens is called by a name that is not its own (serve.hosts).",
    422: "The request is wrong: `code` and `field` say where.",
    431: "The headers are larger than serve.max_header_bytes.",
    502: "The process that was to answer ended; Retry-After says when to ask again.",
    503: "Too busy, or too few passages could be searched; Retry-After says when to ask again.",
    504: "No answer in the time that was given.",
}
ANY_REQUEST = (408, 413, 421, 431, 502, 503, 504)


def create_app(service: SearchService, tokens: TokenStore | None = None, metrics: Metrics | None = None) -> FastAPI:
    """Create the ASGI app over one service. Without tokens all clients may read, and none may change anything."""
    limits, tokens, metrics = service.limits, tokens or TokenStore(), metrics or Metrics()
    admission = Admission(limits.max_waiting)
    workers = Workers(limits.max_running, lambda waiting_s: metrics.note_stage("queue", waiting_s))
    metrics.in_flight.set_function(lambda: admission.in_flight)
    probe = _Probe(service)

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
        RequestMiddleware,
        limits=limits,
        tokens=tokens,
        open_paths=("/livez", "/readyz", *PAGE),
        admission=admission,
        metrics=metrics,
    )
    _answer_errors(api)
    bearer = [Security(HTTPBearer(auto_error=False, scheme_name="bearer"))] if tokens else []

    def get(path: str, *statuses: int) -> Callable[[F], F]:
        return api.get(path, dependencies=bearer, responses=_errors(*statuses, 401))

    def post(path: str, *statuses: int, admin: bool = False, **options: Any) -> Callable[[F], F]:
        responses = _errors(*statuses, 401, 404, 409, 422, *((403,) if admin else ()))
        dependencies = [*bearer, Depends(_require_admin)] if admin else bearer
        return api.post(path, dependencies=dependencies, responses=responses, **options)

    async def run(request: Request, work: Callable[[Deadline], T], timeout_s: float | None = None) -> T:
        deadline = request.state.deadline.within(timeout_s)

        def work_with_metrics() -> T:
            with metrics.stage_s.labels("service").time():
                return work(deadline)

        return await workers.run(request.state.slot, work_with_metrics, deadline)

    @post("/v1/search", 415, response_model=schemas.SearchResponse)
    async def search(request: Request, query: schemas.SearchRequest) -> Response:
        """Return the best passages of each query. Coverage and exactness are always part of the answer."""
        answer = await run(request, lambda deadline: _LargeAnswer(service.search(query, deadline)), query.timeout_s)
        metrics.note_answer(answer.content)
        return answer.response

    @post("/v1/explain", 415, response_model=Explanation)
    async def explain(request: Request, query: schemas.ExplainRequest) -> Response:
        """Score every view of the named passages, or of the questions' best hits, with every question."""
        return (await run(request, lambda deadline: _LargeAnswer(service.explain(query, deadline)))).response

    @post("/v1/embeddings", 415, response_model=schemas.EmbeddingsResponse)
    async def embeddings(request: Request, query: schemas.EmbeddingsRequest) -> Response:
        """Embed texts by the index's encoder, as a search embeds its queries; in the shape of OpenAI's API."""
        return (await run(request, lambda deadline: _LargeAnswer(service.embed(query, deadline)))).response

    @get("/v1/examples")
    async def examples(request: Request) -> schemas.ExampleQueries:
        """Return a few texts to search for: questions that came with the corpus, else titles."""
        return await run(request, lambda _: service.examples())

    @get("/v1/passages/{id:passage_id}", 404, 422)
    async def passage(request: Request, id: str, version: VersionNumber | None = None) -> schemas.PassageResponse:
        """Return one passage as it was indexed, and the parts of its text that its views stand for, in the version that
        answers or another one.
        """
        return await run(request, lambda deadline: service.passage(id, version, deadline))

    @get("/v1/versions", 404)
    async def versions(request: Request) -> schemas.VersionList:
        """List all published versions, which of them is live, and which one this server answers from."""
        return await run(request, lambda _: service.versions())

    @post("/v1/versions", 415, admin=True)
    async def publish(request: Request, body: PublishRequest) -> VersionInfo:
        """Publish a manifest whose files are all in the store, once each has been read and its digest matches. Sent
        again, it is published once. Needs an admin token.
        """
        version = await run(request, lambda deadline: service.publish(body, deadline))
        log.info("published: request=%s version=%d", logs.request_id(), version.version)
        return version

    @get("/v1/versions/{n}", 404, 422)
    async def version(request: Request, n: VersionNumber) -> schemas.VersionDetail:
        """Return one version, and what its manifest says about how it was made."""
        return await run(request, lambda _: service.version(n))

    @post("/v1/versions/{n}/rollback", admin=True)
    async def rollback(request: Request, n: VersionNumber) -> VersionInfo:
        """Publish the content of version `n` as a new version, once each file of it has been read and its digest
        matches. Needs an admin token.
        """
        version = await run(request, lambda deadline: service.rollback(n, deadline))
        log.info("rolled back: request=%s to=%d published=%d", logs.request_id(), n, version.version)
        return version

    @post("/v1/versions/{n}/promote", admin=True)
    async def promote(request: Request, n: VersionNumber) -> schemas.Readiness:
        """Answer from version `n`, the newest one, as soon as it is open. Needs an admin token."""
        return await run(request, lambda deadline: service.promote(n, deadline))

    not_ready = {
        503: {"model": schemas.Readiness | schemas.ErrorResponse, "description": "Not every passage was searched."}
    }

    @api.get("/readyz", responses=_errors() | not_ready)
    async def ready(request: Request, response: Response) -> schemas.Readiness:
        """Report whether a real search has just covered every passage. Open to all."""
        readiness = await probe.readiness(request.state.deadline)
        metrics.note_served(readiness.index, readiness.version, readiness.coverage)
        response.status_code = 200 if readiness.ready else 503
        return readiness

    @api.get("/livez", responses=_errors())
    async def live() -> schemas.Liveness:
        """Report whether the process answers. Open to all."""
        return schemas.Liveness(live=True, version=__version__)

    series: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

    @api.get("/metrics", response_class=Response, dependencies=bearer, responses=_errors(401) | series)
    async def prometheus() -> Response:
        """Return the counters of this replica for Prometheus."""
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    for path, (name, media_type) in PAGE.items():
        content = (files("mvr_ray.serving") / "page" / name).read_bytes()
        api.add_api_route(path, _page_sender(content, media_type), include_in_schema=False)
    _describe_limits(api, limits)
    return api


class _PassageIdConvertor(PathConvertor):
    """Any passage id as the rest of a path; starlette's own convertor ends at a line break."""

    regex = "(?s:.*)"


register_url_convertor("passage_id", _PassageIdConvertor())


@dataclass
class _Probe:
    """Runs one readiness search at a time; concurrent probes share it, so it has the server's time, not that of one."""

    service: SearchService
    _search: asyncio.Task[schemas.Readiness] | None = None

    async def readiness(self, deadline: Deadline) -> schemas.Readiness:
        search = self._search
        if search is None or search.done() or search.get_loop() is not asyncio.get_running_loop():
            search = self._search = asyncio.create_task(asyncio.to_thread(self.service.readiness))
        try:
            return await asyncio.wait_for(asyncio.shield(search), deadline.left_s)
        except TimeoutError:
            raise late_error(deadline) from None


class _LargeAnswer(Generic[A]):
    """An answer with its response, made in a worker's thread: in the event loop, megabytes would delay all requests."""

    def __init__(self, content: A) -> None:
        self.content = content
        self.response = Response(content.model_dump_json(), media_type="application/json")


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
            if any(own.dependency is _require_admin for own in self.dependencies):
                _require_admin(request)  # before the body is: who may not send it need not correct it
            json_request = _JsonRequest(request.scope, request.receive)
            if self.body_field is not None:
                model: Any = self.body_field.field_info.annotation
                json_request.content = schemas.parse_json(model, await json_request.body(), request.headers)
            return await handle(json_request)

        return validate_and_handle


def _require_admin(request: Request) -> None:
    """Raise RequestError (403) unless an admin token was sent: a web page reaches the loopback, too."""
    role = request.state.role
    if role != "admin":
        message = "the token may only read" if role else "this server has no tokens, so it accepts no changes"
        hint = f"send an admin token; a server has those of serve.tokens_file and {VARIABLES['admin']}"
        challenge = {"www-authenticate": f'{REALM}, error="insufficient_scope"'}
        raise RequestError(403, "admin_needed", "", message, hint, challenge)


def _page_sender(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(content, media_type=media_type, headers=PAGE_HEADERS)

    return send


def _answer_errors(api: FastAPI) -> None:
    """Convert the errors of routing to the JSON shape of all errors; the middleware converts the others."""

    @api.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> Response:
        """Answer a wrong parameter of the path; the route validates bodies."""
        problems = [{"type": one["type"], "loc": one["loc"][1:], "msg": one["msg"]} for one in error.errors()]
        return error_response(schemas.first_problem(problems, ()))

    @api.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        code = {404: "unknown_route", 405: "wrong_method"}.get(error.status_code, "http_error")
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        if error.status_code == 405:  # raised by one route of this path, which knows its own methods only
            routes = [one for one in api.routes if isinstance(one, Route)]
            own = [route.methods or () for route in routes if route.matches(request.scope)[0] != Match.NONE]
            methods = set().union(*own)
            headers["allow"] = ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))
        return error_response(RequestError(error.status_code, code, "", message, "see GET /openapi.json", headers))


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the descriptions of these errors, and of those that any request may have."""
    return {
        status: {"model": schemas.ErrorResponse, "description": MEANINGS[status]}
        for status in sorted({*statuses, *ANY_REQUEST})
    }


def _describe_limits(api: FastAPI, limits: ServeConfig) -> None:
    """Add the limits of this server to the schemas of the app's description."""
    describe = api.openapi

    def describe_with_limits() -> dict[str, Any]:
        if api.openapi_schema is None:
            models = describe()["components"]["schemas"]
            search, explain = models["SearchRequest"]["properties"], models["ExplainRequest"]["properties"]
            for k in (search["k"], explain["k"]):
                k.update(minimum=1, maximum=limits.max_k)
            search["min_coverage"].update(minimum=0, maximum=1)
            for alternative in search["timeout_ms"]["anyOf"]:
                if alternative["type"] == "integer":
                    alternative.update(minimum=1, maximum=limits.timeout_ms)
            search["queries"].pop("minLength")  # pydantic describes a union of lists as if it were a text
            search["queries"].update(minItems=1, maxItems=limits.max_batch)
            explain["questions"]["maxItems"] = limits.max_batch
            explain["passages"]["maxItems"] = limits.max_k
            for alternative in models["EmbeddingsRequest"]["properties"]["input"]["anyOf"][1:]:
                alternative.update(minItems=1, maxItems=limits.max_batch)
        return describe()

    api.openapi = describe_with_limits
