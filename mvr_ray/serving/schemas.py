"""Defines the requests, their limits, the responses and the errors of the HTTP API and of the in-process client.

A request is read from bytes strictly: UTF-8, finite numbers, no unknown field. A wrong one is answered by {"error":
{"code", "field", "message", "hint"}}, with the code for programs and the dotted place of the field.
"""

import dataclasses
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from mvr_ray.config import DenseWeight, ServeConfig
from mvr_ray.errors import (
    CoverageError,
    ExternalEncoderError,
    FilterError,
    MvrRayError,
    OverloadedError,
    PublishConflictError,
)
from mvr_ray.types import Exactness, ShardState
from mvr_ray.versions import VersionInfo

M = TypeVar("M", bound=BaseModel)

LONGEST_RETRY_S = 60
MAX_SENT = 32
"""Limit of the passages that one search may send with texts or fields, in multiples of `serve.max_k`."""
_NO_LIMITS = {
    "max_k": 1_000_000,
    "max_query_chars": 10_000_000,
    "max_batch": 256,
    "timeout_ms": 3_600_000,
}
_CODES = {
    "missing": "missing_field",
    "extra_forbidden": "unknown_field",
    "unexpected_keyword_argument": "unknown_field",
}
_BRANCHES = ("str", "constrained-float")
"""How pydantic names branches of a union, which no request holds."""
_KEY_END = re.compile(rb'"\s*:')


class RequestModel(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


E = TypeVar("E")
FailFastList = Annotated[list[E], Field(fail_fast=True)]
"""A list whose validation ends at the first wrong element: pydantic would report every one of a body of them."""
Hybrid = DenseWeight | Literal["rrf", "off"] | None


class SearchRequest(RequestModel):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"queries": ["Who built the tower?"], "k": 5},
                {"queries": [[0.1, -0.2, 0.3]], "k": 10, "text": False, "timeout_ms": 500, "min_coverage": 0.9},
                {"queries": ["Who built it?"], "filter": {"year": {"gte": 1958}, "source": "a"}, "fields": ["year"]},
            ]
        }
    )

    queries: Annotated[FailFastList[str] | FailFastList[FailFastList[float]], Field(min_length=1)]
    """Texts, or query vectors of the index's dimension; one kind a request."""
    k: int = 10
    """Distinct passages a query."""
    text: bool = True
    """Send passage texts and snippets with the hits."""
    timeout_ms: int | None = None
    """Time for the answer, at most the server's own (`serve.timeout_ms`), which is the default."""
    min_coverage: float = 1.0
    """The share of the passages that must be searched; less is an error, not a short answer."""
    encoder_fingerprint: str | None = None
    """The encoder that made the vectors, or that the texts are for; another index encoder is a 409."""
    version: Annotated[int, Field(ge=1)] | None = None
    """An index version; absent: the one that the server answers from. Another one is opened beside it."""
    filter: dict[str, Any] | None = None
    """Search only passages whose fields pass it. Keys are fields of the corpus, `id` or `title`, each with a value or
    with comparisons: eq, ne, gt, gte, lt, lte, in, nin, exists. Several keys all hold; `and` and `or` take lists of
    filters, `not` takes one. A passage without a field passes only ne, nin, exists: false, and not."""
    fields: FailFastList[str] = Field(default_factory=list)
    """Fields of the corpus to send with each hit."""
    hybrid: Hybrid = None
    """Score by BM25 + so much times the dense score; "rrf": by reciprocal ranks in both; "off": by the dense score
    alone, as vectors always are; absent: as the server's run file says (`search.hybrid`)."""

    @property
    def timeout_s(self) -> float | None:
        """The request's own time; None if it has none, or an invalid one."""
        return None if self.timeout_ms is None or self.timeout_ms < 1 else self.timeout_ms / 1000

    def check(self, limits: ServeConfig) -> None:
        """Refuse what the run file forbids, before any index is open. Raises RequestError."""
        _check_range("k", "k", self.k, limits.max_k, f"ask for 1 to {limits.max_k} passages (serve.max_k)")
        if self.timeout_ms is not None:
            hint = f"give 1 to {limits.timeout_ms} ms (serve.timeout_ms), or leave it out"
            _check_range("timeout", "timeout_ms", self.timeout_ms, limits.timeout_ms, hint)
        if not 0 <= self.min_coverage <= 1:
            message = f"min_coverage is {self.min_coverage:g}"
            hint = "give a share from 0 to 1"
            raise RequestError(422, "coverage_out_of_range", "min_coverage", message, hint)
        if self.hybrid not in (None, "off") and not isinstance(self.queries[0], str):
            hint = 'send texts, or leave "hybrid" out'
            raise RequestError(422, "hybrid_needs_texts", "hybrid", "vectors have no words", hint)
        _check_count("queries", self.queries, limits)
        if (self.text or self.fields) and (most := self.k * len(self.queries)) > limits.max_k * MAX_SENT:
            message = f"{len(self.queries)} queries with k {self.k} are up to {most} passages with texts or fields"
            hint = f"ask for at most {limits.max_k * MAX_SENT} ({MAX_SENT} x serve.max_k), or for neither"
            raise RequestError(422, "passages_out_of_range", "k", message, hint)
        _check_texts("query", "queries", self.queries, limits)


