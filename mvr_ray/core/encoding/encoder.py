"""Encode questions as vectors and passages as views.

`views` defines the input and the readout of each strategy; `backbones` loads transformers. Vectors are float32, of
length 1 where the settings say so; `score_scale` belongs to the loss and never changes them.

Shapes: Q questions, P passages, V views per passage, T tokens, D dimension.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mvr_ray.core.encoding.length_batches import filled_batches, token_batches
from mvr_ray.core.encoding.padded import join_rows, pad, padded_views
from mvr_ray.core.encoding.pooling import Dense, Heads, Truncation
from mvr_ray.core.encoding.precision import (
    FP32,
    ON_OPENVINO,
    InferencePass,
    Precision,
    PrecisionName,
    check,
    has_inference_pass,
    inference_pass,
    of_tower,
    reads_unpadded,
)
from mvr_ray.core.encoding.snapshot import export_towers, read_parts, tower_names, write_parts
from mvr_ray.core.encoding.snippets import (
    TITLE,
    PunktParams,
    Span,
    Splitter,
    equal_splits,
    snippet_spans,
)
from mvr_ray.core.encoding.stored_model import FORMAT_VERSION, StoredModel, translate_load_errors
from mvr_ray.core.encoding.tower import Tower, without_surrogates
from mvr_ray.core.encoding.unpadded_cpu import Means, supports_unpadded_cpu
from mvr_ray.core.encoding.views import MODEL_SETTINGS, EncoderSpec, Layout, PassageText, TextTokens, TokenizedPassage
from mvr_ray.errors import EncoderError, NoTokensError
from mvr_ray.types import FloatArray, Passage, UnreadCounts

__all__ = ["DualEncoder", "EncoderSpec", "PassageViews", "TokenizedPassage"]

log = logging.getLogger(__name__)

PADDED_TOKENS = 1024
"""Padded tokens of one CPU pass with a gradient: enough for full speed, few enough to waste little."""


class PassageViews(NamedTuple):
    """views_PVD float32, zero where missing; mask_PV marks existing views. Every passage has at least one."""

    views_PVD: Tensor
    mask_PV: Tensor


class EmbeddedViews(NamedTuple):
    """PassageViews as numpy arrays."""

    views_PVD: FloatArray
    mask_PV: np.ndarray


UNKNOWN_SHARE = 0.25
"""Share of a passage's characters in unknown tokens from which on it counts as unknown."""


class TokenizedChunk(NamedTuple):
    """Tokenized passages, and how many of them the encoder does not read whole."""

    passages: list[TokenizedPassage]
    unread_counts: UnreadCounts


