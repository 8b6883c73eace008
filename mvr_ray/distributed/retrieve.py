"""Write the rankings of a question set over an index version in standard formats."""

import logging
from pathlib import Path
from typing import NamedTuple

from mvr_ray.config import RunConfig, resolve_path
from mvr_ray.distributed.encoders import require_encoder
from mvr_ray.distributed.rank import QuestionSet, RankSettings, rank_questions
from mvr_ray.distributed.router import open_router, require_words
from mvr_ray.errors import MissingInputError
from mvr_ray.store import manifest as manifests
from mvr_ray.store.corpus import Corpus, question_sets
from mvr_ray.store.files import Store
from mvr_ray.store.filters import parse_filter
from mvr_ray.store.formats import RankingFormat, read_question_file, write_ranking
from mvr_ray.store.questions import read_questions
from mvr_ray.types import Progress, no_progress

log = logging.getLogger(__name__)


class RetrieveReport(NamedTuple):
    """The file written, and the version searched. `exact`: the hits are the best k of all passages."""

    output: str
    format: str
    questions: int
    k: int
    index: str
    version: int
    encoder_fingerprint: str
    passages: int
    exact: bool


def retrieve(
    run: RunConfig,
    questions: str,
    output: Path,
    format: RankingFormat = "dpr",
    progress: Progress = no_progress,
    version: int | None = None,
) -> RetrieveReport:
    """Write the best `retrieve.k` passages of every question to `output`, in question order, in one atomic step.

    `questions` is a stored set or a file in any question format. Raises MissingInputError, DataError, FilterError,
    CoverageError; ShardIndexError for `search.hybrid` over a version without words.
    """
    store = Store(run.store.path)
    base = manifests.read(store, run.index.name, version)
    require_encoder(store, base)
    if run.search.hybrid is not None:
        require_words(base)
    corpus = Corpus.open(store, base.corpus, base.corpus_digest)
    if run.retrieve.filter is not None:
        parse_filter(run.retrieve.filter, corpus.fields)
    query_set = question_set(corpus, questions)
    settings = RankSettings(
        k=run.retrieve.k,
        match=run.evaluate.match,
        strict_answers=run.retrieve.strict_answers,
        texts=format not in ("trec", "msmarco"),
        snippets=format in ("jsonl", "parquet") or (format == "dpr" and run.retrieve.extras),
        refined_queries=run.retrieve.refined_queries,
        filter=run.retrieve.filter,
        hybrid=run.search.hybrid,
    )
    with open_router(run, base.version) as router:
        results = rank_questions(run, router, [query_set], settings, progress)
        count = write_ranking(results, output, format, tag=run.retrieve.tag, extras=run.retrieve.extras)
    log.info("retrieved: questions=%d output=%s index=%s version=%d", count, output, base.index, base.version)
    return RetrieveReport(
        str(output),
        format,
        count,
        run.retrieve.k,
        base.index,
        base.version,
        base.encoder_fingerprint,
        base.num_passages,
        base.index_params["kind"] == "flat",
    )


def question_set(corpus: Corpus, name: str) -> QuestionSet:
    """Read a question set of the corpus by name, else the questions of a file."""
    if name in question_sets(corpus):
        return QuestionSet(name, read_questions(corpus, name))
    path = resolve_path(name)
    if not path.is_file():
        set_names = ", ".join(question_sets(corpus)) or "none"
        raise MissingInputError(
            f"questions {name!r}: neither a file nor a set of corpus {corpus.name!r} in {corpus.store.root} "
            f"(sets: {set_names})"
        )
    return QuestionSet(path.name, read_question_file(path))
