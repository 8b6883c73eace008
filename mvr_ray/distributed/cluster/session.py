"""Join or start a Ray cluster where the work needs one, describe it, and refuse needs that it can never place.

A stage over at most `resources.local_passages` passages, without an address, needs none: it runs in this process and
Ray is not imported. Otherwise Ray waits silently for resources that it can never provide, so every stage declares its
needs first: `require` raises where Ray would hang. One CPU always stays free, because reading data needs a CPU beside
a pool of actors.
"""

import importlib.metadata
import importlib.util
import logging
import math
import os
import platform
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

from mvr_ray.config import ResourcesConfig
from mvr_ray.config.loader import PACKAGED_MODEL, resolve_model
from mvr_ray.core.container import memory_limit
from mvr_ray.core.searching.native import library_avx2, num_cores
from mvr_ray.distributed.cluster.periodic import run_every
from mvr_ray.errors import ResourceError, count_noun
from mvr_ray.store.scratch import scratch_folder

log = logging.getLogger(__name__)

# Training workers keep the driver's working directory, so that relative store paths agree. Ray reads these variables
# when a session begins or later, none at its import.
_ENVIRONMENT = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_BACKEND_LOG_LEVEL": "fatal",  # Ray's C++ code writes errors to the terminal that no user can act on
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_ROTATION_MAX_BYTES": "100000000",  # of the log of a worker, which has no bound without it
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
}
_BREAKPOINT = {"PYTHONBREAKPOINT": "ray.util.rpdb._driver_set_trace"}
"""What Ray sets in a driver itself, and does not restore."""
PRIVATE_LABEL = "mvr-ray/private"
"""Label of the node of a private cluster, whose searchers listen only on the loopback."""
FOLDER_PREFIX = "mvr-"
"""Of the folders of private clusters in the temporary one."""
MAX_TEMP_PATH = 20
"""Ray puts unix sockets under its temporary folder, and their paths may have 107 bytes."""
_FREE_CPUS = 1.0
_RAY_DIGITS = 4
"""Decimal places with which Ray counts resources."""
_CONNECT_TIMEOUT_S = 10.0
_LEAVE_S = 30.0
_CALLS_S = 10.0
"""How long a process waits for its threads' calls before it leaves Ray: those to killed actors end at once."""
_HEAD_CHECK_S = 5.0
T = TypeVar("T")
_streams: "WeakSet[Generator[Any]]" = WeakSet()
_session, _settings, _num_users, _session_lock = ExitStack(), ExitStack(), 0, threading.RLock()
"""The session that this process entered, the settings of the process around it, also around one of other code, the
number of the blocks that use them, and the lock of all."""
_calls, _num_calls = threading.Condition(), 0
"""Held while this process leaves Ray, and the number of blocks of `using_ray`."""
_stays_local: ContextVar[bool] = ContextVar("mvr_ray_stays_local", default=False)
"""Whether the work of this thread began in this process. The threads of its pools never ask."""
_say: ContextVar[Callable[[str], None]] = ContextVar("mvr_ray_say", default=lambda line: None)


class Node(NamedTuple):
    """Resources of one machine for tasks and actors."""

    cpus: float
    gpus: float


class ClusterInfo(NamedTuple):
    """Resources of the cluster. `can_grow`: it autoscales; `is_local`: there is no cluster and this process does all
    work."""

    cpus: float
    gpus: float
    nodes: tuple[Node, ...]
    can_grow: bool = False
    is_local: bool = False


class Need(NamedTuple):
    """`count` processes that must run at the same time, with the resources of each."""

    what: str
    count: int
    cpus: float
    gpus: float = 0.0


class Check(NamedTuple):
    """One check of `doctor`; `detail` is the result and, if it is not ok, the remedy."""

    name: str
    ok: bool
    detail: str


