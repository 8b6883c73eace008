"""Which reader a stage works with, and opening it in any process of the cluster.

`read.reader` names one that training stored (NAME, or NAME/FINGERPRINT for an older one), a folder, `package:NAME/path`
or a hub model. A stored one reaches every worker through the store; a folder must be on all machines, and a worker
refuses one that is not what the driver has.
"""

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import torch

from mvr_ray.config import RunConfig, resolve_path
from mvr_ray.core.reader import Reader, ReaderSpec
from mvr_ray.errors import FingerprintError, MissingInputError
from mvr_ray.store import layout
from mvr_ray.store.files import Store

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class ReaderAddress(NamedTuple):
    """Where a reader is: at `stored` in the store, or, where that is empty, a folder or hub name."""

    store: str
    stored: str
    folder: str


def reader_spec(run: RunConfig) -> ReaderSpec:
    """The `read` section as core code takes it."""
    values = run.read.model_dump()
    return ReaderSpec(**{field.name: values[field.name] for field in fields(ReaderSpec)})


def find_reader(run: RunConfig) -> ReaderAddress:
    """The reader that `read.reader` names. Raises MissingInputError, naming the stored ones."""
    store, wanted = Store(run.store.path), run.read.reader
    name, _, fingerprint = wanted.partition("/")
    newest = latest_fingerprint(store, name) if re.fullmatch(r"[\w.-]+", name) else None
    kept = [entry for entry in store.list(layout.readers_dir(name)) if not entry.endswith(".json")] if newest else []
    if newest and (fingerprint or newest) in kept:
        return ReaderAddress(store.address, layout.reader_dir(name, fingerprint or newest), "")
    if wanted.startswith("package:") or Path(wanted).expanduser().is_dir():
        return ReaderAddress(store.address, "", str(resolve_path(wanted).absolute()))
    if newest:
        raise MissingInputError(
            f"reader {wanted!r} is not stored in {store.name}; of {name!r} there are: {', '.join(kept) or 'none'}; "
            f"name one of these in read.reader, or {name} for the newest"
        )
    if _HUB_NAME.fullmatch(wanted):
        return ReaderAddress(store.address, "", wanted)
    raise MissingInputError(
        f"reader {wanted!r} is neither stored in {store.name} (there are: {', '.join(_stored(store)) or 'none'}) nor a "
        f"folder; train one (mvr-ray train CONFIG train.task=reader), or name a folder or a hub model (OWNER/MODEL) in "
        f"read.reader"
    )


def open_reader(
    address: ReaderAddress, spec: ReaderSpec, *, expected: str | None = None, threads: int = 1, gpu: bool = False
) -> Reader:
    """Load a reader; on the GPU that this process was given if `gpu`.

    Raises FingerprintError where it is not the `expected` one.
    """
    torch.set_num_threads(threads)
    if address.stored:
        reader = Reader.load(Store(address.store).local_path(address.stored), spec)
    else:
        reader = Reader.open(address.folder, spec)
    if expected and reader.fingerprint != expected:
        raise FingerprintError(
            f"reader {address.folder or address.stored} is {reader.fingerprint} on this machine and {expected} where "
            f"the stage was started; put the same files on every machine"
        )
    return reader.to("cuda") if gpu else reader


def latest_fingerprint(store: Store, name: str) -> str | None:
    """Fingerprint of the reader of this name that was trained last, None where none was."""
    path = layout.latest_reader(name)
    return json.loads(store.read_bytes(path))["fingerprint"] if store.exists(path) else None


def save_reader(store: Store, name: str, reader: Reader) -> str:
    """Put a reader in the store under its fingerprint, which is returned; an equal one that is there stays."""
    fingerprint = reader.fingerprint
    with store.scratch() as folder:
        reader.save(folder / fingerprint)
        store.upload_dir(folder / fingerprint, layout.reader_dir(name, fingerprint))
    return fingerprint


def _stored(store: Store) -> list[str]:
    return [name for name in store.list(layout.readers_root()) if store.exists(layout.latest_reader(name))]
