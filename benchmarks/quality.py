"""Retrieval quality on SQuAD: every system over the same passages, one table with 95 % intervals.

    python benchmarks/quality.py    # untrained systems and refinement over all paragraphs and summaries

Each step is a command that anyone can type, printed before it runs and kept beside its figures. A step whose result
is on file is not run again. Results go to benchmarks/results/quality.json and .md; what every system found for
every question goes to quality.parquet, which `mvr-ray compare` reads. Trained encoders are compared by study `decided`.
"""

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from machine import RESULTS, ROOT, hardware

from mvr_ray.comparison import compare
from mvr_ray.store.formats.question_ranks import QuestionRanks, question_ranks_bytes, read_question_ranks

SCRIPT = "benchmarks/quality.py"
PROVENANCE = (
    "The model card of all-MiniLM-L6-v2 lists SQuAD's training pairs, NQ and TriviaQA among its training data, read "
    "through mean pooling: readouts other than the mean (`[CLS]`, viewers) start far behind on it."
)
METRICS = [f"{kind}/top-{k}" for kind in ("answer", "gold") for k in (1, 5, 20, 100)]
CONFIG = "configs/squad.yaml"
UNTRAINED = "index.encoder=untrained"
MEAN = ["encoder.strategy=mean", "index.name=full-mean", UNTRAINED]
SNIPPETS = ["encoder.strategy=snippet_means", "index.name=full-snippet-means", UNTRAINED]
FREE = "refine.max_heldout_loss=100"
LINEAR = ["refine.method=linear", "refine.positives=all", "refine.keep_length=true", FREE]
RAW = ["refine.method=linear", "refine.positives=all", "refine.keep_length=false", FREE]
FEEDBACK = ["refine.method=feedback_views", "refine.feedback_weight=0.8", "refine.feedback_clusters=1", FREE]
TWO = ["refine.method=feedback_views", "refine.feedback_weight=0.8", "refine.feedback_clusters=2", FREE]
BM25 = "BM25"


class System(NamedTuple):
    """A row of the table: the commands that make it, each a stage with its overrides; `evaluate` comes last. `than` is
    the row that it is compared with."""

    name: str
    commands: list[tuple[str, list[str]]]
    than: str = ""


ONE, EIGHT = "one mean vector", "snippet means, 8 views"


def refined(name: str, base: list[str], how: list[str], than: str) -> System:
    """Refine version 1 of an index, whatever has been published since."""
    back = ("versions rollback 1", base)
    return System(name, [back, ("refine", [*base, *how]), ("evaluate", base)], than)


SYSTEMS = [
    System(ONE, [("index", MEAN), ("evaluate", [*MEAN, "evaluate.bm25=true"])], BM25),
    refined("one mean vector, linear form", MEAN, LINEAR, ONE),
    refined("one mean vector, linear form, raw as in the paper", MEAN, RAW, ONE),
    refined("one mean vector, feedback views", MEAN, FEEDBACK, ONE),
    refined("one mean vector, two feedback views a passage", MEAN, TWO, ONE),
    System(EIGHT, [("index", SNIPPETS), ("evaluate", SNIPPETS)], ONE),
    refined("snippet means, linear form", SNIPPETS, LINEAR, EIGHT),
    refined("snippet means, linear form, raw as in the paper", SNIPPETS, RAW, EIGHT),
    refined("snippet means, feedback views", SNIPPETS, FEEDBACK, EIGHT),
    refined("snippet means, two feedback views a passage", SNIPPETS, TWO, EIGHT),
]


def typed(stage: str, overrides: list[str]) -> str:
    """The command of a stage as anyone would type it."""
    name, *action = stage.split()
    return shlex.join(["mvr-ray", name, CONFIG, *action, *overrides])


def run_stage(stage: str, overrides: list[str]) -> dict[str, Any]:
    name, *action = stage.split()
    command = [str(Path(sys.executable).parent / "mvr-ray"), name, CONFIG, *action, *overrides, "--json"]
    print("$", typed(stage, overrides), flush=True)
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{stage} failed with status {done.returncode}")
    return {
        "command": typed(stage, overrides),
        "seconds": round(time.monotonic() - started, 1),
        "report": json.loads(done.stdout),
    }


