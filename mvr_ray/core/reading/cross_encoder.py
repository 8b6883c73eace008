"""Score how well a passage answers a question with a model that reads both together (a cross-encoder).

    s(q, p) = head( [CLS] question [SEP] title text [SEP] )           Nogueira and Cho 2019; RocketQA (Qu et al. 2021)

Far slower than two encoders and far more accurate: passages cannot be encoded before the question is known. It detects
unlabelled answers among the hits of a search (`share_beside`), and serves as a teacher.

Trained on a question's positive among its negatives (Gao, Dai and Callan 2021, eq. 5):

    -log( exp s(q, p+) / sum over p+ and negatives of exp s(q, p) )

Shapes: Q questions, C candidates of a question, B pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mvr_ray.core.encoding.tower import LoadedModel, without_surrogates
from mvr_ray.core.encoding.unpadded_cpu import UnpaddedCpuBackbone
from mvr_ray.core.reading.task_model import TaskModel
from mvr_ray.errors import CrossEncoderError
from mvr_ray.types import FloatArray, Passage


@dataclass(frozen=True)
class PairSpec:
    """Lengths of inputs: `max_tokens` of question, passage and special tokens. The passage is cut to fit, a question to
    `max_question_tokens`."""

    max_tokens: int = 256
    max_question_tokens: int = 64


class Pair(NamedTuple):
    question: str
    passage: Passage


class CrossEncoder(TaskModel):
    """A model that scores pairs, with its tokenizer. Create it with `open`, `from_backbone` or `load`."""

    what: ClassVar[str] = "cross-encoder"
    task: ClassVar[str] = "cross_encoder"
    description_file: ClassVar[str] = "cross_encoder.json"
    head: ClassVar[str] = "scoring pairs"
    error_type: ClassVar = CrossEncoderError
    factory: ClassVar = "AutoModelForSequenceClassification"
    label_counts: ClassVar = (1, 2)
    default_spec: ClassVar = PairSpec()
    length_setting: ClassVar[str] = "mine.max_pair_tokens"

    def __init__(self, weights: LoadedModel, spec: PairSpec | None, name: str) -> None:
        super().__init__(weights, spec, name)
        if self.tokenizer.pad_token_id is None:
            raise CrossEncoderError(
                f"the tokenizer of cross-encoder {name} has no padding token, which batches of pairs need; set its "
                f"pad_token and the model's pad_token_id, and save both again"
            )
        config: Any = self.model.config
        if config.pad_token_id is None and hasattr(self.model, "score"):  # a head that finds the last token by it
            config.pad_token_id = self.tokenizer.pad_token_id
        spec, num_special = self.spec, self.tokenizer.num_special_tokens_to_add(pair=True)
        if (text_tokens := spec.max_tokens - spec.max_question_tokens - num_special) < 1:
            raise CrossEncoderError(
                f"max_tokens is {spec.max_tokens}, which leaves {max(0, text_tokens)} for the passage beside a "
                f"question of {spec.max_question_tokens}; raise mine.max_pair_tokens or lower read.max_question_tokens"
            )

    def tokenize(self, pairs: Sequence[Pair]) -> list[dict[str, list[int]]]:
        """Tokenize pairs, unpadded."""
        spec, tokenizer = self.spec, self.tokenizer
        clean_questions = [without_surrogates(pair.question) for pair in pairs]
        questions = list(dict.fromkeys(clean_questions))
        options = {"add_special_tokens": False, "truncation": True, "return_offsets_mapping": True}
        offsets = tokenizer(questions, max_length=spec.max_question_tokens, **options)["offset_mapping"]
        short = {
            text: text[: own[-1][1]] if len(own) == spec.max_question_tokens else text
            for text, own in zip(questions, offsets)
        }
        inputs = tokenizer(
            [short[question] for question in clean_questions],
            [without_surrogates(f"{pair.passage.title} {pair.passage.text}".strip()) for pair in pairs],
            truncation="only_second",
            max_length=spec.max_tokens,
        )
        return [{name: inputs[name][row] for name in inputs} for row in range(len(pairs))]

    def forward(self, batch: Sequence[dict[str, list[int]]]) -> Tensor:
        """Compute scores_B of one padded batch, differentiable; padding changes only rounding."""
        options = {"padding": "longest", "padding_side": "right", "return_tensors": "pt"}
        inputs = self.tokenizer.pad(list(batch), **options).to(self.device)
        types = {"token_type_ids": inputs["token_type_ids"]} if self.with_types else {}
        return _pair_scores(
            self.model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], **types).logits
        )

    def score(self, pairs: Sequence[Pair], tokens_per_batch: int = 8192) -> FloatArray:
        """Score pairs as float32, in order. `pairs` alone determine the batches (see `infer`)."""
        inputs = self.tokenize(pairs) if pairs else []
        scores = np.zeros(len(pairs), np.float32)

        def take(rows: list[int], scores_B: Tensor) -> None:
            scores[rows] = scores_B.cpu().numpy()

        self.infer(inputs, [len(one["input_ids"]) for one in inputs], tokens_per_batch, take)
        if not np.isfinite(scores).all():
            raise CrossEncoderError("the cross-encoder's scores are not finite numbers; its weights are damaged")
        return scores

    def forward_unpadded(
        self, batch: Sequence[dict[str, list[int]]], backbone: UnpaddedCpuBackbone, whole: bool
    ) -> Tensor:
        """Compute scores_B of pairs laid end to end; heads read the first token of each."""
        lengths = [len(one["input_ids"]) for one in batch]
        ids_N, types_N = (
            torch.tensor([number for one in batch for number in one[name]]) if name in batch[0] else None
            for name in ("input_ids", "token_type_ids")
        )
        assert ids_N is not None, "a tokenizer without input_ids"
        positions_N = torch.cat([torch.arange(length) for length in lengths]) + self.first_position
        states_ND = backbone.states(ids_N, positions_N, lengths, types_N if self.with_types else None, whole)
        first_B1D = states_ND[np.cumsum([0, *lengths[:-1]])][:, None]
        model: Any = self.model
        pooler = getattr(model.base_model, "pooler", None)
        return _pair_scores(model.classifier(first_B1D if pooler is None else pooler(first_B1D)))


def _pair_scores(logits: Tensor) -> Tensor:
    """Compute scores_B of a head with one output, or with one for no and one for yes."""
    logits = logits.float()
    return logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]


def listwise_loss(scores_B: Tensor, sizes: Sequence[int]) -> Tensor:
    """Compute losses_Q of questions with consecutive candidates, `sizes` of each, the positive first."""
    return torch.stack([own.logsumexp(0) - own[0] for own in scores_B.split(list(sizes))])


def share_beside(positive: float, scores: FloatArray) -> FloatArray:
    """Compute each candidate's softmax share against the known positive alone: 1 / (1 + exp(s+ - s)).

    Scores of a cross-encoder are shifted from question to question, so an absolute threshold (RocketQA keeps negatives
    below 0.1) differs in meaning; this share is relative to the question's own positive.
    """
    return 1.0 / (1.0 + np.exp(np.float64(positive) - np.asarray(scores, np.float64)))
