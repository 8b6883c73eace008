"""Load pretrained backbones by transformers, and wrap text encoders in towers.

A backbone is any text encoder that transformers loads without code of the model's own; of an encoder-decoder it is the
encoder.

Importing this module imports transformers, which takes seconds; embedding with a stored BERT needs neither
(`stored_backbone`).
"""

import inspect
import json
import logging
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import torch
import transformers
from huggingface_hub import constants as hub
from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, OfflineModeIsEnabled
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForTextEncoding,
    AutoTokenizer,
    PreTrainedConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_TEXT_ENCODING_MAPPING, MODEL_MAPPING

from mvr_ray.core.encoding.model_folder import read_modules
from mvr_ray.core.encoding.stored_model import translate_load_errors
from mvr_ray.core.encoding.tower import KINDS, LoadedModel, Tower, quiet_transformers
from mvr_ray.errors import EncoderError, MvrRayError, count_noun, first_line

log = logging.getLogger(__name__)

_HUB_TIMEOUT_S = 5.0
_ADAPTER = (
    "{} holds an adapter (such as LoRA's){}, which mvr_ray does not apply; merge it by peft "
    "(model.merge_and_unload().save_pretrained(NEW), tokenizer.save_pretrained(NEW)) and give that {}"
)
_TASK = re.compile(r"For(Sequence|Token)Classification|ForQuestionAnswering")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def open_tower(folder: str) -> Tower:
    """Load a text encoder from a folder of sentence-transformers or transformers, or by name from the hub or its cache.
    Weights become float32.

    Raises EncoderError naming the folder and what is wrong with it.
    """
    what = f"backbone {folder}"
    _require_model(folder, "backbone", EncoderError)
    with translate_load_errors(what, "its files for sentence-transformers are damaged", EncoderError):
        modules = read_modules(folder)
    settings = _settings(folder, "backbone", EncoderError, modules.subfolder)
    model_type, own_code = _model_type(settings), _own_code(settings)
    config = _encoder_config(folder, model_type, own_code, modules.subfolder)
    factory, classes = _encoder_factory(config)
    parameters = inspect.signature(classes[type(config)]).parameters
    options = {"add_pooling_layer": False} if "add_pooling_layer" in parameters else {}
    backbone, tokenizer, missing = _load(
        folder, "backbone", factory, EncoderError, modules.subfolder, config=config, **options
    )
    if missing := [name for name in missing if "pooler." not in name]:
        raise EncoderError(_missing_weights(what, model_type, missing, own_code))
    if task := next((name for name in map(str, settings.get("architectures") or []) if _TASK.search(name)), None):
        log.warning(
            "backbone %s is a %s, which judges texts and was not trained to embed them: its vectors find little before "
            "`train`; take an embedding model, and a cross-encoder for mine.cross_encoder",
            *(folder, task),
        )
    if own_code:
        log.warning(
            "backbone %s names code of its own (%s), which is not run: transformers' class for %s reads its weights, "
            "and its vectors may differ from those that its authors measured",
            *(folder, own_code, model_type),
        )
    for name in ("cls_token_id", "sep_token_id", "pad_token_id") if model_type in KINDS else ():
        if getattr(tokenizer, name) is None:
            raise EncoderError(f"the tokenizer of {what} has no {name[:3].upper()} token, which is needed")
    with translate_load_errors(what, "its modules or its tokenizer do not fit its transformer", EncoderError):
        return Tower(backbone, tokenizer, modules)


def _encoder_config(folder: str, model_type: str | None, own_code: str, subfolder: str) -> Any:
    what = f"backbone {folder}"
    if model_type not in CONFIG_MAPPING:
        code = "if the model brings code of its own,"
        if own_code:
            code = f"code of its own ({own_code}) computes it, and"
        raise EncoderError(
            f"{what} is of model type {model_type!r}, which transformers {transformers.__version__} does not have; "
            f"{code} mvr_ray does not run it: take a model whose type transformers knows"
        )
    path, options = _location(folder, subfolder)
    with quiet_transformers(), translate_load_errors(what, "take a whole config.json", EncoderError):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False, **options)
    if type(config) not in MODEL_MAPPING or not hasattr(config, "hidden_size"):
        raise EncoderError(f"{what} is of model type {model_type!r}, which is no text encoder of transformers")
    if model_type not in KINDS and hasattr(config, "use_cache"):
        config.use_cache = False
    return config


