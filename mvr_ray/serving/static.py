"""Serves the search page: three files of this package, and nothing from elsewhere.

The page asks the same routes as every other client, so it needs a token where the server does; its own files do not.
"""

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import FastAPI, Response

TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
}
PATHS = ("/", *(f"/page/{name}" for name in TYPES if name != "index.html"))
_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def add_page(api: FastAPI) -> None:
    """Serve the page at `/`."""
    folder = files("mvr_ray.serving") / "page"
    for name, path in zip(TYPES, PATHS):
        api.add_api_route(path, _sender((folder / name).read_bytes(), TYPES[name]), include_in_schema=False)


def _sender(content: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(content, media_type=kind, headers=_HEADERS)

    return send
