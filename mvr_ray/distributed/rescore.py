"""Scores of a cross-encoder for many pairs, by a pool of actors that read the passages themselves.

A batch is `_BATCH` questions in their order, so that what is read together, and with it every score, does not depend
on how many actors there are.
"""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import ray.data
import torch
from ray.data import ActorPoolStrategy

from mvr_ray.config import RunConfig
from mvr_ray.core.reading.cross_encoder import CrossEncoder, Pair, PairSpec
from mvr_ray.distributed import session
from mvr_ray.distributed.dataflow import in_order, rows
from mvr_ray.distributed.models import CROSS_ENCODERS, ModelAddress, find_model, open_model, pair_spec
from mvr_ray.errors import DataError, ResourceError
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.files import Store
from mvr_ray.types import FloatArray, Progress

_BATCH = 16
_MAX_BLOCKS = 4096
Candidates = tuple[str, Sequence[str]]
"""A question and the ids of passages."""


class ScoreTask(NamedTuple):
    """All that a worker needs to know."""

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
    """Scores batches of questions with their candidates; one actor of the pool."""

    def __init__(self, task: ScoreTask) -> None:
        self.task = task

    @cached_property
    def model(self) -> CrossEncoder:
        """Opened by the first batch: an error in an actor's constructor would reach the driver as text only."""
        task = self.task
        return open_model(
            CROSS_ENCODERS, task.address, task.spec, expected=task.fingerprint, threads=task.threads, gpu=task.gpu
        )

    @cached_property
    def corpus(self) -> Corpus:
        corpus = Corpus.open(Store(self.task.store), self.task.corpus)
        if corpus.digest != self.task.digest:
            raise DataError(f"corpus {corpus.name!r} was prepared anew while it was mined; run the same command again")
        return corpus

    def __call__(self, table: pa.Table) -> pa.Table:
        torch.set_num_threads(self.task.threads)
        scored = [self.score(json.loads(asked)).tobytes() for asked in table.column("asked").to_pylist()]
        return pa.table({"number": table.column("number"), "scores": pa.array(scored, pa.large_binary())})

    def score(self, asked: Sequence[Candidates]) -> FloatArray:
        texts = self.corpus.get(dict.fromkeys(one for _, ids in asked for one in ids))
        pairs = [Pair(question, texts[one]) for question, ids in asked for one in ids]
        try:
            return self.model.score(pairs, self.task.tokens_per_batch)
        except torch.OutOfMemoryError as error:
            raise ResourceError(
                f"the GPU has no room for a batch of {self.task.tokens_per_batch} tokens ({error}); "
                f"lower read.tokens_per_batch"
            ) from None


def pair_scores(run: RunConfig, corpus: Corpus, asked: Sequence[Candidates], progress: Progress) -> list[FloatArray]:
    """float32 scores of each question's candidates, by the model that `mine.cross_encoder` names.

    Raises MissingInputError, CrossEncoderError or ResourceError before any worker starts.
    """
    resources = run.resources
    address, spec = find_model(run, CROSS_ENCODERS, run.mine.cross_encoder or ""), pair_spec(run)
    fingerprint = open_model(CROSS_ENCODERS, address, spec, threads=resources.torch_threads).fingerprint
    task = ScoreTask(
        address,
        fingerprint,
        spec,
        Store(run.store.path).address,
        corpus.name,
        corpus.digest,
        run.read.tokens_per_batch,
        resources.torch_threads,
        resources.gpus_per_encoder > 0,
    )
    items = [
        {"number": number, "asked": json.dumps(asked[start : start + _BATCH])}
        for number, start in enumerate(range(0, len(asked), _BATCH))
    ]
    actor: Any = PairScorer
    scores: list[FloatArray] = []
    with ExitStack() as stack:
        info = stack.enter_context(session.connect(resources))
        cpus, gpus = resources.cpus_per_encoder, resources.gpus_per_encoder
        session.require(info, [session.Need("cross-encoders", resources.encoders_min, cpus, gpus)])
        pipeline = ray.data.from_items(items, override_num_blocks=min(len(items), _MAX_BLOCKS)).map_batches(
            actor,
            batch_size=1,
            batch_format="pyarrow",
            fn_constructor_kwargs={"task": task},
            num_cpus=cpus,
            num_gpus=gpus,
            compute=ActorPoolStrategy(min_size=resources.encoders_min, max_size=resources.encoders_max),
        )
        for row in in_order(rows(pipeline, "scoring pairs")):
            some = asked[row["number"] * _BATCH :][:_BATCH]
            ends = np.cumsum([len(ids) for _, ids in some])
            scores += np.split(np.frombuffer(row["scores"], np.float32), ends[:-1])
            progress("cross-encoder", len(scores), len(asked))
    return scores
