"""Two rankings of the same questions side by side, question by question.

    top_k(q) = 1 if one of the first k passages of q bears an answer, else 0

The test is paired: it asks how often a difference as large arises when the two systems' values are swapped at random.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow.parquet as pq

from mvr_ray.core.metrics import paired_test
from mvr_ray.errors import ConfigError, DataError


class Compared(NamedTuple):
    """Shares of questions answered in the first k, in points; `p` is the paired test's."""

    metric: str
    first: float
    second: float
    difference: float
    p: float
    questions: int


def compare(first: Path, second: Path, ks: Sequence[int], seed: int = 0) -> list[Compared]:
    """Raises DataError when the files do not rank the same questions."""
    if bad := [k for k in ks if k < 1]:
        raise ConfigError(f"compare: -k is {bad[0]}; give cut-offs of 1 or more")
    ranks = [first_answer_ranks(path) for path in (first, second)]
    if alone := sorted(set(ranks[0]) ^ set(ranks[1])):
        raise DataError(
            f"{first} and {second} rank different questions: {len(alone)} stand in only one of them "
            f"(first: {alone[0]!r}); retrieve the same question set twice"
        )
    questions = sorted(ranks[0])
    both = [np.array([ranked[q] for q in questions], dtype=float) for ranked in ranks]
    rows = []
    for k in ks:
        a_Q, b_Q = ((at <= k).astype(float) for at in both)
        points = 100 * float(a_Q.mean()), 100 * float(b_Q.mean())
        p = float(paired_test(a_Q, b_Q, seed))
        rows.append(Compared(f"top-{k}", *points, points[1] - points[0], p, len(questions)))
    return rows


def first_answer_ranks(path: Path) -> dict[str, float]:
    """Rank of the first answer-bearing passage a question, infinity where none; keyed by question and its place."""
    if not path.is_file():
        raise DataError(f"ranking {path} does not exist; make one with `mvr-ray retrieve CONFIG ... output={path}`")
    flags = _flags(path)
    if not flags:
        raise DataError(f"ranking {path} holds no question")
    return {key: next((float(i) for i, flag in enumerate(row, 1) if flag), np.inf) for key, row in flags.items()}


def _flags(path: Path) -> dict[str, list[bool]]:
    if path.suffix == ".parquet":
        rows = pq.read_table(path).to_pylist()
    elif path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    elif path.suffix == ".json":
        rows = json.loads(path.read_text(encoding="utf-8"))
    else:
        raise ConfigError(
            f"compare: {path} is not .json (dpr), .jsonl or .parquet; a TREC run does not say which passages "
            f"bear an answer, use ir-measures with your qrels"
        )
    return _grouped(rows, path)


def _grouped(rows: list[dict], path: Path) -> dict[str, list[bool]]:
    flags: dict[str, list[bool]] = {}
    for i, row in enumerate(rows):
        hits = row.get("ctxs") or row.get("hits")
        if hits is None or "question" not in row or any("has_answer" not in hit for hit in hits):
            raise DataError(f"{path}, entry {i + 1}: not a ranking of `mvr-ray retrieve`; it needs question and hits")
        key = str(row.get("question_id") or f"{i} {row['question']}")
        flags[key] = [bool(hit["has_answer"]) for hit in hits]
    return flags
