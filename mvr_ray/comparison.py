"""Compare two systems on the same questions: the difference, its interval, and its significance.

    top-k                  1 if one of the first k passages bears an answer (or is gold, or judged relevant), else 0
    gold/mrr               1 / rank of the first gold (or judged) passage, within the smaller depth of the two sides
    gold/ndcg@10           nDCG of the gold (or judged) passages
    difference             mean over seeds and questions of value(better) - value(than), in points
    interval               resamples articles, and adds the spread over seeds (`core.judging.metrics`)
    paired test            swaps the two systems' values of whole articles, each value being the mean over seeds
    t-tests                compare the seeds' means alone, unpaired as in CAMVR table 6, and paired
    p                      the larger of the paired test's and the paired t-test's: a difference of the methods, not of
                           these trainings, holds for other articles and for other seeds

A question of an unknown article counts as an article of its own. Beyond the depth of a ranking it is not known whether
a passage counts, so no cut-off is greater than the depth of either side.

Shapes: S seeds, Q questions.
"""

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from mvr_ray.core.judging.metrics import NDCG_CUTOFF, Groups, interval_over_seeds, ndcg, paired_test
from mvr_ray.errors import ConfigError, DataError
from mvr_ray.store.formats.question_ranks import read_question_ranks, reported_depth
from mvr_ray.store.formats.ranked_ids import QuestionHits, is_trec_run, read_ranked_ids, rows_by_id
from mvr_ray.store.formats.sources import read_question_file
from mvr_ray.store.formats.text_files import plain_name
from mvr_ray.store.formats.trec import read_qrels
from mvr_ray.types import FloatArray

log = logging.getLogger(__name__)

HOW_TO_JUDGE = (
    "give --qrels FILE, or compare the systems of the files that `mvr-ray evaluate CONFIG ranking=FILE` writes, which "
    "judges by the store's own question sets"
)
QUESTION_ENDS = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
"""Endings of question files; judgements of other names have the columns of TREC or BEIR."""
CUTOFFS = (1, 5, 20, 100)
_SAME = 1e-9
"""Seeds that differ by less have no spread for a t-test."""


class Difference(NamedTuple):
    """A difference in points with its 95 % interval, NaN where all articles agree. `p` is the larger of the paired
    test's over articles, `articles_p`, and, with several seeds of a side, of the paired t-test's over seeds; the
    t-tests' own are NaN with one seed of a side, or where seeds do not differ."""

    points: float
    low: float
    high: float
    p: float
    articles_p: float
    unpaired_t: float
    paired_t: float
    seeds: int
    questions: int


def difference(better_SQ: FloatArray, than_SQ: FloatArray, articles_Q: Groups, seed: int = 0) -> Difference:
    """Return `better` minus `than`, seed by seed. A system of one seed (or [Q]) is paired with every seed of the
    other."""
    both = np.atleast_2d(better_SQ), np.atleast_2d(than_SQ)
    several = min(map(len, both)) > 1
    seeds = max(map(len, both))
    better, than = (np.broadcast_to(values_SQ, (seeds, len(articles_Q))) for values_SQ in both)
    points_SQ = 100 * (better - than)
    better_S, than_S = better.mean(axis=1), than.mean(axis=1)
    seeds_differ = several and max(np.ptp(better_S), np.ptp(than_S)) > _SAME
    gaps_differ = np.ptp(better_S - than_S) > _SAME
    articles_p = paired_test(better.mean(axis=0), than.mean(axis=0), articles_Q, seed)
    seeds_p = float(stats.ttest_rel(better_S, than_S).pvalue) if gaps_differ else math.nan
    return Difference(
        float(points_SQ.mean()),
        *interval_over_seeds(points_SQ, articles_Q, seed),
        max(articles_p, seeds_p),  # the first where the second is NaN
        articles_p,
        float(stats.ttest_ind(better_S, than_S).pvalue) if seeds_differ else math.nan,
        seeds_p if several else math.nan,
        seeds,
        len(articles_Q),
    )


class ComparisonRow(NamedTuple):
    """The means of a metric, in points, and their difference with its 95 % interval, NaN where all articles agree; `p`
    is that of `Difference`, not corrected for the number of rows."""

    metric: str
    first: float
    second: float
    difference: float
    low: float
    high: float
    p: float
    questions: int


class Judgements(NamedTuple):
    """A file of judgements, and the grades of the relevant passages of every question that has some."""

    path: Path
    relevant: dict[str, dict[str, int]]


