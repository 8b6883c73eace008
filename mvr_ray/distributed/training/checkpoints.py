"""Store the checkpoints of a training: weights, optimiser and progress, as safetensors and JSON.

    <store>/training/<name>/<key>/step-00000100/model.safetensors  optimiser.safetensors  state.json
    <store>/training/<name>/<key>/best-00000080/model.safetensors
    <store>/training/<name>/<key>/snapshot-00000040/model.safetensors     of each of `train.snapshot_steps`
    <store>/training/<name>/<key>/latest.json        the step and the sha256 of every file that it rests on: written
                                                     last, so that a checkpoint counts once it is whole
    <store>/training/<name>/<key>/finished.json      instead of all these once the snapshot is saved: what came out

Dropout, batches and learning rates are functions of (seed, step): no random state has to be kept.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mvr_ray.checksums import FORMAT_VERSION, json_with_checksum, parse_json, require_format
from mvr_ray.errors import DigestError, FormatError, StorageError
from mvr_ray.store.files import Store, sha256_of

WeightsKind = Literal["step", "best", "snapshot"]
LATEST = "latest.json"
FINISHED = "finished.json"
RECORD_FORMAT = 1
"""The format of both."""


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
    """How far a training is. `step` counts finished steps, those of the warm start first. `precision` is what
    `train.precision: auto` chose."""

    step: int = 0
    best_step: int = -1
    best_accuracy: float = -1.0
    before: float | None = None
    loss_scale: dict[str, Any] = field(default_factory=dict)
    sums: EpochSums = field(default_factory=EpochSums)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    precision: str = ""

    def to_json(self) -> bytes:
        values = asdict(self)
        if not self.precision:
            del values["precision"]
        return json.dumps(values).encode()

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
        self._digests: dict[str, str] = {}  # of what this object wrote

    def latest_step(self) -> int:
        """Step of the newest whole checkpoint, -1 when there is none.

        Raises FormatError for one of a newer program, StorageError where it is not told.
        """
        return self._latest().get("step", -1)

    def save(self, model: nn.Module, optimiser: torch.optim.Optimizer, state: TrainState) -> None:
        """Write a checkpoint, point to it, and drop what nothing points to."""
        name = _folder_name("step", state.step)
        with self._store.scratch() as scratch:
            folder = scratch / name
            folder.mkdir()
            _save_tensors(model.state_dict(), folder / "model.safetensors")
            _save_tensors(_flat(optimiser), folder / "optimiser.safetensors")
            (folder / "state.json").write_bytes(state.to_json())
            self._put(folder, name)
        kept = {name, _folder_name("best", state.best_step)}
        kept |= {entry for entry in self._store.list(self._folder) if entry.startswith("snapshot-")}
        digests = self._latest().get("files", {}) | self._digests
        self._digests = {file: digest for file, digest in digests.items() if file.partition("/")[0] in kept}
        self._write(LATEST, {"step": state.step, "files": self._digests})
        for entry in self._store.list(self._folder):
            if entry.startswith(("step-", "best-")) and entry not in kept:
                self._store.delete_dir(f"{self._folder}/{entry}")

    def save_weights(self, model: nn.Module, step: int, kind: Literal["best", "snapshot"]) -> None:
        """Keep these weights; they count once a checkpoint says so."""
        with self._store.scratch() as scratch:
            folder = scratch / _folder_name(kind, step)
            folder.mkdir()
            _save_tensors(model.state_dict(), folder / "model.safetensors")
            self._put(folder, folder.name)

    def state(self, step: int) -> TrainState:
        return TrainState.from_json(self._whole(_folder_name("step", step), "state.json").read_bytes())

    def load_model(self, model: nn.Module, step: int, kind: WeightsKind = "step") -> None:
        model.load_state_dict(load_file(self._whole(_folder_name(kind, step), "model.safetensors")))

    def load_optimiser(self, optimiser: torch.optim.Optimizer, step: int) -> None:
        tensors = load_file(self._whole(_folder_name("step", step), "optimiser.safetensors"))
        state: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            number, _, name = key.partition("/")
            state.setdefault(int(number), {})[name] = tensor
        optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})

    def finish(self, record: Mapping[str, Any]) -> None:
        """The training is over: keep what is recorded of it, drop the checkpoints."""
        self._write(FINISHED, record)
        self._store.delete(f"{self._folder}/{LATEST}")
        for entry in self._store.list(self._folder):
            if entry.startswith(("step-", "best-", "snapshot-")):
                self._store.delete_dir(f"{self._folder}/{entry}")

    def result(self) -> dict[str, Any]:
        """What `finish` kept, empty before. Raises FormatError for that of a newer program, StorageError for damage."""
        return self._read(FINISHED, {"fingerprint": str, "metrics": dict, "epochs": list})

    def _write(self, name: str, fields: Mapping[str, Any]) -> None:
        record = json_with_checksum({**fields, FORMAT_VERSION: RECORD_FORMAT})
        self._store.write_bytes(f"{self._folder}/{name}", json.dumps(record).encode())

    def _read(
        self, name: str, types: Mapping[str, type], defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Fields of a record of these types, nothing where there is no record."""
        path = f"{self._folder}/{name}"
        if not self._store.exists(path):
            return {}
        where, cure = self._store.where(path), self._cure()
        try:
            fields = {**defaults, **parse_json(self._store.read_bytes(path), where)}
            require_format(fields, RECORD_FORMAT, where, cure)
            if wrong := [field for field, kind in types.items() if not isinstance(fields.get(field), kind)]:
                raise StorageError(f"{', '.join(wrong)} missing or of another type")
        except FormatError:
            raise
        except StorageError as error:
            raise StorageError(f"{where} is not readable ({error}); {cure}") from error
        return {field: fields[field] for field in types}

    def _latest(self) -> dict[str, Any]:
        """The newest checkpoint's `step`, and `files`, their digests; older programs wrote none."""
        return self._read(LATEST, {"step": int, "files": dict}, {"files": {}})

    def _whole(self, name: str, file: str) -> Path:
        """A local copy of a checkpoint's file. Raises StorageError where it is missing or not what was written."""
        local = self._store.local_path(f"{self._folder}/{name}") / file
        expected = self._latest().get("files", {}).get(f"{name}/{file}")
        try:
            if expected and sha256_of(local) != expected:
                raise DigestError("its sha256 is not the one that was recorded")
        except (OSError, DigestError) as error:
            raise StorageError(
                f"{self._store.where(self._folder)}/{name}/{file} is damaged ({error}); {self._cure()}"
            ) from error
        return local

    def _cure(self) -> str:
        return f"delete {self._store.where(self._folder)} and train from the start"

    def _put(self, folder: Path, name: str) -> None:
        """A folder of that name can only be what a killed run left: it gives way."""
        self._digests |= {f"{name}/{file.name}": sha256_of(file) for file in folder.iterdir()}
        self._store.delete_dir(f"{self._folder}/{name}")
        self._store.upload_dir(folder, f"{self._folder}/{name}")


def _folder_name(kind: WeightsKind, step: int) -> str:
    return f"{kind}-{step:08d}"


def _flat(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimiser.state_dict()["state"]
    return {f"{number}/{name}": tensor for number, held in state.items() for name, tensor in held.items()}


def _save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path)
