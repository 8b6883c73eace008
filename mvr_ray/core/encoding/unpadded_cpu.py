"""Run a transformer on a CPU over texts laid end to end: no padding, and weights reordered once.

    h = LN(word + position + type)
    each layer:  a = LN(h + W_o attention(W_qkv h)),   h = LN(a + W_down gelu(W_up a))

Attention stays within each text; texts of one length share a call. A block of `BLOCK_TOKENS` goes through all layers
before the next one begins, so that intermediate results stay in the cache of a core. In fp32 the states equal those of
the padded pass (`Tower.forward`) up to rounding, as the tests check; in bf16 the products read two bytes a number.

Shapes: N tokens of a block, B texts of one length, T their tokens, H heads, D dimension, E = 3 D.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from itertools import groupby
from threading import Barrier, BrokenBarrierError
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mvr_ray.core.encoding.tower import Tower
from mvr_ray.core.encoding.views import TokenizedPassage
from mvr_ray.types import IntArray

BLOCK_TOKENS = 1024
FEW_TOKENS, FILL_TOKENS = 128, 64
KEYS_STEP = 16
MANY_BLOCKS = 8
UNPADDED_KINDS = ("bert", "roberta", "xlm-roberta")
"""Model types whose layers are those above."""


class Affine(NamedTuple):
    """weight and bias of a linear layer or of a layer norm, without gradient."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def of(cls, module: Any, dtype: torch.dtype = torch.float32) -> "Affine":
        return cls(module.weight.detach().to(dtype), module.bias.detach().to(dtype))


