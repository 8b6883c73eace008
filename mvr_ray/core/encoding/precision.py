"""Embed passages in fp32 or bf16 by mvr_ray's own layers or torch's, or in fp32, bf16 or int8 by OpenVINO.

`fp32` is the reference. `bf16` multiplies numbers of two bytes. `openvino` and `openvino-bf16` are the same by
OpenVINO, and `int8` multiplies numbers of one byte, with scales that are calibrated once; these three run on a CPU, for
every backbone without local attention, and their encoder holds the model that OpenVINO reads. Each precision is an
encoder with its own fingerprint. Only inference on passages uses a lower precision; training and questions use float32.
A GPU runs bf16 without padding where its attention accepts the bounds of texts.
"""

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mvr_ray.core.encoding.openvino_cpu import INSTALL, OpenVinoTower, convert, quantize
from mvr_ray.core.encoding.padded import padded_views
from mvr_ray.core.encoding.tower import Tower
from mvr_ray.core.encoding.unpadded_cpu import Means, UnpaddedCpuTower, supports_unpadded_cpu
from mvr_ray.core.encoding.views import TokenizedPassage
from mvr_ray.errors import EncoderError

PrecisionName = Literal["fp32", "bf16", "int8", "openvino", "openvino-bf16"]
ON_OPENVINO: Mapping[PrecisionName, str | None] = {"int8": None, "openvino": "f32", "openvino-bf16": "bf16"}
"""Precisions of OpenVINO, with its name for that of the products; None: the model's own."""
KNOWN_ON_OPENVINO = (
    *("bert", "roberta", "xlm-roberta", "distilbert", "mpnet", "electra", "deberta", "deberta-v2", "t5"),
    *("qwen3", "mistral", "llama"),
)
"""Model types that OpenVINO runs as the padded pass does (`tests/core/test_openvino.py`)."""

LOCAL_ATTENTION = ("local_attention", "sliding_window")
"""Settings of backbones with local attention. OpenVINO's version gives NaN on padding far from every token."""


class Precision(NamedTuple):
    """A precision, and for those of OpenVINO the model that it reads (`openvino_cpu.convert`, `quantize`)."""

    name: PrecisionName
    parts: Mapping[str, NDArray[Any]] | None = None

    def digest(self) -> bytes:
        """Digest name and parts; empty for fp32, whose fingerprints are older than other precisions. Omits the text of
        OpenVINO's model, whose names change with each conversion."""
        if self.name == "fp32":
            return b""
        hasher = hashlib.blake2b(self.name.encode(), digest_size=32)
        for name, values in (self.parts or {}).items():
            if name == "model":
                continue
            hasher.update(f"{name} {values.shape}".encode())
            hasher.update(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)  # without a copy
        return hasher.digest()


FP32 = Precision("fp32")


InferencePass = Callable[[Sequence[TokenizedPassage], int], Means]
"""Averages the states of each view's tokens, for a number of views and without a gradient, by prepared weights."""


def inference_pass(tower: Tower, precision: Precision) -> InferencePass:
    """Copy the tower's current weights into the layout and precision of their products."""
    check(tower, precision.name)
    if precision.name == "int8" and "model" not in (precision.parts or {}):
        raise EncoderError(
            "this encoder's int8 is that of an earlier mvr_ray, whose layers are gone: what it embedded can be "
            "searched, but no passage can be embedded beside it; run mvr-ray index, which embeds all of them anew"
        )
    if precision.name in ON_OPENVINO:
        return OpenVinoTower(tower, ON_OPENVINO[precision.name], precision.parts).views
    dtype = torch.bfloat16 if precision.name == "bf16" else torch.float32
    if not reads_unpadded(tower, precision.name):
        return partial(padded_views, copy.deepcopy(tower).to(dtype=dtype).eval())
    if _on_gpu(tower):
        from mvr_ray.core.encoding.unpadded_gpu import UnpaddedGpuTower  # takes seconds to import; only GPUs need it

        return UnpaddedGpuTower(tower, dtype).views
    return UnpaddedCpuTower(tower, dtype).views