class ExplainRequest(RequestModel):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"questions": ["Who built it?", "When was it built?"], "k": 3},
                {"questions": ["Who built it?"], "passages": ["tower_4"]},
            ]
        }
    )

    questions: Annotated[FailFastList[str], Field(min_length=1)]
    passages: FailFastList[str] = Field(default_factory=list)
    """Passage ids, at most `serve.max_k`; without any, the best `k` hits of each question are explained."""
    k: int = 3
    """Explained hits a question, if no passages are named; times the questions, at most `serve.max_k`."""
    encoder_fingerprint: str | None = None
    """The encoder that the questions are for; another index encoder is a 409."""
    version: Annotated[int, Field(ge=1)] | None = None
    """An index version; absent: the one that the server answers from. Another one is opened beside it."""
    hybrid: Hybrid = None
    """As in a search, for the hits; the words of each passage are scored, too."""

    def check(self, limits: ServeConfig) -> None:
        """Refuse what the run file forbids, before any index is open. Raises RequestError."""
        _check_texts("question", "questions", self.questions, limits)
        _check_count("questions", self.questions, limits)
        hint = f"ask for 1 to {limits.max_k} passages (serve.max_k)"
        _check_range("k", "k", self.k, limits.max_k, hint)
        if len(self.passages) > limits.max_k:
            message = f"{len(self.passages)} passages in one request"
            raise RequestError(422, "passages_out_of_range", "passages", message, hint)
        if not self.passages and (most := self.k * len(self.questions)) > limits.max_k:
            message = f"{len(self.questions)} questions with k {self.k} are up to {most} passages"
            raise RequestError(422, "passages_out_of_range", "k", message, f"{hint}, or fewer questions")


