"""Define the common base of encoders, readers and cross-encoders: a model, and the folder that stores it.

A folder holds the model's files and, written last, one JSON file that names their format and the fingerprint.
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from mvr_ray.checksums import json_with_checksum, parse_json
from mvr_ray.core.threads import MODEL_LOCK
from mvr_ray.errors import AccessError, FingerprintError, MvrRayError, first_line

FORMAT_VERSION = 1

T = TypeVar("T")


class InferenceCache:
    """Caches what modules prepare of their weights for inference, and has it prepared again when a weight has changed.

    Copies and pickles of the cache are empty: another process prepares the weights itself.
    """

    def __init__(self) -> None:
        self._parameters: dict[int, list[nn.Parameter]] = {}
        self._entries: dict[tuple[int, str], tuple[object, Any]] = {}

    def __reduce__(self) -> tuple[type["InferenceCache"], tuple[()]]:
        return InferenceCache, ()

    def of(self, module: nn.Module, name: str, prepare: Callable[[], T]) -> T:
        """Return what `prepare` made of the module's current weights; `name` tells apart what one module prepares."""
        parameters = self._parameters.get(id(module)) or self._parameters.setdefault(id(module), [*module.parameters()])
        state = [(parameter.data_ptr(), parameter._version) for parameter in parameters]
        entry = self._entries.get((id(module), name))
        if entry is None or entry[0] != state:
            with MODEL_LOCK:
                entry = self._entries.get((id(module), name))  # another thread may have prepared them meanwhile
                if entry is None or entry[0] != state:
                    entry = self._entries[id(module), name] = (state, prepare())
        return entry[1]


class StoredModel(nn.Module, ABC):
    """A model whose fingerprint is stored in the description of its folder."""

    what: ClassVar[str]
    """Its name in messages."""
    description_file: ClassVar[str]
    error_type: ClassVar[type[MvrRayError]]
    special_group: ClassVar[str]
    """The name of the group of parameters with a learning rate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inference_cache = InferenceCache()

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """16 hex digits over all that changes the model's output. Reads every weight: cache it."""

    @property
    @abstractmethod
    def transformers(self) -> list[Any]:
        """The pretrained models inside."""

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Write the model's files, and last its description."""

    @abstractmethod
    def is_special(self, parameter: str) -> bool:
        """Return whether the parameter of this name is in the special group."""

    def parameter_groups(self, lr: float, special_lr_factor: float, weight_decay: float) -> list[dict[str, Any]]:
        """Make AdamW's groups: matrices, vectors (biases and norms, never decayed), and the special group, whose rate
        is `special_lr_factor` times `lr`. Empty groups are left out."""
        groups: dict[str, dict[str, Any]] = {
            "matrices": {"lr": lr, "weight_decay": weight_decay},
            "vectors": {"lr": lr, "weight_decay": 0.0},
            self.special_group: {"lr": lr * special_lr_factor, "weight_decay": 0.0},
        }
        for name, parameter in self.named_parameters():
            group = self.special_group if self.is_special(name) else "matrices" if parameter.ndim > 1 else "vectors"
            groups[group].setdefault("params", []).append(parameter)
        return [{"name": name, **group} for name, group in groups.items() if "params" in group]

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Turn dropout and gradients off within the block."""
        training = self.training
        self.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.train(training)

    def set_dropout(self, share: float) -> None:
        """Set every dropout, attention's too, which many models hold as a number `...dropout`."""
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = share
            for name, value in vars(module).items():
                if name.endswith("dropout") and type(value) in (int, float):  # some have a switch of that name
                    setattr(module, name, share)

    def set_gradient_checkpointing(self, on: bool) -> None:
        """Trade a second forward pass for the memory of activations, in training."""
        for model in self.transformers:
            if on:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            else:
                model.gradient_checkpointing_disable()

    def write_description(self, folder: Path, description: Mapping[str, Any]) -> None:
        """Write the JSON file with its checksum, after all others; `description` has format version and fingerprint."""
        text = json.dumps(json_with_checksum(description), indent=2)
        (folder / self.description_file).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read_description(cls, folder: Path) -> dict[str, Any]:
        """Read the JSON file. Raises `error_type` where the folder holds no such model, or one of another format, and
        AccessError where a file of it may not be read, as safetensors says that such a file does not exist."""
        for path in folder.rglob("*"):
            if not os.access(path, os.R_OK):
                raise AccessError(f"cannot read {path}: Permission denied; let its owner run chmod -R a+rX {folder}")
        file = folder / cls.description_file
        try:
            description = parse_json(file.read_bytes(), str(file))
        except OSError as error:
            raise cls.error_type(f"{folder} holds no {cls.what}: {file.name} cannot be read ({error})") from None
        cls.require_format(description, str(file))
        if "fingerprint" not in description:
            raise cls.error_type(f"{file} lacks the fingerprint; make the {cls.what} again")
        return description

    @classmethod
    def require_format(cls, description: Mapping[str, Any], where: str) -> None:
        """Raise `error_type` for a description of another format version."""
        version = description.get("format_version")
        if version != FORMAT_VERSION:
            raise cls.error_type(
                f"{where} has format version {version}, this program reads {FORMAT_VERSION}; "
                f"use the program that wrote it, or make the {cls.what} again"
            )

    def check_fingerprint(self, folder: str | Path, description: Mapping[str, Any]) -> None:
        """Raise FingerprintError unless the model has the described fingerprint."""
        if self.fingerprint != description["fingerprint"]:
            raise FingerprintError(
                f"{self.what} {folder} was saved as {description['fingerprint']} but loads as {self.fingerprint}: "
                f"its files have changed; copy or make it again"
            )


@contextmanager
def translate_load_errors(
    what: str, advice: str, error_type: type[MvrRayError], *others: type[Exception]
) -> Iterator[None]:
    """Convert any error that a library raises over damaged files to `error_type`, naming `what`; `others` pass."""
    try:
        yield
    except (MvrRayError, MemoryError, *others):
        raise
    except Exception as error:  # noqa: BLE001 - tokenizers raise `Exception` itself
        raise error_type(f"{what} cannot be loaded: {first_line(error)}; {advice}") from None
