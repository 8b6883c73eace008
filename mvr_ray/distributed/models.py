"""Store models under their fingerprints, and find and open a reader or cross-encoder in any process of the cluster.

A setting names a trained model of the store (NAME, or NAME/FINGERPRINT for an older one), a folder, `package:NAME/path`
or a hub model. Workers read a stored one from the store; a folder must be on all machines, and a worker refuses one
with another fingerprint than the driver's.

    <store>/readers/<name>/<fingerprint>/             a Hugging Face folder and reader.json
    <store>/readers/<name>/latest.json                the model that was trained last, and its metrics
    <store>/cross_encoders/...                        the same, with cross_encoder.json
    <store>/encoders/...                              the same, with encoder.json; found by `encoders`
"""

import errno
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from mvr_ray.checksums import FORMAT_VERSION, json_with_checksum, parse_json, require_format
from mvr_ray.config import RunConfig, resolve_path
from mvr_ray.core.encoding.encoder import DualEncoder
from mvr_ray.core.encoding.stored_model import StoredModel
from mvr_ray.core.reading.cross_encoder import CrossEncoder, PairSpec
from mvr_ray.core.reading.reader import Reader, ReaderSpec
from mvr_ray.core.reading.task_model import TaskModel
from mvr_ray.errors import FingerprintError, MissingInputError, ResourceError, StorageError
from mvr_ray.store import paths
from mvr_ray.store.files import Store

AnyModel = TypeVar("AnyModel")
M = TypeVar("M", bound=TaskModel)
RECORD_FORMAT = 1
"""The format of a record that names a model by its fingerprint, such as `latest.json`."""
_FULL = f"os error {errno.ENOSPC}"
"""Part of Rust libraries' error message for a full disk."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True)
class ModelKind(Generic[AnyModel]):
    """Properties of all models of a task: their class, their folder in the store, and the setting that names one."""

    model: type[AnyModel]
    store_dir: str
    setting: str


ENCODERS = ModelKind(DualEncoder, "encoders", "index.encoder")
READERS = ModelKind(Reader, "readers", "read.reader")
CROSS_ENCODERS = ModelKind(CrossEncoder, "cross_encoders", "mine.cross_encoder")


class ModelAddress(NamedTuple):
    """Location of a model: `stored` in the store, or, if that is empty, a folder or hub name."""

    store: str
    stored: str
    folder: str


class WorkerModel(NamedTuple):
    """A model as the workers of a pool open it. `fingerprint` is that of the driver's files."""

    kind: ModelKind[Any]
    address: ModelAddress
    spec: Any
    fingerprint: str
    tokens_per_batch: int
    threads: int
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
        model = open_model(task.kind, address, task.spec, task.threads)
        if model.fingerprint != task.fingerprint:
            raise FingerprintError(
                f"{task.kind.model.what} {address.folder or address.stored} is {model.fingerprint} on this machine and "
                f"{task.fingerprint} where the stage was started; put the same files on every machine"
            )
        return model.to("cuda") if task.gpu else model


def find_worker_model(run: RunConfig, kind: ModelKind[Any], name: str, spec: Any) -> WorkerModel:
    """Find the model of a setting, and load it once for its fingerprint. Raises MissingInputError and the model's own
    error."""
    address, resources = find_model(run, kind, name), run.resources
    fingerprint = open_model(kind, address, spec, resources.torch_threads).fingerprint
    gpu = resources.gpus_per_encoder > 0
    return WorkerModel(kind, address, spec, fingerprint, run.read.tokens_per_batch, resources.torch_threads, gpu)


def reader_spec(run: RunConfig) -> ReaderSpec:
    """The `read` section as a ReaderSpec."""
    return ReaderSpec(**run.read.model_dump(include={field.name for field in fields(ReaderSpec)}))


def pair_spec(run: RunConfig) -> PairSpec:
    """Input settings of a cross-encoder, in training and in mining."""
    return PairSpec(run.mine.max_pair_tokens, run.read.max_question_tokens)


