"""The simulation's inputs and its run from end to end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_model import Scan
from rates import KNOWN, read_rate, read_rates, read_scans
from simulate import NUM_SHARDS, PASSAGES, World, costs, example, node_service, stages
from small_clusters import V

ROOT = Path(__file__).resolve().parent.parent.parent


def report(name: str, samples: dict, facts: dict | None = None) -> dict:
    return {
        "name": name,
        "hardware": {"date": "2026-01-01"},
        "facts": facts or {},
        "samples": samples,
        "work": dict.fromkeys(samples, 100.0),
    }


def test_a_stated_rate_goes_before_a_case_and_several_sizes_part_start_up_from_rate(tmp_path):
    name = "encoded passages/s"
    _, pattern = KNOWN[name]
    one = {"mvr_ray fp32": [2.0, 4.0, 3.0], "mvr_ray fp32, again": [1.0], "peer": [1.0]}
    rate = read_rate(name, report("encoding", one), pattern)
    assert rate is not None and rate.value == pytest.approx(100 / 3) and "'mvr_ray fp32'" in rate.source
    assert read_rate(name, report("encoding", {"peer": [1.0]}), pattern) is None
    (tmp_path / "encoding.json").write_text(json.dumps(report("encoding", one, {"rates": {name: 7.5}})))
    sizes = {f"index, {size:,} passages": [9 + size / 20_000] for size in (10_000, 30_000, 100_000)}
    growth = report("growth", {**sizes, "publish, 1,000,000 passages": [1.0]})
    (tmp_path / "growth.json").write_text(json.dumps(growth))
    rates = read_rates(tmp_path)
    assert set(rates) == {name, "indexed passages/s"} and rates[name].value == 7.5
    assert rates["indexed passages/s"].value == pytest.approx(20_000)
    assert rates["indexed passages/s"].fixed_s == pytest.approx(9)
    report_of_one = report("growth", {"index, 9,000 passages": [10.0]})
    alone = read_rate("indexed passages/s", report_of_one, r"index, ([\d,]+) passages")
    assert alone is not None and (alone.value, alone.fixed_s) == (10.0, 0.0)


def test_scans_are_those_of_all_threads_or_none(tmp_path):
    assert read_scans(tmp_path, 2) == ({}, "")
    samples = {f"2 threads, batch {batch}, fp16": [0.1 * batch, 0.3 * batch, 0.2 * batch] for batch in (1, 32)}
    (tmp_path / "search.json").write_text(json.dumps(report("search", samples, {"vectors": 1600})))
    scans, date = read_scans(tmp_path, 2)
    assert set(scans) == {"fp16"} and date == "2026-01-01"
    assert scans["fp16"][:4] == (1600, 0.2, pytest.approx(6.4), 32) and scans["fp16"].threads == 2
    assert read_scans(tmp_path, 1)[0] == {}
    assert scans["fp16"].service(3200).work_s(1) == pytest.approx(0.4)


def test_a_cluster_of_nodes_does_the_work_of_one_node_so_many_times_faster():
    scan = Scan(vectors=1000, one_s=0.5, many_s=4.0, batch=32, spread=0.0)
    whole = PASSAGES * V / 1000
    for nodes in (1, 4, 16, NUM_SHARDS):
        service = node_service(World(nodes=nodes), scan, 1.0)
        assert service.work_s(1) == pytest.approx(0.5 * whole / nodes)
        assert service.work_s(32) == pytest.approx(4.0 * whole / nodes)
        assert node_service(World(nodes=nodes, node_speed=2), scan, 1.5).work_s(1) == pytest.approx(
            service.work_s(1) / 3
        )
        both = node_service(World(nodes=nodes), scan._replace(threads=2), 1.5)  # measured with all cores at work
        assert both.work_s(1) == pytest.approx(service.work_s(1))
    assert node_service(World(nodes=24), scan, 1.0).work_s(1) == pytest.approx(0.5 * whole * 3 / NUM_SHARDS)


def test_hours_are_passages_over_rates_and_money_needs_a_price(tmp_path):
    facts = {"rates": {"encoded passages/s": 50.0, "indexed passages/s": 1000.0}}
    for part in ("encoding", "growth"):
        (tmp_path / f"{part}.json").write_text(json.dumps(report(part, {}, facts)))
    hours = stages(World(encoders=8, nodes=16), read_rates(tmp_path))
    assert hours["encode, fp32, 8 workers"] == pytest.approx(PASSAGES / 50 / 8 / 3600, rel=0.01)
    assert hours["index, 16 nodes"] == pytest.approx(PASSAGES / 1000 / 16 / 3600)
    late = {name: rate._replace(fixed_s=90.0) for name, rate in read_rates(tmp_path).items()}
    late_hours = stages(World(encoders=8, nodes=16), late)
    assert late_hours["index, 16 nodes"] - hours["index, 16 nodes"] == pytest.approx(90 / 3600)
    free_costs, paid_costs = costs(World(), hours, {}), costs(World(node_price=2.0), hours, {})
    assert all(cost.endswith("node hours") for cost in free_costs.values())
    assert paid_costs["serve, a day"] == "384 node hours, 768"
    uses = {"encode, fp32": 30.0, "encode, int8": 10.0, "index": 2.0, "serve, a day": 384.0}
    formula = "(10 (encode, int8) + 2 (index) + 384 (serve, a day)) node hours x "
    assert example(World(node_price=2.0), uses) == formula + "2 of --node-price = 396 x 2 = 792"
    assert "not a real price = 396 x 0.5 = 198" in example(World(), uses)


@pytest.mark.ray
@pytest.mark.slow
def test_a_tiny_run_measures_small_clusters_and_predicts_from_them(ray_session):
    import ray

    command = [sys.executable, "benchmarks/simulate.py", "--tiny", "--node-price", "1"]
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    for name in ("1 searcher", "2 searchers", "4 searchers"):
        assert f"{name}, idle: predicted / measured" in process.stdout, process.stdout
