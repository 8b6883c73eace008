"""Lay out tokens and read views from their states, by nine strategies.

    pooling        [CLS] (title [SEP]) text [SEP]              the one view is that of the model's own pooling
    cls            the same                                    the one view is the state of [CLS]        (DPR)
    mean           the same                                    the one view is the mean of all states
    first_k        the same                                    view i is the state of token i            (ME-BERT)
    snippet_means  the same                                    view i is the mean of the states of snippet i's tokens
                                                               (late chunking, Günther et al. 2024)
      whole_view   the same                                    view 0 is that of `mean`, and the others are snippets
    viewers        [VIE_1]..[VIE_V] (title [SEP]) text [SEP]   view i is the state of viewer i           (MVR)
    snippets       (title [SEP]) [VIE_1] snippet_1 .. [SEP]    view i is the state of viewer i, or snippet_means
      title_view   [VIE_1] title [VIE_2] snippet_1 .. [SEP]    the same; the title is view 0's snippet (CAMVR)
    sentences      [CLS] (title [SEP]) snippet_i [SEP], alone  view i is the state of its [CLS], or the mean of all
    splits         the same of V equally long splits           the same (both are baselines of MVR table 5)

With `empty_snippets: kept` viewers without a snippet stand before the last [SEP], in numerical order, as in CAMVR's
figures 1 and 4; under `title_view` the first viewer always stands first, even without a title.

Every view is the mean over a set of tokens, and a token belongs to one view at most. The exception is the whole view:
the encoder averages over its own tokens, those of no snippet, and those of all snippets. Questions are `[CLS]
question [SEP]`, or `[VIE] question [SEP]` under viewers and snippets, and have one view. Segments are all 0. [CLS] and
the last [SEP] denote the tokens that the model's tokenizer adds around a text: some add others, or none. A prompt comes
first in the text, or in the title where there is one; it enters a view only under pooling and mean, unless the model's
pooling excludes prompts.

Truncation removes text, never viewers or the last [SEP]: from the end, or, under `snippets`, from the ends of the
longest snippets. A title keeps at most a quarter of the tokens. Under `snippet_means` with `overlap_tokens` nothing is
truncated: a long passage becomes windows, consecutive sequences with the same beginning (prompt, title) that share so
many tokens of text with their neighbours. A token's state comes from the window in which it is further from the end of
the shared part, and a view is the mean over all windows.

Shapes: T tokens, V views.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, pairwise
from typing import Any, Literal, NamedTuple, get_args, get_origin

import numpy as np

from mvr_ray.core.encoding.pooling import Pooling
from mvr_ray.core.encoding.snippets import Span
from mvr_ray.errors import EncoderError, count_noun
from mvr_ray.types import IntArray

MODEL_SETTINGS = ("query_prompt", "passage_prompt", "max_query_tokens", "max_passage_tokens")
"""Settings that a spec may leave to the model."""
MEAN = Pooling()
Strategy = Literal["pooling", "cls", "mean", "first_k", "viewers", "snippets", "snippet_means", "sentences", "splits"]


@dataclass(frozen=True)
class EncoderSpec:
    """How texts become vectors. `mvr_ray.config.EncoderConfig` documents each setting.

    `DualEncoder.from_backbone` replaces None by the model's own value; a stored encoder has no None.
    """

    strategy: Strategy = "snippet_means"
    num_views: int = 8
    tied: bool = True
    readout: Literal["viewer", "snippet_mean"] = "viewer"
    viewer_position: Literal["zero", "own"] = "zero"
    viewer_init: Literal["random", "cls"] = "random"
    empty_snippets: Literal["masked", "kept"] = "masked"
    title_view: bool = False
    whole_view: bool = False
    use_title: bool = True
    query_prompt: str | None = None
    passage_prompt: str | None = None
    max_query_tokens: int | None = None
    max_passage_tokens: int | None = None
    overlap_tokens: int = 0
    truncate_dim: int | None = None
    normalize: bool = True
    score_scale: float = 20.0
    sentences: Literal["packaged", "corpus"] = "packaged"
    seed: int = 0

    def __post_init__(self) -> None:
        for setting in fields(self):
            options = get_args(setting.type) if get_origin(setting.type) is Literal else ()
            if options and (value := getattr(self, setting.name)) not in options:
                raise EncoderError(f"encoder {setting.name} is {value!r}; known are {', '.join(options)}")
        if self.num_views < 1:
            raise EncoderError(f"encoder num_views is {self.num_views}; a passage has 1 view or more")
        if self.empty_snippets == "kept" and (self.strategy, self.readout) != ("snippets", "viewer"):
            raise EncoderError(
                f"encoder empty_snippets is 'kept', but only viewers can stand before nothing, and strategy "
                f"{self.strategy!r} with readout {self.readout!r} has none; leave it at 'masked'"
            )
        if self.overlap_tokens and self.strategy != "snippet_means":
            raise EncoderError(
                f"encoder overlap_tokens is {self.overlap_tokens}, but only strategy 'snippet_means' reads a long "
                f"passage in windows, not {self.strategy!r}; leave it at 0"
            )
        if self.title_view and (self.strategy != "snippets" or not self.use_title or self.num_views < 2):
            raise EncoderError(
                f"encoder title_view needs strategy 'snippets', use_title and 2 views or more; here they are "
                f"{self.strategy!r}, use_title {self.use_title} and {self.num_views}; correct these, or leave it out"
            )
        if self.whole_view and (self.strategy != "snippet_means" or self.num_views < 2):
            raise EncoderError(
                f"encoder whole_view needs strategy 'snippet_means' and 2 views or more; here they are "
                f"{self.strategy!r} and {self.num_views}; correct these, or leave it out"
            )

    def fill(self, own: Mapping[str, Any]) -> "EncoderSpec":
        """Replace None by the model's own values, given by names of `MODEL_SETTINGS`."""
        return replace(self, **{name: value for name, value in own.items() if getattr(self, name) is None})

    @property
    def effective_views(self) -> int:
        return 1 if self.strategy in ("pooling", "cls", "mean") else self.num_views

    @property
    def has_viewers(self) -> bool:
        return self.strategy in ("viewers", "snippets")

    @property
    def reads_viewers(self) -> bool:
        """Whether a view is the state of a viewer."""
        return self.strategy == "viewers" or (self.strategy, self.readout) == ("snippets", "viewer")

    @property
    def has_snippets(self) -> bool:
        """Whether a view represents a piece of the text."""
        return self.strategy in ("snippets", "snippet_means") or self.has_pieces

    @property
    def first_text_view(self) -> int:
        """The view of the text's first snippet, from 0: 1 after a view of the title or of the whole passage."""
        return int(self.title_view or self.whole_view)

    @property
    def has_pieces(self) -> bool:
        """Whether every snippet is encoded alone, so that a passage is several sequences."""
        return self.strategy in ("sentences", "splits")

    @property
    def has_rows(self) -> bool:
        """Whether a passage may be several sequences: pieces, or windows."""
        return self.has_pieces or self.overlap_tokens > 0

    @property
    def passage_limit(self) -> int:
        """`max_passage_tokens` of a complete spec."""
        assert self.max_passage_tokens is not None, "a spec that from_backbone has not completed"
        return self.max_passage_tokens

    @property
    def query_limit(self) -> int:
        """`max_query_tokens` of a complete spec."""
        assert self.max_query_tokens is not None, "a spec that from_backbone has not completed"
        return self.max_query_tokens

    @property
    def needs_sentences(self) -> bool:
        return self.has_snippets and self.strategy != "splits"

    def settings(self) -> dict[str, str | int | bool | None]:
        """Return the settings that enter the fingerprint: those that change an embedding and are not in the weights."""
        settings: dict[str, str | int | bool | None] = {
            "strategy": self.strategy,
            "num_views": self.effective_views,
            "use_title": self.use_title,
            "max_query_tokens": self.max_query_tokens,
            "max_passage_tokens": self.max_passage_tokens,
            "normalize": self.normalize,
        }
        if self.strategy == "viewers":
            settings["viewer_position"] = self.viewer_position
        if self.strategy == "snippets" or self.has_pieces:
            settings["readout"] = self.readout
        if self.empty_snippets == "kept":
            settings["empty_snippets"] = self.empty_snippets
        settings |= {name: True for name in ("title_view", "whole_view") if getattr(self, name)}
        later = ("query_prompt", "passage_prompt", "overlap_tokens", "truncate_dim")
        return settings | {name: value for name in later if (value := getattr(self, name))}

    def stored_settings(self) -> dict[str, str | int | bool | None]:
        """Return `settings`, and those that are in the files of a stored encoder: its towers and its sentences."""
        sentences = {"sentences": self.sentences} if self.needs_sentences else {}
        return {**self.settings(), "tied": self.tied, **sentences}


