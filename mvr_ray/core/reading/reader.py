"""Find the words of a passage that answer a question, and choose among several passages (an extractive reader).

A passage's answer is the best span over its windows; a question's answer is that of the passage where this is largest
(BERTserini, Yang et al. 2019, sums logits and adds the weighted retrieval score; subtracting the null token's logits
follows Devlin et al. 2019, section 4.3, and separates windows with and without the answer):

    f(q, p) = max over windows and spans of (start + end - null)  +  w x score(q, p)

Spans and their loss are in `spans`, windows in `windows`.

Shapes: F windows, T tokens of the longest one.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mvr_ray.core.encoding.tower import LoadedModel
from mvr_ray.core.encoding.unpadded_cpu import UnpaddedCpuBackbone
from mvr_ray.core.reading.spans import best_spans, log_shares
from mvr_ray.core.reading.task_model import TaskModel
from mvr_ray.core.reading.windows import PassageTokens, ReaderSpec, Window, Windower
from mvr_ray.errors import ReaderError

__all__ = ["Reader", "ReaderSpec", "Span", "ReadRequest", "choose"]


class ReadRequest(NamedTuple):
    """A question and the texts to find its answer in."""

    question: str
    passages: Sequence[str]


class Span(NamedTuple):
    """Characters `start` up to `stop` of a passage's text, with their score and the ends' log probabilities."""

    start: int
    stop: int
    score: float
    start_log_prob: float
    end_log_prob: float


class Logits(NamedTuple):
    """Logits of the windows' tokens, and the candidates for the ends of an answer; [CLS] means no answer."""

    start_FT: Tensor
    end_FT: Tensor
    candidate_FT: Tensor


