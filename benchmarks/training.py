"""Compare training on a CPU with sentence-transformers' trainer: steps a second, peak memory, cached gradients.

    python benchmarks/training.py [--peers .peers]

Same MiniLM weights, same pairs of a SQuAD question and its paragraph, 32 a batch in the same order, at most 256 tokens,
the softmax over the batch's paragraphs at scale 20, AdamW, one clipping of the gradient; in float32 with dropout, and
in bfloat16 without. The matrix rate is that of products of bfloat16 numbers on the same threads (`floors`). A step's
time is measured between the ends of two steps, so that one-time work does not count. Ours is the loop that `mvr-ray
train` runs on each rank. Cached gradients: a step of 512 pairs in passes of 32 beside a plain step of 32, at 128
tokens.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from encoding import backbone, kind_of_floats, squad
from floors import matrix_rate
from machine import ROOT, peak_bytes
from measure import ROUNDS, Bar, Part, speedup, write
from peers import PEERS, SENTENCE_TRANSFORMERS, Peer, environment

from mvr_ray.config import RunConfig
from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.core.learning.batches import Example
from mvr_ray.core.learning.losses import dpr_loss
from mvr_ray.distributed.training.checkpoints import Checkpoints
from mvr_ray.distributed.training.retriever import RetrieverLoop
from mvr_ray.distributed.training.steps import TrainingJob
from mvr_ray.store.files import Store
from mvr_ray.types import IntArray, Passage

THREADS, BATCH, STEPS, DROPOUT = 2, 32, 3, 0.1
TOKENS, SHORT = 256, 128
CACHED, CHUNK = 512, 32


class Pairs:
    """Questions with their paragraphs, as examples of the loop."""

    article_E: IntArray | None = None

    def __init__(self, pairs: Sequence[Sequence[str]]) -> None:
        self.examples = [Example(question, Passage(str(n), "", text)) for n, (question, text) in enumerate(pairs)]
        self.passage_E: IntArray = np.arange(len(pairs))

    def __len__(self) -> int:
        return len(self.examples)

    def get(self, numbers: Sequence[int], epoch: int) -> list[Example]:
        return [self.examples[number] for number in numbers]


class TimedLoop(RetrieverLoop):
    """The training loop, with batches in the order of the pairs; it stores its losses."""

    def batch(self) -> list[Example]:
        start = self.state.step * self.cfg.batch_questions
        return self.job.examples.get(range(start, start + self.cfg.batch_questions), 0)

    def learn(self) -> dict[str, float]:
        figures = super().learn()
        self.losses = [*getattr(self, "losses", []), figures["loss"]]
        return figures

    def end_epoch(self) -> None:
        """Skip the measurement: only steps are timed."""

    def _save(self, optimiser: torch.optim.Optimizer) -> None:
        """Store nothing."""


def train(
    task: dict[str, Any], steps: int, batch: int, dropout: float, precision: str, tokens: int, chunk: int
) -> dict[str, Any]:
    spec = EncoderSpec(strategy="mean", use_title=False, max_passage_tokens=tokens, max_query_tokens=tokens)
    settings = {"batch_questions": batch, "max_steps": steps, "dropout": dropout, "cache_chunk": chunk}
    settings |= {"precision": precision}
    encoder = {"strategy": "mean", "use_title": False, "max_passage_tokens": tokens, "max_query_tokens": tokens}
    run = RunConfig.model_validate(
        {"encoder": encoder, "train": {**settings, "loss": "dpr", "temperature": 1.0, "checkpoint_steps": steps + 1}}
    )
    step_ends: list[float] = []
    model = DualEncoder.from_backbone(task["backbone"], spec)
    before = peak_bytes()
    with tempfile.TemporaryDirectory() as folder:
        job = TrainingJob(
            run, "encoder", model, Pairs(task["pairs"][: steps * batch]), None, Checkpoints(Store(folder), "run")
        )
        loop = TimedLoop(job, lambda what, count, total: step_ends.append(time.perf_counter()), torch.device("cpu"))
        loop.run()
    peak = peak_bytes()
    seconds = [b - a for a, b in pairwise(step_ends)]
    return {"seconds": seconds, "loss": loop.losses[0], "peak": peak, "before": before}


def plain_loss(task: dict[str, Any], num: int, tokens: int) -> dict[str, float]:
    """Compute the loss of the pairs at the initial weights, all vectors at once, without a gradient."""
    spec = EncoderSpec(strategy="mean", use_title=False, max_passage_tokens=tokens, max_query_tokens=tokens)
    model = DualEncoder.from_backbone(task["backbone"], spec)
    queries_QD = torch.from_numpy(model.embed_queries([question for question, _ in task["pairs"][:num]]))
    passages = model.tokenize_passages([Passage("", "", text) for _, text in task["pairs"][:num]])
    views = model.embed_passages(passages)
    terms = dpr_loss(queries_QD, *map(torch.from_numpy, views), torch.arange(num), scale=20.0)
    return {"loss": float(terms.total)}


def ours(folder: Path) -> None:
    """Measure our side, in a process of its own as the peer's."""
    task = json.loads((folder / "task.json").read_text())
    torch.set_num_threads(THREADS)
    print(json.dumps({"ready": "mvr_ray"}), flush=True)
    for line in sys.stdin:
        word, *numbers = line.split()
        if word == "loss":
            report: dict[str, Any] = plain_loss(task, int(numbers[0]), int(numbers[1]))
        else:
            steps, batch, tokens, chunk = (int(number) for number in (word, numbers[0], numbers[3], numbers[4]))
            report = train(task, steps, batch, float(numbers[1]), numbers[2], tokens, chunk)
        print("\n" + json.dumps(report), flush=True)


