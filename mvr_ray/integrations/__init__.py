"""Adapts a search server, or an index opened in this process, to other frameworks."""

from typing import Any

from mvr_ray.serving.schemas import PassageHit, SearchResponse


def hit_metadata(answer: SearchResponse, hit: PassageHit) -> dict[str, Any]:
    """Return title, matching snippet, the view that won, the requested fields, and the index version."""
    return {
        "title": hit.title or "",
        "snippet": hit.snippet.text if hit.snippet else "",
        "view": hit.view,
        "index": answer.index,
        "version": answer.version,
        **(hit.fields or {}),
    }
