"""Time each loop compiled for AVX2, and that of AOpt's step, against torch or numpy over the same memory.

    python benchmarks/kernels.py

One thread, in the same run: search of 160,000 vectors by the loops and by torch's kernel, both behind the same flat
index, so that both end in the same exact scores; exact scores and norms alone; and the sums and the step of AOpt
against `torch.embedding_bag`. Every loop's result is compared with the other's first. On a processor with AVX-512 torch
may use it, the loops for AVX2 do not. `search.py` has the loops for AVX-512, and Faiss.

Shapes: Q questions, N vectors, P passages, D dimension, M pairs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import synthetic
import torch
from floors import read_bandwidth
from measure import Bar, Part, interleave, speedup, write
from numpy.typing import NDArray
from scipy.sparse import csr_array

from mvr_ray.core.refining import native_step
from mvr_ray.core.refining.pseudo_labels import LabelMatrices
from mvr_ray.core.searching.codes import encode
from mvr_ray.core.searching.exact import BlockTable, Pairs
from mvr_ray.core.searching.kernels import Kernel, TorchKernel
from mvr_ray.core.searching.native import Avx2Kernel
from mvr_ray.index.flat import FlatIndex
from mvr_ray.types import EmbeddingBlock

SHAPE, K, BATCHES = synthetic.Shape(20_000, 8, 384), 10, (1, 32, 256)
PAIRS, QUESTIONS, LABELS = 3_000, 10_000, 11
ROUNDS, LEAST = 21, 1.1
COMPILED = "compiled"
SLACK = 1e-4  # of a sum in float32 against another order of additions

Cases = dict[str, Callable[[], Any]]


def compare(part: Part, loop: str, work: float, cases: Cases, check: Callable[[Any, Any], None]) -> None:
    """Check the results of the compiled loop and of its peer against each other, then time both in turn."""
    ours, theirs = (run() for run in cases.values())
    check(ours, theirs)
    samples = interleave({f"{loop}: {name}": run for name, run in cases.items()}, ROUNDS)
    part.add(samples, work)
    first, second = samples
    ratio = speedup(samples, first, second)
    part.bars.append(Bar(f"{loop} against {list(cases)[1]}", ratio, LEAST))
    print(f"{loop}: {np.median(samples[first]) * 1e3:.2f} ms, {ratio:.2f} x", flush=True)


def same_hits(ours: Any, theirs: Any) -> None:
    np.testing.assert_array_equal(ours.rows_QK, theirs.rows_QK)
    np.testing.assert_array_equal(ours.scores_QK, theirs.scores_QK)


def same_columns(ours: Any, theirs: Any) -> None:
    for column, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(column, other)


def close(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=SLACK, atol=SLACK)


def searches(part: Part, block: EmbeddingBlock, halves: EmbeddingBlock, bandwidth: float) -> None:
    codes = [encode(block.vectors_ND)]
    kinds: dict[str, tuple[EmbeddingBlock, Any, int]] = {
        "fp32": (block, None, 4),
        "fp16": (halves, None, 2),
        "int8": (block, codes, 1),
    }
    queries_QD = synthetic.questions(block.vectors_ND, max(BATCHES))
    for name, (vectors, own_codes, size) in kinds.items():
        kernels: dict[str, Kernel] = {COMPILED: Avx2Kernel(1), "torch": TorchKernel("cpu", 1)}
        indexes = {
            label: FlatIndex([vectors], codes=own_codes, threads=1, kernel=kernel) for label, kernel in kernels.items()
        }
        for batch in BATCHES:
            batch_QD, loop = queries_QD[:batch], f"search of {name}, batch {batch}"
            cases: Cases = {label: partial(index.search, batch_QD, K) for label, index in indexes.items()}
            compare(part, loop, batch, cases, same_hits)
            if batch == 1:
                part.floors[f"{loop}: {COMPILED}"] = size * block.vectors_ND.size / bandwidth


def exact_scores(part: Part, name: str, block: EmbeddingBlock) -> None:
    """Score pairs by the compiled loop, and by numpy, which scores blocks that the loop cannot read."""
    draw = np.random.default_rng(2)
    queries_QD = synthetic.questions(block.vectors_ND, 32)
    pairs = Pairs(draw.integers(0, 32, PAIRS), draw.integers(0, SHAPE.passages, PAIRS))
    table, plain = BlockTable([block]), BlockTable([block])
    plain.compiled_rows = [None]
    compare(
        part,
        f"exact scores of {name}",
        PAIRS,
        {COMPILED: partial(table.rescore, queries_QD, pairs), "numpy": partial(plain.rescore, queries_QD, pairs)},
        same_columns,
    )


def norms(part: Part, name: str, vectors_ND: NDArray[Any], bandwidth: float) -> None:
    kernel = Avx2Kernel(1)
    rows, peer_ND = kernel.prepare_rows(vectors_ND), torch.from_numpy(vectors_ND)

    def largest() -> float:
        return float(torch.linalg.vector_norm(peer_ND, dim=1, dtype=torch.float32).max())

    def largest_rounding() -> float:
        wide_ND = peer_ND.float()
        return float(torch.linalg.vector_norm(wide_ND - wide_ND.bfloat16().float(), dim=1).max())

    for what, errors, peer in (("norms", False, largest), ("rounding errors", True, largest_rounding)):
        loop = f"{what} of {name}"
        cases: Cases = {COMPILED: partial(kernel.max_norm, rows, errors=errors), "torch": peer}
        compare(part, loop, len(vectors_ND), cases, close)
        part.floors[f"{loop}: {COMPILED}"] = vectors_ND.nbytes / bandwidth


def steps(part: Part, block: EmbeddingBlock) -> None:
    """Sum the questions labelled for each vector and step all vectors, as AOpt does: eqs. 13 and 14."""
    vectors_ND = block.vectors_ND
    partners_QD = synthetic.questions(vectors_ND, QUESTIONS)
    labels = LabelMatrices(_labels(len(vectors_ND), 0), _labels(len(vectors_ND), 1))
    rows_M, step_size = np.arange(len(vectors_ND)), 0.01
    x_MD, y_QD = torch.from_numpy(vectors_ND), torch.from_numpy(partners_QD)
    bags = [(torch.from_numpy(own.indices.astype(np.int64)), torch.from_numpy(own.indptr[:-1])) for own in labels]

    def by_bags() -> native_step.StepVectors:
        positive_MD, negative_MD = (
            torch.nn.functional.embedding_bag(index, y_QD, start.long(), mode="sum") for index, start in bags
        )
        total_MD = positive_MD + negative_MD
        positive_M1, total_M1 = ((x_MD * sum_MD).sum(1, keepdim=True) for sum_MD in (positive_MD, total_MD))
        moved_MD = x_MD + step_size * (positive_MD / positive_M1 - total_MD / total_M1)
        return native_step.StepVectors(moved_MD.numpy(), torch.hstack([positive_M1, total_M1]).numpy())

    def by_loop() -> native_step.StepVectors:
        return native_step.step(vectors_ND, partners_QD, labels, rows_M, step_size)

    def check(ours: Any, theirs: Any) -> None:
        """Compare the sums' products: where one is near zero, the vector moves by many times their difference."""
        np.testing.assert_allclose(ours.scores_M2, theirs.scores_M2, rtol=SLACK, atol=SLACK)

    count = labels.positive_NQ.nnz + labels.negative_NQ.nnz
    compare(part, "AOpt's step", count, {COMPILED: by_loop, "torch": by_bags}, check)