def _encoder_factory(config: Any) -> tuple[Any, Any]:
    """Return the class that loads an encoder of this configuration, and the models that it supports. For an
    encoder-decoder the class loads the encoder alone."""
    if type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING:
        return AutoModelForTextEncoding, MODEL_FOR_TEXT_ENCODING_MAPPING
    if getattr(config, "is_encoder_decoder", False):
        raise EncoderError(
            f"a backbone of model type {config.model_type!r} has an encoder and a decoder, and transformers does not "
            f"load its encoder alone; take one of the kind of BERT, T5 or Qwen"
        )
    return AutoModel, MODEL_MAPPING


def open_task_model(folder: str, what: str, factory: str, error_type: type[MvrRayError], **options: Any) -> LoadedModel:
    """Load a model, or a backbone to train as one, by a class of transformers. Weights become float32.

    Only the head may be missing. Raises `error_type` naming the folder and what is wrong with it.
    """
    settings = _settings(folder, what, error_type)
    weights = _load(folder, what, getattr(transformers, factory), error_type, **options)
    body = f"{weights.model.base_model_prefix}."
    if hasattr(weights.model, weights.model.base_model_prefix):
        inside = [name for name in weights.missing if name.startswith(body) and ".pooler." not in name]
    else:  # T5's reader: its layers stand beside its head
        inside = [name for name in weights.missing if not name.startswith("qa_outputs.")]
    if inside:
        raise error_type(_missing_weights(f"{what} {folder}", _model_type(settings), inside, _own_code(settings)))
    return weights


def read_config(folder: str, what: str, error_type: type[MvrRayError]) -> Any:
    """Read the settings of a model, without its weights. Raises `error_type` where there are none."""
    _settings(folder, what, error_type)
    with quiet_transformers(), translate_load_errors(f"{what} {folder}", "take a whole config.json", error_type):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def _require_model(folder: str, what: str, error_type: type[MvrRayError]) -> None:
    """Raise `error_type` where there is no such folder, and no such model on the hub. `what` names it in messages."""
    if not Path(folder).is_dir() and not _HUB_NAME.fullmatch(folder):
        raise error_type(
            f"{what} folder {folder} does not exist; give a folder with config.json, model.safetensors and "
            f"tokenizer.json, or the name of a model on the Hugging Face hub"
        )
    if not Path(folder).is_dir():
        _require_hub_model(folder, what, error_type)


def _settings(folder: str, what: str, error_type: type[MvrRayError], subfolder: str = "") -> dict[str, Any]:
    """Read config.json. `what` names the model in messages."""
    _require_model(folder, what, error_type)
    path, options = _location(folder, subfolder)
    if (adapter := Path(path) / "adapter_config.json").is_file():
        with translate_load_errors(f"{what} {folder}", "its adapter_config.json is damaged", error_type):
            base = json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path")
        cure = "folder, or remove adapter_config.json where the weights are merged already"
        raise error_type(_ADAPTER.format(f"{what} {folder}", f" of {base}", cure))
    try:
        with translate_load_errors(f"{what} {folder}", "take a whole config.json", error_type, OSError):
            config = PreTrainedConfig.get_config_dict(path, **options)[0]
    except OSError as error:
        raise error_type(f"{what} {folder} has no readable config.json: {first_line(error)}") from None
    if not config:
        raise error_type(f"{what} {folder} has no config.json; give a folder that save_pretrained wrote")
    return config


def _model_type(settings: Mapping[str, Any]) -> str | None:
    model_type = settings.get("model_type")
    return model_type if isinstance(model_type, str) else None


def _own_code(settings: Mapping[str, Any]) -> str:
    """Return the name of the code in a model's folder that its authors compute it by; empty without any."""
    code = (settings.get("auto_map") or {}).get("AutoModel")
    return str(code or "")


