"""Wrap a backbone in a tower: with its tokenizer, its viewers, its pooling and its heads.

The ids of viewers begin after the vocabulary's: `num_words` is the query's, `num_words + 1 + i` that of view i.

Shapes: B texts in a batch, T tokens, D dimension.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tokenizers import normalizers
from torch import Tensor, nn

from mvr_ray.core.encoding.model_folder import SentenceModules
from mvr_ray.core.encoding.pooling import Heads, Pooling
from mvr_ray.core.threads import MODEL_LOCK
from mvr_ray.errors import EncoderError

VIEWERS_FILE = "viewers.safetensors"
VIEWER_STD = 0.02
"""Spread of random viewer embeddings."""
_ARCHITECTURE = (
    "model_type",
    "hidden_act",
    "activation",
    "layer_norm_eps",
    "num_attention_heads",
    "n_heads",
    "num_hidden_layers",
    "n_layers",
    "max_position_embeddings",
    "pad_token_id",
    "relative_attention_num_buckets",
)
"""Settings of a backbone that change its output without changing its weights."""
_ARCHITECTURE_OF_OTHERS = (
    *_ARCHITECTURE,
    "hidden_act_fn",
    "hidden_activation",
    "feed_forward_proj",
    "classifier_activation",
    "norm_eps",
    "norm_bias",
    "rms_norm_eps",
    "layer_norm_epsilon",
    "num_heads",
    "num_layers",
    "num_key_value_heads",
    "head_dim",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "partial_rotary_factor",
    "local_attention",
    "sliding_window",
    "layer_types",
    "global_attn_every_n_layers",
    "use_bidirectional_attention",
    "is_causal",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "relative_attention",
    "relative_attention_max_distance",
    "max_relative_positions",
    "position_buckets",
    "position_biased_input",
    "pos_att_type",
    "norm_rel_ebd",
    "share_att_key",
)
"""The same for model types that are not in `KINDS`."""
_TOKENIZER = ("added_tokens", "normalizer", "pre_tokenizer", "model", "post_processor")
"""The parts of a tokenizer that determine ids and offsets."""


@dataclass(frozen=True)
class BackboneKind:
    """How one model type counts positions; mvr_ray always passes it position ids.

    `offset`: the table begins with rows that no token uses. `separators`: number between the two texts of a pair.
    `relative`: attention adds a bias by the distance between two tokens, beside the table.
    """

    offset: bool = False
    separators: int = 1
    relative: bool = False


KINDS = {
    "bert": BackboneKind(),
    "distilbert": BackboneKind(),
    "mpnet": BackboneKind(offset=True, separators=2, relative=True),
    "roberta": BackboneKind(offset=True, separators=2),
    "xlm-roberta": BackboneKind(offset=True, separators=2),
}
"""Other model types count positions themselves, unless viewers need explicit positions (`Tower.pass_positions`)."""
MAX_TOKENS = 8192
"""Most tokens of one input, regardless of the model's own limit."""