def open_ours(folder: str) -> Peer:
    return Peer(Path(sys.executable), "training.py", "--ours", folder, threads=THREADS, modules=ROOT)


def alone(folder: str, line: str) -> dict[str, Any]:
    """Run our side in a new process, so that its peak covers only this work."""
    with open_ours(folder) as process:
        return process.ask(line)


def step_flops(task: dict[str, Any], pairs: Sequence[Sequence[str]]) -> float:
    """Count operations of a step over these pairs: three times the forward pass's products of weights and of
    attention."""
    spec = EncoderSpec(strategy="mean", use_title=False, max_passage_tokens=TOKENS, max_query_tokens=TOKENS)
    model = DualEncoder.from_backbone(task["backbone"], spec)
    texts = [*model.tokenize_queries([question for question, _ in pairs])]
    texts += model.tokenize_passages([Passage("", "", text) for _, text in pairs])
    layers: Any = model.passage_tower.backbone
    num_weights = sum(weight.numel() for weight in layers.encoder.parameters() if weight.dim() == 2)
    lengths = [text.num_tokens for text in texts]
    attention = 4 * layers.config.num_hidden_layers * layers.config.hidden_size * sum(length**2 for length in lengths)
    return 3.0 * (2 * num_weights * sum(lengths) + attention)


