"""Runs the app on Ray Serve: replicas over the live version, started by a command or by a declarative Serve file.

The command puts HAProxy in front (`reverse_proxy`); Serve's own proxy then listens on the loopback, at a free port.

A Serve file imports `mvr_ray.serving.replica:app`. Serve's own HTTP options and replica counts stand in that file; the
run file says what is searched. Other machines reach such a Serve, so it needs a token.
"""

import asyncio
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import ray
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from ray import serve
from ray.exceptions import RayError
from ray.serve.schema import APIType

from mvr_ray import logs
from mvr_ray.config import RunConfig
from mvr_ray.deadline import Deadline
from mvr_ray.errors import ConfigError, ResourceError, first_line
from mvr_ray.serving.app import create_app
from mvr_ray.serving.auth import TokenStore, read_tokens, require_tokens
from mvr_ray.serving.catalog import VersionCatalog
from mvr_ray.serving.freshness import FreshnessMonitor
from mvr_ray.serving.metrics import Metrics
from mvr_ray.serving.proxy_limit import proxy_variables
from mvr_ray.serving.recall_monitor import RecallMonitor
from mvr_ray.serving.reverse_proxy import ReverseProxy
from mvr_ray.serving.service import SearchService
from mvr_ray.store import manifest as manifests
from mvr_ray.store.files import Store
from mvr_ray.store.run_file import load_run_at

log = logging.getLogger(__name__)

_POLL_S = 0.2
_CLUSTER_VARIABLES = {
    # Ray's control store keeps 3 kB of history for each of the last 100,000 calls; a server's own cluster needs none.
    "RAY_task_events_report_interval_ms": "0",
    # Serve kills a proxy that is not ready after 5 s, and its own start then fails; on a busy machine one takes longer.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
}
SERVE_GRACE_S = 1.0
"""Time after `serve.timeout_ms` at which Serve itself ends a request, if its proxies run without the limiter."""
ANYWHERE = "0.0.0.0"
_LOOPBACK = "127.0.0.1"
_APPLICATION = "mvr_ray"
_CONNECT_S = 5.0
_HEALTH_S = 10
"""Period and timeout of the probe query; Serve replaces a replica that does not answer it. The query has half of this
time, since it takes all of it if one searcher hangs."""
_REFUSALS = 1024
"""Requests beyond the slots that a replica accepts from Serve, so that the app refuses them, not Serve."""


class SearchIngress:
    """A replica that answers HTTP from the live version, and from newer ones as they are published."""

    def __init__(self, run: dict[str, Any], version: int | None, tokens: TokenStore) -> None:
        from mvr_ray.distributed.hot_swap import open_hot_swap_router

        logs.to_stderr()
        log.info("replica started: pid=%d", os.getpid())
        config = RunConfig.model_validate(run)
        self._resources = ExitStack()
        self._metrics = Metrics(serve.get_replica_context().replica_tag)
        router = self._resources.enter_context(
            open_hot_swap_router(
                config,
                version,
                timeout_s=config.serve.timeout_ms / 1000,
                follow_s=config.serve.follow_s or None,
                observe=self._metrics.note_stage,
                needs_words=config.search.hybrid is not None,
            )
        )
        with router.pin() as live:
            live.warm_up()
        catalog = VersionCatalog(Store(config.store.path), config.index.name)
        recall_monitor = RecallMonitor(router, self._metrics.note_recall)
        self._resources.callback(recall_monitor.close)
        self._metrics.add_router(router)
        freshness = FreshnessMonitor(catalog.store, config.follow, lambda: router.manifest)
        self._resources.enter_context(freshness.running())
        self._metrics.add_freshness(freshness)
        self.service = SearchService(router, config.serve, catalog, recall_monitor, freshness, config.search.hybrid)
        self._tokens = tokens

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_app(self.service, self._tokens, self._metrics)

    def check_health(self) -> None:
        self.service.ready(Deadline.after(_HEALTH_S / 2))