class Ranking(NamedTuple):
    """Ids and texts of questions, None where the file has none; for each question and seed the rank, from 1, of the
    first passage that counts, infinity where none does; the known articles by question id; the number of hits among
    which that passage was looked for, the most of any question; by question id the ranks of the first gold passage and
    the nDCGs, where they are known; and the seeds, ascending."""

    ids: list[str | None]
    texts: list[str | None]
    ranks: list[list[float]]
    articles: dict[str, str]
    depth: int
    gold_ranks: Mapping[str, list[float]]
    gold_ndcgs: Mapping[str, list[float]]
    seeds: Sequence[int] = (0,)


def compare(
    first: str | Path,
    second: str | Path,
    ks: Sequence[int] | None = None,
    seed: int = 0,
    qrels: Path | None = None,
    question_set: str | None = None,
) -> list[ComparisonRow]:
    """Compare two rankings by answer-bearing passages; by gold ones where no question of a file of question ranks has
    answers; by those that `qrels`, judgements of TREC or BEIR or a question file with gold passages, judges relevant
    where it is given, which a TREC run needs. Rows of reciprocal ranks and nDCG follow where both sides know gold or
    judged passages.

    Each side is a ranking file, or FILE:SYSTEM of a file of question ranks. Questions are the same by id, or by text
    where a side has no ids (DPR's JSON). `ks` None: those of CUTOFFS that both sides reach. Raises ConfigError, also
    for a cut-off deeper than a side, and DataError when the two do not rank the same questions.
    """
    sides = str(first), str(second)
    _check_arguments(sides, ks, qrels, question_set)
    judgements = None if qrels is None else _read_judgements(qrels)
    both = [_ranking(side, judgements, question_set) for side in sides]
    places = _question_places(sides, both)
    if unmatched_keys := sorted(set(places[0]) ^ set(places[1])):
        raise DataError(
            f"{first} and {second} rank different questions: {len(unmatched_keys)} are in only one of them "
            f"(first: {unmatched_keys[0][0]!r}); retrieve the same question set twice, by format=jsonl where "
            f"questions may have no hit"
        )
    keys = sorted(places[0])
    articles = both[0].articles or both[1].articles
    groups = [articles.get(name, f"question {name} {number}") for name, number in keys]
    ranks = [np.array([ranking.ranks[at[key]] for key in keys]).T for ranking, at in zip(both, places)]
    seeds = [list(ranking.seeds) for ranking in both]
    single = next((side for side, own in zip(sides, seeds) if len(own) == 1), None)
    if seeds[0] != seeds[1] and single is None:
        names = [", ".join(map(str, own)) for own in seeds]
        raise ConfigError(
            f"compare: {first} has seeds {names[0]} and {second} has {names[1]}; compare systems of the same seeds, or "
            f"with one that was not trained"
        )
    if single and max(map(len, seeds)) > 1:
        log.warning("one seed, whose spread is in no interval and no p, unless it is untrained: ranking=%s", single)
    rows = []

    def add(metric: str, first_SQ: FloatArray, second_SQ: FloatArray, groups_Q: Groups) -> None:
        means = 100 * float(first_SQ.mean()), 100 * float(second_SQ.mean())
        gap = difference(second_SQ, first_SQ, groups_Q, seed)
        rows.append(ComparisonRow(metric, *means, gap.points, gap.low, gap.high, gap.p, gap.questions))

    for k in _known_cutoffs(ks, sides, both):
        first_SQ, second_SQ = ((ranks_SQ <= k).astype(float) for ranks_SQ in ranks)
        add(f"top-{k}", first_SQ, second_SQ, groups)
    depth = min(ranking.depth for ranking in both)
    for metric, (first_of, second_of) in {
        "gold/mrr": [_reciprocal(ranking.gold_ranks, depth) for ranking in both],
        f"gold/ndcg@{NDCG_CUTOFF}": [ranking.gold_ndcgs for ranking in both],
    }.items():
        if names := sorted(first_of.keys() & second_of.keys()):
            first_SQ, second_SQ = (np.array([of[name] for name in names]).T for of in (first_of, second_of))
            add(metric, first_SQ, second_SQ, [articles.get(name, f"question {name}") for name in names])
    if without_interval := [row.metric for row in rows if math.isnan(row.low)]:
        names = ",".join(without_interval)
        log.warning("no interval, as articles agree: metrics=%s articles=%d", names, len(set(groups)))
    return rows