def commands(system: System, extra: list[str]) -> list[tuple[str, list[str]]]:
    """What is run for a system, stage by stage; `extra` are overrides for every command."""
    common = ["evaluate.bm25=false", "index.precision=bf16"]
    common += ["search.hybrid=null", "index.lexical=false", *extra]  # a row is what the vectors of one system find
    return [(stage, [*common, *overrides]) for stage, overrides in system.commands]


def keep_ranks(path: Path, name: str, evaluated: dict[str, Any]) -> None:
    """Add what a system found for every question to the file of all systems."""
    new = [
        part._replace(system=BM25 if part.system == "bm25" else name)
        for part in read_question_ranks(ROOT / evaluated.pop("questions_file"))
    ]
    replaced = {part.system for part in new}
    old: list[QuestionRanks] = read_question_ranks(path) if path.is_file() else []
    path.write_bytes(question_ranks_bytes([*(part for part in old if part.system not in replaced), *new]))


def change(path: Path, questions: str, name: str, than: str) -> str:
    """Difference in top-1 with its interval and the p of the paired test, for which articles are flipped."""
    if not than:
        return ""
    [row] = compare(f"{path}:{than}", f"{path}:{name}", [1], question_set=questions)
    return f"{row.difference:+.1f} ({row.low:+.1f} to {row.high:+.1f}), p {row.p:.2g}, against {than}"


def table(kept: dict[str, Any], ranks: Path) -> str:
    """One Markdown table a question set: systems down, metrics across, 95 % intervals in brackets."""
    than = {system.name: system.than for system in SYSTEMS}
    count: dict[str, int] = {}
    found: dict[str, dict[str, dict[str, str]]] = {}
    for name, done in kept["systems"].items():
        for row in done[-1]["report"]["rows"]:
            system = "BM25" if row["system"] == "bm25" else name
            cell = f"{100 * row['value']:.1f} ({100 * row['low']:.1f}-{100 * row['high']:.1f})"
            found.setdefault(row["questions"], {}).setdefault(system, {})[row["metric"]] = cell
            count[row["questions"]] = row["n"]
    report = next(iter(kept["systems"].values()))[-1]["report"]
    lines = [
        f"# Retrieval quality: {report['passages']:,} passages",
        "",
        ", ".join(f"{key} {value}" for key, value in kept["hardware"].items()) + f". Made by `python {SCRIPT}`.",
        "",
        "Shares in percent, 95 % intervals for which whole articles are resampled. `answer`: a hit contains an answer;",
        "`gold`: a hit is the question's own passage. dev_known are the labelled questions of refinement, so its",
        "refined rows are transductive; dev_other are other questions of the same passages, dev_unseen questions of",
        "articles that refinement never saw. The last column compares answer/top-1 on the same questions: difference",
        "in points, its interval, and the paired test, which flips whole articles (`mvr-ray compare` on",
        f"{ranks.name}).",
        "",
        PROVENANCE,
    ]
    for questions, systems in found.items():
        lines += [
            "",
            f"## {questions}, n = {count[questions]:,}",
            "",
            "| system | " + " | ".join([*METRICS, "change of answer/top-1"]) + " |",
            "|---" * (2 + len(METRICS)) + "|",
        ]
        for name, row in systems.items():
            cells = [*(row.get(m, "") for m in METRICS), change(ranks, questions, name, than.get(name, ""))]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "## Commands", ""]
    for name, done in kept["systems"].items():
        lines += [f"- {name}", *(f"  - `{step['command']}` ({step['seconds']:.0f} s)" for step in done)]
    return "\n".join(lines) + "\n"


def main(extra: list[str]) -> None:
    """`extra` are overrides for every command, such as store.path=/mnt/store."""
    path = RESULTS / "quality.json"
    ranks = path.with_suffix(".parquet")
    kept = json.loads(path.read_text()) if path.is_file() else {"hardware": hardware(), "systems": {}}
    run_stage("prepare", extra)
    for system in SYSTEMS:
        if system.name in kept["systems"]:
            continue
        done = [run_stage(stage, overrides) for stage, overrides in commands(system, extra)]
        keep_ranks(ranks, system.name, done[-1]["report"])
        done_systems = {**kept["systems"], system.name: done}
        kept["systems"] = {one.name: done_systems[one.name] for one in SYSTEMS if one.name in done_systems}
        path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
        path.with_suffix(".md").write_text(table(kept, ranks))
        print(table(kept, ranks), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