class AppArgs(BaseModel):
    """The `args` of the application in a declarative Serve file."""

    model_config = ConfigDict(extra="forbid")

    config: str
    """Path of the run file on every node, or its address on an object store."""
    overrides: list[str] = []
    """`section.key=value` each; they override the run file."""
    version: int | None = None
    """A fixed index version; absent: the newest one, and newer ones later."""


def app(args: AppArgs) -> serve.Application:
    """Build the application of a Serve file. Raises ConfigError for a wrong run file, or without a token, and
    ShardIndexError for a version without the words that `search.hybrid` needs."""
    from mvr_ray.distributed.router import require_words

    run = load_run_at(args.config, args.overrides)
    tokens = load_tokens(run)
    require_tokens(ANYWHERE, tokens)
    if run.search.hybrid is not None:
        require_words(manifests.read(Store(run.store.path), run.index.name, args.version))
    return application(run, args.version, tokens)


def application(run: RunConfig, version: int | None, tokens: TokenStore) -> serve.Application:
    """Build the application that Ray Serve runs."""
    replica = serve.deployment(serve.ingress()(SearchIngress)).options(  # type: ignore[missing-argument]
        name="search",
        ray_actor_options={"num_cpus": 0.1},
        num_replicas=run.serve.replicas,
        max_ongoing_requests=run.serve.max_waiting + _REFUSALS,
        health_check_period_s=_HEALTH_S,
        health_check_timeout_s=_HEALTH_S,
        max_surge_percent=100,  # a changed Serve file: the old replicas answer until the new ones have started
    )
    return replica.bind(run.model_dump(mode="json"), version, tokens)


def load_tokens(run: RunConfig) -> TokenStore:
    """Read the tokens. Raises ConfigError for settings that no server may start with."""
    if run.serve.max_k < run.retrieve.k:
        raise ConfigError(f"serve.max_k ({run.serve.max_k}) is below retrieve.k ({run.retrieve.k}); raise it")
    tokens = read_tokens(run.serve.tokens_file, os.environ)
    require_tokens(run.serve.host, tokens)
    return tokens


def _start_serve(run: RunConfig) -> int:
    """Start Ray Serve on the loopback, or join it; returns its port, a free one. Raises ConfigError, and changes
    nothing, if it already runs and listens elsewhere, which may be open to other machines; ResourceError if it does
    not start."""
    from mvr_ray.distributed.cluster.ray_internals import serve_client

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    _end_orphan()
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        port = probe.getsockname()[1]
    timeout_s = run.serve.timeout_ms / 1000 + SERVE_GRACE_S
    try:
        serve.start(http_options={"host": _LOOPBACK, "port": port, "request_timeout_s": timeout_s})
    except (RayError, TimeoutError) as error:
        reason = first_line(error).rstrip(".")
        raise ResourceError(f"Ray Serve did not start ({reason}); run the same command again") from error
    client = serve_client()
    assert client is not None, "serve.start has just been called"
    options = client.http_config
    if (options.host, options.port) != (_LOOPBACK, port):
        raise ConfigError(
            f"Ray Serve of this cluster listens on {options.host}:{options.port} already, not on {_LOOPBACK}:{port}; "
            f"end what it serves first (`serve shutdown`)"
        )
    return port


def _shut_down_serve() -> None:
    """Shut down Ray Serve, and do not wait for it once Ray's head has gone: service managers send SIGTERM to every
    process of a service, and Serve waits half a minute for a controller that has ended, too.

    No thread waits for it: one that still calls Ray while this process leaves it may crash it.
    """
    from mvr_ray.distributed.cluster.ray_internals import listens

    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")

    async def shut_down() -> None:
        task = asyncio.create_task(serve.shutdown_async())
        while not (await asyncio.wait({task}, timeout=_POLL_S))[0]:
            if not (listens(host, port) or listens(host, port)):
                task.cancel()
        with suppress(RayError, TimeoutError, asyncio.CancelledError):
            await task

    asyncio.run(shut_down())


