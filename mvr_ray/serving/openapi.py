"""What the app says about itself in /openapi.json: bodies that are read strictly, refusals, and how to show a token."""

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from mvr_ray.config import ServeConfig
from mvr_ray.serving.wire import ErrorAnswer, Readiness

_SCHEMAS = "#/components/schemas/"
_MEANINGS = {
    401: "No token, or one that this server does not know.",
    403: "The token may only read.",
    404: "There is no such passage or version.",
    408: "The body did not come in time.",
    409: "Another encoder made the index, or another publisher was first.",
    413: "The body is larger than serve.max_body_bytes.",
    415: "The body is not declared to be JSON.",
    422: "The request is wrong: `code` and `field` say where.",
    503: "Too busy, or too few passages could be searched; Retry-After says when to ask again.",
    504: "No answer in the time that was given.",
}
_BODY = (408, 413)
_PLACE = (401, 503, 504)


def documented(*statuses: int, place: bool = True) -> dict[int | str, dict[str, Any]]:
    """The refusals of a route: those named, those of any body, and those of one that needs a token and a place."""
    told = sorted({*statuses, *_BODY, *(_PLACE if place else ())})
    return {status: {"model": ErrorAnswer, "description": _MEANINGS[status]} for status in told}


def documented_readiness() -> dict[int | str, dict[str, Any]]:
    told = {"model": Readiness | ErrorAnswer, "description": "Not every passage was searched."}
    return documented(504, place=False) | {503: told}


def takes(model: type[BaseModel]) -> dict[str, Any]:
    """The body of a route that reads it itself."""
    content = {"application/json": {"schema": {"$ref": _SCHEMAS + model.__name__}}}
    return {"requestBody": {"required": True, "content": content}}


def describe(
    api: FastAPI,
    models: Sequence[type[BaseModel]],
    limits: ServeConfig,
    *,
    with_tokens: bool,
    open_paths: Sequence[str],
) -> None:
    """Have the app describe its own bodies, limits and tokens, too; `open_paths` are answered without one."""

    def described() -> dict[str, Any]:
        if api.openapi_schema is None:
            made = get_openapi(title=api.title, version=api.version, description=api.description, routes=api.routes)
            schemas = made.setdefault("components", {}).setdefault("schemas", {})
            for model in models:
                told = model.model_json_schema(ref_template=_SCHEMAS + "{model}")
                schemas |= told.pop("$defs", {}) | {model.__name__: told}
            _bounded(schemas, limits)
            if with_tokens:
                made["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
                made["security"] = [{"bearer": []}]
                for path in open_paths:
                    for operation in made["paths"].get(path, {}).values():
                        operation["security"] = []
            api.openapi_schema = made
        return api.openapi_schema

    api.openapi = described


def _bounded(schemas: Mapping[str, Any], limits: ServeConfig) -> None:
    """The limits of this very server, where a schema can say them."""
    search, explain = schemas["SearchRequest"]["properties"], schemas["ExplainRequest"]["properties"]
    for sized in (search["k"], explain["k"]):
        sized.update(minimum=1, maximum=limits.max_k)
    search["min_coverage"].update(minimum=0, maximum=1)
    for one in search["timeout_ms"]["anyOf"]:
        if one["type"] == "integer":
            one.update(minimum=1, maximum=limits.timeout_ms)
    search["queries"]["maxItems"] = explain["questions"]["maxItems"] = limits.max_batch
    explain["passages"]["maxItems"] = limits.max_k
