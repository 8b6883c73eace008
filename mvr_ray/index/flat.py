"""Search all vectors of a shard exactly, on a CPU or a GPU.

Shapes: Q queries, D dimension.
"""

import ctypes
import mmap
from collections.abc import Collection, Iterator, Sequence
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from mvr_ray.core.searching.codes import Codes, encode
from mvr_ray.core.searching.engines import make_kernel, make_small_batch_kernel
from mvr_ray.core.searching.exact import check_k, check_queries
from mvr_ray.core.searching.kernels import Kernel, TorchKernel
from mvr_ray.core.searching.scan import Scan
from mvr_ray.errors import ShardIndexError
from mvr_ray.index.base import ShardIndex, count_vectors
from mvr_ray.types import CountedHits, EmbeddingBlock, FloatArray, IntArray

RESIDENT_SHARE = 0.8
_ROWS = 4096
_PAGES_SAMPLED = 64

CODES_FILE, SCALES_FILE = "codes.npy", "scales.npy"
FIRST_CODES_FILE, FIRST_SCALES_FILE = "first-codes.npy", "first-scales.npy"
"""In a shard with files of changes, the codes of its first file's vectors. Opening the shard encodes the changes, so an
update writes no codes."""


def build_codes(blocks: Sequence[EmbeddingBlock], folder: Path) -> list[str]:
    """Write the int8 codes of all vectors in order, with scales and residuals (`searching.codes`)."""
    count, dimension = count_vectors(blocks), blocks[0].vectors_ND.shape[1]
    with (folder / CODES_FILE).open("wb") as codes_file, (folder / SCALES_FILE).open("wb") as scales_file:
        _write_header(codes_file, np.int8, (count, dimension))
        _write_header(scales_file, np.float32, (count, 2))
        for codes in chain.from_iterable(map(_encode_parts, blocks)):
            codes_file.write(codes.codes_ND.tobytes())
            scales_file.write(np.stack([codes.scale_N, codes.residual_N], axis=1).tobytes())
    return [CODES_FILE, SCALES_FILE]


def _encode_parts(block: EmbeddingBlock) -> Iterator[Codes]:
    """Encode the vectors of a block, some thousands at a time, since encoding copies them to float64 several times."""
    for at in range(0, max(len(block.vectors_ND), 1), _ROWS):
        yield encode(block.vectors_ND[at : at + _ROWS])


def _write_header(file: BinaryIO, dtype: type[np.generic], shape: tuple[int, int]) -> None:
    """Write the header of an .npy file whose rows are written later; a mapped file would end the process by SIGBUS on a
    full disk."""
    description = np.lib.format.dtype_to_descr(np.dtype(dtype))
    np.lib.format.write_array_header_1_0(file, {"descr": description, "fortran_order": False, "shape": shape})


def shared_codes(names: Collection[str], has_changes: bool) -> dict[str, str]:
    """Map the code files of the shard that shares its first file to their names in a shard with changes; `names` are
    that shard's files. Empty where it has changes itself and its codes include them."""
    if FIRST_CODES_FILE in names:
        return {FIRST_CODES_FILE: FIRST_CODES_FILE, FIRST_SCALES_FILE: FIRST_SCALES_FILE}
    has_codes = CODES_FILE in names and not has_changes
    return {CODES_FILE: FIRST_CODES_FILE, SCALES_FILE: FIRST_SCALES_FILE} if has_codes else {}


def open_codes(folder: Path, blocks: Sequence[EmbeddingBlock], *, is_changed: bool = False) -> list[Codes]:
    """Map the codes of each block from their file, and read scales and residuals. Raises ShardIndexError.

    Codes of the first file of a shard with changes need `StoredBlocks`, whose last block has the changes: it is encoded
    here.
    """
    of_first = (folder / FIRST_CODES_FILE).exists()
    names = (FIRST_CODES_FILE, FIRST_SCALES_FILE) if of_first else (CODES_FILE, SCALES_FILE)
    try:
        codes_ND = np.load(folder / names[0], mmap_mode="r")
        scales_N2 = np.load(folder / names[1])
    except (OSError, ValueError) as error:
        raise ShardIndexError(f"no eight-bit codes can be read in {folder} ({error}); build the index again") from error
    codes = Codes(codes_ND, np.ascontiguousarray(scales_N2[:, 0]), np.ascontiguousarray(scales_N2[:, 1]))
    edges = np.cumsum([0, *(len(block.vectors_ND) for block in blocks)])
    num_coded = int(np.searchsorted(edges, len(codes_ND), side="right")) - 1
    if edges[num_coded] != len(codes_ND) or of_first != is_changed or (num_coded < len(blocks) and not of_first):
        raise ShardIndexError(
            f"{folder / names[0]} has codes of {len(codes_ND)} vectors, the embeddings are {edges[-1]}; "
            f"build the index again"
        )
    stored_codes = [codes.rows(slice(low, high)) for low, high in pairwise(edges[: num_coded + 1])]
    new_codes = (Codes(*map(np.concatenate, zip(*_encode_parts(block)))) for block in blocks[num_coded:])
    return [*stored_codes, *new_codes]