class TextFrame(NamedTuple):
    """Ids of the special tokens before and after a text, and between a title and its text."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    separator: tuple[int, ...]


class Tower(nn.Module):
    """One transformer with its tokenizer, viewers, pooling and heads."""

    def __init__(self, backbone: nn.Module, tokenizer: Any, modules: SentenceModules) -> None:
        super().__init__()
        self._digest: tuple[list[tuple[int, int]], bytes] | None = None
        self.backbone = backbone
        self.viewers: nn.Embedding | None = None
        self.tokenizer = tokenizer
        config: Any = backbone.config
        self.model_type = str(config.model_type)
        self.kind = KINDS.get(self.model_type)
        self.passes_positions = self.kind is not None
        self.dimension = int(config.hidden_size)
        self.num_words = int(self._words.num_embeddings)
        padding_row, num_rows = position_table(backbone)
        self.first_position = padding_row + 1 if self.kind and self.kind.offset else 0
        self.num_positions = num_rows - padding_row - 1
        self.max_tokens = min(self.num_positions, modules.max_tokens or int(tokenizer.model_max_length), MAX_TOKENS)
        self.prompts = modules.query_prompt, modules.passage_prompt
        self.unread_prompts = modules.unread_prompts
        # sentence-transformers pools a plain model that was trained to generate text by the last token
        names = getattr(config, "architectures", None) or [""]
        generates_text = names[0].endswith("ForCausalLM") and getattr(config, "is_causal", True) is not False
        self.pooling = modules.pooling or Pooling(("lasttoken",) if generates_text else ("mean",))
        self.heads = modules.heads or Heads()
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        if modules.lowercase:
            others = [] if backend.normalizer is None else [backend.normalizer]
            backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *others])
        self.frame = _text_frame(tokenizer, self.kind)

    @property
    def _words(self) -> nn.Embedding:
        return self.backbone.get_input_embeddings()  # type: ignore[operator]

    @property
    def pad_id(self) -> int:
        """Id of the padding token, which attention masks."""
        own = self.tokenizer.pad_token_id
        return 0 if own is None else int(own)

    def vector_size(self, pools: bool) -> int:
        """Return the dimension of a vector: of the model's own pooling, or of one state, through the heads."""
        return self.heads.out_size(self.dimension * (len(self.pooling.modes) if pools else 1))

    @cached_property
    def is_causal(self) -> bool:
        """Whether a token's state depends only on the tokens before it, measured on the model."""
        ids_1T = self._probe_ids()
        return torch.allclose(
            self._probe(ids_1T)[:, 0], self._probe(torch.cat([ids_1T[:, :-1], ids_1T[:, :1]], 1))[:, 0]
        )

    @property
    def masks_padding(self) -> bool:
        """Whether padding changes a token's state by rounding alone, measured on models that are not in `KINDS`."""
        if self.kind:
            return True
        ids_1T = self._probe_ids()
        padding_1T = torch.full_like(ids_1T, self.pad_id)
        padded_1TD = self._probe(torch.cat([ids_1T, padding_1T], 1), num_padding=padding_1T.shape[1])
        return equal_but_rounding(padded_1TD[:, : ids_1T.shape[1]], self._probe(ids_1T))

    def pass_positions(self) -> None:
        """Pass position ids to the backbone from now on, which viewers at one position need.

        Raises EncoderError where position ids alone do not order the tokens: a model that counts distances by place, or
        reads from left to right, ignores them.
        """
        if self.passes_positions:
            return
        ids_1T = self._probe_ids()
        places_T = torch.arange(ids_1T.shape[1])
        states_1TD = self._probe(ids_1T)
        tolerance = float((self._probe(ids_1T.flip(1)).flip(1) - states_1TD).abs().max()) / 100
        self.passes_positions = True
        for first in dict.fromkeys((0, position_table(self.backbone)[0] + 1)):
            with suppress(TypeError):
                ordered_1TD = self._probe(ids_1T, first + places_T)
                reversed_1TD = self._probe(ids_1T.flip(1), first + places_T.flip(0)).flip(1)
                if max(float((states - states_1TD).abs().max()) for states in (ordered_1TD, reversed_1TD)) <= tolerance:
                    self.first_position = first
                    return
        self.passes_positions = False
        raise EncoderError(
            f"strategy 'viewers' puts viewers at one position, and in a backbone of model type {self.model_type!r} "
            f"position ids alone do not order the tokens; use a bert, distilbert, mpnet, roberta, xlm-roberta or "
            f"modernbert backbone, or strategy snippets (for models that read both ways) or snippet_means (for all)"
        )

    def _probe_ids(self) -> Tensor:
        return torch.tensor([[id for id in range(self.num_words - 1, 0, -1) if id != self.pad_id][:6]])

    @torch.no_grad()
    def _probe(self, ids_1T: Tensor, positions_T: Tensor | None = None, num_padding: int = 0) -> Tensor:
        """Compute the states of a few tokens without dropout; the last `num_padding` are padding."""
        training = self.training
        self.eval()
        try:
            device = self._words.weight.device
            positions_T = torch.arange(ids_1T.shape[1]) if positions_T is None else positions_T
            real_1T = torch.arange(ids_1T.shape[1], device=device)[None] < ids_1T.shape[1] - num_padding
            return self(ids_1T.to(device), positions_T[None].to(device), real_1T).float().cpu()
        finally:
            self.train(training)

    def add_viewers(self, num_views: int, init: str, seed: int) -> None:
        """Add a viewer for the query and for each of `num_views` views: random, or noisy copies of [CLS].

        The query's viewer is always a copy of [CLS]: a single viewer cannot collapse. Where a model has no [CLS], its
        first special token replaces it.
        """
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1 + num_views, self._words.embedding_dim, generator=generator) * VIEWER_STD
        first = torch.tensor((*self.frame.prefix, *self.frame.suffix, 0)[:1], device=self._words.weight.device)
        cls_D = self._words(first)[0].detach().cpu()
        copies = slice(None) if init == "cls" else slice(0, 1)
        weight[copies] += cls_D
        weight[0] = cls_D
        self.viewers = nn.Embedding.from_pretrained(weight, freeze=False)

    def forward(self, ids_BT: Tensor, positions_BT: Tensor, real_BT: Tensor, **options: Any) -> Tensor:
        """Compute token states_BTD. `real_BT` is false on padding; `options` go to the backbone's attention."""
        return self.run(ids_BT, positions_BT, real_BT, **options).last_hidden_state

    def embed_ids(self, ids: Tensor) -> Tensor:
        """Look up ids of any shape in the tables of words and viewers; the result has one dimension more."""
        words = self._words
        if self.viewers is None:
            return words(ids)
        viewers = self.viewers((ids - self.num_words).clamp(min=0))
        return torch.where((ids >= self.num_words)[..., None], viewers, words(ids.clamp(max=self.num_words - 1)))

    def run(self, ids_BT: Tensor, positions_BT: Tensor, real_BT: Tensor, **options: bool) -> Any:
        """Run the backbone, and return its outputs; for attention weights its attention must be set to eager."""
        inputs: dict[str, Tensor] = {"position_ids": positions_BT} if self.passes_positions else {}
        if self.kind or self.viewers is not None:
            inputs["inputs_embeds"] = self.embed_ids(ids_BT)
        else:
            inputs["input_ids"] = ids_BT
        is_relative = self.kind is not None and self.kind.relative
        mask = self._moved_bias(positions_BT, real_BT) if is_relative else real_BT.long()
        return self.backbone(**inputs, attention_mask=mask, **options)

    def _moved_bias(self, positions_BT: Tensor, real_BT: Tensor) -> Tensor:
        """Correct MPNet's own attention bias, [B, heads, T, T], so that distances are those of the position ids.

        transformers counts distances by place in the row, where each viewer at position 0 has its own place. The
        correction is 0 where position ids equal places; keys on padding get the lowest number.
        """
        encoder: Any = self.backbone.encoder
        places_T = torch.arange(positions_BT.shape[1], device=positions_BT.device)

        def bias(ids: Tensor) -> Tensor:
            distances = ids[..., None, :] - ids[..., :, None]
            return encoder.relative_attention_bias(encoder.relative_position_bucket(distances))

        moved_BHTT = (bias(positions_BT) - bias(places_T)).permute(0, 3, 1, 2)
        return moved_BHTT.masked_fill(~real_BT[:, None, None, :].bool(), torch.finfo(moved_BHTT.dtype).min)

    def save(self, folder: Path) -> None:
        """Write the backbone, its tokenizer and the viewers."""
        save_model(self.backbone, self.tokenizer, folder)
        if self.viewers is not None:
            save_file({"weight": self.viewers.weight.detach().float().cpu().contiguous()}, folder / VIEWERS_FILE)

    def load_viewers(self, folder: Path) -> None:
        if (folder / VIEWERS_FILE).is_file():
            self.viewers = nn.Embedding.from_pretrained(load_file(folder / VIEWERS_FILE)["weight"], freeze=False)

    def digest(self) -> bytes:
        """Digest weights, tokenizer and architecture; equal on every machine and after every load. The weights are read
        again only after a change."""
        weights = self.state_dict()
        state = [(weight.data_ptr(), weight._version) for weight in weights.values()]
        if self._digest is None or self._digest[0] != state:
            names = _ARCHITECTURE if self.kind else _ARCHITECTURE_OF_OTHERS
            self._digest = state, digest_of(self.backbone.config, self.tokenizer, weights, names)
        digest = self._digest[1]
        layers = self.heads.description()
        return digest + json.dumps(layers, sort_keys=True).encode() if layers else digest


