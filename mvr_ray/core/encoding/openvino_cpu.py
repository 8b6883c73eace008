"""Run a tower by OpenVINO on a CPU, in float32: backbones without local attention, viewers as in the padded pass.

    (ids_PT, positions_PT, real_PT) -> states_PTD        `Tower.forward`, converted once for texts of any length

Texts are sorted by length into padded batches of `BATCH_TOKENS`; each thread takes a batch by itself through the whole
model. A batch's rows follow from the texts alone, so the bytes do not depend on how many threads there are. The states
are those of the padded pass up to rounding, which is what they are tested against.

Shapes: P texts, T tokens of the longest, V views of each, D dimension.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mvr_ray.core.encoding.length_batches import token_batches
from mvr_ray.core.encoding.padded import PaddedTokens, mean_states, pad
from mvr_ray.core.encoding.tower import Tower
from mvr_ray.core.encoding.unpadded_cpu import Means
from mvr_ray.core.encoding.views import TokenizedPassage
from mvr_ray.errors import EncoderError

BATCH_TOKENS = 2048
"""Tokens of a batch, padding counted."""
PRODUCTS = "f32"
"""What it multiplies; by itself it takes bf16 where the processor has it."""


class StatesModule(nn.Module):
    """`Tower.forward` with its three inputs alone, as the conversion takes it."""

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, ids_PT: Tensor, positions_PT: Tensor, real_PT: Tensor) -> Tensor:
        return self.tower(ids_PT, positions_PT, real_PT)


class OpenVinoTower:
    """A tower's weights of this moment, compiled for this machine."""

    def __init__(self, tower: Tower) -> None:
        openvino = import_openvino()
        self.tower, self.dimension = tower, tower.dimension
        model = to_openvino(tower)
        self._threads = torch.get_num_threads()
        settings = {
            "INFERENCE_PRECISION_HINT": PRODUCTS,
            "INFERENCE_NUM_THREADS": self._threads,
            "NUM_STREAMS": self._threads,
        }
        self._compiled = openvino.Core().compile_model(model, "CPU", settings)
        self._queue = openvino.AsyncInferQueue
        self._inputs = [name for name in ("ids_PT", "positions_PT", "real_PT") if self._has_input(name)]

    def views(self, batch: Sequence[TokenizedPassage], num_views: int) -> Means:
        """The means of the states of each view's tokens, in float32."""
        shape = (len(batch), num_views)
        views_PVD, count_PV = torch.empty(*shape, self.dimension), torch.empty(shape, dtype=torch.long)

        def keep(rows: list[int], tokens: PaddedTokens, states_PTD: Tensor) -> None:
            views_PVD[rows], count_PV[rows] = mean_states(tokens, states_PTD, num_views)

        self._run(batch, keep)
        return Means(views_PVD, count_PV)

    def padded_states(self, batch: Sequence[TokenizedPassage]) -> Tensor:
        """states_PTD as long as the longest text, zero behind each, in float32."""
        states_PTD = torch.zeros(len(batch), max(text.num_tokens for text in batch), self.dimension)

        def keep(rows: list[int], tokens: PaddedTokens, own_PTD: Tensor) -> None:
            states_PTD[rows, : own_PTD.shape[1]] = own_PTD * tokens.real_PT[..., None]

        self._run(batch, keep)
        return states_PTD

    def _has_input(self, name: str) -> bool:
        return any(name in node.get_names() for node in self._compiled.inputs)

    def _run(self, batch: Sequence[TokenizedPassage], keep: Callable[[list[int], PaddedTokens, Tensor], None]) -> None:
        queue = self._queue(self._compiled, self._threads)

        def take(request: Any, work: tuple[list[int], PaddedTokens]) -> None:
            keep(*work, torch.from_numpy(request.get_output_tensor(0).data))

        queue.set_callback(take)
        for rows in token_batches([text.num_tokens for text in batch], BATCH_TOKENS):
            tokens = pad(self.tower, [batch[row] for row in rows])
            arrays = {"ids_PT": tokens.ids_PT, "positions_PT": tokens.positions_PT, "real_PT": tokens.real_PT}
            queue.start_async({name: arrays[name].numpy() for name in self._inputs}, (rows, tokens))
        queue.wait_all()


def to_openvino(tower: Tower) -> Any:
    """`Tower.forward` as a model of OpenVINO's, for texts of any number and length."""
    openvino = import_openvino()
    example = (torch.ones(2, 8, dtype=torch.long), torch.arange(8).expand(2, 8).contiguous(), torch.ones(2, 8) > 0)
    shapes = [openvino.PartialShape([-1, -1])] * len(example)
    training = tower.training
    with torch.no_grad():
        model = openvino.convert_model(StatesModule(tower).eval(), example_input=example, input=shapes)
    tower.train(training)
    return model


def import_openvino() -> Any:
    """The library, kept from reporting its use to its maker, which it else does. Raises EncoderError without it."""
    absent = "openvino_telemetry" not in sys.modules
    if absent:
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    try:
        import openvino
    except ImportError:
        raise EncoderError(
            "passages by OpenVINO need its library, and it is not installed; run pip install 'mvr-ray[openvino]', or "
            "set index.precision to fp32"
        ) from None
    finally:
        if absent:
            del sys.modules["openvino_telemetry"]
    return openvino
