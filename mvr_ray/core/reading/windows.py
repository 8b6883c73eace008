"""Cut a question and a passage into overlapping windows, the inputs of an extractive reader.

    [CLS] question [SEP] tokens w .. w + n of the passage [SEP]            or as the tokenizer lays out a pair

Question and passage are tokenised separately, as tokenizers do with a pair, so a passage's tokens and their characters
are the same for every question and window. Titles are excluded: an answer is a piece of the text.

Shapes: F windows, T tokens of the longest one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mvr_ray.core.encoding.tower import without_surrogates
from mvr_ray.types import IntArray


@dataclass(frozen=True)
class ReaderSpec:
    """Lengths of inputs and answers, and how spans are scored.

    `max_tokens` counts question, window and special tokens. With `minus_null` a span's score is its logits less those
    of its window's null token; without, its logits alone.
    """

    max_tokens: int = 384
    overlap_tokens: int = 128
    max_question_tokens: int = 64
    max_answer_tokens: int = 30
    minus_null: bool = True


class PassageTokens(NamedTuple):
    """Token ids of a text, and the characters of each."""

    ids: IntArray
    starts: IntArray
    stops: IntArray


class Frame(NamedTuple):
    """A question's input with a passage in place of the tokens `first` up to `stop`, and the tokens' segments."""

    ids: IntArray
    types: IntArray
    first: int
    stop: int


class Window(NamedTuple):
    """One input: the passage's tokens `offset` up to `offset + num_text` begin at `first`, [CLS] is at `null`."""

    input_ids: IntArray
    type_ids: IntArray
    first: int
    offset: int
    num_text: int
    null: int

    def place(self, token: int) -> int:
        """Return the position of a token of the passage in this window."""
        return self.first + token - self.offset

    def holds(self, first: int, last: int) -> bool:
        """Return whether all tokens `first` to `last` of the passage are in this window."""
        return self.offset <= first <= last < self.offset + self.num_text


class PaddedWindows(NamedTuple):
    """A batch of windows. `text_FT` marks the passage's tokens, `candidate_FT` these and the null token."""

    ids_FT: IntArray
    types_FT: IntArray
    real_FT: NDArray[np.bool_]
    text_FT: NDArray[np.bool_]
    candidate_FT: NDArray[np.bool_]


class Windower:
    """Cuts texts into windows with a model's tokenizer, whose truncation and padding it turns off."""

    def __init__(self, tokenizer: Any, spec: ReaderSpec) -> None:
        self.spec = spec
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._cls_id = tokenizer.cls_token_id
        self._pad_id = tokenizer.pad_token_id or 0

    @property
    def max_passage_tokens(self) -> int:
        """Passage tokens of a window with the longest question."""
        num_special = self._backend.num_special_tokens_to_add(is_pair=True)
        return self.spec.max_tokens - self.spec.max_question_tokens - num_special

    def tokenize(self, texts: Iterable[str]) -> dict[str, PassageTokens]:
        """Tokenize each distinct text."""
        distinct = list(dict.fromkeys(texts))
        encodings = self._backend.encode_batch(
            [without_surrogates(text) for text in distinct], add_special_tokens=False
        )
        tokens = {}
        for text, encoding in zip(distinct, encodings):
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            tokens[text] = PassageTokens(np.array(encoding.ids, np.int64), offsets[:, 0], offsets[:, 1])
        return tokens

    def frame(self, question: str) -> Frame:
        """Tokenize a question, cut to `max_question_tokens`, with the tokenizer's special tokens around a pair."""
        question_tokens = self._backend.encode(without_surrogates(question), add_special_tokens=False)
        question_tokens.truncate(self.spec.max_question_tokens)
        probe = self._backend.encode("a", add_special_tokens=False)
        pair = self._backend.post_process(question_tokens, probe, add_special_tokens=True)
        inside = [at for at, sequence in enumerate(pair.sequence_ids) if sequence == 1]
        return Frame(np.array(pair.ids, np.int64), np.array(pair.type_ids, np.int64), inside[0], inside[-1] + 1)

    def windows(self, frame: Frame, passage: PassageTokens) -> list[Window]:
        """Cut the fewest windows that cover all of the passage's tokens, in order; none where it has none."""
        size = self.spec.max_tokens - len(frame.ids) + frame.stop - frame.first
        step = size - self.spec.overlap_tokens
        total = len(passage.ids)
        count = 1 + max(0, -(-(total - size) // step)) if total else 0
        return [self._window(frame, passage.ids[start : start + size], start) for start in range(0, count * step, step)]

    def pad(self, windows: Sequence[Window]) -> PaddedWindows:
        """Pad a batch to its longest window."""
        shape = (len(windows), max(len(window.input_ids) for window in windows))
        ids_FT, types_FT = np.full(shape, self._pad_id, np.int64), np.zeros(shape, np.int64)
        real_FT, text_FT = np.zeros(shape, bool), np.zeros(shape, bool)
        for row, window in enumerate(windows):
            end = len(window.input_ids)
            ids_FT[row, :end], types_FT[row, :end], real_FT[row, :end] = window.input_ids, window.type_ids, True
            text_FT[row, window.first : window.first + window.num_text] = True
        candidate_FT = text_FT.copy()
        candidate_FT[np.arange(len(windows)), [window.null for window in windows]] = True
        return PaddedWindows(ids_FT, types_FT, real_FT, text_FT, candidate_FT)

    def _window(self, frame: Frame, piece: IntArray, offset: int) -> Window:
        all_types, first, stop = frame.types, frame.first, frame.stop
        ids = np.concatenate([frame.ids[:first], piece, frame.ids[stop:]])
        types = np.concatenate([all_types[:first], np.full(len(piece), all_types[first]), all_types[stop:]])
        nulls = np.flatnonzero(ids == self._cls_id)
        return Window(ids, types, first, offset, num_text=len(piece), null=int(nulls[0]) if len(nulls) else 0)
