"""Encode vectors in eight bits a component, and measure how far each code is from its vector.

    c = rint(v / s),  s = max_d |v_d| / 127,  w = fl32(s c),  r = |v - w|

A scan that reads w in place of v errs by at most |q| r more (Cauchy-Schwarz). Passages that the bound cannot exclude
are scored with v, so the result is that of exhaustive search, from a quarter of float32's bytes.

Shapes: N vectors, D dimension.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mvr_ray.errors import ShardIndexError
from mvr_ray.types import FloatArray, IntArray

LEVELS = 127


class Codes(NamedTuple):
    """codes_ND int8; scale_N and residual_N float32, the residual an upper bound."""

    codes_ND: NDArray[np.int8]
    scale_N: NDArray[np.float32]
    residual_N: NDArray[np.float32]

    def rows(self, index: slice | IntArray) -> "Codes":
        """Select the codes of some vectors; a slice makes no copy."""
        return Codes._make(column[index] for column in self)


def encode(vectors_ND: FloatArray) -> Codes:
    """Encode vectors. Raises ShardIndexError where a vector holds NaN or infinity."""
    wide_ND = vectors_ND.astype(np.float64)
    largest_N = np.abs(wide_ND).max(axis=1, initial=0.0)
    if not np.isfinite(largest_N).all():
        row = int(np.flatnonzero(~np.isfinite(largest_N))[0])
        raise ShardIndexError(f"vector {row} of {len(vectors_ND)} has NaN or infinity; encode its passage again")
    scale_N = (largest_N / LEVELS).astype(np.float32)
    divisor_N1 = np.where(scale_N > 0, scale_N, 1).astype(np.float64)[:, None]
    codes_ND = np.clip(np.rint(wide_ND / divisor_N1), -LEVELS, LEVELS).astype(np.int8)
    distance_N = np.linalg.norm(wide_ND - decode(codes_ND, scale_N), axis=1) * (1 + 2.0**-40)
    return Codes(codes_ND, scale_N, np.nextafter(distance_N.astype(np.float32), np.float32(np.inf)))


def decode(codes_ND: NDArray[np.int8], scale_N: NDArray[np.float32]) -> NDArray[np.float32]:
    """Compute w by one multiplication in float32 a component, the same on every device."""
    return codes_ND.astype(np.float32) * scale_N[:, None]
