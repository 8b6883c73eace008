"""Write and read the parts of a stored encoder: a folder for each tower, Punkt parameters, scales and settings.

encoder.json            format version, fingerprint, dimension, views, settings, precision (where it is not fp32); last
punkt.json              sentence parameters
openvino.safetensors    of openvino and openvino-bf16: the bytes of OpenVINO's two files, `model` and `weights`; an
                        earlier mvr_ray wrote none, and each process converts the tower
int8.safetensors        of int8: the same; scales.safetensors in its place where an earlier mvr_ray made them
shared/                 the tower when tied; else question/ and passage/
    config.json  model.safetensors  tokenizer.json  ..  viewers.safetensors (where the strategy has viewers)
    modules.json  sentence_bert_config.json  1_Pooling/config.json  2_Dense/ ..    as sentence-transformers reads them

A tower of one vector loads in sentence-transformers to the same vectors. For strategies with means of snippets it loads
to the vector of a whole text, as for questions; sentence-transformers supports neither views nor viewers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, get_args

from safetensors.numpy import load_file, save_file

from mvr_ray.core.encoding.model_folder import SentenceModules, write_modules
from mvr_ray.core.encoding.openvino_cpu import FILES
from mvr_ray.core.encoding.pooling import Heads, Normalize, Pooling
from mvr_ray.core.encoding.precision import Precision, PrecisionName
from mvr_ray.core.encoding.snippets import PunktParams
from mvr_ray.core.encoding.stored_backbone import open_stored_tower
from mvr_ray.core.encoding.tower import Tower
from mvr_ray.core.encoding.views import EncoderSpec
from mvr_ray.errors import EncoderError

PUNKT_FILE = "punkt.json"
_OPENVINO = {"openvino.safetensors": FILES}
_PARTS: Mapping[PrecisionName, Mapping[str, Sequence[str]]] = {
    "int8": {
        "int8.safetensors": FILES,
        "scales.safetensors": (
            "qkv_step_LD",
            "qkv_zero_LD",
            "out_step_LD",
            "up_step_LD",
            "up_zero_LD",
            "down_step_L",
            "down_zero_L",
        ),
    },
    "openvino": _OPENVINO,
    "openvino-bf16": _OPENVINO,
}
"""The parts of a precision in the order of their digest, by file name; one of the files is there."""
_LATER_SETTINGS: Mapping[str, Any] = {
    "title_view": False,
    "whole_view": False,
    "query_prompt": "",
    "passage_prompt": "",
    "overlap_tokens": 0,
    "truncate_dim": None,
}
"""Settings that older snapshots of this format lack, with their values there; fingerprints are unchanged."""


class Snapshot(NamedTuple):
    """The stored parts of an encoder."""

    spec: EncoderSpec
    towers: list[Tower]
    punkt: PunktParams
    precision: Precision


def tower_names(spec: EncoderSpec) -> Sequence[str]:
    return ("shared",) if spec.tied else ("question", "passage")


def write_parts(
    folder: Path, spec: EncoderSpec, towers: Mapping[str, Tower], punkt: PunktParams, precision: Precision
) -> dict[str, Any]:
    """Write all files except encoder.json; returns its fields that describe them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tower in towers.items():
        _write_tower(folder / name, spec, tower, name)
    (folder / PUNKT_FILE).write_text(punkt.to_json(), encoding="utf-8")
    description: dict[str, Any] = {
        "dimension": next(iter(towers.values())).vector_size(spec.strategy == "pooling"),
        "num_views": spec.effective_views,
        "spec": dict(sorted(asdict(spec).items())),
    }
    if precision.name != "fp32":
        description["precision"] = precision.name
    if precision.parts is not None and "model" in precision.parts:  # the fingerprint omits it
        description["model_sha256"] = sha256(precision.parts["model"].data).hexdigest()
    for file, names in _PARTS.get(precision.name, {}).items():
        if precision.parts is not None and set(precision.parts) == set(names):
            save_file(dict(precision.parts), folder / file)
    return description


