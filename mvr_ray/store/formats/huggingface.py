"""Read data sets of the Hugging Face `datasets` library: by name from the hub, or from a local folder.

hf:OWNER/NAME           a data set of the hub, streamed
hf:OWNER/NAME/SUBSET    one of its subsets (configurations)
FOLDER                  what `Dataset.save_to_disk` wrote, or files that `load_dataset` reads
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mvr_ray.errors import DataError, MissingInputError, first_line

SCHEME = "hf:"
SAVED_NAMES = ("dataset_dict.json", "dataset_info.json")
"""Files in a folder that `Dataset.save_to_disk` wrote."""


def dataset_rows(path: str, split: str) -> Iterator[Any]:
    """Yield the rows of a split. Raises MissingInputError if the library, the data set or the split is missing, and
    DataError with the number of the row, from 0, where it cannot be read."""
    rows, number = _open(path, split), 0
    try:
        for row in rows:
            yield row
            number += 1
    except Exception as error:  # of the library, of its readers, of the network, or of the data set's own types
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(
            f"source {path}: row {number} of split {split!r} cannot be read ({reason}); see whether the hub "
            f"answers and run the same command again, or correct the data set"
        ) from error


def _open(path: str, split: str) -> Iterable[Any]:
    try:
        import datasets
    except ImportError:
        raise MissingInputError(
            f"source {path}: the library `datasets` is not installed; install it (pip install 'mvr-ray[datasets]')"
        ) from None
    try:
        if path.startswith(SCHEME):
            owner, _, rest = path.removeprefix(SCHEME).partition("/")
            name, _, subset = rest.partition("/")
            name = f"{owner}/{name}" if name else owner
            return datasets.load_dataset(name, subset or None, split=split, streaming=True)
        if not any((Path(path) / name).is_file() for name in SAVED_NAMES):
            return datasets.load_dataset(path, split=split)
        data = datasets.load_from_disk(path)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise MissingInputError(
            f"source {path}: split {split!r} cannot be opened: {error}; check name and `split`, and for a data set of "
            f"the hub the connection"
        ) from error
    if isinstance(data, datasets.Dataset):
        return data
    if split not in data:
        raise DataError(f"source {path} has no split {split!r}; it has {', '.join(sorted(map(str, data)))}")
    return data[split]
