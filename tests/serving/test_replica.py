"""Checks what `mvr-ray serve` refuses before any cluster is touched, and an index behind a client."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from in_memory_index import InMemoryIndex
from ray import serve
from version_store import version_catalog

from mvr_ray.client import Client, RefusedError
from mvr_ray.config import RunConfig, ServeConfig
from mvr_ray.deadline import Deadline
from mvr_ray.distributed.cluster import session
from mvr_ray.distributed.cluster.ray_internals import environment
from mvr_ray.errors import ConfigError, OverloadedError, ResourceError
from mvr_ray.serving import proxy_limit, replica
from mvr_ray.serving.auth import TokenStore
from mvr_ray.serving.replica import (
    SearchIngress,
    _replica_error,
    application,
    load_tokens,
    serve_until_interrupted,
    with_full_paths,
)
from mvr_ray.serving.service import SearchService
from mvr_ray.store import paths

READ = "read-" + "r" * 20


@pytest.fixture(autouse=True)
def no_tokens_around(monkeypatch) -> None:
    for name in ("MVR_RAY_READ_TOKEN", "MVR_RAY_ADMIN_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def run(**serve) -> RunConfig:
    return RunConfig.model_validate({"serve": serve})


def test_a_host_that_others_reach_is_not_deployed_without_tokens(monkeypatch) -> None:
    with pytest.raises(ConfigError, match=r"serve\.host 0\.0\.0\.0 .* no token"):
        load_tokens(run(host="0.0.0.0"))
    monkeypatch.setenv("MVR_RAY_READ_TOKEN", READ)
    assert load_tokens(run(host="0.0.0.0")).role(READ.encode()) == "read"


def test_an_empty_file_of_tokens_starts_no_server_without_tokens(tmp_path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# none yet\n")
    with pytest.raises(ConfigError, match="no token"):
        load_tokens(run(host="10.1.2.3", tokens_file=str(file)))


def test_on_the_loopback_tokens_are_taken_where_there_are_any(tmp_path) -> None:
    assert not load_tokens(run())
    file = tmp_path / "tokens"
    file.write_text(f"read {READ}\n")
    assert load_tokens(run(tokens_file=str(file)))


def test_replicas_get_the_full_paths_of_folders_since_their_own_working_folder_may_be_another(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sections = {"store": {"path": "store"}, "follow": {"source": "changes"}}
    local = with_full_paths(RunConfig.model_validate(sections))
    assert (local.store.path, local.follow.source) == (str(tmp_path / "store"), str(tmp_path / "changes"))
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    remote = RunConfig.model_validate({"store": {"path": "s3://bucket/store"}})
    assert with_full_paths(remote) == remote


def test_a_changed_serve_file_ends_no_replica_before_another_has_started() -> None:
    deployment = application(run(), None, TokenStore())._bound_deployment
    assert deployment._deployment_config.max_surge_percent == 100


def test_a_probe_ends_before_serve_gives_it_up_and_one_that_is_refused_has_ended() -> None:
    """Else Serve would replace a replica that answers from all searchers but one."""
    deadlines: list[Deadline] = []

    class FullIndex(InMemoryIndex):
        def search(self, queries_QD, k, *, deadline=None, **options):
            deadlines.append(deadline)
            raise OverloadedError("the queue of a searcher is full", 1.0)

    service = SearchService(FullIndex(), ServeConfig(timeout_ms=30_000))
    SearchIngress.check_health(SimpleNamespace(service=service))
    limit_s = application(run(), None, TokenStore())._bound_deployment._deployment_config.health_check_timeout_s
    assert [0 < deadline.timeout_s < limit_s for deadline in deadlines] == [True]


def library_run(folder: Path, **limits: int) -> RunConfig:
    """A run over a store of the folder with versions of index `library`, as far as a server looks before it starts."""
    store = version_catalog(folder).store
    encoder = {"fingerprint": "f" * 16, "spec": {"normalize": False}, "num_views": 2, "dimension": 3}
    content = json.dumps({"format_version": 1, **encoder}).encode()
    store.write_bytes(f"{paths.encoder_dir('words', 'f' * 16)}/{paths.ENCODER_JSON}", content)
    sections = {"store": {"path": store.root}, "index": {"name": "library"}, "serve": limits}
    return RunConfig.model_validate(sections)


def test_a_server_that_ends_leaves_the_environment_as_it_was(tmp_path, monkeypatch) -> None:
    """A later server of this process has proxies with its own limits."""
    monkeypatch.setenv(proxy_limit.MAX_WAITING, "7")
    monkeypatch.delenv(proxy_limit.TIMEOUT_MS, raising=False)  # the shared cluster of other tests sets it
    before = dict(os.environ)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        run = library_run(tmp_path, port=other.getsockname()[1], timeout_ms=1500)
        with pytest.raises(ConfigError, match="cannot be listened at"):
            serve_until_interrupted(run, None, print)
    assert dict(os.environ) == before
    with environment(proxy_limit.proxy_variables(ServeConfig(timeout_ms=1500)), replace=False):
        assert (os.environ[proxy_limit.MAX_WAITING], os.environ[proxy_limit.TIMEOUT_MS]) == ("7", "1500")
    assert dict(os.environ) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_server_and_a_second_one_changes_nothing(tmp_path, monkeypatch, number: signal.Signals) -> None:
    """Nor does a Serve that does not end: its controller may have gone."""
    calls: list[str] = []

    async def shut_down() -> None:
        calls.append("shut down")
        await asyncio.Event().wait()

    class SignallingProxy:
        def start(self, port: int) -> None:
            calls.append(f"started over {port}")

        def restart_if_ended(self) -> None:
            signal.raise_signal(number)

        def stop(self) -> None:
            for one in (signal.SIGINT, signal.SIGTERM):
                signal.raise_signal(one)
            calls.append("stopped")

    monkeypatch.setattr(replica, "ReverseProxy", lambda config, tokens: contextlib.nullcontext(SignallingProxy()))
    monkeypatch.setattr(session, "connect", lambda resources: contextlib.nullcontext())
    monkeypatch.setattr(replica, "_start_serve", lambda run: 7)
    monkeypatch.setattr(replica, "_deploy", lambda run, version, tokens, port: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="127.0.0.1:1"))
    monkeypatch.setattr(serve, "shutdown_async", shut_down)
    before = [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    serve_until_interrupted(library_run(tmp_path), None, calls.append)
    assert calls[1:2] == ["started over 7"] and calls[-3:] == ["stopping", "stopped", "shut down"]
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_server_is_refused_at_once_where_no_signal_could_end_it(tmp_path) -> None:
    with ThreadPoolExecutor(1) as threads, pytest.raises(ConfigError, match="only the main thread receives one"):
        threads.submit(serve_until_interrupted, library_run(tmp_path), None, print).result()


@pytest.mark.parametrize("text", ["this would wait for ever: no CPU", "No module named 'mvr_ray'"])
def test_why_no_replica_starts_is_said_in_its_own_words(monkeypatch, text: str) -> None:
    try:
        raise ResourceError(text) if " CPU" in text else ImportError(text)
    except (ResourceError, ImportError):
        message = f"failed 3 times. Error:\nRuntimeError: {traceback.format_exc()}\n"
    applications = {"mvr_ray": SimpleNamespace(deployments={"search": SimpleNamespace(message=message)})}
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications=applications))
    assert _replica_error(RuntimeError("Failed to update the deployments")).removeprefix("ImportError: ") == text
    applications.clear()
    assert _replica_error(RuntimeError("Failed to update\nthem")) == "Failed to update"


@pytest.mark.data
@pytest.mark.ray
def test_a_client_in_this_process_answers_from_the_index_and_its_store(small_index, run_over) -> None:
    with Client.in_process(run_over(small_index)) as client:
        answer = client.search(["What was the oil crisis?"], k=3, timeout_s=60)
        assert answer.exact.certified and client.ready(timeout_s=60).ready
        first = answer.results[0][0]
        passage = client.passage(first.id, timeout_s=60)
        assert passage.text == first.text
        assert first.snippet is None or first.snippet.text in [view.text for view in passage.views]
        assert client.versions().serving == client.versions().live == answer.version == 1
        assert client.version(1).encoder.endswith(answer.encoder_fingerprint)
        [explanation] = client.explain(["What was the oil crisis?"], [first.id], timeout_s=60).passages
        assert explanation.winners[0].score == pytest.approx(first.score, abs=1e-5)
        with pytest.raises(RefusedError, match="encoder_mismatch"):
            client.search(["x"], encoder_fingerprint="0" * 16)


@pytest.mark.data
@pytest.mark.ray
def test_a_version_that_is_published_is_answered_from_and_the_one_before_it_by_name(own_index, run_over) -> None:
    with Client.in_process(run_over(own_index, serve={"follow_s": 0})) as client:
        before = client.search(["What was the oil crisis?"], k=5, timeout_s=60)
        assert client.rollback(1).version == 2 == client.versions().serving
        after = client.search(["What was the oil crisis?"], k=5, timeout_s=60)
        first_answer = client.search(["What was the oil crisis?"], k=5, version=1, timeout_s=60)
        assert [one.version for one in (before, after, first_answer)] == [1, 2, 1]
        assert before.results == after.results == first_answer.results
        assert client.explain(["What was the oil crisis?"], k=1, version=1, timeout_s=60).version == 1
        assert client.promote(2).version == 2
        with pytest.raises(RefusedError, match="unknown_version"):
            client.search(["x"], version=7)
        with pytest.raises(RefusedError, match="not_newest"):
            client.promote(1)
