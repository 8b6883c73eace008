"""Measure retrieval quality on SQuAD: every system over the same passages, one table with 95 % intervals.

    python benchmarks/quality.py              # untrained systems, refinement, and the encoders trained on SQuAD
    python benchmarks/quality.py --encoder    # only train the encoder that configs/squad.yaml names: an hour

Each step is an ordinary command, printed before it runs and stored with its figures. A step whose result is on file is
not run again. Results go to benchmarks/results/quality.json and .md; the ranks of every question by every system go to
quality.parquet, which `mvr-ray compare` reads. Study `decided` compares trained readouts.
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
METRICS = [*(f"{kind}/top-{k}" for kind in ("answer", "gold") for k in (1, 5, 20, 100)), "gold/ndcg@10"]
CONFIG = "configs/squad.yaml"
UNTRAINED = "index.encoder=untrained"
MEAN = ["encoder.strategy=mean", "index.name=full-mean", UNTRAINED]
SNIPPETS = ["encoder.strategy=snippet_means", "index.name=full-snippet-means", UNTRAINED]
FREE = "refine.max_heldout_loss=100"
LINEAR = ["refine.method=linear", "refine.positives=all", "refine.keep_length=true", FREE]
RAW = ["refine.method=linear", "refine.positives=all", "refine.keep_length=false", FREE]
FEEDBACK = ["refine.method=feedback_views", "refine.feedback_weight=0.8", "refine.feedback_clusters=1", FREE]
TWO = ["refine.method=feedback_views", "refine.feedback_weight=0.8", "refine.feedback_clusters=2", FREE]
WITH_WORDS = ["index.lexical=true", "search.hybrid=30"]
TRAINED = ["index.encoder=trained", *WITH_WORDS]
CRANFIELD = [
    "prepare.corpus=cranfield",
    "prepare.sources=[{path: ../shared/data/cranfield, format: beir, split: test, questions: cranfield}]",
    "prepare.splits=[]",
    "evaluate.questions=[cranfield]",
    "evaluate.k=[1, 5, 10, 20, 100]",
]
EFFICIENT_QA = [
    "prepare.corpus=summaries",
    "prepare.sources=[{path: ../shared/data/wiki_vital/psgs_vital.tsv.gz, format: dpr_tsv}, "
    "{path: ../shared/data/nq_open/NQ-open.efficientqa.dev.1.1.jsonl, format: nq_open, questions: efficientqa}]",
    "prepare.splits=[]",
    "evaluate.questions=[efficientqa]",
]
BM25 = "BM25"


class System(NamedTuple):
    """A row of the table: its commands, each a stage with its overrides; `evaluate` comes last. `than` is the row to
    compare with. Hybrid searches have a row of their own, compared with BM25. `corpus` overrides the one of
    configs/squad.yaml."""

    name: str
    commands: list[tuple[str, list[str]]]
    than: str = ""
    corpus: str = ""

    @property
    def key(self) -> str:
        return f"{self.name}, {self.corpus}" if self.corpus else self.name

    def row(self, system: str) -> str:
        """Return the table's name of a system of the evaluation."""
        if system == "bm25":
            return BM25
        return f"{self.name}, with BM25" if system.startswith("bm25 + ") else self.name


ONE, EIGHT, LEARNED = "one mean vector", "snippet means, 8 views", "snippet means, trained on SQuAD"
MINED = "snippet means, trained on SQuAD with mined negatives"
FIRST = ["encoder.name=squad-first", "index.name=squad-first"]
ENCODER: list[tuple[str, list[str]]] = [  # of the name in configs/squad.yaml
    ("train", [*FIRST, "train.max_steps=457"]),
    ("index", [*FIRST, "index.encoder=trained"]),
    ("mine", [*FIRST, "mine.method=index", "mine.max_passage_questions=1"]),
    ("train", ["train.hard_negatives=train_mined", "train.num_hard_negatives=1", "train.max_steps=914"]),
]


def refinement_system(name: str, base: list[str], how: list[str], than: str) -> System:
    """Return a system that refines version 1 of an index, whatever was published since."""
    back = ("versions rollback 1", base)
    return System(name, [back, ("refine", [*base, *how]), ("evaluate", base)], than)


