"""Load pretrained backbones, and wrap each in a tower with its tokenizer and viewers.

A tower is a transformer, its tokenizer and, where the strategy has viewers, their embeddings. The ids of viewers begin
after the vocabulary's: `num_words` is the query's, `num_words + 1 + i` that of view i.

Shapes: B texts in a batch, T tokens, D dimension.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import torch
from huggingface_hub import constants as hub
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedConfig,
)
from transformers.utils import logging as transformers_logging

from mvr_ray.errors import EncoderError, MvrRayError

VIEWERS_FILE = "viewers.safetensors"
VIEWER_STD = 0.02
"""Spread of random viewer embeddings."""

_HUB_TIMEOUT_S = 5.0
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
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
_TOKENIZER = ("added_tokens", "normalizer", "pre_tokenizer", "model", "post_processor")
"""The parts of a tokenizer that bear on ids and offsets."""


@dataclass(frozen=True)
class BackboneKind:
    """How one model type counts positions.

    `offset`: the table's first rows that no token uses. `separators`: how many stand between the two texts of a pair.
    `relative`: attention has a bias by the distance between two tokens, beside the table.
    """

    offset: bool = False
    separators: int = 1
    relative: bool = False
    pooler: bool = True


KINDS = {
    "bert": BackboneKind(),
    "distilbert": BackboneKind(pooler=False),
    "mpnet": BackboneKind(offset=True, separators=2, relative=True),
    "roberta": BackboneKind(offset=True, separators=2),
    "xlm-roberta": BackboneKind(offset=True, separators=2),
}


class Tower(nn.Module):
    """One transformer with its tokenizer and viewers."""

    def __init__(self, backbone: nn.Module, tokenizer: Any, model_type: str) -> None:
        super().__init__()
        self.backbone = backbone
        self.viewers: nn.Embedding | None = None
        self.tokenizer = tokenizer
        self.kind = KINDS[model_type]
        config: Any = backbone.config
        self.dimension = int(config.hidden_size)
        self.num_words = int(self._words.num_embeddings)
        positions: Any = backbone.embeddings.position_embeddings  # type: ignore[union-attr]
        self.first_position = int(positions.padding_idx) + 1 if self.kind.offset else 0
        self.num_positions = int(positions.num_embeddings) - self.first_position
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()

    @property
    def _words(self) -> nn.Embedding:
        return self.backbone.get_input_embeddings()  # type: ignore[operator]

    def add_viewers(self, num_views: int, init: str, seed: int) -> None:
        """Give the query and each of `num_views` views a viewer: random, or noisy copies of [CLS].

        The query's viewer is always a copy of [CLS]: there is one, so it has nothing to become equal to.
        """
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1 + num_views, self.dimension, generator=generator) * VIEWER_STD
        copies = slice(None) if init == "cls" else slice(0, 1)
        weight[copies] += self._words.weight[self.tokenizer.cls_token_id].detach().cpu()
        weight[0] = self._words.weight[self.tokenizer.cls_token_id].detach().cpu()
        self.viewers = nn.Embedding.from_pretrained(weight, freeze=False)

    def forward(self, ids_BT: Tensor, positions_BT: Tensor, real_BT: Tensor, **options: Any) -> Tensor:
        """Compute token states_BTD. `real_BT` is false on padding; `options` go to the backbone's attention."""
        return self._run(ids_BT, positions_BT, real_BT, **options).last_hidden_state

    def attentions(self, ids_BT: Tensor, positions_BT: Tensor, real_BT: Tensor) -> Sequence[Tensor]:
        """Compute attention weights of each layer, [B, heads, T, T]; the backbone's attention must be set to eager."""
        return self._run(ids_BT, positions_BT, real_BT, output_attentions=True).attentions

    def embed_ids(self, ids: Tensor) -> Tensor:
        """Look up ids of any shape in the tables of words and viewers; the result has one dimension more."""
        words = self._words
        if self.viewers is None:
            return words(ids)
        viewers = self.viewers((ids - self.num_words).clamp(min=0))
        return torch.where((ids >= self.num_words)[..., None], viewers, words(ids.clamp(max=self.num_words - 1)))

    def _run(self, ids_BT: Tensor, positions_BT: Tensor, real_BT: Tensor, **options: bool) -> Any:
        inputs_BTD = self.embed_ids(ids_BT)
        mask = self._moved_bias(positions_BT, real_BT) if self.kind.relative else real_BT.long()
        return self.backbone(inputs_embeds=inputs_BTD, attention_mask=mask, position_ids=positions_BT, **options)

    def _moved_bias(self, positions_BT: Tensor, real_BT: Tensor) -> Tensor:
        """Correct MPNet's own attention bias, [B, heads, T, T], so that distances are those of the position ids.

        transformers counts distances by place in the row, where each viewer at position 0 has a place of its own. The
        correction is 0 where ids run with the row; keys on padding get the least number.
        """
        encoder: Any = self.backbone.encoder
        places_T = torch.arange(positions_BT.shape[1], device=positions_BT.device)

        def bias(ids: Tensor) -> Tensor:
            distances = ids[..., None, :] - ids[..., :, None]
            return encoder.relative_attention_bias(encoder.relative_position_bucket(distances))

        moved_BHTT = (bias(positions_BT) - bias(places_T)).permute(0, 3, 1, 2)
        return moved_BHTT.masked_fill(~real_BT[:, None, None, :].bool(), torch.finfo(moved_BHTT.dtype).min)

    def save(self, folder: Path) -> None:
        save_model(self.backbone, self.tokenizer, folder)
        if self.viewers is not None:
            save_file({"weight": self.viewers.weight.detach().float().cpu().contiguous()}, folder / VIEWERS_FILE)

    def load_viewers(self, folder: Path) -> None:
        if (folder / VIEWERS_FILE).is_file():
            self.viewers = nn.Embedding.from_pretrained(load_file(folder / VIEWERS_FILE)["weight"], freeze=False)

    def digest(self) -> bytes:
        """Digest weights, tokenizer and architecture; the digest is the same on every machine and after every load."""
        return digest_of(self.backbone.config, self.tokenizer, self.state_dict())