def equal_but_rounding(actual: Tensor, expected: Tensor) -> bool:
    """Return whether states or logits differ by rounding alone: by at most 1e-4 of one more than the largest. NaN is
    equal to all, since others report damaged weights."""
    return not bool((actual - expected).abs().max() > 1e-4 * (1 + expected.abs().max()))


def without_surrogates(text: str) -> str:
    """Replace half a surrogate pair, which a tokenizer rejects, by a question mark; offsets stay the same."""
    return text.encode("utf-8", "replace").decode("utf-8")


class LoadedModel(NamedTuple):
    """A transformer and its fast tokenizer. `missing` names the weights that the folder lacks: they are random."""

    model: Any
    tokenizer: Any
    missing: list[str]


def position_table(backbone: nn.Module) -> tuple[int, int]:
    """Return the padding row of a backbone's position table, -1 without one, and the number of rows; without a table
    the number in the configuration."""
    config: Any = backbone.config
    for name, module in backbone.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            return (-1 if module.padding_idx is None else module.padding_idx), module.num_embeddings
    rows = getattr(config, "max_position_embeddings", 0) or 0
    return -1, rows if rows > 0 else MAX_TOKENS


def _text_frame(tokenizer: Any, kind: BackboneKind | None) -> TextFrame:
    """Return the tokens that the tokenizer adds around a text; where it adds none, [CLS] and [SEP] if it has them."""
    encoding = tokenizer.backend_tokenizer.encode("a")
    words = [at for at, special in enumerate(encoding.special_tokens_mask) if not special] or [0]
    prefix, suffix = encoding.ids[: words[0]], encoding.ids[words[-1] + 1 :]
    cls_id, sep_id = tokenizer.cls_token_id, tokenizer.sep_token_id
    if not prefix and not suffix and None not in (cls_id, sep_id):
        prefix, suffix = [cls_id], [sep_id]
    if sep_id is not None:
        separator = [sep_id] * (kind.separators if kind else 1)
    else:  # models that generate text separate a title from its text by a new line
        separator = tokenizer.backend_tokenizer.encode("\n", add_special_tokens=False).ids
        if tokenizer.unk_token_id in separator:
            separator = []
    return TextFrame(tuple(prefix), tuple(suffix), tuple(separator or suffix[:1]))


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a Hugging Face folder: config, weights as safetensors, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def digest_of(
    config: Any, tokenizer: Any, weights: Mapping[str, Tensor], names: Sequence[str] = _ARCHITECTURE
) -> bytes:
    """Return the digest of a model: its weights, its tokenizer, and the settings of these names."""
    hasher = hashlib.blake2b(digest_size=32)
    architecture = {name: getattr(config, name) for name in names if hasattr(config, name)}
    hasher.update(json.dumps(architecture, sort_keys=True, default=str).encode())
    hasher.update(_canonical_tokenizer(tokenizer.backend_tokenizer.to_str()))
    for name, tensor in sorted(weights.items()):
        plain = tensor.detach().cpu().contiguous()
        hasher.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        hasher.update(plain.view(torch.uint8).reshape(-1).numpy().data)
    return hasher.digest()


@lru_cache(maxsize=4)
def _canonical_tokenizer(text: str) -> bytes:
    """Write the parts of a tokenizer that decide over its tokens, in order of name. Encoders often share a tokenizer,
    and sorting 30,000 tokens takes longer than reading the weights of a small encoder."""
    parts = json.loads(text)
    return json.dumps({name: parts[name] for name in _TOKENIZER}, sort_keys=True).encode()


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Disable transformers' progress bars and loading reports, in one thread at a time; callers check what these
    report."""
    from transformers.utils import logging as transformers_logging

    with MODEL_LOCK:
        verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)
            if bars:
                transformers_logging.enable_progress_bar()
