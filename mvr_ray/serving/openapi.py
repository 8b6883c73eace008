"""Describes the errors of each route and the limits of this server for OpenAPI."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI

from mvr_ray.config import ServeConfig
from mvr_ray.serving.schemas import ErrorResponse, Readiness

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
_SLOT = (401, 503, 504)


def error_responses(*statuses: int, in_slot: bool = True) -> dict[int | str, dict[str, Any]]:
    """The refusals of a route: those named, those of any body, and those of one that needs a token and a slot."""
    told = sorted({*statuses, *_BODY, *(_SLOT if in_slot else ())})
    return {status: {"model": ErrorResponse, "description": _MEANINGS[status]} for status in told}


def readiness_responses() -> dict[int | str, dict[str, Any]]:
    told = {"model": Readiness | ErrorResponse, "description": "Not every passage was searched."}
    return error_responses(504, in_slot=False) | {503: told}


def describe_limits(api: FastAPI, limits: ServeConfig) -> None:
    """Put the limits of this very server into the app's description, where a schema can say them."""
    describe = api.openapi

    def described() -> dict[str, Any]:
        if api.openapi_schema is None:
            _add_limits(describe()["components"]["schemas"], limits)
        return describe()

    api.openapi = described


def _add_limits(schemas: Mapping[str, Any], limits: ServeConfig) -> None:
    search, explain = schemas["SearchRequest"]["properties"], schemas["ExplainRequest"]["properties"]
    for sized in (search["k"], explain["k"]):
        sized.update(minimum=1, maximum=limits.max_k)
    search["min_coverage"].update(minimum=0, maximum=1)
    for one in search["timeout_ms"]["anyOf"]:
        if one["type"] == "integer":
            one.update(minimum=1, maximum=limits.timeout_ms)
    search["queries"]["maxItems"] = explain["questions"]["maxItems"] = limits.max_batch
    explain["passages"]["maxItems"] = limits.max_k
