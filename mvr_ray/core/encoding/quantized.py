"""A packed transformer whose products take weights and activations of one byte, and how its scales are found.

A product y = W x + b is taken over whole numbers u of 0..255 and w of -127..127:

    x_j = step_j (u_j - zero_j),    W_ij step_j = scale_i w_ij
    y_i = scale_i sum_j w_ij u_j + b_i - sum_j W_ij step_j zero_j

A step for each input dimension costs nothing, since it goes into the weights, and is needed: a few dimensions of a
transformer's states are ten times as wide as the others. It also makes the weights of wide dimensions large, so a step
is the dimension's width to a power, found by trying (SmoothQuant, Xiao et al. 2023, does so with one for all layers).
What attention gives is a mean of values, so its steps go into the rows of W_v, and u = s + 128. After gelu one step
holds for all, and the widest values are cut where that errs least. Softmax, norms and the sums between layers stay in
floating point. Bytes have no sign: oneDNN has no fast product of signed ones on a processor without AMX.

Shapes: N tokens, D input dimension, O output dimension, L layers.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mvr_ray.core.encoding.tower import Tower
from mvr_ray.core.encoding.unpadded_cpu import (
    Affine,
    Layer,
    LayerWeights,
    Run,
    UnpaddedCpuTower,
    attention,
    blocks,
    layer_norm,
    layer_weights,
)
from mvr_ray.core.encoding.views import TokenizedPassage
from mvr_ray.types import FloatArray

POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Tried for how far a dimension's step follows its width."""
CUTS = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
"""Tried for the share of the widest value that one step over all dimensions reaches."""
SAMPLE_ROWS = 1024
"""Tokens whose products are compared, of each layer."""


class Scales(NamedTuple):
    """Of every layer: x = step (u - zero) of what enters the products qkv, up and down, x = step (u - 128) at out."""

    qkv_step_LD: FloatArray
    qkv_zero_LD: FloatArray
    out_step_LD: FloatArray
    up_step_LD: FloatArray
    up_zero_LD: FloatArray
    down_step_L: FloatArray
    down_zero_L: FloatArray


class Int8Linear:
    """Takes bytes; gives float32 or bfloat16, or, with gelu behind it, bytes of the given step and zero."""

    def __init__(
        self,
        affine: Affine,
        step_D: Tensor,
        zero_D: Tensor,
        dtype: torch.dtype = torch.float32,
        gelu_step: float = 0.0,
        gelu_zero: float = 0.0,
    ) -> None:
        scaled_OD = affine.weight * step_D
        self.scale_O = (scaled_OD.abs().amax(1) / 127).clamp(min=1e-12)
        whole_OD = (scaled_OD / self.scale_O[:, None]).round().to(torch.int8)
        self.weight = torch.ops.onednn.qlinear_prepack(whole_OD, None)
        self.bias_O = affine.bias - (whole_OD.float() * self.scale_O[:, None]) @ zero_D
        self.none_O = torch.zeros(len(self.scale_O), dtype=torch.int32)
        self.gelu = gelu_step > 0
        self.result = (gelu_step, int(gelu_zero), torch.uint8) if self.gelu else (1.0, 0, dtype)

    def __call__(self, whole_ND: Tensor) -> Tensor:
        name, way = ("gelu", "none") if self.gelu else ("none", "")
        weights = (self.weight, self.scale_O, self.none_O)
        return torch.ops.onednn.qlinear_pointwise(whole_ND, 1.0, 0, *weights, self.bias_O, *self.result, name, [], way)

    def plus(self, whole_ND: Tensor, other_NO: Tensor) -> Tensor:
        weights = (self.weight, self.scale_O, self.none_O)
        return torch.ops.onednn.qlinear_pointwise.binary(
            whole_ND, 1.0, 0, *weights, other_NO, self.bias_O, *self.result, 1.0, 0, "add", 1.0, "none", [], ""
        )