class TokenizedPassage(NamedTuple):
    """One text as tokens, in plain arrays.

    input_ids     int32 [T], viewers beyond the vocabulary (`tower.Tower`)
    position_ids  int32 [T], rows of the backbone's position table; each piece encoded alone restarts them
    view_T        int16 [T], the view whose mean this token's state enters, -1: none
    """

    input_ids: IntArray
    position_ids: IntArray
    view_T: IntArray

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


TOKEN_ARRAYS = {"lengths": np.int32, "input_ids": np.int32, "position_ids": np.int32, "view_T": np.int16}
"""The arrays of `pack_tokens`, with their types."""


def pack_tokens(texts: Sequence[TokenizedPassage]) -> dict[str, IntArray]:
    """Lay texts end to end for cheap transport: one array a field, and `lengths`."""
    arrays: dict[str, IntArray] = {"lengths": np.array([text.num_tokens for text in texts], TOKEN_ARRAYS["lengths"])}
    for name in TokenizedPassage._fields:
        parts = [getattr(text, name) for text in texts] or [np.zeros(0)]
        arrays[name] = np.concatenate(parts).astype(TOKEN_ARRAYS[name])
    return arrays


def unpack_tokens(arrays: Mapping[str, IntArray]) -> list[TokenizedPassage]:
    """Invert `pack_tokens`, over one writable copy of the arrays."""
    ends = np.cumsum(arrays["lengths"]).tolist()
    whole = [np.array(arrays[name], TOKEN_ARRAYS[name]) for name in TokenizedPassage._fields]
    starts = [0, *ends[:-1]]
    return [TokenizedPassage(*(array[start:end] for array in whole)) for start, end in zip(starts, ends)]


