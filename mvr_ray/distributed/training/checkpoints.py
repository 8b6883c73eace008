"""Store the checkpoints of a training: weights, optimiser and progress, as safetensors and JSON.

    <store>/training/<name>/<key>/step-00000100/model.safetensors  optimiser.safetensors  state.json  metrics.jsonl
    <store>/training/<name>/<key>/best-00000080/model.safetensors
    <store>/training/<name>/<key>/snapshot-00000040/model.safetensors     of each of `train.snapshot_steps`
    <store>/training/<name>/<key>/latest.json        the step and the sha256 of every file that it needs: written
                                                     last, so that a checkpoint counts once it is whole
    <store>/training/<name>/<key>/finished.json      replaces all these once the model is saved: its record
    <store>/training/<name>/<key>/metrics.jsonl      rows of metrics of the steps so far, which stay

Dropout, batches and learning rates are functions of (seed, step): no random state is saved.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mvr_ray.checksums import FORMAT_VERSION, json_with_checksum, parse_json, require_format
from mvr_ray.errors import DigestError, StorageError
from mvr_ray.store.files import Store
from mvr_ray.store.local_files import sha256_of
from mvr_ray.store.runs import to_plain

WeightsKind = Literal["step", "best", "snapshot"]
LATEST = "latest.json"
FINISHED = "finished.json"
RECORD_FORMAT = 1
"""The format of both."""
METRICS = "metrics.jsonl"


@dataclass
class EpochSums:
    """Running sums for the metrics of the current epoch."""

    steps: int = 0
    loss: float = 0.0
    loss_global: float = 0.0
    loss_local: float = 0.0
    wins_V: list[int] = field(default_factory=list)


@dataclass
class TrainState:
    """Progress of a training. `step` counts finished steps, those of the warm start first. `precision` is the choice
    of `train.precision: auto`, `metrics` the rows of a file of their own."""

    step: int = 0
    best_step: int = -1
    best_accuracy: float = -1.0
    before: float | None = None
    loss_scale: dict[str, Any] = field(default_factory=dict)
    sums: EpochSums = field(default_factory=EpochSums)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    precision: str = ""
    metrics: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> bytes:
        values = asdict(self)
        del values["metrics"]
        if not self.precision:
            del values["precision"]
        return json.dumps(values).encode()

    @classmethod
    def from_json(cls, data: bytes) -> "TrainState":
        values: dict[str, Any] = json.loads(data)
        sums = EpochSums(**values.pop("sums"))
        return cls(sums=sums, **values)


class Checkpoints:
    """Read and write the checkpoints of one training; only rank 0 writes.

    Processes that run the same training take the same steps, so the checkpoint of the furthest one serves all.
    """

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self.folder = folder
        self.metrics_file = f"{folder}/{METRICS}"
        self._digests: dict[str, str] = {}  # of files written by this object

    def latest_step(self) -> int:
        """Return the step of the newest whole checkpoint, -1 when there is none.

        Raises FormatError for one of a newer program, StorageError where its record is damaged.
        """
        return self._latest().get("step", -1)

    def save(self, model: nn.Module, optimiser: torch.optim.Optimizer, state: TrainState) -> None:
        """Write a checkpoint, record it as the latest, and delete the ones before. Does nothing where another process
        has written one of this step or a later one."""
        latest = self._latest()
        if latest.get("step", -1) >= state.step:
            return
        name = _folder_name("step", state.step)
        files = {"state.json": state.to_json(), METRICS: _json_lines(state.metrics)}
        self._put(name, {"model": model.state_dict(), "optimiser": _flat(optimiser)}, files)
        self.write_metrics(state.metrics)
        folders = {name, _folder_name("best", state.best_step)}
        folders |= {entry for entry in self._store.list(self.folder) if entry.startswith("snapshot-")}
        digests = latest.get("files", {}) | self._digests
        self._digests = {file: digest for file, digest in digests.items() if file.partition("/")[0] in folders}
        self._write(LATEST, {"step": state.step, "files": self._digests})
        self._delete_others(folders, state.step)

    def save_weights(self, model: nn.Module, step: int, kind: Literal["best", "snapshot"]) -> None:
        """Save these weights, unless the latest checkpoint names them; they count once one does."""
        name = _folder_name(kind, step)
        if f"{name}/model.safetensors" not in self._latest().get("files", {}):
            self._put(name, {"model": model.state_dict()})

    def write_metrics(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the metrics so far for programs that plot; those of a finished training stay."""
        if not self._store.exists(f"{self.folder}/{FINISHED}"):
            self._store.write_bytes(self.metrics_file, _json_lines(rows))

    def state(self, step: int) -> TrainState:
        name = _folder_name("step", step)
        state = TrainState.from_json(self._local_file(name, "state.json").read_bytes())
        if f"{name}/{METRICS}" in self._latest().get("files", {}):  # older programs wrote none
            state.metrics = [json.loads(line) for line in self._local_file(name, METRICS).read_bytes().splitlines()]
        return state

    def load_model(self, model: nn.Module, step: int, kind: WeightsKind = "step") -> None:
        model.load_state_dict(load_file(self._local_file(_folder_name(kind, step), "model.safetensors")))

    def load_optimiser(self, optimiser: torch.optim.Optimizer, step: int) -> None:
        tensors = load_file(self._local_file(_folder_name("step", step), "optimiser.safetensors"))
        state: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            number, _, name = key.partition("/")
            state.setdefault(int(number), {})[name] = tensor
        optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})

    def finish(self, record: Mapping[str, Any]) -> None:
        """Write the final record and delete the checkpoints."""
        self._write(FINISHED, record)
        self.clear()

    def clear(self) -> None:
        """Delete the checkpoints."""
        self._store.delete(f"{self.folder}/{LATEST}")
        self._delete_others(())

    def result(self) -> dict[str, Any]:
        """Return the record of `finish`, empty before. Raises FormatError for a newer program's, StorageError for
        damage."""
        return self._read(FINISHED, {"fingerprint": str, "metrics": dict, "epochs": list})

    def _write(self, name: str, fields: Mapping[str, Any]) -> None:
        record = json_with_checksum({**fields, FORMAT_VERSION: RECORD_FORMAT})
        self._store.write_bytes(f"{self.folder}/{name}", json.dumps(record).encode())

    def _read(
        self, name: str, types: Mapping[str, type], defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Read the fields of a record, checked by type; empty where there is no record."""
        path = f"{self.folder}/{name}"
        if not self._store.exists(path):
            return {}
        where, cure = self._store.where(path), self._cure()
        fields = {**defaults, **parse_json(self._store.read_bytes(path), where, cure)}
        require_format(fields, RECORD_FORMAT, where, cure)
        if invalid_fields := [field for field, kind in types.items() if not isinstance(fields.get(field), kind)]:
            raise StorageError(f"{where} is damaged ({', '.join(invalid_fields)} missing or of another type); {cure}")
        return {field: fields[field] for field in types}

    def _latest(self) -> dict[str, Any]:
        """Return `step` of the newest checkpoint and `files`, their digests, which older programs did not write."""
        return self._read(LATEST, {"step": int, "files": dict}, {"files": {}})

    def _local_file(self, name: str, file: str) -> Path:
        """Return a local copy of a checkpoint's file. Raises StorageError where it is missing or differs from its
        digest."""
        path = f"{self.folder}/{name}/{file}"
        where = self._store.where(path)
        if not self._store.exists(path):  # a process that runs the same training may have deleted it
            raise StorageError(f"{where} is missing; run the same command again, or {self._cure()}")
        local = self._store.local_path(f"{self.folder}/{name}") / file
        expected = self._latest().get("files", {}).get(f"{name}/{file}")

        def require_whole(copy: Path) -> None:
            if expected and sha256_of(copy) != expected:
                raise DigestError("its sha256 differs from the recorded one")

        try:
            self._store.open_copy(local, path, require_whole)
        except (OSError, DigestError) as error:
            raise StorageError(f"{where} is damaged ({error}); {self._cure()}") from error
        return local

    def _cure(self) -> str:
        return f"delete {self._store.where(self.folder)} and train from the start"

    def _put(
        self,
        name: str,
        tensors: Mapping[str, Mapping[str, Tensor]],
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """Write a folder, replacing one that a killed run left. Raises StorageError if the disk is full."""
        path = f"{self.folder}/{name}"
        with self._store.scratch() as scratch:
            folder = scratch / name
            folder.mkdir()
            for file, own in tensors.items():
                copies = ((name, tensor.detach().cpu().contiguous().clone()) for name, tensor in own.items())
                save_file(dict(copies), folder / f"{file}.safetensors")
            for file, data in files.items():
                (folder / file).write_bytes(data)
            self._digests |= {f"{name}/{file.name}": sha256_of(file) for file in folder.iterdir()}
            self._store.delete_dir(path)
            self._store.upload_dir(folder, path)

    def _delete_others(self, folders: Collection[str], before: float = math.inf) -> None:
        """Delete the folders of checkpoints and weights of steps before this one, except these folders."""
        for entry in self._store.list(self.folder):
            kind, _, step = entry.partition("-")
            if kind in get_args(WeightsKind) and entry not in folders and int(step) < before:
                self._store.delete_dir(f"{self.folder}/{entry}")


def _folder_name(kind: WeightsKind, step: int) -> str:
    return f"{kind}-{step:08d}"


def _json_lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(to_plain(row)) + "\n" for row in rows).encode()


def _flat(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    state = optimiser.state_dict()["state"]
    return {f"{number}/{name}": tensor for number, values in state.items() for name, tensor in values.items()}
