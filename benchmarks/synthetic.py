"""Make synthetic vectors of passages, to measure search at sizes that cannot be encoded here.

A passage's centre has cosine SIBLINGS with those of the 19 others of its article and STRANGERS with all the rest; its
views have a given cosine with each other; a question has cosine ABOUT with one view of its passage. Measured view-pair
cosines of trained multi-view encoders are 0.93 (MVR with a position for each viewer) and 0.96 (CAMVR), and 1.0000 when
they collapse; of the snippet means of MiniLM over 600 paragraphs of SQuAD 0.77. Vectors are exact in half precision, in
which they are stored.

`falling`: the variance falls from axis to axis, under a random rotation, as measured for those snippet means: like
exp(-i / 400) / (i + 7). Else it is equal in all directions, the hardest case for exact search, but harder for
approximate search than any real embedding.

Shapes: Q questions, P passages, V views per passage, N = P V vectors, D dimension.
"""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from mvr_ray.types import EmbeddingBlock, FloatArray

SIBLINGS, STRANGERS, ABOUT = 0.4, 0.1, 0.7
SIBLINGS_EACH = 20
PASSAGES_AT_ONCE = 10_000
SEEN, SNIPPET_MEANS, ALIKE = 0.93, 0.77, 0.9999


class Shape(NamedTuple):
    passages: int
    views: int
    dimension: int


def vectors(shape: Shape, view_cosine: float, seed: int = 0, falling: bool = False) -> Iterator[NDArray[np.float32]]:
    """Yield unit vectors, passage by passage, some thousands of passages at a time."""
    draw, settings = torch.Generator().manual_seed(seed), (shape.dimension, falling)
    everywhere = _unit(draw, 1, *settings)
    for first in range(0, shape.passages, PASSAGES_AT_ONCE):
        count = min(PASSAGES_AT_ONCE, shape.passages - first)
        articles = _unit(draw, -(-count // SIBLINGS_EACH), *settings).repeat_interleave(SIBLINGS_EACH, 0)[:count]
        centre = _mix([everywhere, articles, _unit(draw, count, *settings)], [STRANGERS, SIBLINGS - STRANGERS])
        own = _unit(draw, count * shape.views, *settings)
        views_ND = _mix([centre.repeat_interleave(shape.views, 0), own], [view_cosine])
        yield views_ND.half().float().numpy()


def questions(views_ND: FloatArray, count: int, seed: int = 1, falling: bool = False) -> NDArray[np.float32]:
    """Draw unit vectors, each near a random view."""
    rows = np.random.default_rng(seed).choice(len(views_ND), count, replace=False)
    about = torch.from_numpy(np.array(views_ND[rows], np.float32))
    noise = _unit(torch.Generator().manual_seed(seed), count, views_ND.shape[1], falling)
    return _mix([about, noise], [ABOUT**2]).numpy()


def block(views_ND: FloatArray, num_views: int, ids: list[str] | None = None) -> EmbeddingBlock:
    """Return the vectors as a shard whose passages all have `num_views` views; ids are their numbers by default."""
    count = len(views_ND) // num_views
    numbers_N = np.tile(np.arange(num_views, dtype=np.int16), count)
    ids = [f"{row:08d}" for row in range(count)] if ids is None else ids
    return EmbeddingBlock(ids, np.arange(count + 1, dtype=np.int64) * num_views, numbers_N, views_ND)


@cache
def _turn(dimension: int) -> Tensor:
    """Return the matrix that gives independent normal numbers the variance above."""
    place_D = torch.arange(dimension)
    turn_DD = torch.linalg.qr(torch.randn(dimension, dimension, generator=torch.Generator().manual_seed(7)))[0]
    return (torch.exp(-place_D / 400) / (place_D + 7)).sqrt()[:, None] * turn_DD


def _unit(draw: torch.Generator, count: int, dimension: int, falling: bool) -> Tensor:
    vectors_ND = torch.randn(count, dimension, generator=draw)
    return normalize(vectors_ND @ _turn(dimension) if falling else vectors_ND, dim=1)


def _mix(parts: list[Tensor], shares: list[float]) -> Tensor:
    """Mix nearly orthogonal parts to unit vectors: two mixtures with a common part have its share as cosine."""
    shares = [*shares, 1 - sum(shares)]
    return normalize(sum((part * share**0.5 for part, share in zip(parts, shares)), torch.zeros(())), dim=1)
