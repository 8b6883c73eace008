"""Measure accuracy by the frequency of a question's entity in the corpus, dense retrieval beside BM25 (AOpt table 1).

AOpt's table 1 compares them on EntityQuestions (Sciavolino et al., EMNLP 2021), most of whose entities are rare. That
set is not available here. Instead, the questions of any set are divided by their own entity:

    entity       the longest run of capitalised words of a question (`entity_of`)
    frequency    number of passages whose text contains the entity, matched token by token like answers
    buckets      the quartiles of frequency among the questions with an entity; the questions without one; all

Every value is a share of questions with its 95 % interval over articles (`metrics.share_interval`), and its
difference from BM25 with the p of the test that flips whole articles.

Option of the step: `k`, the depths (default 1, 5, 20).

Shapes: Q questions, P passages.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import regex

from mvr_ray.config import RunConfig
from mvr_ray.core.judging.answers import AnswerMatcher
from mvr_ray.core.judging.metrics import cluster_interval, hit_within, paired_test, share_interval
from mvr_ray.distributed.evaluate import BM25_SYSTEM, evaluate
from mvr_ray.errors import ConfigError
from mvr_ray.store import manifest
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.formats.question_ranks import QuestionRanks
from mvr_ray.store.questions import read_questions
from mvr_ray.studies.definition import BM25, NO_OPTIONS, Options
from mvr_ray.types import IntArray, Progress, no_progress

KS = (1, 5, 20)
NUM_BUCKETS = 4
ALL, NO_ENTITY = "all questions", "no entity"

_WORD = regex.compile(r"[\p{L}\p{N}][\p{L}\p{M}\p{N}]*(?:(?:['’](?!s\b)|[.&-])[\p{L}\p{M}\p{N}]+)*")
_BLANK = regex.compile(r"\s+")
_PERIOD = regex.compile(r"\.\s+")
_LONGEST_ABBREVIATION = 3
_STARTS = """
what which who whom whose when where why how a an the this that these those it its he she his her they their there we i
you one two three both each every all any some no not many most much more several another other such only is are was
were be been being am do does did has have had can could will would shall should may might must in on at by for from to
of with without within under over about above after before during since until till through throughout between among
against around near outside inside into onto upon up down out off along beside besides beyond despite except like unlike
per via as than due because if while although though once whether according prior aside apart instead rather following
compared regarding based approximately roughly and or but name list describe identify give
"""
_FIRST_WORDS = frozenset(_STARTS.split())
"""Words that begin questions and are no names, from the questions of SQuAD."""


class FrequencyBucket(NamedTuple):
    """Questions whose entity occurs in `low` to `high` passages; None for buckets without a frequency."""

    name: str
    low: int | None
    high: int | None
    questions: list[int]


class Gain(NamedTuple):
    """A system's share less that of BM25 (-1..1), with its 95 % interval and the p of the paired test."""

    value: float
    low: float
    high: float
    p: float


class EntityRow(NamedTuple):
    """Share (0..1) of a bucket's `n` questions with an answer among a system's first `k`, with its 95 % interval."""

    system: str
    bucket: str
    low_frequency: int | None
    high_frequency: int | None
    n: int
    articles: int
    k: int
    value: float
    low: float
    high: float
    over_bm25: Gain | None


class EntitySet(NamedTuple):
    questions: str
    rows: list[EntityRow]


class EntityReport(NamedTuple):
    """A report with the `ranks` of the index and of BM25 for every question of each set."""

    index: str
    version: int
    passages: int
    sets: list[EntitySet]
    ranks: list[QuestionRanks]


def entity_frequency(run: RunConfig, progress: Progress = no_progress, options: Options = NO_OPTIONS) -> EntityReport:
    """Rank `evaluate.questions` with the live index and with BM25, and divide the questions by their entities.

    Raises ConfigError for a set without answers, and the errors of `evaluate`.
    """
    ks = sorted(set(options.get("k", KS)))
    settings = run.evaluate.model_copy(update={"k": ks, "bm25": True, "hybrid": None})
    report = evaluate(run.model_copy(update={"evaluate": settings}), progress)
    store = Store(run.store.path)
    version = manifest.read(store, report.index, report.version)
    passages = Corpus.open(store, version.corpus, version.corpus_digest)
    sets = []
    for name in dict.fromkeys(settings.questions):
        texts = {question.id: question.text for question in read_questions(passages, name)}
        systems = {
            BM25 if own.system == BM25_SYSTEM else own.system: own for own in report.ranks if own.questions == name
        }
        own = systems[run.index.name]
        places = [at for at, rank in enumerate(own.answer_ranks) if rank is not None]
        if not places:
            raise ConfigError(f"entity_frequency needs answers; question set {name!r} has none")
        ranks = {
            system: np.array([systems[system].answer_ranks[at] for at in places], np.int64)
            for system in (BM25, run.index.name)
        }
        rows = rows_by_frequency(
            [texts[own.question_ids[at]] for at in places],
            ranks,
            [own.articles[at] for at in places],
            (passage.text for passage in passages),
            ks,
            settings.seed,
            settings.bootstrap,
        )
        sets.append(EntitySet(name, rows))
    return EntityReport(report.index, report.version, report.passages, sets, report.ranks)