def elsewhere(corpus: str, source: list[str]) -> list[System]:
    """Return the encoder before and after training, on passages and questions unlike its training data."""
    before = [*source, "encoder.strategy=snippet_means", f"index.name={corpus.lower()}-snippet-means", UNTRAINED]
    before += WITH_WORDS
    with_bm25 = [*before, "evaluate.bm25=true"]
    return [
        System(EIGHT, [("prepare", source), ("index", before), ("evaluate", with_bm25)], BM25, corpus),
        System(LEARNED, newest_elsewhere("trained", corpus, source), EIGHT, corpus),
    ]


def newest_elsewhere(index: str, corpus: str, source: list[str]) -> list[tuple[str, list[str]]]:
    """Return the commands that measure the encoder trained last on such passages and questions."""
    overrides = [*source, f"index.name={corpus.lower()}-{index}", *TRAINED]
    return [("index", overrides), ("evaluate", overrides)]


SQUAD_PLAIN = ["index.name=full-trained", *TRAINED]
SQUAD_MINED = ["index.name=full-mined", *TRAINED]
SYSTEMS = [
    System(ONE, [("index", MEAN), ("evaluate", [*MEAN, "evaluate.bm25=true"])], BM25),
    refinement_system("one mean vector, linear form", MEAN, LINEAR, ONE),
    refinement_system("one mean vector, linear form, raw as in the paper", MEAN, RAW, ONE),
    refinement_system("one mean vector, feedback views", MEAN, FEEDBACK, ONE),
    refinement_system("one mean vector, two feedback views a passage", MEAN, TWO, ONE),
    System(EIGHT, [("index", SNIPPETS), ("evaluate", SNIPPETS)], ONE),
    refinement_system("snippet means, linear form", SNIPPETS, LINEAR, EIGHT),
    refinement_system("snippet means, linear form, raw as in the paper", SNIPPETS, RAW, EIGHT),
    refinement_system("snippet means, feedback views", SNIPPETS, FEEDBACK, EIGHT),
    refinement_system("snippet means, two feedback views a passage", SNIPPETS, TWO, EIGHT),
    System(LEARNED, [("train", []), ("index", SQUAD_PLAIN), ("evaluate", SQUAD_PLAIN)], EIGHT),
    *elsewhere("Cranfield", CRANFIELD),
    *elsewhere("EfficientQA", EFFICIENT_QA),
    System(MINED, [*ENCODER, ("index", SQUAD_MINED), ("evaluate", SQUAD_MINED)], LEARNED),
    *(
        System(MINED, [("prepare", source), *newest_elsewhere("mined", corpus, source)], EIGHT, corpus)
        for corpus, source in (("Cranfield", CRANFIELD), ("EfficientQA", EFFICIENT_QA))
    ),
]


def command_line(stage: str, overrides: list[str]) -> str:
    """Return the command line of a stage."""
    name, *action = stage.split()
    return shlex.join(["mvr-ray", name, CONFIG, *action, *overrides])


def run_stage(stage: str, overrides: list[str]) -> dict[str, Any]:
    name, *action = stage.split()
    command = [str(Path(sys.executable).parent / "mvr-ray"), name, CONFIG, *action, *overrides, "--json"]
    print("$", command_line(stage, overrides), flush=True)
    start_s = time.monotonic()
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode:
        sys.exit(f"{stage} failed with status {result.returncode}")
    return {
        "command": command_line(stage, overrides),
        "seconds": round(time.monotonic() - start_s, 1),
        "hardware": hardware(),
        "report": json.loads(result.stdout),
    }


def commands(stages: list[tuple[str, list[str]]], extra: list[str]) -> list[tuple[str, list[str]]]:
    """Add to every stage's overrides those that all systems share, and `extra`."""
    common = ["evaluate.bm25=false", "index.precision=bf16"]
    common += ["search.hybrid=null", "index.lexical=false", *extra]  # a row is what the vectors of one system find
    return [(stage, [*(extra if stage in ("prepare", "train") else common), *overrides]) for stage, overrides in stages]


def keep_ranks(path: Path, system: System, report: dict[str, Any]) -> None:
    """Add a system's ranks of every question to the file of all systems."""
    ranks = read_question_ranks(ROOT / report.pop("questions_file"))
    new = [part._replace(system=system.row(part.system)) for part in ranks]
    new_keys = {(part.system, part.questions) for part in new}
    old: list[QuestionRanks] = read_question_ranks(path) if path.is_file() else []
    rest = [part for part in old if (part.system, part.questions) not in new_keys]
    path.write_bytes(question_ranks_bytes([*rest, *new]))


