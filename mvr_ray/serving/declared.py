"""The search application as a declarative Serve file names it: `import_path: mvr_ray.serving.declared:app`.

Serve's own HTTP options and replica counts stand in that file; the run file says what is searched.
"""

from pydantic import BaseModel, ConfigDict
from ray import serve

from mvr_ray.config import load_run
from mvr_ray.serving.app import SearchIngress


class Declared(BaseModel):
    """The `args` of the application."""

    model_config = ConfigDict(extra="forbid")

    config: str
    """The run file, as every node finds it."""
    overrides: list[str] = []
    """`section.key=value` each, laid over the run file."""
    version: int | None = None
    """An index version; absent: the one that is live when a replica starts."""


def app(args: Declared) -> serve.Application:
    """Ray Serve calls this when the file is applied. ConfigError where the run file is wrong."""
    run = load_run(args.config, args.overrides)
    replica = serve.deployment(serve.ingress()(SearchIngress)).options(  # type: ignore[missing-argument]
        name="search", ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=64, health_check_period_s=10
    )
    return replica.bind(run.model_dump(mode="json"), args.version)