class Product:
    """Computes x W' + b, followed by gelu or by an addition. Linear layers of one input are joined."""

    def __init__(self, *layers: Any, dtype: torch.dtype, gelu: bool = False) -> None:
        weight, bias = map(torch.cat, zip(*(Affine.of(layer, dtype) for layer in layers)))
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, BLOCK_TOKENS)
        self.bias = bias
        self.post_op = ("gelu", "none") if gelu else ("none", "")

    def __call__(self, x_ND: Tensor) -> Tensor:
        name, algorithm = self.post_op
        return torch.ops.mkldnn._linear_pointwise(x_ND, self.weight, self.bias, name, [], algorithm)

    def plus(self, x_ND: Tensor, other_ND: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise.binary(x_ND, other_ND, self.weight, self.bias, "add")


class FloatLayer:
    """A layer in float32 or bfloat16."""

    def __init__(self, layer: Any, config: Any, dtype: torch.dtype) -> None:
        own, output = layer.attention.self, layer.attention.output
        self.heads, self.eps = int(config.num_attention_heads), float(config.layer_norm_eps)
        self.qkv, self.out = Product(own.query, own.key, own.value, dtype=dtype), Product(output.dense, dtype=dtype)
        self.up = Product(layer.intermediate.dense, dtype=dtype, gelu=True)
        self.down = Product(layer.output.dense, dtype=dtype)
        self.norm, self.last_norm = Affine.of(output.LayerNorm, dtype), Affine.of(layer.output.LayerNorm, dtype)

    def __call__(self, x_ND: Tensor, runs: Sequence[tuple[int, int]]) -> Tensor:
        own_ND = attention(self.qkv(x_ND), runs, self.heads)
        x_ND = layer_norm(self.out.plus(own_ND, x_ND), self.norm, self.eps)
        return layer_norm(self.down.plus(self.up(x_ND), x_ND), self.last_norm, self.eps)


class UnpaddedCpuBackbone:
    """A transformer's current weights, prepared for inference."""

    def __init__(
        self, backbone: Any, embed_ids: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32
    ) -> None:
        """`embed_ids` looks up the words' vectors."""
        table: Any = backbone.embeddings
        self.embed_ids = embed_ids
        self.types_D = table.token_type_embeddings.weight.detach()
        self.position_D = table.position_embeddings.weight.detach() + table.token_type_embeddings.weight[0].detach()
        self.norm = Affine.of(table.LayerNorm)
        self.eps = float(backbone.config.layer_norm_eps)
        self.dtype = dtype
        layers = [backbone.get_submodule(f"encoder.layer.{at}") for at in range(backbone.config.num_hidden_layers)]
        self.layers = [FloatLayer(layer, backbone.config, dtype) for layer in layers]

    def states(
        self,
        ids_N: Tensor,
        positions_N: Tensor,
        lengths: Iterable[int],
        types_N: Tensor | None = None,
        whole: bool = False,
    ) -> Tensor:
        """Compute states_ND of texts laid end to end, in float32; fastest where texts of one length are adjacent.

        `whole`: pad to a full block, as for one of many blocks.
        """
        num_padding = padding_tokens(len(ids_N), whole)
        ids_N, positions_N = F.pad(ids_N, (0, num_padding)), F.pad(positions_N, (0, num_padding))
        x_ND = self.embed_ids(ids_N) + self.position_D[positions_N]
        if types_N is not None:
            x_ND = x_ND + (self.types_D - self.types_D[0])[F.pad(types_N, (0, num_padding))]
        x_ND = layer_norm(x_ND, self.norm, self.eps).to(self.dtype)
        runs = [(length, len(list(own))) for length, own in groupby(lengths)]
        runs += [(FILL_TOKENS, num_padding // FILL_TOKENS), (num_padding % FILL_TOKENS, 1)]
        runs = [(length, count) for length, count in runs if length and count]
        for layer in self.layers:
            x_ND = layer(x_ND, runs)
        return x_ND[: len(x_ND) - num_padding].float()


class Means(NamedTuple):
    """views_PVD, zero for a view without tokens, and count_PV, the number of tokens in each mean."""

    views_PVD: Tensor
    count_PV: Tensor


class UnpaddedCpuTower(UnpaddedCpuBackbone):
    """A tower's current weights, prepared for inference."""

    def __init__(self, tower: Tower, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(tower.backbone, tower.embed_ids, dtype)
        self.dimension = tower.dimension

    def __call__(self, batch: Sequence[TokenizedPassage], whole: bool = False) -> Tensor:
        """Compute states_ND of the texts' tokens, end to end, in float32. Texts of one length must be adjacent."""
        ids_N = torch.cat([torch.from_numpy(text.input_ids) for text in batch]).long()
        positions_N = torch.cat([torch.from_numpy(text.position_ids) for text in batch]).long()
        return self.states(ids_N, positions_N, (text.num_tokens for text in batch), whole=whole)

    def views(self, batch: Sequence[TokenizedPassage], num_views: int) -> Means:
        """Average the states of each view's tokens."""
        shape = (len(batch), num_views)
        views_PVD, count_PV = torch.empty(*shape, self.dimension), torch.empty(shape, dtype=torch.long)

        def read(rows: list[int], whole: bool) -> None:
            texts = [batch[row] for row in rows]
            views_PVD[rows], count_PV[rows] = view_means(self(texts, whole), texts, num_views)

        over_blocks([text.num_tokens for text in batch], read)
        return Means(views_PVD, count_PV)


def over_blocks(lengths: Sequence[int], read: Callable[[list[int], bool], None]) -> None:
    """Call `read` with the rows of each block and whether to pad to a full block, without gradients.

    Each thread runs one block through all layers, so that no thread waits within a layer, and the bytes do not depend
    on the number of threads.
    """
    batches = blocks(lengths)
    many = len(batches) >= MANY_BLOCKS
    threads = torch.get_num_threads()
    each = map if threads == 1 else thread_pool(threads).map
    for _ in each(torch.no_grad()(lambda rows: read(rows, many)), batches):
        pass


@lru_cache(maxsize=1)
def thread_pool(threads: int) -> ThreadPoolExecutor:
    """Start threads whose operators each run on one core. `set_num_threads` also sets torch's default for new threads,
    which is restored; a thread reads that default on its first `get_num_threads`, hence the call before the setting."""
    ready = Barrier(threads + 1)

    def begin() -> None:
        torch.get_num_threads()
        torch.set_num_threads(1)
        with suppress(BrokenBarrierError):
            ready.wait()

    pool = ThreadPoolExecutor(threads, "mvr_ray-forward", begin)
    try:
        for _ in range(threads):
            pool.submit(int)
        ready.wait()
    except BaseException:  # such as no memory for a thread, or Ctrl-C: those that wait would outlast the program
        ready.abort()
        pool.shutdown(wait=False)
        raise
    finally:
        torch.set_num_threads(threads)
    return pool


os.register_at_fork(after_in_child=thread_pool.cache_clear)  # a fork does not copy threads


def view_members(batch: Sequence[TokenizedPassage], num_views: int) -> tuple[IntArray, IntArray]:
    """Return the tokens that enter a view, order_M, sorted by text and view, and the number of tokens of each view,
    count_PV, both int64. Tokens are numbered through the texts laid end to end."""
    view_N = np.concatenate([text.view_T for text in batch]).astype(np.int64)
    text_N = np.repeat(np.arange(len(batch)), [text.num_tokens for text in batch])
    read_M = np.flatnonzero(view_N >= 0)
    slot_M = text_N[read_M] * num_views + view_N[read_M]
    count_PV = np.bincount(slot_M, minlength=len(batch) * num_views).reshape(len(batch), num_views)
    return read_M[np.argsort(slot_M, kind="stable")], count_PV


def view_means(states_ND: Tensor, batch: Sequence[TokenizedPassage], num_views: int) -> Means:
    """Average the states of each view of texts laid end to end, as an embedding bag over the rows of states."""
    order_M, count_PV = view_members(batch, num_views)
    starts = torch.from_numpy(np.cumsum(count_PV) - count_PV.ravel())
    means = F.embedding_bag(torch.from_numpy(order_M), states_ND, starts, mode="mean")
    return Means(means.view(*count_PV.shape, -1), torch.from_numpy(count_PV))


def padding_tokens(num_tokens: int, whole: bool = False) -> int:
    """Return the number of padding tokens appended to a block: up to a multiple of 8, for long blocks of 64, and for
    one of many blocks (`whole`) up to a full block, so that all have one number of rows.

    oneDNN and torch cache data for each number of rows, 0.6 MB a product (1.4 GB after 6,000 blocks of any number), and
    take a millisecond to build it.
    """
    step = 8 if num_tokens <= FEW_TOKENS else FILL_TOKENS
    return -num_tokens % (BLOCK_TOKENS if whole and num_tokens < BLOCK_TOKENS else step)


def attention(qkv_NE: Tensor, runs: Sequence[tuple[int, int]], heads: int) -> Tensor:
    """Compute softmax(q k' / sqrt(d)) v of every text and head, [N, D]. A run is a length, and a number of texts of it.

    Keys of two bytes are padded to a multiple of `KEYS_STEP`, and the padding is masked: torch's products of other
    numbers of keys take up to half as long again.
    """
    dimension = qkv_NE.shape[1] // 3
    parts, start = [], 0
    for length, count in runs:
        rows = qkv_NE[start : start + length * count].view(count, length, 3, heads, dimension // heads)
        q_BHTd, k_BHTd, v_BHTd = rows.permute(2, 0, 3, 1, 4)
        mask_1T = None
        if qkv_NE.dtype == torch.bfloat16 and length % KEYS_STEP:
            num_padding = -length % KEYS_STEP
            k_BHTd, v_BHTd = (F.pad(own, (0, 0, 0, num_padding)) for own in (k_BHTd, v_BHTd))
            mask_1T = F.pad(qkv_NE.new_zeros(1, length), (0, num_padding), value=-torch.inf)
        own_BHTd = F.scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd, attn_mask=mask_1T)
        parts.append(own_BHTd.transpose(1, 2).reshape(count * length, dimension))
        start += length * count
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def layer_norm(x_ND: Tensor, norm: Any, eps: float) -> Tensor:
    return F.layer_norm(x_ND, (x_ND.shape[1],), norm.weight, norm.bias, eps)


def supports_unpadded_cpu(backbone: nn.Module) -> bool:
    """Return whether the unpadded pass supports this backbone: a known kind of layers whose attention covers a whole
    text, on a CPU whose torch has oneDNN."""
    config: Any = backbone.config
    weight = next(backbone.parameters())
    return (
        config.model_type in UNPADDED_KINDS
        and config.hidden_act == "gelu"
        and not getattr(config, "is_decoder", False)
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def blocks(lengths: Sequence[int], budget: int = BLOCK_TOKENS) -> list[list[int]]:
    """Pack rows into blocks of at most `budget` tokens by first fit decreasing: longest first, ties by row. So most
    blocks are full, and all of one size. A longer text has a block of its own."""
    result: list[list[int]] = []
    open_blocks: list[tuple[int, int]] = []  # (free tokens, block) of blocks that may take more
    shortest = min(lengths, default=0)
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        at = next(
            (at for at, (free_tokens, _) in enumerate(open_blocks) if free_tokens >= lengths[row]), len(open_blocks)
        )
        if at == len(open_blocks):
            open_blocks.append((budget, len(result)))
            result.append([])
        free_tokens, block = open_blocks[at]
        result[block].append(row)
        open_blocks[at] = free_tokens - lengths[row], block
        if open_blocks[at][0] < shortest:
            del open_blocks[at]
    return result
