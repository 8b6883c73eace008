"""Separates the words of a command into overrides of the run file and the command's own, and checks some of them."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mvr_ray.errors import ConfigError


def arguments_and_overrides(
    command: str, words: Sequence[str], mandatory: Sequence[str], optional: Sequence[str], hint: str, *, show_only: bool
) -> tuple[dict[str, str], list[str]]:
    """Separate the command's own NAME=VALUE words from those that override a value of the run file, which have a
    section. `show_only` requires none."""
    overrides = [word for word in words if "." in word.partition("=")[0]]
    arguments = {key: value for key, _, value in (word.partition("=") for word in words) if "." not in key}
    unknown_keys = sorted(set(arguments) - {*mandatory, *optional})
    missing = [key for key in mandatory if not arguments.get(key)]
    if unknown_keys or (missing and not show_only):
        problem = f"{unknown_keys[0]}=... is not known" if unknown_keys else f"{missing[0]}=... is missing"
        raise ConfigError(f"{command}: {problem}; {hint}")
    return arguments, overrides


def question_and_overrides(command: str, words: Sequence[str], *, show_only: bool) -> tuple[str, list[str]]:
    """Separate the one question, which may hold any character, from the words that override a value of the run file.
    `show_only` requires no question."""
    from mvr_ray.config import RunConfig

    def is_override(word: str) -> bool:
        """Return whether a word begins as one; a value of several words needs the name of a section before it."""
        start = re.match(r"(\w+)\.[\w.]*=", word)
        return start is not None and (start[1] in RunConfig.model_fields or len(word.split()) == 1)

    overrides = [word for word in words if is_override(word)]
    questions = [word for word in words if word not in overrides]
    if len(questions) > 1 or not (questions or show_only):
        texts = f": {', '.join(map(repr, questions))}" if questions else ""
        raise ConfigError(
            f"{command}: {len(questions)} questions are given{texts}; give one, in quotes, and overrides as "
            f"section.key=value before or after it"
        )
    return "".join(questions), overrides


def require_writable(path: Path, argument: str) -> None:
    """Raise ConfigError for a folder, for a file in no folder, and for one that would be lost with a job's copy of its
    working directory; `argument` is the one that names it."""
    from mvr_ray.store.files import require_lasting

    require_lasting(path, argument)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ConfigError(f"{argument} cannot be written; name a file in a folder that exists")


def json_object(option: str, text: str) -> dict[str, Any]:
    """Parse the JSON object in an option's value. Raises ConfigError, also for a key that occurs twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"{option} has the key {key!r} twice; put both under one key, or use and")
        return dict(pairs)

    example = 'write it like {"year": 1958}'
    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{option} {text!r:.200} is not JSON ({error}); {example}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{option} {text!r:.200} is not a JSON object; {example}")
    return value
