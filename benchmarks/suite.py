"""Run the suite: every part in a process of its own, one after the other, and one table of all.

    python benchmarks/suite.py                # parts not on file for this commit; --all: all parts
    python benchmarks/suite.py search router  # only these parts

Raw samples and the part's seconds are in results/bench/<part>.json, the seconds of all in results/bench/suite.json, the
table in results/bench.md. A part that fails is named at the end, and the table has the others. Measurements of
uncommitted files never count as on file.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from machine import DIRTY, RESULTS, ROOT, hardware
from measure import FOLDER, KINDS, Bar, in_grid, markdown, measurement, target

PARTS = ("search", "approximate", "encoding", "training", "refinement", "router", "growth", "simulate")
OTHERS = (
    "search-avx2",
    "kernels",
    "encoding-no-bf16",
    "training-no-bf16",
    "encoding-large",
    "encoding-large-no-bf16",
    "encoding-memory",
    "encoding-backends",
    "encoding-backends-no-amx",
    "first_hour",
    "first_hour-cold",
    "load",
    "engines",
    "engines-200000",
    "engines-avx2",
    "filters",
    "updates",
    "updates-sizes",
    "gpu",
)
"""Measured by commands of their own (README.md), or on other processors."""
MINUTES = 30
WITH_AVX512 = "with AVX-512, 36 GB/s and 267 GFLOP/s a thread: notes.md"
SLOWER = "with AVX-512, 22 GB/s and 117 GFLOP/s a thread: notes.md"
AVX2_ALONE = "with AVX2 alone: notes.md"
KINDS_IN_NOTES = {
    "engines 2c5d70c1": WITH_AVX512,
    "router 481ada13": SLOWER,
    "filters 7b71b983": SLOWER,
    "refinement 9669f279": AVX2_ALONE,
    "updates 9669f279": AVX2_ALONE,
}
"""Part and commit of results whose files do not hold the kind of processor, and what notes.md says it was."""
HEAD = """# How fast, how small, how linear

Most figures are ratios of two things measured in turn in one run on one machine, or shares of the least time that the
machine's measured memory bandwidth or matrix rate allows; the others are seconds, bytes and counts against a limit. A
sample is one run; cases are interleaved; what is compared is the median over rounds of the ratio within a round. Each
share of updates and each size of growth was run once. Made by `make bench`; raw samples are in [bench/](bench).

Parts were measured on different machines, and each names its own in its last line. "AMD EPYC" stands for at least three
kinds, which older results do not tell apart; [notes](../notes.md#exact-and-approximate-search) have what the same
programs reach on a slower one, where fewer bars are met.
"""


def files(part: str) -> list[Path]:
    """Return the files that the part's program may have written: others on other kinds of processors."""
    names = (part, *(f"{part}-{kind}" for kind in KINDS))
    return [path for name in names if (path := FOLDER / f"{name}.json").exists()]


def on_file(part: str) -> bool:
    now = hardware()["commit"]
    commits = [json.loads(path.read_text())["hardware"]["commit"] for path in files(part)]
    return now in commits and not now.endswith(DIRTY)


def keep_seconds(part: str, seconds: float) -> None:
    """Store the seconds of the part's process beside its newest samples, including creating environments of peers."""
    path = max(files(part), key=lambda file: file.stat().st_mtime_ns)
    path.write_text(json.dumps({**json.loads(path.read_text()), "seconds": round(seconds, 1)}, indent=2) + "\n")


def took(reports: dict[str, dict[str, Any]]) -> str:
    """Return the row of the whole suite's time, once every part has its own; store it as JSON too."""
    seconds = {part: report["seconds"] for part, report in reports.items() if part in PARTS and "seconds" in report}
    total = sum(seconds.values())
    (FOLDER / "suite.json").write_text(json.dumps({"seconds": seconds, "total": total}, indent=2) + "\n")
    whole = Bar("all parts, one after the other", total / 60, MINUTES, at_least=False, unit="minutes")
    lacking = [part for part in PARTS if part not in seconds]
    result = f"{measurement(asdict(whole))}, asked {target(asdict(whole))}"
    if lacking:
        result = f"seconds of {', '.join(lacking)} not measured yet"
    return f"| {whole.what} | {result} | |"


def collect() -> Path:
    """Write the page of all parts on file: first how many bars each part meets, and which it misses."""
    parts = [part for part in (*PARTS, *OTHERS) if _is_on_file(part)]
    reports = {part: read_report(part) for part in parts}
    lines = [HEAD, "| part | bars met | missed |", "|---|---|---|"]
    lines += [_summary(report) for report in reports.values()]
    missing = [part for part in PARTS if part not in reports]
    lines += [f"| {part} | not measured yet: every bar of `python benchmarks/{part}.py` | |" for part in missing]
    if "gpu" not in reports:
        lines.append("| gpu | not measured, no GPU: every bar of `python benchmarks/gpu.py` | |")
    lines += [took(reports), ""]
    path = RESULTS / "bench.md"
    path.write_text("\n".join([*lines, *(markdown(report) for report in reports.values())]))
    return path


def read_report(part: str) -> dict[str, Any]:
    """Read a part's results, with the kind of processor by notes.md if only they have it."""
    report = json.loads((FOLDER / f"{part}.json").read_text())
    kind = KINDS_IN_NOTES.get(f"{part} {report['hardware'].get('commit')}")
    return {**report, "hardware": {"kind": kind, **report["hardware"]}} if kind else report


def _summary(report: Mapping[str, Any]) -> str:
    """Return the row of a part: a link, the bars that are met, and those that are missed, unless a grid shows them."""
    anchor = re.sub(r"[^\w -]", "", report["title"].lower()).replace(" ", "-")
    bars, misses = report["bars"], [bar for bar in report["bars"] if not bar["met"]]
    names = [f"{bar['what']}: {measurement(bar)}, asked {target(bar)}" for bar in misses]
    if in_grid([bar["what"] for bar in bars]):
        names = ["bold in the part's table"] * bool(misses)
    share = f"{len(bars) - len(misses)} of {len(bars)}" if bars else "none asked"
    return f"| [{report['title']}](#{anchor}) | {share} | {'; '.join(names)} |"


def _is_on_file(part: str) -> bool:
    return (FOLDER / f"{part}.json").exists()


def main(names: list[str]) -> int:
    again = "--all" in names
    parts = [name for name in names if name != "--all"]
    unknown = [name for name in parts if name not in PARTS]
    if unknown:
        print(f"no part is called {unknown[0]!r}; the parts are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    failures = []
    for part in parts or PARTS:
        if not parts and not again and on_file(part):
            print(f"{part}: on file for this commit", flush=True)
            continue
        print(f"{part}: measuring", flush=True)
        start_s = time.monotonic()
        if subprocess.run([sys.executable, f"benchmarks/{part}.py"], cwd=ROOT).returncode:
            failures.append(part)
        else:
            keep_seconds(part, time.monotonic() - start_s)
        print(f"{part}: {time.monotonic() - start_s:.0f} s", flush=True)
    print(f"the table is {collect().relative_to(ROOT)}")
    if failures:
        print(f"failed: {', '.join(failures)}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
