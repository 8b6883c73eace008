"""Read run files, also those on an object store, such as the `run.yaml` of an index that `Index.build` made there."""

from collections.abc import Sequence
from pathlib import Path

from mvr_ray.config import RunConfig, load_run
from mvr_ray.errors import ConfigError
from mvr_ray.store import paths
from mvr_ray.store.files import Store, split_address


def load_run_at(address: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read the run file at a path or an address as `load_run` does. The store of a `run.yaml` in the root of a store is
    that one, though it was copied or moved. Raises MissingInputError for an address without a file."""
    if "://" not in str(address):
        return load_run(address, tuple(overrides))
    folder, name = split_address(str(address))
    store = Store(folder)
    is_of_store = name == paths.RUN_FILE and store.list(paths.INDEXES)
    with store.scratch() as alone:  # so that no earlier copy of another file is its base
        file = alone / name
        file.write_bytes(store.read_bytes(name))
        try:
            return load_run(file, (*([f"store.path={folder}"] if is_of_store else []), *overrides))
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(alone), store.name)) from None
