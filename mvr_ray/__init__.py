"""Multi-view passage retrieval: train, index, refine and search, on a laptop or on Ray.

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
    from mvr_ray.client import Client as Client
    from mvr_ray.config import load_run as load_run
    from mvr_ray.types import Passage as Passage

__version__ = "0.1.0"
__all__ = ["Client", "Encoder", "Index", "Passage", "load_run"]

_PATHS = {"Client": "client", "Encoder": "api.encoder", "Index": "api.index", "Passage": "types", "load_run": "config"}


def __getattr__(name: str) -> Any:
    if name not in _PATHS:
        raise AttributeError(f"module 'mvr_ray' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(import_module(f"mvr_ray.{_PATHS[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
