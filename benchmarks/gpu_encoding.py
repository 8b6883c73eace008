"""Compare encoding on a GPU without padding with sentence-transformers, and time training steps in half precision.

Ours, as `mvr-ray index` does it with `index.precision: bf16`: other processes tokenise texts, batches hold a fixed
number of tokens and no padding, and a batch is fetched while the next one is computed. Peer: sentence-transformers with
its default batches of 32; if it is not installed, its loop (longest first, padded to the longest of the batch), and the
name of the case says so.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gpu_search import Machine
from measure import Bar, Part, interleave, speedup
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.core.encoding.unpadded_gpu import UnpaddedGpuTower
from mvr_ray.core.encoding.views import TokenizedPassage, pack_tokens, unpack_tokens
from mvr_ray.core.learning.losses import LossTerms, dpr_loss
from mvr_ray.core.learning.training import PassSettings, RankInputs, loss_and_gradients
from mvr_ray.types import FloatArray, IntArray, Passage

MAX_TOKENS, PEER_BATCH, WINDOW = 256, 32, 1024
SPEC = EncoderSpec(strategy="mean", num_views=1, use_title=False, max_passage_tokens=MAX_TOKENS)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


class EncodingLoad(NamedTuple):
    """What is encoded, how, and with how many tokenising processes (0: a thread)."""

    texts: list[str]
    tokens_per_batch: int
    helpers: int


def random_model(folder: Path, words: int, **sizes: int) -> None:
    """Make a BERT of these sizes with random weights, and a tokenizer with the words w0, w1, .."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *(f"w{number}" for number in range(words))])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **names)
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder)


def made_texts(count: int, words: int, longest: int) -> list[str]:
    """Make texts with the lengths of SQuAD's paragraphs: half of them have up to 142 tokens, one in twenty more than
    277."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(np.log(142), 0.41, count)), 4, longest).astype(int)
    return [" ".join(f"w{number}" for number in rng.integers(0, words, length)) for length in lengths]


_helper: DualEncoder | None = None


def open_helper(folder: str) -> None:
    """Open the tokenizer and layout of a tokenising process."""
    global _helper
    torch.set_num_threads(1)
    _helper = DualEncoder.from_backbone(folder, SPEC)


def tokenise_texts(texts: Sequence[str]) -> dict[str, IntArray]:
    assert _helper is not None
    return pack_tokens(_helper.tokenize_passages([Passage(str(at), "", text) for at, text in enumerate(texts)]))


@contextmanager
def helpers(folder: str, count: int) -> Iterator[Executor]:
    """Start processes that tokenise; a thread if there are none."""
    if not count:
        open_helper(folder)
    pool: Executor = (
        ProcessPoolExecutor(count, get_context("spawn"), open_helper, (folder,)) if count else ThreadPoolExecutor(1)
    )
    with pool:
        [one.result() for one in [pool.submit(tokenise_texts, ["w1"]) for _ in range(4 * max(count, 1))]]
        yield pool


def ahead(encoder: DualEncoder, pool: Executor, load: EncodingLoad) -> Iterator[list[TokenizedPassage]]:
    """Yield batches of all texts in order, tokenised by the pool while earlier ones are computed."""
    windows = [load.texts[at : at + WINDOW] for at in range(0, len(load.texts), WINDOW)]
    for one in [pool.submit(tokenise_texts, window) for window in windows]:
        texts = unpack_tokens(one.result())
        for rows in encoder.passage_batches([text.num_tokens for text in texts], load.tokens_per_batch):
            yield [texts[row] for row in rows]


def ours(encoder: DualEncoder, pool: Executor, load: EncodingLoad) -> FloatArray:
    return np.concatenate([batch.views_PVD[:, 0] for batch in encoder.embed_batches(ahead(encoder, pool, load))])


def peer(folder: str, device: str, precision: torch.dtype) -> tuple[str, Callable[[list[str]], FloatArray]]:
    """Return the peer's name and its encoding function."""
    kind = {torch.float32: "fp32", torch.bfloat16: "bf16"}[precision]
    try:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.models import Normalize, Pooling, Transformer
    except ImportError:  # it, or a library that it needs, is missing
        return f"the loop of sentence-transformers (not installed), {kind}", peer_loop(folder, device, precision)
    body = Transformer(folder, max_seq_length=MAX_TOKENS)
    modules = [body, Pooling(body.get_word_embedding_dimension(), "mean"), Normalize()]
    model: Any = SentenceTransformer(modules=modules, device=device).to(precision)
    return f"sentence-transformers, {kind}", lambda texts: _floats(
        model.encode(texts, batch_size=PEER_BATCH, convert_to_tensor=True, show_progress_bar=False)
    )


def peer_loop(folder: str, device: str, precision: torch.dtype) -> Callable[[list[str]], FloatArray]:
    """Return an encoding function with the peer's batches, by our encoder."""
    encoder = DualEncoder.from_backbone(folder, SPEC).to(device=device, dtype=precision)

    def loop(texts: list[str]) -> FloatArray:
        tokens = encoder.tokenize_passages([Passage(str(number), "", text) for number, text in enumerate(texts)])
        order = sorted(range(len(texts)), key=lambda row: -tokens[row].num_tokens)
        vectors_PD = np.empty((len(texts), encoder.dimension), np.float32)
        for at in range(0, len(order), PEER_BATCH):
            rows = order[at : at + PEER_BATCH]
            vectors_PD[rows] = encoder.embed_passages([tokens[row] for row in rows]).views_PVD[:, 0]
        return vectors_PD

    return loop


