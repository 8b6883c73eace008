"""Choose the weight of the dense score in a hybrid search, on questions outside every reported figure.

The report has the whole curve, the dense score alone and reciprocal rank fusion.
"""

import logging
from typing import NamedTuple

from mvr_ray.config import RunConfig
from mvr_ray.distributed.evaluate import require_gold_passages
from mvr_ray.distributed.hybrid import WEIGHTS, WeightAccuracy, best_weight, try_weights
from mvr_ray.distributed.rank import QuestionSet
from mvr_ray.distributed.router import open_router, require_words
from mvr_ray.errors import ConfigError
from mvr_ray.store import manifest as manifests
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.store.questions import read_questions
from mvr_ray.types import Progress, no_progress

log = logging.getLogger(__name__)


class TuneReport(NamedTuple):
    """The curve, and the setting for the run file."""

    index: str
    version: int
    questions: str
    num_questions: int
    setting: str
    rows: list[WeightAccuracy]


def tune(run: RunConfig, questions: str, progress: Progress = no_progress) -> TuneReport:
    """Measure each weight on a stored question set with gold passages.

    Raises ConfigError for a set of `evaluate.questions` or one without gold passages, MissingInputError, CoverageError,
    ShardIndexError for a version without words.
    """
    if questions in run.evaluate.questions:
        raise ConfigError(
            f"tune: question set {questions!r} is one of evaluate.questions, which are reported; name another one"
        )
    store = Store(run.store.path)
    base = manifests.read(store, run.index.name)
    require_words(base)
    corpus = Corpus.open(store, base.corpus, base.corpus_digest)
    own = [question for question in read_questions(corpus, questions) if question.positive_ids]
    if not own:
        raise ConfigError(
            f"tune: question set {questions!r} names no gold passages; name a set that does, or rank without a weight: "
            f"search.hybrid=rrf"
        )
    require_gold_passages(questions, own, corpus)
    with open_router(run, base.version) as router:
        rows = try_weights(run, router, QuestionSet(questions, own), (None, "rrf", *WEIGHTS), progress)
    weight = best_weight(rows).weight
    setting = f"search.hybrid={'null' if weight is None else weight if isinstance(weight, str) else f'{weight:g}'}"
    log.info("tuned: index=%s version=%d set=%s %s", base.index, base.version, questions, setting)
    return TuneReport(base.index, base.version, questions, len(own), setting, rows)
