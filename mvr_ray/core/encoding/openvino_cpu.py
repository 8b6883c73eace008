"""Run a tower by OpenVINO on a CPU, in float32, bfloat16 or int8: backbones without local attention, padded texts.

    (ids_PT, positions_PT, real_PT) -> states_PTD        `Tower.forward`, converted once for texts of any length

Texts are sorted by length into padded batches of `BATCH_TOKENS`; each thread runs one batch through the whole model.
The texts alone determine the rows of a batch, so the bytes do not depend on the number of threads. In float32 the
states equal those of the padded pass up to rounding, as the tests check.

The conversion takes seconds (3 s for MiniLM), so an encoder stores its result: a process then compiles it in 0.2 s.

In int8, NNCF puts scales around the products, calibrated on passages: static quantisation that smooths the steps of
wide dimensions into the weights (SmoothQuant, Xiao et al. 2023). All other operations run in OpenVINO's default
precision on the processor. Only the calibration needs NNCF.

Shapes: P texts, T tokens of the longest, V views of each, D dimension.
"""

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mvr_ray.core.encoding.length_batches import token_batches
from mvr_ray.core.encoding.padded import PaddedTokens, mean_states, pad
from mvr_ray.core.encoding.tower import Tower, quiet_transformers
from mvr_ray.core.encoding.unpadded_cpu import Means, thread_pool
from mvr_ray.core.encoding.views import TokenizedPassage
from mvr_ray.core.threads import MODEL_LOCK
from mvr_ray.errors import EncoderError

INSTALL = "pip install 'mvr-ray[openvino]'"
BATCH_TOKENS = 2048
"""Tokens of a batch, padding counted."""
FILES = ("model", "weights")
"""The two files of a model of OpenVINO: operations as XML, and constants."""
INPUTS = ("ids_PT", "positions_PT", "real_PT")


class StatesModule(nn.Module):
    """`Tower.forward` with only its three inputs, for the conversion."""

    def __init__(self, tower: Tower) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, ids_PT: Tensor, positions_PT: Tensor, real_PT: Tensor) -> Tensor:
        return self.tower(ids_PT, positions_PT, real_PT)


class OpenVinoTower:
    """A tower's current weights, compiled for this machine.

    `products`: OpenVINO's name of the precision of the products, `f32` or `bf16`; None: the model's own, for int8.
    `files`: the result of `convert` or `quantize` for these weights; None: they are converted here.
    """

    def __init__(self, tower: Tower, products: str | None, files: Mapping[str, NDArray[np.uint8]] | None) -> None:
        self.tower, self.dimension = tower, tower.dimension
        self._threads, self._process = torch.get_num_threads(), os.getpid()
        with MODEL_LOCK:
            self._compile(tower, products, files)

    def _compile(self, tower: Tower, products: str | None, files: Mapping[str, NDArray[np.uint8]] | None) -> None:
        openvino = import_openvino()
        settings: dict[str, Any] = {"INFERENCE_NUM_THREADS": self._threads, "NUM_STREAMS": self._threads}
        core = _core()
        if products is not None:
            settings["INFERENCE_PRECISION_HINT"] = products
        try:
            model = core.read_model(*(files[name].tobytes() for name in FILES)) if files else to_openvino(tower)
            compiled_model = core.compile_model(model, "CPU", settings)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[-1]
            raise EncoderError(
                f"OpenVINO {openvino.__version__} cannot run this encoder ({reason}); use the version that converted "
                f"it, or set index.precision to fp32 and index again"
            ) from error
        self._inputs = _inputs(compiled_model)
        self._requests: SimpleQueue[Any] = SimpleQueue()
        for _ in range(self._threads):
            request = compiled_model.create_infer_request()
            request.get_input_tensor(0).data  # noqa: B018 - loads numpy for OpenVINO: two threads at once would deadlock
            self._requests.put(request)

    def views(self, batch: Sequence[TokenizedPassage], num_views: int) -> Means:
        """Average the states of each view's tokens, in float32. Raises EncoderError in a fork of the process that
        compiled the model, whose threads it lacks.

        Each Python thread waits for its own request. A callback would run on a thread of OpenVINO and could deadlock:
        it waits for the interpreter while the interpreter, freeing the model, waits for it.
        """
        if os.getpid() != self._process:
            raise EncoderError(
                "this process is a fork of one that has embedded passages, and lacks its threads; start processes by "
                "spawn, as multiprocessing.get_context('spawn') does"
            )
        shape = (len(batch), num_views)
        views_PVD, count_PV = torch.empty(*shape, self.dimension), torch.empty(shape, dtype=torch.long)

        def read(rows: list[int]) -> None:
            tokens = pad(self.tower, [batch[row] for row in rows])
            request = self._requests.get()
            try:
                request.infer(_arrays(tokens, self._inputs))
                states_PTD = torch.from_numpy(request.get_output_tensor(0).data)
                views_PVD[rows], count_PV[rows] = mean_states(tokens, states_PTD, num_views)
            finally:
                self._requests.put(request)

        each = map if self._threads == 1 else thread_pool(self._threads).map
        for _ in each(torch.no_grad()(read), token_batches([text.num_tokens for text in batch], BATCH_TOKENS)):
            pass
        return Means(views_PVD, count_PV)


