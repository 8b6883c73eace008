"""The GPU's scan: the oracle's answers, by torch everywhere, and by the kernel itself where Triton can interpret it."""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from mvr_ray.core.searching import scan as scan_module
from mvr_ray.core.searching.codes import decode, encode
from mvr_ray.core.searching.cuda_scan import DeviceRows, FusedKernel
from mvr_ray.core.searching.scan import Scan, score_error

HAS_TRITON = importlib.util.find_spec("triton") is not None
SHAPES = [("gaussian", True), ("ternary", False), ("nearly equal", True), ("cancelling", False), ("duplicates", True)]


@pytest.mark.parametrize(("palette", "gaps"), SHAPES)
@pytest.mark.parametrize("with_codes", [False, True])
def test_answers_are_exhaustive_searchs_to_the_last_tie(shard, check_exact, monkeypatch, palette, gaps, with_codes):
    monkeypatch.setattr(scan_module, "VIEWS_A_STEP", 0)
    blocks = shard(5, 300, palette=palette, gaps=gaps)
    queries_QD = np.random.default_rng(6).standard_normal((3, 16)).astype(np.float32)
    codes = [encode(block.vectors_ND) for block in blocks] if with_codes else None
    for resident in (False, True):
        scan = Scan(blocks, FusedKernel("cpu"), codes=codes, resident=resident)
        check_exact(scan.search_with_counts(queries_QD, 40).hits, queries_QD, blocks, 40)
        for share in (0.0, 0.05, 0.5, 1.0):
            mask_P = np.random.default_rng(7).random(300) < share
            check_exact(scan.search_with_counts(queries_QD, 40, mask_P).hits, queries_QD, blocks, 40, mask_P)


@pytest.mark.parametrize("num_passages", [1, 31, 32, 33, 100])
def test_k_beyond_what_there_is_gives_all_there_is(shard, check_exact, num_passages):
    blocks = shard(8, num_passages)
    queries_QD = np.random.default_rng(9).standard_normal((2, 16)).astype(np.float32)
    check_exact(Scan(blocks, FusedKernel("cpu")).search_with_counts(queries_QD, 120).hits, queries_QD, blocks, 120)


def test_the_bounds_of_a_filtered_searchs_views_are_not_kept():
    kernel, of_step, of_filter = FusedKernel("cpu"), np.array([2, 1, 3]), np.array([2, 3])
    starts = kernel._start_of(of_step)
    assert starts.tolist() == [0, 2, 3, 6] and kernel._start_of(of_filter).tolist() == [0, 2, 5]
    del of_filter
    assert kernel._starts == {id(of_step): starts} and kernel._start_of(of_step) is starts


@pytest.mark.parametrize("columns", [32, 96, 320])
@pytest.mark.parametrize("keep", [1, 7, 101])
def test_selection_by_blocks_passes_what_plain_selection_passes(columns, keep):
    rng = np.random.default_rng(columns + keep)
    best_QP = torch.from_numpy(rng.integers(-20, 20, (4, columns)).astype(np.float32))
    best_QP[:, columns - 5 :] = -torch.inf
    error_Q = np.array([0.0, 0.5, 2.0, 30.0])
    low_QK = torch.from_numpy(np.sort(rng.integers(-30, 12, (4, keep)).astype(np.float32))[:, ::-1].copy())
    low, actual = FusedKernel("cpu").select(best_QP, error_Q, low_QK)
    seen_QP = best_QP[:, : columns - 5].numpy()
    for query, (best_P, error) in enumerate(zip(seen_QP, error_Q.astype(np.float32))):
        lowest = sorted([*(best_P - error).tolist(), *low_QK[query].tolist()], reverse=True)[:keep]
        assert low[query].tolist() == lowest
        upper_P = best_P + error
        through = {(passage, upper_P[passage]) for passage in np.flatnonzero(upper_P >= lowest[-1]).tolist()}
        own = actual.query_M == query
        assert set(zip(actual.passage_M[own].tolist(), actual.upper_M[own].tolist())) == through


