"""Everything that can be asked of a search service, told once for both ways of asking: over HTTP, or by a call."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from mvr_ray.explanation import Explanation
from mvr_ray.serving import wire
from mvr_ray.serving.explain import ExplainRequest
from mvr_ray.serving.offer import PublishRequest
from mvr_ray.serving.service import SearchService
from mvr_ray.serving.wire import (
    PassageResponse,
    Readiness,
    SearchRequest,
    SearchResponse,
    VersionDetail,
    VersionInfo,
    VersionList,
)
from mvr_ray.store.manifest import Manifest
from mvr_ray.types import FloatArray

A = TypeVar("A", bound=BaseModel)
Queries = Sequence[str] | Sequence[Sequence[float]] | FloatArray


@dataclass(frozen=True)
class Call(Generic[A]):
    """One thing to ask. `work(service, seconds left)` is the same as method, path and body over HTTP."""

    method: str
    path: str
    answer: type[A]
    work: Callable[[SearchService, float], A]
    body: BaseModel | None = None
    statuses: tuple[int, ...] = (200,)
    """Those that carry an answer."""
    repeatable: bool = True
    """Asking twice does what asking once does."""


def searching(
    queries: Queries,
    k: int,
    *,
    text: bool,
    min_coverage: float,
    version: int | None,
    encoder_fingerprint: str | None,
) -> Call[SearchResponse]:
    plain = queries if isinstance(queries, Sequence) else queries.tolist()
    fields = {"queries": plain, "k": k, "text": text, "min_coverage": min_coverage, "version": version}
    request = wire.make(SearchRequest, {**fields, "encoder_fingerprint": encoder_fingerprint})
    return Call("POST", "/v1/search", SearchResponse, lambda s, left_s: s.search(request, left_s), request)


def explaining(
    questions: Sequence[str], passages: Sequence[str], k: int, *, version: int | None, encoder_fingerprint: str | None
) -> Call[Explanation]:
    fields = {"questions": questions, "passages": passages, "k": k, "version": version}
    request = wire.make(ExplainRequest, {**fields, "encoder_fingerprint": encoder_fingerprint})
    return Call("POST", "/v1/explain", Explanation, lambda s, left_s: s.explain(request, left_s), request)


def reading(passage_id: str) -> Call[PassageResponse]:
    # Dots too: as a part of a path, `.` and `..` would mean folders.
    escaped = quote(passage_id, safe="", errors="surrogatepass").replace(".", "%2E")
    return Call("GET", f"/v1/passages/{escaped}", PassageResponse, lambda s, _: s.passage(passage_id))


def listing() -> Call[VersionList]:
    return Call("GET", "/v1/versions", VersionList, lambda s, _: s.versions())


def describing(version: int) -> Call[VersionDetail]:
    return Call("GET", f"/v1/versions/{version}", VersionDetail, lambda s, _: s.version(version))


def publishing(manifest: Manifest | Mapping[str, Any], parent: int | None) -> Call[VersionInfo]:
    # Asked twice it is published once, so it may be asked again while the server reads files.
    fields = asdict(manifest) if isinstance(manifest, Manifest) else dict(manifest)
    request = wire.make(PublishRequest, {"manifest": fields, "parent": parent})
    return Call("POST", "/v1/versions", VersionInfo, lambda s, left_s: s.publish(request, left_s), request)


def rolling_back(version: int) -> Call[VersionInfo]:
    path = f"/v1/versions/{version}/rollback"
    return Call("POST", path, VersionInfo, lambda s, _: s.rollback(version), repeatable=False)


def promoting(version: int) -> Call[Readiness]:
    return Call("POST", f"/v1/versions/{version}/promote", Readiness, lambda s, _: s.promote(version))


def probing() -> Call[Readiness]:
    return Call("GET", "/readyz", Readiness, lambda s, _: s.readiness(), statuses=(200, 503))
