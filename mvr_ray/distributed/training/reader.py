"""Train a reader: span cross entropy on the gold passages of questions with known answer offsets.

Every window of the passage is an input; where the answer is not wholly in it, both ends are the null token ([CLS]).
Each question also has `train.num_hard_negatives` passages that do not answer it: without them a reader finds a good
answer in every passage, and cannot choose among those of a ranking.

Shapes: F windows, T tokens.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mvr_ray.config import RunConfig
from mvr_ray.core.judging.answers import AnswerMatcher, exact_match_score, f1_score
from mvr_ray.core.learning.batches import Example, negatives_for
from mvr_ray.core.learning.training import run_seeded
from mvr_ray.core.reading.reader import Reader, ReadRequest
from mvr_ray.core.reading.spans import span_losses, tokens_of
from mvr_ray.core.reading.windows import Window
from mvr_ray.distributed.models import reader_spec
from mvr_ray.distributed.training.examples import Examples, open_answer_dev, open_answer_examples
from mvr_ray.distributed.training.steps import TaskModelLoop
from mvr_ray.errors import ConfigError
from mvr_ray.store.corpus import Corpus
from mvr_ray.store.model_records import READERS
from mvr_ray.types import Passage, Question

_WINDOWS = 2


class ReaderEpoch(NamedTuple):
    """Metrics of an epoch, or of `train.dev_steps` steps; dev metrics are on gold passages."""

    epoch: int
    step: int
    loss: float
    dev_exact_match: float | None
    dev_f1: float | None


class Target(NamedTuple):
    """A window and the positions of the answer's ends in it."""

    window: Window
    start: int
    end: int


class ReaderLoop(TaskModelLoop):
    kind, epoch, dev_metrics = READERS, ReaderEpoch, ("dev_exact_match", "dev_f1")
    spec = staticmethod(reader_spec)

    @staticmethod
    def open_data(corpus: Corpus, run: RunConfig) -> tuple[Examples, list[tuple[Question, Passage]]]:
        if run.evaluate.match == "regex":
            raise ConfigError(
                "evaluate.match is regex, but train.task is reader, which learns from the words of answers at their "
                "places and is measured by exact match with them; set evaluate.match=string, and questions answered in "
                "words"
            )
        return open_answer_examples(corpus, run.train), open_answer_dev(corpus, run.train)

    def units(self, examples: Sequence[Example]) -> list[Target]:
        return targets_of(self.model, examples, self.cfg.num_hard_negatives, self.matcher)

    def losses(self, units: Sequence[Target], number: int) -> Tensor:
        forward = partial(self.model, [target.window for target in units])
        start_FT, end_FT, candidate_FT = run_seeded(self.settings, (_WINDOWS, number), self.device, forward)
        start_F, end_F = torch.tensor([target[1:] for target in units], device=self.device).T
        return span_losses(start_FT, end_FT, candidate_FT, start_F, end_F)

    def measure(self) -> tuple[float, float]:
        """Return exact match and F1, means over the dev questions, each read in its gold passage."""
        dev, exact_matches, f1_scores = self.job.dev, [], []
        requests = [ReadRequest(question.text, [passage.text]) for question, passage in dev]
        for (question, passage), [span] in zip(dev, self.model.read(requests, self.job.run.read.tokens_per_batch)):
            text = passage.text[span.start : span.stop] if span else ""
            exact_matches.append(exact_match_score(text, question.answers))
            f1_scores.append(f1_score(text, question.answers))
        return float(np.mean(exact_matches)), float(np.mean(f1_scores))


def targets_of(reader: Reader, examples: Sequence[Example], num_negatives: int, matcher: AnswerMatcher) -> list[Target]:
    """Make windows of each example's passage with the answer's ends, then of passages that do not answer it."""
    windower, units = reader.windower, []
    groups = [(example, negatives_for(at, examples, num_negatives, matcher)) for at, example in enumerate(examples)]
    tokens = windower.tokenize(passage.text for example, others in groups for passage in (example.passage, *others))
    for example, others in groups:
        frame, passage = windower.frame(example.text), tokens[example.passage.text]
        first, last = tokens_of(passage.starts, passage.stops, example.answer_start, example.answer_stop)
        for window in windower.windows(frame, passage):
            inside = first >= 0 and window.holds(first, last)
            ends = (window.place(first), window.place(last)) if inside else (window.null, window.null)
            units.append(Target(window, *ends))
        for other in others:
            windows = windower.windows(frame, tokens[other.text])
            units += [Target(window, window.null, window.null) for window in windows]
    return units