def _reciprocal(ranks_of: Mapping[str, list[float]], depth: int) -> dict[str, list[float]]:
    """Return the reciprocals of ranks, 0 beyond the depth, by question id."""
    return {name: [1 / rank if rank <= depth else 0.0 for rank in ranks] for name, ranks in ranks_of.items()}


def _check_arguments(
    sides: tuple[str, str], ks: Sequence[int] | None, qrels: Path | None, question_set: str | None
) -> None:
    """Raise ConfigError for a cut-off below 1, and for a file or a set that these sides lack or do not need."""
    if bad := [k for k in ks or () if k < 1]:
        raise ConfigError(f"compare: -k is {bad[0]}; give cut-offs of 1 or more")
    if qrels is None and (runs := [side for side in sides if _is_trec_run(side)]):
        raise ConfigError(
            f"compare: {runs[0]} is not .json, .jsonl or .parquet, and a TREC run does not say which passages count; "
            f"{HOW_TO_JUDGE}"
        )
    if qrels is not None and all(".parquet:" in side for side in sides):
        raise ConfigError("compare: --qrels has no effect on FILE:SYSTEM, which has no passages; leave it out")
    if question_set is not None and not any(".parquet:" in side for side in sides):
        raise ConfigError(
            f"compare: --questions {question_set} has no effect on rankings, which have one question set each; leave "
            f"it out"
        )


def _known_cutoffs(ks: Sequence[int] | None, sides: tuple[str, str], both: list[Ranking]) -> Sequence[int]:
    """Return the cut-offs, absent: those of CUTOFFS that both sides reach. Raises ConfigError for a deeper one."""
    shallow, depth = min(((side, ranking.depth) for side, ranking in zip(sides, both)), key=lambda pair: pair[1])
    too_deep = [k for k in ks or CUTOFFS if k > depth]
    if ks and too_deep:
        raise ConfigError(
            f"compare: -k is {too_deep[0]}, but {shallow} is known to rank only {depth} passages a question; give "
            f"cut-offs up to {depth}, or rank more by retrieve.k or evaluate.k"
        )
    if too_deep:
        log.warning("cut-offs left out: k=%s ranking=%s depth=%d", ",".join(map(str, too_deep)), shallow, depth)
    return ks or [k for k in CUTOFFS if k <= depth]


def _question_places(sides: tuple[str, str], both: list[Ranking]) -> list[dict[tuple[str, int], int]]:
    """Return the position of every question in each ranking, by its id (else its text) and the occurrence of that
    name."""
    for both_names in ([ranking.ids for ranking in both], [ranking.texts for ranking in both]):
        if all(name is not None for names in both_names for name in names):
            places: list[dict[tuple[str, int], int]] = [{}, {}]
            for own, names in zip(places, both_names):
                counts: Counter[str] = Counter()
                for place, name in enumerate(map(str, names)):
                    own[name, counts[name]] = place
                    counts[name] += 1
            return places
    by_text, by_id = sorted(sides, key=lambda side: any(both[sides.index(side)].ids))
    raise ConfigError(
        f"compare: {by_text} names its questions by their texts, {by_id} by their ids, so they cannot be "
        f"matched; retrieve one of them again with format=jsonl or format=parquet, which write both"
    )


def _read_judgements(path: Path) -> Judgements:
    if not path.is_file():
        raise DataError(f"qrels {path} does not exist or is not a file; give --qrels the file of judgements")
    is_questions = plain_name(path).suffix.lower() in QUESTION_ENDS
    grades_of = {one.id: one.grade_of for one in read_question_file(path)} if is_questions else read_qrels(path)
    grades = {name: {i: grade for i, grade in own.items() if grade > 0} for name, own in grades_of.items()}
    relevant = {name: own for name, own in grades.items() if own}
    if num_dropped := sum(bool(own) for own in grades_of.values()) - len(relevant):
        log.warning("questions left out whose judged passages are all irrelevant (trec_eval: 0): %d", num_dropped)
    if not relevant:
        need = "questions with gold passages (positive_ids)" if is_questions else "a file with grades above 0"
        raise DataError(f"qrels {path} judges no passage relevant; give --qrels {need}")
    return Judgements(path, relevant)


def _is_trec_run(side: str) -> bool:
    return ".parquet:" not in side and is_trec_run(side)