def has_session() -> bool:
    """Return whether this process is in a Ray session, as every worker of a cluster is."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def in_ray() -> bool:
    """Return whether the work of this thread runs in a Ray session: in any that this process is in, unless it began in
    this process (`staying_local`), and another thread has entered one since."""
    return not _stays_local.get() and has_session()


@contextmanager
def staying_local(local: bool = True) -> Iterator[None]:
    """Keep the work of a block in this process, or with False in Ray, whatever other threads do meanwhile."""
    before = _stays_local.set(local)
    try:
        yield
    finally:
        _stays_local.reset(before)


def needs_ray(resources: ResourcesConfig, num_passages: int) -> bool:
    """Return whether work over so many passages runs in Ray: in a session, with an address, or beyond
    `local_passages`."""
    return in_ray() or bool(cluster_address(resources)) or num_passages > resources.local_passages


def scan_threads(resources: ResourcesConfig) -> int:
    """Return the number of threads of an exact scan in this process: unless `resources.torch_threads` is set, one a
    core, as no hit depends on them. Ray shares out cores itself, and torch, which scans without compiled loops, has one
    number for all work."""
    needs_one = resources.torch_threads or in_ray() or library_avx2() is None
    return resources.threads if needs_one else num_cores()


def cluster_address(resources: ResourcesConfig) -> str | None:
    """Return the address of the Ray cluster to join, None where none is configured, or `local`: Ray's word for one of
    its own."""
    address = resources.address or os.environ.get("RAY_ADDRESS")
    return None if address == "local" else address


@contextmanager
def announcing(say: Callable[[str], None]) -> Iterator[None]:
    """Call `say` with every line that is announced within the block."""
    before = _say.set(say)
    try:
        yield
    finally:
        _say.reset(before)


def announce(line: str) -> None:
    """Show people a line about what begins, as that Ray is started."""
    _say.get()(line)


@contextmanager
def connect(
    resources: ResourcesConfig, num_passages: int | None = None, needs: Sequence[Need] = (), *, dashboard: bool = False
) -> Iterator[ClusterInfo]:
    """Enter a Ray session: the current one, the cluster of `address` or RAY_ADDRESS, else a private one.

    Work over `num_passages` that needs no Ray (`needs_ray`) stays in this process; None: it always needs Ray. The exit,
    also by Ctrl-C, leaves only a cluster that was joined or started here, and only the last exit of several that
    overlap: threads, and indexes that are open at once, share a session. That exit also restores what the session
    changes in this process: environment variables, Ray's printing, and on the main thread the handler of SIGTERM.
    `dashboard` is for Ray Train and the state API on a private cluster. Raises ResourceError when the cluster cannot be
    reached or started, or cannot place the needs (`require`).
    """
    local = num_passages is not None and not needs_ray(resources, num_passages)
    with nullcontext() if local else ray_session(resources, dashboard=dashboard), staying_local(local):
        info = describe(resources)
        require(info, needs)
        yield info


def ray_session(resources: ResourcesConfig, *, dashboard: bool = False) -> AbstractContextManager[None]:
    """Enter a session as `connect` does, for work that another thread may end, and check no needs."""
    address = cluster_address(resources)
    if address and address.startswith(("http://", "https://")):
        raise ResourceError(
            f"Ray address {address!r} is a dashboard's; give the cluster's own (host:6379, or auto), or submit "
            f"the stage as a job with RAY_API_SERVER_ADDRESS={address}"
        )
    enter = partial(_join_cluster, address) if address else partial(_private, resources, dashboard)
    return _share_session(enter)


@contextmanager
def _share_session(enter: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Set the variables of `_ENVIRONMENT` that are not set, and enter a session unless this process is in one. The last
    of several blocks that overlap leaves the session, unless other code had entered it, and restores the variables."""
    from mvr_ray.distributed.cluster.ray_internals import environment, no_automatic_start

    global _num_users
    with _session_lock:
        if not _num_users:
            _settings.enter_context(environment(_ENVIRONMENT, replace=False))
            _settings.enter_context(no_automatic_start())
        _num_users += 1
    try:
        with _session_lock:
            if not has_session():
                _session.enter_context(_restore_process(enter))
        yield
    finally:
        with _session_lock:
            _num_users -= 1
            if not _num_users:
                with _settings:
                    _session.close()


def enter_until_left(setting: AbstractContextManager[None]) -> None:
    """Enter a setting of the whole process, which the last of the blocks in `ray_session` leaves."""
    with _session_lock:
        _settings.enter_context(setting)