class Quantizer(NamedTuple):
    """Turns floats into bytes: u = x / step + zero, rounded, kept within 0..255."""

    inverse_D: Tensor
    shift_D: Tensor

    @classmethod
    def of(cls, step_D: Tensor, zero_D: Tensor) -> "Quantizer":
        return cls(1 / step_D, zero_D + 0.5)

    def __call__(self, x_ND: Tensor) -> Tensor:
        return torch.addcmul(self.shift_D, x_ND, self.inverse_D).clamp_(0, 255).to(torch.uint8)


class Int8Layer:
    """A layer whose four products take bytes. The states between layers are float32, the attention bfloat16 where the
    processor multiplies that itself."""

    def __init__(self, weights: LayerWeights, scales: Scales, at: int) -> None:
        qkv_step_D, qkv_zero_D, out_step_D, up_step_D, up_zero_D, down_step, down_zero = (
            torch.from_numpy(np.asarray(values[at], np.float32)) for values in scales
        )
        wide = len(out_step_D)
        value_step_E = torch.cat([torch.ones(2 * wide), out_step_D])
        qkv = Affine(weights.qkv.weight / value_step_E[:, None], weights.qkv.bias / value_step_E)
        self.heads, self.eps = weights.heads, weights.eps
        self.norm, self.last_norm = weights.norm, weights.last_norm
        self.to_qkv, self.to_up = Quantizer.of(qkv_step_D, qkv_zero_D), Quantizer.of(up_step_D, up_zero_D)
        self.qkv = Int8Linear(qkv, qkv_step_D, qkv_zero_D, attention_dtype())
        self.out = Int8Linear(weights.out, out_step_D, torch.full((wide,), 128.0))
        gelu = (float(down_step), float(down_zero))
        self.up = Int8Linear(weights.up, up_step_D, up_zero_D, gelu_step=gelu[0], gelu_zero=gelu[1])
        width = weights.down.weight.shape[1]
        self.down = Int8Linear(weights.down, down_step.expand(width), down_zero.expand(width))

    def __call__(self, x_ND: Tensor, runs: Sequence[Run]) -> Tensor:
        own_ND = attention(self.qkv(self.to_qkv(x_ND)), runs, self.heads)
        bytes_ND = own_ND.round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8).add_(128)
        x_ND = layer_norm(self.out.plus(bytes_ND, x_ND), self.norm, self.eps)
        return layer_norm(self.down.plus(self.up(self.to_up(x_ND)), x_ND), self.last_norm, self.eps)


def attention_dtype() -> torch.dtype:
    return torch.bfloat16 if torch.cpu._is_amx_tile_supported() else torch.float32


def multiplies_bytes() -> bool:
    return hasattr(torch.ops.onednn, "qlinear_pointwise") and torch.cpu._is_vnni_supported()


def int8_layers(tower: Tower, scales: Scales) -> list[Layer]:
    return [Int8Layer(weights, scales, at) for at, weights in enumerate(layer_weights(tower.backbone))]


class ActivationObserver:
    """A float32 layer that keeps a sample of what enters its products."""

    def __init__(self, weights: LayerWeights, keep: Callable[[Tensor], Tensor]) -> None:
        self.weights, self.keep = weights, keep
        self.inputs: dict[str, list[Tensor]] = {"qkv": [], "out": [], "up": [], "down": []}

    def __call__(self, x_ND: Tensor, runs: Sequence[Run]) -> Tensor:
        weights = self.weights
        own_ND = attention(F.linear(x_ND, *weights.qkv), runs, weights.heads)
        middle_ND = layer_norm(x_ND + F.linear(own_ND, *weights.out), weights.norm, weights.eps)
        hidden_ND = F.gelu(F.linear(middle_ND, *weights.up))
        for name, entering in (("qkv", x_ND), ("out", own_ND), ("up", middle_ND), ("down", hidden_ND)):
            self.inputs[name].append(self.keep(entering).clone())
        return layer_norm(middle_ND + F.linear(hidden_ND, *weights.down), weights.last_norm, weights.eps)


