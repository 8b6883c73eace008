"""Read data sets of the Hugging Face `datasets` library: by name from the hub, or from a local folder.

hf:OWNER/NAME           a data set of the hub, streamed
hf:OWNER/NAME/SUBSET    one of its subsets (configurations)
FOLDER                  what `Dataset.save_to_disk` wrote, or files that `load_dataset` reads
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mvr_ray.errors import DataError, MissingInputError

SCHEME = "hf:"


def open_dataset(path: str, split: str) -> Iterable[Any]:
    """Open the rows of a split. Raises MissingInputError if the library, the data set or the split is missing."""
    try:
        import datasets
    except ImportError:
        raise MissingInputError(
            f"source {path}: the library `datasets` is not installed; install it (pip install 'mvr-ray[datasets]')"
        ) from None
    try:
        if not path.startswith(SCHEME):
            return _open_folder(Path(path), split)
        owner, _, rest = path.removeprefix(SCHEME).partition("/")
        name, _, subset = rest.partition("/")
        data = datasets.load_dataset(f"{owner}/{name}" if name else owner, subset or None, split=split, streaming=True)
    except DataError:
        raise
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise MissingInputError(
            f"source {path}: split {split!r} cannot be opened: {error}; check name and `split`, and for a data set of "
            f"the hub the connection"
        ) from error
    return data


def _open_folder(folder: Path, split: str) -> Iterable[Any]:
    import datasets

    if not (folder / "dataset_dict.json").is_file() and not (folder / "dataset_info.json").is_file():
        return datasets.load_dataset(str(folder), split=split)
    dataset = datasets.load_from_disk(str(folder))
    if isinstance(dataset, datasets.Dataset):
        return dataset
    if split not in dataset:
        raise DataError(f"source {folder} has no split {split!r}; it has {', '.join(sorted(map(str, dataset)))}")
    return dataset[split]