def change(path: Path, questions: str, name: str, than: str) -> str:
    """Return the difference in top-1 with its interval and the p of the paired test that flips articles."""
    if not than:
        return ""
    row, *_ = compare(f"{path}:{than}", f"{path}:{name}", [1], question_set=questions)
    return f"{row.difference:+.1f} ({row.low:+.1f} to {row.high:+.1f}), p {row.p:.2g}, against {than}"


def table(results: dict[str, Any], ranks: Path) -> str:
    """Return one Markdown table per question set: systems down, metrics across, 95 % intervals in brackets."""
    systems = {system.key: system for system in SYSTEMS}
    count: dict[str, int] = {}
    tables: dict[str, dict[str, dict[str, str]]] = {}
    than: dict[tuple[str, str], str] = {}
    for key, steps in results["systems"].items():
        for row in steps[-1]["report"]["rows"]:
            name = systems[key].row(row["system"])
            cell = f"{100 * row['value']:.1f} ({100 * row['low']:.1f}-{100 * row['high']:.1f})"
            tables.setdefault(row["questions"], {}).setdefault(name, {})[row["metric"]] = cell
            than[row["questions"], name] = {BM25: "", systems[key].name: systems[key].than}.get(name, BM25)
            count[row["questions"]] = row["n"]
    report = next(iter(results["systems"].values()))[-1]["report"]
    lines = [
        f"# Retrieval quality: {report['passages']:,} passages",
        "",
        ", ".join(f"{key} {value}" for key, value in results["hardware"].items()) + f". Made by `python {SCRIPT}`.",
        "",
        "Shares in percent, 95 % intervals for which whole articles are resampled. `answer`: a hit contains an answer;",
        "`gold`: a hit is the question's own passage. dev_known are the labelled questions of refinement, so its",
        "refined rows are transductive; dev_other are other questions of the same passages, dev_unseen questions of",
        "articles that neither refinement nor training saw. cranfield: questions about 1,398 abstracts on aeronautics;",
        "efficientqa: Natural Questions over the summaries, which hold the answers of few. The last column compares",
        "answer/top-1 (gold/top-1 on Cranfield) on the same questions: difference in points, its interval, and the",
        f"paired test, which flips whole articles (`mvr-ray compare` on {ranks.name}).",
        "",
        PROVENANCE,
    ]
    for questions, rows in tables.items():
        metrics = [metric for metric in METRICS if any(metric in row for row in rows.values())]
        lines += [
            "",
            f"## {questions}, n = {count[questions]:,}",
            "",
            "| system | " + " | ".join([*metrics, "change of top-1"]) + " |",
            "|---" * (2 + len(metrics)) + "|",
        ]
        for name, row in rows.items():
            cells = [*(row.get(m, "") for m in metrics), change(ranks, questions, name, than[questions, name])]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "## Commands", ""]
    for key, steps in results["systems"].items():
        lines.append(f"- {key}")
        for step in steps:
            where = step.get("hardware", results["hardware"])
            note = [f"{step['seconds']:.0f} s"]
            if where != results["hardware"]:
                note += [where["date"], f"commit {where['commit']}", where["processor"]]
            lines.append(f"  - `{step['command']}` ({', '.join(note)})")
    return "\n".join(lines) + "\n"


def main(extra: list[str]) -> None:
    """Measure all systems; `extra` are overrides for every command, such as store.path=/mnt/store. After `--encoder`
    only the encoder that configs/squad.yaml names is trained."""
    if extra[:1] == ["--encoder"]:
        for stage, overrides in commands([("prepare", []), *ENCODER], extra[1:]):
            run_stage(stage, overrides)
        return
    path = RESULTS / "quality.json"
    ranks = path.with_suffix(".parquet")
    results = json.loads(path.read_text()) if path.is_file() else {"hardware": hardware(), "systems": {}}
    run_stage("prepare", extra)
    for system in SYSTEMS:
        if system.key in results["systems"]:
            continue
        steps = [run_stage(stage, overrides) for stage, overrides in commands(system.commands, extra)]
        keep_ranks(ranks, system, steps[-1]["report"])
        done_systems = {**results["systems"], system.key: steps}
        results["systems"] = {one.key: done_systems[one.key] for one in SYSTEMS if one.key in done_systems}
        path.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
        tables = table(results, ranks)
        path.with_suffix(".md").write_text(tables)
        print(tables, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
