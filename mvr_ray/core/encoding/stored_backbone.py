"""Open the tower of a snapshot without transformers, whose import takes seconds, to embed with it on a CPU.

Weights have transformers' names, so a tower has the same digest with and without transformers; the forward pass is
that of `unpadded_cpu`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from mvr_ray.core.encoding.model_folder import read_modules
from mvr_ray.core.encoding.tower import KINDS, MAX_TOKENS, Tower
from mvr_ray.core.encoding.unpadded_cpu import UNPADDED_KINDS, supports_unpadded_cpu
from mvr_ray.errors import EncoderError

_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class StoredBackbone(nn.Module):
    """Settings and weights of a backbone of `UNPADDED_KINDS`; it has no forward pass."""

    def __init__(self, settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.config = SimpleNamespace(**settings)
        for name, weight in weights.items():
            *path, last = name.split(".")
            module: Any = self
            for part in path[:-1]:
                module = module._modules.setdefault(part, nn.Module())
            if path[-1].endswith("_embeddings"):
                offset = path[-1] == "position_embeddings" and KINDS[self.config.model_type].offset
                padding = self.config.pad_token_id if offset else None
                module.add_module(path[-1], nn.Embedding.from_pretrained(weight.float(), False, padding))
            else:
                layer = module._modules.setdefault(path[-1], nn.Module())
                layer.register_parameter(last, nn.Parameter(weight.float()))

    def get_input_embeddings(self) -> nn.Module:
        return self.get_submodule("embeddings.word_embeddings")


class StoredTokenizer(NamedTuple):
    """A fast tokenizer with the attributes of transformers' tokenizers that a tower uses."""

    backend_tokenizer: Tokenizer
    model_max_length: int
    cls_token_id: int | None
    sep_token_id: int | None
    pad_token_id: int | None
    unk_token_id: int | None


def open_stored_tower(folder: Path) -> Tower | None:
    """Open a tower that `Tower.save` wrote; None where only transformers has its forward pass. Raises EncoderError if
    its settings name another dimension than its weights have."""
    if not all((folder / name).is_file() for name in _FILES):
        return None
    settings, tokens = (json.loads((folder / name).read_text(encoding="utf-8")) for name in (_FILES[0], _FILES[3]))
    if settings.get("model_type") not in UNPADDED_KINDS:
        return None
    weights = load_file(folder / _FILES[1])
    backbone = StoredBackbone(settings, weights)
    if not supports_unpadded_cpu(backbone):
        return None
    dimension = weights["embeddings.word_embeddings.weight"].shape[1]
    if settings.get("hidden_size") != dimension:
        raise EncoderError(
            f"{folder / _FILES[0]} has hidden_size {settings.get('hidden_size')!r}, and the weights have {dimension}; "
            f"copy or make the snapshot again"
        )
    backend = Tokenizer.from_file(str(folder / _FILES[2]))
    special = [tokens.get(f"{name}_token") for name in ("cls", "sep", "pad", "unk")]
    texts = [token.get("content") if isinstance(token, dict) else token for token in special]
    ids = [None if text is None else backend.token_to_id(text) for text in texts]
    if None in ids[:3]:
        return None
    tokenizer = StoredTokenizer(backend, int(tokens.get("model_max_length", MAX_TOKENS)), *ids)
    return Tower(backbone, tokenizer, read_modules(str(folder)))
