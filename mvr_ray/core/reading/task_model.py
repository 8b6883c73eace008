"""A pretrained transformer with a head for one task: opening, saving, telling apart, and what training asks of it.

The head may be the folder's own, or drawn from a seed where training is to start from a backbone.
"""

import hashlib
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn

from mvr_ray.core.encoding.backbones import LoadedModel, digest_of, parameter_groups, save_model
from mvr_ray.core.encoding.unpadded_cpu import UnpaddedCpuBackbone, supports_unpadded_cpu
from mvr_ray.errors import FingerprintError, MvrRayError

FORMAT_VERSION = 1
HEAD_STD = 0.02
"""Spread of a new head's weights."""


class TaskModel(nn.Module):
    """A model and its tokenizer. Make it with `open`, `from_backbone` or `load` of a subclass."""

    what: ClassVar[str]
    """How messages call it, and what its description in a folder is named after."""
    task: ClassVar[str]
    """The `train.task` that makes one."""
    head: ClassVar[str]
    """What a folder without one lacks, and what it is to be trained for."""
    refusal: ClassVar[type[MvrRayError]]

    def __init__(self, weights: LoadedModel, spec: Any) -> None:
        super().__init__()
        model, tokenizer, self.new_weights = weights
        self.model = model
        self.tokenizer = tokenizer
        self.spec = spec
        self.with_types = (
            "token_type_ids" in tokenizer.model_input_names
            and "token_type_ids" in inspect.signature(model.forward).parameters
            and getattr(model.config, "type_vocab_size", 2) > 1
        )

    @staticmethod
    def open_model(folder: str) -> LoadedModel:
        """The weights of a folder with the task's head; `missing` names those that only the head may lack."""
        raise NotImplementedError

    @classmethod
    def make(cls, weights: LoadedModel, spec: Any, named: str) -> Self:
        """Around loaded weights. `spec` None: the usual one."""
        raise NotImplementedError

    @classmethod
    def open(cls, folder: str, spec: Any = None) -> Self:
        """A trained model, by folder or hub name. Raises `refusal` where it has no head."""
        weights = cls.open_model(folder)
        if weights.missing:
            raise cls.refusal(
                f"{cls.what} {folder} has no head for {cls.head} (missing: {', '.join(weights.missing)}); take "
                f"a model that was trained for that, or train one from it (mvr-ray train CONFIG train.task={cls.task} "
                f"encoder.backbone={folder})"
            )
        return cls.make(weights, spec, folder).eval()

    @classmethod
    def from_backbone(cls, folder: str, spec: Any = None, seed: int = 0) -> Self:
        """What training starts from: a head that the folder lacks is drawn from `seed`, one that it has stays."""
        weights = cls.open_model(folder)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name in weights.missing:
                weight = weights.model.get_parameter(name)
                weight.zero_() if weight.ndim < 2 else weight.normal_(0.0, HEAD_STD, generator=generator)
        return cls.make(weights, spec, folder).eval()

    @classmethod
    def load(cls, folder: str | Path, spec: Any = None) -> Self:
        """Open what `save` wrote. Raises `refusal` if it is none, FingerprintError if its files have changed."""
        file = cls._file(folder)
        try:
            saved = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise cls.refusal(f"{folder} is no stored {cls.what}: {file.name} cannot be read ({error})") from None
        if saved.get("format_version") != FORMAT_VERSION:
            raise cls.refusal(
                f"{cls.what} {folder} has format {saved.get('format_version')}, this mvr_ray reads {FORMAT_VERSION}; "
                f"train it again with this mvr_ray"
            )
        model = cls.open(str(folder), spec)
        if model.fingerprint != saved["fingerprint"]:
            raise FingerprintError(
                f"{cls.what} {folder} was saved as {saved['fingerprint']} but loads as {model.fingerprint}: its files "
                f"have changed; copy or train it again"
            )
        return model

    def save(self, folder: str | Path) -> None:
        """Write a Hugging Face folder, and last the file that says what it is."""
        save_model(self.model, self.tokenizer, Path(folder))
        described = {"format_version": FORMAT_VERSION, "fingerprint": self.fingerprint}
        self._file(folder).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def _file(cls, folder: str | Path) -> Path:
        return Path(folder) / f"{cls.task}.json"

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def packed(self) -> UnpaddedCpuBackbone | None:
        """The backbone laid out for reading on a CPU, in weights of this moment; None where it cannot be."""
        backbone: Any = self.model.base_model
        return (
            UnpaddedCpuBackbone(backbone, backbone.get_input_embeddings()) if supports_unpadded_cpu(backbone) else None
        )

    @property
    def first_position(self) -> int:
        """Of a text's first token: tables of the RoBERTa kind begin after the padding id."""
        table: Any = self.model.base_model.embeddings.position_embeddings
        return 0 if table.padding_idx is None else int(table.padding_idx) + 1

    @property
    def fingerprint(self) -> str:
        """16 hex digits over weights, tokenizer and architecture. Reads every weight: keep it."""
        digest = digest_of(self.model.config, self.tokenizer, self.model.state_dict())
        return hashlib.blake2b(digest, digest_size=8).hexdigest()

    @property
    def positions(self) -> int:
        """How many tokens the model can tell apart by place. Tables of the RoBERTa kind begin after the padding id."""
        limits = [int(self.tokenizer.model_max_length)]
        rows = getattr(self.model.config, "max_position_embeddings", 0)
        if rows > 0:
            tables = (module for name, module in self.model.named_modules() if name.endswith("position_embeddings"))
            padding = (getattr(table, "padding_idx", None) for table in tables)
            limits.append(rows - 1 - next((row for row in padding if row is not None), -1))
        return min(limits)

    def set_dropout(self, share: float) -> None:
        """Set every dropout, attention's too."""
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = share

    def set_gradient_checkpointing(self, on: bool) -> None:
        """Trade a second forward pass for the memory of activations, in training."""
        if on:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()

    def parameter_groups(self, lr: float, head_lr_factor: float, weight_decay: float) -> list[dict[str, Any]]:
        """Groups for AdamW: matrices, vectors (biases and norms, never decayed), and a new head at its own rate."""
        head = ("head", self.new_weights.__contains__, head_lr_factor)
        return parameter_groups(self.model.named_parameters(), head, lr, weight_decay)

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Without dropout and gradients, and back as it was."""
        training = self.training
        self.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.train(training)
