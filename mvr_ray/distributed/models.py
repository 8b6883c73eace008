"""Store models under their fingerprints, and find and open a reader or cross-encoder in any process of the cluster.

Workers read a stored one from the store; a folder must be on all machines, and a worker refuses one with another
fingerprint than the driver's. `store.model_records` finds them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cached_property
from typing import Any, NamedTuple

import torch

from mvr_ray.config import RunConfig
from mvr_ray.core.encoding.encoder import DualEncoder
from mvr_ray.core.encoding.stored_model import StoredModel
from mvr_ray.core.reading.cross_encoder import CrossEncoder, PairSpec
from mvr_ray.core.reading.reader import Reader, ReaderSpec
from mvr_ray.errors import FingerprintError, ResourceError
from mvr_ray.store import paths
from mvr_ray.store.files import Store
from mvr_ray.store.model_records import CROSS_ENCODERS, ENCODERS, READERS, ModelAddress, ModelKind, find_model

MODEL_CLASSES: dict[ModelKind, Any] = {ENCODERS: DualEncoder, READERS: Reader, CROSS_ENCODERS: CrossEncoder}


class WorkerModel(NamedTuple):
    """A model as the workers of a pool open it. `fingerprint` is that of the driver's files."""

    kind: ModelKind
    address: ModelAddress
    spec: Any
    fingerprint: str
    tokens_per_batch: int
    gpu: bool


class ModelWorker:
    """Applies a model to batches; one actor of a pool."""

    def __init__(self, task: WorkerModel) -> None:
        self.task = task

    @cached_property
    def model(self) -> Any:
        """Loaded by the first batch, with `gpu` on this process's GPU: an error in an actor's constructor would reach
        the driver as text only. Raises FingerprintError where it is not the driver's."""
        task, address = self.task, self.task.address
        model = open_model(task.kind, address, task.spec)
        if model.fingerprint != task.fingerprint:
            raise FingerprintError(
                f"{task.kind.what} {address.folder or address.path} is {model.fingerprint} on this machine and "
                f"{task.fingerprint} where the stage was started; put the same files on every machine"
            )
        return model.to("cuda") if task.gpu else model


def find_worker_model(run: RunConfig, kind: ModelKind, name: str, spec: Any) -> WorkerModel:
    """Find the model of a setting, and load it once for its fingerprint. Raises MissingInputError and the model's own
    error."""
    address = find_model(run, kind, name)
    fingerprint = open_model(kind, address, spec).fingerprint
    return WorkerModel(kind, address, spec, fingerprint, run.read.tokens_per_batch, run.resources.gpus_per_encoder > 0)


def reader_spec(run: RunConfig) -> ReaderSpec:
    """Return the `read` section as a ReaderSpec."""
    return ReaderSpec(**run.read.model_dump(include={field.name for field in fields(ReaderSpec)}))


def pair_spec(run: RunConfig) -> PairSpec:
    """Return the input settings of a cross-encoder, in training and in mining."""
    return PairSpec(run.mine.max_pair_tokens, run.read.max_question_tokens)


def open_model(kind: ModelKind, address: ModelAddress, spec: Any) -> Any:
    """Load a model."""
    if address.path:
        store, path = Store(address.store), address.path
        return store.open_copy(store.local_path(path), path, lambda folder: MODEL_CLASSES[kind].load(folder, spec))
    return MODEL_CLASSES[kind].open(address.folder, spec)


def save_model(store: Store, kind: ModelKind, name: str, model: StoredModel) -> str:
    """Save a model under its fingerprint, unless the store has it; returns the fingerprint. Raises StorageError if the
    disk is full."""
    fingerprint = model.fingerprint
    path = paths.model_dir(kind.store_dir, name, fingerprint)
    if store.exists(f"{path}/{model.description_file}"):
        return fingerprint
    with store.scratch() as folder:
        model.save(folder / fingerprint)
        description = (folder / fingerprint / model.description_file).read_bytes()
        store.upload_dir(folder / fingerprint, path, {model.description_file: description})
    return fingerprint


@contextmanager
def translate_out_of_memory(batch: str, setting: str) -> Iterator[None]:
    """Raise ResourceError, naming the setting to lower, if a batch does not fit in the GPU's memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ResourceError(f"the GPU lacks memory for a batch of {batch} ({error}); lower {setting}") from None