class EmbeddingsRequest(RequestModel):
    """A request in the shape of OpenAI's: vectors of the index's encoder, as for questions."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"input": ["Who built it?"], "encoding_format": "float"}]}
    )

    model: str | None = None
    """The encoder's name, its fingerprint, or NAME/FINGERPRINT; another one is a 404; absent: the index's encoder."""
    input: Annotated[str | FailFastList[str] | FailFastList[int] | FailFastList[FailFastList[int]], Field(min_length=1)]
    """One text or several. Token numbers are refused: they belong to another tokenizer."""
    encoding_format: Literal["float", "base64"] = "float"
    """`base64`: the bytes of little-endian float32."""
    dimensions: int | None = None
    """The vector's length; only the index's own."""
    user: str | None = None
    """Not used."""

    def texts(self, limits: ServeConfig) -> list[str]:
        """Return the texts to embed. Raises RequestError for what the run file forbids, and for token numbers."""
        texts = [self.input] if isinstance(self.input, str) else self.input
        _check_count("input", texts, limits, "texts")
        for place, text in enumerate(texts):
            if not isinstance(text, str):
                hint = "send texts; the server has a tokenizer of its own"
                raise RequestError(422, "not_a_text", f"input.{place}", "token numbers cannot be embedded", hint)
        _check_texts("text", "input", texts, limits)
        return [text for text in texts if isinstance(text, str)]


def _check_range(name: str, field: str, value: int, highest: int, hint: str) -> None:
    if not 1 <= value <= highest:
        raise RequestError(422, f"{name}_out_of_range", field, f"{field} is {value}", hint)


def _check_count(field: str, values: Sequence[object], limits: ServeConfig, noun: str | None = None) -> None:
    """Raise RequestError for too many values. `noun` names them in the error; absent: the field."""
    if len(values) > limits.max_batch:
        noun = noun or field
        message, hint = f"{len(values)} {noun} in one request", f"send at most {limits.max_batch} (serve.max_batch)"
        raise RequestError(422, f"too_many_{noun}", field, message, hint)


def _check_texts(name: str, field: str, values: Sequence[object], limits: ServeConfig) -> None:
    """Raise RequestError for the first text that cannot be embedded within the limits."""
    for place, text in enumerate(values):
        if not isinstance(text, str):
            continue
        at = f"{field}.{place}"
        if len(text) > limits.max_query_chars:
            hint = f"send at most {limits.max_query_chars} (serve.max_query_chars)"
            raise RequestError(422, f"{name}_too_long", at, f"the {name} has {len(text)} characters", hint)
        check_is_text(text, at)
        if not any(_is_readable(char) for char in text):
            raise RequestError(422, f"empty_{name}", at, f"the {name} is empty", "send a text with words in it")


def _is_readable(char: str) -> bool:
    """Return whether it is a letter, number, punctuation or symbol: BERT tokenizers drop others, and the replacement
    character."""
    return unicodedata.category(char)[0] in "LNPS" and char != "\ufffd"


def without_limits(limits: ServeConfig) -> ServeConfig:
    """Return the limits of a search in the caller's process, in place of a server's."""
    return limits.model_copy(update=_NO_LIMITS)


class Snippet(BaseModel):
    """A piece text[start:stop] of the passage; with `start` and `stop` 0 its title, if a view stands for that."""

    start: int
    stop: int
    text: str


FieldContent = bool | int | float | str | list[str]


class PassageHit(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    score: float
    view: int
    feedback: bool
    title: str | None = None
    text: str | None = None
    snippet: Snippet | None = None
    fields: dict[str, FieldContent | None] | None = None
    """Those that the request names; null where the passage lacks one. Dates and timestamps are ISO 8601."""
    lexical: float | None = None
    """Of a hybrid search with `text`: the BM25 score."""
    dense: float | None = None
    """Of a hybrid search with `text`: the score of the view."""

    def row(self, **place: Any) -> dict[str, Any]:
        """Return the hit as a flat row after its place. A field of the name of another column, such as `score`, is the
        column `fields.score`."""
        row = {**place, "id": self.id, "score": self.score, "title": self.title}
        row |= {"snippet": self.snippet and self.snippet.text, "text": self.text, "view": self.view}
        fields = self.fields or {}
        return row | {f"fields.{name}" if name in row else name: value for name, value in fields.items()}


class Coverage(BaseModel):
    """How many of the manifest's passages were searched, and the state of each shard."""

    share: float
    passages_searched: int
    passages_total: int
    shards: list[ShardState]


class SearchResponse(BaseModel):
    index: str
    version: int
    encoder_fingerprint: str
    coverage: Coverage
    exact: Exactness
    took_ms: float
    results: list[list[PassageHit]]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The hits of all queries as flat rows, for a frame: query (its number from 0), rank, id, score, title,
        snippet, text, view, and each field that the request names.

            pandas.DataFrame(client.search(questions).rows)
        """
        return [
            hit.row(query=number, rank=rank)
            for number, hits in enumerate(self.results)
            for rank, hit in enumerate(hits, 1)
        ]


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class TokenUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsResponse(BaseModel):
    """`model` is NAME/FINGERPRINT of the encoder."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: TokenUsage


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
    fields: dict[str, FieldContent] = Field(default_factory=dict)


class Freshness(BaseModel):
    """How old the changes are that answers do and do not include."""

    oldest_change_s: float
    """Age of the oldest change that answers do not include yet; 0 if there is none."""
    newest_passage_s: float
    """Age of the newest change that answers include."""
    waiting_files: int
    """Change files of `follow.source` that answers do not include yet."""


class ExampleQueries(BaseModel):
    """Texts to search for: questions that came with the corpus, else titles of its passages."""

    queries: list[str]


