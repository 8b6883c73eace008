"""Retrieval quality on SQuAD: every system over the same passages, one table with 95 % intervals.

    python benchmarks/quality.py full      # untrained systems and refinement over all paragraphs and summaries
    python benchmarks/quality.py reduced   # the same beside fine-tuned systems, over a smaller corpus

Each step is a command that anyone can type, printed before it runs and kept beside its figures. A step whose result
is on file is not run again. Results go to benchmarks/results/quality-<size>.json and .md.
"""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from machine import RESULTS, ROOT, hardware

SCRIPT = "benchmarks/quality.py"
METRICS = [f"{kind}/top-{k}" for kind in ("answer", "gold") for k in (1, 5, 20, 100)]
CONFIG = "configs/squad.yaml"
SMALL = [
    "prepare.corpus=squad_small",
    "prepare.max_passages=6000",
    "prepare.sources=[{path: ../shared/data/squad/dev-v1.1.json.gz, format: squad, questions: dev}, "
    '{path: ../shared/data/wiki_vital/psgs_vital.tsv.gz, format: dpr_tsv, id_prefix: "wiki:"}]',
]
UNTRAINED = "index.encoder=untrained"
MEAN = ["encoder.strategy=mean", "index.name={size}-mean", UNTRAINED]
SNIPPETS = ["encoder.strategy=snippet_means", "index.name={size}-snippet-means", UNTRAINED]
FREE = "refine.max_heldout_loss=100"
LINEAR = ["refine.method=linear", "refine.positives=all", FREE]
FEEDBACK = ["refine.method=feedback_views", "refine.feedback_weight=0.8", "refine.feedback_clusters=1", FREE]
BUDGET = ["train.max_steps=60", "train.dev_questions=null", "train.epochs=1"]
DPR = ["encoder.name=dpr", "encoder.strategy=cls", "train.loss=dpr", "train.warm_start_steps=60", *BUDGET]
CAMVR = ["encoder.name=camvr", "encoder.strategy=snippets", "train.loss=camvr", "train.warm_start_steps=60", *BUDGET]
CAMVR_MEANS = ["encoder.name=camvr-means", "encoder.strategy=snippet_means", "train.loss=camvr", *BUDGET]


class System(NamedTuple):
    """A row of the table: the commands that make it, each a stage with its overrides; `evaluate` comes last."""

    name: str
    commands: list[tuple[str, list[str]]]


def trained(name: str, settings: list[str], index: str) -> System:
    of_index = [*settings, f"index.name={index}", "index.encoder=trained"]
    return System(name, [("train", settings), ("index", of_index), ("evaluate", of_index)])


def refined(name: str, base: list[str], how: list[str]) -> System:
    """Refine version 1 of an index, whatever has been published since."""
    back = ("versions rollback 1", base)
    return System(name, [back, ("refine", [*base, *how]), ("evaluate", base)])


FULL = [
    System("snippet means, 8 views", [("index", SNIPPETS), ("evaluate", SNIPPETS)]),
    refined("snippet means, feedback views", SNIPPETS, FEEDBACK),
    refined("snippet means, linear as in the paper", SNIPPETS, LINEAR),
    System("one mean vector", [("index", MEAN), ("evaluate", [*MEAN, "evaluate.bm25=true"])]),
    refined("one mean vector, feedback views", MEAN, FEEDBACK),
    refined("one mean vector, linear as in the paper", MEAN, LINEAR),
]
REDUCED = [
    FULL[3],
    FULL[0],
    trained("DPR, fine-tuned", DPR, "reduced-dpr"),
    trained("CAMVR, fine-tuned", CAMVR, "reduced-camvr"),
    trained("snippet means with CAMVR's loss, fine-tuned", CAMVR_MEANS, "reduced-camvr-means"),
]


def run_stage(stage: str, overrides: list[str]) -> dict[str, Any]:
    name, *action = stage.split()
    typed = shlex.join(["mvr-ray", name, CONFIG, *action, *overrides])
    command = [str(Path(sys.executable).parent / "mvr-ray"), name, CONFIG, *action, *overrides, "--json"]
    print("$", typed, flush=True)
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{stage} failed with status {done.returncode}")
    return {
        "command": typed,
        "seconds": round(time.monotonic() - started, 1),
        "report": json.loads(done.stdout),
    }


def table(size: str, kept: dict[str, Any]) -> str:
    """One Markdown table a question set: systems down, metrics across, 95 % intervals in brackets."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for name, done in kept["systems"].items():
        for row in done[-1]["report"]["rows"]:
            system = "BM25" if row["system"] == "bm25" else name
            cell = f"{100 * row['value']:.1f} ({100 * row['low']:.1f}-{100 * row['high']:.1f})"
            found.setdefault(row["questions"], {}).setdefault(system, {})[row["metric"]] = cell
    report = next(iter(kept["systems"].values()))[-1]["report"]
    lines = [
        f"# Retrieval quality, {size}: {report['passages']:,} passages",
        "",
        ", ".join(f"{key} {value}" for key, value in kept["hardware"].items()) + f". Made by `python {SCRIPT} {size}`.",
        "",
        "Shares in percent, 95 % bootstrap intervals. `answer`: a hit contains an answer; `gold`: a hit is the",
        "question's own passage. dev_known are the labelled questions of refinement, so its refined rows are",
        "transductive; dev_other are other questions of the same passages, dev_unseen questions of articles that",
        "refinement never saw.",
    ]
    for questions, systems in found.items():
        lines += [
            "",
            f"## {questions}",
            "",
            "| system | " + " | ".join(METRICS) + " |",
            "|---" * (1 + len(METRICS)) + "|",
        ]
        lines += [f"| {name} | " + " | ".join(row.get(m, "") for m in METRICS) + " |" for name, row in systems.items()]
    lines += ["", "## Commands", ""]
    for name, done in kept["systems"].items():
        lines += [f"- {name}", *(f"  - `{step['command']}` ({step['seconds']:.0f} s)" for step in done)]
    return "\n".join(lines) + "\n"


def main(size: str, extra: list[str]) -> None:
    """`extra` are overrides for every command, such as store.path=/mnt/store."""
    common = [*([] if size == "full" else SMALL), "evaluate.bm25=false", *extra]
    path = RESULTS / f"quality-{size}.json"
    kept = json.loads(path.read_text()) if path.is_file() else {"hardware": hardware(), "systems": {}}
    run_stage("prepare", extra)
    if size != "full":
        run_stage("prepare", common)
    for system in FULL if size == "full" else REDUCED:
        if system.name in kept["systems"]:
            continue
        done = []
        for stage, template in system.commands:
            overrides = [part.format(size=size) for part in template]
            corpus = extra if stage == "train" else common
            done.append(run_stage(stage, [*corpus, *overrides]))
        kept["systems"][system.name] = done
        path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        path.with_suffix(".md").write_text(table(size, kept))
        print(table(size, kept), flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "full", sys.argv[2:])