@cache
def _core() -> Any:
    """Make OpenVINO's core, one for the life of the process; callers hold MODEL_LOCK.

    Its CPU plugin takes the signal stack of the thread that loads it, and unmaps it at its end. If that end comes on
    another thread, or before the end of a core that was made later, signals stay directed at the unmapped stack, and
    the next one, such as Ctrl-C, ends the process by SIGSEGV.
    """
    return import_openvino().Core()


def to_openvino(tower: Tower) -> Any:
    """Convert `Tower.forward` to an OpenVINO model, for texts of any number and length."""
    openvino = import_openvino()
    example = (torch.ones(2, 8, dtype=torch.long), torch.arange(8).expand(2, 8).contiguous(), torch.ones(2, 8) > 0)
    shapes = [openvino.PartialShape([-1, -1])] * len(example)
    training = tower.training
    with MODEL_LOCK, torch.no_grad(), warnings.catch_warnings(), quiet_transformers():
        warnings.simplefilter("ignore")  # about values that a trace fixes: all that varies by text is an input
        # OpenVINO would trace it and check the trace by tracing it again, which takes most of the time of a conversion
        trace = torch.jit.trace(StatesModule(tower).eval(), example, check_trace=False)
        model = openvino.convert_model(trace, example_input=example, input=shapes)
    tower.train(training)
    return model


def convert(tower: Tower, halve: bool = False) -> dict[str, NDArray[np.uint8]]:
    """Convert a tower to the bytes of OpenVINO's two files, FILES; `halve`: with weights in float16."""
    return _to_files(to_openvino(tower), halve)


def quantize(
    tower: Tower, texts: Sequence[TokenizedPassage], *, seven_bits: bool = False
) -> dict[str, NDArray[np.uint8]]:
    """Quantize a tower to int8, calibrated on representative texts, as the bytes of FILES. `seven_bits`: weights have
    half the range. Raises EncoderError without NNCF."""
    if find_spec("nncf") is None:
        raise EncoderError(
            f"int8 needs the library nncf to find its scales, and it is not installed; run {INSTALL}, or set "
            f"index.precision to fp32"
        )
    model = to_openvino(tower)
    with MODEL_LOCK, without_telemetry(), _quiet_nncf():
        import nncf

        data = nncf.Dataset([_arrays(pad(tower, [text]), _inputs(model)) for text in texts])
        fix = nncf.OverflowFix.ENABLE if seven_bits else nncf.OverflowFix.FIRST_LAYER
        parameters = nncf.AdvancedQuantizationParameters(overflow_fix=fix)
        int8_model = nncf.quantize(
            model, data, subset_size=len(texts), model_type=nncf.ModelType.TRANSFORMER, advanced_parameters=parameters
        )
    return _to_files(int8_model)


@contextmanager
def _quiet_nncf() -> Iterator[None]:
    """Disable nncf's progress bars, which it draws on stdout, and its messages below errors."""
    from nncf.common.logging import track_progress

    class HiddenProgress(track_progress.Progress):
        def __init__(self, *columns: Any, **options: Any) -> None:
            super().__init__(*columns, **options | {"disable": True})

    logger, progress = logging.getLogger("nncf"), track_progress.Progress
    level = logger.level
    logger.setLevel(logging.ERROR)  # nncf's own function also sets the level of others' handlers
    track_progress.Progress = HiddenProgress
    try:
        yield
    finally:
        track_progress.Progress = progress
        logger.setLevel(level)


def _to_files(model: Any, halve: bool = False) -> dict[str, NDArray[np.uint8]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.xml"
        import_openvino().save_model(model, path, compress_to_fp16=halve)
        paths = (path, path.with_suffix(".bin"))
        return {name: np.frombuffer(file.read_bytes(), np.uint8) for name, file in zip(FILES, paths)}


def _inputs(model: Any) -> list[str]:
    """List the INPUTS that a model has: a backbone without position ids has no positions."""
    names = {name for node in model.inputs for name in node.get_names()}
    return [name for name in INPUTS if name in names]


def _arrays(tokens: PaddedTokens, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(tokens, name).numpy() for name in names}


def import_openvino() -> Any:
    """Import the library, whose presence `precision.check` has verified."""
    with without_telemetry():
        import openvino
    return openvino


@contextmanager
def without_telemetry() -> Iterator[None]:
    """Disable the usage telemetry of libraries that are imported in the block."""
    is_absent = "openvino_telemetry" not in sys.modules
    if is_absent:
        sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if is_absent:
            del sys.modules["openvino_telemetry"]