def of_tower(tower: Tower, name: PrecisionName, texts: Sequence[TokenizedPassage] = ()) -> Precision:
    """Prepare a tower for a precision. int8 calibrates its scales on `texts`; where this processor is an x86 without
    VNNI, which adds products of bytes in sixteen bits, weights get seven bits, so that no sum saturates."""
    if name == "int8":
        has = _capabilities()
        has_narrow_sums = has.get("avx2", False) and not (has.get("avx512_vnni") or has.get("avx_vnni"))
        return Precision(name, quantize(tower, texts, seven_bits=has_narrow_sums))
    return Precision(name, convert(tower, halve=name == "openvino-bf16") if name in ON_OPENVINO else None)


def fastest_float(tower: Tower) -> PrecisionName:
    """Return the precision of floats in which this processor embeds passages fastest; on a GPU, fp32.

    Where the processor multiplies bf16, that. By mvr_ray's layers where they are 15 % ahead of OpenVINO, which is with
    AMX, or where OpenVINO is missing; by OpenVINO for all other models that it is known to run; else by torch in fp32.
    """
    cpu = torch.device("cpu")
    if _on_gpu(tower):
        return "fp32"
    has_bf16, own_layers = multiplies_bf16(cpu), supports_unpadded_cpu(tower.backbone)
    backbone: Any = tower.backbone
    on_openvino = backbone.config.model_type in KNOWN_ON_OPENVINO and not _missing_on_cpu(tower, "openvino")
    if has_bf16 and own_layers and (_capabilities().get("amx_bf16") or not on_openvino):
        return "bf16"
    if on_openvino:
        return "openvino-bf16" if has_bf16 else "openvino"
    return "fp32"


def _capabilities() -> Mapping[str, bool]:
    return getattr(torch.cpu, "get_capabilities", dict)()


def multiplies_bf16(device: torch.device) -> bool:
    """Return whether this processor, or a GPU, has instructions for bf16 products."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    has = _capabilities()
    return bool(has.get("amx_bf16") or has.get("avx512_bf16")) and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def has_inference_pass(tower: Tower, precision: PrecisionName) -> bool:
    """Return whether inference has its own pass, other than the one with a gradient."""
    return precision != "fp32" or supports_unpadded_cpu(tower.backbone)


def reads_unpadded(tower: Tower, precision: PrecisionName) -> bool:
    """Return whether texts run end to end, without padding."""
    if precision in ON_OPENVINO:
        return False
    if _on_gpu(tower):
        from mvr_ray.core.encoding.unpadded_gpu import supports_unpadded_gpu

        return precision == "bf16" and supports_unpadded_gpu(tower.backbone)
    return supports_unpadded_cpu(tower.backbone)


def check(tower: Tower, precision: PrecisionName, gpu: bool | None = None) -> None:
    """Raise EncoderError unless this machine embeds passages with this tower in this precision. `gpu`: on a
    GPU or not; None: on the tower's device."""
    if precision == "fp32":
        return
    on_gpu = _on_gpu(tower)
    use_gpu = on_gpu if gpu is None else gpu
    missing = missing_on_gpu(precision, on_gpu) if use_gpu else _missing_on_cpu(tower, precision)
    if missing:
        raise EncoderError(f"passages in {precision} need {missing}; set index.precision to fp32 and index again")


def _on_gpu(tower: Tower) -> bool:
    return next(tower.parameters()).device.type != "cpu"


def _missing_on_cpu(tower: Tower, precision: PrecisionName) -> str:
    backbone: Any = tower.backbone
    if precision in ON_OPENVINO and find_spec("openvino") is None:
        return f"the library openvino ({INSTALL})"
    if precision in ON_OPENVINO and any(getattr(backbone.config, name, None) for name in LOCAL_ATTENTION):
        return f"a backbone whose attention reaches all of a text, and this is a {backbone.config.model_type}"
    if precision in ("bf16", "openvino-bf16") and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "a processor that multiplies bfloat16, and this one does not"
    return ""


def missing_on_gpu(precision: PrecisionName, has_gpu: bool) -> str:
    """Return what encoders on GPUs lack to embed passages in this precision; empty if nothing. `has_gpu`: this process
    has one, which is asked."""
    if precision in ON_OPENVINO:
        return "a CPU, and encoders have GPUs here (resources.gpus_per_encoder); bf16 is for GPUs"
    if precision == "bf16" and has_gpu and not multiplies_bf16(torch.device("cuda")):
        return "a GPU that multiplies bfloat16, and this one does not"
    return ""
