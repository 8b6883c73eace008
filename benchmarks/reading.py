"""What makes a small reader choose well among retrieved passages: negatives in training, and the null token's logits.

    python benchmarks/reading.py [steps] [section.key=value ...]

Readers are trained from MiniLM on SQuAD's training questions alone, three ways: on gold passages, beside passages of
their batch, beside BM25's hits without the answer. Each reads the same ranking of development questions, whose articles
none has seen. Results go to benchmarks/results/reading.json and .md; a reader that is there is not trained again.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import RESULTS, ROOT, hardware

from mvr_ray.config import RunConfig, parse_run
from mvr_ray.core.metrics import paired_test
from mvr_ray.distributed import mine, read, reindex, retrieve, session
from mvr_ray.distributed.training import reader as train_reader
from mvr_ray.runfile import apply
from mvr_ray.store import prepare
from mvr_ray.store.corpus import read_questions, write_questions
from mvr_ray.store.files import Store
from mvr_ray.store.runs import to_plain
from mvr_ray.types import Progress

RESULT = RESULTS / "reading.json"
SQUAD = ROOT.parent / "shared" / "data" / "squad"
QUESTIONS = 120
TOP = [1, 3, 10]
BASE: dict[str, Any] = {
    "store": {"path": str(ROOT / "store")},
    "prepare": {
        "corpus": "reading",
        "sources": [
            {"path": str(SQUAD / f"{name}-v1.1.json.gz"), "format": "squad", "questions": f"reading_{name}"}
            for name in ("train", "dev")
        ],
        "max_questions": 1000,
        "max_passages": 1600,
    },
    "encoder": {"name": "reading", "use_title": False},
    "index": {"name": "reading", "encoder": "untrained"},
    "mine": {"questions": "reading_train", "output": "reading_mined", "num_negatives": 4, "rank_to": 30},
    "train": {"task": "reader", "questions": "reading_train", "batch_questions": 8, "lr": 2e-4, "epochs": 100},
    "retrieve": {"k": max(TOP)},
    "read": {"top_passages": TOP, "max_tokens": 256, "overlap_tokens": 64, "max_question_tokens": 40},
    "resources": {"train_workers": 0, "encoders_max": 1},
}
WAYS = {
    "gold passages alone": {"reader": "reading-gold", "num_hard_negatives": 0},
    "and a passage of the batch": {"reader": "reading-batch", "num_hard_negatives": 1},
    "and a BM25 hit without the answer": {
        "reader": "reading-mined",
        "num_hard_negatives": 1,
        "hard_negatives": "reading_mined",
    },
}


def said(what: str) -> Progress:
    def tell(_: str, done: int, total: int) -> None:
        if done == total or not done % 10:
            print(f"  {what}: {done} of {total}", flush=True)

    return tell


def overlaps(path: Path) -> list[float]:
    """F1 of each question's answer from the most passages."""
    return [json.loads(line)["predictions"][-1]["f1"] for line in path.read_text(encoding="utf-8").splitlines()]


def table(kept: dict[str, Any]) -> str:
    lines = [
        f"# Reading, {QUESTIONS} questions over 1,600 passages",
        "",
        ", ".join(f"{key} {value}" for key, value in kept["hardware"].items())
        + f". Made by `python benchmarks/reading.py {kept['steps']}`.",
        "",
        f"MiniLM trained for {kept['steps']} steps of 8 questions of SQuAD's training set (1,000 questions, one seed),",
        "then asked questions of the development set over the passages that snippet means found. F1 in percent with",
        "its 95 % interval; for answers from the most passages, how often the chosen passage bears an answer, and p of",
        "a paired test of F1 against the first row.",
        "",
        "| trained on | a span scores | " + " | ".join(f"{k} passages" for k in TOP) + " | bears an answer | p |",
        "|---" * (4 + len(TOP)) + "|",
    ]
    for name, done in kept["readers"].items():
        for how, rows in done["read"].items():
            told = {(row["passages"], row["metric"]): row for row in rows["rows"]}
            cells = [told[k, "f1"] for k in TOP]
            shown = [f"{100 * c['value']:.1f} ({100 * c['low']:.1f}-{100 * c['high']:.1f})" for c in cells]
            bears, p = f"{100 * rows['bears']:.1f}", f"{rows['p']:.3f}"
            lines.append(f"| {name} | {how} | {' | '.join(shown)} | {bears} | {p} |")
    return "\n".join(lines) + "\n"


def bearing(path: Path, ranking: Path) -> float:
    """Share of questions whose answer from the most passages was read in an answer-bearing one."""
    found = []
    asked = [json.loads(line) for line in ranking.read_text(encoding="utf-8").splitlines()]
    for line, row in zip(path.read_text(encoding="utf-8").splitlines(), asked, strict=True):
        rank = json.loads(line)["predictions"][-1]["rank"]
        found.append(bool(rank) and row["hits"][rank - 1]["has_answer"])
    return float(np.mean(found))


def measure(run: RunConfig, folder: Path, ranking: Path, kept: dict[str, Any], settings: dict[str, Any]) -> None:
    for name, way in WAYS.items():
        if name in kept["readers"]:
            continue
        started = time.process_time()
        data = {**settings, "train": {**settings["train"], **way}}
        trained = train_reader.train(parse_run(data, "reading"), said(f"train on {name}"))
        done: dict[str, Any] = {"cpu_s": round(time.process_time() - started), "trained": to_plain(trained), "read": {}}
        for how, minus_null in (("its logits", False), ("its logits less the null token's", True)):
            choice = {"reader": f"{way['reader']}/{trained.fingerprint}", "minus_null": minus_null}
            reading = parse_run({**data, "read": {**data["read"], **choice}}, "reading")
            output = folder / f"{way['reader']}-{minus_null}.jsonl"
            report = read.read(reading, ranking, output, said(f"read: {name}, {how}"))
            first = folder / "reading-gold-False.jsonl"
            p = paired_test(np.array(overlaps(output)), np.array(overlaps(first)))
            done["read"][how] = {**to_plain(report), "bears": bearing(output, ranking), "p": p}
        kept["readers"][name] = done
        RESULT.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        RESULT.with_suffix(".md").write_text(table(kept))


def main(steps: int, overrides: list[str]) -> None:
    settings = json.loads(json.dumps(BASE))
    settings["train"]["max_steps"] = steps
    for override in overrides:
        apply(settings, override)
    run = parse_run(settings, "reading")
    store = Store(run.store.path)
    folder = Path(run.store.path) / "reading"
    folder.mkdir(parents=True, exist_ok=True)
    ranking = folder / "dev.jsonl"
    kept = {"hardware": hardware(), "steps": steps, "readers": {}}
    if RESULT.is_file() and (found := json.loads(RESULT.read_text()))["steps"] == steps:
        kept = found
    with session.connect(run.resources):
        if not ranking.is_file():
            prepare.prepare(run.prepare, store)
            write_questions(store, "reading_asked", read_questions(store, "reading_dev")[:QUESTIONS])
            mine.mine(run, said("mine"))
            reindex.index(run, said("index"))
            retrieve.retrieve(run, "reading_asked", ranking, "jsonl", said("retrieve"))
        measure(run, folder, ranking, kept, settings)
    print(table(kept))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 120, sys.argv[2:])