KERNEL = """
import numpy as np, torch
from mvr_ray.core.searching.codes import encode
from mvr_ray.core.searching.cuda_scan import DeviceRows, FusedKernel, Tuning
from mvr_ray.core.searching.kernels import TorchKernel
from mvr_ray.core.searching.scan import score_error

rng = np.random.default_rng(3)
CASES = ((16, [8] * 40, 1), (384, [8] * 40, 3), (40, [3, 1, 8, 5] * 9, 17), (64, [1] * 70, 70))
for dimension, counts, queries in CASES:
    uniform = counts[0] if len(set(counts)) == 1 else 0
    vectors = rng.standard_normal((sum(counts), dimension)).astype(np.float16)
    asked = rng.standard_normal((queries, dimension)).astype(np.float32) * 10.0 ** rng.integers(-20, 20, (queries, 1))
    asked = asked.astype(np.float32)
    codes = encode(vectors)
    kernel, plain = FusedKernel("cpu", Tuning(rows=32)), TorchKernel("cpu")
    assert kernel.is_fused
    of = np.array(counts)
    code_rows = map(torch.from_numpy, (codes.codes_ND, codes.scale_N[:, None]))
    rows = DeviceRows(torch.from_numpy(vectors), None), DeviceRows(*code_rows)
    for one in rows:
        wide = plain.prepare_rows(one.rows_ND, one.scale_N1)
        truth = plain.best_views(torch.from_numpy(asked), wide, of, uniform).double().numpy()
        got = kernel.best_views(torch.from_numpy(asked), one, of, uniform).double().numpy()
        norm = np.linalg.norm(asked.astype(np.float64), axis=1)
        bound = 2 * score_error(norm, plain.max_norm(wide), dimension, kernel.input_rounding)[:, None]
        assert (np.abs(got[:, : len(of)] - truth) <= bound).all()
        assert (got[:, len(of) :] == -np.inf).all() and got.shape[1] % 32 == 0
print("checked")
"""


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_the_kernel_errs_within_its_bound():
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    process = subprocess.run([sys.executable, "-c", KERNEL], env=environ, capture_output=True, text=True, check=False)
    assert process.stdout.strip() == "checked", process.stderr


COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from mvr_ray.core.searching.cuda_kernel import best_views
from mvr_ray.core.searching.cuda_scan import Tuning

tuning, names = Tuning(), best_views.arg_names
for architecture, product in ((90, "wgmma"), (80, "mma.sync")):
    for kind, scaled, views in (("i8", True, 8), ("fp16", False, 0)):
        sizes = {"DIMENSION": 384, "VIEWS": views, "SLOTS": 8, "WITH_SCALES": scaled, "PASSAGES": tuning.rows // 8}
        sizes |= {"QUERIES": 64, "QUERY_TILES": 1, "COMPONENTS": tuning.row_bytes // (1 if kind == "i8" else 2)}
        types = {"rows_ptr": f"*{kind}", "scale_ptr": "*fp32", "start_ptr": "*i32", "queries_ptr": "*fp16"}
        types |= {"power_ptr": "*fp32", "best_ptr": "*fp32"}
        types |= dict.fromkeys(("num_passages", "num_queries", "width"), "i32")
        signature = {**types, **dict.fromkeys(sizes, "constexpr")}
        aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in types if name.endswith("ptr")}
        constants = {(names.index(name),): value for name, value in sizes.items()}
        source = ASTSource(fn=best_views, signature=signature, constexprs=constants, attrs=aligned)
        options = {"num_warps": tuning.warps, "num_stages": tuning.stages}
        made = compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        assert product in made.asm["ptx"] and "cp.async" in made.asm["ptx"]
        assert "st.local" not in made.asm["ptx"] and made.metadata.shared < 99_000
print("compiled")
"""


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_the_kernel_compiles_for_hopper_and_ampere_onto_tensor_cores_without_spilling():
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run([sys.executable, "-c", COMPILED], env=environ, capture_output=True, text=True, check=False)
    assert process.stdout.strip() == "compiled", process.stderr


def test_the_rounding_error_is_reported_and_the_largest_norm_is_that_of_what_is_scanned():
    rng = np.random.default_rng(4)
    vectors_ND = rng.standard_normal((50, 24)).astype(np.float16)
    codes, kernel = encode(vectors_ND), FusedKernel("cpu")
    assert kernel.input_rounding == 2.0**-11
    wide_ND = decode(codes.codes_ND, codes.scale_N)
    rows = DeviceRows(torch.from_numpy(codes.codes_ND), torch.from_numpy(codes.scale_N[:, None]))
    assert kernel.max_norm(rows) == pytest.approx(float(np.linalg.norm(wide_ND, axis=1).max()), rel=1e-6)
    assert (score_error(np.ones(1), 1.0, 384, 2.0**-11) > score_error(np.ones(1), 1.0, 384, 0.0)).all()