def _floats(vectors: torch.Tensor) -> FloatArray:
    return vectors.float().cpu().numpy()


def work_flops(encoder: DualEncoder, lengths: Sequence[int]) -> float:
    """Count operations of the matrix products for these texts without padding: with the weights, and attention's
    two."""
    config: Any = encoder.passage_tower.backbone.config  # type: ignore[union-attr]
    matrices = config.num_hidden_layers * (
        4 * config.hidden_size**2 + 2 * config.hidden_size * config.intermediate_size
    )
    squares = float(np.square(np.asarray(lengths, np.float64)).sum())
    return 2.0 * matrices * sum(lengths) + 4.0 * config.num_hidden_layers * config.hidden_size * squares


def measure_encoding(part: Part, machine: Machine, folder: str, load: EncodingLoad, rounds: int) -> None:
    device = machine.device
    plain = DualEncoder.from_backbone(folder, SPEC).to(device)
    some = plain.tokenize_passages([Passage(str(at), "", text) for at, text in enumerate(load.texts[:64])])
    reference_PD = plain.embed_passages(some).views_PVD[:, 0]
    exact = UnpaddedGpuTower(plain.passage_tower, torch.float32).views(some, 1).views_PVD[:, 0]
    away = float(np.abs(torch.nn.functional.normalize(exact, dim=-1).cpu().numpy() - reference_PD).max())
    part.bars.append(Bar("packed and padded embeddings apart in fp32", away, 1e-5, at_least=False, unit=""))
    has_bf16 = device.startswith("cuda") or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    encoder = plain.to_precision("bf16" if has_bf16 else "fp32")
    low = encoder.embed_passages(some)
    cosine = float((low.views_PVD[:, 0] * reference_PD).sum(1).min())
    part.facts["least cosine of a bf16 embedding with fp32"] = cosine
    lengths = [len(text.split()) + 2 for text in load.texts]
    lengths = [min(length, MAX_TOKENS) for length in lengths]
    with helpers(folder, load.helpers) as pool:
        mine = "ours, packed, bf16"
        peers = [peer(folder, device, torch.float32)]
        if device.startswith("cuda"):
            peers.append(peer(folder, device, torch.bfloat16))
        same = peers[0][1](load.texts[:64])
        part.facts["peer and ours apart in fp32, same texts"] = float(np.abs(same - reference_PD).max())
        cases: dict[str, Callable[[], Any]] = {mine: lambda: (ours(encoder, pool, load), machine.sync())}
        for name, run in peers:
            cases[name] = lambda run=run: (run(load.texts), machine.sync())
        samples = interleave(cases, rounds=rounds, warm=1)
        part.add(samples, len(load.texts))
        ready = list(ahead(encoder, pool, load))
        part.add(
            interleave({"ours, batches ready": lambda: list(encoder.embed_batches(ready))}, rounds=rounds),
            len(load.texts),
        )
    flops = work_flops(plain, lengths)
    part.floors[mine] = part.floors["ours, batches ready"] = flops / machine.matrix_flops
    part.facts["share of the matrix rate, end to end"] = flops / machine.matrix_flops / float(np.median(samples[mine]))
    part.facts["tokens a text"] = sum(lengths) / len(lengths)
    for name, _ in peers:
        note = "" if "not installed" not in name else "the peer is not installed; its loop stands for it"
        part.bars.append(Bar(f"encoding: over {name}", speedup(samples, mine, name), 2, note=note))


def trainer(folder: str, machine: Machine, questions: int, precision: torch.dtype) -> Callable[[], None]:
    """Run steps of DPR's loss over one batch of two passages a question, as `train` does."""
    device, texts = machine.device, made_texts(3 * questions, 500, 158)
    encoder = DualEncoder.from_backbone(folder, SPEC).to(device).train()
    tokens = encoder.tokenize_passages([Passage(str(at), "", text) for at, text in enumerate(texts[questions:])])
    queries = [" ".join(text.split()[:14]) for text in texts[:questions]]
    share = RankInputs(queries, tokens, torch.ones(len(tokens), dtype=torch.bool, device=device), len(tokens))
    positive_Q = torch.arange(questions, device=device)
    optimizer = torch.optim.AdamW(encoder.parameters(), 2e-5, fused=device.startswith("cuda"))

    def loss(queries_QD: torch.Tensor, views_PVD: torch.Tensor, mask_PV: torch.Tensor) -> LossTerms:
        return dpr_loss(queries_QD, views_PVD, mask_PV, positive_Q, scale=20.0)

    def step() -> None:
        loss_and_gradients(encoder, share, loss, PassSettings(precision=precision))
        optimizer.step()
        optimizer.zero_grad()
        machine.sync()

    return step


def measure_training(part: Part, machine: Machine, folder: str, questions: int, rounds: int) -> None:
    """Measure both precisions one after the other, so that their memory peaks do not mix."""
    for kind, precision in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        if machine.device.startswith("cuda"):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        name = f"training step, {questions} questions, {2 * questions} passages, {kind}"
        part.add(interleave({name: trainer(folder, machine, questions, precision)}, rounds=rounds, warm=2), 1)
        if machine.device.startswith("cuda"):
            part.facts[f"{name}, peak bytes"] = torch.cuda.max_memory_allocated()