class FlatIndex(ShardIndex):
    """Scans the vectors, or codes in their place. The scanned data are copied once to a GPU if they fit there, else
    streamed. Batches of queries scan fp16 vectors where these are in memory and the processor scans them faster than
    their codes."""

    exact = True

    def __init__(
        self,
        blocks: Sequence[EmbeddingBlock],
        rows: Sequence[IntArray] | None = None,
        *,
        codes: Sequence[Codes] | None = None,
        device: str = "cpu",
        threads: int | None = None,
        kernel: Kernel | None = None,
    ) -> None:
        """`kernel` scans alone, in place of the fastest of the device."""
        self._small_batch, is_half = None, all(block.vectors_ND.dtype == np.float16 for block in blocks)
        if kernel is None:
            kernel, with_codes = make_kernel(device, threads), codes is not None
            self._small_batch = make_small_batch_kernel(device, threads, with_codes=with_codes, is_half=is_half)
        arrays = [block.vectors_ND for block in blocks] if codes is None else [own.codes_ND for own in codes]
        num_bytes = sum(own_ND.nbytes for own_ND in arrays)
        resident = isinstance(kernel, TorchKernel) and _fits(kernel, num_bytes)
        super().__init__(Scan(blocks, kernel, rows, codes=codes, resident=resident))
        is_faster = codes is not None and is_half and kernel.halves_are_faster
        self._vector_scan = self.scan.of_vectors() if is_faster else None
        self._small_batch_scan = Scan(blocks, self._small_batch, rows, codes=codes) if self._small_batch else None

    def search_with_counts(
        self, queries_QD: FloatArray, k: int, mask_P: NDArray[np.bool_] | None = None
    ) -> CountedHits:
        """Search, and count the passages that the scan could not exclude and scored exactly. `frontier_Q` is the
        exact score of the best passage left out, which certifies the hits; a mask excludes passages from both."""
        queries_QD = check_queries(queries_QD, self.dimension)
        share = 1.0 if mask_P is None else np.count_nonzero(mask_P) / max(len(mask_P), 1)
        return self.scan_for(len(queries_QD), share).search_with_counts(queries_QD, check_k(k), mask_P)

    def scan_for(self, num_queries: int, share: float = 1.0) -> Scan:
        """Choose the fastest scan, of codes or of vectors, for a number of queries and the share of passages that pass
        a filter: all give the same hits."""
        kernel = self._small_batch
        if kernel and self._small_batch_scan and kernel.is_fastest(num_queries, share):
            return self._small_batch_scan
        if self._vector_scan is None or num_queries < 2:
            return self.scan
        in_memory = all(_in_memory(block.vectors_ND) for block in self.scan.table.blocks)
        return self._vector_scan if in_memory else self.scan


_libc = cache(lambda: ctypes.CDLL(None))


def _in_memory(array: np.ndarray) -> bool:
    """Return whether evenly spaced pages of an array, which may be mapped from a file, are all in memory now."""
    mincore, address, state, page = _libc().mincore, array.ctypes.data, ctypes.c_ubyte(), mmap.PAGESIZE
    size, result = ctypes.c_size_t(1), ctypes.byref(state)
    for offset in np.linspace(0, max(array.nbytes - 1, 0), _PAGES_SAMPLED).astype(np.int64).tolist():
        start = (address + offset) // page * page
        if mincore(ctypes.c_void_p(start), size, result) or not state.value & 1:
            return False
    return True


def _fits(kernel: TorchKernel, num_bytes: int) -> bool:
    import torch

    return kernel.device.type == "cuda" and num_bytes < RESIDENT_SHARE * torch.cuda.mem_get_info(kernel.device)[0]