class Reader(TaskModel):
    """A question-answering model with its tokenizer. Create it with `open`, `from_backbone` or `load`."""

    what: ClassVar[str] = "reader"
    task: ClassVar[str] = "reader"
    description_file: ClassVar[str] = "reader.json"
    head: ClassVar[str] = "extractive question answering"
    error_type: ClassVar = ReaderError
    factory: ClassVar = "AutoModelForQuestionAnswering"
    label_counts: ClassVar = (2,)
    default_spec: ClassVar = ReaderSpec()
    length_setting: ClassVar[str] = "read.max_tokens"

    def __init__(self, weights: LoadedModel, spec: ReaderSpec | None, name: str) -> None:
        super().__init__(weights, spec, name)
        self.windower = Windower(self.tokenizer, self.spec)
        spec, text_tokens = self.spec, self.windower.max_passage_tokens
        if text_tokens <= spec.overlap_tokens:
            raise ReaderError(
                f"max_tokens is {spec.max_tokens}, which leaves {max(0, text_tokens)} for the passage beside a "
                f"question of {spec.max_question_tokens}, no more than the {spec.overlap_tokens} that windows share; "
                f"raise read.max_tokens, or lower read.overlap_tokens or read.max_question_tokens"
            )

    def read(self, requests: Sequence[ReadRequest], tokens_per_batch: int = 8192) -> list[list[Span | None]]:
        """Find the best span of every passage of every question; None where a passage has no token.

        Equal scores: the earlier start, then the shorter span. `infer` runs the windows; `requests` alone determine the
        batches, and so every bit of the result.
        """
        tokens = self.windower.tokenize(text for item in requests for text in item.passages)
        owners: list[tuple[int, int]] = []
        windows: list[Window] = []
        for row, item in enumerate(requests):
            frame = self.windower.frame(item.question)
            for column, text in enumerate(item.passages):
                passage_windows = self.windower.windows(frame, tokens[text])
                owners += [(row, column)] * len(passage_windows)
                windows += passage_windows
        spans: dict[int, Span] = {}

        def take(rows: list[int], logits: Logits) -> None:
            spans.update(zip(rows, self._best_spans([windows[row] for row in rows], logits)))

        self.infer(windows, [len(window.input_ids) for window in windows], tokens_per_batch, take)
        best: dict[tuple[int, int], Span] = {}
        for at, span in spans.items():
            best[owners[at]] = min(best.get(owners[at], span), span, key=lambda one: (-one.score, *one))
        return [
            [
                _span(text, tokens[text], best[row, column]) if (row, column) in best else None
                for column, text in enumerate(item.passages)
            ]
            for row, item in enumerate(requests)
        ]

    def forward(self, windows: Sequence[Window]) -> Logits:
        """Compute the logits of a batch, differentiable; padding changes only rounding."""
        batch = self.windower.pad(windows)
        ids_FT, types_FT, real_FT, _, candidate_FT = (torch.from_numpy(array).to(self.device) for array in batch)
        types = {"token_type_ids": types_FT} if self.with_types else {}
        out = self.model(input_ids=ids_FT, attention_mask=real_FT.long(), **types)
        return Logits(out.start_logits.float(), out.end_logits.float(), candidate_FT)

    def forward_unpadded(self, batch: Sequence[Window], backbone: UnpaddedCpuBackbone, whole: bool) -> Logits:
        """Compute the logits of windows laid end to end; 0 on padding."""
        ids_FT, types_FT, real_FT, _, candidate_FT = (torch.from_numpy(array) for array in self.windower.pad(batch))
        types_N = types_FT[real_FT].long() if self.with_types else None
        positions_N = torch.arange(real_FT.shape[1]).expand_as(real_FT)[real_FT] + self.first_position
        lengths = [len(window.input_ids) for window in batch]
        states_ND = backbone.states(ids_FT[real_FT].long(), positions_N, lengths, types_N, whole)
        model: Any = self.model
        logits_FT2 = torch.zeros(*real_FT.shape, 2)
        logits_FT2[real_FT] = model.qa_outputs(states_ND)
        return Logits(logits_FT2[..., 0], logits_FT2[..., 1], candidate_FT)

    def _best_spans(self, windows: Sequence[Window], logits: Logits) -> Iterator[Span]:
        """Yield each window's best span, from its first to its last token of the passage."""
        text_FT = self.windower.pad(windows).text_FT
        start_FT, end_FT, candidate_FT = (part.cpu().numpy() for part in logits)
        best = best_spans(start_FT, end_FT, text_FT, self.spec.max_answer_tokens)
        if not np.isfinite(best.score_F).all():
            raise ReaderError("the reader's logits are not finite numbers; its weights are damaged, take another one")
        start_shares, end_shares = log_shares(start_FT, candidate_FT), log_shares(end_FT, candidate_FT)
        for row, (window, start, end, score) in enumerate(zip(windows, *best)):
            first, last = int(start) - window.place(0), int(end) - window.place(0)
            null = float(start_FT[row, window.null]) + float(end_FT[row, window.null]) if self.spec.minus_null else 0.0
            shares = map(float, (start_shares[row, start], end_shares[row, end]))
            yield Span(first, last, float(score) - null, *shares)


def choose(spans: Sequence[Span | None], scores: Sequence[float], weight: float = 0.0) -> int:
    """Return the row of the passage that answers best, -1 where none has a span. Of equals the higher rank wins.

    `scores` are those of retrieval, one a passage; ignored where the weight is 0.
    """
    total_scores = {
        row: span.score + (weight * score if weight else 0.0)
        for row, (span, score) in enumerate(zip(spans, scores, strict=True))
        if span is not None
    }
    return max(total_scores, key=lambda row: (total_scores[row], -row), default=-1)


def _span(text: str, tokens: PassageTokens, best: Span) -> Span:
    """Convert a span of tokens to characters of the text, without blanks around it."""
    start, stop = int(tokens.starts[best.start]), int(tokens.stops[best.stop])
    piece = text[start:stop]
    start += len(piece) - len(piece.lstrip())
    return best._replace(start=start, stop=start + len(piece.strip()))