@contextmanager
def _restore_process(enter: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Enter a session, and restore after it what Ray and this package change in the process: other code may have
    sessions of its own."""
    from mvr_ray.distributed.cluster import ray_internals

    with (
        ray_internals.environment(_BREAKPOINT),
        ray_internals.log_worker_messages(),
        ray_internals.default_sigterm(),
        enter(),
    ):
        yield


def close_before_leaving(stream: Generator[T]) -> Generator[T]:
    """Return a stream of Ray's results that is closed before this process leaves Ray, if its reader has not ended it:
    closed later, Ray Data's thread starts another cluster, and the process may wait for that thread for ever."""
    _streams.add(stream)
    return stream


@contextmanager
def using_ray() -> Iterator[None]:
    """Let other threads leave a Ray session only after the block. A thread that calls Ray, or frees a reference, while
    another leaves would end the process: Ray then does so with status 1 and no message."""
    global _num_calls
    with _calls:
        _num_calls += 1
    try:
        yield
    finally:
        with _calls:
            _num_calls -= 1
            _calls.notify_all()


def _leave_ray(own: object) -> None:
    """Leave the `own` session (None: any), unless other code has begun one of its own since."""
    import ray

    from mvr_ray.distributed.cluster.ray_internals import current_session

    if own not in (None, current_session()):
        return
    try:
        for stream in list(_streams):
            with suppress(ValueError):  # another thread reads it
                stream.close()
    finally:
        with _calls:  # no other thread begins a call meanwhile
            _calls.wait_for(lambda: not _num_calls, _CALLS_S)
            ray.shutdown()


@contextmanager
def _deferring_interrupts() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait for the end of the block, as far as this is the main thread: within it they would
    leave Ray's processes and files behind. They interrupt one that takes longer than `_LEAVE_S`, as Ray may hang."""
    end = time.monotonic() + _LEAVE_S
    signals: list[int] = []

    def interrupt_late(number: int, frame: FrameType | None) -> None:
        if time.monotonic() > end:
            raise KeyboardInterrupt
        signals.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM) * (threading.current_thread() is threading.main_thread())
    before = [(number, signal.signal(number, interrupt_late)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in before:
            if handler is not None:  # one of C code
                signal.signal(number, handler)
    if signals:  # of a command that does not end here, such as `follow` between two batches
        signal.raise_signal(signals[0])


@contextmanager
def _join_cluster(address: str) -> Iterator[None]:
    from mvr_ray.distributed.cluster import ray_internals

    announce(f"joining the Ray cluster at {address}")
    _require_listener(address)
    is_loopback = ray_internals.listens_on_loopback_alone(address)
    before = os.environ.get("RAY_AUTH_MODE")
    try:
        with ray_internals.loopback_node() if is_loopback else nullcontext():
            if before is None:
                # A client with a token refuses the calls of a cluster without tokens, and loses its actors.
                use_token = _has_token() and not ray_internals.accepts_without_token(address)
                os.environ["RAY_AUTH_MODE"] = "token" if use_token else "disabled"
            ray_internals.reread_authentication()
            try:
                with ray_internals.one_try():
                    _init_ray(address=address)
            except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
                text = str(error).strip()
                reason = text.splitlines()[-1] if "Traceback" in text else " ".join(text.split())
                raise ResourceError(
                    f"no Ray cluster could be joined at {address!r} (RAY_AUTH_MODE={os.environ['RAY_AUTH_MODE']}): "
                    f"{reason}; check the address (host:6379, or the --port that its head was started with) and, with "
                    f"token authentication, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
                ) from error
        own = ray_internals.current_session()
        try:
            with nullcontext() if address.startswith("ray://") else warn_without_head(_head_address()):
                yield
        finally:
            with _deferring_interrupts():
                _leave_ray(own)
    finally:
        if before is None:  # the next cluster of this process may have another mode
            os.environ.pop("RAY_AUTH_MODE", None)
            ray_internals.reread_authentication()


def _head_address() -> str:
    import ray

    return ray.get_runtime_context().gcs_address


def warn_without_head(address: str, interval_s: float = _HEAD_CHECK_S) -> AbstractContextManager[None]:
    """Log a warning in the block when nothing listens at the head's address in two checks: after a minute Ray ends this
    process with status 1 and no message."""
    from mvr_ray.distributed.cluster.ray_internals import listens

    host, _, port = address.rpartition(":")
    num_failures = 0

    def check() -> None:
        nonlocal num_failures
        num_failures = 0 if listens(host, port) else num_failures + 1
        if num_failures == 2:
            log.warning(
                "Ray's head at %s does not answer. If it stays away for a minute, Ray ends this command with status 1; "
                "the same command, on a cluster that runs, continues",
                address,
            )

    return run_every(interval_s, check, "mvr-head")


def _init_ray(**options: Any) -> None:
    """Call `ray.init` without its output, and restore this process's SIGTERM handler, if any, which it replaces: where
    there is none, Ray's stays until the session ends."""
    import ray

    from mvr_ray.distributed.cluster.ray_internals import silent_stderr

    before = signal.getsignal(signal.SIGTERM)
    try:
        with silent_stderr():
            ray.init(**options, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
    except SystemExit as error:  # Ray's own handler of SIGTERM
        raise KeyboardInterrupt from error
    finally:
        if before not in (None, signal.SIG_DFL) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


def _require_listener(address: str) -> None:
    """Raise ResourceError where nothing listens at host:port: Ray would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto", or a name that Ray resolves
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, UnicodeError) as error:  # the latter for a name such as 10.0..1
        raise ResourceError(f"no Ray cluster listens at {address!r}: {error}; check resources.address") from error


@contextmanager
def _private(resources: ResourcesConfig, dashboard: bool) -> Iterator[None]:
    from mvr_ray.distributed.cluster import ray_internals

    announce("starting Ray on this machine, which takes seconds")
    stack = ExitStack()
    folder = stack.enter_context(scratch_folder(_temporary_folder(), FOLDER_PREFIX))
    cpus = _private_cpus(resources)
    secret = {}
    if "RAY_AUTH_MODE" not in os.environ or (os.environ["RAY_AUTH_MODE"] == "token" and not _has_token()):
        secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # known only to this process
    stack.enter_context(ray_internals.environment(secret))
    ray_internals.reread_authentication()
    own = None
    try:
        try:
            with ray_internals.loopback_node():
                _init_ray(
                    address="local",
                    num_cpus=cpus,
                    include_dashboard=dashboard,
                    dashboard_host="127.0.0.1",
                    labels={PRIVATE_LABEL: "true"},
                    _node_ip_address="127.0.0.1",
                    _temp_dir=str(folder),
                )
        except Exception as error:  # Ray raises its own errors, OSError and plain Exception
            raise ResourceError(
                f"a private Ray cluster of {cpus} logical CPUs could not start in {folder}: "
                f"{str(error).strip() or type(error).__name__}; `mvr-ray doctor` names what this machine lacks"
            ) from error
        own = ray_internals.current_session()
        with warn_without_head(_head_address()):
            yield
    finally:
        with _deferring_interrupts():
            _leave_ray(own)
            stack.close()
            ray_internals.reread_authentication()


def _private_cpus(resources: ResourcesConfig) -> int:
    return resources.local_cpus or max(4, 2 * num_cores())


def _temporary_folder() -> Path:
    own = os.environ.get("RAY_TMPDIR")
    for parent in (own, tempfile.gettempdir(), "/tmp"):
        if parent and len(parent) <= MAX_TEMP_PATH and os.access(parent, os.W_OK):
            if own and parent != own:
                message = "RAY_TMPDIR=%s is not used but %s: name a writable folder with at most %d characters"
                log.warning(message, own, parent, MAX_TEMP_PATH)
            return Path(parent)
    raise ResourceError(
        f"no writable temporary folder with a path of at most {MAX_TEMP_PATH} characters; name one with RAY_TMPDIR"
    )


def _has_token() -> bool:
    source = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(source) or _token_file().is_file()


def _token_file() -> Path:
    """Return the file of Ray's token; one that is not there for a user without a home."""
    with suppress(RuntimeError):
        return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return Path(os.devnull)


def describe(resources: ResourcesConfig) -> ClusterInfo:
    """Return the total resources of the session's live nodes, whether in use or not; outside a session, those of this
    process."""
    if not in_ray():
        return ClusterInfo(num_cores(), 0, (), is_local=True)
    import ray

    of_nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    nodes = tuple(Node(float(of.get("CPU", 0)), float(of.get("GPU", 0))) for of in of_nodes)
    cpus, gpus = sum(node.cpus for node in nodes), sum(node.gpus for node in nodes)
    return ClusterInfo(cpus, gpus, nodes, resources.autoscaling)


def num_places(capacity: float, demand: float) -> int:
    """Return the number of processes that fit, each with this demand, as Ray counts them: in floats 1 // 0.2 is 4."""
    unit = 10**_RAY_DIGITS
    return round(unit * capacity) // max(round(unit * demand), 1)


def require(info: ClusterInfo, needs: Sequence[Need]) -> None:
    """Raise ResourceError for needs that this cluster can never place together with one free CPU.

    On an autoscaling cluster (`resources.autoscaling`) a shortage is logged instead. Without a cluster only a GPU can
    be missing.
    """
    if not needs:
        return
    if info.is_local:
        if any(need.gpus for need in needs) and not importlib.import_module("torch").cuda.is_available():
            raise ResourceError(f"{needs[0].what} are to use a GPU, and torch sees none; set resources.gpus_per_* to 0")
        return
    problems = []
    for need in needs:
        room, demands = 0, (need.cpus, need.gpus)
        for node in info.nodes:
            fits = [num_places(capacity, demand) for capacity, demand in zip(node, demands) if demand > 0]
            room += min(fits, default=need.count)
        if room < need.count:
            problems.append(
                f"{need.count} {need.what} of {need.cpus:g} CPU and {need.gpus:g} GPU each, "
                f"but there is room for {room} in {count_noun(len(info.nodes), 'node')}"
            )
    cpus = round(sum(need.count * need.cpus for need in needs), _RAY_DIGITS)
    gpus = round(sum(need.count * need.gpus for need in needs), _RAY_DIGITS)
    summary = " + ".join(f"{need.count} {need.what} x {need.cpus:g} CPU" for need in needs)
    if cpus > round(info.cpus - _FREE_CPUS, _RAY_DIGITS):
        problems.append(
            f"{summary} = {cpus:g} CPUs, the cluster has {info.cpus:g}, {_FREE_CPUS:g} must stay free for reading data"
        )
    if gpus > info.gpus:
        problems.append(f"{gpus:g} GPUs asked for, the cluster has {info.gpus:g}")
    if problems and info.can_grow:
        log.warning("waiting for the cluster to grow: %s", "; ".join(problems))
    elif problems:
        advice = (
            "lower the counts of the resources section, or raise resources.local_cpus on one machine, or set "
            "resources.autoscaling=true if nodes start on demand"
        )
        raise ResourceError(f"this would wait for ever: {'; '.join(problems)}; {advice}")


_LIBRARIES = ("torch", "transformers", "pyarrow", "faiss", "hnswlib", "nltk", "Stemmer")
_IMPORT_ERRORS = (ImportError, OSError, ValueError, AttributeError, RuntimeError)
"""Of a library that is not installed, that lacks a shared library, or that was built for another version of numpy."""


def doctor(resources: ResourcesConfig | None = None, precision: str = "auto") -> list[Check]:
    """Check this machine for a stage: interpreter, libraries, memory, temporary folder, authentication, GPUs.
    `precision` is `index.precision`.

    With `resources.address` or RAY_ADDRESS, also tries to join that cluster, and measures a working directory of jobs.
    """
    resources = resources or ResourcesConfig()
    address = cluster_address(resources)
    try:
        of_ray = [_check_ray()]
    except _IMPORT_ERRORS as error:
        of_ray, address = [Check("ray", False, f"cannot be imported: {error}")], None
    of_cluster = [*_check_working_folder(Path.cwd()), _check_cluster(address)] if address else []
    return [*of_ray, *_check_software(precision), *_check_machine(resources, address), *of_cluster]


def _check_ray() -> Check:
    version = str(importlib.import_module("ray").__version__)
    from mvr_ray.distributed.cluster.ray_internals import READ_FROM

    return Check("ray", version.startswith(READ_FROM), f"{version}; mvr_ray is tested with {READ_FROM}*")


def _check_software(precision: str) -> Iterator[Check]:
    yield Check("python", True, platform.python_version())
    for name in _LIBRARIES:
        try:
            version = str(getattr(importlib.import_module(name), "__version__", "installed"))
        except _IMPORT_ERRORS as error:
            extra = " (pip install 'mvr-ray[cpu]' or 'mvr-ray[gpu]')" if name == "faiss" else ""
            yield Check(name, False, f"cannot be imported: {error}{extra}")
            if name == "torch":  # the other checks of software import it
                return
        else:
            yield Check(name, True, version)
    from mvr_ray.core.encoding.openvino_cpu import INSTALL
    from mvr_ray.core.refining import native_step
    from mvr_ray.core.searching import native

    has_openvino = importlib.util.find_spec("openvino") is not None
    lack = f"not installed: CPUs embed passages up to four times more slowly; {INSTALL}"
    if is_needed := precision in ("int8", "openvino", "openvino-bf16"):
        lack = f"not installed, and index.precision {precision} needs it; {INSTALL}"
    detail = importlib.metadata.version("openvino") if has_openvino else lack
    yield Check("openvino", has_openvino or not is_needed, detail)
    missing = [name for name in (native.LIBRARY, native_step.LIBRARY) if importlib.util.find_spec(name) is None]
    lack = f"{', '.join(missing)} missing: torch and numpy are slower in their place; install again with a C compiler"
    yield Check("compiled loops", not missing, lack if missing else "search and refinement, compiled from C")
    folder = Path(resolve_model(PACKAGED_MODEL))
    lack = f"{PACKAGED_MODEL} is not installed (pip install mvr-ray brings it); the first use fetches it, 91 MB"
    yield Check("default model", folder.is_dir(), f"{PACKAGED_MODEL} in {folder}" if folder.is_dir() else lack)


def _check_machine(resources: ResourcesConfig, address: str | None) -> Iterator[Check]:
    cpus = _private_cpus(resources)
    yield Check("processors", True, f"{num_cores()} cores; a private cluster gets {cpus} logical CPUs")
    of_machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    total = min(of_machine, memory_limit() or of_machine) / 2**30
    yield Check("memory", total >= 4, f"{total:.1f} GiB; Ray, a trainer and a searcher take about 3")
    try:
        folder = _temporary_folder()
    except ResourceError as error:
        yield Check("temporary folder", False, str(error))
    else:
        free = shutil.disk_usage(folder).free / 2**30
        detail = f"{folder} with {free:.1f} GiB free; Ray spills objects there"
        yield Check("temporary folder", free >= 2, detail)
    memory_folder = Path("/dev/shm")
    free = shutil.disk_usage(memory_folder).free / 2**30 if memory_folder.is_dir() else math.inf
    detail = f"{free:.1f} GiB free in /dev/shm; containers: --shm-size=2g or more"
    yield Check("shared memory", free >= 0.5, detail if memory_folder.is_dir() else "no /dev/shm on this system")
    mode = os.environ.get("RAY_AUTH_MODE")
    token = _token_file()
    problem = ""
    if mode == "token" and not _has_token():
        problem = "RAY_AUTH_MODE=token, but no token: set RAY_AUTH_TOKEN_PATH"
    elif token.is_file() and token.stat().st_mode & 0o077:
        problem = f"{token} can be read by others: chmod 600 {token}"
    detail = problem or f"RAY_AUTH_MODE={mode or 'not set: a token of its own for a private cluster'}"
    yield Check("authentication", not problem, detail)
    try:
        cuda = importlib.import_module("torch").cuda
    except _IMPORT_ERRORS:  # named above
        return
    names = f"{cuda.device_count()} x {cuda.get_device_name(0)}" if cuda.is_available() else ""
    own = {name: value for name, value in resources if name.startswith("gpus_per_") and value and not address}
    lack = "none visible to torch; the CPU does all the work"
    if own:
        settings = ", ".join(f"resources.{name} is {value:g}" for name, value in own.items())
        lack = f"none visible to torch, but {settings}; set these to 0, or resources.address of a cluster with GPUs"
    yield Check("gpus", bool(names) or not own, names or lack)


def _check_working_folder(folder: Path) -> Iterator[Check]:
    """Compare what `ray job submit --working-dir .` uploads of a clone with Ray's limit, where its error names none."""
    from mvr_ray.distributed.cluster.ray_internals import MAX_PACKAGE_BYTES, package_bytes

    if (folder / "jobs" / "index.py").is_file():
        size, most = (num_bytes / 2**20 for num_bytes in (package_bytes(folder), MAX_PACKAGE_BYTES))
        advice = f"name what jobs do not read, such as data and stores, in {folder / '.rayignore'}"
        detail = f"ray job submit --working-dir . uploads {size:.1f} MiB of {folder}, and {most:.0f} MiB at most"
        yield Check("working directory", size < most, detail if size < most else f"{detail}; {advice}")


def _check_cluster(address: str) -> Check:
    try:
        if not address.startswith(("http://", "https://")):  # `connect` explains these
            _require_listener(address)  # also if this process is already in a session
        with connect(ResourcesConfig(address=address)) as info:
            return Check(
                "cluster",
                True,
                f"{address}: {count_noun(len(info.nodes), 'node')}, {info.cpus:g} CPUs, {info.gpus:g} GPUs",
            )
    except ResourceError as error:
        return Check("cluster", False, str(error))