def _labels(rows: int, seed: int) -> csr_array:
    """Draw the questions labelled for each vector."""
    columns = np.random.default_rng(seed).integers(0, QUESTIONS, rows * LABELS, dtype=np.int32)
    starts = np.arange(0, rows * LABELS + 1, LABELS, dtype=np.int32)
    return csr_array((np.ones(rows * LABELS, np.float32), columns, starts), shape=(rows, QUESTIONS))


def main() -> None:
    torch.set_num_threads(1)
    part, bandwidth = Part("kernels", "Compiled loops against torch and numpy", "items"), read_bandwidth(1)
    block = synthetic.block(np.concatenate(list(synthetic.vectors(SHAPE, synthetic.SEEN))), SHAPE.views)
    halves = block._replace(vectors_ND=block.vectors_ND.astype(np.float16))
    searches(part, block, halves, bandwidth)
    for name, own in (("fp32", block), ("fp16", halves)):
        exact_scores(part, name, own)
        norms(part, name, own.vectors_ND, bandwidth)
    steps(part, block)
    part.facts = {
        "vectors": len(block.vectors_ND),
        "dimension": SHAPE.dimension,
        "k": K,
        "pairs of exact scores": PAIRS,
        "labels of AOpt's step": 2 * LABELS * len(block.vectors_ND),
        "threads": 1,
        "torch uses": torch.backends.cpu.get_cpu_capability(),
        "memory, 1 thread, GB/s": bandwidth / 1e9,
    }
    write(part)


if __name__ == "__main__":
    main()
