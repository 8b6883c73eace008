"""The dual encoder: questions to vectors, passages to views.

What each strategy puts in and reads out is in `views`; the transformers are in `backbones`. Vectors come out in
float32, of length 1 where the settings say so; `score_scale` belongs to the loss and never touches them.

Shapes: Q questions, P passages, V views per passage, T tokens, D dimension.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mvr_ray.core.encoding.backbones import Tower, open_tower, parameter_groups
from mvr_ray.core.encoding.length_batches import filled_batches, token_batches
from mvr_ray.core.encoding.padded import pad, padded_views
from mvr_ray.core.encoding.precision import FP32, InferenceCache, Precision, PrecisionName, check
from mvr_ray.core.encoding.quantized import calibrate
from mvr_ray.core.encoding.snapshot import read_parts, tower_names, write_parts
from mvr_ray.core.encoding.snippets import (
    TITLE,
    PunktParams,
    Span,
    equal_splits,
    load_punkt,
    snippet_spans,
)
from mvr_ray.core.encoding.stored_model import FORMAT_VERSION, StoredModel
from mvr_ray.core.encoding.unpadded_cpu import Means, UnpaddedCpuTower, supports_unpadded_cpu
from mvr_ray.core.encoding.views import EncoderSpec, Layout, TextTokens, TokenizedPassage
from mvr_ray.errors import EncoderError
from mvr_ray.types import FloatArray, Passage

__all__ = ["DualEncoder", "EncoderSpec", "PassageViews", "TokenizedPassage"]

PADDED_TOKENS = 1024
"""Padded tokens that a CPU reads at once with a gradient: enough for full speed, few enough to waste little."""


class PassageViews(NamedTuple):
    """views_PVD float32, zero where missing; mask_PV true where a view is. Every passage has at least one."""

    views_PVD: Tensor
    mask_PV: Tensor


class EmbeddedViews(NamedTuple):
    """PassageViews as numpy arrays."""

    views_PVD: FloatArray
    mask_PV: np.ndarray


class DualEncoder(StoredModel):
    """Two towers, or one for both sides. Make it with `from_backbone` or `load`."""

    what: ClassVar[str] = "encoder snapshot"
    description_file: ClassVar[str] = "encoder.json"
    refusal: ClassVar = EncoderError

    def __init__(
        self,
        spec: EncoderSpec,
        towers: Sequence[Tower],
        punkt: PunktParams | None,
        precision: Precision = FP32,
    ) -> None:
        super().__init__()
        self.spec, self.precision = spec, precision
        self._inference = InferenceCache()
        self.towers = nn.ModuleDict(dict(zip(tower_names(spec), towers)))
        self.splitter = load_punkt(punkt)
        tower = self.passage_tower
        special = tower.tokenizer
        self.layout = Layout(
            cls_id=special.cls_token_id,
            sep_id=special.sep_token_id,
            first_position=tower.first_position,
            num_positions=tower.num_positions,
            first_viewer=tower.num_words,
            separators=tower.kind.separators,
        )

    @classmethod
    def from_backbone(cls, folder: str, spec: EncoderSpec, punkt: PunktParams | None = None) -> "DualEncoder":
        """An untrained encoder. `punkt` is needed when `spec.sentences` is corpus; else None: the packaged one."""
        if spec.needs_sentences and spec.sentences == "corpus" and punkt is None:
            raise EncoderError(
                "encoder.sentences is corpus, but no Punkt parameters were given; "
                "pass punkt=train_punkt(texts of the corpus), or set encoder.sentences=packaged"
            )
        towers = [open_tower(folder) for _ in range(1 if spec.tied else 2)]
        for tower in towers:
            if spec.has_viewers:
                tower.add_viewers(spec.num_views, spec.viewer_init, spec.seed)
        encoder = cls(spec, towers, punkt)
        encoder.layout.check(spec, folder)
        return encoder.eval()

    @classmethod
    def load(cls, folder: str | Path) -> "DualEncoder":
        """Open a snapshot. Raises EncoderError if it is none, FingerprintError if its weights are not those saved."""
        description = cls.read_description(Path(folder))
        encoder = cls(*read_parts(Path(folder), description)).eval()
        encoder.check_fingerprint(folder, description)
        return encoder

    def save(self, folder: str | Path) -> None:
        """Write a snapshot, laid out as `snapshot` says."""
        towers = {name: _tower(tower) for name, tower in self.towers.items()}
        description = write_parts(Path(folder), self.spec, towers, self.splitter.params, self.precision)
        description |= {"format_version": FORMAT_VERSION, "fingerprint": self.fingerprint}
        self.write_description(Path(folder), dict(sorted(description.items())))

    @property
    def question_tower(self) -> Tower:
        return _tower(self.towers["shared" if self.spec.tied else "question"])

    @property
    def passage_tower(self) -> Tower:
        return _tower(self.towers["shared" if self.spec.tied else "passage"])

    @property
    def dimension(self) -> int:
        return self.passage_tower.dimension

    @property
    def num_views(self) -> int:
        return self.spec.effective_views

    @property
    def transformers(self) -> list[Any]:
        return [_tower(tower).backbone for tower in self.towers.values()]

    @property
    def fingerprint(self) -> str:
        """16 hex digits over all that changes an embedding. Reads every weight (about a second a gigabyte): keep it."""
        hasher = hashlib.blake2b(digest_size=8)
        hasher.update(json.dumps(self.spec.settings(), sort_keys=True).encode())
        for tower in (self.question_tower, self.passage_tower):
            hasher.update(tower.digest())
        if self.spec.needs_sentences:
            hasher.update(self.splitter.params.to_json().encode())
        hasher.update(self.precision.digest())
        return hasher.hexdigest()

    def to_precision(
        self, precision: PrecisionName, passages: Sequence[Passage] = (), gpu: bool | None = None
    ) -> "DualEncoder":
        """This encoder, its weights shared, embedding passages in another precision, hence by another fingerprint.
        Questions and training stay in float32. int8 finds its scales from `passages`. `gpu`: whether passages will be
        embedded on one; absent: where the encoder is now. Raises EncoderError where that cannot be."""
        check(self.passage_tower, precision, gpu)
        scales = calibrate(self.passage_tower, self.tokenize_passages(passages)) if precision == "int8" else None
        towers = [_tower(tower) for tower in self.towers.values()]
        return DualEncoder(self.spec, towers, self.splitter.params, Precision(precision, scales)).eval()

    def tokenize_queries(self, texts: Sequence[str]) -> list[TokenizedPassage]:
        """Cut to `max_query_tokens`. Raises EncoderError for a query without a token."""
        tokens = _tokens(self.question_tower, texts)
        for at, (text, found) in enumerate(zip(texts, tokens)):
            if not found.ids or not text.strip():
                raise EncoderError(f"query {at} of {len(texts)} is empty ({text!r}); give every query some text")
        return [self.layout.query(self.spec, found.ids) for found in tokens]

    def tokenize_passages(self, passages: Sequence[Passage], max_tokens: int = 0) -> list[TokenizedPassage]:
        """The tokens of each passage and where its views are read; same passages, same arrays, on any machine.

        `max_tokens` shortens passages further than the settings do, for training; 0 does not.
        """
        spec = self.spec
        if max_tokens:
            spec = replace(spec, max_passage_tokens=min(max_tokens, spec.max_passage_tokens))
            self.layout.check(spec, "of this encoder")
        texts = _tokens(self.passage_tower, [passage.text for passage in passages])
        titles = [TextTokens([], [])] * len(passages)
        if self.spec.use_title:
            titles = _tokens(self.passage_tower, [passage.title.strip() for passage in passages])
        return [
            self.layout.passage(spec, title.ids, text, self.snippets(passage))
            for passage, title, text in zip(passages, titles, texts)
        ]

    def snippets(self, passage: Passage) -> list[Span]:
        """Character spans of the text's snippets, before any is lost to truncation; empty without snippets.

        The first of them has view `spec.first_text_view`.
        """
        if not self.spec.has_snippets:
            return []
        if self.spec.strategy == "splits":
            return equal_splits(passage.text, self.spec.num_views)
        return snippet_spans(passage.text, self.spec.num_views - self.spec.first_text_view, self.splitter)

    def view_spans(self, passage: Passage) -> list[Span | None]:
        """The characters of each view's snippet, `TITLE` where it is the title; None where the view is missing, stands
        before nothing, or reads the whole passage."""
        spans: list[Span | None] = [None] * self.num_views
        there = set(self.tokenize_passages([passage])[0].view_T.tolist())
        if self.spec.title_view and passage.title.strip() and 0 in there:
            spans[0] = TITLE
        for view, span in enumerate(self.snippets(passage), self.spec.first_text_view):
            if view in there:
                spans[view] = span
        return spans

    def forward(self, texts: Sequence[str], tokenized: Sequence[TokenizedPassage]) -> tuple[Tensor, PassageViews]:
        """Both sides in one call, as wrappers that watch `forward` need (DistributedDataParallel)."""
        return self.encode_queries(texts), self.encode_passages(tokenized)

    def encode_queries(self, texts: Sequence[str]) -> Tensor:
        """queries_QD, differentiable."""
        return self._read(self.question_tower, self.tokenize_queries(texts), 1, FP32).views_PVD[:, 0]

    def encode_passages(self, tokenized: Sequence[TokenizedPassage]) -> PassageViews:
        """Views of a batch, differentiable. Pads to the batch's longest; padding changes nothing but rounding."""
        return self._read(self.passage_tower, tokenized, self.num_views, self.precision)

    def states(self, tokenized: Sequence[TokenizedPassage]) -> tuple[Tensor, Tensor]:
        """states_PTD of the passage tower, and which tokens are real (the others are padding). Packed, as views are,
        where nothing is to be learned and that can be."""
        tower = self.passage_tower
        padded = pad(tower, tokenized)
        if self._learns() or self.precision.name != "fp32" or not supports_unpadded_cpu(tower.backbone):
            return tower(padded.ids_PT, padded.positions_PT, padded.real_PT), padded.real_PT
        reader = self._inference.of(tower, self.precision)
        assert isinstance(reader, UnpaddedCpuTower)
        return reader.padded_states(tokenized), padded.real_PT

    def attentions(self, tokenized: Sequence[TokenizedPassage]) -> Sequence[Tensor]:
        """Attention weights of each layer over a batch of passages, [P, heads, T, T] (`attention.view_attention`)."""
        padded = pad(self.passage_tower, tokenized)
        return self.passage_tower.attentions(padded.ids_PT, padded.positions_PT, padded.real_PT)

    def mean_pool_queries(self, texts: Sequence[str]) -> Tensor:
        """The backbone's own reading, targets_QD of a warm start: the mean of all states of `[CLS] question [SEP]`, not
        normalised, without dropout or gradient, by the weights of this moment."""
        return self._mean_pool(self.question_tower, self.tokenize_queries(texts))

    def mean_pool_passages(self, tokenized: Sequence[TokenizedPassage]) -> Tensor:
        """targets_PD, as `mean_pool_queries`, of `[CLS] (title [SEP]) text [SEP]`: viewers are taken out. A title that
        is a snippet has no separator after it here either.

        Raises EncoderError where pieces are read alone: there is no reading of the whole to move towards.
        """
        if self.spec.has_pieces:
            raise EncoderError(
                f"strategy {self.spec.strategy!r} reads every piece alone and cannot be warmed up towards the mean of "
                f"the whole passage; set train.warm_start_steps to 0, and encoder.readout to snippet_mean instead"
            )
        return self._mean_pool(self.passage_tower, tokenized)

    def embed_queries(self, texts: Sequence[str], batch_size: int = 64) -> FloatArray:
        """queries_QD as float32, for searching."""
        if not len(texts):
            return np.zeros((0, self.dimension), np.float32)
        with self.inference():
            batches = [self.encode_queries(texts[at : at + batch_size]) for at in range(0, len(texts), batch_size)]
        return torch.cat(batches).cpu().numpy()

    def passage_batches(self, lengths: Sequence[int], budget: int) -> list[list[int]]:
        """Rows of passages so long, in batches for `embed_batches` of at most `budget` tokens: as they come where
        nothing is padded, else by length, padding counted; all at once where reading makes blocks of its own."""
        if supports_unpadded_cpu(self.passage_tower.backbone):
            return [list(range(len(lengths)))] if lengths else []
        return filled_batches(lengths, budget) if self.precision.name != "fp32" else token_batches(lengths, budget)

    def embed_batches(self, batches: Iterable[Sequence[TokenizedPassage]]) -> Iterator[EmbeddedViews]:
        """`embed_passages` of each. What a GPU made of a batch is fetched when it has been handed the next one."""
        before: _Fetch | None = None
        for tokenized in batches:
            with self.inference():
                coming = _Fetch(self.encode_passages(tokenized))
            if before is not None:
                yield before.arrived()
            before = coming
        if before is not None:
            yield before.arrived()

    def embed_passages(self, tokenized: Sequence[TokenizedPassage]) -> EmbeddedViews:
        """Views of one batch as float32, for indexing."""
        [embedded] = self.embed_batches([tokenized])
        return embedded

    def parameter_groups(self, lr: float, viewer_lr_factor: float, weight_decay: float) -> list[dict[str, Any]]:
        """Groups for AdamW: matrices, vectors (biases and norms, never decayed), and viewers at their own rate."""
        viewers = ("viewers", lambda name: ".viewers." in name, viewer_lr_factor)
        return parameter_groups(self.named_parameters(), viewers, lr, weight_decay)

    def _read(
        self, tower: Tower, tokenized: Sequence[TokenizedPassage], num_views: int, precision: Precision
    ) -> PassageViews:
        if not tokenized:
            empty_PVD = torch.zeros(0, num_views, self.dimension, device=self.device)
            return PassageViews(empty_PVD, empty_PVD[..., 0].bool())
        if self.spec.has_pieces and tower is self.passage_tower and num_views == self.num_views:
            rows = [self.layout.rows(passage) for passage in tokenized]
            passage_R = torch.repeat_interleave(torch.tensor([len(own) for own in rows])).to(self.device)
            views_RVD, count_RV = self._states(tower, [row for own in rows for row in own], num_views, precision)
            views_PVD = views_RVD.new_zeros(len(rows), *views_RVD.shape[1:]).index_add(0, passage_R, views_RVD)
            count_PV = count_RV.new_zeros(len(rows), num_views).index_add(0, passage_R, count_RV)
        else:
            views_PVD, count_PV = self._states(tower, tokenized, num_views, precision)
        if self.spec.normalize:
            views_PVD = F.normalize(views_PVD, dim=-1)
        return PassageViews(views_PVD, count_PV > 0)

    def _states(
        self, tower: Tower, tokenized: Sequence[TokenizedPassage], num_views: int, precision: Precision
    ) -> Means:
        """Packed where that can be; else padded, on a CPU to the longest of few texts of about one length."""
        if not self._learns() and (precision.name != "fp32" or supports_unpadded_cpu(tower.backbone)):
            return self._inference.of(tower, precision).views(tokenized, num_views)
        if self.device.type != "cpu" or len(tokenized) == 1:
            return padded_views(tower, tokenized, num_views)
        groups = token_batches([passage.num_tokens for passage in tokenized], PADDED_TOKENS)
        parts = [padded_views(tower, [tokenized[row] for row in rows], num_views) for rows in groups]
        back = torch.from_numpy(np.argsort(np.concatenate(groups)))
        views_PVD, count_PV = (torch.cat(part)[back] for part in zip(*parts))
        return Means(views_PVD, count_PV)

    def _learns(self) -> bool:
        """Whether a gradient may be asked for, or torch is to choose the precision: packed weights are as they were."""
        return self.training or torch.is_grad_enabled() or torch.is_autocast_enabled(self.device.type)

    def _mean_pool(self, tower: Tower, tokenized: Sequence[TokenizedPassage]) -> Tensor:
        plain = []
        for passage in tokenized:
            words = passage.input_ids[passage.input_ids < tower.num_words]
            if self.spec.has_viewers:
                words = np.concatenate([np.asarray([self.layout.cls_id], words.dtype), words])[: tower.num_positions]
            positions = np.arange(len(words), dtype=np.int32) + np.int32(self.layout.first_position)
            plain.append(TokenizedPassage(words, positions, np.zeros(len(words), np.int16)))
        with self.inference():
            padded = pad(tower, plain)
            states_PTD = tower(padded.ids_PT, padded.positions_PT, padded.real_PT).float()
            return (states_PTD * padded.real_PT[..., None]).sum(1) / padded.real_PT.sum(1, keepdim=True)


def _tokens(tower: Tower, texts: Sequence[str]) -> list[TextTokens]:
    # Half a surrogate pair is no text to the tokenizer; a question mark takes its place, so offsets stay as they are.
    clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
    encodings = tower.tokenizer.backend_tokenizer.encode_batch(clean, add_special_tokens=False)
    return [TextTokens(encoding.ids, [end for _, end in encoding.offsets]) for encoding in encodings]


def _tower(module: nn.Module) -> Tower:
    assert isinstance(module, Tower)
    return module


class _Fetch:
    """Views on their way from the device to the host."""

    def __init__(self, views: PassageViews) -> None:
        self._views, self._event = views, None
        if views.views_PVD.is_cuda:
            pinned = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in views]
            self._views = PassageViews(*(host.copy_(one, non_blocking=True) for host, one in zip(pinned, views)))
            self._event = torch.cuda.Event()
            self._event.record()

    def arrived(self) -> EmbeddedViews:
        if self._event is not None:
            self._event.synchronize()
        return EmbeddedViews(self._views.views_PVD.cpu().numpy(), self._views.mask_PV.cpu().numpy())
