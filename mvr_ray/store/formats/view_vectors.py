"""Read and write the view vectors of passages as a Parquet file: those of an index, and those of another program.

    passage_id   text; in files of others also a whole number
    view         whole number from 0, each once a passage; from `num_views` on those of feedback
    vector       list of floating-point numbers, as many as in every other row

One row a view; files of others have them in any order. A file of an index has its `num_views` in the metadata of the
Parquet schema, by which `read_vectors` omits the views of feedback.

Shapes: N view vectors, V views of one passage, D dimension.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mvr_ray.errors import DataError, MissingInputError, count_noun
from mvr_ray.store.embeddings import Dtype, arrow_rows, join_small_blocks
from mvr_ray.store.formats.records import is_id
from mvr_ray.store.local_files import finished_file
from mvr_ray.types import EmbeddingBlock, FloatArray, Progress, no_progress

TYPES = {"passage_id": pa.large_string(), "view": pa.int64(), "vector": pa.large_list(pa.float32())}

NUM_VIEWS = b"mvr_ray.num_views"
"""The key of that number in a file's metadata; views from it on are those of feedback."""


def read_vectors(path: Path, dtype: Dtype) -> EmbeddingBlock:
    """Read a file into memory, in `dtype`, by passage, without the views of feedback in a file of `write_vectors`.
    Raises MissingInputError, and DataError for other columns, another number of numbers, one that is missing or not
    finite, and a view that occurs twice."""
    _require_file(path)
    try:
        table = pq.read_table(path, columns=list(TYPES))
        if own_views := (table.schema.metadata or {}).get(NUM_VIEWS):
            table = table.filter(pc.field("view") < int(own_views))
        columns = [table[name] for name in TYPES]
        kinds = columns[1].type, getattr(columns[2].type, "value_type", columns[2].type)
        if not pa.types.is_integer(kinds[0]) or not pa.types.is_floating(kinds[1]):
            raise pa.ArrowInvalid("view and vector are {} and {}".format(*(column.type for column in columns[1:])))
        ids_N, views_N, vectors_N = (
            pa.concat_arrays(one.cast(TYPES[name]).chunks) for name, one in zip(TYPES, columns)
        )
        ids_N.validate(full=True)  # text is UTF-8
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise _other_file(path, error) from None
    dimensions = np.unique(np.diff(vectors_N.offsets)).tolist()
    num_nulls = ids_N.null_count + views_N.null_count + vectors_N.null_count
    if num_nulls or len(dimensions) != 1 or not dimensions[0]:
        lengths, nulls = ", ".join(map(str, dimensions[:5])) or "no", f", and {count_noun(num_nulls, 'null')}"
        raise DataError(
            f"{path.name}: vectors of {lengths} numbers{nulls * bool(num_nulls)}; give each row an id, a view and "
            f"equally many"
        )
    rows = pa.table({"id": ids_N, "view": views_N, "row": arrow_rows(np.arange(len(ids_N)))})
    rows = rows.sort_by([("id", "ascending"), ("view", "ascending")])
    ids, numbers_N = rows["id"].to_pylist(), rows["view"].to_numpy()
    vectors_ND = vectors_N.flatten().to_numpy(zero_copy_only=False).reshape(-1, dimensions[0])
    with np.errstate(over="ignore"):
        vectors_ND = vectors_ND.astype(np.float16 if dtype == "fp16" else np.float32)[rows["row"].to_numpy()]
    firsts_P = [row for row, name in enumerate(ids) if not row or name != ids[row - 1]]
    block = EmbeddingBlock([ids[row] for row in firsts_P], np.array([*firsts_P, len(ids)]), numbers_N, vectors_ND)
    _refuse(path, block, ~np.isfinite(vectors_ND).all(1), f"has a number that is missing, or not finite in {dtype}")
    is_twice_N = np.append(np.diff(numbers_N) == 0, False)
    is_twice_N[block.row_ptr[1:] - 1] = False
    _refuse(path, block, is_twice_N, "has a view twice")
    return block


def vector_dimension(path: Path) -> int:
    """Return the dimension of a file's vectors from its metadata. Raises as `read_vectors` for another file."""
    _require_file(path)
    try:
        group = pq.read_metadata(path).row_group(0)
        columns = [group.column(number) for number in range(group.num_columns)]
        [num_numbers] = [one.num_values for one in columns if one.path_in_schema.partition(".")[0] == "vector"]
        return num_numbers // group.num_rows
    except (OSError, ValueError, IndexError, ZeroDivisionError, pa.ArrowException) as error:
        raise _other_file(path, error) from None


