"""Open, store and train a pretrained transformer with a head for one task.

The head is the folder's own, or drawn from a seed for training from a backbone.
"""

import hashlib
import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from mvr_ray.core.encoding.length_batches import token_batches
from mvr_ray.core.encoding.stored_model import FORMAT_VERSION, StoredModel
from mvr_ray.core.encoding.tower import LoadedModel, digest_of, position_table, save_model
from mvr_ray.core.encoding.unpadded_cpu import UnpaddedCpuBackbone, over_blocks, supports_unpadded_cpu

HEAD_STD = 0.02
"""Standard deviation of a new head's weights."""


class TaskModel(StoredModel):
    """A model and its tokenizer. Create it with `open`, `from_backbone` or `load` of a subclass."""

    task: ClassVar[str]
    """The `train.task` that trains it."""
    head: ClassVar[str]
    """The head's task, in the message about a folder without a head."""
    factory: ClassVar[str]
    """The class of transformers that opens it."""
    label_counts: ClassVar[tuple[int, ...]]
    """Numbers of outputs that a head may have; a new head has the first one."""
    special_group: ClassVar[str] = "head"
    default_spec: ClassVar[Any]
    length_setting: ClassVar[str]
    """The setting of `spec.max_tokens`, in the message about a model with fewer positions."""

    def __init__(self, weights: LoadedModel, spec: Any, name: str) -> None:
        """`name` is that of the folder, for messages. `spec` None: the default one."""
        super().__init__()
        model, tokenizer, self.new_weights = weights
        self.model = model
        self.tokenizer = tokenizer
        self.spec = spec or self.default_spec
        self.with_types = (
            "token_type_ids" in tokenizer.model_input_names
            and "token_type_ids" in inspect.signature(model.forward).parameters
            and getattr(model.config, "type_vocab_size", 2) > 1
        )
        if self.spec.max_tokens > self.positions:
            raise self.error_type(
                f"max_tokens is {self.spec.max_tokens}, but {self.what} {name} has {self.positions} positions; lower "
                f"{self.length_setting} to {self.positions} or less"
            )

    @classmethod
    def open_model(cls, folder: str) -> LoadedModel:
        """Load a model with the task's head; `missing` names weights of the head that the folder lacks."""
        from mvr_ray.core.encoding.backbones import open_task_model, read_config  # imports transformers

        config = read_config(folder, cls.what, cls.error_type)
        if not any(cls.factory.removeprefix("AutoModelFor") in name for name in config.architectures or ()):
            return open_task_model(folder, cls.what, cls.factory, cls.error_type, num_labels=cls.label_counts[0])
        if config.num_labels not in cls.label_counts:
            counts = " or ".join(map(str, cls.label_counts))
            raise cls.error_type(
                f"{cls.what} {folder} has {config.num_labels} labels; take a model for {cls.head} with {counts}"
            )
        return open_task_model(folder, cls.what, cls.factory, cls.error_type)

    @classmethod
    def open(cls, folder: str, spec: Any = None) -> Self:
        """Open a trained model by folder or hub name. Raises `error_type` where it has no head."""
        weights = cls.open_model(folder)
        if weights.missing:
            raise cls.error_type(
                f"{cls.what} {folder} has no head for {cls.head} (missing: {', '.join(weights.missing)}); take "
                f"a model that was trained for that, or train one from it (mvr-ray train CONFIG train.task={cls.task} "
                f"encoder.backbone={folder})"
            )
        return cls(weights, spec, folder).eval()

    @classmethod
    def from_backbone(cls, folder: str, spec: Any = None, seed: int = 0) -> Self:
        """Open a model to train: a head that the folder lacks is drawn from `seed`."""
        weights = cls.open_model(folder)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name in weights.missing:
                weight = weights.model.get_parameter(name)
                weight.zero_() if weight.ndim < 2 else weight.normal_(0.0, HEAD_STD, generator=generator)
        return cls(weights, spec, folder).eval()

    @classmethod
    def load(cls, folder: str | Path, spec: Any = None) -> Self:
        """Open what `save` wrote. Raises `error_type` if it is none, FingerprintError if its files have changed."""
        description = cls.read_description(Path(folder))
        model = cls.open(str(folder), spec)
        model.check_fingerprint(folder, description)
        return model

    def save(self, folder: str | Path) -> None:
        """Write a Hugging Face folder, and last its description."""
        save_model(self.model, self.tokenizer, Path(folder))
        self.write_description(Path(folder), {"format_version": FORMAT_VERSION, "fingerprint": self.fingerprint})

    @property
    def transformers(self) -> list[Any]:
        return [self.model]

    @abstractmethod
    def forward_unpadded(self, batch: Sequence[Any], backbone: UnpaddedCpuBackbone, whole: bool) -> Any:
        """Compute the result of `forward` from inputs laid end to end; `whole` as in `UnpaddedCpuBackbone.states`."""

    def infer(
        self,
        inputs: Sequence[Any],
        lengths: Sequence[int],
        tokens_per_batch: int,
        take: Callable[[list[int], Any], None],
    ) -> None:
        """Call `take` with the rows and the outputs of every batch; `lengths` are the inputs' numbers of tokens.

        With an unpadded pass inputs run end to end in blocks, else padded, `tokens_per_batch` a batch. `lengths` alone
        determine the batches.
        """
        body: Any = self.model.base_model
        is_unpadded = supports_unpadded_cpu(body)
        prepare = partial(UnpaddedCpuBackbone, body, body.get_input_embeddings())
        backbone = self.inference_cache.of(body, "unpadded", prepare) if is_unpadded else None

        def read(rows: list[int], whole: bool) -> None:
            batch = [inputs[row] for row in rows]
            take(rows, self(batch) if backbone is None else self.forward_unpadded(batch, backbone, whole))

        with self.inference():
            if backbone is not None:
                over_blocks(lengths, read)
            else:
                for rows in token_batches(lengths, tokens_per_batch):
                    read(rows, False)

    @property
    def first_position(self) -> int:
        """Position of a text's first token: tables of the RoBERTa kind begin after the padding id."""
        return position_table(self.model)[0] + 1

    @property
    def fingerprint(self) -> str:
        """16 hex digits over weights, tokenizer and architecture. Reads every weight: cache it."""
        digest = digest_of(self.model.config, self.tokenizer, self.model.state_dict())
        return hashlib.blake2b(digest, digest_size=8).hexdigest()

    @property
    def positions(self) -> int:
        """Number of positions of the model. Tables of the RoBERTa kind begin after the padding id."""
        padding_row, num_rows = position_table(self.model)
        return min(int(self.tokenizer.model_max_length), num_rows - padding_row - 1)

    def is_special(self, parameter: str) -> bool:
        return parameter.removeprefix("model.") in self.new_weights