def find_model(run: RunConfig, kind: ModelKind[Any], address: str) -> ModelAddress:
    """Find the model that `kind.setting` names. Raises MissingInputError, naming the stored ones."""
    store, what = Store(run.store.path), kind.model.what
    name, _, fingerprint = address.partition("/")
    is_stored = re.fullmatch(r"[\w.-]+", name) and store.exists(paths.latest_model(kind.store_dir, name))
    fingerprints = stored_fingerprints(store, kind, name) if is_stored else []
    if is_stored:
        fingerprint = fingerprint or str(latest_fingerprint(store, kind, name))
    if fingerprint in fingerprints:
        return ModelAddress(store.address, paths.model_dir(kind.store_dir, name, fingerprint), "")
    if address.startswith("package:") or Path(address).expanduser().is_dir():
        return ModelAddress(store.address, "", str(resolve_path(address).absolute()))
    if is_stored:
        raise MissingInputError(
            f"{what} {address!r} is not stored in {store.name}; of {name!r} there are: "
            f"{', '.join(fingerprints) or 'none'}; name one of these in {kind.setting}, or {name} for the newest"
        )
    if _HUB_NAME.fullmatch(address):
        return ModelAddress(store.address, "", address)
    names = [name for name in store.list(kind.store_dir) if store.exists(paths.latest_model(kind.store_dir, name))]
    raise MissingInputError(
        f"{what} {address!r} is neither stored in {store.name} (there are: {', '.join(names) or 'none'}) "
        f"nor a folder; train one (mvr-ray train CONFIG train.task={kind.model.task}), or name a folder or a hub model "
        f"(OWNER/MODEL) in {kind.setting}"
    )


def open_model(kind: ModelKind[M], address: ModelAddress, spec: Any, threads: int = 1) -> M:
    """Load a model."""
    torch.set_num_threads(threads)
    if address.stored:
        return kind.model.load(Store(address.store).local_path(address.stored), spec)
    return kind.model.open(address.folder, spec)


def latest_fingerprint(store: Store, kind: ModelKind[Any], name: str) -> str | None:
    """Fingerprint of the model of this name that was trained last, None without one.

    Raises FormatError for a record of a newer program, StorageError for a damaged one.
    """
    path = paths.latest_model(kind.store_dir, name)
    if not store.exists(path):
        return None
    return read_fingerprint(
        store, path, f"name one by its fingerprint in {kind.setting}", f"train the {kind.model.what} again"
    )


def read_fingerprint(store: Store, path: str, newer_cure: str, cure: str) -> str:
    """The fingerprint in a record of a model. Raises FormatError for one of a newer program, and StorageError for a
    damaged one; each says its cure."""
    where = store.where(path)
    record = parse_json(store.read_bytes(path), where, cure)
    require_format(record, RECORD_FORMAT, where, newer_cure)
    if "fingerprint" not in record:
        raise StorageError(f"{where} is damaged (it has no fingerprint); {cure}")
    return record["fingerprint"]


def stored_fingerprints(store: Store, kind: ModelKind[Any], name: str) -> list[str]:
    return [entry for entry in store.list(paths.models_dir(kind.store_dir, name)) if not entry.endswith(".json")]


def record_latest(store: Store, kind: ModelKind[Any], name: str, record: Mapping[str, Any]) -> None:
    """Record a model as the newest of its name; `record` is its fingerprint and its metrics."""
    fields = json_with_checksum({**record, FORMAT_VERSION: RECORD_FORMAT})
    store.write_bytes(paths.latest_model(kind.store_dir, name), (json.dumps(fields, indent=1) + "\n").encode())


def save_model(store: Store, kind: ModelKind[Any], name: str, model: StoredModel) -> str:
    """Save a model under its fingerprint, unless the store has it; returns the fingerprint. Raises StorageError if the
    disk is full."""
    fingerprint = model.fingerprint
    path = paths.model_dir(kind.store_dir, name, fingerprint)
    if store.exists(f"{path}/{model.description_file}"):
        return fingerprint
    with store.scratch() as folder:
        try:
            model.save(folder / fingerprint)
        except Exception as error:  # safetensors and tokenizers do not raise OSError
            if _FULL not in str(error) and getattr(error, "errno", None) != errno.ENOSPC:
                raise
            raise StorageError(
                f"cannot write {store.where(path)}: no space left ({store.free_bytes()} bytes free); free space and "
                f"run the same command again"
            ) from error
        description = (folder / fingerprint / model.description_file).read_bytes()
        store.upload_dir(folder / fingerprint, path, {model.description_file: description})
    return fingerprint


@contextmanager
def translate_out_of_memory(tokens_per_batch: int, setting: str) -> Iterator[None]:
    """Raise ResourceError, naming the setting to lower, if a batch does not fit in the GPU's memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ResourceError(
            f"the GPU lacks memory for a batch of {tokens_per_batch} tokens ({error}); lower {setting}"
        ) from None