@dataclass(frozen=True)
class TextTokens:
    """A text's token ids and the character offset where each token ends."""

    ids: list[int]
    ends: list[int]

    def split(self, num_chars: int) -> tuple[list[int], "TextTokens"]:
        """Split into the ids of the tokens in the first `num_chars` characters, and the rest, counted from there."""
        at = bisect_right(self.ends, num_chars) if num_chars else 0
        return self.ids[:at], TextTokens(self.ids[at:], [end - num_chars for end in self.ends[at:]])

    def share_of(self, token_id: int | None) -> float:
        """Compute the share of the text's characters that are in tokens of this id."""
        if token_id not in self.ids:
            return 0.0
        lengths = (end - start for start, end in pairwise([0, *self.ends]))
        return sum(length for own, length in zip(self.ids, lengths) if own == token_id) / self.ends[-1]


class PassageText(NamedTuple):
    """A passage's tokens before truncation. `title` may be empty; strategies without snippets have no `snippets`."""

    title: Sequence[int]
    text: TextTokens
    snippets: Sequence[Span] = ()
    prompt: Sequence[int] = ()


@dataclass(frozen=True)
class Layout:
    """A backbone's properties for laying out tokens: special ids, the position table, the first viewer's id,
    its pooling and the numbers of tokens of its prompts."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    separator: tuple[int, ...]
    first_position: int
    num_positions: int
    first_viewer: int
    pooling: Pooling = MEAN
    query_prompt_tokens: int = 0
    passage_prompt_tokens: int = 0

    def check(self, spec: EncoderSpec, backbone: str) -> None:
        """Raise EncoderError where this backbone has too few positions or tokens for the settings."""
        own = spec.num_views if spec.strategy == "viewers" and spec.viewer_position == "own" else 0
        limits = (("query", spec.query_limit, 0), ("passage", spec.passage_limit, own))
        for name, tokens, num_viewers in limits:
            if tokens > self.num_positions - num_viewers:
                less = f", {num_viewers} of them kept for viewers" if num_viewers else ""
                raise EncoderError(
                    f"max_{name}_tokens is {tokens}, but backbone {backbone} has {self.num_positions} positions{less}; "
                    f"lower max_{name}_tokens to {self.num_positions - num_viewers} or less"
                )
        least_beside_title = {"viewers": spec.num_views + 2, "snippets": 2 * spec.num_views + 1}.get(spec.strategy, 3)
        least = -(-4 * (least_beside_title + self.passage_prompt_tokens) // 3)
        if spec.passage_limit < least:
            beside = f" and a prompt of {self.passage_prompt_tokens} tokens" if self.passage_prompt_tokens else ""
            fewer = " or lower num_views" if spec.strategy in ("viewers", "snippets") and spec.num_views > 1 else ""
            raise EncoderError(
                f"max_passage_tokens is {spec.max_passage_tokens}, too few for "
                f"{count_noun(spec.effective_views, 'view')} under strategy {spec.strategy!r}{beside}; give at least "
                f"{least}{fewer}"
            )
        least = self.query_prompt_tokens + 8
        if self.query_prompt_tokens and spec.query_limit < least:
            raise EncoderError(
                f"max_query_tokens is {spec.max_query_tokens}, too few beside a prompt of {self.query_prompt_tokens} "
                f"tokens; give at least {least}, or shorten query_prompt"
            )
        if 2 * spec.overlap_tokens > (capacity := spec.passage_limit * 3 // 4 - self.passage_prompt_tokens - 2):
            raise EncoderError(
                f"overlap_tokens is {spec.overlap_tokens}, more than half of what a window of "
                f"{spec.max_passage_tokens} tokens has for text; lower it to {capacity // 2} or less"
            )

    def query(self, spec: EncoderSpec, ids: Sequence[int]) -> TokenizedPassage:
        """Lay out a query. `ids`: token ids of its prompt and text."""
        prefix = (self.first_viewer,) if spec.has_viewers else self.prefix
        all_ids = [*prefix, *ids[: spec.query_limit - len(prefix) - len(self.suffix)], *self.suffix]
        if spec.strategy == "pooling":
            view_T = self._members(self.pooling, len(all_ids), self.query_prompt_tokens)
        elif spec.strategy in ("mean", "snippet_means") or (spec.has_pieces and spec.readout == "snippet_mean"):
            view_T = self._members(self._mean, len(all_ids), self.query_prompt_tokens)
        elif spec.strategy == "snippets" and spec.readout == "snippet_mean":
            view_T = [-1] + [0] * (len(all_ids) - 1)
        else:
            view_T = [0] + [-1] * (len(all_ids) - 1)
        return self._arrays([(all_ids, view_T)])

    @property
    def _mean(self) -> Pooling:
        return Pooling(("mean",), self.pooling.include_prompt)

    def _members(self, pooling: Pooling, num_tokens: int, num_prompt: int) -> list[int]:
        members = pooling.members(num_tokens, len(self.prefix) + num_prompt if num_prompt else 0)
        return [0 if at in members else -1 for at in range(num_tokens)]

    def passage(self, spec: EncoderSpec, passage: PassageText) -> TokenizedPassage:
        """Lay out a passage."""
        title, text, snippets, prompt = passage
        head = self._head(spec, title)
        if spec.strategy == "snippets":
            return self._snippets(spec, prompt, head, text, snippets)
        head = [*prompt, *head]
        if spec.strategy == "viewers":
            return self._viewers(spec, head, text)
        capacity = self._capacity(spec, len(head))
        if spec.overlap_tokens and len(text.ids) > capacity:
            return self._windows(spec, head, text, snippets, capacity)
        text_ids, text_ends = text.ids[:capacity], text.ends[:capacity]
        if spec.has_pieces:
            return self._pieces(spec, head, TextTokens(text_ids, text_ends), snippets)
        ids = [*self.prefix, *head, *text_ids, *self.suffix]
        view_T = [-1] * len(ids)
        if spec.strategy == "pooling":
            view_T = self._members(self.pooling, len(ids), self.passage_prompt_tokens)
        elif spec.strategy in ("cls", "first_k"):
            first = min(spec.effective_views, len(ids))
            view_T[:first] = range(first)
        elif spec.strategy == "snippet_means" and not text_ids:
            view_T = [0] * len(ids)
        else:
            if spec.strategy == "mean" or spec.whole_view:
                view_T = self._members(self._mean, len(ids), self.passage_prompt_tokens)
            if spec.strategy == "snippet_means":
                start = len(self.prefix) + len(head)
                view_T[start : start + len(text_ids)] = self._snippet_views(spec, text_ends, snippets)
        return self._arrays([(ids, view_T)])

    def ends_read(self, spec: EncoderSpec, passage: PassageText) -> list[int]:
        """Return the character offsets where the tokens of the text end that `passage` does not cut."""
        title, text, snippets, prompt = passage
        head = self._head(spec, title)
        if spec.strategy == "snippets":
            pieces = self._viewer_pieces(spec, prompt, head, text, snippets)
            return [text.ends[at] for at in sorted(chain(*pieces.values()))]
        return text.ends if spec.overlap_tokens else text.ends[: self._capacity(spec, len(prompt) + len(head))]

    def spans_read(self, spec: EncoderSpec, passage: PassageText) -> list[Span | None]:
        """Return each snippet's span, up to the last token that is read; None where no token is read."""
        ends, snippets = self.ends_read(spec, passage), passage.snippets
        num_tokens = Counter(snippet_of_token(passage.text.ends, snippets))
        ends_of: dict[int, list[int]] = {}
        for end, snippet in zip(ends, snippet_of_token(ends, snippets)):
            ends_of.setdefault(snippet, []).append(end)
        spans: list[Span | None] = []
        for snippet, (start, end) in enumerate(snippets):
            own = ends_of.get(snippet, [])
            if own and len(own) < num_tokens[snippet]:
                end = min(end, own[-1])
                start = min(start, end - 1)  # the first token may be the space before the snippet
            spans.append((start, end) if own else None)
        return spans

    def _head(self, spec: EncoderSpec, title: Sequence[int]) -> list[int]:
        quarter = spec.passage_limit // 4
        if not title or spec.title_view:
            return list(title[:quarter])
        return [*title[: quarter - len(self.separator)], *self.separator]

    def _capacity(self, spec: EncoderSpec, num_head: int) -> int:
        """Return the number of tokens of text that one sequence holds."""
        num_first = spec.num_views if spec.strategy == "viewers" else len(self.prefix)
        return spec.passage_limit - num_first - num_head - len(self.suffix)

    def _snippet_views(self, spec: EncoderSpec, ends: Sequence[int], snippets: Sequence[Span]) -> list[int]:
        return [spec.first_text_view + snippet for snippet in snippet_of_token(ends, snippets)]

    def _windows(
        self, spec: EncoderSpec, head: list[int], text: TextTokens, snippets: Sequence[Span], capacity: int
    ) -> TokenizedPassage:
        """Lay out windows of `capacity` tokens of text; the last one starts early enough to be full."""
        head = [*self.prefix, *head]
        views = self._snippet_views(spec, text.ends, snippets)
        last = len(text.ids) - capacity
        starts = [*range(0, last, capacity - spec.overlap_tokens), last]
        bounds = [0, *((start + previous + capacity) // 2 for previous, start in pairwise(starts)), len(text.ids)]
        rows = []
        for start, (low, high) in zip(starts, pairwise(bounds)):
            own = [views[at] if low <= at < high else -1 for at in range(start, start + capacity)]
            row = [*head, *text.ids[start : start + capacity], *self.suffix]
            rows.append((row, [-1] * len(head) + own + [-1] * len(self.suffix)))
        if spec.whole_view:
            own_head = self._members(self._mean, len(head) + capacity, self.passage_prompt_tokens)[: len(head)]
            rows[0][1][: len(head)], rows[-1][1][len(head) + capacity :] = own_head, [0] * len(self.suffix)
        return self._arrays(rows)

    def _viewers(self, spec: EncoderSpec, head: list[int], text: TextTokens) -> TokenizedPassage:
        """Lay out MVR: viewers first, at position 0 or at the table's last positions; the text from position 1."""
        num = spec.num_views
        text_ids = text.ids[: self._capacity(spec, len(head))]
        rest = [*head, *text_ids, *self.suffix]
        viewers = [self.first_viewer + 1 + view for view in range(num)]
        places = [0] * num if spec.viewer_position == "zero" else range(self.num_positions - num, self.num_positions)
        row = viewers + rest, [*range(num), *[-1] * len(rest)]
        return self._arrays([row], [*places, *range(1, 1 + len(rest))])

    def _snippets(
        self, spec: EncoderSpec, prompt: Sequence[int], head: list[int], text: TextTokens, snippets: Sequence[Span]
    ) -> TokenizedPassage:
        """Put a viewer before each snippet, at ordinary positions; viewers without a snippet come last, or are omitted.

        With a title view (CAMVR, figures 1 and 4) `head` is the title, view 0's snippet; the text has the others.
        """
        ids = [*prompt, *([] if spec.title_view else head)]
        view_T = [-1] * len(ids)
        for view, places in self._viewer_pieces(spec, prompt, head, text, snippets).items():
            piece = head if spec.title_view and view == 0 else [text.ids[at] for at in places]
            by_viewer = spec.readout == "viewer" or not piece
            ids += [self.first_viewer + 1 + view, *piece]
            view_T += [view if by_viewer else -1, *[-1 if by_viewer else view] * len(piece)]
        return self._arrays([([*ids, *self.suffix], [*view_T, *[-1] * len(self.suffix)])])

    def _viewer_pieces(
        self, spec: EncoderSpec, prompt: Sequence[int], head: list[int], text: TextTokens, snippets: Sequence[Span]
    ) -> dict[int, list[int]]:
        """Map each viewer, in order, to the places of the tokens of its snippet in the text, after truncation."""
        keep_empty = spec.empty_snippets == "kept"
        pieces: dict[int, list[int]] = {0: []} if spec.title_view and (head or keep_empty) else {}
        for at, snippet in enumerate(snippet_of_token(text.ends, snippets)):
            pieces.setdefault(spec.first_text_view + snippet, []).append(at)
        for view in range(spec.num_views if keep_empty else int(not pieces)):
            pieces.setdefault(view, [])
        budget = spec.passage_limit - len(self.suffix) - len(prompt) - len(head) - len(pieces)
        lengths = shorten([len(piece) for piece in pieces.values()], budget)
        return {view: piece[:length] for (view, piece), length in zip(pieces.items(), lengths)}

    def _pieces(
        self, spec: EncoderSpec, head: list[int], text: TextTokens, snippets: Sequence[Span]
    ) -> TokenizedPassage:
        """Lay out MVR table 5: one sequence for each snippet that has tokens, one after the other."""
        of_token = np.asarray(snippet_of_token(text.ends, snippets), np.int64)
        rows = []
        for view in np.unique(of_token).tolist() or [0]:
            piece = [text.ids[at] for at in np.flatnonzero(of_token == view)]
            row = [*self.prefix, *head, *piece, *self.suffix]
            reads_all = spec.readout == "snippet_mean"
            rows.append((row, [view] * len(row) if reads_all else [view, *[-1] * (len(row) - 1)]))
        return self._arrays(rows)

    def rows(self, passage: TokenizedPassage) -> list[TokenizedPassage]:
        """Split a passage into its sequences: pieces or windows."""
        starts = np.flatnonzero(passage.position_ids == self.first_position)
        return [TokenizedPassage(*parts) for parts in zip(*(np.split(array, starts[1:]) for array in passage))]

    def _arrays(
        self, rows: Sequence[tuple[list[int], list[int]]], positions: Sequence[int] | None = None
    ) -> TokenizedPassage:
        """Lay sequences, each with its token ids and views, one after the other; by default each counts positions."""
        places = [at for ids, _ in rows for at in range(len(ids))] if positions is None else positions
        return TokenizedPassage(
            np.array([token for ids, _ in rows for token in ids], np.int32),
            np.array(places, np.int32) + np.int32(self.first_position),
            np.array([view for _, views in rows for view in views], np.int16),
        )


def snippet_of_token(ends: Sequence[int], snippets: Sequence[Span]) -> list[int]:
    """Find the snippet that holds each token's last character; a token between two snippets belongs to the second."""
    bounds = [end for _, end in snippets[:-1]]
    return np.searchsorted(bounds, np.asarray(ends, np.int64) - 1, side="right").tolist()


def shorten(lengths: Sequence[int], budget: int) -> list[int]:
    """Cut the longest pieces to fit the budget: each keeps min(its length, a common length); the first cut pieces then
    share the remaining tokens, one each."""
    if sum(lengths) <= budget:
        return list(lengths)
    rest, level = budget, 0
    for num_whole, length in enumerate(sorted(lengths)):
        level = rest // (len(lengths) - num_whole)
        if length > level:
            break
        rest -= length
    result = [min(length, level) for length in lengths]
    remaining = budget - sum(result)
    for at, length in enumerate(lengths):
        if remaining and length > result[at]:
            result[at] += 1
            remaining -= 1
    return result
