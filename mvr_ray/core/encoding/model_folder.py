"""Read and write the files of a sentence-transformers folder beside its transformer: pooling, heads, prompts, lengths.

    modules.json                           the modules in order, each with its folder
    config_sentence_transformers.json      prompts by name, truncate_dim
    sentence_bert_config.json              max_seq_length, do_lower_case; settings that mvr_ray lacks are refused
    1_Pooling/config.json                  the modes
    2_Dense/config.json, model.safetensors a linear layer with its activation

A folder without modules.json is a plain transformer, pooled by the mean, or by the last token if it was trained to
generate text. A truncation is written as a linear layer without bias whose weights are the first rows of the identity.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from mvr_ray.core.encoding.pooling import Dense, Heads, Normalize, Pooling, Truncation
from mvr_ray.errors import EncoderError

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
LENGTHS = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Current and former names of the file of lengths."""
QUERY_PROMPTS, PASSAGE_PROMPTS = ("query",), ("document", "passage", "corpus")
"""Names of the prompts for each side; the first one present counts."""
_OTHER_TEXTS = ("query_length", "document_length", "query_expansion", "processing_kwargs")
"""Settings in the file of lengths by which sentence-transformers reads other tokens of a text."""
_TOKEN_STATES = {"method": "forward", "method_output_name": "last_hidden_state"}
_LEGACY_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Settings of a pooling module before it had `pooling_mode`, in the order in which their vectors are joined."""


class SentenceModules(NamedTuple):
    """The modules after a transformer, and how its input texts are prepared.

    `subfolder` is that of the transformer, "" for the folder itself; `pooling` is None without a modules.json, and
    `max_tokens` is 0 where the folder sets none. `unread_prompts` are the names of its prompts if none has a name of
    either side.
    """

    subfolder: str = ""
    pooling: Pooling | None = None
    heads: Heads | None = None
    query_prompt: str = ""
    passage_prompt: str = ""
    max_tokens: int = 0
    lowercase: bool = False
    unread_prompts: tuple[str, ...] = ()


def read_modules(folder: str) -> SentenceModules:
    """Read the modules of a folder or of a hub model. Raises EncoderError for unsupported modules."""
    modules = _read_json(folder, MODULES)
    if modules is None:
        return SentenceModules()
    transformer, pooling, heads = "", Pooling(), []
    for at, module in enumerate(modules):
        kind, path = str(module["type"]).rpartition(".")[2], _subfolder(folder, module["path"])
        if not str(module["type"]).startswith("sentence_transformers."):
            kind = f"{module['type']}, which is code of the model's own"
        settings = _read_json(folder, f"{path}/config.json") or {} if path else {}
        if kind == "Transformer" and at == 0:
            transformer = path
        elif kind == "Pooling":
            pooling = _pooling(settings)
        elif kind in ("Normalize", "Dense") and _reads_sentence_vectors(settings):
            heads.append(Normalize() if kind == "Normalize" else _dense(folder, path, settings))
        elif kind != "Dropout":
            raise EncoderError(
                f"{MODULES} of backbone {folder} has a module {kind}; mvr_ray computes a Transformer followed by "
                f"Pooling, Dense, Normalize and Dropout"
            )
    lengths = next(
        (content for name in LENGTHS if (content := _read_json(folder, f"{transformer}/{name}".lstrip("/")))), {}
    )
    _require_readable(folder, lengths)
    config = _read_json(folder, PROMPTS) or {}
    prompts, truncate_dim = config.get("prompts") or {}, config.get("truncate_dim")
    if truncate_dim:
        heads.append(Truncation(int(truncate_dim)))
    if wrong := [name for name, text in prompts.items() if not isinstance(text, str | None)]:
        raise EncoderError(f"{PROMPTS} of backbone {folder} has a prompt {wrong[0]!r} that is no text; correct it")

    def prompt(names: Sequence[str]) -> str:  # an empty one counts; encode_query and encode_document read no default
        return next((prompts[name] for name in names if prompts.get(name) is not None), "")

    has_prompts = any(prompts.get(name) for name in (*QUERY_PROMPTS, *PASSAGE_PROMPTS))  # empty ones are written always
    return SentenceModules(
        transformer,
        pooling,
        Heads(*heads),
        prompt(QUERY_PROMPTS),
        prompt(PASSAGE_PROMPTS),
        int(lengths.get("max_seq_length") or 0),
        bool(lengths.get("do_lower_case")),
        () if has_prompts else tuple(sorted(name for name, text in prompts.items() if text)),
    )


def _reads_sentence_vectors(settings: Mapping[str, Any]) -> bool:
    names = (settings.get(f"module_{side}_name") or "sentence_embedding" for side in ("input", "output"))
    return set(names) == {"sentence_embedding"}


def _require_readable(folder: str, lengths: Mapping[str, Any]) -> None:
    """Raise EncoderError for settings that mvr_ray computes otherwise than sentence-transformers, or a wrong length."""
    other_names = [name for name in _OTHER_TEXTS if lengths.get(name)]
    kinds = lengths.get("modality_config") or {}
    if "message" in kinds:
        other_names.append("modality_config.message (each text goes through a chat template)")
    if kinds.get("text", _TOKEN_STATES) != _TOKEN_STATES:
        other_names.append("modality_config.text")
    if (max_tokens := lengths.get("max_seq_length") or 0) < 0:
        raise EncoderError(
            f"{LENGTHS[0]} of backbone {folder} sets max_seq_length to {max_tokens}; set the most tokens of a text, or "
            f"null for as many as the model takes"
        )
    if other_names:
        raise EncoderError(
            f"{LENGTHS[0]} of backbone {folder} sets {', '.join(other_names)}, which mvr_ray does not compute; its "
            f"vectors would differ from those of sentence-transformers"
        )


def write_modules(folder: Path, modules: SentenceModules, size: int) -> None:
    """Write the files from which sentence-transformers makes the same vectors. `size`: dimensions of a token state.

    Pooling and heads must be set; the transformer must lie in the folder itself.
    """
    assert modules.pooling is not None and modules.heads is not None and not modules.subfolder
    modes = modules.pooling.modes
    size *= len(modes)
    entries = [("", "models.Transformer"), ("1_Pooling", "models.Pooling")]
    pooling: dict[str, Any] = {"word_embedding_dimension": size // len(modes)}
    pooling |= {name: mode in modes for name, mode in _LEGACY_MODES.items()}
    _write_json(folder / "1_Pooling" / "config.json", pooling | {"include_prompt": modules.pooling.include_prompt})
    for at, layer in enumerate(modules.heads, 2):
        kind = "Normalize" if isinstance(layer, Normalize) else "Dense"
        entries.append((f"{at}_{kind}", f"models.{kind}"))
        if isinstance(layer, Dense | Truncation):
            size = _write_dense(folder / f"{at}_{kind}", layer, size)
    listing = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.{kind}"}
        for at, (path, kind) in enumerate(entries)
    ]
    _write_json(folder / MODULES, listing)
    _write_json(folder / LENGTHS[0], {"max_seq_length": modules.max_tokens, "do_lower_case": False})
    prompts = {QUERY_PROMPTS[0]: modules.query_prompt, PASSAGE_PROMPTS[0]: modules.passage_prompt}
    _write_json(folder / PROMPTS, {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": None})


def _pooling(settings: Mapping[str, Any]) -> Pooling:
    name: Any = settings.get("pooling_mode") or [mode for old, mode in _LEGACY_MODES.items() if settings.get(old)]
    modes: tuple[Any, ...] = (name,) if isinstance(name, str) else tuple(name)
    return Pooling(modes or ("mean",), bool(settings.get("include_prompt", True)))


def _dense(folder: str, path: str, settings: Mapping[str, Any]) -> nn.Module:
    file = _file(folder, f"{path}/model.safetensors")
    if file is None:
        raise EncoderError(
            f"{path} of backbone {folder} has no model.safetensors; mvr_ray opens no pickled weights: save the model "
            f"again with sentence-transformers (model.save_pretrained), which writes one"
        )
    weights = load_file(file)
    out_size, in_size = weights["linear.weight"].shape
    name = str(settings.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = getattr(nn, name.rpartition(".")[2], None)
    if not name.startswith("torch.nn.") or not (isinstance(activation, type) and issubclass(activation, nn.Module)):
        raise EncoderError(f"{path} of backbone {folder} has the activation {name!r}, which is no layer of torch.nn")
    bias, residual = "linear.bias" in weights, bool(settings.get("use_residual"))
    if activation is nn.Identity and not bias and not residual and _is_truncation(weights["linear.weight"]):
        return Truncation(out_size)
    layer = Dense(in_size, out_size, bias, activation.__name__, residual)
    layer.load_state_dict(weights)
    return layer.float()


def _write_dense(folder: Path, layer: Dense | Truncation, in_size: int) -> int:
    """Write one linear layer; returns its output dimension."""
    if isinstance(layer, Truncation):
        weights = {"linear.weight": torch.eye(min(layer.out_size, in_size), in_size)}
        name, residual = "torch.nn.modules.linear.Identity", False
    else:
        weights = {name: weight.detach().float().cpu().contiguous() for name, weight in layer.state_dict().items()}
        activation = type(layer.activation)
        name, residual = f"{activation.__module__}.{activation.__name__}", layer.adds_input
    settings = {
        "in_features": in_size,
        "out_features": len(weights["linear.weight"]),
        "bias": "linear.bias" in weights,
        "activation_function": name,
    }
    _write_json(folder / "config.json", settings | ({"use_residual": True} if residual else {}))
    save_file(weights, folder / "model.safetensors")
    return len(weights["linear.weight"])


def _is_truncation(weight_OD: torch.Tensor) -> bool:
    out_size, in_size = weight_OD.shape
    return out_size <= in_size and torch.equal(weight_OD, torch.eye(out_size, in_size).to(weight_OD.dtype))


def _subfolder(folder: str, path: Any) -> str:
    """Return the path of a module, which must lie inside the model's folder."""
    parts = PurePosixPath(str(path).replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts:
        raise EncoderError(f"{MODULES} of backbone {folder} has the path {path!r}, which leaves the model's folder")
    return "" if str(parts) == "." else str(parts)


def _file(folder: str, name: str) -> Path | None:
    """Locate a file of a local folder, or of a hub model (fetched or cached); None where the model has none."""
    if Path(folder).is_dir():
        return Path(folder) / name if (Path(folder) / name).is_file() else None
    from huggingface_hub import constants as hub
    from transformers.utils import cached_file

    # An unreachable file is not an absent file: without its pooling a model would give wrong vectors.
    strict = not hub.HF_HUB_OFFLINE
    file = cached_file(
        folder, name, _raise_exceptions_for_missing_entries=False, _raise_exceptions_for_connection_errors=strict
    )
    return None if file is None else Path(file)


def _read_json(folder: str, name: str) -> Any:
    file = _file(folder, name)
    return None if file is None else json.loads(file.read_text(encoding="utf-8"))


def _write_json(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
