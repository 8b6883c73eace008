"""Retrieves passages by several views of each: train, index, refine and search, on a laptop or on Ray.

    from mvr_ray import Index

    index = Index.build(passages, model="all-MiniLM-L6-v2", path="wiki")
    index.search("When was the university founded?", k=5)

The public names are imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mvr_ray.api.encoder import Encoder as Encoder
    from mvr_ray.api.index import Index as Index
    from mvr_ray.client import AsyncClient as AsyncClient
    from mvr_ray.client import Client as Client
    from mvr_ray.client import ClientError as ClientError
    from mvr_ray.client import RefusedError as RefusedError
    from mvr_ray.client import UnavailableError as UnavailableError
    from mvr_ray.client import UnreachableError as UnreachableError
    from mvr_ray.config import load_run as load_run
    from mvr_ray.errors import ConfigError as ConfigError
    from mvr_ray.errors import DataError as DataError
    from mvr_ray.errors import MissingInputError as MissingInputError
    from mvr_ray.errors import MvrRayError as MvrRayError
    from mvr_ray.types import Passage as Passage
    from mvr_ray.types import Question as Question

__version__ = "0.1.0"
_NAMES = {
    "api.encoder": ("Encoder",),
    "api.index": ("Index",),
    "client": ("AsyncClient", "Client", "ClientError", "RefusedError", "UnavailableError", "UnreachableError"),
    "config": ("load_run",),
    "errors": ("ConfigError", "DataError", "MissingInputError", "MvrRayError"),
    "types": ("Passage", "Question"),
}
_PATHS = {name: path for path, names in _NAMES.items() for name in names}
__all__ = sorted(_PATHS)


def __getattr__(name: str) -> Any:
    if name not in _PATHS:
        raise AttributeError(f"module 'mvr_ray' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(f"mvr_ray.{_PATHS[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