class LoadedModel(NamedTuple):
    """A transformer and its fast tokenizer. `missing` names the weights that the folder lacked: they are random."""

    model: Any
    tokenizer: Any
    missing: list[str]


def open_tower(folder: str) -> Tower:
    """Load a backbone from a Hugging Face folder, or by its name from the hub or its cache. Weights become float32.

    Raises EncoderError naming the folder and what is wrong with it.
    """
    what = f"backbone {folder}"
    model_type = _model_type(folder, "backbone", EncoderError)
    if model_type not in KINDS:
        raise EncoderError(f"{what} is of model type {model_type!r}; supported are {', '.join(KINDS)}")
    pooling = {"add_pooling_layer": False} if KINDS[model_type].pooler else {}
    backbone, tokenizer, missing = _load(folder, "backbone", AutoModel, EncoderError, **pooling)
    if missing:
        raise EncoderError(_lacking(what, model_type, missing))
    for name in ("cls_token_id", "sep_token_id", "pad_token_id"):
        if getattr(tokenizer, name) is None:
            raise EncoderError(f"the tokenizer of {what} has no {name[:3].upper()} token, which is needed")
    return Tower(backbone, tokenizer, model_type)


def open_task_model(folder: str, what: str, factory: Any, refusal: type[MvrRayError], **options: Any) -> LoadedModel:
    """Load a model of transformers' `factory`, or a backbone that is to become one. Weights become float32.

    Only the head may be missing. Raises `refusal` naming the folder and what is wrong with it.
    """
    model_type = _model_type(folder, what, refusal)
    weights = _load(folder, what, factory, refusal, **options)
    body = f"{weights.model.base_model_prefix}."
    inside = [name for name in weights.missing if name.startswith(body) and ".pooler." not in name]
    if inside:
        raise refusal(_lacking(f"{what} {folder}", model_type, inside))
    return weights


def read_config(folder: str, what: str, refusal: type[MvrRayError]) -> Any:
    """The settings of a model, without its weights. Raises `refusal` where there are none."""
    _model_type(folder, what, refusal)
    with _quiet(), refuse_damage(f"{what} {folder}", "take a whole config.json", refusal):
        return AutoConfig.from_pretrained(folder)


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a Hugging Face folder: config, weights as safetensors, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    with _quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def digest_of(config: Any, tokenizer: Any, weights: Mapping[str, Tensor]) -> bytes:
    """Return the digest of a model: its weights, its tokenizer, and the settings that change its output."""
    hasher = hashlib.blake2b(digest_size=32)
    architecture = {name: getattr(config, name) for name in _ARCHITECTURE if hasattr(config, name)}
    hasher.update(json.dumps(architecture, sort_keys=True).encode())
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    hasher.update(json.dumps({name: parts[name] for name in _TOKENIZER}, sort_keys=True).encode())
    for name, tensor in sorted(weights.items()):
        plain = tensor.detach().cpu().contiguous()
        hasher.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        hasher.update(plain.view(torch.uint8).reshape(-1).numpy().data)
    return hasher.digest()


