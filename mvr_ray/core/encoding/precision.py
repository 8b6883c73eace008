"""Embed passages in fp32, bf16 or int8, or by OpenVINO, with the weights laid out for it.

`fp32` is the reference. `bf16` multiplies numbers of two bytes and `int8` of one, with scales that were found once and
belong to the encoder: another precision is another encoder, with a fingerprint of its own. Only reading without a
gradient is lowered; training and questions never are. A GPU reads bf16 without padding where it can tell the attention
where texts end, and has no int8. `openvino` multiplies in float32 by another library's products, on a CPU, for every
backbone but those with local attention.
"""

import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mvr_ray.core.encoding.openvino_cpu import OpenVinoTower
from mvr_ray.core.encoding.padded import PaddedTower
from mvr_ray.core.encoding.quantized import Scales, int8_layers, multiplies_bytes
from mvr_ray.core.encoding.tower import Tower
from mvr_ray.core.encoding.unpadded_cpu import Means, UnpaddedCpuTower, supports_unpadded_cpu
from mvr_ray.core.encoding.views import TokenizedPassage
from mvr_ray.errors import EncoderError

PrecisionName = Literal["fp32", "bf16", "int8", "openvino"]


LOCAL_ATTENTION = ("local_attention", "sliding_window")
"""Settings of backbones with local attention. OpenVINO's gives NaN on padding that no token is near to."""


class Precision(NamedTuple):
    """A precision, and for int8 its scales."""

    name: PrecisionName
    scales: Scales | None = None

    def digest(self) -> bytes:
        """Digest name and scales; empty for fp32, whose fingerprints are older than other precisions."""
        if self.name == "fp32":
            return b""
        hasher = hashlib.blake2b(self.name.encode(), digest_size=32)
        for name, values in zip(Scales._fields, self.scales or ()):
            hasher.update(f"{name} {values.shape}".encode() + values.tobytes())
        return hasher.digest()


FP32 = Precision("fp32")


class InferenceTower(Protocol):
    """A tower laid out for reading without a gradient."""

    def views(self, batch: Sequence[TokenizedPassage], num_views: int) -> Means: ...

    def padded_states(self, batch: Sequence[TokenizedPassage]) -> Tensor: ...


class InferenceCache:
    """Caches towers laid out for inference, and lays one out again when a weight has changed.

    Copies and pickles of the cache are empty: another process lays the weights out itself.
    """

    def __init__(self) -> None:
        self._parameters: dict[int, list[nn.Parameter]] = {}
        self._towers: dict[tuple[int, PrecisionName], tuple[object, InferenceTower]] = {}

    def __reduce__(self) -> tuple[type["InferenceCache"], tuple[()]]:
        return InferenceCache, ()

    def of(self, tower: Tower, precision: Precision) -> InferenceTower:
        """Return the tower laid out in this precision. Raises EncoderError where the machine does not support it."""
        parameters = self._parameters.get(id(tower)) or self._parameters.setdefault(id(tower), [*tower.parameters()])
        state = [(parameter.data_ptr(), parameter._version) for parameter in parameters]
        entry = self._towers.get((id(tower), precision.name))
        if entry is None or entry[0] != state:
            entry = self._towers[id(tower), precision.name] = (state, build_tower(tower, precision))
        return entry[1]


def build_tower(tower: Tower, precision: Precision) -> InferenceTower:
    """Copy the tower's current weights in the order and precision in which they are multiplied."""
    check(tower, precision.name)
    if precision.name == "openvino":
        return OpenVinoTower(tower)
    dtype = torch.bfloat16 if precision.name == "bf16" else torch.float32
    if not reads_unpadded(tower, precision.name):
        return PaddedTower(tower, dtype)
    if _on_gpu(tower):
        from mvr_ray.core.encoding.unpadded_gpu import UnpaddedGpuTower  # seconds of imports, for GPUs alone

        return UnpaddedGpuTower(tower, dtype)
    if precision.name == "int8":
        assert precision.scales is not None, "int8 without scales"
        return UnpaddedCpuTower(tower, int8_layers(tower, precision.scales))
    return UnpaddedCpuTower(tower, dtype=dtype)


def fastest_float(tower: Tower) -> PrecisionName:
    """Return the precision in which this processor embeds passages fastest within a cosine of 0.9999 of float32: bf16
    where it multiplies bf16 by instructions of its own and texts are read without padding, else fp32."""
    has = getattr(torch.cpu, "get_capabilities", dict)()
    multiplies = (has.get("amx_bf16") or has.get("avx512_bf16")) and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "bf16" if multiplies and supports_unpadded_cpu(tower.backbone) else "fp32"


def reads_otherwise(tower: Tower, precision: PrecisionName) -> bool:
    """Whether reading without a gradient has a pass of its own, beside the one with a gradient."""
    return precision != "fp32" or supports_unpadded_cpu(tower.backbone)


def reads_unpadded(tower: Tower, precision: PrecisionName) -> bool:
    """Whether texts are read end to end, without padding."""
    if precision == "openvino":
        return False
    if _on_gpu(tower):
        from mvr_ray.core.encoding.unpadded_gpu import supports_unpadded_gpu

        return precision == "bf16" and supports_unpadded_gpu(tower.backbone)
    return supports_unpadded_cpu(tower.backbone)


def check(tower: Tower, precision: PrecisionName, gpu: bool | None = None) -> None:
    """Raise EncoderError unless this machine embeds passages with this tower in this precision. `gpu`: where it will be
    done; absent: where the tower is."""
    if precision == "fp32":
        return
    here = _on_gpu(tower)
    lacking = _gpu_lacks(precision, here) if (here if gpu is None else gpu) else _cpu_lacks(tower, precision)
    if lacking:
        raise EncoderError(f"passages in {precision} need {lacking}; set index.precision to fp32 and index again")


def _on_gpu(tower: Tower) -> bool:
    return next(tower.parameters()).device.type != "cpu"


def _cpu_lacks(tower: Tower, precision: PrecisionName) -> str:
    backbone: Any = tower.backbone
    if precision == "openvino" and find_spec("openvino") is None:
        return "the library openvino (pip install 'mvr-ray[openvino]')"
    if precision == "openvino" and any(getattr(backbone.config, name, None) for name in LOCAL_ATTENTION):
        return f"a backbone whose attention reaches all of a text, and this is a {backbone.config.model_type}"
    if precision == "int8" and not supports_unpadded_cpu(backbone):
        return f"a bert or roberta backbone with gelu on a CPU, and this is a {backbone.config.model_type}"
    if precision == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "a processor that multiplies bfloat16, and this one does not"
    if precision == "int8" and not multiplies_bytes():
        return "a processor that multiplies bytes (VNNI), and this one does not"
    return ""


def _gpu_lacks(precision: PrecisionName, here: bool) -> str:
    if precision in ("int8", "openvino"):
        return "a CPU, and encoders have GPUs here (resources.gpus_per_encoder); bf16 is for GPUs"
    if here and not torch.cuda.is_bf16_supported():
        return "a GPU that multiplies bfloat16, and this one does not"
    return ""
