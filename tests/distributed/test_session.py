"""Sessions: started clusters are shut down, and needs that cannot be placed are refused."""

import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import NamedTuple

import pytest
import ray

from mvr_ray.config import ResourcesConfig
from mvr_ray.core.searching.native import num_cores
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.session import ClusterInfo, Need, Node, connect, doctor, require
from mvr_ray.errors import ResourceError


def cluster(*sizes: tuple[float, float], can_grow: bool = False) -> ClusterInfo:
    nodes = tuple(Node(cpus, gpus) for cpus, gpus in sizes)
    return ClusterInfo(sum(node.cpus for node in nodes), sum(node.gpus for node in nodes), nodes, can_grow)


def no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin as a process whose tests have joined no cluster."""
    monkeypatch.setattr(session, "_session", ExitStack())
    monkeypatch.setattr(session, "_settings", ExitStack())
    monkeypatch.setattr(session, "_num_users", 0)


def test_threads_share_one_session_and_the_last_of_them_leaves_it(monkeypatch):
    starts = [Event(), Event()]
    state = {"sessions": 0, "starts": 0}

    @contextmanager
    def private(*_: object) -> Iterator[None]:
        starts[state["starts"]].set()
        state["starts"] += 1
        starts[1].wait(0.3)  # the other thread would start a session now
        state["sessions"] += 1
        yield
        state["sessions"] = 0

    def use(is_first: bool) -> int:
        with connect(ResourcesConfig()):
            if is_first:
                both_connected.wait(20)
            else:
                both_connected.set()
                first.result(20)
            return state["sessions"]

    both_connected = Event()
    no_blocks(monkeypatch)
    monkeypatch.setattr(session, "_private", private)
    monkeypatch.setattr(session, "has_session", lambda: state["sessions"] > 0)
    monkeypatch.setattr(session, "describe", lambda _: cluster((4, 0)))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(use, True)
        assert starts[0].wait(20)
        second = pool.submit(use, False)
        assert (first.result(20), second.result(20)) == (1, 1)
    assert state == {"sessions": 0, "starts": 1}


def test_work_stays_where_it_began_and_what_needs_ray_within_it_runs_there(monkeypatch):
    has_session = False
    no_blocks(monkeypatch)
    monkeypatch.setattr(session, "has_session", lambda: has_session)
    monkeypatch.setattr(session, "describe", lambda _: cluster((4, 0)))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with connect(ResourcesConfig(), 1), ThreadPoolExecutor(1) as pool:
        has_session = True  # of another thread
        assert not session.in_ray() and pool.submit(session.in_ray).result(20)
        with connect(ResourcesConfig(local_passages=9), 10):
            assert session.in_ray()
        assert not session.in_ray()
    assert session.in_ray()


def test_the_variables_of_sessions_that_overlap_stay_until_the_last_ends(monkeypatch):
    no_blocks(monkeypatch)
    monkeypatch.setattr(session, "has_session", lambda: True)  # of other code
    monkeypatch.setattr(session, "describe", lambda _: cluster((4, 0)))
    for name in session._ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    before = dict(os.environ)
    first, second = ExitStack(), ExitStack()
    for stack in (first, second):
        stack.enter_context(connect(ResourcesConfig()))
    during = before | {**session._ENVIRONMENT, "TOKENIZERS_PARALLELISM": "true"}
    assert os.environ == during
    first.close()
    assert os.environ == during
    second.close()
    assert os.environ == before


def test_a_head_that_no_longer_listens_is_one_warning_before_ray_ends_the_process(caplog):
    def warnings() -> list[str]:
        return [record.getMessage() for record in caplog.records if "head" in record.getMessage()]

    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with session.warn_without_head(address, interval_s=0.02):
            time.sleep(0.2)
            assert not warnings(), "it listens"
            server.close()
            end = time.monotonic() + 30
            while not warnings() and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(0.2)
    [warning] = warnings()
    assert address in warning and "status 1; the same command, on a cluster that runs, continues" in warning


@pytest.mark.parametrize(
    ("info", "needs", "message"),
    [
        (cluster((4, 0)), [Need("encoders", 4, 1)], "1 must stay free"),
        (cluster((4, 0)), [Need("searchers", 2, 1), Need("refiners", 2, 1)], "2 searchers x 1 CPU"),
        (cluster((8, 0)), [Need("trainers", 2, 1, gpus=1)], "2 GPUs asked for, the cluster has 0"),
        (cluster((4, 0), (4, 0)), [Need("trainers", 1, 6)], "1 trainers of 6 CPU"),
        (cluster((8, 1), (8, 1)), [Need("trainers", 1, 1, gpus=2)], "there is room for 0 in 2 nodes"),
        (cluster((8, 1)), [Need("encoders", 6, 0.5, gpus=0.2)], "1.2 GPUs asked for, the cluster has 1"),
    ],
)
def test_a_shape_that_ray_would_wait_for_is_refused_by_name(info, needs, message):
    with pytest.raises(ResourceError, match=message):
        require(info, needs)


@pytest.mark.parametrize(
    ("info", "needs"),
    [
        (cluster((4, 0)), [Need("encoders", 3, 1)]),
        (cluster((4, 0)), [Need("encoders", 8, 0.25)]),
        (cluster((4, 1), (4, 1)), [Need("trainers", 2, 2, gpus=1)]),
        (cluster((2, 1)), [Need("encoders", 2, 0.5, gpus=0.5)]),
        (cluster((2, 1)), [Need("encoders", 5, 0.2, gpus=0.2)]),
        (cluster((56, 0)), [Need("encoders", 100, 0.55)]),
        (cluster((1, 0), can_grow=True), [Need("encoders", 9, 1)]),
    ],
)
def test_a_cluster_with_enough_resources_passes(info, needs):
    assert require(info, needs) is None


def test_doctor_finds_what_the_package_needs():
    checks = {check.name: check for check in doctor()}
    for name in (
        "ray",
        "torch",
        "pyarrow",
        "faiss",
        "Stemmer",
        "compiled loops",
        "default model",
        "temporary folder",
    ):
        assert checks[name].ok, checks[name]


@pytest.mark.parametrize("error", [ImportError("no"), OSError("no libcudart"), ValueError("numpy.dtype size changed")])
@pytest.mark.parametrize("name", ["hnswlib", "ray", "torch"])
def test_doctor_names_a_library_that_is_broken_in_whatever_way(monkeypatch, name, error):
    load = importlib.import_module

    def import_module(own: str) -> object:
        if own == name:
            raise error
        return load(own)

    monkeypatch.setattr(importlib, "import_module", import_module)
    checks = {check.name: check for check in doctor()}
    assert (checks[name].ok, checks[name].detail) == (False, f"cannot be imported: {error}")
    assert "shared memory" in checks


def test_doctor_measures_what_a_job_would_upload_of_a_clone_for_a_cluster(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resources = ResourcesConfig(address="http://127.0.0.1:8265")

    def sizes(resources: ResourcesConfig) -> list[tuple[bool, str]]:
        return [(check.ok, check.detail) for check in doctor(resources) if check.name == "working directory"]

    assert not sizes(resources)
    for path, num_bytes in (
        ("jobs/index.py", 1),
        ("data/large", 99 << 20),
        ("store/part", 9 << 20),
        (".git/x", 9 << 20),
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        with (tmp_path / path).open("wb") as file:
            file.truncate(num_bytes)
    assert not sizes(ResourcesConfig())
    advice = f"; name what jobs do not read, such as data and stores, in {tmp_path}/.rayignore"
    detail = "ray job submit --working-dir . uploads {} MiB of " + f"{tmp_path}, and 100 MiB at most"
    assert sizes(resources) == [(False, detail.format("108.0") + advice)]
    (tmp_path / ".rayignore").write_text("/data/\n")
    assert sizes(resources) == [(True, detail.format("9.0"))]


def test_doctor_says_how_many_cpus_a_private_cluster_gets():
    for local_cpus, cpus in ((0, max(4, 2 * num_cores())), (3, 3)):
        [check] = [check for check in doctor(ResourcesConfig(local_cpus=local_cpus)) if check.name == "processors"]
        assert check.detail.endswith(f"a private cluster gets {cpus} logical CPUs")


def test_doctor_checks_a_machine_whose_user_has_no_home(monkeypatch):
    """As in a container with a number for its user."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    [check] = [check for check in doctor() if check.name == "authentication"]
    assert check.ok