def measure_steps(peers: Path) -> Part:
    title = f"Training with {BATCH} SQuAD questions and paragraphs a step on a CPU"
    part = Part.of_kind("training", title, "pairs", kind_of_floats())
    precisions = ["fp32"] if kind_of_floats() else ["fp32", "bf16"]
    data = squad()
    first = {int(row): number for number, row in reversed(list(enumerate(data.gold_Q)))}
    rows = np.random.default_rng(0).permutation(sorted(first))[: max(CACHED, (STEPS + 1) * BATCH)]
    pairs = [[data.questions[first[row]].strip(), data.dev[row]] for row in rows.tolist()]
    python = environment(peers, "sentence-transformers", SENTENCE_TRANSFORMERS)
    with tempfile.TemporaryDirectory() as folder:
        task = {"backbone": str(backbone()), "max_passage_tokens": TOKENS, "dimension": 384, "threads": THREADS}
        (Path(folder) / "task.json").write_text(json.dumps({**task, "pairs": pairs}))
        samples: dict[str, list[float]] = {}
        with open_ours(folder) as us, Peer(python, "training_peer.py", folder, threads=THREADS) as them:
            requests = {
                "mvr_ray": f"{{}} {BATCH} {{}} {{}} {TOKENS} 0",
                "sentence-transformers": f"{{}} {BATCH} {{}} {{}}",
            }
            both = {"mvr_ray": us, "sentence-transformers": them}
            print("losses", flush=True)
            losses = {
                own: {name: process.ask(requests[name].format(1, 0.0, own))["loss"] for name, process in both.items()}
                for own in precisions
            }
            reports: dict[str, dict[str, Any]] = {}
            for number in range(ROUNDS):
                print(f"round {number + 1}", flush=True)
                for name, process in both.items():
                    reports[name] = process.ask(requests[name].format(STEPS + 1, DROPOUT, "fp32"))
                    samples.setdefault(name, []).append(statistics.mean(reports[name]["seconds"]))
                    if "bf16" in precisions:
                        in_bf16 = process.ask(requests[name].format(STEPS + 1, 0.0, "bf16"))
                        samples.setdefault(f"{name}, bf16", []).append(statistics.mean(in_bf16["seconds"]))
        print("cached gradients", flush=True)
        plain = alone(folder, f"2 {CHUNK} {DROPOUT} fp32 {SHORT} 0")
        with_cache = alone(folder, f"1 {CACHED} 0.0 fp32 {SHORT} {CHUNK}")
        whole_loss = alone(folder, f"loss {CACHED} {SHORT}")["loss"]
    part.add(samples, BATCH)
    flops = [step_flops(task, pairs[at : at + BATCH]) for at in range(BATCH, (STEPS + 1) * BATCH, BATCH)]
    kind = "bfloat16" if "bf16" in precisions else "float32"
    rate = matrix_rate(THREADS, kind=kind)
    shares = {name: statistics.mean(flops) / statistics.median(own) / rate for name, own in samples.items()}
    growth = {"plain": plain["peak"] - plain["before"], "cached": with_cache["peak"] - with_cache["before"]}
    part.bars = [
        *(
            Bar(
                f"steps/s over sentence-transformers' trainer{own}",
                speedup(samples, f"mvr_ray{own}", f"sentence-transformers{own}"),
                1.1,
            )
            for own in ("", ", bf16")
            if f"mvr_ray{own}" in samples
        ),
        Bar(
            "peak memory under sentence-transformers'",
            reports["sentence-transformers"]["peak"] / reports["mvr_ray"]["peak"],
            1.0,
        ),
        Bar(
            "difference of the first step's loss from sentence-transformers'",
            abs(losses["fp32"]["mvr_ray"] - losses["fp32"]["sentence-transformers"]),
            1e-4,
            at_least=False,
            unit="",
        ),
        Bar(
            f"peak memory, batch {CACHED} with cached gradients over batch {CHUNK}",
            with_cache["peak"] / plain["peak"],
            1.05,
            at_least=False,
        ),
        Bar(
            f"difference of the loss of batch {CACHED} with cached gradients from the loss in one piece",
            abs(with_cache["loss"] - whole_loss),
            1e-5,
            at_least=False,
            unit="",
        ),
    ]
    part.facts = {
        "first loss": losses,
        f"TFLOP/s of products of {kind} numbers": rate / 1e12,
        "share of that rate": shares,
        "peak MB of the process": {name: one["peak"] / 1e6 for name, one in reports.items()},
        f"MB over the model, batch {CHUNK} and batch {CACHED} in passes of {CHUNK}, {SHORT} tokens": {
            name: size / 1e6 for name, size in growth.items()
        },
        "settings": f"{STEPS} steps a sample, dropout {DROPOUT} in fp32 and 0 in bf16, {THREADS} threads, at most "
        f"{TOKENS} tokens",
        "peer": ", ".join(SENTENCE_TRANSFORMERS),
    }
    return part


def main() -> None:
    words = argparse.ArgumentParser(description="Training on a CPU beside sentence-transformers.")
    words.add_argument("--peers", type=Path, default=PEERS, help="folder of the peer's environment")
    words.add_argument("--ours", type=Path, help=argparse.SUPPRESS)
    args = words.parse_args()
    if args.ours:
        ours(args.ours)
    else:
        write(measure_steps(args.peers.resolve()))


if __name__ == "__main__":
    main()