def export_towers(folder: Path, spec: EncoderSpec, towers: Mapping[str, Tower]) -> list[str]:
    """Write a folder for sentence-transformers: `folder` itself, or `question` and `passage` in it for two towers.

    Returns what is lost, a sentence each. Raises EncoderError for strategies with viewers, whose embeddings cannot be
    stored there.
    """
    if spec.has_viewers:
        raise EncoderError(
            f"strategy {spec.strategy!r} reads viewers, and a folder of sentence-transformers has no place for their "
            f"embeddings; encoders of all other strategies can be exported"
        )
    for name, tower in towers.items():
        _write_tower(folder if spec.tied else folder / name, spec, tower, name)
    for file in folder.rglob("*.safetensors"):  # which safetensors lets its owner alone read
        file.chmod(folder.stat().st_mode & 0o666)
    losses = []
    if spec.effective_views > 1:
        losses.append(
            f"views: here a passage has up to {spec.effective_views}, there one vector, that of its whole text read as "
            f"a question is"
        )
    if spec.use_title:
        losses.append("titles: here a title is read before its text and a separator, there a text is one string")
    if spec.tied and spec.query_limit != spec.passage_limit:
        losses.append(
            f"two lengths: here a question is cut at {spec.query_limit} tokens, there at {spec.passage_limit}, as a "
            f"passage is"
        )
    return losses


def _write_tower(folder: Path, spec: EncoderSpec, tower: Tower, name: str) -> None:
    """Write a tower with modules by which sentence-transformers encodes a text like a question."""
    tower.save(folder)
    pooling = tower.pooling
    if spec.strategy != "pooling":
        reads_first = spec.strategy in ("cls", "first_k") or (spec.has_pieces and spec.readout == "viewer")
        pooling = Pooling(("cls",) if reads_first else ("mean",), pooling.include_prompt)
    heads = Heads(*tower.heads, *([Normalize()] if spec.normalize else []))
    max_tokens = spec.query_limit if name == "question" else spec.passage_limit
    prompts = spec.query_prompt or "", spec.passage_prompt or ""
    write_modules(folder, SentenceModules("", pooling, heads, *prompts, max_tokens), tower.dimension)


def read_parts(folder: Path, description: Mapping[str, Any], only_embeds: bool = False) -> Snapshot:
    """Open the files that an encoder.json of these fields describes; `only_embeds`: if possible without transformers.
    Raises EncoderError naming the defect."""
    settings = description.get("spec", {})
    differences = {field.name for field in fields(EncoderSpec)} ^ set(settings)
    if wrong := sorted(differences - (set(_LATER_SETTINGS) - set(settings))):
        raise EncoderError(
            f"encoder.json in {folder} lacks or does not know these settings: {', '.join(wrong)}; "
            f"make the snapshot again"
        )
    try:
        spec = EncoderSpec(**{**_LATER_SETTINGS, **settings})
    except EncoderError as error:
        raise EncoderError(
            f"encoder.json in {folder} holds a wrong setting ({error}); make the snapshot again"
        ) from None
    precision = _precision(folder, description.get("precision", "fp32"), description.get("model_sha256"))
    must_convert = precision.name == "openvino" and precision.parts is None
    towers = []
    for name in tower_names(spec):
        tower = open_stored_tower(folder / name) if only_embeds and not must_convert else None
        if tower is None:
            from mvr_ray.core.encoding.backbones import open_tower  # imports transformers

            tower = open_tower(str(folder / name))
        tower.load_viewers(folder / name)
        towers.append(tower)
    return Snapshot(spec, towers, read_punkt(folder), precision)


def read_punkt(folder: Path) -> PunktParams:
    """Read the Punkt parameters of a snapshot. Raises EncoderError."""
    if not (folder / PUNKT_FILE).is_file():
        raise EncoderError(f"encoder snapshot {folder} has no {PUNKT_FILE}; copy or make it again")
    try:
        return PunktParams.from_json((folder / PUNKT_FILE).read_text(encoding="utf-8"))
    except (EncoderError, UnicodeDecodeError) as error:
        raise EncoderError(f"{folder / PUNKT_FILE} is damaged ({error}); copy or make the snapshot again") from None


def _precision(folder: Path, precision: Any, model_sha256: str | None) -> Precision:
    if precision not in get_args(PrecisionName):
        raise EncoderError(f"encoder snapshot {folder} embeds in {precision!r}, which this mvr_ray does not know")
    files = _PARTS.get(precision, {})
    file = next((name for name in files if (folder / name).is_file()), None)
    if file is None:
        if not files or precision == "openvino":
            return Precision(precision)
        raise EncoderError(f"encoder snapshot {folder} has no {next(iter(files))}; copy or make it again")
    parts = load_file(folder / file)
    if set(parts) != set(files[file]):
        raise EncoderError(f"{folder / file} does not hold the parts of {precision}; copy or make the snapshot again")
    if model_sha256 and sha256(parts["model"].data).hexdigest() != model_sha256:
        raise EncoderError(f"{folder / file} holds another model than was saved; copy or make the snapshot again")
    return Precision(precision, {name: parts[name] for name in files[file]})