class DualEncoder(StoredModel):
    """Two towers, or one for both sides. Make it with `from_backbone` or `load`."""

    what: ClassVar[str] = "encoder snapshot"
    description_file: ClassVar[str] = "encoder.json"
    error_type: ClassVar = EncoderError
    special_group: ClassVar[str] = "viewers"

    def __init__(
        self, spec: EncoderSpec, towers: Sequence[Tower], punkt: PunktParams | None, precision: Precision = FP32
    ) -> None:
        super().__init__()
        self.spec, self.precision = spec, precision
        self.towers: Any = nn.ModuleDict(dict(zip(tower_names(spec), towers)))
        self.splitter = Splitter(punkt)
        for tower in towers:
            _check_strategy(spec, tower)
            if spec.normalize or not self._pools:  # the spec decides, except for a model with its own pooling
                tower.heads = tower.heads.without_last_normalize(before_truncation=not self._pools)
        tower = self.passage_tower
        query_prompt, passage_prompt = _tokens(tower, [spec.query_prompt or "", spec.passage_prompt or ""])
        self.layout = Layout(
            *tower.frame,
            first_position=tower.first_position,
            num_positions=tower.num_positions,
            first_viewer=tower.num_words,
            pooling=tower.pooling,
            query_prompt_tokens=len(query_prompt.ids),
            passage_prompt_tokens=len(passage_prompt.ids),
        )

    @classmethod
    def from_backbone(cls, folder: str, spec: EncoderSpec, punkt: PunktParams | None = None) -> "DualEncoder":
        """Create an untrained encoder from a folder of sentence-transformers or transformers, or from a hub model.

        The model's own prompts and lengths replace None in `spec`. `punkt` is required when `spec.sentences` is corpus;
        else None selects the packaged one. Raises EncoderError where the model cannot be loaded or does not support
        this strategy.
        """
        if spec.needs_sentences and spec.sentences == "corpus" and punkt is None:
            raise EncoderError(
                "encoder.sentences is corpus, but no Punkt parameters were given; "
                "pass punkt=train_punkt(texts of the corpus), or set encoder.sentences=packaged"
            )
        from mvr_ray.core.encoding.backbones import open_tower  # imports transformers

        towers = [open_tower(folder) for _ in range(1 if spec.tied else 2)]
        advice = "it gives no state of each token; of DPR's encoders save the transformer inside (bert_model)"
        with translate_load_errors(f"backbone {folder}", advice, EncoderError):
            masks_padding = towers[0].masks_padding
        if not masks_padding:
            raise EncoderError(
                f"backbone {folder} of model type {towers[0].model_type!r} does not mask padding, so a text's vector "
                f"would depend on the texts beside it; take a model of another type (docs/models.md)"
            )
        if spec.strategy in ("mean", "snippet_means") and towers[0].pooling.modes != ("mean",):
            log.warning(
                "strategy %s reads the means of token states, and backbone %s was trained to be read by %s: compare it "
                "with encoder.strategy pooling, which reads it so",
                spec.strategy,
                folder,
                " and ".join(towers[0].pooling.modes),
            )
        if towers[0].unread_prompts and spec.query_prompt is None and spec.passage_prompt is None:
            log.warning(
                "backbone %s has prompts of names that are not read: %s; set encoder.query_prompt and "
                "encoder.passage_prompt to those of this task, or to empty texts",
                *(folder, ", ".join(towers[0].unread_prompts)),
            )
        own_positions = spec.num_views if spec.strategy == "viewers" and spec.viewer_position == "own" else 0
        longest = min(towers[0].max_tokens, towers[0].num_positions - own_positions)
        spec = spec.fill(dict(zip(MODEL_SETTINGS, (*towers[0].prompts, longest, longest))))
        for tower in towers:
            if spec.truncate_dim is not None:
                size = tower.vector_size(spec.strategy == "pooling")
                if not 1 <= spec.truncate_dim <= size:
                    raise EncoderError(
                        f"encoder truncate_dim is {spec.truncate_dim}, but the model's vectors have {size} dimensions; "
                        f"give 1 to {size}"
                    )
                tower.heads = Heads(*tower.heads, Truncation(spec.truncate_dim))
            if spec.has_viewers:
                tower.add_viewers(spec.num_views, spec.viewer_init, spec.seed)
        encoder = cls(spec, towers, punkt)
        encoder.layout.check(spec, folder)
        return encoder.eval()

    @classmethod
    def load(cls, folder: str | Path, only_embeds: bool = False) -> "DualEncoder":
        """Open a snapshot. Raises EncoderError if it is none, FingerprintError if its weights are not those saved.

        `only_embeds`: skip the import of transformers, which takes seconds, where mvr_ray has a forward pass for the
        backbone. The encoder embeds to the same bytes, but cannot be trained, saved or moved to a GPU.
        """
        description = cls.read_description(Path(folder))
        with translate_load_errors(f"{cls.what} {folder}", "copy or make it again", cls.error_type):
            if only_embeds:
                encoder = cls(*read_parts(Path(folder), description, only_embeds)).eval()
                if encoder.fingerprint == description["fingerprint"]:
                    return encoder
            encoder = cls(*read_parts(Path(folder), description)).eval()
        encoder.check_fingerprint(folder, description)
        return encoder

    def save(self, folder: str | Path) -> None:
        """Write a snapshot, in the layout of module `snapshot`."""
        description = write_parts(Path(folder), self.spec, self.towers, self.splitter.params, self.precision)
        description |= {"format_version": FORMAT_VERSION, "fingerprint": self.fingerprint}
        self.write_description(Path(folder), dict(sorted(description.items())))

    def export(self, folder: str | Path) -> list[str]:
        """Write a folder that sentence-transformers loads to the same vectors; returns what is lost, a sentence each.
        Two towers become the folders `question` and `passage` in it.

        Raises EncoderError for strategies with viewers.
        """
        return export_towers(Path(folder), self.spec, self.towers)

    @property
    def question_tower(self) -> Tower:
        return self.towers["shared" if self.spec.tied else "question"]

    @property
    def passage_tower(self) -> Tower:
        return self.towers["shared" if self.spec.tied else "passage"]

    @property
    def dimension(self) -> int:
        return self.passage_tower.vector_size(self._pools)

    @property
    def _pools(self) -> bool:
        return self.spec.strategy == "pooling"

    @property
    def num_views(self) -> int:
        return self.spec.effective_views

    @property
    def transformers(self) -> list[Any]:
        return [tower.backbone for tower in self.towers.values()]

    @cached_property
    def _precision_digest(self) -> bytes:
        return self.precision.digest()  # no part of it ever changes

    @property
    def fingerprint(self) -> str:
        """16 hex digits over all that changes an embedding. Reads every weight (about 1 s a gigabyte): cache it."""
        hasher = hashlib.blake2b(digest_size=8)
        hasher.update(json.dumps(self.spec.settings(), sort_keys=True).encode())
        hasher.update(self.question_tower.digest() + self.passage_tower.digest())
        if self.spec.needs_sentences:
            hasher.update(self.splitter.params.to_json().encode())
        hasher.update(self._precision_digest)
        pooling = self.passage_tower.pooling
        if self._pools:
            hasher.update(json.dumps(["pooling", *pooling.modes]).encode())
        if not pooling.include_prompt and (self.spec.query_prompt or self.spec.passage_prompt):
            hasher.update(b"prompts are excluded")
        return hasher.hexdigest()

    def to_precision(
        self, precision: PrecisionName, passages: Sequence[Passage] = (), gpu: bool | None = None
    ) -> "DualEncoder":
        """Return an encoder with the same weights that embeds passages in another precision, under its own fingerprint.

        Questions and training stay in float32. int8 calibrates its scales on `passages`. `gpu`: whether passages will
        be embedded on one; None: as the encoder's current device. Raises EncoderError where that device
        does not support the precision.
        """
        check(self.passage_tower, precision, gpu)
        own = of_tower(self.passage_tower, precision, self.tokenize_passages(passages))
        return DualEncoder(self.spec, list(self.towers.values()), self.splitter.params, own).eval()

    def tokenize_queries(self, texts: Sequence[str]) -> list[TokenizedPassage]:
        """Tokenize queries after their prompt, cut to `max_query_tokens`. Raises EncoderError for an empty query."""
        prompt = self.spec.query_prompt or ""
        encodings = _tokens(self.question_tower, [prompt + text for text in texts])
        for at, (text, encoding) in enumerate(zip(texts, encodings)):
            if not encoding.split(len(prompt))[1].ids or not text.strip():
                problem = f"is empty ({text!r}); give every query some text"
                if text.strip() and text.isprintable():
                    problem = f"has no token of the backbone's tokenizer ({text!r:.100}); ask in letters that it knows"
                raise EncoderError(f"query {at} of {len(texts)} {problem}")
        return [self.layout.query(self.spec, encoding.ids) for encoding in encodings]

    def tokenize_passages(self, passages: Sequence[Passage], max_tokens: int = 0) -> list[TokenizedPassage]:
        """Tokenize passages and mark the tokens of each view; same passages, same arrays, on any machine.

        `max_tokens` shortens passages further than the settings, for training; 0: no further limit. Raises EncoderError
        for a passage without any token.
        """
        return self.tokenize_chunk(passages, max_tokens).passages

    def tokenize_chunk(self, passages: Sequence[Passage], max_tokens: int = 0) -> TokenizedChunk:
        """Tokenize passages as `tokenize_passages` does, and count those that are cut or unknown."""
        spec, texts = self._with_limit(max_tokens), self._passage_texts(passages)
        result = [self.layout.passage(spec, text) for text in texts]
        for passage, tokens in zip(passages, result):
            if not tokens.num_tokens:
                raise NoTokensError(
                    f"passage {passage.id!r} has no token of the backbone's tokenizer ({passage.text!r:.100}); give it "
                    f"a text, or leave it out of the corpus",
                    passage.id,
                )
        num_cut = sum(len(self.layout.ends_read(spec, text)) < len(text.text.ends) for text in texts)
        unknown_id = self.passage_tower.tokenizer.unk_token_id
        num_unknown = sum(text.text.share_of(unknown_id) >= UNKNOWN_SHARE for text in texts)
        return TokenizedChunk(result, UnreadCounts(num_cut, num_unknown))

    def _with_limit(self, max_tokens: int) -> EncoderSpec:
        if not max_tokens:
            return self.spec
        spec = replace(self.spec, max_passage_tokens=min(max_tokens, self.spec.passage_limit))
        self.layout.check(spec, "of this encoder")
        return spec

    def snippets(self, passage: Passage) -> list[Span]:
        """Find the character spans of the text's snippets, before truncation; empty without snippets.

        The first of them has view `spec.first_text_view`.
        """
        if not self.spec.has_snippets:
            return []
        if self.spec.strategy == "splits":
            return equal_splits(passage.text, self.spec.num_views)
        return snippet_spans(passage.text, self.spec.num_views - self.spec.first_text_view, self.splitter)

    def view_spans(self, passage: Passage, max_tokens: int = 0) -> list[Span | None]:
        """Find the character span of each view's snippet, up to the last token that is read: `TITLE` where it is the
        title, with `empty_snippets: kept` also an empty one, None where the view is missing, has no snippet, or reads
        the whole passage. `max_tokens` as in `tokenize_passages`."""
        spans: list[Span | None] = [None] * self.num_views
        [text] = self._passage_texts([passage])
        if self.spec.title_view and (text.title or self.spec.empty_snippets == "kept"):
            spans[0] = TITLE
        spec = self._with_limit(max_tokens)
        for view, span in enumerate(self.layout.spans_read(spec, text), spec.first_text_view):
            spans[view] = span
        return spans

    def rows(self, passage: TokenizedPassage) -> list[TokenizedPassage]:
        """Split a passage into its sequences: pieces, windows, or the passage itself."""
        return self.layout.rows(passage) if self.spec.has_rows else [passage]

    def encode_queries(self, texts: Sequence[str]) -> Tensor:
        """Encode queries as queries_QD, differentiable."""
        return self._read(self.question_tower, self.tokenize_queries(texts), 1, FP32).views_PVD[:, 0]

    def encode_passages(self, batch: Sequence[TokenizedPassage]) -> PassageViews:
        """Encode a batch of passages, differentiable. Padding to the longest passage changes only rounding."""
        return self._read(self.passage_tower, batch, self.num_views, self.precision)

    def states(self, batch: Sequence[TokenizedPassage]) -> tuple[Tensor, Tensor]:
        """Compute states_PTD of the passage tower, and which tokens are real (the others are padding).

        Without gradients this runs the unpadded forward pass where the backbone has one.
        """
        if self.spec.overlap_tokens:
            raise EncoderError("the windows of a long passage have no states of one passage; set overlap_tokens to 0")
        real_PT = pad(self.passage_tower, batch).real_PT
        return self._token_states(self.passage_tower, self.precision, batch), real_PT

    def mean_pool_queries(self, texts: Sequence[str]) -> Tensor:
        """Average all states of `[CLS] question [SEP]`, through the heads: targets_QD of a warm start.

        Uses the current weights without normalisation, dropout or gradient.
        """
        return self._mean_pool(self.question_tower, self.tokenize_queries(texts))

    def mean_pool_passages(self, batch: Sequence[TokenizedPassage]) -> Tensor:
        """Average all states of `[CLS] (title [SEP]) text [SEP]`, without viewers: targets_PD, as `mean_pool_queries`.

        A title that is a snippet has no separator after it here either.

        Raises EncoderError where a passage may be several sequences: no state of the whole passage exists as a target.
        """
        if self.spec.has_rows:
            raise EncoderError(
                f"strategy {self.spec.strategy!r} reads a passage in several sequences and cannot be warmed up towards "
                f"the mean of the whole passage; set train.warm_start_steps to 0, and instead, for pieces, "
                f"encoder.readout to snippet_mean, or, for windows, encoder.overlap_tokens to 0"
            )
        return self._mean_pool(self.passage_tower, batch)

    def embed_queries(self, texts: Sequence[str], batch_size: int = 64) -> FloatArray:
        """Embed queries as float32 queries_QD, for searching."""
        if not len(texts):
            return np.zeros((0, self.dimension), np.float32)
        with self.inference():
            batches = [self.encode_queries(texts[at : at + batch_size]) for at in range(0, len(texts), batch_size)]
        return torch.cat(batches).cpu().numpy()

    def passage_batches(self, lengths: Sequence[int], budget: int) -> list[list[int]]:
        """Divide rows with these numbers of tokens into batches for `embed_batches` of at most `budget` tokens.

        Rows stay in order where nothing is padded, else they are sorted by length and padding counts. The unpadded CPU
        pass and OpenVINO form their own blocks, so they get all rows as one batch.
        """
        if self.precision.name in ON_OPENVINO or supports_unpadded_cpu(self.passage_tower.backbone):
            return [list(range(len(lengths)))] if lengths else []
        is_unpadded = reads_unpadded(self.passage_tower, self.precision.name)
        return filled_batches(lengths, budget) if is_unpadded else token_batches(lengths, budget)

    def embed_batches(self, batches: Iterable[Sequence[TokenizedPassage]]) -> Iterator[EmbeddedViews]:
        """Embed each batch. A GPU's results are fetched after the next batch has started."""
        results = (self._start(batch) for batch in batches)
        for fetch, _ in pairwise(chain(results, [None])):
            assert fetch is not None
            yield fetch()

    def embed_passages(self, batch: Sequence[TokenizedPassage]) -> EmbeddedViews:
        """Embed one batch as float32, for indexing."""
        return self._start(batch)()

    def is_special(self, parameter: str) -> bool:
        return ".viewers." in parameter

    def _passage_texts(self, passages: Sequence[Passage]) -> list[PassageText]:
        prompt = self.spec.passage_prompt or ""
        titles = [passage.title.strip() if self.spec.use_title else "" for passage in passages]
        texts = [passage.text if title else prompt + passage.text for passage, title in zip(passages, titles)]
        titles = [prompt + title if title else "" for title in titles]
        result = []
        for passage, title, text in zip(
            passages, _tokens(self.passage_tower, titles), _tokens(self.passage_tower, texts)
        ):
            prompt_ids, rest = (title if title.ids else text).split(len(prompt))
            title_ids, text = (rest.ids, text) if title.ids else ([], rest)
            result.append(PassageText(title_ids, text, self.snippets(passage), prompt_ids))
        return result

    def _start(self, batch: Sequence[TokenizedPassage]) -> Callable[[], EmbeddedViews]:
        """Start to embed a batch, and to copy its views to the host; the result waits for them."""
        with self.inference():
            views = self.encode_passages(batch)
        if not views.views_PVD.is_cuda:
            return lambda: EmbeddedViews(*(part.cpu().numpy() for part in views))
        hosts = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in views]
        for host, part in zip(hosts, views):
            host.copy_(part, non_blocking=True)
        event = torch.cuda.Event()
        event.record()

        def wait() -> EmbeddedViews:
            event.synchronize()
            return EmbeddedViews(*(host.numpy() for host in hosts))

        return wait

    def _read(
        self, tower: Tower, batch: Sequence[TokenizedPassage], num_views: int, precision: Precision
    ) -> PassageViews:
        if not batch:
            empty_PVD = torch.zeros(0, num_views, self.dimension, device=self.device)
            return PassageViews(empty_PVD, empty_PVD[..., 0].bool())
        rows = [self.rows(passage) for passage in batch]
        if self._pools and not tower.pooling.is_mean_of_tokens:
            views_PVD, count_PV = self._pool(tower, batch, precision)
        elif len(batch) == sum(map(len, rows)):
            views_PVD, count_PV = self._states(tower, batch, num_views, precision)
        else:
            views_PVD, count_PV = self._joined_rows(tower, rows, num_views, precision)
        if self.spec.whole_view and num_views == self.num_views:
            views_PVD, count_PV = _join_whole_view(views_PVD, count_PV)
        if len(tower.heads):
            with torch.autocast(views_PVD.device.type, enabled=False):
                views_PVD = tower.heads(views_PVD.float()) * (count_PV > 0)[..., None]
        if self.spec.normalize:
            views_PVD = F.normalize(views_PVD, dim=-1)
        return PassageViews(views_PVD, count_PV > 0)

    def _joined_rows(
        self, tower: Tower, rows: Sequence[Sequence[TokenizedPassage]], num_views: int, precision: Precision
    ) -> Means:
        """Average over all sequences of each passage. A piece has its own views; windows share them."""
        passage_R = torch.repeat_interleave(torch.tensor([len(own) for own in rows])).to(self.device)
        views_RVD, count_RV = self._states(tower, [row for own in rows for row in own], num_views, precision)
        if self.spec.overlap_tokens:
            views_RVD = views_RVD * count_RV[..., None]
        views_PVD = views_RVD.new_zeros(len(rows), *views_RVD.shape[1:]).index_add(0, passage_R, views_RVD)
        count_PV = count_RV.new_zeros(len(rows), num_views).index_add(0, passage_R, count_RV)
        if self.spec.overlap_tokens:
            views_PVD = views_PVD / count_PV.clamp(min=1)[..., None]
        return Means(views_PVD, count_PV)

    def _pool(self, tower: Tower, batch: Sequence[TokenizedPassage], precision: Precision) -> Means:
        """Pool by a mode that is no mean over tokens, over batches of texts of similar length."""
        groups = token_batches([passage.num_tokens for passage in batch], PADDED_TOKENS)
        parts = []
        for texts in ([batch[row] for row in rows] for rows in groups):
            states_PTD = self._token_states(tower, precision, texts)
            with torch.autocast(states_PTD.device.type, enabled=False):
                parts.append(tower.pooling.pool(states_PTD.float(), pad(tower, texts).views_PT == 0))
        vectors_PD = join_rows(parts, groups)
        return Means(vectors_PD[:, None], torch.ones(len(batch), 1, dtype=torch.long, device=self.device))

    def _states(self, tower: Tower, batch: Sequence[TokenizedPassage], num_views: int, precision: Precision) -> Means:
        """Run the unpadded pass where there is one, else the padded one, on a CPU over texts of similar length."""
        if not self._needs_gradient() and has_inference_pass(tower, precision.name):
            return self._inference_pass(tower, precision)(batch, num_views)
        if torch.is_autocast_enabled("cpu"):
            from mvr_ray.core.encoding import training_pass  # imports transformers, which a search does not need

            if training_pass.supports_training_pass(tower):
                return training_pass.training_views(tower, batch, num_views)
        if self.device.type != "cpu":
            return padded_views(tower, batch, num_views)
        groups = token_batches([passage.num_tokens for passage in batch], PADDED_TOKENS)
        parts = [padded_views(tower, [batch[row] for row in rows], num_views) for rows in groups]
        return Means(*(join_rows(part, groups) for part in zip(*parts)))

    def _inference_pass(self, tower: Tower, precision: Precision) -> InferencePass:
        """Return the tower's pass in this precision. Raises EncoderError where the machine does not support it."""
        return self.inference_cache.of(tower, precision.name, partial(inference_pass, tower, precision))

    def _token_states(self, tower: Tower, precision: Precision, batch: Sequence[TokenizedPassage]) -> Tensor:
        """Compute states_PTD of a tower in a precision; states of padding are undefined."""
        if self._needs_gradient() or not has_inference_pass(tower, precision.name):
            tokens = pad(tower, batch)
            return tower(tokens.ids_PT, tokens.positions_PT, tokens.real_PT)
        alone = [text._replace(view_T=np.arange(text.num_tokens)) for text in batch]  # each token is a view
        return self._inference_pass(tower, precision)(alone, max(text.num_tokens for text in batch)).views_PVD

    def _needs_gradient(self) -> bool:
        """Return whether gradients or autocast may be needed, which the unpadded passes do not support."""
        return self.training or torch.is_grad_enabled() or torch.is_autocast_enabled(self.device.type)

    def _mean_pool(self, tower: Tower, batch: Sequence[TokenizedPassage]) -> Tensor:
        without_viewers = []
        for passage in batch:
            words = passage.input_ids[passage.input_ids < tower.num_words]
            if self.spec.has_viewers:
                prefix = np.asarray(self.layout.prefix, words.dtype)
                words = np.concatenate([prefix, words])[: tower.num_positions]
            positions = np.arange(len(words), dtype=np.int32) + np.int32(self.layout.first_position)
            without_viewers.append(TokenizedPassage(words, positions, np.zeros(len(words), np.int16)))
        with self.inference():
            tokens = pad(tower, without_viewers)
            states_PTD = tower(tokens.ids_PT, tokens.positions_PT, tokens.real_PT).float()
            return tower.heads((states_PTD * tokens.real_PT[..., None]).sum(1) / tokens.real_PT.sum(1, keepdim=True))


