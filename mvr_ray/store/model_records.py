"""Names models in the store by their fingerprints, and finds the one that a setting names, without loading it.

A setting names a trained model of the store (NAME, or NAME/FINGERPRINT for an older one), a folder, `package:NAME/path`
or a hub model.

    <store>/readers/<name>/<fingerprint>/             a Hugging Face folder and reader.json
    <store>/readers/<name>/latest.json                the model that was trained last, and its metrics
    <store>/cross_encoders/...                        the same, with cross_encoder.json
    <store>/encoders/...                              the same, with encoder.json; found by `distributed.encoders`
"""

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from mvr_ray.checksums import FORMAT_VERSION, json_with_checksum, parse_json, require_format
from mvr_ray.config import RunConfig, resolve_path
from mvr_ray.errors import MissingInputError, StorageError
from mvr_ray.store import paths
from mvr_ray.store.files import Store

RECORD_FORMAT = 1
"""The format of a record that names a model by its fingerprint, such as `latest.json`."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class ModelKind(NamedTuple):
    """Properties of all models of a task: their folder in the store, the setting that names one, their name in
    messages, and the task."""

    store_dir: str
    setting: str
    what: str
    task: str


ENCODERS = ModelKind("encoders", "index.encoder", "encoder snapshot", "retriever")
READERS = ModelKind("readers", "read.reader", "reader", "reader")
CROSS_ENCODERS = ModelKind("cross_encoders", "mine.cross_encoder", "cross-encoder", "cross_encoder")


class ModelAddress(NamedTuple):
    """Location of a model: `path` in the store, or, if that is empty, a folder or hub name."""

    store: str
    path: str
    folder: str


def find_model(run: RunConfig, kind: ModelKind, address: str) -> ModelAddress:
    """Find the model that `kind.setting` names. Raises MissingInputError, naming the stored ones."""
    store, what = Store(run.store.path), kind.what
    name, _, fingerprint = address.partition("/")
    is_stored = re.fullmatch(r"\w[\w.-]*", name) and store.exists(paths.latest_model(kind.store_dir, name))
    fingerprints = stored_fingerprints(store, kind, name) if is_stored else []
    if is_stored:
        fingerprint = fingerprint or str(latest_fingerprint(store, kind, name))
    if fingerprint in fingerprints:
        return ModelAddress(store.address, paths.model_dir(kind.store_dir, name, fingerprint), "")
    if address.startswith("package:") or resolve_path(address).is_dir():
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
        f"nor a folder; train one (mvr-ray train CONFIG train.task={kind.task}), or name a folder or a hub model "
        f"(OWNER/MODEL) in {kind.setting}"
    )


def latest_fingerprint(store: Store, kind: ModelKind, name: str) -> str | None:
    """Return the fingerprint of the model of this name that was trained last, None without one.

    Raises FormatError for a record of a newer program, StorageError for a damaged one.
    """
    path = paths.latest_model(kind.store_dir, name)
    if not store.exists(path):
        return None
    return read_fingerprint(
        store, path, f"name one by its fingerprint in {kind.setting}", f"train the {kind.what} again"
    )


def latest_backbone(store: Store, name: str) -> str | None:
    """Return the backbone of the encoder of this name that was trained last; None where its record, which
    `latest_fingerprint` checks, names none."""
    path = paths.latest_model(ENCODERS.store_dir, name)
    return parse_json(store.read_bytes(path), store.where(path)).get("backbone")


def read_fingerprint(store: Store, path: str, newer_cure: str, cure: str) -> str:
    """Read the fingerprint in a record of a model. Raises FormatError for one of a newer program, and StorageError for
    a damaged one; each says its cure."""
    where = store.where(path)
    record = parse_json(store.read_bytes(path), where, cure)
    require_format(record, RECORD_FORMAT, where, newer_cure)
    if "fingerprint" not in record:
        raise StorageError(f"{where} is damaged (it has no fingerprint); {cure}")
    return record["fingerprint"]


def stored_fingerprints(store: Store, kind: ModelKind, name: str) -> list[str]:
    return [entry for entry in store.list(paths.models_dir(kind.store_dir, name)) if not entry.endswith(".json")]


def starting_name(run: RunConfig, start: str) -> tuple[str, str]:
    """Return the name and fingerprint that `train.init_from` stands for: the newest of this name, or a fingerprint of
    `encoder.name`."""
    newest = latest_fingerprint(Store(run.store.path), ENCODERS, start)
    return (start, newest) if newest else (run.encoder.name, start)


def require_snapshot(store: Store, name: str, fingerprint: str) -> None:
    """Raise MissingInputError, naming the existing ones, if the store lacks an encoder snapshot."""
    path = paths.encoder_dir(name, fingerprint)
    if not store.exists(f"{path}/{paths.ENCODER_JSON}"):
        fingerprints = stored_fingerprints(store, ENCODERS, name)
        raise MissingInputError(
            f"encoder snapshot {fingerprint!r} not found ({store.where(path)}); of {name!r} there are: "
            f"{', '.join(fingerprints) or 'none'}. Train it (mvr-ray train CONFIG), copy it there, or name another in "
            f"index.encoder"
        )


def record_latest(store: Store, kind: ModelKind, name: str, record: Mapping[str, Any]) -> None:
    """Record a model as the newest of its name; `record` is its fingerprint and its metrics."""
    fields = json_with_checksum({**record, FORMAT_VERSION: RECORD_FORMAT})
    store.write_bytes(paths.latest_model(kind.store_dir, name), (json.dumps(fields, indent=1) + "\n").encode())