class Readiness(BaseModel):
    """`ready`: a real search has just covered every passage of the version, whose corpus and encoder are there, and the
    words that `search.hybrid` needs. A server that cannot follow a newer version is ready: it answers from its own."""

    ready: bool
    index: str
    version: int
    coverage: float
    shards: list[ShardState] = Field(default_factory=list)
    problems: list[str] = Field(default_factory=list)
    """Parts of corpus and encoder that are missing in the store or cannot be opened, and words that searches need."""
    failure: str = ""
    """Why the server could not follow the newest version at its last try; empty if it could."""
    failed_version: int | None = None
    """The version that could not be followed; absent without a failure, or if the versions could not be listed."""
    freshness: Freshness | None = None
    """Absent if it was not measured yet."""


class Liveness(BaseModel):
    """`version` is the program's."""

    live: bool
    version: str


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
    fields: dict[str, str] = Field(default_factory=dict)
    """Types of the passages' fields by name, which a search may filter by and return."""
    index_params: dict[str, Any]
    recall: float | None
    metrics: dict[str, float]
    dirty_share: float | None
    shard_list: list[ShardContent]


class ErrorDetail(BaseModel):
    code: str
    """For programs; it does not change."""
    field: str
    """The part of the request that is wrong; empty if it is no part."""
    message: str
    hint: str
    """What to do."""


class ErrorResponse(BaseModel):
    error: ErrorDetail


@dataclasses.dataclass(eq=False)
class RequestError(Exception):
    """A request that cannot be answered: HTTP status, a code for programs, the field, and what to do."""

    status: int
    code: str
    field: str
    message: str
    hint: str
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    retry_after_s: dataclasses.InitVar[float | None] = None
    """Gives the header Retry-After."""

    def __post_init__(self, retry_after_s: float | None) -> None:
        if retry_after_s is not None:
            self.headers = {**self.headers, "retry-after": str(retry_seconds(retry_after_s))}

    def __str__(self) -> str:
        return f"{self.field}: {self.message}; {self.hint}" if self.field else f"{self.message}; {self.hint}"

    def in_process(self) -> str:
        """Return the text for a caller in this process, which no setting of the server limits."""
        return re.sub(r" \(serve\.\w+\)", "", f"{self.message}; {self.hint}")

    def body(self) -> bytes:
        """Return JSON, escaped to ASCII: a message may quote half a surrogate pair."""
        detail = ErrorDetail(code=self.code, field=self.field, message=self.message, hint=self.hint)
        return json.dumps(ErrorResponse(error=detail).model_dump()).encode("ascii")


def retry_seconds(wait_s: float) -> int:
    """Return the whole seconds of a Retry-After header: an expected wait, at least 1 s and at most a minute."""
    return max(1, min(LONGEST_RETRY_S, math.ceil(wait_s)))


def to_request_error(error: MvrRayError) -> RequestError:
    """Return the HTTP error for an error of this package."""
    if isinstance(error, PublishConflictError):
        return RequestError(409, "publish_conflict", "", str(error), "see GET /v1/versions")
    if isinstance(error, ExternalEncoderError):
        message, _, hint = str(error).partition("; ")
        return RequestError(422, "external_encoder", "", message, hint)
    if isinstance(error, FilterError):
        message, _, hint = str(error).partition("; ")
        return RequestError(422, "wrong_filter", "filter", message, hint)
    if isinstance(error, OverloadedError):
        hint = "ask again after Retry-After"
        return RequestError(503, "overloaded", "", str(error), hint, retry_after_s=error.retry_after_s)
    code = "not_covered" if isinstance(error, CoverageError) else "unavailable"
    return RequestError(503, code, "", str(error), "try again; see GET /readyz", retry_after_s=1)


def parse_whole_number(text: str) -> str:
    """Return a whole number of a path; 1.0, 1_0 and 01 are refused."""
    if not re.fullmatch("-?(0|[1-9][0-9]*)", text, re.ASCII):
        raise PydanticCustomError("int_type", "a version is a whole number, not {text}", {"text": repr(text[:80])})
    return text