def rows_by_frequency(
    questions_Q: Sequence[str],
    ranks: Mapping[str, IntArray],
    articles_Q: Sequence[str],
    passages: Iterable[str],
    ks: Sequence[int] = KS,
    seed: int = 0,
    num: int = 1000,
) -> list[EntityRow]:
    """Compute a row for every system, bucket and depth, with each system's difference from BM25 where `ranks` has BM25.

    `ranks` has int64 [Q] of each system: the rank of the first answer-bearing hit, from 0; -1: none.
    """
    entities_Q = [entity_of(text) for text in questions_Q]
    rows = []
    for bucket in frequency_buckets(entities_Q, passage_frequencies(entities_Q, passages)):
        groups = [articles_Q[at] for at in bucket.questions]
        head = bucket.name, bucket.low, bucket.high, len(groups), len(set(groups))
        for system, ranks_Q in ranks.items():
            for k in ks:
                values_Q = hit_within(ranks_Q[bucket.questions], k)
                interval = share_interval(values_Q, groups, seed, num)
                gain = None
                if system != BM25 and BM25 in ranks:
                    words_Q = hit_within(ranks[BM25][bucket.questions], k)
                    gain_Q = values_Q - words_Q
                    p = paired_test(values_Q, words_Q, groups, seed)
                    gain = Gain(float(gain_Q.mean()), *cluster_interval(gain_Q, groups, seed, num), p)
                rows.append(EntityRow(system, *head, k, float(values_Q.mean()), *interval, gain))
    return rows


def entity_of(question: str) -> str:
    """Find the longest run of capitalised words; "" without one.

    On ties a run that begins with the first word comes last; then the one of more characters wins, then the first.

    Numbers end a run, as do all signs except a period after an abbreviation of up to three letters. The first word is
    always capitalised: one that commonly begins questions belongs to no run, and any other is a run by itself only
    where there is no other run.
    """
    words = list(_WORD.finditer(question))
    runs: list[list[regex.Match[str]]] = [[]]
    for number, word in enumerate(words):
        is_name = word[0][0].isupper() and not (number == 0 and word[0].lower() in _FIRST_WORDS)
        if runs[-1] and not (is_name and _continues_name(question, words[number - 1], word)):
            runs.append([])
        if is_name:
            runs[-1].append(word)
    best = max(
        (run for run in runs if run),
        key=lambda run: (len(run), run[0] is not words[0], run[-1].end() - run[0].start()),
        default=None,
    )
    return question[best[0].start() : best[-1].end()] if best else ""


def passage_frequencies(entities_Q: Sequence[str], passages: Iterable[str]) -> IntArray:
    """Count the passages whose text contains each entity as a run of tokens; 0 for "". int64 [Q]."""
    distinct = sorted(set(entities_Q) - {""})
    index = AnswerMatcher("string").index([[entity] for entity in distinct])
    rows = np.arange(len(distinct))
    counts = np.zeros(len(distinct), np.int64)
    for text in passages:
        counts += index.marks(text, rows)
    number = dict(zip(distinct, counts.tolist()))
    return np.array([number.get(entity, 0) for entity in entities_Q], np.int64)


def frequency_buckets(entities_Q: Sequence[str], frequency_Q: IntArray) -> list[FrequencyBucket]:
    """Divide into all questions, those without an entity, and the quartiles of frequency of the others, rarest first.

    Questions of one frequency are in one bucket, so buckets differ in size; empty buckets are omitted.
    """
    has_entity_Q = np.array([bool(entity) for entity in entities_Q])
    buckets = [
        FrequencyBucket(ALL, None, None, list(range(len(entities_Q)))),
        FrequencyBucket(NO_ENTITY, None, None, np.flatnonzero(~has_entity_Q).tolist()),
    ]
    if has_entity_Q.any():
        shares = np.arange(1, NUM_BUCKETS) / NUM_BUCKETS
        bounds = np.quantile(frequency_Q[has_entity_Q], shares, method="inverted_cdf")
        quartile_Q = np.where(has_entity_Q, np.searchsorted(bounds, frequency_Q, side="left"), -1)
        for members in (np.flatnonzero(quartile_Q == number) for number in range(NUM_BUCKETS)):
            if len(members):
                low, high = int(frequency_Q[members].min()), int(frequency_Q[members].max())
                span = f"{low} to {high} passages" if low < high else f"{low} passage{'s' if low != 1 else ''}"
                buckets.append(FrequencyBucket(f"entity in {span}", low, high, members.tolist()))
    return [bucket for bucket in buckets if bucket.questions]


def _continues_name(question: str, previous: "regex.Match[str]", word: "regex.Match[str]") -> bool:
    """Return whether only blanks separate two words, or the period of an abbreviation."""
    between = question[previous.end() : word.start()]
    is_short = len(previous[0]) <= _LONGEST_ABBREVIATION or "." in previous[0]
    return bool(_BLANK.fullmatch(between) or (is_short and _PERIOD.fullmatch(between)))