def _weights_advice(path: str) -> str:
    """Return what to do about a folder that cannot be loaded, by the weights that it has in place of safetensors."""
    others = not any(Path(path).glob("*.safetensors"))
    for pattern, content in {
        "*.onnx": "weights for ONNX Runtime",
        "openvino_model*.xml": "weights for OpenVINO",
        "tf_model*.h5": "weights for TensorFlow",
        "flax_model*.msgpack": "weights for Flax",
        "pytorch_model*.bin": "pickled weights, which could run code",
    }.items():
        if others and (file := next(Path(path).rglob(pattern), None)):
            return (
                f"it has {content} ({file.name}), and mvr_ray reads model.safetensors: give the folder of the model "
                f"that they were made from, or load that by transformers and save it (model.save_pretrained)"
            )
    return "it needs model.safetensors and tokenizer.json"


def _require_hub_model(name: str, what: str, error_type: type[MvrRayError]) -> None:
    """Raise `error_type` where the hub is unreachable or refuses the model, and no copy is cached.

    One request replaces the half minute of retries of the hub's library, which still handles an overloaded hub.
    """
    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_HUB_TIMEOUT_S)
    except HfHubHTTPError as error:
        if error.response.status_code == 429 or error.response.status_code >= 500:
            return
        if isinstance(error, EntryNotFoundError):
            with suppress(HfHubHTTPError, httpx2.HTTPError):
                get_hf_file_metadata(hf_hub_url(name, "adapter_config.json"), timeout=_HUB_TIMEOUT_S)
                raise error_type(_ADAPTER.format(f"{what} {name}", "", "folder")) from None
        reason = first_line(error)
    except (httpx2.HTTPError, OfflineModeIsEnabled) as error:
        reason = first_line(error)
    else:
        return
    raise error_type(
        f"{what} {name} is neither a folder ({Path(name).absolute()} does not exist) nor a model that can be fetched "
        f"from {hub.ENDPOINT} ({reason}); give a folder with config.json, model.safetensors and tokenizer.json, or a "
        f"model's name on a hub that can be reached"
    )


def _location(folder: str, subfolder: str) -> tuple[str, dict[str, str]]:
    """Return where a library finds the files of a model's subfolder: path or name, and options."""
    if not subfolder:
        return folder, {}
    return (str(Path(folder) / subfolder), {}) if Path(folder).is_dir() else (folder, {"subfolder": subfolder})


def _load(
    folder: str, what: str, factory: Any, error_type: type[MvrRayError], subfolder: str = "", **options: Any
) -> LoadedModel:
    path, location = _location(folder, subfolder)
    with (
        quiet_transformers(),
        translate_load_errors(f"{what} {folder}", _weights_advice(path), error_type),
    ):
        own: Any = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
        model, info = factory.from_pretrained(path, output_loading_info=True, **own, **location, **options)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False, **location)
    if tokenizer is None or not tokenizer.is_fast:
        raise error_type(f"{what} {folder} has no fast tokenizer, which character offsets need; add tokenizer.json")
    words, num_words = model.get_input_embeddings(), tokenizer.vocab_size
    if not isinstance(words, nn.Embedding):
        raise error_type(
            f"{what} {folder} embeds its words by a {type(words).__name__}; take a model with a torch.nn.Embedding, "
            f"which is a plain table"
        )
    if set(tokenizer.get_vocab()) <= {*tokenizer.all_special_tokens, "▁"}:  # what transformers makes without files
        raise error_type(
            f"{what} {folder} has no tokenizer with words, so all texts would be alike; add its tokenizer.json "
            f"(tokenizer.save_pretrained)"
        )
    if num_words > words.num_embeddings:
        raise error_type(
            f"the tokenizer of {what} {folder} has {num_words} words, and the model embeds {words.num_embeddings}; add "
            f"the tokenizer of this model"
        )
    last, last_id = max(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    if last_id >= words.num_embeddings:
        raise error_type(
            f"the tokenizer of {what} {folder} has the token {last!r} of id {last_id}, and the model embeds ids below "
            f"{words.num_embeddings}; remove the token from tokenizer.json, or give the model a row for it "
            f"(model.resize_token_embeddings) and train it"
        )
    return LoadedModel(model, tokenizer, sorted(info["missing_keys"]))


def _missing_weights(what: str, model_type: str | None, missing: list[str], own_code: str) -> str:
    cure = "they would be random, so take a complete checkpoint"
    if own_code:
        cure = f"its weights are those of code of its own ({own_code}), which mvr_ray does not run: take another model"
    return f"{what} lacks {count_noun(len(missing), 'weight')} of a {model_type} model (first: {missing[0]}); {cure}"
