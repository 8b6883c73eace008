"""Defines the requests, responses and errors of the HTTP API and of the in-process client.

A request is read from bytes strictly: UTF-8, finite numbers, no field that is not known. What is wrong with one is told
as {"error": {"code", "field", "message", "hint"}}, the code for programs, the field by its dotted place.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mvr_ray.errors import CoverageError, MvrRayError, OverloadedError, PublishConflictError

M = TypeVar("M", bound=BaseModel)

_CODES = {
    "missing": "missing_field",
    "extra_forbidden": "unknown_field",
    "unexpected_keyword_argument": "unknown_field",
}


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class SearchRequest(RequestModel):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"queries": ["Who built the tower?"], "k": 5},
                {"queries": [[0.1, -0.2, 0.3]], "k": 10, "text": False, "timeout_ms": 500, "min_coverage": 0.9},
            ]
        }
    )

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
    encoder_fingerprint: str | None = None
    """The encoder that made the vectors, or that the texts are meant for; another index encoder is a 409."""
    version: Annotated[int, Field(ge=1)] | None = None
    """An index version; absent: the one that the server answers from. Another one is opened beside it."""


class Snippet(BaseModel):
    """A piece text[start:stop] of the passage; with `start` and `stop` 0 its title, where a view stands for that."""

    start: int
    stop: int
    text: str


class PassageHit(BaseModel):
    id: str
    score: float
    view: int
    feedback: bool
    title: str | None = None
    text: str | None = None
    snippet: Snippet | None = None


class Shard(BaseModel):
    """`state` is `searched`, or why not, with a `reason` where there is more to say."""

    shard: int
    passages: int
    state: str
    reason: str = ""


class Coverage(BaseModel):
    """How many of the manifest's passages were searched, and what became of each shard."""

    share: float
    passages_searched: int
    passages_total: int
    shards: list[Shard]


class Exact(BaseModel):
    """`certified`: the hits are those of exhaustive search over every passage's stored views, to the last tie.

    `method` tells what was searched, also where views were left out of the index, and within which bound. `rescored`
    passages, over all queries and shards, were scored exactly after a fast scan or an approximate index had proposed
    them. `recall` is an approximate index's share of exact search's passages, measured when it was built.
    """

    certified: bool
    method: str
    rounds: int
    rescored: int
    recall: float | None = None


class SearchResponse(BaseModel):
    index: str
    version: int
    encoder_fingerprint: str
    coverage: Coverage
    exact: Exact
    took_ms: float
    results: list[list[PassageHit]]


class PassageView(Snippet):
    """What one view stands for: a part of a passage's text, or its title."""

    view: int


class PassageResponse(BaseModel):
    """A passage as it was indexed. `views` are those that stand for a part of its text, or for its title."""

    index: str
    version: int
    id: str
    title: str
    text: str
    views: list[PassageView]


class Readiness(BaseModel):
    """`ready`: a real search has just covered every passage of the version."""

    ready: bool
    index: str
    version: int
    coverage: float
    shards: list[Shard] = Field(default_factory=list)


class Liveness(BaseModel):
    """`version` is the program's."""

    live: bool
    version: str


class VersionInfo(BaseModel):
    """One version of the index. `live` is the newest one; a server says in `serving` which one it answers from."""

    version: int
    parent: int
    operation: str
    created: str
    passages: int
    vectors: int
    shards: int
    encoder: str
    content: str
    live: bool


class VersionList(BaseModel):
    index: str
    live: int
    serving: int
    versions: list[VersionInfo]


class ShardContent(BaseModel):
    shard: int
    digest: str
    passages: int
    vectors: int
    bytes: int


class VersionDetail(VersionInfo):
    """A version with what its manifest says about how it was made."""

    similarity: str
    num_views: int
    dimension: int
    dtype: str
    corpus: str
    index_params: dict[str, Any]
    recall: float | None
    metrics: dict[str, float]
    dirty_share: float | None
    shard_list: list[ShardContent]


class ErrorDetail(BaseModel):
    code: str
    """For programs; it does not change."""
    field: str
    """The part of the request that is wrong, empty where it is none."""
    message: str
    hint: str
    """What to do."""


