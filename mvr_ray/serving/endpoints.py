"""Describes each request to a search service once, for HTTP and for calls within the process.

A function here has the arguments of the client's method, and builds the request from them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from mvr_ray.explanation import Explanation
from mvr_ray.serving import schemas
from mvr_ray.serving.explain import ExplainRequest
from mvr_ray.serving.manifest_payload import PublishRequest
from mvr_ray.serving.schemas import (
    PassageResponse,
    Readiness,
    SearchRequest,
    SearchResponse,
    VersionDetail,
    VersionInfo,
    VersionList,
)
from mvr_ray.serving.service import SearchService
from mvr_ray.store.manifest import Manifest
from mvr_ray.types import FloatArray

A = TypeVar("A", bound=BaseModel)
Queries = Sequence[str] | Sequence[Sequence[float]] | FloatArray


@dataclass(frozen=True)
class EndpointRequest(Generic[A]):
    """One request. `work(service, seconds left)` is the same as method, path and body over HTTP."""

    method: str
    path: str
    response: type[A]
    work: Callable[[SearchService, float], A]
    body: BaseModel | None = None
    timeout_s: float | None = None
    """Time for all attempts; None: the client's."""
    statuses: tuple[int, ...] = (200,)
    """Those that carry a response of this type."""
    repeatable: bool = True
    """Sending it twice does what sending it once does."""


def search_request(
    queries: Queries,
    k: int = 10,
    *,
    text: bool = True,
    min_coverage: float = 1.0,
    version: int | None = None,
    encoder_fingerprint: str | None = None,
    timeout_s: float | None = None,
) -> EndpointRequest[SearchResponse]:
    """The best `k` passages of each query: texts, or vectors_QD of the index's encoder."""
    body = schemas.validate(
        SearchRequest,
        queries=list(queries) if isinstance(queries, Sequence) else queries.tolist(),
        k=k,
        text=text,
        min_coverage=min_coverage,
        version=version,
        encoder_fingerprint=encoder_fingerprint,
    )
    return EndpointRequest(
        "POST", "/v1/search", SearchResponse, lambda s, left_s: s.search(body, left_s), body, timeout_s
    )


def explain_request(
    questions: Sequence[str],
    passages: Sequence[str] = (),
    k: int = 3,
    *,
    version: int | None = None,
    encoder_fingerprint: str | None = None,
    timeout_s: float | None = None,
) -> EndpointRequest[Explanation]:
    """Every view of the named passages, or of each question's best `k`, with every question."""
    body = schemas.validate(
        ExplainRequest,
        questions=questions,
        passages=passages,
        k=k,
        version=version,
        encoder_fingerprint=encoder_fingerprint,
    )
    return EndpointRequest(
        "POST", "/v1/explain", Explanation, lambda s, left_s: s.explain(body, left_s), body, timeout_s
    )


def passage_request(passage_id: str, *, timeout_s: float | None = None) -> EndpointRequest[PassageResponse]:
    """One passage as it was indexed."""
    # Dots too: as a part of a path, `.` and `..` would mean folders.
    path = "/v1/passages/" + quote(passage_id, safe="", errors="surrogatepass").replace(".", "%2E")
    return EndpointRequest("GET", path, PassageResponse, lambda s, _: s.passage(passage_id), timeout_s=timeout_s)


def versions_request(*, timeout_s: float | None = None) -> EndpointRequest[VersionList]:
    """The published versions, the live one, and the one that answers."""
    return EndpointRequest("GET", "/v1/versions", VersionList, lambda s, _: s.versions(), timeout_s=timeout_s)


def version_request(number: int, *, timeout_s: float | None = None) -> EndpointRequest[VersionDetail]:
    """One version, and how it was made."""
    path = f"/v1/versions/{number}"
    return EndpointRequest("GET", path, VersionDetail, lambda s, _: s.version(number), timeout_s=timeout_s)


def publish_request(
    manifest: Manifest | Mapping[str, Any], *, parent: int | None = None, timeout_s: float | None = None
) -> EndpointRequest[VersionInfo]:
    """Publish a manifest (or its JSON) whose files are all in the server's store. Needs an admin token.

    `parent` must be the newest version there (0: there is none); absent: the manifest's own parent. Sent twice, it
    is published once, so it may be sent again while the server reads files.
    """
    fields = asdict(manifest) if isinstance(manifest, Manifest) else dict(manifest)
    body = schemas.validate(PublishRequest, manifest=fields, parent=parent)
    return EndpointRequest(
        "POST", "/v1/versions", VersionInfo, lambda s, left_s: s.publish(body, left_s), body, timeout_s
    )


def rollback_request(number: int, *, timeout_s: float | None = None) -> EndpointRequest[VersionInfo]:
    """Publish the content of a version as a new one. Needs an admin token."""
    path, more = f"/v1/versions/{number}/rollback", {"timeout_s": timeout_s, "repeatable": False}
    return EndpointRequest("POST", path, VersionInfo, lambda s, _: s.rollback(number), **more)


def promote_request(number: int, *, timeout_s: float | None = None) -> EndpointRequest[Readiness]:
    """Answer from this version, the newest one, as soon as it is open. Needs an admin token."""
    path = f"/v1/versions/{number}/promote"
    return EndpointRequest("POST", path, Readiness, lambda s, _: s.promote(number), timeout_s=timeout_s)


def readiness_request(*, timeout_s: float | None = None) -> EndpointRequest[Readiness]:
    """Whether a real search has just covered every passage; `ready` false is an answer, not an error."""
    more = {"timeout_s": timeout_s, "statuses": (200, 503)}
    return EndpointRequest("GET", "/readyz", Readiness, lambda s, _: s.readiness(), **more)