def parse_json(model: type[M], body: bytes, headers: Mapping[str, str]) -> M:
    """Parse the request in a JSON body; neither `true` nor `"5"` is a number. Raises RequestError (415, 422)."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        message = f"the content type is {kind[:80]!r}" if kind else "the content type is missing"
        raise RequestError(415, "wrong_content_type", "", message, "send the header `Content-Type: application/json`")
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        hint = "send the body as it is, without the header `Content-Encoding`"
        raise RequestError(415, "wrong_content_encoding", "", f"the content encoding is {encoding[:80]!r}", hint)
    try:
        request = model.model_validate_json(body, strict=True)
    except ValidationError as error:
        raise first_problem(error.errors(include_url=False, include_input=False), model.model_fields) from None
    if len(_KEY_END.findall(body)) > len(request.model_fields_set):  # nested keys, one twice, or a text that looks so
        json.loads(body, object_pairs_hook=_require_distinct_keys, parse_int=str)
    return request


def _require_distinct_keys(pairs: list[tuple[str, Any]]) -> None:
    """Raise RequestError for an object of JSON that has a key twice, of which parsers keep the last one."""
    if len(dict(pairs)) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        hint = "send each key of an object once; several conditions for one field of a filter go into one object"
        raise RequestError(422, "repeated_field", key[:80], f"{key[:80]!r}: the key is there more than once", hint)


def validate(model: type[M], /, **values: Any) -> M:
    """Make a request from Python values. Raises RequestError."""
    for name, value in values.items():
        if isinstance(value, bool) and model.model_fields[name].annotation is not bool:  # pydantic takes it as 0 or 1
            raise RequestError(422, "wrong_type", name, f"{name} is {value}", "True and False are no values of it")
    try:
        request = model.model_validate(values)
    except ValidationError as error:
        raise first_problem(error.errors(include_url=False), model.model_fields) from None
    for name, value in request:
        for i, text in enumerate(value if isinstance(value, list) else ()):
            check_is_text(text, f"{name}.{i}")
        check_is_text(value, name)
    return request


def check_is_text(value: Any, field: str) -> None:
    """Raise RequestError for a string that UTF-8 cannot encode."""
    if isinstance(value, str) and not is_text(value):
        hint = "decode the bytes that it came from as UTF-8"
        raise RequestError(422, "not_text", field, "the text holds half of a surrogate pair", hint)


def is_text(value: str) -> bool:
    """Return whether UTF-8 can encode a string: half of a surrogate pair cannot be."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def first_problem(problems: Sequence[Mapping[str, Any]], fields: Iterable[str]) -> RequestError:
    """Return the error for the first problem that pydantic names; `fields` are those of a body. It names the value
    where the problem has one, as those of Python values do."""
    problem = next((one for one in problems if one["type"] == "finite_number"), problems[0])
    parts = [str(part) for part in problem["loc"] if part not in _BRANCHES]
    kind, field = problem["type"], ".".join(part for part in parts if not part.startswith("list["))
    if kind == "finite_number":
        return RequestError(422, "not_finite", field, "the number is not finite", "send finite numbers")
    if kind == "json_invalid":
        return RequestError(422, "not_json", "", problem["msg"], "send one JSON object in UTF-8")
    if field.split(".")[0] == "queries" and kind not in ("missing", "too_short"):
        message = "queries is neither a list of texts nor a list of vectors"
        hint = 'send {"queries": ["a question"], "k": 10}; one vector is sent as [vector]'
        return RequestError(422, "wrong_type", field, message, hint)
    value = f"{problem['input']!r:.60}" if "input" in problem else ""
    if field == "input" and kind not in ("missing", "too_short"):
        message = f"input is {value}{', ' if value else ''}neither a text nor a list of texts"
        return RequestError(422, "wrong_type", "input", message, 'send {"input": ["a text"]}')
    if field.split(".")[0] == "hybrid":
        message = f"hybrid is {value}{', ' if value else ''}neither a number from 0 to 1e20 nor rrf or off"
        return RequestError(422, "wrong_value", "hybrid", message, 'give a number such as 30, "rrf" or "off", or none')
    if field == "filter":
        hint = 'give one such as {"year": {"gte": 1958}}, or leave it out'
        return RequestError(422, "wrong_type", field, "a filter is an object of fields and conditions", hint)
    if kind == "too_short" and field == "input":
        return RequestError(422, "empty_text", field, "there is no text in input", "send a text with words in it")
    if kind == "too_short":  # every limit of that kind is 1
        return RequestError(422, "wrong_value", field, f"{field} is empty", "give at least one")
    code = _CODES.get(kind, "wrong_type" if kind.endswith("_type") else "wrong_value")
    if value and code.startswith("wrong"):
        return RequestError(422, code, field, f"{field} is {value}", problem["msg"].replace("Input should", "it must"))
    hint = f"a request holds: {', '.join(fields)}" if fields else "see GET /openapi.json"
    message = f"{field}: {problem['msg']}" if field else problem["msg"]
    return RequestError(422, code, field, message, hint)
