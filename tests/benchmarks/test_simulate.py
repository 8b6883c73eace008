"""The simulation's inputs and its run from end to end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rates import KNOWN, read_rates, told
from simulate import NUM_SHARDS, PASSAGES, World, costs, node_service, stages
from small_clusters import Scan, V

ROOT = Path(__file__).resolve().parent.parent.parent


def report(name: str, samples: dict, facts: dict | None = None) -> dict:
    return {
        "name": name,
        "hardware": {"date": "2026-01-01"},
        "facts": facts or {},
        "samples": samples,
        "work": dict.fromkeys(samples, 100.0),
    }


def test_a_stated_rate_goes_before_a_case_and_two_cases_say_nothing(tmp_path):
    name = "encoded passages/s"
    _, pattern = KNOWN[name]
    one = {"ours, fp32": [2.0, 4.0, 3.0], "peer, fp32": [1.0]}
    found = told(name, report("encoding", one), pattern)
    assert found is not None and found.value == pytest.approx(100 / 3) and "ours, fp32" in found.source
    assert told(name, report("encoding", {**one, "ours, fp32, again": [1.0]}), pattern) is None
    assert told(name, report("encoding", {"peer": [1.0]}), pattern) is None
    (tmp_path / "encoding.json").write_text(json.dumps(report("encoding", one, {"rates": {name: 7.5}})))
    assert {key: rate.value for key, rate in read_rates(tmp_path).items()} == {name: 7.5}


def test_a_cluster_of_nodes_does_the_work_of_one_node_so_many_times_faster():
    scan = Scan(vectors=1000, one_s=0.5, many_s=4.0, batch=32, spread=0.0)
    whole = PASSAGES * V / 1000
    for nodes in (1, 4, 16, NUM_SHARDS):
        service = node_service(World(nodes=nodes), scan, 1.0)
        assert service.work_s(1) == pytest.approx(0.5 * whole / nodes)
        assert service.work_s(32) == pytest.approx(4.0 * whole / nodes)
    assert node_service(World(nodes=24), scan, 1.0).work_s(1) == pytest.approx(0.5 * whole * 3 / NUM_SHARDS)


def test_hours_are_passages_over_rates_and_money_needs_a_price(tmp_path):
    facts = {"rates": {"encoded passages/s": 50.0, "indexed passages/s": 1000.0}}
    for part in ("encoding", "growth"):
        (tmp_path / f"{part}.json").write_text(json.dumps(report(part, {}, facts)))
    hours = stages(World(encoders=8, nodes=16), read_rates(tmp_path))
    assert hours["encode, fp32, 8 workers"] == pytest.approx(PASSAGES / 50 / 8 / 3600, rel=0.01)
    assert hours["index, 16 nodes"] == pytest.approx(PASSAGES / 1000 / 16 / 3600)
    free, paid = costs(World(), hours, {}), costs(World(node_price=2.0), hours, {})
    assert all(told.endswith("node hours") for told in free.values())
    assert paid["serve, a day"] == "384 node hours, 768"


@pytest.mark.ray
def test_a_tiny_run_measures_small_clusters_and_predicts_from_them():
    command = [sys.executable, "benchmarks/simulate.py", "--tiny", "--node-price", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [f"{n} searchers, idle: predicted / measured" in done.stdout for n in (1, 2, 4)] == [True] * 3
