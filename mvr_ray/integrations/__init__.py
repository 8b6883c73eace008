"""Adapts a search server, or an index opened in this process, to other frameworks."""

from typing import Any

from mvr_ray.serving.schemas import PassageHit, SearchResponse


def hit_metadata(answer: SearchResponse, hit: PassageHit) -> dict[str, Any]:
    """Return title, matching snippet, the view that won, and the index version; requested fields replace those of
    their names."""
    return {
        "title": hit.title or "",
        "snippet": hit.snippet.text if hit.snippet else "",
        "view": hit.view,
        "index": answer.index,
        "version": answer.version,
        **(hit.fields or {}),
    }
