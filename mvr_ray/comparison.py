"""Two rankings of the same questions side by side, question by question.

    top_k(q) = 1 if one of the first k passages of q bears an answer (or is judged relevant), else 0

The test is paired: it asks how often a difference as large arises when the two systems' values are swapped at random.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq

from mvr_ray.core.metrics import paired_test
from mvr_ray.errors import ConfigError, DataError
from mvr_ray.store.formats.trec import read_qrels, read_trec_run

UNKNOWN = (
    "it is not known which passages answer {!r}; retrieve questions that have answers, or compare TREC runs with "
    "--qrels FILE"
)


class Compared(NamedTuple):
    """Shares of questions answered in the first k, in points; `p` is the paired test's."""

    metric: str
    first: float
    second: float
    difference: float
    p: float
    questions: int


def compare(first: Path, second: Path, ks: Sequence[int], seed: int = 0, qrels: Path | None = None) -> list[Compared]:
    """Counts answer-bearing passages, or those that `qrels` judges relevant in TREC runs.

    Raises DataError when the files do not rank the same questions.
    """
    if bad := [k for k in ks if k < 1]:
        raise ConfigError(f"compare: -k is {bad[0]}; give cut-offs of 1 or more")
    ranks = [first_ranks(path, qrels) for path in (first, second)]
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
        p = float(paired_test(a_Q, b_Q, seed=seed))
        rows.append(Compared(f"top-{k}", *points, points[1] - points[0], p, len(questions)))
    return rows


def first_ranks(path: Path, qrels: Path | None = None) -> dict[str, float]:
    """Rank of the first passage that counts, infinity where none does; keyed by question id, or place and text."""
    if not path.is_file():
        raise DataError(f"ranking {path} does not exist; make one with `mvr-ray retrieve CONFIG ... output={path}`")
    if path.suffix not in (".parquet", ".jsonl", ".json"):
        flags = _trec(path, qrels)
    elif path.suffix == ".parquet":
        flags = _parquet(path)
    else:
        flags = _json(path)
    if not flags:
        raise DataError(f"ranking {path} holds no question")
    return {key: next((float(i) for i, flag in enumerate(row, 1) if flag), np.inf) for key, row in flags.items()}


def _trec(path: Path, qrels: Path | None) -> dict[str, list[bool]]:
    if qrels is None:
        raise ConfigError(
            f"compare: {path} is not .json, .jsonl or .parquet, and a TREC run does not say which passages count; "
            f"give --qrels FILE"
        )
    judged = read_qrels(qrels)
    scored: dict[str, list[tuple[float, str]]] = {question: [] for question in judged}
    for line in read_trec_run(path):
        if line.question_id in judged:
            scored[line.question_id].append((-line.score, line.passage_id))
    return {q: [judged[q].get(passage, 0) > 0 for _, passage in sorted(hits)] for q, hits in scored.items()}


def _parquet(path: Path) -> dict[str, list[bool]]:
    table = pq.read_table(path, columns=["question_id", "rank", "has_answer"]).sort_by("rank")
    flags: dict[str, list[bool]] = {}
    for row in table.to_pylist():
        flags.setdefault(row["question_id"], []).append(_flag(row, path, row["question_id"]))
    return flags


def _json(path: Path) -> dict[str, list[bool]]:
    text = path.read_text(encoding="utf-8")
    try:
        rows = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines() if line]
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    flags: dict[str, list[bool]] = {}
    for i, row in enumerate(rows):
        hits = row.get("ctxs") or row.get("hits") if isinstance(row, dict) else None
        if hits is None or "question" not in row:
            raise DataError(f"{path}, entry {i + 1}: not a ranking of `mvr-ray retrieve`; it needs question and hits")
        if not row.get("answers"):
            raise DataError(f"{path}, entry {i + 1}: {UNKNOWN.format(row['question'])}")
        flags[str(row.get("id") or f"{i} {row['question']}")] = [_flag(hit, path, row["question"]) for hit in hits]
    return flags


def _flag(hit: dict[str, Any], path: Path, question: str) -> bool:
    if hit.get("has_answer") is None:
        raise DataError(f"{path}: {UNKNOWN.format(question)}")
    return bool(hit["has_answer"])