def test_a_temporary_folder_that_ray_cannot_use_is_left_out_with_a_warning(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    assert session._temporary_folder() == Path("/tmp") and not caplog.records
    for folder in (tmp_path / "with a long path", Path("/nowhere")):
        monkeypatch.setenv("RAY_TMPDIR", str(folder))
        assert session._temporary_folder() == Path("/tmp")
        assert f"RAY_TMPDIR={folder} is not used but /tmp: name a writable folder with at most 20" in caplog.text


def test_a_join_that_fails_leaves_the_authentication_of_this_process_as_it_was(monkeypatch):
    def fail(**options: object) -> None:
        assert os.environ["RAY_AUTH_MODE"] == "disabled"
        raise ConnectionError("no cluster")

    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setattr(session, "_init_ray", fail)
    monkeypatch.setattr(session, "_require_listener", lambda address: None)
    monkeypatch.setattr(session, "_has_token", lambda: False)
    monkeypatch.setattr(session, "has_session", lambda: False)
    with (
        pytest.raises(ResourceError, match=r"RAY_AUTH_MODE=disabled.*no cluster"),
        connect(ResourcesConfig(address="192.0.2.1:6379")),
    ):
        pass
    assert "RAY_AUTH_MODE" not in os.environ


def test_a_dashboard_address_is_refused_with_what_to_set_instead():
    with (
        pytest.raises(ResourceError, match="RAY_API_SERVER_ADDRESS=http://somewhere:8265"),
        connect(ResourcesConfig(address="http://somewhere:8265")),
    ):
        pass


@pytest.mark.parametrize("address", ["127.0.0.1:1", "10.0..1:6379", "ray://10.0..1:10001"])
def test_an_address_where_nothing_listens_is_named_whatever_it_is(address):
    with pytest.raises(ResourceError, match=f"no Ray cluster listens at '{address}': .*; check resources.address"):
        session._require_listener(address)


def test_the_address_local_is_a_private_cluster_and_none_to_join(monkeypatch):
    """Ray would start one without a token, on every interface."""
    monkeypatch.setattr(session, "in_ray", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    assert session.cluster_address(ResourcesConfig()) is None
    assert not session.needs_ray(ResourcesConfig(), 1)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert session.cluster_address(ResourcesConfig(address="local")) is None
    assert session.cluster_address(ResourcesConfig()) == "127.0.0.1:6379"


@pytest.mark.parametrize(("is_installed", "detail"), [(True, "20"), (False, "more slowly; pip install 'mvr-ray[open")])
def test_doctor_says_what_embedding_on_a_cpu_goes_without(monkeypatch, is_installed, detail):
    if not is_installed:
        monkeypatch.setitem(sys.modules, "openvino", None)
    [check] = [check for check in doctor() if check.name == "openvino"]
    assert check.ok and detail in check.detail


@pytest.mark.parametrize("precision", ["int8", "openvino", "openvino-bf16"])
def test_doctor_misses_openvino_where_the_precision_needs_it(monkeypatch, precision):
    monkeypatch.setitem(sys.modules, "openvino", None)
    [check] = [check for check in doctor(precision=precision) if check.name == "openvino"]
    assert not check.ok and f"index.precision {precision} needs it" in check.detail


def test_doctor_misses_the_gpus_that_the_run_file_asks_for(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name in ("gpus_per_encoder", "gpus_per_trainer", "gpus_per_searcher"):
        [check] = [check for check in doctor(ResourcesConfig(**{name: 0.5})) if check.name == "gpus"]
        assert not check.ok and f"resources.{name} is 0.5" in check.detail
    on_cluster = ResourcesConfig(gpus_per_encoder=1, address="http://127.0.0.1:1")
    for resources in (ResourcesConfig(), on_cluster):
        [check] = [check for check in doctor(resources) if check.name == "gpus"]
        assert check.ok


@pytest.mark.ray
def test_connecting_inside_a_session_keeps_it_open(ray_session):
    with connect(ResourcesConfig()) as info:
        assert info.cpus == ray_session.cpus
    assert ray.is_initialized()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def _listeners(pids: set[int]) -> list[tuple[str, int]]:
    """Address in the kernel's notation and process of every TCP socket on which one of the processes listens."""
    owners: dict[str, int] = {}
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):  # ended since
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(FileNotFoundError):  # closed since
                    owners[str(link.readlink())] = pid
    sockets = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and (owner := owners.get(f"socket:[{columns[9]}]")):
                sockets.append((columns[1].partition(":")[0], owner))
    return sockets


def _descendants(root: int) -> set[int]:
    """The process and its living descendants."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
"""127.0.0.1, the same within IPv6, and ::1."""


class PrivateCluster(NamedTuple):
    """A driver with a private cluster, its folder, and the cluster's processes."""

    driver: subprocess.Popen[str]
    folder: Path
    pids: list[int]

    def processes_left(self) -> list[int]:
        return [pid for pid in self.pids if Path(f"/proc/{pid}").exists() and _state(pid) != "Z"]


STARTING = """
import os, sys
from mvr_ray.cli import exit_on_interrupt
from mvr_ray.config import ResourcesConfig
from mvr_ray.distributed.cluster.session import connect

class Slow:
    def __call__(self, batch):
        import time
        time.sleep(0.1)
        return batch

def work(resources, is_pipeline):
    with connect(resources, dashboard=is_pipeline) as info:
        import ray
        node, rows = ray._private.worker._global_node, [None]
        if is_pipeline:
            from mvr_ray.distributed.cluster.ray_data import map_in_pool
            rows = map_in_pool(Slow, {}, list(range(500)), resources, "counting")
        for row in rows:
            pids = [p.process.pid for group in node.all_processes.values() for p in group]
            print("up", info.cpus, os.environ["RAY_AUTH_MODE"], node.temp_dir, *pids, flush=True)
            sys.stdin.read()

with exit_on_interrupt():
    try:
        work(ResourcesConfig(local_cpus=2, encoders_max=1), len(sys.argv) > 1)
    finally:
        import ray
        print(ray.is_initialized())
"""


def start_private(folder: Path, *words: str) -> PrivateCluster:
    """Start a private cluster with its files in a folder, whose path must be short. With a word it has the processes
    of a pipeline and a dashboard, and its driver waits between two rows."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-c", STARTING, *words]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    driver = subprocess.Popen(command, **pipes, text=True, cwd=folder, env=env | {"RAY_TMPDIR": str(folder)})
    assert driver.stdout
    line = driver.stdout.readline().split()
    assert line[:3] == ["up", "2.0", "token"], driver.communicate(timeout=120)
    return PrivateCluster(driver, Path(line[3]), [int(pid) for pid in line[4:]])


@pytest.fixture(scope="module")
def short_folder() -> Iterator[Path]:
    folder = tempfile.mkdtemp(prefix="m", dir="/tmp")
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)  # processes of a killed cluster may write until they end


@pytest.fixture(scope="module")
def killed_cluster(short_folder: Path) -> PrivateCluster:
    """What is left of a cluster whose driver was killed, before the next start."""
    cluster = start_private(short_folder)
    cluster.driver.kill()
    cluster.driver.communicate(timeout=120)
    assert cluster.folder.exists()
    return cluster


@pytest.fixture(scope="module")
def pipeline_cluster(short_folder: Path, killed_cluster: PrivateCluster) -> Iterator[PrivateCluster]:
    """The next cluster, with a pipeline; the last test that uses it ends it."""
    cluster = start_private(short_folder, "pipeline")
    yield cluster
    cluster.driver.kill()
    cluster.driver.wait(120)


@pytest.mark.ray
def test_the_folder_of_a_killed_driver_goes_with_the_next_start(
    killed_cluster: PrivateCluster, pipeline_cluster: PrivateCluster
):
    assert pipeline_cluster.folder.exists()
    assert not killed_cluster.folder.exists()


@pytest.mark.ray
@pytest.mark.skipif(not Path("/proc/net/tcp").is_file(), reason="listening sockets are read from /proc")
def test_every_process_of_a_private_cluster_listens_on_the_loopback_alone(pipeline_cluster: PrivateCluster):
    listeners = _listeners(_descendants(pipeline_cluster.driver.pid))
    assert len(listeners) >= 6
    assert [own for own in listeners if own[0] not in LOOPBACK] == []


@pytest.mark.ray
def test_an_interrupt_between_two_rows_of_a_pipeline_ends_it_before_its_cluster(
    short_folder: Path, pipeline_cluster: PrivateCluster
):
    """Ray Data's own thread would start another cluster, and an exit would wait for it for ever."""
    pipeline_cluster.driver.send_signal(signal.SIGINT)
    output, errors = pipeline_cluster.driver.communicate(timeout=300)
    assert (pipeline_cluster.driver.returncode, output) == (130, "False\n"), errors
    assert list(short_folder.iterdir()) == []
    assert len(pipeline_cluster.pids) >= 3
    assert not pipeline_cluster.processes_left()


@pytest.mark.ray
def test_a_private_cluster_that_is_interrupted_many_times_leaves_no_process_and_no_folder(short_folder: Path):
    cluster = start_private(short_folder)
    for _ in range(600):
        cluster.driver.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            cluster.driver.wait(0.05)
            break
    cluster.driver.communicate(timeout=120)
    assert not cluster.folder.exists()
    assert len(cluster.pids) >= 2
    assert not cluster.processes_left()


def test_an_interrupt_while_leaving_ray_acts_after_it_or_once_that_takes_too_long(monkeypatch: pytest.MonkeyPatch):
    before = signal.getsignal(signal.SIGINT)
    order: list[str] = []
    with pytest.raises(KeyboardInterrupt), session._deferring_interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        order.append("left Ray")
    assert order == ["left Ray"]
    monkeypatch.setattr(session, "_LEAVE_S", 0.0)
    for number in (signal.SIGINT, signal.SIGTERM):
        with pytest.raises(KeyboardInterrupt), session._deferring_interrupts():
            signal.raise_signal(number)
    assert signal.getsignal(signal.SIGINT) is before


TERMINATED_AT_START = """
import os, signal, threading, time
from mvr_ray.config import ResourcesConfig
from mvr_ray.distributed.cluster.session import connect
signal.signal(signal.SIGTERM, signal.default_int_handler)

def terminate():
    while signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=terminate, daemon=True).start()
try:
    with connect(ResourcesConfig(local_cpus=2)):
        time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.ray
def test_a_sigterm_while_ray_starts_interrupts_as_it_does_later(tmp_path: Path):
    """Ray's own handler, which it sets meanwhile, ends the process by status 15."""
    command = [sys.executable, "-c", TERMINATED_AT_START]
    child = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert (child.returncode, child.stdout) == (0, "interrupted\n"), child.stderr


LEFT_WHILE_A_THREAD_CONNECTS = """
import sys, threading, time
import ray
from mvr_ray.config import ResourcesConfig
from mvr_ray.distributed.cluster.session import connect
from mvr_ray.distributed.searching import transport

connecting = threading.Event()

def refuse_late(*_, **__):
    connecting.set()
    time.sleep(float(sys.argv[1]))
    raise OSError("refused")

@ray.remote(concurrency_groups={"health": 1})
class Searcher:
    def endpoint(self):
        return "grpc://127.0.0.1:1", "token", b""

transport.flight.FlightClient = refuse_late
with connect(ResourcesConfig(local_cpus=2)):
    connection = transport.Connection(Searcher.remote(), 1)
    connection.add_waiting(1)
    connection.call("search", "1", b"", transport.Deadline.after(1))
    connecting.wait()
time.sleep(2)
print("left", ray.is_initialized())
"""


@pytest.mark.ray
@pytest.mark.parametrize("seconds", [0.05, 0.2, 2])
def test_a_session_is_left_after_the_threads_that_use_it(tmp_path: Path, seconds: float):
    """Ray ends a process with status 1 and no message if a thread frees a reference while another leaves."""
    command = [sys.executable, "-c", LEFT_WHILE_A_THREAD_CONNECTS, str(seconds)]
    child = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert (child.returncode, child.stdout) == (0, "left False\n"), child.stderr


BEFORE_AND_AFTER = """
import json, logging, os, signal
import ray.data
from ray._private import worker
from mvr_ray.config import ResourcesConfig
from mvr_ray.distributed.cluster.ray_data import map_in_pool
from mvr_ray.distributed.cluster.session import connect

def state():
    return {
        "environment": dict(os.environ),
        "pipelines": logging.getLogger("ray.data").level,
        "print": worker.print_to_stdstream.__module__,
        "SIGTERM": str(signal.getsignal(signal.SIGTERM)),
    }

states = [state()]
for _ in range(2):
    with connect(ResourcesConfig(local_cpus=2)):
        assert list(map_in_pool(lambda: len, {}, ["a", "bc"], ResourcesConfig(encoders_max=1), "sizes")) == [1, 2]
        states.append(state())
    states.append(state())
print(json.dumps(states))
"""


@pytest.mark.ray
def test_a_process_is_as_before_once_it_has_left_a_session(tmp_path: Path):
    """A Ray session of its own would print nothing of its tasks, and SIGTERM would stay Ray's."""
    command = [sys.executable, "-c", BEFORE_AND_AFTER]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TOKENIZERS_"))}
    child = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=300)
    assert child.returncode == 0, child.stderr
    before, *others = json.loads(child.stdout)
    assert (before["print"], before["SIGTERM"]) == ("ray._private.worker", str(signal.SIG_DFL))
    for during, after in (others[:2], others[2:]):
        assert all(during[name] != before[name] for name in before)
        assert after == before


JOINING = """
import json, os, sys
from mvr_ray.config import ResourcesConfig
from mvr_ray.distributed.cluster.session import connect
from mvr_ray.errors import ResourceError
for variables in json.load(sys.stdin):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    try:
        with connect(ResourcesConfig(address=sys.argv[1])) as info:
            print("joined", info.is_local, flush=True)
    except ResourceError as error:
        print("refused", error, flush=True)
"""


@pytest.mark.slow
@pytest.mark.ray
def test_only_a_process_with_the_token_joins_a_cluster_that_we_started(ray_session, tmp_path: Path):
    """The token of a private cluster is only in its starter's environment, and in no file of any home folder."""
    assert os.environ["RAY_AUTH_MODE"] == "token"
    token, address = os.environ["RAY_AUTH_TOKEN"], ray.get_runtime_context().gcs_address
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["HOME"] = str(tmp_path)

    def try_to_join(*environments: dict[str, str]) -> list[str]:
        """What a client says that has these variables, one environment after the other."""
        command, tries = [sys.executable, "-c", JOINING, address], json.dumps(environments)
        result = subprocess.run(command, env=environment, input=tries, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        assert token not in result.stdout + result.stderr
        return result.stdout.splitlines()

    tokens = [{"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": own} for own in ("f" * len(token), token)]
    *failures, success = try_to_join({}, *tokens)
    assert len(failures) == 2
    for output in failures:
        assert output.startswith("refused ")
        assert "RAY_AUTH_TOKEN" in output
    assert success == "joined False"
    assert not (tmp_path / ".ray" / "auth_token").exists()
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(token)
    assert try_to_join({}) == ["joined False"]


WITHOUT_TOKENS = """
import os, sys
from pathlib import Path
os.environ["RAY_AUTH_MODE"] = "disabled"
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
USING = """
import sys, ray
from mvr_ray.config import ResourcesConfig
from mvr_ray.distributed.cluster.session import connect

class Adder:
    def add(self, a, b):
        return a + b

with connect(ResourcesConfig(address=sys.argv[1])):
    print(ray.get(ray.remote(Adder).remote().add.remote(1, 2), timeout=60), flush=True)
"""


@pytest.mark.slow
@pytest.mark.ray
def test_a_token_left_at_home_does_not_spoil_a_cluster_without_tokens(tmp_path: Path):
    """Ray writes a token there when it starts a head; the next cluster may have none."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("f" * 64)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["HOME"] = str(tmp_path)
    other = subprocess.Popen(
        [sys.executable, "-c", WITHOUT_TOKENS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert other.stdout
        address = next(line for line in other.stdout if ":" in line and " " not in line.strip()).strip()
        result = subprocess.run([sys.executable, "-c", USING, address], env=environment, capture_output=True, text=True)
        assert result.stdout.split()[-1:] == ["3"], result.stdout + result.stderr
    finally:
        other.communicate(timeout=120)


@pytest.mark.slow
@pytest.mark.chaos("a private cluster's temporary folder has no room", "an error that says so, within a minute")
def test_a_private_cluster_that_cannot_start_is_an_error_of_ours():
    folder = tempfile.mkdtemp(prefix="m", dir="/tmp")  # Ray's sockets need a short path
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=4", "tmpfs", folder], capture_output=True
    ).returncode:
        pytest.skip("no file system can be mounted here")
    program = """
import sys
from mvr_ray.config import ResourcesConfig
from mvr_ray.distributed.cluster.session import connect
from mvr_ray.errors import ResourceError
try:
    with connect(ResourcesConfig(local_cpus=2)):
        pass
except ResourceError as error:
    sys.stdout.write(str(error))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    try:
        command = [sys.executable, "-c", program]
        result = subprocess.run(command, capture_output=True, text=True, env=environment | {"RAY_TMPDIR": folder})
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        Path(folder).rmdir()
    message = rf"a private Ray cluster of 2 logical CPUs could not start in {re.escape(folder)}.*: .+; `mvr-ray doctor`"
    assert re.match(message, result.stdout)
    assert result.returncode == 0 and "Traceback" not in result.stderr
