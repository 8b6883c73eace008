"""Builds the search application that a declarative Serve file imports: `mvr_ray.serving.serve_app:app`.

Serve's own HTTP options and replica counts stand in that file; the run file says what is searched. Such a Serve is
reached from other machines, so there must be a token.
"""

from pydantic import BaseModel, ConfigDict
from ray import serve

from mvr_ray.config import load_run
from mvr_ray.serving.auth import require_tokens
from mvr_ray.serving.replica import application, validated_tokens

ANYWHERE = "0.0.0.0"


class AppArgs(BaseModel):
    """The `args` of the application."""

    model_config = ConfigDict(extra="forbid")

    config: str
    """The run file, as every node finds it."""
    overrides: list[str] = []
    """`section.key=value` each, laid over the run file."""
    version: int | None = None
    """An index version to stay with; absent: the newest one, followed."""


def app(args: AppArgs) -> serve.Application:
    """Ray Serve calls this when the file is applied. ConfigError where the run file is wrong, or no token is known."""
    run = load_run(args.config, args.overrides)
    tokens = validated_tokens(run)
    require_tokens(ANYWHERE, tokens)
    return application(run, args.version, tokens)