def _join_whole_view(views_PVD: Tensor, count_PV: Tensor) -> Means:
    """Replace the first view by the mean over the tokens of all views."""
    sum_PD, count_P = (views_PVD * count_PV[..., None]).sum(1), count_PV.sum(1)
    whole_PD = sum_PD / count_P.clamp(min=1)[:, None]
    return Means(torch.cat([whole_PD[:, None], views_PVD[:, 1:]], 1), torch.cat([count_P[:, None], count_PV[:, 1:]], 1))


def _check_strategy(spec: EncoderSpec, tower: Tower) -> None:
    """Prepare a tower for a strategy. Raises EncoderError where the model does not support it."""
    if spec.strategy == "viewers":
        tower.pass_positions()
    if spec.strategy == "snippets" and spec.readout == "viewer" and not tower.kind and tower.is_causal:
        raise EncoderError(
            f"strategy 'snippets' reads a viewer before its snippet, and a backbone of model type {tower.model_type!r} "
            f"reads from left to right, so no viewer would see its snippet; set encoder.readout to snippet_mean, or "
            f"encoder.strategy to snippet_means or pooling"
        )
    if (
        spec.strategy != "pooling"
        and len(tower.pooling.modes) > 1
        and any(isinstance(one, Dense) for one in tower.heads)
    ):
        raise EncoderError(
            f"the model joins {len(tower.pooling.modes)} poolings ({', '.join(tower.pooling.modes)}) before a linear "
            f"layer, which takes no single state; set encoder.strategy to pooling"
        )


def _tokens(tower: Tower, texts: Sequence[str]) -> list[TextTokens]:
    clean = [without_surrogates(text) for text in texts]
    encodings = tower.tokenizer.backend_tokenizer.encode_batch(clean, add_special_tokens=False)
    return [TextTokens(encoding.ids, [end for _, end in encoding.offsets]) for encoding in encodings]
