"""An encoder at rest: a Hugging Face folder per tower, the Punkt parameters, and `encoder.json`, which is written last.

encoder.json            format version, fingerprint, dimension, views, settings, precision (where it is not fp32)
punkt.json              sentence parameters
scales.safetensors      of int8 (`quantized.Scales`), only there
shared/                 the tower when tied; else question/ and passage/
    config.json  model.safetensors  tokenizer.json  ..  viewers.safetensors (where the strategy has viewers)
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

ENCODER_FILE = "encoder.json"
PUNKT_FILE = "punkt.json"
SCALES_FILE = "scales.safetensors"
FORMAT_VERSION = 1
_ADDED = frozenset({"title_view"})
"""Settings that older snapshots of this format lack: there they have their defaults, and fingerprints are unchanged."""


class Snapshot(NamedTuple):
    """What a snapshot folder holds."""

    spec: EncoderSpec
    towers: list[Tower]
    punkt: PunktParams
    fingerprint: str
    precision: Precision


def tower_names(spec: EncoderSpec) -> Sequence[str]:
    return ("shared",) if spec.tied else ("question", "passage")


def write_snapshot(
    folder: Path,
    spec: EncoderSpec,
    towers: Mapping[str, Tower],
    punkt: PunktParams,
    fingerprint: str,
    precision: Precision = FP32,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, tower in towers.items():
        tower.save(folder / name)
    (folder / PUNKT_FILE).write_text(punkt.to_json(), encoding="utf-8")
    described = {
        "format_version": FORMAT_VERSION,
        "fingerprint": fingerprint,
        "dimension": next(iter(towers.values())).dimension,
        "num_views": spec.effective_views,
        "spec": asdict(spec),
    }
    if precision.name != "fp32":
        described["precision"] = precision.name
    if precision.scales is not None:
        save_file(precision.scales._asdict(), folder / SCALES_FILE)
    (folder / ENCODER_FILE).write_text(json.dumps(described, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_snapshot(folder: Path) -> Snapshot:
    """Raises EncoderError if the folder is no snapshot, or one of another format."""
    file = folder / ENCODER_FILE
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise EncoderError(f"{folder} is no encoder snapshot: it has no {ENCODER_FILE}") from None
    except ValueError as error:
        raise EncoderError(f"{file} is not JSON: {error}") from None
    version = saved.get("format_version") if isinstance(saved, dict) else None
    if version != FORMAT_VERSION:
        raise EncoderError(
            f"encoder snapshot {folder} has format {version}, this mvr_ray reads {FORMAT_VERSION}; "
            f"make it again with this mvr_ray"
        )
    known, given = {field.name for field in fields(EncoderSpec)}, set(saved.get("spec", ()))
    wrong = (known ^ given) - (_ADDED - given)
    if wrong or "fingerprint" not in saved:
        wrong = ", ".join(sorted(wrong) or ["fingerprint"])
        raise EncoderError(f"{file} lacks or does not know these settings: {wrong}; make the snapshot again")
    spec = EncoderSpec(**saved["spec"])
    towers = []
    for name in tower_names(spec):
        tower = open_tower(str(folder / name))
        tower.load_viewers(folder / name)
        towers.append(tower)
    if not (folder / PUNKT_FILE).is_file():
        raise EncoderError(f"encoder snapshot {folder} has no {PUNKT_FILE}; copy or make it again")
    punkt = PunktParams.from_json((folder / PUNKT_FILE).read_text(encoding="utf-8"))
    return Snapshot(spec, towers, punkt, saved["fingerprint"], _precision(folder, saved.get("precision", "fp32")))


def _precision(folder: Path, precision: Any) -> Precision:
    if precision not in get_args(PrecisionName):
        raise EncoderError(f"encoder snapshot {folder} embeds in {precision!r}, which this mvr_ray does not know")
    if precision != "int8":
        return Precision(precision)
    if not (folder / SCALES_FILE).is_file():
        raise EncoderError(f"encoder snapshot {folder} has no {SCALES_FILE}; copy or make it again")
    found = load_file(folder / SCALES_FILE)
    if set(found) != set(Scales._fields):
        raise EncoderError(f"{folder / SCALES_FILE} does not hold the scales of int8; copy or make the snapshot again")
    return Precision(precision, Scales(**found))
