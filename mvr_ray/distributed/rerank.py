"""Score question-passage pairs with a cross-encoder, on a pool of actors that read the passages from the corpus.

A batch is `_BATCH` questions in order, so the composition of batches, and with it every score, does not depend on the
number of actors.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mvr_ray.config import RunConfig
from mvr_ray.core.reading.cross_encoder import CrossEncoder, Pair, PairSpec
from mvr_ray.distributed import session
from mvr_ray.distributed.models import (
    CROSS_ENCODERS,
    ModelAddress,
    find_model,
    open_model,
    pair_spec,
    translate_out_of_memory,
)
from mvr_ray.distributed.ray_data import map_in_pool, pool_need
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.types import FloatArray, Progress

_BATCH = 16
Candidates = tuple[str, Sequence[str]]
"""A question and the ids of passages."""


class PairModel(NamedTuple):
    """Address and fingerprint of a cross-encoder."""

    address: ModelAddress
    fingerprint: str


class ScoreTask(NamedTuple):
    """Arguments of a worker."""

    address: ModelAddress
    fingerprint: str
    spec: PairSpec
    store: str
    corpus: str
    digest: str
    tokens_per_batch: int
    threads: int
    gpu: bool


class PairScorer:
    """Score batches of questions with their candidates; one actor of the pool."""

    def __init__(self, task: ScoreTask) -> None:
        self.task = task

    @cached_property
    def model(self) -> CrossEncoder:
        """Loaded by the first batch: an error in an actor's constructor would reach the driver as text only."""
        task = self.task
        return open_model(
            CROSS_ENCODERS, task.address, task.spec, expected=task.fingerprint, threads=task.threads, gpu=task.gpu
        )

    @cached_property
    def corpus(self) -> Corpus:
        return Corpus.open(Store(self.task.store), self.task.corpus, self.task.digest)

    def __call__(self, batch: Sequence[Candidates]) -> list[float]:
        texts = self.corpus.get(dict.fromkeys(one for _, ids in batch for one in ids))
        pairs = [Pair(question, texts[one]) for question, ids in batch for one in ids]
        with translate_out_of_memory(self.task.tokens_per_batch, "read.tokens_per_batch"):
            return self.model.score(pairs, self.task.tokens_per_batch).tolist()


def find_pair_model(run: RunConfig) -> PairModel:
    """Find and load the model of `mine.cross_encoder`. Raises MissingInputError, CrossEncoderError."""
    address = find_model(run, CROSS_ENCODERS, run.mine.cross_encoder or "")
    model = open_model(CROSS_ENCODERS, address, pair_spec(run), threads=run.resources.torch_threads)
    return PairModel(address, model.fingerprint)


def pair_scores(
    run: RunConfig, model: PairModel, corpus: Corpus, candidates: Sequence[Candidates], progress: Progress
) -> list[FloatArray]:
    """Compute float32 scores of each question's candidates. Raises ResourceError before any worker starts."""
    resources = run.resources
    task = ScoreTask(
        *model,
        pair_spec(run),
        Store(run.store.path).address,
        corpus.name,
        corpus.digest,
        run.read.tokens_per_batch,
        resources.torch_threads,
        resources.gpus_per_encoder > 0,
    )
    batches = [candidates[start : start + _BATCH] for start in range(0, len(candidates), _BATCH)]
    scores: list[FloatArray] = []
    with session.connect(resources) as info:
        session.require(info, [pool_need("cross-encoders", resources)])
        results = map_in_pool(PairScorer, {"task": task}, batches, resources, "scoring pairs")
        for batch, values in zip(batches, results):
            ends = np.cumsum([len(ids) for _, ids in batch])
            scores += np.split(np.array(values, np.float32), ends[:-1])
            progress("cross-encoder", len(scores), len(candidates))
    return scores
