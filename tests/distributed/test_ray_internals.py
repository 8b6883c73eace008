"""Checks that the installed Ray is the version that `ray_internals` was written for, and behaves as it requires."""

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


def test_ray_is_used_beside_its_public_api_in_one_module_alone() -> None:
    package = importlib.util.find_spec("mvr_ray")
    assert package is not None
    assert package.submodule_search_locations
    files = Path(package.submodule_search_locations[0]).rglob("*.py")
    users = {file.name for file in files if re.search(r"ray\._(private|raylet)", file.read_text(encoding="utf-8"))}
    assert users == {"ray_internals.py"}
