"""Use Ray internals that have no public API, as of Ray 2.60.0; a test fails where another Ray differs."""

import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray.exceptions
from ray._private import auto_init_hook, ray_constants, services, state, worker
from ray._private.runtime_env import packaging
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[missing-module-attribute]

if TYPE_CHECKING:
    import ray.data

log = logging.getLogger(__name__)

READ_FROM = "2.60."
MAX_PACKAGE_BYTES = ray_constants.DASHBOARD_CLIENT_MAX_SIZE
"""Limit of the dashboard on the working directory of a job: 100 MiB, of the 512 that Ray's control store takes."""
_CONNECT_S = 5
_CLUSTER_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_TRIES_VARIABLE = "RAY_gcs_server_port_wait_time_s"


@contextmanager
def environment(variables: Mapping[str, str], *, replace: bool = True) -> Iterator[None]:
    """Set these environment variables until the block ends; without `replace`, those that are set already stay."""
    before = {name: os.environ.get(name) for name in variables if replace or name not in os.environ}
    os.environ.update({name: variables[name] for name in before})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextmanager
def loopback_node() -> Iterator[None]:
    """Give a node that starts in this block the address 127.0.0.1; all its processes listen only there.

    A driver joins such a node in this block, too.

    `ray.init(_node_ip_address="127.0.0.1")` does not suffice: on Linux, Ray replaces the address with the machine's,
    and then listens on every interface. It keeps the loopback if multi-node clusters are disabled, as on macOS: by a
    constant that every process reads from the environment when it imports Ray.
    """
    before, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        with environment({_CLUSTER_VARIABLE: "0"}):
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


@contextmanager
def no_automatic_start() -> Iterator[None]:
    """Let a call in the block that finds no session, as other code has ended it, fail: Ray would start a cluster."""
    before, auto_init_hook.enable_auto_connect = auto_init_hook.enable_auto_connect, False
    try:
        yield
    finally:
        auto_init_hook.enable_auto_connect = before


def one_try() -> AbstractContextManager[None]:
    """Let a driver that joins a cluster in this block try once, which takes 40 seconds where another program than Ray's
    control store listens. Without a number in the environment, Ray tries 20 times."""
    return environment({_TRIES_VARIABLE: "1"}, replace=False)


def listens_on_loopback_alone(address: str) -> bool:
    """Return whether a cluster listens on the loopback but not on the machine's address, which Ray would use to
    join."""
    host, _, port = address.rpartition(":")
    if host.strip("[]") not in ("127.0.0.1", "::1", "localhost") or not port.isdigit():
        return False
    return listens(host, port) and not listens(services.resolve_ip_for_localhost(host), port)


def listens(host: str, port: str) -> bool:
    """Return whether something accepts connections there."""
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S):
            return True
    except OSError:
        return False


def current_session() -> object:
    """Return an object that no other session of this process has, to compare by identity; None outside one."""
    return worker._global_node


def has_orphan(actor_class: str) -> bool:
    """Return whether this cluster has a detached actor of the class whose driver has ended."""
    ended_jobs = {job["JobID"] for job in state.jobs() if job["IsDead"]}
    actors: Any = state.actors(actor_state_name="ALIVE")
    return any(one["ActorClassName"] == actor_class and one["JobID"] in ended_jobs for one in actors.values())


def serve_client() -> Any:
    """Return the client of this cluster's Ray Serve, which has its options and applications; None without one."""
    from ray.serve.context import _get_global_client

    return _get_global_client(raise_if_no_controller_running=False)


def end_pipeline_when(pipeline: "ray.data.Dataset", condition: Callable[[], bool]) -> None:
    """End a pipeline of Ray Data as if it had no more rows, and kill its actors and tasks, as soon as the condition
    holds. Ray checks it some ten times a second in the thread that schedules the pipeline, and pickles it."""
    from ray.data._internal.execution.execution_callback import ExecutionCallback

    def end(_: ExecutionCallback, executor: Any) -> None:
        if condition():  # the executor waits for its own thread, which this is
            threading.Thread(target=executor.shutdown, args=(True,), name="mvr-end-pipeline", daemon=True).start()

    callback = type("EndPipeline", (ExecutionCallback,), {"on_execution_step": end})
    pipeline.context.custom_execution_callback_classes = [callback]


def reread_authentication() -> None:
    """Make Ray read RAY_AUTH_MODE and the token again; otherwise it reads them only at import. A session that other
    code has begun since keeps those that it began with: refused a call, Ray aborts the process."""
    if not ray.is_initialized():
        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()


@environment({"RAY_AUTH_MODE": "disabled"})
def accepts_without_token(address: str) -> bool:
    """Return whether a cluster accepts a client without a token. False where it cannot be reached."""
    try:
        gcs_address = services.canonicalize_bootstrap_address(address)
        if not gcs_address:
            return False
        host, _, port = gcs_address.rpartition(":")
        if not listens(host, port):
            return False
        reread_authentication()
        GcsClient(address=gcs_address)
    except (ray.exceptions.RayError, OSError, ValueError):
        return False
    return True


def package_bytes(folder: Path) -> int:
    """Return the bytes of the archive, which is not compressed, that `ray job submit --working-dir` makes of a folder.
    It lacks what `.gitignore`, `.rayignore` and Ray's own list leave out."""
    excludes = [packaging._get_excludes(folder, ray_constants.get_runtime_env_default_excludes())]
    sizes: list[int] = []

    def add(path: Path) -> None:
        sizes.append(path.stat().st_size if path.is_file() else 0)

    silent = logging.Logger("silent", logging.CRITICAL)
    packaging._dir_travel(folder, excludes, add, include_gitignore=True, logger=silent)
    return sum(sizes)


@contextmanager
def silent_stderr() -> Iterator[None]:
    """Discard output to file descriptor 2 in the block: C++ code of `ray.init` writes there that a variable set its log
    level. Exceptions pass."""
    sys.stderr.flush()
    original = os.dup(2)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(original, 2)
        os.close(original)


@contextmanager
def log_worker_messages() -> Iterator[None]:
    """Redirect Ray's messages about workers from stdout to this package's log until the block ends.

    A worker's death is one warning; the full texts, which repeat with every retried call, are INFO lines. A session of
    other code after the block prints what its workers print.
    """
    before, worker.print_to_stdstream = worker.print_to_stdstream, _log_worker_message
    try:
        yield
    finally:
        worker.print_to_stdstream = before


@contextmanager
def default_sigterm() -> Iterator[None]:
    """Reset SIGTERM to its default action after the block if Ray's handler has replaced it, as far as this is the main
    thread. The handler stays within the block: it raises SystemExit, which ends a cluster; the default would not."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        is_of_ray = getattr(signal.getsignal(signal.SIGTERM), "__module__", None) == worker.__name__
        if before is signal.SIG_DFL and is_of_ray and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _log_worker_message(data: dict[str, Any], ignore_prefix: bool) -> None:  # the signature is Ray's
    text = "\n".join(data["lines"])
    if text.startswith("A worker died or was killed"):
        log.warning("a Ray worker died; its work is retried")
    log.info("ray: %s", text)
