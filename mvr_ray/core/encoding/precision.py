"""Embed passages in fp32 or bf16 by layers of our own, or in fp32 or int8 by OpenVINO.

`fp32` is the reference. `bf16` multiplies numbers of two bytes. `openvino` multiplies in float32 by another library's
products and `int8` numbers of one byte, with scales that were found once and belong to the encoder; both on a CPU, for
every backbone but those with local attention. Another precision is another encoder, with a fingerprint of its own. Only
reading without a gradient is lowered; training and questions never are. A GPU reads bf16 without padding where it can
tell the attention where texts end.
"""

import hashlib
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mvr_ray.core.encoding.openvino_cpu import INSTALL, OpenVinoTower
from mvr_ray.core.encoding.padded import PaddedTower
from mvr_ray.core.encoding.tower import Tower
from mvr_ray.core.encoding.unpadded_cpu import Means, UnpaddedCpuTower, supports_unpadded_cpu
from mvr_ray.core.encoding.views import TokenizedPassage
from mvr_ray.errors import EncoderError

PrecisionName = Literal["fp32", "bf16", "int8", "openvino"]
ON_OPENVINO = ("int8", "openvino")

LOCAL_ATTENTION = ("local_attention", "sliding_window")
"""Settings of backbones with local attention. OpenVINO's gives NaN on padding that no token is near to."""


class Precision(NamedTuple):
    """A precision, and of int8 the model with its scales (`openvino_cpu.quantize`)."""

    name: PrecisionName
    parts: Mapping[str, NDArray[Any]] | None = None

    def digest(self) -> bytes:
        """Digest name and parts; empty for fp32, whose fingerprints are older than other precisions. The text of an
        int8 model is left out: its names are given anew each time."""
        if self.name == "fp32":
            return b""
        hasher = hashlib.blake2b(self.name.encode(), digest_size=32)
        for name, values in (self.parts or {}).items():
            if name == "model":
                continue
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
    if precision.name == "int8":
        if "model" not in (precision.parts or {}):
            raise EncoderError(
                "this encoder's int8 is that of an earlier mvr_ray, whose layers are gone: what it embedded can be "
                "searched, but no passage can be embedded beside it; run mvr-ray index, which embeds all of them anew"
            )
        return OpenVinoTower(tower, precision.parts)
    if precision.name == "openvino":
        return OpenVinoTower(tower)
    dtype = torch.bfloat16 if precision.name == "bf16" else torch.float32
    if not reads_unpadded(tower, precision.name):
        return PaddedTower(tower, dtype)
    if _on_gpu(tower):
        from mvr_ray.core.encoding.unpadded_gpu import UnpaddedGpuTower  # seconds of imports, for GPUs alone

        return UnpaddedGpuTower(tower, dtype)
    return UnpaddedCpuTower(tower, dtype)


def fastest_float(tower: Tower) -> PrecisionName:
    """Return the precision in which this processor embeds passages fastest within a cosine of 0.9999 of float32: bf16
    where it multiplies bf16 by instructions of its own and texts are read without padding, else fp32."""
    is_fast = multiplies_bf16(torch.device("cpu")) and supports_unpadded_cpu(tower.backbone)
    return "bf16" if is_fast else "fp32"


def multiplies_bf16(device: torch.device) -> bool:
    """Whether this processor, or a GPU, multiplies bf16 by instructions of its own."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    has = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(has.get("amx_bf16") or has.get("avx512_bf16")) and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def reads_otherwise(tower: Tower, precision: PrecisionName) -> bool:
    """Whether reading without a gradient has a pass of its own, beside the one with a gradient."""
    return precision != "fp32" or supports_unpadded_cpu(tower.backbone)


def reads_unpadded(tower: Tower, precision: PrecisionName) -> bool:
    """Whether texts are read end to end, without padding."""
    if precision in ON_OPENVINO:
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
    if precision in ON_OPENVINO and find_spec("openvino") is None:
        return f"the library openvino ({INSTALL})"
    if precision in ON_OPENVINO and any(getattr(backbone.config, name, None) for name in LOCAL_ATTENTION):
        return f"a backbone whose attention reaches all of a text, and this is a {backbone.config.model_type}"
    if precision == "bf16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "a processor that multiplies bfloat16, and this one does not"
    return ""


def _gpu_lacks(precision: PrecisionName, here: bool) -> str:
    if precision in ON_OPENVINO:
        return "a CPU, and encoders have GPUs here (resources.gpus_per_encoder); bf16 is for GPUs"
    if here and not torch.cuda.is_bf16_supported():
        return "a GPU that multiplies bfloat16, and this one does not"
    return ""
