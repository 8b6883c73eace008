"""Makes the run of an index: of a run file, or of what its store records; and replaces settings of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mvr_ray.api import rows
from mvr_ray.config import RunConfig, load_run, parse_run, resolve_path
from mvr_ray.errors import ConfigError, MissingInputError
from mvr_ray.store import manifest as manifests
from mvr_ray.store import paths
from mvr_ray.store.corpus import SETTINGS_OF_CHANGES
from mvr_ray.store.files import Store, address_name
from mvr_ray.store.run_file import load_run_at
from mvr_ray.store.update import parent_corpus


def read_run(
    path: str | Path, name: str | None, settings: Mapping[str, Mapping[str, Any]] | None
) -> tuple[RunConfig, bool]:
    """Return the run of the index that `path` names, as `Index.open` takes it, and whether a run file describes it."""
    location = absolute(path)
    text = location if str(path).startswith("~") else str(path)
    if address_name(text).endswith((".yaml", ".yml")):
        run = load_run_at(text)
        has_run_file, base = True, run.model_dump(mode="json", exclude_unset=True)
        if name not in (None, run.index.name):
            raise ConfigError(
                f"Index.open: {text} describes index {run.index.name!r}, not {name!r}; give the path of the store "
                f"with name=, or settings={{'index': {{'name': {name!r}}}}} for the other settings of this run file"
            )
    else:
        store = Store(text)
        run = load_run(store.local_path(paths.RUN_FILE)) if store.exists(paths.RUN_FILE) else None
        if run and name in (None, run.index.name):
            has_run_file, base = True, run.model_dump(mode="json", exclude_unset=True)
        else:
            has_run_file, base = False, _run_of_store(store, name)
        base["store"] = {"path": location}
    for section, values in sections(settings).items():
        base[section] = {**base.get(section, {}), **values}
    return parse_run(base, text), has_run_file


def with_settings(run: RunConfig, **sections: Mapping[str, Any]) -> RunConfig:
    """Return a run with settings of some sections replaced."""
    plain = run.model_dump(mode="json", exclude_unset=True)
    for name, values in sections.items():
        plain[name] = {**plain.get(name, {}), **rows.plain(dict(values))}
    return parse_run(plain, "Index")


def sections(settings: Mapping[str, Mapping[str, Any]] | None) -> dict[str, dict[str, Any]]:
    """Return a copy. Raises ConfigError for anything but sections of settings."""
    try:
        return {name: rows.plain(dict(values)) for name, values in (settings or {}).items()}
    except (AttributeError, TypeError, ValueError):
        example = '{"encoder": {"num_views": 4}}'
        raise ConfigError(f"settings is {settings!r:.60}; give sections of a run file, such as {example}") from None


def absolute(path: str | Path) -> str:
    if not isinstance(path, str | Path) or not str(path).strip():
        raise ConfigError(f"path is {path!r}, which names no store; name a folder, or '.' for the working folder")
    return str(path) if "://" in str(path) else str(resolve_path(str(path)).absolute())


def _run_of_store(store: Store, name: str | None) -> dict[str, Any]:
    """Return the settings of an index without a run file, as its live version and its corpus record them."""
    names = store.list(paths.INDEXES)
    if not names:
        problem = "does not exist" if store.is_local and not store.exists(".") else "holds no index"
        raise MissingInputError(
            f"{store.name} {problem}; correct the path, or make an index there: Index.build(passages, "
            f"path={store.name!r})"
        )
    if name is None and len(names) == 1:
        [name] = names
    if name not in names:
        problem = f"no index {name!r}" if name else "not exactly one index"
        known_names = ", ".join(names)
        raise MissingInputError(f"{store.name} holds {problem} (there are: {known_names}); give name=, or build one")
    live = manifests.read(store, name)
    counts = parent_corpus(store, live.corpus, name).info.counts
    from mvr_ray.index.base import default_factory  # imports numpy and compiled loops

    params, words = dict(live.index_params), dict[str, Any](lexical=live.lexical is not None)
    if params.get("factory") == default_factory(live.dimension):
        del params["factory"]  # another encoder may have another dimension, and its own default
    if live.lexical:
        from mvr_ray.distributed.indexing.lexical import language_of

        words["language"] = language_of(store, name, live.lexical.files)
    return {
        "prepare": {"corpus": live.corpus} | {key: counts[key] for key in SETTINGS_OF_CHANGES if key in counts},
        "encoder": {"name": live.encoder_name},
        "index": {
            **params,
            "name": name,
            "dtype": live.dtype,
            "encoder": live.encoder_fingerprint,
            **words,
            "prune_views": live.metrics.get("prune_views"),
        },
    }
