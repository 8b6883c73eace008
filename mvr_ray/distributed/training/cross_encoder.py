"""Train a cross-encoder: score a question's passage above passages that do not answer it.

The negatives are `train.num_hard_negatives` of the question's mined ones, else passages of its batch. Rank r of W
takes the questions r, r + W, .. of a batch, and the loss is the mean over all of them, so W ranks have the loss and
gradient of one process. Placement, checkpoints and resuming are as in the retriever's training.

Shapes: Q questions, C candidates of a question, B pairs.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor

from mvr_ray.config import RunConfig
from mvr_ray.core.judging.answers import AnswerMatcher
from mvr_ray.core.learning.batches import Example, negatives_for
from mvr_ray.core.learning.training import run_seeded
from mvr_ray.core.reading.cross_encoder import Pair, listwise_loss
from mvr_ray.distributed.models import pair_spec
from mvr_ray.distributed.training.examples import DevSet, Examples, open_dev, open_question_examples
from mvr_ray.distributed.training.steps import TaskModelLoop
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.model_records import CROSS_ENCODERS

_PAIRS = 3
DEV_QUESTIONS = 128
DEV_CANDIDATES = 8
"""A dev question's own passage and the next ones of the dev set, which are mostly of the same article."""


class CrossEncoderEpoch(NamedTuple):
    """Metrics of an epoch, or of `train.dev_steps` steps. `dev_top1`: share of dev questions whose passage scores best
    of `DEV_CANDIDATES`."""

    epoch: int
    step: int
    loss: float
    dev_top1: float | None


class CrossEncoderLoop(TaskModelLoop):
    kind, epoch, dev_metrics = CROSS_ENCODERS, CrossEncoderEpoch, ("dev_top1",)
    spec = staticmethod(pair_spec)

    @staticmethod
    def open_data(corpus: Corpus, run: RunConfig) -> tuple[Examples, DevSet | None]:
        return open_question_examples(corpus, run.train), open_dev(corpus, run.train)

    def units(self, examples: Sequence[Example]) -> list[list[Pair]]:
        return candidates_of(examples, self.cfg.num_hard_negatives, self.matcher)

    def losses(self, units: Sequence[Sequence[Pair]], number: int) -> Tensor:
        forward = partial(self.model, self.model.tokenize([pair for group in units for pair in group]))
        scores_B = run_seeded(self.settings, (_PAIRS, number), self.device, forward)
        return listwise_loss(scores_B, [len(group) for group in units])

    def measure(self) -> tuple[float]:
        """Return the share of dev questions whose own passage scores strictly above the others that are not theirs."""
        texts, passages, positive_Q, gold_QP = self.job.dev
        texts, own_Q1 = texts[:DEV_QUESTIONS], positive_Q[:DEV_QUESTIONS, None]
        rows_QC = (own_Q1 + np.arange(min(DEV_CANDIDATES, len(passages)))) % len(passages)
        pairs = [Pair(text, passages[row]) for text, rows in zip(texts, rows_QC.tolist()) for row in rows]
        scores_QC = self.model.score(pairs, self.job.run.read.tokens_per_batch).reshape(rows_QC.shape)
        is_gold_QC = np.take_along_axis(gold_QP[: len(texts)], rows_QC, axis=1)
        return (float(np.mean(((scores_QC[:, :1] > scores_QC) | is_gold_QC).all(1))),)


def candidates_of(examples: Sequence[Example], num_negatives: int, matcher: AnswerMatcher) -> list[list[Pair]]:
    """Pair each example's question with its passage first, then with passages that do not answer it."""
    groups = [(example, negatives_for(at, examples, num_negatives, matcher)) for at, example in enumerate(examples)]
    return [[Pair(example.text, passage) for passage in (example.passage, *others)] for example, others in groups]