def calibrate(tower: Tower, texts: Sequence[TokenizedPassage]) -> Scales:
    """Scales from texts like those that are to be read: same weights and texts, same scales."""
    total = sum(text.num_tokens for text in texts)
    every = max(1, total // SAMPLE_ROWS)
    layers = [ActivationObserver(weights, lambda x_ND: x_ND[::every]) for weights in layer_weights(tower.backbone)]
    reader = UnpaddedCpuTower(tower, layers, with_filling=False)
    with torch.no_grad():
        for rows in blocks([text.num_tokens for text in texts]):
            reader([texts[row] for row in rows])
        scales = [_layer_scales(layer) for layer in layers]
    return Scales(*(np.stack(values).astype(np.float32) for values in zip(*scales)))


def _layer_scales(layer: ActivationObserver) -> list[np.ndarray]:
    weights = layer.weights
    qkv_ND, out_ND, up_ND, down_ND = (torch.cat(layer.inputs[name]) for name in ("qkv", "out", "up", "down"))
    qkv_step_D, qkv_zero_D = _steps(qkv_ND, weights.qkv)
    up_step_D, up_zero_D = _steps(up_ND, weights.up)
    out_step_D, _ = _steps(out_ND, weights.out, both_sides=True)
    down_step, down_zero = _one_step(down_ND, weights.down)
    scales = (qkv_step_D, qkv_zero_D, out_step_D, up_step_D, up_zero_D, down_step, down_zero)
    return [values.numpy() for values in scales]


def _steps(x_ND: Tensor, affine: Affine, both_sides: bool = False) -> tuple[Tensor, Tensor]:
    """The step and zero of each dimension that change the product's result least. With `both_sides`, zero is 0 and a
    step reaches as far below as above."""
    low_D, high_D = x_ND.amin(0), x_ND.amax(0)
    if both_sides:
        high_D = torch.maximum(high_D, -low_D)
        low_D = -high_D
    width_D = (high_D - low_D).clamp(min=1e-6)
    wide_D = affine.weight.abs().amax(0).clamp(min=1e-6)
    wanted_NO, trials = F.linear(x_ND, affine.weight), []
    for power in POWERS:
        shape_D = width_D**power / wide_D ** (1 - power)
        step_D = shape_D * (width_D / shape_D).amax() / 254
        zero_D = torch.zeros_like(step_D) if both_sides else (-low_D / step_D).round()
        trials.append((step_D, zero_D))
    return min(trials, key=lambda pair: _error(x_ND, affine, wanted_NO, *pair, both_sides))


def _one_step(x_ND: Tensor, affine: Affine) -> tuple[Tensor, Tensor]:
    """One step and zero for all dimensions, of values that begin little below 0."""
    low, high = x_ND.amin(), x_ND.amax()
    wanted_NO, trials = F.linear(x_ND, affine.weight), []
    for cut in CUTS:
        step = ((high * cut - low) / 255).clamp(min=1e-9)
        trials.append((step, (-low / step).round()))
    return min(trials, key=lambda pair: _error(x_ND, affine, wanted_NO, *pair, False))


def _error(x_ND: Tensor, affine: Affine, wanted_NO: Tensor, step: Tensor, zero: Tensor, both_sides: bool) -> float:
    """Mean square of what bytes change in x W'."""
    low, high = (-127, 127) if both_sides else (0, 255)
    rounded_ND = ((x_ND / step + zero).round().clamp(low, high) - zero) * step
    scaled_OD = affine.weight * step
    scale_O1 = (scaled_OD.abs().amax(1, keepdim=True) / 127).clamp(min=1e-12)
    rounded_OD = (scaled_OD / scale_O1).round() * scale_O1 / step
    return float((F.linear(rounded_ND, rounded_OD) - wanted_NO).square().mean())
