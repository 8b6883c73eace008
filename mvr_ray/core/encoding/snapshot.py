"""Write and read the parts of a stored encoder: a folder for each tower, Punkt parameters, scales and settings.

encoder.json            format version, fingerprint, dimension, views, settings, precision (where it is not fp32); last
punkt.json              sentence parameters
scales.safetensors      of int8 (`quantized.Scales`), only there
shared/                 the tower when tied; else question/ and passage/
    config.json  model.safetensors  tokenizer.json  ..  viewers.safetensors (where the strategy has viewers)
    modules.json  sentence_bert_config.json  1_Pooling/config.json    of cls, mean: for sentence-transformers
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple, get_args

from safetensors.numpy import load_file, save_file

from mvr_ray.core.encoding.backbones import Tower, open_tower
from mvr_ray.core.encoding.precision import FP32, Precision, PrecisionName
from mvr_ray.core.encoding.quantized import Scales
from mvr_ray.core.encoding.snippets import PunktParams
from mvr_ray.core.encoding.views import EncoderSpec
from mvr_ray.errors import EncoderError

PUNKT_FILE = "punkt.json"
SCALES_FILE = "scales.safetensors"
_LATER_SETTINGS = frozenset({"title_view"})
"""Settings that older snapshots of this format lack: there they have their defaults, and fingerprints are unchanged."""


class Snapshot(NamedTuple):
    """What an encoder is made from."""

    spec: EncoderSpec
    towers: list[Tower]
    punkt: PunktParams
    precision: Precision


def tower_names(spec: EncoderSpec) -> Sequence[str]:
    return ("shared",) if spec.tied else ("question", "passage")


def write_parts(
    folder: Path, spec: EncoderSpec, towers: Mapping[str, Tower], punkt: PunktParams, precision: Precision = FP32
) -> dict[str, Any]:
    """Write all files but encoder.json; returns its fields that say how to read them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tower in towers.items():
        tower.save(folder / name)
        if spec.strategy in ("cls", "mean"):
            max_tokens = spec.max_query_tokens if name == "question" else spec.max_passage_tokens
            _write_pooling(folder / name, spec, tower.dimension, max_tokens)
    (folder / PUNKT_FILE).write_text(punkt.to_json(), encoding="utf-8")
    description: dict[str, Any] = {
        "dimension": next(iter(towers.values())).dimension,
        "num_views": spec.effective_views,
        "spec": dict(sorted(asdict(spec).items())),
    }
    if precision.name != "fp32":
        description["precision"] = precision.name
    if precision.scales is not None:
        save_file(precision.scales._asdict(), folder / SCALES_FILE)
    return description


def _write_pooling(folder: Path, spec: EncoderSpec, dimension: int, max_tokens: int) -> None:
    """Write what makes sentence-transformers pool a tower's states as the strategy does, in its format since 2.0."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling"} | ({"2_Normalize": "Normalize"} if spec.normalize else {})
    modules = [
        {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for at, (path, kind) in enumerate(kinds.items())
    ]
    pooling = {
        "word_embedding_dimension": dimension,
        "pooling_mode_cls_token": spec.strategy == "cls",
        "pooling_mode_mean_tokens": spec.strategy == "mean",
        "pooling_mode_max_tokens": False,
        "pooling_mode_mean_sqrt_len_tokens": False,
    }
    files = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": max_tokens, "do_lower_case": False},
        "1_Pooling/config.json": pooling,
    }
    (folder / "1_Pooling").mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def read_parts(folder: Path, description: Mapping[str, Any]) -> Snapshot:
    """Open the files that an encoder.json of these fields describes. Raises EncoderError naming what is wrong."""
    settings = description.get("spec", {})
    differing = {field.name for field in fields(EncoderSpec)} ^ set(settings)
    if wrong := sorted(differing - (_LATER_SETTINGS - set(settings))):
        raise EncoderError(
            f"encoder.json in {folder} lacks or does not know these settings: {', '.join(wrong)}; "
            f"make the snapshot again"
        )
    spec = EncoderSpec(**settings)
    towers = []
    for name in tower_names(spec):
        tower = open_tower(str(folder / name))
        tower.load_viewers(folder / name)
        towers.append(tower)
    if not (folder / PUNKT_FILE).is_file():
        raise EncoderError(f"encoder snapshot {folder} has no {PUNKT_FILE}; copy or make it again")
    try:
        punkt = PunktParams.from_json((folder / PUNKT_FILE).read_text(encoding="utf-8"))
    except (EncoderError, UnicodeDecodeError) as error:
        raise EncoderError(f"{folder / PUNKT_FILE} is damaged ({error}); copy or make the snapshot again") from None
    return Snapshot(spec, towers, punkt, _precision(folder, description.get("precision", "fp32")))


def _precision(folder: Path, precision: Any) -> Precision:
    if precision not in get_args(PrecisionName):
        raise EncoderError(f"encoder snapshot {folder} embeds in {precision!r}, which this mvr_ray does not know")
    if precision != "int8":
        return Precision(precision)
    if not (folder / SCALES_FILE).is_file():
        raise EncoderError(f"encoder snapshot {folder} has no {SCALES_FILE}; copy or make it again")
    scales = load_file(folder / SCALES_FILE)
    if set(scales) != set(Scales._fields):
        raise EncoderError(f"{folder / SCALES_FILE} does not hold the scales of int8; copy or make the snapshot again")
    return Precision(precision, Scales(**scales))