def require_shape(path: Path, block: EmbeddingBlock, dimension: int, num_views: int, normalize: bool) -> None:
    """Raise DataError unless vectors have this dimension, numbers below `num_views` and, with `normalize`, length 1."""
    if block.vectors_ND.shape[1] != dimension:
        raise DataError(f"{path.name}: vectors of {block.vectors_ND.shape[1]} numbers, the index has {dimension}")
    is_outside_N = (block.view_numbers_N < 0) | (block.view_numbers_N >= num_views)
    _refuse(path, block, is_outside_N, f"has a view outside 0..{num_views - 1} (encoder.num_views is {num_views})")
    if normalize:
        cure = "scale vectors to length 1, or set encoder.normalize=false: the score is then any inner product"
        lengths_N = np.sqrt(np.einsum("nd,nd->n", block.vectors_ND, block.vectors_ND, dtype=np.float32))
        _refuse(path, block, np.abs(lengths_N - 1) > 0.01, f"has a vector of another length than 1; {cure}")


def write_pairs(path: Path, vectors: Any) -> None:
    """Write pairs of an id and its vector_D or vectors_VD, or a mapping of ids to these, as such a file. Raises
    DataError, with the number of the pair, for anything else."""
    ids_N: list[str] = []
    arrays: list[FloatArray] = []
    for number, pair in enumerate(vectors.items() if isinstance(vectors, Mapping) else vectors):
        name, vectors_VD = None, np.zeros((0, 0), np.float32)
        with suppress(TypeError, ValueError):  # as for rows of several lengths
            name, values = pair
            vectors_VD = np.atleast_2d(np.asarray(values, np.float32))
        is_matrix = vectors_VD.ndim == 2 and vectors_VD.size > 0
        fits = is_matrix and vectors_VD.shape[1] == (arrays or [vectors_VD])[0].shape[1]
        if not fits or not is_id(name):
            expected = f" of {arrays[0].shape[1]} numbers" if arrays else ""
            raise DataError(
                f"vectors: pair {number} is {pair!r:.60}; give an id and a vector{expected}, or a row a view"
            )
        ids_N += [str(name)] * len(vectors_VD)
        arrays.append(vectors_VD)
    if not arrays:
        raise DataError("vectors: there are none; give pairs of an id and its vectors, or a Parquet file")
    lists = pa.FixedSizeListArray.from_arrays(pa.array(np.concatenate(arrays, axis=None)), arrays[0].shape[1])
    views_N = np.concatenate([np.arange(len(vectors_VD)) for vectors_VD in arrays])
    pq.write_table(pa.table([pa.array(ids_N), pa.array(views_N), lists], list(TYPES)), path)


def write_vectors(
    path: Path,
    blocks: Iterable[EmbeddingBlock],
    dimension: int,
    num_views: int,
    total: int,
    progress: Progress = no_progress,
) -> int:
    """Write the views of blocks, `total` together, as row groups of some 4,096 passages. Those from `num_views` on are
    of feedback. Returns how many views there were."""
    vector_type = pa.list_(pa.field("element", pa.float32(), False), dimension)
    schema = pa.schema(
        [("passage_id", pa.string()), ("view", pa.int16()), ("vector", vector_type)], {NUM_VIEWS: str(num_views)}
    )
    count = 0
    with finished_file(path) as aside, pq.ParquetWriter(aside, schema, compression="zstd") as file:
        for block in join_small_blocks(blocks):
            rows_N = np.repeat(np.arange(len(block.ids)), np.diff(block.row_ptr))
            flat = pa.array(block.vectors_ND.astype(np.float32).reshape(-1))
            vectors = pa.FixedSizeListArray.from_arrays(flat, type=vector_type)
            columns = [pa.array(block.ids, pa.string()).take(pa.array(rows_N)), pa.array(block.view_numbers_N), vectors]
            file.write_batch(pa.record_batch(columns, schema=schema))
            count += len(rows_N)
            progress("vectors written", count, total)
    return count


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise MissingInputError(f"vectors {path} does not exist or is no file; name a Parquet file")


def _other_file(path: Path, error: Exception) -> DataError:
    return DataError(
        f"{path.name} is no Parquet file with columns passage_id (text), view (whole number) and vector (list of "
        f"floating-point numbers): {error}"
    )


def _refuse(path: Path, block: EmbeddingBlock, wrong_N: Any, problem: str) -> None:
    if wrong_N.any():
        row = int(np.searchsorted(block.row_ptr, np.argmax(wrong_N), "right")) - 1
        raise DataError(f"{path.name}: passage {block.ids[row]!r} {problem}")