def _ranking(side: str, judgements: Judgements | None, question_set: str | None) -> Ranking:
    stem, separator, system = side.partition(".parquet:")
    if not separator:
        return _file_ranking(Path(side), judgements)
    path = f"{stem}.parquet"
    if not Path(path).is_file():
        raise DataError(f"{path} does not exist; `mvr-ray evaluate` and `mvr-ray study` write files of question ranks")
    parts = read_question_ranks(Path(path))
    file_ranks = (rank for part in parts for rank in (*part.answer_ranks, *part.gold_ranks) if rank is not None)
    depth = reported_depth(Path(path)) or 1 + max((0, *file_ranks))
    systems = sorted({part.system for part in parts})
    parts = sorted((part for part in parts if part.system == system), key=lambda part: part.seed)
    if not parts:
        raise ConfigError(f"compare: {path} has no system {system!r}; there are {', '.join(map(repr, systems))}")
    sets = sorted({part.questions for part in parts})
    if question_set is None and len(sets) > 1:
        raise ConfigError(f"compare: {path} has several question sets; give --questions, one of {', '.join(sets)}")
    parts = [part for part in parts if part.questions == (question_set or sets[0])]
    if not parts:
        raise ConfigError(f"compare: {path} has no question set {question_set!r}; there are {', '.join(sets)}")
    answer_ranks, gold_ranks, gold_ndcgs = {}, {}, {}
    for part in parts:
        kinds = (answer_ranks, part.answer_ranks), (gold_ranks, part.gold_ranks), (gold_ndcgs, part.gold_ndcgs)
        for values_of, values in kinds:
            for name, value in zip(part.question_ids, values):
                if value is not None:
                    values_of.setdefault(name, []).append(value)
    for ranks_of in (answer_ranks, gold_ranks):
        for name, ranks in ranks_of.items():
            ranks_of[name] = [rank + 1 if rank >= 0 else np.inf for rank in ranks]
    ranks = gold_ranks if judgements is not None else answer_ranks or gold_ranks
    if judgements is not None and not ranks:
        raise ConfigError(
            f"compare: {side} has no ranks of gold passages, so it cannot be compared by {judgements.path}; compare "
            f"it without --qrels, by answers, with FILE:SYSTEM or a ranking file that marks the passages that answer"
        )
    articles = dict(zip(parts[0].question_ids, parts[0].articles))
    all_ranks, seeds = list(ranks.values()), [part.seed for part in parts]
    return Ranking(list(ranks), [None] * len(ranks), all_ranks, articles, depth, gold_ranks, gold_ndcgs, seeds)


def _file_ranking(path: Path, judgements: Judgements | None) -> Ranking:
    """Judge a ranking file: by the judgements of its questions' passages, else by its own marks. Questions without a
    relevant passage are omitted; judged questions that the file lacks have no passage that counts."""
    rows = read_ranked_ids(path)
    if judgements is not None:
        if any(row.id is None for row in rows):
            raise ConfigError(
                f"compare: {path} names its questions by their texts, so {judgements.path} does not say which passages "
                f"count; retrieve it again with format=jsonl or format=parquet, which write their ids"
            )
        relevant, first = judgements.relevant, rows[0].id
        row_of = rows_by_id((row for row in rows if row.id in relevant), path)
        if not row_of:
            raise DataError(
                f"{path} ranks none of the {len(relevant)} questions that {judgements.path} judges (first: "
                f"{next(iter(relevant))!r}; the ranking's first: {first!r}); give --qrels the judgements of its "
                f"question set"
            )
        for row in row_of.values():
            row.require_distinct(path)
        rows = [row_of.get(name, QuestionHits(name, None, [])) for name in relevant]
        flags = [[name in relevant[str(row.id)] for name, _ in row.hits] for row in rows]
    else:
        for number, row in enumerate(rows, 1):
            if any(mark is None for _, mark in row.hits):
                raise DataError(
                    f"{path}, entry {number}: it is not known which passages answer {row.text!r}; {HOW_TO_JUDGE}"
                )
        flags = [[bool(mark) for _, mark in row.hits] for row in rows]
    ranks = [[next((float(rank) for rank, flag in enumerate(own, 1) if flag), np.inf)] for own in flags]
    depth = max((1, *(len(row.hits) for row in rows)))
    gold_ranks, gold_ndcgs = {}, {}
    if judgements is not None:
        names = [str(row.id) for row in rows]
        gold_ranks = dict(zip(names, ranks))
        if depth >= NDCG_CUTOFF:
            lists, grades = [[i for i, _ in row.hits] for row in rows], [judgements.relevant[name] for name in names]
            gold_ndcgs = {name: [value] for name, value in zip(names, ndcg(lists, grades, NDCG_CUTOFF).tolist())}
    return Ranking([row.id for row in rows], [row.text for row in rows], ranks, {}, depth, gold_ranks, gold_ndcgs)
