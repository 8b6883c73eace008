"""Pool token states into one vector as sentence-transformers does, and apply the layers that follow.

Over a text's tokens `t = 1..T`, without those of an excluded prompt:

    cls, lasttoken            the state of the first, of the last
    mean, max                 over all states, each dimension by itself
    mean_sqrt_len_tokens      sum / sqrt(number of tokens)
    weightedmean              sum t state_t / sum t, t counted from the text's first token
    two or more               concatenated

Shapes: P texts, T tokens, D dimension of a state, O dimension of a vector.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mvr_ray.errors import EncoderError

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]


@dataclass(frozen=True)
class Pooling:
    """The modes whose vectors are concatenated, and whether they include the tokens of a prompt."""

    modes: tuple[PoolingMode, ...] = ("mean",)
    include_prompt: bool = True

    def __post_init__(self) -> None:
        wrong = sorted(set(self.modes) - set(get_args(PoolingMode)))
        if wrong or not self.modes:
            raise EncoderError(
                f"pooling {', '.join(wrong) or 'of no mode'} is not known; a model pools by "
                f"{', '.join(get_args(PoolingMode))}, or several of them"
            )

    @property
    def is_mean_of_tokens(self) -> bool:
        """Whether the vector is the mean over some of the tokens, which every forward pass computes as a view."""
        return self.modes in (("mean",), ("cls",), ("lasttoken",))

    def members(self, num_tokens: int, num_excluded: int) -> range:
        """Return the positions of the pooled tokens; `num_excluded` tokens of prefix and prompt may be left out."""
        first = num_excluded if not self.include_prompt and num_excluded < num_tokens else 0
        if self.modes == ("cls",):
            return range(first, first + 1)
        return range(num_tokens - 1 if self.modes == ("lasttoken",) else first, num_tokens)

    def pool(self, states_PTD: Tensor, member_PT: Tensor) -> Tensor:
        """Pool the states of the members, at least one in each row: vectors_PO."""
        member_PT1 = member_PT[..., None]
        sum_PD = (states_PTD * member_PT1).sum(1)
        count_P1 = member_PT.sum(1, keepdim=True)
        places_T = torch.arange(1, member_PT.shape[1] + 1, device=states_PTD.device, dtype=states_PTD.dtype)
        row_P = torch.arange(len(states_PTD), device=states_PTD.device)
        parts = []
        for mode in self.modes:
            if mode == "cls":
                parts.append(states_PTD[row_P, member_PT.int().argmax(1)])
            elif mode == "lasttoken":
                parts.append(states_PTD[row_P, (places_T * member_PT).argmax(1)])
            elif mode == "max":
                parts.append(states_PTD.masked_fill(~member_PT1, -torch.inf).amax(1))
            elif mode == "weightedmean":
                weight_PT = places_T * member_PT
                parts.append((states_PTD * weight_PT[..., None]).sum(1) / weight_PT.sum(1, keepdim=True))
            else:
                parts.append(sum_PD / (count_P1 if mode == "mean" else count_P1.sqrt()))
        return torch.cat(parts, -1)


class Dense(nn.Module):
    """A linear layer with an activation; `residual` adds its input."""

    def __init__(self, in_size: int, out_size: int, bias: bool, activation: str, residual: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(in_size, out_size, bias)
        self.residual = nn.Linear(in_size, out_size, bias=False) if residual and in_size != out_size else None
        self.activation, self.adds_input = getattr(nn, activation)(), residual
        self.out_size = out_size

    def forward(self, vectors: Tensor) -> Tensor:
        result = self.activation(self.linear(vectors))
        if self.adds_input:
            result = result + (vectors if self.residual is None else self.residual(vectors))
        return result


class Normalize(nn.Module):
    """Scales vectors to length 1."""

    def forward(self, vectors: Tensor) -> Tensor:
        return F.normalize(vectors, dim=-1)


class Truncation(nn.Module):
    """Keeps the first dimensions, for models trained for truncation (Matryoshka, Kusupati et al. 2022)."""

    def __init__(self, out_size: int) -> None:
        super().__init__()
        self.out_size = out_size

    def forward(self, vectors: Tensor) -> Tensor:
        return vectors[..., : self.out_size]


class Heads(nn.Sequential):
    """The layers after pooling, in order."""

    def out_size(self, size: int) -> int:
        """Return the output dimension for an input dimension."""
        for layer in self:
            size = min(size, layer.out_size) if isinstance(layer, Truncation) else getattr(layer, "out_size", size)
        return size

    def without_last_normalize(self, before_truncation: bool) -> "Heads":
        """Return the layers without the `Normalize` at the end, and with `before_truncation` also without one that only
        a truncation follows."""
        layers: list[nn.Module] = list(self)
        rest: list[nn.Module] = []
        while layers and isinstance(layers[-1], (Normalize, Truncation) if before_truncation else Normalize):
            last = layers.pop()
            if isinstance(last, Truncation):
                rest.insert(0, last)
        return Heads(*layers, *rest)

    def description(self) -> list[dict[str, Any]]:
        """Describe the layers' kinds and their settings outside their weights, as plain values."""
        layers: list[dict[str, Any]] = []
        for layer in self:
            layers.append({"kind": type(layer).__name__})
            if isinstance(layer, Dense):
                layers[-1] |= {"activation": type(layer.activation).__name__, "residual": layer.adds_input}
            if isinstance(layer, Truncation):
                layers[-1]["size"] = layer.out_size
        return layers
