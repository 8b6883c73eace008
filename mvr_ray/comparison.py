"""Compares two systems on the same questions: the difference, its interval, and whether it could be chance.

    value of a question    1 if one of the first k passages bears an answer (or is judged relevant), else 0
    difference             mean over seeds and questions of value(better) - value(than), in points
    interval               resamples articles, and adds the spread over seeds (`core.judging.metrics`)
    paired test            swaps the two systems' values of whole articles, each value being the mean over seeds
    t-tests                compare the seeds' means alone, unpaired as in CAMVR table 6, and paired

A question whose article is not known counts as an article of its own.

Shapes: S seeds, Q questions.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet as pq
from scipy import stats

from mvr_ray.core.judging.metrics import Groups, interval_over_seeds, paired_test
from mvr_ray.errors import ConfigError, DataError
from mvr_ray.store.formats.question_ranks import read_question_ranks
from mvr_ray.store.formats.trec import read_qrels, read_trec_run
from mvr_ray.types import FloatArray

UNKNOWN = (
    "it is not known which passages answer {!r}; retrieve questions that have answers, or compare TREC runs with "
    "--qrels FILE"
)
_SAME = 1e-9
"""Seeds that differ by less have no spread for a t-test."""


class Difference(NamedTuple):
    """A difference in points with its 95 % interval. `p` is that of the paired test over articles; those of the t-tests
    are nan where there is one seed, or where seeds do not differ."""

    points: float
    low: float
    high: float
    p: float
    unpaired_t: float
    paired_t: float
    seeds: int
    questions: int


def difference(better_SQ: FloatArray, than_SQ: FloatArray, articles_Q: Groups, seed: int = 0) -> Difference:
    """`better` minus `than`, seed by seed. A system of one seed (or [Q]) stands beside every seed of the other."""
    both = np.atleast_2d(better_SQ), np.atleast_2d(than_SQ)
    several = min(map(len, both)) > 1
    seeds = max(map(len, both))
    better, than = (np.broadcast_to(values_SQ, (seeds, len(articles_Q))) for values_SQ in both)
    points_SQ = 100 * (better - than)
    better_S, than_S = better.mean(axis=1), than.mean(axis=1)
    seeds_differ = several and max(np.ptp(better_S), np.ptp(than_S)) > _SAME
    gaps_differ = several and np.ptp(better_S - than_S) > _SAME
    return Difference(
        float(points_SQ.mean()),
        *interval_over_seeds(points_SQ, articles_Q, seed),
        paired_test(better.mean(axis=0), than.mean(axis=0), articles_Q, seed),
        float(stats.ttest_ind(better_S, than_S).pvalue) if seeds_differ else math.nan,
        float(stats.ttest_rel(better_S, than_S).pvalue) if gaps_differ else math.nan,
        seeds,
        len(articles_Q),
    )


class ComparisonRow(NamedTuple):
    """Shares of questions answered in the first k, in points, and their difference with its 95 % interval; `p` is the
    paired test's."""

    metric: str
    first: float
    second: float
    difference: float
    low: float
    high: float
    p: float
    questions: int


class Ranking(NamedTuple):
    """Ranks from 1 of each question's first passage that counts, infinity where none does, a row a seed; and the
    articles of the questions, where they are known."""

    ranks: dict[str, list[float]]
    articles: dict[str, str]


def compare(
    first: str | Path,
    second: str | Path,
    ks: Sequence[int],
    seed: int = 0,
    qrels: Path | None = None,
    question_set: str | None = None,
) -> list[ComparisonRow]:
    """Count answer-bearing passages, or those that `qrels` judges relevant in TREC runs.

    Each side is a ranking file, or FILE:SYSTEM of a file of question ranks. Raises ConfigError, and DataError when the
    two do not rank the same questions.
    """
    if bad := [k for k in ks if k < 1]:
        raise ConfigError(f"compare: -k is {bad[0]}; give cut-offs of 1 or more")
    both = [_ranking(str(one), qrels, question_set) for one in (first, second)]
    if alone := sorted(set(both[0].ranks) ^ set(both[1].ranks)):
        raise DataError(
            f"{first} and {second} rank different questions: {len(alone)} stand in only one of them "
            f"(first: {alone[0]!r}); retrieve the same question set twice"
        )
    questions = sorted(both[0].ranks)
    articles = both[0].articles or both[1].articles
    groups = [articles.get(question, f"question {question}") for question in questions]
    ranks = [np.array([one.ranks[question] for question in questions]).T for one in both]
    seeds = [len(ranks_SQ) for ranks_SQ in ranks]
    if seeds[0] != seeds[1] and 1 not in seeds:
        raise ConfigError(
            f"compare: {first} has {seeds[0]} seeds and {second} has {seeds[1]}; compare systems of as many seeds, or "
            f"with one that was not trained"
        )
    rows = []
    for k in ks:
        first_SQ, second_SQ = ((ranks_SQ <= k).astype(float) for ranks_SQ in ranks)
        shares = 100 * float(first_SQ.mean()), 100 * float(second_SQ.mean())
        gap = difference(second_SQ, first_SQ, groups, seed)
        rows.append(ComparisonRow(f"top-{k}", *shares, gap.points, gap.low, gap.high, gap.p, gap.questions))
    return rows


def _ranking(side: str, qrels: Path | None, question_set: str | None) -> Ranking:
    stem, separator, system = side.partition(".parquet:")
    if not separator:
        return Ranking({name: [rank] for name, rank in first_ranks(Path(side), qrels).items()}, {})
    path = f"{stem}.parquet"
    if not Path(path).is_file():
        raise DataError(f"{path} does not exist; `mvr-ray evaluate` and `mvr-ray study` write files of question ranks")
    parts = read_question_ranks(Path(path))
    systems = sorted({part.system for part in parts})
    parts = [part for part in parts if part.system == system]
    if not parts:
        raise ConfigError(f"compare: {path} has no system {system!r}; there are {', '.join(map(repr, systems))}")
    sets = sorted({part.questions for part in parts})
    if question_set is None and len(sets) > 1:
        raise ConfigError(f"compare: {path} has several question sets; give --questions, one of {', '.join(sets)}")
    parts = [part for part in parts if part.questions == (question_set or sets[0])]
    if not parts:
        raise ConfigError(f"compare: {path} has no question set {question_set!r}; there are {', '.join(sets)}")
    ranks: dict[str, list[float]] = {}
    for part in parts:
        for name, rank in zip(part.question_ids, part.answer_ranks):
            if rank is not None:
                ranks.setdefault(name, []).append(rank + 1 if rank >= 0 else np.inf)
    return Ranking(ranks, dict(zip(parts[0].question_ids, parts[0].articles)))


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
    grades = read_qrels(qrels)
    rankings: dict[str, list[tuple[float, str]]] = {question: [] for question in grades}
    for line in read_trec_run(path):
        if line.question_id in grades:
            rankings[line.question_id].append((-line.score, line.passage_id))
    return {q: [grades[q].get(passage, 0) > 0 for _, passage in sorted(hits)] for q, hits in rankings.items()}


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
