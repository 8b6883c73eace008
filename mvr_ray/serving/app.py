"""HTTP for a search service, and its place on Ray Serve.

    POST /v1/search   {"queries": ["who ...?"], "k": 10}  ->  per query its hits (passage, score, view, snippet),
                      and what answered: version, encoder, coverage, exact
    GET  /readyz      200 once a real search has been answered over every passage of the manifest, else 503
    GET  /livez       200 while the process answers

Errors are {"error": {"code", "field", "message", "hint"}} with a 4xx or 503/504 status.
"""

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from ray import serve

from mvr_ray import __version__
from mvr_ray.config import RunConfig
from mvr_ray.errors import ConfigError, CoverageError, MvrRayError
from mvr_ray.serving.service import RequestError, SearchRequest, SearchResponse, SearchService

T = TypeVar("T")
log = logging.getLogger(__name__)

_POLL_S = 0.2
_CODES = {"missing": "missing_field", "extra_forbidden": "unknown_field", "json_invalid": "not_json"}


def create_app(service: SearchService) -> FastAPI:
    """The ASGI app over one service; needs no Ray."""
    api = FastAPI(title="mvr_ray", version=__version__)
    limits = service.limits

    @api.middleware("http")
    async def bounded(request: Request, proceed: Callable[[Request], Awaitable[Response]]) -> Response:
        length = request.headers.get("content-length", "0")
        if length.isdigit() and int(length) > limits.max_body_bytes:
            hint = f"send at most {limits.max_body_bytes} bytes (serve.max_body_bytes)"
            return _response(RequestError(413, "body_too_large", "", f"the body has {length} bytes", hint))
        return await proceed(request)

    @api.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Response:
        return _response(_explain(error))

    @api.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> Response:
        return _response(error)

    @api.exception_handler(MvrRayError)
    async def failed(_: Request, error: MvrRayError) -> Response:
        log.warning("search failed", exc_info=error)
        code = "not_covered" if isinstance(error, CoverageError) else "unavailable"
        return _response(RequestError(503, code, "", str(error), "try again; see GET /readyz"))

    @api.post("/v1/search")
    async def search(request: SearchRequest) -> SearchResponse:
        return await _in_time(lambda: service.search(request), request.timeout_ms or limits.timeout_ms)

    @api.get("/readyz")
    async def ready() -> Response:
        answer = await _in_time(service.ready, limits.timeout_ms)
        whole = answer.passages_searched == answer.passages_total
        told = {"ready": whole, "index": answer.index, "version": answer.version, "coverage": answer.coverage_share}
        return JSONResponse(told, status_code=200 if whole else 503)

    @api.get("/livez")
    async def live() -> dict[str, Any]:
        return {"live": True, "version": __version__}

    return api


async def _in_time(work: Callable[[], T], timeout_ms: int) -> T:
    try:
        return await asyncio.wait_for(asyncio.to_thread(work), timeout_ms / 1000)
    except TimeoutError:
        message = f"no answer within {timeout_ms} ms"
        raise RequestError(504, "timeout", "", message, "send fewer queries, or raise serve.timeout_ms") from None


def _response(error: RequestError) -> Response:
    return JSONResponse(error.body(), status_code=error.status)


def _explain(error: RequestValidationError) -> RequestError:
    """The first problem that pydantic names, in our words."""
    problem = error.errors()[0]
    place = [str(part) for part in problem["loc"][1:] if not str(part).startswith("list[")]
    if place[:1] == ["queries"] and problem["type"] not in ("missing", "too_short"):
        message = "queries is neither a list of texts nor a list of vectors"
        return RequestError(422, "wrong_type", ".".join(place), message, 'send {"queries": ["a question"], "k": 10}')
    code = _CODES.get(problem["type"], "wrong_type" if problem["type"].endswith("_type") else "wrong_value")
    known = ", ".join(SearchRequest.model_fields)
    return RequestError(422, code, ".".join(place), problem["msg"], f"a request holds: {known}")


class SearchIngress:
    """The replica: opens the live version when it starts and answers HTTP from it."""

    def __init__(self, run: dict[str, Any], version: int | None = None) -> None:
        from mvr_ray.distributed.router import open_router

        config = RunConfig.model_validate(run)
        self._held = ExitStack()
        opened = open_router(config, version, timeout_s=config.serve.timeout_ms / 1000)
        router = self._held.enter_context(opened)
        self.service = SearchService(router, config.serve)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self.service)

    def check_health(self) -> None:
        self.service.ready()


def deploy(run: RunConfig, version: int | None = None, name: str = "mvr_ray") -> str:
    """Put the live version on HTTP at `serve.host:serve.port` of the connected cluster; returns the address."""
    if run.serve.max_k < run.retrieve.k:
        raise ConfigError(f"serve.max_k ({run.serve.max_k}) is below retrieve.k ({run.retrieve.k}); raise it")
    serve.start(http_options={"host": run.serve.host, "port": run.serve.port})
    replica = serve.deployment(serve.ingress()(SearchIngress)).options(  # type: ignore[missing-argument]
        name="search", ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=64, health_check_period_s=10
    )
    serve.run(replica.bind(run.model_dump(mode="json"), version), name=name, route_prefix="/")
    return f"http://{run.serve.host}:{run.serve.port}"


def serve_until_interrupted(run: RunConfig, version: int | None, say: Callable[[str], None]) -> None:
    """Deploy and stay until SIGINT or SIGTERM; then take the app down again. A second signal changes nothing."""
    from mvr_ray.distributed.session import connect

    asked: list[int] = []
    before: dict[int, Any] = {}
    with connect(run.resources):
        try:
            say(f"serving on {deploy(run, version)}: POST /v1/search, GET /readyz, GET /livez; Ctrl-C stops")
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, lambda got, _: asked.append(got))
            while not asked:
                time.sleep(_POLL_S)
            say("stopping")
        finally:
            serve.shutdown()
            for number, handler in before.items():
                signal.signal(number, handler)
