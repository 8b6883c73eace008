"""Tests that a cut network between two hosts changes no result, and that the hosts connect again.

Run by `make chaos`, as root: the hosts are network namespaces.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hosts import Hosts, two_hosts
from test_nodes import ASKING, QUESTIONS, finish, live, run_file

pytestmark = [pytest.mark.data, pytest.mark.nodes]

WORD = [sys.executable, "-m", "mvr_ray.cli"]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts("partition-" + "t" * 40) as cluster:
        cluster.start("head", cpus=6)
        cluster.until_nodes(1)
        cluster.start("other", cpus=6)
        cluster.until_nodes(2)
        yield cluster


def command(hosts: Hosts, *words: str):
    return hosts.on("head", [*WORD, *words], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)


def reconnect(hosts: Hosts) -> None:
    """Restore the network: the lost node ends, since its head removed it, and is started again."""
    hosts.mend()
    hosts.running["other"].wait(90)
    hosts.start("other", cpus=6)
    hosts.until_nodes(2)


@pytest.mark.chaos(
    "network cut between two hosts while one encodes",
    "the command ends well; the index is the undisturbed one to the byte; the cut host joins again",
)
def test_a_host_that_is_cut_off_while_it_encodes_changes_no_byte(
    corpus_store, run_over, tmp_path, hosts, record_property
):
    calm, store = (shutil.copytree(corpus_store, tmp_path / name) for name in ("calm", "store"))
    finish(command(hosts, "index", run_file(run_over, calm)))
    began = time.monotonic()
    finish(command(hosts, "index", run_file(run_over, store)), "encode:", hosts.cut)
    took = time.monotonic() - began
    assert live(store).content_digest() == live(calm).content_digest()
    hosts.until_nodes(1)
    reconnect(hosts)
    record_property("figures", f"{took:.0f} s with the network cut")


@pytest.mark.chaos(
    "network cut between two hosts while both search",
    "every answer is the right one or says what is missing; then all are whole on the host that is left",
)
def test_a_host_that_is_cut_off_while_it_searches_gives_no_wrong_answer(
    corpus_store, run_over, tmp_path, hosts, record_property
):
    store = shutil.copytree(corpus_store, tmp_path / "store")
    run = run_file(run_over, store, replicas=2)
    finish(command(hosts, "index", run))
    answers: list[dict] = []
    cut_at = None
    line = [sys.executable, "-c", ASKING, run, json.dumps(QUESTIONS)]
    with hosts.on("head", line, stdout=subprocess.PIPE) as asking:
        assert asking.stdout
        for text in asking.stdout:
            if not text.startswith("{"):
                continue  # Ray reports workers on stdout
            answers.append(json.loads(text))
            if len(answers) == 100:
                hosts.cut()
                cut_at, began = len(answers), time.monotonic()
            if cut_at and time.monotonic() - began > 40 and all(a.get("certified") for a in answers[-50:]):
                break
        asking.terminate()
    assert cut_at
    whole = [answer for answer in answers if answer.get("certified")]
    partial = [answer for answer in answers if not answer.get("certified")]
    assert all(answer["hits"] == answers[0]["hits"] and answer["coverage"] == 1 for answer in whole)
    assert all("CoverageError" in answer.get("error", "") for answer in partial)
    gaps = [late["at"] - early["at"] for early, late in pairwise(answers)]
    hosts.until_nodes(1)
    reconnect(hosts)
    figures = f"{len(answers)} answers, {len(partial)} refused as not covered, longest wait {max(gaps):.1f} s"
    record_property("figures", figures)
