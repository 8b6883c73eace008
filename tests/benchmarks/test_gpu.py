"""The GPU suite from end to end without a GPU, and what it makes on the device."""

import os
import subprocess
import sys
from pathlib import Path

import gpu
import numpy as np
import pytest
import torch
from gpu_search import V, make_codes, make_scan, make_views, numbers

from mvr_ray.core.searching.codes import decode
from mvr_ray.core.searching.cuda_scan import FusedKernel
from mvr_ray.core.searching.scan import Scan
from mvr_ray.types import EmbeddingBlock

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
def test_the_suite_runs_on_a_cpu_and_finds_everything_exact():
    file = ROOT / "benchmarks" / "results" / "bench" / "gpu.json"
    before = file.stat().st_mtime_ns if file.exists() else None
    command = [sys.executable, "benchmarks/gpu.py", "--device", "cpu", "--size", "tiny"]
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    process = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    bars = [line for line in process.stdout.splitlines() if line.startswith("| ")]
    assert len(bars) == 5 and all(line.endswith("| met |") for line in bars), process.stdout
    assert (file.stat().st_mtime_ns if file.exists() else None) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured_and_that_is_said(capsys):
    assert gpu.main([]) == 2
    assert "no GPU here, so nothing was measured" in capsys.readouterr().err


def test_made_views_are_near_normal_distinct_and_exact_in_halves():
    rows_N = torch.arange(4000)
    own_ND = numbers(rows_N, 1, 32).double()
    assert abs(float(own_ND.mean())) < 2 and float(own_ND.std()) == pytest.approx(np.sqrt((256**2 - 1) / 3), rel=0.02)
    cosines_ND = torch.corrcoef(own_ND[:200])
    assert float((cosines_ND - torch.eye(200)).abs().mean()) < 0.2
    views_ND = make_views(rows_N, 32)
    wide_ND = numbers(rows_N, 1, 32) + numbers(rows_N // V, 2, 32)
    assert (views_ND.long() == wide_ND).all()
    assert len(torch.unique(views_ND, dim=0)) == len(rows_N)


def test_codes_made_on_the_device_are_as_far_from_their_views_as_they_report():
    views_ND = make_views(torch.arange(500), 48)
    codes_ND, scale_N1, away = make_codes(views_ND)
    decoded_ND = decode(codes_ND.numpy(), scale_N1[:, 0].numpy())
    away_N = np.linalg.norm(views_ND.numpy().astype(np.float64) - decoded_ND, axis=1)
    assert away_N.max() <= away <= away_N.max() * 1.001


@pytest.mark.parametrize("kind", ["int8", "fp16"])
def test_a_scan_of_made_views_is_that_of_the_same_views_in_memory(kind):
    passages, dimension = 300, 24
    views_ND = make_views(torch.arange(passages * V), dimension).numpy()
    numbers_N = np.tile(np.arange(V, dtype=np.int16), passages)
    block = EmbeddingBlock([f"{i:04d}" for i in range(passages)], np.arange(passages + 1) * V, numbers_N, views_ND)
    queries_QD = np.random.default_rng(0).standard_normal((5, dimension)).astype(np.float32)
    on_device = make_scan(passages, dimension, kind, FusedKernel("cpu")).search_with_counts(queries_QD, 20).hits
    in_memory = Scan([block], FusedKernel("cpu")).search_with_counts(queries_QD, 20).hits
    for one, other in zip(on_device, in_memory):
        np.testing.assert_array_equal(one, other)