def _model_type(folder: str, what: str, refusal: type[MvrRayError]) -> str | None:
    """Return the model type in config.json. `what` names the model in messages."""
    if not Path(folder).is_dir() and not _HUB_NAME.fullmatch(folder):
        raise refusal(
            f"{what} folder {folder} does not exist; give a folder with config.json, model.safetensors and "
            f"tokenizer.json, or the name of a model on the Hugging Face hub"
        )
    if not Path(folder).is_dir():
        _require_hub_model(folder, what, refusal)
    try:
        with refuse_damage(f"{what} {folder}", "take a whole config.json", refusal, OSError):
            config = PreTrainedConfig.get_config_dict(folder)[0]
    except OSError as error:
        raise refusal(f"{what} {folder} has no readable config.json: {_first_line(error)}") from None
    if not config:
        raise refusal(f"{what} {folder} has no config.json; give a folder that save_pretrained wrote")
    model_type = config.get("model_type")
    return model_type if isinstance(model_type, str) else None


def _require_hub_model(name: str, what: str, refusal: type[MvrRayError]) -> None:
    """Raise `refusal` where the hub cannot be reached or refuses the model, which is asked once, and no copy is kept.

    Left alone, the hub's library tries to reach it for half a minute. An overloaded hub is left to it.
    """
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_HUB_TIMEOUT_S)
    except HfHubHTTPError as error:
        if error.response.status_code == 429 or error.response.status_code >= 500:
            return
        reason = _first_line(error)
    except (httpx2.HTTPError, OfflineModeIsEnabled) as error:
        reason = _first_line(error)
    else:
        return
    raise refusal(
        f"{what} {name} is neither a folder ({Path(name).absolute()} does not exist) nor a model that can be fetched "
        f"from {hub.ENDPOINT} ({reason}); give a folder with config.json, model.safetensors and tokenizer.json, or a "
        f"model's name on a hub that can be reached"
    )


def _load(folder: str, what: str, factory: Any, refusal: type[MvrRayError], **options: Any) -> LoadedModel:
    with _quiet(), refuse_damage(f"{what} {folder}", "it needs model.safetensors and tokenizer.json", refusal):
        model, info = factory.from_pretrained(
            folder, dtype=torch.float32, use_safetensors=True, output_loading_info=True, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer is None or not tokenizer.is_fast:
        raise refusal(f"{what} {folder} has no fast tokenizer, which character offsets need; add tokenizer.json")
    return LoadedModel(model, tokenizer, sorted(info["missing_keys"]))


@contextmanager
def refuse_damage(what: str, advice: str, refusal: type[MvrRayError], *others: type[Exception]) -> Iterator[None]:
    """Raise `refusal`, which names `what`, for whatever a library raises over damaged files; `others` pass.

    The libraries have no error in common: tokenizers raise `Exception` itself.
    """
    try:
        yield
    except (MvrRayError, MemoryError, *others):
        raise
    except Exception as error:  # noqa: BLE001
        raise refusal(f"{what} cannot be loaded: {_first_line(error)}; {advice}") from None


def _lacking(what: str, model_type: str | None, missing: list[str]) -> str:
    return (
        f"{what} lacks {len(missing)} weights of a {model_type} model (first: {missing[0]}); "
        f"they would be random, so take a complete checkpoint"
    )


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    own: tuple[str, Callable[[str], bool], float],
    lr: float,
    weight_decay: float,
) -> list[dict[str, Any]]:
    """Make the parameter groups for AdamW: matrices, vectors (biases and norms, never decayed), and one with its `own`
    learning rate. `own` is that group's name, a test for the names in it, and its factor of `lr`. Empty groups are left
    out."""
    special, belongs, factor = own
    groups: dict[str, dict[str, Any]] = {
        "matrices": {"lr": lr, "weight_decay": weight_decay},
        "vectors": {"lr": lr, "weight_decay": 0.0},
        special: {"lr": lr * factor, "weight_decay": 0.0},
    }
    for name, parameter in parameters:
        group = special if belongs(name) else "matrices" if parameter.ndim > 1 else "vectors"
        groups[group].setdefault("params", []).append(parameter)
    return [{"name": name, **group} for name, group in groups.items() if "params" in group]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Stop transformers from drawing bars and printing loading reports; callers check what these report."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