def _end_orphan() -> None:
    """Shut down the Ray Serve that a killed `mvr-ray serve` left on the cluster, if it has no other application."""
    from mvr_ray.distributed.cluster.ray_internals import has_orphan, serve_client

    if not has_orphan("ServeController") or (client := serve_client()) is None:
        return
    applications = client.get_serve_details()["applications"].items()
    sources = {(name, application["source"]) for name, application in applications}
    if client.http_config.host == _LOOPBACK and sources <= {(_APPLICATION, APIType.IMPERATIVE)}:
        log.warning("Ray Serve of a command that was killed still runs; it is shut down first")
        serve.shutdown()


def _replica_error(error: RuntimeError) -> str:
    """Return why no replica started: the last line of its error, which Serve tells in the status of the deployment."""
    application = serve.status().applications.get(_APPLICATION)
    messages = [deployment.message.strip() for deployment in application.deployments.values()] if application else []
    text = "\n".join(messages) or first_line(error)
    reasons = re.findall(r"^mvr_ray\.errors\.\w+: (.*)", text, re.MULTILINE)
    return reasons[-1] if reasons else text.splitlines()[-1]


def _deploy(run: RunConfig, version: int | None, tokens: TokenStore, port: int) -> None:
    """Deploy the app on the running Ray Serve. Raises ResourceError where no replica starts, ConfigError where Serve
    has no proxy on this machine: it has one on the head, and on nodes with replicas."""
    try:
        serve.run(application(run, version, tokens), name=_APPLICATION, route_prefix="/")
    except RuntimeError as error:
        raise ResourceError(f"the server could not start: {_replica_error(error)}") from error
    try:
        socket.create_connection((_LOOPBACK, port), timeout=_CONNECT_S).close()
    except OSError as error:
        raise ConfigError(
            f"Ray Serve has no proxy on this machine ({error}); run `mvr-ray serve` on the head of the cluster, or "
            f"submit it as a job"
        ) from None


def with_full_paths(run: RunConfig) -> RunConfig:
    """Return the run with the folders that replicas read by their full paths: their working folder may be another."""
    source = run.follow.source and Store(run.follow.source).address
    sections = {
        "store": run.store.model_copy(update={"path": Store(run.store.path).address}),
        "follow": run.follow.model_copy(update={"source": source}),
    }
    return run.model_copy(update=sections)


def serve_until_interrupted(run: RunConfig, version: int | None, say: Callable[[str], None]) -> None:
    """Deploy the app and serve until SIGINT or SIGTERM, then shut it down. A second signal changes nothing.

    Raises ConfigError, also outside the main thread, MissingInputError for a version that does not exist or lacks its
    encoder, and ShardIndexError for one without the words that `search.hybrid` needs, before Ray starts; ResourceError
    where no replica starts.
    HAProxy runs on this machine, and so must a proxy of Serve: in a running cluster, call this on the head.
    """
    from mvr_ray.distributed.cluster.ray_internals import environment
    from mvr_ray.distributed.cluster.session import connect
    from mvr_ray.distributed.encoders import require_encoder
    from mvr_ray.distributed.router import require_words

    if threading.current_thread() is not threading.main_thread():
        raise ConfigError("serve: a signal ends the server, and only the main thread receives one; call it there")
    tokens = load_tokens(run)
    store = Store(run.store.path)
    run = with_full_paths(run)
    manifest = manifests.read(store, run.index.name, version)
    require_encoder(store, manifest)
    if run.search.hybrid is not None:
        require_words(manifest)
    say("starting Ray Serve, which takes half a minute")
    variables, signals, before = _CLUSTER_VARIABLES | proxy_variables(run.serve), [], {}
    with environment(variables, replace=False), ReverseProxy(run.serve, tokens) as proxy, connect(run.resources):
        port = _start_serve(run)
        try:
            _deploy(run, version, tokens, port)
            proxy.start(port)
            address = f"http://{run.serve.host}:{run.serve.port}"
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, lambda number, _: signals.append(number))
            say(f"serving on {address}: POST /v1/search, GET /readyz, GET /docs; Ctrl-C stops")
            while not signals:
                time.sleep(_POLL_S)
                proxy.restart_if_ended()
            say("stopping")
            proxy.stop()
        finally:
            try:
                _shut_down_serve()
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)
