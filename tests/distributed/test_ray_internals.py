"""Checks that the installed Ray is the version that `ray_internals` was written for, and behaves as it requires."""

import ast
import importlib.util
import inspect
import os
import re
from pathlib import Path

import pytest
import ray
from ray._private import ray_constants, services
from ray._private.node import Node

from mvr_ray.distributed.cluster.ray_internals import READ_FROM, accepts_without_token, loopback_node, one_try


def test_ray_is_the_one_that_its_internals_were_read_from() -> None:
    assert ray.__version__.startswith(READ_FROM), "read ray_internals against this Ray, then change READ_FROM"


def test_ray_replaces_the_loopback_by_the_address_of_the_machine_except_in_the_block() -> None:
    machine = services.resolve_ip_for_localhost("127.0.0.1")
    with loopback_node():
        assert services.resolve_ip_for_localhost("127.0.0.1") == services.get_node_ip_address() == "127.0.0.1"
    assert services.resolve_ip_for_localhost("127.0.0.1") == machine


def test_ray_reads_the_switch_of_clusters_by_the_name_that_children_get() -> None:
    assert ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR == "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def test_a_driver_tries_to_join_as_often_as_the_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "RAY_gcs_server_port_wait_time_s"
    assert "num_retries = max(1, int(gcs_wait_override))" in (source := inspect.getsource(Node._init_gcs_client))
    assert f'gcs_wait_override = os.environ.get("{name}")' in source
    monkeypatch.delenv(name, raising=False)
    with one_try():
        assert os.environ[name] == "1"
    assert name not in os.environ
    monkeypatch.setenv(name, "60")
    with one_try():
        assert os.environ[name] == "60"
    assert os.environ[name] == "60"


def test_an_address_where_nothing_listens_does_not_accept_a_client() -> None:
    assert not accepts_without_token("127.0.0.1:1")


def private_names(source: str) -> set[str]:
    """Names with an underscore that the module imports from Ray, or reads from Ray or a name imported from it."""
    names, of_ray, nodes = set(), set(), list(ast.walk(ast.parse(source)))
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            folder = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                path = folder + alias.name
                if path.partition(".")[0] == "ray":
                    names.add(path)
                    of_ray.add(alias.asname or (alias.name if folder else "ray"))
    for node in nodes:
        if isinstance(node, ast.Attribute) and (path := ast.unparse(node)).partition(".")[0] in of_ray:
            names.add(path)
    return {name for name in names if re.search(r"\._[a-z]", name)}


def test_ray_is_used_beside_its_public_api_in_one_module_alone() -> None:
    lines = (
        *("import ray\nray.util._hidden()", "from ray._private import worker", "import ray._private.worker as worker"),
        *("from ray.serve.context import a, _get as b", "from ray import serve\nserve.context._get()"),
        "def f():\n    import ray\n    ray.worker._global.node",
    )
    assert all(private_names(line) for line in lines)
    assert not private_names("import ray\nfrom ray import serve\nself._x.ray._y, ray.get(self._x), ray.__version__")
    package = importlib.util.find_spec("mvr_ray")
    assert package is not None
    assert package.submodule_search_locations
    files = Path(package.submodule_search_locations[0]).rglob("*.py")
    assert {file.name for file in files if private_names(file.read_text(encoding="utf-8"))} == {"ray_internals.py"}
