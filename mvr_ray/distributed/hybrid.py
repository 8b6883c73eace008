"""Two searches of every question, BM25 and the index, as one ranking (`core.searching.fusion`).

BM25 is in the driver's memory; searchers answer for the index, a batch of questions at a time.
"""

from collections.abc import Iterator
from typing import NamedTuple

from mvr_ray.config import RunConfig
from mvr_ray.distributed.bm25 import BM25Index
from mvr_ray.distributed.rank import QuestionRanker, QuestionSet, RankSettings
from mvr_ray.distributed.router import Router
from mvr_ray.types import Hit, Progress, Question, no_progress


class RankPair(NamedTuple):
    """BM25's scores by passage id, and the index's hits by passage id."""

    question: Question
    sparse: dict[str, float]
    hits: dict[str, Hit]

    @property
    def scores(self) -> tuple[dict[str, float], dict[str, float]]:
        """Of BM25, then of the index."""
        return self.sparse, {name: hit.score for name, hit in self.hits.items()}


def rank_pairs(
    run: RunConfig,
    router: Router,
    words: BM25Index,
    questions: QuestionSet,
    progress: Progress = no_progress,
    ranker: QuestionRanker | None = None,
) -> Iterator[RankPair]:
    """The first `evaluate.hybrid_depth` hits of BM25 and of the index, question by question."""
    size, depth = run.retrieve.batch, run.evaluate.hybrid_depth
    ranker = ranker or QuestionRanker(router, RankSettings(k=depth), run.resources.torch_threads)
    for low in range(0, len(questions.questions), size):
        batch = questions._replace(questions=questions.questions[low : low + size])
        answer = ranker.search(ranker.embed(batch), depth)
        found = words.search([question.text for question in batch.questions], depth)
        for question, sparse, hits in zip(batch.questions, found, answer.hits):
            scores = {hit.passage_id: hit.score for hit in sparse}
            yield RankPair(question, scores, {hit.passage_id: hit for hit in hits})
        progress("questions, by words and views", low + len(batch.questions), len(questions.questions))
