"""Adapts a search server, or an index opened in this process, to other frameworks."""

from typing import Any

from mvr_ray.client import Client
from mvr_ray.errors import ConfigError
from mvr_ray.serving.schemas import PassageHit, SearchResponse

OWN_METADATA = ("snippet", "view", "index", "version")
"""Names that describe the search, or repeat the text: no model needs to read them."""


def require_client(client: object) -> Client:
    """Return a blocking client. Raises ConfigError for anything else, such as an `Index`."""
    if not isinstance(client, Client):
        hint = "give a Client: Client(URL) of a server, or Client.in_process(index.run) of an Index"
        raise ConfigError(f"client is of type {type(client).__name__}; {hint}")
    return client


def field_names(fields: Any) -> Any:
    """Return a list of several names, or of the one name given, as `Client.search` takes them."""
    return [fields] if isinstance(fields, str) else list(fields)


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