class ErrorResponse(BaseModel):
    error: ErrorDetail


class RequestError(Exception):
    """A request that cannot be answered as asked: HTTP status, a code for programs, the field, and what to do."""

    def __init__(
        self,
        status: int,
        code: str,
        field: str,
        message: str,
        hint: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(f"{field}: {message}; {hint}" if field else f"{message}; {hint}")
        self.status = status
        self.code = code
        self.field = field
        self.message = message
        self.hint = hint
        self.headers = dict(headers or {})

    def body(self) -> dict[str, dict[str, str]]:
        told = ErrorDetail(code=self.code, field=self.field, message=self.message, hint=self.hint)
        return ErrorResponse(error=told).model_dump()

    def encoded(self) -> bytes:
        """The body as JSON, escaped to ASCII: a message that quotes half a surrogate pair is still written."""
        return json.dumps(self.body()).encode("ascii")


def to_request_error(error: MvrRayError) -> RequestError:
    """A request that failed in our hands: what it means for the one who asked."""
    if isinstance(error, PublishConflictError):
        return RequestError(409, "publish_conflict", "", str(error), "see GET /v1/versions")
    if isinstance(error, OverloadedError):
        headers = {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}
        return RequestError(503, "overloaded", "", str(error), "ask again after Retry-After", headers)
    code = "not_covered" if isinstance(error, CoverageError) else "unavailable"
    return RequestError(503, code, "", str(error), "try again; see GET /readyz", {"retry-after": "1"})


def parse_json(model: type[M], body: bytes, content_type: str) -> M:
    """The request in a JSON body, where `true` is no number and `"5"` neither. Raises RequestError (415, 422)."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"the content type is {kind[:80]!r}" if kind else "the content type is missing"
        raise RequestError(415, "wrong_content_type", "", message, "send the header `Content-Type: application/json`")
    try:
        return model.model_validate_json(body, strict=True)
    except ValidationError as error:
        raise first_problem(error.errors(include_url=False, include_input=False), model.model_fields) from None


def validate(model: type[M], **values: Any) -> M:
    """A request from Python values. Raises RequestError."""
    try:
        request = model.model_validate(values)
    except ValidationError as error:
        raise first_problem(error.errors(include_url=False, include_input=False), model.model_fields) from None
    for name, value in request:
        for i, text in enumerate(value if isinstance(value, list) else ()):
            check_is_text(text, f"{name}.{i}")
        check_is_text(value, name)
    return request


def check_is_text(value: Any, field: str) -> None:
    """Raises RequestError for a string that no bytes stand for."""
    if isinstance(value, str) and not is_text(value):
        hint = "decode the bytes that it came from as UTF-8"
        raise RequestError(422, "not_text", field, "the text holds half of a surrogate pair", hint)


def is_text(value: str) -> bool:
    """Whether it can be written in UTF-8: half of a surrogate pair cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def first_problem(problems: Sequence[Mapping[str, Any]], fields: Iterable[str]) -> RequestError:
    """The error for the first problem that pydantic names; `fields` are those of a body."""
    problem = next((one for one in problems if one["type"] == "finite_number"), problems[0])
    kind, field = problem["type"], ".".join(str(part) for part in problem["loc"] if not str(part).startswith("list["))
    if kind == "finite_number":
        return RequestError(422, "not_finite", field, "the number is not finite", "send finite numbers")
    if kind == "json_invalid":
        return RequestError(422, "not_json", "", problem["msg"], "send one JSON object in UTF-8")
    if field.split(".")[0] == "queries" and kind not in ("missing", "too_short"):
        message = "queries is neither a list of texts nor a list of vectors"
        return RequestError(422, "wrong_type", field, message, 'send {"queries": ["a question"], "k": 10}')
    code = _CODES.get(kind, "wrong_type" if kind.endswith("_type") else "wrong_value")
    hint = f"a request holds: {', '.join(fields)}" if fields else "see GET /openapi.json"
    return RequestError(422, code, field, problem["msg"], hint)
