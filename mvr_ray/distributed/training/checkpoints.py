"""Store the checkpoints of a training: weights, optimiser and progress, as safetensors and JSON.

    <store>/training/<name>/<key>/step-00000100/model.safetensors  optimiser.safetensors  state.json
    <store>/training/<name>/<key>/best-00000080/model.safetensors
    <store>/training/<name>/<key>/latest.json        {step, format_version, checksum}: written last, so that a
                                                     checkpoint counts once it is whole
    <store>/training/<name>/<key>/finished.json      instead of all these once the snapshot is saved: what came out

Dropout, batches and learning rates are functions of (seed, step): no random state has to be kept.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mvr_ray.checksums import FORMAT_VERSION, json_with_checksum, parse_json, require_format
from mvr_ray.errors import FormatError, StorageError
from mvr_ray.store.files import Store

LATEST = "latest.json"
LATEST_FORMAT = 1
FINISHED = "finished.json"


@dataclass
class EpochSums:
    """What the metrics of the running epoch are made from."""

    steps: int = 0
    loss: float = 0.0
    loss_global: float = 0.0
    loss_local: float = 0.0
    wins_V: list[int] = field(default_factory=list)


@dataclass
class TrainState:
    """How far a training is. `step` counts finished steps, those of the warm start first."""

    step: int = 0
    best_step: int = -1
    best_accuracy: float = -1.0
    before: float | None = None
    loss_scale: dict[str, Any] = field(default_factory=dict)
    sums: EpochSums = field(default_factory=EpochSums)
    epochs: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "TrainState":
        values: dict[str, Any] = json.loads(data)
        sums = EpochSums(**values.pop("sums"))
        return cls(sums=sums, **values)


class Checkpoints:
    """Reads and writes the checkpoints of one training; only rank 0 writes."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._folder = folder

    def latest_step(self) -> int:
        """Step of the newest whole checkpoint, -1 when there is none.

        Raises FormatError for one of a newer program, StorageError where it is not told.
        """
        path = f"{self._folder}/{LATEST}"
        if not self._store.exists(path):
            return -1
        where, cure = self._store.where(path), f"delete {self._store.where(self._folder)} and train from the start"
        try:
            fields = parse_json(self._store.read_bytes(path), where)
            require_format(fields, LATEST_FORMAT, where, cure)
            return int(fields["step"])
        except FormatError:
            raise
        except (StorageError, KeyError, TypeError, ValueError) as error:
            raise StorageError(f"{where} is not readable ({error}); {cure}") from error

    def save(self, model: nn.Module, optimiser: torch.optim.Optimizer, state: TrainState) -> None:
        """Write a checkpoint, point to it, and drop what nothing points to."""
        name = _step_name(state.step)
        with self._store.scratch() as scratch:
            folder = scratch / name
            folder.mkdir()
            _save_tensors(model.state_dict(), folder / "model.safetensors")
            _save_tensors(_flat(optimiser), folder / "optimiser.safetensors")
            (folder / "state.json").write_bytes(state.to_json())
            self._put(folder, name)
        latest = json_with_checksum({"step": state.step, FORMAT_VERSION: LATEST_FORMAT})
        self._store.write_bytes(f"{self._folder}/{LATEST}", json.dumps(latest).encode())
        kept = {name, _best_name(state.best_step)}
        for entry in self._store.list(self._folder):
            if entry.startswith(("step-", "best-")) and entry not in kept:
                self._store.delete_dir(f"{self._folder}/{entry}")

    def save_best(self, model: nn.Module, step: int) -> None:
        """Keep these weights; they count once a checkpoint says so."""
        with self._store.scratch() as scratch:
            folder = scratch / _best_name(step)
            folder.mkdir()
            _save_tensors(model.state_dict(), folder / "model.safetensors")
            self._put(folder, folder.name)

    def state(self, step: int) -> TrainState:
        return TrainState.from_json(self._store.read_bytes(f"{self._folder}/{_step_name(step)}/state.json"))

    def load_model(self, model: nn.Module, step: int, *, best: bool = False) -> None:
        name = _best_name(step) if best else _step_name(step)
        model.load_state_dict(load_file(self._local(name) / "model.safetensors"))

    def load_optimiser(self, optimiser: torch.optim.Optimizer, step: int) -> None:
        tensors = load_file(self._local(_step_name(step)) / "optimiser.safetensors")
        state: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            number, _, name = key.partition("/")
            state.setdefault(int(number), {})[name] = tensor
        optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})

    def finish(self, record: bytes) -> None:
        """The training is over: keep what is recorded of it, drop the checkpoints."""
        self._store.write_bytes(f"{self._folder}/{FINISHED}", record)
        self._store.delete(f"{self._folder}/{LATEST}")
        for entry in self._store.list(self._folder):
            if entry.startswith(("step-", "best-")):
                self._store.delete_dir(f"{self._folder}/{entry}")

    def result(self) -> bytes | None:
        path = f"{self._folder}/{FINISHED}"
        return self._store.read_bytes(path) if self._store.exists(path) else None

    def _local(self, name: str) -> Path:
        return self._store.local_path(f"{self._folder}/{name}")

    def _put(self, folder: Path, name: str) -> None:
        """A folder of that name can only be what a killed run left: it gives way."""
        self._store.delete_dir(f"{self._folder}/{name}")
        self._store.upload_dir(folder, f"{self._folder}/{name}")


def _step_name(step: int) -> str:
    return f"step-{step:08d}"


def _best_name(step: int) -> str:
    return f"best-{step:08d}"


def _flat(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimiser.state_dict()["state"]
    return {f"{number}/{name}": tensor for number, held in state.items() for name, tensor in held.items()}


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path)
