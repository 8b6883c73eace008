"""Reads the metrics of a job from a node's exporter."""

import re
import time
import urllib.request
from contextlib import suppress

import pytest
import ray

from mvr_ray.distributed.cluster import job_metrics
from mvr_ray.types import no_progress


def exported_series(until: str) -> dict[str, float]:
    """Wait for a series of that name and labels, and return our series that this node exports."""
    [node] = [node for node in ray.nodes() if node["Alive"]]
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        text = ""
        with suppress(OSError):  # a busy node's exporter refuses, or is late
            text = urllib.request.urlopen(address, timeout=10).read().decode()
        series = {
            " ".join([name, *re.findall(r'(?:stage|step|index)="([^"]*)"', labels)]): float(value)
            for name, labels, value in re.findall(r"^(ray_mvr_ray_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE)
        }
        if until in series:
            return series
        time.sleep(0.5)
    raise AssertionError(f"{until} never came at {address}")


def test_outside_a_session_progress_is_reported_and_no_metric_is_set(monkeypatch):
    monkeypatch.setattr(job_metrics.session, "in_ray", lambda: False)
    monkeypatch.setattr(job_metrics, "_gauge", None)
    reports = []
    job_metrics.with_metrics("index", "x", lambda *step: reports.append(step))("encode", 1, 2)
    job_metrics.record_round("x", {"loss": 1.0})
    assert reports == [("encode", 1, 2)]


@pytest.mark.ray
def test_a_node_exports_how_far_a_job_is_when_it_moved_and_what_a_round_brought(ray_session):
    start = time.time()
    progress = job_metrics.with_metrics("refine", "squad", no_progress)
    progress("refine round 1: retrieve", 1, 8)
    progress("refine round 2: retrieve (loss 0.5, dev 0.25)", 3, 8)
    job_metrics.record_round("squad", {"gate_top1": 0.625, "labelled_top1": float("nan")})
    series = exported_series("ray_mvr_ray_refine_gate_top1 squad")
    assert series["ray_mvr_ray_refine_gate_top1 squad"] == 0.625
    series = {name: value for name, value in series.items() if " squad" in name}  # without other jobs' series
    steps = {name: value for name, value in series.items() if "job_done" in name or "job_total" in name}
    assert sorted(steps.values()) == [3, 8] and all("refine round: retrieve" in name for name in steps)
    [moved_at] = [value for name, value in series.items() if "moved_at" in name]
    assert start - 1 < moved_at < time.time() + 1
    assert not any("labelled_top1" in name for name in series)
