"""Separates the `NAME=VALUE` arguments of a command into overrides of the run file and the command's own."""

from collections.abc import Sequence

from mvr_ray.errors import ConfigError


def named_arguments(
    command: str,
    words: list[str] | None,
    mandatory: Sequence[str],
    optional: Sequence[str],
    hint: str,
    *,
    show_only: bool,
) -> dict[str, str]:
    """The command's own NAME=VALUE words, those without a section. `show_only` requires none."""
    arguments = {key: value for key, _, value in (word.partition("=") for word in words or ()) if "." not in key}
    unknown = sorted(set(arguments) - {*mandatory, *optional})
    missing = [key for key in mandatory if not arguments.get(key)]
    if unknown or (missing and not show_only):
        wrong = f"{unknown[0]}=... is not known" if unknown else f"{missing[0]}=... is missing"
        raise ConfigError(f"{command}: {wrong}; {hint}")
    return arguments


def section_overrides(words: list[str] | None) -> list[str]:
    """The words that lay a value over the run file."""
    return [word for word in words or () if "." in word.partition("=")[0]]
